"""Plans of saves by many ranks whose states change, one rank's apart from another's."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import PerRank
from ckptio.testing import run_virtual
from tests.job_rig import Job, job
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from ckptio import Engine
    from ckptio.handle import SaveHandle


#: Elements of the large tensor, by those of the others: small ones, and such as are cut.
_ALL = {300: 3000, 300_000: 1_500_000}


def state_of(rank: int, length: int, unit: int = 300) -> dict[str, Any]:
    own = {"buffer": PerRank(torch.full((length,), float(rank)))}
    more = {f"w{i}": torch.ones(unit) for i in range(8)}
    return {**own, "all": torch.ones(_ALL[unit]), "more": more}


async def check(ranks: Job, path: str, lengths: list[int], unit: int = 300) -> None:
    async def load(rank: int, engine: Engine) -> None:
        found = await engine.load(path)
        assert torch.equal(found["buffer"], torch.full((lengths[rank],), float(rank)))
        assert torch.equal(found["all"], torch.ones(_ALL[unit]))
        assert all(torch.equal(found["more"][f"w{i}"], torch.ones(unit)) for i in range(8))

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


_SMALL = [(seed, changes, 300) for seed in (*range(12), 121, 156) for changes in (False, True)]
#: Of tensors that are cut, for several ranks to write; with a new plan made from nothing some of
#: these saves find none that fits all.
_CUT = [(seed, True, 300_000) for seed in (13, 14, 15)]


@pytest.mark.parametrize(("seed", "changes", "unit"), _SMALL + _CUT)
def test_saves_that_overlap_follow_plans_that_fit(seed: int, changes: bool, unit: int) -> None:  # noqa: FBT001  # a case has it
    """Whichever plan each rank knew when it began.

    What did not change has one writer in all of them, whatever else each rank has.
    """
    longest = 5000 if unit < 1000 else 400_000

    async def scenario() -> None:
        rng = random.Random(seed)
        async with job(3, seed=seed) as ranks:
            handles: list[SaveHandle] = []
            lengths = [2] * 3
            for _ in range(15):
                if changes:
                    lengths = [rng.choice((old, 1, 2, longest)) for old in lengths]
                for handle in handles[-6:-3]:  # two at a time, which all ranks begin in one order
                    await handle
                handles += [
                    engine.save(state_of(rank, lengths[rank], unit), "memory", overwrite=True)
                    for rank, engine in enumerate(ranks.engines)
                ]
                for handle in handles[-3:] if rng.random() < 0.5 else ():
                    await handle.staged
            for handle in handles:
                await handle
            await check(ranks, "memory", lengths, unit)

    run_virtual(scenario(), seed=seed)


@in_virtual_time
async def test_a_value_that_some_ranks_alone_have_by_now_is_saved() -> None:
    """They had the tree of another rank before, which sends it; nobody sends theirs."""
    async with job(3) as ranks:
        for some in (set[int](), {1}, {1, 2}):

            async def save(rank: int, engine: Engine, some: set[int] = some) -> None:
                more = {"epoch": 7} if rank in some else {}
                await engine.save({"w": torch.ones(3), **more}, "memory", overwrite=True)
                found = await engine.load("memory")
                assert found.get("epoch") == (7 if some else None)

            await ranks.all(save)
