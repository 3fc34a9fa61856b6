"""`ckptio verify`: whether every byte of a checkpoint is what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptio.cli.config import config_for
from ckptio.cli.outcome import FAILED, exit_code
from ckptio.cli.terminal import Terminal
from ckptio.cli.text import count, fold, format_nbytes, visible
from ckptio.cli.verdict import judge
from ckptio.errors import CheckpointError, ConfigError
from ckptio.events import ReadProgressed
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.storage.keys import shown_url
from ckptio.sync import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.cli.outcome import State
    from ckptio.cli.terminal import Advance
    from ckptio.config import CheckpointConfig
    from ckptio.engine.verify import VerifyReport
    from ckptio.errors import CorruptionError
    from ckptio.events import Event

    Json = dict[str, Any]

_STYLES = {"whole": "green", "damaged": "bold red", "missing": "yellow", "unreadable": "yellow"}
_MAX_NAMES = 8  # in the text; the JSON document has them all


class _Meter:
    """Takes the engine's events, and moves the line of progress if one is shown."""

    def __init__(self) -> None:
        self.advance: Advance | None = None

    def __call__(self, event: Event) -> None:
        if self.advance is not None and isinstance(event, ReadProgressed):
            self.advance(event.read_nbytes, event.nbytes)


def run(
    paths: Sequence[str], *, compare_copies: bool, storage_options: Sequence[str], as_json: bool
) -> int:
    """Verify checkpoints, and give the exit code."""
    terminal = Terminal()
    meter = _Meter()
    try:
        config = config_for(paths, storage_options)
    except ConfigError as error:
        if as_json:
            terminal.json({"checkpoints": [], "error": str(error)})
        terminal.message(str(error))
        return FAILED
    results = []
    with Engine(config, observer=meter, ranks="solo") as engine:
        for path in paths:
            with terminal.progress(shown_url(path), in_bytes=True) as meter.advance:
                result = _verify(engine, path, config, compare_copies=compare_copies)
            results.append(result)
            if not as_json:
                _print(result, terminal)
            if result["state"] in ("missing", "unreadable"):
                terminal.message(f"{result['path']}: {result['error']}")
    if as_json:
        terminal.json({"checkpoints": results, "error": None})
    return exit_code(result["state"] for result in results)


def _verify(engine: Engine, path: str, config: CheckpointConfig, *, compare_copies: bool) -> Json:
    """Verify one checkpoint, and give its object of the JSON document."""
    try:
        report = engine.verify(path, compare_copies=compare_copies)
    except CheckpointError as error:
        state, problem = judge(path, error, config)
        if state == "damaged" and _has_no_checksums(engine, path):
            state = "unreadable"
        return _failed(path, problem, state)
    return _found(path, report)


def _has_no_checksums(engine: Engine, path: str) -> bool:
    """Whether another program wrote it: there is no damage to be found then."""
    try:
        return engine.inspect(path).is_foreign
    except CheckpointError:
        return False


def _failed(path: str, problem: str, state: State) -> Json:
    """Describe a checkpoint of which nothing could be read but perhaps a bad manifest."""
    damage: Json = {
        "file": MANIFEST_NAME,
        "start": None,
        "stop": None,
        "problem": problem,
        "tensors": [],
    }
    return {
        "path": shown_url(path),
        "state": state,
        "save_id": None,
        "num_files": None,
        "nbytes": None,
        "damage": [damage] if state == "damaged" else [],
        "error": problem,
    }


def _found(path: str, report: VerifyReport) -> Json:
    """Describe a checkpoint that was read."""
    return {
        "path": shown_url(path),
        "state": "whole" if report.is_whole else "damaged",
        "save_id": report.save_id,
        "num_files": report.num_files,
        "nbytes": report.nbytes,
        "damage": [_damage(error) for error in report.damage],
        "error": None,
    }


def _damage(error: CorruptionError) -> Json:
    """Describe a damaged range."""
    return {
        "file": error.file,
        "start": error.start,
        "stop": error.stop,
        "problem": error.problem,
        "tensors": list(error.fqns),
    }


def _print(result: Json, terminal: Terminal) -> None:
    """Say what was found, a headline and a few lines for each damage."""
    state, path = result["state"], result["path"]
    parts = [state if state != "whole" else "ok", visible(path)]
    if result["nbytes"] is not None:
        parts.append(f"{format_nbytes(result['nbytes'])} in {count(result['num_files'], 'file')}")
    if result["damage"] and result["error"] is None:
        parts.append(f"{count(len(result['damage']), 'place')} damaged")
    for line in fold(parts, terminal.width):
        terminal.styled(line, _STYLES[state])
    for damage in result["damage"]:
        terminal.lines(_damage_lines(damage, terminal.width))


def _damage_lines(damage: Json, width: int | None) -> list[str]:
    """Write one damage: where, what, and whose bytes they are."""
    where = [visible(damage["file"])]
    if damage["start"] is not None:
        where.append(f"bytes [{damage['start']}, {damage['stop']})")
    names = [visible(name) for name in damage["tensors"]]
    if names:
        more = len(names) - _MAX_NAMES
        label = "tensor" if len(names) == 1 else "tensors"
        names = [*names[:_MAX_NAMES], f"and {more} more"] if more > 0 else names
        names = [label, *(f"{name}," for name in names[:-1]), names[-1]]
    return [
        *fold(where, width, "  "),
        *fold(visible(damage["problem"]).split(" "), width, "    ", gap=" "),
        *fold(names, width, "    ", gap=" "),
    ]
