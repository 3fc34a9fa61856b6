"""Look once more for what a client of NFS says is not there.

For up to a minute (`acdirmax`), a client keeps that a directory lacks a name, and what another
host has made there meanwhile is not seen. Opening a directory makes the client ask the server
(close-to-open consistency, nfs(5)), and drop what is no longer so. Where that is not needed, it
costs three system calls, and only for what is not found.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def look_anew(path: str) -> None:
    """Have the way to `path` looked up anew, from the first directory above it that is there."""
    parent = os.path.dirname(path)
    if parent == path:
        return
    try:
        os.close(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC))
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
