"""Notes beside checkpoints, and attempts that take over what an earlier one left."""

from __future__ import annotations

import asyncio
import errno
import os
import uuid
from typing import TYPE_CHECKING

import pytest

from ckptio.errors import CommitConflictError, StorageError
from ckptio.storage.resolve import resolve_storage
from ckptio.storage.stores import Stores
from ckptio.testing import EventLog, MemoryStorage, RecordingFiles, fail_kind
from tests.rig import (
    SAVE_IDS,
    SMALL,
    committed,
    contents_of,
    fill_attempt,
    manifest_of,
    names_in,
    root_at,
    storage_at,
    write_files,
)
from tests.storage.test_leftovers import ServerLocks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from concurrent.futures import Executor
    from pathlib import Path

    from ckptio.storage.files import PosixFiles
    from ckptio.storage.interface import Storage
    from ckptio.storage.local import LocalStorage
    from ckptio.testing import Operation

A, B, C = SAVE_IDS[:3]
pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")


@pytest.fixture(params=["local", "memory", "objects"])
async def storage(
    request: pytest.FixtureRequest, tmp_path: Path, executor: Executor
) -> AsyncIterator[Storage]:
    stores = Stores(SMALL, executor)
    if request.param == "memory":
        yield MemoryStorage("somewhere")
    elif request.param == "local":
        yield local(tmp_path, executor)
    else:
        url = f"memory://notes-{uuid.uuid4().hex}/c"
        yield resolve_storage(url, SMALL, executor, EventLog(), stores)
    await stores.close()


def local(tmp_path: Path, executor: Executor, files: PosixFiles | None = None) -> LocalStorage:
    return storage_at(tmp_path / "c", executor, files)


async def save_with_note(
    storage: Storage, save_id: str, text: bytes = b"there", *, overwrite: bool = False
) -> None:
    attempt = await storage.begin(save_id, overwrite=overwrite)
    note = await attempt.note(text)
    await fill_attempt(attempt, contents_of(save_id, 5000))
    await attempt.commit(manifest_of(save_id, contents_of(save_id, 5000)))
    await note.release()


async def test_a_note_is_there_with_the_checkpoint_until_it_is_dropped(storage: Storage) -> None:
    """It says what was written, by the id of its save, and is gone afterwards."""
    await save_with_note(storage, A, b"there")
    assert await storage.has_note(A)
    assert not await storage.has_note(B)
    assert await storage.has_note(None)  # of any
    assert await storage.take_note(B) is None
    assert await storage.read_note(B) is None
    note = await storage.take_note(A)
    assert note is not None
    assert note.data == b"there"
    assert await storage.read_note(A) == b"there"  # held or not
    await note.release()
    assert await storage.read_note(A) == b"there"
    note = await storage.take_note(A)
    assert note is not None
    await note.drop()
    assert not await storage.has_note(A)
    assert not await storage.has_note(None)
    assert await storage.take_note(A) is None
    assert await storage.read_note(A) is None


async def test_a_note_is_held_by_one(tmp_path: Path, executor: Executor) -> None:
    """Nobody takes it meanwhile; who waited for it to be dropped gets nothing."""
    for storage in (local(tmp_path, executor), MemoryStorage("somewhere")):
        attempt = await storage.begin(A, overwrite=False)
        note = await attempt.note(b"there")
        assert await storage.take_note(A) is None
        await attempt.commit(manifest_of(A, {}))
        assert await storage.take_note(A) is None
        await note.release()
        taken = await storage.take_note(A)
        assert taken is not None
        assert await storage.take_note(A) is None
        assert await storage.has_note(A)
        await taken.drop()
        assert await storage.take_note(A) is None


async def test_where_there_are_no_locks_a_note_is_taken_by_all(
    tmp_path: Path, executor: Executor
) -> None:
    """They write the same copy; none is owed for ever."""
    files = RecordingFiles(has_locks=False)
    storage = local(tmp_path, executor, files)
    await save_with_note(storage, A)
    one, two = await storage.take_note(A), await storage.take_note(A)
    assert one is not None
    assert two is not None
    for note in (one, two):
        assert note.data == b"there"
        await note.drop()
    assert not await storage.has_note(A)


async def test_a_note_that_cannot_be_removed_is_there_to_be_taken(
    tmp_path: Path, executor: Executor
) -> None:
    """Who meant to drop it is told."""
    files = RecordingFiles()
    storage = local(tmp_path, executor, files)
    await save_with_note(storage, A)
    note = await storage.take_note(A)
    assert note is not None
    files.fault = fail_kind("unlink")
    with pytest.raises(StorageError, match="cannot remove a note"):
        await note.drop()
    files.fault = None
    note = await storage.take_note(A)
    assert note is not None
    await note.drop()


async def test_the_note_of_an_aborted_save_goes(storage: Storage) -> None:
    """What was not committed is not to be copied."""
    attempt = await storage.begin(A, overwrite=False)
    note = await attempt.note(b"there")
    await attempt.abort()
    await note.release()
    assert not await storage.has_note(A)


async def test_the_note_of_a_replaced_checkpoint_goes(storage: Storage) -> None:
    """A checkpoint has one note or none: that of its own save."""
    await save_with_note(storage, A)
    await save_with_note(storage, B, overwrite=True)
    assert not await storage.has_note(A)
    assert await storage.has_note(B)


async def test_a_later_save_leaves_the_note_of_the_committed_one(
    tmp_path: Path, executor: Executor
) -> None:
    """Leftovers are what no living save and no checkpoint needs: a note is needed."""
    storage = local(tmp_path, executor)
    await save_with_note(storage, A)
    attempt = await storage.begin(B, overwrite=True)
    assert await storage.has_note(A)
    await attempt.abort()
    assert await storage.has_note(A)


async def test_the_note_of_a_killed_save_is_a_leftover(tmp_path: Path, executor: Executor) -> None:
    """The next save removes it with the data."""
    storage = local(tmp_path, executor)
    attempt = await storage.begin(A, overwrite=False)
    note = await attempt.note(b"there")
    await note.release()  # with the lock of the attempt, below: as the kernel does
    await fill_attempt(attempt, contents_of(A, 100))
    attempt._drop_lock()
    await write_files(storage, B, contents_of(B, 10))
    assert committed(tmp_path / "c") == contents_of(B, 10)
    assert names_in(tmp_path / "c") == sorted(["manifest.json", *contents_of(B, 10)])


async def test_a_checkpoint_that_is_removed_takes_its_note_along(
    tmp_path: Path, executor: Executor
) -> None:
    """Nothing is left of the directory."""
    await save_with_note(local(tmp_path, executor), A)
    await root_at(tmp_path, executor).remove("c")
    assert not (tmp_path / "c").exists()


async def test_what_an_attempt_left_is_taken_over(storage: Storage) -> None:
    """A file is kept, another is made again, and the commit is one like any other."""
    whole = contents_of(A, 5000, 9000)
    first = await storage.begin(A, overwrite=False)
    await fill_attempt(first, contents_of(A, 5000, 100))  # the second is too short
    await first.leave()
    again = await storage.begin(A, overwrite=False, resumes=True)
    kept, made = whole
    await again.keep(kept, 5000)
    await fill_attempt(again, {made: whole[made]})
    await again.commit(manifest_of(A, whole))
    _, manifest = await storage.read_manifest()
    assert manifest == manifest_of(A, whole)
    assert await storage.sizes(list(whole)) == [5000, 9000]


async def test_a_commit_may_be_repeated(storage: Storage) -> None:
    """By an attempt that takes over one that died just after it: nothing of it is removed."""
    whole = contents_of(A, 5000)
    first = await storage.begin(A, overwrite=False)
    await fill_attempt(first, contents_of(A, 5000))
    await first.commit(manifest_of(A, whole))
    again = await storage.begin(A, overwrite=True, resumes=True)
    for name, data in whole.items():
        await again.keep(name, len(data))
    await again.commit(manifest_of(A, whole))
    assert await storage.sizes(list(whole)) == [5000]
    _, manifest = await storage.read_manifest()
    assert manifest == manifest_of(A, whole)


async def test_a_living_attempt_is_not_taken_over(tmp_path: Path, executor: Executor) -> None:
    """Its lock says so; and nothing of it is removed."""
    storage = local(tmp_path, executor)
    first = await storage.begin(A, overwrite=False)
    await fill_attempt(first, contents_of(A, 5000))
    with pytest.raises(CommitConflictError):
        await storage.begin(A, overwrite=False, resumes=True)
    await first.commit(manifest_of(A, contents_of(A, 5000)))
    assert committed(tmp_path / "c") == contents_of(A, 5000)
    assert names_in(tmp_path / "c") == sorted(["manifest.json", *contents_of(A, 5000)])


async def test_a_file_that_is_gone_cannot_be_kept(tmp_path: Path, executor: Executor) -> None:
    """Nor one of another size."""
    storage = local(tmp_path, executor)
    attempt = await storage.begin(A, overwrite=False, resumes=True)
    (name,) = contents_of(A, 10)
    with pytest.raises(StorageError, match="take a data file over"):
        await attempt.keep(name, 10)
    (tmp_path / "c" / name).write_bytes(b"short")
    with pytest.raises(StorageError, match="10 bytes"):
        await attempt.keep(name, 10)
    await attempt.abort()
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["another name", "link", "FIFO"])
async def test_what_is_no_file_of_its_own_is_not_written_to(
    tmp_path: Path, executor: Executor, kind: str
) -> None:
    """Somebody has given it another name, or has put something else in its place."""
    ((name, data),) = contents_of(A, 5000).items()
    attempt = await local(tmp_path, executor).begin(A, overwrite=False)
    await fill_attempt(attempt, {name: bytes(5000)})
    await attempt.leave()
    path, other = tmp_path / "c" / name, tmp_path / "other"
    if kind == "another name":
        other.hardlink_to(path)
    else:
        path.rename(other)
        path.symlink_to(other) if kind == "link" else os.mkfifo(path)
    attempt = await local(tmp_path, executor).begin(A, overwrite=False, resumes=True)
    await fill_attempt(attempt, {name: data})
    await attempt.commit(manifest_of(A, {name: data}))
    assert committed(tmp_path / "c") == {name: data}
    assert other.read_bytes() == bytes(5000)


async def test_what_an_attempt_left_is_written_where_it_is_wrong(
    tmp_path: Path, executor: Executor
) -> None:
    """It has the right size, and other bytes."""
    ((name, data),) = contents_of(A, 20_000).items()
    earlier = await local(tmp_path, executor).begin(A, overwrite=False)
    await fill_attempt(earlier, {name: data[:10_000] + bytes(10_000)})
    await earlier.leave()
    attempt = await local(tmp_path, executor).begin(A, overwrite=False, resumes=True)
    await fill_attempt(attempt, {name: data})
    await attempt.commit(manifest_of(A, {name: data}))
    assert committed(tmp_path / "c") == {name: data}


async def test_what_cannot_be_synced_again_is_kept_for_its_checkpoint(
    tmp_path: Path, executor: Executor
) -> None:
    """Which was committed under the same id: the copy made nothing of it."""
    contents = contents_of(A, 5000)
    await write_files(local(tmp_path, executor), A, contents)
    files = RecordingFiles(fail_kind("fsync"))
    storage = local(tmp_path, executor, files)
    attempt = await storage.begin(A, overwrite=True, resumes=True)
    with pytest.raises(StorageError, match="cannot finish the file"):
        await fill_attempt(attempt, contents)
    await attempt.leave()
    assert committed(tmp_path / "c") == contents


async def test_what_cannot_be_opened_now_is_not_made_anew(
    tmp_path: Path, executor: Executor
) -> None:
    """What an earlier attempt wrote is there yet for the next one."""
    ((name, data),) = contents_of(A, 4096).items()
    earlier = await local(tmp_path, executor).begin(A, overwrite=False)
    await fill_attempt(earlier, {name: data})
    await earlier.leave()

    def fail(operation: Operation) -> None:
        if operation.kind == "open" and operation.path.endswith(name):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), operation.path)

    storage = local(tmp_path, executor, RecordingFiles(fail))
    attempt = await storage.begin(A, overwrite=False, resumes=True)
    with pytest.raises(StorageError, match="cannot write at byte 0") as caught:
        await fill_attempt(attempt, {name: data})
    assert caught.value.errno == errno.EMFILE
    await attempt.leave()
    assert (tmp_path / "c" / name).read_bytes() == data


async def test_a_note_that_cannot_be_read_is_there_to_be_taken(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever failed to read it does not hold it."""
    storage = local(tmp_path, executor)
    await save_with_note(storage, A)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        with pytest.raises(StorageError, match="cannot read a note"):
            await storage.take_note(A)
    note = await storage.take_note(A)
    assert note is not None
    await note.release()


async def test_a_note_whose_taking_is_cancelled_is_there_to_be_taken(
    tmp_path: Path, executor: Executor
) -> None:
    """The thread has it by then, and nobody would let go of it."""
    await save_with_note(local(tmp_path, executor), A)
    loop = asyncio.get_running_loop()

    def cancel(operation: Operation) -> None:
        if operation.kind == "lock":
            loop.call_soon_threadsafe(taking.cancel)

    storage = local(tmp_path, executor, RecordingFiles(cancel))
    taking = loop.create_task(storage.take_note(A))
    with pytest.raises(asyncio.CancelledError):
        await taking
    note = await local(tmp_path, executor).take_note(A)
    assert note is not None
    await note.release()


async def test_a_note_on_a_server_is_held_by_one(tmp_path: Path, executor: Executor) -> None:
    """It locks no file that is only read."""
    await save_with_note(local(tmp_path, executor), A)
    storage = local(tmp_path, executor, ServerLocks())
    note = await storage.take_note(A)
    assert note is not None
    assert await storage.take_note(A) is None
    await note.release()


async def test_a_note_is_let_go_of_once(tmp_path: Path, executor: Executor) -> None:
    """The number of its file may be another's by then."""
    await save_with_note(local(tmp_path, executor), A)
    files = RecordingFiles()
    storage = local(tmp_path, executor, files)
    note = await storage.take_note(A)
    assert note is not None
    for _ in range(2):
        await note.release()
    assert len(files.kinds("close")) == 1


async def test_a_note_that_is_dropped_as_it_is_taken_is_none(
    tmp_path: Path, executor: Executor
) -> None:
    """Its copy is committed: to make it once more would be for nothing."""
    await save_with_note(local(tmp_path, executor), A)

    def drop(operation: Operation) -> None:
        if operation.kind == "lock":
            os.unlink(operation.path)

    files = RecordingFiles(drop)
    storage = local(tmp_path, executor, files)
    assert await storage.take_note(A) is None
    assert files.num_open == 0


@pytest.mark.parametrize("why", ["full", "taken"])
async def test_a_note_that_cannot_be_left_is_told_of(
    tmp_path: Path, executor: Executor, why: str
) -> None:
    """Else a checkpoint would be committed that nobody copies."""
    other, taken = RecordingFiles(), list[int]()

    def meet(operation: Operation) -> None:
        if not operation.path.endswith(f".copy-{A}"):
            return
        if operation.kind == "create" and why == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), operation.path)
        if operation.kind == "open":
            taken.append(other.open(operation.path, direct=False, writable=True))
            assert other.lock(taken[0])

    storage = local(tmp_path, executor, RecordingFiles(meet))
    attempt = await storage.begin(A, overwrite=False)
    said = {"full": "cannot leave a note", "taken": "somebody else has removed or taken the note"}
    with pytest.raises(StorageError, match=said[why]):
        await attempt.note(b"there")
    other.bury()
    await attempt.abort()
    assert not (tmp_path / "c").exists()


async def test_a_file_in_the_directorys_place_has_no_note(
    tmp_path: Path, executor: Executor
) -> None:
    """Where nobody can tell, that is said."""
    (tmp_path / "c").touch()
    storage = local(tmp_path, executor)
    assert await storage.take_note(A) is None
    assert await storage.read_note(A) is None
    assert not await storage.has_note(A)
    assert not await storage.has_note(None)
    (tmp_path / "c").unlink()
    (tmp_path / "c").mkdir()
    for look in (storage.take_note, storage.read_note, storage.has_note):
        with pytest.raises(StorageError, match="note") as caught:
            await look("x" * 300)
        assert caught.value.errno == errno.ENAMETOOLONG


@pytest.mark.parametrize("is_committed", [False, True])
async def test_what_cannot_be_synced_is_kept_for_a_checkpoint_alone(
    tmp_path: Path, executor: Executor, *, is_committed: bool
) -> None:
    """What was only left goes: the system says it once, and whoever came next would trust it."""
    contents = contents_of(A, 5000)
    if is_committed:
        await write_files(local(tmp_path, executor), A, contents)
    else:
        earlier = await local(tmp_path, executor).begin(A, overwrite=False)
        await fill_attempt(earlier, contents)
        await earlier.leave()
    files = RecordingFiles(fail_kind("fsync"))
    storage = local(tmp_path, executor, files)
    attempt = await storage.begin(A, overwrite=True, resumes=True)
    (name,) = contents
    with pytest.raises(StorageError, match="cannot take a data file over"):
        await attempt.keep(name, 5000)
    assert (name in names_in(tmp_path / "c")) == is_committed
    await attempt.leave()
    assert committed(tmp_path / "c") == (contents if is_committed else None)


async def test_what_a_death_after_the_exchange_left_goes(
    tmp_path: Path, executor: Executor
) -> None:
    """The manifest that was replaced lies under this save's name; its files go with it."""
    storage = local(tmp_path, executor)
    await write_files(storage, B, contents_of(B, 700))
    first = await storage.begin(A, overwrite=True)
    await fill_attempt(first, contents_of(A, 5000))
    first._clean_up = lambda *_: None  # type: ignore[method-assign]  # it dies there
    await first.commit(manifest_of(A, contents_of(A, 5000)))
    first._drop_lock()
    assert set(contents_of(B, 700)) < set(names_in(tmp_path / "c"))
    again = await storage.begin(A, overwrite=True, resumes=True)
    for name, data in contents_of(A, 5000).items():
        await again.keep(name, len(data))
    await again.commit(manifest_of(A, contents_of(A, 5000)))
    assert committed(tmp_path / "c") == contents_of(A, 5000)
    assert names_in(tmp_path / "c") == sorted(["manifest.json", *contents_of(A, 5000)])
