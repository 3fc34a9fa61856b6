"""Have a file or a directory for oneself while a conversion writes it, and give it its name."""

from __future__ import annotations

import errno
import os

from ckptio.errors import CommitConflictError
from ckptio.storage import linux
from ckptio.storage.files import PosixFiles

#: Over NFS a directory has none: a lock there is of what is open for writing.
_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_NO_RENAME = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def take_lock(fd: int, path: str, target: str) -> None:
    """Take the lock of what is open; it goes with the descriptor, or with the process.

    The descriptor is closed by `PosixFiles.close`.

    Where a file system has no locks, nobody can tell two conversions apart.

    Args:
        fd: The descriptor.
        path: The name under which it was opened.
        target: What is written; for messages.

    Raises:
        CommitConflictError: Somebody else has it, or had it until just now.
        OSError: As the system gives it.
    """
    try:
        is_it = PosixFiles().lock(fd) and os.path.samestat(
            os.stat(path, follow_symlinks=False), os.fstat(fd)
        )
    except FileNotFoundError:
        is_it = False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return
    if not is_it:
        raise CommitConflictError(target)


def rename_new(source: str, target: str) -> None:
    """Give a file a name that nobody has, in one step; the old name is gone.

    Raises:
        FileExistsError: Somebody has it.
        OSError: As the system gives it.
    """
    try:
        linux.rename_noreplace(source, target)
    except OSError as error:
        if error.errno not in _NO_RENAME:
            raise
        PosixFiles().publish(source, target)
        os.unlink(source)
