"""A directory of checkpoints: what is in it, and how one of them goes.

    <root>/step-00000100/manifest.json           committed
    <root>/step-00000090/.manifest-<id>-old      being removed: no checkpoint any more
    <root>/step-00000080/data-<id>-...           no commit: being written, or its save died

Removal takes the commit back first, in one step that is synced as a commit is: the
manifest gets another name. Data files go next, and the renamed manifest, which lists them,
goes last. Whoever is killed in between leaves a checkpoint or none, never a part of one
that looks whole; and the next sweep knows what the rest is and removes it. A reader that
has begun ends with a typed error.

What has neither name is the business of `storage.leftovers`: a save that lives is left
alone, however long it takes; one that died goes after a while, so that somebody who wants
to know why it died finds it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckptio._aio import run_blocking
from ckptio.errors import CheckpointNotFoundError, FormatError
from ckptio.events import CleanupFailed, LeftoversRemoved
from ckptio.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES
from ckptio.format.summary import decode_summary
from ckptio.storage.blocks import storage_error
from ckptio.storage.files import PosixFiles, follow_pointer, read_regular
from ckptio.storage.leftovers import find_leftovers
from ckptio.storage.resolve import local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.storage.resolve import PathLike

_TOMB = re.compile(r"\.manifest-[0-9a-f]{32}-old")
_GONE = (FileNotFoundError, NotADirectoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A directory under a root.

    Attributes:
        name: Its name.
        version: Tells its manifests apart; `None` if it has none: nothing is committed.
    """

    name: str
    version: Hashable | None


class Root(Protocol):
    """A place with checkpoints side by side, each under a name."""

    @property
    def path(self) -> str:
        """What the user called it, made absolute; for messages."""
        ...

    def join(self, name: str) -> str:
        """Give the path of a checkpoint, as `Engine.save` takes it."""
        ...

    async def find(self) -> list[Found]:
        """Find what is there; nothing if there is no such place yet.

        Raises:
            StorageError: It cannot be listed.
        """
        ...

    async def read_manifest(self, name: str) -> bytes:
        """Read a manifest.

        Raises:
            CheckpointNotFoundError: There is none.
            StorageError: It cannot be read.
        """
        ...

    async def remove(self, name: str) -> None:
        """Remove a checkpoint: its manifest first, then what it is made of.

        What is left behind a failure is no checkpoint, and goes with a later `sweep`.

        Raises:
            CheckpointNotFoundError: There is none.
            FormatError: Its manifest cannot be read; nothing was removed.
            StorageError: It could not be taken back, or another save was committed there
                meanwhile; nothing was removed.
        """
        ...

    async def sweep(self, name: str, quiet_s: float) -> None:
        """Remove what a dead save, or a removal that was cut short, left under a name.

        Args:
            name: What to look at.
            quiet_s: How long nothing must have been written there, in seconds. What is
                known to be part of a removal goes at once.

        Raises:
            StorageError: It cannot be listed.
        """
        ...


def resolve_root(
    path: PathLike,
    config: CheckpointConfig,
    executor: Executor,
    emit: Callable[[Event], None],
) -> Root:
    """Find the root for a path or URL. Touches nothing.

    Raises:
        ConfigError: `path` is none.
    """
    return LocalRoot(local_path(path), config, executor, emit)


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
        self._path = os.path.abspath(path)
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

    async def find(self) -> list[Found]:
        """Find what is there; see `Root`."""
        return await run_blocking(self._executor, self._find)

    def _find(self) -> list[Found]:
        try:
            names = sorted(os.listdir(self._path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error(error, self._path, "cannot list the checkpoints") from error
        return [
            Found(name=name, version=self._version(name))
            for name in names
            if os.path.isdir(self.join(name))
        ]

    def _version(self, name: str) -> tuple[int, ...] | None:
        manifest = f"{self.join(name)}/{MANIFEST_NAME}"
        try:
            status = os.stat(manifest, follow_symlinks=False)
        except _GONE:
            return None
        except OSError as error:
            raise storage_error(error, manifest, "cannot stat the manifest") from error
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    async def read_manifest(self, name: str) -> bytes:
        """Read a manifest; see `Root`."""
        return await run_blocking(self._executor, self._read_manifest, self.join(name))

    def _read_manifest(self, directory: str) -> bytes:
        return self._followed(directory, self._read_commit(directory))

    def _followed(self, directory: str, commit: bytes) -> bytes:
        try:
            return follow_pointer(self._files, directory, commit)[0]
        except OSError as error:
            raise storage_error(error, directory, "cannot read the manifest") from error

    def _read_commit(self, directory: str) -> bytes:
        manifest = f"{directory}/{MANIFEST_NAME}"
        try:
            return read_regular(self._files, manifest, MAX_MANIFEST_NBYTES)
        except _GONE:
            raise CheckpointNotFoundError(directory) from None
        except OSError as error:
            raise storage_error(error, manifest, "cannot read the manifest") from error

    async def remove(self, name: str) -> None:
        """Remove a checkpoint; see `Root`."""
        await run_blocking(self._executor, self._remove, self.join(name))

    def _remove(self, directory: str) -> None:
        commit = self._read_commit(directory)
        tomb = f".manifest-{decode_summary(self._followed(directory, commit)).save_id}-old"
        try:
            self._take_back(directory, f"{directory}/{tomb}", commit)
        except _GONE:
            raise CheckpointNotFoundError(directory) from None
        except OSError as error:
            raise storage_error(error, directory, "cannot remove the checkpoint") from error
        self._bury(directory, tomb)
        self._remove_dir(directory)

    def _take_back(self, directory: str, tomb: str, data: bytes) -> None:
        """Make a checkpoint none, in one step; undo that if it is another one by now."""
        if os.path.islink(directory):  # its directory could not be removed like the others
            raise OSError(errno.ELOOP, "it is a link; remove it, and what it points to, by hand")
        manifest = f"{directory}/{MANIFEST_NAME}"
        self._files.replace(manifest, tomb)
        try:
            if read_regular(self._files, tomb, MAX_MANIFEST_NBYTES) != data:
                raise OSError(errno.ESTALE, "another save was committed there just now; it stays")  # noqa: TRY301  # put back like the others
            if self._config.durability == "full":
                self._files.fsync_dir(directory)
        except OSError:
            with contextlib.suppress(FileExistsError):  # there is a yet newer one
                self._files.publish(tomb, manifest)
            with contextlib.suppress(FileNotFoundError):  # it was moved, not linked
                self._files.unlink(tomb)
            raise

    def _bury(self, directory: str, tomb: str) -> None:
        """Remove the files of a checkpoint that was taken back, and what lists them."""
        try:
            commit = read_regular(self._files, f"{directory}/{tomb}", MAX_MANIFEST_NBYTES)
        except FileNotFoundError:
            return  # somebody else was faster
        except OSError as error:
            self._cannot_remove(directory, tomb, error)
            return
        try:
            data, pointed = follow_pointer(self._files, directory, commit)
            summary = decode_summary(data)
        except FileNotFoundError:  # it went just before the tomb would have
            self._unlink(directory, tomb)
            return
        except (OSError, FormatError) as error:
            failure = error if isinstance(error, OSError) else OSError(errno.EBADMSG, str(error))
            self._cannot_remove(directory, tomb, failure)
            return
        names = [file.name for file in summary.files if summary.save_id in file.name]
        if not [name for name in names if not self._unlink(directory, name)]:
            for name in (*pointed, tomb):  # last: what it lists is not forgotten
                self._unlink(directory, name)

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
        is_quiet = self._newest_s(directory, names) + quiet_s < time.time()
        tombs = [name for name in names if _TOMB.fullmatch(name)]
        for tomb in tombs:
            self._bury(directory, tomb)
        if is_quiet:
            dead = find_leftovers(self._files, directory, "")
            removed = tuple(name for name in dead if self._unlink(directory, name))
            if removed:
                self._emit(LeftoversRemoved(path=directory, files=removed))
        if is_quiet or tombs:
            self._remove_dir(directory)

    def _newest_s(self, directory: str, names: list[str]) -> float:
        """Say when something was last written in a directory."""
        times = [os.stat(directory).st_mtime]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                times.append(os.stat(f"{directory}/{name}", follow_symlinks=False).st_mtime)
        return max(times)

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
