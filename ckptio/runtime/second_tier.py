"""Where the second tier of a checkpoint is, and whether it has it."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio.engine.transfer import require_files
from ckptio.errors import CheckpointError, ConfigError
from ckptio.format.manifest import decode_manifest
from ckptio.storage.resolve import remote_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ckptio.engine.context import EngineContext
    from ckptio.engine.copies import Copies
    from ckptio.runtime.core import EngineCore
    from ckptio.runtime.running import Running
    from ckptio.storage.interface import Storage
    from ckptio.storage.resolve import PathLike

#: How long a commit waits to hear where the second tier is, in seconds.
_LOOK_S = 1.0


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


def look_for_other(
    core: EngineCore, first: Storage, second: Storage
) -> Callable[[], Awaitable[None]] | None:
    """Begin to look whether the second tier is the first by a link, as a save begins.

    From any thread. While one is silent, that one is asked again first: as it hangs, by no other
    thread, and so not by one for each save.

    Args:
        core: The engine.
        first: The first tier.
        second: The second: its own `Storage`, which stays where it was found.

    Returns:
        What checks it before the commit; `None` on ranks that do not commit.
    """
    context = core.context
    if context.ranks.rank != 0:
        return None
    copies = context.copies

    async def look(_: EngineContext) -> bool:
        silent = copies.silent
        if silent is not None:
            if not await silent.locate():
                return False
            if copies.silent is silent:
                copies.silent = None
        answers = await second.locate()
        if answers and copies.silent is second:  # after a commit that waited
            copies.silent = None
        elif not answers:
            copies.silent = copies.silent or second
        return answers

    looking = core.submit(look, f"locate {second.path}")
    return functools.partial(_require_other, first, second, looking, copies)


async def _require_other(
    first: Storage, second: Storage, looking: Running[bool], copies: Copies
) -> None:
    """Check, before a commit, that the second tier is not the first by a link.

    Its copy could never be made, and would be owed. A mount that says nothing for a second is
    another one until the copy is made, which looks again; and the commits behind this one do not
    wait at all, until it has answered.

    Raises:
        ConfigError: It is.
    """
    answer = looking.end.wrapped()
    await asyncio.wait((answer,), timeout=0 if copies.silent is not None else _LOOK_S)
    if not answer.done():
        answer.cancel()
        copies.silent = copies.silent or second
    elif answer.exception() is None and answer.result() and first.identity == second.identity:
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
