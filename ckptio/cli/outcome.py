"""From what happened to a word, a line of text and an exit code."""

from __future__ import annotations

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

#: What errors call options in Python, and what they are called here.
_FLAGS = {"overwrite=True": "--overwrite", "select=": "--select", "drop_values": "--drop-values"}


def state_of(error: CheckpointError) -> State:
    """Say what an error means for a checkpoint.

    A format of a newer version, or of another program, is no damage: nothing is wrong but the
    reader.
    """
    if isinstance(error, CheckpointNotFoundError):
        return "missing"
    is_unread = isinstance(error, (FormatVersionError, UnknownFormatError))
    if isinstance(error, FormatError) and not is_unread:
        return "damaged"
    return "unreadable"


def explain(error: CheckpointError) -> str:
    """Give an error's text without errno and path, which stand before it anyway.

    What it says to pass in Python is said as the command line has it.
    """
    text = error.message if isinstance(error, StorageError) else str(error)
    for option, flag in _FLAGS.items():
        text = text.replace(option, flag)
    return text


def exit_code(states: Iterable[State]) -> int:
    """Give the exit code for what was seen; damage outranks the rest."""
    seen = set(states)
    if "damaged" in seen:
        return DAMAGED
    return FAILED if seen & {"missing", "unreadable"} else FINE
