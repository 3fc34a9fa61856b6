"""Carry a load out: from a path to tensors that are filled.

    manifest (cache) -> sizes of files -> plan -> ranges: read, verify, land

Nothing lands before the sizes of all files were checked, and no block before its own
checksum was. A range holds one slab from read to landing; memory beside the targets is
the pool, whatever the size of the state.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ckptio._aio import first_failure, run_blocking, run_unless_cancelled, shielded
from ckptio._gc import collection_paused
from ckptio.engine.context import settle
from ckptio.errors import CheckpointChangedError, ConfigError, CorruptionError
from ckptio.events import LoadStarted, ReadProgressed
from ckptio.format.checksum import crc32c
from ckptio.layout import DTYPES, numel
from ckptio.plan.load import plan_load
from ckptio.storage.interface import AwaitedSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from ckptio.config import CheckpointConfig
    from ckptio.engine.context import EngineContext
    from ckptio.format.manifest import Chunk, Manifest, TensorEntry
    from ckptio.plan.load import LoadPlan, Piece, ReadSegment, Wanted
    from ckptio.staging.cuda import PendingCopies
    from ckptio.staging.pool import Slab
    from ckptio.storage.interface import Source, Storage

    OnDamage = Callable[[CorruptionError], None]


class Target(Protocol):
    """Takes verified blocks; `staging.copy.TargetState`, as a rule."""

    @property
    def is_async(self) -> bool:
        """Whether `scatter` may leave copies pending, so that the slab must stay as it is."""
        ...

    def scatter(
        self, pieces: Sequence[Piece], slab: Slab, start: int, pending: list[PendingCopies]
    ) -> None:
        """Take the pieces of a block that starts at `start` of a slab. Blocks; thread-safe."""
        ...


@dataclass(slots=True)
class Reading:
    """A checkpoint that is being read.

    Attributes:
        storage: Where it is.
        manifest: What it is made of.
        target: Takes verified blocks; nothing lands without it.
        on_damage: Takes damaged blocks and missing files; without it the first one raises.
        num_tensors: Tensors that are filled or made; for events.
        read_nbytes: Bytes read so far.
    """

    storage: Storage
    manifest: Manifest
    target: Target | None = None
    on_damage: OnDamage | None = None
    num_tensors: int = 0
    read_nbytes: int = 0
    _spans: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)

    def names_in(self, file: int, start: int, stop: int) -> list[str]:
        """Name the tensors that have bytes in `[start, stop)` of a file."""
        if file not in self._spans:
            self._spans[file] = sorted(
                (start, start + _chunk_nbytes(tensor, chunk), tensor.name)
                for tensor in self.manifest.tensors
                for chunk in tensor.chunks
                for place, start in ((chunk.file, chunk.start), *chunk.copies)
                if place == file
            )
        spans = self._spans[file]
        # chunks of a file do not overlap, so the first that reaches in is the one before `start`
        first = max(0, bisect.bisect_right(spans, (start,)) - 1)
        last = bisect.bisect_left(spans, (stop,))
        return [name for begin, end, name in spans[first:last] if begin < end and end > start]

    def damaged(self, error: CorruptionError) -> None:
        """Raise, or report to who collects."""
        if self.on_damage is None:
            raise error
        self.on_damage(error)


async def check_sizes(reading: Reading, files: Sequence[int], context: EngineContext) -> set[int]:
    """Compare the sizes of files with the manifest's.

    Returns:
        Indices of the files that are whole.

    Raises:
        CorruptionError: A file is missing or has another size, and nobody collects.
        CheckpointChangedError: So it is because the checkpoint was overwritten meanwhile.
        ConfigError: Blocks of the checkpoint do not fit the slabs of this engine.
    """
    require_slabs(reading.manifest, context)
    entries = [reading.manifest.files[i] for i in files]
    sizes = await reading.storage.sizes([entry.name for entry in entries])
    if any(size != entry.nbytes for entry, size in zip(entries, sizes, strict=True)):
        # a checkpoint that was overwritten since looks just like a damaged one
        now = await context.cache.get(reading.storage)
        if now.save_id != reading.manifest.save_id:
            raise CheckpointChangedError(reading.storage.path)
    whole = set()
    for index, entry, size in zip(files, entries, sizes, strict=True):
        if size == entry.nbytes:
            whole.add(index)
            continue
        problem = "no such regular file" if size is None else f"a file of {size} bytes"
        start, stop = sorted((size or 0, entry.nbytes))
        reading.damaged(
            CorruptionError(
                f"{problem} instead of one of {entry.nbytes}",
                path=reading.storage.path,
                file=entry.name,
                start=start,
                stop=stop,
                fqns=reading.names_in(index, start, stop),
            )
        )
    return whole


async def read_plan(plan: LoadPlan, reading: Reading, context: EngineContext) -> None:
    """Read, verify and land every range of a plan.

    Raises:
        CorruptionError: A block does not have its checksum, and nobody collects.
        CheckpointChangedError: A file went away meanwhile.
        StorageError: The first failure of any part; the others are cancelled and awaited.
    """
    total = plan.nbytes
    by_file: dict[int, list[ReadSegment]] = {}
    for segment in plan.segments:
        by_file.setdefault(segment.file, []).append(segment)
    try:
        async with asyncio.TaskGroup() as group:
            for file, segments in by_file.items():
                group.create_task(
                    _read_file(file, segments, reading, context, total), name=f"read file {file}"
                )
    except BaseExceptionGroup as errors:
        failure = first_failure(errors)
        raise failure from failure.__cause__


async def plan_and_read(
    reading: Reading, wanted: Sequence[Wanted], context: EngineContext, *, whole_files: bool
) -> int:
    """Plan the reads that bring what is wanted, say so, and carry them out.

    Returns:
        Bytes read.

    Raises:
        CheckpointError: As `read_plan` does.
    """
    plan = await run_blocking(
        context.executor,
        _plan,
        reading.manifest,
        wanted,
        context.config,
        gap_nbytes=reading.storage.gap_nbytes,
        whole_files=whole_files,
    )
    announce(reading, plan.nbytes, len(plan.files), context)
    await read_plan(plan, reading, context)
    return plan.nbytes


def announce(reading: Reading, nbytes: int, num_files: int, context: EngineContext) -> None:
    """Say that this rank begins to read."""
    context.emit(
        LoadStarted(
            path=reading.storage.path,
            nbytes=nbytes,
            num_tensors=reading.num_tensors,
            num_files=num_files,
        )
    )


def _plan(
    manifest: Manifest,
    wanted: Sequence[Wanted],
    config: CheckpointConfig,
    *,
    gap_nbytes: int,
    whole_files: bool,
) -> LoadPlan:
    """Plan the reads of a load. Blocks."""
    with collection_paused():
        return plan_load(manifest, wanted, config, gap_nbytes=gap_nbytes, whole_files=whole_files)


def require_slabs(manifest: Manifest, context: EngineContext) -> None:
    """Refuse a checkpoint whose blocks do not fit the slabs of this engine."""
    if manifest.block_nbytes > context.config.slab_nbytes:
        raise ConfigError(
            f"the checkpoint has blocks of {manifest.block_nbytes} bytes and this engine slabs of"
            f" {context.config.slab_nbytes}; raise slab_nbytes"
        )


async def _read_file(
    file: int,
    segments: Iterable[ReadSegment],
    reading: Reading,
    context: EngineContext,
    total_nbytes: int,
) -> None:
    """Read the ranges of one file."""
    entry = reading.manifest.files[file]
    async with (
        context.files,
        opened(reading.storage, entry.name, entry.nbytes, context) as source,
        asyncio.TaskGroup() as group,
    ):
        for segment in segments:
            group.create_task(
                _read_segment(segment, source, reading, context, total_nbytes),
                name=f"read {entry.name}@{segment.start}",
            )


@contextlib.asynccontextmanager
async def opened(
    storage: Storage, name: str, nbytes: int, context: EngineContext
) -> AsyncIterator[Source | AwaitedSource]:
    """Lend an open data file."""
    source = await storage.open(name, nbytes)
    try:
        yield source
    finally:
        await shielded(close_source(source, context))


async def close_source(source: Source | AwaitedSource, context: EngineContext) -> None:
    """Release a data file."""
    if isinstance(source, AwaitedSource):
        await source.close()
    else:
        await run_blocking(context.executor, source.close)


async def _read_segment(
    segment: ReadSegment,
    source: Source | AwaitedSource,
    reading: Reading,
    context: EngineContext,
    total_nbytes: int,
) -> None:
    """Read, verify and land one range."""
    async with context.pool.lease() as slab:
        pending: list[PendingCopies] = []
        try:
            damage = await bring(segment, slab, source, reading, context, pending)
        finally:
            await settle(pending, context)  # a device may be reading the slab, cancelled or not
    for error in damage:
        reading.damaged(error)
    reading.read_nbytes += segment.nbytes
    context.emit(
        ReadProgressed(
            path=reading.storage.path, read_nbytes=reading.read_nbytes, nbytes=total_nbytes
        )
    )


async def bring(
    segment: ReadSegment,
    slab: Slab,
    source: Source | AwaitedSource | None,
    reading: Reading,
    context: EngineContext,
    pending: list[PendingCopies],
    *,
    keep: bool = False,
) -> list[CorruptionError]:
    """Read, verify and land a range; arguments and result are those of `check_and_land`."""
    if isinstance(source, AwaitedSource):
        with slab.view[: segment.nbytes] as room:
            await source.read_into(segment.start, room)
        source = None
    threads = context.copiers if source is None else context.readers
    return await run_unless_cancelled(
        threads, check_and_land, segment, slab, source, reading, pending, keep=keep
    )


def check_and_land(
    segment: ReadSegment,
    slab: Slab,
    source: Source | None,
    reading: Reading,
    pending: list[PendingCopies],
    *,
    keep: bool = False,
) -> list[CorruptionError]:
    """Verify and land a range block by block, reading it first if it is not there. Blocks.

    Where no device reads from the slab and nobody needs all of it, every block goes through
    the same piece, so that it is still in the core's cache when it is summed and copied.

    Args:
        segment: The range.
        slab: Holds or takes it, or a block of it at a time.
        source: The file to read it from; `None` if the slab holds it.
        reading: What is being read.
        pending: Takes what devices still have to read from the slab, also when this raises.
        keep: Whether the slab has to hold all of it in the end.

    Returns:
        What is damaged.
    """
    block = reading.manifest.block_nbytes
    target = reading.target
    spread = keep or source is None or (target is not None and target.is_async)
    damage: list[CorruptionError] = []
    for index, expected in enumerate(segment.checksums):
        nbytes = min(block, segment.nbytes - index * block)
        start = segment.start + index * block
        at = index * block if spread else 0
        with slab.view[at : at + block] as room, room[:nbytes] as data:
            if source is not None:
                source.pread_into(start, room, nbytes)
            # what a foreign checkpoint has not summed cannot be verified
            found = expected if expected is None else crc32c(data)
        if found is not None and found != expected:
            damage.append(_damaged_block(reading, segment.file, start, nbytes, found))
        elif target is not None:
            target.scatter(segment.pieces[index], slab, at, pending)
    return damage


def _damaged_block(
    reading: Reading, file: int, start: int, nbytes: int, found: int
) -> CorruptionError:
    """Say which block does not have its checksum, and which tensors it holds."""
    entry = reading.manifest.files[file]
    expected = entry.checksums()[start // reading.manifest.block_nbytes]
    return CorruptionError(
        f"checksum {found:08x} instead of {expected:08x}",
        path=reading.storage.path,
        file=entry.name,
        start=start,
        stop=start + nbytes,
        fqns=reading.names_in(file, start, start + nbytes),
    )


def _chunk_nbytes(tensor: TensorEntry, chunk: Chunk) -> int:
    """Bytes of a chunk."""
    shape = tensor.shape if chunk.local_shape is None else chunk.local_shape
    return numel(shape) * DTYPES[tensor.dtype].itemsize
