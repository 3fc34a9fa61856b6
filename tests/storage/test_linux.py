from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
from typing import TYPE_CHECKING

import pytest

from ckptio.storage import linux

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield file
    os.close(file)


def test_alignment_is_a_power_of_two_where_the_kernel_says(fd: int) -> None:
    """What `statx` answers for direct I/O can be used as it is, or is nothing."""
    alignment = linux.direct_alignment(fd)
    if alignment is not None and alignment.offset:
        assert alignment.offset & (alignment.offset - 1) == 0
        assert alignment.memory & (alignment.memory - 1) == 0


def test_alignment_of_no_file_is_nothing() -> None:
    """A bad descriptor is no error here: the open that follows will say it."""
    assert linux.direct_alignment(-1) is None


@pytest.mark.parametrize("opens", [True, False])
def test_direct_io_is_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, opens: bool
) -> None:
    """On the same descriptor, which children do not inherit; also where nothing can be opened."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    num_open = len(os.listdir("/proc/self/fd"))
    try:
        if not opens:
            monkeypatch.setattr(os, "open", lambda *_: os.stat(tmp_path / "no proc"))
        linux.set_buffered(fd)
        monkeypatch.undo()
        assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        assert os.pwrite(fd, b"x", 1) == 1
        assert not os.get_inheritable(fd)
        assert os.path.samestat(os.fstat(fd), os.stat(tmp_path / "file"))
        assert len(os.listdir("/proc/self/fd")) == num_open
    finally:
        os.close(fd)


@pytest.fixture(params=["cachestat", "before Linux 6.5"])
def asking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for what is in the page cache in one way, or the other."""
    if request.param != "cachestat":
        monkeypatch.setattr(linux, "_SYS_CACHESTAT", -1)


@pytest.mark.usefixtures("asking")
def test_pages_just_written_are_in_the_page_cache(fd: int) -> None:
    """Every page of what was just written is counted, wherever it begins, and no other."""
    os.pwrite(fd, bytes(5 * mmap.PAGESIZE), 0)
    assert linux.num_cached_pages(fd, mmap.PAGESIZE, 3 * mmap.PAGESIZE) == 3
    assert linux.num_cached_pages(fd, mmap.PAGESIZE + 100, 2 * mmap.PAGESIZE) == 3
    assert linux.num_cached_pages(fd, mmap.PAGESIZE, 1) == 1
    assert linux.num_cached_pages(fd, 4 * mmap.PAGESIZE, 3 * mmap.PAGESIZE) == 1
    assert linux.num_cached_pages(fd, 1 << 30, mmap.PAGESIZE) == 0


@pytest.mark.usefixtures("asking")
def test_of_what_is_no_file_nobody_can_tell() -> None:
    """What has no pages has none there; what is not open has nothing."""
    read, write = os.pipe()
    assert not linux.num_cached_pages(read, 0, 1)
    os.close(read)
    os.close(write)
    assert linux.num_cached_pages(write, 0, 1) is None
    assert not linux.is_on_fuse(write)


def test_of_another_users_file_a_map_tells_nothing(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would say that all is there, unless one may write to it."""
    os.pwrite(fd, bytes(mmap.PAGESIZE), 0)
    monkeypatch.setattr(linux, "_SYS_CACHESTAT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: os.fstat(fd).st_uid + 1)
    assert linux.num_cached_pages(fd, 0, mmap.PAGESIZE) == 1  # root may write to any
    monkeypatch.setattr(os, "access", lambda *_: False)
    for has_power, count in ((True, 1), (False, None)):  # whether root or not
        monkeypatch.setattr(linux, "has_power_of_owners", lambda has_power=has_power: has_power)
        assert linux.num_cached_pages(fd, 0, mmap.PAGESIZE) == count


def test_the_power_of_owners_is_what_the_kernel_says() -> None:
    with open("/proc/thread-self/status", encoding="ascii") as file:
        (powers,) = (line.split()[1] for line in file if line.startswith("CapEff"))
    assert linux.has_power_of_owners() == bool(int(powers, 16) & 8)


def test_root_of_a_user_namespace_is_told_nothing_of_files_of_others(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without root: the kernel would say that all is there."""
    os.pwrite(fd, bytes(mmap.PAGESIZE), 0)
    monkeypatch.setattr(linux, "_SYS_CACHESTAT", -1)
    monkeypatch.setattr(linux, "has_power_of_owners", lambda: True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    status = os.fstat(fd)
    for owner, count in ((os.geteuid() + 1, 1), (65534, None)):
        found = os.stat_result((*status[:4], owner, *status[5:]))
        monkeypatch.setattr(os, "fstat", lambda _, found=found: found)
        assert linux.num_cached_pages(fd, 0, mmap.PAGESIZE) == count


def test_of_overlayfs_a_map_is_asked(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files have no pages of their own."""
    monkeypatch.setattr(linux, "_num_mapped_pages", lambda *_: 7)
    assert linux.num_cached_pages(fd, 0, mmap.PAGESIZE) in (0, 7)
    monkeypatch.setattr(os, "major", lambda _: 0)
    monkeypatch.setattr(linux, "_file_systems", {os.fstat(fd).st_dev: 0x794C7630})
    assert linux.num_cached_pages(fd, 0, mmap.PAGESIZE) == 7


@pytest.mark.usefixtures("asking", "no_collections")
def test_asking_the_kernel_leaves_no_circle(fd: int) -> None:
    """Types of arrays are classes: made anew at each call, they are garbage for the collector."""
    os.write(fd, b"x" * 4096)

    def ask() -> None:
        linux.num_cached_pages(fd, 0, 4096)
        linux.is_of_this_host(fd)
        linux.direct_alignment(fd)

    ask()
    while gc.collect():  # what other tests left may take several turns, one for each finalizer
        pass
    for _ in range(10):
        ask()
    assert gc.collect() == 0


def test_allocating_sets_the_size_or_says_no(fd: int) -> None:
    """Room is reserved without a byte being written."""
    done = linux.allocate(fd, 1 << 20)
    assert os.fstat(fd).st_size == (1 << 20 if done else 0)


def test_allocating_more_than_there_is_raises(fd: int) -> None:
    """No room is told before anything is written, with its errno."""
    # far beyond what any file system takes: one that merely is too small would be filled
    with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is looked at
        linux.allocate(fd, 1 << 62)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)


def test_a_bad_descriptor_cannot_allocate() -> None:
    """The system's refusal comes out as the error it is."""
    with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is looked at
        linux.allocate(-1, 4096)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("code", [errno.EINTR, 524, errno.ENODEV, errno.EPERM, errno.EOPNOTSUPP])
def test_a_mount_may_refuse_to_allocate_for_any_reason(
    fd: int, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """524 is the kernel's own ENOTSUPP, which some mounts let out; writing does without."""

    class Libc:
        def fallocate(self, *_: object) -> int:
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(linux, "_libc", Libc())
    assert not linux.allocate(fd, 4096)


def test_a_write_back_that_fails_is_told_of() -> None:
    """The system says it once."""
    for call in (linux.start_writeback, linux.finish_writeback):
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            call(-1, 0, 4096)


def test_write_back_loses_nothing(fd: int) -> None:
    """Pushing a range out and dropping it from the cache leaves its bytes in the file."""
    os.pwrite(fd, b"x" * 8192, 0)
    linux.start_writeback(fd, 0, 8192)
    linux.finish_writeback(fd, 0, 8192)
    assert os.pread(fd, 8192, 0) == b"x" * 8192


def test_rename_without_replacing(tmp_path: Path) -> None:
    """A free name is taken; a taken one raises and both files stay."""
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    with pytest.raises(FileExistsError):
        linux.rename_noreplace(str(tmp_path / "a"), str(tmp_path / "b"))
    linux.rename_noreplace(str(tmp_path / "a"), str(tmp_path / "c"))
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"b": "b", "c": "a"}


def test_names_are_exchanged(tmp_path: Path) -> None:
    """Two names change their files in one step; a missing one raises and changes nothing."""
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    linux.rename_exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "b", "b": "a"}
    with pytest.raises(FileNotFoundError):
        linux.rename_exchange(str(tmp_path / "a"), str(tmp_path / "nothing"))
    assert (tmp_path / "a").read_text() == "b"
