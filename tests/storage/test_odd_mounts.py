"""Directories and mounts that do not do all that a file system of one's own does."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from typing import TYPE_CHECKING

import pytest

import ckptio.sync
from ckptio.errors import ConfigError, StorageError
from ckptio.storage.files import NoExclusiveNames, absolute
from ckptio.testing import RecordingFiles
from tests.rig import SMALL, FilesCore, assert_same, config_with, filled_state, names_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptio.config import CheckpointConfig
    from ckptio.storage.files import PosixFiles

STATE = filled_state([5000], 3)


def engine_with(files: PosixFiles, config: CheckpointConfig = SMALL) -> ckptio.sync.Engine:
    engine = ckptio.sync.Engine(config)
    engine._core = FilesCore(config, None, files)
    return engine


class UnsyncedDirs(RecordingFiles):
    """Directories of which one cannot be synced."""

    def __init__(self, path: Path, code: int) -> None:
        super().__init__()
        self._at, self._code = str(path), code

    def fsync_dir(self, path: str) -> None:
        if path == self._at:
            raise OSError(self._code, os.strerror(self._code))
        super().fsync_dir(path)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EROFS, errno.EACCES])
def test_a_mount_point_above_need_not_be_synced(tmp_path: Path, code: int) -> None:
    """One that something else changed a moment ago: it has no entry of this save."""
    (tmp_path / "auto" / "user").mkdir(parents=True)
    path = tmp_path / "auto" / "user" / "run" / "c"
    with engine_with(UnsyncedDirs(tmp_path / "auto", code)) as engine:
        engine.save(STATE, path)
        assert_same(engine.load(path), STATE)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_directory_of_the_save_has_to_be_synced(tmp_path: Path, code: int) -> None:
    """And nothing is left where it cannot be."""
    with engine_with(UnsyncedDirs(tmp_path, code)) as engine, pytest.raises(StorageError):
        engine.save(STATE, tmp_path / "c")
    assert names_in(tmp_path) == []


def test_what_cannot_be_synced_is_named(tmp_path: Path) -> None:
    """With the way out; the manifest is not at fault."""
    with pytest.raises(OSError, match=r"gone', which durability='file' leaves out"):
        RecordingFiles().fsync_dir(str(tmp_path / "gone"))


def test_the_group_of_a_shared_directory_is_kept(tmp_path: Path) -> None:
    """Its bit goes on to what is made in it, and with that the group of the files."""
    shared = tmp_path / "shared"
    shared.mkdir()
    groups = [group for group in os.getgroups() if group != os.getegid()]
    if os.geteuid() == 0:
        groups = [4242]
    with contextlib.suppress(OSError):  # root of a user namespace may know no other group
        os.chown(shared, -1, next(iter(groups), -1))
    os.chmod(shared, stat.S_ISGID | 0o700)
    if not os.stat(shared).st_mode & stat.S_ISGID:
        pytest.skip("this directory takes no set-group-ID bit")
    config = config_with(file_mode=0o640, dir_mode=0o750)
    ckptio.sync.save(STATE, shared / "run" / "c", config=config)
    for directory in (shared / "run", shared / "run" / "c"):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o2750
    for name in names_in(shared / "run" / "c"):
        found = os.stat(shared / "run" / "c" / name)
        assert stat.S_IMODE(found.st_mode) == 0o640
        assert found.st_gid == os.stat(shared).st_gid


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_modes_that_cannot_be_set_are_no_obstacle(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    umask: Callable[[int], object],
    code: int,
) -> None:
    """Some mounts have modes of their own."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "chmod", refuse)
    umask(0o027)
    ckptio.sync.save(STATE, tmp_path / "run" / "c", config=config_with(file_mode=0o666))
    assert_same(ckptio.sync.load(tmp_path / "run" / "c"), STATE)


@pytest.mark.parametrize("nth", range(1, 6))
def test_what_cannot_be_given_its_mode_goes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: Callable[[int], object], nth: int
) -> None:
    """Two directories, the attempt's file, the data file and the manifest."""
    chmod, calls = os.chmod, itertools.count(1)

    def fail_once(at: int | str, mode: int) -> None:
        if next(calls) == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        chmod(at, mode)

    monkeypatch.setattr(os, "chmod", fail_once)
    config = config_with(file_mode=0o666, dir_mode=0o777)
    umask(0o027)
    with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
        ckptio.sync.save(STATE, tmp_path / "run" / "c", config=config)
    assert os.listdir(tmp_path) == []


class SharedNames(RecordingFiles):
    """A file system without links, exclusive renames and exchange."""

    def __init__(self) -> None:
        super().__init__(has_links=False, has_exchange=False)

    def rename_to_free(self, source: str, target: str) -> None:
        raise NoExclusiveNames(errno.EINVAL, f"{source}: overwrite=True does without", target)


def test_overwriting_needs_no_exclusive_names(tmp_path: Path) -> None:
    """A first save that may overwrite is a rename; another one says what would do."""
    with engine_with(SharedNames()) as engine:
        with pytest.raises(StorageError, match="overwrite=True does without"):
            engine.save(STATE, tmp_path / "c")
        assert names_in(tmp_path) == []
        for value in (3, 4):
            state = filled_state([5000], value)
            engine.save(state, tmp_path / "c", overwrite=True)
            assert_same(engine.load(tmp_path / "c"), state)


def test_a_path_goes_up_from_where_links_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system has it, not as the text does."""
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "link").symlink_to("../real/sub")
    monkeypatch.chdir(tmp_path / "top")
    ckptio.sync.save(STATE, "link/../c", config=SMALL)
    assert names_in(tmp_path / "top") == ["link"]
    assert (tmp_path / "real" / "c" / "manifest.json").exists()
    assert_same(ckptio.sync.load(tmp_path / "top" / "link" / ".." / "c"), STATE)
    assert absolute("a/./b//c/") == str(tmp_path / "top" / "a" / "b" / "c")
    assert absolute("link/c") == str(tmp_path / "top" / "link" / "c")


def test_a_working_directory_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An absolute path does all the same."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(ConfigError, match="working directory, which is gone"):
        ckptio.sync.save(STATE, "c", config=SMALL)
    ckptio.sync.save(STATE, tmp_path / "c", config=SMALL)


class BrokenDisk(RecordingFiles):
    """Takes the name of a manifest, and nothing afterwards."""

    def fsync_dir(self, path: str) -> None:
        if self.kinds("exchange", "publish"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync_dir(path)

    def exchange(self, path: str, other: str) -> bool:
        self._break()
        return super().exchange(path, other)

    def replace(self, source: str, target: str) -> None:
        self._break()
        super().replace(source, target)

    def unlink(self, path: str) -> None:
        self._break()
        super().unlink(path)

    def _break(self) -> None:
        if self.kinds("exchange", "publish"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_cannot_be_undone_says_that_it_may_stand(
    tmp_path: Path, *, overwrite: bool
) -> None:
    """With the error that came first; what is there loads, whichever it is."""
    if overwrite:
        ckptio.sync.save(filled_state([5000], 4), tmp_path / "c", config=SMALL)
    with (
        engine_with(BrokenDisk()) as engine,
        pytest.raises(StorageError, match=r"Input/output error; but it may stand"),
    ):
        engine.save(STATE, tmp_path / "c", overwrite=overwrite)
    assert_same(ckptio.sync.load(tmp_path / "c"), STATE)
