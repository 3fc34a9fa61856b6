"""How a manifest gets its name on mounts that say something else than what they did."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from ckptio.errors import StorageError
from ckptio.events import CleanupFailed
from ckptio.format.pointer import encode_pointer
from ckptio.storage.file_names import data_file_name
from ckptio.storage.leftovers import find_leftovers
from ckptio.storage.manifest_name import ManifestName
from ckptio.storage.tombs import put_back_mistakes
from ckptio.testing import Crash, EventLog, RecordingFiles
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

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from pathlib import Path

    from ckptio.testing import Operation

pytestmark = pytest.mark.usefixtures("no_leaks")
A, B, C = SAVE_IDS[:3]
OLD, NEW, OTHER = contents_of(A, 5000, 9000), contents_of(B, 10_000), contents_of(C, 10)


class Mount(RecordingFiles):
    """A mount that gives the name and says that it did not; or that gives it later.

    Args:
        operation: Which one.
        code: What it says.
        late: Whether the name is given only when the manifest is to be removed.
    """

    def __init__(self, operation: str, code: int, *, late: bool = False) -> None:
        super().__init__(has_exchange=operation != "replace")
        self.operation, self.code, self.late = operation, code, late
        self.pending: list[Callable[[], Any]] = []

    def _answer(self, operation: str, source: str, target: str) -> Any:
        real = getattr(super(), operation)
        if operation != self.operation or not target.endswith("/manifest.json"):
            return real(source, target)
        if self.late:
            self.pending.append(lambda: real(source, target))
        else:
            real(source, target)
        raise OSError(self.code, os.strerror(self.code), target)

    def publish(self, source: str, target: str) -> None:
        self._answer("publish", source, target)

    def replace(self, source: str, target: str) -> None:
        self._answer("replace", source, target)

    def exchange(self, source: str, target: str) -> bool:
        return bool(self._answer("exchange", source, target))

    def unlink(self, path: str) -> None:
        if path.endswith(f"/.manifest-{B}"):
            while self.pending:
                self.pending.pop()()
        super().unlink(path)


async def begun(directory: Path, executor: Executor, operation: str) -> bool:
    """Save what an operation replaces, if that is what it does; say whether."""
    overwrite = operation != "publish"
    if overwrite:
        await write_files(storage_at(directory, executor), A, OLD)
    return overwrite


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        ("publish", errno.EEXIST),  # a request that NFS sent twice
        ("publish", errno.EIO),
        ("replace", errno.ENOENT),  # the same
        ("replace", errno.ETIMEDOUT),
        ("exchange", errno.EIO),
        ("exchange", errno.ENOENT),
    ],
)
async def test_a_name_that_was_given_counts_whatever_is_said_of_it(
    tmp_path: Path, executor: Executor, operation: str, code: int
) -> None:
    """The save is committed, and what it replaced goes, as without the error."""
    overwrite = await begun(tmp_path / "c", executor, operation)
    files, log = Mount(operation, code), EventLog()
    storage = storage_at(tmp_path / "c", executor, files, log)
    await write_files(storage, B, NEW, overwrite=overwrite)
    assert committed(tmp_path / "c") == NEW
    assert names_in(tmp_path / "c") == sorted(["manifest.json", *NEW])
    assert not log.of(CleanupFailed)


@pytest.mark.parametrize("num_repeats", [1, 2, 100])
async def test_an_exchange_that_is_carried_out_twice_is_made_again(
    tmp_path: Path, executor: Executor, num_repeats: int
) -> None:
    """It undoes itself. If that happens each time, a copy of what is replaced is kept."""

    class Repeating(RecordingFiles):
        num_left = num_repeats

        def exchange(self, source: str, target: str) -> bool:
            if self.num_left:
                self.num_left -= 1
                super().exchange(source, target)
            return super().exchange(source, target)

    await begun(tmp_path / "c", executor, "exchange")
    log = EventLog()
    storage = storage_at(tmp_path / "c", executor, Repeating(), log)
    await write_files(storage, B, NEW, overwrite=True)
    assert committed(tmp_path / "c") == NEW
    assert names_in(tmp_path / "c") == sorted(["manifest.json", *NEW])
    assert not log.of(CleanupFailed)


class Renames(RecordingFiles):
    """Renames where it is to exchange, and says that it has exchanged."""

    def exchange(self, source: str, target: str) -> bool:
        if not os.path.lexists(target):
            return super().exchange(source, target)
        self._step("exchange", target)
        os.replace(source, target)
        return True


async def test_what_a_rename_replaces_that_should_exchange_goes(
    tmp_path: Path, executor: Executor
) -> None:
    """The files of all its ranks, at once."""
    files, log = Renames(), EventLog()
    by_ranks = {data_file_name(A, rank, 0): b"x" * 5000 for rank in range(3)}
    await write_files(storage_at(tmp_path / "c", executor, files, log), A, by_ranks)
    await write_files(storage_at(tmp_path / "c", executor, files, log), B, NEW, overwrite=True)
    assert committed(tmp_path / "c") == NEW
    assert names_in(tmp_path / "c") == sorted(["manifest.json", *NEW])
    assert not log.of(CleanupFailed)


@pytest.mark.parametrize("kind", ["create", "pwrite", "fsync", "fsync_dir"])
async def test_what_a_rename_replaces_that_should_exchange_is_not_lost_by_a_failure(
    tmp_path: Path, executor: Executor, kind: str
) -> None:
    """It comes back; or the new one stands, if it cannot be kept behind that rename."""
    await write_files(storage_at(tmp_path / "c", executor), A, OLD)
    files = Renames()
    is_renamed = list[str]()

    def fail(operation: Operation) -> None:
        if operation.kind == "exchange":
            is_renamed.append(operation.path)
        elif is_renamed and operation.kind == kind:
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)

    files.fault = fail
    with contextlib.suppress(StorageError):
        await write_files(storage_at(tmp_path / "c", executor, files), B, NEW, overwrite=True)
    assert is_renamed
    assert committed(tmp_path / "c") == (OLD if kind == "fsync_dir" else NEW)


async def test_what_cannot_be_read_may_be_replaced_by_a_rename_that_should_exchange(
    tmp_path: Path, executor: Executor
) -> None:
    await write_files(storage_at(tmp_path / "c", executor), A, OLD)
    (tmp_path / "c" / "manifest.json").write_bytes(b"")
    await write_files(storage_at(tmp_path / "c", executor, Renames()), B, NEW, overwrite=True)
    assert committed(tmp_path / "c") == NEW
    await write_files(storage_at(tmp_path / "c", executor), C, OTHER, overwrite=True)
    assert names_in(tmp_path / "c") == sorted(["manifest.json", *OTHER])


@pytest.mark.parametrize("operation", ["publish", "replace", "exchange"])
async def test_a_name_that_is_given_late_keeps_its_files(
    tmp_path: Path, executor: Executor, operation: str
) -> None:
    """The save failed; whichever checkpoint is there then is whole."""
    overwrite = await begun(tmp_path / "c", executor, operation)
    files = Mount(operation, errno.EIO, late=True)
    with pytest.raises(StorageError, match=r"cannot commit.*but it may stand") as caught:
        await write_files(storage_at(tmp_path / "c", executor, files), B, NEW, overwrite=overwrite)
    assert caught.value.in_doubt
    assert committed(tmp_path / "c") == NEW
    await write_files(storage_at(tmp_path / "c", executor), C, OTHER, overwrite=True)
    assert names_in(tmp_path / "c") == sorted(["manifest.json", *OTHER])


@pytest.mark.parametrize("operation", ["publish", "replace", "exchange"])
async def test_who_leaves_a_commit_that_failed_knows_that_it_did(
    tmp_path: Path, executor: Executor, operation: str
) -> None:
    """Whoever resumes removes nothing; a request that was given up finds nothing to name then."""
    overwrite = await begun(tmp_path / "c", executor, operation)
    files = Mount(operation, errno.EIO, late=True)
    attempt = await storage_at(tmp_path / "c", executor, files).begin(B, overwrite=overwrite)
    await fill_attempt(attempt, NEW)
    with pytest.raises(StorageError, match="but it may stand") as caught:
        await attempt.commit(manifest_of(B, NEW))
    await attempt.leave()
    assert caught.value.in_doubt
    assert attempt.is_published
    assert committed(tmp_path / "c") == NEW


class Later(Mount):
    """Gives the name when everybody has gone."""

    def unlink(self, path: str) -> None:
        RecordingFiles.unlink(self, path)


@pytest.mark.parametrize("operation", ["publish", "replace", "exchange"])
async def test_a_commit_that_failed_leaves_nothing_to_be_named_later(
    tmp_path: Path, executor: Executor, operation: str
) -> None:
    """Nor does it for who means to go on with its files."""
    overwrite = await begun(tmp_path / "c", executor, operation)
    files = Later(operation, errno.EIO, late=True)
    attempt = await storage_at(tmp_path / "c", executor, files).begin(B, overwrite=overwrite)
    await fill_attempt(attempt, NEW)
    with pytest.raises(StorageError) as caught:
        await attempt.commit(manifest_of(B, NEW))
    await attempt.leave()
    assert not caught.value.in_doubt
    (late,) = files.pending
    with pytest.raises(FileNotFoundError):
        late()
    assert set(NEW) <= set(names_in(tmp_path / "c"))
    if overwrite:
        assert committed(tmp_path / "c") == OLD


class Stuck(Later):
    """Does not let the file be removed that may get the name."""

    def unlink(self, path: str) -> None:
        if path.endswith(f"/.manifest-{B}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        super().unlink(path)


async def test_what_may_get_its_name_later_is_in_doubt(tmp_path: Path, executor: Executor) -> None:
    """Its files stay: a manifest that comes late finds them."""
    files = Stuck("publish", errno.EIO, late=True)
    with pytest.raises(StorageError, match="but it may stand") as caught:
        await write_files(storage_at(tmp_path / "c", executor, files), B, NEW)
    assert caught.value.in_doubt
    (late,) = files.pending
    late()
    assert committed(tmp_path / "c") == NEW


class Unreadable(RecordingFiles):
    """Does not let the manifest be read that is there."""

    def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
        if path.endswith("/manifest.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().open(path, direct=direct, writable=writable)


async def test_a_name_that_was_never_asked_for_is_not_in_doubt(
    tmp_path: Path, executor: Executor
) -> None:
    """Where names cannot be exchanged, and no copy can be made of what is there."""
    await begun(tmp_path / "c", executor, "replace")
    files = Unreadable(has_exchange=False)
    with pytest.raises(StorageError, match="cannot commit") as caught:
        await write_files(storage_at(tmp_path / "c", executor, files), B, NEW, overwrite=True)
    assert not files.kinds("publish", "replace")
    assert not caught.value.in_doubt
    assert "may stand" not in str(caught.value)
    assert names_in(tmp_path / "c") == sorted(["manifest.json", *OLD])


class Blind(Mount):
    """Does not let the manifest be read after that, either."""

    def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
        if path.endswith("/manifest.json") and self.kinds(self.operation):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return super().open(path, direct=direct, writable=writable)


@pytest.mark.parametrize("operation", ["publish", "exchange"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EEXIST, errno.ENOENT])
async def test_where_nobody_can_tell_nothing_goes(
    tmp_path: Path, executor: Executor, operation: str, code: int
) -> None:
    """Nor does anybody take the number of the error for the answer."""
    overwrite = await begun(tmp_path / "c", executor, operation)
    files = Blind(operation, code)
    with pytest.raises(StorageError, match="but it may stand") as caught:
        await write_files(storage_at(tmp_path / "c", executor, files), B, NEW, overwrite=overwrite)
    assert caught.value.in_doubt
    assert caught.value.errno == code
    assert committed(tmp_path / "c") == NEW
    assert not overwrite or set(OLD) <= set(names_in(tmp_path / "c"))


class SeenOnce(Mount):
    """Gives the name after the first look at it, and lets nobody look again."""

    def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
        if path.endswith("/manifest.json") and self.kinds(self.operation):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        if path.endswith("/manifest.json") and self.pending:
            self.pending.pop()()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return super().open(path, direct=direct, writable=writable)


async def test_where_an_abort_cannot_tell_nothing_goes(tmp_path: Path, executor: Executor) -> None:
    """The commit was told that its manifest is not there, and it came after that."""
    files = SeenOnce("publish", errno.EIO, late=True)
    with pytest.raises(StorageError, match="cannot commit") as caught:
        await write_files(storage_at(tmp_path / "c", executor, files), B, NEW)
    assert caught.value.in_doubt
    assert committed(tmp_path / "c") == NEW


class Overtaken(RecordingFiles):
    """Gives the name to another save's manifest, too, and cannot sync that."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def fsync_dir(self, path: str) -> None:
        if self.kinds("publish") and path == str(self.directory):
            for name, data in OTHER.items():
                (self.directory / name).write_bytes(data)
            (self.directory / "manifest.json").unlink()
            (self.directory / "manifest.json").write_bytes(manifest_of(C, OTHER))
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        super().fsync_dir(path)


async def test_who_takes_its_name_back_leaves_that_of_another(
    tmp_path: Path, executor: Executor
) -> None:
    """Which replaced it in between, and might be taken back, too."""
    files = Overtaken(tmp_path / "c")
    with pytest.raises(StorageError, match="but it may stand"):
        await write_files(storage_at(tmp_path / "c", executor, files), B, NEW)
    assert committed(tmp_path / "c") == OTHER
    assert set(NEW) <= set(names_in(tmp_path / "c"))


async def test_a_name_that_an_earlier_copy_gave_is_not_taken_back(
    tmp_path: Path, executor: Executor
) -> None:
    """Where names cannot be exchanged, and the directory cannot be synced once more."""
    await write_files(storage_at(tmp_path / "c", executor), A, OLD)
    files = RecordingFiles(has_exchange=False)

    def fault(operation: Operation) -> None:
        if operation.kind == "fsync_dir" and files.kinds("exchange"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)

    files.fault = fault
    storage = storage_at(tmp_path / "c", executor, files)
    attempt = await storage.begin(A, overwrite=True, resumes=True)
    for name, data in OLD.items():
        await attempt.keep(name, len(data))
    with pytest.raises(StorageError, match="cannot commit"):
        await attempt.commit(manifest_of(A, OLD))
    assert attempt.is_published
    await attempt.abort()
    assert not files.kinds("replace")
    assert committed(tmp_path / "c") == OLD


class OvertakenAgain(RecordingFiles):
    """Another save commits as this one, which cannot sync its name, gives it back."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def fsync_dir(self, path: str) -> None:
        if self.kinds("exchange"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        super().fsync_dir(path)

    def exchange(self, source: str, target: str) -> bool:
        if len(self.kinds("exchange")) == 1:
            put(self.directory, C, OTHER)
        return super().exchange(source, target)


def put(directory: Path, save_id: str, contents: dict[str, bytes]) -> None:
    """Commit with plain means what takes the place of whatever is there."""
    for name, data in contents.items():
        (directory / name).write_bytes(data)
    (directory / "new").write_bytes(manifest_of(save_id, contents))
    (directory / "new").rename(directory / "manifest.json")


async def test_who_puts_back_what_it_kept_a_copy_of_leaves_what_has_come_since(
    tmp_path: Path, executor: Executor
) -> None:
    """Another save is committed while it looks whether that is whole."""
    directory = tmp_path / "c"
    await write_files(storage_at(directory, executor), A, OLD)

    class Overtakes(RecordingFiles):
        def fsync_dir(self, path: str) -> None:
            if self.kinds("replace"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            super().fsync_dir(path)

        def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
            if path.endswith("-was"):
                put(directory, C, OTHER)
            return super().open(path, direct=direct, writable=writable)

    files = Overtakes(has_exchange=False)
    with contextlib.suppress(StorageError):
        await write_files(storage_at(directory, executor, files), B, NEW, overwrite=True)
    assert committed(directory) == OTHER


async def test_of_two_that_lost_their_files_none_stays(tmp_path: Path, executor: Executor) -> None:
    """What may not keep its name has none, also where what it replaced cannot be had back."""
    directory = tmp_path / "c"
    await write_files(storage_at(directory, executor), A, OLD)
    name = ManifestName(RecordingFiles(has_exchange=False), str(directory), B, SMALL)
    manifest = manifest_of(B, {})
    with open(name.new, "wb") as file:
        file.write(manifest)

    def lose() -> None:
        (directory / next(iter(OLD))).unlink()
        raise OSError(errno.EBUSY, "its files are gone")

    with pytest.raises(OSError, match="its files are gone"):
        name.give(manifest, overwrite=True, look=lose)
    assert committed(directory) is None
    assert not name.may_stand


async def test_who_cannot_see_what_it_gave_a_name_back_to_undoes_that(
    tmp_path: Path, executor: Executor
) -> None:
    """It may be a third one's manifest that it has taken away."""
    directory = tmp_path / "c"
    await begun(directory, executor, "exchange")

    class Unreadable(OvertakenAgain):
        def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
            if path.endswith(f"/.manifest-{B}") and len(self.kinds("exchange")) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return super().open(path, direct=direct, writable=writable)

    with pytest.raises(StorageError, match="but it may stand"):
        await write_files(
            storage_at(directory, executor, Unreadable(directory)), B, NEW, overwrite=True
        )
    assert committed(directory) == OTHER


async def test_what_was_kept_of_what_stays_goes(tmp_path: Path, executor: Executor) -> None:
    """Where names are not exchanged, and the new one does not get its name."""
    directory = tmp_path / "c"
    await begun(directory, executor, "replace")
    before = names_in(directory)

    def fail(operation: Operation) -> None:
        if operation.kind == "replace":
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)

    files = RecordingFiles(fail, has_exchange=False)
    with pytest.raises(StorageError, match="cannot commit"):
        await write_files(storage_at(directory, executor, files), B, NEW, overwrite=True)
    assert names_in(directory) == before
    assert committed(directory) == OLD


async def test_what_was_damaged_before_it_was_replaced_comes_back(tmp_path: Path) -> None:
    """Where names are not exchanged, and what has replaced it may not stay: it has all it had."""
    (tmp_path / "manifest.json").write_bytes(b"damaged")
    name = ManifestName(RecordingFiles(has_exchange=False), str(tmp_path), B, SMALL)
    manifest = manifest_of(B, {})
    with open(name.new, "wb") as file:
        file.write(manifest)

    def fail() -> None:
        raise OSError(errno.EBUSY, "its files are gone")

    with pytest.raises(OSError, match="its files are gone"):
        name.give(manifest, overwrite=True, look=fail)
    assert (tmp_path / "manifest.json").read_bytes() == b"damaged"
    assert not name.may_stand


async def test_what_goes_as_it_is_replaced_need_not_be_kept(
    tmp_path: Path, executor: Executor
) -> None:
    """Somebody removes it between two looks, where names are not exchanged."""
    directory, gone = tmp_path / "c", list[str]()
    await write_files(storage_at(directory, executor), A, OLD)

    class Removed(RecordingFiles):
        def exchange(self, source: str, target: str) -> bool:
            if gone:
                return super().exchange(source, target)
            assert not super().exchange(source, target)
            os.unlink(target)
            gone.append(target)
            return False

    files = Removed(has_exchange=False)
    await write_files(storage_at(directory, executor, files), B, NEW, overwrite=True)
    assert committed(directory) == NEW


async def test_who_gives_a_name_back_leaves_it_to_whom_it_is_by_then(
    tmp_path: Path, executor: Executor
) -> None:
    """It was given to another save's in between, which is seen when the two have been exchanged."""
    await begun(tmp_path / "c", executor, "exchange")
    files = OvertakenAgain(tmp_path / "c")
    with pytest.raises(StorageError, match="cannot commit"):
        await write_files(storage_at(tmp_path / "c", executor, files), B, NEW, overwrite=True)
    assert committed(tmp_path / "c") == OTHER


async def test_what_a_copy_replaced_that_may_not_stay_comes_back(
    tmp_path: Path, executor: Executor
) -> None:
    """Where names cannot be exchanged, and the very same checkpoint is removed meanwhile."""
    await begun(tmp_path / "c", executor, "replace")
    files = RecordingFiles(has_exchange=False)

    def remove(operation: Operation) -> None:
        if operation.kind == "replace" and not (tmp_path / "c" / f".manifest-{B}-old").exists():
            (tmp_path / "c" / f".manifest-{B}-old").write_bytes(manifest_of(B, NEW))

    files.fault = remove
    storage = storage_at(tmp_path / "c", executor, files)
    attempt = await storage.begin(B, overwrite=True, resumes=True)
    await fill_attempt(attempt, NEW)
    with pytest.raises(StorageError, match="is being removed there"):
        await attempt.commit(manifest_of(B, NEW))
    await attempt.abort()
    assert committed(tmp_path / "c") == OLD


async def test_what_comes_first_at_the_last_moment_is_replaced(
    tmp_path: Path, executor: Executor
) -> None:
    """There was nothing to exchange with, and then the name was taken."""
    directory = tmp_path / "c"
    files = RecordingFiles()

    def overtake(operation: Operation) -> None:
        if operation.kind == "publish":
            put(directory, C, OTHER)

    files.fault = overtake
    await write_files(storage_at(directory, executor, files), B, NEW, overwrite=True)
    assert [kind for kind, _ in files.kinds("exchange", "publish")] == [
        "exchange",
        "publish",
        "exchange",
    ]
    assert committed(directory) == NEW
    assert names_in(directory) == sorted(["manifest.json", *NEW])


async def test_what_was_not_made_is_not_removed(tmp_path: Path, executor: Executor) -> None:
    """A save that fails early says nothing of files that it never had."""
    (tmp_path / "file").touch()
    log = EventLog()
    with pytest.raises(StorageError):
        await write_files(storage_at(tmp_path / "file" / "c", executor, None, log), B, NEW)
    assert not log.of(CleanupFailed)


class Unsynced(RecordingFiles):
    """Takes the name of a manifest, and neither syncs it nor takes it away; slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.has_come, self.go_on = threading.Event(), threading.Event()

    def fsync_dir(self, path: str) -> None:
        if self.kinds("publish"):
            self.has_come.set()
            self.go_on.wait(30)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        super().fsync_dir(path)

    def replace(self, source: str, target: str) -> None:
        if source.endswith("/manifest.json"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), source)
        super().replace(source, target)


class SlowToFail(Mount):
    """Takes its time to say that it did not give the name; and gives it late."""

    def __init__(self) -> None:
        super().__init__("publish", errno.EIO, late=True)
        self.has_come, self.go_on = threading.Event(), threading.Event()

    def publish(self, source: str, target: str) -> None:
        self.has_come.set()
        self.go_on.wait(30)
        super().publish(source, target)


@pytest.mark.parametrize("kind", [Unsynced, SlowToFail])
async def test_who_cancels_a_commit_in_doubt_is_told_of_the_doubt(
    tmp_path: Path, executor: Executor, kind: type[Unsynced | SlowToFail]
) -> None:
    """Not that it was committed; nor that it was cancelled, which changes nothing."""
    files = kind()
    attempt = await storage_at(tmp_path / "c", executor, files).begin(B, overwrite=False)
    task = asyncio.create_task(attempt.commit(manifest_of(B, {})))
    await asyncio.to_thread(files.has_come.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    files.go_on.set()
    with pytest.raises(StorageError, match="but it may stand") as caught:
        await task
    assert caught.value.in_doubt
    assert attempt.is_published
    await attempt.abort()
    assert committed(tmp_path / "c") == {}


class SlowToRefuse(SlowToFail):
    """Takes its time to say that it does not give the name, and does not."""

    def _answer(self, operation: str, source: str, target: str) -> Any:
        del operation, source
        raise OSError(self.code, os.strerror(self.code), target)


class Slow(SlowToFail):
    """Takes its time to give the name."""

    def _answer(self, operation: str, source: str, target: str) -> Any:
        return getattr(RecordingFiles, operation)(self, source, target)


async def test_who_cancels_a_commit_that_comes_first_goes_on(
    tmp_path: Path, executor: Executor
) -> None:
    """As if nobody had cancelled: what was committed is not taken back."""
    files = Slow()
    attempt = await storage_at(tmp_path / "c", executor, files).begin(B, overwrite=False)
    task = asyncio.create_task(attempt.commit(manifest_of(B, {})))
    await asyncio.to_thread(files.has_come.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    files.go_on.set()
    await task
    assert task.cancelling() == 0
    assert committed(tmp_path / "c") == {}


async def test_who_cancels_a_commit_that_fails_is_not_told_that_it_was_committed(
    tmp_path: Path, executor: Executor
) -> None:
    """Nothing has changed, as after every cancellation."""
    files = SlowToRefuse()
    attempt = await storage_at(tmp_path / "c", executor, files).begin(B, overwrite=False)
    task = asyncio.create_task(attempt.commit(manifest_of(B, {})))
    await asyncio.to_thread(files.has_come.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    files.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not attempt.is_published
    await attempt.abort()
    assert not (tmp_path / "c").exists()


def killed_before_rename() -> RecordingFiles:
    """Make files of a process that is killed then, where names cannot be exchanged."""
    files = RecordingFiles(has_exchange=False)

    def stop(_: Operation) -> None:
        if files.kinds("replace"):
            raise Crash

    files.fault = stop
    return files


async def test_what_was_removed_does_not_come_back_from_a_copy_of_its_manifest(
    tmp_path: Path, executor: Executor
) -> None:
    """Which a save left that was killed as it replaced it."""
    await write_files(storage_at(tmp_path / "c", executor), A, OLD)
    files = killed_before_rename()
    with pytest.raises(Crash):
        await write_files(storage_at(tmp_path / "c", executor, files), B, NEW, overwrite=True)
    files.bury()
    assert f".manifest-{B}-was" in names_in(tmp_path / "c")
    root = root_at(tmp_path, executor)
    await root.remove("c")
    await root.sweep("c", 0.0)
    assert [found.version for found in await root.find()] in ([], [None])
    # nor from one that an earlier version of this program left, under another name
    (tmp_path / "c").mkdir(exist_ok=True)
    (tmp_path / "c" / f".manifest-{B}-old").write_bytes(manifest_of(A, OLD))
    await root.sweep("c", 0.0)
    assert await root.find() == []


async def test_what_a_killed_removal_took_by_mistake_is_put_back_by_the_next_save(
    tmp_path: Path, executor: Executor
) -> None:
    """It was overwritten at that moment; the later checkpoint lies under the name of the old."""
    await write_files(storage_at(tmp_path / "c", executor), B, NEW)
    directory = tmp_path / "c"
    (directory / "manifest.json").rename(directory / f".manifest-{A}-old")
    attempt = await storage_at(directory, executor).begin(C, overwrite=True)
    await attempt.abort()
    assert committed(directory) == NEW
    assert names_in(directory) == sorted(["manifest.json", *NEW])
    put_back_mistakes(RecordingFiles(), str(directory))  # there is nothing more to do
    put_back_mistakes(RecordingFiles(), str(tmp_path / "nowhere"))
    assert committed(directory) == NEW


async def test_what_lies_under_the_name_of_the_dead_and_is_not_whole_is_left_over(
    tmp_path: Path, executor: Executor
) -> None:
    directory = tmp_path / "c"
    directory.mkdir()
    (directory / f".manifest-{A}-old").write_bytes(manifest_of(B, NEW))
    (directory / f".manifest-{C}-old").write_bytes(b"damaged")
    await write_files(storage_at(directory, executor), B, NEW)
    assert names_in(directory) == sorted(["manifest.json", *NEW])


async def test_what_points_to_nothing_under_the_name_of_the_dead_is_left_over(
    tmp_path: Path, executor: Executor
) -> None:
    """And keeps nothing else that is."""
    directory = tmp_path / "c"
    await write_files(storage_at(directory, executor), B, NEW)
    (directory / f".manifest-{A}-old").write_bytes(encode_pointer(C, manifest_of(C, {})))
    left = f"data-{A}-00000-00000.safetensors"
    (directory / left).touch()
    found = find_leftovers(RecordingFiles(), str(directory), B)
    assert sorted(found) == [f".manifest-{A}-old", left]


async def test_what_was_taken_by_mistake_and_cut_off_since_is_not_put_back(
    tmp_path: Path, executor: Executor
) -> None:
    """A file of the right name that is too short makes no checkpoint."""
    directory = tmp_path / "c"
    await write_files(storage_at(directory, executor), B, NEW)
    (directory / "manifest.json").rename(directory / f".manifest-{A}-old")
    os.truncate(directory / next(iter(NEW)), 10)
    put_back_mistakes(RecordingFiles(), str(directory))
    assert committed(directory) is None
    assert sorted(find_leftovers(RecordingFiles(), str(directory), C)) == names_in(directory)


class Behind(RecordingFiles):
    """A mount that does not know of a manifest yet that it lists."""

    def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
        if path.endswith("/manifest.json"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return super().open(path, direct=direct, writable=writable)


async def test_a_manifest_that_is_listed_and_not_found_keeps_its_files(
    tmp_path: Path, executor: Executor
) -> None:
    await write_files(storage_at(tmp_path / "c", executor), A, OLD)
    assert find_leftovers(Behind(), str(tmp_path / "c"), C) == []
    assert find_leftovers(RecordingFiles(), str(tmp_path / "c"), C) == []


@pytest.mark.parametrize("has_exchange", [True, False])
async def test_what_a_living_save_replaces_is_needed_until_it_is_committed(
    tmp_path: Path, executor: Executor, *, has_exchange: bool
) -> None:
    """It is put back if the directory cannot be synced."""
    directory = tmp_path / "c"
    await write_files(storage_at(directory, executor), A, OLD)
    seen: list[list[str]] = []

    class Failing(RecordingFiles):
        def fsync_dir(self, path: str) -> None:
            if self.kinds("exchange", "replace"):
                seen.append(find_leftovers(RecordingFiles(), str(directory), C))
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            super().fsync_dir(path)

    files = Failing(has_exchange=has_exchange)
    with pytest.raises(StorageError, match="cannot commit"):
        await write_files(storage_at(directory, executor, files), B, NEW, overwrite=True)
    assert seen == [[]]
    assert committed(directory) == OLD


async def test_what_was_taken_by_mistake_is_no_leftover(tmp_path: Path, executor: Executor) -> None:
    """Also while whoever took it is about to put it back."""
    directory = tmp_path / "c"
    await write_files(storage_at(directory, executor), B, NEW)
    (directory / "manifest.json").rename(directory / f".manifest-{A}-old")
    assert find_leftovers(RecordingFiles(), str(directory), C) == []
    (directory / next(iter(NEW))).unlink()
    assert find_leftovers(RecordingFiles(), str(directory), C) == [f".manifest-{A}-old"]


class PutBack(RecordingFiles):
    """Whoever took a manifest by mistake puts it back before it is looked at."""

    def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
        if path.endswith(f"/.manifest-{A}-old"):
            os.rename(path, f"{os.path.dirname(path)}/manifest.json")
        return super().open(path, direct=direct, writable=writable)


async def test_what_is_put_back_meanwhile_is_no_leftover(
    tmp_path: Path, executor: Executor
) -> None:
    """The manifest was out of its place when that was read, and is in it again."""
    directory = tmp_path / "c"
    await write_files(storage_at(directory, executor), B, NEW)
    (directory / "manifest.json").rename(directory / f".manifest-{A}-old")
    assert find_leftovers(PutBack(), str(directory), C) == []
    assert committed(directory) == NEW


async def test_what_lost_its_files_is_not_put_back(tmp_path: Path, executor: Executor) -> None:
    """Where names cannot be exchanged, another save may have replaced it just after it was read."""
    directory = tmp_path / "c"

    class Overtaken(RecordingFiles):
        """Another save commits before this one's name is given; syncs fail after that."""

        def __init__(self) -> None:
            super().__init__(has_exchange=False)
            self.is_given = False

        def replace(self, source: str, target: str) -> None:
            if target.endswith("/manifest.json") and not self.is_given:
                self.is_given = True
                other = storage_at(directory, executor, RecordingFiles(has_exchange=False))
                asyncio.run(write_files(other, C, OTHER, overwrite=True))
                assert committed(directory) == OTHER
            super().replace(source, target)

        def fsync_dir(self, path: str) -> None:
            if self.is_given:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            super().fsync_dir(path)

    await write_files(storage_at(directory, executor), A, OLD)
    with pytest.raises(StorageError, match="it may stand"):
        await write_files(storage_at(directory, executor, Overtaken()), B, NEW, overwrite=True)
    assert committed(directory) == NEW
