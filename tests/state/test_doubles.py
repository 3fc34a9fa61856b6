"""What stands at two places of a target, and has a value of its own for each in the checkpoint."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ckptio import PerRank, TargetError, sync
from tests.state.objects import Loader, loaded

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Options:
    rate: float = 0.0
    betas: list[float] = field(default_factory=list)


@pytest.mark.parametrize("shape", ["dict", "list", "dict in tuples"])
@pytest.mark.parametrize(
    ("one", "other", "target"),
    [
        ([1], [2], [0]),
        ({"k": 1}, {"k": 2}, {"k": 0}),
        (OrderedDict(k=1), OrderedDict(k=2), OrderedDict(k=0)),
        (Counter(k=1), Counter(k=2), Counter(k=3)),
        (Options(1, [0.5]), Options(2, [0.75]), Options(0, [0.0])),
        (([1],), ([2],), ([0],)),
        ([{"k": 1}], [{"k": 2}], [{"k": 0}]),
        (PerRank([1]), PerRank([2]), PerRank([0])),
    ],
    ids=str,
)
def test_each_place_has_its_own(
    tmp_path: Path, one: Any, other: Any, target: Any, shape: str
) -> None:
    """What is one in the target would have the values of the last at both."""
    saved, into = {"a": one, "b": other}, {"a": target, "b": target}
    if shape == "list":
        saved, into = {"x": [one, other]}, {"x": [target] * 2}
    elif shape != "dict":
        saved, into = {"a": (one,), "b": (other,)}, {"a": (target,), "b": (target,)}
    result = loaded(tmp_path, saved, into)
    assert repr(result.state) == repr(saved)
    report = result.report
    assert report.missing == report.unexpected == report.mismatched == report.notes == ()


def test_what_is_equal_in_the_checkpoint_stays_one(tmp_path: Path) -> None:
    """And is the very object that it was."""
    both, options = {"k": [0]}, Options()
    saved = {"a": {"k": [1]}, "b": {"k": [1]}, "c": Options(2), "d": Options(2)}
    state = loaded(tmp_path, saved, {"a": both, "b": both, "c": options, "d": options}).state
    assert state["a"] is state["b"] is both
    assert both == {"k": [1]}
    assert state["c"] is state["d"] is options
    assert options.rate == 2


def test_only_what_is_selected_comes_apart(tmp_path: Path) -> None:
    """What is not selected has what it had, and is one where nothing of it is."""
    saved = {"a": [1], "b": [2], "c": 3}
    both = [0]
    assert loaded(tmp_path, saved, {"a": both, "b": both}, select="b").state == {"a": [0], "b": [2]}
    both = [0]
    assert loaded(tmp_path, saved, {"a": both, "b": both}, select="a").state == {"a": [1], "b": [0]}
    state = loaded(tmp_path, saved, {"a": both, "b": both, "c": 0}, select="c").state
    assert state["a"] is state["b"]


@pytest.mark.parametrize("kind", ["object", "strings"])
def test_an_object_takes_the_state_of_the_first_place(tmp_path: Path, kind: str) -> None:
    """As tensors do, with the same note: nobody knows which was meant."""
    target: Any = Loader()
    saved: dict[str, Any] = {"a": Loader(1), "b": Loader(2)}
    if kind == "strings":  # numpy fills these, not a read
        target, saved = np.array(["x"]), {"a": np.array(["1"]), "b": np.array(["2"])}
    result = loaded(tmp_path, saved, {"a": target, "b": target})
    assert (target.at if kind == "object" else int(target[0])) == 1
    assert result.report.notes == (
        "b: is one object with 'a' in the target and another in the checkpoint; 'a' was loaded",
    )
    assert loaded(tmp_path, saved, {"a": target, "b": target}, select="b").report.notes == ()
    assert (target.at if kind == "object" else int(target[0])) == 2


class Drawing:
    """Makes its state anew whenever it is asked, and moves then, as some data loaders do."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.taken: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        self.num_asked += 1
        return {"t": torch.full((300,), self.num_asked), "a": np.full(300, self.num_asked)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken.append(state)


def test_an_object_at_two_places_is_asked_once_and_stored_once(tmp_path: Path) -> None:
    """Its state is of one moment, and loads into both places without a word."""
    drawing = Drawing()
    state = {"a": drawing, "b": [drawing]}
    sync.save(state, tmp_path / "c")
    assert drawing.num_asked == 1
    assert sum(tensor.nbytes for tensor in sync.inspect(tmp_path / "c").tensors) == 2 * 300 * 8
    report = sync.load_with_report(tmp_path / "c", into=state).report
    assert report.notes == ()
    assert drawing.taken[-1]["t"].tolist() == drawing.taken[-1]["a"].tolist() == [1] * 300


def schedulers() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.SequentialLR]:
    kinds = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.01)
    parts = [kinds.LinearLR(optimizer, total_iters=4), kinds.CosineAnnealingLR(optimizer, 20)]
    return optimizer, kinds.SequentialLR(optimizer, parts, [4])


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of torch itself, before 2.7
def test_the_state_dict_of_a_sequence_of_schedulers_is_filled(tmp_path: Path) -> None:
    """Of a fresh one, a list is its own and one of its first part's; no longer of a used one."""
    optimizer, used = schedulers()
    for _ in range(8):
        optimizer.step()
        used.step()
    expected = copy.deepcopy(used.state_dict())
    _, fresh = schedulers()
    state = loaded(tmp_path, {"s": expected}, {"s": fresh.state_dict()}).state["s"]
    assert state == expected
    fresh.load_state_dict(state)
    assert fresh.get_last_lr() == used.get_last_lr()


def test_versions_of_modules_come_along(tmp_path: Path) -> None:
    """What is copied is still the state of a module."""
    module = torch.nn.BatchNorm1d(2)
    saved = {"a": module.state_dict(), "b": torch.nn.BatchNorm1d(2).state_dict()}
    both: Any = torch.nn.BatchNorm1d(2).state_dict()
    state = loaded(tmp_path, saved, {"a": both, "b": both}).state
    assert state["b"] is not both
    assert state["b"]._metadata == state["a"]._metadata == both._metadata


class Stubborn(dict[str, int]):
    """A container that does not let itself be copied."""

    def __copy__(self) -> Stubborn:
        raise RuntimeError("there is one")


def test_a_container_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    """Before anything changes."""
    both = Stubborn(k=0)
    with pytest.raises(TargetError, match=r"'b' is one Stubborn with.*there is one"):
        loaded(tmp_path, {"a": {"k": 1}, "b": {"k": 2}}, {"a": both, "b": both})
    assert both == {"k": 0}
