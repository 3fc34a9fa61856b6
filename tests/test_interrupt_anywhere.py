"""An interrupt at any point of a call where one can come.

Python raises `KeyboardInterrupt` where a function of its own begins and where one of C has
returned. A profiler sees just these moments, so it raises one at each of them in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
import weakref
from _thread import start_new_thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckptio
from ckptio import CheckpointConfig, Engine, sync
from ckptio._gc import _pauses, without_collection
from ckptio.adapters.dcp.calls import wait_for
from ckptio.checkpointer.losses import Losses
from ckptio.errors import CheckpointNotFoundError, EngineClosedError, StorageError
from ckptio.moments import SaveMoments
from ckptio.runtime.aside import run_uninterrupted
from ckptio.runtime.core import EngineCore
from ckptio.runtime.guard import Guard
from ckptio.runtime.running import Running
from tests.rig import assert_same, names_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from ckptio.engine.context import EngineContext

STATE = {"w": torch.arange(5000), "b": torch.ones(3)}
CONFIG = CheckpointConfig(durability="none")
#: Whose code is interrupted. The locks of Python's own threading and futures are not made
#: for it: one that is interrupted just when it was taken stays locked.
_OURS = ("/ckptio/", "/anyio/", "/asyncio/")
#: Where the thread's own loop runs: one that is interrupted forgets what it was about to call.
_BESIDE_LOOP = ("/ckptio/",)


def interrupt_at(
    point: int,
    call: Callable[[], object],
    where: tuple[str, ...] = _OURS,
    handler: Callable[[], object] | None = None,
) -> bool:
    """Call, and interrupt it at a point of it, counted from 1. Whether it had that many.

    With a handler, that is called there, and does not raise.
    """
    count = 0

    def look(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        nonlocal count
        name = frame.f_code.co_filename
        if event in ("call", "c_return") and any(part in name for part in where):
            if _is_finalizing(frame):
                return
            count += 1
            if count == point:
                sys.setprofile(None)
                if handler is None:
                    raise KeyboardInterrupt
                handler()

    sys.setprofile(look)
    try:
        call()
    except KeyboardInterrupt:
        assert count == point
        return True
    finally:
        sys.setprofile(None)
    return count >= point


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does, in turns of the interpreter."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def is_at_guard(thread: int | None) -> bool:
    """Whether a thread is in `Guard.run` itself: it waits for the lock, or is about to."""
    frame = sys._current_frames().get(thread or 0)
    return frame is not None and frame.f_code is Guard.run.__code__


def signal_to(waits: Callable[[], object]) -> threading.Thread:
    """Have a signal come to this thread once another one has waited for something."""
    main = threading.get_ident()

    def work() -> None:
        waits()
        signal.pthread_kill(main, signal.SIGUSR1)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def _is_finalizing(frame: FrameType | None) -> bool:
    """Whether a finalizer runs. Python prints what is raised there, and goes on."""
    while frame is not None:
        if frame.f_code.co_filename == weakref.__file__ or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@pytest.mark.parametrize("face", ["save", "start_save"])
def test_a_save_can_be_interrupted_anywhere(tmp_path: Path, face: str) -> None:
    """It is whole or has left nothing; no slab is taken; and the engine goes on."""
    point, path = 0, tmp_path / "a"
    went_on = True
    while went_on:
        point += 1
        with sync.Engine(CONFIG, ranks="solo") as engine:
            pool = engine._core.context.pool

            def save() -> object:
                if face == "save":
                    return engine.save(STATE, path)
                return engine.start_save(STATE, path).result()

            went_on = interrupt_at(point, save)
            engine.save(STATE, tmp_path / "b")
        assert gc.isenabled()
        assert pool.statistics().leased_nbytes == 0
        assert set(names_in(tmp_path)) <= {"a", "b"}
        if path.exists():
            assert_same(sync.load(path), STATE)
        shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(tmp_path / "b")
    assert point > 100


def test_a_save_that_is_to_be_copied_can_be_interrupted_anywhere(tmp_path: Path) -> None:
    """The copy of the next one does not stand in line behind one that nobody makes."""
    point, went_on = 0, True
    with sync.Engine(CONFIG, ranks="solo", observer=lambda _: None) as engine:
        while went_on:
            point += 1
            near, far = tmp_path / f"near-{point}", tmp_path / f"far-{point}"

            def save(near: Path = near, far: Path = far) -> object:
                return engine.start_save(STATE, near, then=far)

            went_on = interrupt_at(point, save, ("/ckptio/runtime/",))
            next_one = engine.start_save(STATE, tmp_path / "a", then=tmp_path / "b", overwrite=True)
            assert next_one.durable.wait(60).path == str(tmp_path / "b")
    assert point > 20


def test_a_load_can_be_interrupted_anywhere(tmp_path: Path) -> None:
    """No slab is taken then, and the engine goes on."""
    sync.save(STATE, tmp_path / "a")
    point, went_on = 0, True
    while went_on:
        point += 1
        with sync.Engine(CONFIG, ranks="solo") as engine:
            went_on = interrupt_at(point, lambda: engine.load(tmp_path / "a"))
            assert engine.statistics().leased_nbytes == 0
            assert_same(engine.load(tmp_path / "a"), STATE)
        assert gc.isenabled()
    assert point > 100


@pytest.mark.parametrize("face", ["start_save", "start_save to a store", "load"])
def test_a_handler_may_close_the_engine_anywhere(tmp_path: Path, face: str) -> None:
    """Neither waits for the other: who was interrupted goes on, or hears that it is closed.

    A save that began is finished then.
    """
    sync.save(STATE, tmp_path / "a")
    place = f"memory://{tmp_path.name}/b" if face.endswith("store") else str(tmp_path / "b")
    handles: list[Any] = []
    point, went_on = 0, True
    while went_on:
        point += 1
        engine = sync.Engine(CONFIG, ranks="solo").__enter__()

        def call(engine: sync.Engine = engine) -> None:
            with contextlib.suppress(EngineClosedError):
                if face == "load":
                    engine.load(tmp_path / "a")
                else:
                    handles.append(engine.start_save(STATE, place, overwrite=True))

        def close(engine: sync.Engine = engine) -> None:
            engine.__exit__(None, None, None)

        where = ("/ckptio/runtime/", "/ckptio/_outcome", "/asyncio/base_events.py")
        went_on = interrupt_at(point, call, where, close)
        close()
        in_flight = engine._core._in_flight
        assert not {*in_flight._running, *in_flight._handed, *in_flight._refused}
        while handles:
            assert handles.pop().result().path == place
    assert point > 30


def test_an_error_of_a_handler_is_not_taken_for_one_of_the_loop() -> None:
    """Both are a `RuntimeError`; where a handler's was lost, so might be the step."""

    class Unplugged(RuntimeError):  # noqa: N818  # what a handler of a signal may raise
        pass

    def unplug() -> None:
        raise Unplugged

    async def step(_: EngineContext) -> None:
        pass

    point, went_on = 0, True
    where = ("/ckptio/runtime/in_flight.py", "/asyncio/base_events.py")
    core = EngineCore(CONFIG, None, "solo")
    core.start()
    while went_on:
        point += 1
        running: Running[None] = Running()
        try:
            went_on = interrupt_at(
                point, functools.partial(core.submit, step, "step", running), where, unplug
            )
        except Unplugged:
            continue
        if went_on:
            running.end.set_result(None)  # nobody else may: the test is to end
        core.close()
        assert not went_on
    assert point > 5


def test_a_handler_may_ask_for_the_last_save_anywhere(tmp_path: Path) -> None:
    """It saves, and leaves the block: the loop goes on, whatever the handler has stopped."""
    every = ckptio.SaveEvery(steps=9)
    point, went_on = 0, True
    while went_on:
        point += 1
        root = tmp_path / str(point)
        checkpointer = sync.Checkpointer(root, every=every, config=CONFIG, ranks="solo").__enter__()

        def ask(checkpointer: sync.Checkpointer = checkpointer) -> None:
            with contextlib.suppress(EngineClosedError):
                checkpointer.should_save(1)

        def leave(checkpointer: sync.Checkpointer = checkpointer) -> None:
            checkpointer.preempt()
            checkpointer.start_save(STATE, 2).committed.wait(20)
            checkpointer.__exit__(None, None, None)

        where = ("/ckptio/checkpointer/", "/ckptio/runtime/guard.py")
        went_on = interrupt_at(point, ask, where, leave)
        checkpointer.__exit__(None, None, None)
    assert point > 10


def test_a_handler_may_save_wherever_another_save_begins(tmp_path: Path) -> None:
    """Both are known then: what is waited for, what stays, and which was saved last."""
    point, went_on = 0, True
    while went_on:
        point += 1
        goes_on, root = threading.Event(), tmp_path / str(point)

        def watch(_: object, goes_on: threading.Event = goes_on) -> None:
            goes_on.wait(20)

        with sync.Checkpointer(
            root, sweep_after_s=None, keep=ckptio.KeepLast(9), config=CONFIG, observer=watch
        ) as checkpointer:
            upkeep = checkpointer._core.upkeep

            def save(step: int = 1, checkpointer: sync.Checkpointer = checkpointer) -> None:
                checkpointer.start_save(STATE, step)

            def save_more(checkpointer: sync.Checkpointer = checkpointer) -> None:
                checkpointer.start_save(STATE, 2)

            save(0)
            where = ("/ckptio/checkpointer/", "/ckptio/runtime/leaving.py")
            went_on = interrupt_at(point, save, where, save_more)
            steps = {0, 1, 2} if went_on else {0, 1}
            found = [
                {step for step, _ in saves} for saves in (upkeep.steps.saves, upkeep.steps.called)
            ]
            goes_on.set()
            assert found == [steps, steps]
            assert len(upkeep.passes) == len(steps)
    assert point > 20


async def test_a_handler_may_save_wherever_a_step_is_discarded(tmp_path: Path) -> None:
    """On a loop that the main thread has: it stays known which step was saved last."""
    point, went_on = 0, True
    where = ("/ckptio/checkpointer/upkeep.py", "/ckptio/checkpointer/run_steps.py")
    while went_on:
        point += 1
        async with ckptio.Checkpointer(
            tmp_path / str(point), sweep_after_s=None, config=CONFIG, ranks="solo"
        ) as checkpointer:
            core, handles = checkpointer._core, list[Any]()

            def save(
                checkpointer: ckptio.Checkpointer = checkpointer, h: list[Any] = handles
            ) -> None:
                h.append(checkpointer.save(STATE, 2))

            await checkpointer.save(STATE, 1)
            discarding = core.upkeep.discard(core.keeper, 1)

            def begin(discarding: Any = discarding) -> None:
                discarding.send(None)  # until it waits for the storage

            went_on = interrupt_at(point, begin, where, save)
            discarding.close()
            for handle in handles:
                await handle
            assert core.upkeep.steps.last() == (2 if handles else None)
    assert point > 2  # Python 3.12 has no call for a comprehension


def test_a_save_that_a_handler_notes_as_lost_counts_wherever_another_save_looks() -> None:
    """It is one of the next three in a row, if the save that looked did not hear of it."""
    point, went_on = 0, True
    while went_on:
        point += 1
        losses, lost = Losses(), [SaveMoments("a", f"{i:032}") for i in range(4)]
        for moments in lost:
            moments.fail(StorageError("lost", path="a"))
        losses.note(enumerate(lost[:3]))

        def look(losses: Losses = losses) -> None:
            with contextlib.suppress(StorageError):
                losses.check()

        def note(losses: Losses = losses, last: SaveMoments = lost[3]) -> None:
            losses.note([(3, last)])

        went_on = interrupt_at(point, look, ("/ckptio/checkpointer/losses.py",), note)
        assert all(moments.is_settled() for moments in lost[:3])
        assert lost[3].is_settled() or not went_on or [s for s, _ in losses._failed] == [3]
        lost[3].seen()
    assert point > 3


def test_a_handler_may_hear_of_lost_saves_wherever_another_save_looks() -> None:
    """Whoever comes second says the same, or nothing."""
    point, went_on = 0, True
    while went_on:
        point += 1
        losses, lost = Losses(), [SaveMoments("a", "0" * 32) for _ in range(3)]
        for moments in lost:
            moments.fail(StorageError("lost", path="a"))
        losses.note(enumerate(lost))

        def look(losses: Losses = losses) -> None:
            with contextlib.suppress(StorageError):
                losses.check()

        went_on = interrupt_at(point, look, ("/ckptio/checkpointer/losses.py",), look)
    assert point > 5


def test_an_alarm_in_a_load_is_no_damage(tmp_path: Path) -> None:
    """Who falls back to an older step when a manifest is damaged does not for an alarm."""
    sync.save({"a": {"b": [STATE, (1, 2)]}}, tmp_path / "a")
    point, went_on = 0, True
    where = ("/ckptio/format/", "/ckptio/state/rebuild.py")

    def ring() -> None:
        raise TimeoutError

    with sync.Engine(CONFIG, ranks="solo") as engine:
        while went_on:
            point += 1
            went_on = False
            try:
                interrupt_at(point, lambda: engine.load(tmp_path / "a"), where, ring)
            except TimeoutError:
                went_on = True
    assert point > 20


def test_garbage_is_collected_again_wherever_an_interrupt_comes() -> None:
    """Also inside of another call; and where somebody keeps the interrupt, with all its frames."""
    kept: list[BaseException] = []

    def run() -> None:
        paused = without_collection(without_collection(gc.isenabled))
        try:
            assert not paused()
        except KeyboardInterrupt as interrupt:
            kept.append(interrupt)
            raise
        assert gc.isenabled()

    point = 1
    while interrupt_at(point, run, ("/ckptio/_gc.py", "/contextlib.py")):
        assert gc.isenabled()
        assert not _pauses
        point += 1
    assert point > 5
    assert kept


def test_no_thread_is_started_where_an_interrupt_may_come(tmp_path: Path) -> None:
    """What it leaves locked in Python's own `start` is what every thread of the process needs."""
    started: list[str] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if event == "call" and frame.f_code is threading.Thread.start.__code__ and frame.f_back:
            started.append(frame.f_back.f_code.co_qualname)

    async def in_loop() -> None:
        async with Engine(CONFIG, ranks="solo") as engine:
            await engine.save(STATE, tmp_path / "d")
        await ckptio.save(STATE, tmp_path / "e", ranks="solo")
        assert wait_for(asyncio.sleep(0, "slept")) == "slept"

    sys.setprofile(look)
    try:
        sync.save(STATE, tmp_path / "a")
        sync.load(tmp_path / "a")
        with sync.Engine(CONFIG) as engine:
            engine.start_save(STATE, tmp_path / "b", then=tmp_path / "far").durable.wait()
        asyncio.run(in_loop())
        ckptio.save(STATE, tmp_path / "c", ranks="solo").committed.wait()
    finally:
        sys.setprofile(None)
    assert started == []


def test_an_interrupt_ends_what_is_waited_for_inside_of_a_loop() -> None:
    """The plug-ins of torch.distributed.checkpoint wait so: what they began is undone by then."""
    ended: list[str] = []
    begun = threading.Event()

    async def slow() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("undone")

    def handle(*_: object) -> None:
        raise KeyboardInterrupt

    async def train() -> None:
        signaller = signal_to(begun.wait)
        with pytest.raises(KeyboardInterrupt):
            wait_for(slow())
        signaller.join()
        assert ended == ["undone"]

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        asyncio.run(train())
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("face", ["run", "run_aside"])
def test_no_interrupt_leaves_a_guard_locked(face: str) -> None:
    """Who comes then does not wait; and a handler of a signal does not wait for what it stopped."""
    ran: list[str] = []
    guard, point = Guard(), 1

    def call() -> None:
        guard.run(lambda: ran.append("inner"))

    def run() -> None:
        if face == "run":
            guard.run(call)
        else:  # on a loop that the main thread has
            with contextlib.suppress(StopIteration):
                guard.run_aside(call).send(None)
        ran.append("outer")

    while interrupt_at(point, run, ("/ckptio/runtime/guard.py",)):
        other = threading.Thread(target=guard.run, args=(lambda: ran.append("other"),), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive()
        assert ran.pop() == "other"
        assert "outer" not in ran
        point += 1
    assert point > 5
    assert ran[-2:] == ["inner", "outer"]


def test_a_handler_waits_for_the_guard_of_another_thread() -> None:
    """Where its own thread waits for that, too, or has just released it."""
    guard, seen, goes_on = Guard(), [], threading.Event()

    def hold() -> None:
        seen.append("in")
        assert goes_on.wait(10)
        seen.append("out")

    def handle(*_: object) -> None:
        goes_on.set()
        guard.run(lambda: seen.append("handler"))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        other = threading.Thread(target=guard.run, args=(hold,))
        other.start()
        wait_until(lambda: bool(seen))
        main = threading.get_ident()
        signaller = signal_to(lambda: wait_until(lambda: is_at_guard(main)))
        guard.run(lambda: seen.append("main"))
        signaller.join()
        other.join(10)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == ["in", "out", "handler", "main"]


def test_a_guard_lets_one_thread_in() -> None:
    guard, goes_on, seen = Guard(), threading.Event(), []

    def first() -> None:
        seen.append("in")
        assert goes_on.wait(10)
        seen.append("out")

    threads = [
        threading.Thread(target=guard.run, args=(call,))
        for call in (first, lambda: seen.append("2"))
    ]
    threads[0].start()
    wait_until(lambda: bool(seen))
    threads[1].start()
    wait_until(lambda: is_at_guard(threads[1].ident) or not threads[1].is_alive())
    goes_on.set()
    for thread in threads:
        thread.join(10)
    assert seen == ["in", "out", "2"]


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_whatever_ends_what_no_interrupt_reaches_is_raised(kind: type[BaseException]) -> None:
    """To whoever waits for it, who would wait for ever."""
    raised: list[BaseException] = []

    def fail() -> None:
        raise kind

    def wait() -> None:
        try:
            run_uninterrupted(fail, "test", lambda: None)
        except BaseException as error:  # it is what is looked at
            raised.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(10)
    assert [type(error) for error in raised] == [kind]


def test_what_no_interrupt_reaches_is_run_here_where_no_thread_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the interpreter ends: whoever waits for it would wait for ever."""
    ran: list[int] = []

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def wait() -> None:
        run_uninterrupted(lambda: ran.append(threading.get_ident()), "test", lambda: None)

    waiter = threading.Thread(target=wait, daemon=True)
    monkeypatch.setattr("ckptio.runtime.aside.start_new_thread", refuse)
    waiter.start()
    waiter.join(10)
    assert ran == [waiter.ident]


def test_what_no_interrupt_reaches_is_run_here_where_its_thread_ends_as_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the process may have no more memory: Python gives a thread, which does nothing."""
    ran: list[int] = []

    def wait() -> None:
        run_uninterrupted(lambda: ran.append(threading.get_ident()), "test", lambda: None)

    waiter = threading.Thread(target=wait, daemon=True)
    monkeypatch.setattr("ckptio.runtime.aside.start_new_thread", lambda *_: None)
    monkeypatch.setattr("ckptio.runtime.aside._TURN_S", 0.001)
    waiter.start()
    waiter.join(10)
    assert ran == [waiter.ident]


def test_a_thread_that_had_no_turn_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time has passed, but another thread had the interpreter, or the process was stopped."""
    ran: list[int] = []
    waits_again = threading.Event()

    class Late:
        """A lock, and the first time that somebody waits for it is over as it begins."""

        num_waits = 0

        def __init__(self) -> None:
            self._lock = threading.Lock()
            self.release = self._lock.release

        def acquire(self, *, blocking: bool = True, timeout: float = -1) -> bool:
            if timeout >= 0:
                Late.num_waits += 1
                if Late.num_waits == 1:
                    return False
                waits_again.set()
            return self._lock.acquire(blocking, timeout)

    def start(function: Callable[..., object], args: tuple[object, ...]) -> int:
        return start_new_thread(lambda: waits_again.wait(10) and function(*args), ())

    seen = SimpleNamespace(Lock=Late, Thread=threading.Thread)
    monkeypatch.setattr("ckptio.runtime.aside.threading", seen)
    monkeypatch.setattr("ckptio.runtime.aside.start_new_thread", start)
    monkeypatch.setattr("ckptio.runtime.aside._TURN_S", 10)
    run_uninterrupted(lambda: ran.append(threading.get_ident()), "test", lambda: None)
    assert len(ran) == 1
    assert ran != [threading.get_ident()]


def test_a_thread_that_no_interrupt_reaches_is_begun() -> None:
    """Another one than the main, also where an interrupt comes to Python's own threading."""
    ran: list[threading.Thread] = []
    point, where = 1, ("/ckptio/runtime/aside.py", "/threading.py")

    def run() -> None:
        run_uninterrupted(lambda: ran.append(threading.current_thread()), "test", lambda: None)

    while interrupt_at(point, run, where):
        point += 1
    assert point > 5
    assert point - 5 < len(ran) <= point  # but where it had not come to that
    assert {thread.name for thread in ran} == {"test"}


def _block(path: Path) -> None:
    with sync.Engine(CONFIG, ranks="solo") as engine:
        engine.start_save(STATE, path / "a")


def _steps(path: Path) -> None:
    with sync.Checkpointer(path, config=CONFIG, ranks="solo") as checkpointer:
        checkpointer.save(STATE, 1)
        checkpointer.start_save(STATE, 2)


def _loop_block(path: Path) -> None:
    async def train() -> None:
        async with Engine(CONFIG, ranks="solo") as engine:
            await engine.save(STATE, path / "a")
            await engine.load(path / "a")

    asyncio.run(train())


@pytest.mark.parametrize(
    ("run", "stride", "where"),
    [(_block, 1, _OURS), (_steps, 3, _OURS), (_loop_block, 7, _BESIDE_LOOP)],
)
def test_a_block_can_be_interrupted_anywhere(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    run: Callable[[Path], None],
    stride: int,
    where: tuple[str, ...],
) -> None:
    """It ends, and no thread is left but where the interrupt came before it began to end."""
    caplog.set_level(logging.CRITICAL)  # a save that was aborted says so
    path = tmp_path / "run"
    run(path)
    num_threads, num_left, point = threading.active_count(), 0, 1
    shutil.rmtree(path)
    while interrupt_at(point, lambda: run(path), where):
        num_now = threading.active_count()
        num_left += num_now > num_threads
        num_threads = num_now
        if path.exists():
            for name in names_in(path):
                with contextlib.suppress(CheckpointNotFoundError):
                    assert_same(sync.load(path / name), STATE)
        shutil.rmtree(path, ignore_errors=True)
        point += stride
    gc.collect()  # what was left open ends here, not in another test
    assert point > 100
    assert num_left <= 4
