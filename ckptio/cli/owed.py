"""Which checkpoints are still to be copied to a second tier, and where to.

A note beside the manifest says so (`ckptio.storage.notes`), and anybody who can write there
may have written it: what it names is shown, without credentials, and never opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio.cli.terminal import without_credentials
from ckptio.errors import FormatError, StorageError
from ckptio.format.note import decode_note

if TYPE_CHECKING:
    from ckptio.storage.interface import Storage


@dataclass(frozen=True, slots=True)
class Owed:
    """A copy that is owed.

    Attributes:
        to: Path or URL of the second tier; `None` if the note cannot be read.
    """

    to: str | None

    def __str__(self) -> str:
        """Say it in words, not all of which need be printable: see `text.visible`."""
        return "copy owed" if self.to is None else f"copy owed to {self.to}"


async def read_owed(storage: Storage, save_id: str) -> Owed | None:
    """Say where the checkpoint of a save is still to be copied to; `None` if it is not.

    Where that cannot be found out, it counts as owed: `prune` would remove it otherwise.
    """
    try:
        data = await storage.read_note(save_id)
        return None if data is None else Owed(without_credentials(decode_note(data).copy_to))
    except (FormatError, StorageError):
        return Owed(None)
