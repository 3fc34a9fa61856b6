from __future__ import annotations

import fnmatch
import json
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ckptio.errors import ConfigError, FormatError
from ckptio.format.encode import MAX_DEPTH, join_fqn
from ckptio.format.manifest import FORMAT_VERSION, Manifest, TensorEntry
from ckptio.state.flatten import flatten
from ckptio.state.prune import prune
from ckptio.state.rebuild import Rebuilder
from ckptio.state.select import Patterns, make_predicate
from ckptio.state.tree import (
    identity_of,
    is_absent,
    is_ranks,
    keys_of,
    orders_in,
    read_tree,
    renumbered,
    tensor_index,
    walk,
)
from tests.strategies import Point, Settings, keys, states


def manifest_with(tree: bytes, num_tensors: int = 1, version: int = FORMAT_VERSION) -> Manifest:
    tensors = tuple(TensorEntry(f"t{i}", "uint8", (4,), ()) for i in range(num_tensors))
    return Manifest(version, "1", "0" * 32, "", 4096, (), tensors, msgspec.Raw(tree))


@given(state=states)
def test_every_tree_of_a_state_is_read(state: Any) -> None:
    """What `flatten` makes is what `read_tree` takes."""
    flat = flatten(state)
    tree = msgspec.json.encode(flat.tree)
    found = read_tree(manifest_with(tree, len(flat.specs)))
    assert msgspec.json.encode(found) == tree


@pytest.mark.parametrize("value", [{"~": 0}, {"~": "absent"}], ids=str)
def test_version_1_knows_no_value_of_each_rank(value: Any) -> None:
    """A tree that has one is none of that version."""
    tree = json.dumps({"a": [{"~": "ranks", "v": [value]}]}).encode()
    assert read_tree(manifest_with(tree))
    with pytest.raises(FormatError, match="ranks"):
        read_tree(manifest_with(tree, version=1))


@example(state=[{1: (torch.zeros(1), torch.zeros(2))}, Point(torch.zeros(3), [torch.zeros(4)])])
@given(state=states)
def test_walking_a_tree_finds_every_tensor(state: Any) -> None:
    """Under the names they were saved by, or what these begin with where others had them."""
    flat = flatten(state)
    found: dict[int | None, list[str]] = {}
    for name, node in walk("", read_tree(manifest_with(msgspec.json.encode(flat.tree), 99))):
        text = name.encode("utf-8", "backslashreplace").decode() or "state"
        found.setdefault(tensor_index(node), []).append(text)
    assert found.keys() == set(range(len(flat.specs)))
    for number, spec in enumerate(flat.specs):
        assert any(f"{spec.name}~".startswith(f"{name}~") for name in found[number])


BAD = [
    {"~": 1}, {"~": -1}, {"~": 0, "x": 1}, {"~": None}, {"~": "os.system", "v": 1}, {"~": True},
    {"~": "dict"}, {"~": "dict", "v": 4}, {"~": "dict", "v": [1]}, {"~": "dict", "v": [[1]]},
    {"~": "odict", "v": [[1, 2, 3]]}, {"~": "namedtuple", "c": "a:b", "v": {"a": 1}},
    {"~": "odict", "v": [["a", 1], [1]]}, {"~": "dataclass", "c": "a:b", "v": [["a", 1], [1, 2]]},
    {"~": "odict", "v": {}, "m": []}, {"~": "dict", "v": {}, "m": {}},
    {"~": "dataclass", "c": "a:b", "v": [[1, 2]]}, {"~": "tuple", "v": {}}, {"~": "set", "v": 1},
    {"~": "int"}, {"~": "enum", "c": "a:b"}, {"~": "np", "t": 1, "d": "<f4", "s": [1]},
    {"~": "np", "t": 0, "d": "<f4"}, {"~": "np", "t": 0, "d": "<f4", "s": [-1]},
    {"~": "np", "t": 0, "d": 4, "s": [1]}, {"~": "np", "t": 0, "d": "<f4", "s": [2**60]},
    {"~": "np", "t": 0, "d": "<f4", "s": None}, {"~": "np", "t": 0, "d": "<f4", "s": ""},
    {"~": "np", "t": True, "d": "<f4", "s": [1]}, {"~": "bytes", "t": 5}, {"~": "x", "t": 0},
    {"~": "view", "t": 0, "d": [], "o": 0, "s": [], "r": []},
    {"~": "view", "t": 0, "d": "os", "o": 0, "s": [], "r": []},
    {"~": "view", "t": 0, "d": "uint8", "o": -1, "s": [], "r": []},
    {"~": "view", "t": 0, "d": "uint8", "o": 0, "s": [1.5], "r": [1]},
    {"~": "view", "t": 0, "d": "uint8", "o": 0, "s": [1]},
    {"~": "view", "t": 9, "d": "uint8", "o": 0, "s": [1], "r": [1]},
    {"~": "view", "t": [], "d": "uint8", "o": 0, "s": [1], "r": [1]},
    {"~": "view", "t": 0, "d": "uint8", "o": 0, "s": [1] * 65, "r": [1] * 65},
    {"~": "view", "t": 0, "d": "uint8", "o": 0, "s": [1], "r": [1], "conj": True},
    {"~": "view", "t": 0, "d": "uint8", "o": 0, "s": [1], "r": [1], "neg": 1},
    {"~": "view", "t": 0, "d": "bool", "o": 0, "s": [1], "r": [1], "neg": True},
    {"~": "view", "t": 0, "d": "float8_e5m2", "o": 0, "s": [1], "r": [1], "neg": True},
    {"~": 0, "p": []}, {"~": "bytes", "t": 0, "s": None},
    {"~": "np", "t": 0, "d": "<f4", "s": [1], "v": 1},
    {"~": "view", "t": 0, "d": "uint8", "o": 0, "s": [1], "r": [1], "x": 1},
    {"~": "absent"}, {"~": "ranks"}, {"~": "ranks", "v": []}, {"~": "ranks", "v": {"a": 1}},
    {"~": "ranks", "v": [1], "x": 1}, {"~": "ranks", "v": [{"~": 1}]}, {"~": "ranks", "t": 0},
    {"~": "ranks", "v": [{"~": "absent", "v": 1}]}, {"~": "ranks", "v": [[{"~": "absent"}]]},
    {"~": "ranks", "v": [{"~": "ranks", "v": [1]}]},
    [{"~": "bytearray", "t": 0}, {"~": "bytearray", "t": 0}],
    {"~": "ranks", "v": [{"~": "bytearray", "t": 0}, {"~": "bytearray", "t": 0}]},
]  # fmt: skip


@pytest.mark.parametrize("node", BAD, ids=str)
@pytest.mark.parametrize(
    "around",
    [
        "%s", "[1, %s]", '{"a": %s}', '{"~": "tuple", "v": [%s]}', '{"~": "dict", "v": [[1, %s]]}',
        '{"~": "odict", "v": {"a": %s}}', '{"~": "odict", "v": {}, "m": {"a": %s}}',
        '{"~": "enum", "c": "a:b", "v": %s}',
    ],
)  # fmt: skip
def test_a_node_that_lacks_something_is_refused(node: Any, around: str) -> None:
    """Wherever it is: unknown tags, missing members, tensors that are not there."""
    with pytest.raises(FormatError):
        read_tree(manifest_with((around % json.dumps(node)).encode()))


def test_a_view_has_as_many_dimensions_as_a_tensor_may_have() -> None:
    """What is saved with all of them is read."""
    flat = flatten([base := torch.ones(2, 3), base.t()[(None,) * 62]])
    tree = msgspec.json.encode(flat.tree)
    assert read_tree(manifest_with(tree, 1))[1]["s"] == [1] * 62 + [3, 2]


OWN = {"~": "ranks", "v": [7, {"~": 0}, {"~": "absent"}]}
RANKS = {
    "a": OWN, "b": [1, {"~": "tuple", "v": [OWN]}], "c": {"~": "dict", "v": [[1, OWN]]},
    "d": {"~": "odict", "v": {"x": OWN}}, "e": None,
}  # fmt: skip


@pytest.mark.parametrize("rank", range(4))
def test_of_what_each_rank_has_one_rank_gets_its_own(rank: int) -> None:
    """Wherever it is; it stays marked. A rank that was not there has nothing."""
    tree = read_tree(manifest_with(json.dumps(RANKS).encode()), rank)
    own = {"~": "ranks", "v": [OWN["v"][min(rank, 2)]]}
    assert tree == {
        "a": own, "b": [1, {"~": "tuple", "v": [own]}], "c": {"~": "dict", "v": [[1, own]]},
        "d": {"~": "odict", "v": {"x": own}}, "e": None,
    }  # fmt: skip
    assert is_ranks(tree["a"])
    assert is_absent(tree["a"]) == (rank >= 2)
    names = [name for name, _ in walk("", tree)]
    assert names == (["a", "b.1.0", "c.1", "d.x"] if rank == 1 else [])


def test_values_of_all_ranks_are_named_after_their_rank() -> None:
    """The tree of all ranks has each; pruning takes some of them."""
    tree = read_tree(manifest_with(json.dumps(RANKS).encode()))
    assert tree == RANKS
    assert [n for n, _ in walk("", tree)] == ["a~rank1", "b.1.0~rank1", "c.1~rank1", "d.x~rank1"]
    absent = {"~": "absent"}
    assert prune(tree, lambda n: n == "a~rank0") == {"a": {"~": "ranks", "v": [7, absent, absent]}}
    assert prune(tree, lambda n: n == "x") == {}


@pytest.mark.parametrize("tree", [b"", b"{", b"nul", b'"\\ud800', b"[1] 2", b"1e999"])
def test_a_tree_that_is_no_json_is_refused(tree: bytes) -> None:
    """The manifest's parser looks at its outside only."""
    with pytest.raises(FormatError, match="not JSON"):
        read_tree(manifest_with(tree))


@pytest.mark.parametrize(
    "tree",
    [
        '{"a": 1, "a": 2}', '[{"b": {"a": 1, "x": 2, "a": 1}}]', '{"~": 0, "~": 0}',
        '{"": 0, "": 1}',
        '{"~": "odict", "v": {"\\u0061": 1, "a": 2}}',
    ],
)  # fmt: skip
def test_a_member_that_stands_twice_is_refused(tree: str) -> None:
    """The parser would keep the last, and a value of the state would be lost."""
    with pytest.raises(FormatError, match="stands twice"):
        read_tree(manifest_with(tree.encode()))


def test_a_tree_may_be_written_in_other_ways() -> None:
    """By other programs: with spaces, escapes, and numbers as they write them."""
    tree = rb'{"\u00e9": [1.50, 1e2, -0.0, 12345678901234567890], "a\/b": {"a": "a", "b": "a"}}'
    found = read_tree(manifest_with(tree))
    assert found == {"é": [1.5, 100.0, 0.0, 12345678901234567890], "a/b": {"a": "a", "b": "a"}}


@pytest.mark.parametrize("depth", [4 * MAX_DEPTH + 5, 5_000, 200_000])
def test_a_tree_that_is_too_deep_is_refused(depth: int) -> None:
    """By a count, or by the parser; never by the stack."""
    with pytest.raises(FormatError):
        read_tree(manifest_with(b"[" * depth + b"]" * depth))


@pytest.mark.parametrize(("outside", "inside"), [(200, 199), (200, 300), (390, 20), (390, 390)])
def test_levels_in_a_value_of_each_rank_count_with_those_around_it(
    outside: int, inside: int
) -> None:
    """Whoever walks through both has one stack."""
    value = b"[" * inside + b"]" * inside
    tree = b"[" * outside + b'{"~": "ranks", "v": [%b]}' % value + b"]" * outside
    if outside + inside > 4 * MAX_DEPTH:
        with pytest.raises(FormatError, match="nested deeper"):
            read_tree(manifest_with(tree))
    else:
        assert read_tree(manifest_with(tree))


@pytest.mark.parametrize(
    ("node", "depth", "is_read"),
    [
        (b'{"~": "dict", "v": [[1, %b]]}', 134, True),
        (b'{"~": "dict", "v": [[1, %b]]}', 135, False),
        (b'{"~": "odict", "v": {"a": %b}}', 201, True),
        (b'{"~": "odict", "v": {"a": %b}}', 202, False),
        (b'{"~": "tuple", "v": [%b]}', 201, True),
        (b'{"~": "tuple", "v": [%b]}', 202, False),
        (b'{"~": "enum", "c": "m:E", "v": {"~": "dict", "v": [[1, %b]]}}', 100, True),
        (b'{"~": "enum", "c": "m:E", "v": {"~": "dict", "v": [[1, %b]]}}', 101, False),
    ],
)
def test_levels_count_as_they_are_written(node: bytes, depth: int, *, is_read: bool) -> None:
    """All that a save writes is read, and all that is read has room on every stack."""
    tree = b"1"
    for _ in range(depth):
        tree = node % tree
    if is_read:
        assert renumbered(read_tree(manifest_with(tree)), int)
    else:
        with pytest.raises(FormatError, match="nested deeper"):
            read_tree(manifest_with(tree))


@pytest.mark.parametrize(
    ("select", "names"),
    [
        ("model", ["model.a.weight", "model.b", "model"]),
        ("model.", ["model.a.weight", "model.b", "model"]),
        ("model.a", ["model.a.weight"]),
        ("*.weight", ["model.a.weight", "models.weight"]),
        ("model?.*", ["models.weight"]),
        ("model.[ab]", ["model.b"]),
        (["opt", "model.b"], ["model.b", "opt"]),
        (("opt", "*b"), ["model.b", "opt"]),
        (str.isalpha, ["model", "opt"]),
        ("nothing", []),
    ],
)
def test_names_are_selected_by_prefix_glob_list_or_predicate(select: Any, names: list[str]) -> None:
    """A prefix ends at a dot; a star does not."""
    keep = make_predicate(select)
    every = ["model.a.weight", "model.b", "models.weight", "model", "opt"]
    assert [name for name in every if keep(name)] == names


@given(names=st.lists(keys, max_size=4))
def test_names_of_a_tree_are_those_of_the_state(names: list[Any]) -> None:
    """Whatever the keys are: a tree is named where neither torch nor classes are known."""
    flat = flatten([{key: torch.zeros(1)} for key in names])
    tree = msgspec.json.decode(msgspec.json.encode(flat.tree))
    expected = [join_fqn(str(i), key) for i, key in enumerate(names)]
    assert [name for name, _ in walk("", tree)] == expected


segments = st.sampled_from(
    ["a", "b", "ab", "", "*", "?", "[ab]", "[", "a*", "*b", "]", "[]a]", "[!a]", "*ab*", "[a]*b"]
)


@given(
    names=st.lists(st.lists(segments, min_size=1, max_size=4).map(".".join), max_size=8),
    patterns=st.lists(st.lists(segments, min_size=1, max_size=4).map(".".join), min_size=1),
)
def test_patterns_match_as_they_would_one_by_one(names: list[str], patterns: list[str]) -> None:
    """However they are looked up; and what is said to be out of reach has nothing to match."""
    patterns = [pattern for pattern in patterns if pattern.strip(".")] or ["a"]

    def matches(pattern: str, name: str) -> bool:
        if any(sign in pattern for sign in "*?["):
            return fnmatch.fnmatchcase(name, pattern)
        prefix = pattern.removesuffix(".")
        return name == prefix or name.startswith(f"{prefix}.")

    keep = Patterns(patterns)
    unmatched = set(patterns)
    for name in names:
        found = {pattern for pattern in patterns if matches(pattern, name)}
        assert keep(name) == bool(found)
        unmatched -= found
        ups = [name[:end] for end, sign in enumerate(name) if sign == "."]
        assert not found or all(map(keep.reaches, [*ups, name]))
    assert set(keep.unmatched) == unmatched


@pytest.mark.parametrize(
    "kind",
    [
        "layers.{}.*",
        "layers.{}.p[01]",
        "layers.{}.p0",
        "layers.{}",
        "*.{}.p0",
        "*s.{}.*",
        "*.{}.?0",
    ],
)
def test_a_name_is_not_compared_with_every_pattern(kind: str) -> None:
    """A thousand of them cost a name as many calls as ten."""

    def count(number: int) -> int:
        keep = Patterns([kind.format(i) for i in range(number)])
        seen: list[str] = []
        sys.setprofile(lambda _, event, __: seen.append(event) if "call" in event else None)
        try:
            assert keep("layers.5.p0")
            assert not keep("other.5.q1")
        finally:
            sys.setprofile(None)
        return len(seen)

    assert count(1000) <= count(10) + 8


def test_a_name_costs_no_call_for_each_of_its_dots() -> None:
    """A checkpoint has a hundred thousand names, of which one is wanted."""
    keep, seen = Patterns(["model.layers.5.p0", "opt.*"]), list[str]()
    sys.setprofile(lambda _, event, __: seen.append(event) if event == "call" else None)
    try:
        assert not keep("model.layers.7.attention.query.weight")
    finally:
        sys.setprofile(None)
    assert len(seen) <= 3


def test_what_no_name_of_reaches_is_not_walked() -> None:
    """Of many layers one is looked at, where that one is selected by its name."""

    class Counting(Patterns):
        num_asked = 0

        def __call__(self, fqn: str) -> bool:
            self.num_asked += 1
            return super().__call__(fqn)

    state = {f"l{i}": {"w": 1, "more": [1, (2, {"k": 3})]} for i in range(100)}
    keep = Counting(["l7.more.1", "l8.w"])
    assert prune(flatten(state).tree, keep) == prune(flatten(state).tree, keep.__call__)
    keep = Counting(["l7.more.1", "l8.w"])
    prune(flatten(state).tree, keep)
    assert keep.num_asked <= 8


@pytest.mark.parametrize("select", ["", [], [""], [1], 5, ["a", None]])
def test_a_selection_that_selects_nothing_is_refused(select: Any) -> None:
    """An empty list is a mistake, not a load of nothing."""
    with pytest.raises(ConfigError, match="select takes"):
        make_predicate(select)


@pytest.mark.parametrize(
    ("state", "select", "expected"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}}, "b.c", {"b": {"c": 2}}),
        ({"a": [1, 2, 3]}, "a.1", {"a": [None, 2, None]}),
        ({"a": (1, (2, 3))}, "a.1.0", {"a": (None, (2, None))}),
        ({"a": [], "b": {}, "c": ()}, ["a", "c"], {"a": [], "c": ()}),
        ({"a": [], "b": {"x": {}}}, "b", {"b": {"x": {}}}),
        (
            {"a": [1], "b": {"x": 1}, "c": (1,), "d": [], "e": {}, "f": ()},
            "?",
            {"d": [], "e": {}, "f": ()},
        ),
        ({"a1": 1, "b": [], "c": {}, "d": ()}, "a?", {"a1": 1}),
        ({1: "x", (2, 3): "y"}, "(2, 3)", {(2, 3): "y"}),
        ({"p": Point(1, 2), "q": Point(3, 4)}, "p.y", {"p": Point(None, 2)}),
        ({"s": Settings(1, 2)}, "s.rate", {"s": Settings(1, None)}),
        ({"s": {1, 2}, "t": {3}}, "s", {"s": {1, 2}}),
        ({"a": 1}, "b", {}),
        ([1, 2], "7", {}),
        (5, "x", {}),
    ],
    ids=str,
)
def test_pruning_keeps_what_is_selected_and_its_place(
    state: Any, select: Any, expected: Any
) -> None:
    """Dicts lose other keys; lists, tuples and fields hold their places with `None`."""
    tree = prune(flatten(state).tree, make_predicate(select))
    assert Rebuilder({}, [Point, Settings]).rebuild("", tree) == expected


@given(state=states)
def test_pruning_nothing_changes_nothing(state: Any) -> None:
    """A predicate that accepts all names gives the tree itself."""
    tree = flatten(state).tree
    assert prune(tree, lambda _: True) == tree


@given(state=states, data=st.data())
def test_pruning_keeps_just_the_tensors_that_are_selected(state: Any, data: st.DataObject) -> None:
    """By name, wherever they are."""
    tree = flatten(state).tree
    names = [name for name, _ in walk("", tree)]
    chosen = set(data.draw(st.lists(st.sampled_from(names)))) if names else set()
    pruned = prune(tree, chosen.__contains__)
    assert [n for n, _ in walk("", pruned)] == [n for n in names if n in chosen]


def test_keys_are_told_apart_as_in_a_dict() -> None:
    """By their values, whatever they are."""
    some = [
        1, True, 1.0, np.int64(1), "1", b"1", np.bytes_(b"1"), (), frozenset(), (1, 2), (2, 1),
        (1.0, np.int64(2)), torch.Size([1, 2]), Point(1, 2), frozenset({1, 2}),
        frozenset({np.int64(2), 1.0}), ((1, 2), frozenset({1})), ((1, 2), frozenset({True})),
    ]  # fmt: skip
    trees = [msgspec.json.decode(msgspec.json.encode(flatten({key: 0}).tree)) for key in some]
    identities = [identity_of(*keys_of(tree)) for tree in trees]
    for key, identity in zip(some, identities, strict=True):
        same = [identity in dict.fromkeys([other]) for other in identities]
        assert same == [key in dict.fromkeys([other]) for other in some]


@pytest.mark.parametrize("order", [1, -1])
def test_a_tensor_that_is_referred_to_in_two_orders_is_row_major(order: int) -> None:
    view = {"~": "view", "t": 0, "d": "uint8", "o": 0, "s": [1], "r": [1]}
    assert orders_in([{"~": 0, "p": [1, 0]}, view][::order]) == {0: ()}
    assert orders_in([{"~": 0, "p": [1, 0]}] * 2) == {0: (1, 0)}


def test_a_tensor_index_is_found_in_every_reference() -> None:
    """Plain references, views, arrays and long bytes have one; scalars have none."""
    base = torch.zeros(4, 2)
    flat = flatten([base, base.t(), bytes(2000), 1, {"t": 1}, b"short"])
    found = [tensor_index(node) for node in flat.tree]
    assert found == [0, 0, 1, None, None, None]
