"""A link over TCP, for ranks that are not all on one host.

Whoever takes calls whoever sends, when it wants something of that rank for the first time. It
asks for a message by its tag once it has room for it, and messages come in the order in which
both sides were ready for them. So none waits behind one that nobody has room for, and nothing
lies between the slabs of both sides but what two sockets hold.

All of it is done in callbacks of the loop (`exchange.ends`), and none of them waits. No thread
and no task works for a link, so one that is broken off has let go of all memory when that call
returns, whatever its peers do and however much of a message is under way.

Where each rank is reached, and a token that tells the ranks of an exchange from whoever else
calls, they have told each other before, over the connections of their group.

A peer that dies is noticed at once by whoever is connected to it, and a way that is lost within
minutes. A peer that freezes is not, nor one that dies before it has called: the ranks of the group
watch each other by other means, and cancel.

Rejected: gloo. Every wait for it takes a thread; one in the middle of a message never ends when
its connections are closed, whoever closes them; and nothing stops its meeting. It is no faster
between two processes of one machine, and takes more of the processor.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from ckptio.errors import PeerLostError
from ckptio.exchange.door import Door, hello
from ckptio.exchange.ends import Inlet, Outlet, limit_silence, tune
from ckptio.ranks.host import listen_everywhere

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import AsyncIterator, Iterator, Sequence

    from ckptio.exchange.ends import Address, End
    from ckptio.staging.pool import Slab

_BROKEN = "the exchange was broken off before; load again"


@contextlib.contextmanager
def listening(num_callers: int) -> Iterator[socket.socket]:
    """Open a socket at which other ranks can call, on a port of its own.

    Args:
        num_callers: Ranks that may call before they are answered.
    """
    with listen_everywhere(num_callers) as listener:
        listener.settimeout(0)
        tune(listener)  # and so the connections of whoever calls
        yield listener


@contextlib.asynccontextmanager
async def tcp_link(
    rank: int,
    addresses: Sequence[Address],
    token: str,
    listener: socket.socket,
    *,
    timeout_s: float,
) -> AsyncIterator[TcpLink]:
    """Open a link; every rank of the group does so. Waits for nobody.

    Leave the block when every rank is through with what it sends and takes: a rank that
    goes before others are done looks to them like one that died.

    Args:
        rank: This rank.
        addresses: Where each rank is called, by rank; all of them listen by now.
        token: The same on all ranks, 32 ASCII characters, and never used before.
        listener: This rank's, from `listening`. Closed afterwards.
        timeout_s: How long it may take to reach a rank, whatever the process there does. What was
            sent may take as long to be taken there, or two minutes if that is longer.
    """
    secret = token.encode("ascii")
    link = TcpLink(addresses, hello(secret, rank), timeout_s)
    door = Door(listener, len(addresses), secret, link.welcome, link.fail)
    try:
        yield link
    finally:
        door.close()
        link.break_off()


class TcpLink:
    """A `BulkLink` over TCP. Made by `tcp_link`."""

    def __init__(self, addresses: Sequence[Address], greeting: bytes, timeout_s: float) -> None:
        self._addresses = addresses
        self._greeting = greeting
        self._timeout_s = timeout_s
        self._inlets: dict[int, Inlet] = {}
        self._outlets: dict[int, Outlet] = {}
        self._lost: dict[int, str] = {}
        self._broken: tuple[str, tuple[int, ...]] | None = None

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """It sends from any memory."""
        return ()

    async def send(self, ranks: Sequence[int], tag: int, slab: Slab, nbytes: int) -> None:
        """Send the start of a slab to other ranks; see `BulkLink`."""
        sent: list[asyncio.Future[None]] = []
        try:
            for rank in ranks:
                self._require(rank)
                sent.append(self._outlet(rank).offer(tag, slab.view[:nbytes]))
            while sent:
                await sent.pop()  # in no variable: its error refers to this frame, as below
        except BaseException:
            self.break_off()
            raise
        finally:
            sent.clear()  # no reference cycle

    @contextlib.asynccontextmanager
    async def receive(
        self, rank: int, tag: int, room: Slab | None, nbytes: int
    ) -> AsyncIterator[Slab]:
        """Take what a rank sends; see `BulkLink`."""
        assert room is not None  # noqa: S101  # the link has no slabs of its own
        self._require(rank)
        try:
            await self._inlet(rank).take(tag, room.view[:nbytes])
        except BaseException:
            self.break_off()
            raise
        yield room

    def break_off(self) -> None:
        """End all connections; whoever waits on either side is told. Memory is free afterwards."""
        self.fail(_BROKEN, ())

    def fail(self, why: str, ranks: tuple[int, ...]) -> None:
        """Break off because of some ranks, or of none. The first reason is what all hear."""
        if self._broken is None:
            self._broken = why, ranks
            for end in (*self._inlets.values(), *self._outlets.values()):
                end.close(why, ranks)
            self._inlets.clear()  # they refer to this link: no reference cycle
            self._outlets.clear()

    def welcome(self, rank: int, connection: socket.socket) -> bool:
        """Take the connection of a rank that has called, unless that cannot be."""
        if self._broken is not None or rank in self._lost or rank >= len(self._addresses):
            return False
        limit_silence(connection, self._timeout_s)
        return self._outlet(rank).open(connection)

    def _inlet(self, rank: int) -> Inlet:
        """Give the end at which a rank's messages come in."""
        if rank not in self._inlets:
            lose = functools.partial(self._lose, rank)
            address = self._addresses[rank]
            self._inlets[rank] = Inlet(address, self._greeting, self._timeout_s, lose)
        return self._inlets[rank]

    def _outlet(self, rank: int) -> Outlet:
        """Give the end at which messages go out to a rank, whether it has called yet or not."""
        if rank not in self._outlets:
            self._outlets[rank] = Outlet(functools.partial(self._lose, rank))
        return self._outlets[rank]

    def _require(self, rank: int) -> None:
        """Raise if a rank was lost, or the link broke."""
        if rank in self._lost:
            self.fail(self._lost[rank], (rank,))
        if self._broken is not None:
            why, ranks = self._broken
            raise PeerLostError(why, ranks=ranks)

    def _lose(self, rank: int, end: End, why: str) -> None:
        """Take note that a connection to a rank has ended; if somebody needs it, so does the link.

        Another one tells of its end itself: all of a message may have come there, if not been read.
        """
        why = self._lost.setdefault(rank, f"the exchange with rank {rank} broke off: {why}")
        ends = [ends[rank] for ends in (self._inlets, self._outlets) if rank in ends]
        if any(other.is_awaited and (other is end or not other.is_open) for other in ends):
            self.fail(why, (rank,))
        end.close(why, (rank,))
