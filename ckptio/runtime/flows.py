"""The course of a save and of a load between the caller's thread and the engine's loop.

What touches the caller's objects (tensors, streams, stateful objects) happens on the
caller's thread; what reads and writes happens on the engine's loop. A load goes back and
forth (`runtime.drive`).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptio._failures import without_frames
from ckptio.config import require_bool
from ckptio.engine.group import Course, fetch_manifest, read_together
from ckptio.engine.landing import Reading
from ckptio.engine.load import plan_and_read
from ckptio.engine.nearest import fetch_nearest, makes_up_for
from ckptio.engine.places import find_wanted
from ckptio.engine.request import make_request
from ckptio.engine.restore import LoadReport, plan_restoration
from ckptio.engine.save import SaveJob
from ckptio.engine.selected import require_selected
from ckptio.engine.tiers import CopyJob
from ckptio.engine.together import save_id_of
from ckptio.errors import CheckpointError
from ckptio.events import LoadFinished
from ckptio.foreign.interface import notes_of
from ckptio.moments import SaveMoments
from ckptio.runtime.refusal import refuse
from ckptio.runtime.run_save import run_alone, saved, stop_alone
from ckptio.runtime.running import Running
from ckptio.runtime.save_copy import begin_copy
from ckptio.runtime.second_tier import look_for_other, second_tier
from ckptio.runtime.streams import caller_streams, devices_of
from ckptio.staging.copy import SourceState, TargetState
from ckptio.state.flatten import flatten
from ckptio.storage.resolve import require_order

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ckptio.engine.asked import Asked
    from ckptio.engine.context import EngineContext
    from ckptio.engine.request import LoadRequest
    from ckptio.engine.restore import Restoration
    from ckptio.format.manifest import Manifest, Metadata
    from ckptio.plan.load import Wanted
    from ckptio.runtime.core import EngineCore
    from ckptio.runtime.drive import Flow
    from ckptio.storage.interface import Storage
    from ckptio.storage.resolve import PathLike

    Say = Callable[[], None]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What `load_with_report` returns.

    Attributes:
        state: The state, or the target that was filled.
        report: What was found.
    """

    state: Any = field(compare=False)  # tensors have no one answer to `==`
    report: LoadReport


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


def load_flow(
    core: EngineCore,
    path: PathLike,
    asked: Asked,
    then: PathLike | None = None,
) -> Flow[LoadResult]:
    """Load a checkpoint.

    Args:
        core: The engine.
        path: The checkpoint.
        asked: The options; checked here, so that other ranks hear of what is refused.
        then: Its second tier, read where the first does not have it whole.

    Raises:
        CheckpointNotFoundError: There is none.
        MismatchError: The target does not fit and `strict` is `"raise"`.
        TargetError: A target cannot be filled.
        CorruptionError: A size or a checksum is wrong.
        CheckpointChangedError: It was overwritten meanwhile.
        FormatError: It is no checkpoint of this format.
        StorageError: It cannot be read.
        ConfigError: A path is not a path, or an option is wrong or has no effect.
        StateError: A CUDA graph is being captured, or a device has failed.
        StagingError: The system gives no memory to stage in.
        EngineClosedError: The engine is not open, or was left meanwhile.
        RankError: It failed on another rank, or ranks were lost.
    """
    started, handled = time.perf_counter(), sys.exception()
    course = Course(core.next_key("load"), path)
    if then is not None:
        course.next_session = course.of("tier")
    try:
        request = make_request(asked)
        storage = core.storage(path)
        second = second_tier(core, storage, then)
        manifest: Manifest
        if second is None:
            manifest = yield functools.partial(_fetch, storage, course)
        else:
            storage, manifest = yield functools.partial(
                fetch_nearest, storage, second, course=course
            )
        try:
            load, nbytes = yield from _read(core, storage, manifest, request, course)
        except CheckpointError as error:
            if second is None or storage is second:
                raise
            # no name for it: a reference cycle would keep all that was made to be filled
            if not (
                yield functools.partial(makes_up_for, second, storage, manifest.save_id, error)
            ):
                raise
            without_frames(error, handled)  # which have all that was made to be filled
            storage = second
            manifest = yield functools.partial(_fetch, storage, course)
            load, nbytes = yield from _read(core, storage, manifest, request, course)
    except BaseException as error:  # raised again; the other ranks must not wait for this one
        if course.next_session:
            refuse(core, course.next_session, error)
        raise
    load.target.mark_written()
    restoration = load.restoration
    state = restoration.finish()
    elapsed_s = time.perf_counter() - started
    core.emit(LoadFinished(path=storage.path, nbytes=nbytes, elapsed_s=elapsed_s))
    match = restoration.match
    reports = match if request.strict == "report" else None
    return LoadResult(
        state,
        LoadReport(
            path=storage.path,
            save_id=manifest.save_id,
            nbytes=nbytes,
            num_tensors=restoration.num_tensors,
            missing=tuple(reports.missing) if reports else (),
            unexpected=tuple(reports.unexpected) if reports else (),
            mismatched=tuple(reports.mismatched) if reports else (),
            notes=(*restoration.notes, *notes_of(manifest)),
        ),
    )


async def _fetch(storage: Storage, course: Course, context: EngineContext) -> Manifest:
    return await fetch_manifest(storage, context, course)


def _read(
    core: EngineCore, storage: Storage, manifest: Manifest, request: LoadRequest, course: Course
) -> Flow[tuple[_Load, int]]:
    """Match the target, and read; gives the bytes that came, too."""
    load = yield from _prepare(core, storage, manifest, request)
    nbytes: int = yield lambda context: load.read(context, course)
    return load, nbytes


@dataclass(frozen=True, slots=True)
class _Load:
    """A load of which nothing but the reading is left to do.

    Attributes:
        restoration: What is loaded.
        reading: The checkpoint, with the target.
        target: What takes the bytes.
        wanted: Where they are.
        whole_files: Whether all bytes of all files are wanted.
    """

    restoration: Restoration
    reading: Reading
    target: TargetState
    wanted: Sequence[Wanted]
    whole_files: bool

    async def read(self, context: EngineContext, course: Course) -> int:
        """Read, alone or with the other ranks; gives the bytes that came."""
        reading, wanted = self.reading, self.wanted
        try:
            if context.ranks.world_size > 1:
                return await read_together(
                    reading, wanted, context, course, self.restoration.unclaimed
                )
            return await plan_and_read(reading, wanted, context, whole_files=self.whole_files)
        except BaseException:
            self.target.count_write()  # some of it is
            raise


def _prepare(
    core: EngineCore, storage: Storage, manifest: Manifest, request: LoadRequest
) -> Flow[_Load]:
    """Match the target, check files, and make what is new."""
    ranks = core.context.ranks
    request = dataclasses.replace(request, rank=ranks.rank, num_ranks=ranks.world_size)
    restoration = plan_restoration(manifest, storage.path, request)
    require_selected(request, restoration, manifest, storage.path)
    reading = Reading(storage, manifest, num_tensors=restoration.num_tensors)
    agrees = restoration.match is None or restoration.match.agrees
    whole = request.keep is None and agrees and manifest.num_ranks == 1
    wanted: Sequence[Wanted] = yield lambda context: find_wanted(
        reading, restoration, context, whole_files=whole
    )
    destinations = restoration.destinations()
    devices = {each.device for each in destinations if each.device is not None}
    devices |= devices_of(each.tensor for each in destinations if each.span is None)
    streams = caller_streams(devices, core, saving=False)
    reading.target = TargetState(destinations, streams)
    return _Load(restoration, reading, reading.target, wanted, whole)
