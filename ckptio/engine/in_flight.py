"""The steps that are under way on an engine's loop.

An interrupt comes to the main thread wherever it is, so also where a step is handed to the
loop. Nobody on that thread knows then whether its task was born, and what is not waited for
would hold buffers and files when the engine closes. So it is handed over once more, and of
two tasks for one step the second does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from ckptio.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.from_thread import BlockingPortal

    from ckptio.engine.context import EngineContext
    from ckptio.engine.running import Running

T = TypeVar("T")


class InFlight:
    """What an engine has begun and what has not ended."""

    def __init__(self) -> None:
        self._running: set[Running[Any]] = set()

    def begin(
        self,
        portal: BlockingPortal,
        running: Running[T],
        step: Callable[[EngineContext], Awaitable[T]],
        context: EngineContext,
        name: str,
    ) -> None:
        """Hand a step to the loop. Where an interrupt comes meanwhile, it begins aborted."""
        try:
            self._running.add(running)
            portal.start_task_soon(self.run, step, context, running, name=name)
        except BaseException:
            running.abort()
            self._running.add(running)
            try:
                portal.start_task_soon(self.run, step, context, running, name=name)
            except RuntimeError:  # the loop has ended, and whatever was on it: nobody is to wait
                self._running.discard(running)
            raise

    async def run(
        self,
        step: Callable[[EngineContext], Awaitable[T]],
        context: EngineContext,
        running: Running[T],
    ) -> None:
        """Run a step, once, and give its end to whoever waits."""
        if not running.started():
            return
        try:
            result = await step(context)
        except BaseException as error:  # whoever waits for the step raises it
            self._running.discard(running)
            cancelled = isinstance(error, asyncio.CancelledError)
            running.future.set_exception((cancelled and running.reason) or error)
        else:
            self._running.discard(running)
            running.future.set_result(result)
            del result  # it is for whoever waits, and goes when they let it go
        # a cancellation that is on its way has nothing left to stop; a task that ended with
        # it pending would count as cancelled, and end the portal's group and the engine
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

    def stop(self, running: Running[Any]) -> None:
        """Abort a step, and block until it has ended. Nothing happens if it was not begun."""
        if running in self._running:
            running.abort()
            running.wait_ended()

    def abort(self) -> None:
        """Abort everything. From any thread; waits for nothing."""
        for running in list(self._running):
            running.abort(EngineClosedError("the engine was left by an error meanwhile"))

    def wait_ended(self) -> None:
        """Block until everything has ended."""
        for running in list(self._running):
            running.wait_ended()
