"""Whether two states are the same, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptio.state.leaves import raw_bytes
from ckptio.state.sharded import memory_of
from ckptio.state.wrappers import is_wrapper

if TYPE_CHECKING:
    from collections.abc import Collection

#: What is the same if it is equal.
_WORDS = (int, bool, str, bytes, bytearray)


def is_same(one: Any, other: Any) -> bool:
    """Whether two states are the same, bit for bit; not where that cannot be told.

    Tensors may be on two devices: some of a state are filled where they are, others made anew.

    Args:
        one: What a checkpoint may have: containers, numbers, tensors.
        other: Another.
    """
    try:
        return _is_same(one, other)
    except Exception:  # of a class of the caller's, or of tensors that cannot be read
        return False


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):  # 1, True and 1.0 are equal
        return False
    if isinstance(one, torch.Tensor):
        return _is_same_tensor(one, other)
    if isinstance(one, dict):
        are_keys = _are_same_members(one, other)
        return are_keys and all(_is_same(v, other[k]) for k, v in one.items())
    if isinstance(one, (set, frozenset)):
        return _are_same_members(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, (np.ndarray, np.generic)):
        is_like = one.dtype == other.dtype and one.shape == other.shape
        return bool(is_like and one.tobytes() == other.tobytes())
    if dataclasses.is_dataclass(one):  # what differs between ranks is in one, too
        return all(
            _is_same(getattr(one, field.name), getattr(other, field.name))
            for field in dataclasses.fields(one)
        )
    return _is_same_word(one, other)


def _is_same_word(one: Any, other: Any) -> bool:
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)  # nan is nan, and 0.0 is not -0.0
    if type(one) in _WORDS:
        return bool(one == other)
    # a moment is equal in two zones, and in both hours that a clock shows twice
    return bool(one == other) and repr(one) == repr(other)


def _are_same_members(one: Collection[Any], other: Collection[Any]) -> bool:
    """Whether sets, or the keys of dicts, are the same: members that are equal need not be."""
    twins = {member: member for member in other}
    return len(one) == len(other) and all(
        member in twins and _is_same(member, twins[member]) for member in one
    )


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if is_wrapper(one):  # DTensors are such
        names, more = one.__tensor_flatten__()  # type: ignore[attr-defined]  # it is one
        is_like = _is_same((names, more), other.__tensor_flatten__())  # type: ignore[attr-defined]  # as above
        return is_like and all(_is_same(getattr(one, n), getattr(other, n)) for n in names)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.device != other.device:
        one, other = one.cpu(), other.cpu()
    return memory_of(one) == memory_of(other) or torch.equal(raw_bytes(one), raw_bytes(other))
