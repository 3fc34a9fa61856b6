"""Tests for what has to be the same on all ranks, though it is stored as a tensor."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckptio.errors import PlanError
from ckptio.plan.trees import merge_trees, take_tree
from ckptio.state.flatten import flatten
from tests.state.ranks import save

if TYPE_CHECKING:
    from collections.abc import Callable

Linear = torch.nn.Linear


def stepped(module: torch.nn.Module, seed: int = 0) -> torch.optim.Optimizer:
    """Make an optimizer that has stepped, and its parameters the same whatever the seed is."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1)
    return optimizer


def spread(rank: int, ranks: list[int]) -> dict[str, Any]:
    """Make what a rank holds of a parameter on a mesh of its own, and an optimizer of it."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=(f"x{rank}",))
    local = torch.ones(4, 2)
    whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(whole)
    optimizer = torch.optim.Adam(module.parameters(), foreach=False)
    module.weight.grad = torch.ones_like(whole)
    optimizer.step()
    return {"stage": module.state_dict(), "optimizer": optimizer}


def stage(rank: int) -> dict[str, Any]:
    made = spread(rank, [rank])
    return {f"stage{rank}": made["stage"], "optimizer": made["optimizer"]}


def states(rank: int) -> dict[str, Any]:
    return {"o": stepped(Linear(2, 2), rank).state_dict()}


def rated(rank: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(Linear(2, 2).parameters(), lr=torch.tensor(0.1 * (rank + 1)))


class Formed(torch.optim.Adam):
    """Gives its state in a form of its own."""

    def __init__(self, form: Callable[[dict[str, Any]], Any], rank: int) -> None:
        module = Linear(2, 2)
        super().__init__(module.parameters())
        self.state.update(
            (parameter, {"moment": torch.full((2,), float(rank))})
            for parameter in module.parameters()
        )
        self.form = form

    def state_dict(self) -> dict[str, Any]:
        return dict(self.form(super().state_dict()))


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "by words": lambda d: {**d, "state": {str(k): v for k, v in d["state"].items()}},
    "in a list": lambda d: {**d, "state": list(d["state"].values())},
    "in order": lambda d: {**d, "state": OrderedDict(d["state"])},
    "without groups": lambda d: {"state": d["state"]},
    "beside": lambda d: {"state": {}, "slow": [v["moment"] for v in d["state"].values()]},
    "by names": lambda d: {"state": {"w": d["state"][0]}, "param_groups": []},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_all_that_an_optimizer_has_is_the_same(form: Callable[[dict[str, Any]], Any]) -> None:
    """In whatever form it says so."""
    with pytest.raises(PlanError, match=r"is a tensor \(crc32c \w+\) on rank 0"):
        save(2, lambda rank: {"o": Formed(form, rank)})


class Extra(Linear):
    """Has more than tensors."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("make", [lambda n: bytes(2000) + bytes([n]), lambda n: np.full(9, n)])
def test_bytes_and_arrays_of_a_module_are_values_too(make: Callable[[int], Any]) -> None:
    for form in (lambda module: module, lambda module: module.state_dict()):
        with pytest.raises(PlanError, match="_extra_state' is"):
            save(2, lambda rank, form=form: {"m": form(Extra(make(rank)))})  # type: ignore[misc]


DIFFERENT: dict[str, tuple[Callable[[int], Any], str]] = {
    "moments in a dict": (states, r"'o\.state\.0\.exp_avg' is a tensor \(crc32c \w+\) on rank 0"),
    "in a list": (lambda rank: [states(rank)["o"]], r"'0\.state\.0\.exp_avg' is a tensor"),
    "rates": (lambda rank: {"o": rated(rank)}, r"'o\.param_groups\.0\.lr' is a tensor"),
    "of a stage over a mesh": (stage, r"exp_avg' is a tensor \(of 'stage0\.weight'\) on rank 0"),
}


@pytest.mark.parametrize(("make", "words"), DIFFERENT.values(), ids=DIFFERENT)
def test_moments_of_other_parameters_are_no_copies(make: Callable[[int], Any], words: str) -> None:
    """Whoever called `state_dict()`, and whatever the parameters are spread over."""
    with pytest.raises(PlanError, match=words):
        save(2, make)


def test_stages_of_a_pipeline_are_told_to_take_names_of_their_own() -> None:
    """`PerRank` around their optimizers would save the parameters of one stage for all."""
    with pytest.raises(PlanError, match="give their parameters and optimizers names of their own"):
        save(2, lambda rank: {"m": Linear(2, 2), **states(rank)})
    with pytest.raises(PlanError, match=r"ckptio\.PerRank$"):
        save(2, lambda rank: {"position": bytes(2000) + bytes([rank])})
    for name in ("random", "m"):  # that is what they are to take
        with pytest.raises(PlanError, match=r"ckptio\.PerRank$"):
            save(2, lambda rank, name=name: {name: torch.Generator().manual_seed(rank).get_state()})  # type: ignore[misc]


class Composite(torch.optim.Optimizer):
    """Has optimizers, and is none that torch knows of."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {str(i): part.state_dict() for i, part in enumerate(self.parts)}


def masked(rank: int) -> torch.nn.Module:
    module = Linear(2, 2)
    module.register_buffer("mask", torch.full((2,), rank, dtype=torch.uint8))
    return module


def with_model_on_first(rank: int) -> dict[str, Any]:
    module = Linear(2, 2)
    return {"optimizer": stepped(module), **({} if rank else {"model": module})}


SAME: dict[str, Callable[[int], Any]] = {
    "one rank has the model": with_model_on_first,
    "buffers of a state": lambda rank: {"net": masked(rank).state_dict()},
    "one mesh": lambda rank: spread(rank, [0, 1]),
    "one mesh, no weights": lambda rank: {"o": spread(rank, [0, 1])["optimizer"].state_dict()},
    "a mesh for each row": lambda rank: {"o": spread(rank, [rank])["optimizer"].state_dict()},
    "an optimizer of others": lambda _: {"o": Composite(stepped(Linear(2, 2)))},
    "no numbers": lambda rank: {"state": {"a": torch.ones(1) * rank}, "param_groups": []},
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_what_ranks_do_not_contradict_each_other_in_is_one(make: Callable[[int], Any]) -> None:
    """A rank may know more than another; buffers and states by name are taken for copies."""
    saved = save(2, make)
    assert b'"mark"' not in bytes(saved.manifest.tree)


@pytest.mark.parametrize("word", ["mark", "of", "crc32c", "unsure", "t", "v", "m"])
def test_a_part_may_be_called_like_what_a_mark_is_called(word: str) -> None:
    """A pipeline has a stage of that name, of which each rank has other layers."""

    def make(rank: int) -> dict[str, Any]:
        layers = {f"layer{rank}": Linear(2, 2).state_dict(), "seen": masked(1), f"n{rank}": rank}
        return {"net": {word: layers}}

    saved = save(2, make)
    layers = msgspec.json.decode(saved.manifest.tree)["net"][word]
    assert list(layers) == ["layer0", "seen", "n0", "layer1", "n1"]
    names = {entry.name for entry in saved.manifest.tensors}
    assert {f"net.{word}.layer{rank}.weight" for rank in range(2)} < names


def test_a_default_device_does_not_hide_what_differs() -> None:
    """What is in the host's memory is summed up there, whatever device tensors are made on."""
    made = [{"o": stepped(Linear(64, 64), rank), "x": long_bytes(rank)} for rank in range(2)]
    with torch.device("meta"):
        flats = [flatten(state, rank) for rank, state in enumerate(made)]
    trees = [take_tree(flat.tree, flat.names) for flat in flats]
    with pytest.raises(PlanError, match=r"disagree on 5 values"):
        merge_trees(trees, {name: i for i, name in enumerate(flats[0].names)})


def long_bytes(rank: int) -> torch.Tensor:
    return torch.full((2 << 20,), rank, dtype=torch.uint8)
