"""`ckptio ls`: which checkpoints there are."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import TYPE_CHECKING

from ckptio.cli.config import config_for
from ckptio.cli.outcome import FAILED, exit_code
from ckptio.cli.rows import read_rows
from ckptio.cli.terminal import Terminal
from ckptio.cli.text import (
    count,
    fold,
    format_metrics,
    format_nbytes,
    format_time,
    parse_time,
    table,
    visible,
)
from ckptio.errors import ConfigError
from ckptio.storage.file_names import numbered
from ckptio.storage.keys import shown_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.cli.rows import Row

_HEAD = ("PATH", "COMMITTED", "BYTES", "FILES", "TENSORS", "FORMAT")
_METRICS = "METRICS"
_OWED = "COPY OWED TO"
_RIGHT = (2, 3, 4, 5)
_EARLIEST = dt.datetime.min.replace(tzinfo=dt.UTC)


def run(
    root: str,
    *,
    show_all: bool,
    by_name: bool,
    depth: int,
    storage_options: Sequence[str],
    as_json: bool,
) -> int:
    """List checkpoints, and give the exit code."""
    terminal, name = Terminal(), shown_url(root)
    try:
        config = config_for([root], storage_options)
        rows = read_rows(root, config, terminal, depth=depth, hidden=show_all)
    except (ConfigError, OSError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        if as_json:
            terminal.json({"root": name, "checkpoints": [], "error": problem})
        terminal.message(f"{name}: {problem}")
        return FAILED
    num_uncommitted = sum(row.state == "no_commit" for row in rows)
    if not show_all:
        rows = [row for row in rows if row.state != "no_commit"]
    rows.sort(key=lambda row: numbered(row.path))
    if not by_name:
        rows.sort(key=_when, reverse=True)
    if as_json:
        listed = [dataclasses.asdict(row) for row in rows]
        terminal.json({"root": name, "checkpoints": listed, "error": None})
    else:
        terminal.lines(layout(rows, terminal.width))
    for row in rows:
        if row.error is not None:
            terminal.message(f"{row.path}: {row.error}")
    if not rows:
        terminal.message(f"{name}: no checkpoints of ckptio here")
    if num_uncommitted and not show_all:
        terminal.message(f"{num_uncommitted} without a commit; --all shows them")
    return exit_code(row.state for row in rows)


def _when(row: Row) -> dt.datetime:
    return parse_time(row.committed or "") or _EARLIEST


def layout(rows: Sequence[Row], width: int | None) -> list[str]:
    """Lay rows out as a table; as a block for each where a table is too wide."""
    if not rows:
        return []
    cells = [_HEAD, *(_cells(row) for row in rows)]
    if any(row.metrics for row in rows):
        cells = _beside(cells, _METRICS, [_metrics(row) or "-" for row in rows])
    if any(row.owed for row in rows):
        cells = _beside(cells, _OWED, [_owed_to(row) for row in rows])
    lines = table(cells, _RIGHT, width)
    if lines:
        return lines
    for row, (path, when, *_) in zip(rows, cells[1:], strict=True):
        lines += [path, *fold([when, *_block(row)], width, "  ")]
    return lines


def _beside(
    lines: Sequence[tuple[str, ...]], head: str, cells: Sequence[str]
) -> list[tuple[str, ...]]:
    """Put another column beside those there are."""
    return [(*line, cell) for line, cell in zip(lines, (head, *cells), strict=True)]


def _block(row: Row) -> list[str]:
    """Write what is known of a row beside its path and time."""
    parts = []
    if row.nbytes is not None:
        parts.append(format_nbytes(row.nbytes))
    if row.num_files is not None:
        parts.append(count(row.num_files, "file"))
    if row.num_tensors is not None:
        parts.append(count(row.num_tensors, "tensor"))
    if row.format is not None:
        parts.append(f"format {row.format}")
    if row.metrics:
        parts.append(_metrics(row))
    if row.owed:
        parts.append(f"copy owed to {_owed_to(row)}")
    return parts


def _metrics(row: Row) -> str:
    return visible(format_metrics(row.metrics or {}))


def _owed_to(row: Row) -> str:
    if not row.owed:
        return "-"
    return "?" if row.owed_to is None else visible(row.owed_to)


def _cells(row: Row) -> tuple[str, ...]:
    """Write a row's cells, in visible text."""
    when = format_time(row.committed) if row.committed is not None else row.state.replace("_", " ")
    numbers = [
        "-" if number is None else str(number)
        for number in (row.num_files, row.num_tensors, row.format)
    ]
    nbytes = "-" if row.nbytes is None else format_nbytes(row.nbytes)
    return (visible(row.path), when, nbytes, *numbers)
