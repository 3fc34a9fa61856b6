"""Dataclasses and named tuples of a target: fields by name, in place where they can change.

And copies of containers that stand at two places of a target, and would have to hold two states.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ckptio._failures import raised
from ckptio.errors import TargetError
from ckptio.format.encode import TAG
from ckptio.format.fields import holds_objects, is_named_tuple, names_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptio.format.encode import Json


def record_tag(target: object) -> str | None:
    """Give the tag under which a value is saved by its fields, `None` if it is not."""
    if isinstance(target, tuple):
        return "namedtuple" if is_named_tuple(type(target)) else None
    if dataclasses.is_dataclass(target) and not isinstance(target, type):
        return "dataclass"
    return None


def tag_of(node: Json) -> object:
    """Give the tag of a node; `None` for one without."""
    return node.get(TAG) if type(node) is dict else None


def fields_of(target: Any) -> dict[str, Any]:
    """Give the fields of a record that are set, by name."""
    if isinstance(target, tuple):
        return dict(zip(names_of(target), target, strict=True))
    names = (field.name for field in dataclasses.fields(target))
    return {name: getattr(target, name) for name in names if hasattr(target, name)}


def with_fields(target: Any, values: Mapping[str, Any]) -> Any:
    """Give a record with some fields changed: itself, unless it is frozen or a tuple."""
    now = fields_of(target)
    changed = {name: value for name, value in values.items() if value is not now[name]}
    if not changed:
        return target
    if isinstance(target, tuple):
        return with_items(target, {**now, **changed}.values())
    if type(target).__dataclass_params__.frozen:
        target = copy.copy(target)
    for name in _cached_in(target):  # of other fields
        del vars(target)[name]
    # transformers' outputs have their fields as items, too, but for those that are None
    is_shown = isinstance(target, dict) and all(
        name in target for name, value in now.items() if value is not None
    )
    for name, value in changed.items():
        object.__setattr__(target, name, value)
        if isinstance(target, dict) and (name in target or (is_shown and now[name] is None)):
            put = OrderedDict if isinstance(target, OrderedDict) else dict
            put.__setitem__(target, name, value)
    if isinstance(target, OrderedDict):
        for name in filter(target.__contains__, now):  # indexed in this order
            target.move_to_end(name)
    return target


def with_items(target: Any, items: Iterable[Any]) -> Any:
    """Give a named tuple like `target` with other items. Its class may take something else."""
    made = tuple.__new__(type(target), items)
    if own := getattr(target, "__dict__", None):  # what its class gave it besides
        vars(made).update(own)
        for name in _cached_in(made):  # of other items
            del vars(made)[name]
    return made


def _cached_in(record: Any) -> list[str]:
    """Name the properties of which a record keeps the values, but for networks and the like."""
    cls, held = type(record), getattr(record, "__dict__", {})
    cached = [n for n in held if isinstance(getattr(cls, n, None), functools.cached_property)]
    return [name for name in cached if not holds_objects(held[name], record)]


def copied(fqn: str, container: Any) -> Any:
    """Copy a list, a dict or a dataclass, and nothing that it holds.

    Raises:
        TargetError: A class of the caller's does not let itself be copied.
    """
    try:
        return copy.copy(container)
    except Exception as error:  # of the caller's class, which raises anything
        raise TargetError(
            f"{fqn!r} is one {type(container).__name__} with another name of the target, has values"
            f" of its own in the checkpoint, and cannot be copied: {raised(error)}"
        ) from error
