"""Match what a caller wants filled with what a checkpoint has.

Matching changes nothing: it lists what to fill and what disagrees, and hands back a
function that puts the result together once every byte has landed.

Rules: tensors and arrays of the target are filled in place, and must have the shape and element
type of the checkpoint. Of a tensor that is held in parts, the target's blocks are filled, however
the checkpoint is cut; shapes are those of whole tensors. Of a tensor that is made of others (see
`wrappers`), those are filled. A tensor on the meta device is replaced by a new one. Dicts and
lists are matched by key and index and updated in place, an OrderedDict in the order that is
stored, dataclasses and named tuples by the names of their fields; one that stands at two places,
which have different values in the checkpoint, becomes two. A list or a tuple that holds nothing
to fill is one value, of any length, and a list stays the one that it is.

A stateful object gives its state as a template, its tensors are filled in place (those that
code of others takes are made new, some in whatever shape is stored, see `handed`), and what else
the checkpoint has under it is made new (but a module takes no names that it does not have, and
lacks none that is tied to one it is given); then it takes the whole, unless nothing of it was
selected. One with nothing to fill is not asked for a template, and takes what is stored. Any
other value of the target is a placeholder; an enum comes back as its class.

Of what was kept for each rank, a rank takes its own. Where it has none (it was not there when the
checkpoint was saved), the target's value stays: that is noted if the target has it for each rank,
in a `PerRank`, too; else the name is missing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptio.format.ahead import holds_tensors
from ckptio.format.encode import TAG, join_fqn
from ckptio.format.fields import is_named_tuple
from ckptio.shards import PerRank, Shard
from ckptio.state.fills import classes_in
from ckptio.state.fits import is_filled, kinds_differ, require_value
from ckptio.state.leaves import SCALAR_TYPES
from ckptio.state.looks import PLAIN_TENSORS
from ckptio.state.members import (
    arranged,
    fields_in,
    identity_of_key,
    in_order,
    members_of,
    take_member,
    updated,
)
from ckptio.state.objects import ObjectMatcher
from ckptio.state.prune import prune_at
from ckptio.state.records import copied, fields_of, record_tag, tag_of, with_fields, with_items
from ckptio.state.sharded import is_sharded
from ckptio.state.stateful import is_stateful
from ckptio.state.tree import holds_absent, is_absent, is_kept, is_ranks, sequence_in
from ckptio.state.versions import Versions
from ckptio.state.wrappers import is_wrapper, parts_alike, put_together, wrapper_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.format.encode import Json
    from ckptio.state.rebuild import Rebuilder

    Assemble = Callable[[Rebuilder], Any]

_DICTS = (dict, OrderedDict, Counter)
_DICT_TAGS = (None, "dict", "odict", "counter")


class Matcher(ObjectMatcher):
    """Matches one target with one tree."""

    def merge(self, fqn: str, target: Any, node: Json) -> Assemble:
        """Match a value of the target with a node of the tree.

        Args:
            fqn: The name of both.
            target: The value.
            node: The node, in a tree of this rank alone (`read_tree` with a rank).

        Returns:
            What makes the value that belongs there, once everything has landed.

        Raises:
            TargetError: The target holds something that cannot be filled.
        """
        if type(node) in SCALAR_TYPES and type(target) in SCALAR_TYPES:
            return self._scalar(fqn, target, node)
        if isinstance(target, PerRank):
            return self._ranks(fqn, target, node)
        if is_ranks(node):
            if is_absent(node):
                self._note_missing(fqn, target)
                return lambda _: target
            node = node["v"][0]
        if is_sharded(target) and wrapper_in(target) is None:
            return self._sharded(fqn, target, node)
        if isinstance(target, torch.Tensor):
            match = self._wrapper if is_wrapper(target) else self._tensor
            return match(fqn, target, node)
        if isinstance(target, np.ndarray):
            return self._array(fqn, target, node)
        return self._container(fqn, target, node)

    def _wrapper(self, fqn: str, target: torch.Tensor, node: Json) -> Assemble:
        """Match a tensor that is made of others, which are filled, by what it is beside them."""
        if not self._selects(fqn, node):
            return lambda _: target
        parts = parts_alike(fqn, target, node)
        if isinstance(parts, str):
            return self._mismatch(fqn, target, node, parts)
        fields = dict(node["v"])
        merged = {n: self.merge(join_fqn(fqn, n), part, fields[n]) for n, part in parts.items()}

        def update(rebuilder: Rebuilder) -> torch.Tensor:
            made = {name: assemble(rebuilder) for name, assemble in merged.items()}
            is_filled = all(made[name] is part for name, part in parts.items())
            return target if is_filled else put_together(fqn, target, made)

        return update

    def _container(self, fqn: str, target: Any, node: Json) -> Assemble:
        """Match what has parts, or is a placeholder."""
        if (tag := record_tag(target)) is not None and tag == tag_of(node):
            return self._record(fqn, self._own(fqn, target, node), node)
        if is_stateful(target):
            with self._within_object():
                return self._stateful(fqn, target, node)
        if tag == "dataclass" and (node is not None or is_filled(target, by_place=False)):
            fields = fields_in(fqn, node)
            if fields is None:
                return self._other(fqn, target, node, kinds_differ("a dataclass", node))
            return self._record(fqn, self._own(fqn, target, node), fields)
        if isinstance(target, dict):
            own = self._own(fqn, target, node)
            if type(target) in _DICTS and not target and fqn and self._fills_empty(node):
                return self._filled(fqn, own, node)  # a placeholder, inside of others
            return self._dict(fqn, own, node, closed=True)
        is_sequence = isinstance(target, (list, tuple)) and not isinstance(target, torch.Size)
        if is_sequence and (target or not fqn):  # as above
            return self._sequence(fqn, self._own(fqn, target, node), node)
        if self._selects(fqn, node):
            require_value(fqn, target)
        return self._value(fqn, target, node)

    def _own(self, fqn: str, target: Any, node: Json) -> Any:
        """Give what a place of the target fills: a copy of what another fills with something else.

        One list may stand at two places (a scheduler's state has such). The last of them would
        have its values in both; so each has a list of its own, as it has in the checkpoint.
        """
        if isinstance(target, tuple) or self._place_before(fqn, target, node) is None:
            return target
        return copied(fqn, target)

    def _scalar(self, fqn: str, target: Any, node: Json) -> Assemble:
        """Take a number or a word instead of another; some states have a hundred thousand."""
        if self._keep is not None and not self._keep(fqn):
            return lambda _: target
        self.match.num_values += 1
        return lambda _: node

    def _value(self, fqn: str, target: Any, node: Json, own: Sequence[type] = ()) -> Assemble:
        """Take whatever the checkpoint has, in classes of the target and in those given."""
        if self._keep is not None:
            kept = prune_at(fqn, node, self._keep)
            if not kept:
                return lambda _: target
            if kept[0] != node and (part := self._part(fqn, target, node)) is not None:
                return part
            node = kept[0]
        return self._take(fqn, node, (*own, *classes_in(target)))

    def _part(self, fqn: str, target: Any, node: Json) -> Assemble | None:
        """Take some of a container, and leave the rest as the target has it."""
        if type(target) in _DICTS and type(node) is dict and node.get(TAG) in _DICT_TAGS:
            return self._dict(fqn, target, node, closed=False)
        stored = sequence_in(fqn, node)
        if stored is None or type(target) is not (tuple if stored[0] else list):
            return None
        _, names, items = stored
        if len(items) != len(target):
            self.match.mismatched.append(f"{fqn}: {len(items)} items, of which some are selected")
            return lambda _: target
        merged = [self._value(n, v, item) for n, v, item in zip(names, target, items, strict=True)]
        return lambda rebuilder: type(target)([assemble(rebuilder) for assemble in merged])

    def _ranks(self, fqn: str, target: PerRank, node: Json) -> Assemble:
        """Match what the target keeps for each rank."""
        if not is_ranks(node):
            found = "a value for each rank in the target, one for all in the checkpoint"
            return self._mismatch(fqn, target, node, found)
        if is_absent(node):
            self.match.kept.append(fqn)
            return lambda _: target
        assemble = self.merge(fqn, target.value, node)

        def wrap(rebuilder: Rebuilder) -> Any:
            value = assemble(rebuilder)
            return target if value is target.value else PerRank(value)

        return wrap

    def _dict(
        self, fqn: str, target: dict[Any, Any], node: Json, *, closed: bool, flat: bool = False
    ) -> Assemble:
        """Match a dict.

        Args:
            fqn: Its name.
            target: The dict.
            node: The node of the tree.
            closed: Names of the checkpoint that the target lacks are unexpected. Without
                it they are made new (an optimizer that has not stepped has no moments).
            flat: Values that are no tensors are placeholders, dicts among them.
        """
        if type(node) is not dict or node.get(TAG) not in _DICT_TAGS:
            return self._other(fqn, target, node, kinds_differ("a dict", node))
        found_here = members_of(fqn, node)
        stored = {key: found for key, found in found_here.items() if not is_absent(found[2])}
        versions = Versions(target, node, self.match)
        kind = {"odict": OrderedDict, "counter": Counter}.get(str(node.get(TAG)), dict)
        merged: list[tuple[Any, Assemble]] = []
        is_whole, num_mismatched = self._keep is None, len(self.match.mismatched)
        for key, value in target.items():
            identity = identity_of_key(fqn, key)
            found = take_member(stored, target, key, identity)
            if found is not None:
                _, name, item = found
                merged.append((key, self._nested(name, value, item, closed=closed, flat=flat)))
                versions.note(key)
            else:
                is_whole = False
                merged.append((key, self._left(fqn, key, value, versions, found_here)))
        versions.settle(fqn)
        is_whole = is_whole and len(self.match.mismatched) == num_mismatched
        own = tuple(classes_in(target)) if stored and not closed else ()
        made: list[tuple[Json, Assemble]] = []
        for encoded_key, name, item in stored.values():
            if closed and not (flat and self._is_resized(name)):  # a buffer that is None
                self._note_unexpected(name, item)
            elif self._selects(name, item):
                made.append((encoded_key, self._value(name, None, item, own)))
        keys = self._take_keys(fqn, [encoded_key for encoded_key, _ in made], own, target)

        def update(rebuilder: Rebuilder) -> Any:
            values = {key: assemble(rebuilder) for key, assemble in merged}
            for key, (_, assemble) in zip(keys(rebuilder), made, strict=True):
                values[key] = assemble(rebuilder)
            if closed:
                filled = updated(target, values)
                whole = arranged(fqn, filled, found_here) if is_whole else filled
                return versions.put(whole, is_whole=is_whole)
            return versions.put(kind(in_order(fqn, values, found_here)), is_whole=is_whole)

        return update

    def _fills_empty(self, node: Json) -> bool:
        """Whether an empty dict of the target takes what is stored.

        Of many ranks one may have nothing of what others have there; and of some checkpoints
        nobody knows the types of keys.
        """
        return self._is_alone and self._is_exact and not holds_tensors(node)

    def _filled(self, fqn: str, target: dict[Any, Any], node: Json) -> Assemble:
        """Take all that a dict has in the checkpoint into an empty one."""
        assemble = self._dict(fqn, target, node, closed=False)

        def update(rebuilder: Rebuilder) -> Any:
            values = assemble(rebuilder)
            (OrderedDict if isinstance(target, OrderedDict) else dict).update(target, values)
            if isinstance(target, OrderedDict) and isinstance(values, OrderedDict):
                vars(target).update(vars(values))  # versions of modules
            return target

        return update

    def _left(
        self, fqn: str, key: Any, value: Any, versions: Versions, stored: dict[Any, Any]
    ) -> Assemble:
        """Leave what the checkpoint has not as it is: it is missing, but for what modules make up.

        Args:
            fqn: The name of the dict that has it.
            key: Its key.
            value: It.
            versions: Those of the dict.
            stored: What is stored of the dict, by identities of keys.
        """
        if not versions.makes_up(key, stored):
            is_kept = identity_of_key(fqn, key) in stored
            self._note_missing(join_fqn(fqn, key), value, is_kept=is_kept)
            versions.note(key, is_stored=False)
        elif value.is_meta:
            return lambda _: torch.zeros_like(value, device=self._device or "cpu")
        return lambda _: value

    def _nested(self, fqn: str, value: Any, node: Json, *, closed: bool, flat: bool) -> Assemble:
        """Match a value in a dict; inside a stateful object, dicts stay open."""
        if flat and "_extra_state" in fqn and fqn.rpartition(".")[2] == "_extra_state":
            return self._value(fqn, value, node)  # whatever the module makes of it
        if type(value) in PLAIN_TENSORS and not is_ranks(node):
            return self._tensor(fqn, value, node)  # by far the most, and there are thousands
        if isinstance(value, (PerRank, Shard)):
            return self.merge(fqn, value, node)
        if is_ranks(node):
            node = node["v"][0]
        if flat and not isinstance(value, torch.Tensor):
            return self._value(fqn, value, node)
        if not closed and type(value) in (dict, OrderedDict) and type(node) is dict:
            return self._dict(fqn, value, node, closed=False)
        if not closed and not isinstance(value, (torch.Tensor, np.ndarray)):
            return self._value(fqn, value, node)
        return self.merge(fqn, value, node)

    def _sequence(self, fqn: str, target: Any, node: Json) -> Assemble:
        stored = sequence_in(fqn, node)
        if stored is None or stored[0] != isinstance(target, tuple):
            found = kinds_differ(f"a {type(target).__name__}", node)
            return self._mismatch(fqn, target, node, found)
        _, names, items = stored
        if (
            type(target) in (list, tuple)
            and not any(
                is_filled(item, by_place=len(items) == len(target))
                for item in target
                if type(item) not in SCALAR_TYPES
            )
            and is_kept(fqn, node, self._keep)
            and not holds_absent(node)
        ):
            for i, item in enumerate(target):
                if type(item) not in SCALAR_TYPES:
                    require_value(join_fqn(fqn, i), item)
            return self._replaced(fqn, target, node)
        merged = [
            self.merge(name, value, item)
            for name, value, item in zip(names, target, items, strict=False)
        ]
        for i in range(len(items), len(target)):
            self._note_missing(join_fqn(fqn, i), target[i])
        for name, item in list(zip(names, items, strict=True))[len(target) :]:
            self._note_unexpected(name, item)

        def update(rebuilder: Rebuilder) -> Any:
            values = [assemble(rebuilder) for assemble in merged]
            if isinstance(target, list):
                target[: len(values)] = values
                return target
            values += target[len(values) :]
            return with_items(target, values) if is_named_tuple(type(target)) else tuple(values)

        return update

    def _replaced(self, fqn: str, target: Any, node: Json) -> Assemble:
        """Take a list or a tuple that holds nothing that is filled as one value, of any length.

        As a rule it is a history, of another time than the checkpoint's. A list stays the very
        list; a tuple stays one, whatever the checkpoint has for it.
        """
        assemble = self._take(fqn, node, tuple(classes_in(target)))

        def update(rebuilder: Rebuilder) -> Any:
            values = assemble(rebuilder)
            if isinstance(target, tuple):
                return tuple(values)
            target[:] = values
            return target

        return update

    def _record(self, fqn: str, target: Any, node: Json) -> Assemble:
        """Match a dataclass or a named tuple, field by field, by their names."""
        items = dict(node["v"])
        merged: dict[str, Assemble] = {}
        for name, value in fields_of(target).items():
            if name in items:
                merged[name] = self.merge(join_fqn(fqn, name), value, items.pop(name))
            else:
                self._note_missing(join_fqn(fqn, name), value)
        for name, item in items.items():
            self._note_unexpected(join_fqn(fqn, name), item)
        return lambda rebuilder: with_fields(
            target, {name: assemble(rebuilder) for name, assemble in merged.items()}
        )
