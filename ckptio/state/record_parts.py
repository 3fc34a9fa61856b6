"""Parts in dataclasses and named tuples that an object has: those that would be lost are told.

These do not come back as those in lists do (see `parts`): what else follows from a field, its class
alone knows. So an object that gives such a part in its state, and has a state in its place
afterwards, is refused, and has the part again; where it gives none, that is noted. Else the part
would keep what it had, and nothing would say so.

What was rejected: to put parts into records as into lists. That took minutes where records refer to
what has them, and refused lists that had grown.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Values that are looked at in an object; longer lists and dicts hold no parts.
_MAX_VALUES, _MAX_ITEMS = 10_000, 1_000


class _Found(NamedTuple):
    """A value in an attribute.

    Attributes:
        fqn: The name of its place.
        value: It.
        path: What leads to it, from the attribute on.
        held: The attribute, each field of a dataclass on the way, and what these have.
        is_in_record: Whether it is in a record.
    """

    fqn: str
    value: Any
    path: tuple[Any, ...] = ()
    held: tuple[tuple[Attribute, Any], ...] = ()
    is_in_record: bool = False


class RecordPart(NamedTuple):
    """A part in a record that an object has.

    Attributes:
        found: It, and where it was.
        is_given: Whether the object gives it, one like it, or what has it, in its state.
    """

    found: _Found
    is_given: bool

    def is_lost(self) -> bool:
        """Whether a state has taken its place."""
        now = self.found.held[0][0].read()
        for key in self.found.path:
            now = _at(now, key)
        return type(now) in DICTS and now is not self.found.value

    def restore(self) -> None:
        """Set the attribute to what it was, and the fields on the way to the part."""
        for attribute, value in self.found.held:
            if attribute.read() is not value:
                attribute.write(value)


def parts_in_records(fqn: str, target: Any, template: Any) -> list[RecordPart]:
    """Note the parts that an object, and parts of it, have in records.

    Args:
        fqn: Its name.
        target: The object.
        template: What its `state_dict()` gives; `None` where it is not asked.
    """
    parts = list(_parts_of(fqn, target))
    if not parts:
        return []
    given = [found.value for found in _Walk().parts_in(_Found("", template))]
    by_id, kinds = set(map(id, given)), set(map(type, given))
    return [RecordPart(found, id(top) in by_id or type(top) in kinds) for found, top in parts]


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


def _parts_of(fqn: str, target: Any) -> Iterator[tuple[_Found, Any]]:
    """Give the parts in records of an object, or of its parts, and the part that each is in."""
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
            for found in walk.parts_in(_Found(name, value, held=((attribute, value),))):
                one = found.value if top is None else top
                if found.is_in_record:
                    yield found, one
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
            elif self._left > 0:
                inside = list(_inside(found))
                if inside:
                    seen.add(id(found.value))
                self._left -= len(inside)
                ahead += inside


def _inside(found: _Found) -> Iterator[_Found]:
    """Give what is in a container or a record."""
    value = found.value
    if _is_dataclass(value):
        names = {field.name for field in dataclasses.fields(value)}
        for attribute in attributes_of(value):
            if attribute.name in names:
                item = attribute.read()
                held = (*found.held, (attribute, item))
                yield _step(found, attribute.name, item)._replace(held=held, is_in_record=True)
    elif is_named_tuple(type(value)):
        for i, (name, item) in enumerate(zip(names_of(value), value, strict=False)):
            path = (*found.path, i)  # it may come back as a tuple
            yield _step(found, name, item)._replace(path=path, is_in_record=True)
    elif type(value) in CONTAINERS and len(value) <= _MAX_ITEMS:
        for key, item in items_of(value):
            yield _step(found, key, item)


def _step(found: _Found, key: Any, item: Any) -> _Found:
    return found._replace(fqn=join_fqn(found.fqn, key), value=item, path=(*found.path, key))


def _is_dataclass(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__dataclass_fields__") and kind not in (PerRank, Shard)


def _at(value: Any, key: Any) -> Any:
    """Give what is at a place in a value now; `None` for nothing."""
    if type(value) in DICTS:
        return value.get(key)
    if isinstance(value, (list, tuple, deque)):
        return value[key] if type(key) is int and key < len(value) else None
    attributes = attributes_of(value) if _is_dataclass(value) else ()
    return next((found.read() for found in attributes if found.name == key), None)
