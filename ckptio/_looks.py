"""Looks at what may hang, as a mount does whose server is gone: they are given up.

Nobody can stop such a look, and whoever waits for it hangs, too. So each has a thread of its own,
which is left to itself. It must hold nothing, and change nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import threading
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ckptio._aio import run_into

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
P = ParamSpec("P")

#: Looks that were given up and have not ended, by process and what they look at. Single
#: operations, without a lock: one that a fork finds taken would stay so.
_given_up: dict[tuple[int, str], concurrent.futures.Future[None]] = {}


async def run_or_give_up(function: Callable[[], T], wait_s: float, name: str, place: str) -> T:
    """Run `function` on a thread of its own, which is given up if it takes too long.

    While one hangs that was given up, no other of its name begins at the same place: each would
    take a thread for good. It is waited for instead, as long.

    Args:
        function: What to call.
        wait_s: How long to wait, in seconds.
        name: Of the thread.
        place: What is looked at.

    Raises:
        TimeoutError: It was given up, and may go on, for ever; or no thread could begin.
    """
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + wait_s
    key = (os.getpid(), f"{name} {place}")
    while (hung := _given_up.get(key)) is not None and not hung.done():
        await _wait(asyncio.wrap_future(hung), ends_s - loop.time())
    end: concurrent.futures.Future[None] = concurrent.futures.Future()

    def look() -> T:
        end.set_running_or_notify_cancel()  # who waits for it does not cancel it
        try:
            return function()
        finally:
            end.set_result(None)
            if _given_up.get(key) is end:
                _given_up.pop(key, None)

    future = loop.run_in_executor(_OneThread(name), look)
    try:
        return await _wait(future, ends_s - loop.time())
    finally:
        if end.running():
            _given_up[key] = end
            if end.done():  # just now
                _given_up.pop(key, None)


async def _wait(future: asyncio.Future[T], wait_s: float) -> T:
    """Wait for what goes on if it takes too long.

    Raises:
        TimeoutError: It does.
    """
    try:
        await asyncio.wait((future,), timeout=max(0.0, wait_s))
        if not future.done():
            raise TimeoutError
        return future.result()
    finally:
        future.cancel()  # one that is given up may end when the loop has gone


class _OneThread(concurrent.futures.Executor):
    """One daemon thread for one call, which nobody else makes where none can begin.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Run `function`; its future has a `TimeoutError` if there is no thread."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        work = functools.partial(run_into, future, function, *args, **kwargs)
        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except RuntimeError:  # no memory for one, or the interpreter is about to end
            future.set_exception(TimeoutError(f"no thread can begin for {self._name}"))
        return future
