"""What is read of a file system of fsspec. All of it blocks.

Web servers need most of the care. One that sends no ranges sends all of a file for each: what
it sends is read as it comes, and given up at once. One that refuses to say what is missing, as
object stores behind it do to those who may not list them, is believed about what would lie
below a file.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ckptio.storage.fsspec_answers import WEB, info_of, reason_of
from ckptio.storage.keys import split_query
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    RefusedError,
    TransientError,
    may_be_same,
)

if TYPE_CHECKING:
    from ckptio.storage.fsspec_bucket import BucketLook

_NO_RANGES = (
    "the server sends no ranges of a file, only all of it; have it served by one that does, or"
    " download it first"
)


class FsspecReader:
    """Looks at objects and reads them.

    Args:
        fs: The file system.
        protocol: What it is.
        bucket: Looks for the bucket.
    """

    def __init__(self, fs: Any, protocol: str, bucket: BucketLook) -> None:
        self._fs = fs
        self._is_web = protocol in WEB
        self._bucket = bucket

    def head(self, key: str) -> ObjectInfo:
        """Look at an object.

        Raises:
            FileNotFoundError: There is none; or another failure, which `reason_of` tells.
            RefusedError: Nobody says how large it is.
        """
        with contextlib.suppress(AttributeError):  # a listing that is kept shows the past
            self._fs.invalidate_cache(key)
            self._fs.invalidate_cache(self._fs._parent(key))  # noqa: SLF001  # fsspec's public practice
        try:
            info = self._fs.info(key)
        except NotADirectoryError:
            raise FileNotFoundError(key) from None
        except FileNotFoundError as error:
            if reason_of(error) is not None and self._is_below_file(key):
                raise FileNotFoundError(key) from None
            raise
        if info["type"] != "file":
            raise FileNotFoundError(key)
        if info.get("size") is None:
            raise RefusedError("nobody says how many bytes it has")
        return info_of(key, info)

    def _is_below_file(self, key: str) -> bool:
        """Whether a web server has a file, no page, where the directory of a key would be."""
        if not self._is_web:
            return False
        try:
            name, query = split_query(key)
            info = self._fs.info(name.rpartition("/")[0] + query)
        except Exception:  # whoever asked has an answer of its own
            return False
        is_page = info.get("mimetype") == "text/html" or str(info.get("url")).endswith("/")
        return info.get("size") is not None and not is_page

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
        """Read a range, or less of it.

        Raises:
            RefusedError: More came.
        """
        try:
            if self._is_web:
                data = self._stream(key, start, stop)
            else:
                data = bytes(self._fs.cat_file(key, start, stop))
        except NotADirectoryError:
            raise FileNotFoundError(key) from None
        if len(data) > stop - start:
            raise RefusedError(_NO_RANGES)
        return data

    def _stream(self, key: str, start: int, stop: int) -> bytes:
        """Read a range of what a web server has, and no more if it sends more."""
        with self._fs.open(key, "rb", cache_type="none", size=stop) as file:
            file.seek(start)
            try:
                return bytes(file.read(stop - start))
            except ValueError as error:
                if "range" in str(error):
                    raise RefusedError(_NO_RANGES) from error
                raise

    def list(self, prefix: str) -> list[ObjectInfo]:
        """List objects; see `store.ObjectStore`."""
        self._fs.invalidate_cache()
        top = prefix.rstrip("/")
        try:
            infos = self._fs.ls(top, detail=True)
        except NotADirectoryError:
            infos = []
        except FileNotFoundError as error:
            if reason_of(error) is not None:
                raise
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
