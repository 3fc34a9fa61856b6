"""Copies that a device does later: what they read and write stays as it is until they are done.

A device is played here: it does each copy some time after it was told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

import ckptio.sync
from ckptio.config import PAGE_NBYTES, KiB
from ckptio.engine import lanes
from ckptio.engine.landing import check_into
from ckptio.errors import (
    CheckpointExistsError,
    CorruptionError,
    SaveAbortedError,
    StateError,
    StorageError,
    UnsupportedLeafError,
)
from ckptio.staging import pool
from ckptio.staging.copy import SourceState, TargetState
from ckptio.staging.pool import CopiesLostError, SlabPool
from ckptio.testing import MemoryStorage, RecordingFiles
from tests.job_rig import job
from tests.rig import SMALL, FilesCore, assert_same, config_with, inline_engine, random_state
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from ckptio.staging.pool import Slab
    from ckptio.testing import Operation

STATE = [9 * SMALL.slab_nbytes, 3 * SMALL.slab_nbytes]


class Device:
    """Does what it is told when somebody waits for it.

    Args:
        monkeypatch: Lets gathering and scattering go through the device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_told = self.num_done = 0
        self.waits = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        gather, scatter = SourceState.gather, TargetState.scatter

        def gather_later(source: SourceState, segment: Any, slab: Slab, pending: list[Any]) -> None:
            gather(source, segment, slab, pending)
            with slab.view[: segment.nbytes] as room:
                data = bytes(room)
                room[:] = b"\xaa" * len(room)
            pending.append(self.told(lambda: put(slab, data)))

        def scatter_later(
            target: TargetState, blocks: Any, memory: Slab, pending: list[Any]
        ) -> None:
            pending.append(self.told(lambda: scatter(target, blocks, memory, [])))

        monkeypatch.setattr(SourceState, "gather", gather_later)
        monkeypatch.setattr(TargetState, "scatter", scatter_later)
        monkeypatch.setattr(TargetState, "is_async", True)

    def told(self, work: Callable[[], None]) -> Device.Copies:
        self.num_told += 1
        return Device.Copies(self, work)

    class Copies:
        """See `staging.cuda.PendingCopies`."""

        def __init__(self, device: Device, work: Callable[[], None]) -> None:
            self._device = device
            self._work = work

        def wait(self) -> None:
            """Do them, after a while."""
            self._device.waits.set()
            assert self._device.may_go_on.wait(60)
            threading.Event().wait(0.002)
            self._work()
            self._device.num_done += 1


def put(slab: Slab, data: bytes) -> None:
    with slab.view[: len(data)] as room:
        room[:] = data


async def test_what_a_device_copies_is_written_and_read_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is summed or written before its copy is done, and no slab read into before."""
    device = Device(monkeypatch)
    state = random_state(STATE)
    async with inline_engine({"memory": MemoryStorage()}) as engine:
        await engine.save(state, "memory")
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        await engine.load("memory", into=target)
    assert_same(target, state)
    assert device.num_done == device.num_told > 12


async def test_staged_comes_when_the_device_has_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for it changes the state then, which the device reads until it has.

    A fence waits only until the device was told.
    """
    device = Device(monkeypatch)
    device.may_go_on.clear()
    storages = {"memory": MemoryStorage()}
    async with inline_engine(storages) as engine, contextlib.AsyncExitStack() as at_the_end:
        at_the_end.callback(device.may_go_on.set)  # a test that fails must not hang
        handle = engine.save(random_state([KiB]), "memory")
        assert await asyncio.to_thread(device.waits.wait, 60)
        await asyncio.wait_for(asyncio.to_thread(handle.fence), 10)
        for _ in range(100):  # until all have heard of it
            await asyncio.sleep(0)
        assert not handle.staged.done()
        device.may_go_on.set()
        await handle.staged
        assert device.num_done == device.num_told == 1
        await handle


async def test_loads_do_not_wait_behind_a_device_that_copies_for_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copies behind a long training step: others wait on other threads."""
    waited: list[str] = []
    wait = Device.Copies.wait

    def note(copies: Device.Copies) -> None:
        waited.append(threading.current_thread().name)
        wait(copies)

    monkeypatch.setattr(Device.Copies, "wait", note)
    Device(monkeypatch)
    async with ckptio.Engine(SMALL) as engine:
        await engine.save(random_state([KiB]), tmp_path / "a")
        saved = set(waited)
        waited.clear()
        await engine.load(tmp_path / "a")
    assert saved
    assert waited
    assert not saved.intersection(waited)


async def test_small_files_in_one_slab_have_rooms_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a device copies from them it copies when the others have been read, too.

    And is told of in one call for each visit to a thread: of 2,000 tensors of a file that
    torch.save wrote, each was told for itself, some 0.1 ms of driver and torch on an H200.
    """
    starts: list[int] = []

    def note(segment: Any, memory: Any, start: int, *others: Any) -> list[Any]:
        starts.append(start)
        return check_into(segment, memory, start, *others)

    monkeypatch.setattr(lanes, "check_into", note)
    monkeypatch.setattr(lanes, "_TURN_S", 3600.0)
    state = random_state([4 * KiB, 5 * KiB, 6 * KiB, 9 * KiB] * 10)
    storage = MemoryStorage()
    config = config_with(bucket_nbytes=4 * KiB, max_reads=2)
    async with inline_engine({"memory": storage}, config) as engine:
        await engine.save(state, "memory")
        assert len(storage.files) > 20
        device = Device(monkeypatch)
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        await engine.load("memory", into=target)
    assert_same(target, state)
    assert device.num_done == device.num_told
    assert 2 <= device.num_told < len(storage.files) / 2
    assert any(starts)
    assert not any(start % PAGE_NBYTES for start in starts)  # for reads past the page cache


@pytest.mark.parametrize("doing", ["save", "load"])
async def test_a_slab_goes_back_when_the_device_is_done_with_it(
    monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    """Also when the save or the load is cancelled meanwhile."""
    state = random_state(STATE)
    async with inline_engine({"memory": MemoryStorage()}) as engine:
        await engine.save(state, "memory")
        device = Device(monkeypatch)
        device.may_go_on.clear()
        slabs = engine._core.context.pool
        if doing == "save":
            handle = engine.save(state, "memory", overwrite=True)
            task = asyncio.ensure_future(handle)
            stop: Callable[[], object] = handle.abort
        else:
            task = asyncio.create_task(engine.load("memory"))
            stop = task.cancel
        assert await asyncio.to_thread(device.waits.wait, 60)
        stop()
        for _ in range(100):  # until every part has heard of it
            await asyncio.sleep(0)
        assert slabs.statistics().leased_nbytes >= slabs.slab_nbytes
        assert not task.done()
        device.may_go_on.set()
        with pytest.raises((asyncio.CancelledError, SaveAbortedError)):
            await task
        assert slabs.statistics().leased_nbytes == 0
    assert device.num_done == device.num_told


async def test_a_load_that_is_cancelled_while_it_reads_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was read by then is landed, and the slab goes back when that is done."""
    reads, may_go_on = threading.Event(), threading.Event()

    def stop(operation: Operation) -> None:
        if operation.kind == "pread_into":
            reads.set()
            assert may_go_on.wait(60)

    storage = MemoryStorage()
    async with inline_engine({"memory": storage}, config_with(bucket_nbytes=4 * KiB)) as engine:
        await engine.save(random_state([4 * KiB] * 40), "memory")
        device = Device(monkeypatch)
        storage.fault = stop
        task = asyncio.create_task(engine.load("memory"))
        assert await asyncio.to_thread(reads.wait, 60)
        task.cancel()
        for _ in range(100):  # as above
            await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert device.num_done == device.num_told > 0


@pytest.mark.parametrize("doing", ["save", "load"])
async def test_a_slab_whose_copy_is_lost_is_never_lent_again(
    monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    """What the device does with it later reaches nobody."""
    state = random_state(STATE)
    async with inline_engine({"memory": MemoryStorage(), "next": MemoryStorage()}) as engine:
        await engine.save(state, "memory")
        device = Device(monkeypatch)
        late: list[Callable[[], None]] = []
        lent: list[int] = []
        lend = SlabPool._lend

        def lose(copies: Device.Copies) -> None:
            late.append(copies._work)
            raise CopiesLostError("an event cannot be waited for")

        def note(of: SlabPool, slab: Slab) -> Slab:
            lent.append(slab.address)
            return lend(of, slab)

        kept = pool._lost
        with monkeypatch.context() as patch:
            patch.setattr(Device.Copies, "wait", lose)
            patch.setattr(pool, "_lost", [])
            with pytest.raises(StateError, match="an event"):
                if doing == "save":
                    await engine.save(state, "memory", overwrite=True)
                else:
                    await engine.load("memory")
            kept += pool._lost
            lost = {slab.address for slab in pool._lost}
        assert 0 < len(lost) <= len(late)
        assert engine.statistics().leased_nbytes == 0
        assert engine.statistics().taken_nbytes <= SMALL.pool_nbytes
        other = random_state(STATE, seed=7)
        device.may_go_on.clear()
        monkeypatch.setattr(SlabPool, "_lend", note)
        saving = engine.save(other, "next")
        assert await asyncio.to_thread(device.waits.wait, 60)
        for work in late:  # in the middle of it
            work()
        device.may_go_on.set()
        await saving
        assert_same(await engine.load("next"), other)
        assert lent
        assert not lost & {*lent}


@pytest.mark.usefixtures("no_collections")
def test_saves_and_loads_leave_nothing_to_collect(tmp_path: Path) -> None:
    """No reference cycles: in a long run without collections they would add up."""
    state = {"t": torch.ones(3)}

    async def on_a_loop(engine: ckptio.Engine) -> None:
        await engine.save(state, tmp_path / "b", overwrite=True)
        await engine.load(tmp_path / "b", into=state)

    async def main(times: int) -> int:
        async with ckptio.Engine(SMALL) as engine:
            await on_a_loop(engine)
            gc.collect()
            for _ in range(times):
                await on_a_loop(engine)
            return gc.collect()

    with ckptio.sync.Engine(SMALL) as engine:
        engine.save(state, tmp_path / "a")
        engine.load(tmp_path / "a")
        gc.collect()
        for _ in range(20):
            engine.save(state, tmp_path / "a", overwrite=True)
            engine.load(tmp_path / "a")
        assert gc.collect() < 40  # types of ctypes, once for each size
    assert asyncio.run(main(60)) < 60  # and of asyncio's a few


@pytest.mark.usefixtures("no_collections")
def test_a_state_that_is_refused_is_let_go_of(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    with ckptio.sync.Engine(SMALL) as engine:
        with pytest.raises(UnsupportedLeafError):
            engine.save({"t": tensor, "f": print}, tmp_path / "c")
        del tensor
        assert gone() is None


@pytest.mark.usefixtures("no_collections")
@in_virtual_time
async def test_a_state_that_is_refused_in_a_job_is_let_go_of() -> None:
    """Though the other ranks are told."""

    async def refused(rank: int, engine: ckptio.Engine) -> weakref.ref[torch.Tensor]:
        del rank
        tensor = torch.ones(3)
        with pytest.raises(UnsupportedLeafError):
            await engine.save({"t": tensor, "f": print}, "memory")
        return weakref.ref(tensor)

    async with job(2) as ranks:
        gone = await ranks.all(refused)
        await asyncio.sleep(1)  # until they have been told
        assert [tensor() for tensor in gone] == [None, None]


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("fails", [False, True])
def test_tensors_are_let_go_of_when_they_are_copied(tmp_path: Path, *, fails: bool) -> None:
    """Before they are written, or when the save has failed: their memory may be the device's."""
    go_on = threading.Event()

    def wait(operation: Operation) -> None:
        if operation.kind == "pwrite" and "data-" in operation.path:
            assert go_on.wait(60)
            if fails:
                raise OSError(28, "No space left on device")

    engine = ckptio.sync.Engine(SMALL)
    engine._core = FilesCore(SMALL, None, RecordingFiles(wait))
    with engine:
        tensor = torch.arange(3 * SMALL.block_nbytes, dtype=torch.uint8)
        gone = threading.Event()
        weakref.finalize(tensor, gone.set)
        handle = engine.start_save({"t": tensor}, tmp_path / "c")
        del tensor
        handle.staged.wait()
        assert gone.wait(60)  # the thread that copied it lets go a moment later
        go_on.set()
        if fails:
            with pytest.raises(StorageError):
                handle.result()
        else:
            handle.result()


@pytest.mark.usefixtures("no_collections")
def test_the_handle_of_a_save_that_failed_has_no_tensors(tmp_path: Path) -> None:
    """Nobody learned that they are copied: there was no place to write them to."""
    with ckptio.sync.Engine(SMALL) as engine:
        engine.save({"t": torch.zeros(3)}, tmp_path / "c")
        tensor = torch.arange(3 * SMALL.block_nbytes, dtype=torch.uint8)
        gone = threading.Event()
        weakref.finalize(tensor, gone.set)
        handle = engine.start_save({"t": tensor}, tmp_path / "c")
        del tensor
        with pytest.raises(CheckpointExistsError):
            handle.result()
        assert gone.wait(60)
        assert handle.committed.done()


#: Fewer slabs than readers, so that some of these wait for a slab that they never need.
SHORT_OF_SLABS = config_with(pool_nbytes=128 * KiB, max_writes=2, max_copies=2, max_reads=12)


def comes_true(condition: Callable[[], bool]) -> bool:
    """Wait for what the engine's threads do when a call has returned: they end their steps."""
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def tensors_of(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Give all tensors of a shape that anybody has."""
    return [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == shape]


@pytest.mark.parametrize("is_into", [False, True])
@pytest.mark.usefixtures("no_collections")
def test_what_was_loaded_is_let_go_of(tmp_path: Path, *, is_into: bool) -> None:
    """Also where lanes were cancelled, whose tasks keep the errors that ended them."""
    ckptio.sync.save({"t": torch.ones(1 << 20)}, tmp_path / "d", config=SHORT_OF_SLABS)
    with ckptio.sync.Engine(SHORT_OF_SLABS) as engine:
        for _ in range(5):
            target = {"t": torch.zeros(1 << 20)} if is_into else None
            state = engine.load(tmp_path / "d", into=target)
            gone = weakref.ref(state["t"])
            del state, target
            assert comes_true(lambda gone=gone: gone() is None)  # type: ignore[misc]


@pytest.mark.parametrize("num", [1, 12])
@pytest.mark.parametrize("is_into", [False, True])
@pytest.mark.usefixtures("no_collections")
def test_what_a_failed_load_had_is_let_go_of(tmp_path: Path, num: int, *, is_into: bool) -> None:
    """Who goes on with an older step has no second state beside that one in memory.

    However many files were being read: each has a group of tasks, which the damage in one cancels.
    """
    shape = (123_457,)
    config = config_with(bucket_nbytes=256 * KiB)
    ckptio.sync.save(
        {f"t{i}": torch.ones(shape) for i in range(num)}, tmp_path / "d", config=config
    )
    file, *others = sorted((tmp_path / "d").glob("*.safetensors"))
    assert len(others) >= num - 1
    with file.open("r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        opened.write(b"?")
    with ckptio.sync.Engine(config) as engine:
        with contextlib.suppress(CorruptionError):  # `pytest.raises` would keep it
            into = {f"t{i}": torch.zeros(shape) for i in range(num)} if is_into else None
            engine.load(tmp_path / "d", into=into)
        into = None
        assert comes_true(lambda: not tensors_of(shape))
