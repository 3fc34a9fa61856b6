"""`ckptio diff`: in what two checkpoints differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ckptio.cli.config import config_for
from ckptio.cli.outcome import FAILED, FINE, explain
from ckptio.cli.terminal import Terminal
from ckptio.cli.text import count, fold, format_nbytes, visible
from ckptio.errors import CheckpointError
from ckptio.storage.keys import shown_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptio.conversion.compare import Difference, DiffReport

    Json = dict[str, Any]

DIFFERENT = 1


def run(
    a: str,
    b: str,
    select: Sequence[str],
    strips: tuple[str, str],
    *,
    storage_options: Sequence[str],
    as_json: bool,
) -> int:
    """Compare two checkpoints, and give the exit code; one that cannot be read is an error."""
    from ckptio.conversion.compare import run_diff  # noqa: PLC0415  # imports torch

    terminal, names = Terminal(), (shown_url(a), shown_url(b))
    result: Json = {
        "a": names[0],
        "b": names[1],
        "equal": None,
        "only_a": [],
        "only_b": [],
        "different": [],
    }
    result |= {"num_same": None, "nbytes": None, "notes": [], "error": None}
    try:
        with terminal.progress(" and ".join(names), in_bytes=True) as advance:
            report = run_diff(
                a,
                b,
                select=list(select) or None,
                strips=strips,
                config=config_for([a, b], storage_options),
                progress=advance,
            )
    except CheckpointError as error:
        path = getattr(error, "filename", None)
        where = f"{path}: " if isinstance(path, str) else ""
        result["error"] = f"{where}{explain(error)}"
        terminal.message(result["error"])
        if as_json:
            terminal.json(result)
        return FAILED
    for note in report.notes:
        terminal.message(visible(note))
    if as_json:
        terminal.json(result | _document(report))
    else:
        terminal.lines(_lines(report, terminal.width))
    return FINE if report.is_equal else DIFFERENT


def _document(report: DiffReport) -> Json:
    return {
        "equal": report.is_equal,
        "only_a": list(report.only_a),
        "only_b": list(report.only_b),
        "different": [
            {
                "name": item.name,
                "reason": item.reason,
                "a": item.a if item.reason != "bits" else None,
                "b": item.b if item.reason != "bits" else None,
                "num_elements": item.num_elements if item.reason == "bits" else None,
                "num_different": item.num_different if item.reason == "bits" else None,
                "largest": _number(item.largest) if item.reason == "bits" else None,
            }
            for item in report.differences
        ],
        "num_same": report.num_same,
        "nbytes": report.nbytes,
        "notes": list(report.notes),
    }


def _number(value: float) -> float | str:
    """Write a number for JSON: infinity and NaN, which it does not have, as text."""
    return value if math.isfinite(value) else str(value)


def _lines(report: DiffReport, width: int | None) -> Iterator[str]:
    """Write a line for each name that differs, and a last one with totals."""
    for name in report.only_a:
        yield from fold(["only in A", visible(name)], width, hang="  ")
    for name in report.only_b:
        yield from fold(["only in B", visible(name)], width, hang="  ")
    for item in report.differences:
        yield from fold([item.reason, visible(item.name), *_details(item)], width, hang="  ")
    if report.is_equal:
        parts = ["equal", count(report.num_same, "name"), format_nbytes(report.nbytes)]
    else:
        num = len(report.only_a) + len(report.only_b) + len(report.differences)
        parts = ["different", f"{count(num, 'name')} of {num + report.num_same}"]
    yield from fold(parts, width)


def _details(item: Difference) -> list[str]:
    if item.reason != "bits":
        return [f"{visible(item.a)} and {visible(item.b)}"]
    return [
        f"{item.num_different} of {count(item.num_elements, 'element')}",
        f"by {item.largest:.6g} at most",
    ]
