"""What an attempt takes over, what it writes once more, and what it leaves to others."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ckptio.config import PAGE_NBYTES
from ckptio.errors import CommitConflictError, StorageError
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.storage.blocks import BlockWriter
from ckptio.storage.leftovers import boot_id
from ckptio.storage.local import LocalStorage
from ckptio.testing import EventLog, RecordingFiles
from tests.rig import (
    SAVE_IDS,
    committed,
    config_with,
    contents_of,
    fill_attempt,
    manifest_of,
    names_in,
    page_aligned,
    storage_at,
    write_files,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from ckptio.testing import Operation
    from ckptio.testing.files import RefuseDirect

pytestmark = pytest.mark.usefixtures("no_leaks")
A, B = SAVE_IDS[:2]
OLD, NEW = contents_of(A, 5000, 9000), contents_of(B, 10_000)
NAME = f"data-{A}-00000-00000.safetensors"


async def write_again(path: Path, executor: Executor, files: RecordingFiles, data: bytes) -> None:
    """Make a copy of one file over what is there of it, in one piece."""
    attempt = await storage_at(path, executor, files).begin(A, overwrite=True, resumes=True)
    writer = await attempt.create(NAME, len(data))
    with page_aligned(data) as view:
        writer.pwrite(0, view)
    writer.close()
    await attempt.commit(manifest_of(A, {NAME: data}))


@pytest.mark.parametrize("num_pages", [0, 1, 2, 3])
@pytest.mark.parametrize("nbytes_more", [0, 100])
async def test_what_was_cut_off_is_not_taken_for_whole(
    tmp_path: Path, executor: Executor, num_pages: int, nbytes_more: int
) -> None:
    """It would be given its size, and have zeros where it ended."""
    data = contents_of(A, 20_000)[NAME]
    (tmp_path / NAME).write_bytes(data[: num_pages * PAGE_NBYTES + nbytes_more])
    await write_again(tmp_path, executor, RecordingFiles(), data)
    assert committed(tmp_path) == {NAME: data}


async def test_what_is_read_in_pieces_is_compared_in_its_place(
    tmp_path: Path, executor: Executor
) -> None:
    """A page where the one before it should be is not that one."""
    page, zeros = b"x" * PAGE_NBYTES, bytes(PAGE_NBYTES)
    (tmp_path / NAME).write_bytes(zeros + page)
    files = RecordingFiles(max_transfer_nbytes=PAGE_NBYTES)
    await write_again(tmp_path, executor, files, page + zeros)
    assert committed(tmp_path) == {NAME: page + zeros}


async def test_what_is_there_in_pieces_is_not_written(tmp_path: Path, executor: Executor) -> None:
    """Nor given a size that it has."""
    data = contents_of(A, 20_000)[NAME]
    (tmp_path / NAME).write_bytes(data)
    files = RecordingFiles(max_transfer_nbytes=2 * PAGE_NBYTES)
    await write_again(tmp_path, executor, files, data)
    assert len([name for _, name in files.kinds("pread") if name == NAME]) == 3
    assert NAME not in [name for _, name in files.kinds("pwrite", "truncate", "create")]


@pytest.mark.parametrize("refuses", ["open", "align", "write", "read"])
@pytest.mark.parametrize("is_right", [False, True])
async def test_where_direct_io_is_refused_the_page_cache_serves(
    tmp_path: Path, executor: Executor, refuses: RefuseDirect, *, is_right: bool
) -> None:
    """The file that is there stays the same one: no other is made in its place."""
    data = contents_of(A, 20_000)[NAME]
    (tmp_path / NAME).write_bytes(data if is_right else data[:10_000] + bytes(10_000))
    before = (tmp_path / NAME).stat().st_ino
    files = RecordingFiles(refuse_direct=refuses)
    await write_again(tmp_path, executor, files, data)
    assert committed(tmp_path) == {NAME: data}
    assert (tmp_path / NAME).stat().st_ino == before
    assert (NAME in [name for _, name in files.kinds("pwrite")]) != is_right
    turned_off = (refuses, is_right) not in [("open", False), ("open", True), ("write", True)]
    assert (NAME in [name for _, name in files.kinds("set_buffered")]) == turned_off


class SlowToTurn(RecordingFiles):
    """A mount that refuses direct I/O, and takes its time to turn it off: somebody writes first."""

    def __init__(self) -> None:
        super().__init__(refuse_direct="write")
        self.is_turning, self.was_tried = threading.Event(), threading.Event()

    def pread(self, fd: int, room: memoryview, offset: int) -> int:
        count = super().pread(fd, room, offset)
        if count and fd in self._direct_fds:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return count

    def set_buffered(self, fd: int) -> None:
        self.is_turning.set()
        self.was_tried.wait()
        super().set_buffered(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if fd in self._direct_fds:
            self.was_tried.set()
        return super().pwrite(fd, data, offset)


async def test_nobody_writes_as_if_direct_io_were_off_before_it_is(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread has begun to write as the file is turned to the page cache."""
    data, half = contents_of(A, 4 * PAGE_NBYTES)[NAME], 2 * PAGE_NBYTES
    (tmp_path / NAME).write_bytes(data[:half])
    files, opened, has_begun = SlowToTurn(), BlockWriter._open, threading.Event()
    attempt = await storage_at(tmp_path, executor, files).begin(A, overwrite=True, resumes=True)
    writer = await attempt.create(NAME, len(data))
    with page_aligned(data) as view, ThreadPoolExecutor(1) as other:
        calls = iter([False, True])

        def open_and_wait(self: BlockWriter) -> None:
            opened(self)
            if threading.current_thread() is not threading.main_thread() and next(calls):
                has_begun.set()
                files.is_turning.wait()

        monkeypatch.setattr(BlockWriter, "_open", open_and_wait)
        behind = other.submit(writer.pwrite, half, view[half:])
        has_begun.wait()
        writer.pwrite(0, view[:half])
        behind.result()
    writer.close()
    await attempt.commit(manifest_of(A, {NAME: data}))
    assert committed(tmp_path) == {NAME: data}


async def test_where_direct_io_is_off_nothing_is_opened_for_it(
    tmp_path: Path, executor: Executor
) -> None:
    """What is written later is not aligned."""

    class Buffered(RecordingFiles):
        def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
            assert not direct
            return super().open(path, direct=direct, writable=writable)

    data = contents_of(A, 20_000)[NAME]
    (tmp_path / NAME).write_bytes(bytes(20_000))
    config = config_with(direct_io="off")
    storage = LocalStorage(str(tmp_path), config, executor, EventLog(), Buffered())
    attempt = await storage.begin(A, overwrite=True, resumes=True)
    await fill_attempt(attempt, {NAME: data})
    await attempt.commit(manifest_of(A, {NAME: data}))
    assert committed(tmp_path) == {NAME: data}


async def test_a_file_that_vanished_since_it_was_begun_fails_the_commit(
    tmp_path: Path, executor: Executor
) -> None:
    """Else a checkpoint would be listed that has it not."""
    attempt = await storage_at(tmp_path, executor).begin(A, overwrite=True, resumes=True)
    await fill_attempt(attempt, OLD)
    (tmp_path / NAME).unlink()
    with pytest.raises(StorageError, match="cannot commit"):
        await attempt.commit(manifest_of(A, OLD))
    await attempt.abort()
    assert committed(tmp_path) is None


async def test_without_locks_an_abort_removes_nothing_that_may_be_anothers(
    tmp_path: Path, executor: Executor
) -> None:
    """An earlier attempt of this id may live, and nobody can ask."""
    path = tmp_path / "c"
    first = await storage_at(path, executor, RecordingFiles(has_locks=False)).begin(
        A, overwrite=True
    )
    await fill_attempt(first, OLD)
    second = await storage_at(path, executor, RecordingFiles(has_locks=False)).begin(
        A, overwrite=True, resumes=True
    )
    for name, data in OLD.items():
        await second.keep(name, len(data))
    await second.abort()
    await first.commit(manifest_of(A, OLD))
    assert committed(path) == OLD


async def test_beside_a_damaged_manifest_an_abort_removes_nothing(
    tmp_path: Path, executor: Executor
) -> None:
    """It may be that of this very checkpoint."""
    path = tmp_path / "c"
    await write_files(storage_at(path, executor), A, OLD)
    (path / MANIFEST_NAME).write_bytes(b"damaged")
    before = names_in(path)
    attempt = await storage_at(path, executor).begin(A, overwrite=True, resumes=True)
    for name, data in OLD.items():
        await attempt.keep(name, len(data))
    await attempt.abort()
    assert set(names_in(path)) >= set(before)


async def test_what_cannot_be_kept_as_it_is_there_for_who_finishes_it(
    tmp_path: Path, executor: Executor
) -> None:
    """Only what the system failed to sync goes."""
    (tmp_path / NAME).write_bytes(OLD[NAME][:100])
    attempt = await storage_at(tmp_path, executor).begin(A, overwrite=True, resumes=True)
    with pytest.raises(StorageError, match="5000 bytes"):
        await attempt.keep(NAME, 5000)
    assert (tmp_path / NAME).read_bytes() == OLD[NAME][:100]
    await attempt.leave()


async def test_where_names_are_not_exchanged_a_copy_that_died_is_taken_up(
    tmp_path: Path, executor: Executor
) -> None:
    """It had kept a copy of the manifest that it was about to replace."""
    path = tmp_path / "c"
    await write_files(storage_at(path, executor), B, NEW)
    first = await storage_at(path, executor).begin(A, overwrite=True)
    await fill_attempt(first, OLD)
    (path / f".manifest-{A}").write_bytes(manifest_of(A, OLD))
    (path / f".manifest-{A}-was").write_bytes((path / MANIFEST_NAME).read_bytes())
    await first.leave()
    files = RecordingFiles(has_exchange=False)
    again = await storage_at(path, executor, files).begin(A, overwrite=True, resumes=True)
    for name, data in OLD.items():
        await again.keep(name, len(data))
    await again.commit(manifest_of(A, OLD))
    assert committed(path) == OLD
    assert names_in(path) == sorted([MANIFEST_NAME, *OLD])


async def test_a_lock_whose_file_has_gone_is_none(tmp_path: Path, executor: Executor) -> None:
    """Whoever had it has removed it, and the next one makes another."""
    path = tmp_path / "c"
    await write_files(storage_at(path, executor), A, OLD)
    marker = path / f".attempt-{A}"
    marker.write_bytes(boot_id())

    def vanish(operation: Operation) -> None:
        if operation.kind == "lock":
            marker.unlink()

    storage = storage_at(path, executor, RecordingFiles(vanish))
    with pytest.raises(CommitConflictError):
        await storage.begin(A, overwrite=True, resumes=True)
    assert committed(path) == OLD


async def test_what_is_taken_over_is_alive_on_this_host(tmp_path: Path, executor: Executor) -> None:
    """The attempt's file says so from then on, and what others left dead goes."""
    (tmp_path / f".attempt-{A}").write_bytes(b"x" * len(boot_id()))
    (tmp_path / f"data-{B}-00000-00000.safetensors").write_bytes(b"left over")
    attempt = await storage_at(tmp_path, executor).begin(A, overwrite=True, resumes=True)
    assert (tmp_path / f".attempt-{A}").read_bytes() == boot_id()
    assert names_in(tmp_path) == [f".attempt-{A}"]
    await attempt.abort()


async def test_another_saves_manifest_on_its_way_is_no_obstacle(
    tmp_path: Path, executor: Executor
) -> None:
    """It is not the one that is being replaced."""
    attempt = await storage_at(tmp_path, executor).begin(A, overwrite=True, resumes=True)
    await fill_attempt(attempt, OLD)
    (tmp_path / f".manifest-{B}").write_bytes(manifest_of(B, NEW))
    await attempt.commit(manifest_of(A, OLD))
    assert committed(tmp_path) == OLD


async def test_what_a_dead_removal_left_may_go_meanwhile(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else clears it: then nothing is in the way."""
    path = tmp_path / "c"
    await write_files(storage_at(path, executor), A, OLD)
    tomb = path / f".manifest-{A}-old-00000000"
    (path / MANIFEST_NAME).rename(tomb)
    gone, real = list[str](), os.stat

    def stat(name: str | int, **options: bool) -> os.stat_result:
        if name == str(tomb) and not gone:
            gone.append(str(tomb))
            tomb.unlink()
            raise FileNotFoundError(errno.ENOENT, "it went", name)
        return real(name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        attempt = await storage_at(path, executor).begin(A, overwrite=True, resumes=True)
    for name, data in OLD.items():
        await attempt.keep(name, len(data))
    await attempt.commit(manifest_of(A, OLD))
    assert committed(path) == OLD
