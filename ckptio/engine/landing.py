"""Read ranges into slabs, verify them block by block, and land what is whole.

A block lands only after its own checksum was verified, whoever reads it: a load, a rank
that passes bytes on, a copy between tiers.
"""

from __future__ import annotations

import asyncio
import bisect
import errno
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ckptio._aio import run_unless_cancelled
from ckptio._threads import NUM_ODD_JOBS
from ckptio.errors import CorruptionError, StorageError
from ckptio.format.checksum import crc32c
from ckptio.storage.streams import AwaitedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from ckptio.engine.context import EngineContext
    from ckptio.format.manifest import Manifest
    from ckptio.plan.load import BlockPieces, Piece, ReadSegment
    from ckptio.staging.cuda import PendingCopies
    from ckptio.staging.pool import Slab
    from ckptio.storage.interface import Storage
    from ckptio.storage.streams import Lent, Memory, Source

    OnDamage = Callable[[CorruptionError], None]


#: Rows of verified blocks that are kept until a slab is landed, about.
_MAX_ROWS = 20_000


class Target(Protocol):
    """Takes verified blocks; `staging.copy.TargetState`, as a rule."""

    @property
    def is_async(self) -> bool:
        """Whether `scatter` may leave copies pending, so that the slab must stay as it is."""
        ...

    def scatter(
        self, blocks: Sequence[BlockPieces], memory: Memory, pending: list[PendingCopies]
    ) -> None:
        """Take the pieces of blocks that some memory holds. Blocks; thread-safe."""
        ...


@dataclass(slots=True)
class Reading:
    """A checkpoint that is being read.

    Attributes:
        storage: Where it is.
        manifest: What it is made of.
        target: Takes verified blocks; nothing lands without it.
        on_damage: Takes damaged blocks and missing files, and blocks that a disk does not give
            (EIO); without it the first one raises.
        num_tensors: Tensors that are filled or made; for events.
        read_nbytes: Bytes that have come so far: read here, or passed on by another rank.
        opens: Limits the files that are being opened or closed, on a thread or waiting for one,
            so that those of others get their turn if these hang.
    """

    storage: Storage
    manifest: Manifest
    target: Target | None = None
    on_damage: OnDamage | None = None
    num_tensors: int = 0
    read_nbytes: int = 0
    opens: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(NUM_ODD_JOBS))
    _reads: asyncio.Semaphore | None = None
    _spans: list[list[tuple[int, int, str]]] = field(default_factory=list)

    @property
    def holds_slabs(self) -> bool:
        """Whether the slab of a range has to stay as it is after the range has landed."""
        return self.target is not None and self.target.is_async

    def reads(self, max_reads: int) -> asyncio.Semaphore:
        """Limit the ranges that have a thread, or wait for one, for the same reason as `opens`."""
        if self._reads is None:
            self._reads = asyncio.Semaphore(max_reads)
        return self._reads

    def names_in(self, file: int, start: int, stop: int) -> list[str]:
        """Name the tensors that have bytes in `[start, stop)` of a file."""
        if not self._spans:
            self._spans = _spans_of(self.manifest)
        spans = self._spans[file]
        # chunks of a file do not overlap, so the first that reaches in is the one before `start`
        first = max(0, bisect.bisect_right(spans, (start,)) - 1)
        last = bisect.bisect_left(spans, (stop,))
        return [name for begin, end, name in spans[first:last] if begin < end and end > start]

    def damaged(self, error: CorruptionError) -> None:
        """Raise, or report to who collects."""
        try:
            if self.on_damage is None:
                raise error
            self.on_damage(error)
        finally:
            del error  # it has this frame


async def bring(
    segment: ReadSegment,
    slab: Slab,
    source: Source | AwaitedSource | None,
    reading: Reading,
    context: EngineContext,
    pending: list[PendingCopies],
    *,
    keep: bool = False,
    threads: Executor | None = None,
) -> list[CorruptionError]:
    """Read, verify and land a range; arguments and result are those of `check_and_land`.

    What came over a network, and is not what was written, is asked for once more: it may have
    changed on its way. A file is read on `threads`, those for reading if not given.
    """
    if not isinstance(source, AwaitedSource):
        arguments = (segment, slab, source, reading, pending)
        async with reading.reads(context.config.max_reads):
            return await run_unless_cancelled(
                threads or context.readers, check_and_land, *arguments, keep=keep
            )
    damage: list[CorruptionError] = []
    try:
        with slab.view[: segment.nbytes] as room:
            await source.read_into(segment.start, room)
        landing = (segment, slab, None, reading, pending)
        damage = await run_unless_cancelled(context.copiers, check_and_land, *landing, repeats=True)
        for error in damage:  # nothing was landed of these blocks, and no device reads them
            start, stop = error.start - segment.start, error.stop - segment.start
            with slab.view[start:stop] as room:
                await source.read_into(error.start, room)
        if damage:
            again = [(e.start - segment.start) // reading.manifest.block_nbytes for e in damage]
            work = _Work(segment, reading, Verified(reading, pending))
            damage = await run_unless_cancelled(context.copiers, work.check_some, slab, again)
    except CorruptionError as error:
        return damage or [error]
    return damage


class Verified:
    """Verified blocks of some memory that are yet to land: a device is told of all at once.

    Args:
        reading: What is being read.
        pending: Takes what devices still have to read from the memory.
    """

    def __init__(self, reading: Reading, pending: list[PendingCopies]) -> None:
        self._reading = reading
        self._pending = pending
        self._blocks: list[BlockPieces] = []
        #: Rows among them: a device is told of each, which takes memory.
        self._num_rows = 0

    def add(self, start: int, pieces: tuple[Piece, ...], memory: Memory) -> None:
        """Take the pieces of a block, and land them where that need not wait for others.

        Args:
            start: Where the block starts in the memory.
            pieces: What it holds, as `plan.load.ReadSegment` has them.
            memory: The same for all, until they are landed.
        """
        self._blocks.append((start, pieces))
        if self._reading.holds_slabs:
            self._num_rows += sum(rows[0] for *_, rows in pieces if rows is not None)
        if not self._reading.holds_slabs or self._num_rows > _MAX_ROWS:
            self.land(memory)

    def land(self, memory: Memory) -> None:
        """Land all that is there. Blocks."""
        target, blocks = self._reading.target, self._blocks
        if target is not None and blocks:
            self._blocks, self._num_rows = [], 0
            target.scatter(blocks, memory, self._pending)


def check_into(
    segment: ReadSegment,
    memory: Memory,
    start: int,
    source: Source,
    reading: Reading,
    verified: Verified,
) -> list[CorruptionError]:
    """Read and verify a range into a part of some memory, for whoever lands it. Blocks.

    Args:
        segment: The range.
        memory: Takes it.
        start: Where; a multiple of the page size.
        source: The file to read it from.
        reading: What is being read.
        verified: Takes what is whole.

    Returns:
        What is damaged; see `check_and_land`.
    """
    return _Work(segment, reading, verified).check_blocks(memory, source, start)


def check_and_land(
    segment: ReadSegment,
    slab: Memory,
    source: Source | None,
    reading: Reading,
    pending: list[PendingCopies],
    *,
    keep: bool = False,
    repeats: bool = False,
) -> list[CorruptionError]:
    """Verify and land a range block by block, reading it first if it is not there. Blocks.

    Where nobody collects damage, it ends with the first damaged block: the others would be
    thousands of errors that nobody hears of.

    Where no device reads from the slab and nobody needs all of it, blocks are summed and
    copied where the storage has them, if it lends them; or every block goes through the same
    piece of the slab, so that it is still in the core's cache when it is summed and copied.

    Args:
        segment: The range.
        slab: Holds or takes it, or a block of it at a time.
        source: The file to read it from; `None` if the slab holds it.
        reading: What is being read.
        pending: Takes what devices still have to read from the slab, also when this raises.
        keep: Whether the slab has to hold all of it in the end.
        repeats: Whether damaged blocks are asked for once more: then all of them are found.

    Returns:
        What is damaged.
    """
    verified = Verified(reading, pending)
    work = _Work(segment, reading, verified, repeats=repeats)
    if source is None or keep or reading.holds_slabs:
        damage = work.check_blocks(slab, source, 0)
        verified.land(slab)
        return damage
    with source.lend(segment.start, segment.nbytes) as lent:
        if lent is not None:
            work.check_lent(lent)
    # what was not lent, or was taken back meanwhile
    return work.check_blocks(slab, source, None)


class _Work:
    """The blocks of a range, as far as they are done."""

    def __init__(
        self, segment: ReadSegment, reading: Reading, verified: Verified, *, repeats: bool = False
    ) -> None:
        self._segment = segment
        self._reading = reading
        self._verified = verified
        self._damage: list[CorruptionError] = []
        self._num_done = 0
        self._wants_all = repeats or reading.on_damage is not None

    @property
    def _is_over(self) -> bool:
        """Whether the rest need not be looked at: the caller raises the first damage."""
        return bool(self._damage) and not self._wants_all

    def check_blocks(
        self, memory: Memory, source: Source | None, start: int | None
    ) -> list[CorruptionError]:
        """Do the rest, in memory that has room for the range, or for a block.

        Args:
            memory: Holds or takes it.
            source: What to read it from; `None` if the memory holds it.
            start: Where the range has a place in the memory; `None` if all blocks have the first.

        Returns:
            What is damaged of the range.
        """
        block = self._reading.manifest.block_nbytes
        for index in range(self._num_done, len(self._segment.checksums)):
            if self._is_over:
                break
            self._do(index, memory, source, 0 if start is None else start + index * block)
        return self._damage

    def check_some(self, memory: Memory, indices: Sequence[int]) -> list[CorruptionError]:
        """Do some blocks, each in a place of its own in memory that holds them."""
        for index in indices:
            if self._is_over:
                break
            self._do(index, memory, None, index * self._reading.manifest.block_nbytes)
        self._verified.land(memory)
        return self._damage

    def check_lent(self, lent: Lent) -> None:
        """Do as much as can be done before the memory is taken back."""
        block = self._reading.manifest.block_nbytes
        for index in range(len(self._segment.checksums)):
            num_damaged = len(self._damage)
            self._do(index, lent, None, index * block)
            if not lent.is_held():  # this block may have changed while it was read
                del self._damage[num_damaged:]
                return
            self._num_done += 1
            if self._is_over:
                return

    def _do(self, index: int, memory: Memory, source: Source | None, at: int) -> None:
        """Read a block, if there is a source, verify it, and land it, or leave it to be landed."""
        segment, reading = self._segment, self._reading
        block = reading.manifest.block_nbytes
        nbytes = min(block, segment.nbytes - index * block)
        start = segment.start + index * block
        expected = segment.checksums[index]
        with memory.view[at : at + block] as room, room[:nbytes] as data:
            if source is not None:
                try:
                    source.pread_into(start, room, nbytes)
                except CorruptionError as error:  # it ends before: shorter than it was at first
                    self._damage.append(error)
                    return
                except StorageError as error:
                    if error.errno != errno.EIO or reading.on_damage is None:
                        raise
                    # whoever collects hears of what the disk does not give as of damage
                    problem = os.strerror(errno.EIO)
                    self._damage.append(_damage(problem, reading, segment.file, start, nbytes))
                    return
            # what a foreign checkpoint has not summed cannot be verified
            found = None if expected is None else crc32c(data)
        if found != expected:
            problem = f"checksum {found:08x} instead of {expected:08x}"
            self._damage.append(_damage(problem, reading, segment.file, start, nbytes))
        elif reading.target is not None:
            self._verified.add(at, segment.pieces[index], memory)


def _damage(problem: str, reading: Reading, file: int, start: int, nbytes: int) -> CorruptionError:
    """Say what is wrong with a block, and which tensors it holds."""
    return CorruptionError(
        problem,
        path=reading.storage.path,
        file=reading.manifest.files[file].name,
        start=start,
        stop=start + nbytes,
        fqns=reading.names_in(file, start, start + nbytes),
    )


def _spans_of(manifest: Manifest) -> list[list[tuple[int, int, str]]]:
    """Give for each file where whose bytes are in it: start, stop and name, by start."""
    spans: list[list[tuple[int, int, str]]] = [[] for _ in manifest.files]
    for tensor in manifest.tensors:
        for chunk in tensor.chunks:
            nbytes = tensor.chunk_nbytes(chunk)
            for file, start in ((chunk.file, chunk.start), *chunk.copies):
                spans[file].append((start, start + nbytes, tensor.name))
    for held in spans:
        held.sort()
    return spans
