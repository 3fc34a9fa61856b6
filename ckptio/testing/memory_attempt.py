"""A save into a checkpoint's place in memory: what `MemoryStorage` makes for one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ckptio._aio import take_back_cancel
from ckptio.testing.memory_files import MemoryNote, MemorySink

if TYPE_CHECKING:
    from ckptio.testing.memory import MemoryStorage


class MemoryAttempt:
    """One save on its way; see `interface.Attempt`. Made by `MemoryStorage.begin`."""

    is_alone = True  # in one process

    def __init__(
        self, storage: MemoryStorage, save_id: str, *, overwrite: bool, leads: bool
    ) -> None:
        self._storage = storage
        self._save_id = save_id
        self._leads = leads
        self._overwrite = overwrite
        self._made: list[str] = []
        self._sinks: list[MemorySink] = []
        self._open = True
        self._committed = False
        storage.counts.num_open_attempts += 1

    @property
    def is_published(self) -> bool:
        """Whether the manifest is out; see `interface.Attempt`."""
        return self._committed

    async def create(self, name: str, nbytes: int) -> MemorySink:
        """Begin a data file; see `interface.Attempt`."""
        self._storage.step("create", name, nbytes)
        await self._storage.wait()
        sink = MemorySink(self._storage, name, nbytes)
        self._made.append(name)
        self._sinks.append(sink)
        return sink

    async def stay(self) -> None:
        """Do nothing: nobody takes a save in memory for dead."""

    async def keep(self, name: str, nbytes: int) -> None:
        """Take over a data file; see `interface.Attempt`."""
        self._storage.step("keep", name, nbytes)
        await self._storage.wait()
        self._made.append(name)

    async def note(self, data: bytes) -> MemoryNote:
        """Leave a note; see `interface.Attempt`."""
        self._storage.step("note", nbytes=len(data))
        await self._storage.wait()
        self._storage.notes[self._save_id] = data
        return self._storage.hold(self._save_id)

    async def seal(self) -> None:
        """Check that everything is there; see `interface.Attempt`."""
        self._storage.step("seal")
        await self._storage.wait()
        self._end()

    async def leave(self) -> None:
        """Let go; see `interface.Attempt`."""
        for sink in self._sinks:
            sink.release()
        self._made.clear()
        self._leads = False  # a later abort removes nothing either
        self._end()

    async def commit(self, manifest: bytes) -> None:
        """Publish a manifest; see `interface.Attempt`."""
        await self._storage.commit(self._made, manifest, overwrite=self._overwrite)
        self._committed = True
        try:
            await self._storage.wait()
        except asyncio.CancelledError:
            take_back_cancel()
        self._end()

    async def abort(self) -> None:
        """Remove everything this attempt made; see `interface.Attempt`."""
        for sink in self._sinks:
            sink.release()
        if not self._committed:
            ours = f"data-{self._save_id}-"
            others = [n for n in self._storage.files if n.startswith(ours)] if self._leads else []
            for name in (*self._made, *others):
                self._storage.files.pop(name, None)
            if self._leads:
                self._storage.notes.pop(self._save_id, None)
        self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._storage.counts.num_open_attempts -= 1
