"""Engines that nobody leaves, and that nobody has any more."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import ckptio
from ckptio import ConfigError, Engine, sync
from ckptio.events import SaveProgressed
from ckptio.runtime import leaving
from tests.programs import run_program
from tests.rig import SMALL, assert_same, filled_state, names_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckptio.events import Event

pytestmark = pytest.mark.usefixtures("no_leaks")
FULL = filled_state([50_000], 1)

DROPPED = """
import sys, torch, ckptio.sync
engine = ckptio.sync.Engine().__enter__()
handle = engine.start_save({"w": torch.ones(8_000_000)}, sys.argv[1])
del engine
"""

KEEPS = """
import sys, threading, torch, ckptio, ckptio.sync
is_last = threading.Event()
def observe(event):
    if isinstance(event, ckptio.events.SaveProgressed) and is_last.is_set():
        while checkpointer.engine._core._portal is not None:  # the end has not begun
            threading.Event().wait(0.01)
    if isinstance(event, ckptio.events.RetentionFailed):
        print(event, flush=True)
checkpointer = ckptio.sync.Checkpointer(
    sys.argv[1], then=sys.argv[2], keep=ckptio.KeepLast(1), observer=observe
).__enter__()
for step in (0, 1):
    checkpointer.save({"w": torch.ones(10)}, step)
is_last.set()
checkpointer.start_save({"w": torch.ones(10)}, 2)
"""


class Gate:
    """An observer that holds a save until it may go on."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.engine: sync.Engine | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, SaveProgressed):
            assert self.opened.wait(60)


def test_what_is_not_kept_goes_behind_the_last_save_of_a_program(tmp_path: Path) -> None:
    """Also of a checkpointer that nobody leaves, on both tiers."""
    tiers = [tmp_path / "near", tmp_path / "far"]
    done = run_program(KEEPS, *tiers)
    assert (done.stdout, done.stderr) == ("", "")
    assert [names_in(tier) for tier in tiers] == [["step-00000002"]] * 2


@pytest.fixture
def loops() -> Iterator[list[threading.Thread]]:
    """Wait for the loops of engines that the test left open, and for nobody to be there else."""
    before, loops = set(threading.enumerate()), list[threading.Thread]()
    yield loops
    assert loops
    for thread in loops:
        has_ended(thread)
    assert {t.name for t in threading.enumerate() if t not in before} <= {
        "ckptio-close",
        "ckptio-leave",
    }


def has_ended(thread: threading.Thread) -> None:
    """Wait for a thread's end; what was under way when dropped may be in a reference cycle."""
    for _ in range(600):
        gc.collect()
        thread.join(0.1)
        if not thread.is_alive():
            return
    raise AssertionError(thread)


def opened(loops: list[threading.Thread], gate: Gate | None = None) -> sync.Engine:
    """Open an engine, and note the thread of its loop."""
    before = set(threading.enumerate())
    engine = sync.Engine(SMALL, observer=gate).__enter__()
    loops += [t for t in threading.enumerate() if t not in before and "portal" in t.name]
    return engine


def test_a_save_goes_on_when_nobody_has_the_engine(
    tmp_path: Path, loops: list[threading.Thread]
) -> None:
    """It is committed, as one that nobody waits for, and so are the copies; then threads end."""
    gate = Gate()
    engine = opened(loops, gate)
    handles = [
        engine.start_save(FULL, tmp_path / name, then=tmp_path / "second" / name) for name in "ab"
    ]
    del engine
    gc.collect()
    gate.opened.set()
    for handle in handles:
        assert handle.result().path == handle.path
        handle.durable.wait()
        assert_same(sync.load(handle.path, config=SMALL), FULL)


async def test_a_save_of_a_loop_goes_on_when_nobody_has_the_engine(
    tmp_path: Path, loops: list[threading.Thread]
) -> None:
    """As one of a thread."""
    gate, before = Gate(), set(threading.enumerate())
    engine = await Engine(SMALL, observer=gate).__aenter__()
    loops += [t for t in threading.enumerate() if t not in before and "portal" in t.name]
    handle = engine.save(FULL, tmp_path / "a")
    del engine
    gc.collect()
    gate.opened.set()
    await handle
    assert_same(sync.load(tmp_path / "a", config=SMALL), FULL)


def test_a_save_goes_on_when_a_circle_had_the_engine(
    tmp_path: Path, loops: list[threading.Thread]
) -> None:
    """As that of a trainer which its callbacks have."""
    gate, trainer = Gate(), dict[str, Any]()
    trainer.update(me=trainer, engine=opened(loops, gate))
    handle = trainer["engine"].start_save(FULL, tmp_path / "a")
    del trainer
    gc.collect()
    gate.opened.set()
    handle.result()


def test_a_save_that_nobody_has_can_be_aborted(
    tmp_path: Path, loops: list[threading.Thread]
) -> None:
    """By its handle, as ever."""
    gate = Gate()
    handle = opened(loops, gate).start_save(FULL, tmp_path / "a")
    gc.collect()
    handle.abort()
    gate.opened.set()
    handle.committed.wait_done()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("is_circle", [False, True])
def test_an_engine_that_nobody_has_ends(
    tmp_path: Path, loops: list[threading.Thread], *, is_circle: bool
) -> None:
    """Also one whose observer has it."""
    gate = Gate()
    gate.opened.set()
    engine = opened(loops, gate)
    engine.save(FULL, tmp_path / "a")
    gate.engine = engine if is_circle else None
    del engine, gate
    gc.collect()


def test_an_engine_that_nobody_has_ends_when_threads_begin_again(
    loops: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of threads none closes it; it is tried once more."""
    start, refused = threading.Thread.start, list[str]()

    def refuse_first(thread: threading.Thread) -> None:
        if thread.name == "ckptio-leave" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(leaving, "_RETRY_S", 0.0)
    monkeypatch.setattr(threading.Thread, "start", refuse_first)
    opened(loops)
    has_ended(*loops)
    assert refused


def test_a_checkpointer_that_nobody_has_ends(tmp_path: Path, loops: list[threading.Thread]) -> None:
    """Behind the save that it has begun, and what is removed after that."""
    gate, before = Gate(), set(threading.enumerate())
    keep = ckptio.KeepLast(1)
    checkpointer = sync.Checkpointer(tmp_path, keep=keep, config=SMALL, observer=gate).__enter__()
    loops += [t for t in threading.enumerate() if t not in before and "portal" in t.name]
    gate.opened.set()
    checkpointer.save(FULL, 1)
    gate.opened.clear()
    handle = checkpointer.start_save(FULL, 2)
    del checkpointer
    gc.collect()
    gate.opened.set()
    handle.result()
    del handle
    has_ended(*loops)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_checkpointer_that_nobody_has_leaves_the_engine_of_others(tmp_path: Path) -> None:
    """Nothing of it goes on there."""
    with sync.Engine(SMALL) as engine:
        before = len(engine._core._in_flight._running)
        sync.Checkpointer(tmp_path, engine=engine, sweep_after_s=None).__enter__().save(FULL, 1)
        for _ in range(600):
            gc.collect()
            if len(engine._core._in_flight._running) == before:
                break
            engine.load(tmp_path / "step-00000001")  # its loop goes on meanwhile
        assert len(engine._core._in_flight._running) == before


def test_an_engine_that_was_left_is_nothing_to_the_end_of_the_program() -> None:
    """A program may open one for each call: it keeps nothing for those."""

    def num_kept() -> int:
        gc.collect()
        return sum(type(each) is weakref.WeakMethod for each in gc.get_objects())

    before = num_kept()
    with sync.Engine(SMALL):
        assert num_kept() > before
    assert num_kept() == before


def test_an_engine_that_was_never_made_or_entered_goes() -> None:
    """It has no thread, and nothing to end."""
    sync.Engine(SMALL)
    with pytest.raises(ConfigError, match="config= is a CheckpointConfig"):
        sync.Engine(3)  # type: ignore[arg-type]  # what is tested
    gc.collect()


@pytest.mark.parametrize("limit", [False, True])
def test_the_end_of_the_program_waits_for_an_engine_that_nobody_has(
    tmp_path: Path, *, limit: bool
) -> None:
    """Whether a thread began that closes it, or none could."""
    program = DROPPED
    if limit:
        program = program.replace(
            "del engine",
            "import threading\ndef refuse(*_):\n    raise RuntimeError\n"
            "start, threading.Thread.start = threading.Thread.start, refuse\n"
            "del engine\nhandle.result()\nimport atexit\n"
            "atexit.register(lambda: setattr(threading.Thread, 'start', start))",
        )
    assert run_program(program, tmp_path / "a").stderr == ""
    assert sync.verify(tmp_path / "a").is_whole
