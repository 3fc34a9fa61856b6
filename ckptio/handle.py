"""What `save` returns: three moments of a save, and the means to wait for them.

A save runs on the engine's loop; who waits may be a coroutine of any loop or a thread
without one. Both wait for an `Outcome`, which exactly one path completes.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ckptio._aio import outlive
from ckptio._outcome import Outcome
from ckptio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")
_log = logging.getLogger("ckptio")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint.

    Attributes:
        path: Its path or URL.
        save_id: The save's own id.
        nbytes: Bytes of its data files.
        num_files: Its data files.
        num_tensors: Tensors (and arrays) in them.
        staged_s: Seconds from the call of `save` until the source could change.
        committed_s: Seconds from the call of `save` until the commit.
        plan_reused: The plan of an earlier save of the same structure was used.
    """

    path: str
    save_id: str
    nbytes: int
    num_files: int
    num_tensors: int
    staged_s: float
    committed_s: float
    plan_reused: bool


class Milestone(Generic[T]):
    """A moment of a save. Await it, or `wait` for it from a thread; as often as you like.

    Cancelling the wait only stops waiting.

    Args:
        require_elsewhere: Called before a thread blocks for it; raises where that thread is
            the one that makes it come.

    Attributes:
        is_awaited: Whether anybody has begun to wait for it, or for what comes with it.
        on_seen: Called, on the thread of whoever learns that the moment has come.
    """

    def __init__(self, require_elsewhere: Callable[[], object] | None = None) -> None:
        self._outcome: Outcome[T] = Outcome()
        self._require_elsewhere = require_elsewhere or _nothing
        self._heard_by: set[object] = set()
        self.is_awaited = False
        self.on_seen: Callable[[], object] = _nothing

    def __await__(self) -> Generator[object, None, T]:
        """Wait on the running loop, without stopping it."""
        return self._waited().__await__()

    async def _waited(self) -> T:
        future = self.wrapped()
        waiter = self.heard()
        try:
            await asyncio.wait((future,))
        except BaseException:  # it gives up: the error, if there will be one, is not seen
            self._heard_by.discard(waiter)
            raise
        return future.result()

    def heard(self) -> object:
        """Somebody hears how it ends; gives what stands for them. Called by the handle, too."""
        waiter = object()
        self._heard_by.add(waiter)
        return waiter

    @property
    def is_error_seen(self) -> bool:
        """Whether it has failed, and who waited to the end, or still does, has that error."""
        return bool(self._heard_by) and self.error() is not None

    def wrapped(self) -> asyncio.Future[T]:
        """Give a future of the running loop that is done when the moment has come."""
        self.is_awaited = True
        return self._wrapped()

    def _wrapped(self) -> asyncio.Future[T]:
        future = self._outcome.wrapped()
        future.add_done_callback(self._look)  # before those of whoever waits
        return future

    def _look(self, future: asyncio.Future[T]) -> None:
        """Somebody learns of it now; an error that a cancelled waiter does not collect is seen."""
        if not future.cancelled():
            future.exception()
            self.on_seen()

    async def ended(self) -> bool:
        """Wait until the moment has come (true) or will not (false); counts as no wait."""
        future = self._wrapped()
        await asyncio.wait((future,))
        return future.exception() is None

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the moment has come.

        Args:
            timeout_s: Seconds to wait for it; for ever if not given, not at all if below 0.

        Raises:
            TimeoutError: It has not come within `timeout_s` seconds.
            ConfigError: `timeout_s` is no number of seconds; or the moment has not come, and
                this is an observer on the engine's own thread.
        """
        _require_seconds(timeout_s)
        if not self._outcome.done():
            self._require_elsewhere()
        self.is_awaited = True
        waiter, has_ended = self.heard(), False
        try:
            has_ended = self._outcome.wait(timeout_s)
        finally:
            if not has_ended:  # as above
                self._heard_by.discard(waiter)
        if not has_ended:
            raise TimeoutError
        result = self._outcome.result()
        self.on_seen()
        return result

    def wait_done(self) -> None:
        """Block until the moment has come or will not come.

        Raises:
            ConfigError: As `wait`; nothing else.
        """
        if not self._outcome.done():
            self._require_elsewhere()
        self._outcome.wait()
        self.on_seen()

    def error(self) -> BaseException | None:
        """Give why the moment did not come, once it is `done`; `None` if it did."""
        return self._outcome.exception()

    def done(self) -> bool:
        """Whether the moment has come, or the save failed before it."""
        is_done = self._outcome.done()
        if is_done:
            self.on_seen()
        return is_done

    def reach(self, value: T) -> None:
        """The moment has come. Called by the engine, once."""
        self._outcome.set_result(value)

    def fail(self, error: BaseException) -> None:
        """The moment will not come. Called by the engine, once."""
        self._outcome.set_exception(error)


class SaveHandle:
    """A save under way.

    `await handle` is the commit: when it returns, the checkpoint exists and is as durable
    as configured. Cancelling that wait aborts the save, and the cancellation arrives when
    nothing of it is left. `await handle.staged` is earlier: the source may change.

    `await handle.durable` is later, where the save has a second tier (`then=`): the copy
    exists there. Without one it is the commit. If the copy fails, it raises, and the
    checkpoint on the first tier stays as it is; `await handle` never raises for that.

    A handle that is never awaited does not stop its save; leaving the engine waits for it,
    and for the copy, and raises the error of what nobody waited for. The log has that error
    before, when the next save begins.

    Attributes:
        path: What is being written.
        save_id: The save's own id.
        submitted: Every copy has begun: it was made, or its device was told to make it.
        staged: Every byte is copied; the source may change.
        committed: The checkpoint exists; what `await handle` waits for.
        durable: The last tier has the checkpoint, whole.
        retrieved: Whether somebody has seen how the save ended.
    """

    #: True until `__init__` ends, so that `__del__` of a half-made handle logs nothing.
    _is_told = True

    def __init__(
        self,
        path: str,
        save_id: str,
        *,
        abort: Callable[[], None],
        fence: Callable[[], None],
        stop_copy: Callable[[], None] | None = None,
        require_elsewhere: Callable[[], object] | None = None,
    ) -> None:
        """Made by the engine.

        Args:
            path: What is being written.
            save_id: The save's own id.
            abort: Asks the engine to stop the save; from any thread.
            fence: Orders the calling thread's current streams behind the copies.
            stop_copy: Asks the engine to stop the copy to a second tier, if there is one.
            require_elsewhere: Raises on the engine's own thread; called before one blocks.
        """
        self.path = path
        self.save_id = save_id
        self.staged: Milestone[None] = Milestone(require_elsewhere)
        self.submitted: Milestone[None] = Milestone(require_elsewhere)
        self.committed: Milestone[CheckpointInfo] = Milestone(require_elsewhere)
        self.durable: Milestone[CheckpointInfo] = (
            self.committed if stop_copy is None else Milestone(require_elsewhere)
        )
        self.retrieved = False
        self._abort = abort
        self._stop_copy = stop_copy
        self._fence = fence
        self._is_told = False

    def __del__(self) -> None:
        """Log the error of a save that nobody waited for, as asyncio does for its tasks."""
        self.tell()

    def tell(self) -> None:
        """Log the error of a save that nobody has waited for, once. Called by the engine."""
        if not self._is_told and self.durable.done() and self.is_unsettled():
            self._is_told = True
            _log.error(
                "the save to %r failed and nobody waited for it: %r", self.path, self.error()
            )

    def is_unsettled(self) -> bool:
        """Whether the save, or its copy, is under way, or failed and nobody has seen that."""
        if not self.durable.done():
            return True
        if self.committed.error() is not None and self.retrieved:
            return False
        moments = (self.submitted, self.staged, self.committed, self.durable)
        return self.error() is not None and not any(moment.is_error_seen for moment in moments)

    def error(self) -> BaseException | None:
        """Give why the save, or its copy, failed, once both have ended; `None` if neither did."""
        return self.committed.error() or self.durable.error()

    def seen(self) -> None:
        """Whoever had to see how it ended has. Called by the engine."""
        self.retrieved = True
        self.durable.heard()

    def __repr__(self) -> str:
        """Say how far the save is."""
        state = "staged" if self.staged.done() else "staging"
        if self.done():
            state = "committed" if self.committed.error() is None else "failed"
            if state == "committed" and self.durable is not self.committed:
                copied = self.durable.done() and self.durable.error() is None
                state = "durable" if copied else "copying"
                if self.durable.done() and not copied:
                    state = "committed, not copied"
        return f"<SaveHandle {self.path!r} {state}>"

    def __await__(self) -> Generator[object, None, CheckpointInfo]:
        """Wait for the commit on the running loop, without stopping it.

        Raises:
            CheckpointError: The save failed; what was at the path is untouched.
            asyncio.CancelledError: The waiter was cancelled; the save is aborted by then,
                unless its commit had already happened.
        """
        return self._committed().__await__()

    async def _committed(self) -> CheckpointInfo:
        self.retrieved = True
        return await outlive(self.committed.wrapped(), on_cancel=self._abort)

    def fail(self, error: BaseException) -> None:
        """The save ended without a commit. Called by the engine, once."""
        for milestone in (self.submitted, self.staged, self.committed, self.durable):
            if not milestone.done():
                milestone.fail(error)

    def result(self, timeout_s: float | None = None) -> CheckpointInfo:
        """Block until the commit, from a thread.

        Raises:
            CheckpointError: The save failed; what was at the path is untouched.
            TimeoutError: It is not committed within `timeout_s` seconds; it goes on.
            ConfigError: As `Milestone.wait`.
        """
        try:
            return self.committed.wait(timeout_s)
        finally:
            self.retrieved = self.retrieved or self.done()

    def done(self) -> bool:
        """Whether the save is committed or has failed."""
        return self.committed.done()

    def abort(self) -> None:
        """Ask the save to stop and to remove what it wrote. Returns at once.

        `await handle` then raises `SaveAbortedError`, unless the commit came first. Leaving
        the engine does not raise it: who aborted knows. A copy to a second tier stops, too,
        and of an engine for one call those that earlier runs owed; a later run goes on.
        """
        self.seen()
        self._abort()
        if self._stop_copy is not None:
            self._stop_copy()

    def fence(self) -> None:
        """Make the current CUDA stream wait for the copies, so that kernels may follow.

        What is queued on the stream afterwards (an optimizer step) sees the source only
        after it was copied, and the host goes on at once. Blocks until every copy has
        been queued: at once if the pool holds the state, for the length of the waves if
        it does not. A state on the CPU has no stream: its copies are made when this returns,
        as `submitted` says.

        Raises:
            CheckpointError: The save failed before.
            ConfigError: Copies are to be made, and this is an observer on the engine's own thread.
        """
        self.staged.is_awaited = True  # what is queued behind the copies waits for them
        self.submitted.wait()
        self._fence()


def _require_seconds(timeout_s: Any) -> None:
    """Check how long somebody will wait: what is no number, as nan, is neither long nor short.

    Raises:
        ConfigError: It is none.
    """
    is_number = timeout_s is None or isinstance(timeout_s, Real)
    if not is_number or not (timeout_s is None or timeout_s <= 0 or timeout_s > 0):
        raise ConfigError(f"timeout_s= is a number of seconds, not {timeout_s!r}")


def _nothing() -> None:
    """Nobody has to know who learns of a moment."""
