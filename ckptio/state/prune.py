"""Cut a tree down to what was selected of it, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio.format.encode import RANKS_TAG, TAG, join_fqn
from ckptio.plan.trees import ABSENT
from ckptio.state.select import Patterns
from ckptio.state.tree import MAPPING_TAGS, children, keys_of

if TYPE_CHECKING:
    from ckptio.format.encode import Json
    from ckptio.state.tree import Predicate

_MISSING = object()


def prune(tree: Json, keep: Predicate) -> Json:
    """Keep the values whose names `keep` accepts, and the containers around them.

    Dicts lose the other keys. Lists, tuples and fields keep their places, with `None`
    for what was not selected.

    Returns:
        A new tree; `{}` if nothing was selected.
    """
    found = prune_at("", tree, keep)
    return found[0] if found else {}


def prune_at(fqn: str, node: Json, keep: Predicate) -> tuple[Json, ...]:
    """Prune the node at `fqn` like a tree.

    Returns:
        The new node; nothing if nothing in it was selected.
    """
    kept = _prune(fqn, node, keep)
    return () if kept is _MISSING else (kept,)


def _prune(fqn: str, node: Json, keep: Predicate) -> Json:
    """Prune one node; `_MISSING` if nothing in it was selected."""
    if type(node) is list:
        if not _reaches(keep, fqn):
            return _MISSING
        items = [_prune(join_fqn(fqn, i), item, keep) for i, item in enumerate(node)]
        return _in_place(items, kept_empty=not node and bool(keep(fqn)))
    if type(node) is not dict:
        return node if keep(fqn) else _MISSING
    tag = node.get(TAG)
    if tag is None:
        if not _reaches(keep, fqn):
            return _MISSING
        found = {key: _prune(join_fqn(fqn, key), item, keep) for key, item in node.items()}
        left = {key: item for key, item in found.items() if item is not _MISSING}
        return left if left or (not node and keep(fqn)) else _MISSING
    if tag not in (*MAPPING_TAGS, "tuple", RANKS_TAG):
        return node if keep(fqn) else _MISSING
    return _prune_tagged(fqn, node, keep)


def _reaches(keep: Predicate, fqn: str) -> bool:
    """Whether anything in a container could be accepted: nobody else knows but what says so."""
    return not isinstance(keep, Patterns) or keep.reaches(fqn)


def _prune_tagged(fqn: str, node: dict[str, Json], keep: Predicate) -> Json:
    """Prune a container that has a tag."""
    value = node["v"]
    kept_empty = not value and bool(keep(fqn))
    items = [_prune(name, item, keep) for name, item in children(fqn, node)]
    if node[TAG] == RANKS_TAG:
        kept = [ABSENT if item is _MISSING else item for item in items]
        return _MISSING if all(item is _MISSING for item in items) else {**node, "v": kept}
    if node[TAG] in ("tuple", "namedtuple", "dataclass"):
        found = _in_place(items, kept_empty=kept_empty)
        if found is _MISSING:
            return _MISSING
        if node[TAG] != "tuple":
            found = [[pair[0], item] for pair, item in zip(value, found, strict=True)]
        return {**node, "v": found}
    pairs = [[k, i] for k, i in zip(keys_of(node), items, strict=True) if i is not _MISSING]
    if not pairs and not kept_empty:
        return _MISSING
    return {**node, "v": dict(pairs) if type(value) is dict else pairs}


def _in_place(items: list[Json], *, kept_empty: bool) -> Json:
    """Keep a sequence if anything in it was selected, with `None` for the rest."""
    if all(item is _MISSING for item in items) and not kept_empty:
        return _MISSING
    return [None if item is _MISSING else item for item in items]
