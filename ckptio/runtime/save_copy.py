"""The copy of a save to a second tier, from the moment in which the save is asked for.

It has a task of its own from then on: it waits for the commit there, so that leaving the
engine waits for both, and aborts both.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from ckptio._aio import shielded
from ckptio._failures import without_locals
from ckptio.engine.tiers import CopyJob, is_replaced, make_copy
from ckptio.errors import ConfigError, RankError, SaveAbortedError
from ckptio.events import CopyFailed
from ckptio.runtime.owed_copies import parent_of, take_up
from ckptio.runtime.refusal import say_absent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ckptio.engine.context import EngineContext
    from ckptio.moments import Moment, SaveMoments
    from ckptio.runtime.core import EngineCore
    from ckptio.runtime.running import Running

    Say = Callable[[], None]
    HandOver = Callable[[Callable[[EngineContext], Awaitable[Say]], str, Running[Say]], object]


def begin_copy(
    hand_over: HandOver,
    core: EngineCore,
    job: CopyJob,
    moments: SaveMoments,
    running: Running[Say],
    begins: Moment[None] | None = None,
) -> None:
    """Have a checkpoint copied when it is committed.

    Its place in the line is taken by its task, first of all: copies begin there in the order in
    which they are handed over, and one that was aborted before begins all the same, and gives
    its place back. On the caller's thread, an interrupt between the two would keep the place for
    ever, and all later copies behind it.

    The first copy from a directory also takes up what earlier runs owed there; and so does
    the next one after copies have failed, and one was made again.

    Args:
        hand_over: Hands the task to the engine's loop: `submit`, or `begin_beside` on the loop.
        core: The engine.
        job: The copy; gets its place in the line.
        moments: The save's.
        running: Takes the end of the copy: what tells the handle of it.
        begins: What the copy waits for, instead of the commit. Whoever
            reaches it tells the handle how the copy ended, too; else the copy's task does.

    Raises:
        EngineClosedError: The engine was closed since the save began, which goes on. The copy
            is owed. Not from `begin_beside`.
    """

    async def copy_and_say(context: EngineContext) -> Say:
        _take_up_beside(core, parent_of(job.source.path), context)
        context.copy_line.enter(job)
        say = await _copied(job, moments, begins or moments.committed, context)
        if begins is None:
            say()
        return say

    hand_over(copy_and_say, f"copy {job.source.path}", running)


def _take_up_beside(core: EngineCore, parent: str, context: EngineContext) -> None:
    """Make what is owed in a directory, unless that was seen to and no copy has failed since."""
    copies = context.copies
    if parent and (parent not in copies.seen or copies.owing.get(parent)):
        copies.seen.add(parent)
        copies.owing.pop(parent, None)
        core.begin_beside(functools.partial(take_up, parent), f"take up copies of {parent}")


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
            unmade = list(copies.unmade)  # of earlier saves: later ones commit later
            note = context.notes.take(job.save_id)  # on rank 0
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
        copies.unmade[job.name] = moments
        return functools.partial(_fail, moments, without_locals(_cause(job, error)))
    finally:
        context.copy_line.end(job)
        copies.end(job.save_id)
        await context.notes.let_go(job.save_id)  # of a save that was not committed
    copies.has_replaced(job, unmade)
    if parent in copies.owing:  # the second tier is back
        copies.owing[parent] = True
    first = moments.committed.wait(0)
    info = dataclasses.replace(first, path=job.target.path, committed_s=job.elapsed_s())
    return functools.partial(moments.durable.reach, info)


def _nothing() -> None:
    """A save that was not committed has no copy."""


def _fail(moments: SaveMoments, error: BaseException) -> None:
    # a save that failed has said so
    if moments.durable.fail_unless_done(error) and is_replaced(error):
        moments.seen()  # a later save took its place, and has a copy of its own


def _cause(job: CopyJob, error: BaseException) -> Exception:
    """Give what `durable` raises."""
    if isinstance(error, Exception):
        if not is_replaced(error):  # then it has gone
            error.add_note(_what_stays(job, error))
        return error
    return SaveAbortedError(
        f"the copy of {job.source.path!r} to {job.target.path!r} was stopped; the checkpoint itself"
        " is untouched, and finish_copies or the next save with then= goes on with the copy"
    )


def _what_stays(job: CopyJob, error: Exception) -> str:
    """Say what there is of a checkpoint whose copy failed, and who makes that.

    Its note was left before the commit. A copy that was refused may be none that can be made: of
    that, the error says what to do.
    """
    stays = f"the checkpoint {job.source.path!r} itself is committed, and stays"
    if isinstance(error, ConfigError) or (
        isinstance(error, RankError) and error.was_caused_by(ConfigError)
    ):
        return stays
    return (
        f"{stays}; its copy is owed: the next run that saves with then= there, or"
        f" ckptio.finish_copies({job.source.path!r}), goes on with it"
    )
