"""Looks that are given up."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING

import pytest

from ckptio import _looks
from ckptio._looks import run_or_give_up
from ckptio.testing import VirtualLoop
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_a_look_that_takes_too_long_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """Its thread goes on, and nobody hears of its end, be it an error."""
    goes_on = threading.Event()
    assert await run_or_give_up(lambda: 1, 60.0, "look", "here") == 1
    with pytest.raises(ZeroDivisionError):
        await run_or_give_up(lambda: 1 // 0, 60.0, "look", "here")

    def hang() -> int:
        goes_on.wait()
        return 1 // 0

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await run_or_give_up(hang, 0.01, "hung", "here")
        [thread] = [t for t in threading.enumerate() if t.name.startswith("hung")]
        goes_on.set()
        thread.join()
        await asyncio.sleep(0)

    await asyncio.to_thread(lambda: asyncio.run(give_up()))
    gc.collect()
    assert caplog.records == []


class Place:
    """Paths at which a look hangs until they answer.

    Attributes:
        begun: Paths of the looks that have begun.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._answers = threading.Event()

    async def look(self, path: str, wait_s: float | None = 0.05) -> str:
        """Look at a path; those of which `fine` is a part answer at once."""

        def look() -> str:
            self.begun.append(path)
            if "fine" not in path:
                self._answers.wait()
            return path

        return await run_or_give_up(look, wait_s, "hung", path)

    def answer(self) -> None:
        """Answer, and wait for those that looked."""
        self._answers.set()
        for thread in threading.enumerate():
            if thread.name == "hung":
                thread.join()


async def test_no_other_look_begins_while_one_hangs() -> None:
    """Not at the same place, of which it is said at once. What has come back is looked at."""
    place = Place()
    with pytest.raises(TimeoutError):
        await place.look("/run/1")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await place.look("/run/1", wait_s=600.0)
    place.answer()
    assert place.begun == ["/run/1"]
    assert await place.look("/run/1", wait_s=60.0) == "/run/1"
    place.answer()
    assert _looks._begun == set()


async def test_few_hang_in_one_directory_and_its_neighbours_are_looked_at_until_then() -> None:
    """One may be broken by itself; where several hang, the mount does. Others are not meant."""
    place = Place()
    with pytest.raises(TimeoutError):
        await place.look("/run/1")
    assert await place.look("/run/fine", wait_s=60.0) == "/run/fine"
    with pytest.raises(TimeoutError):
        await place.look("/run/2")
    for path in ("/run/3", "/run/fine"):
        with pytest.raises(TimeoutError):
            await place.look(path, wait_s=600.0)
    assert await place.look("/other/fine", wait_s=60.0) == "/other/fine"
    place.answer()
    assert sorted(place.begun) == ["/other/fine", "/run/1", "/run/2", "/run/fine"]
    assert await place.look("/run/3", wait_s=60.0) == "/run/3"
    place.answer()


async def test_many_looks_at_a_time_take_few_threads() -> None:
    """Those in line are answered with them; where all is well, each has its turn."""
    place = Place()
    found = await asyncio.gather(
        *(place.look(f"/run/{i}") for i in range(40)), return_exceptions=True
    )
    assert {type(each) for each in found} == {TimeoutError}
    place.answer()
    assert len(place.begun) == _looks._MAX_LOOKS
    paths = [f"/run/fine-{i}" for i in range(40)]
    assert await asyncio.gather(*(place.look(path, wait_s=60.0) for path in paths)) == paths
    place.answer()


@in_virtual_time
async def test_a_place_that_is_slow_answers_all_that_look_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has all of its time, from when it begins: none is refused as others go before it."""
    numbers: list[int] = []

    async def look(number: int) -> int:
        def take() -> int:
            numbers.append(len(_looks._begun))
            return number

        return await run_or_give_up(take, 5.0, "slow", f"/run/{number}")

    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "draw_s", lambda: 2.0)  # before it looks, and behind that
        found = await asyncio.gather(*(look(number) for number in range(60)))
    assert found == [*range(60)]
    assert loop.time() > 5
    assert max(numbers) == _looks._MAX_LOOKS


async def test_what_is_stopped_as_it_waits_leaves_a_look_that_goes_on() -> None:
    """Nobody has found that it hangs: others look there. Where many go on so, they are given up."""
    place = Place()
    tasks = [asyncio.create_task(place.look("/run/1", 60.0)) for _ in range(_looks._MAX_LOOKS - 1)]
    while len(place.begun) < len(tasks):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert await place.look("/run/1-fine", wait_s=60.0) == "/run/1-fine"
    with pytest.raises(TimeoutError):
        await place.look("/run/1")
    with pytest.raises(TimeoutError):
        await place.look("/run/fine")
    with pytest.raises(TimeoutError):
        await place.look("/run/fine", wait_s=600.0)
    place.answer()
    assert place.begun == [*["/run/1"] * (_looks._MAX_LOOKS - 1), "/run/1-fine", "/run/1"]
    assert await place.look("/run/fine", wait_s=60.0) == "/run/fine"
    place.answer()


async def test_who_waits_for_as_long_as_it_takes_waits_for_no_neighbour() -> None:
    """As many as may go on at one place hang there, and nobody waits for them any more."""
    place = Place()
    tasks = [asyncio.create_task(place.look("/run/1", None)) for _ in range(_looks._MAX_LOOKS)]
    while len(place.begun) < len(tasks):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    try:
        async with asyncio.timeout(30):
            assert await place.look("/run/fine", None) == "/run/fine"
        again = asyncio.create_task(place.look("/run/1", None))
        await asyncio.sleep(0.01)
        assert place.begun == [*["/run/1"] * _looks._MAX_LOOKS, "/run/fine"]
    finally:
        place.answer()
    assert await again == "/run/1"
    place.answer()


async def test_where_no_thread_begins_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop does not look itself: it would hang."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    begun: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TimeoutError):
            await run_or_give_up(lambda: begun.append(1), 60.0, "look", "here")
    assert begun == []


async def test_looks_that_begin_while_they_are_counted_do_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other threads begin some; without a GIL at any moment, as here at each step."""

    class Changing(set[object]):
        def __iter__(self) -> Iterator[object]:
            for each in super().__iter__():
                yield each
                if self is begun:
                    self.add(object())

    begun = Changing()
    monkeypatch.setattr(_looks, "_begun", begun)
    goes_on = threading.Event()
    first = asyncio.ensure_future(run_or_give_up(lambda: goes_on.wait(20), 60.0, "look", "there"))
    while not begun:
        await asyncio.sleep(0)
    try:
        assert await run_or_give_up(lambda: 1, 60.0, "look", "here") == 1
    finally:
        goes_on.set()
        assert await first
