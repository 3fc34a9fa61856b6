"""A folder of a foreign checkpoint in an object store.

What is asked for in small pieces (headers, directories of archives, values, small tensors) is read
in blocks, of which the last 16 MiB are kept: many small items of one file cost few requests. Where
each has a header of its own, all headers are looked at before the first item is read; so items that
take more than that together are read twice. Large tensors are read by the ranges that are wanted of
them, straight to where they go.

Anybody may write over such an object at any time. So it is looked at once, before anything of
it is read, and every answer has to be of the object that was seen then: a load that meets
another one fails, and never mixes the two. Not told apart are files of a checkpoint of which
some were replaced before they were looked at; no format that is read here says that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ckptio._aio import run_all
from ckptio.errors import CheckpointChangedError, StorageError
from ckptio.foreign.folder import Folder, Status
from ckptio.storage.object_files import ObjectSource
from ckptio.storage.store import ConditionFailedError, ObjectMissingError, may_be_same
from ckptio.storage.streams import AwaitedSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from ckptio.foreign.bridge import Bridge
    from ckptio.storage.requests import Requests
    from ckptio.storage.store import ObjectStore

T = TypeVar("T")
V = TypeVar("V")

_BLOCK_NBYTES = 256 << 10
#: Blocks that are kept.
_MAX_BLOCKS = 64
#: What is larger is read as it is asked for.
_MAX_CACHED_NBYTES = 1 << 20
#: What one request asks for at the most: it has to be answered within `request_timeout_s`.
_RANGE_NBYTES = 8 << 20
#: Stands for a look at an object, among the numbers of its blocks.
_LOOK = -1


@dataclass(slots=True)
class _Turn:
    """Who asks for one thing at the moment, and who waits for that."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0


class ObjectFolder(Folder):
    """The objects directly under a prefix; see `Folder`. What was looked at once is not again.

    Args:
        root: Its URL; for messages.
        start: What their keys begin with; nothing, or with a slash at the end.
        store: Where they are.
        requests: Tries requests.
        bridge: Takes calls to the store's loop.
        query: What their keys end with, behind their names; see `storage.keys`.
    """

    def __init__(
        self,
        root: str,
        start: str,
        store: ObjectStore,
        requests: Requests,
        bridge: Bridge,
        query: str,
    ) -> None:
        super().__init__(root)
        self._start = start
        self._query = query
        self._store = store
        self._requests = requests
        self._bridge = bridge
        self._seen: dict[str, Status | None] = {}
        self._expected: Mapping[str, str] = {}
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._turns: dict[tuple[str, int], _Turn] = {}

    def status(self, name: str) -> Status | None:
        """Look at an object; see `Folder`."""
        self.join(name)
        if name not in self._seen:
            self._bridge.wait(self._look_once(name))
            self._require_expected(name)
        return self._seen[name]

    async def _look_once(self, name: str) -> None:
        """Look at an object that many threads ask for."""
        async with self._alone(name, _LOOK):
            if name not in self._seen:
                self._seen[name] = await self._look_at(name)

    def seen(self) -> dict[str, str]:
        """Give what tells the objects apart that were looked at; see `Folder`."""
        looks = list(self._seen.items())
        return {name: _told(status) for name, status in looks if status is not None}

    def expect(self, seen: Mapping[str, str]) -> None:
        """Take only the objects that were seen by whoever made a manifest, as `seen` gave it there.

        That was long ago where it is taken on trust, and on another rank it was by another URL,
        if they differ in the query alone.

        Raises:
            CheckpointChangedError: Another one was seen here.
        """
        self._expected = seen
        for name in list(self._seen):
            self._require_expected(name)

    def _require_expected(self, name: str) -> None:
        status, expected = self._seen[name], self._expected.get(name)
        if status is None or expected is None or may_be_same(_told(status), expected):
            return
        raise CheckpointChangedError(
            self.join(name),
            "another file is there than the one of which the manifest was made, here or on rank 0"
            " (by a URL with another query?)",
        )

    async def _look_at(self, name: str) -> Status | None:
        info = await self._requests.look(self._store, self._key(name))
        if info is None:
            return None
        return Status(info.nbytes, info.modified_s, (info.etag, info.nbytes, info.modified_s))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Read a range of an object; see `Folder`."""
        return self.read_within(0, name, start, stop)

    def read_within(self, extent_nbytes: int, name: str, start: int, stop: int) -> bytes:
        """Read a range of an object, alone if it is of a large item; see `Folder`."""
        status = self.status(name)
        if status is None:
            raise CheckpointChangedError(self.root)
        stop = min(stop, status.nbytes)
        if stop <= start:
            return b""
        if stop - start > _MAX_CACHED_NBYTES or extent_nbytes > _BLOCK_NBYTES:
            return self._bridge.wait(self._read(name, start, stop))
        return self._bridge.wait(self.read_blocks(name, status.nbytes, start, stop))

    async def _read(self, name: str, start: int, stop: int) -> bytes:
        """Read a range, in several requests if it is large."""
        room = bytearray(stop - start)
        with memoryview(room) as view:
            await run_all(
                (
                    self._read_into(name, start + at, view[at : at + _RANGE_NBYTES])
                    for at in range(0, len(view), _RANGE_NBYTES)
                ),
                "range of an object",
            )
        return bytes(room)

    async def _read_into(self, name: str, start: int, room: memoryview) -> None:
        """Read a range in one request.

        Raises:
            CheckpointChangedError: It is of another object than the one that was looked at.
        """
        key, status = self._key(name), self._seen[name]
        etag = "" if status is None else str(status.version[0])
        try:
            await self._requests.run(
                f"read [{start}, {start + len(room)}) of",
                key,
                lambda: self._store.get_into(key, start, room, match=etag),
                has_condition=True,
            )
        except (ObjectMissingError, ConditionFailedError):
            raise CheckpointChangedError(self.root) from None
        except StorageError:
            now = await self._look_at(name)
            is_same_size = now is not None and status is not None and now.nbytes == status.nbytes
            if now is None or not is_same_size or not may_be_same(str(now.version[0]), etag):
                raise CheckpointChangedError(self.root) from None
            raise

    async def read_blocks(self, name: str, nbytes: int, start: int, stop: int) -> bytes:
        """Read a range that lies in a few blocks. On the loop.

        Args:
            name: An object that was looked at.
            nbytes: Its size.
            start: First byte.
            stop: Byte behind the last; not behind the object.

        Raises:
            CheckpointChangedError: As `read`.
            StorageError: As `read`.
        """
        first = start // _BLOCK_NBYTES
        parts = [
            await self._block(name, number, nbytes)
            for number in range(first, (stop - 1) // _BLOCK_NBYTES + 1)
        ]
        base = first * _BLOCK_NBYTES
        return b"".join(parts)[start - base : stop - base]

    async def _block(self, name: str, number: int, nbytes: int) -> bytes:
        """Give a block, and read it once if many ask for it."""
        key = (name, number)
        async with self._alone(name, number):
            block = self._blocks.get(key)
            if block is None:
                start = number * _BLOCK_NBYTES
                block = await self._read(name, start, min(start + _BLOCK_NBYTES, nbytes))
                self._blocks[key] = block
                if len(self._blocks) > _MAX_BLOCKS:
                    self._blocks.popitem(last=False)
            else:
                self._blocks.move_to_end(key)
        return block

    @contextlib.asynccontextmanager
    async def _alone(self, name: str, number: int) -> AsyncIterator[None]:
        """Let one at a time ask the store for something; others find it there."""
        key = (name, number)
        turn = self._turns.setdefault(key, _Turn())
        turn.num_users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.num_users -= 1
            if not turn.num_users:
                del self._turns[key]

    def open(self, name: str, nbytes: int, start: int = 0) -> AwaitedPart:
        """Open an object, or a part of it; see `Folder`."""
        status = self.status(name)
        if status is None:
            raise CheckpointChangedError(self.root)
        source = ObjectSource(
            self.root,
            self._store,
            self._requests,
            self._key(name),
            name,
            start + nbytes,
            str(status.version[0]),
        )
        is_inside = nbytes < status.nbytes and start + nbytes <= status.nbytes
        blocks = functools.partial(self.read_blocks, name, status.nbytes)
        return AwaitedPart(source, start, blocks if is_inside else None)

    def each(self, function: Callable[[V], T], values: Sequence[V]) -> list[T]:
        """Call `function` with each value, several at a time; see `Folder`."""
        return self._bridge.each(function, values)

    def _key(self, name: str) -> str:
        return f"{self._start}{name}{self._query}"


def _told(status: Status) -> str:
    """Give what tells an object from others: its etag, if there is one."""
    return str(status.version[0]) or f"{status.nbytes}-{status.modified_s!r}"


class AwaitedPart(AwaitedSource):
    """An object, or a part of one as a source of its own.

    A small part is taken from blocks: it lies among others, and what says where it is, which is
    beside it, was read in such.

    Args:
        source: The object.
        start: Where the part begins.
        read_blocks: Reads a range of the object in blocks; `None` for a whole object, of which
            ranges are merged already.
    """

    def __init__(
        self,
        source: ObjectSource,
        start: int,
        read_blocks: Callable[[int, int], Awaitable[bytes]] | None,
    ) -> None:
        self._source = source
        self._start = start
        self._read_blocks = read_blocks

    async def read_into(self, offset: int, room: memoryview) -> None:
        """Read a range; see `storage.streams.AwaitedSource`."""
        start = self._start + offset
        if self._read_blocks is None or len(room) > _BLOCK_NBYTES:
            await self._source.read_into(start, room)
        else:
            room[:] = await self._read_blocks(start, start + len(room))
