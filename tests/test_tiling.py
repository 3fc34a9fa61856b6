from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.tiling import MAX_COMPARISONS, Region, find_gap, find_overlap, is_grid


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """Cut a tensor by planes, and pieces of it by other planes, again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes: list[Region] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        offset, local = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, local[dim]))
        for first, count in ((0, at), (at, local[dim] - at)):
            if count:
                boxes.append(
                    (
                        (*offset[:dim], offset[dim] + first, *offset[dim + 1 :]),
                        (*local[:dim], count, *local[dim + 1 :]),
                    )
                )
    return shape, draw(st.permutations(boxes))


@st.composite
def heaps(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """Draw boxes in a tensor, however they lie."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(1, 5))):
        offset = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
        local = tuple(
            draw(st.integers(1, extent - first))
            for extent, first in zip(shape, offset, strict=True)
        )
        boxes.append((offset, local))
    return shape, boxes


def cells(box: Region) -> set[tuple[int, ...]]:
    """Give every element of a box."""
    ranges = (range(first, first + count) for first, count in zip(*box, strict=True))
    return set(itertools.product(*ranges))


def grid_of(shape: tuple[int, ...], boxes: list[Region]) -> bool:
    return is_grid(shape, [offset for offset, _ in boxes], [local for _, local in boxes])


@given(tiling=tilings())
def test_a_tiling_has_no_overlap_and_no_gap(tiling: tuple[tuple[int, ...], list[Region]]) -> None:
    """However often its parts were cut."""
    shape, boxes = tiling
    assert find_overlap(boxes) is None
    assert find_gap(shape, boxes) is None


@given(heap=heaps())
def test_overlaps_and_gaps_are_what_they_are_by_element(
    heap: tuple[tuple[int, ...], list[Region]],
) -> None:
    """What is found is there; if nothing is found, nothing is there."""
    shape, boxes = heap
    held = [cells(box) for box in boxes]
    total = set().union(*held)
    apart = sum(map(len, held)) == len(total)
    overlap = find_overlap(boxes)
    assert (overlap is None) == apart
    if overlap:
        one, other = overlap
        assert other is not None
        assert cells(one) & cells(other)
    else:
        gap = find_gap(shape, boxes)
        everything = cells(((0,) * len(shape), shape))
        assert (gap is None) == (total == everything)
        assert gap is None or gap in everything - total


@given(heap=heaps() | tilings())
def test_a_grid_is_a_tiling(heap: tuple[tuple[int, ...], list[Region]]) -> None:
    """What is taken for a grid covers each element once."""
    shape, boxes = heap
    if grid_of(shape, boxes):
        held = [cells(box) for box in boxes]
        assert sum(map(len, held)) == len(set().union(*held))
        assert set().union(*held) == cells(((0,) * len(shape), shape))


@given(
    cuts=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
def test_cells_of_uneven_rows_and_columns_are_a_grid(
    cuts: list[list[int]], data: st.DataObject
) -> None:
    """In any order; not if one is missing, there twice or elsewhere."""
    edges = [list(zip(itertools.accumulate([0, *cut]), cut, strict=False)) for cut in cuts]
    shape = tuple(map(sum, cuts))
    boxes: list[Region] = [
        (tuple(first for first, _ in cell), tuple(count for _, count in cell))
        for cell in itertools.product(*edges)
    ]
    boxes = data.draw(st.permutations(boxes))
    assert grid_of(shape, boxes)
    assert not grid_of(shape, [*boxes, boxes[0]])
    if len(boxes) > 1:
        assert not grid_of(shape, boxes[1:])
        assert not grid_of(shape, [boxes[1], *boxes[1:]])


def test_a_scalar_is_one_box() -> None:
    """And not two."""
    box: Region = ((), ())
    assert grid_of((), [box])
    assert find_overlap([box]) is None
    assert find_gap((), [box]) is None
    assert find_gap((), []) == ()
    assert find_overlap([box, box]) == (box, box)


@pytest.mark.parametrize(
    ("offset", "local"),
    [((0,), (0,)), ((0,), (-1,)), ((1,), (4,)), ((0,), (3,)), ((-1,), (5,)), ((0,), (5,))],
)
def test_a_box_that_is_not_the_whole_is_no_grid(
    offset: tuple[int, ...], local: tuple[int, ...]
) -> None:
    """Extents that cannot be make no grid either."""
    assert not is_grid((4,), [offset], [local])


def test_negative_extents_that_add_up_are_no_grid() -> None:
    """Edges meet end to end, but one of them goes back."""
    assert not is_grid((4,), [(0,), (5,)], [(5,), (-1,)])


def blades(num: int) -> list[Region]:
    """Lay four boxes like the blades of a windmill around a fine grid: no plane cuts it."""
    boxes: list[Region] = [((i + 1, j + 1), (1, 1)) for i in range(num) for j in range(num)]
    return [
        *boxes,
        ((0, 0), (1, num + 1)),
        ((0, num + 1), (num + 1, 1)),
        ((num + 1, 1), (1, num + 1)),
        ((1, 0), (num + 1, 1)),
    ]


def test_a_windmill_is_a_tiling() -> None:
    """What does not come apart by planes is compared box by box."""
    assert find_overlap(blades(20)) is None
    assert find_gap((22, 22), blades(20)) is None
    assert find_gap((22, 22), blades(20)[1:]) == (1, 1)


def test_the_work_of_a_check_is_bounded() -> None:
    """A windmill around a fine grid takes more comparisons than anybody's tiling."""
    found = find_overlap(blades(2 * MAX_COMPARISONS))
    assert found is not None
    assert found[1] is None


def test_boxes_that_come_off_one_by_one_are_refused_in_time() -> None:
    """A tiling made for the check, which comes apart in as many steps as it has boxes."""
    num = 3000
    boxes: list[Region] = [  # a column, then a row of what is left, then a column of that
        ((i, i), (1, num - i) if i % 2 else (num - i, 1)) for i in range(num - 1)
    ]
    found = find_overlap(boxes)
    assert found is not None
    assert found[1] is None
