"""The note that a checkpoint is still to be copied: where to, and nothing secret.

A small JSON document in a file of its own beside the manifest, which stays what it is: the
copy has the very bytes of it. It names a place, so it is as much to be trusted as who may
write to the checkpoint's directory.
"""

from __future__ import annotations

import msgspec

from ckptio.errors import ConfigError, FormatError


class CopyNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is still to be done.

    Attributes:
        copy_to: Path or URL of the second place.
        overwrite: Whether a checkpoint that is there may be replaced.
    """

    copy_to: str
    overwrite: bool


def encode_note(note: CopyNote) -> bytes:
    """Write a note.

    Raises:
        ConfigError: The name of the place is no text.
    """
    try:
        return msgspec.json.encode(note) + b"\n"
    except UnicodeEncodeError:
        raise ConfigError(f"then= is {note.copy_to!r}, which UTF-8 cannot write") from None


def decode_note(data: bytes) -> CopyNote:
    """Read a note.

    Raises:
        FormatError: It is none.
    """
    try:
        note = msgspec.json.decode(data, type=CopyNote)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"bad note of a copy: {error}") from None
    if not note.copy_to:
        raise FormatError("bad note of a copy: it names no place")
    return note
