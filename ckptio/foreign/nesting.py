"""From names and paths to a nested state, as torch.distributed.checkpoint nests it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from ckptio.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Elements of a list, at most: places that nobody filled are `None`.
_MAX_LIST = 1_000_000


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
        FormatError: Two paths contradict each other.
    """
    root = _Dict()
    for fqn, value in values.items():
        path = paths.get(fqn, (fqn,))
        container: Any = root
        for key, below in itertools.pairwise(path):
            container = _enter(fqn, container, key, _List() if type(below) is int else _Dict())
        if _enter(fqn, container, path[-1], value) is not value:
            raise FormatError(f"{fqn!r} has the place {path!r}, which is taken")
    found: dict[str, Any] = _finish(root)
    return found


def _enter(fqn: str, container: Any, key: Any, new: Any) -> Any:
    """Give what is under a key, or put something there."""
    fits = (type(container) is _Dict and type(key) is str) or (
        type(container) is _List and type(key) is int and 0 <= key < _MAX_LIST
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
