from __future__ import annotations

import enum
import gc
import re
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio.errors import PlanError
from ckptio.format.crowds import MAX_EQUAL_HASHES
from ckptio.format.encode import TAG, ObjectEncoder, encode_bytes, join_fqn
from ckptio.plan.trees import RankTree, find_twins, merge_trees, missing_trees, take_tree
from ckptio.shards import PerRank
from ckptio.state.flatten import flatten
from ckptio.state.leaves import encode_key_leaf
from tests.strategies import Point, Settings, plain_scalars, texts, with_versions
from tests.strategies import states as all_states

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from ckptio.format.encode import Json


class Tensor(NamedTuple):
    """Stands for a tensor: a name, and how the state refers to it."""

    name: str
    node: Mapping[str, Any] = {}


class Held(enum.Enum):
    """What holds a tensor."""

    ONE = (Tensor("r"),)


def encode(state: Any) -> tuple[Json, list[str]]:
    """Take a state apart, as far as its tree goes; what the nodes refer to comes second."""
    names: list[str] = []

    def per_rank(fqn: str, value: PerRank) -> Json:
        return {TAG: "ranks", "v": [encoder.encode(fqn, value.value)]}

    def tensor(_: str, value: Tensor) -> Json:
        if value.name not in names:
            names.append(value.name)
        index = names.index(value.name)
        return {**value.node, "t": index} if value.node else {TAG: index}

    encoder = ObjectEncoder(
        lambda _, value: encode_bytes(value), {Tensor: tensor, PerRank: per_rank}
    )
    return encoder.encode("", state), names


def take(state: Any) -> RankTree:
    return take_tree(*encode(state))


def merge(*states: Any) -> Json:
    """Merge the trees of states, one for each rank, as they arrive over a wire."""
    sent = msgspec.json.encode([take(state) for state in states])
    ranks = [RankTree(*message) for message in msgspec.json.decode(sent)]
    names = {name for state in states for name in encode(state)[1]}
    return merge_trees(ranks, {name: i for i, name in enumerate(sorted(names))})


def refused(*states: Any) -> str:
    """Give the words with which states are refused."""
    with pytest.raises(PlanError) as caught:
        merge(*states)
    return str(caught.value)


#: Keys of a caller that are those of the tree itself, too.
WORDS = ["mark", "of", "crc32c", "unsure", TAG, "t", "v", "m", "c", "d", "s", "dict", "ranks", "np"]
words = texts | st.sampled_from(WORDS)
keys = st.one_of(
    words, words, st.integers(), st.binary(max_size=2), st.tuples(texts, st.integers())
)
tensor_marks = st.builds(Tensor, texts) | st.builds(
    Tensor, texts, st.just({TAG: "np", "d": "<f4", "s": [2]})
)
states = st.recursive(
    plain_scalars | tensor_marks,
    lambda inner: st.one_of(
        st.dictionaries(words, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(texts, st.integers(), max_size=3).map(Counter),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Point, inner, inner),
        st.builds(Settings, inner, inner),
    ),
    max_leaves=12,
)


def uniquely_named(state: Any, _counter: list[int] | None = None) -> Any:
    """Give every tensor a name of its own, as flattening does."""
    counter = _counter if _counter is not None else [0]
    if isinstance(state, Tensor):
        counter[0] += 1
        name = state.name.encode("utf-8", "backslashreplace").decode()
        return state._replace(name=f"{name}~{counter[0]}")
    if isinstance(state, Counter):
        return state
    if isinstance(state, dict):
        return type(state)((key, uniquely_named(item, counter)) for key, item in state.items())
    if isinstance(state, Point):
        return Point(*(uniquely_named(item, counter) for item in state))
    if isinstance(state, (list, tuple)):
        return type(state)(uniquely_named(item, counter) for item in state)
    if isinstance(state, Settings):
        return Settings(uniquely_named(state.rate, counter), uniquely_named(state.name, counter))
    return state


def split(state: Any, ranks: Sequence[int], rng: random.Random) -> dict[int, Any]:
    """Share the keys of every dict out among ranks; each has at least one holder."""
    if isinstance(state, dict):
        parts: dict[int, Any] = {rank: type(state)() for rank in ranks}
        for key, item in state.items():
            holders = rng.sample(ranks, rng.randint(1, len(ranks)))
            for rank, piece in split(item, holders, rng).items():
                parts[rank][key] = piece
        return parts
    if isinstance(state, Settings):
        rate, name = split(state.rate, ranks, rng), split(state.name, ranks, rng)
        return {rank: Settings(rate[rank], name[rank]) for rank in ranks}
    if isinstance(state, (list, tuple)) and not isinstance(state, Tensor):
        pieces = [split(item, ranks, rng) for item in state]
        make = Point._make if isinstance(state, Point) else type(state)
        return {rank: make(piece[rank] for piece in pieces) for rank in ranks}
    return dict.fromkeys(ranks, state)


def without_order(node: Json) -> Json:
    """Give a tree in a form in which the order of keys is no matter."""
    if type(node) is list:
        return [without_order(item) for item in node]
    if type(node) is not dict:
        return node
    tag = node.get(TAG, "dict")
    if tag not in ("dict", "odict", "counter"):
        return {key: without_order(item) for key, item in node.items()}
    pairs = node["v"] if TAG in node else node
    pairs = list(pairs.items()) if type(pairs) is dict else pairs
    found = [[msgspec.json.encode(key), without_order(item)] for key, item in pairs]
    return {"dict": tag, "pairs": sorted(found, key=lambda pair: pair[0])}


def same(found: Json, expected: Json) -> bool:
    """Whether trees are equal bit by bit."""
    return msgspec.json.encode(found) == msgspec.json.encode(expected)


def test_versions_of_modules_are_united() -> None:
    """Ranks of a pipeline have different modules; one without versions says nothing of them."""
    one, two = {"version": 1}, {"version": 2}
    first = with_versions({"a": 1}, OrderedDict({"": one, "a": two}))
    second = with_versions({"b": 2}, OrderedDict({"": one, "b": one}))
    merged = merge({"m": first}, {"m": second}, {"m": OrderedDict(c=3)})
    versions = {"": 1, "a": 2, "b": 1}
    assert merged["m"] == {TAG: "odict", "v": {"a": 1, "b": 2, "c": 3}, "m": versions}


def test_versions_of_modules_that_differ_are_left_out() -> None:
    """Stages of a pipeline may be modules of different classes: no save fails for that."""
    states = [
        {"m": with_versions({"a": 1}, {"": {"version": n}, "a": {"version": 1}, "~": {}})}
        for n in (1, 1, 2)
    ]
    left = {TAG: "dict", "v": [["a", 1], ["~", {}]]}
    assert merge(*states)["m"] == {TAG: "odict", "v": {"a": 1}, "m": left}


@given(state=states.map(uniquely_named), num_ranks=st.integers(1, 5))
def test_equal_trees_are_that_tree(state: Any, num_ranks: int) -> None:
    """However many ranks have it; in its own order."""
    tree, names = encode(state)
    order = {name: i for i, name in enumerate(names)}
    assert same(merge_trees([take(state)] * num_ranks, order), tree)


@given(state=all_states)
def test_what_flattening_makes_passes_unchanged(state: Any) -> None:
    """Every kind of node, those of arrays and views among them."""
    flat = flatten(state)
    order = {name: i for i, name in enumerate(flat.names)}
    found = merge_trees([take_tree(flat.tree, flat.names)] * 2, order)
    assert same(found, flat.tree)


@given(
    state=states.map(uniquely_named),
    num_ranks=st.integers(1, 5),
    rng=st.randoms(use_true_random=False),
)
def test_a_tree_that_was_split_by_keys_is_put_together(
    state: Any, num_ranks: int, rng: random.Random
) -> None:
    """Dicts of any kind at any depth are united; nothing is lost and nothing made up."""
    tree, names = encode(state)
    order = {name: i for i, name in enumerate(names)}
    parts = split(state, range(num_ranks), rng)
    ranks = [take(parts[rank]) for rank in range(num_ranks)]
    assert same(without_order(merge_trees(ranks, order)), without_order(tree))


@pytest.mark.parametrize("word", WORDS)
def test_a_key_like_one_of_the_tree_is_a_key_like_others(word: str) -> None:
    """Dicts under it are united, in it and beside it; what differs is refused."""
    first, last = ({word: {f"k{n}": n, word: {f"k{n}": Tensor(f"k{n}")}}} for n in (1, 2))
    both = {word: {"k1": 1, word: {"k1": Tensor("k1"), "k2": Tensor("k2")}, "k2": 2}}
    merged = merge({"a": first, "t": 1}, {"a": last, "t": 1})
    assert same(without_order(merged), without_order(encode({"a": both, "t": 1})[0]))
    for one, other in ((1, 2), ({"of": "a"}, {"of": "b"}), (Tensor("a"), Tensor("b"))):
        assert "ranks disagree on 1 value" in refused({word: one}, {word: other})
        assert "a dict of 1 on rank 1" in refused({"x": [one]}, {"x": {word: other}})


def leaves_of(fqn: str, node: Json) -> list[tuple[str, Json]]:
    """Name every value of an encoded state that is no container, with what holds it."""
    if type(node) is list:
        return [x for i, item in enumerate(node) for x in leaves_of(join_fqn(fqn, i), item)]
    if type(node) is dict and (TAG not in node or node[TAG] in ("odict", "counter")):
        items = node["v"] if TAG in node else node
        if type(items) is dict:
            return [x for k, item in items.items() for x in leaves_of(join_fqn(fqn, k), item)]
    return [(fqn or "state", node)]


def replace_leaf(node: Json, number: int, new: Json) -> tuple[Json, int]:
    """Put `new` in the place of a leaf, counted as `leaves_of` does."""
    if type(node) is list:
        items = []
        for item in node:
            changed, number = replace_leaf(item, number, new)
            items.append(changed)
        return items, number
    if type(node) is dict and (TAG not in node or node[TAG] in ("odict", "counter")):
        inner = node["v"] if TAG in node else node
        if type(inner) is dict:
            found = {}
            for key, item in inner.items():
                found[key], number = replace_leaf(item, number, new)
            return ({**node, "v": found} if TAG in node else found), number
    return (new if number == 0 else node), number - 1


@given(data=st.data(), state=states.map(uniquely_named), num_ranks=st.integers(2, 5))
def test_any_single_difference_is_found_and_named(
    data: st.DataObject, state: Any, num_ranks: int
) -> None:
    """With the name of the value, and the rank that has another."""
    tree, names = encode(state)
    found = leaves_of("", tree)
    if not found:
        return
    number = data.draw(st.integers(0, len(found) - 1))
    odd = data.draw(st.integers(1, num_ranks - 1))
    fqn, old = found[number]
    new = data.draw(plain_scalars.map(lambda value: encode(value)[0]))
    if same(old, new):
        new = "another"
    changed, _ = replace_leaf(tree, number, new)
    ranks = [take_tree(changed if r == odd else tree, names) for r in range(num_ranks)]
    with pytest.raises(PlanError) as caught:
        merge_trees(ranks, {name: i for i, name in enumerate(names)})
    message = str(caught.value)
    assert f"1 value: {fqn!r} is " in message
    assert f"on rank {odd};" in message


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (float("nan"), -float("nan")),
        (None, {}),
        ((1, 2), [1, 2]),
        ({1}, frozenset({1})),
        ({"a"}, {"b"}),
        ({}, OrderedDict()),
        (b"", bytearray()),
        ([1], [1, 2]),
        (Point(1, 2), (1, 2)),
        (1 << 80, -(1 << 80)),
        (Tensor("a"), Tensor("b")),
        (Tensor("a"), 1),
        (Tensor("a"), Tensor("a", {TAG: "view", "o": 0})),
        (Tensor("a", {TAG: "view", "o": 4}), Tensor("a", {TAG: "view", "o": 0})),
        (PerRank(1), 1),
    ],
    ids=str,
)
def test_values_that_are_not_the_same_bit_by_bit_are_refused(one: Any, other: Any) -> None:
    """Kinds and signs count too."""
    message = refused({"x": {"y": [one]}}, {"x": {"y": [one]}}, {"x": {"y": [other]}})
    assert "ranks disagree on 1 value: 'x.y.0' is " in message
    assert " on ranks 0-1 and " in message
    assert " on rank 2; make them equal" in message
    assert "ckptio.PerRank" in message


def test_nan_equals_nan() -> None:
    """Equality is that of bits."""
    assert same(merge({"x": float("nan")}, {"x": float("nan")}), encode({"x": float("nan")})[0])


def test_layers_of_a_pipeline_are_united_in_the_order_of_ranks() -> None:
    """Each stage has its own layers, all have the embedding; inside lists as well."""
    first = {"model": {"wte": Tensor("wte"), "h.0": Tensor("h.0")}, "groups": [{"lr": 1, 0: "a"}]}
    last = {"model": {"h.1": Tensor("h.1"), "wte": Tensor("wte")}, "groups": [{"lr": 1, 1: "b"}]}
    merged = merge(first, last)
    assert merged == {
        "model": {"wte": {TAG: 2}, "h.0": {TAG: 0}, "h.1": {TAG: 1}},
        "groups": [{TAG: "dict", "v": [["lr", 1], [0, "a"], [1, "b"]]}],
    }
    assert list(merged["model"]) == ["wte", "h.0", "h.1"]


@pytest.mark.usefixtures("no_collections")
def test_merging_leaves_nothing_to_the_collector() -> None:
    """It is paused meanwhile, and what it alone can free would be memory for each leaf."""
    layers: list[dict[str, Any]] = [
        {f"s{rank}.{i}": [Tensor(f"{rank}.{i}"), (i, {"k": 2.5})] for i in range(50)}
        for rank in range(3)
    ]
    trees = [take({"model": own, "own": PerRank([1, 2])}) for own in layers]
    numbers = {f"{rank}.{i}": 50 * rank + i for rank in range(3) for i in range(50)}
    merge_trees(trees, numbers)
    while gc.collect():  # of other tests, some of which takes several
        pass
    merge_trees(trees, numbers)
    assert gc.collect() == 0


def test_plain_and_other_keys_meet_in_one_dict() -> None:
    """A rank whose keys are all strings writes its dict in another form."""
    assert merge({"a": 1}, {"a": 1, 7: 2}) == {TAG: "dict", "v": [["a", 1], [7, 2]]}
    ordered = merge(OrderedDict(a=1), OrderedDict({7: 2}))
    assert ordered == {TAG: "odict", "v": [["a", 1], [7, 2]]}
    assert merge({"~": 1}, {"a": 1}) == {TAG: "dict", "v": [["~", 1], ["a", 1]]}


def test_records_are_united_by_field() -> None:
    """What is in their fields is merged like anything else."""
    merged = merge(Settings({"a": 1}), Settings({"b": 2}))
    assert merged["v"] == [["rate", {"a": 1, "b": 2}], ["name", "adam"]]
    assert "'x' is 1 on rank 0 and 2 on rank 1" in refused(Point(1, 0), Point(2, 0))
    assert "is a namedtuple" in refused([Point(1, 0)], [Settings(1, 0)])


def test_keys_that_would_become_one_are_refused() -> None:
    """One and true are one key of a dict; two ranks must not have them as two."""
    assert "'x' has equal keys of different kinds, 1 on rank 0 and True on rank 1" in refused(
        {"x": {1: "a"}}, {"x": {True: "b"}}
    )
    one = ObjectEncoder(encode_key_leaf, None, encode_key_leaf)
    trees = [one.encode("", {"x": {key: 5}}) for key in (1, np.int64(1))]
    with pytest.raises(PlanError, match="'x' has equal keys of different kinds"):
        merge_trees([take_tree(tree, []) for tree in trees], {})


def test_keys_of_all_ranks_that_no_dict_would_take_are_refused() -> None:
    """Each rank has few enough of one hash; together they are too many for a load."""
    keys = [((1 << 61) - 1) * i for i in range(MAX_EQUAL_HASHES + 1)]
    first, second = ({"x": dict.fromkeys(part, 5)} for part in (keys[:600], keys[600:]))
    assert "'x' has too many keys of one hash" in refused(first, second)


def test_keys_of_torch_are_united_without_torch() -> None:
    """Element types, devices and sizes tell ranks' entries apart like other keys."""
    one = ObjectEncoder(encode_key_leaf, None, encode_key_leaf)
    keys = [torch.float32, torch.float64, torch.device("cpu"), torch.Size([1]), np.float32(2)]
    trees = [one.encode("", dict.fromkeys(part, 5)) for part in (keys[:3], keys[1:])]
    merged = merge_trees([take_tree(tree, []) for tree in trees], {})
    assert merged == one.encode("", dict.fromkeys(keys, 5))
    other = one.encode("", {torch.float64: {torch.device("cpu"): 6}})
    same = one.encode("", {torch.float64: {torch.device("cpu"): np.float32(5)}})
    with pytest.raises(PlanError, match=r"'torch\.float64\.cpu' is 6 on rank 0 and .*5\.0"):
        merge_trees([take_tree(tree, []) for tree in (other, same)], {})
    days = [one.encode("", {"at": np.array([day]).view("M8")[0]}) for day in (1, 2)]
    with pytest.raises(PlanError, match=r"'at' is .* on rank 0 and"):  # numpy cannot write them
        merge_trees([take_tree(tree, []) for tree in days], {})


def test_ranks_that_hold_nothing_of_a_tensor_do_not_decide_what_it_is_tied_to() -> None:
    """Those that hold some do; where there are none, nobody can tell."""
    unsure = {"a": {TAG: 0}, "b": {TAG: 0, "unsure": "b"}}
    tied, apart = {"a": {TAG: 0}, "b": {TAG: 0}}, {"a": {TAG: 0}, "b": {TAG: 1}}

    def merged(*trees: Json) -> Json:
        ranks = [take_tree(tree, ["a", "b"]) for tree in trees]
        return merge_trees(ranks, {"a": 0, "b": 1})

    for tree in (tied, apart):
        assert merged(unsure, tree, unsure) == merged(tree, unsure, tree) == tree
    with pytest.raises(PlanError, match="'b' is tensor 'a' on rank 1 and tensor 'b' on rank 2;"):
        merged(unsure, tied, apart)
    with pytest.raises(PlanError, match="'b' is tensor 'a' on rank 0 and 5 on rank 1;"):
        merged(unsure, {"a": {TAG: 0}, "b": 5})
    for others in ([unsure], [{"a": {TAG: 0}}]):
        with pytest.raises(PlanError, match="'b' has no elements on ranks that have it"):
            merged(unsure, *others)


ARRAY = {TAG: "np", "d": "<f4", "s": [2], "t": 0}


@pytest.mark.parametrize("node", [{TAG: 0}, ARRAY], ids=["tensor", "array"])
def test_what_ranks_know_of_a_tensor_is_left_out_and_may_not_differ(node: Json) -> None:
    """One may know more than another; what is another tensor is another, known or not."""
    facts = {"of": "x"}, {"crc32c": "7"}, {"of": "y"}, {"of": "x", "crc32c": "8"}
    a, b, c, d = ({**node, "mark": each} for each in facts)

    def merged(*nodes: Json) -> Json:
        ranks = [take_tree({"k": each} if each else {}, ["w", "z"]) for each in nodes]
        return merge_trees(ranks, {"w": 0, "z": 1})

    for same in ((a,), (a, a), (a, node), (node, b), (a, b), (None, b, a)):
        assert merged(*same) == {"k": node}
    other = {**node, "t" if "t" in node else TAG: 1}
    differing: Sequence[Sequence[Json]] = [
        (a, c), (a, b, c), (a, b, d), (a, 5), (a, {"mark": {}}), (a, other),
    ]  # fmt: skip
    kind = "an array" if node is ARRAY else "a tensor"
    for nodes in differing:
        with pytest.raises(PlanError, match=rf"'k' is {kind} \(of 'x'\) on rank 0"):
            merged(*nodes)


def test_who_has_what_is_known_of_a_tensor_is_who_refers_to_it() -> None:
    """Nobody else: else two tensors of one name would be taken for replicas."""
    trees: list[Json] = [{"a": {"b": {TAG: 0}}}]
    trees += [{"a.b": {TAG: 0, "mark": {"crc32c": "7"} if n else {"of": "x"}}} for n in range(2)]
    with pytest.raises(PlanError, match=r"'a\.b' names tensors of different keys"):
        merge_trees([take_tree(tree, ["a.b"]) for tree in trees], {"a.b": 0})


@pytest.mark.parametrize(
    ("path", "is_moment"),
    [
        ("o.state.0.exp_avg", True), ("o.param_groups.0.lr", True), ("param_groups.lr", True),
        ("rng.state", False), ("rng.state.0", False), ("o.param_groups", False), ("o.w.0.x", False),
    ],
)  # fmt: skip
def test_where_moments_differ_stages_of_a_pipeline_are_told_apart(
    path: str, *, is_moment: bool
) -> None:
    """Not where something else does, or where no tensor does."""
    for nodes, is_told in (
        ([{TAG: 0, "mark": {"crc32c": f"{rank}"}} for rank in range(2)], is_moment),
        ([{TAG: 0, "mark": {"crc32c": "0"}}, 5], is_moment),
        ([1, 2], False),
    ):
        trees: list[Json] = nodes
        for key in reversed(path.split(".")):
            trees = [{key: tree} for tree in trees]
        with pytest.raises(PlanError) as caught:
            merge_trees([take_tree(tree, ["w"]) for tree in trees], {"w": 0})
        assert ("stages of a pipeline" in str(caught.value)) == is_told


def test_a_tensor_lies_in_memory_as_it_does_on_the_lowest_rank() -> None:
    """Its values do not depend on it: no save fails for that. Another tensor is another."""
    plain, last = {"w": {TAG: 0}}, {"w": {TAG: 0, "p": [0, 2, 3, 1]}}
    third = {"w": {TAG: 0, "p": [3, 2, 1, 0]}}

    def merged(*trees: Json, names: Sequence[str] = ("w",)) -> Json:
        ranks = [take_tree(tree, names) for tree in trees]
        return merge_trees(ranks, {name: i for i, name in enumerate(names)})

    for first in (plain, last, third):
        assert merged(first, plain, last, third) == first
    with pytest.raises(PlanError, match="'w' is tensor 'w' on rank 0 and 5 on rank 1;"):
        merged(last, {"w": 5})
    with pytest.raises(PlanError, match="'w' is 5 on rank 0 and tensor 'w' on rank 1;"):
        merged({"w": 5}, last)
    with pytest.raises(PlanError, match="'w' is tensor 'w' on rank 0 and tensor 'x' on rank 1;"):
        merged(last, {"w": {TAG: 1}}, names=("w", "x"))


def test_tensors_have_the_numbers_of_the_manifest_wherever_they_lie() -> None:
    """In records, enums, and dicts with other keys; in what all ranks have, and one alone."""
    states = [
        {
            "record": Point(Tensor("z"), (Tensor("y"), [Tensor("x")])),
            "settings": Settings(rate=Tensor("w")),
            "dict": {1: Tensor("v"), 2: OrderedDict(a=(Tensor("u"),))},
            "enum": Held.ONE,
            "own": PerRank((Point(Tensor(f"t{rank}"), 0),)),
            f"only {rank}": (Point(0, Tensor(f"s{rank}")),),
        }
        for rank in range(2)
    ]
    names = sorted({name for state in states for name in encode(state)[1]})
    both = merge(*states)
    for rank, state in enumerate(states):
        tree, own_names = encode(state)
        numbers = {index: names.index(name) for index, name in enumerate(own_names)}
        expected = renumbered(tree, numbers)
        expected.pop("own")
        assert {key: both[key] for key in expected} == expected
        (alone,) = renumbered(tree, numbers)["own"]["v"]
        assert both["own"]["v"][rank] == alone


def renumbered(node: Json, numbers: Mapping[int, int]) -> Json:
    """Give a tree with other numbers of tensors."""
    if type(node) is list:
        return [renumbered(item, numbers) for item in node]
    if type(node) is not dict:
        return node
    if type(node.get(TAG)) is int:
        return {TAG: numbers[node[TAG]]}
    return {key: renumbered(item, numbers) for key, item in node.items()}


def test_a_name_that_stands_for_two_tensors_is_refused() -> None:
    """Two ranks name different places alike: their tensors would be taken for replicas."""
    assert "'a.b' names tensors of different keys" in refused(
        {"a.b": Tensor("a.b")}, {"a": {"b": Tensor("a.b")}}
    )
    assert "'1' names tensors" in refused({"1": Tensor("1")}, {1: Tensor("1")})


def test_ties_of_one_rank_do_not_trouble_the_others() -> None:
    """A tensor may be in more places on some ranks, if all have it in one."""
    merged = merge({"a": Tensor("a"), "b": Tensor("a")}, {"a": Tensor("a")})
    assert merged == {"a": {TAG: 0}, "b": {TAG: 0}}


def test_per_rank_values_are_kept_for_each_rank() -> None:
    """In the order of ranks, with their tensors; a rank that has none is marked."""
    ranks = [
        {"rng": PerRank({"seed": r, "state": Tensor(f"rng.state~rank{r}")}), "lr": 1}
        for r in range(3)
    ]
    ranks[1].pop("rng")
    merged = merge(*ranks)
    assert merged["lr"] == 1
    assert merged["rng"] == {
        TAG: "ranks",
        "v": [
            {"seed": 0, "state": {TAG: 0}},
            {TAG: "absent"},
            {"seed": 2, "state": {TAG: 1}},
        ],
    }


def test_per_rank_values_are_told_apart_by_their_places() -> None:
    """Though ranks have more or fewer of them before."""
    ranks = [{"a": PerRank(1), "b": PerRank(2)}, {"b": PerRank(3)}, {"b": PerRank(4), "c": 5}]
    absent = {TAG: "absent"}
    assert merge(*ranks) == {
        "a": {TAG: "ranks", "v": [1, absent, absent]},
        "b": {TAG: "ranks", "v": [2, 3, 4]},
        "c": 5,
    }


def test_one_rank_alone_keeps_its_per_rank_values() -> None:
    """A world of one writes what it took."""
    state = [PerRank(3), {"a": PerRank(Tensor("a"))}]
    assert merge(state) == encode(state)[0]


def test_per_rank_tensors_of_one_name_are_refused() -> None:
    """They would be taken for replicas of each other."""
    assert "'rng' names tensors of several ranks" in refused(
        {"rng": PerRank(Tensor("rng"))}, {"rng": PerRank(Tensor("rng"))}
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_a_tensor_named_as_one_of_a_per_rank_value_is_refused(*, swapped: bool) -> None:
    """They would be taken for replicas of each other: one would be loaded for both."""
    ranks = [
        {"x": PerRank(Tensor("x~rank0")), "x~rank1": Tensor("x~rank1")},
        {"x": PerRank(Tensor("x~rank1"))},
    ]
    message = refused(*(reversed(ranks) if swapped else ranks))
    owner = 0 if swapped else 1
    assert f"'x~rank1' names a tensor of all ranks, and one of rank {owner} in PerRank" in message


def test_the_first_of_many_differences_are_listed() -> None:
    """Ten of them, and how many more there are."""
    message = refused({f"k{i}": i for i in range(30)}, {f"k{i}": -1 for i in range(30)})
    assert "ranks disagree on 30 values: 'k0' is 0 on rank 0 and -1 on rank 1; 'k1'" in message
    assert "'k9' is 9" in message
    assert "'k10'" not in message
    assert "and 20 more" in message


def test_many_values_and_ranks_are_shortened() -> None:
    """A message of a thousand ranks has one line still."""
    message = refused(*({"x": f"{'=' * 5000}{i // 2}"} for i in range(2, 1000)))
    assert len(message) < 600
    assert "=1' on ranks 0-1, " in message
    assert " more" in message
    scattered = refused(*({"x": i % 2} for i in range(100)))
    assert "0 on ranks 0, 2, 4, 6 and 46 more and 1 on ranks 1, 3, 5, 7 and 46 more" in scattered
    four, six = (refused(*({"x": i} for i in range(num))) for num in (4, 6))
    assert "2 on rank 2 and 3 on rank 3;" in four
    assert "2 on rank 2 and 3 more;" in six


@pytest.mark.parametrize("num_equal", [0, 28, 29, 30, 31, 56, 57, 100])
@pytest.mark.parametrize("num_more", [0, 100])
def test_values_that_differ_are_told_apart_in_few_characters(num_equal: int, num_more: int) -> None:
    """Wherever it is that they differ."""
    message = refused(*({"x": f"{'=' * num_equal}{i}{'-' * num_more}"} for i in range(2)))
    found = re.search("'x' is (.*) on rank 0 and (.*) on rank 1;", message)
    assert found is not None
    assert found[1] != found[2]
    assert max(map(len, found.groups())) <= 60


def test_digests_leave_per_rank_values_and_numbering_out() -> None:
    """And nothing else: places, names and order count."""
    one = take({"a": Tensor("a"), "r": PerRank(1)})
    two = take_tree({"a": {TAG: 5}, "r": {TAG: "ranks", "v": [{"x": {TAG: 0}}]}}, "bcdeza")
    assert one.digest == two.digest
    assert (one.values, two.values) == ([1], [{"x": {TAG: ["b"]}}])
    others: Sequence[Any] = [
        {"a": Tensor("b"), "r": PerRank(1)},
        {"a": Tensor("a"), "r": 1},
        {"r": PerRank(1), "a": Tensor("a")},
        {"a": Tensor("a", {TAG: "np", "d": "<f4", "s": []}), "r": PerRank(1)},
    ]
    assert len({one.digest, *(take(state).digest for state in others)}) == 5


def test_a_tree_is_sent_once_for_each_digest() -> None:
    """Twins send theirs no more; if the one that did has another now, it is asked for."""
    states = [{"x": r // 2, "y": PerRank(r)} for r in range(4)]
    ranks = [take({"s": {str(s["x"]): s["y"]}}) for s in states]
    twins = find_twins([entry.digest for entry in ranks])
    assert twins == [0, 0, 2, 2]
    sent = [entry if r == twins[r] else entry.without_tree() for r, entry in enumerate(ranks)]
    assert missing_trees(sent) == []
    assert same(merge_trees(sent, {}), merge_trees(ranks, {}))
    sent[0] = take({"s": {}})
    assert missing_trees(sent) == [1]
    assert missing_trees([entry.without_tree() for entry in ranks]) == [0, 2]


def test_a_state_that_is_no_container_is_merged_too() -> None:
    """Null is a tree like others, and no missing one."""
    assert merge(None, None) is None
    assert missing_trees([take(None)]) == []
    assert "'state' is None on rank 0 and 1 on rank 1" in refused(None, 1)


def test_values_that_begin_alike_are_told_apart_beside_others() -> None:
    """Of which one begins otherwise."""
    message = refused(*({"x": text} for text in (f"{'=' * 99}1", "no", f"{'=' * 99}2")))
    assert "==1' on rank 0, 'no' on rank 1 and ..." in message
    assert "==2' on rank 2;" in message


@pytest.mark.usefixtures("no_collections")
def test_taking_a_tree_leaves_nothing_to_collect() -> None:
    """Each save of several ranks takes one: in a run without collections they would add up."""
    tree, names = {"a": {TAG: 0}, "b": [1, {"c": 2}]}, ["a"]
    while gc.collect():
        pass
    take_tree(tree, names)
    assert gc.collect() == 0
