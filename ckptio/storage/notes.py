"""A note beside a checkpoint: that it is still to be copied, and where to.

    <path>/.copy-<save id>

It is written before the checkpoint is committed, so that no commit is without it, and goes
when the copy is committed. Its name has the id of the save: a note of any other save than
the one that is committed says nothing, and goes with the leftovers of that save. So a
checkpoint has one note or none.

Who copies, or will, holds the note: a lock on the file, which the kernel frees when the process
ends, whatever children that has forked (`storage.locks`). So what a killed process owed can be
taken over at once, and what a living one copies cannot.
Where there are no locks (object stores, some mounts) two processes may copy one checkpoint
at a time. They write the same bytes under the same names, and whoever gives up removes nothing of
what the other has committed; an upload that the other drops makes a copy fail, and be owed still.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio.storage.blocks import storage_error
from ckptio.storage.file_names import NOTE_PREFIX
from ckptio.storage.files import read_regular

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from ckptio.storage.files import PosixFiles

#: No more of a note is read: it holds one URL, and the ids of some saves.
MAX_NOTE_NBYTES = 64 << 10


class LocalNote:
    """A note that is held; see `interface.Note`."""

    def __init__(
        self, files: PosixFiles, path: str, fd: int, data: bytes, executor: Executor
    ) -> None:
        self.data = data
        self._files = files
        self._path = path
        self._fd = fd
        self._executor = executor

    async def drop(self) -> None:
        """Remove the note; see `interface.Note`."""
        await run_blocking(self._executor, self._drop)

    def _drop(self) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(self._path)
        except OSError as error:
            raise storage_error(error, self._path, "cannot remove a note") from error
        finally:
            self._close()

    async def release(self) -> None:
        """Let go of the note; see `interface.Note`."""
        await run_blocking(self._executor, self._close)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # closing is all that was left to do
                self._files.close(fd)


def take_note(
    files: PosixFiles, directory: str, save_id: str, executor: Executor
) -> LocalNote | None:
    """Take the note of a save in a directory. Blocks.

    Returns:
        The note; `None` if there is none, or if somebody else holds it.

    Raises:
        StorageError: It cannot be read.
    """
    path = f"{directory}/{NOTE_PREFIX}{save_id}"
    try:
        try:
            fd = files.open(path, direct=False, writable=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            if not _is_mine(files, fd):
                files.close(fd)
                return None
            data = os.pread(fd, MAX_NOTE_NBYTES, 0)
        except BaseException:
            files.close(fd)
            raise
    except OSError as error:
        raise storage_error(error, path, "cannot read a note") from error
    return LocalNote(files, path, fd, data, executor)


async def taken(executor: Executor, take: Callable[[], LocalNote | None]) -> LocalNote | None:
    """Take a note on a thread; nobody has it where the caller was cancelled meanwhile.

    Args:
        executor: Whose threads to use.
        take: Gives the note, or raises.
    """
    notes: list[LocalNote | None] = []
    try:
        await run_blocking(executor, lambda: notes.append(take()))
    except BaseException:
        for note in notes:
            if note is not None:
                await note.release()
        raise
    return notes[0]


def read_note(files: PosixFiles, path: str) -> bytes | None:
    """Read a note without holding it; `None` if there is none. Blocks.

    Raises:
        StorageError: It cannot be read, or is longer than `MAX_NOTE_NBYTES`.
    """
    try:
        return read_regular(files, path, MAX_NOTE_NBYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise storage_error(error, path, "cannot read a note") from error


def _is_mine(files: PosixFiles, fd: int) -> bool:
    """Take the lock of a note; false if it is taken, or the note was dropped meanwhile."""
    try:
        if not files.lock(fd):
            return False
    except OSError:  # no locks here: see above
        return True
    return os.fstat(fd).st_nlink > 0
