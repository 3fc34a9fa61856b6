"""What the coroutines of an engine share, as one value with a clear owner."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio.events import notify

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from ckptio.cache import MetadataCache
    from ckptio.config import CheckpointConfig
    from ckptio.events import Event, Observer
    from ckptio.plan.save import SavePlan
    from ckptio.shards import LeafSpec
    from ckptio.staging.cuda import PendingCopies
    from ckptio.staging.pool import SlabPool

_MAX_PLANS = 8
_MAX_OPEN_FILES = 32


@dataclass(slots=True, kw_only=True)
class EngineContext:
    """The parts of an engine. Made on its loop, by who closes them.

    Attributes:
        config: Options.
        executor: Threads for whatever blocks and has none of its own.
        copiers: Threads that copy slabs. As many as may copy at a time, and so with every
            limit here: who waits for a thread takes it over without a hop to the loop.
        writers: Threads that sum and write slabs.
        readers: Threads that read, verify and land ranges.
        waiters: Threads that wait for devices.
        pool: Slabs.
        cache: Manifests.
        observer: Takes events, if anybody does.
        plans: Plans of earlier saves.
        files: Files open for reading at a time.
        saves: Saves in flight at a time.
        num_saves: Saves in flight now.
        turns: The end of the last save to each place, by its identity.
    """

    config: CheckpointConfig
    executor: Executor
    copiers: Executor
    writers: Executor
    readers: Executor
    waiters: Executor
    pool: SlabPool
    cache: MetadataCache
    observer: Observer | None = None
    plans: PlanCache = field(init=False)
    files: asyncio.Semaphore = field(init=False)
    saves: asyncio.Semaphore = field(init=False)
    num_saves: int = 0
    turns: dict[str, asyncio.Future[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the limits."""
        self.plans = PlanCache()
        self.files = asyncio.Semaphore(_MAX_OPEN_FILES)
        self.saves = asyncio.Semaphore(self.config.max_saves)

    def emit(self, event: Event) -> None:
        """Give an event to the observer."""
        notify(self.observer, event)


async def settle(pending: Sequence[PendingCopies], context: EngineContext) -> None:
    """Wait until devices are done with a slab, to the end even when cancelled.

    On threads of their own: copies behind a long training step must not keep the threads
    of reads and writes waiting.
    """
    if pending:
        await run_blocking(context.waiters, _wait_for, pending)


def _wait_for(pending: Sequence[PendingCopies]) -> None:
    for copies in pending:
        copies.wait()


class PlanCache:
    """Plans of earlier saves, by everything that a plan depends on.

    The key is the structure itself (names, element types, shapes, in order), compared
    whole, not a digest of it: a changed structure can never be saved with an old plan.
    Tensors play no part in it. Least recently used plans go first.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[LeafSpec, ...], SavePlan] = {}

    def get(self, specs: tuple[LeafSpec, ...]) -> SavePlan | None:
        """Give the plan for a structure, if there is one."""
        plan = self._plans.pop(specs, None)
        if plan is not None:
            self._plans[specs] = plan
        return plan

    def put(self, specs: tuple[LeafSpec, ...], plan: SavePlan) -> None:
        """Keep the plan for a structure."""
        self._plans[specs] = plan
        while len(self._plans) > _MAX_PLANS:
            del self._plans[next(iter(self._plans))]
