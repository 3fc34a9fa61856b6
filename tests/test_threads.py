"""Threads of an engine: how many there are, and which of them count."""

from __future__ import annotations

import asyncio
import threading
from typing import Self

import pytest

from ckptio import _threads
from ckptio._aio import run_blocking
from ckptio._threads import Threads

pytestmark = pytest.mark.usefixtures("no_leaks")
HUNG_S = 0.02


class Hung:
    """Calls that hang until they are let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun = threading.Semaphore(0)

    def wait_for(self, num: int) -> None:
        """Wait until so many more have begun."""
        for _ in range(num):
            assert self.begun.acquire(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()

    def __call__(self) -> int:
        self.begun.release()
        assert self.go_on.wait(60)
        return threading.get_ident()


def begin(threads: Threads, hung: Hung, num: int) -> list[asyncio.Task[int]]:
    """Have some calls hang."""
    return [asyncio.create_task(run_blocking(threads, hung)) for _ in range(num)]


def num_of(threads: Threads) -> int:
    """Count the threads that are there."""
    return sum(thread.is_alive() for thread in threads._threads)


@pytest.mark.parametrize("num_before", [0, 1])
def test_threads_serve_where_no_more_begin(
    monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    """As where the interpreter ends: those that are there do the work, or who asks for it."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    threads = Threads(3, "few")
    release = threading.Event()
    if num_before:
        busy = threads.submit(release.wait)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    futures = [threads.submit(threading.get_ident) for _ in range(5)]
    if num_before:
        release.set()
        busy.result()
    idents = {future.result(10) for future in futures}
    assert (idents == {threading.get_ident()}) is (num_before == 0)
    threads.shutdown()


def test_there_are_as_many_as_are_needed_and_no_more() -> None:
    """One after another needs one; however much waits, it needs no more than there may be."""
    threads = Threads(3, "few", HUNG_S)
    for _ in range(5):
        threads.submit(len, ()).result()
    # the thread may say that it is idle a moment after its work has ended
    assert num_of(threads) <= 2
    with Hung() as hung:
        futures = [threads.submit(hung) for _ in range(10)]
        hung.wait_for(3)
        assert num_of(threads) == 3
    assert len({future.result() for future in futures}) <= 3
    threads.shutdown()


async def test_those_that_hang_do_not_count() -> None:
    """Others begin for what waits, as many as there may be; they end when the former are back."""
    threads = Threads(2, "few", HUNG_S)
    with Hung() as more, Hung() as next_, Hung() as hung:
        first = begin(threads, hung, 2)
        await asyncio.to_thread(hung.wait_for, 2)
        assert await run_blocking(threads, len, (1, 2)) == 2
        threads._hung_s = None  # it is known by now
        while threads._is_watched:
            await asyncio.sleep(0)
        second = begin(threads, next_, 2)
        await asyncio.to_thread(next_.wait_for, 2)
        assert num_of(threads) == 4
        hung.go_on.set()
        idents = set(await asyncio.gather(*first))
        next_.go_on.set()
        others = set(await asyncio.gather(*second))
        assert len(idents) == len(others) == 2
        assert not idents & others
        while len(threads._threads) > 2:
            await asyncio.sleep(0)
        third = begin(threads, more, 4)
        await asyncio.to_thread(more.wait_for, 2)
        assert len(threads._threads) == 2
        more.go_on.set()
        assert set(await asyncio.gather(*third)) == others
    threads.shutdown()


async def test_they_count_while_anything_ends() -> None:
    """What waits is next then."""
    threads = Threads(2, "few", 60)  # it is looked here
    with Hung() as next_, Hung() as hung:
        calls = begin(threads, hung, 1)
        await asyncio.to_thread(hung.wait_for, 1)
        before = threads._num_ended
        await run_blocking(threads, len, ())
        calls += begin(threads, next_, 2)
        await asyncio.to_thread(next_.wait_for, 1)
        threads._look(before)
        assert num_of(threads) == 2
        threads._look(threads._num_ended)
        assert num_of(threads) == 3
    await asyncio.gather(*calls)
    threads.shutdown()


@pytest.mark.parametrize(("hung_s", "num"), [(HUNG_S, 6), (None, 2)])
async def test_there_is_an_end_to_those_that_hang(
    monkeypatch: pytest.MonkeyPatch, hung_s: float | None, num: int
) -> None:
    """No more begin than a few times as many; none, where nothing is said to hang."""
    monkeypatch.setattr(_threads, "_MAX_HUNG", 3)
    threads = Threads(2, "few", hung_s)
    with Hung() as hung:
        calls = begin(threads, hung, 20)
        await asyncio.to_thread(hung.wait_for, num)
        await asyncio.wait(calls, timeout=4 * HUNG_S)
        assert num_of(threads) == num
    assert len(set(await asyncio.gather(*calls))) <= num
    threads.shutdown()


async def test_those_that_hang_are_told_when_others_are_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is back ends, as another has its place: that one may hang by then, too."""
    monkeypatch.setattr(_threads, "_MAX_HUNG", 1)
    threads = Threads(1, "few", HUNG_S)
    with Hung() as next_, Hung() as hung:
        first = begin(threads, hung, 1)
        await asyncio.to_thread(hung.wait_for, 1)
        second = begin(threads, next_, 1)
        await asyncio.to_thread(next_.wait_for, 1)
        third = asyncio.create_task(run_blocking(threads, len, ()))
        await asyncio.wait([third], timeout=2 * HUNG_S)
        assert not third.done()
        hung.go_on.set()
        await asyncio.wait([third], timeout=10)
        assert third.done()
    await asyncio.gather(*first, *second)
    threads.shutdown()


async def test_those_that_wait_for_a_core_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has ended, as they have taken nothing yet."""
    threads = Threads(1, "few", HUNG_S)
    has_core, serve = threading.Event(), threads._serve

    def serve_late() -> None:
        assert has_core.wait(60)
        serve()

    monkeypatch.setattr(threads, "_serve", serve_late)
    calls = [asyncio.create_task(run_blocking(threads, len, ())) for _ in range(2)]
    await asyncio.wait(calls, timeout=3 * HUNG_S)
    num = num_of(threads)
    has_core.set()
    await asyncio.gather(*calls)
    assert num == 1
    threads.shutdown()


async def test_none_begins_when_they_are_to_end() -> None:
    """Those that hang do what waits as soon as they can."""
    threads = Threads(1, "few", HUNG_S)
    with Hung() as hung:
        calls = begin(threads, hung, 3)
        await asyncio.sleep(0)
        threads.shutdown(cancel_futures=True)  # it does not wait
        await asyncio.wait(calls, timeout=3 * HUNG_S)
        assert num_of(threads) == 1
    assert len(set(await asyncio.gather(*calls))) == 1
    threads.shutdown()
