"""What an error means to a command: the state of a checkpoint, a line of text, an exit code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from ckptio.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatError,
    FormatVersionError,
    StorageError,
    UnknownFormatError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

State = Literal["committed", "whole", "no_commit", "damaged", "missing", "unreadable"]

FINE = 0
DAMAGED = 1
FAILED = 2

#: Keyword arguments as errors name them, such as `overwrite=True`; not parts of directory names.
_OPTIONS = re.compile(
    r"(?<![^\s(])(?:(?P<on>overwrite)=True|(?P<of>to)=(?:'(?P<value>\w+)')?"
    r"|(?P<name>select|strip|dtype)=|(?P<long>drop_values|max_shard_nbytes)(?:=|\b))"
)


def state_of(error: CheckpointError) -> State:
    """Say what an error means for a checkpoint.

    A format of a newer version, or of another program, is no damage: only this reader does not know
    it.
    """
    if isinstance(error, CheckpointNotFoundError):
        return "missing"
    is_unread = isinstance(error, (FormatVersionError, UnknownFormatError))
    if isinstance(error, FormatError) and not is_unread:
        return "damaged"
    return "unreadable"


def explain(error: CheckpointError) -> str:
    """Give an error's text without errno and path: callers print the path before it.

    Python's keyword arguments in it become options of the command line, as `overwrite=True` does.
    """
    text = error.message if isinstance(error, StorageError) else str(error)
    return _OPTIONS.sub(_flag, text)


def _flag(found: re.Match[str]) -> str:
    name = found["on"] or found["of"] or found["name"] or found["long"]
    value = f" {found['value']}" if found["value"] else ""
    return f"--{name.replace('_', '-')}{value}"


def exit_code(states: Iterable[State]) -> int:
    """Give the exit code for what was seen; damage outranks the rest."""
    seen = set(states)
    if "damaged" in seen:
        return DAMAGED
    return FAILED if seen & {"missing", "unreadable"} else FINE
