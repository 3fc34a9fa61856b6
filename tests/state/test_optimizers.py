"""Optimizers as targets of states that they could not go on from."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import MismatchError, Shard, TargetError, UnsupportedLeafError, sync
from ckptio.format.encode import TAG
from ckptio.state.flatten import flatten
from ckptio.state.numbered import numbered, numbered_below
from ckptio.state.optimizers import _ELEMENTWISE
from tests.rig import SMALL
from tests.state.optimizers import NAMES, fresh, stepped
from tests.strategies import assert_same

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_takes_its_own_state(tmp_path: Path, name: str) -> None:
    """Fresh or not; and torch's have no state with elements that is not known."""
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    one = stepped(name, 4, 3, **options)
    sync.save({"opt": one}, tmp_path / "c", config=SMALL)
    for other in (fresh(name, 4, 3, **options), stepped(name, 4, 3, **options)):
        sync.load(tmp_path / "c", {"opt": other}, config=SMALL)
        assert_same(other.state_dict(), one.state_dict())
    names = {spec.name.rpartition(".")[2] for spec in flatten(one).specs if spec.shape == (4, 3)}
    assert names <= _ELEMENTWISE


def test_an_optimizer_takes_a_state_with_digits_for_numbers(tmp_path: Path) -> None:
    """As torch.distributed.checkpoint keeps it: under other keys it would begin again."""
    state = (one := stepped("AdamW", 4, 3)).state_dict()
    moments = {str(number): each for number, each in state["state"].items()}
    sync.save({"opt": {**state, "state": moments}}, tmp_path / "c", config=SMALL)
    for other in (fresh("AdamW", 4, 3), stepped("AdamW", 4, 3)):
        sync.load(tmp_path / "c", {"opt": other}, config=SMALL)
        assert_same(other.state_dict(), one.state_dict())


@pytest.mark.parametrize("saved", [None, 5, [1], (1,), torch.ones(1)], ids=repr)
def test_what_is_no_state_is_a_mismatch(tmp_path: Path, saved: Any) -> None:
    sync.save({"opt": saved}, tmp_path / "c", config=SMALL)
    with pytest.raises(MismatchError, match="'opt: a dict in the target, "):
        sync.load(tmp_path / "c", {"opt": stepped("AdamW", 4, 3)}, config=SMALL)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (lambda: fresh("SGD", 4, 3, momentum=0.9), "is SGD, .* groups have no 'dampening'"),
        (lambda: fresh("Adagrad", 4, 3), "target is Adagrad, .* whose groups have no"),
        (
            lambda: fresh("AdamW", 5, 3),
            r"'opt.state.0.exp_avg' is of a parameter of shape \(5, 3\)",
        ),
        (lambda: stepped("AdamW", 4), r"of shape \(4,\) in the target, and of shape \(4, 3\)"),
    ],
)
def test_another_optimizer_is_a_mismatch(tmp_path: Path, other: Any, problem: str) -> None:
    """It would take the state, and fail at its next step."""
    sync.save({"opt": stepped("AdamW", 4, 3)}, tmp_path / "c", config=SMALL)
    target = other()
    before = target.state_dict()
    with pytest.raises(MismatchError, match=problem):
        sync.load(tmp_path / "c", {"opt": target}, config=SMALL)
    assert_same(target.state_dict(), before)


def test_options_that_came_later_are_no_difference(tmp_path: Path) -> None:
    """They are set where a state lacks them."""
    state = stepped("AdamW", 4, 3).state_dict()
    for late in ("fused", "foreach", "decoupled_weight_decay"):
        state["param_groups"][0].pop(late, None)
    sync.save(state, tmp_path / "c", config=SMALL)
    target = fresh("AdamW", 4, 3)
    sync.load(tmp_path / "c", target, config=SMALL)
    assert_same(target.state_dict()["state"], state["state"])


class Doubled(torch.optim.SGD):
    """A class of somebody's own, whose state is as it likes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.ones(2, *parameter.shape)


def test_of_a_class_of_ones_own_nothing_is_asked(tmp_path: Path) -> None:
    """Nobody knows what it is made of."""
    sync.save(Doubled([torch.nn.Parameter(torch.ones(3))]), tmp_path / "c", config=SMALL)
    target = Doubled([torch.nn.Parameter(torch.ones(3))])
    sync.load(tmp_path / "c", target, config=SMALL)
    sync.save({"state": 1}, tmp_path / "d", config=SMALL)
    with pytest.raises((TargetError, MismatchError)):
        sync.load(tmp_path / "d", target, config=SMALL)


@pytest.mark.parametrize("select", ["opt", ["model", "opt"], "opt.*", lambda name: name[0] in "mo"])
@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (lambda: fresh("SGD", 4, 3, momentum=0.9), "is SGD, .* groups have no 'dampening'"),
        (lambda: fresh("AdamW", 5, 3), r"'opt.state.0.exp_avg' is of a parameter of shape"),
        (
            lambda: torch.optim.AdamW([torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]),
            r"groups of \[2\] parameters in the target, of \[1\]",
        ),
    ],
)
def test_another_optimizer_is_a_mismatch_though_it_is_selected(
    tmp_path: Path, other: Any, problem: str, select: Any
) -> None:
    """Before anything changes, the model beside it among them."""
    saved = {"model": torch.ones(2), "opt": stepped("AdamW", 4, 3), "step": 1}
    sync.save(saved, tmp_path / "c", config=SMALL)
    target = {"model": torch.zeros(2), "opt": other()}
    before = copy.deepcopy(target["opt"].state_dict())
    with pytest.raises(MismatchError, match=problem):
        sync.load(tmp_path / "c", target, select=select, config=SMALL)
    assert not target["model"].any()
    report = sync.load_with_report(tmp_path / "c", target, select=select, config=SMALL).report
    assert len(report.mismatched) == 1
    assert_same(target["opt"].state_dict(), before)


@pytest.mark.parametrize("select", ["opt.state", "opt.state.0", "opt.state.0.exp_avg"])
def test_moments_that_are_selected_have_to_fit(tmp_path: Path, select: str) -> None:
    """By the numbers of the parameters here, where the groups stay as they are."""
    sync.save({"opt": stepped("AdamW", 4, 3)}, tmp_path / "c", config=SMALL)
    with pytest.raises(MismatchError, match=r"of shape \(5,\) in the target"):
        sync.load(tmp_path / "c", {"opt": fresh("AdamW", 5)}, select=select, config=SMALL)
    target = fresh("AdamW", 4, 3)
    target.param_groups[0]["lr"] = 7.0
    sync.load(tmp_path / "c", {"opt": target}, select="opt.state", config=SMALL)
    assert target.param_groups[0]["lr"] == 7.0
    assert len(target.state) == 1


def test_an_option_of_another_optimizer_may_be_selected(tmp_path: Path) -> None:
    """It is a number, whoever had it."""
    sync.save({"opt": stepped("AdamW", 4, 3)}, tmp_path / "c", config=SMALL)
    target = fresh("SGD", 5, momentum=0.9)
    target.param_groups[0]["lr"] = 7.0
    sync.load(tmp_path / "c", {"opt": target}, select="opt.param_groups.0.lr", config=SMALL)
    assert target.param_groups[0]["lr"] == 0.1
    assert target.param_groups[0]["momentum"] == 0.9
    with pytest.raises(MismatchError, match="groups of"):
        two = torch.optim.SGD([torch.nn.Parameter(torch.ones(3)) for _ in range(2)])
        select = "opt.param_groups.0.params"
        sync.load(tmp_path / "c", {"opt": two}, select=select, config=SMALL)


@pytest.mark.parametrize("select", [None, "opt"])
@pytest.mark.parametrize("saved", ["before a step", "before a layer was thawed"])
def test_an_optimizer_goes_back_to_less_state(
    tmp_path: Path, saved: str, select: str | None
) -> None:
    """What it has made since is gone, as with its own `load_state_dict`."""
    layers = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(layers)
    if saved != "before a step":
        layers[0].grad = torch.ones(3)
        optimizer.step()
    sync.save({"opt": optimizer}, tmp_path / "c", config=SMALL)
    before = copy.deepcopy(optimizer.state_dict())
    for layer in layers:
        layer.grad = torch.ones(3)
    optimizer.step()
    sync.load(tmp_path / "c", {"opt": optimizer}, select=select, config=SMALL)
    assert_same(optimizer.state_dict(), before)


class Lookahead(torch.optim.SGD):
    """Copies the weights when it has stepped twice."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["n"] = state.get("n", 0) + 1
            if state["n"] == 2:
                state["slow"] = parameter.detach().clone()
        return loss


@pytest.mark.parametrize("select", [None, "opt"])
def test_what_a_parameter_has_since_is_gone(tmp_path: Path, select: str | None) -> None:
    """A part of its state that the checkpoint has not: torch drops it, too."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = Lookahead([parameter], lr=0.1, momentum=0.9)
    optimizer.step()
    sync.save({"opt": optimizer}, tmp_path / "c", config=SMALL)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    sync.load(tmp_path / "c", {"opt": optimizer}, select=select, config=SMALL)
    assert_same(optimizer.state_dict(), before)


class Growing(torch.optim.SGD):
    """Keeps what grows: rows, something of each step, and a count that is a tensor later."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            n = state["n"] = state.get("n", 0) + 1
            state["rows"] = torch.full((n, 2), float(n))
            state["more"] = {**state.get("more", {}), f"at {n}": torch.full((n,), float(n))}
            state["last"] = torch.ones(n) if n % 2 else {"of": n}
        return loss


@pytest.mark.parametrize("saved", [1, 2, 3])
@pytest.mark.parametrize("had", [0, 1, 2, 3])
def test_what_an_optimizer_of_others_has_may_grow(tmp_path: Path, saved: int, had: int) -> None:
    """As torch, it is given what is stored; what is like the parameter is filled where it is."""
    one, other = (Growing([torch.nn.Parameter(torch.ones(4))], momentum=0.9) for _ in range(2))
    for optimizer, num_steps in ((one, saved), (other, had)):
        (parameter,) = optimizer.param_groups[0]["params"]
        for _ in range(num_steps):
            parameter.grad = torch.ones(4)
            optimizer.step()
    momentum = other.state[parameter].get("momentum_buffer")
    sync.save({"opt": one}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"opt": other}, config=SMALL)
    assert_same(other.state_dict(), one.state_dict())
    if momentum is not None:
        assert other.state[parameter]["momentum_buffer"].data_ptr() == momentum.data_ptr()


def test_what_is_like_the_parameter_of_an_optimizer_of_others_has_to_fit(tmp_path: Path) -> None:
    """It is of another model otherwise."""
    one, other = (Doubled([torch.nn.Parameter(torch.ones(n))]) for n in (3, 4))
    for optimizer in (one, other):
        (parameter,) = optimizer.param_groups[0]["params"]
        optimizer.state[parameter]["exp_avg"] = torch.ones_like(parameter)
    sync.save({"opt": one}, tmp_path / "c", config=SMALL)
    with pytest.raises(MismatchError, match=r"opt\.state\.0\.exp_avg: shape"):
        sync.load(tmp_path / "c", {"opt": other}, config=SMALL)


def test_an_option_with_a_state_of_its_own_goes_back(tmp_path: Path) -> None:
    """AdamW's `amsgrad` has one, and is off again."""
    saved, target = stepped("AdamW", 4), stepped("AdamW", 4, amsgrad=True)
    sync.save({"opt": saved}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"opt": target}, config=SMALL)
    assert_same(target.state_dict(), saved.state_dict())


class Bare(torch.optim.SGD):
    """An optimizer that gives its state in a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.param_groups[0]["lr"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state_dict["rate"]


def test_an_optimizer_may_say_which_part_of_its_state_it_has(tmp_path: Path) -> None:
    """As one that shares its moments out among ranks does: the part is filled where it is."""

    class Sharing(torch.optim.SGD):
        first = 0
        given: Any = None

        def state_dict(self) -> dict[str, Any]:
            state = super().state_dict()
            state["state"] = {
                key: {"m": Shard(value["m"], (8,), (self.first,))}
                for key, value in state["state"].items()
            }
            return state

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.given = state_dict

    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer, target = Sharing([weight], lr=0.1), Sharing([weight], lr=0.1)
    optimizer.state[weight] = {"m": torch.arange(8.0)}
    sync.save({"opt": optimizer}, tmp_path / "c", config=SMALL)
    target.first, half = 4, torch.zeros(4)
    target.state[weight] = {"m": half}
    sync.load(tmp_path / "c", {"opt": target}, config=SMALL)
    assert half.tolist() == [4.0, 5.0, 6.0, 7.0]
    assert isinstance(target.given["state"][0]["m"], Shard)


@pytest.mark.parametrize("saved", [1, 2, 4])
@pytest.mark.parametrize("had", [0, 1, 2, 4])
def test_lbfgs_goes_on_wherever_it_is(tmp_path: Path, saved: int, had: int) -> None:
    """What is a number in its first step is a tensor in the next, and its lists grow."""

    def after(num: int) -> tuple[torch.nn.Parameter, torch.optim.LBFGS, Any]:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.LBFGS([weight], lr=0.5, max_iter=1, history_size=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = ((weight - torch.arange(3.0)) ** 4).sum()
            loss.backward()
            return loss

        for _ in range(num):
            optimizer.step(closure)
        return weight, optimizer, closure

    weight, optimizer, closure = after(saved)
    sync.save({"w": weight, "opt": optimizer}, tmp_path / "c", config=SMALL)
    target, other, closure_of_target = after(had)
    sync.load(tmp_path / "c", {"w": target, "opt": other}, config=SMALL)
    for _ in range(2):
        optimizer.step(closure)
        other.step(closure_of_target)
    assert torch.equal(target, weight)


def test_an_optimizer_may_have_a_state_of_its_own(tmp_path: Path) -> None:
    """Without what torch's have in theirs."""
    parameter = torch.nn.Parameter(torch.ones(3))
    sync.save({"opt": Bare([parameter], lr=0.5)}, tmp_path / "c", config=SMALL)
    optimizer = Bare([parameter], lr=0.1)
    sync.load(tmp_path / "c", {"opt": optimizer}, config=SMALL)
    assert optimizer.param_groups[0]["lr"] == 0.5


class Fails:
    """Has a state that it does not give, as one whose parts are on other ranks."""

    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("no part of it is here")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""


def test_a_state_dict_that_fails_is_named(tmp_path: Path) -> None:
    """On both ways, with an error of ours."""
    with pytest.raises(
        UnsupportedLeafError, match=r"'data\.train'.*fails: AttributeError.*no part"
    ):
        sync.save({"data": {"train": Fails()}}, tmp_path / "c", config=SMALL)
    sync.save({"data": {"train": {"a": torch.ones(1)}}}, tmp_path / "c", config=SMALL)
    with pytest.raises(TargetError, match=r"'data\.train'.*fails: AttributeError.*no part"):
        sync.load(tmp_path / "c", {"data": {"train": Fails()}}, config=SMALL)


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"state": 5},
        {"state": [1]},
        {"state": {}},
        {"state": {"0": 1, "weight": 2}},
        {"state": {"weight": 2}},
        {"state": {"00": 1}},
        {"state": {TAG: "dict", "v": [[0, 1]]}},
        {TAG: "dict", "v": [["state", {"0": 1}]]},
        {TAG: "dict", "state": {"0": 1}},
    ],
)
def test_what_has_other_keys_than_numbers_stays_as_it_is(node: dict[str, Any]) -> None:
    """A state by names, or one of which the keys are numbers already."""
    assert numbered(node) is node


def test_digits_become_numbers_where_the_groups_list_them() -> None:
    """At any depth; not a dict that is called so, with keys of its own."""
    state = {
        "state": {"0": {"step": 1}, "2": {}},
        "param_groups": [{"params": [0]}, {"params": [2]}],
    }
    made = {**state, "state": {TAG: "dict", "v": [[0, {"step": 1}], [2, {}]]}}
    assert numbered(state) == made
    assert numbered_below({"a": [state, {"b": state}], "c": 1}) == {
        "a": [made, {"b": made}],
        "c": 1,
    }
    assert numbered_below({TAG: "tuple", "v": [state]}) == {TAG: "tuple", "v": [state]}
    groups: list[Any] = [
        5,
        [],
        [5],
        [{"params": [0, 2]}, 5],
        [{"lr": 1}],
        [{"params": [0]}],
        [{"params": ["0", "2"]}],
        [{"params": [0, 2, None]}],
        [{"params": {"0": 2}}],
        [{"params": "02"}],
    ]
    for each in groups:
        other = {**state, "param_groups": each}
        assert numbered_below(other) == other
