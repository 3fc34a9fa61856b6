from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio._aio import Siblings
from ckptio.config import KiB
from ckptio.errors import CheckpointExistsError, SaveAbortedError, StorageError
from ckptio.events import (
    SaveCommitted,
    SaveFailed,
    SaveProgressed,
    SaveQueued,
    SaveStaged,
    SaveStarted,
    TieDropped,
)
from ckptio.plan.save import plan_save
from ckptio.testing import EventLog, MemoryStorage, VirtualLoop, fail_at, fail_kind, run_virtual
from ckptio.testing.memory_files import MemorySink
from tests.rig import (
    SMALL,
    StorageCore,
    assert_same,
    clone,
    config_with,
    engine_on,
    filled_state,
    inline_engine,
    random_state,
)
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio import SaveHandle
    from ckptio.engine.context import EngineContext
    from ckptio.events import Event
    from ckptio.testing import Operation
    from ckptio.testing.memory_attempt import MemoryAttempt

seeds = st.integers(0, 2**32 - 1)
sizes = st.lists(st.integers(0, 200 * KiB), max_size=8)
moments_s = st.floats(0, 0.6)


class CancelledClose(MemoryStorage):
    """Its files end as if somebody had cancelled what closes them."""

    def step(self, kind: str, name: str = "", nbytes: int = 0) -> None:
        super().step(kind, name, nbytes)
        if kind == "close":
            raise asyncio.CancelledError


@in_virtual_time
async def test_a_file_that_was_not_closed_is_not_committed() -> None:
    """All of its bytes are summed by then, but an object is there only when it is closed."""
    storage = CancelledClose("memory")
    async with inline_engine({"memory": storage}) as engine:
        with pytest.raises(SaveAbortedError, match=r"a part of 'data-.*' was cancelled"):
            await engine.save(random_state([50 * KiB]), "memory")
    assert storage.manifest is None


class CancelledBegin(MemoryStorage):
    """Saves to it begin as if somebody had cancelled that."""

    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> MemoryAttempt:
        del save_id, overwrite, resumes
        raise asyncio.CancelledError


@pytest.mark.parametrize("state", [{}, random_state([KiB])], ids=["empty", "small"])
@in_virtual_time
async def test_a_save_that_did_not_begin_is_aborted(state: dict[str, torch.Tensor]) -> None:
    """Also one without files, of which none is missing."""
    async with inline_engine({"memory": CancelledBegin("memory")}) as engine:
        with pytest.raises(SaveAbortedError, match="was cancelled"):
            await engine.save(state, "memory")


class GatedStorage(MemoryStorage):
    """Commits only when its gate is open."""

    def __init__(self, path: str, gate: asyncio.Event) -> None:
        super().__init__(path)
        self._gate = gate

    async def commit(self, made: Sequence[str], manifest: bytes, *, overwrite: bool) -> None:
        await self._gate.wait()
        await super().commit(made, manifest, overwrite=overwrite)


class SlowStorage(MemoryStorage):
    """Takes a minute to begin a save, as a store does that is asked again and again."""

    begin_s = 60.0

    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> MemoryAttempt:
        await asyncio.sleep(self.begin_s)
        return await super().begin(save_id, overwrite=overwrite, resumes=resumes)


def virtual_loop() -> VirtualLoop:
    return cast("VirtualLoop", asyncio.get_running_loop())


def assert_nothing_left(storage: MemoryStorage) -> None:
    assert storage.leftovers() == []
    assert storage.counts.num_open_sinks == 0
    assert storage.counts.num_open_sources == 0
    assert storage.counts.num_open_attempts == 0
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        assert virtual_loop().num_calls == 0


@given(sizes=sizes, seed=seeds)
@in_virtual_time
async def test_a_state_comes_back_bit_for_bit_whatever_the_schedule(
    sizes: Sequence[int], seed: int
) -> None:
    """What was saved is what is loaded, in any order of events."""
    state = random_state(sizes, seed)

    storage = MemoryStorage(seed=seed, max_delay_s=0.05)
    async with inline_engine({"memory": storage}) as engine:
        info = await engine.save(state, "memory")
        assert info.num_tensors == len(state)
        assert info.nbytes == sum(map(len, storage.files.values()))
        assert_same(await engine.load("memory"), state)
    assert_nothing_left(storage)


@given(
    sizes=sizes,
    seed=seeds,
    writes=st.integers(1, 8),
    copies=st.integers(1, 8),
    saves=st.integers(1, 4),
)
@in_virtual_time
async def test_limits_hold(
    sizes: Sequence[int], seed: int, writes: int, copies: int, saves: int
) -> None:
    """Slabs, writers, copiers and saves in flight never exceed what the config allows."""
    config = config_with(max_writes=writes, max_copies=copies, max_saves=saves)
    log = EventLog()

    storages = {f"memory{i}": MemoryStorage(f"memory{i}", seed=seed + i) for i in range(4)}
    state = random_state([*sizes, 100 * KiB], seed)
    async with inline_engine(storages, config, log) as engine:
        handles = [engine.save(state, path) for path in storages]
        for handle in handles:
            await handle
        peaks = virtual_loop().peak_calls
        assert 0 < peaks["_seal"] <= writes
        assert 0 < peaks["SourceState.gather"] <= copies
        assert engine.statistics().peak_leased_nbytes <= config.pool_nbytes
        for path in storages:
            assert_same(await engine.load(path), state)
    assert in_flight_at_most(log) <= saves


@pytest.mark.parametrize("seed", range(20))
def test_writes_wait_for_copies_that_somebody_waits_for(seed: int) -> None:
    """Nothing is written before `staged` while the pool has room for the whole state."""
    log = EventLog()

    async def scenario() -> None:
        storage = MemoryStorage(seed=seed)
        config = config_with(pool_nbytes=64 * SMALL.slab_nbytes)
        async with inline_engine({"memory": storage}, config, log) as engine:
            handle = engine.save(random_state([300 * KiB, 70 * KiB], seed), "memory")
            await handle.staged
            await handle

    run_virtual(scenario(), seed=seed)
    kinds = [type(event) for event in log.events]
    assert kinds.index(SaveStaged) < kinds.index(SaveProgressed)


@pytest.mark.parametrize("seed", range(5))
def test_writes_wait_for_no_copies_that_nobody_waits_for(seed: int) -> None:
    """The disk is busy from the first slab on, though the pool has room for the whole state."""
    log = EventLog()

    async def scenario() -> None:
        config = config_with(pool_nbytes=64 * SMALL.slab_nbytes, max_copies=1)
        async with inline_engine({"memory": MemoryStorage(seed=seed)}, config, log) as engine:
            await engine.save(random_state([20 * SMALL.slab_nbytes], seed), "memory")

    run_virtual(scenario(), seed=seed)
    kinds = [type(event) for event in log.events]
    assert kinds.index(SaveProgressed) < kinds.index(SaveStaged)


@pytest.mark.parametrize("ends", ["well", "in failure", "cancelled"])
@pytest.mark.parametrize(("is_first", "wait_s"), [(True, 10), (False, 0.1)])
@in_virtual_time
async def test_copies_do_not_wait_for_the_place_that_they_are_written_to(
    ends: str, wait_s: float, *, is_first: bool
) -> None:
    """Training goes on meanwhile, also where it turns out that there is none."""
    state = random_state([50 * KiB, 20 * KiB])
    expected = clone(state)

    storage = SlowStorage("memory")
    config = config_with(pool_nbytes=64 * SMALL.slab_nbytes)
    loop = asyncio.get_running_loop()
    async with inline_engine({"memory": storage}, config) as engine:
        if not is_first:
            await engine.save(state, "memory")
        called_s = loop.time()
        handle = engine.save(state, "memory", overwrite=True)
        await handle.staged
        assert wait_s <= loop.time() - called_s < wait_s + 0.5
        for tensor in state.values():
            tensor.zero_()
        if ends == "well":
            await handle
            assert_same(await engine.load("memory"), expected)
        elif ends == "in failure":
            storage.fault = fail_kind("begin")
            with pytest.raises(StorageError):
                await handle
        else:
            handle.abort()
            with pytest.raises(SaveAbortedError):
                await handle
        assert engine._core.context.pool.statistics().leased_nbytes == 0
    assert_nothing_left(storage)


@pytest.mark.parametrize("num_more", [1, 16])
@pytest.mark.parametrize("num_slabs", [1, 2, 4])
@in_virtual_time
async def test_others_go_on_while_a_place_does_not_answer(num_slabs: int, num_more: int) -> None:
    """A state that does not fit in the pool leaves a slab to them, however little is missing."""
    state = random_state([(num_slabs + num_more) * SMALL.slab_nbytes - 8 * KiB])  # and a header

    storages = {"slow": SlowStorage("slow"), "other": MemoryStorage("other")}
    config = config_with(pool_nbytes=num_slabs * SMALL.slab_nbytes)
    async with inline_engine(storages, config) as engine:
        handle = engine.save(state, "slow")
        await asyncio.sleep(1)
        await engine.save(state, "other")
        assert_same(await engine.load("other"), state)
        assert asyncio.get_running_loop().time() < SlowStorage.begin_s
        await handle
        assert_same(await engine.load("slow"), state)


@pytest.mark.parametrize("num_busy", [1, 2, 3, 4])
@in_virtual_time
async def test_copies_go_on_when_others_give_slabs_back(num_busy: int) -> None:
    """A state that has room by then is copied, though its place does not answer yet."""
    nbytes = SMALL.slab_nbytes

    storages = {name: SlowStorage(name) for name in ("slow", "slower")}
    storages["slower"].begin_s = 3 * SlowStorage.begin_s
    config, loop = config_with(pool_nbytes=4 * nbytes), asyncio.get_running_loop()
    async with inline_engine(storages, config) as engine:
        busy = engine.save(random_state([(num_busy - 1) * nbytes + 1]), "slow")
        await asyncio.sleep(1)
        handle = engine.save(random_state([3 * nbytes]), "slower")
        await busy
        await handle.staged
        assert loop.time() < SlowStorage.begin_s + 1
        await handle


@pytest.mark.parametrize("state", [{}, random_state([KiB])], ids=["empty", "small"])
@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_told_of_a_save_that_has_ended(
    state: dict[str, torch.Tensor], seed: int
) -> None:
    """Also where it is aborted before the first step of what would begin it."""
    log = EventLog()

    async def scenario() -> None:
        def observe(event: Event) -> None:
            log(event)
            if isinstance(event, SaveStarted):
                handle.abort()

        async with inline_engine({"memory": SlowStorage("memory")}, observer=observe) as engine:
            handle = engine.save(state, "memory")
            with pytest.raises(SaveAbortedError):
                await handle
            await asyncio.sleep(100)

    run_virtual(scenario(), seed=seed)
    assert [type(event) for event in log.events] == [SaveStarted, SaveFailed]


@in_virtual_time
async def test_who_waits_for_copies_hears_what_is_wrong_with_the_place() -> None:
    """Training would go on without checkpoints; so the copies wait for the place for a moment."""
    storage = SlowStorage("memory")
    storage.begin_s = 5
    async with inline_engine({"memory": storage}) as engine:
        await engine.save(random_state([KiB]), "memory")
    async with inline_engine({"memory": storage}) as engine:
        with pytest.raises(CheckpointExistsError):
            await engine.save(random_state([KiB]), "memory").staged
        await engine.save(random_state([KiB]), "memory", overwrite=True)
        storage.begin_s = 0.05
        with pytest.raises(CheckpointExistsError):
            await engine.save(random_state([KiB]), "memory").staged
        handle = engine.save(random_state([KiB]), "memory", overwrite=True)
        await handle.staged
        assert storage.counts.num_open_attempts == 1
        await handle


class LateFiles(SlowStorage):
    """Takes a minute to make files, too, and less to begin."""

    begin_s = 5.0

    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> MemoryAttempt:
        attempt = await super().begin(save_id, overwrite=overwrite, resumes=resumes)
        self._max_delay_s = 60.0
        return attempt


@in_virtual_time
async def test_that_all_is_copied_is_told_once() -> None:
    """When the place has answered, and not again when it has been waited for long enough."""
    log = EventLog()

    async with inline_engine({"memory": LateFiles("memory")}, SMALL, log) as engine:
        handle = engine.save(random_state([KiB]), "memory")
        await handle.staged
        assert asyncio.get_running_loop().time() == pytest.approx(LateFiles.begin_s, abs=1)
        await handle
        assert asyncio.get_running_loop().time() > 15
    assert len(log.of(SaveStaged)) == 1


@given(sizes=sizes, seed=seeds)
@in_virtual_time
async def test_writes_that_wait_give_way_to_who_needs_a_slab(
    sizes: Sequence[int], seed: int
) -> None:
    """Saves whose pool is too small for both end, whoever waits for what."""
    config = config_with(pool_nbytes=3 * SMALL.slab_nbytes)

    storages = {f"memory{i}": MemoryStorage(f"memory{i}", seed=seed + i) for i in range(2)}
    state = random_state([*sizes, 100 * KiB], seed)
    async with inline_engine(storages, config) as engine:
        handles = [engine.save(state, path) for path in storages]
        for handle in handles:
            await handle.staged
        for handle in handles:
            await handle


def in_flight_at_most(log: EventLog) -> int:
    """Count from events how many saves were under way at a time."""
    now = most = 0
    for event in log.events:
        if isinstance(event, SaveStarted):
            now += 1
        elif isinstance(event, SaveCommitted):
            now -= 1
        most = max(most, now)
    return most


@given(sizes=sizes, seed=seeds, number=st.integers(0, 200), overwrite=st.booleans())
@in_virtual_time
async def test_failure_leaves_nothing_behind(
    sizes: Sequence[int], seed: int, number: int, *, overwrite: bool
) -> None:
    """Whatever operation fails, the caller sees it, and storage, pool and loop are as before."""
    old, new = random_state([10, 3 * KiB], seed), random_state(sizes, seed + 1)

    storage = MemoryStorage(seed=seed, max_delay_s=0.05)
    async with inline_engine({"memory": storage}) as engine:
        if overwrite:
            await engine.save(old, "memory")
        done = len(storage.operations)
        storage.fault = fail_at(done + number, errno.ENOSPC)
        try:
            await engine.save(new, "memory", overwrite=overwrite)
        except StorageError as error:
            assert error.errno == errno.ENOSPC
            assert error.filename == storage.operations[done + number].path
            failed = True
        else:
            assert len(storage.operations) <= done + number
            failed = False
        storage.fault = None
        assert_nothing_left(storage)
        if not failed:
            assert_same(await engine.load("memory"), new)
        elif overwrite:
            assert_same(await engine.load("memory"), old)
        else:
            assert storage.manifest is None


@given(sizes=sizes, seed=seeds, at_s=moments_s, overwrite=st.booleans())
@in_virtual_time
async def test_cancelling_anywhere_leaves_nothing_behind(
    sizes: Sequence[int], seed: int, at_s: float, *, overwrite: bool
) -> None:
    """Whenever `await handle` is cancelled, the old checkpoint or the new one is there, whole."""
    old, new = random_state([10, 3 * KiB], seed), random_state(sizes, seed + 1)

    storage = MemoryStorage(seed=seed, max_delay_s=0.05)
    async with inline_engine({"memory": storage}) as engine:
        if overwrite:
            await engine.save(old, "memory")
        before = storage.manifest
        handle = engine.save(new, "memory", overwrite=overwrite)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_s):
                await handle
        assert handle.done()
        assert_nothing_left(storage)
        if storage.manifest is before:
            with pytest.raises(SaveAbortedError):
                handle.result()
        else:
            assert handle.result().save_id == handle.save_id
            assert_same(await engine.load("memory"), new)
        if before is not None and storage.manifest is before:
            assert_same(await engine.load("memory"), old)


@given(sizes=sizes, seed=seeds, at_s=moments_s)
@in_virtual_time
async def test_aborting_anywhere_leaves_nothing_behind(
    sizes: Sequence[int], seed: int, at_s: float
) -> None:
    """Whenever a handle is told to abort, the save ends without a trace or with its commit."""
    storage = MemoryStorage(seed=seed, max_delay_s=0.05)
    async with inline_engine({"memory": storage}) as engine:
        handle = engine.save(random_state(sizes, seed), "memory")
        await asyncio.sleep(at_s)
        handle.abort()
        try:
            await handle
        except SaveAbortedError:
            assert storage.manifest is None
        else:
            assert storage.manifest is not None
        assert_nothing_left(storage)


@in_virtual_time
async def test_a_save_aborted_before_it_began_never_begins() -> None:
    """Aborting at once stops the save before its first operation."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        handle = engine.save(random_state([100]), "memory")
        handle.abort()
        with pytest.raises(SaveAbortedError, match="untouched"):
            await handle
        with pytest.raises(SaveAbortedError):
            await handle.staged
        assert storage.operations == []


@pytest.mark.parametrize("seed", range(5))
def test_one_writer_is_sequential_and_gives_the_same_bytes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `max_writes=1` writes go file by file, front to back; only the save id differs."""
    state = random_state([100, 70 * KiB, 300 * KiB, 90 * KiB, 1, 65 * KiB], seed)
    files = {}
    written: list[tuple[str, int]] = []
    pwrite = MemorySink.pwrite

    def note(sink: MemorySink, offset: int, data: memoryview) -> None:
        written.append((sink._name, offset))
        pwrite(sink, offset, data)

    monkeypatch.setattr(MemorySink, "pwrite", note)

    async def scenario(writes: int) -> None:
        storage = MemoryStorage(seed=seed)
        async with inline_engine({"memory": storage}, config_with(max_writes=writes)) as engine:
            await engine.save(state, "memory")
            if writes == 1:
                assert virtual_loop().peak_calls["_seal"] == 1
                assert len(written) > 100
                assert written == sorted(written)
        files[writes] = {name.split("-", 2)[2]: bytes(data) for name, data in storage.files.items()}

    for writes in (1, 8):
        run_virtual(scenario(writes), seed=seed + writes)
    assert len(files[1]) > 1
    assert files[1] == files[8]


@pytest.mark.parametrize("seed", range(10))
def test_saves_in_flight_keep_their_own_contents(seed: int) -> None:
    """Two saves of one state, changed after each is staged, come back as they were saved."""
    sizes = [30 * KiB, 70 * KiB, 10]

    async def scenario() -> None:
        open_gate = asyncio.Event()
        storages = {f"m{i}": GatedStorage(f"m{i}", open_gate) for i in range(2)}
        state = filled_state(sizes, 0)
        async with inline_engine(storages) as engine:
            handles = []
            for value, path in enumerate(storages):
                for tensor in state.values():
                    tensor.fill_(value)
                handles.append(engine.save(state, path))
                await handles[-1].staged
                for tensor in state.values():
                    tensor.fill_(99)
            assert not any(handle.done() for handle in handles)
            open_gate.set()
            for handle in handles:
                await handle
            for value, path in enumerate(storages):
                assert_same(await engine.load(path), filled_state(sizes, value))

    run_virtual(scenario(), seed=seed)


def test_a_third_save_waits_and_says_so() -> None:
    """With two saves in flight a third is queued until one has ended."""
    log = EventLog()

    async def scenario() -> None:
        storages = {f"m{i}": MemoryStorage(f"m{i}", max_delay_s=0.5) for i in range(3)}
        async with inline_engine(storages, SMALL, log) as engine:
            handles = [
                engine.save(filled_state([1000], i), path) for i, path in enumerate(storages)
            ]
            for handle in handles:
                await handle
            for i, path in enumerate(storages):
                assert_same(await engine.load(path), filled_state([1000], i))

    run_virtual(scenario(), seed=1)
    (queued,) = log.of(SaveQueued)
    assert queued.num_in_flight == 2
    kinds = log.kinds()
    started = [i for i, kind in enumerate(kinds) if kind == "SaveStarted"]
    assert started[2] > kinds.index("SaveCommitted")


def test_a_queued_save_that_is_aborted_leaves_its_place() -> None:
    """Aborting a save that waits for a place neither takes one nor gives one away."""

    async def scenario() -> None:
        open_gate = asyncio.Event()
        storages = {f"m{i}": GatedStorage(f"m{i}", open_gate) for i in range(4)}
        async with inline_engine(storages, config_with(max_saves=1)) as engine:
            first = engine.save(filled_state([9], 1), "m0")
            await first.staged
            second, third = (engine.save(filled_state([9], 1), f"m{i}") for i in (1, 2))
            await asyncio.sleep(0)
            second.abort()
            with pytest.raises(SaveAbortedError):
                await second
            assert not first.done()
            open_gate.set()
            await first
            await third
            await engine.save(filled_state([9], 1), "m3")
            assert storages["m1"].operations == []

    run_virtual(scenario(), seed=2)


def test_a_state_ten_times_the_pool_flows_through() -> None:
    """A state larger than the pool is saved in waves, and never holds more than the pool."""
    state = random_state([SMALL.pool_nbytes * 4, SMALL.pool_nbytes * 6])

    async def scenario() -> None:
        storage = MemoryStorage()
        async with inline_engine({"memory": storage}) as engine:
            await engine.save(state, "memory")
            whole = SMALL.num_slabs * SMALL.slab_nbytes
            assert whole <= SMALL.pool_nbytes
            assert engine.statistics().peak_leased_nbytes == whole
            assert engine.statistics().taken_nbytes == whole
            target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            await engine.load("memory", into=target)
            assert_same(target, state)
            assert engine.statistics().num_allocations == SMALL.num_slabs

    run_virtual(scenario(), seed=3)


def test_nothing_is_allocated_from_the_second_save_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs and plan of the first save serve all that follow."""
    log = EventLog()
    state = random_state([30 * KiB, 70 * KiB])
    plan = Mock(wraps=plan_save)
    monkeypatch.setattr("ckptio.engine.save.plan_save", plan)

    async def scenario() -> None:
        storage = MemoryStorage()
        async with inline_engine({"memory": storage}, SMALL, log) as engine:
            first = await engine.save(state, "memory")
            allocations = engine.statistics().num_allocations
            assert allocations > 0
            assert not first.plan_reused
            for _ in range(3):
                info = await engine.save(state, "memory", overwrite=True)
                assert info.plan_reused
                assert engine.statistics().num_allocations == allocations

    run_virtual(scenario(), seed=4)
    assert [event.plan_reused for event in log.of(SaveStarted)] == [False, True, True, True]
    assert plan.call_count == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.zeros(8, dtype=torch.int32), "b": torch.zeros(3)},
        {"a": torch.zeros(4, 2), "b": torch.zeros(3)},
        {"a": torch.zeros(8), "c": torch.zeros(3)},
        {"a": torch.zeros(8)},
        {"b": torch.zeros(3), "a": torch.zeros(8)},
    ],
    ids=["dtype", "shape", "key", "fewer", "order"],
)
def test_a_changed_structure_is_planned_anew(changed: dict[str, torch.Tensor]) -> None:
    """A plan is never used for another structure; the first one is still known afterwards."""
    state = {"a": torch.arange(8.0), "b": torch.ones(3)}

    async def scenario() -> None:
        storage = MemoryStorage()
        async with inline_engine({"memory": storage}) as engine:
            await engine.save(state, "memory")
            info = await engine.save(changed, "memory", overwrite=True)
            assert not info.plan_reused
            assert_same(await engine.load("memory"), changed)
            info = await engine.save(clone(state), "memory", overwrite=True)
            assert info.plan_reused
            assert_same(await engine.load("memory"), state)

    run_virtual(scenario(), seed=5)


@pytest.mark.parametrize("seed", range(10))
def test_the_first_failure_is_what_the_caller_sees(seed: int) -> None:
    """When every write fails, one error comes out, as itself, and no write follows."""
    log = EventLog()

    async def scenario() -> None:
        storage = MemoryStorage(fault=fail_kind("pwrite", errno.EIO))
        async with inline_engine({"memory": storage}, SMALL, log) as engine:
            with pytest.raises(StorageError) as caught:
                await engine.save(random_state([SMALL.pool_nbytes * 2]), "memory")
        assert type(caught.value) is StorageError
        assert caught.value.errno == errno.EIO
        tried = [op for op in storage.operations if op.kind == "pwrite"]
        assert len(tried) <= SMALL.max_writes
        assert_nothing_left(storage)

    run_virtual(scenario(), seed=seed)
    (failed,) = log.of(SaveFailed)
    assert isinstance(failed.error, StorageError)
    assert log.of(SaveCommitted) == []


async def staged(handle: SaveHandle) -> None:
    await handle.staged


@pytest.mark.parametrize("max_writes", [1, 2])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("kind", ["segment", "bucket"])
@pytest.mark.parametrize("awaits_staged", [False, True], ids=["", "staged"])
@in_virtual_time
async def test_a_part_that_somebody_cancels_fails_the_save(
    kind: str, number: int, max_writes: int, *, awaits_staged: bool
) -> None:
    """What is left out by that is not taken for written, and what is behind it does not hang."""
    storage = MemoryStorage(max_delay_s=0.5)
    config = config_with(
        pool_nbytes=(1024 if awaits_staged else 64) * KiB,
        bucket_nbytes=256 * KiB if kind == "segment" else 64 * KiB,
        max_writes=max_writes,
        max_copies=1,
        max_reads=1,
    )
    async with inline_engine({"memory": storage}, config) as engine:
        handle = engine.save(random_state([50 * KiB] * 4), "memory")
        # who waits for it has what is copied written when all is
        waiting = asyncio.create_task(staged(handle), name="waits") if awaits_staged else None
        parts: list[asyncio.Task[object]] = []
        while not parts:
            await asyncio.sleep(0.01)
            parts = [t for t in asyncio.all_tasks() if t.get_name().startswith(f"{kind} ")]
        assert len(parts) == 4
        parts.sort(key=lambda part: (len(part.get_name()), part.get_name()))
        parts[number].cancel()
        problem = r"a part of 'data-.*' was cancelled"
        if waiting is not None:
            with pytest.raises(SaveAbortedError, match=problem):
                await waiting
        with pytest.raises(SaveAbortedError, match=problem):
            await handle
    assert storage.manifest is None
    assert_nothing_left(storage)


@pytest.mark.parametrize("max_writes", [1, 2])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("kind", ["segment", "bucket"])
@in_virtual_time
async def test_a_part_that_is_cancelled_before_its_first_step_fails_the_save(
    kind: str, number: int, max_writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind it wait for what nobody would ever do."""
    numbers = itertools.count()
    create_task = Siblings.create_task

    def create(group: Siblings, coro: Any, *, name: str) -> asyncio.Task[Any]:
        task = create_task(group, coro, name=name)
        if name.startswith(f"{kind} ") and next(numbers) == number:
            task.cancel()
        return task

    monkeypatch.setattr(Siblings, "create_task", create)

    storage = MemoryStorage(max_delay_s=0.5)
    nbytes = 256 * KiB if kind == "segment" else 64 * KiB
    config = config_with(bucket_nbytes=nbytes, max_writes=max_writes)
    async with inline_engine({"memory": storage}, config) as engine:
        with pytest.raises(SaveAbortedError, match=r"a part of 'data-.*' was cancelled"):
            await engine.save(random_state([50 * KiB] * 4), "memory")
    assert storage.manifest is None
    assert_nothing_left(storage)


@pytest.mark.parametrize("kind", ["begin", "create"])
@in_virtual_time
async def test_what_files_are_written_to_fails_the_save_where_somebody_cancels_it(
    kind: str,
) -> None:
    """Whoever waits for it does not hang."""
    storage = MemoryStorage(max_delay_s=0.5)
    async with inline_engine({"memory": storage}) as engine:
        handle = engine.save(random_state([50 * KiB] * 4), "memory")
        parts: list[asyncio.Task[object]] = []
        while not parts:
            await asyncio.sleep(0.01)
            parts = [t for t in asyncio.all_tasks() if t.get_name().startswith(f"{kind} ")]
        parts[0].cancel()
        with pytest.raises(SaveAbortedError, match="was cancelled"):
            await handle
    assert storage.manifest is None
    assert_nothing_left(storage)


@in_virtual_time
async def test_a_cache_that_is_trusted_for_long_hides_no_save_of_its_own_engine() -> None:
    """`cache_ttl_s` is about what others save: who saves over a checkpoint loads the new one."""
    storages = {name: MemoryStorage(name) for name in ("near/a", "far/a")}
    async with inline_engine(storages, config_with(cache_ttl_s=1e6)) as engine:
        for value in (1, 2):
            state = filled_state([KiB], value)
            handle = engine.save(state, "near/a", then="far/a", overwrite=True)
            await handle
            assert_same(await engine.load("near/a"), state)
            await handle.durable
            assert_same(await engine.load("far/a"), state)


class LosesTheAnswer(MemoryStorage):
    """Commits, and what says so gets lost from some moment on."""

    loses = False

    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> MemoryAttempt:
        attempt = await super().begin(save_id, overwrite=overwrite, resumes=resumes)
        commit = attempt.commit

        async def lose(manifest: bytes) -> None:
            await commit(manifest)
            if self.loses:
                raise StorageError("it may stand", path="memory", in_doubt=True)

        attempt.commit = lose  # type: ignore[method-assign]  # of this one alone
        return attempt


@in_virtual_time
async def test_a_commit_in_doubt_is_not_hidden_by_what_was_loaded_before() -> None:
    """If it stands, it is what the next load finds."""
    storage = LosesTheAnswer("memory")
    async with inline_engine({"memory": storage}, config_with(cache_ttl_s=1e6)) as engine:
        await engine.save(filled_state([KiB], 1), "memory")
        await engine.load("memory")
        storage.loses = True
        with pytest.raises(StorageError, match="it may stand"):
            await engine.save(filled_state([KiB], 2), "memory", overwrite=True)
        assert_same(await engine.load("memory"), filled_state([KiB], 2))


@in_virtual_time
async def test_what_is_loaded_while_a_save_commits_hides_it_no_more_than_that() -> None:
    """It is the old one, and is forgotten when the new one is there."""
    open_gate = asyncio.Event()
    open_gate.set()
    storages = {"memory": GatedStorage("memory", open_gate)}
    async with inline_engine(storages, config_with(cache_ttl_s=1e6)) as engine:
        await engine.save(filled_state([KiB], 1), "memory")
        open_gate.clear()
        handle = engine.save(filled_state([KiB], 2), "memory", overwrite=True)
        await asyncio.sleep(60)
        assert_same(await engine.load("memory"), filled_state([KiB], 1))
        open_gate.set()
        await handle
        assert_same(await engine.load("memory"), filled_state([KiB], 2))


def test_cancelling_a_wait_for_staged_only_stops_waiting() -> None:
    """The save goes on, and others still wait for the same moment."""

    async def scenario() -> None:
        storage = MemoryStorage(max_delay_s=0.5)
        state = random_state([100 * KiB])
        async with inline_engine({"memory": storage}) as engine:
            handle = engine.save(state, "memory")

            async def wait() -> None:
                await handle.staged

            waiter = asyncio.create_task(wait(), name="waiter")
            await asyncio.sleep(0)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            assert not handle.staged.done()
            await handle.staged
            await handle
            assert_same(await engine.load("memory"), state)

    run_virtual(scenario(), seed=6)


def test_events_tell_the_course_of_a_save() -> None:
    """Started, staged, progress up to the whole, committed: each with the save's id.

    How long it took is told alike by the events and by what the save gives.
    """
    log = EventLog()
    state = random_state([100 * KiB, 10])
    written_nbytes = []

    async def scenario() -> None:
        storage = MemoryStorage()

        def observe(event: Event) -> None:
            log(event)
            if isinstance(event, SaveProgressed):
                written_nbytes.append(storage.counts.written_nbytes)

        async with inline_engine({"memory": storage}, SMALL, observe) as engine:
            began_s = time.perf_counter()
            info = await engine.save(state, "memory")
            took_s = time.perf_counter() - began_s
            (started,) = log.of(SaveStarted)
            assert (started.nbytes, started.num_tensors, started.num_files) == (
                info.nbytes,
                2,
                info.num_files,
            )
            (staged,) = log.of(SaveStaged)
            (committed,) = log.of(SaveCommitted)
            progress = log.of(SaveProgressed)
            assert progress[-1].written_nbytes == progress[-1].nbytes == info.nbytes
            assert [p.written_nbytes for p in progress] == sorted(
                p.written_nbytes for p in progress
            )
            assert started.save_id == staged.save_id == committed.save_id == info.save_id
            assert {event.save_id for event in progress} == {info.save_id}
            for event, nbytes in zip(progress, written_nbytes, strict=True):
                assert 0 < event.written_nbytes <= nbytes  # nothing is told ahead
            assert 0 < staged.elapsed_s == info.staged_s <= info.committed_s
            assert info.committed_s == committed.elapsed_s <= took_s
            assert staged.path == committed.path == info.path == "memory"
            assert committed.nbytes == info.nbytes

    run_virtual(scenario(), seed=7)


def test_what_comes_back_untied_is_an_event() -> None:
    """Of views that are stored apart, as what they have in common is larger than all of them."""
    log = EventLog()
    whole = torch.zeros(1 << 12)

    async def scenario() -> None:
        async with inline_engine({"memory": MemoryStorage()}, SMALL, log) as engine:
            await engine.save({"a": whole[:8], "b": whole[:8]}, "memory")
            assert log.of(TieDropped) == []
            state = {"a": whole[::64], "b": whole[::128], "c": whole[:8]}
            await engine.save(state, "memory", overwrite=True)

    run_virtual(scenario(), seed=0)
    (event,) = log.of(TieDropped)
    assert event.path == "memory"
    assert set(event.fqns) >= {"a", "b"}


@pytest.mark.parametrize("state", [{}, {"a": 1}, {"a": torch.zeros(0)}], ids=["empty", "int", "0"])
def test_a_state_without_bytes_is_staged_and_committed(state: dict[str, object]) -> None:
    """Both moments come even if there is nothing to copy."""

    async def scenario() -> None:
        async with inline_engine({"memory": MemoryStorage()}) as engine:
            handle = engine.save(state, "memory")
            await handle.staged
            handle.fence()
            await handle
            assert list(await engine.load("memory")) == list(state)

    run_virtual(scenario(), seed=8)


@pytest.mark.usefixtures("no_leaks", "no_tasks")
async def test_a_slab_is_not_reused_while_its_thread_still_writes() -> None:
    """A cancelled save keeps its slabs until the threads that write from them are done."""
    writing, go_on = threading.Event(), threading.Event()

    def hold(operation: Operation) -> None:
        if operation.kind == "pwrite" and operation.path.startswith("held/"):
            writing.set()
            go_on.wait()

    storages = {
        "held": MemoryStorage("held", fault=hold),
        "other": MemoryStorage("other"),
    }
    config = config_with(pool_nbytes=128 * KiB, max_writes=2, max_reads=2, max_copies=2)
    core = StorageCore(config, None, storages)
    async with engine_on(core) as engine, contextlib.AsyncExitStack() as at_the_end:
        at_the_end.callback(go_on.set)  # a test that fails must not hang
        handle = engine.save(filled_state([60 * KiB], 1), "held")
        await asyncio.to_thread(writing.wait)
        handle.abort()
        # another save wants more than what is free, and gets by with the rest
        other = filled_state([300 * KiB], 2)
        await engine.save(other, "other")
        assert engine.statistics().leased_nbytes == config.slab_nbytes
        assert not handle.done()
        go_on.set()
        with pytest.raises(SaveAbortedError):
            await handle
        assert engine.statistics().leased_nbytes == 0
        assert_same(await engine.load("other"), other)
    assert storages["held"].manifest is None
    assert_nothing_left(storages["held"])


@pytest.mark.usefixtures("no_leaks")
async def test_real_writers_never_exceed_the_limit() -> None:
    """With threads, `max_writes` of them are inside the storage at a time, and no more."""
    lock, full, go_on = threading.Lock(), threading.Event(), threading.Event()
    inside = peak = 0

    class Gauge(MemoryStorage):
        def step(self, kind: str, name: str = "", nbytes: int = 0) -> None:
            nonlocal inside, peak
            super().step(kind, name, nbytes)
            if kind != "pwrite":
                return
            with lock:
                inside += 1
                peak = max(peak, inside)
                if inside == 2:
                    full.set()
            assert go_on.wait(60)
            with lock:
                inside -= 1

    async def turn(_: EngineContext) -> None:
        """Go once around the engine's loop."""

    core = StorageCore(config_with(max_writes=2), None, {"memory": Gauge("memory")})
    async with engine_on(core) as engine, contextlib.AsyncExitStack() as at_the_end:
        at_the_end.callback(go_on.set)  # a test that fails must not hang
        handle = engine.save(random_state([400 * KiB]), "memory")
        await handle.staged  # from here on all of it could be written
        assert await asyncio.to_thread(full.wait, 60)
        for _ in range(100):  # for one too many to come
            await core.call(turn, "turn")
        go_on.set()
        await handle
    assert peak == 2


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(1000))
@in_virtual_time
async def test_many_schedules_end_whole(seed: int) -> None:
    """A thousand schedules of saves that overlap, fail and are aborted leave nothing behind."""
    rng = virtual_loop().rng
    storages = {f"m{i}": MemoryStorage(f"m{i}", seed=seed + i, max_delay_s=0.05) for i in range(4)}
    async with inline_engine(storages) as engine:
        handles = []
        for storage in storages.values():
            if rng.random() < 0.3:
                storage.fault = fail_at(rng.randrange(60))
            nbytes = [rng.randrange(200 * KiB) for _ in range(rng.randrange(6))]
            handles.append((storage, engine.save(random_state(nbytes, seed), storage.path)))
            await asyncio.sleep(rng.random() / 10)
        for _, handle in handles:
            if rng.random() < 0.3:
                handle.abort()
        for storage, handle in handles:
            with contextlib.suppress(StorageError, SaveAbortedError):
                await handle
            assert handle.done()
            assert storage.leftovers() == []
        for storage in storages.values():
            assert_nothing_left(storage)
