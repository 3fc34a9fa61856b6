"""Threads that wait for the loop which started them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from ckptio.foreign.bridge import Bridge, WaitsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")


async def test_a_thread_waits_for_coroutines_of_the_loop() -> None:
    """Several at a time, as many as it may; results are in order."""
    bridge = Bridge(3)
    running = most = 0

    async def square(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(20):
            await asyncio.sleep(0)
        running -= 1
        return number * number

    def work() -> list[int]:
        return bridge.each(lambda number: bridge.wait(square(number)), range(20))

    assert await bridge.run(work) == [number * number for number in range(20)]
    assert most <= 3
    all_three = threading.Barrier(3, timeout=60)
    await bridge.run(lambda: bridge.each(lambda _: all_three.wait(), range(3)))
    assert await bridge.run(lambda: bridge.each(str, [])) == []


async def test_the_first_failure_is_raised_and_ends_the_rest() -> None:
    """What has not begun does not begin."""
    bridge = Bridge(2)
    begun: list[int] = []

    async def fail(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise ZeroDivisionError
        await asyncio.sleep(0)

    def work() -> None:
        bridge.each(lambda number: bridge.wait(fail(number)), range(10_000))

    with pytest.raises(ZeroDivisionError):
        await bridge.run(work)
    assert len(begun) < 10_000


@pytest.mark.parametrize("num_calls", [1, 5])
async def test_cancelling_ends_what_is_waited_for(num_calls: int) -> None:
    """When it is raised no thread is left; what comes next is served as ever."""
    bridge = Bridge(2)
    waiting = threading.Event()
    ended: list[int] = []

    async def wait_long(number: int) -> None:
        waiting.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(number)

    def work() -> None:
        bridge.each(lambda number: bridge.wait(wait_long(number)), range(num_calls))

    task = asyncio.create_task(bridge.run(work))
    while not waiting.is_set():
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert 1 <= len(ended) <= 2

    async def answer() -> int:
        return 5

    assert await bridge.run(lambda: bridge.wait(answer())) == 5


async def test_on_the_loop_nothing_is_waited_for() -> None:
    """It would wait for itself: who asks goes to a thread."""
    bridge = Bridge(2)
    await bridge.run(lambda: None)
    with pytest.raises(WaitsError):
        bridge.wait(asyncio.sleep(0))
    with pytest.raises(WaitsError):
        bridge.each(lambda _: bridge.wait(asyncio.sleep(0)), [1, 2])


async def test_values_that_follow_each_other_are_one_threads() -> None:
    """What is read for one serves the next."""
    threads = await Bridge(3).run(lambda: Bridge(3).each(lambda _: threading.get_ident(), range(9)))
    assert [threads[i] == threads[i + 1] for i in (0, 1, 3, 4, 6, 7)] == [True] * 6


class OneByOne:
    """Threads of which each is done before the next one begins."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[[int], Any], start: int) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(start))
        except ZeroDivisionError as error:
            future.set_exception(error)
        return future


def test_a_failure_ends_what_is_behind_it_and_nothing_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not when all that is before it has come to its end."""
    monkeypatch.setattr("ckptio.foreign.bridge.Threads", OneByOne)
    called: list[int] = []

    def call(value: int) -> None:
        called.append(value)
        if value == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Bridge(3).each(call, range(9))
    assert called == [0, 1, 2, 3]
