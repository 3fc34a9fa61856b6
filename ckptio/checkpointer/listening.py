"""Hear calls for a checkpointer, and keep it no longer than somebody has it.

What listens has no end of its own, and the loop that runs it keeps it. Had it the checkpointer,
one that nobody leaves, as that of a notebook's cell which is run again, would stay with its
engine, threads and descriptors, until the program ends. One that takes signals over stays: their
handlers have it.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

from ckptio.runtime.running import Running

if TYPE_CHECKING:
    from ckptio.checkpointer.core import CheckpointerCore
    from ckptio.checkpointer.stops import Stop, Stops
    from ckptio.engine.context import EngineContext
    from ckptio.runtime.core import EngineCore


class Listener:
    """Listens on the engine's loop, until the last save is called for or the engine closes.

    Args:
        core: Of whom; it is not kept.
    """

    def __init__(self, core: CheckpointerCore) -> None:
        self._core = weakref.ref(core)

    def due_in_s(self) -> float | None:
        """Say in how many seconds a save is due by time; `None` if never."""
        core = self._core()
        return None if core is None else core.due_in_s()

    def stopped(self, stop: Stop) -> None:
        """Pass on what was agreed on."""
        core = self._core()
        if core is not None:
            core.stopped(stop)

    def start(self, engine: EngineCore, stops: Stops) -> Running[None]:
        """Begin to listen; it ends with the checkpointer, if nobody leaves that."""
        running = Running[None](is_endless=True)
        listen = functools.partial(self._listen, stops)
        engine.submit(listen, "watch for calls", running)
        core = self._core()
        if core is not None:
            weakref.finalize(core, running.abort).atexit = False
        return running

    async def _listen(self, stops: Stops, context: EngineContext) -> None:
        """Hear calls; after the one for the last save, have its deadline seen to."""
        await stops.watch(context.ranks)
        core = self._core()
        if core is not None:
            await core.hold_to_deadline()
