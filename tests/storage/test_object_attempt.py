"""The commit protocol: races, requests that land late, silence, and what is swept."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.config import KiB
from ckptio.errors import (
    CheckpointExistsError,
    CommitConflictError,
    ConfigError,
    StorageError,
)
from ckptio.events import CleanupFailed, LeftoversRemoved
from ckptio.format.manifest import decode_manifest
from ckptio.storage.object_place import Listing, ObjectPlace
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    StoreTraits,
    UploadInfo,
)
from ckptio.testing import EventLog, MemoryBucket, MemoryStore, hit, run_virtual
from tests.manifests import block_checksums
from tests.rig import (
    SAVE_IDS,
    SMALL,
    assert_same,
    config_with,
    contents_of,
    fill_attempt,
    inline_engine,
    manifest_of,
    object_storage,
    random_state,
    read_files,
    write_files,
)
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ckptio.testing import Operation
    from ckptio.testing.objects import FaultKind, StoreFault

pytestmark = pytest.mark.usefixtures("no_leaks")
seeds = st.integers(0, 2**32)

A, B, C = SAVE_IDS[:3]
PREFIX = "run/step-1/"
MANIFEST = f"{PREFIX}manifest.json"
ATOMIC, CREATES, PLAIN = (
    StoreTraits(conditional=conditional) for conditional in ("atomic", "create", "none")
)
FAULTS: tuple[FaultKind, ...] = (
    "before",
    "after",
    "late",
    "stalled",
    "stalled_after",
    "slow_down",
)


def winner(bucket: MemoryBucket) -> str | None:
    """Give the save whose checkpoint is there, whole."""
    found = bucket.objects.get(MANIFEST)
    if found is None:
        return None
    manifest = decode_manifest(found.data)
    for entry in manifest.files:
        data = bucket.objects[PREFIX + entry.name].data
        sums = block_checksums(memoryview(data), manifest.block_nbytes)
        assert tuple(sums) == entry.checksums()
    return manifest.save_id


def keys_of(save_id: str, *sizes: int) -> list[str]:
    """Name what a committed save leaves."""
    return sorted([MANIFEST, *(PREFIX + name for name in contents_of(save_id, *sizes))])


async def save(
    bucket: MemoryBucket,
    save_id: str,
    *sizes: int,
    traits: StoreTraits = ATOMIC,
    fault: StoreFault | None = None,
    seed: int = 0,
    overwrite: bool = False,
    log: EventLog | None = None,
) -> str:
    """Write data files and commit, as a process of its own; says how it ended."""
    store = MemoryStore(bucket, seed=seed, max_delay_s=0.05, traits=traits, fault=fault)
    storage = object_storage(store, log=log, seed=seed)
    try:
        await write_files(storage, save_id, contents_of(save_id, *sizes), overwrite=overwrite)
    except (CommitConflictError, CheckpointExistsError):
        return "lost"
    except StorageError as error:
        assert error.in_doubt == ("nobody knows" in str(error))
        return "in doubt" if error.in_doubt else "failed"
    return "won"


def now_and_then(seed: int, probability: float) -> StoreFault:
    """Give faults that hit requests at random."""
    rng = random.Random(seed)

    def fault(request: Operation) -> FaultKind | None:
        del request
        return rng.choice(FAULTS) if rng.random() < probability else None

    return fault


async def race(
    bucket: MemoryBucket,
    num: int,
    traits: StoreTraits,
    seed: int,
    *,
    overwrite: bool,
    faults: float,
) -> dict[str, str]:
    """Let writers commit to one place; says how each ended."""
    ids = [f"{number:032x}" for number in range(1, num + 1)]
    async with asyncio.TaskGroup() as group:
        tasks = {
            save_id: group.create_task(
                save(
                    bucket,
                    save_id,
                    5000,
                    traits=traits,
                    fault=now_and_then(seed + number, faults),
                    seed=seed + number,
                    overwrite=overwrite,
                )
            )
            for number, save_id in enumerate(ids)
        }
    return {save_id: task.result() for save_id, task in tasks.items()}


@pytest.mark.parametrize("num", [2, 8, 32])
@pytest.mark.parametrize("seed", range(5))
@in_virtual_time
async def test_of_any_number_of_writers_one_wins(num: int, seed: int) -> None:
    """The others are told so, and leave nothing."""
    bucket = MemoryBucket()
    ends = await race(bucket, num, ATOMIC, seed, overwrite=False, faults=0)
    assert sorted(ends.values()) == ["lost"] * (num - 1) + ["won"]
    won = winner(bucket)
    assert won is not None
    assert ends[won] == "won"
    assert bucket.keys == keys_of(won, 5000)


@pytest.mark.parametrize("num", [2, 8, 32])
@pytest.mark.parametrize("seed", range(5))
@in_virtual_time
async def test_writers_that_replace_a_checkpoint_replace_it_whole(num: int, seed: int) -> None:
    """One of those that won is there, and nothing of the others or of what they replaced."""
    bucket = MemoryBucket()
    assert await save(bucket, "f" * 32, 100, 200) == "won"
    ends = await race(bucket, num, ATOMIC, seed, overwrite=True, faults=0)
    assert set(ends.values()) <= {"won", "lost"}
    won = winner(bucket)
    assert won is not None
    assert ends[won] == "won"
    assert bucket.keys == keys_of(won, 5000)


@pytest.mark.parametrize("traits", [ATOMIC, CREATES, PLAIN], ids=["atomic", "create", "none"])
@pytest.mark.parametrize("overwrite", [False, True])
@given(seed=seeds, num=st.integers(2, 12), faults=st.sampled_from([0.0, 0.1, 0.3]))
@in_virtual_time
async def test_what_is_there_is_whole_whatever_becomes_of_requests(
    traits: StoreTraits, seed: int, num: int, faults: float, *, overwrite: bool
) -> None:
    """Also when late requests land; and no one is told to have won who has lost."""
    bucket = MemoryBucket()
    if overwrite:
        assert await save(bucket, "f" * 32, 100, 200) == "won"
    ends = await race(bucket, num, traits, seed, overwrite=overwrite, faults=faults)
    for _ in range(2):
        won = winner(bucket)
        if overwrite:
            assert won is not None
        if won in ends and faults == 0:
            assert ends[won] == "won"
        elif won in ends:
            assert ends[won] in ("won", "in doubt")
        winners = [save_id for save_id, end in ends.items() if end == "won"]
        if traits is ATOMIC or (traits is CREATES and not overwrite):
            assert overwrite or len(winners) <= 1
            assert overwrite or not winners or winners == [won]
            assert faults > 0 or winners
        await asyncio.sleep(300)
    await asyncio.sleep(7300)
    assert await save(bucket, C, 10, traits=traits, overwrite=True) == "won"
    assert bucket.keys == keys_of(C, 10)
    assert bucket.open_uploads == {}


@pytest.mark.parametrize("traits", [ATOMIC, PLAIN], ids=["atomic", "none"])
@pytest.mark.parametrize("overwrite", [False, True])
@in_virtual_time
async def test_a_commit_that_lands_after_its_writer_gave_up_finds_its_files(
    traits: StoreTraits, *, overwrite: bool
) -> None:
    """Nobody knows, says the error; and whatever comes of it is whole."""
    bucket = MemoryBucket()
    if overwrite:
        await save(bucket, B, 100)

    def late(request: Operation) -> FaultKind | None:
        is_commit = request.kind == "put" and request.path == MANIFEST
        return "late" if is_commit else None

    end = await save(bucket, A, 5000, traits=traits, fault=late, overwrite=overwrite)
    assert end == "in doubt"
    assert winner(bucket) == (B if overwrite else None)
    await asyncio.sleep(100)
    assert winner(bucket) == A
    assert await read_files(object_storage(MemoryStore(bucket))) == contents_of(A, 5000)


def late_once(name: str = MANIFEST) -> StoreFault:
    """Make the first write of an object a late one."""
    left = [1]

    def fault(request: Operation) -> FaultKind | None:
        if request.kind == "put" and request.path == name and left:
            left.clear()
            return "late"
        return None

    return fault


@pytest.mark.parametrize("traits", [ATOMIC, PLAIN], ids=["atomic", "none"])
@in_virtual_time
async def test_a_late_request_brings_back_no_manifest_without_files(traits: StoreTraits) -> None:
    """A commit that was sent twice, replaced by another: the first one does no harm."""
    bucket = MemoryBucket()
    await save(bucket, B, 100)
    assert await save(bucket, A, 5000, traits=traits, fault=late_once(), overwrite=True) == "won"
    assert await save(bucket, C, 10, traits=traits, overwrite=True) == "won"
    await asyncio.sleep(100)
    assert winner(bucket) == (C if traits is ATOMIC else A)
    if traits is ATOMIC:
        assert bucket.keys == keys_of(C, 10)


@in_virtual_time
async def test_a_commit_that_may_come_twice_leaves_its_mark() -> None:
    """For who removes the checkpoint: a manifest that comes back needs its files."""
    bucket, mark = MemoryBucket(), f"{PREFIX}.attempt-{A}"
    assert await save(bucket, A, 5000, fault=late_once()) == "won"
    assert bucket.keys == sorted([*keys_of(A, 5000), mark])
    await asyncio.sleep(7300)
    assert await save(bucket, B, 10, overwrite=True) == "won"
    assert bucket.keys == keys_of(B, 10)


@pytest.mark.parametrize("traits", [ATOMIC, CREATES], ids=["atomic", "create"])
def test_who_lost_in_doubt_leaves_its_files_to_a_sweep(traits: StoreTraits) -> None:
    """The winner may be removed before the loser's late request comes: then it is whole."""

    async def scenario(*, removes: bool, cancels: bool) -> None:
        bucket = MemoryBucket()
        store = MemoryStore(bucket, traits=traits, fault=late_once())
        attempt = await object_storage(store).begin(A, overwrite=False)
        await fill_attempt(attempt, contents_of(A, 5000))
        other = asyncio.get_running_loop().create_task(
            attempt.commit(manifest_of(A, contents_of(A, 5000)))
        )
        await asyncio.sleep(0.05)
        await write_files(object_storage(MemoryStore(bucket)), B, contents_of(B, 10))
        if cancels:
            other.cancel()
        with pytest.raises(CommitConflictError, match="nobody knows whether") as caught:
            await other
        assert caught.value.in_doubt
        assert attempt.is_published
        await attempt.abort()
        assert winner(bucket) == B
        if removes:
            del bucket.objects[MANIFEST]
        await asyncio.sleep(100)
        assert winner(bucket) == (A if removes else B)

    for removes, cancels in itertools.product((True, False), repeat=2):
        run_virtual(scenario(removes=removes, cancels=cancels), seed=0)


@in_virtual_time
async def test_who_lost_to_another_that_replaced_the_same_is_in_no_doubt() -> None:
    """What was there before never comes back: a late request finds nothing to replace."""
    bucket = MemoryBucket()
    await save(bucket, C, 10)
    store = MemoryStore(bucket, fault=late_once())
    attempt = await object_storage(store).begin(A, overwrite=True)
    await fill_attempt(attempt, contents_of(A, 5000))
    commit = asyncio.create_task(attempt.commit(manifest_of(A, contents_of(A, 5000))))
    await asyncio.sleep(0.05)
    await write_files(object_storage(MemoryStore(bucket)), B, contents_of(B, 10), overwrite=True)
    with pytest.raises(CommitConflictError) as caught:
        await commit
    assert not caught.value.in_doubt
    await attempt.abort()
    await asyncio.sleep(100)
    assert bucket.keys == keys_of(B, 10)


@in_virtual_time
async def test_who_lost_and_never_asked_for_the_name_is_in_no_doubt() -> None:
    """The other was there before the first request."""
    bucket = MemoryBucket()
    attempt = await object_storage(MemoryStore(bucket)).begin(A, overwrite=False)
    await write_files(object_storage(MemoryStore(bucket)), B, contents_of(B, 10))
    with pytest.raises(CommitConflictError) as caught:
        await attempt.commit(manifest_of(A, {}))
    assert not caught.value.in_doubt
    await attempt.abort()
    assert bucket.keys == keys_of(B, 10)


@pytest.mark.parametrize("traits", [ATOMIC, PLAIN], ids=["atomic", "none"])
@in_virtual_time
async def test_a_commit_that_cannot_be_looked_for_is_in_doubt(traits: StoreTraits) -> None:
    """The manifest cannot be read any more, and a request for it is still under way."""
    bucket = MemoryBucket()
    await save(bucket, B, 100)
    is_sent = False

    def fault(request: Operation) -> FaultKind | None:
        nonlocal is_sent
        if request.path != MANIFEST:
            return None
        if request.kind == "put":
            is_sent = True
            return "late"
        return "refused" if is_sent else None

    end = await save(bucket, A, 5000, traits=traits, fault=fault, overwrite=True)
    assert end == "in doubt"
    await asyncio.sleep(100)
    assert winner(bucket) == A


@in_virtual_time
async def test_a_commit_that_was_put_off_leaves_no_mark() -> None:
    """A store that asks for fewer requests has not begun: nothing comes back."""
    bucket, left = MemoryBucket(), [1]

    def throttle(request: Operation) -> FaultKind | None:
        if request.kind == "put" and request.path == MANIFEST and left:
            left.clear()
            return "slow_down"
        return None

    assert await save(bucket, A, 5000, fault=throttle) == "won"
    assert not left
    assert bucket.keys == keys_of(A, 5000)


@pytest.mark.parametrize("look", ["before", "corrupted"])
@pytest.mark.parametrize("answer", ["deny", "refuse"])
@in_virtual_time
async def test_a_commit_that_was_denied_and_cannot_be_looked_for_is_in_doubt(
    answer: str, look: FaultKind
) -> None:
    """The denial may be of a second request, which a proxy made of the first one."""

    class Proxy(MemoryStore):
        is_sent = False

        async def put(self, key: str, data: bytes | memoryview, **conditions: object) -> str:
            etag = await super().put(key, data, **conditions)  # type: ignore[arg-type]  # passed on
            if key == MANIFEST:
                self.is_sent = True
                raise {"deny": ConditionFailedError, "refuse": RefusedError}[answer]("no")
            return etag

    bucket = MemoryBucket()
    store = Proxy(bucket)
    attempt = await object_storage(store).begin(A, overwrite=False)
    await fill_attempt(attempt, contents_of(A, 10))
    store.fault = lambda op: look if store.is_sent and op.kind == "get" else None
    with pytest.raises(StorageError, match="nobody knows") as caught:
        await attempt.commit(manifest_of(A, contents_of(A, 10)))
    assert caught.value.in_doubt
    assert attempt.is_published
    await attempt.abort()
    assert winner(bucket) == A


@in_virtual_time
async def test_a_refused_second_try_does_not_end_the_wait_for_the_first() -> None:
    """Which comes a moment later, and is a commit."""
    bucket = MemoryBucket()
    num_sent = 0

    def fault(request: Operation) -> FaultKind | None:
        nonlocal num_sent
        if request.kind != "put" or request.path != MANIFEST:
            return None
        num_sent += 1
        return "late" if num_sent == 1 else "refused"

    store = MemoryStore(bucket, fault=fault, late_s=2.0)
    await write_files(object_storage(store), A, contents_of(A, 10))
    assert num_sent > 1
    assert bucket.keys == keys_of(A, 10)


@in_virtual_time
async def test_beside_another_checkpoint_an_unconditional_request_is_in_doubt() -> None:
    """It will replace that one, whatever the store said of the second try."""
    bucket = MemoryBucket()
    store = MemoryStore(bucket, traits=PLAIN, fault=late_once())
    attempt = await object_storage(store).begin(A, overwrite=False)
    await fill_attempt(attempt, contents_of(A, 5000))
    commit = asyncio.get_running_loop().create_task(
        attempt.commit(manifest_of(A, contents_of(A, 5000)))
    )
    await asyncio.sleep(0.05)
    other = object_storage(MemoryStore(bucket, traits=PLAIN))
    await write_files(other, B, contents_of(B, 10))
    with pytest.raises(StorageError, match="nobody knows"):
        await commit
    await attempt.abort()
    assert winner(bucket) == B
    await asyncio.sleep(100)
    assert winner(bucket) == A


@in_virtual_time
async def test_who_is_written_over_where_nobody_decides_has_lost() -> None:
    """Both had found the place free; whose manifest is there has won."""
    bucket, theirs = MemoryBucket(), contents_of(B, 10)
    for name, data in theirs.items():
        bucket.put(PREFIX + name, data)
    is_sent = False

    def fault(request: Operation) -> None:
        nonlocal is_sent
        if request.path == MANIFEST and request.kind == "get" and is_sent:
            bucket.put(MANIFEST, manifest_of(B, theirs))
        is_sent |= request.path == MANIFEST and request.kind == "put"

    assert await save(bucket, A, 5000, traits=PLAIN, fault=fault) == "lost"
    assert winner(bucket) == B
    assert bucket.keys == keys_of(B, 10)


def test_a_save_that_was_swept_is_not_acknowledged() -> None:
    """The machine was suspended for hours, just before its manifest went out."""

    async def scenario(*, overwrite: bool, is_cut_off: bool) -> None:
        bucket = MemoryBucket()
        if overwrite:
            await save(bucket, B, 10)
        attempt = await object_storage(MemoryStore(bucket)).begin(A, overwrite=overwrite)
        await fill_attempt(attempt, contents_of(A, 5000, 10))
        (*_, last) = contents_of(A, 5000, 10)
        for key in [key for key in bucket.objects if A in key]:
            if not (is_cut_off and key.endswith(last)):
                del bucket.objects[key]
        problem = "others have removed its files, as of a dead save"
        with pytest.raises(StorageError, match=problem) as raised:
            await attempt.commit(manifest_of(A, contents_of(A, 5000, 10)))
        assert raised.value.in_doubt
        await attempt.abort()
        if overwrite:
            assert {*keys_of(B, 10)} <= {*bucket.keys}  # its files stay, too
        await write_files(
            object_storage(MemoryStore(bucket)), C, contents_of(C, 10), overwrite=True
        )
        assert winner(bucket) == C

    for overwrite, is_cut_off in itertools.product((False, True), repeat=2):
        run_virtual(scenario(overwrite=overwrite, is_cut_off=is_cut_off), seed=0)


@in_virtual_time
async def test_a_save_that_was_silent_and_swept_is_not_acknowledged() -> None:
    """Its mark went with its files: nothing tells how long it was silent, so it gives up."""
    bucket = MemoryBucket()
    attempt = await object_storage(MemoryStore(bucket)).begin(A, overwrite=True)
    await fill_attempt(attempt, contents_of(A, 5000))
    await asyncio.sleep(8000)
    assert await save(bucket, B, 10, overwrite=True) == "won"
    assert bucket.keys == keys_of(B, 10)
    with pytest.raises(StorageError, match="others may have removed its files; save again"):
        await attempt.commit(manifest_of(A, contents_of(A, 5000)))
    await attempt.abort()
    assert winner(bucket) == B
    assert bucket.keys == keys_of(B, 10)


@in_virtual_time
async def test_a_copy_that_two_processes_commit_is_acknowledged_to_both() -> None:
    """Who is first takes the mark along; the files are there, so nobody has swept."""
    bucket, contents = MemoryBucket(), contents_of(A, 100, 5000)
    attempts = [
        await object_storage(MemoryStore(bucket)).begin(A, overwrite=True) for _ in range(2)
    ]
    for attempt in attempts:
        await fill_attempt(attempt, contents)
    for attempt in attempts:
        await attempt.commit(manifest_of(A, contents))
        assert winner(bucket) == A
        assert bucket.keys == keys_of(A, 100, 5000)


@in_virtual_time
async def test_a_damaged_read_back_settles_nothing() -> None:
    """What is read wrong once is read again before anything is removed."""
    bucket = MemoryBucket()
    for save_id, times in ((A, 1), (C, 3)):
        fault = hit(1, "corrupted", operation="get", times=times)
        assert await save(bucket, save_id, 10, fault=fault, overwrite=True) == "won"
        assert winner(bucket) == save_id
    fault = hit(1, "corrupted", operation="get", times=100)
    assert await save(bucket, B, 10, fault=fault, overwrite=True) == "in doubt"
    assert winner(bucket) == B


@in_virtual_time
async def test_a_commit_that_is_not_seen_at_once_is_sent_once() -> None:
    """The store has said that it is written; and what it replaces goes all the same."""
    bucket = MemoryBucket()
    assert await save(bucket, A, 10) == "won"
    sent: list[str] = []
    missed: list[str] = []

    def fault(request: Operation) -> None:
        if request.path != MANIFEST:
            return
        if request.kind == "put":
            sent.append(request.path)
        elif sent and not missed:
            missed.append(request.path)
            raise ObjectMissingError(MANIFEST)

    assert await save(bucket, B, 10, fault=fault, overwrite=True) == "won"
    assert len(missed) == len(sent) == 1
    assert bucket.keys == keys_of(B, 10)


@in_virtual_time
async def test_a_commit_that_is_refused_is_not_sent_again() -> None:
    """The store has said no; the files go with the attempt."""
    store = MemoryStore()
    store.fault = lambda op: "refused" if (op.kind, op.path) == ("put", MANIFEST) else None
    storage = object_storage(store)
    with pytest.raises(StorageError, match="cannot commit: access denied") as caught:
        await write_files(storage, A, contents_of(A, 10))
    assert not caught.value.in_doubt
    assert [op.path for op in store.operations if op.kind == "put"].count(MANIFEST) == 1
    assert store.bucket.keys == []


class Forgets(MemoryStore):
    """Says that a manifest is written, and does not write it."""

    async def put(self, key: str, data: bytes | memoryview, **conditions: object) -> str:
        if key == MANIFEST:
            return "written"
        return await super().put(key, data, **conditions)  # type: ignore[arg-type]  # passed on


@pytest.mark.parametrize("overwrite", [False, True])
@in_virtual_time
async def test_a_commit_that_was_said_to_be_done_and_is_not_seen_is_in_doubt(
    *, overwrite: bool
) -> None:
    """It may be there for others: its files stay, and those of what it replaces."""
    bucket = MemoryBucket()
    if overwrite:
        assert await save(bucket, B, 10) == "won"
    attempt = await object_storage(Forgets(bucket)).begin(A, overwrite=overwrite)
    await fill_attempt(attempt, contents_of(A, 10))
    with pytest.raises(StorageError, match="nobody knows") as caught:
        await attempt.commit(manifest_of(A, contents_of(A, 10)))
    assert caught.value.in_doubt
    await attempt.abort()
    assert {PREFIX + name for name in contents_of(A, 10)} < {*bucket.keys}
    assert winner(bucket) == (B if overwrite else None)


@in_virtual_time
async def test_files_that_the_replaced_manifest_names_too_stay() -> None:
    """Whoever wrote that one: what has another save's id is not its to lose."""
    bucket = MemoryBucket()
    new = contents_of(B, 10)
    bucket.put(MANIFEST, manifest_of(A, contents_of(A, 10) | new))
    assert await save(bucket, B, 10, overwrite=True) == "won"
    assert winner(bucket) == B


@in_virtual_time
async def test_a_mark_that_could_not_be_written_is_written_the_next_time() -> None:
    """Else a save would be silent for longer than it knows."""
    store = MemoryStore()
    attempt = await object_storage(store).begin(A, overwrite=False)
    await asyncio.sleep(400)
    store.fault = lambda op: "refused" if op.kind == "put" else None
    with pytest.raises(StorageError):
        await attempt.stay()
    store.fault = None
    before = store.counts["put"]
    for _ in range(2):
        await attempt.stay()
    assert store.counts["put"] == before + 1
    await attempt.abort()


@in_virtual_time
async def test_files_of_more_parts_than_a_store_takes_are_refused_before_they_are_sent() -> None:
    """With the option that would help; a file of one request has no parts."""
    slab = SMALL.slab_nbytes
    for traits, fits, too_large in (
        (StoreTraits(min_part_nbytes=slab + 1), slab, slab + 1),
        (StoreTraits(max_parts=2), 2 * slab, 2 * slab + 1),
    ):
        store = MemoryStore(traits=traits)
        attempt = await object_storage(store).begin(A, overwrite=False)
        await attempt.create("fits", fits)
        with pytest.raises(ConfigError, match="raise slab_nbytes"):
            await attempt.create("too large", too_large)
        await attempt.abort()


def test_a_note_or_a_mark_that_is_on_its_way_is_waited_for() -> None:
    """Who cancels it cleans up behind it: it must not come later."""

    async def scenario(what: str) -> None:
        bucket = MemoryBucket()
        store = MemoryStore(bucket, max_delay_s=1)
        storage = object_storage(store)
        attempt = await storage.begin(A, overwrite=False)
        await asyncio.sleep(400)
        before, since_s = len(store.operations), bucket.now_s()
        work = attempt.note(b"there") if what == "note" else attempt.stay()
        task = asyncio.get_running_loop().create_task(work)
        while len(store.operations) == before:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        name = f".copy-{A}" if what == "note" else f".attempt-{A}"
        assert bucket.find(PREFIX + name).modified_s >= since_s
        await attempt.abort()
        assert bucket.keys == []

    for what in ("note", "mark"):
        run_virtual(scenario(what), seed=0)


@in_virtual_time
async def test_a_refused_commit_that_was_carried_out_is_a_commit() -> None:
    """Whatever the store said: what is there decides, and keeps its files."""

    class Liar(MemoryStore):
        async def put(self, key: str, data: bytes | memoryview, **conditions: object) -> str:
            etag = await super().put(key, data, **conditions)  # type: ignore[arg-type]  # passed on
            if key == MANIFEST:
                await self.request("put", "never", lambda: None)
            return etag

    def fault(request: Operation) -> FaultKind | None:
        return "refused" if request.path == "never" else None

    bucket = MemoryBucket()
    await write_files(object_storage(Liar(bucket, fault=fault)), A, contents_of(A, 10))
    assert bucket.keys == keys_of(A, 10)


@in_virtual_time
async def test_a_checkpoint_that_is_removed_meanwhile_is_replaced_all_the_same() -> None:
    """With `overwrite`, that what was there is gone is no conflict."""
    bucket = MemoryBucket()
    await save(bucket, A, 10)

    def fault(request: Operation) -> None:
        if request.kind == "put" and request.path == MANIFEST:
            bucket.objects.pop(MANIFEST, None)

    assert await save(bucket, B, 10, fault=fault, overwrite=True) == "won"
    assert winner(bucket) == B


@in_virtual_time
async def test_cancelling_a_commit_in_doubt_does_not_hide_the_doubt() -> None:
    """Neither a success nor an end that changed nothing: the error says that nobody knows."""
    bucket = MemoryBucket()
    store = MemoryStore(bucket, max_delay_s=0.05)
    attempt = await object_storage(store).begin(A, overwrite=False)
    await fill_attempt(attempt, contents_of(A, 10))
    store.fault = lambda op: "stalled" if op.kind == "put" else None
    task = asyncio.get_running_loop().create_task(
        attempt.commit(manifest_of(A, contents_of(A, 10)))
    )
    await asyncio.sleep(30)
    task.cancel()
    with pytest.raises(StorageError, match="nobody knows"):
        await task
    assert attempt.is_published
    before = bucket.keys
    await attempt.abort()
    assert bucket.keys == before


def test_cancelling_a_commit_that_came_first_changes_nothing() -> None:
    """A commit that cannot be taken back is a commit."""

    async def scenario(when_s: float) -> bool:
        bucket = MemoryBucket()
        store = MemoryStore(bucket, max_delay_s=0.05)
        attempt = await object_storage(store).begin(A, overwrite=False)
        await fill_attempt(attempt, contents_of(A, 10))
        task = asyncio.get_running_loop().create_task(
            attempt.commit(manifest_of(A, contents_of(A, 10)))
        )
        await asyncio.sleep(when_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if task.cancelled():
            await attempt.abort()
            assert bucket.keys == []
        else:
            assert bucket.keys == keys_of(A, 10)
            assert task.cancelling() == 0  # whoever goes on in this task was not cancelled
        return task.cancelled()

    ends = {run_virtual(scenario(step / 100), seed=step) for step in range(30)}
    assert False in ends


def test_a_begin_that_fails_leaves_no_mark() -> None:
    """Whatever request of it fails, and however it is cancelled."""

    async def scenario(number: int, kind: FaultKind) -> None:
        bucket = MemoryBucket()
        store = MemoryStore(bucket, fault=hit(number, kind))
        task = asyncio.get_running_loop().create_task(
            object_storage(store).begin(A, overwrite=False)
        )
        if kind == "stalled":
            await asyncio.sleep(5)
            task.cancel()
        with contextlib.suppress(StorageError, asyncio.CancelledError):
            await (await task).abort()
        assert bucket.keys == []

    for number in range(5):
        for kind in ("refused", "stalled"):
            run_virtual(scenario(number, kind), seed=number)


def test_a_save_that_was_silent_for_long_gives_up() -> None:
    """Others may have swept its files: a manifest would name what is not there."""

    async def scenario(sleep_s: float, *, at_commit: bool) -> None:
        bucket = MemoryBucket()
        attempt = await object_storage(MemoryStore(bucket)).begin(A, overwrite=False)
        if at_commit:
            await fill_attempt(attempt, contents_of(A, 10))
        await asyncio.sleep(sleep_s)
        if not at_commit:
            await fill_attempt(attempt, contents_of(A, 10))
        await attempt.commit(manifest_of(A, contents_of(A, 10)))
        assert winner(bucket) == A

    for at_commit in (True, False):
        run_virtual(scenario(1700, at_commit=at_commit), seed=0)
        with pytest.raises(StorageError, match="silent for 1900 s"):
            run_virtual(scenario(1900, at_commit=at_commit), seed=0)


@in_virtual_time
async def test_another_rank_speaks_for_all() -> None:
    """The rank that commits may have been silent, as long as one that writes was not."""
    bucket = MemoryBucket()
    leader = await object_storage(MemoryStore(bucket)).begin(A, overwrite=True)
    member = await object_storage(MemoryStore(bucket)).join(A)
    for number in range(8):
        name = next(iter(contents_of(A, 10))).replace("-00000-", f"-{number + 1:05d}-")
        await fill_attempt(member, {name: b"x" * 10})
        await asyncio.sleep(900)
        await save(bucket, B, 10, overwrite=True)
    await leader.commit(manifest_of(A, {}))
    assert sum(f"data-{A}" in key for key in bucket.keys) == 8


@in_virtual_time
async def test_a_save_that_waits_for_its_turn_stays_alive() -> None:
    """The files of a save that is behind one of hours are nobody's leftovers."""
    config = config_with(pool_nbytes=64 * 64 * KiB, request_timeout_s=1000.0, max_saves=2)
    slow, quick = random_state([64 * KiB * 60]), random_state([5000], 1)

    class SlowParts(MemoryStore):
        @contextlib.asynccontextmanager
        async def running(
            self, kind: str, key: str, nbytes: int = 0
        ) -> AsyncIterator[FaultKind | None]:
            async with super().running(kind, key, nbytes) as fault:
                if kind == "write":
                    await asyncio.sleep(200)
                yield fault

    bucket = MemoryBucket()
    storage = object_storage(
        SlowParts(bucket, traits=StoreTraits(conditional="atomic", in_order=True)),
        config=config,
    )
    log = EventLog()
    async with inline_engine({"c": storage}, config) as engine:
        first = engine.save(slow, "c", overwrite=True)
        second = engine.save(quick, "c", overwrite=True)
        while not first.done():
            await asyncio.sleep(700)
            if not first.done():
                attempt = await object_storage(MemoryStore(bucket), log=log).begin(
                    B, overwrite=True
                )
                await attempt.abort()
        await first
        await second
        assert_same(await engine.load("c"), quick)
    assert asyncio.get_running_loop().time() > 7200
    assert log.of(LeftoversRemoved) == []


@pytest.mark.parametrize("damaged", [b"", b"{}", b"\0" * 100])
@in_virtual_time
async def test_next_to_a_manifest_that_cannot_be_read_everything_stays(damaged: bytes) -> None:
    """It may be of a newer version: whatever it needs is not removed."""
    bucket = MemoryBucket()
    bucket.put(MANIFEST, damaged)
    leftover = f"{PREFIX}data-{A}-00000-00000.safetensors"
    bucket.put(leftover, b"x")
    await asyncio.sleep(7300)
    attempt = await object_storage(MemoryStore(bucket)).begin(B, overwrite=True)
    await attempt.abort()
    assert bucket.keys == sorted([MANIFEST, leftover])
    bucket.objects.pop(MANIFEST)
    attempt = await object_storage(MemoryStore(bucket)).begin(B, overwrite=True)
    assert leftover not in bucket.keys
    await attempt.abort()


def test_a_save_that_cannot_sweep_goes_on() -> None:
    """A listing, a look or a removal that is refused is an event."""

    async def scenario(operation: str) -> None:
        bucket, log = MemoryBucket(), EventLog()
        bucket.put(f"{PREFIX}data-{A}-00000-00000.safetensors", b"x")
        await asyncio.sleep(7300)
        fault = hit(0, "refused", operation=operation)
        assert await save(bucket, B, 10, fault=fault, overwrite=True, log=log) == "won"
        assert log.of(CleanupFailed) != []
        assert winner(bucket) == B

    for operation in ("list", "uploads", "get", "delete"):
        run_virtual(scenario(operation), seed=0)


def info(name: str, modified_s: float) -> ObjectInfo:
    return ObjectInfo(key=PREFIX + name, nbytes=1, modified_s=modified_s)


def dead(listing: Listing) -> set[str]:
    return listing.dead_saves(listing.time_of(B))


def test_the_store_says_what_time_it_is() -> None:
    """By its own mark a save knows; without one, or without times, nothing is dead."""
    data, mark = f"data-{A}-00000-00000.safetensors", f".attempt-{B}"
    old, dateless = info(data, 1000.0), info(data, 0.0)
    assert dead(Listing((old, info(mark, 4601.0)))) == {A}
    assert dead(Listing((old, info(mark, 4599.0)))) == set()
    assert dead(Listing((old, info(mark, 0.0)))) == set()
    assert dead(Listing((old,))) == set()
    assert dead(Listing((dateless, info(mark, 9999.0)))) == set()
    assert dead(Listing((old, info(f".attempt-{A}", 4000.0), info(mark, 4700.0)))) == set()
    upload = UploadInfo(key=PREFIX + data, upload_id="1", active_s=2000.0)
    assert dead(Listing((old, info(mark, 5000.0)), (upload,))) == set()
    assert dead(Listing((old, info(mark, 5601.0)), (upload,))) == {A}


@in_virtual_time
async def test_how_long_a_save_was_silent_does_not_depend_on_when_it_began() -> None:
    """Nor what it costs to say that it lives: one request, and none within a few minutes."""
    await asyncio.sleep(10_000)
    store = MemoryStore()
    attempt = await object_storage(store).begin(A, overwrite=False)
    for silent_s, num_requests in ((10, 0), (300, 1), (1700, 1)):
        before = len(store.operations)
        await asyncio.sleep(silent_s)
        await attempt.stay()
        assert len(store.operations) - before == num_requests
    await asyncio.sleep(1900)
    with pytest.raises(StorageError, match="silent for 1900 s"):
        await attempt.stay()


@in_virtual_time
async def test_who_spoke_for_a_save_half_an_hour_ago_counts() -> None:
    """By the store's clock; nobody sweeps what was heard of within the hour."""
    bucket = MemoryBucket()
    leader = await object_storage(MemoryStore(bucket)).begin(A, overwrite=False)
    member = await object_storage(MemoryStore(bucket)).join(A)
    await asyncio.sleep(400)
    await member.stay()
    await asyncio.sleep(1700)
    await leader.stay()


@pytest.mark.parametrize("kind", ["put", "delete"])
@in_virtual_time
async def test_a_commit_that_is_cancelled_tidies_up_in_a_hurry(kind: str) -> None:
    """Whoever cancels it waits ten seconds for a store that is away, not minutes."""
    bucket = MemoryBucket()
    await save(bucket, B, 10)
    store = MemoryStore(bucket)
    config = config_with(request_timeout_s=100.0)
    attempt = await object_storage(store, config=config).begin(A, overwrite=True)
    await fill_attempt(attempt, contents_of(A, 10))
    loop = asyncio.get_running_loop()
    task = loop.create_task(attempt.commit(manifest_of(A, contents_of(A, 10))))

    def fault(request: Operation) -> FaultKind | None:
        if request.kind == kind:
            loop.call_soon(task.cancel)
        return "stalled" if request.kind == "delete" else None

    store.fault = fault
    since_s = loop.time()
    await task
    assert loop.time() - since_s <= 11
    assert winner(bucket) == A


@in_virtual_time
async def test_who_is_cancelled_as_he_loses_has_changed_nothing() -> None:
    """He ends as cancelled: there is no doubt to tell of."""
    bucket = MemoryBucket()
    store = MemoryStore(bucket)
    attempt = await object_storage(store).begin(A, overwrite=False)
    await fill_attempt(attempt, contents_of(A, 10))
    loop = asyncio.get_running_loop()
    task = loop.create_task(attempt.commit(manifest_of(A, contents_of(A, 10))))

    def fault(request: Operation) -> None:
        if request.kind == "put" and request.path == MANIFEST:
            bucket.put(MANIFEST, manifest_of(B, {}))
            loop.call_soon(task.cancel)

    store.fault = fault
    with pytest.raises(asyncio.CancelledError):
        await task
    await attempt.abort()
    assert winner(bucket) == B
    assert bucket.keys == [MANIFEST]


@in_virtual_time
async def test_files_of_a_replaced_save_that_may_come_back_stay() -> None:
    """Its mark would say so, and cannot be looked at."""
    bucket, log = MemoryBucket(), EventLog()
    await save(bucket, B, 10)
    mark = f"{PREFIX}.attempt-{B}"
    fault: StoreFault = lambda op: "refused" if op.path == mark else None  # noqa: E731  # short
    assert await save(bucket, A, 10, traits=CREATES, overwrite=True, fault=fault, log=log) == "won"
    assert bucket.keys == sorted({*keys_of(A, 10), *keys_of(B, 10)})
    assert [event.file for event in log.of(CleanupFailed)] == [f".attempt-{B}"]


@in_virtual_time
async def test_a_refused_commit_over_a_damaged_manifest_is_in_no_doubt() -> None:
    """What cannot be read there was there before, and is none of this save's."""
    bucket = MemoryBucket()
    bucket.put(MANIFEST, b"damaged")
    fault: StoreFault = lambda op: (  # noqa: E731  # short
        "refused" if op.kind == "put" and op.path == MANIFEST else None
    )
    assert await save(bucket, A, 10, overwrite=True, fault=fault) == "failed"


@pytest.mark.parametrize(("times", "num_reads"), [(0, 1), (1, 2)])
@in_virtual_time
async def test_a_manifest_that_was_damaged_on_its_way_is_read_once_more(
    times: int, num_reads: int
) -> None:
    """And one that was not is read once."""
    bucket = MemoryBucket()
    await save(bucket, A, 10)
    fault = hit(0, "corrupted", operation="get", times=times)
    store = MemoryStore(bucket, fault=fault)
    _, requests, prefix = await object_storage(store).reach()
    present = await ObjectPlace("c", prefix, store, requests, EventLog()).present()
    assert present is not None
    assert present.save_id == A
    assert store.counts["get"] == num_reads


@in_virtual_time
async def test_a_manifest_that_cannot_be_read_and_goes_is_none() -> None:
    """It was removed before it was looked at once more."""
    bucket = MemoryBucket()
    bucket.put(MANIFEST, b"damaged")

    def fault(request: Operation) -> None:
        if request.kind == "head":
            del bucket.objects[MANIFEST]

    store = MemoryStore(bucket, fault=fault)
    _, requests, prefix = await object_storage(store).reach()
    assert await ObjectPlace("c", prefix, store, requests, EventLog()).present() is None


@in_virtual_time
async def test_what_stands_for_an_empty_directory_is_no_object() -> None:
    """Some stores list a key that is the prefix itself, where all below it was removed."""
    bucket = MemoryBucket()
    store = MemoryStore(bucket)
    _, requests, prefix = await object_storage(store).reach()
    place = ObjectPlace("c", prefix, store, requests, EventLog())
    bucket.put(f"{prefix}/", b"")
    assert (await place.list()).objects == ()
    bucket.put(f"{prefix}/a", b"")
    assert [info.key for info in (await place.list()).objects] == [f"{prefix}/a"]
