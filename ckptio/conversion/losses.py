"""What a state loses on its way into formats of others.

safetensors has no name for some element types, which become bytes, or pairs of real numbers.

torch.distributed.checkpoint's writer joins keys by dots, and keeps what it comes to: neither what
kind of dict it went through, nor dicts in which there is nothing. It pickles what is no tensor, and
of the words in pickles `weights_only` knows few: a date is in the directory, but whoever loads that
without running what it says does not get it. Classes are never imported for a conversion, so what
they made goes as the plain value that it is stored as.

Nothing is lost, but nobody finds it, where names are those that a wrapper gave to a model.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ckptio.engine.hints import WRAPPERS
from ckptio.format.bucket import later_code
from ckptio.format.encode import TAG, join_fqn
from ckptio.layout import DTYPES
from ckptio.state.tree import children, keys_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptio.conversion.source import Leaf
    from ckptio.format.encode import Json

_MAPPINGS = (None, "dict", "odict", "counter", "dataclass")
#: What `weights_only` does not load, by tag.
_PICKLED = {
    "np": "what is numpy's",
    "npscalar": "what is numpy's",
    "date": "dates and times",
    "datetime": "dates and times",
    "time": "dates and times",
    "timedelta": "dates and times",
    "path": "paths",
    "frozenset": "frozensets",
}
_KINDS = {"odict": "an OrderedDict", "counter": "a Counter", "dataclass": "a dataclass"}
#: What comes back as the value that is stored of it.
_PLAIN = {
    "enum": "an enum comes back as its value",
    "namedtuple": "a named tuple comes back as a tuple",
    "dataclass": "a dataclass comes back as a dict",
}


def lost_in_safetensors(leaves: Iterable[Leaf]) -> list[str]:
    """Say which tensors other readers get as what they are not, a line each."""
    lost = []
    for leaf in leaves:
        dtype = DTYPES[leaf.dtype]
        if not dtype.is_native and later_code(leaf.dtype, leaf.shape) is None:
            what = f"pairs of {dtype.code}" if dtype.inner else dtype.code
            lost.append(f"{leaf.name}: other readers get {leaf.dtype} as {what}")
    return lost


def left_by_wrappers(leaves: Iterable[Leaf], strip: str) -> list[str]:
    """Say so if all names are those that a wrapper gave to a model: other readers have none.

    Args:
        leaves: What is written.
        strip: The name whose part was taken, if any.
    """
    levels = zip(*(leaf.name.split(".")[:-1] for leaf in leaves), strict=False)
    common = [parts[0] for parts in itertools.takewhile(lambda parts: len({*parts}) == 1, levels)]
    depth = max((n for n, part in enumerate(common, 1) if f"{part}." in WRAPPERS), default=0)
    if not depth:
        return []
    above = ".".join(common[:depth])
    whole = f"{strip.removesuffix('.')}.{above}" if strip else above
    note = f"every name begins with {f'{above}.'!r}, which a wrapper put there"
    return [f"{note}: strip={whole!r} (--strip {whole}) takes it off"]


def lost_in_dcp(tree: Json) -> list[str]:
    """Say what of a tree does not come back from DCP as it was, a line each."""
    return list(_lost("", tree, is_root=True))


def _lost(fqn: str, node: Json, *, is_root: bool = False) -> Iterator[str]:
    name = fqn or ("the state" if is_root else "''")
    if _is_mapping(node):
        keys = keys_of(node)
        if not keys and not is_root:
            yield f"{name}: an empty dict is not kept"
        elif (kind := _KINDS.get(node.get(TAG))) is not None:
            without = ", without versions of modules" if "m" in node else ""
            yield f"{name}: {kind} comes back as a dict{without}"
        if not all(map(_is_text, keys)):
            yield f"{name}: keys that are no strings come back as strings"
        for below, item in children(fqn, node):
            yield from _lost(below, item)
    elif _is_opened(node):
        for i, item in enumerate(node):
            yield from _lost(join_fqn(fqn, i), item)
    else:
        tags = set(_tags(node))
        yield from (f"{name}: {lost}" for tag, lost in _PLAIN.items() if tag in tags)
        for what in sorted({_PICKLED[tag] for tag in tags & _PICKLED.keys()}):
            yield f"{name}: DCP pickles {what}, and ckptio does not load it back"


def _tags(node: Json) -> Iterator[str]:
    """Give the tag of everything in a value that is written whole, more than once if need be."""
    if type(node) is list:
        for item in node:
            yield from _tags(item)
    elif type(node) is dict:
        if type(node.get(TAG)) is str:
            yield node[TAG]
        for item in node.values():
            yield from _tags(item)


def _is_mapping(node: Json) -> bool:
    return type(node) is dict and node.get(TAG) in _MAPPINGS


def _is_text(key: Json) -> bool:
    return type(key) is str or (type(key) is dict and key.get(TAG) == "str")


def _is_opened(node: Json) -> bool:
    """Whether a list is taken apart: it holds dicts or tensors, or a list that does."""
    return type(node) is list and any(
        _is_mapping(item)
        or _is_opened(item)
        or (type(item) is dict and (type(item.get(TAG)) is int or item.get(TAG) == "view"))
        for item in node
    )
