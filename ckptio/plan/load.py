"""Decide which ranges of which files to read, and where their bytes land.

Ranges are whole checksum blocks, so that each is verified before any of it lands; sorted
and merged, so that a file is read from front to back; and cut into slabs, the unit that
is read, verified and landed. Besides what is wanted, a run of blocks has less than two blocks at
its ends, and gaps of less than a block or of at most `gap_nbytes`: those are read over.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckptio._gc import without_collection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckptio.config import CheckpointConfig
    from ckptio.format.manifest import Manifest


#: Rows that are alike: how many, and the bytes from one to the next in the block and in the
#: destination.
Rows = tuple[int, int, int]
#: Offset in the block, destination, offset in its row-major bytes, bytes, and `None`; or, of
#: the first of some rows, the same, and the rows.
Piece = tuple[int, int, int, int, Rows | None]
#: Where a block starts in the memory that holds it, and its pieces.
BlockPieces = tuple[int, tuple[Piece, ...]]


class Wanted(NamedTuple):
    """A byte range that a destination needs. A tuple, since thousands of them are sorted.

    Columns of a matrix are as many ranges as it has rows; they are one value here, and are
    planned and copied as one.

    Attributes:
        file: Index of the file in the manifest.
        start: First byte in the file.
        nbytes: Bytes wanted; not zero.
        destination: Index of the destination, whatever that is to the caller.
        offset: Where the range starts in the destination's row-major bytes.
        rows: Ranges that are alike, of which this is the first.
        step: Bytes from one to the next in the file; at least `nbytes`.
        stride: Bytes from one to the next in the destination.
    """

    file: int
    start: int
    nbytes: int
    destination: int
    offset: int
    rows: int = 1
    step: int = 0
    stride: int = 0

    @property
    def stop(self) -> int:
        """Byte behind the last row."""
        return self.start + (self.rows - 1) * self.step + self.nbytes

    def each(self) -> Iterator[Wanted]:
        """Give the rows one by one."""
        file, start, nbytes, destination, offset, rows, step, stride = self
        for row in range(rows):
            yield Wanted(file, start + row * step, nbytes, destination, offset + row * stride)


def dense(wanted: Iterable[Wanted], block_nbytes: int) -> Iterator[Wanted]:
    """Take rows apart that leave whole blocks out between them, so that the rest leave none."""
    for want in wanted:
        if want.rows > 1 and want.step - want.nbytes >= block_nbytes:
            yield from want.each()
        else:
            yield want


@dataclass(frozen=True, slots=True)
class ReadSegment:
    """A range that is read as one, and verified and landed block by block.

    Attributes:
        file: Index of the file in the manifest.
        start: First byte in the file; a multiple of the block.
        nbytes: Bytes to read, whole blocks but at the end of the file.
        checksums: crc32c of each block; `None` where it is not known.
        pieces: For each block, where its bytes land.
    """

    file: int
    start: int
    nbytes: int
    checksums: tuple[int | None, ...]
    pieces: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to read.

    Attributes:
        segments: Ranges, by file and start.
    """

    segments: tuple[ReadSegment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def files(self) -> tuple[int, ...]:
        """Indices of the files to read, in order."""
        return tuple(sorted({segment.file for segment in self.segments}))


@without_collection
def plan_load(
    manifest: Manifest,
    wanted: Iterable[Wanted],
    config: CheckpointConfig,
    *,
    gap_nbytes: int = 0,
    whole_files: bool = False,
) -> LoadPlan:
    """Plan the reads that bring `wanted`.

    Args:
        manifest: A parsed manifest; it may have another block size than `config`.
        wanted: Ranges, in any order; several may want the same bytes.
        config: For the size of a slab.
        gap_nbytes: Bytes nobody wants that are read over rather than skipped.
        whole_files: Read (and so verify) every block of every file, wanted or not.

    Returns:
        A plan that reads each block at most once.
    """
    block = manifest.block_nbytes
    limit = max(block, config.slab_nbytes // block * block)
    by_file: dict[int, list[Wanted]] = {}
    if whole_files:
        by_file = {file: [] for file in range(len(manifest.files))}
    in_order = sorted(dense(wanted, block))
    for file, group in itertools.groupby(in_order, key=operator.itemgetter(0)):
        by_file[file] = list(group)
    segments: list[ReadSegment] = []
    for file, members in by_file.items():
        entry = manifest.files[file]
        checksums = entry.expected(block)
        whole = [(0, -(-entry.nbytes // block), members)]
        for first, last, inside in whole if whole_files else _merge(members, block, gap_nbytes):
            stop = min(last * block, entry.nbytes)
            landings = _landings(inside, block)
            segments += [
                _segment(file, begin, min(limit, stop - begin), checksums, landings, block)
                for begin in range(first * block, stop, limit)
            ]
    return LoadPlan(tuple(segments))


def _merge(
    wanted: Sequence[Wanted], block: int, gap_nbytes: int
) -> Iterator[tuple[int, int, Sequence[Wanted]]]:
    """Merge ranges of one file, one at least, sorted by start, into runs of blocks.

    Yields:
        First block, end block (exclusive), and the ranges inside.
    """
    gap = gap_nbytes // block
    begin = 0
    first = wanted[0].start // block
    last = first
    for i, want in enumerate(wanted):
        if want.start // block > last + gap:
            yield first, last, wanted[begin:i]
            begin = i
            first = want.start // block
        last = max(last, -(-want.stop // block))
    yield first, last, wanted[begin:]


def plan_spans(
    manifest: Manifest, wanted: Iterable[Wanted], spans: Iterable[tuple[int, int, int]]
) -> list[ReadSegment]:
    """Say what lands from given ranges of files, whoever reads them.

    Args:
        manifest: A parsed manifest.
        wanted: Ranges, in any order, that lie in `spans`.
        spans: File, start and size of each range: whole blocks but at the end of the file,
            each block at most once, in any order.

    Returns:
        A segment for each of `spans`, in their order.
    """
    block = manifest.block_nbytes
    by_file: dict[int, list[Wanted]] = {}
    for want in sorted(wanted):
        by_file.setdefault(want.file, []).append(want)
    landings = {file: _landings(members, block) for file, members in by_file.items()}
    checksums: dict[int, tuple[int | None, ...]] = {}
    segments = []
    for file, start, nbytes in spans:
        if file not in checksums:
            checksums[file] = manifest.files[file].expected(block)
        landing = landings.get(file, {})
        segments.append(_segment(file, start, nbytes, checksums[file], landing, block))
    return segments


def _landings(wanted: Iterable[Wanted], block: int) -> dict[int, list[Piece]]:
    """Cut ranges of one file at its blocks, and say what lands from each that has any."""
    landings: dict[int, list[Piece]] = {}
    for want in wanted:
        _, start, nbytes, destination, offset, rows, _, _ = want
        number, at = divmod(start, block)
        if rows > 1:
            _land_rows(want, block, landings)
        elif at + nbytes > block:
            _land(want, block, landings)
        elif number in landings:  # small tensors, thousands of them
            landings[number].append((at, destination, offset, nbytes, None))
        else:
            landings[number] = [(at, destination, offset, nbytes, None)]
    return landings


def _land(want: Wanted, block: int, landings: dict[int, list[Piece]]) -> None:
    """Cut a range at blocks."""
    file_start, nbytes, destination, offset = want[1:5]
    position, end = file_start, file_start + nbytes
    while position < end:
        number = position // block
        base = number * block
        upto = min(end, base + block)
        at = offset + position - file_start
        piece = (position - base, destination, at, upto - position, None)
        landings.setdefault(number, []).append(piece)
        position = upto


def _land_rows(want: Wanted, block: int, landings: dict[int, list[Piece]]) -> None:
    """Put as many rows together as lie in a block; a row that its end cuts goes by itself."""
    file, start, nbytes, destination, offset, rows, step, stride = want
    row = 0
    while row < rows:
        position = start + row * step
        at = offset + row * stride
        number = position // block
        left = (number + 1) * block - position
        count = min((left - nbytes) // step + 1, rows - row)  # a step is a row or more: 0, not less
        if count:
            many = (count, step, stride) if count > 1 else None
            piece = (position - number * block, destination, at, nbytes, many)
            landings.setdefault(number, []).append(piece)
            row += count
        else:
            _land(Wanted(file, position, nbytes, destination, at), block, landings)
            row += 1


def _segment(
    file: int,
    start: int,
    nbytes: int,
    checksums: Sequence[int | None],
    landings: Mapping[int, Sequence[Piece]],
    block: int,
) -> ReadSegment:
    """Make a segment of whole blocks, with what lands from each."""
    numbers = range(start // block, -(-(start + nbytes) // block))
    return ReadSegment(
        file,
        start,
        nbytes,
        tuple(checksums[numbers.start : numbers.stop]),
        tuple(tuple(landings.get(number, ())) for number in numbers),
    )
