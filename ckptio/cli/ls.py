"""`ckptio ls`: which checkpoints there are."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio.cli.find import find_checkpoints, is_foreign
from ckptio.cli.outcome import FAILED, exit_code, explain, state_of
from ckptio.cli.terminal import Terminal
from ckptio.cli.text import (
    count,
    fold,
    format_nbytes,
    format_time,
    natural,
    parse_time,
    table,
    visible,
)
from ckptio.config import CheckpointConfig
from ckptio.errors import CheckpointError, ConfigError
from ckptio.storage.resolve import local_path
from ckptio.sync import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptio.cli.find import Found
    from ckptio.cli.outcome import State

_LONG = 10  # manifests; fewer are read before a line of progress could be read
_HEAD = ("PATH", "COMMITTED", "BYTES", "FILES", "TENSORS", "FORMAT")
_RIGHT = (2, 3, 4, 5)
_EARLIEST = dt.datetime.min.replace(tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the list, and an object of the JSON document. `None` is not known.

    Attributes:
        path: Directory, relative to the root.
        state: What is there.
        committed: When it was committed, as the manifest says.
        nbytes: Bytes of data files; of what lies there if there is no commit.
        num_files: Data files; files that lie there if there is no commit.
        num_tensors: Tensors.
        format: Version of the format.
        writer: Version of the package that wrote it.
        save_id: Id of the save.
        error: What is wrong.
    """

    path: str
    state: State
    committed: str | None = None
    nbytes: int | None = None
    num_files: int | None = None
    num_tensors: int | None = None
    format: int | None = None
    writer: str | None = None
    save_id: str | None = None
    error: str | None = None


def run(root: str, *, show_all: bool, by_name: bool, depth: int, as_json: bool) -> int:
    """List checkpoints, and give the exit code."""
    terminal = Terminal()
    try:
        config = dataclasses.replace(CheckpointConfig.from_env(), cache_entries=1)
        top = os.path.abspath(local_path(root))
        found = list(find_checkpoints(top, depth=depth, hidden=show_all))
    except (ConfigError, OSError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        if as_json:
            terminal.json({"root": root, "checkpoints": [], "error": problem})
        terminal.message(f"{root}: {problem}")
        return FAILED
    rows = list(_read(top, found, config, terminal))
    num_uncommitted = sum(row.state == "no_commit" for row in rows)
    if not show_all:
        rows = [row for row in rows if row.state != "no_commit"]
    rows.sort(key=lambda row: natural(row.path))
    if not by_name:
        rows.sort(key=_when, reverse=True)
    if as_json:
        listed = [dataclasses.asdict(row) for row in rows]
        terminal.json({"root": root, "checkpoints": listed, "error": None})
    else:
        terminal.lines(layout(rows, terminal.width))
    for row in rows:
        if row.error is not None:
            terminal.message(f"{row.path}: {row.error}")
    if not rows:
        terminal.message(f"{root}: no checkpoints here")
    if num_uncommitted and not show_all:
        terminal.message(f"{num_uncommitted} without a commit; --all shows them")
    return exit_code(row.state for row in rows)


def _read(
    top: str, found: Sequence[Found], config: CheckpointConfig, terminal: Terminal
) -> Iterator[Row]:
    """Read the manifests of what was found; leave out those of other programs."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine(config))
        advance = None
        if len(found) > _LONG:
            advance = stack.enter_context(terminal.progress("reading", in_bytes=False))
        for number, item in enumerate(found):
            if advance is not None:
                advance(number, len(found))
            row = _row(engine, os.path.relpath(item.path, top), item)
            if row is not None:
                yield row


def _row(engine: Engine, path: str, found: Found) -> Row | None:
    """Describe one directory; `None` if it is another program's."""
    if found.error:
        return Row(path=path, state="unreadable", error=found.error)
    if found.has_manifest:
        try:
            manifest = engine.inspect(found.path)
        except CheckpointError as error:
            state = state_of(error)
            if state == "damaged" and is_foreign(found):
                return None
            if state != "missing":  # removed meanwhile
                return Row(path=path, state=state, error=explain(error))
        else:
            return Row(
                path=path,
                state="committed",
                committed=manifest.created,
                nbytes=manifest.nbytes,
                num_files=len(manifest.files),
                num_tensors=len(manifest.tensors),
                format=manifest.ckptio,
                writer=manifest.writer,
                save_id=manifest.save_id,
            )
    if not found.ours:
        return None
    sizes = []
    for name in found.ours:
        with contextlib.suppress(OSError):  # gone meanwhile
            sizes.append(os.lstat(f"{found.path}/{name}").st_size)
    return Row(path=path, state="no_commit", nbytes=sum(sizes), num_files=len(sizes))


def _when(row: Row) -> dt.datetime:
    return parse_time(row.committed or "") or _EARLIEST


def layout(rows: Sequence[Row], width: int | None) -> list[str]:
    """Lay rows out as a table; as a block for each where a table is too wide."""
    if not rows:
        return []
    cells = [_cells(row) for row in rows]
    lines = table([_HEAD, *cells], _RIGHT, width)
    if lines:
        return lines
    for row, (path, when, *_) in zip(rows, cells, strict=True):
        parts = [when]
        if row.nbytes is not None:
            parts.append(format_nbytes(row.nbytes))
        if row.num_files is not None:
            parts.append(count(row.num_files, "file"))
        if row.num_tensors is not None:
            parts.append(count(row.num_tensors, "tensor"))
        if row.format is not None:
            parts.append(f"format {row.format}")
        lines += [path, *fold(parts, width, "  ")]
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    """Write a row's cells, in visible text."""
    when = format_time(row.committed) if row.committed is not None else row.state.replace("_", " ")
    numbers = [
        "-" if number is None else str(number)
        for number in (row.num_files, row.num_tensors, row.format)
    ]
    nbytes = "-" if row.nbytes is None else format_nbytes(row.nbytes)
    return (visible(row.path), when, nbytes, *numbers)
