"""Whether a run is to end, and when its loop is to hear of that: not before it can save.

A loop that asks `should_save` is told to save last, and then to end. One that decides itself when
to save, on one rank, never asks; all that it does is to look at `preempted`, and what it does then
is not known here:

    if preempted: save, leave          one look a step: the one that says yes has to come soon
    if due or preempted: save          two looks a step: the first of them has to say yes
    if preempted: leave
    while not preempted: ...           and perhaps a save behind the loop

So the first look after the call says yes. The one right behind a save does not: the same step
would be saved twice; the next one does, whatever was saved. To wait for a save was rejected: the
first of these would not end. A loop that leaves then and saves nothing more is not told in time,
whatever is done here; the log says so. So is one that looks twice a step where the signal comes
between the two.

One that has saved nothing here yet, as it was just resumed, may be about to ask, once a step. So it
is told at the third look after the call, with no question between: at the first that saves of the
two looks a step, too.
"""

from __future__ import annotations

#: Looks after the call in which a loop that has saved nothing yet does not ask.
_NUM_SILENT_LOOKS = 2


class Ending:
    """What is known of the end of a run.

    Attributes:
        is_alone: Whether no other rank has to save the same step.
        is_called: Whether there was a call for the last save, on any rank.
        is_asked_for: Whether the loop has called `should_save`.
        is_told: Whether the loop has been told.
        reason: Of the call.
    """

    def __init__(self) -> None:
        self.is_alone = False
        self.is_called = False
        self.is_asked_for = False
        self.is_told = False
        self.reason = ""
        self._saved: int | None = None
        self._is_right_after_save = False
        self._num_silent = 0  # looks since the call, of a loop that has saved nothing
        self._num_looks = 0  # others since the call
        self._has_saved_since = False

    def call(self, reason: str) -> None:
        """Take note of the call; of the first one, if there are more."""
        if not self.is_called:
            self.reason = reason
            self._has_saved_since = False
        self.is_called = True

    def saved(self, step: int) -> None:
        """Take note of a save that was started."""
        self._saved = step
        self._is_right_after_save = self._has_saved_since = True

    def look(self, *, is_last: bool = False) -> bool:
        """Say whether the run is to end.

        Args:
            is_last: Whether the block is left, so that no save comes any more.
        """
        is_free = is_last or self._num_looks > 0 or not self._is_right_after_save
        self._is_right_after_save = False
        if not self.is_called:
            return self.is_told
        if self._saved is None and self._num_silent < _NUM_SILENT_LOOKS:
            self._num_silent += 1
        else:
            self._num_looks += 1
            self.is_told |= is_free and self.is_alone and not self.is_asked_for
        return self.is_told

    def loss(self) -> str | None:
        """Say what a loop of its own has left unsaved, though it was told; `None` if it has not."""
        if not self.is_told or self.is_asked_for or self._has_saved_since:
            return None
        last = "none was" if self._saved is None else f"the last step saved is {self._saved}"
        return (
            f"{self.reason}: the run ends, and nothing was saved since; {last}. Save where"
            " preempted is true, or where should_save() says so"
        )
