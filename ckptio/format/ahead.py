"""Make values before the tensors that they lie among are there.

A value that does not fit (a member that an enum has lost, a zone that this machine does not know)
has to be an error before a tensor of the target is filled. So whatever holds no tensor is made
first, once, and stands made in its place. Of what holds some, keys are made, and records are asked
whether they have such fields; what their own code makes of tensors it says when these are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptio.errors import FormatError, TargetError
from ckptio.format.decode import BAD_VALUES, Made, misfit
from ckptio.format.encode import MAX_LEVELS, RANKS_TAG, TAG, join_fqn
from ckptio.format.fields import require_fields

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptio.format.decode import ObjectDecoder
    from ckptio.format.encode import Json

_MAPPINGS = ("dict", "odict", "counter")
_RECORDS = {"namedtuple": "a tuple", "dataclass": "a dict"}


def made_ahead(decoder: ObjectDecoder, fqn: str, node: Json) -> Json:
    """Make what holds no tensor of a node, which is at `fqn`, and give the node with that in it.

    Args:
        decoder: Makes it, and takes what is given here afterwards.
        fqn: Its name.
        node: The node; it is left as it is.

    Raises:
        FormatError: Something is not what `ObjectEncoder` writes.
        TargetError: Something does not fit, see `ObjectDecoder.decode`.
    """
    try:
        return _made(decoder, fqn, node, _with_tensors(decoder, fqn, node, 0))
    except (FormatError, TargetError):
        raise
    except BAD_VALUES as error:
        raise FormatError(f"bad value in the manifest: {error!r}") from None


def _made(decoder: ObjectDecoder, fqn: str, node: Json, found: Json | None) -> Json:
    """Give what was found to stand for a node; the value of one in which no tensor was found."""
    if found is not None or type(node) not in (dict, list):
        return node if found is None else found
    return Made(decoder.decode(fqn, node))


def _with_tensors(decoder: ObjectDecoder, fqn: str, node: Json, depth: int) -> Json | None:
    """Give a node that holds tensors with all else in it made; `None` for one that holds none."""
    if depth > MAX_LEVELS:
        raise FormatError(f"values nested deeper than {MAX_LEVELS} in the manifest")
    if type(node) is list:
        return _items(decoder, fqn, enumerate(node), depth)
    if type(node) is not dict:
        return None
    if TAG not in node:
        items = _items(decoder, fqn, node.items(), depth)
        return None if items is None else dict(zip(node, items, strict=True))
    tag = node[TAG]
    if type(tag) is not str or "t" in node:
        return node  # a tensor, or made of one
    if tag == "tuple":
        items = _items(decoder, fqn, enumerate(node["v"]), depth)
        return None if items is None else {**node, "v": items}
    if tag == RANKS_TAG:
        return _own(decoder, fqn, node, depth)
    if tag in _RECORDS:
        return _record(decoder, fqn, node, depth)
    return _mapping(decoder, fqn, node, depth)


def _own(decoder: ObjectDecoder, fqn: str, node: Json, depth: int) -> Json | None:
    """Do as `_with_tensors` with a value that was kept for each rank; its name is the node's."""
    within = [_with_tensors(decoder, fqn, item, depth + 1) for item in node["v"]]
    if all(found is None for found in within):
        return None
    items = [_made(decoder, fqn, *each) for each in zip(node["v"], within, strict=True)]
    return {**node, "v": items}


def _items(
    decoder: ObjectDecoder, fqn: str, pairs: Iterable[tuple[Any, Json]], depth: int
) -> list[Json] | None:
    """Do as `_with_tensors` with the items of a container; give these as a list, without keys."""
    found: list[tuple[str, Json, Json | None]] = []
    holds = False
    for key, item in pairs:
        if type(item) not in (dict, list):  # of which there may be many
            found.append(("", item, None))
            continue
        name = join_fqn(fqn, key)
        within = _with_tensors(decoder, name, item, depth + 1)
        holds |= within is not None
        found.append((name, item, within))
    return [_made(decoder, *each) for each in found] if holds else None


def _mapping(decoder: ObjectDecoder, fqn: str, node: Json, depth: int) -> Json | None:
    value = node.get("v")
    if not holds_tensors(value):
        return None
    if node[TAG] not in _MAPPINGS:
        return node  # a set or an enum of such; whoever makes it says that there is none
    if "m" in node:
        node = {**node, "m": Made(decoder.decode_versions(fqn, node["m"]))}
    if type(value) is dict:
        items = _items(decoder, fqn, value.items(), depth) or []
        return {**node, "v": dict(zip(value, items, strict=True))}
    # a mapping of these keys alone says what is wrong with them, as that of all would
    keys = list(decoder.decode(fqn, {TAG: node[TAG], "v": [[key, None] for key, _ in value]}))
    pairs = [(key, item) for key, (_, item) in zip(keys, value, strict=True)]
    items = _items(decoder, fqn, pairs, depth) or []
    return {**node, "v": [[Made(k), item] for k, item in zip(keys, items, strict=True)]}


def _record(decoder: ObjectDecoder, fqn: str, node: Json, depth: int) -> Json | None:
    fields = dict(node["v"])
    cls = decoder.types.get(str(node.get("c")))
    if cls is not None and hasattr(cls, "__tensor_unflatten__"):
        return node  # classes of what is beside its tensors are looked at when it is made
    items = _items(decoder, fqn, fields.items(), depth)
    if items is None:
        return None
    if cls is not None:
        try:
            require_fields(cls, fields)
        except TypeError as error:
            raise misfit(fqn, cls, error, _RECORDS[node[TAG]]) from None
    return {**node, "v": [list(pair) for pair in zip(fields, items, strict=True)]}


def holds_tensors(node: Json) -> bool:
    """Whether anything in a node refers to a tensor."""
    if type(node) is dict:
        if TAG in node and (type(node[TAG]) is not str or "t" in node):
            return True
        node = list(node.values())
    return type(node) is list and any(map(holds_tensors, node))
