"""The fields of dataclasses and of named tuples, by which they are saved."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any

from ckptio.errors import UnsupportedLeafError

if TYPE_CHECKING:
    from collections.abc import Iterable


def names_of(value: Any) -> tuple[str, ...]:
    """Give the field names of a named tuple."""
    return tuple(value._fields)


def fields_of(value: Any) -> Iterable[tuple[str, Any]]:
    """Give the fields of a dataclass that are set: one with `init=False` may not be."""
    names = (f.name for f in dataclasses.fields(value))
    return ((name, getattr(value, name)) for name in names if hasattr(value, name))


def require_fields_alone(fqn: str, value: Any) -> None:
    """Refuse a dataclass that is a container, too, with more in it than its fields."""
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
