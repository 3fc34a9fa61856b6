"""Copies to a second tier, on the virtual loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio import sync
from ckptio.config import KiB
from ckptio.engine.copies import Copies
from ckptio.engine.tiers import CopyJob, is_replaced
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    FormatError,
    RankError,
    SaveAbortedError,
    StateError,
    StorageError,
)
from ckptio.events import (
    CleanupFailed,
    CopyCommitted,
    CopyFailed,
    CopyProgressed,
    CopyQueued,
    CopyStarted,
    SaveCommitted,
    TierPassedOver,
)
from ckptio.format.manifest import decode_manifest
from ckptio.format.note import CopyNote, decode_note, encode_note
from ckptio.moments import SaveMoments
from ckptio.runtime.second_tier import is_copied
from ckptio.testing import (
    EventLog,
    MemoryStorage,
    Operation,
    crash_at,
    fail_at,
    fail_kind,
    run_virtual,
)
from ckptio.testing.memory_attempt import MemoryAttempt
from tests.rig import (
    SMALL,
    Ahead,
    assert_same,
    config_with,
    filled_state,
    inline_engine,
    random_state,
)
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckptio import Engine, SaveHandle
    from ckptio.events import Event
    from ckptio.storage.interface import Storage

pytestmark = pytest.mark.usefixtures("no_leaks")
seeds = st.integers(0, 2**32 - 1)
sizes = st.lists(st.integers(0, 200 * KiB), max_size=6)
SIZES = [100 * KiB, 3000, 200 * KiB, 70 * KiB]
#: Few operations, each of which is stopped at.
COARSE = config_with(block_nbytes=64 * KiB, bucket_nbytes=64 * KiB)


def two(seed: int = 0, delay_s: float = 0.05) -> dict[str, Storage]:
    return {
        name: MemoryStorage(name, seed=seed + i, max_delay_s=delay_s)
        for i, name in enumerate(("near/a", "far/a"))
    }


def memory(storages: Mapping[str, Storage], name: str) -> MemoryStorage:
    storage = storages[name]
    assert isinstance(storage, MemoryStorage)
    return storage


def assert_alike(storages: Mapping[str, Storage], near: str = "near/a", far: str = "far/a") -> None:
    """Check that two tiers have the same bytes, and neither anything else."""
    one, other = memory(storages, near), memory(storages, far)
    assert one.manifest is not None
    assert one.manifest == other.manifest
    assert one.files == other.files
    assert one.notes == other.notes == {}
    for storage in (one, other):
        assert_quiet(storage)
        assert storage.leftovers() == []


def assert_quiet(storage: MemoryStorage) -> None:
    counts = storage.counts
    assert (counts.num_open_sinks, counts.num_open_sources, counts.num_open_attempts) == (0, 0, 0)


@given(sizes=sizes, seed=seeds)
@in_virtual_time
async def test_the_copy_has_the_bytes_of_the_checkpoint(sizes: Sequence[int], seed: int) -> None:
    """Manifest, file names and data; each tier loads; no note is left."""
    state = random_state(sizes, seed)

    storages = two(seed)
    async with inline_engine(storages) as engine:
        handle = engine.save(state, "near/a", then="far/a")
        info = await handle
        assert info.path == "near/a"
        durable = await handle.durable
        assert durable.path == "far/a"
        assert durable.save_id == info.save_id == handle.save_id
        assert durable.committed_s >= info.committed_s
        assert durable.nbytes == info.nbytes
        assert_alike(storages)
        for path in storages:
            assert_same(await engine.load(path), state)


@in_virtual_time
async def test_without_a_second_tier_durable_is_the_commit() -> None:
    """One moment, and no note."""
    storages = two()
    async with inline_engine(storages) as engine:
        handle = engine.save(filled_state(SIZES, 1), "near/a")
        assert await handle.durable == await handle
        assert "note" not in [op.kind for op in memory(storages, "near/a").operations]


def test_the_first_tier_is_committed_before_the_copy_begins() -> None:
    """The order is seen in events; the note is there before the commit and names the place."""
    log = EventLog()

    async def scenario() -> None:
        storages = two()
        async with inline_engine(storages, SMALL, log) as engine:
            handle = engine.save(filled_state(SIZES, 1), "near/a", overwrite=True, then="far/a")
            await handle.durable
        kinds = [op.kind for op in memory(storages, "near/a").operations]
        assert kinds.index("note") < kinds.index("commit") < kinds.index("drop_note")
        assert [op.kind for op in memory(storages, "far/a").operations][-1] == "commit"

    run_virtual(scenario(), seed=0)
    kinds = log.kinds()
    order = ("SaveCommitted", "CopyStarted", "CopyProgressed", "CopyCommitted")
    places = [kinds.index(kind) for kind in order]
    assert places == sorted(places)
    (started,) = log.of(CopyStarted)
    (ended,) = log.of(CopyCommitted)
    assert (started.path, started.to, started.is_resumed) == ("near/a", "far/a", False)
    assert started.nbytes == ended.sent_nbytes == log.of(CopyProgressed)[-1].sent_nbytes
    assert started.num_files > 1


@pytest.mark.parametrize("cause", ["CheckpointChangedError: no", "CheckpointChangedError"])
def test_a_copy_of_what_another_rank_finds_replaced_is_given_up(cause: str) -> None:
    """Whether or not the error has a message there."""
    assert is_replaced(CheckpointChangedError("c"))
    assert is_replaced(RankError("no", causes={1: "ValueError: no", 2: cause}))
    assert not is_replaced(RankError("no", causes={1: f"StorageError: {cause}"}))
    assert not is_replaced(StorageError("no", path="c", code=5))


@in_virtual_time
async def test_the_place_of_the_checkpoint_is_no_second_tier() -> None:
    """Refused before anything is written; so is a load of it, also by another name."""
    storages = two()
    storages["link"] = memory(storages, "near/a").another_name("link")
    async with inline_engine(storages) as engine:
        with pytest.raises(ConfigError, match="where the checkpoint itself goes"):
            engine.save(filled_state([10], 1), "near/a", then="near/a")
        with pytest.raises(ConfigError, match="where the checkpoint itself goes"):
            await engine.load("near/a", then="near/a")
        with pytest.raises(ConfigError, match="where the checkpoint itself is"):
            await engine.load("near/a", then="link")
    assert memory(storages, "near/a").operations == []


@given(seed=seeds, number=st.integers(0, 120))
@in_virtual_time
async def test_a_failing_copy_leaves_the_first_tier(seed: int, number: int) -> None:
    """Whatever operation on the second tier fails: typed, by `durable`; and it is made up for."""
    state, log = random_state(SIZES, seed), EventLog()

    storages = two(seed)
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    far.fault = fail_at(number)
    async with inline_engine(storages, SMALL, log) as engine:
        handle = engine.save(state, "near/a", then="far/a")
        await handle
        try:
            await handle.durable
        except StorageError:
            assert far.manifest is None
            assert list(near.notes) == [handle.save_id]
            (failed,) = log.of(CopyFailed)
            assert (failed.path, failed.to) == ("near/a", "far/a")
        else:
            assert len(far.operations) <= number
        assert_same(await engine.load("near/a"), state)
        for storage in (near, far):
            assert_quiet(storage)
        far.fault = None
        made = await engine.finish_copies("near")
        assert made in ((), ("far/a",))
        assert_alike(storages)


@pytest.mark.parametrize("number", range(2))
@in_virtual_time
async def test_a_part_of_a_copy_that_somebody_cancels_fails_the_copy(number: int) -> None:
    """A file with a hole has the size of the whole one."""
    storages = two(delay_s=0.5)
    config = config_with(pool_nbytes=1024 * KiB, bucket_nbytes=64 * KiB)
    async with inline_engine(storages, config) as engine:
        handle = engine.save(random_state([50 * KiB] * 4), "near/a", then="far/a")
        await handle
        parts: list[asyncio.Task[object]] = []
        while not parts:
            await asyncio.sleep(0.01)
            parts = [t for t in asyncio.all_tasks() if t.get_name().startswith("copy near/a ")]
        parts.sort(key=lambda part: part.get_name())
        parts[number].cancel()
        with pytest.raises(StateError, match="copied a part of 'near/a' was cancelled"):
            await handle.durable
    assert memory(storages, "far/a").manifest is None
    for storage in storages.values():
        assert_quiet(cast("MemoryStorage", storage))


async def owe(engine: Engine, far: MemoryStorage) -> SaveHandle:
    """Save, and leave the copy of it owed: the second tier takes none just then."""
    far.fault = fail_kind("begin")
    handle = engine.save(random_state(SIZES), "near/a", then="far/a")
    with pytest.raises(StorageError):
        await handle.durable
    far.fault = None
    return handle


@in_virtual_time
async def test_a_damaged_block_is_not_copied() -> None:
    """Every block is verified on its way; the second tier has no checkpoint."""
    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages) as engine:
        await owe(engine, far)
        name = max(near.files)
        near.files[name][-1] ^= 1
        with pytest.raises(CorruptionError) as raised:
            await engine.finish_copies("near/a")
        assert (raised.value.path, raised.value.file) == ("near/a", name)
        assert far.manifest is None
        near.files[name][-1] ^= 1
        assert await engine.finish_copies("near/a") == ("far/a",)
        assert await engine.finish_copies("near/a") == ()
    assert_alike(storages)


@in_virtual_time
async def test_another_checkpoint_at_the_second_tier_is_not_replaced() -> None:
    """Without `overwrite` it stays, and `durable` says so; with it, it is replaced."""
    storages = two()
    async with inline_engine(storages) as engine:
        await engine.save(filled_state(SIZES, 1), "far/a")
        handle = engine.save(filled_state(SIZES, 2), "near/a", then="far/a")
        await handle
        with pytest.raises(CheckpointExistsError):
            await handle.durable
        assert_same(await engine.load("far/a"), filled_state(SIZES, 1))
        assert memory(storages, "far/a").leftovers() == []
        handle = engine.save(filled_state(SIZES, 3), "near/a", overwrite=True, then="far/a")
        await handle.durable
    assert_alike(storages)


class _LostAttempt(MemoryAttempt):
    async def commit(self, manifest: bytes) -> None:
        await super().commit(manifest)
        raise StorageError("it may stand", path="far/a", in_doubt=True)


class LosesTheAnswer(MemoryStorage):
    """Commits, and what says so gets lost."""

    attempt_type = _LostAttempt


@in_virtual_time
async def test_a_copy_in_doubt_is_not_hidden_by_what_was_loaded_from_there_before() -> None:
    """If it stands, it is what the next load of the second tier finds."""
    storages = {"near/a": MemoryStorage("near/a"), "far/a": LosesTheAnswer("far/a")}
    far = storages["far/a"].another_name("far/b")
    config = config_with(cache_ttl_s=1e6)
    async with inline_engine({**storages, "far/b": far}, config) as engine:
        await engine.save(filled_state(SIZES, 1), "far/b")
        await engine.load("far/b")
        handle = engine.save(filled_state(SIZES, 2), "near/a", then="far/a", overwrite=True)
        with pytest.raises(StorageError, match="it may stand"):
            await handle.durable
        assert_same(await engine.load("far/b"), filled_state(SIZES, 2))


@in_virtual_time
async def test_a_copy_is_not_hidden_by_what_was_loaded_from_there_before() -> None:
    """Though an engine may take for a while on trust what it has read, under any name."""
    storages = two()
    storages["far/b"] = memory(storages, "far/a").another_name("far/b")
    async with inline_engine(storages, config_with(cache_ttl_s=1e6)) as engine:
        await engine.save(filled_state(SIZES, 1), "far/b")
        await engine.load("far/b")
        state = filled_state(SIZES, 2)
        await engine.save(state, "near/a", then="far/a", overwrite=True).durable
        assert_same(await engine.load("far/b"), state)


@in_virtual_time
async def test_a_note_that_stays_behind_the_copy_fails_nothing() -> None:
    """An event tells of it; nobody holds it, and whoever takes it up finds nothing to send."""
    log = EventLog()

    storages = two()
    near = memory(storages, "near/a")
    near.fault = fail_kind("drop_note")
    async with inline_engine(storages, observer=log) as engine:
        await engine.save(random_state(SIZES), "near/a", then="far/a").durable
        assert [event.path for event in log.of(CleanupFailed)] == ["near/a"]
        near.fault = None
        assert await engine.finish_copies("near/a") == ("far/a",)
        assert log.of(CopyCommitted)[-1].sent_nbytes == 0
    assert_alike(storages)


@in_virtual_time
async def test_a_copy_that_is_stopped_when_it_is_committed_is_made() -> None:
    """Whoever stopped it is told that it is there, and its note goes."""
    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages) as engine:
        handle = engine.save(random_state(SIZES), "near/a", then="far/a")

        def stop(operation: Operation) -> None:
            if operation.kind == "drop_note":
                handle.abort()

        near.fault = stop
        assert (await handle.durable).path == "far/a"
        assert far.manifest is not None
    assert_alike(storages)


@in_virtual_time
async def test_a_copy_never_brings_what_another_save_has_put_there_instead() -> None:
    """A save that was overwritten while its copy waited in line has none, and says so."""
    storages = two()
    storages.update({name: MemoryStorage(name, max_delay_s=1.0) for name in ("near/b", "far/b")})
    far = memory(storages, "far/a")
    async with inline_engine(storages, config_with(max_tier_copies=1)) as engine:
        await engine.save(random_state(SIZES), "near/b", then="far/b")
        handle = engine.save(filled_state(SIZES, 1), "near/a", then="far/a")
        await handle
        await engine.save(filled_state(SIZES, 2), "near/a", overwrite=True)
        assert not handle.durable.done()
        with pytest.raises(CheckpointChangedError):
            await handle.durable
        assert (far.manifest, far.files) == (None, {})


@pytest.mark.parametrize("error", [ConfigError("refused"), StorageError("refused", path="far/a")])
@in_virtual_time
async def test_a_copy_that_fails_says_what_stays(error: CheckpointError) -> None:
    """And who goes on with it, unless it is one that can never be made."""
    storages = two()

    def refuse(_: Operation) -> None:
        raise error

    memory(storages, "far/a").fault = refuse
    async with inline_engine(storages) as engine:
        with pytest.raises(type(error), match="refused") as caught:
            await engine.save(random_state(SIZES), "near/a", then="far/a").durable
        (note,) = caught.value.__notes__
        assert "'near/a' itself is committed, and stays" in note
        assert ("its copy is owed" in note) == isinstance(error, StorageError)


@pytest.mark.parametrize("seed", range(3))
@in_virtual_time
async def test_the_newest_state_is_what_stays_at_the_second_tier(seed: int) -> None:
    """Copies to one place come one after the other; one that was overtaken says so."""
    storages = two(seed)
    async with inline_engine(storages) as engine:
        handles = []
        for i in range(4):
            state = filled_state(SIZES, i)
            handles.append(engine.save(state, "near/a", overwrite=True, then="far/a"))
            await handles[-1].staged
        for handle in handles[:-1]:
            with contextlib.suppress(CheckpointChangedError):
                await handle.durable
        await handles[-1].durable
        assert_same(await engine.load("far/a"), filled_state(SIZES, 3))
    assert_alike(storages)


@given(seed=seeds, limit=st.integers(1, 3), num_slabs=st.integers(1, 8))
@in_virtual_time
async def test_copies_wait_for_their_turn_and_nobody_for_them(
    seed: int, limit: int, num_slabs: int
) -> None:
    """No more than `max_tier_copies` at a time; saves commit meanwhile; an event says so."""
    log = EventLog()
    config = config_with(max_tier_copies=limit, pool_nbytes=num_slabs * SMALL.slab_nbytes)
    now = most = 0

    def watch(event: object) -> None:
        nonlocal now, most
        now += isinstance(event, CopyStarted)
        now -= isinstance(event, CopyCommitted)
        most = max(most, now)
        log(event)  # type: ignore[arg-type]  # it is an event

    storages: dict[str, Storage] = {}
    for i in range(5):
        storages[f"near/{i}"] = MemoryStorage(f"near/{i}", seed=seed + i)
        storages[f"far/{i}"] = MemoryStorage(f"far/{i}", seed=seed - i, max_delay_s=5.0)
    async with inline_engine(storages, config, watch) as engine:
        handles = [
            engine.save(random_state(SIZES, i), f"near/{i}", then=f"far/{i}") for i in range(5)
        ]
        for handle in handles:
            await handle
        assert not handles[-1].durable.done()
        for handle in handles:
            await handle.durable
        assert engine.statistics().peak_leased_nbytes <= config.pool_nbytes
    for i in range(5):
        assert_alike(storages, f"near/{i}", f"far/{i}")
    assert most == limit
    assert log.of(CopyQueued)
    assert len(log.of(SaveCommitted)) == 5


@given(seed=seeds, at_s=st.floats(0, 2.0))
@in_virtual_time
async def test_stopping_anywhere_leaves_a_copy_that_is_finished_later(
    seed: int, at_s: float
) -> None:
    """Whenever the handle is told to abort: the first tier is whole or empty, then both are."""
    state = random_state(SIZES, seed)

    storages = two(seed)
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages) as engine:
        handle = engine.save(state, "near/a", then="far/a")
        await asyncio.sleep(at_s)
        handle.abort()
        with contextlib.suppress(SaveAbortedError):
            await handle
        with contextlib.suppress(SaveAbortedError):
            await handle.durable
        if near.manifest is None:
            assert (near.files, near.notes, far.files) == ({}, {}, {})
        elif far.manifest is None:
            assert list(near.notes) == [handle.save_id]
            assert await engine.finish_copies("near/a") == ("far/a",)
        for storage in (near, far):
            assert_quiet(storage)
    if near.manifest is not None:
        assert_alike(storages)


@in_virtual_time
async def test_cancelling_a_wait_for_durable_only_stops_waiting() -> None:
    """The copy goes on."""
    storages = two(delay_s=1.0)
    async with inline_engine(storages) as engine:
        handle = engine.save(random_state(SIZES), "near/a", then="far/a")
        await handle
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await handle.durable
        await handle.durable
    assert_alike(storages)


@in_virtual_time
async def test_a_save_that_is_aborted_has_no_copy_that_fails() -> None:
    """Both moments say that the save was aborted, and no event speaks of a copy."""
    log = EventLog()

    storages = two()
    async with inline_engine(storages, SMALL, log) as engine:
        handle = engine.save(random_state(SIZES), "near/a", then="far/a")
        await asyncio.sleep(0.01)
        handle.abort()
        for moment in (handle.committed, handle.durable):
            with pytest.raises(SaveAbortedError, match="the save to 'near/a' was aborted"):
                await moment
    assert log.of(CopyFailed) == []


@in_virtual_time
async def test_a_copy_that_is_stopped_as_its_save_is_committed_is_told() -> None:
    """It comes too late for the save; that the copy is owed is an event, and the note stays."""
    log = EventLog()

    def abort(event: Event) -> None:
        log(event)
        if isinstance(event, SaveCommitted):
            handle.abort()

    storages = two()
    async with inline_engine(storages, SMALL, abort) as engine:
        handle = engine.save(random_state(SIZES), "near/a", then="far/a")
        await handle.committed
        with pytest.raises(SaveAbortedError):
            await handle.durable
        (event,) = log.of(CopyFailed)
        assert (event.path, event.to, event.save_id) == ("near/a", "far/a", handle.save_id)
        assert await engine.finish_copies("near") == ("far/a",)
    assert_alike(storages)


@in_virtual_time
async def test_a_copy_that_never_begins_holds_up_none_behind_it() -> None:
    """Copies take their places in the order of their saves: one of a save that failed, none."""
    storages = {name: MemoryStorage(name) for name in ("near/a", "far/a", "near/b", "far/b")}
    storages["near/a"].fault = fail_kind("begin")
    async with inline_engine(storages) as engine:
        failed = engine.save(random_state([3000]), "near/a", then="far/a")
        handle = engine.save(random_state([3000]), "near/b", then="far/b")
        with pytest.raises(StorageError):
            await failed
        async with asyncio.timeout(60):
            await handle.durable


@in_virtual_time
async def test_a_copy_replaces_only_what_was_to_be_made_in_its_place() -> None:
    """One to another second tier that failed is missing there, and is still to be told of."""
    copies = Copies()
    near, far, other = (MemoryStorage(name) for name in ("near/a", "far/a", "other/a"))
    failed = SaveMoments("near/a", "1" * 32, copy_to="other/a")
    copies.unmade[near.identity, "1" * 32] = failed
    names = list(copies.unmade)
    job = CopyJob(save_id="2" * 32, key="", source=near, target=far, overwrite=True)
    assert copies.has_replaced(job, names) == []
    assert list(copies.unmade) == names
    job = CopyJob(save_id="2" * 32, key="", source=near, target=other, overwrite=True)
    assert copies.has_replaced(job, names) == ["1" * 32]
    assert not copies.unmade


@in_virtual_time
async def test_a_copy_counts_as_under_way_from_before_the_commit() -> None:
    """From then on whoever takes up what is owed may see that checkpoint."""
    storages = two()
    near, under_way = memory(storages, "near/a"), []

    def look(operation: Operation) -> None:
        if operation.kind in {"note", "commit"}:
            under_way.append([*engine._core.context.copies.under_way])

    near.fault = look
    async with inline_engine(storages) as engine:
        handle = engine.save(random_state(SIZES), "near/a", then="far/a")
        await handle.durable
        name = near.identity, handle.save_id
        assert under_way == [[name], [name]]
        assert not engine._core.context.copies.under_way
        assert not engine._core.context.notes._held


class TakenByOthers(MemoryStorage):
    """As soon as something is committed, another program puts a checkpoint of its own there."""

    async def read_manifest(self) -> tuple[int, Any]:
        version, data = await super().read_manifest()
        return version, decode_manifest(data)  # as what others wrote is given


@in_virtual_time
async def test_the_copy_of_what_another_program_has_replaced_is_told() -> None:
    """There is nothing to copy any more, and what is there is none of ours."""
    storages = {"near/a": TakenByOthers("near/a"), "far/a": MemoryStorage("far/a")}
    async with inline_engine(storages) as engine:
        handle = engine.save(random_state(SIZES), "near/a", then="far/a")
        await handle
        with pytest.raises(CheckpointChangedError) as raised:
            await handle.durable
        assert not getattr(raised.value, "__notes__", []), "it would say that the copy is owed"
    assert storages["far/a"].manifest is None
    assert storages["far/a"].files == {}


@in_virtual_time
async def test_a_save_that_fails_has_no_copy() -> None:
    """`durable` raises what the commit raises; nothing is noted."""
    storages = two()
    near = memory(storages, "near/a")
    near.fault = fail_kind("commit")
    async with inline_engine(storages) as engine:
        handle = engine.save(random_state(SIZES), "near/a", then="far/a")
        with pytest.raises(StorageError, match="cannot commit"):
            await handle.durable
        with pytest.raises(StorageError, match="cannot commit"):
            await handle
    assert memory(storages, "far/a").operations == []
    assert (near.files, near.notes) == ({}, {})


# another run


def crashed(
    storages: Mapping[str, Storage], number: int, state: Mapping[str, torch.Tensor], seed: int
) -> bool:
    """Save with a copy in a process that dies before operation `number` on any storage."""
    counted = itertools.count()
    dies = crash_at(number)

    def fault(operation: object) -> None:
        del operation
        dies(Operation(next(counted), "any"))

    for storage in storages.values():
        assert isinstance(storage, MemoryStorage)
        storage.fault = fault

    async def scenario() -> bool:
        async with inline_engine(storages, COARSE) as engine:
            handle = engine.save(state, "near/a", overwrite=True, then="far/a")
            with contextlib.suppress(SaveAbortedError):
                await handle
            try:
                await handle.durable
            except SaveAbortedError:
                return True
            return next(counted) > number

    died = run_virtual(scenario(), seed=seed)
    for storage in storages.values():
        assert isinstance(storage, MemoryStorage)
        storage.fault = None
        storage.die()
        storage.counts.num_open_attempts = storage.counts.num_open_sinks = 0
    return died


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "overwrite"])
@pytest.mark.parametrize("how", ["finish", "save"])
def test_a_copy_that_was_killed_anywhere_is_finished_by_the_next_run(
    seed: int, how: str, *, fresh: bool
) -> None:
    """It never looks whole before; then both tiers have the same bytes, and nothing else."""
    old, new = random_state([5000], 7), random_state([70 * KiB, 3000], 8)
    outcomes = set()
    for number in itertools.count():
        storages = two(seed)
        near, far = memory(storages, "near/a"), memory(storages, "far/a")
        if not fresh:
            run_virtual(saved(storages, old), seed=seed)
        before = (near.manifest, far.manifest)
        died = crashed(storages, number, new, seed)
        assert len(near.notes) <= 1
        committed = near.manifest not in (None, before[0])
        copied = far.manifest not in (None, before[1])
        assert committed or not copied
        assert far.manifest in (before[1], near.manifest)
        if committed and not copied:
            assert list(near.notes)
        outcomes.add((committed, copied, bool(near.notes)))
        run_virtual(go_on(storages, how), seed=seed)
        if committed:
            assert_alike(storages)
            run_virtual(loads(storages, new), seed=seed)
        if not died:
            break
    assert {(False, False, False), (True, False, True), (True, True, False)} <= outcomes
    assert number > 20


async def saved(storages: Mapping[str, Storage], state: Mapping[str, torch.Tensor]) -> None:
    async with inline_engine(storages, COARSE) as engine:
        await engine.save(state, "near/a", then="far/a").durable


async def loads(storages: Mapping[str, Storage], state: Mapping[str, torch.Tensor]) -> None:
    async with inline_engine(storages, COARSE) as engine:
        for path in ("near/a", "far/a"):
            assert_same(await engine.load(path), state)


async def go_on(storages: dict[str, Storage], how: str) -> None:
    """Do what finishes copies: ask for it, or save another step beside the first."""
    more = {**storages, "near/b": MemoryStorage("near/b"), "far/b": MemoryStorage("far/b")}
    async with inline_engine(more, COARSE) as engine:
        if how == "finish":
            await engine.finish_copies("near")
        else:
            await engine.save(filled_state([10], 1), "near/b", then="far/b").durable
    if how == "save":
        assert_alike(more, "near/b", "far/b")


@in_virtual_time
async def test_what_is_there_whole_is_not_sent_again() -> None:
    """Only the files that the killed copy had not ended are, and none that is damaged stays."""
    log = EventLog()

    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    far.fault = fail_kind("commit")
    async with inline_engine(storages, SMALL, log) as engine:
        handle = engine.save(random_state(SIZES), "near/a", then="far/a")
        with pytest.raises(StorageError):
            await handle.durable
        far.fault = None
        assert far.files == near.files
        first, second, *_ = sorted(far.files)
        far.files[first][5000] ^= 1  # its size is right, its bytes are not
        del far.files[second]
        sent = far.counts.written_nbytes
        assert await engine.finish_copies("near") == ("far/a",)
        expected = len(near.files[first]) + len(near.files[second])
        assert far.counts.written_nbytes - sent == expected
        assert log.of(CopyStarted)[-1].num_files == 2
        assert log.of(CopyStarted)[-1].is_resumed
    assert_alike(storages)


def test_a_copy_that_reads_what_is_there_says_that_it_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It writes nothing meanwhile, and a host that does not see its lock counts an hour."""
    said_s: list[float] = []

    async def stay(_: MemoryAttempt) -> None:
        said_s.append(asyncio.get_running_loop().time())

    async def scenario() -> None:
        storages = two(delay_s=1000.0)
        memory(storages, "far/a").fault = fail_kind("commit")
        async with inline_engine(storages) as engine:
            handle = engine.save(random_state(SIZES), "near/a", then="far/a")
            with pytest.raises(StorageError):
                await handle.durable
            memory(storages, "far/a").fault = None
            monkeypatch.setattr(MemoryAttempt, "stay", stay)
            assert await engine.finish_copies("near") == ("far/a",)
        assert_alike(storages)

    run_virtual(scenario(), seed=0)
    waits_s = [later - sooner for sooner, later in itertools.pairwise(said_s)]
    assert len(waits_s) > 3
    assert max(waits_s) < 100


@in_virtual_time
async def test_a_copy_that_somebody_else_makes_is_left_to_them() -> None:
    """Who finishes copies takes none that this engine, or another, has under way."""
    storages = two(delay_s=0.5)
    async with inline_engine(storages) as engine:
        handle = engine.save(random_state(SIZES), "near/a", then="far/a")
        await handle
        assert await engine.finish_copies("near") == ()
        while not memory(storages, "far/a").operations:
            await asyncio.sleep(0.01)
        engine._core.context.copies.under_way.clear()  # as another engine sees it
        assert await engine.finish_copies("near") == ()
        await handle.durable
        assert await engine.finish_copies("near") == ()
    assert_alike(storages)


@in_virtual_time
async def test_a_note_that_makes_no_sense_is_an_error_of_its_copy_alone() -> None:
    """The other copies are made; the note is let go of."""
    storages = two() | {"near/b": MemoryStorage("near/b"), "far/b": MemoryStorage("far/b")}
    for name in ("far/a", "far/b"):
        memory(storages, name).fault = fail_kind("begin")
    async with inline_engine(storages) as engine:
        for name in "ab":
            handle = engine.save(random_state(SIZES), f"near/{name}", then=f"far/{name}")
            with pytest.raises(StorageError):
                await handle.durable
        for name in ("far/a", "far/b"):
            memory(storages, name).fault = None
        notes = memory(storages, "near/a").notes
        (save_id,) = notes
        assert decode_note(notes[save_id]) == CopyNote(copy_to="far/a", overwrite=False)
        whole, notes[save_id] = notes[save_id], b'{"copy_to": 1}'
        with pytest.raises(ValueError, match="note"):
            await engine.finish_copies("near")
        assert_alike(storages, "near/b", "far/b")
        notes[save_id] = whole
        assert await engine.finish_copies("near") == ("far/a",)
    assert_alike(storages)


@in_virtual_time
async def test_what_cannot_be_looked_at_stops_no_other_copy() -> None:
    """A neighbour of another user, say; it is told, by an event and by the error."""
    log = EventLog()

    storages = two() | {"near/0": MemoryStorage("near/0"), "near/z": MemoryStorage("near/z")}
    far = memory(storages, "far/a")
    async with inline_engine(storages, SMALL, log) as engine:
        await owe(engine, far)
        for name in ("near/0", "near/z"):
            memory(storages, name).fault = fail_kind("version")
        before = len(log.of(CopyFailed))
        with pytest.raises(StorageError) as raised:
            await engine.finish_copies("near")
        assert raised.value.filename == "near/0"
        assert [event.path for event in log.of(CopyFailed)[before:]] == ["near/0", "near/z"]
        assert_alike(storages)


@in_virtual_time
async def test_of_copies_that_fail_the_first_is_raised() -> None:
    """All others are tried, too."""
    names = ["near/a", "far/a", "near/b", "far/b", "near/c", "far/c"]
    storages: dict[str, Storage] = {name: MemoryStorage(name) for name in names}
    async with inline_engine(storages) as engine:
        for name in "abc":
            memory(storages, f"far/{name}").fault = fail_kind("begin")
            handle = engine.save(random_state(SIZES), f"near/{name}", then=f"far/{name}")
            with pytest.raises(StorageError):
                await handle.durable
        memory(storages, "far/c").fault = None
        with pytest.raises(StorageError) as raised:
            await engine.finish_copies("near")
        assert raised.value.filename == "far/a"
    assert_alike(storages, "near/c", "far/c")


@in_virtual_time
async def test_a_copy_that_is_being_finished_is_not_begun_again() -> None:
    """By whoever asks meanwhile, who does not wait for it."""
    storages = two()
    far = memory(storages, "far/a")
    async with inline_engine(storages) as engine:
        await owe(engine, far)
        once, again = await asyncio.gather(*[engine.finish_copies("near/a") for _ in "12"])
        assert sorted([once, again]) == [(), ("far/a",)]
    assert_alike(storages)


@in_virtual_time
async def test_what_cannot_be_read_is_not_said_to_owe_nothing() -> None:
    """It is an error, and an event: nobody knows whether it owes a copy."""
    log = EventLog()

    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages, SMALL, log) as engine:
        await owe(engine, far)
        near.fault = fail_kind("read_manifest")
        before = len(log.of(CopyFailed))
        for place in ("near", "near/a"):
            with pytest.raises(StorageError, match="near/a"):
                await engine.finish_copies(place)
        assert [(e.path, e.to) for e in log.of(CopyFailed)[before:]] == [("near/a", "")] * 2
        near.fault = None
        assert await engine.finish_copies("near/a") == ("far/a",)
    assert_alike(storages)


@in_virtual_time
async def test_a_copy_counts_as_owed_until_it_is_seen_that_it_is_not() -> None:
    """Another program has its note; that it cannot be looked for is no error of this one."""
    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages) as engine:
        handle = await owe(engine, far)
        unmade = engine._core.context.copies.unmade
        elsewhere = near.hold(handle.save_id)
        assert await engine.finish_copies("near/a") == ()
        assert len(unmade) == 1
        near.fault = fail_kind("has_note")
        assert await engine.finish_copies("near/a") == ()
        assert len(unmade) == 1
        near.fault = None
        await elsewhere.drop()
        assert await engine.finish_copies("near/a") == ()
        assert not unmade


@in_virtual_time
async def test_who_stops_before_the_second_tier_was_found_holds_no_note() -> None:
    """Another program makes the copy; this one lives on, and would keep it from that."""

    class Unfound(MemoryStorage):
        """It does not say where it is."""

        is_asked = False

        async def locate(self, *, gives_up: bool = True) -> bool:
            self.is_asked = True
            await asyncio.get_running_loop().create_future()
            return await super().locate(gives_up=gives_up)

    near, far = MemoryStorage("near/a"), MemoryStorage("far/a")
    far.fault = fail_kind("begin")
    async with inline_engine({"near/a": near, "far/a": far}) as engine:
        with pytest.raises(StorageError):
            await engine.save(random_state(SIZES), "near/a", then="far/a").durable
    unfound = Unfound("far/a")
    async with inline_engine({"near/a": near, "far/a": unfound}) as engine:
        finishing = asyncio.ensure_future(engine.finish_copies("near/a"))
        while not unfound.is_asked:
            await asyncio.sleep(0.01)
        assert near._place.held
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        assert not near._place.held


@in_virtual_time
async def test_what_cannot_be_looked_at_stops_no_copy_that_a_save_takes_up() -> None:
    """What an earlier run owed beside it is made as the next save is."""
    names = ("near/0", "near/b", "far/b")
    storages = two() | {name: MemoryStorage(name) for name in names}
    memory(storages, "near/0").fault = fail_kind("version")
    far = memory(storages, "far/a")
    far.fault = fail_kind("begin")
    async with inline_engine(storages) as engine:
        with pytest.raises(StorageError):
            await engine.save(random_state(SIZES), "near/a", then="far/a").durable
    far.fault = None
    async with inline_engine(storages) as engine:
        await engine.save(filled_state([10], 1), "near/b", then="far/b").durable
    assert_alike(storages)
    assert_alike(storages, "near/b", "far/b")


@in_virtual_time
async def test_what_is_owed_is_looked_for_once_when_the_second_tier_is_back() -> None:
    """By the next save; later ones list the directory no more."""
    names = [f"{place}/{name}" for name in "abc" for place in ("near", "far")]

    storages = {name: MemoryStorage(name) for name in names}
    async with inline_engine(storages) as engine:
        await owe(engine, storages["far/a"])
        copies = engine._core.context.copies
        for name, owing in (("b", {"near": True}), ("c", {})):
            await engine.save(random_state(SIZES), f"near/{name}", then=f"far/{name}").durable
            assert copies.owing == owing
    for name in "abc":
        assert_alike(storages, f"near/{name}", f"far/{name}")


@in_virtual_time
async def test_what_an_earlier_run_owed_is_tried_again_when_its_copy_failed_again() -> None:
    """By a save of the same run, when one was copied: the second tier is back."""
    names = [f"{place}/{name}" for name in "abcd" for place in ("near", "far")]

    storages = {name: MemoryStorage(name) for name in names}
    storages["far/a"].fault = fail_kind("begin")
    async with inline_engine(storages) as engine:
        with pytest.raises(StorageError):
            await engine.save(random_state(SIZES), "near/a", then="far/a").durable
    async with inline_engine(storages) as engine:
        for name in "bcd":
            await engine.save(random_state(SIZES), f"near/{name}", then=f"far/{name}").durable
            await asyncio.sleep(1)  # until what it took up has ended
            storages["far/a"].fault = None
    for name in "abcd":
        assert_alike(storages, f"near/{name}", f"far/{name}")


# loading


@in_virtual_time
async def test_the_nearest_tier_that_is_whole_is_read() -> None:
    """The first if it is; else the second, with an event that says why."""
    log = EventLog()
    state = random_state(SIZES)

    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages, SMALL, log) as engine:
        await engine.save(state, "near/a", then="far/a").durable
        assert_same(await load(engine), state)
        assert (far.counts.read_nbytes, log.of(TierPassedOver)) == (0, [])
        name = min(near.files)
        data = near.files.pop(name)
        assert_same(await load(engine), state)
        near.files[name] = data[:-1]
        assert_same(await load(engine), state)
        near._place.manifest = None
        assert_same(await load(engine), state)
        result = await engine.load_with_report("near/a", then="far/a")
        assert result.report.path == "far/a"
        near._place.manifest = b"{}"
        assert_same(await load(engine), state)
    passed = log.of(TierPassedOver)
    assert [type(event.error).__name__ for event in passed] == [
        "CorruptionError",
        "CorruptionError",
        "CheckpointNotFoundError",
        "CheckpointNotFoundError",
        "FormatError",
    ]
    assert {(event.path, event.to) for event in passed} == {("near/a", "far/a")}


async def load(engine: Engine) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = await engine.load("near/a", then="far/a")
    return state


def damage(storage: MemoryStorage, value: int = 1) -> str:
    """Change the first byte of a tensor; gives the name of the file."""
    assert storage.manifest is not None
    manifest = decode_manifest(storage.manifest)
    chunk = next(chunk for tensor in manifest.tensors for chunk in tensor.chunks)
    name = manifest.files[chunk.file].name
    storage.files[name][chunk.start] ^= value
    return name


@in_virtual_time
async def test_a_damaged_block_is_made_up_for_by_the_same_save_on_the_second_tier() -> None:
    """Into new tensors and given ones; of another save, or damaged too, the damage is said."""
    log = EventLog()
    state = random_state(SIZES)

    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages, SMALL, log) as engine:
        await engine.save(state, "near/a", then="far/a").durable
        name = damage(near)
        assert_same(await load(engine), state)
        target = {key: tensor.clone().zero_() for key, tensor in state.items()}
        result = await engine.load_with_report("near/a", into=target, then="far/a")
        assert_same(target, state)
        assert result.report.path == "far/a"
        for event in log.of(TierPassedOver):
            assert isinstance(event.error, CorruptionError)
            assert (event.path, event.to, event.error.file) == ("near/a", "far/a", name)
            assert event.error.__traceback__ is None  # it would hold what was made first
        assert len(log.of(TierPassedOver)) == 2
        damage(far, value=2)
        with pytest.raises(CorruptionError) as raised:
            await load(engine)
        assert raised.value.path == "far/a"
        far.fault = fail_kind("read_manifest")
        with pytest.raises(CorruptionError) as raised:
            await load(engine)
        assert raised.value.path == "near/a"
        far.fault = None
        await engine.save(state, "far/a", overwrite=True)
        await engine.save(state, "near/a", overwrite=True)
        damage(near)
        with pytest.raises(CorruptionError) as raised:
            await load(engine)
        assert raised.value.path == "near/a"


@in_virtual_time
async def test_what_was_saved_again_elsewhere_is_read_from_the_second_tier() -> None:
    """Another machine has gone on; what owes a copy, or is later itself, is what is read."""
    log = EventLog()
    states = [filled_state(SIZES, value) for value in range(4)]

    storages = two()
    storages["near/b"] = MemoryStorage("near/b")
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages, SMALL, log) as engine:
        await engine.save(states[0], "near/a", then="far/a").durable
        await engine.save(states[1], "near/b", overwrite=True, then="far/a").durable
        assert_same(await load(engine), states[1])
        (event,) = log.of(TierPassedOver)
        assert (event.path, event.to) == ("near/a", "far/a")
        assert "a later save of it is on the second tier" in str(event.error)
        await engine.save(states[2], "near/a", overwrite=True)
        assert_same(await load(engine), states[2])
        far.fault = fail_kind("commit")
        with pytest.raises(StorageError):
            await engine.save(states[3], "near/a", overwrite=True, then="far/a").durable
        far.fault = None
        await engine.save(states[1], "near/b", overwrite=True, then="far/a").durable
        assert near.notes
        assert_same(await load(engine), states[3])
    assert len(log.of(TierPassedOver)) == 1


@in_virtual_time
async def test_an_older_save_does_not_make_up_for_a_file_that_is_cut() -> None:
    """The damage is said, and where the other is; a later one is read, unless a copy is owed."""
    log = EventLog()
    states = [filled_state(SIZES, value) for value in range(4)]

    storages = two()
    storages["near/b"] = MemoryStorage("near/b")
    near, far = memory(storages, "near/a"), memory(storages, "far/a")

    async def assert_damage_is_said(engine: Engine) -> None:
        with pytest.raises(CorruptionError) as raised:
            await load(engine)
        assert raised.value.path == "near/a"
        assert "another save of it" in raised.value.__notes__[-1]
        assert "load 'far/a'" in raised.value.__notes__[-1]
        assert log.of(TierPassedOver) == []

    async with inline_engine(storages, SMALL, log) as engine:
        await engine.save(states[0], "near/a", then="far/a").durable
        await engine.save(states[1], "near/a", overwrite=True)
        near.files[max(near.files)].pop()
        await assert_damage_is_said(engine)
        far.fault = fail_kind("commit")
        with pytest.raises(StorageError):
            await engine.save(states[2], "near/a", overwrite=True, then="far/a").durable
        far.fault = None
        near.files[max(near.files)].pop()
        await engine.save(states[3], "near/b", overwrite=True, then="far/a").durable
        await assert_damage_is_said(engine)
        near.notes.clear()
        assert_same(await load(engine), states[3])
    assert len(log.of(TierPassedOver)) == 1


@in_virtual_time
async def test_a_manifest_that_cannot_be_read_is_not_made_up_for_by_the_past() -> None:
    """What owes a copy, or may, is later than what the second tier has."""
    log = EventLog()

    async def assert_said(engine: Engine, kind: type[Exception]) -> None:
        with pytest.raises(kind) as raised:
            await load(engine)
        assert "load 'far/a'" in raised.value.__notes__[-1]
        assert log.of(TierPassedOver) == []

    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages, SMALL, log) as engine:
        await engine.save(filled_state(SIZES, 0), "near/a", then="far/a").durable

        def refuse(operation: Operation) -> None:
            if operation.kind in kinds:
                raise OSError(code, "no", "near/a")

        near.fault = refuse
        kinds, code = {"version", "read_manifest"}, errno.EMFILE
        await assert_said(engine, StorageError)
        kinds, code = {"version", "read_manifest", "has_note"}, errno.EIO
        await assert_said(engine, StorageError)  # nobody can tell
        near.fault, far.fault = None, fail_kind("commit")
        with pytest.raises(StorageError):
            await engine.save(
                filled_state(SIZES, 1), "near/a", overwrite=True, then="far/a"
            ).durable
        far.fault = None
        assert near.manifest is not None
        near._place.manifest = near.manifest[:-1]
        near._place.version += 1
        await assert_said(engine, FormatError)
        near.notes.clear()
        assert_same(await load(engine), filled_state(SIZES, 0))
    assert len(log.of(TierPassedOver)) == 1


@in_virtual_time
async def test_that_a_damaged_tier_is_passed_over_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where nobody observes; not that a machine's own disk is empty, as a new one's is."""
    storages = two()
    near = memory(storages, "near/a")
    async with inline_engine(storages) as engine:
        await engine.save(random_state(SIZES), "near/a", then="far/a").durable
        near.files[max(near.files)].pop()
        assert_same(await load(engine), random_state(SIZES))
        [record] = caplog.records
        assert record.levelname == "WARNING"
        assert "far/a is read, the second tier of near/a" in record.getMessage()
        damage(near)
        near._place.manifest = None
        assert_same(await load(engine), random_state(SIZES))
        assert len(caplog.records) == 1


@in_virtual_time
async def test_a_sector_that_is_bad_is_made_up_for_as_a_damaged_block_is() -> None:
    """An error of the device is as good as a checksum."""
    log = EventLog()

    storages = two()
    near = memory(storages, "near/a")
    async with inline_engine(storages, SMALL, log) as engine:
        await engine.save(random_state(SIZES), "near/a", then="far/a").durable
        near.fault = fail_kind("pread_into")
        assert_same(await load(engine), random_state(SIZES))
    [event] = log.of(TierPassedOver)
    assert isinstance(event.error, StorageError)


@in_virtual_time
async def test_a_second_tier_that_cannot_be_opened_is_away() -> None:
    """As with a wrong option: whoever has the checkpoint on the first tier needs none."""
    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages) as engine:
        await engine.save(random_state(SIZES), "near/a")

        def refuse(operation: Operation) -> None:
            raise ConfigError(f"no {operation.kind} with this option")

        far.fault = refuse
        assert_same(await load(engine), random_state(SIZES))
        damage(near)
        with pytest.raises(CorruptionError):
            await load(engine)


def test_what_another_program_wrote_is_never_of_the_past(tmp_path: Path) -> None:
    """Its time is that of its file, and nobody copies it: no save of ours is a later one of it."""
    torch.save({"w": torch.ones(4)}, tmp_path / "near.pt")
    sync.save({"w": torch.zeros(4)}, tmp_path / "far", config=SMALL)
    found = sync.load(tmp_path / "near.pt", then=tmp_path / "far", config=SMALL)
    assert torch.equal(found["w"], torch.ones(4))


@in_virtual_time
async def test_a_second_tier_that_does_not_answer_is_not_waited_for() -> None:
    """Where the first tier has the checkpoint whole, in seconds."""
    storages = two(delay_s=0.0)
    storages["near/b"] = MemoryStorage("near/b")
    async with inline_engine(storages) as engine:
        await engine.save(random_state(SIZES), "near/a").durable
        await engine.save(random_state(SIZES), "near/b", then="far/a").durable
        memory(storages, "far/a")._max_delay_s = 1e6
        began_s = asyncio.get_running_loop().time()
        assert_same(await load(engine), random_state(SIZES))
        assert asyncio.get_running_loop().time() - began_s < 10


@in_virtual_time
async def test_where_no_tier_has_it_that_is_said() -> None:
    """Not found names both; a damaged first tier without a second one is damaged."""
    storages = two()
    near = memory(storages, "near/a")
    async with inline_engine(storages) as engine:
        with pytest.raises(CheckpointNotFoundError, match="nor at 'far/a'"):
            await load(engine)
        await engine.save(random_state(SIZES), "near/a")
        near.files.pop(min(near.files))
        with pytest.raises(CorruptionError):
            await load(engine)


@in_virtual_time
async def test_a_copy_of_blocks_that_do_not_fill_the_slabs_is_refused() -> None:
    """What is carried over at a time are whole blocks, as those are verified."""
    storages = two()
    memory(storages, "far/a").fault = fail_kind("commit")
    odd = config_with(block_nbytes=12 * KiB, slab_nbytes=60 * KiB)
    async with inline_engine(storages, odd) as engine:
        with pytest.raises(StorageError):
            await engine.save(random_state(SIZES), "near/a", then="far/a").durable
    memory(storages, "far/a").fault = None
    memory(storages, "near/a").die()
    async with inline_engine(storages) as engine:
        with pytest.raises(ConfigError, match="slab_nbytes that are a multiple, not 65536"):
            await engine.finish_copies("near/a")


@pytest.mark.parametrize("left_nbytes", [None, 1])
@in_virtual_time
async def test_nothing_is_committed_that_is_not_there_any_more(left_nbytes: int | None) -> None:
    """What was found whole may be swept, or cut, meanwhile: all files are looked at again, last."""
    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages) as engine:
        far.fault = fail_kind("commit")
        with pytest.raises(StorageError):
            await engine.save(random_state(SIZES), "near/a", then="far/a").durable
        far.files.pop(max(far.files))

        def sweep(operation: Operation) -> None:
            if operation.kind == "create":
                name = min(far.files)
                data = far.files.pop(name)
                if left_nbytes is not None:
                    far.files[name] = data[:left_nbytes]

        far.fault = sweep
        with pytest.raises(StorageError, match="is not there"):
            await engine.finish_copies("near/a")
        assert far.manifest is None
        assert near.notes
        far.fault = None
        assert await engine.finish_copies("near/a") == ("far/a",)
    assert_alike(storages)


@pytest.mark.parametrize("overwrite", [True, False])
@in_virtual_time
async def test_an_owed_copy_does_not_replace_a_newer_checkpoint(*, overwrite: bool) -> None:
    """Of two states for one place the newest stays, also if the older one was owed."""
    storages = two()
    storages["near/b"] = MemoryStorage("near/b")
    far = memory(storages, "far/a")
    states = [filled_state(SIZES, value) for value in (1, 2)]
    async with inline_engine(storages) as engine:
        far.fault = fail_kind("commit")
        with pytest.raises(StorageError):
            handle = engine.save(states[0], "near/a", overwrite=overwrite, then="far/a")
            await handle.durable
        far.fault = None
        await engine.save(states[1], "near/b", overwrite=True, then="far/a").durable
        assert await engine.finish_copies("near") == ()
        assert_same(await engine.load("far/a"), states[1])
        assert_same(await engine.load("near/a"), states[0])
        assert far.leftovers() == []
    assert memory(storages, "near/a").notes == {}
    assert_alike(storages, "near/b")


@pytest.mark.parametrize("num_owed", [1, 3])
@in_virtual_time
async def test_an_owed_copy_replaces_what_its_checkpoint_did(
    num_owed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was saved later, though the clock was set back; so it was of several in a row."""
    storages = two()
    far = memory(storages, "far/a")
    async with inline_engine(storages) as engine:
        with monkeypatch.context() as patch:
            patch.setattr("ckptio.engine.save.dt.datetime", Ahead)
            await engine.save(filled_state(SIZES, 0), "near/a", then="far/a").durable
        far.fault = fail_kind("begin")
        for value in range(1, num_owed + 1):
            state = filled_state(SIZES, value)
            handle = engine.save(state, "near/a", overwrite=True, then="far/a")
            with pytest.raises(StorageError):
                await handle.durable
        far.fault = None
        assert_same(await load(engine), state)
        assert await engine.finish_copies("near") == ("far/a",)
        assert_same(await load(engine), state)
    assert_alike(storages)


@in_virtual_time
async def test_saves_that_overlap_say_in_their_notes_what_they_replace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each what was committed before it, and not what was there when it had written its files."""
    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    commit = near.commit

    async def commit_late(*args: Any, **options: Any) -> None:
        await asyncio.sleep(60)
        await commit(*args, **options)

    async with inline_engine(storages) as engine:
        first = await engine.save(filled_state(SIZES, 0), "near/a", then="far/a").durable
        monkeypatch.setattr(near, "commit", commit_late)
        far.fault = fail_kind("begin")
        handles = []
        for value in (1, 2):
            state = filled_state(SIZES, value)
            handles.append(engine.save(state, "near/a", overwrite=True, then="far/a"))
            await handles[-1].staged
        ids = [first.save_id, *(handle.save_id for handle in handles)]
        for handle in handles:
            await handle
        for handle in handles:
            with pytest.raises((StorageError, CheckpointChangedError)):
                await handle.durable
        (note,) = near.notes.values()
        assert decode_note(note).replaced == (ids[1], ids[0])


@in_virtual_time
async def test_a_checkpoint_that_was_moved_to_where_it_is_wanted_is_copied() -> None:
    """The note goes, and nothing else is touched."""
    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages) as engine:
        await owe(engine, far)
        (save_id,) = near.notes
        near.notes[save_id] = encode_note(CopyNote(copy_to="near/a", overwrite=True))
        before, num_operations = dict(near.files), len(near.operations)
        assert await engine.finish_copies("near") == ()
        assert (near.files, near.notes) == (before, {})
        kinds = {operation.kind for operation in near.operations[num_operations:]}
        assert not kinds & {"begin", "create", "commit"}


@in_virtual_time
async def test_a_second_tier_out_of_reach_hides_nothing_of_the_first() -> None:
    """What is wrong with the first tier is said; that nothing is there only if both say so."""
    storages = two()
    near, far = memory(storages, "near/a"), memory(storages, "far/a")
    async with inline_engine(storages) as engine:
        far.fault = fail_kind("version")
        with pytest.raises(StorageError) as raised:
            await engine.load("near/a", then="far/a")
        assert raised.value.filename == "far/a"
        await engine.save(random_state(SIZES), "near/a")
        near.files.pop(max(near.files))
        with pytest.raises(CorruptionError) as damaged:
            await engine.load("near/a", then="far/a")
        assert damaged.value.path == "near/a"


def test_only_the_same_save_and_all_of_its_files_are_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nobody can tell, there is none: a step that counts as copied may be removed."""

    async def scenario() -> None:
        storages = two()
        near, far = memory(storages, "near/a"), memory(storages, "far/a")
        async with inline_engine(storages) as engine:

            async def has_copy() -> bool:
                return await is_copied(near, far, engine._core.context)

            assert not await has_copy()
            await engine.save(random_state(SIZES), "near/a")
            assert not await has_copy()
            await engine.save(random_state(SIZES), "far/a")
            assert not await has_copy()
            other = await far.read_manifest()
            await engine.save(random_state(SIZES), "near/a", then="far/a", overwrite=True).durable
            assert await has_copy()
            with monkeypatch.context() as patch:  # nobody has removed the files yet

                async def replaced() -> object:
                    return other

                patch.setattr(far, "read_manifest", replaced)
                assert not await has_copy()
            for storage in (near, far):
                storage.fault = fail_kind("read_manifest")
                assert not await has_copy()
                storage.fault = None
            assert await has_copy()
            far.files.pop(max(far.files))
            assert not await has_copy()

    run_virtual(scenario(), seed=0)
