"""Targets that share memory, and what of it is filled.

Two names of a target may be one tensor (tied weights), or views of one. That is well where they
were saved so: then they take the same stored bytes. Where the checkpoint has a tensor of its own
for each, memory can hold one of them: of equal views the first name is loaded, as torch loads
either, and a note says so; what overlaps in part is refused, since neither would come whole.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from ckptio.errors import TargetError
from ckptio.layout import DTYPES
from ckptio.state.ties import span_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from ckptio.state.fills import Fill


def settle_overlaps(fills: Sequence[Fill], notes: list[str]) -> Sequence[Fill]:
    """Leave out what would be filled over something else.

    Args:
        fills: What is to be filled, in the order of the target.
        notes: Takes a line for each that is left out.

    Returns:
        `fills` itself if no memory is shared, as mostly.

    Raises:
        TargetError: Tensors overlap in part, and were not saved so.
    """
    # blocks of sharded tensors are parts of one local tensor; what is blank has no memory yet
    spans = [
        (*span_of(fill.tensor, fill.tensor.nbytes), number)
        for number, fill in enumerate(fills)
        if fill.block is None and isinstance(fill.tensor, torch.Tensor)
    ]
    spans.sort()
    if all(a[1] <= b[0] for a, b in itertools.pairwise(spans)):
        return fills
    left_out = _doubles(fills, notes)
    _require_apart((span, fills[span[2]]) for span in spans if span[2] not in left_out)
    return [fill for number, fill in enumerate(fills) if number not in left_out]


def _doubles(fills: Sequence[Fill], notes: list[str]) -> set[int]:
    """Find what fills the very memory that something before it fills with something else."""
    firsts: dict[Hashable, Fill] = {}
    doubles: set[int] = set()
    for number, fill in enumerate(fills):
        tensor = fill.tensor
        if fill.block is not None or not isinstance(tensor, torch.Tensor) or not tensor.nbytes:
            continue
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = firsts.setdefault(view, fill)
        if (first.stored, first.view) != (fill.stored, fill.view):
            doubles.add(number)
            notes.append(
                f"{fill.name}: is one tensor with {first.name!r} in the target and another in the"
                f" checkpoint; {first.name!r} was loaded"
            )
    return doubles


def _require_apart(spans: Iterable[tuple[tuple[int, int, int], Fill]]) -> None:
    """Refuse tensors that overlap, unless they were saved as views that do so too.

    Those with gaps may lie between each other, and are left alone.

    Args:
        spans: First byte and end of each, sorted, and what it is.
    """
    # of what came before, what reaches furthest, and what does of that with another origin
    furthest: dict[torch.device, list[tuple[int, Hashable, Fill]]] = {}
    for (start, stop, _), fill in spans:
        tensor = fill.tensor
        assert isinstance(tensor, torch.Tensor)  # noqa: S101  # only those have a span
        if start == stop or stop - start != tensor.nbytes:
            continue
        reach = furthest.setdefault(tensor.device, [])
        origin = _origin(fill, tensor)
        for end, others, other in reach:
            if start < end and others != origin:
                raise TargetError(
                    f"cannot fill {fill.name!r} and {other.name!r}: they share a part of their"
                    " memory in the target, and not in the checkpoint; clone() one of them"
                )
        reach.append((stop, origin, fill))
        reach.sort(key=lambda each: each[0], reverse=True)
        second = next((each for each in reach if each[1] != reach[0][1]), None)
        furthest[tensor.device] = [reach[0], *([second] if second is not None else [])]


def _origin(fill: Fill, tensor: torch.Tensor) -> Hashable:
    """Say what a tensor is a view of: which in the checkpoint, and where that would begin here."""
    view = fill.view
    before = 0 if view is None else view["o"] * tensor.itemsize // DTYPES[view["d"]].itemsize
    return fill.stored, tensor.data_ptr() - before
