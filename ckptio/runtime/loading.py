"""The course of a load between the caller's thread and the engine's loop.

What touches the caller's objects (tensors, streams, stateful objects) happens on the caller's
thread; what reads happens on the engine's loop. A load goes back and forth (`runtime.drive`).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptio._failures import without_frames
from ckptio.engine.group import Course, fetch_manifest, read_together
from ckptio.engine.landing import Reading
from ckptio.engine.load import plan_and_read
from ckptio.engine.nearest import fetch_nearest, makes_up_for
from ckptio.engine.places import find_wanted
from ckptio.engine.request import make_request
from ckptio.engine.restoration import LoadReport
from ckptio.engine.restore import plan_restoration
from ckptio.engine.selected import require_selected
from ckptio.errors import CheckpointError
from ckptio.events import LoadFinished
from ckptio.foreign.interface import notes_of
from ckptio.runtime.refusal import refuse
from ckptio.runtime.second_tier import second_tier
from ckptio.runtime.streams import caller_streams, devices_of
from ckptio.staging.copy import TargetState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.engine.asked import Asked
    from ckptio.engine.context import EngineContext
    from ckptio.engine.request import LoadRequest
    from ckptio.engine.restoration import Restoration
    from ckptio.format.manifest import Manifest
    from ckptio.plan.load import Wanted
    from ckptio.runtime.core import EngineCore
    from ckptio.runtime.drive import Flow
    from ckptio.storage.interface import Storage
    from ckptio.storage.resolve import PathLike


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What `load_with_report` returns.

    Attributes:
        state: The state, or the target that was filled.
        report: What was found.
    """

    state: Any = field(compare=False)  # tensors have no one answer to `==`
    report: LoadReport


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
    started = time.perf_counter()
    course = Course(core.next_key("load"), path)
    try:
        load, nbytes = yield from _read_nearest(core, path, asked, then, course)
    except BaseException as error:  # raised again; the other ranks must not wait for this one
        if course.next_session:
            refuse(core, course.next_session, error)
        raise
    load.target.mark_written()
    state = load.restoration.finish()
    report = load.report(nbytes, is_told=asked.strict == "report")
    elapsed_s = time.perf_counter() - started
    core.emit(LoadFinished(path=report.path, nbytes=nbytes, elapsed_s=elapsed_s))
    return LoadResult(state, report)


def _read_nearest(
    core: EngineCore, path: PathLike, asked: Asked, then: PathLike | None, course: Course
) -> Flow[tuple[_Load, int]]:
    """Read, and go to the second tier, if there is one, for what the first does not have whole."""
    handled = sys.exception()
    if then is not None:
        course.next_session = course.of("tier")
    request = make_request(asked)
    storage = core.storage(path)
    second = second_tier(core, storage, then)
    if second is None:
        return (yield from _read(core, storage, request, course))
    storage, manifest = yield functools.partial(fetch_nearest, storage, second, course=course)
    try:
        return (yield from _read(core, storage, request, course, manifest))
    except CheckpointError as error:
        if storage is second:
            raise
        # no name for it: a reference cycle would keep all that was made to be filled
        if not (yield functools.partial(makes_up_for, storage, second, manifest.save_id, error)):
            raise
        without_frames(error, handled)  # which have all that was made to be filled
        return (yield from _read(core, second, request, course))


def _read(
    core: EngineCore,
    storage: Storage,
    request: LoadRequest,
    course: Course,
    manifest: Manifest | None = None,
) -> Flow[tuple[_Load, int]]:
    """Match the target, and read; gives the bytes that came, too."""
    if manifest is None:
        manifest = yield lambda context: fetch_manifest(storage, context, course)
    load = yield from _prepare(core, storage, manifest, request)
    is_strict = request.strict == "raise"
    nbytes: int = yield lambda context: load.read(context, course, is_strict=is_strict)
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

    async def read(self, context: EngineContext, course: Course, *, is_strict: bool) -> int:
        """Read, alone or with the other ranks; gives the bytes that came."""
        reading, wanted = self.reading, self.wanted
        try:
            if context.ranks.world_size > 1:
                unclaimed = self.restoration.unclaimed
                return await read_together(
                    reading, wanted, context, course, unclaimed, is_strict=is_strict
                )
            return await plan_and_read(reading, wanted, context, whole_files=self.whole_files)
        except BaseException:
            self.target.count_write()  # some of it is
            raise

    def report(self, nbytes: int, *, is_told: bool) -> LoadReport:
        """Say what was found; where target and checkpoint disagree if that `is_told`."""
        manifest, restoration = self.reading.manifest, self.restoration
        match = restoration.match if is_told else None
        return LoadReport(
            path=self.reading.storage.path,
            save_id=manifest.save_id,
            nbytes=nbytes,
            num_tensors=restoration.num_tensors,
            missing=tuple(match.missing) if match else (),
            unexpected=tuple(match.unexpected) if match else (),
            mismatched=tuple(match.mismatched) if match else (),
            notes=(*restoration.notes, *notes_of(manifest)),
        )


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
