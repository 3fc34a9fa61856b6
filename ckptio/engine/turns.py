"""When a save may go: few at a time, and to one place in the order in which they were asked for.

A save copies and writes at once, and waits only before its commit, until the earlier ones to its
place have ended (`Turn.come`): the newest state is what stays.

Only then does it ask which of the others go to the same place by another name, so that copying
waits for no mount whose server is gone. If there is no answer, it passes the earlier save, and says
so in the list `passed_by`. That one reads it when it knows its own place, before its own commit: if
it goes to the same place, it fails with `CommitConflictError`, unless the later save was not
committed. So of two saves to one place one always knows of the other, and waits for it; and never
each for the other, since nothing is added to the list of one that knows its place.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ckptio._aio import run_all, wait
from ckptio.errors import CommitConflictError
from ckptio.events import SaveQueued
from ckptio.storage.file_names import STAY_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.save import SaveJob
    from ckptio.storage.interface import Attempt, Storage

    #: Waits until a save may commit: earlier ones to the same place have ended, and its
    #: `permit`, if it has one, has not raised.
    MyTurn = Callable[[Attempt], Awaitable[None]]

T = TypeVar("T")


class Line(Generic[T]):
    """What is under way, each with its place (where it goes to), in the order of entering."""

    def __init__(self) -> None:
        self._ends: dict[asyncio.Future[None], T] = {}

    @contextlib.contextmanager
    def enter(self, place: T) -> Iterator[list[tuple[asyncio.Future[None], T]]]:
        """Enter as the last one, for the length of the block.

        Gives those that are under way: for each a future, done when it leaves, and its place.
        """
        before = list(self._ends.items())
        end = asyncio.get_running_loop().create_future()
        self._ends[end] = place
        try:
            yield before
        finally:
            del self._ends[end]
            end.set_result(None)


@dataclass(slots=True, eq=False)
class Turn:
    """A save under way, as others see it that may go to the same place.

    Attributes:
        storage: Where to.
        may_stand: Done when it has ended: whether it was committed, or may have been.
        identity: That of its storage; empty until it is ready to commit.
        passed_by: Later saves that went on to their commits before this had an `identity`. None is
            added after that.
    """

    storage: Storage
    may_stand: asyncio.Future[bool]
    identity: str = ""
    passed_by: list[Turn] = field(default_factory=list)

    async def come(
        self, before: Sequence[tuple[asyncio.Future[None], Turn]], attempt: Attempt
    ) -> None:
        """Wait until earlier saves to the same place have ended.

        Args:
            before: Earlier saves to any place.
            attempt: What this one has written; it is alive meanwhile.

        Raises:
            CommitConflictError: A later one has passed this one, and was committed, or nobody knows
                whether it was.
        """
        await self.storage.locate(gives_up=False)
        self.identity = self.storage.identity
        for later in self.passed_by:
            if later.identity == self.identity:
                await _outlast(later.may_stand, attempt)
                if later.may_stand.result():
                    raise CommitConflictError(self.storage.path)
        under_way = [(end, other) for end, other in before if not end.done()]
        asked = (self._is_beside(other) for _, other in under_way)
        are_beside = await run_all(asked, "ckptio-beside")  # at once: each may be given up late
        beside = {end for (end, _), is_so in zip(under_way, are_beside, strict=True) if is_so}
        # those that answer meanwhile go before this one, too: they do not know of it
        while ahead := [
            end
            for end, other in under_way
            if not end.done() and (end in beside or other.identity == self.identity)
        ]:
            await _outlast(ahead[0], attempt)
        for end, other in before:
            if not end.done() and not other.identity:
                other.passed_by.append(self)

    async def _is_beside(self, other: Turn) -> bool:
        """Whether another save is to the same place; no where that does not answer."""
        if other.storage.path == self.storage.path:
            return True
        return (other.identity or await other.storage.identify_now()) == self.identity


@contextlib.contextmanager
def turn(job: SaveJob, context: EngineContext) -> Iterator[MyTurn]:
    """Let saves to one place commit in the order in which they were asked for.

    Gives what waits for the turn, and then for the job's `permit`, whose error ends the save.
    """
    own = Turn(job.storage, asyncio.get_running_loop().create_future())
    with context.turns.enter(own) as before:

        async def my_turn(attempt: Attempt) -> None:
            await own.come(before, attempt)
            if job.permit is not None:
                await job.permit()

        try:
            yield my_turn
        except BaseException as error:
            own.may_stand.set_result(getattr(error, "in_doubt", False))
            raise
        own.may_stand.set_result(True)


async def _outlast(end: asyncio.Future[Any], attempt: Attempt) -> None:
    """Wait for the end of another save; this one is alive meanwhile."""
    while not end.done():
        await wait((end,), timeout_s=STAY_S)
        await attempt.stay()


@contextlib.asynccontextmanager
async def place_for(job: SaveJob, context: EngineContext) -> AsyncIterator[None]:
    """Hold one of the places for saves in flight; say so if there is none."""
    if context.saves.locked():
        context.emit(SaveQueued(path=job.storage.path, num_in_flight=context.num_saves))
    async with context.saves:
        context.num_saves += 1
        try:
            yield
        finally:
            context.num_saves -= 1
