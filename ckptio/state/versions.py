"""Versions that modules keep of themselves beside their state, in `state_dict()._metadata`.

A module that is given a state of an older version than its own changes what was stored into
what it needs now (`_load_from_state_dict`; quantisation's observers do, and batch norm). So
the versions are stored, and handed over with the values they belong to: with none, a module
takes every state for one of before there were versions, and changes what is right.

torch.distributed.checkpoint and safetensors keep none. torch.save does; what loads through a
state dict does as torch does then.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from ckptio.format.decode import ObjectDecoder
from ckptio.format.words import decode_word

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptio.state.fills import Match

    Json = Any


class Versions:
    """The versions that a state of a target gets, of its own and of what is stored.

    A module and what is below it gets what is stored if all of that is loaded, and keeps its
    own if nothing is. Its values are either of one version or of the other, so that a part of
    them is refused where the two differ.

    Args:
        target: A dict of the target.
        node: What is stored for it.
        match: Counts what is taken from the checkpoint; takes a line for each module of another
            version of which a part is.

    Raises:
        FormatError: What is stored are no versions.
    """

    def __init__(self, target: dict[Any, Any], node: dict[str, Json], match: Match) -> None:
        own = getattr(target, "_metadata", None) if type(target) is OrderedDict else None
        self._own: Mapping[Any, Any] = own if isinstance(own, dict) else {}
        self._stored: Mapping[Any, Any] = {}
        if self._own and "m" in node:
            self._stored = ObjectDecoder(decode_word).decode_versions("", node["m"])
        #: Modules of another version, by the beginning of the names below them.
        self._others = {
            f"{name}." if name else "": name
            for name, version in self._own.items()
            if type(name) is str and self._stored.get(name, version) != version
        }
        self._match = match
        self._num_taken = match.num_taken
        self._taken: dict[str, bool] = {}

    def note(self, key: object) -> None:
        """Note that a key was matched: whether anything was taken since the one before."""
        if self._others:
            before, self._num_taken = self._num_taken, self._match.num_taken
            self._taken[str(key)] = self._num_taken > before

    def settle(self, fqn: str) -> None:
        """Decide on versions, once every key was noted.

        Args:
            fqn: The name of the dict.
        """
        for prefix, name in list(self._others.items()):
            taken = {is_taken for key, is_taken in self._taken.items() if key.startswith(prefix)}
            if taken == {True}:
                continue
            del self._others[prefix]
            if True in taken:
                where = ".".join(filter(None, (fqn, name))) or "the whole state"
                self._match.mismatched.append(
                    f"{where}: {_show(self._own[name])} in the target, {_show(self._stored[name])}"
                    " in the checkpoint, and a part of it is loaded"
                )

    def put(self, state: dict[Any, Any], *, to_take: bool) -> dict[Any, Any]:
        """Give a state its versions.

        Args:
            state: It.
            to_take: Whether a stateful object takes it. Tensors in it are the object's own then,
                and those of another version are copied: the object writes to its own, in any
                order, while it makes the new ones of them.

        Returns:
            The state; an OrderedDict of it if it was stored as a dict, which has no versions.
        """
        if not self._own or (not self._others and hasattr(state, "_metadata")):
            return state
        state = state if type(state) is OrderedDict else OrderedDict(state)
        changed = {name: self._stored[name] for name in self._others.values()}
        state._metadata = OrderedDict({**self._own, **changed})  # type: ignore[attr-defined]  # noqa: SLF001  # as torch does
        for key in state if to_take and self._others else ():
            value = state[key]
            if isinstance(value, torch.Tensor) and str(key).startswith(tuple(self._others)):
                state[key] = value.detach().clone()
        return state


def _show(version: object) -> str:
    """Write what a module says of its version."""
    if isinstance(version, dict) and list(version) == ["version"]:
        return f"version {version['version']}"
    return repr(version)
