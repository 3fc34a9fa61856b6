"""Where the second tier of a checkpoint is, and whether it has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio.engine.transfer import require_files
from ckptio.errors import CheckpointError, ConfigError
from ckptio.format.manifest import decode_manifest
from ckptio.storage.resolve import remote_url

if TYPE_CHECKING:
    from ckptio.engine.context import EngineContext
    from ckptio.runtime.core import EngineCore
    from ckptio.storage.interface import Storage
    from ckptio.storage.resolve import PathLike


def second_tier(core: EngineCore, first: Storage, then: PathLike | None) -> Storage | None:
    """Find the storage of a second tier; `None` if there is to be none. Touches nothing.

    Where links lead is not looked at on the caller's thread: a mount may hang. Who commits,
    copies or loads looks.

    Raises:
        ConfigError: It is the first tier.
    """
    if then is None:
        return None
    second = core.context.resolver.storage(then, is_second=True)
    if _is_called_alike(first, second):
        raise ConfigError(f"then= is {second.path!r}, which is where the checkpoint itself goes")
    return second


def _is_called_alike(one: Storage, other: Storage) -> bool:
    """Whether two places are the same by what they are called."""
    if remote_url(one.path) is None or remote_url(other.path) is None:
        return one.path == other.path
    return one.identity == other.identity  # of stores, which are asked nothing for it


async def require_other(first: Storage, second: Storage) -> None:
    """Check, before a commit, that the second tier is not the first by a link.

    Its copy could never be made, and would be owed. A mount that says nothing for some seconds is
    another one until the copy is made, which looks again: at its own `Storage`, as this one stays
    where it was found.

    Raises:
        ConfigError: It is.
    """
    await second.locate()
    if first.identity == second.identity:
        raise ConfigError(f"then= is {second.path!r}, which is where the checkpoint itself goes")


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
