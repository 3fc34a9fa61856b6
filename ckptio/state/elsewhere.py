"""Objects that a target has more than once: also as parts of its other objects.

Early stopping has the model, a trainer has all of them, and so has the target itself. As a rule one
state is stored for such a part, tied or copied: then the part takes it twice, as with torch. Where
two different states are stored, an object's own code may write whichever it likes. But a state that
is put back for an object (see `parts`) would replace the other one, which nobody asked for.

So whatever else is stored for the part is looked up: under its own name in the target, or in
objects that have taken their states already; for modules and optimizers also by their tensors,
which may be in a dict of the target, or in the state of an object that hands it on. Two states are
compared as they are stored, not as they are in memory, where one may be on a device, in another
precision and in classes of the target. Only copies are compared by their bytes, as far as these can
be told (see `landed`). A name that only one of the two has contradicts nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptio.format.encode import TAG
from ckptio.state.landed import Landed, are_same_bytes
from ckptio.state.members import identity_of_key, members_of, take_member
from ckptio.state.prune import prune_at
from ckptio.state.records import tag_of
from ckptio.state.sharded import is_sharded, memory_of
from ckptio.state.tree import children, is_same, sequence_in, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from ckptio.format.encode import Json
    from ckptio.state.fills import Fill
    from ckptio.state.tree import Predicate

#: Longer lists and dicts in a state hold no states of parts.
_MAX_ITEMS = 1000
_CONTAINERS = (list, tuple, dict, OrderedDict)
_MAPPINGS = (None, "dict", "odict", "counter")


class _Stored(NamedTuple):
    """A state as it is stored.

    Attributes:
        fqn: Its name there.
        node: Its node.
        place: The name of the object in the target.
        value: The object, or the state itself: nothing else has its id while it is here.
    """

    fqn: str
    node: Json
    place: str = ""
    value: Any = None


class Elsewhere:
    """Knows what the objects of a target take, in one load.

    Args:
        fills: What is filled where it is.
        keep: Accepts the names to load; everything if not given.
        changed: Says whether a tensor that was filled has been written to since.
    """

    def __init__(
        self,
        fills: list[Fill],
        keep: Predicate | None,
        changed: Callable[[torch.Tensor], object],
    ) -> None:
        self.fills = fills
        self._keep = keep
        self._changed = changed
        self._landed = Landed(fills, changed)
        self._objects: dict[int, _Stored] = {}
        self._by_memory: dict[Hashable, int] | None = None

    def note(self, fqn: str, target: Any, node: Json) -> None:
        """Note what an object of the target takes."""
        self._objects[id(target)] = _Stored(fqn, node, fqn, target)

    def note_part(self, place: str, part: Any, stored: _Stored) -> None:
        """Note what a part has taken at a place in another object."""
        self._objects.setdefault(id(part), stored._replace(place=place, value=part))

    def beside(
        self, fqn: str, values: Any, node: Json, own: range, tensors: Mapping[int, torch.Tensor]
    ) -> Beside:
        """Look at the other objects from one that is about to take its state.

        Args:
            fqn: Its name.
            values: What it is given.
            node: How that is stored.
            own: Which of what is filled where it is it has itself.
            tensors: Stored tensors, by index, that were made anew.
        """
        states = dict(_states_in(fqn, values, node)) if len(self._objects) > 1 else {}
        return Beside(self, states, own, tensors)

    def other(self, part: Any) -> _Stored | None:
        """Give the state that an object is known to take elsewhere; `None` if there is none."""
        return self._objects.get(id(part))

    def filled(self, tensor: torch.Tensor, own: range) -> str | None:
        """Name what is filled in a tensor's memory, but by the object itself."""
        if self._by_memory is None:
            self._by_memory = {
                memory_of(fill.tensor): place
                for place, fill in reversed(list(enumerate(self.fills)))
                if fill.block is None and isinstance(fill.tensor, torch.Tensor)
            }
        place = self._by_memory.get(memory_of(tensor))
        return None if place is None or place in own else self.fills[place].name

    def is_same(self, one: _Stored, other: _Stored, tensors: Mapping[int, torch.Tensor]) -> bool:
        """Whether two states are stored alike, as far as they are loaded.

        What only one of them has contradicts nothing: some give what is trained alone.
        """
        if is_same(one.node, other.node):
            return True
        kept = [self._kept(stored) for stored in (one, other)]
        for pair in _shared(*kept, is_partial=self._keep is not None) if all(kept) else ():
            if not is_same(*map(_outline, pair)):
                return False
            references = [[node for _, node in walk("", each)] for each in pair]
            for first, second in zip(*references, strict=True):
                is_one = is_same(first, second)
                if not is_one and not self._landed.are_alike(first, second, tensors):
                    return False
        return True

    def _kept(self, stored: _Stored) -> list[Json]:
        """Give what is loaded of a state, in a list; an empty one for nothing."""
        if self._keep is None:
            return [stored.node]
        return list(prune_at(stored.fqn, stored.node, self._keep))

    def are_alike(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two tensors have the same bytes, where that can be told."""
        return bool(self._changed(one) or self._changed(other)) or are_same_bytes(one, other)


class Beside:
    """The other objects of a target, as one of them sees them."""

    def __init__(
        self,
        elsewhere: Elsewhere,
        states: Mapping[int, _Stored],
        own: range,
        tensors: Mapping[int, torch.Tensor],
    ) -> None:
        self._elsewhere = elsewhere
        self._states = states
        self._own = own
        self._tensors = tensors

    def name_of_double(self, part: Any, state: Any) -> str | None:
        """Name the place, in the target or in another object, where a part takes another state.

        Args:
            part: A part of the object.
            state: What it would take.
        """
        other, mine = self._elsewhere.other(part), self._states.get(id(state))
        if other is not None and mine is not None:
            is_same = self._elsewhere.is_same(other, mine, self._tensors)
            return None if is_same else other.place
        is_alone = len(self._elsewhere.fills) == len(self._own)
        if is_alone or not isinstance(part, (torch.nn.Module, torch.optim.Optimizer)):
            return None
        try:
            has = part.state_dict()
        except Exception:  # of the caller's class, which raises anything
            return None
        for tensor, taken in _pairs_in(has, state):
            name = self._elsewhere.filled(tensor, self._own)
            if name is not None and not self._elsewhere.are_alike(tensor, taken):
                return name
        return None

    def note(self, fqn: str, part: Any, state: Any) -> None:
        """Note what a part takes at a place, if that is known."""
        if id(state) in self._states:
            self._elsewhere.note_part(fqn, part, self._states[id(state)])


def _shared(
    one: Json, other: Json, *, is_partial: bool, depth: int = 0
) -> Iterator[tuple[Json, Json]]:
    """Give pairs of nodes of two states, whatever classes these have.

    Args:
        one: A state; in a list at first.
        other: Another.
        is_partial: Whether either may have lost names at any depth.
        depth: How deep these are.
    """
    if type(one) is list and type(other) is list and (is_partial or not depth):
        if len(one) == len(other):
            for pair in zip(one, other, strict=True):
                yield from _shared(*pair, is_partial=is_partial, depth=depth + 1)
            return
    elif _is_mapping(one) and _is_mapping(other) and (is_partial or depth == 1):
        there = dict(children("", other))
        for name, node in children("", one):
            if name in there:
                yield from _shared(node, there[name], is_partial=is_partial, depth=depth + 1)
        return
    if not is_partial or (one is not None and other is not None):  # where lists lost something
        yield one, other


def _is_mapping(node: Json) -> bool:
    return type(node) is dict and tag_of(node) in _MAPPINGS


def _outline(node: Json) -> Json:
    """Leave out which tensors a node refers to, and of what memory they are views."""
    if type(node) is list:
        return [_outline(item) for item in node]
    if type(node) is not dict:
        return node
    if type(tag_of(node)) is int or tag_of(node) == "view":
        return {TAG: 0}
    if TAG in node and "t" in node:
        return {**node, "t": 0}
    return {key: _outline(item) for key, item in node.items()}


def _pairs_in(one: Any, other: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give tensors that are at the same places of two states, and have memory of their own."""
    if isinstance(one, torch.Tensor):
        if isinstance(other, torch.Tensor) and all(map(_is_plain, (one, other))):
            yield one, other
    elif isinstance(one, dict) and isinstance(other, dict):
        for key, value in one.items():
            if key in other:
                yield from _pairs_in(value, other[key])


def _is_plain(tensor: torch.Tensor) -> bool:
    return not is_sharded(tensor) and tensor.layout is torch.strided and not tensor.is_meta


def _states_in(fqn: str, value: Any, node: Json) -> Iterator[tuple[int, _Stored]]:
    """Give how the dicts in a value are stored, by their ids."""
    ahead = [(fqn, value, node)]
    while ahead:
        fqn, value, node = ahead.pop()
        if type(value) in (dict, OrderedDict):
            yield id(value), _Stored(fqn, node, value=value)
        for each in _items_in(fqn, value, node):
            item = each[1]
            if type(item) in _CONTAINERS and len(item) <= _MAX_ITEMS:
                ahead.append(each)


def _items_in(fqn: str, value: Any, node: Json) -> Iterator[tuple[str, Any, Json]]:
    """Give what a container has, by its name and as it is stored."""
    if isinstance(value, dict):
        members = members_of(fqn, node) if _is_mapping(node) else {}
        for key, item in value.items():
            found = take_member(members, value, key, identity_of_key(fqn, key))
            if found is not None:
                yield found[1], item, found[2]
    elif (listed := sequence_in(fqn, node)) is not None:
        yield from zip(listed[1], value, listed[2], strict=False)
