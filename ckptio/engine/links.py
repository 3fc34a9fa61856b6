"""Open the link over which ranks pass on what they read, and say how the others open it.

Ranks of one host share memory; others use TCP. A link lives for one exchange: a failure
breaks it, and one that waits for the next load would keep memory and connections for it.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Protocol

from ckptio.engine.rounds import meet
from ckptio.exchange.ends import Address
from ckptio.exchange.shared import shared_link
from ckptio.exchange.tcp import listening, tcp_link
from ckptio.ranks.interface import Same

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from ckptio.engine.context import EngineContext
    from ckptio.exchange.link import BulkLink
    from ckptio.ranks.interface import Json, Session

_MAX_SHARED_SLABS = 8
_LOOPBACK = "127.0.0.1"


class Linker(Protocol):
    """Makes links between the ranks of a job."""

    def offer(self, context: EngineContext) -> Json:
        """Say on rank 0 how the ranks are linked: what `open` takes, on every rank."""
        ...

    def open(
        self, offer: Json, context: EngineContext, session: Session, path: str
    ) -> AbstractAsyncContextManager[BulkLink]:
        """Open a link, on every rank.

        Args:
            offer: What rank 0 offers.
            context: The engine.
            session: Of all ranks; a round more of it tells them how they are reached.
            path: What is loaded.

        Raises:
            PeerLostError: Not all ranks came in time.
        """
        ...


class HostLinker:
    """Links ranks through memory where they are on one host, and by TCP where not."""

    def offer(self, context: EngineContext) -> Json:
        """Say on rank 0 how the ranks are linked; see `Linker`."""
        is_one_host = len(set(context.ranks.hosts)) == 1
        return {"way": "memory" if is_one_host else "tcp", "token": secrets.token_hex(16)}

    def open(
        self, offer: Json, context: EngineContext, session: Session, path: str
    ) -> AbstractAsyncContextManager[BulkLink]:
        """Open a link, on every rank; see `Linker`."""
        if offer["way"] == "tcp":
            return _over_tcp(offer["token"], context, session, path)
        ranks, config = context.ranks, context.config
        # twice the readers: one slab is read into while another is on its way
        num_slabs = min(_MAX_SHARED_SLABS, max(2, config.num_slabs // 2), 2 * config.max_reads)
        return shared_link(
            ranks.rank,
            ranks.world_size,
            offer["token"],
            num_slabs=num_slabs,
            slab_nbytes=config.slab_nbytes,
            timeout_s=config.meet_timeout_s,
        )


@contextlib.asynccontextmanager
async def _over_tcp(
    token: str, context: EngineContext, session: Session, path: str
) -> AsyncIterator[BulkLink]:
    """Open a door, tell all ranks where the doors are, and link them."""
    ranks = context.ranks
    with listening(ranks.world_size) as door:
        own = [ranks.address, door.getsockname()[1]]
        doors = await meet(session, "doors", own, _told_to_all, path=path, context=context)
        async with tcp_link(
            ranks.rank,
            _addresses(doors, ranks.rank_0_address),
            token,
            door,
            timeout_s=context.config.peer_timeout_s,
        ) as link:
            yield link


async def _told_to_all(doors: Sequence[Json]) -> Same:
    return Same(doors)


def _addresses(doors: Sequence[Json], near: str) -> list[Address]:
    """Say where each rank is called. One without an address is where this rank reaches rank 0.

    A rank of rank 0's machine calls its neighbours over the loopback interface: they reach rank 0
    there, or they would have an address. Ranks in containers may all be so, under the names of
    several hosts.
    """
    return [Address(host or near or _LOOPBACK, port) for host, port in doors]
