"""A coroutine that is under way on an engine's loop, as others see it, and that loop's thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, Generic, TypeVar

from ckptio._outcome import Outcome
from ckptio.errors import ConfigError

T = TypeVar("T")


class Running(Generic[T]):
    """A coroutine under way on an engine's loop.

    Args:
        is_endless: It has no end of its own: whoever waits for that stops it.

    Attributes:
        is_endless: As given.
        end: How it ends.
        is_aborted: Whether it was told to stop; it may have ended before.
        reason: Why it was aborted, if whoever waits for it did not ask for that.
    """

    def __init__(self, *, is_endless: bool = False) -> None:
        self.is_endless = is_endless
        self.end: Outcome[T] = Outcome()
        self.reason: Exception | None = None
        self.is_aborted = False
        self._cancelled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def started(self) -> bool:
        """The task runs. Called on it, first of all.

        One that was aborted before begins all the same, and is cancelled where it first
        waits: what it has to say of its end, it says.

        Returns:
            Whether it is the first one for this; a second has nothing to do.
        """
        if self._task is not None:
            return False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if self.is_aborted:  # looked at after the task is there, and `abort` the other way round
            self._cancel()
        return True

    def abort(self, reason: Exception | None = None) -> None:
        """Cancel the task, once; nothing happens after its end. From any thread, without a lock.

        Called again, it goes on where an interrupt stopped it.

        Args:
            reason: What who waits raises; the cancellation itself if not given.
        """
        if self.end.done():
            return
        if not self.is_aborted:
            self.reason = reason
            self.is_aborted = True
        if self._task is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the task before it
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        """Cancel the task, on its loop, unless that was done or it has nothing left to do.

        One that has said how it ended is left alone: it would count as cancelled all the same.
        """
        if self._task is not None and not self._cancelled and not self.end.done():
            self._cancelled = True
            self._task.cancel()

    def wait_ended(self) -> None:
        """Block until the task has ended, however it did; an endless one is stopped first."""
        if self.is_endless:
            self.abort()
        self.end.wait()


class LoopThread:
    """The thread of an engine's loop, on which nobody may wait for that engine.

    Attributes:
        number: Which one it is; `None` before it begins.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def require_elsewhere(self) -> None:
        """Look whether this is another thread.

        Raises:
            ConfigError: It is the loop's, which would wait for itself.
        """
        if threading.get_ident() == self.number:
            raise ConfigError(
                "an observer runs on the engine's own thread and can neither call the engine nor"
                " wait for its saves: let it leave word for the trainer, or use another engine on"
                " another thread"
            )


def cannot_copy() -> TypeError:
    """Say why an engine that was opened is not sent to another process, nor copied."""
    return TypeError(
        "an engine that was opened cannot be pickled or copied: it has a thread and files of this"
        " process; open one where it is needed"
    )


def cannot_leave() -> ConfigError:
    """Give the error of an observer that leaves the engine whose thread it is on."""
    return ConfigError(
        "an observer runs on one of the engine's own threads and cannot leave the engine, which"
        " waits for them to end: let it leave word for the thread that runs the block"
    )


def why_no_loop(error: RuntimeError | OSError) -> str:
    """Say why a loop on a thread of its own does not begin."""
    if isinstance(error, OSError):
        return (
            f"no loop begins for the engine: {error.strerror or error}; where too many files are"
            " open, close some or raise the limit (ulimit -n)"
        )
    why = "the limit of threads or processes is reached"
    if not threading.main_thread().is_alive():  # Python 3.12 gives none then
        why = "the program is about to end"
    return f"no thread begins for the engine: {why}"
