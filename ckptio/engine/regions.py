"""From tensors, and blocks of them, to the byte ranges of files that bring them.

A tensor lies in chunks, each a rectangle of it that some rank wrote; a destination wants another
rectangle. What both have in common is ranges of a file, each in one piece in the destination too.
Of the chunks of a thousand ranks, nearly all have nothing of it, and are passed over cheaply.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ckptio.errors import FormatError
from ckptio.layout import DTYPES, Box, numel, shared_runs
from ckptio.plan.load import Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.format.manifest import Chunk, TensorEntry

#: Chooses one of the places of a chunk: a file, and where the chunk starts in it.
Place = Callable[["Chunk"], tuple[int, int]]
#: Ranges of one tensor, at most: a load may have to plan each, with some 150 bytes for it.
_MAX_RANGES = 8_000_000


class Need(msgspec.Struct, frozen=True, gc=False):
    """A stored tensor, or a part of it, that a destination takes. There are thousands.

    Attributes:
        entry: The tensor.
        destination: Index of the destination.
        span: The range of its row-major bytes; all of them if not given.
        region: The block of it; all of it if not given. Never with `span`.
    """

    entry: TensorEntry
    destination: int
    span: tuple[int, int] | None = None
    region: Box | None = None

    def expand(self, wanted: list[Wanted], place: Place | None = None) -> None:
        """Add the ranges of files that bring it.

        Args:
            wanted: Takes them.
            place: Chooses the place of each chunk; the first one if not given.
        """
        entry, destination, span, region = self.entry, self.destination, self.span, self.region
        chunks = entry.chunks
        if len(chunks) == 1 and region is None:
            chunk = chunks[0]
            first, stop = span or (0, entry.nbytes)
            if first < stop:
                file, start = chunk.file, chunk.start
                if place is not None and chunk.copies:
                    file, start = place(chunk)
                wanted.append(Wanted(file, start + first, stop - first, destination, 0))
            return
        found = wanted if span is None else []
        want_region(entry, region or entry.box, destination, found, place)
        if span is not None:
            wanted += _cut_out(found, *span)

    def chunks(self) -> list[Chunk]:
        """Give the chunks that have something of it."""
        region = self.region
        if region is None or len(self.entry.chunks) == 1:
            return list(self.entry.chunks)
        near = _near(self.entry, region)
        return [chunk for chunk in near if numel(_shared(self.entry, chunk, region).shape)]


def want_region(
    entry: TensorEntry,
    region: Box,
    destination: int,
    wanted: list[Wanted],
    place: Place | None = None,
) -> None:
    """Want a rectangular part of a stored tensor, in a destination of just that shape.

    Args:
        entry: The tensor.
        region: The part.
        destination: Index of the destination.
        wanted: Takes the ranges.
        place: Chooses the place of each chunk; the first one if not given.

    Raises:
        FormatError: The chunks are cut into more pieces than any sharding has.
    """
    if len(entry.chunks) == 1 and region.shape == entry.shape:  # of thousands, nearly all
        if entry.nbytes:
            (chunk,) = entry.chunks
            file, first = (chunk.file, chunk.start) if place is None else place(chunk)
            wanted.append(Wanted(file, first, entry.nbytes, destination, 0))
        return
    itemsize = DTYPES[entry.dtype].itemsize
    num_ranges = 0
    for chunk in _near(entry, region):
        shared = _shared(entry, chunk, region)
        if not numel(shared.shape):
            continue
        block = entry.box_of(chunk)
        file, first = (chunk.file, chunk.start) if place is None else place(chunk)
        in_chunk = tuple(a - b for a, b in zip(shared.offset, block.offset, strict=True))
        in_region = tuple(a - b for a, b in zip(shared.offset, region.offset, strict=True))
        runs = shared_runs(shared.shape, (in_chunk, block.shape), (in_region, region.shape))
        for start, at, count, rows, step, stride in runs:
            num_ranges += rows
            if num_ranges > _MAX_RANGES:
                raise FormatError(
                    f"{entry.name!r} is cut into more than {_MAX_RANGES} pieces; load a part of it"
                )
            begin, nbytes = first + start * itemsize, count * itemsize
            want = Wanted(file, begin, nbytes, destination, at * itemsize)
            if rows > 1:
                want = want._replace(rows=rows, step=step * itemsize, stride=stride * itemsize)
            wanted.append(want)


def _near(entry: TensorEntry, region: Box) -> Sequence[Chunk]:
    """Give the chunks that may have something of a region.

    A tensor has a chunk for each of a thousand ranks, of which one is wanted. So all but a few are
    passed over by one dimension: that in which the region takes the smallest share.
    """
    chunks, shape = entry.chunks, entry.shape
    if len(chunks) == 1 or not all(shape):
        return chunks
    shares = [part / whole for part, whole in zip(region.shape, shape, strict=True)]
    if not shares or (least := min(shares)) == 1:
        return chunks
    dim = shares.index(least)
    first = region.offset[dim]
    stop = first + region.shape[dim]
    return [
        chunk
        for chunk in chunks
        if (start := chunk.global_offset) is None
        or (size := chunk.local_shape) is None
        or (start[dim] < stop and first < start[dim] + size[dim])
    ]


def _shared(entry: TensorEntry, chunk: Chunk, region: Box) -> Box:
    """Give what a chunk has of a region; its shape has a zero if that is nothing."""
    block = entry.box_of(chunk)
    first = tuple(map(max, block.offset, region.offset))
    shape = tuple(
        max(0, min(a + s, b + t) - start)
        for a, s, b, t, start in zip(
            block.offset, block.shape, region.offset, region.shape, first, strict=True
        )
    )
    return Box(first, shape)


def _cut_out(wanted: Sequence[Wanted], first: int, stop: int) -> list[Wanted]:
    """Keep what lies in `[first, stop)` of the destination's bytes, counted from `first`."""
    kept = []
    for want in itertools.chain.from_iterable(want.each() for want in wanted):
        begin = max(want.offset, first)
        end = min(want.offset + want.nbytes, stop)
        if begin < end:
            start = want.start + begin - want.offset
            kept.append(Wanted(want.file, start, end - begin, want.destination, begin - first))
    return kept
