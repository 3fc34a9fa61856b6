"""Targets that share memory, and what of it is filled.

Two names of a target may be one tensor (tied weights), or views of one. That is well where they
were saved so: then they take the same stored bytes. Where the checkpoint has a tensor of its own
for each, memory can hold one of them: of equal views the first name is loaded, as torch loads
either, and a note says so; what overlaps in part is refused, since neither would come whole.
Tensors with gaps between their elements may lie between each other: whether they do, numpy finds
out (`numpy.shares_memory`), for the nearest of them and as far as that takes no time. If they do
not, a note says so: a save stores sparse views of a memory apart, and they go back to where they
were.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from ckptio.errors import TargetError
from ckptio.layout import DTYPES, row_major_strides
from ckptio.state.leaves import DTYPE_NAMES
from ckptio.state.ties import WITHOUT_MEMORY, spans_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from ckptio.state.fills import Blank, Fill

#: Tensors with gaps that one is compared with, and numpy's measure of the work for each pair.
_MAX_GAPPED = 16
_MAX_WORK = 100_000


def settle_overlaps(fills: Sequence[Fill], notes: list[str]) -> Sequence[Fill]:
    """Leave out what would be filled over something else.

    Args:
        fills: What is to be filled, in the order of the target.
        notes: Takes a line for each name that is left out.

    Returns:
        `fills` itself if no memory is shared, as mostly.

    Raises:
        TargetError: Tensors overlap in part, and were not saved so; or one has no memory.
    """
    spans = [(*fill.span, number) for number, fill in enumerate(fills) if fill.span is not None]
    if len(spans) < len(fills):
        spans += _spans_of_others(fills)
    spans.sort()
    # what is on the meta device has no memory yet: names that share some have one blank
    num_blanks = len(fills) - len(spans)
    blanks = {id(fill.tensor) for fill in fills if not isinstance(fill.tensor, torch.Tensor)}
    if len(blanks) == num_blanks and all(a[1] <= b[0] for a, b in itertools.pairwise(spans)):
        return fills
    cuts = _cuts_of(fills)
    left_out = _doubles(fills, cuts, notes)
    _require_apart(((s, fills[s[2]]) for s in spans if s[2] not in left_out), cuts, notes)
    return [fill for number, fill in enumerate(fills) if number not in left_out]


def _spans_of_others(fills: Sequence[Fill]) -> list[tuple[int, int, int]]:
    """Give first byte, end and number of what matching did not give the span of; sorted by number.

    Raises:
        TargetError: One has no memory.
    """
    numbers, tensors = [], []
    for number, fill in enumerate(fills):
        if fill.span is None and isinstance(fill.tensor, torch.Tensor):
            numbers.append(number)
            tensors.append(fill.tensor)
    found = spans_of(tensors, [tensor.nbytes for tensor in tensors])
    if isinstance(found, int):
        raise TargetError(f"cannot fill {fills[numbers[found]].name!r}: {WITHOUT_MEMORY}")
    return [(*span, number) for span, number in zip(found, numbers, strict=True)]


def _doubles(fills: Sequence[Fill], cuts: Mapping[str, int], notes: list[str]) -> set[int]:
    """Find what fills the very memory that something before it fills with something else."""
    firsts: dict[Hashable, Fill] = {}
    doubles: set[int] = set()
    said: set[tuple[str, str]] = set()
    for number, fill in enumerate(fills):
        first = firsts.setdefault((_memory(fill.tensor), _place(fill)), fill)
        if _origin(first, cuts) == _origin(fill, cuts):
            continue
        doubles.add(number)
        if (fill.name, first.name) not in said:  # once, of however many blocks
            said.add((fill.name, first.name))
            notes.append(
                f"{fill.name}: is one tensor with {first.name!r} in the target and another in the"
                f" checkpoint; {first.name!r} was loaded"
            )
    return doubles


def _memory(tensor: torch.Tensor | Blank) -> Hashable:
    """Tell which elements of which memory a tensor of the target is; none are nobody else's."""
    if not isinstance(tensor, torch.Tensor):
        return id(tensor)
    if not tensor.nbytes:
        return object()
    strides = _strides(tensor.shape, tensor.stride())
    is_other = (tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, strides, is_other


def _place(fill: Fill) -> Hashable:
    """Tell blocks of one memory apart."""
    return None if fill.block is None else (fill.block.box, fill.block.at)


def _strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Give the strides that matter: of a dimension of one element none does."""
    return tuple(stride if n > 1 else 0 for n, stride in zip(shape, strides, strict=True))


def _require_apart(
    spans: Iterable[tuple[tuple[int, int, int], Fill]], cuts: Mapping[str, int], notes: list[str]
) -> None:
    """Refuse dense tensors that overlap, unless they were saved as views that do so too.

    Those with gaps that lie over another get a note: saved with little in common with the memory
    they lie in, they are stored apart, and go back to where they were all the same.

    Args:
        spans: First byte and end of each, sorted, and what it is.
        cuts: How those that are blocks are cut, by name.
        notes: Takes the notes.
    """
    gapped: list[tuple[int, Hashable, Fill, Any]] = []
    # what reaches furthest is enough: had anything before it another origin and reached as far
    # as here, the two would have overlapped
    furthest: dict[torch.device, tuple[int, Hashable, Fill]] = {}
    dense: defaultdict[torch.device, list[tuple[int, Fill]]] = defaultdict(list)
    for (start, stop, _), fill in spans:
        tensor = fill.tensor
        assert isinstance(tensor, torch.Tensor)  # noqa: S101  # only those have a span
        origin = _origin(fill, cuts)
        end, others, other = furthest.setdefault(tensor.device, (start, origin, fill))
        is_dense = stop - start == tensor.nbytes
        if start < end and others != origin:
            if is_dense:
                raise TargetError(
                    f"cannot fill {fill.name!r} and {other.name!r}: they share a part of their"
                    " memory in the target, and not in the checkpoint; clone() one of them"
                )
            # all of these have one origin
            notes += [_shares(fill, each) for its, each in dense[tensor.device] if its > start]
        gapped = [each for each in gapped[-_MAX_GAPPED:] if each[0] > start]
        elements = np.asarray(_Memory(tensor)) if gapped or not is_dense else None
        for _, its_origin, near, theirs in gapped:
            if (
                its_origin != origin
                and near.tensor.device == tensor.device
                and _share_memory(elements, theirs)
            ):
                notes.append(_shares(fill, near))
        if not is_dense:
            gapped.append((stop, origin, fill, elements))
            continue
        reaching = [each for each in dense[tensor.device] if each[0] > start]
        dense[tensor.device] = [*reaching[-_MAX_GAPPED:], (stop, fill)]
        if stop > end:
            furthest[tensor.device] = (stop, origin, fill)


def _shares(fill: Fill, other: Fill) -> str:
    return (
        f"{fill.name}: shares a part of its memory with {other.name!r} in the target, and not in"
        " the checkpoint; there, either was loaded"
    )


def _share_memory(one: Any, other: Any) -> bool:
    """Whether two arrays have an element in common; `False` if that is not found out soon."""
    try:
        work: Any = _MAX_WORK  # candidates; its types know of two special ones alone
        return np.shares_memory(one, other, max_work=work)
    except np.exceptions.TooHardError:
        return False


class _Memory:
    """What numpy has to know of a tensor to tell where its elements are; it looks at none."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": f"|V{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
        }


def _cuts_of(fills: Sequence[Fill]) -> dict[str, int]:
    """Number the ways in which tensors are held in blocks, by their names: equal for equal ones."""
    blocks: dict[str, list[Hashable]] = {}
    for fill in fills:
        if fill.block is not None:
            blocks.setdefault(fill.name, []).append(_place(fill))
    numbers: dict[Hashable, int] = {}
    return {name: numbers.setdefault(tuple(of), len(numbers)) for name, of in blocks.items()}


def _origin(fill: Fill, cuts: Mapping[str, int]) -> Hashable:
    """Say what a tensor is a view of: which in the checkpoint, where that would begin, and how.

    Two that are equal in this and overlap have the same stored element at every place.

    Args:
        fill: The tensor.
        cuts: How it is cut, by its name, if it is one of its blocks.
    """
    tensor, view = fill.tensor, fill.view
    if not isinstance(tensor, torch.Tensor):
        return fill.stored, msgspec.json.encode(view)
    if fill.block is not None:  # blocks of one tensor lie beside each other
        return fill.stored, msgspec.json.encode(view), tensor.data_ptr(), cuts[fill.name]
    itemsize = tensor.itemsize
    if view is None:
        first, stored, flips = 0, row_major_strides(tuple(tensor.shape)), (False, False)
        is_converted = fill.dtype is not None
    else:
        # of a type that is converted on the way, in bytes of the target's
        first = view["o"] * itemsize // DTYPES[view["d"]].itemsize
        stored, flips = view["r"], (bool(view.get("conj")), bool(view.get("neg")))
        is_converted = DTYPE_NAMES[tensor.dtype] != view["d"]
    changed = tensor.is_conj() != flips[0], tensor.is_neg() != flips[1], is_converted
    kind = (*changed, tensor.dtype) if any(changed) else None  # bytes are those of a type, then
    start = tensor.data_ptr()
    steps = _steps(tensor.shape, tensor.stride(), stored, itemsize)
    if all(here == there for _, here, there in steps):
        return fill.stored, kind, start - first
    *inner, (_, here, there) = steps
    if not _is_nested(steps):
        return fill.stored, kind, start, first, steps
    # however many there are of the outermost dimension, and wherever in it both begin
    return fill.stored, kind, start % here, first - start // here * there, tuple(inner), here, there


def _steps(
    shape: Sequence[int], here: Sequence[int], there: Sequence[int], itemsize: int
) -> tuple[tuple[int, int, int], ...]:
    """Give extent and steps in bytes of each dimension here and there, innermost first.

    The bytes of an element are one. Those that make one dimension, here and there, do so.
    """
    steps = [(itemsize, 1, 1)]
    dims = zip(here, there, shape, strict=True)
    for one, other, extent in sorted((a * itemsize, b * itemsize, n) for a, b, n in dims if n > 1):
        count, *last = steps[-1]
        if [one, other] == [count * last[0], count * last[1]]:
            steps[-1] = count * extent, last[0], last[1]
        else:
            steps.append((extent, one, other))
    return tuple(steps)


def _is_nested(steps: Sequence[tuple[int, int, int]]) -> bool:
    """Whether each dimension steps over all that is within: each place is in one step of it."""
    reach = 1
    for extent, here, _ in steps:
        if here < reach:
            return False
        reach += (extent - 1) * here
    return True
