"""Whether a tensor or an array of a target is what a node of the tree has, and if not, why."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ckptio.errors import TargetError
from ckptio.format.encode import TAG
from ckptio.shards import PerRank, Shard
from ckptio.state.fills import Fill
from ckptio.state.kinds import kind_of
from ckptio.state.leaves import SCALAR_TYPES, TORCH_DTYPES, is_convertible
from ckptio.state.looks import plain_memory
from ckptio.state.rebuild import torch_dtype
from ckptio.state.records import fields_of, record_tag
from ckptio.state.references import check_view
from ckptio.state.stateful import is_stateful
from ckptio.state.tree import tensor_index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.format.encode import Json
    from ckptio.format.manifest import TensorEntry

#: Types of what a load may put something else in place of.
_VALUES = (
    *(str, bytes, bytearray, int, float, complex),
    *(list, tuple, dict, set, frozenset),
    *(enum.Enum, pathlib.PurePath, dt.date, dt.time, dt.timedelta),
    *(np.generic, torch.dtype, torch.device),
)
#: Exact types of placeholders: what somebody puts where nothing is yet.
_MARKS = (type(None), type(...), object)


def find_plain(
    entries: Sequence[TensorEntry], fqn: str, node: Json, target: torch.Tensor
) -> Fill | None:
    """Give what fills a target as it is, by one memmove or one copy of a device; else `None`.

    Nearly all tensors of most targets are so, and there are thousands: as in `looks`, each is
    asked for everything at once.

    Args:
        entries: Tensors of the manifest.
        fqn: The name of the target.
        node: The node.
        target: A tensor of the target.
    """
    index = node.get(TAG) if type(node) is dict else None
    if type(index) is not int or (found := plain_memory(target, far=True)) is None:
        return None
    shape, _, span, storage = found
    entry = entries[index]
    if shape != entry.shape or target.dtype is not TORCH_DTYPES.get(entry.dtype):
        return None
    if target.is_inference():  # a module's `state_dict` gives views that have versions
        return None
    device = None if target.is_cpu else target.device
    return Fill(index, target, fqn, None, None, span, None, device, storage)


def find_tensor(
    entries: Sequence[TensorEntry],
    node: Json,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    converted: torch.dtype | None,
) -> int | str:
    """Give the index of what a tensor of the target takes, or say how the node differs.

    Args:
        entries: Tensors of the manifest.
        node: The node.
        shape: Shape of the target's tensor.
        dtype: Its element type.
        converted: Floating-point element type that it may have instead of the stored one.
    """
    stored = stored_as(entries, node)
    if stored is None:
        return kinds_differ("a tensor", node)
    index, stored_shape, stored_dtype = stored
    if shape != stored_shape:
        return f"shape {tuple(shape)} in the target, {stored_shape} in the checkpoint"
    if dtype != stored_dtype and not (converted == dtype and is_convertible(stored_dtype)):
        return f"{dtype} in the target, {stored_dtype} in the checkpoint"
    return index


def stored_as(
    entries: Sequence[TensorEntry], node: Json
) -> tuple[int, tuple[int, ...], torch.dtype] | None:
    """Give index, shape and element type of the tensor that a node is; `None` for other nodes."""
    index = tensor_index(node)
    if index is None or node[TAG] in ("bytes", "bytearray", "np"):
        return None
    entry = entries[index]
    if node[TAG] == "view":
        check_view(node, entry.nbytes)
        return index, tuple(node["s"]), torch_dtype(node["d"])
    return index, entry.shape, torch_dtype(entry.dtype)


def resized_like(
    entries: Sequence[TensorEntry],
    node: Json,
    target: torch.Tensor,
    *,
    is_any: bool,
    converted: torch.dtype | None,
) -> torch.Tensor | None:
    """Give what a new tensor is like that an object is given in the stored shape.

    It has the element type that it has; one without elements, which waits for some, takes the
    stored one, unless both are of floating-point numbers: of those `dtype=` says.

    Args:
        entries: Tensors of the manifest.
        node: The node.
        target: What the object has.
        is_any: Whether it takes floating-point numbers of the stored type for others.
        converted: Type that those are converted to; the stored one if not given.

    Returns:
        A tensor on the meta device; `None` if the node is no tensor.
    """
    stored = stored_as(entries, node)
    if stored is None:
        return None
    _, shape, dtype = stored
    is_float = dtype.is_floating_point and target.is_floating_point()
    if is_float and is_any:
        dtype = converted if converted is not None and is_convertible(dtype) else dtype
    elif is_float or target.numel():
        dtype = target.dtype
    is_trained = target.requires_grad and (dtype.is_floating_point or dtype.is_complex)
    like = torch.empty(shape, dtype=dtype, device="meta", requires_grad=is_trained)
    return torch.nn.Parameter(like, is_trained) if type(target) is torch.nn.Parameter else like


def is_like(entry: TensorEntry, tensor: torch.Tensor) -> bool:
    """Whether a tensor has the shape and the element type of a stored one."""
    return entry.shape == tensor.shape and torch_dtype(entry.dtype) == tensor.dtype


def array_differs(target: np.ndarray[Any, Any], node: Json) -> str:
    """Say how an array of the target differs from a node that is one; empty if it does not."""
    if target.dtype.str == node["d"] and list(target.shape) == node["s"]:
        return ""
    found = f"{target.dtype.str} {list(target.shape)} in the target, {node['d']} {node['s']}"
    return f"{found} in the checkpoint"


def is_filled(target: Any, *, by_place: bool) -> bool:
    """Whether an item of a list is filled, or holds anything that is, and is not replaced.

    Args:
        target: The item.
        by_place: Whether dicts, lists, dataclasses and named tuples count, whatever they hold:
            others may refer to them. Not where the stored list has another length: nobody knows
            then which item is which.
    """
    if type(target) in SCALAR_TYPES:
        return False
    if isinstance(target, (torch.Tensor, np.ndarray, Shard, PerRank)):
        return True
    if isinstance(target, dict):
        return by_place or any(is_filled(item, by_place=False) for item in target.values())
    if isinstance(target, (list, tuple)):
        return (by_place and bool(target)) or any(is_filled(i, by_place=False) for i in target)
    if dataclasses.is_dataclass(target) and not isinstance(target, type):
        fields = fields_of(target).values()
        return by_place or any(is_filled(item, by_place=False) for item in fields)
    return is_stateful(target)


def require_value(fqn: str, target: object) -> None:
    """Refuse an object that cannot take a state, and would be replaced by what is stored.

    Such objects are not saved either, but what somebody has made of them: a list, a dict.

    Raises:
        TargetError: It is one.
    """
    is_value = type(target) in _MARKS or isinstance(target, _VALUES)
    if not is_value and record_tag(target) is None:
        kind = f"{type(target).__module__}.{type(target).__qualname__}"
        raise TargetError(
            f"cannot fill {fqn or 'the target'!r}: an object of type {kind} takes no state, and"
            " would be replaced; leave None in its place, and give the object what comes back"
        )


def kinds_differ(kind: str, node: Json) -> str:
    """Say that the target has a kind of value where the checkpoint has another."""
    return f"{kind} in the target, {kind_of(node)} in the checkpoint"


def shape_of(fqn: str, target: torch.Tensor) -> tuple[int, ...]:
    """Give the shape of a target.

    Raises:
        TargetError: It has none yet.
    """
    if is_lazy(target):
        raise TargetError(
            f"cannot fill {fqn!r}: a lazy module's parameter has no shape yet; run the module once"
            " first, or give what load() returns to its load_state_dict()"
        )
    if target.is_nested and target.layout is torch.strided:
        raise TargetError(f"cannot fill {fqn!r}: a nested tensor has no one shape; pass its parts")
    return target.shape
