from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

import ckptio
import ckptio.sync
from ckptio._aio import run_blocking
from ckptio._outcome import Outcome
from ckptio.engine.context import wait_for_all
from ckptio.errors import (
    CheckpointNotFoundError,
    ConfigError,
    EngineClosedError,
    SaveAbortedError,
    StateError,
    StorageError,
)
from ckptio.events import SaveStaged
from ckptio.runtime.aside import run_uninterrupted
from ckptio.runtime.core import EngineCore
from ckptio.runtime.in_flight import InFlight
from ckptio.runtime.running import Running
from ckptio.runtime.solo import solo_engine
from ckptio.staging.cuda import PendingCopies
from ckptio.testing import EventLog, MemoryStorage, RecordingFiles, fail_kind
from tests.rig import (
    SMALL,
    FilesCore,
    StorageCore,
    assert_same,
    assert_tidy,
    config_with,
    engine_on,
    filled_state,
    random_state,
    told_of_abort,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from pathlib import Path

    from ckptio.engine.context import EngineContext
    from ckptio.events import Event
    from ckptio.handle import SaveHandle
    from ckptio.testing import Operation

BIG_BLOCKS = config_with(block_nbytes=64 * 1024)
pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")


class Left(Exception):  # noqa: N818  # no error: a way out
    """An engine's block is left by an exception."""


class Gate:
    """Holds a storage at the first write of data until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    async def __aenter__(self) -> None:
        """Open it at the end of a block whatever happens: a test that fails must not hang."""

    async def __aexit__(self, *_: object) -> None:
        self.opened.set()

    def __call__(self, operation: Operation) -> None:
        if operation.kind == "pwrite" and "data-" in operation.path:
            self.reached.set()
            self.opened.wait()


async def test_a_step_runs_on_the_engines_own_thread(core: EngineCore) -> None:
    """Its result comes to whichever loop or thread asked."""

    async def where(_: EngineContext) -> int:
        return threading.get_ident()

    here = threading.get_ident()
    assert await core.call(where, "where") != here
    assert core.call_blocking(where, "where") != here


async def test_a_steps_error_reaches_the_caller(core: EngineCore) -> None:
    """As itself."""

    async def fail(_: EngineContext) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await core.call(fail, "fail")
    with pytest.raises(ZeroDivisionError):
        core.call_blocking(fail, "fail")


async def test_a_cancelled_caller_waits_for_the_step_to_end(core: EngineCore) -> None:
    """The step is cancelled over there, cleans up, and only then the caller leaves."""
    begun = threading.Event()
    ended = []

    async def step(_: EngineContext) -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for _turn in range(10):
                await asyncio.sleep(0)
            ended.append(True)

    task = asyncio.create_task(core.call(step, "step"))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_a_step_aborted_before_its_start_ends_at_its_first_await(core: EngineCore) -> None:
    """However early it is told."""
    for _ in range(50):

        async def step(_: EngineContext) -> None:
            await asyncio.get_running_loop().create_future()

        running = core.submit(step, "step")
        running.abort()
        running.abort()
        await asyncio.to_thread(running.wait_ended)
        assert isinstance(running.end.exception(), asyncio.CancelledError)


@pytest.mark.parametrize("is_left", [False, True])
async def test_a_step_that_fails_as_it_is_aborted_says_why(
    core: EngineCore, *, is_left: bool
) -> None:
    """What went wrong counts for more than that somebody had it stopped."""
    begun = threading.Event()

    async def step(_: EngineContext) -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise OSError("unplugged")

    running = core.submit(step, "step")
    await asyncio.to_thread(begun.wait)
    if is_left:
        core.abort_in_flight()
    else:
        running.abort()
    with pytest.raises(OSError, match="unplugged"):
        await running.end.wrapped()


def test_an_engine_is_entered_once() -> None:
    """Before, after, and twice: a typed error."""
    core = EngineCore(SMALL, None)
    with pytest.raises(EngineClosedError):
        _ = core.context
    core.start()
    with pytest.raises(EngineClosedError):
        core.start()
    core.close()
    core.close()
    with pytest.raises(EngineClosedError):
        core.storage("x")
    with pytest.raises(EngineClosedError):
        core.start()


@pytest.mark.parametrize("error", [ConfigError("nobody came"), asyncio.CancelledError()])
def test_an_engine_that_meets_nobody_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Whether it waited in vain, or was told to give up (the fixture looks)."""

    async def wait_in_vain(_ranks: object, _config: object, executor: Executor) -> None:
        await run_blocking(executor, threading.get_ident)
        raise error

    monkeypatch.setattr("ckptio.runtime.core.meet_ranks", wait_in_vain)
    core = EngineCore(SMALL, None)
    with pytest.raises((ConfigError, CancelledError)):
        core.start()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_engine_that_is_to_meet_nobody_any_more_gives_up(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Whether it was told so before it began to, or as it waits for them."""
    begun = threading.Event()

    async def wait(*_: object) -> None:
        begun.set()
        async with asyncio.timeout(10):
            await asyncio.get_running_loop().create_future()

    def stop() -> None:
        begun.wait(10)
        core.stop_starting()

    monkeypatch.setattr("ckptio.runtime.core.meet_ranks", wait)
    core = EngineCore(SMALL, None)
    stopper = threading.Thread(target=stop)
    if when == "before":
        core.stop_starting()
    else:
        stopper.start()
    with pytest.raises(CancelledError):
        core.start()
    if when == "meanwhile":
        stopper.join()


def test_an_engine_whose_start_was_interrupted_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came up all the same, and its block is not entered: nobody would leave that."""

    def interrupted(*args: Any) -> None:
        run_uninterrupted(*args)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptio.runtime.core.run_uninterrupted", interrupted)
    core = EngineCore(SMALL, None)
    with pytest.raises(KeyboardInterrupt):
        core.start()
    with pytest.raises(EngineClosedError):
        _ = core.context


async def test_a_step_that_an_interrupt_had_handed_over_twice_runs_once(core: EngineCore) -> None:
    """Of two tasks for it, the second does nothing."""
    running: Running[None] = Running()
    ran: list[object] = []

    async def step(context: EngineContext) -> None:
        ran.append(context)

    for _ in range(2):
        task = InFlight().run(step, core.context, running)
        await asyncio.create_task(task)
    assert ran == [core.context]


def test_an_interrupt_of_a_blocking_call_stops_its_step_first(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step cleans up, and only then the caller leaves."""
    begun = threading.Event()
    ends: list[type[BaseException]] = []

    class InterruptedEnd(Outcome[Any]):
        def result(self) -> NoReturn:
            assert begun.wait(10)
            raise KeyboardInterrupt

    class InterruptedRunning(Running[Any]):
        def __init__(self) -> None:
            super().__init__()
            self.end = InterruptedEnd()

    async def step(_: EngineContext) -> None:
        begun.set()
        try:
            async with asyncio.timeout(10):
                await asyncio.get_running_loop().create_future()
        except BaseException as error:
            for _turn in range(1000):
                await asyncio.sleep(0)
            ends.append(type(error))
            raise

    monkeypatch.setattr("ckptio.runtime.core.Running", InterruptedRunning)
    with pytest.raises(KeyboardInterrupt):
        core.call_blocking(step, "step")
    assert ends == [asyncio.CancelledError]


def test_a_step_that_comes_behind_an_abort_is_stopped(core: EngineCore) -> None:
    """Whoever closes the engine waits for it: it may not take its time."""

    async def step(_: EngineContext) -> None:
        await asyncio.get_running_loop().create_future()

    core.abort_in_flight()
    running = core.submit(step, "step")
    try:
        assert running.end.wait(10)
        assert isinstance(running.end.exception(), EngineClosedError)
    finally:
        running.abort()


def test_whoever_leaves_a_closed_engine_is_on_no_thread_of_it() -> None:
    """The system gives the number of a thread that has ended to another one."""
    core = EngineCore(SMALL, None)
    core.require_elsewhere()
    core.start()
    core.close()
    core.loop_thread.number = threading.get_ident()
    core.require_elsewhere()
    core.require_other_loop()


async def test_closing_waits_for_what_is_in_flight(tmp_path: Path) -> None:
    """Leaving the engine's block ends when the last save is committed."""
    state = random_state([100_000])
    async with ckptio.Engine(SMALL) as engine:
        handles = [engine.save(state, tmp_path / str(i)) for i in range(4)]
    assert all(handle.done() for handle in handles)
    assert_same(await ckptio.load(tmp_path / "3"), state)


@pytest.mark.parametrize("part", ["ranks", "stores"])
def test_what_cannot_be_closed_keeps_no_engine_from_its_end(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The error comes out; threads and loop have ended (the fixture looks)."""
    core = EngineCore(SMALL, None)
    core.start()
    cls = type(getattr(core.context, part))
    close = cls.close

    async def fail(self: Any) -> None:
        await close(self)
        raise RuntimeError("the session is broken")

    monkeypatch.setattr(cls, "close", fail)
    with pytest.raises(RuntimeError, match="the session is broken"):
        core.close()
    with pytest.raises(EngineClosedError):
        core.start()


async def test_leaving_by_an_error_aborts_what_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes out; nothing of the saves is left, and the checkpoint before is whole."""
    old = filled_state([1000], 1)
    path = tmp_path / "c"
    await ckptio.save(old, path)
    gate = Gate()
    gate.opened = told_of_abort(monkeypatch)
    files = RecordingFiles(gate)
    with pytest.raises(ZeroDivisionError):
        async with engine_on(FilesCore(SMALL, None, files)) as engine:
            handle = engine.save(filled_state([100_000], 2), path, overwrite=True)
            gate.reached.wait()
            _ = 1 // 0
    assert isinstance(handle.committed.error(), SaveAbortedError)
    assert files.num_open == 0
    assert_tidy(path)
    assert_same(await ckptio.load(path), old)


async def test_a_failed_save_that_nobody_awaited_surfaces(tmp_path: Path) -> None:
    """Leaving the block raises its error; if somebody saw it, it does not."""
    files = RecordingFiles(fail_kind("fsync"))
    with pytest.raises(StorageError):
        async with engine_on(FilesCore(SMALL, None, files)) as engine:
            engine.save(random_state([10]), tmp_path / "a")
    async with engine_on(FilesCore(SMALL, None, files)) as engine:
        with pytest.raises(StorageError):
            await engine.save(random_state([10]), tmp_path / "a")
    with pytest.raises(ZeroDivisionError):  # the error of the block goes first
        async with engine_on(FilesCore(SMALL, None, files)) as engine:
            engine.save(random_state([10]), tmp_path / "a").committed.wait_done()
            _ = 1 // 0
    assert not (tmp_path / "a").exists()


async def test_an_aborted_save_does_not_surface(tmp_path: Path) -> None:
    """Who aborted knows."""
    gate = Gate()
    core = FilesCore(SMALL, None, RecordingFiles(gate))
    async with engine_on(core) as engine, gate:
        handle = engine.save(random_state([10]), tmp_path / "a")
        await asyncio.to_thread(gate.reached.wait)
        handle.abort()
        gate.opened.set()
    assert handle.done()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [None, "all", ""])
@pytest.mark.parametrize("make", [ckptio.Engine, ckptio.sync.Engine])
def test_ranks_that_are_none_are_refused(make: Callable[..., object], ranks: object) -> None:
    """When the engine is made: `None` names nobody, neither this rank nor all."""
    with pytest.raises(ConfigError, match="ranks= is 'auto', 'solo' or a process group, not"):
        make(SMALL, ranks=ranks)


async def test_an_observer_that_raises_is_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every event fails, and the save and the load do not."""
    told: list[Event] = []

    def broken(event: Event) -> None:
        told.append(event)
        raise ValueError("broken bar")

    state = random_state([100_000, 5])
    async with ckptio.Engine(SMALL, observer=broken) as engine:
        await engine.save(state, tmp_path / "c")
        assert_same(await engine.load(tmp_path / "c"), state)
    assert len(told) > 5
    assert caplog.text.count("the observer raised") == len(told)


async def _ignore(event: object) -> None:
    """Take an event, if somebody awaits it."""


class _Awaitable:
    async def __call__(self, event: object) -> None:
        """Take an event, if somebody awaits it."""


@pytest.mark.parametrize("observer", [3, _ignore, _Awaitable()])
def test_an_observer_that_nobody_would_await_is_refused(observer: Any) -> None:
    """It would be told nothing."""
    with pytest.raises(ckptio.ConfigError, match="plain function"):
        ckptio.Engine(SMALL, observer=observer)


async def test_an_observer_cannot_wait_for_its_own_engine(tmp_path: Path) -> None:
    """On the engine's thread it is refused instead of waiting for ever; what is done is given."""
    ready = threading.Event()
    handles: list[SaveHandle] = []
    refused: list[str] = []
    given: list[object] = []

    def watch(event: Event) -> None:
        if isinstance(event, SaveStaged):
            ready.wait()
            (handle,) = handles
            for wait in (handle.result, handle.committed.wait, handle.durable.wait):
                try:
                    wait(0.1)
                except (ConfigError, TimeoutError) as error:
                    refused.append(str(error))
            for give in (handle.staged.wait, handle.submitted.wait, handle.fence):
                give()
                given.append(give)

    async with ckptio.Engine(SMALL, observer=watch) as engine:
        handles.append(engine.save({"w": torch.zeros(3)}, tmp_path / "c"))
        ready.set()
        await handles[0]
    assert ["own thread" in why for why in refused] == [True] * 3
    assert len(given) == 3


async def test_an_observer_cannot_save_with_its_own_engine(tmp_path: Path) -> None:
    """Nothing begins, and nothing is kept of it."""
    num_kept: list[int] = []

    def save(event: Event) -> None:
        if isinstance(event, SaveStaged):
            before = len(engine._core.saves)
            with pytest.raises(ConfigError, match="own thread"):
                engine.save({"w": torch.zeros(3)}, tmp_path / "d")
            num_kept.append(len(engine._core.saves) - before)

    async with ckptio.Engine(SMALL, observer=save) as engine:
        await engine.save({"w": torch.zeros(3)}, tmp_path / "c")
    assert num_kept == [0]
    assert not (tmp_path / "d").exists()


async def test_two_real_saves_keep_their_own_contents(tmp_path: Path) -> None:
    """The source changes after each is staged, while the disk still writes."""
    sizes = [100_000, 30_000, 7]
    log = EventLog()
    gate = Gate()
    state = filled_state(sizes, 0)
    async with engine_on(FilesCore(SMALL, log, RecordingFiles(gate))) as engine, gate:
        handles = []
        for value in range(3):
            for tensor in state.values():
                tensor.fill_(value)
            handles.append(engine.save(state, tmp_path / str(value)))
            if value == 2:  # a third waits for a place
                assert not handles[2].staged.done()
                gate.opened.set()
            await handles[-1].staged
            for tensor in state.values():
                tensor.fill_(99)
        for handle in handles:
            await handle
        for value in range(3):
            assert_same(await engine.load(tmp_path / str(value)), filled_state(sizes, value))
    assert log.kinds().count("SaveQueued") == 1


async def test_real_memory_is_reused(tmp_path: Path) -> None:
    """Ten times the pool flows through it, and the second save allocates nothing."""
    state = random_state([SMALL.pool_nbytes * 6, SMALL.pool_nbytes * 4])
    async with ckptio.Engine(SMALL) as engine:
        await engine.prewarm()
        assert engine.statistics().num_allocations == SMALL.num_slabs
        for _ in range(2):
            await engine.save(state, tmp_path / "c", overwrite=True)
        statistics = engine.statistics()
        assert statistics.num_allocations == SMALL.num_slabs
        assert statistics.peak_leased_nbytes <= SMALL.pool_nbytes
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        await engine.load(tmp_path / "c", into=target)
        assert_same(target, state)
        assert engine.statistics().leased_nbytes == 0


@pytest.mark.parametrize("way", ["cancel", "abort", "leave"])
async def test_stopping_real_saves_at_any_moment_leaves_nothing(tmp_path: Path, way: str) -> None:
    """At each operation in turn: no task, thread, file or slab is left; the old one is whole."""
    await stop_everywhere(tmp_path, way)


@pytest.mark.stress
@pytest.mark.parametrize("turn", range(10))
@pytest.mark.parametrize("way", ["cancel", "abort", "leave"])
async def test_stopping_real_saves_at_every_moment_leaves_nothing(
    tmp_path: Path, way: str, turn: int
) -> None:
    """The same with larger states."""
    await stop_everywhere(tmp_path, way, nbytes=100_000 * (1 + turn))


async def stop_everywhere(tmp_path: Path, way: str, *, nbytes: int = 60_000) -> None:
    """Stop a save while it stands before its operation k, for all k, until it is through."""
    old, new = filled_state([1000, nbytes], 1), filled_state([nbytes, 10], 2)
    path = tmp_path / "c"
    await ckptio.save(old, path, config=BIG_BLOCKS)
    for number in itertools.count():
        files = RecordingFiles()
        handle, finished = await stop_at(number, way, files, new, path)
        assert files.num_open == 0
        error = handle.committed.error()
        assert error is None or isinstance(error, SaveAbortedError)
        assert_same(await ckptio.load(path, config=BIG_BLOCKS), old if error else new)
        assert_tidy(path)
        if finished:
            assert number > 20
            return
        if error is None:
            await ckptio.save(old, path, overwrite=True, config=BIG_BLOCKS)


async def stop_at(
    number: int,
    way: str,
    files: RecordingFiles,
    state: dict[str, torch.Tensor],
    path: Path,
) -> tuple[ckptio.SaveHandle, bool]:
    """Stop a save before one operation; give its handle, and whether it was through by then."""
    reached, opened = threading.Event(), threading.Event()

    def hold(operation: Operation) -> None:
        if operation.number == number:
            reached.set()
            opened.wait()

    files.fault = hold
    with contextlib.suppress(Left):
        async with engine_on(FilesCore(BIG_BLOCKS, None, files)) as engine:
            handle = engine.save(state, path, overwrite=True)
            waiter = asyncio.create_task(wait_for(handle))
            stopper = asyncio.create_task(asyncio.to_thread(reached.wait))
            await asyncio.wait((waiter, stopper), return_when=asyncio.FIRST_COMPLETED)
            finished = not reached.is_set()
            reached.set()
            await stopper
            if way == "abort":
                handle.abort()
            elif way == "cancel":
                waiter.cancel()
            await asyncio.sleep(0)
            # the engine cannot be left before the operation ends, so it ends a little later
            threading.Thread(target=opened.set).start()
            if way == "leave":
                raise Left
            await asyncio.wait((waiter,))
            assert engine.statistics().leased_nbytes == 0
    await asyncio.wait((waiter,))
    if not waiter.cancelled():
        waiter.exception()
    return handle, finished


async def wait_for(handle: ckptio.SaveHandle) -> None:
    await handle


async def test_many_loops_share_an_engine() -> None:
    """Threads with loops of their own, and threads without, use one engine at once."""
    state = random_state([50_000, 3])
    storages = {f"m{i}": MemoryStorage(f"m{i}") for i in range(6)}
    core = StorageCore(config_with(max_saves=3), None, storages)
    failures: list[BaseException] = []
    async with engine_on(core) as engine:
        blocking = ckptio.sync.Engine(core.config)
        blocking._core = core

        async def use(path: str) -> None:
            await engine.save(state, path)
            assert_same(await engine.load(path), state)

        def run(number: int) -> None:
            try:
                if number % 2:
                    asyncio.run(use(f"m{number}"))
                else:
                    blocking.save(state, f"m{number}")
                    assert_same(blocking.load(f"m{number}"), state)
            except BaseException as error:  # looked at below
                failures.append(error)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert failures == []


async def test_a_cancelled_exit_aborts_what_is_in_flight(tmp_path: Path) -> None:
    """Who is cancelled while the engine waits for a save does not wait for its commit."""
    files = RecordingFiles()
    reached, opened = threading.Event(), threading.Event()

    def hold(operation: Operation) -> None:
        if operation.kind == "fsync":
            reached.set()
            opened.wait()

    files.fault = hold
    handles: list[ckptio.SaveHandle] = []

    async def use() -> None:
        async with engine_on(FilesCore(BIG_BLOCKS, None, files)) as engine:
            handles.append(engine.save(filled_state([60_000], 1), tmp_path / "c"))
            await handles[0].staged
            await asyncio.to_thread(reached.wait)
            leaving.set()

    leaving = asyncio.Event()
    task = asyncio.create_task(use())
    await leaving.wait()  # `use` is in the engine's exit then, which waits for the save
    task.cancel()
    await asyncio.sleep(0)
    opened.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(SaveAbortedError):
        await handles[0]
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["pwrite", "fsync", "publish"])
async def test_a_failure_keeps_its_cause(tmp_path: Path, kind: str) -> None:
    """What the system said is the cause of what the save raises."""
    files = RecordingFiles()

    def refuse(operation: Operation) -> None:
        if operation.kind == kind:
            raise OSError(errno.ENOSPC, "no room")

    files.fault = refuse
    async with engine_on(FilesCore(BIG_BLOCKS, None, files)) as engine:
        with pytest.raises(StorageError, match="no room") as caught:
            await engine.save(filled_state([60_000], 1), tmp_path / "c")
    assert type(caught.value.__cause__) is OSError
    assert caught.value.errno == errno.ENOSPC


def test_aborting_a_step_that_waits_for_nothing_does_not_end_the_engine(core: EngineCore) -> None:
    """Before it has begun, while it runs, and just when it ends."""
    runs: list[Running[int]] = []

    async def step(_: EngineContext) -> int:
        if runs:
            runs.pop().abort()  # the loop comes to that when the step has ended
        return 1

    early: Running[int] = Running()
    early.abort()
    core.submit(step, "aborted before", early)
    early.wait_ended()
    assert early.end.result() == 1
    for _ in range(100):
        late: Running[int] = Running()
        runs.append(late)
        core.submit(step, "aborted at the end", late)
        assert late.end.result() == 1
        racing: Running[int] = Running()
        core.submit(step, "aborted from another thread", racing)
        racing.abort()
        racing.wait_ended()
        assert core.call_blocking(step, "another") == 1


def test_a_step_that_is_aborted_again_goes_on_with_its_end(core: EngineCore) -> None:
    """It is cancelled once: what it does then has to be done."""
    cleans, ended = threading.Event(), list[bool]()
    may_end = asyncio.Event()

    async def step(_: EngineContext) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleans.set()
            await may_end.wait()
            ended.append(True)

    async def let_end(_: EngineContext) -> None:
        may_end.set()

    running: Running[None] = Running()
    core.submit(step, "aborted twice", running)
    running.abort()
    assert cleans.wait(60)
    running.abort()
    core.call_blocking(let_end, "let it end")
    running.wait_ended()
    assert ended


def test_a_closed_engine_has_given_its_memory_back(core: EngineCore) -> None:
    """Whoever still refers to it; and what was pinned is unpinned."""
    pool = core.context.pool
    core.call_blocking(lambda _: pool.prewarm(), "prewarm")
    assert pool.statistics().taken_nbytes > 0
    core.close()
    assert pool.statistics().taken_nbytes == 0


def test_the_engine_of_one_call_is_closed_where_that_fails() -> None:
    with pytest.raises(ZeroDivisionError), solo_engine(SMALL) as core:
        raise ZeroDivisionError
    with pytest.raises(EngineClosedError):
        _ = core.context


def test_devices_are_waited_for_though_one_has_failed() -> None:
    """A slab that another still reads from must not go back; the first failure is raised."""
    waited: list[str] = []

    class Copies(PendingCopies):
        def __init__(self, name: str, *, fails: bool) -> None:
            super().__init__(())
            self.name, self.fails = name, fails

        def wait(self) -> None:
            waited.append(self.name)
            if self.fails:
                raise StateError(self.name)

    pending = [Copies("a", fails=False), Copies("b", fails=True), Copies("c", fails=True)]
    with pytest.raises(StateError, match="b"):
        wait_for_all([*pending, Copies("d", fails=False)])
    assert waited == ["a", "b", "c", "d"]


async def test_an_error_says_what_is_at_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    """Nothing, something else, files of torch.save, or a run with checkpoints below."""
    said = {
        "none": "there is nothing here",
        "else": "there is no committed checkpoint here: ",
        "files": "loaded file by file, as 'model_0.pt'",
        "run": "but below, as 'step-12'",
    }
    for name in ("else", "files", "else/epoch=1.ckpt"):
        (tmp_path / name).mkdir()
    for name in ("step_0.pt", "model_0.pt", "notes.txt"):
        torch.save({}, tmp_path / "files" / name)
    async with ckptio.Engine(SMALL) as engine:
        for step in (7, 12, 1):
            await engine.save({"t": torch.ones(3)}, tmp_path / "run" / f"step-{step}")
        for name, text in said.items():
            with pytest.raises(CheckpointNotFoundError, match=text):
                await engine.load(tmp_path / name)
