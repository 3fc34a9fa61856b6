"""Checkpointers on object stores: what is otherwise where no directory is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio import (
    Checkpointer,
    CheckpointExistsError,
    ConfigError,
    CorruptionError,
    Engine,
    KeepLast,
    PerRank,
    SaveEvery,
    sync,
)
from ckptio.checkpointer.steps import step_name
from ckptio.events import CheckpointRemoved, CleanupFailed, LeftoversRemoved, RetentionFailed
from ckptio.storage.store import ObjectInfo, StoreTraits
from ckptio.testing import EventLog, run_virtual
from tests.checkpointer.rig import checkpointer_on, engines, files_in, on_each
from tests.rig import SMALL, assert_same, config_with, filled_state
from tests.storage.object_rig import DictStore, put
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Sequence


pytestmark = pytest.mark.usefixtures("no_leaks")
SIZES = [5000, 100]
OLD_S = 10_000


def state_of(step: int) -> dict[str, torch.Tensor]:
    return filled_state(SIZES, step % 251)


async def save_steps(url: str, *steps: int, **options: Any) -> None:
    async with Checkpointer(url, **{"config": SMALL, **options}) as ckpt:
        for step in steps:
            await ckpt.save(state_of(step), step)


async def test_a_step_that_was_not_committed_is_none(url: str) -> None:
    """What a dead save left, other programs' objects, names of others: never the latest."""
    await save_steps(url, 3)
    put(f"{url}/{step_name(7)}/data-{'a' * 32}-00000-00000.safetensors", b"x", 0)
    put(f"{url}/{step_name(8)}", b"an object", 0)
    put(f"{url}/step-9/manifest.json", b"{}", 0)
    async with Checkpointer(url, config=SMALL) as ckpt:
        assert await ckpt.steps() == (3,)
        assert_same(await ckpt.load(), state_of(3))


async def test_a_damaged_step_raises_and_says_what_to_load(url: str) -> None:
    """Which work to give up is the user's to decide."""
    await save_steps(url, 1, 2)
    (name,) = [n for n in files_in(url)[step_name(2)] if n.startswith("data-")]
    memory, path = fsspec.filesystem("memory"), f"/{url.partition('://')[2]}/{step_name(2)}/{name}"
    data = memory.cat_file(path)
    memory.pipe_file(path, data[:-1] + bytes([data[-1] ^ 1]))
    async with Checkpointer(url, config=SMALL) as ckpt:
        with pytest.raises(CorruptionError) as caught:
            await ckpt.load()
        assert "load(step=1)" in caught.value.__notes__[-1]


async def test_what_cannot_be_read_counts_for_nothing_and_stays(url: str) -> None:
    """A damaged manifest, and with it what it may need."""
    await save_steps(url, 1, 2, 50)
    put(f"{url}/{step_name(50)}/manifest.json", b"{}", 0)
    await save_steps(url, 3, keep=KeepLast(2))
    assert sorted(files_in(url)) == [step_name(step) for step in (2, 3, 50)]
    assert len(files_in(url)[step_name(50)]) == 2


async def test_dead_saves_are_swept_when_a_run_begins(url: str) -> None:
    """After an hour, and what a removal left at once; what is not ours stays."""
    log = EventLog()
    await save_steps(url, 3)
    put(f"{url}/{step_name(5)}/data-{'a' * 32}-00000-00000.safetensors", b"x", OLD_S)
    put(f"{url}/{step_name(6)}/data-{'a' * 32}-00000-00000.safetensors", b"x", 60)
    put(f"{url}/step-5/data-{'a' * 32}-00000-00000.safetensors", b"x", OLD_S)
    memory, top = fsspec.filesystem("memory"), "/" + url.partition("://")[2]
    (manifest,) = [p for p in memory.find(f"{top}/{step_name(3)}") if p.endswith("manifest.json")]
    tomb = manifest.replace("manifest.json", f".manifest-{save_id_of(files_in(url))}-old")
    memory.mv(manifest, tomb)
    await save_steps(url, sweep_after_s=1, observer=log)
    assert sorted(files_in(url)) == [step_name(6), "step-5"]
    assert len(log.of(LeftoversRemoved)) == 1


def save_id_of(found: dict[str, list[str]]) -> str:
    """Give the id of the save of step 3."""
    (name,) = [name for name in found[step_name(3)] if name.startswith("data-")]
    return name.split("-")[1]


@pytest.mark.parametrize("seed", range(3))
def test_ranks_save_keep_and_load_together(seed: int) -> None:
    """Rank 0 lists and removes; each rank writes its own objects."""

    async def body(rank: int, engine: Engine, log: EventLog) -> None:
        async with checkpointer_on(
            engine, "dict://run", keep=KeepLast(2), every=SaveEvery(steps=3), sweep_after_s=1.0
        ) as ckpt:
            assert await ckpt.latest() is None
            for step in range(1, 13):
                if await ckpt.should_save(step):
                    own = torch.full((SMALL.slab_nbytes // 2,), rank, dtype=torch.uint8)
                    state = {**state_of(step), f"own{rank}": own, "rank": PerRank(rank)}
                    await ckpt.save(state, step)
        async with checkpointer_on(engine, "dict://run") as ckpt:
            assert await ckpt.steps() == (9, 12)
            state = await ckpt.load(select=["tensor*", "rank"])
            assert state.pop("rank") == rank
            assert_same(state, state_of(12))
        assert [event.step for event in log.of(CheckpointRemoved)] == [3, 6]

    store, log = DictStore(seed, max_delay_s=0.02), EventLog()

    async def scenario() -> None:
        async with engines(2, log=log, seed=seed, store=store) as group:
            assert await on_each(group, lambda r, e: body(r, e, log)) == [None, None]

    run_virtual(scenario(), seed=seed)
    found = places_in(store)
    assert sorted(found) == [step_name(9), step_name(12)]
    for names in found.values():
        ranks = {name.split("-")[2] for name in names if name.startswith("data-")}
        assert ranks == {"00000", "00001"}


@pytest.mark.parametrize("seed", range(3))
@in_virtual_time
async def test_ranks_do_not_save_over_what_only_the_second_tier_has(seed: int) -> None:
    """One looks, and all hear of it."""

    async def body(_: int, engine: Engine) -> None:
        async with checkpointer_on(
            engine, "dict://near", then="dict://far", keep_local=1, sweep_after_s=None
        ) as ckpt:
            for step in (1, 2):
                await ckpt.save(state_of(step), step).durable
        async with checkpointer_on(engine, "dict://near", then="dict://far") as ckpt:
            with pytest.raises(CheckpointExistsError):
                await ckpt.save(state_of(3), 1)
            assert await ckpt.steps() == (1, 2)

    store = DictStore(seed, max_delay_s=0.02)

    async with engines(2, seed=seed, store=store) as group:
        assert await on_each(group, body) == [None, None]
    assert {key.split("/")[1] for key in store.objects if key.startswith("near/")} == {step_name(2)}
    assert not [key for key in store.objects if ".copy-" in key]


class _SilentStore(DictStore):
    """A store that does not say for a while whether a manifest is at the second tier."""

    def __init__(self) -> None:
        super().__init__()
        self.speaks = asyncio.Event()

    async def head(self, key: str) -> ObjectInfo:
        if key == f"far/{step_name(1)}/manifest.json":
            await self.speaks.wait()
        return await super().head(key)


@in_virtual_time
async def test_a_commit_does_not_wait_long_for_a_second_tier_that_is_away() -> None:
    """The first tier's checkpoint is what a save is for."""
    store = _SilentStore()
    async with (
        engines(store=store) as (engine,),
        checkpointer_on(engine, "dict://near", then="dict://far") as ckpt,
    ):
        handle = ckpt.save(state_of(1), 1)
        await handle
        assert not store.speaks.is_set()
        assert asyncio.get_running_loop().time() < 10
        store.speaks.set()
        await handle.durable


class _Mute(DictStore):
    """A store that stops to answer where a checkpoint is removed, or the note beside it."""

    def __init__(self, of: str = "/manifest.json") -> None:
        super().__init__()
        self.of = of
        self.is_mute = False
        self.num_asked = 0

    async def delete(self, keys: Sequence[str]) -> None:
        if self.is_mute and self.of in keys[0]:
            self.num_asked += 1
            await asyncio.Event().wait()
        await super().delete(keys)


class _MuteBehindCommit(_Mute):
    """A store that stops to answer right behind the second commit, of which it tells late."""

    num_commits = 0

    async def put(self, key: str, data: bytes | memoryview, **options: Any) -> str:
        answer = await super().put(key, data, **options)
        self.num_commits += key.endswith("/manifest.json")
        if self.num_commits == 2 and key.endswith("/manifest.json"):
            self.is_mute = True
            await asyncio.sleep(5)
        return answer


class _MuteOfMarks(_MuteBehindCommit):
    """One that sends no condition along, and so asks for the mark of what it replaces."""

    traits = StoreTraits(conditional="none")

    first_mark = ""

    async def put(self, key: str, data: bytes | memoryview, **options: Any) -> str:
        if self.of in key:
            self.first_mark = self.first_mark or key
        return await super().put(key, data, **options)

    async def head(self, key: str) -> ObjectInfo:
        if self.is_mute and key == self.first_mark:
            self.num_asked += 1
            await asyncio.Event().wait()
        return await super().head(key)


@pytest.mark.parametrize("how", ["error", "preempted"])
def test_a_removal_that_gets_no_answer_does_not_hold_who_leaves(how: str) -> None:
    """Ten seconds at the most: it would be tried for as many minutes."""
    store, log, left_s = _Mute(), EventLog(), list[float]()

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with engines(store=store, log=log) as (engine,):
            with contextlib.suppress(KeyError):
                async with checkpointer_on(
                    engine, "dict://run", keep=KeepLast(1), preempt_deadline_s=5.0
                ) as ckpt:
                    await ckpt.save(state_of(1), 1)
                    store.is_mute = True
                    await ckpt.save(state_of(2), 2)
                    while not store.num_asked:
                        await asyncio.sleep(0.01)
                    left_s.append(clock())
                    if how == "error":
                        raise KeyError
                    ckpt.preempt("a notice")
                    await asyncio.sleep(0.1)
                    await ckpt.save(state_of(3), 3)
            left_s.append(clock())

    run_virtual(scenario(), seed=0)
    assert left_s[1] - left_s[0] < 16
    (event,) = log.of(CleanupFailed)
    assert event.path == f"dict://run/{step_name(1)}"


@pytest.mark.parametrize("kind", [_MuteBehindCommit, _MuteOfMarks])
@pytest.mark.parametrize("when", ["before", "behind"])
@in_virtual_time
async def test_what_a_commit_leaves_in_a_store_does_not_hold_who_leaves(
    when: str, kind: type[_Mute]
) -> None:
    """Its mark, which a sweep removes; whether who leaves does so before the answer, or behind."""
    store, left_s = kind("/.attempt-"), list[float]()

    clock = asyncio.get_running_loop().time
    async with engines(store=store) as (engine,):
        with contextlib.suppress(KeyError):
            async with checkpointer_on(engine, "dict://run", sweep_after_s=None) as ckpt:
                await ckpt.save(state_of(0), 1)
                ckpt.save(state_of(1), 1, overwrite=True)
                while not (store.is_mute if when == "before" else store.num_asked):
                    await asyncio.sleep(0.01)
                left_s.append(clock())
                raise KeyError
        left_s.append(clock())
        async with checkpointer_on(engine, "dict://run", sweep_after_s=None) as ckpt:
            assert await ckpt.steps() == (1,)
    assert left_s[1] - left_s[0] < 21


@pytest.mark.parametrize("is_late", [False, True])
def test_a_note_that_a_store_keeps_does_not_hold_who_leaves(*, is_late: bool) -> None:
    """Of a copy that is made; by the run that saved, or by one that makes it after all."""
    store, left_s = _Mute("/.copy-"), list[float]()

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with engines(store=store) as (engine,):
            for _ in range(1 + is_late):
                store.is_mute, store.num_asked = True, 0
                with contextlib.suppress(KeyError):
                    async with checkpointer_on(engine, "dict://near", then="dict://far") as ckpt:
                        if not await ckpt.steps():
                            ckpt.save(state_of(1), 1)
                        while not store.num_asked:
                            await asyncio.sleep(0.01)
                        left_s.append(clock())
                        raise KeyError
                left_s.append(clock())

    run_virtual(scenario(), seed=0)
    for begin_s, end_s in itertools.pairwise(left_s):
        assert end_s - begin_s < 16
    assert len(left_s) == 2 + 2 * is_late


def test_a_store_that_removes_nothing_is_not_asked_for_each_step() -> None:
    """It was tried for ten minutes for a few of them, and then for the next."""
    store, log = _Mute(), EventLog()

    async def scenario() -> None:
        async with engines(store=store, log=log) as (engine,):
            async with checkpointer_on(engine, "dict://run") as ckpt:
                for step in range(1, 13):
                    await ckpt.save(state_of(step), step)
            store.is_mute = True
            async with checkpointer_on(engine, "dict://run", keep=KeepLast(1)) as ckpt:
                await ckpt.save(state_of(13), 13)

    run_virtual(scenario(), seed=0)
    tried = {event.path for event in log.of(CleanupFailed)}
    assert tried == {
        f"dict://run/{step_name(step)}" for step in range(1, 1 + SMALL.max_requests // 2)
    }
    assert "no answer" in str(log.of(RetentionFailed)[0].error)


@in_virtual_time
async def test_a_run_that_looks_at_its_steps_leaves_room_for_others() -> None:
    """As it begins, and after a save: half of the requests are for loads and saves meanwhile."""
    store = DictStore(max_delay_s=0.01)
    config = config_with(max_requests=8)

    async with engines(store=store, config=config) as (engine,):
        async with checkpointer_on(engine, "dict://run", sweep_after_s=None) as ckpt:
            for step in range(1, 31):
                await ckpt.save(state_of(step), step)
        for sweep_after_s, keep in ((3600.0, None), (None, KeepLast(31))):
            store.most_at_once = 0
            async with checkpointer_on(
                engine, "dict://run", keep=keep, sweep_after_s=sweep_after_s
            ) as ckpt:
                if keep is not None:
                    await ckpt.save(state_of(31), 31)
                    store.most_at_once = 0
            assert store.most_at_once == 4


def places_in(store: DictStore) -> dict[str, list[str]]:
    """Name the objects of a run, by the step they are in."""
    found: dict[str, list[str]] = {}
    for key in sorted(store.objects):
        _, step, name = key.split("/")
        found.setdefault(step, []).append(name)
    return found


@given(seed=st.integers(0, 2**32), at_s=st.floats(0, 0.5))
@in_virtual_time
async def test_leaving_by_an_error_at_any_time_leaves_whole_steps(seed: int, at_s: float) -> None:
    """A save leaves nothing, and a removal what the next run knows and removes at once."""
    store = DictStore(seed, max_delay_s=0.02)
    async with engines(seed=seed, store=store) as (engine,):
        last = 0
        with contextlib.suppress(TimeoutError, ZeroDivisionError):
            async with checkpointer_on(engine, "dict://run", keep=KeepLast(1)) as ckpt:
                for step in range(1, 4):
                    async with asyncio.timeout(at_s):
                        await ckpt.save(state_of(step), step)
                    last = step
                raise ZeroDivisionError
        for place, names in places_in(store).items():
            kinds = [name.partition("-")[0] for name in names]
            is_removed = kinds[0] == ".manifest" and set(kinds[1:]) <= {"data"}
            assert is_removed or kinds[-2:] == ["data", "manifest.json"], (place, names)
        async with checkpointer_on(engine, "dict://run", sweep_after_s=1.0) as ckpt:
            latest = await ckpt.latest()
            assert (latest or 0) >= last
            if latest is not None:
                assert_same(await ckpt.load(), state_of(latest))
        assert all("manifest.json" in names for names in places_in(store).values())


@pytest.mark.parametrize("root", ["nope://run", "s3://key:secret@bucket/run"])
async def test_a_root_that_cannot_be_is_refused(root: str) -> None:
    """When the block is entered, and without leaving anything open."""
    with pytest.raises(ConfigError) as caught:
        async with Checkpointer(root, config=SMALL):
            raise AssertionError("entered")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError), sync.Checkpointer(root, config=SMALL):
        raise AssertionError("entered")
