"""Where the second tier of a checkpoint is, and whether it has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio.engine.transfer import require_files
from ckptio.errors import CheckpointError, ConfigError
from ckptio.format.manifest import decode_manifest

if TYPE_CHECKING:
    from ckptio.engine.context import EngineContext
    from ckptio.runtime.core import EngineCore
    from ckptio.storage.interface import Storage
    from ckptio.storage.resolve import PathLike


def second_tier(core: EngineCore, first: Storage, then: PathLike | None) -> Storage | None:
    """Find the storage of a second tier; `None` if there is to be none. Touches nothing.

    Raises:
        ConfigError: It is the first tier.
    """
    if then is None:
        return None
    second = core.storage(then)
    if second.identity == first.identity:
        raise ConfigError(f"then= is {second.path!r}, which is where the checkpoint itself goes")
    return second


async def is_copied(first: Storage, second: Storage, context: EngineContext) -> bool:
    """Whether the second tier has the checkpoint of the first: that very one, and all files.

    Where nobody can tell, it has not.
    """
    try:
        _, data = await first.read_manifest()
        _, there = await second.read_manifest()
        if not isinstance(data, bytes) or data != there:
            return False
        manifest = await run_blocking(context.executor, decode_manifest, data)
        await require_files(second, manifest)
    except CheckpointError:
        return False
    return True
