"""How something ends, for those who wait for it: threads, and coroutines of any loop.

A `concurrent.futures.Future` does that under a lock in Python. A signal's handler runs on the
main thread wherever that is, so also while it has such a lock, looking whether a save is done.
If the handler saves, it waits for the engine's loop, and that for the lock to say that the save
is done: nobody ever goes on. Seen in 3 of 36 programs whose handler saved. Here nothing is
locked: each step is one operation of the interpreter, and each who waits has a lock of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from ckptio._failures import as_of_future

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_ENDED = "it has ended already"


class Outcome(Generic[T]):
    """The end of something: a result or an error, set once. Every method is thread-safe."""

    __slots__ = ("__weakref__", "_calls", "_ends")

    def __init__(self) -> None:
        #: None or one: of two threads that set an end, `setdefault` lets one be the first.
        self._ends: dict[None, tuple[T | None, BaseException | None]] = {}
        self._calls: deque[Callable[[], object]] = deque()

    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self._ends)

    def set_result(self, result: T) -> None:
        """Say that it has ended well, and with what. Wakes whoever waits.

        Raises:
            asyncio.InvalidStateError: It had ended already.
        """
        if not self._settle(result, None):
            raise asyncio.InvalidStateError(_ENDED)

    def set_exception(self, error: BaseException) -> None:
        """Say that it has failed, and by what. Wakes whoever waits.

        Raises:
            asyncio.InvalidStateError: It had ended already.
        """
        if not self.try_exception(error):
            raise asyncio.InvalidStateError(_ENDED)

    def try_exception(self, error: BaseException) -> bool:
        """Do as `set_exception`, unless it has ended already; whether this is how it ended."""
        return self._settle(None, error)

    def _settle(self, result: T | None, error: BaseException | None) -> bool:
        end = result, error
        # before those who wait are called: whoever comes later sees it
        if self._ends.setdefault(None, end) is not end:
            return False
        with contextlib.suppress(IndexError):
            while True:
                self._calls.popleft()()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended, however it did.

        Returns:
            Whether it has, within `timeout_s` seconds.
        """
        ended = threading.Lock()
        ended.acquire()  # whoever sets the end releases it
        self._calls.append(ended.release)
        try:
            if not self._ends:
                # more than a lock takes, 292 years, is for ever as well
                longest_s = threading.TIMEOUT_MAX
                ended.acquire(
                    timeout=-1 if timeout_s is None else float(max(0, min(timeout_s, longest_s)))
                )
        finally:
            self._drop(ended.release)
        return bool(self._ends)

    def _drop(self, call: Callable[[], object]) -> None:
        """Remove a callback. It may still run once if `_settle` has already taken it.

        That is harmless.
        """
        # ValueError: already removed. IndexError: the deque changed under `remove`
        with contextlib.suppress(ValueError, IndexError):
            self._calls.remove(call)

    def result(self) -> T:
        """Block until it has ended, and give its result.

        Raises:
            BaseException: The error that it ended with.
        """
        self.wait()
        result, error = self._ends[None]
        if error is None:
            return result  # type: ignore[return-value]  # it was set
        try:
            raise error
        finally:
            del error, self  # the error keeps this frame: no reference cycle

    def exception(self) -> BaseException | None:
        """Give the error that it ended with; `None` if it went well or goes on."""
        return self._ends[None][1] if self._ends else None

    def wrapped(self) -> asyncio.Future[T]:
        """Give a future of the running loop that ends likewise. Cancelling it changes nothing."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        # not a partial: what is not in a deque is named, in an error that nobody sees, by its
        # repr, and that of a partial has the result's (0.1 s for a manifest)
        def hand_over() -> None:
            _hand_over(self, future)

        future.add_done_callback(lambda _: self._drop(hand_over))
        self._calls.append(hand_over)
        if self._ends:
            hand_over()
        return future


def _hand_over(outcome: Outcome[T], future: asyncio.Future[T]) -> None:
    """Tell a future of a loop that an outcome has ended. From any thread.

    Twice: a loop forgets the callback that a signal's handler raises out of, and goes on, to cancel
    its tasks and wait for them. (One that raises in the future's own code, as that ends, may still
    cost those who wait for it: nothing outside of asyncio helps them.)

    The first keeps both: a loop has its tasks by weak references, and what waits here may be held
    by nothing else, while the loop is busy. The second does not, for it may lie on a loop that was
    stopped after the first, and would keep a state that was loaded.
    """
    loop, weak = future.get_loop(), (weakref.ref(outcome), weakref.ref(future))
    with contextlib.suppress(RuntimeError):  # the loop has ended, and whoever waited on it
        loop.call_soon_threadsafe(_copy_end, outcome, future)
        loop.call_soon_threadsafe(_copy_end_again, *weak)


def _copy_end_again(
    its_outcome: weakref.ref[Outcome[T]], its_future: weakref.ref[asyncio.Future[T]]
) -> None:
    outcome, future = its_outcome(), its_future()
    if outcome is not None and future is not None:
        _copy_end(outcome, future)


def _copy_end(outcome: Outcome[T], future: asyncio.Future[T]) -> None:
    """End a future as an outcome has ended. On its loop."""
    if future.done():
        return
    error = outcome.exception()
    if error is not None:
        future.set_exception(as_of_future(error))
    else:
        future.set_result(outcome.result())
