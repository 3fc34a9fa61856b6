"""What a caller has is let go of when a call has failed, and without a collection of garbage.

An error has the frames that it went through, so also those of the program, with its model. Who
catches it, and goes on with another state, is not to have both in memory.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckptio.sync
from ckptio.errors import CheckpointError
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_collections")

LOADS = ["missing", "mismatch", "damaged", "missing slice", "inspect", "verify"]


class Held:
    """Something of the program."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory with a checkpoint, `good`, and one that is damaged, `bad`."""
    for name in ("good", "bad"):
        ckptio.sync.save({"t": torch.ones(3)}, tmp_path / name)
    (file,) = (tmp_path / "bad").glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        opened.write(b"?")
    return tmp_path


def load(engine: Any, path: Path, kind: str) -> Any:
    """Begin what will fail."""
    into = {"t": torch.zeros(3)}
    match kind:
        case "missing":
            return engine.load(path / "none", into=into)
        case "mismatch":
            return engine.load(path / "good", into={**into, "other": 1})
        case "damaged":
            return engine.load(path / "bad", into=into)
        case "missing slice":
            return engine.load_slice(path / "none", "t", 0)
        case "inspect":
            return engine.inspect(path / "none")
        case "verify":
            return engine.verify(path / "none")
        case _:
            raise AssertionError


def fail(call: Callable[[], object]) -> weakref.ref[Held]:
    """Call what fails. What this frame has goes with it."""
    held = Held()
    try:
        call()
    except CheckpointError:  # `pytest.raises` would keep it
        return weakref.ref(held)
    raise AssertionError


async def fail_on_a_loop(call: Callable[[], Awaitable[object]]) -> weakref.ref[Held]:
    """Await what fails; else the same."""
    held = Held()
    try:
        await call()
    except CheckpointError:
        return weakref.ref(held)
    raise AssertionError


def is_let_go(held: weakref.ref[Any]) -> bool:
    """Wait for the engine's threads, which end their steps when a call has returned."""
    deadline = time.monotonic() + 20
    while held() is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("kind", LOADS)
def test_a_load_that_failed_keeps_nothing(path: Path, kind: str) -> None:
    with ckptio.sync.Engine(SMALL) as engine:
        assert is_let_go(fail(lambda: load(engine, path, kind)))


@pytest.mark.parametrize("kind", LOADS)
def test_an_awaited_load_that_failed_keeps_nothing(path: Path, kind: str) -> None:
    async def main() -> None:
        async with ckptio.Engine(SMALL) as engine:
            held = await fail_on_a_loop(lambda: load(engine, path, kind))
            assert is_let_go(held)

    asyncio.run(main())


def test_a_load_that_several_wait_for_keeps_nothing(path: Path) -> None:
    """They are given one error, which has the frames of all of them."""

    async def main() -> None:
        async with ckptio.Engine(SMALL) as engine:
            fails = [fail_on_a_loop(lambda: load(engine, path, "missing")) for _ in range(5)]
            for held in await asyncio.gather(*fails):
                assert is_let_go(held)

    asyncio.run(main())


SAVES = ["exists", "no directory"]


def path_for(path: Path, kind: str) -> Path:
    """Where no save can be."""
    (path / "file").touch()
    return path / "good" if kind == "exists" else path / "file" / "x"


@pytest.mark.parametrize("kind", SAVES)
def test_a_save_that_failed_keeps_nothing(path: Path, kind: str) -> None:
    """Nor does the engine, which keeps saves that have failed until somebody knows."""
    to = path_for(path, kind)

    def wait() -> None:
        engine.start_save({"t": torch.ones(3)}, to).staged.wait()

    with ckptio.sync.Engine(SMALL) as engine:
        assert is_let_go(fail(lambda: engine.save({"t": torch.ones(3)}, to)))
        assert is_let_go(fail(wait))
        assert not engine._core.saves
    assert is_let_go(fail(lambda: ckptio.sync.save({"t": torch.ones(3)}, to)))


@pytest.mark.parametrize("kind", SAVES)
def test_an_awaited_save_that_failed_keeps_nothing(path: Path, kind: str) -> None:
    to = path_for(path, kind)

    async def main() -> None:
        async with ckptio.Engine(SMALL) as engine:
            held = await fail_on_a_loop(lambda: engine.save({"t": torch.ones(3)}, to))
            assert is_let_go(held)
            held = await fail_on_a_loop(lambda: engine.save({"t": torch.ones(3)}, to).staged)
            assert is_let_go(held)
            assert not engine._core.saves
        assert is_let_go(await fail_on_a_loop(lambda: ckptio.save({"t": torch.ones(3)}, to)))

    asyncio.run(main())


@pytest.mark.parametrize("then", [None, "far"])
def test_what_one_call_has_saved_keeps_nothing(path: Path, then: str | None) -> None:
    """Its handle has what stops it, which knows the handle, until nothing is left to stop."""
    to = None if then is None else path / then

    async def save() -> weakref.ref[Any]:
        handle = ckptio.save({"t": torch.ones(3)}, path / "new", then=to, config=SMALL)
        await handle.durable
        return weakref.ref(handle._moments)

    assert is_let_go(asyncio.run(save()))


def test_the_engine_keeps_no_save_whose_failure_was_seen_later(path: Path) -> None:
    with ckptio.sync.Engine(SMALL) as engine:
        handle = engine.start_save({"t": torch.ones(3)}, path / "good")
        handle.committed.wait_done()
        assert engine._core.saves  # nobody has seen its error
        with pytest.raises(CheckpointError):
            handle.result()
        assert not engine._core.saves


@pytest.mark.parametrize("then", [None, "file/x"])
def test_a_failure_that_nobody_has_seen_keeps_no_values(path: Path, then: str | None) -> None:
    """Those of a flaky store come to thousands; each had the plan and the manifest."""
    to = path / "a" if then else path_for(path, "no directory")
    path_for(path, "no directory")
    with ckptio.sync.Engine(SMALL, observer=lambda _: None) as engine:
        handle = engine.start_save({"t": torch.ones(3)}, to, then=then and path / then)
        handle.durable.wait_done()
        (moments,) = engine._core.saves
        error = moments.error()
        assert error is not None
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        assert any(frame.f_code.co_name == "begin" for frame in frames)
        assert not any(frame.f_locals for frame in frames)
        with pytest.raises(CheckpointError):
            handle.durable.wait()


async def test_a_closed_engine_keeps_nothing_of_what_it_has_saved(tmp_path: Path) -> None:
    """A program may hold it for as long as it runs; a plan has a kilobyte for each tensor."""
    async with ckptio.Engine(SMALL) as engine:
        await engine.save({"t": torch.ones(3)}, tmp_path / "a")
        await engine.load(tmp_path / "a")
        context = engine._core.context
        assert context.plans.values()
        assert context.cache.statistics().num_entries == 1
    recent = (context.plans, context.agreements, context.jobs, context.received)
    assert not any(each.values() for each in recent)
    assert context.last_job is None
    assert (context.cache.statistics().num_entries, context.cache.statistics().nbytes) == (0, 0)
