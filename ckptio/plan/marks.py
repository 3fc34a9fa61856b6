"""Marks: facts of a tensor, by kind, that ranks send in their trees to find out if they disagree.

A mark is a part of a reference to a tensor (`MARK`) while trees are merged, and is never stored.
A rank may know more facts than another, such as the name of a parameter that only its own state
has. So two marks agree if every kind of fact that both have is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptio.format.encode import TAG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.format.encode import Json

#: Key of the facts in a reference to a tensor.
MARK = "mark"
#: Kinds of facts, and what is said of them.
_KINDS = {"of": "of {!r}", "crc32c": "crc32c {}"}


def is_marked(node: Json) -> bool:
    """Whether a node is a reference with a mark, and not a dict of the caller's with such a key.

    A dict of the caller's has no tag: one with a key like the tag is written as a list of pairs.
    """
    return _is_reference(node) and MARK in node


def unmarked(node: dict[str, Any]) -> dict[str, Any]:
    """Give a reference without facts, as a manifest has it."""
    return {key: item for key, item in node.items() if key != MARK}


def unite_marked(branches: Sequence[tuple[int, Json]]) -> list[tuple[int, Json]]:
    """Unite references that differ only in their marks, if these agree; else change nothing.

    Args:
        branches: The nodes at a place, with the groups of ranks that have them, by bits.

    Returns:
        One branch, for all of these groups; or `branches`, if they differ otherwise.
    """
    branches = list(branches)
    if len(branches) == 1 or not any(is_marked(node) for _, node in branches):
        return branches
    first = branches[0][1]
    facts: dict[str, str] = {}
    holders = 0
    for held, node in branches:
        if not _is_reference(node) or unmarked(node) != unmarked(first):
            return branches
        if any(facts.setdefault(k, fact) != fact for k, fact in node.get(MARK, {}).items()):
            return branches
        holders |= held
    return [(holders, first)]


def show_mark(node: dict[str, Any]) -> str:
    """Write the facts of a reference for people."""
    return ", ".join(_KINDS[kind].format(fact) for kind, fact in node[MARK].items())


def _is_reference(node: Json) -> bool:
    """Whether a node of a rank's tree refers to a tensor: by name, or in what is made of it."""
    return type(node) is dict and TAG in node and (type(node[TAG]) is list or "t" in node)
