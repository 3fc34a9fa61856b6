"""Find the prefixes of an object store that are checkpoints, or were meant to become one.

Level by level, as many listings at a time as there may be requests. What lies below a
checkpoint is not looked at: a bucket holds more than checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio._aio import run_all
from ckptio.format.manifest import MANIFEST_NAME, OPENING
from ckptio.storage.object_place import name_of, owner_of
from ckptio.storage.requests import Requests
from ckptio.storage.store import ObjectMissingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.storage.store import ObjectInfo, ObjectStore
    from ckptio.storage.stores import Stores


@dataclass(frozen=True, slots=True)
class Place:
    """A URL in a store that is open.

    Attributes:
        url: The URL.
        base: What the keys below begin with: empty, or with a slash at its end.
        store: The store.
        requests: Tries requests.
    """

    url: str
    base: str
    store: ObjectStore
    requests: Requests


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundObjects:
    """A prefix that has a manifest, or objects that wait for one.

    Attributes:
        path: Relative to the URL; `.` for the URL itself.
        prefix: Of its keys, with a slash at its end.
        has_manifest: Whether something is called like a manifest there.
        ours: Objects with names that only ckptio gives.
    """

    path: str
    prefix: str
    has_manifest: bool
    ours: tuple[ObjectInfo, ...]


async def open_place(
    stores: Stores, url: str, config: CheckpointConfig, emit: Callable[[Event], None]
) -> Place:
    """Open the store of a URL, on the running loop.

    Raises:
        ConfigError: There is no way to it.
        StorageError: It cannot be reached.
    """
    opened, base = stores.below(url)
    store, limit = await opened.get()
    return Place(url, base, store, Requests(url, config, limit, emit))


async def find_objects(place: Place, *, depth: int, hidden: bool) -> list[FoundObjects]:
    """Look for checkpoints at and below a URL.

    Args:
        place: Where to begin.
        depth: Levels below to look into.
        hidden: Whether to look into prefixes whose names begin with a dot.

    Raises:
        StorageError: Something cannot be listed.
    """

    async def look(prefix: str, level: int) -> list[FoundObjects]:
        listed = await place.requests.must("list", prefix, lambda: place.store.list(prefix))
        ours = tuple(info for info in listed if owner_of(info.key))
        has_manifest = any(info.key == prefix + MANIFEST_NAME for info in listed)
        if ours or has_manifest:
            path = prefix.removeprefix(place.base).rstrip("/") or "."
            return [FoundObjects(path=path, prefix=prefix, has_manifest=has_manifest, ours=ours)]
        inner = [info.key for info in listed if info.key.endswith("/") and info.key != prefix]
        if level == depth:
            return []
        found = await run_all(
            [look(key, level + 1) for key in inner if hidden or not _is_hidden(key)], "list"
        )
        return [item for items in found for item in items]

    return await look(place.base, 0)


async def is_foreign_prefix(place: Place, found: FoundObjects) -> bool:
    """Whether the manifest of a prefix is another program's: the name is a common one."""
    if found.ours or not found.has_manifest:
        return False
    key = found.prefix + MANIFEST_NAME
    try:
        _, head = await place.requests.run("read", key, lambda: place.store.get(key, len(OPENING)))
    except ObjectMissingError:  # removed meanwhile
        return False
    return head != OPENING


def _is_hidden(prefix: str) -> bool:
    return name_of(prefix.rstrip("/")).startswith(".")
