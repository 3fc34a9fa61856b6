"""What a rank tells of a save that it is told to stop while it finds out how that has ended."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest

from ckptio.engine.save import SaveReceipt
from ckptio.engine.together import _settled
from ckptio.errors import RankError, StorageError

RECEIPT = SaveReceipt(nbytes=1, num_files=1, num_tensors=1, plan_reused=False)


class Ended:
    """A save that ended, and finds out how."""

    def __init__(self, receipt: SaveReceipt | None, *, is_in_doubt: bool = False) -> None:
        self._receipt = receipt
        self._is_in_doubt = is_in_doubt
        self.looks, self.goes_on = asyncio.Event(), asyncio.Event()

    def hurry(self) -> None:
        pass

    async def clean_up(self, _: BaseException) -> SaveReceipt | None:
        self.looks.set()
        await self.goes_on.wait()
        if self._is_in_doubt:
            raise StorageError("it may stand", path="a", in_doubt=True)
        return self._receipt


async def end(*, was_stopped: bool) -> SaveReceipt:
    """Wait to be stopped, or fail."""
    if was_stopped:
        await asyncio.Event().wait()
    raise RankError("it failed on rank 1")


async def stop_meanwhile(save: Any, *, was_stopped: bool) -> asyncio.Task[SaveReceipt | None]:
    """Tell a save to stop while it finds out how it has ended; give its task when that is over.

    Args:
        save: The save.
        was_stopped: Whether it had been told to stop before; it ends with another's failure if not.
    """

    async def run() -> SaveReceipt | None:
        try:
            return await end(was_stopped=was_stopped)
        except BaseException as error:
            committed = await _settled(save, error)
            if committed is None:
                raise
            return committed

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    if was_stopped:
        task.cancel()
    await save.looks.wait()
    task.cancel()
    await asyncio.sleep(0)
    save.goes_on.set()
    await asyncio.wait((task,))
    return task


@pytest.mark.parametrize("was_stopped", [True, False])
async def test_what_is_committed_is_told_as_that(*, was_stopped: bool) -> None:
    """As if nobody had asked to stop it, however often: that came too late."""
    task = await stop_meanwhile(Ended(RECEIPT), was_stopped=was_stopped)
    assert task.result() is RECEIPT
    assert task.cancelling() == 0


@pytest.mark.parametrize("was_stopped", [True, False])
async def test_what_is_not_committed_was_stopped(*, was_stopped: bool) -> None:
    """It has changed nothing, whatever it had failed of."""
    assert (await stop_meanwhile(Ended(None), was_stopped=was_stopped)).cancelled()


@pytest.mark.parametrize("was_stopped", [True, False])
@pytest.mark.usefixtures("no_collections")
async def test_a_doubt_is_told_and_keeps_nothing_in_memory(*, was_stopped: bool) -> None:
    """It has the frames of the save, which have the state."""
    save = Ended(None, is_in_doubt=True)
    task = await stop_meanwhile(save, was_stopped=was_stopped)
    error = task.exception()
    assert isinstance(error, StorageError)
    assert error.in_doubt
    kept = weakref.ref(save)
    del save, task, error
    assert kept() is None
