"""An attempt that takes over what an earlier one of the very same save left.

The copy of a checkpoint to another place has the save id and the file names of the
checkpoint, so a copy that was cut off lies where the next one wants to write. What is
whole is kept; what is not is made again; and if the earlier one died just after its
commit, what it had no time to remove goes.

The lock on the attempt's file is that of every attempt (`storage.attempt`): while the
earlier one lives, nobody takes it over, and nothing that it wrote is removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio.errors import CommitConflictError
from ckptio.storage.attempt import NEW_MANIFEST_PREFIX, LocalAttempt

if TYPE_CHECKING:
    from ckptio.storage.blocks import BlockWriter


class ResumedAttempt(LocalAttempt):
    """An attempt that takes over an earlier one; see `interface.Storage.begin`."""

    def prepare(self) -> None:
        """Take the lock over, and clear what the earlier attempt left beside data. Blocks."""
        super().prepare()
        new = self._path(NEW_MANIFEST_PREFIX + self._save_id)
        self._retire(new)  # after an exchange it is the one that was replaced
        self._try_remove(new + "-old")

    def _open_marker(self, path: str) -> int:
        try:
            return super()._open_marker(path)
        except FileExistsError:
            return self._files.open(path, direct=False, writable=True)

    def _lock_marker(self) -> bool:
        try:
            is_mine = self._files.lock(self._lock_fd)
        except OSError:  # as with every attempt
            return False
        if not is_mine:
            self._made_files.clear()  # the file is the other one's
            raise CommitConflictError(self._directory)
        return True

    async def create(self, name: str, nbytes: int) -> BlockWriter:
        """Begin a data file, in place of what the earlier attempt left."""
        await run_blocking(self._executor, self._try_remove, self._path(name))
        return await super().create(name, nbytes)
