"""`ckptio convert`: from one format to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ckptio.cli.config import config_for
from ckptio.cli.outcome import DAMAGED, FAILED, FINE, explain, state_of
from ckptio.cli.terminal import Terminal
from ckptio.cli.text import count, fold, format_nbytes, visible
from ckptio.errors import CheckpointError
from ckptio.storage.keys import shown_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.conversion.convert import ConvertReport, Format

    Json = dict[str, Any]


def run(
    source: str,
    target: str,
    *,
    to: str,
    select: Sequence[str],
    strip: str,
    overwrite: bool,
    drop_values: bool,
    max_shard_nbytes: int | None,
    dtype: str | None,
    storage_options: Sequence[str],
    as_json: bool,
) -> int:
    """Convert a checkpoint, and give the exit code."""
    from ckptio.conversion.convert import run_convert  # noqa: PLC0415  # imports torch
    from ckptio.conversion.unfit import UnfitError  # noqa: PLC0415  # as above
    from ckptio.state.leaves import named_dtype  # noqa: PLC0415  # as above

    terminal, names = Terminal(), (shown_url(source), shown_url(target))
    result: Json = {"source": names[0], "path": names[1], "to": to}
    result |= {"state": "failed", "num_tensors": None, "nbytes": None, "files": [], "notes": []}
    result |= {"error": None}
    code = FINE
    try:
        with terminal.progress(" to ".join(names), in_bytes=True) as advance:
            report = run_convert(
                source,
                target,
                to=cast("Format", to),
                select=list(select) or None,
                strip=strip,
                overwrite=overwrite,
                drop_values=drop_values,
                max_shard_nbytes=max_shard_nbytes,
                dtype=None if dtype is None else named_dtype(dtype),
                config=config_for([source, target], storage_options),
                progress=advance,
            )
    except CheckpointError as error:
        is_damaged = state_of(error) == "damaged" and not isinstance(error, UnfitError)
        code = DAMAGED if is_damaged else FAILED
        path = getattr(error, "filename", None)  # in the source, or where it is written
        where = f"{path}: " if isinstance(path, str) else ""
        result["error"] = f"{where}{explain(error)}"
        terminal.message(f"{where or f'{names[0]}: '}{explain(error)}")
    else:
        result |= _done(report)
        for note in report.notes:
            terminal.message(note)
        if not as_json:
            _print(report, terminal)
    if as_json:
        terminal.json(result)
    return code


def _done(report: ConvertReport) -> Json:
    return {
        "state": "converted",
        "num_tensors": report.num_tensors,
        "nbytes": report.nbytes,
        "files": [
            {"name": file.name, "nbytes": file.nbytes, "was_there": file.was_there}
            for file in report.files
        ],
        "notes": list(report.notes),
    }


def _print(report: ConvertReport, terminal: Terminal) -> None:
    parts = [
        "converted",
        visible(report.path),
        f"{count(report.num_tensors, 'tensor')} of {format_nbytes(report.nbytes)}",
        f"in {count(len(report.files), 'file')}",
    ]
    kept = sum(file.was_there for file in report.files)
    if kept:
        parts.append(f"{kept} there already")
    for line in fold(parts, terminal.width):
        terminal.styled(line, "green")
