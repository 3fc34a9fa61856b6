"""Objects inside an object that takes its state: they stay what they are.

A part of an object is what it has among its attributes and has a `state_dict()` of its own. An
object that gives its attributes for its state gives its parts themselves, and what is stored for
each is its state. So on a load the object is given a dict in the place of each part, and may leave
that there. Therefore it is looked at before and after it takes its state, place by place: in
attributes, in lists and dicts, in parts of parts. Where there is the dict of a state now, the part
is put back, and takes that state; but not in dataclasses and named tuples (see `record_parts`).

What is guaranteed:

* An object whose `state_dict()` gives its parts, or copies of them, has its parts back. More states
  than parts, or fewer, are refused; but if it still has some part there, states too many are noted.
* An object whose `state_dict()` gives states, or is not asked, has a part back in an attribute that
  now holds the very dict that it was given. States in a list or a dict are left to it, since they
  may be for parts that it makes later; only if it was not asked, and there are as many states as
  parts, each part takes its own. What stays a dict is noted.
* A part takes one state, though it may be in many places: a best model is the model itself at the
  start. If all places have the same state, bit for bit, the part comes back in all of them. Else it
  takes the state of the first place: of attributes, then of lists and dicts, then of parts of
  parts. The second state is refused where the object gives parts, before any part takes a state
  (parts of parts excepted: their states are there only when the parts around them have taken
  theirs). Of any other object the second place keeps the dict, and that is noted.
* A part that is at another place of the target, too, or in another object, takes no state that
  differs from what is stored there (see `elsewhere`). That is refused, or noted, likewise.
* A part that the object has handed a state takes no other. A dict in another place of it stays,
  and is noted, unless it is that state, bit for bit; so is a part that was handed two. Of a state
  that was handed on under another name, only its keys say to whom: to parts of the class that are
  parts still in all their places, if these are as many as such states, and the dict came under the
  name of an attribute.
* Whatever is refused, the parts are where they were, in the very lists and dicts.

What was rejected: to give every object its parts, as those that hand states on would give a module
to a module; to copy a part for its second state, as a copied optimizer has other parameters, and a
copied model all that it knows; to refuse a second state before the object has seen it, as it may
make a part for it.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptio._failures import raised
from ckptio.errors import TargetError
from ckptio.state.attributes import DICTS, is_part
from ckptio.state.places import (
    LOST,
    Before,
    HeldParts,
    Place,
    copied_all,
    dicts_in,
    has_parts,
    places_in,
    put_at,
)
from ckptio.state.record_parts import restore_lost, tell_lost
from ckptio.state.same import is_same
from ckptio.state.take import take_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ckptio.state.elsewhere import Beside


def put_back(
    before: Before,
    beside: Beside,
    guard: Callable[[Any], AbstractContextManager[None]],
    *,
    is_partial: bool,
) -> list[str]:
    """Let parts of an object take their states, where it has these in the place of them now.

    Args:
        before: What it had before it took its state.
        beside: What other objects take, which may be its parts, or have these, too.
        guard: Looks on while a part takes its state.
        is_partial: Whether it was given less than all: modules keep what they are not given.

    Returns:
        Notes for the report.

    Raises:
        TargetError: A part does not take its state, or has none that could be told, or two.
    """
    taken = _Taken(before, beside)
    try:
        tell_lost(before.in_records)  # before a part takes a state
        for _, level in itertools.groupby(before.held, key=lambda held: held.depth):
            found = [(held, *step) for held in level for step in taken.steps(held)]
            for held, place, _ in found:
                put_at(held.attribute, place.path, place.part)
            for _, place, takes in found:
                if takes:
                    beside.note(place.fqn, place.part, place.found)
                    with guard(place.part):
                        taken.notes += _take(place, is_partial=is_partial)
        taken.notes += tell_lost(before.in_records)  # some are in parts that have taken theirs
    except TargetError:
        restore_lost(before.in_records)
        for held in before.held:
            places = held.places()
            is_moved_alone = all(place.found is place.part for place in places)
            if is_moved_alone or any(type(p.found) in DICTS or p.found is LOST for p in places):
                held.restore()
        raise
    return taken.notes


class _State(NamedTuple):
    """What a part has taken, at which place, and whether the object itself has handed it that."""

    fqn: str
    state: Any
    is_handed: bool = False


class _Taken:
    """What parts have taken, which decides what becomes of their places.

    Args:
        before: What there was before the object took its state.
        beside: What other objects take.

    Attributes:
        notes: Notes for the report.
    """

    def __init__(self, before: Before, beside: Beside) -> None:
        self.notes: list[str] = []
        self._beside = beside
        self._states = {id(state) for state in before.states}
        self._is_asked = before.is_asked
        self._by_part: dict[int, _State] = {}
        #: What parts were given whose own parts are still to be looked at.
        self._given = {id(before.target): before.values}
        #: Names of places where the object has parts still.
        self._stays: dict[int, str] = {}
        self._num_places = Counter(
            id(place.part) for held in before.held for place in places_in("", held.value, None)
        )
        placed: set[int] = set()
        kinds: dict[int, type] = {}
        left: set[int] = set()
        for held in before.held:
            self._look_at(held)
            for place in () if held.depth else held.places():
                if place.found is place.part:
                    self._stays.setdefault(id(place.part), place.fqn)
                    kinds[id(place.part)] = type(place.part)
                else:
                    left.add(id(place.part))
                placed |= {id(state) for state in dicts_in(place.found)}
        self._given.clear()
        self._unnamed = {id(state) for state in before.unnamed}
        #: What states have that may have been handed to these: they are in no place now.
        self._handed = [state for state in before.unnamed if id(state) not in placed]
        #: Classes of those that had no other state to take.
        self._whole = [
            kind for key, kind in kinds.items() if key not in left and key not in self._by_part
        ]

    def _look_at(self, held: HeldParts) -> None:
        """Note parts that were handed what their owner was given under the names of the places."""
        given = _under(self._given.get(id(held.attribute.owner)), held.attribute.name)
        own = {place.path: place.found for place in places_in(held.fqn, held.value, given)}
        for place in () if given is None else held.places():
            state = own.get(place.path)
            if place.found is place.part and type(state) in DICTS:
                self._given[id(place.part)] = state
                mine = _State(place.fqn, state, is_handed=not held.depth)
                has = self._by_part.setdefault(id(place.part), mine)
                if not is_same(has.state, state):
                    both = "load_state_dict() was given both"
                    self.notes.append(f"{place.fqn}: {_double_of(has)}; {both}")

    def steps(self, held: HeldParts) -> list[tuple[Place, bool]]:
        """Give the places in an attribute where parts come back, and whether they take a state.

        Raises:
            TargetError: A part has none of the states that could be told, or two.
        """
        self._look_at(held)
        places, now, is_direct = held.places(), held.attribute.read(), is_part(held.value)
        if held.is_given:
            _require_counts(held.fqn, places, now)
        is_each = all(
            p.part is not None and (p.found is p.part or id(p.found) in self._states)
            for p in places
        )
        may_take = (is_direct and is_each) if self._is_asked else (is_direct or is_each)
        found = [place for place in places if type(place.found) in DICTS]
        taking = found if held.is_given or may_take else []
        steps = [(place, self._takes(place, is_given=held.is_given)) for place in taking]
        lone = () if taking or has_parts(now) else dicts_in(now)
        kinds = (list, tuple) if taking else (list, tuple, *DICTS)  # a part may take a list
        is_left = any(place.part is not None and type(place.found) in kinds for place in places)
        if is_left or any(id(state) in self._states for state in lone):
            self.notes.append(
                f"{held.fqn}: has states where there were objects that take them; have"
                " load_state_dict() hand them on"
            )
        return [(place, takes) for place, takes in steps if takes is not None]

    def _takes(self, place: Place, *, is_given: bool) -> bool | None:
        """Say whether a part takes what is at a place, or has taken it; `None` where that stays."""
        part, state = id(place.part), place.found
        if place.part is None:
            self.notes.append(f"{place.fqn}: has a state, and there was no object that takes it")
            return None
        if part in self._stays and self._may_be_handed(place):
            self._by_part.setdefault(part, _State(self._stays[part], None, is_handed=True))
        is_double = self._num_places[part] > 1  # what takes a state may write to all that is in it
        mine = _State(place.fqn, copied_all(state) if is_double else copy.copy(state))
        has = self._by_part.get(part)
        if has is None:
            name = self._beside.name_of_double(place.part, state)
            if name is None:
                self._by_part[part] = mine
                self._given[part] = mine.state
                return True
            has = _State(name, state)
        elif has.state is not None and is_same(has.state, state):
            return False
        if not has.is_handed and is_given:
            raise TargetError(
                f"{place.fqn!r} {_double_of(has)}; have two objects there before the load, or leave"
                " one out with select="
            )
        self.notes.append(f"{place.fqn}: {_double_of(has)}; its state stays a dict")
        return None

    def _may_be_handed(self, place: Place) -> bool:
        """Whether a part may have another state, in no place: not if others account for all."""
        handed = [state for state in self._handed if state.keys() == place.found.keys()]
        is_named = id(place.found) not in self._unnamed
        num_others = self._whole.count(type(place.part)) if is_named else 0
        return len(handed) > num_others and not any(is_same(one, place.found) for one in handed)


def _double_of(has: _State) -> str:
    if has.state is None:
        return f"is one object with {has.fqn!r}, which load_state_dict() handed a state"
    return f"is one object with {has.fqn!r} in the target and another in the checkpoint"


def _require_counts(fqn: str, places: Sequence[Place], now: Any) -> None:
    """Refuse more states than parts, or less; but where other parts were made.

    Raises:
        TargetError: With both numbers.
    """
    if has_parts(now) or all(p.part is not None and p.found is not LOST for p in places):
        return
    num_parts = sum(place.part is not None for place in places)
    num_states = sum(type(place.found) in DICTS for place in places)
    raise TargetError(
        f"{fqn!r} has {num_parts} objects that take states, and was given {num_states} states;"
        " leave it out with select=, or have load_state_dict() hand them on"
    )


def _take(place: Place, *, is_partial: bool) -> list[str]:
    """Let a part take what is in the place of it."""
    part, is_blank = place.part, False
    if isinstance(part, torch.nn.Module):
        is_blank = any(tensor.is_meta for tensor in (*part.parameters(), *part.buffers()))
        if is_partial:
            _complete(place.fqn, part, place.found)
    return take_state(place.fqn, part, place.found, assigns=is_blank)


def _complete(fqn: str, module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Add what a module has, and was not given, to its state.

    Raises:
        TargetError: It does not say.
    """
    try:
        own = module.state_dict()
    except Exception as error:  # of the caller's class, which raises anything
        raise TargetError(f"the state_dict() of {fqn!r} fails: {raised(error)}") from error
    for key, value in own.items():
        state.setdefault(key, value)


def _under(values: Any, name: str) -> Any:
    """Give what an object is given for an attribute of a name; `None` for nothing."""
    keys = (key for key in (name, name.strip("_")) if isinstance(values, dict) and key in values)
    return next((values[key] for key in keys), None)
