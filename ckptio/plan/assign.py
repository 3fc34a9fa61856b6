"""Give every box of a job's tensors to the rank, or the ranks, that write it.

Most boxes have one holder, and all tensors that are cut alike have the same ones: for
those a plan is a few appends. Boxes with several holders go through `plan.writers`, or,
as local replicas, to each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ckptio.errors import PlanError
from ckptio.layout import DTYPES, boxes_of_range, numel, row_major_strides
from ckptio.plan.writers import LEAST_PART_NBYTES, Item, Pool, Share, share_out
from ckptio.shards import Part
from ckptio.tiling import Region  # msgspec looks it up when it is asked to decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptio.plan.coverage import Parties, Row, Tiles
    from ckptio.shards import LeafSpec


#: A part that is not its whole block: index among the parts of its rank, first byte in the
#: block, shape, and first index in the tensor.
Cut = tuple[int, int, tuple[int, ...], tuple[int, ...]]
#: Who writes what of the blocks of a tensor that several ranks hold.
Pins = dict[Region, list[Share]]


class Assignment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one rank writes, in a form that travels: the rank itself knows its blocks.

    Attributes:
        leaves: The block that each part is, or is of.
        cuts: Parts that are not their whole block.
    """

    leaves: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Part], specs: Sequence[LeafSpec]) -> Assignment:
        """Write parts down; equal ones alike, so that equal plans have one name.

        Args:
            parts: What the rank writes.
            specs: The blocks of the rank.
        """
        cuts = [(i, *part[1:]) for i, part in enumerate(parts) if part != _whole(part.leaf, specs)]
        return cls(tuple([part.leaf for part in parts]), tuple(cuts))

    def parts(self, specs: Sequence[LeafSpec]) -> tuple[Part, ...]:
        """Give the parts.

        Args:
            specs: The blocks of the rank, as they were planned with.

        Raises:
            PlanError: There is no such block.
        """
        if any(not 0 <= leaf < len(specs) for leaf in self.leaves):
            raise PlanError(f"a plan has blocks that a rank with {len(specs)} blocks does not have")
        parts = [_whole(leaf, specs) for leaf in self.leaves]
        for index, start, shape, offset in self.cuts:
            parts[index] = Part(self.leaves[index], start, shape, offset)
        return tuple(parts)


class PlannedTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor of the checkpoint.

    Attributes:
        name: Its fully qualified name.
        dtype: torch's name of its element type.
        shape: Its global shape.
        boxes: Boxes that fill it: offset and shape of each. Empty if it has no elements.
        ranks: For each box the rank that writes it.
        parts: For each box its index among the parts of that rank.
        copies: For each box, who else writes it: rank and index. Empty if there are none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Region, ...]
    ranks: tuple[int, ...]
    parts: tuple[int, ...]
    copies: tuple[tuple[tuple[int, int], ...], ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        boxes: Sequence[Region],
        holders: Sequence[Sequence[tuple[int, int]]],
    ) -> PlannedTensor:
        """Make one of boxes and, for each, who writes it: rank and index, the main one first."""
        mains = [held[0] for held in holders]
        copies = tuple([tuple(held[1:]) for held in holders])
        return cls(
            name,
            dtype,
            shape,
            tuple(boxes),
            tuple([rank for rank, _ in mains]),
            tuple([part for _, part in mains]),
            copies if any(copies) else (),
        )

    @property
    def holders(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each box all that write it: rank, and index; the main one first."""
        copies = self.copies or ((),) * len(self.boxes)
        mains = zip(self.ranks, self.parts, strict=True)
        return tuple((main, *more) for main, more in zip(mains, copies, strict=True))


class Pattern:
    """What is the same for all tensors with equal blocks on the same ranks.

    Attributes:
        tiles: How they are cut.
        num_tensors: Tensors so far.
        nbytes: Bytes of each box.
        holders: Ranks that hold each box, rising.
        only: The one rank that holds each box, if that is so for every box.
        blocks: The first block that is each box, as a place in the row.
        pools: The pool of each box that is shared out, and -1 for others.
        items: What each box is in its pool.
    """

    __slots__ = ("blocks", "holders", "items", "nbytes", "num_tensors", "only", "pools", "tiles")

    def __init__(
        self,
        tiles: Tiles,
        nbytes: tuple[int, ...],
        holders: list[Sequence[int]],
        pools: list[int],
        items: list[Item],
    ) -> None:
        self.tiles = tiles
        self.blocks = [member[0] for member in tiles.members]
        self.num_tensors = 0
        self.nbytes = nbytes
        self.holders = holders
        self.pools = pools
        self.items = items
        ranks = tuple([held[0] for held in holders])
        alone = all(len(held) == 1 for held in holders)
        self.only = ranks if alone and len(set(ranks)) == len(ranks) else None


class Assigner:
    """Assigns boxes to ranks: first all tensors are counted, then all are assigned.

    Attributes:
        loads: Bytes that each rank writes.
    """

    def __init__(
        self,
        parties: Parties,
        turns: Sequence[int],
        *,
        local_nbytes: int,
        min_part_nbytes: int,
        pins: Mapping[str, Pins],
    ) -> None:
        """Start with nothing to write.

        Args:
            parties: Which ranks hold the same blocks.
            turns: For each rank, its place among those that are equal otherwise.
            local_nbytes: Boxes up to this size are written by each that holds them.
            min_part_nbytes: See `share_out`.
            pins: What is not shared out, by name.
        """
        self.loads = [0] * len(turns)
        self._parties = parties
        self._turns = turns
        self._local_nbytes = local_nbytes
        self._min_part_nbytes = min_part_nbytes
        self._pins = pins
        self._patterns: list[Pattern] = []
        self._pools: list[Pool] = []
        self._pool_of: dict[tuple[int, ...], int] = {}
        self._shares: list[Iterator[list[Share]]] = []
        self._main_nbytes = [0] * len(turns)
        self._leaves: list[list[int]] = [[] for _ in turns]
        self._cuts: list[list[Cut]] = [[] for _ in turns]

    def pattern(self, row: Row, tiles: Tiles) -> Pattern:
        """Find out what all tensors have in common that are cut like this one."""
        itemsize = DTYPES[tiles.dtype].itemsize
        holders: list[Sequence[int]] = []
        pools: list[int] = []
        items: list[Item] = []
        for (_, shape), member in zip(tiles.boxes, tiles.members, strict=True):
            nbytes = numel(shape) * itemsize
            ranks: Sequence[int] = self._parties.ranks[row.parties[member[0]]]
            pool = -1
            if len(member) > 1 or len(ranks) > 1:
                pool = self._pool(tuple(sorted([row.parties[k] for k in member])))
                ranks = self._pools[pool].ranks
            holders.append(ranks)
            pools.append(-1 if nbytes <= self._local_nbytes else pool)
            steps: tuple[int, ...] = ()
            if pools[-1] >= 0 and tiles.is_grid:
                steps = _steps(shape, itemsize, min(self._min_part_nbytes, LEAST_PART_NBYTES))
            items.append(Item(nbytes, steps))
        pattern = Pattern(tiles, tuple([item.nbytes for item in items]), holders, pools, items)
        self._patterns.append(pattern)
        return pattern

    def count(self, pattern: Pattern, name: str) -> None:
        """Count one tensor."""
        pattern.num_tensors += 1
        if pattern.only:
            return
        pins = self._pins.get(name, {})
        for pool, item, box in zip(pattern.pools, pattern.items, pattern.tiles.boxes, strict=True):
            if pool < 0:
                continue
            if box in pins:
                for rank, start, stop in pins[box]:
                    self.loads[rank] += stop - start
            else:
                self._pools[pool].items.append(item)

    def share_out(self) -> None:
        """Decide who writes what several ranks hold, when all tensors are counted."""
        for pattern in self._patterns:
            for nbytes, ranks, pool in zip(
                pattern.nbytes, pattern.holders, pattern.pools, strict=True
            ):
                if pool < 0:
                    for rank in ranks:
                        self.loads[rank] += nbytes * pattern.num_tensors
        shares = share_out(
            self.loads, self._pools, turns=self._turns, min_part_nbytes=self._min_part_nbytes
        )
        for pooled in shares:
            for item in pooled:
                for rank, start, stop in item:
                    self.loads[rank] += stop - start
        self._shares = [iter(pooled) for pooled in shares]

    def assign(self, row: Row, pattern: Pattern) -> PlannedTensor:
        """Give the boxes of a tensor to ranks; tensors in the order of `count`."""
        tiles = pattern.tiles
        if pattern.only:
            lists = [self._leaves[rank] for rank in pattern.only]
            parts = tuple(map(len, lists))
            for k, leaves in zip(pattern.blocks, lists, strict=True):
                leaves.append(row.leaves[k])
            return PlannedTensor(
                row.name, tiles.dtype, tiles.shape, tiles.boxes, pattern.only, parts
            )
        pins = self._pins.get(row.name, {})
        boxes: list[Region] = []
        holders: list[Sequence[tuple[int, int]]] = []
        for index, pool in enumerate(pattern.pools):
            if pool < 0:
                boxes.append(tiles.boxes[index])
                holders.append(self._write_all(row, pattern, index))
                continue
            shares = pins.get(tiles.boxes[index]) or next(self._shares[pool])
            if len(shares) == 1:
                boxes.append(tiles.boxes[index])
                holders.append((self._write(row, tiles.members[index], shares[0][0]),))
                continue
            for box, main in self._write_cuts(row, pattern, index, shares):
                boxes.append(box)
                holders.append((main,))
        return PlannedTensor.of(row.name, tiles.dtype, tiles.shape, boxes, holders)

    def assignments(self) -> tuple[Assignment, ...]:
        """Give what each rank writes."""
        return tuple(
            Assignment(tuple(leaves), tuple(cuts))
            for leaves, cuts in zip(self._leaves, self._cuts, strict=True)
        )

    def _pool(self, parties: tuple[int, ...]) -> int:
        """Give the index of the pool of what these parties hold together."""
        index = self._pool_of.setdefault(parties, len(self._pools))
        if index == len(self._pools):
            ranks = sorted(rank for party in parties for rank in self._parties.ranks[party])
            self._pools.append(Pool(tuple(ranks), []))
        return index

    def _write(self, row: Row, member: Sequence[int], rank: int) -> tuple[int, int]:
        """Have a rank write one of its blocks, and say which of its parts that is."""
        party = self._parties.party_of[rank]
        leaves = self._leaves[rank]
        for k in member:
            if row.parties[k] == party:
                leaves.append(row.leaves[k])
        return rank, len(leaves) - 1

    def _write_all(self, row: Row, pattern: Pattern, index: int) -> list[tuple[int, int]]:
        """Have all ranks write a box that hold it; the main one is who has least of those."""
        ranks, member = pattern.holders[index], pattern.tiles.members[index]
        main = min(ranks, key=lambda rank: (self._main_nbytes[rank], self._turns[rank]))
        self._main_nbytes[main] += pattern.nbytes[index]
        order = (main, *(rank for rank in ranks if rank != main))
        return [self._write(row, member, rank) for rank in order]

    def _write_cuts(
        self, row: Row, pattern: Pattern, index: int, shares: Sequence[Share]
    ) -> Iterator[tuple[Region, tuple[int, int]]]:
        """Have several ranks write a box that is cut between them."""
        (first, shape), member = pattern.tiles.boxes[index], pattern.tiles.members[index]
        itemsize = DTYPES[pattern.tiles.dtype].itemsize
        for rank, start, stop in shares:
            at = start
            for cut in boxes_of_range(shape, start // itemsize, stop // itemsize):
                holder = self._write(row, member, rank)
                offset = tuple(map(int.__add__, first, cut.offset))
                self._cuts[rank].append((holder[1], at, cut.shape, offset))
                yield (offset, cut.shape), holder
                at += numel(cut.shape) * itemsize


def _steps(shape: tuple[int, ...], itemsize: int, min_part_nbytes: int) -> tuple[int, ...]:
    """Say where a box may be cut: between rows, and inside of them where they are large.

    Returns:
        Bytes of rows, of rows of rows and so on, of which only the last may be smaller
        than a part; none if the box is too small to be cut.
    """
    steps: list[int] = []
    if numel(shape) * itemsize >= 2 * min_part_nbytes:
        for extent, stride in zip(shape, row_major_strides(shape), strict=True):
            if extent > 1:
                steps.append(stride * itemsize)
                if steps[-1] <= min_part_nbytes:
                    break
    return tuple(steps)


def offset_of(spec: LeafSpec) -> tuple[int, ...]:
    """Give the first index of a block in its tensor."""
    return (0,) * len(spec.shape) if spec.global_offset is None else spec.global_offset


def _whole(leaf: int, specs: Sequence[LeafSpec]) -> Part:
    """Give the part that is all of a block."""
    return Part(leaf, 0, specs[leaf].shape, offset_of(specs[leaf]))
