"""One writer on several threads, as `async_save` uses it that is not waited for."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckptio
from ckptio.adapters.dcp import StorageWriter
from ckptio.errors import ConfigError
from tests.adapters.rig import QUICK, cause, save
from tests.rig import assert_tidy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner


class Meeting(DefaultSavePlanner):
    """Waits, once the writer is set up, until the planners of other saves have come as far."""

    def __init__(self, others: threading.Barrier) -> None:
        super().__init__()
        self._others = others

    def create_local_plan(self) -> SavePlan:
        self._others.wait(60)
        return super().create_local_plan()


class Waiting(DefaultSavePlanner):
    """Has something done before the writer is set up, but after it was turned to a checkpoint."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile = meanwhile

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, *args: Any, **more: Any
    ) -> None:
        self._meanwhile()
        super().set_up_planner(state_dict, storage_meta, *args, **more)


class Leaving(StorageWriter):
    """Leaves a save in which all data is written, but for the first one."""

    num_saves = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        results = super().write_data(plan, planner)
        self.num_saves += 1
        if self.num_saves > 1:
            raise ValueError("left")
        return results


class Handing(StorageWriter):
    """Has each save's data written by another thread."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        write = super().write_data
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(write, plan, planner).result()


def state_of(number: int) -> dict[str, Any]:
    return {"x": torch.full((3,), number)}


def is_at(path: Path, number: int) -> bool:
    assert_tidy(path)
    return bool(ckptio.sync.load(path)["x"].tolist() == [number] * 3)


def test_saves_at_a_time_do_not_meet(tmp_path: Path) -> None:
    """Each ends at its own place, whatever was set up meanwhile."""
    writer, others = StorageWriter(config=QUICK), threading.Barrier(3)
    paths = [tmp_path / str(number) for number in range(3)]
    with ThreadPoolExecutor(3) as threads:
        ended: list[Future[Any]] = [
            threads.submit(
                save,
                state_of(number),
                storage_writer=writer,
                checkpoint_id=path,
                planner=Meeting(others),
            )
            for number, path in enumerate(paths)
        ]
    metadata = [each.result() for each in ended]
    assert [each.storage_meta.checkpoint_id for each in metadata] == paths
    assert all(is_at(path, number) for number, path in enumerate(paths))


def test_a_save_goes_where_the_writer_led_when_it_began(tmp_path: Path) -> None:
    """A save that names its place turns the writer, but none that is under way."""
    writer = StorageWriter(tmp_path / "own", config=QUICK)

    def save_another() -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(
                save, state_of(2), storage_writer=writer, checkpoint_id=tmp_path / "named"
            ).result()

    metadata = save(state_of(1), storage_writer=writer, planner=Waiting(save_another))
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == tmp_path / "own"
    assert is_at(tmp_path / "own", 1)
    assert is_at(tmp_path / "named", 2)


def test_a_place_is_named_for_one_thread(tmp_path: Path) -> None:
    """By `async_save`, whose thread names none; the save after one that failed is another."""
    writer = StorageWriter(config=QUICK)
    writer.reset(tmp_path / "mine")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(writer.reset, tmp_path / "other").result()
    writer.reset()
    assert writer.storage_meta().checkpoint_id == tmp_path / "mine"
    writer.reset()
    assert writer.storage_meta().checkpoint_id == tmp_path / "other"


def test_what_failed_leaves_no_path(tmp_path: Path) -> None:
    """Set up or not, the next one on its thread goes where the writer is told to go since."""

    def fail() -> None:
        raise ValueError("failed")

    writer = Leaving(config=QUICK)
    writer.num_saves = 1
    for path, planner in ((tmp_path / "a", Waiting(fail)), (tmp_path / "b", None)):
        with cause():
            save(state_of(1), storage_writer=writer, checkpoint_id=path, planner=planner)
        writer.path = tmp_path / "c"
        assert writer.storage_meta().checkpoint_id == tmp_path / "c"
    writer.num_saves = 0
    save(state_of(2), storage_writer=writer)
    assert is_at(tmp_path / "c", 2)


@pytest.mark.parametrize("then", ["reset", "save"])
def test_what_failed_on_a_thread_that_is_gone_leaves_nothing(tmp_path: Path, then: str) -> None:
    """DCP resets a writer only for a save that names its place."""
    writer = Leaving(tmp_path / "c", config=QUICK)
    save(state_of(1), storage_writer=writer)
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(save, state_of(2), storage_writer=writer)
    assert failed.exception() is not None
    assert ckptio.sync.load(tmp_path / "c")["x"].tolist() == [1] * 3
    if then == "reset":
        writer.reset()
    else:
        writer.num_saves = 0
        save(state_of(1), storage_writer=writer)
    assert is_at(tmp_path / "c", 1)


def test_another_thread_may_write(tmp_path: Path) -> None:
    """Where nothing else is under way, it is clear what it writes for."""
    save(state_of(1), storage_writer=Handing(tmp_path / "c", config=QUICK))
    assert is_at(tmp_path / "c", 1)


def test_another_thread_may_write_where_one_that_is_gone_failed(tmp_path: Path) -> None:
    """What that one left is no save that is under way."""
    writer, broken = Handing(tmp_path / "c", config=QUICK), threading.Barrier(1)
    broken.abort()
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(save, state_of(2), storage_writer=writer, planner=Meeting(broken))
    assert failed.exception() is not None
    save(state_of(1), storage_writer=writer)
    assert is_at(tmp_path / "c", 1)


def test_what_is_not_set_up_is_refused(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c", config=QUICK)
    with ThreadPoolExecutor(1) as thread:
        for begin_another in (None, writer.set_up_storage_writer):
            if begin_another is not None:
                thread.submit(begin_another, is_coordinator=True).result()
            writer.reset()
            with pytest.raises(ConfigError, match="did not set the writer up"):
                writer.prepare_global_plan([])
