"""Objects in the state of an object: they stay what they are.

An object whose state is its attributes gives the parts themselves in its `state_dict()`, and may
expect to be given objects: of those their states are stored. So where it has the dict of a state
in the place of a part, afterwards, the part comes back and takes that; so it does where what is
given are copies of parts. One that hands the states on itself has its parts. To give every such
object its parts was rejected: those that hand states on would give a module to a module.

One that gives states, or is not asked what it gives, may take the dicts of these as they come. A
part that is an attribute comes back there, too, if it has the very dict now that was given: who
keeps a dict where an object was has to know what to do with either. But of states in a list of
parts it makes what it likes: they may be for those that it makes later, and a note says that they
are there. Where it was not asked, and has just as many as it had parts, each takes its own.

Nor does a part take two states: where the object has handed on what it was given under another
name of that part (a best model that was the model itself), a dict stays one, and is noted.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptio.errors import TargetError
from ckptio.format.encode import join_fqn
from ckptio.state.take import take_state

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

#: Lists and dicts of more among an object's attributes, or in more of each other, hold no parts,
#: but samples or the like; some are inside themselves.
_MAX_PARTS, _MAX_DEPTH = 1000, 4
_METHODS = ("state_dict", "load_state_dict")
_DICTS = (dict, OrderedDict)
_CONTAINERS = (list, tuple, deque, *_DICTS)


class Held(NamedTuple):
    """What an object had as an attribute: a part, or a list, tuple or dict with parts.

    Attributes:
        is_given: Whether the object gives parts in it as they are.
        is_asked: Whether it was asked what it gives.
        is_named: Whether it is a part, and the object is given something under its name.
    """

    fqn: str
    owner: Any
    attribute: str
    value: Any
    is_given: bool
    is_asked: bool
    is_named: bool

    @property
    def now(self) -> Any:
        """What the attribute has now."""
        return getattr(self.owner, self.attribute, None)


class Before(NamedTuple):
    """What an object had, and what it is given.

    Attributes:
        held: The attributes with parts, those of its parts among them.
        states: The dicts in what it is given.
    """

    held: list[Held]
    states: list[Any]


def before_taking(fqn: str, target: Any, values: Any, template: Any = None) -> Before:
    """Note the parts of an object that take states themselves, and the parts of those.

    Args:
        fqn: Its name.
        target: The object; modules and optimizers say themselves what they take.
        values: What it is given.
        template: What its `state_dict()` gives; `None` where it is not asked.
    """
    if isinstance(target, (torch.nn.Module, torch.optim.Optimizer)):
        return Before([], [])
    names = values if isinstance(values, dict) else ()
    held = _held_by(fqn, target, names, template)
    return Before(held, list(_dicts_in(values)) if held else [])


def _held_by(fqn: str, target: Any, names: Container[Any], template: Any) -> list[Held]:
    own = {id(part) for _, value in _attributes_of(target) for part in _parts_of(value)}
    given = [  # a history takes its own time
        part for value in _values_of(template) for part in _parts_of(value, _MAX_DEPTH + 1)
    ]
    by_id = {id(part) for part in given}
    copied = {type(part) for part in given if id(part) not in own}
    is_asked = template is not None
    held: list[Held] = []
    seen: set[int] = set()
    ahead = [(fqn, target, False)]
    while ahead:
        fqn, owner, is_below = ahead.pop()
        if isinstance(owner, (torch.nn.Module, torch.optim.Optimizer)) or id(owner) in seen:
            continue
        seen.add(id(owner))
        for attribute, value in _attributes_of(owner):
            parts = list(_parts_of(value))
            if parts:
                is_given = is_below or any(id(p) in by_id or type(p) in copied for p in parts)
                is_given |= not is_asked and _is_part(value)
                is_named = attribute in names or attribute.strip("_") in names
                is_named = is_named and owner is target and _is_part(value)
                name, copy = join_fqn(fqn, attribute), _copied(value)
                held.append(Held(name, owner, attribute, copy, is_given, is_asked, is_named))
                ahead += [(name, part, is_given and is_asked) for part in parts]
    return held


def put_back(before: Before, *, is_partial: bool) -> list[str]:
    """Let parts of an object take their states, where it has these in the place of them now.

    Args:
        before: What it had before it took its state.
        is_partial: Whether it was given less than all: modules keep what they are not given.

    Returns:
        Notes for the report.

    Raises:
        TargetError: A part does not take its state, or has none that could be told.
    """
    notes: list[str] = []
    states = {id(state) for state in before.states}
    stay = {id(held.value) for held in before.held if held.is_named and held.now is held.value}
    for held in before.held:
        after = held.now
        is_elsewhere = after is not held.value and id(held.value) in stay
        if not is_elsewhere and (held.is_given or _takes_each(held, after, states)):
            _put_back_one(held, after, notes, is_partial=is_partial)
        elif _has_states(held, after, states):
            notes.append(
                f"{held.fqn}: has states where there were objects that take them; have"
                " load_state_dict() hand them on"
            )
    return notes


def _put_back_one(held: Held, after: Any, notes: list[str], *, is_partial: bool) -> None:
    """Let what an attribute had come back."""
    made = after
    try:
        made = _put_back(held.fqn, held.value, after, notes, is_partial=is_partial)
    except TargetError:
        made = held.value
        raise
    finally:
        if made is not after:  # which the class may not allow
            object.__setattr__(held.owner, held.attribute, made)


def _has_states(held: Held, after: Any, states: set[int]) -> bool:
    """Whether an attribute has states of those that were given in the place of all its parts."""
    if _is_part(held.value):
        return type(after) in _DICTS
    is_any = any(id(item) in states for item in _dicts_in(after))
    return is_any and not any(True for _ in _parts_of(after))


def _takes_each(held: Held, after: Any, states: set[int]) -> bool:
    """Whether each part takes a state of those that were given, though none of them was."""
    if _is_part(held.value):
        return id(after) in states
    return not held.is_asked and _has_each(held.value, after, states)


def _has_each(before: Any, after: Any, states: set[int], depth: int = _MAX_DEPTH) -> bool:
    """Whether there is a state that was given in the place of each part, or that part still."""
    if _is_part(before):
        return after is before or id(after) in states
    if type(before) not in _CONTAINERS or not depth or not any(True for _ in _parts_of(before)):
        return True
    if type(after) is not type(before) or len(after) != len(before):
        return False
    found = dict(_items_of(after))
    return all(
        key in found and _has_each(value, found[key], states, depth - 1)
        for key, value in _items_of(before)
    )


def _put_back(
    fqn: str,
    before: Any,
    after: Any,
    notes: list[str],
    *,
    is_partial: bool,
    depth: int = _MAX_DEPTH,
) -> Any:
    """Give what belongs in the place of what an object has now."""
    if not _is_part(before):
        is_alike = type(after) is type(before) and bool(after)  # else something else altogether
        if not (depth and is_alike and any(True for _ in _parts_of(before, depth))):
            return after
        put_back = functools.partial(_put_back, notes=notes, is_partial=is_partial, depth=depth - 1)
        return _put_back_in(fqn, before, after, put_back)
    if type(after) not in _DICTS:
        return after
    assigns = False
    if isinstance(before, torch.nn.Module):
        assigns = any(t.is_meta for t in (*before.parameters(), *before.buffers()))
        if is_partial:
            _complete(fqn, before, after)
    notes += take_state(fqn, before, after, assigns=assigns)
    return before


def _put_back_in(fqn: str, before: Any, after: Any, put_back: Callable[..., Any]) -> Any:
    """Give a list, tuple or dict with what belongs in the places of its items.

    Raises:
        TargetError: It has more states than there were parts, or less.
    """
    pairs, found = _items_of(before), dict(_items_of(after))
    keys = {key for key, _ in pairs}
    lost = [key for key, value in pairs if key not in found and any(True for _ in _parts_of(value))]
    more = [value for key, value in found.items() if key not in keys]
    if lost or any(not isinstance(before, dict) or isinstance(value, dict) for value in more):
        if any(True for _ in _parts_of(after)):
            return after  # it has made others
        raise TargetError(
            f"{fqn!r} has {len(pairs)} objects that take states, and was given {len(found)} states;"
            " leave it out with select=, or have load_state_dict() hand them on"
        )
    for key, value in pairs:
        if key in found:
            found[key] = put_back(join_fqn(fqn, key), value, found[key])
    if all(found[key] is value for key, value in _items_of(after)):
        return after  # handed on: others may have this very list
    return _like(before, found if isinstance(before, dict) else found.values())


def _items_of(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _like(container: Any, items: Any) -> Any:
    """Give a container of the same kind with other items."""
    return deque(items, container.maxlen) if type(container) is deque else type(container)(items)


def _complete(fqn: str, module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Add what a module has, and was not given, to its state.

    Raises:
        TargetError: It does not say.
    """
    try:
        own = module.state_dict()
    except Exception as error:  # of the caller's class, which raises anything
        raise TargetError(f"the state_dict() of {fqn!r} fails: {error!r}") from error
    for key, value in own.items():
        state.setdefault(key, value)


def _attributes_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Give the attributes of an object, those in slots among them."""
    yield from list(getattr(owner, "__dict__", {}).items())
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            is_own = slot.startswith("__") and not slot.endswith("__")  # whose name Python makes
            name = f"_{kind.__name__.lstrip('_')}{slot}" if is_own else slot
            if name not in ("__dict__", "__weakref__") and hasattr(owner, name):
                yield name, getattr(owner, name)


def _parts_of(value: Any, max_depth: int = _MAX_DEPTH) -> Iterator[Any]:
    """Give what takes a state in a value: itself, or what is in lists, tuples and dicts."""
    left, ahead = _MAX_PARTS, [(value, max_depth)]
    while ahead:
        item, depth = ahead.pop()
        if type(item) not in _CONTAINERS:
            if _is_part(item):
                yield item
        elif depth and len(item) <= left:
            left -= len(item)
            items = item.values() if isinstance(item, dict) else item
            ahead += [(each, depth - 1) for each in items]


def _values_of(template: Any) -> Any:
    """Give what is in a state: in a dict, a list or a tuple."""
    if isinstance(template, dict):
        return template.values()
    return template if isinstance(template, (list, tuple)) else [template]


def _dicts_in(value: Any) -> Iterator[Any]:
    """Give what may be the state of a part in a value: dicts, as far as parts are looked for."""
    for each in _values_of(value):
        left, ahead = _MAX_PARTS, [(each, 2 * _MAX_DEPTH)]  # states of parts have those of others
        while ahead:
            item, depth = ahead.pop()
            if type(item) in _DICTS:
                yield item
            if type(item) in _CONTAINERS and depth and len(item) <= left:
                left -= len(item)
                items = item.values() if isinstance(item, dict) else item
                ahead += [(one, depth - 1) for one in items]
    yield value


def _is_part(value: Any) -> bool:
    """Whether its class takes states: what a proxy stands for may be gone."""
    return all(hasattr(type(value), method) for method in _METHODS)


def _copied(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Copy the containers of a value, which may be written to, as far as they are looked into."""
    if type(value) not in _CONTAINERS or not depth or len(value) > _MAX_PARTS:
        return value
    if isinstance(value, dict):
        return _like(value, ((key, _copied(item, depth - 1)) for key, item in value.items()))
    return _like(value, (_copied(item, depth - 1) for item in value))
