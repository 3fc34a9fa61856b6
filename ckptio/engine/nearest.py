"""Choose the tier that a checkpoint is read from: the first that has it whole.

Whole is what a load looks at before it begins: a manifest that can be read, and every data
file with the size that it should have.

* Where a file is cut, the second tier is read if it has the same save or a later one; an older one
  would be the past without a word, and the damage is said.
* A manifest that is damaged says nothing of its save. A note beside it does: that a copy is owed,
  and so the second tier has an older save, if any. That is said then, and the second is not read;
  nor is it where the first only cannot be read just now, as by a process with too many open files.
* Where a block turns out damaged later, one process alone reads the second tier if that has the
  same save: its checksums are the same, so nothing is guessed. Ranks raise, and say where it may be
  whole. That they begin anew together was rejected: one of them may have another reason to end, or
  a caller that has given up, and the others would wait for it.

A first tier may be what one machine has, and the second what all of them share. Was the step
saved again elsewhere, by the clocks of both, what is here is the past: the later one is read,
unless the copy of this one is still to be made. A second tier that does not answer soon is away,
and the first is read; only where that has nothing is it waited for, as in any load of it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptio.engine.group import fetch_manifest
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
from ckptio.ranks.interface import Same, require_alike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.group import Course
    from ckptio.format.manifest import Manifest
    from ckptio.format.summary import Summary
    from ckptio.storage.interface import Storage

    #: A save, by its id, and when it was made.
    _Saved = tuple[str, str]

_log = logging.getLogger("ckptio")

#: How long a load from the first tier waits to hear what the second one has.
_LOOK_S = 5.0


class _Choice(NamedTuple):
    """Which of two tiers is read.

    Attributes:
        is_second: The second, and not the first; `None` if neither has a checkpoint.
        is_refused: The first, though its manifest cannot be read: the second may have the past.
    """

    is_second: bool | None
    is_refused: bool = False


async def _find_nearest(first: Storage, second: Storage, context: EngineContext) -> _Choice:
    """Say which of two tiers to read.

    An event says so if it is not the first.

    Args:
        first: The first tier.
        second: The second.
        context: The engine.

    Raises:
        StorageError: The first has none, and the second cannot be reached.
        ConfigError: Its blocks do not fit the slabs of this engine. Or the second is the first,
            by another name.
    """
    answers = await second.locate()
    if second.identity == await first.identify():
        raise ConfigError(f"then= is {second.path!r}, which is where the checkpoint itself is")
    here, wrong = await _look_at(first, context)
    if here is None or isinstance(wrong, CheckpointNotFoundError):
        has_none = isinstance(wrong, CheckpointNotFoundError)
        if not has_none and await _may_owe(first, wrong):
            return _Choice(is_second=False, is_refused=True)  # whoever reads it says what is wrong
        # where nothing else is left to read, a mount that hangs is waited for, as in a load of it
        has_other = await _has_any(second, raises=has_none) if answers or has_none else False
        if has_other:
            _pass_over(first, second, wrong, context)
            return _Choice(is_second=True)
        return _Choice(is_second=None if has_none else False)
    if not answers:
        return _Choice(is_second=False)
    there = await _head_soon(second, context) if wrong is None else await _head(second, context)
    if there is None:
        return _Choice(is_second=False)
    if wrong is None:
        problem = "a later save of it is on the second tier, and this one owes no copy"
        is_second = await _is_replaced(here, there, first)
        wrong = StorageError(problem, path=first.path)
    else:  # an older one would be the past, without a word
        is_second = there.save_id == here.save_id or await _is_replaced(here, there, first)
    if is_second:
        _pass_over(first, second, wrong, context)
    return _Choice(is_second=is_second)


async def _look_at(
    storage: Storage, context: EngineContext
) -> tuple[Manifest | None, CheckpointError | None]:
    """Give the manifest of a checkpoint, if it can be read, and what is wrong with it, if so."""
    manifest = None
    for is_last in (False, True):
        try:
            manifest = await context.cache.get(storage)
            await check_sizes(Reading(storage, manifest), range(len(manifest.files)), context)
        except ConfigError:
            raise
        except CheckpointError as error:
            # overwritten meanwhile, there is another one
            if is_last or not isinstance(error, CheckpointChangedError):
                return manifest, error
        else:
            return manifest, None
    raise AssertionError  # it was returned, or raised


async def _may_owe(first: Storage, wrong: CheckpointError | None) -> bool:
    """Whether a tier whose manifest cannot be read may owe a copy; yes if nobody can tell.

    Args:
        first: The tier.
        wrong: Why it cannot be read.
    """
    if isinstance(wrong, StorageError) and wrong.errno != errno.EIO:
        return True
    try:
        return await first.has_note(None)
    except StorageError:
        return True


async def _has_any(storage: Storage, *, raises: bool) -> bool:
    """Whether a tier has a checkpoint, of anybody's.

    Args:
        storage: The tier.
        raises: Whether that nobody can tell is an error, and not a no.
    """
    try:
        await storage.version()
    except CheckpointNotFoundError:
        return False
    except StorageError:
        if raises:
            raise
        return False
    return True


async def _is_replaced(here: Manifest, there: Summary, first: Storage) -> bool:
    """Whether what is on the first tier was saved again elsewhere; no if nobody can tell."""
    if here.is_foreign:
        return False
    one, other = ((each.save_id, each.created) for each in (here, there))
    return await was_saved_again(one, other, first)


async def was_saved_again(here: _Saved, there: _Saved, first: Storage) -> bool:
    """Whether the second tier has a later save, which is what a load reads of the two.

    By the clocks of both, and unless the first still owes its copy: then that is the later one.
    No if nobody can tell.

    Args:
        here: Save id and time of what the first tier has.
        there: Of what the second has.
        first: The first.
    """
    if there[0] == here[0] or not is_newer(there[1], here[1]):
        return False
    try:
        return not await first.has_note(here[0])
    except StorageError:
        return False


def _pass_over(
    first: Storage, second: Storage, error: CheckpointError | None, context: EngineContext
) -> None:
    """Say that the second tier is read; to the log, unless the first has just nothing."""
    assert error is not None  # noqa: S101  # there is a reason
    context.emit(TierPassedOver(path=first.path, to=second.path, error=error))
    if context.observer is None and not isinstance(error, CheckpointNotFoundError):
        _log.warning("%s is read, the second tier of %s: %s", second.path, first.path, error)


async def _head_soon(storage: Storage, context: EngineContext) -> Summary | None:
    """Give the head of what a tier has; `None` if it has nothing, or says nothing soon."""
    try:
        async with asyncio.timeout(_LOOK_S):
            return await _head(storage, context)
    except TimeoutError:
        return None


async def _head(storage: Storage, context: EngineContext) -> Summary | None:
    """Give the head of what a tier has; `None` if it has nothing, or nobody can tell.

    A mount that hangs is given up; requests end.
    """
    try:
        return await read_head(storage, context, gives_up=True)
    except CheckpointError:
        return None


async def fetch_nearest(
    first: Storage, second: Storage, context: EngineContext, course: Course
) -> tuple[Storage, Manifest]:
    """Say which of two tiers to read, and read its manifest; rank 0, for all.

    Raises:
        CheckpointError: As `_agree` and `fetch_manifest` do.
    """
    choice = await _agree(first, second, context, course)
    storage = second if choice.is_second else first
    try:
        if choice.is_second:
            await _locate_too(second, context)
        found = await _fetch(storage, context, course, "manifest")
    except CheckpointError as error:
        if choice.is_refused and not isinstance(error, PeerLostError):
            error.add_note(
                "the second tier is not read instead, which may have an older save of it: load"
                f" {second.path!r}"
            )
        raise
    if isinstance(found, CheckpointNotFoundError) and storage is first:
        # removed since it was looked at, for all ranks: no reason to begin a run anew
        gone, storage = found, second
        course.next_session = course.of("manifest again")
        await _locate_too(second, context)
        found = await _fetch(second, context, course, "manifest again")
        if context.ranks.rank == 0 and not isinstance(found, CheckpointNotFoundError):
            _pass_over(first, second, gone, context)
    if isinstance(found, CheckpointNotFoundError):
        raise _missing(first, second)
    return storage, found


async def _locate_too(second: Storage, context: EngineContext) -> None:
    """Find out where the second tier is that is read, on the ranks that had not to ask it."""
    if context.ranks.rank > 0:
        await second.locate()


async def _fetch(
    storage: Storage, context: EngineContext, course: Course, phase: str
) -> Manifest | CheckpointNotFoundError:
    """Read a manifest, or give the error that says, on every rank, that there is none."""
    try:
        return await fetch_manifest(storage, context, course, phase)
    except CheckpointNotFoundError as error:
        return error


async def _agree(
    first: Storage, second: Storage, context: EngineContext, course: Course
) -> _Choice:
    """Say which of two tiers to read; rank 0, for all.

    Raises:
        CheckpointNotFoundError: Neither has a checkpoint; on every rank.
        RankError: It failed on some rank.
        StorageError: The first has none, and the second cannot be reached; of one rank alone.
        ConfigError: Its blocks do not fit the slabs of this engine, or the second is the first,
            by another name; of one rank alone.
    """
    if context.ranks.world_size == 1:
        choice = await _find_nearest(first, second, context)
        if choice.is_second is None:
            raise _missing(first, second)
        return choice

    async def decide(messages: Sequence[Any]) -> Same:
        require_alike(messages, "loads", "load")
        return Same([*await _find_nearest(first, second, context)])

    course.next_session = ""
    async with context.ranks.session(course.of("tier"), course.title) as session:
        # if this rank fails from here on, others may be through with this session already
        course.next_session = course.of("manifest")
        choice = _Choice(*await session.round("tier", [first.path, second.path], decide))
    if choice.is_second is None:  # raised as such on every rank: whoever resumes catches it
        course.next_session = ""
        raise _missing(first, second)
    return choice


async def makes_up_for(
    first: Storage, second: Storage, save_id: str, error: CheckpointError, context: EngineContext
) -> bool:
    """Whether to read the second tier, after a load of the first failed; an event says so if so.

    Only a load by one rank does, if a file of the first tier is damaged and the second tier has
    the same save. Otherwise a note on the error says where else the checkpoint may be.

    Args:
        first: The first tier.
        second: The second.
        save_id: The save that was read.
        error: How reading it failed.
        context: The engine.
    """
    if context.ranks.world_size > 1:
        is_of_a_rank = isinstance(error, RankError) and error.was_caused_by(CorruptionError)
        if isinstance(error, CorruptionError) or is_of_a_rank:
            error.add_note(f"the second tier may have it whole: load {second.path!r}")
        return False
    is_lost = isinstance(error, StorageError) and error.errno == errno.EIO
    if not (isinstance(error, CorruptionError) or is_lost):
        return False
    head = await _head_soon(second, context) if await second.locate() else None
    if head is None:
        return False
    if head.save_id != save_id:
        error.add_note(
            f"the second tier has another save of it, of {head.created}: load {second.path!r}"
        )
        return False
    _pass_over(first, second, error, context)
    return True


def _missing(first: Storage, second: Storage) -> CheckpointNotFoundError:
    hint = f"there is no committed checkpoint here, nor at {second.path!r}"
    return CheckpointNotFoundError(first.path, hint)
