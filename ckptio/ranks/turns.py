"""Engines of one process that are opened on one group at a time: one after another.

The first that was called meets the first of the other ranks before the next one looks for the
others. So the n-th meets the n-th, whichever of them finds its addresses or its store sooner,
and no more than one meeting of a process waits at a time.

Rejected: to number the calls, and to meet by number. Where one rank alone has failed or was
cancelled its numbers are others from then on, and whoever corrects them has to know which.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


class Turns:
    """Queues, each with a name, for tasks on the loops of any threads of this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, in a process that was forked: who was in a queue there is not here."""
        self._lock = threading.Lock()
        self._last: dict[Hashable, Future[None]] = {}

    @contextlib.contextmanager
    def queue(self, name: Hashable) -> Iterator[Future[None] | None]:
        """Be in a queue. Gives what is done when it is this one's turn; None if it is already.

        Whoever leaves before its turn lets nobody pass: the next one waits for those ahead of it.
        """
        own: Future[None] = Future()
        own.set_running_or_notify_cancel()  # the next one, cancelled, must not cancel it
        with self._lock:
            ahead, self._last[name] = self._last.get(name), own
        try:
            yield ahead
        finally:
            if ahead is None:
                self._leave(name, own)
            else:
                ahead.add_done_callback(lambda _: self._leave(name, own))

    def _leave(self, name: Hashable, own: Future[None]) -> None:
        with self._lock:
            if self._last.get(name) is own:
                del self._last[name]
        own.set_result(None)


#: Of all engines of the process: they may be in any thread, and know nothing of each other.
turns = Turns()
os.register_at_fork(after_in_child=turns.forget)


async def is_next(ahead: Future[None] | None, timeout_s: float) -> bool:
    """Wait for what `Turns.queue` gave; false if it takes longer."""
    if ahead is None:
        return True
    waiter = asyncio.wrap_future(ahead)
    try:
        await asyncio.wait((waiter,), timeout=timeout_s)
        return waiter.done()
    finally:
        waiter.cancel()
