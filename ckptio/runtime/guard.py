"""A lock for threads that signals may interrupt, and whose handlers may call again."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: Seconds after which a loop looks again whether a lock is free.
_POLL_S = 0.001


class Guard:
    """A lock that no interrupt leaves locked.

    From Python 3.14 on, `with lock:` may stay locked: a signal's handler may run when the lock is
    taken and the block has not begun, and if it raises, as Ctrl-C does, nobody releases the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # it knows who has it

    def run(self, function: Callable[[], T]) -> T:
        """Call `function`, one thread at a time. Blocks until it is this one's turn.

        A signal's handler does not wait if the thread that it has interrupted holds the lock.
        """
        if self._lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  # conditions ask it
            return function()
        try:
            self._lock.acquire()
            return function()
        finally:
            try:  # noqa: SIM105  # an interrupt may come to a call of anything else
                self._lock.release()
            except RuntimeError:  # one came before it was taken
                pass

    async def run_aside(self, function: Callable[[], T]) -> T:
        """Do the same on an engine's loop, without blocking that while the lock is taken.

        A signal's handler may have interrupted the thread that holds the lock, and wait for this
        loop: for a save, or for the end of the engine.
        """
        while True:
            try:  # the loop may be of the main thread, to which interrupts come
                if self._lock.acquire(blocking=False):
                    return function()
            finally:
                try:  # noqa: SIM105  # as above
                    self._lock.release()
                except RuntimeError:  # another thread has it
                    pass
            await asyncio.sleep(_POLL_S)
