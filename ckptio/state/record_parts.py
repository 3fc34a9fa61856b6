"""Parts in dataclasses and named tuples that an object has: those that would be lost are told.

These do not come back as those in lists do (see `parts`): what else follows from a field, its class
alone knows. So an object that gives such a part in its state, and has a state in its place
afterwards, is refused, and has the part again; where it gives none, that is noted. Else the part
would keep what it had, and nothing would say so.

What was rejected: to put parts into records as into lists. That took minutes where records refer to
what has them, and refused lists that had grown.
"""

from __future__ import annotations

import contextlib
from collections import deque
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptio.errors import TargetError
from ckptio.format.encode import join_fqn
from ckptio.format.fields import is_named_tuple, names_of
from ckptio.shards import PerRank, Shard
from ckptio.state.attributes import (
    CONTAINERS,
    DICTS,
    SELF_SAYING,
    Attribute,
    attributes_of,
    is_part,
    items_of,
)
from ckptio.state.leaves import SCALAR_TYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

#: Values that may hold others and are looked at in an object; longer lists and dicts hold no parts,
#: nor does what is deeper in an attribute.
_MAX_VALUES, _MAX_ITEMS, _MAX_STEPS = 10_000, 1_000, 16
#: What holds nothing.
_PLAIN = frozenset((*SCALAR_TYPES, bytes, torch.Tensor, torch.nn.Parameter))


class _Slot(NamedTuple):
    """A step to a field of a named tuple, which may come back as a tuple or as a dict."""

    number: int
    name: str


class _Kept(NamedTuple):
    """What restores a list, a deque or a dict."""

    container: Any
    items: Any

    def restore(self) -> None:
        """Have it hold again what it held."""
        self.container.clear()
        put = self.container.update if isinstance(self.container, dict) else self.container.extend
        put(self.items)


class _Was(NamedTuple):
    """What restores an attribute, or a field."""

    attribute: Attribute
    value: Any

    def restore(self) -> None:
        """Set it to what it was."""
        if self.attribute.read() is not self.value:
            self.attribute.write(self.value)


class _Found(NamedTuple):
    """A value in an attribute.

    Attributes:
        fqn: The name of its place.
        value: It.
        path: What leads to it, from the attribute on.
        held: The attribute, and each field of a dataclass, list and dict on the way, to restore.
        is_in_record: Whether it is in a record.
    """

    fqn: str
    value: Any
    path: tuple[Any, ...] = ()
    held: tuple[_Was | _Kept, ...] = ()
    is_in_record: bool = False


class RecordPart(NamedTuple):
    """A part in a record that an object has.

    Attributes:
        attribute: The attribute that leads to it.
        found: It, and where it was.
        is_given: Whether the object gives it, one like it, or what has it, in its state.
    """

    attribute: Attribute
    found: _Found
    is_given: bool

    def is_lost(self) -> bool:
        """Whether a state has taken its place."""
        now = self.attribute.read()
        for key in self.found.path:
            now = _at(now, key)
        return type(now) in DICTS

    def restore(self) -> None:
        """Set the attribute to what it was, and all on the way to the part."""
        for each in self.found.held:
            each.restore()


def parts_in_records(fqn: str, target: Any, template: Any) -> list[RecordPart]:
    """Note the parts that an object, and parts of it, have in records.

    Args:
        fqn: Its name.
        target: The object.
        template: What its `state_dict()` gives; `None` where it is not asked.
    """
    own: set[int] = set()
    parts = list(_parts_of(fqn, target, own))
    if not parts:
        return []
    given = [found.value for found in _Walk().parts_in(_Found("", template))]
    by_id = set(map(id, given))
    copies = {type(part) for part in given if id(part) not in own}
    return [
        RecordPart(attribute, found, id(top) in by_id or type(top) in copies)
        for attribute, found, top in parts
    ]


def tell_lost(parts: Sequence[RecordPart]) -> list[str]:
    """Look at an object that has taken its state.

    Returns:
        Notes for the report.

    Raises:
        TargetError: A part that it gives has a state in its place.
    """
    notes = []
    for part in filter(RecordPart.is_lost, parts):
        told = "has a state where there was an object that takes it; have load_state_dict() hand it"
        if part.is_given:
            raise TargetError(f"{part.found.fqn!r} {told} on, or leave it out with select=")
        notes.append(f"{part.found.fqn}: {told} on")
    return notes


def restore_lost(parts: Sequence[RecordPart]) -> None:
    """Set what is lost to what it was."""
    for part in list(filter(RecordPart.is_lost, parts)):
        part.restore()


def _parts_of(fqn: str, target: Any, own: set[int]) -> Iterator[tuple[Attribute, _Found, Any]]:
    """Give the parts in records of an object, or of its parts.

    Args:
        fqn: The name of the object.
        target: It.
        own: Takes the ids of all parts.

    Yields:
        The attribute, the part, and the object's own part that this is or is in.
    """
    walk, seen = _Walk(), set[int]()
    ahead = deque([(fqn, target, None)])
    while ahead:
        fqn, owner, top = ahead.popleft()
        if id(owner) in seen or isinstance(owner, SELF_SAYING):
            continue
        seen.add(id(owner))
        for attribute in attributes_of(owner):
            value = attribute.read()
            name = join_fqn(fqn, attribute.name)
            for found in walk.parts_in(_Found(name, value, held=(_Was(attribute, value),))):
                own.add(id(found.value))
                one = found.value if top is None else top
                if found.is_in_record:
                    yield attribute, found, one
                else:
                    ahead.append((found.fqn, found.value, one))


class _Walk:
    """Looks for parts in values, in so many in all."""

    def __init__(self) -> None:
        self._left = _MAX_VALUES

    def parts_in(self, start: _Found) -> Iterator[_Found]:
        """Give the parts in a value, those in records among them; none of a container twice."""
        seen, ahead = set[int](), deque([start])
        while ahead:
            found = ahead.popleft()
            if id(found.value) in seen:
                continue
            if is_part(found.value):
                yield found
            elif self._left > 0 and len(found.path) < _MAX_STEPS:
                inside: list[_Found] = []
                with contextlib.suppress(Exception):  # of a class that raises anything
                    inside += _inside(found)
                if inside:
                    seen.add(id(found.value))
                self._left -= len(inside)
                ahead += inside


def _inside(found: _Found) -> Iterator[_Found]:
    """Give what may hold others in a container or a record."""
    value = found.value
    if names := _fields_of(value):
        for attribute in attributes_of(value):
            if attribute.name in names:
                item = attribute.read()
                held = (*found.held, _Was(attribute, item))
                step = _step(found, attribute.name, attribute.name, item)
                yield step._replace(held=held, is_in_record=True)
    elif is_named_tuple(type(value)):
        for i, (name, item) in enumerate(zip(names_of(value), tuple.__iter__(value), strict=False)):
            yield _step(found, name, _Slot(i, name), item)._replace(is_in_record=True)
    elif type(value) in CONTAINERS and len(value) <= _MAX_ITEMS:
        held = found.held if type(value) is tuple else (*found.held, _Kept(value, copy(value)))
        for key, item in items_of(value):
            if type(item) not in _PLAIN:
                yield _step(found, key, key, item)._replace(held=held)


def _step(found: _Found, name: Any, key: Any, item: Any) -> _Found:
    return found._replace(fqn=join_fqn(found.fqn, name), value=item, path=(*found.path, key))


def _fields_of(value: Any) -> Collection[str]:
    """Name the fields of a dataclass, and those that it had to be made with; none of another."""
    fields = getattr(type(value), "__dataclass_fields__", None)
    return fields if type(fields) is dict and not isinstance(value, (PerRank, Shard)) else ()


def _at(value: Any, key: Any) -> Any:
    """Give what is at a place in a value now; `None` for nothing."""
    if type(value) in DICTS:
        return value.get(key.name if type(key) is _Slot else key)
    if isinstance(value, (list, tuple, deque)):
        index = key.number if type(key) is _Slot else key
        return value[index] if type(index) is int and index < len(value) else None
    attributes = attributes_of(value) if _fields_of(value) else ()
    return next((found.read() for found in attributes if found.name == key), None)
