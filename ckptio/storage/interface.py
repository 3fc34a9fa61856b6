"""What the engine asks of a storage: a protocol per noun, one method per operation.

A `Storage` is one checkpoint's place. Every file of it goes through this one object:
data, manifest, sizes, deletes. There is no second way around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from ckptio.errors import FormatError, StorageError
    from ckptio.format.manifest import Manifest
    from ckptio.storage.streams import AwaitedSink, AwaitedSource, Open, Sink, Source

T = TypeVar("T")


class Attempt(Protocol):
    """One save on its way to a commit. Used by one task; ends in `commit` or `abort`."""

    @property
    def is_published(self) -> bool:
        """Whether the manifest is out, or may be."""
        ...

    async def create(self, name: str, nbytes: int) -> Sink | AwaitedSink:
        """Begin a data file of `nbytes` bytes named `name`; nothing may exist before `pwrite`."""
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
        """Leave a note that is there, durable as configured, when the checkpoint is; and hold it.

        One at the most. It goes with the checkpoint, or before; see `Storage.take_note`. Whoever
        asks drops or releases it, also where the save fails.

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

        On the rank that began it, files of ranks that died go with it. What another copy of this
        very save has stays: files that were there before, on a disk; in an object store, what a
        manifest of it names.
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

    async def locate(self) -> bool:
        """Find `identity` out, so that it does not block from here on, nor change.

        A place that says nothing for some seconds, as a mount does whose server is gone, is known
        by its path then. Whoever looks at it is given up, and holds nothing.

        Returns:
            Whether it has answered. What is asked by requests, which end, is not asked here.
        """
        ...

    @property
    def gap_nbytes(self) -> int:
        """Bytes nobody wants that are cheaper to read than to leave out."""
        ...

    async def version(self) -> Hashable:
        """Tell manifests apart without reading them; equal means unchanged.

        Raises:
            CheckpointNotFoundError: There is no manifest.
        """
        ...

    async def read_manifest(self) -> tuple[Hashable, bytes | Manifest]:
        """Read the manifest, or one made of what others wrote, and the version of just that.

        Raises:
            CheckpointNotFoundError: There is no manifest.
            FormatError: It is larger than any manifest.
        """
        ...

    async def peek_manifest(self) -> bytes | Manifest:
        """Read the manifest, for who can do without: one of ours is enough.

        A place that says nothing for some seconds is given up, as in `locate`.

        Raises:
            CheckpointNotFoundError: There is no manifest.
            FormatError: It points to what is not there.
            StorageError: It cannot be read, or nothing is said.
        """
        ...

    async def find_below(self) -> str:
        """Name a checkpoint directly below, for the error that here is none; empty if none is seen.

        It is looked for only so far as costs little, and where reading the manifest has not
        said it already. Never raises: there is an error to raise.
        """
        ...

    def recall(self, manifest: Manifest) -> None:
        """Be told what is there, by who has its manifest already. Touches nothing."""

    async def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Give the size of each data file in bytes, `None` for what is no regular file."""
        ...

    async def open(self, name: str, nbytes: int) -> Source | AwaitedSource:
        """Open a data file of `nbytes` bytes for reading.

        Raises:
            CheckpointChangedError: It is not there any more.
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
                (`Attempt.keep`) may be created again, and a manifest committed again.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A directory, or a prefix, under a root.

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

    async def find(
        self,
        accepts: Callable[[str], bool] | None = None,
        unseen: Callable[[str, StorageError], None] | None = None,
    ) -> list[Found]:
        """Find what is there; nothing if there is no such place yet.

        Args:
            accepts: Says which names to look at; all if not given.
            unseen: Takes the names that cannot be looked at, and why, on any thread; the first of
                these is raised if not given, since what nobody has seen is not for not there.

        Raises:
            StorageError: It cannot be listed.
        """
        ...

    async def names(self, accepts: Callable[[str], bool] | None = None) -> list[str]:
        """List the names of what is there, committed or not; see `find`.

        Whether it is committed takes a look at each: a request in an object store, and a round
        trip on many a mount. One listing of everything below would tell, too, and cost more for
        a job of many ranks, with hundreds of files to a checkpoint. So whoever wants to know of
        a few lists names, and looks at these. What `find` passes over may be among the names.

        Raises:
            StorageError: They cannot be listed.
        """
        ...

    async def look(
        self, names: Sequence[str], accepts: Callable[[str], bool] | None = None
    ) -> list[Found]:
        """Look at some, which need not be there; nothing is committed under those `find` omits.

        Args:
            names: What to look at.
            accepts: As in `find`: a link to another of these names is none of its own.

        Raises:
            StorageError: It cannot be told.
        """
        ...

    async def read_manifest(self, name: str) -> bytes:
        """Read a manifest.

        Raises:
            CheckpointNotFoundError: There is none.
            FormatError: What is in its place is none, and stays so.
            StorageError: It cannot be read.
        """
        ...

    async def read_manifests(
        self, names: Sequence[str], decode: Callable[[str, bytes], T]
    ) -> list[T | FormatError | StorageError]:
        """Read manifests, some at a time, and take each apart on a thread.

        Args:
            names: Of which checkpoints.
            decode: Called with a name and the manifest there; may raise `FormatError`.

        Returns:
            What `decode` returned for each name, in their order, or why that failed: what
            `read_manifest` or `decode` raised.
        """
        ...

    async def remove(self, name: str, save_id: str | None = None) -> int:
        """Remove a checkpoint: its manifest first, then what it is made of.

        What is left behind a failure is no checkpoint, and goes with a later `sweep`.

        Args:
            name: Its name.
            save_id: Of which save it is to be; any if not given.

        Returns:
            Bytes of its data files.

        Raises:
            CheckpointNotFoundError: There is none.
            FormatError: Its manifest cannot be read; nothing was removed.
            StorageError: It could not be taken back, or another save was committed there
                meanwhile, or since it was decided; nothing was removed.
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
