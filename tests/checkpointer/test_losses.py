"""A run that waits for `staged` alone is not to go on for long without a checkpoint."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import CheckpointError, PlanError, RankError, StalePlanError, StorageError
from ckptio.checkpointer.losses import Losses, is_disk_full, missed_deadline
from ckptio.moments import SaveMoments
from ckptio.storage.files import PosixFiles
from ckptio.testing import run_virtual
from tests.checkpointer.rig import checkpointer_on, committed_steps, engines, on_each
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from pathlib import Path

    from ckptio import Checkpointer, Engine


class Disk(PosixFiles):
    """One that is full at times; nobody hears of it before the names are written."""

    is_full = False

    def publish(self, source: str, target: str) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().publish(source, target)


async def save(checkpointer: Checkpointer, step: int, more: Any = None) -> None:
    """Save a step as a loop does that trains on once the state is staged; it ends meanwhile."""
    handle = checkpointer.save({"w": torch.ones(3), "more": more}, step)
    try:
        await handle.staged
    except CheckpointError:
        pytest.fail("it was told of by staged")
    await asyncio.sleep(10)


def test_the_third_failure_in_a_row_is_raised_by_the_next_save(tmp_path: Path) -> None:
    """One of a store that failed for a while is not, nor one that somebody has seen."""
    disk = Disk()

    async def scenario() -> None:
        async with engines(files=disk) as (engine,):
            with pytest.raises(StorageError, match="step-00000001"):  # as nobody saw that
                await train(engine)

    async def train(engine: Engine) -> None:
        async with checkpointer_on(engine, tmp_path) as checkpointer:
            for step, disk.is_full in enumerate((True, False, True, True, True), 1):
                await save(checkpointer, step)
            with pytest.raises(StorageError, match="No space") as caught:
                checkpointer.save({"w": torch.ones(3)}, 6)
            (note,) = caught.value.__notes__
            assert note.startswith("the save of step 5 was not committed, nor were those of 3, 4;")
            for step in (6, 7, 8):
                with pytest.raises(StorageError):
                    await checkpointer.save({"w": torch.ones(3)}, step)
            disk.is_full = False
            await save(checkpointer, 9)

    run_virtual(scenario(), seed=0)
    assert committed_steps(tmp_path) == [2, 9]


@in_virtual_time
async def test_the_last_save_of_a_run_is_tried_whatever_became_of_others(tmp_path: Path) -> None:
    """There is no other moment for it; leaving the block tells of them."""
    disk = Disk()

    async def train(engine: Engine) -> None:
        async with checkpointer_on(engine, tmp_path) as checkpointer:
            for step, disk.is_full in enumerate((True, True, True), 1):
                assert not await checkpointer.should_save(step)
                await save(checkpointer, step)
            disk.is_full = False
            checkpointer.preempt("going")
            await asyncio.sleep(1)
            assert await checkpointer.should_save(4)
            await save(checkpointer, 4)

    async with engines(files=disk) as (engine,):
        with pytest.raises(StorageError, match="step-00000001"):
            await train(engine)
    assert committed_steps(tmp_path) == [4]


@in_virtual_time
async def test_what_ranks_disagree_on_is_raised_by_the_next_save(tmp_path: Path) -> None:
    """It would be refused again, at each step; on all ranks alike."""

    async def body(rank: int, engine: Engine) -> None:
        async with checkpointer_on(engine, tmp_path) as checkpointer:
            await save(checkpointer, 1, rank)
            with pytest.raises(RankError, match="ranks disagree on 1 value: 'more'"):
                checkpointer.save({"w": torch.ones(3)}, 2)
            await save(checkpointer, 3)

    async with engines(2) as group:
        assert await on_each(group, body) == [None, None]
    assert committed_steps(tmp_path) == [3]


@in_virtual_time
async def test_what_the_next_save_mends_is_not_raised_by_it(tmp_path: Path) -> None:
    """A rank lets go of what it was to write, and another has that still: that one stages it."""

    async def body(rank: int, engine: Engine) -> None:
        average = {f"e{i}": torch.ones(20_000) for i in range(6)}  # of which each rank writes some
        async with checkpointer_on(engine, tmp_path) as checkpointer:
            await save(checkpointer, 1, average)
            if rank:
                with pytest.raises(RankError, match=r"StalePlanError: .*changed, not those of"):
                    await checkpointer.save({"w": torch.ones(3), "more": {}}, 2).staged
                await asyncio.sleep(10)
            else:
                await save(checkpointer, 2, average)
            await save(checkpointer, 3, {} if rank else average)

    async with engines(2) as group:
        told, none = await on_each(group, body)
        assert "step-00000002" in str(told)  # when it left: nobody had seen that
        assert none is None
    assert committed_steps(tmp_path) == [1, 3]


def failed(error: Exception) -> SaveMoments:
    """Give a save that failed, and of which nobody knows."""
    moments = SaveMoments("memory", "0" * 32)
    moments.fail(error)
    moments._is_told = True  # the log need not say so
    return moments


def test_whoever_has_seen_a_failure_knows_of_those_before_it() -> None:
    """What fails behind it begins a new row."""
    losses = Losses()
    saves = [(step, failed(StorageError("it is away", path="memory"))) for step in range(1, 7)]
    saves[2][1].seen()
    losses.note(saves[:5])
    losses.check()
    losses.note(saves)
    with pytest.raises(StorageError):
        losses.check()


def test_a_failure_that_was_seen_late_does_not_count() -> None:
    """Somebody has waited for it in the end, though another save has begun since."""
    losses = Losses()
    saves = [(step, failed(StorageError("it is away", path="memory"))) for step in range(1, 4)]
    losses.note(saves)
    saves[0][1].seen()
    losses.note(saves)
    losses.check()


def test_a_save_counts_once_it_has_ended() -> None:
    """However often it was looked at before."""
    losses = Losses()
    late = failed(PlanError("two of one name"))
    save = SaveMoments("memory", "0" * 32)
    save._is_told = True  # as in `failed`
    losses.note([(1, late), (2, save)])
    with pytest.raises(PlanError):
        losses.check()
    save.fail(PlanError("again"))
    losses.note([(2, save)])
    with pytest.raises(PlanError, match="again"):
        losses.check()


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [(PlanError("two of one name"), True), (StalePlanError("save again"), False)],
)
def test_a_state_that_is_refused_is_told_of_at_once(error: Exception, *, is_raised: bool) -> None:
    """But not of a plan that the next save makes anew."""
    losses = Losses()
    losses.note([(1, save := failed(error))])
    if is_raised:
        with pytest.raises(PlanError):
            losses.check()
    losses.check()
    assert save.is_settled() is is_raised


def test_a_disk_is_full_on_whichever_rank_and_by_whatever_limit() -> None:
    """A quota is one, and other ranks may have failed of something else."""
    full, lost = f"StorageError: [Errno {errno.EDQUOT}] cannot write", "PeerLostError: it died"
    assert is_disk_full(StorageError("cannot write", path="memory", code=errno.EDQUOT))
    assert is_disk_full(RankError("two failed", causes={0: lost, 1: full}))
    assert not is_disk_full(RankError("one failed", causes={0: lost}))
    assert not is_disk_full(StorageError("cannot write", path="memory"))
    assert not is_disk_full(PlanError("two of one name"))


def test_a_save_that_was_committed_all_the_same_has_missed_no_deadline() -> None:
    """Its abort came too late; nothing is said of one that nobody knows of yet."""
    save = SaveMoments("memory", "0" * 32)
    assert missed_deadline(1, save, "memory", 5.0) is None
    none: Any = None
    save.committed.reach(none)
    assert missed_deadline(1, save, "memory", 5.0) is None
