"""A lock for callers' threads, to which interrupts come, and signals' handlers that call again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Guard:
    """A lock that no interrupt leaves locked.

    `with lock:` may do that from Python 3.14 on: the handler of a signal that came meanwhile runs
    where the lock is taken and its block has not begun, and if it raises, as Ctrl-C does, nobody
    releases it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a plain one can be released by who does not have it
        self._inside: set[int] = set()  # threads that have it, or wait for it

    def run(self, function: Callable[[], T]) -> T:
        """Call `function`, one thread at a time.

        A signal's handler that calls this on the thread that it interrupted does not wait.
        """
        thread = threading.get_ident()
        if thread in self._inside:
            return function()
        try:
            self._inside.add(thread)
            self._lock.acquire()
            return function()
        finally:
            try:
                self._lock.release()
            except RuntimeError:  # an interrupt came before it was taken
                pass
            finally:
                self._inside.discard(thread)
