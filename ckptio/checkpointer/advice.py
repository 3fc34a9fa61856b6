"""What to do about a step that is damaged or missing: nothing is loaded in its stead unasked."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckptio.checkpointer.steps import step_name
from ckptio.errors import CorruptionError, FormatError, RankError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NUM_SHOWN = 8
_DAMAGED = (CorruptionError, FormatError)


class advice(contextlib.AbstractContextManager[None]):  # noqa: N801  # used as a function
    """A block that adds notes of what to do to an error that says that a step is damaged.

    Args:
        steps: The committed steps that are known, lowest first, of which the highest is loaded;
            empty if the caller named the step.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_of_a_rank = isinstance(error, RankError) and error.was_caused_by(*_DAMAGED)
        is_damage = isinstance(error, FormatError) or is_of_a_rank
        if error is None or not is_damage:
            return
        error.add_note("`ckptio verify` says what of it is damaged")
        if len(self._steps) > 1:
            error.add_note(
                f"load(step={self._steps[-2]}) loads the committed step before it, and"
                " save(..., overwrite=True) replaces this one when its number comes again"
            )


def missing(steps: Sequence[int]) -> str:
    """Say which committed steps there are, for the error about one that is not there.

    Args:
        steps: The committed steps, lowest first.
    """
    if not steps:
        return "the run has no committed step"
    shown = steps[-_NUM_SHOWN:]
    named = f"{'steps' if len(steps) > 1 else 'step'} {', '.join(map(str, shown))}"
    num_more = len(steps) - len(shown)
    return f"the run has {named}{f', and {num_more} below them' if num_more else ''}"


def misnamed(names: Mapping[int, str]) -> str:
    """Say that a run has no step, but checkpoints that are called otherwise.

    Args:
        names: Theirs, one or more, by the step that each may be meant as.
    """
    steps = sorted(names)
    shown = ", ".join(repr(names[step]) for step in steps[-_NUM_SHOWN:])
    num_more = len(steps[:-_NUM_SHOWN])
    return (
        f"there are no steps here, but {shown}{f', and {num_more} below them' if num_more else ''},"
        f" which a Checkpointer passes over; to go on from {names[steps[-1]]!r}, rename it"
        f" {step_name(steps[-1])!r}"
    )
