"""What is in a directory of checkpoints, and which of it is committed.

A run has thousands of steps, and every call may be a round trip to a server. So a listing says
of what kind things are (most file systems know; Python asks where they do not), and one stat
tells of each directory whether it has a manifest; where it has none, `storage.anew` looks once
more. Whoever wants to know of a few looks at these, and anew: a client of NFS keeps for a while
what another host has replaced or removed.

A link counts as what it leads to, unless that is here, too, under another name that counts.
What nobody can tell is an error, never taken for not being there.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from ckptio.errors import StorageError
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.storage.anew import found_anew, look_anew
from ckptio.storage.blocks import storage_error
from ckptio.storage.root_interface import Found

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_GONE = (FileNotFoundError, NotADirectoryError)


def find(
    root: str,
    accepts: Callable[[str], bool] | None,
    unseen: Callable[[str, StorageError], None] | None,
) -> list[Found]:
    """Find directories and which of them are committed; see `root_interface.Root.find`. Blocks."""
    found = []
    for entry in list_entries(root, accepts):
        try:
            if _is_own_dir(root, entry, accepts):
                found.append(Found(name=entry.name, version=_version(root, entry.name)))
        except StorageError as error:
            if unseen is None:
                raise
            unseen(entry.name, error)
    return found


def look(root: str, names: Sequence[str], accepts: Callable[[str], bool] | None) -> list[Found]:
    """Look at some, a few calls each; see `root_interface.Root.look`. Blocks."""
    found = []
    for name in names:
        look_anew(f"{root}/{name}/{MANIFEST_NAME}")
        version = _version(root, name)
        is_another = version is not None and _is_alias(root, name, accepts)
        found.append(Found(name=name, version=None if is_another else version))
    return found


def list_entries(root: str, accepts: Callable[[str], bool] | None) -> list[os.DirEntry[str]]:
    """List what has an accepted name, in order of the names; nothing if there is no directory.

    Raises:
        StorageError: It cannot be listed.
    """
    try:
        with found_anew(os.scandir, root) as entries:
            named = [entry for entry in entries if accepts is None or accepts(entry.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(error, root, "cannot list the checkpoints", writes=False) from error
    return sorted(named, key=lambda entry: entry.name)


def _is_own_dir(root: str, entry: os.DirEntry[str], accepts: Callable[[str], bool] | None) -> bool:
    """Whether something is a directory, or a link to one that has no other name here.

    Raises:
        StorageError: Nobody can tell.
    """
    path = f"{root}/{entry.name}"
    try:
        if not entry.is_symlink():
            return entry.is_dir(follow_symlinks=False)
        is_dir = stat.S_ISDIR(os.stat(path).st_mode)
    except _GONE:
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return False
        raise storage_error(error, path, "cannot stat a checkpoint") from error
    return is_dir and not _is_alias(root, entry.name, accepts)


def _is_alias(root: str, name: str, accepts: Callable[[str], bool] | None) -> bool:
    """Whether what is there is a link to another of the names: one checkpoint, not two."""
    path = f"{root}/{name}"
    if not os.path.islink(path):
        return False
    parent, own = os.path.split(os.path.realpath(path))
    return parent == os.path.realpath(root) and (accepts is None or accepts(own))


def _version(root: str, name: str) -> tuple[int, ...] | None:
    """Tell manifests apart; `None` if there is none. A manifest that is a link is not followed.

    Raises:
        StorageError: Nobody can tell.
    """
    manifest = f"{root}/{name}/{MANIFEST_NAME}"
    try:
        status = found_anew(_status, manifest)
    except _GONE:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # what should be its directory is a link to itself
            return None
        raise storage_error(error, manifest, "cannot stat the manifest") from error
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _status(path: str) -> os.stat_result:
    return os.stat(path, follow_symlinks=False)
