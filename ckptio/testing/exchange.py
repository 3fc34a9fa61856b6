"""Links between ranks that are tasks of one loop.

A message is handed over when both sides have come, as with a real link: whoever sends waits
for all of its takers, whoever takes waits for the sender, and nothing lies in between. What
takes time takes a time drawn from a seed, so that on a `VirtualLoop` every order occurs.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptio.errors import PeerLostError
from ckptio.staging.pool import Slab

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


@dataclass(slots=True)
class _Message:
    """A message on its way from one rank to another.

    Attributes:
        offered: Resolves to the slab that holds it.
        taken: Resolves when the taker is through with it.
    """

    offered: asyncio.Future[Slab] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    taken: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def require_sender(self) -> None:
        """Check that the slab still holds the message: it does not if the sender went away.

        Raises:
            PeerLostError: The network broke meanwhile.
        """
        if self.taken.done():
            self.taken.result()

    def finish(self) -> None:
        """Let the sender go on, unless everything broke meanwhile."""
        self.require_sender()
        self.taken.set_result(None)

    def fail(self, error: PeerLostError) -> None:
        """Let both sides raise an error, wherever they wait."""
        for future in (self.offered, self.taken):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits for it raises it; there may be nobody


class MemoryNetwork:
    """Links between the ranks of a group, all on one loop.

    Args:
        num_ranks: How many there are.
        seed: Draws how long things take.
        max_delay_s: How long, at the most.
        num_slabs: Slabs of its own that each link has. If there are any, takers look at what is
            sent where it lies; otherwise it is copied into their `room`.
        slab_nbytes: Size of such a slab.

    Attributes:
        links: The link of each rank.
        sent_nbytes: Bytes that went from each rank to others.
        damaged_tags: Messages that arrive with a bit flipped, where takers copy them: a slab of
            the link's own is still the sender's, and stays as it is.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        seed: int = 0,
        max_delay_s: float = 0.0,
        num_slabs: int = 0,
        slab_nbytes: int = 0,
    ) -> None:
        self.links = [
            MemoryLink(self, rank, [Slab(slab_nbytes) for _ in range(num_slabs)])
            for rank in range(num_ranks)
        ]
        self.sent_nbytes = [0] * num_ranks
        self.damaged_tags: set[int] = set()
        self._rng = random.Random(seed)  # noqa: S311  # a schedule, nothing secret
        self._max_delay_s = max_delay_s
        self._messages: dict[tuple[int, int, int], _Message] = {}
        self._failure: PeerLostError | None = None

    @property
    def num_under_way(self) -> int:
        """Messages that somebody waits for."""
        return len(self._messages)

    def message(self, source: int, target: int, tag: int) -> _Message:
        """Give a message, whoever of the two comes first. Called by links.

        Raises:
            PeerLostError: The network is broken.
        """
        if self._failure is not None:
            raise self._failure
        return self._messages.setdefault((source, target, tag), _Message())

    def forget(self, source: int, target: int, tag: int) -> None:
        """Drop a message that is through. Called by links."""
        self._messages.pop((source, target, tag), None)

    def lose(self, rank: int) -> None:
        """Break everything: a rank went away."""
        if self._failure is None:
            self._failure = PeerLostError(f"rank {rank} went away", ranks=(rank,))
        for message in self._messages.values():
            message.fail(self._failure)
        self._messages.clear()

    async def wait(self) -> None:
        """Take some time."""
        if self._max_delay_s:
            await asyncio.sleep(self._rng.uniform(0, self._max_delay_s))

    def close(self) -> None:
        """Give the memory of all links back."""
        for link in self.links:
            for slab in link.slabs:
                slab.close()


class MemoryLink:
    """The link of one rank; an implementation of `exchange.link.BulkLink`."""

    def __init__(self, network: MemoryNetwork, rank: int, slabs: Sequence[Slab]) -> None:
        self._network = network
        self._rank = rank
        self._slabs = slabs

    @property
    def slabs(self) -> Sequence[Slab]:
        """Memory of its own."""
        return self._slabs

    async def send(self, ranks: Sequence[int], tag: int, slab: Slab, nbytes: int) -> None:
        """Send the start of a slab to other ranks; see `BulkLink`."""
        network = self._network
        if self._slabs and slab not in self._slabs:
            raise AssertionError("sent from memory that is not the link's")
        before = bytes(slab.view[:nbytes])
        messages = [network.message(self._rank, rank, tag) for rank in ranks]
        try:
            await network.wait()
            for message in messages:
                if not message.offered.done():
                    message.offered.set_result(slab)
            for message in messages:
                await message.taken
        except BaseException:
            network.lose(self._rank)
            raise
        finally:
            if slab.view[:nbytes] != before:
                raise AssertionError("a slab was changed while it was being sent")
        network.sent_nbytes[self._rank] += nbytes * len(ranks)

    @asynccontextmanager
    async def receive(
        self, rank: int, tag: int, room: Slab | None, nbytes: int
    ) -> AsyncIterator[Slab]:
        """Take what a rank sends; see `BulkLink`."""
        network = self._network
        if bool(self._slabs) != (room is None):
            raise AssertionError("room is for what is copied, and only for that")
        message = network.message(rank, self._rank, tag)
        try:
            slab = await message.offered
            await network.wait()
            message.require_sender()
            if room is None:
                yield slab
                message.finish()
            else:
                room.view[:nbytes] = slab.view[:nbytes]
                if tag in network.damaged_tags:
                    room.view[nbytes // 2] ^= 1
                message.finish()
                yield room
        except BaseException:
            network.lose(self._rank)
            raise
        network.forget(rank, self._rank, tag)
