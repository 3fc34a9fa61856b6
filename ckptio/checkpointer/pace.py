"""At which steps a run saves, counted from the one that it goes on from.

A step that was committed before the run begins counts as saved: the one that it loads last, or
else the highest of those that were listed and are not above the first step asked for. Those above
it are of a run that was taken back by other means than `Checkpointer.load`, and keep this one from
no save. What was never listed is not known: at worst that makes one save too many.

Once the run has begun, it may load a step only to look at it, or to go back to it. It has gone back
if it discards steps, or if the first step that it asks for after a load is not above the last one
that counted. Then the highest step that was loaded since, and is not above the one asked for,
counts instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckptio.plan.schedule import SaveEvery


class Pace:
    """The steps of a run. The same on all ranks, since all are told the same.

    Args:
        every: When to save; never by itself if not given.
    """

    def __init__(self, every: SaveEvery | None) -> None:
        self._every = every
        self._last: int | None = None  # saved or loaded last, or found when the run began
        self._loaded: frozenset[int] = frozenset()  # since a step was last saved or asked for
        self._found: frozenset[int] = frozenset()  # listed as committed, before a step counts
        self._has_begun = False  # whether a step was saved or asked for

    def found(self, steps: Collection[int]) -> None:
        """Note committed steps."""
        if self._last is None:  # otherwise they are not needed any more
            self._found |= frozenset(steps)

    def discarded(self, after: int) -> None:
        """Forget the steps above one: the run goes on from there."""
        self._found = frozenset(step for step in self._found if step <= after)
        if self._last is not None:
            self._last = min(self._last, after)

    def loaded(self, step: int) -> None:
        """Note that a step was loaded; once the run has begun, mostly to be looked at."""
        if self._has_begun:
            self._loaded |= {step}
        else:
            self._last = step

    def saved(self, step: int) -> None:
        """Note that a step's save has begun."""
        self._has_begun = True
        self._last, self._loaded = step, frozenset()

    def is_due(self, step: int) -> bool:
        """Whether to save a step because of its number."""
        self._has_begun = True
        if self._last is None:
            self._last = max((found for found in self._found if found <= step), default=0)
        loaded, self._loaded = [each for each in self._loaded if each <= step], frozenset()
        if loaded and step <= self._last:  # the run went back
            self._last = max(loaded)
        return self._every is not None and self._every.is_due(step, self._last)
