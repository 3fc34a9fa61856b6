"""What is stored in an object store in memory; ways to it are in `testing.objects`."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from dataclasses import dataclass, field

from ckptio.storage.store import ConditionFailedError, ObjectInfo, ObjectMissingError

_EPOCH_S = 1_700_000_000.0


@dataclass(slots=True)
class StoredObject:
    """An object: what it holds, and when it was written."""

    data: bytes
    etag: str
    modified_s: float


@dataclass(slots=True)
class Parts:
    """An upload in parts that has not ended."""

    key: str
    active_s: float
    parts: dict[int, bytes] = field(default_factory=dict)


class MemoryBucket:
    """What is stored. Time in it is that of the running loop.

    Attributes:
        objects: What is there, by key.
        open_uploads: Uploads that were begun and not ended, by id.
    """

    def __init__(self) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.open_uploads: dict[str, Parts] = {}
        self._numbers = itertools.count(1)

    @property
    def keys(self) -> list[str]:
        """Name every object."""
        return sorted(self.objects)

    def now_s(self) -> float:
        """Give the time, in seconds since 1970."""
        return _EPOCH_S + asyncio.get_running_loop().time()

    def info(self, key: str) -> ObjectInfo:
        """Describe an object."""
        found = self.find(key)
        return ObjectInfo(
            key=key, nbytes=len(found.data), etag=found.etag, modified_s=found.modified_s
        )

    def find(self, key: str) -> StoredObject:
        """Find an object."""
        try:
            return self.objects[key]
        except KeyError:
            raise ObjectMissingError("there is no such object") from None

    def put(self, key: str, data: bytes) -> str:
        """Make or replace an object; gives its etag."""
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        self.objects[key] = StoredObject(data, etag, self.now_s())
        return etag

    def begin(self, key: str) -> str:
        """Begin an upload; gives its id."""
        upload_id = f"upload-{next(self._numbers)}"
        self.open_uploads[upload_id] = Parts(key, self.now_s())
        return upload_id

    def require(self, key: str, *, absent: bool, match: str) -> None:
        """Check a condition."""
        found = self.objects.get(key)
        if absent and found is not None:
            raise ConditionFailedError("it is there already")
        if match and (found is None or found.etag != match):
            raise ConditionFailedError("it was changed meanwhile")
