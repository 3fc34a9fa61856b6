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
    reminder = _Reminder(session, phase, path, context)
    try:
        return await session.round(phase, message, decide)
    finally:
        reminder.stop()


class _Reminder:
    """Says again and again that others keep a rank waiting. Begins when it is made."""

    def __init__(self, session: Session, phase: str, path: str, context: EngineContext) -> None:
        self._session = session
        self._phase = phase
        self._path = path
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._timer = self._loop.call_later(_PATIENCE_S, self._say)

    def stop(self) -> None:
        """Say no more. The timer lets go of this: no reference cycle."""
        self._timer.cancel()

    def _say(self) -> None:
        absent = tuple(self._session.absent())
        self._context.emit(
            RanksAwaited(
                path=self._path,
                phase=self._phase,
                absent=absent,
                waited_s=self._loop.time() - self._began_s,
            )
        )
        if self._context.observer is None:
            whom = f"rank {', '.join(map(str, absent))}" if absent else "other ranks"
            words = "%s: waiting for %s; every rank has to make this call"
            _log.warning(words, self._path, whom)
        self._timer = self._loop.call_later(_REMIND_S, self._say)
