"""Read every byte of a checkpoint and compare it with its checksums. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio.engine.load import Reading, check_sizes, read_plan
from ckptio.plan.load import LoadPlan, plan_load

if TYPE_CHECKING:
    from ckptio.engine.context import EngineContext
    from ckptio.errors import CorruptionError
    from ckptio.storage.interface import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: The checkpoint.
        save_id: The save that wrote it.
        num_files: Data files it has.
        nbytes: Bytes read.
        damage: One error for each damaged block and each file that is not whole, by file
            and offset; empty for a whole checkpoint.
    """

    path: str
    save_id: str
    num_files: int
    nbytes: int
    damage: tuple[CorruptionError, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage


async def run_verify(storage: Storage, context: EngineContext) -> VerifyReport:
    """Verify a checkpoint.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: Its manifest is damaged: nothing can be said of the rest.
        CheckpointChangedError: It was overwritten meanwhile.
        StorageError: It cannot be read.
    """
    manifest = await context.cache.get(storage)
    damage: list[CorruptionError] = []
    reading = Reading(storage, manifest, on_damage=damage.append)
    whole = await check_sizes(reading, range(len(manifest.files)), context)
    plan = plan_load(manifest, (), context.config, whole_files=True)
    readable = tuple(segment for segment in plan.segments if segment.file in whole)
    await read_plan(LoadPlan(readable), reading, context)
    order = {entry.name: index for index, entry in enumerate(manifest.files)}
    damage.sort(key=lambda error: (order[error.file], error.start))
    return VerifyReport(
        path=storage.path,
        save_id=manifest.save_id,
        num_files=len(manifest.files),
        nbytes=reading.read_nbytes,
        damage=tuple(damage),
    )
