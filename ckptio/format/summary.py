"""A manifest's head: what there is to say of a checkpoint without its tensors.

A run keeps many checkpoints, and who decides which of them go reads every manifest; and a save
reads that of the checkpoint it replaces, to know what goes and what stays. The checksum covers the
whole document all the same; what is skipped is only not taken apart.
"""

from __future__ import annotations

import datetime as dt
import re

import msgspec

from ckptio.errors import FormatError, FormatVersionError
from ckptio.format.manifest import (
    FORMAT_VERSION,
    FileEntry,
    Metadata,
    check_names,
    checked_document,
)

_SAVE_ID = re.compile(r"[0-9a-f]{32}\Z")


class Summary(msgspec.Struct, frozen=True):
    """Some members of a manifest; see `manifest.Manifest`."""

    ckptio: int
    save_id: str
    created: str
    files: tuple[FileEntry, ...]
    metadata: Metadata = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.nbytes for file in self.files)


_decoder = msgspec.json.Decoder(Summary)


def decode_summary(data: bytes) -> Summary:
    """Read the head of a manifest.

    Raises:
        FormatError: `data` is not a manifest, or was damaged.
        FormatVersionError: It has a format this version does not read.
    """
    try:
        summary = _decoder.decode(checked_document(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"the manifest is not what ckptio writes: {error}") from None
    if not 1 <= summary.ckptio <= FORMAT_VERSION:
        raise FormatVersionError(
            f"the checkpoint has format {summary.ckptio} and this version of ckptio reads"
            f" 1 to {FORMAT_VERSION}; upgrade ckptio"
        )
    if not _SAVE_ID.match(summary.save_id):
        raise FormatError(f"bad save id {summary.save_id!r} in the manifest")
    check_names(summary.files)
    return summary


def is_newer(created: str, other: str) -> bool:
    """Whether a checkpoint was created after another, by what both say; no if nobody can tell."""
    try:
        one, two = (dt.datetime.fromisoformat(text) for text in (created, other))
    except ValueError:  # it is no time
        return False
    if (one.tzinfo is None) != (two.tzinfo is None):
        return False
    return one > two
