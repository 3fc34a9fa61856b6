"""The engine's own loop, on a thread of its own, and the way there from other threads.

A trainer's loop stands still for seconds while a step runs; a save that was scheduled
there would stand still with it. So the engine has its own loop (anyio's blocking portal),
and sessions, tasks and buffers that belong to a loop belong to this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

from anyio.from_thread import start_blocking_portal

from ckptio._aio import outlive
from ckptio._gc import import_module
from ckptio.errors import EngineClosedError
from ckptio.events import notify
from ckptio.runtime.aside import at_exit, never_end_in_child, run_uninterrupted
from ckptio.runtime.engine_options import config_of, require_observer, require_ranks
from ckptio.runtime.in_flight import InFlight
from ckptio.runtime.leaving import leave_behind, not_open, unsettled
from ckptio.runtime.make_context import make_context, meet_ranks
from ckptio.runtime.running import LoopThread, Running, cannot_copy, cannot_leave, why_no_loop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    import torch
    from anyio.from_thread import BlockingPortal

    from ckptio.config import CheckpointConfig
    from ckptio.engine.context import EngineContext
    from ckptio.events import Event, Observer
    from ckptio.moments import SaveMoments
    from ckptio.runtime.driver import Driver
    from ckptio.staging.cuda import SideStreams
    from ckptio.storage.interface import Storage
    from ckptio.storage.resolve import PathLike

T = TypeVar("T")
if TYPE_CHECKING:
    Step = Callable[[EngineContext], Awaitable[T]]


class EngineCore:
    """A running engine. Every method is thread-safe unless it says otherwise.

    Args:
        config: Options; the defaults if not given.
        observer: Takes events, on any thread.
        ranks: The engines to work with: `"auto"`, `"solo"` or a process group; see
            `api.Engine`.

    Attributes:
        config: The options.
        loop_thread: The thread of its loop, on which nobody may wait for the engine.
        saves: Saves under way, or of which nobody has seen that they failed.
    """

    _portal: BlockingPortal | None = None  # also of one that is half made, for `__del__`

    def __init__(
        self, config: CheckpointConfig | None, observer: Observer | None, ranks: Any = "auto"
    ) -> None:
        self.config = config_of(config)
        require_observer(observer)
        require_ranks(ranks)
        self._group = ranks
        self._observer = observer
        self._in_flight = InFlight()
        self._portal_block: AbstractContextManager[BlockingPortal] | None = None
        self._context: EngineContext | None = None
        self._starting: Future[EngineContext] | None = None
        self._gives_up = False
        self._pid = os.getpid()
        self._stay: Callable[[], object] = lambda: None
        self._cache_task: Future[None] | None = None
        self._serving: Future[None] | None = None
        self.loop_thread = LoopThread()
        self.saves: dict[SaveMoments, None] = {}  # ordered, and changed without a lock
        self._numbers: dict[str, itertools.count[int]] = {}

    def __del__(self) -> None:
        """Have it closed if nobody did that. It is idle (steps keep it); this waits for nothing."""
        if self._portal is not None and self.is_here:
            self._in_flight.soon(functools.partial(leave_behind, self.close))

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> str | tuple[Any, ...]:
        """Refuse with a `TypeError` to be pickled or copied, if it has been opened."""
        if self._portal_block is not None:
            raise cannot_copy()
        return super().__reduce_ex__(protocol)

    @property
    def context(self) -> EngineContext:
        """What the coroutines share, for callers, while the engine is open.

        Flows that are under way (loads) may ask here also while the engine is closing. What runs
        on the loop uses the context that it was given.

        Raises:
            EngineClosedError: The engine is not open.
        """
        if self._context is None or (self._portal is None and not self._in_flight.flows):
            raise not_open("engine", was_open=self._portal_block is not None)
        if not self.is_here:
            raise EngineClosedError("the engine is the parent's, which forked: open one here")
        return self._context

    def start(self) -> None:
        """Start the loop and its thread. Blocks for a millisecond or two, once imported.

        In a job of many ranks it blocks until all of them have come, each with an engine.
        Where torch is there already, what needs it is imported now (about 80 ms, once a
        process) rather than in the first `save`.

        Raises:
            PeerLostError: Ranks did not come in time.
            ConfigError: There are several ranks and no way to meet.
            EngineClosedError: The system gives it no thread, or no descriptors.
        """
        if self._portal_block is not None:
            raise EngineClosedError("an engine is entered once; make another one")
        try:  # a loop that is half up would be waited for, and never end
            run_uninterrupted(self._start, "ckptio-start", self.stop_starting)
        except BaseException:
            self.close(abort=True)  # if it came up all the same
            raise

    def _start(self) -> None:
        if "torch" in sys.modules:  # here, where no interrupt leaves the lock of imports locked
            import_module("ckptio.runtime.saving")
            import_module("ckptio.runtime.loading")
        self._portal_block = start_blocking_portal(backend="asyncio")
        never_end_in_child(self, self._portal_block)
        try:
            portal = self._portal_block.__enter__()
        except (RuntimeError, OSError) as error:
            raise EngineClosedError(why_no_loop(error)) from error
        try:
            self._starting = portal.start_task_soon(self._make_context)
            if self._gives_up:
                self._starting.cancel()
            self._context = self._starting.result()
            self._serving, _ = portal.start_task(self._in_flight.serve)
            self._cache_task = portal.start_task_soon(self._context.cache.run)
        except BaseException as error:  # what has begun is cancelled
            self._portal_block.__exit__(type(error), error, error.__traceback__)
            raise
        self._portal = portal
        self._stay = at_exit(self._close_at_exit)

    def stop_starting(self) -> None:
        """Give up meeting other ranks: `start`, on another thread, ends with an error."""
        self._gives_up = True
        if self._starting is not None:
            self._starting.cancel()

    async def _make_context(self) -> EngineContext:
        self.loop_thread.number = threading.get_ident()
        context = make_context(self.config, self._observer)
        try:
            context.ranks = await meet_ranks(self._group, self.config, context.executor)
        except BaseException:
            context.end_threads()
            raise
        return context

    def next_key(self, kind: str) -> str:
        """Name the next save or load. The same on all ranks that call them in one order."""
        return f"{kind} {next(self._numbers.setdefault(kind, itertools.count(1)))}"

    def emit(self, event: Event) -> None:
        """Give an event to the observer, on the calling thread."""
        notify(self._observer, event)

    def storage(self, path: PathLike) -> Storage:
        """Find the storage for a path, of checkpoints in any format. Touches nothing."""
        return self.context.resolver.storage(path)

    def own_storage(self, path: PathLike) -> Storage:
        """Find the storage for a path, of checkpoints of ours. Touches nothing."""
        return self.context.resolver.own_storage(path)

    def submit(
        self, step: Step[T], name: str, running: Running[T] | None = None, *, in_flow: bool = False
    ) -> Running[T]:
        """Start a coroutine on the engine's loop. An interrupt meanwhile stops it first.

        Args:
            step: Called with the context, on the loop.
            name: Of its task.
            running: Takes its end; a new one if not given.
            in_flow: It is of a flow, which goes on while the engine is closing.

        Raises:
            EngineClosedError: The engine is not open.
        """
        running = running or Running()
        context = self.context
        permit = functools.partial(self._require_open, in_flow=in_flow)
        try:
            self._in_flight.begin(running, step, context, name, engine=self, permit=permit)
        except BaseException:
            self._in_flight.stop(running)
            raise
        return running

    def begin_beside(self, step: Step[T], name: str, running: Running[T] | None = None) -> None:
        """Do as `submit` from a step that is under way, on the loop, also while the engine closes.

        Steps begin in the order in which they were handed over, by whichever of the two.
        """
        assert self._context is not None  # noqa: S101  # it is open, or closing
        self._in_flight.begin(running or Running(), step, self._context, name, engine=self)

    def begin_flow(self, driver: Driver) -> None:
        """Have a flow waited for when the engine closes, until `end_flow`. Raises as `submit`."""
        self.context  # noqa: B018  # raises what says more
        self._in_flight.begin_flow(self._require_open, driver)

    def end_flow(self, driver: Driver) -> None:
        """A flow has ended, begun or not; closing goes on."""
        self._in_flight.end_flow(driver)

    def _require_open(self, *, in_flow: bool = False) -> None:
        """Look whether there is a way to the loop.

        Raises:
            EngineClosedError: There is none any more.
            ConfigError: This is the loop's thread, which would wait for itself.
        """
        if self._portal is None and not (in_flow and self._in_flight.flows):
            raise EngineClosedError("the engine was closed meanwhile")
        self.loop_thread.require_elsewhere()

    def keep(self, save: SaveMoments) -> None:
        """Remember a save until somebody has seen how it ended."""
        for each in {*self.saves}.difference(unsettled(list(self.saves))):
            self.forget(each)
        self.saves[save] = None
        save.let_go_by(self.forget)

    def forget(self, save: SaveMoments) -> None:
        """Keep a save no more that has not begun, or of which somebody knows that it failed."""
        self.saves.pop(save, None)

    def side_streams(self, device: torch.device, *, saving: bool) -> SideStreams:
        """Give the CUDA streams for one direction, and pin slabs from the first use on.

        Args:
            device: A device that is used; memory is pinned in its context.
            saving: The direction.
        """
        from ckptio.staging.cuda import HostRegistration, SideStreams  # noqa: PLC0415  # imports torch

        self.context.pool.use_pinning(HostRegistration(device))
        return SideStreams(saving=saving)

    def pin_if_cuda(self) -> None:
        """Pin slabs from now on if the program uses CUDA already. On the caller's thread."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            self.side_streams(torch.device("cuda", torch.cuda.current_device()), saving=True)

    async def call(self, step: Step[T], name: str, *, in_flow: bool = False) -> T:
        """Run a coroutine on the engine's loop and await it from another.

        Raises:
            asyncio.CancelledError: The caller was cancelled; the step has ended by then.
        """
        running = self.submit(step, name, in_flow=in_flow)
        try:
            return await outlive(running.end.wrapped(), on_cancel=running.abort)
        finally:
            del running  # an error that it has keeps this frame: a reference cycle

    def call_blocking(self, step: Step[T], name: str, *, in_flow: bool = False) -> T:
        """Run a coroutine on the engine's loop and block until it has ended.

        An interrupt (`KeyboardInterrupt`) aborts the step and waits for its end.
        """
        running: Running[T] = Running()
        try:
            return self.submit(step, name, running, in_flow=in_flow).end.result()
        except BaseException:
            self._in_flight.stop(running)
            raise
        finally:
            del running  # as above

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made it, not a forked child of that."""
        return self._pid == os.getpid()

    def require_elsewhere(self) -> None:
        """Look whether the calling thread may wait for the engine to close.

        Raises:
            ConfigError: It is one of the engine's own, which would wait for itself.
        """
        if self._portal is None or self._context is None or not self.is_here:
            return
        if threading.get_ident() == self.loop_thread.number or self._context.is_on_worker():
            raise cannot_leave()

    def require_other_loop(self) -> None:
        """Look whether this task may wait for that: it may not on the engine's own loop.

        In few calls: an interrupt that comes in them leaves the engine open.

        Raises:
            ConfigError: This is the engine's own loop.
        """
        if self._portal is not None and self.loop_thread.number == threading.get_ident():
            raise cannot_leave()

    def close(self, *, abort: bool = False) -> None:
        """Wait for what is in flight, then give everything back. Blocks.

        A flow is in flight between its steps, too, while somebody runs it (`runtime.driver`).
        The end of the program calls it if nobody did; in a forked child it does nothing. An
        interrupt (`KeyboardInterrupt`) while it waits aborts what is in flight, and is raised
        when everything was given back.

        Args:
            abort: Stop what is in flight first.

        Raises:
            ConfigError: This is one of the engine's own threads, as in an observer.
        """
        if self._portal is None:  # and where the interpreter ends, no thread could begin
            return
        self.require_elsewhere()
        run_uninterrupted(
            functools.partial(self._close, abort, threading.get_ident()),
            "ckptio-close",
            self.abort_in_flight,
        )

    def _close_at_exit(self) -> None:
        self._in_flight.give_up_flows()  # of daemons and of loops that have stopped
        self._close(False, threading.get_ident())  # noqa: FBT003  # called from here

    def _close(self, abort: bool, closer_id: int) -> None:  # noqa: FBT001  # called from here
        if not self.is_here:  # a forked child has neither its threads nor its loop
            return
        portal: BlockingPortal | None = vars(self).pop("_portal", None)  # one closer alone has it
        if portal is None:
            return
        self._stay()
        if abort:
            self.abort_in_flight()
        try:
            self._in_flight.wait_ended(closer_id)
        finally:
            self._end(portal)

    def abort_in_flight(self) -> None:
        """Stop everything that is under way. From any thread; waits for nothing."""
        self._in_flight.abort()

    def _end(self, portal: BlockingPortal) -> None:
        """Give everything back, and end the loop."""
        assert self._portal_block is not None  # noqa: S101  # it was started
        try:
            portal.call(self._give_back)
        finally:
            self._portal_block.__exit__(None, None, None)

    async def _give_back(self) -> None:
        context = self._context
        assert context is not None  # noqa: S101  # it was started
        async with contextlib.AsyncExitStack() as stack:  # all of it, whatever fails of it
            stack.callback(context.end)
            stack.callback(context.pool.close)
            stack.push_async_callback(self._end_tasks, context)
            stack.push_async_callback(context.notes.close)
            stack.push_async_callback(context.stores.close)
            stack.push_async_callback(context.ranks.close)

    async def _end_tasks(self, context: EngineContext) -> None:
        """End what runs on the loop for as long as the engine is there."""
        context.cache.close()
        self._in_flight.close()
        await asyncio.wait([asyncio.wrap_future(t) for t in (self._cache_task, self._serving) if t])
