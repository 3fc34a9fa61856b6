"""What the machine itself does with the same bytes: nothing to pack, sum or name.

Direct I/O in blocks from one buffer per thread, and copies into memory that was touched
before. A ratio to one of these says how much of the machine is used.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from crc32c import crc32c

from bench.states import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from bench.states import State

KiB = 1 << 10
MiB = 1 << 20
_SECTOR_NBYTES = 4096
_COPY_NBYTES = 16 * MiB


def write_direct(path: str, nbytes: int, *, block_nbytes: int, num_threads: int) -> None:
    """Write and sync a file with direct I/O, threads taking the next block in turn."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)

        def write(room: memoryview, offset: int, size: int) -> None:
            padded = -(-size // _SECTOR_NBYTES) * _SECTOR_NBYTES
            assert os.pwrite(fd, room[:padded], offset) == padded

        _each_block(nbytes, block_nbytes, num_threads, write)
        os.ftruncate(fd, nbytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_blocks(path: str, *, block_nbytes: int, num_threads: int, is_direct: bool) -> None:
    """Read a file into one buffer per thread, past the page cache or through it."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
    try:

        def read(room: memoryview, offset: int, size: int) -> None:
            assert os.preadv(fd, [room], offset) == size

        _each_block(os.fstat(fd).st_size, block_nbytes, num_threads, read)
    finally:
        os.close(fd)


def read_verified(path: str, target: CopyTarget, *, block_nbytes: int, num_threads: int) -> None:
    """Sum every block of a file in the page cache, and copy it where it belongs, out of a map.

    What any load into given memory has to do if nothing may land unverified.
    """
    numbers = itertools.count()  # `next` on it is atomic
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as pages,
        memoryview(pages) as view,
    ):

        def lane() -> None:
            for number in numbers:
                with view[number * block_nbytes : (number + 1) * block_nbytes] as block:
                    if not block:
                        return
                    crc32c(block)
                    target.put(block, number * block_nbytes, len(block))

        _in_threads([lane] * num_threads)


def _each_block(
    nbytes: int,
    block_nbytes: int,
    num_threads: int,
    work: Callable[[memoryview, int, int], None],
) -> None:
    """Call `work` with a buffer, an offset and a size, for each block of `nbytes`."""
    numbers = itertools.count()  # `next` on it is atomic

    def lane() -> None:
        with mmap.mmap(-1, block_nbytes) as pages, memoryview(pages) as room:
            room[:] = b"\x5a" * block_nbytes
            for number in numbers:
                offset = number * block_nbytes
                if offset >= nbytes:
                    return
                work(room, offset, min(block_nbytes, nbytes - offset))

    _in_threads([lane] * num_threads)


def _in_threads(jobs: list[Callable[[], None]]) -> None:
    if len(jobs) == 1:
        jobs[0]()
        return
    with ThreadPoolExecutor(len(jobs)) as executor:
        for future in [executor.submit(job) for job in jobs]:
            future.result()


class CopyTarget:
    """Memory as large as a state, touched, to copy it to."""

    def __init__(self, nbytes: int) -> None:
        self._pages = mmap.mmap(-1, nbytes)
        for offset in range(0, nbytes, mmap.PAGESIZE):
            self._pages[offset] = 1
        self._keep = ctypes.c_char.from_buffer(self._pages)
        self._address = ctypes.addressof(self._keep)

    def copy(self, state: State, *, num_threads: int) -> None:
        """Copy all tensors, in pieces, as `memmove` does it."""
        pieces = list(_pieces(state.values(), self._address))
        numbers = itertools.count()

        def lane() -> None:
            for number in numbers:
                if number >= len(pieces):
                    return
                ctypes.memmove(*pieces[number])

        _in_threads([lane] * num_threads)

    def put(self, room: memoryview, offset: int, nbytes: int) -> None:
        """Copy the first bytes of a buffer to an offset."""
        source = ctypes.addressof(ctypes.c_char.from_buffer(room))
        ctypes.memmove(self._address + offset, source, nbytes)

    def holds(self, state: State) -> bool:
        """Whether the last tensor has arrived."""
        data = as_bytes(next(reversed(state.values())))
        last = bytes(data.numpy())
        stop = len(self._pages)
        return self._pages[stop - len(last) : stop] == last

    def close(self) -> None:
        """Give the memory back."""
        del self._keep
        self._pages.close()


def _pieces(tensors: Iterable[torch.Tensor], target: int) -> Iterator[tuple[int, int, int]]:
    """Give the arguments of `memmove`, piece by piece."""
    for tensor in tensors:
        source, nbytes = tensor.data_ptr(), tensor.nbytes
        for offset in range(0, nbytes, _COPY_NBYTES):
            size = min(_COPY_NBYTES, nbytes - offset)
            yield target + offset, source + offset, size
        target += nbytes
