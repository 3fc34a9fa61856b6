"""An asyncio loop on which a schedule is a function of a seed.

Three things make a schedule differ from run to run: the clock, the order in which ready
callbacks run, and threads. Here the clock jumps to the next timer as soon as nothing is
ready, so an hour of `asyncio.sleep` takes no time; ready callbacks run in an order drawn
from the seed; and a call given to an executor runs on the loop's own thread, in one piece,
at a virtual time drawn from the seed. The same seed gives the same run, to the last step.

Timers are not shuffled: those that are due run after the callbacks that are ready, in the order
of their times, and those of one time in an order that no seed changes. Tasks that sleep until
one moment wake in an order drawn from the seed all the same: their timers only make them ready.

What a call does to memory happens at a moment between its start and its end that the
waiter cannot know, and it happens even if the waiter has left. So a buffer that is reused
before its call has ended shows up as wrong bytes, for some seed.

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
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

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
        peak_calls: The most calls of each function that were in an executor at a time, by
            the function's qualified name.
        complaints: What was passed to `call_exception_handler`: errors nobody saw.
        calls: The calls of each function that are in an executor now, by the same names.
    """

    def __init__(self, seed: int) -> None:
        self._now_s = 0.0
        selector = _ClockSelector()
        selector.loop = self
        super().__init__(selector)
        self.rng = random.Random(seed)  # noqa: S311  # a schedule, nothing secret
        self.peak_calls: collections.Counter[str] = collections.Counter()
        self.complaints: list[dict[str, Any]] = []
        self.calls: collections.Counter[str] = collections.Counter()
        self._lanes: dict[int, _Lane] = {}
        self.set_exception_handler(lambda _, context: self.complaints.append(context))

    def time(self) -> float:
        """Give the virtual time, in seconds since the loop was made."""
        return self._now_s

    def turn(self, timeout_s: float | None) -> None:
        """Begin a turn: shuffle what is ready, or let the clock jump. Called by the loop.

        Raises:
            DeadlockError: Nothing is ready and no timer runs.
        """
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
        return sum(self.calls.values())

    def _waiting(self) -> str:
        return ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self))) or "nobody"

    def run_in_executor(
        self, executor: object, func: Callable[..., T], *args: object
    ) -> asyncio.Future[T]:
        """Run `func` on this thread at a later virtual time; the executor is not used.

        Its `max_threads` is kept to, if it has one. A call runs even if its future was cancelled
        meanwhile, as one does that a thread has begun. So does one that was still waiting for a
        thread, which a real executor would drop: code must not rely on that.
        """
        future: asyncio.Future[T] = self.create_future()
        call = _Call(self, _name_of(func), future, functools.partial(func, *args))
        lane = self._lanes.setdefault(id(executor), _Lane(getattr(executor, "max_threads", None)))
        lane.take(call)
        return future

    def draw_s(self) -> float:
        """Draw how long a call waits or runs, in virtual seconds."""
        return self.rng.expovariate(1 / _MEAN_CALL_S)


class _Lane:
    """An executor: calls that run, and those that wait for a thread."""

    def __init__(self, max_threads: int | None) -> None:
        self._max_threads = max_threads
        self._num_running = 0
        self._waiting: collections.deque[_Call[Any]] = collections.deque()

    def take(self, call: _Call[Any]) -> None:
        """Begin a call, or queue it."""
        if self._max_threads is not None and self._num_running >= self._max_threads:
            self._waiting.append(call)
            return
        self._num_running += 1
        call.begin(self._freed)

    def _freed(self) -> None:
        self._num_running -= 1
        if self._waiting:
            self.take(self._waiting.popleft())


class _Call(Generic[T]):
    """A call in an executor; begun and ended at later virtual times."""

    def __init__(
        self, loop: VirtualLoop, name: str, future: asyncio.Future[T], function: Callable[[], T]
    ) -> None:
        self._loop = loop
        self._name = name
        self._future = future
        self._function = function

    def begin(self, on_end: Callable[[], None]) -> None:
        """Run it in a while, and call `on_end` a while later, once its future is done."""
        loop, name = self._loop, self._name
        loop.calls[name] += 1
        loop.peak_calls[name] = max(loop.peak_calls[name], loop.calls[name])
        loop.call_later(loop.draw_s(), self._run, on_end)

    def _run(self, on_end: Callable[[], None]) -> None:
        try:
            result = self._function()
        except BaseException as error:  # the waiter raises it, as with a thread
            self._loop.call_later(self._loop.draw_s(), self._end_badly, error, on_end)
        else:
            self._loop.call_later(self._loop.draw_s(), self._end_well, result, on_end)

    def _end_well(self, result: T, on_end: Callable[[], None]) -> None:
        self._loop.calls[self._name] -= 1
        if not self._future.done():
            self._future.set_result(result)
        on_end()

    def _end_badly(self, error: BaseException, on_end: Callable[[], None]) -> None:
        self._loop.calls[self._name] -= 1
        if self._future.done():
            self._loop.call_exception_handler(
                {"message": f"{self._name}, abandoned", "exception": error}
            )
        else:
            self._future.set_exception(error)
        on_end()


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
    while hasattr(function, "func"):
        function = function.func
    name: str | None = getattr(function, "__qualname__", None)
    return repr(function) if name is None else name  # that of a bound state may be megabytes
