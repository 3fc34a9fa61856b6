"""Bring data files of a checkpoint to its second tier, byte for byte.

    one worker a slab    leases it, takes the next segment, reads, verifies, writes

What is written is what was verified: every block is compared with its checksum between
reading and writing, so that a copy is never worse than what the manifest says.

A worker takes a slab first and then the next segment, in the order of files and offsets.
So whoever has a later segment finds every earlier one in somebody's hands, with a slab: a
store that wants parts in order makes nobody wait for somebody who has nowhere to read to.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptio._aio import Siblings, run_blocking, run_unless_cancelled, shielded
from ckptio._threads import NUM_ODD_JOBS
from ckptio.engine.landing import Reading, bring
from ckptio.engine.sources import close_source, open_source, opened
from ckptio.errors import ConfigError, StateError, StorageError
from ckptio.plan.load import plan_load
from ckptio.storage.file_names import STAY_S
from ckptio.storage.streams import AwaitedSink, AwaitedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.errors import CorruptionError
    from ckptio.format.manifest import FileEntry, Manifest
    from ckptio.plan.load import ReadSegment
    from ckptio.staging.pool import Slab
    from ckptio.storage.interface import Attempt, Storage
    from ckptio.storage.streams import Sink, Source


@dataclass(slots=True)
class _File:
    """A file on its way; opened by the first worker that comes to it.

    Attributes:
        num_left: Segments that are not carried over.
        is_ended: Whether all are, and what they were written to is closed.
    """

    entry: FileEntry
    num_left: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    source: Source | AwaitedSource | None = None
    sink: Sink | AwaitedSink | None = None
    is_ended: bool = False


async def transfer(
    reading: Reading,
    files: Sequence[int],
    attempt: Attempt | None,
    context: EngineContext,
    on_written: Callable[[int], None] | None = None,
) -> None:
    """Copy data files, or verify them. When this returns, they are there, whole.

    Args:
        reading: The checkpoint; damage raises, unless somebody collects it.
        files: Indices of the files.
        attempt: Where to, on the second tier; `None` to verify what is there alone.
        context: The engine; holds its share of the pool at the most.
        on_written: Told how many bytes were written, as they are.

    Raises:
        CorruptionError: A block does not have its checksum; it was not written.
        CheckpointError: The first failure of any part; the others are cancelled and awaited.
        StateError: Somebody cancelled a part of it, and not the whole.
    """
    segments = _segments(reading.manifest, files, context)
    writes = asyncio.Semaphore(context.config.max_writes)
    work = _Transfer(reading, attempt, context, on_written, iter(segments), writes)
    for segment in segments:
        file = work.files.setdefault(segment.file, _File(reading.manifest.files[segment.file], 0))
        file.num_left += 1
    try:
        async with Siblings() as group:
            for number in range(min(context.copy_line.max_slabs, len(segments))):
                group.create_task(work.run(), name=f"copy {reading.storage.path} {number}")
    finally:
        for file in work.files.values():  # what a failure leaves open
            await work.close(file)
    if not all(file.is_ended for file in work.files.values()):
        # groups take a cancelled task for a success
        raise StateError(f"a task that copied a part of {reading.storage.path!r} was cancelled")


def _segments(
    manifest: Manifest, files: Sequence[int], context: EngineContext
) -> tuple[ReadSegment, ...]:
    """Cut files into slabs.

    Raises:
        ConfigError: Blocks of the checkpoint do not fill the slabs of this engine.
    """
    slab_nbytes = context.config.slab_nbytes
    if slab_nbytes % manifest.block_nbytes:
        raise ConfigError(
            f"the checkpoint has blocks of {manifest.block_nbytes} bytes; copy it with slab_nbytes"
            f" that are a multiple, not {slab_nbytes}"
        )
    wanted = set(files)
    plan = plan_load(manifest, (), context.config, whole_files=True)
    return tuple(segment for segment in plan.segments if segment.file in wanted)


@dataclass(slots=True)
class _Transfer:
    """What the workers of a copy share.

    Attributes:
        reading: The checkpoint.
        attempt: Where to; `None` to verify it alone.
        context: The engine.
        on_written: Told of bytes that are written.
        segments: Those that nobody has taken.
        writes: Limits the writes to a disk that have a thread, or wait for one, so that what goes
            to other places gets its turn if these hang.
        files: Those on their way, by index.
        closes: Limits the files that are being closed, and so synced, for the same reason.
    """

    reading: Reading
    attempt: Attempt | None
    context: EngineContext
    on_written: Callable[[int], None] | None
    segments: Iterator[ReadSegment]
    writes: asyncio.Semaphore
    files: dict[int, _File] = field(default_factory=dict)
    closes: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(NUM_ODD_JOBS))

    async def run(self) -> None:
        """Carry segments over until there are no more."""
        while True:
            async with self.context.copy_line.slabs, self.context.pool.lease() as slab:
                segment = next(self.segments, None)
                if segment is None:
                    return
                file = self.files[segment.file]
                await self._open(file)
                await self._carry(segment, file, slab)
            if self.on_written is not None:
                self.on_written(segment.nbytes)
            file.num_left -= 1
            if file.num_left == 0:
                await self._end(file)

    async def _open(self, file: _File) -> None:
        async with file.lock:
            if file.source is None:
                file.source = await open_source(self.reading, file.entry)
                if self.attempt is not None:
                    file.sink = await self.attempt.create(file.entry.name, file.entry.nbytes)

    async def _carry(self, segment: ReadSegment, file: _File, slab: Slab) -> None:
        context, sink = self.context, file.sink
        readers = None if self.attempt is not None else context.far  # the second tier is read
        damage = await bring(
            segment, slab, file.source, self.reading, context, [], keep=True, threads=readers
        )
        while damage:  # as in `engine.load`: no frame keeps an error that has that frame
            self.reading.damaged(damage.pop(0))
        if sink is None:
            return
        if isinstance(sink, AwaitedSink):
            with slab.view[: segment.nbytes] as data:
                await sink.write(segment.start, data)
        else:
            block_nbytes, writers = context.config.block_nbytes, context.far or context.writers
            async with self.writes:
                await run_unless_cancelled(writers, _write, segment, slab, block_nbytes, sink)

    async def _end(self, file: _File) -> None:
        """End a file that is written."""
        if isinstance(file.sink, AwaitedSink):
            await file.sink.close()
        elif file.sink is not None:
            async with self.closes:
                await run_blocking(self.context.far or self.context.executor, file.sink.close)
        file.is_ended = True
        await self.close(file)

    async def close(self, file: _File) -> None:
        """Release the source of a file, if it is open."""
        source, file.source = file.source, None
        if source is not None:
            await shielded(close_source(source, self.reading, self.context))


def _write(segment: ReadSegment, slab: Slab, block_nbytes: int, sink: Sink) -> None:
    """Write a segment. Blocks."""
    for start in range(0, segment.nbytes, block_nbytes):
        with slab.view[start : min(start + block_nbytes, segment.nbytes)] as block:
            sink.pwrite(segment.start + start, block)


async def require_files(storage: Storage, manifest: Manifest) -> None:
    """Check that every data file is there, with its size.

    Raises:
        StorageError: One is not, or that cannot be told.
    """
    sizes = await storage.sizes([entry.name for entry in manifest.files])
    for entry, size in zip(manifest.files, sizes, strict=True):
        if size != entry.nbytes:
            raise StorageError(
                f"{entry.name!r} is not there with its {entry.nbytes} bytes", path=storage.path
            )


async def _stay(attempt: Attempt) -> None:
    while True:
        await attempt.stay()
        await asyncio.sleep(STAY_S)


async def find_whole(
    target: Storage,
    manifest: Manifest,
    files: Sequence[int],
    attempt: Attempt,
    context: EngineContext,
) -> set[int]:
    """Say which data files an earlier copy has brought to a place, whole.

    An object is there when it is complete, and its name has the id of the save: its size
    says enough. A file may have its size before its bytes, so those are read; nothing is written
    meanwhile, so the attempt says that it is alive.

    Raises:
        StorageError: That cannot be told.
    """
    entries = manifest.files
    sizes = await target.sizes([entries[file].name for file in files])
    there = {file for file, size in zip(files, sizes, strict=True) if size == entries[file].nbytes}
    if not there:
        return there
    damage: list[CorruptionError] = []
    reading = Reading(target, manifest, on_damage=damage.append)
    async with opened(reading, entries[min(there)], context) as source:
        if isinstance(source, AwaitedSource):
            return there
    async with Siblings() as group:
        staying = group.create_task(_stay(attempt), name=f"copy to {target.path!r} stays")
        await transfer(reading, sorted(there), None, context)
        staying.cancel()
    damaged = {error.file for error in damage}
    return {file for file in there if entries[file].name not in damaged}
