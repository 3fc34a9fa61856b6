"""What becomes of what a save has written when it does not get to its commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio.errors import (
    CheckpointChangedError,
    CommitConflictError,
    SaveAbortedError,
    StorageError,
)

if TYPE_CHECKING:
    from ckptio.engine.save import SaveJob
    from ckptio.storage.interface import Attempt


async def end_attempt(attempt: Attempt, job: SaveJob, error: BaseException) -> None:
    """Remove what a save that failed has made, unless the next one goes on with it."""
    await (attempt.leave() if job.resumes and may_go_on(error) else attempt.abort())


def may_go_on(error: BaseException) -> bool:
    """Whether somebody, or the system, stopped what can be resumed: nothing is wrong with it."""
    return not isinstance(error, Exception) or (
        isinstance(error, (StorageError, SaveAbortedError))
        and not isinstance(error, (CommitConflictError, CheckpointChangedError))
    )
