"""Match what a caller wants filled with what a checkpoint has.

Matching changes nothing: it lists what to fill and what disagrees, and hands back a
function that puts the result together once every byte has landed.

Rules: tensors and arrays of the target are filled in place, and must have the shape and
element type of the checkpoint. Dicts and lists are matched by key and index and updated
in place. A stateful object gives its state as a template, its tensors are filled in
place, and what else the checkpoint has under it is made new (but a module takes no names
that it does not have); then it takes the whole, unless nothing of it was selected.
Any other value of the target is a placeholder for the checkpoint's.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from ckptio.errors import TargetError, UnsupportedLeafError
from ckptio.format.encode import TAG, encode_key, join_fqn
from ckptio.state.flatten import DTYPE_NAMES, TORCH_DTYPES, is_stateful
from ckptio.state.rebuild import Rebuilder, check_view, torch_dtype
from ckptio.state.tree import children, prune_at, tensor_index, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ckptio.format.manifest import TensorEntry
    from ckptio.state.tree import Predicate

    Json = Any
    Assemble = Callable[[Rebuilder], Any]

_DICT_TAGS = (None, "dict", "odict", "counter")


@dataclass(frozen=True, slots=True)
class Fill:
    """A tensor of the target and what goes into it.

    Attributes:
        index: The stored tensor.
        tensor: The target's memory.
        view: The node of the view, if the target takes a part of the stored tensor.
    """

    index: int
    tensor: torch.Tensor
    view: Json | None


@dataclass(slots=True)
class Match:
    """What came out of matching.

    Attributes:
        fills: Tensors to fill in place.
        fresh: Stored tensors that have to be made, by index.
        missing: Names of the target that the checkpoint does not have.
        unexpected: Names of the checkpoint that the target does not have.
        mismatched: One line for each name that is there in another shape, type or kind.
        num_values: Values taken from the checkpoint that are not filled in place.
    """

    fills: list[Fill] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    num_values: int = 0

    @property
    def agrees(self) -> bool:
        """Whether nothing is missing, unexpected or mismatched."""
        return not (self.missing or self.unexpected or self.mismatched)


class Matcher:
    """Matches one target with one tree.

    Args:
        tensors: The manifest's tensors.
        dtype: Floating-point element type that targets may have instead of the stored one.
        keep: Accepts the names to load; everything if not given.
    """

    def __init__(
        self,
        tensors: tuple[TensorEntry, ...],
        *,
        dtype: torch.dtype | None = None,
        keep: Predicate | None = None,
    ) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._keep = keep
        self.match = Match()

    def merge(self, fqn: str, target: Any, node: Json) -> Assemble:
        """Match a value of the target with a node of the tree.

        Returns:
            What makes the value that belongs there, once everything has landed.

        Raises:
            TargetError: The target holds something that cannot be filled.
        """
        if isinstance(target, torch.Tensor):
            return self._tensor(fqn, target, node)
        if isinstance(target, np.ndarray):
            return self._array(fqn, target, node)
        if is_stateful(target):
            return self._stateful(fqn, target, node)
        if isinstance(target, dict):
            return self._dict(fqn, target, node, closed=True)
        if isinstance(target, (list, tuple)) and target:
            return self._sequence(fqn, target, node)
        return self._value(fqn, target, node)

    def _value(self, fqn: str, target: Any, node: Json) -> Assemble:
        """Take whatever the checkpoint has."""
        if self._keep is not None:
            kept = prune_at(fqn, node, self._keep)
            if not kept:
                return lambda _: target
            node = kept[0]
        self.match.num_values += 1
        self.match.fresh |= {i for _, n in walk(fqn, node) if (i := tensor_index(n)) is not None}
        return lambda rebuilder: rebuilder.rebuild(fqn, node)

    def _tensor(self, fqn: str, target: torch.Tensor, node: Json) -> Assemble:
        if self._keep is not None and not self._keep(fqn):
            return lambda _: target
        entry = self._entry(node)
        if entry is None or node.get(TAG) in ("bytes", "bytearray", "np"):
            return self._mismatch(fqn, target, "a tensor in the target, not in the checkpoint")
        is_view = node.get(TAG) == "view"
        if is_view:
            check_view(node, entry.nbytes)
        shape = tuple(node["s"]) if is_view else entry.shape
        stored = torch_dtype(node["d"] if is_view else entry.dtype)
        if tuple(target.shape) != shape:
            found = f"shape {tuple(target.shape)} in the target, {shape} in the checkpoint"
            return self._mismatch(fqn, target, found)
        if target.dtype != stored and not (
            self._dtype == target.dtype and stored.is_floating_point
        ):
            found = f"{target.dtype} in the target, {stored} in the checkpoint"
            return self._mismatch(fqn, target, found)
        _check_fillable(fqn, target)
        self.match.fills.append(Fill(_index(node), target, node if is_view else None))
        return lambda _: target

    def _array(self, fqn: str, target: np.ndarray[Any, Any], node: Json) -> Assemble:
        if self._keep is not None and not self._keep(fqn):
            return lambda _: target
        if type(node) is not dict or node.get(TAG) != "np" or self._entry(node) is None:
            return self._mismatch(fqn, target, "an array in the target, not in the checkpoint")
        if target.dtype.str != node["d"] or list(target.shape) != node["s"]:
            found = (
                f"{target.dtype.str} {list(target.shape)} in the target, {node['d']} {node['s']}"
            )
            return self._mismatch(fqn, target, f"{found} in the checkpoint")
        if not target.flags.writeable:
            raise TargetError(f"cannot fill {fqn!r}: the array is read-only")
        tensor = _as_tensor(target)
        entry = self._entry(node)
        if tensor is not None and entry is not None and entry.shape == target.shape:
            self.match.fills.append(Fill(_index(node), tensor, None))
            return lambda _: target
        assemble = self._value(fqn, target, node)  # strings, dates, other byte orders: made, copied

        def fill(rebuilder: Rebuilder) -> Any:
            np.copyto(target, assemble(rebuilder), casting="no")
            return target

        return fill

    def _stateful(self, fqn: str, target: Any, node: Json) -> Assemble:
        if not self._selects(fqn, node):
            return lambda _: target
        is_module = isinstance(target, torch.nn.Module)
        assemble = self._dict(fqn, target.state_dict(), node, closed=is_module, flat=is_module)

        def hand_over(rebuilder: Rebuilder) -> Any:
            target.load_state_dict(assemble(rebuilder))
            return target

        return hand_over

    def _dict(
        self, fqn: str, target: dict[Any, Any], node: Json, *, closed: bool, flat: bool = False
    ) -> Assemble:
        """Match a dict.

        Args:
            fqn: Its name.
            target: The dict.
            node: The node of the tree.
            closed: Names of the checkpoint that the target lacks are unexpected. Without
                it they are made new (an optimizer that has not stepped has no moments).
            flat: Values that are no tensors are placeholders, dicts among them.
        """
        if type(node) is not dict or node.get(TAG) not in _DICT_TAGS:
            return self._mismatch(fqn, target, "a dict in the target, not in the checkpoint")
        stored = {
            _identity(key): (key, name, item)
            for key, (name, item) in zip(_keys(node), children(fqn, node), strict=True)
        }
        kind = {"odict": OrderedDict, "counter": Counter}.get(str(node.get(TAG)), dict)
        merged: list[tuple[Any, Assemble]] = []
        for key, value in target.items():
            found = stored.pop(_target_identity(fqn, key), None)
            if found is not None:
                _, name, item = found
                merged.append((key, self._nested(name, value, item, closed=closed, flat=flat)))
                continue
            self._note_missing(join_fqn(fqn, key), value)
            merged.append((key, lambda _, value=value: value))  # type: ignore[misc]  # as it was
        made: list[tuple[Json, Assemble]] = []
        for encoded_key, name, item in stored.values():
            if closed:
                self._note_unexpected(name, item)
            elif self._selects(name, item):
                made.append((encoded_key, self._value(name, None, item)))

        def update(rebuilder: Rebuilder) -> Any:
            values = {key: assemble(rebuilder) for key, assemble in merged}
            if closed:
                target.update(values)
                return target
            for encoded_key, assemble in made:
                values[rebuilder.rebuild_key(fqn, encoded_key)] = assemble(rebuilder)
            return kind(values)

        return update

    def _nested(self, fqn: str, value: Any, node: Json, *, closed: bool, flat: bool) -> Assemble:
        """Match a value in a dict; inside a stateful object, dicts stay open."""
        if flat and not isinstance(value, torch.Tensor):
            return self._value(fqn, value, node)
        if not closed and type(value) in (dict, OrderedDict, Counter) and type(node) is dict:
            return self._dict(fqn, value, node, closed=False)
        if not closed and not isinstance(value, (torch.Tensor, np.ndarray)):
            return self._value(fqn, value, node)
        return self.merge(fqn, value, node)

    def _sequence(self, fqn: str, target: Any, node: Json) -> Assemble:
        is_tuple = type(node) is dict and node.get(TAG) in ("tuple", "namedtuple")
        items = (
            node
            if type(node) is list
            else [i for _, i in children(fqn, node)]
            if is_tuple
            else None
        )
        if items is None or is_tuple != isinstance(target, tuple):
            found = f"a {type(target).__name__} in the target, not in the checkpoint"
            return self._mismatch(fqn, target, found)
        names = (
            [name for name, _ in children(fqn, node)]
            if is_tuple
            else [join_fqn(fqn, i) for i in range(len(items))]
        )
        merged = [
            self.merge(name, value, item)
            for name, value, item in zip(names, target, items, strict=False)
        ]
        for i in range(len(items), len(target)):
            self._note_missing(join_fqn(fqn, i), target[i])
        for name, item in list(zip(names, items, strict=True))[len(target) :]:
            self._note_unexpected(name, item)

        def update(rebuilder: Rebuilder) -> Any:
            values = [assemble(rebuilder) for assemble in merged]
            if isinstance(target, list):
                target[: len(values)] = values
                return target
            values += target[len(values) :]
            return type(target)(*values) if hasattr(target, "_fields") else tuple(values)

        return update

    def _mismatch(self, fqn: str, target: Any, found: str) -> Assemble:
        if self._keep is None or self._keep(fqn):
            self.match.mismatched.append(f"{fqn}: {found}")
        return lambda _: target

    def _note_missing(self, fqn: str, target: Any) -> None:
        names = [
            name for name in _target_names(fqn, target) if self._keep is None or self._keep(name)
        ]
        self.match.missing += names

    def _note_unexpected(self, fqn: str, node: Json) -> None:
        names = [name for name, _ in _leaves(fqn, node)]
        self.match.unexpected += [n for n in names if self._keep is None or self._keep(n)]

    def _selects(self, fqn: str, node: Json) -> bool:
        """Whether anything in a node is to be loaded."""
        return self._keep is None or any(self._keep(name) for name, _ in _leaves(fqn, node))

    def _entry(self, node: Json) -> TensorEntry | None:
        index = tensor_index(node)
        return (
            self._tensors[index] if index is not None and 0 <= index < len(self._tensors) else None
        )


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """View an array as the tensor it was stored as, if torch knows such elements and strides."""
    if array.dtype.name not in TORCH_DTYPES or not array.dtype.isnative or not array.nbytes:
        return None
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        return None
    return torch.from_numpy(array)


def _index(node: Json) -> int:
    index = tensor_index(node)
    assert index is not None  # noqa: S101  # the caller found an entry by it
    return index


def _keys(node: Json) -> list[Json]:
    """Give the encoded keys of a mapping node."""
    value = node if node.get(TAG) is None else node["v"]
    return list(value) if type(value) is dict else [pair[0] for pair in value]


def _identity(encoded_key: Json) -> Hashable:
    """Give what tells a key from others; plain keys stand for themselves."""
    return encoded_key if type(encoded_key) is str else msgspec.json.encode(encoded_key)


def _target_identity(fqn: str, key: object) -> Hashable:
    """Give the same for a key of the target, enums and records among them."""
    if type(key) is str and key.isascii():
        return key
    try:
        return _identity(encode_key(fqn, key))
    except UnsupportedLeafError:
        return None  # no checkpoint has such a key


def _leaves(fqn: str, node: Json) -> list[tuple[str, Json]]:
    """Name everything in a node that is no container; the node itself if it is empty."""
    found: list[tuple[str, Json]] = []
    items: list[tuple[str, Json]] = []
    if type(node) is list:
        items = [(join_fqn(fqn, i), item) for i, item in enumerate(node)]
    elif type(node) is dict and tensor_index(node) is None:
        items = list(children(fqn, node))
    for name, item in items:
        found += _leaves(name, item)
    return found or [(fqn, node)]


def _target_names(fqn: str, target: Any) -> list[str]:
    """Name everything in a value of the target that is no container."""
    if isinstance(target, dict) and target:
        return [n for k, v in target.items() for n in _target_names(join_fqn(fqn, k), v)]
    if isinstance(target, (list, tuple)) and target:
        return [n for i, v in enumerate(target) for n in _target_names(join_fqn(fqn, i), v)]
    return [fqn]


def _check_fillable(fqn: str, target: torch.Tensor) -> None:
    """Refuse targets whose memory cannot take every element."""
    plain = type(target) in (torch.Tensor, torch.nn.Parameter) and target.dtype in DTYPE_NAMES
    if plain and target.is_cpu and target.is_contiguous() and not target.is_inference():
        return  # by far the most, and there are thousands
    if target.is_meta:
        raise TargetError(
            f"cannot fill {fqn!r}: it is on the meta device; use to_empty(device=...) first"
        )
    if target.layout is not torch.strided or target.dtype not in DTYPE_NAMES:
        raise TargetError(
            f"cannot fill {fqn!r}: {target.layout} {target.dtype} is not dense memory"
        )
    if not (target.is_cpu or target.is_cuda):
        raise TargetError(f"cannot fill {fqn!r} on {target.device}: use a CPU or CUDA tensor")
    if type(target).__torch_dispatch__ != torch.Tensor.__torch_dispatch__:
        raise TargetError(
            f"cannot fill {fqn!r}: the subclass {type(target).__qualname__!r} may hold its data"
            " elsewhere; pass the plain tensors it is made of"
        )
    if target.is_inference() and not torch.is_inference_mode_enabled():
        raise TargetError(f"cannot fill {fqn!r}: it is an inference tensor; clone() it first")
    strides = zip(target.shape, target.stride(), strict=True)
    if target.numel() and any(stride == 0 and extent > 1 for extent, stride in strides):
        raise TargetError(f"cannot fill {fqn!r}: it is expanded, its elements share memory")
