"""A link over a gloo process group of our own.

It has nothing to do with the trainer's default group: another store, other connections,
other threads, so that a load in the background neither waits for the trainer's collectives
nor gets between them.

What gloo does, measured with torch 2.13, and what follows from it:

- `send` and `recv` alias the memory of a tensor, and a message moves when both sides have
  asked for it. So nothing piles up, and a slab goes out without a copy of ours.
- Several threads may send and receive at a time; tags keep messages apart.
- A work has neither a future nor a way to ask whether it is done: every wait takes a
  thread. They are threads of the link's own, since one that waits for another rank must not
  keep a read waiting that this rank waits for.
- A peer that dies is noticed at once by whoever waits for a message that has not begun. One
  that freezes is not: the ranks of the group watch each other by other means, and cancel.
- `abort()` does not wake who waits. A wait that runs out of time does: it closes every
  connection of the group, and waits end. So this is how a cancelled operation lets go
  of its slab, and why it breaks the link.
- Whoever waits for a message of which a part has come, or was written, is not told that its
  connection was closed, whoever did that: its wait never ends. But nothing looks at its memory
  any more, so such a wait is left to itself, with its thread.
- Between two processes of one machine it moves about 2 GB/s.
- Nothing stops a group that is being connected: it waits as long as it was told to, and for the
  answer of a store whose process is frozen without an end. So ranks connect only when all have
  come, which they wait for by other means, and a thread that waits all the same is abandoned, as
  of the job's store. It has no memory of anybody's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ckptio._aio import outlive, run_blocking
from ckptio._own_thread import in_own_thread
from ckptio._threads import Threads
from ckptio.errors import PeerLostError
from ckptio.ranks.store_thread import StoreThread, StoreTimeoutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from ckptio.staging.pool import Slab

#: Waits at a time. More than an exchange has lanes: one that found no thread could be the
#: one for which all others wait, on some rank.
_MAX_WAITS = 64
_LAST_TAG = 2**31 - 1
#: Who watches over the ranks cancels a wait that has become pointless.
_FOR_EVER = timedelta(days=30)
_AT_ONCE = timedelta(milliseconds=1)
_FIRST_PAUSE_S = 0.001
_MAX_PAUSE_S = 0.1
#: How soon waits end that end at all when all connections are closed.
_ENDS_WITHIN_S = 1.0
#: How gloo says that a wait ran out of time. Should it say that otherwise, more ranks are tried.
_TIMED_OUT = "Timed out"


class StoreAddress(NamedTuple):
    """Where the ranks of a link find each other.

    Attributes:
        host: Name or address of the machine.
        port: Port of the store.
    """

    host: str
    port: int


def is_available() -> bool:
    """Whether this build of torch has gloo."""
    return dist.is_available() and dist.is_gloo_available()


@contextlib.asynccontextmanager
async def serve_store(host: str, timeout_s: float) -> AsyncIterator[StoreAddress]:
    """Run the store of a link, on rank 0, for the length of the block.

    Leave it when all ranks have left their links.

    Args:
        host: Under which name or address the other ranks reach this one.
        timeout_s: For how long a rank waits for the others.
    """

    def make() -> c10d.TCPStore:
        return c10d.TCPStore(
            host,
            0,  # any free port
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )

    store = await in_own_thread(make)
    try:
        yield StoreAddress(host, store.port)
    finally:
        del store


@contextlib.asynccontextmanager
async def gloo_link(
    rank: int,
    world_size: int,
    address: StoreAddress,
    own_host: str,
    timeout_s: float,
    *,
    peer_timeout_s: float,
) -> AsyncIterator[GlooLink]:
    """Open a link; every rank of the group does so.

    Leave the block when every rank is through with what it sends and takes: a rank that
    goes before others are done looks to them like one that died.

    Args:
        rank: This rank.
        world_size: Ranks of the group, at least 2.
        address: The store that rank 0 runs.
        own_host: Name or address under which the others reach this rank.
        timeout_s: For how long to wait for ranks that do not come.
        peer_timeout_s: For how long to wait for an answer of one that is there. A cancellation
            is raised some seconds later at the most.

    Raises:
        PeerLostError: Not all ranks came in time.
    """
    answer_s = min(timeout_s, peer_timeout_s)
    meeting = _Meeting(rank, world_size, address, own_host, timeout_s, answer_s)
    until_s = asyncio.get_running_loop().time() + timeout_s + peer_timeout_s
    thread = StoreThread(until_s, meeting.stop.set)
    try:
        group = await thread.ask(meeting.connect)
    except (RuntimeError, StoreTimeoutError) as error:
        raise PeerLostError(
            f"the ranks of the group could not be connected for the exchange of what they"
            f" load, over {address.host}:{address.port}: {_first_line(error)}",
            ranks=(),
        ) from error
    finally:
        thread.close()
    link = GlooLink(rank, world_size, group)
    del group  # the link's alone, which closes its connections
    try:
        yield link
    finally:
        await link.close()


class _Group(Protocol):
    """What is used of `ProcessGroupGloo`; torch's own stub leaves it out."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work: ...


@dataclass(frozen=True, slots=True)
class _Meeting:
    """How a rank finds the others, and is connected to them. All of it blocks.

    Attributes (the others are arguments of `gloo_link`):
        answer_s: For how long to wait for an answer of a rank that is there.
        stop: Set by whoever waits for this no longer.
    """

    rank: int
    world_size: int
    address: StoreAddress
    own_host: str
    timeout_s: float
    answer_s: float
    stop: threading.Event = field(default_factory=threading.Event)

    def connect(self) -> _Group:
        """Wait for all other ranks, and connect to them.

        Raises:
            RuntimeError: They did not come, or were lost, or `stop` was set.
        """
        host, port = self.address
        answer = timedelta(seconds=self.answer_s)
        store = c10d.TCPStore(host, port, is_master=False, timeout=answer, wait_for_workers=False)
        self._await_all(store)
        gloo: Any = c10d.ProcessGroupGloo  # options are an argument that the stub leaves out
        options = gloo._Options()  # noqa: SLF001  # the name under which torch itself uses it
        options._timeout = answer  # noqa: SLF001  # as above
        options._devices = [gloo.create_device(hostname=self.own_host)]  # noqa: SLF001  # as above
        options._threads = 1  # noqa: SLF001  # for collectives, which nobody calls
        shared = c10d.PrefixStore("ckptio", store)
        group: _Group = gloo(shared, self.rank, self.world_size, options)
        return group

    def _await_all(self, store: c10d.TCPStore) -> None:
        """Wait until all ranks are there. By asking again and again: a store's wait has no end."""
        until_s, pause_s = time.monotonic() + self.timeout_s, _FIRST_PAUSE_S
        num_here = store.add("here", 1)
        while num_here < self.world_size:
            if time.monotonic() > until_s:
                missing = self.world_size - num_here
                raise RuntimeError(f"{missing} of {self.world_size} ranks did not come in time")
            if self.stop.wait(pause_s):
                raise RuntimeError("nobody waits for it any more")
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            num_here = store.add("here", 0)


class GlooLink:
    """A `BulkLink` over a gloo process group. Made by `gloo_link`."""

    def __init__(self, rank: int, world_size: int, group: _Group) -> None:
        self._group: _Group | None = group
        self._threads = Threads(_MAX_WAITS, "ckptio-exchange")
        self._peers = [(rank + step) % world_size for step in range(1, world_size)]
        self._is_broken = False
        self._why_broken = _BROKEN
        self._loop = asyncio.get_running_loop()
        self._all_closed: asyncio.Future[None] = self._loop.create_future()
        self._has_stuck = False  # some thread, in a wait that never ends
        self._lost: tuple[int, ...] = ()  # nobody, if it was a cancellation

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """It sends from any memory."""
        return ()

    async def send(self, ranks: Sequence[int], tag: int, slab: Slab, nbytes: int) -> None:
        """Send the start of a slab to other ranks; see `BulkLink`."""

        def carry(group: _Group) -> None:
            with _lent(slab, nbytes) as tensor:
                self._wait(lambda rank: group.send([tensor], rank, tag), ranks)

        await self._carry(carry)

    @contextlib.asynccontextmanager
    async def receive(
        self, rank: int, tag: int, room: Slab | None, nbytes: int
    ) -> AsyncIterator[Slab]:
        """Take what a rank sends; see `BulkLink`."""
        assert room is not None  # noqa: S101  # the link has no slabs of its own
        slab = room

        def carry(group: _Group) -> None:
            with _lent(slab, nbytes) as tensor:
                self._wait(lambda rank: group.recv([tensor], rank, tag), (rank,))

        await self._carry(carry)
        yield slab

    async def _carry(self, carry: Callable[[_Group], None]) -> None:
        """Run a transfer on a thread, and break the link if it is cancelled meanwhile."""
        group = self._group
        if group is None or self._is_broken:
            raise PeerLostError(self._why_broken, ranks=self._lost)
        call = self._loop.run_in_executor(self._threads, carry, group)
        ending = asyncio.ensure_future(self._end_of(call))
        failure: BaseException | None = None
        try:
            failure = await outlive(ending, on_cancel=self._break_off)
            if isinstance(failure, RuntimeError):  # or what had broken the link has ended it, too
                raise PeerLostError(self._why_broken, ranks=self._lost) from failure
            if failure is not None:
                raise failure
        finally:
            del call, ending, failure  # it refers to this frame: no reference cycle

    async def _end_of(self, call: asyncio.Future[None]) -> BaseException | None:
        """Wait until a transfer has let go of its memory; give what it failed of."""
        try:
            await asyncio.wait((call, self._all_closed), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                await asyncio.wait((call,), timeout=_ENDS_WITHIN_S)
            if call.done():
                return call.exception()
            self._has_stuck = True
            call.cancel()  # the thread goes on; the loop, which may be gone then, hears nothing
            return RuntimeError("its connection was closed")
        finally:
            del call  # as above

    def _wait(self, begin: Callable[[int], dist.Work], ranks: Sequence[int]) -> None:
        """Begin messages, and wait for all of them: the memory is the caller's again afterwards."""
        works: list[tuple[int, dist.Work]] = []
        failure: RuntimeError | None = None
        for rank in ranks:
            try:
                works.append((rank, begin(rank)))
            except RuntimeError as error:  # it has gone, and gloo knows that already
                failure = error
                self._lose(error, rank)
                break
        for rank, work in works:
            try:
                work.wait(_FOR_EVER)
            except RuntimeError as error:
                failure = failure or error
                self._lose(error, rank)
        try:
            if failure is not None:
                raise failure
        finally:
            del failure, works  # it refers to this frame: no reference cycle

    def _lose(self, error: RuntimeError, rank: int) -> None:
        """Break the link for a rank that was lost, and keep why: all transfers say it.

        Not for one that failed behind that: it was ended.
        """
        if not self._is_broken:
            why = _first_line(error)
            self._lost = (rank,)
            self._why_broken = f"the exchange with rank {rank} broke off: {why}"
        self._break_off()

    def _break_off(self) -> None:
        """End every wait of this rank. Blocks for a millisecond, or some where ranks have gone.

        A wait that runs out of time does that; there is none for a rank that has gone, though.
        """
        if self._is_broken or self._group is None:
            return
        self._is_broken = True
        nowhere = torch.empty(1, dtype=torch.uint8, device="cpu")
        for rank in self._peers:
            try:  # it never comes: that is the point
                self._group.recv([nowhere], rank, _LAST_TAG).wait(_AT_ONCE)
            except RuntimeError as error:
                if _TIMED_OUT in str(error):  # and the others are closed, too
                    break
        with contextlib.suppress(RuntimeError):  # the loop has ended, so nobody waits
            self._loop.call_soon_threadsafe(self._tell_all_closed)

    def _tell_all_closed(self) -> None:
        if not self._all_closed.done():
            self._all_closed.set_result(None)

    async def close(self) -> None:
        """Close all connections. No operation may be under way."""
        groups = [self._group]
        self._group = None
        try:
            await run_blocking(self._threads, groups.clear)
        finally:
            self._threads.shutdown(wait=not self._has_stuck)


_BROKEN = "the exchange was broken off before; load again"


@contextlib.contextmanager
def _lent(slab: Slab, nbytes: int) -> Iterator[torch.Tensor]:
    """View the start of a slab as a tensor, for as long as its lease lasts.

    By its address: a wait that is left to itself does not keep the slab from being closed.
    """
    memory = (ctypes.c_ubyte * nbytes).from_address(slab.address)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    yield tensor
    del tensor


def _first_line(error: BaseException) -> str:
    """Give what gloo says, without its advice."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
