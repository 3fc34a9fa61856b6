"""Whether boxes tile a tensor: all of it, and no element twice. Pure: no torch.

Nearly all shardings are grids, and a grid of any size is seen in one pass over columns.
What is no grid is mostly one whose cells were cut again, so it comes apart along planes
that cut no box; the pieces come apart along other planes, down to single boxes. What
does not come apart (tiles laid like the blades of a windmill) takes a sweep that compares
boxes. Work is bounded for each box, since a manifest may come from anybody: a tiling that
takes more is none anybody makes.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Offset and shape of a box.
Region = tuple[tuple[int, ...], tuple[int, ...]]

#: Comparisons, or visits of a box while a tiling is taken apart, for each of its boxes.
MAX_COMPARISONS = 64
#: Corners that are tried as the place of a gap.
_MAX_CORNERS = 4096


def is_inside(offset: Sequence[int], shape: Sequence[int], global_shape: Sequence[int]) -> bool:
    """Whether a box lies in a tensor, and has as many dimensions. Offsets may be anything."""
    return len(offset) == len(shape) == len(global_shape) and all(
        isinstance(first, int) and min(first, extent) >= 0 and first + extent <= whole
        for first, extent, whole in zip(offset, shape, global_shape, strict=True)
    )


def is_grid(
    shape: tuple[int, ...],
    offsets: Sequence[tuple[int, ...]],
    shapes: Sequence[tuple[int, ...]],
) -> bool:
    """Whether boxes are the cells of a grid that fills a tensor, each of them once.

    Args:
        shape: Shape of the tensor.
        offsets: Offset of each box; of as many dimensions as the tensor.
        shapes: Shape of each box, in the same order and of as many dimensions.
    """
    num_boxes = len(offsets)
    num_cells = 1
    for dim, extent in enumerate(shape):
        counts = [local[dim] for local in shapes]
        firsts = [offset[dim] for offset in offsets]
        if counts.count(extent) == firsts.count(0) == num_boxes:
            continue
        edges = dict(zip(firsts, counts, strict=True))
        stop = 0
        for first, count in sorted(edges.items()):
            if first != stop or count < 1:
                return False
            stop += count
        if stop != extent or list(map(edges.__getitem__, firsts)) != counts:
            return False
        num_cells *= len(edges)
    # each edge starts a cell, so as many distinct offsets as cells are all of them
    return num_cells == num_boxes and (num_boxes == 1 or len(set(offsets)) == num_boxes)


def find_overlap(boxes: Sequence[Region]) -> tuple[Region, Region | None] | None:
    """Look for two boxes that share an element.

    Args:
        boxes: Boxes of one tensor, without zeros in their shapes.

    Returns:
        A box and another that shares an element with it; `None` in place of the other if
        telling takes more than `MAX_COMPARISONS` for each box; `None` if there are none.
    """
    if boxes and not boxes[0][0]:  # scalars
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    budget = MAX_COMPARISONS * len(boxes)
    groups = [list(boxes)]
    while groups:
        group = groups.pop()
        if len(group) <= 1:
            continue
        budget -= len(group) * len(group[0][0])
        if budget < 0:
            return group[0], None
        slabs = _come_apart(group)
        if slabs:
            groups += slabs
            continue
        budget, found = _sweep(group, budget)
        if found:
            return found
    return None


def _come_apart(boxes: list[Region]) -> list[list[Region]]:
    """Cut along all planes of one dimension that cut no box; nothing if there is none."""
    for dim in range(len(boxes[0][0])):
        boxes.sort(key=lambda box: box[0][dim])
        slabs: list[list[Region]] = []
        begin = stop = 0
        for i, (offset, shape) in enumerate(boxes):
            first = offset[dim]
            if i and first >= stop:
                slabs.append(boxes[begin:i])
                begin = i
            stop = max(stop, first + shape[dim])
        if slabs:
            return [*slabs, boxes[begin:]]
    return []


def _sweep(boxes: list[Region], budget: int) -> tuple[int, tuple[Region, Region | None] | None]:
    """Compare each box with those beside it along the dimension with most offsets.

    Returns:
        What is left of the budget, and what `find_overlap` gives.
    """
    num_offsets = [len({offset[dim] for offset, _ in boxes}) for dim in range(len(boxes[0][0]))]
    dim = num_offsets.index(max(num_offsets))
    boxes.sort(key=lambda box: box[0][dim])
    active: list[Region] = []
    for box in boxes:
        budget -= len(active)
        if budget < 0:
            return budget, (box, None)
        first = box[0][dim]
        active = [other for other in active if other[0][dim] + other[1][dim] > first]
        for other in active:
            if _share(box, other):
                return budget, (other, box)
        active.append(box)
    return budget, None


def _share(one: Region, other: Region) -> bool:
    """Whether two boxes share an element."""
    return all(
        a < b + t and b < a + s for a, s, b, t in zip(*one, *other, strict=True)
    )  # offsets a and b, extents s and t


def find_gap(shape: tuple[int, ...], boxes: Sequence[Region]) -> tuple[int, ...] | None:
    """Look for an element of a tensor that no box has.

    Args:
        shape: Shape of the tensor.
        boxes: Boxes inside of it, that do not overlap.

    Returns:
        The index of one, the first corner of a gap, or `None` if there is no gap or none
        among the corners that are tried.
    """
    if sum(math.prod(local) for _, local in boxes) == math.prod(shape):
        return None
    for corner in itertools.islice(_corners(shape, boxes), _MAX_CORNERS):
        if not any(_share((corner, (1,) * len(corner)), box) for box in boxes):
            return corner
    return None


def _corners(shape: tuple[int, ...], boxes: Sequence[Region]) -> Iterator[tuple[int, ...]]:
    """Give the places where a gap can begin: it begins where boxes end, or at zero."""
    edges = [
        sorted({0, *(o[dim] + s[dim] for o, s in boxes if o[dim] + s[dim] < extent)})
        for dim, extent in enumerate(shape)
    ]
    return itertools.product(*edges)
