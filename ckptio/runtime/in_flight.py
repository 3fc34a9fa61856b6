"""The steps (coroutines) that are under way on an engine's loop, and the wait for their ends.

    handed over   listed from here on: whoever closes the engine waits for its end
    running       the loop has made its task
    ended         first it is listed no more, then its `end` is set
    refused       instead: the engine was closed by a handler, on the thread that handed it over

Handing a step to the loop never waits for the loop. A signal's handler may hand one over wherever
it interrupts the main thread, even while the loop waits for something that the main thread holds.

An interrupt may also come just while a step is handed over. Then nobody knows whether its task was
made, and a task that is not waited for would hold buffers and files when the engine closes. So the
step is handed over once more, aborted, and of two tasks for one step the second does nothing.

A step keeps a reference to its engine until it ends, so that an engine that nobody has any more
still finishes what it began, and is collected after that. Endless steps keep none.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from ckptio._outcome import Outcome
from ckptio.errors import CheckpointError, EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskStatus

    from ckptio.engine.context import EngineContext
    from ckptio.runtime.driver import Driver
    from ckptio.runtime.running import Running

T = TypeVar("T")

#: Seconds after which it is looked again whether somebody runs a flow that is waited for.
_POLL_S = 0.1


class InFlight:
    """What an engine has begun and has not ended.

    Attributes:
        flows: Calls of several steps that have not ended. They are in flight between two of their
            steps, too.
    """

    def __init__(self) -> None:
        self._running: set[Running[Any]] = set()
        self._handed: dict[Running[Any], int] = {}  # by which thread, until the loop has it
        self._refused: set[Running[Any]] = set()  # that the loop did not get in time
        self.flows: set[Driver] = set()
        self._is_aborted = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._group: asyncio.TaskGroup | None = None
        self._closing: asyncio.Event | None = None

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the steps, as tasks of one group, until `close`. On the engine's loop."""
        self._closing = asyncio.Event()
        async with asyncio.TaskGroup() as self._group:
            self._loop = asyncio.get_running_loop()
            task_status.started()
            await self._closing.wait()

    def close(self) -> None:
        """Let `serve` end: no step comes any more. On the engine's loop."""
        if self._closing is not None:
            self._closing.set()

    def begin_flow(self, permit: Callable[[], None], driver: Driver) -> None:
        """Have a flow waited for, until `end_flow`, also if `permit` refuses it; see `begin`."""
        self.flows.add(driver)
        permit()

    def begin(
        self,
        running: Running[T],
        step: Callable[[EngineContext], Awaitable[T]],
        context: EngineContext,
        name: str,
        *,
        engine: object,
        permit: Callable[[], None] | None = None,
    ) -> None:
        """Hand a step to the loop. If an interrupt comes meanwhile, the step begins aborted.

        No lock guards this against whoever closes the engine: a signal's handler that closes it may
        have interrupted this very call. Instead, the order does. A step is listed before `permit`
        is asked, and the engine is marked as closed before the list is read.

        Args:
            running: Takes its end.
            step: Called with the context, on the loop.
            context: What it is given.
            name: Of its task.
            engine: Kept alive until the step has ended, unless it is endless.
            permit: Raises if no step may begin any more. If not given, any may.

        Raises:
            EngineClosedError: The loop has ended.
            BaseException: What `permit` raised, or the interrupt.
        """
        keeps = None if running.is_endless else engine
        del engine

        def spawn() -> None:
            assert self._group is not None  # noqa: S101  # as below
            self._handed.pop(running, None)
            if not running.end.done() and running not in self._refused:  # once, of twice
                self._group.create_task(self.run(step, context, running, keeps), name=name)

        def hand_over() -> None:
            nonlocal permit
            self._handed[running] = threading.get_ident()
            self._running.add(running)
            if permit is not None:
                permit()
                permit = None  # once: from here on, whoever closes the engine waits for this one
            self._call_soon(spawn)
            if running in self._refused:  # a handler closed the engine just before
                raise _closed()

        try:
            hand_over()
        except BaseException:
            running.abort()
            try:
                hand_over()
            except CheckpointError:  # nobody is to wait for it
                self._running.discard(running)
                self._handed.pop(running, None)
                self._refused.discard(running)
                running.end.try_exception(_closed())
            raise
        if self._is_aborted:  # looked at after it is there, and `abort` the other way round
            running.abort(_left())

    async def run(
        self,
        step: Callable[[EngineContext], Awaitable[T]],
        context: EngineContext,
        running: Running[T],
        engine: object = None,
    ) -> None:
        """Run a step, once, and give its end to whoever waits."""
        if not running.started():
            return
        try:
            result = await step(context)
        except BaseException as error:  # whoever waits for the step raises it
            self._running.discard(running)
            cancelled = isinstance(error, asyncio.CancelledError)
            running.end.set_exception((cancelled and running.reason) or error)
        else:
            self._running.discard(running)
            running.end.set_result(result)
        finally:
            del running, engine  # its error refers to this frame: no reference cycle

    def soon(self, function: Callable[[], object]) -> None:
        """Have a function called on the loop, unless that has ended. Waits for nothing."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    def stop(self, running: Running[Any]) -> None:
        """Abort a step, and block until it has ended. Nothing happens if it was not begun."""
        if running in self._running:
            running.abort()
            running.wait_ended()

    def abort(self) -> None:
        """Abort everything, and what comes yet. From any thread; waits for nothing."""
        self._is_aborted = True
        self.give_up_flows()
        for running in list(self._running):
            running.abort(_left())

    def give_up_flows(self) -> None:
        """Let flows have no further step. From any thread; waits for nothing."""
        for driver in list(self.flows):
            driver.is_given_up = True
            self.flows.discard(driver)

    def end_flow(self, driver: Driver) -> None:
        """A flow has ended. From any thread, and again."""
        self.flows.discard(driver)
        if not driver.end.done():
            driver.end.set_result(None)

    def wait_ended(self, closer_id: int) -> None:
        """Block until everything has ended. Flows that nobody runs any more are given up.

        Args:
            closer_id: Identifies the thread that closes the engine.
        """
        while True:
            flows, steps = list(self.flows), list(self._running)
            # a handler that closes this may have stopped its thread where that hands a step over
            if any(self._handed.get(one) == closer_id for one in steps):
                self._pass_through()
                # it has not got to what it was not given: that cannot begin until this returns
                late = {one for one in steps if self._handed.get(one) == closer_id}
                self._refused |= late
                self._running -= late
                continue
            if not flows and not steps:
                return
            # discarded here, too: an interrupt comes also where one that has ended would be
            for driver in flows:
                if driver in self.flows:
                    driver.wait_ended(closer_id, _POLL_S)
                    self.flows.discard(driver)
            for running in steps:
                running.wait_ended()
                self._running.discard(running)

    def _pass_through(self) -> None:
        """Block until the loop has come to what was handed over before."""
        passed: Outcome[None] = Outcome()
        self._call_soon(lambda: passed.set_result(None))
        passed.wait()

    def _call_soon(self, function: Callable[[], None]) -> None:
        assert self._loop is not None  # noqa: S101  # `serve` began with the engine
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            if self._loop.is_closed():
                raise _closed() from None
            raise  # of a signal's handler


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine was closed meanwhile")


def _left() -> EngineClosedError:
    return EngineClosedError("the engine was left by an error meanwhile")
