"""Runs of saves by ranks whose states change now and then, each on its own."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio.config import KiB, MiB
from ckptio.errors import RankError
from ckptio.testing import MemoryStorage, run_virtual
from tests.job_rig import job, shards_of
from tests.rig import config_with, inline_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio import Engine
    from ckptio.config import CheckpointConfig

NAMES = [f"t{i}" for i in range(6)]
NUM_SAVES = 5
# large enough that a replica is cut between its writers
SIZES = [0, 3, 300, 64 * KiB, 100 * KiB]


class Run:
    """States of ranks, drawn from a seed: who has which tensors, whole or cut."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world_size = self.rng.randint(2, 4)
        self.step = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._numel = {name: self.rng.choice(SIZES) for name in NAMES}
        self._is_cut = {name: self.rng.random() < 0.3 for name in NAMES}
        self.held = [
            {name for name in NAMES if self.rng.random() < 0.6} for _ in range(self.world_size)
        ]

    def advance(self) -> None:
        """Give all tensors other values, and change what a rank or two hold."""
        self.step += 1
        for rank in self.rng.sample(range(self.world_size), self.rng.choice([0, 1, 1, 2])):
            name = self.rng.choice(NAMES)
            if self.rng.random() < 0.3:
                self.held[rank] -= {name}
            else:
                self.held[rank] |= {name}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Give the tensors that any rank has now."""
        names = {name for held in self.held for name in held}
        names |= {name for name in NAMES if self._is_cut[name]}
        found = {
            name: torch.randn(self._numel[name], generator=self._generator)
            for name in sorted(names)
        }
        own = {
            f"own{rank}": torch.full((rank + 1,), float(self.step))
            for rank in range(self.world_size)
        }
        return {**found, **own}

    def states(self, tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        """Give the state of each rank; all ranks have a part of what is cut."""
        cut = {
            name: shards_of(tensor, (self.world_size,))
            for name, tensor in tensors.items()
            if self._is_cut.get(name)
        }
        states: list[dict[str, Any]] = []
        for rank, held in enumerate(self.held):
            whole = {name: tensors[name] for name in sorted(held - cut.keys())}
            own = {f"own{rank}": tensors[f"own{rank}"], "step": self.step}
            states.append({**whole, **{name: cut[name][rank] for name in cut}, **own})
        return states


def config_of(rng: random.Random) -> CheckpointConfig:
    return config_with(
        replicate=rng.choice(["once", "local"]),
        pool_nbytes=4 * MiB,
        slab_nbytes=256 * KiB,
        block_nbytes=64 * KiB,
        bucket_nbytes=rng.choice([256 * KiB, 2 * MiB]),
    )


def check_run(seed: int) -> None:
    """Save a few times, at most twice each, and load what was saved with one rank."""
    run = Run(seed)
    config = config_of(run.rng)

    async def scenario() -> None:
        place = MemoryStorage("memory", seed=seed, max_delay_s=run.rng.choice([0, 0.01]))
        joins_pieces = run.rng.random() < 0.5
        async with job(
            run.world_size, place, config, seed=seed, joins_pieces=joins_pieces
        ) as ranks:
            for _ in range(NUM_SAVES):
                tensors = run.tensors()
                states = run.states(tensors)

                async def save(rank: int, engine: Engine, states: Sequence[Any] = states) -> None:
                    await engine.save(states[rank], "memory", overwrite=True)

                before = place.manifest
                results = await ranks.each(save)
                if results[0] is not None:  # a rank dropped what it was to write for others
                    assert place.manifest == before
                    assert {type(error) for error in results} == {RankError}
                    assert len({str(error) for error in results}) == 1
                    assert "save again" in str(results[0])
                    results = await ranks.each(save)
                assert results == [None] * run.world_size
                assert place.leftovers() == []
                async with inline_engine({"memory": place}, config) as engine:
                    loaded = await engine.load("memory")
                assert loaded.pop("step") == run.step
                assert sorted(loaded) == sorted(tensors)
                for name, tensor in tensors.items():
                    assert torch.equal(loaded[name], tensor), (name, run.step)
                run.advance()

    run_virtual(scenario(), seed=seed)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_loaded_is_what_ranks_held(seed: int) -> None:
    """Whoever gained or dropped tensors since the last save; none is there from an old save."""
    check_run(seed)


@pytest.mark.stress
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_what_is_loaded_is_what_ranks_held_for_many_seeds(first: int) -> None:
    """The same, of a thousand jobs."""
    for seed in range(first, first + 50):
        check_run(seed)
