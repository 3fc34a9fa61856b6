"""Make an engine ready before its first save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio.errors import ConfigError, shown
from ckptio.storage.resolve import remote_url

if TYPE_CHECKING:
    from ckptio.engine.context import EngineContext
    from ckptio.storage.resolve import PathLike


async def prewarm(context: EngineContext, nbytes: int | None, at: PathLike | None) -> None:
    """Touch the pool's memory, and open a store; see `api.Engine.prewarm`.

    Raises:
        ConfigError: `nbytes` is no number of bytes, or there is no way to `at`.
        StorageError: Its store cannot be reached.
        StagingError: The system gives no memory.
    """
    if nbytes is not None and (type(nbytes) is not int or nbytes < 1):
        raise ConfigError(f"nbytes= is a number of bytes from 1, not {shown(nbytes)}")
    url = None if at is None else remote_url(at)
    if url is not None:
        store, _ = context.stores.below(url)
        await store.get()
    await context.pool.prewarm(nbytes)
