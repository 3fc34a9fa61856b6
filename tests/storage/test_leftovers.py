from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptio.errors import StorageError
from ckptio.events import LeftoversRemoved
from ckptio.format.pointer import encode_pointer, pointed_name
from ckptio.storage import linux
from ckptio.storage.attempt_lock import Attempts
from ckptio.storage.file_names import QUIET_S, data_file_name
from ckptio.storage.files import PosixFiles
from ckptio.storage.leftovers import boot_id, find_leftovers, newest_s
from ckptio.storage.local import LocalStorage
from ckptio.testing import EventLog, RecordingFiles
from tests.rig import (
    SAVE_IDS,
    SMALL,
    committed,
    contents_of,
    fill_attempt,
    manifest_of,
    names_in,
    write_files,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor

    from ckptio.testing import Operation

pytestmark = pytest.mark.usefixtures("no_leaks")
A, B, C = SAVE_IDS[:3]
ANOTHER_BOOT = b"00000000-0000-0000-0000-000000000000"


@contextlib.contextmanager
def stopped_save(directory: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """Start a save in another process that stands still before its first `kind` operation."""
    script = f"""
        import asyncio, sys
        from concurrent.futures import ThreadPoolExecutor
        from ckptio.storage.local import LocalStorage
        from ckptio.testing import EventLog, RecordingFiles
        from tests.rig import SAVE_IDS, SMALL, contents_of, write_files

        def fault(operation):
            if operation.kind == {kind!r}:
                print("here", flush=True)
                sys.stdin.read()

        storage = LocalStorage(
            {str(directory)!r}, SMALL, ThreadPoolExecutor(2), EventLog(), RecordingFiles(fault)
        )
        saved = SAVE_IDS[1]
        asyncio.run(
            write_files(storage, saved, contents_of(saved, 9000), overwrite={kind != "publish"})
        )
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("kind", "fresh"),
    [("allocate", True), ("truncate", False), ("publish", True), ("exchange", False)],
)
async def test_a_killed_save_is_swept_by_the_next(
    tmp_path: Path, executor: Executor, kind: str, *, fresh: bool
) -> None:
    """Files of a process that got SIGKILL go with the next save, and not while it lives."""
    directory = tmp_path / "c"
    log = EventLog()
    storage = LocalStorage(str(directory), SMALL, executor, log)
    if not fresh:
        await write_files(storage, A, contents_of(A, 100))
    with stopped_save(directory, kind) as process:
        while_alive = names_in(directory)
        mine = [name for name in while_alive if B in name]
        assert f".attempt-{B}" in mine
        attempt = await storage.begin(C, overwrite=True)
        await attempt.abort()
        assert names_in(directory) == while_alive
        assert log.of(LeftoversRemoved) == []
        process.kill()
    assert committed(directory) == (None if fresh else contents_of(A, 100))
    await write_files(storage, C, contents_of(C, 10), overwrite=True)
    assert names_in(directory) == sorted(["manifest.json", *contents_of(C, 10)])
    assert set(log.of(LeftoversRemoved)[0].files) == set(mine)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("kind", ["create", "pwrite"])
async def test_a_killed_save_that_fills_the_disk_is_swept_by_the_next(
    tmp_path: Path, executor: Executor, kind: str, code: int
) -> None:
    """There is no room for the file of an attempt before; a living save keeps what it has."""
    directory, log = tmp_path / "c", EventLog()

    def full(operation: Operation) -> None:
        if (
            operation.kind == kind
            and operation.path.endswith(C)
            and (directory / mine[-1]).exists()
        ):
            raise OSError(code, os.strerror(code))

    storage = LocalStorage(str(directory), SMALL, executor, log, RecordingFiles(full))
    with stopped_save(directory, "truncate") as process:
        mine = names_in(directory)
        assert [name for name in mine if B in name] == mine
        with pytest.raises(StorageError, match="cannot begin a save") as caught:
            await storage.begin(C, overwrite=False)
        assert caught.value.errno == code
        assert names_in(directory) == mine
        process.kill()
    await write_files(storage, C, contents_of(C, 10))
    assert names_in(directory) == sorted(["manifest.json", *contents_of(C, 10)])
    assert set(log.of(LeftoversRemoved)[0].files) == set(mine)


@pytest.mark.parametrize("has_locks", [False, True])
async def test_a_full_disk_makes_nothing_dead(
    directory: Path, executor: Executor, *, has_locks: bool
) -> None:
    """What has no attempt's file may be of a save without locks, and stays until there are some."""

    def full(operation: Operation) -> None:
        if operation.kind == "create":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = names_in(directory)
    files = RecordingFiles(full, has_locks=has_locks)
    storage = LocalStorage(str(directory), SMALL, executor, EventLog(), files)
    with pytest.raises(StorageError, match="cannot begin a save"):
        await storage.begin(C, overwrite=True)
    assert names_in(directory) == before
    elsewhere = LocalStorage(str(directory / "new"), SMALL, executor, EventLog(), files)
    with pytest.raises(StorageError, match="No space left"):
        await elsewhere.begin(C, overwrite=True)
    assert names_in(directory) == before


async def test_on_a_full_disk_what_is_dead_goes_beside_what_may_live(
    tmp_path: Path, executor: Executor
) -> None:
    """There is no attempt's file yet that says what time it is: nothing else counts as quiet."""
    dead, ahead = (data_file_name(save_id, 1, 0) for save_id in (B, A))
    for name in (dead, ahead):
        (tmp_path / name).write_bytes(b"there")
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / f".attempt-{B}").write_bytes(boot_id())

    def full(operation: Operation) -> None:
        if operation.kind == "create" and (tmp_path / dead).exists():
            assert (tmp_path / ahead).exists()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = EventLog()
    storage = LocalStorage(str(tmp_path), SMALL, executor, log, RecordingFiles(full))
    attempt = await storage.begin(C, overwrite=True)
    assert [event.files for event in log.of(LeftoversRemoved)] == [
        (dead, f".attempt-{B}"),
        (ahead,),  # once there is room for a file that says what time it is
    ]
    await attempt.abort()


class ServerLocks(PosixFiles):
    """Those of NFS, which want a file that may be written."""

    def lock(self, fd: int) -> bool:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return super().lock(fd)


def test_a_server_tells_the_dead_too(directory: Path) -> None:
    """It locks no file that is only read."""
    (directory / f".attempt-{B}").write_bytes(boot_id())
    assert leftovers(directory, ServerLocks()) == sorted([*ALL_OF_B, f".attempt-{B}"])


def test_what_went_meanwhile_is_of_no_date(tmp_path: Path) -> None:
    """None of the files that were listed is there any more."""
    assert newest_s(str(tmp_path), ["gone"]) == 0.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of A with leftovers of B, which never lived here."""
    (tmp_path / "manifest.json").write_bytes(manifest_of(A, contents_of(A, 10)))
    for name, data in {**contents_of(A, 10), **contents_of(B, 10, 20)}.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / f".manifest-{B}").write_bytes(b"{}")
    (tmp_path / f".manifest-{B}-old").write_bytes(b"{}")
    return tmp_path


ALL_OF_B = sorted([*contents_of(B, 10, 20), f".manifest-{B}", f".manifest-{B}-old"])


def leftovers(directory: Path, files: PosixFiles | None = None) -> list[str]:
    return sorted(find_leftovers(files or PosixFiles(), str(directory), C))


def test_what_has_no_attempt_is_left_over(directory: Path) -> None:
    """Everything of a save that is neither alive nor committed is named, nothing else."""
    assert leftovers(directory) == ALL_OF_B


def test_a_rank_that_is_ahead_of_the_one_that_leads_is_left_alone(tmp_path: Path) -> None:
    """There is no attempt's file yet, for an hour; then it is that of a save that died."""
    name = data_file_name(B, 1, 0)
    (tmp_path / name).write_bytes(b"written just now")
    assert leftovers(tmp_path) == []
    os.utime(tmp_path / name, (0, 0))
    assert leftovers(tmp_path) == [name]


def test_what_a_commit_points_to_is_not_left_over(directory: Path) -> None:
    """Nor what that lists: a large checkpoint that was copied from an object store."""
    manifest = (directory / "manifest.json").read_bytes()
    (directory / pointed_name(A)).write_bytes(manifest)
    (directory / pointed_name(B)).write_bytes(manifest)
    (directory / "manifest.json").write_bytes(encode_pointer(A, manifest))
    assert leftovers(directory) == sorted([*ALL_OF_B, pointed_name(B)])


def test_ones_own_files_are_not_left_over(directory: Path) -> None:
    """Who asks is alive."""
    assert find_leftovers(PosixFiles(), str(directory), B) == []


def test_nothing_is_left_over_in_a_tidy_place(tmp_path: Path) -> None:
    """No files, no answer; and names of other people are not ours."""
    for name in ("notes", f"data-{B}.txt", f"data-{B[:-1]}-00000-00000.safetensors", ".attempt-"):
        (tmp_path / name).touch()
    assert leftovers(tmp_path) == []


def test_without_a_manifest_everything_of_the_dead_goes(directory: Path) -> None:
    """A place where nothing was ever committed holds nothing that is needed."""
    (directory / "manifest.json").unlink()
    assert leftovers(directory) == sorted([*ALL_OF_B, *contents_of(A, 10)])


@pytest.mark.parametrize("damaged", [b"", b"{}", b"\0" * 100])
def test_next_to_a_damaged_manifest_everything_stays(directory: Path, damaged: bytes) -> None:
    """Whatever a manifest that cannot be read may need is not removed."""
    (directory / "manifest.json").write_bytes(damaged)
    assert leftovers(directory) == []


def test_an_attempt_whose_lock_is_held_is_alive(directory: Path) -> None:
    """The lock decides; when it goes, so may the files."""
    marker = directory / f".attempt-{B}"
    marker.write_bytes(boot_id())
    files = PosixFiles()
    fd = files.open(str(marker), direct=False)
    assert files.lock(fd)
    assert leftovers(directory) == []
    files.close(fd)
    assert leftovers(directory) == sorted([*ALL_OF_B, marker.name])


def test_an_attempt_of_another_mount_is_alive_until_it_is_quiet(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this host, of FUSE, which may have locks of its own; those of one mount are the same."""
    monkeypatch.setattr(linux, "is_on_fuse", lambda _: True)
    device = os.stat(directory).st_dev
    marker = directory / f".attempt-{B}"
    marker.write_bytes(b"%s/%08x" % (boot_id(), device + 1))
    assert leftovers(directory) == []
    for name in (*ALL_OF_B, marker.name):
        os.utime(directory / name, (0, 0))
    assert leftovers(directory) == sorted([*ALL_OF_B, marker.name])
    for here in (b"%s/%08x" % (boot_id(), device), boot_id()):  # the latter by an earlier version
        marker.write_bytes(here)
        assert leftovers(directory) == sorted([*ALL_OF_B, marker.name])


@pytest.mark.parametrize("is_removal", [False, True])
async def test_an_attempt_on_fuse_is_shown_to_other_mounts(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch, *, is_removal: bool
) -> None:
    """SeaweedFS shows no new file before it is synced or closed. A failing sync is no obstacle."""
    monkeypatch.setattr(linux, "is_on_fuse", lambda _: True)
    await write_files(LocalStorage(str(tmp_path), SMALL, executor, EventLog()), A, {})
    synced = list[str]()

    def look(operation: Operation) -> None:
        if operation.kind == "fsync" and "/.attempt-" in operation.path:
            synced.append(Path(operation.path).read_text(encoding="ascii"))
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    files = RecordingFiles(look)
    if is_removal:
        mode = SMALL.file_mode
        with Attempts(files, str(tmp_path), mode, lambda *_: None, lambda: 0.0).held(A):
            pass
    else:
        storage = LocalStorage(str(tmp_path), SMALL, executor, EventLog(), files)
        await (await storage.begin(B, overwrite=True)).abort()
    assert synced == [f"{boot_id().decode()}/{os.stat(tmp_path).st_dev:08x}"]


async def test_a_save_by_another_mount_of_this_host_keeps_its_files(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no lock reaches from mount to mount, it is taken for alive."""
    monkeypatch.setattr(linux, "is_on_fuse", lambda _: True)
    attempt = await LocalStorage(str(tmp_path), SMALL, executor, EventLog()).begin(
        B, overwrite=True
    )
    await fill_attempt(attempt, contents_of(B, 5000))
    marker = tmp_path / f".attempt-{B}"
    here = marker.read_bytes()
    assert here == b"%s/%08x" % (boot_id(), os.stat(tmp_path).st_dev)
    marker.unlink()  # as the other mount shows it: without its lock
    marker.write_bytes(b"%s/%08x" % (boot_id(), os.stat(tmp_path).st_dev + 1))
    storage = LocalStorage(str(tmp_path), SMALL, executor, EventLog())
    await write_files(storage, C, contents_of(C, 10), overwrite=True)
    await attempt.commit(manifest_of(B, contents_of(B, 5000)))
    assert committed(tmp_path) == contents_of(B, 5000)


@pytest.mark.parametrize("boot", [b"", ANOTHER_BOOT])
def test_an_attempt_of_another_host_is_alive_until_it_is_quiet(
    directory: Path, boot: bytes
) -> None:
    """Locks may not reach from host to host: only an hour without a write tells."""
    marker = directory / f".attempt-{B}"
    marker.write_bytes(boot)
    assert leftovers(directory) == []
    for name in ALL_OF_B:
        os.utime(directory / name, (0, 0))
    assert leftovers(directory) == []
    os.utime(marker, (0, 0))
    assert leftovers(directory) == sorted([*ALL_OF_B, marker.name])
    # one file that is still written to keeps them all
    os.utime(directory / ALL_OF_B[0])
    assert leftovers(directory) == []


async def test_the_clock_that_counts_is_the_one_that_dates_files(
    directory: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of this host that is hours ahead of a server's makes no save of another host dead."""
    marker = directory / f".attempt-{B}"
    marker.write_bytes(ANOTHER_BOOT)
    before = names_in(directory)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 2 * QUIET_S)
    storage = LocalStorage(str(directory), SMALL, executor, EventLog())
    await write_files(storage, C, contents_of(C, 10), overwrite=True)
    assert {*before} - {*names_in(directory)} == {*contents_of(A, 10)}


def test_without_locks_nothing_is_taken_for_dead(directory: Path) -> None:
    """Where nobody can lock, an attempt's file counts as a living save."""
    (directory / f".attempt-{B}").write_bytes(boot_id())
    assert leftovers(directory, RecordingFiles(has_locks=False)) == []


async def test_a_save_that_got_no_lock_is_not_taken_for_dead(
    tmp_path: Path, executor: Executor
) -> None:
    """Others may get it: what the file of its attempt says must not let them ask."""
    files = RecordingFiles(has_locks=False)
    attempt = await LocalStorage(str(tmp_path), SMALL, executor, EventLog(), files).begin(
        A, overwrite=True
    )
    await fill_attempt(attempt, contents_of(A, 5000))
    await write_files(
        LocalStorage(str(tmp_path), SMALL, executor, EventLog()),
        B,
        contents_of(B, 10),
        overwrite=True,
    )
    await attempt.commit(manifest_of(A, contents_of(A, 5000)))
    assert committed(tmp_path) == contents_of(A, 5000)


async def test_a_save_that_gets_no_lock_sweeps_nothing(directory: Path, executor: Executor) -> None:
    """It cannot tell the dead from the living."""
    before = names_in(directory)
    files, log = RecordingFiles(has_locks=False), EventLog()
    storage = LocalStorage(str(directory), SMALL, executor, log, files)
    attempt = await storage.begin(C, overwrite=True)
    await attempt.abort()
    assert names_in(directory) == before
    assert log.of(LeftoversRemoved) == []


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_an_attempt_that_is_no_file_is_left_alone(directory: Path, kind: str) -> None:
    """Something strange in the attempt's place is nobody's to judge."""
    if kind == "link":
        (directory / f".attempt-{B}").symlink_to("manifest.json")
    else:
        (directory / f".attempt-{B}").mkdir()
    assert leftovers(directory) == []


async def test_a_save_that_could_not_sweep_goes_on(directory: Path, executor: Executor) -> None:
    """A file that cannot be removed is an event, not an error."""
    os.unlink(directory / ALL_OF_B[-1])
    (directory / ALL_OF_B[-1]).mkdir()
    log = EventLog()
    storage = LocalStorage(str(directory), SMALL, executor, log)
    attempt = await storage.begin(C, overwrite=True)
    await fill_attempt(attempt, contents_of(C, 10))
    await attempt.commit(manifest_of(C, contents_of(C, 10)))
    assert names_in(directory) == sorted([*contents_of(C, 10), ALL_OF_B[-1], "manifest.json"])
    assert "CleanupFailed" in log.kinds()
    told = [name for event in log.of(LeftoversRemoved) for name in event.files if B in name]
    assert sorted(told) == ALL_OF_B[:-1]


async def test_what_somebody_else_removes_meanwhile_is_not_told_of(
    directory: Path, executor: Executor
) -> None:
    """Whoever removed it says so."""

    def gone(operation: Operation) -> None:
        if operation.kind == "unlink" and operation.path.endswith(ALL_OF_B[0]):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), operation.path)

    log = EventLog()
    storage = LocalStorage(str(directory), SMALL, executor, log, RecordingFiles(gone))
    attempt = await storage.begin(C, overwrite=True)
    await attempt.abort()
    told = [name for event in log.of(LeftoversRemoved) for name in event.files]
    assert sorted(told) == ALL_OF_B[1:]


def test_names_of_data_files_tell_save_rank_and_index() -> None:
    """No two saves, ranks or buckets share a name."""
    names = {data_file_name(i, rank, k) for i in (A, B) for rank in (0, 7) for k in (0, 1)}
    assert len(names) == 8
    assert data_file_name(A, 3, 14) == f"data-{A}-00003-00014.safetensors"
