"""Parts in dataclasses and named tuples that an object has."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from ckptio import TargetError, sync
from tests.rig import SMALL
from tests.state.objects import loaded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass
class Nets:
    model: Any
    best: Any = None
    step: int = 0


@dataclass(frozen=True)
class Frozen:
    model: Any
    best: Any = None
    step: int = 0


@dataclass(slots=True)
class Slotted:
    model: Any
    best: Any = None
    step: int = 0


class Named(NamedTuple):
    model: Any
    best: Any = None
    step: int = 0


class Trainer:
    """It gives what it has, and takes what it is given."""

    nets: Any

    def __init__(self, nets: Any) -> None:
        self.nets = nets

    def state_dict(self) -> dict[str, Any]:
        return {"nets": self.nets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.nets = state["nets"]


class Copying(Trainer):
    """One that gives copies."""

    def state_dict(self) -> dict[str, Any]:
        return {"nets": copy.deepcopy(self.nets)}


class Setting(Trainer):
    """One that makes a record of its own."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.nets = copy.copy(state["nets"])


RECORDS: list[Callable[..., Any]] = [Nets, Frozen, Slotted, Named]
HELD: dict[str, Callable[[Any], Any]] = {
    "itself": lambda nets: nets,
    "in a list": lambda nets: [nets],
    "in a record": Nets,
}


def net_of(value: float) -> torch.nn.Linear:
    net = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(net.weight, value)
    return net


def record_in(trainer: Trainer) -> Any:
    nets = trainer.nets
    return nets[0] if type(nets) is list else nets if hasattr(nets.model, "weight") else nets.model


@pytest.mark.parametrize("kind", [Trainer, Copying, Setting])
@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
@pytest.mark.parametrize("record", RECORDS)
def test_parts_in_records_stay(
    tmp_path: Path,
    record: Callable[..., Any],
    held: Callable[[Any], Any],
    kind: type[Trainer],
) -> None:
    """They were states there, and nothing said so."""
    saved = kind(held(record(net_of(1), net_of(2), 3)))
    model, best = net_of(0), net_of(0)
    target = kind(held(record(model, best)))
    result = loaded(tmp_path, {"x": saved}, {"x": target}, strict="raise")
    assert result.report.notes == ()
    nets = record_in(target)
    assert type(nets) is record
    assert (nets.model, nets.best, nets.step) == (model, best, 3)
    assert [net.weight[0, 0].item() for net in (model, best)] == [1, 2]


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
@pytest.mark.parametrize("record", RECORDS)
def test_a_part_in_a_record_takes_no_two_states(
    tmp_path: Path, record: Callable[..., Any], held: Callable[[Any], Any]
) -> None:
    """Neither in two of its fields, nor where the target has it, too."""
    saved = Trainer(held(record(net_of(1), net_of(2))))
    sync.save({"model": net_of(3), "x": saved}, tmp_path / "c", config=SMALL)
    both = net_of(0)
    nets = record(both, both)
    target = Trainer(held(nets))
    with pytest.raises(TargetError, match=r"best' is one object with '.*model' in the target and"):
        sync.load(tmp_path / "c", {"x": target}, select="x", config=SMALL)
    assert record_in(target) is nets
    assert (nets.model, nets.best) == (both, both)
    target = Trainer(held(record(both, net_of(0))))
    with pytest.raises(TargetError, match=r"model' is one object with 'model' in the target and"):
        sync.load(tmp_path / "c", {"model": both, "x": target}, config=SMALL)


class Filling(Trainer):
    """One that writes to the record that it has."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.nets.model, self.nets.best = state["nets"].model, state["nets"].best


@pytest.mark.parametrize("record", [Nets, Slotted])
def test_a_record_of_parts_stays_the_very_one(tmp_path: Path, record: Callable[..., Any]) -> None:
    """Others may have it."""
    saved, nets = Filling(record(net_of(1), net_of(2))), record(net_of(0), net_of(0))
    target, parts = Filling(nets), (nets.model, nets.best)
    loaded(tmp_path, {"x": saved}, {"x": target}, strict="raise")
    assert target.nets is nets
    assert (nets.model, nets.best) == parts
    assert nets.best.weight.eq(2).all()
    nets.best = nets.model
    with pytest.raises(TargetError, match="is one object with"):
        loaded(tmp_path, {"x": saved}, {"x": target}, strict="raise")
    assert target.nets is nets
    assert (nets.model, nets.best) == (parts[0], parts[0])


def test_a_record_is_asked_for_nothing_but_its_fields(tmp_path: Path) -> None:
    """What it has beside them, and how long it says it is, does not matter."""

    @dataclass
    class Odd:
        model: Any

        def __len__(self) -> int:
            raise RuntimeError("no")

        def __bool__(self) -> bool:
            raise RuntimeError("no")

        @property
        def best(self) -> Any:
            raise RuntimeError("no")

    class Stating(Trainer):
        def state_dict(self) -> dict[str, Any]:
            return {"model": self.nets.model.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.nets.model.load_state_dict(state["model"])

    target, saved = Stating(Odd(net_of(0))), Stating(Odd(net_of(1)))
    loaded(tmp_path, {"x": saved}, {"x": target}, strict="raise")
    assert target.nets.model.weight.eq(1).all()
