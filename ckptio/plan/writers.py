"""Share bytes out among ranks, so that each writes about as much as the others.

What only one rank holds is its load. What several hold (replicas) is a pool: any of them
may write it, and a large item may be cut. First the pools are poured over their ranks as
if they were water: pool by pool, each to the level at which its ranks are equal, again
and again until nothing moves. Each pass lowers the sum of squares of the loads, which is
convex and has no constraint across pools, so that the passes end at its only minimum,
where the highest load is the lowest there can be. Then items are dealt to ranks by what
each still lacks of its water, largest item first, and cut only where a rank would
otherwise get too much.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

from ckptio.config import KiB, MiB

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

#: What a rank may take above its share rather than have an item cut, of the mean load.
_SLACK = 0.04
#: Where ranks write little, parts may be smaller: this share of the mean load, and this many
#: bytes at the least. Smaller parts would balance what takes no time.
_PART_SHARE = 1 / 16
LEAST_PART_NBYTES = 64 * KiB
#: What the lowest rank that holds it takes of the smallest items, in all pools: the buffers of
#: large networks, beside all that is as small; about 10 ms of writing.
_SMALL_NBYTES = 16 * MiB
#: Passes over all pools, and visits of ranks in them, after which pouring ends.
_MAX_PASSES = 50
_MAX_VISITS = 1_000_000
#: Changes of a level that are none, of the mean load.
_STILL = 0.001


class Item(NamedTuple):
    """Bytes of one box.

    Attributes:
        nbytes: How many.
        steps: Where it may be cut: at multiples of the last of these, and better at
            multiples of those before it, which are larger. None: never.
    """

    nbytes: int
    steps: tuple[int, ...] = ()


class Pool(NamedTuple):
    """Items that the same ranks hold.

    Attributes:
        ranks: Those ranks, rising; two or more.
        items: The items, in an order that does not depend on how they were found.
    """

    ranks: tuple[int, ...]
    items: list[Item]


class Share(NamedTuple):
    """Bytes `[start, stop)` of an item, which a rank writes."""

    rank: int
    start: int
    stop: int


def share_out(
    loads: Sequence[int], pools: Sequence[Pool], *, turns: Sequence[int], min_part_nbytes: int
) -> list[list[list[Share]]]:
    """Decide which rank writes which bytes of each item.

    Args:
        loads: Bytes that each rank writes in any case.
        pools: What is left to share out; each set of ranks at most once.
        turns: For each rank, its place among those that are equal otherwise.
        min_part_nbytes: An item is cut into parts of this size or more, about, unless ranks
            write so little that it takes smaller ones to make them equal.

    Returns:
        Shares of each item of each pool, by start; they tile the item.
    """
    order = sorted(range(len(pools)), key=lambda k: (len(pools[k].ranks), pools[k].ranks))
    quotas = _pour_all(loads, [pools[k] for k in order])
    total = sum(loads) + sum(item.nbytes for pool in pools for item in pool.items)
    mean = total / max(1, len(loads))
    least = min(min_part_nbytes, max(LEAST_PART_NBYTES, int(_PART_SHARE * mean)))
    lacks = [0.0] * len(loads)  # what a rank got less than its quota in the pools so far
    taken = [0.0] * len(loads)  # of what goes to the lowest rank that holds it
    shares: list[list[list[Share]]] = [[] for _ in pools]
    for k, quota in zip(order, quotas, strict=True):
        ranks = pools[k].ranks
        heap = [
            (-(lacks[rank] + share), turns[rank], rank)
            for rank, share in zip(ranks, quota, strict=True)
        ]
        budget = max(_SMALL_NBYTES, _SLACK * mean)
        small = _take_small(pools[k].items, budget - taken[ranks[0]])
        taken[ranks[0]] += sum(small.values())
        excess, turn, rank = heap[0]
        heap[0] = (excess + sum(small.values()), turn, rank)
        heapq.heapify(heap)
        shares[k] = _deal(pools[k].items, heap, _SLACK * mean, least, small, ranks[0])
        for lack, _, rank in heap:
            lacks[rank] = -lack
    return shares


def _pour_all(loads: Sequence[int], pools: Sequence[Pool]) -> list[list[float]]:
    """Give what each rank of each pool should write of it, if bytes were water."""
    levels = [float(load) for load in loads]
    amounts = [sum(item.nbytes for item in pool.items) for pool in pools]
    quotas = [[0.0] * len(pool.ranks) for pool in pools]
    still = _STILL * (sum(loads) + sum(amounts)) / max(1, len(loads))
    visits = sum(len(pool.ranks) for pool in pools)
    for _ in range(max(2, min(_MAX_PASSES, _MAX_VISITS // max(1, visits)))):
        moved = 0.0
        for (ranks, _items), amount, quota in zip(pools, amounts, quotas, strict=True):
            others = [levels[rank] - share for rank, share in zip(ranks, quota, strict=True)]
            level = _level(others, amount)
            for i, (rank, other) in enumerate(zip(ranks, others, strict=True)):
                share = max(0.0, level - other)
                moved = max(moved, abs(share - quota[i]))
                quota[i] = share
                levels[rank] = other + share
        if moved <= still:
            break
    return quotas


def _level(levels: Sequence[float], amount: float) -> float:
    """Say how high water stands that is poured over columns of these heights."""
    filled = amount
    ordered = sorted(levels)
    for count, level in enumerate(ordered):
        if count and filled <= level * count:
            return filled / count
        filled += level
    return filled / len(ordered)


def _take_small(items: Sequence[Item], budget: float) -> dict[int, int]:
    """Choose the smallest items, of so many bytes in all; gives their sizes by number."""
    small: dict[int, int] = {}
    for k in sorted(range(len(items)), key=lambda k: items[k].nbytes):
        nbytes = items[k].nbytes
        budget -= nbytes
        if nbytes > LEAST_PART_NBYTES or budget < 0:
            break
        small[k] = nbytes
    return small


def _deal(
    items: Sequence[Item],
    heap: list[tuple[float, int, int]],
    slack: float,
    min_part_nbytes: int,
    small: Container[int],
    lowest: int,
) -> list[list[Share]]:
    """Deal the items of a pool to its ranks.

    Args:
        items: The items.
        heap: For each rank, how much it has above its quota (mostly below zero), its turn
            and the rank; kept up to date.
        slack: Bytes a rank may have above its quota before an item is cut.
        min_part_nbytes: Least size of a part.
        small: Numbers of the items that go to the lowest rank.
        lowest: That rank; the heap has what it gets so.
    """
    shares: list[list[Share]] = [[] for _ in items]
    for k in sorted(range(len(items)), key=lambda k: -items[k].nbytes):
        nbytes, steps = items[k]
        start = 0
        if k in small and nbytes:
            shares[k].append(Share(lowest, 0, nbytes))
            continue
        while start < nbytes:
            excess, turn, rank = heap[0]
            stop = nbytes
            left = nbytes - start
            if steps and left > slack - excess and left >= 2 * min_part_nbytes:
                stop = _cut(nbytes, start + max(-excess, min_part_nbytes), steps, min_part_nbytes)
                stop = stop if stop > start else nbytes
            heapq.heapreplace(heap, (excess + stop - start, turn, rank))
            if shares[k] and shares[k][-1].rank == rank:
                start = shares[k].pop().start
            shares[k].append(Share(rank, start, stop))
            start = stop
    return shares


def _cut(nbytes: int, position: float, steps: tuple[int, ...], min_part_nbytes: int) -> int:
    """Find the best place near `position` to cut an item."""
    stop = int(min(position, nbytes - min_part_nbytes))
    for step in steps[:-1]:  # rows of rows: cut between them if that is near
        before = stop % step
        if before < min_part_nbytes:
            stop -= before
        elif step - before < min_part_nbytes:
            stop += step - before
    return stop - stop % steps[-1]
