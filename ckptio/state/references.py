"""What a tree says of tensors that it refers to: which members, and what may stand in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio.errors import FormatError
from ckptio.format.encode import TAG
from ckptio.format.manifest import MAX_DIMS, MAX_EXTENT
from ckptio.layout import DTYPES, numel

if TYPE_CHECKING:
    from ckptio.format.encode import Json

#: What a reference to a tensor has, and what it may have.
_REFERENCE_MEMBERS = {
    tag: ({TAG, "t", *members}, {TAG, "t", *members, *more})
    for tag, members, more in (
        ("bytes", "", ()), ("bytearray", "", ()), ("np", "ds", ()),
        ("view", "dosr", ("conj", "neg")),
    )
}  # fmt: skip
#: What torch negates; unsigned bytes, too.
_SIGNED = frozenset(
    (
        "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
        "complex32", "complex64", "complex128",
    )
)  # fmt: skip


def is_reference(tag: str, node: dict[str, Json], num_tensors: int, owned: set[int]) -> bool:
    """Whether a node with a tensor has the members of its tag, and no others.

    Notes in `owned` which tensor a `bytearray` is made of: no two may be made of one.
    """
    index, members = node["t"], _REFERENCE_MEMBERS.get(tag)
    if type(index) is not int or not 0 <= index < num_tensors:
        return False
    if members is None or not members[0] <= node.keys() <= members[1]:
        return False
    if tag == "bytearray":
        is_first = index not in owned
        owned.add(index)
        return is_first
    if tag == "np":
        return is_naturals(node["s"]) and type(node["d"]) is str
    if tag == "view":
        numbers = (node["s"], node["r"], [node["o"]])
        is_view = all(map(is_naturals, numbers)) and len(node["s"]) <= MAX_DIMS
        return is_view and _may_flip(str(node["d"]), node)
    return True


def _may_flip(dtype: str, node: Json) -> bool:
    """Whether torch has such a type, and conjugates and negates it if the view is to be so."""
    flips = [node[name] for name in ("conj", "neg") if name in node]
    if dtype not in DTYPES or any(type(flip) is not bool for flip in flips):
        return False
    if node.get("conj") and not dtype.startswith("complex"):
        return False
    return not node.get("neg") or dtype in _SIGNED


def is_naturals(value: Json) -> bool:
    """Whether a value is a list of numbers as extents, strides and indices are."""
    return type(value) is list and all(type(n) is int and 0 <= n < MAX_EXTENT for n in value)


def check_view(node: Json, base_nbytes: int) -> int:
    """Check that a view stays inside its base, and give the end of it in bytes.

    Raises:
        FormatError: It does not, or is no view at all.
    """
    itemsize = DTYPES[node["d"]].itemsize
    shape, strides, start = node["s"], node["r"], node["o"]
    numbers = [start, *shape, *strides]
    if (
        len(shape) != len(strides)
        or any(type(n) is not int or n < 0 or n >= 1 << 56 for n in numbers)
        or start % itemsize
    ):
        raise FormatError(f"a bad view in the manifest: {node}")
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else -1
    stop = int(start + (reach + 1) * itemsize)
    if stop > base_nbytes or numel(tuple(n for n in shape if n)) >= 1 << 56:
        raise FormatError(f"a view ends at byte {stop} of a tensor of {base_nbytes} bytes")
    return stop
