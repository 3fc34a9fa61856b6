"""An asyncio loop on which a schedule is a function of a seed.

Three things make a schedule differ from run to run: the clock, the order in which ready
callbacks run, and threads. Here the clock jumps to the next timer as soon as nothing is
ready, so an hour of `asyncio.sleep` takes no time; ready callbacks run in an order drawn
from the seed; and a call given to an executor runs on the loop's own thread, in one piece,
at a virtual time drawn from the seed. The same seed gives the same run, to the last step.

What a call does to memory happens at a moment between its start and its end that the
waiter cannot know, and it happens even if the waiter has left: just as with a thread. So
a buffer that is reused before its call has ended shows up as wrong bytes, for some seed.

Nothing ready and no timer is a deadlock: nobody can ever wake up. It raises at once and
names who waits, instead of hanging until a test runner gives up.

Not simulated: threads that race inside a call, signals, sockets. Real threads and real
loops are for other tests.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import random
import selectors
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

_MEAN_CALL_S = 0.01


class DeadlockError(RuntimeError):
    """Every task waits for another, and none for the clock."""


class _ClockSelector(selectors.SelectSelector):
    """Turns waiting for files into letting the clock jump."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.loop.turn(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock, seeded order and no threads.

    Args:
        seed: Draws the order of ready callbacks and how long calls in executors take.

    Attributes:
        rng: Drawn from for every decision; tests may draw from it too.
        num_turns: Turns of the loop so far.
        peak_calls: The most calls of each function that were in an executor at a time, by
            the function's qualified name.
        complaints: What was passed to `call_exception_handler`: errors nobody saw.
    """

    def __init__(self, seed: int) -> None:
        self._now_s = 0.0
        selector = _ClockSelector()
        selector.loop = self
        super().__init__(selector)
        self.rng = random.Random(seed)  # noqa: S311  # a schedule, nothing secret
        self.num_turns = 0
        self.peak_calls: collections.Counter[str] = collections.Counter()
        self.complaints: list[dict[str, Any]] = []
        self._calls: collections.Counter[str] = collections.Counter()
        self.set_exception_handler(lambda _, context: self.complaints.append(context))

    def time(self) -> float:
        """Give the virtual time, in seconds since the loop was made."""
        return self._now_s

    def turn(self, timeout_s: float | None) -> None:
        """Begin a turn: shuffle what is ready, or let the clock jump. Called by the loop.

        Raises:
            DeadlockError: Nothing is ready and no timer runs.
        """
        self.num_turns += 1
        if timeout_s is None:
            raise DeadlockError(f"nothing is ready and no timer runs; waiting: {self._waiting()}")
        self._now_s += max(0.0, timeout_s)
        ready = cast("collections.deque[object]", self._ready)  # type: ignore[attr-defined]  # asyncio's own queue: there is no public way to its order
        if len(ready) > 1:
            handles = list(ready)
            self.rng.shuffle(handles)
            ready.clear()
            ready.extend(handles)

    @property
    def num_calls(self) -> int:
        """Calls that are in an executor now."""
        return sum(self._calls.values())

    def _waiting(self) -> str:
        return ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self))) or "nobody"

    def run_in_executor(
        self, executor: object, func: Callable[..., T], *args: object
    ) -> asyncio.Future[T]:
        """Run `func` on this thread at a later virtual time; the executor is not used.

        As with a thread, it runs even if the future was cancelled meanwhile.
        """
        del executor
        name = _name_of(func)
        self._calls[name] += 1
        self.peak_calls[name] = max(self.peak_calls[name], self._calls[name])
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except BaseException as error:  # the waiter raises it, as with a thread
                self.call_later(self._draw_s(), end_badly, error)
            else:
                self.call_later(self._draw_s(), end_well, result)

        def end_well(result: T) -> None:
            self._calls[name] -= 1
            if not future.done():
                future.set_result(result)

        def end_badly(error: BaseException) -> None:
            self._calls[name] -= 1
            if future.done():
                self.call_exception_handler({"message": f"{name}, abandoned", "exception": error})
            else:
                future.set_exception(error)

        self.call_later(self._draw_s(), run)
        return future

    def _draw_s(self) -> float:
        return self.rng.expovariate(1 / _MEAN_CALL_S)


def run_virtual(coroutine: Coroutine[Any, Any, T], *, seed: int) -> T:
    """Run a coroutine to its end on a loop of its own.

    Args:
        coroutine: What to run. It finds its loop with `asyncio.get_running_loop()`.
        seed: Draws the schedule.

    Returns:
        What it returns.

    Raises:
        DeadlockError: Every task waits for another.
        AssertionError: An error was lost: asyncio would have logged it at best.
    """
    loop = VirtualLoop(seed)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(coroutine)
    if loop.complaints:
        raise AssertionError(f"errors that nobody saw: {loop.complaints}")
    return result


def _name_of(function: Callable[..., object]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", repr(function))
