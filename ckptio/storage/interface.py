"""What the engine asks of a storage: a protocol per noun, one method per operation.

A `Storage` is one checkpoint's place. Whoever saves or loads one comes to its files through this
object alone: data, manifest, sizes, notes. What looks after many (lists, removes, sweeps) has a
`root_interface.Root`, which knows the same names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ckptio.format.manifest import Manifest
    from ckptio.storage.streams import AwaitedSink, AwaitedSource, Open, Sink, Source


class Attempt(Protocol):
    """One save on its way to a commit. Used by one task; ends in `commit`, `abort` or `leave`.

    Attributes:
        is_alone: Whether nobody else can be making the same save there, another copy of it, say,
            as far as locks can tell. If somebody can, an abort may take files that are about to be
            committed: leave instead.
    """

    @property
    def is_alone(self) -> bool: ...  # noqa: D102  # as above

    @property
    def is_published(self) -> bool:
        """Whether the manifest is out, or may be."""
        ...

    async def create(self, name: str, nbytes: int) -> Sink | AwaitedSink:
        """Begin a data file of `nbytes` bytes named `name`; it need not exist before a write."""
        ...

    async def stay(self) -> None:
        """Say that this save is alive, where silence for long counts as its end.

        For a save that waits for others for minutes; writing says so by itself.

        Raises:
            StorageError: It was silent for too long already: its files may be gone.
        """
        ...

    async def keep(self, name: str, nbytes: int) -> None:
        """Take over a data file that is there, whole: an earlier attempt of the save wrote it.

        Look at it again before `commit`: a sweep that began before this attempt may take it.

        Raises:
            StorageError: It is not there, where that is seen now, or cannot be made durable.
        """
        ...

    async def note(self, data: bytes) -> Note:
        """Write a note, durable as configured, before the checkpoint is committed; and hold it.

        One note at most. It goes with the checkpoint, or before; see `Storage.take_note`. The
        caller drops or releases it, also if the save fails.

        Raises:
            StorageError: It could not be written.
        """
        ...

    async def seal(self) -> None:
        """Make sure that all files are there and, as configured, durable by name.

        For ranks that do not commit; `commit` does the same for the one that does.

        Raises:
            StorageError: A file is missing, or its name cannot be made durable.
        """
        ...

    async def commit(self, manifest: bytes) -> None:
        """Publish `manifest`. When this returns, the checkpoint exists; before, it does not.

        Raises:
            CommitConflictError: Somebody else committed since the attempt began. If its
                `in_doubt` is set, this one may follow should the other's be removed.
            StorageError: It could not be published; what was there before still is. If its
                `in_doubt` is set, it may have been published all the same.
        """
        ...

    async def abort(self) -> None:
        """Remove everything this attempt made. Does nothing after a commit. Never raises.

        On the rank that began it, files of ranks that died go with it. What a manifest of this
        very save names stays; see `is_alone`.
        """
        ...

    async def leave(self) -> None:
        """Let go, and remove no file: another rank commits, or may have. Never raises.

        Parts of files that were not ended may go. What is left can be taken over: see
        `Storage.begin`.

        Nothing is removed by a later `abort` either.
        """
        ...


class Note(Protocol):
    """A note beside a checkpoint, held; ends in `drop` or `release`.

    Attributes:
        data: What it says.
    """

    data: bytes

    async def drop(self) -> None:
        """Remove it.

        Raises:
            StorageError: It may still be there.
        """
        ...

    async def release(self) -> None:
        """Let go of it: somebody else may take it. Never raises."""
        ...


class Storage(Protocol):
    """The place of one checkpoint."""

    @property
    def path(self) -> str:
        """What the user called it; for messages."""
        ...

    @property
    def identity(self) -> str:
        """The same for two names of the same place: links are followed.

        On a file system that may block, unless the place was located.
        """
        ...

    async def identify(self) -> str:
        """Give `identity` without blocking the loop, however long the place takes to answer."""
        ...

    async def identify_now(self) -> str | None:
        """Give `identity` as it is now; `None` if the place says nothing for some seconds.

        The thread that looks at it is given up then, and holds nothing.
        """
        ...

    async def locate(self, *, gives_up: bool = True) -> bool:
        """Find `identity` out, so that it does not block from here on, nor change.

        Args:
            gives_up: Whether a place that says nothing for some seconds, as a mount does whose
                server is gone, is known by its path then. It is waited for otherwise.

        Returns:
            Whether it has answered. What is asked by requests, which end, is not asked here.
        """
        ...

    @property
    def is_outlived(self) -> bool:
        """Whether a call that is cancelled waits for its answer all the same.

        That is so for the thread of a file system; a request is given up instead.
        """
        ...

    @property
    def gap_nbytes(self) -> int:
        """How many bytes between two ranges are cheaper to read for nothing than to leave out."""
        ...

    async def version(self) -> Hashable:
        """Tell manifests apart without reading them; equal means unchanged.

        Raises:
            CheckpointNotFoundError: There is no manifest.
            StorageError: It cannot be told.
        """
        ...

    async def read_manifest(self) -> tuple[Hashable, bytes | Manifest]:
        """Read the manifest, or one made of what others wrote, and the version of just that.

        Raises:
            CheckpointNotFoundError: There is no manifest.
            FormatError: It is larger than any manifest, or points to what is not there.
            StorageError: It cannot be read.
        """
        ...

    async def peek_manifest(self) -> bytes | Manifest:
        """Read a manifest of ckptio's, for whoever can do without one.

        What other programs wrote is not looked for, and a place that says nothing for some seconds
        is given up, as in `locate`.

        Raises:
            CheckpointNotFoundError: There is no manifest.
            FormatError: It is larger than any manifest, or points to what is not there.
            StorageError: It cannot be read, or nothing is said.
        """
        ...

    async def find_below(self) -> str:
        """Name a checkpoint directly below, for the error that here is none; empty if none is seen.

        It is looked for only so far as costs little, and where reading the manifest has not
        said it already. Never raises: there is an error to raise.
        """
        ...

    def remember(self, manifest: Manifest) -> None:
        """Take note of a manifest that the caller has already read. Touches nothing."""

    async def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Give the size of each data file in bytes, `None` for what is no regular file.

        Raises:
            StorageError: One cannot be looked at.
        """
        ...

    async def open(self, name: str, nbytes: int) -> Source | AwaitedSource:
        """Open a data file of `nbytes` bytes for reading.

        Raises:
            CheckpointChangedError: It is not there any more, where that is seen now.
            StorageError: It cannot be opened.
        """
        ...

    async def opener(self) -> Open | None:
        """Give what opens a data file on the calling thread; `None` where opening awaits."""
        ...

    async def is_cached(self, ranges: Sequence[tuple[str, int, int]]) -> bool:
        """Whether most of some ranges are in the memory of this host, and cost next to nothing.

        Args:
            ranges: Name of a data file, first byte and size of each. A few of many are enough.
        """
        ...

    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> Attempt:
        """Begin a save.

        Args:
            save_id: Its id.
            overwrite: Whether a checkpoint that is there may be replaced.
            resumes: An attempt of this very save may have ended before its commit, or
                just after it. What it left is taken over: data files that are not kept
                (`Attempt.keep`) may be created again, and a manifest committed again. Where
                this fails, or is cancelled, it stays for the next.

        Raises:
            CommitConflictError: The earlier attempt is still under way.
            CheckpointExistsError: There is a checkpoint and `overwrite` is off.
            StorageError: The place cannot be written.
        """
        ...

    async def join(self, save_id: str) -> Attempt:
        """Take part in a save that another rank begins and commits.

        Raises:
            StorageError: The place cannot be written.
        """
        ...

    async def take_note(self, save_id: str) -> Note | None:
        """Take the note that a save left; `None` if there is none, or somebody holds it.

        Raises:
            StorageError: It cannot be read.
        """
        ...

    async def read_note(self, save_id: str) -> bytes | None:
        """Read the note that a save left, held or not; `None` if there is none.

        Raises:
            StorageError: It cannot be read.
        """
        ...

    async def has_note(self, save_id: str | None) -> bool:
        """Whether there is a note of a save, held or not; of any save, for `None`.

        Raises:
            StorageError: That cannot be told.
        """
        ...
