"""Failures of saves that nobody has seen: a run is not to go on for long without a checkpoint.

A loop that waits for `staged` alone hears of no failed commit. The log does; but a state on which
ranks disagree is refused at each step, and a full disk stays full. So whoever saves next is told:
at once of what will be refused again, and of anything else when it is the third in a row. To raise
each failure at once was rejected: a store that fails for a minute is no reason to end a run.
"""

from __future__ import annotations

import errno
import weakref
from typing import TYPE_CHECKING, Any

from ckptio.errors import PlanError, RankError, SaveAbortedError, StalePlanError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptio.moments import SaveMoments

_MAX_IN_A_ROW = 3


class Losses:
    """Failed saves that nobody has seen, since one was committed or the failure of one was seen."""

    def __init__(self) -> None:
        self._counted: weakref.WeakSet[SaveMoments] = weakref.WeakSet()
        self._failed: list[tuple[int, SaveMoments]] = []

    def note(self, saves: Iterable[tuple[int, SaveMoments]]) -> None:
        """Take note of how saves have ended.

        Args:
            saves: Steps and their saves, in the order in which they began. Each has to be among
                them in some call after its end.
        """
        for step, save in saves:
            if not save.committed.done() or save in self._counted:
                continue
            self._counted.add(save)
            if save.committed.error() is None or save.is_settled():
                self._failed.clear()  # whoever has seen this one knows
            else:
                self._failed.append((step, save))
        self._failed = [(step, save) for step, save in self._failed if not save.is_settled()]

    def check(self) -> None:
        """Raise if the run must not go on as it does; called before another save begins.

        Raises:
            BaseException: The error of one of the failed saves, with a note that names the others.
                All of them count as seen then.
        """
        failed = list(self._failed)  # a signal's handler that saves may see them all meanwhile
        again = [each for each in failed if _comes_again(each[1].committed.error())]
        if not again and len(failed) < _MAX_IN_A_ROW:
            return
        step, save = again[-1] if again else failed[-1]
        error = save.committed.error()
        assert error is not None  # noqa: S101  # it has failed
        others = ", ".join(str(other) for other, _ in failed if other != step)
        more = f", nor were those of {others}" if others else ""
        error.add_note(f"the save of step {step} was not committed{more}; nobody waited for that")
        for _, each in failed:
            each.seen()
        self._failed = [each for each in self._failed if each not in failed]  # as above
        raise error


def _comes_again(error: BaseException | None) -> bool:
    """Whether the next save would be refused as well: because of the state, not of a storage.

    A plan of an earlier save that no longer fits is made anew, and does not count.
    """
    if isinstance(error, RankError):
        return error.was_caused_by(PlanError)
    return isinstance(error, PlanError) and not isinstance(error, StalePlanError)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a save or a copy failed as there was no room, on this rank or on another."""
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, RankError):
        begins = tuple(f"{StorageError.__name__}: [Errno {code}]" for code in full)
        return any(cause.startswith(begins) for cause in error.causes.values())
    return isinstance(error, OSError) and error.errno in full


def missed_deadline(
    step: int, save: SaveMoments, root: Any, deadline_s: float | None
) -> SaveAbortedError | None:
    """Say how the last save of a run, which missed its deadline, has ended.

    Args:
        step: What it saves.
        save: The save.
        root: Of the run, as it was given.
        deadline_s: What it missed, counted from the signal.

    Returns:
        The error; `None` if the abort was too late.
    """
    if save.error() is None:
        return None
    what = f"step {step} of {str(root)!r} was not committed"
    lost = "and its save was aborted; the steps before it are untouched"
    if save.committed.error() is None:
        what = f"step {step} was committed, but not copied to the second tier"
        lost = "and the copy was stopped; a later run that finds the step goes on with it"
    deadline = f"within {deadline_s:g} s of the signal"
    return SaveAbortedError(f"{what} {deadline}, {lost}. Give it more time, or save more often")
