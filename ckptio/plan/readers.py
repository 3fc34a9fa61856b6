"""Share blocks out among ranks that may read them, near ones first, so that loads are even.

Blocks may be cut off anywhere, so this is a flow: from the blocks of each kind to the
ranks that want them. It starts with everything where it is nearest and moves blocks away
from ranks above the limit, along chains of ranks that want the same, until nobody is
above it. A set of ranks that cannot pass anything on to others shows that the limit is
too low: what they have can be read by nobody else, so that their mean is the limit then
(Hall's condition). The result is the smallest possible maximum, or the limit that leaves
everything as near as it can be, whichever is higher; give or take a block.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: The largest load, as a multiple of the mean, that is kept for the sake of nearness.
MAX_OVER_MEAN = 1.1
_MAX_MOVES = 100_000


class Kind(NamedTuple):
    """What blocks have in common that the same ranks may read, equally near.

    Attributes:
        wanting: Ranks that want them, in order.
        own: The rank that wrote their file, if it wants them and is where it was; or -1.
        near: Those of `wanting` on the host that wrote the file.
    """

    wanting: tuple[int, ...]
    own: int
    near: tuple[int, ...]

    def tier(self, rank: int) -> int:
        """Say how far they are from a rank: 0 for its own file, 1 for its host, 2 beyond."""
        return 0 if rank == self.own else 1 if rank in self.near else 2

    def nearest(self) -> tuple[int, ...]:
        """Give the ranks to which they are nearest."""
        return (self.own,) if self.own >= 0 else self.near or self.wanting


Shares = dict[Kind, dict[int, int]]
_Ways = dict[int, tuple[int, Kind] | None]


def limit_for(nbytes: int, num_ranks: int) -> int:
    """Give the bytes up to which a rank may read what is near, if ranks read `nbytes` in all."""
    return int(MAX_OVER_MEAN * nbytes / num_ranks)


def place_whole(kind: Kind, nbytes: int, loads: list[int], limit: int) -> int:
    """Choose the rank that reads something that is not cut, and add it to its load.

    Returns:
        The nearest rank that stays within the limit, or the one that has least.
    """
    rank = -1
    for ranks in (kind.nearest(), kind.near, kind.wanting):
        rank = min(ranks, key=lambda rank: (loads[rank], rank), default=-1)
        if rank >= 0 and loads[rank] + nbytes <= limit:
            break
    loads[rank] += nbytes
    return rank


def share_out(
    num_blocks: Mapping[Kind, int], loads: Sequence[int], limit: int, block_nbytes: int
) -> Shares:
    """Share blocks out among ranks.

    Args:
        num_blocks: Blocks of each kind.
        loads: Bytes that each rank reads already.
        limit: The load up to which nearness goes before evenness, in bytes.
        block_nbytes: Size of a block.

    Returns:
        Blocks of each kind for each rank.
    """
    flow = _Flow(loads, block_nbytes)
    for kind in sorted(num_blocks, key=lambda kind: (len(kind.nearest()), kind)):
        flow.fill(kind, num_blocks[kind])
    flow.settle(limit)
    return flow.shares


class _Flow:
    """Who reads how much of what, while it is being decided."""

    def __init__(self, loads: Sequence[int], block_nbytes: int) -> None:
        self.shares: Shares = {}
        self._loads = list(loads)
        self._block = block_nbytes
        # by tier: what is far goes away first
        self._kinds_of: list[tuple[dict[Kind, None], ...]] = [({}, {}, {}) for _ in loads]

    def fill(self, kind: Kind, num_blocks: int) -> None:
        """Give blocks to the ranks nearest to them, so that the lowest loads rise alike."""
        ranks = sorted(kind.nearest(), key=lambda rank: (self._loads[rank], rank))
        count = level = total = 0
        for count, rank in enumerate(ranks, start=1):
            total += self._loads[rank]
            level = (total + num_blocks * self._block) // count
            if count < len(ranks) and level <= self._loads[ranks[count]]:
                break
        left = num_blocks
        for place, rank in enumerate(ranks[:count], start=1):
            room = max(0, level - self._loads[rank])
            share = left if place == count else min(left, -(-room // self._block))
            self._add(kind, rank, share)
            left -= share

    def settle(self, limit: int) -> None:
        """Move blocks away from ranks above the limit, or above what is possible."""
        for rank, load in enumerate(self._loads):
            if load > limit:
                self._spread(rank, limit)
        stuck: set[int] = set()
        for _ in range(_MAX_MOVES):
            over = [r for r, load in enumerate(self._loads) if load > limit and r not in stuck]
            if not over:
                return
            source = max(over, key=lambda rank: (self._loads[rank], -rank))
            ways = self._reach(source)
            target = min(ways, key=lambda rank: (self._loads[rank], rank))
            if self._move(source, target, ways, limit):
                continue
            floor = -(-sum(self._loads[rank] for rank in ways) // len(ways))
            if floor > limit:
                limit = floor
            else:
                stuck.add(source)

    def _kinds(self, rank: int) -> Iterator[Kind]:
        """Give the kinds of which a rank reads blocks, those that are far first."""
        for tier in reversed(self._kinds_of[rank]):
            yield from tuple(tier)

    def _spread(self, source: int, limit: int) -> None:
        """Pass blocks on to ranks that want them and have room. The shortest chains, quickly."""
        block, loads = self._block, self._loads
        for kind in self._kinds(source):
            for ranks in (kind.near, kind.wanting):
                for target in sorted(ranks, key=lambda rank: (loads[rank], rank)):
                    count = min(
                        -(-(loads[source] - limit) // block),
                        (limit - loads[target]) // block,
                        self.shares[kind].get(source, 0),
                    )
                    if count <= 0:
                        break
                    self._add(kind, source, -count)
                    self._add(kind, target, count)
            if loads[source] <= limit:
                return

    def _reach(self, source: int) -> _Ways:
        """Find the ranks that `source` can pass blocks on to: from whom each gets what."""
        ways: _Ways = {source: None}
        seen: set[Kind] = set()
        queue = deque([source])
        while queue and len(ways) < len(self._loads):
            rank = queue.popleft()
            for kind in self._kinds(rank):
                if kind in seen:
                    continue
                seen.add(kind)
                for other in kind.near + kind.wanting:
                    if other not in ways:
                        ways[other] = (rank, kind)
                        queue.append(other)
        return ways

    def _move(self, source: int, target: int, ways: _Ways, limit: int) -> bool:
        """Pass blocks along the way from `source` to `target`; not if that evens nothing out."""
        block, loads = self._block, self._loads
        if loads[target] + block >= loads[source]:
            return False
        count = min(
            max(1, (limit - loads[target]) // block),
            -(-(loads[source] - limit) // block),
            # where everything is on few ranks, both meet in the middle at the most
            -(-(loads[source] - loads[target]) // (2 * block)),
        )
        steps = []
        rank = target
        while (way := ways[rank]) is not None:
            giver, kind = way
            steps.append((giver, rank, kind))
            count = min(count, self.shares[kind][giver])
            rank = giver
        for giver, taker, kind in steps:
            self._add(kind, giver, -count)
            self._add(kind, taker, count)
        return True

    def _add(self, kind: Kind, rank: int, count: int) -> None:
        if not count:
            return
        shares = self.shares.setdefault(kind, {})
        shares[rank] = shares.get(rank, 0) + count
        self._loads[rank] += count * self._block
        kinds = self._kinds_of[rank][kind.tier(rank)]
        if shares[rank]:
            kinds[kind] = None
        else:
            del shares[rank]
            del kinds[kind]
