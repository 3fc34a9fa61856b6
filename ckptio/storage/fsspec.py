"""Any file system that fsspec knows, as an object store.

Through fsspec's blocking calls, on threads that are given up when an answer does not come:
so nothing they use is anybody else's, and a range is one copy more than it could be. Stores
for which that matters have a module of their own. What was given up may still happen: an
object is removed when nothing is under way any more that would write it.

Parts of an upload go through one file object, in order; what fsspec has begun to send it
cannot send again, so the retries of a part are those of the file system itself. Small files
and manifests are single requests, and tried again like everybody's.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import errno
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec
from fsspec.utils import tokenize

from ckptio._aio import Threads
from ckptio.errors import ConfigError
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    StoreError,
    StoreTraits,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.storage.store import UploadInfo

T = TypeVar("T")

_GAP_NBYTES = 1 << 20
#: File systems that decide atomically who makes an object, where they take `mode="create"`.
_ATOMIC = ("gs", "gcs", "az", "abfs", "abfss", "adl")
#: File systems with directories whose `rmdir` refuses one that is not empty. That of others
#: removes what is in it, or the bucket.
_WITH_DIRS = ("memory", "sftp", "ssh", "ftp", "smb")
_HOPELESS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EINVAL,
    errno.ENAMETOOLONG,
)
_THROTTLED = (429, 503)
_REQUEST_TIMEOUT = 408
_FIRST_SERVER_ERROR = 500


class FsspecBackend:
    """Opens a file system by the protocol under which fsspec knows it.

    Args:
        protocol: As it stands in URLs.
    """

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol

    def split(self, url: str, options: Mapping[str, Any]) -> tuple[str, str]:
        """Take the whole path for a prefix; see `stores.Backend`."""
        prefix = str(self._class()._strip_protocol(url)).rstrip("/")  # noqa: SLF001  # fsspec's public practice
        return f"{self._protocol}-{tokenize(self._protocol, dict(options))}", prefix

    def gap_nbytes(self) -> int:
        """What a request costs in bytes, about."""
        return _GAP_NBYTES

    async def open(
        self, url: str, options: Mapping[str, Any], config: CheckpointConfig, executor: Executor
    ) -> FsspecStore:
        """Make the file system; see `stores.Backend`."""
        del url, executor
        try:
            fs = self._class()(**options)
        except (TypeError, ValueError, ImportError) as error:
            raise ConfigError(
                f"fsspec cannot make a file system for {self._protocol}://"
                f" of the storage_options given: {type(error).__name__}"
            ) from None  # what it says may hold the options
        return FsspecStore(fs, self._protocol, config.max_requests)

    def _class(self) -> Any:
        try:
            return fsspec.get_filesystem_class(self._protocol)
        except ValueError:
            raise ConfigError(f"fsspec knows no protocol {self._protocol!r}") from None
        except ImportError as error:
            raise ConfigError(f"{self._protocol}:// needs a package: {error}") from None


class FsspecStore:
    """An object store on top of a blocking file system; see `store.ObjectStore`.

    Args:
        fs: The file system.
        protocol: What it is.
        max_requests: Threads.
    """

    def __init__(self, fs: Any, protocol: str, max_requests: int) -> None:
        self._fs = fs
        self._protocol = protocol
        self._threads = Threads(max_requests, f"ckptio-{protocol}")
        self._late: dict[str, set[asyncio.Future[Any]]] = {}
        self._can_create = (
            "mode" in inspect.signature(getattr(fs, "_pipe_file", fs.pipe_file)).parameters
        )
        atomic = protocol in _ATOMIC and self._can_create
        self._traits = StoreTraits(
            in_order=True, conditional="atomic" if atomic else "none", gap_nbytes=_GAP_NBYTES
        )

    @property
    def identity(self) -> str:
        """Protocol and options."""
        return f"{self._protocol}-{tokenize(self._protocol, self._fs.storage_options)}"

    @property
    def traits(self) -> StoreTraits:
        """What every file system can do."""
        return self._traits

    async def call(self, function: Callable[[], T], writes: str = "") -> T:
        """Call on a thread, and give the thread up if the caller gives up.

        Args:
            function: What to call.
            writes: The object that it writes, if it does.
        """
        call = asyncio.get_running_loop().run_in_executor(self._threads, function)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            self._give_up(call, writes)
            raise
        except FileNotFoundError:
            raise ObjectMissingError("there is no such object") from None
        except FileExistsError:
            raise ConditionFailedError("it is there already") from None
        except StoreError:
            raise
        except Exception as error:
            raise told(error) from error

    def _give_up(self, call: asyncio.Future[Any], key: str) -> None:
        """Remember a call that nobody waits for until it has ended."""
        late = self._late.setdefault(key, set())
        late.add(call)

        def ended(call: asyncio.Future[Any]) -> None:
            if not call.cancelled():
                call.exception()  # seen: who wanted to know has left
            late.discard(call)
            if not late and self._late.get(key) is late:
                del self._late[key]

        call.add_done_callback(ended)

    async def settled(self, key: str) -> None:
        """Wait until nothing is under way that writes an object and was given up."""
        while late := self._late.get(key):
            await asyncio.wait(late)

    async def head(self, key: str) -> ObjectInfo:
        """Look at an object; see `store.ObjectStore`."""
        return await self.call(lambda: self._head(key))

    def _head(self, key: str) -> ObjectInfo:
        with contextlib.suppress(AttributeError):  # a listing that is kept shows the past
            self._fs.invalidate_cache(key)
        info = self._fs.info(key)
        if info["type"] != "file":
            raise FileNotFoundError(key)
        return _info(key, info)

    async def get(self, key: str, limit: int) -> tuple[ObjectInfo, bytes]:
        """Read an object; see `store.ObjectStore`."""

        def get() -> tuple[ObjectInfo, bytes]:
            before = self._head(key)
            data = bytes(self._fs.cat_file(key, 0, min(limit, before.nbytes)))
            if self._head(key) != before:
                raise TransientError("it changed while it was read")
            return before, data

        return await self.call(get)

    async def get_into(self, key: str, start: int, room: memoryview) -> None:
        """Read a range; see `store.ObjectStore`."""
        stop = start + len(room)
        data = await self.call(lambda: self._fs.cat_file(key, start, stop))
        if len(data) != len(room):
            raise TransientError(f"{len(data)} bytes came instead of {len(room)}")
        room[:] = data

    async def put(
        self, key: str, data: bytes | memoryview, *, absent: bool = False, match: str = ""
    ) -> str:
        """Write an object; see `store.ObjectStore`. Where `mode` is not taken, looks first."""
        own = bytes(data)  # a thread that is given up may still be sending it

        def put() -> str:
            if match and self._head(key).etag != match:
                raise ConditionFailedError("it was changed meanwhile")
            if absent and not self._can_create and self._fs.exists(key):
                raise FileExistsError(key)
            if absent and self._can_create:
                self._fs.pipe_file(key, own, mode="create")
            else:
                self._make_parent(key)
                self._fs.pipe_file(key, own)
            return self._head(key).etag

        return await self.call(put, writes=key)

    def _make_parent(self, key: str) -> None:
        """Make the directory that holds a key, where there are directories."""
        with contextlib.suppress(NotImplementedError, FileExistsError):
            self._fs.makedirs(self._fs._parent(key), exist_ok=True)  # noqa: SLF001  # fsspec's public practice

    async def upload(self, key: str) -> FsspecUpload:
        """Open a file for writing; see `store.ObjectStore`."""

        def begin() -> Any:
            self._make_parent(key)
            return self._fs.open(key, "wb")

        return FsspecUpload(self, key, await self.call(begin, writes=key), self._fs)

    async def list(self, prefix: str, *, below: bool = True) -> list[ObjectInfo]:
        """List objects; see `store.ObjectStore`."""

        def find() -> list[ObjectInfo]:
            self._fs.invalidate_cache()
            top = prefix.rstrip("/")
            try:
                if below:
                    infos = list(self._fs.find(top, detail=True).values())
                else:
                    infos = self._fs.ls(top, detail=True)
            except FileNotFoundError:
                return []
            found = []
            for info in infos:
                is_file = info["type"] == "file"
                key = str(info["name"]).rstrip("/") + ("" if is_file else "/")
                if key.startswith(prefix):
                    found.append(_info(key, info))
            return sorted(found, key=lambda info: info.key)

        return await self.call(find)

    async def uploads(self, prefix: str) -> Sequence[UploadInfo]:
        """Nothing: fsspec has no word for it."""
        del prefix
        return ()

    async def drop_upload(self, upload: UploadInfo) -> None:
        """Nobody can ask for it."""
        raise RefusedError(f"fsspec cannot drop {upload.upload_id!r}")

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, and where there are directories those that are empty then."""

        def delete() -> None:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(key)
                if self._protocol in _WITH_DIRS:
                    with contextlib.suppress(OSError):  # not empty, or not there
                        self._fs.rmdir(self._fs._parent(key))  # noqa: SLF001  # fsspec's public practice

        for key in keys:
            await self.settled(key)
        await self.call(delete)

    async def close(self) -> None:
        """Let the threads end, when they do."""
        self._threads.shutdown(wait=False)


class FsspecUpload:
    """A file object being written; see `store.Upload`."""

    def __init__(self, store: FsspecStore, key: str, file: Any, fs: Any) -> None:
        self._store = store
        self._key = key
        self._file = file
        self._fs = fs

    async def write(self, number: int, data: memoryview) -> None:
        """Write a part, the next one; see `store.Upload`."""
        own = bytes(data)  # a thread that is given up may still be sending it
        try:
            await self._store.call(lambda: self._file.write(own), writes=self._key)
        except TransientError as error:
            raise RefusedError(f"{error.problem} (part {number} cannot be sent again)") from error

    async def complete(self) -> None:
        """Close the file."""
        await self._store.call(self._file.close, writes=self._key)

    async def abort(self) -> None:
        """Drop what was written."""

        def abort() -> None:
            with contextlib.suppress(AttributeError, NotImplementedError):
                self._file.discard()
            with contextlib.suppress(AttributeError):
                self._file.closed = True  # else its end would send what is left in its buffer
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._key)

        await self._store.settled(self._key)
        await self._store.call(abort)


def _info(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    """Make one of what fsspec says."""
    modified_s = 0.0
    for name in ("LastModified", "last_modified", "updated", "mtime", "modified", "created"):
        value = info.get(name)
        if isinstance(value, dt.datetime):
            modified_s = value.timestamp()
        elif isinstance(value, str):
            with contextlib.suppress(ValueError):
                modified_s = dt.datetime.fromisoformat(value).timestamp()
        elif isinstance(value, (int, float)):
            modified_s = float(value)
        if modified_s:
            break
    nbytes = int(info.get("size") or 0)
    etag = next((info[name] for name in ("ETag", "etag", "generation") if info.get(name)), None)
    return ObjectInfo(
        key=key,
        nbytes=nbytes,
        etag=str(etag or f"{modified_s!r}-{nbytes}"),
        modified_s=modified_s,
    )


def told(error: Exception) -> StoreError:
    """Say whether a failure may get better."""
    problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    status = next(
        (
            value
            for name in ("status", "status_code", "code")
            if isinstance(value := getattr(error, name, None), int)
        ),
        None,
    )
    if status in _THROTTLED:
        return TransientError(problem, slow_down=True)
    if status is not None and 0 < status < _FIRST_SERVER_ERROR and status != _REQUEST_TIMEOUT:
        return RefusedError(problem)
    if isinstance(error, OSError) and error.errno in _HOPELESS:
        return RefusedError(problem)
    if isinstance(error, (PermissionError, ValueError, TypeError, NotImplementedError)):
        return RefusedError(problem)
    return TransientError(problem)
