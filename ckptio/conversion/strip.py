"""What is below a name, for `strip=`: under the name, and under keys that begin with it.

A name may end inside of keys, which have dots in a flat state and in the `state_dict` of a
module: a model that was saved compiled is below `model._orig_mod`. All of it is taken together, as
`select=` takes it; two values that would have one name are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio.conversion.unfit import UnfitError
from ckptio.errors import ConfigError
from ckptio.format.encode import RANKS_TAG, TAG
from ckptio.state.tree import items_of, tensor_index

if TYPE_CHECKING:
    from ckptio.format.encode import Json


def below(tree: Json, name: str) -> Json:
    """Give what the tree has under a name; `{}` if there is nothing.

    Raises:
        ConfigError: It is a tensor's.
        UnfitError: Two values below it have one name.
    """
    exact: list[Json] = []
    inside: list[tuple[str, Json]] = []
    found = [("", tree)]
    while found:
        fqn, node = found.pop()
        if fqn == name:
            exact.append(node)
        for held, item in _items(fqn, node):
            if held == name or name.startswith(f"{held}."):
                found.append((held, item))
            elif held.startswith(f"{name}."):
                inside.append((held.removeprefix(f"{name}."), item))
    return _joined(name, exact, inside)


def _joined(name: str, exact: list[Json], inside: list[tuple[str, Json]]) -> Json:
    """Make one of what is under a name itself and what was found below it, wherever."""
    others = [node for node in exact if tensor_index(node) is None]
    if len(others) < len(exact) and not inside:
        raise ConfigError(f"{name!r} is a tensor: there are no names below it to keep")
    if len(exact) == len(others) == 1 and len(inside) == len(_items("", exact[0])):
        return exact[0]  # all of it is its own: as it is
    if not all(map(_has_names, others)):
        raise UnfitError(f"two values are called {name!r}")
    joined: dict[str, Json] = {}
    for key, item in inside:
        if key in joined:
            raise UnfitError(f"two values are called {f'{name}.{key}'!r}")
        joined[key] = item
    return {TAG: "dict", "v": inside} if TAG in joined else joined


def _has_names(node: Json) -> bool:
    """Whether a node is of several values, with names of their own."""
    if type(node) is dict:
        return tensor_index(node) is None and node.get(TAG) not in ("enum", RANKS_TAG)
    return type(node) is list


def _items(fqn: str, node: Json) -> list[tuple[str, Json]]:
    """Give the values of a node that have names of their own, with those."""
    return items_of(fqn, node) if _has_names(node) else []
