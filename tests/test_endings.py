"""How blocks of engines and checkpointers end, and what is said of saves that failed."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from ckptio import (
    Checkpointer,
    CheckpointError,
    CheckpointExistsError,
    Engine,
    SaveAbortedError,
    StateError,
    load,
    save,
    sync,
)
from ckptio.errors import ConfigError, EngineClosedError, StorageError
from ckptio.events import (
    Event,
    LeftoversRemoved,
    LoadStarted,
    SaveCommitted,
    SaveFailed,
    SaveProgressed,
    SaveStaged,
    SaveStarted,
)
from ckptio.moments import SaveMoments
from ckptio.storage.leftovers import boot_id
from ckptio.testing import EventLog
from tests.programs import TIMEOUT_S, run_program
from tests.rig import SMALL, assert_same, filled_state, names_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_leaks")
FULL = filled_state([50_000], 1)
NOT_312 = pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="no thread begins after the main one in Python 3.12"
)

FORK = """
import multiprocessing, os, signal, sys, torch, ckptio.sync
def work(ready):
    ready.send(1)
    while True:
        pass
ckpt = ckptio.sync.Checkpointer(sys.argv[1], preempt_signals=[signal.SIGTERM])
with ckpt:
    ckpt.save({"t": torch.ones(3)}, 1)
    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe()
    child = fork.Process(target=work, args=(theirs,), daemon=True)
    child.start()
    mine.recv()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM, child.exitcode
    pid = os.fork()
    if not pid:
        sys.exit(0)  # leaves the block in the child
    assert os.waitpid(pid, 0)[1] == 0
    ckpt.save({"t": torch.ones(3)}, 2)
    os.kill(os.getpid(), signal.SIGTERM)
    while not ckpt.preempted:
        if ckpt.should_save(3):
            ckpt.save({"t": torch.ones(3)}, 3)
"""
WAIT_IN_CHILD = """
import asyncio, os, sys, threading, torch, ckptio, ckptio.sync
from ckptio.events import SaveProgressed
go_on = threading.Event()
def hold(event):
    if isinstance(event, SaveProgressed):
        go_on.wait()
async def commit():
    await handle
async def moment():
    await handle.durable
with ckptio.sync.Engine(observer=hold) as engine:
    handle = engine.start_save({"t": torch.ones(3)}, sys.argv[1])
    pid = os.fork()
    if not pid:
        num_told = 0
        waits = [handle.result, handle.committed.wait_done, handle.durable.wait]
        waits += [lambda: asyncio.run(commit()), lambda: asyncio.run(moment())]
        for wait in waits:
            try:
                wait()
            except ckptio.errors.EngineClosedError:
                num_told += 1
        os._exit(num_told)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    go_on.set()
    handle.result()
    pid = os.fork()
    if not pid:
        handle.result()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""
ASIDE_IN_PARENT = """
import os, signal, sys, threading
from ckptio.runtime.aside import run_aside
go_on = threading.Event()
run_aside(go_on.wait, "aside")
pid = os.fork()
if not pid:
    signal.alarm(20)
    sys.exit(0)
_, status = os.waitpid(pid, 0)
go_on.set()
assert status == 0, status
"""
ASIDE_INTERRUPTED = """
import signal
from ckptio.runtime import aside
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
aside.start_new_thread = lambda *_: signal.raise_signal(signal.SIGINT)
try:
    aside.run_aside(lambda: None, "aside")
except KeyboardInterrupt:
    pass
else:
    raise AssertionError("the interrupt was lost")
signal.alarm(20)
"""
ASIDE_INTERRUPTED_IN_CHILD = f"""
import multiprocessing
def work():
    exec({ASIDE_INTERRUPTED!r}, {{}})
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
assert child.exitcode == 0, child.exitcode
"""
ASIDE_REFUSED = """
import signal
from ckptio.runtime import aside
def refuse(*_):
    raise RuntimeError("can't start new thread")
aside.start_new_thread = refuse
aside.run_aside(lambda: None, "aside")
signal.alarm(20)
"""
ASIDE_IN_CHILD = """
import multiprocessing, os, sys, threading
from multiprocessing.util import Finalize
from ckptio.runtime.aside import run_aside
def work():
    go_on = threading.Event()
    def end():
        go_on.wait()
        for number in range(100):
            os.makedirs(f"{sys.argv[1]}/{number}")
    run_aside(end, "aside")
    run_aside(lambda: None, "aside, too")
    Finalize(None, go_on.set, exitpriority=10)
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
assert child.exitcode == 0
assert len(os.listdir(sys.argv[1])) == 100
"""
LEFT_OPEN = """
import sys, torch, ckptio.sync
ckpt = ckptio.sync.Checkpointer(sys.argv[1]).__enter__()
ckpt.start_save({"t": torch.ones(3)}, 1)
"""
LAST_LINE = """
import sys, torch, ckptio
ckptio.save({"w": torch.ones(8_000_000)}, sys.argv[1] + "/a", then=sys.argv[1] + "/b")
"""
AFTER_MAIN = """
import sys, threading, torch, ckptio.sync
def work():
    threading.main_thread().join()
    ckptio.sync.save({"t": torch.ones(3)}, sys.argv[1] + "/a")
    ckptio.sync.save(ckptio.sync.load(sys.argv[1] + "/a"), sys.argv[1] + "/b")
threading.Thread(target=work).start()
"""
FOREIGN_AFTER_MAIN = """
import sys, threading, fsspec, torch, ckptio.sync
path = sys.argv[1]
ckptio.sync.save({"u": torch.ones(64), "v": torch.ones(64)}, path + "/a")
ckptio.sync.convert(path + "/a", path + "/hub", to="hf", max_shard_nbytes=300)
fsspec.filesystem("memory").put(path + "/hub", "/hub", recursive=True)
def work():
    threading.main_thread().join()
    ckptio.sync.save(ckptio.sync.load("memory://hub"), path + "/b")
threading.Thread(target=work).start()
"""
PENDING = """
import asyncio, sys, torch, ckptio
async def train():
    async with ckptio.Engine() as engine:
        await engine.save({"t": torch.ones(3)}, sys.argv[1] + "/a")
        engine.save({"w": torch.ones(8_000_000)}, sys.argv[1] + "/b")
        loop.stop()
        await asyncio.Event().wait()
loop = asyncio.new_event_loop()
task = loop.create_task(train())
loop.run_forever()
"""
CHILD = """
import multiprocessing, sys, torch, ckptio.sync
def work(path):
    global engine
    engine = ckptio.sync.Engine().__enter__()
    engine.start_save({"t": torch.ones(3)}, path)
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[2]).Process(target=work, args=(sys.argv[1],))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
HANDLER = """
import signal, sys, torch, ckptio.sync
handles = []
def save(*_):
    if not handles or handles[-1].done():
        handles.append(engine.start_save(state, sys.argv[1] + "/signal", overwrite=True))
state = {"t": torch.ones(30_000)}
with ckptio.sync.Engine() as engine:
    signal.signal(signal.SIGALRM, save)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    for _ in range(200):
        engine.start_save({}, sys.argv[1] + "/a", overwrite=True)
    signal.setitimer(signal.ITIMER_REAL, 0)
assert handles
"""
WAITING_HANDLER = """
import signal, sys, torch, ckptio.sync
path, busy, num_saved = sys.argv[1], False, 0
def save(*_):
    global busy, num_saved
    if not busy:
        busy = True
        engine.save(state, path + "/signal", overwrite=True)
        busy, num_saved = False, num_saved + 1
state = {"t": torch.ones(30_000)}
with ckptio.sync.Engine() as engine:
    signal.signal(signal.SIGALRM, save)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    for i in range(100):
        handle = engine.start_save({}, path + "/a", overwrite=True)
        handle.result() if i % 2 else engine.load(path + "/a") if i % 3 else handle.done()
    signal.setitimer(signal.ITIMER_REAL, 0)
assert num_saved
"""
COLLECTS = """
import gc, os
from ckptio._gc import without_collection
@without_collection
def run():
    pid = os.fork()
    if not pid:
        os._exit(not gc.isenabled())
    assert os.waitpid(pid, 0)[1] == 0
    assert not gc.isenabled()
run()
assert gc.isenabled()
"""
EXIT = """
import sys, torch, ckptio.sync
with ckptio.sync.Checkpointer(sys.argv[1]) as ckpt:
    ckpt.start_save({"w": torch.ones(8_000_000)}, 1).staged.wait()
    sys.exit(7)
"""


def test_the_log_tells_of_a_failure_when_the_next_save_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for a commit while training; the block may never be left in order."""
    sync.save(FULL, tmp_path / "a", config=SMALL)
    with pytest.raises(CheckpointExistsError) as caught, sync.Engine(SMALL) as engine:
        for name, num_told in (("a", 0), ("a", 1), ("b", 2)):
            engine.start_save(FULL, tmp_path / name).committed.wait_done()
            assert caplog.text.count("failed and nobody waited for it") == num_told
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert f"and the save to '{tmp_path}/a' failed" in caught.value.__notes__[0]


@pytest.mark.parametrize("observer", [None, EventLog()])
def test_a_copy_that_failed_is_told_as_what_it_is(
    observer: EventLog | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The save is committed; and the file that could not be written is named."""
    (tmp_path / "far").touch()
    paths = [(tmp_path / "near" / name, tmp_path / "far" / name) for name in "ab"]
    with pytest.raises(StorageError) as caught, sync.Engine(SMALL, observer=observer) as engine:
        for near, far in paths:
            engine.start_save(FULL, near, then=far).durable.wait_done()
        engine.start_save(FULL, tmp_path / "c").result()
    told: dict[int, list[str]] = {level: [] for level in (logging.WARNING, logging.ERROR)}
    for record in caplog.records:
        told[record.levelno].append(record.getMessage())
    events, failures = told.values()
    assert len(events) == (len(paths) if observer is None else 0)  # an observer has them
    for (near, far), text in zip(paths, failures, strict=True):
        assert text.startswith(f"the copy of '{near}' to '{far}' failed and nobody waited")
        assert "its copy is owed" in text
    for (_, far), text in zip(paths * 2, [*failures, *events], strict=observer is None):
        assert f"[Errno {errno.ENOTDIR}]" in text
        assert text.count(str(far)) >= 2  # where to, and what cannot be made
    assert all(text.startswith("CopyFailed(") for text in events)
    near, far = paths[1]
    assert (
        f"and the copy of '{near}' to '{far}' failed: StorageError: " in caught.value.__notes__[-1]
    )


@pytest.mark.parametrize(
    ("num", "rest", "num_told"),
    [
        (9, [], 8),  # and the last one is named
        (10, ["and 1 others failed; the log has them all"], 10),
        (20, ["and 11 others failed; the log has them all"], 20),
    ],
)
def test_leaving_names_some_of_very_many_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num: int, rest: list[str], num_told: int
) -> None:
    """The log has all that are not named; the others only as a next save began."""
    sync.save(FULL, tmp_path / "a", config=SMALL)
    with pytest.raises(CheckpointExistsError) as caught, sync.Engine(SMALL) as engine:
        for _ in range(num):
            engine.start_save(FULL, tmp_path / "a").committed.wait_done()
    assert caught.value.__notes__[8:] == rest
    assert caplog.text.count("failed and nobody waited for it") == num_told


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_failure_is_raised_or_told_where_a_block_is_left_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type[Exception] | None
) -> None:
    """By what leaves the block it would be hidden; raised, it is nothing for the log."""
    sync.save(FULL, tmp_path / "a", config=SMALL)
    engine = sync.Engine(SMALL)
    with pytest.raises(error or CheckpointExistsError), engine:
        engine.start_save(FULL, tmp_path / "a").committed.wait_done()
        if error is not None:
            raise error
    del engine
    gc.collect()
    assert caplog.text.count("failed and nobody waited for it") == (error is not None)


@pytest.mark.parametrize(
    ("error", "level"),
    [(SaveAbortedError("it was aborted"), logging.WARNING), (StateError("it is"), logging.ERROR)],
    ids=type,
)
def test_the_log_warns_of_what_somebody_ended(
    error: CheckpointError, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception that leaves the block is the failure, and somebody sees that."""
    moments = SaveMoments("a", "0" * 32)
    moments.fail(error)
    moments.tell()
    assert [record.levelno for record in caplog.records] == [level]
    assert str(error) in caplog.text


async def test_a_checkpointer_tells_of_it_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a failure that somebody saw in `staged` is not told, and not raised again."""
    async with Checkpointer(tmp_path, config=SMALL) as ckpt:
        await ckpt.save(FULL, 1)
    with pytest.raises(CheckpointExistsError):
        async with Checkpointer(tmp_path, config=SMALL) as ckpt:
            ckpt.save(FULL, 1).committed.wait_done()
            await ckpt.save(FULL, 2)
            assert f"the save to '{ckpt.path(1)}' failed" in caplog.text
    caplog.clear()
    async with Checkpointer(tmp_path, config=SMALL) as ckpt:
        with pytest.raises(CheckpointExistsError):
            await ckpt.save(FULL, 1).staged
        await ckpt.save(FULL, 3)
    assert not caplog.records


async def test_an_error_that_leaves_a_block_does_not_hide_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has what failed before, and what is aborted by that."""
    async with Checkpointer(tmp_path, config=SMALL) as ckpt:
        await ckpt.save(FULL, 1)
    with pytest.raises(ZeroDivisionError):
        async with Checkpointer(tmp_path, config=SMALL) as ckpt:
            ckpt.save(FULL, 1).committed.wait_done()
            ckpt.save(filled_state([4 << 20], 1), 2)
            raise ZeroDivisionError
    assert f"the save to '{ckpt._core._given_root}/step-00000001' failed" in caplog.text
    assert "the save of step 2 is aborted by ZeroDivisionError()" in caplog.text


def test_leaving_by_sys_exit_finishes_what_is_in_flight(tmp_path: Path) -> None:
    """A run that is to be continued ends so, and its last save is what it goes on from."""
    run_program(EXIT, tmp_path / "run", code=7)
    assert sync.verify(tmp_path / "run" / "step-00000001").is_whole
    with pytest.raises(SystemExit), sync.Engine(SMALL) as engine:
        engine.start_save(FULL, tmp_path / "c")
        raise SystemExit
    assert sync.verify(tmp_path / "c").is_whole


async def test_leaving_an_engine_by_sys_exit_waits_as_well(tmp_path: Path) -> None:
    """In async code the same."""
    with pytest.raises(SystemExit):
        async with Engine(SMALL) as engine:
            engine.save(FULL, tmp_path / "c")
            raise SystemExit
    assert (await asyncio.to_thread(sync.verify, tmp_path / "c")).is_whole


def test_children_end_by_the_signals_that_announce_the_end_of_the_run(tmp_path: Path) -> None:
    """They inherit handlers; and a block that is left in a child is the parent's."""
    run_program(FORK, tmp_path)
    assert names_in(tmp_path) == [f"step-0000000{step}" for step in (1, 2, 3)]


def test_a_save_of_the_parent_is_not_waited_for_in_a_child(tmp_path: Path) -> None:
    """Nobody would tell it there; one that has ended says how."""
    run_program(WAIT_IN_CHILD, tmp_path / "c")


def test_what_the_parent_runs_aside_is_not_waited_for_in_a_child() -> None:
    """The thread is the parent's, which waits for it as it ends."""
    run_program(ASIDE_IN_PARENT)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(ASIDE_INTERRUPTED, id="interrupted"),
        pytest.param(ASIDE_INTERRUPTED_IN_CHILD, id="interrupted, in a child"),
        pytest.param(ASIDE_REFUSED, id="refused"),
    ],
)
def test_what_could_not_be_run_aside_is_not_waited_for(program: str) -> None:
    """No thread has it: the program would never end. An interrupt is raised, the limit is not."""
    run_program(program)


def test_what_is_run_aside_is_waited_for_in_a_child_of_multiprocessing(tmp_path: Path) -> None:
    """It ends without what `atexit` has, unless it was spawned."""
    run_program(ASIDE_IN_CHILD, tmp_path / "made")


def test_a_checkpointer_that_is_left_open_holds_no_program_up(tmp_path: Path) -> None:
    """Its engine is closed at the end, with the last save finished."""
    run_program(LEFT_OPEN, tmp_path)
    assert sync.verify(tmp_path / "step-00000001").is_whole


def test_an_engine_may_be_closed_before_its_checkpointer(tmp_path: Path) -> None:
    """Whatever the order of the blocks, both end."""
    engine = sync.Engine(SMALL).__enter__()
    with sync.Checkpointer(tmp_path, engine=engine) as ckpt:
        ckpt.start_save(FULL, 1)
        engine.__exit__(None, None, None)
    assert sync.verify(tmp_path / "step-00000001").is_whole


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(LAST_LINE, id="last line"),
        pytest.param(AFTER_MAIN, id="after main", marks=NOT_312),
        pytest.param(FOREIGN_AFTER_MAIN, id="after main, foreign", marks=NOT_312),
        pytest.param(PENDING, id="pending"),
    ],
)
def test_a_program_ends_and_has_saved(tmp_path: Path, program: str) -> None:
    """On both tiers, from other threads, of files of others, and where a block is never left."""
    run_program(program, tmp_path)
    for name in "ab":
        assert sync.verify(tmp_path / name).is_whole


def test_entering_an_open_engine_leaves_it_open(tmp_path: Path) -> None:
    """The second entry fails alone, and what is in flight goes on."""
    with sync.Engine(SMALL) as engine:
        handle = engine.start_save(FULL, tmp_path / "a")
        with pytest.raises(EngineClosedError), engine:
            pass
        handle.result()
        engine.save(FULL, tmp_path / "b")
    assert sync.verify(tmp_path / "a").is_whole


def test_a_limit_of_threads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is left of the engine; where threads begin again, another one opens."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(EngineClosedError, match="limit of threads"):
            sync.save(FULL, tmp_path / "a")
    sync.save(FULL, tmp_path / "a")


def test_a_call_that_gets_no_thread_to_close_its_engine_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last thread was the one too many: the save has begun, and has its handle."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "ckptio-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    handle = save(FULL, tmp_path / "a")
    assert handle.done()
    assert sync.verify(tmp_path / "a").is_whole


def test_a_limit_of_open_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of threads: a loop has descriptors of its own."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.events, "new_event_loop", refuse)
        with pytest.raises(EngineClosedError, match=r"Too many open files.*ulimit -n"):
            sync.save(FULL, tmp_path / "a")
    assert os.listdir(tmp_path) == []
    sync.save(FULL, tmp_path / "a")


STEP_HANDLER = """
import signal, sys, torch, ckptio.sync
from ckptio.checkpointer.losses import Losses

state, note = {"t": torch.ones(3)}, Losses.note

def interrupted(self, saves):
    Losses.note = note
    signal.raise_signal(signal.SIGUSR1)
    note(self, saves)

def save(*_):
    ckpt.start_save(state, 2).result()

signal.signal(signal.SIGUSR1, save)
with ckptio.sync.Checkpointer(sys.argv[1] + "/run") as ckpt:
    Losses.note = interrupted
    ckpt.save(state, 1)
    assert ckpt.steps() == (1, 2)
"""


def test_a_signals_handler_may_save_a_step(tmp_path: Path) -> None:
    """Where it interrupts the checkpointer as that takes a step in, too."""
    run_program(STEP_HANDLER, tmp_path)


@pytest.mark.parametrize("program", [HANDLER, WAITING_HANDLER], ids=["start", "wait"])
def test_a_signals_handler_may_save(tmp_path: Path, program: str) -> None:
    """Wherever it interrupts the saves and loads of the thread that it runs on; it may wait."""
    run_program(program, tmp_path)
    assert sync.verify(tmp_path / "signal").is_whole


@pytest.mark.parametrize("kind", [SaveStarted, SaveStaged, SaveProgressed, SaveCommitted])
def test_an_observer_that_calls_its_engine_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[Event]
) -> None:
    """It runs on the thread that would have to answer: the log has the error, nobody hangs."""

    def watch(event: Event) -> None:
        if isinstance(event, kind):
            engine.load(tmp_path / "a")

    engine = sync.Engine(SMALL, observer=watch)
    with engine:
        engine.save(FULL, tmp_path / "a")
    assert "an observer runs on the engine's own thread" in caplog.text


#: One of each is given on the engine's loop, and on a thread that does its work.
LEAVING = [SaveStaged, SaveFailed, LeftoversRemoved]


@pytest.mark.parametrize("kind", LEAVING)
@pytest.mark.parametrize(
    "make", [sync.Engine, lambda c, **o: sync.Checkpointer(".", config=c, **o)]
)
def test_an_observer_that_leaves_its_engine_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Event],
    make: Callable[..., Any],
) -> None:
    """It would wait for itself. The engine stays open, and its own thread leaves it."""
    monkeypatch.chdir(tmp_path)
    refused: list[str] = []

    def watch(event: Event) -> None:
        if isinstance(event, kind):
            with pytest.raises(ConfigError) as found:
                block.__exit__(None, None, None)
            refused.append(str(found.value))

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f".attempt-{'1' * 32}").write_bytes(boot_id())  # of a save that was killed
    block = make(SMALL, observer=watch)
    with block:
        engine = getattr(block, "engine", block)
        engine.save(FULL, tmp_path / "a")
        with pytest.raises(CheckpointExistsError):
            engine.save(FULL, tmp_path / "a")
        engine.save(FULL, tmp_path / "b")
    assert refused
    assert all("cannot leave the engine" in why for why in refused)


async def test_a_task_on_the_engines_loop_cannot_leave_it(tmp_path: Path) -> None:
    """Which an observer begins there, as elsewhere it could."""
    tasks: list[asyncio.Task[None]] = []

    def watch(event: Event) -> None:
        if isinstance(event, SaveStaged):
            leaving = engine.__aexit__(None, None, None)
            tasks.append(asyncio.get_running_loop().create_task(leaving))

    async with Engine(SMALL, observer=watch) as engine:
        await engine.save(FULL, tmp_path / "a")
    (task,) = tasks
    with pytest.raises(ConfigError, match="cannot leave the engine"):
        task.result()


def test_saves_that_an_observer_is_refused_are_not_kept(tmp_path: Path) -> None:
    """They never end: a run whose observer saves at each commit would gather them."""
    refused: list[str] = []

    def watch(event: Event) -> None:
        if isinstance(event, SaveCommitted):
            with pytest.raises(ConfigError) as found:
                engine.start_save(FULL, tmp_path / "b")
            refused.append(str(found.value))

    engine = sync.Engine(SMALL, observer=watch)
    with engine:
        for number in range(3):
            engine.save(FULL, tmp_path / f"{number}")
        assert len(engine._core.saves) <= 1
    assert len(refused) == 3


@pytest.mark.parametrize("kind", [SaveStarted, SaveStaged, SaveProgressed, SaveCommitted])
@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_an_observer_cannot_end_a_part_of_a_save(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: type[Event],
    error: type[BaseException],
) -> None:
    """Whatever it raises on the engine's threads is logged, and the save is whole."""

    def watch(event: Event) -> None:
        if isinstance(event, kind):
            raise error

    sync.save(FULL, tmp_path / "a", config=SMALL, observer=watch)
    assert "the observer raised" in caplog.text
    assert_same(sync.load(tmp_path / "a"), FULL)


@pytest.mark.parametrize("what", ["segment", "read"])
async def test_a_part_that_somebody_cancelled_is_no_success(tmp_path: Path, what: str) -> None:
    """Task groups take a task that ended as cancelled for one that went well; nobody here does."""

    def watch(event: Event) -> None:
        if isinstance(event, (SaveStarted, LoadStarted)):
            asyncio.get_running_loop().call_later(0, cancel)

    def cancel() -> None:
        tasks = [task for task in asyncio.all_tasks() if task.get_name().startswith(what)]
        if not tasks:
            asyncio.get_running_loop().call_soon(cancel)
        else:
            tasks[-1].cancel()

    sync.save(FULL, tmp_path / "a", config=SMALL)
    if what == "segment":
        with pytest.raises(SaveAbortedError, match="was cancelled"):
            await save(FULL, tmp_path / "b", config=SMALL, observer=watch)
        assert names_in(tmp_path) == ["a"]
    else:
        with pytest.raises(StateError, match="was cancelled"):
            await load(tmp_path / "a", config=SMALL, observer=watch)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_process_saves_before_it_ends(tmp_path: Path, method: str) -> None:
    """However multiprocessing made it, with an engine that is left open."""
    program = tmp_path / "program.py"
    program.write_text(CHILD)
    command = [sys.executable, str(program), str(tmp_path / "c"), method]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    assert sync.verify(tmp_path / "c").is_whole


def test_a_forked_child_collects() -> None:
    """Though it was made while its parent held collections off."""
    run_program(COLLECTS)


async def test_a_copy_that_a_later_save_replaced_is_no_failure(tmp_path: Path) -> None:
    """What was overwritten before it was copied has no copy, and the later one has."""
    async with Engine(SMALL) as engine:
        handles = []
        for value in range(4):
            state = filled_state([3_000_000], value)
            path, then = tmp_path / "latest", tmp_path / "second" / "latest"
            handles.append(engine.save(state, path, overwrite=True, then=then))
            await handles[-1]
    assert_same(sync.load(tmp_path / "second" / "latest"), state)
    assert handles[-1].durable.error() is None
