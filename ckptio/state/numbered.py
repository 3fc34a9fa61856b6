"""Numbers of an optimizer's parameters, which torch.distributed.checkpoint keeps as strings.

No optimizer looks under these: it would take the state, and begin with none. What says that
a dict is one of an optimizer are its groups, which list the numbers themselves. Needs no torch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckptio.format.encode import TAG
from ckptio.state.tree import children

if TYPE_CHECKING:
    from ckptio.format.encode import Json

#: A number as it is written, of no more parameters than there can be.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


def numbered(node: dict[str, Json]) -> dict[str, Json]:
    """Give the state of an optimizer with the numbers of its parameters as keys."""
    state = node.get("state")
    if TAG in node or type(state) is not dict or not state:
        return node
    if not all(_NUMBER.fullmatch(key) for key in state):
        return node
    return {**node, "state": {TAG: "dict", "v": [[int(key), item] for key, item in state.items()]}}


def numbered_below(node: Json) -> Json:
    """Give a tree in which every state of an optimizer that lists its numbers is `numbered`."""
    if type(node) is list:
        return [numbered_below(item) for item in node]
    if type(node) is not dict or TAG in node:
        return node
    node = {key: numbered_below(item) for key, item in node.items()}
    groups = groups_of(node.get("param_groups"))
    state = node.get("state")
    if groups is None or type(state) is not dict:
        return node
    numbers = {str(key) for group in groups for key in group["params"] if type(key) is int}
    return numbered(node) if state.keys() <= numbers else node


def groups_of(node: Json) -> list[dict[str, Json]] | None:
    """Give the options of each group, names of parameters among them; `None` if it is none."""
    if type(node) is not list or not all(type(group) is dict for group in node):
        return None
    groups = [dict(children("", group)) for group in node]
    for group in groups:
        ids = group.get("params")
        if type(ids) is not list or not all(type(key) in (int, str) for key in ids):
            return None
    return groups
