"""How a save becomes visible in a local directory, or leaves no trace.

    <path>/manifest.json                               the commit; written last, in one step
    <path>/data-<save id>-<rank>-<index>.safetensors   never renamed, never written over
    <path>/.attempt-<save id>                          locked while its save is alive
    <path>/.manifest-<save id>                         the manifest on its way

`storage.file_names` has all names.

Order, with `durability="full"`: data files are written and synced; the manifest is
written under its own name and synced; the directory is synced, and every directory above
it that is new, so that all names it speaks of are on the disk; the manifest gets its
name (`storage.manifest_name`); the directory is synced again.
A power cut before the name leaves what was there before; after the last sync, the new one.

Exchange tells exactly which manifest was replaced, so that just the files of that one go
and no concurrent save loses any. A save that was killed leaves files and an attempt whose
lock is free; the next save to the path removes them, also where they fill the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
from typing import TYPE_CHECKING

from ckptio._aio import run_blocking, take_back_cancel
from ckptio.errors import CheckpointExistsError, CommitConflictError, FormatError, StorageError
from ckptio.events import CleanupFailed, DirectIORefused, LeftoversRemoved
from ckptio.storage.anew import look_anew
from ckptio.storage.attempt_lock import Attempts
from ckptio.storage.blocks import BlockWriter, keep_file, storage_error, write_file
from ckptio.storage.file_names import ATTEMPT_PREFIX, NOTE_PREFIX
from ckptio.storage.files import MAX_TRIES, make_dirs, sync_dirs
from ckptio.storage.freeing import NO_ROOM, Freeing, with_room
from ckptio.storage.leftovers import (
    files_of,
    find_leftovers,
    is_committed,
    mark,
    read_summary,
    require_free,
)
from ckptio.storage.manifest_name import ManifestName
from ckptio.storage.notes import take_note, taken
from ckptio.storage.tombs import put_back_mistakes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.storage.files import PosixFiles
    from ckptio.storage.notes import LocalNote


class LocalAttempt:
    """One save on its way; see `interface.Attempt`. Made by `LocalStorage.begin`."""

    is_alone = True  # an abort sees itself what another copy has committed
    _has_left = False  # what it made is no longer its own to remove

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
        self._remover: PosixFiles | Freeing = files
        self._config = config
        self._executor = executor
        self._emit = emit
        self._made_dirs: list[str] = []
        self._made_files: list[str] = []
        self._writers: list[BlockWriter] = []
        self._lock_fd = -1
        self._name = ManifestName(files, directory, save_id, config)
        self._failure: StorageError | None = None  # of the commit; says if it is in doubt
        self._refused = False  # direct I/O was, and an event has said so
        self._leads = False  # this rank began the save: an abort removes the files of all ranks

    def enter(self) -> None:
        """Make the directory, for a rank whose save another one leads. Blocks."""
        try:
            self._make_own_dir()
        except OSError as error:
            raise storage_error(error, self._directory, "cannot join a save") from error

    def prepare(self) -> None:
        """Make the directory and the attempt's lock, and clear what killed saves left. Blocks."""
        marker = self._path(ATTEMPT_PREFIX + self._save_id)
        try:
            self._require_free()
            try:
                locks = with_room(self._mark, marker)
            except OSError as error:
                if error.errno not in NO_ROOM or not self._make_room():
                    raise
                locks = self._mark(marker)
            if locks and self._directory not in self._made_dirs:
                with Freeing(self._files, self._executor) as self._remover:  # staging waits for it
                    self._clear()
        except (CheckpointExistsError, CommitConflictError):
            raise
        except OSError as error:
            raise storage_error(error, self._directory, "cannot begin a save") from error

    def _mark(self, marker: str) -> bool:
        """Make the attempt's file, lock it, and say so in it. Goes on where it failed before.

        Returns:
            Whether there are locks.
        """
        if self._lock_fd < 0:
            self._lock_fd = self._make_marker(marker)
        locks = self._lock_marker()
        self._leads = True
        if locks:
            mark(self._files, self._lock_fd)
        else:  # one that was there may be so old that its save counts as dead
            self._stay()
        return locks

    def _make_room(self) -> bool:
        """Clear what killed saves left where the disk is full, perhaps of that; whether any went.

        This save may have no lock yet, which would say that there are locks: what goes is of saves
        whose own lock said so.
        """
        with contextlib.suppress(OSError):  # the directory is not there, say: the disk is full
            names = self._find_leftovers()
            dead = [n.removeprefix(ATTEMPT_PREFIX) for n in names if n.startswith(ATTEMPT_PREFIX)]
            return self._clear([name for name in names if any(owner in name for owner in dead)])
        return False

    def _clear(self, among: Collection[str] | None = None) -> bool:
        return self._attempts().clear(self._find_leftovers, self._remove, among)

    def _attempts(self) -> Attempts:
        mode, stays = self._config.file_mode, self._cannot_remove
        return Attempts(self._files, self._directory, mode, stays, self._now_s)

    def _find_leftovers(self, held: Collection[str] = ()) -> list[str]:
        return find_leftovers(self._files, self._directory, self._save_id, self._now_s, held)

    def _now_s(self) -> float:
        """Say what time it is there, by the attempt's file; without one, nothing is quiet."""
        return os.fstat(self._lock_fd).st_mtime if self._lock_fd >= 0 else 0.0

    def _require_free(self) -> None:
        put_back_mistakes(self._files, self._directory)
        if not self._overwrite:
            require_free(self._files, self._directory)

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
        with_room(make_dirs, self._files, self._directory, self._config.dir_mode, self._made_dirs)

    @property
    def is_published(self) -> bool:
        """Whether the manifest is out, or may be; see `interface.Attempt`."""
        return self._name.may_stand

    async def create(self, name: str, nbytes: int) -> BlockWriter:
        """Begin a data file; see `interface.Attempt`."""
        self._made_files.append(path := self._path(name))
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

    async def note(self, data: bytes) -> LocalNote:
        """Leave a note; see `interface.Attempt`."""
        path = self._path(NOTE_PREFIX + self._save_id)

        def leave() -> LocalNote | None:
            self._write_file(path, data)
            return take_note(self._files, self._directory, self._save_id, self._executor)

        try:
            note = await taken(self._executor, leave)
        except OSError as error:
            raise storage_error(error, path, "cannot leave a note") from error
        if note is None:
            raise StorageError("somebody else has removed or taken the note", path=path)
        return note

    async def commit(self, manifest: bytes) -> None:
        """Publish `manifest`; see `interface.Attempt`."""
        try:
            await run_blocking(self._executor, self._commit, manifest)
        except asyncio.CancelledError:
            if self._failure is not None and self._failure.in_doubt:
                raise self._failure from None  # a save that ends as cancelled has changed nothing
            if not self._name.is_committed:
                raise
            take_back_cancel()

    def _commit(self, manifest: bytes) -> None:
        name = self._name
        try:
            self._write_file(name.new, manifest)
            self._sync_dirs()
            self._check_present()
            look = functools.partial(self._look_behind, manifest)
            name.give(manifest, overwrite=self._overwrite, look=look)
        except CommitConflictError:
            raise
        except OSError as error:
            failure = self._failure = storage_error(error, name.target, "cannot commit")
            # here, not by whoever cleans up: whoever goes on later leaves, and others are told now
            if not name.withdraw():
                text, code = f"{failure.message}; but it may stand", failure.errno or errno.EIO
                self._failure = StorageError(text, path=name.target, code=code, in_doubt=True)
            raise self._failure from error
        self._clean_up()

    def _look_behind(self, manifest: bytes) -> None:
        """Look, behind the commit, whether it may stay; see `resumed`."""

    async def stay(self) -> None:
        """Say that this save is alive, to hosts that do not see its lock."""
        await run_blocking(self._executor, self._stay)

    def _stay(self) -> None:
        with contextlib.suppress(OSError):  # gone, say; whoever goes on with the save finds out
            if self._lock_fd >= 0:
                os.utime(self._lock_fd)

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
        look_anew(self._name.target)
        for path in self._made_files:
            os.stat(path, follow_symlinks=False)

    def _write_file(self, path: str, data: bytes) -> None:
        """Write a small file and sync it."""
        self._made_files.append(path)
        write_file(self._files, path, data, self._config)

    def _sync_dirs(self) -> None:
        """Sync the directory and those above that a save may have changed, as configured."""
        if self._config.durability == "full":
            sync_dirs(self._files, self._directory, self._made_dirs)

    def _clean_up(self) -> None:
        """Remove what a commit made superfluous. The checkpoint is whole whatever happens here."""
        with Freeing(self._files, self._executor) as self._remover:
            if self._name.replaced:
                self._retire(self._name.replaced)
            else:
                self._try_remove(self._name.new)
            self._try_remove(self._path(ATTEMPT_PREFIX + self._save_id))
        self._drop_lock()

    def _retire(self, manifest: str) -> None:
        """Remove a manifest under another name, and what only it needs."""
        # one that cannot be read: its files are told from names, by the next save
        try:
            old, pointed = read_summary(self._files, manifest)
        except (FileNotFoundError, FormatError):
            pass
        except OSError as error:
            self._cannot_remove(manifest, error)
        else:
            if old.save_id != self._save_id:
                names = [*(entry.name for entry in old.files), *pointed]
                names = [name for name in names if self._save_id not in name]
                self._attempts().remove_replaced(old.save_id, names, self._remove)
        self._try_remove(manifest)

    async def abort(self) -> None:
        """Remove everything this attempt made; see `interface.Attempt`."""
        await run_blocking(self._executor, self._abort)

    def _abort(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):  # the file goes next
                writer.discard()
        if self._has_left or self._name.may_stand or not self._name.withdraw():
            self._drop_lock()
            return
        copies = [self._name.copy] if self._name.copy else []
        # of the others, too, if this leads; each once, as one that stays is told of once
        others = files_of(self._directory, self._save_id) if self._leads else []
        paths = dict.fromkeys((*copies, *reversed(self._made_files), *map(self._path, others)))
        kept = f"data-{self._save_id}-" if self._is_committed() else None
        marker = self._path(ATTEMPT_PREFIX + self._save_id)  # last: its lock keeps copies away
        with Freeing(self._files, self._executor) as self._remover:
            for path in sorted(paths, key=lambda path: path == marker):
                if kept is None or not os.path.basename(path).startswith(kept):
                    self._try_remove(path)
        self._drop_lock()
        for directory in reversed(self._made_dirs):
            with contextlib.suppress(OSError):  # somebody else's files are in it
                self._files.rmdir(directory)

    def _is_committed(self) -> bool:
        """Whether another copy of the same save is what is there, as far as that can be told."""
        with contextlib.suppress(OSError):
            return is_committed(self._files, self._directory, self._save_id)
        return False

    async def leave(self) -> None:
        """Let go, and remove nothing; see `interface.Attempt`."""
        await run_blocking(self._executor, self._leave)

    def _leave(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):  # nobody here knows whether anybody needs it
                writer.discard()
        self._has_left = True
        self._drop_lock()

    def _drop_lock(self) -> None:
        self._writers.clear()  # they refer to this, which is over: a reference cycle
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # closing is all that was left to do
                self._files.close(fd)

    def _remove(self, names: Sequence[str]) -> bool:
        """Remove files by name, and say so. Whether there were any."""
        removed = tuple(name for name in names if self._try_remove(self._path(name)))
        if removed:
            self._emit(LeftoversRemoved(path=self._directory, files=removed))
        return bool(removed)

    def _try_remove(self, path: str) -> bool:
        """Remove a file; an event, not an error, if it stays."""
        try:
            self._remover.unlink(path)
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
