from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import time
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio.config import KiB
from ckptio.engine import landing, names
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    StateError,
    StorageError,
    TargetError,
)
from ckptio.events import LoadFinished, LoadStarted, ReadProgressed
from ckptio.format.checksum import unpack_checksums
from ckptio.format.manifest import decode_manifest
from ckptio.state.tree import walk
from ckptio.testing import EventLog, MemoryStorage, VirtualLoop, fail_at
from tests.job_rig import job, shards_of
from tests.rig import (
    SMALL,
    assert_same,
    clone,
    config_with,
    filled_state,
    inline_engine,
    random_state,
    values_in,
)
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio import Engine
    from ckptio.testing import Operation

seeds = st.integers(0, 2**32 - 1)
sizes = st.lists(st.integers(0, 200 * KiB), min_size=1, max_size=6)


async def saved(engine: Engine, sizes: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    state = random_state(sizes, seed)
    await engine.save(state, "memory")
    return state


def zeros_like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


@given(sizes=sizes, seed=seeds, reads=st.integers(1, 8))
@in_virtual_time
async def test_limits_hold(sizes: Sequence[int], seed: int, reads: int) -> None:
    """Readers and slabs never exceed what the config allows; the bytes are right."""
    storage = MemoryStorage(seed=seed, max_delay_s=0.05)
    config = config_with(max_reads=reads)
    async with inline_engine({"memory": storage}, config) as engine:
        state = await saved(engine, sizes, seed)
        target = zeros_like(state)
        async with asyncio.TaskGroup() as group:
            loads = [group.create_task(engine.load("memory", into=target))]
            loads += [group.create_task(engine.load("memory")) for _ in range(2)]
        for load in loads:
            assert_same(load.result(), state)
        loop = cast("VirtualLoop", asyncio.get_running_loop())
        if any(sizes):
            assert 0 < loop.peak_calls["_read_turn"] <= reads
        assert engine.statistics().peak_leased_nbytes <= config.pool_nbytes
        assert storage.counts.num_open_sources == 0


@given(sizes=sizes, seed=seeds, number=st.integers(0, 60))
@in_virtual_time
async def test_failure_leaves_nothing_behind(sizes: Sequence[int], seed: int, number: int) -> None:
    """Whatever read fails, the caller sees it; files, slabs and tasks are given back."""
    storage = MemoryStorage(seed=seed, max_delay_s=0.05)
    async with inline_engine({"memory": storage}) as engine:
        state = await saved(engine, sizes, seed)
        done = len(storage.operations)
        storage.fault = fail_at(done + number, errno.EIO)
        try:
            found = await engine.load("memory")
        except StorageError as error:
            assert error.errno == errno.EIO
            assert len(storage.operations) > done + number
        else:
            assert len(storage.operations) <= done + number
            assert_same(found, state)
        assert storage.counts.num_open_sources == 0
        assert engine.statistics().leased_nbytes == 0
        storage.fault = None
        assert_same(await engine.load("memory"), state)


@given(sizes=sizes, seed=seeds, at_s=st.floats(0, 0.4))
@in_virtual_time
async def test_cancelling_anywhere_leaves_nothing_behind(
    sizes: Sequence[int], seed: int, at_s: float
) -> None:
    """Whenever a load is cancelled, no source is open, no slab is out, and the next one works."""
    storage = MemoryStorage(seed=seed, max_delay_s=0.05)
    async with inline_engine({"memory": storage}) as engine:
        state = await saved(engine, sizes, seed)
        target = zeros_like(state)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_s):
                await engine.load("memory", into=target)
        assert storage.counts.num_open_sources == 0
        assert engine.statistics().leased_nbytes == 0
        await engine.load("memory", into=target)
        assert_same(target, state)


@in_virtual_time
async def test_a_state_ten_times_the_pool_is_loaded_in_waves() -> None:
    """Memory beside the targets is the pool."""
    storage = MemoryStorage()
    config = config_with(pool_nbytes=128 * KiB, max_writes=2, max_reads=2, max_copies=2)
    async with inline_engine({"memory": storage}, config) as engine:
        state = await saved(engine, [600 * KiB, 700 * KiB, 13])
        target = zeros_like(state)
        pointers = [tensor.data_ptr() for tensor in target.values()]
        assert await engine.load("memory", into=target) is target
        assert_same(target, state)
        assert [tensor.data_ptr() for tensor in target.values()] == pointers
        assert engine.statistics().num_allocations == 2


@given(
    sizes=st.lists(st.integers(1, 90 * KiB), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
    where=st.integers(0, 2**30),
    bit=st.integers(0, 7),
)
@in_virtual_time
async def test_no_damaged_block_lands(
    sizes: Sequence[int], seed: int, where: int, bit: int
) -> None:
    """A flipped bit is found and named; where it is, the target keeps what it had."""
    storage = MemoryStorage(seed=seed)
    async with inline_engine({"memory": storage}) as engine:
        state = await saved(engine, sizes, seed)
        name = sorted(storage.files)[where % len(storage.files)]
        position = where % len(storage.files[name])
        storage.files[name][position] ^= 1 << bit
        assert storage.manifest is not None
        manifest = decode_manifest(storage.manifest)
        target = {key: 255 - value for key, value in state.items()}
        before = clone(target)
        covered = [
            tensor.name
            for tensor in manifest.tensors
            for chunk in tensor.chunks
            if manifest.files[chunk.file].name == name
            and chunk.start <= position < chunk.start + tensor.nbytes
        ]
        try:
            await engine.load("memory", into=target)
        except CorruptionError as error:
            assert error.file == name
            assert error.start <= position < error.stop
            assert set(covered) <= set(error.fqns)
        else:
            raise AssertionError("damage was not found")
        for key in covered:
            landed = target[key] == state[key]
            kept = target[key] == before[key]
            assert bool((landed | kept).all())
        report = await engine.verify("memory")
        assert [damage.file for damage in report.damage] == [name]
        assert report.damage[0].start <= position < report.damage[0].stop


@in_virtual_time
async def test_a_thousand_damaged_blocks_are_said_at_the_cost_of_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sums of a file are not unpacked for each; where nobody collects, one ends a range."""
    unpacked, named = Counted(unpack_checksums), Counted(landing._damage)
    monkeypatch.setattr("ckptio.format.manifest.unpack_checksums", unpacked)
    monkeypatch.setattr(landing, "_damage", named)

    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        state = await saved(engine, [1000 * SMALL.block_nbytes])
        for name, data in storage.files.items():
            storage.files[name] = bytearray(byte ^ 1 for byte in data)
        unpacked.num = 0
        report = await engine.verify("memory")
        assert len(report.damage) == named.num >= 1000
        assert all(damage.fqns == ("tensor0",) for damage in report.damage[1:-1])
        assert unpacked.num <= 2 * len(storage.files)
        named.num = 0
        with pytest.raises(CorruptionError):
            await engine.load("memory", into=state)
        assert 1 <= named.num <= SMALL.max_reads


class Counted:
    """A function that counts how often it is called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.num = 0

    def __call__(self, *arguments: Any) -> Any:
        self.num += 1
        return self._function(*arguments)


@in_virtual_time
async def test_files_that_are_gone_are_named_in_one_pass_over_the_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose bytes lie where is found for all files at once, not for each."""
    passed = Counted(landing._spans_of)
    monkeypatch.setattr(landing, "_spans_of", passed)

    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        state = await saved(engine, [SMALL.bucket_nbytes] * 8)
        assert len(storage.files) >= 8
        storage.files.clear()
        report = await engine.verify("memory")
        assert {name for damage in report.damage for name in damage.fqns} == set(state)
        assert passed.num == 1


@given(sizes=sizes, seed=seeds)
@in_virtual_time
async def test_damage_names_the_tensors_that_have_bytes_there(
    sizes: Sequence[int], seed: int
) -> None:
    """All of them, no neighbour, and none that is empty; wherever a range of a file ends."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        await saved(engine, sizes, seed)
        manifest = await engine.inspect("memory")
    reading = landing.Reading(storage, manifest)
    for file, entry in enumerate(manifest.files):
        spans = [
            (chunk.start, chunk.start + tensor.chunk_nbytes(chunk), tensor.name)
            for tensor in manifest.tensors
            for chunk in tensor.chunks
            if chunk.file == file
        ]
        ends = {end for first, last, _ in spans for end in (first, last, last - 1)}
        for start, stop in itertools.combinations(sorted(ends | {0, entry.nbytes}), 2):
            there = {name for first, last, name in spans if max(first, start) < min(last, stop)}
            found = reading.names_in(file, start, stop)
            assert (len(found), set(found)) == (len(there), there)


@pytest.mark.parametrize("change", ["shorter", "longer", "gone"])
@in_virtual_time
async def test_sizes_are_checked_before_anything_changes(change: str) -> None:
    """One file of a wrong size: an error, and not one byte of the target is touched."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        state = await saved(engine, [300 * KiB, 300 * KiB, 10])
        name = max(storage.files)
        nbytes = len(storage.files[name])
        if change == "gone":
            del storage.files[name]
            found = "no such regular file", 0, nbytes
        elif change == "longer":
            storage.files[name] += b"x"
            found = f"a file of {nbytes + 1} bytes", nbytes, nbytes + 1
        else:
            del storage.files[name][-1]
            found = f"a file of {nbytes - 1} bytes", nbytes - 1, nbytes
        target = zeros_like(state)
        with pytest.raises(CorruptionError) as caught:
            await engine.load("memory", into=target)
        error = caught.value
        assert (error.file, error.start, error.stop) == (name, *found[1:])
        assert error.problem == f"{found[0]} instead of one of {nbytes} bytes"
        assert_same(target, zeros_like(state))
        assert not any(op.kind == "pread_into" for op in storage.operations)
        report = await engine.verify("memory")
        assert {damage.file for damage in report.damage} == {name}
        assert not report.is_whole


@given(seed=seeds, num=st.integers(1, 4), delay_s=st.floats(0, 0.2))
@in_virtual_time
async def test_loads_beside_overwrites_get_one_or_are_told(
    seed: int, num: int, delay_s: float
) -> None:
    """Old, new, or `CheckpointChangedError`: never a mix, never another error."""
    storage = MemoryStorage(seed=seed, max_delay_s=0.05)
    sizes = [70 * KiB, 10, 30 * KiB]
    async with inline_engine({"memory": storage}) as engine:
        await engine.save(filled_state(sizes, 0), "memory")

        async def read() -> None:
            await asyncio.sleep(delay_s)
            for _ in range(5):
                try:
                    state = await engine.load("memory")
                except CheckpointChangedError:
                    continue
                assert len(values_in(state)) == 1

        async with asyncio.TaskGroup() as group:
            for _ in range(num):
                group.create_task(read())
            for value in range(1, 5):
                await engine.save(filled_state(sizes, value), "memory", overwrite=True)
        assert_same(await engine.load("memory"), filled_state(sizes, 4))


@in_virtual_time
async def test_another_config_reads_the_same_checkpoint() -> None:
    """Block, slab and bucket sizes of the writer need not be the reader's."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        state = await saved(engine, [300 * KiB, 50, 4097])
    for options in (
        {"block_nbytes": 64 * KiB},
        {"slab_nbytes": 8 * KiB, "pool_nbytes": 64 * KiB},
        {"slab_nbytes": 256 * KiB, "pool_nbytes": 1024 * KiB},
    ):
        async with inline_engine({"memory": storage}, config_with(**options)) as engine:
            assert_same(await engine.load("memory"), state)
            assert (await engine.verify("memory")).is_whole


@in_virtual_time
async def test_blocks_larger_than_a_slab_are_refused_with_a_way_out() -> None:
    """The message names the option to raise; nothing is read."""
    storage = MemoryStorage()
    big = config_with(block_nbytes=64 * KiB)
    async with inline_engine({"memory": storage}, big) as engine:
        await saved(engine, [100 * KiB])
    small = config_with(slab_nbytes=32 * KiB)
    async with inline_engine({"memory": storage}, small) as engine:
        for step in (engine.load, engine.verify):
            with pytest.raises(ConfigError, match="slab_nbytes"):
                await step("memory")


@in_virtual_time
async def test_nothing_there_is_not_found() -> None:
    """Every way to look at a checkpoint says so."""
    async with inline_engine({"memory": MemoryStorage()}) as engine:
        for step in (engine.load, engine.load_with_report, engine.verify, engine.inspect):
            with pytest.raises(CheckpointNotFoundError):
                await step("memory")
        with pytest.raises(CheckpointNotFoundError):
            await engine.load_slice("memory", "x", 0)


@in_virtual_time
async def test_events_tell_the_course_of_a_load() -> None:
    """Started, progress up to the whole, finished."""
    log = EventLog()

    async with inline_engine({"memory": MemoryStorage()}, SMALL, log) as engine:
        info = await engine.save(random_state([100 * KiB, 10]), "memory")
        began_s = time.perf_counter()
        await engine.load("memory")
        took_s = time.perf_counter() - began_s
        (started,) = log.of(LoadStarted)
        (finished,) = log.of(LoadFinished)
        assert (started.num_tensors, started.num_files) == (2, info.num_files)
        assert started.path == finished.path == "memory"
        assert 0 < finished.elapsed_s <= took_s
        assert started.nbytes == finished.nbytes == log.of(ReadProgressed)[-1].read_nbytes
        assert 100 * KiB < started.nbytes < 110 * KiB


@in_virtual_time
async def test_a_slice_reads_little_more_than_its_bytes() -> None:
    """Equal to the slice of the whole, for a few blocks of reading."""
    storage = MemoryStorage()
    tensor = torch.arange(100_000, dtype=torch.int32).view(1000, 100)
    async with inline_engine({"memory": storage}) as engine:
        await engine.save({"t": tensor}, "memory")
        before = storage.counts.read_nbytes
        part = await engine.load_slice("memory", "t", slice(500, 510))
        assert torch.equal(part, tensor[500:510])
        assert storage.counts.read_nbytes - before <= 4000 + 2 * SMALL.block_nbytes


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(300))
@in_virtual_time
async def test_many_schedules_end_whole(seed: int) -> None:
    """Loads, saves and verifies at once, some failing, some cancelled: right bytes or an error."""
    loop = cast("VirtualLoop", asyncio.get_running_loop())
    storage = MemoryStorage(seed=seed, max_delay_s=0.05)
    sizes = [70 * KiB, 10, 90 * KiB]
    async with inline_engine({"memory": storage}) as engine:
        await engine.save(filled_state(sizes, 0), "memory")

        async def act() -> None:
            await asyncio.sleep(loop.rng.random())
            with contextlib.suppress(CheckpointError, TimeoutError):
                async with asyncio.timeout(loop.rng.random()):
                    if loop.rng.random() < 0.3:
                        value = loop.rng.randrange(256)
                        await engine.save(filled_state(sizes, value), "memory", overwrite=True)
                    else:
                        state = await engine.load("memory")
                        assert len(values_in(state)) == 1

        async with asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(act())
        assert (await engine.verify("memory")).is_whole
        assert storage.leftovers() == []


@in_virtual_time
async def test_a_slice_of_what_changed_as_it_was_read_is_given_to_nobody() -> None:
    """Also where all files are there again when they are looked at once more."""

    def change(operation: Operation) -> None:
        if operation.kind == "open":
            raise CheckpointChangedError("memory")

    storage = MemoryStorage("memory")
    async with inline_engine({"memory": storage}) as engine:
        await engine.save({"t": torch.arange(1000)}, "memory")
        for _ in range(2):  # the sizes of the second time are known
            storage.fault = change
            with pytest.raises(CheckpointChangedError):
                await engine.load_slice("memory", "t", slice(9))
            storage.fault = None
            part = await engine.load_slice("memory", "t", slice(9))
            assert torch.equal(part, torch.arange(9))


@pytest.mark.parametrize("kind", ["sizes", "open"])
@in_virtual_time
async def test_what_is_found_to_be_overwritten_is_read_anew(kind: str) -> None:
    """The manifest that was remembered is not trusted any more."""

    def change(operation: Operation) -> None:
        if operation.kind == kind:
            raise CheckpointChangedError("memory")

    storage = MemoryStorage("memory")
    async with inline_engine({"memory": storage}) as engine:
        state = await saved(engine, [10 * KiB])
        storage.fault = change
        with pytest.raises(CheckpointChangedError):
            await engine.load("memory")
        storage.fault = None
        storage.operations.clear()
        for _ in range(2):  # the second time it is remembered again
            assert_same(await engine.load("memory"), state)
            kinds = [operation.kind for operation in storage.operations]
            assert kinds.count("read_manifest") == 1


@in_virtual_time
async def test_what_is_taken_on_trust_is_looked_at_before_it_counts_as_damaged() -> None:
    """Somebody else may have overwritten the checkpoint since its manifest was read."""
    storage = MemoryStorage("memory")
    places = {"memory": storage}
    async with (
        inline_engine(places, config_with(cache_ttl_s=3600.0)) as engine,
        inline_engine(places) as other,
    ):
        await saved(engine, [10 * KiB])
        await engine.load("memory")
        state = random_state([20 * KiB])
        await other.save(state, "memory", overwrite=True)
        with pytest.raises(CheckpointChangedError):
            await engine.load("memory")
        assert_same(await engine.load("memory"), state)


class CancelledOpen(MemoryStorage):
    """Its files are opened as if somebody had cancelled that."""

    async def open(self, name: str, nbytes: int) -> NoReturn:
        del name, nbytes
        raise asyncio.CancelledError


@in_virtual_time
async def test_a_load_of_which_a_part_was_cancelled_fails() -> None:
    """Groups of tasks take that for a success; the target would not be filled."""
    async with inline_engine({"memory": CancelledOpen("memory")}) as engine:
        await saved(engine, [10 * KiB])
        with pytest.raises(StateError, match="a part of 'memory' was cancelled"):
            await engine.load("memory")


@in_virtual_time
async def test_a_slice_needs_the_files_that_hold_it_alone() -> None:
    """What another rank wrote of the tensor may be gone."""
    tensor = torch.arange(64 * KiB).reshape(64, 1024)

    storage = MemoryStorage("memory")
    async with job(2, storage, SMALL) as ranks:

        async def save(rank: int, engine: Engine) -> None:
            await engine.save({"t": shards_of(tensor, (2, 1))[rank]}, "memory")

        await ranks.all(save)
    assert storage.manifest is not None
    files = {entry.rank: entry.name for entry in decode_manifest(storage.manifest).files}
    del storage.files[files[1]]
    async with inline_engine({"memory": storage}) as engine:
        part = await engine.load_slice("memory", "t", (slice(3, 32), slice(7)))
        assert torch.equal(part, tensor[3:32, :7])
        with pytest.raises(CorruptionError, match="no such regular file"):
            await engine.load_slice("memory", "t", slice(3, 33))


@in_virtual_time
async def test_slices_of_one_checkpoint_look_once_at_its_names_and_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In an object store a look at a file takes as long as the slice; the tree may be large."""
    tensors = {"t": torch.arange(1000), "bytes": torch.arange(200, dtype=torch.uint8)}
    walks: list[str] = []

    def counted(fqn: str, node: Any) -> object:
        walks.append(fqn)
        return walk(fqn, node)

    monkeypatch.setattr(names, "walk", counted)

    storage, other_storage = MemoryStorage("memory"), MemoryStorage("other")
    recalled: list[object] = []
    monkeypatch.setattr(storage, "remember", recalled.append)
    async with inline_engine({"memory": storage, "other": other_storage}) as engine:
        await engine.save({**tensors, "n": [1, 2]}, "memory")
        await engine.save({**tensors, "n": [1, 2]}, "other")
        storage.operations.clear()
        for name in ("t", "bytes"):
            for start in (5, 50, 150):
                for path in ("memory", "other"):  # in turns
                    part = await engine.load_slice(path, name, slice(start, start + 9))
                    assert torch.equal(part, tensors[name][start : start + 9])
        assert len(walks) == 2
        assert len(recalled) == 6  # each time: else it asks what is there
        assert [operation.kind for operation in storage.operations].count("sizes") == 1
        other = {"t": torch.zeros(10)}
        await engine.save(other, "memory", overwrite=True)
        assert torch.equal(await engine.load_slice("memory", "t", slice(3)), torch.zeros(3))
        with pytest.raises(TargetError, match="no tensor 'bytes'"):
            await engine.load_slice("memory", "bytes", 0)
        for name in list(storage.files):
            del storage.files[name][-10:]
        with pytest.raises(CorruptionError):
            await engine.load_slice("memory", "t", slice(3))
        storage.files.clear()
        with pytest.raises(CorruptionError, match="no such regular file"):
            await engine.load_slice("memory", "t", slice(3))
