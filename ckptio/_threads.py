"""Threads for what blocks, so many at a time, of which those that hang do not count.

A mount whose server is gone keeps every thread that asks it for anything. An engine has few of
them, as a disk is to be asked for few things at a time, and one save would take them all: no other
went on, to any place. So where all are taken, work waits and nothing ends for a while, they count
as hung, and others may begin. Whoever submits work sees to it that one save or load has no more of
it under way, or waiting, than there are threads: behind it come the others'.

(Threads for each mount were rejected: of a path nobody can tell, without asking it, where it is.)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import queue
import threading
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ckptio._failures import as_of_future

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
P = ParamSpec("P")

#: Threads of an engine for what asks a system for little: opening, closing and syncing files,
#: planning, committing. A save, load or copy opens or closes no more files on them at a time.
NUM_ODD_JOBS = 4
#: Seconds after which what asks a storage counts as hung, if other work waits.
HUNG_S = 10.0
#: From so many hung threads of one kind on no more are taken for that.
_MAX_HUNG = 64


def run_into(
    future: concurrent.futures.Future[T],
    function: Callable[P, T],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Call `function` and give its end to a future, unless that was cancelled before."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except BaseException as error:  # whoever waits for the future raises it
        future.set_exception(as_of_future(error))
    else:
        future.set_result(result)
    finally:
        del future  # the error refers to this frame: no reference cycle


class Threads(concurrent.futures.Executor):
    """Daemon threads, made as they are needed: a fixed number, and others for those that hang.

    `ThreadPoolExecutor` takes no more work once the interpreter begins to end, which is
    while a program that did not wait for its last save still has that save to finish.

    Args:
        max_threads: At most this many that do not count as hung, and so the limit of what is done
            at a time.
        name: Prefix of their names.
        hung_s: Seconds after which threads do not count any more, if all have had the same work for
            so long while other work waits; they count again when that has ended. Only work that a
            loop submits sets the clock going. Never if not given.
    """

    def __init__(self, max_threads: int, name: str, hung_s: float | None = None) -> None:
        self.max_threads = max_threads
        self._name = name
        self._hung_s = hung_s
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._hung: set[threading.Thread] = set()
        self._num_begun = self._num_ended = 0
        self._num_idle = self._num_waiting = 0  # of threads, and of work that none has taken
        self._is_watched = False
        self._closed = False

    def submit(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Run `function` on one of the threads, in turn; here, if no thread can begin.

        Raises:
            RuntimeError: `shutdown` was called.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        work = functools.partial(run_into, future, function, *args, **kwargs)
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine's threads have ended")
            if self._num_waiting >= self._num_idle:
                if len(self._threads) - len(self._hung) < self.max_threads:
                    self._begin_thread()
                else:
                    self._watch()
            if self._threads:
                self._num_waiting += 1
                self._work.put(work)
                return future
        work()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  # the base class's signature
        """Let the threads end once the work is done, and wait for that.

        `cancel_futures` cancels nothing here: it only keeps this from waiting.
        """
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._work.put(None)
        if wait and not cancel_futures:
            for thread in threads:
                thread.join()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on one of the threads."""
        return threading.current_thread() in self._threads

    def _begin_thread(self) -> None:
        """Begin one more, if the interpreter, which may be about to end, gives one.

        Some (3.12.1 is one) give none as soon as the main thread has ended. Those that are
        there go on; where there is none, whoever submits does the work itself.
        """
        thread = threading.Thread(
            target=self._serve, name=f"{self._name}-{self._num_begun}", daemon=True
        )
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._threads.append(thread)
            self._num_begun += 1
            self._num_idle += 1

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            with self._lock:
                self._num_idle -= 1
                self._num_waiting -= 1
            work()
            del work  # and with it what it refers to, while waiting for more
            if not self._goes_on():
                return

    def _goes_on(self) -> bool:
        """Count work that has ended; whether the thread that did it waits for more."""
        thread = threading.current_thread()
        with self._lock:
            self._num_ended += 1
            if thread in self._hung:
                self._hung.discard(thread)
                if len(self._threads) - len(self._hung) > self.max_threads:
                    self._threads.remove(thread)  # others have taken its place
                    return False
            self._num_idle += 1
            return True

    def _watch(self) -> None:
        """See to it that somebody looks, in a while, whether all threads hang."""
        if self._is_watched or self._hung_s is None:
            return
        with contextlib.suppress(RuntimeError):  # no loop runs here: another's work will do it
            loop = asyncio.get_running_loop()
            loop.call_later(self._hung_s, self._look, self._num_ended)
            self._is_watched = True

    def _look(self, num_ended: int) -> None:
        """Count threads for hung that have had the same work since then, while others wait."""
        with self._lock:
            self._is_watched = False
            if self._closed or self._num_waiting <= self._num_idle:
                return
            # those that are idle are about to take work, when they get a core
            is_stuck = self._num_ended == num_ended and self._num_idle == 0
            if is_stuck and len(self._hung) < _MAX_HUNG:
                self._hung.update(self._threads)
                for _ in range(min(self._num_waiting, self.max_threads)):
                    self._begin_thread()
            self._watch()


class DefaultThreads(concurrent.futures.ThreadPoolExecutor):
    """`Threads` where asyncio insists on its own kind: `loop.set_default_executor`.

    Libraries look up names and open files on a loop's default threads (`asyncio.to_thread`).
    asyncio's own take no more work when the main thread has ended.

    Args:
        threads: Do the work. They end where the loop's default executor is shut down.
    """

    def __init__(self, threads: Threads) -> None:
        self._own = threads

    def submit(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Run `function` on one of the threads; see `Threads.submit`."""
        return self._own.submit(function, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  # the base class's signature
        """Let the threads end; see `Threads.shutdown`."""
        self._own.shutdown(wait, cancel_futures=cancel_futures)
