"""The steps that a run saves and loads: which are under way, and which one it needs.

The step that was committed here last stays, whatever a policy or a clock says, until another one
is committed; before the first is, all that were loaded here stay.

All of it is changed without a lock, from any thread: a signal's handler that saves may have
interrupted the very call that changes it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptio.checkpointer.losses import Losses
from ckptio.runtime.guard import Guard
from ckptio.runtime.leaving import unsettled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptio.moments import SaveMoments

#: Committed saves of which it is remembered in which order they were called.
_NUM_REMEMBERED = 8


class RunSteps:
    """Steps of this run.

    Attributes:
        saves: Steps and their saves: those under way, and those whose failure nobody has seen.
        called: Saves by step, in the order of their calls: of two under way, either may end first.
        saved: All steps that were saved here.
        busy: Steps that are being read, or about to be written: one entry for each `held` block.
    """

    def __init__(self) -> None:
        self.saves: list[tuple[int, SaveMoments]] = []
        self.called: list[tuple[int, SaveMoments]] = []
        self.saved: set[int] = set()
        self.busy: dict[object, int] = {}
        self._loaded: set[int] = set()
        self._losses = Losses()
        self._guard = Guard()

    def check(self) -> None:
        """Look at how saves have ended, before another one begins; see `Losses.check`."""

        def look() -> None:
            self._losses.note(self.saves)
            self._losses.check()

        self._guard.run(look)

    def add(self, step: int, moments: SaveMoments) -> None:
        """Take a save that has begun. From any thread, several at a time.

        A signal's handler that saves may come in between: what it has added by then stays.
        """

        def take() -> None:
            self.saved.add(step)
            while True:
                called, saves = self.called, self.saves
                goes = [call for call in called if call[1].committed.error() is not None]
                goes += [call for call in called if _is_committed(call[1])][:-_NUM_REMEMBERED]
                left = [call for call in called if call not in goes] + [(step, moments)]
                self._losses.note(saves)
                waiting = unsettled(moments for _, moments in saves)
                under_way = [(s, m) for s, m in saves if m in waiting] + [(step, moments)]
                if self.called is called and self.saves is saves:  # no call before what follows
                    self.called, self.saves = left, under_way
                    return

        self._guard.run(take)

    async def forget(self, step: int) -> None:
        """Forget that a step was committed: it is about to be removed."""

        def forget() -> None:
            while True:  # as in `add`: the loop may be of the main thread
                called = self.called
                left = [(s, m) for s, m in called if s != step or not m.committed.done()]
                if self.called is called:  # no call before what follows
                    self.called = left
                    return

        await self._guard.run_aside(forget)

    def exempt(self, *, is_copied: bool = False) -> set[int]:
        """Name the steps that stay on a tier: those under way here, and those that are needed.

        In this order: when the last save is no longer under way, it is needed already.

        Args:
            is_copied: Whether it is the second tier.
        """
        return self.under_way() | self.needed(is_copied=is_copied)

    def needed(self, *, is_copied: bool = False) -> set[int]:
        """Name the step that was saved last on a tier; without one, all that were loaded."""
        last = self.last(is_copied=is_copied)
        return set(self._loaded) if last is None else {last}

    def last(self, *, is_copied: bool = False) -> int | None:
        """Give the step whose save was called last, of those that are committed, or copied."""
        for step, each in reversed(self.called):
            moment = each.durable if is_copied else each.committed
            if moment.done() and moment.error() is None:
                return step
        return None

    def under_way(self) -> set[int]:
        """Name the steps that are being written, copied or read here."""
        writing = {step for step, moments in self.saves if not moments.durable.done()}
        return writing.union(list(self.busy.values()))

    @contextmanager
    def held(self, step: int, *, is_load: bool = False) -> Iterator[None]:
        """Keep a step from being removed inside the block; and once loaded, until one is saved.

        On any thread, without a lock.
        """
        block = object()
        try:
            self.busy[block] = step
            yield
            if is_load:
                self._loaded.add(step)
        finally:
            self.busy.pop(block, None)


def _is_committed(moments: SaveMoments) -> bool:
    return moments.committed.done() and moments.committed.error() is None
