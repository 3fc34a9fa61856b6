"""A run whose steps are copied to a second tier."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import errno
import os
import shutil
import threading
import uuid
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptio import (
    Checkpointer,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    Engine,
    KeepLast,
    RankError,
    StorageError,
    sync,
)
from ckptio.checkpointer import tiers
from ckptio.checkpointer.keeper import Keeper
from ckptio.checkpointer.steps import step_name
from ckptio.checkpointer.tiers import SecondTier
from ckptio.engine import tiers as engine_tiers
from ckptio.engine.transfer import transfer
from ckptio.events import (
    CheckpointRemoved,
    CopyFailed,
    CopyStarted,
    Event,
    HigherStepFound,
    RetentionFailed,
    TierPassedOver,
)
from ckptio.runtime.running import Running
from ckptio.storage import local
from ckptio.storage.file_names import NOTE_PREFIX
from ckptio.storage.files import PosixFiles
from ckptio.storage.root import LocalRoot, resolve_root
from ckptio.testing import EventLog, run_virtual
from tests.checkpointer.rig import checkpointer_on, committed_steps, engines, on_each
from tests.mounts import Mount
from tests.rig import SMALL, Ahead, assert_same, assert_tidy, filled_state, names_in, values_in
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    import torch

    from ckptio.engine.landing import Reading

pytestmark = pytest.mark.usefixtures("no_leaks")
SIZES = [5000, 70_000]


@pytest.fixture(params=["directory", "objects"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where to: a directory, or a prefix of fsspec's store in memory."""
    if request.param == "directory":
        yield str(tmp_path / "far")
        return
    root = f"/run-{uuid.uuid4().hex}"
    yield f"memory:/{root}"
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(root, recursive=True)


@contextlib.asynccontextmanager
async def second_tier() -> AsyncIterator[SecondTier]:
    """Give a tier whose place nobody asks for anything."""
    async with engines() as (engine,):
        assert engine._core is not None
        yield SecondTier("/far", None, engine._core, resolve_root)


def state_of(step: int) -> dict[str, torch.Tensor]:
    return filled_state(SIZES, step % 251)


async def steps_in(root: object) -> tuple[int, ...]:
    async with Checkpointer(str(root), config=SMALL, sweep_after_s=None) as ckpt:
        return await ckpt.steps()


async def remove(root: object, step: int) -> None:
    async with Checkpointer(str(root), config=SMALL, sweep_after_s=None) as ckpt:
        await ckpt.engine._core.call(lambda _: ckpt._core.keeper.remove(step), "remove")


async def owe(near: Path, far: str, step: int, *, stays: bool = False) -> None:
    """Save a step whose copy fails: something is in its place, and goes then unless it stays."""
    there = f"{far}/{step_name(step)}"
    async with Engine(SMALL) as engine:
        await engine.save({"in the way": 1}, there)
        handle = engine.save(state_of(step), near / step_name(step), then=there)
        await handle
        with pytest.raises(CheckpointExistsError):
            await handle.durable
    assert [name for name in names_in(near / step_name(step)) if name.startswith(NOTE_PREFIX)]
    if not stays:
        await remove(far, step)


async def test_steps_are_copied_and_found_on_both_tiers(tmp_path: Path, far: str) -> None:
    """Each by itself, and the nearest of them is read."""
    near, log = tmp_path / "near", EventLog()
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        for step in (1, 2, 8):
            handle = ckpt.save(state_of(step), step, metrics={"loss": step})
            await handle
        assert (await handle.durable).path == f"{far}/{step_name(8)}"
        assert_same(await ckpt.load(), state_of(8))
    assert await steps_in(near) == await steps_in(far) == (1, 2, 8)
    for step in (2, 8):
        await remove(near, step)
    await remove(far, 1)
    async with Checkpointer(near, then=far, config=SMALL, observer=log) as ckpt:
        assert await ckpt.steps() == (1, 2, 8)
        assert [(r.step, r.metrics) for r in await ckpt.records()] == [
            (step, {"loss": step}) for step in (1, 2, 8)
        ]
        assert_same(await ckpt.load(), state_of(8))
        assert_same(await ckpt.load(step=1), state_of(1))
        with pytest.raises(CheckpointNotFoundError):
            await ckpt.load(step=4)
    (event,) = log.of(TierPassedOver)
    assert event.to == f"{far}/{step_name(8)}"


async def test_both_tiers_are_looked_after(tmp_path: Path, far: str) -> None:
    """By one policy, each by what is committed there; nothing is left on the first."""
    near = tmp_path / "near"
    async with Checkpointer(near, then=far, keep=KeepLast(2), config=SMALL) as ckpt:
        for step in range(5):
            await ckpt.save(state_of(step), step).durable
    assert await steps_in(near) == await steps_in(far) == (3, 4)
    assert names_in(near) == [step_name(3), step_name(4)]
    for step in (3, 4):
        assert_tidy(near / step_name(step))


async def test_a_step_that_is_still_to_be_copied_stays(tmp_path: Path, far: str) -> None:
    """Until the next run has copied it; then it goes as the policy says."""
    near, log = tmp_path / "near", EventLog()
    await owe(near, far, 1)
    async with Checkpointer(near, then=far, config=SMALL, observer=log) as ckpt:
        await ckpt.save(state_of(2), 2)
    assert {event.is_resumed for event in log.of(CopyStarted)} == {True, False}
    assert await steps_in(far) == (1, 2)
    assert_same(await asyncio.to_thread(sync.load, f"{far}/{step_name(1)}"), state_of(1))
    assert_tidy(near / step_name(1))
    async with Checkpointer(near, keep=KeepLast(1), then=far, config=SMALL) as ckpt:
        await ckpt.save(state_of(3), 3)
    assert await steps_in(near) == await steps_in(far) == (3,)


async def test_retention_leaves_what_is_owed(tmp_path: Path, far: str) -> None:
    """Where the copy cannot be made, the first tier's step is the only one there is."""
    near = tmp_path / "near"
    await owe(near, far, 1, stays=True)
    await asyncio.to_thread(sync.save, {"no": "copy"}, near / step_name(2), config=SMALL)
    async with Checkpointer(near, keep=KeepLast(1), then=far, config=SMALL) as ckpt:
        await ckpt.save(state_of(3), 3).durable
    assert await steps_in(near) == (1, 3)
    assert_same(await asyncio.to_thread(sync.load, near / step_name(1)), state_of(1))


async def test_what_is_owed_stays_where_there_is_no_second_tier_for_a_while(
    tmp_path: Path, far: str
) -> None:
    """A run that goes on without `then=`, as the second tier is down, keeps what it is owed."""
    near = tmp_path / "near"
    await owe(near, far, 1)
    async with Checkpointer(near, keep=KeepLast(1), config=SMALL) as ckpt:
        for step in (2, 3):
            await ckpt.save(state_of(step), step)
    assert await steps_in(near) == (1, 3)
    async with Checkpointer(near, then=far, keep=KeepLast(1), config=SMALL) as ckpt:
        await ckpt.save(state_of(4), 4).durable
    assert_same(await asyncio.to_thread(sync.load, near / step_name(4)), state_of(4))


async def test_what_was_owed_is_kept_by_the_policy_once_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that takes longer than the save after which the policy was applied last."""
    near, far, begins = tmp_path / "near", tmp_path / "far", asyncio.Event()
    for step in (1, 2, 3):
        await owe(near, str(far), step, stays=True)
    for step in (1, 2, 3):
        await remove(far, step)
    take_up = SecondTier.take_up

    async def late(second: SecondTier, root: str) -> None:
        await begins.wait()
        await take_up(second, root)

    monkeypatch.setattr(SecondTier, "take_up", late)
    async with (
        engines() as (engine,),
        checkpointer_on(engine, near, then=far, keep=KeepLast(2)) as ckpt,
    ):
        engine._core.context.copies.seen.add(str(near))  # no save takes them up
        await ckpt.save(state_of(4), 4).durable
        taking, *others = ckpt._core.upkeep.passes
        for other in others:
            await other.end.wrapped()
        before = await steps_in(near)
        begins.set()
        await taking.end.wrapped()
    assert before == (1, 2, 3, 4)
    assert await steps_in(near) == await steps_in(far) == (3, 4)


async def test_what_was_discarded_from_another_machine_is_told(tmp_path: Path, far: str) -> None:
    """Its own disk was the first tier there: what is on this one's stays, and is what is loaded."""
    disks, log = (tmp_path / "a", tmp_path / "b"), EventLog()
    async with Checkpointer(disks[0], then=far, config=SMALL) as ckpt:
        for step in (1, 2, 3):
            await ckpt.save(state_of(step), step, metrics={"disk": 1}).durable
    async with Checkpointer(disks[1], then=far, config=SMALL, observer=log) as ckpt:
        assert_same(await ckpt.load(), state_of(3))
        assert await ckpt.discard_after(1) == (2, 3)
        await ckpt.save(state_of(12), 2, metrics={"disk": 2}).durable
        assert_same(await ckpt.load(), state_of(12))
    assert log.of(HigherStepFound) == []
    async with Checkpointer(disks[0], then=far, config=SMALL, observer=log) as ckpt:
        assert_same(await ckpt.load(), state_of(3))
        [event] = log.of(HigherStepFound)
        assert (event.path, event.step, event.highest) == (str(disks[0]), 2, 3)
        assert_same(await ckpt.load(step=2), state_of(12))
        assert [record.metrics for record in await ckpt.records()] == [
            {"disk": 1},
            {"disk": 2},
            {"disk": 1},
        ]
        await ckpt.discard_after(2)
        assert_same(await ckpt.load(), state_of(12))
    assert len(log.of(HigherStepFound)) == 1


async def test_what_was_discarded_without_the_second_tier_is_told(tmp_path: Path, far: str) -> None:
    """A run does without it while it is away, and goes back: what is there is what is loaded."""
    near, log = tmp_path / "near", EventLog()
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        for step in (1, 2, 3, 9):
            await ckpt.save(state_of(step), step).durable
    async with Checkpointer(near, config=SMALL) as ckpt:
        assert await ckpt.discard_after(3) == (9,)
    async with Checkpointer(near, then=far, config=SMALL, observer=log) as ckpt:
        assert_same(await ckpt.load(), state_of(9))  # as if it had been let go of here
    assert log.of(HigherStepFound) == []
    async with Checkpointer(near, config=SMALL) as ckpt:
        for step in (4, 5):
            await ckpt.save(state_of(step + 20), step)
    async with Checkpointer(near, then=far, config=SMALL, observer=log) as ckpt:
        assert_same(await ckpt.load(), state_of(9))
        [event] = log.of(HigherStepFound)
        assert (event.path, event.step, event.highest) == (str(near), 5, 9)
        assert await ckpt.discard_after(5) == (9,)
        assert_same(await ckpt.load(), state_of(25))
    async with Checkpointer(tmp_path / "other", then=far, config=SMALL, observer=log) as ckpt:
        assert_same(await ckpt.load(), state_of(3))
    assert len(log.of(HigherStepFound)) == 1


async def test_what_cannot_be_told_holds_no_load_up(
    tmp_path: Path, far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the run went back elsewhere is a word to the log, and no more."""
    near = tmp_path / "near"
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        await ckpt.save(state_of(1), 1).durable
    async with Checkpointer(near, config=SMALL) as ckpt:
        await ckpt.save(state_of(2), 2)
    asked = []

    async def fail(storage: Any, context: Any) -> None:
        del context
        asked.append(storage.path)
        raise StorageError("no answer", path=storage.path)

    monkeypatch.setattr(tiers, "read_head", fail)
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        assert_same(await ckpt.load(), state_of(2))
    assert asked == [str(near / step_name(2))]


async def test_steps_that_the_second_tier_never_had_are_loaded_without_a_word(
    tmp_path: Path, far: str
) -> None:
    """Of a run that had no second tier then, or whose copies are owed."""
    near, log = tmp_path / "near", EventLog()
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        await ckpt.save(state_of(1), 1).durable
    async with Checkpointer(near, config=SMALL) as ckpt:
        await ckpt.save(state_of(2), 2)
    async with Checkpointer(near, then=far, config=SMALL, observer=log) as ckpt:
        assert_same(await ckpt.load(), state_of(2))
    async with Checkpointer(near, then=tmp_path / "new", config=SMALL, observer=log) as ckpt:
        assert_same(await ckpt.load(), state_of(2))
    assert log.of(HigherStepFound) == []


async def test_what_is_known_of_a_step_is_of_the_save_that_is_loaded(
    tmp_path: Path, far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one whose copy is owed, though the clock was set back since the other was saved."""
    near = tmp_path / "near"
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr("ckptio.engine.save.dt.datetime", Ahead)
            await ckpt.save(state_of(1), 5, metrics={"loss": 9}).durable
        with monkeypatch.context() as patch:
            patch.setattr("ckptio.runtime.save_copy.make_copy", none_is_made)
            handle = ckpt.save(state_of(2), 5, overwrite=True, metrics={"loss": 1})
            with pytest.raises(StorageError):
                await handle.durable
        assert_same(await ckpt.load(step=5), state_of(2))
        assert [record.metrics for record in await ckpt.records()] == [{"loss": 1}]


async def none_is_made(*args: Any) -> None:
    """Let go of the note, as a copy that fails does."""
    await args[-1].release()
    raise StorageError("no", path="")


async def test_copies_that_failed_are_made_when_the_second_tier_is_back(tmp_path: Path) -> None:
    """In the same run: the first tier would fill, and be the only one that has these steps."""
    near, far, log = tmp_path / "near", tmp_path / "far", EventLog()
    async with Checkpointer(near, then=far, keep_local=1, config=SMALL, observer=log) as ckpt:
        far.write_text("not mounted")
        for step in (1, 2):
            with pytest.raises(StorageError):
                await ckpt.save(state_of(step), step).durable
        far.unlink()
        for step in (3, 4):
            await ckpt.save(state_of(step), step).durable
    assert await steps_in(far) == (1, 2, 3, 4)  # leaving has waited for the copies
    assert len(log.of(CopyFailed)) == 2
    async with Checkpointer(near, then=far, keep_local=1, config=SMALL) as ckpt:
        await ckpt.save(state_of(5), 5)
    assert await steps_in(near) == (5,)


async def test_a_second_tier_that_is_away_is_told_how_to_do_without(tmp_path: Path) -> None:
    """A run that resumes may have all it needs on the first one."""
    near, far = tmp_path / "near", tmp_path / "far"
    async with Checkpointer(near, config=SMALL) as ckpt:
        for step in (6, 7):
            await ckpt.save(state_of(step), step)
    far.write_text("not mounted")
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        told = "leave out then= to go on with step 7 of the"
        for ask in (ckpt.latest, ckpt.steps, ckpt.records, ckpt.load):
            with pytest.raises(StorageError, match=told) as caught:
                await ask()
            assert caught.value.errno == errno.ENOTDIR
    async with Checkpointer(tmp_path / "none", then=far, config=SMALL) as ckpt:
        with pytest.raises(StorageError) as caught:
            await ckpt.latest()
        assert "leave out" not in str(caught.value)


async def test_a_step_that_cannot_be_read_keeps_no_other(tmp_path: Path, far: str) -> None:
    """It stays itself, and that is told."""
    near, log = tmp_path / "near", EventLog()
    async with Checkpointer(
        near, then=far, keep=KeepLast(3), keep_local=1, config=SMALL, observer=log
    ) as ckpt:
        for step in range(1, 7):
            await ckpt.save(state_of(step), step).durable
            if step == 2:
                manifest = near / step_name(2) / "manifest.json"
                manifest.unlink()
                manifest.mkdir()
    assert await steps_in(far) == (4, 5, 6)
    assert names_in(near) == [step_name(2), step_name(6)]
    assert log.of(RetentionFailed)


async def test_a_step_that_is_copied_late_goes_from_both_tiers(
    tmp_path: Path, far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy is removed as soon as it is there; nothing would tell then that there was one."""
    near, begins = tmp_path / "near", asyncio.Event()
    loop = asyncio.get_running_loop()

    async def late(reading: Reading, *arguments: Any) -> None:
        if reading.storage.path.endswith(step_name(1)):
            goes_on = asyncio.run_coroutine_threadsafe(begins.wait(), loop)
            await asyncio.wrap_future(goes_on)
        await transfer(reading, *arguments)

    monkeypatch.setattr(engine_tiers, "transfer", late)
    async with Checkpointer(near, then=far, keep=KeepLast(2), keep_local=1, config=SMALL) as ckpt:
        overtaken = ckpt.save(state_of(1), 1)
        for step in (2, 3, 4):
            await ckpt.save(state_of(step), step).durable
        begins.set()
        await overtaken.durable
    assert await steps_in(near) == (4,)
    assert await steps_in(far) == (3, 4)


async def test_a_step_that_only_the_second_tier_has_is_not_saved_over(
    tmp_path: Path, far: str
) -> None:
    """As with one tier: its copy could not be made, and would be owed for ever."""
    near = tmp_path / "near"
    async with Checkpointer(near, then=far, keep_local=1, config=SMALL) as ckpt:
        for step in (1, 2, 3):
            await ckpt.save(state_of(step), step).durable
    async with Checkpointer(near, then=far, keep_local=1, config=SMALL) as ckpt:
        assert names_in(near) == [step_name(3)]
        handle = ckpt.save(state_of(10), 1)
        with pytest.raises(CheckpointExistsError, match="overwrite=True") as caught:
            await handle
        assert "discard_after" in caught.value.__notes__[0]
        assert f"{far}/{step_name(1)}" in str(caught.value)
        with pytest.raises(CheckpointExistsError):
            await handle.durable
        assert names_in(near) == [step_name(3)]
        assert_same(await ckpt.load(step=1), state_of(1))
        await ckpt.save(state_of(11), 1, overwrite=True).durable
        assert_same(await ckpt.load(step=1), state_of(11))
        assert await ckpt.discard_after(1) == (2, 3)
        await ckpt.save(state_of(12), 2).durable
        assert_same(await ckpt.load(), state_of(12))
    assert await steps_in(far) == (1, 2)


async def test_few_steps_stay_on_the_first_tier(tmp_path: Path, far: str) -> None:
    """Those that are copied, but for the newest; the second tier keeps what the policy keeps."""
    near, log = tmp_path / "near", EventLog()
    options: dict[str, Any] = {"then": far, "keep_local": 1, "config": SMALL, "observer": log}
    async with Checkpointer(near, keep=KeepLast(3), **options) as ckpt:
        for step in range(5):
            await ckpt.save(state_of(step), step).durable
    assert await steps_in(near) == (4,)
    assert await steps_in(far) == (2, 3, 4)
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        assert_same(await ckpt.load(step=2), state_of(2))
    assert log.of(RetentionFailed) == []


async def test_the_step_that_was_saved_last_keeps_no_other_on_the_first_tier(
    tmp_path: Path, far: str
) -> None:
    """It stays there beside the newest, in a run that went back."""
    near = tmp_path / "near"
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        for step in (1, 2, 9):
            await ckpt.save(state_of(step), step).durable
    async with Checkpointer(near, then=far, keep_local=1, config=SMALL) as ckpt:
        await ckpt.save(state_of(3), 3).durable
    assert await steps_in(near) == (3, 9)


class _Vanishing(PosixFiles):
    """A step goes from the first tier when its data has been opened a few times."""

    def __init__(self, num_opened: int) -> None:
        self.left = num_opened

    def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
        directory, _, name = path.rpartition("/")
        if "/near/" in path and name.startswith("data-"):
            if self.left == 0:
                shutil.rmtree(directory)
            self.left -= 1
        return super().open(path, direct=direct, writable=writable)


@pytest.mark.parametrize("step", [1, None])
@pytest.mark.parametrize("num_opened", range(3))
async def test_a_step_that_goes_from_the_first_tier_is_read_from_the_second(
    tmp_path: Path, num_opened: int, step: int | None
) -> None:
    """Its removal may have begun just before the load did, wherever that is by then."""
    near, far, files, log = tmp_path / "near", tmp_path / "far", _Vanishing(num_opened), EventLog()
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        for saved in (1, 2):
            await ckpt.save(state_of(saved), saved).durable
    async with (
        engines(files=files, log=log) as (engine,),
        checkpointer_on(engine, near, then=far) as ckpt,
    ):
        assert_same(await ckpt.load(step=step), state_of(step or 2))
    assert files.left < 0
    assert [event.to for event in log.of(TierPassedOver)] == [f"{far}/{step_name(step or 2)}"]


async def test_a_step_stays_that_the_second_tier_has_not(tmp_path: Path, far: str) -> None:
    """Of the same name is not the same: a step that was saved again, without a second tier."""
    near = tmp_path / "near"
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        await ckpt.save(state_of(1), 1).durable
    async with Checkpointer(near, config=SMALL) as ckpt:
        await ckpt.save(state_of(11), 1, overwrite=True)
    async with Checkpointer(near, then=far, keep_local=1, config=SMALL) as ckpt:
        for step in (2, 3):
            await ckpt.save(state_of(step), step).durable
        assert_same(await ckpt.load(step=1), state_of(11))
    assert await steps_in(near) == (1, 3)


async def test_a_step_stays_whose_copy_has_lost_a_file(tmp_path: Path, far: str) -> None:
    """What cannot be loaded is no reason to let go of what can."""
    near = tmp_path / "near"
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        await ckpt.save(state_of(1), 1).durable
    (data, *_) = [name for name in names_in(near / step_name(1)) if name.startswith("data-")]
    url = f"{far}/{step_name(1)}/{data}"
    fsspec.open(url).fs.rm(url.partition("://")[2] or url)
    async with Checkpointer(near, then=far, keep_local=1, config=SMALL) as ckpt:
        for step in (2, 3):
            await ckpt.save(state_of(step), step).durable
        assert_same(await ckpt.load(step=1), state_of(1))
    assert await steps_in(near) == (1, 3)


async def test_what_was_sent_of_an_owed_copy_is_not_swept(tmp_path: Path, far: str) -> None:
    """However long ago: it will be gone on with. What no step on the first tier owes goes."""
    near = tmp_path / "near"
    await owe(near, far, 1)
    (note,) = [name for name in names_in(near / step_name(1)) if name.startswith(NOTE_PREFIX)]
    (near / step_name(1) / note).write_bytes(b"{}")  # so that nobody goes on with it just now
    (data, *_) = [name for name in names_in(near / step_name(1)) if name.startswith("data-")]
    content = (near / step_name(1) / data).read_bytes()
    fs = fsspec.open(f"{far}/x").fs
    for step in (1, 2):
        path = f"{far}/{step_name(step)}/{data}".partition("://")[2] or (
            f"{far}/{step_name(step)}/{data}"
        )
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(path, content)
        age(fs, path)
    async with Checkpointer(near, then=far, sweep_after_s=1.0, config=SMALL) as ckpt:
        await ckpt.save(state_of(3), 3).durable
    left = [f"{far}/{step_name(step)}/{data}" for step in (1, 2)]
    assert [fs.exists(url.partition("://")[2] or url) for url in left] == [True, False]


def age(fs: Any, path: str) -> None:
    """Let a file be of yesterday, and what it lies in."""
    if isinstance(fs, MemoryFileSystem):
        file = fs.store[fs._strip_protocol(path)]
        file.created = file.modified = file.modified - dt.timedelta(days=1)
        return
    for name in (path, path.rpartition("/")[0]):
        os.utime(name, (0, 0))


async def test_leaving_waits_for_copies_and_raises_what_nobody_saw(tmp_path: Path) -> None:
    """On an engine of its own, and on one that stays open."""
    near, far = tmp_path / "near", tmp_path / "far"
    async with Engine(SMALL) as engine:
        async with Checkpointer(near, then=far, engine=engine) as ckpt:
            handle = ckpt.save(state_of(1), 1)
        assert handle.durable.done()
        (far / step_name(2)).write_text("in the way")
        with pytest.raises(StorageError):
            async with Checkpointer(near, then=far, engine=engine) as ckpt:
                await ckpt.save(state_of(2), 2)
    assert await steps_in(near) == (1, 2)


async def test_leaving_by_an_error_leaves_the_copy_to_the_next_run(
    tmp_path: Path, far: str
) -> None:
    """The step is committed, and copied later."""

    class LeavingError(Exception):
        pass

    near, log = tmp_path / "near", EventLog()

    async def leave() -> None:
        async with Checkpointer(near, then=far, config=SMALL) as ckpt:
            await ckpt.save(state_of(1), 1)
            raise LeavingError

    with pytest.raises(LeavingError):
        await leave()
    async with Checkpointer(near, then=far, config=SMALL, observer=log):
        pass
    assert await steps_in(near) == await steps_in(far) == (1,)
    assert all(event.is_resumed for event in log.of(CopyStarted))
    assert_tidy(near / step_name(1))


def test_the_blocking_twin_has_a_second_tier(tmp_path: Path, far: str) -> None:
    """The same options; leaving waits for the copies."""
    near = tmp_path / "near"
    with sync.Checkpointer(near, then=far, keep_local=1, config=SMALL) as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
    with sync.Checkpointer(near, then=far, config=SMALL) as ckpt:
        assert ckpt.steps() == (1, 2)
        assert_same(ckpt.load(step=1), state_of(1))
    with sync.Checkpointer(near, config=SMALL) as ckpt:
        assert ckpt.steps() == (2,)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"keep_local": 1}, "no effect without then="),
        ({"then": "far", "keep_local": 0}, "at least 1"),
        ({"then": "far", "keep_local": True}, "at least 1"),
        ({"then": 3}, "path"),
        ({"then": "far", "keep": KeepLast(2), "keep_local": 3}, r"no effect with keep=KeepLast\(2"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    """When it is made."""
    with pytest.raises(ConfigError, match=problem):
        Checkpointer(tmp_path, **options)


async def test_the_root_is_no_second_tier(tmp_path: Path) -> None:
    """Said on entering, when both are known, whatever it is called."""
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for root, then in [
        (f"{tmp_path}/a", f"{tmp_path}/b/../a"),
        (f"{tmp_path}/a", f"{tmp_path}/link"),
        ("memory://run", "memory:///run/"),
    ]:
        with pytest.raises(ConfigError, match="the root itself"):
            async with Checkpointer(root, then=then, config=SMALL):
                pass


def test_that_the_root_is_the_second_tier_of_one_rank_is_heard_by_all(tmp_path: Path) -> None:
    """As where a link differs on one node: nobody waits for the rank that does not come."""
    (tmp_path / "near").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "near")

    async def scenario() -> None:
        async def body(rank: int, engine: Engine) -> None:
            then = tmp_path / ("link" if rank == 1 else "far")
            with pytest.raises(ConfigError if rank == 1 else RankError, match="the root itself"):
                async with checkpointer_on(engine, tmp_path / "near", then=then):
                    pass

        async with engines(3, seed=1) as group:
            for found in await on_each(group, body):
                assert found is None
        assert asyncio.get_running_loop().time() < 10

    run_virtual(scenario(), seed=1)


def test_steps_are_saved_while_the_second_tier_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount does whose server is gone; and opening waits for it no longer than a moment."""
    monkeypatch.setattr(tiers, "_LOOK_S", 0.05)
    monkeypatch.setattr(local, "_LOOK_S", 0.05)
    near, far = tmp_path / "near", tmp_path / "far"
    mount = Mount(far, monkeypatch)
    with mount.hanging(at_once=False):
        ckpt = sync.Checkpointer(near, then=far, config=SMALL)
        with contextlib.ExitStack() as stack:
            stack.enter_context(ckpt)
            ckpt.save(state_of(0), 0)
            mount.hang()
            for step in range(1, 9):
                ckpt.save(state_of(step), step)
                assert_same(ckpt.load(step=step), state_of(step))
            assert len([what for what in mount.waited if what.startswith("stat ")]) <= 3
            other = sync.Checkpointer(tmp_path / "other", then=far / "other", config=SMALL)
            with other:
                other.save(state_of(1), 1)
                mount.answer()
    assert committed_steps(far) == [*range(9)]


def test_steps_go_from_the_first_tier_while_the_second_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose copies were made; a sweep of the second tier is no reason to keep them."""
    monkeypatch.setattr(tiers, "_LOOK_S", 0.05)
    monkeypatch.setattr(local, "_LOOK_S", 0.05)
    near, far, gone = tmp_path / "near", tmp_path / "far", threading.Event()

    def observe(event: Event) -> None:
        if isinstance(event, CheckpointRemoved) and event.path.startswith(str(near)):
            gone.set()

    mount = Mount(far, monkeypatch)
    options: dict[str, Any] = {"then": far, "keep": KeepLast(1), "config": SMALL}
    with sync.Checkpointer(near, **options) as ckpt:
        ckpt.save(state_of(0), 0)
    with mount.hanging(at_once=False):
        mount.hang()
        with sync.Checkpointer(near, observer=observe, **options) as ckpt:
            ckpt.save(state_of(1), 1)
            assert gone.wait(60)
            assert committed_steps(near) == [1]
            mount.answer()
    assert committed_steps(far) == [1]


def test_few_local_steps_keep_nothing_that_goes_while_the_second_tier_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look whether it has what may go is waited for by nothing else on the first."""
    monkeypatch.setattr(tiers, "_LOOK_S", 0.05)
    monkeypatch.setattr(local, "_LOOK_S", 0.05)
    near, far, gone = tmp_path / "near", tmp_path / "far", threading.Event()

    def observe(event: Event) -> None:
        if isinstance(event, CheckpointRemoved) and event.path == str(near / step_name(0)):
            gone.set()

    mount = Mount(far, monkeypatch)
    options: dict[str, Any] = {"then": far, "keep": KeepLast(2), "config": SMALL}
    options["sweep_after_s"] = None  # so that nobody else lists what is there
    with sync.Checkpointer(near, **options) as ckpt:
        ckpt.save(state_of(0), 0)
    with (
        mount.hanging(),
        sync.Checkpointer(near, keep_local=1, observer=observe, **options) as ckpt,
    ):
        ckpt.save(state_of(1), 1)
        mount.wait_until_hung("scandir", str(far))
        for step in (2, 3, 4):
            ckpt.save(state_of(step), step)
        assert gone.wait(60)
        assert len([what for what in mount.waited if what == f"scandir {far}"]) == 1
        mount.answer()
    assert committed_steps(near) == [4]
    assert committed_steps(far) == [3, 4]


@pytest.mark.parametrize("change", ["discarded", "saved again"])
def test_what_has_changed_while_the_second_tier_was_asked_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A step that is the newest by then, or another one of its name."""
    near, far = tmp_path / "near", tmp_path / "far"
    with sync.Checkpointer(near, then=far, config=SMALL) as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
    mount = Mount(far, monkeypatch)
    with (
        mount.hanging(only=f"{step_name(1)}/data-"),
        sync.Checkpointer(near, then=far, keep_local=1, config=SMALL) as ckpt,
    ):
        ckpt.start_save(state_of(3), 3).durable.wait()
        mount.wait_until_hung(f"{step_name(1)}/data-")
        if change == "discarded":
            assert ckpt.discard_after(1) == (2, 3)
        else:
            sync.save(state_of(11), near / step_name(1), overwrite=True, config=SMALL)
        mount.answer()
    assert committed_steps(near) == ([1] if change == "discarded" else [1, 3])
    is_new = change == "saved again"
    assert_same(sync.load(near / step_name(1), config=SMALL), state_of(11 if is_new else 1))


def test_a_second_tier_that_is_silent_is_waited_for_once() -> None:
    """For a second; and once more when it has answered again, before the commit came."""

    async def scenario() -> list[float]:
        loop, waited = asyncio.get_running_loop(), []
        async with second_tier() as tier:
            for answers in (False, False, True, False):
                looking: Running[bool] = Running()
                if answers:
                    looking.end.set_result(False)
                began_s = loop.time()
                await tier.require_free(1, looking)
                waited.append(loop.time() - began_s)
        return waited

    assert run_virtual(scenario(), seed=0) == [1.0, 0.0, 0.0, 1.0]


@in_virtual_time
async def test_a_look_that_nobody_waits_for_any_more_is_stopped_and_forgotten() -> None:
    """Of a save that was aborted: how it ends then, by an error too, is told to nobody."""
    looking: Running[bool] = Running()
    async with second_tier() as tier:
        save = asyncio.create_task(tier.require_free(1, looking))
        await asyncio.sleep(0.5)
        save.cancel()
        await asyncio.wait((save,))
    assert save.cancelled()
    assert looking.is_aborted
    looking.end.set_exception(StorageError("the engine was left", path="/far"))
    await asyncio.sleep(0.1)  # the loop would complain of an error that nobody saw


@in_virtual_time
async def test_a_second_tier_that_was_silent_is_looked_at_again_once_it_has_answered(
    tmp_path: Path,
) -> None:
    """One look that hangs is enough, as each takes a thread; what came of it ends that."""
    async with (
        engines() as (engine,),
        checkpointer_on(engine, tmp_path / "near", then=tmp_path / "far") as ckpt,
    ):
        tier = ckpt._core._second
        assert tier is not None
        hangs: Running[bool] = Running()
        await tier.require_free(1, hangs)
        assert tier.look_for(2) is None
        hangs.end.set_result(False)
        looking = tier.look_for(3)
        assert looking is not None
        assert not await looking.end.wrapped()
        await tier.require_free(3, looking)
        assert tier._silent is None


async def test_a_second_tier_that_hangs_holds_threads_of_its_own(tmp_path: Path) -> None:
    """Its steps are listed and removed on others than those of the first tier, and of saves."""
    near, far = tmp_path / "near", tmp_path / "far"
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        core = ckpt._core
        assert core._second is not None
        root, first = core._second.keeper.root, core.keeper.root
        assert isinstance(root, LocalRoot)
        assert isinstance(first, LocalRoot)
        assert root._executor is core.engine.context.far
        assert first._executor is core.engine.context.executor
        assert root._executor is not first._executor


@in_virtual_time
async def test_a_look_at_the_second_tier_that_fails_is_none() -> None:
    """Whoever copies the step will see."""
    async with second_tier() as tier:
        for error in (asyncio.CancelledError(), RuntimeError("odd")):
            looking: Running[bool] = Running()
            looking.end.set_exception(error)
            await tier.require_free(1, looking)


def test_a_local_step_that_is_saved_over_as_it_goes_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second tier has its older self alone: of what another process saved there is no copy."""
    near, far = tmp_path / "near", tmp_path / "far"
    newest = Keeper.newest
    saved: list[None] = []

    async def scenario() -> None:
        async with engines() as (engine,), engines() as (other_engine,):

            async def save_over(keeper: Keeper, num: int, *, above: int = -1, **more: Any) -> Any:
                found = await newest(keeper, num, above=above, **more)
                if above == 1 and found and not saved:
                    saved.append(None)
                    async with checkpointer_on(other_engine, near) as other:
                        await other.save(filled_state(SIZES, 9), 1, overwrite=True)
                return found

            monkeypatch.setattr(Keeper, "newest", save_over)
            async with checkpointer_on(engine, near, then=far, keep_local=1) as ckpt:
                for step in (1, 2):
                    await ckpt.save(filled_state(SIZES, step), step).durable
            assert saved
            assert committed_steps(near) == [1, 2]
            async with checkpointer_on(engine, near) as ckpt:
                assert values_in(await ckpt.load(step=1)) == {9}

    run_virtual(scenario(), seed=0)
