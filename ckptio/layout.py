"""How elements and rows lie in bytes. Pure: no torch.

`DTYPES` names every element type that can be stored, by its torch name. A safetensors
file knows fewer kinds, and older readers refuse a whole file for one kind they do not
know; the others are written as a kind that all readers have, with the true name in the
manifest and in the file's `__metadata__`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class HasNbytes(Protocol):
    """Anything that has a size in bytes."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...


T = TypeVar("T", bound=HasNbytes)


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: torch's name (`torch.<name>`), as the manifest has it.
        itemsize: Bytes of an element.
        code: safetensors' name of the kind it is stored as.
        inner: Trailing dimensions that the stored kind adds to the shape.
        is_native: Whether a safetensors reader gives back the type itself.
    """

    name: str
    itemsize: int
    code: str
    inner: tuple[int, ...] = ()
    is_native: bool = True


#: Types of bits, which torch keeps and views and hardly more: it has no copy of some of them.
BIT_DTYPES: dict[str, int] = {
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    "bits8": 1,
    "bits16": 2,
}

DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("bool", 1, "BOOL"),
        DType("uint8", 1, "U8"),
        DType("int8", 1, "I8"),
        DType("int16", 2, "I16"),
        DType("uint16", 2, "U16"),
        DType("int32", 4, "I32"),
        DType("uint32", 4, "U32"),
        DType("int64", 8, "I64"),
        DType("uint64", 8, "U64"),
        DType("float16", 2, "F16"),
        DType("bfloat16", 2, "BF16"),
        DType("float32", 4, "F32"),
        DType("float64", 8, "F64"),
        DType("float8_e4m3fn", 1, "F8_E4M3"),
        DType("float8_e5m2", 1, "F8_E5M2"),
        DType("float8_e4m3fnuz", 1, "U8", is_native=False),
        DType("float8_e5m2fnuz", 1, "U8", is_native=False),
        DType("float8_e8m0fnu", 1, "U8", is_native=False),
        DType("float4_e2m1fn_x2", 1, "U8", is_native=False),
        DType("complex32", 4, "F16", (2,), is_native=False),
        DType("complex64", 8, "F32", (2,), is_native=False),
        DType("complex128", 16, "F64", (2,), is_native=False),
        *(DType(name, n, f"U{8 * n}", is_native=False) for name, n in BIT_DTYPES.items()),
    )
}


def numel(shape: tuple[int, ...]) -> int:
    """Elements of `shape`; 1 for a scalar's."""
    return math.prod(shape)


def nbytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a block of `shape` in a file; `dtype` is one of `DTYPES`."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous block of `shape`."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor.

    Attributes:
        offset: First index in each dimension.
        shape: Extent in each dimension.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cut a range of a row-major block into rectangular boxes, in order.

    A byte range of a file rarely ends where a row does. At most `2 * ndim - 1` boxes
    come out, so that a range lands in a strided tensor with that many copies.

    Args:
        shape: Shape of the block.
        start: First element, in row-major order.
        stop: End of the range, exclusive; `0 <= start <= stop <= numel(shape)`.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = numel(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return [_stack(first, box) for box in boxes_of_range(shape[1:], head, tail)]
    boxes: list[Box] = []
    if head:
        boxes += [_stack(first, box) for box in boxes_of_range(shape[1:], head, inner)]
        first += 1
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(Box((first, *zeros), (last - first, *shape[1:])))
    if tail:
        boxes += [_stack(last, box) for box in boxes_of_range(shape[1:], 0, tail)]
    return boxes


def shared_runs(
    shape: tuple[int, ...],
    source: tuple[tuple[int, ...], tuple[int, ...]],
    target: tuple[tuple[int, ...], tuple[int, ...]],
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Give the contiguous runs of a box that lies in two row-major blocks, in order.

    Runs of one dimension are alike, and come as one.

    Args:
        shape: Shape of the box.
        source: The box's offset in the first block, and that block's shape.
        target: The same for the second block.

    Yields:
        First element in the first block, first element in the second, and elements, for
        runs that are contiguous in both and as long as that allows; how many such runs
        there are, and the elements from one to the next in the first and second block.
    """
    if numel(shape) == 0:
        return
    split = len(shape)
    while split > 0 and shape[split - 1] == source[1][split - 1] == target[1][split - 1]:
        split -= 1
    # dimensions from `split` on are whole in both, the one before them is a run
    outer = max(split - 1, 0)
    run = numel(shape[outer:])
    strides = (row_major_strides(source[1]), row_major_strides(target[1]))
    starts = [
        sum(first * stride for first, stride in zip(offset, steps, strict=True))
        for (offset, _), steps in zip((source, target), strides, strict=True)
    ]
    if not outer:
        yield starts[0], starts[1], run, 1, 0, 0
        return
    last = outer - 1
    count, steps = shape[last], (strides[0][last], strides[1][last])
    for index in itertools.product(*(range(extent) for extent in shape[:last])):
        a, b = (
            start + sum(i * step for i, step in zip(index, of_block, strict=False))
            for start, of_block in zip(starts, strides, strict=True)
        )
        yield a, b, run, count, *steps


def batches(items: Iterable[T], max_nbytes: int) -> Iterator[list[T]]:
    """Group items, in their order, into batches of at most `max_nbytes`.

    An item that is larger is a batch of its own.
    """
    batch: list[T] = []
    nbytes = 0
    for item in items:
        if batch and nbytes + item.nbytes > max_nbytes:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += item.nbytes
    if batch:
        yield batch


def _stack(index: int, box: Box) -> Box:
    """Put `box` at `index` of one more leading dimension."""
    return Box((index, *box.offset), (1, *box.shape))
