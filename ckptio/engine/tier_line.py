"""Who copies to a second tier, and when: the line of an engine's copies.

At most `max_copies` are under way; a further one waits for its turn, and holds up no save.
Places are taken in the order in which the saves were asked for, on every rank alike, so
that no two ranks each hold what the other one waits for. Of two copies to one place the
later one begins when the earlier one has ended: the newest state is what stays.

Copies share the staging pool with saves, which come first: all copies together hold a
quarter of its slabs at the most, or one if it has fewer than four. So a slow store never keeps a
save from copying, unless the pool has a single slab.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from ckptio.engine.turns import Line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ckptio.engine.tiers import CopyJob

_SHARE = 4


class _Series:
    """The numbers from 1 that are done with, in whatever order they come.

    Attributes:
        first: The lowest number that is not done with.
    """

    def __init__(self) -> None:
        self.first = 1
        self._above: set[int] = set()  # those done with above `first`

    def add(self, number: int) -> None:
        """Take note that a number is done with. Repeatable."""
        if number >= self.first:
            self._above.add(number)
        while self.first in self._above:
            self._above.remove(self.first)
            self.first += 1

    def num_left_below(self, number: int) -> int:
        """Say how many lower numbers are not done with."""
        return sum(each not in self._above for each in range(self.first, number))


class CopyLine:
    """Places, and slabs of the pool, for the copies of an engine. Used from its loop.

    Saves that are to be copied are numbered as they are asked for; the number is a copy's ticket.
    It is used twice: a copy takes its place when every lower number has one, or wants none
    (`turn`); and ranks begin to meet for it when so few lower numbers have not ended that another
    rank may have given it a place (`approach`).

    Args:
        max_copies: Copies under way at a time.
        num_slabs: Slabs of the pool.

    Attributes:
        slabs: Slabs that copies may hold.
        max_slabs: How many these are.
    """

    def __init__(self, max_copies: int, num_slabs: int) -> None:
        self.max_slabs = max(1, num_slabs // _SHARE)
        self.slabs = asyncio.Semaphore(self.max_slabs)
        self._max_copies = max_copies
        self._num_tickets = 0
        self._places = asyncio.Semaphore(max_copies)
        self._targets: Line[str] = Line()
        self._passed, self._ended = _Series(), _Series()
        #: Tickets that wait in `turn` and in `approach`.
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._coming: dict[int, asyncio.Future[None]] = {}

    def enter(self, job: CopyJob) -> None:
        """Give a copy the next ticket, which `end` takes back."""
        self._num_tickets += 1
        job.ticket = self._num_tickets

    @contextlib.asynccontextmanager
    async def place(
        self, ticket: int | None, target: str, on_wait: Callable[[], object]
    ) -> AsyncIterator[None]:
        """Hold a place, and be the only one to copy to a target.

        Args:
            ticket: That of the copy; `None` for one that has none and takes a place whenever there
                is one.
            target: Identity of where to.
            on_wait: Called if there is no place.
        """
        if ticket is not None:
            await self.turn(ticket)
        with self._targets.enter(target) as before:
            if self._places.locked():
                on_wait()
            async with self._places:
                if ticket is not None:
                    self._let_pass(ticket)
                for end, other in before:
                    if other == target:
                        await asyncio.shield(end)
                yield

    async def turn(self, ticket: int) -> None:
        """Wait until all with lower tickets have a place, or want none. Repeatable."""
        if ticket > self._passed.first:
            await _wait_in(self._waiting, ticket)

    async def approach(self, ticket: int) -> None:
        """Wait until another rank may have a place for this ticket.

        Copies end on all ranks alike, so elsewhere none has a place but the lowest tickets
        that have not ended here, as many as there are places.
        """
        if not self._may_have_place(ticket):
            await _wait_in(self._coming, ticket)

    def end(self, job: CopyJob) -> None:
        """Take note that a copy has ended, whether or not it began, or had a place. Repeatable."""
        if job.ticket is None:
            return
        self._let_pass(job.ticket)
        self._ended.add(job.ticket)
        for number, waiter in self._coming.items():
            if self._may_have_place(number) and not waiter.done():
                waiter.set_result(None)

    def _may_have_place(self, ticket: int) -> bool:
        return self._ended.num_left_below(ticket) < self._max_copies

    def _let_pass(self, ticket: int) -> None:
        """Let the next one come: this one has its place, or wants none. Repeatable."""
        self._passed.add(ticket)
        waiter = self._waiting.get(self._passed.first)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


async def _wait_in(waiters: dict[int, asyncio.Future[None]], ticket: int) -> None:
    """Wait until somebody ends the wait of a ticket."""
    waiter = waiters[ticket] = asyncio.get_running_loop().create_future()
    try:
        await waiter
    finally:
        del waiters[ticket]
