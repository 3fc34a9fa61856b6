"""Waiting for threads and for other loops without abandoning them.

A thread that holds a buffer is outlived, not abandoned. Cancel a task that awaits
`asyncio.to_thread(write, buffer)` and let its `finally` give the buffer back: the thread
is still writing, and what lands in the file is the next owner's bytes. So `outlive`, and
what is built on it here, waits until the other side is done, and raises the cancellation only
then. `wait` and `readable` leave the other side alone, and stop waiting at once.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import anyio

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from concurrent.futures import Executor
    from types import TracebackType

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")
F = TypeVar("F", bound="Callable[..., Coroutine[Any, Any, Any]]")

#: Seconds for all that is removed behind an abort: a silent store is not waited for.
GRACE_S = 10.0


def returns_coroutine(function: F) -> F:
    """Mark a function that returns a coroutine: mocks and retries ask whether to await it."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(function)
    function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001  # there it is done so
    return function


async def outlive(future: asyncio.Future[T], on_cancel: Callable[[], object] | None = None) -> T:
    """Wait for `future` to the end, even when cancelled meanwhile.

    An interrupt (a signal's handler that raises) is like a cancellation, if it comes here.

    Args:
        future: What to wait for. It is never cancelled from here.
        on_cancel: Called once, at the first cancellation; asks the other side to stop.

    Returns:
        The result of `future`.

    Raises:
        asyncio.CancelledError: The caller was cancelled; `future` is done by then.
    """
    try:
        try:
            await wait((future,))
        except GeneratorExit:  # nobody runs the caller any more, so nothing can be waited for
            raise
        except BaseException:
            if on_cancel is not None:
                on_cancel()
            await wait_out(future)
            raise
        return future.result()
    finally:
        # its error refers to this frame, or to a cancellation that does, if the caller raises that
        # error as it handles the cancellation: no reference cycle
        del future, on_cancel


async def wait(futures: Iterable[asyncio.Future[Any]], *, timeout_s: float | None = None) -> None:
    """Do as `asyncio.wait`, so that a cancellation keeps nothing of the caller in memory.

    From Python 3.14 on its traceback has a frame of asyncio's that has the task, which has the
    cancellation: a reference cycle, which keeps what the caller's frames have, a state for one.
    """
    try:
        await asyncio.wait(futures, timeout=timeout_s)
    except asyncio.CancelledError as cancelled:
        cancelled.__traceback__ = None
        raise


async def wait_out(future: asyncio.Future[Any]) -> None:
    """Wait for `future` however often the waiter is cancelled. Its error is seen, and not raised.

    The shielded scope keeps an anyio cancel scope, which cancels again on every turn of
    the loop, from making this a busy wait; native cancellations are caught one by one.
    """
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait((future,))
            except asyncio.CancelledError:  # the caller raises the first one, at the end
                continue
    if not future.cancelled():
        future.exception()  # so that asyncio does not report it; the caller is leaving


async def run_blocking(
    executor: Executor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run `function` on a thread of `executor` and wait until the thread is done with it.

    Args:
        executor: Whose threads to use.
        function: What to call. It may hold buffers of the caller: they are free when
            this returns or raises, not before.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Raises:
        asyncio.CancelledError: The caller was cancelled; the thread is done by then.
    """
    loop = asyncio.get_running_loop()
    return await outlive(
        loop.run_in_executor(executor, functools.partial(function, *args, **kwargs))
    )


async def run_unless_cancelled(
    executor: Executor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run `function` as `run_blocking` does; given up if no thread has begun it.

    For work of which a queue is full, and which nobody needs once the caller is cancelled.
    What has to happen in any case, closing a file for one, goes through `run_blocking`.

    Raises:
        asyncio.CancelledError: The caller was cancelled; no thread runs it any more.
    """
    call = _Call(functools.partial(function, *args, **kwargs))
    loop = asyncio.get_running_loop()
    return await outlive(loop.run_in_executor(executor, call), on_cancel=call.give_up)


class _Call(Generic[T]):
    """A call that is queued for a thread; given up before it begins, it does nothing."""

    def __init__(self, function: functools.partial[T]) -> None:
        self.func = function
        self._is_given_up = False

    def give_up(self) -> None:
        self._is_given_up = True

    def __call__(self) -> T:
        if self._is_given_up:
            raise asyncio.CancelledError
        return self.func()


async def shielded(coroutine: Coroutine[Any, Any, T], *, grace_s: float | None = None) -> T:
    """Run `coroutine` to its end, even when the caller is cancelled meanwhile.

    For short sequences of library awaits that would leave a thread or a file behind if
    they were cut in the middle.

    Args:
        coroutine: What to run.
        grace_s: Seconds behind the caller's cancellation after which it is cancelled as well; it
            is waited for then, too. Never if not given.
    """
    task = asyncio.ensure_future(coroutine)
    stop: Callable[[], object] | None = None
    if grace_s is not None:
        stop = functools.partial(asyncio.get_running_loop().call_later, grace_s, task.cancel)
    try:
        return await outlive(task, stop)
    finally:
        del task, stop  # as in `outlive`


def take_back_cancel() -> None:
    """Have this task go on after a cancellation that it caught, as if there had been none.

    For one that came after a commit: whoever hears of a cancellation may count on it that nothing
    has changed, and here something has.
    """
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


async def run_all(coroutines: Iterable[Coroutine[Any, Any, T]], name: str) -> list[T]:
    """Run coroutines at once, as tasks of one name, and give what they return, in order.

    Raises:
        BaseException: The failure that came first, itself; all have ended by then.
    """
    tasks: list[asyncio.Task[T]] = []
    try:
        async with Siblings() as group:
            tasks += [group.create_task(coroutine, name=name) for coroutine in coroutines]
        return [task.result() for task in tasks]
    finally:
        tasks.clear()  # as in `Siblings`: an error that ended one has this frame


async def run_some(
    function: Callable[[S], Coroutine[Any, Any, T]], items: Sequence[S], max_at_once: int, name: str
) -> list[T]:
    """Call `function` with each item, so many at once, and give what it returns, in order.

    As `run_all` does; but few tasks take one item after another, from the first to the last.

    Raises:
        BaseException: The failure that came first, itself; all have ended by then.
    """
    found: dict[int, T] = {}
    rest = iter(enumerate(items))

    async def work() -> None:
        for index, item in rest:
            found[index] = await function(item)

    await run_all([work() for _ in items[:max_at_once]], name)
    return [found[index] for index in range(len(items))]


async def readable(connection: socket.socket) -> None:
    """Wait until there is something to read: bytes, descriptors, or somebody to accept.

    `loop.sock_accept` takes a connection also as its caller is cancelled, and keeps it to itself.
    """
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


class Siblings(asyncio.TaskGroup):
    """A task group that raises the failure that came first, itself, when all have ended.

    That is the one that cancelled the others. The group refers to no task and no error then.
    asyncio's own does, before Python 3.13: an error that leaves it refers to the frame that has the
    group, which has the task that has the error. That is a reference cycle, and all that the frames
    have (a state that was loaded in part) stays in memory until Python collects garbage. A
    cancellation that leaves it has the frame, which has the cancellation, in 3.13, too.
    """

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for all; raise the first failure."""
        failure: BaseException | None = None
        # asyncio lists what the block failed of behind what ended the tasks that it stopped
        is_first = isinstance(error, Exception) and not getattr(self, "_aborting", False)
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as errors:
            failure = error if is_first else first_failure(errors)
            errors.__traceback__ = None  # a frame of asyncio's has them
        except asyncio.CancelledError as cancelled:
            cancelled.__traceback__ = None  # that has this one, too
            raise
        finally:
            vars(self).update(_parent_task=None, _errors=[])
            del error, trace
        if failure is None:
            return
        context = failure.__context__, failure.__suppress_context__
        try:
            raise failure
        finally:  # what it came of is its own, not what the block was stopped by
            failure.__context__, failure.__suppress_context__ = context
            del failure, context


def first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Give the failure that came first in `group`, the one that cancelled its siblings.

    `asyncio.TaskGroup` lists errors in the order in which tasks ended. Groups inside
    groups are opened.
    """
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
