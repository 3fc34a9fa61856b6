"""An object store in memory whose every request can be watched, delayed and made to fail."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from typing import TYPE_CHECKING, Any

import fsspec

from ckptio.storage.requests import RequestLimit
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    ObjectMissingError,
    StoreTraits,
    UploadInfo,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class DictStore:
    """Objects by key.

    Attributes:
        objects: Contents.
        infos: What a listing says of them.
        begun: Uploads that were not ended.
        log: Requests that were carried out: kind and key.
        on_request: Called with each before it is carried out; may raise.
        skew_s: How far the clock of the store is ahead.
        most_at_once: How many requests ran at a time, at most.
        rng: Draws how long a request takes.
        max_delay_s: The longest, in seconds.
    """

    def __init__(self, seed: int = 0, max_delay_s: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.max_delay_s = max_delay_s
        self.objects: dict[str, bytes] = {}
        self.infos: dict[str, ObjectInfo] = {}
        self.begun: list[UploadInfo] = []
        self.log: list[tuple[str, str]] = []
        self.on_request: Callable[[str, str], None] = lambda _kind, _key: None
        self.skew_s = 0.0
        self.most_at_once = 0
        self._num_running = 0
        self._num_written = 0

    identity = "dict"
    gap_nbytes = 0
    traits = StoreTraits(conditional="atomic")

    async def _request(self, kind: str, key: str) -> None:
        self._num_running += 1
        self.most_at_once = max(self.most_at_once, self._num_running)
        try:
            await asyncio.sleep(self.rng.uniform(0, self.max_delay_s))
            self.on_request(kind, key)
            self.log.append((kind, key))
        finally:
            self._num_running -= 1

    def set(self, key: str, data: bytes, age_s: float = 0.0) -> None:
        """Write an object some time ago."""
        self._num_written += 1
        self.objects[key] = data
        self.infos[key] = ObjectInfo(
            key=key,
            nbytes=len(data),
            etag=str(self._num_written),
            modified_s=time.time() + self.skew_s - age_s,
        )

    def age(self, seconds: float) -> None:
        """Let everything be older."""
        for key, info in self.infos.items():
            self.infos[key] = dataclasses.replace(info, modified_s=info.modified_s - seconds)
        self.begun = [dataclasses.replace(u, active_s=u.active_s - seconds) for u in self.begun]

    def _info(self, key: str) -> ObjectInfo:
        if key not in self.objects:
            raise ObjectMissingError(key)
        return self.infos[key]

    async def head(self, key: str) -> ObjectInfo:
        await self._request("head", key)
        return self._info(key)

    async def get(self, key: str, limit: int) -> tuple[ObjectInfo, bytes]:
        await self._request("get", key)
        return self._info(key), self.objects[key][:limit]

    async def get_into(self, key: str, start: int, room: memoryview, *, match: str = "") -> None:
        await self._request("get", key)
        if match and self._info(key).etag != match:
            raise ConditionFailedError("it is another one")
        self._info(key)
        room[:] = self.objects[key][start : start + len(room)]

    async def put(
        self, key: str, data: bytes | memoryview, *, absent: bool = False, match: str = ""
    ) -> str:
        await self._request("put", key)
        if (absent and key in self.objects) or (match and self._info(key).etag != match):
            raise ConditionFailedError("it is another one")
        self.set(key, bytes(data))
        return self.infos[key].etag

    async def upload(self, key: str) -> Any:
        raise NotImplementedError

    async def list(self, prefix: str) -> list[ObjectInfo]:
        await self._request("list", prefix)
        found = {}
        for key, info in self.infos.items():
            first, slash, _ = key.removeprefix(prefix).partition("/")
            if key not in self.objects or not key.startswith(prefix):
                continue
            if not slash:
                found[key] = info
            else:
                found[prefix + first + "/"] = ObjectInfo(key=f"{prefix}{first}/", nbytes=0)
        return [found[key] for key in sorted(found)]

    async def uploads(self, prefix: str) -> Sequence[UploadInfo]:
        await self._request("uploads", prefix)
        return [upload for upload in self.begun if upload.key.startswith(prefix)]

    async def drop_upload(self, upload: UploadInfo) -> None:
        await self._request("drop", upload.key)
        self.begun.remove(upload)

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._request("delete", key)
            self.objects.pop(key, None)

    async def close(self) -> None:
        """Nothing is held."""


class Opened:
    """A store that is open, as `storage.stores.OpenStore` gives it."""

    def __init__(self, store: DictStore, max_requests: int = 16) -> None:
        self.store = store
        self.identity = store.identity
        self.gap_nbytes = store.gap_nbytes
        self._limit = RequestLimit(max_requests)

    async def get(self) -> tuple[DictStore, RequestLimit]:
        return self.store, self._limit


class OneStore:
    """Stands for `storage.stores.Stores`: one store for `dict://` and all that is below it."""

    def __init__(self, store: DictStore) -> None:
        self._opened = Opened(store)

    def at(self, url: str) -> tuple[Opened, str]:
        return self._opened, url.removeprefix("dict://")

    def below(self, url: str) -> tuple[Opened, str]:
        return self._opened, url.removeprefix("dict://") + "/"

    async def close(self) -> None:
        """Nothing is held."""


def put(url: str, data: bytes = b"x", age_s: float = 0.0) -> None:
    """Write an object to fsspec's store in memory some time ago."""
    memory = fsspec.filesystem("memory")
    path = "/" + url.partition("://")[2]
    memory.pipe_file(path, data)
    file = memory.store[path]
    file.created = file.modified = file.modified.fromtimestamp(
        time.time() - age_s, tz=file.modified.tzinfo
    )
