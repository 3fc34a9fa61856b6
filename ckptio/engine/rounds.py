"""A round of the ranks of a job, with word of those that keep the others waiting."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ckptio.events import RanksAwaited

if TYPE_CHECKING:
    from ckptio.engine.context import EngineContext
    from ckptio.ranks.interface import Decide, Json, Session

_log = logging.getLogger("ckptio")

#: Seconds after which it is said that other ranks are waited for, and said again.
_PATIENCE_S = 10.0
_REMIND_S = 60.0


async def meet(
    session: Session,
    phase: str,
    message: Json,
    decide: Decide,
    *,
    path: str,
    context: EngineContext,
) -> Json:
    """Go into a round of a session, and say so if others keep this rank waiting.

    Args:
        session: The session.
        phase: As `Session.round` takes it, with what follows.
        message: This rank's.
        decide: Decides on rank 0.
        path: What all this is about.
        context: The engine's.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    timers: list[asyncio.TimerHandle] = []

    def say() -> None:
        waited_s, absent = loop.time() - began_s, tuple(session.absent())
        context.emit(RanksAwaited(path=path, phase=phase, absent=absent, waited_s=waited_s))
        if context.observer is None:
            whom = f"rank {', '.join(map(str, absent))}" if absent else "other ranks"
            _log.warning("%s: waiting for %s; every rank has to make this call", path, whom)
        timers[:] = [loop.call_later(_REMIND_S, say)]

    timers.append(loop.call_later(_PATIENCE_S, say))
    try:
        return await session.round(phase, message, decide)
    finally:
        timers[0].cancel()
