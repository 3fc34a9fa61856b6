"""Whether a run is to end, and when its loop is told: not before it can save.

A signal, or `preempt`, is the call for the last save. A loop that asks `should_save` hears there at
which step to save last, and from then on `preempted` is true. A loop that decides by itself when to
save (only where there is one rank) never asks: all that it does is to look at `preempted`, and what
it does next is not known here. It may be any of these:

    if preempted: save, leave          one look a step
    if due or preempted: save          two looks a step: the first has to say yes, as only that
    if preempted: leave                one leads to a save
    while not preempted: ...           one look a step, and perhaps a save after the loop

So the first look after the call says yes, unless it comes right after a save, where a yes would
have the same step saved twice; then the next look does, whatever was saved. To say yes only after
another save was rejected: the first of these loops would never end. A loop of the second kind whose
signal comes between its two looks leaves without a save, and so does one of the last kind without a
save after it. Nothing can be done about that here; the log says so.

A loop that has saved nothing here yet, such as one that was just resumed, may still be about to ask
`should_save`, once a step. So it is told at the third look after the call, if it has not asked by
then; with two looks a step that is the first one of a step, too, which leads to a save.
"""

from __future__ import annotations

#: So many looks after the call get a no in a loop that has saved nothing yet: it may still ask.
_NUM_SILENT_LOOKS = 2


class Ending:
    """What is known of the end of a run.

    Attributes:
        is_alone: Whether there is one rank: no other has to save the same step.
        is_called: Whether there was a call for the last save, on any rank.
        is_asked_for: Whether the loop has called `should_save`.
        is_told: Whether the loop has been told that the run is to end.
        reason: Why the last save was called for.
    """

    def __init__(self) -> None:
        self.is_alone = False
        self.is_called = False
        self.is_asked_for = False
        self.is_told = False
        self.reason = ""
        self._saved: int | None = None  # the step whose save was started last
        self._is_right_after_save = False  # no look since the last save was started
        self._num_silent = 0  # looks since the call before which nothing had been saved
        self._num_looks = 0  # the other looks since the call
        self._has_saved_since = False  # whether a save was started since the call

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
        """Say what a loop that never asks has left unsaved after it was told; `None` if nothing."""
        if not self.is_told or self.is_asked_for or self._has_saved_since:
            return None
        last = "none was" if self._saved is None else f"the last step saved is {self._saved}"
        return (
            f"{self.reason}: the run ends, and nothing was saved since; {last}. Save where"
            " preempted is true, or where should_save() says so"
        )
