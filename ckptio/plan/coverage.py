"""Whether the blocks of all ranks are tensors: agreed on, whole, and nothing twice.

Ranks mostly hold the same names in the same order, and often equal lists altogether
(replicas); tensors of one shape are mostly cut in one way. So each block but for its name
becomes a number, equal blocks the same one. Ranks with equal numbers are one party,
parties with equal names are lined up, and a tensor is a row of numbers across them. What
such a row says is found out once, however many tensors have it.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from ckptio._texts import name_ranks
from ckptio.layout import DTYPES
from ckptio.tiling import Region, find_gap, find_overlap, is_grid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptio.shards import LeafSpec

Shape = tuple[int, ...]
#: A block without its name: the rest of a `LeafSpec`.
Form = tuple[str, Shape, Shape | None, Shape | None, int | None]


class Row(NamedTuple):
    """The blocks of one tensor over all ranks.

    Attributes:
        name: Name of the tensor.
        parties: Which ranks hold each block, as an index of `Parties.ranks`.
        forms: What each block is, as an index of `Parties.forms`.
        leaves: Index of each block in the lists of its ranks.
    """

    name: str
    parties: tuple[int, ...]
    forms: tuple[int, ...]
    leaves: tuple[int, ...]


class Tiles(NamedTuple):
    """What is the same for all tensors with equal blocks on the same ranks.

    Attributes:
        dtype: Element type.
        shape: Shape of the tensor.
        boxes: Boxes that fill it, each once, by offset.
        members: For each box the blocks that are equal to it, as places in the row.
        is_grid: Whether the boxes are a grid.
    """

    dtype: str
    shape: Shape
    boxes: tuple[Region, ...]
    members: tuple[tuple[int, ...], ...]
    is_grid: bool


class _Numbers(dict[Form, int]):
    """A number for each form, in the order in which they are met."""

    def __missing__(self, form: Form) -> int:
        number = self[form] = len(self)
        return number


class Parties:
    """The lists of all ranks, equal ones once, lined up by name.

    Attributes:
        ranks: Ranks of each party, rising.
        party_of: Party of each rank.
        forms: Every different block.
    """

    def __init__(self, ranks: Sequence[Sequence[LeafSpec]]) -> None:
        """Find out which lists are equal, and which have equal names."""
        self.ranks: list[list[int]] = []
        self.party_of: list[int] = []
        numbers = _Numbers()
        self._lineups: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}
        for rank, specs in enumerate(ranks):
            names = tuple([spec[0] for spec in specs])
            forms = tuple([numbers[spec[1:]] for spec in specs])
            lineup = self._lineups.setdefault(names, {})
            party = lineup.setdefault(forms, len(self.ranks))
            if party == len(self.ranks):
                self.ranks.append([])
            self.ranks[party].append(rank)
            self.party_of.append(party)
        self.forms: list[Form] = list(numbers)

    def rows(self) -> Iterator[Row]:
        """Give the blocks of each tensor, by name."""
        rows: dict[str, Row] = {}
        more: dict[str, list[Row]] = {}
        for names, lineup in self._lineups.items():
            parties = tuple(lineup.values())
            forms = zip(*lineup, strict=True)
            leaves = zip(*[range(len(names))] * len(parties), strict=True)
            for row in map(Row, names, itertools.repeat(parties), forms, leaves):
                if rows.setdefault(row[0], row) is not row:
                    more.setdefault(row[0], []).append(row)
        for name in sorted(rows):
            yield _joined([rows[name], *more[name]]) if name in more else rows[name]


def _joined(rows: Sequence[Row]) -> Row:
    """Put blocks of one tensor together that are in several line-ups, or twice in one."""
    columns = zip(*(row[1:] for row in rows), strict=True)
    return Row(rows[0].name, *(tuple(itertools.chain(*column)) for column in columns))


class _Blocks(NamedTuple):
    """The blocks of one tensor, by column, and the ranks that hold each."""

    name: str
    ranks: list[list[int]]
    dtypes: list[str]
    shapes: list[Shape]
    global_shapes: list[Shape]
    offsets: list[Shape]
    replicas: list[int | None]


def check_row(row: Row, parties: Parties, problems: list[str]) -> Tiles | None:
    """Check that blocks agree on their tensor and fill it, and that equal ones are replicas.

    Blocks without elements are dropped.

    Args:
        row: The blocks of one tensor.
        parties: Where they are from.
        problems: What is wrong is added here: what, on which ranks, and what to do.

    Returns:
        The tensor, or `None` if there is anything wrong.
    """
    num_before = len(problems)
    blocks = _blocks(row, parties)
    dtype, shape = blocks.dtypes[0], blocks.global_shapes[0]
    num_blocks = len(blocks.dtypes)
    if dtype not in DTYPES or blocks.dtypes.count(dtype) < num_blocks:
        problems.append(_disagreement(blocks, "element type", blocks.dtypes))
    if blocks.global_shapes.count(shape) < num_blocks:
        problems.append(_disagreement(blocks, "global shape", blocks.global_shapes))
        return None
    boxes, members = _distinct(blocks)
    regular = 0 not in shape and _is_regular(shape, boxes)
    if not regular:
        kept = [k for k, box in enumerate(boxes) if 0 not in box[1]]
        boxes, members = [boxes[k] for k in kept], [members[k] for k in kept]
        regular = _is_regular(shape, boxes)
    if not regular:
        _check_tiling(blocks, shape, boxes, members, problems)
    if len(boxes) < num_blocks or blocks.replicas.count(None) < num_blocks:
        _check_replicas(blocks, boxes, members, problems)
    if len(problems) > num_before:
        return None
    return Tiles(dtype, shape, tuple(boxes), tuple(members), regular)


def _blocks(row: Row, parties: Parties) -> _Blocks:
    """Look blocks up, and say of those that are whole tensors where they lie."""
    forms = [parties.forms[form] for form in row.forms]
    shapes = [form[1] for form in forms]
    return _Blocks(
        row.name,
        [parties.ranks[party] for party in row.parties],
        [form[0] for form in forms],
        shapes,
        [form[1] if form[2] is None else form[2] for form in forms],
        [(0,) * len(form[1]) if form[3] is None else form[3] for form in forms],
        [form[4] for form in forms],
    )


def _distinct(blocks: _Blocks) -> tuple[list[Region], list[tuple[int, ...]]]:
    """Give the different boxes among blocks, by offset, and the blocks that are each."""
    offsets, shapes = blocks.offsets, blocks.shapes
    num_blocks = len(shapes)
    if len(set(offsets)) == num_blocks:
        order = sorted(range(num_blocks), key=offsets.__getitem__)
        return [(offsets[k], shapes[k]) for k in order], [(k,) for k in order]
    by_box: dict[Region, list[int]] = {}
    for k, box in enumerate(zip(offsets, shapes, strict=True)):
        by_box.setdefault(box, []).append(k)
    boxes = sorted(by_box)
    return boxes, [tuple(by_box[box]) for box in boxes]


def _is_regular(shape: Shape, boxes: Sequence[Region]) -> bool:
    """Whether boxes are a grid that fills a tensor."""
    offsets = [offset for offset, _ in boxes]
    shapes = [local for _, local in boxes]
    if not {*map(len, offsets), *map(len, shapes)} <= {len(shape)}:
        return False
    return is_grid(shape, offsets, shapes)


def _check_tiling(
    blocks: _Blocks,
    shape: Shape,
    boxes: Sequence[Region],
    members: Sequence[tuple[int, ...]],
    problems: list[str],
) -> None:
    """Check boxes that are no grid."""

    def where(box: Region) -> str:
        return _box_text(box, _holders(blocks, members[boxes.index(box)]))

    outside = [
        box
        for box in boxes
        if not len(box[0]) == len(box[1]) == len(shape)
        or any(
            first < 0 or count < 0 or first + count > extent
            for first, count, extent in zip(*box, shape, strict=True)
        )
    ]
    if outside:
        problems.append(
            f"{blocks.name!r}: {where(outside[0])} does not lie in shape {shape}; correct its"
            " global offset or the global shape"
        )
    elif overlap := find_overlap(boxes):
        first, second = overlap
        problems.append(
            f"{blocks.name!r} is cut in a way that takes too long to check, near {where(first)};"
            " cut it into larger or more regular blocks"
            if second is None
            else f"{blocks.name!r}: {where(first)} and {where(second)} overlap and are not equal;"
            " correct their global offsets or shapes"
        )
    elif sum(math.prod(local) for _, local in boxes) != math.prod(shape):
        gap = find_gap(shape, boxes)
        at = "" if gap is None else f" at {gap}"
        problems.append(
            f"{blocks.name!r} of shape {shape} has a gap{at} that no rank holds; save it from"
            " every rank that has a block of it"
        )


def _check_replicas(
    blocks: _Blocks,
    boxes: Sequence[Region],
    members: Sequence[tuple[int, ...]],
    problems: list[str],
) -> None:
    """Check that no rank holds a box twice, and that one replica is the main one."""
    given = blocks.replicas.count(None) < len(blocks.replicas)
    for box, member in zip(boxes, members, strict=True):
        ranks = _holders(blocks, member)
        mains = _holders(blocks, [k for k in member if blocks.replicas[k] == 0]) if given else []
        if len(set(ranks)) < len(ranks):
            twice = [rank for rank, after in itertools.pairwise(ranks) if rank == after]
            problems.append(
                f"{blocks.name!r}: {_box_text(box, twice)} is there twice on a rank; drop one of"
                " them or give it another name"
            )
        elif len(mains) > 1:
            problems.append(
                f"{blocks.name!r}: {_box_text(box, mains)} is the main replica on each of them;"
                " give all but one another replica id than 0"
            )
        elif given and not mains and all(blocks.replicas[k] is not None for k in member):
            problems.append(
                f"{blocks.name!r}: {_box_text(box, ranks)} has no main replica; give one of them"
                " replica id 0"
            )


def _disagreement(blocks: _Blocks, what: str, values: Sequence[object]) -> str:
    """Say which ranks hold which values, or that the one they agree on is not known."""
    by_value: dict[object, list[int]] = {}
    for ranks, value in zip(blocks.ranks, values, strict=True):
        by_value.setdefault(value, []).extend(ranks)
    if len(by_value) == 1:
        return f"{blocks.name!r} has {what} {values[0]!r}, which cannot be stored; convert it"
    found = sorted((sorted(held), repr(value)) for value, held in by_value.items())
    told = ", ".join(f"{value} on {name_ranks(held, max_runs=4)}" for held, value in found[:3])
    return (
        f"{blocks.name!r} differs in {what}: {told}; make it the same on every rank, or give what"
        " is another tensor another name"
    )


def _holders(blocks: _Blocks, member: Sequence[int]) -> list[int]:
    """Give the ranks that hold some blocks, rising."""
    return sorted(itertools.chain.from_iterable(blocks.ranks[k] for k in member))


def _box_text(box: Region, ranks: Sequence[int]) -> str:
    """Show a box and who holds it."""
    return f"the block of shape {box[1]} at {box[0]} on {name_ranks(ranks, max_runs=4)}"
