"""Data files in an object store: written in parts, read by ranges.

A file that is closed is there whole, under its name, with the size it should have, or `close` has
raised; what a failed or cancelled save began is dropped, an upload whose answer was lost
included. Nobody sees such a file before a manifest names it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ckptio.errors import CheckpointChangedError, CorruptionError, StorageError
from ckptio.storage.requests import settling_wait_s
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectMissingError,
    StoreError,
    TransientError,
    may_be_same,
)
from ckptio.storage.streams import AwaitedSink, AwaitedSource

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ckptio.storage.requests import Requests
    from ckptio.storage.store import ObjectStore, Upload

_MAX_COMPLETING = 6


class ObjectSink(AwaitedSink):
    """A data file being written; see `streams.AwaitedSink`.

    A file of one slab is one request. A larger one is an upload in parts, a slab each, as
    they come; where a store wants them in order, a part waits for those before it.

    Args:
        url: The checkpoint; for messages.
        store: Where to.
        requests: Tries requests.
        key: The object.
        nbytes: Its final size.
        part_nbytes: Size of a part but the last: that of a slab.
        mark: Says that the save is alive.
        drop_lost: Drops uploads of an object whose names nobody has; never raises.
    """

    def __init__(
        self,
        url: str,
        store: ObjectStore,
        requests: Requests,
        key: str,
        nbytes: int,
        part_nbytes: int,
        mark: Callable[[], Awaitable[None]],
        drop_lost: Callable[[str], Awaitable[None]],
    ) -> None:
        self.key = key
        self._url = url
        self._store = store
        self._requests = requests
        self._nbytes = nbytes
        self._part_nbytes = part_nbytes
        self._mark = mark
        self._drop_lost = drop_lost
        self._lock = asyncio.Lock()
        self._upload: Upload | None = None
        self._num_lost = 0
        self._turn = asyncio.Condition()
        self._num_done = 0

    async def write(self, offset: int, data: memoryview) -> None:
        """Write a slab; see `streams.AwaitedSink`."""
        if self._nbytes <= self._part_nbytes:
            key = self.key
            await self._requests.must(
                "write", key, lambda: self._store.put(key, data), outlive=True, has_body=True
            )
        else:
            upload = await self._begun()
            await self._in_turn(upload, offset // self._part_nbytes, data)
        await self._mark()  # behind what takes long, waiting for a turn or a place included

    async def _in_turn(self, upload: Upload, number: int, data: memoryview) -> None:
        if not self._store.traits.in_order:
            await self._write_part(upload, number, data)
            return
        async with self._turn:
            await self._turn.wait_for(lambda: self._num_done == number)
            await self._write_part(upload, number, data)
            self._num_done += 1
            self._turn.notify_all()

    async def _write_part(self, upload: Upload, number: int, data: memoryview) -> None:
        await self._requests.must(
            f"write part {number} of", self.key, lambda: upload.write(number, data), has_body=True
        )

    async def _begun(self) -> Upload:
        async with self._lock:
            if self._upload is None:
                return await self._requests.must("begin", self.key, self._begin, outlive=True)
            return self._upload

    async def _begin(self) -> Upload:
        self._num_lost += 1  # unless its name comes, and is that of all there are
        self._upload = await self._store.upload(self.key)
        if not self._store.traits.begins_again:
            self._num_lost -= 1
        return self._upload

    async def close(self) -> None:
        """Make the object, and look whether it is what it should be.

        Raises:
            StorageError: It could not be made, or has another size.
        """
        if self._nbytes == 0:
            await self.write(0, memoryview(b""))
        if self._upload is not None:
            await self._complete(self._upload)
            self._upload = None
            await self.drop_lost()
        info = await self._requests.look(self._store, self.key)
        if info is None:
            raise StorageError(f"{self.key!r} was written and is not there", path=self._url)
        if info.nbytes != self._nbytes:
            raise StorageError(
                f"{self.key!r} has {info.nbytes} bytes and {self._nbytes} were written",
                path=self._url,
            )

    async def _complete(self, upload: Upload) -> None:
        """Make an object of parts. An answer that is lost or odd is settled by looking."""
        for tries in range(1, _MAX_COMPLETING + 1):
            try:
                # not given up when cancelled: it would be there after it was cleaned up
                await self._requests.once(upload.complete, outlive=True)
            except StoreError as error:
                failure = StorageError(
                    f"cannot complete {self.key!r}: {error.problem}", path=self._url
                )
                try:  # its name is this save's, so then it is this one
                    found = await self._requests.look(self._store, self.key)
                except StorageError:  # what came first says more than a HEAD
                    raise failure from error
                if found is not None:
                    return
                if tries == _MAX_COMPLETING or not isinstance(error, TransientError):
                    raise failure from error
                await asyncio.sleep(settling_wait_s(tries))
            else:
                return

    async def discard(self) -> None:
        """Drop what was sent of the upload that has a name.

        Raises:
            StoreError: It may still be there.
        """
        if self._upload is not None:
            await self._upload.abort()
            self._upload = None

    async def drop_lost(self) -> None:
        """Drop uploads of the object that were begun and whose names never came, if any may be.

        Uploads of the same object by anybody else go with them: they cannot be told apart.
        """
        if self._num_lost:
            await self._drop_lost(self.key)
            self._num_lost = 0


class ObjectSource(AwaitedSource):
    """A data file being read by ranges; see `streams.AwaitedSource`.

    Args:
        url: The checkpoint; for messages.
        store: Where it is.
        requests: Tries requests.
        key: The object.
        name: The file.
        nbytes: Its size.
        etag: What it has to have; anything if empty. Ours have names that are used once.
    """

    def __init__(
        self,
        url: str,
        store: ObjectStore,
        requests: Requests,
        key: str,
        name: str,
        nbytes: int,
        etag: str = "",
    ) -> None:
        self._etag = etag
        self._url = url
        self._store = store
        self._requests = requests
        self._key = key
        self._name = name
        self._nbytes = nbytes

    async def read_into(self, offset: int, room: memoryview) -> None:
        """Read a range; see `streams.AwaitedSource`."""
        stop = offset + len(room)
        if stop > self._nbytes:
            raise CorruptionError(
                f"the file has {self._nbytes} bytes",
                path=self._url,
                file=self._name,
                start=self._nbytes,
                stop=stop,
            )
        try:
            await self._requests.run(
                f"read [{offset}, {stop}) of",
                self._key,
                lambda: self._store.get_into(self._key, offset, room, match=self._etag),
                has_condition=True,
            )
        except (ObjectMissingError, ConditionFailedError):
            raise CheckpointChangedError(self._url) from None
        except StorageError:
            await self._check_size(stop)
            raise

    async def _check_size(self, stop: int) -> None:
        """Tell an object that is too short from one that cannot be read.

        Raises:
            CheckpointChangedError: It is another one by now.
            CorruptionError: It ends before `stop`.
        """
        try:
            info = await self._requests.look(self._store, self._key)
        except StorageError:
            return  # the caller has the error that came first
        if info is None:
            return  # as above
        if self._etag and not may_be_same(info.etag, self._etag):
            raise CheckpointChangedError(self._url)
        if info.nbytes < stop:
            raise CorruptionError(
                f"the file ends at byte {info.nbytes} and should have {self._nbytes}",
                path=self._url,
                file=self._name,
                start=info.nbytes,
                stop=stop,
            )


class ObjectNote:
    """A note that is held; see `interface.Note`. Nothing keeps others from it."""

    def __init__(self, store: ObjectStore, requests: Requests, key: str, data: bytes) -> None:
        self.data = data
        self._store = store
        self._requests = requests
        self._key = key

    async def drop(self) -> None:
        """Remove the note; see `interface.Note`."""
        await self._requests.run("remove", self._key, lambda: self._store.delete([self._key]))

    async def release(self) -> None:
        """Nothing is held."""
