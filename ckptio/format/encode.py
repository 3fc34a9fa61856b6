"""Values that are no tensors, as tagged JSON.

Plain JSON stands for itself: null, true, false, strings, finite numbers, lists, and
dicts whose keys are strings. Everything else is an object with the tag `"~"`, from a
fixed list; an index instead of a tag, `{"~": 7}`, is a tensor of the manifest. Nothing
here can name a type to be imported or built: a saved class comes back as its class only
if the caller of `load` passes that class.

Pickle was rejected: reading it runs what it says. So was a schema for each kind of
state: a state is any nesting of what people put there.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
import math
import pathlib
import struct
import zoneinfo
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from ckptio.errors import UnsupportedLeafError
from ckptio.format.crowds import require_spread
from ckptio.format.fields import fields_of, is_named_tuple, names_of, require_fields_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    EncodeLeaf = Callable[[str, Any], Any]  # gives `Json`

#: An encoded value, which JSON can hold: None, bool, int, finite float, str, lists, and dicts
#: with str keys.
Json: TypeAlias = Any
TAG = "~"
#: Tag of a `PerRank` value: `"v"` has an entry for each rank, or that of one alone.
RANKS_TAG = "ranks"
#: How many containers may be inside each other; deeper states are refused. An enum counts as one
#: only if its value is another enum.
MAX_DEPTH = 100
#: How many values may be inside each other as they are read: containers, an enum in each of them,
#: and one value within.
MAX_LEVELS = 2 * MAX_DEPTH + 1
_MAX_PLAIN_INT = 1 << 53
_MAX_KEY_TEXT_DEPTH = 8
_DICT_TAGS: dict[type, str] = {OrderedDict: "odict", Counter: "counter"}
PATHS: dict[str, type[pathlib.PurePath]] = {
    "Path": pathlib.Path,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}


def join_fqn(parent: str, key: object) -> str:
    """Name the value under `key` of the container at `parent`.

    Strings and ints are joined as they are, as torch.distributed.checkpoint does; enums
    as their values; other keys by a text that is the same in every process, and for a
    key that comes back as a plain value.
    """
    while isinstance(key, enum.Enum):
        key = key.value
    part = key if type(key) is str else _key_text(key)
    return f"{parent}.{part}" if parent else part


def _key_text(key: Any, depth: int = 0) -> str:
    """Write a key as its `repr`; enums and records as their values, sets sorted."""
    if type(key) is int:
        return str(key) if abs(key) <= _MAX_PLAIN_INT else hex(key)  # linear for any length
    if isinstance(key, enum.Enum):
        return _key_text(key.value, depth)
    is_set = isinstance(key, (set, frozenset))
    if dataclasses.is_dataclass(key) and not isinstance(key, type):
        key = tuple(item for _, item in fields_of(key))
    if not is_set and not isinstance(key, (tuple, list)):
        return _word_text(key) if type(key).__module__ in ("numpy", "torch") else repr(key)
    if depth >= _MAX_KEY_TEXT_DEPTH:
        return "..."
    parts = [_key_text(item, depth + 1) for item in key]
    if is_set:
        return f"{{{', '.join(sorted(parts))}}}"
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _word_text(key: Any) -> str:
    """Write numpy's and torch's values short; their `repr` is another in other versions."""
    try:
        return str(key)
    except ValueError:  # numpy has no text for a datetime64 without a unit
        return str(key.tobytes().hex())


def class_name(cls: type) -> str:
    """Name a class for the record. Never used to import anything."""
    return f"{cls.__module__}:{cls.__qualname__}"


class ObjectEncoder:
    """Turns a nesting of values into JSON-ready ones.

    Args:
        encode_leaf: Called with name and value for what is not handled here (tensors,
            arrays, stateful objects). It returns JSON-ready values, or raises
            `UnsupportedLeafError`.
        by_type: Such functions by exact type. They are looked up first, which is faster.
        encode_key_leaf: Such a function for what is a key, or in one; `encode_plain_key` if not
            given.
    """

    def __init__(
        self,
        encode_leaf: EncodeLeaf,
        by_type: Mapping[type, EncodeLeaf] | None = None,
        encode_key_leaf: EncodeLeaf | None = None,
    ) -> None:
        self._encode_leaf = encode_leaf
        self._encode_key_leaf = encode_key_leaf or encode_plain_key
        self._open: set[int] = set()
        self._by_type = {**_PLAIN, **(by_type or {})}
        self._keys: ObjectEncoder | None = None

    def encode(self, fqn: str, value: Any) -> Json:
        """Encode `value`, which is at `fqn`.

        Raises:
            UnsupportedLeafError: It, or something in it, has no portable form.
        """
        encode = self._by_type.get(type(value))
        if encode is not None:
            return encode(fqn, value)
        encode_container = self._CONTAINERS.get(type(value))
        if encode_container is not None:
            return encode_container(self, fqn, value)
        if hasattr(type(value), "load_state_dict") and hasattr(type(value), "state_dict"):
            return self._encode_leaf(fqn, value)  # it stands for its state, whatever else it is
        if isinstance(value, enum.Enum):
            return self._encode_enum(fqn, value)
        if is_named_tuple(type(value)):
            require_fields_alone(fqn, value)
            return self._encode_record(
                fqn, "namedtuple", value, zip(names_of(value), value, strict=True)
            )
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            require_fields_alone(fqn, value)
            return self._encode_record(fqn, "dataclass", value, fields_of(value))
        if isinstance(value, pathlib.PurePath):
            return _encode_path(fqn, value)
        return self._encode_leaf(fqn, value)

    def _encode_dict(self, fqn: str, value: dict[Any, Any]) -> Json:
        self._enter(fqn, value)
        plain = TAG not in value and all(type(key) is str for key in value)
        try:
            plain = plain and all(key.isascii() or _is_utf8(key) for key in value)
            encoded: Json
            if plain:
                prefix = f"{fqn}." if fqn else ""
                encoded = {key: self.encode(prefix + key, item) for key, item in value.items()}
            else:
                encoded = [
                    [self._encode_key(fqn, key), self.encode(join_fqn(fqn, key), item)]
                    for key, item in value.items()
                ]
                require_spread(fqn, value, [key for key, _ in encoded])
        finally:
            self._open.discard(id(value))
        tag = _DICT_TAGS.get(type(value))
        if tag is None:
            return encoded if plain else {TAG: "dict", "v": encoded}
        metadata = getattr(value, "_metadata", None)
        if metadata is None or tag != "odict":
            return {TAG: tag, "v": encoded}
        return {TAG: tag, "v": encoded, "m": self._encode_metadata(fqn, metadata)}

    def _encode_metadata(self, fqn: str, metadata: Any) -> Json:
        """Encode what a module's `state_dict()` says of versions; mostly a number for each."""
        name = join_fqn(fqn, "_metadata")
        if not isinstance(metadata, dict) or not all(
            isinstance(v, dict) for v in metadata.values()
        ):
            raise UnsupportedLeafError(
                name, "versions of modules are dicts in a dict", "delete the attribute"
            )
        short = {key: _version_in(entry) for key, entry in metadata.items()}
        if (
            TAG not in short
            and all(type(version) is int for version in short.values())
            and all(type(key) is str and key.isascii() for key in short)
        ):
            return short  # there are thousands
        try:
            return self._plain.encode(name, short)
        except UnsupportedLeafError as error:
            raise UnsupportedLeafError(
                error.fqn,
                "versions of modules have plain values alone",
                "put it into the state, or delete it there",
            ) from error

    def _encode_key(self, fqn: str, key: Any) -> Json:
        """Encode what has to be hashable: a key of a dict, or an element of a set."""
        return self._plain.encode(join_fqn(fqn, key), key)

    @property
    def _plain(self) -> ObjectEncoder:
        """The encoder of values without tensors."""
        if self._keys is None:
            keys = ObjectEncoder(self._encode_key_leaf, None, self._encode_key_leaf)
            keys._open = self._open  # depth counts through keys
            self._keys = keys
        return self._keys

    def _encode_list(self, fqn: str, value: Sequence[Any]) -> Json:
        self._enter(fqn, value)
        try:
            prefix = f"{fqn}." if fqn else ""
            return [self.encode(f"{prefix}{i}", item) for i, item in enumerate(value)]
        finally:
            self._open.discard(id(value))

    def _encode_tuple(self, fqn: str, value: tuple[Any, ...]) -> Json:
        return {TAG: "tuple", "v": self._encode_list(fqn, value)}

    def _encode_set(self, fqn: str, value: set[Any] | frozenset[Any]) -> Json:
        self._enter(fqn, value)
        try:
            items = [self._encode_key(fqn, item) for item in value]
            require_spread(fqn, value, items)
        finally:
            self._open.discard(id(value))
        items.sort(key=msgspec.json.encode)  # sets have no order; files of equal states are equal
        return {TAG: type(value).__name__, "v": items}

    def _encode_enum(self, fqn: str, value: enum.Enum) -> Json:
        if is_nested := isinstance(value.value, enum.Enum):
            self._enter(fqn, value)
        try:
            inner = self.encode(fqn, value.value)
        finally:
            if is_nested:
                self._open.discard(id(value))
        return {TAG: "enum", "c": class_name(type(value)), "v": inner}

    def _encode_record(
        self, fqn: str, tag: str, value: Any, fields: Iterable[tuple[str, Any]]
    ) -> Json:
        self._enter(fqn, value)
        try:
            items = [[name, self.encode(join_fqn(fqn, name), item)] for name, item in fields]
        finally:
            self._open.discard(id(value))
        return {TAG: tag, "c": class_name(type(value)), "v": items}

    def _enter(self, fqn: str, value: Any) -> None:
        """Mark a container as open; refuse one that contains itself, or is too deep."""
        if id(value) in self._open:
            raise UnsupportedLeafError(
                fqn, "a container contains itself", "save a tree; refer to other parts by name"
            )
        if len(self._open) >= MAX_DEPTH:
            raise UnsupportedLeafError(
                fqn, f"more than {MAX_DEPTH} containers inside each other", "flatten the state"
            )
        self._open.add(id(value))

    #: Not bound to an encoder: that would refer to itself then, and keep the tensors that
    #: leaves refer to until Python collects garbage.
    _CONTAINERS: ClassVar[dict[type, Callable[[ObjectEncoder, str, Any], Json]]] = {
        dict: _encode_dict,
        OrderedDict: _encode_dict,
        Counter: _encode_dict,
        list: _encode_list,
        tuple: _encode_tuple,
        set: _encode_set,
        frozenset: _encode_set,
    }


def encode_bytes(value: bytes | bytearray) -> Json:
    """Encode bytes inside the document itself."""
    return {TAG: type(value).__name__, "v": base64.b64encode(value).decode("ascii")}


def encode_plain_key(fqn: str, value: Any) -> Json:
    """Encode what `ObjectEncoder` has no type for and can be a key: bytes, and nothing else.

    Raises:
        UnsupportedLeafError: It is something else.
    """
    if type(value) is bytes:
        return encode_bytes(value)
    raise UnsupportedLeafError(
        fqn,
        f"a key of type {type(value).__name__} has no portable form",
        "use strings, numbers, bytes, tuples, enums, paths or dates as keys",
    )


def _as_is(_: str, value: Json) -> Json:
    return value


def _is_utf8(text: str) -> bool:
    """Whether `text` has no lone surrogates, which JSON cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_str(_: str, value: str) -> Json:
    if value.isascii() or _is_utf8(value):
        return value
    raw = value.encode("utf-8", "surrogatepass")
    return {TAG: "str", "v": base64.b64encode(raw).decode("ascii")}


def _encode_int(_: str, value: int) -> Json:
    if -_MAX_PLAIN_INT <= value <= _MAX_PLAIN_INT:
        return value
    return {TAG: "int", "v": f"{value:x}"}  # hexadecimal: linear time for any length


def _encode_float(_: str, value: float) -> Json:
    return value if math.isfinite(value) else {TAG: "float", "v": _pack(value)}


def _pack(value: float) -> str:
    """Write a float's 8 bytes in hexadecimal: NaN payloads and signs included."""
    return struct.pack(">d", value).hex()


def _encode_datetime(fqn: str, value: dt.datetime | dt.time) -> Json:
    zone = value.tzinfo
    document: Json = {TAG: type(value).__name__, "f": value.fold}
    if isinstance(zone, zoneinfo.ZoneInfo) and zone.key is not None:
        document["z"] = zone.key
        value = value.replace(tzinfo=None)
    elif zone is not None and type(zone) is not dt.timezone:
        raise UnsupportedLeafError(
            fqn, f"a time zone of type {type(zone).__name__}", "use datetime.timezone or zoneinfo"
        )
    elif zone is not None and zone.tzname(None) != dt.timezone(zone.utcoffset(None)).tzname(None):
        document["n"] = _encode_str(fqn, zone.tzname(None))  # ISO 8601 has the offset alone
    document["v"] = value.isoformat()
    return document


def _encode_path(fqn: str, value: pathlib.PurePath) -> Json:
    kind = "Path" if isinstance(value, pathlib.Path) else type(value).__name__
    if kind not in PATHS:
        raise UnsupportedLeafError(fqn, f"a path of type {type(value).__name__}", "use pathlib's")
    return {TAG: "path", "k": kind, "v": _encode_str(fqn, str(value))}


def _version_in(entry: dict[Any, Any]) -> Any:
    """Give the version that a module says, if it says nothing else; or all that it says."""
    version = entry.get("version")
    is_all = len(entry) == 1 and type(version) is int and abs(version) <= _MAX_PLAIN_INT
    return version if is_all else entry


_PLAIN: dict[type, EncodeLeaf] = {
    type(None): _as_is,
    bool: _as_is,
    str: _encode_str,
    int: _encode_int,
    float: _encode_float,
    complex: lambda _, v: {TAG: "complex", "v": _pack(v.real) + _pack(v.imag)},
    dt.datetime: _encode_datetime,
    dt.time: _encode_datetime,
    dt.date: lambda _, v: {TAG: "date", "v": v.isoformat()},
    dt.timedelta: lambda _, v: {TAG: "timedelta", "v": [v.days, v.seconds, v.microseconds]},
}
