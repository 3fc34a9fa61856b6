"""What the two faces of a checkpointer share: everything but how they wait.

Rank 0 lists, decides and deletes; the others are told. `upkeep` does what follows a commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar

from ckptio._texts import shown
from ckptio.checkpointer.advice import advice, missing
from ckptio.checkpointer.agree import meet
from ckptio.checkpointer.ending import Ending
from ckptio.checkpointer.keeper import Keeper
from ckptio.checkpointer.listening import Listener
from ckptio.checkpointer.losses import missed_deadline
from ckptio.checkpointer.pace import Pace
from ckptio.checkpointer.questions import Questions
from ckptio.checkpointer.signals import SignalWatch
from ckptio.checkpointer.steps import metadata_of, step_name
from ckptio.checkpointer.stops import Stop, Stops
from ckptio.checkpointer.tiers import SecondTier, require_tiers
from ckptio.checkpointer.upkeep import Upkeep
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    EngineClosedError,
)
from ckptio.events import Preempted
from ckptio.plan.retention import Retention, require_seconds
from ckptio.plan.schedule import SaveEvery
from ckptio.runtime.leaving import not_open
from ckptio.runtime.refusal import refusing
from ckptio.storage.resolve import local_path, remote_url
from ckptio.storage.root import resolve_root

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from ckptio._outcome import Outcome
    from ckptio.engine.asked import Asked
    from ckptio.engine.context import EngineContext
    from ckptio.moments import SaveMoments
    from ckptio.runtime.core import EngineCore
    from ckptio.runtime.drive import Flow
    from ckptio.runtime.loading import LoadResult
    from ckptio.runtime.running import Running
    from ckptio.storage.resolve import PathLike
    from ckptio.storage.root_interface import Root

T = TypeVar("T")
_log = logging.getLogger("ckptio")


class CheckpointerCore:
    """A checkpointer, but for how one waits for it. See `face.Checkpointer`.

    Attributes:
        ending: Whether the run is to end.
        make_root: Makes the root when this is opened; tests set another.
        clock: Gives seconds that only rise; tests set another.
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
            raise ConfigError(f"keep= is a policy such as KeepLast(3), not {shown(keep)}")
        if every is not None and not isinstance(every, SaveEvery):
            raise ConfigError(f"every= is a SaveEvery, not {shown(every)}")
        if preempt_deadline_s is not None:
            require_seconds("preempt_deadline_s=", preempt_deadline_s)
        if sweep_after_s is not None:
            require_seconds("sweep_after_s=", sweep_after_s)
        if remote_url(root) is None:
            local_path(root)
        require_tiers(then, keep_local, keep)
        self.ending = Ending()
        self.make_root: Callable[..., Root] = resolve_root
        self.clock = time.monotonic
        self._given_root = root
        self._then, self._keep_local = then, keep_local
        self._keep = keep
        self._every = every
        self._deadline_s = preempt_deadline_s
        self._sweep_after_s = sweep_after_s
        self._signals = SignalWatch(preempt_signals, self.preempt)
        self._engine: EngineCore | None = None
        self._keeper: Keeper | None = None
        self._second: SecondTier | None = None
        self._stops: Stops | None = None
        self._upkeep: Upkeep | None = None
        self._questions: Questions | None = None
        self._listener = Listener(self)
        self._watching: list[Running[None]] = []  # one, once it has started
        self._pace = Pace(every)
        self._asked_s = 0.0
        self._wanted = ""  # why the last save was asked for, also before this was open
        self._late: tuple[int, SaveMoments] | None = None  # what missed the deadline, if any

    # coming and going

    @property
    def engine(self) -> EngineCore:
        """The engine, while the checkpointer is open.

        Raises:
            EngineClosedError: It is not.
        """
        if self._engine is None:
            raise not_open("checkpointer", was_open=self._upkeep is not None)
        return self._engine

    @property
    def keeper(self) -> Keeper:
        """Who looks after the steps of the first tier; also after the block."""
        if self._keeper is None:
            raise not_open("checkpointer", was_open=False)
        return self._keeper

    @property
    def upkeep(self) -> Upkeep:
        """What follows saves; also after the block."""
        if self._upkeep is None:
            raise not_open("checkpointer", was_open=False)
        return self._upkeep

    @property
    def questions(self) -> Questions:
        """What all ranks ask at once; also after the block."""
        if self._questions is None:
            raise not_open("checkpointer", was_open=False)
        return self._questions

    def require_new(self) -> None:
        """Check that this was not opened before: what it knows is about one block.

        Raises:
            EngineClosedError: It was.
        """
        if self._stops is not None:
            raise EngineClosedError("a checkpointer is entered once; make another one")

    def open(self, engine: EngineCore) -> Callable[[EngineContext], Awaitable[None]]:
        """Begin. Takes signals over; if there are any, this has to be the main thread.

        Returns:
            What to run on the engine's loop before anything else: it compares ranks.
        """
        context = engine.context
        with refusing(engine, "checkpointer"):
            root = self.make_root(
                self._given_root, engine.config, context.executor, engine.emit, context.stores
            )
            if self._then is not None:
                self._second = SecondTier(self._then, self._keep_local, engine, self.make_root)
            self._signals.start()
        keeper = Keeper(root, context.executor, engine.emit)
        key = engine.next_key("checkpointer")
        self._engine, self._keeper = engine, keeper
        self.ending.is_alone = context.ranks.world_size == 1
        self._upkeep = Upkeep(
            engine,
            keeper,
            self._second,
            keep=self._keep,
            sweep_after_s=self._sweep_after_s,
            is_ending=lambda: self.ending.is_called,
            clock=self.clock,
        )
        self._questions = Questions(keeper, self._second, self._upkeep, self._pace)
        self._asked_s = self.clock()
        self._stops = Stops(key, self._listener.due_in_s, self._listener.stopped)
        self._stops.call_last(self._wanted)  # after `_stops` is set; `preempt` sets `_wanted` first
        message = [root.path, repr(self._every), self._signals.names]
        if self._second is not None:
            return functools.partial(self._second.meet, root, key, message)
        return functools.partial(meet, key, message)

    def start(self) -> None:
        """Begin what goes on in the background."""
        assert self._stops is not None  # noqa: S101  # it is open
        self._watching = [self._listener.start(self.engine, self._stops)]
        self.upkeep.start()

    def in_flight(self) -> tuple[list[SaveMoments], list[Running[None]]]:
        """Give what leaving the block waits for: saves, and what comes after them."""
        if self._upkeep is None:
            return [], []
        return [moments for _, moments in self._upkeep.steps.saves], list(self._upkeep.passes)

    def abort(self, error: BaseException | None = None) -> None:
        """Stop what is under way. From any thread; waits for nothing.

        Args:
            error: What the block is left by. With one, the log says which saves are lost.
        """
        if self._upkeep is not None:
            self._upkeep.abort(error)

    def stop_watching(self) -> list[Running[None]]:
        """Hear no more calls and give signals back. Gives what has to be waited for then."""
        for watching in self._watching:
            watching.abort()
        self._signals.stop()
        return self._watching

    def end(self, error: BaseException | None) -> None:
        """Close, when everything has ended.

        Args:
            error: What the block is left by.

        Raises:
            BaseException: Without one: a deadline that was missed; if none was, the failure of a
                save that nobody has seen.
        """
        if self._engine is not None:
            if error is None and (loss := self.ending.loss()) is not None:
                _log.warning("%s", loss)
            self.ending.look(is_last=True)  # what it says is what `preempted` says from here on
        self._engine = None
        if self._upkeep is None:
            return
        missed = self._late and missed_deadline(*self._late, self._given_root, self._deadline_s)
        self._upkeep.end(error or missed)
        if missed is not None and error is None:
            raise missed

    # saving

    def path(self, step: int) -> str:
        """Give the path of a step's checkpoint, which need not exist; also when it is closed."""
        return self.keeper.root.join(step_name(step))

    def save(
        self, state: Any, step: int, metrics: Mapping[str, Any] | None, *, overwrite: bool
    ) -> SaveMoments:
        """Start saving a step; see `face.Checkpointer.save`."""
        from ckptio.runtime.saving import begin_save  # noqa: PLC0415  # imports torch

        engine, upkeep = self.engine, self.upkeep
        with refusing(engine, "save"):
            if not self.ending.is_called:  # the last save is tried, however others have failed
                upkeep.steps.check()
            path, metadata = self.path(step), metadata_of(step, metrics)
            then = None if self._second is None else self._second.path(step)
        with upkeep.steps.held(step):  # else an older save of this step might be removed meanwhile
            moments = begin_save(
                engine,
                state,
                path,
                overwrite=overwrite,
                then=then,
                metadata=metadata,
                permit=self._tier_check(step, overwrite=overwrite),
            )
            upkeep.steps.add(step, moments)
        self._pace.saved(step)
        self.ending.saved(step)
        self._asked_s = self.clock()
        upkeep.tidy_after(moments)
        return moments

    def _tier_check(self, step: int, *, overwrite: bool) -> Callable[[], Awaitable[None]] | None:
        """Give the check of the second tier that rank 0's save awaits before it commits, if any."""
        if self._second is None or self.engine.context.ranks.rank != 0:
            return None
        looking = None if overwrite else self._second.look_for(step)
        return functools.partial(self._second.require_free, step, looking)

    def decide(self, step: int) -> bool | Outcome[None]:
        """Say whether to save now; or what to wait for before asking again."""
        step_name(step)
        rank = self.engine.context.ranks.rank  # raises if it is closed
        assert self._stops is not None  # noqa: S101  # it is open
        if rank == 0 and not (self.ending.is_asked_for or self._every or self._signals.names):
            _log.warning(
                "should_save() says yes to no step unless preempt() is called: the checkpointer of"
                " %r has neither every=, such as SaveEvery(steps=1000), nor preempt_signals=",
                self.keeper.root.path,
            )
        self.ending.is_asked_for = True
        is_due = self._pace.is_due(step)
        stop = self._stops.ask()
        if isinstance(stop, Stop):
            self._asked_s = self.clock()
            self._stops.look_again()
            self.ending.is_told |= bool(stop.reason)
            return True
        if stop is not None:
            return stop
        return is_due

    @property
    def preempted(self) -> bool:
        """Whether the run is to end; see `Ending`."""
        return self.ending.is_told if self._engine is None else self.ending.look()

    def preempt(self, reason: str) -> None:
        """Ask all ranks for the last save; see `Stops.call_last`."""
        self._wanted = self._wanted or reason or "asked for"
        if self._stops is not None:
            self._stops.call_last(self._wanted)

    def due_in_s(self) -> float | None:
        """Say in how many seconds a save is due by time; `None` if never."""
        return None if self._every is None else self._every.wait_s(self.clock() - self._asked_s)

    def stopped(self, stop: Stop) -> None:
        """Take note of what was agreed on. On the engine's loop."""
        self._asked_s = self.clock()
        if stop.reason:
            self.ending.call(stop.reason)
            if not self.ending.is_asked_for and not self.ending.is_alone:
                words = "%s: should_save() says when to save last, and is not called here"
                _log.warning(words, stop.reason)
            self.engine.emit(Preempted(path=self.keeper.root.path, reason=stop.reason))

    async def hold_to_deadline(self) -> None:
        """Abort the last save, if it was called for and is not durable by its deadline."""
        if not self.ending.is_called or self._deadline_s is None:
            return
        await asyncio.sleep(self._deadline_s)
        late = [(step, save) for step, save in self.upkeep.steps.saves if not save.durable.done()]
        self._late = late[-1] if late else None
        self.abort()  # removals, too: whoever leaves now must not wait for them

    # finding and loading

    def asking(
        self,
        question: Callable[[str, EngineContext], Awaitable[T]],
        engine: EngineCore | None = None,
    ) -> Callable[[EngineContext], Awaitable[T]]:
        """Give a question of `Questions` its key, for the engine to run what is left."""
        return functools.partial(question, (engine or self.engine).next_key("steps"))

    def load_flow(self, step: int | None, asked: Asked) -> Flow[LoadResult]:
        """Load a step, the newest if none is given. Goes on if the block is left meanwhile."""
        engine = self.engine
        if step is not None:
            return (yield from self._load_one(engine, step, [], asked))
        newest = functools.partial(self.questions.newest, 2)  # the one before it is for advice
        steps: list[int] = yield self.asking(newest, engine)
        while steps:
            try:
                return (yield from self._load_one(engine, steps[-1], steps, asked))
            except (CheckpointNotFoundError, CheckpointChangedError):
                if not self.ending.is_alone:  # others may not ask
                    raise
                listed, steps = steps, (yield self.asking(newest, engine))
                if steps[-1:] == listed[-1:]:  # else the run removed it, and has a newer one
                    raise
        raise CheckpointNotFoundError(self.keeper.root.path, "there is no committed step here")

    def _load_one(
        self, engine: EngineCore, step: int, steps: list[int], asked: Asked
    ) -> Flow[LoadResult]:
        """Load the highest of `steps`; or, with `steps` empty, the step that the caller named."""
        from ckptio.runtime.loading import load_flow  # noqa: PLC0415  # imports torch

        try:
            with self.upkeep.steps.held(step, is_load=True), advice(steps):
                then = None if self._second is None else self._second.path(step)
                load = functools.partial(load_flow, engine, self.path(step), asked, then)
                try:
                    result = yield from load()
                except (CheckpointNotFoundError, CheckpointChangedError):
                    # a tier may just be losing it, as `keep_local` wants: the other one has it
                    # (ranks do not all see that at the same place: they raise)
                    if then is None or not self.ending.is_alone:
                        raise
                    result = yield from load()
        except CheckpointNotFoundError as error:
            if steps or not self.ending.is_alone:  # others may not ask
                raise
            with contextlib.suppress(CheckpointError):  # what matters is that it is not there
                steps = yield self.asking(self.questions.steps, engine)
                error.strerror = f"{error.message}; {missing(steps)}"  # not a new one: it has notes
            raise
        self._pace.loaded(step)
        return result
