"""Compare copies of chunks with each other while a checkpoint is verified. Without torch.

Copies lie at different places of their files, so that checksums of blocks say nothing of
them: each copy may be just what its rank wrote, and still not what another wrote. So each
chunk is cut, once for each of its copies, where a block ends on either side. Such a piece
lies in one block of each file. It is digested when that block has been read and verified,
in whatever order and on whatever thread blocks come, and nothing is read twice but what
turns out to differ, to say where.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, NamedTuple

from ckptio._aio import run_unless_cancelled
from ckptio.engine.sources import opened
from ckptio.errors import CorruptionError
from ckptio.plan.load import Wanted
from ckptio.storage.streams import AwaitedSource

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.landing import Reading
    from ckptio.format.manifest import Manifest
    from ckptio.plan.load import BlockPieces
    from ckptio.staging.cuda import PendingCopies
    from ckptio.staging.pool import Slab
    from ckptio.storage.streams import Memory, Source

_DIGEST_NBYTES = 16


class Pair(NamedTuple):
    """Two copies of a chunk.

    Attributes:
        name: Name of the tensor.
        one: File and start of the first of all.
        other: File and start of another.
        nbytes: Size of both.
        pieces: Where each piece of it starts, and its end.
        first: Number of its first piece among all.
    """

    name: str
    one: tuple[int, int]
    other: tuple[int, int]
    nbytes: int
    pieces: tuple[int, ...]
    first: int


class CopyDigests:
    """Takes verified blocks, in place of tensors, and digests what has copies.

    Args:
        manifest: The checkpoint.
        files: Files that are read; a copy in another is not compared.

    Attributes:
        pairs: What is compared, in the order of tensors.
        wanted: Where it lies; a piece of the first copy has an even destination, the same
            piece of the other the odd one behind it.
    """

    def __init__(self, manifest: Manifest, files: Collection[int]) -> None:
        self.pairs: list[Pair] = []
        self.wanted: list[Wanted] = []
        count = 0
        for tensor in manifest.tensors:
            for chunk in tensor.chunks:
                if not chunk.copies or not (nbytes := tensor.chunk_nbytes(chunk)):
                    continue
                places = [p for p in ((chunk.file, chunk.start), *chunk.copies) if p[0] in files]
                for other in places[1:]:
                    edges = _edges(places[0][1], other[1], nbytes, manifest.block_nbytes)
                    self.pairs.append(Pair(tensor.name, places[0], other, nbytes, edges, count))
                    count += len(edges) - 1
                    self._want(self.pairs[-1])
        self._digests: list[bytes | None] = [None] * (2 * count)

    def _want(self, pair: Pair) -> None:
        for number, (first, stop) in enumerate(itertools.pairwise(pair.pieces)):
            for side, (file, start) in enumerate((pair.one, pair.other)):
                destination = 2 * (pair.first + number) + side
                self.wanted.append(Wanted(file, start + first, stop - first, destination, 0))

    @property
    def is_async(self) -> bool:
        """No device reads from the slab."""
        return False

    def scatter(
        self, blocks: Sequence[BlockPieces], memory: Memory, pending: list[PendingCopies]
    ) -> None:
        """Digest the pieces of verified blocks. Blocks; thread-safe.

        Args:
            blocks: Where each starts in the memory, and its pieces.
            memory: Holds the blocks.
            pending: Takes nothing here.
        """
        del pending
        for start, pieces in blocks:
            for position, destination, _, nbytes, rows in pieces:
                assert rows is None  # noqa: S101  # nothing of `wanted` has several
                begin = start + position
                with memory.view[begin : begin + nbytes] as data:
                    digest = hashlib.blake2b(data, digest_size=_DIGEST_NBYTES)
                self._digests[destination] = digest.digest()

    def differences(self) -> list[tuple[Pair, int, int]]:
        """Give each pair that differs, with the range of its first piece that does.

        What lies in a damaged block has no digest, and is not compared.
        """
        found = []
        for pair in self.pairs:
            for number in range(len(pair.pieces) - 1):
                place = 2 * (pair.first + number)
                one, other = self._digests[place : place + 2]
                if one is not None and other is not None and one != other:
                    found.append((pair, pair.pieces[number], pair.pieces[number + 1]))
                    break
        return found


async def report_differences(
    digests: CopyDigests, reading: Reading, context: EngineContext
) -> None:
    """Report every copy that differs from the first, with the first byte that does.

    Raises:
        CheckpointChangedError: A file went away meanwhile.
        StorageError: It cannot be read.
    """
    files = reading.manifest.files
    for pair, first, stop in digests.differences():
        sides = [
            await _read(reading, file, start + first, stop - first, context)
            for file, start in (pair.one, pair.other)
        ]
        at = first + _first_difference(*sides)
        reading.damaged(
            CorruptionError(
                f"other bytes than in the copy at byte {pair.one[1] + at} of"
                f" {files[pair.one[0]].name!r}",
                path=reading.storage.path,
                file=files[pair.other[0]].name,
                start=pair.other[1] + at,
                stop=pair.other[1] + pair.nbytes,
                fqns=(pair.name,),
            )
        )


def _first_difference(one: bytes, other: bytes) -> int:
    """Give the first place where two unequal texts of one length differ."""
    low, high = 0, len(one)
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


async def _read(
    reading: Reading, file: int, start: int, nbytes: int, context: EngineContext
) -> bytes:
    """Read a range of one block, as it is."""
    block, entry = reading.manifest.block_nbytes, reading.manifest.files[file]
    base = start // block * block

    length = min(block, entry.nbytes - base)

    def fetch(slab: Slab, source: Source) -> None:
        with slab.view[:block] as room:
            source.pread_into(base, room, length)

    async with (
        context.files,
        opened(reading, entry, context) as source,
        context.pool.lease() as slab,
    ):
        if isinstance(source, AwaitedSource):
            with slab.view[:length] as room:
                await source.read_into(base, room)
        else:
            await run_unless_cancelled(context.readers, fetch, slab, source)
        return bytes(slab.view[start - base : start - base + nbytes])


def _edges(one: int, other: int, nbytes: int, block: int) -> tuple[int, ...]:
    """Cut `nbytes` bytes that start at `one` and at `other` where a block ends in either."""
    edges = {0, nbytes}
    for start in (one, other):
        edges.update(range(-start % block, nbytes, block))
    return tuple(sorted(edges))
