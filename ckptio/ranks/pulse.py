"""A timer that beats, and knows when it beat late."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Pulse:
    """Calls a function at even intervals, until it is stopped.

    A timer rather than a task: it has no owner that would have to wait for it.

    Args:
        interval_s: Seconds from one call to the next.
        beat: Takes by how many seconds this call is late: for as long, this loop stood still
            and heard nobody, whoever spoke.
    """

    def __init__(self, interval_s: float, beat: Callable[[float], None]) -> None:
        self._interval_s = interval_s
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._due_s = self._loop.time() + interval_s
        self._timer = self._loop.call_at(self._due_s, self._call)

    def _call(self) -> None:
        now_s = self._loop.time()
        late_s = max(0.0, now_s - self._due_s)
        self._due_s = now_s + self._interval_s
        self._timer = self._loop.call_at(self._due_s, self._call)
        self._beat(late_s)

    def stop(self) -> None:
        """Call no more."""
        self._timer.cancel()
