"""Refuse a conversion that would destroy its source: what it replaces or removes is read, too.

A source may lie in the target, be a part of it, or be made of links that lead there, one behind the
other; and a directory may be mounted twice. So each name is looked at that is on the way to a file.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ckptio.errors import ConfigError
from ckptio.foreign.dcp import METADATA
from ckptio.foreign.folder import split_range
from ckptio.foreign.safetensors import STEMS
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.storage.files import absolute

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptio.conversion.source import Source

_INDICES = tuple(f"{stem}.safetensors.index.json" for stem in STEMS)
#: By format, files of a directory that go if one is written there: what was left or begun before.
_REMOVED = {
    "ckptio": r"data-.+\.safetensors",
    "hf": r"\.model.+\.partial",
    "dcp": r"__0_\d{18}\.distcp",
}
#: By format, those that go besides with `overwrite`.
_REPLACED = {
    "ckptio": r"data-.+\.safetensors",
    "hf": r".+\.safetensors(\.index\.json)?",
    "dcp": rf"{re.escape(METADATA)}|__\d+_\d+\.distcp",
}
#: Links that Linux follows, one behind the other.
_MAX_LINKS = 40


def require_spared(read: Source, target: str, to: str, *, overwrite: bool) -> None:
    """Refuse to replace files that the source is made of, or that its links lead to.

    Args:
        read: The source.
        target: What is written.
        to: As what.
        overwrite: Whether what is there may be replaced.

    Raises:
        ConfigError: Some would be gone.
    """
    names = {(split_range(file.name) or (file.name,))[0] for file in read.manifest.files}
    folder, name = os.path.split(read.path)
    if os.path.isdir(read.path):
        folder = read.path
        names.update((MANIFEST_NAME, METADATA, *_INDICES))
    else:
        names.add(name)  # of an index, say
    if to == "safetensors":
        place, name = os.path.split(absolute(target))
        removed, replaced = rf"\.{re.escape(name)}\.partial", re.escape(name)
    else:
        place, removed, replaced = target, _REMOVED[to], _REPLACED[to]
    gone = re.compile(f"{removed}|{replaced}" if overwrite else removed, re.DOTALL)
    for path in (path for name in names for path in _way_to(f"{folder}/{name}")):
        parent, name = os.path.split(path)
        if gone.fullmatch(name) and os.path.lexists(path) and is_one(parent, place):
            raise ConfigError(f"{target!r} would replace what {read.path!r} is; give another path")


def _way_to(path: str) -> Iterator[str]:
    """Give the path of a file, and of each that links lead to on the way."""
    for _ in range(_MAX_LINKS):
        yield path
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        except OSError:  # it is none
            return


def is_one(one: str, other: str) -> bool:
    """Whether two paths lead to one directory: it may be mounted at both."""
    return os.path.isdir(one) and os.path.isdir(other) and os.path.samefile(one, other)
