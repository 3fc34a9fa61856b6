"""Find the directories that are checkpoints, or were meant to become one.

Directories are looked at once, however many links lead there: those under their own name
first, then those behind links. So links cannot make a loop, and `latest -> step-3` does
not hide `step-3` under its other name. A link to a directory above the root is not followed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio.format.manifest import MANIFEST_NAME, OPENING
from ckptio.storage.files import PosixFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Data files, attempts, notes and manifests on their way, as `ckptio.storage` names them.
_OURS = re.compile(r"(?:data|\.attempt|\.copy|\.?manifest)-[0-9a-f]{32}(?:-.*|\.json)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A directory that has a manifest, or files that wait for one, or cannot be listed.

    Attributes:
        path: The directory.
        has_manifest: Whether something is called like a manifest there.
        ours: Names of files that only ckptio gives.
        error: Why it cannot be listed; empty if it can.
    """

    path: str
    has_manifest: bool = False
    ours: tuple[str, ...] = ()
    error: str = ""


def find_checkpoints(root: str, *, depth: int, hidden: bool) -> Iterator[Found]:
    """Look for checkpoints at and below a directory.

    Args:
        root: Where to begin.
        depth: Levels of directories below `root` to look into.
        hidden: Whether to look into directories whose names begin with a dot.

    Yields:
        Directories, each once.

    Raises:
        OSError: `root` cannot be listed.
    """
    seen = _above(root)
    real = deque([(root, 0)])
    linked: deque[tuple[str, int]] = deque()
    while real or linked:
        path, level = real.popleft() if real else linked.popleft()
        try:
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(path) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            if path == root:
                raise
            if isinstance(error, FileNotFoundError):
                continue  # removed since its parent was listed
            yield Found(path=path, error=str(error.strerror))
            continue
        names = [entry.name for entry in entries]
        ours = tuple(name for name in names if _OURS.fullmatch(name))
        if MANIFEST_NAME in names or ours:
            yield Found(path=path, has_manifest=MANIFEST_NAME in names, ours=ours)
        if level == depth:
            continue
        for entry in entries:
            if _is_dir(entry) and (hidden or not entry.name.startswith(".")):
                (linked if entry.is_symlink() else real).append((entry.path, level + 1))


def _above(path: str) -> set[tuple[int, int]]:
    """Identify the directories above one."""
    seen = set()
    path = os.path.realpath(path)
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        with contextlib.suppress(OSError):  # one that cannot be looked at cannot be listed either
            status = os.stat(path)
            seen.add((status.st_dev, status.st_ino))
    return seen


def _is_dir(entry: os.DirEntry[str]) -> bool:
    """Whether it is a directory or leads to one; a link to nowhere or in a loop does not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_foreign(found: Found) -> bool:
    """Whether the manifest of a directory is another program's: the name is a common one.

    A link is followed: a manifest of ours is none, but another program's may be one.
    """
    if found.ours:
        return False
    with contextlib.suppress(OSError):
        fd = PosixFiles().open(os.path.realpath(f"{found.path}/{MANIFEST_NAME}"), direct=False)
        try:
            return os.read(fd, len(OPENING)) != OPENING
        finally:
            os.close(fd)
    return False
