from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio.config import CheckpointConfig, KiB
from ckptio.engine.exchange import SharedPart, plan_part, read_shared
from ckptio.engine.landing import Reading
from ckptio.errors import (
    CheckpointError,
    CorruptionError,
    PeerLostError,
    StateError,
    StorageError,
)
from ckptio.events import ReadProgressed
from ckptio.format.compose import encode_manifest
from ckptio.format.manifest import Manifest, decode_manifest
from ckptio.plan.exchange import ExchangePlan, block_runs, decode_part, plan_exchange
from ckptio.plan.load import Wanted
from ckptio.staging.copy import Destination, TargetState
from ckptio.testing import EventLog, MemoryStorage, fail_at, run_virtual
from ckptio.testing.exchange import MemoryNetwork
from tests.engine.test_pending import Device
from tests.manifests import block_checksums
from tests.rig import SAVE_IDS, contents_of, context_of, fill_attempt
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.engine.context import EngineContext

BLOCK = 4 * KiB
SLAB = 16 * KiB
seeds = st.integers(0, 2**32 - 1)


def config_of(num_slabs: int, max_reads: int = 4) -> CheckpointConfig:
    return CheckpointConfig(
        block_nbytes=BLOCK, slab_nbytes=SLAB, pool_nbytes=num_slabs * SLAB, max_reads=max_reads
    )


class Wish(NamedTuple):
    """What each rank of a group wants of some files, and how large the files are."""

    sizes: tuple[int, ...]
    wanted: tuple[tuple[Wanted, ...], ...]

    def blocks(self, rank: int) -> set[tuple[int, int]]:
        return {
            (want.file, block)
            for want in self.wanted[rank]
            for block in range(want.start // BLOCK, -(-(want.start + want.nbytes) // BLOCK))
        }

    def unique_nbytes(self) -> int:
        blocks = set().union(*(self.blocks(rank) for rank in range(len(self.wanted))))
        return sum(min(BLOCK, self.sizes[file] - block * BLOCK) for file, block in blocks)


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    sizes = draw(st.lists(st.integers(1, 100 * KiB), min_size=1, max_size=3))
    ranks = []
    for _ in range(draw(st.integers(1, 4))):
        wanted = []
        for index in range(draw(st.integers(0, 4))):
            file = draw(st.integers(0, len(sizes) - 1))
            start = draw(st.integers(0, sizes[file] - 1))
            wanted.append(Wanted(file, start, draw(st.integers(1, sizes[file] - start)), index, 0))
        ranks.append(tuple(wanted))
    return Wish(tuple(sizes), tuple(ranks))


def all_of(sizes: Sequence[int], num_ranks: int) -> Wish:
    """All ranks want all bytes."""
    wanted = tuple(Wanted(file, 0, nbytes, file, 0) for file, nbytes in enumerate(sizes))
    return Wish(tuple(sizes), (wanted,) * num_ranks)


@dataclass
class Rank:
    """A rank of a group: its engine, its targets, its part of the plan."""

    context: EngineContext
    part: SharedPart
    tensors: list[torch.Tensor]
    reading: Reading


@dataclass
class Group:
    """Ranks that load together from one storage."""

    wish: Wish
    storage: MemoryStorage
    manifest: Manifest
    contents: list[bytes]
    contexts: list[EngineContext]
    plan: ExchangePlan

    def ranks(self) -> list[Rank]:
        """Make fresh targets for every rank."""
        found = []
        parts = self.plan.parts()
        for rank, (wanted, context) in enumerate(zip(self.wish.wanted, self.contexts, strict=True)):
            tensors = [torch.zeros(want.nbytes, dtype=torch.uint8) for want in wanted]
            target = TargetState([Destination(t, torch.uint8) for t in tensors], None)
            part = plan_part(self.manifest, decode_part(parts[rank]), wanted, rank)
            found.append(Rank(context, part, tensors, Reading(self.storage, self.manifest, target)))
        return found

    def has_landed(self, ranks: Sequence[Rank]) -> bool:
        """Say whether every rank has just the bytes that it wanted."""
        return all(
            bytes(tensor.numpy()) == self.contents[want.file][want.start :][: want.nbytes]
            for rank, wanted in zip(ranks, self.wish.wanted, strict=True)
            for tensor, want in zip(rank.tensors, wanted, strict=True)
        )

    def assert_nothing_is_left(self, network: MemoryNetwork) -> None:
        """Check that no slab, no file, no message and no task is left."""
        for context in self.contexts:
            statistics = context.pool.statistics()
            assert statistics.leased_nbytes == 0
            assert statistics.num_waiting == 0
        assert self.storage.counts.num_open_sources == 0
        assert network.num_under_way == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def group_of(
    wish: Wish, configs: Sequence[CheckpointConfig], seed: int = 0, log: EventLog | None = None
) -> Group:
    """Write the files and plan who reads what for whom."""
    storage = MemoryStorage(seed=seed, max_delay_s=0.02)
    contents = contents_of(SAVE_IDS[0], *wish.sizes)
    manifest = encode_manifest(
        writer="test",
        save_id=SAVE_IDS[0],
        created="",
        block_nbytes=BLOCK,
        files=[
            (name, len(data), block_checksums(memoryview(data), BLOCK), index)
            for index, (name, data) in enumerate(contents.items())
        ],
        tensors=b"[]",
        tree=b"null",
        hosts=["h"] * len(contents),
    )
    attempt = await storage.begin(SAVE_IDS[0], overwrite=False)
    await fill_attempt(attempt, contents)
    await attempt.commit(manifest)
    decoded = decode_manifest(manifest)
    wants = [block_runs(wanted, BLOCK) for wanted in wish.wanted]
    plan = plan_exchange(decoded, wants, ["h"] * len(wants), SLAB)
    contexts = [context_of(config, log) for config in configs]
    return Group(wish, storage, decoded, list(contents.values()), contexts, plan)


async def load(ranks: Sequence[Rank], network: MemoryNetwork) -> None:
    """Let every rank do its part."""
    async with asyncio.TaskGroup() as tasks:
        for rank, link in zip(ranks, network.links, strict=True):
            tasks.create_task(
                read_shared(rank.part, rank.reading, link, rank.context), name="a rank"
            )


async def ends_of(ranks: Sequence[Rank], network: MemoryNetwork) -> list[BaseException | None]:
    """Let every rank do its part, and say how each ended. Who fails leaves its link."""

    async def take_part(number: int, rank: Rank) -> None:
        try:
            await read_shared(rank.part, rank.reading, network.links[number], rank.context)
        except BaseException:
            network.lose(number)
            raise

    parts = [take_part(number, rank) for number, rank in enumerate(ranks)]
    return await asyncio.gather(*parts, return_exceptions=True)


pools = st.lists(st.integers(1, 6), min_size=4, max_size=4)
slabs = st.integers(0, 2)


@given(wish=wishes(), pools=pools, reads=st.integers(1, 3), slabs=slabs, seed=seeds)
@in_virtual_time
async def test_every_wanted_byte_arrives_and_is_read_once(
    wish: Wish, pools: list[int], reads: int, slabs: int, seed: int
) -> None:
    """On every rank, through pools of any size; storage is asked once for each block."""
    configs = [config_of(pools[i], reads) for i in range(len(wish.wanted))]
    group = await group_of(wish, configs, seed)
    num_ranks = len(configs)
    network = MemoryNetwork(
        num_ranks, seed=seed, max_delay_s=0.02, num_slabs=slabs, slab_nbytes=SLAB
    )
    ranks = group.ranks()
    before = len(group.storage.operations)
    await load(ranks, network)
    assert group.has_landed(ranks)
    assert group.storage.counts.read_nbytes == wish.unique_nbytes()
    opened = [op for op in group.storage.operations[before:] if op.kind == "open"]
    assert len(opened) == len({(unit.reader, unit.file) for unit in group.plan.units})
    for rank, sent in zip(ranks, network.sent_nbytes, strict=True):
        assert sent == sum(u.nbytes * len(u.takers) for u, _ in rank.part.reads)
        assert rank.reading.read_nbytes == rank.part.nbytes
    group.assert_nothing_is_left(network)
    network.close()


@pytest.mark.usefixtures("no_collections")
def test_what_was_loaded_is_let_go_of() -> None:
    """Without a collection of garbage, though lanes that waited for slabs were cancelled."""

    async def scenario() -> None:
        group = await group_of(all_of([200 * KiB], 2), [config_of(4)] * 2)
        ranks = group.ranks()
        network = MemoryNetwork(2, max_delay_s=0.02)
        async with contextlib.AsyncExitStack() as stack:  # others have all slabs
            for context in group.contexts * 4:
                await stack.enter_async_context(context.pool.lease())
            await load(ranks, network)
        loaded = [weakref.ref(tensor) for rank in ranks for tensor in rank.tensors]
        ranks.clear()
        await asyncio.sleep(1)
        assert not [tensor for tensor in loaded if tensor() is not None]
        network.close()

    run_virtual(scenario(), seed=1)


@given(wish=wishes(), pool=st.integers(1, 4), slabs=slabs, seed=seeds, number=st.integers(0, 60))
@in_virtual_time
async def test_failure_leaves_nothing_behind(
    wish: Wish, pool: int, slabs: int, seed: int, number: int
) -> None:
    """Whatever read fails on whatever rank, every rank ends, and gives back what it held."""
    group = await group_of(wish, [config_of(pool)] * len(wish.wanted), seed)
    network = MemoryNetwork(
        len(wish.wanted), seed=seed, max_delay_s=0.02, num_slabs=slabs, slab_nbytes=SLAB
    )
    done = len(group.storage.operations)
    group.storage.fault = fail_at(done + number, errno.EIO)
    ranks = group.ranks()
    ends = await ends_of(ranks, network)
    if len(group.storage.operations) <= done + number:
        assert ends == [None] * len(ranks)
        assert group.has_landed(ranks)
    else:
        assert any(isinstance(end, StorageError) and end.errno == errno.EIO for end in ends)
        assert all(end is None or isinstance(end, CheckpointError) for end in ends)
    group.assert_nothing_is_left(network)
    network.close()


@given(wish=wishes(), pool=st.integers(1, 4), slabs=slabs, seed=seeds, at_s=st.floats(0, 0.5))
@in_virtual_time
async def test_cancelling_anywhere_leaves_nothing_behind(
    wish: Wish, pool: int, slabs: int, seed: int, at_s: float
) -> None:
    """Whenever an exchange is cancelled; and the next one over a new link works."""
    group = await group_of(wish, [config_of(pool)] * len(wish.wanted), seed)
    options = {"num_slabs": slabs, "slab_nbytes": SLAB, "seed": seed}
    network = MemoryNetwork(len(wish.wanted), max_delay_s=0.02, **options)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(at_s):
            await load(group.ranks(), network)
    group.assert_nothing_is_left(network)
    network.close()
    again = MemoryNetwork(len(wish.wanted), **options)
    ranks = group.ranks()
    await load(ranks, again)
    assert group.has_landed(ranks)
    again.close()


@pytest.mark.parametrize("num_slabs", [0, 2])
@in_virtual_time
async def test_who_is_cancelled_hears_of_nothing_else(num_slabs: int) -> None:
    """What its own link broke off as it ended is no loss of a rank."""
    group = await group_of(all_of([100 * KiB] * 2, 2), [config_of(4)] * 2)
    for moment in range(1, 12):
        network = MemoryNetwork(2, max_delay_s=0.02, num_slabs=num_slabs, slab_nbytes=SLAB)
        loading = [
            asyncio.create_task(
                read_shared(rank.part, rank.reading, link, rank.context), name="a rank"
            )
            for rank, link in zip(group.ranks(), network.links, strict=True)
        ]
        await asyncio.sleep(0.01 * moment)
        for task in loading:
            task.cancel()
        ends = await asyncio.gather(*loading, return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends)
        group.assert_nothing_is_left(network)
        network.close()


class OneWay(asyncio.Semaphore):
    """A file is opened; it is closed when that is let in."""

    def release(self) -> None:
        """Nobody comes in for one who has left."""

    def let_in(self) -> None:
        super().release()


@pytest.mark.parametrize(
    "failure",
    [None, StorageError("broken", path="memory"), PeerLostError("gone", ranks=(1,))],
    ids=type,
)
@pytest.mark.parametrize("pool", [1, 4])
@in_virtual_time
async def test_who_is_cancelled_while_a_file_is_closed_closes_it(
    failure: CheckpointError | None, pool: int
) -> None:
    """What failed before is raised; but not the loss of a rank, which others tell of.

    The file is closed by the lane that reads its last unit; or, with one lane, behind the failure.
    """
    shared, others = Wanted(0, 0, 2 * SLAB, 0, 0), Wanted(1, 0, 9 * SLAB, 0, 0)
    wish = Wish((2 * SLAB, 9 * SLAB), ((shared,), (shared, others)))
    group = await group_of(wish, [config_of(pool)] * 2)
    network, rank = MemoryNetwork(2), group.ranks()[0]
    assert [unit.takers for unit, _ in rank.part.reads] == [(1,)] * 2
    opens = rank.reading.opens = OneWay(1)
    loading = asyncio.create_task(
        read_shared(rank.part, rank.reading, network.links[0], rank.context), name="a rank"
    )
    await asyncio.sleep(1)
    if failure is not None:
        network.message(0, 1, rank.part.reads[0].unit.number).taken.set_exception(failure)
        await asyncio.sleep(1)
    for _ in range(2):
        loading.cancel()
        await asyncio.sleep(1)
    assert not loading.done()
    opens.let_in()
    expected = StorageError if isinstance(failure, StorageError) else asyncio.CancelledError
    with pytest.raises(expected):
        await loading
    group.assert_nothing_is_left(network)


@in_virtual_time
async def test_a_lane_that_somebody_cancels_fails_the_load() -> None:
    """What it was at has not landed, and its file would stay open, whatever was read before."""
    wanted = (Wanted(0, 0, 200 * KiB, 0, 0),)
    group = await group_of(Wish((200 * KiB,), (wanted, ())), [config_of(4)] * 2)
    ranks, network = group.ranks(), MemoryNetwork(2, max_delay_s=0.02)
    ranks[0].reading.read_nbytes = 200 * KiB
    loading = asyncio.create_task(ends_of(ranks, network), name="loads")
    lanes: list[asyncio.Task[object]] = []
    while not lanes:
        await asyncio.sleep(0.005)
        lanes = [t for t in asyncio.all_tasks() if t.get_name() == "lane of the pool"]
    lanes[0].cancel()
    failure, other = await loading
    assert isinstance(failure, StateError)
    assert "a task that read a part of 'memory' was cancelled" in str(failure)
    assert other is None
    group.assert_nothing_is_left(network)
    network.close()


@given(seed=seeds, pools=pools, num_loads=st.integers(2, 3))
@in_virtual_time
async def test_loads_that_share_pools_do_not_wait_for_each_other_in_a_circle(
    seed: int, pools: list[int], num_loads: int
) -> None:
    """Several exchanges at a time over pools of few slabs, begun at different times by ranks."""
    wish = all_of([100 * KiB, 50 * KiB], 4)
    group = await group_of(wish, [config_of(pool, max_reads=1) for pool in pools], seed)
    rng = random.Random(seed)
    networks = [MemoryNetwork(4, seed=seed, max_delay_s=0.02) for _ in range(num_loads)]
    every = [group.ranks() for _ in networks]

    async def take_part(rank: Rank, network: MemoryNetwork, number: int) -> None:
        await asyncio.sleep(rng.random())
        await read_shared(rank.part, rank.reading, network.links[number], rank.context)

    async with asyncio.TaskGroup() as tasks:
        for ranks, network in zip(every, networks, strict=True):
            for number, rank in enumerate(ranks):
                tasks.create_task(take_part(rank, network, number))
    for ranks, network in zip(every, networks, strict=True):
        assert group.has_landed(ranks)
        group.assert_nothing_is_left(network)


@given(seed=seeds, pool=st.integers(1, 8))
@in_virtual_time
async def test_memory_is_bounded_whatever_the_size(seed: int, pool: int) -> None:
    """Each side takes half of the pool at the most; the rest is there for others."""
    wish = all_of([400 * KiB], 2)
    group = await group_of(wish, [config_of(pool)] * 2, seed)
    network = MemoryNetwork(2, seed=seed, max_delay_s=0.02)
    ranks = group.ranks()
    await load(ranks, network)
    assert group.has_landed(ranks)
    for rank in ranks:
        peak = rank.context.pool.statistics().peak_leased_nbytes
        assert peak <= pool // 2 * 2 * SLAB


@in_virtual_time
async def test_a_slab_stays_as_it_is_until_the_device_has_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a unit that is read as of one that is taken: the next one goes into the same slab."""
    group = await group_of(all_of([200 * KiB], 2), [config_of(2)] * 2)
    device, ranks = Device(monkeypatch), group.ranks()
    await load(ranks, MemoryNetwork(2))
    assert group.has_landed(ranks)
    assert device.num_done == device.num_told == 2 * len(group.plan.units)


@in_virtual_time
async def test_an_exchange_does_not_need_the_pool() -> None:
    """While somebody else holds all of it, for as long as it likes."""
    wish = all_of([200 * KiB], 3)
    group = await group_of(wish, [config_of(2)] * 3)
    network = MemoryNetwork(3)
    ranks = group.ranks()
    async with contextlib.AsyncExitStack() as stack:
        for context in group.contexts:
            for _ in range(2):
                await stack.enter_async_context(context.pool.lease())
        await load(ranks, network)
    assert group.has_landed(ranks)
    group.assert_nothing_is_left(network)


@in_virtual_time
async def test_what_is_damaged_on_the_way_does_not_land() -> None:
    """The taker checks what it is sent, and names the file and the range."""
    wish = all_of([60 * KiB, 60 * KiB], 2)
    group = await group_of(wish, [config_of(4)] * 2)
    network = MemoryNetwork(2)
    unit = group.plan.units[2]
    network.damaged_tags.add(unit.number)
    ranks = group.ranks()
    ends = await ends_of(ranks, network)
    (taker,) = unit.takers
    error = ends[taker]
    assert isinstance(error, CorruptionError)
    assert unit.start <= error.start < error.stop <= unit.start + unit.nbytes
    assert not ranks[taker].tensors[unit.file][error.start : error.stop].any()
    group.assert_nothing_is_left(network)


@in_virtual_time
async def test_damage_is_not_taken_for_the_loss_of_a_rank() -> None:
    """Who finds it breaks its link off, and what else is under way there may end before."""
    group = await group_of(all_of([SLAB] * 3, 3), [config_of(4)] * 3)
    for seed in range(30):
        network = MemoryNetwork(3, seed=seed, max_delay_s=0.02)
        network.damaged_tags.add(seed % 3)
        ends = await ends_of(group.ranks(), network)
        assert any(isinstance(end, CorruptionError) for end in ends)
        group.assert_nothing_is_left(network)


@in_virtual_time
async def test_damage_in_a_file_ends_the_load_on_every_rank() -> None:
    """Who reads it says what is damaged; who waits for it hears that it broke off."""
    wish = all_of([60 * KiB], 2)
    group = await group_of(wish, [config_of(4)] * 2)
    network = MemoryNetwork(2, max_delay_s=0.1)
    (name,) = group.storage.files
    group.storage.files[name][5] ^= 1
    ranks = group.ranks()
    ends = await ends_of(ranks, network)
    reader = group.plan.units[0].reader
    assert isinstance(ends[reader], CorruptionError)
    assert isinstance(ends[1 - reader], PeerLostError)
    assert not any(bool(rank.tensors[0][:BLOCK].any()) for rank in ranks)
    group.assert_nothing_is_left(network)


def test_progress_counts_what_is_read_and_what_is_taken() -> None:
    """Up to all that the rank has to do."""
    log = EventLog()

    async def scenario() -> None:
        group = await group_of(all_of([100 * KiB], 2), [config_of(4)] * 2, log=log)
        ranks = group.ranks()
        assert [rank.part.nbytes for rank in ranks] == [100 * KiB] * 2
        assert sum(rank.part.read_nbytes for rank in ranks) == 100 * KiB
        await load(ranks, MemoryNetwork(2))

    run_virtual(scenario(), seed=0)
    told = log.of(ReadProgressed)
    assert {event.nbytes for event in told} == {100 * KiB}
    assert [event.read_nbytes for event in told].count(100 * KiB) == 2


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(200))
@in_virtual_time
async def test_many_schedules_end_whole(seed: int) -> None:
    """Many units, many ranks, small pools, many orders: all bytes arrive."""
    rng = random.Random(seed)
    num_ranks = rng.randint(2, 8)
    wish = all_of([rng.randint(1, 300 * KiB) for _ in range(rng.randint(1, 6))], num_ranks)
    configs = [config_of(rng.randint(1, 5), rng.randint(1, 3)) for _ in range(num_ranks)]
    group = await group_of(wish, configs, seed)
    network = MemoryNetwork(num_ranks, seed=seed, max_delay_s=0.1)
    ranks = group.ranks()
    await load(ranks, network)
    assert group.has_landed(ranks)
    group.assert_nothing_is_left(network)
