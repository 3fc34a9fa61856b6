"""Targets that are dataclasses, named tuples and objects that stand for their state."""

from __future__ import annotations

import enum
import functools
import random
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import pytest
import torch

import ckptio.sync
from ckptio import PerRank
from ckptio.errors import MismatchError, TargetError, UnsupportedLeafError
from ckptio.state.records import copied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass
class Run:
    step: int = 0
    weights: Any = None
    more: Any = None


@dataclass(frozen=True)
class Frozen:
    rate: float
    weights: torch.Tensor


class Pair(NamedTuple):
    x: Any
    y: Any


class Turned(NamedTuple):
    y: Any
    x: Any


class Phase(enum.Enum):
    WARM = "warm"
    DONE = "done"


@dataclass
class Trainer:
    """Stands for its state, although its fields could be saved."""

    step: int = 0
    unsaved: Any = field(default_factory=object)

    def state_dict(self) -> dict[str, Any]:
        return {"s": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["s"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "c")


def test_a_dataclass_is_filled_in_place(path: str) -> None:
    """Whoever holds it has what was loaded: its tensors, modules and all else in it."""
    ckptio.sync.save({"run": Run(7, torch.ones(3), torch.nn.Linear(1, 1))}, path)
    run = Run(0, torch.zeros(3), torch.nn.Linear(1, 1))
    weights, module = run.weights, run.more
    target = {"run": run}
    ckptio.sync.load(path, into=target)
    assert target["run"] is run
    assert run.step == 7
    assert run.weights is weights
    assert torch.equal(weights, torch.ones(3))
    assert run.more is module
    with pytest.raises(MismatchError, match=r"run\.weights: shape"):
        ckptio.sync.load(path, into={"run": Run(0, torch.zeros(2), module)})


def test_what_is_not_selected_of_a_dataclass_stays(path: str) -> None:
    """As in a dict."""
    ckptio.sync.save({"run": Run(7, torch.ones(3))}, path)
    run = Run(1, torch.zeros(3), "more")
    ckptio.sync.load(path, into={"run": run}, select="run.step")
    assert (run.step, run.more) == (7, "more")
    assert not run.weights.any()


def test_a_frozen_dataclass_is_replaced_and_its_tensors_filled(path: str) -> None:
    """It cannot change; its tensors can."""
    ckptio.sync.save([Frozen(0.5, torch.ones(2))], path)
    mine = Frozen(0.1, torch.zeros(2))
    target = [mine]
    ckptio.sync.load(path, into=target)
    (found,) = target
    assert found.rate == 0.5
    assert found.weights is mine.weights
    assert torch.equal(mine.weights, torch.ones(2))
    assert mine.rate == 0.1


@dataclass(frozen=True)
class Sized:
    width: int

    @functools.cached_property
    def area(self) -> int:
        """Give what follows from a field."""
        return self.width**2


def test_what_a_frozen_dataclass_has_computed_goes_with_its_fields(path: str) -> None:
    """The one that takes its place computes it again."""
    ckptio.sync.save([Sized(5)], path)
    mine = Sized(2)
    assert mine.area == 4
    target = [mine]
    ckptio.sync.load(path, into=target)
    assert (target[0].area, mine.area) == (25, 4)


def test_fields_go_by_their_names(path: str) -> None:
    """In any order; those that are there on one side alone are named."""
    ckptio.sync.save({"p": Pair(1, 2), "r": Run(1)}, path)
    assert ckptio.sync.load(path, into={"p": Turned(0, 0)}, select="p")["p"] == Turned(y=2, x=1)
    with pytest.raises(MismatchError) as caught:
        ckptio.sync.load(path, into={"p": Pair(0, 0), "r": Frozen(0.5, torch.zeros(1))})
    assert caught.value.missing == ("r.rate",)
    assert caught.value.unexpected == ("r.step", "r.more")


def test_a_value_for_each_rank_in_a_dataclass_stays_one(path: str) -> None:
    """Its wrapper is the caller's."""
    ckptio.sync.save({"run": Run(1, PerRank(torch.ones(2)))}, path)
    own = PerRank(torch.zeros(2))
    run = Run(0, own)
    ckptio.sync.load(path, into={"run": run})
    assert run.weights is own
    assert torch.equal(own.value, torch.ones(2))


def test_a_dataclass_that_stands_for_its_state_does_so(path: str) -> None:
    """Saved and loaded alike, whatever else it is."""
    ckptio.sync.save({"t": Trainer(5)}, path)
    assert ckptio.sync.load(path) == {"t": {"s": 5}}
    trainer = Trainer()
    ckptio.sync.load(path, into={"t": trainer})
    assert trainer.step == 5


def test_classes_in_keys_sets_and_enums_of_a_target_come_back(path: str) -> None:
    """Nobody needs types= for them."""
    state = {"s": {Phase.DONE}, "d": {Phase.WARM: 1}, "n": Counter(a=5), "z": torch.Size([1, 2])}
    ckptio.sync.save(state, path)
    target = {"s": {Phase.WARM}, "d": {Phase.WARM: 0}, "n": Counter(a=1), "z": torch.Size([3])}
    result = ckptio.sync.load_with_report(path, into=target)
    assert target == state
    assert not result.report.notes


class Text(enum.Enum):
    LONG = b"x" * 5000


def test_an_enum_of_long_bytes_comes_back(path: str) -> None:
    """Though its value is a tensor in the checkpoint."""
    ckptio.sync.save({"x": Text.LONG, "y": 1}, path)
    assert ckptio.sync.load(path, select="x", types=[Text]) == {"x": Text.LONG}
    target = {"x": Text.LONG, "y": 0}
    ckptio.sync.load(path, into=target)
    assert target == {"x": Text.LONG, "y": 1}


@dataclass
class Rows(list[int]):
    name: str = ""


@dataclass
class Waiting(deque[int]):
    name: str = ""


@dataclass
class Output(dict[str, Any]):
    """As transformers' outputs are: what it holds are its fields."""

    loss: float = 0.0

    def __post_init__(self) -> None:
        self["loss"] = self.loss


def test_a_dataclass_that_is_a_container_holds_its_fields_or_is_refused(path: str) -> None:
    """What it holds beside them would not come back."""
    ckptio.sync.save([Output(0.5), Rows("empty")], path)
    output, rows = ckptio.sync.load(path, types=[Output, Rows])
    assert (output, output.loss, rows.name) == ({"loss": 0.5}, 0.5, "empty")
    more, numbers = Output(0.5), Rows("full")
    more["seen"] = 1
    numbers.append(1)
    other, waiting = Output(0.5), Waiting("full")
    other["loss"] = 0.25
    waiting.append(1)
    held = ((more, "Output"), (other, "Output"), (numbers, "Rows"), (waiting, "Waiting"))
    for value, name in held:
        with pytest.raises(UnsupportedLeafError, match=f"type {name} that holds more than its"):
            ckptio.sync.save({"x": value}, path, overwrite=True)


class Named(Pair):
    """A named tuple with attributes."""


@pytest.mark.parametrize("make", [Run, lambda: Named(1, 2)], ids=["class", "tuple"])
@pytest.mark.parametrize(
    "more",
    [
        torch.ones(2),
        [{"w": torch.ones(2)}],
        torch.nn.Linear(1, 1),
        np.random.default_rng(0),
        torch.Generator(),
        random.Random(0),
        [Pair(1, torch.ones(1))],
    ],
    ids=lambda more: type(more).__name__,
)
def test_a_record_with_state_that_is_no_field_is_refused(
    path: str, make: Callable[[], Any], more: Any
) -> None:
    """It would not come back; but what follows from the fields may be left out."""
    record = make()
    record.size = 3
    record.around = [record]
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    record.deep = deep
    ckptio.sync.save({"x": record}, path)
    record.shadow = more
    with pytest.raises(UnsupportedLeafError, match="'shadow' is no field"):
        ckptio.sync.save({"x": record}, path, overwrite=True)


@dataclass
class Cached:
    w: torch.Tensor

    @functools.cached_property
    def double(self) -> torch.Tensor:
        """Give what follows from a field."""
        return 2 * self.w


def test_what_a_property_keeps_is_no_state(path: str) -> None:
    cached = Cached(torch.ones(2))
    assert cached.double.sum() == 4
    ckptio.sync.save(cached, path)


def test_what_a_property_keeps_of_what_was_before_goes(path: str) -> None:
    """It is made again of what was loaded."""
    ckptio.sync.save(Cached(torch.full((2,), 3.0)), path)
    target = Cached(None)  # type: ignore[arg-type]  # nothing yet
    target.__dict__["double"] = None
    ckptio.sync.load(path, into=target)
    assert target.double.tolist() == [6, 6]


@dataclass
class Ordered(OrderedDict[str, Any]):
    """Has its fields as items, too, but for those that are None."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


@pytest.mark.parametrize("saved", [Ordered(1.0, 2), {"loss": 1.0, "logits": 2}], ids=type)
def test_a_dataclass_that_is_a_dict_is_filled_as_both(saved: Any, path: str) -> None:
    """Its items are in the order of the fields, by which transformers' outputs are indexed."""
    ckptio.sync.save({"x": saved}, path)
    for target in (Ordered(0.0), Ordered(None, 0)):
        ckptio.sync.load(path, into={"x": target})
        assert (target.loss, target.logits) == (1.0, 2)
        assert list(target.items()) == [("loss", 1.0), ("logits", 2)]
        ckptio.sync.save({"y": Ordered(None, 3)}, path, overwrite=True)
        ckptio.sync.load(path, into={"y": target})
        assert (target.loss, target.get("loss"), target["logits"]) == (None, None, 3)
        ckptio.sync.save({"x": saved}, path, overwrite=True)


@dataclass
class Bag(dict[str, Any]):
    """Has no field as an item."""

    loss: float | None = 0.0
    step: int = 3


@pytest.mark.parametrize(("kind", "items"), [(Output, {"loss": 0.5}), (Bag, {})])
def test_a_dataclass_that_is_a_dict_has_what_it_had_as_items(
    kind: Callable[[float], Any], items: dict[str, Any], path: str
) -> None:
    """Filled or made anew."""
    ckptio.sync.save({"x": kind(0.5)}, path)
    filled, made = kind(0.1), ckptio.sync.load(path, types=[Output, Bag])["x"]
    ckptio.sync.load(path, into={"x": filled})
    assert filled.loss == made.loss == 0.5
    assert dict(filled) == dict(made) == items
    unset = Bag(None)
    ckptio.sync.load(path, into={"x": unset}, strict="ignore")
    assert (unset.loss, dict(unset)) == (0.5, {})


@dataclass
class Late:
    step: int
    best: float = field(init=False)


def test_a_field_that_is_not_set_stays_so(path: str) -> None:
    ckptio.sync.save({"x": Late(3)}, path)
    target = Late(0)
    ckptio.sync.load(path, into={"x": target})
    assert vars(target) == {"step": 3}


def test_a_copy_of_a_state_keeps_the_versions_of_modules() -> None:
    state = torch.nn.Linear(1, 1).state_dict()
    assert vars(copied("x", state)) == vars(state)


@dataclass(frozen=True)
class Held:
    weights: torch.Tensor


@pytest.mark.parametrize("make", [Held, lambda tensor: Pair(tensor, tensor)])
def test_a_record_of_which_all_is_filled_stays_that_record(
    make: Callable[[torch.Tensor], Any], path: str
) -> None:
    ckptio.sync.save({"x": make(torch.ones(2))}, path)
    target = {"x": (own := make(torch.zeros(2)))}
    ckptio.sync.load(path, into=target)
    assert target["x"] is own


class Next(Pair):
    unit: str

    def __new__(cls, x: int) -> Self:
        """Make one of a number and the next."""
        made = super().__new__(cls, x, x + 1)
        made.unit = "s"
        return made

    @functools.cached_property
    def total(self) -> int:
        return int(self.x + self.y)


@pytest.mark.parametrize("saved", [(5, 6), Pair(5, 6)])
def test_a_named_tuple_that_is_made_of_something_else_is_filled(saved: Any, path: str) -> None:
    """Of what a tuple has, too."""
    ckptio.sync.save({"x": saved}, path)
    target = {"x": Next(0)}
    assert target["x"].total == 1
    ckptio.sync.load(path, into=target)
    assert (type(target["x"]), target["x"]) == (Next, (5, 6))
    assert (target["x"].unit, target["x"].total) == ("s", 11)


@dataclass
class Trained:
    """Keeps what follows from its fields, and a network that is trained."""

    size: int

    @functools.cached_property
    def twice(self) -> torch.Tensor:
        return torch.ones(self.size * 2)

    @functools.cached_property
    def net(self) -> list[torch.nn.Module]:
        return [torch.nn.Linear(2, 2)]

    @functools.cached_property
    def random(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.size)


def test_of_what_a_record_has_computed_objects_with_a_state_stay(path: str) -> None:
    ckptio.sync.save({"x": Trained(2)}, path)
    target = Trained(1)
    assert (len(target.twice), target.random.initial_seed()) == (2, 1)
    net = target.net
    ckptio.sync.load(path, into={"x": target})
    assert (len(target.twice), target.random.initial_seed()) == (4, 2)
    assert target.net is net


@dataclass
class Indexed:
    """Has a list that is no field, and long."""

    size: int

    def __post_init__(self) -> None:
        self.index: list[Any] = [*range(self.size)]


class Counting(list[Any]):
    """Counts how often one of its items is asked for."""

    num_asked = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            Counting.num_asked += 1
            yield item


def test_a_tensor_behind_many_numbers_is_found(path: str) -> None:
    value = Indexed(100_000)
    ckptio.sync.save({"x": value}, path)
    value.index.append(torch.ones(1))
    with pytest.raises(UnsupportedLeafError, match="'index' is no field"):
        ckptio.sync.save({"x": value}, path, overwrite=True)


def test_of_a_long_list_that_is_no_field_the_first_items_are_looked_at(path: str) -> None:
    """A hundred thousand objects follow from the fields, and are not gone through."""
    value = Indexed(1)
    value.index = Counting(object() for _ in range(100_000))
    ckptio.sync.save({"x": value}, path)
    assert 0 < Counting.num_asked <= 10_000


def test_a_dataclass_takes_a_dict_by_the_names_of_its_fields(path: str) -> None:
    """The state may have been a dict once, or came by way of a format that has none."""
    saved = {"step": 7, "weights": torch.ones(2), "more": None}
    ckptio.sync.save({"run": saved}, path)
    run = Run(weights=torch.zeros(2))
    target = {"run": run}
    ckptio.sync.load(path, into=target)
    assert target["run"] is run
    assert run.step == 7
    assert torch.equal(run.weights, torch.ones(2))
    frozen = Frozen(0.0, torch.zeros(2))
    with pytest.raises(MismatchError, match="rate"):
        ckptio.sync.load(path, into={"run": frozen})
    assert not frozen.weights.any()


@pytest.mark.parametrize("saved", [[1, 2], 5, torch.ones(2), {1: 2}, None])
def test_a_dataclass_with_tensors_takes_nothing_else(path: str, saved: Any) -> None:
    """It would be replaced, and its tensors stay as they are."""
    ckptio.sync.save({"run": saved}, path)
    target = {"run": Run(weights=torch.zeros(2))}
    with pytest.raises(MismatchError, match=r"run: a dataclass in the target, (a|an|None) "):
        ckptio.sync.load(path, into=target)
    plain: dict[str, Any] = {"run": Run()}
    if saved is None:  # an option that is off
        assert ckptio.sync.load(path, into=plain)["run"] is None


def test_a_dataclass_inside_itself_is_refused(path: str) -> None:
    """As any target that has no end."""
    ckptio.sync.save({"run": Run()}, path)
    run = Run()
    run.more = [run]
    with pytest.raises(TargetError, match="inside itself"):
        ckptio.sync.load(path, into={"run": run})


class Keeper:
    """Stands for whatever it has."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("strict", ["raise", "ignore"])
@pytest.mark.parametrize("saved", [{"best": 1}, [1, 2], None, 7])
@pytest.mark.parametrize("had", [None, [1], 3, "x"])
def test_a_state_that_is_no_dict_is_handed_over_as_it_was_saved(
    path: str, saved: Any, had: Any, strict: Any
) -> None:
    """An object that has nothing yet says so in its own way."""
    ckptio.sync.save({"keeper": Keeper(saved)}, path)
    keeper = Keeper(had)
    ckptio.sync.load(path, into={"keeper": keeper}, strict=strict)
    assert keeper.state == saved


def test_a_state_is_handed_over_in_the_order_it_was_saved_in(path: str) -> None:
    """Caches and queues are ordered; what the object alone has comes last."""
    recent = OrderedDict([("a", 1), (3, torch.ones(2)), (Phase.DONE, 3), ("z", 4)])
    ckptio.sync.save({"keeper": Keeper({"recent": recent, "n": 4})}, path)
    moment = torch.zeros(2)
    had = OrderedDict([("z", 0), ("own", 5), (Phase.DONE, 0), (3, moment)])
    keeper = Keeper({"n": 0, "recent": had})
    ckptio.sync.load(path, into={"keeper": keeper}, strict="ignore")
    assert list(keeper.state) == ["recent", "n"]
    assert list(keeper.state["recent"]) == ["a", 3, Phase.DONE, "z", "own"]
    assert torch.equal(keeper.state["recent"][3], torch.ones(2))
    assert not moment.any()


def test_new_keys_and_values_of_a_state_are_of_its_classes(path: str) -> None:
    """Beside an enum, another of its members is one."""
    counts = {Phase.WARM: Phase.DONE, Phase.DONE: Phase.WARM}
    ckptio.sync.save({"keeper": Keeper({"counts": counts})}, path)
    keeper = Keeper({"counts": {Phase.WARM: None}})
    result = ckptio.sync.load_with_report(path, into={"keeper": keeper})
    assert keeper.state["counts"] == {Phase.WARM: "done", Phase.DONE: Phase.WARM}
    keeper = Keeper({"counts": {Phase.WARM: Phase.WARM}})
    result = ckptio.sync.load_with_report(path, into={"keeper": keeper})
    assert keeper.state["counts"] == counts
    assert not result.report.notes


def test_a_counter_in_a_state_is_one_value(path: str) -> None:
    """Milestones of a schedule are not those of two."""

    def schedule(milestones: list[int]) -> torch.optim.lr_scheduler.MultiStepLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)

    ckptio.sync.save({"schedule": schedule([2, 4])}, path)
    target = schedule([3])
    ckptio.sync.load(path, into={"schedule": target})
    assert target.milestones == Counter([2, 4])


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


def test_an_object_with_an_odd_getattr_is_refused_by_name(path: str) -> None:
    """It raises what it likes where it is asked whether it is stateful."""
    with pytest.raises(UnsupportedLeafError, match=r"'hp'.*dict"):
        ckptio.sync.save({"hp": Attributes(lr=1)}, path)


class Picky(torch.nn.Linear):
    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("not today")


def test_an_object_that_does_not_take_its_state_is_named(path: str) -> None:
    """Its own error is the cause."""
    ckptio.sync.save({"model": torch.nn.Linear(1, 1)}, path)
    with pytest.raises(TargetError, match=r"'model' does not take its state.*not today") as caught:
        ckptio.sync.load(path, into={"model": Picky(1, 1)})
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("strict", ["raise", "ignore", "report"])
def test_who_gets_no_report_is_told_of_buffers_that_stay_on_meta(
    path: str, caplog: pytest.LogCaptureFixture, strict: Literal["raise", "ignore", "report"]
) -> None:
    """What a module does not save (Llama's inv_freq) is missed at its first use only."""
    ckptio.sync.save({"m": torch.nn.Linear(2, 2)}, path)
    model = torch.nn.Linear(2, 2, device="meta")
    for name in ("mask", "inv_freq"):
        model.register_buffer(name, torch.ones(2, device="meta"), persistent=False)
    ckptio.sync.load_with_report(path, into={"m": model}, strict=strict)
    told = [record.message for record in caplog.records if "meta device" in record.message]
    assert len(told) == (strict != "report")
    assert all("'m.mask', 'm.inv_freq'" in text for text in told)


def test_what_a_module_has_beside_meta_stays_the_very_tensor(path: str) -> None:
    """Others may have its buffers, as an optimizer has its parameters; also under two names."""

    def make(device: str) -> torch.nn.Module:
        module = torch.nn.Linear(2, 2, device=device)
        module.first = module.second = torch.nn.Buffer(torch.zeros(3))
        return module

    saved = make("cpu")
    for buffer in saved.buffers():
        buffer.fill_(7)
    ckptio.sync.save({"m": saved}, path)
    model = make("meta")
    (held,) = model.buffers()
    ckptio.sync.load(path, into={"m": model})
    assert model.first is model.second is held
    assert torch.equal(held, torch.full((3,), 7.0))


def test_what_was_not_selected_is_not_called_missing_on_meta(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A module may be loaded in parts."""
    ckptio.sync.save(torch.nn.ModuleDict({n: torch.nn.Linear(2, 2) for n in "ab"}), path)
    with torch.device("meta"):
        model = torch.nn.ModuleDict({n: torch.nn.Linear(2, 2) for n in "ab"})
    result = ckptio.sync.load_with_report(path, into=model, select="a")
    assert not [record for record in caplog.records if "meta device" in record.message]
    assert set(result.report.notes) == {
        f"b.{name}: stays on the meta device; it was not selected" for name in ("weight", "bias")
    }
    ckptio.sync.load(path, into=model, select="b")
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_note_of_what_stays_on_meta_replaces_none_of_others(path: str) -> None:
    """As of two names that are one tensor in the target."""
    saved = torch.nn.ModuleDict({n: torch.nn.Linear(2, 2, bias=False) for n in "ab"})
    ckptio.sync.save({"x": torch.ones(2), "y": torch.zeros(2), "m": saved}, path)
    with torch.device("meta"):
        model = torch.nn.ModuleDict({n: torch.nn.Linear(2, 2, bias=False) for n in "ab"})
    tensor = torch.zeros(2)
    target = {"x": tensor, "y": tensor, "m": model}
    first, second = ckptio.sync.load_with_report(
        path, into=target, select=["x", "y", "m.a"]
    ).report.notes
    assert first.startswith("y: is one tensor with 'x' in the target")
    assert second == "m.b.weight: stays on the meta device; it was not selected"


def test_what_was_selected_and_stays_on_meta_is_told_of(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another shape, or under the name of what it was tied to."""
    tied = torch.nn.ModuleDict({n: torch.nn.Linear(2, 2, bias=False) for n in "ab"})
    tied["b"].weight = tied["a"].weight
    ckptio.sync.save(tied, path)
    with torch.device("meta"):
        model = torch.nn.ModuleDict(
            {"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(3, 2, bias=False)}
        )
    ckptio.sync.load(path, into=model, select=lambda _: True, strict="ignore")
    (told,) = [r.message for r in caplog.records if "meta device" in r.message]
    assert "('b.weight')" in told
    caplog.clear()
    with torch.device("meta"):
        model = torch.nn.ModuleDict({n: torch.nn.Linear(2, 2, bias=False) for n in "ab"})
    result = ckptio.sync.load_with_report(path, into=model, select="a", strict="raise")
    assert result.report.notes == ("b.weight: stays on the meta device; it was not selected",)
    assert not [record for record in caplog.records if "meta device" in record.message]


def test_a_predicate_is_asked_about_nothing_that_no_checkpoint_has(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a buffer that is not saved it may not know, and no selection would bring it."""
    ckptio.sync.save({"m": torch.nn.Linear(2, 2)}, path)
    model = torch.nn.Linear(2, 2, device="meta")
    model.register_buffer("mask", torch.ones(2, device="meta"), persistent=False)
    names = {"m.weight": True, "m.bias": True}
    result = ckptio.sync.load_with_report(
        path, into={"m": model}, select=lambda name: names[name], strict="raise"
    )
    assert result.report.notes == (
        "m.mask: stays on the meta device; the checkpoint has none that fits",
    )
    assert any("'m.mask'" in record.message for record in caplog.records)


def test_a_meta_target_is_made_with_its_own_element_type(path: str) -> None:
    """Which `dtype=` allows, where it is another than the stored one."""
    ckptio.sync.save({"m": torch.nn.Linear(2, 2)}, path)
    with pytest.raises(MismatchError, match=r"dtype=torch\.bfloat16 converts"):
        ckptio.sync.load(path, into={"m": torch.nn.Linear(2, 2, device="meta").bfloat16()})
    model = torch.nn.Linear(2, 2, device="meta").bfloat16()
    ckptio.sync.load(path, into={"m": model}, dtype=torch.bfloat16, device="cpu")
    assert (model.weight.dtype, model.weight.is_cpu) == (torch.bfloat16, True)


def test_a_module_partly_on_meta_keeps_its_other_parameters(path: str) -> None:
    """An optimizer may have them; what stays on meta is noted."""
    saved = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    ckptio.sync.save({"m": saved}, path)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2))
    model.register_buffer("mask", torch.ones(2, device="meta"), persistent=False)
    first, second = model.get_parameter("0.weight"), model.get_parameter("1.weight")
    assert first.is_meta
    result = ckptio.sync.load_with_report(path, into={"m": model})
    assert model.get_parameter("1.weight") is second
    for name in ("0.weight", "1.weight"):
        assert torch.equal(model.get_parameter(name), saved.get_parameter(name))
    assert result.report.notes == (
        "m.mask: stays on the meta device; the checkpoint has none that fits",
    )


def test_what_a_hook_makes_of_a_state_is_in_what_is_beside_meta(path: str) -> None:
    """As in a module of which nothing is on the meta device."""
    saved = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    ckptio.sync.save({"m": saved}, path)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2))
    model.register_load_state_dict_pre_hook(
        lambda _, state, *__: state.update({"1.bias": state["1.bias"] * 2})
    )
    bias = model.get_parameter("1.bias")
    ckptio.sync.load(path, into={"m": model})
    assert model.get_parameter("1.bias") is bias
    assert torch.equal(bias, saved.get_parameter("1.bias") * 2)


def test_an_optimizer_with_other_groups_is_refused_before_anything_changes(path: str) -> None:
    """Its own error would come when the model is overwritten."""
    model = torch.nn.Linear(2, 2)
    ckptio.sync.save({"model": model, "opt": torch.optim.AdamW(model.parameters())}, path)
    mine = torch.nn.Linear(2, 2)
    before = mine.weight.detach().clone()
    groups: list[dict[str, Any]] = [{"params": [mine.weight]}, {"params": [mine.bias]}]
    with pytest.raises(MismatchError, match=r"opt: groups of \[1, 1\] parameters in the target"):
        ckptio.sync.load(path, into={"model": mine, "opt": torch.optim.AdamW(groups)})
    assert torch.equal(mine.weight, before)


def test_an_optimizer_of_parameters_on_meta_is_refused(path: str) -> None:
    """It would have those that the model has no more, and train nothing."""
    model = torch.nn.Linear(2, 2)
    ckptio.sync.save({"model": model, "opt": torch.optim.AdamW(model.parameters())}, path)
    mine = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(TargetError, match="its parameters are on the meta device"):
        ckptio.sync.load(path, into={"model": mine, "opt": torch.optim.AdamW(mine.parameters())})
    assert mine.weight.is_meta


def test_a_list_of_another_length_is_of_its_classes(path: str) -> None:
    """Those of what it holds now: none of them is passed."""
    saved = {"x": [Pair(1, 2), Pair(3, 4)], "p": [Phase.WARM], "s": (Pair(5, 6),)}
    ckptio.sync.save(saved, path)
    target = {"x": [Pair(0, 0)], "p": [Phase.DONE, Phase.DONE], "s": (Pair(0, 0), Pair(0, 0))}
    assert repr(ckptio.sync.load(path, into=target)) == repr(saved)
