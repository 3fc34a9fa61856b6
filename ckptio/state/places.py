"""Where an object has parts, noted before it takes its state, and what is there afterwards.

A part is what takes a state itself: in attributes, in the lists, tuples and dicts there, and in
attributes of other parts.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptio.format.encode import MAX_DEPTH, join_fqn
from ckptio.state.attributes import CONTAINERS, DICTS, SELF_SAYING, attributes_of, is_part, items_of
from ckptio.state.record_parts import parts_in_records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptio.state.attributes import Attribute
    from ckptio.state.record_parts import RecordPart

#: Lists and dicts of more among an object's attributes, or in more of each other, hold no parts,
#: but samples or the like; some are inside themselves.
_MAX_PARTS, _MAX_DEPTH = 1000, 4
#: What is found where a list or a dict has no such place any more.
LOST = object()


class Place(NamedTuple):
    """A place where a part was, or where there is a state for which there was no part.

    Attributes:
        fqn: Its name.
        part: What was there; `None` for a state without a part.
        found: What is there now: `LOST` if its list or dict has no such place any more, `None` if
            that is no such list or dict any more.
        path: What leads to it, from the attribute on.
    """

    fqn: str
    part: Any
    found: Any
    path: tuple[Any, ...] = ()


class HeldParts(NamedTuple):
    """An attribute whose value is a part, or holds some.

    Attributes:
        fqn: Its name.
        attribute: The attribute.
        value: What it had before; its lists, tuples and dicts are copies.
        depth: 0 for an attribute of the object, 1 for one of its parts, and so on.
        is_given: Whether the `state_dict()` of the object gives the parts themselves, or copies.
        original: The very value that it had.
        contents: Each list and dict in that, with a copy of it.
    """

    fqn: str
    attribute: Attribute
    value: Any
    depth: int
    is_given: bool
    original: Any
    contents: list[tuple[Any, Any]]

    def restore(self) -> None:
        """Set it to what it was: the very lists and dicts, as others may have them."""
        for container, items in self.contents:
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(items)
        self.attribute.write(self.original)

    def places(self) -> list[Place]:
        """Give the places of its parts, and of states without a part, as they are now."""
        return list(places_in(self.fqn, self.value, self.attribute.read()))


class Before(NamedTuple):
    """What an object had, and what it is given.

    Attributes:
        target: The object.
        values: What it is given, containers copied.
        states: The dicts in that.
        unnamed: Those of them that are not under the name of an attribute.
        held: The attributes with parts, those of its parts after its own.
        is_asked: Whether it was asked what it gives.
        in_records: The parts in records, which do not come back.
    """

    target: Any
    values: Any
    states: list[Any]
    unnamed: list[Any]
    held: list[HeldParts]
    is_asked: bool
    in_records: list[RecordPart]


def before_taking(fqn: str, target: Any, values: Any, template: Any = None) -> Before:
    """Note the parts of an object that take states themselves, and the parts of those.

    Args:
        fqn: Its name.
        target: The object; modules and optimizers say themselves what they take.
        values: What it is given.
        template: What its `state_dict()` gives; `None` where it is not asked.
    """
    held, is_asked = list(_held_by(fqn, target, template)), template is not None
    in_records = parts_in_records(fqn, target, template)
    if not held:
        return Before(target, None, [], [], [], is_asked, in_records)
    names = {attribute.name for attribute in attributes_of(target)}
    names |= {name.strip("_") for name in names}
    others = [value for key, value in items_of(values) if key not in names]
    unnamed = [state for value in others for state in dicts_in(value)]
    states = list(dicts_in(values))
    return Before(target, _copied(values), states, unnamed, held, is_asked, in_records)


def _held_by(fqn: str, target: Any, template: Any) -> Iterator[HeldParts]:
    if isinstance(target, SELF_SAYING):
        return
    own = {id(part) for attribute in attributes_of(target) for part in _parts_in(attribute.read())}
    given = [part for value in _values_of(template) for part in _parts_in(value, _MAX_DEPTH + 1)]
    by_id = set(map(id, given))
    copies = {type(part) for part in given if id(part) not in own}
    seen: set[int] = set()
    ahead = deque([(fqn, target, 0, False)])
    while ahead:
        fqn, owner, depth, is_below = ahead.popleft()
        if isinstance(owner, SELF_SAYING) or id(owner) in seen:
            continue
        seen.add(id(owner))
        found = [(attribute, attribute.read()) for attribute in attributes_of(owner)]
        for attribute, value in sorted(found, key=lambda pair: not is_part(pair[1])):
            parts = list(_parts_in(value))
            if parts:
                is_given = is_below or any(id(p) in by_id or type(p) in copies for p in parts)
                name = join_fqn(fqn, attribute.name)
                contents = [(each, _like(each, each)) for each in _lists_in(value)]
                held = HeldParts(name, attribute, _copied(value), depth, is_given, value, contents)
                yield held
                ahead += [(place.fqn, place.part, depth + 1, is_given) for place in held.places()]


def _values_of(template: Any) -> list[Any]:
    """Give what is in a state, each of which takes its own time; itself if it is no container."""
    return [value for _, value in items_of(template)] or [template]


def places_in(
    fqn: str, before: Any, after: Any, path: tuple[Any, ...] = (), depth: int = _MAX_DEPTH
) -> Iterator[Place]:
    """Give each place of a part in a value, and what is there in what the value has become.

    Parts come in the order in which they were, whatever that is.
    """
    if is_part(before):
        yield Place(fqn, before, after, path)
        return
    if not depth or not has_parts(before, depth):
        return
    is_alike = type(after) in CONTAINERS and (type(after) in DICTS) == (type(before) in DICTS)
    is_there = is_alike and bool(after)  # else something else altogether
    found = dict(items_of(after)) if is_there else {}
    lost = LOST if is_there or after is LOST else None
    for key, value in items_of(before):
        place = join_fqn(fqn, key), value, found.pop(key, lost), (*path, key)
        yield from places_in(*place, depth - 1)
    for key, value in found.items():
        if any(True for _ in dicts_in(value)):
            yield Place(join_fqn(fqn, key), None, value, (*path, key))


def _parts_in(value: Any, max_depth: int = _MAX_DEPTH) -> Iterator[Any]:
    """Give what takes a state in a value: itself, or what is in lists, tuples and dicts."""
    left, ahead = _MAX_PARTS, [(value, max_depth)]
    while ahead:
        item, depth = ahead.pop()
        if type(item) not in CONTAINERS:
            if is_part(item):
                yield item
        elif depth and len(item) <= left:
            left -= len(item)
            ahead += [(each, depth - 1) for _, each in items_of(item)]


def dicts_in(value: Any) -> Iterator[Any]:
    """Give what may be the state of a part in a value: dicts, as far as parts are looked for."""
    if type(value) in DICTS:
        yield value
    for _, each in items_of(value):  # a history takes its own time
        left, ahead = _MAX_PARTS, [(each, 2 * _MAX_DEPTH)]  # states of parts have those of others
        while ahead:
            item, depth = ahead.pop()
            if type(item) in DICTS:
                yield item
            if type(item) in CONTAINERS and depth and len(item) <= left:
                left -= len(item)
                ahead += [(one, depth - 1) for _, one in items_of(item)]


def has_parts(value: Any, max_depth: int = _MAX_DEPTH) -> bool:
    """Whether a value is a part, or has some."""
    return any(True for _ in _parts_in(value, max_depth))


def _copied(value: Any, depth: int = _MAX_DEPTH, longest: float = _MAX_PARTS) -> Any:
    """Copy the containers of a value, which may be written to, as far as they are looked into."""
    if type(value) not in CONTAINERS or not depth or len(value) > longest:
        return value
    items = [(key, _copied(item, depth - 1, longest)) for key, item in items_of(value)]
    return _like(value, items if isinstance(value, dict) else [item for _, item in items])


def put_at(attribute: Attribute, path: tuple[Any, ...], value: Any) -> None:
    """Set what is somewhere in an attribute; lists and dicts stay, as others may have them."""
    now = attribute.read()
    if (made := _with(now, path, value)) is not now:
        attribute.write(made)


def copied_all(value: Any) -> Any:
    """Copy all containers of a state, as deep as states are stored, and however long they are."""
    return _copied(value, MAX_DEPTH, math.inf)


def _lists_in(value: Any, depth: int = _MAX_DEPTH) -> Iterator[Any]:
    """Give what `_copied` copies, but tuples."""
    if type(value) not in CONTAINERS or not depth or len(value) > _MAX_PARTS:
        return
    if type(value) is not tuple:
        yield value
    for _, item in items_of(value):
        yield from _lists_in(item, depth - 1)


def _like(container: Any, items: Any) -> Any:
    """Give a container of the same kind with other items."""
    return deque(items, container.maxlen) if type(container) is deque else type(container)(items)


def _with(value: Any, path: tuple[Any, ...], item: Any) -> Any:
    """Give a value with an item at a place in it: the very value, but for a tuple."""
    if not path:
        return item
    made = _with(value[path[0]], path[1:], item)
    if made is value[path[0]]:
        return value
    if type(value) is tuple:
        return (*value[: path[0]], made, *value[path[0] + 1 :])
    value[path[0]] = made
    return value
