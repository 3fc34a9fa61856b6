"""How the engines of a job find each other: through a store that all of them reach.

Rank 0 listens on a free port and writes into the store where, and a token; the others read
that and connect. After that nobody needs the store: a job that destroys its process group
keeps its engines.

Engines of one group are told apart by counting: the n-th engine that a rank opens on a
group meets the n-th of every other rank. The count is kept in the store, since nothing
else lives as long as the group does. A rank that gives up must not be one behind or ahead of
the others from then on: a rank 0 leaves a note in the place of its address, and who finds
one passes on to the next number, where rank 0 may be waiting again; it does not wait long
for that. A rank that has not found rank 0 gives its number back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from ckptio._aio import run_blocking
from ckptio.errors import PeerLostError, RankError
from ckptio.ranks import frames
from ckptio.ranks.coordinator import Coordinator
from ckptio.ranks.host import addresses_towards, listen_everywhere, this_host
from ckptio.ranks.member import Member
from ckptio.ranks.store_thread import StoreThread, StoreTimeoutError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from concurrent.futures import Executor

    from ckptio.ranks.interface import Deadlines
    from ckptio.ranks.wire import Wire

_log = logging.getLogger("ckptio")

_TOKEN_NBYTES = 32
#: After so long without the others, the log says who waits for whom.
_PATIENCE_S = 10.0
_FIRST_PAUSE_S = 0.005
_MAX_PAUSE_S = 1.0
_KNOCK_S = 10.0
#: How long a rank that comes too late waits for rank 0 to come again: it may do at once.
_GRACE_S = 5.0


class Store(Protocol):
    """A key-value store as c10d has them; `torch.distributed.Store` is one. Blocks."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Get a key that is there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and give its value."""

    def check(self, keys: list[str]) -> bool:
        """Say whether all keys are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands, and where it meets the others.

    Attributes:
        rank: This one.
        world_size: How many there are.
        group: Name of the group, the same on all its ranks, of no other ranks.
        open_store: Connects to the store. Blocks; called on a thread.
        host: Name of this machine; found out if not given.
        addresses: Under which others reach this machine; found out if not given.
    """

    rank: int
    world_size: int
    group: str
    open_store: Callable[[], Store]
    host: str | None = None
    addresses: Sequence[str] | None = None


class _Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where rank 0 listens, or why it does not any more."""

    host: str = ""
    addresses: list[str] = []
    port: int = 0
    token: str = ""
    gone: str = ""


async def join(place: Place, *, deadlines: Deadlines, executor: Executor) -> Coordinator | Member:
    """Meet the other ranks of a group. Every rank has to call this, as often as the others.

    The log has a warning where that takes long: nothing else is heard of it until `meet_s` is over.

    Args:
        place: Where this rank stands, in a world of two or more.
        deadlines: How long is waited for the others: `meet_s`, for all of this.
        executor: Its threads look for addresses; the store is asked on one of its own.

    Returns:
        The group, open. The caller closes it, on the same loop.

    Raises:
        PeerLostError: Ranks did not come in time; it names them. Rank 0, where the store does
            not answer, through which it is met.
        RankError: The store cannot be used.
        asyncio.CancelledError: The caller was cancelled; nothing is left open.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + deadlines.meet_s
    words = "rank %d waits for the engines of other ranks, up to %g s: all of them have to open one"
    waiting = loop.call_later(_PATIENCE_S, _log.warning, words, place.rank, deadlines.meet_s)
    store = StoreThread(until_s)
    try:
        board = await store.ask(_open_board, place)
        if place.rank == 0:
            return await _lead(place, board, store, deadlines, executor, until_s)
        return await _follow(place, board, store, deadlines, until_s)
    except RankError:
        raise
    except StoreTimeoutError as error:
        raise _silence(place.rank, deadlines.meet_s) from error
    except (RuntimeError, OSError) as error:  # what stores raise; torch's are RuntimeErrors
        raise RankError(
            f"the engines of the job cannot meet: {frames.describe(error)}; open the engine"
            " while the job's store is up, or pass ranks='solo'"
        ) from error
    finally:
        store.close()
        waiting.cancel()


def _silence(rank: int, meet_s: float) -> RankError:
    """Say that the store does not answer. Rank 0 is there, if it is this one that says so."""
    text = (
        "the job's store does not answer: the process that hosts it may have died; start the job"
        " again, or pass ranks='solo' where one rank is to work alone"
    )
    if rank == 0:
        return RankError(f"the engines of the job cannot meet within {meet_s:g} s: {text}")
    cause = f"did not come within {meet_s:g} s"
    return PeerLostError(f"rank 0 {cause}, and {text}", ranks=[0], causes={0: cause})


@dataclass(frozen=True, slots=True)
class _Board:
    """The store, and the number under which this engine meets the others. All of it blocks."""

    store: Store
    group: str
    rank: int
    number: int
    host: str

    @property
    def key(self) -> str:
        return f"{self.group}/{self.number}"

    def publish(self, address: _Address) -> None:
        self.store.set(self.key, msgspec.json.encode(address).decode())

    def look(self) -> _Address | None:
        if not self.store.check([self.key]):
            return None
        return msgspec.json.decode(self.store.get(self.key), type=_Address)

    def following(self) -> _Board:
        """Take the next number."""
        number = self.store.add(_counter(self.group, self.rank), 1)
        return dataclasses.replace(self, number=number)

    def give_back(self) -> None:
        """Let the next engine have this number, unless one has a later one already."""
        counter = _counter(self.group, self.rank)
        if self.store.add(counter, 0) == self.number:
            self.store.add(counter, -1)


def _counter(group: str, rank: int) -> str:
    return f"{group}/opened/{rank}"


def _open_board(place: Place) -> _Board:
    """Connect to the store and find out which engine of the group this is."""
    board = _Board(
        place.open_store(), f"ckptio/{place.group}", place.rank, 0, place.host or this_host()
    )
    return board.following()


def _store_host(store: object) -> str:
    """Name the machine that has a store, where the store knows."""
    while not isinstance(getattr(store, "host", None), str):
        store = getattr(store, "underlying_store", None)
        if store is None:
            return ""
    return str(store.host)  # type: ignore[attr-defined]  # it was there just now


async def _lead(
    place: Place,
    board: _Board,
    store: StoreThread,
    deadlines: Deadlines,
    executor: Executor,
    until_s: float,
) -> Coordinator:
    """Listen, say where, and wait for all."""
    loop = asyncio.get_running_loop()
    token = secrets.token_hex(_TOKEN_NBYTES)
    group = Coordinator(place.world_size, token, deadlines, board.host)
    gone = "it was cancelled"
    try:
        listener = await run_blocking(executor, listen_everywhere, place.world_size)
        server = await loop.create_server(group.guest, sock=listener, backlog=place.world_size)
        try:
            addresses = place.addresses
            if addresses is None:
                near = _store_host(board.store)
                addresses = await run_blocking(executor, addresses_towards, near)
            address = _Address(board.host, [*addresses], listener.getsockname()[1], token)
            await store.ask(board.publish, address)
            await group.gather(max(0.0, until_s - loop.time()))
        finally:
            server.close()
    except BaseException as error:
        if isinstance(error, Exception):
            gone = str(error)
        try:
            await group.close()
        finally:
            with contextlib.suppress(RuntimeError, OSError):  # the first error is the news
                await store.ask(board.publish, _Address(gone=gone))
        raise
    return group


async def _follow(
    place: Place, board: _Board, store: StoreThread, deadlines: Deadlines, until_s: float
) -> Member:
    """Look where rank 0 listens, go there, and wait for all."""
    loop = asyncio.get_running_loop()
    board, address = await _find(board, store, until_s, deadlines.meet_s)
    group = Member(place.rank, place.world_size, address.token, deadlines, board.host)
    try:
        await _reach(group, address, board, deadlines, min(until_s, loop.time() + deadlines.peer_s))
        # rank 0 says who did not come; it may have begun to wait a moment after this rank
        await group.gather(max(0.0, until_s - loop.time()) + deadlines.peer_s)
    except BaseException:
        await group.close()
        raise
    return group


async def _find(
    board: _Board, store: StoreThread, until_s: float, meet_s: float
) -> tuple[_Board, _Address]:
    """Wait until rank 0 says where it is; also says under which number.

    By asking again and again, ever less often: a store that is told to wait keeps its
    connection, and the trainer's next call with it.
    """
    loop = asyncio.get_running_loop()
    pause_s = _FIRST_PAUSE_S
    gone = ""
    try:
        while True:
            address = await store.ask(board.look)
            if address is not None and not address.gone:
                return board, address
            if address is not None:
                if not gone:
                    until_s = min(until_s, loop.time() + _GRACE_S)
                gone = address.gone
                board = await store.ask(board.following)
                pause_s = _FIRST_PAUSE_S
            elif loop.time() < until_s:
                await asyncio.sleep(min(pause_s, max(0.0, until_s - loop.time())))
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            else:
                raise _absence(gone, meet_s)  # noqa: TRY301  # the number goes back then, too
    except BaseException:
        with contextlib.suppress(RuntimeError, OSError):  # the first error is the news
            await store.ask(board.give_back)
        raise


def _absence(gone: str, meet_s: float) -> RankError:
    """Say that rank 0 is not there, or was and has gone."""
    if not gone:
        return frames.absence([0], meet_s).error()
    return PeerLostError(
        f"rank 0 waits no longer: {gone}; open the engines of all ranks again",
        ranks=[0],
        causes={0: gone},
    )


async def _reach(
    group: Member, address: _Address, board: _Board, deadlines: Deadlines, until_s: float
) -> None:
    """Connect to rank 0 under one of its addresses."""
    loop = asyncio.get_running_loop()
    near = ["127.0.0.1"] if address.host == board.host else []
    candidates = list(dict.fromkeys([*near, *address.addresses, *_names(board.store)]))
    pause_s = _FIRST_PAUSE_S
    while True:
        reasons = []
        for candidate in candidates:

            def connect(make: Callable[[], Wire], to: str = candidate) -> Awaitable[object]:
                return loop.create_connection(make, to, address.port)

            reason = await group.knock(connect, min(_KNOCK_S, deadlines.peer_s))
            if not reason:
                return
            reasons.append(f"{candidate}: {reason}")
        if loop.time() >= until_s:
            cause = f"cannot be reached on port {address.port} ({'; '.join(reasons)})"
            raise frames.loss(
                "joining the group", [0], {0: frames.lost_cause(address.host, cause)}
            ).error()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _names(store: Store) -> list[str]:
    """Give one more place to look for rank 0: it is mostly where the store is."""
    return [host for host in (_store_host(store),) if host]
