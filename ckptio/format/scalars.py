"""Decode scalars that JSON has no form for, from the nodes that `format.encode` makes of them."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import re
import struct
import zoneinfo
from typing import TYPE_CHECKING, Any, TypeVar

from ckptio.errors import FormatError
from ckptio.format.encode import PATHS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio.format.encode import Json

Moment = TypeVar("Moment", dt.datetime, dt.time)
_ZONE_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,3}")


def _b64(node: Json) -> bytes:
    try:
        return base64.b64decode(node["v"], validate=True)
    except binascii.Error as error:
        raise FormatError(f"bad base64 in the manifest: {error}") from None


def _float(text: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


def _zone(node: Json) -> zoneinfo.ZoneInfo:
    key = node["z"]
    if not _ZONE_KEY.fullmatch(key):
        raise FormatError(f"bad time zone {key!r} in the manifest")
    try:
        return zoneinfo.ZoneInfo(key)
    except OSError as error:  # some versions of Python open a directory, say
        raise zoneinfo.ZoneInfoNotFoundError(key) from error


def _in_zone(value: Moment, node: Json) -> Moment:
    """Give a moment its fold, and its zone where ISO 8601 does not say all of it."""
    value = value.replace(fold=node["f"])
    if "z" in node:
        return value.replace(tzinfo=_zone(node))
    if "n" in node:
        offset = value.utcoffset()
        return value.replace(tzinfo=dt.timezone(offset, _text(node["n"])))  # type: ignore[arg-type]  # without an offset it raises
    return value


def _text(node: Json) -> str:
    """Give a string, which is an object where JSON cannot carry it."""
    if type(node) is str:
        return node
    text: str = SCALARS["str"](node)
    return text


def _timedelta(node: Json) -> dt.timedelta:
    days, seconds, microseconds = node["v"]
    return dt.timedelta(days, seconds, microseconds)


#: By tag; each raises one of `decode.BAD_VALUES`, or `FormatError`, for what is none.
SCALARS: dict[str, Callable[[Json], Any]] = {
    "int": lambda node: int(node["v"], 16),
    "float": lambda node: _float(node["v"]),
    "complex": lambda node: complex(_float(node["v"][:16]), _float(node["v"][16:])),
    "str": lambda node: _b64(node).decode("utf-8", "surrogatepass"),
    "bytes": _b64,
    "bytearray": lambda node: bytearray(_b64(node)),
    "date": lambda node: dt.date.fromisoformat(node["v"]),
    "datetime": lambda node: _in_zone(dt.datetime.fromisoformat(node["v"]), node),
    "time": lambda node: _in_zone(dt.time.fromisoformat(node["v"]), node),
    "timedelta": _timedelta,
    "path": lambda node: PATHS[node["k"]](_text(node["v"])),
}
