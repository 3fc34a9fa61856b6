"""Leaving an engine while a call of several steps is between two of them."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

import ckptio
from ckptio.errors import EngineClosedError
from ckptio.runtime.core import EngineCore
from ckptio.runtime.currents import CallerCurrents
from ckptio.runtime.drive import drive, drive_blocking
from tests.programs import run_program
from tests.rig import SMALL, assert_same, begin_close, random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckptio.engine.context import EngineContext
    from ckptio.runtime.drive import Flow

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")

STUCK = """
import sys, threading, torch, ckptio.sync
path = sys.argv[1] + "/a"
class Stuck:
    def state_dict(self):
        return {"t": torch.ones(3)}
    def load_state_dict(self, state):
        there.set()
        threading.Event().wait()
there = threading.Event()
engine = ckptio.sync.Engine().__enter__()
engine.save({"m": Stuck()}, path)
threading.Thread(target=lambda: engine.load(path, into={"m": Stuck()}), daemon=True).start()
there.wait()
"""


@pytest.fixture
def core() -> Iterator[EngineCore]:
    core = EngineCore(SMALL, None)
    core.start()
    yield core
    core.close(abort=True)


async def one(_: EngineContext) -> int:
    return 1


def two_steps(core: EngineCore, between: Callable[[], object]) -> Flow[int]:
    """Go to the loop twice, and ask the engine what callers ask it, in between."""
    first = yield one
    between()
    assert core.context.ranks.world_size == 1
    second = yield one
    return int(first + second)


def test_closing_waits_for_a_thread_between_two_steps(core: EngineCore) -> None:
    """Nothing else begins meanwhile."""
    closers: list[threading.Thread] = []

    def between() -> None:
        closers.append(begin_close(core))
        closers[0].join(0.2)
        assert closers[0].is_alive()
        with pytest.raises(EngineClosedError):
            core.call_blocking(one, "another")
        with pytest.raises(EngineClosedError):
            drive_blocking(core, two_steps(core, lambda: None), "another flow")

    assert drive_blocking(core, two_steps(core, between), "flow") == 2
    closers[0].join(10)
    assert not closers[0].is_alive()


async def test_leaving_waits_for_loads_of_the_same_loop(tmp_path: Path) -> None:
    """Wherever each of them is: its task goes on, and the block is left behind it."""
    state = random_state([3000] * 40)
    await ckptio.save(state, tmp_path / "c", config=SMALL)
    for delay_ms in range(0, 16, 1):
        async with ckptio.Engine(SMALL) as engine:
            task = asyncio.create_task(engine.load(tmp_path / "c"))
            await asyncio.sleep(delay_ms / 1000)  # any moment of it is meant
            if not delay_ms:
                await asyncio.sleep(0)
        assert_same(await task, state)


def test_closing_on_the_thread_that_drives_does_not_wait_for_itself(core: EngineCore) -> None:
    """As a signal's handler may: what it interrupted ends with an error."""
    with pytest.raises(EngineClosedError):
        drive_blocking(core, two_steps(core, core.close), "flow")


def test_closing_does_not_wait_for_a_loop_that_has_stopped(core: EngineCore) -> None:
    """Nobody takes the next step there; if it runs again, that is refused."""
    loop = asyncio.new_event_loop()
    done = threading.Event()

    async def first(_: EngineContext) -> int:
        done.set()
        return 1

    def flow() -> Flow[int]:
        yield first
        return int((yield one))

    task = loop.create_task(drive(core, flow(), "flow", CallerCurrents()))
    loop.run_until_complete(asyncio.sleep(0))  # the task has begun, and the loop goes no further
    done.wait()
    closer = begin_close(core)
    closer.join(10)
    assert not closer.is_alive()
    with pytest.raises(EngineClosedError):
        loop.run_until_complete(task)
    loop.close()


@pytest.mark.parametrize("how", ["abort", "abort later"])
def test_leaving_by_an_error_stops_a_flow(core: EngineCore, how: str) -> None:
    """Closing ends though the flow's own thread takes its time, and it has no further step."""

    def between() -> None:
        closer = begin_close(core, abort=how == "abort")
        core.abort_in_flight()
        closer.join(10)
        assert not closer.is_alive()

    with pytest.raises(EngineClosedError):
        drive_blocking(core, two_steps(core, between), "flow")


def test_the_end_of_a_program_waits_for_no_flow_of_a_daemon(tmp_path: Path) -> None:
    """It may be in the user's code for ever, and nobody gets what it would return."""
    run_program(STUCK, tmp_path)
