"""Ranges of a file as they lie in the page cache, for as long as nobody can change them.

Out of the page cache a copy costs as much as the checksum and the copy to the target: who
sums and copies from a map has two passes over memory instead of three. But a map is shared.
Another process that truncates the file ends this one (SIGBUS), and what was verified may be
written over before it is copied. So a range is lent only under a read lease (fcntl(2),
`F_SETLEASE`): the system grants it where no process can write, and holds up whoever opens
the file for writing, or truncates it, until the lease is given back (who opens it with
`O_NONBLOCK` is told to try again). That takes as long as the ranges that are lent; none is
lent anew while somebody waits, and whoever was lent one asks block by block whether it still is.

Rejected: maps without a lease, as safetensors and `torch.load(mmap=True)` have them, since a
file that is copied over in place would end a training run; handlers of SIGBUS, which belong
to the process and not to a library.

What is left. The system takes the lease away after 45 s (/proc/sys/fs/lease-break-time): from
a process that is stopped for so long, or whose own native code waits for the file to be opened
for writing and holds the GIL meanwhile. What has landed of the block at hand is read again
then; but if the file was truncated, that block's pages are gone, which ends the process. And a
page that the system takes back within a range's milliseconds and then cannot read again ends
it, as it does with a page of the program itself.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import TYPE_CHECKING

from ckptio.storage import linux

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptio.storage.files import PosixFiles
    from ckptio.storage.streams import Lent


#: What torch gives its own tensors, which may be copied from here as tensors.
_ALIGNMENT_NBYTES = 64


class _Pages:
    """A range within a map; an implementation of `streams.Lent`.

    Args:
        pages: The map.
        start: Where the range starts in it.
        is_held: Whether it is still lent.
    """

    __slots__ = ("_map", "address", "is_held", "pinned", "view")

    def __init__(self, pages: mmap.mmap, start: int, is_held: Callable[[], bool]) -> None:
        self._map = pages
        self.pinned = False
        self.is_held = is_held
        self.view = memoryview(pages)[start:]
        self.address = linux.address_in(pages, start)

    def close(self) -> None:
        """Undo the map; an error that somebody keeps may still refer to it, as with slabs."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


class Lender:
    """Lends ranges of an open file. Thread-safe.

    Args:
        files: Operations to use.
        fd: The file, open for reading only; stays the caller's.
    """

    def __init__(self, files: PosixFiles, fd: int) -> None:
        self._files = files
        self._fd = fd
        self._lock = threading.Lock()
        self._num_lent = 0
        self._is_refused = False

    @contextlib.contextmanager
    def lend(self, offset: int, nbytes: int) -> Iterator[Lent | None]:
        """Lend a range; see `streams.Source`."""
        pages = self._map(offset, nbytes) if self._may_lend(offset, nbytes) else None
        try:
            yield pages
        finally:
            if pages is not None:
                pages.close()
                self._give_back()

    def _may_lend(self, offset: int, nbytes: int) -> bool:
        """Take the lease, or a share of it, if the whole range is in the page cache."""
        if self._is_refused or offset % _ALIGNMENT_NBYTES:
            return False
        num_pages = linux.num_cached_pages(self._fd, offset, nbytes)
        if num_pages is None or num_pages * mmap.PAGESIZE < nbytes:
            return False
        with self._lock:
            if self._num_lent:
                if not self._files.has_lease(self._fd):
                    return False  # somebody waits for it
            elif not self._files.take_lease(self._fd):
                self._is_refused = True
                return False
            self._num_lent += 1
            return True

    def _give_back(self) -> None:
        """End the lease with the last range that is lent."""
        with self._lock:
            self._num_lent -= 1
            if not self._num_lent:
                self._files.end_lease(self._fd)

    def _map(self, offset: int, nbytes: int) -> _Pages | None:
        """Map a range and see to it that every page is there; `None` if one is not."""
        start = offset % mmap.ALLOCATIONGRANULARITY
        try:
            pages = self._files.map(self._fd, offset - start, start + nbytes)
        except BaseException as error:
            self._give_back()
            if isinstance(error, (OSError, ValueError)):  # unreadable, or shorter: who reads
                return None  # it says so
            raise
        return _Pages(pages, start, lambda: self._files.has_lease(self._fd))
