"""What an object is given to load: never the memory that it may write to meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import PerRank, sync
from ckptio.errors import MismatchError
from ckptio.state.handed import handed_to
from tests.rig import SMALL
from tests.state.objects import Mean, Overriding, Turned, hook_before, loaded_both

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Sum(Mean):
    """One that adds what it is given to what it has."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total += state["total"]


class Pair:
    """Two that are swapped when they are loaded."""

    def __init__(self, one: float, two: float) -> None:
        self.total = torch.tensor([one, two])
        self.one, self.two = self.total[:1], self.total[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"both": {"one": self.one, "two": [self.two], "own": self.one}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.one.copy_(state["both"]["two"][0])
        self.two.copy_(state["both"]["one"])


@pytest.mark.parametrize(
    ("saved", "target"),
    [(Mean(1, 2), Mean(3, 4)), (Sum(1, 2), Sum(3, 4)), (Pair(1, 2), Pair(3, 4))],
    ids=lambda value: type(value).__name__,
)
def test_an_object_may_write_to_its_own(tmp_path: Path, saved: Any, target: Any) -> None:
    """Before it reads what it is given: that is as it is with `torch.load`."""
    target, other = loaded_both(tmp_path, saved, target)
    assert target.total.tolist() == other.total.tolist()


def test_what_is_not_loaded_is_given_as_a_copy(tmp_path: Path) -> None:
    """It would be gone, too."""
    sync.save({"x": {"total": torch.ones(2)}}, tmp_path / "c", config=SMALL)
    target = Mean(3, 4)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL, strict="ignore")
    assert target.total.tolist() == [1.0, 1.0]
    assert target.parts.tolist() == [3.0, 4.0]
    sync.save({"x": Pair(1, 2)}, tmp_path / "d", config=SMALL)
    pair = Pair(3, 4)
    sync.load(tmp_path / "d", {"x": pair}, config=SMALL, select="x.both.two")
    assert pair.total.tolist() == [2.0, 3.0]


class Counted:
    """One that empties a dict in its state before it fills it."""

    def __init__(self, **counts: int) -> None:
        self.counts, self.seed = counts, torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": [self.counts], "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts.clear()
        self.counts |= state["counts"][0]


def test_a_dict_that_is_not_loaded_is_given_as_a_copy(tmp_path: Path) -> None:
    target, other = Counted(a=3), Counted(a=4)
    sync.save({"x": other}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL, select="x.seed")
    assert target.counts == {"a": 3}


class Refilled(Mean):
    """One that forgets what it has before it takes what it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total.zero_().copy_(state["total"])


@pytest.mark.parametrize("strict", ["report", "ignore"])
def test_what_does_not_fit_is_given_as_a_copy(tmp_path: Path, strict: Any) -> None:
    sync.save({"x": Refilled(1, 2, 3), "y": 1}, tmp_path / "c", config=SMALL)
    target = {"x": Refilled(3, 4), "y": 0}
    sync.load_with_report(tmp_path / "c", target, config=SMALL, strict=strict)
    assert target["x"].total.tolist() == [3.0, 4.0]  # type: ignore[attr-defined]  # it is one
    assert target["y"] == 1


def swap(state: dict[str, Any], prefix: str, *_: Any) -> None:
    one, two = state[f"{prefix}weight"], state[f"{prefix}twin"]
    state[f"{prefix}weight"], state[f"{prefix}twin"] = two, one


class Whole(Turned):
    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        turned = {name: value.t() for name, value in state_dict.items()}
        return super().load_state_dict(turned, *args, **options)


def hooked(start: float = 0.0) -> torch.nn.Module:
    module = Turned(start)
    register: Any = module.register_load_state_dict_pre_hook
    register(lambda _, *args: swap(*args))
    return module


@pytest.mark.parametrize("make", [hooked, Overriding, Whole], ids=["hook", "override", "whole"])
def test_a_module_may_turn_what_it_is_given(
    tmp_path: Path, make: Callable[[float], torch.nn.Module]
) -> None:
    """By a hook, or by code of its own; and what has none beside it is filled where it is."""
    saved = torch.nn.ModuleDict({"turned": Turned(10), "plain": torch.nn.Linear(2, 2)})
    target = torch.nn.ModuleDict({"turned": make(0), "plain": torch.nn.Linear(2, 2)})
    if make is Whole:
        saved, target = Turned(10), make(0)  # type: ignore[assignment]  # such is called at the root
    else:
        handed = handed_to("x", target, target.state_dict())
        assert handed is not None
        state = target.state_dict()
        names = ("turned.weight", "plain.weight")
        assert [handed.is_new(f"x.{name}", state[name]) for name in names] == [True, False]
    target, other = loaded_both(tmp_path, saved, target)
    for name, value in other.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name


def test_what_torchs_part_of_a_module_has_is_given_itself() -> None:
    """Nothing writes to that before it is read, and a copy may have no room."""
    target = torch.nn.Sequential(torch.nn.Linear(2, 2), hook_before(torch.nn.Linear(2, 2)))
    state = target.state_dict()
    handed = handed_to("", target, state)
    assert handed is not None
    given = handed.without_own(dict(state), state)
    is_own = {name: given[name].data_ptr() == value.data_ptr() for name, value in state.items()}
    assert is_own == {"0.weight": True, "0.bias": True, "1.weight": False, "1.bias": False}


def test_a_sparse_buffer_is_missing_like_others(tmp_path: Path) -> None:
    """It has no one memory, and is tied to nothing."""
    module = torch.nn.Linear(2, 3)
    sync.save(module.state_dict(), tmp_path / "c", config=SMALL)
    module.register_buffer("other", torch.eye(3).to_sparse())
    with pytest.raises(MismatchError, match=r"1 missing from the checkpoint \('other'\)"):
        sync.load(tmp_path / "c", into=module, config=SMALL)
    sync.load_with_report(tmp_path / "c", into=module, strict="ignore", config=SMALL)


@pytest.mark.parametrize("name", ["weight", "twin"])
def test_tied_parameters_under_a_hook_need_one_name(tmp_path: Path, name: str) -> None:
    """The other is given what that one is, not what it had."""
    target = Turned()
    target.twin = target.weight
    register: Any = target.register_load_state_dict_pre_hook
    register(lambda *_: None)
    value = torch.full((2, 2), 7.0)
    sync.save({"x": {name: value}}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert torch.equal(target.weight, value)
    assert target.twin is target.weight


def turn(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Swap two moments; what the optimizer has of them is gone before."""
    for own in optimizer.state.values():
        own["exp_avg"].zero_()
    moments = state["state"][0]
    moments["exp_avg"], moments["exp_avg_sq"] = moments["exp_avg_sq"], moments["exp_avg"]


class Turning(torch.optim.Adam):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        turn(self, state_dict)
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [torch.optim.Adam, Turning])
def test_an_optimizer_may_turn_what_it_is_given(
    tmp_path: Path, kind: type[torch.optim.Adam]
) -> None:
    """By a hook that runs before, or by code of its own."""

    def stepped(kind: type[torch.optim.Adam], *, is_target: bool) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.arange(2.0) + is_target
        optimizer = kind([weight])
        optimizer.step()
        if is_target and kind is not Turning:
            optimizer.register_load_state_dict_pre_hook(turn)
        return optimizer

    saved, target = stepped(torch.optim.Adam, is_target=False), stepped(kind, is_target=True)
    expected = saved.state_dict()["state"][0]
    sync.save({"x": saved}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    state = target.state_dict()["state"][0]
    assert torch.equal(state["exp_avg"], expected["exp_avg_sq"])
    assert torch.equal(state["exp_avg_sq"], expected["exp_avg"])


def test_torchs_own_are_filled_where_they_are() -> None:
    """No second copy of them is made."""
    norm = torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2))
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), norm, torch.nn.LSTM(2, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for target in (module, optimizer, scheduler):
        assert handed_to("x", target, target.state_dict()) is None


class AppState:
    """Hands on to the module and the optimizer that it has, and has something of its own."""

    def __init__(self, value: float, hook: Any = None) -> None:
        self.model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(self.model.weight, value)
        if hook is not None:
            self.model.register_load_state_dict_pre_hook(hook)
        self.optimizers = [torch.optim.AdamW(self.model.parameters())]
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizers[0].step()
        self.mean = torch.tensor([value])
        self.given: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        optimizer = self.optimizers[0].state_dict()
        return {"model": self.model.state_dict(), "optimizer": optimizer, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state
        self.mean.zero_()
        self.model.load_state_dict(state["model"])
        self.optimizers[0].load_state_dict(state["optimizer"])
        self.mean += state["mean"]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two states of such objects are equal."""
    moments = zip(a["optimizer"]["state"].values(), b["optimizer"]["state"].values(), strict=True)
    pairs = [*zip(a["model"].values(), b["model"].values(), strict=True), (a["mean"], b["mean"])]
    pairs += [(x[name], y[name]) for x, y in moments for name in x]
    return all(torch.equal(x, y) for x, y in pairs)


def test_what_an_object_hands_on_to_torch_is_filled_where_it_is(tmp_path: Path) -> None:
    """A model and its optimizer are not there twice; what the object has besides is."""
    saved = AppState(1.0)
    target, other = loaded_both(tmp_path, saved, AppState(2.0))
    assert same(target.state_dict(), other.state_dict())
    given = target.given
    assert given["model"]["weight"].data_ptr() == target.model.weight.data_ptr()
    assert given["mean"].data_ptr() != target.mean.data_ptr()
    before = AppState(2.0)
    moments = [s["exp_avg"].data_ptr() for s in before.optimizers[0].state.values()]
    sync.load(tmp_path / "c", {"x": before}, config=SMALL)
    found = [state["exp_avg"].data_ptr() for state in before.given["optimizer"]["state"].values()]
    assert found == moments


class Nested(Mean):
    """Has another such object in its state, kept for each rank, before its own."""

    def __init__(self, *values: float) -> None:
        super().__init__(*values)
        self.inner = Pair(*values)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": PerRank(self.inner), **super().state_dict()}


def test_an_object_in_an_object_leaves_the_rest_of_it_new(tmp_path: Path) -> None:
    target = Nested(3, 4)
    sync.save({"x": Nested(1, 2)}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert target.total.tolist() == [1, 2]
    assert target.parts.tolist() == [1, 2]


def test_a_module_below_an_object_may_turn_what_it_is_given(tmp_path: Path) -> None:
    """There its own hook takes it, not torch's code alone."""

    def turn(module: Any, *_: Any) -> None:
        module.weight.data.zero_()

    target, other = loaded_both(tmp_path, AppState(1.0), AppState(2.0, turn))
    assert same(target.state_dict(), other.state_dict())
    assert target.given["model"]["weight"].data_ptr() != target.model.weight.data_ptr()
