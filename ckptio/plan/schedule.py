"""When to save: policies as values. Pure, no clock.

Steps and seconds differ in who can decide. Every rank knows by itself whether a step is
due. Clocks of ranks differ, so a time is judged on rank 0 alone and agreed upon; here it
is only a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptio.errors import ConfigError
from ckptio.plan.retention import require_count, require_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvery:
    """Save when so many steps or so many seconds have passed; at the first of the two.

    Attributes:
        steps: Save at multiples of this; where they are skipped, at the next step asked for.
            A run that goes back to an earlier step saves at multiples again.
        seconds: Save when the last save was asked for this long ago.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Check the intervals.

        Raises:
            ConfigError: One is wrong, or there is none.
        """
        if self.steps is None and self.seconds is None:
            raise ConfigError("SaveEvery takes steps=, seconds= or both")
        if self.steps is not None:
            require_count("SaveEvery", self.steps)
        if self.seconds is not None:
            require_seconds("SaveEvery", self.seconds)

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether a step is to be saved because of its number.

        Args:
            step: The step.
            last_step: The one saved or loaded last; 0 if there was none.
        """
        if self.steps is None:
            return False
        if step < last_step:  # the run went back, by other means than `Checkpointer.load`
            return step % self.steps == 0
        return step // self.steps > last_step // self.steps

    def wait_s(self, elapsed_s: float) -> float | None:
        """Say in how many seconds a save is due; `None` if time plays no part.

        Args:
            elapsed_s: Seconds since the last one was asked for, or since the beginning.
        """
        return None if self.seconds is None else max(0.0, self.seconds - elapsed_s)
