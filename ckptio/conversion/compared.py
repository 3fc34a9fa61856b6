"""A file of a conversion that goes on with what an earlier one left, by comparing.

A conversion that is killed midway leaves a file that is right up to some place, and has whatever
was there before behind it. It has no name yet that a reader looks for. The next conversion compares
all of it from the front, so it need not know how far the earlier one came.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from ckptio.conversion.own import sync_file
from ckptio.storage.files import set_mode

if TYPE_CHECKING:
    from ckptio.config import CheckpointConfig

#: What is compared and written at a time.
PIECE_NBYTES = 1 << 20


class ComparedFile(io.RawIOBase):
    """A file that is written from front to back, only where it has something else.

    Args:
        path: The file; made if there is none.
        config: Who may read it, and whether it is synced.
    """

    def __init__(self, path: str, config: CheckpointConfig) -> None:
        super().__init__()
        self._config = config
        self._fd = -1  # what is not opened is closed all the same
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, config.file_mode)
        set_mode(self._fd, config.file_mode)
        self._position = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Give the bytes so far."""
        return self._position

    def write(self, data: Any) -> int:
        """Write some of `data`, unless it is there, and say how much."""
        piece = memoryview(data).cast("B")[:PIECE_NBYTES]
        if bytearray(os.pread(self._fd, len(piece), self._position)) != piece:
            piece = piece[: os.pwrite(self._fd, piece, self._position)]
        self._position += len(piece)
        return len(piece)

    def end(self) -> None:
        """Cut off what an earlier file had behind, and sync."""
        if os.fstat(self._fd).st_size != self._position:
            os.ftruncate(self._fd, self._position)
        sync_file(self._fd, self._config)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        super().close()
