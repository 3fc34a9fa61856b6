"""Copies that a device does later: what they read and write stays as it is until they are done.

A device is played here: it does each copy some time after it was told to.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from ckptio.errors import SaveAbortedError
from ckptio.staging.copy import SourceState, TargetState
from ckptio.testing import MemoryStorage
from tests.rig import SMALL, assert_same, inline_engine, random_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ckptio.staging.pool import Slab

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
            target: TargetState, pieces: Any, memory: Slab, start: int, pending: list[Any]
        ) -> None:
            pending.append(self.told(lambda: scatter(target, pieces, memory, start, [])))

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
        pool = engine._core.context.pool
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
        assert pool.statistics().leased_nbytes >= pool.slab_nbytes
        assert not task.done()
        device.may_go_on.set()
        with pytest.raises((asyncio.CancelledError, SaveAbortedError)):
            await task
        assert pool.statistics().leased_nbytes == 0
    assert device.num_done == device.num_told
