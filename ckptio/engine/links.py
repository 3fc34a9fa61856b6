"""Open the link over which ranks pass on what they read, and say how the others open it.

Ranks of one host share memory; others use gloo. A link lives for one exchange: a failure
breaks it, and one that waits for the next load would keep memory and connections for it.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

from ckptio.exchange.shared import shared_link

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager, AsyncExitStack

    from ckptio.engine.context import EngineContext
    from ckptio.exchange.link import BulkLink
    from ckptio.ranks.interface import Json

_MAX_SHARED_SLABS = 8


class Linker(Protocol):
    """Makes links between the ranks of a job."""

    async def offer(
        self, context: EngineContext, addresses: Sequence[str], stack: AsyncExitStack
    ) -> Json:
        """Make on rank 0 what a link needs, for as long as `stack` is open; say what it is.

        Args:
            context: The engine.
            addresses: Where each rank is reached; empty for one that is on rank 0's machine.
            stack: Left after the exchange.

        Returns:
            What `open` takes, on every rank; `None` if there is no way to link them.
        """
        ...

    def open(
        self, offer: Json, context: EngineContext, own_address: str
    ) -> AbstractAsyncContextManager[BulkLink]:
        """Open a link, on every rank.

        Args:
            offer: What rank 0 offers.
            context: The engine.
            own_address: Where the others reach this rank; that of rank 0 if empty.

        Raises:
            PeerLostError: Not all ranks came in time.
        """
        ...


class HostLinker:
    """Links ranks through memory where they are on one host, and by gloo where not."""

    async def offer(
        self, context: EngineContext, addresses: Sequence[str], stack: AsyncExitStack
    ) -> Json:
        """Make on rank 0 what a link needs; see `Linker`."""
        if len(set(context.ranks.hosts)) == 1:
            return {"token": secrets.token_hex(16)}
        from ckptio.exchange.gloo import is_available, serve_store  # noqa: PLC0415  # imports torch

        own = next((address for address in addresses if address), "")
        if not own or not is_available():
            return None
        address = await stack.enter_async_context(serve_store(own, context.config.meet_timeout_s))
        return {"host": address.host, "port": address.port}

    def open(
        self, offer: Json, context: EngineContext, own_address: str
    ) -> AbstractAsyncContextManager[BulkLink]:
        """Open a link, on every rank; see `Linker`."""
        ranks, config = context.ranks, context.config
        if "token" in offer:
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
        from ckptio.exchange.gloo import StoreAddress, gloo_link  # noqa: PLC0415  # imports torch

        address = StoreAddress(offer["host"], offer["port"])
        return gloo_link(
            ranks.rank,
            ranks.world_size,
            address,
            own_address or address.host,
            config.meet_timeout_s,
            peer_timeout_s=config.peer_timeout_s,
        )
