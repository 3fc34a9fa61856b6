from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio.config import KiB
from ckptio.errors import CheckpointError, CorruptionError, RankError
from ckptio.events import ReplicaSubstituted
from ckptio.format.manifest import Manifest, decode_manifest
from ckptio.testing import EventLog, MemoryStorage
from tests.job_rig import Job, assert_equal, blank_of, job, shards_of
from tests.rig import config_with, inline_engine
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio import Engine
    from ckptio.config import CheckpointConfig

LOCAL = config_with(replicate="local", exchange="off")
NUM_TP, NUM_DP = 4, 8
seeds = st.integers(0, 2**32 - 1)


def norms(seed: int, count: int = 5) -> dict[str, torch.Tensor]:
    """Small tensors that every rank has."""
    generator = torch.Generator().manual_seed(seed)
    return {f"norm{i}": torch.randn(100 + 300 * i, generator=generator) for i in range(count)}


async def save_states(ranks: Job, states: Sequence[dict[str, Any]]) -> Manifest:
    async def body(rank: int, engine: Engine) -> None:
        await engine.save(states[rank], "memory")

    await ranks.all(body)
    assert ranks.place.manifest is not None
    return decode_manifest(ranks.place.manifest)


async def load_states(ranks: Job, states: Sequence[dict[str, Any]]) -> None:
    """Load into blank targets; each rank has to get its state."""

    async def body(rank: int, engine: Engine) -> None:
        target = blank_of(states[rank])
        await engine.load("memory", into=target)
        assert_equal(target, states[rank])

    await ranks.all(body)


def file_of(manifest: Manifest, rank: int) -> str:
    (name,) = (entry.name for entry in manifest.files if entry.rank == rank)
    return name


def tp_dp_states() -> list[dict[str, Any]]:
    """Weights spread over all ranks, and norms that all of them have."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"weight{i}": shards_of(torch.randn(32, 32 + 8 * i, generator=generator), (NUM_DP, NUM_TP))
        for i in range(3)
    }
    return [
        {**{name: shards[rank] for name, shards in weights.items()}, **norms(0)}
        for rank in range(NUM_TP * NUM_DP)
    ]


@pytest.mark.parametrize("exchange", ["on", "off"])
@in_virtual_time
async def test_each_of_32_ranks_opens_its_own_file_and_no_other(exchange: str) -> None:
    """Tensor-parallel by 4, data-parallel by 8, norms on all: 32 files opened in all."""
    states = tp_dp_states()

    config = config_with(replicate="local", exchange=exchange)
    async with job(len(states), config=config) as ranks:
        manifest = await save_states(ranks, states)
        written = ranks.written_nbytes()
        assert max(written) <= 1.10 * sum(written) / len(written)
        await load_states(ranks, states)
        own = [[file_of(manifest, rank)] for rank in range(len(states))]
        assert ranks.opened() == own
        assert ranks.linker.networks == []


@in_virtual_time
async def test_without_local_copies_ranks_open_the_files_of_others() -> None:
    """What local copies save: norms written once lie in the files of a few."""
    states = tp_dp_states()

    async with job(len(states), config=config_with(exchange="off")) as ranks:
        await save_states(ranks, states)
        await load_states(ranks, states)
        assert sum(map(len, ranks.opened())) > len(states)


@given(
    seed=seeds,
    saved=st.integers(1, 5),
    loaded=st.integers(1, 5),
    exchange=st.sampled_from(["on", "off"]),
)
@in_virtual_time
async def test_nothing_is_missing_at_another_parallel_size(
    seed: int, saved: int, loaded: int, exchange: str
) -> None:
    """Copies are places of one name: more ranks, or fewer, find all of them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(60, 7, generator=generator)

    def states_of(world_size: int) -> list[dict[str, Any]]:
        return [{"w": shard, **norms(seed)} for shard in shards_of(weight, (world_size, 1))]

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
    config = config_with(replicate="local", exchange=exchange)
    async with job(saved, place, config, seed=seed) as ranks:
        manifest = await save_states(ranks, states_of(saved))
        tensors = {tensor.name: tensor for tensor in manifest.tensors}
        assert tensors.keys() == {"w", *norms(seed)}
        for name in norms(seed):
            (chunk,) = tensors[name].chunks
            places = {manifest.files[file].rank for file, _ in chunk.copies}
            assert places | {manifest.files[chunk.file].rank} == set(range(saved))
    async with job(loaded, place, config, seed=seed) as ranks:
        await load_states(ranks, states_of(loaded))


@in_virtual_time
async def test_what_is_above_the_threshold_is_written_once() -> None:
    """Only small replicas are copied; large ones are shared out."""
    state = {"small": torch.ones(256), "large": torch.ones(64 * KiB)}
    config = config_with(replicate="local", local_replica_nbytes=1 * KiB)
    async with job(4, config=config) as ranks:
        manifest = await save_states(ranks, [state] * 4)
        tensors = {tensor.name: tensor for tensor in manifest.tensors}
        assert len(tensors["small"].chunks[0].copies) == 3
        assert all(chunk.copies == () for chunk in tensors["large"].chunks)
        written = ranks.written_nbytes()
        assert max(written) <= 1.10 * sum(written) / 4


@given(
    seed=seeds,
    lost=st.sets(st.integers(0, 3), min_size=1, max_size=3),
    how=st.sampled_from(["removed", "cut short"]),
    loaded=st.integers(1, 5),
)
@in_virtual_time
async def test_a_lost_file_is_made_up_for_by_a_copy(
    seed: int, lost: set[int], how: str, loaded: int
) -> None:
    """Whichever files are lost or cut short: as long as one is left, all is loaded, and said."""
    state = norms(seed)
    log = EventLog()

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
    async with job(4, place, LOCAL, seed=seed) as ranks:
        manifest = await save_states(ranks, [state] * 4)
    files = {file_of(manifest, rank) for rank in lost}
    for name in files:
        if how == "cut short":
            del place.files[name][-1]
        else:
            del place.files[name]
    async with job(loaded, place, LOCAL, seed=seed, observer=log) as ranks:
        await load_states(ranks, [state] * loaded)
        opened = {name for names in ranks.opened() for name in names}
    assert not opened & files
    said = log.of(ReplicaSubstituted)
    assert {event.path for event in said} <= {"memory"}
    assert {event.file for event in said} <= files
    wanted = {file_of(manifest, rank) for rank in range(min(loaded, 4))}
    assert {event.file for event in said} >= wanted & files
    for event in said:
        assert isinstance(event.error, CorruptionError)
        assert event.error.file == event.file


@given(seed=seeds, loaded=st.integers(1, 4))
@in_virtual_time
async def test_a_load_fails_on_every_rank_when_no_copy_is_left(seed: int, loaded: int) -> None:
    """One says which file is lost, all say that it failed; no target has changed."""
    state = norms(seed)

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
    async with job(3, place, LOCAL, seed=seed) as ranks:
        await save_states(ranks, [state] * 3)
    place.files.clear()
    async with job(loaded, place, LOCAL, seed=seed) as ranks:
        targets = [blank_of(state) for _ in range(loaded)]

        async def body(rank: int, engine: Engine) -> None:
            await engine.load("memory", into=targets[rank])

        ends = await ranks.each(body)
    assert any(isinstance(end, CorruptionError) for end in ends)
    assert all(isinstance(end, (CorruptionError, RankError)) for end in ends)
    assert all("no such regular file" in str(end) for end in ends)
    for target in targets:
        assert_equal(target, blank_of(state))


@in_virtual_time
async def test_a_lost_file_with_a_block_that_has_no_copy_fails_the_load() -> None:
    """Copies of what else was in it do not help: all ranks raise, and name the file."""
    weight = torch.arange(64.0).reshape(16, 4)
    states = [{"w": shard, **norms(1)} for shard in shards_of(weight, (4, 1))]
    async with job(4, config=LOCAL) as ranks:
        manifest = await save_states(ranks, states)
        lost = file_of(manifest, 2)
        del ranks.place.files[lost]

        async def body(rank: int, engine: Engine) -> None:
            await engine.load("memory", into=blank_of(states[rank]))

        ends = await ranks.each(body)
        assert isinstance(ends[2], CorruptionError)
        assert ends[2].file == lost
        for end in (ends[0], ends[1], ends[3]):
            assert isinstance(end, RankError)
            assert lost in end.causes[2]


@in_virtual_time
async def test_a_rank_alone_takes_copies_too() -> None:
    """A checkpoint of many ranks, loaded by one, with files missing."""
    state = norms(3)
    log = EventLog()

    async with job(3, config=LOCAL) as ranks:
        manifest = await save_states(ranks, [state] * 3)
        place = ranks.place
    lost = file_of(manifest, 0)
    del place.files[lost]
    async with inline_engine({"memory": place}, LOCAL, log) as engine:
        assert_equal(await engine.load("memory"), state)
        first = await engine.load("memory", select="norm1")
        assert torch.equal(first["norm1"], state["norm1"])
    assert {event.file for event in log.of(ReplicaSubstituted)} == {lost}


@in_virtual_time
async def test_a_copy_of_the_same_host_goes_before_others() -> None:
    """Ranks that moved to another machine read what that machine wrote."""
    state = norms(4)

    place = MemoryStorage("memory")
    async with job(4, place, LOCAL, hosts=["a", "a", "b", "b"]) as ranks:
        manifest = await save_states(ranks, [state] * 4)
    hosts = {entry.name: manifest.hosts[entry.rank] for entry in manifest.files}
    assert sorted(hosts.values()) == ["a", "a", "b", "b"]
    async with job(5, place, LOCAL, hosts=["b", "b", "a", "a", "c"]) as ranks:
        await load_states(ranks, [state] * 5)
        opened = ranks.opened()
    assert [[hosts[name] for name in names] for names in opened[:4]] == [
        ["b"], ["b"], ["a"], ["a"],
    ]  # fmt: skip
    assert len(opened[4]) == 1


@in_virtual_time
async def test_a_job_on_other_machines_still_opens_one_file_a_rank() -> None:
    """Where every host has another name, files are told apart by the rank that wrote them."""
    states = tp_dp_states()

    place = MemoryStorage("memory")
    num_ranks = len(states)
    async with job(num_ranks, place, LOCAL, hosts=["old"] * num_ranks) as ranks:
        manifest = await save_states(ranks, states)
    async with job(num_ranks, place, LOCAL, hosts=["new"] * num_ranks) as ranks:
        await load_states(ranks, states)
        assert ranks.opened() == [[file_of(manifest, rank)] for rank in range(num_ranks)]


@given(seed=seeds, number=st.integers(0, 40), rank=st.integers(0, 2))
@in_virtual_time
async def test_a_failure_while_copies_are_looked_for_ends_the_load_everywhere(
    seed: int, number: int, rank: int
) -> None:
    """Whatever operation fails on whatever rank, all ranks raise, or all have loaded."""
    state = norms(seed)

    def config() -> CheckpointConfig:
        return config_with(replicate="local")

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
    async with job(3, place, config(), seed=seed) as ranks:
        manifest = await save_states(ranks, [state] * 3)
        del place.files[file_of(manifest, rank)]
        before = len(ranks.storages[rank].operations)

        def fault(operation: Any) -> None:
            if operation.number == before + number:
                raise OSError(5, "broken")

        ranks.storages[rank].fault = fault

        async def body(_: int, engine: Engine) -> None:
            target = blank_of(state)
            await engine.load("memory", into=target)
            assert_equal(target, state)

        ends = await ranks.each(body)
    if len(ranks.storages[rank].operations) > before + number:
        assert all(isinstance(end, CheckpointError) for end in ends)
    else:
        assert ends == [None] * 3
