"""Take the names of large files away at once, and free what was in them behind that.

With the last name of a file its blocks go, within `unlink`. Where each is told to the disk (ext4
mounted with `discard`, as on many virtual machines) that may take longer than to write them: 3 s
for 2 GB on one disk, which took 1 s to write. A save that replaces a checkpoint has to leave no
name of the old one, and one that begins none of what a killed one left, and no more: each file is
held open while it loses its name, and closed on a thread. If the process dies, the system closes
it.

Whoever finds no room waits for that (`with_room`), and does it where no thread has begun: the
threads may all be waiting for room. So it is with a save that is still removing names. The end of
the engine waits, too. While one save's files are freed, others free their own at once: the disk is
behind as it is.

No more is held than the disk has room besides. So a save of the same size that follows at once
has room, also in ranks in other processes, which cannot wait: they do not see what is held here.

Only where no other host writes: on NFS, a file that is open gets another name instead of none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from ckptio.storage import linux

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from ckptio.storage.files import PosixFiles

P = ParamSpec("P")
T = TypeVar("T")

#: What a full disk, or a full share of it, answers.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
#: Files of less are freed as they are removed, in bytes.
_MIN_NBYTES = 64 << 20
#: So many files are held at most, of all saves together: a process may have 1,024.
_MAX_HELD = 64

_Identity = tuple[int, int]

#: Files that are held, and the bytes of each: descriptor, and device and inode. A child that is
#: forked meanwhile closes them, as it begins; what they take would not be free before its end.
_held: dict[tuple[int, _Identity], int] = {}
#: What is being freed, or will be: from the first file on that it holds.
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
        try:
            self._executor.submit(self.free)
        except RuntimeError:  # its threads have ended
            self.free()

    def unlink(self, path: str) -> None:
        """Remove a file.

        Raises:
            OSError: As `PosixFiles.unlink`.
        """
        if not self._holds:  # and so this waits for nothing that is just being freed
            self._files.unlink(path)
            return
        with self._lock:  # whoever finds no room frees what is held, and has no name by then
            if len(_held) < _MAX_HELD:
                self._hold(path)
            self._files.unlink(path)

    def _hold(self, path: str) -> None:
        """Hold a file open, if it is one to hold."""
        try:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # there is none, or too many are open
            return
        with contextlib.suppress(OSError):
            # a server may not tell, or not know it any more: what becomes of the name says `unlink`
            if self._take(fd):
                return
        with contextlib.suppress(OSError):
            os.close(fd)

    def _take(self, fd: int) -> bool:
        """Hold an open file, if it is one to hold."""
        status, disk = os.fstat(fd), os.statvfs(fd)
        nbytes, room = status.st_size, disk.f_bavail * disk.f_frsize
        has_room = sum([*_held.values(), nbytes]) <= room
        if nbytes < _MIN_NBYTES or not has_room or not linux.is_of_this_host(fd):
            return False
        held = fd, (status.st_dev, status.st_ino)
        _held[held] = nbytes
        self._mine.append(held)
        _under_way.add(self)
        return True

    def free(self) -> None:
        """Close what is held. Blocks; whoever comes second waits for the first."""
        with self._lock:
            for held in self._mine:
                with contextlib.suppress(OSError):  # the disk fails; it has no name any more
                    os.close(held[0])
                _held.pop(held, None)
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


def with_room(act: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call what takes room on a disk; once more, behind what is being freed, if there is none.

    Also behind what is free by the time that the system's answer is here: it may have looked
    before that.

    Raises:
        OSError: As `act`.
    """
    ahead = bool(_under_way)
    try:
        return act(*args, **kwargs)
    except OSError as error:
        if error.errno not in NO_ROOM or not (wait_until_free() | ahead):
            raise
    return act(*args, **kwargs)


def _close_in_child() -> None:
    """Close, in a process that was forked just now, what its parent holds."""
    for fd, identity in _held:
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            # or it is closed, and another's: of a new file, which may have got the inode, too
            is_mine = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH)
            if is_mine and (status.st_dev, status.st_ino) == identity:
                os.close(fd)
    _held.clear()
    _under_way.clear()


os.register_at_fork(after_in_child=_close_in_child)
