"""Lay tensors out in buckets, and buckets in segments.

A bucket is a file; a segment is the part of it that one slab of the staging pool holds,
and so the unit that is copied, summed and written. Segments of one file are written by
several writers at once, so that even a single huge tensor uses all of them.

What is laid out are whole leaves, or, where many ranks save, the parts of them that this
rank writes (`plan.job` has decided which).

Pure, and a function of its arguments alone: the same leaves give the same plan on every
rank and in every process, for any order of dicts or hash seed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptio._gc import without_collection
from ckptio.config import PAGE_NBYTES
from ckptio.errors import PlanError
from ckptio.format.bucket import StoredTensor, encode_header, sharding_note
from ckptio.format.compose import encode_rows
from ckptio.layout import DTYPES
from ckptio.shards import LeafSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.config import CheckpointConfig
    from ckptio.shards import Part


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
        buckets: Files to write, those with most bytes of tensors first.
        places: Of each leaf, or of each part if there are parts: bucket, and start in its
            file.
        tensor_table: The manifest's tensors, encoded; file indices are bucket indices.
            Empty if there are parts: then it takes those of all ranks to make one.
        num_tensors: Tensors that have bytes here.
    """

    buckets: tuple[Bucket, ...]
    places: tuple[tuple[int, int], ...]
    tensor_table: bytes
    num_tensors: int

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(bucket.nbytes for bucket in self.buckets)


@without_collection
def plan_save(
    leaves: Sequence[LeafSpec],
    config: CheckpointConfig,
    parts: Sequence[Part] | None = None,
) -> SavePlan:
    """Plan the files of one rank.

    Args:
        leaves: Blocks of tensors that the rank holds. Without `parts` they are whole
            tensors, names distinct, and their order is that of the manifest.
        config: For the sizes of buckets and slabs.
        parts: What to write of them; all of them, and all of each, if not given.

    Returns:
        A plan with buckets of about `config.bucket_nbytes`; see `pack_buckets`. A leaf of that
            size or more has a bucket to itself.

    Raises:
        FormatError: A bucket would have more tensors than a safetensors header holds.
        PlanError: A leaf is a shard and there are no parts.
    """
    if parts is None:
        _check_whole(leaves)
        blocks, origins = leaves, [(i, 0) for i in range(len(leaves))]
    else:
        blocks = [_as_block(leaves[part.leaf], part) for part in parts]
        origins = [(part.leaf, part.start) for part in parts]
    sizes = [block.nbytes for block in blocks]
    places = [(0, 0)] * len(blocks)
    buckets = []
    notes: dict[str, str] = {}
    for index, members in enumerate(pack_buckets(blocks, sizes, config.bucket_nbytes)):
        members.sort(key=lambda i: _data_order(blocks[i], sizes[i]))
        if parts is None:
            names = [blocks[i].name for i in members]
        else:
            names, notes = _names_and_notes([blocks[i] for i in members])
        stored = []
        start = 0
        for name, i in zip(names, members, strict=True):
            stored.append(StoredTensor(name, blocks[i].dtype, blocks[i].shape, start))
            start += sizes[i]
        header = encode_header(stored, {"format": "pt", **notes})
        nbytes = len(header)
        spans = []
        for i in members:
            places[i] = (index, nbytes)
            spans.append((nbytes, *origins[i], sizes[i]))
            nbytes += sizes[i]
        segments = _cut(header, spans, nbytes, config.slab_nbytes)
        buckets.append(Bucket(index, nbytes, tuple(segments)))
    table = b""
    if parts is None:
        rows = zip(leaves, places, strict=True)
        table = encode_rows([(leaf.name, leaf.dtype, leaf.shape, [at]) for leaf, at in rows])
    num_tensors = len({block.name for block in blocks})
    return SavePlan(tuple(buckets), tuple(places), table, num_tensors)


def pack_buckets(
    leaves: Sequence[LeafSpec], sizes: Sequence[int], bucket_nbytes: int
) -> list[list[int]]:
    """Share leaves out among buckets of about `bucket_nbytes`, largest leaf first.

    Each goes to the bucket that has least (longest-processing-time-first; Graham, 1969),
    so that buckets differ by less than the largest leaf that is not alone in its bucket.

    Args:
        leaves: What to share out.
        sizes: The bytes of each.
        bucket_nbytes: Target size of a bucket, in bytes.

    Returns:
        Indices of leaves for each bucket, largest bucket first; none for no leaves.
    """
    ranking = [
        (-nbytes, leaf.name, leaf.global_offset) for nbytes, leaf in zip(sizes, leaves, strict=True)
    ]
    order = sorted(range(len(leaves)), key=ranking.__getitem__)
    alone = [i for i in order if sizes[i] >= bucket_nbytes]
    shared = order[len(alone) :]
    num_shared = -(-sum(sizes[i] for i in shared) // bucket_nbytes) or bool(shared)
    heap = [(0, k) for k in range(num_shared)]
    packed: list[list[int]] = [[] for _ in heap]
    for i in shared:
        load, k = heap[0]
        packed[k].append(i)
        heapq.heapreplace(heap, (load + sizes[i], k))
    packed += [[i] for i in alone]
    packed.sort(key=lambda members: (-sum(sizes[i] for i in members), *ranking[members[0]][1:]))
    return packed


def _data_order(leaf: LeafSpec, nbytes: int) -> tuple[Any, ...]:
    """Whole pages first, then by falling element size: every tensor lies aligned."""
    itemsize = DTYPES[leaf.dtype].itemsize
    return (nbytes % PAGE_NBYTES != 0, -itemsize, -nbytes, leaf.name, leaf.global_offset)


def _check_whole(leaves: Sequence[LeafSpec]) -> None:
    """Check that leaves are whole tensors.

    Raises:
        PlanError: One of them is a shard.
    """
    for leaf in leaves:
        if leaf.global_shape is not None and leaf.global_shape != leaf.shape:
            raise PlanError(
                f"{leaf.name!r} of shape {leaf.shape} is a shard of a tensor of shape"
                f" {leaf.global_shape}; save it from all ranks that hold shards of it, together"
            )


def _as_block(leaf: LeafSpec, part: Part) -> LeafSpec:
    """Describe a part as a block of its own."""
    shape = leaf.shape if leaf.global_shape is None else leaf.global_shape
    return LeafSpec(leaf.name, leaf.dtype, part.shape, shape, part.global_offset)


def _names_and_notes(blocks: Sequence[LeafSpec]) -> tuple[list[str], dict[str, str]]:
    """Name the parts in a bucket, and say in its metadata where they lie in their tensors.

    A part has the name of its tensor if it is the only one of it there. Of several each
    has its offset behind it, and so many `@` as make it a name nobody has.
    """
    counts = Counter(block.name for block in blocks)
    taken = set(counts)
    names = []
    for block in blocks:
        name = block.name
        if counts[name] > 1:
            at = "@" + ",".join(map(str, block.global_offset or ()))
            while (name := block.name + at) in taken:
                at = "@" + at
            taken.add(name)
        names.append(name)
    note = sharding_note(
        (
            name,
            block.dtype,
            block.global_offset or (),
            None if block.shape == block.global_shape else block.global_shape,
        )
        for name, block in zip(names, blocks, strict=True)
    )
    return names, note


def _cut(
    header: bytes, spans: list[tuple[int, int, int, int]], nbytes: int, slab_nbytes: int
) -> list[Segment]:
    """Cut a file into segments.

    Args:
        header: The file's first bytes.
        spans: Of each tensor, in order and without holes: start in the file, leaf, start in
            the leaf, size.
        nbytes: Size of the file.
        slab_nbytes: Size of a segment.
    """
    pieces: list[list[tuple[int, int, int, int]]] = [[] for _ in range(-(-nbytes // slab_nbytes))]
    for start, leaf, offset, size in spans:
        stop = start + size
        index, at = divmod(start, slab_nbytes)
        if 0 < size <= slab_nbytes - at:  # small tensors, thousands of them
            pieces[index].append((at, leaf, offset, size))
            continue
        position = start
        while position < stop:
            index = position // slab_nbytes
            end = min(stop, (index + 1) * slab_nbytes)
            at = offset + position - start
            pieces[index].append((position - index * slab_nbytes, leaf, at, end - position))
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
