"""Take the names of large files away at once, and free what was in them behind that.

With the last name of a file its blocks go, within `unlink`. Where each is told to the disk (ext4
mounted with `discard`, as on many virtual machines) that may take longer than to write them: 3 s
for 2 GB on one disk, which took 1 s to write. A save that replaces a checkpoint has to leave no
name of the old one, and one that begins none of what a killed one left, and no more: each file is
held open while it loses its name, and closed on a thread. If the process dies, the system closes
it.

Whoever finds no room waits for that (`wait_until_free`), and does it where no thread has begun: the
threads may all be waiting for room. The end of the engine waits, too. While one save's files are
freed, others free their own at once: the disk is behind as it is.

Only where no other host writes: on NFS, a file that is open gets another name instead of none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from typing import TYPE_CHECKING, Self

from ckptio.storage import linux

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckptio.storage.files import PosixFiles

#: What a full disk, or a full share of it, answers.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
#: Files of less are freed as they are removed, in bytes.
_MIN_NBYTES = 64 << 20
#: So many files are held at most: a process may have 1,024.
_MAX_HELD = 64

_Identity = tuple[int, int]

#: Files that are held: descriptor, and device and inode. A child that is forked meanwhile closes
#: them, as it begins; what they take would not be free before its end.
_held: set[tuple[int, _Identity]] = set()
#: What is being freed.
_under_way: set[Freeing] = set()


class Freeing:
    """A block in which files lose their names; what was in them is freed behind it.

    Args:
        files: Takes names away.
        executor: One of its threads frees; it ends after that.
    """

    def __init__(self, files: PosixFiles, executor: Executor) -> None:
        self._files = files
        self._executor = executor
        self._holds = not _under_way
        self._mine: list[tuple[int, _Identity]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._holds = False  # what goes from here on is freed as it goes
        if not self._mine:
            return
        _under_way.add(self)
        try:
            self._executor.submit(self.free)
        except RuntimeError:  # its threads have ended
            self.free()

    def unlink(self, path: str) -> None:
        """Remove a file.

        Raises:
            OSError: As `PosixFiles.unlink`.
        """
        if self._holds and len(self._mine) < _MAX_HELD:
            self._hold(path)
        self._files.unlink(path)

    def _hold(self, path: str) -> None:
        """Hold a file open, if it is one to hold."""
        try:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # there is none, or too many are open
            return
        status = os.fstat(fd)
        is_large = stat.S_ISREG(status.st_mode) and status.st_size >= _MIN_NBYTES
        if is_large and linux.is_of_this_host(fd):
            self._mine.append((fd, (status.st_dev, status.st_ino)))
            _held.add(self._mine[-1])
        else:
            os.close(fd)

    def free(self) -> None:
        """Close what is held. Blocks; who comes second waits for the first."""
        with self._lock:
            for held in self._mine:
                with contextlib.suppress(OSError):  # the disk fails; it has no name any more
                    os.close(held[0])
                _held.discard(held)
            self._mine.clear()
            _under_way.discard(self)


def wait_until_free() -> bool:
    """Block until what is being freed is free.

    Returns:
        Whether there was anything.
    """
    ahead = [*_under_way]
    for freeing in ahead:
        freeing.free()
    return bool(ahead)


def reserve(files: PosixFiles, fd: int, nbytes: int) -> None:
    """Reserve room for a file, where the file system can: behind what is being freed if need be.

    Raises:
        OSError: As `PosixFiles.allocate`.
    """
    try:
        files.allocate(fd, nbytes)
    except OSError as error:
        if error.errno not in NO_ROOM or not wait_until_free():
            raise
        files.allocate(fd, nbytes)


def _close_in_child() -> None:
    """Close, in a process that was forked just now, what its parent holds."""
    for fd, identity in _held:
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) == identity:  # or it is closed, and another's
                os.close(fd)
    _held.clear()
    _under_way.clear()


os.register_at_fork(after_in_child=_close_in_child)
