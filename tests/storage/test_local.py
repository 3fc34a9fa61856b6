from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptio
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptionError,
    FormatError,
    SaveAbortedError,
    StorageError,
)
from ckptio.events import CleanupFailed, DirectIORefused
from ckptio.storage.files import PosixFiles
from ckptio.storage.linux import num_cached_pages
from ckptio.storage.local import LocalStorage
from ckptio.testing import EventLog, RecordingFiles, fail_at, fail_kind, run_virtual
from tests.rig import (
    SAVE_IDS,
    SMALL,
    FilesCore,
    assert_same,
    assert_tidy,
    committed,
    config_with,
    contents_of,
    engine_on,
    fill_attempt,
    filled_state,
    inline_engine,
    manifest_of,
    names_in,
    random_state,
    read_files,
    storage_at,
    values_in,
    write_files,
)
from tests.storage.test_blocks import plant

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from pathlib import Path

    from ckptio.testing import Operation
    from ckptio.testing.files import RefuseDirect

pytestmark = pytest.mark.usefixtures("no_leaks")
A, B, C = SAVE_IDS[:3]
OLD, NEW, OTHER = contents_of(A, 5000, 9000), contents_of(B, 10_000), contents_of(C, 10)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("has_exchange", [True, False])
async def test_an_error_at_any_operation_leaves_the_old_or_the_new(
    tmp_path: Path, executor: Executor, code: int, *, overwrite: bool, has_exchange: bool
) -> None:
    """Whichever operation fails: a typed error and what was there, or success and an event."""
    for number in itertools.count():
        directory = tmp_path / str(number) / "c"
        if overwrite:
            await write_files(storage_at(directory, executor), A, OLD)
        files = RecordingFiles(fail_at(number, code), has_exchange=has_exchange)
        log = EventLog()
        storage = storage_at(directory, executor, files, log)
        try:
            await write_files(storage, B, NEW, overwrite=overwrite)
        except StorageError as error:
            assert error.errno == code
            assert error.filename.startswith(str(directory))
            assert os.strerror(code) in error.message
            if overwrite:
                assert committed(directory) == OLD
                assert names_in(directory) == sorted(["manifest.json", *OLD])
            else:
                assert not directory.parent.exists()
        else:
            assert committed(directory) == NEW
            left = set(names_in(directory)) - {"manifest.json", *NEW}
            assert bool(left) == bool(log.of(CleanupFailed))
            await write_files(storage_at(directory, executor), C, OTHER, overwrite=True)
            assert names_in(directory) == sorted(["manifest.json", *OTHER])
        assert files.num_open == 0
        if number >= len(files.operations):
            break
    assert number > 12


async def test_an_abort_tells_once_of_each_file_that_stays(
    tmp_path: Path, executor: Executor
) -> None:
    """Who leads looks for the files of all ranks, its own among them."""

    def refuse(operation: Operation) -> None:
        if operation.kind == "unlink":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    files = RecordingFiles(refuse)
    log = EventLog()
    attempt = await storage_at(tmp_path / "c", executor, files, log).begin(A, overwrite=False)
    await fill_attempt(attempt, OLD)
    other = f"data-{A}-00001-00000.safetensors"
    (tmp_path / "c" / other).touch()
    await attempt.abort()
    told = [event.file for event in log.of(CleanupFailed)]
    assert sorted(told) == names_in(tmp_path / "c")
    assert {*OLD, other} < set(told)


async def test_a_disk_that_fails_for_good_hides_no_error(
    tmp_path: Path, executor: Executor
) -> None:
    """Nothing can be cleared up either; what is said of the save is true."""
    for number in itertools.count():
        directory = tmp_path / str(number) / "c"

        def fault(operation: Operation, first: int = number) -> None:
            if operation.number >= first:
                raise OSError(errno.EIO, f"operation {operation.number}", operation.path)

        files = RecordingFiles(fault)
        try:
            await write_files(storage_at(directory, executor, files), B, NEW)
        except StorageError as error:
            assert error.errno == errno.EIO
            assert committed(directory) is None or error.in_doubt
        else:
            assert committed(directory) == NEW
        assert files.num_open == 0
        if number >= len(files.operations):
            break
    assert number > 12


async def test_new_directories_are_synced_where_a_link_leads(
    tmp_path: Path, executor: Executor
) -> None:
    """Whoever made them, and the link, just before the save."""
    (tmp_path / "disk" / "job" / "run").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "run").symlink_to(tmp_path / "disk" / "job" / "run")
    files = RecordingFiles()
    await write_files(storage_at(tmp_path / "home" / "run" / "c", executor, files), B, NEW)
    synced = {op.path for op in files.operations if op.kind == "fsync_dir"}
    expected = ("home/run/c", "home/run", "home", "disk/job", "disk")
    assert {str(tmp_path / path) for path in expected} <= synced


@pytest.mark.parametrize("durability", ["full", "file", "none"])
@pytest.mark.parametrize("overwrite", [False, True])
async def test_the_order_of_syncs(
    tmp_path: Path, executor: Executor, durability: str, *, overwrite: bool
) -> None:
    """Data, manifest, every new or young directory entry; the name; the directory again."""
    directory = tmp_path / "new1" / "new2" / "c"
    if overwrite:
        await write_files(storage_at(directory, executor), A, OLD)
    files = RecordingFiles()
    await write_files(
        storage_at(directory, executor, files, durability=durability), B, NEW, overwrite=overwrite
    )
    found = [
        (op.kind, os.path.relpath(op.path, tmp_path))
        for op in files.operations
        if op.kind in ("fsync", "fsync_dir", "publish", "exchange")
        and op.path.startswith(str(tmp_path))
    ]
    (data,) = NEW
    here = "new1/new2/c"
    syncs = [("fsync", f"{here}/{data}"), ("fsync", f"{here}/.manifest-{B}")]
    # directories that are new, or that somebody else may have made within the hour
    new_entries = [("fsync_dir", path) for path in ("new1/new2", "new1", ".")]
    name = ("exchange" if overwrite else "publish", f"{here}/manifest.json")
    assert (
        found
        == {
            "full": [
                *syncs,
                ("fsync_dir", here),
                *new_entries,
                name,
                ("fsync_dir", here),
            ],
            "file": [*syncs, name],
            "none": [name],
        }[durability]
    )


async def test_directories_are_young_by_the_clock_that_dates_them(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's: this host's own may be hours ahead."""
    directory = tmp_path / "made" / "by-others" / "c"
    directory.parent.mkdir(parents=True)
    files = RecordingFiles()
    storage = storage_at(directory, executor, files)
    ahead_s = time.time() + 3 * 3600
    monkeypatch.setattr("ckptio.storage.files.time.time", lambda: ahead_s)
    await write_files(storage, A, NEW)
    synced = [op.path for op in files.operations if op.kind == "fsync_dir"]
    assert {str(tmp_path / "made"), str(tmp_path)} <= set(synced)


async def test_directories_are_young_though_one_is_dated_ahead(
    tmp_path: Path, executor: Executor
) -> None:
    """As whoever restored it may have left it; a rank without files writes nothing there."""
    directory = tmp_path / "made" / "by-others" / "c"
    directory.mkdir(parents=True)
    files = RecordingFiles()
    rank = await storage_at(directory, executor, files).join(A)
    os.utime(directory, (time.time() + 86400,) * 2)
    await rank.seal()
    synced = [op.path for op in files.operations if op.kind == "fsync_dir"]
    assert {str(tmp_path / "made"), str(tmp_path)} <= set(synced)


async def test_directories_that_have_not_changed_for_long_are_left_alone(
    tmp_path: Path, executor: Executor
) -> None:
    """Though the one above the checkpoint changed before those above it."""
    directory = tmp_path / "a" / "b" / "c"
    await write_files(storage_at(directory, executor), A, OLD)
    for days, parent in enumerate((tmp_path, tmp_path / "a", tmp_path / "a" / "b"), start=10):
        when = time.time() - days * 86400
        os.utime(parent, (when, when))
    files = RecordingFiles()
    await write_files(storage_at(directory, executor, files), B, NEW, overwrite=True)
    synced = {op.path for op in files.operations if op.kind == "fsync_dir"}
    assert str(directory.parent) in synced
    assert not {str(tmp_path), str(tmp_path / "a")} & synced


async def test_a_rank_seals_its_files_by_name(tmp_path: Path, executor: Executor) -> None:
    """As the commit of another rank does not: that one may see none of these names."""
    directory = tmp_path / "new" / "c"
    files = RecordingFiles()
    member = await storage_at(directory, executor, files).join(A)
    await fill_attempt(member, OLD)
    files.operations.clear()
    await member.seal()
    synced = [op.path for op in files.operations if op.kind == "fsync_dir"]
    assert {str(directory), str(directory.parent), str(tmp_path)} <= set(synced)
    for path in (directory, directory.parent, tmp_path):
        files.fault = lambda op, path=path: _fail_sync(op, path)
        with pytest.raises(StorageError, match="cannot end the files of a rank"):
            await member.seal()
    await member.abort()
    assert not directory.parent.exists()


async def test_a_rank_that_cannot_make_its_directory_says_so(
    tmp_path: Path, executor: Executor
) -> None:
    """As a storage's error, with what the system said."""
    for number in range(2):  # of the two that are missing
        files = RecordingFiles(fail_at(number, errno.EACCES))
        storage = storage_at(tmp_path / "new" / "c", executor, files)
        with pytest.raises(StorageError, match="cannot join a save") as caught:
            await storage.join(A)
        assert caught.value.errno == errno.EACCES
        assert names_in(tmp_path) == []


def _fail_sync(operation: Operation, directory: Path) -> None:
    if operation.kind == "fsync_dir" and operation.path == str(directory):
        raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)


async def test_files_and_directories_are_private(
    tmp_path: Path, executor: Executor, umask: Callable[[int], object]
) -> None:
    """Everything made has 0600 or 0700, whatever the umask; what was there keeps its mode."""
    there = tmp_path / "there"
    there.mkdir(mode=0o755)
    for mask in (0o000, 0o077):
        umask(mask)
        directory = there / str(mask) / "c"
        await write_files(storage_at(directory, executor), A, OLD)
        assert modes_below(there / str(mask)) == {0o700, 0o600}
    assert os.stat(there).st_mode & 0o777 == 0o755


def modes_below(root: Path) -> set[int]:
    return {os.stat(path).st_mode & 0o777 for path in (root, *root.rglob("*"))}


async def test_modes_can_be_chosen(
    tmp_path: Path, executor: Executor, umask: Callable[[int], object]
) -> None:
    """The options win over the umask."""
    umask(0o077)
    storage = storage_at(tmp_path / "a" / "c", executor, file_mode=0o644, dir_mode=0o755)
    await write_files(storage, A, OLD)
    assert modes_below(tmp_path / "a") == {0o755, 0o644}


@pytest.mark.parametrize("refuse", ["open", "open-after-create", "align", "write"])
async def test_refused_direct_io_is_said_once_a_save(
    tmp_path: Path, executor: Executor, refuse: RefuseDirect
) -> None:
    """However many files, one event; and the bytes are right."""
    log = EventLog()
    storage = storage_at(tmp_path, executor, RecordingFiles(refuse_direct=refuse), log)
    await write_files(storage, A, OLD)
    assert committed(tmp_path) == OLD
    (event,) = log.of(DirectIORefused)
    assert event.path == str(tmp_path)
    assert event.reason


async def test_a_real_tmpfs_holds_a_checkpoint(tmpfs: Path) -> None:
    """Where memory is the file system, save and load work, and a refusal is said."""
    state = random_state([300_001, 5])
    log = EventLog()
    async with ckptio.Engine(SMALL, observer=log) as engine:
        await engine.save(state, tmpfs / "c")
        assert_same(await engine.load(tmpfs / "c"), state)
    assert_tidy(tmpfs / "c")
    assert len(log.of(DirectIORefused)) <= 1


async def test_the_old_checkpoint_is_whole_until_the_new_one_is(
    tmp_path: Path, executor: Executor
) -> None:
    """Looked at before every operation of an overwrite: first the old, then the new, no mix."""
    for has_exchange in (True, False):
        directory = tmp_path / str(has_exchange)
        await write_files(storage_at(directory, executor), A, OLD)
        seen: list[tuple[str, Any]] = []

        def look(operation: Operation, directory: Path = directory, seen: Any = seen) -> None:
            seen.append((operation.kind, committed(directory)))

        files = RecordingFiles(look, has_exchange=has_exchange)
        await write_files(storage_at(directory, executor, files), B, NEW, overwrite=True)
        contents = [found for _, found in seen]
        turn = contents.index(NEW)
        assert all(found == OLD for found in contents[:turn])
        assert all(found == NEW for found in contents[turn:])
        assert names_in(directory) == sorted(["manifest.json", *NEW])


async def test_readers_of_a_checkpoint_that_is_overwritten_get_one_of_them(
    tmp_path: Path,
) -> None:
    """While a path is overwritten again and again, a load is old, new or a typed error."""
    sizes = [70_000, 10, 5000]
    path = tmp_path / "c"
    num_loads = 0

    async def read(engine: ckptio.Engine) -> None:
        nonlocal num_loads
        while not done.is_set():
            try:
                state = await engine.load(path)
            except CheckpointChangedError:
                continue
            assert len(values_in(state)) == 1
            num_loads += 1

    done = asyncio.Event()
    async with ckptio.Engine(SMALL) as writer, ckptio.Engine(SMALL) as reader:
        await writer.save(filled_state(sizes, 0), path)
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(read(reader))
            for value in range(1, 40):
                await writer.save(filled_state(sizes, value), path, overwrite=True)
            done.set()
        assert_same(await reader.load(path), filled_state(sizes, 39))
    assert num_loads > 0
    assert_tidy(path)


@pytest.mark.parametrize("overwrite", [False, True])
async def test_of_writers_that_race_for_a_path_one_wins(tmp_path: Path, *, overwrite: bool) -> None:
    """Without overwrite exactly one commits and the others are told; nothing else is left."""
    sizes = [70_000, 10]
    async with ckptio.Engine(SMALL) as one, ckptio.Engine(SMALL) as two:
        for turn in range(8):
            path = tmp_path / str(turn)
            handles = [
                engine.save(filled_state(sizes, value), path, overwrite=overwrite)
                for value, engine in enumerate((one, two, one, two))
            ]
            won = []
            for value, handle in enumerate(handles):
                try:
                    await handle
                except (CommitConflictError, CheckpointExistsError):
                    assert not overwrite
                else:
                    won.append(value)
            assert len(won) == (4 if overwrite else 1)
            found = await one.load(path)
            assert any(
                torch.equal(found["tensor0"], filled_state(sizes, value)["tensor0"])
                for value in won
            )
            assert_tidy(path)


@pytest.mark.parametrize("kind", ["directory", "link", "dangling", "fifo"])
async def test_only_a_regular_manifest_is_a_checkpoint(
    tmp_path: Path, executor: Executor, kind: str
) -> None:
    """A link, a FIFO or a directory in the manifest's place is refused, and does not block."""
    directory = tmp_path / "c"
    directory.mkdir()
    plant(directory / "manifest.json", kind, tmp_path)
    storage = storage_at(directory, executor)
    with pytest.raises(StorageError):
        await storage.read_manifest()
    with pytest.raises(CheckpointExistsError):
        await storage.begin(A, overwrite=False)


@pytest.mark.parametrize("kind", ["directory", "link", "dangling", "fifo", "nothing"])
async def test_only_regular_data_files_are_loaded(tmp_path: Path, kind: str) -> None:
    """Something else in a data file's place is named, and no byte of a target changes."""
    path = tmp_path / "c"
    state = random_state([10_000, 20])
    async with ckptio.Engine(SMALL) as engine:
        await engine.save(state, path)
        (data,) = (path / name for name in names_in(path) if name.startswith("data-"))
        os.replace(data, tmp_path / "target")
        if kind == "link":
            data.symlink_to(tmp_path / "target")  # the right bytes, by the wrong way
        elif kind != "nothing":
            plant(data, kind, tmp_path)
        target = filled_state([10_000, 20], 7)
        with pytest.raises(CorruptionError, match="no such regular file") as caught:
            await engine.load(path, into=target)
        assert caught.value.file == data.name
        assert_same(target, filled_state([10_000, 20], 7))


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/b", "..", ".", "", "manifest.json", "a\0b", ".hidden"]
)
async def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    """A manifest with such a name is no manifest: nothing is opened."""
    (tmp_path / "outside").write_bytes(b"secret")
    directory = tmp_path / "c"
    directory.mkdir()
    (directory / "manifest.json").write_bytes(manifest_of(A, {name: b"secret"}))
    async with ckptio.Engine(SMALL) as engine:
        with pytest.raises(FormatError):
            await engine.load(directory)


async def test_a_file_in_the_directorys_place_is_an_error(
    tmp_path: Path, executor: Executor
) -> None:
    """A path below a file holds no checkpoint and cannot take one."""
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "c"):
        storage = storage_at(path, executor)
        with pytest.raises(CheckpointNotFoundError):
            await storage.read_manifest()
        with pytest.raises(CheckpointNotFoundError):
            await storage.version()
        said = (
            f"begin a save: a checkpoint is a directory, and '{tmp_path / 'file'}' is a file; rem"
        )
        with pytest.raises(StorageError, match=re.escape(said)) as caught:
            await storage.begin(A, overwrite=True)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOTDIR, str(path))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("target", ["gone", "/nowhere/at/all"])
async def test_a_link_that_leads_nowhere_is_named(
    tmp_path: Path, executor: Executor, target: str
) -> None:
    """With what it says: the directory that is not there would be made else."""
    (tmp_path / "link").symlink_to(target)
    for path in (tmp_path / "link", tmp_path / "link" / "run" / "c"):
        said = f"{str(tmp_path / 'link')!r} is a link to {str(tmp_path / target)!r}, which is not"
        with pytest.raises(StorageError, match=re.escape(said)) as caught:
            await storage_at(path, executor).begin(A, overwrite=True)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(path))
    assert names_in(tmp_path) == ["link"]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EIO, errno.ETIMEDOUT])
@pytest.mark.parametrize("is_once", [False, True])
async def test_a_link_that_cannot_be_read_as_it_is_followed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, *, is_once: bool
) -> None:
    """Somebody replaces it just then, or its server fails: what it leads to is there."""
    link, read, failed = tmp_path / "link", os.readlink, [""]
    (tmp_path / "place").mkdir()
    link.symlink_to("place")

    def fail(path: Any, *args: Any, **options: Any) -> Any:
        if path == str(link) and not (is_once and path in failed):
            failed.append(path)
            raise OSError(code, os.strerror(code), path)
        return read(path, *args, **options)

    async with ckptio.Engine(SMALL) as engine:
        for value in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(os, "readlink", fail)
                await engine.save(filled_state([100], value), link, overwrite=True)
                failed.clear()
                assert_same(await engine.load(link), filled_state([100], value))
    assert failed
    storage = LocalStorage(str(link), SMALL, ThreadPoolExecutor(1), EventLog())
    with monkeypatch.context() as patch:
        failed.clear()
        patch.setattr(os, "readlink", fail)
        assert storage.identity in {str(link), str(tmp_path / "place")}  # the latter by luck


async def test_files_that_the_replaced_manifest_names_too_stay(
    tmp_path: Path, executor: Executor
) -> None:
    """What is committed is whole, whatever stood in its place before."""
    for name, data in NEW.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "manifest.json").write_bytes(manifest_of(A, NEW))
    storage = storage_at(tmp_path, executor)
    attempt = await storage.begin(B, overwrite=True, resumes=True)
    for name, data in NEW.items():
        await attempt.keep(name, len(data))
    await attempt.commit(manifest_of(B, NEW))
    assert committed(tmp_path) == NEW


async def test_other_peoples_files_stay(tmp_path: Path, executor: Executor) -> None:
    """Whatever else is in the directory is not ours to remove, in success and in failure."""
    for name in ("notes.txt", "data-.safetensors", ".attempt-x", "data-1.safetensors"):
        (tmp_path / name).write_text("mine")
    await write_files(storage_at(tmp_path, executor), A, OLD)
    await write_files(storage_at(tmp_path, executor), B, NEW, overwrite=True)
    attempt = await storage_at(tmp_path, executor).begin(C, overwrite=True)
    await attempt.abort()
    assert len(names_in(tmp_path)) == 4 + 1 + len(NEW)


async def test_a_data_file_that_vanished_fails_the_commit(
    tmp_path: Path, executor: Executor
) -> None:
    """A manifest never names what somebody removed meanwhile."""
    storage = storage_at(tmp_path / "c", executor)
    attempt = await storage.begin(A, overwrite=False)
    await fill_attempt(attempt, OLD)
    os.unlink(tmp_path / "c" / next(iter(OLD)))
    with pytest.raises(StorageError):
        await attempt.commit(manifest_of(A, OLD))
    await attempt.abort()
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("what", ["commit", "seal"])
async def test_a_data_file_that_vanishes_as_names_are_synced_is_missed(
    tmp_path: Path, executor: Executor, what: str
) -> None:
    """The last look is behind all syncs, which may take long."""

    def remove(operation: Operation) -> None:
        if operation.kind == "fsync_dir":
            (tmp_path / "c" / next(iter(OLD))).unlink(missing_ok=True)

    storage = storage_at(tmp_path / "c", executor, RecordingFiles(remove))
    attempt = await (storage.join(A) if what == "seal" else storage.begin(A, overwrite=False))
    await fill_attempt(attempt, OLD)
    with pytest.raises(StorageError) as caught:
        await (attempt.seal() if what == "seal" else attempt.commit(manifest_of(A, OLD)))
    assert caught.value.errno == errno.ENOENT
    assert committed(tmp_path / "c") is None
    await attempt.abort()


@pytest.mark.parametrize("lacks", ["links", "locks"])
async def test_a_poorer_file_system_will_do(tmp_path: Path, executor: Executor, lacks: str) -> None:
    """Without links or without locks a checkpoint is written and overwritten all the same."""
    files = RecordingFiles(has_links=lacks != "links", has_locks=lacks != "locks")
    await write_files(storage_at(tmp_path, executor, files), A, OLD)
    with pytest.raises(CheckpointExistsError):
        await write_files(storage_at(tmp_path, executor, files), C, NEW)
    await write_files(storage_at(tmp_path, executor, files), B, NEW, overwrite=True)
    assert committed(tmp_path) == NEW
    assert names_in(tmp_path) == sorted(["manifest.json", *NEW])


async def test_a_manifest_larger_than_any_is_not_read(tmp_path: Path, executor: Executor) -> None:
    """A huge file in the manifest's place is refused by its size."""
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate((1 << 30) + 1)
    storage = storage_at(tmp_path, executor)
    for read in (storage.read_manifest, storage.peek_manifest):
        with pytest.raises(FormatError, match=re.escape(str(tmp_path)) + ".*at most"):
            await read()


async def test_an_engine_survives_a_full_disk(tmp_path: Path) -> None:
    """After ENOSPC the same engine saves to another place; the first one is as it was."""
    state = random_state([100_001, 5])
    files = RecordingFiles()
    kept = []
    async with engine_on(FilesCore(SMALL, None, files)) as engine:
        await engine.save(state, tmp_path / "c")
        for number in range(8):
            files.fault = fail_at(len(files.operations) + 7 * number, errno.ENOSPC)
            try:
                await engine.save(random_state([100_001, 5], 1), tmp_path / "c", overwrite=True)
            except StorageError as error:
                kept.append(error)  # with its traceback: the pool must not mind
                assert_same(await engine.load(tmp_path / "c"), state)
                assert_tidy(tmp_path / "c")
        files.fault = None
        await engine.save(state, tmp_path / "d")
        assert_same(await engine.load(tmp_path / "d"), state)
    assert kept


@given(seed=st.integers(0, 10_000), at_s=st.floats(0, 0.25), overwrite=st.booleans())
def test_cancelling_anywhere_leaves_the_old_or_the_new(
    tmp_path_factory: pytest.TempPathFactory, seed: int, at_s: float, *, overwrite: bool
) -> None:
    """Whenever a save is cancelled, what the handle says is what is on the disk."""
    directory = tmp_path_factory.mktemp("cancel") / "c"
    old, new = random_state([5000], seed), random_state([9000, 70_000], seed + 1)

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as unused:
            storage = LocalStorage(
                str(directory), config_with(durability="none"), unused, EventLog()
            )
            async with inline_engine({"c": storage}) as engine:
                if overwrite:
                    await engine.save(old, "c")
                handle = engine.save(new, "c", overwrite=overwrite)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(at_s):
                        await handle
                try:
                    handle.result()
                except SaveAbortedError:
                    if overwrite:
                        assert_same(await engine.load("c"), old)
                    else:
                        assert not directory.exists()
                else:
                    assert_same(await engine.load("c"), new)

    run_virtual(scenario(), seed=seed)
    if directory.exists():
        assert_tidy(directory)


async def test_reading_files_of_an_overwritten_checkpoint_says_so(
    tmp_path: Path, executor: Executor
) -> None:
    """Who holds an old manifest is told that the checkpoint changed."""
    storage = storage_at(tmp_path, executor)
    await write_files(storage, A, OLD)
    await write_files(storage, B, NEW, overwrite=True)
    with pytest.raises(CheckpointChangedError, match="load it again"):
        await storage.open(next(iter(OLD)), 5000)
    assert await read_files(storage) == NEW


async def test_an_open_that_is_cancelled_leaves_no_file_open(
    tmp_path: Path, executor: Executor
) -> None:
    """What a thread opens for a task that is cancelled meanwhile is closed again."""
    opening, go_on = threading.Event(), threading.Event()

    def hold(operation: Operation) -> None:
        if operation.kind == "open":
            opening.set()
            go_on.wait()

    await write_files(storage_at(tmp_path, executor), A, OLD)
    files = RecordingFiles(hold)
    name, data = next(iter(OLD.items()))
    task = asyncio.create_task(
        storage_at(tmp_path, executor, files).open(name, len(data)), name="open"
    )
    await asyncio.to_thread(opening.wait)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(files.kinds("open")) == 2
    assert files.num_open == 0


async def test_what_is_in_the_page_cache_is_known(tmp_path: Path, executor: Executor) -> None:
    """After it was read through it, and not after it was dropped from it; no file is none."""
    storage = storage_at(tmp_path / "c", executor)
    await write_files(storage, A, contents_of(A, 100_000))
    name = next(iter(contents_of(A, 1)))
    ranges = [(name, 0, 40_000), (name, 50_000, 40_000)]
    with open(tmp_path / "c" / name, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if num_cached_pages(file.fileno(), 0, 100_000) != 0:
            pytest.skip("this file system keeps its pages, or nobody can tell")
        assert not await storage.is_cached(ranges)
        file.read()
        assert await storage.is_cached(ranges)
        os.posix_fadvise(file.fileno(), 4096, 0, os.POSIX_FADV_DONTNEED)
        assert not await storage.is_cached(ranges)  # a page of all that is asked for is little
    assert not await storage.is_cached([("nothing", 0, 4096)])


async def test_a_manifest_that_cannot_be_read_now_is_no_damage(
    tmp_path: Path, executor: Executor
) -> None:
    """Nor is what cannot be looked at any other file than that, or none."""
    await write_files(storage_at(tmp_path / "c", executor), A, OLD)
    storage = storage_at(tmp_path / "c", executor, RecordingFiles(fail_kind("open")))
    for read in (storage.read_manifest, storage.peek_manifest):
        with pytest.raises(StorageError, match="cannot read the manifest") as caught:
            await read()
        assert caught.value.errno == errno.EIO
    with pytest.raises(StorageError, match="cannot look at a data file") as caught:
        await storage.sizes(list(OLD))
    assert caught.value.errno == errno.EIO
    with pytest.raises(StorageError, match="cannot open a data file") as caught:
        await storage.open(next(iter(OLD)), 5000)
    assert caught.value.errno == errno.EIO
    with pytest.raises(StorageError, match="cannot look at the manifest") as caught:
        await storage_at(tmp_path / ("x" * 300), executor).version()
    assert caught.value.errno == errno.ENAMETOOLONG


async def test_what_is_not_there_can_be_looked_for(tmp_path: Path, executor: Executor) -> None:
    """It leads to itself, and has no manifest."""
    storage = storage_at(tmp_path / "c", executor)
    assert await storage.identify_now() == str(tmp_path / "c")
    assert await storage.locate()
    with pytest.raises(CheckpointNotFoundError):
        await storage.peek_manifest()


async def test_a_server_that_fails_as_a_file_is_closed_is_told_of(
    tmp_path: Path, executor: Executor
) -> None:
    """A look at a size fails as a storage's error, whichever of its operations does."""

    class FailsToClose(PosixFiles):
        def close(self, fd: int) -> None:
            super().close(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    await write_files(storage_at(tmp_path / "c", executor), A, OLD)
    storage = storage_at(tmp_path / "c", executor, FailsToClose())
    with pytest.raises(StorageError, match="cannot look at a data file") as caught:
        await storage.sizes(list(OLD))
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
async def test_a_save_that_cannot_begin_clears_nothing(
    tmp_path: Path, executor: Executor, code: int
) -> None:
    """Only a full disk is made less full; a directory that goes at each look is one error."""
    killed = await storage_at(tmp_path, executor).begin(A, overwrite=True)
    await fill_attempt(killed, OLD)
    await killed.leave()

    def fail(operation: Operation) -> None:
        if operation.kind == "create" and operation.path.endswith(f".attempt-{B}"):
            raise OSError(code, os.strerror(code), operation.path)

    with pytest.raises(StorageError, match="cannot begin a save") as caught:
        await storage_at(tmp_path, executor, RecordingFiles(fail)).begin(B, overwrite=True)
    assert caught.value.errno == code
    assert names_in(tmp_path) == sorted([f".attempt-{A}", *OLD])


async def test_a_save_begins_in_a_directory_that_another_removes_once_more(
    tmp_path: Path, executor: Executor
) -> None:
    """The other one had made it, fails, and finds it empty yet."""

    def remove(operation: Operation) -> None:
        if operation.kind == "create" and not removed:
            removed.append(operation.path)
            path.rmdir()

    path, removed = tmp_path / "c", list[str]()
    await write_files(storage_at(path, executor, RecordingFiles(remove)), A, OLD)
    assert removed == [f"{path}/.attempt-{A}"]
    assert committed(path) == OLD


async def test_a_save_leaves_though_what_it_spoiled_stays(
    tmp_path: Path, executor: Executor
) -> None:
    """And lets its lock go: the disk refuses all that is asked of it."""
    files = RecordingFiles(lambda op: _fail_kinds(op, "pwrite", "unlink"))
    attempt = await storage_at(tmp_path / "c", executor, files).join(A)
    writer = await attempt.create(next(iter(OLD)), 5000)
    with pytest.raises(StorageError, match="cannot write"):
        writer.pwrite(0, memoryview(bytes(5000)))
    await attempt.leave()
    assert files.num_open == 0
    assert names_in(tmp_path / "c") == [next(iter(OLD))]


def _fail_kinds(operation: Operation, *kinds: str) -> None:
    if operation.kind in kinds:
        raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)


async def test_a_save_goes_on_where_nobody_can_say_that_it_is_alive(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server calls the handle stale; without locks it is asked for at once, too."""

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "utime", stale)
    storage = storage_at(tmp_path / "c", executor, RecordingFiles(has_locks=False))
    attempt = await storage.begin(A, overwrite=False)
    await attempt.stay()
    await fill_attempt(attempt, OLD)
    await attempt.commit(manifest_of(A, OLD))
    assert committed(tmp_path / "c") == OLD
