"""A line of progress that fits its terminal and leaves nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

if TYPE_CHECKING:
    from rich.console import Console

_NARROW = 60


def make_progress(console: Console, *, in_bytes: bool) -> Progress:
    """Make a line of progress; below 60 columns it has the essentials only.

    Args:
        console: The terminal.
        in_bytes: Whether bytes are counted, for amounts and a rate.
    """
    title = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False, table_column=title),
        TextColumn("{task.percentage:>3.0f}%"),
    ]
    if console.width >= _NARROW:
        columns.append(BarColumn(bar_width=16))
        columns.append(DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn())
    if in_bytes:
        columns.append(TransferSpeedColumn())
    columns.append(TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, expand=True)
