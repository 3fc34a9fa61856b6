"""The moments of a save, as the engine sees them: it makes them come, and learns who waits.

A save runs on the engine's loop; whoever waits may be a coroutine of any loop or a thread
without one. Both wait for an `Outcome`, which exactly one path completes. What callers have
of this, and no more, is in `handle`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import weakref
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from ckptio._failures import described
from ckptio._outcome import Outcome
from ckptio._texts import shown
from ckptio.errors import ConfigError, EngineClosedError, SaveAbortedError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
P = ParamSpec("P")
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


class Moment(Generic[T]):
    """A moment of a save: it comes once, or never will.

    Args:
        require_elsewhere: Called before a thread blocks for it; raises where that thread is
            the one that makes it come.

    Attributes:
        is_awaited: Whether anybody has begun to wait for it, or for what comes with it.
        is_raised: Whether somebody who waited to the end has the error of its failure.
        on_seen: Called, on the thread of whoever learns that the moment has come, or will not.
        on_raised: Called there when it is `is_raised`.
    """

    def __init__(self, require_elsewhere: Callable[[], object] | None = None) -> None:
        self._outcome: Outcome[T] = Outcome()
        self._require_elsewhere = require_elsewhere or _nothing
        self._heard_by: set[object] = set()
        self._pid = os.getpid()
        self.is_awaited = self.is_raised = False
        self.on_seen: Callable[[], object] = _nothing
        self.on_raised: Callable[[], object] = _nothing

    def reach(self, value: T) -> None:
        """Say that the moment has come; to be called once. Wakes whoever waits."""
        self._outcome.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Say that the moment will not come; to be called once. Wakes whoever waits."""
        self._outcome.set_exception(error)

    def fail_unless_done(self, error: BaseException) -> bool:
        """Do as `fail`, unless it has come or failed already; whether this is how it ended."""
        return self._outcome.try_exception(error)

    def done(self) -> bool:
        """Whether the moment has come, or the save failed before it."""
        is_done = self._outcome.done()
        if is_done:
            self.on_seen()
        return is_done

    def error(self) -> BaseException | None:
        """Give why the moment did not come, once it is `done`; `None` if it did."""
        return self._outcome.exception()

    def heard(self) -> object:
        """Count one more waiter, who hears how it ends; gives the token that stands for it."""
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
        self._require_here()
        future = self._outcome.wrapped()
        future.add_done_callback(self._look)  # before those of whoever waits
        return future

    def _look(self, future: asyncio.Future[T]) -> None:
        """Call `on_seen`; and mark an error as seen, which a cancelled waiter does not collect."""
        if not future.cancelled():
            future.exception()
            self.on_seen()

    def _require_here(self) -> None:
        """Look whether this is the process in which the moment comes, if it has not come yet.

        Raises:
            EngineClosedError: It is a forked child of that, where nobody would ever tell.
        """
        if self._pid != os.getpid() and not self._outcome.done():
            raise EngineClosedError(
                "the save is the parent's, which forked: wait for it there, or before it forks"
            )

    async def come(self) -> T:
        """Wait, on the running loop, until the moment has come; see `handle.Milestone`."""
        future = self.wrapped()
        waiter = self.heard()
        try:
            await asyncio.wait((future,))
        except BaseException:  # it gives up: the error, if there will be one, is not seen
            self._heard_by.discard(waiter)
            raise
        try:
            self._raises()
            return future.result()
        finally:
            del future, self  # the error refers to this frame: no reference cycle

    async def ended(self) -> bool:
        """Wait until the moment has come (true) or will not (false); counts as no wait."""
        future = self._wrapped()
        await asyncio.wait((future,))
        return future.exception() is None

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the moment has come; see `handle.Milestone`."""
        _require_seconds(timeout_s)
        self._require_here()
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
        try:
            self._raises()
            result = self._outcome.result()
            self.on_seen()
            return result
        finally:
            del self  # as above

    def _raises(self) -> None:
        """Note that somebody who waited to the end is given the error, if there is one."""
        if self.error() is not None:
            self.is_raised = True
            self.on_raised()

    def wait_done(self) -> None:
        """Block until the moment has come or will not come; see `handle.Milestone`."""
        self._require_here()
        if not self._outcome.done():
            self._require_elsewhere()
        self._outcome.wait()
        self.on_seen()


class SaveMoments:
    """All moments of a save, and whether somebody has seen how it ended.

    Attributes:
        path: What is being written.
        save_id: The save's own id.
        copy_to: Where it is copied to when it is committed; empty for nowhere.
        submitted: Every copy has begun: it was made, or its device was told to make it.
        staged: Every byte is copied; the source may change.
        committed: The checkpoint exists.
        durable: The last tier has the checkpoint, whole; the commit where there is one tier.
        retrieved: Whether somebody has seen how the save ended.
        stop: Asks for the end of the save; from any thread.
        fence: Orders the calling thread's current streams behind the copies.
    """

    #: True until `__init__` ends, so that `__del__` of what is half made logs nothing.
    _is_told = True

    def __init__(
        self,
        path: str,
        save_id: str,
        *,
        stop: Callable[[], None] | None = None,
        fence: Callable[[], None] | None = None,
        stop_copy: Callable[[], None] | None = None,
        copy_to: str = "",
        require_elsewhere: Callable[[], object] | None = None,
    ) -> None:
        """Of a save that is about to begin.

        Args:
            path: What is being written.
            save_id: The save's own id.
            stop: Asks for the end of the save; from any thread.
            fence: Orders the calling thread's current streams behind the copies. Not for a
                state on the CPU, which has none: once it is copied, nothing is left to order.
            stop_copy: Asks for the end of the copy to a second tier, if there is one.
            copy_to: Where that is.
            require_elsewhere: Raises on the engine's own thread; called before one blocks.
        """
        self.path = path
        self.save_id = save_id
        self.copy_to = copy_to
        self.submitted: Moment[None] = Moment(require_elsewhere)
        self.staged: Moment[None] = Moment(require_elsewhere)
        self.committed: Moment[CheckpointInfo] = Moment(require_elsewhere)
        self.durable: Moment[CheckpointInfo] = (
            self.committed if stop_copy is None else Moment(require_elsewhere)
        )
        self.retrieved = False
        self.stop = stop or _nothing
        self.fence = fence or _nothing
        self._stop_copy = stop_copy or _nothing
        self._keepers: list[Callable[[], Callable[[SaveMoments], object] | None]] = []
        settled = weakref.WeakMethod(self._let_go)  # no reference cycle
        for moment in self._all():
            moment.on_raised = functools.partial(_call_if_there, settled)
        self._is_told = False

    def __del__(self) -> None:
        """Log the error of a save that nobody waited for, as asyncio does for its tasks."""
        self.tell()

    def tell(self) -> None:
        """Log the error of a save that nobody has waited for, once."""
        if not self._is_told and self.durable.done() and self.is_unheard():
            self._is_told = True
            error = self.error()
            assert error is not None  # noqa: S101  # it has ended, unheard
            # somebody wanted an end of it, or an exception of theirs has left the block
            level = logging.WARNING if isinstance(error, SaveAbortedError) else logging.ERROR
            words = "%s failed and nobody waited for it: %s"
            _log.log(level, words, self.what_failed(), described(error))

    def what_failed(self) -> str:
        """Name what has failed: the save, or the copy of what it has committed."""
        if self.committed.error() is None:
            return f"the copy of {self.path!r} to {self.copy_to!r}"
        return f"the save to {self.path!r}"

    def is_unheard(self) -> bool:
        """Whether the save, or its copy, is under way, or has failed unseen.

        Unlike `not is_settled()`, this is false for a failure that somebody is about to see.
        """
        if not self.durable.done():
            return True
        if self.committed.error() is not None and self.retrieved:
            return False
        return self.error() is not None and not any(each.is_error_seen for each in self._all())

    def is_settled(self) -> bool:
        """Whether both have ended, and somebody was given the error if there is one; for good."""
        if not self.durable.done():
            return False
        if self.error() is None or (self.committed.error() is not None and self.retrieved):
            return True
        return any(each.is_raised for each in self._all())

    def error(self) -> BaseException | None:
        """Give why the save, or its copy, failed, once both have ended; `None` if neither did."""
        return self.committed.error() or self.durable.error()

    def retrieve(self) -> None:
        """Note that whoever had to see how the save ends does, or has."""
        self.retrieved = True
        self._let_go()

    def seen(self) -> None:
        """Do as `retrieve`, for the end of its copy, too."""
        self.durable.heard()
        self.durable.is_raised = True
        self.retrieve()

    def fail(self, error: BaseException) -> None:
        """Have every moment that has not come fail: the save ended without a commit. Once."""
        for moment in self._all():
            moment.fail_unless_done(error)
        if self.retrieved or any(moment.is_raised for moment in self._all()):
            self._let_go()

    def is_over(self) -> None:
        """Nothing is left to stop: let go of what stops it, which may refer to this (a cycle)."""
        self.stop = self._stop_copy = _nothing

    def let_go_by(self, forget: Callable[[SaveMoments], object]) -> None:
        """Have a method called when it has failed and somebody has seen that.

        The error has the frames of who caught it, with all that the program had there. The method
        is called on any thread, the engine's too, and again; so it must not wait for a lock.

        Args:
            forget: Of an object that keeps the save; this does not keep that.
        """
        self._keepers.append(weakref.WeakMethod(forget))

    def _let_go(self) -> None:
        if self.is_settled():
            for keeper in self._keepers:
                _call_if_there(keeper, self)

    def _all(self) -> tuple[Moment[Any], ...]:
        return self.submitted, self.staged, self.committed, self.durable

    def abort(self) -> None:
        """Ask for the end of the save and of its copy; whoever asks has seen how they end."""
        self.seen()
        self.stop()
        self._stop_copy()


def _require_seconds(timeout_s: Any) -> None:
    """Check how long somebody will wait: what is no number, as nan, is neither long nor short.

    Raises:
        ConfigError: It is none.
    """
    is_number = timeout_s is None or isinstance(timeout_s, Real)
    if not is_number or not (timeout_s is None or timeout_s <= 0 or timeout_s > 0):
        raise ConfigError(f"timeout_s= is a number of seconds, not {shown(timeout_s)}")


def _call_if_there(
    weak: Callable[[], Callable[P, object] | None], *args: P.args, **kwargs: P.kwargs
) -> None:
    method = weak()
    if method is not None:
        method(*args, **kwargs)


def _nothing() -> None:
    """Nobody has to know, and there is nothing to stop or to order."""
