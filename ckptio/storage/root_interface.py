"""What a run asks of a place with checkpoints side by side; see `interface` for one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from ckptio.errors import FormatError, StorageError

T = TypeVar("T")


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
        *,
        aside: bool = False,
    ) -> list[Found]:
        """Find what is there; nothing if there is no such place yet.

        Args:
            accepts: Says which names to look at; all if not given.
            unseen: Called with each name that cannot be looked at, and why, on any thread. Without
                it the first of these errors is raised: what cannot be seen may be there.
            aside: Leave room for the requests of others, who are waited for.

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
        """Look at some names, also where nothing is; what `find` leaves out is not committed.

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
        self, names: Sequence[str], decode: Callable[[str, bytes], T], *, aside: bool = False
    ) -> list[T | FormatError | StorageError]:
        """Read manifests, some at a time, and take each apart on a thread.

        Args:
            names: Of which checkpoints.
            decode: Called with a name and the manifest there; may raise `FormatError`.
            aside: As in `find`.

        Returns:
            What `decode` returned for each name, in their order, or why that failed: what
            `read_manifest` or `decode` raised.
        """
        ...

    async def remove(self, name: str, save_id: str | None = None) -> int:
        """Remove a checkpoint: its manifest first, then what it is made of.

        Once the manifest has gone there is no checkpoint: what cannot be removed from then on is an
        event, not an error, and goes with a later `sweep`.

        Args:
            name: Its name.
            save_id: Of which save it is to be; any if not given.

        Returns:
            Bytes of its data files.

        Raises:
            CheckpointNotFoundError: There is none.
            FormatError: Its manifest cannot be read; nothing was removed.
            StorageError: The manifest could not be removed, or another save was committed there
                meanwhile, or since it was decided. Nothing was removed, unless a store that did
                not answer has removed the manifest all the same.
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
