"""The note that a checkpoint is still to be copied: where to, and nothing secret.

A small JSON document in a file of its own beside the manifest, which stays what it is: the
copy has the very bytes of it. It names a place, so it is as much to be trusted as who may
write to the checkpoint's directory.
"""

from __future__ import annotations

import msgspec

from ckptio.errors import ConfigError, FormatError

#: A note names no more saves than these.
MAX_REPLACED = 256


class CopyNote(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """What is still to be done.

    Attributes:
        copy_to: Path or URL of the second place.
        overwrite: Whether a checkpoint that is there may be replaced.
        replaced: Ids of the saves that this one replaced, the latest first: none of them is newer
            at the second place, whatever the clocks say.
    """

    copy_to: str
    overwrite: bool
    replaced: tuple[str, ...] = ()


def note_replacing(note: CopyNote, save_id: str, owed: CopyNote | None) -> CopyNote:
    """Say in a note which save its own replaces, and so what that one's note says.

    Of many in a row whose copies were never made, the second place has the first as a rule: that
    one stays in the note, and some in the middle go.

    Args:
        note: The note.
        save_id: The save that is replaced.
        owed: The note of that one; `None` if its copy was made.
    """
    replaced = (save_id, *(owed.replaced if owed is not None else ()))
    if len(replaced) > MAX_REPLACED:
        replaced = (*replaced[: MAX_REPLACED - 1], replaced[-1])
    return msgspec.structs.replace(note, replaced=replaced)


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
