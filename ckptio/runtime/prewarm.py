"""Make an engine ready before its first save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio._texts import shown
from ckptio.errors import ConfigError
from ckptio.storage.resolve import local_path, remote_url

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
    if at is not None and (url := remote_url(at)) is not None:
        store, _ = context.stores.below(url)
        await store.get()
    elif at is not None:
        local_path(at)  # refuses what is not a path
    await context.pool.prewarm(nbytes)
