"""Run what goes back and forth between the caller's thread and the engine's loop.

What touches the caller's objects happens on the caller's thread; what reads and writes
happens on the engine's loop. It is written once, as a generator that hands out coroutines
to run over there; a coroutine and a blocking function drive it the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from ckptio._texts import written
from ckptio.engine.context import EngineContext
from ckptio.runtime.driver import Driver

if TYPE_CHECKING:
    from ckptio.runtime.core import EngineCore
    from ckptio.runtime.currents import CallerCurrents

T = TypeVar("T")
Step = Callable[[EngineContext], Awaitable[Any]]
#: How a load goes: it yields what to run on the engine's loop, and is sent the result.
Flow = Generator[Step, Any, T]


def load_name(path: object) -> str:
    """Name the tasks of a load; what is no path is refused as its flow begins."""
    return f"load {written(path)}"


async def drive(core: EngineCore, flow: Flow[T], name: str, currents: CallerCurrents) -> T:
    """Run a flow from a coroutine of another loop. Leaving the engine waits for all of it.

    Args:
        core: The engine.
        flow: What to run.
        name: Of its tasks.
        currents: What was current at the user's call. A coroutine begins when it is first awaited,
            in a task even later than that, and others may have chosen other streams by then.
    """
    driver = Driver(asyncio.current_task())
    try:
        core.begin_flow(driver)
        with currents.entered():
            step = next(flow)
        while True:
            try:
                result = await core.call(step, name, in_flow=True)
            except Exception as error:  # the flow may know what to do with it
                with currents.entered():
                    step = flow.throw(error)
            else:
                with currents.entered():  # other tasks may have chosen others meanwhile
                    step = flow.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        try:
            flow.close()
        finally:
            core.end_flow(driver)


def drive_blocking(core: EngineCore, flow: Flow[T], name: str) -> T:
    """Run a flow from a thread without a loop, or that may block one; else as `drive`."""
    driver = Driver()
    try:
        core.begin_flow(driver)
        step = next(flow)
        while True:
            try:
                result = core.call_blocking(step, name, in_flow=True)
            except Exception as error:  # the flow may know what to do with it
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        try:
            flow.close()
        finally:
            core.end_flow(driver)
