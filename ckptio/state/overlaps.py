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
from ckptio.state.ties import span_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.format.manifest import TensorEntry
    from ckptio.state.fills import Fill


def settle_overlaps(
    fills: Sequence[Fill], tensors: Sequence[TensorEntry], notes: list[str]
) -> Sequence[Fill]:
    """Leave out what would be filled over something else.

    Args:
        fills: What is to be filled, in the order of the target.
        tensors: The manifest's tensors, for names.
        notes: Takes a line for each that is left out.

    Returns:
        `fills` itself if no memory is shared, as mostly.

    Raises:
        TargetError: Tensors overlap in part, and take different ones of the checkpoint.
    """
    # blocks of sharded tensors are parts of one local tensor; what is blank has no memory yet
    whole = [
        (*span_of(fill.tensor, fill.tensor.nbytes), number)
        for number, fill in enumerate(fills)
        if fill.block is None and isinstance(fill.tensor, torch.Tensor)
    ]
    whole.sort()
    if all(a[1] <= b[0] for a, b in itertools.pairwise(whole)):
        return fills
    left_out: set[int] = set()
    cluster: list[int] = []
    stop = -1
    for first, end, number in [*whole, (2**64, 2**64, -1)]:
        if first >= stop:
            left_out |= _settle(sorted(cluster), fills, tensors, notes)
            cluster = []
        if first < end:
            cluster.append(number)
            stop = max(stop, end)
    return [fill for number, fill in enumerate(fills) if number not in left_out]


def _settle(
    cluster: Sequence[int],
    fills: Sequence[Fill],
    tensors: Sequence[TensorEntry],
    notes: list[str],
) -> set[int]:
    """Say which of the fills in one piece of memory are left out."""
    left_out: set[int] = set()
    kept: list[tuple[torch.Tensor, int]] = []
    for number in cluster:
        tensor, stored = fills[number].tensor, fills[number].stored
        assert isinstance(tensor, torch.Tensor)  # noqa: S101  # the caller saw to it
        others = [k for k in kept if k[1] != stored and _overlap(k[0], tensor)]
        if not others:
            kept.append((tensor, stored))
            continue
        other, first = others[0][0], tensors[others[0][1]].name
        name = tensors[stored].name
        if not _are_equal(other, tensor):
            raise TargetError(
                f"cannot fill {name!r} and {first!r}: they share a part of their memory in the"
                " target, and are two tensors in the checkpoint; clone() one of them"
            )
        left_out.add(number)
        notes.append(
            f"{name}: is one tensor with {first!r} in the target and another in the checkpoint;"
            f" {first!r} was loaded"
        )
    return left_out


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors surely have bytes in common; strided ones may lie between each other."""
    if one.device != other.device:
        return False
    if not (one.is_contiguous() and other.is_contiguous()):
        return _are_equal(one, other)
    (a, b), (c, d) = span_of(one, one.nbytes), span_of(other, other.nbytes)
    return a < d and c < b


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
