"""A run that waits for `staged` alone is not to go on for long without a checkpoint."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import CheckpointError, RankError, StorageError
from ckptio.storage.files import PosixFiles
from ckptio.testing import run_virtual
from tests.checkpointer.rig import checkpointer_on, committed_steps, engines, on_each

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


def test_the_last_save_of_a_run_is_tried_whatever_became_of_others(tmp_path: Path) -> None:
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

    async def scenario() -> None:
        async with engines(files=disk) as (engine,):
            with pytest.raises(StorageError, match="step-00000001"):
                await train(engine)

    run_virtual(scenario(), seed=0)
    assert committed_steps(tmp_path) == [4]


def test_what_ranks_disagree_on_is_raised_by_the_next_save(tmp_path: Path) -> None:
    """It would be refused again, at each step; on all ranks alike."""

    async def body(rank: int, engine: Engine) -> None:
        async with checkpointer_on(engine, tmp_path) as checkpointer:
            await save(checkpointer, 1, rank)
            with pytest.raises(RankError, match="ranks disagree on 1 value: 'more'"):
                checkpointer.save({"w": torch.ones(3)}, 2)
            await save(checkpointer, 3)

    async def scenario() -> None:
        async with engines(2) as group:
            assert await on_each(group, body) == [None, None]

    run_virtual(scenario(), seed=0)
    assert committed_steps(tmp_path) == [3]


def test_what_the_next_save_mends_is_not_raised_by_it(tmp_path: Path) -> None:
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

    async def scenario() -> None:
        async with engines(2) as group:
            told, none = await on_each(group, body)
            assert "step-00000002" in str(told)  # when it left: nobody had seen that
            assert none is None

    run_virtual(scenario(), seed=0)
    assert committed_steps(tmp_path) == [1, 3]
