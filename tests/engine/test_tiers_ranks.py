"""Copies to a second tier by many ranks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import Shard
from ckptio.errors import (
    CheckpointNotFoundError,
    ConfigError,
    FormatError,
    PeerLostError,
    RankError,
    SaveAbortedError,
    StorageError,
)
from ckptio.events import CopyCommitted, CopyFailed, TierPassedOver
from ckptio.format.manifest import decode_manifest
from ckptio.testing import (
    EventLog,
    MemoryBucket,
    MemoryStorage,
    MemoryStore,
    fail_kind,
    run_virtual,
)
from tests.job_rig import DEADLINES, job
from tests.rig import SMALL, InlineCore, asked_for, config_with, object_storage
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from ckptio import Engine
    from ckptio.testing import Operation

NUM_RANKS = 3
WHOLE = torch.arange(3 * 20_000, dtype=torch.float32)


def state_of(rank: int) -> dict[str, Any]:
    rows = WHOLE[20_000 * rank : 20_000 * (rank + 1)].clone()
    return {
        "rows": Shard(rows, global_shape=(60_000,), global_offset=(20_000 * rank,)),
        "step": 3,
    }


async def load_whole(engine: Engine, path: str) -> None:
    found = await engine.load(path)
    assert torch.equal(found["rows"], WHOLE)


@pytest.mark.parametrize("seed", range(5))
def test_each_rank_copies_what_it_wrote(seed: int) -> None:
    """All files by their ranks, the manifest once; `durable` on every rank."""
    log = EventLog()
    far = MemoryStorage("far", seed=seed, max_delay_s=0.5)

    async def scenario() -> None:
        async with job(NUM_RANKS, seed=seed, observer=log, far=far) as ranks:

            async def body(rank: int, engine: Engine) -> None:
                handle = engine.save(state_of(rank), "memory", then="far")
                await handle
                assert (await handle.durable).path == "far"
                await load_whole(engine, "far")

            await ranks.all(body)
            near = ranks.place
            assert near.manifest == far.manifest
            assert near.files == far.files
            assert near.notes == {}

    run_virtual(scenario(), seed=seed)
    assert far.manifest is not None
    by_rank = dict.fromkeys(range(NUM_RANKS), 0)
    for entry in decode_manifest(far.manifest).files:
        by_rank[entry.rank] += entry.nbytes
    sent = sorted(event.sent_nbytes for event in log.of(CopyCommitted))
    assert sent == sorted(by_rank.values())
    assert all(sent)


@pytest.mark.parametrize("seed", range(5))
@in_virtual_time
async def test_saves_in_a_row_are_copied_with_one_place_for_copies(seed: int) -> None:
    """Ranks take places in one order: none waits for another that waits for it."""
    far = MemoryStorage("far", seed=seed, max_delay_s=0.5)

    config = config_with(max_tier_copies=1)
    async with job(NUM_RANKS, config=config, seed=seed, far=far) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            handles = []
            for _ in range(3):
                handle = engine.save(state_of(rank), "memory", overwrite=True, then="far")
                handles.append(handle)
                await handle
            for handle in handles[:-1]:
                try:
                    await handle.durable
                except (RankError, StorageError):  # overtaken
                    continue
            await handles[-1].durable

        await ranks.all(body)
        assert ranks.place.manifest == far.manifest
        assert ranks.place.files == far.files


@in_virtual_time
async def test_a_copy_that_a_later_save_overtook_is_no_failure_of_a_run() -> None:
    """It has a copy of its own; on ranks as on one, leaving the engine says nothing."""
    log, far = EventLog(), MemoryStorage("far", max_delay_s=2)

    async with job(NUM_RANKS, observer=log, far=far) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            for _ in range(4):
                await engine.save(state_of(rank), "memory", overwrite=True, then="far")

        await ranks.all(body)
    assert ranks.place.manifest == far.manifest
    assert any("CheckpointChangedError" in str(event.error) for event in log.of(CopyFailed))


@pytest.mark.parametrize("kind", ["begin", "join", "create", "pwrite", "close", "seal", "commit"])
def test_what_fails_on_one_rank_fails_on_all_and_rank_0_makes_up_for_it(kind: str) -> None:
    """The first tier stays; the note too; what is there is not sent again."""
    far = MemoryStorage("far")

    async def scenario() -> None:
        async with job(NUM_RANKS, config=SMALL, far=far) as ranks:

            async def body(rank: int, engine: Engine) -> tuple[str, ...]:
                twin = engine._core.storage("far")
                assert isinstance(twin, MemoryStorage)
                if rank == (0 if kind in ("begin", "commit") else 1):
                    twin.fault = fail_kind(kind)
                handle = engine.save(state_of(rank), "memory", then="far")
                await handle
                with pytest.raises((RankError, StorageError)):
                    await handle.durable
                twin.fault = None
                await load_whole(engine, "memory")
                assert far.manifest is None
                return await engine.finish_copies("memory")

            made = await ranks.all(body)
            assert made == [("far",), (), ()]
            assert ranks.place.manifest == far.manifest
            assert ranks.place.files == far.files
            assert ranks.place.notes == {}

    run_virtual(scenario(), seed=0)


def test_ranks_hear_of_a_copy_that_rank_0_has_made_after_all() -> None:
    """As on one rank, it is no reason to fail a run that ends; of one that is owed still, it is."""
    names = [f"run/{step}" for step in range(5)]
    near = {name: MemoryStorage(name) for name in names}
    far = {f"far/{name}": MemoryStorage(f"far/{name}") for name in names}
    places = {**near, **far}

    async def scenario() -> None:
        async with job(NUM_RANKS) as ranks:

            async def body(rank: int, engine: Engine) -> list[bool]:
                twins = {name: place.another_name(name) for name, place in places.items()}
                core = engine._core
                assert isinstance(core, InlineCore)
                core.use_storages(twins)
                if rank == 0:
                    twins["far/run/0"].fault = fail_kind("commit")
                    twins["far/run/1"].fault = fail_kind("commit")
                handles = []
                for name in names:
                    handles.append(engine.save(state_of(rank), name, then=f"far/{name}"))
                    await handles[-1]
                    await asyncio.sleep(60)
                    if name == "run/1":
                        twins["far/run/0"].fault = None  # the other one stays away
                return [handle._moments.is_unheard() for handle in handles]

            assert await ranks.all(body) == [[False, True, False, False, False]] * NUM_RANKS
            assert all(not engine._core.context.copies.untold for engine in ranks.engines)

    run_virtual(scenario(), seed=0)
    assert far["far/run/0"].manifest == near["run/0"].manifest


def test_ranks_agree_on_the_tier_that_is_read() -> None:
    """Rank 0 looks, for all; neither tier: not found on every rank."""
    log = EventLog()
    far = MemoryStorage("far")

    async def scenario() -> None:
        async with job(NUM_RANKS, observer=log, far=far) as ranks:

            async def body(rank: int, engine: Engine) -> None:
                with pytest.raises(CheckpointNotFoundError, match="nor at 'far'"):
                    await engine.load("memory", then="far")
                await engine.save(state_of(rank), "memory", then="far").durable
                near = ranks.place
                if rank == 0:
                    near.files.pop(max(near.files))
                found = await engine.load("memory", then="far")
                assert torch.equal(found["rows"], WHOLE)

            await ranks.all(body)

    run_virtual(scenario(), seed=0)
    (event,) = log.of(TierPassedOver)
    assert event.to == "far"


@pytest.mark.parametrize("refusing", [0, 1])
@in_virtual_time
async def test_options_that_one_rank_refuses_fail_the_load_from_two_tiers(refusing: int) -> None:
    """The others hear of it while they agree on the tier, and wait for nobody."""
    far = MemoryStorage("far")

    async with job(2, far=far) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            options: dict[str, Any] = {"strict": "maybe"} if rank == refusing else {}
            await engine.load("memory", then="far", **options)

        begun_s = asyncio.get_running_loop().time()
        results = await ranks.each(body)
        assert isinstance(results[refusing], ConfigError)
        error = results[1 - refusing]
        assert isinstance(error, RankError)
        assert error.causes[refusing].startswith("ConfigError: ")
        assert asyncio.get_running_loop().time() - begun_s < DEADLINES.peer_s


@pytest.mark.parametrize("num_ranks", [1, NUM_RANKS])
@pytest.mark.parametrize("looks", range(1, 4))
@in_virtual_time
async def test_what_is_removed_as_it_is_looked_at_is_read_from_the_second_tier(
    num_ranks: int, looks: int
) -> None:
    """Before the tier is decided on or after that: on every rank, in step."""
    log = EventLog()
    far = MemoryStorage("far")
    state = {"x": torch.ones(1000)}

    async with job(num_ranks, observer=log, far=far) as ranks:
        num_left = looks

        def remove(operation: Operation) -> None:
            nonlocal num_left
            num_left -= operation.kind in ("version", "read_manifest")
            if num_left == 0:
                ranks.place._place.manifest = None

        async def body(rank: int, engine: Engine) -> None:
            await engine.save(state, "memory", then="far").durable
            await asyncio.sleep(5.0)
            if rank == 0:
                ranks.place.fault = remove
            found = await engine.load("memory", then="far")
            assert torch.equal(found["x"], state["x"])

        await ranks.all(body)
        assert num_left <= 1
    assert len(log.of(TierPassedOver)) == (looks < 3)


@in_virtual_time
async def test_ranks_say_where_else_a_damaged_checkpoint_is() -> None:
    """A block that one of them finds damaged: all raise, and none waits for others to go on."""
    log = EventLog()
    far = MemoryStorage("far")

    async with job(NUM_RANKS, observer=log, far=far) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            await engine.save(state_of(rank), "memory", then="far").durable
            near = ranks.place
            if rank == 0:
                assert near.manifest is not None
                manifest = decode_manifest(near.manifest)
                [entry] = manifest.tensors
                [chunk, *_] = entry.chunks
                near.files[manifest.files[chunk.file].name][chunk.start] ^= 1
            # each its own rows, so that one rank alone reads what is damaged
            with pytest.raises(RankError, match="CorruptionError") as raised:
                await engine.load("memory", into=state_of(rank), then="far")
            assert "load 'far'" in raised.value.__notes__[-1]

        await ranks.all(body)
    assert log.of(TierPassedOver) == []


@in_virtual_time
async def test_ranks_do_not_read_the_past_where_a_manifest_is_damaged() -> None:
    """A note says that the second tier has an older save: all raise, and say where that is."""
    log = EventLog()
    far = MemoryStorage("far")

    async with job(NUM_RANKS, observer=log, far=far) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            await engine.save(state_of(rank), "memory", then="far").durable
            if rank == 0:
                place = ranks.place._place
                place.notes["a" * 32], place.manifest = b"{}", b"{}"
                place.version += 1
            with pytest.raises(FormatError) as raised:
                await engine.load("memory", then="far")
            assert "load 'far'" in raised.value.__notes__[-1]

        await ranks.all(body)
    assert log.of(TierPassedOver) == []


def test_the_rank_that_decides_alone_asks_the_second_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would wait for a mount that hangs on their host; where it is read, they need it."""
    asked: list[str] = []

    async def locate(self: MemoryStorage, *, gives_up: bool = True) -> bool:
        del gives_up
        asked.append(self.path)
        return True

    async def scenario() -> None:
        async with job(NUM_RANKS) as ranks:

            async def save(rank: int, engine: Engine) -> None:
                await engine.save(state_of(rank), "memory", then="far").durable

            async def load(_: int, engine: Engine) -> None:
                found = await engine.load("memory", then="far")
                assert torch.equal(found["rows"], WHOLE)

            await ranks.all(save)
            monkeypatch.setattr(MemoryStorage, "locate", locate)
            await ranks.all(load)
            assert asked == ["far"]
            ranks.place._place.manifest = None
            await ranks.all(load)
            assert asked == ["far"] * (1 + NUM_RANKS)

    run_virtual(scenario(), seed=0)


@pytest.mark.parametrize("overwrite", [False, True])
@in_virtual_time
async def test_a_second_tier_that_is_the_first_by_a_link_ends_the_save_on_all_ranks(
    *, overwrite: bool
) -> None:
    """Before the commit, by the rank that commits; nothing is left that is owed."""
    near, log = MemoryStorage("memory"), EventLog()

    async with job(NUM_RANKS, near, observer=log, far=near.another_name("far")) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            handle = engine.save(state_of(rank), "memory", then="far", overwrite=overwrite)
            with pytest.raises(RankError, match="where the checkpoint itself goes"):
                await handle
            with pytest.raises(RankError):
                await handle.durable

        await ranks.all(body)
    assert near.manifest is None
    assert near.files == near.notes == {}
    assert log.of(CopyFailed) == []


@in_virtual_time
async def test_ranks_that_copy_to_different_places_are_told() -> None:
    """Nothing is committed at either."""
    async with job(2) as ranks:

        async def differ(rank: int, engine: Engine) -> None:
            state = {"step": 3, "t": torch.arange(10)}
            handle = engine.save(state, "memory", then=("far", "farther")[rank])
            await handle
            with pytest.raises(RankError, match="alike on all ranks"):
                await handle.durable

        await ranks.all(differ)


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_copies_for_long_is_waited_for(seed: int) -> None:
    """For as long as it lives: what one has to send takes longer than what another has."""
    far = MemoryStorage("far", seed=seed)
    config = config_with(meet_timeout_s=DEADLINES.meet_s)

    async def scenario() -> float:
        async with job(NUM_RANKS, config=config, seed=seed, far=far) as ranks:

            async def body(rank: int, engine: Engine) -> None:
                twin = engine._core.storage("far")
                assert isinstance(twin, MemoryStorage)
                twin._max_delay_s = 500.0 * rank
                await engine.save(state_of(rank), "memory", then="far").durable

            await ranks.all(body)
            assert ranks.place.manifest == far.manifest
            assert ranks.place.files == far.files
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario(), seed=seed) > 3 * DEADLINES.meet_s


@in_virtual_time
async def test_a_copy_that_is_stopped_in_line_stops_on_all_ranks() -> None:
    """At once: nobody waits for a rank that will not come."""
    far = MemoryStorage("far")
    config = config_with(max_tier_copies=1, meet_timeout_s=DEADLINES.meet_s)

    async with job(2, config=config, far=far) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            twin = engine._core.storage("far")
            assert isinstance(twin, MemoryStorage)
            twin._max_delay_s = 40.0  # of the first copy alone
            state = {"step": 3, "t": torch.arange(10)}
            first = engine.save(state, "memory", then="far")
            await first
            second = engine.save(state, "other", then="farther")
            await second
            assert not first.durable.done()
            now_s = asyncio.get_running_loop().time()
            if rank == 1:
                second.abort()
            with pytest.raises(SaveAbortedError if rank == 1 else RankError):
                await second.durable
            assert asyncio.get_running_loop().time() < now_s + 5.0
            await first.durable

        await ranks.all(body)


@pytest.mark.parametrize("aborting", [0, 1])
@in_virtual_time
async def test_an_abort_before_a_copy_is_published_leaves_nobody_in_doubt(aborting: int) -> None:
    """Rank 0 had begun to commit it, and says that it has not got to it."""
    far = MemoryStorage("far")

    async with job(NUM_RANKS, far=far) as ranks:
        place = ranks.engines[0]._core.storage("far")
        assert isinstance(place, MemoryStorage)
        place._max_delay_s = 0.5

        async def body(rank: int, engine: Engine) -> None:
            handle = engine.save(state_of(rank), "memory", then="far")
            if rank == aborting:
                await asked_for(place, "commit")
                handle.abort()
            await handle
            with pytest.raises(SaveAbortedError if rank == aborting else RankError) as caught:
                await handle.durable
            assert not getattr(caught.value, "in_doubt", False)

        await ranks.all(body)
        assert far.manifest is None


def test_ranks_meet_over_no_more_copies_than_there_are_places() -> None:
    """However many wait in line: their number is not limited, that of meetings is."""
    far = MemoryStorage("far")
    config = config_with(max_tier_copies=2, meet_timeout_s=DEADLINES.meet_s)

    async def scenario() -> int:
        most = 0
        async with job(2, config=config, far=far) as ranks:
            table = ranks.ranks.ranks[0]._table  # type: ignore[attr-defined]  # the coordinator's

            async def body(rank: int, engine: Engine) -> None:
                nonlocal most
                twin = engine._core.storage("far")
                assert isinstance(twin, MemoryStorage)
                twin._max_delay_s = 100.0 * rank
                state = {"step": 3, "t": torch.arange(10)}
                handles = []
                for _ in range(6):
                    handle = engine.save(state, "memory", overwrite=True, then="far")
                    handles.append(handle)
                    await handle
                while not handles[-1].durable.done():
                    most = max(most, table.num_sessions)
                    await asyncio.sleep(1.0)
                await handles[-1].durable
                for handle in handles[:-1]:
                    with contextlib.suppress(RankError):  # overtaken
                        await handle.durable

            await ranks.all(body)
            assert ranks.place.manifest == far.manifest
        return most

    assert 1 <= run_virtual(scenario(), seed=0) <= 2


@pytest.mark.parametrize("seed", range(3))
@in_virtual_time
async def test_ranks_that_are_ahead_of_the_first_one_upload_to_an_object_store(seed: int) -> None:
    """Their uploads were begun before it has: none of them is left over."""
    num_rows = 200_000

    bucket = MemoryBucket()
    async with job(NUM_RANKS, seed=seed) as ranks:
        for rank, engine in enumerate(ranks.engines):
            store = MemoryStore(bucket, seed=seed * NUM_RANKS + rank, max_delay_s=0.1)
            far = object_storage(store, url="memory://far")
            core = engine._core
            assert isinstance(core, InlineCore)
            core.use_storages({"memory": ranks.storages[rank], "far": far})

        async def body(rank: int, engine: Engine) -> None:
            whole = torch.arange(NUM_RANKS * num_rows, dtype=torch.float32)
            rows = Shard(
                whole[num_rows * rank : num_rows * (rank + 1)].clone(),
                global_shape=(NUM_RANKS * num_rows,),
                global_offset=(num_rows * rank,),
            )
            handle = engine.save({"rows": rows}, "memory", then="far")
            await handle
            assert (await handle.durable).path == "memory://far"
            assert torch.equal((await engine.load("far"))["rows"], whole)

        await ranks.all(body)
    sizes = [len(bucket.find(key).data) for key in bucket.keys if "/data-" in key]
    assert len(sizes) == NUM_RANKS
    assert min(sizes) > SMALL.slab_nbytes  # in parts, then


@in_virtual_time
async def test_who_loses_rank_0_as_it_commits_a_copy_is_in_doubt() -> None:
    """It may be at the second tier."""
    async with job(NUM_RANKS) as ranks:
        place = ranks.engines[0]._core.storage("far")
        assert isinstance(place, MemoryStorage)
        place._max_delay_s = 0.5

        async def body(rank: int, engine: Engine) -> None:
            handle = engine.save(state_of(rank), "memory", then="far")
            if rank == 1:
                await asked_for(place, "commit")
                ranks.ranks.kill(0)
            await handle
            with pytest.raises(PeerLostError) as caught:
                await handle.durable
            assert caught.value.in_doubt

        for answer in (await ranks.each(body))[1:]:
            assert answer is None
