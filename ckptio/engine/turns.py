"""When a save may go: few at a time, and to one place in the order in which they were asked for."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from ckptio.events import SaveQueued
from ckptio.storage.file_names import STAY_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from ckptio.engine.context import EngineContext
    from ckptio.engine.save import SaveJob
    from ckptio.storage.interface import Attempt

    #: Waits until earlier saves to the same place have ended.
    MyTurn = Callable[[Attempt], Awaitable[None]]


@contextlib.asynccontextmanager
async def turn(job: SaveJob, context: EngineContext) -> AsyncIterator[MyTurn]:
    """Let saves to one place commit in the order in which they were asked for.

    A later save copies and writes meanwhile, and waits for the end of the earlier one only
    before its commit: the newest state is what stays. Gives what waits for the turn.
    """
    identity = job.storage.identity
    before = context.turns.get(identity)
    end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    context.turns[identity] = end

    async def my_turn(attempt: Attempt) -> None:
        while before is not None and not before.done():
            await asyncio.wait((before,), timeout=STAY_S)
            await attempt.stay()
        if job.permit is not None:
            await job.permit()

    def finish(_: object) -> None:
        end.set_result(None)
        if context.turns.get(identity) is end:
            del context.turns[identity]

    try:
        yield my_turn
    finally:
        if before is None or before.done():
            finish(None)
        else:  # this one failed early: who comes next still waits for the one before
            before.add_done_callback(finish)


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
