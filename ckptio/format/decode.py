"""Tagged JSON back to values; the other half of `format.encode`.

Only types of a fixed list are built. A recorded class name is compared with those of the
classes the caller passed, and never imported.
"""

from __future__ import annotations

import struct
import zoneinfo
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptio._failures import raised
from ckptio.errors import FormatError, TargetError
from ckptio.format.crowds import Crowd, crowd_error
from ckptio.format.encode import MAX_LEVELS, TAG, class_name, join_fqn
from ckptio.format.fields import CONTEXT, restore
from ckptio.format.scalars import SCALARS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ckptio.format.encode import Json

    DecodeLeaf = Callable[[str, Any], Any]

#: Whatever a value's own constructor says of a bad document.
BAD_VALUES = (
    KeyError, ValueError, TypeError, OverflowError, AttributeError,
    RecursionError, struct.error,
)  # fmt: skip
_CONTAINER_TAGS = frozenset(
    ("dict", "odict", "counter", "tuple", "set", "frozenset", "namedtuple", "dataclass", "enum")
)
#: Types of JSON whose values are themselves: no name is made for them, as there may be millions.
#: They are passed over in line, for each function is a frame of Python's at each of 201 levels.
_AS_IS = frozenset((int, float, str, bool, type(None)))


class Made(NamedTuple):
    """A value that was made ahead of its tensors, in the place of its node; see `ahead`."""

    value: Any


@dataclass
class ObjectDecoder:
    """Turns what `ObjectEncoder` made back into values.

    Attributes:
        decode_leaf: Called with name and node for tensors (`{"~": 7}`) and for tags that
            are not handled here. It returns a value, or raises `FormatError`.
        types: Classes that may be built, by `class_name`.
        notes: One line for each value that came back as a plain one because its class
            was not among `types`.
    """

    decode_leaf: DecodeLeaf
    types: Mapping[str, type] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _num_open_keys: int = 0

    def decode(self, fqn: str, node: Json) -> Any:
        """Decode a node of the tree, which is at `fqn`.

        Raises:
            FormatError: It is not what `ObjectEncoder` writes.
            TargetError: Keys are equal without their classes, which `types` lacks; a class does
                not take what is stored; or this machine does not know a time zone.
        """
        try:
            return self._decode(fqn, node, 0)
        except (FormatError, TargetError):
            raise
        except BAD_VALUES as error:
            raise FormatError(f"bad value in the manifest: {error!r}") from None

    def decode_key(self, fqn: str, node: Json) -> Any:
        """Decode a key of the mapping at `fqn`; it is hashable.

        Raises:
            FormatError: It is not what `ObjectEncoder` writes.
        """
        self._num_open_keys += 1
        try:
            key = self.decode(fqn, node)
            hash(key)
        except TypeError:
            raise FormatError(f"a key at {fqn!r} in the manifest that cannot be one") from None
        finally:
            self._num_open_keys -= 1
        return key

    def decode_versions(self, fqn: str, node: Json) -> OrderedDict[Any, dict[Any, Any]]:
        """Decode the versions of modules that the mapping at `fqn` has beside it.

        Raises:
            FormatError: It is not what `ObjectEncoder` writes.
        """
        self._num_open_keys += 1
        try:
            return _versions(self.decode(join_fqn(fqn, "_metadata"), node))
        finally:
            self._num_open_keys -= 1

    def _decode(self, fqn: str, node: Json, depth: int) -> Any:
        if depth > MAX_LEVELS:
            raise FormatError(f"values nested deeper than {MAX_LEVELS} in the manifest")
        if type(node) is dict:
            tag = node.get(TAG)
            if tag is None and TAG not in node:
                return {
                    key: item
                    if type(item) in _AS_IS and depth < MAX_LEVELS
                    else self._decode(join_fqn(fqn, key), item, depth + 1)
                    for key, item in node.items()
                }
            if type(tag) is str and "t" not in node:
                if tag in _CONTAINER_TAGS:
                    return self._container(tag, fqn, node, depth + 1)
                scalar = SCALARS.get(tag)
                if scalar is not None:
                    return self._scalar(scalar, fqn, node)
            if self._num_open_keys and (type(tag) is not str or "t" in node):
                raise FormatError(f"a tensor as a key at {fqn!r} in the manifest")
            return self.decode_leaf(fqn, node)
        if type(node) is list:
            return [
                item
                if type(item) in _AS_IS and depth < MAX_LEVELS
                else self._decode(join_fqn(fqn, i), item, depth + 1)
                for i, item in enumerate(node)
            ]
        return node.value if type(node) is Made else node

    def _scalar(self, make: Callable[[Json], Any], fqn: str, node: Json) -> Any:
        try:
            return make(node)
        except zoneinfo.ZoneInfoNotFoundError:  # a matter of this machine, and no damage
            raise TargetError(
                f"{fqn!r} is in the time zone {node['z']!r}, which this machine does not know;"
                " install tzdata, or leave it out with select="
            ) from None

    def _items(self, fqn: str, node: Json, depth: int) -> Iterable[tuple[Any, Any]]:
        """Give keys and values of a mapping, which is an object or a list of pairs."""
        value = node["v"]
        if type(value) is dict:
            return self._members(fqn, value.items(), depth)
        keys = self._keys(fqn, [key for key, _ in value], depth)
        items = (item for _, item in value)
        return self._members(fqn, zip(keys, items, strict=True), depth)

    def _members(
        self, fqn: str, pairs: Iterable[tuple[Any, Json]], depth: int
    ) -> Iterator[tuple[Any, Any]]:
        """Give the keys of a container, each with what is under it, decoded."""
        for key, item in pairs:
            if type(item) in _AS_IS and depth <= MAX_LEVELS:
                yield key, item
            else:
                yield key, self._decode(join_fqn(fqn, key), item, depth)

    def _keys(self, fqn: str, nodes: Sequence[Json], depth: int) -> Iterable[Any]:
        """Decode keys of one container, one after another, before anybody compares them."""
        crowd = Crowd(len(nodes))
        for node in nodes:
            key = self._key(fqn, node, depth)
            if crowd.is_over(key):
                raise crowd_error(fqn)
            yield key

    def _key(self, fqn: str, node: Json, depth: int) -> Any:
        """Decode a key, which holds no tensor. Whoever puts it into a container hashes it."""
        if type(node) in _AS_IS and depth <= MAX_LEVELS:
            return node
        self._num_open_keys += 1
        try:
            return self._decode(fqn, node, depth)
        finally:
            self._num_open_keys -= 1

    def _container(self, tag: str, fqn: str, node: Json, depth: int) -> Any:
        match tag:
            case "dict":
                return self._whole(fqn, node, dict(self._items(fqn, node, depth)))
            case "odict":
                return self._odict(fqn, node, depth)
            case "counter":
                return self._whole(fqn, node, Counter(dict(self._items(fqn, node, depth))))
            case "tuple":
                return tuple(self._sequence(fqn, node, depth))
            case "set" | "frozenset":
                make = set if tag == "set" else frozenset
                keys = self._keys(fqn, _list_of(node), depth)
                return self._whole(fqn, node, make(keys))
            case "namedtuple":
                return self._namedtuple(fqn, node, depth)
            case "dataclass":
                return self._dataclass(fqn, node, depth)
            case _:
                return self._enum(fqn, node, depth)

    def _odict(self, fqn: str, node: Json, depth: int) -> OrderedDict[Any, Any]:
        value = OrderedDict(self._items(fqn, node, depth))
        if "m" in node:
            metadata = _versions(self._key(join_fqn(fqn, "_metadata"), node["m"], depth))
            value._metadata = metadata  # type: ignore[attr-defined]  # noqa: SLF001  # as torch's
        return self._whole(fqn, node, value)  # type: ignore[no-any-return]

    def _whole(self, fqn: str, node: Json, value: Any) -> Any:
        """Give a container, unless keys that differed when it was saved are equal as decoded.

        Raises:
            FormatError: They are equal whatever their classes: no save writes that.
            TargetError: They are equal only without their classes.
        """
        if len(value) == len(node["v"]):
            return value
        is_set = node[TAG] in ("set", "frozenset")
        keys = [item if is_set else item[0] for item in node["v"]]
        if len(set(map(repr, keys))) < len(keys) or not any(map(self._lacks_class, keys)):
            raise FormatError(f"two equal keys in the {node[TAG]} at {fqn!r} in the manifest")
        raise TargetError(
            f"keys of the {node[TAG]} at {fqn!r} are equal as plain values; pass their"
            " classes in types="
        )

    def _lacks_class(self, node: Json) -> bool:
        """Whether anything in a node comes back as a plain value."""
        return any(name not in self.types for name in class_names_in(node))

    def _sequence(self, fqn: str, node: Json, depth: int) -> list[Any]:
        return [
            item
            if type(item) in _AS_IS and depth <= MAX_LEVELS
            else self._decode(join_fqn(fqn, i), item, depth)
            for i, item in enumerate(_list_of(node))
        ]

    def _namedtuple(self, fqn: str, node: Json, depth: int) -> Any:
        fields = dict(self._items(fqn, node, depth))
        cls = self._class_of(fqn, node, "a tuple")
        if cls is None:
            return tuple(fields.values())
        return self._build(fqn, cls, "a tuple", lambda: cls(**fields))

    def _dataclass(self, fqn: str, node: Json, depth: int) -> Any:
        fields = dict(self._items(fqn, node, depth))
        instead = "a tuple" if self._num_open_keys else "a dict"
        cls = self._class_of(fqn, node, instead)
        if cls is None:
            return _hashable(list(fields.values())) if self._num_open_keys else fields
        if hasattr(cls, "__tensor_unflatten__"):
            self._require_context(fqn, cls, dict(node["v"]).get(CONTEXT))
        return self._build(fqn, cls, instead, lambda: restore(cls, fields))

    def _require_context(self, fqn: str, cls: type, context: Json) -> None:
        """Refuse to make a tensor of others with plain values for what tells it what it is.

        It would be made without an error, and fail where it is used.
        """
        lacking = sorted({name for name in class_names_in(context) if name not in self.types})
        if lacking:
            raise TargetError(
                f"{fqn!r} is a tensor of class {class_name(cls)!r} that was saved with values of"
                f" {', '.join(map(repr, lacking))}: pass these in types=, too"
            )

    def _enum(self, fqn: str, node: Json, depth: int) -> Any:
        value = self._decode(fqn, node["v"], depth)
        cls = self._class_of(fqn, node, "its value")
        if cls is None:
            return _hashable(value) if self._num_open_keys else value
        return self._build(fqn, cls, "its value", lambda: cls(value))

    def _build(self, fqn: str, cls: type, instead: str, build: Callable[[], Any]) -> Any:
        """Let the caller's own class build a value, and name it when it will not."""
        try:
            return build()
        except Exception as error:  # the class is the caller's: whatever it raises is the cause
            raise misfit(fqn, cls, error, instead) from error

    def _class_of(self, fqn: str, node: Json, instead: str) -> type | None:
        name = node["c"]
        if type(name) is not str:
            raise FormatError(f"bad class name in the manifest: {name!r}")
        cls = self.types.get(name)
        if cls is None:
            self.notes.append(
                f"{fqn}: was a {node[TAG]} {name!r} and came back as {instead};"
                " pass the class in types= to get it back"
            )
        return cls


def misfit(fqn: str, cls: type, error: Exception, instead: str) -> TargetError:
    """Say that a class does not take what is stored, and as what that comes back without it."""
    return TargetError(
        f"{fqn!r} does not fit {class_name(cls)!r}: {raised(error)}; without the class in types="
        f" (or an object of it in the target, where None takes anything) it comes back as {instead}"
    )


def class_names_in(node: Json) -> Iterator[str]:
    """Name the classes of the records and enums in a node of a tree."""
    if type(node) is list:
        for item in node:
            yield from class_names_in(item)
    elif type(node) is dict and TAG not in node:
        yield from class_names_in(list(node.values()))
    elif type(node) is dict:
        if type(node.get("c")) is str:
            yield node["c"]
        yield from class_names_in(node.get("v"))


def _hashable(value: Any) -> Any:
    """Turn containers that cannot be keys into ones that can."""
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, set):
        return frozenset(value)
    return bytes(value) if isinstance(value, bytearray) else value


def _versions(found: Any) -> OrderedDict[Any, dict[Any, Any]]:
    """Give versions of modules as torch has them: of one with nothing else, a number is stored."""
    entries = found.items() if isinstance(found, dict) else [("", None)]
    versions = OrderedDict((k, {"version": v} if type(v) is int else v) for k, v in entries)
    if not all(isinstance(entry, dict) for entry in versions.values()):
        raise FormatError("bad versions of modules in the manifest")
    return versions


def _list_of(node: Json) -> list[Json]:
    value = node["v"]
    if type(value) is not list:
        raise FormatError(f"bad {node[TAG]} in the manifest")
    return value


def named_types(types: Collection[type]) -> dict[str, type]:
    """Index classes by the name under which they are recorded."""
    return {class_name(cls): cls for cls in types}
