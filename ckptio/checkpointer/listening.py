"""Hear calls for a checkpointer, and keep it no longer than somebody has it.

What listens has no end of its own, and the loop that runs it keeps it. Had it the checkpointer,
one that nobody leaves, as that of a notebook's cell which is run again, would stay with its
engine, threads and descriptors, until the program ends.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptio.checkpointer.core import CheckpointerCore
    from ckptio.checkpointer.stops import Stop, Stops
    from ckptio.engine.context import EngineContext


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

    async def listen(self, stops: Stops | None, context: EngineContext) -> None:
        """Hear calls; after the one for the last save, have its deadline seen to."""
        assert stops is not None  # noqa: S101  # the checkpointer is open
        await stops.watch(context.ranks)
        core = self._core()
        if core is not None:
            await core.hold_to_deadline()
