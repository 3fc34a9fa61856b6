"""Jobs in which ranks do several things at once, or lose one of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import ckptio
from ckptio.events import ExchangePlanned
from ckptio.ranks import join
from tests.ranks.jobs.work import (
    check_same,
    config,
    engine,
    plain_state,
    process_group,
    tensor_named,
    zeros_like,
)

if TYPE_CHECKING:
    from ckptio.events import Event
    from tests.ranks.jobs.worker import Me


def overwrite(me: Me, path: str) -> None:
    """Commit a state, then save another over it; points are those of the second save."""
    stop, me.stop = me.stop, None

    async def work() -> None:
        async with engine(me) as ours:
            await ours.save(plain_state(seed=1), path, overwrite=True)
            me.stop = stop
            me.point("before save")
            await ours.save(plain_state(seed=2), path, overwrite=True)

    asyncio.run(work())


def load_stopped(me: Me, path: str) -> None:
    """Load what was saved, into zeros."""

    async def work() -> None:
        async with engine(me) as ours:
            target = zeros_like(plain_state())
            me.point("before load")
            await ours.load(path, target)
            check_same(target, plain_state(seed=1))

    asyncio.run(work())


def load_once(me: Me, path: str, host: str = "") -> list[bool]:
    """Load what was saved, each byte read by one rank and passed on.

    Args:
        me: This rank.
        path: The checkpoint.
        host: What ranks take their hosts for, with their own numbers; the true ones if empty.

    Returns:
        Whether bytes were passed on, for each load; on rank 0, which plans it.
    """
    if host:
        vars(join)["this_host"] = lambda: f"{host}-{me.rank}"
    seen: list[bool] = []

    def observe(event: Event) -> None:
        if isinstance(event, ExchangePlanned):
            seen.append(event.is_exchanged)

    async def work() -> None:
        async with ckptio.Engine(config(exchange="on"), observer=observe) as ours:
            for _ in range(2):
                target = zeros_like(plain_state())
                await ours.load(path, target)
                check_same(target, plain_state())

    asyncio.run(work())
    return seen


def save_while_training(me: Me, path: str) -> int:
    """Have two saves in flight, again and again, while the trainer reduces in a loop.

    Returns:
        How many reductions were done meanwhile.
    """

    async def work() -> int:
        num_steps = 0
        async with engine(me) as ours:
            for i in range(3):
                states = [plain_state(seed=2 * i), plain_state(seed=2 * i + 1)]
                handles = [
                    ours.save(state, f"{path}/{'ab'[k]}", overwrite=True)
                    for k, state in enumerate(states)
                ]
                done = torch.tensor(0)
                while not int(done):
                    done = torch.tensor(int(all(handle.done() for handle in handles)))
                    dist.all_reduce(done, dist.ReduceOp.MIN)
                    num_steps += 1
                    await asyncio.sleep(0)
                for handle, state in zip(handles, states, strict=True):
                    info = await handle
                    target = zeros_like(state)
                    await ours.load(info.path, target)
                    check_same(target, state)
        return num_steps

    with process_group():
        return asyncio.run(work())


def save_in_groups(me: Me, path: str, num_groups: int) -> int:
    """Save from several groups of one job, each its own state to its own place.

    Returns:
        Which group this rank is in.
    """
    mine = me.rank % num_groups

    async def work() -> None:
        groups = [
            dist.new_group(list(range(k, me.world_size, num_groups))) for k in range(num_groups)
        ]
        async with engine(me, ranks=groups[mine]) as ours:
            state: dict[str, Any] = {"w": tensor_named("w", (100, 7), seed=mine), "group": mine}
            for _ in range(2):
                await ours.save(state, f"{path}/{mine}", overwrite=True)
            target: dict[str, Any] = {"w": torch.zeros(100, 7), "group": -1}
            await ours.load(f"{path}/{mine}", target)
            assert torch.equal(target["w"], state["w"])
            assert target["group"] == mine

    with process_group():
        asyncio.run(work())
    return mine
