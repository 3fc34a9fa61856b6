"""Show progress, and the table at the end; with rich on a terminal, in plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.demo.driver import FormResult

    Row = tuple[str, ...]


class Screen(Protocol):
    """Where progress is shown."""

    def begin(self, title: str, total: int) -> None:
        """Begin a run of `total` steps."""
        ...

    def show(self, kind: str, facts: dict[str, Any]) -> None:
        """Show a line of a diary."""
        ...

    def say(self, text: str) -> None:
        """Show a line of text."""
        ...

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Show a table; the first row is its head."""
        ...

    def close(self) -> None:
        """End the progress."""
        ...


def make_screen() -> Screen:
    """Give a rich screen on a terminal where rich is installed, a plain one elsewhere."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return RichScreen()
    return PlainScreen()


class PlainScreen:
    """Plain lines: a run's name, its saves with the loss so far, and what else happens."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._losses: dict[int, float] = {}

    def begin(self, title: str, total: int) -> None:
        """Print a run's name."""
        self.say(f"{title} ({total} steps)")

    def show(self, kind: str, facts: dict[str, Any]) -> None:
        """Print what matters; a step is only remembered."""
        if kind == "step":
            self._losses[facts["step"]] = facts["loss"]
        elif kind == "saved":
            self.say(f"  {describe(kind, facts)}; loss {self._losses[facts['step']]:.4f}")
        else:
            text = describe(kind, facts)
            if text:
                self.say(f"  {text}")

    def say(self, text: str) -> None:
        """Print a line, with the seconds since the start."""
        print(f"[{time.perf_counter() - self._began:5.1f} s] {text}", flush=True)

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Print a table, columns aligned."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print(f"\n{title}")
        for i, row in enumerate(rows):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            print("  " + "   ".join(cells).rstrip())
            if i == 0:
                print("  " + "   ".join("-" * width for width in widths))
        print(flush=True)

    def close(self) -> None:
        """Nothing is open."""


class RichScreen:
    """A bar for each run, and lines above it."""

    def __init__(self) -> None:
        from rich import console, progress  # noqa: PLC0415  # an extra; only where it is shown

        self._console = console.Console(highlight=False)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description:<26}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[loss]}"),
            progress.TimeElapsedColumn(),
            console=self._console,
        )
        self._bars.start()
        self._task: progress.TaskID | None = None

    def begin(self, title: str, total: int) -> None:
        """Open the bar of a run, and stop the clock of the one before."""
        if self._task is not None:
            self._bars.stop_task(self._task)
        self._task = self._bars.add_task(title, total=total, loss="")

    def show(self, kind: str, facts: dict[str, Any]) -> None:
        """Move the bar, or print a line above it."""
        if self._task is not None and kind == "step":
            loss = f"loss {facts['loss']:.4f}"
            self._bars.update(self._task, completed=facts["step"], loss=loss)
        elif self._task is not None and kind == "resumed":
            self._bars.update(self._task, completed=facts["step"])
        text = describe(kind, facts)
        if text:
            self.say(text)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, markup=False)

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Draw a table."""
        from rich.table import Table  # noqa: PLC0415  # as above

        table = Table(*rows[0], title=title, title_justify="left")
        for row in rows[1:]:
            table.add_row(*row)
        self._console.print(table)

    def close(self) -> None:
        """Stop drawing bars."""
        self._bars.stop()


def describe(kind: str, facts: dict[str, Any]) -> str:
    """Put a line of a diary in words; empty if nobody wants to read it."""
    match kind:
        case "saved":
            return (
                f"step {facts['step']}: {_mb(facts['nbytes'])} copied after"
                f" {_ms(facts['staged_s'])}, committed after {_ms(facts['committed_s'])}"
            )
        case "killed":
            return (
                f"SIGKILL in the save of step {facts['step']}, {_mb(facts['written_nbytes'])} of"
                f" {_mb(facts['nbytes'])} written, while {facts['phase']}"
            )
        case "skipped":
            return f"step {facts['step']} has a directory and no checkpoint in it: skipped"
        case "resumed":
            return f"resumed from step {facts['step']}"
        case "leftovers":
            files = len(facts["files"])
            return f"the save of step {facts['step']} removed {files} files of the killed one"
        case "direct_io_refused":
            return f"no direct I/O here, through the page cache: {facts['reason']}"
        case _:
            return ""


def table_rows(results: Sequence[FormResult]) -> list[Row]:
    """Make the table: a column for each form, and nothing in it that was not measured."""
    head = ("", *(result.form for result in results))
    columns = [_column(result) for result in results]
    return [head, *((name, *(column[name] for column in columns)) for name in columns[0])]


def _column(result: FormResult) -> dict[str, str]:
    """Give the figures of one form, by their names in the table."""
    run = result.reference
    killed = result.killed.killed
    assert killed is not None, "the driver has checked it"
    removed = result.resumed.removed.get(killed.step, [])
    rates = [saved.nbytes / saved.committed_s / 1e9 for saved in run.saves]
    equal = sum(a == b for a, b in zip(run.losses, result.resumed.losses, strict=False))
    same = run.digests == result.resumed.digests
    return {
        "parameters": f"{run.num_parameters / 1e6:.2f} M",
        "saves, uninterrupted run": str(len(run.saves)),
        "bytes per checkpoint": " ".join(sorted({_mb(saved.nbytes) for saved in run.saves})),
        "copied (staged) after": _spread(saved.staged_s for saved in run.saves),
        "stall: trainer stood still": _spread(run.stalls_s),
        "committed and synced after": _spread(saved.committed_s for saved in run.saves),
        "bytes / time to commit": f"{statistics.median(rates):.2f} GB/s",
        "forward+backward alone": _spread(run.alone_s),
        "... beginning beside a save": _spread(run.beside_s),
        "direct I/O": "refused" if run.direct_io_refused else "yes",
        "killed in the save of step": str(killed.step),
        "... bytes written by then": f"{_mb(killed.written_nbytes)} of {_mb(killed.nbytes)}",
        "... while": killed.phase,
        "files it left": f"{len(result.left)} ({result.left_nbytes / 1e6:.1f} MB on disk)",
        "... removed by the next save": f"{len(removed)} of {len(result.left)}",
        "resumed from step": str(result.resumed.resumed),
        "loss, first to last step": _from_to(run.losses),
        "losses equal, bit by bit": f"{equal} of {len(run.losses)}",
        "parameters, moments equal": "yes, every bit" if same else "NO",
    }


def _from_to(losses: Sequence[str]) -> str:
    return f"{float.fromhex(losses[0]):.4f} to {float.fromhex(losses[-1]):.4f}"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _spread(seconds: Iterable[float]) -> str:
    """Give median, least and most; a dash where nothing was measured."""
    times = sorted(seconds)
    if not times:
        return "-"
    return f"{_ms(statistics.median(times))} ({times[0] * 1e3:.1f} to {times[-1] * 1e3:.1f})"
