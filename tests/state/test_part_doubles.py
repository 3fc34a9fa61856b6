"""Parts that an object has in two places, with a state of its own for each in the checkpoint."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from ckptio import TargetError, sync
from tests.rig import SMALL
from tests.state.objects import Loader, loaded, net_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Trainer:
    """An object whose state is its attributes: it gives its parts, and takes what it is given."""

    model: Any
    best: Any
    net: Any
    agent: Any
    nets: Any
    alias: Any
    parts: Any

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


HELD: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "attributes": lambda one, other: {"model": one, "best": other},
    "a list": lambda one, other: {"nets": [one, other]},
    "a tuple": lambda one, other: {"nets": (one, other)},
    "a dict": lambda one, other: {"nets": {"model": one, "best": other}},
    "parts": lambda one, other: {"model": one, "agent": Trainer(net=other)},
}


def nets_in(trainer: Any) -> list[Any]:
    """Give what stands where parts were."""
    found: list[Any] = []
    for value in vars(trainer).values():
        if isinstance(value, (list, tuple)):
            found += value
        elif isinstance(value, dict) and "weight" not in value:
            found += value.values()
        else:
            found += nets_in(value) if isinstance(value, Trainer) else [value]
    return found


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_a_part_takes_no_two_states(
    tmp_path: Path, held: Callable[[Any, Any], dict[str, Any]]
) -> None:
    """The best model is the model itself at the start, and has a state of its own later."""
    sync.save({"x": Trainer(**held(net_of(1), net_of(2)))}, tmp_path / "c", config=SMALL)
    both = net_of(0)
    target = Trainer(**held(both, both))
    with pytest.raises(TargetError, match=r"'x\..*' is one object with 'x\..*' in the target and"):
        sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert nets_in(target) == [both, both]
    assert both.weight[0, 0] != 2
    nets = [net_of(0), net_of(0)]
    apart = Trainer(**held(*nets))
    sync.load(tmp_path / "c", {"x": apart}, config=SMALL)
    assert nets_in(apart) == nets
    assert [net.weight[0, 0].item() for net in nets] == [1, 2]


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_part_of_which_both_states_are_the_same_stays_one(
    tmp_path: Path, held: Callable[[Any, Any], dict[str, Any]], *, is_tied: bool
) -> None:
    """Bit for bit: programs that keep no ties store them apart."""
    one = net_of(float("nan"))
    saved = Trainer(**held(one, one if is_tied else copy.deepcopy(one)))
    both = net_of(0)
    target = Trainer(**held(both, both))
    result = loaded(tmp_path, {"x": saved}, {"x": target}, strict="raise")
    assert result.report.notes == ()
    assert nets_in(target) == [both, both]
    assert both.weight.isnan().all()


class Filling(Trainer):
    """Puts what it is given into the lists that it has."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.nets[0][:] = state["nets"][0]
        self.nets[1].update(state["nets"][1])


class Emptying(Loader):
    """Takes what is in its state out of it, wherever that is."""

    def state_dict(self) -> dict[str, Any]:
        return {"of": {"a": [[[[self.at]]]]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["of"]["a"][0][0][0].pop()
        state["of"].clear()


def test_what_a_part_does_to_its_state_is_no_difference(tmp_path: Path) -> None:
    """The state of another place comes later, if that is in a part."""
    both = Emptying()
    saved = Trainer(model=Emptying(1), agent=Trainer(net=Emptying(1)))
    target = Trainer(model=both, agent=Trainer(net=both))
    result = loaded(tmp_path, {"x": saved}, {"x": target}, strict="raise")
    assert result.report.notes == ()
    assert target.model is target.agent.net is both
    assert both.at == 1


@pytest.mark.parametrize("kind", [Trainer, Filling])
def test_whatever_is_refused_lists_of_parts_are_the_very_ones(
    tmp_path: Path, kind: type[Trainer]
) -> None:
    """Others may have them: what has the parts in it, and each list and dict in that."""
    sync.save({"x": kind(nets=([net_of(1)], {"best": net_of(2)}))}, tmp_path / "c", config=SMALL)
    both = net_of(0)
    nets = ([both], {"best": both})
    target = kind(nets=nets, alias=nets[1])
    with pytest.raises(TargetError, match=r"'x\.nets\.1\.best' is one object with 'x\.nets\.0\.0'"):
        sync.load(tmp_path / "c", {"x": target}, select="x.nets", config=SMALL)
    assert target.nets is nets
    assert target.alias is nets[1]
    assert nets == ([both], {"best": both})


def test_one_of_two_places_of_a_part_may_be_left_out(tmp_path: Path) -> None:
    both = net_of(0)
    target, saved = Trainer(model=both, best=both), Trainer(model=net_of(1), best=net_of(2))
    result = loaded(tmp_path, {"x": saved}, {"x": target}, select="x.model", strict="raise")
    assert result.report.notes == ()
    assert nets_in(target) == [both, both]
    assert both.weight.eq(1).all()


def test_a_second_state_of_who_is_not_asked_stays_a_dict(tmp_path: Path) -> None:
    """It may give states, and know what to do with them; a note says so."""
    both = Loader()
    target, saved = Trainer(model=both, best=both), Trainer(model=Loader(1), best=Loader(2))
    result = loaded(tmp_path, {"x": saved}, {"x": target}, strict="raise")
    assert (target.model, target.best) == (both, {"at": 2})
    assert both.at == 1
    (note,) = result.report.notes
    assert note.startswith("x.best: is one object with 'x.model' in the target and another in")
    assert note.endswith("its state stays a dict")


class Renaming(Trainer):
    """Has other names in its state, and hands one of two on."""

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.model, "before": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["now"])
        self.best = state["before"]


def test_a_part_that_was_handed_its_state_under_another_name_keeps_it(tmp_path: Path) -> None:
    """Nothing says which one it was handed, but that there is one in no other place."""
    both = net_of(0)
    saved = Renaming(model=net_of(1), best=net_of(2))
    target = Renaming(model=both, best=both)
    result = loaded(tmp_path, {"x": saved}, {"x": target}, strict="raise")
    assert target.model is both
    assert both.weight.eq(1).all()
    assert target.best["weight"].eq(2).all()
    (note,) = result.report.notes
    assert note.startswith("x.best: is one object with 'x.model', which load_state_dict() handed a")


class Nested(Renaming):
    """Hands a part its state, and another part that has it."""

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "agent": self.agent.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.agent.load_state_dict(state["agent"])


@pytest.mark.parametrize("kind", [Renaming, Nested])
def test_a_part_that_was_handed_the_very_state_comes_back(
    tmp_path: Path, kind: type[Trainer]
) -> None:
    """It was one part when it was saved, too."""
    both, one = net_of(0), net_of(1)
    held = HELD["attributes" if kind is Renaming else "parts"]
    saved, target = kind(**held(one, one)), kind(**held(both, both))
    result = loaded(tmp_path, {"x": saved}, {"x": target}, strict="raise")
    assert result.report.notes == ()
    assert nets_in(target) == [both, both]
    assert both.weight.eq(1).all()


class Listing(Trainer):
    """Lists its parts by name, and has another name for one in its state, which it hands on."""

    def __init__(self, model: Any, best: Any) -> None:
        super().__init__(model=model, best=best, parts={"model": model, "best": best})

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.model, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["net"])
        self.best = state["best"]


def test_a_part_takes_the_state_of_its_name_though_one_like_it_was_handed_its_own(
    tmp_path: Path,
) -> None:
    """Two nets of one architecture have the same keys; but one is there for each state."""
    nets = [net_of(0), net_of(0)]
    saved, target = Listing(net_of(1), net_of(2)), Listing(*nets)
    result = loaded(tmp_path, {"x": saved}, {"x": target}, strict="raise")
    assert result.report.notes == ()
    assert [target.model, target.best, *target.parts.values()] == nets * 2
    assert [net.weight[0, 0].item() for net in nets] == [1, 2]


def test_a_part_that_was_handed_its_state_takes_none_of_another_name(tmp_path: Path) -> None:
    """There may be others like it, which have states of their own names."""

    class Playing(Listing):
        def __init__(self, model: Any, best: Any, other: Any) -> None:
            super().__init__(model, best)
            self.other = other

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "other": self.other}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.other.load_state_dict(state["other"])

    both, other = net_of(0), net_of(0)
    saved = Playing(net_of(1), net_of(2), net_of(3))
    target = Playing(both, both, other)
    result = loaded(tmp_path, {"x": saved}, {"x": target}, strict="raise")
    assert (target.model, target.other) == (both, other)
    assert [net.weight[0, 0].item() for net in (both, other)] == [1, 3]
    assert target.best["weight"].eq(2).all()
    assert [note.partition(":")[0] for note in result.report.notes] == ["x.best"]


class Agent(Trainer):
    """Hands its state on to its part."""

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])


def test_a_part_that_another_part_hands_its_state_is_noted(tmp_path: Path) -> None:
    """It has that one, or its own: the code of the other part ran last, or first."""
    both = net_of(0)
    for one, other, num_notes in ((1, 2, 1), (1, 1, 0)):
        saved = Trainer(model=net_of(one), agent=Agent(net=net_of(other)))
        target = Trainer(model=both, agent=Agent(net=both))
        report = loaded(tmp_path, {"x": saved}, {"x": target}, strict="raise").report
        assert len(report.notes) == num_notes
        assert all("given both" in note for note in report.notes)
        assert target.model is target.agent.net is both
