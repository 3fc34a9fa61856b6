"""Tensors that are made of others: torch's "traceable wrapper subclasses".

The states of torchao's 8-bit optimizers are such, and its quantised weights: a tensor of codes,
one of scales, and what is known of both. A class of this kind says what it is made of by
`__tensor_flatten__`, and is made again by `__tensor_unflatten__`, the protocol of
`torch.utils._python_dispatch`. So such a tensor is saved by its parts, as a dataclass is by its
fields, and filled in place part by part; the class itself comes from the target or from the
caller, never from the checkpoint.

Left out are nested tensors, whose shapes are symbols of one process, and results of collectives
that are still under way.

A DTensor is held in parts, and is the business of `sharded`; but for one whose local tensors are
made of others, as those optimizers have under FSDP2. How codes and scales of a block belong to
rows of the whole is known to their class alone. So each rank's are kept as they are, for itself,
with the layout they are of, and only that layout takes them again.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptio._failures import raised
from ckptio.errors import TargetError, UnsupportedLeafError
from ckptio.format.encode import TAG, ObjectEncoder, class_name
from ckptio.format.fields import CONTEXT, LAYOUT, SHAPE, STRIDES
from ckptio.state.kinds import kind_of
from ckptio.state.leaves import WORDS, encode_scalar
from ckptio.state.sharded import cuts_of, is_dtensor, local_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptio.format.encode import Json

_KNOWN = (CONTEXT, SHAPE, STRIDES)


def is_wrapper(value: object) -> bool:
    """Whether a value is a tensor that is saved by the tensors it is made of."""
    cls = type(value)
    return (
        hasattr(cls, "__tensor_flatten__")
        and hasattr(cls, "__tensor_unflatten__")
        and isinstance(value, torch.Tensor)
        and not value.is_nested
        and not hasattr(cls, "trigger_wait")
    )


def wrapper_in(value: Any) -> torch.Tensor | None:
    """Give the local tensor of a DTensor if it is made of others; `None` for any other value."""
    if not is_dtensor(value) or not is_wrapper(value._local_tensor):  # noqa: SLF001  # no autograd
        return None
    return local_of(value)


def class_of(value: Any) -> type:
    """Give the class that a tensor which is made of others is saved with."""
    local = wrapper_in(value)
    return type(value if local is None else local)


def _layout_of(fqn: str, value: Any) -> tuple[Any, ...]:
    """Say which part of what a DTensor's local tensor is: equal for equal parts alone."""
    cuts = cuts_of(value, functools.partial(UnsupportedLeafError, fqn))
    coordinate = value.device_mesh.get_coordinate()
    layout = (
        tuple(value.shape),
        tuple(value.device_mesh.shape),
        None if coordinate is None else tuple(coordinate),
        tuple([None if cut is None else (cut.dim, cut.split_factor) for cut in cuts]),
    )
    # newer versions of torch say the order of cuts apart from the placements; that of the mesh
    # is what older ones mean
    order = getattr(value._spec, "shard_order", None) or ()  # noqa: SLF001  # nothing public has it
    others = [entry for entry in order if list(entry.mesh_dims) != sorted(entry.mesh_dims)]
    turned = tuple([(entry.tensor_dim, tuple(entry.mesh_dims)) for entry in others])
    return (*layout, turned) if turned else layout


def take_apart(fqn: str, tensor: Any) -> tuple[dict[str, torch.Tensor], dict[str, Json]]:
    """Give the tensors that a tensor is made of, and what else is known of it, JSON-ready.

    The tensors are those of the caller, not copies; of a DTensor, what this rank holds.

    Raises:
        UnsupportedLeafError: It does not say, or says what has no portable form.
    """
    local = wrapper_in(tensor)
    layout = None if local is None else {LAYOUT: _layout_of(fqn, tensor)}
    tensor = tensor if local is None else local
    try:
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
    except Exception as error:  # of a class of others, which raises anything
        raise _refusal(fqn, tensor, f"its __tensor_flatten__() fails: {raised(error)}") from error
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor) or name in (*_KNOWN, LAYOUT):
            raise _refusal(fqn, tensor, f"its part {name!r} is no tensor")
    encoder = ObjectEncoder(_context_leaf, WORDS)
    known = {CONTEXT: context, SHAPE: torch.Size(tensor.shape), STRIDES: tuple(tensor.stride())}
    known |= layout or {}
    try:
        return parts, {name: encoder.encode(name, value) for name, value in known.items()}
    except UnsupportedLeafError as error:
        raise _refusal(fqn, tensor, str(error)) from error


def put_together(fqn: str, like: Any, parts: dict[str, Any]) -> torch.Tensor:
    """Make a tensor like another one out of other parts: a parameter, if that is one.

    Raises:
        TargetError: Its class does not take them; what else is loaded is filled by now.
    """
    local, cls = wrapper_in(like), type(like)
    own = None if local is None else put_together(fqn, local, parts)
    try:
        if own is not None:  # nothing public makes a DTensor of a specification
            made = cls(own, like._spec, requires_grad=like.requires_grad)  # noqa: SLF001
        else:
            context = like.__tensor_flatten__()[1]
            made = cls.__tensor_unflatten__(parts, context, like.shape, like.stride())
        if isinstance(like, torch.nn.Parameter) and not isinstance(made, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=like.requires_grad)
        elif like.is_leaf and like.requires_grad:
            made = made.requires_grad_()
    except Exception as error:  # of a class of others, which raises anything
        raise TargetError(f"{fqn!r} cannot be made of its parts again: {raised(error)}") from error
    tensor: torch.Tensor = made
    return tensor


def wrapped_fields(node: Json) -> dict[str, Json] | None:
    """Give the fields of a node that is such a tensor; `None` for any other node."""
    if type(node) is not dict or node.get(TAG) != "dataclass" or type(node.get("c")) is not str:
        return None
    fields = dict(node["v"])
    return fields if fields.keys() >= set(_KNOWN) else None


def parts_alike(fqn: str, target: Any, node: Json) -> dict[str, torch.Tensor] | str:
    """Give the tensors that one of a target is made of, or say how a node differs from it.

    All that is known of both beside their parts has to be equal: codes of another kind would be
    read as those of this one.

    Raises:
        TargetError: The target does not say what it is made of.
    """
    fields = wrapped_fields(node)
    cls = class_of(target)
    if fields is None or node["c"] != class_name(cls):
        return (
            f"a tensor of class {cls.__name__!r} in the target, {kind_of(node)} in the checkpoint"
        )
    try:
        parts, known = take_apart(fqn, target)
    except UnsupportedLeafError as error:
        raise TargetError(f"cannot fill {fqn!r}: {error.problem}") from error
    if (LAYOUT in fields) != (LAYOUT in known):
        here, there = ("parts", "a whole") if LAYOUT in known else ("a whole", "parts")
        return f"{here} of a tensor for each rank in the target, {there} in the checkpoint"
    for name, value in known.items():
        if fields.pop(name) != value:
            return f"another {name.strip('_')} in the target than in the checkpoint"
    return parts if fields.keys() == parts.keys() else "made of other parts in the checkpoint"


def wrappers_in(node: Json) -> Iterator[Json]:
    """Give the nodes of a tree that are such tensors, but for those in others."""
    if type(node) is list:
        for item in node:
            yield from wrappers_in(item)
    elif type(node) is dict:
        if wrapped_fields(node) is not None:
            yield node
            return
        for item in node.values():
            yield from wrappers_in(item)


def _context_leaf(fqn: str, value: Any) -> Json:
    if isinstance(value, np.generic):
        return encode_scalar(fqn, value)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UnsupportedLeafError(fqn, f"a value of type {name} has no portable form", "")


def _refusal(fqn: str, tensor: object, problem: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        fqn,
        f"of a tensor subclass {type(tensor).__qualname__!r}: {problem}",
        "save the plain tensors it is made of, or what its dequantize() gives",
    )
