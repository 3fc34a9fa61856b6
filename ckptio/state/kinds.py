"""What a node of the tree is, in a few words of a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptio.format.encode import TAG
from ckptio.format.fields import CONTEXT
from ckptio.state.tree import children, is_ranks

if TYPE_CHECKING:
    from ckptio.format.encode import Json

_MAX_KEYS = 3
_MAX_KEY_CHARS = 40
_DICTS = {None: "dict", "dict": "dict", "odict": "OrderedDict", "counter": "Counter"}
_RECORDS = {"dataclass": "dataclass", "namedtuple": "named tuple", "enum": "enum"}
_OTHERS = {"bytes": "bytes object", "view": "tensor", "np": "array", "npscalar": "number of numpy"}


def kind_of(node: Json) -> str:
    """Say what a node is: "an int", "a list of 3", "a dict with 'model', 'step'".

    Args:
        node: The node, in a tree of one rank.
    """
    if node is None:
        return "None"
    if is_ranks(node):
        return kind_of(node["v"][0])
    if type(node) is list:
        return f"a list of {len(node)}" if node else "an empty list"
    if type(node) is not dict:
        return _with_article(type(node).__name__)
    tag: Any = node.get(TAG)
    if tag in _DICTS:
        return _dict(_DICTS[tag], [name for name, _ in children("", node)])
    if type(tag) is int:
        return "a tensor"
    if tag in _RECORDS:
        is_wrapper = tag == "dataclass" and CONTEXT in dict(node["v"])
        kind = "tensor of class" if is_wrapper else _RECORDS[tag]
        return f"{_with_article(kind)} {str(node.get('c')).rpartition(':')[2]!r}"
    if tag in ("tuple", "set", "frozenset"):
        return f"{_with_article(tag)} of {len(node['v'])}" if node["v"] else f"an empty {tag}"
    return _with_article(_OTHERS.get(tag, tag))


def _dict(kind: str, names: list[str]) -> str:
    if not names:
        return f"an empty {kind}"
    keys = [n if len(n) <= _MAX_KEY_CHARS else f"{n[:_MAX_KEY_CHARS]}..." for n in names]
    more = f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
    return f"{_with_article(kind)} with {', '.join(map(repr, keys[:_MAX_KEYS]))}{more}"


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiouAEIO" else f"a {kind}"
