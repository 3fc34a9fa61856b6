"""Carry a load out: from a path to tensors that are filled.

    manifest (cache) -> sizes of files -> plan -> ranges: read, verify, land

Nothing lands before the sizes of the files that are read were checked (by the caller of
`read_plan`, with `check_sizes`), and no block before its own checksum was. A range, or a lane of
them, holds one slab from read to landing; memory beside the targets is the pool, and what is
mapped of the page cache (`num_cached_lanes`), whatever the size of the state.
"""

from __future__ import annotations

import collections
import contextlib
import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio._aio import Siblings, run_blocking
from ckptio.config import MiB
from ckptio.engine.context import MAX_OPEN_FILES, num_cached_lanes, settle
from ckptio.engine.landing import bring
from ckptio.engine.lanes import Gate, Lanes, have_read, lend, open_each, read_in_lane
from ckptio.engine.sources import opened
from ckptio.errors import (
    CheckpointChangedError,
    ConfigError,
    CorruptionError,
    StateError,
    StorageError,
)
from ckptio.events import LoadStarted
from ckptio.plan.load import plan_load
from ckptio.storage.streams import AwaitedSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.landing import Reading
    from ckptio.format.manifest import Manifest
    from ckptio.plan.load import LoadPlan, ReadSegment, Wanted
    from ckptio.staging.cuda import PendingCopies
    from ckptio.storage.streams import Source

#: Of a file that is opened, read and closed in one visit to a thread, if there are several: what
#: a disk reads in less than a millisecond.
_SMALL_NBYTES = MiB


@dataclass(slots=True)
class _Gates:
    """What a load has to pass, beside others; see `EngineContext`."""

    files: Gate
    lanes: Gate
    cached_lanes: Gate


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
    reading.storage.remember(reading.manifest)
    entries = [reading.manifest.files[i] for i in files]
    if not entries:
        return set()
    try:
        sizes = await reading.storage.sizes([entry.name for entry in entries])
    except CheckpointChangedError:
        context.cache.forget(reading.storage)  # what is kept is none for whoever reads now
        raise
    if any(size != entry.nbytes for entry, size in zip(entries, sizes, strict=True)):
        # a checkpoint that was overwritten since looks just like a damaged one
        await _require_same(reading, context)
    whole = set()
    for index, entry, size in zip(files, entries, sizes, strict=True):
        if size == entry.nbytes:
            whole.add(index)
            continue
        problem = "no such regular file" if size is None else f"a file of {size} bytes"
        start, stop = sorted((size or 0, entry.nbytes))
        reading.damaged(
            CorruptionError(
                f"{problem} instead of one of {entry.nbytes} bytes",
                path=reading.storage.path,
                file=entry.name,
                start=start,
                stop=stop,
                fqns=reading.names_in(index, start, stop),
            )
        )
    return whole


async def _require_same(reading: Reading, context: EngineContext) -> None:
    """Look whether what is read is what stands there now.

    Raises:
        CheckpointChangedError: It was overwritten.
        StorageError: It cannot be looked at; or, `CheckpointNotFoundError`, it was removed.
    """
    now = await context.cache.get(reading.storage, fresh=True)
    if now.save_id != reading.manifest.save_id:
        raise CheckpointChangedError(reading.storage.path)


@contextlib.asynccontextmanager
async def telling_of_changes(reading: Reading, context: EngineContext) -> AsyncIterator[None]:
    """Read data files, and say if the checkpoint was overwritten or removed meanwhile.

    Raises:
        CheckpointChangedError: It was overwritten, or a file went away.
        StorageError: A file cannot be read; or, `CheckpointNotFoundError`, it was removed.
    """
    try:
        yield
    except CheckpointChangedError:
        context.cache.forget(reading.storage)  # what is trusted for a while misleads
        raise
    except StorageError as error:
        if error.errno == errno.ESTALE:  # so NFS calls what another host removed, and a lost mount
            await _require_same(reading, context)
        raise


async def read_plan(plan: LoadPlan, reading: Reading, context: EngineContext) -> None:
    """Read, verify and land every range of a plan.

    Raises:
        CorruptionError: A block does not have its checksum, and nobody collects.
        CheckpointChangedError: A file went away meanwhile.
        StorageError: The first failure of any part; the others are cancelled and awaited. Or, as
            `CheckpointNotFoundError`, that it was removed, where a server said a file is stale.
        StateError: Somebody cancelled a part of it, and not the whole.
    """
    total, before = plan.nbytes, reading.read_nbytes
    by_file: dict[int, list[ReadSegment]] = {}
    for segment in plan.segments:
        by_file.setdefault(segment.file, []).append(segment)
    gates = _Gates(
        Gate(context.files, MAX_OPEN_FILES, reading),
        Gate(context.lanes, context.config.max_reads, reading),
        Gate(context.cached_lanes, num_cached_lanes(context.config), reading),
    )
    small = await _small_files(by_file, reading, context, gates)
    async with telling_of_changes(reading, context), Siblings() as group:
        if small is not None:
            _start_lanes(small, group, "small files", reading, context, total)
        for file, segments in by_file.items():
            group.create_task(
                _read_file(file, segments, reading, context, gates, total),
                name=f"read file {file}",
            )
    if reading.read_nbytes - before < total:  # groups take a cancelled task for a success
        raise StateError(f"a task that read a part of {reading.storage.path!r} was cancelled")


async def _small_files(
    by_file: dict[int, list[ReadSegment]], reading: Reading, context: EngineContext, gates: _Gates
) -> Lanes | None:
    """Take small files out, if there are several that can be opened on the thread that reads.

    Args:
        by_file: Ranges by file; the others stay.
        reading: The checkpoint.
        context: The engine.
        gates: Those of the load.
    """
    small = [
        file
        for file, segments in by_file.items()
        if len(segments) == 1 and segments[0].nbytes <= _SMALL_NBYTES
    ]
    open_file = await reading.storage.opener() if len(small) > 1 else None
    if open_file is None:
        return None
    left = collections.deque(by_file.pop(file)[0] for file in small)
    num = min(len(left), context.config.max_reads)
    return Lanes(left, num, gates.lanes, open_each(open_file, reading))


def _start_lanes(
    lanes: Lanes,
    group: Siblings,
    what: str,
    reading: Reading,
    context: EngineContext,
    total_nbytes: int,
) -> None:
    for lane in range(lanes.num):
        group.create_task(
            read_in_lane(lanes, reading, context, total_nbytes), name=f"read {what}, lane {lane}"
        )


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
        plan_load,
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


def require_slabs(manifest: Manifest, context: EngineContext) -> None:
    """Refuse a checkpoint whose blocks do not fit the slabs of this engine."""
    if manifest.block_nbytes > context.config.slab_nbytes:
        raise ConfigError(
            f"the checkpoint has blocks of {manifest.block_nbytes} bytes and this engine slabs of"
            f" {context.config.slab_nbytes}; raise slab_nbytes"
        )


async def _read_file(
    file: int,
    segments: Sequence[ReadSegment],
    reading: Reading,
    context: EngineContext,
    gates: _Gates,
    total_nbytes: int,
) -> None:
    """Read the ranges of one file."""
    entry = reading.manifest.files[file]
    async with (
        gates.files.passing(),
        opened(reading, entry, context) as source,
        Siblings() as group,
    ):
        if isinstance(source, AwaitedSource) or reading.holds_slabs:
            for segment in segments:
                group.create_task(
                    _read_segment(segment, source, reading, context, total_nbytes),
                    name=f"read {entry.name}@{segment.start}",
                )
        else:
            if source.is_cached:
                num, gate = num_cached_lanes(context.config), gates.cached_lanes
            else:
                num, gate = context.config.max_reads, gates.lanes
            lanes = Lanes(collections.deque(segments), min(len(segments), num), gate, lend(source))
            _start_lanes(lanes, group, entry.name, reading, context, total_nbytes)


async def _read_segment(
    segment: ReadSegment,
    source: Source | AwaitedSource,
    reading: Reading,
    context: EngineContext,
    total_nbytes: int,
) -> None:
    """Read, verify and land one range, which has a slab of its own."""
    async with context.pool.lease(for_device=reading.holds_slabs) as slab:
        pending: list[PendingCopies] = []
        try:
            damage = await bring(segment, slab, source, reading, context, pending)
        finally:
            # a device may be reading the slab, cancelled or not
            await settle(pending, context, saving=False)
    have_read(segment.nbytes, damage, reading, context, total_nbytes)
