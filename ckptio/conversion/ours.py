"""Write a checkpoint of ours from another one: read, verified, staged and written in slabs.

It is an ordinary save whose tensors are in files. A segment of the plan is filled by a load
of just its bytes into its slab; the load has an engine of its own, so that no slab waits for
another one of the same pool. Chunks stay chunks: nothing is put together on the way.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import torch

from ckptio.conversion.safetensors import Written
from ckptio.engine.running import Running
from ckptio.engine.save import SaveJob, run_save
from ckptio.format.encode import TAG
from ckptio.handle import SaveHandle
from ckptio.plan.load import Wanted
from ckptio.shards import LeafSpec
from ckptio.staging.copy import Destination, SourceState
from ckptio.state.flatten import FlatState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.conversion.source import Source
    from ckptio.engine.core import EngineCore
    from ckptio.format.manifest import Chunk
    from ckptio.plan.save import Segment
    from ckptio.staging.cuda import PendingCopies
    from ckptio.staging.pool import Slab
    from ckptio.storage.resolve import PathLike

    Json = Any


class _StoredState(SourceState):
    """The blocks of a state that lie in files.

    Args:
        source: The checkpoint that has them.
        places: Of each block, its chunk; `None` for one without bytes.
        advance: Takes bytes as they are read.
    """

    def __init__(
        self, source: Source, places: Sequence[Chunk | None], advance: Callable[[int], None]
    ) -> None:
        super().__init__((), None)
        self._source = source
        self._places = places
        self._advance = advance

    def gather(self, segment: Segment, slab: Slab, pending: list[PendingCopies]) -> None:
        """Read a segment into a slab. Blocks; thread-safe for different slabs."""
        del pending  # no device takes part
        slab.view[: len(segment.header)] = segment.header
        wanted = []
        for position, leaf, offset, nbytes in segment.pieces:
            chunk = self._places[leaf]
            assert chunk is not None  # noqa: S101  # what has no bytes is in no segment
            wanted.append(Wanted(chunk.file, chunk.start + offset, nbytes, 0, position))
        if wanted:
            room = torch.frombuffer(slab.view, dtype=torch.uint8)
            self._source.fill(wanted, [Destination(room, torch.uint8)])
            self._advance(sum(piece[3] for piece in segment.pieces))


def write_checkpoint(
    source: Source,
    core: EngineCore,
    path: PathLike,
    *,
    overwrite: bool,
    advance: Callable[[int], None],
) -> list[Written]:
    """Write a checkpoint of ours.

    Args:
        source: What is written.
        core: The engine that writes; not the one that reads.
        path: Where to.
        overwrite: Replace a checkpoint that is there.
        advance: Takes bytes as they are read.

    Raises:
        CheckpointExistsError: There is one, and it may not go.
        StorageError: It cannot be written; what was there is untouched.
    """
    flat, places = _blocks_of(source)
    storage = core.storage(path)
    running: Running[None] = Running()
    save_id = secrets.token_hex(16)
    handle = SaveHandle(storage.path, save_id, abort=running.abort, fence=lambda: None)
    job = SaveJob(
        save_id=save_id,
        key=core.next_key("save"),
        storage=storage,
        flat=flat,
        source=_StoredState(source, places, advance),
        overwrite=overwrite,
        handle=handle,
        started_s=time.perf_counter(),
    )
    receipt = core.call_blocking(lambda context: run_save(job, context), f"convert {storage.path}")
    del receipt
    manifest = core.call_blocking(lambda context: context.cache.get(storage), "inspect")
    return [Written(file.name, file.nbytes, was_there=False) for file in manifest.files]


def _blocks_of(source: Source) -> tuple[FlatState, list[Chunk | None]]:
    """List the blocks of what is taken, and where each lies."""
    numbers = {index: number for number, index in enumerate(source.indices())}
    specs: list[LeafSpec] = []
    places: list[Chunk | None] = []
    names = []
    for index in numbers:
        entry = source.manifest.tensors[index]
        names.append(entry.name)
        for chunk in entry.chunks:
            is_whole = chunk.local_shape is None or chunk.local_shape == entry.shape
            specs.append(
                LeafSpec(
                    entry.name,
                    entry.dtype,
                    entry.shape if chunk.local_shape is None else chunk.local_shape,
                    None if is_whole else entry.shape,
                    None if is_whole else chunk.global_offset,
                )
            )
            places.append(chunk)
        if not entry.chunks:
            specs.append(LeafSpec(entry.name, entry.dtype, entry.shape))
            places.append(None)
    tree = _renumbered(source.tree, numbers)
    return FlatState(tuple(specs), (), tuple(names), tree, ()), places


def _renumbered(node: Json, numbers: dict[int, int]) -> Json:
    """Write a tree with other numbers of tensors."""
    if type(node) is list:
        return [_renumbered(item, numbers) for item in node]
    if type(node) is not dict:
        return node
    if type(node.get(TAG)) is int:
        return {TAG: numbers[node[TAG]]}
    if TAG in node and "t" in node:
        return {**node, "t": numbers[node["t"]]}
    return {key: _renumbered(item, numbers) for key, item in node.items()}
