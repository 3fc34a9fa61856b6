"""What a rank tells of a save that it is told to stop while it finds out how that has ended."""

from __future__ import annotations

import asyncio
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from ckptio import sync
from ckptio.engine.save import SaveReceipt
from ckptio.engine.together import _JointSave, _settled
from ckptio.errors import RankError, StorageError
from ckptio.foreign.storage import AnyStorage
from ckptio.storage.files import PosixFiles
from ckptio.storage.local import LocalStorage
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path

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


class SlowFiles(PosixFiles):
    """A server that answers, late."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def open(self, path: str, *args: Any, **options: Any) -> int:
        self.asked.set()
        assert self.answers.wait(60)
        return super().open(path, *args, **options)


async def test_what_a_file_system_says_late_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is waited for in any case: that the save is there is no doubt."""
    monkeypatch.setattr("ckptio.engine.together.GRACE_S", 0.0)
    saved = sync.save({"a": 1}, tmp_path / "a")
    files = SlowFiles()
    with ThreadPoolExecutor() as executor:
        place = LocalStorage(str(tmp_path / "a"), SMALL, executor, lambda _: None, files)
        storage = AnyStorage(place, SMALL, executor)  # as engines make it
        context: Any = SimpleNamespace(
            executor=executor, ranks=SimpleNamespace(rank=0), cache=Mock()
        )
        job: Any = SimpleNamespace(storage=storage, save_id=saved.save_id)
        save = _JointSave(job, context, Mock())
        looking = asyncio.create_task(save._look_back())
        while not files.asked.is_set():
            await asyncio.sleep(0)
        save.hurry()
        for _turn in range(10):
            await asyncio.sleep(0)
        files.answers.set()
        assert (await looking) is not None
