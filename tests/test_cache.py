from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.cache import MetadataCache
from ckptio.engine.names import Named
from ckptio.errors import (
    CheckpointNotFoundError,
    EngineClosedError,
    FormatError,
    StorageError,
)
from ckptio.format.manifest import decode_manifest
from ckptio.storage.local import LocalStorage
from ckptio.testing import EventLog, MemoryStorage, fail_at, run_virtual
from tests.rig import SAVE_IDS, SMALL, contents_of, manifest_of, write_files
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ckptio.format.manifest import Manifest

A, B, C = SAVE_IDS[:3]
seeds = st.integers(0, 10_000)


@contextlib.asynccontextmanager
async def running_cache(
    entries: int = 8, nbytes: int = 1 << 20, ttl_s: float = 0.0
) -> AsyncIterator[MetadataCache]:
    """Give a cache that serves, and check that closing it leaves no task."""
    before = asyncio.all_tasks()
    cache = MetadataCache(entries, nbytes, ttl_s=ttl_s)
    task = asyncio.create_task(cache.run(), name="cache")
    while not cache._open:
        await asyncio.sleep(0)
    try:
        yield cache
    finally:
        cache.close()
        await task
        assert asyncio.all_tasks() == before


async def stored(save_id: str = A, path: str = "m", *, seed: int = 0) -> MemoryStorage:
    storage = MemoryStorage(path, seed=seed, max_delay_s=0.05)
    await write_files(storage, save_id, contents_of(save_id, 10))
    storage.counts.num_manifest_reads = storage.counts.num_version_checks = 0
    return storage


@given(seed=seeds)
@in_virtual_time
async def test_fifty_readers_cause_one_read(seed: int) -> None:
    """Readers that come together share one read and one value."""
    storage = await stored(seed=seed)
    async with running_cache() as cache:
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(cache.get(storage)) for _ in range(50)]
        assert {id(reader.result()) for reader in readers} == {id(readers[0].result())}
        assert readers[0].result().save_id == A
        assert storage.counts.num_manifest_reads == 1
        # a reader that joined a read under way has it checked, once for all of them
        assert storage.counts.num_version_checks <= 1


@given(seed=seeds, ages=st.lists(st.floats(0, 4), max_size=12))
@in_virtual_time
async def test_an_entry_is_trusted_for_its_time(seed: int, ages: list[float]) -> None:
    """Within `ttl_s` of the last check nothing is asked for; after it, or in doubt, it is."""
    storage = await stored(seed=seed)
    now = asyncio.get_running_loop().time
    async with running_cache(ttl_s=2.0) as cache:
        await cache.get(storage)
        asked_s = {storage.counts.num_version_checks: now()}
        for age in ages:
            await asyncio.sleep(age)
            before, began_s = storage.counts.num_version_checks, now()
            assert (await cache.get(storage)).save_id == A
            asked = storage.counts.num_version_checks - before
            assert asked <= 1
            if asked:
                # an entry read at `asked_s` was asked for at most the delays before
                assert began_s - max(asked_s.values()) >= 2.0 - 0.1
                asked_s[storage.counts.num_version_checks] = began_s
            else:
                assert began_s - max(asked_s.values()) < 2.0
                assert now() == began_s
        before = storage.counts.num_version_checks
        await cache.get(storage, fresh=True)
        assert storage.counts.num_version_checks == before + 1
        assert storage.counts.num_manifest_reads == 1


@in_virtual_time
async def test_an_entry_that_is_not_trusted_any_more_is_read() -> None:
    """A manifest replaced meanwhile is given when the time is over, and not before."""
    storage = await stored()
    async with running_cache(ttl_s=5.0) as cache:
        assert (await cache.get(storage)).save_id == A
        await write_files(storage, B, contents_of(B, 10), overwrite=True)
        assert (await cache.get(storage)).save_id == A
        await asyncio.sleep(5.0)
        assert (await cache.get(storage)).save_id == B


@given(seed=seeds, delays=st.lists(st.floats(0, 0.3), min_size=1, max_size=12))
@in_virtual_time
async def test_an_answer_is_never_older_than_the_question(seed: int, delays: list[float]) -> None:
    """Readers and writers at any time: a manifest that was replaced before is not given."""
    storage = await stored(SAVE_IDS[0], seed=seed)
    async with running_cache() as cache:

        async def read(at_s: float) -> None:
            await asyncio.sleep(at_s)
            assert storage.manifest is not None
            earliest = SAVE_IDS.index(decode_manifest(storage.manifest).save_id)
            assert SAVE_IDS.index((await cache.get(storage)).save_id) >= earliest

        async def write() -> None:
            for save_id in SAVE_IDS[1:6]:
                await asyncio.sleep(0.05)
                await write_files(storage, save_id, contents_of(save_id, 10), overwrite=True)

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            for at_s in delays:
                group.create_task(read(at_s))
        assert (await cache.get(storage)).save_id == SAVE_IDS[5]


@in_virtual_time
async def test_what_is_unchanged_is_not_read_again() -> None:
    """The second request costs a check of the version, and gives the same value."""
    storage = await stored()
    async with running_cache() as cache:
        first = await cache.get(storage)
        assert await cache.get(storage) is first
        assert storage.counts.num_manifest_reads == 1
        assert storage.counts.num_version_checks == 1
        statistics = cache.statistics()
        assert (statistics.num_reads, statistics.num_checks, statistics.num_hits) == (1, 1, 1)
        assert statistics.num_entries == 1
        assert storage.manifest is not None
        assert statistics.nbytes == len(storage.manifest)


@in_virtual_time
async def test_what_was_overwritten_is_read_again() -> None:
    """At the same path, the new manifest is given."""
    storage = await stored(A)
    async with running_cache() as cache:
        assert (await cache.get(storage)).save_id == A
        await write_files(storage, B, contents_of(B, 10), overwrite=True)
        assert (await cache.get(storage)).save_id == B
        assert cache.statistics().num_entries == 1


@in_virtual_time
async def test_failures_are_not_kept() -> None:
    """Nothing there, damaged, unreadable: the next request tries again."""
    storage = MemoryStorage("m")
    async with running_cache() as cache:
        for _ in range(2):
            with pytest.raises(CheckpointNotFoundError):
                await cache.get(storage)
        storage._place.manifest = b"damaged"
        with pytest.raises(FormatError):
            await cache.get(storage)
        storage._place.manifest = manifest_of(A, {})
        storage.fault = fail_at(len(storage.operations))
        with pytest.raises(StorageError):
            await cache.get(storage)
        assert (await cache.get(storage)).save_id == A
        # a checkpoint that is cached and then removed is not there any more
        storage._place.manifest = None
        with pytest.raises(CheckpointNotFoundError):
            await cache.get(storage)
        assert cache.statistics().num_entries == 0
        assert cache.statistics().nbytes == 0


@given(seed=seeds)
@in_virtual_time
async def test_a_failure_reaches_every_reader(seed: int) -> None:
    """Those who wait for a read that fails are all told, and none hangs."""
    storage = MemoryStorage("m", seed=seed, max_delay_s=0.05)
    async with running_cache() as cache:
        readers = [asyncio.ensure_future(cache.get(storage)) for _ in range(10)]
        for reader in readers:
            with pytest.raises(CheckpointNotFoundError):
                await reader


@given(seed=seeds, at_s=st.floats(0, 0.15), num=st.integers(1, 5))
@in_virtual_time
async def test_a_reader_that_is_cancelled_leaves_the_others_alone(
    seed: int, at_s: float, num: int
) -> None:
    """The read goes on for who still waits, and alone if nobody does."""
    storage = await stored(seed=seed)
    async with running_cache() as cache:
        readers = [asyncio.ensure_future(cache.get(storage)) for _ in range(5)]
        await asyncio.sleep(at_s)
        for reader in readers[:num]:
            reader.cancel()
        for reader in readers[num:]:
            assert (await reader).save_id == A
        await asyncio.wait(readers)
        assert (await cache.get(storage)).save_id == A
        assert storage.counts.num_manifest_reads == 1


def test_a_read_that_nobody_waits_for_ends_with_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may wait for a store that does not answer. One that somebody waits for is finished."""

    async def scenario(*, leaves: bool) -> float:
        storage = await stored()
        loop, read = asyncio.get_running_loop(), storage.read_manifest

        async def read_late() -> Any:
            await asyncio.sleep(100)
            return await read()

        monkeypatch.setattr(storage, "read_manifest", read_late)
        async with running_cache() as cache:
            reader = asyncio.ensure_future(cache.get(storage))
            await asyncio.sleep(0.01)
            if leaves:
                reader.cancel()
                await asyncio.wait((reader,))
            before_s = loop.time()
        took_s = loop.time() - before_s
        assert leaves or (await reader).save_id == A
        return took_s

    assert run_virtual(scenario(leaves=True), seed=0) == 0
    assert run_virtual(scenario(leaves=False), seed=0) > 1


@in_virtual_time
async def test_a_cancellation_from_below_is_a_failure_of_the_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that cancels its own task fails one round; the next reads, and closing ends."""
    storage = await stored()
    read, num = storage.read_manifest, 0

    async def read_cancelled_once() -> Any:
        nonlocal num
        num += 1
        await asyncio.sleep(0.1)
        if num == 1:
            raise asyncio.CancelledError
        return await read()

    monkeypatch.setattr(storage, "read_manifest", read_cancelled_once)
    async with running_cache() as cache, asyncio.timeout(10):
        first = asyncio.ensure_future(cache.get(storage))
        await asyncio.sleep(0.05)
        meanwhile = asyncio.ensure_future(cache.get(storage))
        with pytest.raises(StorageError, match="cancelled the read"):
            await first
        assert (await meanwhile).save_id == A
        assert (await cache.get(storage)).save_id == A


@in_virtual_time
async def test_who_waits_for_the_next_round_is_served_when_the_task_of_this_one_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever cancels all tasks of a loop, say: those who asked are told, the others served."""
    storage = await stored()
    read = storage.read_manifest

    async def read_late() -> Any:
        await asyncio.sleep(0.1)
        return await read()

    monkeypatch.setattr(storage, "read_manifest", read_late)
    async with running_cache() as cache, asyncio.timeout(10):
        first = asyncio.ensure_future(cache.get(storage))
        await asyncio.sleep(0.05)
        meanwhile = asyncio.ensure_future(cache.get(storage))
        await asyncio.sleep(0)
        (task,) = [t for t in asyncio.all_tasks() if t.get_name() == "cache m"]
        task.cancel()
        with pytest.raises(EngineClosedError):
            await first
        assert (await meanwhile).save_id == A


@in_virtual_time
async def test_entries_are_bounded_by_number() -> None:
    """The least recently used go first."""
    storages = [await stored(A, f"m{i}") for i in range(4)]
    async with running_cache(entries=2) as cache:
        for storage in storages[:2]:
            await cache.get(storage)
        await cache.get(storages[0])  # used again: now 1 is the oldest
        await cache.get(storages[2])
        assert cache.statistics().num_entries == 2
        reads = [storage.counts.num_manifest_reads for storage in storages]
        for storage in storages[:2]:
            await cache.get(storage)
        again = [storage.counts.num_manifest_reads for storage in storages]
        assert [b - a for a, b in zip(reads, again, strict=True)] == [0, 1, 0, 0]


@in_virtual_time
async def test_what_is_made_of_a_manifest_goes_with_its_entry() -> None:
    """It is kept neither beyond the bounds, nor of what was overwritten."""
    storages = [await stored(A, f"m{i}") for i in range(2)]
    async with running_cache(entries=1) as cache:
        manifest = await cache.get(storages[0])
        made = cache.beside(manifest, Named)
        assert cache.beside(await cache.get(storages[0]), Named) is made
        other = cache.beside(await cache.get(storages[1]), Named)
        assert other.manifest is not manifest
        gone = weakref.ref(made)
        assert cache.beside(manifest, Named) is not made
        del made
        gc.collect()
        assert gone() is None
        await write_files(storages[1], B, contents_of(B, 10), overwrite=True)
        assert cache.beside(await cache.get(storages[1]), Named).manifest.save_id == B


@in_virtual_time
async def test_of_few_entries_something_is_kept_beside() -> None:
    """It is not counted, and of the last few alone."""
    storages = [await stored(A, f"m{i}") for i in range(6)]
    async with running_cache() as cache:
        made = [cache.beside(await cache.get(storage), Named) for storage in storages]
        again = [cache.beside(await cache.get(storage), Named) for storage in storages[2:]]
        assert again == made[2:]
        assert cache.beside(await cache.get(storages[1]), Named) is not made[1]
        assert cache.statistics().num_entries == 6


@in_virtual_time
async def test_what_was_just_made_is_kept_however_long_ago_its_entry_was_asked_for() -> None:
    """Callers that ask at once have their manifests before the first of them makes anything."""
    storages = [await stored(A, f"m{i}") for i in range(6)]
    async with running_cache() as cache:
        manifests = [await cache.get(storage) for storage in storages]
        for manifest in reversed(manifests):
            made = cache.beside(manifest, Named)
            assert made.manifest is manifest
            assert cache.beside(manifest, Named) is made


@in_virtual_time
async def test_entries_are_bounded_by_bytes() -> None:
    """What is larger than the bound is not kept; the sum of the others stays below."""
    storages = [await stored(A, f"m{i}") for i in range(5)]
    assert storages[0].manifest is not None
    nbytes = len(storages[0].manifest)
    async with running_cache(nbytes=3 * nbytes) as cache:
        for storage in storages:
            await cache.get(storage)
        assert cache.statistics().num_entries == 3
        assert cache.statistics().nbytes == 3 * nbytes
    async with running_cache(nbytes=nbytes - 1) as cache:
        for _ in range(2):
            assert (await cache.get(storages[0])).save_id == A
        assert cache.statistics().num_entries == 0
        assert cache.statistics().num_reads == 2


@in_virtual_time
async def test_a_forgotten_entry_is_read_again() -> None:
    """`forget` drops an entry and its bytes, and does nothing where there is none."""
    storage = await stored()
    async with running_cache() as cache:
        cache.forget(storage)
        await cache.get(storage)
        cache.forget(storage)
        assert cache.statistics().nbytes == 0
        await cache.get(storage)
        assert storage.counts.num_manifest_reads == 2


@given(seed=seeds, delay_s=st.floats(0, 0.2))
@in_virtual_time
async def test_what_is_read_while_it_is_forgotten_is_not_trusted(seed: int, delay_s: float) -> None:
    """A commit of this engine is seen at once, whatever was being read when it came."""
    storage = await stored(seed=seed)
    async with running_cache(ttl_s=60.0) as cache:
        first = asyncio.create_task(cache.get(storage))
        await asyncio.sleep(delay_s)
        await write_files(storage, B, contents_of(B, 10), overwrite=True)
        cache.forget(storage)
        assert (await first).save_id in (A, B)
        assert (await cache.get(storage)).save_id == B


@in_virtual_time
async def test_a_cache_that_does_not_run_refuses() -> None:
    """Before and after its time a request raises at once instead of waiting for ever."""
    storage = await stored()
    cache = MetadataCache(8, 1 << 20)
    with pytest.raises(EngineClosedError):
        await cache.get(storage)
    async with running_cache() as cache:
        await cache.get(storage)
    with pytest.raises(EngineClosedError, match="closed meanwhile: load inside its block"):
        await cache.get(storage)


@pytest.mark.parametrize("how", ["closed", "cancelled"])
@given(seed=seeds, at_s=st.floats(0, 0.15))
@in_virtual_time
async def test_the_end_of_the_cache_answers_everybody(how: str, seed: int, at_s: float) -> None:
    """Who waits when it is closed, or its task cancelled, gets a manifest or is told."""
    storage = await stored(seed=seed)
    cache = MetadataCache(8, 1 << 20)
    task = asyncio.create_task(cache.run())
    while not cache._open:
        await asyncio.sleep(0)
    readers = [asyncio.ensure_future(cache.get(storage)) for _ in range(5)]
    await asyncio.sleep(at_s)
    if how == "closed":
        cache.close()
    else:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert how == "cancelled" or not task.cancelled()
    await asyncio.wait(readers)
    for reader in readers:
        if reader.exception() is None:
            assert reader.result().save_id == A
        else:
            assert isinstance(reader.exception(), EngineClosedError)


async def test_who_learns_where_a_checkpoint_is_after_the_end_is_told() -> None:
    """Nobody serves any more."""
    goes_on = asyncio.Event()

    class Hung(MemoryStorage):
        async def identify(self) -> str:
            await goes_on.wait()
            return await super().identify()

    async with running_cache() as cache:
        reader = asyncio.create_task(cache.get(Hung("m")))
        cache.close()
        while cache._open:
            await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(EngineClosedError):
            await asyncio.wait_for(reader, 60)


@pytest.mark.usefixtures("no_leaks", "no_tasks")
async def test_links_and_their_targets_are_one_entry(tmp_path: Path) -> None:
    """`latest -> step-3` and `step-3` share an entry; a link that moves gives the new content."""
    with ThreadPoolExecutor(2, thread_name_prefix="ckptio") as threads:

        def at(name: str) -> LocalStorage:
            return LocalStorage(str(tmp_path / name), SMALL, threads, EventLog())

        await write_files(at("step-3"), A, contents_of(A, 10))
        await write_files(at("step-4"), B, contents_of(B, 10))
        (tmp_path / "latest").symlink_to("step-3")
        async with running_cache() as cache:
            first = await cache.get(at("step-3"))
            assert await cache.get(at("latest")) is first
            assert await cache.get(at("x/../latest/.")) is first
            assert cache.statistics().num_reads == 1
            assert cache.statistics().num_entries == 1
            (tmp_path / "new").symlink_to("step-4")
            os.replace(tmp_path / "new", tmp_path / "latest")
            assert (await cache.get(at("latest"))).save_id == B
            assert (await cache.get(at("step-3"))).save_id == A
            assert cache.statistics().num_entries == 2


@pytest.mark.usefixtures("no_leaks", "no_tasks")
async def test_a_local_checkpoint_that_is_overwritten_is_never_stale(tmp_path: Path) -> None:
    """Each of many overwrites, as quick as the disk allows, is seen by the next reader."""
    with ThreadPoolExecutor(2, thread_name_prefix="ckptio") as threads:
        storage = LocalStorage(str(tmp_path / "c"), SMALL, threads, EventLog())
        async with running_cache() as cache:
            found: list[Manifest] = []
            for save_id in SAVE_IDS:
                await write_files(storage, save_id, {}, overwrite=True)
                found.append(await cache.get(storage))
            assert [manifest.save_id for manifest in found] == SAVE_IDS
