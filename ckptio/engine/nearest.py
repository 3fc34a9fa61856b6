"""Choose the tier that a checkpoint is read from: the first that has it whole.

Whole is what a load looks at before it begins: a manifest that can be read, and every data
file with the size that it should have. A block that turns out damaged later raises, as
ever: which tier is right then is not guessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptio.engine.landing import Reading
from ckptio.engine.load import check_sizes
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    StorageError,
)
from ckptio.events import TierPassedOver
from ckptio.ranks.interface import OutOfStepError, Same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.group import Course
    from ckptio.storage.interface import Storage


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
    return first


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


def _missing(first: Storage, second: Storage) -> CheckpointNotFoundError:
    hint = f"there is no committed checkpoint here, nor at {second.path!r}"
    return CheckpointNotFoundError(first.path, hint)
