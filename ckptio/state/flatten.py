"""Take a state apart: tensors on one side, everything else as a tree on the other.

Runs on the caller's thread, at the call: what is refused is refused before anything is
written, and what a stateful object answers is its state now. Nothing is copied here;
the flat state refers to the caller's tensors until they are staged.
"""

from __future__ import annotations

import base64
import gc
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ckptio.errors import UnsupportedLeafError
from ckptio.format.encode import TAG, ObjectEncoder, encode_bytes
from ckptio.layout import DTYPES
from ckptio.shards import LeafSpec
from ckptio.state.ties import resolve_ties

if TYPE_CHECKING:
    from collections.abc import Iterator

    Json = Any

#: torch's element types that can be stored, by name; fewer in older versions of torch.
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
#: Longer `bytes` go to a bucket, like a tensor; shorter ones stay in the manifest.
MAX_INLINE_NBYTES = 1024
_NUMPY_KINDS = "biufcSUmM"
_RESERVED_NAME = "__metadata__"  # safetensors' own


@runtime_checkable
class Stateful(Protocol):
    """An object that gives and takes its state as a dict: a module, an optimizer, a loader."""

    def state_dict(self) -> dict[str, Any]:
        """Give the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take the state."""
        ...


def is_stateful(value: object) -> bool:
    """Whether a value is saved through its `state_dict` and restored through its twin."""
    return isinstance(value, Stateful) and not isinstance(value, (torch.Tensor, type))


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state taken apart.

    Attributes:
        specs: What the plan needs of each tensor, names distinct.
        sources: The tensors (uint8 views of arrays and bytes among them), same order.
            They are the caller's memory, not copies.
        tree: Everything else, JSON-ready, with tensors by index.
        untied: Names of tensors that may share memory but are saved apart.
    """

    specs: tuple[LeafSpec, ...]
    sources: tuple[torch.Tensor, ...]
    tree: Json
    untied: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)


def flatten(state: Any) -> FlatState:
    """Take a state apart.

    Args:
        state: Any nesting of dicts, lists, tuples and sets with tensors, arrays, numbers,
            strings, bytes and the like; `Stateful` objects stand for their state.

    Returns:
        A flat state that refers to the caller's memory.

    Raises:
        UnsupportedLeafError: A value has no portable form.
    """
    flattener = _Flattener()
    with collection_paused():
        tree = flattener.encoder.encode("", state)
        return flattener.finish(tree)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from starting inside the block.

    Taking 20,000 tensors apart makes 60,000 small objects, none of them garbage; the
    collections that this sets off took as long as everything else.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(slots=True)
class Occurrence:
    """A tensor at a place in the state.

    Attributes:
        name: Its name; distinct among occurrences.
        tensor: The tensor.
        dtype: Its element type as the manifest names it, if not torch's own.
        node: Its node in the tree; the index is filled in once ties are known.
    """

    name: str
    tensor: torch.Tensor
    dtype: str
    node: dict[str, Any]


class _Flattener:
    """One walk over one state."""

    def __init__(self) -> None:
        self._occurrences: list[Occurrence] = []
        self._names: set[str] = {_RESERVED_NAME}
        self.encoder = ObjectEncoder(
            self._leaf,
            {
                torch.Tensor: self._tensor,
                torch.nn.Parameter: self._tensor,
                torch.Size: lambda _, v: {TAG: "torch.Size", "v": list(v)},
                torch.dtype: lambda _, v: {TAG: "torch.dtype", "v": str(v).removeprefix("torch.")},
                torch.device: lambda _, v: {TAG: "torch.device", "v": str(v)},
                np.ndarray: self._array,
                bytes: self._bytes,
                bytearray: self._bytes,
            },
        )

    def finish(self, tree: Json) -> FlatState:
        """Settle which tensors share memory, and number those to be stored."""
        stored, untied = resolve_ties(self._occurrences, self._distinct)
        specs = tuple(LeafSpec(o.name, o.dtype, tuple(o.tensor.shape)) for o in stored)
        return FlatState(specs, tuple(o.tensor for o in stored), tree, untied)

    def _distinct(self, fqn: str) -> str:
        """Give a name no other tensor has; the first comer has the plain one."""
        name = fqn or "state"
        if not name.isascii():
            name = name.encode("utf-8", "backslashreplace").decode()
        if name in self._names:
            number = 2
            while f"{name}~{number}" in self._names:
                number += 1
            name = f"{name}~{number}"
        self._names.add(name)
        return name

    def _leaf(self, fqn: str, value: Any) -> Json:
        """Handle what the encoder has no exact type for."""
        if isinstance(value, torch.Tensor):
            return self._tensor(fqn, value)
        if isinstance(value, np.generic):
            return _encode_scalar(fqn, value)
        if is_stateful(value):
            return self.encoder.encode(fqn, value.state_dict())
        raise UnsupportedLeafError(
            fqn,
            f"a value of type {type(value).__module__}.{type(value).__qualname__} has no"
            " portable form",
            "give it state_dict() and load_state_dict(), make it a dataclass, or save what it"
            " is made of",
        )

    def _tensor(self, fqn: str, tensor: torch.Tensor) -> Json:
        if tensor.is_nested or is_lazy(tensor):
            raise _refusal(fqn, tensor)
        dtype = DTYPE_NAMES.get(tensor.dtype)
        if dtype is None or tensor.layout is not torch.strided or not (
            tensor.is_cpu or tensor.is_cuda
        ):  # fmt: skip
            raise _refusal(fqn, tensor)
        cls = type(tensor)
        if cls is not torch.Tensor and cls.__torch_dispatch__ != torch.Tensor.__torch_dispatch__:
            raise _refusal(fqn, tensor)
        node: dict[str, Any] = {TAG: None}
        self._occurrences.append(Occurrence(self._distinct(fqn), tensor, dtype, node))
        return node

    def _array(self, fqn: str, array: np.ndarray[Any, Any]) -> Json:
        if array.dtype.kind not in _NUMPY_KINDS:
            raise UnsupportedLeafError(
                fqn,
                f"a numpy array of dtype {array.dtype} has no portable form",
                "save its fields, or convert it to numbers, strings or dates",
            )
        packed = np.ascontiguousarray(array)
        node = {TAG: "np", "t": None, "d": array.dtype.str, "s": list(array.shape)}
        name = array.dtype.name
        raw = _as_bytes(packed)
        if name in TORCH_DTYPES and array.dtype.isnative:
            return self._store(fqn, raw.view(TORCH_DTYPES[name]).view(array.shape), name, node)
        return self._store(fqn, raw, "uint8", node)

    def _bytes(self, fqn: str, value: bytes | bytearray) -> Json:
        if len(value) <= MAX_INLINE_NBYTES:
            return encode_bytes(value)
        raw = _as_bytes(np.frombuffer(value, dtype=np.uint8))
        return self._store(fqn, raw, "uint8", {TAG: type(value).__name__, "t": None})

    def _store(self, fqn: str, tensor: torch.Tensor, dtype: str, node: dict[str, Any]) -> Json:
        self._occurrences.append(Occurrence(self._distinct(fqn), tensor, dtype, node))
        return node


def _as_bytes(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """View a contiguous array as a uint8 tensor, read-only memory included.

    torch warns of read-only memory because it could be written; it is only read here.
    """
    if not array.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    flat = array.reshape(-1).view(np.uint8)
    if not flat.flags.writeable:
        interface = dict(flat.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        flat = np.asarray(_Lender(interface, array))
    return torch.from_numpy(flat)


class _Lender:
    """Lends an array's memory under another description, and keeps it alive."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self._owner = owner


def _encode_scalar(fqn: str, value: np.generic) -> Json:
    """Encode a numpy scalar with its exact type and bytes."""
    if value.dtype.kind not in _NUMPY_KINDS:
        raise UnsupportedLeafError(
            fqn, f"a numpy scalar of dtype {value.dtype}", "save it as a Python value"
        )
    raw = base64.b64encode(value.tobytes()).decode("ascii")
    return {TAG: "npscalar", "d": value.dtype.str, "v": raw}


def _refusal(fqn: str, tensor: torch.Tensor) -> UnsupportedLeafError:
    """Say why a tensor cannot be stored, and what to do."""
    if is_lazy(tensor):
        return UnsupportedLeafError(
            fqn, "a lazy module's parameter has no data yet", "run the module once first"
        )
    if tensor.is_nested:
        return UnsupportedLeafError(
            fqn, "a nested tensor has no portable form", "save the tensors of its unbind()"
        )
    if tensor.is_quantized:
        return UnsupportedLeafError(
            fqn,
            "a quantised tensor has no portable form",
            "save tensor.int_repr() with its scales and zero points",
        )
    if tensor.is_meta:
        return UnsupportedLeafError(
            fqn, "a tensor on the meta device has no data", "materialise it with to_empty() first"
        )
    if tensor.layout is not torch.strided:
        return UnsupportedLeafError(
            fqn,
            f"a tensor of layout {tensor.layout} has no portable form",
            "save its parts (indices and values), or tensor.to_dense()",
        )
    if tensor.dtype not in DTYPE_NAMES:
        return UnsupportedLeafError(
            fqn, f"elements of type {tensor.dtype}", "save tensor.view(torch.uint8)"
        )
    if not (tensor.is_cpu or tensor.is_cuda):
        return UnsupportedLeafError(
            fqn, f"a tensor on {tensor.device.type!r}", "move it with tensor.cpu()"
        )
    return UnsupportedLeafError(
        fqn,
        f"a tensor subclass {type(tensor).__qualname__!r} may hold its data elsewhere",
        "save the plain tensors it is made of (for a DTensor, to_local() or full_tensor())",
    )
