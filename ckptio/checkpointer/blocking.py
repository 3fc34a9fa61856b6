"""`Checkpointer` for classic loops: the same names, blocking."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, SupportsFloat, overload

from ckptio._outcome import Outcome
from ckptio.blocking import Engine, committed
from ckptio.checkpointer.core import CheckpointerCore
from ckptio.checkpointer.following import Following
from ckptio.checkpointer.own_engine import engine_for
from ckptio.checkpointer.steps import step_name
from ckptio.engine.asked import Asked
from ckptio.errors import ConfigError
from ckptio.handle import SaveHandle
from ckptio.runtime.aside import run_uninterrupted
from ckptio.runtime.drive import drive_blocking
from ckptio.runtime.leaving import is_breaking_off

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    import torch

    from ckptio.config import CheckpointConfig
    from ckptio.engine.asked import Strict, T
    from ckptio.events import Observer
    from ckptio.moments import CheckpointInfo
    from ckptio.plan.retention import Retention, StepRecord
    from ckptio.plan.schedule import SaveEvery
    from ckptio.ranks.discover import RanksLike
    from ckptio.runtime.loading import LoadResult
    from ckptio.runtime.running import Running
    from ckptio.state.select import Select
    from ckptio.storage.resolve import PathLike


class Checkpointer:
    """The blocking twin of `ckptio.Checkpointer`: `with Checkpointer("run") as ckpt:`.

    `save` waits for the commit. `start_save` returns the handle at once, for a loop that
    trains on: `handle.staged.wait()`, then change the state.

    Args:
        root: A local directory or a URL; need not exist.
        keep: What is kept of the committed steps; everything if not given.
        then: A second tier, to which each step is copied in the background.
        keep_local: How many steps stay on the first tier once they are copied.
        every: When `should_save` says yes.
        preempt_signals: Signals that announce the end of the run.
        preempt_deadline_s: Seconds after the signal in which the last save has to be
            committed.
        sweep_after_s: Seconds after which what a dead save left is removed.
        engine: An open `ckptio.sync.Engine` to use; it stays open. Its own if not given.
        config: Options of its own engine.
        observer: Takes the events of its own engine.
        ranks: Who takes part, for its own engine.

    Everything else is said at `ckptio.Checkpointer`.
    """

    def __init__(
        self,
        root: PathLike,
        *,
        then: PathLike | None = None,
        keep: Retention | None = None,
        keep_local: int | None = None,
        every: SaveEvery | None = None,
        preempt_signals: Sequence[int] = (),
        preempt_deadline_s: float | None = None,
        sweep_after_s: float | None = 3600.0,
        engine: Engine | None = None,
        config: CheckpointConfig | None = None,
        observer: Observer | None = None,
        ranks: RanksLike = "auto",
    ) -> None:
        self._owns = engine is None
        self._engine = engine_for(
            engine, Engine, "ckptio.sync.Engine", config=config, observer=observer, ranks=ranks
        )
        self._core = CheckpointerCore(
            root,
            then=then,
            keep=keep,
            keep_local=keep_local,
            every=every,
            preempt_signals=preempt_signals,
            preempt_deadline_s=preempt_deadline_s,
            sweep_after_s=sweep_after_s,
        )

    def __enter__(self) -> Self:
        """Open, and its engine if that is its own. Waits for the other ranks."""
        self._core.require_new()
        if self._owns:
            self._engine.__enter__()
        try:
            engine = self._engine._core  # noqa: SLF001  # two faces of one core
            engine.call_blocking(self._core.open(engine), "open a checkpointer")
            self._core.start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for what is in flight, or abort it; then close.

        Raises:
            ConfigError: This is an observer on one of the engine's own threads.
            BaseException: The failure of a save that nobody has seen, as for
                `ckptio.Checkpointer`; not if an exception leaves the block.
        """
        if not self._engine._core.is_here:  # noqa: SLF001  # a forked child has nothing to end
            return
        try:
            self._engine._core.require_elsewhere()  # noqa: SLF001  # before anything is ended
        except ConfigError:
            raise
        except BaseException as interrupt:  # it leaves all the same
            self._leave(type(interrupt), interrupt, traceback)
            raise
        self._leave(kind, error, traceback)

    def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do what leaving the block does, on a thread that may wait."""
        core = self._core
        try:
            try:
                if is_breaking_off(error):
                    core.abort(error)
            finally:
                run_uninterrupted(self._wait_in_flight, "ckptio-wait", core.abort)
        finally:
            try:
                watching = functools.partial(_wait_ended, core.stop_watching())
                run_uninterrupted(watching, "ckptio-wait", core.abort)
            finally:
                try:
                    core.end(error)
                finally:
                    if self._owns:
                        self._engine.__exit__(kind, error, traceback)

    def _wait_in_flight(self) -> None:
        saves, passes = self._core.in_flight()
        for moments in saves:
            moments.durable.wait_done()
        _wait_ended(passes)

    @property
    def engine(self) -> Engine:
        """The engine that does the work."""
        return self._engine

    @property
    def preempted(self) -> bool:
        """Whether the run is to end; see `ckptio.Checkpointer.preempted`."""
        return self._core.preempted

    def preempt(self, reason: str = "asked for") -> None:
        """Do what a signal does; see `ckptio.Checkpointer.preempt`."""
        self._core.preempt(reason)

    def should_save(self, step: int) -> bool:
        """Whether to save now; see `ckptio.Checkpointer.should_save`."""
        while isinstance(answer := self._core.decide(step), Outcome):
            answer.result()
        return answer

    def save(
        self,
        state: Any,
        step: int,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        overwrite: bool = False,
    ) -> CheckpointInfo:
        """Save a step and wait for the commit; see `ckptio.Checkpointer.save`."""
        return committed(self.start_save(state, step, metrics=metrics, overwrite=overwrite))

    def start_save(
        self,
        state: Any,
        step: int,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Start saving a step and return at once; see `ckptio.Checkpointer.save`."""
        return SaveHandle(self._core.save(state, step, metrics, overwrite=overwrite))

    @overload
    def load(
        self,
        into: None = None,
        *,
        step: int | None = ...,
        device: torch.device | str | None = ...,
        dtype: torch.dtype | None = ...,
        select: Select | None = ...,
        strict: Strict = ...,
        types: Collection[type] = ...,
    ) -> Any: ...

    @overload
    def load(
        self,
        into: T,
        *,
        step: int | None = ...,
        device: torch.device | str | None = ...,
        dtype: torch.dtype | None = ...,
        select: Select | None = ...,
        strict: Strict = ...,
        types: Collection[type] = ...,
    ) -> T: ...

    def load(
        self,
        into: T | None = None,
        *,
        step: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        select: Select | None = None,
        strict: Strict = "raise",
        types: Collection[type] = (),
    ) -> T:
        """Load the highest committed step, or the one given; see `ckptio.Checkpointer.load`."""
        asked = Asked(into, device, dtype, select, strict, types, reports=False)
        engine = self._core.engine
        state: T = drive_blocking(engine, self._core.load_flow(step, asked), "load a step").state
        return state

    def load_with_report(
        self,
        into: Any = None,
        *,
        step: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        select: Select | None = None,
        strict: Strict = "report",
        types: Collection[type] = (),
    ) -> LoadResult:
        """Load a step, and say what was found; see `ckptio.Checkpointer.load_with_report`."""
        asked = Asked(into, device, dtype, select, strict, types, reports=True)
        engine = self._core.engine
        return drive_blocking(engine, self._core.load_flow(step, asked), "load a step")

    def steps(self) -> tuple[int, ...]:
        """List the committed steps; see `ckptio.Checkpointer.steps`."""
        core = self._core
        return tuple(core.engine.call_blocking(core.asking(core.questions.steps), "list steps"))

    def latest(self) -> int | None:
        """Give the highest committed step; `None` if there is none."""
        core = self._core
        question = functools.partial(core.questions.newest, 1)
        return max(
            core.engine.call_blocking(core.asking(question), "find the latest step"), default=None
        )

    def follow(
        self, *, after: int | None = None, poll_s: float = 10.0, timeout_s: float | None = None
    ) -> Iterator[int]:
        """Give the newest committed step whenever there is one; see `ckptio.Checkpointer.follow`.

        Blocks where the next one is asked for.
        """
        return _NewSteps(self._core, Following(after, poll_s, timeout_s))

    def discard_after(self, step: int) -> tuple[int, ...]:
        """Remove the steps above one; see `ckptio.Checkpointer.discard_after`."""
        core = self._core
        step_name(step)
        question = functools.partial(core.questions.discard, step)
        return tuple(core.engine.call_blocking(core.asking(question), "discard steps"))

    def records(self) -> tuple[StepRecord, ...]:
        """Give number, time and metrics of steps; see `ckptio.Checkpointer.records`."""
        core = self._core
        return tuple(core.engine.call_blocking(core.asking(core.questions.records), "list records"))

    def path(self, step: int) -> str:
        """Give the path of a step's checkpoint, committed or not."""
        return self._core.path(step)


class _NewSteps(Iterator[int]):
    """What `Checkpointer.follow` gives; it goes on after an interrupt or an error."""

    def __init__(self, core: CheckpointerCore, following: Following) -> None:
        self._core = core
        self._following = following

    def __next__(self) -> int:
        with self._following.asked_by(threading.get_ident()):
            step = self._next()
        if step is None:
            raise StopIteration
        return step

    def _next(self) -> int | None:
        """Wait for the next step; `None` at the end."""
        core, following = self._core, self._following
        while (pause_s := following.pause_s) is not None:
            began_s = time.monotonic()
            try:
                time.sleep(pause_s)
            finally:
                following.paused(time.monotonic() - began_s)
            look = core.asking(functools.partial(core.questions.new, following))
            try:
                found = core.engine.call_blocking(look, "look for new steps")
            except BaseException as error:
                following.broke_off(error, is_alone=core.ending.is_alone)
                raise
            for step in following.take(found):
                return step
        return None


def _wait_ended(runs: Iterable[Running[None]]) -> None:
    for running in runs:
        running.wait_ended()
