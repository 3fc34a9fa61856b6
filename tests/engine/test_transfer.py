"""Copies to a second tier by several workers, which share files and slabs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio.config import KiB, MiB
from ckptio.testing import MemoryStorage
from tests.rig import config_with, inline_engine, random_state
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from ckptio.testing import Operation

#: A quarter of the slabs, those that copies may hold, is more than one.
LARGE = config_with(pool_nbytes=2 * MiB)
SMALL_FILES = config_with(pool_nbytes=2 * MiB, bucket_nbytes=64 * KiB)


def storages(*names: str) -> dict[str, MemoryStorage]:
    return {name: MemoryStorage(name, seed=i, max_delay_s=1.0) for i, name in enumerate(names)}


@in_virtual_time
async def test_a_file_is_opened_once_whoever_brings_its_parts() -> None:
    """Another one would stay open."""
    places = storages("near/a", "far/a")
    near, far = places.values()
    async with inline_engine(places, LARGE) as engine:
        assert engine._core.context.copy_line.max_slabs > 1
        await engine.save(random_state([900 * KiB]), "near/a", then="far/a").durable
    kinds = [each.kind for each in (*near.operations, *far.operations)]
    assert kinds.count("open") == len(near.files)
    assert kinds.count("create") == 2 * len(near.files)
    assert far.files == near.files


@in_virtual_time
async def test_all_copies_together_leave_slabs_to_saves() -> None:
    """However many there are."""
    leased: list[int] = []

    places = storages("near/a", "near/b", "far/a", "far/b")
    async with inline_engine(places, SMALL_FILES) as engine:
        context = engine._core.context

        def look(_: Operation) -> None:
            leased.append(context.pool.statistics().leased_nbytes)

        state = random_state([64 * KiB] * 20)
        handles = [engine.save(state, f"near/{name}", then=f"far/{name}") for name in "ab"]
        for handle in handles:
            await handle
        places["far/a"].fault = places["far/b"].fault = look
        for handle in handles:
            await handle.durable
        assert max(leased) == context.copy_line.max_slabs * SMALL_FILES.slab_nbytes
