"""Copies of a part's state, told by what was loaded of them: blocks, views, and some names."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from ckptio import TargetError, sync
from tests.rig import SMALL
from tests.state.objects import loaded, net_of
from tests.state.ranks import as_rank, load, mesh_of, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Trainer:
    """It gives what it has, copied, and takes what it is given."""

    model: Any

    def __init__(self, model: Any) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Stating(Trainer):
    """One that gives the state of its model, copied."""

    def state_dict(self) -> dict[str, Any]:
        held = self.model.state_dict()
        return {"model": {name: tensor.detach().clone() for name, tensor in held.items()}}


class Trained(Trainer):
    """One that gives what is trained alone: the very tensors."""

    def state_dict(self) -> dict[str, Any]:
        return {"model": {"weight": self.model.weight.detach()}}


BESIDE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda model: model,
    "in another object": Stating,
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("is_same", [True, False])
def test_blocks_of_copies_are_compared(
    beside: Callable[[Any], Any], rank: int, *, is_same: bool
) -> None:
    """A model of DTensors became a dict, as nothing of them was found."""

    def model_of(rank: int, value: float) -> torch.nn.Module:
        net = torch.nn.Linear(2, 4)
        for name, whole in list(net.named_parameters()):
            local = torch.full_like(whole.detach()[:2], value + rank)
            part = DTensor.from_local(local, mesh_of((2,)), [Shard(0)], run_check=False)
            setattr(net, name, torch.nn.Parameter(part))
        return net

    def state_of(rank: int) -> Any:
        model = model_of(rank, 1)
        other = model if is_same else model_of(rank, 3)
        return {"x": beside(model), "t": Stating(other)}

    saved = save(2, state_of)
    with as_rank(rank, 2):
        both = model_of(rank, 9)
        target = {"x": beside(both), "t": (trainer := Stating(both))}
        _, restoration = load(saved, target)
        assert (trainer.model is both, restoration.notes == []) == (is_same, is_same)
        assert both.get_parameter("weight").to_local().eq(1 + rank).all()  # type: ignore[attr-defined]  # a DTensor


class Views(torch.nn.Module):
    """A module whose buffers are views of one memory."""

    def __init__(self, value: float) -> None:
        super().__init__()
        memory = torch.arange(24.0).view(4, 6) + value
        self.register_buffer("left", memory[:, :3])
        self.register_buffer("turned", memory.t())


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("kind", [Trainer, Stating])
def test_views_in_copies_are_compared(
    tmp_path: Path, kind: type[Trainer], beside: Callable[[Any], Any]
) -> None:
    """Views of one memory are stored as such, and clones of them are not."""
    one, both = Views(1), Views(9)
    trainer = kind(both)
    saved = {"x": beside(one), "t": kind(one)}
    result = loaded(tmp_path, saved, {"x": beside(both), "t": trainer}, strict="raise")
    assert result.report.notes == ()
    assert trainer.model is both
    assert torch.equal(both.state_dict()["turned"], one.state_dict()["turned"])
    saved = {"x": beside(one), "t": Trainer(Views(5))}
    with pytest.raises(TargetError, match=r"is one object with 'x.*' in the target and another"):
        loaded(tmp_path, saved, {"x": beside(both), "t": Trainer(both)})


@pytest.mark.parametrize(
    "select", [["x.*", "t.model.weight"], ["x.weight", "t.*"], ["x.bias", "t.model.weight"]]
)
def test_some_names_of_a_copy_contradict_nothing(tmp_path: Path, select: list[str]) -> None:
    one, both = net_of(1), net_of(9)
    sync.save({"x": one, "t": Trainer(one)}, tmp_path / "c", config=SMALL)
    trainer = Trainer(both)
    sync.load(tmp_path / "c", {"x": both, "t": trainer}, select=select, config=SMALL)
    assert trainer.model is both
    assert both.weight.eq(1).all()


def test_who_gives_some_names_has_it_said_what_is_missing(tmp_path: Path) -> None:
    """Not that it has another state: it is the very tensor."""
    one, both = net_of(1), net_of(9)
    trainer = Trained(both)
    with pytest.raises(TargetError, match="Missing key"):
        loaded(tmp_path, {"x": one, "t": Trained(one)}, {"x": both, "t": trainer})
