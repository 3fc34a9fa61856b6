"""Carry a load out: from a path to tensors that are filled.

    manifest (cache) -> sizes of files -> plan -> ranges: read, verify, land

Nothing lands before the sizes of all files were checked, and no block before its own
checksum was. A range, or a lane of them, holds one slab from read to landing; memory
beside the targets is the pool, whatever the size of the state.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptio._aio import Siblings, outlive, run_blocking
from ckptio._gc import collection_paused
from ckptio.engine.context import num_cached_lanes, settle
from ckptio.engine.landing import bring, check_and_land, opened
from ckptio.errors import CheckpointChangedError, ConfigError, CorruptionError, StateError
from ckptio.events import LoadStarted, ReadProgressed
from ckptio.plan.load import plan_load
from ckptio.storage.streams import AwaitedSource

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Sequence

    from ckptio.config import CheckpointConfig
    from ckptio.engine.context import EngineContext
    from ckptio.engine.landing import Reading
    from ckptio.format.manifest import Manifest
    from ckptio.plan.load import LoadPlan, ReadSegment, Wanted
    from ckptio.staging.cuda import PendingCopies
    from ckptio.staging.pool import Slab
    from ckptio.storage.streams import Source

#: Seconds after which a visit to a thread ends with the range it is at, so that its slab goes
#: to who waits, and progress is said: after many ranges from memory, after one or two from a disk.
_TURN_S = 0.1


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
    reading.storage.recall(reading.manifest)
    entries = [reading.manifest.files[i] for i in files]
    try:
        sizes = await reading.storage.sizes([entry.name for entry in entries])
    except CheckpointChangedError:
        context.cache.forget(reading.storage)  # what is kept is none for who reads now
        raise
    if any(size != entry.nbytes for entry, size in zip(entries, sizes, strict=True)):
        # a checkpoint that was overwritten since looks just like a damaged one
        now = await context.cache.get(reading.storage, fresh=True)
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
        StateError: Somebody cancelled a part of it, and not the whole.
    """
    total, before = plan.nbytes, reading.read_nbytes
    by_file: dict[int, list[ReadSegment]] = {}
    for segment in plan.segments:
        by_file.setdefault(segment.file, []).append(segment)
    try:
        async with Siblings() as group:
            for file, segments in by_file.items():
                group.create_task(
                    _read_file(file, segments, reading, context, total), name=f"read file {file}"
                )
    except CheckpointChangedError:
        context.cache.forget(reading.storage)  # what is trusted for a while misleads
        raise
    if reading.read_nbytes - before < total:  # groups take a cancelled task for a success
        raise StateError(f"a task that read a part of {reading.storage.path!r} was cancelled")


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
    segments: Sequence[ReadSegment],
    reading: Reading,
    context: EngineContext,
    total_nbytes: int,
) -> None:
    """Read the ranges of one file."""
    entry = reading.manifest.files[file]
    async with (
        context.files,
        opened(reading.storage, entry.name, entry.nbytes, context) as source,
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
                num, gate = num_cached_lanes(context.config), context.cached_lanes
            else:
                num, gate = context.config.max_reads, context.lanes
            lanes = _Lanes(collections.deque(segments), min(len(segments), num), gate)
            for lane in range(lanes.num):
                group.create_task(
                    _read_in_lane(lanes, source, reading, context, total_nbytes),
                    name=f"read {entry.name}, lane {lane}",
                )


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
    _have_read(segment.nbytes, damage, reading, context, total_nbytes)


@dataclass(slots=True)
class _Lanes:
    """What the lanes of a file share.

    Attributes:
        left: Ranges to be read. Whoever clears it lets all threads end with the range they
            are at.
        num: How many lanes there are.
        gate: Lets some of all lanes of the engine through.
        waiting: Those that wait for that, or for a slab.
    """

    left: deque[ReadSegment]
    num: int
    gate: asyncio.Semaphore
    waiting: set[asyncio.Task[None]] = field(default_factory=set)


async def _read_in_lane(
    lanes: _Lanes,
    source: Source,
    reading: Reading,
    context: EngineContext,
    total_nbytes: int,
) -> None:
    """Take ranges off the left end until there are none, a few in each visit to a thread.

    From one range to the next a thread does not go by the loop: that was half a millisecond
    of the loop for each 16 MiB, which take three to read from the page cache.

    Args:
        lanes: This and the others, and the ranges.
        source: The file.
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
            async with lanes.gate, context.pool.lease() as slab:  # for the host alone
                lanes.waiting.discard(lane)
                turn = functools.partial(_read_turn, lanes, slab, source, reading)
                nbytes, damage = await outlive(
                    loop.run_in_executor(context.readers, turn), on_cancel=lanes.left.clear
                )
            if nbytes:
                _have_read(nbytes, damage, reading, context, total_nbytes)
        for other in lanes.waiting:  # nothing is left to begin: it need not wait for a slab
            other.cancel()
    except BaseException:
        lanes.left.clear()
        raise
    finally:
        # a task keeps the error that ended it, which keeps this frame: with the task in it, all
        # that was loaded would stay in memory until Python collects garbage
        lanes.waiting.discard(lane)
        del lane


def _read_turn(
    lanes: _Lanes, slab: Slab, source: Source, reading: Reading
) -> tuple[int, list[CorruptionError]]:
    """Read, verify and land ranges off the left end, a lane's share of them. Blocks.

    It ends with the first range that is damaged, so that this is said before anything that
    fails behind it.

    Returns:
        Bytes read, and what is damaged.
    """
    nbytes = 0
    damage: list[CorruptionError] = []
    share = -(-len(lanes.left) // lanes.num)
    until = time.monotonic() + _TURN_S
    for _ in range(share):
        try:
            segment = lanes.left.popleft()
        except IndexError:  # another lane took the last one
            break
        damage = check_and_land(segment, slab, source, reading, [])
        nbytes += segment.nbytes
        if damage or time.monotonic() >= until:
            break
    return nbytes, damage


def _have_read(
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
