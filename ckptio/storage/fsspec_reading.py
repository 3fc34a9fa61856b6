"""What is read of a file system of fsspec. All of it blocks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ckptio.storage.fsspec_answers import info_of
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    RefusedError,
    TransientError,
    may_be_same,
)

if TYPE_CHECKING:
    from ckptio.storage.fsspec_bucket import BucketLook


class FsspecReader:
    """Looks at objects and reads them.

    Args:
        fs: The file system.
        bucket: Looks for the bucket.
    """

    def __init__(self, fs: Any, bucket: BucketLook) -> None:
        self._fs = fs
        self._bucket = bucket

    def head(self, key: str) -> ObjectInfo:
        """Look at an object.

        Raises:
            FileNotFoundError: There is none.
        """
        with contextlib.suppress(AttributeError):  # a listing that is kept shows the past
            self._fs.invalidate_cache(key)
            self._fs.invalidate_cache(self._fs._parent(key))  # noqa: SLF001  # fsspec's public practice
        info = self._fs.info(key)
        if info["type"] != "file":
            raise FileNotFoundError(key)
        return info_of(key, info)

    def get(self, key: str, limit: int) -> tuple[ObjectInfo, bytes]:
        """Read an object; see `store.ObjectStore`."""
        before = self.head(key)
        nbytes = min(limit, before.nbytes)
        data = self._read(key, 0, nbytes) if nbytes else b""
        if not may_be_same(self.head(key).etag, before.etag) or len(data) != nbytes:
            raise TransientError("it changed while it was read")
        return before, data

    def range(self, key: str, start: int, stop: int, match: str) -> bytes:
        """Read a range; see `store.ObjectStore.get_into`."""
        data = self._read(key, start, stop)
        if len(data) == stop - start and not match:
            return data
        info = self.head(key)
        if match and not may_be_same(info.etag, match):
            raise ConditionFailedError("another object is there")
        if len(data) == stop - start:
            return data
        if info.nbytes < stop:
            raise RefusedError(f"it ends at byte {info.nbytes}")
        raise TransientError(f"{len(data)} bytes came instead of {stop - start}")

    def _read(self, key: str, start: int, stop: int) -> bytes:
        """Read a range, or less of it."""
        return bytes(self._fs.cat_file(key, start, stop))

    def list(self, prefix: str, *, below: bool) -> list[ObjectInfo]:
        """List objects; see `store.ObjectStore`."""
        self._fs.invalidate_cache()
        top = prefix.rstrip("/")
        try:
            if below:
                infos = list(self._fs.find(top, detail=True).values())
            else:
                infos = self._fs.ls(top, detail=True)
        except FileNotFoundError:
            infos = []
        if not infos:
            self._bucket.check(prefix)
        found = []
        for info in infos:
            is_file = info["type"] == "file"
            key = str(info["name"]).rstrip("/") + ("" if is_file else "/")
            if key.startswith(prefix) and key != prefix:
                found.append(info_of(key, info))
        return sorted(found, key=lambda info: info.key)
