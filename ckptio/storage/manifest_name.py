"""The one step of a commit on a file system: a manifest gets its name.

It gets a name that is free, by link or rename, or is exchanged with the manifest that it replaces:
what has been exchanged is exactly what was replaced. Where a file system cannot exchange names, a
copy of the old manifest is kept beside.

    may_stand   is_committed
    no          no             it does not have the name: never got it, or it was taken back
    yes         no             it may have the name: no file that it lists may be removed
    yes         yes            it has the name, and the directory is synced

An error does not mean that the manifest did not get its name. An NFS client whose answer is lost
sends the request again, and is told that the name is taken (by its own first request), or that what
it renames is gone (open(2), of O_EXCL: do not use the result of link). Other mounts say that they
do not know. So after every error whatever has the name is read, and compared. Comparing inode
numbers was rejected: some mounts in user space give each name of a file a number of its own.

A request that was given up may be served later. So when a commit fails, the file that the request
would name is removed: else the manifest might appear after all, when its files are gone or taken up
by another save. An exchange that is carried out twice undoes itself without any error (Linux
repeats one that ends with ESTALE): what has the name is read after an exchange, too. SeaweedFS
renames where it is asked to exchange, and reports success: what is to be replaced is read before.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from ckptio.errors import CommitConflictError, FormatError
from ckptio.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES
from ckptio.storage.blocks import write_file
from ckptio.storage.file_names import NEW_MANIFEST_PREFIX, REPLACED_SUFFIX, tomb_name
from ckptio.storage.files import MAX_TRIES, NoExclusiveNames, read_regular
from ckptio.storage.leftovers import is_whole, read_summary
from ckptio.storage.tombs import put_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio.config import CheckpointConfig
    from ckptio.storage.files import PosixFiles

T = TypeVar("T")


class ManifestName:
    """The name of one manifest; see above. Used by one thread at a time.

    Args:
        files: Operations to use.
        directory: The checkpoint's.
        save_id: The save's.
        config: Durability, and the mode of files.

    Attributes:
        new: Where the manifest is before it gets its name.
        target: The name.
        copy: Where a copy of the manifest that it replaces is; empty if none was made.
        replaced: Where the manifest that was replaced is now; empty if none was.
        may_stand: Whether it has the name, or may have it; see above.
        is_committed: Whether it has the name for good.
    """

    def __init__(
        self,
        files: PosixFiles,
        directory: str,
        save_id: str,
        config: CheckpointConfig,
    ) -> None:
        self.new = f"{directory}/{NEW_MANIFEST_PREFIX}{save_id}"
        self.target = f"{directory}/{MANIFEST_NAME}"
        self.copy = ""
        self.replaced = ""
        self.may_stand = False
        self.is_committed = False
        self._directory = directory
        self._files = files
        self._config = config
        self._manifest = b""
        self._is_sent = False  # something that gives the name has been asked for
        self._was_there = False  # it had the name before: an earlier copy of the same save
        self._save_id = save_id

    def give(
        self, manifest: bytes, *, overwrite: bool, look: Callable[[], None] = lambda: None
    ) -> None:
        """Give a manifest that is written its name, durable as configured; undo that on failure.

        Args:
            manifest: What is in the file at `new`.
            overwrite: Whether it may replace another one.
            look: Called when it has the name; raises `OSError` if it may not keep that.

        Raises:
            CommitConflictError: The name is taken.
            OSError: It failed. If `may_stand` is set, it may have the name all the same.
        """
        self._manifest = manifest
        self.replaced = self._give(overwrite=overwrite)
        may_stay = False
        try:
            look()
            may_stay = True
            if self._config.durability == "full":
                self._files.fsync_dir(self._directory)
        except OSError as error:
            if not self._take_back(may_stay=may_stay):
                raise _in_doubt(error) from error
            self.may_stand = False
            raise
        self.is_committed = True

    def withdraw(self) -> bool:
        """Remove the file at `new` after a failure; false if it has the name after all, or may.

        A mount may serve a request late that it gave up, but not without that file. Where the file
        cannot be removed, the request may still be served.
        """
        if not self._is_sent:
            return True
        for _ in range(2):
            try:
                self.may_stand = self.may_stand or self._is_there()
            except OSError:
                self.may_stand = True
            if self.may_stand:
                return False
            self.may_stand = not self._is_gone()
        return not self.may_stand

    def _is_gone(self) -> bool:
        """Remove the file at `new`; whether it is gone."""
        try:
            self._files.unlink(self.new)
        except FileNotFoundError:
            return True
        except OSError:  # whoever removes the other files says so
            return False
        return True

    def _give(self, *, overwrite: bool) -> str:
        """Make the manifest visible; see `replaced`."""
        for _ in range(MAX_TRIES):
            if overwrite:
                replaced = self._replace()
                if replaced or self._was_there:
                    return replaced
            try:
                self._try(self._files.publish, None)
            except FileExistsError:
                if overwrite:
                    continue  # somebody was first, just now: there is one to replace
                break
            except NoExclusiveNames:
                if not overwrite:
                    raise
                self._try(self._files.replace, None)
            return ""
        raise CommitConflictError(self._directory)

    def _replace(self) -> str:
        """Replace a manifest by exchange; where that is not possible, keep a copy of the old.

        Between copy and rename another save may commit; its files then stay until the next
        save to the path, but it is replaced by this one unseen, as by one that came later.

        Returns:
            Where the manifest that was replaced is now; nothing if there is none.
        """
        before = self._before()
        try:
            if self._try(self._exchange, done=True):
                return self._kept(before)
        except FileNotFoundError:
            return ""
        self.may_stand = self._is_sent = False  # nothing was asked for that is not known here
        try:
            old = read_regular(self._files, self.target, MAX_MANIFEST_NBYTES)
        except FileNotFoundError:
            return ""
        if old == self._manifest:
            self.may_stand = self._was_there = True
            return ""
        self.copy = self.new + REPLACED_SUFFIX
        write_file(self._files, self.copy, old, self._config)
        self._try(self._files.replace, None)
        return self.copy

    def _before(self) -> bytes:
        """Read what is to be replaced; nothing if there is none, or it cannot be read."""
        with contextlib.suppress(OSError):
            return read_regular(self._files, self.target, MAX_MANIFEST_NBYTES)
        return b""

    def _kept(self, before: bytes) -> str:
        """Say where a manifest is that was exchanged: in a copy, if it is gone all the same."""
        try:
            read_regular(self._files, self.new, MAX_MANIFEST_NBYTES)  # a look may know it yet
        except FileNotFoundError:
            if before == self._manifest:
                self._was_there = True
                return ""
            path = self.new + REPLACED_SUFFIX
            with contextlib.suppress(OSError):  # then its files go with the next save
                if before:
                    write_file(self._files, path, before, self._config)
                    self.copy = path
        except OSError:  # it is there, and whoever retires it says so
            pass
        return self.copy or self.new

    def _exchange(self, source: str, target: str) -> bool:
        """Exchange two names; false where the file system cannot, or the names do not stay so."""
        for _ in range(2):
            if not self._files.exchange(source, target):
                break
            # not if another has the name by now, and has replaced this one
            if self._is_there() or not self._is_at(source):
                return True
        return False

    def _try(self, operation: Callable[[str, str], T], done: T) -> T:
        """Do what gives the name; `done` if it has it, whatever the operation says.

        Raises:
            OSError: It has not got it, or nobody can tell; then it may stand.
        """
        self.may_stand = self._is_sent = True
        try:
            return operation(self.new, self.target)
        except OSError as error:
            try:
                self.may_stand = self._is_there()
            except OSError:
                raise _in_doubt(error) from error
            if not self.may_stand:
                raise
        return done

    def _is_there(self) -> bool:
        """Whether what has the name is this manifest.

        Raises:
            OSError: Nobody can tell.
        """
        return self._is_at(self.target)

    def _is_at(self, path: str) -> bool:
        try:
            return read_regular(self._files, path, MAX_MANIFEST_NBYTES) == self._manifest
        except FileNotFoundError:
            return False

    def _take_back(self, *, may_stay: bool) -> bool:
        """Take the name away again; false if that fails, or if it is another manifest's by now.

        Args:
            may_stay: Whether it is better than none, where the one before cannot be had back.
        """
        try:
            if self._was_there or not self._is_there():
                return False  # that one may be taken back, too, and this one be there again
            if not self.replaced:
                self._take_away()
            elif self.replaced == self.new:
                self._exchange_back()
            elif self._may_return(may_stay=may_stay):
                if self._is_there():  # still: another may have replaced it just now
                    self._files.replace(self.replaced, self.target)
            elif not may_stay:
                self._take_away()
            return not self._is_there()
        except OSError:
            return False

    def _take_away(self) -> None:
        """Leave no manifest, unless it is another's by now: taken by mistake, that is put back."""
        tomb = tomb_name(self._save_id)
        path = f"{self._directory}/{tomb}"
        self._files.replace(self.target, path)
        if read_regular(self._files, path, MAX_MANIFEST_NBYTES) == self._manifest:
            with contextlib.suppress(OSError):  # it is left over, as of a removal
                self._files.unlink(path)
        else:
            put_back(self._files, self._directory, tomb)

    def _exchange_back(self) -> None:
        """Let the manifest that was replaced have the name again, unless it is another's by now.

        That is seen behind the exchange, which is undone then; a third one that is committed in
        between is replaced, as one that came first.
        """
        self._files.exchange(self.new, self.target)
        is_ours = False
        try:
            is_ours = read_regular(self._files, self.new, MAX_MANIFEST_NBYTES) == self._manifest
        finally:
            if not is_ours:
                self._files.exchange(self.new, self.target)

    def _may_return(self, *, may_stay: bool) -> bool:
        """Whether all that the manifest lists is there of which a copy was kept.

        Another save may have replaced it just after the copy was made, and removed its files:
        then this one, which is whole, stays, and whether for good is in doubt. And one of the same
        save has the files that may go, if this one may not stay.
        """
        try:
            summary, _ = read_summary(self._files, self.replaced)
        except FormatError:  # damaged before, or of another kind
            return True
        is_other = summary.save_id != self._save_id
        return (may_stay or is_other) and is_whole(self._directory, summary)


class _InDoubtError(OSError):
    """Nobody can tell whether the manifest has its name.

    A class of its own: of `OSError` itself, Python makes a `FileExistsError` or the like by the
    number, which here means that the answer is known.
    """


def _in_doubt(error: OSError) -> _InDoubtError:
    return _InDoubtError(error.errno, error.strerror)
