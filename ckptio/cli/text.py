"""Words, numbers and columns of the output. Pure: strings in, strings out.

Names and values come from a file that anybody may have written. A terminal obeys what it
is sent, so nothing goes out that is not printable: see `visible`. Lines are plain text;
nothing here is markup to anybody.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024
_GAP = "  "
_BYTE, _WORD = 1 << 8, 1 << 16


def visible(text: str) -> str:
    r"""Escape every character that is not printable, as Python writes it.

    Control characters (`\x1b`), marks that turn the direction of text, line and
    paragraph separators, and bytes of file names that are no UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(ord(char)) for char in text)


def _escape(code: int) -> str:
    if code < _BYTE:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < _WORD else f"\\U{code:08x}"


def format_nbytes(nbytes: int) -> str:
    """Write bytes for people: `512 B`, `1.5 KiB`, `64.0 MiB`."""
    if nbytes < _STEP:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in _UNITS:
        value /= _STEP
        if value < _STEP - 0.05:  # what would be rounded up to 1024.0 is one of the next
            return f"{value:.1f} {unit}"
    return f"{value:.0f} {_UNITS[-1]}"


def count(number: int, noun: str) -> str:
    """Write `1 file`, `2 files`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parse_time(text: str) -> dt.datetime | None:
    """Read the time of a commit; `None` if it is none."""
    try:
        moment = dt.datetime.fromisoformat(text)
        return moment.astimezone(dt.UTC) if moment.tzinfo else moment.replace(tzinfo=dt.UTC)
    except (ValueError, OverflowError):
        return None


def format_time(text: str) -> str:
    """Write the time of a commit, to the second, in UTC."""
    moment = parse_time(text)
    return visible(text) if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}Z"


def format_metrics(metrics: Mapping[str, float | str]) -> str:
    """Write metrics for people: `acc=0.91 loss=1.2345`, by name."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else format(value, '.6g')}"
        for name, value in sorted(metrics.items())
    )


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Fill `text` up to `width` columns of a terminal, where some characters take two."""
    room = " " * (width - cell_len(text))
    return room + text if right else text + room


def fold(
    parts: Sequence[str],
    width: int | None,
    indent: str = "",
    *,
    hang: str | None = None,
    gap: str = _GAP,
) -> list[str]:
    """Join parts by `gap`, in lines of at most `width` columns.

    A part is never cut: one that is longer than a line has one of its own, and is folded
    by the terminal, so that it can be copied.

    Args:
        parts: Visible text.
        width: Columns of the terminal; `None` for no limit.
        indent: Before each line.
        hang: Before each line but the first, if not the same.
        gap: Between the parts of a line.
    """
    lines: list[str] = []
    line = ""
    for part in parts:
        longer = f"{line}{gap}{part}" if line else indent + part
        if line and width is not None and cell_len(longer) > width:
            lines.append(line)
            longer = (indent if hang is None else hang) + part
        line = longer
    return [*lines, line] if line else lines


def table(rows: Sequence[Sequence[str]], right: Sequence[int], width: int | None) -> list[str]:
    """Align rows in columns; nothing if they are wider than `width`.

    Args:
        rows: Equally many cells each, of visible text.
        right: Columns that are aligned to the right.
        width: Columns of the terminal; `None` for no limit.
    """
    widths = [max(cell_len(cell) for cell in column) for column in zip(*rows, strict=True)]
    if width is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        return []
    return [
        _GAP.join(pad(cell, widths[i], right=i in right) for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]
