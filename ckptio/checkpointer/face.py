"""`Checkpointer`: a run's steps side by side, for async code.

Names and documentation are here. What they do is in `core`, on which `blocking` is built, too.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, SupportsFloat

from ckptio._aio import outlive, returns_coroutine
from ckptio._outcome import Outcome
from ckptio.api import Engine
from ckptio.checkpointer.core import CheckpointerCore
from ckptio.checkpointer.finding import Finding
from ckptio.checkpointer.own_engine import engine_for
from ckptio.engine.asked import Asked
from ckptio.handle import SaveHandle
from ckptio.runtime.currents import CallerCurrents
from ckptio.runtime.drive import drive
from ckptio.runtime.leaving import is_breaking_off

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    import torch

    from ckptio.config import CheckpointConfig
    from ckptio.engine.asked import Strict, T
    from ckptio.events import Observer
    from ckptio.plan.retention import Retention
    from ckptio.plan.schedule import SaveEvery
    from ckptio.ranks.discover import RanksLike
    from ckptio.runtime.loading import LoadResult
    from ckptio.state.select import Select
    from ckptio.storage.resolve import PathLike


class Checkpointer(Finding):
    """Saves the steps of a run side by side, finds them again, and keeps some.

    An example::

        async with Checkpointer("run", keep=KeepLast(3), every=SaveEvery(steps=100)) as ckpt:
            if await ckpt.latest() is not None:
                await ckpt.load(into=state)
            for step in range(first, last):
                train(step)
                if await ckpt.should_save(step):
                    await ckpt.save(state, step).staged
                if ckpt.preempted:
                    break

    Everything is derived from what is committed. There is no pointer to the latest step that
    could be wrong, and a step that was not committed does not exist.

    Leaving the block waits for what is in flight, including removals, and raises the error of
    a save that nobody awaited (which was logged already when the next save began). An exception
    that leaves the block aborts what is in flight; `sys.exit()` does not.

    With several ranks, create it alike on all of them, and call `save`, `load`, `should_save`,
    `steps`, `latest`, `records`, `follow` and `discard_after` on all of them, in the same order.
    Rank 0 lists, decides and removes: its `keep=` and `metrics=` count, and are not compared with
    those of other ranks.

    Args:
        root: A local directory or a URL such as `s3://bucket/run`, for a single run; it need not
            exist. Another run that saves here counts as the same.
        keep: Which committed steps to keep; the others are removed in the background after each
            commit. By default, everything. The highest step and the one saved last always stay
            (for steps saved here, by the order of the calls; for others, by the times in the
            manifests), and so does one that is being written or read. Steps with damaged
            manifests are neither counted nor removed, and nothing is removed while the
            storage cannot deliver a manifest. Unless `durability` is `"full"`, keep several:
            a power cut may take the newest.
        then: A second tier: another directory or URL, to which each step is copied in the
            background once it is committed (see `Engine.save`). Copies that earlier runs owe
            are made, too. `load`, `steps` and `records` look at both tiers, and read the first
            one that has a step whole. `keep` is applied to each tier by what is committed
            there; a step that is still to be copied stays.
        keep_local: With `then`: how many of the newest steps stay on the first tier once they
            are copied; at most as many as `keep=KeepLast` keeps, if it is that. By default, what
            `keep` keeps. An older step is removed once the second tier has that very
            save of it, with all its files.
        every: When `should_save` is true. Without it, only when a signal or `preempt` asks
            for the last save; if there are no signals either, the log says so.
        preempt_signals: Signals that announce the end of the run, such as `(signal.SIGTERM,)`.
            Inside the block they no longer have their former effect. It is enough if one rank
            receives one. Requires the main thread. Forked children restore them: workers of a
            `DataLoader` that get it as well, as under torchrun, have to ignore it.
        preempt_deadline_s: Seconds after the signal by which the last save must be committed,
            and copied to a second tier if there is one. After that it is aborted, with
            removals, and leaving the block raises `SaveAbortedError`. A save that begins
            later is not stopped: a process that is still alive may still save.
        sweep_after_s: Remove what a dead save left under a step that has no commit, if nothing
            was written there for this many seconds; `None`: never. At least an hour where no
            lock tells whether a save is alive: in object stores, for a save of another host
            or from before a reboot, and for files of other ranks without the attempt file of
            rank 0. Checked on entering the block, and after a commit once that time has
            passed again. When a save or a copy finds the disk full, what a lock shows to be dead
            is removed without waiting that long. A live save, here or elsewhere, is never touched.
        engine: An open engine to use, which stays open; by default, one of its own.
        config: Options of its own engine.
        observer: Receives the events of its own engine.
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
        self._engine._core.require_other_loop()  # noqa: SLF001  # before anything is ended
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
        saves, passes = self._core.in_flight()
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

        It becomes true inside `should_save`, at the same step on all ranks, and never before
        the state of that step can be saved. With one rank, in a loop that never calls that, it is
        true from the first look after the signal; if that look comes directly after a save, from
        the next; if nothing was saved here yet, from the third. Such a loop must save when it
        finds it true.
        """
        return self._core.preempted

    def preempt(self, reason: str = "asked for") -> None:
        """Do what a signal does: ask all ranks for a last save. From any thread."""
        self._core.preempt(reason)

    async def should_save(self, step: int) -> bool:
        """Whether to save now. Ask once per step, before the state is put together.

        `save` itself always saves, because its caller has put the state together already, which may
        be the expensive part. True when `every` says so, and at the step that ranks agreed on
        for the last save. Does not wait, except for one message to rank 0 and back when
        ranks agree on a time or a signal.

        `SaveEvery(steps=)` is due if the step's number has reached or passed a multiple since the
        step that was saved last here, or that the run was loaded from; if there is none, since the
        highest step that `latest`, `steps` or `records` returned and that is not above the first
        step asked for. A step that is loaded later counts only if the run goes on from it: if the
        next step asked for is not above the one that counted until then.

        Args:
            step: The step that was just completed.

        Raises:
            ConfigError: `step` is not a number of a step.
            EngineClosedError: The checkpointer is not open.
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
            metrics: Numbers by name, stored with the checkpoint, for `records` and `KeepBest`.
                Those of rank 0 count.
            overwrite: Replace the step if it exists on either tier, as after going back to an
                earlier one. Without it, the save fails before its commit; but a second tier
                that does not answer within a second is not waited for.

        Raises:
            UnsupportedLeafError: A value has no portable form. Nothing was written.
            ConfigError: Step or metrics are no numbers.
            EngineClosedError: The checkpointer is not open.
            BaseException: The error of earlier saves that nobody awaited, if ranks disagreed
                on the state or three in a row were not committed.
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
        types: Collection[type] = (),
    ) -> Coroutine[Any, Any, T]:
        """Load the highest committed step, or the one given. See `Engine.load`.

        A damaged step raises, with a note that names the one before it: which work to give up is
        not decided here.

        Args:
            into: The target to fill.
            step: Which step; by default the highest, as rank 0 sees it.
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
        types: Collection[type] = (),
    ) -> Coroutine[Any, Any, LoadResult]:
        """Load a step, and say what was found; see `load` and `Engine.load_with_report`."""
        asked = Asked(into, device, dtype, select, strict, types, reports=True)
        return self._load(step, asked, CallerCurrents())

    async def _load(self, step: int | None, asked: Asked, currents: CallerCurrents) -> Any:
        """Give the result, or its state alone, as is asked for."""
        engine, load = self._core.engine, self._core.load_flow(step, asked)
        result = await drive(engine, load, "load a step", currents)
        return result if asked.reports else result.state


async def _all_done(futures: list[asyncio.Future[Any]]) -> None:
    """Wait for all; their errors count as seen, so that asyncio does not log them."""
    for future in futures:
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
    if futures:
        await asyncio.wait(futures)
