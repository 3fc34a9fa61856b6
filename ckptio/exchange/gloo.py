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
- A peer that dies is noticed at once by whoever waits for it. One that freezes is not: the
  ranks of the group watch each other by other means, and cancel.
- `abort()` does not wake who waits. A wait that runs out of time does: it closes every
  connection of the group, and all waits end. So this is how a cancelled operation lets go
  of its slab, and why it breaks the link.
- Between two processes of one machine it moves about 2 GB/s.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ckptio._aio import outlive, run_blocking
from ckptio._own_thread import in_own_thread
from ckptio._threads import Threads
from ckptio.errors import PeerLostError, name_ranks

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
    rank: int, world_size: int, address: StoreAddress, own_host: str, timeout_s: float
) -> AsyncIterator[GlooLink]:
    """Open a link; every rank of the group does so.

    Leave the block when every rank is through with what it sends and takes: a rank that
    goes before others are done looks to them like one that died.

    Args:
        rank: This rank.
        world_size: Ranks of the group, at least 2.
        address: The store that rank 0 runs.
        own_host: Name or address under which the others reach this rank.
        timeout_s: For how long to wait for ranks that do not come. A cancellation
            meanwhile is raised only then.

    Raises:
        PeerLostError: Not all ranks came in time.
    """
    try:
        group = await in_own_thread(
            lambda: _make_group(rank, world_size, address, own_host, timeout_s)
        )
    except RuntimeError as error:
        raise PeerLostError(
            f"the ranks of the group could not be connected for the exchange of what they"
            f" load, over {address.host}:{address.port}: {_first_line(error)}",
            ranks=(),
        ) from error
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


def _make_group(
    rank: int, world_size: int, address: StoreAddress, own_host: str, timeout_s: float
) -> _Group:
    """Connect to all other ranks. Blocks until they have come."""
    timeout = timedelta(seconds=timeout_s)
    store = c10d.TCPStore(
        address.host, address.port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    gloo: Any = c10d.ProcessGroupGloo  # options are an argument that the stub leaves out
    options = gloo._Options()  # noqa: SLF001  # the name under which torch itself uses it
    options._timeout = timeout  # noqa: SLF001  # as above
    options._devices = [gloo.create_device(hostname=own_host)]  # noqa: SLF001  # as above
    options._threads = 1  # noqa: SLF001  # for collectives, which nobody calls
    group: _Group = gloo(c10d.PrefixStore("ckptio", store), rank, world_size, options)
    return group


class GlooLink:
    """A `BulkLink` over a gloo process group. Made by `gloo_link`."""

    def __init__(self, rank: int, world_size: int, group: _Group) -> None:
        self._group: _Group | None = group
        self._threads = Threads(_MAX_WAITS, "ckptio-exchange")
        self._peers = [(rank + step) % world_size for step in range(1, world_size)]
        self._is_broken = False
        self._why_broken = _BROKEN

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """It sends from any memory."""
        return ()

    async def send(self, ranks: Sequence[int], tag: int, slab: Slab, nbytes: int) -> None:
        """Send the start of a slab to other ranks; see `BulkLink`."""

        def carry(group: _Group) -> None:
            with _lent(slab, nbytes) as tensor:
                self._wait(lambda rank: group.send([tensor], rank, tag), ranks)

        await self._carry(carry, ranks)

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

        await self._carry(carry, (rank,))
        yield slab

    async def _carry(self, carry: Callable[[_Group], None], ranks: Sequence[int]) -> None:
        """Run a transfer on a thread, and break the link if it is cancelled meanwhile."""
        group = self._group
        if group is None or self._is_broken:
            raise PeerLostError(self._why_broken, ranks=ranks)
        loop = asyncio.get_running_loop()
        try:
            await outlive(
                loop.run_in_executor(self._threads, carry, group), on_cancel=self._break_off
            )
        except RuntimeError as error:  # or what had broken the link has ended it, too
            raise PeerLostError(self._why_broken, ranks=ranks) from error

    def _wait(self, begin: Callable[[int], dist.Work], ranks: Sequence[int]) -> None:
        """Begin messages, and wait for all of them: the memory is the caller's again afterwards."""
        works: list[dist.Work] = []
        failure: RuntimeError | None = None
        try:
            for rank in ranks:
                works.append(begin(rank))  # noqa: PERF401  # what has begun is waited for
        except RuntimeError as error:  # it has gone, and gloo knows that already
            failure = error
            self._lose(error, ranks)
        for work in works:
            try:
                work.wait(_FOR_EVER)
            except RuntimeError as error:
                failure = failure or error
                self._lose(error, ranks)
        try:
            if failure is not None:
                raise failure
        finally:
            del failure, works  # it refers to this frame: no reference cycle

    def _lose(self, error: RuntimeError, ranks: Sequence[int]) -> None:
        """Break the link for a transfer that failed, and keep why: all others say it, too.

        Not for one that failed behind that: it was ended.
        """
        if not self._is_broken:
            why = _first_line(error)
            self._why_broken = f"the exchange with {name_ranks(ranks)} broke off: {why}"
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
                    return

    async def close(self) -> None:
        """Close all connections. No operation may be under way."""
        groups = [self._group]
        self._group = None
        try:
            await run_blocking(self._threads, groups.clear)
        finally:
            self._threads.shutdown()


_BROKEN = "the exchange was broken off before; load again"


@contextlib.contextmanager
def _lent(slab: Slab, nbytes: int) -> Iterator[torch.Tensor]:
    """View the start of a slab as a tensor, for as long as its lease lasts."""
    with slab.view[:nbytes] as view:
        tensor = torch.frombuffer(view, dtype=torch.uint8)
        yield tensor
        del tensor


def _first_line(error: BaseException) -> str:
    """Give what gloo says, without its advice."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
