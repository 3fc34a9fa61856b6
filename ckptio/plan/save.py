"""Lay tensors out in buckets, and buckets in segments.

A bucket is a file; a segment is the part of it that one slab of the staging pool holds,
and so the unit that is copied, summed and written. Segments of one file are written by
several writers at once, so that even a single huge tensor uses all of them.

Pure, and a function of its arguments alone: the same leaves give the same plan on every
rank and in every process, for any order of dicts or hash seed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio.config import PAGE_NBYTES
from ckptio.format.bucket import StoredTensor, encode_header
from ckptio.format.manifest import Chunk, TensorEntry, encode_tensors
from ckptio.layout import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.config import CheckpointConfig
    from ckptio.shards import LeafSpec


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bucket that is copied, summed and written as one.

    Attributes:
        start: Where it starts in its file, in bytes; a multiple of the slab size.
        nbytes: Its size; the slab size but for the last of a file.
        header: Bytes of the bucket's header that lie in it, at its start.
        pieces: What it holds, in order and without holes behind `header`: offset in the
            segment, index of the leaf, offset in the leaf's row-major bytes, bytes.
    """

    start: int
    nbytes: int
    header: bytes
    pieces: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A file to write.

    Attributes:
        index: Its place among the buckets of its rank.
        nbytes: Its size.
        segments: Its parts, by start.
    """

    index: int
    nbytes: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Where every byte of a state goes.

    Attributes:
        buckets: Files to write, largest first.
        tensor_table: The manifest's tensors, encoded; file indices are bucket indices.
        num_tensors: Tensors in it.
    """

    buckets: tuple[Bucket, ...]
    tensor_table: bytes
    num_tensors: int

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(bucket.nbytes for bucket in self.buckets)


def plan_save(leaves: Sequence[LeafSpec], config: CheckpointConfig) -> SavePlan:
    """Plan the files of one rank.

    Args:
        leaves: Tensors to write, names distinct. Their order is that of the manifest.
        config: For the sizes of buckets and slabs.

    Returns:
        A plan whose buckets have about `config.bucket_nbytes` each and differ by little.

    Raises:
        FormatError: A bucket would have more tensors than a safetensors header holds.
    """
    chunks: list[Chunk | None] = [None] * len(leaves)
    buckets = []
    for index, members in enumerate(pack_buckets(leaves, config.bucket_nbytes)):
        members.sort(key=lambda i: _data_order(leaves[i]))
        stored = []
        starts = []
        start = 0
        for i in members:
            leaf = leaves[i]
            stored.append(StoredTensor(leaf.name, leaf.dtype, leaf.shape, start))
            starts.append(start)
            start += leaf.nbytes
        header = encode_header(stored, {"format": "pt"})
        for i, start_in_data in zip(members, starts, strict=True):
            chunks[i] = Chunk(index, len(header) + start_in_data)
        spans = [
            (len(header) + s, i, leaves[i].nbytes) for i, s in zip(members, starts, strict=True)
        ]
        nbytes = len(header) + start
        segments = _cut(header, spans, nbytes, config.slab_nbytes)
        buckets.append(Bucket(index, nbytes, tuple(segments)))
    table = [
        TensorEntry(leaf.name, leaf.dtype, leaf.shape, (chunk,))
        for leaf, chunk in zip(leaves, chunks, strict=True)
        if chunk is not None
    ]
    return SavePlan(tuple(buckets), encode_tensors(table), len(table))


def pack_buckets(leaves: Sequence[LeafSpec], bucket_nbytes: int) -> list[list[int]]:
    """Share leaves out among buckets of about `bucket_nbytes`, largest leaf first.

    Each goes to the bucket that has least (longest-processing-time-first; Graham, 1969),
    so that buckets differ by less than the largest leaf that is not alone in its bucket.

    Returns:
        Indices of leaves for each bucket, largest bucket first; none for no leaves.
    """
    sizes = [leaf.nbytes for leaf in leaves]
    order = sorted(range(len(leaves)), key=lambda i: (-sizes[i], leaves[i].name))
    alone = [i for i in order if sizes[i] >= bucket_nbytes]
    shared = order[len(alone) :]
    num_shared = -(-sum(sizes[i] for i in shared) // bucket_nbytes) or bool(shared)
    heap = [(0, k) for k in range(num_shared)]
    packed: list[list[int]] = [[] for _ in heap]
    for i in shared:
        load, k = heapq.heappop(heap)
        packed[k].append(i)
        heapq.heappush(heap, (load + sizes[i], k))
    packed += [[i] for i in alone]
    packed.sort(key=lambda members: (-sum(sizes[i] for i in members), leaves[members[0]].name))
    return packed


def _data_order(leaf: LeafSpec) -> tuple[bool, int, int, str]:
    """Whole pages first, then by falling element size: every tensor lies aligned."""
    nbytes = leaf.nbytes
    return (nbytes % PAGE_NBYTES != 0, -DTYPES[leaf.dtype].itemsize, -nbytes, leaf.name)


def _cut(
    header: bytes, spans: list[tuple[int, int, int]], nbytes: int, slab_nbytes: int
) -> list[Segment]:
    """Cut a file into segments.

    Args:
        header: The file's first bytes.
        spans: Start in the file, leaf and size of each tensor, in order, without holes.
        nbytes: Size of the file.
        slab_nbytes: Size of a segment.
    """
    pieces: list[list[tuple[int, int, int, int]]] = [[] for _ in range(-(-nbytes // slab_nbytes))]
    for start, leaf, size in spans:
        stop = start + size
        position = start
        while position < stop:
            index = position // slab_nbytes
            end = min(stop, (index + 1) * slab_nbytes)
            piece = (position - index * slab_nbytes, leaf, position - start, end - position)
            pieces[index].append(piece)
            position = end
    return [
        Segment(
            start,
            min(slab_nbytes, nbytes - start),
            header[start : start + slab_nbytes],
            tuple(pieces[index]),
        )
        for index, start in enumerate(range(0, nbytes, slab_nbytes))
    ]
