"""What stands in the way of a path, where the system says no more than that something does."""

from __future__ import annotations

import errno
import os


def obstacle_in(path: str, code: int, *, writes: bool = True) -> str:
    """Name what keeps a checkpoint's directory from being made or read, and the way out.

    Args:
        path: What was to be read or made.
        code: What the system said of it.
        writes: Whether it was to be made. Whoever reads is not told to remove anything.

    Returns:
        Words for an error; empty if nothing is found there now that would explain it.
    """
    if code not in (errno.ENOTDIR, errno.ENOENT):
        return ""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    if code == errno.ENOTDIR and not os.path.isdir(path):
        way_out = "remove it, or give another path" if writes else "give another path"
        return f"a checkpoint is a directory, and {path!r} is a file; {way_out}"
    if code == errno.ENOENT and os.path.islink(path) and not os.path.exists(path):
        return (
            f"{path!r} is a link to {_target_of(path)!r}, which is not there; make that directory,"
            " or remove the link"
        )
    return ""


def _target_of(link: str) -> str:
    """Give what a link says, in full; what it is called itself if it is none any more."""
    try:
        return os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
    except OSError:
        return link
