"""The fields of dataclasses and of named tuples, by which they are saved, and come back."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections import deque
from typing import TYPE_CHECKING, Any

from ckptio.errors import UnsupportedLeafError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

#: Fields of a tensor that is made of others, beside those: what `__tensor_unflatten__` takes.
CONTEXT, SHAPE, STRIDES = _NO_PARTS = ("__context__", "__shape__", "__strides__")
#: One more, where it is what one rank holds of a DTensor: of which, and what part.
LAYOUT = "__layout__"
#: Where decorators say what a function takes, rightly or not.
_FOR_SIGNATURES = {"__signature__", "__wrapped__"}
#: What classes have whose objects hold elements: arrays and tensors.
_OF_ELEMENTS = ("__array__", "__setitem__")
#: And those with a state: objects that are saved; generators of random numbers.
_OF_OBJECTS = ("state_dict", "load_state_dict")
_OF_STATE = (
    _OF_OBJECTS,
    ("get_state", "set_state"),
    ("getstate", "setstate"),
    ("bit_generator",),
)
#: So many values are looked at, in an attribute that is no field, beside plain ones.
_MAX_LOOKED_AT = 10_000
_PLAIN = frozenset((int, float, str, bytes, bool, type(None)))
_END = object()


def is_named_tuple(cls: type) -> bool:
    """Whether a class is one of named tuples: its `_fields` are strings, in a tuple."""
    if not issubclass(cls, tuple):
        return False
    names = getattr(cls, "_fields", None)
    return type(names) is tuple and all(type(name) is str for name in names)


def names_of(value: Any) -> tuple[str, ...]:
    """Give the field names of a named tuple."""
    return tuple(value._fields)


def fields_of(value: Any) -> Iterable[tuple[str, Any]]:
    """Give the fields of a dataclass that are set: one with `init=False` may not be."""
    names = (f.name for f in dataclasses.fields(value))
    return ((name, getattr(value, name)) for name in names if hasattr(value, name))


def require_fields_alone(fqn: str, value: Any) -> None:
    """Refuse a record with state that is in none of its fields.

    A dataclass that is a container, too, with more in it; and attributes that are no fields and
    hold elements or a state. Plain ones are left out: they follow from the fields, as a rule.

    Raises:
        UnsupportedLeafError: It is such a one.
    """
    if (name := _attribute_with_state(value)) is not None:
        raise UnsupportedLeafError(
            fqn,
            f"a record of type {type(value).__name__}, of which {name!r} is no field, and would be"
            " left out",
            "make it a field, or give the class state_dict() and load_state_dict()",
        )
    if not dataclasses.is_dataclass(value):
        return
    if isinstance(value, dict):
        fields = dict(fields_of(value))
        is_more = any(name not in fields or fields[name] is not value[name] for name in value)
    else:
        is_more = isinstance(value, (list, tuple, set, frozenset, deque)) and bool(value)
    if is_more:
        raise UnsupportedLeafError(
            fqn,
            f"a dataclass of type {type(value).__name__} that holds more than its fields",
            "save what it holds beside it",
        )


def _attribute_with_state(value: Any) -> str | None:
    """Name an attribute of a record that is no field, is no cached property, and holds state."""
    fields = names_of(value) if isinstance(value, tuple) else value.__dataclass_fields__
    own_dict: dict[str, Any] = getattr(value, "__dict__", {})
    for name, item in own_dict.items():
        is_own = name in fields or isinstance(
            getattr(type(value), name, None), functools.cached_property
        )
        if not is_own and _holds(_has_elements_or_state, item, value):
            return name
    return None


def holds_objects(item: Any, owner: Any) -> bool:
    """Whether a value is, or holds, an object that is trained, or counts: it has a `state_dict()`.

    Args:
        item: The value.
        owner: The record that has it, as an attribute.
    """
    return _holds(_is_object, item, owner)


def _is_object(cls: type) -> bool:
    return all(hasattr(cls, name) for name in _OF_OBJECTS)


def _has_elements_or_state(cls: type) -> bool:
    kinds = (_OF_ELEMENTS, *_OF_STATE)
    return any(all(hasattr(cls, name) for name in names) for names in kinds)


def _holds(is_such: Callable[[type], bool], item: Any, owner: Any) -> bool:
    """Whether a value is, or holds, one of a class.

    Args:
        is_such: Whether a class is such a one.
        item: The value. What is in other objects than containers and records is not looked at,
            nor what comes behind many values that are not plain.
        owner: The record that has it, which is looked at itself.
    """
    seen = {id(owner)}
    ahead: list[Iterator[Any]] = [iter((item,))]
    known: dict[type, bool] = {}
    num_left = _MAX_LOOKED_AT
    while ahead and num_left:
        item = next(ahead[-1], _END)
        if item is _END:
            ahead.pop()
            continue
        cls = type(item)
        if cls in _PLAIN:  # of which there may be millions
            continue
        num_left -= 1
        if cls not in known:
            known[cls] = is_such(cls)
        if known[cls]:
            return True
        is_container = isinstance(item, (dict, list, tuple))
        if not is_container and (cls is type or not dataclasses.is_dataclass(item)):
            continue
        if id(item) not in seen and not isinstance(item, type):
            seen.add(id(item))
            if not is_container:
                ahead.append(held for _, held in fields_of(item))
            else:
                ahead.append(iter(item.values() if isinstance(item, dict) else item))
    return False


def require_fields(cls: Any, names: Collection[str]) -> None:
    """Check that a record takes fields of these names, as far as that shows before it is made.

    Args:
        cls: A dataclass, or a class of named tuples.
        names: The names.

    Raises:
        TypeError: It does not.
    """
    is_tuple = issubclass(cls, tuple)
    arguments = list(names) if is_tuple else _arguments(cls, names)
    make = cls.__new__ if is_tuple else cls.__init__
    # of what else makes it, nobody knows what that takes: decorators say what they like
    is_plain = type(make) is types.FunctionType and not vars(make).keys() & _FOR_SIGNATURES
    if is_plain and type(cls).__call__ is type.__call__:
        inspect.signature(make).bind(cls, **dict.fromkeys(arguments))


def _arguments(cls: Any, names: Collection[str]) -> list[str]:
    """Give the fields of a dataclass that its constructor takes.

    Raises:
        TypeError: It does not have one of these fields.
    """
    known = {f.name: f.init for f in dataclasses.fields(cls)}
    strangers = [name for name in names if name not in known]
    if strangers:
        raise TypeError(f"there is no field {strangers[0]!r}")
    return [name for name in names if known[name]]


def restore(cls: Any, fields: Mapping[str, Any]) -> Any:
    """Make a dataclass, or a tensor that is made of others, of its fields.

    A dataclass is made by its constructor; then every field is set as it was.

    Raises:
        TypeError: It does not have these fields.
    """
    if hasattr(cls, "__tensor_unflatten__"):
        parts = {name: part for name, part in fields.items() if name not in (*_NO_PARTS, LAYOUT)}
        return cls.__tensor_unflatten__(parts, *(fields[name] for name in _NO_PARTS))
    value = cls(**{name: fields[name] for name in _arguments(cls, fields)})
    for name, item in fields.items():
        object.__setattr__(value, name, item)  # whatever __post_init__ or a default made of it
    return value
