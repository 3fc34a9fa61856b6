"""A first tier on a mount whose server is gone: its own saves and loads wait, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ckptio import Engine, KeepLast, sync
from ckptio._looks import _MAX_LOOKS
from ckptio._threads import NUM_ODD_JOBS
from ckptio.engine import progress
from ckptio.errors import CheckpointChangedError, SaveAbortedError
from ckptio.events import SaveCommitted, SaveQueued
from ckptio.storage import local
from tests.mounts import Mount
from tests.rig import SMALL, assert_same, config_with, filled_state, random_state

if TYPE_CHECKING:
    from pathlib import Path

    from ckptio.events import Event

pytestmark = pytest.mark.usefixtures("no_leaks")
SIZES = [100_000, 3000]


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    monkeypatch.setattr(local, "_LOOK_S", 0.05)
    monkeypatch.setattr(progress, "_FIRST_PATIENCE_S", 0.05)
    return Mount(tmp_path / "far", monkeypatch)


@pytest.mark.parametrize("is_copied", [False, True])
def test_training_and_saves_to_other_places_go_on(
    tmp_path: Path, mount: Mount, *, is_copied: bool
) -> None:
    """The state may change, and is committed as it was when the server is back."""
    near, far, state = tmp_path / "near", tmp_path / "far", random_state(SIZES)
    copies = [tmp_path / "copies" / name if is_copied else None for name in "ab"]
    with sync.Engine(SMALL) as engine:
        with mount.hanging():
            hung = engine.start_save(state, far, then=copies[0])
            hung.staged.wait()
            engine.save(filled_state(SIZES, 1), near, then=copies[1])
            assert_same(engine.load(near), filled_state(SIZES, 1))
            assert not hung.committed.done()
        hung.durable.wait()
        assert_same(engine.load(copies[0] or far), state)


def test_a_save_that_never_began_asks_nothing_of_it(tmp_path: Path, mount: Mount) -> None:
    """It was aborted while it waited for those before it: no copy of it is under way."""
    state, is_queued = random_state(SIZES), threading.Event()

    def watch(event: Event) -> None:
        if isinstance(event, SaveQueued):
            is_queued.set()

    with sync.Engine(config_with(max_saves=1), observer=watch) as engine:
        with mount.hanging():
            hung = engine.start_save(state, tmp_path / "far" / "a")
            aborted = engine.start_save(state, tmp_path / "far" / "b", then=tmp_path / "copy")
            assert is_queued.wait(60)
            aborted.abort()
            with pytest.raises(SaveAbortedError):
                aborted.durable.wait()
        hung.result()


def test_a_copy_ends_under_the_name_that_it_began_with(tmp_path: Path) -> None:
    """Also where the link moves meanwhile by which its first tier is called."""
    link = tmp_path / "link"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    link.symlink_to("one")

    def move(event: Event) -> None:
        if isinstance(event, SaveCommitted):
            link.unlink()
            link.symlink_to("two")

    with sync.Engine(SMALL, observer=move) as engine:
        handle = engine.start_save(random_state(SIZES), link / "a", then=tmp_path / "far")
        handle.result()
        with pytest.raises(CheckpointChangedError):
            handle.durable.wait()
        assert not engine._core.context.copies.under_way


def test_so_they_do_where_it_is_loaded_from(tmp_path: Path, mount: Mount) -> None:
    """The one load that asked for it waits."""
    near, far, state = tmp_path / "near", tmp_path / "far", random_state(SIZES)
    sync.save(state, far, config=SMALL)
    with sync.Engine(SMALL) as engine, ThreadPoolExecutor(1) as pool:
        with mount.hanging():
            hung = pool.submit(engine.load, far)
            mount.wait_until_hung(str(far))
            engine.save(filled_state(SIZES, 1), near)
        assert_same(hung.result(), state)


def test_nor_do_others_wait_where_a_second_tier_may_be_read(tmp_path: Path, mount: Mount) -> None:
    """Whether that is the first one, by a link, is asked on no loop."""
    near, far, copy = tmp_path / "near", tmp_path / "far", tmp_path / "copy"
    sync.save(random_state(SIZES), far, then=copy, config=SMALL)
    with sync.Engine(SMALL) as engine, ThreadPoolExecutor(1) as pool:
        with mount.hanging():
            hung = pool.submit(engine.load, far, then=copy)
            mount.wait_until_hung(str(far))
            engine.save(filled_state(SIZES, 1), near)
        assert_same(hung.result(), random_state(SIZES))


def test_a_run_with_a_second_tier_begins_on_no_loop_that_hangs(
    tmp_path: Path, mount: Mount
) -> None:
    """Whether its root is that of the other tier is asked on a thread, too."""
    root, far = tmp_path / "far", tmp_path / "copies"

    def run() -> None:
        with sync.Checkpointer(root, then=far, config=SMALL) as checkpointer:
            for step in (1, 2):
                checkpointer.start_save(random_state(SIZES), step).durable.wait()
            assert checkpointer.discard_after(1) == (2,)

    with ThreadPoolExecutor(1) as pool:
        with mount.hanging():
            hung = pool.submit(run)
            mount.wait_until_hung(str(root))
        hung.result()


def test_however_many_loads_wait_for_it_nothing_else_does(tmp_path: Path, mount: Mount) -> None:
    """They are more than the engine has threads for what is not known to hang."""
    near, far, state = tmp_path / "near", tmp_path / "far", random_state(SIZES)
    sync.save(state, far, config=SMALL)
    with sync.Engine(SMALL) as engine, ThreadPoolExecutor(8) as pool:
        with mount.hanging():
            hung = [pool.submit(engine.load, far) for _ in range(8)]
            mount.wait_until_hung(str(far), num=NUM_ODD_JOBS)
            engine.save(filled_state(SIZES, 1), near)
            assert_same(engine.load(near), filled_state(SIZES, 1))
        for load in hung:
            assert_same(load.result(), state)


async def test_a_load_that_is_cancelled_waits_for_it_no_more(tmp_path: Path, mount: Mount) -> None:
    """Nothing was begun there that would have to be ended."""
    far = tmp_path / "far"
    async with Engine(SMALL) as engine:
        await engine.save(random_state(SIZES), far)
        with mount.hanging():
            load = asyncio.create_task(engine.load(far))
            await asyncio.to_thread(mount.wait_until_hung, str(far))
            load.cancel()
            async with asyncio.timeout(30):
                with pytest.raises(asyncio.CancelledError):
                    await load


async def test_however_many_were_cancelled_what_lies_beside_it_is_saved_and_loaded(
    tmp_path: Path, mount: Mount
) -> None:
    """Each has left a thread that hangs."""
    near, far = tmp_path / "near", tmp_path / "far"
    async with Engine(SMALL) as engine:
        await engine.save(random_state(SIZES), far)
        with mount.hanging():
            loads = [asyncio.create_task(engine.load(far)) for _ in range(_MAX_LOOKS)]
            await asyncio.to_thread(mount.wait_until_hung, str(far), num=_MAX_LOOKS)
            for load in loads:
                load.cancel()
            await asyncio.wait(loads)
            async with asyncio.timeout(30):
                await engine.save(filled_state(SIZES, 1), near)
                assert_same(await engine.load(near), filled_state(SIZES, 1))


def test_so_it_does_with_the_steps_of_a_run(tmp_path: Path, mount: Mount) -> None:
    """For as many saves as may be in flight; all of them are steps when the server is back."""
    root, state = tmp_path / "far", random_state(SIZES)
    with sync.Checkpointer(root, keep=KeepLast(3), config=SMALL) as checkpointer:
        for step in range(3):
            checkpointer.save(state, step)
        with mount.hanging():
            hung = [checkpointer.start_save(state, step) for step in (3, 4)]
            for handle in hung:
                handle.staged.wait()
        for handle in hung:
            handle.result()
    with sync.Checkpointer(root, config=SMALL) as checkpointer:
        assert checkpointer.steps() == (2, 3, 4)
