"""How a save becomes visible in a local directory, or leaves no trace.

    <path>/manifest.json                               the commit; written last, in one step
    <path>/data-<save id>-<rank>-<index>.safetensors   never renamed, never written over
    <path>/.attempt-<save id>                          locked while its save is alive
    <path>/.manifest-<save id>                         the manifest on its way

Order, with `durability="full"`: data files are written and synced; the manifest is
written under its own name and synced; the directory is synced, and every directory above
it that is new, so that all names it speaks of are on the disk; the manifest gets its
name, exclusively or by exchange with the one it replaces; the directory is synced again.
A power cut before the name leaves what was there before; after the last sync, the new one.

Exchange tells exactly which manifest was replaced, so that just the files of that one go
and no concurrent save loses any. A save that was killed leaves files and an attempt whose
lock is free; the next save to the path removes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio.errors import CheckpointExistsError, CommitConflictError, FormatError
from ckptio.events import CleanupFailed, DirectIORefused, LeftoversRemoved
from ckptio.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES
from ckptio.format.summary import decode_summary
from ckptio.storage.blocks import BlockWriter, keep_file, storage_error, write_file
from ckptio.storage.files import (
    MAX_TRIES,
    NoExclusiveNames,
    follow_pointer,
    make_dirs,
    read_regular,
    young_parents,
)
from ckptio.storage.leftovers import boot_id, files_of, find_leftovers, notes_of
from ckptio.storage.names import ATTEMPT_PREFIX, NEW_MANIFEST_PREFIX, NOTE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.storage.files import PosixFiles

_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)
_NOT_TO_BE_SYNCED = (*_NO_RIGHT, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class LocalAttempt:
    """One save on its way; see `interface.Attempt`. Made by `LocalStorage.begin`."""

    def __init__(
        self,
        directory: str,
        save_id: str,
        *,
        overwrite: bool,
        files: PosixFiles,
        config: CheckpointConfig,
        executor: Executor,
        emit: Callable[[Event], None],
    ) -> None:
        self._directory = directory
        self._save_id = save_id
        self._overwrite = overwrite
        self._files = files
        self._config = config
        self._executor = executor
        self._emit = emit
        self._made_dirs: list[str] = []
        self._made_files: list[str] = []
        self._writers: list[BlockWriter] = []
        self._lock_fd = -1
        self._manifest_inode = 0
        self._published = False
        self._refused = False
        self._leads = False

    def enter(self) -> None:
        """Make the directory, for a rank whose save another one leads. Blocks."""
        try:
            self._make_own_dir()
        except OSError as error:
            raise storage_error(error, self._directory, "cannot join a save") from error

    def prepare(self) -> None:
        """Make the directory and the attempt's lock, and clear what killed saves left. Blocks."""
        if not self._overwrite and os.path.lexists(self._path(MANIFEST_NAME)):
            raise CheckpointExistsError(self._directory)
        marker = self._path(ATTEMPT_PREFIX + self._save_id)
        try:
            self._lock_fd = self._make_marker(marker)
            locks = self._lock_marker()
            self._leads = True
            if locks:
                self._files.pwrite(self._lock_fd, memoryview(boot_id()), 0)
            if locks and self._directory not in self._made_dirs:
                self._remove(find_leftovers(self._files, self._directory, self._save_id))
        except CommitConflictError:
            raise
        except OSError as error:
            raise storage_error(error, self._directory, "cannot begin a save") from error

    def _make_marker(self, path: str) -> int:
        """Make the directory and a file in it, though another save's end may remove the first."""
        for _ in range(MAX_TRIES):
            self._make_own_dir()
            with contextlib.suppress(FileNotFoundError):
                fd = self._open_marker(path)
                self._made_files.append(path)
                return fd
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _open_marker(self, path: str) -> int:
        return self._files.create(path, self._config.file_mode, direct=False)

    def _lock_marker(self) -> bool:
        try:
            return self._files.lock(self._lock_fd)
        except OSError:  # no locks here: nobody can tell a dead save from a living one
            return False

    def _make_own_dir(self) -> None:
        make_dirs(self._files, self._directory, self._config.dir_mode, self._made_dirs)

    @property
    def is_published(self) -> bool:
        """Whether the manifest is out, or may be; see `interface.Attempt`."""
        return self._published

    async def create(self, name: str, nbytes: int) -> BlockWriter:
        """Begin a data file; see `interface.Attempt`."""
        path = self._path(name)
        self._made_files.append(path)
        writer = BlockWriter(
            self._files, path, nbytes, self._config, self._direct_refused, self._make_own_dir
        )
        self._writers.append(writer)
        return writer

    def _direct_refused(self, reason: str) -> None:
        if not self._refused:  # once a save, not once a file
            self._refused = True
            self._emit(DirectIORefused(path=self._directory, reason=reason))

    async def keep(self, name: str, nbytes: int) -> None:
        """Take over a data file; see `interface.Attempt`."""
        self._made_files.append(path := self._path(name))
        await run_blocking(self._executor, keep_file, self._files, path, nbytes, self._config)

    async def note(self, data: bytes) -> None:
        """Leave a note; see `interface.Attempt`."""
        path = self._path(NOTE_PREFIX + self._save_id)
        try:
            await run_blocking(self._executor, self._write_file, path, data)
        except OSError as error:
            raise storage_error(error, path, "cannot leave a note") from error

    async def commit(self, manifest: bytes) -> None:
        """Publish `manifest`; see `interface.Attempt`."""
        try:
            await run_blocking(self._executor, self._commit, manifest)
        except asyncio.CancelledError:
            if not self._published:
                raise
            # the commit came first: a save that ends as cancelled must have changed nothing
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()

    def _commit(self, manifest: bytes) -> None:
        new = self._path(NEW_MANIFEST_PREFIX + self._save_id)
        target = self._path(MANIFEST_NAME)
        try:
            self._write_file(new, manifest)
            self._manifest_inode = os.stat(new, follow_symlinks=False).st_ino
            self._sync_dirs()
            self._check_present()
            replaced = self._publish(new, target)
        except CommitConflictError:
            raise
        except OSError as error:
            raise storage_error(error, target, "cannot commit") from error
        self._published = True
        self._clean_up(new, replaced)

    async def stay(self) -> None:
        """Nothing has to be said: the lock of a living save is held."""

    async def seal(self) -> None:
        """Make what this rank wrote durable by name; see `interface.Attempt`."""
        await run_blocking(self._executor, self._seal)

    def _seal(self) -> None:
        try:
            self._make_own_dir()  # a rank without files may have lost it to another save's end
            self._sync_dirs()
            self._check_present()
        except OSError as error:
            raise storage_error(error, self._directory, "cannot end the files of a rank") from error

    def _check_present(self) -> None:
        """Look once more for every data file: a manifest must not name what somebody removed."""
        for path in self._made_files:
            os.stat(path, follow_symlinks=False)

    def _publish(self, new: str, target: str) -> str:
        """Make the manifest visible and its name durable; undo it if that fails.

        Returns:
            Where the manifest that was replaced is now; nothing if none was.
        """
        replaced = self._give_name(new, target)
        try:
            self._sync_dir(self._directory)
        except OSError as error:
            self._published = True  # until it is undone: its data files must stay
            try:
                self._take_back(new, target, replaced)
            except OSError:
                raise OSError(error.errno, f"{error.strerror}; but it may stand") from error
            raise
        return replaced

    def _take_back(self, new: str, target: str, replaced: str) -> None:
        """Take a manifest's name away again; see `_publish`."""
        if os.stat(target, follow_symlinks=False).st_ino != self._manifest_inode:
            return  # another save has replaced it since, by exchange; theirs stands
        if not replaced:
            self._files.unlink(target)
        elif replaced == new:
            self._files.exchange(new, target)
        else:
            self._files.replace(replaced, target)
        self._published = False

    def _give_name(self, new: str, target: str) -> str:
        """Make the manifest visible; see `_publish`."""
        for _ in range(MAX_TRIES):
            if self._overwrite:
                with contextlib.suppress(FileNotFoundError):  # there is nothing to replace
                    return self._replace(new, target)
            try:
                self._files.publish(new, target)
            except FileExistsError:
                if self._overwrite:
                    continue  # somebody was first, just now: there is one to replace
                break
            except NoExclusiveNames:
                if not self._overwrite:
                    raise
                self._files.replace(new, target)
            return ""
        raise CommitConflictError(self._directory)

    def _replace(self, new: str, target: str) -> str:
        """Replace a manifest by exchange; where that is not possible, keep a copy of the old.

        Between copy and rename another save may commit; its files would then stay until
        the next save to the path. Nothing that is committed is ever lost.

        Returns:
            Where the manifest that was replaced is now.

        Raises:
            FileNotFoundError: There is none.
        """
        if self._files.exchange(new, target):
            return new
        old = new + "-old"
        self._write_file(old, read_regular(self._files, target, MAX_MANIFEST_NBYTES))
        self._files.replace(new, target)
        return old

    def _write_file(self, path: str, data: bytes) -> None:
        """Write a small file and sync it."""
        self._made_files.append(path)
        write_file(self._files, path, data, self._config)

    def _sync_dirs(self) -> None:
        """Sync the directory, its parent, the parent of each directory that is new, and more.

        Further up, every directory that changed within the hour: another save that is still
        under way, or was killed, may have made what this one found.
        """
        parents = [os.path.dirname(directory) for directory in reversed(self._made_dirs)]
        above = [os.path.dirname(self._directory), *parents]
        ours = {self._directory, *parents}
        for directory in dict.fromkeys((self._directory, *above, *young_parents(above[-1]))):
            try:
                self._sync_dir(directory)
            except OSError as error:
                # it has an entry of ours, which must be on the disk; others may not be ours to
                # sync, or nobody's: mount points of an automounter refuse it
                if directory in ours or error.errno not in _NOT_TO_BE_SYNCED:
                    raise

    def _sync_dir(self, path: str) -> None:
        if self._config.durability == "full":
            self._files.fsync_dir(path)

    def _clean_up(self, new: str, replaced: str) -> None:
        """Remove what a commit made superfluous. The checkpoint is whole whatever happens here."""
        if replaced:
            self._retire(replaced)
        else:
            self._try_remove(new)
        self._try_remove(self._path(ATTEMPT_PREFIX + self._save_id))
        self._drop_lock()

    def _retire(self, manifest: str) -> None:
        """Remove a manifest under another name, and what only it needs."""
        doomed = []
        # one that cannot be read: its files are told from names, by the next save
        try:
            commit = read_regular(self._files, manifest, MAX_MANIFEST_NBYTES)
            data, pointed = follow_pointer(self._files, self._directory, commit)
            old = decode_summary(data)
            if old.save_id != self._save_id:
                names = [*(entry.name for entry in old.files), *pointed]
                doomed = [name for name in names if self._save_id not in name]
                doomed += notes_of(self._directory, old.save_id)
        except (FileNotFoundError, FormatError):
            pass
        except OSError as error:
            self._cannot_remove(manifest, error)
        self._remove(doomed)
        self._try_remove(manifest)

    async def abort(self) -> None:
        """Remove everything this attempt made; see `interface.Attempt`."""
        await run_blocking(self._executor, self._abort)

    def _abort(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):  # the file goes next
                writer.discard()
        if self._published:
            self._drop_lock()
            return
        for path in reversed(self._made_files):
            self._try_remove(path)
        if self._leads:
            for name in files_of(self._directory, self._save_id):
                self._try_remove(self._path(name))
        self._drop_lock()
        for directory in reversed(self._made_dirs):
            with contextlib.suppress(OSError):  # somebody else's files are in it
                self._files.rmdir(directory)

    async def leave(self) -> None:
        """Let go, and remove nothing; see `interface.Attempt`."""
        await run_blocking(self._executor, self._leave)

    def _leave(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):  # nobody here knows whether anybody needs it
                writer.discard()
        self._made_files.clear()
        self._made_dirs.clear()
        self._drop_lock()

    def _drop_lock(self) -> None:
        self._writers.clear()  # they refer to this, which is over: a circle
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # closing is all that was left to do
                self._files.close(fd)

    def _remove(self, names: Sequence[str]) -> None:
        """Remove files by name, and say so."""
        removed = [name for name in names if self._try_remove(self._path(name))]
        if removed:
            self._emit(LeftoversRemoved(path=self._directory, files=tuple(removed)))

    def _try_remove(self, path: str) -> bool:
        """Remove a file; an event, not an error, if it stays."""
        try:
            self._files.unlink(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._cannot_remove(path, error)
            return False
        return True

    def _cannot_remove(self, path: str, error: OSError) -> None:
        """Say that something stays that is no longer needed."""
        self._emit(CleanupFailed(path=self._directory, file=os.path.basename(path), error=error))

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}"
