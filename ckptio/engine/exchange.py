"""Load as a group: read each block once, and pass it on to the ranks that want it too.

Every rank has lanes that read units and pass them on, and lanes that take units from
others. A lane carries one unit at a time, in one slab, through all of its steps; lanes of a
side begin units in the common order of the plan.

Why this cannot come to a stop, whatever the other ranks do meanwhile. Look at the first
unit, in the common order, that is not done on all of its ranks. Its reader is through with
all units it reads before, and its takers with all they take before, since those are earlier.
So on each of these ranks no unit of that side stands before it, and the first lane of the
side, which has a slab of its own, is at it or free for it: a lane never waits for anything
but its unit. What it waits for within a unit besides the other ranks (threads that read and
copy) is never held by whoever waits for a rank. So the unit gets done, and then the next.

Slabs of the pool, which saves and other loads hold too, carry further lanes and so make it
faster; nothing depends on getting one. That is why each side takes one slab beyond the
pool: with slabs of the pool alone, two loads could each hold what the other waits for, on
different ranks.

A unit is verified by who reads it and again by who takes it: a block lands only after who
lands it has checked it, and a network is not to be trusted more than a disk.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckptio._aio import first_failure, shielded, wait
from ckptio.engine.context import settle
from ckptio.engine.landing import bring
from ckptio.engine.sources import close_source, open_source
from ckptio.errors import PeerLostError, StateError
from ckptio.events import ReadProgressed
from ckptio.plan.load import plan_spans

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.landing import Reading
    from ckptio.exchange.link import BulkLink
    from ckptio.format.manifest import Manifest
    from ckptio.plan.exchange import Unit
    from ckptio.plan.load import ReadSegment, Wanted
    from ckptio.staging.cuda import PendingCopies
    from ckptio.staging.pool import Slab
    from ckptio.storage.streams import AwaitedSource, Source

#: Lanes of a side for each reader of the engine: one in a read, one on its way to others.
_LANES_PER_READER = 2
#: Lanes of a side at the most.
_MAX_LANES = 16


class Landing(NamedTuple):
    """A unit, and what of it lands on this rank.

    Attributes:
        unit: Who reads it, for whom.
        segment: The same range, with its checksums and what lands from it.
    """

    unit: Unit
    segment: ReadSegment


@dataclass(frozen=True, slots=True)
class SharedPart:
    """What one rank does in an exchange. Made by `plan_part`.

    Attributes:
        reads: What it reads, in the common order.
        takes: What it takes from others, in the common order.
    """

    reads: tuple[Landing, ...]
    takes: tuple[Landing, ...]

    @property
    def read_nbytes(self) -> int:
        """Bytes that it reads."""
        return sum(landing.unit.nbytes for landing in self.reads)

    @property
    def nbytes(self) -> int:
        """Bytes that it reads or takes."""
        return self.read_nbytes + sum(landing.unit.nbytes for landing in self.takes)


def plan_part(
    manifest: Manifest, units: Sequence[Unit], wanted: Iterable[Wanted], rank: int
) -> SharedPart:
    """Say what a rank does with its units of an `ExchangePlan`, and where their bytes land.

    Args:
        manifest: The one that was planned for.
        units: The units that this rank reads or takes, in the common order, as `decode_part`
            gives them.
        wanted: What this rank wants; what it gave to `block_runs`.
        rank: This rank.
    """
    spans = [(unit.file, unit.start, unit.nbytes) for unit in units]
    segments = plan_spans(manifest, wanted, spans)
    landings = [Landing(unit, segment) for unit, segment in zip(units, segments, strict=True)]
    return SharedPart(
        tuple(landing for landing in landings if landing.unit.reader == rank),
        tuple(landing for landing in landings if landing.unit.reader != rank),
    )


async def read_shared(
    part: SharedPart, reading: Reading, link: BulkLink, context: EngineContext
) -> None:
    """Read, verify and land what this rank reads, pass it on, and take what others read.

    Every rank of the group calls this with its part of the same plan, between the round
    that made the plan and the verdict; the link is left after the verdict. Whoever watches over
    the ranks cancels this when another rank fails: whoever fails here tells nobody but by
    leaving the link.

    Memory beside the targets: the pool, and a slab more for each side. A link that has slabs of
    its own (`BulkLink.slabs`) brings those instead. Slabs of the pool are taken for a unit at a
    time, and half of the pool at the most by each side.

    Args:
        part: From `plan_part`.
        reading: The checkpoint, its sizes checked for the files that this rank reads, with
            the target that takes verified blocks. `read_nbytes` counts what is taken, too.
        link: Made by all ranks of the group for this exchange.
        context: The engine's.

    Raises:
        CorruptionError: A block does not have its checksum, and nobody collects.
        CheckpointChangedError: A file went away meanwhile.
        PeerLostError: Another rank went away.
        StorageError: The first failure of any part; the others are cancelled and awaited.
        StateError: Somebody cancelled a part of it, and not the whole.
    """
    exchange = _Exchange(part, reading, link, context)
    half = context.config.num_slabs // 2
    num_pooled = min(half, _MAX_LANES - 1, _LANES_PER_READER * context.config.max_reads - 1)
    try:
        await _run_both(
            exchange.run_lanes(part.reads, exchange.read, num_pooled, link.slabs),
            exchange.take_all(num_pooled),
        )
        exchange.require_all()
    except PeerLostError:
        await exchange.close_sources()
        raise
    except BaseException:
        # whoever is cancelled meanwhile still says what went wrong here: nobody else knows
        with suppress(asyncio.CancelledError):
            await exchange.close_sources()
        raise


async def _run_both(
    reading: Coroutine[None, None, None], taking: Coroutine[None, None, None]
) -> None:
    """Run both sides to their ends; raise what ended them.

    A failure of either side ends the link, and so does a cancellation; and with the link
    ends whatever waits for other ranks, as if one of them were lost. Some of that may be
    through before the lane that failed has cleaned up, so the first error that comes out
    is not always the cause.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101  # a coroutine runs in a task
    num_cancels = task.cancelling()
    try:
        async with asyncio.TaskGroup() as group:
            sides = [
                group.create_task(reading, name="read for all"),
                group.create_task(taking, name="take from others"),
            ]
            # waited for in the block, where the group takes back its own cancellation of it:
            # before Python 3.13 it does not, of one that comes later
            await wait(sides)
    except BaseExceptionGroup as errors:
        _, others = errors.split(PeerLostError)
        if others is None and task.cancelling() > num_cancels:
            raise asyncio.CancelledError from None
        failure = first_failure(others or errors)
        raise failure from failure.__cause__


@dataclass(slots=True)
class _OpenFile:
    """A file between the first and the last unit that is read from it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    source: Source | AwaitedSource | None = None


class _Exchange:
    """One rank's side of an exchange, on its way."""

    def __init__(
        self, part: SharedPart, reading: Reading, link: BulkLink, context: EngineContext
    ) -> None:
        self._part = part
        self._reading = reading
        self._link = link
        self._context = context
        self._nbytes = part.nbytes
        self._before_nbytes = reading.read_nbytes
        self._files: dict[int, _OpenFile] = {}
        # closed with its last unit: no lane asks for it after that
        self._units_left = Counter(landing.unit.file for landing in part.reads)

    async def run_lanes(
        self,
        landings: Sequence[Landing],
        carry: Callable[[Landing, Slab], Coroutine[None, None, None]],
        num_pooled: int,
        slabs: Sequence[Slab],
    ) -> None:
        """Carry units in lanes, begun in order.

        Args:
            landings: The units.
            carry: Does what is to be done with one.
            num_pooled: Lanes beside the first that take their slabs from the pool.
            slabs: Slabs to use instead, a lane each, if there are any.
        """
        queue = deque(landings)
        if not queue:
            return
        waiting: set[asyncio.Task[None] | None] = set()
        for_device = self._reading.holds_slabs

        async def pooled_lane() -> None:
            lane = asyncio.current_task()
            try:
                while queue:
                    waiting.add(lane)
                    async with self._context.pool.lease(for_device=for_device) as slab:
                        waiting.discard(lane)
                        if queue:
                            await carry(queue.popleft(), slab)
            finally:  # as in `engine.load`: the error that ended a task has this frame
                waiting.discard(lane)
                del lane

        async def own_lane(slab: Slab) -> None:
            while queue:
                await carry(queue.popleft(), slab)

        own = nullcontext(slabs[0]) if slabs else self._context.pool.spare(for_device=for_device)
        async with own as slab, asyncio.TaskGroup() as group:
            for other in slabs[1:]:
                group.create_task(own_lane(other), name="lane of the link")
            for _ in range(0 if slabs else min(num_pooled, len(queue) - 1)):
                group.create_task(pooled_lane(), name="lane of the pool")
            await own_lane(slab)
            for lane in waiting:  # nothing is left to begin: it need not wait for a slab
                assert lane is not None  # noqa: S101  # lanes are tasks
                lane.cancel()

    async def take_all(self, num_pooled: int) -> None:
        """Take what others read: into slabs, or as it lies in the slabs of a link."""
        if not self._link.slabs:
            await self.run_lanes(self._part.takes, self.take, num_pooled, ())
            return
        queue = deque(self._part.takes)

        async def lane() -> None:
            while queue:
                await self.take(queue.popleft(), None)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_pooled + 1, len(queue))):
                group.create_task(lane(), name="lane without a slab")

    async def read(self, landing: Landing, slab: Slab) -> None:
        """Read a unit, land this rank's share of it, and pass it on."""
        unit, segment = landing
        async with self._source(unit.file) as source:
            await self._land(segment, slab, source, keep=len(unit.wanting) > 1)
        if takers := unit.takers:
            await self._link.send(takers, unit.number, slab, unit.nbytes)
        self._progress(unit.nbytes)

    async def take(self, landing: Landing, room: Slab | None) -> None:
        """Take a unit that another rank reads, and land this rank's share of it."""
        unit, segment = landing
        async with self._link.receive(unit.reader, unit.number, room, unit.nbytes) as slab:
            await self._land(segment, slab, None, keep=True)
        self._progress(unit.nbytes)

    async def _land(
        self, segment: ReadSegment, slab: Slab, source: Source | AwaitedSource | None, *, keep: bool
    ) -> None:
        """Bring a range into a slab, verify and land it; until devices are done with it."""
        context = self._context
        pending: list[PendingCopies] = []
        try:
            damage = await bring(segment, slab, source, self._reading, context, pending, keep=keep)
        finally:
            await settle(pending, context, saving=False)
        while damage:  # as in `engine.load`: no frame keeps an error that has that frame
            self._reading.damaged(damage.pop(0))

    def _progress(self, nbytes: int) -> None:
        reading = self._reading
        reading.read_nbytes += nbytes
        self._context.emit(
            ReadProgressed(
                path=reading.storage.path, read_nbytes=reading.read_nbytes, nbytes=self._nbytes
            )
        )

    @asynccontextmanager
    async def _source(self, file: int) -> AsyncIterator[Source | AwaitedSource]:
        """Lend a file that is opened for its first unit and closed after its last.

        Units of a file follow each other, so that no more files are open than lanes are at
        work, and one. They do not count against the engine's limit of open files: who waits
        for another rank must not hold what a third waits for.
        """
        entry = self._reading.manifest.files[file]
        held = self._files.setdefault(file, _OpenFile())
        async with held.lock:
            if held.source is None:
                held.source = await open_source(self._reading, entry)
        yield held.source
        self._units_left[file] -= 1
        if not self._units_left[file]:
            del self._files[file]
            await shielded(close_source(held.source, self._reading, self._context))

    def require_all(self) -> None:
        """Refuse to be through with less than all: groups take a cancelled task for a success.

        Raises:
            StateError: Somebody cancelled a lane.
        """
        if self._reading.read_nbytes - self._before_nbytes < self._nbytes:
            path = self._reading.storage.path
            raise StateError(f"a task that read a part of {path!r} was cancelled")

    async def close_sources(self) -> None:
        """Close what is open after a failure. No lane is at work any more."""
        sources = [held.source for held in self._files.values() if held.source is not None]
        if sources:
            await shielded(self._close(sources))

    async def _close(self, sources: Iterable[Source | AwaitedSource]) -> None:
        for source in sources:
            await close_source(source, self._reading, self._context)
