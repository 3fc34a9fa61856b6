"""How the engines of a job find each other: through a store that all of them reach.

Rank 0 listens on a free port and writes into the store where, and a token; the others read
that and connect. After that nobody needs the store: a job that destroys its process group
keeps its engines.

The n-th engine that a rank opens on a group meets the n-th of every other rank, failures aside:
a process opens one after another (see `turns`), rank 0 waits with each until all have come, and the
others look for where rank 0 waits now. Nobody counts but rank 0.
Where nobody answers, another program does, or rank 0 goes before all have come, a rank looks
again: the address may be that of an earlier attempt, which was killed, and the next be on its
way. A rank 0 that gives up leaves a note in the place of its address, and who comes too late
does not wait long for it. `board` has what the store says, and why no count of the others, or
of torchrun, is trusted.

A rank 0 of an earlier attempt that lives on and waits may take ranks of the next one. They go over
to a newer one as soon as they see it; one that has met all the others before there is a newer one
cannot be told from the right one, and the newer one says then who did not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio.errors import PeerLostError, RankError
from ckptio.ranks import frames
from ckptio.ranks.board import Board, Sight, process_began_s, this_process
from ckptio.ranks.coordinator import Coordinator
from ckptio.ranks.host import addresses_towards, listen_everywhere, this_host
from ckptio.ranks.member import Member
from ckptio.ranks.store_thread import StoreThread, StoreTimeoutError
from ckptio.ranks.turns import is_next, turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from concurrent.futures import Executor

    from ckptio.ranks.board import Meeting, Store
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
#: How often a rank that waits for others looks whether it waits with the right rank 0.
_WATCH_S = 5.0


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
        PeerLostError: Ranks did not come in time; it names them. Rank 0, where the store does
            not answer, through which it is met.
        RankError: The store cannot be used, or an earlier call takes too long.
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
        return await _Search(place, board, store, deadlines, until_s).follow()
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


def _store_host(store: object) -> str:
    """Name the machine that has a store, where the store knows."""
    while not isinstance(getattr(store, "host", None), str):
        store = getattr(store, "underlying_store", None)
        if store is None:
            return ""
    return str(store.host)  # type: ignore[attr-defined]  # it was there just now


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
        listener = await run_blocking(executor, listen_everywhere, place.world_size)
        server = await loop.create_server(group.guest, sock=listener, backlog=place.world_size)
        try:
            addresses = place.addresses
            if addresses is None:
                near = _store_host(board.store)
                addresses = await run_blocking(executor, addresses_towards, near)
            await store.ask(board.invite, [*addresses], listener.getsockname()[1], token)
            await group.gather(max(0.0, until_s - loop.time()))
        finally:
            server.close()
        await store.ask_briefly(board.end)
    except BaseException as error:
        if isinstance(error, Exception):
            gone = str(error)
        try:
            await group.close()
        finally:
            with contextlib.suppress(RuntimeError, OSError):  # the first error is the news
                await store.ask(board.end, gone)
        raise
    return group


@dataclass(frozen=True, slots=True)
class _Search:
    """How a rank other than 0 finds rank 0. `until_s` is by the loop's clock."""

    place: Place
    board: Board
    store: StoreThread
    deadlines: Deadlines
    until_s: float

    async def follow(self) -> Member:
        """Look where rank 0 waits, go there, and wait for all; again, if that came to nothing.

        By asking again and again, ever less often: a store that is told to wait keeps its
        connection, and the trainer's next call with it.
        """
        loop = asyncio.get_running_loop()
        heard, began_s = await self.store.ask(self.board.heard), process_began_s()
        pause_s, since_s, state = _FIRST_PAUSE_S, loop.time(), Sight()
        trouble: RankError | None = None
        while True:
            sight = await self.store.ask(self.board.look)
            if state != (state := sight):
                pause_s, since_s, trouble = _FIRST_PAUSE_S, loop.time(), None
            meeting = sight.meeting
            if meeting.port:
                found = await self._enter(sight.number, meeting)
                if isinstance(found, Member):
                    return found
                trouble = found
            is_news = sight.number > heard and meeting.at_s >= began_s
            end_s = self.until_s
            if is_news:
                end_s = min(end_s, since_s + _patience_s(meeting, self.deadlines))
            if loop.time() >= end_s:
                if is_news and meeting.gone:
                    await self.store.ask_briefly(self.board.hear, sight.number)
                    raise _departure(meeting.gone)
                raise trouble if is_news and trouble else _absence(self.deadlines.meet_s)
            await asyncio.sleep(min(pause_s, end_s - loop.time()))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _enter(self, number: int, meeting: Meeting) -> Member | RankError:
        """Go where somebody seems to wait, and wait for all.

        Returns:
            The group, open, or what to say of it if nothing better is found.

        Raises:
            PeerLostError: Rank 0 is there, and says who is not.
        """
        near = ["127.0.0.1"] if meeting.host == self.board.host else []
        host = _store_host(self.board.store)  # one more place to look: it is mostly there
        reasons = []
        for address in dict.fromkeys([*near, *meeting.addresses, *([host] if host else [])]):
            place = self.place  # a new member for each: one that was cut off is of no more use
            group = Member(
                place.rank, place.world_size, meeting.token, self.deadlines, self.board.host
            )
            try:
                reason = await self._knock(group, address, meeting.port)
                if not reason:
                    await self._wait(group, meeting)
                    return group
            except PeerLostError as error:
                await group.close()
                if not group.was_told:
                    return error
                await self.store.ask_briefly(self.board.hear, number)
                raise
            except BaseException:
                await group.close()
                raise
            await group.close()
            reasons.append(f"{address}: {reason}")
        return _loss(meeting, f"cannot be reached on port {meeting.port} ({'; '.join(reasons)})")

    async def _knock(self, group: Member, address: str, port: int) -> str:
        """Try to be taken; say why not."""
        loop = asyncio.get_running_loop()

        def connect(make: Callable[[], Wire]) -> Awaitable[object]:
            return loop.create_connection(make, address, port)

        return await group.knock(connect, min(_KNOCK_S, self.deadlines.peer_s))

    async def _wait(self, group: Member, meeting: Meeting) -> None:
        """Wait for all, and look meanwhile whether another process has become rank 0.

        Raises:
            PeerLostError: It has, or rank 0 went away, or said who did not come.
        """
        loop = asyncio.get_running_loop()
        # rank 0 says who did not come; it may have begun to wait a moment after this rank
        end_s = max(loop.time(), self.until_s) + self.deadlines.peer_s
        while not await group.has_news(min(_WATCH_S, end_s - loop.time())):
            if loop.time() >= end_s:
                raise _loss(meeting, f"it did not begin within {self.deadlines.meet_s:g} s")
            sight = await self.store.ask_briefly(self.board.look)
            if sight is not None and sight.meeting.process != meeting.process:
                raise _loss(meeting, "another process has become rank 0")
        await group.gather(self.deadlines.peer_s)


def _patience_s(meeting: Meeting, deadlines: Deadlines) -> float:
    """Say for how long a rank 0 of this attempt may be as it is seen."""
    if meeting.gone:
        return _GRACE_S
    return deadlines.peer_s if meeting.port else deadlines.meet_s


def _absence(meet_s: float) -> RankError:
    """Say that rank 0 is not there."""
    return frames.absence([0], meet_s).error()


def _departure(gone: str) -> RankError:
    """Say that rank 0 was there and has gone."""
    return PeerLostError(
        f"rank 0 waits no longer: {gone}; open the engines of all ranks again",
        ranks=[0],
        causes={0: gone},
    )


def _loss(meeting: Meeting, cause: str) -> RankError:
    """Say that rank 0 seems to be there, and what is wrong with it."""
    causes = {0: frames.lost_cause(meeting.host, cause)}
    return frames.loss("joining the group", [0], causes).error()
