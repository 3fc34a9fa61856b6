"""An object store in memory that fails on demand: for tests of what is built on one.

A `MemoryBucket` is what is stored; any number of `MemoryStore`s are ways to it, one for
each process that a test pretends to have, each with delays and faults of its own. A
request takes effect in one step, at a moment between its start and its end that is drawn
from a seed: on a `VirtualLoop` that costs nothing and shuffles who comes first.

A bucket may do less than a good one does: conditions may be looked at by the client before
it writes, and parts may have to come in order.

The names of faults say what became of the request, which is what its sender cannot know:

    before         failed for the moment, and did nothing
    after          did what it should, and the answer was lost
    late           seemed to fail, and did what it should a while later
    refused        failed for good, and did nothing
    slow_down      was throttled, and did nothing
    stalled        does nothing, and is never answered
    stalled_after  did what it should, and is never answered
    short          of a read: fewer bytes came; any other request fails as by `before`
    corrupted      of a read: a bit is wrong; as above
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    StoreTraits,
    TransientError,
    UploadInfo,
)
from ckptio.testing.bucket import MemoryBucket
from ckptio.testing.faults import Operation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.testing.bucket import Parts

T = TypeVar("T")

FaultKind = Literal[
    "before",
    "after",
    "late",
    "refused",
    "slow_down",
    "stalled",
    "stalled_after",
    "short",
    "corrupted",
]
#: Says what goes wrong with a request, if anything does; or raises, a `Crash` for example.
StoreFault = Callable[[Operation], FaultKind | None]

_OF_READS = ("short", "corrupted")
_READS = ("get", "get_into")


def hit(number: int, kind: FaultKind, *, operation: str = "", times: int = 1) -> StoreFault:
    """Give a fault that hits some requests in a row.

    Args:
        number: The first of them, counted from 0.
        kind: What happens to them.
        operation: Counts, and hits, only requests of this name.
        times: How many are hit.
    """
    seen = itertools.count()

    def fault(request: Operation) -> FaultKind | None:
        if operation and request.kind != operation:
            return None
        return kind if number <= next(seen) < number + times else None

    return fault


class MemoryStore:
    """A way to a bucket; see `store.ObjectStore`.

    Args:
        bucket: What is stored; one of its own if not given.
        seed: Draws delays.
        max_delay_s: The longest pause before a request takes effect, and after it.
        late_s: After how long a request of the kind `late` takes effect.
        traits: What it can do; `"atomic"` conditions and parts in any order if not given.
        fault: Is shown each request before it is sent.

    Attributes:
        operations: What was asked for, in order.
        counts: The same in numbers, by name.
        num_running: Requests that are under way.
        peak_requests: The most that were, at a time.
        is_closed: Whether it was closed.
    """

    def __init__(
        self,
        bucket: MemoryBucket | None = None,
        *,
        seed: int = 0,
        max_delay_s: float = 0.0,
        late_s: float = 90.0,
        traits: StoreTraits | None = None,
        fault: StoreFault | None = None,
    ) -> None:
        self.bucket = bucket or MemoryBucket()
        self.fault = fault
        self.operations: list[Operation] = []
        self.counts: Counter[str] = Counter()
        self.num_running = 0
        self.peak_requests = 0
        self.is_closed = False
        self._rng = random.Random(seed)  # noqa: S311  # delays, nothing secret
        self._max_delay_s = max_delay_s
        self._late_s = late_s
        self._traits = traits or StoreTraits(conditional="atomic")

    @property
    def identity(self) -> str:
        """The bucket."""
        return f"memory {id(self.bucket)}"

    @property
    def traits(self) -> StoreTraits:
        """What it was told to be able to do."""
        return self._traits

    async def request(self, kind: str, key: str, effect: Callable[[], T], *, nbytes: int = 0) -> T:
        """Note a request, and carry it out."""
        async with self.running(kind, key, nbytes) as fault:
            return await self.carry(fault, effect)

    @contextlib.asynccontextmanager
    async def running(
        self, kind: str, key: str, nbytes: int = 0
    ) -> AsyncIterator[FaultKind | None]:
        """Note a request as long as it runs; gives what is to happen to it."""
        if self.is_closed:
            raise AssertionError(f"{kind} {key!r} after the store was closed")
        self.operations.append(Operation(len(self.operations), kind, key, nbytes))
        self.counts[kind] += 1
        self.num_running += 1
        self.peak_requests = max(self.peak_requests, self.num_running)
        try:
            fault = None if self.fault is None else self.fault(self.operations[-1])
            yield "before" if fault in _OF_READS and kind not in _READS else fault
        finally:
            self.num_running -= 1

    async def carry(self, fault: FaultKind | None, effect: Callable[[], T]) -> T:
        """Pause, `effect`, pause; or what the fault wants instead."""
        await self.pause()
        if fault == "before":
            raise TransientError("the connection broke")
        if fault == "slow_down":
            raise TransientError("please reduce your request rate", slow_down=True)
        if fault == "refused":
            raise RefusedError("access denied")
        if fault == "stalled":
            await asyncio.get_running_loop().create_future()
        if fault == "late":
            asyncio.get_running_loop().call_later(self._late_s, _try, effect)
            raise TransientError("the connection broke")
        result = effect()
        if fault == "stalled_after":
            await asyncio.get_running_loop().create_future()
        await self.pause()
        if fault == "after":
            raise TransientError("the answer was lost")
        return result

    async def pause(self) -> None:
        """Let time pass."""
        await asyncio.sleep(self._rng.uniform(0, self._max_delay_s))

    async def head(self, key: str) -> ObjectInfo:
        """Look at an object; see `store.ObjectStore`."""
        return await self.request("head", key, lambda: self.bucket.info(key))

    async def get(self, key: str, limit: int) -> tuple[ObjectInfo, bytes]:
        """Read an object; see `store.ObjectStore`."""

        def get() -> tuple[ObjectInfo, bytes]:
            return self.bucket.info(key), self.bucket.find(key).data[:limit]

        async with self.running("get", key, limit) as fault:
            info, data = await self.carry(fault, get)
            if fault == "short" and data:
                raise TransientError(f"{len(data) // 2} bytes came instead of {len(data)}")
            return info, _flipped(data) if fault == "corrupted" else data

    async def get_into(self, key: str, start: int, room: memoryview, *, match: str = "") -> None:
        """Read a range, in two halves; see `store.ObjectStore`."""
        stop = start + len(room)

        def get() -> bytes:
            data = self.bucket.find(key).data
            if match and self.bucket.info(key).etag != match:
                raise ConditionFailedError("another object is there")
            if len(data) < stop:
                raise RefusedError(f"it ends at byte {len(data)}")
            return data[start:stop]

        async with self.running("get_into", key, len(room)) as fault:
            data = await self.carry(fault, get)
            if fault == "corrupted":
                data = _flipped(data)
            half = len(data) // 2
            room[:half] = data[:half]
            await self.pause()
            if fault == "short":
                raise TransientError(f"{half} bytes came instead of {len(room)}")
            room[half:] = data[half:]

    async def put(
        self, key: str, data: bytes | memoryview, *, absent: bool = False, match: str = ""
    ) -> str:
        """Write an object; see `store.ObjectStore`."""
        sent = data if isinstance(data, bytes) else None
        conditional = self._traits.conditional
        is_atomic = conditional == "atomic" or (conditional == "create" and absent)

        def put() -> str:
            if is_atomic:
                self.bucket.require(key, absent=absent, match=match)
            return self.bucket.put(key, bytes(data) if sent is None else sent)

        async with self.running("put", key, len(data)) as fault:
            if fault == "late":
                sent = bytes(data)  # it has left, and the caller may use the memory again
            if not is_atomic and (absent or match):
                await self.pause()
                self.bucket.require(key, absent=absent, match=match)
            return await self.carry(fault, put)

    async def upload(self, key: str) -> MemoryUpload:
        """Begin an upload; see `store.ObjectStore`."""
        upload_id = await self.request("upload", key, lambda: self.bucket.begin(key))
        return MemoryUpload(self, key, upload_id)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """List objects; see `store.ObjectStore`."""

        def list_() -> list[ObjectInfo]:
            found: dict[str, ObjectInfo] = {}
            for key in self.bucket.keys:
                if key.startswith(prefix):
                    first, slash, _ = key[len(prefix) :].partition("/")
                    if slash:
                        name = f"{prefix}{first}/"
                        found[name] = ObjectInfo(key=name, nbytes=0)
                    else:
                        found[key] = self.bucket.info(key)
            return sorted(found.values(), key=lambda info: info.key)

        return await self.request("list", prefix, list_)

    async def uploads(self, prefix: str) -> Sequence[UploadInfo]:
        """List uploads; see `store.ObjectStore`."""
        return await self.request(
            "uploads",
            prefix,
            lambda: [
                UploadInfo(key=upload.key, upload_id=upload_id, active_s=upload.active_s)
                for upload_id, upload in self.bucket.open_uploads.items()
                if upload.key.startswith(prefix)
            ],
        )

    async def drop_upload(self, upload: UploadInfo) -> None:
        """Abort an upload; see `store.ObjectStore`."""
        await MemoryUpload(self, upload.key, upload.upload_id).abort()

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, a request each; see `store.ObjectStore`."""
        for key in keys:

            def delete(key: str = key) -> None:
                self.bucket.objects.pop(key, None)

            await self.request("delete", key, delete)

    async def close(self) -> None:
        """Take no more requests."""
        self.is_closed = True


class MemoryUpload:
    """An upload in parts; see `store.Upload`."""

    def __init__(self, store: MemoryStore, key: str, upload_id: str) -> None:
        self._store = store
        self._key = key
        self._upload_id = upload_id

    def _found(self) -> Parts:
        try:
            return self._store.bucket.open_uploads[self._upload_id]
        except KeyError:
            raise ObjectMissingError("there is no such upload") from None

    async def write(self, number: int, data: memoryview) -> None:
        """Send a part; see `store.Upload`."""
        store, sent = self._store, None

        def write() -> None:
            upload = self._found()
            if store.traits.in_order and number > len(upload.parts):
                raise AssertionError(f"part {number} after {len(upload.parts)} parts")
            upload.parts[number] = bytes(data) if sent is None else sent
            upload.active_s = store.bucket.now_s()

        async with store.running("write", self._key, len(data)) as fault:
            if fault == "late":
                sent = bytes(data)  # it has left, and the caller may use the memory again
            await store.carry(fault, write)

    async def complete(self) -> None:
        """Make the object; see `store.Upload`."""

        def complete() -> None:
            parts = [data for _, data in sorted(self._found().parts.items())]
            if any(len(part) < self._store.traits.min_part_nbytes for part in parts[:-1]):
                raise RefusedError("a part is too small")
            del self._store.bucket.open_uploads[self._upload_id]
            self._store.bucket.put(self._key, b"".join(parts))

        await self._store.request("complete", self._key, complete)

    async def abort(self) -> None:
        """Drop all parts; see `store.Upload`."""

        def abort() -> None:
            self._store.bucket.open_uploads.pop(self._upload_id, None)

        await self._store.request("abort", self._key, abort)


class MemoryBackend:
    """Opens one store, whatever the URL; see `stores.Backend`.

    Args:
        store: What it opens.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def split(self, url: str, options: Mapping[str, Any]) -> tuple[str, str]:
        """Take what follows the protocol for a prefix."""
        del options
        return self._store.identity, url.partition("://")[2]

    def gap_nbytes(self) -> int:
        """Say that no byte is worth reading over."""
        return 0

    async def open(
        self, url: str, options: Mapping[str, Any], config: CheckpointConfig, executor: Executor
    ) -> MemoryStore:
        """Give the store."""
        del url, options, config, executor
        return self._store


def _try(effect: Callable[[], object]) -> None:
    """Do what a request should have done, long after anybody looks."""
    try:
        effect()
    except (ConditionFailedError, ObjectMissingError, RefusedError):
        return


def _flipped(data: bytes) -> bytes:
    """Change a bit."""
    return data[:-1] + bytes([data[-1] ^ 1]) if data else data
