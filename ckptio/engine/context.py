"""What the coroutines of an engine share, as one value with a clear owner.

Threads, pool, cache, ranks and limits are made on the engine's loop by `runtime.make_context`,
handed to every coroutine as an argument, and ended by the engine; none of it is global, so that
two engines of a process have two of each. `Recent` keeps what earlier saves have found.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ckptio._aio import run_blocking
from ckptio._threads import Threads
from ckptio.config import MiB
from ckptio.engine.copies import Copies
from ckptio.engine.held_notes import HeldNotes
from ckptio.engine.links import HostLinker
from ckptio.engine.resolver import Resolver
from ckptio.engine.tier_line import CopyLine
from ckptio.engine.turns import Line
from ckptio.errors import StateError
from ckptio.events import notify
from ckptio.ranks.solo import SoloRanks
from ckptio.storage.stores import Stores

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from concurrent.futures import Executor

    from ckptio.cache import MetadataCache
    from ckptio.config import CheckpointConfig
    from ckptio.engine.decide import JobRecord
    from ckptio.engine.links import Linker
    from ckptio.engine.together import Agreement
    from ckptio.engine.turns import Turn
    from ckptio.events import Event, Observer
    from ckptio.format.manifest import Manifest
    from ckptio.plan.save import SavePlan
    from ckptio.ranks.interface import Ranks
    from ckptio.shards import LeafSpec
    from ckptio.staging.cuda import PendingCopies
    from ckptio.staging.pool import SlabPool

_log = logging.getLogger("ckptio")

K = TypeVar("K")
V = TypeVar("V")

_MAX_PLANS = 8
_MAX_RECEIVED = 2
MAX_OPEN_FILES = 32
#: Bytes of the page cache that are mapped at a time, at most: they count as memory of the
#: process, and a load has its pool and this.
_MAX_MAPPED_NBYTES = 64 * MiB


def num_cached_lanes(config: CheckpointConfig) -> int:
    """Say how many threads read what is in the page cache at a time.

    More than cores copy no faster, and wait for each other: on two cores, eight cached files took
    1.1 times as long with twelve threads as with two. A disk wants a dozen reads at a time.
    """
    num_mapped = max(1, _MAX_MAPPED_NBYTES // config.slab_nbytes)
    return min(config.max_reads, len(os.sched_getaffinity(0)), num_mapped)


@dataclass(slots=True, kw_only=True)
class EngineContext:
    """The parts of an engine. Made on its loop, by whoever closes them.

    Attributes:
        config: Options.
        executor: Threads for whatever blocks and has none of its own.
        copiers: Threads that copy slabs. As many as may copy at a time: whoever waits for one
            takes it over without a hop to the loop.
        writers: Threads that sum and write slabs.
        readers: Threads that read, verify and land ranges.
        waiters: Threads that wait for devices in saves.
        load_waiters: The same in loads, which must not wait behind the copies of a save; the
            same threads if not given.
        far: Threads for what blocks on a second tier. It may hang, and nothing else is to wait
            for it; those of the first tier if not given.
        pool: Slabs.
        cache: Manifests.
        observer: Takes events, if anybody does.
        ranks: The engines of the job, of which this is one.
        linker: Links them where they pass on what they read.
        stores: Object stores that are open.
        resolver: Finds places by path, until all this is gone.
        plans: Plans of earlier saves of this rank alone.
        agreements: What ranks agreed on for the last save. Only one is kept: with two, ranks
            could reuse different ones for the same save.
        jobs: On rank 0, what was decided in earlier saves, by plan.
        last_job: Of those, what was decided last.
        planning: Serialises planning, because each plan starts from the previous `last_job`.
        received: Manifests as rank 0 last read them for all ranks, by path. Each load asks rank 0
            whether its save id is still the current one.
        files: Files open for reading at a time.
        lanes: Threads that read files of what is not cached at a time, of all loads together;
            each holds a slab, and what is left of the pool is for others.
        cached_lanes: The same for files that are in the page cache.
        saves: Saves in flight at a time.
        num_saves: Saves in flight now.
        has_begun: Whether any save has found a place to write to.
        copies: What is known of copies to a second tier.
        copy_line: Who of them goes when.
        notes: Notes of those that have not begun.
        turns: Saves under way, of which those to one place end one after another.
    """

    config: CheckpointConfig
    executor: Executor
    copiers: Executor
    writers: Executor
    readers: Executor
    waiters: Executor
    pool: SlabPool
    cache: MetadataCache
    load_waiters: Executor | None = None
    far: Executor | None = None
    observer: Observer | None = None
    ranks: Ranks = field(default_factory=SoloRanks)
    linker: Linker = field(default_factory=HostLinker)
    stores: Stores = field(init=False)
    resolver: Resolver = field(init=False)
    plans: Recent[tuple[LeafSpec, ...], SavePlan] = field(init=False)
    agreements: Recent[tuple[LeafSpec, ...], Agreement] = field(init=False)
    jobs: Recent[str, JobRecord] = field(init=False)
    last_job: JobRecord | None = None
    planning: asyncio.Lock = field(default_factory=asyncio.Lock)
    received: Recent[str, Manifest] = field(init=False)
    files: asyncio.Semaphore = field(init=False)
    lanes: asyncio.Semaphore = field(init=False)
    cached_lanes: asyncio.Semaphore = field(init=False)
    saves: asyncio.Semaphore = field(init=False)
    copies: Copies = field(default_factory=Copies)
    copy_line: CopyLine = field(init=False)
    notes: HeldNotes = field(default_factory=HeldNotes)
    num_saves: int = 0
    has_begun: bool = False
    turns: Line[Turn] = field(default_factory=Line)

    def __post_init__(self) -> None:
        """Make what is empty at first, and the limits."""
        self.stores = Stores(self.config, self.executor)
        self.resolver = Resolver(self.config, self.executor, self.observer, self.stores, self.far)
        self.plans = Recent(_MAX_PLANS)
        self.agreements = Recent(1)
        # more than any rank refers to
        self.jobs = Recent(4 * _MAX_PLANS)
        self.received = Recent(_MAX_RECEIVED)
        self.files = asyncio.Semaphore(MAX_OPEN_FILES)
        self.lanes = asyncio.Semaphore(self.config.max_reads)
        self.cached_lanes = asyncio.Semaphore(num_cached_lanes(self.config))
        self.saves = asyncio.Semaphore(self.config.max_saves)
        self.copy_line = CopyLine(self.config.max_tier_copies, self.config.num_slabs)

    def end_threads(self) -> None:
        """Let the threads end."""
        for threads in self._all_threads():
            threads.shutdown()

    def is_on_worker(self) -> bool:
        """Whether the caller runs on a thread that does the engine's work."""
        return any(isinstance(each, Threads) and each.is_current for each in self._all_threads())

    def _all_threads(self) -> tuple[Executor, ...]:
        waiters = (self.waiters, self.load_waiters or self.waiters)
        others = (self.copiers, self.writers, self.readers, self.far or self.executor)
        return (self.executor, *others, *waiters)

    def end(self) -> None:
        """Let the threads end, and drop what earlier saves and loads left behind.

        That is about a kilobyte a tensor, and a program may hold an engine that is closed for as
        long as it runs.
        """
        self.end_threads()
        for recent in (self.plans, self.agreements, self.jobs, self.received):
            recent.clear()
        self.last_job = None
        self.cache.clear()

    def emit(self, event: Event) -> None:
        """Give an event to the observer."""
        notify(self.observer, event)


async def settle(pending: Sequence[PendingCopies], context: EngineContext, *, saving: bool) -> None:
    """Wait until devices are done with a slab, to the end even when cancelled.

    On threads of their own: copies behind a long training step must not keep the threads
    of reads and writes waiting.
    """
    if pending:
        threads = context.waiters if saving else context.load_waiters or context.waiters
        await run_blocking(threads, wait_for_all, pending)


def wait_for_all(pending: Sequence[PendingCopies]) -> None:
    """Block until devices are done, all of them even if one has failed.

    Raises:
        StateError: A device has failed; the first of them.
    """
    failure: StateError | None = None
    for copies in pending:
        try:
            copies.wait()
        except StateError as error:
            failure = failure or error
    if failure is not None:
        raise failure


class Recent(Generic[K, V]):
    """What earlier saves and loads have found. The least recently used entry goes first.

    The key of `plans` and `agreements` is the structure itself (names, element types, shapes,
    in order), compared whole, not a digest of it: a changed structure can never be saved with
    an old plan. Tensors play no part in it.

    Args:
        max_entries: What is kept at the most.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """Give what was put, if it is there still."""
        value = self._entries.pop(key, None)
        if value is not None:
            self._entries[key] = value
        return value

    def put(self, key: K, value: V) -> None:
        """Keep a value."""
        self._entries.pop(key, None)
        self._entries[key] = value
        while len(self._entries) > self._max_entries:
            del self._entries[next(iter(self._entries))]

    def values(self) -> Collection[V]:
        """Give everything that is there."""
        return self._entries.values()

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
