"""Look at what is committed somewhere, without taking all of its manifest apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio.errors import CheckpointNotFoundError, FormatError
from ckptio.format.summary import decode_summary

if TYPE_CHECKING:
    from ckptio.engine.context import EngineContext
    from ckptio.format.summary import Summary
    from ckptio.storage.interface import Storage


async def read_head(
    storage: Storage, context: EngineContext, *, gives_up: bool = False
) -> Summary | None:
    """Give the head of the manifest of a checkpoint; `None` if there is none of ours.

    Args:
        storage: Its place.
        context: The engine.
        gives_up: Not to wait for a place that says nothing for some seconds.

    Raises:
        StorageError: It cannot be read.
    """
    try:
        data = await storage.peek_manifest() if gives_up else (await storage.read_manifest())[1]
        if not isinstance(data, bytes):
            return None
        return await run_blocking(context.executor, decode_summary, data)
    except (CheckpointNotFoundError, FormatError):
        return None
