"""Values that are no tensors, as short JSON.

The manifest has them as tagged JSON, exact but not for people: `{"~": "float", "v":
"7ff8000000000000"}`. Here they are written as what they are; types that JSON does not
have become strings, lists or objects. For exactness there is `--json`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ckptio.cli.text import count
from ckptio.errors import FormatError
from ckptio.format.decode import ObjectDecoder
from ckptio.format.encode import TAG
from ckptio.format.words import decode_word

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio.format.encode import Json

_MAX_ITEMS = 64  # of a container; what comes after them would not be shown
_MAX_HEX = 13  # a longer integer is shown in hexadecimal, as it is stored
_MAX_FLOAT_NBYTES = 8  # a longer one would lose digits
_ELLIPSIS = "..."


def short_json(node: Json, limit: int) -> str:
    """Write a node of a tree in at most about `limit` characters.

    What is longer ends in an ellipsis, and in how many items or characters there are. Never fails:
    of a tree that is nested too deep, the ellipsis is all that is written.
    """
    try:
        value = plain(node)
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:  # of a file that no save has written
        return _ELLIPSIS
    num_items = _num_items(node) if type(value) in (list, dict) else None
    if len(text) <= limit and (num_items is None or num_items <= _MAX_ITEMS):
        return text
    if num_items is not None:
        size = f" ({count(num_items, 'item')})"
    elif isinstance(value, str):
        size = f" ({count(len(value), 'character')})"
    else:
        size = ""
    start = text[: max(1, limit - len(size) - len(_ELLIPSIS))]
    return start.rstrip(", ") + _ELLIPSIS + size


def _num_items(node: Json) -> int | None:
    """Count the items of a container, of an enum too; `None` for a scalar."""
    while type(node) is dict and TAG in node:
        node = node.get("v")
    return len(node) if type(node) in (list, dict) else None


def plain(node: Json) -> Json:
    """Turn tagged JSON into plain JSON of the same meaning, as far as it goes.

    What is not understood stays as it is: this is for people to read, and damage is no error here.

    Raises:
        RecursionError: It is nested deeper than anything that a save writes.
    """
    if type(node) is list:
        return [plain(item) for item in node[:_MAX_ITEMS]]
    if type(node) is not dict:
        return node
    tag = node.get(TAG)
    if tag is None:
        return {key: plain(item) for key, item in list(node.items())[:_MAX_ITEMS]}
    read = _TAGS.get(tag) if type(tag) is str else None
    try:
        return node if read is None else read(node)
    except (KeyError, ValueError, TypeError, AttributeError, FormatError):
        return node


def _mapping(node: Json) -> Json:
    value = node["v"]
    if type(value) is dict:
        return plain({key: item for key, item in value.items() if key != TAG})
    return {_key(key): plain(item) for key, item in value[:_MAX_ITEMS]}


def _key(node: Json) -> str:
    """Write a key of a mapping; keys that are no strings as JSON."""
    value = plain(node)
    return value if type(value) is str else json.dumps(value, ensure_ascii=False)


def _int(node: Json) -> Json:
    digits = node["v"]
    if len(digits) <= _MAX_HEX:
        return int(digits, 16)
    return f"-0x{digits[1:]}" if digits.startswith("-") else f"0x{digits}"


def _scalar(node: Json) -> Any:
    """Read a scalar as a load would; nothing but values of a fixed list comes out."""
    return ObjectDecoder(decode_word).decode("", node)


def _float(node: Json) -> Json:
    value = _scalar(node)
    return value if value - value == 0 else str(value)  # JSON has no nan and no inf


def _numpy(node: Json) -> Json:
    import numpy as np  # noqa: PLC0415  # it is there, once there is a scalar

    value = _scalar(node)
    if value.dtype.kind in "biu" or (value.dtype.kind == "f" and np.isfinite(value)):
        return value.item() if value.dtype.itemsize <= _MAX_FLOAT_NBYTES else str(value)
    return str(value)


_TAGS: dict[str, Callable[[Json], Json]] = {
    "dict": _mapping,
    "odict": _mapping,
    "counter": _mapping,
    "namedtuple": _mapping,
    "dataclass": _mapping,
    "tuple": lambda node: plain(node["v"]),
    "set": lambda node: plain(node["v"]),
    "frozenset": lambda node: plain(node["v"]),
    "enum": lambda node: plain(node["v"]),
    "ranks": lambda node: plain(node["v"]),
    "absent": lambda _: None,
    "int": _int,
    "float": _float,
    "complex": lambda node: str(_scalar(node)),
    "str": _scalar,
    "bytes": lambda node: node["v"],
    "bytearray": lambda node: node["v"],
    "date": lambda node: node["v"],
    "datetime": lambda node: str(_scalar(node)),
    "time": lambda node: str(_scalar(node)),
    "timedelta": lambda node: str(_scalar(node)),
    "path": lambda node: str(_scalar(node)),
    "npscalar": _numpy,
    "torch.Size": lambda node: plain(node["v"]),
    "torch.dtype": lambda node: f"torch.{node['v']}",
    "torch.device": lambda node: node["v"],
}
