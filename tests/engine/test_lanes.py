"""Lanes: a few ranges of a file in each visit to a thread."""

from __future__ import annotations

import asyncio
import errno
import threading
from typing import TYPE_CHECKING

import pytest

from ckptio.config import KiB
from ckptio.errors import CorruptionError
from ckptio.testing import MemoryStorage, fail_at, run_virtual
from tests.rig import SMALL, assert_same, config_with, inline_engine, random_state

if TYPE_CHECKING:
    from ckptio.testing import Operation

#: One reader, which takes four ranges in a visit at first.
LONE_READER = config_with(max_reads=1, bucket_nbytes=2048 * KiB)
LARGE = [40 * SMALL.slab_nbytes]


@pytest.mark.parametrize("seed", range(12))
def test_a_lane_with_nothing_left_to_read_waits_for_no_slab(seed: int) -> None:
    """A load ends with its last range, whoever has the slab that another lane waited for."""

    async def scenario() -> None:
        storage = MemoryStorage()
        config = config_with(pool_nbytes=128 * KiB, max_writes=2, max_reads=2, max_copies=2)
        async with inline_engine({"memory": storage}, config) as engine:
            state = random_state([100 * KiB])
            await engine.save(state, "memory")
            pool = engine._core.context.pool
            loaded = asyncio.Event()

            async def hold() -> None:
                async with pool.lease():
                    await loaded.wait()

            async with asyncio.TaskGroup() as group:
                holders = [group.create_task(hold())]
                load = group.create_task(engine.load("memory"))
                while not pool.statistics().num_waiting:
                    await asyncio.sleep(0.0001)
                holders.append(group.create_task(hold()))  # ahead of the lane that reads now
                async with asyncio.timeout(60):
                    assert_same(await load, state)
                loaded.set()

    run_virtual(scenario(), seed=seed)


def test_damage_is_raised_before_what_fails_behind_it() -> None:
    """The first failure counts, also of ranges that one visit to a thread reads."""

    async def scenario() -> None:
        storage = MemoryStorage()
        async with inline_engine({"memory": storage}, LONE_READER) as engine:
            await engine.save(random_state(LARGE), "memory")
            (data,) = storage.files.values()
            data[8 * KiB] ^= 1
            num_blocks = SMALL.slab_nbytes // SMALL.block_nbytes
            begun = len(storage.operations) + 4  # the manifest, sizes, the file
            storage.fault = fail_at(begun + num_blocks + 2, errno.EIO)
            with pytest.raises(CorruptionError, match="checksum"):
                await engine.load("memory")

    run_virtual(scenario(), seed=0)


async def test_a_cancelled_load_reads_no_more_than_the_range_it_is_at() -> None:
    """A thread that reads several ranges in a visit hears of it between two of them."""
    storage = MemoryStorage()
    reading, go = threading.Event(), threading.Event()
    num_blocks = 0

    def wait_in_first(operation: Operation) -> None:
        nonlocal num_blocks
        if operation.kind == "pread_into":
            num_blocks += 1
            reading.set()
            assert go.wait(60)

    async with inline_engine({"memory": storage}, LONE_READER) as engine:
        await engine.save(random_state(LARGE), "memory")
        storage.fault = wait_in_first
        load = asyncio.create_task(engine.load("memory"))
        await asyncio.to_thread(reading.wait, 60)
        load.cancel()
        for _ in range(50):  # until the lanes have heard of it
            await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert num_blocks == SMALL.slab_nbytes // SMALL.block_nbytes
