"""Any file system that fsspec knows, as an object store.

Through fsspec's blocking calls, on threads that are given up when an answer does not come:
so nothing they use is anybody else's, and a range is one copy more than it could be. Stores
for which that matters have a module of their own. What a thread that was given up may still
do to an object is waited for before that object is removed, or written again in place.

Where files are written in place, a manifest is written beside and renamed, if the file
system is known to do that in one step (local ones, SFTP). On others (HDFS, SMB) a save that is
killed while it replaces a checkpoint may leave a manifest that is told to be damaged.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from ftplib import error_perm
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import tokenize

from ckptio._threads import Threads
from ckptio.errors import ConfigError
from ckptio.storage.fsspec_answers import (
    how_to_create,
    is_of_a_server,
    reason_of,
    secrets_of,
    told,
    unknown_protocol,
)
from ckptio.storage.fsspec_bucket import BucketLook
from ckptio.storage.fsspec_reading import FsspecReader
from ckptio.storage.fsspec_upload import FsspecUpload
from ckptio.storage.keys import shown_url, split_query
from ckptio.storage.options import problem_with
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    StoreError,
    StoreTraits,
    may_be_same,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor, Future

    from ckptio.config import CheckpointConfig
    from ckptio.storage.store import UploadInfo

T = TypeVar("T")

_GAP_NBYTES = 1 << 20
#: Those that put a file in another's place in one step.
_RENAMING = ("sftp", "ssh")
#: File systems with directories whose `rmdir` refuses one that is not empty. That of others
#: removes what is in it, or the bucket.
_WITH_DIRS = ("memory", "sftp", "ssh", "ftp", "smb")
#: What is read from a path, and is a part of the keys all the same: a number behind a `#`.
_IN_KEYS = {"url_fragment", "version_aware"}
#: What fsspec calls a file system's own loop, which is not ours to choose.
_LOOP_OPTIONS = ("asynchronous", "loop")


class FsspecBackend:
    """Opens a file system by the protocol under which fsspec knows it.

    Args:
        protocol: As it stands in URLs.
    """

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol

    def split(self, url: str, options: Mapping[str, Any]) -> tuple[str, str]:
        """Take the whole path for a prefix; see `stores.Backend`."""
        kind = self._class()
        try:
            prefix, query = split_query(str(kind._strip_protocol(url)))  # noqa: SLF001  # fsspec's public practice
        except (ValueError, TypeError, NotImplementedError):
            raise ConfigError(f"{shown_url(url)!r} is no path of {self._protocol}://") from None
        prefix = prefix.rstrip("/") + query
        if not prefix.strip("/"):
            raise ConfigError(f"{shown_url(url)!r} has to name a place in the store, not all of it")
        own = _with_host(kind, url, options)
        return f"{self._protocol}-{tokenize(self._protocol, own)}", prefix

    def gap_nbytes(self) -> int:
        """What a request costs in bytes, about."""
        return _GAP_NBYTES

    async def open(
        self, url: str, options: Mapping[str, Any], config: CheckpointConfig, executor: Executor
    ) -> FsspecStore:
        """Make the file system, on a thread of its own; see `stores.Backend`.

        It may connect to its server as it is made: a thread that hangs is given up.

        Raises:
            StoreError: Its server could not be reached.
            ConfigError: The options make none, or the server refused them.
        """
        del executor
        made = self._class()
        given = {name: value for name, value in options.items() if name not in _LOOP_OPTIONS}
        own = _with_host(made, url, given)
        failure: Exception | None = None
        thread = Threads(1, f"ckptio-{self._protocol}-open")
        try:
            fs = await asyncio.wrap_future(thread.submit(lambda: made(**own)))
        except Exception as error:  # what it says may hold the options
            failure = self._why_not_made(own, error)
        finally:
            thread.shutdown(wait=False)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it refers to this frame: no reference cycle
        return FsspecStore(fs, self._protocol, config.max_requests, secrets_of(own))

    def _why_not_made(self, options: Mapping[str, Any], error: Exception) -> Exception:
        """Say whether it is the server that there is no file system, or what it was given."""
        if is_of_a_server(error):
            return told(error, secrets_of(options))[0]
        return ConfigError(
            f"fsspec cannot make a file system for {self._protocol}://"
            f" of the storage_options given: {problem_with(options, error)}"
        )

    def _class(self) -> Any:
        try:
            return fsspec.get_filesystem_class(self._protocol)
        except ValueError:
            raise ConfigError(unknown_protocol(self._protocol)) from None
        except ImportError as error:
            raise ConfigError(f"{self._protocol}:// needs a package: {error}") from None


def _with_host(kind: Any, url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Add to options what a file system reads from the host of a URL: a server, an account.

    Raises:
        ConfigError: They say something else; or it reads more than the host, of which only
            this URL would have it, and none that is below.
    """
    protocol, _, path = url.partition("://")
    host = f"{protocol}://{path.partition('/')[0]}"
    try:
        found: dict[str, Any] = dict(kind._get_kwargs_from_urls(host))  # noqa: SLF001  # fsspec's public practice
        whole: dict[str, Any] = dict(kind._get_kwargs_from_urls(url))  # noqa: SLF001  # as above
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{shown_url(url)!r} is no URL of {protocol}://") from None
    for name, value in found.items():
        if options.get(name) is not None and str(options[name]) != str(value):
            raise ConfigError(
                f"{shown_url(url)!r} and the storage_options given have another {name!r} each;"
                " leave one out"
            )
    if more := sorted(whole.keys() - found.keys() - _IN_KEYS):
        raise ConfigError(
            f"{shown_url(url)!r} has {', '.join(more)} behind the host; pass it in storage_options"
        )
    return {**options, **found}


class FsspecStore:
    """An object store on top of a blocking file system; see `store.ObjectStore`.

    Args:
        fs: The file system.
        protocol: What it is.
        max_requests: Threads.
        hidden: What must not be shown.
    """

    def __init__(
        self, fs: Any, protocol: str, max_requests: int, hidden: Sequence[str] = ()
    ) -> None:
        self.fs = fs
        self._protocol = protocol
        self._hidden = hidden
        self._threads = Threads(max_requests, f"ckptio-{protocol}")
        self._given_up: dict[str, list[asyncio.Event]] = {}
        inner = fs
        while isinstance(inner, DirFileSystem):
            inner = inner.fs
        self._is_local = isinstance(inner, LocalFileSystem)
        self._bucket = BucketLook(fs, protocol)
        self._reader = FsspecReader(fs, protocol, self._bucket)
        self._renames = self._is_local or protocol in _RENAMING
        self._creating = how_to_create(fs, protocol)
        self._traits = StoreTraits(
            in_order=True,
            conditional="create" if self._creating else "none",
        )

    @property
    def traits(self) -> StoreTraits:
        """What this file system can do."""
        return self._traits

    async def call(self, key: str, function: Callable[[], T]) -> T:
        """Call on a thread, and give the thread up if the caller gives up.

        Args:
            key: What it is done to.
            function: What to call.
        """
        cause: Exception | None = None
        future = self._threads.submit(lambda: self._bucket.call(key, function))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._note(key, future)
            raise
        except FileExistsError:
            failure: StoreError = ConditionFailedError("it is there already")
        except StoreError:
            raise
        except Exception as error:
            failure, is_clean = told(error, self._hidden)
            is_missing = isinstance(failure, ObjectMissingError)
            cause = error if is_clean and not is_missing else None
        raise failure from cause

    def _note(self, key: str, future: Future[Any]) -> None:
        """Remember that a thread may still be at work on an object."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        events = self._given_up.setdefault(key, [])
        events.append(ended)

        def forget() -> None:
            events.remove(ended)
            if not events:
                del self._given_up[key]
            ended.set()

        def tell(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(forget)

        future.add_done_callback(tell)

    async def settled(self, key: str) -> None:
        """Wait until no thread that was given up is at work on an object."""
        while events := self._given_up.get(key):
            await events[0].wait()

    async def head(self, key: str) -> ObjectInfo:
        """Look at an object; see `store.ObjectStore`."""
        return await self.call(key, lambda: self._reader.head(key))

    async def get(self, key: str, limit: int) -> tuple[ObjectInfo, bytes]:
        """Read an object; see `store.ObjectStore`."""
        return await self.call(key, lambda: self._reader.get(key, limit))

    async def get_into(self, key: str, start: int, room: memoryview, *, match: str = "") -> None:
        """Read a range; see `store.ObjectStore`."""
        stop = start + len(room)
        room[:] = await self.call(key, lambda: self._reader.range(key, start, stop, match))

    async def put(
        self, key: str, data: bytes | memoryview, *, absent: bool = False, match: str = ""
    ) -> str:
        """Write an object; see `store.ObjectStore`. What the store cannot decide is looked at."""
        own = bytes(data)  # a thread that is given up may still be sending it
        if not (self._renames or self._creating):  # it may be at work on the file itself
            await self.settled(key)

        def put() -> str:
            if match and not may_be_same(self._reader.head(key).etag, match):
                raise ConditionFailedError("it was changed meanwhile")
            if absent and not self._creating:
                self._require_absent(key)
            try:
                self._write(key, own, self._creating if absent else {})
            except FileNotFoundError:  # its directory went with what another save removed
                self._bucket.check(key, again=True)
                self._write(key, own, self._creating if absent else {})
            return self._reader.head(key).etag

        return await self.call(key, put)

    def _is_there(self, key: str) -> bool:
        """Whether there is an object, or nobody says."""
        try:
            self._reader.head(key)
        except FileNotFoundError as error:
            return reason_of(error) is not None
        return True

    def _require_absent(self, key: str) -> None:
        """Check that there is no object yet: fsspec's `exists` takes every failure for a no."""
        try:
            self._reader.head(key)
        except FileNotFoundError as error:
            if reason_of(error) is not None:
                raise
        else:
            raise FileExistsError(key)

    def _write(self, key: str, data: bytes, options: Mapping[str, Any]) -> None:
        parent = self.make_parent(key)
        if not self._renames:
            self.fs.pipe_file(key, data, **options)
            return
        beside = f"{parent}/.manifest-{secrets.token_hex(16)}"
        try:
            self.fs.pipe_file(beside, data)
            self.fs.mv(beside, key)
        except BaseException:
            with contextlib.suppress(Exception):  # a sweep finds it
                self.fs.rm_file(beside)
            raise

    def make_parent(self, key: str) -> str:
        """Make the directory that holds a key, where there are directories."""
        parent = str(self.fs._parent(key))  # noqa: SLF001  # fsspec's public practice
        with contextlib.suppress(NotImplementedError, FileExistsError):
            self.fs.makedirs(parent, exist_ok=True)
        return parent

    async def upload(self, key: str) -> FsspecUpload:
        """Open a file for writing; see `store.ObjectStore`."""
        await self.settled(key)  # whoever opened it and was given up will remove it
        upload = FsspecUpload(self, key)
        try:
            await self.call(key, upload.begin)
        except asyncio.CancelledError:
            if upload.drop():
                self._note(key, self._threads.submit(upload.discard))
            raise
        return upload

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """List objects; see `store.ObjectStore`."""
        return await self.call(prefix, lambda: self._reader.list(prefix))

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
                self._remove(key)
            if self._is_local or self._protocol in _WITH_DIRS:
                for parent in {self.fs._parent(key) for key in keys}:  # noqa: SLF001  # as above
                    with contextlib.suppress(OSError, error_perm):  # it holds something
                        self.fs.rmdir(parent)

        for key in keys:
            await self.settled(key)
        await self.call(keys[0] if keys else "", delete)

    def _remove(self, key: str) -> None:
        """Remove an object, unless it is gone."""
        try:
            self.fs.rm_file(key)
        except NotADirectoryError:
            pass
        except FileNotFoundError as error:
            if reason_of(error) is not None:
                raise
        except error_perm:  # FTP has one word for what is missing and for what is refused
            if self._is_there(key):
                raise

    async def close(self) -> None:
        """Tell the threads to end, and do not wait: one may hang."""
        self._threads.shutdown(wait=False)
