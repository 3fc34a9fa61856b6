"""What a run's steps cost in an object store: requests, by how many steps there are."""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

import pytest

from ckptio.checkpointer.steps import step_name
from ckptio.events import HigherStepFound, LeftoversRemoved
from ckptio.storage.file_names import QUIET_S
from ckptio.testing import EventLog, run_virtual
from tests.checkpointer.rig import checkpointer_on, engines
from tests.rig import SAVE_IDS, assert_same, filled_state
from tests.storage.object_rig import DictStore
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import torch

    from ckptio import Checkpointer

pytestmark = pytest.mark.usefixtures("no_leaks")

TIERS: dict[str, tuple[str, dict[str, str]]] = {
    "one tier": ("dict://run", {}),
    "two tiers": ("dict://near", {"then": "dict://run"}),
}


def state_of(step: int) -> dict[str, torch.Tensor]:
    return filled_state([5000], step % 251)


async def store_with(num_steps: int) -> DictStore:
    """Make a store with so many steps at `dict://run`, each a copy of one that was saved."""
    store = DictStore()
    async with engines(store=store) as (engine,), checkpointer_on(engine, "dict://run") as ckpt:
        await ckpt.save(state_of(0), 0)
    for key, data in list(store.objects.items()):
        for step in range(1, num_steps):
            store.set(key.replace(step_name(0), step_name(step)), data)
    return store


def count(store: DictStore) -> dict[str, int]:
    """Count requests by their kind, and forget them."""
    kinds = collections.Counter(kind for kind, _ in store.log)
    store.log.clear()
    return dict(kinds)


async def opened(ckpt: Checkpointer) -> None:
    """Wait for what follows the opening."""
    while not all(run.end.done() for run in ckpt._core.upkeep.passes):
        await asyncio.sleep(0.01)


async def save(ckpt: Checkpointer, step: int) -> None:
    """Save a step, and wait for all that follows."""
    await ckpt.save(state_of(step), step).durable
    await opened(ckpt)


def requests(
    what: Callable[[Checkpointer, int], Awaitable[object]], num_steps: int, tiers: str
) -> dict[str, int]:
    """Count the requests of something that a run does that has so many steps already."""
    root, options = TIERS[tiers]

    async def scenario() -> dict[str, int]:
        store = await store_with(num_steps)
        async with (
            engines(store=store) as (engine,),
            checkpointer_on(engine, root, sweep_after_s=3600.0, **options) as ckpt,
        ):
            await opened(ckpt)
            count(store)
            await what(ckpt, num_steps)
            return count(store)

    return run_virtual(scenario(), seed=0)


async def _save(ckpt: Checkpointer, num_steps: int) -> None:
    await save(ckpt, num_steps)


async def _save_a_lower_one(ckpt: Checkpointer, num_steps: int) -> None:
    await ckpt.discard_after(num_steps - 3)
    await save(ckpt, num_steps - 2)


async def _latest(ckpt: Checkpointer, num_steps: int) -> None:
    assert await ckpt.latest() == num_steps - 1


async def _load(ckpt: Checkpointer, num_steps: int) -> None:
    del num_steps
    assert_same(await ckpt.load(), state_of(0))


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("what", [_save, _save_a_lower_one, _latest, _load])
def test_no_request_is_for_every_step_there_is(
    what: Callable[[Checkpointer, int], Awaitable[object]], tiers: str
) -> None:
    """Of a run without `keep=`: a thousand saves would take half a million of them."""
    assert requests(what, 5, tiers) == requests(what, 50, tiers)


def test_few_local_steps_cost_no_look_at_every_copy() -> None:
    """What the first tier has is looked for on the second, and nothing else."""

    async def scenario(num_steps: int) -> dict[str, int]:
        store = await store_with(num_steps)
        async with (
            engines(store=store) as (engine,),
            checkpointer_on(
                engine, "dict://near", then="dict://run", keep_local=1, sweep_after_s=3600.0
            ) as ckpt,
        ):
            for step in (100, 101):
                await save(ckpt, step)
            count(store)
            await save(ckpt, 102)
            requests = count(store)
            assert await ckpt._core.keeper.steps() == [102]
            return requests

    few, many = (run_virtual(scenario(number), seed=0) for number in (5, 50))
    assert few == many


@in_virtual_time
async def test_a_higher_name_that_is_no_step_is_not_taken_for_one() -> None:
    """Neither by the latest step, nor by a load, nor by what warns of a higher one."""
    store, log = await store_with(3), EventLog()
    store.set(f"run/{step_name(9)}/.attempt-{SAVE_IDS[1]}", b"")
    async with engines(store=store, log=log) as (engine,):
        async with checkpointer_on(engine, "dict://run", sweep_after_s=3600.0) as ckpt:
            assert await ckpt.latest() == 2
            assert_same(await ckpt.load(), state_of(0))
            await save(ckpt, 3)
            assert log.of(HigherStepFound) == []
            assert await ckpt.steps() == (0, 1, 2, 3)
        async with checkpointer_on(engine, "dict://run", sweep_after_s=3600.0) as ckpt:
            assert await ckpt.discard_after(1) == (2, 3)
            await ckpt.save(state_of(1), 1, overwrite=True)
        async with checkpointer_on(engine, "dict://run", sweep_after_s=3600.0) as ckpt:
            await ckpt.save(state_of(0), 0, overwrite=True)
    (event,) = log.of(HigherStepFound)
    assert (event.step, event.highest) == (0, 1)


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("is_load", [True, False])
@in_virtual_time
async def test_a_step_that_takes_the_place_of_another_is_found(
    *, is_listed: bool, is_load: bool
) -> None:
    """One of the two is there at every moment; who looks at both comes too early and too late."""
    store = await store_with(1)
    old = f"run/{step_name(0)}/"
    new = {key.replace(step_name(0), step_name(1)): d for key, d in store.objects.items()}
    if is_listed:
        store.set(f"run/{step_name(1)}/.attempt-{SAVE_IDS[1]}", b"")

    def pass_on(kind: str, key: str) -> None:
        if (kind, key) == ("head", f"{old}manifest.json"):
            for each, data in new.items():
                store.set(each, data)
            gone = key if is_listed else old  # what it is made of goes a little later
            for each in [each for each in store.objects if each.startswith(gone)]:
                del store.objects[each]

    store.on_request = pass_on
    async with (
        engines(store=store) as (engine,),
        checkpointer_on(engine, "dict://run") as ckpt,
    ):
        if is_load:
            assert_same(await ckpt.load(), state_of(0))
        else:
            assert await ckpt.latest() == 1


@in_virtual_time
async def test_steps_that_were_never_committed_are_listed_twice_and_no_more() -> None:
    """Of a run that was never committed; the first time, names that are no steps are, too."""
    store = DictStore()
    for step in (1, 2):
        store.set(f"run/{step_name(step)}/.attempt-{SAVE_IDS[1]}", b"")
    async with (
        engines(store=store) as (engine,),
        checkpointer_on(engine, "dict://run") as ckpt,
    ):
        assert await ckpt.latest() is None
        assert count(store) == {"list": 3, "head": 4}
        assert await ckpt.latest() is None
        assert count(store) == {"list": 2, "head": 4}


@in_virtual_time
async def test_a_long_run_sweeps_again_every_hour() -> None:
    """What died in the meantime goes behind the next commit, not behind each."""
    store, log = await store_with(20), EventLog()
    async with (
        engines(store=store, log=log) as (engine,),
        checkpointer_on(engine, "dict://run", sweep_after_s=1.0) as ckpt,
    ):
        await opened(ckpt)
        dead = f"run/{step_name(8)}/data-{SAVE_IDS[1]}-00000-00000.safetensors"
        del store.objects[dead.rpartition("/")[0] + "/manifest.json"]
        store.set(dead, b"x", age_s=2 * QUIET_S)
        await save(ckpt, 20)
        assert dead in store.objects
        await asyncio.sleep(QUIET_S)
        await save(ckpt, 21)
        assert dead not in store.objects
        assert len(log.of(LeftoversRemoved)) == 1
        await asyncio.sleep(QUIET_S / 2)
        count(store)
        await save(ckpt, 22)
        assert count(store)["head"] < 10


@in_virtual_time
async def test_the_latest_step_does_not_wait_for_a_look_at_all() -> None:
    """Requests wait in line, and a run begins with a sweep and this question."""
    store = await store_with(300)
    async with (
        engines(store=store) as (engine,),
        checkpointer_on(engine, "dict://run", sweep_after_s=3600.0) as ckpt,
    ):
        count(store)
        store.max_delay_s = 0.02
        assert await ckpt.latest() == 299
        assert count(store)["head"] < 150
