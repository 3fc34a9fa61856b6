from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import errno
import fractions
import math
import os
import shutil
import signal
import threading
import time
import types
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ckptio
from ckptio import (
    Checkpointer,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    Engine,
    KeepBest,
    KeepEvery,
    KeepIf,
    KeepLast,
    SaveAbortedError,
    SaveEvery,
    UnsupportedLeafError,
    sync,
)
from ckptio.checkpointer.steps import MAX_STEP, parse_name, step_meant, step_name
from ckptio.engine import group
from ckptio.errors import CheckpointChangedError, EngineClosedError, StorageError
from ckptio.events import CheckpointRemoved, CleanupFailed, Preempted, RetentionFailed
from ckptio.runtime import loading
from ckptio.testing import EventLog
from tests.checkpointer.rig import files_in, steps_at
from tests.rig import SMALL, assert_same, filled_state, names_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_leaks")
SIZES = [5000, 100]
#: numpy's type of text of any length, where it has one.
TEXTS = [np.dtypes.StringDType] if hasattr(np.dtypes, "StringDType") else []


@pytest.fixture(params=["directory", "objects"])
def root(request: pytest.FixtureRequest, tmp_path: Path, url: str) -> str:
    """Where a run will be: a directory in one that is not there yet, or a URL."""
    return str(tmp_path / "deep" / "run") if request.param == "directory" else url


class Short:
    """A number of ml_dtypes, as JAX has them: numpy says that it is of bytes."""

    dtype = types.SimpleNamespace(kind="V")

    def __float__(self) -> float:
        return 1.5

    def item(self) -> float:
        return 1.5


def state_of(step: int) -> dict[str, torch.Tensor]:
    return filled_state(SIZES, step % 251)


async def save_steps(root: Path | str, *steps: int, **options: Any) -> None:
    async with Checkpointer(root, **{"config": SMALL, **options}) as ckpt:
        for step in steps:
            await ckpt.save(state_of(step), step)


def steps_in(root: Path) -> list[int | None]:
    return [parse_name(name) for name in names_in(root)]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((), "the run has no committed step"),
        ((1,), "the run has step 1"),
        ((1, 20), "the run has steps 1, 20"),
        (tuple(range(1, 11)), "the run has steps 3, 4, 5, 6, 7, 8, 9, 10, and 2 below them"),
    ],
)
async def test_a_step_that_is_not_there_names_those_that_are(
    tmp_path: Path, steps: tuple[int, ...], said: str
) -> None:
    """The newest of them, and how many more there are."""
    await save_steps(tmp_path / "run", *steps)
    async with Checkpointer(tmp_path / "run", config=SMALL) as ckpt:
        with pytest.raises(CheckpointNotFoundError) as caught:
            await ckpt.load(step=77)
    assert caught.value.message == f"there is nothing here; {said}"
    assert caught.value.filename == str(tmp_path / "run" / step_name(77))


async def test_a_step_is_not_there_though_nobody_can_list_those_that_are(tmp_path: Path) -> None:
    """Whoever begins anew without it is not told of the list instead."""
    await save_steps(tmp_path / "run", 1)
    async with Checkpointer(tmp_path / "run", config=SMALL) as ckpt:
        step = ckpt.path(2)
        os.rename(tmp_path / "run", tmp_path / "moved")
        (tmp_path / "run").write_text("in the way")
        with pytest.raises(StorageError, match="list"):
            await ckpt.steps()
        with pytest.raises(CheckpointNotFoundError) as caught:
            await ckpt.load(step=2)
    assert (caught.value.message, caught.value.filename) == ("there is nothing here", step)


@pytest.mark.parametrize("ask", ["latest", "steps", "load"])
async def test_checkpoints_with_other_names_than_steps_have_are_told_of(
    root: str, caplog: pytest.LogCaptureFixture, ask: str
) -> None:
    """Once: a run that has saved them otherwise would begin anew without a word."""
    async with Engine(config=SMALL) as engine:
        for name in ("step-4", "iter_0000030", "best"):
            await engine.save(state_of(1), f"{root}/{name}")
    async with Checkpointer(root, config=SMALL) as ckpt:
        for _ in range(2):
            with contextlib.suppress(CheckpointNotFoundError):
                assert not await getattr(ckpt, ask)()
        (line,) = caplog.messages
        assert line == (
            f"{root!r}: there are no steps here, but 'step-4', 'iter_0000030', which a Checkpointer"
            " passes over; to go on from 'iter_0000030', rename it 'step-00000030'"
        )


async def test_of_many_other_names_the_highest_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside files that others number."""
    async with Engine(config=SMALL) as engine:
        for step in range(10):
            await engine.save(state_of(1), tmp_path / f"e{step}")
    for number in range(20):
        (tmp_path / f"events.{1700000000 + number}").touch()
    async with Checkpointer(tmp_path, config=SMALL) as ckpt:
        assert await ckpt.latest() is None
    (line,) = caplog.messages
    assert "but 'e2', 'e3', 'e4', 'e5', 'e6', 'e7', 'e8', 'e9', and 2 below them, which" in line
    assert line.endswith("to go on from 'e9', rename it 'step-00000009'")


async def test_where_there_are_steps_or_no_checkpoints_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers at the end of names are everywhere."""
    await save_steps(tmp_path / "some", 1)
    async with Engine(config=SMALL) as engine:
        await engine.save(state_of(4), tmp_path / "some" / "step-4")
    (tmp_path / "none" / "epoch7").mkdir(parents=True)
    for name, latest in (("some", 1), ("none", None)):
        async with Checkpointer(tmp_path / name, config=SMALL) as ckpt:
            assert await ckpt.latest() == latest
    assert not caplog.records


def flip_data(root: Path, step: int) -> None:
    (file, *_) = (root / step_name(step)).glob("data-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


# names


def test_a_step_has_one_name_and_a_name_one_step() -> None:
    """Names sort as numbers do; what is written otherwise is no step."""
    steps = [0, 1, 9, 10, 99_999_999, 100_000_000, MAX_STEP]
    assert [parse_name(step_name(step)) for step in steps] == steps
    names = [step_name(step) for step in steps[:5]]
    assert names == sorted(names)
    for name in ("step-9", "step-000000009", "step-0000000a", "step-00000009\n", "latest"):
        assert parse_name(name) is None
    assert parse_name("step-٠٠٠٠٠٠٠٩") is None
    assert parse_name(f"step-{MAX_STEP + 1}") is None
    meant = {"step-9": 9, "step-000000009": 9, "epoch3_100": 100, "7": 7, "x-0": 0}
    assert {name: step_meant(name) for name in meant} == meant
    for name in (step_name(9), "step-9.bak", f"step-{10 * MAX_STEP}", "step-٩", "step-9\n"):
        assert step_meant(name) is None
    for step in (-1, True, 1.0, MAX_STEP + 1, "3"):
        with pytest.raises(ConfigError, match="step= is an int"):
            step_name(step)  # type: ignore[arg-type]  # refused


# saving and loading


async def test_the_newest_committed_step_is_loaded(root: str) -> None:
    """Across restarts, from what is there; a step asked for is another."""
    async with Checkpointer(f"{root}/", config=SMALL) as ckpt:
        assert await ckpt.steps() == ()
        assert await ckpt.latest() is None
        with pytest.raises(CheckpointNotFoundError, match="no committed step"):
            await ckpt.load()
        for step in (9, 10, 100):
            info = await ckpt.save(state_of(step), step, metrics={"loss": 1 / step})
            assert info.path == ckpt.path(step) == f"{root}/{step_name(step)}"
    async with Checkpointer(root, config=SMALL) as ckpt:
        assert await ckpt.steps() == (9, 10, 100)
        assert await ckpt.latest() == 100
        assert [record.metrics["loss"] for record in await ckpt.records()] == [1 / 9, 0.1, 0.01]
        assert_same(await ckpt.load(), state_of(100))
        target = state_of(0)
        assert await ckpt.load(into=target, step=9) is target
        assert_same(target, state_of(9))
        result = await ckpt.load_with_report(select="tensor1")
        assert result.report.path == ckpt.path(100)
        assert list(result.state) == ["tensor1"]
        with pytest.raises(CheckpointNotFoundError):
            await ckpt.load(step=11)
    assert steps_at(root) == [9, 10, 100]


async def test_a_step_that_was_not_committed_is_none(tmp_path: Path) -> None:
    """A dead save's directory, a removed one's, other programs' files: never the latest."""
    await save_steps(tmp_path, 3)
    (tmp_path / step_name(7)).mkdir()
    (tmp_path / step_name(7) / f"data-{'a' * 32}-00000-00000.safetensors").write_bytes(b"x")
    (tmp_path / step_name(8)).write_bytes(b"a file")
    await asyncio.to_thread(sync.save, state_of(1), tmp_path / "step-9", config=SMALL)
    async with Checkpointer(tmp_path, config=SMALL) as ckpt:
        assert await ckpt.steps() == (3,)
        assert_same(await ckpt.load(), state_of(3))


async def test_what_an_engine_saved_is_a_step_once_it_is_called_so(tmp_path: Path) -> None:
    """Before that, a run would start from scratch; afterwards, it goes on from there."""
    await asyncio.to_thread(sync.save, state_of(4), tmp_path / "step-4", config=SMALL)
    async with Checkpointer(tmp_path, config=SMALL) as ckpt:
        assert await ckpt.latest() is None
        (tmp_path / "step-4").rename(tmp_path / step_name(4))
        assert await ckpt.latest() == 4
        assert_same(await ckpt.load(), state_of(4))


async def test_a_damaged_step_raises_and_says_what_to_load(tmp_path: Path) -> None:
    """Which work to give up is the user's to decide."""
    await save_steps(tmp_path, 1, 2)
    flip_data(tmp_path, 2)
    async with Checkpointer(tmp_path, config=SMALL) as ckpt:
        with pytest.raises(CorruptionError) as caught:
            await ckpt.load()
        assert "load(step=1)" in caught.value.__notes__[-1]
        assert_same(await ckpt.load(step=1), state_of(1))
        with pytest.raises(CorruptionError) as caught:
            await ckpt.load(step=2)
        assert "ckptio verify" in caught.value.__notes__[-1]


async def test_metrics_are_kept_with_the_checkpoint(tmp_path: Path) -> None:
    """In its manifest, so that one commit covers both; the state knows nothing of them."""
    metrics: dict[str, Any] = {
        "loss": torch.tensor(0.5),
        "bad": math.nan,
        "worse": -math.inf,
        "n": 3,
        "mean": np.float32(2),
        "part": fractions.Fraction(1, 4),
        "short": Short(),
        "huge": 10**400,
    }
    async with Checkpointer(tmp_path, config=SMALL) as ckpt:
        await ckpt.save(state_of(1), 1, metrics=metrics)
        await ckpt.save(state_of(2), 2)
        first, second = await ckpt.records()
        assert_same(await ckpt.load(step=1), state_of(1))
        manifest = await ckpt.engine.inspect(ckpt.path(1))
    assert manifest.metadata["step"] == 1
    assert first.step == 1
    assert first.metrics["loss"] == 0.5
    assert first.metrics["n"] == 3
    assert (first.metrics["mean"], first.metrics["part"]) == (2, 0.25)
    assert first.metrics["short"] == 1.5
    assert first.metrics["huge"] == math.inf
    assert math.isnan(first.metrics["bad"])
    assert first.metrics["worse"] == -math.inf
    assert second.metrics == {}
    assert abs(second.created - dt.datetime.now(dt.UTC)) < dt.timedelta(minutes=5)


async def test_metrics_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """Before anything is written."""
    async with Checkpointer(tmp_path / "run", config=SMALL) as ckpt:
        wrong: list[Any] = [
            {"a": "low"},
            {"a": "1"},
            *({"a": kind(b"1.5")} for kind in (bytes, bytearray, memoryview, np.bytes_)),
            {"a": np.array("1.5")},
            {"a": np.array("1.5", object)},
            *({"a": np.array("1.5", kind())} for kind in TEXTS),
            {3: 1.0},
            {"loss\udfff": 1.0},
            [1.0],
            {"a": torch.ones(2)},
        ]
        for metrics in wrong:
            with pytest.raises(ConfigError, match="metrics="):
                ckpt.save(state_of(1), 1, metrics=metrics)
        with pytest.raises(UnsupportedLeafError):
            ckpt.save({"x": object()}, 1)
    assert not (tmp_path / "run").exists()


async def test_a_step_is_saved_once_unless_asked_otherwise(root: str) -> None:
    """After going back to an earlier step, the same numbers come again; what they replace goes."""
    async with Checkpointer(root, config=SMALL) as ckpt:
        await ckpt.save(state_of(1), 1)
        with pytest.raises(CheckpointExistsError):
            await ckpt.save(state_of(2), 1)
        await ckpt.save(state_of(3), 1, overwrite=True)
        assert_same(await ckpt.load(), state_of(3))
    with sync.Checkpointer(root, config=SMALL) as blocking:
        blocking.save(state_of(4), 1, overwrite=True)
        assert_same(blocking.load(), state_of(4))
    assert steps_at(root) == [1]


async def test_an_engine_can_be_shared(tmp_path: Path) -> None:
    """It stays open, and its options are its own."""
    async with Engine(SMALL) as engine:
        async with Checkpointer(tmp_path / "a", engine=engine) as one:
            async with Checkpointer(tmp_path / "b", engine=engine, keep=KeepLast(1)) as other:
                one.save(state_of(1), 1)
                other.save(state_of(2), 1)
                await other.save(state_of(2), 2)
            assert steps_in(tmp_path / "b") == [2]
        assert steps_in(tmp_path / "a") == [1]
        assert_same(await engine.load(tmp_path / "a" / step_name(1)), state_of(1))
        with pytest.raises(EngineClosedError, match="checkpointer is closed: it is used inside"):
            one.save(state_of(1), 2)
        assert one.path(1) == str(tmp_path / "a" / step_name(1))  # where the run left its result
        never = Checkpointer(tmp_path / "c", engine=engine)
        for call in (lambda: never.save(state_of(1), 2), lambda: never.path(2)):
            with pytest.raises(EngineClosedError, match="checkpointer is not open: open it with"):
                call()
        with pytest.raises(ConfigError, match="no effect with engine="):
            Checkpointer(tmp_path, engine=engine, config=SMALL)


# leaving


async def test_leaving_waits_and_raises_what_nobody_has_seen(tmp_path: Path) -> None:
    """Commits and removals are done when the block is left."""
    async with Checkpointer(tmp_path, keep=KeepLast(1), config=SMALL) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_of(step), step)
    assert steps_in(tmp_path) == [3]
    with pytest.raises(CheckpointExistsError):
        async with Checkpointer(tmp_path, config=SMALL) as ckpt:
            ckpt.save(state_of(3), 3)
    async with Engine(SMALL) as engine:
        with pytest.raises(CheckpointExistsError):
            async with Checkpointer(tmp_path, engine=engine) as ckpt:
                ckpt.save(state_of(3), 3)


@pytest.mark.parametrize("shared", [False, True])
async def test_leaving_by_an_error_aborts(root: str, *, shared: bool) -> None:
    """Nothing of what was in flight is left; the error is the caller's own."""
    big = filled_state([4 << 20], 1)
    async with Engine(SMALL) as engine:
        options: dict[str, Any] = {"engine": engine} if shared else {"config": SMALL}
        with pytest.raises(ZeroDivisionError):
            async with Checkpointer(root, keep=KeepLast(1), **options) as ckpt:
                handle = ckpt.save(big, 1)
                raise ZeroDivisionError
        with pytest.raises(SaveAbortedError):
            await handle
    assert files_in(root) == {}
    assert not os.path.exists(root)


@pytest.mark.parametrize("step", [None, 7])
def test_a_load_goes_on_while_the_block_is_left(
    tmp_path: Path, step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its steps it is at; and it says what is wrong, if something is."""
    with sync.Engine(SMALL) as engine:
        ckpt = sync.Checkpointer(tmp_path, engine=engine)
        ckpt.__enter__()
        ckpt.save(state_of(1), 1)
        core = ckpt._core
        place, name = (core.questions, "newest") if step is None else (loading, "fetch_manifest")
        method = getattr(place, name)

        async def leave(*args: Any, **options: Any) -> Any:
            await asyncio.to_thread(ckpt.__exit__, None, None, None)
            return await method(*args, **options)

        monkeypatch.setattr(place, name, leave)
        if step is None:
            assert_same(ckpt.load(), state_of(1))
        else:
            with pytest.raises(CheckpointNotFoundError, match="the run has step 1"):
                ckpt.load(step=step)
        with pytest.raises(EngineClosedError, match="is closed"):
            ckpt.load()


# keeping


async def test_what_is_not_kept_is_removed_after_the_commit(root: str) -> None:
    """The last ones, one in a while and the best; the observer is told of the rest."""
    log = EventLog()
    keep = KeepLast(2) | KeepEvery(steps=4) | KeepBest(1, "loss", "min")
    losses = [5.0, 1.0, 4.0, 3.0, 6.0, 7.0, 8.0]
    async with Checkpointer(root, keep=keep, config=SMALL, observer=log) as ckpt:
        for step, loss in enumerate(losses, 1):
            await ckpt.save(state_of(step), step, metrics={"loss": loss})
    assert steps_at(root) == [2, 4, 6, 7]
    assert [event.step for event in log.of(CheckpointRemoved)] == [1, 3, 5]
    assert all(event.nbytes > 0 for event in log.of(CheckpointRemoved))


async def test_a_metric_that_no_step_has_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything is kept because of it; a step without any metrics may just be unmeasured."""
    keep = KeepLast(1) | KeepBest(1, "acc", "max")
    async with Checkpointer(tmp_path, keep=keep, config=SMALL) as ckpt:
        await ckpt.save(state_of(1), 1)
    assert not caplog.records
    async with Checkpointer(tmp_path, keep=keep, config=SMALL) as ckpt:
        for step in (2, 3, 4):
            await ckpt.save(state_of(step), step, metrics={"accuracy": step})
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    (line,) = caplog.messages
    assert line.endswith(
        "has the metric 'acc' of KeepBest, so that all are kept; they have 'accuracy'"
    )
    async with Checkpointer(tmp_path, keep=keep, config=SMALL) as ckpt:
        await ckpt.save(state_of(5), 5, metrics={"acc": 1, "accuracy": 1})
        await ckpt.save(state_of(6), 6, metrics={"accuracy": 1})
    assert len(caplog.messages) == 1


async def test_a_failed_save_costs_no_older_step(tmp_path: Path) -> None:
    """Only committed steps count, and only a commit lets others go."""
    async with Checkpointer(tmp_path, keep=KeepLast(1), config=SMALL) as ckpt:
        await ckpt.save(state_of(1), 1)
        (tmp_path / step_name(2)).write_bytes(b"in the way")
        with pytest.raises(OSError, match="step-00000002"):
            await ckpt.save(state_of(2), 2)
    assert steps_in(tmp_path) == [1, 2]


async def test_what_cannot_be_read_counts_for_nothing_and_stays(tmp_path: Path) -> None:
    """The last good step is one that can be loaded."""
    await save_steps(tmp_path, 1, 2, 50)
    (tmp_path / step_name(50) / "manifest.json").write_bytes(b"{}")
    await save_steps(tmp_path, 3, keep=KeepLast(2))
    assert steps_in(tmp_path) == [2, 3, 50]


async def test_a_removal_that_fails_is_an_event(tmp_path: Path) -> None:
    """The run goes on, and the next commit tries again."""
    await save_steps(tmp_path, 1)
    (tmp_path / "elsewhere").mkdir()
    os.rename(tmp_path / step_name(1), tmp_path / "elsewhere" / "1")
    (tmp_path / step_name(1)).symlink_to(tmp_path / "elsewhere" / "1")
    log = EventLog()
    await save_steps(tmp_path, 2, 3, keep=KeepLast(1), observer=log)
    assert steps_in(tmp_path) == [None, 1, 3]
    failures = log.of(CleanupFailed)
    assert {event.error.errno for event in failures} == {errno.ELOOP}


async def test_a_broken_policy_removes_nothing(root: str) -> None:
    """Its error is an event; what it says nothing of stays."""
    log = EventLog()
    await save_steps(root, 1, 2, keep=KeepIf(lambda record: record.step / 0 > 1), observer=log)
    assert steps_at(root) == [1, 2]
    assert isinstance(log.of(RetentionFailed)[0].error, ZeroDivisionError)


async def test_dead_saves_are_swept_when_a_run_begins(tmp_path: Path) -> None:
    """After the grace period; what is not ours is not looked at."""
    dead = tmp_path / step_name(5)
    dead.mkdir(parents=True)
    (dead / f"data-{'a' * 32}-00000-00000.safetensors").write_bytes(b"x")
    (tmp_path / "step-5").mkdir()
    await save_steps(tmp_path, sweep_after_s=3600)
    assert dead.exists()
    then = time.time() - 7200
    for path in (dead / names_in(dead)[0], dead, tmp_path / "step-5"):
        os.utime(path, (then, then))
    await save_steps(tmp_path, sweep_after_s=None)
    assert dead.exists()
    await save_steps(tmp_path, sweep_after_s=3600)
    assert names_in(tmp_path) == ["step-5"]


# deciding


async def test_should_save_says_yes_at_multiples(tmp_path: Path) -> None:
    """Counted from what was loaded; a yes that nobody follows is said again."""
    async with Checkpointer(tmp_path, every=SaveEvery(steps=10), config=SMALL) as ckpt:
        assert [s for s in range(10) if await ckpt.should_save(s)] == []
        assert await ckpt.should_save(10)
        assert await ckpt.should_save(11)
        await ckpt.save(state_of(11), 11)
        assert [s for s in range(12, 25) if await ckpt.should_save(s)] == [20, 21, 22, 23, 24]
    async with Checkpointer(tmp_path, every=SaveEvery(steps=10), config=SMALL) as ckpt:
        await ckpt.load()
        assert not await ckpt.should_save(12)
        assert await ckpt.should_save(20)
        with pytest.raises(ConfigError):
            await ckpt.should_save(-1)


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        ({}, True),
        ({"every": SaveEvery(steps=3)}, False),
        ({"every": SaveEvery(seconds=60)}, False),
        ({"preempt_signals": (signal.SIGUSR1,)}, False),
    ],
)
async def test_a_run_that_saves_at_no_step_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], *, is_told: bool
) -> None:
    """It was meant to save; but one that calls `preempt` itself may."""
    async with Checkpointer(tmp_path, config=SMALL, **options) as ckpt:
        assert not caplog.messages
        assert [s for s in (1, 2) if await ckpt.should_save(s)] == []
        assert ["every=" in line for line in caplog.messages] == ([True] if is_told else [])
        ckpt.preempt()
        while not ckpt.preempted:
            await ckpt.should_save(1)


async def test_a_run_that_goes_back_saves_at_multiples_again(tmp_path: Path) -> None:
    """Even where the earlier state was not loaded by the checkpointer."""
    async with Checkpointer(tmp_path, every=SaveEvery(steps=10), config=SMALL) as ckpt:
        await ckpt.save(state_of(200), 200)
        assert [s for s in range(105, 125) if await ckpt.should_save(s)] == [110, 120]
        await ckpt.save(state_of(120), 120)
        assert [s for s in range(121, 135) if await ckpt.should_save(s)] == [
            130,
            131,
            132,
            133,
            134,
        ]


async def test_a_checkpointer_is_entered_once(tmp_path: Path) -> None:
    """A second time is refused, and does not disturb the first."""
    async with Engine(SMALL) as engine:
        ckpt = Checkpointer(tmp_path, engine=engine)
        async with ckpt:
            with pytest.raises(EngineClosedError, match="entered once"):
                await ckpt.__aenter__()
            await ckpt.save(state_of(1), 1)
        with pytest.raises(EngineClosedError, match="entered once"):
            await ckpt.__aenter__()
    with sync.Checkpointer(tmp_path, config=SMALL) as blocking:
        with pytest.raises(EngineClosedError, match="a checkpointer is entered once"):
            blocking.__enter__()
        assert blocking.latest() == 1


def test_leaving_on_another_thread_closes_all_the_same(tmp_path: Path) -> None:
    """Signals cannot be given back there, which is raised; the engine has ended."""
    before = signal.getsignal(signal.SIGUSR1)
    errors = []
    ckpt = sync.Checkpointer(tmp_path, preempt_signals=(signal.SIGUSR1,), config=SMALL)
    ckpt.__enter__()

    def leave() -> None:
        try:
            ckpt.__exit__(None, None, None)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    signal.signal(signal.SIGUSR1, before)
    assert len(errors) == 1
    with pytest.raises(EngineClosedError):
        ckpt.steps()


async def test_a_signal_asks_for_one_last_save(root: str) -> None:
    """At the next step; until then nothing has changed, and afterwards it is as before."""
    before = signal.getsignal(signal.SIGUSR1)
    await save_steps(root, 1, 2)
    log = EventLog()
    async with Checkpointer(
        root,
        keep=KeepLast(1),
        preempt_signals=(signal.SIGUSR1, signal.SIGTERM),
        config=SMALL,
        observer=log,
    ) as ckpt:
        saved = []
        for step in range(3, 10_000):
            if step == 5:
                os.kill(os.getpid(), signal.SIGUSR1)
            if await ckpt.should_save(step):
                saved.append(step)
                ckpt.save(state_of(step), step)
            if ckpt.preempted:
                break
            await asyncio.sleep(0)
    assert signal.getsignal(signal.SIGUSR1) == before
    assert saved == [step]
    assert steps_at(root) == saved
    assert saved[0] >= 5
    assert [event.reason for event in log.of(Preempted)] == ["SIGUSR1"]


def test_signals_need_the_main_thread(tmp_path: Path) -> None:
    """Elsewhere the user's own handler can call preempt()."""
    errors = []

    def enter() -> None:
        for signals in ((signal.SIGUSR1,), ()):
            try:
                with sync.Checkpointer(tmp_path, preempt_signals=signals, config=SMALL):
                    pass
            except ConfigError as error:
                errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert ["main thread" in error for error in errors] == [True]


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 3},
        {"every": 100},
        {"preempt_signals": (signal.SIGKILL,)},
        {"preempt_signals": (signal.SIGURG,)},
        {"preempt_signals": ("SIGTERM",)},
        {"preempt_signals": signal.SIGTERM},
        {"preempt_deadline_s": 0},
        {"sweep_after_s": -1},
        {"root": ""},
        {"config": {"max_saves": 1}},
        {"ranks": None},
    ],
)
@pytest.mark.parametrize("make", [Checkpointer, sync.Checkpointer])
def test_an_option_that_is_wrong_is_refused(
    make: Callable[..., Any], options: dict[str, Any]
) -> None:
    """When it is made."""
    with pytest.raises(ConfigError):
        make(**{"root": "run", **options})


# blocking


def test_the_blocking_twin_does_the_same(root: str) -> None:
    """Save, find, keep, load, stop."""
    log = EventLog()
    with sync.Checkpointer(
        root,
        keep=KeepLast(2),
        every=SaveEvery(steps=2),
        preempt_signals=(signal.SIGUSR1,),
        config=SMALL,
        observer=log,
    ) as ckpt:
        assert ckpt.latest() is None
        for step in range(1, 100_000):
            if step == 9:
                os.kill(os.getpid(), signal.SIGUSR1)
            if ckpt.should_save(step):
                ckpt.save(state_of(step), step, metrics={"loss": 1 / step})
            if ckpt.preempted:
                break
        last = step
    with sync.Engine(SMALL) as engine, sync.Checkpointer(root, engine=engine) as ckpt:
        assert ckpt.engine is engine
        assert ckpt.latest() == last
        assert_same(ckpt.load(), state_of(last))
        assert ckpt.load_with_report().report.path == ckpt.path(last)
        assert ckpt.records()[-1].metrics == {"loss": 1 / last}
        assert ckpt.steps() == tuple(steps_at(root))
    assert len(log.of(Preempted)) == 1
    with pytest.raises(CheckpointExistsError), sync.Checkpointer(root, config=SMALL) as ckpt:
        ckpt.start_save(state_of(last), last)


def test_steps_are_saved_from_many_threads(tmp_path: Path) -> None:
    """Each is waited for where the block is left, and what is kept is decided after the last."""
    with sync.Checkpointer(tmp_path, keep=KeepLast(4), config=SMALL) as ckpt:
        threads = [
            threading.Thread(target=lambda step=step: ckpt.start_save(state_of(step), step))
            for step in range(24)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(steps_in(tmp_path)) >= {20, 21, 22, 23}
    # the one that was committed last stays, whichever, and the one that is dated last
    assert len(steps_in(tmp_path)) <= 6


def test_the_blocking_twin_has_an_engine_of_its_own(tmp_path: Path) -> None:
    """It saves elsewhere as well, and is closed with it; what is no blocking engine is refused."""
    with sync.Checkpointer(tmp_path / "run", config=SMALL) as ckpt:
        ckpt.engine.save(state_of(1), tmp_path / "best")
    assert_same(sync.load(tmp_path / "best"), state_of(1))
    with pytest.raises(EngineClosedError):
        ckpt.engine.load(tmp_path / "best")
    with pytest.raises(ConfigError, match=r"a ckptio\.sync\.Engine, not"):
        sync.Checkpointer(tmp_path, engine=Engine(SMALL))  # type: ignore[arg-type]  # the other's


@pytest.mark.parametrize(
    ("make", "engines", "problem"),
    [
        (Checkpointer, ["x", "", 0, sync.Engine(SMALL)], r"engine= is a ckptio\.Engine, not"),
        (sync.Checkpointer, ["x", "", 0, Engine(SMALL)], r"engine= is a ckptio\.sync\.Engine, not"),
    ],
)
def test_an_engine_of_the_other_face_is_refused(
    make: Callable[..., Any], engines: list[Any], problem: str
) -> None:
    """And so is what is none; when the checkpointer is made."""
    for engine in engines:
        with pytest.raises(ConfigError, match=problem):
            make("run", engine=engine)


def test_leaving_the_blocking_twin_by_an_error_aborts(tmp_path: Path) -> None:
    """And raises what nobody has seen, if left without one."""
    with (
        pytest.raises(ZeroDivisionError),
        sync.Checkpointer(tmp_path / "run", config=SMALL) as ckpt,
    ):
        ckpt.start_save(filled_state([4 << 20], 1), 1)
        raise ZeroDivisionError
    assert not (tmp_path / "run").exists()
    with sync.Checkpointer(tmp_path, config=SMALL) as ckpt:
        ckpt.save(state_of(1), 1)
    with (
        pytest.raises(CheckpointExistsError),
        sync.Checkpointer(tmp_path, config=SMALL) as ckpt,
    ):
        ckpt.start_save(state_of(1), 1)


@pytest.mark.parametrize("newest", [3, None])
def test_a_newest_step_that_is_removed_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: int | None
) -> None:
    """Another process keeps one step and has just committed a newer one: that is loaded."""
    with sync.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"step": 2}, 2)
    fetch = group.fetch_manifest
    seen: list[Any] = []

    async def remove(*args: Any) -> Any:
        if not seen:
            seen.append(args)
            if newest is not None:
                sync.save({"step": newest}, tmp_path / step_name(newest))
            shutil.rmtree(tmp_path / step_name(2))
        return await fetch(*args)

    monkeypatch.setattr(loading, "fetch_manifest", remove)
    with sync.Checkpointer(tmp_path) as checkpointer:
        if newest is None:
            with pytest.raises(CheckpointNotFoundError, match="no committed step"):
                checkpointer.load()
        else:
            assert checkpointer.load() == {"step": newest}


@pytest.mark.parametrize("newest", [3, 2])
def test_a_newest_step_that_is_saved_again_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: int
) -> None:
    """A newer one is loaded, if there is one by then; else that is said, at once."""
    sync.save(filled_state([1000], 2), tmp_path / step_name(2))
    fetch = group.fetch_manifest
    reads: list[Any] = []

    async def remove(*args: Any) -> Any:
        found = await fetch(*args)
        reads.append(found)
        if newest == 2 or len(reads) == 1:
            assert len(reads) < 5
            shutil.rmtree(tmp_path / step_name(2))
            for step in {2, newest}:
                await ckptio.save(filled_state([1000], step), tmp_path / step_name(step))
        return found

    monkeypatch.setattr(loading, "fetch_manifest", remove)
    with sync.Checkpointer(tmp_path) as checkpointer:
        if newest == 2:
            with pytest.raises(CheckpointChangedError):
                checkpointer.load()
        else:
            assert_same(checkpointer.load(), filled_state([1000], newest))


def test_a_loss_is_a_metric_as_it_is(tmp_path: Path) -> None:
    """Also one that autograd still follows."""
    loss = (torch.ones(1, requires_grad=True) * 2).sum()
    with sync.Checkpointer(tmp_path) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointer.save({"step": 1}, 1, metrics={"loss": loss})
        assert checkpointer.records()[0].metrics == {"loss": 2.0}
