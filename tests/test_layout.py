from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio.layout import (
    DTYPES,
    Box,
    boxes_of_range,
    numel,
    row_major_strides,
    shared_runs,
)
from tests.strategies import TORCH_DTYPES, shapes


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_a_dtype_is_what_torch_says(name: str) -> None:
    """Name and size of every element type agree with torch's."""
    assert str(TORCH_DTYPES[name]) == f"torch.{name}"
    assert DTYPES[name].itemsize == TORCH_DTYPES[name].itemsize


def test_every_torch_dtype_is_stored_or_known_not_to_be() -> None:
    """A new element type of torch is noticed here."""
    known = {
        str(dtype).removeprefix("torch.")
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    }
    # quantised ones are refused by name, and so is one that torch itself cannot view as numbers
    left_out = known - set(DTYPES) - {"bcomplex32"}
    assert all(name.startswith("q") for name in left_out)


@given(shape=shapes)
def test_strides_and_sizes_are_numpys(shape: tuple[int, ...]) -> None:
    """Row-major is what numpy calls C order."""
    assert numel(shape) == np.empty(shape).size
    if 0 not in shape:
        assert row_major_strides(shape) == tuple(s // 8 for s in np.empty(shape).strides)


@given(shape=st.lists(st.integers(1, 5), max_size=4).map(tuple), data=st.data())
def test_boxes_of_a_range_are_the_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Boxes, in order, hold the elements of the range, in order; and they are few."""
    start = data.draw(st.integers(0, numel(shape)))
    stop = data.draw(st.integers(start, numel(shape)))
    block = np.arange(numel(shape)).reshape(shape)
    boxes = boxes_of_range(shape, start, stop)
    found = [i for box in boxes for i in block[_index(box)].flatten().tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(numel(box.shape) > 0 for box in boxes)


@given(data=st.data(), ndim=st.integers(0, 4))
def test_shared_runs_move_a_box(data: st.DataObject, ndim: int) -> None:
    """Runs bring each element of a box from its place in one block to that in another."""
    shape = tuple(data.draw(st.integers(0, 3)) for _ in range(ndim))
    blocks = []
    for _ in range(2):
        offset = tuple(data.draw(st.integers(0, 2)) for _ in range(ndim))
        margin = tuple(data.draw(st.integers(0, 2)) for _ in range(ndim))
        whole = tuple(o + s + m for o, s, m in zip(offset, shape, margin, strict=True))
        blocks.append((offset, whole))
    source = np.arange(math.prod(blocks[0][1])).reshape(blocks[0][1])
    expected = np.full(blocks[1][1], -1)
    expected[_index(Box(blocks[1][0], shape))] = source[_index(Box(blocks[0][0], shape))]

    found = np.full(math.prod(blocks[1][1]), -1)
    groups = list(shared_runs(shape, blocks[0], blocks[1]))
    runs = [
        (a + row * step, b + row * stride, count)
        for a, b, count, rows, step, stride in groups
        for row in range(rows)
    ]
    for a, b, count in runs:
        found[b : b + count] = source.reshape(-1)[a : a + count]
    assert (found.reshape(blocks[1][1]) == expected).all()
    assert sum(count for _, _, count in runs) == numel(shape)
    assert runs == sorted(runs)


def test_a_box_that_is_whole_in_both_is_one_run() -> None:
    """What is contiguous in both blocks is moved at once."""
    assert list(shared_runs((2, 3, 4), ((1, 0, 0), (5, 3, 4)), ((0, 0, 0), (2, 3, 4)))) == [
        (12, 0, 24, 1, 0, 0)
    ]


def test_rows_of_different_blocks_are_runs_of_rows() -> None:
    """A run ends where a row of either block does; rows are told as one."""
    runs = list(shared_runs((2, 3), ((0, 1), (2, 5)), ((0, 0), (2, 3))))
    assert runs == [(1, 0, 3, 2, 5, 3)]


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
