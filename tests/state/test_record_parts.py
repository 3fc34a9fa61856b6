"""Parts in dataclasses and named tuples that an object has."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from ckptio import TargetError
from tests.state.objects import loaded, net_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass
class Nets:
    model: Any
    step: int = 0


@dataclass(frozen=True)
class Frozen:
    model: Any
    step: int = 0


@dataclass(slots=True)
class Slotted:
    model: Any
    step: int = 0


class Named(NamedTuple):
    model: Any
    step: int = 0


class Trainer:
    """It gives what it has, and takes what it is given."""

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


class Filling(Trainer):
    """One that writes to the record that it has."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.nets.model = state["nets"].model


RECORDS: list[Callable[..., Any]] = [Nets, Frozen, Slotted, Named]
HELD: dict[str, Callable[[Any], Any]] = {
    "itself": lambda nets: nets,
    "in a list": lambda nets: [nets],
    "in a tuple": lambda nets: (nets,),
    "in a record": Nets,
    "in another object": Trainer,
}


@pytest.mark.parametrize("kind", [Trainer, Copying])
@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
@pytest.mark.parametrize("record", RECORDS)
def test_a_part_in_a_record_is_not_lost_to_its_state(
    tmp_path: Path,
    record: Callable[..., Any],
    held: Callable[[Any], Any],
    kind: type[Trainer],
) -> None:
    """It was a dict there, kept the weights that it had elsewhere, and nothing said so."""
    net = net_of(0)
    own = record(net)
    nets = held(own)
    target = kind(nets)
    with pytest.raises(TargetError, match=r"^'x\.nets\..*model' has a state where there was an"):
        loaded(tmp_path, {"x": kind(held(record(net_of(1), 3)))}, {"x": target})
    assert target.nets is nets
    assert own.model is net


@pytest.mark.parametrize("record", [Nets, Slotted])
def test_a_record_that_was_written_to_has_its_part_again(
    tmp_path: Path, record: Callable[..., Any]
) -> None:
    """Others may have the record."""
    net = net_of(0)
    nets = record([net], 1)
    before = nets.model
    target = Filling(nets)
    with pytest.raises(TargetError, match=r"'x\.nets\.model\.0' has a state"):
        loaded(tmp_path, {"x": Filling(record([net_of(1)]))}, {"x": target})
    assert target.nets is nets
    assert nets.model is before
    assert before == [net]


def test_a_part_that_is_handed_its_state_takes_it(tmp_path: Path) -> None:
    """So does one that the object makes anew, and one that is not there yet stays away."""

    class Handing(Trainer):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.nets.model.load_state_dict(state["nets"].model)

    class Making(Trainer):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.nets = Nets(net_of(7))
            self.nets.model.load_state_dict(state["nets"].model)

    kinds: list[type[Trainer]] = [Handing, Making]
    for kind in kinds:
        target = kind(Nets(net_of(0)))
        result = loaded(tmp_path, {"x": kind(Nets(net_of(1)))}, {"x": target}, strict="raise")
        assert result.report.notes == ()
        assert target.nets.model.weight.eq(1).all()
    emptied = Trainer(Nets(net_of(0)))
    loaded(tmp_path, {"x": Trainer(Nets(None))}, {"x": emptied})
    assert emptied.nets.model is None


def test_of_who_gives_no_part_that_is_noted(tmp_path: Path) -> None:
    """What was given may be all that it keeps."""

    class Stating(Trainer):
        def state_dict(self) -> dict[str, Any]:
            return {"model": self.nets.model.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.nets.model = state["model"]

    target = Stating(Nets(net_of(0)))
    result = loaded(tmp_path, {"x": Stating(Nets(net_of(1)))}, {"x": target}, strict="raise")
    (note,) = result.report.notes
    assert note.startswith("x.nets.model: has a state where there was an object that takes it")


def test_records_that_refer_to_each_other_end(tmp_path: Path) -> None:
    """Nor is a record asked for anything but its fields."""

    @dataclass
    class Linked:
        model: Any = None
        others: list[Any] = field(default_factory=list)

        def __len__(self) -> int:
            raise RuntimeError("no")

        @property
        def best(self) -> Any:
            raise RuntimeError("no")

    class Stating(Trainer):
        def state_dict(self) -> dict[str, Any]:
            return {"model": self.nets[0].model.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.nets[0].model.load_state_dict(state["model"])

    def nets_of(value: float) -> list[Linked]:
        nets = [Linked() for _ in range(300)]
        for each in nets:
            each.others = nets
        nets[0].model = net_of(value)
        return nets

    target = Stating(nets_of(0))
    loaded(tmp_path, {"x": Stating(nets_of(1))}, {"x": target}, strict="raise")
    assert target.nets[0].model.weight.eq(1).all()


@pytest.mark.parametrize("kind", [list, dict])
def test_a_container_that_was_written_to_holds_its_records_again(
    tmp_path: Path, kind: type[Any]
) -> None:
    """The very one: others may have it."""

    class Updating(Trainer):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if isinstance(self.nets, dict):
                self.nets.update(state["nets"])
            else:
                self.nets.clear()
                self.nets.extend(state["nets"])

    def held(record: Nets) -> Any:
        return {"a": record} if kind is dict else kind([record])

    record, net = Nets(net_of(0)), net_of(0)
    record.model = net
    target = Updating(held(record))
    nets = target.nets
    with pytest.raises(TargetError, match=r"'x\.nets\.(a|0)\.model' has a state"):
        loaded(tmp_path, {"x": Updating(held(Nets(net_of(1))))}, {"x": target})
    assert target.nets is nets
    assert nets == held(record)
    assert record.model is net


def test_a_long_history_hides_no_parts(tmp_path: Path) -> None:
    """What holds nothing is not counted."""

    class Logging(Trainer):
        def __init__(self, nets: Any) -> None:
            self.history = {str(i): [0.5] * 1000 for i in range(20)}
            super().__init__(nets)

    target = Logging(Nets(net_of(0)))
    with pytest.raises(TargetError, match=r"'x\.nets\.model' has a state"):
        loaded(tmp_path, {"x": Logging(Nets(net_of(1)))}, {"x": target})


def test_a_state_in_the_place_of_one_that_it_gives_as_a_state_is_its_own(tmp_path: Path) -> None:
    """Though it gives another of that class itself."""

    class Best(Trainer):
        def __init__(self, nets: Any) -> None:
            self.model = net_of(0)
            super().__init__(nets)

        def state_dict(self) -> dict[str, Any]:
            return {"model": self.model, "best": self.nets.model.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.model = state["model"]
            self.nets = Nets(state["best"])

    target = Best(Nets(net_of(0)))
    result = loaded(tmp_path, {"x": Best(Nets(net_of(1)))}, {"x": target})
    assert any("x.nets.model: has a state" in note for note in result.report.notes)


def test_a_named_tuple_that_became_a_dict_is_told(tmp_path: Path) -> None:
    """As a dataclass is."""

    class Plain(Trainer):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.nets = state["nets"]._asdict()

    target = Plain(Named(net_of(0)))
    with pytest.raises(TargetError, match=r"'x\.nets\.model' has a state"):
        loaded(tmp_path, {"x": Plain(Named(net_of(1)))}, {"x": target})


def test_a_slot_without_a_value_has_no_part(tmp_path: Path) -> None:
    class Slots(Trainer):
        __slots__ = ("unset",)

    target = Slots(Nets(None))
    loaded(tmp_path, {"x": Slots(Nets(7))}, {"x": target})
    assert target.nets.model == 7


def test_records_in_a_long_row_and_odd_classes_end_no_load(tmp_path: Path) -> None:
    """They hold no parts that anybody finds."""

    @dataclass
    class Node:
        env: Any
        below: Any = None

    class Raising(tuple[Any, ...]):
        __slots__ = ()
        _fields = ("a",)

        def __iter__(self) -> Any:
            raise RuntimeError("no")

    class Fielded:
        __dataclass_fields__ = 1

    @dataclass
    class Closed:
        env: Any

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("no")

    class Stating(Trainer):
        def __init__(self, nets: Any) -> None:
            self.odd = [Raising((1,)), Fielded(), Closed(1)]
            self.chain: Any = None
            for _ in range(3000):
                self.chain = Node(self.odd, self.chain)
            super().__init__(nets)

        def state_dict(self) -> dict[str, Any]:
            return {"model": self.nets.model.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.nets.model.load_state_dict(state["model"])

    target = Stating(Nets(net_of(0)))
    loaded(tmp_path, {"x": Stating(Nets(net_of(1)))}, {"x": target}, strict="raise")
    assert target.nets.model.weight.eq(1).all()
