"""When a save may go: few at a time, and to one place in the order in which they were asked for."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Generic, TypeVar

from ckptio._aio import wait
from ckptio.events import SaveQueued
from ckptio.storage.file_names import STAY_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from ckptio.engine.context import EngineContext
    from ckptio.engine.save import SaveJob
    from ckptio.storage.interface import Attempt, Storage

    #: Waits until earlier saves to the same place have ended.
    MyTurn = Callable[[Attempt], Awaitable[None]]

T = TypeVar("T")


class Line(Generic[T]):
    """What is under way, in the order in which it was asked for, each with a place."""

    def __init__(self) -> None:
        self._ends: dict[asyncio.Future[None], T] = {}

    @contextlib.contextmanager
    def enter(self, place: T) -> Iterator[list[tuple[asyncio.Future[None], T]]]:
        """Be the last one; gives those before: what is done when one has ended, and its place."""
        before = list(self._ends.items())
        end = asyncio.get_running_loop().create_future()
        self._ends[end] = place
        try:
            yield before
        finally:
            del self._ends[end]
            end.set_result(None)


@contextlib.contextmanager
def turn(job: SaveJob, context: EngineContext) -> Iterator[MyTurn]:
    """Let saves to one place commit in the order in which they were asked for.

    A later save copies and writes meanwhile, and waits for the end of the earlier one only
    before its commit: the newest state is what stays. Gives what waits for the turn.

    Which of the others go to the same place by another name is asked then, too: a mount whose
    server is gone does not answer, and copies are not to wait for it.
    """
    storage = job.storage
    with context.turns.enter(storage) as before:

        async def my_turn(attempt: Attempt) -> None:
            await storage.locate(gives_up=False)
            for end, other in before:
                if not end.done() and await _is_same(storage, other):
                    while not end.done():
                        await wait((end,), timeout_s=STAY_S)
                        await attempt.stay()
            if job.permit is not None:
                await job.permit()

        yield my_turn


async def _is_same(storage: Storage, other: Storage) -> bool:
    """Whether another storage is of the same place as one that was located."""
    if other.path != storage.path:
        return await other.find() == storage.identity
    return True


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
