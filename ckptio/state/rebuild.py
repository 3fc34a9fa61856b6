"""Put a state together again from its tree and its tensors.

Only types of a fixed list are made: the containers and scalars of `format.decode`,
tensors, arrays, and torch's own words (Size, dtype, device).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptio._texts import shown
from ckptio.errors import ConfigError, FormatError, TargetError
from ckptio.format.ahead import made_ahead
from ckptio.format.decode import ObjectDecoder, named_types
from ckptio.format.encode import RANKS_TAG, TAG
from ckptio.format.words import numpy_dtype, numpy_scalar, size_of
from ckptio.layout import DTYPES, numel
from ckptio.state.leaves import TORCH_DTYPES, is_convertible, raw_bytes
from ckptio.state.references import check_view
from ckptio.state.tree import is_absent

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ckptio.format.encode import Json
    from ckptio.format.manifest import TensorEntry

#: What torch raises where it cannot make a tensor: the last one for a device that a package brings.
UNMADE = (RuntimeError, TypeError, AssertionError, ImportError)


def torch_dtype(name: str) -> torch.dtype:
    """Give torch's element type of a name in a manifest.

    Raises:
        FormatError: This version of torch does not have it.
    """
    dtype = TORCH_DTYPES.get(name)
    if dtype is None:
        raise FormatError(f"torch {torch.__version__} has no dtype {name!r}; upgrade torch")
    return dtype


def allocate(
    entry: TensorEntry,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    order: tuple[int, ...] = (),
) -> torch.Tensor:
    """Make an uninitialised tensor for a stored one. Sizes of files were checked before.

    Args:
        entry: The stored tensor.
        device: Where; the CPU if not given.
        dtype: Element type for floating-point tensors; their own if not given.
        order: Its dimensions as they lie in memory, outermost first; row-major if empty.

    Raises:
        FormatError: torch cannot make such a tensor.
    """
    if order and sorted(order) != list(range(len(entry.shape))):
        raise FormatError(f"{entry.name!r} of shape {entry.shape} has an order {order}")
    own = torch_dtype(entry.dtype)
    if dtype is not None and is_convertible(own):
        own = dtype
    return empty(entry.shape, own, device, entry.name, order)


def empty(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | None,
    name: str,
    order: tuple[int, ...] = (),
) -> torch.Tensor:
    """Make an uninitialised tensor; `order` as in `allocate`.

    Raises:
        TargetError: There is no such device, or not enough memory on it; or what torch makes
            has none, as under a FakeTensorMode.
    """
    try:
        # without a device torch takes the default one, which the program may have set
        place = device or torch.device("cpu")
        if order:
            made = torch.empty_permuted(shape, order, dtype=dtype, device=place)
        else:
            made = torch.empty(shape, dtype=dtype, device=place)
    except UNMADE as error:
        raise unmade(name, shape, device, error) from error
    if type(made) is not torch.Tensor:
        raise TargetError(f"torch makes a {type(made).__name__} for {name!r} here; load outside")
    return made


def unmade(
    name: str, shape: tuple[int, ...], device: torch.device | None, error: Exception
) -> TargetError:
    """Say that torch cannot make a tensor; one of `UNMADE` says why."""
    where = "" if device is None else f" on {device}"
    why = str(error).partition("\n")[0]  # tables of all devices may follow
    return TargetError(f"cannot make {name!r} of shape {shape}{where}: {why}")


def device_of(device: torch.device | str | None) -> torch.device | None:
    """Give the device that an option names.

    Raises:
        ConfigError: It names none, or one whose tensors have no memory.
    """
    try:
        named = None if device is None else torch.device(device)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0].removesuffix(", but expected one of:")
        raise ConfigError(f"device={shown(device)} is no device: {why}") from None
    if named is not None and named.type == "meta":
        raise ConfigError("device='meta' has no memory to load into; name the device to load to")
    return named


@dataclass(slots=True)
class Rebuilder:
    """Makes values of tree nodes.

    A stored tensor takes memory once, however many nodes refer to it: a tree may name one a
    million times.

    Attributes:
        tensors: Stored tensors by index, as far as they were loaded.
        types: Classes the caller passed, for values saved by field.
        notes: What could not come back as its class.
        dtype: Element type for floating-point tensors that were loaded in their own
            because views refer to them; arrays and bytes keep theirs.
        kept: Stored tensors, by index, that keep theirs, too.
    """

    tensors: Mapping[int, torch.Tensor]
    types: Collection[type] = ()
    notes: list[str] = field(default_factory=list)
    dtype: torch.dtype | None = None
    kept: Collection[int] = ()
    _converted: dict[int | tuple[int, str, bool], torch.Tensor] = field(default_factory=dict)
    _bytes: dict[int, bytes] = field(default_factory=dict)

    def rebuild(self, fqn: str, node: Json, own: Sequence[type] = ()) -> Any:
        """Make the value of a node.

        Args:
            fqn: Its name.
            node: The node.
            own: Classes that may be built here beside `types`.

        Raises:
            FormatError: The node is not what `flatten` makes.
        """
        decoder = ObjectDecoder(self._leaf, named_types((*own, *self.types)), self.notes)
        return decoder.decode(fqn, node)

    def made_ahead(self, fqn: str, node: Json, own: Sequence[type] = ()) -> Json:
        """Make what in a node is made of no tensor, before these are there.

        Args:
            fqn: Its name.
            node: The node.
            own: As in `rebuild`, which takes what is given here.

        Raises:
            FormatError: The node is not what `flatten` makes.
            TargetError: A class does not take what is stored, or this machine lacks a zone.
        """
        decoder = ObjectDecoder(self._leaf, named_types((*own, *self.types)), self.notes)
        return made_ahead(decoder, fqn, node)

    def _leaf(self, fqn: str, node: Json) -> Any:
        tag = node[TAG]
        if type(tag) is int:
            return self._in_dtype(tag)
        if "t" in node:
            return self._referring(fqn, tag, node)
        if tag == RANKS_TAG:
            return self._own(fqn, node)
        return rebuild_word(fqn, node)

    def _referring(self, fqn: str, tag: object, node: Json) -> Any:
        """Make what is no tensor, and refers to one."""
        if tag == "view":
            return self._view(node)
        if tag == "np":
            return self._array(node)
        if tag == "bytes":
            return self._shared_bytes(node["t"])
        if tag == "bytearray":  # each has a tensor of its own: `read_tree` refuses another
            return bytearray(self._stored(node["t"]).numpy().data)
        raise _unknown(fqn, tag)

    def _own(self, fqn: str, node: Json) -> Any:
        """Make this rank's value of those that were kept for each rank; `None` for none."""
        if is_absent(node):
            self.notes.append(
                f"{fqn}: was kept for each rank and came back as None; this rank had no value"
                " when it was saved"
            )
            return None
        return self.rebuild(fqn, node["v"][0])

    def _stored(self, index: int) -> torch.Tensor:
        try:
            return self.tensors[index]
        except KeyError:
            raise FormatError(f"the tree refers to tensor {index}, which is not there") from None

    def _shared_bytes(self, index: int) -> bytes:
        """Give the bytes of a stored tensor, made once: nobody can change them."""
        if index not in self._bytes:
            self._bytes[index] = self._stored(index).numpy().tobytes()
        return self._bytes[index]

    def _in_dtype(self, index: int) -> torch.Tensor:
        """Give a stored tensor in the element type that was asked for, converted once."""
        tensor = self._stored(index)
        if self._keeps_type(index, tensor):
            return tensor
        if index not in self._converted:
            self._converted[index] = tensor.to(self.dtype)
        return self._converted[index]

    def _keeps_type(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether a stored tensor, or a view of it, has the element type that it is to have."""
        is_asked = self.dtype is not None and index not in self.kept
        return not is_asked or not is_convertible(tensor.dtype) or tensor.dtype == self.dtype

    def _view(self, node: Json) -> torch.Tensor:
        stored = self._stored(node["t"])
        view = view_of(stored, node)
        if self._keeps_type(node["t"], view):
            return view
        if view.dtype != stored.dtype or view.is_neg():
            return self._converted_view(stored, node)  # memory of several types: no longer tied
        base = self._in_dtype(node["t"])
        return base.as_strided(node["s"], node["r"], node["o"] // stored.itemsize)

    def _converted_view(self, stored: torch.Tensor, node: Json) -> torch.Tensor:
        """Convert what a view is of, once for each type of view, and view that: there may be many.

        Not the view: expanded, it is far larger than the memory that it spans.
        """
        is_neg = bool(node.get("neg"))
        # torch negates no numbers of less than two bytes, and can use no view that is to be so
        resolves = is_neg and self.dtype is not None and self.dtype.itemsize == 1
        key = node["t"], node["d"], resolves
        itemsize = DTYPES[node["d"]].itemsize
        if key not in self._converted:
            size = stored.nbytes // itemsize
            whole = {"d": node["d"], "o": 0, "s": [size], "r": [1], "neg": resolves}
            self._converted[key] = view_of(stored, whole).to(self.dtype)
        view = self._converted[key].as_strided(node["s"], node["r"], node["o"] // itemsize)
        return torch._neg_view(view) if is_neg and not resolves else view  # noqa: SLF001

    def _array(self, node: Json) -> np.ndarray[Any, Any]:
        dtype = numpy_dtype(node["d"])
        raw = self._stored(node["t"])
        flat = raw_bytes(raw).numpy()
        if flat.nbytes != numel(tuple(node["s"])) * dtype.itemsize:
            raise FormatError(f"an array {dtype} {node['s']} does not have {flat.nbytes} bytes")
        if not flat.nbytes:  # numpy.empty would make strings of one character of those of none
            return np.ndarray(node["s"], dtype)
        return flat.view(dtype).reshape(node["s"])


def _unknown(fqn: str, tag: object) -> FormatError:
    return FormatError(f"unknown tag {tag!r} at {fqn!r} in the manifest")


def view_of(base: torch.Tensor, node: Json) -> torch.Tensor:
    """Make the view that a `view` node describes, on the memory of `base`.

    Raises:
        FormatError: It reaches outside of `base`.
    """
    dtype = torch_dtype(node["d"])
    shape, strides, start = tuple(node["s"]), tuple(node["r"]), node["o"]
    itemsize = DTYPES[node["d"]].itemsize
    check_view(node, base.nbytes)
    view = torch.empty(0, dtype=dtype, device=base.device)
    offset = base.storage_offset() * base.itemsize + start
    view.set_(base.untyped_storage(), offset // itemsize, shape, strides)
    if node.get("conj"):
        view = view.conj()
    return torch._neg_view(view) if node.get("neg") else view  # noqa: SLF001  # the only maker


def rebuild_word(fqn: str, node: Json) -> Any:
    """Make a value of numpy's or torch's that refers to no tensor; for `ObjectDecoder`.

    Raises:
        FormatError: It is none.
    """
    tag = node[TAG]
    if tag == "npscalar":
        return numpy_scalar(node["d"], node["v"])
    if tag == "torch.Size":
        return torch.Size(size_of(node["v"]))
    if tag == "torch.dtype":
        return torch_dtype_word(node["v"])
    if tag == "torch.device":
        return _device_word(node["v"])
    raise _unknown(fqn, tag)


def torch_dtype_word(name: object) -> torch.dtype:
    """Give a `torch.dtype` that was saved as a value. Any of torch's, by name."""
    # not getattr: torch imports some of its modules when they are asked for by name
    value = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(value, torch.dtype):
        raise FormatError(f"torch {torch.__version__} has no dtype {name!r}")
    return value


def _device_word(name: object) -> torch.device:
    try:
        return torch.device(str(name))
    except RuntimeError as error:
        raise FormatError(f"bad device {name!r} in the manifest: {error}") from None
