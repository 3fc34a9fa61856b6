"""Optimizers as targets of the state of others of torch's, and of their own with other options."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from ckptio import MismatchError, sync
from tests.rig import SMALL
from tests.state.optimizers import NAMES, fresh, stepped
from tests.strategies import assert_same

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_no_optimizer_of_torch_takes_another_ones_state(
    tmp_path: Path, *, name: str, has_stepped: bool
) -> None:
    """Not either where it has every option that the other asks for."""
    sync.save({"opt": stepped(name, 4, 3)}, tmp_path / "c", config=SMALL)
    for other in [*NAMES, "SparseAdam"]:
        if other == name or (has_stepped and other == "SparseAdam"):  # it needs sparse gradients
            continue
        target = (stepped if has_stepped else fresh)(other, 4, 3)
        before = target.state_dict()
        if {name, other} == {"Adam", "AdamW"} and "decoupled_weight_decay" not in target.defaults:
            continue  # torch before 2.7: they are alike
        with pytest.raises(MismatchError, match=rf"target is {other}, .* another optimizer, whose"):
            sync.load(tmp_path / "c", {"opt": target}, config=SMALL)
        assert_same(target.state_dict(), before)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RAdam", "Adamax", "NAdam"])
def test_the_options_of_an_optimizer_may_be_other_ones(tmp_path: Path, name: str) -> None:
    """What it is told, how it computes, and what a user adds to groups: it stays what it is."""
    one = stepped(name, 4, 3, foreach=True, capturable=False, weight_decay=0.1)
    one.param_groups[0].update(lr_scale=0.5, momentum=0.9)
    sync.save({"opt": one}, tmp_path / "c", config=SMALL)
    other = fresh(name, 4, 3, maximize=True, betas=(0.5, 0.6))
    sync.load(tmp_path / "c", {"opt": other}, config=SMALL)
    assert_same(other.state_dict(), one.state_dict())


def test_an_option_of_others_is_the_users_if_the_target_has_it_too(tmp_path: Path) -> None:
    """Whoever adds it to groups adds it to those of every run."""
    one, other = stepped("RAdam", 4, 3), fresh("RAdam", 4, 3)
    for optimizer in (one, other):
        optimizer.param_groups[0]["amsgrad"] = True
    sync.save({"opt": one}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"opt": other}, config=SMALL)
    assert_same(other.state_dict(), one.state_dict())


@pytest.mark.parametrize("name", ["Rprop", "SGD"])
def test_a_trainer_may_give_every_group_a_weight_decay(tmp_path: Path, name: str) -> None:
    """Also those of an optimizer that has none, in the run that saved alone."""
    one, other = stepped(name, 4, 3), fresh(name, 4, 3)
    one.param_groups[0]["weight_decay"] = 0.1
    sync.save({"opt": one}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"opt": other}, config=SMALL)
    assert_same(other.state_dict(), one.state_dict())


@pytest.mark.parametrize("before", [False, True])
def test_amsgrad_may_be_switched(tmp_path: Path, *, before: bool) -> None:
    """Either way; the checkpoint says how it was, as torch has it."""
    one = stepped("Adam", 4, 3, amsgrad=before)
    sync.save({"opt": one}, tmp_path / "c", config=SMALL)
    for make in (fresh, stepped):
        other = make("Adam", 4, 3, amsgrad=not before)
        sync.load(tmp_path / "c", {"opt": other}, config=SMALL)
        assert_same(other.state_dict(), one.state_dict())


@pytest.mark.parametrize("has", [None, "checkpoint", "target"])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_an_option_that_torch_has_since_2_7_need_not_be_there(
    tmp_path: Path, name: str, has: str | None
) -> None:
    """Of the versions that save and load, either may be the older one."""
    option = {"decoupled_weight_decay": name == "AdamW"}
    one, other = stepped(name, 4, 3), fresh(name, 4, 3)
    for optimizer, where in ((one, "checkpoint"), (other, "target")):
        for options in (optimizer.defaults, optimizer.param_groups[0]):
            options.pop("decoupled_weight_decay", None)
            options.update(option if where == has else {})
    sync.save({"opt": one}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"opt": other}, config=SMALL)
    assert_same(other.state_dict()["state"], one.state_dict()["state"])


@pytest.mark.parametrize(
    ("name", "option", "is_old"),
    [
        *(("Adam", "amsgrad", False), ("AdamW", "amsgrad", False)),
        *(("SGD", "nesterov", False), ("SGD", "nesterov", True)),
        *(("RMSprop", "centered", False), ("RMSprop", "centered", True)),
        *(("RMSprop", "momentum", False), ("RMSprop", "momentum", True)),
    ],
)
def test_an_option_that_torch_sets_itself_need_not_be_there(
    tmp_path: Path, name: str, option: str, *, is_old: bool
) -> None:
    """Of its own class; in a state of today, and in one that has no option of later versions."""
    one, other = stepped(name, 4, 3), fresh(name, 4, 3)
    state, twin = one.state_dict(), fresh(name, 4, 3)
    for late in LATE if is_old else ():
        state["param_groups"][0].pop(late, None)
    del state["param_groups"][0][option]
    twin.load_state_dict(copy.deepcopy(state))
    sync.save({"opt": state}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"opt": other}, config=SMALL)
    assert_same(other.state_dict(), twin.state_dict())


LATE = ["capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"]


def without_late(name: str, **options: object) -> dict[str, Any]:
    """Give a state that has no option of later versions, and others in its groups."""
    state = stepped(name, 4, 3).state_dict()
    (group,) = state["param_groups"]
    for late in LATE:
        group.pop(late, None)
    group.update(options)
    return state


@pytest.mark.parametrize("saved", ["Adamax", "RAdam"])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_takes_no_old_state_of_those_that_have_no_amsgrad(
    tmp_path: Path, name: str, saved: str
) -> None:
    """RAdam has the options and the moments of Adam before it had one, and is another."""
    sync.save({"opt": without_late(saved)}, tmp_path / "c", config=SMALL)
    with pytest.raises(MismatchError, match=rf"target is {name}, .* groups have no 'amsgrad'"):
        sync.load(tmp_path / "c", {"opt": fresh(name, 4, 3)}, config=SMALL)


@pytest.mark.parametrize("option", ["bias_correction", "correct_bias"])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_takes_the_state_of_adam_of_others(tmp_path: Path, name: str, option: str) -> None:
    """In apex, DeepSpeed and transformers it has no amsgrad, and moments and steps as in torch."""
    state, twin, other = without_late(name, **{option: True}), fresh(name, 4, 3), fresh(name, 4, 3)
    del state["param_groups"][0]["amsgrad"]
    state["state"][0]["step"] = 1
    twin.load_state_dict(copy.deepcopy(state))
    sync.save({"opt": state}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"opt": other}, config=SMALL)
    assert_same(other.state_dict(), twin.state_dict())


@pytest.mark.parametrize("option", ["grad_averaging", "max_coeff"])
def test_adam_takes_no_state_of_lamb(tmp_path: Path, option: str) -> None:
    state = without_late("Adam", bias_correction=True, **{option: 1.0})
    del state["param_groups"][0]["amsgrad"]
    sync.save({"opt": state}, tmp_path / "c", config=SMALL)
    with pytest.raises(MismatchError, match=r"target is Adam, .* groups have no 'amsgrad'"):
        sync.load(tmp_path / "c", {"opt": fresh("Adam", 4, 3)}, config=SMALL)


def test_adam_takes_the_state_of_adamw_without_its_options(tmp_path: Path) -> None:
    """They have the same moments, and the groups stay as they are."""
    one, other = stepped("AdamW", 4, 3), fresh("Adam", 4, 3)
    sync.save({"opt": one}, tmp_path / "c", config=SMALL)
    groups = copy.deepcopy(other.state_dict()["param_groups"])
    sync.load(tmp_path / "c", {"opt": other}, select="opt.state", config=SMALL)
    assert_same(other.state_dict(), {"state": one.state_dict()["state"], "param_groups": groups})
