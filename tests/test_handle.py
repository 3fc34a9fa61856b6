from __future__ import annotations

import asyncio
import copy
import math
import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ckptio.errors import ConfigError, SaveAbortedError, StorageError
from ckptio.handle import Milestone, SaveHandle
from ckptio.moments import CheckpointInfo, Moment, SaveMoments

if TYPE_CHECKING:
    from collections.abc import Callable

INFO = CheckpointInfo(
    path="p",
    save_id="1",
    nbytes=0,
    num_files=0,
    num_tensors=0,
    staged_s=0.0,
    committed_s=0.0,
    plan_reused=False,
)
ERROR = StorageError("no", path="p")
pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")


class Save:
    """A handle, and what it asked the engine for."""

    def __init__(self, *, ends: bool = True, tiers: int = 1) -> None:
        self.asked: list[str] = []
        self._ends = ends
        self.moments = SaveMoments(
            "p",
            "1",
            stop=self._abort,
            fence=lambda: self.asked.append("fence"),
            stop_copy=None if tiers == 1 else lambda: self.asked.append("stop copy"),
        )
        self.handle = SaveHandle(self.moments)

    def _abort(self) -> None:
        self.asked.append("abort")
        if self._ends and not self.handle.done():
            self.moments.fail(SaveAbortedError("aborted"))


async def test_a_moment_can_be_awaited_often_and_late() -> None:
    """Before and after it came, by several at once."""
    moment: Moment[int] = Moment()
    milestone = Milestone(moment)

    async def wait() -> int:
        return await milestone

    async with asyncio.TaskGroup() as group:
        waiters = [group.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        assert not milestone.done()
        moment.reach(5)
    assert [waiter.result() for waiter in waiters] == [5, 5, 5]
    assert await milestone == 5
    assert milestone.wait() == 5
    assert milestone.done()
    assert milestone.error() is None


async def test_a_moment_is_waited_for_across_threads_and_loops() -> None:
    """One thread blocks, another runs a loop of its own, a third says that it has come."""
    moment: Moment[str] = Moment()
    milestone = Milestone(moment)
    found = []

    async def wait() -> str:
        return await milestone

    threads = [
        threading.Thread(target=lambda: found.append(milestone.wait())),
        threading.Thread(target=lambda: found.append(asyncio.run(wait()))),
        threading.Thread(target=lambda: moment.reach("now")),
    ]
    for thread in threads:
        thread.start()
    assert await milestone == "now"
    for thread in threads:
        thread.join()
    assert found == ["now", "now"]


def test_a_milestone_is_shown_with_how_far_it_is() -> None:
    """In a notebook, that is what one asks it."""
    moment, failed = Moment[int](), Moment[int]()
    assert repr(Milestone(moment)) == "<Milestone pending>"
    moment.reach(1)
    failed.fail(ERROR)
    assert repr(Milestone(moment)) == "<Milestone reached>"
    assert repr(Milestone(failed)) == "<Milestone failed>"


async def test_cancelling_a_wait_only_stops_waiting() -> None:
    """Others still wait, and the moment still comes."""
    moment: Moment[int] = Moment()
    milestone = Milestone(moment)

    async def wait() -> int:
        return await milestone

    one, two = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    moment.reach(1)
    assert await two == 1


async def test_a_moment_that_will_not_come_raises_everywhere() -> None:
    """Awaiting, waiting, and asking give the same error."""
    moment: Moment[int] = Moment()
    milestone = Milestone(moment)
    moment.fail(ERROR)
    with pytest.raises(StorageError):
        await milestone
    with pytest.raises(StorageError):
        milestone.wait()
    milestone.wait_done()
    assert milestone.error() is ERROR


async def test_waiting_in_a_thread_may_time_out() -> None:
    """The wait ends, the moment may still come."""
    moment: Moment[int] = Moment()
    milestone = Milestone(moment)
    with pytest.raises(TimeoutError):
        milestone.wait(0.0)
    moment.reach(1)
    assert milestone.wait(0.0) == 1


@pytest.mark.parametrize("timeout_s", [math.nan, np.float32("nan"), "5", b"", [1]])
async def test_a_wait_of_no_number_of_seconds_is_refused(timeout_s: Any) -> None:
    """Whether the moment has come or not; endless and past ones are numbers."""
    moment: Moment[int] = Moment()
    milestone = Milestone(moment)
    for _ in range(2):
        with pytest.raises(ConfigError, match="timeout_s= is a number of seconds"):
            milestone.wait(timeout_s)
        if not milestone.done():
            moment.reach(1)
    past: Any = np.float32(-1.0)
    assert milestone.wait(math.inf) == milestone.wait(past) == 1


async def test_a_cancelled_waiter_does_not_lose_an_error_loudly() -> None:
    """An error that comes after its waiter left is not reported as never retrieved."""
    lost: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    moment: Moment[int] = Moment()
    milestone = Milestone(moment)

    async def wait() -> int:
        return await milestone

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    moment.fail(ERROR)
    await asyncio.sleep(0)
    assert lost == []


async def test_awaiting_a_handle_gives_the_commit() -> None:
    """The info of the commit, as often as asked; nothing is aborted."""
    save = Save()
    save.moments.committed.reach(INFO)
    assert await save.handle is INFO
    assert save.handle.result() is INFO
    assert save.moments.retrieved
    assert save.asked == []


async def test_cancelling_who_awaits_a_handle_aborts_the_save() -> None:
    """The cancellation arrives when the save has ended, not before."""
    save = Save(ends=False)

    async def wait() -> None:
        await save.handle

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    assert save.asked == ["abort"]
    save.moments.fail(SaveAbortedError("aborted"))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failed_save_fails_every_moment_that_has_not_come() -> None:
    """What came stays."""
    save = Save()
    save.moments.submitted.reach(None)
    save.moments.fail(ERROR)
    await save.handle.submitted
    with pytest.raises(StorageError):
        await save.handle.staged
    with pytest.raises(StorageError):
        await save.handle
    with pytest.raises(StorageError):
        save.handle.result()


async def test_an_error_counts_as_seen_when_somebody_saw_it() -> None:
    """Awaited, asked for or aborted; a wait that timed out has seen nothing."""
    save = Save()
    with pytest.raises(TimeoutError):
        save.handle.result(0.0)
    save.moments.fail(ERROR)
    assert save.moments.is_unheard()
    with pytest.raises(StorageError):
        save.handle.result()
    assert not save.moments.is_unheard()
    aborted = Save()
    aborted.handle.abort()
    assert aborted.moments.retrieved


async def test_an_error_that_comes_as_a_wait_times_out_is_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waited has got another one."""
    save = Save()
    wait = save.moments.committed.wait

    def late(timeout_s: float | None = None) -> CheckpointInfo:
        try:
            return wait(timeout_s)
        finally:
            save.moments.fail(ERROR)

    monkeypatch.setattr(save.moments.committed, "wait", late)
    with pytest.raises(TimeoutError):
        save.handle.result(0.0)
    assert save.moments.is_unheard()
    save.moments.seen()


async def _awaited(milestone: Milestone[Any]) -> None:
    await milestone


WAYS_TO_SEE: dict[str, Callable[[SaveHandle], object]] = {
    "fence": SaveHandle.fence,
    "submitted": lambda handle: handle.submitted.wait(),
    "staged": lambda handle: handle.staged.wait(),
    "committed": lambda handle: handle.committed.wait(),
    "durable": lambda handle: handle.durable.wait(),
    "result": SaveHandle.result,
    "await submitted": lambda handle: asyncio.run(_awaited(handle.submitted)),
    "await committed": lambda handle: asyncio.run(_awaited(handle.committed)),
}


@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("way", WAYS_TO_SEE)
async def test_whoever_waits_for_any_moment_has_seen_the_error(way: str, tiers: int) -> None:
    """It was raised to them: neither the log nor the end of the engine raises it again."""
    save = Save(tiers=tiers)
    save.moments.fail(ERROR)
    assert save.moments.is_unheard()
    with pytest.raises(StorageError):
        await asyncio.to_thread(WAYS_TO_SEE[way], save.handle)
    assert not save.moments.is_unheard()


@pytest.mark.parametrize("name", ["submitted", "staged", "committed", "durable"])
async def test_whoever_gave_up_waiting_has_seen_no_error(name: str) -> None:
    """Neither a wait that timed out nor one that was cancelled counts, for any moment."""
    save = Save(tiers=2)
    milestone: Milestone[Any] = getattr(save.handle, name)
    with pytest.raises(TimeoutError):
        milestone.wait(0.0)
    task = asyncio.create_task(_awaited(milestone))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    save.moments.fail(ERROR)
    assert save.moments.is_unheard()
    save.moments.seen()


async def test_nobody_blocks_where_they_would_wait_for_themselves() -> None:
    """On the engine's own thread a wait is refused, unless there is nothing to wait for."""

    def refuse() -> None:
        raise ConfigError("here")

    moments = SaveMoments("p", "1", stop=refuse, require_elsewhere=refuse)
    handle = SaveHandle(moments)
    milestones: list[Milestone[Any]] = [handle.submitted, handle.staged, handle.committed]
    waits: list[Callable[[], object]] = [handle.fence, handle.result]
    waits += [one.wait for one in milestones] + [one.wait_done for one in milestones]
    for wait in waits:
        with pytest.raises(ConfigError):
            wait()
    moments.submitted.reach(None)
    moments.staged.reach(None)
    moments.committed.reach(INFO)
    for wait in waits:
        wait()


async def test_a_fence_that_held_has_not_seen_what_failed_later() -> None:
    """Writers are held back for it, as for who waits for `staged`, but it waited for less."""
    save = Save()
    assert not save.moments.staged.is_awaited
    save.moments.submitted.reach(None)
    save.handle.fence()
    assert save.moments.staged.is_awaited
    save.moments.fail(ERROR)
    assert save.moments.is_unheard()
    save.moments.seen()
    assert not save.moments.is_unheard()


async def test_a_fence_waits_until_all_copies_are_queued() -> None:
    """Then it orders the stream; if the save failed before, it raises."""
    save = Save()
    fence = threading.Thread(target=save.handle.fence)
    fence.start()
    assert save.asked == []
    save.moments.submitted.reach(None)
    fence.join()
    assert save.asked == ["fence"]
    failed = Save()
    failed.moments.fail(ERROR)
    with pytest.raises(StorageError):
        failed.handle.fence()
    assert failed.asked == []


async def test_a_handle_says_how_far_it_is() -> None:
    """Its `repr` tells path and state."""
    save = Save()
    assert repr(save.handle) == "<SaveHandle 'p' staging>"
    save.moments.staged.reach(None)
    assert repr(save.handle) == "<SaveHandle 'p' staged>"
    save.moments.committed.reach(INFO)
    assert repr(save.handle) == "<SaveHandle 'p' committed>"
    failed = Save()
    failed.handle.abort()
    assert repr(failed.handle) == "<SaveHandle 'p' failed>"


def test_a_handle_and_its_milestones_show_what_is_promised_and_no_more() -> None:
    """What the engine does with a save is not what who types `handle.` is offered."""
    handle = Save(tiers=2).handle
    assert _public(handle) == {
        "path", "save_id", "submitted", "staged", "committed", "durable",
        "result", "error", "done", "abort", "fence",
    }  # fmt: skip
    assert _public(handle.staged) == {"wait", "wait_done", "error", "done"}
    one_tier = Save().handle
    assert one_tier.durable is one_tier.committed


@pytest.mark.parametrize("copies", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_handle_is_not_copied_to_where_its_engine_is_not(copies: Callable[[Any], Any]) -> None:
    """The error names it, and not what it is made of."""
    with pytest.raises(TypeError, match=r"<SaveHandle 'p' staging> cannot be pickled.* its path"):
        copies(Save().handle)


def _public(value: object) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


def test_who_gives_up_has_not_seen_a_failure() -> None:
    """Nor is a save forgotten for one who waits still as it fails, and then does not."""
    moments = SaveMoments("x", "id", stop_copy=print)  # of two tiers
    kept: dict[SaveMoments, None] = {moments: None}

    class Keeper:
        def forget(self, save: SaveMoments) -> None:
            kept.pop(save, None)

    keeper = Keeper()
    moments.let_go_by(keeper.forget)

    async def run() -> None:
        waiter = asyncio.ensure_future(moments.durable.come())
        await asyncio.sleep(0)
        moments.submitted.reach(None)
        moments.staged.reach(None)
        moments.committed.reach(None)  # type: ignore[arg-type]  # what it is does not matter
        moments.durable.fail_unless_done(StorageError("no", path="x"))
        moments.retrieve()  # the commit was awaited, and went well
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    asyncio.run(run())
    assert moments in kept
    assert moments.is_unheard()
    assert not moments.is_settled()
    moments.seen()
    assert not kept
