"""The lock of a save's attempt, held by whoever removes what the save has committed, or has left.

A copy of a checkpoint has the save id of the original, and the same names of files. So whoever
removes files of a save holds the lock of that save meanwhile: a removal, a save that has replaced a
checkpoint, and whoever clears what killed saves left. Only to look whether somebody needs them is
not enough: a copy may be begun, and committed, just behind that look.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio.storage.file_names import ATTEMPT_PREFIX, QUIET_S
from ckptio.storage.files import MAX_TRIES, NO_FILE
from ckptio.storage.leftovers import (
    files_of,
    is_at,
    is_at_home,
    is_committed,
    mark,
    newest_s,
    notes_of,
    owner_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ckptio.storage.files import PosixFiles

#: How often, and for how many seconds, a lock is waited for.
_NUM_WAITS, _WAIT_S = 5, 0.01
#: How many locks are held at a time: each is an open file, and a program may have few.
_MAX_HELD = 64
#: The file was made, or replaced, between two calls; ESTALE is how a server says so.
_CHANGING = (errno.EEXIST, errno.ESTALE)
#: Why no file can be made, for longer than now.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts of a directory, for whoever removes files there. All of it blocks.

    Attributes:
        files: Operations to use.
        directory: A checkpoint's directory.
        mode: Permissions of an attempt's file.
        stays: Called with a path and the reason if an attempt's file cannot be removed, or if files
            of a save stay since its lock cannot be had.
        clock: Says what time it is where files are dated.
    """

    files: PosixFiles
    directory: str
    mode: int
    stays: Callable[[str, OSError], object]
    clock: Callable[[], float]

    def path(self, save_id: str) -> str:
        """Give the path of an attempt's file."""
        return f"{self.directory}/{ATTEMPT_PREFIX}{save_id}"

    def clear(
        self,
        find: Callable[[Collection[str]], list[str]],
        remove: Callable[[list[str]], bool],
        among: Collection[str] | None = None,
    ) -> bool:
        """Remove what dead attempts left, holding their locks.

        A copy, or a conversion, that was cut off may be taken up under its old id by whoever gets
        the lock; and one whose attempt's file is gone may be begun again. The locks keep everybody
        from that meanwhile, and nothing goes that was taken up since it was found dead.

        Args:
            find: Names what is left over, given the saves whose locks are held. Called once before
                any lock is taken, and again under the locks: some of it may be needed by then.
            remove: Removes files by name, in this order: attempts' own come last. Says whether any
                went.
            among: The only names that may be removed, instead of what `find` gives before.

        Returns:
            Whether any went.

        Raises:
            OSError: What is there cannot be read.
        """
        names = set(find(()) if among is None else among)
        owners = sorted({owner_of(name) for name in names})
        has_removed = False
        for start in range(0, len(owners), _MAX_HELD):
            some = owners[start : start + _MAX_HELD]
            with contextlib.ExitStack() as stack:
                mine, held = self._held_of(some, names, stack)
                free = [name for name in find(held) if name in names and owner_of(name) in mine]
                free.sort(key=lambda name: name.startswith(ATTEMPT_PREFIX))
                has_removed |= remove(free)
        return has_removed

    def remove_replaced(
        self, save_id: str, names: Sequence[str], remove: Callable[[list[str]], object]
    ) -> None:
        """Remove the files of a checkpoint that was replaced.

        They stay if a copy of that checkpoint, which needs them, has just been committed. They also
        stay, and `stays` is told, where somebody has the lock: whoever is making such a copy, or
        the save itself, which has not ended yet. Where there are no locks, a copy that is committed
        later sees the old manifest, or finds files missing (`storage.resumed`).

        Args:
            save_id: The save that committed it.
            names: Its files.
            remove: Removes files by name; ignores those that are not there.
        """
        try:
            with self.held(save_id):
                if not is_committed(self.files, self.directory, save_id):
                    remove([*names, *notes_of(self.directory, save_id)])
        except OSError as error:
            if names:
                self.stays(f"{self.directory}/{names[0]}", error)

    def _held_of(
        self, owners: Collection[str], names: Collection[str], stack: contextlib.ExitStack
    ) -> tuple[set[str], set[str]]:
        """Hold the locks of some saves; give whose files may go, and whose locks are held.

        Where no lock can be had, files may go without one; see `held`.
        """
        mine, held = set[str](), set[str]()
        for owner in owners:
            try:
                is_held = stack.enter_context(self.held(owner, is_kept=True))
            except OSError as error:  # somebody has it; or it cannot be opened, which is told
                if error.errno != errno.EBUSY:
                    first = min(name for name in names if owner_of(name) == owner)
                    self.stays(f"{self.directory}/{first}", error)
                continue
            mine.add(owner)
            if is_held:
                held.add(owner)
        return mine, held

    @contextlib.contextmanager
    def held(self, save_id: str, *, is_kept: bool = False) -> Iterator[bool]:
        """Hold the lock of a save's attempt while files of it go.

        Meanwhile no copy of the same checkpoint is begun, and what is there counts as living, so
        that nobody else removes some of it. The attempt's file is made if it is not there, and
        removed at the end.

        Args:
            save_id: The save's id.
            is_kept: Whether a file that was there before stays, for the caller to remove.

        Yields:
            Whether the lock is held. It is not, and files may go all the same, where there are no
            locks; where the attempt's file cannot be made, is another user's, or is no regular
            file; and where another host has the lock of a save that has been quiet for an hour: a
            server may keep the locks of a host that has died.

        Raises:
            OSError: `EBUSY`: somebody has it. Such a copy is being made, it is being removed
                already, or the save is not through. Or the file cannot be opened now.
        """
        path = self.path(save_id)
        fd, is_new = self._taken(path)
        try:
            yield fd >= 0
        finally:
            if fd >= 0:
                try:
                    if (is_new or not is_kept) and is_at(fd, path):
                        self.files.unlink(path)
                except FileNotFoundError:
                    pass  # on SMB, what is open has its name till it is closed
                except OSError as error:
                    self.stays(path, error)
                finally:
                    self._close(fd)

    def _taken(self, path: str) -> tuple[int, bool]:
        """Take the lock of an attempt's file, which is made if need be.

        Returns:
            The open file, less than 0 if there can be none; and whether it was made here.
        """
        is_new = False
        failure: OSError | None = None
        try:
            for _ in range(MAX_TRIES):
                if failure is not None:
                    time.sleep(_WAIT_S)
                failure = None
                try:
                    fd, is_made = self._opened(path)
                    is_new |= is_made
                    is_held = None if fd < 0 else self._locked(fd, path)
                except OSError as error:
                    if error.errno not in _CHANGING:
                        raise
                    failure = error
                    continue
                if is_held:
                    return fd, is_new
                if is_held is None:
                    break
            if is_new:
                self._unlink(path)
            if failure is not None:  # nobody can tell
                raise failure
            return -1, False
        finally:
            failure = None  # it has this frame

    def _locked(self, fd: int, path: str) -> bool | None:
        """Lock an attempt's file, and say so in it; closed unless it is held: see `_is_held`."""
        try:
            is_held = self._is_held(fd, path)
            if is_held:
                with contextlib.suppress(OSError):  # the disk is full
                    mark(self.files, fd)
        except BaseException:
            self._close(fd)
            raise
        if not is_held:
            self._close(fd)
        return is_held

    def _opened(self, path: str) -> tuple[int, bool]:
        """Open an attempt's file, or make it; less than 0 if neither can be done.

        Returns:
            The open file, and whether it was made here.

        Raises:
            OSError: It is there and cannot be opened now, or somebody else made it just now.
        """
        try:
            return self.files.open(path, direct=False, writable=True), False
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, *NO_FILE):  # another user's, or no file
                return -1, False
            raise
        try:
            return self.files.create(path, self.mode, direct=False), True
        except OSError as error:
            if error.errno in _CHANGING:
                raise
            return -1, False  # the disk is full, say

    def _is_held(self, fd: int, path: str) -> bool | None:
        """Lock an attempt's file.

        Returns:
            Whether it is locked and still has its name: false if another file has that by now.
            `None` where nobody can lock it, or a host has that is taken for dead; see `held`.

        Raises:
            OSError: `EBUSY`: somebody has the lock; or `ESTALE`: a server says the file is gone.
        """
        try:
            is_free = self.files.lock(fd)
            for _ in range(_NUM_WAITS):  # whoever looks for leftovers has it for a moment
                if is_free:
                    break
                time.sleep(_WAIT_S)
                is_free = self.files.lock(fd)
        except OSError as error:
            if error.errno in _CHANGING:
                raise
            return None
        if is_free:
            return is_at(fd, path)
        marker = os.path.basename(path)
        names = [marker, *files_of(self.directory, marker.removeprefix(ATTEMPT_PREFIX))]
        if not is_at_home(fd) and newest_s(self.directory, names) + QUIET_S < self.clock():
            return None
        raise OSError(
            errno.EBUSY, "it is being removed, or copied once more, or its save is not through"
        )

    def _unlink(self, path: str) -> None:
        try:
            self.files.unlink(path)
        except FileNotFoundError:
            pass  # somebody else has
        except OSError as error:
            self.stays(path, error)

    def _close(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # closing is all that was left to do
            self.files.close(fd)


def time_there(files: PosixFiles, directory: str, mode: int, *, may_guess: bool) -> float:
    """Ask what time it is where files are dated, by a file that is made and removed again.

    Where none can be made (the disk is full, say), this host's clock has to do: else nothing could
    be removed there either.

    Args:
        files: Operations to use.
        directory: Where.
        mode: Permissions of the file.
        may_guess: Whether this host's clock may stand in, as for what has been found quiet by
            other means. Otherwise it is 0: nothing counts as quiet, and only what is dead by its
            lock goes.

    Raises:
        OSError: The file cannot be made, for another reason, or cannot be removed.
    """
    path = f"{directory}/{ATTEMPT_PREFIX}{secrets.token_hex(16)}"
    try:
        fd = files.create(path, mode, direct=False)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        return time.time() if may_guess else 0.0
    try:
        return os.fstat(fd).st_mtime
    finally:
        try:
            files.close(fd)
        finally:
            files.unlink(path)
