"""Read and walk the tree of a manifest, without torch.

`read_tree` checks every node once, so that nothing behind it needs to doubt containers and
references; what a scalar means is checked where it is built (`rebuild`, `fills`). The rest walks:
names and references of tensors, keys, what ranks kept for themselves. Nodes stay the dicts and
lists that JSON gives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ckptio.errors import FormatError
from ckptio.format.crowds import refuse_crowd
from ckptio.format.decode import ObjectDecoder
from ckptio.format.doubles import require_distinct
from ckptio.format.encode import MAX_DEPTH, RANKS_TAG, TAG, join_fqn
from ckptio.format.words import decode_word
from ckptio.plan.trees import ABSENT
from ckptio.state.references import is_naturals, is_reference

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptio.format.encode import Json
    from ckptio.format.manifest import Manifest

Predicate = Callable[[str], object]
_MISSING = object()
#: Types of JSON that hold others; what is none of them refers to nothing.
_NODES = (dict, list)
_DICT_TAGS = ("dict", "odict", "counter")
MAPPING_TAGS = (*_DICT_TAGS, "namedtuple", "dataclass")
_SCALAR_TAGS = frozenset(
    (
        "enum", "int", "float", "complex", "str", "bytes", "bytearray", "date", "datetime",
        "time", "timedelta", "path", "npscalar", "torch.Size", "torch.dtype", "torch.device",
    )
)  # fmt: skip
#: Keys of these are equal to others of the same value.
_VALUE_TAGS = ("int", "float", "complex", "bytes", "npscalar")
_TUPLE_TAGS = ("tuple", "namedtuple", "torch.Size")
#: JSON values inside each other, at most: an enum takes one, a mapping of pairs takes three for one
#: container, and then there is what each rank has. All can walk through so many.
_MAX_JSON_LEVELS = 4 * MAX_DEPTH + 4


def read_tree(manifest: Manifest, rank: int | None = None) -> Json:
    """Parse the tree of a manifest, and check that it is made of what `flatten` makes.

    Values of scalars are checked when they are built; what containers and references
    have is checked here, so that nobody behind this needs to doubt it.

    Args:
        manifest: The manifest.
        rank: Whose tree to give: of what was kept for each rank, only its own is left,
            and nothing (see `is_absent`) of a rank that had none. All ranks' if not given.

    Raises:
        FormatError: It is no JSON, has an unknown tag, lacks a member, refers to a tensor
            that is not there, is nested too deep, or has a member twice.
    """
    try:
        tree = msgspec.json.decode(manifest.tree)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"the tree of the manifest is not JSON: {error}") from None
    may_have_ranks = manifest.ckptio != 1  # the first version knew none
    has_ranks = _check(
        [tree], len(manifest.tensors), set(), _MAX_JSON_LEVELS, may_have_ranks=may_have_ranks
    )
    require_distinct(manifest.tree, tree)
    return tree if rank is None or not has_ranks else take_rank(tree, rank)


def take_rank(node: Json, rank: int) -> Json:
    """Give the tree of one rank: of what was kept for each rank, only its own is left.

    It stays marked: `{"~": "ranks", "v": [value]}`.
    """
    if type(node) is list:
        return [take_rank(item, rank) for item in node]
    if type(node) is not dict:
        return node
    tag = node.get(TAG, _MISSING)
    if tag is _MISSING:
        return {key: take_rank(item, rank) for key, item in node.items()}
    if tag == RANKS_TAG:
        values = node["v"]
        return {TAG: RANKS_TAG, "v": [values[rank] if rank < len(values) else ABSENT]}
    return {**node, "v": take_rank(node["v"], rank)} if "v" in node else node


def is_same(one: Json, other: Json) -> bool:
    """Whether two nodes are the same: 1, True and 1.0 are equal, and are three."""
    return one == other and msgspec.json.encode(one) == msgspec.json.encode(other)


def is_ranks(node: Json) -> bool:
    """Whether a node is a value that was kept for each rank."""
    return type(node) is dict and node.get(TAG) == RANKS_TAG


def is_absent(node: Json) -> bool:
    """Whether a node of one rank's tree is a value that only other ranks had."""
    return type(node) is dict and node.get(TAG) == RANKS_TAG and node["v"] == [ABSENT]


def holds_absent(node: Json) -> bool:
    """Whether anything in a node of one rank's tree is a value that only other ranks had."""
    if type(node) is dict:
        return is_absent(node) or any(map(holds_absent, _containers(node.values())))
    return type(node) is list and any(map(holds_absent, _containers(node)))


def _containers(items: Iterable[Json]) -> Iterator[Json]:
    return (item for item in items if type(item) in _NODES)


def _check(
    level: list[Json],
    num_tensors: int,
    owned: set[int],
    max_levels: int,
    *,
    may_have_ranks: bool,
) -> bool:
    """Check every node of a tree, or of several; say whether any was kept for each rank.

    Args:
        level: The nodes.
        num_tensors: How many tensors there are to refer to.
        owned: Takes those of which a `bytearray` is made: each is made of one of its own, as no
            two can share memory, and a tree of a million would take a million times as much.
        max_levels: How many values may be inside each other, those kept for each rank included.
        may_have_ranks: Whether a node may be a value of each rank.
    """
    has_ranks = False
    ahead: list[list[Json]] = [level, [], []]  # by how many levels further down
    for num_above in range(max_levels):
        level = ahead.pop(0)
        below = ahead[0]
        ahead.append([])
        for node in level:
            if type(node) is list:
                below += node
            elif type(node) is dict:
                tag = node.get(TAG, _MISSING)
                if tag is _MISSING:
                    below += node.values()
                elif (
                    type(tag) is int
                    and 0 <= tag < num_tensors
                    and (len(node) == 1 or _has_order(node))
                ) or (type(tag) is str and _fits(tag, node, num_tensors, owned, ahead)):
                    continue
                elif may_have_ranks and tag == RANKS_TAG and _is_list_of_ranks(node):
                    values = [value for value in node["v"] if value != ABSENT]
                    left = max_levels - num_above - 2
                    _check(values, num_tensors, owned, left, may_have_ranks=False)
                    has_ranks = True
                else:
                    raise FormatError(f"a bad value in the manifest: {str(node)[:200]}")
        if not any(ahead):
            return has_ranks
    raise FormatError("values nested deeper in the manifest than any save nests them")


def _has_order(node: dict[str, Json]) -> bool:
    """Whether a node of a tensor has an order of its dimensions beside it, and no more."""
    return node.keys() == {TAG, "p"} and is_naturals(node["p"]) and bool(node["p"])


def _is_list_of_ranks(node: dict[str, Json]) -> bool:
    return len(node) == 2 and type(node.get("v")) is list and bool(node["v"])  # noqa: PLR2004  # tag and values


def _fits(
    tag: str, node: dict[str, Json], num_tensors: int, owned: set[int], ahead: list[list[Json]]
) -> bool:
    """Whether a node has the members of its tag; what it contains goes to `ahead`.

    Raises:
        FormatError: Too many of its keys have one hash.
    """
    value = node.get("v")
    if "t" in node:
        return is_reference(tag, node, num_tensors, owned)
    if tag in MAPPING_TAGS:
        if "m" in node:
            if tag != "odict" or type(node["m"]) is not dict:
                return False
            ahead[0].append(node["m"])
        if type(value) is dict and tag in _DICT_TAGS:
            ahead[1] += value.values()
            return True
        if type(value) is not list or not all(type(p) is list and len(p) == 2 for p in value):  # noqa: PLR2004  # pairs
            return False
        ahead[2] += [item for pair in value for item in pair]
        refuse_crowd([key for key, _ in value])
        return tag in _DICT_TAGS or all(type(pair[0]) is str for pair in value)
    if tag in ("tuple", "set", "frozenset"):
        ahead[0].append(value)
        refuse_crowd(value if tag != "tuple" and type(value) is list else ())
        return type(value) is list
    if tag == "enum":
        ahead[0].append(value)
    return tag in _SCALAR_TAGS and "v" in node


def tensor_index(node: Json) -> int | None:
    """Give the index of the stored tensor that a node refers to, `None` if it refers to none."""
    if type(node) is not dict:
        return None
    tag = node.get(TAG)
    index = tag if type(tag) is int else node.get("t") if type(tag) is str else None
    return index if type(index) is int else None


def walk(fqn: str, node: Json) -> Iterator[tuple[str, Json]]:
    """Give name and node of every tensor reference in a tree, in its order."""
    if type(node) is list:
        for i, item in enumerate(node):
            if type(item) in _NODES:
                yield from walk(join_fqn(fqn, i), item)
    elif type(node) is dict:
        if tensor_index(node) is not None:
            yield fqn, node
            return
        for key, item in children(fqn, node):
            if type(item) in _NODES:
                yield from walk(key, item)


def indices_in(node: Json) -> set[int]:
    """Give the indices of all stored tensors that a tree refers to."""
    return set(orders_in(node))


def orders_in(node: Json) -> dict[int, tuple[int, ...]]:
    """Give each tensor's dimensions as they lie in memory, by index; () where row-major."""
    found: dict[int, tuple[int, ...]] = {}
    for _, reference in walk("", node):
        index = tensor_index(reference)
        if index is not None:
            order = tuple(reference["p"]) if "p" in reference else ()
            # what views refer to, or arrays are made of, is row-major
            found[index] = order if found.get(index, order) == order else ()
    return found


def renumbered(node: Json, number_of: Callable[[int], int]) -> Json:
    """Write a tree with other numbers of tensors.

    Args:
        node: The tree; it is left as it is.
        number_of: Gives the number to write for one that is there.
    """
    if type(node) is list:
        return [renumbered(item, number_of) for item in node]
    if type(node) is not dict:
        return node
    if type(node.get(TAG)) is int:
        return {**node, TAG: number_of(node[TAG])}
    if TAG in node and "t" in node:
        return {**node, "t": number_of(node["t"])}
    return {key: renumbered(item, number_of) for key, item in node.items()}


def children(fqn: str, node: dict[str, Json]) -> Iterator[tuple[str, Json]]:
    """Give name and node of what a container node holds; nothing for a scalar."""
    tag = node.get(TAG)
    value: Json = node.get("v") if tag is not None else node
    prefix = f"{fqn}." if fqn else ""
    if tag is None or tag in MAPPING_TAGS:
        if type(value) is dict:
            for key, item in value.items():
                yield prefix + key, item
        else:
            yield from _pairs(fqn, value)
    elif tag == "tuple":
        for i, item in enumerate(value):
            yield f"{prefix}{i}", item
    elif tag == "enum":
        yield fqn, node.get("v")
    elif tag == RANKS_TAG:
        for i, item in enumerate(value):
            yield (fqn if len(value) == 1 else f"{fqn}~rank{i}"), item


def _pairs(fqn: str, pairs: list[Json]) -> Iterator[tuple[str, Json]]:
    """Name the values of a mapping that was written as a list of pairs."""
    keys = ObjectDecoder(decode_word)
    for key, item in pairs:
        yield join_fqn(fqn, keys.decode_key(fqn, key)), item


def leaves(fqn: str, node: Json) -> list[tuple[str, Json]]:
    """Name everything in a node that is no container; the node itself if it is empty.

    An enum is one value: what its own is made of has no names.
    """
    if type(node) is dict and node.get(TAG) == "enum":
        return [(fqn, node)]
    found: list[tuple[str, Json]] = []
    for name, item in items_of(fqn, node):
        found += leaves(name, item)
    return found or [(fqn, node)]


def items_of(fqn: str, node: Json) -> list[tuple[str, Json]]:
    """Give name and node of what a list or another container holds; nothing of anything else."""
    if type(node) is list:
        return [(join_fqn(fqn, i), item) for i, item in enumerate(node)]
    return list(children(fqn, node)) if type(node) is dict else []


def names_kept(fqn: str, node: Json, keep: Predicate | None) -> list[str]:
    """Name everything in a node that is no container and that `keep` accepts, if it is given."""
    return [name for name, _ in leaves(fqn, node) if keep is None or keep(name)]


def is_kept(fqn: str, node: Json, keep: Predicate | None) -> bool:
    """Whether `keep` accepts everything in a node."""
    return keep is None or all(keep(name) for name, _ in leaves(fqn, node))


def names_kept_for_ranks(manifest: Manifest) -> list[str]:
    """Name what was kept for each rank, as the ranks that have it name it.

    Raises:
        FormatError: See `read_tree`.
    """
    found: list[str] = []

    def visit(fqn: str, node: Json) -> None:
        if is_ranks(node):
            for item in node["v"]:
                found.extend(name for name, _ in leaves(fqn, item) if item != ABSENT)
        else:
            for name, item in items_of(fqn, node):
                visit(name, item)

    visit("", read_tree(manifest))
    return found


def keys_of(node: Json) -> list[Json]:
    """Give the encoded keys of a mapping node."""
    value = node if node.get(TAG) is None else node["v"]
    return list(value) if type(value) is dict else [pair[0] for pair in value]


def identity_of(encoded_key: Json) -> Hashable:
    """Give what tells a key from others: of numbers and bytes the value, whoever's they are.

    So `1` finds what was saved under `numpy.int64(1)`, and a tuple a named one, as in any dict.
    Enums and dataclasses are told apart by their classes, whatever they say is equal to them.

    Raises:
        FormatError: It is no key.
    """
    if type(encoded_key) in (str, int):
        return encoded_key  # type: ignore[no-any-return]  # one of them
    tag = encoded_key.get(TAG) if type(encoded_key) is dict else None
    if tag in _VALUE_TAGS or type(encoded_key) in (float, bool):
        value: Hashable = ObjectDecoder(decode_word).decode_key("", encoded_key)
        if value == value:  # noqa: PLR0124  # not nan, of which each is another key
            return value
    value = encoded_key.get("v") if tag in _TUPLE_TAGS or tag == "frozenset" else None
    if type(value) is not list:
        return ("", msgspec.json.encode(encoded_key))
    items = [identity_of(pair[1] if tag == "namedtuple" else pair) for pair in value]
    return (frozenset, frozenset(items)) if tag == "frozenset" else (tuple, *items)


@dataclass(frozen=True, slots=True)
class _Places:
    """Names of the items of a list, made when they are asked for: there may be millions."""

    fqn: str
    number: int

    def __iter__(self) -> Iterator[str]:
        return (join_fqn(self.fqn, place) for place in range(self.number))


def sequence_in(fqn: str, node: Json) -> tuple[bool, Iterable[str], list[Json]] | None:
    """Take the list or tuple at `fqn` apart: whether it is a tuple, names, items."""
    if type(node) is list:
        return False, _Places(fqn, len(node)), node
    if type(node) is not dict or node.get(TAG) not in ("tuple", "namedtuple"):
        return None
    names, items = zip(*children(fqn, node), strict=True) if node["v"] else ((), ())
    return True, list(names), list(items)
