"""How a rank other than 0 finds rank 0.

It reads in the store where rank 0 waits, and calls there. If nobody answers, if another program
does, or if rank 0 goes away before all ranks have come, it looks again: the address may be that of
an earlier attempt of the job, which was killed, and this attempt's may be about to be written. A
rank that comes after rank 0 has given up waits only `_GRACE_S` for rank 0 to come again.

A rank 0 of an earlier attempt that is still alive may take ranks of this attempt. They leave it
as soon as they see a newer one. If it has met all the others by then, nothing tells it from the
right one; the newer one then fails, and names the ranks that did not come.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio._aio import Siblings
from ckptio.errors import PeerLostError
from ckptio.ranks import frames
from ckptio.ranks.board import Sight, process_began_s, store_host
from ckptio.ranks.member import Member

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ckptio.errors import RankError
    from ckptio.ranks.board import Board, Meeting
    from ckptio.ranks.interface import Deadlines
    from ckptio.ranks.join import Place
    from ckptio.ranks.store_thread import StoreThread
    from ckptio.ranks.wire import Wire

_FIRST_PAUSE_S = 0.005
_MAX_PAUSE_S = 1.0
_KNOCK_S = 10.0
#: Seconds from the try of one address to that of the next, and between looks for a newer rank 0.
_HEAD_START_S = 0.5
#: How long a rank that comes too late waits for rank 0 to come again: it may do at once.
_GRACE_S = 5.0
#: How often a rank that waits for others looks whether it waits with the right rank 0.
_WATCH_S = 5.0


@dataclass(slots=True)
class _Seen:
    """What was seen in the store last, and what came of it.

    Attributes:
        sight: What there is to see.
        since_s: Since when, by the loop's clock.
        is_news: Whether it is of this attempt of the job, as far as anybody can tell: what is there
            from before is passed over, and waited for no less.
        trouble: The error with which a call there ended; `None` if there was none.
    """

    sight: Sight
    since_s: float
    is_news: bool
    trouble: RankError | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """How a rank other than 0 finds rank 0. `until_s` is by the loop's clock."""

    place: Place
    board: Board
    store: StoreThread
    deadlines: Deadlines
    until_s: float

    async def follow(self) -> Member:
        """Look where rank 0 waits, go there, and wait for all; again, if that came to nothing.

        The store is polled, ever less often. Telling it to wait would keep its connection busy,
        and with it the trainer's next call.

        Raises:
            RankError: There was no time left, or what was seen of a rank 0 of this attempt did not
                change for `_patience_s`.
        """
        loop = asyncio.get_running_loop()
        heard, began_s = await self.store.ask(self.board.heard), process_began_s()
        seen, pause_s = _Seen(Sight(), loop.time(), is_news=False), _FIRST_PAUSE_S
        while True:
            sight = await self.store.ask(self.board.look)
            if sight != seen.sight:
                # said in the life of this process, and not of a failure that the rank was told of
                is_news = sight.number > heard and sight.meeting.at_s >= began_s
                seen, pause_s = _Seen(sight, loop.time(), is_news=is_news), _FIRST_PAUSE_S
            # with no time left nobody answers: what an earlier try found says more
            if sight.meeting.port and (seen.trouble is None or loop.time() < self.until_s):
                found = await self._enter(sight.number, sight.meeting)
                if isinstance(found, Member):
                    return found
                if found is None:
                    continue
                if seen.trouble is None or loop.time() < self.until_s:  # else it was cut short
                    seen.trouble = found
            end_s = self.until_s
            if seen.is_news:
                end_s = min(end_s, seen.since_s + _patience_s(sight.meeting, self.deadlines))
            if loop.time() >= end_s:
                raise await self._give_up(seen)
            await asyncio.sleep(min(pause_s, end_s - loop.time()))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _give_up(self, seen: _Seen) -> RankError:
        """Make the error that says why rank 0 was not met."""
        if not seen.is_news:
            return _absence(self.deadlines.meet_s, seen.trouble)
        if seen.sight.meeting.gone:
            await self.store.ask_briefly(self.board.hear, seen.sight.number)
            return _departure(seen.sight.meeting.gone)
        return seen.trouble or _absence(self.deadlines.meet_s, None)

    async def _enter(self, number: int, meeting: Meeting) -> Member | RankError | None:
        """Go where somebody seems to wait, and wait for all.

        Returns:
            The group, open; or the error to raise if nothing better is found; or None if another
            process has become rank 0, and it is to be looked for at once.

        Raises:
            PeerLostError: Rank 0 is there, and says who is not.
        """
        place, host = self.place, store_host(self.board.store)
        near = ["127.0.0.1"] if meeting.host == self.board.host else []
        far = [host] if host else []  # one more place to look: it is mostly there
        members = {  # one for each: one that was cut off is of no more use
            address: Member(
                place.rank, place.world_size, meeting.token, self.deadlines, self.board.host
            )
            for address in [*near, *meeting.addresses, *far]
        }
        group: Member | None = None
        try:
            found = await self._knock_at_all(members, meeting)
            if not isinstance(found, Member):
                return found
            await self._wait(found, meeting)
            group = found
        except PeerLostError as error:
            if not any(member.was_told for member in members.values()):
                return error
            await self.store.ask_briefly(self.board.hear, number)
            raise
        finally:
            async with contextlib.AsyncExitStack() as closing:
                for member in members.values():
                    if member is not group:
                        closing.push_async_callback(member.close)
        return group

    async def _knock_at_all(
        self, members: dict[str, Member], meeting: Meeting
    ) -> Member | RankError | None:
        """Try all addresses, the first ones a little sooner; give the member that was taken.

        A host that has died does not even refuse. So nobody waits for one before the next is
        tried, nor for all of them where another process has become rank 0: None then.
        """
        untried, running = [*reversed(members)], set[asyncio.Task[str]]()
        knocks: dict[asyncio.Task[str], str] = {}
        is_over = False
        async with Siblings() as tasks:
            while (untried or running) and not is_over:
                if untried:
                    address = untried.pop()
                    knock = self._knock(members[address], address, meeting.port)
                    task = tasks.create_task(knock, name=f"ckptio-knock-{address}")
                    knocks[task] = address
                    running.add(task)
                done, running = await asyncio.wait(
                    running, timeout=_HEAD_START_S, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    is_over = not all(task.result() for task in done)
                else:
                    is_over = await self._is_old(meeting)
            for task in running:
                task.cancel()
        reasons = {a: task.result() for task, a in knocks.items() if not task.cancelled()}
        for address, reason in reasons.items():
            if not reason:
                return members[address]
        if is_over:
            return None
        for member in members.values():
            if member.shortage:
                return _shortage(member.rank, member.shortage)
        text = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
        return _loss(meeting, f"cannot be reached on port {meeting.port} ({text})")

    async def _knock(self, group: Member, address: str, port: int) -> str:
        """Try to be taken; say why not."""
        loop = asyncio.get_running_loop()

        def connect(make: Callable[[], Wire]) -> Awaitable[object]:
            return loop.create_connection(make, address, port)

        left_s = max(0.0, self.until_s - loop.time())
        return await group.knock(connect, min(_KNOCK_S, self.deadlines.peer_s, left_s))

    async def _is_old(self, meeting: Meeting) -> bool:
        """Look whether another process has become rank 0. That of the meeting may be slow."""
        sight = await self.store.ask_briefly(self.board.look)
        return sight is not None and sight.meeting.process != meeting.process

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
            if await self._is_old(meeting):
                raise _loss(meeting, "another process has become rank 0")
        await group.gather(self.deadlines.peer_s)


def _patience_s(meeting: Meeting, deadlines: Deadlines) -> float:
    """Say how long to wait while what is seen of a rank 0 of this attempt does not change."""
    if meeting.gone:
        return _GRACE_S
    return deadlines.peer_s if meeting.port else deadlines.meet_s


def _absence(meet_s: float, trouble: RankError | None) -> RankError:
    """Say that rank 0 did not come; or that one from before this process came, with `trouble`."""
    verdict = frames.absence([0], meet_s)
    if trouble is None:
        return verdict.error()
    text = f"{verdict.text}; or it is the one that was here before this process began: {trouble}"
    return PeerLostError(text, ranks=[0], causes=verdict.causes)


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


def _shortage(rank: int, shortage: str) -> RankError:
    """Say that nothing is known of rank 0, for want of a way to call it."""
    text = "where too many files are open, close some or raise the limit (`ulimit -n`)"
    causes = {rank: f"it cannot call rank 0: {shortage}; {text}"}
    return frames.failure("joining the group", causes).error()
