"""A file of fsspec that is written part after part.

Parts of an upload go through one file object, in order; what fsspec has begun to send it
cannot send again, so the retries of a part are those of the file system itself. Small files
and manifests are single requests, and tried again like everybody's.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from ckptio.storage.store import RefusedError, TransientError

if TYPE_CHECKING:
    from ckptio.storage.fsspec import FsspecStore


class FsspecUpload:
    """A file object being written; see `store.Upload`."""

    def __init__(self, store: FsspecStore, key: str) -> None:
        self._store = store
        self._key = key
        self._file: Any = None
        self._is_cut = False
        self._is_dropped = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Open the file, and drop it if nobody waits for it any more. Blocks."""
        self._store.make_parent(self._key)
        file = self._store.fs.open(self._key, "wb")
        with self._lock:
            self._file = file
            is_dropped = self._is_dropped
        if is_dropped:
            self.discard()

    def drop(self) -> bool:
        """Say that nobody waits for it any more; gives whether the file is left to the caller."""
        with self._lock:
            self._is_dropped = True
            return self._file is not None

    async def write(self, number: int, data: memoryview) -> None:
        """Write a part, the next one; see `store.Upload`."""
        own = bytes(data)  # a thread that is given up may still be sending it
        if self._is_cut:
            raise RefusedError(f"a part was cut short, and cannot be sent again: {number}")
        self._is_cut = True
        try:
            await self._store.call(self._key, lambda: self._file.write(own))
        except TransientError as error:
            raise RefusedError(f"{error.problem} (part {number} cannot be sent again)") from error
        self._is_cut = False

    async def complete(self) -> None:
        """Close the file; once: the second time waits for a thread that was given up."""
        await self._store.settled(self._key)
        await self._store.call(self._key, self._file.close)

    async def abort(self) -> None:
        """Drop what was written."""
        await self._store.settled(self._key)
        await self._store.call(self._key, self.discard)

    def discard(self) -> None:
        """Drop the file, and what of it is there. Blocks."""
        with contextlib.suppress(Exception):  # whatever is there is removed, below
            self._file.discard()
        try:
            self._file.closed = True  # else its end would send what is left in its buffer
        except AttributeError:
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._store.fs.rm_file(self._key)
