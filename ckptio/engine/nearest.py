"""Choose the tier that a checkpoint is read from: the first that has it whole.

Whole is what a load looks at before it begins: a manifest that can be read, and every data
file with the size that it should have. Where a block turns out damaged later, one process alone
reads the second tier if that has the same save: its checksums are the same, so nothing is guessed.
Ranks raise, and say where it may be whole. That they begin anew together was rejected: one of them
may have another reason to end, or a caller that has given up, and the others would wait for it.

A first tier may be what one machine has, and the second what all of them share. Was the step
saved again elsewhere, by the clocks of both, what is here is the past: the later one is read,
unless the copy of this one is still to be made. A second tier that does not answer soon is away,
and the first is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from typing import TYPE_CHECKING, Any

from ckptio._aio import Threads
from ckptio.engine.heads import read_head
from ckptio.engine.landing import Reading
from ckptio.engine.load import check_sizes
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    RankError,
    StorageError,
)
from ckptio.events import TierPassedOver
from ckptio.format.summary import is_newer
from ckptio.ranks.interface import OutOfStepError, Same
from ckptio.storage.resolve import remote_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.group import Course
    from ckptio.format.summary import Summary
    from ckptio.storage.interface import Storage

#: How long a load from the first tier waits to hear what the second one has.
_LOOK_S = 5.0


async def find_nearest(first: Storage, second: Storage, context: EngineContext) -> Storage:
    """Say which of two tiers to read.

    An event says so if it is not the first.

    Raises:
        CheckpointNotFoundError: Neither has a checkpoint.
        StorageError: The first has none, and the second cannot be reached.
        ConfigError: Its blocks do not fit the slabs of this engine.
    """
    try:
        await _check(first, context)
    except ConfigError:
        raise
    except CheckpointError as error:
        try:
            await second.version()
        except CheckpointNotFoundError:
            if isinstance(error, CheckpointNotFoundError):
                raise _missing(first, second) from None
            return first  # what is wrong with it is said by whoever reads it
        except StorageError:
            if isinstance(error, CheckpointNotFoundError):
                raise  # nobody knows whether there is one
            return first  # as above
        context.emit(TierPassedOver(path=first.path, to=second.path, error=error))
        return second
    if not await _is_of_the_past(first, second, context):
        return first
    problem = "a later save of it is on the second tier, and this one owes no copy"
    context.emit(
        TierPassedOver(
            path=first.path, to=second.path, error=StorageError(problem, path=first.path)
        )
    )
    return second


async def _is_of_the_past(first: Storage, second: Storage, context: EngineContext) -> bool:
    """Whether what is on the first tier was replaced elsewhere; no if nobody can tell."""
    here = await context.cache.get(first)
    there = None if here.is_foreign else await _head_soon(second, context)
    if there is None or there.save_id == here.save_id or not is_newer(there.created, here.created):
        return False
    try:
        return not await first.has_note(here.save_id)
    except StorageError:
        return False


async def _head_soon(storage: Storage, context: EngineContext) -> Summary | None:
    """Give the head of what a tier has; `None` if it has nothing, or says nothing soon."""
    if not await _answers(storage.path):
        return None
    try:
        async with asyncio.timeout(_LOOK_S):
            return await read_head(storage, context)
    except (TimeoutError, CheckpointError):
        return None


async def _answers(path: str) -> bool:
    """Whether a file system answers: where a mount hangs, so does whoever looks at it.

    The thread that looks is given up then; it holds nothing.
    """
    if remote_url(path) is not None:
        return True
    threads = Threads(1, "ckptio-look")
    looking = asyncio.get_running_loop().run_in_executor(threads, _look_at, path)
    threads.shutdown(wait=False)
    done, _ = await asyncio.wait((looking,), timeout=_LOOK_S)
    return bool(done)


def _look_at(path: str) -> None:
    """Have a server say something: what is kept of it here may be shown while it hangs. Blocks."""
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


async def _check(storage: Storage, context: EngineContext) -> None:
    """Look whether a checkpoint is whole.

    Raises:
        CheckpointError: It is not.
    """
    for is_last in (False, True):
        manifest = await context.cache.get(storage)
        try:
            await check_sizes(Reading(storage, manifest), range(len(manifest.files)), context)
        except CheckpointChangedError:  # overwritten meanwhile: there is another one
            if is_last:
                raise
        else:
            return


async def agree_on_tier(
    first: Storage, second: Storage, context: EngineContext, course: Course
) -> Storage:
    """Say which of two tiers to read; rank 0, for all.

    Raises:
        CheckpointNotFoundError: Neither has a checkpoint; on every rank.
        RankError: It failed on some rank.
        ConfigError: As `find_nearest` says, of one rank alone.
    """
    if context.ranks.world_size == 1:
        return await find_nearest(first, second, context)

    async def decide(messages: Sequence[Any]) -> Same:
        for rank, message in enumerate(messages):
            if message != messages[0]:
                raise OutOfStepError(
                    f"rank {rank} loads {message} and rank 0 {messages[0]}; call load on all ranks"
                    " alike and in one order"
                )
        try:
            return Same(await find_nearest(first, second, context) is second)
        except CheckpointNotFoundError:  # raised as such on every rank: who resumes catches it
            return Same(None)

    course.next_session = ""
    async with context.ranks.session(course.of("tier"), course.title) as session:
        # if this rank fails from here on, others may be through with this session already
        course.next_session = course.of("manifest")
        is_second = await session.round("tier", [first.path, second.path], decide)
    if is_second is None:
        course.next_session = ""
        raise _missing(first, second)
    return second if is_second else first


async def makes_up_for(
    second: Storage, first: Storage, save_id: str, error: CheckpointError, context: EngineContext
) -> bool:
    """Whether the second tier is read, as a file of the first is damaged; an event says so.

    With several ranks it is not; the error says where else the checkpoint may be.

    Args:
        second: The second tier.
        first: The first.
        save_id: What is read.
        error: How that failed.
        context: The engine.
    """
    if context.ranks.world_size > 1:
        causes = error.causes.values() if isinstance(error, RankError) else ()
        name = CorruptionError.__name__
        if isinstance(error, CorruptionError) or any(c.startswith(f"{name}:") for c in causes):
            error.add_note(f"the second tier may have it whole: load {second.path!r}")
        return False
    is_lost = isinstance(error, StorageError) and error.errno == errno.EIO
    if not (isinstance(error, CorruptionError) or is_lost):
        return False
    head = await _head_soon(second, context)
    if head is None or head.save_id != save_id:
        return False
    context.emit(TierPassedOver(path=first.path, to=second.path, error=error))
    return True


def _missing(first: Storage, second: Storage) -> CheckpointNotFoundError:
    hint = f"there is no committed checkpoint here, nor at {second.path!r}"
    return CheckpointNotFoundError(first.path, hint)
