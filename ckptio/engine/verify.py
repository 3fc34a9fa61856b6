"""Read every byte of a checkpoint and compare it with its checksums. Without torch.

Values that are no tensors are made, too, as a load without classes makes them.

On request, copies of chunks are compared with each other, too: every rank that has a
tensor may have written it right, and something else than the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio.config import require_bool
from ckptio.engine.compare_copies import CopyDigests, report_differences
from ckptio.engine.landing import Reading
from ckptio.engine.load import check_sizes, read_plan
from ckptio.errors import CorruptionError, FormatError
from ckptio.plan.load import LoadPlan, plan_load
from ckptio.state.values import check_values

if TYPE_CHECKING:
    from ckptio.engine.context import EngineContext
    from ckptio.storage.interface import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: The checkpoint.
        save_id: The save that wrote it.
        num_files: Data files it has.
        nbytes: Bytes read.
        damage: One error for each block that is damaged or that the disk does not give
            (EIO), each file that is not whole, and each copy that differs from the first
            of its chunk, by file and offset; empty for a whole checkpoint.
        num_copies: Copies that were compared with the first; none unless asked for.
    """

    path: str
    save_id: str
    num_files: int
    nbytes: int
    damage: tuple[CorruptionError, ...]
    num_copies: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage


async def run_verify(
    storage: Storage, context: EngineContext, *, compare_copies: bool = False
) -> VerifyReport:
    """Verify a checkpoint.

    Args:
        storage: Where it is.
        context: The engine.
        compare_copies: Compare copies of chunks with each other.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: Its manifest is damaged, or has a tree of values that nobody wrote so:
            nothing can be said of the rest. Or it is of another program, which keeps no checksums.
        CheckpointChangedError: It was overwritten meanwhile.
        StorageError: It cannot be read.
        ConfigError: `compare_copies` is neither on nor off.
    """
    require_bool("compare_copies", compare_copies)
    manifest = await context.cache.get(storage, fresh=True)
    if manifest.is_foreign:
        raise FormatError(
            f"{storage.path!r} was written by {manifest.writer}, which keeps no checksums: there is"
            " nothing to verify it with; convert it first"
        )
    await run_blocking(context.executor, check_values, manifest)
    damage: list[CorruptionError] = []
    reading = Reading(storage, manifest, on_damage=damage.append)
    whole = await check_sizes(reading, range(len(manifest.files)), context)
    digests = reading.target = CopyDigests(manifest, whole if compare_copies else ())
    plan = plan_load(manifest, digests.wanted, context.config, whole_files=True)
    readable = tuple(segment for segment in plan.segments if segment.file in whole)
    await read_plan(LoadPlan(readable), reading, context)
    await report_differences(digests, reading, context)
    order = {entry.name: index for index, entry in enumerate(manifest.files)}
    damage.sort(key=lambda error: (order[error.file], error.start))
    return VerifyReport(
        path=storage.path,
        save_id=manifest.save_id,
        num_files=len(manifest.files),
        nbytes=reading.read_nbytes,
        damage=tuple(damage),
        num_copies=len(digests.pairs),
    )
