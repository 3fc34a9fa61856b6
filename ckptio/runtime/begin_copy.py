"""Begin copies to a second tier: those of saves, and those that earlier runs owed.

A copy has a task of its own from the moment in which its save is asked for: it waits for
the commit there, so that leaving the engine waits for both, and aborts both. Copies that
earlier runs owed are one more task, which leaving waits for and aborts just so: a run that saves
once and ends would never make more than one of them else.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from ckptio._aio import run_blocking, shielded
from ckptio.engine.tiers import CopyJob, make_copy
from ckptio.engine.transfer import require_files
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    FormatError,
    SaveAbortedError,
)
from ckptio.events import CopyFailed
from ckptio.format.manifest import decode_manifest
from ckptio.format.note import decode_note
from ckptio.format.summary import decode_summary
from ckptio.moments import CheckpointInfo
from ckptio.runtime.refusal import say_absent

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio.engine.context import EngineContext
    from ckptio.moments import Moment, SaveMoments
    from ckptio.runtime.core import EngineCore
    from ckptio.runtime.running import Running
    from ckptio.storage.interface import Note, Storage
    from ckptio.storage.resolve import PathLike

    Say = Callable[[], None]


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


def begin_copy(
    core: EngineCore,
    job: CopyJob,
    moments: SaveMoments,
    running: Running[Say],
    begins: Moment[None] | None = None,
) -> None:
    """Have a checkpoint copied when it is committed. On the caller's thread.

    The first copy from a directory also takes up what earlier runs owed there; and so does
    the next one after copies have failed, and one was made again.

    Args:
        core: The engine.
        job: The copy; gets its place in the line.
        moments: The save's.
        running: Takes the end of the copy: what tells the handle of it.
        begins: What the copy waits for, instead of the commit. Whoever
            reaches it tells the handle how the copy ended, too; else the copy's task does.
    """
    copies = core.context.copies
    job.ticket = core.next_number("copy")
    copies.under_way.add(job.name)

    async def copy_and_say(context: EngineContext) -> Say:
        say = await _copied(job, moments, begins or moments.committed, context)
        if begins is None:
            say()
        return say

    core.submit(copy_and_say, f"copy {job.source.path}", running)
    parent = parent_of(job.source.path)
    if parent and (parent not in copies.seen or copies.owing.get(parent)):
        copies.seen.add(parent)
        copies.owing.pop(parent, None)
        core.submit(functools.partial(take_up, parent), f"take up copies of {parent}")


def parent_of(path: str) -> str:
    """Give the directory or the prefix that a checkpoint lies in; empty if there is none."""
    parent = path.rpartition("/")[0]
    return "" if parent.endswith(("/", ":")) else parent


async def _copied(
    job: CopyJob, moments: SaveMoments, begins: Moment[Any], context: EngineContext
) -> Say:
    """Copy what was committed, and give what tells the handle how that ended. Never raises."""
    copies, parent = context.copies, parent_of(job.source.path)
    try:
        try:
            # to its end even when this is stopped: what comes of the copy depends on it
            await shielded(begins.ended())
            if begins.error() is not None:
                return _nothing  # the handle says so
            note = await job.source.take_note(job.save_id) if context.ranks.rank == 0 else None
        except BaseException as error:
            if begins.error() is not None:
                return _nothing
            context.emit(
                CopyFailed(
                    path=job.source.path, to=job.target.path, save_id=job.save_id, error=error
                )
            )
            await shielded(say_absent(context, job.key, error))
            raise
        await make_copy(job, context, note)
    except BaseException as error:  # the handle raises it
        copies.owing[parent] = False
        return functools.partial(_fail, moments, _cause(job, error))
    finally:
        copies.part(job.name)
        copies.end(job.ticket or 0)
    if parent in copies.owing:  # the second tier is back
        copies.owing[parent] = True
    first = moments.committed.wait(0)
    info = CheckpointInfo(
        path=job.target.path,
        save_id=job.save_id,
        nbytes=first.nbytes,
        num_files=first.num_files,
        num_tensors=first.num_tensors,
        staged_s=first.staged_s,
        committed_s=job.elapsed_s(),
        plan_reused=first.plan_reused,
    )
    return functools.partial(moments.durable.reach, info)


def _nothing() -> None:
    """A save that was not committed has no copy."""


def _fail(moments: SaveMoments, error: BaseException) -> None:
    if not moments.durable.done():  # a save that failed has said so
        moments.durable.fail(error)
        if isinstance(error, CheckpointChangedError):
            moments.seen()  # a later save took its place, and has a copy of its own


def _cause(job: CopyJob, error: BaseException) -> Exception:
    """Give what `durable` raises."""
    if isinstance(error, Exception):
        if not isinstance(error, CheckpointChangedError):  # then it has gone
            error.add_note(f"the checkpoint {job.source.path!r} itself is committed, and stays")
        return error
    return SaveAbortedError(
        f"the copy of {job.source.path!r} to {job.target.path!r} was stopped; the checkpoint itself"
        " is untouched, and finish_copies or the next save with then= goes on with the copy"
    )


async def take_up(root: str, context: EngineContext) -> None:
    """Make the copies that earlier runs owed. What fails was told the observer, or the log."""
    with contextlib.suppress(CheckpointError):  # an event has each, and that of the list
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
        CheckpointError: One could not be made, the first of them; all were tried. Each is told
            by an event, too.
    """
    if context.ranks.rank != 0:
        return ()
    place = context.resolver.root(root)
    paths = [place.path]
    try:
        found = await place.find()
    except CheckpointError as error:
        _tell(context, place.path, error)
        raise
    paths += [place.join(item.name) for item in found if item.version is not None]
    made, failure = [], None
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
    save_id = ""
    try:
        storage = context.resolver.storage(path)
        save_id = await committed_save(storage, context) or ""
    except CheckpointError as error:
        _tell(context, path, error)
        raise
    name = storage.identity, save_id
    if not save_id or name in context.copies.under_way:
        return None
    context.copies.under_way.add(name)
    try:
        try:
            owed = await _take_owed(storage, save_id, context)
        except CheckpointError as error:
            _tell(context, path, error, save_id)
            raise
        if owed is None:
            return None
        job, note = owed
        try:
            sent_nbytes = await context.copies.stoppable(name, make_copy(job, context, note))
        finally:
            await shielded(note.release())  # where it was stopped before it could do so
        return None if sent_nbytes is None else job.target.path
    finally:
        context.copies.part(name)


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
            target=context.resolver.storage(found.copy_to),
            overwrite=found.overwrite,
            resumes=True,
        )
    except BaseException:
        await shielded(note.release())
        raise
    if job.target.identity == storage.identity:  # it was moved to where it is wanted
        await shielded(note.drop())
        return None
    return job, note


async def committed_save(storage: Storage, context: EngineContext) -> str | None:
    """Give the id of the save that is committed somewhere; `None` if there is none of ours."""
    try:
        _, data = await storage.read_manifest()
        if not isinstance(data, bytes):
            return None
        return (await run_blocking(context.executor, decode_summary, data)).save_id
    except (CheckpointNotFoundError, FormatError):
        return None


async def is_owed(storage: Storage, context: EngineContext) -> bool:
    """Whether a checkpoint is still to be copied."""
    save_id = await committed_save(storage, context)
    return save_id is not None and await storage.has_note(save_id)


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
