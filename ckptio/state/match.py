"""What a match notes: what is missing, unexpected or another thing than the target has."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ckptio.errors import TargetError
from ckptio.format.decode import class_names_in
from ckptio.format.encode import TAG, class_name, join_fqn
from ckptio.shards import PerRank
from ckptio.state.fills import Match, leaves_in
from ckptio.state.handed import is_of_torch
from ckptio.state.leaves import SCALAR_TYPES
from ckptio.state.prune import prune_at
from ckptio.state.taken import Taken
from ckptio.state.tree import is_same, names_kept, orders_in, tensor_index, walk
from ckptio.state.wrappers import wrappers_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from ckptio.format.encode import Json
    from ckptio.state.rebuild import Rebuilder
    from ckptio.state.tree import Predicate

    Assemble = Callable[[Rebuilder], Any]


class NotingMatcher:
    """What all matching has in common: what is noted, and how values are taken as they are.

    The lowest of four floors. Above it, `TensorMatcher` matches tensors and arrays, `ObjectMatcher`
    objects with a `state_dict()`, and `Matcher` all the rest.

    Args:
        keep: Accepts the names to load; everything if not given.
        types: Classes that may be made.
        device: Where tensors are made; the CPU if not given.

    Attributes:
        match: Takes what is found.
    """

    def __init__(
        self,
        keep: Predicate | None,
        types: Collection[type] = (),
        device: torch.device | None = None,
    ) -> None:
        self._keep = keep
        self._device = device
        self._num_objects = 0
        self._types = frozenset(map(class_name, types))
        self.match = Match()
        #: Objects of the target that were matched, by id: each, its first name, and its node there.
        self._firsts: dict[int, tuple[Any, str, Json]] = {}

    def _take(self, fqn: str, node: Json, own: Sequence[type] = ()) -> Assemble:
        """Take a node as it is stored, in classes of those given.

        Raises:
            TargetError: It has a tensor that is made of others, and its class is not among them:
                an object would be given a dict for it.
        """
        known = self._types.union(map(class_name, own))
        for wrapper in wrappers_in(node):
            lacking = [name for name in dict.fromkeys(class_names_in(wrapper)) if name not in known]
            if lacking:
                raise TargetError(
                    f"cannot make {fqn!r}: it has a tensor of class {wrapper['c']!r}, of which the"
                    f" target has none yet; pass {', '.join(map(repr, lacking))} in types="
                )
        self.match.num_values += 1
        if type(node) in SCALAR_TYPES:
            return lambda _: node
        orders = orders_in(node)
        self.match.make(orders)
        if self._device is not None:
            self.match.on_host |= orders.keys() if self._num_objects else _arrays_in(node)
        taken = Taken(fqn, node, tuple(own), holds_tensors=bool(orders))
        self.match.taken.append(taken)
        return taken.value

    @contextmanager
    def _within_object(self) -> Iterator[None]:
        """Match what a stateful object is given: values that are made for it are made on the host.

        The object moves them to where it needs them. An optimizer leaves its step counts in the
        host's memory: on a device, each step would wait for them.
        """
        self._num_objects += 1
        try:
            yield
        finally:
            self._num_objects -= 1

    def _take_keys(
        self, fqn: str, nodes: Sequence[Json], own: Sequence[type], target: dict[Any, Any]
    ) -> Callable[[Rebuilder], Iterable[Any]]:
        """Take keys of the mapping at `fqn` as they are stored, beside those that a target has."""
        if all(type(node) in SCALAR_TYPES for node in nodes):
            return lambda _: nodes
        keys = {TAG: "dict", "v": [[node, None] for node in nodes]}
        taken = Taken(fqn, keys, tuple(own), beside=target)
        self.match.taken.append(taken)
        return taken.value

    def _place_before(self, fqn: str, target: Any, node: Json) -> str | None:
        """Name an earlier place of the same object, if it takes something else there; else `None`.

        Notes the object, if this is its first place.
        """
        _, name, before = self._firsts.setdefault(id(target), (target, fqn, node))
        if before is node:
            return None
        return None if is_same(self._selected(name, before), self._selected(fqn, node)) else name

    def _selected(self, fqn: str, node: Json) -> Json:
        return node if self._keep is None else prune_at(fqn, node, self._keep)

    def _is_taken(self, fqn: str, target: Any, node: Json) -> bool:
        """Whether an object takes another state already, at another place; then that is noted."""
        name = self._place_before(fqn, target, node)
        if name is not None:
            self.match.doubles.append(
                f"{fqn}: is one object with {name!r} in the target and another in the checkpoint;"
                f" {name!r} was loaded"
            )
        return name is not None

    def _mismatch(self, fqn: str, target: Any, node: Json, found: str) -> Assemble:
        """Note what differs, if it, or anything below it, here or there, is to be loaded.

        The name of a container says nothing: whoever leaves out what is below it may accept that.
        """
        if self._kept_in(fqn, target) or names_kept(fqn, node, self._keep):
            self.match.mismatched.append(f"{fqn or 'the whole state'}: {found}")
            if isinstance(target, torch.Tensor):
                self.match.unfit.append(target)
        return lambda _: target

    def _note_missing(self, fqn: str, target: Any, *, is_kept: bool = False) -> None:
        if is_kept and isinstance(target, PerRank):
            self.match.kept.append(fqn)
            return
        self.match.missing += self._kept_in(fqn, target)

    def _kept_in(self, fqn: str, target: Any) -> list[str]:
        """Name what is to be loaded of a value that the checkpoint lacks, or has as another one."""
        kept: list[str] = []
        for name, each in leaves_in(fqn, target, self._keep):
            if self._keep is not None and not self._keep(name):
                kept += self._members_kept(name, each, is_absent=True)
            elif not self._leaves_out(name, each):
                kept.append(name)
        return kept

    def _members_kept(self, fqn: str, target: Any, *, is_absent: bool = False) -> list[str]:
        """Name what is to be loaded of a module, where less than all of it is.

        It is not asked for its state: of some, all ranks have to do that. So what it leaves out is
        not known, but where the checkpoint has some of it: of one that is absent, all is missing.
        """
        if self._keep is None or not isinstance(target, torch.nn.Module):
            return []
        names, _ = _members_of(fqn, target, is_guessed=is_absent)
        return [name for name in names if self._keep(name)]

    def _leaves_out(self, fqn: str, target: Any) -> bool:
        """Whether a selection accepts a module's name, and nothing that is in it.

        What the name of a part is in says nothing then, as with a dict. Not of a module of which
        not all is known, or that has nothing.
        """
        if self._keep is None or not isinstance(target, torch.nn.Module):
            return False
        names, is_whole = _members_of(fqn, target)
        return is_whole and bool(names) and not any(map(self._keep, names))

    def _note_unexpected(self, fqn: str, node: Json) -> None:
        self.match.unexpected += names_kept(fqn, node, self._keep)

    def _is_left(self, fqn: str, node: Json, keep: Predicate) -> bool:
        """Whether a value of the target that is no container is not to be loaded.

        What is a container in the checkpoint has names of its own below.
        """
        if keep(fqn):
            return False
        is_nested = type(node) in (dict, list) and tensor_index(node) is None
        return not (is_nested and names_kept(fqn, node, keep))

    def _selects(self, fqn: str, node: Json) -> bool:
        """Whether anything in a node is to be loaded."""
        return self._keep is None or bool(names_kept(fqn, node, self._keep))


def _members_of(
    fqn: str, module: torch.nn.Module, *, is_guessed: bool = False
) -> tuple[list[str], bool]:
    """Name the parameters of a module, and what else is stored of it, where torch gives that.

    No method is called: who overrides `named_parameters` may take other arguments.

    Args:
        fqn: Its name.
        module: It.
        is_guessed: Whether to name what is in the other parts, too, as if torch gave it.

    Returns:
        The names, and whether these are all. What a part that gives its state in its own way has
        in it (adapters alone, say) nobody knows.
    """
    names: dict[str, None] = {}
    ahead, is_whole = [(fqn, module)], True
    while ahead:
        place, part = ahead.pop(0)
        if not _gives_all(part):
            is_whole = False
            if not is_guessed:
                continue
        # what torch's own state_dict() goes by
        held, left = {**part._parameters, **part._buffers}, part._non_persistent_buffers_set  # noqa: SLF001
        found = (name for name, each in held.items() if each is not None and name not in left)
        names.update(dict.fromkeys(join_fqn(place, name) for name in found))
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            names[join_fqn(place, "_extra_state")] = None
        below = part._modules.items()  # noqa: SLF001  # as above
        ahead[:0] = [(join_fqn(place, name), each) for name, each in below if each is not None]
    return [*names], is_whole


def _gives_all(module: torch.nn.Module) -> bool:
    """Whether it is torch's code, and no hook of others, that gives a module's state."""
    # nothing public names them
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())  # noqa: SLF001
    own = (module.state_dict, module._save_to_state_dict)  # noqa: SLF001  # as above
    return all(map(is_of_torch, (*own, *hooks)))


def _arrays_in(node: Json) -> set[int]:
    """Give the indices of what arrays and bytes are made of, which have the host's memory."""
    found = (each for _, each in walk("", node) if each[TAG] in ("np", "bytes", "bytearray"))
    return {index for index in map(tensor_index, found) if index is not None}
