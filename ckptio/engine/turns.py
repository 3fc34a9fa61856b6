"""When a save may go: few at a time, and to one place in the order in which they were asked for."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from ckptio._aio import wait
from ckptio.events import SaveQueued
from ckptio.storage.file_names import STAY_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from ckptio.engine.context import EngineContext
    from ckptio.engine.save import SaveJob
    from ckptio.storage.interface import Attempt

    #: Waits until earlier saves to the same place have ended.
    MyTurn = Callable[[Attempt], Awaitable[None]]


class Line:
    """Who comes next to a place waits for who came before; by the name of the place."""

    def __init__(self) -> None:
        self._last: dict[str, asyncio.Future[None]] = {}

    @contextlib.contextmanager
    def enter(self, place: str) -> Iterator[asyncio.Future[None] | None]:
        """Be the last one for a place; gives what is done when those before have ended."""
        before = self._last.get(place)
        end = self._last[place] = asyncio.get_running_loop().create_future()

        def finish(_: object) -> None:
            end.set_result(None)
            if self._last.get(place) is end:
                del self._last[place]

        try:
            yield before
        finally:
            if before is None or before.done():
                finish(None)
            else:  # this one ended early: who comes next still waits for the one before
                before.add_done_callback(finish)


@contextlib.asynccontextmanager
async def turn(job: SaveJob, context: EngineContext) -> AsyncIterator[MyTurn]:
    """Let saves to one place commit in the order in which they were asked for.

    A later save copies and writes meanwhile, and waits for the end of the earlier one only
    before its commit: the newest state is what stays. Gives what waits for the turn.
    """
    with context.turns.enter(job.storage.identity) as before:

        async def my_turn(attempt: Attempt) -> None:
            while before is not None and not before.done():
                await wait((before,), timeout_s=STAY_S)
                await attempt.stay()
            if job.permit is not None:
                await job.permit()

        yield my_turn


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
