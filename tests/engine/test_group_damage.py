"""What ranks load together is damaged: all of them catch the same, and load another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ckptio import FormatError, PerRank
from ckptio.testing import MemoryStorage
from tests.job_rig import job
from tests.rig import InlineCore
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from ckptio import Engine


@pytest.mark.parametrize("what", ["manifest", "byte", "end", "gone"])
@pytest.mark.parametrize("seed", range(3))
@in_virtual_time
async def test_ranks_catch_damage_alike_and_load_another(seed: int, what: str) -> None:
    """`except FormatError` on every rank, whichever of them found it."""
    async with job(3, seed=seed) as ranks:

        async def save(rank: int, engine: Engine) -> None:
            for value, name in enumerate(["memory", "older"]):
                tensor = torch.full((2000,), 10.0 * value + rank)
                await engine.save({"t": PerRank(tensor)}, name, overwrite=True)

        older = MemoryStorage("older")
        for rank, engine in enumerate(ranks.engines):
            assert isinstance(engine._core, InlineCore)
            engine._core.use_storages({"memory": ranks.storages[rank], "older": older})
        await ranks.all(save)
        place = ranks.place._place
        name = next(name for name in place.files if "-00001-" in name)
        assert place.manifest is not None
        if what == "manifest":
            place.manifest = place.manifest[:-9] + b"damaged!}"
            place.version += 1000
        elif what == "byte":
            place.files[name][-1] ^= 1
        elif what == "end":
            del place.files[name][-8:]
        else:
            del place.files[name]

        async def load(rank: int, engine: Engine) -> None:
            with pytest.raises(FormatError):
                await engine.load("memory")
            found = await engine.load("older")
            assert torch.equal(found["t"], torch.full((2000,), 10.0 + rank))

        await ranks.all(load)
