"""Which tensors, arrays and scalars can be stored, and as what.

What this lets through comes back bit for bit, with its type; everything else is refused by its
name, with the way out, before anything is written. Pickle as the last resort was rejected: what
it writes only the same code reads, and whoever reads it runs what it says.
"""

from __future__ import annotations

import argparse
import base64
import collections
import decimal
import fractions
import functools
import io
import math
import random
import types
import uuid
from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ckptio._failures import raised
from ckptio._texts import shown
from ckptio.errors import ConfigError, UnsupportedLeafError
from ckptio.format.encode import TAG, ObjectEncoder, encode_plain_key, join_fqn
from ckptio.format.manifest import MAX_DIMS, MAX_EXTENT
from ckptio.format.words import numpy_scalar
from ckptio.layout import BIT_DTYPES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.format.encode import Json

#: torch's element types that can be stored, by name; fewer in older versions of torch.
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
#: What a document has without a tag, as it is.
SCALAR_TYPES = frozenset((int, float, str, bool, type(None)))
#: Exact types of Python's own.
PLAIN_TYPES = SCALAR_TYPES | {
    *(bytes, bytearray, complex, list, tuple, dict, set, frozenset),
    *(collections.OrderedDict, collections.Counter),
}
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
#: Kinds of numpy's element types that can be stored.
NUMPY_KINDS = "biufcSUmM"


def is_convertible(dtype: torch.dtype) -> bool:
    """Whether `dtype=` converts elements of a type: floating-point ones, each for itself."""
    return dtype.is_floating_point and not DTYPE_NAMES.get(dtype, "_x2").endswith("_x2")


def require_convertible(dtype: object) -> None:
    """Check what a caller gave as `dtype=`.

    Raises:
        ConfigError: It is no type of floating-point numbers.
    """
    if not (isinstance(dtype, torch.dtype) and is_convertible(dtype)):
        raise ConfigError(f"dtype= is a floating-point torch.dtype, not {shown(dtype)}")


def named_dtype(name: str) -> torch.dtype:
    """Give an element type by the name that it has in torch, for `dtype=`.

    Raises:
        ConfigError: There is none of floating-point numbers.
    """
    dtype = TORCH_DTYPES.get(name)
    if dtype is None or not is_convertible(dtype):
        known = ", ".join(name for name, dtype in TORCH_DTYPES.items() if is_convertible(dtype))
        raise ConfigError(f"dtype= is one of {known}, not {shown(name)}")
    return dtype


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View elements of bits as integers: torch can neither copy nor convert all of them."""
    if DTYPE_NAMES.get(tensor.dtype) not in BIT_DTYPES:
        return tensor
    return tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int16)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the row-major bytes of a tensor of the CPU; a copy only where they do not lie so."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if plain.numel() == 1:  # contiguous with any stride, and then no view of bytes
        plain = plain.as_strided((1,), (1,))
    return plain.reshape(-1).view(torch.uint8)


def plain_dtype(fqn: str, tensor: torch.Tensor) -> str:
    """Name the element type of a tensor whose memory can be read.

    Raises:
        UnsupportedLeafError: It has none that is dense and holds its elements.
    """
    cls = type(tensor)
    is_plain = cls is torch.Tensor or cls is torch.nn.Parameter
    if tensor.is_nested or (not is_plain and is_lazy(tensor)):
        raise _refusal(fqn, tensor)
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or not (
        tensor.is_cpu or tensor.is_cuda
    ):  # fmt: skip
        raise _refusal(fqn, tensor)
    if not is_plain and cls.__torch_dispatch__ != torch.Tensor.__torch_dispatch__:
        raise _refusal(fqn, tensor)
    return dtype


def require_extents(fqn: str, shape: Sequence[int], strides: Sequence[int] = ()) -> None:
    """Refuse shapes and strides beyond what a manifest can say, as views of little memory may have.

    Raises:
        UnsupportedLeafError: It has.
    """
    span = math.prod(extent or 1 for extent in shape)
    steps = [stride for extent, stride in zip(shape, strides, strict=False) if extent != 1]
    if len(shape) > MAX_DIMS:
        problem = f"{len(shape)} dimensions, and a checkpoint has {MAX_DIMS} at most"
        raise UnsupportedLeafError(fqn, problem, "save it in another shape")
    if span >= MAX_EXTENT or any(stride >= MAX_EXTENT for stride in steps):
        problem = f"a shape of {tuple(shape)} with strides of {tuple(strides)}, beyond 2**56"
        raise UnsupportedLeafError(fqn, problem, "save a part of it")


def way_out_of(value: object) -> str:
    """Say what to save instead of a value that has no portable form."""
    if type(value).__module__.partition(".")[0] == "omegaconf":
        return "save OmegaConf.to_container(..., resolve=True) of it"
    if isinstance(value, types.GeneratorType):
        taken = "dict" if value.__name__.startswith("named_") else "list"
        is_of_module = value.__name__.removeprefix("named_") in ("parameters", "buffers")
        return f"save {'the module, or ' * is_of_module}{taken}(...) of it"
    if isinstance(value, _FUNCTIONS) and getattr(value, "__name__", "") == "state_dict":
        return "call it, and save what it gives"
    for classes, way_out in _ways_out():
        if isinstance(value, classes):
            return way_out
    if callable(getattr(type(value), "to_dict", None)):
        return "save its to_dict()"
    return (
        "give it state_dict() and load_state_dict(), make it a dataclass, or save what it is"
        " made of"
    )


def failed_within(fqn: str, error: Exception) -> UnsupportedLeafError:
    """Say that the `state_dict()` of an object fails; it says itself what helps, if anything."""
    problem = f"its state_dict() fails: {raised(error)}"
    if "consolidate_state_dict" in problem:  # of a ZeroRedundancyOptimizer, of another rank
        way_out = (
            "call consolidate_state_dict(to=0) on all ranks, save what its state_dict() gives on"
            " rank 0, and leave it out on the others"
        )
        return UnsupportedLeafError(fqn, problem, way_out)
    return UnsupportedLeafError(fqn, problem, "do what that says, or leave it out")


def refused_within(fqn: str, owner: object, error: UnsupportedLeafError) -> UnsupportedLeafError:
    """Say of what an object's `state_dict()` gives whose it is: nobody else can save it otherwise.

    Args:
        fqn: The name of the object.
        owner: The object.
        error: What is wrong with a value of its state. What helps as it is stays as it is.
    """
    if not error.way_out.startswith(("save ", "give it ")):
        return error
    name = type(owner).__qualname__
    return UnsupportedLeafError(
        error.fqn,
        error.problem,
        f"it is in the state_dict() of the {name} {f'at {fqn!r}' if fqn else 'that is saved'}, and"
        f" has to be converted in that ({error.way_out}), and back before load_state_dict()",
    )


def _ways_out() -> tuple[tuple[tuple[type, ...], str], ...]:
    """Say what to save instead of values of some classes; numpy imports some of them for it."""
    return (
        ((argparse.Namespace, types.SimpleNamespace), "save vars(...) of it"),
        ((np.random.RandomState,), "save its get_state(), and give that to set_state()"),
        ((random.SystemRandom,), "leave it out: it has no state"),
        (
            (torch.Generator, random.Random, np.random.Generator),
            "save ckptio.RandomStates(...) of it, or its state by hand",
        ),
        ((np.random.BitGenerator,), "save its state"),
        ((np.ma.MaskedArray,), "save its data and its mask"),
        ((io.BytesIO, io.StringIO), "save its getvalue()"),
        ((*_FUNCTIONS, functools.partial), "save its name, or the object that has it"),
        ((type, types.ModuleType), "save its name"),
        ((Mapping,), "save dict(...) of it"),
        ((np.ndarray,), "save np.asarray(...) of it"),
        ((str, decimal.Decimal, fractions.Fraction, uuid.UUID), "save str(...) of it"),
        ((int,), "save int(...) of it"),
        ((float,), "save float(...) of it"),
        ((list, collections.deque, collections.UserList, range), "save list(...) of it"),
        ((KeysView, ValuesView, ItemsView, map, filter, zip), "save list(...) of it"),
    )


def as_bytes(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """View a contiguous array as a uint8 tensor, read-only memory included."""
    if not array.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_numpy(_writable(array.reshape(-1).view(np.uint8)))


@functools.lru_cache(maxsize=64)
def name_of(dtype: np.dtype[Any]) -> str:
    """Give numpy's name of an element type, which it takes 1.5 us to make each time."""
    return dtype.name


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """View an array as the tensor it is stored as, if torch knows such elements and strides.

    Read-only memory included, which whoever writes has to look for.
    """
    is_known = name_of(array.dtype) in TORCH_DTYPES and array.dtype.isnative
    if not is_known or not array.nbytes:
        return None
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        return None
    return torch.from_numpy(_writable(array))


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View an array as one that may be written to: torch warns of others, which it only reads."""
    if array.flags.writeable:
        return array
    interface = dict(array.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    return np.asarray(_Lender(interface, array))


class _Lender:
    """Lends an array's memory under another description, and keeps it alive."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self._owner = owner


def encode_scalar(fqn: str, value: np.generic) -> Json:
    """Encode a numpy scalar with its exact type and bytes.

    Raises:
        UnsupportedLeafError: It is none of numbers, strings and dates; or it is a string that
            Python has no string for, and a load would have to make one.
    """
    if value.dtype.kind not in NUMPY_KINDS:
        raise UnsupportedLeafError(
            fqn, f"a numpy scalar of dtype {value.dtype}", "save it as a Python value"
        )
    raw = base64.b64encode(value.tobytes()).decode("ascii")
    if value.dtype.kind == "U":
        try:
            numpy_scalar(value.dtype.str, raw)
        except UnicodeDecodeError:
            problem = "a numpy string with characters that Unicode does not have"
            raise UnsupportedLeafError(fqn, problem, "save it in an array") from None
    return {TAG: "npscalar", "d": value.dtype.str, "v": raw}


#: How to encode values of torch's that are words, by their exact types.
WORDS: dict[type, Callable[[str, Any], Json]] = {
    torch.Size: lambda _, size: {TAG: "torch.Size", "v": list(size)},
    torch.dtype: lambda _, dtype: {TAG: "torch.dtype", "v": str(dtype).removeprefix("torch.")},
    torch.device: lambda _, device: {TAG: "torch.device", "v": str(device)},
}


def encode_key_leaf(fqn: str, value: Any) -> Json:
    """Encode what `ObjectEncoder` has no type for and can be a key.

    Raises:
        UnsupportedLeafError: It has no portable form.
    """
    encode = WORDS.get(type(value))
    if encode is not None:
        return encode(fqn, value)
    if isinstance(value, np.generic):
        return encode_scalar(fqn, value)
    return encode_plain_key(fqn, value)


def encode_key(fqn: str, key: Any) -> Json:
    """Encode a key of the mapping at `fqn`.

    Raises:
        UnsupportedLeafError: It has no portable form.
    """
    encoder = ObjectEncoder(encode_key_leaf, encode_key_leaf=encode_key_leaf)
    return encoder.encode(join_fqn(fqn, key), key)


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
    is_told = hasattr(type(tensor), "__tensor_flatten__")
    return UnsupportedLeafError(
        fqn,
        f"a tensor subclass {type(tensor).__qualname__!r} may hold its data elsewhere",
        "save the plain tensors it is made of"
        + (", the attributes that its __tensor_flatten__() names" if is_told else ""),
    )
