"""Runs that go back to an earlier step, and clocks that do."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import shutil
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from ckptio import (
    Checkpointer,
    ConfigError,
    Engine,
    FormatError,
    KeepLast,
    SaveEvery,
    StorageError,
    sync,
)
from ckptio.checkpointer.steps import step_name
from ckptio.events import CheckpointRemoved, CleanupFailed, CopyFailed, CopyQueued, HigherStepFound
from ckptio.format.compose import encode_again
from ckptio.format.manifest import decode_manifest
from ckptio.storage.files import PosixFiles
from ckptio.storage.root import LocalRoot
from ckptio.testing import EventLog
from tests.checkpointer.rig import checkpointer_on, engines
from tests.rig import SMALL, assert_same, config_with, filled_state, names_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    import torch

    from ckptio.events import Event
    from ckptio.storage.root_interface import Found

pytestmark = pytest.mark.usefixtures("no_leaks")


def state_of(step: int) -> dict[str, torch.Tensor]:
    return filled_state([5000, 70_000], step % 251)


async def save_steps(root: Path, *steps: int) -> None:
    async with Checkpointer(root, config=SMALL) as ckpt:
        for step in steps:
            await ckpt.save(state_of(step), step)


def redate(root: Path, step: int, when: Callable[[str], str]) -> None:
    """Let a manifest say that it was committed at another time."""
    path = root / step_name(step) / "manifest.json"
    manifest = decode_manifest(path.read_bytes())
    later = msgspec.structs.replace(manifest, created=when(manifest.created))
    path.write_bytes(encode_again(later))


def date_ahead(root: Path, step: int) -> None:
    """Let a manifest say that it was committed in a thousand years."""
    redate(root, step, lambda created: "3" + created[1:])


async def test_what_was_committed_here_last_stays_whatever_the_clocks_say(tmp_path: Path) -> None:
    """A run that went back saves lower numbers, and its machine's clock may be behind."""
    await save_steps(tmp_path, 90, 100)
    for step in (90, 100):
        date_ahead(tmp_path, step)
    log = EventLog()
    async with Checkpointer(tmp_path, keep=KeepLast(2), config=SMALL, observer=log) as ckpt:
        for step in (81, 82):
            await ckpt.save(state_of(step), step)
    assert names_in(tmp_path) == [step_name(82), step_name(90), step_name(100)]
    assert [event.step for event in log.of(CheckpointRemoved)] == [81]
    (event,) = log.of(HigherStepFound)
    assert (event.step, event.highest) == (81, 100)


async def test_a_higher_step_that_a_run_saved_itself_is_no_news(tmp_path: Path) -> None:
    """It is told of what it found there, as that may be loaded instead; not of its own steps."""
    log = EventLog()
    async with Checkpointer(tmp_path, keep=KeepLast(3), config=SMALL, observer=log) as ckpt:
        for step in (5, 3, 4):
            await ckpt.save(state_of(step), step)
    assert names_in(tmp_path) == [step_name(3), step_name(4), step_name(5)]
    assert log.of(HigherStepFound) == []


async def test_a_time_without_a_zone_is_utc_and_what_is_no_time_does_not_count(
    tmp_path: Path,
) -> None:
    """As in manifests that others wrote: the one goes when it is due, and the other stays."""
    await save_steps(tmp_path, 1, 2, 3)
    redate(tmp_path, 1, lambda created: created[:19])
    redate(tmp_path, 2, lambda _: "yesterday")
    async with Checkpointer(tmp_path, keep=KeepLast(1), config=SMALL) as ckpt:
        found = await ckpt.records()
        assert [record.step for record in found] == [1, 3]
        assert dt.timedelta(0) <= found[1].created - found[0].created < dt.timedelta(hours=1)
        await ckpt.save(state_of(4), 4)
    assert names_in(tmp_path) == [step_name(2), step_name(4)]


async def test_steps_that_a_run_went_back_from_are_discarded(tmp_path: Path) -> None:
    """From both tiers; then the newest is the run's own, and numbers can be saved again."""
    near, far = tmp_path / "near", tmp_path / "far"
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        for step in (0, 1, 2, 3, 8):
            await ckpt.save(state_of(step), step).durable
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        assert_same(await ckpt.load(step=2), state_of(2))
        assert await ckpt.discard_after(2) == (3, 8)
        assert await ckpt.discard_after(2) == ()
        assert await ckpt.latest() == 2
        await ckpt.save(state_of(30), 3).durable
        assert await ckpt.discard_after(2) == (3,)  # what was committed here last, too
    assert names_in(near) == names_in(far) == [step_name(step) for step in (0, 1, 2)]
    with sync.Checkpointer(near, config=SMALL) as blocking:
        assert blocking.discard_after(1) == (2,)
        assert blocking.discard_after(0) == (1,)
        with pytest.raises(ConfigError, match="step= is an int"):
            blocking.discard_after(-1)
    assert names_in(near) == [step_name(0)]


async def test_what_is_being_written_or_is_damaged_is_not_discarded(tmp_path: Path) -> None:
    """It is said, and what can go next time is still there to be counted."""
    log = EventLog()
    await save_steps(tmp_path, 1, 2)
    async with Engine(SMALL, observer=log) as engine, Checkpointer(tmp_path, engine=engine) as ckpt:
        handle = ckpt.save(filled_state([4 << 20], 1), 3)
        with pytest.raises(ConfigError, match="step 3 is being saved"):
            await ckpt.discard_after(1)
        assert await ckpt.discard_after(3) == ()  # which stays
        await handle
        (tmp_path / step_name(2) / "manifest.json").write_text("{}")
        with pytest.raises(FormatError, match=ckpt.path(2)) as caught:
            await ckpt.discard_after(1)
        assert "overwrite=True" in caught.value.__notes__[0]
        assert [type(event.error) for event in log.of(CleanupFailed)] == [OSError]
        assert await ckpt.steps() == (1, 2)
        with pytest.raises(ConfigError, match="step= is an int"):
            await ckpt.discard_after(-1)


async def test_a_load_in_the_middle_of_a_run_moves_no_schedule(tmp_path: Path) -> None:
    """The best step is looked at; the first load of a run is where it goes on from."""
    await save_steps(tmp_path, 10, 20, 30)
    async with Checkpointer(tmp_path, every=SaveEvery(steps=10), config=SMALL) as ckpt:
        await ckpt.load(step=20)
        assert [s for s in range(21, 33) if await ckpt.should_save(s)] == [30, 31, 32]
        await ckpt.save(state_of(32), 32)
        await ckpt.load(step=10)
        assert [s for s in range(33, 42) if await ckpt.should_save(s)] == [40, 41]


async def test_without_an_observer_the_log_has_what_somebody_must_hear(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one, it is the observer's."""
    await save_steps(tmp_path, 2)
    with caplog.at_level(logging.WARNING, "ckptio"):
        async with Checkpointer(tmp_path, config=SMALL, observer=EventLog()) as ckpt:
            await ckpt.save(state_of(1), 1)
        assert not caplog.records
        async with Checkpointer(tmp_path, config=SMALL) as ckpt:
            await ckpt.save(state_of(1), 1, overwrite=True)
    assert "HigherStepFound" in caplog.text


async def test_a_run_that_keeps_one_step_has_one_whenever_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that one goes between the listing and the look at it, as there is another."""
    run, later = tmp_path / "run", tmp_path / "later"
    await save_steps(run, 1)
    await save_steps(later, 2)
    look = LocalRoot.look

    async def look_late(
        root: LocalRoot, names: Sequence[str], accepts: Callable[[str], bool] | None = None
    ) -> list[Found]:
        if later.exists():
            (later / step_name(2)).rename(run / step_name(2))
            shutil.rmtree(run / step_name(1))
            later.rmdir()
        return await look(root, names, accepts)

    monkeypatch.setattr(LocalRoot, "look", look_late)
    async with Checkpointer(run, sweep_after_s=None, config=SMALL) as ckpt:
        assert await ckpt.latest() == 2


class _HeldCommits(PosixFiles):
    """Commits to the second tier begin, and end when they are let."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def publish(self, source: str, target: str) -> None:
        if "/far/" in target:
            self.has_begun.set()
            assert self.may_end.wait(60)
        super().publish(source, target)


async def owe(near: Path, far: Path) -> None:
    """Save step 1 to both tiers, and step 2 to the first alone, since the second is away."""
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        await ckpt.save(state_of(1), 1).durable
    away = far.rename(far.with_name("away"))
    far.write_text("not mounted")
    async with Checkpointer(near, then=far, config=SMALL) as ckpt:
        with pytest.raises(StorageError):
            await ckpt.save(state_of(2), 2).durable
    far.unlink()
    away.rename(far)


class _Queue(EventLog):
    """Tells when a copy waits for its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.has_one = threading.Event()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, CopyQueued):
            self.has_one.set()


async def test_no_copy_that_was_owed_brings_back_what_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is being committed is waited for, and removed."""
    near, far, files = tmp_path / "near", tmp_path / "far", _HeldCommits()
    await owe(near, far)
    async with engines(files=files) as (engine,), checkpointer_on(engine, near, then=far) as ckpt:
        assert await asyncio.to_thread(files.has_begun.wait, 60)
        copies = engine._core.context.copies
        parted = copies.parted

        async def parting(places: Collection[str]) -> None:
            waiting = asyncio.ensure_future(parted(places))
            await asyncio.sleep(0)
            is_waiting = not waiting.done()
            files.may_end.set()
            assert is_waiting
            await waiting

        monkeypatch.setattr(copies, "parted", parting)
        assert await ckpt.discard_after(1) == (2,)
        assert await ckpt.steps() == (1,)
    assert names_in(near) == names_in(far) == [step_name(1)]


@pytest.mark.parametrize("after", [1, 2])
async def test_a_copy_that_was_owed_is_stopped_if_its_step_is_discarded(
    after: int, tmp_path: Path
) -> None:
    """Nobody waits for bytes that nobody will have; here it does not even come to its turn."""
    near, far, log = tmp_path / "near", tmp_path / "far", _Queue()
    await owe(near, far)
    async with engines(config=config_with(max_tier_copies=1), log=log) as (engine,):
        async with (
            contextlib.AsyncExitStack() as block,
            engine._core.context.copy_line.place(None, "taken", lambda: None),
        ):
            ckpt = await block.enter_async_context(checkpointer_on(engine, near, then=far))
            assert await asyncio.to_thread(log.has_one.wait, 60)
            assert await ckpt.discard_after(after) == ((2,) if after == 1 else ())
        failed = [type(event.error) for event in log.of(CopyFailed)]
        assert failed == ([asyncio.CancelledError] if after == 1 else [])
    assert names_in(near) == names_in(far) == [step_name(1), step_name(2)][:after]
