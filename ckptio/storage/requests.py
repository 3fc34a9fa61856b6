"""How often a request to an object store is tried, and how many run at a time.

Only what may get better is tried again: throttling, errors of the server, connections
that broke, answers that were cut short or never came. The wait before another try is
drawn from nothing to twice as long as the last ("full jitter": Brooker, "Exponential
backoff and jitter", AWS architecture blog, 2015), so that ranks which were refused
together do not come back together. A try has a limit of time, a request a budget of
tries, and everything that is asked for one save or load a common deadline: when nothing
has been answered for that long since the first failure, nothing is tried again. Every further
try is an event. What nobody answers for a while, as a mistyped endpoint, is said in the log, once
for each save or load: it may take minutes until it is an error.

The number of requests at a time follows what the store can take: half as many when it
asks to slow down, or when what it is sent takes too long, one more after as many answers as
there are requests (AIMD: Chiu and Jain, 1989). Requests that were under way together and
were refused together count once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import random
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from ckptio._aio import GRACE_S, shielded
from ckptio.errors import StorageError
from ckptio.events import RequestRetried
from ckptio.storage.keys import shown_url
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectMissingError,
    RefusedError,
    StoreError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.storage.store import ObjectInfo, ObjectStore

_log = logging.getLogger("ckptio")

T = TypeVar("T")

#: Seconds without an answer after which the log says so; whoever just has a look has gone by then.
_PATIENCE_S = 10.0
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 20.0
_NO_TIME = "no time is left to ask"


def settling_wait_s(tries: int) -> float:
    """Say how long to wait before a store is asked again what became of a request."""
    return min(2.0**tries / 10, 5.0)


class RequestLimit:
    """How many requests to one store run at a time; shared by all that use the store.

    Args:
        max_requests: At most as many.
    """

    def __init__(self, max_requests: int) -> None:
        self._max = max_requests
        self._allowed = float(max_requests)
        self._running = 0
        self._round = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def allowed(self) -> int:
        """How many may run now."""
        return max(1, int(self._allowed))

    @contextlib.asynccontextmanager
    async def slot(self, ends_s: float | None = None) -> AsyncIterator[int]:
        """Hold a place; wait for one, in turn.

        Args:
            ends_s: When to stop waiting, by the loop's clock; never if not given.

        Yields:
            What `slow_down` takes.

        Raises:
            TransientError: There was no place until then.
        """
        if self._running >= self.allowed or self._waiters:
            await self._wait(ends_s)
        else:
            self._running += 1
        try:
            yield self._round
        finally:
            self._running -= 1
            self._wake()

    async def _wait(self, ends_s: float | None) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout_at(ends_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self._running -= 1  # it was given a place just then
            elif waiter in self._waiters:  # else it was passed over, as one that had left
                self._waiters.remove(waiter)
            self._wake()
            if isinstance(error, TimeoutError):
                raise TransientError(_NO_TIME) from error
            raise

    def _wake(self) -> None:
        while self._waiters and self._running < self.allowed:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._running += 1
                waiter.set_result(None)

    def slow_down(self, sent_in: int) -> None:
        """Let half as many run, once for all that were refused together.

        Args:
            sent_in: What `slot` gave to the request that was refused.
        """
        if sent_in == self._round:
            self._round += 1
            self._allowed = max(1.0, self._allowed / 2)

    def answered(self) -> None:
        """Let a little more run: one more after as many answers as there are places."""
        self._allowed = min(float(self._max), self._allowed + 1 / max(1.0, self._allowed))
        self._wake()


class Requests:
    """Carries requests out, for one save or one load.

    Args:
        path: The checkpoint; for events and errors.
        config: Limits of time and of tries.
        limit: How many run at a time.
        emit: Takes events.
        rng: Draws how long to wait.
    """

    def __init__(
        self,
        path: str,
        config: CheckpointConfig,
        limit: RequestLimit,
        emit: Callable[[Event], None],
        rng: random.Random | None = None,
    ) -> None:
        self.path = path
        self._config = config
        self._limit = limit
        self._emit = emit
        self._rng = rng or random.Random()  # noqa: S311  # nothing secret
        self._first_failure_s: float | None = None  # since the last answer
        self._ends_s: float | None = None  # of `brief` ones, by the loop's clock
        self._longest_s = config.request_timeout_s
        self._is_told = False  # the log has said that nothing is answered, or is not to
        self._is_answered = False  # some request was, ever

    def brief(self) -> Requests:
        """Give requests of the same kind that all end within ten seconds from now, or sooner.

        For what somebody waits for who has given up: clean-up behind an abort. Waiting for a place
        counts, too: others may have all of them, on a store that is away. A request that gets no
        answer takes a third of that time, and leaves some for others.
        """
        requests = Requests(self.path, self._config, self._limit, self._emit, self._rng)
        ends_s = asyncio.get_running_loop().time() + GRACE_S
        requests._ends_s = ends_s if self._ends_s is None else min(ends_s, self._ends_s)
        requests._longest_s = min(self._longest_s, GRACE_S / 3)
        requests._is_told = True  # whoever has given up waits for no better
        return requests

    async def run(
        self,
        what: str,
        key: str,
        request: Callable[[], Awaitable[T]],
        *,
        outlive: bool = False,
        has_body: bool = False,
        has_condition: bool = False,
    ) -> T:
        """Carry a request out, and try it again as long as that may help.

        Args:
            what: What it does, for messages: "cannot <what>".
            key: The object.
            request: Sends it; called once for each try, and has to be right to repeat.
            outlive: See `once`.
            has_body: See `once`.
            has_condition: The request has a condition. If it has none, an answer that says that a
                condition does not hold makes no sense, and is a failure like others.

        Raises:
            StorageError: It failed for good; names the object and the cause.
            ObjectMissingError: There is no such object.
            ConditionFailedError: The condition of the request does not hold, if it has one.
        """
        tries, began_s = 0, asyncio.get_running_loop().time()
        send = request if has_body else functools.partial(self._ask, what, key, request)
        while True:
            tries += 1
            try:
                result = await self.once(send, outlive=outlive, has_body=has_body)
            except TransientError as error:
                wait_s = self._rng.uniform(
                    0, min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(tries, 20))
                )
                if tries > self._config.max_retries or self._is_late(wait_s):
                    raise self.failed(what, key, error, tries) from error
                if asyncio.get_running_loop().time() - began_s >= _PATIENCE_S:
                    self._tell(what, key, error.problem)
                self._emit(
                    RequestRetried(
                        path=self.path,
                        operation=what,
                        object=shown_url(key),
                        num_tries=tries,
                        wait_s=wait_s,
                        error=error,
                    )
                )
                await asyncio.sleep(wait_s)
            except RefusedError as error:
                raise self.failed(what, key, error, tries) from error
            except StoreError as error:  # an answer for the caller: the store is there
                self._first_failure_s, self._is_answered = None, True
                if isinstance(error, ConditionFailedError) and not has_condition:
                    raise self.failed(what, key, error, tries) from error
                raise
            else:
                self._first_failure_s, self._is_answered = None, True
                return result

    async def _ask(self, what: str, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Send a request that has little to send, in its turn: tell if it gets no answer.

        Not where one has come, ever: later, much may be on its way.
        """
        if self._is_answered or self._is_told:
            return await request()
        problem = f"no answer within {_PATIENCE_S:g} s"
        timer = asyncio.get_running_loop().call_later(_PATIENCE_S, self._tell, what, key, problem)
        try:
            return await request()
        finally:
            timer.cancel()

    def _tell(self, what: str, key: str, problem: str) -> None:
        """Log that what has not worked is tried again. Once."""
        if not self._is_told:
            self._is_told = True
            _log.warning(
                "cannot %s %r of %r yet: %s; it is tried again for up to %g s (retry_timeout_s) or"
                " %d times; are the URL, the endpoint and the network right?",
                *(what, shown_url(key), shown_url(self.path), problem),
                *(self._config.retry_timeout_s, self._config.max_retries),
            )

    async def look(self, store: ObjectStore, key: str) -> ObjectInfo | None:
        """Look at an object; `None` if there is none.

        Raises:
            StorageError: It cannot be told.
        """
        try:
            return await self.run("look at", key, lambda: store.head(key))
        except ObjectMissingError:
            return None

    async def must(
        self,
        what: str,
        key: str,
        request: Callable[[], Awaitable[T]],
        *,
        outlive: bool = False,
        has_body: bool = False,
    ) -> T:
        """Carry a request out as `run`, and take every failure for a `StorageError`.

        Raises:
            StorageError: It failed; names the object and the cause.
        """
        try:
            return await self.run(what, key, request, outlive=outlive, has_body=has_body)
        except StoreError as error:
            raise self.failed(what, key, error) from error

    async def once(
        self,
        request: Callable[[], Awaitable[T]],
        *,
        outlive: bool = False,
        has_body: bool = False,
    ) -> T:
        """Send a request once, in its turn and within the limit of time.

        Args:
            request: Sends it.
            outlive: When cancelled, wait for its end all the same, once it was sent: it makes
                something that whoever cleans up has to find.
            has_body: It sends much. If that takes too long, the way may be narrow: then fewer
                run at a time, and each is sooner done.

        Raises:
            StoreError: As the store says; a stalled one is a `TransientError`.
        """
        async with self._limit.slot(self._ends_s) as sent_in:
            timed = self._timed(request, has_body=has_body)
            try:
                result = await (shielded(timed) if outlive else timed)
            except TransientError as error:
                if error.slow_down:
                    self._limit.slow_down(sent_in)
                raise
        self._limit.answered()
        return result

    async def _timed(self, request: Callable[[], Awaitable[T]], *, has_body: bool) -> T:
        timeout_s = self._longest_s
        if self._ends_s is not None:
            timeout_s = min(timeout_s, self._ends_s - asyncio.get_running_loop().time())
            if timeout_s <= 0:
                raise TransientError(_NO_TIME)
        try:
            async with asyncio.timeout(timeout_s):
                return await request()
        except TimeoutError as error:
            problem = f"no answer within {timeout_s:g} s"
            raise TransientError(problem, slow_down=has_body) from error

    def _is_late(self, wait_s: float) -> bool:
        """Whether the deadline passes before another try."""
        now = asyncio.get_running_loop().time()
        if self._first_failure_s is None:
            self._first_failure_s = now
        ends_s = self._first_failure_s + self._config.retry_timeout_s
        return now + wait_s > (ends_s if self._ends_s is None else min(ends_s, self._ends_s))

    def failed(self, what: str, key: str, error: StoreError, tries: int = 1) -> StorageError:
        """Make the error that says what could not be done, to which object, and why."""
        often = f" ({tries} tries)" if tries > 1 else ""
        code = errno.ETIMEDOUT if isinstance(error, TransientError) else errno.EIO
        return StorageError(
            f"cannot {what} {shown_url(key)!r}: {error.problem}{often}", path=self.path, code=code
        )
