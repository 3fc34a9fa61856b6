"""What tests draw states from, and the one notion of equality they use: bit by bit."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import os
import pathlib
import struct
import warnings
import zoneinfo
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from ckptio.layout import DTYPES
from tests.rig import config_with

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Small slabs and buckets: a state of a megabyte has many of them. Nothing is synced.
SMALL = config_with(durability="none")

#: torch's element types that can be stored, in this version of torch.
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}

with warnings.catch_warnings():  # torch says once that complex32 is experimental
    warnings.simplefilter("ignore")
    torch.empty(1, dtype=torch.complex32)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Settings:
    rate: Any
    name: Any = "adam"


@dataclasses.dataclass(frozen=True)
class Key:
    layer: Any
    head: Any


class Color(enum.Enum):
    RED = "red"
    BLUE = (0, 0, 255)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


CLASSES: list[type] = [Point, Settings, Key, Color, Level]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Give the elements of a tensor in row-major order, bit by bit."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.itemsize]
    return plain.view(integer).contiguous().numpy().tobytes()


def fingerprint(value: Any) -> Any:  # noqa: C901  # one case a kind
    """Give something hashable that is equal for bit-equal values of the same types only."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), bytes_of(value))
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return ("scalar", value.dtype.str, value.tobytes())
    if isinstance(value, float):
        return ("float", kind, struct.pack(">d", value))
    if isinstance(value, complex):
        return ("complex", struct.pack(">2d", value.real, value.imag))
    if isinstance(value, enum.Enum):
        return ("enum", kind, value.name)
    if isinstance(value, dict):
        versions = fingerprint(getattr(value, "_metadata", None))
        return (kind, tuple((fingerprint(k), fingerprint(v)) for k, v in value.items()), versions)
    if isinstance(value, (set, frozenset)):
        return (kind, frozenset(map(fingerprint, value)))
    if isinstance(value, (list, tuple)):
        return (kind, tuple(map(fingerprint, value)))
    if dataclasses.is_dataclass(value):
        return (kind, tuple(fingerprint(getattr(value, f.name)) for f in dataclasses.fields(value)))
    if isinstance(value, dt.datetime | dt.time):
        zone = value.tzinfo
        key = zone.key if isinstance(zone, zoneinfo.ZoneInfo) else repr(zone)
        return (kind, value.isoformat(), value.fold, key)
    if isinstance(value, bytearray):
        return (kind, bytes(value))
    return (kind, value)


def assert_same(found: Any, expected: Any) -> None:
    """Fail unless both are of the same types and equal bit by bit."""
    if fingerprint(found) != fingerprint(expected):
        raise AssertionError(f"{found!r} is not bit for bit {expected!r}")


def random_tensor(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Make a tensor of random bits: NaNs with payloads, infinities and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape))


# float bits drawn as an integer: infinities, NaNs with payloads, zeros with signs
floats = st.floats() | st.integers(0, 2**64 - 1).map(
    lambda bits: struct.unpack(">d", struct.pack(">Q", bits))[0]
)
texts = st.text(max_size=8) | st.text(st.characters(categories=["Cs", "Cc", "L"]), max_size=4)
zones = st.sampled_from(
    [
        None,
        dt.UTC,
        dt.timezone(dt.timedelta(hours=-9, minutes=-30)),
        dt.timezone(dt.timedelta(seconds=1, microseconds=5)),
        dt.timezone(dt.timedelta(hours=1), "CET"),
        zoneinfo.ZoneInfo("Europe/Berlin"),
        zoneinfo.ZoneInfo("America/Argentina/Buenos_Aires"),
        zoneinfo.ZoneInfo("Etc/GMT+3"),
    ]
)
datetimes = st.builds(
    lambda at, zone, fold: at.replace(tzinfo=zone, fold=fold),
    st.datetimes(),
    zones,
    st.sampled_from([0, 1]),
)
times = st.builds(
    lambda at, zone, fold: at.replace(tzinfo=zone, fold=fold),
    st.times(),
    zones,
    st.sampled_from([0, 1]),
)
path_texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6)
paths = st.one_of(
    path_texts.map(pathlib.Path),
    path_texts.map(pathlib.PurePosixPath),
    path_texts.map(pathlib.PureWindowsPath),
    st.binary(max_size=4)
    .filter(lambda raw: b"\0" not in raw)
    .map(lambda raw: pathlib.Path(os.fsdecode(raw))),
)
#: Values that the format itself knows, without torch and numpy.
plain_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 300), max_value=1 << 300),
    floats,
    st.builds(complex, floats, floats),
    texts,
    st.dates(),
    times,
    datetimes,
    st.timedeltas(),
    paths,
    st.sampled_from([*Color, *Level]),
)


def keys_of(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Give what can be a key: these, and what is hashable and made of them."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=2).map(tuple),
            st.frozensets(inner, max_size=2),
            st.builds(Point, inner, inner),
            st.builds(Key, inner, inner),
        ),
        max_leaves=3,
    )


plain_keys = keys_of(st.one_of(texts, texts, plain_scalars, st.binary(max_size=4), st.just("~")))


def with_versions(state: dict[Any, Any], versions: Any) -> OrderedDict[Any, Any]:
    """Make what a module's `state_dict()` gives: its values, and versions beside them."""
    made = OrderedDict(state)
    made._metadata = versions  # type: ignore[attr-defined]
    return made


#: What modules say of their versions, and what else they might.
versions = st.dictionaries(
    plain_keys,
    st.builds(dict, version=st.integers()) | st.dictionaries(texts, plain_scalars, max_size=2),
    max_size=3,
).map(OrderedDict)


def containers(
    inner: st.SearchStrategy[Any], keys: st.SearchStrategy[Any] = plain_keys
) -> st.SearchStrategy[Any]:
    """Put values into every kind of container."""
    return st.one_of(
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(texts, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=2).map(OrderedDict),
        st.builds(with_versions, st.dictionaries(keys, inner, max_size=2), versions),
        st.dictionaries(texts, st.integers(), max_size=2).map(Counter),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(keys, max_size=3),
        st.frozensets(keys, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Settings, inner, inner),
    )


plain_states = st.recursive(
    plain_scalars | st.binary(max_size=8) | st.binary(max_size=8).map(bytearray),
    containers,
    max_leaves=8,
)

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any element type, shape, strides and bits."""
    dtype = TORCH_DTYPES[draw(st.sampled_from(sorted(TORCH_DTYPES)))]
    tensor = random_tensor(draw(shapes), dtype, draw(st.integers(0, 1 << 20)))
    how = draw(
        st.sampled_from(["plain", "plain", "transposed", "sliced", "expanded", "conj", "neg"])
    )
    if how == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1)
    if how == "sliced" and tensor.ndim > 0:
        return tensor[..., ::2]
    if how == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if how == "conj" and dtype in (torch.complex64, torch.complex128):
        return tensor.conj()
    if how == "neg" and dtype in (torch.complex64, torch.complex128):
        return tensor.conj().imag
    return tensor


array_dtypes = st.sampled_from(
    [
        "?", "u1", "i1", "<u2", ">u2", "<i4", ">i8", "<f2", ">f4", "<f8", ">c8", "<c16",
        "g", "S3", "<U2", ">U2", "<M8[ns]", ">M8[D]", "<m8[25s]", "<M8",
    ]
)  # fmt: skip


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Draw an array of any plain dtype, order and strides; read-only ones among them."""
    dtype = np.dtype(draw(array_dtypes))
    shape = draw(shapes)
    seed = draw(st.integers(0, 1 << 20))
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.random.default_rng(seed).integers(0, 100, count * dtype.itemsize, np.uint8)
    if dtype.kind == "U":
        letters = np.array(["a", "bc", "", "é"], dtype)
        array = letters[raw[:count] % 4].reshape(shape)
    elif dtype.kind == "b":
        array = (raw[:count] % 2).astype(bool).reshape(shape)
    else:
        array = raw.view(dtype).reshape(shape)
    match draw(st.sampled_from(["C", "F", "sliced", "read-only"])):
        case "F":
            return np.asfortranarray(array)
        case "sliced" if array.ndim:
            return array[..., ::2]
        case "read-only":
            array.flags.writeable = False
    return array


numpy_scalars = arrays().filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0])
torch_words = st.one_of(
    shapes.map(torch.Size),
    st.sampled_from([torch.float32, torch.qint8, torch.complex64]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")]),
)
#: Everything that can be a key.
keys = st.one_of(plain_keys, keys_of(st.one_of(numpy_scalars, torch_words, plain_scalars)))
leaves = st.one_of(
    tensors(),
    tensors(),
    arrays(),
    numpy_scalars,
    torch_words,
    plain_scalars,
    st.sampled_from([b"", b"x" * 1024, b"y" * 1025, bytearray(b"z" * 5000)]),
)
#: States of everything that can be saved.
states = st.recursive(leaves, lambda inner: containers(inner, keys), max_leaves=8)
