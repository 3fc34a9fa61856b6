"""What a checkpointer removes, and what it must not, on schedules drawn from a seed."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptio
from ckptio import CheckpointError, KeepIf, KeepLast, SaveAbortedError
from ckptio._aio import outlive
from ckptio._threads import Threads
from ckptio.checkpointer.keeper import MAX_REMOVALS, Keeper
from ckptio.checkpointer.steps import metrics_of, step_name
from ckptio.checkpointer.tiers import SecondTier
from ckptio.errors import CheckpointNotFoundError, FormatError, StorageError
from ckptio.events import CheckpointRemoved, CleanupFailed, RetentionFailed
from ckptio.storage.root import LocalRoot
from ckptio.testing import EventLog, RecordingFiles, run_virtual
from tests.checkpointer.rig import checkpointer_on, committed_steps, engines, on_each
from tests.checkpointer.test_going_back import date_ahead
from tests.rig import SMALL, config_with, filled_state, values_in
from tests.storage.test_leftovers import stopped_save
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptio import Checkpointer, Engine, SaveHandle
    from ckptio.plan.retention import StepRecord
    from ckptio.testing import Operation

T = TypeVar("T")
SIZES = [5000, 100]
seeds = st.integers(0, 2**32)


@given(seed=seeds, deadline_s=st.floats(0.005, 0.4))
def test_a_deadline_and_what_is_there_agree(seed: int, deadline_s: float) -> None:
    """Leaving says that the last save was aborted, or the step is committed: never both."""

    async def scenario(root: Path) -> None:
        async with engines(seed=seed) as (engine,):
            ckpt = checkpointer_on(engine, root, preempt_deadline_s=deadline_s, keep=KeepLast(1))
            is_missed = False
            try:
                async with ckpt:
                    ckpt.preempt("a notice")
                    step = 0
                    while not ckpt.preempted:
                        step += 1
                        await ckpt.should_save(step)
                        await asyncio.sleep(0.001)
                    ckpt.save(filled_state(SIZES, 1), step)
            except SaveAbortedError as error:
                is_missed = "was not committed" in str(error)
            assert committed_steps(root) == ([] if is_missed else [step])

    with tempfile.TemporaryDirectory() as name:
        run_virtual(scenario(Path(name)), seed=seed)


@pytest.mark.parametrize("deadline_s", [0.0001, 1.0])
@in_virtual_time
async def test_a_copy_that_misses_the_deadline_is_an_error(
    tmp_path: Path, deadline_s: float
) -> None:
    """The first tier may go with the machine. What is said is how it ended, not how it was."""
    async with (
        engines(config=config_with(max_tier_copies=1)) as (engine,),
        engine._core.context.copy_line.place(None, "taken", lambda: None),
    ):
        ckpt = checkpointer_on(
            engine, tmp_path / "near", then=tmp_path / "far", preempt_deadline_s=deadline_s
        )
        with pytest.raises(SaveAbortedError) as caught:
            async with ckpt:
                ckpt.preempt("a notice")
                while not ckpt.preempted:
                    await ckpt.should_save(1)
                    await asyncio.sleep(0)
                ckpt.save(filled_state(SIZES, 1), 1)
        is_committed = "was committed, but not copied" in str(caught.value)
        assert committed_steps(tmp_path / "near") == ([1] if is_committed else [])
        assert is_committed or deadline_s < 1.0
    assert committed_steps(tmp_path / "far") == []


class _Watching:
    """A part of a state that looks at the checkpointer while it is taken apart."""

    def __init__(self, ckpt: Checkpointer) -> None:
        self._ckpt = ckpt
        self.exempt: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        self.exempt = self._ckpt._core.upkeep.steps.exempt()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@in_virtual_time
async def test_a_step_is_safe_before_its_save_begins(tmp_path: Path) -> None:
    """From the call on: taking a large state apart lasts, and its older self may be due."""
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        watching = _Watching(ckpt)
        handle = ckpt.save({"x": watching}, 7)
        assert watching.exempt == {7}
        assert ckpt._core.upkeep.steps.exempt() == {7}
        await handle
        await ckpt.save({}, 8)
        assert ckpt._core.upkeep.steps.exempt() == {8}


@pytest.mark.parametrize("num_turns", range(6))
def test_no_removal_comes_between_a_commit_and_what_follows_it(
    num_turns: int, tmp_path: Path
) -> None:
    """A step that was saved again stays from its call on, whoever is told of its end, and when."""

    async def scenario() -> list[int]:
        async with engines() as (engine,):
            async with checkpointer_on(engine, tmp_path) as ckpt:
                for step in (1, 2, 3, 4):
                    await ckpt.save(filled_state(SIZES, step), step)
            async with checkpointer_on(engine, tmp_path, keep=KeepLast(1)) as ckpt:
                upkeep = ckpt._core.upkeep
                owes, looked, committed = upkeep._owes, asyncio.Event(), asyncio.Event()

                async def look(step: int, save_id: str) -> bool:
                    answer = await owes(step, save_id)
                    if step == 2 and not looked.is_set():  # it is about to go
                        looked.set()
                        await committed.wait()
                        for _ in range(num_turns):
                            await asyncio.sleep(0)
                    return answer

                upkeep._owes = look  # type: ignore[method-assign]  # to stop there
                await ckpt.save(filled_state(SIZES, 5), 5)
                await looked.wait()
                handle = ckpt.save(filled_state(SIZES, 6), 2, overwrite=True)
                moment = handle._moments.committed
                reach = moment.reach

                def reached(info: Any) -> None:
                    reach(info)
                    committed.set()

                moment.reach = reached  # type: ignore[method-assign,assignment]  # to see it at once
                await handle
            return committed_steps(tmp_path)

    assert run_virtual(scenario(), seed=0) == [2, 5]


def test_a_step_that_another_saves_over_is_not_removed_for_its_older_self(tmp_path: Path) -> None:
    """Nobody has decided anything about the save that is there by then."""

    async def scenario() -> None:
        log = EventLog()
        async with engines(log=log) as (engine,):
            async with checkpointer_on(engine, tmp_path) as other:
                for step in (1, 2, 3):
                    await other.save(filled_state(SIZES, step), step)
                async with checkpointer_on(engine, tmp_path, keep=KeepLast(1)) as ckpt:
                    upkeep = ckpt._core.upkeep
                    owes = upkeep._owes

                    async def look(step: int, save_id: str) -> bool:
                        answer = await owes(step, save_id)
                        if step == 2:  # it is about to go
                            await other.save(filled_state(SIZES, 9), 2, overwrite=True)
                        return answer

                    upkeep._owes = look  # type: ignore[method-assign]  # to come in between
                    await ckpt.save(filled_state(SIZES, 4), 4)
            assert committed_steps(tmp_path) == [2, 4]
            async with checkpointer_on(engine, tmp_path) as ckpt:
                assert values_in(await ckpt.load(step=2)) == {9}
        (failed,) = log.of(CleanupFailed)
        assert failed.error.errno == errno.ESTALE

    run_virtual(scenario(), seed=0)


async def test_a_step_that_cannot_be_removed_keeps_no_other(tmp_path: Path) -> None:
    """It is told; those that are removed after it go all the same."""
    run, log = tmp_path / "run", EventLog()
    async with ckptio.Checkpointer(run, config=SMALL) as ckpt:
        for step in range(1, 8):
            await ckpt.save({"step": step}, step)
    (run / step_name(1)).rename(tmp_path / "elsewhere")
    (run / step_name(1)).symlink_to(tmp_path / "elsewhere")
    async with ckptio.Checkpointer(run, keep=KeepLast(1), config=SMALL, observer=log) as ckpt:
        await ckpt.save({"step": 8}, 8)
    assert committed_steps(run) == [1, 8]
    assert [event.path for event in log.of(CleanupFailed)] == [str(run / step_name(1))]
    assert log.of(RetentionFailed) == []


@in_virtual_time
async def test_what_another_checkpointer_saved_last_stays(tmp_path: Path) -> None:
    """It went back, which the order of the saves here does not say."""
    async with (
        engines() as (engine,),
        checkpointer_on(engine, tmp_path, keep=KeepLast(1)) as ckpt,
    ):
        handle = ckpt.save(filled_state(SIZES, 1), 10)
        await handle
        async with checkpointer_on(engine, tmp_path) as other:
            await other.save(filled_state(SIZES, 2), 3)
        date_ahead(tmp_path, 3)
        ckpt._core.upkeep.tidy_after(handle._moments)  # as once the step is copied
    assert committed_steps(tmp_path) == [3, 10]


@in_virtual_time
async def test_what_is_removed_by_hand_is_not_what_was_saved_last(tmp_path: Path) -> None:
    """Of a save that was called before it and ends after that, the step is."""
    async with engines() as (engine,), checkpointer_on(engine, tmp_path) as ckpt:
        for step in (3, 10):
            await ckpt.save(filled_state(SIZES, step), step)
        upkeep = ckpt._core.upkeep
        assert upkeep.steps.exempt() == {10}
        await ckpt.discard_after(5)
        assert upkeep.steps.exempt() == {3}


@given(seed=seeds, is_second_slow=st.booleans())
def test_of_two_saves_under_way_the_one_that_was_called_last_stays(
    seed: int, *, is_second_slow: bool
) -> None:
    """Whichever is committed first: one that ended later was kept beside it."""

    async def scenario(root: Path) -> None:
        async with engines(seed=seed) as (engine,):
            async with checkpointer_on(engine, root, keep=KeepLast(1)) as ckpt:
                for step in (1, 2, 3):
                    slow = is_second_slow and step == 2
                    ckpt.save(filled_state(SIZES * (4 if slow else 1), step), step)
            assert committed_steps(root) == [3]

    with tempfile.TemporaryDirectory() as name:
        run_virtual(scenario(Path(name)), seed=seed)


@given(
    seed=seeds,
    plan=st.lists(st.tuples(st.integers(1, 4), st.floats(0, 0.2)), min_size=1, max_size=8),
)
def test_going_back_and_forth_loses_nothing_that_stays(
    seed: int, plan: list[tuple[int, float]]
) -> None:
    """Steps are saved over each other, loaded and removed at once.

    The highest step and the one committed last are there and whole, and what a load gives is
    one save's.
    """

    async def load(ckpt: Checkpointer) -> None:
        try:
            state = await ckpt.load()
        except CheckpointNotFoundError:
            return
        except CheckpointError as error:  # overwritten or removed while it was read
            assert isinstance(error, StorageError), error
            return
        assert len(values_in(state)) == 1

    async def scenario(root: Path) -> None:
        async with engines(seed=seed) as (engine,):
            async with (
                checkpointer_on(engine, root, keep=KeepLast(1), sweep_after_s=0.01) as ckpt,
                asyncio.TaskGroup() as group,
            ):
                done: list[int] = []
                for number, (step, pause_s) in enumerate(plan, 1):
                    await ckpt.save(filled_state(SIZES, number), step, overwrite=True)
                    done.append(step)
                    group.create_task(load(ckpt), name="load")
                    await asyncio.sleep(pause_s)
            found = committed_steps(root)
            assert done[-1] in found
            assert max(found) == max(done)
            async with checkpointer_on(engine, root) as ckpt:
                assert values_in(await ckpt.load(step=done[-1])) == {len(plan)}

    with tempfile.TemporaryDirectory() as name:
        run_virtual(scenario(Path(name)), seed=seed)


class _Failing(LocalRoot):
    """A root of which one manifest cannot be read just now."""

    failing = ""

    async def read_manifests(
        self, names: Sequence[str], decode: Callable[[str, bytes], T], *, aside: bool = False
    ) -> list[T | FormatError | StorageError]:
        read = await super().read_manifests(names, decode, aside=aside)
        error = StorageError("cannot read the manifest", path=self.path, code=errno.EIO)
        pairs = zip(names, read, strict=True)
        return [error if name == self.failing else each for name, each in pairs]


@in_virtual_time
async def test_nothing_is_removed_while_a_manifest_cannot_be_read(tmp_path: Path) -> None:
    """A policy that sees fewer steps than there are lets the wrong ones go."""
    async with engines() as (engine,):
        async with checkpointer_on(engine, tmp_path) as ckpt:
            for step in range(1, 5):
                await ckpt.save(filled_state(SIZES, step), step)
        log = EventLog()
        threads = Threads(1, "ckptio")
        root = _Failing(str(tmp_path), SMALL, threads, log)
        keeper = Keeper(root, threads, log)
        root.failing = step_name(3)
        with pytest.raises(StorageError, match="cannot read"):
            await keeper.plan(KeepLast(1))
        assert [record.step for record in await keeper.records()] == [1, 2, 4]
        root.failing = ""
        assert [*await keeper.plan(KeepLast(1))] == [1, 2, 3]
        root.failing = step_name(3)  # known by now, and not read again
        assert [*await keeper.plan(KeepLast(1))] == [1, 2, 3]
        threads.shutdown()


@in_virtual_time
async def test_a_manifest_that_is_no_file_ends_no_retention(tmp_path: Path) -> None:
    """It is never read, however often it is tried; as a damaged one, it is not counted."""
    log = EventLog()

    async with engines(log=log) as (engine,):
        async with checkpointer_on(engine, tmp_path) as ckpt:
            for step in (1, 2):
                await ckpt.save(filled_state(SIZES, step), step)
        manifest = tmp_path / step_name(2) / "manifest.json"
        manifest.unlink()
        manifest.mkdir()
        async with checkpointer_on(engine, tmp_path, keep=KeepLast(1)) as ckpt:
            await ckpt.save(filled_state(SIZES, 3), 3)
        async with checkpointer_on(engine, tmp_path) as ckpt:
            assert await ckpt.steps() == (2, 3)
            with pytest.raises(FormatError) as caught:
                await ckpt.discard_after(1)
            assert "by hand" in caught.value.__notes__[0]
    assert log.of(RetentionFailed) == []


class _Reading(LocalRoot):
    """A root where another step begins to be loaded as soon as those are removed that go first."""

    def __init__(self, *args: Any, ckpt: Checkpointer, step: int) -> None:
        super().__init__(*args)
        self._ckpt, self._step = ckpt, step
        self.load: asyncio.Task[Any] | None = None
        self._num_removed = 0

    async def remove(self, name: str, save_id: str | None = None) -> int:
        nbytes = await super().remove(name, save_id)
        self._num_removed += 1
        if self._num_removed == MAX_REMOVALS:
            self.load = asyncio.get_running_loop().create_task(self._ckpt.load(step=self._step))
            while self._step not in self._ckpt._core.upkeep.steps.busy.values():
                await asyncio.sleep(0)
        return nbytes


def test_a_step_that_is_read_by_now_is_not_removed(tmp_path: Path) -> None:
    """It was not when its removal was decided; those before it took their time to go."""
    last = MAX_REMOVALS + 1  # behind those that go at once

    async def scenario() -> None:
        async with engines() as (engine,):
            async with checkpointer_on(engine, tmp_path) as ckpt:
                for step in range(1, last + 2):
                    await ckpt.save(filled_state(SIZES, step), step)
            ckpt = checkpointer_on(engine, tmp_path, keep=KeepLast(1))
            roots: list[_Reading] = []

            def make_root(path: Any, *args: Any) -> _Reading:
                roots.append(_Reading(str(path), *args[:3], ckpt=ckpt, step=last))
                return roots[-1]

            ckpt._core.make_root = make_root
            async with ckpt:
                await ckpt.save(filled_state(SIZES, last + 2), last + 2)
                for running in ckpt._core.upkeep.passes:
                    await running.end.wrapped()
                (root,) = roots
                assert root.load is not None
                assert values_in(await root.load) == {last}
            assert committed_steps(tmp_path) == [last, last + 2]

    run_virtual(scenario(), seed=0)


class _Counting(LocalRoot):
    """A root that counts what is removed at a time."""

    num_now = num_most = 0

    async def remove(self, name: str, save_id: str | None = None) -> int:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            return await super().remove(name, save_id)
        finally:
            self.num_now -= 1


class _Preempted(LocalRoot):
    """A root where the last save is called for, and begins, as soon as some steps are removed."""

    def __init__(self, *args: Any, ckpt: Checkpointer, step: int) -> None:
        super().__init__(*args)
        self._ckpt, self._step = ckpt, step
        self.save: SaveHandle | None = None
        self.removed: list[str] = []
        self.hurried: list[str] = []

    async def remove(self, name: str, save_id: str | None = None) -> int:
        if self.save is not None and not self.save.done():
            self.hurried.append(name)
        nbytes = await super().remove(name, save_id)
        self.removed.append(name)
        if len(self.removed) == MAX_REMOVALS:
            self._ckpt.preempt("a notice")
            while not self._ckpt._core.ending.is_called:
                await asyncio.sleep(0)
            self.save = self._ckpt.save(filled_state(SIZES, 1), self._step)
        return nbytes


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_removed_beside_the_last_save(tmp_path: Path, seed: int) -> None:
    """What time is left is the save's; steps that were about to go do so when it is committed."""
    last = 3 * MAX_REMOVALS

    async def scenario() -> None:
        async with engines(seed=seed) as (engine,):
            async with checkpointer_on(engine, tmp_path) as ckpt:
                for step in range(1, last - 1):
                    await ckpt.save(filled_state(SIZES, step), step)
            ckpt = checkpointer_on(engine, tmp_path, keep=KeepLast(1))
            roots: list[_Preempted] = []

            def make_root(path: Any, *args: Any) -> _Preempted:
                roots.append(_Preempted(str(path), *args[:3], ckpt=ckpt, step=last))
                return roots[-1]

            ckpt._core.make_root = make_root
            async with ckpt:
                await ckpt.save(filled_state(SIZES, last - 1), last - 1)
                for running in list(ckpt._core.upkeep.passes):
                    await running.end.wrapped()
            (root,) = roots
            assert root.save is not None
            assert root.hurried == []
            assert len(root.removed) == last - 1
            assert committed_steps(tmp_path) == [last]

    run_virtual(scenario(), seed=seed)


def test_a_few_steps_are_removed_at_a_time(tmp_path: Path) -> None:
    """Of thousands, each may take a server a while. What one fails of cuts off no other."""
    log = EventLog()

    async def scenario() -> None:
        async with engines(log=log) as (engine,):
            async with checkpointer_on(engine, tmp_path) as ckpt:
                for step in range(8):
                    await ckpt.save(filled_state(SIZES, step), step)
            ckpt = checkpointer_on(engine, tmp_path, keep=KeepLast(1))
            roots: list[_Counting] = []

            def make_root(path: Any, *args: Any) -> _Counting:
                roots.append(_Counting(str(path), *args[:3]))
                return roots[-1]

            ckpt._core.make_root = make_root
            async with ckpt:
                upkeep = ckpt._core.upkeep
                owes = upkeep._owes

                async def look(step: int, save_id: str) -> bool:
                    if step == 4:
                        raise StorageError("nobody can tell", path=upkeep._keeper.root.join("4"))
                    return await owes(step, save_id)

                upkeep._owes = look  # type: ignore[method-assign]  # to fail there
                await ckpt.save(filled_state(SIZES, 8), 8)
            assert 1 < roots[0].num_most <= MAX_REMOVALS

    run_virtual(scenario(), seed=0)
    assert sorted(event.step for event in log.of(CheckpointRemoved)) == [0, 1, 2, 3, 5]
    assert committed_steps(tmp_path) == [4, 6, 7, 8]
    (event,) = log.of(RetentionFailed)
    assert "nobody can tell" in str(event.error)


def test_metrics_that_are_no_numbers_are_left_out() -> None:
    """Anybody may have written the manifest: also an int that no float is near to."""
    written = {"metrics": {"loss": 0.5, "nan": "nan", "big": 10**400, "is": True, "text": "1"}}
    assert metrics_of(written) == {"loss": 0.5, "nan": "nan"}
    assert metrics_of({"metrics": [1]}) == metrics_of({}) == {}


def test_saves_that_are_quicker_than_removals_share_them(tmp_path: Path) -> None:
    """What waits for a removal to end does what all that were saved meanwhile need."""

    async def scenario() -> None:
        async with engines() as (engine,):
            async with checkpointer_on(engine, tmp_path, keep=KeepLast(1)) as ckpt:
                keeper = ckpt._core.keeper
                find, may_go, num_looks = keeper.find, asyncio.Event(), 0

                async def slow(**options: bool) -> Any:
                    nonlocal num_looks
                    num_looks += 1
                    await may_go.wait()
                    return await find(**options)

                keeper.find = slow  # type: ignore[method-assign]  # as a file system far away
                for step in range(1, 9):
                    await ckpt.save(filled_state(SIZES, step), step)
                may_go.set()
            assert num_looks == 2
            assert committed_steps(tmp_path) == [8]

    run_virtual(scenario(), seed=0)


async def save_steps(engine: Engine, root: Path, num_steps: int, **options: Any) -> None:
    """Save as a run that keeps everything does, from step 1 on."""
    async with checkpointer_on(engine, root, **options) as ckpt:
        for step in range(1, num_steps + 1):
            await ckpt.save(filled_state(SIZES, step), step).durable


@pytest.mark.parametrize(("num_ranks", "full"), [(1, [0]), (2, [0]), (2, [1]), (2, [0, 1])])
@in_virtual_time
async def test_a_full_disk_is_cleared_of_what_dead_saves_left(
    tmp_path: Path, num_ranks: int, full: list[int]
) -> None:
    """Of other steps, too, whichever rank finds no room: the next save has some."""
    dead = tmp_path / step_name(5)
    with stopped_save(dead, "truncate") as process:
        process.kill()
        process.wait()

    def fail(operation: Operation) -> None:
        is_full = any(f"-{rank:05d}-00000." in operation.path for rank in full)
        if operation.kind == "pwrite" and is_full and dead.exists():
            raise OSError(errno.ENOSPC, "no room")

    async def body(rank: int, engine: Engine) -> None:
        state = {f"own{rank}": filled_state(SIZES, 1)}
        async with checkpointer_on(engine, tmp_path, sweep_after_s=3600) as ckpt:
            with pytest.raises(CheckpointError) as caught:
                await ckpt.save(state, 6)
            error = caught.value if num_ranks == 1 else caught.value.__cause__
            is_own = isinstance(error, StorageError) and error.errno == errno.ENOSPC
            assert is_own or rank not in full or len(full) > 1  # one failure stops the others
            await asyncio.sleep(10)
            await ckpt.save(state, 7)

    async with engines(num_ranks, files=RecordingFiles(fail)) as group:
        await on_each(group, body)
    assert committed_steps(tmp_path) == [7]
    assert not dead.exists()


@in_virtual_time
async def test_a_full_disk_is_cleared_of_what_dead_saves_left_whatever_a_policy_does(
    tmp_path: Path,
) -> None:
    """One that raises says what may not go, and no more."""
    dead = tmp_path / step_name(9)

    def fail(operation: Operation) -> None:
        if operation.kind == "pwrite" and dead.exists():
            raise OSError(errno.ENOSPC, "no room")

    def decide(_: StepRecord) -> bool:
        raise ZeroDivisionError

    async with engines(1, files=RecordingFiles(fail)) as (engine,):
        await save_steps(engine, tmp_path, 2)
        with stopped_save(dead, "truncate") as process:
            process.kill()
            process.wait()
        options = {"keep": KeepIf(decide), "sweep_after_s": 3600}
        async with checkpointer_on(engine, tmp_path, **options) as ckpt:
            await ckpt.load()
            with pytest.raises(StorageError, match="no room"):
                await ckpt.save(filled_state(SIZES, 3), 3)
            await asyncio.sleep(10)
            await ckpt.save(filled_state(SIZES, 3), 3)
    assert committed_steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(("loaded", "left"), [(4, [3, 4]), (1, [1, 3, 4]), (None, [1, 2, 3, 4])])
@in_virtual_time
async def test_a_full_disk_is_cleared_of_steps_that_are_not_kept(
    tmp_path: Path, loaded: int | None, left: list[int]
) -> None:
    """An earlier run kept them, and no save has room as they are there; what was loaded stays."""

    def fail(operation: Operation) -> None:
        is_full = loaded is None or (tmp_path / step_name(2)).exists()
        if operation.kind == "pwrite" and step_name(5) in operation.path and is_full:
            raise OSError(errno.ENOSPC, "no room")

    async with engines(1, files=RecordingFiles(fail)) as (engine,):
        await save_steps(engine, tmp_path, 4)
        async with checkpointer_on(engine, tmp_path, keep=KeepLast(2)) as ckpt:
            if loaded is not None:
                await ckpt.load(step=loaded)
            with pytest.raises(StorageError, match="no room"):
                await ckpt.save(filled_state(SIZES, 5), 5)
            await asyncio.sleep(10)
            assert committed_steps(tmp_path) == left
            if loaded is not None:
                await ckpt.save(filled_state(SIZES, 5), 5)
    assert committed_steps(tmp_path) == ([1, 2, 3, 4] if loaded is None else [4, 5])


def test_a_sweep_of_a_full_disk_does_not_put_off_the_regular_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds less: where nobody knows how long nothing was written, it guesses nothing."""
    began: list[tuple[float, float]] = []
    is_full, start_s = False, 0.0

    def fail(operation: Operation) -> None:
        if operation.kind == "pwrite" and is_full:
            raise OSError(errno.ENOSPC, "no room")

    async def sweep(_: Keeper, quiet_s: float, *others: Any) -> None:
        del others
        began.append((round(asyncio.get_running_loop().time() - start_s, -1), quiet_s))

    async def scenario() -> None:
        nonlocal is_full, start_s
        start_s = asyncio.get_running_loop().time()
        async with (
            engines(1, files=RecordingFiles(fail)) as (engine,),
            checkpointer_on(engine, tmp_path, sweep_after_s=1000) as ckpt,
        ):
            await ckpt.save(filled_state(SIZES, 1), 1)
            await asyncio.sleep(900)
            is_full = True
            with pytest.raises(StorageError, match="no room"):
                await ckpt.save(filled_state(SIZES, 2), 2)
            await asyncio.sleep(200)
            is_full = False
            await ckpt.save(filled_state(SIZES, 3), 3)

    monkeypatch.setattr(Keeper, "sweep", sweep)
    run_virtual(scenario(), seed=0)
    assert began == [(0, 1000), (900, 0), (1100, 1000)]


@in_virtual_time
async def test_a_full_second_tier_is_cleared_of_steps_that_are_not_kept(tmp_path: Path) -> None:
    """Else no copy has room for good, and the first tier keeps every step, as its copy is owed."""
    near, far = tmp_path / "near", tmp_path / "far"
    dead = far / step_name(9)

    def fail(operation: Operation) -> None:
        is_full = (far / step_name(1)).exists() or dead.exists()
        is_copy = operation.path.startswith(f"{far / step_name(4)}/")
        if operation.kind == "pwrite" and is_copy and is_full:
            raise OSError(errno.ENOSPC, "no room")

    async with engines(1, files=RecordingFiles(fail)) as (engine,):
        await save_steps(engine, near, 3, then=far)
        with stopped_save(dead, "truncate") as process:
            process.kill()
            process.wait()
        options = {"keep": KeepLast(2), "sweep_after_s": 3600}
        async with checkpointer_on(engine, near, then=far, **options) as ckpt:
            await asyncio.sleep(1)  # what earlier runs owed was looked for
            with pytest.raises(StorageError, match="no room"):
                await ckpt.save(filled_state(SIZES, 4), 4).durable
            await asyncio.sleep(10)
            assert committed_steps(far) == [2, 3]
            assert not dead.exists()
            await ckpt.save(filled_state(SIZES, 5), 5).durable
    assert committed_steps(far)[-1] == 5


@in_virtual_time
async def test_all_that_a_run_has_loaded_stay_on_a_full_disk(tmp_path: Path) -> None:
    """It goes on from the first of them, and has looked at another one; which, nobody knows."""

    def fail(operation: Operation) -> None:
        if operation.kind == "pwrite" and step_name(5) in operation.path:
            raise OSError(errno.ENOSPC, "no room")

    async with engines(1, files=RecordingFiles(fail)) as (engine,):
        await save_steps(engine, tmp_path, 4)
        async with checkpointer_on(engine, tmp_path, keep=KeepLast(1)) as ckpt:
            await ckpt.load(step=1)
            await ckpt.load(step=3)
            with pytest.raises(StorageError, match="no room"):
                await ckpt.save(filled_state(SIZES, 5), 5)
            await asyncio.sleep(10)
    assert committed_steps(tmp_path) == [1, 3, 4]


def test_what_a_run_went_back_to_stays_on_the_second_tier_until_a_copy_is_there(
    tmp_path: Path,
) -> None:
    """The first tier is another machine's by then: with that, all that is good would be lost."""
    far, is_full = tmp_path / "far", True

    def fail(operation: Operation) -> None:
        if is_full and operation.kind == "pwrite" and f"{far / step_name(6)}/" in operation.path:
            raise OSError(errno.ENOSPC, "no room")

    async def scenario() -> None:
        nonlocal is_full
        async with engines(1, files=RecordingFiles(fail)) as (engine,):
            await save_steps(engine, tmp_path / "lost", 5, then=far)
            options = {"then": far, "keep": KeepLast(2)}
            async with checkpointer_on(engine, tmp_path / "near", **options) as ckpt:
                await ckpt.load(step=2)
                with pytest.raises(StorageError, match="no room"):
                    await ckpt.save(filled_state(SIZES, 6), 6).durable
                await asyncio.sleep(10)
                assert committed_steps(far) == [2, 4, 5]
                is_full = False
                await ckpt.save(filled_state(SIZES, 7), 7).durable

    run_virtual(scenario(), seed=0)
    assert committed_steps(far) in ([5, 7], [5, 6, 7])  # a copy that comes late is looked at later


@in_virtual_time
async def test_the_second_tier_stays_as_it_is_until_a_copy_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what earlier runs owed is made just as a save of this one is committed."""
    far, seen = tmp_path / "far", []

    def look(operation: Operation) -> None:
        if operation.kind == "pwrite" and f"{far / step_name(4)}/" in operation.path:
            seen.append(committed_steps(far))

    is_committed = asyncio.Event()

    async def take_up(_: SecondTier, root: str) -> None:
        del root
        await is_committed.wait()

    async with engines(1, files=RecordingFiles(look)) as (engine,):
        await save_steps(engine, tmp_path / "lost", 3, then=far)
        monkeypatch.setattr(SecondTier, "take_up", take_up)
        options = {"then": far, "keep": KeepLast(1)}
        async with checkpointer_on(engine, tmp_path / "near", **options) as ckpt:
            save = ckpt.save(filled_state(SIZES, 4), 4)
            await save
            is_committed.set()
            await save.durable
    assert seen
    assert all(steps == [1, 2, 3] for steps in seen)
    assert committed_steps(far) == [4]


@in_virtual_time
async def test_a_full_first_tier_is_cleared_of_what_the_second_one_has(tmp_path: Path) -> None:
    """A run with `keep_local=` takes over from one without: nothing else may go there."""
    near, far = tmp_path / "near", tmp_path / "far"

    def fail(operation: Operation) -> None:
        is_full = (near / step_name(1)).exists()
        if operation.kind == "pwrite" and step_name(4) in operation.path and is_full:
            raise OSError(errno.ENOSPC, "no room")

    async with engines(1, files=RecordingFiles(fail)) as (engine,):
        await save_steps(engine, near, 3, then=far)
        async with checkpointer_on(engine, near, then=far, keep_local=1) as ckpt:
            await ckpt.load()
            with pytest.raises(StorageError, match="no room"):
                await ckpt.save(filled_state(SIZES, 4), 4)
            await asyncio.sleep(10)
            assert committed_steps(near) == [3]
            await ckpt.save(filled_state(SIZES, 4), 4).durable
    assert committed_steps(far) == [1, 2, 3, 4]


@pytest.mark.parametrize("is_load", [True, False])
def test_the_newest_step_of_a_directory_is_found_by_few_looks(
    *, is_load: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of a long run as of a short one; each may be a round trip to a server."""

    async def scenario(root: Path, num_steps: int) -> int:
        paths: list[str] = []

        def counted(call: Any) -> Any:
            def count(path: Any, *args: Any, **options: Any) -> Any:
                if str(path).startswith(str(root)):
                    paths.append(str(path))
                return call(path, *args, **options)

            return count

        async with engines() as (engine,), checkpointer_on(engine, root) as ckpt:
            await ckpt.save(filled_state(SIZES, 1), 0)
            for step in range(1, num_steps):
                shutil.copytree(root / step_name(0), root / step_name(step))
            (root / step_name(num_steps)).mkdir()  # of a save that died
            with monkeypatch.context() as patch:
                for name in ("stat", "lstat"):
                    patch.setattr(os, name, counted(getattr(os, name)))
                if is_load:
                    await ckpt.load()
                else:
                    assert await ckpt.latest() == num_steps - 1
        return len(paths)

    few, many = (run_virtual(scenario(tmp_path / str(n), n), seed=0) for n in (5, 50))
    assert few == many


@pytest.fixture
def threads() -> Iterator[Threads]:
    """Threads of a keeper."""
    made = Threads(1, "ckptio")
    yield made
    made.shutdown()


def keeper_at(root: Path, threads: Threads) -> Keeper:
    """Make what looks after the steps of a directory."""
    log = EventLog()
    return Keeper(LocalRoot(str(root), SMALL, threads, log), threads, log)


def commit(root: Path, *steps: int) -> None:
    """Put something in the place of the manifests of steps."""
    for step in steps:
        (root / step_name(step)).mkdir(exist_ok=True)
        (root / step_name(step) / "manifest.json").touch()


@pytest.mark.parametrize("count", [1, 2])
async def test_a_step_committed_between_looks_is_found(
    count: int, tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that is much older, as the one between has gone for the new one."""
    commit(tmp_path, 100, 200)
    (tmp_path / step_name(300)).mkdir()
    look = LocalRoot.look

    async def late(self: LocalRoot, names: Sequence[str], accepts: Any = None) -> Any:
        found = await look(self, names, accepts)
        if [*names] == [step_name(300)]:
            commit(tmp_path, 300)
            shutil.rmtree(tmp_path / step_name(200), ignore_errors=True)
        return found

    monkeypatch.setattr(LocalRoot, "look", late)
    assert (await keeper_at(tmp_path, threads).newest(count))[-1] == 300


async def test_a_step_that_nobody_can_look_at_hides_no_higher_one(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before the highest is asked for as advice; if it is the highest, that is an error."""
    commit(tmp_path, 1, 2, 3)
    refused = {step_name(2)}
    stat = os.stat

    def deny(path: Any, **options: Any) -> os.stat_result:
        if any(name in str(path) for name in refused):
            raise OSError(errno.EACCES, "not for you")
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", deny)
    keeper = keeper_at(tmp_path, threads)
    assert await keeper.newest(2) == [3]
    assert await keeper.newest(2, above=2) == [3]
    assert await keeper.newest(1, above=3) == []
    with pytest.raises(StorageError):  # no advice, where another step is known
        await keeper.newest(2, above=1)
    refused.add(step_name(3))
    with pytest.raises(StorageError):
        await keeper.newest(2)


async def test_a_step_that_goes_before_it_is_read_is_no_failure(
    tmp_path: Path, threads: Threads
) -> None:
    """Another program may remove steps, too: the rest is decided without it."""
    for step in (1, 2, 3):
        await ckptio.save({"step": step}, tmp_path / step_name(step))
    keeper = keeper_at(tmp_path, threads)
    found = await keeper.find()
    shutil.rmtree(tmp_path / step_name(1))
    assert list(await keeper.plan(KeepLast(1), found=found)) == [2]


@in_virtual_time
async def test_a_removal_that_is_cancelled_is_told_all_the_same(threads: Threads) -> None:
    """What has gone is an event."""
    log = EventLog()

    class SlowRoot(LocalRoot):
        async def remove(self, name: str, save_id: str | None = None) -> int:
            del name, save_id
            await outlive(asyncio.ensure_future(asyncio.sleep(60)))  # as for its thread
            return 10

    keeper = Keeper(SlowRoot("/run", SMALL, threads, log), threads, log)
    removing = asyncio.ensure_future(keeper.remove(3))
    await asyncio.sleep(0.5)
    removing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await removing
    assert [event.step for event in log.of(CheckpointRemoved)] == [3]
