"""Saves and loads of an engine in a store: each request hit by each fault, and cut off."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.config import KiB
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointError,
    CorruptionError,
    FormatError,
    SaveAbortedError,
    StorageError,
)
from ckptio.events import CleanupFailed
from ckptio.format.manifest import decode_manifest
from ckptio.format.pointer import encode_pointer
from ckptio.storage.object_files import ObjectSource
from ckptio.storage.store import StoreTraits
from ckptio.storage.streams import AwaitedSink, AwaitedSource
from ckptio.testing import EventLog, MemoryBucket, MemoryStore, crash_at, hit, run_virtual
from ckptio.testing.objects import FaultKind, MemoryBackend
from tests.manifests import block_checksums
from tests.rig import (
    SAVE_IDS,
    SMALL,
    assert_same,
    config_with,
    contents_of,
    fill_attempt,
    inline_engine,
    is_same,
    manifest_of,
    object_storage,
    random_state,
    write_files,
)
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    import torch

    from ckptio.config import CheckpointConfig
    from ckptio.handle import SaveHandle
    from ckptio.testing import Operation
    from ckptio.testing.objects import StoreFault

pytestmark = pytest.mark.usefixtures("no_leaks")
seeds = st.integers(0, 2**32)

PREFIX = "run/step-1/"
CONFIG = config_with(block_nbytes=64 * KiB, request_timeout_s=60.0)
OLD = random_state([5000, 100], 1)
NEW = random_state([150 * KiB, 3000, 300 * KiB], 2)
NEXT = random_state([10], 3)
LIVING = SAVE_IDS[0]

ATOMIC = StoreTraits(conditional="atomic")
CREATES = StoreTraits(conditional="create")
PLAIN = StoreTraits(conditional="none", in_order=True)
TRAITS = pytest.mark.parametrize(
    "traits",
    [
        pytest.param(ATOMIC, id="atomic"),
        pytest.param(CREATES, id="create", marks=pytest.mark.stress),
        pytest.param(PLAIN, id="none"),
    ],
)
FRESH = pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "overwrite"])
SEED = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.stress) for seed in range(1, 6))]
)
KINDS: Sequence[FaultKind] = get_args(FaultKind)


async def save(
    bucket: MemoryBucket,
    state: Mapping[str, torch.Tensor],
    *,
    traits: StoreTraits = ATOMIC,
    fault: StoreFault | None = None,
    seed: int = 0,
    overwrite: bool = True,
    log: EventLog | None = None,
    config: CheckpointConfig = CONFIG,
) -> MemoryStore:
    """Save as a process of its own; gives the way to the bucket that it used."""
    store = MemoryStore(bucket, seed=seed, max_delay_s=0.05, traits=traits, fault=fault)
    storage = object_storage(store, config=config, log=log, seed=seed)
    async with inline_engine({"c": storage}, config) as engine:
        await engine.save(state, "c", overwrite=overwrite)
    assert store.num_running == 0
    return store


async def load(
    bucket: MemoryBucket, fault: StoreFault | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    store = MemoryStore(bucket, seed=seed, max_delay_s=0.05, fault=fault)
    storage = object_storage(store, config=CONFIG, seed=seed)
    async with inline_engine({"c": storage}, CONFIG) as engine:
        state: dict[str, torch.Tensor] = await engine.load("c")
    assert store.num_running == 0
    return state


def committed(bucket: MemoryBucket, prefix: str = PREFIX) -> list[str] | None:
    """Name the keys of the checkpoint that is there, each of which is whole."""
    found = bucket.objects.get(f"{prefix}manifest.json")
    if found is None:
        return None
    manifest = decode_manifest(found.data)
    for entry in manifest.files:
        data = bucket.objects[prefix + entry.name].data
        sums = block_checksums(memoryview(data), manifest.block_nbytes)
        assert tuple(sums) == entry.checksums()
    return sorted([f"{prefix}manifest.json", *(prefix + entry.name for entry in manifest.files)])


def assert_tidy(bucket: MemoryBucket) -> None:
    """Check that there is a checkpoint, and nothing else."""
    assert bucket.keys == committed(bucket)
    assert bucket.open_uploads == {}


def marks(bucket: MemoryBucket, traits: StoreTraits, *, fresh: bool) -> set[str]:
    """Give the marks that may stay: of a commit of which something may still be under way."""
    if traits is ATOMIC and not fresh:
        return set()
    return {key for key in bucket.keys if ".attempt-" in key}


async def assert_sweepable(bucket: MemoryBucket, traits: StoreTraits) -> None:
    """Check that a save hours later leaves itself and nothing else."""
    await asyncio.sleep(7300)
    await save(bucket, NEXT, traits=traits)
    assert_same(await load(bucket), NEXT)
    assert_tidy(bucket)


@functools.cache
def num_requests(traits: StoreTraits, *, fresh: bool) -> int:
    """Count the requests of a save."""

    async def scenario() -> int:
        bucket = MemoryBucket()
        if not fresh:
            await save(bucket, OLD, traits=traits)
        return len((await save(bucket, NEW, traits=traits, overwrite=not fresh)).operations)

    return run_virtual(scenario(), seed=0)


@TRAITS
@FRESH
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "short"])
def test_a_save_survives_a_fault_of_any_request(
    traits: StoreTraits, kind: FaultKind, *, fresh: bool
) -> None:
    """It is committed, or a typed error; never half, and nothing stays that is not told."""

    async def scenario(number: int) -> bool:
        bucket, log, fault = MemoryBucket(), EventLog(), hit(number, kind)
        if not fresh:
            await save(bucket, OLD, traits=traits)
        old = bucket.keys
        error = await failure_of(
            save(bucket, NEW, traits=traits, fault=fault, overwrite=not fresh, log=log)
        )
        if error is not None:
            assert kind == "refused", error
            assert "access denied" in str(error)
        if error is None or "nobody knows" in str(error):  # written, and not to be read back
            assert_same(await load(bucket), NEW)
            kept = set(committed(bucket) or [])
        else:
            kept = set(old)
            assert committed(bucket) == (old or None)
        if kind == "late":  # what comes long after it was given up can only be swept
            await asyncio.sleep(200)
            assert_same(await load(bucket), NEW)
        elif not log.of(CleanupFailed) and "nobody knows" not in str(error):
            assert set(bucket.keys) - marks(bucket, traits, fresh=fresh) <= kept
            assert bucket.open_uploads == {}
        if kind == "late" or number % 5 == 0:
            await assert_sweepable(bucket, traits)
        return error is None

    saved = [
        run_virtual(scenario(number), seed=number)
        for number in range(num_requests(traits, fresh=fresh) + 2)
    ]
    assert all(saved) == (kind != "refused")
    assert saved[-1]


async def failure_of(coroutine: Awaitable[object]) -> CheckpointError | None:
    """Give the error that something ends with."""
    try:
        await coroutine
    except CheckpointError as error:
        return error
    return None


def watching(fault: StoreFault, seen: list[Operation]) -> StoreFault:
    """Give a fault that keeps what it is shown."""

    def watched(request: Operation) -> FaultKind | None:
        seen.append(request)
        return fault(request)

    return watched


@pytest.mark.parametrize("times", [1, 50])
@pytest.mark.parametrize("kind", KINDS)
@in_virtual_time
async def test_a_load_survives_a_fault_of_any_request(kind: FaultKind, times: int) -> None:
    """It gives what was saved, or a typed error; a bit that changes on its way is found.

    What is read wrong once is read again, and is no damage.
    """
    bucket = MemoryBucket()
    await save(bucket, NEW)
    for number in range(100):
        seen: list[Operation] = []
        watched = watching(hit(number, kind, times=times), seen)

        try:
            assert_same(await load(bucket, watched, seed=number), NEW)
        except (CorruptionError, FormatError):
            assert kind == "corrupted"
            assert times > 1
        except CheckpointError as error:
            assert kind == "refused" or times > 1, error
            assert kind != "refused" or "access denied" in str(error)
        else:
            is_read = number < len(seen) and seen[number].kind in ("get", "get_into")
            assert kind != "refused" or not is_read
            assert kind != "corrupted" or not is_read or times == 1
        if number >= len(seen):
            break
    assert number > 5


@pytest.mark.parametrize("nbytes", [None, 5])
@in_virtual_time
async def test_a_file_that_is_not_what_was_written_is_not_closed(nbytes: int | None) -> None:
    """Whatever the store said of it: it is gone, or has another size."""
    store = MemoryStore()

    def lose(request: Operation) -> None:
        if request.kind == "head":
            store.bucket.objects.pop(request.path)
            if nbytes is not None:
                store.bucket.put(request.path, bytes(nbytes))

    attempt = await object_storage(store).begin(SAVE_IDS[0], overwrite=False)
    store.fault = lose
    for size in (10, 3 * SMALL.slab_nbytes):
        with pytest.raises(StorageError, match="written"):
            await fill_attempt(attempt, contents_of(SAVE_IDS[0], size))
    store.fault = None
    await attempt.abort()


@pytest.mark.parametrize(
    ("kind", "num", "least_s"), [("after", 1, 0.0), ("before", 2, 0.2), ("refused", 1, 0.0)]
)
@in_virtual_time
async def test_an_upload_is_ended_again_only_if_that_may_help(
    kind: FaultKind, num: int, least_s: float
) -> None:
    """Not if it is there, nor if the store has said no; and not at once."""
    store = MemoryStore(fault=hit(0, kind, operation="complete"))
    attempt = await object_storage(store).begin(SAVE_IDS[0], overwrite=False)
    began_s = asyncio.get_running_loop().time()
    contents = contents_of(SAVE_IDS[0], 3 * SMALL.slab_nbytes)
    if kind == "refused":
        with pytest.raises(StorageError, match=r"cannot complete .*access denied"):
            await fill_attempt(attempt, contents)
    else:
        await fill_attempt(attempt, contents)
    assert store.counts["complete"] == num
    assert asyncio.get_running_loop().time() - began_s >= least_s
    await attempt.abort()
    assert not store.bucket.keys
    assert not store.bucket.open_uploads


@in_virtual_time
async def test_why_an_upload_cannot_be_ended_is_told_though_nothing_can_be_looked_at() -> None:
    """What came first says more."""
    store = MemoryStore()
    attempt = await object_storage(store).begin(SAVE_IDS[0], overwrite=False)
    store.fault = lambda op: "refused" if op.kind in ("complete", "head") else None
    with pytest.raises(StorageError, match="cannot complete"):
        await fill_attempt(attempt, contents_of(SAVE_IDS[0], 3 * SMALL.slab_nbytes))
    store.fault = None
    await attempt.abort()


@pytest.mark.parametrize("is_gone", [False, True])
@in_virtual_time
async def test_why_a_file_cannot_be_read_is_told_though_it_cannot_be_looked_at(
    *, is_gone: bool
) -> None:
    """Or is gone since."""
    store = MemoryStore()
    storage = object_storage(store)
    contents = contents_of(SAVE_IDS[0], 10)
    await write_files(storage, SAVE_IDS[0], contents)
    (name,) = contents

    def refuse(request: Operation) -> FaultKind | None:
        if request.kind == "head" and is_gone:
            return None
        if is_gone:
            store.bucket.objects.pop(request.path)
        return "refused"

    source = await storage.open(name, 10)
    assert isinstance(source, AwaitedSource)
    store.fault = refuse
    with pytest.raises(StorageError, match="cannot read"):
        await source.read_into(0, memoryview(bytearray(10)))


@in_virtual_time
async def test_a_request_reads_over_a_little_that_nobody_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where that costs less than another one; it lands nowhere."""
    monkeypatch.setattr(MemoryBackend, "gap_nbytes", lambda _: 8 * KiB)
    state = random_state([8 * KiB] * 3)
    ends = ["tensor0", "tensor2"]

    bucket = MemoryBucket()
    await save(bucket, state, config=SMALL)
    store = MemoryStore(bucket)
    async with inline_engine({"c": object_storage(store)}) as engine:
        assert_same(await engine.load("c", select=ends), {name: state[name] for name in ends})
    sizes = [request.nbytes for request in store.operations if request.kind == "get_into"]
    assert sizes == [24 * KiB]


class DamagesSome(MemoryStore):
    """What is read of several blocks at once has a wrong byte in all but the first."""

    async def get_into(self, key: str, start: int, room: memoryview, *, match: str = "") -> None:
        await super().get_into(key, start, room, match=match)
        for at in range(SMALL.block_nbytes, len(room), SMALL.block_nbytes):
            room[at] ^= 1


@in_virtual_time
async def test_damaged_blocks_of_a_range_are_read_again_each_for_itself() -> None:
    """All of them, and where they belong."""
    block = SMALL.block_nbytes
    state = random_state([SMALL.slab_nbytes])

    bucket = MemoryBucket()
    await save(bucket, state, config=SMALL)
    store = DamagesSome(bucket)
    async with inline_engine({"c": object_storage(store)}) as engine:
        assert_same(await engine.load("c"), state)
    sizes = [request.nbytes for request in store.operations if request.kind == "get_into"]
    assert sizes.count(block) >= SMALL.slab_nbytes // block - 1 > 1


def test_what_ends_before_it_should_is_damage() -> None:
    """Also where it does so only as it is read."""

    def cut(request: Operation) -> None:
        if request.kind == "get_into":
            bucket.put(request.path, bytes(100))

    async def scenario() -> None:
        await save(bucket, OLD)
        store = MemoryStore(bucket)
        async with inline_engine({"c": object_storage(store, config=CONFIG)}, CONFIG) as engine:
            store.fault = cut
            report = await engine.verify("c")
        (damage,) = report.damage
        assert damage.problem.startswith("the file ends at byte 100 ")

    bucket = MemoryBucket()
    run_virtual(scenario(), seed=0)


def test_damage_is_told_though_it_cannot_be_read_again() -> None:
    """The first read found which blocks are damaged; that the rest is gone since says less."""
    seen: set[str] = set()

    def corrupt_then_cut(request: Operation) -> FaultKind | None:
        if request.kind != "get_into":
            return None
        if request.path in seen:
            bucket.put(request.path, bytes(100))
        seen.add(request.path)
        return "corrupted"

    async def scenario() -> None:
        await save(bucket, OLD)  # one block
        store = MemoryStore(bucket, fault=corrupt_then_cut)
        async with inline_engine({"c": object_storage(store, config=CONFIG)}, CONFIG) as engine:
            report = await engine.verify("c")
        assert seen
        (damage,) = report.damage
        assert damage.problem.startswith("checksum ")

    bucket = MemoryBucket()
    run_virtual(scenario(), seed=0)


@TRAITS
@FRESH
@SEED
def test_a_crash_at_any_request_leaves_the_old_or_the_new(
    traits: StoreTraits, seed: int, *, fresh: bool
) -> None:
    """What is committed loads, and a save an hour later removes the dead one's, nobody else's."""

    async def scenario(number: int) -> str:
        bucket = MemoryBucket()
        others = [f"{PREFIX}notes.txt", f"{PREFIX}below/data-{'0' * 32}-00000-00000.safetensors"]
        for key in others:
            bucket.put(key, b"somebody else's")
        if not fresh:
            await save(bucket, OLD, traits=traits)
        fault = crash_at(number)
        with contextlib.suppress(SaveAbortedError):
            await save(bucket, NEW, traits=traits, fault=fault, seed=seed, overwrite=not fresh)
        there = committed(bucket)
        outcome = "nothing"
        if there is not None:
            state = await load(bucket)
            outcome = "new" if is_same(state, NEW) else "old"
            assert_same(state, NEW if outcome == "new" else OLD)
        await asyncio.sleep(3000)
        living = await object_storage(MemoryStore(bucket, traits=traits)).begin(
            LIVING, overwrite=True
        )
        contents = contents_of(LIVING, 5000, 100 * KiB)
        await fill_attempt(living, contents)
        await asyncio.sleep(1000)
        await save(bucket, NEXT, traits=traits)
        assert_same(await load(bucket), NEXT)
        alive = sorted(f"{PREFIX}{name}" for name in (*contents, f".attempt-{LIVING}"))
        assert bucket.keys == sorted([*(committed(bucket) or []), *alive, *others])
        assert bucket.open_uploads == {}
        await living.commit(manifest_of(LIVING, contents))
        assert bucket.keys == sorted([*(committed(bucket) or []), *others])
        return outcome

    outcomes = [
        run_virtual(scenario(number), seed=seed)
        for number in range(num_requests(traits, fresh=fresh) + 1)
    ]
    assert outcomes == sorted(outcomes, key=["nothing", "old", "new"].index)
    assert set(outcomes) == {"nothing" if fresh else "old", "new"}


@TRAITS
@FRESH
@SEED
def test_aborting_at_any_request_leaves_nothing(
    traits: StoreTraits, seed: int, *, fresh: bool
) -> None:
    """Whenever a save is aborted, it is gone without a trace, or it was committed before."""

    async def scenario(number: int) -> bool:
        bucket = MemoryBucket()
        if not fresh:
            await save(bucket, OLD, traits=traits)
        handles: list[SaveHandle] = []

        def fault(request: Operation) -> None:
            if request.number == number:
                asyncio.get_running_loop().call_later(0.01 * seed, handles[0].abort)

        store = MemoryStore(bucket, seed=number, max_delay_s=0.05, traits=traits, fault=fault)
        storage = object_storage(store, config=CONFIG)
        async with inline_engine({"c": storage}, CONFIG) as engine:
            handles.append(engine.save(NEW, "c", overwrite=not fresh))
            try:
                await handles[0]
                is_saved = True
            except SaveAbortedError:
                is_saved = False
        if is_saved or not fresh:
            assert_tidy(bucket)
            assert_same(await load(bucket), NEW if is_saved else OLD)
        else:
            assert bucket.keys == []
            assert bucket.open_uploads == {}
        return is_saved

    saved = [
        run_virtual(scenario(number), seed=seed)
        for number in range(num_requests(traits, fresh=fresh))
    ]
    assert not saved[0]
    assert saved[-1]


@given(
    sizes=st.lists(st.integers(1, 400 * KiB), min_size=1, max_size=8),
    seed=seeds,
    num_slabs=st.integers(1, 3),
    num_saves=st.integers(1, 3),
    in_order=st.booleans(),
)
@in_virtual_time
async def test_a_pool_of_one_slab_is_enough(
    sizes: list[int], seed: int, num_slabs: int, num_saves: int, *, in_order: bool
) -> None:
    """However small the pool, and whoever comes first, parts that come in order do come."""
    config = config_with(pool_nbytes=num_slabs * 64 * KiB, max_requests=2, max_saves=3)
    assert config.num_slabs == num_slabs

    bucket = MemoryBucket()
    traits = StoreTraits(conditional="atomic", in_order=in_order)
    store = MemoryStore(bucket, seed=seed, max_delay_s=0.05, traits=traits)
    storages = {
        f"c{i}": object_storage(store, url=f"memory://run/step-{i}", config=config)
        for i in range(num_saves)
    }
    states = {path: random_state(sizes, seed=i) for i, path in enumerate(storages)}
    async with inline_engine(storages, config) as engine:
        handles = [engine.save(state, path) for path, state in states.items()]
        for handle in handles:
            await handle
        for path, state in states.items():
            assert_same(await engine.load(path), state)
        assert engine.statistics().peak_leased_nbytes <= num_slabs * 64 * KiB
    assert store.peak_requests <= 2 * num_saves


@in_virtual_time
async def test_a_store_that_is_away_ends_a_save_with_an_error() -> None:
    """After the tries that the options allow, and it says what it wanted of which object."""
    bucket = MemoryBucket()
    for operation in ("put", "upload", "write", "complete", "head", "get"):
        fault = hit(0, "before", operation=operation, times=1_000_000)
        error = await failure_of(save(bucket, NEW, fault=fault))
        assert PREFIX in str(error), operation
        assert committed(bucket) is None


@in_virtual_time
async def test_sizes_that_cannot_be_told_are_a_typed_error() -> None:
    """Looking at many files at once raises one error, not a group."""
    bucket = MemoryBucket()
    await save(bucket, NEW)
    fault = hit(0, "refused", operation="head", times=100)
    storage = object_storage(MemoryStore(bucket, fault=fault))
    with pytest.raises(CheckpointError, match="access denied"):
        await storage.sizes(["a", "b"])


@in_virtual_time
async def test_one_tensor_costs_one_range() -> None:
    """A tensor out of a large object is read by one request of its own blocks."""
    bucket = MemoryBucket()
    state = random_state([16 * KiB] * 16)
    await save(bucket, state)
    store = MemoryStore(bucket)
    storage = object_storage(store, config=CONFIG)
    async with inline_engine({"c": storage}, CONFIG) as engine:
        part = await engine.load_slice("c", "tensor3", slice(0, 16 * KiB))
    assert part.equal(state["tensor3"])
    ranges = [op.nbytes for op in store.operations if op.kind == "get_into"]
    assert len(ranges) == 1
    assert ranges[0] <= 2 * CONFIG.block_nbytes


@in_virtual_time
async def test_what_lies_below_is_looked_for_by_number_and_not_among_objects() -> None:
    """Step 10 comes behind step 9, however many files lie beside them."""
    bucket = MemoryBucket()
    for step in (9, 10):
        bucket.put(f"{PREFIX}step-{step}/manifest.json", b"{}")
    for number in range(5):
        bucket.put(f"{PREFIX}z-{number}", b"")
    store = MemoryStore(bucket)
    assert await object_storage(store).find_below() == "step-10"
    assert store.counts == {"list": 1, "head": 2}


@in_virtual_time
async def test_all_that_one_load_asks_for_has_one_deadline() -> None:
    """An outage that has lasted for as long as it may is not waited for by each call anew."""
    config = config_with(retry_timeout_s=30.0, max_retries=1000)
    store = MemoryStore(fault=hit(0, "before", times=1_000_000))
    storage = object_storage(store, config=config)
    for _ in range(2):
        with pytest.raises(StorageError, match="the connection broke"):
            await storage.version()
        assert 10 < asyncio.get_running_loop().time() <= 30


@in_virtual_time
async def test_a_manifest_that_is_no_manifest_is_told_with_its_url() -> None:
    """A pointer that leads nowhere, say: which checkpoint it is of."""
    bucket = MemoryBucket()
    bucket.put(f"{PREFIX}manifest.json", encode_pointer(LIVING, b"a large manifest"))
    with pytest.raises(FormatError, match="'memory://run/step-1': the manifest points to"):
        await object_storage(MemoryStore(bucket)).read_manifest()


@pytest.mark.parametrize("num_slabs", [0, 1, 2])
@in_virtual_time
async def test_a_file_costs_as_few_requests_as_it_can(num_slabs: int) -> None:
    """One of a slab is one request; an empty one is written, too; nothing lists uploads."""
    bucket = MemoryBucket()
    store = MemoryStore(bucket)
    attempt = await object_storage(store).begin(LIVING, overwrite=False)
    before = store.counts.copy()
    slab = bytes(SMALL.slab_nbytes)
    sink = await attempt.create("data", num_slabs * len(slab))
    for number in range(num_slabs):
        assert isinstance(sink, AwaitedSink)
        await sink.write(number * len(slab), memoryview(slab))
    await sink.close()
    in_parts = {"upload": 1, "write": 2, "complete": 1, "head": 1}
    assert store.counts - before == (in_parts if num_slabs == 2 else {"put": 1, "head": 1})
    assert bucket.objects[f"{PREFIX}data"].data == slab * num_slabs


@pytest.mark.parametrize("num_slabs", [1, 2])
@in_virtual_time
async def test_data_that_takes_too_long_makes_fewer_requests_run(num_slabs: int) -> None:
    """The way may be narrow; so it is with a file in one request, and with one in parts."""
    store = MemoryStore()
    storage = object_storage(store, config=config_with(request_timeout_s=60.0))
    attempt = await storage.begin(LIVING, overwrite=False)
    slab = bytes(SMALL.slab_nbytes)
    sink = await attempt.create("data", num_slabs * len(slab))
    assert isinstance(sink, AwaitedSink)
    store.fault = hit(0, "stalled", operation="put" if num_slabs == 1 else "write")
    _, limit = await storage._open_store.get()
    before = limit.allowed
    await sink.write(0, memoryview(slab))
    assert limit.allowed < before * 3 // 4


@pytest.mark.parametrize("data", [b"another one", b"short"])
@in_virtual_time
async def test_an_object_that_is_another_by_now_has_changed(data: bytes) -> None:
    """Whether or not it is long enough, where it was to have the etag that it had."""
    bucket = MemoryBucket()
    bucket.put(f"{PREFIX}a", b"as it was then")
    store = MemoryStore(bucket)
    info = await store.head(f"{PREFIX}a")
    bucket.put(f"{PREFIX}a", data)
    requests = (await object_storage(store).reach())[1]
    room = memoryview(bytearray(len(b"another one")))
    source = ObjectSource("c", store, requests, f"{PREFIX}a", "a", len(room), info.etag)
    with pytest.raises(CheckpointChangedError):
        await source.read_into(0, room)
    assert store.counts["head"] == 1  # nothing is asked again
    store.fault = hit(0, "refused", operation="get_into")
    with pytest.raises(CheckpointChangedError):
        await source.read_into(0, room)


@pytest.mark.parametrize("kind", ["put", "upload", "complete"])
@in_virtual_time
async def test_a_request_that_makes_something_is_waited_for(kind: str) -> None:
    """Who cancels it cleans up behind it: nothing may come later."""
    store = MemoryStore()
    attempt = await object_storage(store).begin(LIVING, overwrite=False)
    slab = bytes(SMALL.slab_nbytes)
    sink = await attempt.create("data", len(slab) * (1 if kind == "put" else 2))
    assert isinstance(sink, AwaitedSink)
    loop = asyncio.get_running_loop()

    def fault(request: Operation) -> None:
        if request.kind == kind:
            loop.call_soon(task.cancel)

    async def fill() -> None:
        for start in range(0, sink._nbytes, len(slab)):
            await sink.write(start, memoryview(slab))
        await sink.close()

    task = loop.create_task(fill())
    store.fault, store._max_delay_s = fault, 1.0
    with pytest.raises(asyncio.CancelledError):
        await task
    made = [upload.key for upload in store.bucket.open_uploads.values()]
    assert made == ([f"{PREFIX}data"] if kind == "upload" else [])
    assert (f"{PREFIX}data" in store.bucket.keys) == (kind != "upload")
