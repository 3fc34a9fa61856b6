"""How far a save is, and whether what it copied was one state."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptio._threads import NUM_ODD_JOBS
from ckptio.engine.made import Made
from ckptio.errors import StateError
from ckptio.events import SaveProgressed, SaveStaged

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ckptio.engine.context import EngineContext
    from ckptio.engine.save import SaveJob
    from ckptio.storage.interface import Attempt

#: How long `staged` waits for the attempt to begin, in seconds. Until any save of the engine has
#: begun, what is wrong with its storage is raised to who waits for that. From then on it is what
#: a disk or a near store says; one that does not answer holds nobody up.
_FIRST_PATIENCE_S, _PATIENCE_S = 10.0, 0.1


@dataclass(slots=True)
class SaveProgress:
    """Counts what is left of a save, and says so.

    Attributes:
        job: The save.
        context: The engine.
        nbytes: Bytes of all segments.
        to_submit: Segments whose copies have not been made, or queued on a device.
        to_stage: Segments that are not copied yet.
        leases: `leases[i]` is set once segment i-1 of the plan holds its slab, or has ended.
        writes: Limits the writes to a disk that have a thread, or wait for one, so that writes of
            other saves get their turn if these hang.
        turns: `turns[i]` is set once segment i-1 has ended, where files are written one slab at a
            time; empty where several are.
        closes: Limits the files that are being closed, and so synced, for the same reason.
        written_nbytes: Bytes of segments that are written.
        writes_go: Set when writing need not wait for copying any more: all is copied, or a copy
            needs a slab.
        attempt: What files are made in, once it has begun.
    """

    job: SaveJob
    context: EngineContext
    nbytes: int
    to_submit: int
    to_stage: int
    leases: list[asyncio.Event]
    writes: asyncio.Semaphore
    turns: list[asyncio.Event] = field(default_factory=list)
    closes: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(NUM_ODD_JOBS))
    written_nbytes: int = 0
    writes_go: asyncio.Event = field(default_factory=asyncio.Event)
    attempt: Made[Attempt] = field(default_factory=Made)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_told: bool = False
    _patience: asyncio.TimerHandle | None = None

    async def begin(self, begin: Callable[[], Awaitable[Attempt]]) -> None:
        """Begin the attempt, beside the copies."""
        try:
            await self.attempt.make(begin())
        finally:
            self._changed.set()
        self.context.has_begun = True
        if self.to_stage == 0 and not self._is_told:
            self._tell_staged()

    def end(self) -> None:
        """Tell nothing any more: all is written, or will never be."""
        if self._patience is not None:
            self._patience.cancel()

    def submitted(self) -> None:
        """Count a segment whose copies are made, or queued on a device.

        Raises:
            StateError: Of a part that was copied before a change, and one behind it.
        """
        self.to_submit -= 1
        if self.to_submit == 0:
            self._refuse(self.job.source.watch.changed())
            self.job.moments.submitted.reach(None)

    def require_settled(self) -> None:
        """Look at the state a last time, unless somebody has learned that it may change.

        Raises:
            StateError: It was being changed when the copies ended.
        """
        self._refuse(self.job.source.watch.settled())

    def _refuse(self, index: int | None) -> None:
        if index is not None:
            name = self.job.flat.specs[index].name
            raise StateError(
                f"{name!r} was changed, or moved in memory, before it was copied, and so nothing"
                " is committed: wait for handle.staged before that"
            )

    def staged(self) -> None:
        """Count a segment that is copied; with the last, let writes go and `staged` come."""
        self.to_stage -= 1
        if self.to_stage == 0:
            self.writes_go.set()
            if self.attempt.is_there:
                self._tell_staged()
            else:
                wait_s = _PATIENCE_S if self.context.has_begun else _FIRST_PATIENCE_S
                loop = asyncio.get_running_loop()
                self._patience = loop.call_later(wait_s, self._tell_staged)

    def _tell_staged(self) -> None:
        """Let `staged` come: all is copied."""
        self.end()
        self._is_told = True
        job = self.job
        is_known = job.moments.staged.is_awaited or self.context.observer is not None
        job.source.watch.copied(is_known=is_known)
        job.staged_s = job.elapsed_s()
        job.moments.staged.reach(None)
        self.context.emit(
            SaveStaged(path=job.storage.path, save_id=job.save_id, elapsed_s=job.staged_s)
        )

    async def lease_turn(self, number: int) -> None:
        """Wait until a segment may get a slab.

        While not all that are left get one, the last slab is for others until the attempt has
        begun: nobody knows how long that takes.

        Raises:
            SaveAbortedError: As `Made.get`.
        """
        await self.leases[number].wait()
        pool, num_wanted = self.context.pool, len(self.leases) - 1 - number
        with pool.freed.having(self._changed.set):
            while pool.num_free() < min(2, num_wanted):
                if self.attempt.is_over:
                    await self.attempt.get()
                    break
                self._changed.clear()
                await self._changed.wait()

    async def turn(self, number: int) -> None:
        """Wait until all segments before one are written, if that is how it is done."""
        if self.turns:
            await self.turns[number].wait()

    def ended(self, first: int, num: int, part: asyncio.Task[None]) -> None:
        """Let those behind `num` segments go on: these are written, or never will be."""
        if part.cancelled():  # it may not have copied: then nobody is to wait until all are
            self.writes_go.set()
        for events in (self.leases, self.turns):
            for event in events[first + 1 : first + num + 1]:
                event.set()

    def written(self, nbytes: int) -> None:
        """Count a segment of `nbytes` that is written, and say so."""
        self.written_nbytes += nbytes
        self.context.emit(
            SaveProgressed(
                path=self.job.storage.path,
                save_id=self.job.save_id,
                written_nbytes=self.written_nbytes,
                nbytes=self.nbytes,
            )
        )
