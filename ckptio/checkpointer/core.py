"""What the two faces of a checkpointer share: everything but how they wait.

Rank 0 lists, decides and deletes; the others are told. What is removed is decided after a
commit, from what is committed then, on the engine's loop: the trainer never waits for it.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from ckptio.checkpointer.advice import advice
from ckptio.checkpointer.finding import agreed_records, agreed_steps, meet
from ckptio.checkpointer.keeper import Keeper
from ckptio.checkpointer.signals import SignalWatch
from ckptio.checkpointer.steps import metadata_of, step_name
from ckptio.checkpointer.stops import Stop, Stops
from ckptio.checkpointer.tiers import second_tier_of
from ckptio.errors import (
    CheckpointNotFoundError,
    ConfigError,
    EngineClosedError,
    SaveAbortedError,
)
from ckptio.events import Preempted, RetentionFailed
from ckptio.plan.decision import SaveEvery
from ckptio.plan.retention import Retention, require_seconds
from ckptio.storage.resolve import local_path, remote_url
from ckptio.storage.root import resolve_root

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from concurrent.futures import Future

    from ckptio.engine.context import EngineContext
    from ckptio.engine.core import EngineCore
    from ckptio.engine.drive import Flow
    from ckptio.engine.flow import LoadResult
    from ckptio.engine.request import LoadRequest
    from ckptio.engine.running import Running
    from ckptio.handle import SaveHandle
    from ckptio.plan.retention import StepRecord
    from ckptio.storage.interface import Found, Root
    from ckptio.storage.resolve import PathLike

T = TypeVar("T")


class CheckpointerCore:
    """A checkpointer, but for how one waits for it. See `face.Checkpointer`.

    Attributes:
        preempted: Whether the last save was asked for.
        make_root: Makes the root; tests give another.
        clock: Gives seconds.
    """

    def __init__(
        self,
        root: PathLike,
        *,
        then: PathLike | None,
        keep: Retention | None,
        keep_local: int | None,
        every: SaveEvery | None,
        preempt_signals: Sequence[int],
        preempt_deadline_s: float | None,
        sweep_after_s: float | None,
    ) -> None:
        if keep is not None and not isinstance(keep, Retention):
            raise ConfigError(f"keep= is a policy such as KeepLast(3), not {keep!r}")
        if every is not None and not isinstance(every, SaveEvery):
            raise ConfigError(f"every= is a SaveEvery, not {every!r}")
        for name, value in (
            ("preempt_deadline_s=", preempt_deadline_s),
            ("sweep_after_s=", sweep_after_s),
        ):
            if value is not None:
                require_seconds(name, value)
        if remote_url(root) is None:
            local_path(root)
        self.preempted = False
        self.make_root: Callable[..., Root] = resolve_root
        self.clock = time.monotonic
        self._given_root = root
        self._second = second_tier_of(then, keep_local)
        self._keep = keep
        self._every = every
        self._deadline_s = preempt_deadline_s
        self._sweep_after_s = sweep_after_s
        self._signals = SignalWatch(preempt_signals, self.preempt)
        self._engine: EngineCore | None = None
        self._keeper: Keeper | None = None
        self._stops: Stops | None = None
        self._watching: Running[None] | None = None
        self._passes: list[Running[None]] = []
        self._saves: list[tuple[int, SaveHandle]] = []
        self._busy: Counter[int] = Counter()
        self._one_pass = asyncio.Lock()
        self._last_step = 0
        self._asked_s = 0.0
        self._is_ending = False
        self._missed: tuple[SaveHandle, SaveAbortedError] | None = None

    # coming and going

    @property
    def engine(self) -> EngineCore:
        """The engine, while the checkpointer is open.

        Raises:
            EngineClosedError: It is not.
        """
        if self._engine is None:
            raise EngineClosedError("the checkpointer is not open: use it inside its block")
        return self._engine

    @property
    def keeper(self) -> Keeper:
        """Who looks after the steps; see `engine`."""
        self.engine  # noqa: B018  # raises if there is none
        assert self._keeper is not None  # noqa: S101  # they come together
        return self._keeper

    def require_new(self) -> None:
        """Check that this was not entered before: what it knows is of one block.

        Raises:
            EngineClosedError: It was.
        """
        if self._stops is not None:
            raise EngineClosedError("a checkpointer is entered once; make another one")

    def open(self, engine: EngineCore) -> Callable[[EngineContext], Awaitable[None]]:
        """Begin. Takes signals over, so on the main thread if there are any.

        Returns:
            What to run on the engine's loop before anything else.
        """
        context = engine.context
        root = self.make_root(
            self._given_root, engine.config, context.executor, engine.emit, context.stores
        )
        keeper = Keeper(root, context.executor, engine.emit)
        if self._second is not None:
            self._second.open(engine, root, self.make_root)
        key = engine.next_key("checkpointer")
        self._engine, self._keeper = engine, keeper
        self._asked_s = self.clock()
        self._stops = Stops(key, self._due_in_s, self._stopped)
        self._signals.start()
        message = [root.path, repr(self._every), self._signals.names]
        if self._second is not None:
            message.append(self._second.keeper.root.path)
        return functools.partial(meet, key, message)

    def start(self) -> None:
        """Begin what goes on in the background."""
        self._watching = self.engine.submit(self._watch, "watch for calls")
        second, path = self._second, self.keeper.root.path
        if second is not None:
            taking = self.engine.submit(lambda _: second.take_up(path), f"take up {path}")
            self._passes.append(taking)
        if self._sweep_after_s is not None:
            self._look_after(None)

    def waits(self) -> tuple[list[SaveHandle], list[Running[None]]]:
        """Give what is under way: saves, and what comes after them."""
        return [handle for _, handle in self._saves], list(self._passes)

    def abort(self) -> None:
        """Stop what is under way. From any thread; waits for nothing."""
        for _, handle in self._saves:
            if not handle.durable.done():
                handle.abort()
        for running in self._passes:
            running.abort()

    def stop_watching(self) -> list[Running[None]]:
        """Hear no more calls and give signals back; gives what ends with that."""
        if self._watching is not None:
            self._watching.abort()
        self._signals.stop()
        return [] if self._watching is None else [self._watching]

    def end(self) -> Exception | BaseException | None:
        """Close. Gives the error of a save that nobody has seen, if there is one."""
        self._engine = None
        failed = [h for _, h in self._saves if h.durable.done() and h.is_unsettled()]
        errors = [handle.error() for handle in failed]
        for handle in failed:
            handle.seen()
        if self._missed is not None:
            late, missed = self._missed
            if (
                late.done() and late.committed.error() is not None
            ):  # else its commit was faster than the abort
                return missed
        return errors[0] if errors else None

    # saving

    def path(self, step: int) -> str:
        """Give the path of a step's checkpoint, which need not exist."""
        return self.keeper.root.join(step_name(step))

    def save(
        self, state: Any, step: int, metrics: Mapping[str, Any] | None, *, overwrite: bool
    ) -> SaveHandle:
        """Start saving a step."""
        from ckptio.engine.flow import begin_save  # noqa: PLC0415  # imports torch

        engine = self.engine
        try:
            path, metadata = self.path(step), metadata_of(step, metrics)
            then = None if self._second is None else self._second.path(step)
        except ConfigError as error:  # raised again; the other ranks must not wait for this one
            self._refuse_save(error)
            raise
        self._busy[step] += 1  # before it begins: an older one of this step may be due to go
        try:
            handle = begin_save(
                engine, state, path, overwrite=overwrite, then=then, metadata=metadata
            )
            self._saves = [*((s, h) for s, h in self._saves if h.is_unsettled()), (step, handle)]
        finally:
            self._busy[step] -= 1
        self._last_step, self._asked_s = step, self.clock()
        self._look_after(handle)
        return handle

    def _refuse_save(self, error: ConfigError) -> None:
        from ckptio.engine.together import fail_together  # noqa: PLC0415  # where it is needed

        key = self.engine.next_key("save")
        if self.engine.context.ranks.world_size > 1:
            self.engine.submit(lambda context: fail_together(context, key, error), f"fail {key}")

    def decide(self, step: int) -> bool | Future[None]:
        """Say whether to save now; or what to wait for before asking again."""
        step_name(step)
        self.engine  # noqa: B018  # raises if it is closed
        assert self._stops is not None  # noqa: S101  # it is open
        stop = self._stops.ask()
        if isinstance(stop, Stop):
            self.preempted = self.preempted or bool(stop.reason)
            return True
        if stop is not None:
            return stop
        return self._every is not None and self._every.is_due(step, self._last_step)

    def preempt(self, reason: str) -> None:
        """Ask all ranks for the last save; see `Stops.call_last`."""
        if self._stops is not None:
            self._stops.call_last(reason)

    def _due_in_s(self) -> float | None:
        return None if self._every is None else self._every.wait_s(self.clock() - self._asked_s)

    def _stopped(self, stop: Stop) -> None:
        """Take note of what was agreed on. On the engine's loop."""
        self._asked_s = self.clock()
        if stop.reason:
            self._is_ending = True
            self.engine.emit(Preempted(path=self.keeper.root.path, reason=stop.reason))

    async def _watch(self, context: EngineContext) -> None:
        """Hear calls; after the one for the last save, see to its deadline."""
        assert self._stops is not None  # noqa: S101  # it is open
        await self._stops.watch(context.ranks)
        if not self._is_ending or self._deadline_s is None:
            return
        await asyncio.sleep(self._deadline_s)
        late = [(step, handle) for step, handle in self._saves if not handle.done()]
        if late:
            step, handle = late[-1]
            error = SaveAbortedError(
                f"the save of step {step} to {self.keeper.root.path!r} was not committed"
                f" within {self._deadline_s:g} s of the signal, and was aborted; the steps before"
                " it are untouched. Give it more time, or save more often"
            )
            self._missed = (handle, error)
        self.abort()  # removals, too: whoever leaves now must not wait for them

    # keeping

    def _look_after(self, handle: SaveHandle | None) -> None:
        """Let go of what is no longer kept, once a save is committed. On rank 0."""
        engine = self.engine
        nothing_to_do = self._keep is None and self._sweep_after_s is None
        if engine.context.ranks.rank != 0 or (nothing_to_do and self._second is None):
            return
        self._passes = [running for running in self._passes if not running.future.done()]
        running = engine.submit(lambda _: self._pass(handle), f"look after {self._given_root!s}")
        self._passes.append(running)

    async def _pass(self, handle: SaveHandle | None) -> None:
        if handle is not None:
            committed = handle.committed.wrapped()
            committed.add_done_callback(asyncio.Future.exception)  # seen, if this is aborted
            await asyncio.wait((committed,))
            if committed.exception() is not None:
                return
        await self._tidy(self.keeper, handle)
        second = self._second
        if second is None or (handle is not None and not await handle.durable.ended()):
            return
        await self._tidy(second.keeper, handle)
        if handle is not None:  # what was still to be copied when the first tier was looked at
            await self._tidy(self.keeper, handle)

    async def _tidy(self, keeper: Keeper, handle: SaveHandle | None) -> None:
        """Look after one tier."""
        async with self._one_pass:
            try:
                found = await keeper.find()
                if self._keep is not None and handle is not None:
                    await self._remove(keeper, self._keep, found)
                if self._second is not None and keeper is self.keeper and handle is not None:
                    await self._second.thin_out(keeper, self._exempt)
                if self._sweep_after_s is not None and not self._is_in_a_hurry():
                    exempt = self._exempt
                    if self._second is not None and keeper is self._second.keeper:
                        exempt = await self._second.sparing(exempt, found, self.keeper.root)
                    await keeper.sweep(self._sweep_after_s, exempt, found)
            except Exception as error:  # the observer is told; the run goes on
                self.engine.emit(RetentionFailed(path=keeper.root.path, error=error))

    async def _remove(self, keeper: Keeper, policy: Retention, found: Sequence[Found]) -> None:
        """Remove what is not kept."""
        for step in await keeper.plan(policy, self._exempt(), found):
            second = self._second if keeper is self.keeper else None
            if second is not None and await second.owes(self.path(step)):
                continue
            if step not in self._exempt() and not self._is_in_a_hurry():
                await keeper.remove(step)

    def _is_in_a_hurry(self) -> bool:
        """Whether what time is left belongs to the last save, which is not committed yet."""
        return self._is_ending and any(not handle.done() for _, handle in self._saves)

    def _exempt(self) -> set[int]:
        """Name the steps that are being written, copied or read here."""
        writing = {step for step, handle in self._saves if not handle.durable.done()}
        return writing | {step for step, count in list(self._busy.items()) if count}

    # finding and loading

    async def agreed_records(self, key: str, context: EngineContext) -> list[StepRecord]:
        """Read what is known of the committed steps; rank 0, for all."""

        async def read() -> Sequence[StepRecord]:
            first = await self.keeper.records()
            return first if self._second is None else await self._second.records(first)

        return await agreed_records(key, context, read)

    async def agreed_steps(self, key: str, context: EngineContext) -> list[int]:
        """List the committed steps; rank 0, for all."""

        async def read() -> Sequence[int]:
            first = await self.keeper.steps()
            return first if self._second is None else await self._second.steps(first)

        return await agreed_steps(key, context, read)

    def asking(
        self, question: Callable[[str, EngineContext], Awaitable[T]]
    ) -> Callable[[EngineContext], Awaitable[T]]:
        """Make a question to all ranks into what the engine runs."""
        return functools.partial(question, self.engine.next_key("steps"))

    def load_flow(
        self, step: int | None, make_request: Callable[[], LoadRequest]
    ) -> Flow[LoadResult]:
        """Load a step; the newest if none is given."""
        from ckptio.engine import flow  # noqa: PLC0415  # imports torch

        steps: list[int] = []
        if step is None:
            steps = yield self.asking(self.agreed_steps)
            if not steps:
                raise CheckpointNotFoundError(
                    self.keeper.root.path, "there is no committed step here"
                )
            step = steps[-1]
        path = self.path(step)
        self._busy[step] += 1
        try:
            with advice(steps):
                then = None if self._second is None else self._second.path(step)
                result = yield from flow.load_flow(self.engine, path, make_request, then)
        finally:
            self._busy[step] -= 1
        self._last_step = step
        return result
