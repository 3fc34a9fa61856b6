"""Failures of saves that nobody has seen: a run is not to go on for long without a checkpoint.

A loop that waits for `staged` alone hears of no failed commit. The log does; but a state on which
ranks disagree is refused at each step, and a full disk stays full. So whoever saves next is told:
at once of what will be refused again, and of anything else when it is the third in a row. To tell
of each at once was rejected: a store that fails for a minute is no reason to end a run.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ckptio.errors import PlanError, RankError, SaveAbortedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptio.moments import SaveMoments

_MAX_IN_A_ROW = 3


class Losses:
    """Saves that failed since the last one that was committed."""

    def __init__(self) -> None:
        self._counted: weakref.WeakSet[SaveMoments] = weakref.WeakSet()
        self._failed: list[tuple[int, SaveMoments]] = []

    def check(self, saves: Iterable[tuple[int, SaveMoments]]) -> None:
        """Look at how saves have ended, before another one begins.

        Args:
            saves: Steps and their saves, as they began: all since the last check, at least.

        Raises:
            BaseException: How the last of them failed, with a note; it is seen then.
        """
        for step, save in saves:
            if not save.committed.done() or save in self._counted:
                continue
            self._counted.add(save)
            if save.committed.error() is None:
                self._failed.clear()
            else:
                self._failed.append((step, save))
        self._failed = [(step, save) for step, save in self._failed if save.is_unsettled()]
        if not self._failed:
            return
        step, save = self._failed[-1]
        error = save.committed.error()
        assert error is not None  # noqa: S101  # it has failed
        if len(self._failed) < _MAX_IN_A_ROW and not _comes_again(error):
            return
        others = [str(other) for other, _ in self._failed[:-1]]
        before = f", nor those of {', '.join(others)} before it" if others else ""
        error.add_note(f"the save of step {step} was not committed{before}; nobody waited for that")
        for _, failed in self._failed:
            failed.seen()
        self._failed.clear()
        raise error


def _comes_again(error: BaseException) -> bool:
    """Whether it is the state that was refused, and no store."""
    causes = error.causes.values() if isinstance(error, RankError) else ()
    is_planned = any(cause.startswith(f"{PlanError.__name__}:") for cause in causes)
    return isinstance(error, PlanError) or is_planned


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
    if not save.durable.done() or save.error() is None:
        return None
    what = f"step {step} of {str(root)!r} was not committed"
    lost = "and its save was aborted; the steps before it are untouched"
    if save.committed.error() is None:
        what = f"step {step} was committed, but not copied to the second tier"
        lost = "and the copy was stopped; a later run that finds the step goes on with it"
    deadline = f"within {deadline_s:g} s of the signal"
    return SaveAbortedError(f"{what} {deadline}, {lost}. Give it more time, or save more often")
