"""Sweeps beside a checkpoint: what a dead save left goes, and nothing that anybody may need."""

from __future__ import annotations

import errno
import itertools
import os
import time
from typing import TYPE_CHECKING

import pytest

from ckptio.errors import StorageError
from ckptio.events import CleanupFailed, LeftoversRemoved
from ckptio.storage.leftovers import find_leftovers
from ckptio.storage.local import LocalStorage
from ckptio.testing import Crash, EventLog, RecordingFiles, crash_at, fail_kind
from tests.rig import SAVE_IDS, SMALL, committed, contents_of, fill_attempt, names_in, write_files
from tests.storage.test_leftovers import stopped_save
from tests.storage.test_root import age, root_at, threads, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptio._aio import Threads
    from ckptio.storage.files import PosixFiles

pytestmark = pytest.mark.usefixtures("no_leaks")
__all__ = ["threads"]


def is_tidy(directory: Path) -> bool:
    """Whether there is a checkpoint, and nothing else."""
    return names_in(directory) == sorted(["manifest.json", *(committed(directory) or {})])


async def overwritten(directory: Path, threads: Threads, number: int) -> bool:
    """Save over a checkpoint, and crash before an operation; false if it came to its end."""
    await write(directory, threads)
    files, contents = RecordingFiles(crash_at(number)), contents_of(SAVE_IDS[1], 9000)
    storage = LocalStorage(str(directory), SMALL, threads, EventLog(), files)
    try:
        await write_files(storage, SAVE_IDS[1], contents, overwrite=True)
    except Crash:
        files.bury()
        return True
    return False


async def test_what_a_killed_save_left_beside_a_checkpoint_is_swept(
    tmp_path: Path, threads: Threads
) -> None:
    """As it does where there is none, and not while it lives, nor before its time."""
    directory, log = tmp_path / "a", EventLog()
    contents = await write(directory, threads)
    root = root_at(tmp_path, threads, log=log)
    with stopped_save(directory, "exchange") as process:
        before = names_in(directory)
        age(directory)
        await root.sweep("a", 0)
        assert names_in(directory) == before
        process.kill()
        process.wait()
    await root.sweep("a", 1_000_000)
    assert names_in(directory) == before
    await root.sweep("a", 100)
    assert is_tidy(directory)
    assert committed(directory) == contents
    (event,) = log.of(LeftoversRemoved)
    assert set(event.files) == {name for name in before if SAVE_IDS[1] in name}
    await root.sweep("a", 100)
    assert len(log.events) == 1


async def test_wherever_a_save_was_killed_its_checkpoint_or_the_old_one_stays(
    tmp_path: Path, threads: Threads
) -> None:
    """The crash matrix: whether or not it had its name by then, and all files that it needs."""
    for number in itertools.count():
        directory = tmp_path / str(number) / "a"
        if not await overwritten(directory, threads, number):
            break
        before, root = committed(directory), root_at(directory.parent, threads)
        await root.sweep("a", 0)
        assert committed(directory) == before
        age(directory)
        await root.sweep("a", 0)
        assert committed(directory) == before
        assert is_tidy(directory)
    assert number > 10


async def test_a_sweep_beside_a_checkpoint_that_is_killed_goes_on_the_next_time(
    tmp_path: Path, threads: Threads
) -> None:
    """What says that a save is dead goes last."""
    for number in itertools.count():
        directory = tmp_path / str(number) / "a"
        contents = await write(directory, threads)
        await begin_beside(directory, threads)
        files = RecordingFiles(crash_at(number))
        try:
            await root_at(directory.parent, threads, files).sweep("a", 0)
        except Crash:
            files.bury()
        else:
            break
        assert committed(directory) == contents
        await root_at(directory.parent, threads).sweep("a", 0)
        assert is_tidy(directory)
        assert committed(directory) == contents
    assert number > 4


async def begin_beside(directory: Path, threads: Threads) -> None:
    """Leave what a save leaves that is killed before its commit over another one."""
    storage = LocalStorage(str(directory), SMALL, threads, EventLog())
    attempt = await storage.begin(SAVE_IDS[1], overwrite=True)
    await fill_attempt(attempt, contents_of(SAVE_IDS[1], 5000))
    attempt._drop_lock()
    (directory / f".manifest-{SAVE_IDS[1]}").write_bytes(b"{}")


async def test_what_no_attempt_speaks_for_stays_for_an_hour(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock that dates files, of which this host's may be ahead."""
    directory = tmp_path / "a"
    await write(directory, threads)
    orphan = directory / f"data-{SAVE_IDS[1]}-00000-00000.safetensors"
    orphan.write_bytes(b"x")
    root, real = root_at(tmp_path, threads), time.time
    age(directory, 3000)
    await root.sweep("a", 10)
    assert orphan.exists()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 7200)
        await root.sweep("a", 10)
    assert orphan.exists()
    age(directory, 4000)
    await root.sweep("a", 10)
    assert is_tidy(directory)


@pytest.mark.parametrize("is_first", [True, False])
async def test_nothing_goes_while_the_manifest_changes(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch, *, is_first: bool
) -> None:
    """Whose name it was is not what it was, when it was asked what that needs."""
    directory = tmp_path / "a"
    contents = await write(directory, threads)
    await begin_beside(directory, threads)
    num_looks = 0

    def meanwhile(
        files: PosixFiles, path: str, save_id: str, clock: Callable[[], float]
    ) -> list[str]:
        nonlocal num_looks
        num_looks += 1
        if is_first or num_looks == 2:  # as if it had been taken, and put back
            os.utime(directory / "manifest.json")
        return find_leftovers(files, path, save_id, clock)

    monkeypatch.setattr("ckptio.storage.root.find_leftovers", meanwhile)
    await root_at(tmp_path, threads).sweep("a", 0)
    dead = [name for name in names_in(directory) if SAVE_IDS[1] in name]
    assert len(dead) == (3 if is_first else 2)
    monkeypatch.undo()
    await root_at(tmp_path, threads).sweep("a", 0)
    assert is_tidy(directory)
    assert committed(directory) == contents


@pytest.mark.parametrize("kind", ["unlink", "fsync_dir"])
async def test_a_sweep_beside_a_checkpoint_that_is_refused_removes_nothing(
    kind: str, tmp_path: Path, threads: Threads
) -> None:
    """What is on its way to the place of the manifest is first: a mount may still move it."""
    directory, log = tmp_path / "a", EventLog()
    await write(directory, threads)
    await begin_beside(directory, threads)
    before = names_in(directory)
    root = root_at(tmp_path, threads, RecordingFiles(fail_kind(kind, errno.EACCES)), log)
    if kind == "unlink":
        await root.sweep("a", 0)
        (event,) = log.of(CleanupFailed)
        assert event.file == f".manifest-{SAVE_IDS[1]}"
    else:
        with pytest.raises(StorageError, match="cannot sweep"):
            await root.sweep("a", 0)
    assert names_in(directory) == before


async def test_beside_a_damaged_manifest_nothing_is_swept(tmp_path: Path, threads: Threads) -> None:
    """Whatever it needs is there for whoever mends it."""
    directory = tmp_path / "a"
    await write(directory, threads)
    await begin_beside(directory, threads)
    (directory / "manifest.json").write_bytes(b"{}")
    before = names_in(directory)
    age(directory)
    await root_at(tmp_path, threads).sweep("a", 0)
    assert names_in(directory) == before
