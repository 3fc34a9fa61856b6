"""Values that are taken as they are stored: what does not fit is an error before a change."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import zoneinfo
from collections import Counter, OrderedDict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given

import ckptio.sync
from ckptio.errors import FormatError, TargetError
from ckptio.format.ahead import made_ahead
from ckptio.format.decode import ObjectDecoder
from ckptio.format.encode import MAX_LEVELS
from ckptio.state.flatten import flatten
from ckptio.state.rebuild import Rebuilder
from tests.strategies import CLASSES, Key, Point, assert_same, states

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Mode(enum.Enum):
    TRAIN = "train"
    EVAL = "eval"


class Kind(enum.Enum):
    ONE = 1


@dataclasses.dataclass
class Rate:
    value: float
    made = 0

    def __post_init__(self) -> None:
        type(self).made += 1
        if self.value < 0:
            raise ValueError("no rate")


@dataclasses.dataclass
class Moments:
    mean: Any
    count: int = 0


class Pair(NamedTuple):
    a: Any
    b: Any


def without(member: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Take a member of the enum away, as a later version of a program may."""

    def forget(patch: pytest.MonkeyPatch) -> None:
        patch.delitem(Mode._value2member_map_, Mode[member].value)
        patch.delitem(Mode._member_map_, member)
        patch.setattr(Mode, "_member_names_", [n for n in Mode._member_names_ if n != member])

    return forget


def negative(patch: pytest.MonkeyPatch) -> None:
    """Let a class refuse what it took."""

    def refuse(self: Rate) -> None:
        raise ValueError(f"no rate: {self}")

    patch.setattr(Rate, "__post_init__", refuse)


def with_fields(*names: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Let a class have other fields."""

    def change(patch: pytest.MonkeyPatch) -> None:
        changed = dataclasses.make_dataclass("Moments", names)
        for name in ("__init__", "__dataclass_fields__"):
            patch.setattr(Moments, name, getattr(changed, name))

    return change


def nothing(_: pytest.MonkeyPatch) -> None:
    """Change nothing: what is wrong is what is passed."""


TENSOR = torch.ones(3)
CASES: dict[str, tuple[Any, Any, Callable[[pytest.MonkeyPatch], None], str]] = {
    "enum": (Mode.EVAL, Mode.TRAIN, without("EVAL"), "'x' does not fit .*Mode"),
    "beside a tensor": ({"m": Mode.EVAL, "t": TENSOR}, None, without("EVAL"), "'x.m' does not"),
    "deep beside one": (
        [(TENSOR, OrderedDict(a=Counter(b=2), m=Pair(1, {1: Mode.EVAL})))],
        None,
        without("EVAL"),
        "'x.0.1.m.b.1' does not fit",
    ),
    "in each rank's own": (
        {"r": ckptio.PerRank({"t": TENSOR, "m": Mode.EVAL})},
        None,
        without("EVAL"),
        "'x.r.m' does not fit",
    ),
    "in a record with one": (Moments(TENSOR, Mode.EVAL), None, without("EVAL"), "'x.count' does"),  # type: ignore[arg-type]  # any
    "a key beside one": ({Mode.EVAL: TENSOR}, None, without("EVAL"), "'x' does not fit .*Mode"),
    "in a list": ([Mode.EVAL], [Mode.TRAIN], without("EVAL"), "'x.0' does not fit .*Mode"),
    "equal keys": ({Kind.ONE: 1, 1: 2}, None, nothing, "equal as plain values"),
    "equal keys of tensors": ({Kind.ONE: TENSOR, 1: 2}, None, nothing, "equal as plain values"),
    "equal keys for an empty dict": ({Kind.ONE: 1, 1: 2}, {}, nothing, "equal as plain values"),
    "record": (Rate(1.0), None, negative, "'x' does not fit .*Rate.*no rate"),
    "field that is gone": (Moments(TENSOR), None, with_fields("mean"), "no field 'count'"),
    "field that is new": (
        Moments(TENSOR),
        None,
        with_fields("mean", "count", "scale"),
        "missing a required argument: 'scale'",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strict", ["raise", "report", "ignore"])
def test_a_value_that_does_not_fit_is_an_error_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, strict: Any
) -> None:
    """Whatever it is in: no tensor is filled, and no place of the target is another."""
    saved, target, change, problem = CASES[case]
    path, memory = str(tmp_path / "c"), torch.zeros(2)
    ckptio.sync.save({"w": torch.ones(2), "x": saved}, path)
    into = {"w": memory, "x": target}
    load = ckptio.sync.load_with_report if strict == "report" else ckptio.sync.load
    with monkeypatch.context() as patch:
        change(patch)
        types = [Mode, Rate, Moments, Pair]
        with pytest.raises(TargetError, match=problem):
            load(path, into=into, types=types, strict=strict)
    assert not memory.any()
    assert into["x"] is target
    assert not target or target in (Mode.TRAIN, [Mode.TRAIN])


def test_a_zone_that_this_machine_lacks_leaves_a_target_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored is well, and the error says what to do."""
    path, memory = str(tmp_path / "c"), torch.zeros(2)
    berlin = datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    ckptio.sync.save(
        {"w": torch.ones(2), "at": berlin, "utc": datetime(2024, 1, 1, tzinfo=UTC)}, path
    )
    into: dict[str, Any] = {"w": memory, "at": None, "utc": None}

    def unknown(key: str) -> zoneinfo.ZoneInfo:
        raise zoneinfo.ZoneInfoNotFoundError(key)

    monkeypatch.setattr(
        importlib.import_module("ckptio.format.decode").zoneinfo, "ZoneInfo", unknown
    )
    for target in (into, None):
        with pytest.raises(TargetError, match=r"'at' is in the time zone 'Europe/Berlin'.*tzdata"):
            ckptio.sync.load(path, into=target)
    assert not memory.any()
    ckptio.sync.load(path, into=into, select=["w", "utc"])
    assert memory.all()
    assert into["at"] is None


def test_keys_of_an_object_that_are_equal_without_their_classes_are_an_error(
    tmp_path: Path,
) -> None:
    """One of them would be lost, or put over what the object has under the other."""

    class Table:
        given: Any = None

        def __init__(self, state: dict[Any, Any]) -> None:
            self.state = state

        def state_dict(self) -> dict[Any, Any]:
            return self.state

        def load_state_dict(self, state: dict[Any, Any]) -> None:
            self.given = state

    path = str(tmp_path / "c")
    ckptio.sync.save({"x": Table({"t": TENSOR, Kind.ONE: 1, 1: 2})}, path)
    for own in ({}, {1: 0}):
        target = Table({"t": torch.zeros(3), **own})
        with pytest.raises(TargetError, match=r"keys of the dict at 'x' are equal .* types="):
            ckptio.sync.load(path, into={"x": target})
        assert target.given is None
        assert not target.state["t"].any()
        ckptio.sync.load(path, into={"x": target}, types=[Kind])
        given: Any = target.given
        assert torch.equal(given.pop("t"), TENSOR)
        assert given == {Kind.ONE: 1, 1: 2}


def test_values_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made before anything is filled is what the target gets."""
    monkeypatch.setattr(Rate, "made", 0)
    path = str(tmp_path / "c")
    ckptio.sync.save({"a": Rate(1.0), "b": {"t": TENSOR, "r": Rate(2.0)}}, path)
    Rate.made = 0
    into: dict[str, Any] = {"a": None, "b": None}
    report = ckptio.sync.load_with_report(path, into=into, types=[Rate]).report
    assert (into["a"], into["b"]["r"], Rate.made) == (Rate(1.0), Rate(2.0), 2)
    assert not report.notes


def test_a_plain_value_is_noted_once(tmp_path: Path) -> None:
    """Beside a tensor, too."""
    path = str(tmp_path / "c")
    ckptio.sync.save({"x": [{Key(1, 2): TENSOR, "m": Mode.EVAL}], "k": Mode.EVAL}, path)
    notes = ckptio.sync.load_with_report(path, into={"x": None, "k": None}).report.notes
    assert [note.partition(":")[0] for note in notes] == ["x.0", "x.0.m", "k"]


@given(state=states)
@example(state=np.arange(4, dtype="<u2")[1:2:2])
def test_what_is_made_in_two_steps_is_what_is_made_in_one(state: Any) -> None:
    """With all classes and with none: the same values, and the same notes."""
    flat = flatten(state)
    tensors = dict(enumerate(flat.sources))
    for types in (CLASSES, [Point], []):
        once, twice = Rebuilder(tensors, types), Rebuilder({}, types)
        try:
            whole = once.rebuild("", flat.tree)
        except TargetError as error:
            with pytest.raises(TargetError) as caught:
                twice.made_ahead("", flat.tree)
            assert str(caught.value) == str(error)
            continue
        node = twice.made_ahead("", flat.tree)
        twice.tensors = tensors
        assert_same(twice.rebuild("", node), whole)
        assert sorted(twice.notes) == sorted(once.notes)


def test_what_is_too_deep_is_found_before_there_are_tensors() -> None:
    """In a container with tensors as in one without."""
    node: Any = {"~": 0}
    for _ in range(MAX_LEVELS + 1):
        node = [node]
    with pytest.raises(FormatError, match="nested deeper"):
        Rebuilder({}).made_ahead("", node)


class Bound:
    """A constructor that is no function: what it takes is another's."""

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return functools.partial(fill, owner)


def fill(owner: Any, mean: Any, count: int = 0) -> None:
    owner.mean, owner.count = mean, count


def decorated(owner: Any, *values: Any, **named: Any) -> None:
    fill(owner, *values, **named)


decorated.__signature__ = "as it was once"  # type: ignore[attr-defined]  # as decorators do


@pytest.mark.parametrize("make", [Bound(), decorated], ids=["no function", "decorated"])
def test_what_a_constructor_takes_is_believed_of_plain_ones_alone(
    tmp_path: Path, make: Any
) -> None:
    """Of any other it is said when it is called."""
    kind = dataclasses.make_dataclass("Own", [("mean", Any), ("count", int, 0)])
    kind.__init__ = make  # type: ignore[misc]  # what is tested
    saved = kind(torch.ones(2), 3)
    ckptio.sync.save({"a": saved}, tmp_path / "c")
    target: dict[str, Any] = {"a": None}
    found: Any = ckptio.sync.load(tmp_path / "c", target, types=[kind])["a"]
    assert torch.equal(found.mean, saved.mean)
    assert type(found) is kind


def test_a_bad_node_among_tensors_is_a_damaged_manifest() -> None:
    """Whatever its own code would say."""
    node = {"~": "dataclass", "c": "x:Moments", "v": [["mean", {"~": 0}], 3]}
    with pytest.raises(FormatError):
        made_ahead(ObjectDecoder(lambda _, node: node), "a", node)
