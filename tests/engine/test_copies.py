from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio import sync
from ckptio.config import KiB, MiB
from ckptio.format.manifest import Chunk, Manifest, decode_manifest
from ckptio.testing import MemoryStorage
from tests.job_rig import job, shards_of
from tests.rig import SMALL, config_with, inline_engine
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio import Engine, VerifyReport

LOCAL = config_with(replicate="local", local_replica_nbytes=1 * MiB)
BLOCK = SMALL.block_nbytes
NUM_RANKS = 3
seeds = st.integers(0, 2**32 - 1)


def tensors(seed: int, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"w{i}": torch.randint(-128, 128, (size,), dtype=torch.int8, generator=generator)
        for i, size in enumerate(sizes)
    }


async def saved(states: Sequence[dict[str, Any]], seed: int = 0) -> MemoryStorage:
    """Save a state of many ranks, copies and all."""
    place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
    async with job(len(states), place, LOCAL, seed=seed) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            await engine.save(states[rank], "memory")

        await ranks.all(body)
    return place


def manifest_of(place: MemoryStorage) -> Manifest:
    assert place.manifest is not None
    return decode_manifest(place.manifest)


def chunk_of(manifest: Manifest, name: str) -> Chunk:
    (chunk,) = next(tensor.chunks for tensor in manifest.tensors if tensor.name == name)
    return chunk


async def verified(place: MemoryStorage, *, compare_copies: bool = True) -> VerifyReport:
    async with inline_engine({"memory": place}) as engine:
        return await engine.verify("memory", compare_copies=compare_copies)


@given(seed=seeds, sizes=st.lists(st.integers(0, 6 * BLOCK), min_size=1, max_size=8))
@in_virtual_time
async def test_copies_that_agree_are_whole_and_read_once(seed: int, sizes: list[int]) -> None:
    """Every copy is compared, at no further read."""
    state = tensors(seed, sizes)
    num_copies = (NUM_RANKS - 1) * sum(size > 0 for size in sizes)

    place = await saved([state] * NUM_RANKS, seed)
    place.counts.read_nbytes = 0
    report = await verified(place)
    assert report.is_whole
    assert report.num_copies == num_copies
    assert place.counts.read_nbytes == report.nbytes == sum(map(len, place.files.values()))


@given(
    seed=seeds,
    sizes=st.lists(st.integers(1, 6 * BLOCK), min_size=1, max_size=8),
    rank=st.integers(0, NUM_RANKS - 1),
    data=st.data(),
)
@in_virtual_time
async def test_a_copy_that_differs_is_named_with_its_first_other_byte(
    seed: int, sizes: list[int], rank: int, data: st.DataObject
) -> None:
    """Whatever rank had other bytes, wherever they begin, whatever lies around them."""
    number = data.draw(st.integers(0, len(sizes) - 1), label="tensor")
    at = data.draw(st.integers(0, sizes[number] - 1), label="byte")
    state = tensors(seed, sizes)
    other = {**state, f"w{number}": state[f"w{number}"].clone()}
    other[f"w{number}"][at:] += 1
    states = [other if i == rank else state for i in range(NUM_RANKS)]

    place = await saved(states, seed)
    manifest = manifest_of(place)
    chunk = chunk_of(manifest, f"w{number}")
    is_chunk = manifest.files[chunk.file].rank == rank
    expected = {
        (manifest.files[file].name, start + at, start + sizes[number])
        for file, start in chunk.copies
        if is_chunk or manifest.files[file].rank == rank
    }
    report = await verified(place)
    assert {(e.file, e.start, e.stop) for e in report.damage} == expected
    for error in report.damage:
        assert error.fqns == (f"w{number}",)
        assert error.problem == (
            f"other bytes than in the copy at byte {chunk.start + at} of"
            f" {manifest.files[chunk.file].name!r}"
        )
    assert (await verified(place, compare_copies=False)).is_whole


@in_virtual_time
async def test_shards_that_are_copied_are_compared_too() -> None:
    """Blocks of a tensor that several ranks hold, each with its own copies."""
    tensor = torch.arange(64 * KiB).reshape(64, 1024)
    states = [{"w": shards_of(tensor, (2, 1))[rank % 2]} for rank in range(4)]
    states[3]["w"].tensor[1, 7] = -1

    place = await saved(states)
    report = await verified(place)
    assert report.num_copies == 2
    (error,) = report.damage
    assert error.fqns == ("w",)
    assert str(error) == (
        f"'memory' is damaged: {error.problem} in bytes [{error.start}, {error.stop}) of"
        f" {error.file!r}, which holds 'w'"
    )


@in_virtual_time
async def test_what_is_damaged_is_said_once() -> None:
    """A block without its checksum is damage of its own; the rest is still compared."""
    state = tensors(0, [10 * BLOCK])
    other = {"w0": state["w0"].clone()}
    other["w0"][8 * BLOCK :] += 1

    place = await saved([state, other])
    manifest = manifest_of(place)
    ((file, start),) = chunk_of(manifest, "w0").copies
    name = manifest.files[file].name
    place.files[name][start] ^= 1
    first, second = (await verified(place)).damage
    assert "checksum" in first.problem
    assert second.problem.startswith("other bytes")
    assert {first.file, second.file} == {name}


@pytest.mark.parametrize("lost", range(NUM_RANKS))
@in_virtual_time
async def test_a_lost_file_is_not_compared(lost: int) -> None:
    """That it is lost is said; the copies that are left are compared with each other."""
    state = tensors(0, [BLOCK, 3 * BLOCK])

    place = await saved([state] * NUM_RANKS)
    manifest = manifest_of(place)
    (name,) = (entry.name for entry in manifest.files if entry.rank == lost)
    del place.files[name]
    report = await verified(place)
    (error,) = report.damage
    assert error.file == name
    assert report.num_copies == 2 * (NUM_RANKS - 2)


def test_a_checkpoint_without_copies_has_none_to_compare(tmp_path: Any) -> None:
    """Nothing is different for it."""
    sync.save({"w": torch.arange(10_000)}, tmp_path / "c", config=SMALL)
    report = sync.verify(tmp_path / "c", compare_copies=True, config=SMALL)
    assert report.is_whole
    assert report.num_copies == 0
