from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ckptio import PerRank
from ckptio.config import KiB
from ckptio.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    MismatchError,
    PeerLostError,
    RankError,
    StorageError,
    TargetError,
)
from ckptio.events import ExchangePlanned, LoadStarted
from ckptio.format.manifest import decode_manifest
from ckptio.ranks.frames import encode_body
from ckptio.testing import EventLog, MemoryStorage, fail_at, run_virtual
from tests.job_rig import Job, MemoryLinker, assert_equal, blank_of, job, shards_of
from tests.rig import SMALL, InlineCore, config_with, inline_engine
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ckptio import CheckpointConfig, Engine
    from ckptio.engine.asked import Strict
    from ckptio.engine.context import EngineContext
    from ckptio.exchange.link import BulkLink
    from ckptio.testing import Operation

BLOCK = SMALL.block_nbytes
ON = config_with(exchange="on")
OFF = config_with(exchange="off")
seeds = st.integers(0, 2**32 - 1)
ways = st.sampled_from(["kill", "freeze"])


def replicated(seed: int = 0, scale: int = 1, num_small: int = 40) -> dict[str, Any]:
    """Tensors that every rank has: large, small and many."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [30_000 * scale, 9_001, 4_096, *(50 + 7 * i for i in range(num_small))]
    return {f"w{i}": torch.randn(size, generator=generator) for i, size in enumerate(sizes)}


async def save_states(ranks: Job, states: Sequence[dict[str, Any]], **options: Any) -> None:
    async def body(rank: int, engine: Engine) -> None:
        await engine.save(states[rank], "memory", **options)

    await ranks.all(body)


async def load_states(ranks: Job, states: Sequence[dict[str, Any]]) -> None:
    """Load into blank targets; each rank has to get its state."""
    for end in await try_to_load(ranks, states):
        if end is not None:
            raise end


@pytest.mark.parametrize("config", [ON, OFF], ids=["exchange", "alone"])
@in_virtual_time
async def test_ranks_load_what_each_has_of_a_pipeline(config: CheckpointConfig) -> None:
    """What a rank lacks another one has; one may take nothing. What nobody has is refused."""
    whole = replicated()
    names = list(whole)
    stages = [{name: whole[name] for name in names[rank::3]} for rank in range(3)]
    async with job(4, config=config) as ranks:
        await save_states(ranks, [*stages, {}])
        await load_states(ranks, [*stages, {}])
        await load_states(ranks, [whole, {}, {}, {}])
        lost = names[-1]
        short = [{name: held for name, held in s.items() if name != lost} for s in stages]
        for error in await try_to_load(ranks, [*short, {}]):
            assert isinstance(error, MismatchError)
            assert error.unexpected == (lost,)
            assert not error.missing
        await load_states(ranks, [*stages, {}])


@in_virtual_time
async def test_a_rank_of_a_pipeline_is_refused_what_the_checkpoint_does_not_have() -> None:
    """It lacks names that other ranks have, too; its own would stay as they were."""
    stages = [{"first": torch.ones(8)}, {"second": torch.ones(8)}]
    async with job(2) as ranks:
        await save_states(ranks, stages)
        error, _ = await try_to_load(ranks, [{**stages[0], "new": torch.ones(8)}, stages[1]])
        assert isinstance(error, MismatchError)
        assert error.missing == ("new",)
        error, _ = await try_to_load(ranks, [{"first": torch.ones(9)}, stages[1]])
        assert isinstance(error, MismatchError)
        assert error.mismatched
        await load_states(ranks, stages)


@pytest.mark.parametrize("strict", ["ignore", "raise"])
@in_virtual_time
async def test_a_strict_rank_hears_of_what_no_target_has_whatever_others_ignore(
    strict: Strict,
) -> None:
    """Also what a lenient rank lacks is looked at; if all are lenient, nothing is refused."""
    state = {name: torch.ones(8) for name in ("first", "second", "lost")}
    async with job(2) as ranks:
        await save_states(ranks, [state, state])

        async def body(rank: int, engine: Engine) -> None:
            target = blank_of({("second" if rank else "first"): torch.ones(8)})
            await engine.load("memory", into=target, strict=strict if rank else "ignore")
            assert_equal(target, {("second" if rank else "first"): torch.ones(8)})

        for end in await ranks.each(body):
            if strict == "ignore":
                assert end is None
                continue
            assert isinstance(end, MismatchError)
            assert end.unexpected == ("lost",)

        async def whole(rank: int, engine: Engine) -> None:
            target = blank_of(state if not rank else {"first": torch.ones(8)})
            await engine.load("memory", into=target, strict=strict if rank else "ignore")
            assert_equal(target, {name: state[name] for name in target})

        await ranks.all(whole)  # what the strict one lacks, the other has


@in_virtual_time
async def test_one_engine_reads_no_copy_of_what_many_ranks_saved() -> None:
    """Each has a file with all of it; one of these is as good as another."""
    place, config = MemoryStorage("memory"), config_with(replicate="local")
    state = {"norm": torch.ones(20 * BLOCK)}
    async with job(3, place, config) as ranks:
        await save_states(ranks, [state] * 3)
    assert file_nbytes(place) > 3 * state["norm"].nbytes
    async with inline_engine({"memory": place}, config) as engine:
        report = (await engine.load_with_report("memory")).report
    assert report.nbytes < state["norm"].nbytes + 3 * BLOCK


async def try_to_load(
    ranks: Job, states: Sequence[dict[str, Any]]
) -> Sequence[BaseException | None]:
    """The same; give how each rank ended."""

    async def body(rank: int, engine: Engine) -> None:
        target = blank_of(states[rank])
        await engine.load("memory", into=target)
        assert_equal(target, states[rank])

    return await ranks.each(body)


def file_nbytes(place: MemoryStorage) -> int:
    return sum(map(len, place.files.values()))


@in_virtual_time
async def test_a_rank_that_has_nothing_of_its_own_may_ask_for_what_others_have() -> None:
    """All ranks of a job pass one `select=`; what no rank has is a mistyped name."""
    place = MemoryStorage("memory")
    async with job(1, place) as ranks:
        state = {"w": torch.ones(3), "rng": PerRank({"cpu": torch.zeros(2), "n": 1})}
        await save_states(ranks, [state])
    async with job(2, place) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            names = ["w", "rng.cpu"]
            loaded = await engine.load("memory", select=names)
            assert sorted(loaded) == (["w"] if rank else ["rng", "w"])
            loaded = await engine.load("memory", select=["w", "rng"])
            for select in ("rng.cpu", "rng", lambda name: name.startswith("rng")):
                await engine.load("memory", select=select)
                own = {"cpu": torch.ones(2), "n": 5}
                await engine.load("memory", into={"rng": PerRank(own)}, select=select)
                assert own["cpu"].any() == bool(rank)  # type: ignore[attr-defined]  # a tensor
            with pytest.raises(TargetError, match="asks for 'rng\\.cuda'"):
                await engine.load("memory", select=[*names, "rng.cuda"])

        await ranks.all(body)


def spread(tensor: torch.Tensor, grid: Sequence[int]) -> list[dict[str, Any]]:
    return [{"w": shard} for shard in shards_of(tensor, grid)]


# --- what is read and written, and by whom


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@in_virtual_time
async def test_an_unchanged_job_reads_what_it_wrote(world_size: int) -> None:
    """Each rank of a sharded state opens its file, reads it once, and nothing else."""
    states = spread(torch.randn(world_size * 24, 1000), (world_size, 1))

    async with job(world_size, config=OFF) as ranks:
        await save_states(ranks, states)
        written = ranks.written_nbytes()
        assert max(written) <= 1.10 * sum(written) / world_size
        await load_states(ranks, states)
        assert all(a <= b for a, b in zip(ranks.read_nbytes(), written, strict=True))
        assert ranks.place.manifest is not None
        files = decode_manifest(ranks.place.manifest).files
        for rank, opened in enumerate(ranks.opened()):
            assert opened == [entry.name for entry in files if entry.rank == rank]


@pytest.mark.parametrize(("saved", "loaded"), [(1, 4), (4, 1), (2, 3), (3, 2), (4, 8), (8, 4)])
@in_virtual_time
async def test_another_world_size_reads_each_byte_by_who_needs_it(saved: int, loaded: int) -> None:
    """Rows at another parallel size: little more than its own rows for each rank."""
    tensor = torch.randn(240, 256)
    before, after = (spread(tensor, (size, 1)) for size in (saved, loaded))

    place = MemoryStorage("memory")
    async with job(saved, place, OFF) as ranks:
        await save_states(ranks, before)
    async with job(loaded, place, OFF) as ranks:
        await load_states(ranks, after)
        share = tensor.nbytes // loaded
        num_files = saved // loaded + 2
        assert all(nbytes <= share + 2 * BLOCK * num_files for nbytes in ranks.read_nbytes())


@in_virtual_time
async def test_columns_of_what_was_saved_in_rows_read_only_the_blocks_that_hold_them() -> None:
    """Each rank reads its part of each row, and two blocks more at the most."""
    tensor = torch.randn(8, 16 * KiB)
    rows, columns = spread(tensor, (4, 1)), spread(tensor, (1, 4))

    async with job(4, config=OFF) as ranks:
        await save_states(ranks, rows)
        await load_states(ranks, columns)
        a_part = 4 * 16 * KiB // 4
        assert all(nbytes <= 8 * (a_part + 2 * BLOCK) for nbytes in ranks.read_nbytes())
        assert sum(ranks.read_nbytes()) <= tensor.nbytes + 2 * 8 * 4 * BLOCK


@given(seed=seeds, world_size=st.integers(2, 6))
@in_virtual_time
async def test_replicas_are_written_once_and_about_as_much_by_each(
    seed: int, world_size: int
) -> None:
    """A large tensor is shared out among the ranks that have it."""
    state = replicated(seed, scale=20)
    nbytes = sum(tensor.nbytes for tensor in state.values())

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
    async with job(world_size, place, seed=seed) as ranks:
        await save_states(ranks, [state] * world_size)
        written = ranks.written_nbytes()
        assert nbytes <= sum(written) <= 1.02 * nbytes
        assert max(written) <= 1.10 * sum(written) / world_size


@in_virtual_time
async def test_without_exchange_every_rank_reads_all_that_it_wants() -> None:
    """Four replicas, four times the bytes."""
    states = [replicated()] * 4

    async with job(4, config=OFF) as ranks:
        await save_states(ranks, states)
        await load_states(ranks, states)
        assert len(set(ranks.read_nbytes())) == 1
        assert min(ranks.read_nbytes()) >= sum(w.nbytes for w in states[0].values())
        assert ranks.linker.networks == []


# --- the exchange


@given(
    seed=seeds,
    saved=st.integers(1, 5),
    loaded=st.integers(2, 5),
    num_slabs=st.integers(0, 2),
)
@in_virtual_time
async def test_with_exchange_each_byte_is_read_once_and_about_as_much_by_each(
    seed: int, saved: int, loaded: int, num_slabs: int
) -> None:
    """Whoever wrote it; and every rank has every byte in the end."""
    state = replicated(seed, scale=4)

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
    async with job(saved, place, ON, seed=seed) as ranks:
        await save_states(ranks, [state] * saved)
    linker = MemoryLinker(loaded, seed, num_slabs=num_slabs, slab_nbytes=ON.slab_nbytes)
    async with job(loaded, place, ON, seed=seed, linker=linker) as ranks:
        await load_states(ranks, [state] * loaded)
        read = ranks.read_nbytes()
    assert sum(read) <= 1.05 * file_nbytes(place)
    assert max(read) <= 1.10 * sum(read) / loaded
    assert min(read) > 0
    (network,) = linker.networks
    assert sum(network.sent_nbytes) == (loaded - 1) * sum(read)


@in_virtual_time
async def test_what_all_want_is_said_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 encodes one answer, which names the ranks once and not with each unit."""
    state = {f"w{i}": torch.zeros(40 * KiB // 4) for i in range(40)}
    world_size, told = 16, list[bytes]()
    config = config_with(exchange="on", slab_nbytes=4 * KiB, pool_nbytes=64 * KiB)

    def note(value: Any) -> bytes:
        body = encode_body(value)
        if isinstance(value, dict) and value.get("units"):
            told.append(body)
        return body

    log = EventLog()
    async with job(world_size, config=config, observer=log) as ranks:
        await save_states(ranks, [state] * world_size)
        monkeypatch.setattr("ckptio.ranks.hub.encode_body", note)
        await load_states(ranks, [state] * world_size)
        (event,) = log.of(ExchangePlanned)
        assert event.is_exchanged
        num_units = sum(event.read_nbytes) // BLOCK
    assert num_units >= 400
    (body,) = told
    assert len(body) <= 40 * num_units + 4 * world_size + 200


@in_virtual_time
async def test_32_ranks_read_each_file_once_by_the_rank_that_wrote_it() -> None:
    """Tensor-parallel by 4 and replicated 8 times: who wrote a part reads it for the others."""
    tensors = [torch.randn(256, 128 * (i + 1)) for i in range(4)]
    norms = {f"norm{i}": torch.randn(64) for i in range(4)}
    by_tp = [[shards_of(tensor, (1, 4))[tp] for tensor in tensors] for tp in range(4)]
    states = [
        {**{f"w{i}": shard for i, shard in enumerate(by_tp[rank % 4])}, **norms}
        for rank in range(32)
    ]

    config = config_with(exchange="on", replicate="local", bucket_nbytes=1024 * KiB)
    async with job(32, config=config) as ranks:
        await save_states(ranks, states)
        written = ranks.written_nbytes()
        assert max(written) <= 1.10 * sum(written) / 32
        await load_states(ranks, states)
        assert ranks.place.manifest is not None
        manifest = decode_manifest(ranks.place.manifest)
        assert len(manifest.files) == 32
        assert ranks.opened() == [[entry.name] for entry in manifest.files]
        read = ranks.read_nbytes()
        assert sum(read) <= 1.05 * file_nbytes(ranks.place)
        assert max(read) <= 1.10 * sum(read) / 32


@given(seed=seeds, saved=st.integers(1, 4), loaded=st.integers(2, 4))
@in_virtual_time
async def test_shards_and_replicas_mix(seed: int, saved: int, loaded: int) -> None:
    """Rows that one rank wants beside tensors that all want."""
    tensor = torch.randn(120, 90, generator=torch.Generator().manual_seed(seed))

    def states_of(world_size: int) -> list[dict[str, Any]]:
        state = replicated(seed)
        return [{**state, **own} for own in spread(tensor, (1, world_size))]

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
    async with job(saved, place, ON, seed=seed) as ranks:
        await save_states(ranks, states_of(saved))
    async with job(loaded, place, ON, seed=seed) as ranks:
        await load_states(ranks, states_of(loaded))
        read = ranks.read_nbytes()
        assert sum(read) <= 1.05 * file_nbytes(place)
        assert max(read) <= 1.10 * sum(read) / loaded + 2 * BLOCK


@in_virtual_time
async def test_ranks_that_want_different_things_need_no_link() -> None:
    """Where nothing is wanted twice, nothing is passed on, however the option stands."""
    states = spread(torch.randn(96, 1024), (4, 1))

    async with job(4, config=ON) as ranks:
        await save_states(ranks, states)
        await load_states(ranks, states)
        assert ranks.linker.networks == []


@pytest.mark.parametrize("config", [ON, OFF], ids=["exchange", "alone"])
@pytest.mark.parametrize("meanwhile", ["removed", "nothing"])
@in_virtual_time
async def test_ranks_are_told_that_a_file_is_stale_since_its_checkpoint_was_removed(
    meanwhile: str, config: CheckpointConfig
) -> None:
    """So NFS calls it, and a mount that is lost; whoever reads looks which it was."""
    states, place = [replicated()] * 2, MemoryStorage("memory")

    def fault(operation: Operation) -> None:
        if operation.kind == "open":
            if meanwhile == "removed":
                place._place.manifest = None
            raise OSError(errno.ESTALE, "stale")

    async with job(2, place, config) as ranks:
        await save_states(ranks, states)
        ranks.storages[1].fault = fault
        kind = CheckpointNotFoundError if meanwhile == "removed" else StorageError
        for end in await try_to_load(ranks, states):
            assert isinstance(end, RankError)
            assert end.was_caused_by(kind, rank=1)


@given(seed=seeds, rank=st.integers(0, 3), number=st.integers(0, 60))
def test_a_failure_anywhere_ends_the_load_everywhere(seed: int, rank: int, number: int) -> None:
    """Whatever operation fails on whatever rank: all ranks raise alike, or all have loaded."""
    states = [replicated(seed)] * 4

    async def scenario() -> None:
        place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
        async with job(4, place, ON, seed=seed) as ranks:
            await save_states(ranks, states)
            storage = ranks.storages[rank]
            done = len(storage.operations)
            storage.fault = fail_at(done + number, OSError(5, "broken"))
            ends = await try_to_load(ranks, states)
            if len(storage.operations) <= done + number:
                assert ends == [None] * 4
                return
            assert all(isinstance(end, CheckpointError) for end in ends)
            others = [end for end in ends if isinstance(end, RankError)]
            assert len(others) >= 3
            assert len({str(end) for end in others}) == 1
            assert all(end.causes.keys() == {rank} for end in others)
            assert all("broken" in end.causes[rank] for end in others)
            storage.fault = None
            await load_states(ranks, states)

    run_virtual(scenario(), seed=seed)


@given(seed=seeds, rank=st.integers(0, 2), at_s=st.floats(0, 1.0), num_slabs=st.integers(0, 2))
def test_cancelling_on_one_rank_ends_the_load_on_all(
    seed: int, rank: int, at_s: float, num_slabs: int
) -> None:
    """Whenever a rank gives up its load, the others end too, and the next load works."""
    states = [replicated(seed)] * 3
    linker = MemoryLinker(3, seed, num_slabs=num_slabs, slab_nbytes=ON.slab_nbytes)

    async def scenario() -> None:
        place = MemoryStorage("memory", seed=seed, max_delay_s=0.02)
        async with job(3, place, ON, seed=seed, linker=linker) as ranks:
            await save_states(ranks, states)

            async def body(number: int, engine: Engine) -> str:
                async with asyncio.timeout(at_s if number == rank else None):
                    await engine.load("memory", into=blank_of(states[number]))
                return "loaded"

            ends = await ranks.each(body)
            if ends[rank] == "loaded":
                assert ends == ["loaded"] * 3
            else:
                assert isinstance(ends[rank], TimeoutError)
                others = [end for number, end in enumerate(ends) if number != rank]
                # the last round may have been decided already
                assert all(end == "loaded" or isinstance(end, RankError) for end in others)
                assert len(set(map(str, others))) == 1
            await load_states(ranks, states)

    run_virtual(scenario(), seed=seed)


@given(seed=seeds, rank=st.integers(0, 2), at_s=st.floats(0, 1.0), how=ways)
@in_virtual_time
async def test_a_lost_rank_ends_the_load_on_the_others(
    seed: int, rank: int, at_s: float, how: str
) -> None:
    """A rank that dies or freezes while others wait for its bytes: they raise in time."""
    states = [replicated(seed)] * 3

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.02)
    async with job(3, place, ON, seed=seed) as ranks:
        await save_states(ranks, states)
        begun_s = asyncio.get_running_loop().time()

        async def end() -> None:
            await asyncio.sleep(at_s)
            getattr(ranks.ranks, how)(rank)

        async with asyncio.TaskGroup() as group:
            ending = group.create_task(end(), name="end")
            ends = await try_to_load(ranks, states)
            others = [end for number, end in enumerate(ends) if number != rank]
            if rank == 0:  # what it said last, that all are through, may have reached some
                others = [end for end in others if end is not None]
            if others != [None] * 2:
                assert all(isinstance(end, PeerLostError) for end in others)
                assert all(rank in end.ranks for end in others)  # type: ignore[union-attr]  # as above
            assert asyncio.get_running_loop().time() - begun_s < 30
            await ending


@example(seed=451, which=0)  # its sender fails between its offer and the copy of it
@given(seed=seeds, which=st.integers(0, 2**20))
@in_virtual_time
async def test_a_damaged_block_fails_the_load_on_every_rank_alike(seed: int, which: int) -> None:
    """One error for all, that names the file, the range and the tensors."""
    states = [replicated(seed)] * 3

    place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
    async with job(3, place, ON, seed=seed) as ranks:
        await save_states(ranks, states)
        files = sorted(place.files)
        name = files[which % len(files)]
        assert place.manifest is not None
        manifest = decode_manifest(place.manifest)
        index = [entry.name for entry in manifest.files].index(name)
        starts = [c.start for t in manifest.tensors for c in t.chunks if c.file == index]
        place.files[name][starts[which % len(starts)]] ^= 1
        ends = await try_to_load(ranks, states)
        assert all(isinstance(end, RankError) for end in ends)
        assert len({str(end) for end in ends}) == 1
        assert str(ends[0]).startswith("load of 'memory' failed on rank ")
        assert name in str(ends[0])
        assert "checksum" in str(ends[0])
        (cause,) = (end.__cause__ for end in ends if end is not None and end.__cause__)
        assert isinstance(cause, CorruptionError)
        assert cause.file == name


@given(seed=seeds, tag=st.integers(0, 5))
@in_virtual_time
async def test_what_is_damaged_between_ranks_fails_the_load(seed: int, tag: int) -> None:
    """A network is not trusted more than a disk: the taker finds it, all raise."""
    states = [replicated(seed, scale=4)] * 3
    linker = MemoryLinker(3, seed, damaged_tags={tag})

    async with job(3, config=ON, seed=seed, linker=linker) as ranks:
        await save_states(ranks, states)
        ends = await try_to_load(ranks, states)
        assert all(isinstance(end, RankError) for end in ends)
        assert len({str(end) for end in ends}) == 1
        assert "checksum" in str(ends[0])


class ClosedDoor(MemoryLinker):
    """Rank 1 has no link: too many files are open there, say."""

    @contextlib.asynccontextmanager
    async def open(
        self, offer: Any, context: EngineContext, session: object, path: str
    ) -> AsyncIterator[BulkLink]:
        if context.ranks.rank == 1:
            raise PeerLostError("other ranks cannot be answered", ranks=())
        async with super().open(offer, context, session, path) as link:
            yield link


@in_virtual_time
async def test_who_fails_to_link_by_its_own_fault_says_so_at_once() -> None:
    """No other rank could say why, so none is waited for."""
    async with job(3, config=ON, linker=ClosedDoor(3)) as ranks:
        await save_states(ranks, [replicated()] * 3)
        before_s = asyncio.get_running_loop().time()
        for end in await try_to_load(ranks, [replicated()] * 3):
            assert isinstance(end, RankError)
            assert not isinstance(end, PeerLostError)
            assert end.causes == {1: "PeerLostError: other ranks cannot be answered"}
        assert asyncio.get_running_loop().time() - before_s < ON.peer_timeout_s


@in_virtual_time
async def test_ranks_with_different_options_are_told() -> None:
    """One that exchanges and one that does not would wait for each other for ever."""
    states = [replicated()] * 2

    async with job(2, config=ON) as ranks:
        await save_states(ranks, states)
        ranks.engines[1]._core.context.config = dataclasses.replace(ON, exchange="off")
        ends = await try_to_load(ranks, states)
        assert all(isinstance(end, RankError) for end in ends)
        assert ends[0] is not None
        assert isinstance(ends[0].__cause__, ConfigError)
        assert "exchange" in str(ends[1])


# --- the manifest


@given(seed=seeds, world_size=st.integers(2, 5), exchange=st.sampled_from(["on", "off"]))
def test_one_rank_reads_the_manifest_and_none_reads_it_again(
    seed: int, world_size: int, exchange: str
) -> None:
    """The others receive it; while it is unchanged, not even that."""
    states = [replicated(seed, num_small=3)] * world_size

    async def scenario() -> None:
        place = MemoryStorage("memory", seed=seed, max_delay_s=0.01)
        config = config_with(exchange=exchange)
        async with job(world_size, place, config, seed=seed) as ranks:
            await save_states(ranks, states)

            def reads() -> list[int]:
                return [storage.counts.num_manifest_reads for storage in ranks.storages]

            only_one = [1] + [0] * (world_size - 1)
            for _ in range(2):
                await load_states(ranks, states)
                assert reads() == only_one
            other = [replicated(seed + 1, num_small=3)] * world_size
            await save_states(ranks, other, overwrite=True)
            await load_states(ranks, other)
            assert reads() == [2 * count for count in only_one]

    run_virtual(scenario(), seed=seed)


@in_virtual_time
async def test_what_crosses_the_network_when_nothing_changed_is_no_manifest() -> None:
    """The second load sends less than the manifest has."""
    state = {f"w{i}": torch.zeros(3) for i in range(2000)}

    async with job(2, config=OFF) as ranks:
        await save_states(ranks, [state] * 2)
        assert ranks.place.manifest is not None
        sent = []
        for _ in range(2):
            before = ranks.ranks.sent_nbytes
            await load_states(ranks, [state] * 2)
            sent.append(ranks.ranks.sent_nbytes - before)
        assert sent[0] > len(ranks.place.manifest)
        assert sent[1] < len(ranks.place.manifest) / 10


@in_virtual_time
async def test_loads_of_other_paths_meanwhile_leave_a_rank_the_manifest_that_it_has() -> None:
    """A rank is told that its manifest is current when it has heard of many others since."""
    places = {name: MemoryStorage(name) for name in ("memory", "second", "third")}

    async with job(2) as ranks:
        for engine in reversed(ranks.engines):
            core = engine._core
            assert isinstance(core, InlineCore)
            twins = {name: place.another_name(name) for name, place in places.items()}
            core.use_storages(twins)

        async def save(_: int, engine: Engine) -> None:
            for number, name in enumerate(places):
                await engine.save({"w": torch.full((8,), number)}, name)
            await engine.load("memory")

        async def load(_: int, engine: Engine) -> None:
            first = asyncio.ensure_future(engine.load("memory"))
            await asyncio.sleep(0.1)
            assert (await engine.load("second"))["w"][0] == 1
            assert (await engine.load("third"))["w"][0] == 2
            assert not first.done()
            assert (await first)["w"][0] == 0

        await ranks.all(save)
        twins["memory"]._max_delay_s = 5.0  # that of rank 0, who looks whether it is current
        await ranks.all(load)


@in_virtual_time
async def test_a_rank_that_alone_has_no_manifest_is_sent_it() -> None:
    """The others have what they were sent before; whoever asks says what it has."""
    states = [replicated(num_small=3)] * 3

    async with job(3, config=OFF) as ranks:
        await save_states(ranks, states)
        await load_states(ranks, states)
        context = ranks.engines[1]._core.context
        assert context is not None
        context.received.clear()
        await load_states(ranks, states)


# --- who reads what, and why


@in_virtual_time
async def test_an_event_says_who_reads_what_and_why() -> None:
    """On rank 0, for all ranks; the text is made when it is asked for."""
    states = [replicated()] * 2
    log = EventLog()

    place = MemoryStorage("memory")
    async with job(2, place, ON, observer=log) as ranks:
        await save_states(ranks, states)
        await load_states(ranks, states)
        (event,) = log.of(ExchangePlanned)
        assert event.path == "memory"
        assert event.is_exchanged
        assert list(event.read_nbytes) == ranks.read_nbytes()
        assert event.sent_nbytes == sum(ranks.linker.networks[0].sent_nbytes)
        assert "explainer" not in repr(event)
        lines = event.explain().splitlines()
        for rank in range(2):
            about = [line for line in lines if line.startswith(f"rank {rank} reads [")]
            assert any("(own file), for" in line for line in about)
        some = event.explain(["w1"]).splitlines()
        assert 0 < len(some) <= len(lines)
        assert event.explain(["no such name"]) == ""
        sent = pickle.loads(pickle.dumps(event))  # noqa: S301  # as to another process
        assert sent.explain() == event.explain()
        started = log.of(LoadStarted)
        assert {event.nbytes for event in started} == {sum(ranks.read_nbytes())}


@in_virtual_time
async def test_an_event_says_that_passing_on_would_not_pay() -> None:
    """Left to itself, an engine does not link ranks for a few bytes; each reads its own."""
    states = [replicated()] * 3
    log = EventLog()

    async with job(3, observer=log) as ranks:
        await save_states(ranks, states)
        await load_states(ranks, states)
        (event,) = log.of(ExchangePlanned)
        assert not event.is_exchanged
        assert list(event.read_nbytes) == ranks.read_nbytes()
        assert event.sent_nbytes == 0
        lines = event.explain().splitlines()
        assert len(lines) == 3 * len(ranks.place.files)
        assert all(line.endswith("(passing on would not pay)") for line in lines)
        assert [line.split()[1] for line in lines] == sorted(line.split()[1] for line in lines)


@in_virtual_time
async def test_nobody_plans_where_the_exchange_is_off() -> None:
    """Ranks do not even say what they want."""
    states = [replicated()] * 2
    log = EventLog()

    async with job(2, config=OFF, observer=log) as ranks:
        await save_states(ranks, states)
        await load_states(ranks, states)
        assert log.of(ExchangePlanned) == []
