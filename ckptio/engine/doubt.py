"""Whether anybody can tell what became of a save of many ranks that did not end well.

    its manifest was found      it is committed, unless this rank could not make it durable, or
                                rank 0 is alive and its commit has failed or may still fail
    it was not                  it is not committed, unless the ranks, or an abort of rank 0's,
                                were told that it may be

What neither settles is in doubt, and is raised as such: a save that is told as failed is not
there, one that is told as committed is.
"""

from __future__ import annotations

import asyncio
import errno

from ckptio.errors import CheckpointExistsError, CommitConflictError, RankError, StorageError
from ckptio.ranks.interface import NOT_STOPPED

#: When rank 0 fails with one of these, every rank raises that type instead of `RankError`, so that
#: `except CheckpointExistsError` works on all ranks.
OF_THE_PATH = (CheckpointExistsError, CommitConflictError)


def doubt_of(
    error: BaseException,
    own: StorageError | None,
    problem: StorageError | None,
    *,
    leads: bool,
    is_found: bool,
    path: str,
) -> RankError | StorageError | None:
    """Give what is to be raised where nobody can tell whether a save is committed for good.

    Args:
        error: What ended it: what the ranks were told, a cancellation whose cause that is, or an
            error of this rank alone.
        own: What failed in this rank's storage; on rank 0 the commit, whose abort may find out
            late that it is in doubt.
        problem: Why this rank could not make a manifest durable that it found.
        leads: Whether this is rank 0.
        is_found: Whether the save's manifest is there.
        path: Of the checkpoint.

    Returns:
        What was told, its own text and `in_doubt` changed; or `None` if there is no doubt.
    """
    told = error if isinstance(error, RankError) else error.__cause__
    told = told if isinstance(told, RankError) else None
    said = told or own or problem
    if said is None:
        if leads or not isinstance(error, asyncio.CancelledError):
            return None
        # cancelled twice: nobody waited for what the ranks were told
        text = "the save was cancelled; rank 0 may commit it, or take back what it committed"
        return StorageError(text, path=path, in_doubt=True)
    if is_found:
        failed = own is not None if leads else told is not None and _may_have_failed(told)
        is_in_doubt = failed or problem is not None
    else:
        is_in_doubt = any(known is not None and known.in_doubt for known in (told, own))
    return _in_doubt(said) if is_in_doubt else None


def _may_have_failed(told: RankError) -> bool:
    """Whether rank 0 is alive and its commit has failed, or may still fail."""
    has_failed = told.was_caused_by(StorageError, *OF_THE_PATH, rank=0)
    return has_failed or told.causes.get(0, "").startswith(NOT_STOPPED)


def _in_doubt(error: RankError | StorageError) -> RankError | StorageError:
    """Have an error say that what failed may have been committed."""
    if error.in_doubt:
        return error
    doubt = "but it may stand: look whether the checkpoint is there"
    if isinstance(error, StorageError):
        text, path, code = f"{error.message}; {doubt}", str(error.filename), error.errno
        return StorageError(text, path=path, code=code or errno.EIO, in_doubt=True)
    error.args = (f"{error}; {doubt}",)
    error.in_doubt = True
    return error
