"""From threads that read foreign formats to the loop on which an object store lives.

Readers of foreign formats block: they unpickle, parse and call torch between one read and
the next. Over an object store each has a thread of its own for the length of a call, and
waits there for requests that run on the engine's loop. No thread of the engine waits so,
since a store may need those for its requests.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from ckptio._own_thread import in_own_thread
from ckptio._threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

T = TypeVar("T")
V = TypeVar("V")


class WaitsError(BaseException):
    """What was called on the loop would wait for it there.

    No `Exception`: those are what a damaged file gives, to whoever reads one.
    """


class Bridge:
    """Runs what blocks on threads, and what it waits for on the loop.

    Args:
        max_threads: Threads of one call that wait at a time.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._lock = threading.Lock()
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._num_stopped = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Call `function` on a thread of its own, and wait until it is done.

        Cancelling this cancels the requests that it waits for, and those of every other call of
        this bridge that is under way: whoever makes several at a time cancels all of them.
        """
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        stopped: list[None] = []

        def stop() -> None:
            with self._lock:
                self._num_stopped += 1
                stopped.append(None)
                for future in self._waiting:
                    future.cancel()

        try:
            return await in_own_thread(function, stop)
        finally:
            self._num_stopped -= len(stopped)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it on the calling thread.

        Raises:
            concurrent.futures.CancelledError: What called this was cancelled.
            WaitsError: This is the loop's own thread.
        """
        assert self._loop is not None  # noqa: S101  # called below `run`
        if threading.get_ident() == self._thread:
            coroutine.close()
            raise WaitsError
        with self._lock:
            if self._num_stopped:
                coroutine.close()
                raise concurrent.futures.CancelledError
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._waiting.add(future)
        try:
            return future.result()
        finally:
            with self._lock:
                self._waiting.discard(future)

    def each(self, function: Callable[[V], T], values: Sequence[V]) -> list[T]:
        """Call `function` with each value, some at a time.

        Each thread has values that follow each other: what is read for one of them, as a block of
        a file is, serves the next, and no other thread waits for it.

        Raises:
            Exception: The first failure in the order of the values; behind it no further call is
                begun, but for those that its failure overtook.
            WaitsError: This is the loop's own thread, and it would wait.
        """
        if len(values) <= 1:
            return [function(value) for value in values]
        if threading.get_ident() == self._thread:
            raise WaitsError
        share = -(-len(values) // self._max_threads)
        failed: list[int] = []

        def work(start: int) -> list[T]:
            found: list[T] = []
            for value in values[start : start + share]:
                if any(before < start for before in failed):
                    break
                try:
                    found.append(function(value))
                except BaseException:
                    failed.append(start)
                    raise
            return found

        starts = range(0, len(values), share)
        with Threads(len(starts), "ckptio-foreign") as threads:
            futures = [threads.submit(work, start) for start in starts]
            try:
                return [found for future in futures for found in future.result()]
            finally:
                failed.append(-1)  # where the caller was interrupted
