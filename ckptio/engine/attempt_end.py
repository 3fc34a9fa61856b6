"""What becomes of what a save has written when it does not get to its commit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ckptio._aio import shielded, take_back_cancel
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
    """Remove what a save that failed has made, unless the next one goes on with it.

    Args:
        attempt: What it has made.
        job: The save.
        error: What ended it, which the caller raises.

    Raises:
        asyncio.CancelledError: It was aborted meanwhile, and is not in doubt: whoever hears of an
            abort counts on it that nothing has changed.
    """
    leaves = job.resumes and may_go_on(error)
    try:
        await shielded(attempt.leave() if leaves else attempt.abort())
    except asyncio.CancelledError:
        if not getattr(error, "in_doubt", False):
            raise
        take_back_cancel()


def may_go_on(error: BaseException) -> bool:
    """Whether somebody, or the system, stopped what can be resumed: nothing is wrong with it."""
    return not isinstance(error, Exception) or (
        isinstance(error, (StorageError, SaveAbortedError))
        and not isinstance(error, (CommitConflictError, CheckpointChangedError))
    )
