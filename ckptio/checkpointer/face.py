"""`Checkpointer`: a run's steps side by side, for async code."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import TYPE_CHECKING, Any, SupportsFloat

from ckptio._aio import outlive, returns_coroutine
from ckptio._outcome import Outcome
from ckptio.api import Engine
from ckptio.checkpointer.core import CheckpointerCore
from ckptio.checkpointer.own_engine import engine_for
from ckptio.checkpointer.steps import step_name
from ckptio.engine.asked import Asked
from ckptio.handle import SaveHandle
from ckptio.runtime.currents import CallerCurrents
from ckptio.runtime.drive import drive
from ckptio.runtime.leaving import is_breaking_off

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    import torch

    from ckptio.config import CheckpointConfig
    from ckptio.engine.asked import Strict, T
    from ckptio.events import Observer
    from ckptio.plan.retention import Retention, StepRecord
    from ckptio.plan.schedule import SaveEvery
    from ckptio.ranks.discover import RanksLike
    from ckptio.runtime.flows import LoadResult
    from ckptio.state.select import Select
    from ckptio.storage.resolve import PathLike


class Checkpointer:
    """Saves the steps of a run side by side, finds them again, and keeps some.

        async with Checkpointer("run", keep=KeepLast(3), every=SaveEvery(steps=100)) as ckpt:
            if await ckpt.latest() is not None:
                await ckpt.load(into=state)
            for step in range(first, last):
                train(step)
                if await ckpt.should_save(step):
                    await ckpt.save(state, step).staged
                if ckpt.preempted:
                    break

    Everything is derived from what is committed: there is no pointer to the latest step
    that could be wrong, and a step that was not committed is none.

    Leaving the block waits for what is in flight, removals included, and raises the error
    of a save that nobody waited for; the log has it before, when the next save begins. Leaving
    it by an error aborts what is in flight; `sys.exit()` is none.

    With several ranks, make it alike on all of them, and call `save`, `load`,
    `should_save`, `steps`, `latest`, `records` and `discard_after` on all of them alike and in
    one order.
    Rank 0 lists, decides and removes: its `keep=` and its `metrics=` count, those of other
    ranks are not compared with them.

    Args:
        root: A local directory or a URL, such as `s3://bucket/run`; need not exist. One
            run's: another one that saves here counts as the same.
        keep: What is kept of the committed steps; the rest is removed in the background
            after each commit. Everything if not given. The highest step and the one
            saved last always stay (of those saved here by the order of the calls, else by
            the times in the manifests), and so does one that is being written or read.
            Steps with damaged manifests are neither counted nor removed; and while the
            storage does not give a manifest, nothing is removed. Where `durability` is not
            `"full"`, keep several: a power cut may take the newest.
        then: A second tier: another directory or URL, to which each step is copied in the
            background once it is committed (see `Engine.save`). Copies that earlier runs
            owed are made, too. `load`, `steps` and `records` look at both tiers, and read
            the first that has a step whole. Both are looked after by `keep`, each by what
            is committed there; a step that is still to be copied stays.
        keep_local: With `then`: how many steps stay on the first tier once they are
            copied, the newest; no more than `keep=KeepLast` keeps, if it is that. What `keep`
            keeps if not given. Further ones go when the
            second tier has that very save of them, with all its files.
        every: When `should_save` says yes. Without it, only when a signal or `preempt` asks for
            the last save; the log says so where there are no signals, either.
        preempt_signals: Signals that announce the end of the run, such as
            `(signal.SIGTERM,)`. Inside the block they no longer do what they did before.
            One rank that gets one is enough. Needs the main thread. Forked children give
            them back.
        preempt_deadline_s: Seconds after the signal in which the last save has to be
            committed, and copied to the second tier if there is one; aborted then, with
            removals, and leaving the block raises `SaveAbortedError`. A save that begins
            later than that is not held back: whoever is still alive may still save.
        sweep_after_s: Remove what a dead save left under a step that has no commit, when
            nothing was written there for this many seconds; `None` for never. For an hour at
            least where no lock tells whether a save is alive: in object stores, and on a disk
            for one of another host or from before a reboot, and for files of other ranks than
            rank 0 without the attempt file that rank 0 makes. Looked for on entering the
            block, and after a commit when that long has passed since. A save that is alive,
            here or elsewhere, is never touched.
        engine: An open engine to use; it stays open. Its own if not given.
        config: Options of its own engine.
        observer: Takes the events of its own engine.
        ranks: Who takes part, for its own engine; see `Engine`.

    Raises:
        ConfigError: An option is wrong, or would have no effect.
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
            engine, Engine, "ckptio.Engine", config=config, observer=observer, ranks=ranks
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

    async def __aenter__(self) -> Self:
        """Open, and its engine if that is its own. Waits for the other ranks."""
        self._core.require_new()
        if self._owns:
            await self._engine.__aenter__()
        try:
            engine = self._engine._core  # noqa: SLF001  # two faces of one core
            await engine.call(self._core.open(engine), "open a checkpointer")
            self._core.start()
        except BaseException:
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for what is in flight, or abort it; then close."""
        core = self._core
        if not self._engine._core.is_here:  # noqa: SLF001  # a forked child has nothing to end
            return
        if is_breaking_off(error):
            core.abort(error)
        try:
            await outlive(asyncio.ensure_future(self._in_flight_ended()), on_cancel=core.abort)
        finally:
            try:
                watching = [r.end.wrapped() for r in core.stop_watching()]
                await outlive(asyncio.ensure_future(_all_done(watching)))
            finally:
                try:
                    core.end(error)
                finally:
                    if self._owns:
                        await self._engine.__aexit__(kind, error, traceback)

    async def _in_flight_ended(self) -> None:
        saves, passes = self._core.waits()
        await _all_done(
            [asyncio.ensure_future(moments.durable.ended()) for moments in saves]
            + [running.end.wrapped() for running in passes]
        )

    @property
    def engine(self) -> Engine:
        """The engine that does the work."""
        return self._engine

    @property
    def preempted(self) -> bool:
        """Whether the run is to end: `should_save` has asked for the last save.

        It becomes true inside `should_save`, at the same step on all ranks, and never
        before the state of that step can be saved. Where there is one rank, which never calls
        that, it is true from the first look after the signal on; where that comes right behind
        a save, from the next one on; where nothing was saved here yet, from the third one on.
        Such a loop has to save where it is.
        """
        return self._core.preempted

    def preempt(self, reason: str = "asked for") -> None:
        """Do what a signal does: ask all ranks for a last save. From any thread."""
        self._core.preempt(reason)

    async def should_save(self, step: int) -> bool:
        """Whether to save now. Ask once a step, before the state is put together.

        `save` itself always saves: whoever calls it has the state ready, and putting it
        together may be what costs most. Says yes when `every` does, and at the step that
        ranks agreed on for the last save. Waits for nothing, but for one message to rank
        0 and back when a time or a signal is agreed upon.

        The multiples of `SaveEvery(steps=)` count from the step that was loaded here; if none
        was, from the highest one that `latest`, `steps` or `records` gave and that is not above
        the first step asked for.

        Args:
            step: The step that was just done.
        """
        while isinstance(answer := self._core.decide(step), Outcome):
            await outlive(answer.wrapped())
        return answer

    def save(
        self,
        state: Any,
        step: int,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Start saving a step; returns at once. See `Engine.save`.

        Args:
            state: What to save.
            step: Its number, at least 0.
            metrics: What was measured, kept with the checkpoint, for `records` and for
                `KeepBest`. Those of rank 0 count.
            overwrite: Replace the step if it is there, on either tier, as after going back
                to an earlier one. The save fails else, before its commit; but a second tier
                that does not say within a second what it has is not waited for.

        Raises:
            UnsupportedLeafError: A value has no portable form. Nothing was written.
            ConfigError: Step or metrics are no numbers.
            EngineClosedError: The checkpointer is not open.
            BaseException: How earlier saves failed, if nobody waited for them: where ranks
                disagreed on the state, or three in a row were not committed.
        """
        return SaveHandle(self._core.save(state, step, metrics, overwrite=overwrite))

    @returns_coroutine
    def load(
        self,
        into: T | None = None,
        *,
        step: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        select: Select | None = None,
        strict: Strict = "raise",
        types: Sequence[type] = (),
    ) -> Coroutine[Any, Any, T]:
        """Load the highest committed step, or the one given. See `Engine.load`.

        A step that turns out damaged raises, with a note that names the one before: which
        work to give up is not decided here.

        Args:
            into: What to fill.
            step: Which one; the highest if not given, as rank 0 sees it.
            device: See `Engine.load`, as for all that follow.
            dtype: As above.
            select: As above.
            strict: As above.
            types: As above.

        Raises:
            CheckpointNotFoundError: There is no committed step, or not this one.
            CheckpointError: As with `Engine.load`.
        """
        asked = Asked(into, device, dtype, select, strict, types, reports=False)
        return self._load(step, asked, CallerCurrents())

    @returns_coroutine
    def load_with_report(
        self,
        into: Any = None,
        *,
        step: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        select: Select | None = None,
        strict: Strict = "report",
        types: Sequence[type] = (),
    ) -> Coroutine[Any, Any, LoadResult]:
        """Load a step, and say what was found; see `load` and `Engine.load_with_report`."""
        asked = Asked(into, device, dtype, select, strict, types, reports=True)
        return self._load(step, asked, CallerCurrents())

    async def _load(self, step: int | None, asked: Asked, currents: CallerCurrents) -> Any:
        """Give the result, or its state alone, as is asked for."""
        engine, load = self._core.engine, self._core.load_flow(step, asked)
        result = await drive(engine, load, "load a step", currents)
        return result if asked.reports else result.state

    async def steps(self) -> tuple[int, ...]:
        """List the committed steps, lowest first.

        Raises:
            StorageError: They cannot be listed.
        """
        core = self._core
        return tuple(await core.engine.call(core.asking(core.questions.steps), "list steps"))

    async def latest(self) -> int | None:
        """Give the highest committed step; `None` if there is none."""
        core = self._core
        question = functools.partial(core.questions.newest, 1)
        return max(
            await core.engine.call(core.asking(question), "find the latest step"), default=None
        )

    async def discard_after(self, step: int) -> tuple[int, ...]:
        """Remove the steps above one: those of a run that went back to it.

        Else they are what `load` takes after the next restart, and what `keep` counts. A copy
        that an earlier run owed of such a step is stopped: there is nothing left to copy.

            state = await ckpt.load(step=800)  # the loss blew up after it
            await ckpt.discard_after(800)

        Args:
            step: The highest one to stay; it need not exist.

        Returns:
            The steps that were removed, from one tier or both, lowest first.

        Raises:
            ConfigError: It is no step, or one above it is being saved, copied or read here.
            StorageError: One cannot be removed. Those above it are gone; call it again.
            FormatError: One is damaged, so that nobody knows what is part of it.
            RankError: One of these, where there are several ranks; or these gave different steps,
                and nothing was removed.
        """
        core = self._core
        step_name(step)
        question = functools.partial(core.questions.discard, step)
        return tuple(await core.engine.call(core.asking(question), "discard steps"))

    async def records(self) -> tuple[StepRecord, ...]:
        """Give number, time and metrics of the committed steps, lowest first.

        Steps whose manifests cannot be read are left out.
        """
        core = self._core
        return tuple(await core.engine.call(core.asking(core.questions.records), "list records"))

    def path(self, step: int) -> str:
        """Give the path of a step's checkpoint, committed or not."""
        return self._core.path(step)


async def _all_done(futures: list[asyncio.Future[Any]]) -> None:
    """Wait for all, and look at how they ended."""
    for future in futures:
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
    if futures:
        await asyncio.wait(futures)
