"""Files and the page cache: what has to be so before a clock starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptio.storage.linux import num_cached_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_READ_NBYTES = 8 << 20
#: Readahead and a reader's own look at a header may leave this share of a file behind.
_COLD_SHARE = 0.01
#: Times that files are read until they stay.
_MAX_READS = 4
_WARM_SHARE = 0.99


class CacheStateError(Exception):
    """The page cache cannot be brought into the state that a case asks for."""


def files_below(path: str) -> Iterator[str]:
    """Give all files of a directory and below, or the file itself."""
    if os.path.isfile(path):
        yield path
    for directory, _, names in os.walk(path):
        for name in names:
            yield os.path.join(directory, name)


def tree_nbytes(path: str) -> int:
    """Bytes of all files below a path."""
    return sum(os.path.getsize(file) for file in files_below(path))


def drop_cache(path: str) -> None:
    """Take the files below a path out of the page cache.

    Raises:
        CacheStateError: They are still there (a file system in memory, say).
    """
    for file in files_below(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    share = cached_share(path)
    if share is not None and share > _COLD_SHARE:
        raise CacheStateError(f"{share:.0%} of the files stay in the page cache")


def warm_cache(path: str) -> None:
    """Read the files below a path into the page cache.

    Raises:
        CacheStateError: They are not all there: memory is short.
    """
    room = bytearray(_READ_NBYTES)
    share: float | None = 0.0
    for _ in range(_MAX_READS):  # where memory is full, what was read just now goes first
        for file in files_below(path):
            with open(file, "rb", buffering=0) as stream:
                while stream.readinto(room):
                    pass
        share = cached_share(path)
        if share is None or share >= _WARM_SHARE:
            return
    raise CacheStateError(f"only {share:.0%} of the files stay in the page cache")


def recycle_pages(directory: str, nbytes: int) -> None:
    """Write as many bytes through the page cache to a file in a directory, and remove it.

    Pages that the next writer takes are then of those, whoever came before: free memory that
    nobody has used for a while may have to come from the host of a virtual machine first.
    """
    room = bytearray(_READ_NBYTES)
    path = os.path.join(directory, "recycled")
    try:
        with open(path, "wb", buffering=0) as stream:
            stream.writelines(
                memoryview(room)[: nbytes - start] for start in range(0, nbytes, len(room))
            )
    finally:
        os.unlink(path)


def cached_share(path: str) -> float | None:
    """Which share of the files below a path is in the page cache; `None` if unknown."""
    cached = pages = 0
    for file in files_below(path):
        nbytes = os.path.getsize(file)
        fd = os.open(file, os.O_RDONLY)
        try:
            count = num_cached_pages(fd, 0, nbytes) if nbytes else 0
        finally:
            os.close(fd)
        if count is None:
            return None
        cached += count
        pages += -(-nbytes // _PAGE_NBYTES)
    # a page or two per file (headers, small files) say nothing of the whole
    return cached / pages if pages else 0.0


def refuses_drop(directory: str) -> str:
    """Say why files in a directory cannot be dropped from the page cache; empty if they can."""
    path = os.path.join(directory, "drop-probe")
    try:
        with open(path, "wb") as file:
            file.write(bytes(1 << 20))
        drop_cache(path)
    except CacheStateError:
        return "files stay in the page cache here"
    finally:
        os.unlink(path)
    return ""


def refuses_direct(directory: str) -> str:
    """Say why direct I/O cannot be done in a directory; empty if it can."""
    path = os.path.join(directory, "direct-probe")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError as error:
        return f"direct I/O is refused here ({error.strerror})"
    finally:
        if os.path.exists(path):
            os.unlink(path)
    return ""
