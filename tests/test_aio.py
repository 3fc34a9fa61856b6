from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio._aio import (
    Siblings,
    first_failure,
    outlive,
    run_blocking,
    run_some,
    run_unless_cancelled,
    shielded,
)
from ckptio._threads import Threads
from ckptio.testing import DeadlockError, VirtualLoop, run_virtual
from tests.interrupts import Held, interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_a_blocking_call_returns_what_it_returns() -> None:
    """Arguments, result and error pass through."""
    with ThreadPoolExecutor(1) as threads:
        assert await run_blocking(threads, divmod, 7, 3) == (2, 1)
        assert await run_blocking(threads, int, "11", base=2) == 3
        with pytest.raises(ZeroDivisionError):
            await run_blocking(threads, divmod, 1, 0)


@pytest.mark.parametrize("num_cancels", [1, 2, 5])
async def test_a_cancelled_caller_waits_for_its_thread(num_cancels: int) -> None:
    """However often it is cancelled, it is cancelled only when the thread is done."""
    held = Held()
    with ThreadPoolExecutor(1) as threads:
        task = asyncio.create_task(run_blocking(threads, held))
        await held.started()
        for _ in range(num_cancels):
            task.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            assert not task.done()
        held.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held.ended


async def test_a_cancelled_anyio_scope_waits_for_its_thread() -> None:
    """A cancel scope, which cancels again on every turn, waits for the thread as well."""
    held = Held()
    scope = anyio.CancelScope()

    async def cancel_and_let_go() -> None:
        await held.started()
        scope.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not held.ended
        held.go_on.set()

    with ThreadPoolExecutor(1) as threads:
        other = asyncio.create_task(cancel_and_let_go())
        with scope:
            await run_blocking(threads, held)
        assert held.ended
        await other
    assert scope.cancelled_caught


async def test_an_error_after_a_cancellation_is_not_reported_as_lost() -> None:
    """The caller leaves with its cancellation; the thread's error was looked at."""

    def fail() -> None:
        held()
        raise OSError("late")

    held = Held()
    lost: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    with ThreadPoolExecutor(1) as threads:
        task = asyncio.create_task(run_blocking(threads, fail))
        await held.started()
        task.cancel()
        held.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    del task
    await asyncio.sleep(0)
    assert lost == []


async def test_the_other_side_is_told_once() -> None:
    """`on_cancel` is called at the first cancellation, and not again."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    told: list[int] = []
    task = asyncio.create_task(outlive(future, on_cancel=lambda: told.append(1)))
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert told == [1]
    future.set_result(3)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == [1]


async def test_an_interrupt_waits_as_a_cancellation_does() -> None:
    """It may come where the waiter runs."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    told: list[int] = []

    async def wait() -> None:
        with pytest.raises(KeyboardInterrupt):
            await interrupted(outlive(future, on_cancel=lambda: told.append(1)))
        assert future.done()

    task = asyncio.create_task(wait())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    assert told == [1]
    future.set_result(3)
    await task


async def test_nobody_waits_where_nobody_runs_the_waiter() -> None:
    """A coroutine that is given up cannot, and does not try to."""
    waiting = outlive(asyncio.get_running_loop().create_future(), on_cancel=lambda: 1 // 0)
    waiting.send(None)
    waiting.close()


async def test_a_future_that_was_cancelled_cancels_its_waiter() -> None:
    """Nothing hangs on a future that will never have a result."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outlive(future)


async def test_a_shielded_coroutine_runs_to_its_end() -> None:
    """Cancelling who waits does not cut it in the middle."""
    steps = []
    gate = asyncio.Event()

    async def work() -> None:
        steps.append("begin")
        await gate.wait()
        steps.append("end")

    task = asyncio.create_task(shielded(work()))
    while not steps:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["begin", "end"]


@given(num=st.integers(1, 6), first=st.integers(0, 5), seed=st.integers(0, 10_000))
def test_the_first_failure_of_a_group_comes_out(num: int, first: int, seed: int) -> None:
    """Of tasks that fail one after another, nested or not, the earliest is given."""
    first %= num

    async def fail(at_s: float, error: Exception) -> None:
        await asyncio.sleep(at_s)
        raise error

    async def nested(at_s: float, error: Exception) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(at_s, error))

    async def scenario() -> BaseException:
        with contextlib.suppress(asyncio.CancelledError):
            try:
                async with asyncio.TaskGroup() as group:
                    for i in range(num):
                        group.create_task(nested(0 if i == first else 1 + i, ValueError(i)))
            except BaseExceptionGroup as errors:
                return first_failure(errors)
        raise AssertionError

    assert str(run_virtual(scenario(), seed=seed)) == str(first)


def test_a_deadlock_raises_at_once_and_names_who_waits() -> None:
    """A loop on which nobody can ever wake up does not hang."""

    async def wait_forever() -> None:
        await asyncio.get_running_loop().create_future()

    async def scenario() -> None:
        task = asyncio.create_task(wait_forever(), name="the forgotten one")
        await task

    with pytest.raises(DeadlockError, match="the forgotten one"):
        run_virtual(scenario(), seed=0)


def trace(seed: int) -> list[object]:
    """Record a schedule with timers, ready callbacks and calls in an executor."""
    steps: list[object] = []

    async def work(name: str) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(3):
            await asyncio.sleep(0)
            steps.append(name)
        await loop.run_in_executor(None, steps.append, (name, loop.time()))

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            for name in "abcd":
                group.create_task(work(name))

    run_virtual(scenario(), seed=seed)
    return steps


def test_a_seed_is_a_schedule() -> None:
    """The same seed gives the same order and the same times; others give others."""
    assert trace(1) == trace(1)
    assert len({str(trace(seed)) for seed in range(10)}) > 5


def test_virtual_time_costs_nothing_and_goes_forward() -> None:
    """A week passes at once, and timers ring in their order."""
    rung = []

    async def scenario() -> float:
        async with asyncio.TaskGroup() as group:
            for at_s in (3.0, 1.0, 2.0):

                async def ring(at_s: float = at_s) -> None:
                    await asyncio.sleep(at_s)
                    rung.append(at_s)

                group.create_task(ring())
        await asyncio.sleep(7 * 86400)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario(), seed=0) >= 7 * 86400
    assert rung == [1.0, 2.0, 3.0]


def test_an_error_nobody_saw_fails_the_run() -> None:
    """What asyncio would only log is raised at the end."""

    async def scenario() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_virtual(scenario(), seed=0)


def abandon(call: Callable[[], object]) -> asyncio.Future[object]:
    return asyncio.get_running_loop().run_in_executor(None, call)


@pytest.mark.parametrize("seed", range(10))
def test_a_call_that_was_abandoned_still_happens(seed: int) -> None:
    """As with a thread, leaving a call does not stop it."""
    happened: list[int] = []

    async def scenario() -> None:
        task = asyncio.ensure_future(abandon(lambda: happened.append(1)))
        task.cancel()
        await asyncio.sleep(1)

    run_virtual(scenario(), seed=seed)
    assert happened == [1]


def test_calls_in_flight_are_counted_by_function() -> None:
    """The loop tells how many calls of a function were under way at a time."""

    async def scenario() -> VirtualLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(run_blocking(ThreadPoolExecutor(1), divmod, 7, 3))
        return loop

    assert run_virtual(scenario(), seed=0).peak_calls == {"divmod": 3}


class TwoThreads(ThreadPoolExecutor):
    """An executor that says how many threads it has."""

    max_threads = 2


@pytest.mark.parametrize("seed", range(5))
def test_calls_keep_to_the_threads_of_their_executor(seed: int) -> None:
    """No more calls are under way than an executor has threads."""

    async def scenario() -> VirtualLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        executor = TwoThreads(2)
        async with asyncio.TaskGroup() as group:
            for _ in range(9):
                group.create_task(run_blocking(executor, divmod, 7, 3))
        return loop

    assert run_virtual(scenario(), seed=seed).peak_calls == {"divmod": 2}


async def test_a_call_that_has_not_begun_is_given_up() -> None:
    """Cancelling who waits for a thread takes the call out of the queue's work."""
    begun, release = threading.Event(), threading.Event()
    happened: list[int] = []
    executor = Threads(1, "test")

    def hold() -> None:
        begun.set()
        release.wait()

    holding = asyncio.ensure_future(run_blocking(executor, hold))
    await asyncio.to_thread(begun.wait)
    queued = asyncio.ensure_future(run_unless_cancelled(executor, happened.append, 1))
    await asyncio.sleep(0)
    queued.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await queued
    await holding
    executor.shutdown()
    assert happened == []


async def test_siblings_raise_what_failed_first() -> None:
    """In a task or in the block, whatever comes of stopping the others."""

    async def fail_when_stopped(started: asyncio.Event) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            raise KeyError("stopped")

    async def run(*, in_block: bool) -> None:
        async with Siblings() as group:
            started = asyncio.Event()
            group.create_task(fail_when_stopped(started))
            await started.wait()
            if not in_block:
                group.create_task(fail())
                await asyncio.sleep(60)
            raise ValueError("first")

    async def fail() -> None:
        raise ValueError("first")

    for in_block in (True, False):
        with pytest.raises(ValueError, match="first"):
            await run(in_block=in_block)


async def test_siblings_leave_a_failure_what_it_came_of() -> None:
    """Not what the block was stopped by, which has the tasks that have the failure."""

    async def fail() -> None:
        try:
            dict[str, int]()["before"]
        except KeyError:
            raise ValueError("then")  # noqa: B904  # as code of others does

    with pytest.raises(ValueError, match="then") as caught:
        async with Siblings() as group:
            group.create_task(fail())
            await asyncio.sleep(60)
    assert isinstance(caught.value.__context__, KeyError)
    assert not caught.value.__suppress_context__


async def test_calls_for_items_begin_in_order_and_few_at_a_time() -> None:
    """The answers are in order, too; a failure ends the rest."""
    begun: list[int] = []
    num_now = num_most = 0

    async def call(item: int) -> int:
        nonlocal num_now, num_most
        begun.append(item)
        num_now += 1
        num_most = max(num_most, num_now)
        for _ in range(item % 3):
            await asyncio.sleep(0)
        num_now -= 1
        return 1 // (item - 20) if item > 9 else -item

    assert await run_some(call, range(10), 4, "call") == [-item for item in range(10)]
    assert (begun, num_most) == ([*range(10)], 4)
    assert await run_some(call, [], 4, "call") == []
    with pytest.raises(ZeroDivisionError):
        await run_some(call, [20, *range(30, 100)], 2, "call")
    assert len(begun) < 20
