"""At which steps a run saves, counted from the one that it goes on from.

Steps that are known to be committed when the run begins count as saved: those that it loads,
or else the highest of those that were listed before and is not above the first step asked for.
Above it they are of a run that went back, by other means than `Checkpointer.load`, so that no
save is left out on their account. What was never listed is not known: at worst a save too many.

A run that goes back later is known by what it discards, or by the first step asked for after
loads: if that is not above the last one that counted, the highest of those that were loaded, and
are not above it, counts. What else was loaded was only looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckptio.plan.schedule import SaveEvery


class Pace:
    """The steps of a run. Alike on all ranks, as what it is told is.

    Args:
        every: When to save; never by itself if not given.
    """

    def __init__(self, every: SaveEvery | None) -> None:
        self._every = every
        self._last: int | None = None  # saved or loaded last, or found when the run began
        self._seen: frozenset[int] = frozenset()  # loaded since the last question
        self._found: frozenset[int] = frozenset()
        self._has_begun = False  # whether a step was saved or asked for

    def found(self, steps: Collection[int]) -> None:
        """Note committed steps."""
        if self._last is None:  # else nobody asks for them any more
            self._found |= frozenset(steps)

    def discarded(self, after: int) -> None:
        """Forget the steps above one: the run goes on from there."""
        self._found = frozenset(step for step in self._found if step <= after)
        if self._last is not None:
            self._last = min(self._last, after)

    def loaded(self, step: int) -> None:
        """Note that a step was loaded; once the run has begun, mostly to be looked at."""
        if self._has_begun:
            self._seen |= {step}
        else:
            self._last = step

    def saved(self, step: int) -> None:
        """Note that a step's save has begun."""
        self._has_begun = True
        self._last, self._seen = step, frozenset()

    def is_due(self, step: int) -> bool:
        """Whether to save a step because of its number."""
        self._has_begun = True
        if self._last is None:
            self._last = max((found for found in self._found if found <= step), default=0)
        seen, self._seen = [seen for seen in self._seen if seen <= step], frozenset()
        if seen and step <= self._last:
            self._last = max(seen)
        return self._every is not None and self._every.is_due(step, self._last)
