"""Copies of a part's state, told by what was loaded of them: blocks, views, and some names."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from ckptio import TargetError, sync
from ckptio.format.encode import TAG
from ckptio.layout import Box
from ckptio.state.fills import Blank, Fill
from ckptio.state.landed import Landed
from ckptio.state.sharded import Block
from tests.rig import SMALL
from tests.state.objects import loaded, net_of
from tests.state.ranks import as_rank, load, mesh_of, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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


def tag_of_tensor(index: int) -> dict[str, Any]:
    return {TAG: index}


def landed_of(*fills: Fill, changed: Callable[[torch.Tensor], object] = lambda _: False) -> Landed:
    return Landed(fills, changed)


def blocks_of(stored: int, tensor: torch.Tensor, at: int) -> Iterator[Fill]:
    """Give what fills two rows of a matrix of four, from `at` on, each as a block of its own."""
    for row in range(2):
        block = Block(Box((at + row, 0), (1, 2)), tensor, (row, 0))
        yield Fill(stored, tensor, f"t{stored}", block=block)


WHOLE = torch.arange(8.0).view(4, 2)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("turned", [False, True])
def test_blocks_are_compared_with_what_was_made_anew(at: int, *, turned: bool) -> None:
    """Each with its own rows of it, whichever comes first; a shorter one is another."""
    landed = landed_of(*blocks_of(0, WHOLE[at : at + 2].clone(), at))
    nodes = [tag_of_tensor(0), tag_of_tensor(1)]
    one, other = reversed(nodes) if turned else nodes
    assert landed.are_alike(one, other, {1: WHOLE})
    for row in range(4):
        made = WHOLE.clone()
        made[row] += 1
        assert landed.are_alike(one, other, {1: made}) == (row not in (at, at + 1))
    assert not landed.are_alike(one, other, {1: WHOLE[: at + 1]})
    assert not landed.are_alike(one, other, {1: WHOLE[:, :1]})


@pytest.mark.parametrize("at", [0, 1, 2])
def test_blocks_that_are_here_of_both_are_compared(at: int) -> None:
    """What this rank has of one alone tells nothing."""
    for row in (0, 1):
        mine = WHOLE[1:3].clone()
        mine[row] += 1
        fills = (*blocks_of(0, mine, 1), *blocks_of(1, WHOLE[at : at + 2].clone(), at))
        is_here = at <= row + 1 < at + 2
        assert landed_of(*fills).are_alike(tag_of_tensor(0), tag_of_tensor(1), {}) != is_here


@pytest.mark.parametrize("written", [0, 1])
def test_what_was_written_to_since_tells_nothing(written: int) -> None:
    """Either of the two."""
    tensors = torch.zeros(2), torch.ones(2)
    fills = [Fill(i, tensor, f"t{i}") for i, tensor in enumerate(tensors)]
    nodes = tag_of_tensor(0), tag_of_tensor(1)
    assert not landed_of(*fills).are_alike(*nodes, {})
    asked = landed_of(*fills, changed=lambda tensor: tensor is tensors[written])
    assert asked.are_alike(*nodes, {})


def test_blocks_are_asked_for_by_the_memory_that_they_are_in() -> None:
    mine, nodes = WHOLE[1:3] + 1, (tag_of_tensor(0), tag_of_tensor(1))
    assert not landed_of(*blocks_of(0, mine, 1)).are_alike(*nodes, {1: WHOLE})
    asked = landed_of(*blocks_of(0, mine, 1), changed=lambda tensor: tensor is mine)
    assert asked.are_alike(*nodes, {1: WHOLE})


def test_what_is_no_tensor_tells_nothing() -> None:
    """Of values the trees are compared."""
    landed = landed_of(Fill(0, WHOLE, "t0"))
    assert landed.are_alike(5, tag_of_tensor(0), {})
    assert landed.are_alike(tag_of_tensor(0), {TAG: "dict", "v": []}, {})


def test_what_is_made_in_place_of_meta_is_compared_once_it_is_made() -> None:
    """It is asked for by the memory that it has then."""
    blank = Blank("t0", torch.empty(2, device="meta"), None)
    asked: list[torch.Tensor] = []
    landed = landed_of(Fill(0, blank, "t0"), changed=asked.append)
    blank.value().fill_(1)
    assert landed.are_alike(tag_of_tensor(0), tag_of_tensor(1), {1: torch.ones(2)})
    assert not landed.are_alike(tag_of_tensor(0), tag_of_tensor(1), {1: torch.zeros(2)})
    assert asked[0] is blank.value()
