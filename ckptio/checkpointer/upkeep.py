"""Remove steps that are no longer kept, after each commit, on rank 0.

What to remove is decided from what is committed then, on the engine's loop: the trainer never
waits for it. The step that was committed here last stays, whatever a policy or a clock says,
until another one is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from typing import TYPE_CHECKING

from ckptio._aio import run_all
from ckptio._failures import without_frames
from ckptio.checkpointer.losses import is_disk_full
from ckptio.checkpointer.metrics import warn_of_unmeasured
from ckptio.checkpointer.run_steps import RunSteps
from ckptio.checkpointer.steps import step_name
from ckptio.errors import CheckpointError, FormatError, StorageError
from ckptio.events import HigherStepFound, RetentionFailed
from ckptio.runtime.leaving import end_saves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.checkpointer.keeper import Keeper
    from ckptio.checkpointer.thinning import Thinning
    from ckptio.checkpointer.tiers import SecondTier
    from ckptio.moments import SaveMoments
    from ckptio.plan.retention import Retention
    from ckptio.runtime.core import EngineCore
    from ckptio.runtime.running import Running
    from ckptio.storage.root_interface import Found

_log = logging.getLogger("ckptio")


class Upkeep:
    """What follows the saves of a checkpointer: what is removed, swept, and copied late.

    Args:
        engine: Runs it.
        keeper: Looks after the first tier.
        second: The second tier, if there is one.
        keep: Which steps are kept; all if not given.
        sweep_after_s: After how long what dead saves left is removed; `None` for never.
        is_ending: Says whether the last save was called for.
        clock: Gives seconds that only rise.

    Attributes:
        steps: Those that this run saves and loads.
        passes: What runs in the background; some may have ended.
    """

    def __init__(
        self,
        engine: EngineCore,
        keeper: Keeper,
        second: SecondTier | None,
        *,
        keep: Retention | None,
        sweep_after_s: float | None,
        is_ending: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._context = engine.context  # for what runs on the loop, as the engine closes, too
        self._keeper = keeper
        self._second = second
        self._keep = keep
        self._sweep_after_s = sweep_after_s
        self._is_ending = is_ending
        self._clock = clock
        self._swept_s: dict[Keeper, float] = {}
        self.steps = RunSteps()
        self.passes: dict[Running[None], None] = {}  # changed without a lock
        #: One for each tier, so that a second one that hangs does not hold up the first.
        self._turns: defaultdict[Keeper, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._thinning: Thinning | None = None
        if second is not None:
            self._thinning = second.thinning(keeper, self.steps.exempt, self._turns[keeper])
        self._waiting: set[tuple[object, ...]] = set()  # calls of `_tidy` that wait for their turn
        self._is_warned = False
        self._is_told_of_metrics = False

    def start(self) -> None:
        """Begin to make the copies that earlier runs owe, and to sweep."""
        second, path = self._second, self._keeper.root.path
        if second is not None:
            taking = self._engine.submit(lambda _: self._take_up(second, path), f"take up {path}")
            self.passes[taking] = None
        if self._sweep_after_s is not None:
            self.tidy_after(None)

    def abort(self, error: BaseException | None) -> None:
        """Stop what is under way. From any thread; waits for nothing.

        Args:
            error: What the block is left by. With one, the log says what is lost.
        """
        for step, moments in self.steps.saves:
            if not moments.durable.done():
                what = "copy" if moments.committed.done() else "save"
                if error is not None:
                    words = "the %s of step %d is aborted by %r, unless it is just being committed"
                    _log.warning(words, what, step, error)
                moments.abort()
        for running in list(self.passes):
            running.abort()

    def end(self, error: BaseException | None) -> None:
        """See to it that every failure was seen; see `runtime.leaving.end_saves`."""
        end_saves([moments for _, moments in self.steps.saves], error)

    def tidy_after(self, moments: SaveMoments | None) -> None:
        """Have what is no longer kept removed once a save is committed, on rank 0.

        Args:
            moments: The save; `None` to sweep only, at once.
        """
        engine = self._engine
        nothing_to_do = self._keep is None and self._sweep_after_s is None
        if engine.context.ranks.rank != 0 or (nothing_to_do and self._second is None):
            return
        root = self._keeper.root.path
        running = engine.submit(lambda _: self._pass(moments), f"look after {root}")
        self.passes[running] = None
        for ended in [run for run in list(self.passes) if run.end.done()]:
            self.passes.pop(ended, None)  # a signal's handler that saves may have done so

    async def _take_up(self, second: SecondTier, path: str) -> None:
        """Make the copies that earlier runs owed; then tidy each tier that has a step of this run.

        Not one that has none: nobody knows which step this run is about to load.
        """
        await second.take_up(path)
        for keeper in (second.keeper, self._keeper):
            if self.steps.last(is_copied=keeper is second.keeper) is not None:
                await self._tidy(keeper, is_after_save=True)

    async def _pass(self, moments: SaveMoments | None) -> None:
        """Tidy each tier once it has the save, or make room if it is full; see `tidy_after`."""
        if moments is not None and not await moments.committed.ended():
            await self._make_room(self._keeper, moments.committed.error())
            return
        is_after_save = moments is not None
        await self._tidy(self._keeper, is_after_save=is_after_save)
        second = self._second
        if second is None:
            return
        if moments is not None and not await moments.durable.ended():
            await self._make_room(second.keeper, moments.durable.error())
            return
        await self._tidy(second.keeper, is_after_save=is_after_save)
        if is_after_save:  # what was still to be copied when the first tier was looked at
            await self._tidy(self._keeper, is_after_save=True)

    async def _tidy(self, keeper: Keeper, *, is_after_save: bool, is_full: bool = False) -> None:
        """Remove what is not kept on one tier, and sweep it if that is due; one call at a time.

        A call returns at once while one like it waits for its turn, which looks at all by then.
        With `is_after_save` the policy is applied, as it is known which step this run needs; with
        `is_full`, all is swept that is known to be dead, due or not.
        """
        call = keeper, is_after_save, is_full
        if call in self._waiting:
            return
        self._waiting.add(call)
        try:
            await self._turns[keeper].acquire()
        finally:
            self._waiting.discard(call)
        try:
            await self._tidy_now(keeper, is_after_save=is_after_save, is_full=is_full)
        except Exception as error:  # the observer is told; the run goes on
            self._engine.emit(RetentionFailed(path=keeper.root.path, error=error))
        finally:
            self._turns[keeper].release()
        if keeper is self._keeper and is_after_save:
            await self._thin_out()

    async def _thin_out(self) -> None:
        """Apply `keep_local`. Not in a turn: the second tier, which is asked, may hang."""
        if self._thinning is not None:
            try:
                await self._thinning.thin_out()
            except Exception as error:  # as above
                self._engine.emit(RetentionFailed(path=self._keeper.root.path, error=error))

    async def _tidy_now(self, keeper: Keeper, *, is_after_save: bool, is_full: bool) -> None:
        policy = self._keep if is_after_save else None
        quiet_s = self._sweep_after_s if is_full or self._is_sweep_due(keeper) else None
        # only where it is needed: in an object store, it takes a request for each step
        found = None if policy is None and quiet_s is None else await keeper.find(aside=True)
        await self._look_ahead(keeper, found)
        if found is not None and policy is not None:
            await self._remove(keeper, policy, found)
        if found is not None and quiet_s is not None and (is_full or not self._is_in_a_hurry()):
            began_s = self._clock()
            await self._sweep(keeper, found, 0 if is_full else quiet_s)  # 0 finds less: no guesses
            if not is_full:
                self._swept_s[keeper] = began_s

    async def _make_room(self, keeper: Keeper, error: BaseException | None) -> None:
        """If a save or a copy failed because the disk is full, make room for the next one.

        Steps that an earlier run left are removed after a commit, and there is none as long as they
        take its room. But as in `_take_up`, not before it is known which step this run needs.
        """
        if is_disk_full(error):  # of the two, either may fail
            await self._tidy(keeper, is_after_save=False, is_full=True)
            if self.steps.needed():
                await self._tidy(keeper, is_after_save=True)

    def _is_sweep_due(self, keeper: Keeper) -> bool:
        """Whether a tier is to be swept now: the first time, and then after a while."""
        if self._sweep_after_s is None or self._is_in_a_hurry():
            return False
        last_s = self._swept_s.get(keeper)
        pause_s = keeper.sweep_pause_s(self._sweep_after_s)
        return last_s is None or self._clock() - last_s >= pause_s

    async def _sweep(self, keeper: Keeper, found: Sequence[Found], quiet_s: float) -> None:
        """Remove what dead saves left."""
        exempt: Callable[[], set[int]] = self.steps.exempt
        if self._second is not None and keeper is self._second.keeper:
            exempt = await self._second.exempt_from_sweep(exempt, found, self._keeper.root)
        await keeper.sweep(quiet_s, exempt, found)

    async def _look_ahead(self, keeper: Keeper, found: Sequence[Found] | None) -> None:
        """Say, once, that a load will take another step than the one that was saved last."""
        saved = self.steps.last()
        if saved is None or self._is_warned:
            return
        higher = await keeper.newest(1, above=saved, but=self.steps.saved, found=found)
        if higher and not self._is_warned:
            self._is_warned = True
            path, highest = self._keeper.root.path, higher[0]
            self._engine.emit(HigherStepFound(path=path, step=saved, highest=highest))

    async def _remove(self, keeper: Keeper, policy: Retention, found: Sequence[Found]) -> None:
        """Remove the steps that the policy does not keep, some at a time."""
        called = [moments.save_id for _, moments in self.steps.called]
        removals = await keeper.plan(policy, self._exempt(keeper), found, called=called, aside=True)
        if not self._is_told_of_metrics:  # everything is kept then
            self._is_told_of_metrics = warn_of_unmeasured(policy, keeper.known, keeper.root.path)
        going = list(removals.items())
        at_once = keeper.max_removals
        for start in range(0, len(going), at_once):
            some = going[start : start + at_once]
            ends = await run_all([self._let_go(*each, keeper) for each in some], "remove a step")
            for error in ends:
                if error is not None:
                    raise error

    async def _let_go(self, step: int, save_id: str, keeper: Keeper) -> StorageError | None:
        """Remove the step that a save made, unless somebody needs it by now.

        Gives the error, if the storage does not say whether it is owed, or does not answer. That is
        not raised here, which would cut off the removals beside this one.
        """
        try:
            # whether or not this run has a second tier: while that is down, one may do without
            if keeper is self._keeper and await self._owes(step, save_id):
                return None
        except StorageError as error:
            return without_frames(error)  # its traceback has this: no reference cycle
        if self._thinning is not None and keeper is not self._keeper:
            with contextlib.suppress(CheckpointError):  # `thin_out` tells of it
                await self._thinning.thin_out_step(step)
        if step not in self._exempt(keeper) and not self._is_in_a_hurry():
            removal = await keeper.remove(step, save_id)
            if removal.is_unanswered and isinstance(removal.error, StorageError):
                return without_frames(removal.error)
        return None

    async def _owes(self, step: int, save_id: str) -> bool:
        """Whether the step that a save made on the first tier is still to be copied."""
        storage = self._context.resolver.storage(self._keeper.root.join(step_name(step)))
        return await storage.has_note(save_id)

    def _is_in_a_hurry(self) -> bool:
        """Whether the time that is left is needed by the last save, which is not committed yet."""
        return self._is_ending() and any(
            not moments.committed.done() for _, moments in self.steps.saves
        )

    def _exempt(self, keeper: Keeper) -> set[int]:
        """Name the steps that stay on a tier; see `RunSteps.exempt`."""
        return self.steps.exempt(is_copied=keeper is not self._keeper)

    async def discard(self, keeper: Keeper, step: int) -> None:
        """Remove a step that somebody does not want.

        Raises:
            CheckpointError: It cannot be removed.
        """
        async with self._turns[keeper]:
            await self.steps.forget(step)
            error = (await keeper.remove(step)).error
        if isinstance(error, FormatError):
            damaged = type(error)(f"{keeper.root.join(step_name(step))!r}: {error}")
            damaged.add_note(
                "save(..., overwrite=True) replaces this step when its number comes again; "
                "or remove its directory by hand"
            )
            raise damaged from None
        if error is not None:
            raise error
