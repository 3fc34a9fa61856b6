"""Remove steps from the first tier once they are on the second, as `keep_local` wants.

Only steps of which the second tier has the very same save, with all its files; and never the
newest ones. For each step, the second tier is asked before the first one's turn is taken, so that
nothing on the first waits for a second that hangs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ckptio.checkpointer.steps import step_name
from ckptio.engine.heads import read_head
from ckptio.errors import CheckpointError
from ckptio.runtime.second_tier import is_copied

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ckptio.checkpointer.keeper import Keeper
    from ckptio.engine.context import EngineContext


class Thinning:
    """What `keep_local` asks for.

    Args:
        first: Who looks after the first tier.
        second: Who looks after the second.
        num_local: How many steps stay on the first tier, the highest that it has.
        exempt: Gives the steps to leave alone; asked before each.
        turn: Held by whoever removes something from the first tier; see `Upkeep`.
        context: The engine's.
    """

    def __init__(
        self,
        first: Keeper,
        second: Keeper,
        num_local: int,
        *,
        exempt: Callable[[], Collection[int]],
        turn: asyncio.Lock,
        context: EngineContext,
    ) -> None:
        self._first = first
        self._second = second
        self._num_local = num_local
        self._exempt = exempt
        self._turn = turn
        self._context = context
        self._lock = asyncio.Lock()
        self._is_due = False  # whether a call of `thin_out` waits for its turn

    async def thin_out(self) -> None:
        """Look at all steps of the first tier but the newest.

        Calls run one at a time, and while one waits, others return at once: it does their work,
        too.

        Raises:
            CheckpointError: The first failure; the other steps were seen to nevertheless.
        """
        if self._is_due:
            return
        self._is_due = True
        try:
            await self._lock.acquire()
        finally:
            self._is_due = False
        failures: list[CheckpointError] = []
        try:
            old = (await self._first.steps())[: -self._num_local]
            if any(step not in self._exempt() for step in old):
                there = await self._second.listed()
                for step in old:
                    await asyncio.sleep(0)
                    if step in there:
                        try:
                            await self.thin_out_step(step)
                        except CheckpointError as error:  # the others need not stay for it
                            failures.append(error)
            if failures:
                raise failures[0]
        finally:
            self._lock.release()
            failures.clear()  # an error refers to this frame: no reference cycle

    async def thin_out_step(self, step: int) -> None:
        """Look at one step; before it is removed from the second tier, too.

        A copy that ends late, after those of newer steps, may be removed as soon as it is made.
        Nothing tells after that that it had been copied, and the first tier would keep the step.
        """
        if step in self._exempt():
            return
        path = self._first.root.join(step_name(step))
        save_id = await self._save_id(path)
        if save_id is None or not await self._is_copied(step, path):
            return
        async with self._turn:  # by now, it may be another one, or among the newest
            if await self._save_id(path) == save_id:
                higher = await self._first.newest(self._num_local, above=step)
                if len(higher) == self._num_local and step not in self._exempt():
                    await self._first.remove(step, save_id)

    async def _save_id(self, path: str) -> str | None:
        """Give the save id of a step of the first tier; `None` if it is gone, or to be copied."""
        storage = self._context.resolver.storage(path)
        head = await read_head(storage, self._context)
        is_owed = head is None or await storage.has_note(head.save_id)
        return None if head is None or is_owed else head.save_id

    async def _is_copied(self, step: int, path: str) -> bool:
        """Whether a step of the first tier is on the second, whole."""
        storage = self._context.resolver.storage
        there = storage(self._second.root.join(step_name(step)), is_second=True)
        return await is_copied(storage(path), there, self._context)
