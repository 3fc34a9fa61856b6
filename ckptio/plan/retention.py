"""Which steps of a run stay: policies as values, and what follows from them.

Pure: no files, no clock. A policy names the steps that it keeps; two of them joined by `|`
keep what either does. Two steps stay whatever the policy says: the highest, which a
restart loads, and the one that was saved last, which differs from it in a run that went
back to an earlier step. Of saves that are known it is the one that was called last, else
the one that was committed last.
"""

from __future__ import annotations

import datetime as dt  # noqa: TC003  # those who look at the types of fields need it, as below
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence  # noqa: TC003
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ckptio._texts import shown
from ckptio.config import MAX_S
from ckptio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

Mode = Literal["min", "max"]
#: What numbers of steps are below, as numbers of bytes are: Python writes none of any length.
_END = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A committed step.

    Attributes:
        step: Its number.
        created: When it was committed.
        metrics: What was measured then, as given to `save`.
        save_id: The id of the save that wrote it.
    """

    step: int
    created: dt.datetime
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    save_id: str = ""


class Retention(ABC):
    """A policy: says which steps to keep. Frozen; joined with another by `|`."""

    __slots__ = ()

    @abstractmethod
    def kept(self, records: Sequence[StepRecord]) -> set[int]:
        """Name the steps to keep.

        Args:
            records: All committed steps, in order of their numbers.
        """

    def __or__(self, other: Retention) -> KeepAny:
        """Keep what either keeps."""
        if not isinstance(other, Retention):
            return NotImplemented
        return KeepAny((*_parts_of(self), *_parts_of(other)))


@dataclass(frozen=True, slots=True)
class KeepAny(Retention):
    """Keep what any of some policies keeps. Made by `|`."""

    policies: tuple[Retention, ...]

    def kept(self, records: Sequence[StepRecord]) -> set[int]:
        """Name the steps to keep; see `Retention`."""
        return set[int]().union(*(policy.kept(records) for policy in self.policies))


@dataclass(frozen=True, slots=True)
class KeepAll(Retention):
    """Keep every step."""

    def kept(self, records: Sequence[StepRecord]) -> set[int]:
        """Name the steps to keep; see `Retention`."""
        return {record.step for record in records}


@dataclass(frozen=True, slots=True)
class KeepLast(Retention):
    """Keep the highest steps.

    Attributes:
        num_steps: How many.
    """

    num_steps: int

    def __post_init__(self) -> None:
        """Check the number."""
        require_count("KeepLast", self.num_steps)

    def kept(self, records: Sequence[StepRecord]) -> set[int]:
        """Name the steps to keep; see `Retention`."""
        return {record.step for record in records[-self.num_steps :]}


@dataclass(frozen=True, slots=True)
class KeepEvery(Retention):
    """Keep one step in a while, for good. Give one of the two.

    Attributes:
        steps: Keep the multiples of this.
        seconds: Keep the first step, and then each that was committed at least this long
            after the one kept before it, or before that one: a clock went back, or the run.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Check the interval."""
        if (self.steps is None) == (self.seconds is None):
            raise ConfigError("KeepEvery takes either steps= or seconds=")
        if self.steps is not None:
            require_count("KeepEvery", self.steps)
        else:
            require_seconds("KeepEvery", self.seconds)

    def kept(self, records: Sequence[StepRecord]) -> set[int]:
        """Name the steps to keep; see `Retention`."""
        if self.steps is not None:
            return {record.step for record in records if record.step % self.steps == 0}
        assert self.seconds is not None  # noqa: S101  # one of them is given
        kept: set[int] = set()
        last: dt.datetime | None = None
        for record in records:
            passed_s = None if last is None else (record.created - last).total_seconds()
            if passed_s is None or passed_s < 0 or passed_s >= self.seconds:
                kept.add(record.step)
                last = record.created
        return kept


@dataclass(frozen=True, slots=True)
class KeepBest(Retention):
    """Keep the steps with the best values of a metric; of equal ones, the highest step.

    Steps that were saved without the metric, or with NaN, are not among the best. But as long as
    no step has a value that is a number, all are kept: it may be another name than that of the run,
    and one that diverged has nothing better than what is there.

    Attributes:
        num_steps: How many.
        metric: The name of the metric, as given to `save`.
        mode: Whether the lowest (`"min"`) or the highest (`"max"`) values are the best. Has to be
            said: a wrong guess would keep the worst.
    """

    num_steps: int
    metric: str
    mode: Mode

    def __post_init__(self) -> None:
        """Check the options."""
        require_count("KeepBest", self.num_steps)
        if not isinstance(self.mode, str) or self.mode not in ("min", "max"):
            raise ConfigError(f"KeepBest's mode is 'min' or 'max', not {shown(self.mode)}")
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f"KeepBest's metric is a name, not {shown(self.metric)}")

    def kept(self, records: Sequence[StepRecord]) -> set[int]:
        """Name the steps to keep; see `Retention`."""
        sign = 1 if self.mode == "max" else -1
        measured = [
            (sign * record.metrics[self.metric], record.step)
            for record in records
            if not math.isnan(record.metrics.get(self.metric, math.nan))
        ]
        if not measured:
            return {record.step for record in records}
        return {step for _, step in sorted(measured)[-self.num_steps :]}


@dataclass(frozen=True, slots=True, repr=False)
class KeepSteps(Retention):
    """Keep these steps: pins.

    Attributes:
        steps: Their numbers.
    """

    steps: frozenset[int]

    def __init__(self, *steps: int) -> None:
        for step in steps:
            if type(step) is not int or step < 0:
                raise ConfigError(f"KeepSteps takes numbers of steps, not {shown(step)}")
        object.__setattr__(self, "steps", frozenset(steps))

    def __repr__(self) -> str:
        """Write it as it is called."""
        return f"KeepSteps({', '.join(map(str, sorted(self.steps)))})"

    def kept(self, records: Sequence[StepRecord]) -> set[int]:
        """Name the steps to keep; see `Retention`."""
        return {record.step for record in records if record.step in self.steps}


@dataclass(frozen=True, slots=True)
class KeepIf(Retention):
    """Keep the steps that a function says yes to.

    Attributes:
        predicate: Called with each record, on a thread of the engine.
    """

    predicate: Callable[[StepRecord], bool]

    def __post_init__(self) -> None:
        """Check that it can be called."""
        if not callable(self.predicate):
            raise ConfigError(f"KeepIf takes a function of a record, not {shown(self.predicate)}")

    def kept(self, records: Sequence[StepRecord]) -> set[int]:
        """Name the steps to keep; see `Retention`."""
        return {record.step for record in records if self.predicate(record)}


def plan_removals(
    records: Collection[StepRecord],
    policy: Retention,
    *,
    exempt: Collection[int] = (),
    called: Sequence[str] = (),
) -> tuple[int, ...]:
    """Say which steps go.

    Args:
        records: All committed steps that are known to be good, each once.
        policy: What to keep.
        exempt: Steps that stay whatever the policy says: being written or read.
        called: Ids of saves in the order of their calls, where that is known: of two that were
            under way at once, the earlier one may have been committed after the later one.

    Returns:
        Steps, lowest first; never the highest one, and never the one saved last.
    """
    ordered = sorted(records, key=lambda record: record.step)
    if not ordered:
        return ()
    # of those of which it is known, only the latest that is among these can be the last one
    turns = {save_id: turn for turn, save_id in enumerate(called)}
    latest = max(turns.get(record.save_id, -1) for record in ordered)
    candidates = (record for record in ordered if turns.get(record.save_id, latest) == latest)
    last = max(candidates, key=lambda record: (record.created, record.step))
    kept = policy.kept(ordered) | {ordered[-1].step, last.step} | set(exempt)
    return tuple(record.step for record in ordered if record.step not in kept)


def _parts_of(policy: Retention) -> tuple[Retention, ...]:
    return policy.policies if isinstance(policy, KeepAny) else (policy,)


def require_count(owner: str, value: object) -> None:
    """Check a number of steps.

    Raises:
        ConfigError: It is none.
    """
    if type(value) is not int or not 1 <= value < _END:
        raise ConfigError(f"{owner} takes a positive number of steps, not {shown(value)}")


def require_seconds(owner: str, value: object) -> None:
    """Check a time in seconds.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_S:
        raise ConfigError(
            f"{owner} takes a positive number of seconds, at most {MAX_S:.0e}, not {shown(value)}"
        )
