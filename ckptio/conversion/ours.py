"""Write a checkpoint of ours from another one: read, verified, staged and written in slabs.

It is an ordinary save whose tensors are in files. A segment of the plan is filled by a load
of just its bytes into its slab; the load has an engine of its own, so that no slab waits for
another one of the same pool. Chunks stay chunks: nothing is put together on the way.

On a local or mounted file system the id of the save is made of what is converted, how, and
what it replaces. So a conversion that was stopped and is run again finds its own files by
name, whoever stopped it; each range of them is compared with the source as it would be
written, and is written only where it differs (`storage.resumed`). Rejected: to trust what a
journal says of the files, which would spare the source a second reading and lose to a power
cut; and ids of this kind in object stores, which have no locks that keep two runs apart. There
a conversion begins anew, and what the stopped one left goes as that of any save does.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from typing import TYPE_CHECKING

import msgspec
import torch

from ckptio._failures import raised
from ckptio._version import __version__
from ckptio.conversion.own import sync_above, sync_kept
from ckptio.conversion.safetensors import Written
from ckptio.conversion.source import require_text
from ckptio.engine.save import SaveJob
from ckptio.engine.verify import run_verify
from ckptio.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    SaveAbortedError,
)
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.moments import SaveMoments
from ckptio.plan.load import Wanted
from ckptio.runtime.run_save import run_save
from ckptio.shards import LeafSpec
from ckptio.staging.copy import Destination, SourceState
from ckptio.state.flatten import FlatState
from ckptio.state.tree import renumbered
from ckptio.storage.leftovers import files_of
from ckptio.storage.resolve import local_path, remote_url
from ckptio.storage.tombs import tombs_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.conversion.source import Source
    from ckptio.format.manifest import Chunk
    from ckptio.plan.save import Segment
    from ckptio.runtime.core import EngineCore
    from ckptio.staging.cuda import PendingCopies
    from ckptio.staging.pool import Slab
    from ckptio.storage.interface import Storage
    from ckptio.storage.resolve import PathLike

#: Stands for the save id of a checkpoint that cannot be read.
_UNREADABLE = "?"


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
            try:
                self._advance(sum(piece[3] for piece in segment.pieces))
            except Exception:
                raise
            except BaseException as error:  # an exit, of which the loop of the engine would die
                problem = f"progress= ended the conversion: {raised(error)}"
                raise SaveAbortedError(problem) from error


def write_checkpoint(
    source: Source,
    core: EngineCore,
    path: PathLike,
    *,
    overwrite: bool,
    advance: Callable[[int], None],
) -> list[Written]:
    """Write a checkpoint of ours, or go on with one.

    Args:
        source: What is written.
        core: The engine that writes; not the one that reads.
        path: Where to.
        overwrite: Replace a checkpoint that is there.
        advance: Takes bytes as they are read.

    Raises:
        CheckpointExistsError: There is one, and it may not go.
        CommitConflictError: The same conversion is under way.
        StorageError: It cannot be written; what was there is untouched, unless `in_doubt`.
    """
    flat, places = _blocks_of(source)
    storage = core.storage(path)
    there = _present(core, core.own_storage(path))
    directory = local_path(path) if remote_url(path) is None else None
    save_id, before = secrets.token_hex(16), None
    if directory is not None and there != _UNREADABLE:
        own_id = _save_id_of(source, flat, core, there if overwrite else "")
        if there == own_id and not overwrite:
            found = _require_whole(core, storage)
            for name in (*(file.name for file in found), MANIFEST_NAME, ""):
                sync_kept(f"{directory}/{name}", core.config)
            sync_above(directory, core.config)
            return found
        if not tombs_in(directory, own_id):  # else it is being removed
            save_id = own_id
            before = _stamps(directory, save_id)
    if there and not overwrite:
        raise CheckpointExistsError(storage.path)
    job = SaveJob(
        save_id=save_id,
        key=core.next_key("save"),
        storage=storage,
        flat=flat,
        source=_StoredState(source, places, advance),
        overwrite=overwrite,
        moments=SaveMoments(storage.path, save_id),
        started_s=time.perf_counter(),
        resumes=before is not None,
    )
    core.call_blocking(lambda context: run_save(job, context), f"convert {storage.path}")
    manifest = core.call_blocking(lambda context: context.cache.get(storage), "inspect")
    after = {} if directory is None else _stamps(directory, save_id)
    return [
        Written(
            file.name,
            file.nbytes,
            was_there=before is not None and before.get(file.name, ()) == after.get(file.name),
        )
        for file in manifest.files
    ]


def _present(core: EngineCore, storage: Storage) -> str:
    """Give the save id of what is there; nothing if nothing is."""
    try:
        manifest = core.call_blocking(
            lambda context: context.cache.get(storage, fresh=True), "inspect"
        )
    except CheckpointNotFoundError:
        return ""
    except FormatError:
        return _UNREADABLE
    return manifest.save_id


def _save_id_of(source: Source, flat: FlatState, core: EngineCore, replaced: str) -> str:
    """Name a conversion: the same for the same bytes in the same files."""
    config = core.config
    layout = (config.block_nbytes, config.slab_nbytes, config.bucket_nbytes)
    what = (__version__, torch.__version__, source.manifest.save_id, layout, replaced, flat.specs)
    digest = hashlib.blake2b(repr(what).encode(), digest_size=16)
    digest.update(msgspec.json.encode(flat.tree))
    return digest.hexdigest()


def _require_whole(core: EngineCore, storage: Storage) -> list[Written]:
    """Say of what a conversion has committed before that it is there.

    Raises:
        CheckpointExistsError: It is damaged: it is replaced only where that is asked for.
    """
    report = core.call_blocking(lambda context: run_verify(storage, context), "verify")
    if not report.is_whole:
        raise CheckpointExistsError(storage.path) from report.damage[0]
    manifest = core.call_blocking(lambda context: context.cache.get(storage), "inspect")
    return [Written(file.name, file.nbytes, was_there=True) for file in manifest.files]


def _stamps(directory: str, save_id: str) -> dict[str, tuple[int, int]]:
    """Tell the data files of a save, and when each was last written to."""
    found = {}
    for name in files_of(directory, save_id):
        status = os.stat(f"{directory}/{name}", follow_symlinks=False)
        found[name] = (status.st_ino, status.st_mtime_ns)
    return found


def _blocks_of(source: Source) -> tuple[FlatState, list[Chunk | None]]:
    """List the blocks of what is taken, and where each lies."""
    numbers = {index: number for number, index in enumerate(source.indices())}
    specs: list[LeafSpec] = []
    places: list[Chunk | None] = []
    names = []
    for index in numbers:
        entry = source.manifest.tensors[index]
        require_text(entry.name)
        names.append(entry.name)
        for chunk in entry.chunks:
            box = entry.box_of(chunk)
            part = () if box.shape == entry.shape else (entry.shape, box.offset)
            specs.append(LeafSpec(entry.name, entry.dtype, box.shape, *part))
            places.append(chunk)
        if not entry.chunks:
            specs.append(LeafSpec(entry.name, entry.dtype, entry.shape))
            places.append(None)
    tree = renumbered(source.tree, numbers.__getitem__)
    return FlatState(tuple(specs), (), tuple(names), tree, ()), places
