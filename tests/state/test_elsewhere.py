"""Parts of an object that are at another place of the target, too."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import TargetError, sync
from ckptio.format.encode import TAG
from ckptio.layout import Box
from ckptio.state.elsewhere import Elsewhere
from ckptio.state.fills import Blank, Fill
from ckptio.state.sharded import Block
from tests.rig import SMALL
from tests.state.objects import Loader, hook_before, loaded, net_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckptio.format.encode import Json
    from ckptio.state.tree import Predicate


class Stopper:
    """Early stopping: it gives its best model, and takes what it is given."""

    best: Any

    def __init__(self, best: Any) -> None:
        self.best = best

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "score": torch.ones(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class Copying(Stopper):
    """One that gives a copy of it."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(super().state_dict())


class Remaking(Stopper):
    """One that makes a state of its own of that which it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = dict(state["best"])


class Stating(Stopper):
    """One that gives the state, and hands it on."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best.load_state_dict(state["best"])


def hooked_of(value: float) -> torch.nn.Module:
    return hook_before(net_of(value))


def optimizer_of(value: float) -> torch.optim.Optimizer:
    net = net_of(value)
    optimizer = torch.optim.SGD(net.parameters(), value, momentum=0.5)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


PARTS: dict[str, Callable[[int], Any]] = {
    "module": net_of,
    "module with a hook": hooked_of,
    "optimizer": optimizer_of,
    "object": Loader,
}
BESIDE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda part: part,
    "in another object": Stopper,
    "in a list": lambda part: [part],
}
ORDERS = [("x", "stop"), ("stop", "x")]


def values_in(part: Any) -> Any:
    """Give what differs between parts of different values."""
    if isinstance(part, torch.optim.Optimizer):
        return part.param_groups[0]["lr"]
    return part.at if isinstance(part, Loader) else part.weight[0, 0].item()


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("part_of", PARTS.values(), ids=PARTS)
def test_a_part_takes_no_other_state_than_it_takes_elsewhere(
    tmp_path: Path,
    part_of: Callable[[int], Any],
    beside: Callable[[Any], Any],
    order: tuple[str, str],
) -> None:
    """The best model is the model itself at the start, and has a state of its own later."""
    saved = {"x": beside(part_of(1)), "stop": Stopper(part_of(2))}
    sync.save({key: saved[key] for key in order}, tmp_path / "c", config=SMALL)
    both = part_of(5)
    stop = Stopper(both)
    target = {"x": beside(both), "stop": stop}
    with pytest.raises(TargetError, match=r"^'.*best' is one object with '.*' in the target and"):
        sync.load(tmp_path / "c", {key: target[key] for key in order}, config=SMALL)
    assert stop.best is both
    for key, value in (("x", 1), ("stop", 2)):  # either of them alone
        both = part_of(5)
        stop = Stopper(both)
        target = {"x": beside(both), "stop": stop}
        sync.load(tmp_path / "c", {k: target[k] for k in order}, select=key, config=SMALL)
        assert (stop.best, values_in(both)) == (both, value)


@pytest.mark.parametrize("kind", [Stopper, Copying, Remaking])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("part_of", PARTS.values(), ids=PARTS)
def test_a_part_that_takes_one_state_in_all_places_is_loaded(
    tmp_path: Path,
    part_of: Callable[[int], Any],
    beside: Callable[[Any], Any],
    order: tuple[str, str],
    kind: type[Stopper],
) -> None:
    """Tied as it was saved, or stored twice."""
    one, both = part_of(1), part_of(5)
    saved = {"x": beside(one), "stop": kind(one)}
    target = {"x": beside(both), "stop": (stop := kind(both))}
    result = loaded(
        tmp_path,
        {key: saved[key] for key in order},
        {key: target[key] for key in order},
        strict="raise",
    )
    assert result.report.notes == ()
    assert (stop.best, values_in(both)) == (both, 1)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("kind", [Stating, torch.nn.Module.state_dict], ids=["handed", "a dict"])
def test_tensors_of_a_part_take_one_state(
    tmp_path: Path, kind: Callable[[Any], Any], order: tuple[str, str], *, is_same: bool
) -> None:
    """Whoever has them in the target: a dict, or an object that hands on its own."""
    one, both = net_of(1), net_of(5)
    saved = {"x": kind(one), "stop": Copying(one if is_same else net_of(2))}
    sync.save({key: saved[key] for key in order}, tmp_path / "c", config=SMALL)
    target = {"x": kind(both), "stop": (stop := Stopper(both))}
    target = {key: target[key] for key in order}
    if is_same:
        sync.load(tmp_path / "c", target, config=SMALL)
        assert both.weight.eq(1).all()
    else:
        with pytest.raises(TargetError, match=r"^'stop\.best' is one object with 'x\..*weight' in"):
            sync.load(tmp_path / "c", target, config=SMALL)
    assert stop.best is both


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_copies_are_told_as_they_are_stored(tmp_path: Path, order: tuple[str, str]) -> None:
    """The target has another precision, and some names are not loaded."""
    one, both = net_of(1 / 3), net_of(5).bfloat16()
    saved = {"x": one, "stop": Copying(one)}
    sync.save({key: saved[key] for key in order}, tmp_path / "c", config=SMALL)
    torch.nn.init.ones_(one.bias)
    target = {"x": both, "stop": Stopper(both)}
    sync.load(
        tmp_path / "c",
        {key: target[key] for key in order},
        select="*weight",
        dtype=torch.bfloat16,
        config=SMALL,
    )
    assert torch.equal(both.weight, one.weight.bfloat16())


class Average:
    """Averaged weights, which copy themselves to their model when they are loaded."""

    def __init__(self, model: torch.nn.Linear, value: float) -> None:
        self.model, self.mean = model, torch.full((2, 2), value)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.weight.data.copy_(state["mean"])


@pytest.mark.parametrize("kind", [Stopper, Copying])
def test_what_was_written_to_by_others_since_is_as_it_was_stored(
    tmp_path: Path, kind: type[Stopper]
) -> None:
    """Who comes last writes last, as with torch."""
    one, both = net_of(1), net_of(5)
    saved = {"x": one, "mean": Average(one, 3), "stop": kind(one)}
    target = {"x": both, "mean": Average(both, 3), "stop": kind(both)}
    loaded(tmp_path, saved, target, strict="raise")
    assert both.weight.eq(1).all()


def test_a_second_state_of_who_is_not_asked_stays_a_dict(tmp_path: Path) -> None:
    """It may give states, and know what to do with them; a note says so."""

    class Keeping(Loader):
        def __init__(self, best: Any) -> None:
            self.best = best

        def state_dict(self) -> dict[str, Any]:
            return {"best": self.best}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.best = state["best"]

    both = Loader()
    saved, kept = {"x": Loader(1), "k": Keeping(Loader(2))}, Keeping(both)
    result = loaded(tmp_path, saved, {"x": both, "k": kept}, strict="raise")
    assert (both.at, kept.best) == (1, {"at": 2})
    (note,) = result.report.notes
    assert note.startswith("k.best: is one object with 'x' in the target and another in")


def elsewhere_of(
    *fills: Fill, keep: Predicate | None = None, written: Sequence[torch.Tensor] = ()
) -> Elsewhere:
    def changed(tensor: torch.Tensor) -> bool:
        return any(tensor.data_ptr() == each.data_ptr() for each in written)

    return Elsewhere(list(fills), keep, changed)


def are_same(one: Json, other: Json, keep: Predicate | None = None, *fills: Fill) -> bool:
    """Whether an object that takes both takes one state."""
    elsewhere = elsewhere_of(*fills, keep=keep)
    stored = []
    for fqn, node in (("a", one), ("b", other)):
        part = object()
        elsewhere.note(fqn, part, node)
        found = elsewhere.other(part)
        assert found is not None
        assert (found.fqn, found.place) == (fqn, fqn)
        stored.append(found)
    first, second = stored
    is_same = elsewhere.is_same(first, second, {})
    assert elsewhere.is_same(second, first, {}) == is_same
    return is_same


def pairs(tag: str, *items: Json) -> Json:
    return {TAG: tag, "v": [*items]}


@pytest.mark.parametrize(
    ("one", "other", "is_whole_same", "is_part_same"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True, True),
        ({"a": 1}, {"a": 2}, False, False),
        ({"a": 1, "b": 2}, {"a": 1}, True, True),
        ({"a": 1, "b": 2}, {"a": 3}, False, False),
        ({"a": 1}, {"b": 1}, True, True),
        ({"a": None}, {"a": 1}, False, True),
        ({"s": {"a": 1, "b": 2}}, {"s": {"a": 1}}, False, True),
        ({"s": {"a": 1, "b": 2}}, {"s": {"a": 2}}, False, False),
        ({"s": {"t": 1}}, {"s": {"t": 2}}, False, False),
        (pairs("odict", ["a", 1]), {"a": 1, "b": 2}, True, True),
        ({"s": pairs("odict", ["a", 1])}, {"s": {"a": 1}}, False, True),
        ({"l": [1, 2]}, {"l": [1, 2, 3]}, False, False),
        ({"l": [1, None]}, {"l": [1, 2]}, False, True),
        ({"l": [{"a": 1}]}, {"l": [{"b": 1}]}, False, True),
        ({"l": [1]}, {"l": {"0": 1}}, False, False),
        ({"l": ["a"]}, {"l": {"a": 1}}, False, False),
        ({"l": pairs("tuple", 1, 2)}, {"l": pairs("tuple", 1)}, False, False),
        ([1], {"0": 1}, False, False),
        ([1], [1, 2], False, False),
        ([1, None], [1, 2], False, True),
        (5, 6, False, False),
    ],
)
def test_what_two_states_have_in_common_is_compared(
    one: Json, other: Json, *, is_whole_same: bool, is_part_same: bool
) -> None:
    """What one of them has alone contradicts nothing: its names, and any where some are left."""
    assert are_same(one, other) == is_whole_same
    assert are_same(one, other, lambda _: True) == is_part_same


def test_what_is_not_loaded_is_not_compared() -> None:
    """Neither are two of which one is left out."""
    one, other = {"x": 1, "y": 2}, {"x": 1, "y": 3}
    assert not are_same(one, other, lambda name: name in ("a.y", "b.y"))
    assert are_same(one, other, lambda name: name in ("a.x", "b.x"))
    assert are_same(one, other, lambda name: name.startswith("a"))
    assert are_same(one, other, lambda name: name.startswith("b"))


@pytest.mark.parametrize("tag", [None, "view", "np", "bytes"])
@pytest.mark.parametrize("depth", [0, 1])
def test_tensors_of_two_states_are_compared_as_they_are(tag: str | None, depth: int) -> None:
    """Whichever they are stored as, and whatever they are part of."""
    tensors = torch.zeros(2), torch.zeros(2), torch.ones(2)
    if tag is None:
        nodes: list[Any] = [{TAG: index} for index in range(3)]
    else:
        nodes = [
            {TAG: tag, "t": index, "d": "float32", "s": [2], "r": [1], "o": 0} for index in range(3)
        ]
    views = nodes if tag == "view" else [None] * 3
    fills = [Fill(i, t, f"t{i}", views[i]) for i, t in enumerate(tensors)]
    states: list[Any] = [{"w": {"in": node} if depth else node} for node in nodes]
    assert are_same(states[0], states[0], None, *fills)
    assert are_same(states[0], states[1], None, *fills)
    assert not are_same(states[0], states[2], None, *fills)
    if tag == "np":
        bits = {"w": {**nodes[1], "d": "int32"}}
        assert not are_same({"w": nodes[0]}, bits, None, *fills)


class Holding:
    """What is no module may give tensors as well."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


class Failing(torch.nn.Linear):
    """A module that gives no state."""

    def state_dict(self, **_: Any) -> Any:
        raise ValueError


def test_a_part_whose_tensors_are_filled_elsewhere_is_named() -> None:
    """Where it would take others than those that are there."""
    part = torch.nn.Linear(2, 2)
    weight, bias = part.weight.detach(), part.bias.detach()
    fills = [Fill(0, weight, "other.weight"), Fill(1, torch.zeros(1), "own")]
    own = range(1, 2)

    def name_of(part: Any, state: Any, own: range = own, **options: Any) -> str | None:
        beside = elsewhere_of(*fills, **options).beside("x", {}, {}, own, {})
        return beside.name_of_double(part, state)

    state = {"weight": weight + 1, "bias": bias + 1}
    assert name_of(part, state) == "other.weight"
    assert name_of(part, {"weight": weight.clone(), "bias": bias + 1}) is None
    assert name_of(part, {"bias": bias + 1}) is None
    assert name_of(part, {"weight": 5}) is None
    assert name_of(part, [weight + 1]) is None
    assert name_of(part, state, range(2)) is None
    assert name_of(part, state, range(1)) is None
    assert name_of(part, state, written=[weight]) is None
    assert name_of(part, state, written=[state["weight"]]) is None
    fills[0] = Fill(0, bias, "other.bias")
    assert name_of(part, state) == "other.bias"
    fills[0] = Fill(0, weight, "other.weight")
    assert name_of(Holding({"weight": weight}), state) is None
    assert name_of(Failing(2, 2), state) is None
    part.register_buffer("rows", torch.zeros(2, 2).to_sparse())
    part.register_buffer("blank", torch.zeros(2, device="meta"))
    given = {"rows": torch.ones(2, 2), "blank": torch.ones(2)}
    assert name_of(part, given) is None
    assert name_of(part, {name: value.to_sparse() for name, value in given.items()}) is None
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    optimizer.state[part.weight] = {"momentum_buffer": weight}
    assert name_of(optimizer, {"state": {0: {"momentum_buffer": weight + 1}}}) == "other.weight"
    assert name_of(optimizer, {"state": {1: {"momentum_buffer": weight + 1}}}) is None
    assert name_of(optimizer, {"state": 5, "param_groups": {}}) is None


def test_blocks_and_what_has_no_memory_yet_are_nobody_elses() -> None:
    """What is filled of a part may be told from its memory alone where that is all of it."""
    part = torch.nn.Linear(2, 2)
    weight = part.weight.detach()
    block = Block(Box((0, 0), (1, 2)), weight, (0, 0))
    blank = Blank("blank", torch.empty(2, device="meta"), None)
    fills = [Fill(0, weight, "rows", block=block), Fill(1, blank, "blank")]
    beside = elsewhere_of(*fills).beside("x", {}, {}, range(0), {})
    assert beside.name_of_double(part, {"weight": weight + 1}) is None


def test_states_are_known_by_where_they_are_stored() -> None:
    """In lists, tuples and dicts of whatever keys, at any depth."""
    inner: dict[str, Any] = {"n": 1}
    values: dict[str, Any] = {
        "first": [5, {"n": 2}],
        "more": ({"n": 3}, {4: inner}),
        "new": {"n": 9},
    }
    tree = {
        "first": [5, {"n": 2}],
        "more": pairs("tuple", {"n": 3}, pairs("dict", [4, {"n": 1}])),
    }
    elsewhere, other = elsewhere_of(), object()
    elsewhere.note("other", other, {"n": 1})
    elsewhere.note("x", object(), tree)
    beside = elsewhere.beside("x", values, tree, range(0), {})
    parts: list[Any] = [object() for _ in range(4)]
    states: list[Any] = [values["first"][1], values["more"][0], inner, values["new"]]
    for number, (part, state) in enumerate(zip(parts, states, strict=True)):
        beside.note(f"x.at.{number}", part, state)
    found = [elsewhere.other(part) for part in parts]
    assert [each and (each.fqn, each.node, each.place) for each in found] == [
        ("x.first.1", {"n": 2}, "x.at.0"),
        ("x.more.0", {"n": 3}, "x.at.1"),
        ("x.more.1.4", {"n": 1}, "x.at.2"),
        None,
    ]
    assert beside.name_of_double(other, inner) is None
    assert beside.name_of_double(other, states[0]) == "other"
