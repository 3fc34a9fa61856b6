"""Open and close the data files of a checkpoint that is read, a few at a time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckptio._aio import run_blocking, shielded
from ckptio.storage.streams import AwaitedSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ckptio.engine.context import EngineContext
    from ckptio.engine.landing import Reading
    from ckptio.format.manifest import FileEntry
    from ckptio.storage.streams import Source


@contextlib.asynccontextmanager
async def opened(
    reading: Reading, entry: FileEntry, context: EngineContext
) -> AsyncIterator[Source | AwaitedSource]:
    """Lend an open data file."""
    source = await open_source(reading, entry)
    try:
        yield source
    finally:
        await shielded(close_source(source, reading, context))


async def open_source(reading: Reading, entry: FileEntry) -> Source | AwaitedSource:
    """Open a data file, for `close_source`."""
    async with reading.opens:
        return await reading.storage.open(entry.name, entry.nbytes)


async def close_source(
    source: Source | AwaitedSource, reading: Reading, context: EngineContext
) -> None:
    """Release a data file."""
    if not isinstance(source, AwaitedSource):
        async with reading.opens:
            await run_blocking(context.executor, source.close)
