"""The course of a save between the caller's thread and the engine's loop.

What touches the caller's objects (tensors, streams, stateful objects) happens on the caller's
thread, before `begin_save` returns; what is copied and written is, on the engine's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ckptio.config import require_bool
from ckptio.engine.save import SaveJob
from ckptio.engine.tiers import CopyJob
from ckptio.engine.together import save_id_of
from ckptio.errors import CheckpointError
from ckptio.moments import SaveMoments
from ckptio.runtime.refusal import refuse
from ckptio.runtime.run_save import run_alone, saved, stop_alone
from ckptio.runtime.running import Running
from ckptio.runtime.save_copy import begin_copy
from ckptio.runtime.second_tier import look_for_other, second_tier
from ckptio.runtime.streams import caller_streams
from ckptio.staging.copy import SourceState
from ckptio.state.flatten import flatten
from ckptio.storage.resolve import require_order

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ckptio.engine.context import EngineContext
    from ckptio.format.manifest import Metadata
    from ckptio.runtime.core import EngineCore
    from ckptio.storage.resolve import PathLike

    Say = Callable[[], None]


def begin_save(
    core: EngineCore,
    state: Any,
    path: PathLike,
    *,
    overwrite: bool,
    then: PathLike | None,
    metadata: Metadata | None = None,
    permit: Callable[[], Awaitable[None]] | None = None,
    close_after: bool = False,
) -> SaveMoments:
    """Take a state apart and start saving it. On the caller's thread; copies nothing.

    Args:
        core: The engine.
        state: What to save.
        path: Where to.
        overwrite: Whether a checkpoint that is there may be replaced; on both tiers.
        then: Where to copy it when it is committed; nowhere if `None`.
        metadata: What the manifest says beside the state.
        permit: Awaited before the commit, on rank 0; raises if there must be none. If not given,
            that is so where the second tier is the first, by a link.
        close_after: Close the engine when the save has ended, before the handle says so.

    Raises:
        UnsupportedLeafError: A value has no portable form; nothing was started.
        ConfigError: The path is none, or `overwrite` is neither on nor off.
        EngineClosedError: The engine is not open.
    """
    key = core.next_key("save")
    running: Running[Say] = Running()
    copying: Running[Say] = Running()
    try:
        require_bool("overwrite", overwrite)
        require_order(state, path)
        job, copy = _take_apart(
            core,
            state,
            path,
            key,
            aborts=(running.abort, stop_alone(core, copying) if close_after else copying.abort),
            overwrite=overwrite,
            then=then,
            metadata=metadata,
            permit=permit,
        )
    except BaseException as error:  # raised again; the other ranks must not wait for this one
        refuse(core, key, error)
        raise
    moments = job.moments
    if close_after:
        run_alone(core, job, copy, running, copying)
        return moments

    async def save_and_say(context: EngineContext) -> Say:
        if copy is not None:  # here, where no interrupt comes: a save that begins has its copy
            begin_copy(core.begin_beside, core, copy, moments, copying)
        say = await saved(job, context)
        say()
        return _said  # not `say`, which has the handle, which has what returns it: a cycle

    core.keep(moments)
    try:
        core.submit(save_and_say, f"save {moments.path}", running)
    except BaseException as error:  # an interrupt: the caller has it, and no handle
        moments.seen()
        if isinstance(error, CheckpointError):  # refused; behind an interrupt it may have begun
            job.source.watch.drop()  # what is kept refers to it
            core.forget(moments)  # which never end
        raise
    return moments


def _take_apart(
    core: EngineCore,
    state: Any,
    path: PathLike,
    key: str,
    *,
    aborts: tuple[Callable[[], None], Callable[[], None]],
    overwrite: bool,
    then: PathLike | None,
    metadata: Metadata | None,
    permit: Callable[[], Awaitable[None]] | None,
) -> tuple[SaveJob, CopyJob | None]:
    """Make a state into the job that saves it, and the one that copies it then, if any.

    Args:
        core: The engine.
        state: What to save.
        path: Where to.
        key: Names the save.
        aborts: Stop the save, and its copy.
        overwrite: See `begin_save`, as for all that follow.
        then: As above.
        metadata: As above.
        permit: As above.
    """
    started = time.perf_counter()
    ranks = core.context.ranks
    storage = core.storage(path)
    target = second_tier(core, storage, then)
    flat = flatten(state, ranks.rank if ranks.world_size > 1 else None)
    streams = caller_streams(flat.devices, core, saving=True)
    moments = SaveMoments(
        storage.path,
        save_id_of(ranks.nonce, key),
        stop=aborts[0],
        fence=None if streams is None else streams.fence,
        stop_copy=None if target is None else aborts[1],
        copy_to="" if target is None else target.path,
        require_elsewhere=core.loop_thread.require_elsewhere,
    )
    copy = None
    if then is not None and target is not None:
        to_look_at = core.context.resolver.storage(then, is_second=True)
        permit = permit or look_for_other(core, storage, to_look_at)
        copy = CopyJob(
            save_id=moments.save_id,
            key=f"{key} copy",
            source=storage,
            target=target,
            overwrite=overwrite,
            started_s=started,
        )
    job = SaveJob(
        save_id=moments.save_id,
        key=key,
        storage=storage,
        flat=flat.without_sources(),  # `source` has them until they are copied
        source=SourceState(flat.sources, streams, flat.looks),
        overwrite=overwrite,
        moments=moments,
        started_s=started,
        metadata=metadata,
        note=b"" if copy is None else copy.note(),
        permit=permit,
    )
    return job, copy


def _said() -> None:
    """A handle knows already how its save ended."""
