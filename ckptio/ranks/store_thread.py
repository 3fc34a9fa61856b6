"""Ask a job's store, and wait no longer for it than there is time to meet.

Where the process that hosts it has died, torch's store waits as long as the job's own timeout
says, and tries again; nothing stops a call that has begun. So a store is asked on a thread of its
own, and where it does not answer, the call is left to itself. It is the one thread that is
abandoned here: it holds no memory of anybody's but the store, whose next user fails at once. The
engine's threads, which are waited for when it closes, would not do.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import anyio

from ckptio._threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")
P = ParamSpec("P")

#: A call may take so long however late it begins: at the end, too, a rank gives its number back.
_LEAST_S = 5.0


class StoreTimeoutError(TimeoutError):
    """A store does not answer."""


class StoreThread:
    """A daemon thread for calls to a store, one at a time.

    Args:
        until_s: When a store has to have answered, by the clock of the loop.
    """

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._threads = Threads(1, "ckptio-store")
        self._slow: Future[Any] | None = None  # a call that nobody waited for to its end

    @property
    def _is_stuck(self) -> bool:
        return self._slow is not None and not self._slow.done()

    async def ask(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what asks the store.

        Raises:
            StoreTimeoutError: It did not answer, be it to a call before this one.
            asyncio.CancelledError: The caller was cancelled. The call has ended by then, unless
                it took `_LEAST_S` seconds more; then it is left to itself.
        """
        left_s = self._until_s - asyncio.get_running_loop().time()
        return await self._ask(functools.partial(function, *args, **kwargs), max(_LEAST_S, left_s))

    async def ask_briefly(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Call what asks the store for what can be done without; None if it gives nothing soon.

        At once where an earlier call has not come back yet.

        Raises:
            asyncio.CancelledError: As above.
        """
        if self._is_stuck:
            return None
        try:
            return await self._ask(functools.partial(function, *args, **kwargs), _LEAST_S)
        except (RuntimeError, OSError):  # what stores raise; of timeouts, too
            return None

    async def _ask(self, function: Callable[[], T], limit_s: float) -> T:
        work = self._threads.submit(function)
        call = asyncio.wrap_future(work)
        try:
            await asyncio.wait((call,), timeout=limit_s)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await asyncio.wait((call,), timeout=_LEAST_S)
            if call.done():
                call.exception()  # seen, so that asyncio does not report it; the caller is leaving
            raise
        finally:
            call.cancel()  # the thread goes on; the loop, which may be gone then, hears nothing
            if not work.done():
                self._slow = work
        if call.cancelled():
            raise StoreTimeoutError("the store does not answer")
        return call.result()

    def close(self) -> None:
        """Let the thread end, at once or when its call does."""
        self._threads.shutdown(wait=not self._is_stuck)
