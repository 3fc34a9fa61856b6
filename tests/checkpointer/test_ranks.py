"""Checkpointers of a job, on schedules drawn from a seed, over real files."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio import (
    CheckpointNotFoundError,
    ConfigError,
    KeepLast,
    PerRank,
    RankError,
    SaveAbortedError,
    SaveEvery,
)
from ckptio.checkpointer.agree import agreed_steps
from ckptio.checkpointer.steps import step_name
from ckptio.events import CheckpointRemoved
from ckptio.testing import Crash, EventLog, MemoryRanks, RecordingFiles, crash_at, run_virtual
from tests.checkpointer.rig import (
    DEADLINES,
    checkpointer_on,
    committed_steps,
    engines,
    on_each,
)
from tests.rig import SMALL, assert_same, config_with, filled_state, names_in
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from ckptio import Engine

CONFIG = config_with(durability="full")
SIZES = [5000, 100]
seeds = st.integers(0, 2**32)


def state_of(step: int) -> dict[str, Any]:
    return {"shared": filled_state(SIZES, step % 251), "step": step}


@pytest.mark.parametrize("seed", range(3))
@in_virtual_time
async def test_ranks_save_keep_and_load_together(tmp_path: Path, seed: int) -> None:
    """Rank 0 lists and removes; what others see, it has seen."""

    async def body(rank: int, engine: Engine, log: EventLog) -> None:
        ckpt = checkpointer_on(engine, tmp_path, keep=KeepLast(2), every=SaveEvery(steps=3))
        async with ckpt:
            assert await ckpt.latest() is None
            with pytest.raises(CheckpointNotFoundError):
                await ckpt.load()
            for step in range(1, 13):
                if await ckpt.should_save(step):
                    state = {**state_of(step), "rank": PerRank(rank)}
                    await ckpt.save(state, step, metrics={"loss": rank})
        async with checkpointer_on(engine, tmp_path) as ckpt:
            assert await ckpt.latest() == 12
            assert await ckpt.steps() == (9, 12)
            assert [r.metrics["loss"] for r in await ckpt.records()] == [0, 0]
            state = await ckpt.load()
            assert state["step"] == 12
            assert state["rank"] == rank
            assert_same(state["shared"], state_of(12)["shared"])
            with pytest.raises(RankError, match="step 15 is being saved"):
                busy = ckpt.save(state_of(15), 15)
                await ckpt.discard_after(9)
            await busy
            assert await ckpt.discard_after(9) == (12, 15)
            assert await ckpt.latest() == 9
            with pytest.raises(CheckpointNotFoundError, match="but below, as 'step-00000009'"):
                await engine.load(tmp_path)
        assert [event.step for event in log.of(CheckpointRemoved)] == [3, 6, 15, 12]

    log = EventLog()
    async with engines(2, log=log, seed=seed) as group:
        assert await on_each(group, lambda r, e: body(r, e, log)) == [None, None]
    assert committed_steps(tmp_path) == [9]


@in_virtual_time
async def test_what_cannot_be_opened_on_one_rank_is_heard_by_all(tmp_path: Path) -> None:
    """Nobody waits for the rank that does not come, and all may try once more."""

    async def body(rank: int, engine: Engine) -> None:
        root = "nonesuch://run" if rank == 1 else tmp_path
        with pytest.raises(ConfigError if rank == 1 else RankError, match="nonesuch"):
            async with checkpointer_on(engine, root):
                pass
        async with checkpointer_on(engine, tmp_path) as ckpt:
            assert await ckpt.latest() is None

    async with engines(3) as group:
        assert await on_each(group, body) == [None] * 3
    assert asyncio.get_running_loop().time() < 10


@in_virtual_time
async def test_ranks_that_save_at_no_step_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By rank 0, whose log is the one that is read."""

    async def body(_: int, engine: Engine) -> None:
        async with checkpointer_on(engine, tmp_path) as ckpt:
            assert not await ckpt.should_save(1)

    async with engines(3) as group:
        assert await on_each(group, body) == [None] * 3
    assert ["says yes to no step" in line for line in caplog.messages] == [True]


@given(at_s=st.floats(0, 3), who=st.integers(0, 2), seed=seeds)
def test_a_signal_on_one_rank_ends_with_one_last_step(at_s: float, who: int, seed: int) -> None:
    """The same on all ranks, and committed."""

    async def body(rank: int, engine: Engine, root: Path) -> int:
        rng = random.Random(seed + rank)
        async with checkpointer_on(engine, root, every=SaveEvery(seconds=1.0)) as ckpt:
            if rank == who:
                asyncio.get_running_loop().call_later(at_s, ckpt.preempt, "a notice")
            for step in range(1, 1000):
                await asyncio.sleep(rng.expovariate(10))
                if await ckpt.should_save(step):
                    await ckpt.save(state_of(step), step)
                if ckpt.preempted:
                    return step
        raise AssertionError("never stopped")

    async def scenario(root: Path) -> None:
        async with engines(3, seed=seed) as group:
            stopped = await on_each(group, lambda rank, engine: body(rank, engine, root))
            assert len(set(stopped)) == 1
            assert committed_steps(root)[-1] == stopped[0]

    with tempfile.TemporaryDirectory() as name:
        run_virtual(scenario(Path(name)), seed=seed)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_that_takes_longer_than_the_interval_is_saved_once(
    tmp_path: Path, world_size: int, seed: int
) -> None:
    """The time counts from when it was asked about, also while the caller prepares the state."""

    async def body(engine: Engine) -> None:
        async with checkpointer_on(engine, tmp_path, every=SaveEvery(seconds=1.0)) as ckpt:
            for step in range(1, 60):
                await asyncio.sleep(3.5 if step == 25 else 0.1)
                if await ckpt.should_save(step):
                    await asyncio.sleep(0.3)
                    await ckpt.save(state_of(step), step)

    async def scenario() -> None:
        await asyncio.sleep(100)  # the first one is due a second after the beginning
        async with engines(world_size, seed=seed) as group:
            await on_each(group, lambda _, engine: body(engine))

    run_virtual(scenario(), seed=seed)
    steps = committed_steps(tmp_path)
    assert steps[0] > 3
    assert {25, 26} & set(steps)
    assert len(steps) >= 5
    # of the second from one to the next, 0.3 s are for the state and some are for the save
    assert min(later - sooner for sooner, later in itertools.pairwise(steps)) > 3


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("seed", range(3))
@in_virtual_time
async def test_a_last_save_that_takes_too_long_is_aborted(
    tmp_path: Path, world_size: int, seed: int
) -> None:
    """The steps before it are untouched, nothing of it is left, and leaving says so."""

    async def body(rank: int, engine: Engine) -> None:
        async with checkpointer_on(engine, tmp_path, preempt_deadline_s=0.05) as ckpt:
            await ckpt.save(state_of(1), 1)
            if rank == 0:
                ckpt.preempt("a notice")
            step = 1
            while not ckpt.preempted:
                step += 1
                if await ckpt.should_save(step):  # for a second, as calls take here
                    ckpt.save(filled_state([SMALL.slab_nbytes] * 100, 1), step)
                await asyncio.sleep(0.001)

    async with engines(world_size, seed=seed) as group:
        errors = await on_each(group, body)
        assert all(isinstance(error, (SaveAbortedError, RankError)) for error in errors)
        assert any("within 0.05 s" in str(error) for error in errors)
    assert names_in(tmp_path) == [step_name(1)]
    assert committed_steps(tmp_path) == [1]


@pytest.mark.parametrize(
    ("error", "words"), [(SaveAbortedError, r"within 0\.05 s"), (KeyError, "of the loop")]
)
@in_virtual_time
async def test_a_missed_deadline_is_said_before_other_failures(
    tmp_path: Path, error: type[Exception], words: str
) -> None:
    """But an error that leaves the block is what its caller gets."""

    async def train(engine: Engine) -> None:
        async with checkpointer_on(engine, tmp_path, preempt_deadline_s=0.05) as ckpt:
            await ckpt.save(state_of(1), 1)
            ckpt.save(state_of(1), 1)  # fails, and nobody waits for it
            ckpt.preempt("a notice")
            while not await ckpt.should_save(2):
                await asyncio.sleep(0.001)
            ckpt.save(filled_state([SMALL.slab_nbytes] * 100, 1), 2)
            await asyncio.sleep(10)
            if error is KeyError:
                raise KeyError(words)

    async with engines() as (engine,):
        with pytest.raises(error, match=words):
            await train(engine)


@given(seed=seeds, at_s=st.floats(0, 0.3))
def test_leaving_by_an_error_at_any_time_leaves_whole_steps(seed: int, at_s: float) -> None:
    """Whatever was under way, a save or a removal; no task is left, and what is there loads."""

    async def scenario(root: Path) -> None:
        async with engines(seed=seed) as (engine,):
            with contextlib.suppress(TimeoutError, ZeroDivisionError):
                async with checkpointer_on(engine, root, keep=KeepLast(1)) as ckpt:
                    for step in range(1, 4):
                        handle = ckpt.save(state_of(step), step)
                        async with asyncio.timeout(at_s):
                            await handle
                    raise ZeroDivisionError

    with tempfile.TemporaryDirectory() as name:
        run_virtual(scenario(Path(name)), seed=seed)
        committed_steps(Path(name))  # each is whole


@in_virtual_time
async def test_ranks_that_want_different_things_are_told(tmp_path: Path) -> None:
    """When they enter, on every rank."""

    async def body(rank: int, engine: Engine) -> None:
        async with checkpointer_on(engine, tmp_path, every=SaveEvery(steps=rank + 1)):
            raise AssertionError("entered")

    async with engines(2) as group:
        for error in await on_each(group, body):
            assert isinstance(error, RankError)
            assert "alike on all ranks" in str(error)


@pytest.mark.parametrize("who", [0, 1])
def test_ranks_that_ask_for_different_steps_discard_none(tmp_path: Path, who: int) -> None:
    """Every rank is told who asked for what, if one only lists them, too."""

    async def body(rank: int, engine: Engine, *, lists: bool) -> None:
        async with checkpointer_on(engine, tmp_path) as ckpt:
            for step in (1, 2, 3):
                await ckpt.save(state_of(step), step, overwrite=True)
            await (ckpt.steps() if lists and rank == who else ckpt.discard_after(rank))

    async def scenario(*, lists: bool) -> None:
        said = "steps()" if lists else "rank 1 calls discard_after(1) and rank 0 discard_after(0);"
        async with engines(2) as group:
            for error in await on_each(group, lambda r, e: body(r, e, lists=lists)):
                assert isinstance(error, RankError)
                assert said in str(error)

    for lists in (False, True):
        run_virtual(scenario(lists=lists), seed=0)
    assert committed_steps(tmp_path) == [1, 2, 3]


@in_virtual_time
async def test_metrics_that_one_rank_cannot_give_fail_the_save_on_all(tmp_path: Path) -> None:
    """Nobody waits for it, and the next save is one of all ranks again."""

    async def body(rank: int, engine: Engine) -> None:
        async with checkpointer_on(engine, tmp_path) as ckpt:
            with pytest.raises((ValueError, RankError)):
                await ckpt.save(state_of(1), 1, metrics={"loss": "x" if rank else 1.0})  # type: ignore[dict-item]  # refused
            await ckpt.save(state_of(2), 2)

    async with engines(2) as group:
        assert await on_each(group, body) == [None, None]
    assert committed_steps(tmp_path) == [2]


# crashes: a save and the removals after it, stopped after each operation


def run_once(root: Path, steps: list[int], files: RecordingFiles | None = None) -> None:
    """Save some steps, in a process of its own as far as files can tell."""

    async def scenario() -> None:
        async with engines(files=files, config=CONFIG) as (engine,):
            with contextlib.suppress(SaveAbortedError):
                async with checkpointer_on(
                    engine, root, keep=KeepLast(1), sweep_after_s=3600.0
                ) as ckpt:
                    for step in steps:
                        await ckpt.save(state_of(step), step)

    try:
        run_virtual(scenario(), seed=0)
    except Crash:
        pass
    finally:
        if files is not None:
            files.bury()


def test_a_run_that_is_killed_anywhere_loses_no_committed_step(tmp_path: Path) -> None:
    """The crash matrix: what is listed loads, and is never less than what was there."""
    counting = RecordingFiles()
    run_once(tmp_path / "count", [1], None)
    run_once(tmp_path / "count", [2, 3], counting)
    assert committed_steps(tmp_path / "count") == [3]
    total = len(counting.operations)
    assert total > 60
    for number in range(total):
        root = tmp_path / str(number)
        run_once(root, [1])
        run_once(root, [2, 3], RecordingFiles(crash_at(number)))
        found = committed_steps(root)
        assert found, number
        assert found[-1] in (1, 2, 3)

        async def look(root: Path = root, found: list[int] = found) -> None:
            async with engines() as (engine,), checkpointer_on(engine, root) as ckpt:
                assert list(await ckpt.steps()) == found
                state = await ckpt.load()
                assert state["step"] == found[-1]
                assert_same(state["shared"], state_of(found[-1])["shared"])

        run_virtual(look(), seed=number)
        run_once(root, [4])
        assert committed_steps(root) == [4], number
        if (root / step_name(1)).exists():  # an empty one may be that of a save that begins
            left = [n for n in names_in(root / step_name(1)) if not n.startswith(".attempt-")]
            assert left == [], number  # the lock of a removal goes last, or after a while
        shutil.rmtree(root)


@pytest.mark.parametrize("acts", [False, True])
def test_who_loses_rank_0_is_in_doubt_of_what_was_to_be_done_alone(*, acts: bool) -> None:
    """What only asks has changed nothing."""

    async def wait_for_ever() -> list[int]:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> None:
        async with MemoryRanks(2, deadlines=DEADLINES, seed=0) as world:

            async def ask(rank: int) -> list[int]:
                context = SimpleNamespace(ranks=world.ranks[rank])
                return await agreed_steps("k", cast("Any", context), "x", wait_for_ever, acts=acts)

            tasks = [asyncio.create_task(ask(rank), name="ask") for rank in range(2)]
            await asyncio.sleep(1)
            world.kill(0)
            with pytest.raises(RankError) as caught:
                await tasks[1]
            assert caught.value.in_doubt == acts
            tasks[0].cancel()
            await asyncio.wait(tasks)

    run_virtual(scenario(), seed=0)
