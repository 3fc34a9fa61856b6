"""The operations of a file system that a save and a load are made of.

One small object, so that what a test counts, fails or stops is exactly what the engine
does, and a crash can be put behind every single operation.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import time
from typing import TYPE_CHECKING

from ckptio.format.manifest import MAX_MANIFEST_NBYTES
from ckptio.format.pointer import decode_pointer
from ckptio.storage import anew, linux, locks

if TYPE_CHECKING:
    from ckptio.storage.linux import DirectAlignment

_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
#: What a sync of a directory that is not ours ends with, or of a mount point of an automounter.
NOT_TO_BE_SYNCED = (*_UNSUPPORTED, errno.EACCES, errno.EROFS)
#: What opening a link, a directory, a FIFO or a socket for writing ends with.
NO_FILE = (errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO)
#: How often a name may come and go between two looks at it before a save gives up.
MAX_TRIES = 100
#: What a directory was told this long ago, in seconds, any system has written by itself.
_SETTLED_S = 3600.0


class NoExclusiveNames(OSError):  # noqa: N818  # a limit that one may live with
    """The file system cannot give a name on condition that it is free."""


def set_mode(at: int | str, mode: int) -> None:
    """Give a new file or directory the caller's mode, whatever the umask.

    A directory keeps the set-group-ID bit that it has from the one above, for which it was
    set. Some mounts have modes of their own, and refuse or do not know the call.
    """
    kept = stat.S_IMODE(os.stat(at).st_mode)
    wanted = mode | (kept & stat.S_ISGID)
    if kept != wanted:
        try:
            os.chmod(at, wanted)
        except OSError as error:
            if error.errno not in (*_UNSUPPORTED, errno.EACCES):
                raise


def absolute(path: str) -> str:
    """Make a path absolute. Where it goes up (`..`), it goes up from where links lead.

    Raises:
        OSError: The working directory is gone.
    """
    whole = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    parts = whole.split("/")
    if ".." in parts:
        stop = len(parts) - parts[::-1].index("..")
        parts[:stop] = [os.path.realpath("/".join(parts[:stop]))]
    # normpath keeps two slashes at the beginning, as after a part that went up to the root
    return "/" + os.path.normpath("/".join(parts)).lstrip("/")


class PosixFiles:
    """The real ones. Everything raises `OSError` as the system gives it."""

    def create(self, path: str, mode: int, *, direct: bool) -> int:
        """Make a new file for writing; it must not exist."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags | (os.O_DIRECT if direct else 0), mode)
        try:
            set_mode(fd, mode)
        except OSError:
            os.close(fd)
            os.unlink(path)  # whoever asked for it does not know of it
            raise
        return fd

    def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
        """Open a regular file that is there, for reading; nothing else, and through no link.

        Args:
            path: The file.
            direct: Past the page cache.
            writable: For writing too, which locks want on some mounts.
        """
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_DIRECT if direct else 0)
        fd = os.open(path, flags | (os.O_RDWR if writable else os.O_RDONLY))
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)  # noqa: TRY301  # it is closed alike
        except OSError:
            os.close(fd)
            raise
        return fd

    def close(self, fd: int) -> None:
        """Close a file; its lock ends, if it has one."""
        locks.unlock(fd)
        os.close(fd)

    def alignment(self, fd: int) -> DirectAlignment | None:
        """What direct I/O on `fd` needs, if the kernel says."""
        return linux.direct_alignment(fd)

    def allocate(self, fd: int, nbytes: int) -> bool:
        """Reserve room; false where the file system cannot."""
        return linux.allocate(fd, nbytes)

    def set_buffered(self, fd: int) -> None:
        """Turn direct I/O off on an open file."""
        linux.set_buffered(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of `data`, and say how much."""
        return os.pwrite(fd, data, offset)

    def pread(self, fd: int, room: memoryview, offset: int) -> int:
        """Read some bytes into `room`, and say how many; 0 at the end."""
        return os.preadv(fd, [room], offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Set the size of a file."""
        os.ftruncate(fd, nbytes)

    def fsync(self, fd: int) -> None:
        """Make a file's bytes and size durable."""
        os.fsync(fd)

    def fsync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:  # which of several, and what to do, is not seen from its number
            what = f"{error.strerror} in a sync of {path!r}, which durability='file' leaves out"
            raise OSError(error.errno, what) from error

    def mkdir(self, path: str, mode: int) -> None:
        """Make a directory; its mode is what the umask leaves of one."""
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def publish(self, source: str, target: str) -> None:
        """Give `source` the name `target`, which must be free, in one step.

        By link, which every POSIX file system makes exclusively, NFS included; by rename without
        replacement where links are not there, or do not last. After a link `source` is still there.

        Raises:
            FileExistsError: The name is taken.
            NoExclusiveNames: The file system cannot tell.
        """
        try:
            linux.link(source, target)
        except OSError as error:
            if error.errno not in _UNSUPPORTED and not linux.is_eio_of_fuse(error, source):
                raise
            self.rename_to_free(source, target)

    def rename_to_free(self, source: str, target: str) -> None:
        """Give `source` the name `target` instead of its own, which must be free.

        Raises:
            FileExistsError: The name is taken.
            NoExclusiveNames: The file system cannot tell.
        """
        try:
            linux.rename_noreplace(source, target)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            raise NoExclusiveNames(
                error.errno,
                "this file system gives no name to just one of two writers, neither by link nor"
                " by rename: overwrite=True does without",
                target,
            ) from error

    def exchange(self, source: str, target: str) -> bool:
        """Exchange two names in one step; false where the file system cannot.

        Raises:
            FileNotFoundError: `target` does not exist.
        """
        try:
            linux.rename_exchange(source, target)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return False
        return True

    def replace(self, source: str, target: str) -> None:
        """Give `source` the name `target`, replacing what has it."""
        os.replace(source, target)

    def lock(self, fd: int) -> bool:
        """Take the exclusive lock of a file; false if it is taken.

        Raises:
            OSError: The file system has no locks.
        """
        return locks.lock(fd)

    def take_lease(self, fd: int) -> bool:
        """Keep others from opening a file for writing; false if that cannot be had.

        Only on file systems that no other host can write to.
        """
        return linux.is_of_this_host(fd) and linux.take_read_lease(fd)

    def has_lease(self, fd: int) -> bool:
        """Whether the lease is still held, and nobody waits for its end."""
        return fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK

    def end_lease(self, fd: int) -> None:
        """Let others go on."""
        with contextlib.suppress(OSError):  # taken away
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def map(self, fd: int, offset: int, nbytes: int) -> mmap.mmap:
        """Map a range of a file, with every page of it there.

        Private, so that it is a buffer which `ctypes` takes; nobody writes to it.

        Raises:
            OSError: A page cannot be read, or the system cannot tell.
            ValueError: The file ends before.
        """
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        pages = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=prot, offset=offset)
        try:
            linux.populate(pages)
        except OSError:
            pages.close()
            raise
        return pages


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` to an open file at `offset`.

    Raises:
        OSError: It cannot be written.
    """
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        if not count:
            raise OSError(errno.EIO, f"the system wrote nothing of {len(rest)} bytes")
        offset += count
        rest = rest[count:]


def read_regular(files: PosixFiles, path: str, limit_nbytes: int) -> bytes:
    """Read a small regular file; what is none (a FIFO, a link) raises instead of hanging.

    Raises:
        OSError: It cannot be read, or is larger than the limit.
    """

    def read(path: str) -> bytes:
        fd = anew.open_anew(files, path)
        try:
            if (nbytes := os.fstat(fd).st_size) > limit_nbytes:
                raise OSError(errno.EFBIG, f"{nbytes} bytes and at most {limit_nbytes} taken", path)
            data = bytearray()
            while len(data) < nbytes and (more := os.pread(fd, nbytes - len(data), len(data))):
                data += more
            return bytes(data)  # if it was cut off meanwhile, whoever decodes it says so
        finally:
            files.close(fd)

    return anew.found_anew(read, path)  # once more where it was replaced as it was read


def follow_pointer(files: PosixFiles, directory: str, commit: bytes) -> tuple[bytes, list[str]]:
    """Give the manifest that a commit is, or points to.

    Args:
        files: Operations to use.
        directory: The checkpoint.
        commit: What stands under the name of its manifest.

    Returns:
        The manifest, and the name of the file that has it if that is another one.

    Raises:
        FormatError: The pointer is damaged, or leads to something else.
        OSError: What it points to cannot be read.
    """
    pointer = decode_pointer(commit)
    if pointer is None:
        return commit, []
    manifest = read_regular(files, f"{directory}/{pointer.pointer}", MAX_MANIFEST_NBYTES)
    pointer.check(manifest)
    return manifest, [pointer.pointer]


def young_parents(directory: str, written: str) -> list[str]:
    """Name the directories above one in which something changed within the hour, nearest first.

    Args:
        directory: That one. Behind what is above it comes what is above where its links lead.
        written: Where something was written just now: the hour ends at that time, if this host's
            clock is ahead of the one that dates files.
    """
    found = []
    now_s = min(time.time(), os.stat(written).st_mtime)
    for start in dict.fromkeys((directory, os.path.realpath(directory))):
        below = start
        while (parent := os.path.dirname(below)) != below:
            below = parent
            if now_s - os.stat(below).st_mtime < _SETTLED_S:
                found.append(below)
    return found


def sync_dirs(files: PosixFiles, directory: str, made: list[str]) -> None:
    """Sync a directory, its parent, the parent of each directory that is new, and more.

    Further up, every directory that changed within the hour is synced, because another save that
    is still running, or was killed, may have made what this one found.

    Args:
        files: The operations.
        directory: Where files were written.
        made: The directories that were made for it, topmost first.

    Raises:
        OSError: One cannot be synced.
    """
    parents = [os.path.dirname(each) for each in reversed(made)]
    above = [os.path.dirname(directory), *parents]
    ours = {directory, *parents}
    young = young_parents(above[-1], written=directory)
    for each in dict.fromkeys((directory, *above, *young)):
        try:
            files.fsync_dir(each)
        except OSError as error:
            # those of ours must be on the disk; others may be nobody's to sync, as an automounter's
            if each in ours or error.errno not in NOT_TO_BE_SYNCED:
                raise


def make_dirs(files: PosixFiles, path: str, mode: int, made: list[str]) -> None:
    """Make a directory and those above it.

    Another save's end may remove those above meanwhile: then it begins again.

    Args:
        files: Operations to use.
        path: The directory.
        mode: Permissions of those that are new.
        made: Takes their paths.

    Raises:
        OSError: One cannot be made.
    """
    for last in reversed(range(MAX_TRIES)):
        try:
            _make_missing(files, path, mode, made)
        except FileNotFoundError:
            if not last:
                raise
        else:
            return


def _make_missing(files: PosixFiles, path: str, mode: int, made: list[str]) -> None:
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            files.mkdir(directory, mode)
            made.append(directory)
            set_mode(directory, mode)
    if missing and not stat.S_ISDIR(os.stat(missing[0]).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), missing[0])
