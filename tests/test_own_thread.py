from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref

import pytest

from ckptio._own_thread import in_own_thread
from tests.interrupts import Held, interrupted
from tests.programs import run_program

pytestmark = pytest.mark.usefixtures("no_leaks")

#: Interrupts it at each point of it in turn, in what it uses of Python's threading as well; asyncio
#: is left alone, which loses a task's wakeup then. Ends only if no thread was left that waits.
INTERRUPTED = """
import asyncio, sys
from ckptio._own_thread import in_own_thread

def interrupt_at(point):
    count, ran, is_running, began = 0, 0, False, False
    def look(frame, event, argument):
        nonlocal count, began
        name = frame.f_code.co_filename
        if event in ("call", "c_return") and ("/ckptio/" in name or name.endswith("/threading.py")):
            count += 1
            began = began or frame.f_code.co_name == "begin"
            if count == point:
                sys.setprofile(None)
                raise KeyboardInterrupt
    def function():
        nonlocal ran, is_running
        is_running = True
        ran += 1
        is_running = False
    async def main():
        sys.setprofile(look)
        try:
            await in_own_thread(function)
        finally:
            assert ran == began and not is_running
            sys.setprofile(None)
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        assert count == point
        return True
    return False

point = 1
while interrupt_at(point):
    point += 1
print(point)
"""
#: The loop is stopped while the thread works, and is there no more when it goes on.
LEFT = """
import asyncio, sys, threading
from ckptio._own_thread import in_own_thread

def function():
    loop.call_soon_threadsafe(loop.stop)
    threading.main_thread().join()
    print("done", flush=True)

loop = asyncio.new_event_loop()
task = loop.create_task(in_own_thread(function))
loop.run_forever()
"""


async def test_an_own_thread_is_gone_at_the_end() -> None:
    """Whether it returns, raises or its waiter is cancelled."""
    threads = threading.active_count()
    assert await in_own_thread(lambda: 3) == 3
    assert threading.active_count() == threads
    with pytest.raises(ZeroDivisionError):
        await in_own_thread(lambda: 1 // 0)
    assert threading.active_count() == threads
    held = Held()
    task = asyncio.create_task(in_own_thread(held))
    await held.started()
    task.cancel()
    held.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.ended
    assert threading.active_count() == threads


async def test_an_own_thread_has_the_context_of_its_caller() -> None:
    """And what it sets there is its own."""
    said: contextvars.ContextVar[str] = contextvars.ContextVar("said", default="nothing")
    said.set("a word")
    assert await in_own_thread(said.get) == "a word"
    await in_own_thread(lambda: said.set("another"))
    assert said.get() == "a word"


def test_an_own_thread_can_be_interrupted_anywhere() -> None:
    """Once it has begun it is run, once, and waited for; and the program ends."""
    done = run_program(INTERRUPTED)
    assert done.stderr == ""
    assert int(done.stdout) > 40


def test_the_end_of_the_program_waits_for_an_own_thread() -> None:
    """Also where nobody does any more."""
    assert run_program(LEFT).stdout == "done\n"


async def test_an_interrupt_stops_an_own_thread() -> None:
    """And is raised when that has ended, while the loop goes on; as when it comes again."""
    for is_cancelled in (False, True):
        held, told = Held(), list[int]()
        task = asyncio.create_task(_interrupted(held, told))
        await held.started()
        if is_cancelled:
            task.cancel()
            await asyncio.sleep(0)
        assert told == [1]
        held.go_on.set()
        await task
        assert held.ended


async def _interrupted(held: Held, told: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        await interrupted(in_own_thread(held, lambda: told.append(1)))


async def test_an_own_thread_that_nobody_can_wait_for_is_stopped() -> None:
    """Where its coroutine is given up, with the loop on which it was."""
    held = Held()
    waiting = in_own_thread(held, held.go_on.set)
    waiting.send(None)
    await held.started()
    waiting.close()
    assert held.ended


def test_an_own_thread_that_does_not_begin_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no thread."""

    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("ckptio._own_thread.start_new_thread", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        asyncio.run(in_own_thread(lambda: 3))


@pytest.mark.usefixtures("no_collections")
def test_an_error_of_an_own_thread_is_let_go() -> None:
    """It refers to the frames it went through, and none of them back to it."""

    class Part:
        pass

    parts: list[weakref.ref[Part]] = []

    def fail() -> None:
        part = Part()
        parts.append(weakref.ref(part))
        raise ValueError(part)

    async def scenario() -> None:
        with pytest.raises(ValueError, match="Part"):
            await in_own_thread(fail)

    asyncio.run(scenario())
    assert parts[0]() is None
