"""Data files and notes of a `MemoryStorage`."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from ckptio.errors import CorruptionError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ckptio.testing.memory import MemoryStorage


class MemorySink:
    """A data file being written; see `streams.Sink`."""

    def __init__(self, storage: MemoryStorage, name: str, nbytes: int) -> None:
        self._storage = storage
        self._name = name
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._open = False
        self._ended = False

    def pwrite(self, offset: int, data: memoryview) -> None:
        """Write a range; see `streams.Sink`."""
        storage = self._storage
        storage.step("pwrite", self._name, len(data))
        with self._lock:
            if self._ended:
                raise AssertionError(f"a write to {self._name!r} after its end")
            if not self._open:
                self._open = True
                storage.counts.num_open_sinks += 1
                storage.files[self._name] = bytearray(self._nbytes)
            storage.counts.written_nbytes += len(data)
            end = offset + len(data)
            if end > self._nbytes:
                raise AssertionError(f"a write to [{offset}, {end}) of {self._nbytes} bytes")
            storage.files[self._name][offset:end] = data

    def close(self) -> None:
        """End the file; see `streams.Sink`."""
        self._storage.step("close", self._name)
        self.release()

    def release(self) -> None:
        """End it whatever happened. Called by its attempt."""
        with self._lock:
            self._ended = True
            if self._open:
                self._open = False
                self._storage.counts.num_open_sinks -= 1


class MemorySource:
    """A data file being read; see `streams.Source`."""

    is_cached = False

    def __init__(self, storage: MemoryStorage, name: str, data: bytearray, nbytes: int) -> None:
        self._storage = storage
        self._name = name
        self._data = data
        self._nbytes = nbytes
        storage.counts.num_open_sources += 1

    def pread_into(self, offset: int, room: memoryview, nbytes: int) -> None:
        """Read a range; see `streams.Source`."""
        self._storage.step("pread_into", self._name, nbytes)
        if offset + nbytes > len(self._data):
            raise CorruptionError(
                f"the file ends at byte {len(self._data)} and should have {self._nbytes}",
                path=self._storage.path,
                file=self._name,
                start=len(self._data),
                stop=offset + nbytes,
            )
        room[:nbytes] = self._data[offset : offset + nbytes]
        self._storage.counts.read_nbytes += nbytes

    def lend(self, offset: int, nbytes: int) -> AbstractContextManager[None]:
        """Lend nothing; see `streams.Source`."""
        del offset, nbytes
        return contextlib.nullcontext()

    def close(self) -> None:
        """Release the file; see `streams.Source`."""
        self._storage.counts.num_open_sources -= 1


class MemoryNote:
    """A note that is held; see `interface.Note`."""

    def __init__(self, storage: MemoryStorage, save_id: str, data: bytes) -> None:
        self.data = data
        self._storage = storage
        self._save_id = save_id

    async def drop(self) -> None:
        """Remove the note; see `interface.Note`."""
        self._storage.let_go(self._save_id, drop=True)

    async def release(self) -> None:
        """Let go of the note; see `interface.Note`."""
        self._storage.let_go(self._save_id, drop=False)
