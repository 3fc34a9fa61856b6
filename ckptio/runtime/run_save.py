"""Run a save, and tell its handle how it ended: at once, or when the engine of one call is gone."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING

from ckptio._failures import without_locals
from ckptio.engine.save import save_alone
from ckptio.engine.together import save_together
from ckptio.engine.turns import place_for, turn
from ckptio.errors import EngineClosedError, SaveAbortedError
from ckptio.events import SaveCommitted, SaveFailed
from ckptio.moments import CheckpointInfo, Moment
from ckptio.runtime.aside import run_uninterrupted
from ckptio.runtime.save_copy import begin_copy

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio.engine.context import EngineContext
    from ckptio.engine.save import SaveJob, SaveReceipt
    from ckptio.engine.tiers import CopyJob
    from ckptio.moments import SaveMoments
    from ckptio.runtime.core import EngineCore
    from ckptio.runtime.running import Running

    Say = Callable[[], None]


async def run_save(job: SaveJob, context: EngineContext) -> SaveReceipt:
    """Save a state. When this returns, the checkpoint exists.

    Cancelling it, or a failure, leaves what was at the path as it was, and no file, task,
    thread or slab behind.

    Raises:
        CheckpointError: The first failure of any part.
    """
    with turn(job, context) as my_turn:
        is_sharded = any(spec.global_shape is not None for spec in job.flat.specs)
        if context.ranks.world_size > 1 or is_sharded:
            return await save_together(job, context, my_turn)
        async with place_for(job, context):
            return await save_alone(job, context, my_turn)


async def saved(job: SaveJob, context: EngineContext, begins: Moment[None] | None = None) -> Say:
    """Run a save, and give what tells its handle how it ended. Never raises.

    Args:
        job: The save.
        context: The engine's.
        begins: Fails as the save does, before its handle is told.
    """
    try:
        receipt = await run_save(job, context)
    except BaseException as error:  # the handle raises it
        return _failed(job, context, error, begins)
    finally:
        del begins  # the error refers to this frame: no reference cycle
    moments = job.end()
    info = CheckpointInfo(
        path=moments.path,
        save_id=moments.save_id,
        nbytes=receipt.nbytes,
        num_files=receipt.num_files,
        num_tensors=receipt.num_tensors,
        staged_s=job.staged_s,
        committed_s=job.elapsed_s(),
        plan_reused=receipt.plan_reused,
    )
    context.emit(
        SaveCommitted(
            path=moments.path,
            save_id=moments.save_id,
            nbytes=info.nbytes,
            elapsed_s=info.committed_s,
        )
    )
    return lambda: moments.committed.reach(info)


def _failed(
    job: SaveJob, context: EngineContext, error: BaseException, begins: Moment[None] | None
) -> Say:
    """Give what tells the handle that the save has failed.

    A function of its own: what it gives refers to no frame that the error has (a reference cycle).
    """
    moments = job.end()
    job.source.watch.drop()
    if isinstance(error, Exception):
        ended = error
    else:
        aborted = f"the save to {moments.path!r} was aborted; what was there is untouched"
        ended = SaveAbortedError(aborted)
    context.emit(SaveFailed(path=moments.path, save_id=moments.save_id, error=error))
    if begins is not None:
        begins.fail(ended)
    return functools.partial(moments.fail, without_locals(ended))


def stop_alone(core: EngineCore, copying: Running[Say]) -> Callable[[], None]:
    """Give what stops the copy of an engine's one save, and those that it took up for others.

    Nobody has a handle of the latter, and the end of the former is said when the engine is gone.
    """
    stop_rest = weakref.WeakMethod(core.abort_in_flight)  # a handle keeps no engine

    def stop() -> None:
        copying.abort()
        rest = stop_rest()
        if rest is not None:
            rest()

    return stop


def run_alone(
    core: EngineCore,
    job: SaveJob,
    copy: CopyJob | None,
    running: Running[Say],
    copying: Running[Say],
) -> None:
    """Start the one save of an engine, and its copy; a thread closes the engine behind them.

    A commit is said before its copy begins. The end of the copy, or of a save without one, or
    that a save failed, is said when the engine is gone: its loop has ended, and all of its
    threads. That one thread says so itself, and has nothing to do then but to return; who counts
    threads may still see it. Where no thread begins, the caller's does that, and blocks.

    Args:
        core: The engine.
        job: The save.
        copy: The copy; `None` if there is no second tier.
        running: Takes the end of the save.
        copying: Takes the end of the copy.
    """
    begins: Moment[None] = Moment()
    rest = functools.partial(_close_after, core, job.moments, copy, running, copying, begins)
    core.submit(lambda context: saved(job, context, begins), f"save {job.storage.path}", running)
    is_begun = True

    def begin() -> None:
        nonlocal is_begun
        try:
            threading.Thread(target=rest, name="ckptio-save", daemon=False).start()
        except RuntimeError:  # the limit of threads is reached, or the interpreter ends
            is_begun = False

    # an interrupt leaves a lock of `start` locked, which every thread of the process needs
    run_uninterrupted(begin, "ckptio-begin", lambda: None)
    if not is_begun:
        rest()


def _close_after(
    core: EngineCore,
    moments: SaveMoments,
    copy: CopyJob | None,
    running: Running[Say],
    copying: Running[Say],
    begins: Moment[None],
) -> None:
    # here, and not on the caller's thread: interrupted before it is said that there is
    # something to copy, that would wait for its end, and the copy for the word
    is_refused = False
    if copy is not None:
        try:
            begin_copy(core.submit, core, copy, moments, copying, begins)
        except EngineClosedError:  # the program ends: the copy is owed, and the save goes on
            is_refused = True
        if copying.is_aborted and not is_refused:  # before there was anything to stop
            core.abort_in_flight()
    running.wait_ended()
    is_committed = not begins.done()
    if copy is not None and is_committed:
        running.end.result()()
        begins.reach(None)
    try:
        core.close()
    finally:
        if copy is None or not is_committed:
            running.end.result()()
        elif is_refused:
            error = EngineClosedError("the program ended before the copy began")
            moments.durable.fail_unless_done(error)
        else:  # where somebody else closes the engine, it may not have ended yet
            copying.end.result()()
        moments.is_over()
