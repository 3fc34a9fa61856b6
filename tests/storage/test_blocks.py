from __future__ import annotations

import errno
import fcntl
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptio.errors import CorruptionError, StorageError
from ckptio.storage import blocks, linux
from ckptio.storage.blocks import BlockReader, BlockWriter, storage_error, write_file
from ckptio.storage.linux import finish_writeback, num_cached_pages, start_writeback
from ckptio.testing import RecordingFiles, fail_kind
from tests.rig import SMALL, config_with, page_aligned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptio.testing.faults import Operation
    from ckptio.testing.files import RefuseDirect

pytestmark = pytest.mark.usefixtures("no_leaks")
REFUSALS: list[RefuseDirect] = ["", "open", "open-after-create", "align", "write", "read"]


def write(
    files: RecordingFiles, path: Path, data: bytes, step: int = 8192, **options: Any
) -> list[str]:
    """Write a file in ranges; give why direct I/O was refused, if it was."""
    refused: list[str] = []
    writer = BlockWriter(files, str(path), len(data), config_with(**options), refused.append)
    try:
        with page_aligned(data) as view:
            for start in range(0, len(data), step):
                writer.pwrite(start, view[start : min(start + step, len(data))])
        writer.close()
    finally:
        writer.discard()
    return refused


def read(
    files: RecordingFiles, path: Path, nbytes: int, *, direct: bool = True, at: int = 0
) -> bytes:
    """Read a file in one range."""
    reader = BlockReader(files, str(path), name="data", nbytes=at + nbytes, direct=direct)
    try:
        with page_aligned(bytes(-(-nbytes // 4096) * 4096)) as room:
            reader.pread_into(at, room, nbytes)
            return bytes(room[:nbytes])
    finally:
        reader.close()


def bytes_of(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def test_an_error_without_a_number_is_told_by_its_words() -> None:
    """As some mounts give it."""
    assert "cannot read: no such share" in str(
        storage_error(OSError("no such share"), "c", "cannot read")
    )
    error = storage_error(OSError(errno.EIO, "broken"), "c", "cannot read")
    assert (error.errno, error.filename) == (errno.EIO, "c")


@pytest.mark.parametrize("refuse", REFUSALS)
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 20_000, 65536])
def test_any_size_is_written_and_read(tmp_path: Path, refuse: RefuseDirect, nbytes: int) -> None:
    """The bytes and the size are right, wherever direct I/O is refused."""
    files = RecordingFiles(refuse_direct=refuse)
    data = bytes_of(nbytes)
    refused = write(files, tmp_path / "f", data)
    assert (tmp_path / "f").read_bytes() == data
    assert len(refused) == (refuse in ("open", "open-after-create", "align", "write"))
    assert read(files, tmp_path / "f", nbytes) == data
    assert files.num_open == 0


def test_what_pages_do_not_fit_is_written_through_the_page_cache(tmp_path: Path) -> None:
    """The flag goes from the open file; else the system refuses each write."""
    files = RecordingFiles(refuse_direct="align")
    write(files, tmp_path / "f", bytes_of(9000))
    kinds = [kind for kind, _ in files.kinds()]
    assert kinds.index("set_buffered") < kinds.index("pwrite")


class RefusingWhatWasOpened(RecordingFiles):
    """A mount that refuses direct writes, and goes by the flags a file was opened with."""

    def create(self, path: str, mode: int, *, direct: bool) -> int:
        fd = super().create(path, mode, direct=direct)
        if direct:  # it belongs to what was opened, not to the descriptor
            fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        return fd

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETOWN):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().pwrite(fd, data, offset)


def test_a_mount_that_goes_by_the_flags_of_opening_is_written_to(tmp_path: Path) -> None:
    """As mergerfs does: the file below is open as it was at first."""
    data = bytes_of(20_000)
    assert len(write(RefusingWhatWasOpened(), tmp_path / "f", data)) == 1
    assert (tmp_path / "f").read_bytes() == data


@pytest.mark.parametrize("refuse", ["", "open", "write"])
@pytest.mark.parametrize("limit", [1, 512, 1536, 4096, 5000, 6144])
def test_short_writes_are_completed(tmp_path: Path, refuse: RefuseDirect, limit: int) -> None:
    """However little the system takes at a time, everything is written and nothing hangs."""
    files = RecordingFiles(refuse_direct=refuse, max_transfer_nbytes=limit)
    data = bytes_of(13_000)
    write(files, tmp_path / "f", data)
    assert (tmp_path / "f").read_bytes() == data


@pytest.mark.parametrize("refuse", ["", "open", "read"])
@pytest.mark.parametrize("limit", [1, 512, 1536, 4096, 5000, 6144])
def test_short_reads_are_completed(tmp_path: Path, refuse: RefuseDirect, limit: int) -> None:
    """However little the system gives at a time, everything is read and nothing hangs."""
    data = bytes_of(13_000)
    write(RecordingFiles(), tmp_path / "f", data)
    drop_cache(tmp_path / "f")
    files = RecordingFiles(refuse_direct=refuse, max_transfer_nbytes=limit)
    assert read(files, tmp_path / "f", len(data)) == data


def drop_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("cold", [True, False])
def test_a_file_that_was_cut_meanwhile_is_damage(
    tmp_path: Path, *, direct: bool, cold: bool
) -> None:
    """Fewer bytes than the manifest promised raise, at any place of the cut; no hang."""
    for kept, at in ((0, 0), (1000, 0), (4096, 0), (5000, 0), (5000, 4096), (9000, 4096)):
        (tmp_path / "f").write_bytes(bytes_of(kept))
        if cold:
            drop_cache(tmp_path / "f")
        with pytest.raises(CorruptionError, match=f"ends at byte {kept} and") as caught:
            read(RecordingFiles(), tmp_path / "f", 9000, direct=direct, at=at)
        assert caught.value.file == "data"
        assert (caught.value.start, caught.value.stop) == (kept, at + 9000)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    nbytes=st.integers(1, 200_000),
    seed=st.integers(0, 1000),
    limit=st.sampled_from([None, 777, 4096, 10_000]),
    refuse=st.sampled_from(["", "open", "align", "write"]),
)
def test_ranges_may_come_in_any_order_from_any_thread(
    tmp_path_factory: pytest.TempPathFactory,
    nbytes: int,
    seed: int,
    limit: int | None,
    refuse: RefuseDirect,
) -> None:
    """Four threads that write slabs in random order make the same file."""
    path = tmp_path_factory.mktemp("any") / "f"
    data = random.Random(seed).randbytes(nbytes)
    files = RecordingFiles(refuse_direct=refuse, max_transfer_nbytes=limit)
    refused: list[str] = []
    writer = BlockWriter(files, str(path), nbytes, SMALL, refused.append)
    starts = list(range(0, nbytes, 4096 * 3))
    random.Random(seed).shuffle(starts)
    with page_aligned(data) as view, ThreadPoolExecutor(4) as threads:

        def put(start: int) -> None:
            writer.pwrite(start, view[start : min(start + 4096 * 3, nbytes)])

        list(threads.map(put, starts))
    writer.close()
    assert path.read_bytes() == data
    # a file system refuses once a file, however many threads it tells
    assert len(refused) <= 1


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    ("kind", "doing"),
    [
        ("create", "cannot write"),
        ("allocate", "cannot write"),
        ("pwrite", "cannot write"),
        ("truncate", "cannot finish"),
        ("fsync", "cannot finish"),
        ("close", "cannot finish"),
    ],
)
@pytest.mark.parametrize("nbytes", [100, 4096, 9000])
def test_a_failing_operation_says_what_where_and_why(
    tmp_path: Path, kind: str, doing: str, code: int, nbytes: int
) -> None:
    """Every operation's error comes out typed, with errno and file name, and frees the file."""
    files = RecordingFiles(fail_kind(kind, code))
    with pytest.raises(StorageError, match=doing) as caught:
        write(files, tmp_path / "f", bytes_of(nbytes))
    assert caught.value.errno == code
    assert caught.value.filename == str(tmp_path / "f")
    assert isinstance(caught.value.__cause__, OSError)
    assert files.num_open == 0
    if doing == "cannot finish":  # the system says it once: nobody may trust what is there
        assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("look", range(3))
def test_a_file_that_was_spoiled_while_another_thread_found_the_disk_full_goes(
    tmp_path: Path, look: int
) -> None:
    """What one thread found of a file is not taken back by what another one did not find."""
    codes = iter([0, errno.ENOSPC, errno.EIO])  # the first range is written
    looks: list[int | None] = []

    class FullError(OSError):
        """Another thread fails while this one looks at what it got."""

        @property
        def errno(self) -> int:  # type: ignore[override]
            looks.append(None)
            if len(looks) == look + 1:
                with pytest.raises(StorageError) as other:
                    writer.pwrite(8192, view[8192:12_288])
                looks[look] = other.value.errno
            return errno.ENOSPC

    def fault(operation: Operation) -> None:
        code = next(codes, 0) if operation.kind == "pwrite" else 0
        if code:
            raise FullError if code == errno.ENOSPC else OSError(code, os.strerror(code))

    files = RecordingFiles(fault)
    writer = BlockWriter(files, str(tmp_path / "f"), 12_288, SMALL, print)
    with page_aligned(bytes_of(12_288)) as view:
        writer.pwrite(0, view[:4096])
        with pytest.raises(StorageError):
            writer.pwrite(4096, view[4096:8192])
    writer.discard()
    assert looks[look] == errno.EIO
    assert not (tmp_path / "f").exists()


def test_a_failing_read_says_what_where_and_why(tmp_path: Path) -> None:
    """A read error is a `StorageError`, not damage."""
    write(RecordingFiles(), tmp_path / "f", bytes_of(5000))
    files = RecordingFiles(fail_kind("pread"))
    with pytest.raises(StorageError, match="cannot read at byte 0") as caught:
        read(files, tmp_path / "f", 5000)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "f"))
    assert files.num_open == 0


def test_what_the_disk_does_not_give_is_not_asked_for_again(tmp_path: Path) -> None:
    """Past the page cache or through it: a disk that fails takes minutes to say so."""
    path = tmp_path / "f"
    write(RecordingFiles(), path, bytes_of(5000))
    require_direct(path)
    drop_cache(path)
    files = RecordingFiles(fail_kind("pread"))
    with pytest.raises(StorageError):
        read(files, path, 5000)
    assert len(files.kinds("pread")) == 1


def test_what_was_read_counts_though_its_file_cannot_be_closed(tmp_path: Path) -> None:
    """It was verified by then."""
    (tmp_path / "f").write_bytes(bytes_of(9000))
    files = RecordingFiles(fail_kind("close"))
    assert read(files, tmp_path / "f", 9000) == bytes_of(9000)
    assert len(files.kinds("close")) > 1
    assert files.num_open == 0


def test_a_system_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    """Zero bytes written, again and again, do not become a busy wait."""
    files = RecordingFiles(max_transfer_nbytes=0)
    with pytest.raises(StorageError) as caught:
        write(files, tmp_path / "f", bytes_of(100))
    assert caught.value.errno == errno.EIO
    with pytest.raises(OSError, match="the system wrote 0 bytes"):
        write_file(files, str(tmp_path / "small"), bytes_of(100), SMALL)


@pytest.mark.parametrize(("nbytes", "room_nbytes"), [(4096, 4096), (9000, 12_288)])
def test_room_is_reserved_before_the_first_byte(
    tmp_path: Path, nbytes: int, room_nbytes: int
) -> None:
    """Of whole pages, as they are written: a disk without it says so at once."""
    files = RecordingFiles()
    write(files, tmp_path / "f", bytes_of(nbytes))
    kinds = [operation.kind for operation in files.operations]
    first = kinds.index("allocate")
    assert files.operations[first].nbytes == room_nbytes
    assert "pwrite" not in kinds[:first]


def test_a_cached_file_is_read_from_the_cache(tmp_path: Path) -> None:
    """What is in the page cache is not read past it, where the kernel can tell."""
    data = bytes_of(40_960)
    (tmp_path / "f").write_bytes(data)
    kinds: list[bool] = []

    class Files(RecordingFiles):
        def pread(self, fd: int, room: memoryview, offset: int) -> int:
            kinds.append(fd in self._direct_fds)
            return super().pread(fd, room, offset)

    assert read(Files(), tmp_path / "f", len(data)) == data
    with open(tmp_path / "f", "rb") as file:
        is_told = num_cached_pages(file.fileno(), 0, len(data)) == 10
    assert kinds == [False] or not is_told


@pytest.mark.parametrize(
    ("durability", "expected"), [("full", True), ("file", True), ("none", False)]
)
def test_a_file_is_synced_at_its_end_if_asked(
    tmp_path: Path, durability: str, *, expected: bool
) -> None:
    """`durability` decides about the file's own sync, which comes after its last byte."""
    files = RecordingFiles()
    write(files, tmp_path / "f", bytes_of(9000), durability=durability)
    kinds = [kind for kind, _ in files.kinds()]
    assert ("fsync" in kinds) is expected
    if expected:
        assert kinds.index("fsync") > max(i for i, k in enumerate(kinds) if k == "pwrite")
        assert kinds.index("fsync") > kinds.index("truncate")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_has_the_mode_of_the_option(
    tmp_path: Path, mode: int, umask: Callable[[int], None]
) -> None:
    """Whatever the umask."""
    for mask in (0o000, 0o077, 0o777):
        umask(mask)
        path = tmp_path / f"f{mask}"
        write(RecordingFiles(), path, b"x", file_mode=mode)
        assert os.stat(path).st_mode & 0o7777 == mode


@pytest.mark.parametrize("kind", ["directory", "link", "dangling", "fifo"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    """A directory, a link or a FIFO in a file's place is refused, and does not block."""
    path = tmp_path / "f"
    plant(path, kind, tmp_path)
    with pytest.raises(OSError):  # noqa: PT011  # which errno is the system's choice
        BlockReader(RecordingFiles(), str(path), name="f", nbytes=1, direct=True)


def plant(path: Path, kind: str, elsewhere: Path) -> None:
    """Put something that is no regular file at a path."""
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        target = elsewhere / "target"
        if kind == "link":
            target.write_bytes(b"x" * 100)
        path.symlink_to(target)


def test_a_taken_name_is_never_written_over(tmp_path: Path) -> None:
    """A file that is there already, or a link, is an error and keeps its bytes."""
    (tmp_path / "f").write_text("mine")
    (tmp_path / "link").symlink_to("f")
    for name in ("f", "link"):
        with pytest.raises(StorageError) as caught:
            write(RecordingFiles(), tmp_path / name, b"x")
        assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "f").read_text() == "mine"


def test_a_small_file_is_written_whole_however_little_is_taken_at_a_time(tmp_path: Path) -> None:
    """A manifest is one."""
    data = bytes_of(100)
    write_file(RecordingFiles(max_transfer_nbytes=7), str(tmp_path / "f"), data, SMALL)
    assert (tmp_path / "f").read_bytes() == data


def test_a_reader_is_closed_once(tmp_path: Path) -> None:
    """By then its number may be that of another file."""
    (tmp_path / "f").write_bytes(bytes_of(9000))
    files = RecordingFiles()
    reader = BlockReader(files, str(tmp_path / "f"), name="f", nbytes=9000, direct=True)
    reader.close()
    num = len(files.kinds("close"))
    reader.close()
    assert len(files.kinds("close")) == num > 0
    assert files.num_open == 0


def test_a_file_that_takes_the_name_meanwhile_is_not_read(tmp_path: Path) -> None:
    """What is read is what `status` tells of, past the page cache, too."""
    path, data = tmp_path / "f", bytes_of(9000)
    path.write_bytes(data)
    drop_cache(path)

    class Files(RecordingFiles):
        def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
            if direct:
                (tmp_path / "new").write_bytes(bytes(9000))
                os.replace(tmp_path / "new", path)
            return super().open(path, direct=direct, writable=writable)

    files = Files()
    assert read(files, path, len(data)) == data
    assert path.read_bytes() == bytes(9000)
    assert files.num_open == 0


def test_direct_io_can_be_switched_off(tmp_path: Path) -> None:
    """With `direct_io="off"` it is never asked for, and nothing is refused."""
    asked: list[bool] = []

    class Files(RecordingFiles):
        def create(self, path: str, mode: int, *, direct: bool) -> int:
            asked.append(direct)
            return super().create(path, mode, direct=direct)

    assert write(Files(), tmp_path / "f", bytes_of(9000), direct_io="off") == []
    assert asked == [False]


def test_much_is_pushed_out_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the page cache, write-back begins early and old ranges are waited for."""
    monkeypatch.setattr(blocks, "_WINDOW_NBYTES", 16384)
    started, finished = [], []

    def start(fd: int, offset: int, nbytes: int) -> None:
        started.append((offset, nbytes))
        start_writeback(fd, offset, nbytes)

    def finish(fd: int, offset: int, nbytes: int) -> None:
        finished.append((offset, nbytes))
        finish_writeback(fd, offset, nbytes)

    monkeypatch.setattr(linux, "start_writeback", start)
    monkeypatch.setattr(linux, "finish_writeback", finish)
    data = bytes_of(100_000)
    write(RecordingFiles(), tmp_path / "f", data, direct_io="off")
    assert (tmp_path / "f").read_bytes() == data
    ranges = [(at, min(8192, len(data) - at)) for at in range(0, len(data), 8192)]
    assert started == ranges
    assert finished == ranges[:-2]  # what is left of the window
    started.clear()
    write(RecordingFiles(), tmp_path / "g", data, direct_io="off", durability="none")
    assert not started


@pytest.mark.parametrize("stays", [False, True])
def test_what_was_waited_for_leaves_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, stays: bool
) -> None:
    """Nothing but what is in the window drives other things out; unless that was asked for."""
    monkeypatch.setattr(blocks, "_WINDOW_NBYTES", 64 << 10)
    path, data = tmp_path / "f", bytes_of(1 << 20)
    with open(tmp_path / "other", "wb+", buffering=0) as file:
        require_disk(file.fileno())
        if not stays:
            require_write_back(file.fileno())
    files = RecordingFiles(refuse_direct="open")
    write(files, path, data, direct_io="off" if stays else "auto")
    with path.open("rb") as file:
        num_cached = num_cached_pages(file.fileno(), 0, 1 << 20)
    assert num_cached is not None
    assert num_cached * 4096 == len(data) if stays else num_cached * 4096 <= 2 * (64 << 10)


@pytest.mark.parametrize("is_cached", [False, True])
def test_what_is_not_cached_is_read_past_the_page_cache(tmp_path: Path, *, is_cached: bool) -> None:
    """Which leaves other people's pages alone; what is there is taken from there."""
    is_direct = []

    class Files(RecordingFiles):
        def pread(self, fd: int, room: memoryview, offset: int) -> int:
            is_direct.append(fd in self._direct_fds)
            return super().pread(fd, room, offset)

    path, data = tmp_path / "f", bytes_of((1 << 20) - 96)
    with open(path, "wb+", buffering=0) as file:
        require_disk(file.fileno())
        require_direct(path)
        file.write(data)
        os.fsync(file.fileno())
        if not is_cached:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert read(Files(), path, len(data)) == data
        assert is_direct == [not is_cached]
        assert bool(num_cached_pages(file.fileno(), 0, len(data))) is is_cached


@pytest.mark.parametrize("num_cached", [5, 8])
def test_a_range_of_which_little_is_cached_is_read_past_the_page_cache(
    tmp_path: Path, num_cached: int
) -> None:
    """And through it where that has most: the rest comes along."""
    path, data = tmp_path / "f", bytes_of(14 * 4096)
    path.write_bytes(data)
    with open(path, "rb+") as file:
        require_disk(file.fileno())
        require_direct(path)
        file.write(data)
        file.flush()
        drop_cache(path)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        for page in range(num_cached):
            os.pread(file.fileno(), 1, page * 4096)
        if num_cached_pages(file.fileno(), 0, len(data)) != num_cached:
            pytest.skip("this file system reads more than it is asked for")
        assert read(RecordingFiles(), path, len(data)) == data
        is_all = num_cached_pages(file.fileno(), 0, len(data)) == 14
    assert is_all is (num_cached > 7)


def require_write_back(fd: int) -> None:
    """Skip where nothing is written to the disk before `fsync`."""
    os.pwrite(fd, bytes(4096), 0)
    finish_writeback(fd, 0, 4096)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if num_cached_pages(fd, 0, 4096):
        pytest.skip("this file system writes nothing back early, as overlayfs does not")


def require_direct(path: Path) -> None:
    """Skip where the file system refuses direct I/O."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"this file system refuses direct I/O: {error}")


def require_disk(fd: int) -> None:
    """Skip where files are in memory only, or the kernel does not tell."""
    pages = num_cached_pages(fd, 0, 1 << 20)
    if pages is None:
        pytest.skip("this kernel does not tell what is in the page cache")
    os.pwrite(fd, bytes(4096), 0)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if num_cached_pages(fd, 0, 4096):
        pytest.skip("this file system keeps its files in memory")


def test_tmpfs_is_written_whatever_it_says_to_direct_io(tmpfs: Path) -> None:
    """On memory-backed storage the bytes are right, refused or not."""
    data = bytes_of(70_001)
    write(RecordingFiles(), tmpfs / "f", data)
    assert (tmpfs / "f").read_bytes() == data
    assert read(RecordingFiles(), tmpfs / "f", len(data)) == data


def test_a_reader_says_whether_its_file_is_cached(tmp_path: Path) -> None:
    """It is after a write through the page cache, and is not once it was dropped from there."""
    path = tmp_path / "f"
    with open(path, "wb+", buffering=0) as file:
        require_disk(file.fileno())
        file.write(bytes_of(1 << 20))
        assert is_cached(path)
        drop_cache(path)
        assert not is_cached(path)
        os.pread(file.fileno(), 1 << 16, (1 << 20) - (1 << 16))
    assert not is_cached(path)
    assert is_cached(path, start=(1 << 20) - (1 << 16))  # all of what is wanted


def test_where_nobody_can_tell_what_is_cached_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another user's files before Linux 6.5, say."""
    (tmp_path / "f").write_bytes(bytes_of(9000))
    monkeypatch.setattr(linux, "num_cached_pages", lambda *_: None)
    assert not is_cached(tmp_path / "f")
    assert read(RecordingFiles(), tmp_path / "f", 9000) == bytes_of(9000)


def is_cached(path: Path, start: int = 0) -> bool:
    nbytes = path.stat().st_size
    reader = BlockReader(
        RecordingFiles(), str(path), name="f", nbytes=nbytes, direct=True, start=start
    )
    try:
        return reader.is_cached
    finally:
        reader.close()
