"""Which objects under a prefix nobody needs, and how they go.

There are no locks in an object store: a save that lives writes something, its mark at
least, every few minutes, and an hour in which nothing came of a save is its end. Times are
those of the store. Where it gives none, nothing is ever dead.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio._aio import run_all
from ckptio.errors import StorageError
from ckptio.events import CleanupFailed
from ckptio.storage.store import ObjectMissingError, StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from ckptio.events import Event
    from ckptio.storage.requests import Requests
    from ckptio.storage.store import ObjectInfo, ObjectStore, UploadInfo

#: A save under way sends something every few minutes; an hour without is its end.
QUIET_S = 3600.0
_OURS = re.compile(
    r"(?:data-|\.attempt-|\.copy-|\.manifest-)([0-9a-f]{32})(?:-\d{5}-\d{5}\.safetensors|-old)?"
)


@dataclass(frozen=True, slots=True)
class Listing:
    """What is under a prefix."""

    objects: tuple[ObjectInfo, ...] = ()
    uploads: tuple[UploadInfo, ...] = ()

    def signs(self) -> Iterator[tuple[str, float]]:
        """Give each key, and when something was last seen of it."""
        yield from ((info.key, info.modified_s) for info in self.objects)
        yield from ((upload.key, upload.active_s) for upload in self.uploads)

    def of(self, owners: set[str]) -> Listing:
        """Give what belongs to some saves."""
        return Listing(
            tuple(info for info in self.objects if owner_of(info.key) in owners),
            tuple(upload for upload in self.uploads if owner_of(upload.key) in owners),
        )


def name_of(key: str) -> str:
    """Give the last part of a key."""
    return key.rpartition("/")[2]


def owner_of(key: str) -> str:
    """Give the id of the save that a key belongs to; empty for what is none of ours."""
    match = _OURS.fullmatch(name_of(key))
    return match[1] if match else ""


def dead_owners(found: Listing, *, now_s: float, quiet_s: float = QUIET_S) -> set[str]:
    """Name the saves of which nothing was seen for a while.

    Args:
        found: What there is of them.
        now_s: The time, in seconds since 1970.
        quiet_s: The while.
    """
    active: dict[str, float] = {}
    for key, when_s in found.signs():
        owner = owner_of(key)
        if owner:
            known = when_s or now_s  # nobody knows when: it may be alive
            active[owner] = max(active.get(owner, 0.0), known)
    return {owner for owner, when_s in active.items() if when_s + quiet_s < now_s}


class Cleaner:
    """Lists and removes. What cannot be removed is an event, not an error.

    Args:
        url: The checkpoint, for events.
        store: Where it is.
        requests: Tries requests.
        emit: Takes events.
    """

    def __init__(
        self, url: str, store: ObjectStore, requests: Requests, emit: Callable[[Event], None]
    ) -> None:
        self._url = url
        self._store = store
        self._requests = requests
        self._emit = emit

    async def list(self, prefix: str) -> Listing:
        """List what is under a prefix, uploads included.

        Raises:
            StorageError: It cannot be listed.
        """
        objects = await self._requests.run("list", prefix, lambda: self._store.list(prefix))
        uploads = await self._requests.run("list", prefix, lambda: self._store.uploads(prefix))
        return Listing(tuple(objects), tuple(uploads))

    async def remove(self, found: Listing) -> tuple[str, ...]:
        """Remove objects and abort uploads; gives the names of what is gone."""
        for upload in found.uploads:
            await self.drop(upload)
        return await self.delete([info.key for info in found.objects])

    async def delete(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Remove objects, each by a request of its own; gives the names of those that are gone."""
        gone = await run_all([self._delete(key) for key in keys], "remove")
        return tuple(name_of(key) for key, is_gone in zip(keys, gone, strict=True) if is_gone)

    async def _delete(self, key: str) -> bool:
        return await self.quietly(key, lambda: self._store.delete([key]))

    async def drop(self, upload: UploadInfo) -> bool:
        """Abort an upload; whether it is gone."""
        return await self.quietly(upload.key, lambda: self._store.drop_upload(upload))

    async def quietly(self, key: str, request: Callable[[], Awaitable[None]]) -> bool:
        """Send what removes something; whether it is gone."""
        try:
            await self._requests.run("remove", key, request)
        except ObjectMissingError:
            return True
        except (StorageError, StoreError) as error:
            self.cannot(key, error)
            return False
        return True

    def cannot(self, key: str, error: StorageError | StoreError) -> None:
        """Say that something stays that is no longer needed."""
        reason = error if isinstance(error, OSError) else OSError(errno.EIO, error.problem)
        self._emit(CleanupFailed(path=self._url, file=name_of(key), error=reason))
