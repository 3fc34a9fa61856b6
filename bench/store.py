"""A server that speaks S3, a relay that counts what it sends, and who saves to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import tempfile
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import msgspec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from bench.baselines import crc32
from tests.s3 import servers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.states import State
    from tests.s3.servers import Server

_CHUNK_NBYTES = 1 << 18


@contextlib.contextmanager
def store_server() -> Iterator[tuple[str, Server]]:
    """Run the best server there is: Ceph, with its store in memory, or a simulation.

    Yields:
        What it is, for the tables, and how to get there.
    """
    if servers.missing_ceph():
        with servers.moto() as server:
            yield "moto, a simulation in Python", server
    else:
        with servers.ceph() as server:
            yield "Ceph, one OSD with its store in memory", server


class Relay:
    """Passes bytes between clients and a server, and counts them; on a thread of its own.

    Attributes:
        sent_nbytes: Bytes that the server has sent, heads of answers included.
    """

    def __init__(self, server: Server) -> None:
        self.sent_nbytes = 0
        self._upstream = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        listening = asyncio.start_server(self._pass, "127.0.0.1", 0, limit=_CHUNK_NBYTES)
        self._listener = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        port = self._listener.sockets[0].getsockname()[1]
        return dataclasses.replace(self._upstream, endpoint=f"http://127.0.0.1:{port}")

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = urlsplit(self._upstream.endpoint)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            back, forth = await asyncio.open_connection(there.hostname, there.port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._copy(reader, forth))
                    group.create_task(self._copy(back, writer, counts=True))
            finally:
                forth.close()
                writer.close()

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, counts: bool = False
    ) -> None:
        while data := await source.read(_CHUNK_NBYTES):
            self.sent_nbytes += len(data) * counts
            target.write(data)
            await target.drain()
        target.write_eof()


class StorePeer(Protocol):
    """Another way to save to a store and to load from it. Blocks."""

    @property
    def name(self) -> str:
        """As the tables have it."""

    @property
    def missing(self) -> str:
        """Why it cannot be used here; empty if it can."""

    def save(self, server: Server, url: str, state: State) -> None:
        """Save to a prefix where nothing is."""

    def load(self, server: Server, url: str, into: State) -> None:
        """Fill all tensors of `into`."""


@contextlib.contextmanager
def _dcp() -> Iterator[None]:
    """Have DCP not sum, and its errors, which are no `Exception`s, be like anybody's."""
    try:
        with crc32(is_on=False):
            yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise RuntimeError(f"{type(cause).__name__}: {cause}") from error


def _missing(module: str, package: str) -> str:
    return "" if importlib.util.find_spec(module) else f"{package} is not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FsspecDcp:
    """DCP's own writer and reader for what fsspec knows, on s3fs.

    It reads through s3fs' block cache: with s3fs' default, which reads ahead from wherever DCP
    seeks to, a load gets every byte five times and takes more than twice as long.
    """

    num_threads: int = 1

    @property
    def name(self) -> str:
        """Its settings."""
        return f"dcp, FsspecWriter on s3fs ({self.num_threads} thread{'s'[: self.num_threads - 1]})"

    @property
    def missing(self) -> str:
        """Nothing: s3fs is what ckptio needs too."""
        return ""

    def save(self, server: Server, url: str, state: State) -> None:
        """Save with DCP."""
        from torch.distributed.checkpoint._fsspec_filesystem import (  # noqa: PLC0415  # imports s3fs
            FsspecWriter,
        )

        writer: Any = FsspecWriter(
            url, thread_count=self.num_threads, use_listings_cache=False, **server.options
        )
        with _dcp():
            dcp_save(dict(state), storage_writer=writer, no_dist=True)

    def load(self, server: Server, url: str, into: State) -> None:
        """Load with DCP."""
        from torch.distributed.checkpoint._fsspec_filesystem import (  # noqa: PLC0415  # as above
            FsspecReader,
        )

        reader: Any = FsspecReader(
            url, use_listings_cache=False, default_cache_type="blockcache", **server.options
        )
        with _dcp():
            dcp_load(dict(into), storage_reader=reader, no_dist=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorDcp:
    """DCP with the writer and reader of Amazon's connector."""

    num_threads: int = 1

    @property
    def name(self) -> str:
        """Its settings."""
        return f"dcp, s3torchconnector ({self.num_threads} thread{'s'[: self.num_threads - 1]})"

    @property
    def missing(self) -> str:
        """Whether it is installed, with what its DCP part needs."""
        return _missing("s3torchconnector", "s3torchconnector") or _missing(
            "tenacity", "s3torchconnector's part for DCP"
        )

    def save(self, server: Server, url: str, state: State) -> None:
        """Save with DCP."""
        from s3torchconnector.dcp import S3StorageWriter  # noqa: PLC0415  # may not be installed

        with _credentials(server):
            writer = S3StorageWriter(servers.REGION, url, thread_count=self.num_threads)
            writer.fs = self._files(server)
            with _dcp():
                dcp_save(dict(state), storage_writer=writer, no_dist=True)

    def load(self, server: Server, url: str, into: State) -> None:
        """Load with DCP."""
        from s3torchconnector.dcp import S3StorageReader  # noqa: PLC0415  # may not be installed

        with _credentials(server):
            reader = S3StorageReader(servers.REGION, url)
            reader.fs = self._files(server)
            with _dcp():
                dcp_load(dict(into), storage_reader=reader, no_dist=True)

    def _files(self, server: Server) -> Any:
        """Make what knows the endpoint, for which its classes have no argument."""
        from s3torchconnector import S3ClientConfig  # noqa: PLC0415  # may not be installed
        from s3torchconnector._s3client import S3Client  # noqa: PLC0415  # as above
        from s3torchconnector.dcp import S3FileSystem  # noqa: PLC0415  # as above

        config = S3ClientConfig(force_path_style=True)
        client = S3Client(servers.REGION, endpoint=server.endpoint, s3client_config=config)
        return S3FileSystem(servers.REGION, s3_client=client)


@contextlib.contextmanager
def _credentials(server: Server) -> Iterator[None]:
    """Put credentials where the connector looks for them."""
    ours = {"AWS_ACCESS_KEY_ID": server.key, "AWS_SECRET_ACCESS_KEY": server.secret}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiStorageDcp:
    """DCP with the writer and reader of NVIDIA's multi-storage-client."""

    num_threads: int = 1

    @property
    def name(self) -> str:
        """Its settings."""
        return f"dcp, multi-storage-client ({self.num_threads} thread{'s'[: self.num_threads - 1]})"

    @property
    def missing(self) -> str:
        """Whether it is installed."""
        return _missing("multistorageclient", "multi-storage-client")

    def save(self, server: Server, url: str, state: State) -> None:
        """Save with DCP."""
        from multistorageclient.contrib import torch as msc  # noqa: PLC0415  # may not be installed

        with self._profile(server, url) as path:
            writer = msc.MultiStorageFileSystemWriter(path, thread_count=self.num_threads)
            with _dcp():
                dcp_save(dict(state), storage_writer=writer, no_dist=True)

    def load(self, server: Server, url: str, into: State) -> None:
        """Load with DCP."""
        from multistorageclient.contrib import torch as msc  # noqa: PLC0415  # may not be installed

        with self._profile(server, url) as path:
            reader = msc.MultiStorageFileSystemReader(path, thread_count=self.num_threads)
            with _dcp():
                dcp_load(dict(into), storage_reader=reader, no_dist=True)

    @contextlib.contextmanager
    def _profile(self, server: Server, url: str) -> Iterator[str]:
        """Describe the server in the file that it reads; gives the URL as it wants it."""
        name = f"bench-{urlsplit(server.endpoint).port}"
        bucket, _, prefix = url.partition("://")[2].partition("/")
        where = {
            "base_path": bucket,
            "endpoint_url": server.endpoint,
            "region_name": servers.REGION,
        }
        keys = {"access_key": server.key, "secret_key": server.secret}
        profile = {
            "storage_provider": {"type": "s3", "options": where},
            "credentials_provider": {"type": "S3Credentials", "options": keys},
        }
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            file.write(msgspec.json.encode({"profiles": {name: profile}}))
            file.flush()
            os.environ["MSC_CONFIG"] = file.name
            try:
                yield f"msc://{name}/{prefix}"
            finally:
                del os.environ["MSC_CONFIG"]


def store_peers() -> list[StorePeer]:
    """Give the peers, with one thread and with four; multi-storage-client with four alone."""
    return [
        FsspecDcp(),
        FsspecDcp(num_threads=4),
        ConnectorDcp(),
        ConnectorDcp(num_threads=4),
        MultiStorageDcp(num_threads=4),
    ]
