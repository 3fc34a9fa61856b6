"""Taking signals over and giving them back, whoever else does so meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from ckptio import ConfigError, EngineClosedError, sync
from ckptio.checkpointer.ending import Ending
from ckptio.checkpointer.signals import SignalWatch
from ckptio.events import Preempted
from ckptio.testing import EventLog
from tests.checkpointer.rig import checkpointer_on, engines, on_each
from tests.rig import SMALL
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckptio import Engine

USR1 = signal.SIGUSR1


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """Give who has heard a signal, with a handler in place before all others."""
    names: list[str] = []
    before = signal.signal(USR1, lambda *_: names.append("first"))
    yield names
    signal.signal(USR1, before)


def watch(heard: list[str], name: str) -> SignalWatch:
    return SignalWatch((USR1,), lambda _: heard.append(name))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_that_overlap_end_in_any_order(heard: list[str], order: tuple[int, ...]) -> None:
    """The last that began and has not ended hears it; after all, who had it before."""
    first = signal.getsignal(USR1)
    watches = [watch(heard, str(i)) for i in range(3)]
    for each in watches:
        each.start()
    left = set(range(3))
    for i in order:
        signal.raise_signal(USR1)
        assert heard[-1] == str(max(left))
        watches[i].stop()
        watches[i].stop()  # as often as one likes
        left.discard(i)
    assert signal.getsignal(USR1) is first
    signal.raise_signal(USR1)
    assert heard[-1] == "first"
    assert len(heard) == 4


def test_a_handler_that_was_set_inside_stays(heard: list[str]) -> None:
    """It may call what it found there, which passes on what it does not hear any more."""
    each = watch(heard, "watch")
    each.start()
    found: Any = signal.getsignal(USR1)

    def mine(number: int, frame: Any) -> None:
        heard.append("mine")
        found(number, frame)

    signal.signal(USR1, mine)
    signal.raise_signal(USR1)
    assert heard == ["mine", "watch"]
    each.stop()
    assert signal.getsignal(USR1) is mine
    signal.raise_signal(USR1)
    assert heard[2:] == ["mine", "first"]
    signal.signal(USR1, found)  # put back late: it hears nothing any more
    signal.raise_signal(USR1)
    assert heard[4:] == ["first"]


def test_one_that_has_stopped_passes_on_to_what_is_no_function(heard: list[str]) -> None:
    """To nobody, and to the system's default, which ends the process."""
    signal.signal(USR1, signal.SIG_IGN)
    each = watch(heard, "watch")
    each.start()
    found = signal.getsignal(USR1)
    each.stop()
    signal.signal(USR1, found)
    signal.raise_signal(USR1)
    signal.signal(USR1, signal.SIG_DFL)
    other = watch(heard, "other")
    other.start()
    found = signal.getsignal(USR1)
    other.stop()
    signal.signal(USR1, found)
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(USR1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == USR1
    assert heard == []


def test_a_forked_child_gives_back_what_overlaps(heard: list[str]) -> None:
    """All of it; the parent keeps its own."""
    watches = [watch(heard, str(i)) for i in range(2)]
    for each in watches:
        each.start()
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(USR1)
        os._exit(0 if heard == ["first"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    signal.raise_signal(USR1)
    assert heard == ["1"]
    for each in watches:
        each.stop()


def test_nothing_stays_registered_for_a_fork(
    heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many blocks there were: what is called at a fork cannot be taken off again."""
    registered: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **calls: registered.append(calls))
    for _ in range(3):
        each = watch(heard, "watch")
        each.start()
        each.stop()
    assert registered == []


def test_a_loop_that_decides_itself_hears_of_a_signal(tmp_path: Path) -> None:
    """When it looks, but not right behind a save; one that asks, or may, when told to save."""
    for number, (asks, saves) in enumerate(((False, True), (True, True), (False, False))):
        with sync.Checkpointer(tmp_path, preempt_signals=[USR1], config=SMALL) as checkpointer:
            assert not asks or not checkpointer.should_save(1)
            if saves:
                checkpointer.save({"x": 1}, number)
            signal.raise_signal(USR1)
            while not checkpointer._core.ending.is_called:
                os.sched_yield()
            assert not checkpointer.preempted  # it may be about to ask
            assert checkpointer.preempted is (saves and not asks)
            if asks or not saves:
                assert checkpointer.should_save(2)
            assert checkpointer.preempted
        assert checkpointer.preempted


class Loop:
    """A loop of twenty steps that decides itself when to save, at each fourth, say.

    A signal comes while it trains at one step, or while it saves.
    """

    def __init__(self, checkpointer: sync.Checkpointer, signal_at: int, *, in_save: bool) -> None:
        self.checkpointer = checkpointer
        self.signal_at, self.in_save = signal_at, in_save
        self.step = 0

    def train(self) -> bool:
        """Go on by a step; whether there was one left."""
        self.step += 1
        self._signal(in_save=False)
        return self.step <= 20

    def save(self) -> None:
        self._signal(in_save=True)
        self.checkpointer.save({"step": self.step}, self.step)

    def _signal(self, *, in_save: bool) -> None:
        if self.step == self.signal_at and in_save == self.in_save:
            signal.raise_signal(USR1)
            while not self.checkpointer._core.ending.is_called:
                os.sched_yield()

    @property
    def is_due(self) -> bool:
        return self.step % 4 == 0

    @property
    def is_last(self) -> bool:
        return self.checkpointer.preempted


def looks_once(loop: Loop) -> None:
    while loop.train():
        last = loop.is_last
        if last or loop.is_due:
            loop.save()
        if last:
            break


def looks_to_save_and_to_leave(loop: Loop) -> None:
    while loop.train():
        if loop.is_due or loop.is_last:
            loop.save()
        if loop.is_last:
            break


def looks_behind_what_is_due(loop: Loop) -> None:
    while loop.train():
        if loop.is_due:
            loop.save()
        if loop.is_last:
            loop.save()
            break


def saves_behind_the_loop(loop: Loop) -> None:
    while loop.train():
        if loop.is_due:
            loop.save()
        if loop.is_last:
            break
    loop.save()


def looks_ahead(loop: Loop) -> None:
    while not loop.is_last and loop.train():
        if loop.is_due:
            loop.save()
    loop.save()


def saves_each_step(loop: Loop) -> None:
    while not loop.is_last and loop.train():
        loop.save()


@pytest.mark.parametrize(
    ("signal_at", "in_save"),
    [(1, False), (2, False), (3, False), (5, False), (6, False), (7, False), (8, False), (8, True)],
)
@pytest.mark.parametrize(
    "run",
    [
        looks_once,
        looks_to_save_and_to_leave,
        looks_behind_what_is_due,
        saves_behind_the_loop,
        looks_ahead,
        saves_each_step,
    ],
)
def test_a_loop_that_decides_itself_saves_before_it_leaves(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    run: Callable[[Loop], None],
    signal_at: int,
    *,
    in_save: bool,
) -> None:
    """Where it is then, or soon after; and no step twice. Also one that has saved nothing yet."""
    with sync.Checkpointer(tmp_path, preempt_signals=[USR1], config=SMALL) as checkpointer:
        run(loop := Loop(checkpointer, signal_at, in_save=in_save))
        assert checkpointer.latest() == loop.step
        assert signal_at <= loop.step <= signal_at + (2 if signal_at > 4 else 3)
    assert not caplog.messages


def test_a_loop_that_leaves_and_does_not_save_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has done since its last save is lost; an error that it leaves by says enough."""

    def run(path: Path) -> None:
        with sync.Checkpointer(path, preempt_signals=[USR1], config=SMALL) as checkpointer:
            loop = Loop(checkpointer, 6, in_save=False)
            while loop.train() and not loop.is_last:
                if loop.is_due:
                    loop.save()
            if path.name == "b":
                raise KeyError

    run(tmp_path / "a")
    (message,) = caplog.messages
    assert message.startswith("SIGUSR1: the run ends, and nothing was saved since; the last step")
    assert "saved is 4." in message
    with pytest.raises(KeyError):
        run(tmp_path / "b")
    assert not any(each.startswith("SIGUSR1") for each in caplog.messages[1:])


def test_a_second_call_for_the_last_save_makes_no_new_one_due() -> None:
    """What was saved after the first call was the last one."""
    ending = Ending()
    ending.is_alone = True
    ending.saved(2)
    ending.call("SIGTERM")
    looks = [ending.look(), ending.look()]
    assert looks == [False, True]
    ending.saved(3)
    ending.call("SIGTERM")
    assert ending.loss() is None


def test_the_second_look_after_the_call_says_yes_behind_a_save_too() -> None:
    """A loop that saves each step has no other; of many ranks, or asked, one says it never."""
    for is_alone, is_asked_for in ((True, False), (False, False), (True, True)):
        ending = Ending()
        ending.is_alone, ending.is_asked_for = is_alone, is_asked_for
        ending.saved(1)
        ending.call("SIGTERM")
        looks = [ending.look()]
        ending.saved(2)
        looks.append(ending.look())
        assert looks == [False, is_alone and not is_asked_for]


def test_nothing_is_lost_where_a_loop_was_not_told_or_asks() -> None:
    """It hears of the end from `should_save`, and may have no step to save any more."""
    ending = Ending()
    assert ending.loss() is None
    ending.is_told = ending.is_asked_for = True
    assert ending.loss() is None
    ending.is_asked_for = False
    assert ending.loss()


def test_what_is_said_of_the_end_stays_so_behind_the_block(tmp_path: Path) -> None:
    """Nobody looks there for a step to save, however often."""
    with sync.Checkpointer(tmp_path, config=SMALL) as checkpointer:
        checkpointer.preempt("going")
        while not checkpointer._core.ending.is_called:
            os.sched_yield()
    assert [checkpointer.preempted for _ in range(4)] == [False] * 4


def test_a_loop_of_its_own_may_look_after_its_end_alone(tmp_path: Path) -> None:
    with sync.Checkpointer(tmp_path, preempt_signals=[USR1], config=SMALL) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        signal.raise_signal(USR1)
        while not checkpointer._core.ending.is_called:
            os.sched_yield()
    assert checkpointer.preempted


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_what_could_not_be_opened_hears_signals_when_it_is(
    tmp_path: Path, heard: list[str], *, is_elsewhere: bool
) -> None:
    """Off the main thread, or before its engine was open, it had not taken them over."""
    engine = sync.Engine(SMALL)
    checkpointer = sync.Checkpointer(tmp_path, engine=engine, preempt_signals=[USR1])

    def enter() -> None:
        with pytest.raises(ConfigError if is_elsewhere else EngineClosedError), checkpointer:
            pass

    if not is_elsewhere:
        enter()
    with engine:
        if is_elsewhere:
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
        with checkpointer:
            signal.raise_signal(USR1)
            assert heard == []
            while not checkpointer.should_save(1):
                os.sched_yield()
            checkpointer.save({"x": 1}, 1)
        assert checkpointer.preempted


@pytest.mark.parametrize("reason", ["going", ""])
@in_virtual_time
async def test_a_call_before_the_block_is_heard_in_it(tmp_path: Path, reason: str) -> None:
    """A handler of one's own may call while an engine still waits for other ranks."""

    async def body(rank: int, engine: Engine) -> bool:
        checkpointer = checkpointer_on(engine, tmp_path)
        if rank == 1:
            checkpointer.preempt(reason)
        async with checkpointer:
            for step in range(10):
                await asyncio.sleep(0.1)
                await checkpointer.should_save(step)
            return checkpointer.preempted

    log = EventLog()
    async with engines(2, log=log) as group:
        assert await on_each(group, body) == [True, True]
    assert [event.reason for event in log.of(Preempted)] == [reason or "asked for"] * 2


@in_virtual_time
async def test_ranks_are_told_that_nobody_asks_when_to_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They would save at different steps."""

    async def body(_: int, engine: Engine) -> None:
        async with checkpointer_on(engine, tmp_path) as checkpointer:
            checkpointer.preempt("going")
            await asyncio.sleep(1)
            assert not checkpointer.preempted

    async with engines(2) as group:
        assert await on_each(group, body) == [None, None]
    assert "going: should_save() says when to save last, and is not called here" in caplog.text
