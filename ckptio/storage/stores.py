"""The object stores of an engine: which there are, and one of each that is used.

A store holds connections, and those belong to a loop, so each engine opens its own at the
first use and closes it at its end. All saves and loads of an engine to one bucket share it,
and with it the limit of requests.

Who can open a store for a protocol is found by name: ours, those that other packages
register under the entry point group `ckptio.backends`, and else `fsspec`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import TYPE_CHECKING, Any, Protocol

from ckptio._threads import Threads
from ckptio.errors import ConfigError, StorageError
from ckptio.storage.keys import shown_url, split_query
from ckptio.storage.options import options_for, other_backends
from ckptio.storage.requests import RequestLimit
from ckptio.storage.store import StoreError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from concurrent.futures import Executor
    from importlib.metadata import EntryPoint

    from ckptio.config import CheckpointConfig
    from ckptio.storage.store import ObjectStore

_S3 = ("s3", "s3a")
#: Opening a store imports its client and starts threads, before it asks for anything: seconds,
#: where processes are many more than cores.
_MIN_OPEN_S = 30.0
#: Threads of stores that are used without an engine, by the command line.
_NUM_THREADS = 4


class Backend(Protocol):
    """Opens stores of one kind.

    What an entry point of the group `ckptio.backends` names, by the protocol of its URLs;
    or a class whose instances, made without arguments, are one. It goes before ours.
    `ckptio.testing.conformance` has the tests that its stores have to pass.
    """

    def split(self, url: str, options: Mapping[str, Any]) -> tuple[str, str]:
        """Split a URL without a slash at its end. Touches nothing.

        Returns:
            What names the store (protocol, endpoint, bucket: the same for two ways to the
            same place, and nothing secret), and the prefix of the checkpoint's keys in it.

        Raises:
            ConfigError: The URL, or an option, makes no sense.
        """
        ...

    def gap_nbytes(self) -> int:
        """Give the bytes that are worth reading over rather than sending another request."""
        ...

    async def open(
        self, url: str, options: Mapping[str, Any], config: CheckpointConfig, executor: Executor
    ) -> ObjectStore:
        """Open the store of a URL, on the running loop.

        Args:
            url: As `split` takes it.
            options: What fsspec calls `storage_options`; may hold secrets.
            config: Limits.
            executor: Threads for calls that block.

        Raises:
            ConfigError: A package is missing, or an option is wrong.
            StoreError: It cannot be reached.
        """
        ...


class Stores:
    """The stores that an engine has open.

    Args:
        config: Limits, and `storage_options`.
        executor: Threads for calls that block.
    """

    def __init__(self, config: CheckpointConfig, executor: Executor) -> None:
        self._config = config
        self._executor = executor
        self._open: dict[str, OpenStore] = {}

    def at(self, url: str) -> tuple[OpenStore, str]:
        """Find the store for a URL, and the prefix in it. Opens nothing; thread-safe.

        Raises:
            ConfigError: There is no way to it.
        """
        protocol, _, rest = split_query(url)[0].partition("://")
        if not rest:
            raise ConfigError(
                f"{shown_url(url)!r} names no bucket, or what a store has instead of one"
            )
        if ":" in rest.partition("/")[0].rpartition("@")[0]:  # not shown
            raise ConfigError("a URL must not hold a password; pass it in storage_options")
        options = options_for(self._config.storage_options, protocol)
        backend = find_backend(protocol, self._config)
        identity, prefix = backend.split(url, options)
        # one of a kind, whoever comes first: dict.setdefault is atomic
        store = self._open.setdefault(
            identity, OpenStore(identity, url, backend, options, self._config, self._executor)
        )
        return store, prefix

    def below(self, url: str) -> tuple[OpenStore, str]:
        """Find the store for what lies below a URL, and what those keys begin with.

        A bucket itself is no place of a checkpoint, but one of many.

        Raises:
            ConfigError: There is no way to it, or what its server is asked is for it alone.
        """
        if split_query(url)[1]:
            raise ConfigError(
                f"{shown_url(url)!r} asks for one thing, and not for what is below it; give the"
                " URL of one checkpoint, or what the query has in storage_options"
            )
        store, key = self.at(url if url.endswith("://") else f"{url}/x")
        return store, key[:-1]

    async def close(self) -> None:
        """Close what is open, all of it even if one fails. On the engine's loop."""
        async with contextlib.AsyncExitStack() as stack:
            for store in self._open.values():
                stack.push_async_callback(store.close)
            self._open.clear()


@contextlib.asynccontextmanager
async def open_stores(config: CheckpointConfig, name: str) -> AsyncIterator[tuple[Threads, Stores]]:
    """Have threads and stores without an engine; they are closed when the block ends.

    Args:
        config: Options.
        name: Prefix of the names of the threads.
    """
    threads = Threads(_NUM_THREADS, name)
    stores = Stores(config, threads)
    try:
        yield threads, stores
    finally:
        await stores.close()
        threads.shutdown()


class OpenStore:
    """A store, opened at the first use and shared from then on."""

    def __init__(
        self,
        identity: str,
        url: str,
        backend: Backend,
        options: Mapping[str, Any],
        config: CheckpointConfig,
        executor: Executor,
    ) -> None:
        self.identity = identity
        self.gap_nbytes = backend.gap_nbytes()
        self._url = url
        self._backend = backend
        self._options = options
        self._config = config
        self._executor = executor
        self._limit = RequestLimit(config.max_requests)
        self._lock: asyncio.Lock | None = None
        self._store: ObjectStore | None = None

    async def get(self) -> tuple[ObjectStore, RequestLimit]:
        """Give the store, and the limit of requests to it.

        Raises:
            ConfigError: It cannot be opened: a package is missing, or an option is wrong.
            StorageError: It cannot be reached, or does not answer in time.
        """
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            if self._store is None:
                self._store = await self._opened()
        return self._store, self._limit

    async def _opened(self) -> ObjectStore:
        timeout_s = max(self._config.request_timeout_s, _MIN_OPEN_S)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._backend.open(
                    self._url, self._options, self._config, self._executor
                )
        except StoreError as error:
            raise StorageError(
                f"cannot open it: {error.problem}", path=shown_url(self._url)
            ) from error
        except TimeoutError as error:
            raise StorageError(
                f"cannot open it: no answer within {timeout_s:g} s",
                path=shown_url(self._url),
                code=errno.ETIMEDOUT,
            ) from error

    async def close(self) -> None:
        """Close the store, if it was opened."""
        store, self._store = self._store, None
        if store is not None:
            await store.close()


def _loaded(entry: EntryPoint) -> Backend:
    """Import what an entry point names: a backend, or a class that makes one."""
    try:
        found = entry.load()
        backend: Backend = found() if isinstance(found, type) else found
    except Exception as error:  # another package's: whatever it is, it is why this is no way
        raise ConfigError(
            f"the backend for {entry.name}:// that {entry.value!r} names cannot be loaded: {error}"
        ) from error
    missing = [name for name in ("split", "gap_nbytes", "open") if not hasattr(backend, name)]
    if missing:
        raise ConfigError(
            f"the backend for {entry.name}:// that {entry.value!r} names has no {missing[0]!r}"
        )
    return backend


def find_backend(protocol: str, config: CheckpointConfig) -> Backend:
    """Find who opens stores of a protocol.

    Raises:
        ConfigError: Nobody does.
    """
    for entry in other_backends().select(name=protocol):
        return _loaded(entry)
    if protocol in _S3:
        try:
            from ckptio.storage.s3 import S3Backend  # noqa: PLC0415  # imports s3fs
        except ImportError as error:
            raise ConfigError(f"s3:// needs `pip install ckptio[s3]`: {error}") from None
        if config.s3_client == "s3fs":
            return S3Backend()
        try:
            from ckptio.storage.obstore import ObstoreBackend  # noqa: PLC0415  # imports obstore
        except ImportError as error:
            raise ConfigError(
                f"s3_client='obstore' needs `pip install ckptio[fast]`: {error}"
            ) from None
        return ObstoreBackend()
    from ckptio.storage.fsspec import FsspecBackend  # noqa: PLC0415  # imports fsspec

    return FsspecBackend(protocol)
