"""Carry a save out: from a flat state to a commit.

One task a save waits for a place, plans, and commits at the end; `engine.write` is what it does in
between. All that is decided alone is here; with other ranks, it is in `engine.together`.
"""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ckptio._aio import run_blocking
from ckptio._version import __version__
from ckptio.engine.attempt_end import end_attempt
from ckptio.engine.write import write_buckets
from ckptio.events import SaveStarted, TieDropped
from ckptio.format.compose import encode_manifest
from ckptio.moments import SaveMoments
from ckptio.plan.save import plan_save

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.turns import MyTurn
    from ckptio.format.manifest import Metadata
    from ckptio.plan.save import SavePlan
    from ckptio.staging.copy import SourceState
    from ckptio.state.flatten import FlatState
    from ckptio.storage.interface import Attempt, Storage


@dataclass(slots=True, kw_only=True)
class SaveJob:
    """A save as it was asked for.

    Attributes:
        save_id: Its own id, 32 hexadecimal digits; the same on all ranks.
        key: Names the save among those of the engine, on all ranks alike.
        storage: Where to.
        flat: The state, taken apart.
        source: Its tensors.
        overwrite: Whether a checkpoint that is there may be replaced.
        moments: What its handle tells the caller; `submitted` and `staged` come from here.
        started_s: When it was asked for, by `time.perf_counter`.
        resumes: Whether a save of the same id, stopped earlier, may have left something
            there; and whether what this one leaves when it is stopped stays for the next.
        metadata: What to say of it in the manifest; that of rank 0 counts.
        note: To be left beside the checkpoint: that it is to be copied, and where to.
        permit: Awaited before the commit, by the rank that commits; raises if there must be none.
        staged_s: Seconds from `started_s` until `staged` came; that may be later than the last
            copy (`SaveProgress.staged`).
    """

    save_id: str
    key: str
    storage: Storage
    flat: FlatState
    source: SourceState
    overwrite: bool
    moments: SaveMoments
    started_s: float
    resumes: bool = False
    metadata: Metadata | None = None
    note: bytes = b""
    permit: Callable[[], Awaitable[None]] | None = None
    staged_s: float = 0.0

    def __post_init__(self) -> None:
        """Whoever learns that the state may change has it looked at once more before."""
        settled = self.source.watch.settled
        self.moments.submitted.on_seen = self.moments.staged.on_seen = settled

    def end(self) -> SaveMoments:
        """Give its moments up, to be told how it ended: an error has frames that have this."""
        moments, self.moments = self.moments, SaveMoments(self.moments.path, self.save_id)
        return moments

    def elapsed_s(self) -> float:
        """Seconds since the save was asked for."""
        return time.perf_counter() - self.started_s


@dataclass(frozen=True, slots=True)
class SaveReceipt:
    """What a save wrote, on all ranks.

    Attributes:
        nbytes: Bytes of all data files.
        num_files: Data files.
        num_tensors: Tensors.
        plan_reused: Whether the plan was an earlier save's.
    """

    nbytes: int
    num_files: int
    num_tensors: int
    plan_reused: bool


async def save_alone(job: SaveJob, context: EngineContext, my_turn: MyTurn) -> SaveReceipt:
    """Save a state that one rank has, in its place; see `runtime.run_save.run_save`."""
    plan = context.plans.get(job.flat.specs)
    reused = plan is not None
    if plan is None:
        plan = await run_blocking(context.executor, plan_save, job.flat.specs, context.config)
        context.plans.put(job.flat.specs, plan)
    announce(job, context, plan, reused=reused)
    attempt: Attempt | None = None

    async def begin() -> Attempt:
        nonlocal attempt
        attempt = await job.storage.begin(job.save_id, overwrite=job.overwrite, resumes=job.resumes)
        return attempt

    try:
        files = await write_buckets(job, context, plan, begin)
        assert attempt is not None  # noqa: S101  # files were written in it
        manifest = await run_blocking(
            context.executor, _encode, job, plan, files, context.config.block_nbytes
        )
        await my_turn(attempt)
        await context.notes.leave(job, attempt, context)
        try:
            await attempt.commit(manifest)
        finally:  # it may stand, though nobody can tell
            context.cache.forget(job.storage)
    except BaseException as error:
        if attempt is not None:
            await end_attempt(attempt, job, error)
        raise
    return SaveReceipt(
        nbytes=plan.nbytes,
        num_files=len(plan.buckets),
        num_tensors=plan.num_tensors,
        plan_reused=reused,
    )


def announce(job: SaveJob, context: EngineContext, plan: SavePlan, *, reused: bool) -> None:
    """Say that this rank begins to write."""
    path = job.storage.path
    context.emit(
        SaveStarted(
            path=path,
            save_id=job.save_id,
            nbytes=plan.nbytes,
            num_tensors=plan.num_tensors,
            num_files=len(plan.buckets),
            plan_reused=reused,
        )
    )
    if job.flat.untied:
        context.emit(TieDropped(path=path, fqns=job.flat.untied))


def _encode(
    job: SaveJob,
    plan: SavePlan,
    files: Sequence[tuple[str, int, Sequence[int]]],
    block_nbytes: int,
) -> bytes:
    """Write the manifest. Blocks."""
    return encode_manifest(
        writer=__version__,
        save_id=job.save_id,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
        block_nbytes=block_nbytes,
        files=files,
        tensors=plan.tensor_table,
        tree=msgspec.json.encode(job.flat.tree),
        metadata=job.metadata,
    )
