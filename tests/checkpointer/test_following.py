"""Loops over the new steps of a run, as an evaluation beside the trainer has them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest

from ckptio import (
    Checkpointer,
    ConfigError,
    EngineClosedError,
    FormatError,
    OutOfStepError,
    RankError,
    StorageError,
    sync,
)
from ckptio.checkpointer.steps import step_name
from ckptio.runtime.core import EngineCore
from ckptio.storage.root import LocalRoot
from tests.checkpointer.rig import checkpointer_on, engines, on_each
from tests.rig import SMALL
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from ckptio import Engine

pytestmark = pytest.mark.usefixtures("no_leaks")


def as_manifests_are_read(
    monkeypatch: pytest.MonkeyPatch, look: Callable[[Sequence[str]], Awaitable[Any]]
) -> None:
    """Have something happen before manifests are read, by name; what it returns is the answer."""
    real = LocalRoot.read_manifests

    async def read(self: LocalRoot, names: Any, *args: Any, **options: Any) -> Any:
        answer = await look(names)
        return await real(self, names, *args, **options) if answer is None else answer

    monkeypatch.setattr(LocalRoot, "read_manifests", read)


async def save_steps(root: Path, *steps: int) -> None:
    async with engines() as (engine,), checkpointer_on(engine, root) as ckpt:
        for step in steps:
            await ckpt.save({}, step)


async def all_of(steps: AsyncIterator[int]) -> list[int]:
    return [step async for step in steps]


@in_virtual_time
async def test_the_newest_step_is_given_once(tmp_path: Path) -> None:
    """The first look finds what is there; what comes meanwhile is passed over for the highest."""
    await save_steps(tmp_path, 1, 2)
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        given = []
        async for step in ckpt.follow(timeout_s=60.0):
            given.append(step)
            if step == 2:
                await ckpt.save({}, 3)
                await ckpt.save({}, 4)
        assert given == [2, 4]


@in_virtual_time
async def test_it_waits_for_a_run_that_has_not_begun(tmp_path: Path) -> None:
    """And looks every so many seconds, the first time at once."""
    root, loop = tmp_path / "run", asyncio.get_running_loop()

    async def train(engine: Engine) -> None:
        async with checkpointer_on(engine, root) as ckpt:
            await asyncio.sleep(25.0)
            await ckpt.save({}, 7)

    async with engines(1) as (trainer,), engines(1) as (engine,):
        training = asyncio.create_task(train(trainer))
        async with checkpointer_on(engine, root) as ckpt:
            started = loop.time()
            async for step in ckpt.follow(poll_s=10.0):
                assert step == 7
                break
            assert loop.time() - started == pytest.approx(30.0, abs=1.0)
        await training


@in_virtual_time
async def test_it_ends_after_so_many_seconds_without_a_step(tmp_path: Path) -> None:
    """The last pause is the shorter one; a step begins the count anew; the end stays."""
    loop = asyncio.get_running_loop()
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        started = loop.time()
        steps = ckpt.follow(poll_s=10.0, timeout_s=25.0)
        pauses = []

        async def save_late() -> None:
            await asyncio.sleep(15.0)
            await ckpt.save({}, 1)

        late = asyncio.create_task(save_late())
        async for step in steps:
            assert step == 1
            pauses.append(loop.time() - started)
        await late
        assert pauses == [pytest.approx(20.0, abs=1.0)]
        assert loop.time() - started == pytest.approx(45.0, abs=1.0)
        assert await all_of(steps) == []


@in_virtual_time
async def test_after_passes_over_what_is_there_at_first(tmp_path: Path) -> None:
    """Of a run that has gone back below it, the next save is given, whatever its number."""
    await save_steps(tmp_path, 5, 6)
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        assert await all_of(ckpt.follow(after=5, timeout_s=1.0)) == [6]
        assert await all_of(ckpt.follow(after=6, timeout_s=1.0)) == []
        steps = ckpt.follow(after=9, timeout_s=20.0, poll_s=5.0)
        late = asyncio.create_task(save_later(ckpt, 7))
        assert await all_of(steps) == [7]
        await late


@in_virtual_time
async def test_after_passes_over_nothing_where_there_is_nothing_at_first(tmp_path: Path) -> None:
    """As of a run that begins anew where an older one was."""
    async with engines() as (engine,), checkpointer_on(engine, tmp_path / "run") as ckpt:
        steps = ckpt.follow(after=9, timeout_s=20.0, poll_s=5.0)
        late = asyncio.create_task(save_later(ckpt, 7))
        assert await all_of(steps) == [7]
        await late


async def save_later(ckpt: Checkpointer, step: int) -> None:
    await asyncio.sleep(7.0)
    await ckpt.save({}, step)


@in_virtual_time
async def test_a_run_that_goes_back_is_followed(tmp_path: Path) -> None:
    """What it saves again is another step; the one that it went back to was given already."""
    await save_steps(tmp_path, 800)
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        steps = ckpt.follow(poll_s=5.0, timeout_s=20.0)
        assert await anext(steps) == 800
        await ckpt.save({"lost": 1}, 900)
        assert await anext(steps) == 900
        await ckpt.discard_after(800)
        late = asyncio.create_task(save_later(ckpt, 900))
        assert await anext(steps) == 900
        await ckpt.save({"better": 1}, 900, overwrite=True)
        assert await anext(steps) == 900
        assert await all_of(steps) == []
        await late


@in_virtual_time
async def test_a_step_that_was_passed_over_is_given_when_the_run_goes_back_to_it(
    tmp_path: Path,
) -> None:
    """Nobody has evaluated it, and it is the newest."""
    await save_steps(tmp_path, 800, 900)
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        steps = ckpt.follow(poll_s=5.0, timeout_s=20.0)
        assert await anext(steps) == 900
        await ckpt.discard_after(800)
        assert await all_of(steps) == [800]


@in_virtual_time
async def test_of_a_step_that_did_not_change_no_manifest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests of large states have megabytes."""
    await save_steps(tmp_path, 1)
    read: list[list[str]] = []

    async def count(names: Sequence[str]) -> None:
        read.append([*names])

    as_manifests_are_read(monkeypatch, count)
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        assert await all_of(ckpt.follow(poll_s=1.0, timeout_s=10.0)) == [1]
    assert read == [[step_name(1)]]


@in_virtual_time
async def test_a_damaged_step_is_given_once(tmp_path: Path) -> None:
    """So that whoever loads it hears of the damage."""
    await save_steps(tmp_path, 1, 2)
    manifest = tmp_path / step_name(2) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        assert await all_of(ckpt.follow(timeout_s=30.0)) == [2]
        with pytest.raises(FormatError):
            await ckpt.load(step=2)


@in_virtual_time
async def test_a_step_that_goes_between_two_looks_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed, and removed before its manifest is read."""
    await save_steps(tmp_path, 1)

    async def remove(names: Sequence[str]) -> None:
        for name in names:
            shutil.rmtree(tmp_path / name)

    as_manifests_are_read(monkeypatch, remove)
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        assert await all_of(ckpt.follow(timeout_s=30.0)) == []


@in_virtual_time
async def test_it_goes_on_after_an_error_and_after_a_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a look found that was cancelled is found again; nothing is passed over for an error."""
    await save_steps(tmp_path, 1)
    faults: list[StorageError | float] = [StorageError("no", path="p"), 60.0]

    async def fail(_: Sequence[str]) -> list[StorageError] | None:
        fault = faults.pop(0) if faults else 0.0
        if isinstance(fault, StorageError):
            return [fault]
        await asyncio.sleep(fault)
        return None

    as_manifests_are_read(monkeypatch, fail)
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        steps = ckpt.follow(timeout_s=30.0)
        with pytest.raises(StorageError, match="no"):
            await anext(steps)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(15.0):  # while it looks, after the pause
                await anext(steps)
        assert faults == []
        assert await all_of(steps) == [1]


@in_virtual_time
async def test_it_looks_however_soon_its_caller_gives_up(tmp_path: Path) -> None:
    """What is waited for in short turns is found at the same times, and ends as late."""
    loop = asyncio.get_running_loop()
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        steps = ckpt.follow(poll_s=10.0, timeout_s=30.0)
        late = asyncio.create_task(save_later(ckpt, 1))

        async def in_turns() -> int | None:
            for _ in range(20):
                with contextlib.suppress(TimeoutError):
                    return await asyncio.wait_for(anext(steps, None), 4.0)
            raise AssertionError

        started = loop.time()
        assert await in_turns() == 1
        assert loop.time() - started == pytest.approx(10.0, abs=1.0)
        assert await in_turns() is None
        assert loop.time() - started == pytest.approx(40.0, abs=1.0)
        await late


@in_virtual_time
async def test_a_look_that_its_caller_cuts_off_is_made_again_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody who waits for less than a pause and a look would ever hear of a step."""
    await save_steps(tmp_path, 1)

    async def take_long(_: Sequence[str]) -> None:
        await asyncio.sleep(4.0)

    as_manifests_are_read(monkeypatch, take_long)
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        steps = ckpt.follow(poll_s=9.0)
        assert await anext(steps) == 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(steps), 6.0)
        await ckpt.save({}, 2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(steps), 6.0)  # 3 s of the pause were left
        assert await asyncio.wait_for(anext(steps), 6.0) == 2


@in_virtual_time
async def test_a_look_that_fails_is_not_made_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a loop that goes on after errors asks at once; and it ends some time."""
    loop = asyncio.get_running_loop()
    await save_steps(tmp_path, 1)

    async def away(*_: Any, **__: Any) -> Any:
        raise StorageError("no", path="p")

    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        steps = ckpt.follow(poll_s=10.0, timeout_s=25.0)
        assert await anext(steps) == 1
        monkeypatch.setattr(LocalRoot, "names", away)
        started = loop.time()
        failed_s: list[float] = []
        while len(failed_s) < 9:
            try:
                assert await all_of(steps) == []
                break
            except StorageError:
                failed_s.append(loop.time() - started)
        assert failed_s == pytest.approx([0.0, 10.0, 20.0, 25.0], abs=1.0)


@in_virtual_time
async def test_a_step_that_is_a_link_to_a_directory_beside_it_is_given(tmp_path: Path) -> None:
    """As one that somebody keeps under a name of his own; a link to another step is none."""
    await save_steps(tmp_path, 1, 2)
    (tmp_path / step_name(2)).rename(tmp_path / "kept")
    (tmp_path / step_name(2)).symlink_to("kept")
    (tmp_path / step_name(3)).symlink_to(step_name(1))
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        assert await ckpt.latest() == 2
        assert await all_of(ckpt.follow(timeout_s=30.0)) == [2]


@in_virtual_time
async def test_two_tasks_do_not_wait_for_the_next_step_of_one_loop(tmp_path: Path) -> None:
    """Else it would end after half the time. Whoever waits goes on, and another may ask then."""
    loop = asyncio.get_running_loop()
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        steps, started = ckpt.follow(poll_s=10.0, timeout_s=60.0), loop.time()
        late = asyncio.create_task(save_later(ckpt, 1))
        waits = asyncio.ensure_future(anext(steps))
        await asyncio.sleep(1.0)
        with pytest.raises(ConfigError, match="another task or thread waits for the next step"):
            await anext(steps)
        assert await waits == 1
        assert await all_of(steps) == []
        assert loop.time() - started == pytest.approx(70.0, abs=1.0)
        await late


@in_virtual_time
async def test_both_tiers_are_looked_at(tmp_path: Path) -> None:
    """A step that goes from the first tier is no new one, since the second has the same save."""
    first, second = tmp_path / "first", tmp_path / "second"
    await save_steps(second, 3)
    async with engines() as (engine,), checkpointer_on(engine, first, then=second) as ckpt:
        steps = ckpt.follow(poll_s=5.0, timeout_s=20.0)
        assert await anext(steps) == 3
        await ckpt.save({}, 4).durable
        assert await anext(steps) == 4
        shutil.rmtree(first / step_name(4))
        assert await all_of(steps) == []


@in_virtual_time
async def test_a_second_tier_that_cannot_be_listed_is_told(tmp_path: Path) -> None:
    """And how to go on without it."""
    first, second = tmp_path / "first", tmp_path / "second"
    await save_steps(first, 3)
    second.write_text("no directory")
    async with engines() as (engine,), checkpointer_on(engine, first, then=second) as ckpt:
        with pytest.raises(StorageError, match="leave out then= to go on with step 3 of the first"):
            await anext(ckpt.follow())


@in_virtual_time
async def test_a_later_save_on_the_second_tier_is_another_one(tmp_path: Path) -> None:
    """As of a run that goes on on another machine: that one is loaded, not what is here."""
    first, second = tmp_path / "first", tmp_path / "second"
    async with engines() as (engine,), checkpointer_on(engine, first, then=second) as ckpt:
        steps = ckpt.follow(poll_s=5.0, timeout_s=20.0)
        await ckpt.save({"on": "this"}, 3).durable
        assert await anext(steps) == 3
        async with checkpointer_on(engine, second) as elsewhere:
            await elsewhere.save({"on": "another"}, 3, overwrite=True)
        assert await all_of(steps) == [3]
        assert await ckpt.load(step=3) == {"on": "another"}


@in_virtual_time
async def test_a_copy_that_is_damaged_is_no_new_step(tmp_path: Path) -> None:
    """The other tier has it whole, and it was given."""
    first, second = tmp_path / "first", tmp_path / "second"
    async with engines() as (engine,), checkpointer_on(engine, first, then=second) as ckpt:
        steps = ckpt.follow(poll_s=5.0, timeout_s=20.0)
        await ckpt.save({}, 3).durable
        assert await anext(steps) == 3
        for tier in (first, second):
            manifest = tier / step_name(3) / "manifest.json"
            manifest.write_bytes(manifest.read_bytes()[:-9])
            assert await all_of(ckpt.follow(timeout_s=1.0)) == [3]
            assert await all_of(steps) == ([] if tier == first else [3])
            steps = ckpt.follow(poll_s=5.0, timeout_s=20.0)
            assert await anext(steps) == 3


@in_virtual_time
async def test_all_ranks_are_given_the_same(tmp_path: Path) -> None:
    """Rank 0 looks; the others wait for what it finds, and end with it."""
    await save_steps(tmp_path, 1)

    async def body(rank: int, engine: Engine) -> list[int]:
        async with checkpointer_on(engine, tmp_path) as ckpt:
            given = []
            async for step in ckpt.follow(poll_s=400.0, timeout_s=1000.0):
                await asyncio.sleep(rank)
                given.append(step)
                if step < 3:
                    await ckpt.save({}, step + 1)
            return given

    async with engines(3) as job:
        assert await on_each(job, body) == [[1, 2, 3]] * 3


@in_virtual_time
@pytest.mark.parametrize("gives_up", [0, 1])
async def test_ranks_end_alike_where_one_gave_up_a_look(
    gives_up: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the others it failed, and counts. Else one asks for a step when the others do not."""
    real = LocalRoot.names

    async def take_long(self: LocalRoot, *args: Any) -> list[str]:
        await asyncio.sleep(5.0)
        return await real(self, *args)

    async def body(rank: int, engine: Engine) -> int | None:
        async with checkpointer_on(engine, tmp_path) as ckpt:
            steps = ckpt.follow(poll_s=10.0, timeout_s=30.0)
            with pytest.raises(TimeoutError if rank == gives_up else RankError):
                async with asyncio.timeout(2.0 if rank == gives_up else None):
                    await anext(steps)
            assert await all_of(steps) == []
            return await ckpt.latest()

    monkeypatch.setattr(LocalRoot, "names", take_long)
    async with engines(2) as job:
        assert await on_each(job, body) == [None, None]


@in_virtual_time
async def test_ranks_go_on_alike_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are told of what rank 0 found."""
    real = LocalRoot.names

    async def away(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(LocalRoot, "names", real)
        raise StorageError("no", path="p")

    async def body(_: int, engine: Engine) -> list[int]:
        async with checkpointer_on(engine, tmp_path) as ckpt:
            steps = ckpt.follow(poll_s=10.0, timeout_s=30.0)
            with pytest.raises(RankError, match="StorageError"):
                await anext(steps)
            return await all_of(steps)

    await save_steps(tmp_path, 1)
    monkeypatch.setattr(LocalRoot, "names", away)
    async with engines(2) as job:
        assert await on_each(job, body) == [[1], [1]]


@in_virtual_time
async def test_ranks_that_follow_otherwise_are_told(tmp_path: Path) -> None:
    async def body(rank: int, engine: Engine) -> None:
        async with checkpointer_on(engine, tmp_path) as ckpt:
            await all_of(ckpt.follow(poll_s=1.0 + rank, timeout_s=2.0))

    async with engines(2) as job:
        for error in await on_each(job, body):
            assert "poll_s=2.0" in str(error)
            assert "on all ranks alike" in str(error)
            assert isinstance(error, RankError)
            assert error.was_caused_by(OutOfStepError)


@pytest.mark.parametrize(
    "options", [{"after": -1}, {"after": 2.0}, {"poll_s": 0}, {"poll_s": None}, {"timeout_s": -1.0}]
)
def test_a_wrong_option_is_told_at_the_call(tmp_path: Path, options: Any) -> None:
    """Before anything is asked for."""
    for make in (Checkpointer, sync.Checkpointer):
        with pytest.raises(ConfigError, match=next(iter(options))):
            make(tmp_path).follow(**options)


async def test_it_is_used_inside_the_block(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, config=SMALL)
    with pytest.raises(EngineClosedError):
        await anext(ckpt.follow())
    async with ckpt:
        steps = ckpt.follow()
    with pytest.raises(EngineClosedError):
        await anext(steps)


class Clock:
    """Time that passes in pauses alone; some of them end early, or something happens then."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []
        self.hooks: list[Callable[[], object]] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        if pause_s and self.hooks:
            self.hooks.pop(0)()
        self.now_s += pause_s + 0.01  # a sleep takes somewhat longer

    def interrupt(self) -> None:
        self.now_s += 4.0
        raise KeyboardInterrupt


def test_the_blocking_twin_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps between two looks, and goes on after an interrupt there and after an error."""
    clock, real = Clock(), LocalRoot.names
    monkeypatch.setattr("ckptio.checkpointer.blocking.time", clock)

    async def away(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(LocalRoot, "names", real)
        raise StorageError("no", path="p")

    with sync.Checkpointer(tmp_path, config=SMALL) as run:
        clock.hooks += [clock.interrupt, lambda: run.save({}, 8)]
        steps = run.follow(poll_s=10.0, timeout_s=25.0)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
        assert next(steps) == 8
        monkeypatch.setattr(LocalRoot, "names", away)
        with pytest.raises(StorageError, match="no"):
            next(steps)
        assert list(steps) == []
        assert list(steps) == []
    assert clock.pauses == [0.0, 10.0, 6.0, 0.0, 10.0, 10.0, 5.0]


def test_two_threads_do_not_wait_for_the_next_step_of_one_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of a signal that came to the one that waits may ask."""
    clock = Clock()
    refused: list[str] = []
    monkeypatch.setattr("ckptio.checkpointer.blocking.time", clock)
    with sync.Checkpointer(tmp_path, config=SMALL) as run:
        steps = run.follow(poll_s=10.0, timeout_s=20.0)

        def ask_elsewhere() -> None:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            clock.hooks.append(lambda: run.save({}, 1))
            assert next(steps) == 1

        def ask() -> None:
            try:
                next(steps, None)
            except ConfigError as error:
                refused.append(str(error))

        clock.hooks.append(ask_elsewhere)
        assert list(steps) == []
    assert len(refused) == 1
    assert "another task or thread waits for the next step" in refused[0]


@pytest.mark.parametrize("is_alone", [True, False])
def test_the_blocking_twin_counts_a_look_that_was_interrupted_if_there_are_other_ranks(
    *, is_alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed there."""
    clock, real = Clock(), EngineCore.call_blocking

    def interrupted(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(EngineCore, "call_blocking", real)
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptio.checkpointer.blocking.time", clock)
    with sync.Checkpointer(tmp_path, config=SMALL) as run:
        run._core.ending.is_alone = is_alone
        steps = run.follow(poll_s=10.0, timeout_s=20.0)
        monkeypatch.setattr(EngineCore, "call_blocking", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
        assert list(steps) == []
    assert clock.pauses == [0.0] * (2 if is_alone else 1) + [10.0, 10.0]
