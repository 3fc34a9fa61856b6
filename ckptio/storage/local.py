"""A checkpoint in a local directory: reading it, and where a save of it begins.

`storage.attempt` has what a save leaves there, and in which order.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import mmap
import os
from typing import TYPE_CHECKING

import aiofiles

from ckptio._aio import run_blocking, shielded
from ckptio._looks import run_or_give_up
from ckptio.errors import CheckpointChangedError, CheckpointNotFoundError, FormatError, StorageError
from ckptio.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES
from ckptio.format.pointer import decode_pointer
from ckptio.storage import linux
from ckptio.storage.anew import KEPT_S, found_anew, look_anew, may_be_outdated, open_anew
from ckptio.storage.attempt import LocalAttempt
from ckptio.storage.blocks import BlockReader, storage_error
from ckptio.storage.file_names import NOTE_PREFIX
from ckptio.storage.files import NO_FILE, PosixFiles, absolute, follow_pointer, read_regular
from ckptio.storage.hints import hint_about
from ckptio.storage.notes import LocalNote, read_note, take_note, taken
from ckptio.storage.resumed import ResumedAttempt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.format.manifest import Manifest
    from ckptio.storage.streams import Open

#: How often a manifest is looked for that a commit points to, or a link is followed; others may
#: commit meanwhile, or replace it.
_MAX_FOLLOWING = 3
#: How long a place is waited for that is only looked for, in seconds.
_LOOK_S = 5.0


class LocalStorage:
    """The place of one checkpoint on a local (or mounted) file system.

    Args:
        path: Its directory; need not exist before a save.
        config: Durability, modes, direct I/O.
        executor: Threads for calls that block.
        emit: Takes events.
        files: Operations to use; the real ones if not given.
    """

    is_outlived = True  # threads are

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
        self._located = ""

    @property
    def path(self) -> str:
        """The absolute directory."""
        return self._path

    @property
    def identity(self) -> str:
        """The directory with links followed; blocks unless it was located."""
        return self._located or _followed(self._path)

    async def identify(self) -> str:
        """Follow links on a thread of its own: those of the engine are for what answers."""
        if self._located:
            return self._located
        follow = functools.partial(_followed, self._path)
        try:
            return await run_or_give_up(follow, None, "ckptio-locate", self._path)
        except TimeoutError:  # no thread begins
            return await run_blocking(self._executor, follow)

    async def identify_now(self) -> str | None:
        """Follow links on a thread that is given up if need be; see `interface.Storage`."""
        with contextlib.suppress(TimeoutError):
            return await run_or_give_up(self._look, _LOOK_S, "ckptio-look", self._path)
        return None

    async def locate(self, *, gives_up: bool = True) -> bool:
        """Find `identity` out on a thread of its own; see `interface.Storage`."""
        found = await (self.identify_now() if gives_up else self.identify())
        self._located = self._located or found or self._path
        return found is not None

    def _look(self) -> str:
        """Have a server say something: what is kept of it here may be shown while it hangs."""
        with contextlib.suppress(OSError):
            os.close(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK))
        return _followed(self._path)

    @property
    def gap_nbytes(self) -> int:
        """What is not wanted is left out: a seek costs nothing here."""
        return 0

    async def version(self) -> tuple[int, ...]:
        """Look at the manifest, opened: a stat may be what a client of NFS had kept of it."""
        return await run_blocking(self._executor, self._version)

    def _version(self) -> tuple[int, ...]:
        try:
            return _version_of(found_anew(self._status, self._manifest))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointNotFoundError(self._path) from None
        except OSError as error:
            raise storage_error(error, self._manifest, "cannot look at the manifest") from error

    def _status(self, path: str) -> os.stat_result:
        fd = self._open_file(path)
        try:
            return os.fstat(fd)
        finally:
            self._files.close(fd)

    async def read_manifest(self) -> tuple[tuple[int, ...], bytes]:
        """Read the manifest, and the stat of the very file that was read."""
        missing = ""
        for tries_left in reversed(range(_MAX_FOLLOWING)):
            try:
                version, commit = await shielded(self._read_commit())
            except StorageError as error:
                if error.errno != errno.ESTALE or not tries_left:
                    raise
                continue  # a server says so of what was replaced as it was read
            try:
                pointer = decode_pointer(commit)
                if pointer is None:
                    return version, commit
                missing = pointer.pointer
                manifest, _ = await run_blocking(
                    self._executor, follow_pointer, self._files, self._path, commit
                )
            except FileNotFoundError:
                continue  # it was replaced just then, or it is not whole
            except OSError as error:
                raise storage_error(error, self._path, "cannot read the manifest") from error
            except FormatError as error:
                raise type(error)(f"{self._path!r}: {error}") from None
            return version, manifest
        raise FormatError(f"{self._path!r}: the manifest points to {missing!r}, which is not there")

    async def peek_manifest(self) -> bytes:
        """Read the manifest on a thread of its own; see `interface.Storage`."""
        try:
            return await run_or_give_up(self._peek, _LOOK_S, "ckptio-peek", self._path)
        except TimeoutError as error:
            doing = "cannot read the manifest: nothing answers"
            raise StorageError(doing, path=self._path, code=errno.ETIMEDOUT) from error

    def _peek(self) -> bytes:
        for _ in range(_MAX_FOLLOWING):
            try:
                commit = read_regular(self._files, self._manifest, MAX_MANIFEST_NBYTES)
            except (FileNotFoundError, NotADirectoryError):
                raise CheckpointNotFoundError(self._path) from None
            except OSError as error:
                if error.errno == errno.EFBIG:
                    raise FormatError(f"{self._manifest!r}: {error.strerror}") from None
                raise storage_error(error, self._manifest, "cannot read the manifest") from error
            try:
                return follow_pointer(self._files, self._path, commit)[0]
            except FileNotFoundError:
                continue  # it was replaced just then, or it is not whole
            except OSError as error:
                raise storage_error(error, self._path, "cannot read the manifest") from error
            except FormatError as error:
                raise type(error)(f"{self._path!r}: {error}") from None
        raise FormatError(f"{self._path!r}: the manifest points to what is not there")

    async def _read_commit(self) -> tuple[tuple[int, ...], bytes]:
        try:
            async with aiofiles.open(
                self._manifest,
                "rb",
                opener=lambda path, _: found_anew(self._open_file, path),
                executor=self._executor,
            ) as file:
                status = os.fstat(file.fileno())
                if status.st_size > MAX_MANIFEST_NBYTES:
                    raise FormatError(
                        f"{self._manifest!r} has {status.st_size} bytes and a manifest at most"
                        f" {MAX_MANIFEST_NBYTES}"
                    )
                return _version_of(status), await file.read(status.st_size)
        except (FileNotFoundError, NotADirectoryError):
            hint = await run_blocking(self._executor, hint_about, self._path)
            raise CheckpointNotFoundError(self._path, hint) from None
        except OSError as error:
            raise storage_error(error, self._manifest, "cannot read the manifest") from error

    async def find_below(self) -> str:
        """Nothing: `read_manifest` says it; see `interface.Storage`."""
        return ""

    def remember(self, manifest: Manifest) -> None:
        """Nothing: there is no need to know; see `interface.Storage`."""

    async def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Open data files, and ask their sizes; see `interface.Storage`.

        What is not there may have gone with a checkpoint that another host has replaced. The client
        is given time to hear of that, before the caller looks at the manifest again.
        """
        sizes = await run_blocking(self._executor, self._sizes, names)
        if None in sizes and await run_blocking(self._executor, may_be_outdated, self._path):
            await asyncio.sleep(KEPT_S)
            sizes = await run_blocking(self._executor, self._sizes, names)
        return sizes

    def _sizes(self, names: Sequence[str]) -> list[int | None]:
        return [self._size(name) for name in names]

    def _size(self, name: str) -> int | None:
        path = self._join(name)
        try:
            return found_anew(self._status, path).st_size
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE, *NO_FILE):
                return None
            raise storage_error(error, path, "cannot look at a data file") from error

    async def open(self, name: str, nbytes: int) -> BlockReader:
        """Open a data file; see `interface.Storage`."""
        opened: list[BlockReader] = []
        try:
            await run_blocking(self._executor, lambda: opened.append(self._open(name, nbytes)))
        except BaseException:
            for reader in opened:  # cancelled while the thread opened it: nobody else has it
                reader.close()
            raise
        return opened[0]

    async def opener(self) -> Open:
        """Give what opens a data file on the calling thread; see `interface.Storage`."""
        return self._open

    def _open(self, name: str, nbytes: int) -> BlockReader:
        path = self._join(name)
        direct = self._config.direct_io == "auto"
        try:
            return BlockReader(self._files, path, name=name, nbytes=nbytes, direct=direct)
        except FileNotFoundError:
            raise CheckpointChangedError(self._path) from None
        except OSError as error:
            raise storage_error(error, path, "cannot open a data file") from error

    async def is_cached(self, ranges: Sequence[tuple[str, int, int]]) -> bool:
        """Look into the page cache; see `interface.Storage`. False if nobody tells."""
        return await run_blocking(self._executor, self._is_cached, ranges)

    def _is_cached(self, ranges: Sequence[tuple[str, int, int]]) -> bool:
        nbytes = cached_nbytes = 0
        for name, start, length in ranges:
            with contextlib.suppress(OSError):  # whoever reads it says what is wrong
                fd = self._files.open(self._join(name), direct=False)
                try:
                    pages = linux.num_cached_pages(fd, start, length)
                finally:
                    self._files.close(fd)
                nbytes += length
                cached_nbytes += (pages or 0) * mmap.PAGESIZE
        return 2 * cached_nbytes > nbytes

    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> LocalAttempt:
        """Begin a save; see `interface.Storage`."""
        kind = ResumedAttempt if resumes else LocalAttempt
        attempt = self._attempt(save_id, overwrite=overwrite, kind=kind)
        return await self._ready(attempt, attempt.prepare)

    async def join(self, save_id: str) -> LocalAttempt:
        """Take part in a save of many ranks; see `interface.Storage`."""
        attempt = self._attempt(save_id, overwrite=True)
        return await self._ready(attempt, attempt.enter)

    def _attempt(
        self, save_id: str, *, overwrite: bool, kind: type[LocalAttempt] = LocalAttempt
    ) -> LocalAttempt:
        return kind(
            self._path,
            save_id,
            overwrite=overwrite,
            files=self._files,
            config=self._config,
            executor=self._executor,
            emit=self._emit,
        )

    async def _ready(self, attempt: LocalAttempt, prepare: Callable[[], None]) -> LocalAttempt:
        try:
            await run_blocking(self._executor, prepare)
        except BaseException:
            has_more = isinstance(attempt, ResumedAttempt) and attempt.has_taken_over
            await (attempt.leave() if has_more else attempt.abort())
            raise
        return attempt

    async def take_note(self, save_id: str) -> LocalNote | None:
        """Take a note; see `interface.Storage`."""
        executor = self._executor
        return await taken(
            executor, functools.partial(take_note, self._files, self._path, save_id, executor)
        )

    async def read_note(self, save_id: str) -> bytes | None:
        """Read a note; see `interface.Storage`."""
        return await run_blocking(
            self._executor, read_note, self._files, self._join(NOTE_PREFIX + save_id)
        )

    async def has_note(self, save_id: str | None) -> bool:
        """Look for a note; see `interface.Storage`."""
        return await run_blocking(self._executor, self._has_note, save_id)

    def _has_note(self, save_id: str | None) -> bool:
        path = self._path if save_id is None else self._join(NOTE_PREFIX + save_id)
        try:
            if save_id is None:
                return any(name.startswith(NOTE_PREFIX) for name in os.listdir(path))
            os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise storage_error(error, path, "cannot look for a note") from error
        return True

    @property
    def _manifest(self) -> str:
        return self._join(MANIFEST_NAME)

    def _open_file(self, path: str) -> int:
        if path == self._manifest:  # other files are never replaced
            return open_anew(self._files, path)
        return self._files.open(path, direct=False)

    def _join(self, name: str) -> str:
        return f"{self._path}/{name}"


def _version_of(status: os.stat_result) -> tuple[int, ...]:
    """What tells one manifest from another: its inode, size and times."""
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _followed(path: str) -> str:
    """Follow links. Never raises: where one cannot be read, whoever opens what is there says so.

    Before 3.13, Python raises where somebody replaces a link just as it is followed.
    """
    for _ in range(_MAX_FOLLOWING):
        with contextlib.suppress(OSError):
            if os.path.realpath(path) == path:
                return path
            for end in [i for i, char in enumerate(path) if char == "/" and i] + [len(path)]:
                look_anew(path[:end])  # another host may have moved a link on the way
            return os.path.realpath(path)
    return path
