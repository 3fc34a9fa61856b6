"""DCP's side of a load: `StorageReader`.

    every rank        read_metadata, set_up_storage_reader, prepare_local_plan, read_data
    the coordinator   prepare_global_plan, before any rank reads

Each rank opens the checkpoint by itself, so each says in its plan which save it has opened, and
the coordinator refuses two different ones, and files that were cut, before any target changes. An
engine is opened for each call that reads: between calls there are no threads and no open files.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import storage as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from ckptio.adapters.dcp.calls import is_path, require_path
from ckptio.adapters.dcp.document import Pieces
from ckptio.adapters.dcp.loading import RankLoad, open_checkpoint
from ckptio.adapters.dcp.regions import Opened, files_of
from ckptio.adapters.dcp.writer import place_of_rank
from ckptio.config import require_bool
from ckptio.engine.landing import Reading
from ckptio.engine.load import check_sizes
from ckptio.engine.request import check_types
from ckptio.errors import CheckpointChangedError, ConfigError
from ckptio.runtime.engine_options import config_of, require_observer
from ckptio.runtime.solo import solo_engine
from ckptio.state.rebuild import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from ckptio.adapters.dcp.document import Item
    from ckptio.config import CheckpointConfig
    from ckptio.events import Observer
    from ckptio.format.manifest import Manifest
    from ckptio.storage.resolve import PathLike


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """Which save a rank has opened; travels with its plan."""

    save_id: str


class StorageReader(dcp.StorageReader):
    """Reads what DCP's planners ask for, with the engine of `ckptio`.

    Use it where a `FileSystemReader` is used, in `dcp.load`. It reads the rows that are asked
    for, verifies every block of them, and unpickles nothing. (What the stock planner is given for
    a value, and unpickles, was pickled here from the value; but see `allow_opaque`.) One reader
    serves any number of checkpoints, one after the other, and may be pickled.

    Args:
        path: Where from, a path or a URL; not needed where each call has a `checkpoint_id`.
        _extension_registry: Refused: files hold the bytes of tensors as they are.
        types: Classes of dataclasses, named tuples and enums to get back as such.
        allow_opaque: Whether planners may have bytes that a planner of one's own made in
            `resolve_data`. The stock planner unpickles what it is given, so only where the
            planner does not, or the checkpoint is trusted.
        config: Options of the engine; the defaults if not given.
        observer: Called with each event, on any thread; see `ckptio.events`.

    Raises:
        ConfigError: An option is wrong or would have no effect.
    """

    def __init__(
        self,
        path: PathLike | None = None,
        _extension_registry: Any = None,
        *,
        types: Collection[type] = (),
        allow_opaque: bool = False,
        config: CheckpointConfig | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__()
        if _extension_registry is not None:
            raise ConfigError(
                "_extension_registry has no effect: files hold the bytes of tensors as they are"
            )
        check_types(types)
        require_bool("allow_opaque", allow_opaque)
        self.path = path
        self._types = tuple(types)
        self._allows_opaque = allow_opaque
        require_observer(observer)
        self._config = config_of(config)
        self._observer = observer
        if path is not None:
            require_path(path, self._config)
        self._place: str | None = None
        self._is_of_rank = False
        self._opened: Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the load that is under way."""
        return {**self.__dict__, "_place": None, "_opened": None}

    @property
    def checkpoint_id(self) -> PathLike | None:
        """Where the checkpoint is."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Whether there could be a checkpoint. Touches nothing."""
        return is_path(checkpoint_id)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        """Turn to another checkpoint; see `dcp.StorageReader`."""
        self._place = self._opened = None
        if checkpoint_id is not None:
            self.path = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002  # the stock signature
        """Read what the checkpoint is made of; see `dcp.StorageReader`. Blocks.

        Args:
            *args: Nothing that is known.
            **kwargs: `rank`, to read what that rank saved for itself.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            ConfigError: Neither the reader nor the call names a path, or it is none.
            CorruptionError: What DCP has to know of it is damaged.
            FormatError: It was not saved by a `StorageWriter`; a `FormatVersionError` if it was,
                by a newer version of ckptio.
        """
        if self.path is None:
            raise ConfigError(
                "where to load from? give the reader a path, or the call a checkpoint_id"
            )
        require_path(self.path, self._config)
        place = os.fspath(self.path)
        self._is_of_rank = kwargs.get("rank") is not None
        if self._is_of_rank:
            place = place_of_rank(place, kwargs["rank"])
        self._opened = None
        with solo_engine(self._config, self._observer) as core:
            storage = core.storage(place)
            opened = core.call_blocking(lambda context: open_checkpoint(storage, context), "open")
        self._place, self._opened = place, opened
        return _metadata_of(opened)

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001  # the stock signature
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Begin a load on this rank; see `dcp.StorageReader`."""
        del metadata, is_coordinator, args, kwargs
        if self._opened is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say in a plan which save this rank has opened, unless its planner says something."""
        if plan.storage_data is not None:
            return plan
        return dataclasses.replace(plan, storage_data=_Seen(self._under_way()[0].manifest.save_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check, before any rank has a target, that all have the same before them, and whole.

        Each rank opens the checkpoint for itself, and another save may be committed between
        two of them: without a look some would have the old one, and some the new one.

        Raises:
            CorruptionError: A file that any rank needs is missing or was cut.
            CheckpointChangedError: The checkpoint was overwritten meanwhile.
        """
        opened, place = self._under_way()
        if self._is_of_rank:  # others have checkpoints of their own, and look for themselves
            return plans
        seen = {plan.storage_data for plan in plans if isinstance(plan.storage_data, _Seen)}
        files = files_of(opened, [item for plan in plans for item in plan.items])
        with solo_engine(self._config, self._observer) as core:
            reading = Reading(core.storage(place), opened.manifest)
            if seen - {_Seen(opened.manifest.save_id)}:
                raise CheckpointChangedError(
                    reading.storage.path, "it was overwritten while ranks opened it, one by one"
                )
            core.call_blocking(lambda context: check_sizes(reading, files, context), "sizes")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank asks for; see `dcp.StorageReader`. Blocks.

        Raises:
            CorruptionError: A size or a checksum is wrong.
            CheckpointChangedError: The checkpoint was overwritten meanwhile.
            StorageError: The first failure of any file, on any thread.
            TargetError: A target does not have the shape that was asked for.
        """
        opened, place = self._under_way()
        with solo_engine(self._config, self._observer) as core:
            load = RankLoad(
                opened,
                core.storage(place),
                core,
                types=self._types,
                allows_opaque=self._allows_opaque,
            )
            load.run(plan.items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _under_way(self) -> tuple[Opened, str]:
        if self._opened is None or self._place is None:
            raise ConfigError("DCP did not set the reader up: use it in dcp.load")
        return self._opened, self._place


def _metadata_of(opened: Opened) -> Metadata:
    """Say what DCP knows of a checkpoint."""
    meta = opened.document.storage_meta
    known = {field.name for field in dataclasses.fields(StorageMeta)}
    modules = {"modules": meta.get("modules", [])} if "modules" in known else {}
    return Metadata(
        state_dict_metadata={
            item.fqn: _stored(item, opened.manifest) for item in opened.document.items
        },
        planner_data=opened.document.planner_data,
        storage_data={},
        storage_meta=StorageMeta(
            checkpoint_id=meta.get("checkpoint_id"),
            save_id=opened.manifest.save_id,
            load_id=secrets.token_hex(16),
            **modules,
        ),
    )


def _stored(item: Item, manifest: Manifest) -> TensorStorageMetadata | BytesStorageMetadata:
    """Say what DCP knows of an item."""
    if isinstance(item.what, str):
        return BytesStorageMetadata()
    if isinstance(item.what, Pieces):
        shape = item.what.shape
        entries = [(manifest.tensors[index], first) for index, first in item.what.parts]
        dtype = entries[0][0].dtype if entries else "float32"
        chunks = [_chunk(first, entry.shape) for entry, first in entries]
    else:
        entry = manifest.tensors[item.what]
        shape, dtype = entry.shape, entry.dtype
        boxes = [entry.box_of(chunk) for chunk in entry.chunks]
        chunks = [_chunk(box.offset, box.shape) for box in boxes]
    properties = TensorProperties(dtype=torch_dtype(dtype), requires_grad=item.requires_grad)
    return TensorStorageMetadata(properties, torch.Size(shape), chunks)


def _chunk(first: tuple[int, ...], shape: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(first), torch.Size(shape))
