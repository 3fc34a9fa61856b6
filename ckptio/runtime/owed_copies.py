"""Copies to a second tier that earlier runs owed: a note beside a checkpoint tells of each.

They are one task, which leaving the engine waits for and aborts as it does with the copy of
a save: a run that saves once and ends would never make more than one of them else.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from ckptio._aio import GRACE_S, run_blocking, shielded
from ckptio.engine.heads import read_head
from ckptio.engine.tiers import CopyJob, make_copy
from ckptio.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckptio.events import CopyFailed
from ckptio.format.note import decode_note
from ckptio.storage.root import LocalRoot

if TYPE_CHECKING:
    from ckptio.engine.context import EngineContext
    from ckptio.storage.interface import Note, Storage
    from ckptio.storage.resolve import PathLike


def parent_of(path: str) -> str:
    """Give the directory or the prefix that a checkpoint lies in; empty if there is none."""
    parent = path.rpartition("/")[0]
    return "" if parent.endswith(("/", ":")) else parent


async def take_up(root: str, context: EngineContext) -> None:
    """Make the copies that earlier runs owed. What fails was told the observer, or the log."""
    # an event has each, and that of the list; and there need not be a directory yet
    with contextlib.suppress(CheckpointError):
        await finish_copies(root, context)


async def finish_copies(root: PathLike, context: EngineContext) -> tuple[str, ...]:
    """Make the copies that are owed of a checkpoint, and of those in a directory.

    On the engine's loop, and to the end also where the engine's block is left meanwhile.

    Args:
        root: The checkpoint or the directory.
        context: The engine's. With several ranks, rank 0 does all of it.

    Returns:
        Where copies were made, by path of the first tier.

    Raises:
        CheckpointError: One could not be made, or there is what cannot be looked at, such as
            somebody else's: the first of these; all others were tried. Each is told by an event,
            too.
        CheckpointNotFoundError: There is no directory: nobody is to read out of that that
            nothing is owed. (Object stores have none, and this is not raised there.)
    """
    if context.ranks.rank != 0:
        return ()
    place = context.resolver.root(root)
    paths = [place.path]
    unseen: list[tuple[str, StorageError]] = []
    try:
        found = await place.find(unseen=lambda name, error: unseen.append((name, error)))
    except CheckpointError as error:
        _tell(context, place.path, error)
        raise
    for name, why in unseen:
        _tell(context, place.join(name), why)
    is_unsure = not (found or unseen) and isinstance(place, LocalRoot)
    if is_unsure and not await run_blocking(context.executor, os.path.exists, place.path):
        raise CheckpointNotFoundError(place.path, "there is no such directory")
    paths += [place.join(item.name) for item in found if item.version is not None]
    made: list[str] = []
    failure: CheckpointError | None = unseen[0][1] if unseen else None
    for path in paths:
        try:
            if (to := await _finish(path, context)) is not None:
                made.append(to)
        except CheckpointError as error:
            context.copies.owing.setdefault(parent_of(path), False)
            failure = failure or error
    if failure is not None:
        raise failure
    return tuple(made)


def _tell(context: EngineContext, path: str, error: Exception, save_id: str = "") -> None:
    """Tell of a copy that did not come as far as to be one: nobody knows where to."""
    context.emit(CopyFailed(path=path, to="", save_id=save_id, error=error))


async def _finish(path: str, context: EngineContext) -> str | None:
    """Make the copy of a checkpoint, if one is owed; gives where to."""
    save_id, copies = "", context.copies
    unmade = list(copies.unmade)  # before what is there is looked at
    try:
        storage = context.resolver.storage(path)
        head = await read_head(storage, context)
        save_id = "" if head is None else head.save_id
    except CheckpointError as error:
        _tell(context, path, error)
        raise
    await storage.locate(gives_up=False)
    name = storage.identity, save_id
    if not save_id or name in copies.under_way:
        return None
    copies.under_way.add(name)
    try:
        try:
            owed = await _take_owed(storage, save_id, context)
        except CheckpointError as error:
            _tell(context, path, error, save_id)
            raise
        made: str | None = None
        if owed is not None:
            job, note = owed
            try:
                sent_nbytes = await copies.stoppable(name, make_copy(job, context, note))
            finally:
                await shielded(note.release())  # where it was stopped before it could do so
            if sent_nbytes is not None:
                made = job.target.path
                _tell_ranks(context, copies.has_replaced(job, unmade))
        if made or (name in copies.unmade and await _has_no_note(storage, save_id)):
            copies.is_owed_no_more(name)
            _tell_ranks(context, [save_id])
        return made
    finally:
        copies.part(name)


def _tell_ranks(context: EngineContext, save_ids: list[str]) -> None:
    """Have the other ranks told, with the next copy, of what is owed no more."""
    if context.ranks.world_size > 1:
        context.copies.untold += save_ids


async def _has_no_note(storage: Storage, save_id: str) -> bool:
    """Whether a copy is owed no more: it was overtaken, or somebody else has made it."""
    with contextlib.suppress(StorageError):
        return not await storage.has_note(save_id)
    return False


async def _take_owed(
    storage: Storage, save_id: str, context: EngineContext
) -> tuple[CopyJob, Note] | None:
    """Take the note of a copy and make a job of it; `None` if none is owed."""
    note = await storage.take_note(save_id)
    if note is None:
        return None
    try:
        found = decode_note(note.data)
        job = CopyJob(
            save_id=save_id,
            key=f"owed {save_id}",
            source=storage,
            target=context.resolver.storage(found.copy_to, is_second=True),
            overwrite=found.overwrite,
            resumes=True,
            replaced=found.replaced,
        )
        await job.target.locate()
    except BaseException:
        await shielded(note.release())
        raise
    if job.target.identity == storage.identity:  # it was moved to where it is wanted
        await shielded(note.drop(), grace_s=GRACE_S)
        return None
    return job, note


async def is_owed(storage: Storage, context: EngineContext) -> bool:
    """Whether a checkpoint is still to be copied."""
    head = await read_head(storage, context)
    return head is not None and await storage.has_note(head.save_id)
