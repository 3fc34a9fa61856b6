"""The files of a foreign checkpoint: plain names inside one directory, and ranges of them.

Names come from files that anybody may have written, so one with a separator, or that is no
file name at all, is refused. Links are followed: the caches of model hubs are made of them.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
import re
import stat
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckptio.errors import CheckpointChangedError, FormatError
from ckptio.storage.blocks import BlockReader, storage_error
from ckptio.storage.files import PosixFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from ckptio.storage.streams import AwaitedSource, Source

T = TypeVar("T")
V = TypeVar("V")

_RANGE = re.compile(r"(.+)@(\d{1,17})\+(\d{1,17})\Z", re.DOTALL)
_MAX_NAME_NBYTES = 255
#: How a file begins that stands for another one.
_POINTER = b"version https://git-lfs.github.com/spec/"
#: Entries of a directory that are looked at.
_MAX_LOOKED_AT = 1000


class _LinkedFiles(PosixFiles):
    """Opens what links lead to.

    The links of each path are followed once, at the first call for it: following them looks at
    each part of the path, and took half the time of opening one of thousands of chunks. If a link
    leads elsewhere later, the first file goes on being read, or `LocalFolder` raises: what is
    opened has to be the file that was looked at.
    """

    def __init__(self) -> None:
        self._ends: dict[str, str] = {}

    def open(self, path: str, *, direct: bool, writable: bool = False) -> int:
        """Open a regular file for reading."""
        end = self._ends.get(path)
        if end is None:
            end = self._ends[path] = os.path.realpath(path)
        return super().open(end, direct=direct, writable=writable)


class Status(NamedTuple):
    """A file, as a look at it shows it.

    Attributes:
        nbytes: Its size.
        modified_s: When it was written, in seconds since 1970.
        version: Tells what is in it from what was in it before.
    """

    nbytes: int
    modified_s: float
    version: tuple[Hashable, ...]


class Folder(abc.ABC):
    """A directory with the files of one checkpoint. Everything here blocks.

    Args:
        root: The directory, or its URL.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def join(self, name: str) -> str:
        """Give the path of a file.

        Raises:
            FormatError: `name` is no name of a file in this directory.
        """
        if (
            name in (".", "..")
            or "/" in name
            or "\0" in name
            or not 0 < _encoded_nbytes(name) <= _MAX_NAME_NBYTES
        ):
            raise FormatError(f"{self.root!r} refers to a file {name!r}, which is not inside of it")
        return f"{self.root}{name}" if self.root.endswith("/") else f"{self.root}/{name}"

    @abc.abstractmethod
    def status(self, name: str) -> Status | None:
        """Look at a file; `None` if there is no regular file of this name.

        Raises:
            CheckpointChangedError: It is another one than at the first look.
        """

    @abc.abstractmethod
    def read(self, name: str, start: int, stop: int) -> bytes:
        """Read a range of a file; shorter at its end.

        Raises:
            CheckpointChangedError: It is not there any more.
            StorageError: It cannot be read.
        """

    def read_within(self, extent_nbytes: int, name: str, start: int, stop: int) -> bytes:
        """Read a few bytes of an item (a header, a directory), as `read` does.

        Args:
            extent_nbytes: Size of the item. Of a small one, a whole block around these bytes may
                be read and kept for what lies beside it; of a large one that would be its own data.
            name: The file.
            start: First byte.
            stop: Byte behind the last.
        """
        del extent_nbytes
        return self.read(name, start, stop)

    @abc.abstractmethod
    def open(self, name: str, nbytes: int, start: int = 0) -> Source | AwaitedSource:
        """Open a file, or a part of it, for reading.

        Args:
            name: The file.
            nbytes: Bytes of it, or of the part.
            start: Where the part begins.

        Raises:
            CheckpointChangedError: It is not there any more.
        """

    def each(self, function: Callable[[V], T], values: Sequence[V]) -> list[T]:
        """Call `function`, which reads here, with each value; at once where that helps."""
        return [function(value) for value in values]

    def version(self, name: str) -> tuple[Hashable, ...]:
        """Tell what is in a file from what was in it before."""
        status = self.status(name)
        return (name, None) if status is None else (name, *status.version)

    def seen(self) -> dict[str, str]:
        """Say of files that were looked at what tells them from others, on all hosts alike.

        Nothing by default: a path may lead elsewhere on each host, and so may a device's number.
        """
        return {}

    def read_small(self, name: str, limit: int, what: str) -> bytes:
        """Read a whole file that may have `limit` bytes.

        Raises:
            FormatError: It is larger.
        """
        data = self.read(name, 0, limit + 1)
        if len(data) > limit:
            raise FormatError(f"{self.join(name)!r} has more than {limit} bytes and is {what}")
        return data

    def matching(self, pattern: re.Pattern[str]) -> list[str]:
        """Give names of files here, as far as looking for them costs little: none by default."""
        del pattern
        return []

    def require_no_pointer(self, name: str) -> None:
        """Refuse a file that git-lfs put in the place of another.

        Raises:
            FormatError: It is one.
        """
        if self.read(name, 0, len(_POINTER)) == _POINTER:
            raise FormatError(
                f"{self.join(name)!r} is a pointer of git-lfs to a file that was not fetched; run"
                " 'git lfs pull' there"
            )

    def part_nbytes(self, name: str, start: int, nbytes: int) -> int | None:
        """Say how much of a range a file has; `None` if there is no such file."""
        status = self.status(name)
        return None if status is None else max(0, min(nbytes, status.nbytes - start))


class LocalFolder(Folder):
    """A directory of a local or mounted file system; see `Folder`.

    A file is read as it was when it was looked at first: one that was replaced or written to
    since raises, so that no load mixes two.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._files = _LinkedFiles()
        self._seen: dict[str, tuple[Hashable, ...]] = {}

    def status(self, name: str) -> Status | None:
        """Stat a file; see `Folder`."""
        path = self.join(name)
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise storage_error(error, path, "cannot stat a file") from error
        if not stat.S_ISREG(status.st_mode):
            return None
        self._require_same(name, status)
        return Status(status.st_size, status.st_mtime, _version_of(status))

    def matching(self, pattern: re.Pattern[str]) -> list[str]:
        """List the directory, or the first part of a large one; see `Folder`."""
        found: list[str] = []
        with contextlib.suppress(OSError), os.scandir(self.root) as entries:
            for entry in itertools.islice(entries, _MAX_LOOKED_AT):
                with contextlib.suppress(OSError):  # of a link in a loop: it is no file
                    if pattern.fullmatch(entry.name) and entry.is_file():
                        found.append(entry.name)
        return sorted(found)

    def _require_same(self, name: str, status: os.stat_result) -> None:
        """Check that a file is the one that was looked at first.

        Raises:
            CheckpointChangedError: It is not.
        """
        if self._seen.setdefault(name, version := _version_of(status)) != version:
            raise CheckpointChangedError(self.root)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Read a range of a file; see `Folder`."""
        path = self.join(name)
        try:
            fd = self._files.open(path, direct=False)
        except FileNotFoundError:
            raise CheckpointChangedError(self.root) from None
        except OSError as error:
            raise storage_error(error, path, "cannot open a file") from error
        try:
            data, status = _pread(fd, start, stop - start), os.fstat(fd)
        except OSError as error:
            raise storage_error(error, path, f"cannot read at byte {start}") from error
        finally:
            os.close(fd)
        self._require_same(name, status)
        return data

    def open(self, name: str, nbytes: int, start: int = 0) -> Source:
        """Open a file, or a part of it; see `Folder`."""
        path = self.join(name)
        try:
            reader = BlockReader(
                self._files,
                path,
                name=name,
                nbytes=start + nbytes,
                direct=start == 0,  # a part that begins anywhere cannot be read past the page cache
                start=start,
            )
        except FileNotFoundError:
            raise CheckpointChangedError(self.root) from None
        except OSError as error:
            raise storage_error(error, path, "cannot open a file") from error
        try:
            self._require_same(name, reader.status())
        except BaseException:
            reader.close()
            raise
        return reader if start == 0 else _Part(reader, start)


def _version_of(status: os.stat_result) -> tuple[Hashable, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class _Part:
    """A part of a file, as a source of its own."""

    def __init__(self, reader: BlockReader, start: int) -> None:
        self._reader = reader
        self._start = start
        self.is_cached = reader.is_cached

    def pread_into(self, offset: int, room: memoryview, nbytes: int) -> None:
        """Read a range; see `storage.streams.Source`."""
        self._reader.pread_into(self._start + offset, room, nbytes)

    def lend(self, offset: int, nbytes: int) -> AbstractContextManager[None]:
        """Lend nothing: programs write such files over in place, even while they load them."""
        del offset, nbytes
        return contextlib.nullcontext()

    def close(self) -> None:
        """Release the file."""
        self._reader.close()


class MemorySource:
    """Bytes in memory as a source.

    Args:
        data: The bytes.
    """

    is_cached = True

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def pread_into(self, offset: int, room: memoryview, nbytes: int) -> None:
        """Copy a range; see `storage.streams.Source`."""
        room[:nbytes] = self._data[offset : offset + nbytes]

    def lend(self, offset: int, nbytes: int) -> AbstractContextManager[None]:
        """Lend nothing: they are read where they lie."""
        del offset, nbytes
        return contextlib.nullcontext()

    def close(self) -> None:
        """Let the bytes go."""
        self._data = memoryview(b"")


def _encoded_nbytes(name: str) -> int:
    """Give the bytes of a name; -1 if no file has it."""
    try:
        return len(os.fsencode(name))
    except UnicodeEncodeError:
        return -1


def range_name(name: str, start: int, nbytes: int) -> str:
    """Name a range of a file as a file of its own."""
    return f"{name}@{start}+{nbytes}"


def split_range(name: str) -> tuple[str, int, int] | None:
    """Give file, start and bytes of a range; `None` if the name is a file's own."""
    found = _RANGE.match(name)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def place_of(name: str) -> tuple[str, int, int]:
    """Give file, start and bytes of what is a range; sorts names as they lie in the files."""
    found = split_range(name)
    assert found is not None  # noqa: S101  # made by `range_name`
    return found


class OverlapError(FormatError):
    """Two ranges lie over each other.

    Args:
        problem: What to say of it.
        file: The file that they are in.
        start: Where the second one begins.
    """

    def __init__(self, problem: str, file: str, start: int) -> None:
        super().__init__(problem)
        self.file = file
        self.start = start


def require_apart(names: Iterable[str]) -> None:
    """Refuse ranges that lie over each other: each would be loaded for itself.

    Args:
        names: As `range_name` makes them.

    Raises:
        OverlapError: Two do.
    """
    ends: dict[str, int] = {}
    for file, start, nbytes in sorted(map(place_of, set(names))):
        if start < ends.get(file, 0):
            raise OverlapError(
                f"two items lie over each other in {file!r}, at byte {start}", file, start
            )
        ends[file] = start + nbytes


def _pread(fd: int, start: int, nbytes: int) -> bytes:
    parts = []
    while nbytes > 0:
        part = os.pread(fd, min(nbytes, 1 << 26), start)
        if not part:
            break
        parts.append(part)
        start += len(part)
        nbytes -= len(part)
    return b"".join(parts)
