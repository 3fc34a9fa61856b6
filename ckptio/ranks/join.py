"""How the engines of a job find each other: through a store that all of them reach.

Rank 0 listens on a free port and writes into the store where, and a token; the others read
that and connect. After that nobody needs the store: a job that destroys its process group
keeps its engines.

The n-th engine that a rank opens on a group meets the n-th of every other rank, failures aside:
a process opens one after another (see `turns`), rank 0 waits with each until all have come, and the
others look for where rank 0 waits now. Nobody counts but rank 0.
A rank 0 that gives up leaves a note in the place of its address. `search` has how the others look,
`board` what the store says, and why no count of theirs, or of torchrun, is trusted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio._aio import Siblings, readable, run_blocking
from ckptio.errors import PeerLostError, RankError
from ckptio.ranks import frames
from ckptio.ranks.board import Board, store_host, this_process
from ckptio.ranks.coordinator import Coordinator
from ckptio.ranks.host import (
    addresses_towards,
    listen_everywhere,
    require_descriptors,
    this_host,
)
from ckptio.ranks.search import Search
from ckptio.ranks.store_thread import StoreThread, StoreTimeoutError
from ckptio.ranks.turns import is_next, turns

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from ckptio.ranks.board import Store
    from ckptio.ranks.interface import Deadlines
    from ckptio.ranks.member import Member

_log = logging.getLogger("ckptio")

_TOKEN_NBYTES = 32
#: After so long without the others, the log says who waits for whom.
_PATIENCE_S = 10.0
#: When it is tried again to answer, where the system has too little for that.
_AGAIN_S = 1.0


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
        process: Name of this process, of no other; found out if not given.
    """

    rank: int
    world_size: int
    group: str
    open_store: Callable[[], Store]
    host: str | None = None
    addresses: Sequence[str] | None = None
    process: str | None = None


async def join(place: Place, *, deadlines: Deadlines, executor: Executor) -> Coordinator | Member:
    """Meet the other ranks of a group. Every rank has to call this, as often as the others.

    Where it is called again for the group meanwhile, the second call waits for the first.
    The log has a warning where that takes long: nothing else is heard of it until `meet_s` is over.

    Args:
        place: Where this rank stands, in a world of two or more.
        deadlines: How long is waited for the others: `meet_s`, for all of this.
        executor: Its threads look for addresses; the store is asked on one of its own.

    Returns:
        The group, open. The caller closes it, on the same loop.

    Raises:
        PeerLostError: Ranks did not come in time; it names them. It names rank 0 if the store,
            through which rank 0 is met, does not answer.
        RankError: The store cannot be used, an earlier call takes too long, or rank 0 may not open
            as many files as there are ranks.
        asyncio.CancelledError: The caller was cancelled; nothing is left open.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + deadlines.meet_s
    words = "rank %d waits for the engines of other ranks, up to %g s: all of them have to open one"
    waiting = loop.call_later(_PATIENCE_S, _log.warning, words, place.rank, deadlines.meet_s)
    try:
        queue = (place.process or this_process(), place.group, place.world_size, place.rank)
        with turns.queue(queue) as ahead:
            if not await is_next(ahead, until_s - loop.time()):
                raise _queue_is_stuck(deadlines.meet_s)
            return await _meet(place, deadlines, executor, until_s)
    finally:
        waiting.cancel()


async def _meet(
    place: Place, deadlines: Deadlines, executor: Executor, until_s: float
) -> Coordinator | Member:
    """Meet the others when it is this one's turn; see `join`. `until_s` is by the loop's clock."""
    store = StoreThread(until_s)
    try:
        board = await store.ask(_open_board, place)
        if place.rank == 0:
            return await _lead(place, board, store, deadlines, executor, until_s)
        return await Search(place, board, store, deadlines, until_s).follow()
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


def _queue_is_stuck(meet_s: float) -> RankError:
    """Say that an engine waits which this process opened before."""
    return RankError(
        f"the engines of the job cannot meet within {meet_s:g} s: another one that this process"
        " opened before still waits for other ranks; every rank has to open as many engines, in"
        " the same order"
    )


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


def _open_board(place: Place) -> Board:
    """Connect to the store; as rank 0, take a number. Ranks of other worlds are not met there."""
    board = Board(
        store=place.open_store(),
        group=f"ckptio/{place.group}/{place.world_size}",
        rank=place.rank,
        process=place.process or this_process(),
        host=place.host or this_host(),
    )
    return board if place.rank else board.opened()


async def _lead(
    place: Place,
    board: Board,
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
        await run_blocking(executor, require_descriptors, place.world_size - 1)
        with listen_everywhere(place.world_size) as listener:
            async with Siblings() as tasks:
                door = tasks.create_task(_answer(listener, group), name="ckptio-answer")
                addresses = place.addresses
                if addresses is None:
                    near = store_host(board.store)
                    addresses = await run_blocking(executor, addresses_towards, near)
                await store.ask(board.invite, [*addresses], listener.getsockname()[1], token)
                await group.gather(max(0.0, until_s - loop.time()), deadlines.meet_s)
                door.cancel()
        await store.ask_briefly(board.end)
    except BaseException as error:
        if isinstance(error, Exception):
            gone = str(error)
        try:
            await group.close()
        finally:  # the first error is the news: whoever is cancelled does not wait for a store
            await store.ask_briefly(board.end, gone)
        raise
    return group


async def _answer(listener: socket.socket, group: Coordinator) -> None:
    """Let in whoever calls, until this is cancelled.

    Where files are opened meanwhile, there may be too few left for that. asyncio's own servers log
    that again and again, as often as there may be callers, and tell nobody else.
    """
    loop = asyncio.get_running_loop()
    listener.settimeout(0)
    while True:
        try:
            await readable(listener)
            connection, _ = listener.accept()
            group.shortage = ""
            connection.settimeout(0)
            await loop.connect_accepted_socket(group.guest, connection)
        except (BlockingIOError, InterruptedError, ConnectionError):  # who called has gone again
            pass
        except OSError as error:
            if not group.shortage:
                _log.warning("rank 0 cannot answer other ranks: %s", error.strerror)
            group.shortage = error.strerror or str(error)
            await asyncio.sleep(_AGAIN_S)
