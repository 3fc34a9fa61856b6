"""Copy and write the buckets of a plan.

    one task a bucket      a file
    one task a segment     leases a slab, copies, sums, writes, gives the slab back

Segments get slabs in the order of the plan, so files are written from front to back,
largest first, whatever the size of the pool. A segment holds its slab from copy to write,
and waits at most, where parts have to come in order, for those before it in its file, and
where one is written at a time (`max_writes=1`), for all before it: which had theirs before
it. So the first segment of all that hold one waits for nobody; no deadlock at any pool size,
and no more memory than the pool.

Copying is not held back by writing: until the pool is full, slabs are copied as fast as
memory allows, also while a store or a slow disk is asked for the path; but what does not fit
leaves one slab to other saves and loads meanwhile. Where somebody waits for `staged`, writing is
held back by copying: writers on the cores and on the memory bus made that wait half as long again
(two cores, a pool as large as the state). The commit comes later by as much as the copies took.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptio._aio import Siblings, run_blocking, run_unless_cancelled
from ckptio.engine.context import settle
from ckptio.engine.made import Made
from ckptio.engine.progress import SaveProgress
from ckptio.errors import SaveAbortedError
from ckptio.format.checksum import crc32c
from ckptio.storage.file_names import data_file_name
from ckptio.storage.streams import AwaitedSink

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ckptio.engine.context import EngineContext
    from ckptio.engine.save import SaveJob
    from ckptio.plan.save import Bucket, SavePlan, Segment
    from ckptio.staging.cuda import PendingCopies
    from ckptio.staging.pool import Slab
    from ckptio.storage.interface import Attempt
    from ckptio.storage.streams import Sink


@dataclass(slots=True)
class _File:
    """A file on its way: checksums of its blocks come in any order.

    Attributes:
        first: Number of its first segment, in the order of the plan.
        is_closed: Whether it is as durable as was asked for; an object is there by then.
    """

    name: str
    bucket: Bucket
    first: int
    checksums: dict[int, list[int]] = field(default_factory=dict)
    is_closed: bool = False

    def receipt(self) -> tuple[str, int, list[int]]:
        """Name, size and checksums, as the manifest takes them."""
        # A TaskGroup does not report a child that was cancelled, so check that every segment
        # delivered its checksums, and that the file was closed behind them
        if not self.is_closed or len(self.checksums) < len(self.bucket.segments):
            raise SaveAbortedError(f"a task that wrote a part of {self.name!r} was cancelled")
        sums = [crc for start in sorted(self.checksums) for crc in self.checksums[start]]
        return self.name, self.bucket.nbytes, sums


async def write_buckets(
    job: SaveJob,
    context: EngineContext,
    plan: SavePlan,
    begin: Callable[[], Awaitable[Attempt]],
) -> list[tuple[str, int, list[int]]]:
    """Copy and write every bucket of a plan.

    Args:
        job: The save.
        context: The engine.
        plan: What goes where.
        begin: Begins the attempt that files are made in, beside the copies; it leaves nothing
            where it fails or is cancelled.

    Returns:
        Name, size and checksums of each file, in the order of the plan.

    Raises:
        CheckpointError: The first failure; the others are cancelled and awaited.
    """
    num_segments = sum(len(bucket.segments) for bucket in plan.buckets)
    leases = _one_after_another(num_segments)
    turns = _one_after_another(num_segments) if context.config.max_writes == 1 else []
    writes = asyncio.Semaphore(context.config.max_writes)
    progress = SaveProgress(
        job, context, plan.nbytes, num_segments, num_segments, leases, writes, turns
    )
    if num_segments == 0:
        progress.to_submit = progress.to_stage = 1
        progress.submitted()
        progress.staged()
    files: list[_File] = []
    first = 0
    for bucket in plan.buckets:
        name = data_file_name(job.save_id, context.ranks.rank, bucket.index)
        files.append(_File(name, bucket, first))
        first += len(bucket.segments)
    try:
        async with Siblings() as group:
            group.create_task(progress.begin(begin), name=f"begin {job.storage.path}")
            for file in files:
                part = group.create_task(_carry(file, progress), name=f"bucket {file.name}")
                # however it ends, cancelled before its first step too: others wait behind it
                num = len(file.bucket.segments)
                part.add_done_callback(functools.partial(progress.ended, file.first, num))
    finally:
        progress.end()
    await progress.attempt.get()  # without files, nobody else learns that its task was cancelled
    progress.require_settled()
    return [file.receipt() for file in files]


def _one_after_another(number: int) -> list[asyncio.Event]:
    """Make what each of several waits for, and the one behind the last; the first for nothing."""
    events = [asyncio.Event() for _ in range(number + 1)]
    events[0].set()
    return events


async def _carry(file: _File, progress: SaveProgress) -> None:
    """Copy and write one bucket."""
    sink = Made["Sink | AwaitedSink"]()
    async with Siblings() as group:
        group.create_task(sink.make(_create(file, progress.attempt)), name=f"create {file.name}")
        for number, segment in enumerate(file.bucket.segments, file.first):
            part = group.create_task(
                _carry_segment(segment, number, file, sink, progress),
                name=f"segment {file.name}@{segment.start}",
            )
            part.add_done_callback(functools.partial(progress.ended, number, 1))  # as above
    made = await sink.get()
    if isinstance(made, AwaitedSink):
        await made.close()
    else:
        async with progress.closes:
            await run_blocking(progress.context.executor, made.close)
    file.is_closed = True


async def _create(file: _File, attempt: Made[Attempt]) -> Sink | AwaitedSink:
    """Make a file, once there is what to make it in."""
    return await (await attempt.get()).create(file.name, file.bucket.nbytes)


async def _carry_segment(
    segment: Segment,
    number: int,
    file: _File,
    opening: Made[Sink | AwaitedSink],
    progress: SaveProgress,
) -> None:
    """Copy, sum and write one segment."""
    pool, source = progress.context.pool, progress.job.source
    await progress.lease_turn(number)
    async with pool.lease(for_device=source.uses_devices) as slab:
        progress.leases[number + 1].set()
        await _stage(segment, slab, progress)
        await _copies_first(progress)
        sink = await opening.get()
        if not isinstance(sink, AwaitedSink):
            await progress.turn(number)
        file.checksums[segment.start] = await _write_out(segment, slab, sink, progress)
        progress.written(segment.nbytes)


async def _stage(segment: Segment, slab: Slab, progress: SaveProgress) -> None:
    """Copy one segment."""
    context, gather = progress.context, progress.job.source.gather
    pending: list[PendingCopies] = []
    try:
        await run_unless_cancelled(context.copiers, gather, segment, slab, pending)
        progress.submitted()
    finally:
        await settle(pending, context, saving=True)  # a device may be writing to the slab
    progress.staged()


async def _copies_first(progress: SaveProgress) -> None:
    """Hold writing back until all is copied, if somebody waits for `staged`.

    Writing goes on as soon as anybody needs a slab, such as those that are held here: so what
    waits for a slab, and what holds one, never wait for each other.
    """
    if progress.writes_go.is_set() or not progress.job.moments.staged.is_awaited:
        return
    with progress.context.pool.watched(progress.writes_go.set):
        await progress.writes_go.wait()


async def _write_out(
    segment: Segment,
    slab: Slab,
    sink: Sink | AwaitedSink,
    progress: SaveProgress,
) -> list[int]:
    """Sum and write a segment; gives the checksums of its blocks."""
    context = progress.context
    seal = functools.partial(_seal, segment, slab, context.config.block_nbytes)
    if not isinstance(sink, AwaitedSink):
        async with progress.writes:
            return await run_unless_cancelled(context.writers, seal, sink)
    checksums = await run_unless_cancelled(context.writers, seal)
    with slab.view[: segment.nbytes] as data:
        await sink.write(segment.start, data)
    return checksums


def _seal(segment: Segment, slab: Slab, block_nbytes: int, sink: Sink | None = None) -> list[int]:
    """Sum a segment, and write it if there is where to, block by block. Blocks.

    Short tensors are still in the core's cache, as they were copied just now. Long ones went
    past it: that sums a tenth slower, and stages in two thirds of the time.
    """
    checksums = []
    for start in range(0, segment.nbytes, block_nbytes):
        with slab.view[start : min(start + block_nbytes, segment.nbytes)] as block:
            checksums.append(crc32c(block))
            if sink is not None:
                sink.pwrite(segment.start + start, block)
    return checksums
