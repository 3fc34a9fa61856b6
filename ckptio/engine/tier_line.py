"""Who copies to a second tier, and when: the line of an engine's copies.

At most `max_copies` are under way; a further one waits for its turn, and holds up no save.
Places are taken in the order in which the saves were asked for, on every rank alike, so
that no two ranks each hold what the other one waits for. Of two copies to one place the
later one begins when the earlier one has ended: the newest state is what stays.

Saves are numbered in that order, and the numbers (tickets) are used in two ways. `turn` and
`let_pass` are about the beginning: a copy waits in `turn` until every lower number has a place, or
has said by `let_pass` that it wants none. `approach` and `end` are about the end: a copy waits in
`approach` until so few lower numbers are still to end that another rank may have given it a place.

Copies share the staging pool with saves, which come first: all copies together hold a
quarter of its slabs at the most, or one if it has fewer than four. So a slow store never keeps a
save from copying, unless the pool has a single slab.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from ckptio._aio import outlive
from ckptio.engine.turns import Line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine

    from ckptio.engine.tiers import CopyJob
    from ckptio.moments import SaveMoments
    from ckptio.storage.interface import Storage

T = TypeVar("T")

_SHARE = 4


class CopyLine:
    """The copies of an engine. Used from its loop.

    Args:
        max_copies: Copies under way at a time.
        num_slabs: Slabs of the pool.

    Attributes:
        slabs: Slabs that copies may hold.
        max_slabs: How many these are.
        under_way: Copies that this engine has begun or will begin, on rank 0: place and save id.
        seen: Directories whose unfinished copies this engine has looked for.
        owing: Directories from which a copy has failed, each with whether another copy from there
            was made after that (the second tier is back).
        unmade: Saves whose copies failed here, by `CopyJob.name`, as long as somebody keeps them.
        untold: On rank 0 of several: ids of saves whose copies it has made after all, or that are
            wanted no more, and of which it has not told the others yet.
        silent: A second tier that did not answer in time before a commit. Until it does, no commit
            waits for any second tier.
    """

    def __init__(self, max_copies: int, num_slabs: int) -> None:
        self.max_slabs = max(1, num_slabs // _SHARE)
        self.slabs = asyncio.Semaphore(self.max_slabs)
        self.under_way: set[tuple[str, str]] = set()
        self.seen: set[str] = set()
        self.owing: dict[str, bool] = {}
        self.unmade: weakref.WeakValueDictionary[tuple[str, str], SaveMoments] = (
            weakref.WeakValueDictionary()
        )
        self.untold: list[str] = []
        self.silent: Storage | None = None
        self._max_copies = max_copies
        self._num_tickets = 0
        self._places = asyncio.Semaphore(max_copies)
        self._first = 1  # the lowest number that has not ended
        self._ended: set[int] = set()  # numbers above `_first`
        self._coming: dict[int, asyncio.Future[None]] = {}
        self._next = 1  # the lowest number that has no place yet, and may want one
        self._passed: set[int] = set()  # numbers above `_next`
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._targets: Line[str] = Line()
        self._watching: list[asyncio.Future[None]] = []
        self._begun: dict[str, tuple[str, str]] = {}
        self._owed: dict[tuple[str, str], asyncio.Task[Any]] = {}

    def enter(self, job: CopyJob) -> None:
        """Take the next place in the line for a copy, which `end` gives back."""
        self._num_tickets += 1
        job.ticket = self._num_tickets

    def begin(self, place: str, save_id: str) -> None:
        """Take note, before its commit, that a save will be copied; until `end`."""
        self._begun[save_id] = place, save_id
        self.under_way.add((place, save_id))

    async def stoppable(self, name: tuple[str, str], copy: Coroutine[Any, Any, T]) -> T | None:
        """Make a copy that an earlier run owed; `None` if `parted` stopped it."""
        task = asyncio.create_task(copy, name=f"owed copy of {name[0]}")
        self._owed[name] = task
        try:
            return await outlive(task, on_cancel=task.cancel)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if waiter is None or waiter.cancelling():
                raise
            return None
        finally:
            del self._owed[name]

    def is_owed_no_more(self, name: tuple[str, str]) -> None:
        """Take note that a copy was made after all, or is wanted no more.

        Its earlier failure is raised to whoever waits for it, but no longer by leaving the engine.
        """
        moments = self.unmade.pop(name, None)
        if moments is not None:
            moments.seen()

    def hear(self, untold: Collection[str]) -> None:
        """Take note of the `untold` of rank 0.

        If the run ends before this rank hears of them, it ends with the failures of their copies.
        """
        for name in [name for name in self.unmade if name[1] in untold]:
            self.is_owed_no_more(name)

    def told(self, untold: Collection[str]) -> None:
        """Take note that the other ranks were told of these."""
        self.untold = [save_id for save_id in self.untold if save_id not in untold]

    def has_replaced(self, job: CopyJob, others: Collection[tuple[str, str]]) -> list[str]:
        """Take note that a copy was made where those of others were to be, which it replaces.

        Args:
            job: The copy.
            others: Some of `unmade`, of any places, from before its checkpoint was seen to be
                there.

        Returns:
            Ids of the saves of which it has replaced the copies.
        """
        replaced: list[str] = []
        for other in others:
            moments = self.unmade.get(other)
            is_same_way = moments is not None and moments.copy_to == job.target.path
            if is_same_way and other[0] == job.name[0] and other != job.name:
                self.is_owed_no_more(other)
                replaced.append(other[1])
        return replaced

    def part(self, name: tuple[str, str]) -> None:
        """Take note that a copy is under way no more, however it ended."""
        self.under_way.discard(name)
        for waiter in self._watching:
            if not waiter.done():
                waiter.set_result(None)
        self._watching.clear()

    async def parted(self, places: Collection[str]) -> None:
        """Wait until no copy from some places is under way; those of earlier runs are stopped."""
        for (place, _), task in list(self._owed.items()):
            if place in places:
                task.cancel()
        while any(place in places for place, _ in list(self.under_way)):
            waiter = asyncio.get_running_loop().create_future()
            self._watching.append(waiter)
            await waiter

    @contextlib.asynccontextmanager
    async def place(
        self, ticket: int | None, target: str, on_wait: Callable[[], object]
    ) -> AsyncIterator[None]:
        """Hold a place, and be the only one to copy to a target.

        Args:
            ticket: The number of the copy, from 1; `None` for one that has none and takes
                a place whenever there is one.
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
                    self.let_pass(ticket)
                for end, other in before:
                    if other == target:
                        await asyncio.shield(end)
                yield

    async def turn(self, ticket: int) -> None:
        """Wait until all with lower numbers have a place, or want none. Repeatable."""
        if ticket <= self._next:
            return
        waiter = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            del self._waiting[ticket]

    async def approach(self, ticket: int) -> None:
        """Wait until another rank may have a place for this number.

        Copies end on all ranks alike, so elsewhere none has a place but the lowest numbers
        that have not ended here, as many as there are places.
        """
        if self._num_before(ticket) < self._max_copies:
            return
        waiter = self._coming[ticket] = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            del self._coming[ticket]

    def _num_before(self, ticket: int) -> int:
        """Say how many with lower numbers have not ended."""
        return sum(number not in self._ended for number in range(self._first, ticket))

    def end(self, job: CopyJob) -> None:
        """Take note that a copy has ended, whether or not it began, or had a place. Repeatable."""
        name, ticket = self._begun.pop(job.save_id, None), job.ticket or 0
        if name is not None:
            self.part(name)
        self.let_pass(ticket)
        if ticket >= self._first:
            self._ended.add(ticket)
        while self._first in self._ended:
            self._ended.discard(self._first)
            self._first += 1
        for number in sorted(self._coming):
            if self._num_before(number) >= self._max_copies:
                break
            if not self._coming[number].done():
                self._coming[number].set_result(None)

    def let_pass(self, ticket: int) -> None:
        """Let the next number come: this one has its place, or wants none. Repeatable."""
        if ticket >= self._next:
            self._passed.add(ticket)
        while self._next in self._passed:
            self._passed.discard(self._next)
            self._next += 1
        waiter = self._waiting.get(self._next)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
