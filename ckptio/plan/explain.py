"""Say which rank of a group reads what, for whom and why."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptio.format.manifest import Manifest
    from ckptio.plan.exchange import ExchangePlan, Unit

#: Why a rank reads what it wants where nothing is passed on.
APART = "passing on would not pay"


class Line(NamedTuple):
    """One line of an explanation.

    Attributes:
        reader: The rank that reads.
        file: Name of the file.
        start: First byte.
        stop: End, exclusive.
        takers: The ranks to which it passes the bytes on.
        reason: Why it is this rank.
    """

    reader: int
    file: str
    start: int
    stop: int
    takers: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        """Write it for people."""
        others = f", for {', '.join(map(str, self.takers))} too" if self.takers else ""
        return (
            f"rank {self.reader} reads [{self.start}, {self.stop}) of {self.file}"
            f" ({self.reason}){others}"
        )


def explain_text(lines: Iterable[Line]) -> str:
    """Write an explanation for people, a line each."""
    return "\n".join(map(str, lines))


def explain(
    plan: ExchangePlan,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    *,
    is_exchanged: bool = True,
) -> tuple[Line, ...]:
    """Say which rank reads what from which file, for whom and why.

    Args:
        plan: The plan.
        manifest: The one that was planned for.
        names: Only what holds bytes of these tensors; everything if not given.
        is_exchanged: Whether the plan is followed. If not, each rank reads what it wants.

    Returns:
        Neighbouring units of one reader, takers and reason together, by file and start; by
        rank first if nothing is exchanged.
        `explain_text` writes them for people.
    """
    spans = None if names is None else _spans(manifest, set(names))
    lines: list[Line] = []
    for unit, reason in _by_place(plan) if is_exchanged else _by_rank(plan):
        stop = unit.start + unit.nbytes
        if spans is not None and not any(
            first < stop and unit.start < end for first, end in spans.get(unit.file, ())
        ):
            continue
        name = manifest.files[unit.file].name
        line = Line(unit.reader, name, unit.start, stop, unit.takers, reason)
        last = lines[-1] if lines else line
        if last.stop == line.start and last._replace(start=line.start, stop=stop) == line:
            lines[-1] = last._replace(stop=stop)
            continue
        lines.append(line)
    return tuple(lines)


def _by_place(plan: ExchangePlan) -> list[tuple[Unit, str]]:
    """Give units and reasons by file and start."""
    return sorted(zip(plan.units, plan.reasons, strict=True), key=lambda found: found[0][1:3])


def _by_rank(plan: ExchangePlan) -> Iterator[tuple[Unit, str]]:
    """Give what each rank reads if nothing is passed on, by rank, file and start."""
    units = [
        unit._replace(reader=rank, wanting=(rank,)) for unit in plan.units for rank in unit.wanting
    ]
    for unit in sorted(units, key=lambda unit: (unit.reader, unit.file, unit.start)):
        yield unit, APART


def _spans(manifest: Manifest, names: set[str]) -> dict[int, list[tuple[int, int]]]:
    """Find the bytes of tensors in files, copies too."""
    spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for tensor in manifest.tensors:
        if tensor.name in names:
            for chunk in tensor.chunks:
                nbytes = tensor.chunk_nbytes(chunk)
                for file, start in ((chunk.file, chunk.start), *chunk.copies):
                    spans[file].append((start, start + nbytes))
    return spans
