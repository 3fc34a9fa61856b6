"""An attempt that takes over what an earlier one of the very same save left.

The copy of a checkpoint to another place has the save id and the file names of the
checkpoint, and a conversion has an id that is made of what it converts. So one that was cut
off lies where the next one wants to write. What is whole is kept; what is not is made again;
and if the earlier one died just after its commit, what it had no time to remove goes.

A file that is written again is compared as it is written: each range is read from the file
that is there, and where the bytes are those that are to be written, nothing is. So nothing is
trusted for its size or its date, and a file that was half written is finished.

The lock on the attempt's file is that of every attempt (`storage.attempt`): while the
earlier one lives, nobody takes it over, and nothing that it wrote is removed. An attempt that
fails removes nothing that may be part of a checkpoint: of one that was committed under its id
just before it began, or, where there are no locks, at any time.

A checkpoint of the same id may be removed at that moment, and its files with it. Who removes one
has the same lock meanwhile. Where there are no locks, the name that a removal gives to its manifest
(`storage.tombs`) says so: it comes before any file goes, and mostly goes after all of them. So does
the name that the manifest has which a save has replaced. So an attempt does not begin where there
is the first one; and behind its commit it looks once more, for both and then for its files.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import time

from ckptio._aio import run_blocking
from ckptio.config import PAGE_NBYTES
from ckptio.errors import CommitConflictError, FormatError, StorageError
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.format.summary import decode_summary
from ckptio.storage.attempt import LocalAttempt
from ckptio.storage.blocks import BlockWriter, storage_error
from ckptio.storage.file_names import (
    ATTEMPT_PREFIX,
    NEW_MANIFEST_PREFIX,
    QUIET_S,
    REPLACED_SUFFIX,
    STAY_S,
)
from ckptio.storage.files import NO_FILE
from ckptio.storage.leftovers import is_at, read_summary
from ckptio.storage.tombs import tombs_in


class ResumedAttempt(LocalAttempt):
    """An attempt that takes over an earlier one; see `interface.Storage.begin`."""

    _owns_files = False  # from when it has the lock; `is_alone` is of every local attempt
    _stayed_s = -math.inf

    def prepare(self) -> None:
        """Take the lock over, and clear what the earlier attempt left beside data. Blocks."""
        super().prepare()
        try:
            self._require_unremoved()
        except OSError as error:
            self._owns_files = False  # nothing goes that a removal may put back
            self._try_remove(self._path(ATTEMPT_PREFIX + self._save_id))
            raise storage_error(error, self._directory, "cannot begin a save") from error
        self._retire(self._name.new)  # after an exchange it is the one that was replaced
        self._try_remove(self._name.new + REPLACED_SUFFIX)

    def _require_unremoved(self) -> None:
        """Check that nobody removes a checkpoint of this id; take over what a dead removal left.

        Raises:
            OSError: Somebody does, or did within the hour.
        """
        for tomb in tombs_in(self._directory, self._save_id):
            path = self._path(tomb)
            with contextlib.suppress(FileNotFoundError):
                taken_s = os.stat(path, follow_symlinks=False).st_ctime  # renamed then
                if taken_s + QUIET_S >= os.fstat(self._lock_fd).st_mtime:
                    raise _removed(tomb)
                self._files.unlink(path)

    def _look_behind(self, manifest: bytes) -> None:
        """Look whether the files stay, and are whole; see above."""
        if tombs := tombs_in(self._directory, self._save_id):
            raise _removed(tombs[0])
        now_s = os.stat(self._name.target).st_mtime  # it was written just now
        for name in sorted(os.listdir(self._directory)):
            if name.startswith(NEW_MANIFEST_PREFIX) and self._save_id not in name:
                named_s = self._named_s(self._path(name))
                if named_s is not None and named_s + QUIET_S >= now_s:
                    raise _removed(name)
        sizes = {self._path(file.name): file.nbytes for file in decode_summary(manifest).files}
        for path in self._made_files:
            if path != self._name.new:  # which may have got the manifest's name
                nbytes = os.stat(path, follow_symlinks=False).st_size
                if sizes.get(path, nbytes) != nbytes:
                    raise OSError(errno.EBUSY, f"{path!r} is written once more, by another copy")

    def _named_s(self, path: str) -> float | None:
        """Say when a manifest of this save got a name; `None` if it is another's, or gone by now.

        Another's is what another user wrote, too. A server calls ESTALE what has just gone.
        """
        try:
            is_of_this = read_summary(self._files, path)[0].save_id == self._save_id
            return os.stat(path).st_ctime if is_of_this else None
        except (FileNotFoundError, PermissionError, FormatError):
            return None
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return None

    def _open_marker(self, path: str) -> int:
        try:
            return super()._open_marker(path)
        except FileExistsError:
            return self._files.open(path, direct=False, writable=True)

    def _lock_marker(self) -> bool:
        try:
            is_mine = self._files.lock(self._lock_fd)
        except OSError as error:  # as with every attempt; but whoever removes it may be through
            if error.errno != errno.ESTALE:
                return False
            is_mine = False
        path = self._path(ATTEMPT_PREFIX + self._save_id)
        if not is_mine or not is_at(self._lock_fd, path):  # somebody is at it, or has removed it
            self._made_files.clear()  # the file is the other one's
            raise CommitConflictError(self._directory)
        self._owns_files = True
        return True

    @property
    def has_taken_over(self) -> bool:
        """Whether files of an earlier attempt are its own by now, if there are any."""
        return self._leads and self._directory not in self._made_dirs

    async def create(self, name: str, nbytes: int) -> BlockWriter:
        """Begin a data file, with what the earlier attempt left of it."""
        path = self._path(name)
        self._made_files.append(path)
        writer = ResumedWriter(
            self._files, path, nbytes, self._config, self._direct_refused, self._make_own_dir
        )
        writer.owner = self
        self._writers.append(writer)
        return writer

    def stay_now(self) -> None:
        """Say that the attempt is alive, if that was not said for long. Blocks.

        For who finds all that is to be written there, and so writes nothing.
        """
        now_s = time.monotonic()
        if now_s - self._stayed_s >= STAY_S:
            self._stayed_s = now_s
            self._stay()

    async def keep(self, name: str, nbytes: int) -> None:
        """Take over a data file; one that cannot be synced goes, as `BlockWriter.discard` says."""
        try:
            await super().keep(name, nbytes)
        except StorageError as error:
            if error.errno == errno.EIO and await run_blocking(self._executor, self.may_remove):
                self._try_remove(self._path(name))
            raise

    def may_remove(self) -> bool:
        """Whether no checkpoint has the files, and no other attempt does. Blocks."""
        return self._owns_files and not self._is_committed()

    def _abort(self) -> None:
        if not self._leads or self.may_remove():
            super()._abort()
        else:
            self._leave()

    def _is_committed(self) -> bool:
        """Whether the checkpoint that is there is of this save, or may be."""
        try:
            manifest = self._path(MANIFEST_NAME)
            return read_summary(self._files, manifest)[0].save_id == self._save_id
        except FileNotFoundError:
            return False
        except (FormatError, OSError):
            return True


def _removed(tomb: str) -> OSError:
    return OSError(errno.EBUSY, f"this very checkpoint is being removed there ({tomb!r})")


class ResumedWriter(BlockWriter):
    """A file that an earlier attempt may have begun; see `BlockWriter`."""

    _is_new = True
    owner: ResumedAttempt

    def _may_remove(self) -> bool:
        return self.owner.may_remove()

    def pwrite(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset`, unless it is there; see `streams.Sink`."""
        with contextlib.suppress(OSError):  # then it is written, or raised again
            self._open()
            if self._compare(offset, data):
                self.owner.stay_now()
                return
        super().pwrite(offset, data)

    def _create(self) -> None:
        """Open the file that is there; make one if none is, or if it is no file of its own."""
        try:
            fd = self._files.open(self._path, direct=False, writable=True)
        except FileNotFoundError:
            super()._create()
            return
        except OSError as error:
            if error.errno not in NO_FILE:  # busy, say: it may hold what is to be kept
                raise
            fd = -1
        if fd < 0 or os.fstat(fd).st_nlink != 1:
            if fd >= 0:
                self._files.close(fd)
            self._files.unlink(self._path)
            super()._create()
            return
        self._fd = fd
        self._is_new = False
        if self._direct:
            with contextlib.suppress(OSError):  # refused: the page cache serves
                self._fd = self._files.open(self._path, direct=True, writable=True)
                self._files.close(fd)
        if self._fd == fd:
            self._direct = False
        elif not self._is_aligned(self._fd):
            self._files.set_buffered(self._fd)

    def _cut_off(self, fd: int) -> None:
        """Give the file its size, unless it has it: what is right is not touched."""
        if os.fstat(fd).st_size != self._nbytes:
            super()._cut_off(fd)

    def _compare(self, offset: int, data: memoryview) -> bool:
        """Compare, through the page cache where direct reads are refused only now."""
        try:
            return self._is_there(offset, data)
        except OSError:
            with self._lock:
                if not self._direct:
                    raise
                self._files.set_buffered(self._fd)
                self._direct = False  # now: other threads write as it says
            return self._is_there(offset, data)

    def _is_there(self, offset: int, data: memoryview) -> bool:
        """Compare what the file has there, past the page cache where that is possible."""
        nbytes = len(data)
        if self._is_new:
            return False
        room = mmap.mmap(-1, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES)
        with memoryview(room) as view:
            done = 0
            while done < nbytes:
                count = self._files.pread(self._fd, view[done:], offset + done)
                if count <= 0 or (done + count < nbytes and count % PAGE_NBYTES):
                    return False  # it ends before
                done += count
            return bytearray(view[:nbytes]) == data
