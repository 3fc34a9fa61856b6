"""Saves of many ranks, all of them on one loop."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio import PerRank, Shard
from ckptio.config import KiB
from ckptio.engine import rounds
from ckptio.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    PeerLostError,
    PlanError,
    RankError,
)
from ckptio.events import RanksAwaited
from ckptio.testing import EventLog, MemoryStorage, fail_at, run_virtual
from tests.job_rig import Job, blank, job, shards_of
from tests.rig import config_with, inline_engine, num_rounds, random_state
from tests.state.ranks import as_rank
from tests.state.test_sharded import sharded_tensor
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio import Engine
    from ckptio.moments import CheckpointInfo

seeds = st.integers(0, 2**32 - 1)


def full_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(13, 70, generator=generator),
        "columns": torch.randn(64, 33, generator=generator),
        "norm": torch.randn(300, generator=generator),
        "scalar": torch.randn((), generator=generator),
        "large": torch.randn(700, 31, generator=generator),
    }


def part_of(full: dict[str, torch.Tensor], rank: int, world_size: int) -> dict[str, Any]:
    """Spread a state: rows and columns over ranks, the rest on all."""
    return {
        **full,
        "rows": shards_of(full["rows"], (world_size, 1))[rank],
        "columns": shards_of(full["columns"], (1, world_size))[rank],
        "step": 7,
        "rng": PerRank({"seed": rank}),
    }


def target_of(full: dict[str, torch.Tensor], rank: int, world_size: int) -> dict[str, Any]:
    """Make a target spread the other way round."""
    return {
        **{name: torch.zeros_like(tensor) for name, tensor in full.items()},
        "rows": blank(shards_of(full["rows"], (1, world_size))[rank]),
        "columns": blank(shards_of(full["columns"], (world_size, 1))[rank]),
        "step": 0,
        "rng": PerRank({"seed": -1}),
    }


def assert_loaded(target: dict[str, Any], full: dict[str, torch.Tensor]) -> None:
    for name, expected in full.items():
        found = target[name]
        if isinstance(found, Shard):
            assert found.global_offset is not None
            block = [
                slice(first, first + count)
                for first, count in zip(found.global_offset, found.tensor.shape, strict=True)
            ]
            assert torch.equal(found.tensor, expected[tuple(block)]), name
        else:
            assert torch.equal(found, expected), name
    assert target["step"] == 7


async def save_all(job: Job, full: dict[str, torch.Tensor], **options: Any) -> list[CheckpointInfo]:
    async def body(rank: int, engine: Engine) -> CheckpointInfo:
        state = part_of(full, rank, len(job.engines))
        return await engine.save(state, "memory", **options)

    return await job.all(body)


@given(seed=seeds, saved=st.integers(1, 5), loaded=st.integers(1, 5))
@in_virtual_time
async def test_a_state_comes_back_at_any_number_of_ranks(
    seed: int, saved: int, loaded: int
) -> None:
    """What any number of ranks saved, any number loads, spread in another way."""
    full = full_state(seed)

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
    async with job(saved, place, seed=seed) as ranks:
        infos = await save_all(ranks, full)
        assert len({(i.nbytes, i.num_files, i.num_tensors, i.save_id) for i in infos}) == 1
        written = [storage.counts.written_nbytes for storage in ranks.storages]
        assert sum(written) == infos[0].nbytes
    assert place.leftovers() == []
    async with job(loaded, place, seed=seed + 1) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            target = target_of(full, rank, loaded)
            await engine.load("memory", into=target, strict="raise" if rank < saved else "ignore")
            assert_loaded(target, full)
            assert target["rng"].value["seed"] == (rank if rank < saved else -1)

        await ranks.all(body)
        reads = [storage.counts.num_manifest_reads for storage in ranks.storages]
        assert reads == [1] + [0] * (loaded - 1)


@in_virtual_time
async def test_the_second_save_takes_one_round() -> None:
    """Ranks whose blocks are unchanged meet once a save, at its end."""
    full = full_state(0)

    async with job(3) as ranks:
        rounds = [0.0]
        for _ in range(3):
            await save_all(ranks, full, overwrite=True)
            rounds.append(num_rounds(ranks.ranks))
        assert [b - a for a, b in itertools.pairwise(rounds)] == [2, 1, 1]


@in_virtual_time
async def test_a_cache_that_is_trusted_for_long_hides_no_save_of_its_own_job() -> None:
    """`cache_ttl_s` is about what others save: each rank knows what it has saved over itself."""
    async with job(2, config=config_with(cache_ttl_s=1e6)) as ranks:
        for seed in (1, 2):
            infos = await save_all(ranks, full_state(seed), overwrite=True)
            manifests = await ranks.all(lambda _, engine: engine.inspect("memory"))
            assert {manifest.save_id for manifest in manifests} == {infos[0].save_id}


@given(seed=seeds, changed=st.sets(st.integers(0, 3), min_size=1))
@in_virtual_time
async def test_a_rank_that_changes_alone_is_planned_anew(seed: int, changed: set[int]) -> None:
    """Tensors that some ranks have since the last save are saved, the others' too."""
    full = full_state(seed)

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
    async with job(4, place, seed=seed) as ranks:
        await save_all(ranks, full)

        async def body(rank: int, engine: Engine) -> None:
            state = part_of(full, rank, 4)
            if rank in changed:
                state["new"] = torch.arange(50)
                state[f"own{rank}"] = torch.full((3,), rank)
            for _ in range(2):
                await engine.save(state, "memory", overwrite=True)

        await ranks.all(body)
        assert num_rounds(ranks.ranks) == 2 + 2 + 1
    assert place.leftovers() == []
    async with inline_engine({"memory": place}) as engine:
        loaded = await engine.load("memory")
        for name, tensor in full.items():
            assert torch.equal(loaded[name], tensor)
        assert torch.equal(loaded["new"], torch.arange(50))
        for rank in changed:
            assert torch.equal(loaded[f"own{rank}"], torch.full((3,), rank))


@in_virtual_time
async def test_a_rank_that_drops_what_it_wrote_for_others_fails_the_save() -> None:
    """Nothing is saved without a tensor that others still have; the next save has it."""
    async with job(2) as ranks:
        full = {f"w{i}": torch.full((20_000,), float(i)) for i in range(4)}

        async def first(_: int, engine: Engine) -> None:
            await engine.save(full, "memory")

        async def second(rank: int, engine: Engine) -> None:
            state = {"w0": full["w0"]} if rank == 1 else full
            await engine.save(state, "memory", overwrite=True)

        await ranks.all(first)
        before = ranks.place.manifest
        for error in await ranks.each(second):
            assert isinstance(error, RankError)
            assert "save again" in str(error)
        assert ranks.place.manifest == before
        await ranks.all(second)
        assert ranks.place.manifest != before


@in_virtual_time
async def test_buffers_that_differ_come_from_rank_0() -> None:
    """As DDP takes them from there before each step: what is resumed is what went on."""
    async with job(3) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            norms = {f"mean{i}": torch.full((64,), float(rank)) for i in range(8)}
            weights = {f"w{i}": torch.full((200_000,), float(i)) for i in range(3)}
            model = {**norms, **weights, "num_batches": torch.tensor(rank)}
            await engine.save(model, "memory")
            found = await engine.load("memory")
            for name in norms:
                assert not found[name].any()
            assert found["num_batches"] == 0
            assert all(torch.equal(found[name], weights[name]) for name in weights)

        await ranks.all(body)


@in_virtual_time
async def test_values_that_differ_are_refused_on_every_rank() -> None:
    """A number that is not the same on all ranks is named, and nothing is written."""
    async with job(3) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            await engine.save({"w": torch.zeros(4), "step": rank // 2}, "memory")

        errors = await ranks.each(body)
        assert {type(error) for error in errors} == {RankError}
        assert len({str(error) for error in errors}) == 1
        assert str(errors[0]).startswith(f"save to {ranks.place.path!r} failed on rank 0: ")
        assert "step" in str(errors[0])
        assert ranks.place.manifest is None
        assert ranks.place.leftovers() == []


def moments(seed: int, parameter: int = 0) -> dict[str, Any]:
    """Make two parameters by name, and an optimizer that has stepped one of them."""
    torch.manual_seed(seed)
    names = {f"layer{i}": torch.nn.Parameter(torch.zeros(4)) for i in range(2)}
    optimizer = torch.optim.Adam([names[f"layer{parameter}"]])
    names[f"layer{parameter}"].grad = torch.randn(4)
    optimizer.step()
    return {"optimizer": optimizer, **{name: held.data.zero_() for name, held in names.items()}}


def random_bytes(rank: int) -> torch.Tensor:
    return torch.Generator().manual_seed(rank).get_state()


#: What ranks have, what of it is named, and what tells of it.
MARKED: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "long bytes": (lambda rank: {"x": bytes(2000) + bytes([rank])}, "x", "bytes"),
    "very long bytes": (lambda rank: {"x": bytes(2 << 20) + bytes([rank])}, "x", "bytes"),
    "bytearray": (lambda rank: {"x": bytearray(2000) + bytes([rank])}, "x", "bytearray"),
    "a random state": (lambda rank: {"x": random_bytes(rank)}, "x", "a tensor"),
    "an array": (lambda rank: {"x": np.array([0, rank])}, "x", "an array"),
    "words": (lambda rank: {"x": np.array(["a", str(rank)])}, "x", "an array"),
    "a long array": (lambda rank: {"x": np.full(1 << 20, rank)}, "x", "an array"),
    "moments": (moments, "optimizer.state.0.exp_avg", "crc32c"),
    "a stage": (lambda rank: moments(0, rank), "optimizer.state.0.exp_avg", "'layer1'"),
}


@pytest.mark.parametrize(("make", "name", "word"), MARKED.values(), ids=MARKED)
@in_virtual_time
async def test_tensors_that_stand_for_values_are_the_same_on_all_ranks(
    make: Callable[[int], Any], name: str, word: str
) -> None:
    """Random states, positions and moments of one name that differ are no copies."""
    async with job(2) as ranks:

        async def differing(rank: int, engine: Engine) -> None:
            await engine.save(make(rank), "memory")

        for error in await ranks.each(differing):
            assert isinstance(error, RankError)
            assert f"{name!r} is " in str(error)
            assert word in str(error)
        assert ranks.place.manifest is None

        async def equal(rank: int, engine: Engine) -> None:
            del rank
            await engine.save(make(1), "memory")

        async def own(rank: int, engine: Engine) -> None:
            await engine.save({"own": PerRank(make(rank))}, "memory", overwrite=True)

        await ranks.all(equal)
        assert ranks.place.manifest is not None
        assert b'"mark"' not in ranks.place.manifest
        await ranks.all(own)


@in_virtual_time
async def test_what_stands_for_values_is_tied_all_the_same() -> None:
    """A tensor at two places, a view of it, an array twice: each is stored once, as by one rank."""
    async with job(2) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            del rank
            random, array = torch.arange(64, dtype=torch.uint8), np.arange(8)
            state = {"a": random, "b": random, "part": random[8:16], "x": array, "y": array}
            info = await engine.save(state, "memory")
            assert info.num_tensors == 2
            found = await engine.load("memory")
            assert found["a"] is found["b"]
            assert found["part"].data_ptr() == found["a"].data_ptr() + 8
            assert np.shares_memory(found["x"], found["y"])

        await ranks.all(body)


@in_virtual_time
async def test_buffers_that_differ_are_taken_for_copies() -> None:
    """Statistics of batch norm, and whatever else a module has: nobody knows that it may not."""
    async with job(2) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            norm = torch.nn.BatchNorm1d(2)
            norm.register_buffer("mask", torch.full((2,), rank, dtype=torch.uint8))
            norm(torch.full((4, 2), float(rank)))
            await engine.save({"norm": norm, "mean": torch.ones(2) * rank}, "memory")

        await ranks.all(body)
        assert ranks.place.manifest is not None


@in_virtual_time
async def test_a_gap_is_refused_on_every_rank_before_anything_is_written() -> None:
    """Shards that do not fill their tensor fail the save on every rank."""
    async with job(3) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            shard = shards_of(torch.zeros(12, 3), (4, 1))[rank]
            await engine.save({"w": shard}, "memory")

        errors = await ranks.each(body)
        assert {type(error) for error in errors} == {RankError}
        assert errors[0] is not None
        assert isinstance(errors[0].__cause__, PlanError)
        assert [s.counts.written_nbytes for s in ranks.storages] == [0, 0, 0]


@in_virtual_time
async def test_a_state_that_one_rank_cannot_save_fails_on_all() -> None:
    """Other ranks do not wait for one whose state was refused at the call."""
    async with job(2) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            await engine.save({"w": torch.zeros(3), "x": object() if rank else 1}, "memory")

        errors = await ranks.each(body)
        assert isinstance(errors[0], RankError)
        assert "UnsupportedLeafError" in str(errors[0])
        assert "cannot save 'x'" in str(errors[1])
        assert asyncio.get_running_loop().time() < 1


@given(seed=seeds, rank=st.integers(0, 3), number=st.integers(0, 60))
@in_virtual_time
async def test_a_failure_anywhere_ends_the_save_everywhere(
    seed: int, rank: int, number: int
) -> None:
    """Whatever storage operation fails on whatever rank: all or nothing, on all ranks."""
    full = full_state(seed)

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
    async with job(4, place, seed=seed) as ranks:
        await save_all(ranks, full)
        before = place.manifest
        ranks.storages[rank].fault = fail_at(
            number + len(ranks.storages[rank].operations), OSError(5, "broken")
        )

        async def body(rank: int, engine: Engine) -> None:
            await engine.save(part_of(full, rank, 4), "memory", overwrite=True)

        results = await ranks.each(body)
        if place.manifest == before:
            assert all(isinstance(result, RankError) for result in results)
            assert len({str(result) for result in results}) == 1
        else:
            assert results == [None] * 4
    assert place.leftovers() == []


@given(
    seed=seeds,
    rank=st.integers(0, 3),
    at_s=st.floats(0, 0.5),
    how=st.sampled_from(["kill", "freeze"]),
)
@in_virtual_time
async def test_a_lost_rank_ends_the_save_on_the_others(
    seed: int, rank: int, at_s: float, how: str
) -> None:
    """A rank that dies or freezes at any moment: the others raise in time, or all is saved."""
    full = full_state(seed)

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.02)
    async with job(4, place, seed=seed) as ranks:
        await save_all(ranks, full)
        before = place.manifest

        async def end() -> None:
            await asyncio.sleep(at_s)
            getattr(ranks.ranks, how)(rank)

        async def body(rank: int, engine: Engine) -> None:
            await engine.save(part_of(full, rank, 4), "memory", overwrite=True)

        async with asyncio.TaskGroup() as group:
            ending = group.create_task(end(), name="end")
            results = await ranks.each(body)
            if place.manifest == before:
                others = [result for i, result in enumerate(results) if i != rank]
                assert all(isinstance(error, PeerLostError) for error in others)
                assert all(rank in error.ranks for error in others)  # type: ignore[union-attr]  # as above
                assert asyncio.get_running_loop().time() < 30
            else:
                saved = [i for i, result in enumerate(results) if result is None]
                assert set(saved) >= {0, 1, 2, 3} - {rank}
            await ending
    async with inline_engine({"memory": place}) as engine:
        loaded = await engine.load("memory")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in full.items())


@given(seed=seeds, rank=st.integers(0, 2), at_s=st.floats(0, 0.5))
def test_cancelling_on_one_rank_ends_the_save_on_all(seed: int, rank: int, at_s: float) -> None:
    """A save that one rank aborts is no checkpoint for any, and leaves nothing."""
    full = full_state(seed)

    async def scenario() -> None:
        place = MemoryStorage("memory", seed=seed, max_delay_s=0.02)
        async with job(3, place, seed=seed) as ranks:

            async def body(number: int, engine: Engine) -> str:
                handle = engine.save(part_of(full, number, 3), "memory")
                if number == rank:
                    await asyncio.sleep(at_s)
                    handle.abort()
                await handle
                return "saved"

            results = await ranks.each(body)
            if place.manifest is None:
                assert "saved" not in results
            else:
                assert [r for i, r in enumerate(results) if i != rank] == ["saved"] * 2
        assert place.leftovers() == []

    run_virtual(scenario(), seed=seed)


@in_virtual_time
async def test_a_shard_alone_is_no_tensor() -> None:
    """One rank alone cannot save a shard of a tensor whose rest nobody has."""
    storage = MemoryStorage("memory")
    async with inline_engine({"memory": storage}) as engine:
        shard = shards_of(torch.zeros(12, 3), (4, 1))[1]
        with pytest.raises(PlanError, match="'w'"):
            await engine.save({"w": shard}, "memory")
        whole = Shard(torch.ones(12, 3), (12, 3), global_offset=(0, 0))
        await engine.save({"w": whole, **random_state([9 * KiB])}, "memory")
        assert torch.equal((await engine.load("memory"))["w"], whole.tensor)


@in_virtual_time
async def test_a_rank_alone_may_hold_a_tensor_in_several_blocks() -> None:
    """As the one process that is left of a job has all shards of a ShardedTensor."""
    tensor = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))

    async with inline_engine({"memory": MemoryStorage("memory")}) as engine:
        with as_rank(0, 1):
            await engine.save({"w": sharded_tensor(tensor, [5, 7], 0, [0, 0])}, "memory")
        assert torch.equal((await engine.load("memory"))["w"], tensor)


@in_virtual_time
async def test_a_checkpoint_that_is_there_is_an_error_of_its_own_on_every_rank() -> None:
    """Whoever guards against overwriting, or resumes, catches the same errors as alone."""
    async with job(3) as ranks:
        full = full_state(0)

        async def load(_: int, engine: Engine) -> None:
            await engine.load("memory")

        for error in await ranks.each(load):
            assert type(error) is CheckpointNotFoundError
        await save_all(ranks, full)

        async def save(rank: int, engine: Engine) -> None:
            await engine.save(part_of(full, rank, 3), "memory")

        for error in await ranks.each(save):
            assert type(error) is CheckpointExistsError
            assert isinstance(error.__cause__, RankError)
        await ranks.all(load)
    assert ranks.place.leftovers() == []


def test_who_waits_for_others_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a while and again, on rank 0 with the names of those that have not come.

    No more once they have; and the log need not say what the observer is told.
    """
    monkeypatch.setattr(rounds, "_REMIND_S", 20.0)
    log = EventLog()
    full = full_state(0)

    async def scenario() -> None:
        async with job(3, observer=log) as ranks:

            async def body(rank: int, engine: Engine) -> None:
                await asyncio.sleep(45.0 * (rank == 2))
                await engine.save(part_of(full, rank, 3), "memory")

            await ranks.all(body)
            await asyncio.sleep(1000)

    run_virtual(scenario(), seed=0)
    waits = log.of(RanksAwaited)
    assert sorted((event.phase, event.absent) for event in waits) == [
        *[("plan", ())] * 2,
        *[("plan", (2,))] * 2,
    ]
    found_s = sorted(event.waited_s for event in waits)
    assert found_s == pytest.approx([10.0, 10.0, 30.0, 30.0], abs=1)
    assert "every rank has to make this call" not in caplog.text


@in_virtual_time
async def test_a_rank_that_never_comes_is_named_while_it_is_waited_for() -> None:
    """`if rank == 0: save(...)`: said before it is given up."""
    log = EventLog()

    async with job(2, observer=log) as ranks:
        with pytest.raises(RankError, match="rank 1 did not come"):
            await ranks.engines[0].save(random_state([100]), "memory")
    assert {event.absent for event in log.of(RanksAwaited)} == {(1,)}


@in_virtual_time
async def test_without_an_observer_the_log_says_who_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Minutes of silence look like a hang."""
    async with job(2) as ranks:
        with pytest.raises(RankError, match="rank 1 did not come"):
            await ranks.engines[0].save(random_state([100]), "memory")
    assert "waiting for rank 1; every rank has to make this call" in caplog.text


@in_virtual_time
async def test_dimensions_lie_in_memory_as_they_did_on_every_rank() -> None:
    """The trees of ranks are merged, and keep the order."""
    async with job(2) as ranks:
        mine = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)

        async def body(rank: int, engine: Engine) -> None:
            await engine.save({"all": mine, f"own{rank}": mine + 1}, "memory")
            found = await engine.load("memory")
            for name, tensor in (("all", mine), ("own0", mine + 1), ("own1", mine + 1)):
                assert torch.equal(found[name], tensor)
                assert found[name].stride() == mine.stride()

        await ranks.all(body)
