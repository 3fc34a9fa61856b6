from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from ckptio.storage import linux
from ckptio.storage.files import (
    MAX_TRIES,
    NoExclusiveNames,
    PosixFiles,
    absolute,
    make_dirs,
    read_regular,
    set_mode,
    sync_dirs,
    write_at,
)
from tests.conftest import open_files

if TYPE_CHECKING:
    from pathlib import Path


class VanishingDirs(PosixFiles):
    """Somebody else removes the directory above, so many times."""

    def __init__(self, num_times: int) -> None:
        self.num_left = num_times

    def mkdir(self, path: str, mode: int) -> None:
        above = os.path.dirname(path)
        if self.num_left and os.path.basename(path) == "c":
            self.num_left -= 1
            os.rmdir(above)
        super().mkdir(path, mode)


def test_directories_are_made_though_those_above_go_meanwhile(tmp_path: Path) -> None:
    """The end of a save that failed removes what it had made, and another one begins there."""
    made: list[str] = []
    make_dirs(VanishingDirs(3), f"{tmp_path}/a/b/c", 0o700, made)
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert made[-1] == f"{tmp_path}/a/b/c"
    with pytest.raises(FileNotFoundError):
        make_dirs(VanishingDirs(MAX_TRIES), f"{tmp_path}/d/e/c", 0o700, [])


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    """Not tried for long: it stays."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError):
        make_dirs(PosixFiles(), f"{tmp_path}/file", 0o700, [])
    with pytest.raises(NotADirectoryError):
        make_dirs(PosixFiles(), f"{tmp_path}/file/c", 0o700, [])


def test_a_file_that_comes_in_pieces_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some mounts give less than was asked for; a file that was cut off ends where it does."""
    (tmp_path / "f").write_bytes(bytes(range(100)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: pread(fd, min(nbytes, 7), at))
    assert read_regular(PosixFiles(), str(tmp_path / "f"), 100) == bytes(range(100))
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: pread(fd, min(nbytes, 50 - at), at))
    assert read_regular(PosixFiles(), str(tmp_path / "f"), 100) == bytes(range(50))


def test_what_cannot_be_given_its_mode_is_not_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what turns out to be no file, or cannot be synced."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = open_files()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        PosixFiles().open(f"{tmp_path}/fifo", direct=False)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="in a sync of") as caught:
        PosixFiles().fsync_dir(str(tmp_path))
    assert caught.value.errno == errno.EIO
    monkeypatch.setattr(os, "chmod", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        PosixFiles().create(f"{tmp_path}/f", 0o666, direct=False)
    assert open_files() == before


@pytest.mark.parametrize("writable", [False, True])
def test_what_is_read_may_be_another_users(tmp_path: Path, *, writable: bool) -> None:
    """Nobody asks for more than is needed."""
    (tmp_path / "f").touch()
    fd = PosixFiles().open(f"{tmp_path}/f", direct=False, writable=writable)
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    PosixFiles().close(fd)
    assert mode == (os.O_RDWR if writable else os.O_RDONLY)


def test_a_directory_that_another_made_meanwhile_is_not_ones_own(tmp_path: Path) -> None:
    """Whoever made it removes it."""

    class Slower(PosixFiles):
        def mkdir(self, path: str, mode: int) -> None:
            if path.endswith("theirs"):
                os.mkdir(path)
            super().mkdir(path, mode)

    made: list[str] = []
    make_dirs(Slower(), f"{tmp_path}/ours/theirs/c", 0o700, made)
    assert made == [f"{tmp_path}/ours", f"{tmp_path}/ours/theirs/c"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EINVAL, errno.EIO])
@pytest.mark.parametrize("whose", ["ours", "another's"])
def test_a_directory_that_cannot_be_synced_is_no_error_if_it_is_not_ours_to_sync(
    tmp_path: Path, code: int, whose: str
) -> None:
    """A disk that fails is one wherever it does: another save may have made what this one found."""
    bad = tmp_path / "a" / "b" / "c" if whose == "ours" else tmp_path / "a"
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)

    class Refuses(PosixFiles):
        def fsync_dir(self, path: str) -> None:
            tried.append(path)
            if path == str(bad):
                raise OSError(code, os.strerror(code), path)

    tried: list[str] = []
    is_error = whose == "ours" or code == errno.EIO
    with pytest.raises(OSError, match=os.strerror(code)) if is_error else nullcontext():
        sync_dirs(Refuses(), f"{tmp_path}/a/b/c", [])
    assert str(bad) in tried


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EIO])
def test_a_name_is_given_once_where_a_file_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """By rename; any other failure of a link is one, and so is EIO, but on FUSE: as of rclone."""
    said = code

    def refuse(*_: object) -> None:
        raise OSError(said, os.strerror(said))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(linux, "is_on_fuse", lambda _: True)
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
    PosixFiles().publish(f"{tmp_path}/first", f"{tmp_path}/target")
    assert not (tmp_path / "first").exists()
    with pytest.raises(FileExistsError):
        PosixFiles().publish(f"{tmp_path}/second", f"{tmp_path}/target")
    assert (tmp_path / "target").read_text() == "first"
    for is_fuse, said in ((True, errno.ENOSPC), (False, errno.EIO)):
        monkeypatch.setattr(linux, "is_on_fuse", lambda _, is_fuse=is_fuse: is_fuse)
        with pytest.raises(OSError, match=os.strerror(said)):
            PosixFiles().publish(f"{tmp_path}/second", f"{tmp_path}/free")
        assert not (tmp_path / "free").exists()


def test_a_mode_is_the_one_that_is_asked_for(tmp_path: Path) -> None:
    """Of what a directory has from the one above, only the set-group-ID bit stays."""
    file, directory = tmp_path / "file", tmp_path / "directory"
    file.touch(mode=0o600)
    set_mode(str(file), 0o640)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    directory.mkdir()
    directory.chmod(0o2777)
    set_mode(str(directory), 0o750)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o2750


def test_a_path_goes_up_from_where_links_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And keeps the names of those behind; one that is absolute needs no working directory."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "up").symlink_to("a/b")
    (tmp_path / "a" / "link").symlink_to("b")
    monkeypatch.chdir(tmp_path)
    real = os.path.realpath(tmp_path)
    assert absolute("c") == f"{os.getcwd()}/c"
    assert absolute(f"{tmp_path}/up/../link/c") == f"{real}/a/link/c"
    for path in ("/c", "//c", "/proc/../c", "/../c/"):  # each is one place, and has one name
        assert absolute(path) == "/c"
    assert absolute("/proc/..") == "/"

    def gone() -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "getcwd", gone)
    assert absolute("/c") == "/c"
    with pytest.raises(FileNotFoundError):
        absolute("c")


def test_a_link_does_not_take_the_name_of_another_file(tmp_path: Path) -> None:
    for name in ("source", "target"):
        (tmp_path / name).write_text(name)
    with pytest.raises(FileExistsError):
        PosixFiles().publish(f"{tmp_path}/source", f"{tmp_path}/target")
    assert (tmp_path / "target").read_text() == "target"


@pytest.mark.parametrize("kind", ["fuse.seaweedfs", "fuse.juicefs", ""])
def test_where_links_do_not_last_a_name_is_given_by_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """On SeaweedFS, what is linked is lost to mounts that knew it by the name that goes."""
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = [
        f"1 0 0:0 / / rw - ext4 /dev/0 {number}",
        f"2 1 {number} / {tmp_path} rw master:1 - {kind} server:/ rw",
    ]
    mounts = tmp_path / "mountinfo"
    mounts.write_text("\n".join(lines[: 2 if kind else 1]))
    monkeypatch.setattr(linux, "is_on_fuse", lambda _: True)
    monkeypatch.setattr(linux, "_MOUNTS", str(mounts))
    source, target = tmp_path / "source", tmp_path / "target"
    for path in (source, target):
        path.write_text(path.name)
    with pytest.raises(FileExistsError):
        PosixFiles().publish(str(source), str(target))
    target.unlink()
    PosixFiles().publish(str(source), str(target))
    assert target.read_text() == "source"
    assert source.exists() == (kind != "fuse.seaweedfs")
    with pytest.raises(FileNotFoundError):
        PosixFiles().publish(str(tmp_path / "none"), str(tmp_path / "new"))
    mounts.unlink()  # then nobody can tell
    PosixFiles().publish(str(target), str(tmp_path / "new"))
    assert target.exists()


@pytest.mark.parametrize("call", ["exchange", "rename_to_free"])
def test_only_a_rename_that_is_not_known_may_be_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A disk that fails is told of as it is."""
    code = errno.EINVAL

    def fail(source: str, target: str) -> None:
        raise OSError(code, os.strerror(code), source, None, target)

    monkeypatch.setattr(linux, "rename_exchange", fail)
    monkeypatch.setattr(linux, "rename_noreplace", fail)
    rename = getattr(PosixFiles(), call)
    if call == "exchange":
        assert not rename(f"{tmp_path}/a", f"{tmp_path}/b")
    else:
        with pytest.raises(NoExclusiveNames):
            rename(f"{tmp_path}/a", f"{tmp_path}/b")
    code = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        rename(f"{tmp_path}/a", f"{tmp_path}/b")
    assert not isinstance(caught.value, NoExclusiveNames)


def test_what_is_written_in_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that takes nothing more is no reason to wait for ever."""
    data = bytes(range(100))
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, part, at: pwrite(fd, part[:7], at))
    with open(tmp_path / "f", "wb") as file:
        write_at(file.fileno(), data, 3)
        assert (tmp_path / "f").read_bytes() == bytes(3) + data
        monkeypatch.setattr(os, "pwrite", lambda *_: 0)
        with pytest.raises(OSError, match="wrote nothing of 100 bytes"):
            write_at(file.fileno(), data, 3)
