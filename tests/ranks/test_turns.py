from __future__ import annotations

import asyncio
import threading

import pytest

from ckptio.ranks.turns import Turns, is_next

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")


async def test_turns_come_in_the_order_of_the_calls() -> None:
    """Whose queue has another name waits for nobody."""
    turns, done = Turns(), []

    async def visit(name: str, number: int) -> None:
        with turns.queue(name) as ahead:
            assert await is_next(ahead, 10)
            await asyncio.sleep(0)
            done.append((name, number))

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(visit("a", number))
        tasks.create_task(visit("b", 0))
    assert [d for d in done if d[0] == "a"] == [("a", 0), ("a", 1), ("a", 2)]
    assert done.index(("b", 0)) < done.index(("a", 1))
    with turns.queue("a") as ahead:
        assert ahead is None


async def test_who_leaves_a_queue_before_its_turn_lets_nobody_pass() -> None:
    """The next one waits for those that were ahead of both."""
    turns = Turns()
    with turns.queue("a"):
        with turns.queue("a") as ahead:
            assert not await is_next(ahead, 0)
        with turns.queue("a") as ahead:
            assert ahead is not None
            assert not ahead.done()
        with turns.queue("a") as last:
            assert not await is_next(last, 0)
    assert await is_next(last, 0)


async def test_a_turn_is_waited_for_across_threads_and_cancels() -> None:
    """Who is cancelled while it waits takes nothing from the one ahead, or the one behind."""
    turns, may_end, is_in = Turns(), threading.Event(), threading.Event()

    def hold() -> None:
        with turns.queue("a"):
            is_in.set()
            may_end.wait(10)

    async with asyncio.TaskGroup() as tasks:
        holding = tasks.create_task(asyncio.to_thread(hold))
        await asyncio.to_thread(is_in.wait, 10)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                with turns.queue("a") as ahead:
                    await is_next(ahead, 10)
        with turns.queue("a") as ahead:
            waiting = tasks.create_task(is_next(ahead, 10))
            await asyncio.sleep(0)
            assert not waiting.done()
            may_end.set()
            assert await waiting
        await holding


async def test_a_forked_process_waits_for_nobody_of_its_parent() -> None:
    """Who was in the queue there ends there."""
    turns = Turns()
    with turns.queue("a"):
        turns.forget()  # as the child does
        with turns.queue("a") as ahead:
            assert ahead is None
