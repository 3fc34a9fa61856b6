"""Versions that modules keep of themselves beside their state, in `state_dict()._metadata`.

A module that is given a state of an older version than its own changes what was stored into
what it needs now (`_load_from_state_dict`; quantisation's observers do, and batch norm). So
the versions are stored, and handed over with the values they belong to: with none, a module
takes every state for one of before there were versions, and changes what is right.

An older version may lack names of which the module makes something up. Nobody else knows what:
such a state is refused, and a module has to be given it by hand. One is known, as most vision
models have it: batch norm counts batches since its version 2, and goes on with its own count.

torch.distributed.checkpoint and safetensors keep none. torch.save does; what loads through a
state dict does as torch does then. Wrappers of modules take their names out of the keys of a
state, and leave them in the names of modules: here they are no part of either.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from ckptio.format.decode import ObjectDecoder
from ckptio.format.encode import TAG, join_fqn
from ckptio.state.rebuild import rebuild_word
from ckptio.state.tree import keys_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from ckptio.format.encode import Json
    from ckptio.state.fills import Match

_WRAPPERS = frozenset(("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"))
#: What batch norm has since a version, and what it counted for, which it had before.
_COUNT, _COUNTED, _COUNT_SINCE = "num_batches_tracked", ("running_mean", "running_var"), 2
_OUTER = "module"  # DistributedDataParallel's, at the root, where it may be a module's own name


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
        self._own: dict[Any, Any] = own if isinstance(own, dict) else {}
        #: Name and stored version of each module of another version, by its bare name.
        self._others: dict[str, tuple[str, Any]] = {}
        self._names = Names(target)
        self._match = match
        self._num_taken = match.num_taken
        #: What is below each module: whether some of it is taken, and some is not.
        self._taken: dict[str, set[bool]] = {}
        #: Modules of which names are not stored.
        self._lacking: set[str] = set()
        #: What is stored, for a target that says nothing of versions.
        self._stored: dict[Any, Any] = {}
        if node.get(TAG) == "odict" and "m" in node:
            stored = ObjectDecoder(rebuild_word).decode_versions("", node["m"])
            if not self._own:
                self._stored = stored
            elif stored != self._own:
                self._compare(stored, Names(keys_of(node)))

    def _compare(self, stored: dict[Any, Any], names: Names) -> None:
        """Find the modules of another version."""
        found = names.innermost(stored)
        for bare, name in self._names.innermost(self._own).items():
            entry = stored[found[bare]] if bare in found else self._own[name]
            if entry != self._own[name]:
                self._others[bare] = name, entry

    def makes_up(self, key: object, stored: Container[object]) -> bool:
        """Whether a module has something of its own for a name that its version did not have.

        Args:
            key: A key of the target that is not stored.
            stored: Those that are.
        """
        parent, dot, name = key.rpartition(".") if isinstance(key, str) else ("", "", "")
        found = self._others.get(self._names.bare(parent)) if name == _COUNT else None
        if found is None or not all(f"{parent}{dot}{other}" in stored for other in _COUNTED):
            return False
        return _version_of(self._own[found[0]]) >= _COUNT_SINCE > _version_of(found[1])

    def note(self, key: object, *, is_stored: bool = True) -> None:
        """Note that a key was matched, and whether anything was taken for it."""
        if self._others:
            before, self._num_taken = self._num_taken, self._match.num_taken
            for bare in above(self._names.bare(join_fqn("", key))):
                self._taken.setdefault(bare, set()).add(self._num_taken > before)
                if not is_stored:
                    self._lacking.add(bare)

    def settle(self, fqn: str) -> None:
        """Decide on versions, once every key was noted.

        Args:
            fqn: The name of the dict.
        """
        for bare, (name, entry) in list(self._others.items()):
            # what has no state of its own goes with what it is in
            taken = next((self._taken[b] for b in _around(bare) if b in self._taken), set())
            if taken == {True}:
                continue
            del self._others[bare]
            if True in taken and bare in self._taken:
                where = ".".join(filter(None, (fqn, bare))) or "the whole state"
                why = "and a part of it is loaded"
                if bare in self._lacking:
                    why = (
                        "which lacks some of its names; what load() gives without into= can be"
                        " given to load_state_dict(), which may know how to read it"
                    )
                self._match.mismatched.append(
                    f"{where}: {_show(self._own[name])} in the target, {_show(entry)} in the"
                    f" checkpoint, {why}"
                )

    def put(self, state: dict[Any, Any], *, is_whole: bool) -> dict[Any, Any]:
        """Give a state its versions, and copies of what is of another version.

        Tensors in it are the module's own, as a rule. The module writes to them, in any order,
        while it makes the new ones of what it is given. Where the target has no versions (a
        placeholder, or what was made by hand), it gets those that are stored.

        Args:
            state: It.
            is_whole: Whether all of it comes from the checkpoint.

        Returns:
            The state; an OrderedDict of it if it was stored as a dict, which has no versions.
        """
        if self._stored and is_whole and type(state) is OrderedDict:
            state._metadata = OrderedDict(self._stored)  # type: ignore[attr-defined]  # noqa: SLF001  # as below
        if not self._own or (not self._others and hasattr(state, "_metadata")):
            return state
        state = state if type(state) is OrderedDict else OrderedDict(state)
        metadata = OrderedDict(self._own)
        metadata.update(self._others.values())
        state._metadata = metadata  # type: ignore[attr-defined]  # noqa: SLF001  # as torch does
        for key in state if self._others else ():
            value = state[key]
            if isinstance(value, torch.Tensor) and any(
                bare in self._others for bare in above(self._names.bare(join_fqn("", key)))
            ):
                state[key] = value.detach().clone()
        return state


class Names:
    """Names of a state, and of its modules, without those of wrappers.

    Args:
        keys: Of the state.
    """

    def __init__(self, keys: Iterable[Any]) -> None:
        self._keys = keys
        self._drops_outer: bool | None = None

    def bare(self, name: str) -> str:
        """Take the names of wrappers out of a name."""
        parts = name.split(".")
        if parts[0] == _OUTER:
            if self._drops_outer is None:
                self._drops_outer = not any(
                    isinstance(k, str) and k.startswith(f"{_OUTER}.") for k in self._keys
                )
            parts = parts[self._drops_outer :]
        return ".".join(part for part in parts if part not in _WRAPPERS)

    def innermost(self, names: Iterable[Any]) -> dict[str, str]:
        """Give the name of each module itself, not of what wraps it, by its bare name."""
        found: dict[str, str] = {}
        for name in names:
            if type(name) is str:
                bare = self.bare(name)
                if len(name) >= len(found.get(bare, "")):
                    found[bare] = name
        return found


def _version_of(entry: Any) -> int:
    """Give the version in what a module says; 0 for one of before there were versions."""
    version = entry.get("version") if isinstance(entry, dict) else None
    return version if type(version) is int else 0


def _around(bare: str) -> Iterator[str]:
    """Give a module, and those it is in, outwards; the last is the root."""
    yield bare
    while bare:
        bare = bare.rpartition(".")[0]
        yield bare


def above(key: str) -> Iterator[str]:
    """Give the modules that a key of a state is in, outwards."""
    return _around(key.rpartition(".")[0])


def _show(version: object) -> str:
    """Write what a module says of its version."""
    if isinstance(version, dict) and list(version) == ["version"]:
        return f"version {version['version']}"
    return repr(version)
