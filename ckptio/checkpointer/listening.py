"""Listen to calls for the last save, without keeping the checkpointer alive.

The task that listens ends only with the run, and the engine's loop refers to it. If it referred to
the checkpointer, one whose block is never left, as in a notebook cell that is run again, would keep
its engine, threads and descriptors until the program ends. So it has a weak reference, and is
stopped when the checkpointer is collected. (One that takes signals over is never collected before
its end: the handlers refer to it.)
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
        core: Whose calls these are; referred to weakly.
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
        """Begin to listen. Ends when the checkpointer is collected, if it is never left."""
        running = Running[None](is_endless=True)
        listen = functools.partial(self._listen, stops)
        engine.submit(listen, "watch for calls", running)
        core = self._core()
        if core is not None:
            weakref.finalize(core, running.abort).atexit = False
        return running

    async def _listen(self, stops: Stops, context: EngineContext) -> None:
        """Listen until the last save is called for; then hold it to its deadline."""
        await stops.watch(context.ranks)
        core = self._core()
        if core is not None:
            await core.hold_to_deadline()
