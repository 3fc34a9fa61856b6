"""Which kind of file system a path is on. Needs nothing of the extra `cli`: benches use it, too."""

from __future__ import annotations

import contextlib
import os
import re

#: How the kernel writes blanks, tabs, line feeds and backslashes in names.
_ESCAPED = re.compile(rb"\\([0-3][0-7]{2})")


def file_system_of(path: str) -> str | None:
    """Name the kind of file system that a path is on, as the kernel does."""
    with contextlib.suppress(OSError), open("/proc/self/mounts", "rb") as mounts:
        return kind_in(mounts.read(), os.path.realpath(path))
    return None


def kind_in(mounts: bytes, real: str) -> str | None:
    """Find in a list of mounts the kind of file system that a path without links is on.

    Args:
        mounts: Lines of `/proc/self/mounts`. Names in them are bytes, as on every file system,
            of which the kernel writes some in octal (`man 5 fstab`).
        real: The path.
    """
    best, kind, path = b"", None, os.fsencode(real)
    for line in mounts.split(b"\n"):
        _, where, name, *_ = [*line.split(b" "), b"", b""]
        where = _ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), where)
        inside = path == where or path.startswith(where.rstrip(b"/") + b"/")
        if where and inside and len(where) >= len(best):
            best, kind = where, os.fsdecode(name)
    return kind
