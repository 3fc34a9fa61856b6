"""Threads that read one range after the other, without a hop to the loop for each.

A hop was half a millisecond of the loop for each 16 MiB, which take three to read from the page
cache; and opening a file, reading it and closing it by way of the loop was 0.4 for each tensor of
a foreign checkpoint, which are files of their own. So a lane holds a slab and takes ranges off
the left end, a few in each visit to a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptio._aio import outlive
from ckptio._threads import HUNG_S
from ckptio.config import PAGE_NBYTES
from ckptio.engine.context import settle
from ckptio.engine.landing import Verified, check_and_land, check_into
from ckptio.events import ReadProgressed

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import AsyncIterator, Callable, Iterator

    from ckptio.engine.context import EngineContext
    from ckptio.engine.landing import Reading
    from ckptio.errors import CorruptionError
    from ckptio.plan.load import ReadSegment
    from ckptio.staging.cuda import PendingCopies
    from ckptio.staging.pool import Slab
    from ckptio.storage.streams import Open, Source

    #: Gives the open file of a range.
    Opened = Callable[[ReadSegment], contextlib.AbstractContextManager[Source]]

#: Seconds after which a visit to a thread ends with the range it is at, so that its slab goes
#: to who waits, and progress is said: after many ranges from memory, after one or two from a disk.
_TURN_S = 0.1


class Gate:
    """Limits what one load does at a time, and what all loads of the engine do.

    A load that has read nothing for `HUNG_S`, as from a mount whose server is gone, gives up its
    places in the shared limit to other loads. Its own limit stays: else it would take all slabs.

    Args:
        shared: The limit for all loads.
        max_own: The limit for this one.
        reading: Says how much this one has read.
    """

    def __init__(self, shared: asyncio.Semaphore, max_own: int, reading: Reading) -> None:
        self._shared = shared
        self._own = asyncio.Semaphore(max_own)
        self._reading = reading

    @contextlib.asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Wait to be let through, and be there for the length of the block."""
        async with self._own:
            await self._shared.acquire()
            passage = _Passage(self._shared, self._reading)
            try:
                yield
            finally:
                passage.end()


class _Passage:
    """A place in the shared limit of a gate, given up early if the load reads nothing."""

    def __init__(self, shared: asyncio.Semaphore, reading: Reading) -> None:
        self._shared: asyncio.Semaphore | None = shared
        self._reading = reading
        self._watch()

    def end(self) -> None:
        """Leave, if it was not left before."""
        self._timer.cancel()
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.release()

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HUNG_S, self._look, self._reading.read_nbytes)

    def _look(self, read_nbytes: int) -> None:
        if self._reading.read_nbytes == read_nbytes:
            self.end()
        else:
            self._watch()


@dataclass(slots=True)
class Lanes:
    """What lanes share.

    Attributes:
        left: Ranges to be read. Whoever clears it lets all threads end with the range they
            are at.
        num: How many lanes there are.
        gate: Limits how many lanes read at a time, of this load and of the engine.
        opened: Lends the file of a range, on a thread.
        waiting: Those that wait for the gate, or for a slab.
        lock: Held by whoever looks whether the next range fits, and takes it.
    """

    left: deque[ReadSegment]
    num: int
    gate: Gate
    opened: Opened
    waiting: set[asyncio.Task[None]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, room_nbytes: int) -> ReadSegment | None:
        """Take the next range if there is one, and it fits."""
        with self.lock:
            try:
                return self.left.popleft() if self.left[0].nbytes <= room_nbytes else None
            except IndexError:  # another lane took the last one
                return None


def lend(source: Source) -> Opened:
    """Lend one file, which somebody else closes, for every range."""
    return lambda _: contextlib.nullcontext(source)


def open_each(open_file: Open, reading: Reading) -> Opened:
    """Open the file of each range for itself, and close it behind that."""

    @contextlib.contextmanager
    def opened(segment: ReadSegment) -> Iterator[Source]:
        entry = reading.manifest.files[segment.file]
        source = open_file(entry.name, entry.nbytes)
        try:
            yield source
        finally:
            source.close()

    return opened


async def read_in_lane(
    lanes: Lanes, reading: Reading, context: EngineContext, total_nbytes: int
) -> None:
    """Take ranges off the left end until there are none, a few in each visit to a thread.

    Args:
        lanes: This and the others, and the ranges.
        reading: The checkpoint.
        context: The engine.
        total_nbytes: What the load reads in all.
    """
    lane = asyncio.current_task()
    assert lane is not None  # noqa: S101  # lanes are tasks
    loop = asyncio.get_running_loop()
    try:
        while lanes.left:
            lanes.waiting.add(lane)
            async with (
                lanes.gate.passing(),
                context.pool.lease(for_device=reading.holds_slabs) as slab,
            ):
                lanes.waiting.discard(lane)
                pending: list[PendingCopies] = []
                turn = functools.partial(_read_turn, lanes, slab, reading, pending)
                try:
                    nbytes, damage = await outlive(
                        loop.run_in_executor(context.readers, turn), on_cancel=lanes.left.clear
                    )
                finally:
                    # a device may be reading the slab, cancelled or not
                    await settle(pending, context, saving=False)
            if nbytes:
                have_read(nbytes, damage, reading, context, total_nbytes)
        for other in lanes.waiting:  # nothing is left to begin: it need not wait for a slab
            other.cancel()
    finally:
        # a task keeps the error that ended it, which keeps this frame: with the task in it, all
        # that was loaded would stay in memory until Python collects garbage
        lanes.waiting.discard(lane)
        del lane


def _read_turn(
    lanes: Lanes, slab: Slab, reading: Reading, pending: list[PendingCopies]
) -> tuple[int, list[CorruptionError]]:
    """Read, verify and land ranges off the left end, a lane's share of them. Blocks.

    It ends with the first range that is damaged, so that this is said before anything that
    fails behind it; and where a device reads from the slab, with the last one that fits there.

    Returns:
        Bytes read, and what is damaged.
    """
    nbytes = at = 0
    verified = Verified(reading, pending)
    damage: list[CorruptionError] = []
    share = -(-len(lanes.left) // lanes.num)
    until = time.monotonic() + _TURN_S
    for _ in range(share):
        segment = lanes.take(len(slab.view) - at)
        if segment is None:
            break
        with lanes.opened(segment) as source:
            if reading.holds_slabs:
                damage = check_into(segment, slab, at, source, reading, verified)
                at += -(-segment.nbytes // PAGE_NBYTES) * PAGE_NBYTES
            else:
                damage = check_and_land(segment, slab, source, reading, pending)
        nbytes += segment.nbytes
        if damage or time.monotonic() >= until:
            break
    verified.land(slab)  # told of a hundred one by one, a device takes ten milliseconds
    return nbytes, damage


def have_read(
    nbytes: int,
    damage: list[CorruptionError],
    reading: Reading,
    context: EngineContext,
    total_nbytes: int,
) -> None:
    """Report what is damaged, and say how far the load is."""
    while damage:  # as in `Reading.damaged`: no frame keeps an error that has that frame
        reading.damaged(damage.pop(0))
    reading.read_nbytes += nbytes
    context.emit(
        ReadProgressed(
            path=reading.storage.path, read_nbytes=reading.read_nbytes, nbytes=total_nbytes
        )
    )
