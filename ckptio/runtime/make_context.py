"""Make the parts of an engine, on its loop."""

from __future__ import annotations

import asyncio
import functools
import os
from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio._threads import HUNG_S, NUM_ODD_JOBS, DefaultThreads, Threads
from ckptio.cache import MetadataCache
from ckptio.engine.context import EngineContext
from ckptio.events import PinningRefused, notify
from ckptio.format.manifest import Manifest, decode_manifest
from ckptio.ranks.discover import ranks_of
from ckptio.ranks.interface import Deadlines
from ckptio.ranks.solo import SoloRanks
from ckptio.runtime.engine_options import is_word
from ckptio.staging.pool import SlabPool

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.events import Observer
    from ckptio.ranks.interface import Ranks

_NUM_WAITERS = 2
#: What libraries ask of the loop: names of hosts, small files.
_NUM_FOR_LIBRARIES = 8


async def meet_ranks(ranks: object, config: CheckpointConfig, executor: Executor) -> Ranks:
    """Find the engines of the other ranks.

    Args:
        ranks: `"auto"`, `"solo"` or a process group; see `api.Engine`.
        config: How long is waited for them.
        executor: Its threads look for addresses; the store is asked on a thread of its own.
    """
    if is_word(ranks, "solo"):
        return SoloRanks()
    deadlines = Deadlines(peer_s=config.peer_timeout_s, meet_s=config.meet_timeout_s)
    group = None if is_word(ranks, "auto") else ranks
    return await ranks_of(group, environ=os.environ, deadlines=deadlines, executor=executor)


def make_context(config: CheckpointConfig, observer: Observer | None) -> EngineContext:
    """Make the parts of an engine that meets no other ranks yet; whoever asks closes them.

    Args:
        config: Options.
        observer: Takes events.
    """
    executor = Threads(NUM_ODD_JOBS, "ckptio", HUNG_S)
    num_far = NUM_ODD_JOBS + config.max_tier_copies + config.max_writes
    libraries = DefaultThreads(Threads(_NUM_FOR_LIBRARIES, "ckptio-default"))
    asyncio.get_running_loop().set_default_executor(libraries)

    def decode(data: bytes) -> Awaitable[Manifest]:
        return run_blocking(executor, decode_manifest, data)

    limits = (config.cache_entries, config.cache_nbytes)
    return EngineContext(
        config=config,
        executor=executor,
        copiers=Threads(config.max_copies, "ckptio-copy"),
        writers=Threads(config.max_writes, "ckptio-write", HUNG_S),
        readers=Threads(config.max_reads, "ckptio-read", HUNG_S),
        waiters=Threads(_NUM_WAITERS, "ckptio-device"),
        load_waiters=Threads(_NUM_WAITERS, "ckptio-device-load"),
        far=Threads(num_far, "ckptio-far", HUNG_S),
        pool=SlabPool(
            config.num_slabs * config.slab_nbytes,
            config.slab_nbytes,
            functools.partial(run_blocking, executor),
            lambda reason: notify(observer, PinningRefused(path="", reason=reason)),
        ),
        cache=MetadataCache(*limits, decode, ttl_s=config.cache_ttl_s),
        observer=observer,
    )
