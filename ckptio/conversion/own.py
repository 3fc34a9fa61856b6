"""Have a file or a directory for oneself while a conversion writes it, and give it its name.

Who may read what a conversion makes, and what is synced, is as the options say, as for a save.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from ckptio.errors import CommitConflictError
from ckptio.storage import linux
from ckptio.storage.blocks import storage_error
from ckptio.storage.files import NOT_TO_BE_SYNCED, PosixFiles, absolute, make_dirs, young_parents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.config import CheckpointConfig

#: Over NFS a directory has none: a lock there is of what is open for writing.
_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_NO_RENAME = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def make_own_dirs(path: str, config: CheckpointConfig) -> list[str]:
    """Make a directory and those above it, and make their names durable.

    Returns:
        Those that are new, each below the one before it.

    Raises:
        OSError: As the system gives it; what was made is gone.
    """
    made: list[str] = []
    try:
        make_dirs(PosixFiles(), absolute(path), config.dir_mode, made)
        for directory in made:
            sync_dir(os.path.dirname(directory), config)
        sync_above(path, config)
    except OSError:
        remove_empty(made)
        raise
    return made


def remove_empty(made: Sequence[str]) -> None:
    """Remove those directories of `make_own_dirs` that have nothing in them."""
    for directory in reversed(made):
        with contextlib.suppress(OSError):  # what a conversion goes on with may be in it
            os.rmdir(directory)


def open_file(path: str) -> int:
    """Open a regular file for reading, through links; a FIFO would be waited for.

    Raises:
        OSError: As the system gives it, or it is something else.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def sync_file(fd: int, config: CheckpointConfig) -> None:
    """Make a file's bytes durable, unless nothing is to be."""
    if config.durability != "none":
        os.fsync(fd)


def sync_dir(path: str, config: CheckpointConfig) -> None:
    """Make the names in a directory durable, where names are to be."""
    if config.durability == "full":
        PosixFiles().fsync_dir(path)


def sync_kept(path: str, config: CheckpointConfig) -> None:
    """Make a file, or the names in a directory, durable that an earlier conversion wrote.

    It may have been killed before it did, or told not to.

    Raises:
        StorageError: It cannot be synced.
    """
    try:
        if os.path.isdir(path):
            sync_dir(path, config)
            return
        fd = open_file(path)
        try:
            sync_file(fd, config)
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error(error, path, "cannot sync what is there") from error


def sync_above(path: str, config: CheckpointConfig) -> None:
    """Make a directory's own name durable, and those above: whoever made it may have been killed.

    Raises:
        StorageError: One of them cannot be synced, or has gone.
    """
    try:
        above = young_parents(absolute(path), written=path)
    except OSError as error:
        raise storage_error(error, path, "cannot find what it lies in") from error
    for directory in above:
        try:
            sync_dir(directory, config)
        except OSError as error:
            if error.errno not in NOT_TO_BE_SYNCED:
                raise storage_error(error, directory, "cannot sync what is there") from error


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
