from __future__ import annotations

import asyncio
import errno
import itertools
import os
import time
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from ckptio._aio import run_blocking
from ckptio._threads import Threads
from ckptio.errors import (
    CheckpointNotFoundError,
    FormatError,
    StorageError,
)
from ckptio.events import CleanupFailed, LeftoversRemoved
from ckptio.format.manifest import MAX_MANIFEST_NBYTES
from ckptio.format.pointer import encode_pointer
from ckptio.storage.file_names import ATTEMPT_PREFIX, NOTE_PREFIX
from ckptio.storage.files import PosixFiles
from ckptio.storage.leftovers import boot_id
from ckptio.storage.root_interface import Found
from ckptio.storage.tombs import put_back_mistakes
from ckptio.testing import Crash, EventLog, RecordingFiles, crash_at, fail_at, fail_kind
from tests.rig import (
    SAVE_IDS,
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
    from pathlib import Path

    from ckptio.testing import Fault, Operation

pytestmark = pytest.mark.usefixtures("no_leaks")
CONTENTS = contents_of(SAVE_IDS[0], 5000, 70_000)


async def write(path: Path, threads: Threads, save_id: str = SAVE_IDS[0]) -> dict[str, bytes]:
    contents = contents_of(save_id, 5000, 70_000)
    await write_files(storage_at(path, threads), save_id, contents, overwrite=True)
    return contents


async def begin(path: Path, threads: Threads) -> None:
    """Leave what a save leaves that is killed before its commit."""
    attempt = await storage_at(path, threads).begin(SAVE_IDS[1], overwrite=False)
    await fill_attempt(attempt, contents_of(SAVE_IDS[1], 5000))
    attempt._drop_lock()


def age(directory: Path, seconds: float = 10_000) -> None:
    then = time.time() - seconds
    for name in names_in(directory):
        os.utime(directory / name, (then, then))
    os.utime(directory, (then, then))


async def test_a_sweep_asks_what_time_it_is_where_files_are_dated(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a clock that is hours ahead takes no living save of another host for a dead one."""
    directory = tmp_path / "step-00000001"
    await begin(directory, threads)
    (directory / f".attempt-{SAVE_IDS[1]}").write_bytes(b"another boot")
    before = names_in(directory)
    with monkeypatch.context() as patch:
        real = time.time
        patch.setattr(time, "time", lambda: real() + 7200)
        await root_at(tmp_path, threads).sweep(directory.name, 0)
    assert names_in(directory) == before
    age(directory)
    await root_at(tmp_path, threads).sweep(directory.name, 0)
    assert names_in(tmp_path) == []


async def test_on_a_full_disk_only_locks_tell_what_is_dead(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can ask what time it is there; of a save of another host nothing goes at once."""
    directory = tmp_path / "step-00000001"
    await begin(directory, threads)
    marker = directory / f".attempt-{SAVE_IDS[1]}"
    boot = marker.read_bytes()
    marker.write_bytes(b"another boot")
    before, real = names_in(directory), time.time

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 7200)
        patch.setattr(PosixFiles, "create", full)
        await root_at(tmp_path, threads).sweep(directory.name, 0)
        assert names_in(directory) == before
        marker.write_bytes(boot)
        await root_at(tmp_path, threads).sweep(directory.name, 0)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM]
)
async def test_where_no_file_can_be_made_what_was_quiet_for_long_goes(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Though it is another host's: this one's clock has to do."""
    directory = tmp_path / "step-00000001"
    await begin(directory, threads)
    (directory / f".attempt-{SAVE_IDS[1]}").write_bytes(b"another boot")
    age(directory)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(PosixFiles, "create", refuse)
    await root_at(tmp_path, threads).sweep(directory.name, 100)
    assert names_in(tmp_path) == []


async def test_what_cannot_be_looked_at_is_an_error_or_told_of(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never for not being there; who wants the others gets them."""
    for name in ("b", "c"):
        await write(tmp_path / name, threads)
    (tmp_path / "a").symlink_to("elsewhere")
    root, real = root_at(tmp_path, threads), os.stat

    def refuse(path: str, **options: bool) -> os.stat_result:
        if path in (root.join("a"), f"{root.join('b')}/manifest.json"):
            raise PermissionError(errno.EACCES, "no", path)
        return real(path, **options)

    unseen: dict[str, StorageError] = {}
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        with pytest.raises(StorageError):
            await root.find()
        found = await root.find(unseen=unseen.__setitem__)
        with pytest.raises(StorageError):
            await root.look(["b"])
    assert [item.name for item in found] == ["c"]
    assert {name: error.errno for name, error in unseen.items()} == dict.fromkeys(
        ("a", "b"), errno.EACCES
    )


async def test_a_root_lists_directories_and_which_are_committed(
    tmp_path: Path, threads: Threads
) -> None:
    """Files are none; a root that is not there yet is empty."""
    root = root_at(tmp_path / "run", threads)
    assert await root.find() == []
    await write(tmp_path / "run" / "b", threads)
    await begin(tmp_path / "run" / "a", threads)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    first, second = await root.find()
    assert first == Found(name="a", version=None)
    assert second.name == "b"
    assert second.version is not None
    before = second.version
    await write(tmp_path / "run" / "b", threads, SAVE_IDS[2])
    assert (await root.find())[1].version not in (None, before)
    with pytest.raises(StorageError, match="cannot list"):
        await root_at(tmp_path / "run" / "notes.txt", threads).find()


@pytest.mark.parametrize("below", ["", "runs/a"])
async def test_nobody_who_lists_a_file_is_told_to_remove_it(
    tmp_path: Path, threads: Threads, below: str
) -> None:
    """Reading takes no room from it: what is wrong is the path."""
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(StorageError, match="notes' is a file; give another path") as caught:
        await root_at(tmp_path / "notes" / below, threads).find()
    assert "remove" not in str(caught.value)


async def test_a_name_of_which_nobody_can_tell_is_not_taken_for_nothing(
    tmp_path: Path, threads: Threads
) -> None:
    """A run that finds no step begins anew, over the steps that are there."""
    root = root_at(tmp_path / "run", threads)
    await write(tmp_path / "run" / "b", threads)
    (tmp_path / "run" / "gone").symlink_to("nowhere")
    (tmp_path / "run" / "loop").symlink_to("loop")
    assert [found.name for found in await root.find()] == ["b"]
    (tmp_path / "run" / "long").symlink_to("x" * 300)  # a stat fails, as one does on a stale mount
    with pytest.raises(StorageError, match=r"cannot stat a checkpoint.*long"):
        await root.find()


async def test_a_link_to_another_checkpoint_there_is_none_of_its_own(
    tmp_path: Path, threads: Threads
) -> None:
    """Two names of one directory: to remove one would remove both. Elsewhere it is the only one."""
    root = root_at(tmp_path / "run", threads)
    for name in ("run/a", "run/b", "else/d"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run" / "c").symlink_to("a")
    (tmp_path / "run" / "d").symlink_to(tmp_path / "else" / "d")
    (tmp_path / "run" / "latest").symlink_to("b")
    assert [found.name for found in await root.find()] == ["a", "b", "d"]
    steps = await root.find(lambda name: name in ("b", "c", "latest"))
    assert [found.name for found in steps] == ["b", "c"]  # "a" is not asked for
    (tmp_path / "other").symlink_to("run")
    assert [f.name for f in await root_at(tmp_path / "other", threads).find()] == ["a", "b", "d"]


async def test_a_look_at_a_name_tells_what_a_listing_does(tmp_path: Path, threads: Threads) -> None:
    """Where a listing has none, nothing is committed."""
    root = root_at(tmp_path / "run", threads)
    assert await root.names() == []
    for path in ("run/a", "run/b", "else/d"):
        await write(tmp_path / path, threads)
    await begin(tmp_path / "run" / "begun", threads)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    os.mkfifo(tmp_path / "run" / "pipe")
    (tmp_path / "run" / "odd").mkdir()
    (tmp_path / "run" / "odd" / "manifest.json").symlink_to("nowhere")
    links: dict[str, str | Path] = {
        "d": tmp_path / "else" / "d",
        "latest": "b",
        "gone": "nowhere",
        "loop": "loop",
    }
    for name, target in links.items():
        (tmp_path / "run" / name).symlink_to(target)
    names = await root.names()
    assert names == names_in(tmp_path / "run")
    for accepts in (lambda _: True, lambda name: name != "b"):
        listed = {item.name: item.version for item in await root.find(accepts)}
        asked = [*filter(accepts, names), "not there"]
        looked = {item.name: item.version for item in await root.look(asked, accepts)}
        assert looked == {name: listed.get(name) for name in asked}
        assert (listed.get("latest") is None) == accepts("b")
        assert listed["odd"] is not None  # damage, to whoever reads it


async def test_a_listing_stats_each_directory_once_and_a_look_no_other(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has thousands of steps, and a mount takes a round trip for each call."""
    names = [f"step-{step}" for step in range(20)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(b"{}")
    (tmp_path / "notes.txt").write_text("mine")
    root, paths = root_at(tmp_path, threads), list[str]()

    def counted(call: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def count(path: str, **options: bool) -> os.stat_result:
            paths.append(path)
            return call(path, **options)

        return count

    with monkeypatch.context() as patch:
        for each in ("stat", "lstat"):
            patch.setattr(os, each, counted(getattr(os, each)))
        assert [item.name for item in await root.find()] == sorted(names)
        assert sorted(paths) == [root.join(f"{name}/manifest.json") for name in sorted(names)]
        paths.clear()
        assert len(await root.names()) == len(names) + 1
        (found,) = await root.look(["step-3"])
    assert found.version is not None
    assert paths == [root.join("step-3/manifest.json"), root.join("step-3")]


async def test_manifests_are_read_several_in_a_call(tmp_path: Path) -> None:
    """Each with what it is, or why not, in its place."""

    class Counting(Threads):
        num_calls = 0

        def submit(self, *args: Any, **options: Any) -> Any:
            self.num_calls += 1
            return super().submit(*args, **options)

    threads = Counting(2, "ckptio")
    await write(tmp_path / "a", threads)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "manifest.json").mkdir()
    root, manifest = root_at(tmp_path, threads), (tmp_path / "a" / "manifest.json").read_bytes()

    def decode(name: str, data: bytes) -> tuple[str, bytes]:
        if name == "bad":
            raise FormatError("it is bad")
        return name, data

    (tmp_path / "bad").symlink_to("a")
    threads.num_calls = 0
    *read, odd, none, bad = await root.read_manifests([*["a"] * 29, "odd", "none", "bad"], decode)
    assert threads.num_calls == 2
    assert read == [("a", manifest)] * 29
    assert isinstance(odd, FormatError)
    assert isinstance(none, CheckpointNotFoundError)
    assert "it is bad" in str(bad)
    assert await root.read_manifests([], decode) == []
    threads.shutdown()


async def test_a_checkpoint_is_removed_with_its_directory(tmp_path: Path, threads: Threads) -> None:
    """Manifest first, then data, in this order."""
    await write(tmp_path / "run" / "a", threads)
    files = RecordingFiles()
    root = root_at(tmp_path / "run", threads, files)
    await root.remove("a")
    assert names_in(tmp_path / "run") == []
    changes = [kind for kind, _ in files.kinds("replace", "fsync_dir", "unlink", "rmdir")]
    assert changes == ["replace", "fsync_dir", *["unlink"] * 4, "rmdir"]
    *_, tomb, attempt = (name for _, name in files.kinds("unlink"))
    assert tomb.startswith(f".manifest-{SAVE_IDS[0]}-old-")
    assert attempt == ATTEMPT_PREFIX + SAVE_IDS[0]  # it has the lock
    with pytest.raises(CheckpointNotFoundError):
        await root.remove("a")


@pytest.mark.parametrize("is_alive", [False, True])
async def test_what_a_save_left_that_was_killed_after_its_commit_goes_with_it(
    tmp_path: Path, threads: Threads, *, is_alive: bool
) -> None:
    """Unless its lock says that it lives, or that somebody makes a copy of the same: it stays."""
    await write(tmp_path / "a", threads)
    beside = [f"{prefix}{SAVE_IDS[0]}" for prefix in (ATTEMPT_PREFIX, ".manifest-", NOTE_PREFIX)]
    (tmp_path / "a" / beside[0]).write_bytes(boot_id())
    (tmp_path / "a" / beside[1]).write_bytes((tmp_path / "a" / "manifest.json").read_bytes())
    (tmp_path / "a" / beside[2]).write_bytes(b"a copy is owed")
    files = PosixFiles()
    held = files.open(str(tmp_path / "a" / beside[0]), direct=False, writable=True)
    if is_alive:
        assert files.lock(held)
    root = root_at(tmp_path, threads)
    with pytest.raises(StorageError, match="not through") if is_alive else nullcontext():
        await root.remove("a")
    if is_alive:
        await root.sweep("a", -1)
        assert committed(tmp_path / "a") == CONTENTS
        assert names_in(tmp_path / "a") == sorted([*beside, "manifest.json", *CONTENTS])
    else:
        assert names_in(tmp_path) == []
    files.close(held)


async def test_other_peoples_files_stay(tmp_path: Path, threads: Threads) -> None:
    """And so does the directory that holds them; nobody is told twice."""
    await write(tmp_path / "a", threads)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    log = EventLog()
    root = root_at(tmp_path, threads, log=log)
    await root.remove("a")
    assert names_in(tmp_path / "a") == ["notes.txt"]
    age(tmp_path / "a")
    await root.sweep("a", 1)
    assert names_in(tmp_path / "a") == ["notes.txt"]
    assert log.events == []


async def test_a_lock_that_cannot_be_removed_is_told_of_once(
    tmp_path: Path, threads: Threads
) -> None:
    """It is all that is left of a checkpoint."""

    def refuse(operation: Operation) -> None:
        if operation.kind == "unlink" and ATTEMPT_PREFIX in operation.path:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), operation.path)

    await write(tmp_path / "a", threads)
    log = EventLog()
    await root_at(tmp_path, threads, RecordingFiles(refuse), log).remove("a")
    assert names_in(tmp_path / "a") == [ATTEMPT_PREFIX + SAVE_IDS[0]]
    assert [event.file for event in log.of(CleanupFailed)] == names_in(tmp_path / "a")


async def test_a_removal_that_is_killed_leaves_a_checkpoint_or_none(
    tmp_path: Path, threads: Threads
) -> None:
    """The crash matrix: after every operation; and the next sweep removes what is left."""
    for number in itertools.count():
        directory = tmp_path / str(number) / "a"
        await write(directory, threads)
        files = RecordingFiles(crash_at(number))
        try:
            await root_at(directory.parent, threads, files).remove("a")
        except Crash:
            files.bury()
        else:
            break
        if directory.exists():
            assert committed(directory) in (None, CONTENTS)
            is_there = committed(directory) is not None
            await root_at(directory.parent, threads).sweep("a", 3600)
            if is_there:
                assert committed(directory) == CONTENTS
            elif directory.exists():  # an empty one may be that of a save that begins
                assert names_in(directory) in ([], [ATTEMPT_PREFIX + SAVE_IDS[0]])
                age(directory)
                await root_at(directory.parent, threads).sweep("a", 3600)
                assert not directory.exists()
    assert number > 10
    assert not directory.exists()


async def test_a_removal_that_fails_leaves_a_checkpoint_or_none(
    tmp_path: Path, threads: Threads
) -> None:
    """At every operation; what cannot be removed is an event."""
    for number in itertools.count():
        directory = tmp_path / str(number) / "a"
        await write(directory, threads)
        files, log = RecordingFiles(fail_at(number)), EventLog()
        root = root_at(directory.parent, threads, files, log)
        try:
            await root.remove("a")
        except StorageError:
            assert committed(directory) == CONTENTS
        if len(files.operations) <= number:
            break
        if directory.exists() and committed(directory) is None:
            assert log.of(CleanupFailed)
            age(directory)
            await root_at(directory.parent, threads).sweep("a", 1)
            assert not directory.exists()
        assert files.num_open == 0
    assert number > 10


async def test_a_removal_that_fails_and_cannot_be_undone_says_why(
    tmp_path: Path, threads: Threads
) -> None:
    """Nobody else was faster; and it goes on with the next sweep."""

    def fail(operation: Operation) -> None:
        if operation.kind in {"fsync_dir", "publish"}:
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)

    await write(tmp_path / "a", threads)
    with pytest.raises(StorageError, match="cannot remove the checkpoint"):
        await root_at(tmp_path, threads, RecordingFiles(fail)).remove("a")
    assert committed(tmp_path / "a") is None
    await root_at(tmp_path, threads).sweep("a", 3600)
    assert names_in(tmp_path) == []


async def test_a_checkpoint_that_was_replaced_meanwhile_stays(
    tmp_path: Path, threads: Threads
) -> None:
    """What was looked at is removed, and nothing that came later."""
    await write(tmp_path / "a", threads)
    newer: dict[str, bytes] = {}

    def overtake(operation: Operation) -> None:
        if operation.kind == "replace" and not newer:
            other = Threads(1, "ckptio")
            newer.update(asyncio.run(write(tmp_path / "a", other, SAVE_IDS[2])))
            other.shutdown()

    root = root_at(tmp_path, threads, RecordingFiles(overtake))
    with pytest.raises(StorageError, match="just now"):
        await root.remove("a")
    assert committed(tmp_path / "a") == newer
    newest = await write(tmp_path / "a", threads, SAVE_IDS[1])  # the removal had the old one's lock
    assert names_in(tmp_path / "a") == sorted(["manifest.json", *newest])


async def test_what_is_seen_to_be_replaced_is_not_taken(tmp_path: Path, threads: Threads) -> None:
    """A removal that were killed then would leave it to others to put it back."""
    await write(tmp_path / "a", threads)
    newer: dict[str, bytes] = {}

    def overtake(operation: Operation) -> None:
        if ATTEMPT_PREFIX in operation.path and not newer:
            other = Threads(1, "ckptio")
            newer.update(asyncio.run(write(tmp_path / "a", other, SAVE_IDS[2])))
            other.shutdown()

    files = RecordingFiles(overtake)
    with pytest.raises(StorageError, match="just now"):
        await root_at(tmp_path, threads, files).remove("a")
    assert not files.kinds("replace")
    assert committed(tmp_path / "a") == newer


async def test_what_was_taken_by_mistake_may_be_put_back_by_others(
    tmp_path: Path, threads: Threads
) -> None:
    """By a save that begins there, before the removal has seen what it took."""
    await write(tmp_path / "a", threads)
    newer: dict[str, bytes] = {}

    def overtake(operation: Operation) -> None:
        if operation.kind == "replace":
            other = Threads(1, "ckptio")
            newer.update(asyncio.run(write(tmp_path / "a", other, SAVE_IDS[2])))
            other.shutdown()
        elif operation.kind == "open" and "-old-" in operation.path:
            put_back_mistakes(PosixFiles(), str(tmp_path / "a"))

    with pytest.raises(StorageError, match="just now"):
        await root_at(tmp_path, threads, RecordingFiles(overtake)).remove("a")
    assert committed(tmp_path / "a") == newer


async def test_a_checkpoint_that_somebody_else_removes_meanwhile_is_not_there(
    tmp_path: Path, threads: Threads
) -> None:
    """Before it is taken, or just after that."""
    for name, suffix in (("a", "/manifest.json"), ("b", "")):
        await write(tmp_path / name, threads)
        files = RecordingFiles()

        def remove(operation: Operation, files: RecordingFiles = files, end: str = suffix) -> None:
            is_taken = bool(files.kinds("replace"))
            is_ours = operation.path.endswith(end) if end else "-old-" in operation.path
            if operation.kind == "open" and is_ours and (is_taken or files.kinds("lock")):
                os.unlink(operation.path)

        files.fault = remove
        with pytest.raises(CheckpointNotFoundError):
            await root_at(tmp_path, threads, files).remove(name)


async def test_what_was_taken_by_mistake_is_put_back_by_a_sweep(
    tmp_path: Path, threads: Threads
) -> None:
    """A removal that another save overtook, and that was killed before it saw that."""
    for number in itertools.count():
        directory = tmp_path / str(number) / "a"
        await write(directory, threads)
        newer: dict[str, bytes] = {}
        crash = crash_at(number)

        def overtake(
            operation: Operation,
            directory: Path = directory,
            newer: dict[str, bytes] = newer,
            crash: Fault = crash,
        ) -> None:
            crash(operation)
            if operation.kind == "replace" and not newer:
                other = Threads(1, "ckptio")
                newer.update(asyncio.run(write(directory, other, SAVE_IDS[2])))
                other.shutdown()

        files = RecordingFiles(overtake)
        try:
            await root_at(directory.parent, threads, files).remove("a")
        except Crash:
            files.bury()
        except StorageError:
            break
        await root_at(directory.parent, threads).sweep("a", 100)
        assert committed(directory) == (newer or CONTENTS), number
    assert number > 4
    assert committed(directory) == newer


async def test_another_save_than_the_one_that_goes_stays(tmp_path: Path, threads: Threads) -> None:
    """It was committed there after it was decided that the one before it goes."""
    await write(tmp_path / "a", threads)
    root = root_at(tmp_path, threads)
    with pytest.raises(StorageError, match="another save was committed there"):
        await root.remove("a", SAVE_IDS[1])
    assert committed(tmp_path / "a") == CONTENTS
    await root.remove("a", SAVE_IDS[0])
    assert not (tmp_path / "a").exists()


async def test_what_cannot_be_read_is_not_removed(tmp_path: Path, threads: Threads) -> None:
    """A damaged manifest, or one of a newer version; a link to elsewhere."""
    await write(tmp_path / "a", threads)
    (tmp_path / "a" / "manifest.json").write_bytes(b"{}")
    await write(tmp_path / "else" / "b", threads)
    (tmp_path / "b").symlink_to(tmp_path / "else" / "b")
    root = root_at(tmp_path, threads)
    with pytest.raises(FormatError):
        await root.remove("a")
    with pytest.raises(StorageError, match="link"):
        await root.remove("b")
    assert committed(tmp_path / "b") == CONTENTS
    assert len(names_in(tmp_path / "a")) == 3


def _write_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_MANIFEST_NBYTES + 1)


NO_MANIFESTS: dict[str, Callable[[Path], object]] = {
    "directory": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to(path.parent / "other"),
    "pipe": os.mkfifo,
    "large": _write_large,
    "pointer": lambda path: path.write_bytes(encode_pointer(SAVE_IDS[1], b"{}")),
}


@pytest.mark.parametrize("kind", NO_MANIFESTS)
async def test_what_never_can_be_read_is_damage(
    kind: str, tmp_path: Path, threads: Threads
) -> None:
    """And no failure of the storage, which may give the manifest the next time."""
    await write(tmp_path / "a", threads)
    manifest = tmp_path / "a" / "manifest.json"
    manifest.rename(tmp_path / "a" / "other")
    NO_MANIFESTS[kind](manifest)
    root, before = root_at(tmp_path, threads), names_in(tmp_path / "a")
    for call in (root.read_manifest, root.remove):
        with pytest.raises(FormatError, match=r"manifest\.json|points to what is not there"):
            await call("a")
    assert names_in(tmp_path / "a") == before


async def test_what_cannot_be_read_now_is_no_damage(tmp_path: Path, threads: Threads) -> None:
    """Whatever the storage calls it: there is a file that may be a manifest, or nobody can tell."""
    await write(tmp_path / "a", threads)
    for code in (errno.EIO, errno.EINVAL, errno.EACCES):
        root = root_at(tmp_path, threads, RecordingFiles(fail_kind("open", code)))
        for call in (root.read_manifest, root.remove):
            for name in ("a", "a" * 300):  # no file has such a name
                with pytest.raises(StorageError):
                    await call(name)
    assert committed(tmp_path / "a") == CONTENTS


async def test_a_dead_save_is_swept_after_a_while(tmp_path: Path, threads: Threads) -> None:
    """Not before: somebody may want to know what became of it."""
    await begin(tmp_path / "a", threads)
    log = EventLog()
    root = root_at(tmp_path, threads, log=log)
    await root.sweep("a", 100)
    assert len(names_in(tmp_path / "a")) == 2
    age(tmp_path / "a")
    await root.sweep("a", 100)
    assert names_in(tmp_path) == []
    (event,) = log.of(LeftoversRemoved)
    assert len(event.files) == 2
    await root.sweep("a", 100)  # gone already


async def test_where_a_checkpoint_is_nothing_is_swept(tmp_path: Path, threads: Threads) -> None:
    """Nor in a directory that a link leads to: neither is all a dead save's."""
    await begin(tmp_path / "else" / "a", threads)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "b").symlink_to(tmp_path / "else" / "a")
    await write(tmp_path / "run" / "c", threads)
    for name, data in contents_of(SAVE_IDS[1], 5000).items():
        (tmp_path / "run" / "c" / name).write_bytes(data)
    root = root_at(tmp_path / "run", threads)
    for directory in (tmp_path / "else" / "a", tmp_path / "run" / "c"):
        before = names_in(directory)
        age(directory)
        for name in ("b", "c"):
            await root.sweep(name, 100)
        assert names_in(directory) == before


async def test_a_directory_that_was_just_made_is_not_swept(
    tmp_path: Path, threads: Threads
) -> None:
    """A save begins there, of which no file is there yet."""
    (tmp_path / "a").mkdir()
    root = root_at(tmp_path, threads)
    await root.sweep("a", 100)
    assert names_in(tmp_path) == ["a"]
    age(tmp_path / "a")
    await root.sweep("a", 100)
    assert names_in(tmp_path) == []


async def test_a_save_that_still_wrote_is_not_swept(tmp_path: Path, threads: Threads) -> None:
    """Into a file that it made long ago, as its directory was written to."""
    await begin(tmp_path / "a", threads)
    age(tmp_path / "a")
    name = names_in(tmp_path / "a")[-1]
    os.utime(tmp_path / "a" / name)
    os.utime(tmp_path / "a", (time.time() - 10_000,) * 2)
    await root_at(tmp_path, threads).sweep("a", 100)
    assert len(names_in(tmp_path / "a")) == 2


async def test_a_living_save_is_never_swept(tmp_path: Path, threads: Threads) -> None:
    """However long ago it wrote: it holds its lock."""
    attempt = await storage_at(tmp_path / "a", threads).begin(SAVE_IDS[1], overwrite=False)
    contents = contents_of(SAVE_IDS[1], 5000)
    await fill_attempt(attempt, contents)
    age(tmp_path / "a")
    await root_at(tmp_path, threads).sweep("a", 100)
    await attempt.commit(manifest_of(SAVE_IDS[1], contents))
    age(tmp_path / "a")
    await root_at(tmp_path, threads).sweep("a", 100)
    assert committed(tmp_path / "a") == contents


async def test_a_sweep_that_is_killed_goes_on_the_next_time(
    tmp_path: Path, threads: Threads
) -> None:
    """The crash matrix; a commit is never touched."""
    for number in itertools.count():
        directory = tmp_path / str(number) / "a"
        await begin(directory, threads)
        age(directory)
        files = RecordingFiles(crash_at(number))
        try:
            await root_at(directory.parent, threads, files).sweep("a", 100)
        except Crash:
            files.bury()
        else:
            break
        if directory.exists():
            age(directory)
        await root_at(directory.parent, threads).sweep("a", 100)
        assert not directory.exists()
    assert number > 4


async def test_a_sweep_that_is_refused_is_an_event(tmp_path: Path, threads: Threads) -> None:
    """Nothing else is wrong."""
    await begin(tmp_path / "a", threads)
    age(tmp_path / "a")
    log = EventLog()
    files = RecordingFiles(fail_kind("unlink", errno.EACCES))
    await root_at(tmp_path, threads, files, log).sweep("a", 100)
    assert {event.file[: len(ATTEMPT_PREFIX)] for event in log.of(CleanupFailed)} == {
        ATTEMPT_PREFIX,
        "data-" + SAVE_IDS[1][: len(ATTEMPT_PREFIX) - 5],
    }


@pytest.mark.usefixtures("no_collections")
async def test_where_direct_io_is_refused_things_go_as_they_do_elsewhere(
    tmp_path: Path, threads: Threads
) -> None:
    """No lock's file is opened for it, nor the one that says what time it is."""
    log, files = EventLog(), RecordingFiles(refuse_direct="open")
    root = root_at(tmp_path, threads, files, log)
    await write(tmp_path / "a", threads)
    await root.remove("a")
    await begin(tmp_path / "b", threads)
    (tmp_path / "b" / f".attempt-{SAVE_IDS[1]}").write_bytes(b"another boot")
    age(tmp_path / "b")
    await root.sweep("b", 100)
    assert names_in(tmp_path) == []
    assert not log.of(CleanupFailed)


async def test_why_manifests_cannot_be_read_is_let_go_of(tmp_path: Path, threads: Threads) -> None:
    """Without a collection of garbage: the same step is read again after each commit."""
    (tmp_path / "odd" / "manifest.json").mkdir(parents=True)
    (tmp_path / "none").mkdir()
    answers = await root_at(tmp_path, threads).read_manifests(["odd", "none"], lambda *_: None)
    kept = [weakref.ref(answer) for answer in answers if isinstance(answer, Exception)]
    assert len(kept) == 2
    del answers
    await run_blocking(threads, int)  # the thread has let go of what it did last
    assert [ref() for ref in kept] == [None, None]
