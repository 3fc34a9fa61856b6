"""A directory of checkpoints: what is in it, and how one of them goes.

    <root>/step-00000100/manifest.json           committed
    <root>/step-00000090/.manifest-<id>-old-...  being removed: no checkpoint any more
    <root>/step-00000080/data-<id>-...           no commit: being written, or its save died

Removal takes the commit back first, in one step that is synced as a commit is: the
manifest gets another name. Data files go next, and the renamed manifest, which lists them,
goes last. Whoever is killed in between leaves a checkpoint or none, never a part of one
that looks whole; and the next sweep knows what the rest is and removes it. A reader that
has begun ends with a typed error.

Meanwhile the removal holds the lock that the save had (`storage.attempt_lock`): a copy that is
made again has the same id, and would count on files that go.

What has neither name is the business of `storage.leftovers`: a save that lives is left
alone, however long it takes; one that died goes after a while, so that somebody who wants
to know why it died finds it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import time
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from ckptio._aio import run_blocking, run_some
from ckptio._failures import without_frames
from ckptio.errors import CheckpointNotFoundError, FormatError, StorageError
from ckptio.events import CleanupFailed, LeftoversRemoved
from ckptio.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES
from ckptio.format.pointer import decode_pointer
from ckptio.format.summary import decode_summary
from ckptio.storage.attempt_lock import Attempts, time_there
from ckptio.storage.blocks import storage_error
from ckptio.storage.directory_listing import find, list_entries, look
from ckptio.storage.file_names import (
    NEW_MANIFEST_PREFIX,
    REPLACED_SUFFIX,
    TOMB,
    tomb_name,
)
from ckptio.storage.files import PosixFiles, absolute, read_regular
from ckptio.storage.leftovers import find_leftovers, is_committed, newest_s, notes_of, read_summary
from ckptio.storage.removal import require_save
from ckptio.storage.resolve import local_path, remote_url
from ckptio.storage.tombs import forget_mistakes, is_to_be_put_back, put_back, tombs_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.storage.resolve import PathLike
    from ckptio.storage.root_interface import Found, Root
    from ckptio.storage.stores import Stores

T = TypeVar("T")

_STAYS = "another save was committed there just now; it stays"

_GONE = (FileNotFoundError, NotADirectoryError)
#: How often a manifest is looked for that a commit points to; others may commit meanwhile.
_MAX_FOLLOWING = 3
#: How many threads read manifests at a time; an engine has four for all such work, and a save
#: that begins meanwhile finds one free.
_MAX_READS = 3
#: How many manifests a thread reads in one call: what it takes to get there is more than a read.
_NUM_A_CALL = 16


def resolve_root(
    path: PathLike,
    config: CheckpointConfig,
    executor: Executor,
    emit: Callable[[Event], None],
    stores: Stores,
) -> Root:
    """Find the root for a path or URL. Looks at nothing but links, as `resolve_storage`.

    Args:
        path: A path, an `os.PathLike`, a `file://` URL, or one that fsspec knows.
        config: Durability, and limits of requests.
        executor: Threads for calls that block.
        emit: Takes events.
        stores: Object stores, on the loop on which the root is used.

    Raises:
        ConfigError: `path` is none, or a URL that nobody knows.
    """
    url = remote_url(path)
    if url is None:
        return LocalRoot(local_path(path), config, executor, emit)
    from ckptio.storage.object_root import ObjectRoot  # noqa: PLC0415  # where there is one

    store, base = stores.below(url)
    return ObjectRoot(url, store, base, config, executor, emit)


class LocalRoot:
    """A directory of checkpoints on a local (or mounted) file system.

    Args:
        path: The directory; need not exist.
        config: Durability.
        executor: Threads for calls that block.
        emit: Takes events: what could not be removed, and what was swept.
        files: Operations to use; the real ones if not given.
    """

    def __init__(
        self,
        path: str,
        config: CheckpointConfig,
        executor: Executor,
        emit: Callable[[Event], None],
        files: PosixFiles | None = None,
    ) -> None:
        self._path = absolute(path)
        self._config = config
        self._executor = executor
        self._emit = emit
        self._files = files or PosixFiles()

    @property
    def path(self) -> str:
        """The absolute directory."""
        return self._path

    def join(self, name: str) -> str:
        """Give the directory of a checkpoint."""
        return f"{self._path}/{name}"

    async def find(
        self,
        accepts: Callable[[str], bool] | None = None,
        unseen: Callable[[str, StorageError], None] | None = None,
        *,
        aside: bool = False,
    ) -> list[Found]:
        """Find what is there; see `Root`."""
        del aside  # it is one call on a thread
        return await run_blocking(self._executor, find, self._path, accepts, unseen)

    async def names(self, accepts: Callable[[str], bool] | None = None) -> list[str]:
        """List names, of files and links, too; see `Root`."""
        entries = await run_blocking(self._executor, list_entries, self._path, accepts)
        return [entry.name for entry in entries]

    async def look(
        self, names: Sequence[str], accepts: Callable[[str], bool] | None = None
    ) -> list[Found]:
        """Look at manifests; see `Root`."""
        return await run_blocking(self._executor, look, self._path, names, accepts)

    async def read_manifest(self, name: str) -> bytes:
        """Read a manifest; see `Root`."""
        return (await run_blocking(self._executor, self._read, self.join(name)))[1]

    async def read_manifests(
        self, names: Sequence[str], decode: Callable[[str, bytes], T], *, aside: bool = False
    ) -> list[T | FormatError | StorageError]:
        """Read manifests, several in each call of a thread; see `Root`."""
        del aside  # few threads are taken, and each for a moment

        async def read(some: Sequence[str]) -> list[T | FormatError | StorageError]:
            return await run_blocking(self._executor, self._read_some, some, decode)

        some = [names[i : i + _NUM_A_CALL] for i in range(0, len(names), _NUM_A_CALL)]
        return list(chain.from_iterable(await run_some(read, some, _MAX_READS, "read manifests")))

    def _read_some(
        self, names: Sequence[str], decode: Callable[[str, bytes], T]
    ) -> list[T | FormatError | StorageError]:
        answers: list[T | FormatError | StorageError] = []
        for name in names:
            try:
                answers.append(decode(name, self._read(self.join(name))[1]))
            except (FormatError, StorageError) as error:
                answers.append(without_frames(error))  # its traceback has this: no reference cycle
        return answers

    def _read(self, directory: str) -> tuple[bytes, bytes]:
        """Give what stands in the manifest's place, and the manifest, which may be elsewhere."""
        for _ in range(_MAX_FOLLOWING):
            commit = self._read_file(directory, MANIFEST_NAME)
            pointer = decode_pointer(commit)
            if pointer is None:
                return commit, commit
            with contextlib.suppress(CheckpointNotFoundError):  # replaced just then, or not whole
                manifest = self._read_file(directory, pointer.pointer)
                pointer.check(manifest)
                return commit, manifest
        raise FormatError(f"{directory!r}: the manifest points to what is not there")

    def _read_file(self, directory: str, name: str) -> bytes:
        """Read a manifest, or what is in its place.

        What is no file, or too large, stays so, as damage does: it is no reason to come again.
        """
        path = f"{directory}/{name}"
        try:
            return read_regular(self._files, path, MAX_MANIFEST_NBYTES)
        except _GONE:
            raise CheckpointNotFoundError(directory) from None
        except OSError as error:
            with contextlib.suppress(OSError):
                status = os.stat(path, follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST_NBYTES:
                    raise FormatError(f"{path!r} is no manifest: {error.strerror}") from None
            raise storage_error(error, path, "cannot read the manifest") from error

    async def remove(self, name: str, save_id: str | None = None) -> int:
        """Remove a checkpoint; see `Root`."""
        return await run_blocking(self._executor, self._remove, self.join(name), save_id)

    def _remove(self, directory: str, save_id: str | None) -> int:
        commit, manifest = self._read(directory)
        summary = decode_summary(manifest)
        require_save(directory, summary, save_id)
        save_id = summary.save_id
        tomb = tomb_name(save_id)
        try:
            with self._attempts(directory).held(save_id) as is_held:
                forget_mistakes(self._files, directory, save_id, commit)
                self._take_back(directory, tomb, commit)
                self._bury(directory, tomb)
                if is_held:  # what a save left that was killed right after its commit
                    new = NEW_MANIFEST_PREFIX + save_id
                    for name in (new, new + REPLACED_SUFFIX):
                        if os.path.lexists(f"{directory}/{name}"):
                            self._unlink(directory, name)
        except _GONE:
            raise CheckpointNotFoundError(directory) from None
        except OSError as error:
            is_gone = not os.path.lexists(f"{directory}/{MANIFEST_NAME}")
            if error.errno == errno.EBUSY and is_gone:  # somebody else was faster
                raise CheckpointNotFoundError(directory) from None
            raise storage_error(error, directory, "cannot remove the checkpoint") from error
        self._remove_dir(directory)
        return summary.nbytes

    def _take_back(self, directory: str, tomb: str, data: bytes) -> None:
        """Make a checkpoint none, in one step; undo that if it is another one by now."""
        if os.path.islink(directory):  # its directory could not be removed like the others
            raise OSError(errno.ELOOP, "it is a link; remove it, and what it points to, by hand")
        manifest = f"{directory}/{MANIFEST_NAME}"
        self._require_same(manifest, data)  # before, too: whoever is killed now has to put it back
        self._files.replace(manifest, f"{directory}/{tomb}")
        try:
            self._require_same(f"{directory}/{tomb}", data)
            if self._config.durability == "full":
                self._files.fsync_dir(directory)
        except FileNotFoundError:
            if os.path.lexists(manifest):  # a sweep has put back what was taken
                raise OSError(errno.ESTALE, _STAYS) from None
            raise
        except OSError:
            put_back(self._files, directory, tomb)
            raise

    def _require_same(self, manifest: str, data: bytes) -> None:
        if read_regular(self._files, manifest, MAX_MANIFEST_NBYTES) != data:
            raise OSError(errno.ESTALE, _STAYS)

    def _bury(self, directory: str, tomb: str) -> None:
        """Remove the files of a checkpoint that was taken back, and what lists them.

        What was taken by mistake is put back; see `storage.tombs`.
        """
        try:
            summary, pointed = read_summary(self._files, f"{directory}/{tomb}")
            is_mistake = is_to_be_put_back(directory, tomb, summary)
            # of a manifest whose files are gone, or going; or of a copy that was made again
            is_stale = summary.save_id not in tomb or is_committed(
                self._files, directory, summary.save_id
            )
        except FileNotFoundError:
            # somebody else was faster, or is at it; what it points to goes just before it does
            self._unlink(directory, tomb)
            return
        except (OSError, FormatError) as error:
            failure = error if isinstance(error, OSError) else OSError(errno.EBADMSG, str(error))
            self._cannot_remove(directory, tomb, failure)
            return
        if is_mistake:
            put_back(self._files, directory, tomb)
            return
        if is_stale:
            self._unlink(directory, tomb)
            return
        names = [file.name for file in summary.files if summary.save_id in file.name]
        names += notes_of(directory, summary.save_id)
        if not [name for name in names if not self._unlink(directory, name)]:
            for name in (*pointed, tomb):  # last: what it lists is not forgotten
                self._unlink(directory, name)

    def _bury_found(self, directory: str, tomb: str) -> None:
        """Go on with a removal that was cut off; if it was, or nobody makes a copy of the same."""
        match = TOMB.fullmatch(tomb)
        assert match is not None  # noqa: S101  # `tombs_in` gave it
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._attempts(directory).held(match[1]))
            except OSError as error:
                if error.errno != errno.EBUSY:
                    self._cannot_remove(directory, tomb, error)
                return
            self._bury(directory, tomb)

    def _attempts(self, directory: str, *, may_guess: bool = True) -> Attempts:
        """Give the locks there; see `time_there`."""

        def stays(path: str, error: OSError) -> None:
            self._cannot_remove(directory, os.path.basename(path), error)

        files, mode = self._files, self._config.file_mode
        now_s = functools.partial(time_there, files, directory, mode, may_guess=may_guess)
        return Attempts(files, directory, mode, stays, now_s)

    async def sweep(self, name: str, quiet_s: float) -> None:
        """Remove what a dead save left; see `Root`."""
        directory = self.join(name)
        try:
            await run_blocking(self._executor, self._sweep, directory, quiet_s)
        except _GONE:
            return
        except OSError as error:
            raise storage_error(error, directory, "cannot sweep") from error

    def _sweep(self, directory: str, quiet_s: float) -> None:
        names = sorted(os.listdir(directory))
        if MANIFEST_NAME in names or os.path.islink(directory):
            return
        written_s = max(os.stat(directory).st_mtime, newest_s(directory, names))
        is_quiet = written_s + quiet_s < time.time()
        tombs = tombs_in(directory)
        for tomb in tombs:
            self._bury_found(directory, tomb)
            if os.path.lexists(f"{directory}/{MANIFEST_NAME}"):
                return
        if is_quiet:
            attempts = self._attempts(directory, may_guess=quiet_s > 0)

            def find(held: Collection[str]) -> list[str]:
                return find_leftovers(self._files, directory, "", attempts.clock, held)

            attempts.clear(find, functools.partial(self._remove_left, directory))
        if is_quiet or tombs:
            self._remove_dir(directory)

    def _remove_left(self, directory: str, names: Sequence[str]) -> bool:
        removed = tuple(name for name in names if self._unlink(directory, name))
        if removed:
            self._emit(LeftoversRemoved(path=directory, files=removed))
        return bool(removed)

    def _unlink(self, directory: str, name: str) -> bool:
        """Remove a file; an event, not an error, if it stays."""
        try:
            self._files.unlink(f"{directory}/{name}")
        except FileNotFoundError:
            return True
        except OSError as error:
            self._cannot_remove(directory, name, error)
            return False
        return True

    def _remove_dir(self, directory: str) -> None:
        """Remove a directory in which nothing is left; other people's files stay, and it."""
        try:
            self._files.rmdir(directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                self._cannot_remove(directory, "", error)

    def _cannot_remove(self, directory: str, name: str, error: OSError) -> None:
        self._emit(CleanupFailed(path=directory, file=name, error=error))
