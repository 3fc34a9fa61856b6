"""The metadata cache: an actor that owns the manifests of an engine.

One task owns the table; others send it requests and wait for answers. So there are no
locks, and each of these holds by construction:

* single flight: fifty readers of one checkpoint cause one read;
* fresh: an answer is never older than the request. Whoever joins a read that had begun before
  has its result checked once more by its version (a stat), not taken on trust. With
  `ttl_s`, an answer may be that much older, and costs no request;
* failures are not kept: the next request tries again;
* a waiter that is cancelled leaves; the read goes on for the others;
* links are followed: `latest` and `step-3` are one entry, and a link that was moved is
  looked up anew.

Manifests are immutable, so readers share them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ckptio.errors import CheckpointNotFoundError, EngineClosedError, FormatError, StorageError
from ckptio.format.manifest import decode_manifest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    from ckptio.format.manifest import Manifest
    from ckptio.storage.interface import Storage

    Decode = Callable[[bytes], Awaitable[Manifest]]

T = TypeVar("T")


#: Entries beside which something is kept: it is not counted, and may be larger than a manifest.
_MAX_MADE = 4


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What a cache has and has done.

    Attributes:
        num_entries: Manifests kept.
        nbytes: Their bytes, as read.
        num_reads: Manifests read, ever.
        num_checks: Versions asked for, ever.
        num_hits: Requests answered by an entry that a check found unchanged, or that was
            checked less than `ttl_s` before.
    """

    num_entries: int
    nbytes: int
    num_reads: int
    num_checks: int
    num_hits: int


@dataclass(slots=True)
class _Entry:
    version: Hashable
    manifest: Manifest
    nbytes: int
    asked_s: float  # when its version was last asked for, by the loop's clock
    made: Any = None  # see `beside`


@dataclass(slots=True)
class _Key:
    """What is going on for one checkpoint.

    Attributes:
        waiting: Who waits for the next round.
        asked: Who waits for this one.
        task: What answers them.
        busy: Whether there is a round now.
        forgotten: Whether the checkpoint was forgotten since that began.
    """

    waiting: deque[tuple[Storage, asyncio.Future[Manifest]]] = field(default_factory=deque)
    asked: list[tuple[Storage, asyncio.Future[Manifest]]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    busy: bool = False
    forgotten: bool = False

    def is_unwanted(self) -> bool:
        """Whether everybody who asked has left."""
        return all(future.done() for _, future in (*self.asked, *self.waiting))


class MetadataCache:
    """Manifests by checkpoint. Used from the loop that `run` runs on; `statistics` from anywhere.

    Args:
        max_entries: Manifests kept, at most.
        max_nbytes: Bytes of manifests kept, at most.
        decode: Parses manifests; elsewhere than on the loop, if that takes long.
        ttl_s: Seconds for which an entry is taken on trust.
    """

    def __init__(
        self,
        max_entries: int,
        max_nbytes: int,
        decode: Decode | None = None,
        *,
        ttl_s: float = 0.0,
    ) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._max_nbytes = max_nbytes
        self._decode = decode or _decode_here
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._keys: dict[str, _Key] = {}
        self._inbox: asyncio.Queue[str | None] = asyncio.Queue()
        self._nbytes = self._num_reads = self._num_checks = self._num_hits = 0
        self._open = False

    async def run(self) -> None:
        """Serve requests until `close`. The caller gives this a task of its own."""
        self._open = True
        try:
            async with asyncio.TaskGroup() as group:
                while (identity := await self._inbox.get()) is not None:
                    self._begin(identity, group)
                for key in self._keys.values():
                    if key.task is not None and key.is_unwanted():
                        key.task.cancel()  # it may wait for a store that does not answer
        finally:
            self._open = False
            for key in self._keys.values():
                for _, future in key.waiting:
                    if not future.done():
                        future.set_exception(_closed())

    def close(self) -> None:
        """Let `run` end once what is under way, and somebody waits for, is done."""
        self._inbox.put_nowait(None)

    async def get(self, storage: Storage, *, fresh: bool = False) -> Manifest:
        """Give the manifest of a checkpoint, as it is at the call or later.

        With `ttl_s`, it may be as much older as that says.

        Args:
            storage: The checkpoint.
            fresh: Ask the storage in any case, whatever `ttl_s` says.

        Raises:
            CheckpointNotFoundError: There is none.
            FormatError: It is damaged.
            StorageError: It cannot be read.
            EngineClosedError: `run` does not run yet, or was closed meanwhile.
        """
        if not self._open:
            raise _closed()
        identity = await storage.identify()
        if not self._open:
            raise _closed()
        loop = asyncio.get_running_loop()
        entry = self._entries.get(identity)
        if entry is not None and not fresh and loop.time() - entry.asked_s < self._ttl_s:
            self._num_hits += 1
            self._entries.move_to_end(identity)
            return entry.manifest
        future: asyncio.Future[Manifest] = loop.create_future()
        self._keys.setdefault(identity, _Key()).waiting.append((storage, future))
        self._inbox.put_nowait(identity)
        try:
            return await future
        finally:
            del future  # an error that it ends with refers to this frame: no reference cycle

    def beside(self, manifest: Manifest, make: Callable[[Manifest], T]) -> T:
        """Give what was made of a manifest, and is kept as long as that is here; of the last few.

        Args:
            manifest: As `get` gave it.
            make: Makes it, if that was not done; all callers give the same, and it is quick.
        """
        entry = next((e for e in self._entries.values() if e.manifest is manifest), None)
        if entry is None:
            return make(manifest)
        if entry.made is None:
            entry.made = make(manifest)
            others = [e for e in self._entries.values() if e.made is not None and e is not entry]
            for other in others[: 1 - _MAX_MADE]:
                other.made = None
        made: T = entry.made
        return made

    def forget(self, storage: Storage) -> None:
        """Drop what is kept of a checkpoint, and keep nothing of what is being read of it."""
        identity = storage.identity
        self._drop(identity)
        if identity in self._keys:
            self._keys[identity].forgotten = True

    def clear(self) -> None:
        """Drop what is kept of every checkpoint."""
        self._entries.clear()
        self._nbytes = 0

    def statistics(self) -> CacheStatistics:
        """Say what the cache has and has done."""
        return CacheStatistics(
            num_entries=len(self._entries),
            nbytes=self._nbytes,
            num_reads=self._num_reads,
            num_checks=self._num_checks,
            num_hits=self._num_hits,
        )

    def _begin(self, identity: str, group: asyncio.TaskGroup) -> None:
        """Have a task answer whoever waits for a checkpoint, unless one does.

        `run` itself has nothing of a request: it would keep that while it waits for the next one,
        with the error that was the answer, the caller's frames that this has, and their models.
        """
        key = self._keys.get(identity)
        if key is not None and not key.busy and key.waiting:
            key.busy = True
            serving = self._serve(identity, key)
            key.task = group.create_task(serving, name=f"cache {identity}")

    async def _serve(self, identity: str, key: _Key) -> None:
        """Answer everybody who waits for a checkpoint, until nobody does.

        Each round answers those who were there when it began; whoever comes meanwhile has the
        next round, which is one check if nothing changed.
        """
        try:
            while key.waiting:
                batch = key.asked = list(key.waiting)
                key.waiting.clear()
                key.forgotten = False
                await self._answer(identity, key, batch)
        finally:
            key.busy = False
            if key.waiting:  # this task was cancelled: another one, or the end of `run`
                self._inbox.put_nowait(identity)
            else:
                del self._keys[identity]

    async def _answer(
        self, identity: str, key: _Key, batch: list[tuple[Storage, asyncio.Future[Manifest]]]
    ) -> None:
        """Give those of one round the manifest, or the error that each of them raises."""
        storage = batch[0][0]
        try:
            manifest = await self._fetch(identity, storage)
        except BaseException as error:  # each waiter raises it, a cancellation as our end
            if _fail(batch, _as_answer(error, storage.path)):
                raise
        else:
            if key.forgotten:
                self._drop(identity)
            for _, future in batch:
                if not future.done():
                    future.set_result(manifest)
        finally:
            batch.clear()  # the error refers to this frame: no reference cycle

    async def _fetch(self, identity: str, storage: Storage) -> Manifest:
        """Check the entry, or read."""
        asked_s = asyncio.get_running_loop().time()
        entry = self._entries.get(identity)
        if entry is not None:
            self._num_checks += 1
            try:
                version = await storage.version()
            except Exception:
                self._drop(identity)
                raise
            if version == entry.version:
                self._num_hits += 1
                entry.asked_s = asked_s
                if identity in self._entries:
                    self._entries.move_to_end(identity)
                return entry.manifest
            self._drop(identity)
        version, manifest, nbytes = await self._read(storage)
        self._keep(identity, _Entry(version, manifest, nbytes, asked_s))
        return manifest

    async def _read(self, storage: Storage) -> tuple[Hashable, Manifest, int]:
        """Read a manifest; once more if it is damaged, which it may have been on its way."""
        for is_last in (False, True):
            self._num_reads += 1
            try:
                version, data = await storage.read_manifest()
            except CheckpointNotFoundError as error:
                if below := await storage.find_below():
                    hint = f"{error.message}, but below, as {below!r}"
                    raise CheckpointNotFoundError(storage.path, hint) from None
                raise
            if not isinstance(data, bytes):  # of a foreign checkpoint, made in memory
                return version, data, len(data.tree)
            try:
                return version, await self._decode(data), len(data)
            except FormatError as error:
                if is_last:
                    raise type(error)(f"{storage.path!r}: {error}") from None
        raise AssertionError  # it was returned, or raised

    def _keep(self, identity: str, entry: _Entry) -> None:
        self._drop(identity)
        if entry.nbytes > self._max_nbytes:
            return
        self._entries[identity] = entry
        self._nbytes += entry.nbytes
        while len(self._entries) > self._max_entries or self._nbytes > self._max_nbytes:
            _, oldest = self._entries.popitem(last=False)
            self._nbytes -= oldest.nbytes

    def _drop(self, identity: str) -> None:
        entry = self._entries.pop(identity, None)
        if entry is not None:
            self._nbytes -= entry.nbytes


async def _decode_here(data: bytes) -> Manifest:
    return decode_manifest(data)


def _fail(batch: list[tuple[Storage, asyncio.Future[Manifest]]], error: Exception) -> bool:
    """Give those of one round an error; says whether it is that the engine ends."""
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
            future.exception()  # a waiter that left does not make asyncio complain
    return isinstance(error, EngineClosedError)


def _as_answer(error: BaseException, path: str) -> Exception:
    """Give what the waiters raise where a read has ended by `error`.

    A library that cancels a task of its own and awaits it raises a cancellation that is none
    of this task: the read has failed, and the next request tries again.
    """
    if isinstance(error, Exception):
        return error
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling():
        return StorageError(
            "the storage's client cancelled the read of the manifest; try again", path=path
        )
    return _closed()


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine was closed meanwhile: load inside its block")
