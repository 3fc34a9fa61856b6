"""Figures as tables: on the terminal, in `<case>.json`, and all cases in one README.md."""

from __future__ import annotations

import datetime as dt
import importlib.util
import json
import os
import statistics
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.harness import Bench, Case, Group, Metric, Row

_WIDTH = 160  # of a table that goes to a file
Table = tuple[list[str], list[list[str]]]


def case_record(
    case: Case, bench: Bench, machine: Mapping[str, str], **more: Mapping[str, Any]
) -> dict[str, Any]:
    """Give all that was measured of a case, as JSON has it; `more` is what it was made with."""
    return {
        "case": case.name,
        "doc": case.doc,
        "scale": bench.scale,
        "rounds": bench.rounds,
        "measured": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": dict(machine),
        **{name: dict(value) for name, value in more.items()},
        "groups": [_group_record(group) for group in bench.groups],
    }


def _group_record(group: Group) -> dict[str, Any]:
    head, body = make_table(group)
    return {
        "title": group.title,
        "note": group.note,
        "nbytes": group.nbytes,
        "subjects": [_row_record(group, row) for row in group.rows],
        "table": {"head": head, "body": body},
    }


def _row_record(group: Group, row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "kind": row.kind,
        "missing": row.missing,
        "metrics": {
            metric.key: {
                "n": len(values),
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
                "values": values,
                "ratio": _ratio(group, metric, row),
            }
            for metric in group.metrics
            if (values := row.values.get(metric.key))
        },
    }


def _ratio(group: Group, metric: Metric, row: Row) -> float | None:
    """Divide a figure by ckptio's: above 1, ckptio is the better.

    `None` where there is none of either, or where ckptio's is zero or negative, as a loss of time
    that the noise hides may be.
    """
    ours = next((r for r in group.rows if r.kind == "ckptio"), None)
    reference = ours.median(metric.key) if ours is not None else None
    value = row.median(metric.key)
    return value / reference if reference and reference > 0 and value is not None else None


def make_table(group: Group) -> Table:
    """Lay a group out: a line per subject, one to three columns per metric, and its rounds."""
    head = [""]
    for metric in group.metrics:
        head.append(metric.label)
        head += ["GB/s"] * (metric.has_rate and bool(group.nbytes))
        head += ["/ ckptio"] * metric.has_ratio
    head.append("n")
    return head, [[row.name, *_cells(group, row, len(head) - 1)] for row in group.rows]


def _cells(group: Group, row: Row, count: int) -> Iterator[str]:
    if row.missing:
        yield row.missing
        yield from [""] * (count - 1)
        return
    for metric in group.metrics:
        values = row.values.get(metric.key)
        has_rate = metric.has_rate and bool(group.nbytes)
        if not values:
            yield from ["-"] * (1 + has_rate + metric.has_ratio)
            continue
        median = statistics.median(values)
        shown = [
            f"{v * metric.factor:.{metric.digits}f}" for v in (median, min(values), max(values))
        ]
        yield shown[0] if len(values) == 1 else f"{shown[0]} ({shown[1]} to {shown[2]})"
        if has_rate:
            yield f"{group.nbytes / median / 1e9:.2f}"
        if metric.has_ratio:
            ratio = _ratio(group, metric, row)
            yield f"{ratio:.2f}" if ratio is not None else "-"
    yield str(max(map(len, row.values.values()), default=0))


def print_group(group: Group) -> None:
    """Print a group's table; with rich, if it is installed."""
    head, body = make_table(group)
    title = f"{group.title} ({group.nbytes / 1e6:,.0f} MB)" if group.nbytes else group.title
    if importlib.util.find_spec("rich"):
        from rich.console import Console  # noqa: PLC0415  # optional
        from rich.table import Table as RichTable  # noqa: PLC0415  # as above

        table = RichTable(title=title, title_justify="left", caption=group.note or None)
        for number, name in enumerate(head):
            table.add_column(name, justify="left" if number == 0 else "right", no_wrap=number == 0)
        for row in body:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)
        return
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    print(f"\n{title}")
    for row in (head, *body):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    print(group.note)


def write_record(record: Mapping[str, Any], directory: str) -> None:
    """Write a case's figures to `<case>.json`. Its tables are `write_readme`'s."""
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, f"{record['case']}.json"), "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.write("\n")


def write_readme(cases: Sequence[str], directory: str) -> None:
    """Write README.md from what is in `directory`, in the order of `cases`."""
    records = []
    for name in cases:
        path = os.path.join(directory, f"{name}.json")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                records.append(json.load(file))
    os.makedirs(directory, exist_ok=True)  # if no case went well
    with open(os.path.join(directory, "README.md"), "w", encoding="utf-8") as file:
        file.write("\n".join(_readme_lines(records)) + "\n")


def _readme_lines(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "# Results\n"
    yield "Written by `python -m bench`; do not edit. Medians of interleaved rounds, in brackets"
    yield "the least and the most. `/ ckptio` is a figure divided by ckptio's in the same run:"
    yield "above 1, ckptio is faster (or takes less). GB/s are bytes of the state per second.\n"
    for record in records:
        yield f"## {record['case']}\n"
        yield f"{record['doc']}\n"
        for group in record["groups"]:
            size = f", {group['nbytes'] / 1e6:,.0f} MB" if group["nbytes"] else ""
            yield f"**{group['title']}**{size}\n"
            head, body = group["table"]["head"], group["table"]["body"]
            for row in (head, ["---", *["---:"] * (len(head) - 1)], *body):
                yield "| " + " | ".join(row) + " |"
            yield ""
            if group["note"]:
                yield f"{group['note']}\n"
        machine = "; ".join(f"{key}: {value}" for key, value in record["machine"].items())
        machine += "".join(f"; {name}: {v}" for name, v in record.get("peers", {}).items())
        yield (
            f"Scale {record['scale']:g}, {record['rounds']} rounds, {record['measured']}"
            f"{_commit(record.get('code', {}))}. {machine}.\n"
        )


def _commit(code: Mapping[str, Any]) -> str:
    changed = " with changes" if code.get("is_dirty") else ""
    return f", commit {code['commit'][:12]}{changed}" if code else ""
