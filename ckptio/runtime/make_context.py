"""Make the parts of an engine, on its loop."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from ckptio._aio import DefaultThreads, Threads, run_blocking
from ckptio.cache import MetadataCache
from ckptio.engine.context import EngineContext
from ckptio.events import PinningRefused, notify
from ckptio.format.manifest import Manifest, decode_manifest
from ckptio.staging.pool import SlabPool

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from ckptio.config import CheckpointConfig
    from ckptio.events import Observer

_NUM_WAITERS = 2
#: Opening, closing and syncing files, planning, committing: many short waits for a system.
_NUM_ODD_JOBS = 4
#: What libraries ask of the loop: names of hosts, small files.
_NUM_FOR_LIBRARIES = 8


def make_context(config: CheckpointConfig, observer: Observer | None) -> EngineContext:
    """Make the parts of an engine that meets no other ranks yet; whoever asks closes them.

    Args:
        config: Options.
        observer: Takes events.
    """
    executor = Threads(_NUM_ODD_JOBS, "ckptio")
    libraries = DefaultThreads(Threads(_NUM_FOR_LIBRARIES, "ckptio-default"))
    asyncio.get_running_loop().set_default_executor(libraries)

    def decode(data: bytes) -> Awaitable[Manifest]:
        return run_blocking(executor, decode_manifest, data)

    limits = (config.cache_entries, config.cache_nbytes)
    return EngineContext(
        config=config,
        executor=executor,
        copiers=Threads(config.max_copies, "ckptio-copy"),
        writers=Threads(config.max_writes, "ckptio-write"),
        readers=Threads(config.max_reads, "ckptio-read"),
        waiters=Threads(_NUM_WAITERS, "ckptio-device"),
        load_waiters=Threads(_NUM_WAITERS, "ckptio-device-load"),
        far=Threads(_NUM_ODD_JOBS + config.max_tier_copies + config.max_writes, "ckptio-far"),
        pool=SlabPool(
            config.num_slabs * config.slab_nbytes,
            config.slab_nbytes,
            functools.partial(run_blocking, executor),
            lambda reason: notify(observer, PinningRefused(path="", reason=reason)),
        ),
        cache=MetadataCache(*limits, decode, ttl_s=config.cache_ttl_s),
        observer=observer,
    )
