"""Make one tree of the trees of all ranks.

Each rank takes its own state apart, and has a tree of its own. The checkpoint has one:

    dicts and records      united: ranks of a pipeline hold different layers
    lists, tuples          of one length, united element by element
    order in memory        that of the lowest rank, of a tensor that lies otherwise on others
    everything else        equal, bit by bit, on all ranks that have it
    `PerRank` values       kept for each rank

What differs and is not marked is refused, every place of it at once: keeping the value of
one rank without a word has cost others their random states and data positions.

Most ranks have equal trees, and a tree is the largest thing a rank has to say. So it is
sent once. `take_tree` gives a rank the digest of its tree, without what `PerRank` holds;
the first time every rank sends its tree too, and the coordinator answers each with its
twin, the lowest rank of the same digest (`find_twins`). From then on a rank whose twin is
another sends its digest and its `PerRank` values alone (`without_tree`), and that is
enough as long as a rank with its digest sent a tree. Where none did (`missing_trees`), the
coordinator asks those ranks for theirs.

References are by name here, `{"~": [name]}`, since each rank numbers its own tensors; the
merged tree has the numbers of the manifest again. Pure: no I/O, no clock.

Tensors are tied where they are the same memory, which a rank that holds no element of them
cannot tell: parts without elements may begin at one place of a flat buffer. Such a rank takes
them for one, and marks all places but the first (`UNSURE`). There the others decide: those
that hold elements, since a tensor of which nobody does is not saved.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ckptio.format.crowds import Crowd
from ckptio.format.encode import RANKS_TAG, TAG
from ckptio.plan.differences import DICT_TAGS, RECORD_TAGS, UNSURE, Differences, decode_key
from ckptio.plan.marks import unite_marked, unmarked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptio.format.encode import Json
    from ckptio.plan.differences import Place

    #: What there is at a place: each node, with the groups of ranks that have it, by bits.
    Branches = list[tuple[int, Json]]

#: Stands where a rank has no value.
ABSENT: dict[str, str] = {TAG: "absent"}


class RankTree(NamedTuple):
    """What a rank says of its tree; JSON-ready.

    Attributes:
        digest: Equal for equal trees, whatever their `PerRank` values are.
        values: What is inside `PerRank`, in the order of the tree.
        tree: The tree without them, in a list; an empty list if it is not sent.
    """

    digest: str
    values: list[Json]
    tree: list[Json]

    def without_tree(self) -> RankTree:
        """Leave out the tree, which a rank of the same digest sends."""
        return self._replace(tree=[])


def take_tree(tree: Json, names: Sequence[str]) -> RankTree:
    """Make of a rank's own tree what can be compared and merged.

    Args:
        tree: As `flatten` gives it. It is not changed.
        names: Names of the tensors that it refers to, by their index in it.
    """
    taker = _Taker(names)
    skeleton = taker.take(tree)
    digest = hashlib.blake2b(msgspec.json.encode(skeleton), digest_size=16).hexdigest()
    return RankTree(digest, taker.values, [skeleton])


class _Taker:
    """Takes a tree: no function that calls itself, as that would be a reference cycle."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.values: list[Json] = []

    def take(self, node: Json) -> Json:
        """Give a node with names in place of indices, and without values of this rank alone."""
        if type(node) is not dict or TAG not in node:
            return _with_children(node, self.take)
        tag = node[TAG]
        if type(tag) is int:
            return {**node, TAG: [self._names[tag]]}
        if "t" in node:
            return {**node, "t": self._names[node["t"]]}
        if tag == RANKS_TAG:
            self.values.append(self.take(node["v"][0]))  # holds no other: `flatten` refuses that
            return {TAG: RANKS_TAG, "v": len(self.values) - 1}
        return _with_children(node, self.take)


def find_twins(digests: Sequence[str]) -> list[int]:
    """Give each rank the lowest rank with its digest: itself, if it is to send its tree."""
    lowest: dict[str, int] = {}
    return [lowest.setdefault(digest, rank) for rank, digest in enumerate(digests)]


def missing_trees(ranks: Sequence[RankTree]) -> list[int]:
    """Name the ranks that have to send their trees before they can be merged.

    Returns:
        For each digest of which no rank sent the tree, the lowest rank that has it.
    """
    sent = {entry.digest for entry in ranks if entry.tree}
    twins = find_twins([entry.digest for entry in ranks])
    return [r for r, twin in enumerate(twins) if r == twin and ranks[r].digest not in sent]


def merge_trees(ranks: Sequence[RankTree], numbers: Mapping[str, int]) -> Json:
    """Merge the trees of all ranks into that of the manifest.

    Args:
        ranks: One entry for each rank; a tree of each digest among them.
        numbers: Index in the manifest of each tensor, by name.

    Returns:
        The tree. Keys are in the order of the first rank that has them.

    Raises:
        PlanError: Values differ; the first of them are listed, with ranks and values.
    """
    return _Merger(ranks, numbers).merge()


class _Merger:
    """One merge; collects what differs."""

    def __init__(self, ranks: Sequence[RankTree], numbers: Mapping[str, int]) -> None:
        groups: dict[str, list[int]] = {}
        for rank, entry in enumerate(ranks):
            groups.setdefault(entry.digest, []).append(rank)
        self._groups = list(groups.values())
        self._trees = {entry.digest: entry.tree[0] for entry in ranks if entry.tree}
        self._branches = [(1 << i, self._trees[digest]) for i, digest in enumerate(groups)]
        self._ranks = ranks
        self._numbers = numbers
        self._differences = Differences()
        #: Groups (a bit for each) that refer to a tensor, for each place where some do.
        self._holders: dict[str, list[int]] = {}
        #: The rank in whose `PerRank` values a tensor is; -1 for several.
        self._owners: dict[str, int] = {}

    def merge(self) -> Json:
        merged = self._merge(None, self._branches)
        for name, holders in self._holders.items():
            everyone = functools.reduce(operator.or_, holders)
            if everyone not in holders:  # at no place do all of them have it
                self._differences.add(f"{name!r} names tensors of different keys")
        for name, rank in self._owners.items():
            if name in self._holders:
                self._differences.add(
                    f"{name!r} names a tensor of all ranks, and one of rank {rank} in PerRank"
                )
            elif rank < 0:
                self._differences.add(f"{name!r} names tensors of several ranks in PerRank values")
        self._differences.check()
        return merged

    def _merge(self, place: Place, branches: Branches) -> Json:
        """Merge the nodes that groups have at one place."""
        if len(branches) > 1:
            branches = unite_marked(_unite_equal(_in_one_order(_sure_of(branches))))
        holders, first = branches[0]
        if len(branches) == 1:
            return self._number(first, holders)
        kind = _kind(first)
        if any(_kind(node) != kind for _, node in branches):
            return self._differ(place, branches)
        match kind[0]:
            case "mapping":
                return self._merge_mappings(place, branches)
            case "sequence":
                return self._merge_sequences(place, branches)
            case "ranks":
                return self._join_values(branches)
            case _:
                return self._differ(place, branches)

    def _merge_mappings(self, place: Place, branches: Branches) -> Json:
        """Unite the keys of dicts or records of one kind."""
        found: dict[str | bytes, tuple[Json, Branches]] = {}
        plain = True
        most = 0
        for holders, node in branches:
            pairs = _pairs(node)
            plain = plain and type(pairs) is dict
            most = max(most, len(pairs))
            for key, item in pairs.items() if type(pairs) is dict else pairs:
                same = key if type(key) is str else msgspec.json.encode(key)
                entry = found.get(same)
                if entry is None:
                    found[same] = (key, [(holders, item)])
                else:
                    entry[1].append((holders, item))
        if not plain and len(found) > most:
            self._check_keys(place, list(found.values()))
        items = [[key, self._merge((place, key), items)] for key, items in found.values()]
        first = branches[0][1]
        merged: Json = dict(items) if plain else items
        if TAG not in first:
            return merged if plain else {TAG: "dict", "v": merged}
        versions = [node["m"] for _, node in branches if "m" in node]
        if not versions:
            return {**first, "v": merged}
        return {**first, "v": merged, "m": _merge_versions(versions)}

    def _check_keys(self, place: Place, entries: Sequence[tuple[Json, Branches]]) -> None:
        """Refuse keys of different ranks that would be one key when they come back."""
        by_value: dict[Any, list[tuple[Json, Branches]]] = {}
        crowd = Crowd(len(entries))
        for key, items in entries:
            value = decode_key(key)
            if crowd.is_over(value):  # each rank has fewer, and no load would take them all
                branches = [(held, key) for held, _ in items]
                self._differ(place, branches, what="has too many keys of one hash, among them")
                return
            by_value.setdefault(value, []).append((key, items))
        for same in by_value.values():
            holders = (sum(held for held, _ in items) for _, items in same)
            if len(same) > 1 and not functools.reduce(operator.and_, holders):  # nobody has all
                branches = [(held, key) for key, items in same for held, _ in items]
                self._differ(place, branches, what="has equal keys of different kinds,")

    def _merge_sequences(self, place: Place, branches: Branches) -> Json:
        """Merge lists or tuples element by element."""
        first = branches[0][1]
        sequences = [(g, node if type(node) is list else node["v"]) for g, node in branches]
        if len({len(items) for _, items in sequences}) > 1:
            return self._differ(place, branches)
        merged = [
            self._merge((place, i), [(group, items[i]) for group, items in sequences])
            for i in range(len(sequences[0][1]))
        ]
        return merged if type(first) is list else {**first, "v": merged}

    def _join_values(self, branches: Branches) -> Json:
        """Put together what ranks have in one `PerRank`."""
        joined: list[Json] = [ABSENT] * len(self._ranks)
        for holders, node in branches:
            for rank in self._ranks_of(holders):
                joined[rank] = self._number(self._ranks[rank].values[node["v"]], rank=rank)
        return {TAG: RANKS_TAG, "v": joined}

    def _number(self, node: Json, holders: int = 0, rank: int = -1) -> Json:
        """Refer to tensors by number, and note who does.

        Args:
            node: What refers to them by name.
            holders: Groups that have this node here, by bits.
            rank: Instead of these, the rank in whose `PerRank` value the node is.
        """
        if type(node) is dict and TAG in node:
            tag = node[TAG]
            if type(tag) is list:
                if UNSURE in node:  # nobody is sure: what is there cannot be told
                    self._differences.add(f"{node[UNSURE]!r} has no elements on ranks that have it")
                return {**unmarked(node), TAG: self._refer(tag[0], holders, rank)}
            if "t" in node:
                return {**unmarked(node), "t": self._refer(node["t"], holders, rank)}
            if tag == RANKS_TAG:
                return self._join_values([(holders, node)])
        elif type(node) is not dict and type(node) is not list:
            return node
        # no nested function that calls itself: a reference cycle for each leaf, for the collector
        return _with_children(node, functools.partial(self._number, holders=holders, rank=rank))

    def _refer(self, name: str, holders: int, rank: int) -> int:
        """Give a tensor's number, and note who refers to it; see `_number`."""
        if holders:
            self._holders.setdefault(name, []).append(holders)
        elif self._owners.setdefault(name, rank) != rank:
            self._owners[name] = -1
        return self._numbers[name]

    def _differ(self, place: Place, branches: Branches, what: str = "is") -> None:
        """Note that ranks have different values at a place."""
        held = [(self._ranks_of(holders), node) for holders, node in branches]
        self._differences.add_values(place, held, what)

    def _ranks_of(self, holders: int) -> list[int]:
        """Give the ranks of groups."""
        groups = (ranks for i, ranks in enumerate(self._groups) if holders >> i & 1)
        return [rank for ranks in groups for rank in ranks]


def _merge_versions(nodes: Sequence[Json]) -> Json:
    """Unite versions of modules. One on which ranks disagree is left out: no save fails for it."""
    found: dict[bytes, tuple[Json, Json]] = {}
    differing: set[bytes] = set()
    for node in nodes:
        pairs = _pairs(node)
        for key, item in pairs.items() if type(pairs) is dict else pairs:
            same = msgspec.json.encode(key)
            if found.setdefault(same, (key, item))[1] != item:
                differing.add(same)
    merged = [[key, item] for same, (key, item) in found.items() if same not in differing]
    plain = all(type(key) is str and key != TAG for key, _ in merged)
    return dict(merged) if plain else {TAG: "dict", "v": merged}


def _sure_of(branches: Branches) -> Branches:
    """Leave out what ranks are unsure of, where others are sure of a tensor."""
    sure = [branch for branch in branches if not (_is_reference(branch[1]) and UNSURE in branch[1])]
    return sure if any(_is_reference(node) for _, node in sure) else branches


def _in_one_order(branches: Branches) -> Branches:
    """Let a tensor lie in memory as on the lowest rank: its values and its files are the same."""
    if not any(_is_reference(node) and "p" in node for _, node in branches):
        return branches
    first = branches[0][1]
    order = {"p": first["p"]} if type(first) is dict and "p" in first else {}
    return [
        (g, {**{k: item for k, item in node.items() if k != "p"}, **order})
        if _is_reference(node)
        else (g, node)
        for g, node in branches
    ]


def _is_reference(node: Json) -> bool:
    return type(node) is dict and type(node.get(TAG)) is list


def _unite_equal(branches: Branches) -> Branches:
    """Make one branch of those that have the same node, bit by bit."""
    found: dict[bytes, tuple[int, Json]] = {}
    for holders, node in branches:
        same = msgspec.json.encode(node)
        found[same] = (found[same][0] | holders if same in found else holders, node)
    return list(found.values())


def _with_children(node: Json, visit: Callable[[Json], Json]) -> Json:
    """Copy a container with what `visit` makes of its values; a scalar is given as it is."""
    if type(node) is list:
        return [visit(item) for item in node]
    if type(node) is not dict:
        return node
    if TAG not in node:
        return {key: visit(item) for key, item in node.items()}
    tag = node[TAG]
    if tag in DICT_TAGS or tag in RECORD_TAGS:
        pairs = node["v"]
        if type(pairs) is dict:
            return {**node, "v": {key: visit(item) for key, item in pairs.items()}}
        return {**node, "v": [[key, visit(item)] for key, item in pairs]}
    if tag == "tuple":
        return {**node, "v": [visit(item) for item in node["v"]]}
    return {**node, "v": visit(node["v"])} if tag == "enum" else node


def _kind(node: Json) -> tuple[str, str]:
    """Say how a node is merged, and what else has to be the same."""
    if type(node) is list:
        return ("sequence", "list")
    if type(node) is not dict:
        return ("leaf", "")
    tag = node.get(TAG, "dict")
    if tag in DICT_TAGS:
        return ("mapping", tag)
    if tag in RECORD_TAGS:
        return ("mapping", f"{tag} {node['c']}")
    if tag == "tuple":
        return ("sequence", "tuple")
    return (RANKS_TAG if tag == RANKS_TAG else "leaf", "")


def _pairs(node: dict[str, Json]) -> Json:
    """Give what a mapping holds: a dict, or a list of pairs."""
    return node["v"] if TAG in node else node
