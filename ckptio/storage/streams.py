"""Data files as the engine writes and reads them: two kinds of either, by what waits.

One whose calls only block a thread (a file) has `pwrite` or `pread_into`: the engine then
sums and moves many blocks in one thread without a hop to the loop for each. One that awaits
(an object store) has `write` or `read_into`, for a whole slab.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    #: Opens the data file of a name and a size in bytes. Blocks; thread-safe.
    Open = Callable[[str, int], "Source"]


class Memory(Protocol):
    """Memory that holds some bytes: a slab, or pages that are lent.

    Attributes:
        view: The bytes.
        address: Where they start; a multiple of 64.
        pinned: Whether a device can copy from and to them while the host goes on.
    """

    view: memoryview
    address: int
    pinned: bool


class Lent(Memory, Protocol):
    """Memory that may be taken back."""

    @property
    def is_held(self) -> Callable[[], bool]:
        """Says when called whether it is still lent: then what was read of it so far is right."""
        ...


class Sink(Protocol):
    """A data file being written. Ranges come from several threads, in any order, once each."""

    def pwrite(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset`, all of it. Blocks; thread-safe.

        `offset` and the address of `data` are multiples of the page. `data` is the caller's
        again when this returns or raises.

        Raises:
            StorageError: It could not be written.
        """
        ...

    def close(self) -> None:
        """End the file after its last range, and make it durable as configured. Blocks.

        Raises:
            StorageError: It could not be synced; the file is not to be relied on.
        """
        ...


class Source(Protocol):
    """A data file being read."""

    @property
    def is_cached(self) -> bool:
        """Whether nearly all of it was in memory when it was opened: no read waits for a device."""
        ...

    def pread_into(self, offset: int, room: memoryview, nbytes: int) -> None:
        """Read `nbytes` at `offset` into the start of `room`. Blocks; thread-safe.

        Args:
            offset: First byte; a multiple of the checksum block.
            room: Page-aligned memory of `nbytes` rounded up to the page, at least; what is
                behind the `nbytes` is garbage afterwards.
            nbytes: Bytes to read.

        Raises:
            CorruptionError: The file ends before.
            StorageError: It could not be read.
        """
        ...

    def lend(self, offset: int, nbytes: int) -> AbstractContextManager[Lent | None]:
        """Lend a range where it lies, if nothing can change it meanwhile. Blocks; thread-safe.

        For milliseconds: it may hold others up. It must not be written to. What was read of it
        counts only if it `is_held` afterwards.

        Args:
            offset: First byte.
            nbytes: How many.

        Returns:
            The range, until the context ends; `None` if it has to be read.
        """
        ...

    def close(self) -> None:
        """Release the file. Blocks."""
        ...


class AwaitedSink(abc.ABC):
    """A data file being written to where writing is awaited: an object store.

    No protocol, so that asking for it costs nothing: it is asked for each segment.
    """

    @abc.abstractmethod
    async def write(self, offset: int, data: memoryview) -> None:
        """Write a slab, of which `offset` is a multiple. Slabs come in any order, once each.

        But for the last one they are full. `data` is the caller's again when this returns
        or raises.

        Raises:
            StorageError: It could not be written.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """End the file after its last slab: it is there, whole, when this returns.

        Raises:
            StorageError: It is not to be relied on.
        """


class AwaitedSource(abc.ABC):
    """A data file being read from where reading is awaited, and nothing is held open."""

    @abc.abstractmethod
    async def read_into(self, offset: int, room: memoryview) -> None:
        """Read as many bytes as `room` has at `offset`, into it.

        Raises:
            CorruptionError: The file ends before.
            CheckpointChangedError: It is not there any more.
            StorageError: It could not be read.
        """
