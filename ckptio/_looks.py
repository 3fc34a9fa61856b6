"""Read-only calls that may hang, such as a stat on a mount whose server is gone ("looks").

Nobody can stop such a call, and whoever waits for it hangs, too. So each look runs on a thread of
its own, which is abandoned if the look takes too long; it must hold nothing, and change nothing.

A hung look costs a thread for good, so their number is limited. Which mount a path is on cannot be
told without asking there, but what lies in one directory, as the steps of a run do, is mostly on
one: once `_MAX_HUNG` looks hang in a directory, no other begins there. While fewer hang, a single
place may be broken, and its neighbours are still looked at. Looks without a time limit
(`wait_s=None`) are never refused; they are limited by place, and wait for looks at that very place.

A mount that is slow but answers is not taken for one that hangs: looks there run side by side,
and the time limit of each counts from its own beginning. Whoever is told too soon that nothing
answers takes older data.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ckptio._threads import run_into

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
P = ParamSpec("P")

#: Looks of one name that go on in one directory, at the most: a thread each.
_MAX_LOOKS = 16
#: How many that were given up hang there when no other one begins.
_MAX_HUNG = 2


@dataclass(slots=True, eq=False)
class _Look:
    """A look that has begun and has not ended.

    Attributes:
        kind: Process, name, and directory (or place, for looks without a time limit). How many of
            one kind there are is limited.
        place: What is looked at.
        is_given_up: Whether its time ran out: it hangs. A waiter that is cancelled does not set it.
        settled: Done when the look has ended, or is given up. Nobody cancels it.
    """

    kind: tuple[int, str, str]
    place: str
    is_given_up: bool = False
    settled: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)

    def __post_init__(self) -> None:
        self.settled.set_running_or_notify_cancel()

    def give_up(self) -> None:
        """Take it for one that hangs."""
        self.is_given_up = True
        self.settle()

    def end(self) -> None:
        """Leave its place to others. From any thread, more than once."""
        _begun.discard(self)
        self.settle()

    def settle(self) -> None:
        """Tell those that wait for it, once. From any thread."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.settled.set_result(None)


#: Of all loops of the process. Single operations, without a lock: one that a fork finds taken would
#: stay so. Loops that begin a look at the same moment may have one more.
_begun: set[_Look] = set()


async def run_or_give_up(
    function: Callable[[], T], wait_s: float | None, name: str, place: str
) -> T:
    """Run `function` on a thread of its own, which is given up if it takes too long.

    Looks of one name are limited, as each that hangs keeps a thread. While one that was given up
    still hangs at the same place, or `_MAX_HUNG` do in the same directory, this raises at once.
    While `_MAX_LOOKS` are under way in the directory (at that very place, if `wait_s` is `None`),
    it waits until one of them has ended, for `wait_s` at most: then those are given up.

    Args:
        function: What to call.
        wait_s: How long it may take, in seconds, from when it begins; `None` for as long as it
            takes: then the thread is abandoned only if the caller is cancelled.
        name: Of the thread. Looks of one name have a time limit all, or none has.
        place: The path of what is looked at.

    Raises:
        TimeoutError: It was given up, and may go on, for ever; or it could not begin.
    """
    loop = asyncio.get_running_loop()
    # who waits for as long as it takes is not to wait for what only lies beside it
    room = place if wait_s is None else os.path.dirname(place)
    look = _Look((os.getpid(), name, room), place)
    while ahead := _ahead(look):
        if not await _ends_one([asyncio.wrap_future(other.settled) for other in ahead], wait_s):
            for other in ahead:  # nobody waits for them any more, or not for as long
                other.give_up()
    _begun.add(look)

    def run() -> T:
        try:
            return function()
        finally:
            look.end()

    future = loop.run_in_executor(_OneThread(name, look.end), run)
    if not await _ends_one([future], wait_s):
        look.give_up()
        raise TimeoutError(f"nothing answers at {place!r}")
    return future.result()


def _ahead(look: _Look) -> list[_Look]:
    """Give the looks of which one has to be settled before `look` begins; none if it may begin.

    Raises:
        TimeoutError: Those that hang leave no room for it.
    """
    # a copy: without a GIL, `tuple` may find that another thread has changed the set meanwhile
    others = [other for other in _begun.copy() if other.kind == look.kind]
    hung = [other for other in others if other.is_given_up]
    if len(hung) >= _MAX_HUNG or any(other.place == look.place for other in hung):
        raise TimeoutError(f"nothing answers at {hung[0].place!r}")
    if len(others) < _MAX_LOOKS:
        return []
    return [other for other in others if not other.is_given_up]


async def _ends_one(futures: Sequence[asyncio.Future[T]], wait_s: float | None) -> bool:
    """Wait until one of `futures` has ended; gives whether one has, in time. Ends none of them."""
    try:
        first = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait(futures, timeout=wait_s, return_when=first)
        return bool(done)
    finally:
        for future in futures:
            future.cancel()  # what is given up may end when the loop has gone


class _OneThread(concurrent.futures.Executor):
    """One daemon thread for one call. If no thread can begin, the call is not made at all.

    Args:
        name: Of the thread.
        ended: Called when it has nothing left to do, also where the call was stopped before it
            began; or where no thread did.
    """

    def __init__(self, name: str, ended: Callable[[], None]) -> None:
        self._name = name
        self._ended = ended

    def submit(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Run `function`; its future has a `TimeoutError` if there is no thread."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def work() -> None:
            try:
                run_into(future, function, *args, **kwargs)
            finally:
                self._ended()

        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except RuntimeError:  # no memory for one, or the interpreter is about to end
            future.set_exception(TimeoutError(f"no thread can begin for {self._name}"))
            self._ended()
        return future
