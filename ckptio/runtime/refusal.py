"""Tell the other ranks that this one does not come to what they do together.

They hear of it when they come; it is not waited for long whether they do.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from ckptio.errors import EngineClosedError, RankError, SaveAbortedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptio.engine.context import EngineContext
    from ckptio.runtime.core import EngineCore

_TELL_S = 1.0


def refuse(core: EngineCore, key: str, error: BaseException) -> None:
    """Tell the other ranks, if there are any, without waiting for them. From any thread.

    Args:
        core: The engine.
        key: The session of what they do together.
        error: Why this rank does not come; whoever calls this raises it.
    """
    errors = [error]  # to be taken out: whoever keeps an error is kept by its traceback, for ever

    async def tell(context: EngineContext) -> None:
        context.agreements.clear()  # as the others do, whose save fails
        await say_absent(context, key, errors.pop())

    with contextlib.suppress(EngineClosedError):
        if core.context.ranks.world_size > 1:
            core.submit(tell, f"fail {key}", in_flow=True)


@contextlib.contextmanager
def refusing(core: EngineCore, name: str) -> Iterator[None]:
    """Have the other ranks hear of an error of the block, which comes before what ranks do.

    Args:
        core: The engine.
        name: Of what they do, as `next_key` takes it.
    """
    try:
        yield
    except Exception as error:  # raised again; the other ranks must not wait for this one
        refuse(core, core.next_key(name), error)
        raise


async def say_absent(context: EngineContext, key: str, error: BaseException) -> None:
    """Tell the other ranks, if there are any; see `refuse`."""
    if context.ranks.world_size == 1:
        return
    cause = error if isinstance(error, Exception) else SaveAbortedError("it was stopped there")
    try:
        with contextlib.suppress(RankError, TimeoutError):  # the caller raises `error`
            async with asyncio.timeout(_TELL_S), context.ranks.session(key):
                raise cause
    finally:
        del error, cause  # its traceback has this frame now, and the state that was refused
