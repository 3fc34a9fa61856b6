"""Choose where a load reads what lies in several places.

A chunk may have copies in the files of several ranks. The nearest one that is whole is
taken: a lost file is made up for by another, and said so in an event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio._aio import run_blocking
from ckptio.engine.load import check_sizes
from ckptio.events import ReplicaSubstituted
from ckptio.plan.places import choose_places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.landing import Reading
    from ckptio.engine.restoration import Restoration
    from ckptio.errors import CorruptionError
    from ckptio.plan.load import Wanted


async def find_wanted(
    reading: Reading, restoration: Restoration, context: EngineContext, *, whole_files: bool
) -> Sequence[Wanted]:
    """Say which ranges of which files bring what is loaded; their files are whole.

    Args:
        reading: The checkpoint.
        restoration: What is loaded.
        context: The engine.
        whole_files: Check every file of the checkpoint, needed or not.

    Raises:
        CorruptionError: A file is missing or has another size, and something in it has no
            copy in another.
        CheckpointChangedError: So it is because the checkpoint was overwritten meanwhile.
        ConfigError: Blocks of the checkpoint do not fit the slabs of this engine.
    """
    manifest, ranks = reading.manifest, context.ranks
    host = ranks.hosts[ranks.rank]
    place = choose_places(manifest, ranks.rank, host)
    if not any(chunk.copies for need in restoration.needs for chunk in need.entry.chunks):
        files = range(len(manifest.files)) if whole_files else restoration.files(place)
        await check_sizes(reading, files, context)
        return await run_blocking(context.executor, restoration.wanted, place)
    lost: dict[int, CorruptionError] = {}
    while True:
        files = [file for file in restoration.files(place) if file not in lost]
        found = await _find_damaged(reading, files, context)
        if not found:
            return await run_blocking(context.executor, restoration.wanted, place)
        lost |= found
        place = choose_places(manifest, ranks.rank, host, lost)
        needed = set(restoration.files(place)) & lost.keys()
        if needed:
            raise lost[min(needed)]
        for error in found.values():
            context.emit(
                ReplicaSubstituted(path=reading.storage.path, file=error.file, error=error)
            )


async def _find_damaged(
    reading: Reading, files: Sequence[int], context: EngineContext
) -> dict[int, CorruptionError]:
    """Give the files that are missing or have another size."""
    errors: dict[str, CorruptionError] = {}

    def collect(error: CorruptionError) -> None:
        errors[error.file] = error

    before, reading.on_damage = reading.on_damage, collect
    try:
        await check_sizes(reading, files, context)
    finally:
        reading.on_damage = before
    names = {reading.manifest.files[file].name: file for file in files}
    return {names[name]: error for name, error in errors.items()}
