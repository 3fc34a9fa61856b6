"""Look once more for what a client of a server says is not there, or is as it was.

For up to a minute (`acdirmax`), a client of NFS keeps that a directory lacks a name, and what
another host has made there meanwhile is not seen. Opening a directory makes the client ask the
server (close-to-open consistency, nfs(5)), and drop what is no longer so. Where that is not
needed, it costs three system calls, and only for what is not found.

FUSE keeps for a while, as long as the file system says (a second with GlusterFS), which file has
a name, and opens that one, be it replaced or not. A listing tells the kernel anew
(FUSE_READDIRPLUS), unless the file system keeps listings itself, as sshfs does.

SMB keeps both for a second (`actimeo`), and neither opening nor listing makes it ask the server:
all that helps is to wait, where a checkpoint would be called damaged otherwise.
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

#: Seconds after which a client of SMB has asked again, at its default.
KEPT_S = 1.2


def look_anew(path: str) -> None:
    """Have the way to `path` looked up anew, from the first directory above it that is there."""
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
    """Give what `ask` says of a path; asked once more if that is not there at the first look.

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
    """Open, as `files` does, the file that has a name now, and not what it has replaced.

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
    """Say whether what a directory has is answered from what was so up to `KEPT_S` ago."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # then nothing of it is there
        return False
    try:
        return linux.is_on_smb(fd)
    finally:
        os.close(fd)
