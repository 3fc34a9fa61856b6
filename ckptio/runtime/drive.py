"""Run what goes back and forth between the caller's thread and the engine's loop.

What touches the caller's objects happens on the caller's thread; what reads and writes
happens on the engine's loop. It is written once, as a generator that hands out coroutines
to run over there; a coroutine and a blocking function drive it the same way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from ckptio.engine.context import EngineContext

if TYPE_CHECKING:
    from ckptio.runtime.core import EngineCore

T = TypeVar("T")
Step = Callable[[EngineContext], Awaitable[Any]]
#: How a load goes: it yields what to run on the engine's loop, and is sent the result.
Flow = Generator[Step, Any, T]


async def drive(core: EngineCore, flow: Flow[T], name: str) -> T:
    """Run a flow from a coroutine of another loop."""
    try:
        step = next(flow)
        while True:
            try:
                result = await core.call(step, name)
            except Exception as error:  # the flow may know what to do with it
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        flow.close()


def drive_blocking(core: EngineCore, flow: Flow[T], name: str) -> T:
    """Run a flow from a thread without a loop, or that may block one."""
    try:
        step = next(flow)
        while True:
            try:
                result = core.call_blocking(step, name)
            except Exception as error:  # the flow may know what to do with it
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        flow.close()
