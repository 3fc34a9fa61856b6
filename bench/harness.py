"""Run a case: warm-up, interleaved rounds, medians.

A case gives subjects: ckptio, its peers, and limits of the machine. In each round every subject
but a slow peer is measured once, and the order is another one in each round, so that a drift of
the machine (a neighbour, a disk that fills its cache) falls on all of them alike, and no subject
always follows the same other one (`bench.order`). Before a measurement garbage is collected
and the disk is quiet (`sync`). Before a measurement of saves to the disk (`saved_nbytes`) the page
cache is in one state for all: as many bytes as the state has are written through it to a file,
which is removed, so that pages are there, recently used and free. (Without that a save through the
page cache was several times slower after a direct write than after a save like itself.) What
`Subject.prepare` does comes after that: in `save_over` it saves the checkpoint that is replaced.
All of that stays outside the clock. After a measurement the result is checked and the files go.

Figures are medians of all rounds of a case; a table has each row's number of them, `n`. Slow
peers are measured in fewer of more than three rounds, and no fewer than three.

A peer that is not installed, or that fails, has its reason in the table instead of figures.
ckptio has no such excuse: its errors end the case.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from bench.disk import recycle_pages
from bench.order import draw_rounds

Kind = Literal["ckptio", "peer", "limit"]
Figures = Mapping[str, float]
#: Below this a run only shows that it works, and waits neither for garbage nor for the disk.
QUIET_SCALE = 0.1
#: Rounds of a slow subject, where a case has so many.
_SLOW_ROUNDS = 3
Step = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """Do nothing, where a subject needs nothing done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A figure that a group of subjects is compared by. Smaller is better.

    Attributes:
        key: Its key in what `Subject.run` returns; ends in its unit.
        label: The head of its column.
        factor: From the unit of the key to the unit of the label.
        has_rate: Whether the group's bytes, divided by it, are a rate worth printing.
        has_ratio: Whether the ratio to ckptio's is worth printing.
        digits: Digits after the point.
    """

    key: str
    label: str
    factor: float = 1.0
    has_rate: bool = False
    has_ratio: bool = True
    digits: int = 3

    def show(self, value: float) -> str:
        """Write a value with the label, for a line of progress."""
        return f"{value * self.factor:.{self.digits}f} {self.label}"


SECONDS = Metric(key="elapsed_s", label="s", has_rate=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Something that is measured.

    Attributes:
        name: As the table has it.
        kind: ckptio, a peer, or a limit of the machine.
        run: Does the work; times it itself, and gives the figures by key.
        prepare: Called before `run`, outside the clock.
        check: Called after `run`; raises if the work was not done.
        clean: Called last, whatever happened.
        is_slow: Measured in no more than three rounds, or half of them.
        missing: Why it cannot be measured; empty if it can.
    """

    name: str
    run: Callable[[], Awaitable[Figures]]
    kind: Kind = "peer"
    prepare: Step = nothing
    check: Step = nothing
    clean: Step = nothing
    is_slow: bool = False
    missing: str = ""


@dataclass(slots=True, kw_only=True)
class Row:
    """What was measured of one subject: the values of each figure, round by round."""

    name: str
    kind: Kind
    missing: str = ""
    values: dict[str, list[float]] = field(default_factory=dict)

    def median(self, key: str) -> float | None:
        """Give the median of a figure, or `None` if there is none."""
        values = self.values.get(key)
        return statistics.median(values) if values else None


@dataclass(slots=True, kw_only=True)
class Group:
    """Subjects that were measured together."""

    title: str
    metrics: Sequence[Metric]
    nbytes: int
    note: str
    rows: list[Row]


@dataclass(slots=True, kw_only=True)
class Bench:
    """What a case has to work with.

    Attributes:
        case: The case's name.
        scale: Factor on the size of every state; 1 is the size that is reported.
        rounds: Rounds of each group.
        directory: Where to write; on the file system that is measured.
        say: Takes a line of progress.
        groups: What was measured so far.
    """

    case: str
    scale: float
    rounds: int
    directory: str
    say: Callable[[str], None]
    groups: list[Group] = field(default_factory=list)

    def path(self, name: str) -> str:
        """Give a path of that name to write to; nothing is there."""
        path = os.path.join(self.directory, name)
        shutil.rmtree(path, ignore_errors=True)
        return path

    async def compare(
        self,
        title: str,
        subjects: Sequence[Subject],
        *,
        metrics: Sequence[Metric] = (SECONDS,),
        nbytes: int = 0,
        note: str = "",
        has_warmup: bool = True,
        saved_nbytes: int = 0,
    ) -> None:
        """Measure subjects side by side.

        Args:
            title: Of the group.
            subjects: What to measure.
            metrics: What to compare by.
            nbytes: Bytes that each subject moves; 0 if rates mean nothing here.
            note: Printed below the table.
            has_warmup: Measure each once before it counts, if there is more than one round.
            saved_nbytes: Bytes that each subject saves in `directory`; so many pages of the
                page cache are used and given back before each measurement.
        """
        rows = {s.name: Row(name=s.name, kind=s.kind, missing=s.missing) for s in subjects}
        self.groups.append(
            Group(title=title, metrics=metrics, nbytes=nbytes, note=note, rows=list(rows.values()))
        )
        for label, subject in self._schedule(subjects, has_warmup=has_warmup):
            row = rows[subject.name]
            if row.missing:
                continue
            try:
                figures = await self._measure(subject, saved_nbytes)
            except Exception as error:  # a peer's goes into the table, ours ends the case
                if subject.kind == "ckptio":
                    raise
                row.missing = f"failed: {type(error).__name__}: {error}".splitlines()[0][:120]
                row.values.clear()
                figures = {}
            if label != "warm-up":
                for key, value in figures.items():
                    row.values.setdefault(key, []).append(value)
            shown = ", ".join(m.show(figures[m.key]) for m in metrics if m.key in figures)
            self.say(f"{self.case} {label}: {subject.name}: {shown or row.missing}")

    def _schedule(
        self, subjects: Sequence[Subject], *, has_warmup: bool
    ) -> Iterator[tuple[str, Subject]]:
        """Give who is measured when: a warm-up each, then rounds in drawn order."""
        found = {subject.name: subject for subject in subjects if not subject.missing}
        has_warmup = has_warmup and self.rounds > 1
        if has_warmup:
            for subject in found.values():
                yield "warm-up", subject
        slow_rounds = max(_SLOW_ROUNDS, self.rounds // 2)
        rounds = [
            [name for name in found if number < slow_rounds or not found[name].is_slow]
            for number in range(self.rounds)
        ]
        last = next(reversed(found), None) if has_warmup else None
        for number, order in enumerate(draw_rounds(rounds, last), 1):
            for name in order:
                yield f"{number}/{self.rounds}", found[name]

    async def _measure(self, subject: Subject, saved_nbytes: int) -> Figures:
        if self.scale >= QUIET_SCALE:
            gc.collect()
            if saved_nbytes:
                recycle_pages(self.directory, saved_nbytes)
            os.sync()
        try:
            await subject.prepare()
            figures = await subject.run()
            await subject.check()
        finally:
            await subject.clean()
        return figures


CaseFunction = Callable[[Bench], Coroutine[None, None, None]]


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def elapsed_s(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._start


@contextmanager
def timed(figures: dict[str, float], key: str = SECONDS.key) -> Iterator[None]:
    """Put the seconds that the block takes into `figures`."""
    clock = Clock()
    yield
    figures[key] = clock.elapsed_s()


@dataclass(frozen=True, slots=True)
class Case:
    """A case, as the command line knows it.

    Attributes:
        name: Its name.
        run: Measures.
        rounds: Rounds, if the command line says nothing.
    """

    name: str
    run: CaseFunction
    rounds: int

    @property
    def doc(self) -> str:
        """What it times and against what."""
        lines = (self.run.__doc__ or "").strip().splitlines()
        return "\n".join(line.strip() for line in lines)


def case(*, rounds: int) -> Callable[[CaseFunction], Case]:
    """Make a case of a coroutine function of the same name."""

    def make(run: CaseFunction) -> Case:
        name = getattr(run, "__name__", "")
        return Case(name=name, run=run, rounds=rounds)

    return make
