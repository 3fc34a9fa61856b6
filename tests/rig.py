"""What tests build engines and states from."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import os
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from ckptio import Engine
from ckptio._threads import Threads
from ckptio.cache import MetadataCache
from ckptio.config import CheckpointConfig, KiB
from ckptio.engine.context import EngineContext
from ckptio.engine.resolver import Resolver
from ckptio.errors import CheckpointNotFoundError, FormatError, StorageError
from ckptio.format.compose import encode_manifest
from ckptio.format.manifest import decode_manifest
from ckptio.runtime.core import EngineCore
from ckptio.runtime.running import Running
from ckptio.staging.pool import Slab, SlabPool
from ckptio.storage.file_names import data_file_name
from ckptio.storage.local import LocalStorage
from ckptio.storage.objects import ObjectStorage
from ckptio.storage.resolve import local_path
from ckptio.storage.root import LocalRoot
from ckptio.storage.root_interface import Found
from ckptio.storage.stores import OpenStore
from ckptio.storage.streams import AwaitedSink, AwaitedSource
from ckptio.testing import EventLog, MemoryBackend, MemoryStorage
from tests.manifests import block_checksums, encode_tensors

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Iterator,
        Mapping,
        Sequence,
    )
    from concurrent.futures import Executor

    import pytest

    from ckptio.events import Observer
    from ckptio.storage.files import PosixFiles
    from ckptio.storage.interface import Attempt, Storage
    from ckptio.storage.resolve import PathLike
    from ckptio.storage.root_interface import Root
    from ckptio.testing import MemoryRanks, MemoryStore

T = TypeVar("T")

SMALL = CheckpointConfig(
    pool_nbytes=512 * KiB,
    slab_nbytes=64 * KiB,
    block_nbytes=4 * KiB,
    bucket_nbytes=256 * KiB,
)


def config_with(**options: Any) -> CheckpointConfig:
    """Give the small config with other options."""
    return dataclasses.replace(SMALL, **options)


def random_state(sizes: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Make byte tensors of the given sizes; seeds give different bytes in every place."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"tensor{i}": torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        for i, nbytes in enumerate(sizes)
    }


def filled_state(sizes: Sequence[int], value: int) -> dict[str, torch.Tensor]:
    """Make byte tensors that hold `value` everywhere: a mix of two states is seen at once."""
    return {
        f"tensor{i}": torch.full((nbytes,), value, dtype=torch.uint8)
        for i, nbytes in enumerate(sizes)
    }


def clone(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy a state."""
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_same(found: Any, expected: Mapping[str, torch.Tensor]) -> None:
    """Check that two flat states are equal, bit by bit."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert other.dtype == tensor.dtype, name
        assert other.shape == tensor.shape, name
        assert torch.equal(
            other.contiguous().view(-1).view(torch.uint8),
            tensor.contiguous().view(-1).view(torch.uint8),
        ), name


def is_same(found: Any, expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether two flat states are equal."""
    try:
        assert_same(found, expected)
    except AssertionError:
        return False
    return True


def values_in(state: Mapping[str, torch.Tensor]) -> set[int]:
    """Give the lowest and the highest byte of each tensor: one, if nothing is mixed."""
    return {int(value) for tensor in state.values() for value in (tensor.min(), tensor.max())}


def names_in(directory: str | os.PathLike[str]) -> list[str]:
    """Name everything in a directory."""
    return sorted(os.listdir(directory))


def assert_tidy(directory: str | os.PathLike[str]) -> None:
    """Check that a checkpoint's directory holds it and nothing else."""
    with open(os.path.join(directory, "manifest.json"), "rb") as file:
        manifest = decode_manifest(file.read())
    assert names_in(directory) == sorted(["manifest.json", *(f.name for f in manifest.files)])


class FilesResolver(Resolver):
    """Finds checkpoints that are read and written by the given file operations."""

    def __init__(self, context: EngineContext, files: PosixFiles | None) -> None:
        super().__init__(
            context.config, context.executor, context.observer, context.stores, context.far
        )
        self._files = files

    def storage(self, path: PathLike, *, is_second: bool = False) -> Storage:
        threads = self._threads(is_second=is_second)
        return LocalStorage(local_path(path), self._config, threads, self._emit, self._files)


class FilesCore(EngineCore):
    """A real engine whose storage uses the given file operations."""

    def __init__(
        self, config: CheckpointConfig | None, observer: Observer | None, files: PosixFiles
    ) -> None:
        super().__init__(config, observer)
        self._files = files

    async def _make_context(self) -> EngineContext:
        context = await super()._make_context()
        context.resolver = FilesResolver(context, self._files)
        return context


class StorageCore(EngineCore):
    """A real engine that finds its storages by name."""

    def __init__(
        self,
        config: CheckpointConfig | None,
        observer: Observer | None,
        storages: Mapping[str, Storage],
    ) -> None:
        super().__init__(config, observer)
        self._storages = storages

    async def _make_context(self) -> EngineContext:
        context = await super()._make_context()
        context.resolver = StoragesResolver(context, self._storages)
        return context


class StorageRoot:
    """What lies under a path, among storages by name; only to be looked at."""

    def __init__(self, path: str, storages: Mapping[str, Storage]) -> None:
        self.path = path
        self._storages = storages

    def join(self, name: str) -> str:
        return f"{self.path}/{name}"

    async def find(
        self,
        accepts: Callable[[str], bool] | None = None,
        unseen: Callable[[str, StorageError], None] | None = None,
        *,
        aside: bool = False,
    ) -> list[Found]:
        del aside
        found = []
        for path, storage in sorted(self._storages.items()):
            parent, _, name = path.rpartition("/")
            if parent == self.path and (accepts is None or accepts(name)):
                try:
                    found.append(Found(name=name, version=await storage.version()))
                except CheckpointNotFoundError:
                    found.append(Found(name=name, version=None))
                except StorageError as error:
                    if unseen is None:
                        raise
                    unseen(name, error)
        return found

    async def names(self, accepts: Callable[[str], bool] | None = None) -> list[str]:
        return [item.name for item in await self.find(accepts)]

    async def look(
        self, names: Sequence[str], accepts: Callable[[str], bool] | None = None
    ) -> list[Found]:
        del accepts
        return await self.find(names.__contains__)

    async def read_manifest(self, name: str) -> bytes:
        _, data = await self._storages[self.join(name)].read_manifest()
        assert isinstance(data, bytes)
        return data

    async def read_manifests(
        self, names: Sequence[str], decode: Callable[[str, bytes], T], *, aside: bool = False
    ) -> list[T | FormatError | StorageError]:
        del aside
        return [decode(name, await self.read_manifest(name)) for name in names]

    async def remove(self, name: str, save_id: str | None = None) -> int:
        raise NotImplementedError(name)

    async def sweep(self, name: str, quiet_s: float) -> None:
        raise NotImplementedError(name, quiet_s)


class StoragesResolver(Resolver):
    """Finds storages by name; where there is none of it, an empty one."""

    def __init__(self, context: EngineContext, storages: Mapping[str, Storage]) -> None:
        super().__init__(context.config, context.executor, context.observer, context.stores)
        self._storages = storages

    def storage(self, path: PathLike, *, is_second: bool = False) -> Storage:
        del is_second
        return self._storages.get(os.fspath(path)) or MemoryStorage(os.fspath(path))

    def root(self, path: PathLike) -> Root:
        return StorageRoot(os.fspath(path), self._storages)


class InlineCore(EngineCore):
    """An engine without a thread: its loop is the caller's, a virtual one as a rule."""

    def __init__(self, context: EngineContext, storages: Mapping[str, Storage]) -> None:
        super().__init__(context.config, context.observer)
        self._context = context
        self.use_storages(storages)
        self.tasks: set[asyncio.Task[None]] = set()
        self._last_began: asyncio.Event | None = None

    def use_storages(self, storages: Mapping[str, Storage]) -> None:
        """Find other places from now on."""
        self.context.resolver = StoragesResolver(self.context, storages)

    @property
    def context(self) -> EngineContext:
        assert self._context is not None
        return self._context

    def submit(
        self,
        step: Callable[[EngineContext], Awaitable[T]],
        name: str,
        running: Running[T] | None = None,
        *,
        in_flow: bool = False,
    ) -> Running[T]:
        del in_flow
        running = running or Running()
        before, began = self._last_began, asyncio.Event()
        self._last_began = began

        async def run() -> None:
            if before is not None:  # in order, as on an engine's own loop, which shuffles nothing
                await before.wait()
            began.set()
            await self._in_flight.run(step, self.context, running)

        task = asyncio.get_running_loop().create_task(run(), name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return running

    def begin_beside(
        self,
        step: Callable[[EngineContext], Awaitable[T]],
        name: str,
        running: Running[T] | None = None,
    ) -> None:
        self.submit(step, name, running)

    def _require_open(self, *, in_flow: bool = False) -> None:
        del in_flow

    async def call(
        self, step: Callable[[EngineContext], Awaitable[T]], name: str, *, in_flow: bool = False
    ) -> T:
        del name, in_flow
        return await step(self.context)


def engine_on(core: EngineCore) -> Engine:
    """Give the face of an engine."""
    engine = Engine(core.config)
    engine._core = core
    return engine


def context_of(
    config: CheckpointConfig, observer: Observer | None = None, **more: Any
) -> EngineContext:
    """Make the parts of an engine, with threads, slabs and a cache of its own."""
    return EngineContext(
        config=config,
        executor=Threads(4, "ckptio"),
        copiers=Threads(config.max_copies, "ckptio-copy"),
        writers=Threads(config.max_writes, "ckptio-write"),
        readers=Threads(config.max_reads, "ckptio-read"),
        waiters=Threads(1, "ckptio-wait"),
        pool=SlabPool(config.num_slabs * config.slab_nbytes, config.slab_nbytes),
        cache=MetadataCache(config.cache_entries, config.cache_nbytes, ttl_s=config.cache_ttl_s),
        observer=observer,
        **more,
    )


@contextlib.asynccontextmanager
async def running_cache(context: EngineContext) -> AsyncIterator[None]:
    """Run the cache of an engine on the running loop."""
    task = asyncio.get_running_loop().create_task(context.cache.run(), name="cache")
    while not context.cache._open:
        await asyncio.sleep(0)
    try:
        yield
    finally:
        context.cache.close()
        await task


@contextlib.asynccontextmanager
async def inline_engine(
    storages: Mapping[str, Storage],
    config: CheckpointConfig = SMALL,
    observer: Observer | None = None,
) -> AsyncIterator[Engine]:
    """Give an engine on the running loop, and check at the end that it leaves nothing behind.

    What is in flight when the block ends is waited for, failed or not.
    """
    context = context_of(config, observer)
    core = InlineCore(context, storages)
    async with running_cache(context):
        before = asyncio.all_tasks()
        try:
            yield engine_on(core)
        finally:
            if core.tasks:
                await asyncio.wait(core.tasks)
            statistics = context.pool.statistics()
            assert statistics.leased_nbytes == 0
            assert statistics.num_waiting == 0
            context.pool.close()
            context.end_threads()
            assert context.num_saves == 0
            assert asyncio.all_tasks() == before


def object_storage(
    store: MemoryStore,
    *,
    url: str = "memory://run/step-1",
    config: CheckpointConfig = SMALL,
    log: EventLog | None = None,
    seed: int = 0,
) -> ObjectStorage:
    """Give the storage of a checkpoint in a store, on the running loop and by its clock."""
    backend = MemoryBackend(store)
    identity, prefix = backend.split(url, {})
    with_threads = Threads(1, "unused")
    opened = OpenStore(identity, url, backend, {}, config, with_threads)
    clock = asyncio.get_running_loop().time
    rng = random.Random(seed)
    return ObjectStorage(url, opened, prefix, config, log or EventLog(), rng=rng, clock=clock)


SAVE_IDS = [f"{number:032x}" for number in range(0xA0, 0xB0)]


def storage_at(
    directory: str | os.PathLike[str],
    executor: Executor,
    files: PosixFiles | None = None,
    log: EventLog | None = None,
    **options: Any,
) -> LocalStorage:
    """Give the place of a checkpoint on a disk; it has threads already."""
    config = config_with(**options)
    return LocalStorage(os.fspath(directory), config, executor, log or EventLog(), files)


def root_at(
    directory: str | os.PathLike[str],
    executor: Executor,
    files: PosixFiles | None = None,
    log: EventLog | None = None,
) -> LocalRoot:
    """Give a directory of checkpoints."""
    return LocalRoot(os.fspath(directory), SMALL, executor, log or EventLog(), files)


def manifest_of(save_id: str, contents: Mapping[str, bytes], block_nbytes: int = 4 * KiB) -> bytes:
    """Write a manifest for data files without tensors."""
    return encode_manifest(
        writer="test",
        save_id=save_id,
        created="2026-01-01T00:00:00.000+00:00",
        block_nbytes=block_nbytes,
        files=[
            (name, len(data), block_checksums(memoryview(data), block_nbytes))
            for name, data in contents.items()
        ],
        tensors=encode_tensors([]),
        tree=b"null",
    )


def contents_of(save_id: str, *sizes: int) -> dict[str, bytes]:
    """Make data files for a save; saves differ in every byte."""
    fill = int(save_id, 16) % 251
    return {
        data_file_name(save_id, 0, index): bytes(
            (fill + i * 7 + index) % 256 for i in range(nbytes)
        )
        for index, nbytes in enumerate(sizes)
    }


async def write_files(
    storage: Storage, save_id: str, contents: Mapping[str, bytes], *, overwrite: bool = False
) -> None:
    """Save data files as an engine would, and commit."""
    attempt = await storage.begin(save_id, overwrite=overwrite)
    try:
        await fill_attempt(attempt, contents)
        await attempt.commit(manifest_of(save_id, contents))
    except BaseException:
        await attempt.abort()
        raise


async def fill_attempt(attempt: Attempt, contents: Mapping[str, bytes]) -> None:
    """Write data files, back to front, in pieces of two pages; or in slabs, as they come."""
    for name, data in contents.items():
        sink = await attempt.create(name, len(data))
        if isinstance(sink, AwaitedSink):
            for start in range(0, len(data), SMALL.slab_nbytes):
                await sink.write(start, memoryview(data)[start : start + SMALL.slab_nbytes])
            await sink.close()
            continue
        with page_aligned(data) as view:
            for start in reversed(range(0, len(data), 8 * KiB)):
                sink.pwrite(start, view[start : min(start + 8 * KiB, len(data))])
        sink.close()


async def read_files(storage: Storage) -> dict[str, bytes]:
    """Read every data file of a checkpoint, as the manifest has them."""
    _, encoded = await storage.read_manifest()
    found = {}
    assert isinstance(encoded, bytes)
    for entry in decode_manifest(encoded).files:
        source = await storage.open(entry.name, entry.nbytes)
        if isinstance(source, AwaitedSource):
            data = bytearray(entry.nbytes)
            await source.read_into(0, memoryview(data))
            found[entry.name] = bytes(data)
            continue
        try:
            padded = -(-entry.nbytes // 4096) * 4096
            with page_aligned(bytes(padded)) as room:
                source.pread_into(0, room, entry.nbytes)
                found[entry.name] = bytes(room[: entry.nbytes])
        finally:
            source.close()
    return found


async def asked_for(storage: MemoryStorage, kind: str) -> None:
    """Wait until an operation of a kind has been asked of a storage, on a loop in virtual time."""
    while not any(operation.kind == kind for operation in storage.operations):
        await asyncio.sleep(0.001)


@contextlib.contextmanager
def page_aligned(data: bytes) -> Iterator[memoryview]:
    """Lend memory that starts on a page and holds `data`."""
    slab = Slab(max(4096, -(-len(data) // 4096) * 4096))
    slab.view[: len(data)] = data
    yield slab.view[: len(data)]
    slab.close()


def committed(directory: str | os.PathLike[str]) -> dict[str, bytes] | None:
    """Read with plain means what is committed in a directory; nothing if nothing is.

    Raises:
        AssertionError: What is committed is not whole.
    """
    root = Path(directory)
    try:
        manifest = decode_manifest((root / "manifest.json").read_bytes())
    except FileNotFoundError:
        return None
    found = {}
    for entry in manifest.files:
        data = (root / entry.name).read_bytes()
        assert len(data) == entry.nbytes
        sums = block_checksums(memoryview(data), manifest.block_nbytes)
        assert tuple(sums) == entry.checksums()
        found[entry.name] = data
    return found


class Ahead(dt.datetime):
    """A clock that is ahead by an hour."""

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Self:
        return super().now(tz) + dt.timedelta(hours=1)


def begin_close(core: EngineCore, **options: Any) -> threading.Thread:
    """Close on another thread; returns when that has begun."""
    closer = threading.Thread(target=core.close, kwargs=options)
    closer.start()
    while core._portal is not None:
        closer.join(0.001)
    return closer


def told_of_abort(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Give what is set as soon as an engine has told all that is in flight to stop."""
    told, abort = threading.Event(), EngineCore.abort_in_flight

    def abort_and_tell(core: EngineCore) -> None:
        abort(core)
        told.set()

    monkeypatch.setattr(EngineCore, "abort_in_flight", abort_and_tell)
    return told


def num_rounds(world: MemoryRanks) -> float:
    """Tell how many rounds ranks went into, by a message up and one down for each but rank 0."""
    leader: Any = world.ranks[0]
    rounds: float = leader._hub.num_messages / (2 * (len(world.ranks) - 1))
    return rounds
