"""Who runs a flow, a call of several steps: a thread that blocks, or a task of a loop.

Leaving an engine waits for a flow also where it is between two of its steps, on its caller's
thread. But only for as long as somebody is there who takes the next one: a loop may be stopped
with the task on it, and a handler of a signal that closes the engine may stand on the very
thread that is to go on. What nobody runs any more is not waited for, and its steps are refused.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING

from ckptio._outcome import Outcome

if TYPE_CHECKING:
    import asyncio


class Driver:
    """Who runs a flow. Made there, before its first step.

    Args:
        task: The task that runs it; this thread itself if not given.

    Attributes:
        end: The flow has ended, however it did.
        is_given_up: Nobody waits for it any more.
    """

    def __init__(self, task: asyncio.Task[object] | None = None) -> None:
        self.end: Outcome[None] = Outcome()
        self.is_given_up = False
        self._thread_id = threading.get_ident()
        self._loop = None if task is None else task.get_loop()
        # weak: the task has the frame that has this, and an error may have that: no reference cycle
        self._task = None if task is None else weakref.ref(task)

    def is_there(self, closer_id: int) -> bool:
        """Whether the flow may go on while a thread waits for that.

        Args:
            closer_id: Identifies the thread.
        """
        if self.is_given_up or self._thread_id == closer_id or self.end.done():
            return False
        if self._loop is None or self._task is None:
            # `threading.enumerate` has a lock, which whoever a handler interrupted may hold
            return self._thread_id in sys._current_frames()  # noqa: SLF001  # it is documented
        task = self._task()
        return task is not None and not task.done() and self._loop.is_running()

    def wait_ended(self, closer_id: int, poll_s: float) -> bool:
        """Block until the flow has ended, or nobody is there who runs it.

        Args:
            closer_id: Identifies the thread that waits, or for which this one does.
            poll_s: How often to look who is there.

        Returns:
            Whether it has ended.
        """
        while self.is_there(closer_id):
            self.end.wait(poll_s)
        return self.end.done()
