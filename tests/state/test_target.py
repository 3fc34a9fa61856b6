from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import random
from collections import Counter, OrderedDict, UserDict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ckptio import PerRank, Shard
from ckptio.errors import FormatError, TargetError
from ckptio.format.encode import TAG
from ckptio.format.manifest import TensorEntry
from ckptio.state.fills import check_array, check_fillable, classes_in
from ckptio.state.fits import is_filled
from ckptio.state.flatten import flatten
from ckptio.state.rebuild import Rebuilder
from ckptio.state.select import make_predicate
from ckptio.state.target import Matcher
from tests.state.objects import OwnMemory
from tests.strategies import (
    CLASSES,
    Color,
    Key,
    Point,
    Settings,
    assert_same,
    plain_states,
    with_versions,
)

if TYPE_CHECKING:
    from ckptio.state.fills import Match


def match_of(saved: Any, target: Any, select: Any = None, **options: Any) -> Match:
    return matched(saved, target, select, **options)[0]


def matched(saved: Any, target: Any, select: Any = None, **options: Any) -> tuple[Match, Any]:
    """Match a target with a state that was saved, and put the result together."""
    flat = flatten(saved)
    entries = tuple(TensorEntry(s.name, s.dtype, s.shape, ()) for s in flat.specs)
    keep = None if select is None else make_predicate(select)
    matcher = Matcher(entries, keep=keep, **options)
    assemble = matcher.merge("", target, msgspec.json.decode(msgspec.json.encode(flat.tree)))
    tensors = {i: flat.sources[i].clone() for i in matcher.match.fresh}
    return matcher.match, assemble(Rebuilder(tensors, CLASSES))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_tensors_are_filled_and_other_values_replaced() -> None:
    """The containers of the target are kept, and updated in place."""
    more: list[Any] = [zeros(1), 0]
    target: dict[str, Any] = {"w": zeros(2), "more": more, "step": -1, "name": None}
    saved = {"w": zeros(2), "more": [zeros(1), 5], "step": 7, "name": "x"}
    match, result = matched(saved, target)
    assert match.agrees
    assert match.fills[0].tensor is target["w"]
    assert match.fills[1].tensor is more[0]
    assert result is target
    assert result["more"] is more
    assert (result["step"], result["name"], more[1]) == (7, "x", 5)


class OwnDict(dict[str, Any]):
    """A dict of a class of the caller's."""


@dataclasses.dataclass
class Coordinates:
    x: Any
    y: Any


#: Keys that Python and numpy refuse to write.
TEXTLESS = [10**5000, (10**5000,), np.ones(1, "i8").view("M8")[0]]


@pytest.mark.parametrize("key", TEXTLESS, ids=["int", "tuple", "datetime64"])
def test_keys_without_a_text_are_matched_and_missed(key: Any) -> None:
    """In the stored order, if the target keeps one; it is no name of a module's, nor of DCP's."""
    saved = OrderedDict([(key, zeros(2)), ("a", 1), ("b", {key: 2})])
    target = OrderedDict([("b", {key: 0}), ("a", 0), (key, zeros(2))])
    match, result = matched(saved, target)
    assert match.agrees
    assert list(result) == [key, "a", "b"]
    assert result["b"] == {key: 2}
    match = match_of({"a": 1}, {"a": 0, key: zeros(2)})
    assert len(match.missing) == 1
    assert not match.unexpected


class Keyed:
    """An object that keeps tensors by whatever keys it is given."""

    def __init__(self, *keys: Any) -> None:
        self.held = {key: zeros(2) for key in keys}

    def state_dict(self) -> dict[Any, Any]:
        return self.held

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.held = state


@pytest.mark.parametrize("key", TEXTLESS, ids=["int", "tuple", "datetime64"])
def test_keys_without_a_text_are_no_names_of_what_else_has_a_state(key: Any) -> None:
    """Of modules of another version, of an object that lacks some, and of an optimizer."""
    states = [with_versions({"w": zeros(2), key: zeros(2)}, {"": {"version": n}}) for n in (1, 2)]
    assert match_of(*states).agrees
    match = match_of({"o": Keyed("a")}, {"o": Keyed("a", key)})
    assert len(match.missing) == 1
    optimizers = [torch.optim.SGD([zeros(2).requires_grad_()]) for _ in range(2)]
    for optimizer in optimizers:
        optimizer.state[key] = {key: torch.ones(2)}
    assert match_of(*optimizers).agrees


@given(state=plain_states)
def test_a_state_without_tensors_fits_itself(state: Any) -> None:
    """Whatever its keys are; and a placeholder of anything takes it."""
    for target in (state, None, object()):
        match, result = matched(state, target)
        assert match.agrees
        assert_same(result, state)


def test_what_disagrees_is_listed_by_name() -> None:
    """Every disagreement at once, not the first."""
    saved = {"a": zeros(2), "b": zeros(2), "c": zeros(3), "d": 1, "only": {"x": 1, "y": zeros(1)}}
    target = {
        "a": zeros(3), "b": zeros(2, dtype=torch.float16), "c": zeros(3), "d": zeros(1),
        "new": [zeros(1), {"z": 1}, []],
    }  # fmt: skip
    match = match_of(saved, target)
    assert match.missing == ["new.0", "new.1.z", "new.2"]
    assert match.unexpected == ["only.x", "only.y"]
    assert match.mismatched == [
        "a: shape (3,) in the target, (2,) in the checkpoint",
        "b: torch.float16 in the target, torch.float32 in the checkpoint",
        "d: a tensor in the target, an int in the checkpoint",
    ]
    assert [fill.tensor for fill in match.fills] == [target["c"]]


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        ({"x": 1}, {"x": zeros(1)}),
        ({"x": np.zeros(2, np.float32)}, {"x": zeros(2)}),
        ({"x": bytes(2000)}, {"x": zeros(2000, dtype=torch.uint8)}),
        ({"x": zeros(2)}, {"x": np.zeros(2, np.float32)}),
        ({"x": np.zeros(2)}, {"x": np.zeros(3)}),
        ({"x": np.zeros(2, ">f8")}, {"x": np.zeros(2, "<f8")}),
        ({"x": [1]}, {"x": (1,)}),
        ({"x": (1,)}, {"x": [1]}),
        ({"x": {"a": 1}}, {"x": [1]}),
        ({"x": [1]}, {"x": {"a": 1}}),
        ({"x": zeros(1)}, {"x": {"a": 1}}),
        ({"x": zeros(1)}, {"x": [1]}),
    ],
    ids=str,
)
def test_another_kind_of_value_is_a_mismatch(saved: Any, target: Any) -> None:
    """A tensor is no array, a list no tuple, a dict neither."""
    match, result = matched(saved, target)
    assert [line.split(":")[0] for line in match.mismatched] == ["x"]
    assert result is target


@pytest.mark.parametrize(
    "target",
    [torch.Generator(), random.Random(1), np.random.default_rng(1), deque([1]), UserDict(a=1)],
    ids=lambda target: type(target).__name__,
)
def test_an_object_that_takes_no_state_is_refused(target: object) -> None:
    """It would be replaced by what was made of it, and stay as it is, without a word."""
    saved = {"x": [zeros(2)], "y": 1}
    with pytest.raises(TargetError, match=r"cannot fill 'x'.*takes no state.*None in its place"):
        match_of(saved, {"x": target, "y": 0})
    assert match_of(saved, {"x": target, "y": 0}, "y").num_values == 1
    with pytest.raises(TargetError, match=r"cannot fill 'x\.1'.*takes no state"):
        match_of({"x": [1, [2]]}, {"x": [0, target]})


def test_equal_values_at_two_places_of_one_list_stay_what_they_are() -> None:
    """`1` is equal to `True`, and no other than `1.0`."""
    one: list[Any] = [0, 0.0]
    _, result = matched({"a": [1, 0.0], "b": [True, -0.0]}, {"a": one, "b": one})
    assert repr(result) == "{'a': [1, 0.0], 'b': [True, -0.0]}"
    _, result = matched({"a": [1, 0.0], "b": [1, 0.0]}, {"a": one, "b": one})
    assert result["a"] is result["b"]


@pytest.mark.parametrize("empty", [[], (), {}])
def test_an_empty_target_takes_nothing_of_another_kind(empty: Any) -> None:
    """Who passes it looks into it, and would find nothing; of its own kind it takes all."""
    saved: Any = [1] if empty == {} else {"a": 1}
    match, result = matched(saved, empty)
    assert [line.split(":")[0] for line in match.mismatched] == ["the whole state"]
    assert result is empty
    target: list[Any] = []
    _, result = matched([1, {"a": 2}], target)
    assert result is target == [1, {"a": 2}]


def test_an_empty_dict_inside_takes_all_that_is_plain() -> None:
    """A history, or what callbacks keep: nothing is there yet in a target that is new."""
    saved = {"h": {1: 0.5, 2: {"a": [1]}}, "o": OrderedDict(b=1, a=2), "c": Counter(x=-2)}
    target: dict[str, Any] = {"h": {}, "o": OrderedDict(), "c": Counter()}
    held = dict(target)
    match, result = matched(saved, target)
    assert match.agrees
    assert result == saved
    assert all(result[name] is value for name, value in held.items())
    assert list(result["o"]) == ["b", "a"]


@pytest.mark.parametrize("saved", [{}, OrderedDict(), torch.nn.ReLU().state_dict()], ids=repr)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_an_empty_dict_of_either_kind_takes_an_empty_one(kind: type, saved: Any) -> None:
    """And the versions of a module without tensors, if it can hold them."""
    target = {"a": kind()}
    _, result = matched({"a": saved}, target)
    assert result["a"] is target["a"]
    if kind is OrderedDict and hasattr(saved, "_metadata"):
        assert result["a"]._metadata == saved._metadata


def test_an_empty_dict_takes_nothing_at_the_top_or_of_a_class_of_its_own() -> None:
    """What is there has no place in them, and is listed."""
    assert match_of({"a": 1}, {}).unexpected == ["a"]
    assert match_of({"a": {"x": 1}}, {"a": OwnDict()}).unexpected == ["a.x"]


def test_an_empty_dict_takes_no_tensors() -> None:
    """Nor of many ranks anything, as it may have none of that; nor where keys may be others."""
    match = match_of({"h": {"a": {"b": zeros(2)}, "c": 1}}, {"h": {}})
    assert match.unexpected == ["h.a.b", "h.c"]
    assert match_of({"h": {"a": 1}}, {"h": {}}, is_alone=False).unexpected == ["h.a"]
    assert match_of({"h": {"a": 1}}, {"h": {}}, is_exact=False).unexpected == ["h.a"]
    match, result = matched({"h": [1]}, {"h": {}})
    assert [line.split(":")[0] for line in match.mismatched] == ["h"]
    assert result == {"h": {}}


def test_keys_of_any_kind_match_themselves() -> None:
    """Enums and records as keys match without their classes being passed."""
    keys = [
        Color.RED, Key(1, 2), Point(1, 2), (1, 2.5), None, b"k", 1, "1", frozenset([Color.RED]),
        torch.float32, torch.device("cuda:1"), torch.Size([2, 3]), (torch.int8, np.int8(1)),
        np.float32(0.1), np.str_("s"), np.datetime64("2024-01-01"), 2**70, math.nan,
        np.ones(1, "i8").view("M8")[0], np.float32(math.nan), frozenset([torch.float32]),
    ]  # fmt: skip
    match = match_of({key: zeros(1) for key in keys}, {key: zeros(1) for key in keys})
    assert match.agrees
    assert len(match.fills) == len(keys)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (np.int64(3), 3), (3, np.uint8(3)), (np.float64(0.5), 0.5), (True, np.True_), (1.0, 1),
        (np.str_("é"), "é"), ("a", np.str_("a")), (np.bytes_(b"k"), b"k"), (2**70, 2.0**70),
        (torch.Size([2, 3]), (2, 3)), ((2, 3), torch.Size([2, 3])), (np.complex64(1j), 1j),
        ((1, (np.int8(2), "a")), (1, (2, np.str_("a")))), (Point(1, 2), (1, 2)),
        ((1, 2), Point(1, 2)), (frozenset([np.int64(1)]), frozenset([1])),
    ],
)  # fmt: skip
def test_equal_keys_of_another_type_find_each_other(saved: Any, wanted: Any) -> None:
    """As in any dict; the target keeps its own."""
    match, result = matched({"x": {saved: zeros(1)}}, {"x": {wanted: zeros(1)}})
    assert match.agrees
    assert len(match.fills) == 1
    assert [type(key) for key in result["x"]] == [type(wanted)]


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [(1, "1"), ("k", b"k"), (torch.float32, "torch.float32"), (torch.device("cpu"), "cpu"),
     (np.float32(0.1), 0.1), (None, "None"), (math.nan, np.float32(math.nan))],
)  # fmt: skip
def test_keys_that_only_look_alike_do_not(saved: Any, wanted: Any) -> None:
    """Though they are named alike."""
    match = match_of({saved: zeros(1)}, {wanted: zeros(1)})
    assert (len(match.missing), len(match.unexpected)) == (1, 1)


def test_a_key_that_no_checkpoint_can_have_is_missing() -> None:
    """It is no reason to fail."""
    assert len(match_of({"a": 1}, {"a": 1, int: 2}).missing) == 1


def test_tuples_and_named_tuples_come_back_with_their_tensors() -> None:
    """They cannot be updated in place, but what they hold is filled in place."""
    target = {"t": (zeros(1), 0), "p": Point(zeros(2), 0)}
    match, result = matched({"t": (zeros(1), 5), "p": Point(zeros(2), 6)}, target)
    assert match.agrees
    assert len(match.fills) == 2
    assert result["t"][0] is match.fills[0].tensor
    assert result["t"][1] == 5
    assert type(result["p"]) is Point
    assert result["p"].y == 6


def test_a_tuple_is_taken_as_the_named_one_that_is_there() -> None:
    """Also where it holds nothing that is filled."""
    _, result = matched({"a": (1.5, 2)}, {"a": Point(0.0, 0)})
    assert_same(result, {"a": Point(1.5, 2)})


def test_what_no_other_rank_shares_is_taken_in_place() -> None:
    """A tensor of each rank is one of this rank; one of a rank that was not there is missing."""
    target: dict[str, Any] = {"a": zeros(2), "b": [zeros(1), zeros(3)]}
    match, result = matched({"a": PerRank(zeros(2)), "b": [PerRank(zeros(1)), zeros(3)]}, target)
    assert match.agrees
    assert [fill.tensor for fill in match.fills] == [target["a"], *target["b"]]
    absent = {"~": "ranks", "v": [{"~": "absent"}]}
    matcher = Matcher(())
    result = matcher.merge("", {"b": [held := zeros(1), 0]}, {"b": [absent, 5]})(Rebuilder({}))
    assert matcher.match.missing + matcher.match.kept == ["b.0"]
    assert result["b"][0] is held
    for below in ({"x": absent}, {"x": [absent]}, {"~": "tuple", "v": [absent]}):
        matcher = Matcher(())
        matcher.merge("", {"b": [0, 1]}, {"b": [below]})
        assert matcher.match.missing == ["b.1"]  # no list of another length takes its place


def test_a_part_of_a_tensor_that_is_not_selected_is_left_alone() -> None:
    """Whatever is stored under its name; one that is, is filled."""
    saved = {"a": zeros(5), "b": zeros(2)}
    target = {"a": Shard(zeros(1), (2,), (0,)), "b": Shard(zeros(1), (2,), (1,))}
    match, result = matched(saved, target, "b")
    assert match.agrees
    assert [fill.tensor for fill in match.fills] == [target["b"].tensor]
    assert result["a"] is target["a"]


@pytest.mark.parametrize("saved", [[1, 2], 5, None], ids=repr)
def test_an_object_takes_another_kind_of_value_than_its_dict(saved: Any) -> None:
    """Its dict is a template; what is stored may be of another time."""
    holder = Holder({"a": {"x": 1}})
    match, _ = matched(Holder({"a": saved}), holder)
    assert match.agrees
    assert holder.given == {"a": saved}


def test_what_a_tuple_has_beyond_a_shorter_one_stays() -> None:
    """And is listed."""
    target = (zeros(1), 5)
    match, result = matched({"a": (zeros(1),)}, {"a": target})
    assert match.missing == ["a.1"]
    assert result["a"] == target


def test_a_module_whose_name_is_like_that_of_an_extra_state_is_filled_in_place() -> None:
    """Its tensors are tensors like others."""
    target = torch.nn.ModuleDict({"an_extra_state": torch.nn.Linear(2, 2)})
    match, _ = matched(torch.nn.ModuleDict({"an_extra_state": torch.nn.Linear(2, 2)}), target)
    assert len(match.fills) == 2
    assert not match.fresh


class Seen(torch.nn.Module):
    """A module that says what it has seen under a name of its own."""

    def __init__(self, seen: dict[str, int]) -> None:
        super().__init__()
        self.seen = seen

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001  # torch's
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}seen"] = self.seen

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        self.seen = state_dict.pop(f"{prefix}seen")
        super()._load_from_state_dict(state_dict, prefix, *more)


def test_a_dict_among_the_tensors_of_a_module_is_taken_whole() -> None:
    """The module alone knows what it means by its keys."""
    target = Seen({"x": 1})
    match, _ = matched({"m": Seen({"x": 2, "y": 3})}, {"m": target})
    assert match.agrees
    assert target.seen == {"x": 2, "y": 3}


def test_an_ordered_dict_of_which_the_checkpoint_has_a_part_keeps_its_order() -> None:
    """As one of which a part was selected."""
    target = OrderedDict(a=0, c=0, b=zeros(1))
    match, result = matched({"o": OrderedDict(b=zeros(1), a=1)}, {"o": target})
    assert match.missing == ["o.c"]
    assert list(result["o"]) == ["a", "c", "b"]


def test_a_tensor_under_the_key_of_an_extra_state_is_filled_in_a_dict() -> None:
    """It is a module's own affair in the states of modules alone."""
    target: dict[str, Any] = {"_extra_state": zeros(2), "a": {"_extra_state": zeros(1)}}
    match, result = matched({"_extra_state": zeros(2), "a": {"_extra_state": zeros(1)}}, target)
    assert [fill.tensor for fill in match.fills] == [
        target["_extra_state"],
        target["a"]["_extra_state"],
    ]
    assert result["_extra_state"] is target["_extra_state"]


def test_a_dataclass_takes_a_dict_and_nothing_else() -> None:
    """Whether it holds anything to fill or not; only `None` comes instead of one without."""
    _, result = matched({"a": {"x": 1, "y": 2}}, {"a": Coordinates(0, 0)})
    assert result == {"a": Coordinates(1, 2)}
    match, result = matched({"a": 5, "b": None, "c": None}, {
        "a": Coordinates(0, 0), "b": Coordinates(0, 0), "c": Coordinates(zeros(1), 0),
    })  # fmt: skip
    assert [line.partition(":")[0] for line in match.mismatched] == ["a", "c"]
    assert result["b"] is None


def test_a_longer_and_a_shorter_list_are_listed() -> None:
    """Places that only one of them has; the others are filled."""
    assert match_of([zeros(1), 2, 3], [zeros(1)]).unexpected == ["1", "2"]
    match, result = matched([1], [0, zeros(1), {"a": 1}])
    assert match.missing == ["1", "2.a"]
    assert result[0] == 1
    assert len(result) == 3


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        ([0.5, 0.25], [0.5, 0.25, 9.0]),
        ([0.5, 0.25], [7.0]),
        ([], [7.0]),
        ([0.5], []),
        ((1, 2), (1, 2, 3)),
        ([{"loss": 0.5, "lr": 1.0}, {"eval": 0.25}], [{"loss": 0.5, "lr": 1.0}]),
        ([[1], (2, {3})], [[1, 2]]),
        ([Point(1, 2), Point(3, 4)], [Point(5, 6)]),
        ([Color.RED, Color.RED], [Color.RED]),
        ([zeros(1), 2], [0, 0]),
        ([zeros(1), zeros(2), 2], [None]),
    ],
    ids=str,
)
def test_a_list_that_holds_nothing_to_fill_is_one_value(saved: Any, target: Any) -> None:
    """A history, say, which has grown since: it is neither refused nor mixed of two times."""
    into: dict[str, Any] = {"x": copy.copy(target), "w": zeros(1)}
    held = into["x"]
    match, result = matched({"x": saved, "w": zeros(1)}, into)
    assert match.agrees
    assert_same(result["x"], saved)
    assert (result["x"] is held) == (bool(target) and type(target) is list)


def test_a_list_of_records_is_filled_field_by_field() -> None:
    """Where there are as many, each is the very one that it was; otherwise all are new."""
    first = Settings(1, [2])
    target = {"x": [first, Settings(3, [4])]}
    match, result = matched({"x": [Settings(5, [6, 7]), Settings(8, [])]}, target)
    assert match.agrees
    assert result["x"][0] is first
    assert (first.rate, first.name) == (5, [6, 7])
    match, result = matched({"x": [Settings(5, [6, 7])]}, target)
    assert match.agrees
    assert result["x"] == [Settings(5, [6, 7])]
    assert match_of({"x": [Settings(5, zeros(1))]}, {"x": [Settings(5, zeros(1)), 1]}).missing


def test_dicts_and_lists_in_a_list_are_filled_in_place() -> None:
    """Somebody may have them; so names that are wrong are told, too."""
    meter, log = {"n": 0}, [0, 0]
    match, result = matched({"x": [{"n": 3}, [1, 2, 3]]}, {"x": [meter, log]})
    assert match.agrees
    assert result["x"][0] is meter
    assert result["x"][1] is log
    assert (meter, log) == ({"n": 3}, [1, 2, 3])
    progress = {"step": 0}
    matched(({"step": 7}, 1), (progress, 0))
    assert progress == {"step": 7}
    assert match_of(({"step": 7}, 1), ({"stepp": 0}, 0)).missing == ["0.stepp"]
    assert match_of([(0, 0)], [[0, 0]]).mismatched


def test_a_list_of_which_a_part_is_selected_keeps_the_rest() -> None:
    """Item by item, as long as there are as many."""
    target = {"x": [1, 2]}
    match, result = matched({"x": [5, 6]}, target, "x.1")
    assert match.agrees
    assert result["x"] == [1, 6]
    assert match_of({"x": [5, 6]}, {"x": [1]}, "x.1").unexpected == ["x.1"]


def test_an_array_is_filled_in_place() -> None:
    """The target's memory takes the values, whatever its strides."""
    target = np.zeros((3, 4))[:, ::2]
    expected = np.arange(6.0).reshape(3, 2)
    match, result = matched([expected], [target])
    assert match.agrees
    assert result[0] is target
    (fill,) = match.fills
    fill.memory().fill_(7.0)
    assert (target == 7.0).all()


@pytest.mark.parametrize(
    "saved",
    [
        np.arange(6.0).reshape(2, 3).astype(">f8"),
        np.array(["a", "bcd"]),
        np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
        np.zeros((0, 2), dtype=">i4"),
        np.array(7, dtype=">u2"),
    ],
    ids=lambda saved: saved.dtype.str,
)
def test_an_array_that_is_no_tensor_of_torch_is_copied_into(saved: np.ndarray[Any, Any]) -> None:
    """Other byte orders, strings and dates: the target's memory takes them, and is kept."""
    target = np.empty_like(saved)
    view = target[...]
    match, result = matched({"a": saved}, {"a": target})
    assert match.agrees
    assert result["a"] is target
    assert_same(view, saved)
    swapped = saved.astype(saved.dtype.newbyteorder())
    if swapped.dtype != saved.dtype:
        assert "in the target" in match_of({"a": saved}, {"a": swapped}).mismatched[0]


def test_an_array_whose_elements_have_no_bytes_is_kept() -> None:
    """Strings without characters, a field of records: there is nothing to copy, and no stride."""
    saved, target = (np.zeros(3, dtype=[("name", "U0")])["name"] for _ in range(2))
    match, result = matched({"a": saved}, {"a": target})
    assert match.agrees
    assert result["a"] is target


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (torch.zeros(1).expand(4), "its elements share memory"),
        (torch.zeros(4).to_sparse(), "not dense memory"),
        (torch.inference_mode()(torch.zeros)(4), "inference tensor"),
        (torch.zeros(4).as_subclass(OwnMemory), "may hold its data elsewhere"),
    ],
)
def test_memory_that_cannot_take_every_element_is_refused(
    target: torch.Tensor, problem: str
) -> None:
    """Before anything is filled."""
    with pytest.raises(TargetError, match=f"cannot fill 'x'.*{problem}"):
        match_of({"x": zeros(4)}, {"x": target})


@pytest.mark.parametrize("steps", [(1, 1), (2, 1), (0, 1), (2, 3)])
def test_a_target_whose_elements_share_memory_is_refused(steps: tuple[int, int]) -> None:
    """Whichever dimension steps into another one; not where it steps between the elements."""
    tensor = torch.zeros(20).as_strided((3, 3) if steps != (2, 3) else (2, 2), steps)
    array = np.lib.stride_tricks.as_strided(
        np.zeros(20, np.float32), tensor.shape, tuple(4 * step for step in steps)
    )
    for target in (tensor, array):
        saved = {"x": torch.ones(tensor.shape) if target is tensor else np.ones_like(array)}
        if steps == (2, 3):
            assert match_of(saved, {"x": target}).agrees
            continue
        with pytest.raises(TargetError, match="share memory"):
            match_of(saved, {"x": target})


class Plain(torch.Tensor):
    """A tensor with methods of its own."""


@given(
    dims=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=3),
    itemsize=st.sampled_from([1, 2, 4]),
)
@example([(3, 2), (2, 3)], 1)
@example([(2, 6), (2, 2)], 4)
@example([(2, 5), (2, 9)], 4)
@example([(4, 2), (4, 7)], 2)
@example([(1, 0)], 4)
def test_of_strides_those_that_share_memory_are_refused(
    dims: list[tuple[int, int]], itemsize: int
) -> None:
    """In bytes, of any width, forwards and backwards: as many as all elements have, or not."""
    shape, strides = [n for n, _ in dims], [stride for _, stride in dims]
    array = np.ndarray(shape, f"V{itemsize}", np.zeros(256, np.uint8), 0, strides)
    starts = itertools.product(*([i * stride for i in range(n)] for n, stride in dims))
    places = [sum(start) + byte for start in starts for byte in range(itemsize)]
    for target in (array, np.flip(array)):
        if len(set(places)) == len(places):
            check_array("x", target)
            continue
        with pytest.raises(TargetError, match="its elements share memory"):
            check_array("x", target)


def test_what_has_no_elements_shares_no_memory() -> None:
    """However it was made: an expansion has steps of none."""
    target = zeros(0, 1).expand(0, 3)
    for each in (target, target.as_subclass(Plain)):
        assert match_of({"x": zeros(0, 3)}, {"x": each}).agrees


def test_classes_are_found_in_every_container() -> None:
    """A checkpoint may name them, as the target has them."""
    for kind in (list, tuple, set, frozenset):
        assert list(classes_in({"a": kind([1, Color.RED])})) == [Color]
    assert list(classes_in({Color.RED: Point(1, Settings(2))})) == [Color, Point, Settings]


def test_a_tensor_of_inference_mode_is_filled_in_it() -> None:
    with torch.inference_mode():
        target = torch.zeros(4)
        assert match_of({"x": zeros(4)}, {"x": target}).agrees


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_what_is_made_is_a_parameter_where_that_was_one(kind: type[torch.Tensor]) -> None:
    plain = torch.empty(2, device="meta")
    target = plain if kind is torch.Tensor else torch.nn.Parameter(plain)
    _, result = matched({"a": zeros(2)}, {"a": target})
    assert type(result["a"]) is kind


def test_elements_that_no_memory_would_hold_are_not_counted() -> None:
    """What is more than there are places shares some; an expansion may be of any size."""
    with pytest.raises(TargetError, match="share memory"):
        check_fillable("x", torch.zeros(1).expand(1 << 40))


def test_a_read_only_array_is_refused() -> None:
    """It would have to be replaced, which is not in place."""
    target = np.zeros(3)
    target.flags.writeable = False
    with pytest.raises(TargetError, match="read-only"):
        match_of([np.zeros(3)], [target])


def test_an_array_with_a_mask_is_refused() -> None:
    """It would hide what is loaded behind the mask that it has."""
    target = np.ma.MaskedArray(np.zeros(3), mask=[False, True, False])
    with pytest.raises(TargetError, match="mask"):
        match_of([np.zeros(3)], [target])


def test_another_dtype_is_taken_only_where_it_is_asked_for() -> None:
    """Floating point only, and only the one that was named."""
    saved = {"w": zeros(2), "n": zeros(2, dtype=torch.int64)}
    target = {"w": zeros(2, dtype=torch.bfloat16), "n": zeros(2, dtype=torch.int64)}
    assert not match_of(saved, target).agrees
    assert match_of(saved, target, dtype=torch.bfloat16).agrees
    assert not match_of(saved, target, dtype=torch.float16).agrees
    target["n"] = zeros(2, dtype=torch.bfloat16)
    assert not match_of(saved, target, dtype=torch.bfloat16).agrees


def test_what_is_not_selected_stays_and_is_not_listed() -> None:
    """Neither values, nor what is missing, unexpected or mismatched outside of it."""
    saved = {"a": {"w": zeros(1), "s": 1}, "b": {"w": zeros(2)}, "c": 3}
    target = {"a": {"w": zeros(1), "s": 0}, "b": {"w": zeros(5)}, "d": 4, "c": 0}
    match, result = matched(saved, target, "a")
    assert match.agrees
    assert len(match.fills) == 1
    assert (result["a"]["s"], result["c"], result["d"]) == (1, 0, 4)
    assert match_of(saved, target, ["a", "d"]).missing == ["d"]


@pytest.mark.parametrize(
    ("saved", "target", "select"),
    [
        ([zeros(1), zeros(1)], {"0": zeros(1)}, "a.0"),
        ({"x": zeros(1)}, [zeros(1)], "a.x"),
        ({"x": zeros(1)}, [zeros(1)], "a.0"),
        ((zeros(1), 1), [zeros(1), 0], "a.1"),
        ({"x": zeros(1)}, zeros(1), "a.x"),
        (zeros(1), {"x": zeros(1)}, "a.x"),
        ({"x": 1}, np.zeros(1), "a.x"),
    ],
    ids=["list", "dict", "dict, of the target", "tuple", "nested", "flat", "array"],
)
def test_what_is_of_another_kind_is_told_where_a_part_of_it_is_selected(
    saved: Any, target: Any, select: str
) -> None:
    """Its own name is not; but neither side has the other's, and the part would not be loaded."""
    saved, target = {"a": saved, "b": zeros(1)}, {"a": target, "b": zeros(1)}
    match, result = matched(saved, target, [select, "b"])
    assert [line.partition(":")[0] for line in match.mismatched] == ["a"]
    assert result["a"] is target["a"]
    assert match_of(saved, target, "b").agrees


@pytest.mark.parametrize("saved", [{}, {"a": zeros(1)}, {"a": {"x": 1}}])
def test_a_module_is_missing_where_a_part_of_it_is_selected(saved: dict[str, Any]) -> None:
    """As a dict of its tensors would be: else it would keep what it was made with."""
    saved, module = {**saved, "b.weight": zeros(1)}, torch.nn.Linear(2, 2, bias=False)
    module.register_buffer("scratch", zeros(1), persistent=False)
    target = {"a": torch.nn.Sequential(module), "b.weight": zeros(1)}
    assert match_of(saved, target, "*.weight").missing == ["a.0.weight"]
    assert match_of(saved, target, ["b.weight", "a.0.scratch"]).missing == []


def test_a_module_that_names_its_parameters_in_its_own_way_is_not_asked() -> None:
    """An override with the arguments of older torch, or one that raises, ends no load."""

    class Module(torch.nn.Linear):
        def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]  # noqa: FBT001, FBT002  # as in torch 1
            return super().named_parameters(prefix, recurse)

    saved, target = {"b.weight": zeros(1)}, {"a": Module(2, 2), "b.weight": zeros(1)}
    assert match_of(saved, target, "b").agrees
    assert match_of(saved, target, "*.weight").missing == ["a.weight"]


@pytest.mark.parametrize("saved", [{}, {"a": {}}, {"a": 1}, {"a": zeros(1)}])
def test_a_module_of_which_a_function_takes_nothing_is_not_missing(saved: dict[str, Any]) -> None:
    """As a dict of its tensors would not be, though the function accepts the module's own name."""
    saved, target = {**saved, "b": zeros(1)}, {"a": torch.nn.Linear(2, 2), "b": zeros(1)}
    select = lambda name: name in ("a", "b")  # noqa: E731  # as callers write it
    assert match_of(saved, target, select).missing == []
    assert not match_of(saved, target, ["a", "b"]).agrees


@dataclasses.dataclass
class Nets:
    net: Any


class Pair(NamedTuple):
    net: Any
    others: Any


def hooked_linear() -> torch.nn.Module:
    """A module whose state a hook of others has looked at."""
    module = torch.nn.Linear(2, 2)
    module.register_state_dict_post_hook(lambda *_: None)
    return module


@pytest.mark.parametrize("saved", [{}, {"a": 1}, {"a": zeros(1)}])
@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(2, 2), hooked_linear])
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda module: {"x": module}, "a.x"),
        (lambda module: [zeros(1), module], "a.1"),
        (lambda module: ({"x": module},), "a.0.x"),
        (Nets, "a.net"),
        (lambda module: Pair(module, [Nets(1)]), "a.net"),
    ],
)
def test_a_module_within_what_is_not_stored_does_not_stay_as_it_is_without_a_word(
    saved: dict[str, Any], make: Any, wrap: Any, name: str
) -> None:
    """Its parts are selected by their own names, whatever it is in, and whatever hooks it has."""
    saved, target = {**saved, "b.weight": zeros(1)}, {"a": wrap(make()), "b.weight": zeros(1)}
    match = match_of(saved, target, "*.weight")
    assert not match.agrees
    assert match.missing == ([] if "a" in saved else [f"{name}.weight"])
    assert match_of(saved, target, "b").agrees


def test_a_module_that_is_not_stored_is_missing_whatever_hooks_it_has() -> None:
    """What it leaves out of its state is seen where there is some of it, and else unknown."""
    saved, target = {"b.weight": zeros(1)}, {"a": hooked_linear(), "b.weight": zeros(1)}
    assert match_of(saved, target, "*.weight").missing == ["a.weight"]


def test_a_module_is_missing_where_its_extra_state_alone_is_selected() -> None:
    """It is stored as the tensors are, under a name of its own."""

    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"num_calls": 1}

    saved, target = {"b": zeros(1)}, {"a": torch.nn.Sequential(Counting(2, 2)), "b": zeros(1)}
    for select in ("*_extra_state", lambda name: name == "a" or name.endswith("_extra_state")):
        assert not match_of(saved, target, select).agrees
    assert match_of(saved, target, "*_extra_state").missing == ["a.0._extra_state"]


def test_what_a_module_leaves_out_of_its_state_is_not_missing() -> None:
    """One that gives its adapters alone, by a method or a hook, has no other names."""

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.lora = torch.nn.Linear(2, 2), torch.nn.Parameter(zeros(1))

        def state_dict(self, *args: Any, **options: Any) -> Any:
            state = super().state_dict(*args, **options)
            return {name: held for name, held in state.items() if name.endswith("lora")}

    hooked = torch.nn.Linear(2, 2)
    hooked.register_state_dict_post_hook(lambda _, state, prefix, __: state.pop(f"{prefix}weight"))
    saved = {"a": {"lora": zeros(1)}, "b": {"bias": zeros(2)}, "c.weight": zeros(1)}
    target = {"a": Adapted(), "b": hooked, "c.weight": zeros(1)}
    assert match_of(saved, target, "*.weight").agrees


@pytest.mark.parametrize(
    ("saved", "target"),
    [([zeros(1), 1], {"x": zeros(1)}), ({"x": zeros(1)}, [zeros(1)]), ((zeros(1),), [zeros(1)])],
)
def test_what_is_of_another_kind_stays_where_all_below_it_is_left_out(
    saved: Any, target: Any
) -> None:
    """Though a function that leaves it out accepts the name of what it is in."""
    select = lambda name: not name.startswith("a.")  # noqa: E731  # as callers write it
    assert match_of({"a": saved, "b": zeros(1)}, {"a": target, "b": zeros(1)}, select).agrees


@pytest.mark.parametrize("saved", [[1, 2], (1, 2), {1, 2}, 5], ids=str)
def test_an_object_with_a_dict_takes_what_is_selected_of_another_kind(saved: Any) -> None:
    """Or is told that it cannot: nothing else that it has is lost."""
    holder = Holder({"a": {"x": 1}, "b": 1})
    match, _ = matched(Holder({"a": saved, "b": 2}), holder, ["a.0", "b"])
    assert holder.given["b"] == 2
    told = [line.partition(":")[0] for line in match.mismatched]
    assert told == (["a"] if isinstance(saved, tuple) else [])
    assert match.unexpected == []


def test_a_part_of_a_longer_list_is_told_and_the_list_stays() -> None:
    """Nobody knows which of its items are those of the target."""
    holder = Holder({"a": [1, 2], "b": 1})
    match, _ = matched(Holder({"a": [3, 4, 5], "b": 2}), holder, ["a.0", "b"])
    assert [line.partition(":")[0] for line in match.mismatched] == ["a"]
    assert holder.given == {"a": [1, 2], "b": 2}


def test_a_placeholder_takes_what_is_selected_of_a_container() -> None:
    """And no tensor beside it is made."""
    saved = {"a": {"x": zeros(1), "y": zeros(2)}}
    match, result = matched(saved, {"a": None}, "a.y")
    assert match.fresh.keys() == {1}
    assert list(result["a"]) == ["y"]


class Holder:
    """A stateful object that remembers what it was given."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.given: Any = None

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict


def test_a_stateful_object_is_given_its_state() -> None:
    """New tensors, and its own left alone: it may write to them before it reads these."""
    holder = Holder({"w": zeros(2), "n": 0, "sub": {"a": 1}})
    saved = {"w": zeros(2), "n": 5, "sub": {"a": 2, "b": [zeros(1)]}, "moment": zeros(3)}
    match, result = matched(Holder(saved), holder)
    assert match.agrees
    assert result is holder
    assert holder.given["w"].shape == (2,)
    assert holder.given["w"] is not holder.state["w"]
    assert (holder.given["n"], holder.given["sub"]["a"]) == (5, 2)
    assert holder.given["moment"].shape == (3,)
    assert holder.state == {"w": holder.state["w"], "n": 0, "sub": {"a": 1}}


def test_kinds_of_dict_are_given_as_they_were_saved() -> None:
    """An ordered dict is one, a counter is one."""
    holder = Holder({"o": {}, "c": {}, "k": {}})
    saved = {"o": OrderedDict(b=1), "c": Counter("aab"), "k": {Color.RED: 1}}
    matched(Holder(saved), holder)
    assert_same(holder.given, saved)


@pytest.mark.parametrize("select", [None, "o.a"], ids=["all", "some"])
def test_an_ordered_dict_takes_the_order(select: str | None) -> None:
    """Which is a part of it (who was used last); where only some is selected, it stays."""
    saved = OrderedDict([("b", torch.ones(1)), (3, 2), ("a", 1)])
    target = OrderedDict([("a", 0), ("b", zeros(1)), (3, 0)])
    had = target["b"]
    _, result = matched({"o": saved}, {"o": target}, select)
    assert result["o"] is target
    assert list(target) == (["b", 3, "a"] if select is None else ["a", "b", 3])
    assert target["a"] == 1
    assert target["b"] is had


def test_what_a_stateful_object_lacks_is_as_it_was() -> None:
    """Missing names are listed; under `strict="ignore"` it gets its own values back."""
    holder = Holder({"w": zeros(2), "extra": 4})
    match, _ = matched(Holder({"w": zeros(2)}), holder)
    assert match.missing == ["extra"]
    assert holder.given["extra"] == 4


def test_a_stateful_object_of_which_nothing_is_selected_is_left_alone() -> None:
    """It is given nothing at all."""
    holder, other = Holder({}), Holder({"n": 0})
    saved = {"a": Holder({"n": 1}), "b": Holder({"n": 2})}
    matched(saved, {"a": holder, "b": other}, "b")
    assert holder.given is None
    assert other.given == {"n": 2}


def test_a_module_takes_no_names_that_it_does_not_have() -> None:
    """Its `load_state_dict` would fail after the bytes have landed."""
    saved = {"m": {"weight": zeros(2, 2), "bias": zeros(2), "extra": zeros(1)}}
    module = torch.nn.Linear(2, 2)
    match, _ = matched(saved, {"m": module})
    assert match.unexpected == ["m.extra"]
    del saved["m"]["extra"], saved["m"]["bias"]
    assert match_of(saved, {"m": module}).missing == ["m.bias"]


class Tied(torch.nn.Module):
    """Two names of one parameter, and a third name of another like it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(2, 2, bias=False)
        self.body = torch.nn.Linear(2, 2, bias=False)
        self.apart = torch.nn.Linear(2, 2, bias=False)
        self.head.weight = self.body.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["head", "body"])
def test_a_module_has_tied_parameters_by_any_of_their_names(name: str, device: str) -> None:
    """As Hugging Face stores them; nothing else is taken for tied."""
    with torch.device(device):
        module = Tied()
    saved = {"m": {f"{name}.weight": zeros(2, 2), "apart.weight": zeros(2, 2)}}
    match, _ = matched(saved, {"m": module})
    assert match.agrees
    assert module.head.weight is module.body.weight
    assert not module.head.weight.is_meta
    other = next(n for n in ("m.head.weight", "m.body.weight") if n != f"m.{name}.weight")
    select = [other, "m.apart.weight"]  # what it is tied to is not loaded
    assert match_of(saved, {"m": Tied()}, select=select).missing == [other]
    del saved["m"]["apart.weight"]
    assert match_of(saved, {"m": Tied()}).missing == ["m.apart.weight"]


@pytest.mark.parametrize("shape", [(3, 2), (2, 2)])
def test_what_is_tied_to_a_tensor_that_does_not_fit_is_not_missing(shape: tuple[int, int]) -> None:
    """It is stored once, in another shape or of another type; what is stored nowhere is missing."""
    module = Tied().bfloat16() if shape == (2, 2) else Tied()
    match = match_of({"m": {"head.weight": zeros(*shape)}}, {"m": module})
    assert match.missing == ["m.apart.weight"]
    assert [line.partition(":")[0] for line in match.mismatched] == ["m.head.weight"]


class WithExtra(torch.nn.Linear):
    """A module with a state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"scale": getattr(self, "scale", 0)}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]
        self.found = state


def test_the_extra_state_of_a_module_is_its_own_affair() -> None:
    """Whatever names are in it."""
    saved, module = WithExtra(2, 2), WithExtra(2, 2)
    saved.scale = 7
    state = saved.state_dict()
    state["_extra_state"]["more"] = zeros(2)
    match, _ = matched(state, module)
    assert match.agrees
    assert module.scale == 7
    assert sorted(module.found) == ["more", "scale"]


class WithBytes(torch.nn.Linear):
    """A module with a tensor for its extra state, which grows."""

    kept = torch.empty(0, dtype=torch.uint8)

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_the_extra_state_of_a_module_may_be_a_tensor_of_any_shape() -> None:
    """It is handed over, not filled."""
    saved, module = torch.nn.Sequential(WithBytes(2, 2)), torch.nn.Sequential(WithBytes(2, 2))
    saved[0].kept = torch.arange(12, dtype=torch.uint8)
    match, _ = matched(saved.state_dict(), module)
    assert match.agrees
    assert module[0].kept.shape == (12,)


def tree_match(tree: Any, target: Any, *entries: TensorEntry) -> Match:
    """Match a target with a tree that nobody saved."""
    matcher = Matcher(entries)
    matcher.merge("", target, tree)
    return matcher.match


@pytest.mark.parametrize(
    "view",
    [
        {"s": [5], "r": [1], "o": 0},
        {"s": [4], "r": [2], "o": 0},
        {"s": [4], "r": [1], "o": 4},
        {"s": [4], "r": [1], "o": 1},
        {"s": [4], "r": [-1], "o": 12},
        {"s": [4], "r": [], "o": 0},
    ],
)
def test_a_view_that_ends_outside_of_its_tensor_is_refused(view: dict[str, Any]) -> None:
    """Before anything looks at what is there."""
    node = {TAG: "view", "t": 0, "d": "float32", **view}
    entry = TensorEntry("x", "float32", (4,), ())
    with pytest.raises(FormatError, match="view"):
        tree_match({"x": node}, {"x": zeros(*view["s"])}, entry)


def test_equal_keys_of_a_manifest_are_refused() -> None:
    """One of the two would be taken for what a target has, without a word."""
    node = {TAG: "dict", "v": [[1, 5], [1, 6]]}
    with pytest.raises(FormatError, match="two equal keys in the dict at 'x'"):
        tree_match({"x": node}, {"x": {1: 0}})


def test_a_key_that_no_text_file_can_hold_is_found() -> None:
    """Half of a pair of surrogates is kept as its bytes."""
    match, result = matched({"\ud800": 1, "é": 2}, {"\ud800": 0, "é": 0})
    assert match.agrees
    assert result == {"\ud800": 1, "é": 2}


def test_a_number_takes_its_digits_where_nobody_else_does() -> None:
    """Other programs store an optimizer's numbers as strings; here, both may be keys."""
    match, result = matched({"5": "text"}, {5: ""})
    assert match.agrees
    assert result == {5: "text"}
    match, result = matched({"5": "text"}, {5: "", "5": ""})
    assert match.missing == ["5"]
    assert result == {5: "", "5": "text"}


@pytest.mark.parametrize("key", [True, 1.0, b"1", None])
def test_what_is_no_number_takes_no_digits(key: Any) -> None:
    """Though it is equal to a number."""
    assert match_of({"1": "text"}, {key: ""}).missing


def test_a_dataclass_takes_no_dict_of_other_keys() -> None:
    """Some of which are names."""
    match = match_of({"p": {"x": 1, "y": 2, 3: 4}}, {"p": Settings(1, zeros(2))})
    assert match.mismatched


class Named(NamedTuple):
    """Fields, two of them."""

    a: Any
    b: Any


@pytest.mark.parametrize(
    ("item", "is_alone", "is_placed"),
    [
        (5, False, False),
        ("text", False, False),
        (zeros(1), True, True),
        (np.zeros(1), True, True),
        (PerRank(5), True, True),
        (Shard(zeros(1), (2,), (0,)), True, True),
        ({}, False, True),
        ({"a": {"b": 1}}, False, True),
        ({"a": 1, "b": {"c": zeros(1)}}, True, True),
        ([], False, False),
        ([[1], {}], False, True),
        ([1, [zeros(1)]], True, True),
        ((), False, False),
        ((1, {}), False, True),
        ((1, zeros(1)), True, True),
        (Named(1, [2]), False, True),
        (Named(1, [zeros(1)]), True, True),
        (Point(1, 2), False, True),
        (Settings(1, [2]), False, True),
        (Settings(1, [zeros(1)]), True, True),
        (Settings, False, False),
    ],
    ids=repr,
)
def test_what_of_a_list_is_filled(item: Any, *, is_alone: bool, is_placed: bool) -> None:
    """Tensors, at any depth; and what somebody may have, where each item has its place."""
    assert is_filled(item, by_place=False) == is_alone
    assert is_filled(item, by_place=True) == is_placed


def test_what_comes_behind_an_object_is_made_on_the_device() -> None:
    """The tensors that an object is given alone are made in the host's memory."""
    weight = zeros(2)
    saved = {"a": weight + 1, "opt": {"step": zeros(1), "n": {"m": zeros(3)}}, "b": weight + 2}

    class Taking:
        def state_dict(self) -> dict[str, Any]:
            return {"step": None, "n": Taking.Inner()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            vars(self).update(state)

        class Inner:
            def state_dict(self) -> dict[str, Any]:
                return {"m": None}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                vars(self).update(state)

    target = {"a": None, "opt": Taking(), "b": None}
    match = match_of(saved, target, device=torch.device("cuda"))
    names = [s.name for s in flatten(saved).specs]
    assert {names[index] for index in match.fresh} == set(names)
    assert {names[index] for index in match.on_host} == {"opt.step", "opt.n.m"}


def test_new_keys_of_any_kind_are_taken() -> None:
    """Some of them plain, others not."""
    saved = {"d": {"a": 1, (1, 2): 2, b"x": 3}}
    match, result = matched(saved, {"d": None})
    assert match.agrees
    assert result == saved
    match, result = matched({"d": [{"a": 1, (1, 2): 2}]}, {"d": [{}]})
    assert result == {"d": [{"a": 1, (1, 2): 2}]}


class Custom(torch.nn.Linear):
    """A module that gives its state in its own way, so that nobody knows what is in it."""

    def state_dict(self, **options: Any) -> Any:
        return {"only": super().state_dict(**options)}


def net_of(part: torch.nn.Module) -> torch.nn.Module:
    """Give a module of two levels, with a part of it that is absent."""
    net = torch.nn.Sequential()
    net.inner = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), part)
    net.last = torch.nn.Linear(2, 2)
    net.register_module("absent", None)
    net.register_buffer("scratch", zeros(1), persistent=False)
    return net


@pytest.mark.parametrize(
    ("part", "select", "missing"),
    [
        (torch.nn.ReLU(), "net.*", ["inner.0.weight", "last.weight", "last.bias"]),
        (torch.nn.Linear(1, 1), "*bias", ["inner.1.bias", "last.bias"]),
        (torch.nn.Linear(1, 1), "net", [""]),
        (Custom(1, 1), "*bias", ["inner.1.bias", "last.bias"]),
    ],
)
def test_what_is_selected_of_a_module_that_is_absent_is_missing(
    part: torch.nn.Module, select: str, missing: list[str]
) -> None:
    """Its parameters, at any depth; not those that it does not have, or does not store."""
    match = match_of({"x": 1}, {"x": 0, "net": net_of(part)}, [select])
    assert match.missing == [f"net.{name}".rstrip(".") for name in missing]


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        (net_of(torch.nn.ReLU()), []),
        (torch.nn.ReLU(), ["net"]),
        (net_of(Custom(1, 1)), ["net"]),
    ],
)
def test_the_name_of_an_absent_module_says_nothing_of_what_is_in_it(
    module: torch.nn.Module, missing: list[str]
) -> None:
    """Unless it has nothing, or nobody knows what."""
    match = match_of({"x": 1}, {"x": 0, "net": module}, lambda name: name == "net")
    assert match.missing == missing
