"""What an attempt removes when it ends without a commit, and what it must not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import TYPE_CHECKING

import pytest

from ckptio.config import CheckpointConfig, KiB
from ckptio.errors import StorageError
from ckptio.events import CleanupFailed
from ckptio.storage.store import StoreTraits
from ckptio.storage.streams import AwaitedSink
from ckptio.testing import EventLog, MemoryBucket, MemoryStore, hit, run_virtual
from tests.rig import (
    SAVE_IDS,
    SMALL,
    config_with,
    contents_of,
    fill_attempt,
    manifest_of,
    object_storage,
    write_files,
)
from tests.storage.test_object_attempt import MANIFEST, keys_of, winner
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio.testing import Operation
    from ckptio.testing.objects import FaultKind

pytestmark = pytest.mark.usefixtures("no_leaks")

A, B = SAVE_IDS[:2]


@pytest.mark.parametrize("kind", ["refused", "stalled"])
def test_taking_up_a_save_that_was_committed_removes_nothing_of_it(kind: str) -> None:
    """Whatever request fails, or is cancelled: what the manifest names stays."""

    async def scenario(number: int) -> None:
        bucket = MemoryBucket()
        await write_files(object_storage(MemoryStore(bucket)), A, contents_of(A, 100, 5000))
        store = MemoryStore(bucket, fault=hit(number, kind))  # type: ignore[arg-type]  # one of its kinds
        task = asyncio.get_running_loop().create_task(
            object_storage(store).begin(A, overwrite=True, resumes=True)
        )
        if kind == "stalled":
            await asyncio.sleep(5)
            task.cancel()
        with contextlib.suppress(StorageError, asyncio.CancelledError):
            await (await task).abort()
        assert winner(bucket) == A

    for number in range(12):
        run_virtual(scenario(number), seed=number)


@pytest.mark.parametrize("kind", ["refused", "stalled"])
def test_what_was_there_stays_where_taking_it_up_is_stopped(kind: FaultKind) -> None:
    """Whatever request of the beginning fails, or is cancelled: the next one goes on with it."""

    async def scenario(number: int) -> None:
        bucket, contents = MemoryBucket(), contents_of(A, 100, 5000)
        cut_off = await object_storage(MemoryStore(bucket)).begin(A, overwrite=True)
        await fill_attempt(cut_off, contents)
        await cut_off.leave()
        left = bucket.keys
        store = MemoryStore(bucket, fault=hit(number, kind))
        task = asyncio.get_running_loop().create_task(
            object_storage(store).begin(A, overwrite=True, resumes=True)
        )
        if kind == "stalled":
            await asyncio.sleep(5)
            task.cancel()
        with contextlib.suppress(StorageError, asyncio.CancelledError):
            await (await task).leave()
        assert bucket.keys == left

    for number in range(6):
        run_virtual(scenario(number), seed=number)


@pytest.mark.parametrize("leads", [True, False])
@in_virtual_time
async def test_a_save_that_another_process_committed_is_not_aborted(*, leads: bool) -> None:
    """Two copy one checkpoint: who gives up leaves what the other has published."""
    bucket, contents = MemoryBucket(), contents_of(A, 100, 5000)
    mine = object_storage(MemoryStore(bucket))
    attempt = await (mine.begin(A, overwrite=False) if leads else mine.join(A))
    await fill_attempt(attempt, contents)
    other = await object_storage(MemoryStore(bucket)).begin(A, overwrite=False, resumes=True)
    await fill_attempt(other, contents)
    await other.commit(manifest_of(A, contents))
    await attempt.abort()
    assert winner(bucket) == A
    assert bucket.keys == keys_of(A, 100, 5000)


@in_virtual_time
async def test_an_abort_drops_the_uploads_of_ranks_that_died() -> None:
    """And is not cut short by who cancels it."""
    bucket = MemoryBucket()
    leader = await object_storage(MemoryStore(bucket, max_delay_s=1)).begin(A, overwrite=False)
    member = await object_storage(MemoryStore(bucket)).join(A)
    nbytes = 2 * SMALL.slab_nbytes
    sink = await member.create(f"data-{A}-00001-00000.safetensors", nbytes)
    assert isinstance(sink, AwaitedSink)
    await sink.write(0, memoryview(bytes(SMALL.slab_nbytes)))
    assert bucket.open_uploads
    task = asyncio.get_running_loop().create_task(leader.abort())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bucket.keys == []
    assert not bucket.open_uploads


@in_virtual_time
async def test_a_rank_that_gives_up_leaves_the_mark_of_the_save() -> None:
    """It is that of the rank that leads, which clears up itself."""
    bucket = MemoryBucket()
    leader = await object_storage(MemoryStore(bucket)).begin(A, overwrite=False)
    marked = bucket.keys
    member = await object_storage(MemoryStore(bucket)).join(A)
    await fill_attempt(member, contents_of(A, 10))
    await member.abort()
    assert bucket.keys == marked
    await leader.abort()
    assert bucket.keys == []


@in_virtual_time
async def test_an_abort_removes_what_it_made_beside_another_checkpoint() -> None:
    """The checkpoint of another save is no reason to leave anything."""
    bucket = MemoryBucket()
    await write_files(object_storage(MemoryStore(bucket)), B, contents_of(B, 10))
    attempt = await object_storage(MemoryStore(bucket)).begin(A, overwrite=True)
    await fill_attempt(attempt, contents_of(A, 100))
    await attempt.abort()
    assert bucket.keys == keys_of(B, 10)


@in_virtual_time
async def test_an_abort_beside_a_manifest_that_cannot_be_read_removes_no_file() -> None:
    """It may be of a newer version, and name them; a later sweep decides."""
    bucket, log = MemoryBucket(), EventLog()
    storage = object_storage(MemoryStore(bucket), log=log)
    attempt = await storage.begin(A, overwrite=True)
    await fill_attempt(attempt, contents_of(A, 100, 5000))
    bucket.put(MANIFEST, b"of a newer version")
    await attempt.abort()
    assert bucket.keys == keys_of(A, 100, 5000)
    (event,) = log.of(CleanupFailed)
    assert (event.file, event.error.errno) == ("manifest.json", errno.EIO)


def test_an_abort_costs_a_few_requests_for_each_file() -> None:
    """Uploads are dropped by name, at once; only what lost its name is looked for."""

    async def scenario(num: int) -> int:
        bucket = MemoryBucket()
        store = MemoryStore(bucket)
        attempt = await object_storage(store).begin(A, overwrite=False)
        for number in range(num):
            sink = await attempt.create(f"data-{A}-00000-{number:05d}.safetensors", 200 * KiB)
            assert isinstance(sink, AwaitedSink)
            await sink.write(0, memoryview(bytes(SMALL.slab_nbytes)))
        before = store.counts["uploads"]
        await attempt.abort()
        assert bucket.open_uploads == {}
        assert bucket.keys == []
        return store.counts["uploads"] - before

    assert run_virtual(scenario(2), seed=0) == run_virtual(scenario(40), seed=0) == 1


@pytest.mark.parametrize("faults", [("before", "before"), ("stalled",), ("refused",)])
@pytest.mark.parametrize("ends", ["made", "given up"])
@in_virtual_time
async def test_uploads_whose_names_nobody_got_go_with_the_one_that_has_one(
    faults: tuple[FaultKind, ...], ends: str
) -> None:
    """Where a client begins them itself until it hears of one; or it is said that they stay."""
    log, left = EventLog(), list(faults)

    def fault(operation: Operation) -> FaultKind | None:
        return left.pop(0) if operation.kind == "uploads" and left else None

    store = client_that_begins_again(fault)
    bucket, storage = store.bucket, object_storage(store, log=log)
    await storage.begin(A, overwrite=False)
    attempt = await storage.join(A)  # who leads an abort looks for all uploads of the save
    name = f"data-{A}-00000-00000.safetensors"
    contents = bytes(200 * KiB)
    sink = await attempt.create(name, len(contents))
    assert isinstance(sink, AwaitedSink)
    left[:] = faults  # who led the save has swept
    bucket.begin(f"run/step-1/{name}")
    other = bucket.begin(f"run/step-1/{name}.other")
    for start in range(0, len(contents), SMALL.slab_nbytes):
        await sink.write(start, memoryview(contents)[start : start + SMALL.slab_nbytes])
    if ends == "made":
        await sink.close()
        assert bucket.keys[-1].endswith(name)
    else:
        await attempt.abort()
    bucket.open_uploads.pop(other)  # of another object
    is_told = bool(log.of(CleanupFailed))
    assert is_told == (faults == ("refused",))
    assert is_told or not bucket.open_uploads


def client_that_begins_again(
    fault: Callable[[Operation], FaultKind | None] | None = None,
) -> MemoryStore:
    """A store whose client may begin an upload under names that nobody hears of."""
    traits = StoreTraits(conditional="atomic", begins_again=True)
    return MemoryStore(MemoryBucket(), traits=traits, fault=fault)


@in_virtual_time
async def test_who_leaves_a_copy_drops_no_upload_of_another_who_makes_it() -> None:
    """Nor does it remove anything else: one of the two goes on with it."""
    store = client_that_begins_again()
    attempt = await object_storage(store).begin(A, overwrite=False)
    sink = await attempt.create(f"data-{A}-00000-00000.safetensors", 200 * KiB)
    assert isinstance(sink, AwaitedSink)
    await sink.write(0, memoryview(bytes(SMALL.slab_nbytes)))
    other = store.bucket.begin(sink.key)
    await attempt.leave()
    assert list(store.bucket.open_uploads) == [other]


@pytest.mark.parametrize("kind", ["stalled", "before", "refused"])
@in_virtual_time
async def test_a_file_that_is_made_does_not_wait_for_uploads_that_nobody_needs(
    kind: FaultKind,
) -> None:
    """Where they cannot be listed, one event says so, of the place and not of a file."""
    config = config_with(request_timeout_s=60.0, retry_timeout_s=600.0, max_retries=8)

    log, begun = EventLog(), list[bool]()

    store = client_that_begins_again(
        lambda operation: kind if begun and operation.kind == "uploads" else None
    )
    attempt = await object_storage(store, config=config, log=log).begin(A, overwrite=False)
    begun.append(True)
    contents = contents_of(A, *[200 * KiB] * 10)
    before_s = asyncio.get_running_loop().time()
    await fill_attempt(attempt, contents)
    assert asyncio.get_running_loop().time() - before_s < 25  # for all ten
    await attempt.commit(manifest_of(A, contents))
    assert [event.file for event in log.of(CleanupFailed)] == [""]


async def abort_s(config: CheckpointConfig, num_files: int) -> float:
    """Say how long an abort takes beside a store that answers nothing any more."""
    bucket, is_away = MemoryBucket(), False
    store = MemoryStore(bucket, fault=lambda _: "stalled" if is_away else None)
    attempt = await object_storage(store, config=config).begin(A, overwrite=False)
    for number in range(num_files):
        sink = await attempt.create(f"data-{A}-00000-{number:05d}.safetensors", 200 * KiB)
        assert isinstance(sink, AwaitedSink)
        await sink.write(0, memoryview(bytes(SMALL.slab_nbytes)))
    is_away = True
    before_s = asyncio.get_running_loop().time()
    await attempt.abort()
    return asyncio.get_running_loop().time() - before_s


@pytest.mark.parametrize("num_files", [1, 40])
def test_an_abort_does_not_wait_for_a_store_that_is_away(num_files: int) -> None:
    """Whoever gave up waits for it, however many files there are; a sweep removes the rest."""
    config = config_with(
        request_timeout_s=60.0, retry_timeout_s=600.0, max_retries=8, max_requests=64
    )
    assert run_virtual(abort_s(config, num_files), seed=0) < 11


@pytest.mark.parametrize("kind", ["put", "get", "write", "complete"])
@pytest.mark.parametrize("returns", [False, True])
@in_virtual_time
async def test_a_commit_that_has_sent_no_manifest_yet_is_aborted_soon(
    kind: str, monkeypatch: pytest.MonkeyPatch, *, returns: bool
) -> None:
    """Beside a store that is away; of what it had written apart, nothing stays that can be removed.

    Where it marks itself as alive, looks what is there, and writes a large manifest.
    """
    monkeypatch.setattr("ckptio.storage.object_attempt.MAX_COMMIT_NBYTES", 100)
    config = config_with(request_timeout_s=60.0, retry_timeout_s=600.0, max_retries=8)

    bucket, is_away, clock = MemoryBucket(), asyncio.Event(), asyncio.get_running_loop().time

    def fault(operation: Operation) -> FaultKind | None:
        if begun and operation.kind == kind:
            is_away.set()
        return "stalled" if is_away.is_set() else None

    begun = False
    store = MemoryStore(bucket, fault=fault)
    attempt = await object_storage(store, config=config).begin(A, overwrite=False)
    await fill_attempt(attempt, contents_of(A, 1))
    manifest = manifest_of(A, contents_of(A, *[1] * 2000))
    await asyncio.sleep(301)  # so that it is time to say that it is alive
    begun = True
    commit = asyncio.get_running_loop().create_task(attempt.commit(manifest))
    await is_away.wait()
    if returns:
        store.fault = None
    before_s = clock()
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert not attempt.is_published
    await attempt.abort()
    assert clock() - before_s < 75
    assert MANIFEST not in bucket.keys
    assert not returns or not (bucket.keys or bucket.open_uploads)


@pytest.mark.parametrize("kind", ["after", "stalled_after"])
def test_an_upload_whose_name_never_came_is_dropped(kind: str) -> None:
    """Another one was begun in its place: both are gone, or one is the object."""

    async def scenario(*, ends: bool) -> None:
        bucket = MemoryBucket()
        store = MemoryStore(bucket, fault=hit(0, kind, operation="upload"))  # type: ignore[arg-type]  # as above
        attempt = await object_storage(store).begin(A, overwrite=False)
        contents = contents_of(A, 200 * KiB)
        await fill_attempt(attempt, contents)
        if ends:
            await attempt.commit(manifest_of(A, contents))
            assert winner(bucket) == A
        else:
            await attempt.abort()
            assert bucket.keys == []
        assert bucket.open_uploads == {}

    for ends in (True, False):
        run_virtual(scenario(ends=ends), seed=0)


@in_virtual_time
async def test_who_goes_on_with_a_save_drops_the_uploads_that_it_left() -> None:
    """It was killed, and nobody else would: it lives again. Those of others stay."""
    bucket = MemoryBucket()
    for save_id in (A, B):
        dead = await object_storage(MemoryStore(bucket)).begin(save_id, overwrite=True)
        sink = await dead.create(f"data-{save_id}-00000-00000.safetensors", 200 * KiB)
        assert isinstance(sink, AwaitedSink)
        await sink.write(0, memoryview(bytes(SMALL.slab_nbytes)))
    assert len(bucket.open_uploads) == 2
    await object_storage(MemoryStore(bucket)).begin(A, overwrite=True, resumes=True)
    assert [B in upload.key for upload in bucket.open_uploads.values()] == [True]


@in_virtual_time
async def test_a_begin_that_cannot_leave_its_mark_says_so() -> None:
    """Nobody goes on with a save that others would take for dead."""
    store = MemoryStore(fault=hit(0, "refused", operation="put"))
    for resumes in (False, True):
        with pytest.raises(StorageError, match="access denied"):
            await object_storage(store).begin(A, overwrite=True, resumes=resumes)
        store.fault = hit(0, "refused", operation="put")


@in_virtual_time
async def test_a_rank_that_gives_up_drops_its_own_uploads() -> None:
    """The one that leads may have died."""
    bucket = MemoryBucket()
    store = MemoryStore(bucket)
    member = await object_storage(store).join(A)
    sink = await member.create(f"data-{A}-00001-00000.safetensors", 200 * KiB)
    assert isinstance(sink, AwaitedSink)
    await sink.write(0, memoryview(bytes(SMALL.slab_nbytes)))
    assert bucket.open_uploads
    await member.abort()
    assert not bucket.open_uploads
    assert store.counts["uploads"] == 0


@in_virtual_time
async def test_an_abort_that_cannot_read_the_manifest_leaves_files_and_says_so() -> None:
    """It may be this save's: an earlier attempt may have committed it."""
    bucket, log, contents = MemoryBucket(), EventLog(), contents_of(A, 100, 5000)
    store = MemoryStore(bucket)
    attempt = await object_storage(store, log=log).begin(A, overwrite=True)
    await fill_attempt(attempt, contents)
    store.fault = hit(0, "refused", operation="get", times=100)
    await attempt.abort()
    assert bucket.keys == [key for key in keys_of(A, 100, 5000) if key != MANIFEST]
    assert [event.file for event in log.of(CleanupFailed)] == ["manifest.json"]


@in_virtual_time
async def test_who_leaves_does_not_wait_for_a_store_that_is_away() -> None:
    """Ten seconds, whatever the options say: somebody has given up."""
    store, log = MemoryStore(), EventLog()
    config = config_with(request_timeout_s=60.0)
    attempt = await object_storage(store, config=config, log=log).begin(A, overwrite=True)
    sink = await attempt.create(f"data-{A}-00000-00000.safetensors", 200 * KiB)
    assert isinstance(sink, AwaitedSink)
    await sink.write(0, memoryview(bytes(SMALL.slab_nbytes)))
    store.fault = hit(0, "stalled", times=1_000_000)
    since_s = asyncio.get_running_loop().time()
    await attempt.leave()
    assert asyncio.get_running_loop().time() - since_s <= 10
    assert [isinstance(event.error, OSError) for event in log.of(CleanupFailed)] == [True]
