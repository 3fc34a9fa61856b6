"""Locks on files that end with who took them, whatever else was forked meanwhile.

A lock of `flock` belongs to the open file, not to the process. A child that is forked (a worker
of a DataLoader) has the file open, too, and would keep the lock when its parent has closed the
file, or was killed. So a lock is taken off before the file is closed, and every child closes,
as it begins, the files that were locked; what it has of them is of no use there.

`fcntl.lockf` was rejected: its locks are the process's own, but two engines of one process take
the same one, and closing the file anywhere in the process ends it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

#: Files that are locked, or about to be: descriptor, device and inode. Somebody may close one
#: otherwise, and the system gives its number to another file, which no child must lose.
_locked: dict[int, tuple[int, int]] = {}


def lock(fd: int) -> bool:
    """Take the exclusive lock of an open file; false if it is taken.

    Raises:
        OSError: The file system has no locks.
    """
    _locked[fd] = _identity(fd)  # before: a child that is forked in between closes it as well
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _locked.pop(fd, None)
        return False
    except BaseException:
        _locked.pop(fd, None)
        raise
    return True


def unlock(fd: int) -> None:
    """Take the lock off a file that is to be closed, if it has one."""
    if fd in _locked:
        with contextlib.suppress(OSError):  # a lock that was lost to a network
            fcntl.flock(fd, fcntl.LOCK_UN)
        _locked.pop(fd, None)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _close_in_child() -> None:
    """Close, in a process that was forked just now, what its parent has locked."""
    for fd, identity in _locked.items():
        with contextlib.suppress(OSError):
            if _identity(fd) == identity:
                os.close(fd)
    _locked.clear()


os.register_at_fork(after_in_child=_close_in_child)
