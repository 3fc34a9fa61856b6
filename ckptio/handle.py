"""What `save` returns: the moments of a save, and the means to wait for them.

These are the faces of what the engine has in `moments`: they hold nothing of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from ckptio._aio import outlive

if TYPE_CHECKING:
    from collections.abc import Generator

    from ckptio.moments import CheckpointInfo, Moment, SaveMoments

T = TypeVar("T")


class Milestone(Generic[T]):
    """A moment of a save. Await it, or `wait` for it from a thread; as often as you like.

    Cancelling the wait only stops waiting.
    """

    def __init__(self, moment: Moment[T]) -> None:
        """Made by a handle.

        Args:
            moment: What the engine makes come.
        """
        self._moment = moment

    def __repr__(self) -> str:
        """Say whether it has come."""
        state = "pending"
        if self._moment.done():
            state = "reached" if self._moment.error() is None else "failed"
        return f"<Milestone {state}>"

    def __await__(self) -> Generator[object, None, T]:
        """Wait on the running loop, without stopping it."""
        return self._moment.come().__await__()

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the moment has come.

        Args:
            timeout_s: Seconds to wait for it; for ever if not given, not at all if below 0.

        Raises:
            TimeoutError: It has not come within `timeout_s` seconds.
            ConfigError: `timeout_s` is no number of seconds; or the moment has not come, and
                this is an observer on the engine's own thread.
            EngineClosedError: It had not come when this process was forked off the save's.
        """
        try:
            return self._moment.wait(timeout_s)
        finally:
            del self  # the error refers to this frame: no reference cycle

    def wait_done(self) -> None:
        """Block until the moment has come or will not come.

        Raises:
            ConfigError, EngineClosedError: As `wait`; nothing else.
        """
        self._moment.wait_done()

    def error(self) -> BaseException | None:
        """Give why the moment did not come, once it is `done`; `None` if it did."""
        return self._moment.error()

    def done(self) -> bool:
        """Whether the moment has come, or the save failed before it."""
        return self._moment.done()


class SaveHandle:
    """A save under way.

    `await handle` is the commit: when it returns, the checkpoint exists and is as durable
    as configured. Cancelling that wait aborts the save, and the cancellation arrives when
    nothing of it is left. `await handle.staged` is earlier: the source may change.

    `await handle.durable` is later, where the save has a second tier (`then=`): the copy
    exists there. Without one it is the commit. If the copy fails, it raises, and the
    checkpoint on the first tier stays as it is; `await handle` never raises for that. If a
    later save with `overwrite=True` replaced the checkpoint before it was copied, it raises
    `CheckpointChangedError` (on several ranks, a `RankError` that was caused by it): what
    counts then is the copy of the later save.

    A handle that is never awaited does not stop its save; leaving the engine waits for it,
    and for the copy, and raises the error of what nobody waited for. The log has that error
    before, when the next save begins.

    Attributes:
        path: What is being written.
        save_id: The save's own id.
        submitted: Every copy has begun: it was made, or its device was told to make it.
        staged: Every byte is copied; the source may change. What is wrong with the path is raised
            here, too, if it is known by then: it waits for that for up to 10 s until any save
            of the engine has begun, and for 0.1 s from then on.
        committed: The checkpoint exists; what `await handle` waits for.
        durable: The last tier has the checkpoint, whole.
    """

    def __init__(self, moments: SaveMoments) -> None:
        """Made for the caller of `save`.

        Args:
            moments: What the engine has of the save.
        """
        self.path: str = moments.path
        self.save_id: str = moments.save_id
        self.submitted: Milestone[None] = Milestone(moments.submitted)
        self.staged: Milestone[None] = Milestone(moments.staged)
        self.committed: Milestone[CheckpointInfo] = Milestone(moments.committed)
        self.durable: Milestone[CheckpointInfo] = self.committed
        if moments.durable is not moments.committed:
            self.durable = Milestone(moments.durable)
        self._moments = moments

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

    def __reduce__(self) -> NoReturn:
        """Refuse by name to be sent to another process, or copied.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"{self!r} cannot be pickled or copied, since its engine is here; send its path, or"
            " what its result() returns"
        )

    def __await__(self) -> Generator[object, None, CheckpointInfo]:
        """Wait for the commit on the running loop, without stopping it.

        Raises:
            CheckpointError: The save failed; what was at the path is untouched, unless the
                error's `in_doubt` says that the commit may have happened (see `StorageError`).
            asyncio.CancelledError: The waiter was cancelled; the save is aborted by then,
                unless its commit had already happened.
        """
        return self._committed().__await__()

    async def _committed(self) -> CheckpointInfo:
        moments = self._moments
        moments.retrieve()
        try:
            return await outlive(moments.committed.wrapped(), on_cancel=moments.stop)
        finally:
            del self, moments  # as above

    def result(self, timeout_s: float | None = None) -> CheckpointInfo:
        """Block until the commit, from a thread.

        Raises:
            CheckpointError: The save failed; what was at the path is untouched, unless the
                error's `in_doubt` says that the commit may have happened (see `StorageError`).
            TimeoutError: It is not committed within `timeout_s` seconds; it goes on.
            ConfigError, EngineClosedError: As `Milestone.wait`.
        """
        try:
            return self._moments.committed.wait(timeout_s)
        finally:
            del self  # as above

    def error(self) -> BaseException | None:
        """Give why the save, or its copy, failed, once both have ended; `None` if neither did."""
        return self._moments.error()

    def done(self) -> bool:
        """Whether the save is committed or has failed."""
        return self._moments.committed.done()

    def abort(self) -> None:
        """Ask the save to stop and to remove what it wrote. Returns at once.

        `await handle` then raises `SaveAbortedError`, unless the commit came first. Leaving
        the engine does not raise it: whoever aborted knows. A copy to a second tier stops, too,
        and of an engine for one call those that earlier runs owed; a later run goes on.
        """
        self._moments.abort()

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
        self._moments.staged.is_awaited = True  # what is queued behind the copies waits for them
        try:
            self._moments.submitted.wait()
            self._moments.fence()
        finally:
            del self  # as above
