"""A link between ranks of one host through memory that all of them see.

Each rank reads into slabs that the others have mapped, and says which slab holds what.
Takers verify and land straight from there: nothing is copied on the way, where a socket
costs two copies by the kernel for every taker.

The memory is a memfd and goes to the others over a Unix socket, as a descriptor: it has no
name that a crash could leave behind, and the limit on /dev/shm, which containers set low,
is not its limit. The socket's name lies in the abstract namespace, so it leaves nothing
either; whoever connects has to be of the same user. Both ends of a connection find at once that
the other is gone.

A slab is shared for as long as both sides say: the sender reads into it again only when
every taker has said that it is through. A rank that breaks off closes its sockets; memory
that others have mapped stays until they let go of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import socket
import struct
from typing import TYPE_CHECKING

from ckptio._aio import Siblings, readable
from ckptio._texts import name_ranks
from ckptio.errors import PeerLostError
from ckptio.staging.pool import Slab
from ckptio.storage.linux import address_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_HELLO = struct.Struct("<IIQ")  # rank, slabs, bytes of each
_WORD = struct.Struct("<IIQ")  # slab or _TAKEN, tag, bytes
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_TAKEN = 2**32 - 1
_RETRY_S = 0.01
#: What the system says where it gives this process no more, whoever is at the other end.
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class SharedSlab(Slab):
    """A slab that lies in memory shared between processes.

    Several lie in one map, which goes with the last of them that is closed.

    Args:
        memory: The mapped memory.
        start: Where in it the slab starts.
        nbytes: Its size.
    """

    __slots__ = ()

    def __init__(self, memory: mmap.mmap, start: int, nbytes: int) -> None:
        self._map = memory
        self.view = memoryview(memory)[start : start + nbytes]
        self.address = address_in(memory, start)
        self.pinned = False


@contextlib.asynccontextmanager
async def shared_link(
    rank: int, world_size: int, token: str, *, num_slabs: int, slab_nbytes: int, timeout_s: float
) -> AsyncIterator[SharedLink]:
    """Open a link; every rank of the group does so, and all are on one host.

    Leave the block when every rank is through with what it sends and takes.

    Args:
        rank: This rank.
        world_size: Ranks of the group.
        token: The same on all ranks, and never used before.
        num_slabs: Slabs to send from, beside those of the pool: units on their way at a time.
        slab_nbytes: Size of a slab; a multiple of the page.
        timeout_s: For how long to wait for ranks that do not come.

    Raises:
        PeerLostError: Not all ranks came in time.
        OSError: The system gives this rank too little: files, memory.
    """
    descriptor = os.memfd_create("ckptio-exchange")
    try:
        os.ftruncate(descriptor, num_slabs * slab_nbytes)
        own = _map(descriptor, num_slabs, slab_nbytes)
        link = SharedLink(rank, own)
        try:
            async with asyncio.timeout(timeout_s):
                await link.connect(world_size, token, descriptor)
        except TimeoutError:
            missing = sorted(set(range(world_size)) - {rank} - link.peers)
            await link.close()
            raise PeerLostError(
                f"{name_ranks(missing)} did not come to exchange what the group loads",
                ranks=missing,
            ) from None
        except BaseException:
            await link.close()
            raise
    finally:
        os.close(descriptor)
    try:
        async with Siblings() as group:
            for peer in link.peers:
                group.create_task(link.listen(peer), name=f"hear rank {peer}")
            try:
                yield link
            finally:
                link.break_off()
    finally:
        await link.close()


def _map(descriptor: int, num_slabs: int, slab_nbytes: int) -> list[Slab]:
    """Map the slabs that a descriptor stands for."""
    memory = mmap.mmap(descriptor, num_slabs * slab_nbytes)
    with contextlib.suppress(OSError):  # as with every slab; not vital
        memory.madvise(mmap.MADV_DONTFORK)
    return [SharedSlab(memory, i * slab_nbytes, slab_nbytes) for i in range(num_slabs)]


class SharedLink:
    """A `BulkLink` through shared memory. Made by `shared_link`."""

    def __init__(self, rank: int, slabs: Sequence[Slab]) -> None:
        self._rank = rank
        self._slabs = slabs
        self._slots = {id(slab): slot for slot, slab in enumerate(slabs)}
        self._sockets: dict[int, socket.socket] = {}
        self._turns: dict[int, asyncio.Lock] = {}
        self._theirs: dict[int, list[Slab]] = {}
        self._offers: dict[tuple[int, int], asyncio.Future[tuple[int, int]]] = {}
        self._taken: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._lost: dict[int, PeerLostError] = {}

    @property
    def slabs(self) -> Sequence[Slab]:
        """Memory that the other ranks see."""
        return self._slabs

    @property
    def peers(self) -> set[int]:
        """The ranks that are connected."""
        return set(self._sockets)

    async def connect(self, world_size: int, token: str, descriptor: int) -> None:
        """Connect to all other ranks, and map their memory. Lower ranks are called, higher call."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(0)
            listener.bind(f"\0ckptio-{token}-{self._rank}")
            listener.listen(world_size)
            all_here = asyncio.Event()
            async with Siblings() as group:
                meeting = self._meet_all(listener, world_size, token, descriptor, all_here)
                task = group.create_task(meeting, name="meet ranks")
                await all_here.wait()
                task.cancel()

    async def _meet_all(
        self,
        listener: socket.socket,
        world_size: int,
        token: str,
        descriptor: int,
        all_here: asyncio.Event,
    ) -> None:
        """Call some and answer others, each in a task of its own: who says nothing keeps no other.

        Whoever comes to the door has the task that let them in: it closes what it does not keep.
        """

        async def meet(connection: socket.socket) -> None:
            await self._meet(connection, descriptor)
            if len(self._sockets) == world_size - 1:
                all_here.set()

        async def call(other: int) -> None:
            await meet(await _call(f"\0ckptio-{token}-{other}"))

        async def answer() -> None:
            await readable(listener)
            connection, _ = listener.accept()
            group.create_task(answer(), name="answer the door")
            await meet(connection)

        async with Siblings() as group:
            for other in range(self._rank):
                group.create_task(call(other), name=f"call rank {other}")
            group.create_task(answer(), name="answer the door")

    async def _meet(self, connection: socket.socket, descriptor: int) -> None:
        """Exchange ranks and memory over a new connection; drop it if it is another user's.

        Raises:
            OSError: This rank lacks what it takes to see the other one's memory: files, memory.
        """
        try:
            connection.settimeout(0)
            packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(packed)[1] != os.getuid():
                connection.close()
                return
            hello = _HELLO.pack(self._rank, len(self._slabs), len(self._slabs[0].view))
            async with Siblings() as group:  # each may have to wait for the other, on other ranks
                group.create_task(_send(connection, hello, descriptor), name="show memory")
                peer = await self._see(connection)
        except (OSError, struct.error, IndexError, ValueError, OverflowError) as error:
            connection.close()  # it never was one of ours, or is gone: it is missed in the end
            if isinstance(error, OSError) and error.errno in _OWN_LIMITS:
                raise
            return
        except BaseException:
            connection.close()
            raise
        self._sockets[peer] = connection
        self._turns[peer] = asyncio.Lock()

    async def _see(self, connection: socket.socket) -> int:
        """Map the memory of whoever is connected; gives its rank."""
        await readable(connection)
        data, descriptors, flags, _ = socket.recv_fds(connection, _HELLO.size, 1)
        try:
            if flags & socket.MSG_CTRUNC and not descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            peer, num_slabs, slab_nbytes = _HELLO.unpack(data)
            self._theirs[peer] = _map(descriptors[0], num_slabs, slab_nbytes)
        finally:
            for received in descriptors:
                os.close(received)
        return int(peer)

    async def listen(self, peer: int) -> None:
        """Take the words of a rank until it goes. Run by `shared_link`."""
        loop = asyncio.get_running_loop()
        data = b""
        try:
            while chunk := await loop.sock_recv(self._sockets[peer], 4096):
                data += chunk
                usable = len(data) // _WORD.size * _WORD.size
                for slot, tag, nbytes in _WORD.iter_unpack(data[:usable]):
                    self._hear(peer, slot, tag, nbytes)
                data = data[usable:]
        except OSError:  # it is gone, or this link is broken off: said below
            pass
        self._lose(peer)

    def _hear(self, peer: int, slot: int, tag: int, nbytes: int) -> None:
        """Take a word of a rank: that it sends something, or has looked at what was sent."""
        if slot != _TAKEN:
            offer = self._offer(peer, tag)
            if not offer.done():
                offer.set_result((slot, nbytes))
        elif (taken := self._taken.get((peer, tag))) and not taken.done():
            taken.set_result(None)

    async def send(self, ranks: Sequence[int], tag: int, slab: Slab, nbytes: int) -> None:
        """Let other ranks look at the start of a slab; see `BulkLink`."""
        slot = self._slots[id(slab)]
        keys = [(rank, tag) for rank in ranks]
        loop = asyncio.get_running_loop()
        try:
            for rank in ranks:
                self._require(rank)
                self._taken[rank, tag] = loop.create_future()
            for rank in ranks:
                await self._say(rank, slot, tag, nbytes)
            for key in keys:
                await self._taken[key]
        except BaseException:
            self.break_off()
            raise
        finally:
            for key in keys:
                self._taken.pop(key, None)

    @contextlib.asynccontextmanager
    async def receive(
        self, rank: int, tag: int, room: Slab | None, nbytes: int
    ) -> AsyncIterator[Slab]:
        """Look at what a rank sends, where it lies; see `BulkLink`."""
        assert room is None  # noqa: S101  # nothing is copied
        try:
            self._require(rank)
            slot, offered_nbytes = await self._offer(rank, tag)
            if offered_nbytes != nbytes or slot >= len(self._theirs[rank]):
                self._lose(rank, "it sent something else than was planned")
                self._require(rank)
            yield self._theirs[rank][slot]
            self._require(rank)
            await self._say(rank, _TAKEN, tag, nbytes)
        except BaseException:
            self.break_off()
            raise
        finally:
            self._offers.pop((rank, tag), None)

    def break_off(self) -> None:
        """End all connections; whoever waits on either side is told."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # it may be gone already
                connection.shutdown(socket.SHUT_RDWR)
        for peer in self._sockets:
            self._lose(peer)

    async def close(self) -> None:
        """Let go of everything. No operation may be under way."""
        for connection in self._sockets.values():
            connection.close()
        for slab in [*self._slabs, *(slab for slabs in self._theirs.values() for slab in slabs)]:
            slab.close()

    def _offer(self, rank: int, tag: int) -> asyncio.Future[tuple[int, int]]:
        """Give what becomes known of a message, whichever is first: it or who wants it."""
        if (rank, tag) not in self._offers:
            self._offers[rank, tag] = asyncio.get_running_loop().create_future()
        return self._offers[rank, tag]

    async def _say(self, rank: int, slot: int, tag: int, nbytes: int) -> None:
        word = _WORD.pack(slot, tag, nbytes)
        try:
            async with self._turns[rank]:  # two lanes must not mix theirs
                await asyncio.get_running_loop().sock_sendall(self._sockets[rank], word)
        except OSError:
            self._lose(rank)
            self._require(rank)

    def _require(self, rank: int) -> None:
        """Raise if a rank is gone."""
        if rank in self._lost:
            raise self._lost[rank]

    def _lose(self, rank: int, problem: str = "it went away") -> None:
        """Tell everybody who waits for a rank that it is gone."""
        error = self._lost.setdefault(
            rank,
            PeerLostError(f"the exchange with rank {rank} broke off: {problem}", ranks=(rank,)),
        )
        for futures in (self._offers, self._taken):
            for (peer, _), future in futures.items():
                if peer == rank and not future.done():
                    future.set_exception(error)
                    future.exception()  # there may be nobody who waits for it


async def _call(name: str) -> socket.socket:
    """Connect to a rank, however long it takes to come."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(0)
            connection.connect(name)  # at once, or not; loops take a full door for a connection
        except (ConnectionRefusedError, BlockingIOError):
            connection.close()
            await asyncio.sleep(_RETRY_S)
        except BaseException:
            connection.close()
            raise
        else:
            return connection


async def _send(connection: socket.socket, data: bytes, descriptor: int) -> None:
    """Send a few bytes, which never blocks, and a descriptor, when it may be under way as well.

    A user has no more descriptors under way at a time than a process may open, those of all ranks
    on the machine together; each is until its taker has come for it.
    """
    while True:
        try:
            socket.send_fds(connection, [data], [descriptor])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            await asyncio.sleep(_RETRY_S)
        else:
            return
