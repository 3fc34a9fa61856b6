"""Parts of an object that are at another place of the target, too."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import TargetError, sync
from tests.rig import SMALL
from tests.state.objects import Loader, hook_before, loaded, net_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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
