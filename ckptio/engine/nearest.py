"""Choose the tier that a checkpoint is read from: the first that has it whole.

Whole is what a load looks at before it begins: a manifest that can be read, and every data
file with the size that it should have. Where a block turns out damaged later, the second tier
is read if it has the same save: its checksums are the same, so nothing is guessed.

A first tier may be what one machine has, and the second what all of them share. Was the step
saved again elsewhere, what is here is the past: the later one is read, unless the copy of this
one is still to be made. A second tier that does not answer soon is away, and the first is read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ckptio.engine.heads import read_head
from ckptio.engine.landing import Reading
from ckptio.engine.load import check_sizes
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    PeerLostError,
    RankError,
    StorageError,
)
from ckptio.events import TierPassedOver
from ckptio.format.summary import is_newer
from ckptio.ranks.interface import OutOfStepError, Same

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.group import Course
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
    try:
        async with asyncio.timeout(_LOOK_S):
            there = await read_head(second, context)
    except (TimeoutError, StorageError):
        return False
    here = await context.cache.get(first)
    if there is None or there.save_id == here.save_id or not is_newer(there.created, here.created):
        return False
    return not await first.has_note(here.save_id)


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

    async def look() -> bool | None:
        try:
            return await find_nearest(first, second, context) is second
        except CheckpointNotFoundError:  # raised as such on every rank: who resumes catches it
            return None

    is_second = await _agree([first.path, second.path], look, context, course)
    if is_second is None:
        course.next_session = ""
        raise _missing(first, second)
    return second if is_second else first


async def _agree(
    what: list[str],
    look: Callable[[], Awaitable[bool | None]],
    context: EngineContext,
    course: Course,
) -> bool | None:
    """Have rank 0 look, for all; each says what it loads."""

    async def decide(messages: Sequence[Any]) -> Same:
        for rank, message in enumerate(messages):
            if message != messages[0]:
                raise OutOfStepError(
                    f"rank {rank} loads {message} and rank 0 {messages[0]}; call load on all ranks"
                    " alike and in one order"
                )
        return Same(await look())

    course.next_session = ""
    async with context.ranks.session(course.of("tier"), course.title) as session:
        # if this rank fails from here on, others may be through with this session already
        course.next_session = course.of("manifest")
        answer: bool | None = await session.round("tier", what, decide)
    return answer


def is_damage(error: CheckpointError) -> bool:
    """Whether a load failed since files are damaged, and since nothing else was wrong."""
    if isinstance(error, CorruptionError):
        return True
    causes = error.causes.values() if isinstance(error, RankError) else ()
    is_lost = isinstance(error, PeerLostError) or not causes
    return not is_lost and all(c.startswith(f"{CorruptionError.__name__}:") for c in causes)


async def agree_on_copy(
    first: Storage,
    second: Storage,
    save_id: str,
    context: EngineContext,
    course: Course,
    error: CheckpointError,
) -> bool:
    """Say whether the second tier is read, as a file of the first is damaged.

    Rank 0 says it, for all; an event says so.

    Args:
        first: The first tier.
        second: The second.
        save_id: What is read.
        context: The engine.
        course: Of the load that begins anew: all ranks have heard of the damage.
        error: What is wrong with the first.
    """

    async def look() -> bool:
        try:
            head = await read_head(second, context)
        except StorageError:
            return False
        if head is None or head.save_id != save_id:
            return False
        context.emit(TierPassedOver(path=first.path, to=second.path, error=error))
        return True

    if context.ranks.world_size == 1:
        return await look()
    is_there = await _agree([first.path, second.path, save_id], look, context, course)
    if not is_there:
        course.next_session = ""
    return bool(is_there)


def _missing(first: Storage, second: Storage) -> CheckpointNotFoundError:
    hint = f"there is no committed checkpoint here, nor at {second.path!r}"
    return CheckpointNotFoundError(first.path, hint)
