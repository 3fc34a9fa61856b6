"""Plans of saves by many ranks whose states change, one rank's apart from another's."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import PerRank
from ckptio.testing import run_virtual
from tests.job_rig import Job, job

if TYPE_CHECKING:
    from ckptio import Engine
    from ckptio.handle import SaveHandle


def state_of(rank: int, length: int, *, shares: bool = True) -> dict[str, Any]:
    own = {"buffer": PerRank(torch.full((length,), float(rank)))}
    return {**own, "all": torch.ones(3000)} if shares else own


async def check(ranks: Job, path: str, lengths: list[int], *, shares: bool = True) -> None:
    async def load(rank: int, engine: Engine) -> None:
        found = await engine.load(path)
        assert torch.equal(found["buffer"], torch.full((lengths[rank],), float(rank)))
        assert not shares or torch.equal(found["all"], torch.ones(3000))

    await ranks.all(load)


@pytest.mark.parametrize("seed", range(3))
def test_each_rank_may_come_back_to_a_structure_of_its_own(seed: int) -> None:
    """One saved what it has now in one save, and another in another: that is no plan of both."""

    async def scenario() -> None:
        async with job(2, seed=seed) as ranks:
            for lengths in [(2, 2), (3, 3), (2, 3), (2, 3), (3, 2)]:

                async def save(
                    rank: int, engine: Engine, lengths: tuple[int, int] = lengths
                ) -> bool:
                    state = state_of(rank, lengths[rank])
                    return (await engine.save(state, "memory", overwrite=True)).plan_reused

                await ranks.all(save)
                await check(ranks, "memory", [*lengths])

    run_virtual(scenario(), seed=seed)


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("seed", [*range(8), 121, 156])
def test_saves_that_overlap_follow_plans_that_fit(seed: int, *, changes: bool) -> None:
    """Whichever plan each rank knew when it began.

    Of states that change, only what no two ranks have: who writes what both have may be one
    rank in one plan and the other in the next, and then there is none for both.
    """

    async def scenario() -> None:
        rng = random.Random(seed)
        async with job(3, seed=seed) as ranks:
            handles: list[SaveHandle] = []
            lengths = [2] * 3
            for _ in range(15):
                if changes:
                    lengths = [rng.choice((old, 1, 2)) for old in lengths]
                for handle in handles[-6:-3]:  # two at a time, which all ranks begin in one order
                    await handle
                handles += [
                    engine.save(
                        state_of(rank, lengths[rank], shares=not changes), "memory", overwrite=True
                    )
                    for rank, engine in enumerate(ranks.engines)
                ]
                for handle in handles[-3:] if rng.random() < 0.5 else ():
                    await handle.staged
            for handle in handles:
                await handle
            await check(ranks, "memory", lengths, shares=not changes)

    run_virtual(scenario(), seed=seed)
