"""Lanes: a few ranges of a file in each visit to a thread."""

from __future__ import annotations

import asyncio
import errno
import threading
import types
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from ckptio._threads import HUNG_S
from ckptio.config import KiB, MiB
from ckptio.engine import lanes
from ckptio.engine.context import num_cached_lanes
from ckptio.errors import CorruptionError, StorageError
from ckptio.events import ReadProgressed
from ckptio.plan.load import ReadSegment
from ckptio.testing import MemoryStorage, fail_at, run_virtual
from ckptio.testing.memory_files import MemorySource
from tests.rig import SMALL, assert_same, config_with, inline_engine, random_state
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from ckptio.events import Event
    from ckptio.testing import Operation

#: One reader, which takes all ranges in a visit if they come soon.
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


@in_virtual_time
async def test_damage_is_raised_before_what_fails_behind_it() -> None:
    """The first failure counts, also of ranges that one visit to a thread reads."""
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


@pytest.mark.parametrize(("turn_s", "num_visits"), [(0.0, 40), (3600.0, 1)])
def test_a_visit_to_a_thread_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, turn_s: float, num_visits: int
) -> None:
    """From a slow device each visit reads a few ranges, so that progress is said."""
    monkeypatch.setattr(lanes, "_TURN_S", turn_s)
    events: list[Event] = []

    async def scenario() -> None:
        async with inline_engine({"memory": MemoryStorage()}, LONE_READER, events.append) as engine:
            state = random_state(LARGE)
            await engine.save(state, "memory")
            assert_same(await engine.load("memory"), state)

    run_virtual(scenario(), seed=0)
    progress = [event.read_nbytes for event in events if isinstance(event, ReadProgressed)]
    assert len(progress) in (num_visits, num_visits + 1)  # the header may need a range of its own
    assert progress == sorted(progress)


@pytest.mark.parametrize("num_files", [1, 5])
@pytest.mark.parametrize(("is_cached", "num_lanes"), [(True, 2), (False, 6)])
async def test_no_more_lanes_than_cores_read_what_is_cached(
    monkeypatch: pytest.MonkeyPatch, *, is_cached: bool, num_lanes: int, num_files: int
) -> None:
    """What is in memory is read by a core each, what is on a disk by `max_reads` lanes.

    However many files there are: what is left of the pool is for those who save meanwhile.
    """
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(MemorySource, "is_cached", is_cached)
    storage = MemoryStorage()
    config = config_with(max_reads=6, pool_nbytes=4096 * KiB, bucket_nbytes=512 * KiB)
    lock, num_inside, most = threading.Lock(), 0, 0
    most_leased = 0
    enough, never = threading.Event(), threading.Event()

    def count(operation: Operation) -> None:
        nonlocal num_inside, most, most_leased
        if operation.kind == "pread_into":
            with lock:
                num_inside += 1
                most = max(most, num_inside)
                leased = pool.statistics().leased_nbytes // pool.slab_nbytes
                most_leased = max(most_leased, leased)
                waits = not enough.is_set()
                if num_inside == num_lanes:
                    enough.set()
            if waits:
                enough.wait(0.5)
                never.wait(0.05)  # for one too many to come
            with lock:
                num_inside -= 1

    async with inline_engine({"memory": storage}, config) as engine:
        pool = engine._core.context.pool
        state = random_state([7 * SMALL.slab_nbytes] * num_files)
        await engine.save(state, "memory")
        assert len(storage.files) == num_files
        storage.fault = count
        assert_same(await engine.load("memory"), state)
    assert most == most_leased == num_lanes


#: A file for each tensor, of which each is read in a visit of its own or in one with others.
FILES = [4 * KiB, 8 * KiB, 5, 12 * KiB] * 10
ONE_EACH = config_with(bucket_nbytes=4 * KiB, max_reads=2)


def test_small_files_are_read_a_few_in_each_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of tensors of a foreign checkpoint are files of their own."""
    monkeypatch.setattr(lanes, "_TURN_S", 3600.0)
    events: list[Event] = []

    async def scenario() -> None:
        storage = MemoryStorage()
        async with inline_engine({"memory": storage}, ONE_EACH, events.append) as engine:
            state = random_state(FILES)
            await engine.save(state, "memory")
            assert len(storage.files) > 20
            assert_same(await engine.load("memory"), state)
            assert storage.counts.num_open_sources == 0

    run_virtual(scenario(), seed=0)
    progress = [event for event in events if isinstance(event, ReadProgressed)]
    assert len(progress) <= 12  # each visit takes its share of what is left
    assert progress[-1].read_nbytes == progress[-1].nbytes


@pytest.mark.parametrize("number", range(0, 60, 7))
def test_a_small_file_that_fails_ends_the_load_and_stays_open_nowhere(number: int) -> None:
    async def scenario() -> None:
        storage = MemoryStorage()
        async with inline_engine({"memory": storage}, ONE_EACH) as engine:
            await engine.save(random_state(FILES), "memory")
            begun = len(storage.operations) + 3  # the manifest and sizes
            storage.fault = fail_at(begun + number, errno.EIO)
            with pytest.raises(StorageError):
                await engine.load("memory")
            assert storage.counts.num_open_sources == 0
            assert engine.statistics().leased_nbytes == 0

    run_virtual(scenario(), seed=number)


def test_a_range_that_does_not_fit_is_left_where_it_is() -> None:
    """Never out and in again: a lane that saw none left would end the others."""
    ranges = [ReadSegment(0, 0, nbytes, (), ()) for nbytes in (4, 9, 1)]
    none: Any = None  # nobody reads
    gate = lanes.Gate(asyncio.Semaphore(), 1, none)
    shared = lanes.Lanes(deque(ranges), 1, gate, lanes.open_each(None, None))  # type: ignore[arg-type]  # nobody opens any
    assert shared.take(4) is ranges[0]
    assert shared.take(8) is None
    assert [*shared.left] == ranges[1:]
    assert (shared.take(9), shared.take(9), shared.take(9)) == (ranges[1], ranges[2], None)


@in_virtual_time
async def test_all_damage_in_small_files_is_collected() -> None:
    """A visit to a thread ends with the first; the next one goes on behind it."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}, ONE_EACH) as engine:
        await engine.save(random_state(FILES), "memory")
        damaged = sorted(storage.files)[3:9]
        for name in damaged:
            storage.files[name][-1] ^= 1
        report = await engine.verify("memory")
        assert sorted({error.file for error in report.damage}) == damaged


def test_fewer_lanes_map_larger_slabs() -> None:
    """What a load has of the page cache in memory stays within its allowance."""
    assert num_cached_lanes(config_with(slab_nbytes=128 * MiB, pool_nbytes=1024 * MiB)) == 1
    assert num_cached_lanes(config_with(max_reads=1)) == 1


def test_a_load_that_is_slow_keeps_its_place_and_one_of_which_nothing_comes_does_not() -> None:
    """Many slow ones at once would open more files than a process may."""

    async def scenario(step_nbytes: int) -> bool:
        reading: Any = types.SimpleNamespace(read_nbytes=0)
        shared = asyncio.Semaphore(1)
        async with lanes.Gate(shared, 1, reading).passing():
            for _ in range(10):
                await asyncio.sleep(HUNG_S / 2)
                reading.read_nbytes += step_nbytes
            is_held = shared.locked()
        assert not shared.locked()
        async with lanes.Gate(shared, 1, reading).passing():
            assert shared.locked()
        return is_held

    assert run_virtual(scenario(1), seed=0)
    assert not run_virtual(scenario(0), seed=0)
