"""Say in what two checkpoints differ, of any known formats, in bounded memory.

Names are compared, and what has them. So a file of flat names may be equal to a nested state:
not every format keeps how a state is nested. For that reason kinds of containers that are not
empty are not compared (a tuple and a list, a dict and an `OrderedDict`), nor kinds of keys (`1`
and `"1"`). Only where several things have one name, as in `{"a.b": x, "a": {"b": y}}`, they are
told apart by their places in the state.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from ckptio.conversion.source import PART_NBYTES, Leaf, Source, parts_of, read_views
from ckptio.errors import FormatError
from ckptio.foreign.interface import notes_of
from ckptio.format.encode import TAG
from ckptio.format.words import numpy_dtype
from ckptio.layout import batches
from ckptio.runtime.solo import solo_engine
from ckptio.state.leaves import as_integers, raw_bytes
from ckptio.state.tree import MAPPING_TAGS, identity_of, items_of, keys_of, tensor_index

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    import numpy as np

    from ckptio.config import CheckpointConfig
    from ckptio.format.encode import Json
    from ckptio.runtime.core import EngineCore
    from ckptio.state.select import Select
    from ckptio.storage.resolve import PathLike

    #: A name; and the place, of what is not alone in having it.
    Key = tuple[str, tuple[Hashable, ...]]

Reason = Literal["kind", "dtype", "shape", "bits", "value"]
#: Elements that are compared as numbers of 64 bits at a time: 8 MiB.
_NUM_AT_ONCE = 1 << 20
#: Of numbers that torch knows, by numpy's word for their kind.
_MAX_NBYTES = {"f": 8, "c": 16}
#: The least number of 64 bits; what numpy stores for what is no time.
_LEAST = torch.iinfo(torch.int64).min
#: Characters of a value that are shown.
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A name under which two checkpoints have different things.

    Attributes:
        name: The name.
        reason: The first that differs of kind, dtype, shape, and bits or value.
        a: What the first has: a dtype, a shape or a value, in words.
        b: What the second has.
        num_elements: Elements of the tensor, where its bits differ.
        num_different: How many of them differ.
        largest: Largest absolute difference of two elements; `nan` where one of them alone is
            no number.
    """

    name: str
    reason: Reason
    a: str = ""
    b: str = ""
    num_elements: int = 0
    num_different: int = 0
    largest: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """In what two checkpoints differ.

    Attributes:
        only_a: Names that only the first has.
        only_b: Names that only the second has.
        differences: What both have, and differs; in the order of the first.
        num_same: Names under which both have the same.
        nbytes: Bytes of tensors that were compared, of one side.
        notes: What lies beside one of them and was not compared, a line each.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    differences: tuple[Difference, ...]
    num_same: int
    nbytes: int
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_a or self.only_b or self.differences)


def run_diff(
    a: PathLike,
    b: PathLike,
    *,
    select: Select | None = None,
    strips: tuple[str, str] = ("", ""),
    config: CheckpointConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Compare two checkpoints, bit by bit. Blocks.

    Args:
        a: A checkpoint of any known format.
        b: Another.
        select: Names to compare, as in `ckptio.load`.
        strips: Of each, take only what is below this name, and drop it from the names, as
            `strip=` of `convert` does; names to compare have lost it, too. All if empty.
        config: Options; the defaults if not given.
        progress: Called with bytes done and bytes in all.

    Raises:
        CheckpointError: One of them cannot be read, or has nothing below its name.
    """
    with solo_engine(config) as core:
        sides = _Side(core, a, select, strips[0]), _Side(core, b, select, strips[1])
        shared = sides[0].shared_names() | sides[1].shared_names()
        for side in sides:
            side.arrange(shared)
        return _Comparison(*sides, progress).report()


class _Side:
    """A checkpoint, by name.

    Attributes:
        leaves: Tensors, arrays and stored bytes.
        values: Everything else.
        keys: Of both.
    """

    def __init__(self, core: EngineCore, path: PathLike, select: Select | None, strip: str) -> None:
        self.source = Source(core, path, select, strip)
        self.source.check()
        self._found = list(_places("", self.source.tree, ()))
        self.leaves: dict[Key, Leaf] = {}
        self.values: dict[Key, Json] = {}
        self.keys: tuple[Key, ...] = ()
        tensors = self.source.manifest.tensors
        self._numbers = {tensor.name: number for number, tensor in enumerate(tensors)}

    def shared_names(self) -> set[str]:
        """Give the names that several things have."""
        return {
            name for name, count in Counter(name for name, _, _ in self._found).items() if count > 1
        }

    def arrange(self, shared: set[str]) -> None:
        """Give everything its key: a name, and the place where the name is `shared`."""
        tensors = self.source.manifest.tensors
        for name, place, node in self._found:
            key = (name or "state", place if name in shared else ())
            index = tensor_index(node)
            if index is None:
                self.values[key] = node
            else:
                self.leaves[key] = Leaf(key[0], tensors[index], node)
        self.keys = (*self.leaves, *self.values)

    def position(self, leaf: Leaf) -> int:
        """Say where a tensor is among those that are stored."""
        return self._numbers[leaf.entry.name]


@dataclass(slots=True)
class _Count:
    """Elements that differ, so far."""

    num_different: int = 0
    largest: float = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor, packed: np.dtype[Any] | None = None) -> None:
        """Compare two tensors of one type and shape, or with `packed` what two arrays hold."""
        a, b = a.reshape(-1), b.reshape(-1)
        if torch.equal(raw_bytes(a), raw_bytes(b)):
            return
        if packed is not None:
            a, b = (raw_bytes(side).reshape(-1, packed.itemsize) for side in (a, b))
        num_at_once = _NUM_AT_ONCE
        if packed is not None and packed.kind in "SU":  # of which each byte is compared
            num_at_once = max(1, _NUM_AT_ONCE // packed.itemsize)
        for start in range(0, len(a), num_at_once):
            self._add(a[start : start + num_at_once], b[start : start + num_at_once], packed)

    def _add(self, a: torch.Tensor, b: torch.Tensor, packed: np.dtype[Any] | None) -> None:
        bits = [raw_bytes(side).reshape(len(side), -1) for side in (a, b)]
        different = (bits[0] != bits[1]).any(1)
        self.num_different += int(different.sum())
        gap = _gap(a, b, packed, different)
        if gap.numel():
            found = float(gap.max())  # nan, if there is one
            if math.isnan(found) or not math.isnan(self.largest):
                self.largest = found if math.isnan(found) else max(found, self.largest)


class _Comparison:
    """A comparison of two checkpoints."""

    def __init__(self, a: _Side, b: _Side, progress: Callable[[int, int], None] | None) -> None:
        self._a, self._b = a, b
        self._progress = progress
        self._done = self._total = 0

    def report(self) -> DiffReport:
        """Compare everything."""
        a, b = self._a, self._b
        keys_a, keys_b = set(a.keys), set(b.keys)
        both = [key for key in a.keys if key in keys_b]
        found = {key: self._look(key) for key in both}
        alike = [key for key in both if found[key] is None and key in a.leaves]
        self._total = sum(a.leaves[key].nbytes for key in alike)
        for key, count in zip(alike, self._count(alike), strict=True):
            if count.num_different:
                found[key] = Difference(
                    name=key[0],
                    reason="bits",
                    num_elements=math.prod(a.leaves[key].shape),
                    num_different=count.num_different,
                    largest=count.largest,
                )
        differences = tuple(item for item in found.values() if item is not None)
        return DiffReport(
            only_a=tuple(key[0] for key in a.keys if key not in keys_b),
            only_b=tuple(key[0] for key in b.keys if key not in keys_a),
            differences=differences,
            num_same=len(both) - len(differences),
            nbytes=self._total,
            notes=(*notes_of(a.source.manifest), *notes_of(b.source.manifest)),
        )

    def _look(self, key: Key) -> Difference | None:
        """Compare what can be compared without reading tensors."""
        a, b = self._a, self._b
        name = key[0]
        if (key in a.leaves) != (key in b.leaves):
            kinds = ["a tensor" if key in side.leaves else "a value" for side in (a, b)]
            return Difference(name=name, reason="kind", a=kinds[0], b=kinds[1])
        if key in a.values:
            one, other = a.values[key], b.values[key]
            if msgspec.json.encode(one) == msgspec.json.encode(other):
                return None
            return Difference(name=name, reason="value", a=_short(one), b=_short(other))
        x, y = a.leaves[key], b.leaves[key]
        if _kind(x) != _kind(y):
            return Difference(name=name, reason="kind", a=_kind(x), b=_kind(y))
        if _dtype(x) != _dtype(y):
            return Difference(name=name, reason="dtype", a=_dtype(x), b=_dtype(y))
        if x.shape != y.shape:
            return Difference(name=name, reason="shape", a=str(list(x.shape)), b=str(list(y.shape)))
        return None

    def _count(self, keys: list[Key]) -> list[_Count]:
        """Compare the bits of tensors that are alike otherwise."""
        counts = [_Count() for _ in keys]
        a, b = self._a, self._b
        pairs = [(a.leaves[key], b.leaves[key]) for key in keys]
        plain = [n for n, (x, y) in enumerate(pairs) if x.is_plain and y.is_plain]
        parts = (part for n in plain for part in parts_of(pairs[n][0].entry, name=str(n)))
        for batch in batches(parts, PART_NBYTES):
            twins = [replace(part, entry=pairs[int(part.name)][1].entry) for part in batch]
            read = zip(a.source.read(batch), b.source.read(twins), strict=True)
            for part, (x, y) in zip(batch, read, strict=True):
                counts[int(part.name)].add(x, y)
            self._advance(sum(part.nbytes for part in batch))
        rest = sorted(
            set(range(len(keys))) - set(plain),
            key=lambda n: (a.position(pairs[n][0]), b.position(pairs[n][1])),
        )
        ones = read_views(a.source, [pairs[n][0] for n in rest])
        others = read_views(b.source, [pairs[n][1] for n in rest])
        for n, one, other in zip(rest, ones, others, strict=True):
            packed, _ = map(_packed, pairs[n])
            counts[n].add(one, other, packed)
            self._advance(pairs[n][0].nbytes)
        return counts

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _places(
    fqn: str, node: Json, place: tuple[Hashable, ...]
) -> Iterator[tuple[str, tuple[Hashable, ...], Json]]:
    """Give name, place and node of all that is no container, and of empty ones."""
    items = items_of(fqn, node)
    keys: list[Hashable] = []
    if items and type(node) is dict and node.get(TAG) in (None, *MAPPING_TAGS):
        keys = [identity_of(key) for key in keys_of(node)]
    for key, (name, item) in zip(keys or range(len(items)), items, strict=True):
        yield from _places(name, item, (*place, key))
    if not items:
        yield fqn, place, node


def _packed(leaf: Leaf) -> np.dtype[Any] | None:
    """Give the type of an array's elements; `None` for what is no array.

    Raises:
        FormatError: It does not have as many bytes as they need.
    """
    if leaf.node[TAG] != "np":
        return None
    dtype = numpy_dtype(leaf.node["d"])
    if leaf.entry.nbytes != math.prod(leaf.shape) * dtype.itemsize:
        nbytes = leaf.entry.nbytes
        raise FormatError(f"an array {dtype} {list(leaf.shape)} does not have {nbytes} bytes")
    return dtype


def _gap(
    a: torch.Tensor, b: torch.Tensor, packed: np.dtype[Any] | None, among: torch.Tensor
) -> torch.Tensor:
    """Say how far some elements are apart, or with `packed` those of arrays, rows of bytes."""
    if packed is not None and packed.itemsize > _MAX_NBYTES.get(packed.kind, packed.itemsize):
        return _wide_gap(a[among], b[among], packed)
    if packed is not None:
        a, b = _unpacked(a, packed), _unpacked(b, packed)
    x, y = _as_numbers(a)[among], _as_numbers(b)[among]
    gap = _between(x, y) if x.dtype is torch.int64 else (x - y).abs()
    if packed is not None and packed.kind in "mM":  # or no time, which numpy calls NaT
        gap[(x == _LEAST) | (y == _LEAST)] = math.nan
    gap[(x == y) | (x.isnan() & y.isnan())] = 0.0  # other bits of the same number
    return gap


def _wide_gap(a: torch.Tensor, b: torch.Tensor, dtype: np.dtype[Any]) -> torch.Tensor:
    """Say how far numbers are apart that torch does not know: rounded first, they may be equal."""
    import numpy as np  # noqa: PLC0415  # here already, as its type is

    x, y = (rows.numpy().view(dtype)[:, 0] for rows in (a, b))
    with np.errstate(over="ignore", invalid="ignore"):  # what is too large is infinite
        gap = np.abs(x - y).astype("f8")
    gap[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0  # other bits of the same number
    return torch.from_numpy(gap)


def _unpacked(rows: torch.Tensor, dtype: np.dtype[Any]) -> torch.Tensor:
    """Give an array's elements, a row of bytes each, as ones of torch; texts stay bytes."""
    if dtype.kind in "SU":
        return rows
    array = rows.numpy().view(dtype)[:, 0]
    if dtype.kind in "mM":  # a count since some day
        array = array.view(dtype.str[0] + "i8")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def _between(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Say how far integers of 64 bits are apart, which may be more than these hold."""
    gap = (torch.maximum(x, y) - torch.minimum(x, y)).to(torch.float64)
    return torch.where(gap < 0, gap + 2.0**64, gap)


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Give elements as numbers of the widest kind: whole, real or complex ones."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    tensor = as_integers(tensor)
    if tensor.dtype is torch.uint64:  # as far apart, and in the same order
        return tensor.view(torch.int64) ^ _LEAST
    if not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool:
        return tensor.to(torch.int64)
    try:
        return tensor.to(torch.float64)
    except (RuntimeError, NotImplementedError):  # packed types that torch cannot convert
        return tensor.view(torch.uint8).to(torch.float64)


def _kind(leaf: Leaf) -> str:
    tag = leaf.node[TAG]
    return {"np": "an array", "bytes": "bytes", "bytearray": "a bytearray"}.get(tag, "a tensor")


def _dtype(leaf: Leaf) -> str:
    return str(leaf.node["d"]) if leaf.node[TAG] == "np" else leaf.dtype


def _short(node: Json) -> str:
    text = msgspec.json.encode(node).decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
