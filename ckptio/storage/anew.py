"""Ask a server once more about what its client takes for missing, or for unchanged.

An NFS client remembers for up to a minute (`acdirmax`) that a directory lacks a name, and does not
see what another host has made there meanwhile. Opening a directory makes the client ask the server
(close-to-open consistency, nfs(5)), and drop what is out of date. Where that was not needed, it has
cost three system calls, and only for what is not found.

FUSE remembers which file has a name, for as long as the file system says (a second with GlusterFS),
and opens that file even if it has been replaced. Listing the directory tells the kernel anew
(FUSE_READDIRPLUS), unless the file system caches listings itself, as sshfs does.

SMB remembers both for a second (`actimeo`), and neither opening nor listing makes it ask the
server. All that helps is to wait, where a checkpoint would be called damaged otherwise.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, TypeVar

from ckptio.storage import linux

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio.storage.files import PosixFiles

T = TypeVar("T")

#: Seconds after which an SMB client asks its server again, at its default setting.
KEPT_S = 1.2


def look_anew(path: str) -> None:
    """Make the client look `path` up anew, from the nearest directory above it that exists."""
    parent = os.path.dirname(path)
    if parent == path:
        return
    try:
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if linux.is_on_fuse(fd):
                os.listdir(fd)
        finally:
            os.close(fd)
    except FileNotFoundError:
        look_anew(parent)
    except OSError:  # whoever asked has an error that says more
        pass


def found_anew(ask: Callable[[str], T], path: str) -> T:
    """Give what `ask` says of a path; ask once more, behind `look_anew`, if it finds nothing there.

    Raises:
        OSError: As `ask` gives it.
    """
    try:
        return ask(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
    look_anew(path)
    return ask(path)


def open_anew(files: PosixFiles, path: str) -> int:
    """Open for reading the file that has a name now, not one that a mount remembers under it.

    Raises:
        OSError: It cannot be opened.
    """
    fd = files.open(path, direct=False)
    if not linux.is_on_fuse(fd):
        return fd
    files.close(fd)
    look_anew(path)
    return files.open(path, direct=False)


def may_be_outdated(path: str) -> bool:
    """Whether a directory is on SMB, so that what is said of it may be `KEPT_S` out of date."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # then nothing of it is there
        return False
    try:
        return linux.is_on_smb(fd)
    finally:
        os.close(fd)
