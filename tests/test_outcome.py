from __future__ import annotations

import asyncio
import gc
import math
import signal
import threading
import weakref

import pytest

from ckptio._outcome import Outcome

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_it_ends_once() -> None:
    """Well or badly; it says so, and who comes twice is told."""
    well: Outcome[int] = Outcome()
    assert not well.done()
    assert well.exception() is None
    well.set_result(1)
    assert well.done()
    assert (well.result(), well.wait(0.0), well.exception()) == (1, True, None)
    badly: Outcome[int] = Outcome()
    error = ValueError("no")
    badly.set_exception(error)
    assert badly.exception() is error
    with pytest.raises(ValueError, match="no"):
        badly.result()
    for outcome in (well, badly):
        with pytest.raises(asyncio.InvalidStateError):
            outcome.set_result(2)
        with pytest.raises(asyncio.InvalidStateError):
            outcome.set_exception(error)
    assert well.result() == 1


def test_who_may_come_second_is_told() -> None:
    """Of many threads that fail it at once, one is the first, and it ends as that one says."""
    outcome: Outcome[int] = Outcome()
    errors = [ValueError(str(i)) for i in range(8)]
    told: list[tuple[BaseException, bool]] = []
    threads = [
        threading.Thread(target=lambda e=e: told.append((e, outcome.try_exception(e))))
        for e in errors
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [error for error, is_first in told if is_first] == [outcome.exception()]
    assert not outcome.try_exception(errors[0])


async def test_a_task_that_nobody_has_is_told() -> None:
    """A loop has its tasks by weak references, and this one is busy when the outcome ends."""
    outcome: Outcome[int] = Outcome()
    told: list[int] = []

    async def tell() -> None:
        told.append(await outcome.wrapped())

    asyncio.create_task(tell(), name="tell")  # noqa: RUF006  # what is tested
    await asyncio.sleep(0)

    def end() -> None:
        outcome.set_result(1)
        gc.collect()

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    for _ in range(3):
        await asyncio.sleep(0)
    assert told == [1]


def test_waiting_may_time_out() -> None:
    """And leaves nothing behind, however often."""
    outcome: Outcome[int] = Outcome()
    for timeout_s in (-1.0, 0.0, 0.001):
        assert not outcome.wait(timeout_s)
    assert not outcome._calls
    outcome.set_result(1)
    assert outcome.wait(-1.0)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e12, 10**400], ids=["inf", "long", "huge"])
def test_a_wait_may_be_endless(timeout_s: float) -> None:
    """A longer one than a lock takes ends as any other when it is over."""
    outcome: Outcome[int] = Outcome()
    thread = threading.Thread(target=outcome.set_result, args=(1,))
    threads = [threading.Thread(target=outcome.wait, args=(timeout_s,))]
    for each in (*threads, thread):
        each.start()
    assert outcome.wait(timeout_s)
    assert outcome.result() == 1
    for each in (*threads, thread):
        each.join()


def test_everybody_is_told_whenever_they_come() -> None:
    """Threads and loops that begin to wait just as it ends."""
    for _ in range(200):
        outcome: Outcome[int] = Outcome()
        found: list[int] = []

        async def on_a_loop(outcome: Outcome[int] = outcome) -> int:
            return await outcome.wrapped()

        threads = [
            threading.Thread(target=lambda o=outcome, f=found: f.append(o.wait(60) and o.result())),
            threading.Thread(target=lambda o=outcome: o.set_result(1)),
            threading.Thread(target=lambda o=outcome, f=found: f.append(o.wait(60) and o.result())),
            threading.Thread(target=lambda f=found: f.append(asyncio.run(on_a_loop()))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [1, 1, 1]
        assert not outcome._calls


async def test_a_loop_waits_as_often_as_it_likes() -> None:
    """To cancel a wait changes nothing for others, and leaves nothing behind."""
    outcome: Outcome[int] = Outcome()
    kept = outcome.wrapped()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(outcome.wrapped(), 0)
    assert len(outcome._calls) == 1
    outcome.set_result(1)
    assert await kept == await outcome.wrapped() == 1
    failed: Outcome[int] = Outcome()
    failed.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await failed.wrapped()


async def test_a_loop_that_has_ended_is_told_nothing() -> None:
    """It does not keep others from being told."""
    outcome: Outcome[int] = Outcome()
    loop = asyncio.new_event_loop()

    async def begin() -> None:
        outcome.wrapped()

    await asyncio.to_thread(loop.run_until_complete, begin())
    loop.close()
    waiting = outcome.wrapped()
    outcome.set_result(1)
    assert await waiting == 1


@pytest.mark.usefixtures("no_collections")
def test_an_error_is_let_go() -> None:
    """It refers to the frames it went through, and none of them back to it."""

    class Held:
        pass

    def fail() -> weakref.ref[Held]:
        held = Held()
        outcome: Outcome[int] = Outcome()
        outcome.set_exception(ValueError(held))
        try:
            outcome.result()
        except ValueError:
            del outcome  # or this frame, which the error refers to, would keep the error
        return weakref.ref(held)

    assert fail()() is None


def test_a_handler_may_wait_for_whoever_tells() -> None:
    """It interrupts who looks and who waits, and waits until another thread has told them."""
    told = threading.Semaphore(0)
    outcomes: list[Outcome[int]] = []

    def handler(*_: object) -> None:
        outcome: Outcome[int] = Outcome()
        threading.Thread(target=tell, args=(outcomes[-1], outcome)).start()
        assert outcome.wait(60)
        assert outcome.result() == 1

    def tell(interrupted: Outcome[int], waiting: Outcome[int]) -> None:
        if not interrupted.done():
            interrupted.set_result(1)  # it has to get through before the handler returns
        waiting.set_result(1)
        told.release()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for i in range(300):
            outcomes.append(Outcome())
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + i * 1e-6)
            while not outcomes[-1].done():
                outcomes[-1].wait(1e-5)
            assert told.acquire(timeout=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


async def test_nobody_writes_a_result_out() -> None:
    written: list[str] = []

    class Large:
        """What would take long to write out."""

        def __repr__(self) -> str:
            written.append("all of it")
            return ""

    result = Large()
    outcome = Outcome[Large]()
    early = outcome.wrapped()
    cancelled = outcome.wrapped()
    cancelled.cancel()
    threading.Timer(0.01, outcome.set_result, [result]).start()
    assert await early is result
    assert await outcome.wrapped() is result
    assert await asyncio.to_thread(outcome.result) is result
    await asyncio.sleep(0)
    assert not written
