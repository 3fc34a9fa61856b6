"""Jobs about values of ranks: kept apart, equal, or refused."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from ckptio import PerRank, Shard
from tests.ranks.jobs.work import engine, process_group, tensor_named

if TYPE_CHECKING:
    from tests.ranks.jobs.worker import Me


def save_random_states(me: Me, path: str) -> list[float]:
    """Save random states of this rank, and give what they make next."""
    torch.manual_seed(me.rank)
    rng = random.Random(me.rank)

    async def work() -> None:
        async with engine(me) as ours:
            state = {
                "torch": PerRank(torch.get_rng_state()),
                "python": PerRank(rng.getstate()),
                "step": 3,
            }
            await ours.save(state, path)

    asyncio.run(work())
    return [float(torch.rand(())), rng.random()]


def load_random_states(me: Me, path: str) -> list[float]:
    """Take the random states of this rank; keep its own where it had none."""
    torch.manual_seed(100 + me.rank)
    rng = random.Random(100 + me.rank)

    async def work() -> None:
        async with engine(me) as ours:
            target: dict[str, Any] = {
                "torch": PerRank(torch.get_rng_state()),
                "python": PerRank(rng.getstate()),
                "step": 0,
            }
            await ours.load(path, target, strict="ignore")
            assert target["step"] == 3
            found = {key: _inside(target[key]) for key in ("torch", "python")}
            torch.set_rng_state(found["torch"])
            rng.setstate(found["python"])

    asyncio.run(work())
    return [float(torch.rand(())), rng.random()]


def _inside(value: Any) -> Any:
    return value.value if isinstance(value, PerRank) else value


def save_different(me: Me, path: str) -> None:
    """Save a value that is another on each rank."""

    async def work() -> None:
        async with engine(me) as ours:
            await ours.save({"w": torch.ones(3), "data": {"position": me.rank}}, path)

    asyncio.run(work())


def save_with_gap(me: Me, path: str, rows: list[list[int]]) -> None:
    """Save a tensor of which ranks have the given rows, `[start, stop)`."""
    start, stop = rows[me.rank]
    whole = tensor_named("w", (10, 3))
    shard = Shard(whole[start:stop], global_shape=(10, 3), global_offset=(start, 0))

    async def work() -> None:
        async with engine(me) as ours:
            await ours.save({"w": shard}, path)

    asyncio.run(work())


def save_what_one_cannot(me: Me, path: str) -> None:
    """Save a state that one rank alone cannot save."""

    async def work() -> None:
        async with engine(me) as ours:
            await ours.save({"w": torch.ones(3), "x": object() if me.rank == 1 else 1}, path)

    asyncio.run(work())


def train_with_zero(me: Me, path: str, steps: list[int]) -> list[float]:
    """Go on with an optimizer whose moments are on all ranks, as the page about ranks says."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    kept: Any = None

    async def load() -> None:
        target: dict[str, Any] = {"model": model, "optimizer": None}
        async with engine(me) as ours:
            await ours.load(path, target)
        optimizer.load_state_dict(target["optimizer"])

    async def save() -> None:
        state = {"model": model} if me.rank else {"model": model, "optimizer": kept}
        async with engine(me) as ours:
            await ours.save(state, path)

    with process_group():
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
        )
        if steps[0]:
            asyncio.run(load())
        for step in range(*steps):
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not steps[0]:
            optimizer.consolidate_state_dict(to=0)
            if me.rank == 0:
                kept = optimizer.state_dict()
            asyncio.run(save())
    return [float(parameter.double().sum()) for parameter in model.parameters()]
