"""What a removal asks of the checkpoint that it finds, wherever that is."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from ckptio.errors import StorageError

if TYPE_CHECKING:
    from ckptio.format.summary import Summary


def require_save(path: str, summary: Summary, save_id: str | None) -> None:
    """Check that the checkpoint which is found is still the one whose removal was decided.

    Args:
        path: What the user called it.
        summary: What is there.
        save_id: The save that was to be removed; any if not given.

    Raises:
        StorageError: Another one has taken its place.
    """
    if save_id is not None and summary.save_id != save_id:
        raise StorageError(
            "another save was committed there meanwhile; it stays", path=path, code=errno.ESTALE
        )
