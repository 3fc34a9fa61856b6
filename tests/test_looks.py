"""Looks that are given up."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING

import pytest

from ckptio import _looks
from ckptio._looks import run_or_give_up

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_a_look_that_takes_too_long_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """Its thread goes on, and nobody hears of its end, be it an error."""
    goes_on = threading.Event()
    assert await run_or_give_up(lambda: 1, 60.0, "look", "here") == 1
    with pytest.raises(ZeroDivisionError):
        await run_or_give_up(lambda: 1 // 0, 60.0, "look", "here")

    def hang() -> int:
        goes_on.wait()
        return 1 // 0

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await run_or_give_up(hang, 0.01, "hung", "here")
        [thread] = [t for t in threading.enumerate() if t.name.startswith("hung")]
        goes_on.set()
        thread.join()
        await asyncio.sleep(0)

    await asyncio.to_thread(lambda: asyncio.run(give_up()))
    gc.collect()
    assert caplog.records == []


async def test_no_other_look_begins_while_one_hangs() -> None:
    """Not at the same place: it is waited for. What is found is found after that."""
    goes_on = threading.Event()
    begun: list[str] = []

    def look_at(place: str) -> Callable[[], bool]:
        def look() -> bool:
            begun.append(place)
            return goes_on.wait()

        return look

    for _ in range(3):
        with pytest.raises(TimeoutError):
            await run_or_give_up(look_at("here"), 0.01, "hung", "here")
    assert begun == ["here"]
    with pytest.raises(TimeoutError):
        await run_or_give_up(look_at("there"), 0.01, "hung", "there")
    assert begun == ["here", "there"]
    waiting = asyncio.create_task(run_or_give_up(look_at("again"), 60.0, "hung", "here"))
    await asyncio.sleep(0)
    goes_on.set()
    assert await waiting
    assert begun == ["here", "there", "again"]
    assert await run_or_give_up(look_at("last"), 60.0, "hung", "there")
    for thread in threading.enumerate():
        if thread.name == "hung":
            thread.join()
    assert _looks._given_up == {}


async def test_what_is_stopped_as_it_waits_leaves_a_look_that_hangs_to_itself() -> None:
    """As one that is given up does."""
    goes_on, has_begun = threading.Event(), threading.Event()

    def look() -> bool:
        has_begun.set()
        return goes_on.wait()

    task = asyncio.create_task(run_or_give_up(look, 60.0, "hung", "here"))
    await asyncio.to_thread(has_begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        await run_or_give_up(lambda: 1, 0.01, "hung", "here")
    goes_on.set()
    assert await run_or_give_up(lambda: 1, 60.0, "hung", "here") == 1


async def test_where_no_thread_begins_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop does not look itself: it would hang."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    begun: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TimeoutError):
            await run_or_give_up(lambda: begun.append(1), 60.0, "look", "here")
    assert begun == []
