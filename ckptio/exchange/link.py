"""What carries slabs from rank to rank.

A link is made by all ranks of a group together and carries one exchange at a time. It
moves memory as it is, without copies of its own where its way allows, and holds nothing:
a sender waits until its takers have come for what it sends, so what is under way is what
the slabs of both sides hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from ckptio.staging.pool import Slab


class BulkLink(Protocol):
    """Carries bytes between the ranks of a group. Used from one loop.

    Both operations wait for the other side for as long as it takes: whoever watches over the
    ranks of the group cancels them. A cancelled operation ends at once, has let go of the
    memory by then, and breaks the link: every other operation on it fails, here and on the
    ranks that wait for this one.

    Attributes:
        slabs: Memory of its own, from which alone it sends; a receiver then looks at that
            memory and needs no room. If there is none, it sends from any memory.
    """

    @property
    def slabs(self) -> Sequence[Slab]: ...  # noqa: D102  # documented above

    async def send(self, ranks: Sequence[int], tag: int, slab: Slab, nbytes: int) -> None:
        """Send the start of a slab to other ranks.

        The slab stays as it is until this returns or raises. Messages to a rank may be
        taken in any order, by their tags.

        Args:
            ranks: Who takes it; each calls `receive` with the same tag and size.
            tag: Tells messages of one sender apart, from 0 to 2**31 - 1. Not used twice.
            slab: Holds it.
            nbytes: Its size; not zero.

        Raises:
            PeerLostError: A rank went away, or the link is broken.
        """
        ...

    def receive(
        self, rank: int, tag: int, room: Slab | None, nbytes: int
    ) -> AbstractAsyncContextManager[Slab]:
        """Take what a rank sends: `async with link.receive(...) as slab`.

        Args:
            rank: Who sends it.
            tag: Which message.
            room: Takes the bytes. `None` for a link that has slabs of its own.
            nbytes: The size of the message.

        Returns:
            The slab that holds the bytes for the length of the block.

        Raises:
            PeerLostError: The rank went away, or the link is broken.
            OSError: This rank cannot take it, whatever the other one does; that breaks the link.
        """
        ...
