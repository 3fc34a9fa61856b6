"""How values, names and ranks are written into messages."""

from __future__ import annotations

import os
import reprlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

#: Names in a message.
_MAX_SHOWN = 5
#: Characters of a value in a message.
_MAX_SHOWN_CHARS = 80


def shown(value: object) -> str:
    """Write a caller's value for a message, in a line: by mistake, it may be a whole state."""
    short = reprlib.Repr()
    short.maxlevel = 1
    short.maxother = short.maxstring = short.maxlong = _MAX_SHOWN_CHARS
    try:
        return " ".join(short.repr(value).split())
    except ValueError:  # Python writes no int of thousands of digits
        return f"a very large {type(value).__name__}"
    except (AttributeError, TypeError):  # before 3.12, `reprlib` takes any `array` for Python's
        return object.__repr__(value)


def written(path: object) -> str:
    """Write a path for a message as its caller has it; what is none, and is refused, as a value."""
    return str(path) if isinstance(path, (str, os.PathLike)) else shown(path)


def name_ranks(ranks: Collection[int], max_runs: int = 16) -> str:
    """Name ranks: 'rank 3', 'ranks 0-2, 5', 'ranks 0, 2, 4, 6 and 46 more'.

    Args:
        ranks: Which, in any order; it is no matter how often one is among them.
        max_runs: Runs of ranks to name.
    """
    runs: list[list[int]] = []
    for rank in sorted({*ranks}):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(f"{a[0]}" if len(a) == 1 else f"{a[0]}-{a[-1]}" for a in runs[:max_runs])
    num_more = sum(map(len, runs[max_runs:]))
    more = f" and {num_more} more" if num_more else ""
    return f"rank{'s' if len({*ranks}) > 1 else ''} {shown}{more}"


def some_of(names: Sequence[str]) -> str:
    """Show the first few of `names`, and how many more there are."""
    shown = ", ".join(map(repr, names[:_MAX_SHOWN]))
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return shown + more
