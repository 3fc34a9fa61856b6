"""Jobs that save and load states that lie on several ranks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch

from tests.ranks.jobs.work import (
    Layout,
    check_same,
    engine,
    large_state,
    process_group,
    sums,
    zeros_like,
)

if TYPE_CHECKING:
    from tests.ranks.jobs.worker import Me

#: Of engines of jobs with more ranks than cores, in which nobody is to be given up.
PATIENT = {"peer_timeout_s": 30.0, "meet_timeout_s": 120.0}


def save_and_load_replicas(me: Me, path: str) -> dict[str, Any]:
    """Save a state that every rank has, twice, and fill another with it; no process group."""

    async def work() -> dict[str, Any]:
        async with engine(me) as ours:
            state: dict[str, Any] = {"model": large_state(), "step": 3, "groups": [{"lr": 0.1}]}
            await ours.save(state, path)
            state["model"], state["step"] = large_state(seed=1), 4
            info = await ours.save(state, path, overwrite=True)
            target: dict[str, Any] = {
                "model": zeros_like(large_state()),
                "step": 0,
                "groups": [{"lr": 0.0}],
            }
            await ours.load(path, target)
            check_same(target["model"], large_state(seed=1))
            assert (target["step"], target["groups"]) == (4, [{"lr": 0.1}])
            return {"save_id": info.save_id}

    return asyncio.run(work())


def save_layout(me: Me, path: str, mesh: list[int], placements: list[int]) -> None:
    """Save a state of DTensors."""

    async def work() -> None:
        async with engine(me, **PATIENT) as ours:
            await ours.save(Layout(mesh, placements).state(), path)

    with process_group():
        asyncio.run(work())


def load_layout(
    me: Me, path: str, mesh: list[int], placements: list[int], save_to: str | None = None
) -> None:
    """Load into DTensors, compare every local block; save what was loaded elsewhere."""

    async def work() -> None:
        async with engine(me, **PATIENT) as ours:
            layout = Layout(mesh, placements)
            target = layout.state(seed=None)
            await ours.load(path, target)
            check_same(target, layout.state())
            if save_to is not None:
                await ours.save(target, save_to)

    with process_group():
        asyncio.run(work())


def save_and_load_fsdp(me: Me, path: str) -> dict[str, int]:
    """Train with FSDP2 and AdamW, save, load into another model, and train on alike.

    Returns:
        Sums of the bits of the whole parameters that were saved.
    """
    with process_group():
        first, other = Trainer(seed=1), Trainer(seed=2)
        saved = first.state()
        target = other.state()

        async def work() -> None:
            async with engine(me) as ours:
                await ours.save(saved, path)
                await ours.load(path, target)

        asyncio.run(work())
        whole = {name: tensor.full_tensor() for name, tensor in saved["model"].items()}
        other.take(target)
        for trainer in (first, other):
            trainer.step(seed=9)
        check_same(dict(other.model.named_parameters()), dict(first.model.named_parameters()))
        return sums(whole)


class Trainer:
    """A small model under FSDP2 with its optimizer, one step old."""

    def __init__(self, seed: int, device: str = "cpu", width: int = 13) -> None:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # slow to import

        torch.manual_seed(seed)
        self.device = device
        layers = torch.nn.Linear(7, width), torch.nn.Linear(width, 5)
        self.model = torch.nn.Sequential(*layers).to(device)
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)
        self.step(seed)

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.optimizer.zero_grad()
        numbers = torch.randn(3, 7, generator=generator).to(self.device)
        self.model(numbers).square().sum().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415  # slow to import
            get_state_dict,
        )

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def take(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415  # slow to import
            set_state_dict,
        )

        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
