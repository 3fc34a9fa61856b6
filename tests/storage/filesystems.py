"""File systems for fsspec that do the least: all sync, or all async."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
from typing import Any, ClassVar

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class _File(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A file that is put when it is closed; its parts lie in memory until then."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:  # noqa: FBT001, FBT002  # fsspec's signature
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.put_bytes(self.path, b"".join(self.parts))
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start, end)
        return data


class _Contents:
    """What both hold, once for all instances."""

    files: ClassVar[dict[str, tuple[bytes, dt.datetime]]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def put_bytes(cls, path: str, data: bytes) -> None:
        with cls.lock:
            cls.files[path] = (bytes(data), dt.datetime.now(dt.UTC))

    @classmethod
    def entry(cls, path: str) -> dict[str, Any]:
        with cls.lock:
            if path in cls.files:
                data, mtime = cls.files[path]
                return {"name": path, "size": len(data), "type": "file", "mtime": mtime}
            if any(name.startswith(f"{path}/") for name in cls.files):
                return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    @classmethod
    def entries(cls, path: str) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        with cls.lock:
            names = sorted(cls.files)
        for name in names:
            if name.startswith(f"{path}/"):
                child = f"{path}/{name[len(path) + 1 :].partition('/')[0]}"
                found[child] = cls.entry(child)
        if not found:
            raise FileNotFoundError(path)
        return list(found.values())

    @classmethod
    def read(cls, path: str, start: int | None, end: int | None) -> bytes:
        with cls.lock:
            if path not in cls.files:
                raise FileNotFoundError(path)
            return cls.files[path][0][start:end]

    @classmethod
    def remove(cls, path: str) -> None:
        with cls.lock:
            if cls.files.pop(path, None) is None:
                raise FileNotFoundError(path)


class SyncFileSystem(_Contents, AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Blocks, and takes no more than the plainest calls."""

    protocol = "plainsync"
    files: ClassVar[dict[str, tuple[bytes, dt.datetime]]] = {}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002  # fsspec's signature
        path = self._strip_protocol(path)
        entries = [self.entry(path)] if path in self.files else self.entries(path)
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return self.entry(self._strip_protocol(path))

    def _rm(self, path: str) -> None:
        self.remove(self._strip_protocol(path))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        return self.read(self._strip_protocol(path), start, end)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> _File:
        options.pop("autocommit", None)
        return _File(self, path, mode, **options)


class LoopFileSystem(_Contents, AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Awaits everything, on fsspec's loop."""

    protocol = "plainasync"
    cachable = False
    files: ClassVar[dict[str, tuple[bytes, dt.datetime]]] = {}

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return self.entry(self._strip_protocol(path))

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002  # fsspec's signature
        await asyncio.sleep(0)
        path = self._strip_protocol(path)
        entries = [self.entry(path)] if path in self.files else self.entries(path)
        return entries if detail else [entry["name"] for entry in entries]

    async def _rm_file(self, path: str, **_: Any) -> None:
        self.remove(self._strip_protocol(path))

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        return self.read(self._strip_protocol(path), start, end)

    async def _pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self.put_bytes(self._strip_protocol(path), value)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> _File:
        options.pop("autocommit", None)
        return _File(self, path, mode, **options)
