"""From names and paths to a nested state, as torch.distributed.checkpoint nests it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from ckptio.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Depth of a state, at most.
_MAX_DEPTH = 100
#: Places of lists that nobody filled are `None`: so many of them for each value, and more.
_MAX_HOLES, _MAX_HOLES_EACH = 10_000, 100


class _List(dict[int, Any]):
    """A list while it is filled, by index."""


class _Dict(dict[str, Any]):
    """A dict of the state; no leaf is one."""


def nest(values: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Put values where their paths say; those without one under their own names.

    Args:
        values: By name.
        paths: Keys from the root to the value: strings of dicts, ints of lists.

    Raises:
        FormatError: Two paths contradict each other, or make much more than there is.
    """
    root = _Dict()
    lists: list[_List] = []
    for fqn, value in values.items():
        path = paths.get(fqn, (fqn,))
        if len(path) > _MAX_DEPTH:
            raise FormatError(f"the place of {fqn!r} is {len(path)} levels down")
        container: Any = root
        for key, below in itertools.pairwise(path):
            container = _enter(fqn, container, key, _List() if type(below) is int else _Dict())
            if type(container) is _List and not container:
                lists.append(container)  # made just now: what is entered below it fills it
        if _enter(fqn, container, path[-1], value) is not value:
            raise FormatError(f"{fqn!r} has the place {path!r}, which is taken")
    holes = sum(max(filled) + 1 - len(filled) for filled in lists)
    if holes > _MAX_HOLES + _MAX_HOLES_EACH * len(values):
        raise FormatError(f"{holes} places of its lists are empty, of {len(values)} values")
    found: dict[str, Any] = _finish(root)
    return found


def _enter(fqn: str, container: Any, key: Any, new: Any) -> Any:
    """Give what is under a key, or put something there."""
    fits = (type(container) is _Dict and type(key) is str) or (
        type(container) is _List and type(key) is int and key >= 0
    )
    if not fits:
        raise FormatError(f"the place of {fqn!r} contradicts that of another, at {key!r}")
    return container.setdefault(key, new)


def _finish(node: Any) -> Any:
    """Turn what was filled into plain dicts and lists."""
    if type(node) is _Dict:
        return {key: _finish(item) for key, item in node.items()}
    if type(node) is _List:
        return [_finish(node.get(i)) for i in range(max(node) + 1)]
    return node
