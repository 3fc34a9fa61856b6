"""One file written or read in large blocks, past the page cache where that is possible.

Direct I/O writes this kind of data 3 to 5 times as fast as the page cache with a tenth
of the CPU: nothing is copied, no page is looked up, and no flush waits at the end. It
wants addresses, offsets and lengths that are multiples of the file system's block; slabs
and segments are, and the last few bytes of a file go through a page of their own that is
cut off at the end. Where a file system refuses (tmpfs, some network mounts), the page
cache is used with early write-back, in windows, so that the final sync finds little to do;
what is on the disk leaves it again, and makes room for what comes. With `direct_io="off"` it
stays, for a load that follows.

Reads look first: blocks that are in the page cache are taken from there, at memory
speed, or lent where they lie; others are read directly, which leaves other people's pages
alone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from ckptio.config import PAGE_NBYTES, MiB
from ckptio.errors import CorruptionError, StorageError
from ckptio.storage import linux
from ckptio.storage.freeing import with_room
from ckptio.storage.lending import Lender
from ckptio.storage.obstacles import obstacle_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from ckptio.config import CheckpointConfig
    from ckptio.storage.files import PosixFiles
    from ckptio.storage.streams import Lent

_WINDOW_NBYTES = 64 * MiB
#: A file of which less is in the page cache is read as from a disk, many ranges at a time.
_CACHED_SHARE = 0.95
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def storage_error(error: OSError, path: str, doing: str, *, writes: bool = True) -> StorageError:
    """Say what was being done when the system said `error`; `writes` as for `obstacle_in`."""
    code = error.errno or errno.EIO
    said = obstacle_in(path, code, writes=writes) or error.strerror or error
    return StorageError(f"{doing}: {said}", path=path, code=code)


def keep_file(files: PosixFiles, path: str, nbytes: int, config: CheckpointConfig) -> None:
    """Check the size of a file that another process wrote, and sync it as configured. Blocks.

    Raises:
        StorageError: It has another size, is not there, or cannot be synced.
    """
    try:
        fd = files.open(path, direct=False)
        try:
            if os.fstat(fd).st_size != nbytes:
                raise OSError(errno.ESTALE, f"it does not have {nbytes} bytes any more")
            if config.durability != "none":
                files.fsync(fd)
        finally:
            files.close(fd)
    except OSError as error:
        raise storage_error(error, path, "cannot take a data file over") from error


def write_file(files: PosixFiles, path: str, data: bytes, config: CheckpointConfig) -> None:
    """Write a small new file, and sync it as configured. Blocks.

    Raises:
        OSError: As the system gives it.
    """
    fd = with_room(files.create, path, config.file_mode, direct=False)
    try:
        view = memoryview(data)
        done = 0
        while done < len(view):
            written = with_room(files.pwrite, fd, view[done:], done)
            if written <= 0:
                raise OSError(errno.EIO, f"the system wrote {written} bytes", path)
            done += written
        if config.durability != "none":
            files.fsync(fd)
    finally:
        files.close(fd)


class BlockWriter:
    """A new file, written once, in ranges from several threads.

    Args:
        files: Operations to use.
        path: The file; made at the first write.
        nbytes: Its final size.
        config: For direct I/O, durability and modes.
        on_refused: Called with the reason if direct I/O is refused.
        make_dir: Makes the directory again if it is gone at the first write.
    """

    def __init__(
        self,
        files: PosixFiles,
        path: str,
        nbytes: int,
        config: CheckpointConfig,
        on_refused: Callable[[str], None],
        make_dir: Callable[[], None] | None = None,
    ) -> None:
        self._files = files
        self._path = path
        self._make_dir = make_dir
        self._nbytes = nbytes
        self._config = config
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._fd = -1
        self._direct = config.direct_io == "auto"
        self._window: deque[tuple[int, int]] = deque()
        self._window_nbytes = 0
        self._is_spoiled = False

    def pwrite(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset`; see `streams.Sink`."""
        try:
            self._open()
            if self._direct and self._write_direct(offset, data):
                return
            self._write(offset, data)
            if self._config.durability != "none":
                self._push_out(offset, len(data))
        except OSError as error:
            # without a file its name was another's, and on a full disk what is written is good
            if self._fd >= 0 and error.errno not in _FULL:
                self._is_spoiled = True  # only ever set: another thread may fail meanwhile
            raise storage_error(error, self._path, f"cannot write at byte {offset}") from error

    def close(self) -> None:
        """Cut off padding, sync as configured, and close; see `streams.Sink`."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            try:
                self._cut_off(fd)
                if self._config.durability != "none":
                    self._files.fsync(fd)
            finally:
                self._files.close(fd)
        except OSError as error:
            self._is_spoiled = True
            raise storage_error(error, self._path, "cannot finish the file") from error

    def _cut_off(self, fd: int) -> None:
        """Give the file its size: it has room for whole pages."""
        self._files.truncate(fd, self._nbytes)

    def discard(self) -> None:
        """Close without finishing; remove a file that the system failed to write or sync.

        It says so once, and takes the pages for clean from then on: whoever found the file later
        would read them, sync it with success, and lose them to a power cut.
        """
        with self._lock:
            fd, self._fd = self._fd, -1
        try:
            if fd >= 0:
                self._files.close(fd)
        finally:
            if self._is_spoiled and self._may_remove():
                self._files.unlink(self._path)

    def _may_remove(self) -> bool:
        """Whether the file is nobody else's: it was made here, under a name made for it."""
        return True

    def _open(self) -> None:
        """Make the file, at the first write of any thread."""
        with self._lock:
            if self._fd >= 0:
                return
            try:
                self._create()
            except FileNotFoundError:  # the end of another save took the empty directory along
                if self._make_dir is None:
                    raise
                self._make_dir()
                self._create()

    def _create(self) -> None:
        """Make the file."""
        mode = self._config.file_mode
        fd = -1
        if self._direct:
            try:
                fd = with_room(self._files.create, self._path, mode, direct=True)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._refuse(f"open: {error.strerror}")
                # some file systems make the file, then refuse the flag
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(self._path)
        if fd < 0:
            fd = with_room(self._files.create, self._path, mode, direct=False)
        self._fd = fd
        if self._direct and not self._is_aligned(fd):
            self._files.set_buffered(fd)
        with_room(self._files.allocate, fd, -(-self._nbytes // PAGE_NBYTES) * PAGE_NBYTES)

    def _is_aligned(self, fd: int) -> bool:
        """Whether pages are aligned enough for direct I/O here."""
        alignment = self._files.alignment(fd)
        if alignment is None:  # an older kernel: the write itself will tell
            return True
        fits = (
            alignment.memory > 0
            and alignment.offset > 0
            and PAGE_NBYTES % alignment.memory == 0
            and PAGE_NBYTES % alignment.offset == 0
        )
        if not fits:
            self._refuse(f"statx: {alignment}")
        return fits

    def _refuse(self, reason: str) -> None:
        """Give direct I/O up for this file, and say so once."""
        self._direct = False
        self._on_refused(reason)

    def _write_direct(self, offset: int, data: memoryview) -> bool:
        """Write past the page cache; false if the file system refused and nothing is lost."""
        whole = len(data) // PAGE_NBYTES * PAGE_NBYTES
        try:
            self._write(offset, data[:whole])
            if whole < len(data):
                page = mmap.mmap(-1, PAGE_NBYTES)  # not closed: an error's frames may refer to it
                page[: len(data) - whole] = data[whole:]
                self._write(offset + whole, memoryview(page))
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            with self._lock:
                if self._direct:
                    self._files.set_buffered(self._fd)
                    self._refuse(f"write: {error.strerror}")
            return False
        return True

    def _write(self, offset: int, data: memoryview) -> None:
        """Write all of `data`, however little the system takes at a time."""
        done = 0
        while done < len(data):
            rest = data[done:]
            written = with_room(self._files.pwrite, self._fd, rest, offset + done)
            if written <= 0:
                raise OSError(errno.EIO, f"the system wrote {written} of {len(data) - done} bytes")
            if self._direct:  # whole pages, all of them
                written = _whole_pages(written)  # again from the last whole page
            done += written

    def _push_out(self, offset: int, nbytes: int) -> None:
        """Start write-back of a range, and finish that of the oldest one in the window."""
        linux.start_writeback(self._fd, offset, nbytes)
        with self._lock:
            self._window.append((offset, nbytes))
            self._window_nbytes += nbytes
            if self._window_nbytes <= _WINDOW_NBYTES:
                return
            oldest = self._window.popleft()
            self._window_nbytes -= oldest[1]
        linux.finish_writeback(self._fd, *oldest)
        if self._config.direct_io != "off":
            os.posix_fadvise(self._fd, *oldest, os.POSIX_FADV_DONTNEED)


class BlockReader:
    """A file of known size, read in ranges from several threads.

    Args:
        files: Operations to use.
        path: The file.
        name: Its name in messages.
        nbytes: Its size as the manifest has it.
        direct: Whether to try to read past the page cache what is not in it.
        start: The first byte that is wanted, if only a part is. What is before it is not counted,
            which takes 0.03 to 3.5 ms a GiB: a file may have thousands of parts.

    Attributes:
        is_cached: Whether nearly all of what is wanted was in the page cache at first.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """

    def __init__(
        self,
        files: PosixFiles,
        path: str,
        *,
        name: str,
        nbytes: int,
        direct: bool,
        start: int = 0,
    ) -> None:
        self._files = files
        self._path = path
        self._name = name
        self._nbytes = nbytes
        self._fd = files.open(path, direct=False)
        self._lender = Lender(files, self._fd)
        self._direct_fd = -1
        if direct:
            with contextlib.suppress(OSError):  # refused: the page cache serves, only slower
                direct_fd = files.open(path, direct=True)
                try:
                    if os.path.samestat(self.status(), os.fstat(direct_fd)):
                        self._direct_fd = direct_fd
                finally:
                    if self._direct_fd < 0:  # another file has the name by now
                        files.close(direct_fd)
        wanted = nbytes - start
        self.is_cached = wanted > 0 and self._num_cached(start, wanted) > _CACHED_SHARE * wanted

    def status(self) -> os.stat_result:
        """Say which file it is, and when it was written. Blocks."""
        return os.fstat(self._fd)

    def pread_into(self, offset: int, room: memoryview, nbytes: int) -> None:
        """Read a range; see `streams.Source`."""
        try:
            if self._direct_fd >= 0 and not self._is_cached(offset, nbytes):
                padded = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
                try:
                    self._read(self._direct_fd, offset, room[:padded], nbytes)
                except OSError as error:
                    if error.errno not in _REFUSALS:
                        raise
                else:
                    return
            self._read(self._fd, offset, room[:nbytes], nbytes)
        except OSError as error:
            raise storage_error(error, self._path, f"cannot read at byte {offset}") from error

    def lend(self, offset: int, nbytes: int) -> AbstractContextManager[Lent | None]:
        """Lend a range that is in the page cache; see `streams.Source`."""
        return self._lender.lend(offset, nbytes)

    def close(self) -> None:
        """Release the file."""
        fds = [fd for fd in (self._fd, self._direct_fd) if fd >= 0]
        self._fd = self._direct_fd = -1
        for fd in fds:
            with contextlib.suppress(OSError):  # everything was read and verified
                self._files.close(fd)

    def _is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether most of a range is in the page cache."""
        return self._num_cached(offset, nbytes) * 2 > nbytes

    def _num_cached(self, offset: int, nbytes: int) -> int:
        """Count the bytes of a range that are in the page cache, in whole pages."""
        return (linux.num_cached_pages(self._fd, offset, nbytes) or 0) * mmap.PAGESIZE

    def _read(self, fd: int, offset: int, room: memoryview, nbytes: int) -> None:
        """Read `nbytes` at least, however little the system gives at a time."""
        done = 0
        while done < nbytes:
            count = self._files.pread(fd, room[done:], offset + done)
            if count <= 0:
                raise CorruptionError(
                    f"the file ends at byte {offset + done} and should have {self._nbytes}",
                    path=os.path.dirname(self._path),
                    file=self._name,
                    start=offset + done,
                    stop=offset + nbytes,
                )
            if fd == self._direct_fd and done + count < nbytes:
                count = _whole_pages(count)
            done += count


def _whole_pages(nbytes: int) -> int:
    """Round a short direct transfer down to pages, where the next one may start.

    Raises:
        OSError: It was less than a page, so that direct I/O gets nowhere: as if refused.
    """
    if nbytes < PAGE_NBYTES:
        raise OSError(errno.EINVAL, f"a direct transfer ended after {nbytes} bytes")
    return nbytes // PAGE_NBYTES * PAGE_NBYTES
