"""Write a directory that stock torch.distributed.checkpoint loads, with its own writer.

It writes in place; so it writes to a directory inside, and what it wrote is moved when it is
whole: until then, a checkpoint that is there stays.

`dcp.save` is given tensors without memory, and a planner that reads each one when the
writer asks for it, which it does one at a time. Large tensors are cut into chunks, so that
no more than one chunk is ever in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from ckptio.conversion.safetensors import Written
from ckptio.conversion.source import new_like, parts_of, require_dict
from ckptio.errors import CheckpointError, CheckpointExistsError
from ckptio.foreign.dcp import METADATA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    from ckptio.conversion.source import Part, Source
    from ckptio.format.manifest import TensorEntry


_ASIDE = ".ckptio-partial"
#: What the stock writer calls its files.
_DATA = re.compile(r"__\d+_\d+\.distcp")


class _LazyPlanner(DefaultSavePlanner):
    """Plans for tensors without memory, and reads what they stand for when it is written.

    Args:
        source: The checkpoint that has them.
        entries: What each tensor stands for, by its identity.
        advance: Takes bytes as they are read.
    """

    def __init__(
        self, source: Source, entries: dict[int, TensorEntry], advance: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._source = source
        self._entries = entries
        self._advance = advance
        self._parts: dict[tuple[str, tuple[int, ...]], Part] = {}

    def create_local_plan(self) -> SavePlan:
        """Plan, with tensors cut into chunks."""
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._cut(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        entry = self._entries.get(id(self.state_dict[item.index.fqn]))
        if item.tensor_data is None or entry is None or not entry.nbytes:
            yield item
            return
        for number, part in enumerate(parts_of(entry)):
            offset = torch.Size(part.region.offset)
            self._parts[item.index.fqn, part.region.offset] = part
            yield dataclasses.replace(
                item,
                index=MetadataIndex(item.index.fqn, offset, number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, torch.Size(part.region.shape)),
                    properties=item.tensor_data.properties,
                    size=item.tensor_data.size,
                ),
            )

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Read what the writer asks for."""
        part = self._parts.get((index.fqn, tuple(index.offset or ())))
        if part is not None:
            self._advance(part.nbytes)
            return self._source.read([part])[0]
        return self._read_in(self.state_dict[index.fqn])

    def _read_in(self, value: Any) -> Any:
        """Read the tensors inside a value that is written whole."""
        if isinstance(value, torch.Tensor):
            entry = self._entries.get(id(value))
            if entry is None:
                return value
            self._advance(entry.nbytes)
            return self._source.whole(entry)
        if isinstance(value, dict):
            return type(value)((key, self._read_in(item)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self._read_in(item) for item in value)
        return value


def write_dcp(
    source: Source, path: str, *, overwrite: bool, advance: Callable[[int], None]
) -> list[Written]:
    """Write a directory of torch.distributed.checkpoint.

    Args:
        source: What is written.
        path: The directory.
        overwrite: Replace a checkpoint that is there.
        advance: Takes bytes as they are read.

    Raises:
        CheckpointExistsError: There is one, and it may not go.
        FormatError: The state is no dict.
    """
    if not overwrite and os.path.lexists(f"{path}/.metadata"):
        raise CheckpointExistsError(path)
    entries: dict[int, TensorEntry] = {}
    standing = []

    def stand_in(index: int) -> torch.Tensor:
        entry = source.manifest.tensors[index]
        tensor = new_like(entry)
        entries[id(tensor)] = entry
        standing.append(tensor)  # alive, so that its identity stays its own
        return tensor

    state = require_dict(source.values(stand_in), source.path)
    aside = f"{path}/{_ASIDE}"
    os.makedirs(path, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)  # of a conversion that was killed
    try:
        _save(state, aside, _LazyPlanner(source, entries, advance))
        return _move(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):  # what was there stays there
            os.rmdir(path)


def _save(state: dict[str, Any], path: str, planner: DefaultSavePlanner) -> None:
    """Let the stock writer write."""
    writer = FileSystemWriter(path, single_file_per_rank=True, thread_count=1, overwrite=True)
    log = logging.getLogger("torch.distributed.checkpoint")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group: that is meant
        log.setLevel(logging.ERROR)
        try:
            # what `save` calls: that one takes `no_dist` in later versions of torch alone, and
            # would else meet the other ranks of a job
            _save_state_dict(
                state_dict=state,
                storage_writer=writer,
                process_group=None,
                no_dist=True,
                planner=planner,
            )
        except CheckpointException as error:
            (cause, _), *_ = error.failures.values()
            if isinstance(cause, CheckpointError):  # of what is read, say
                raise cause from None
            raise
        finally:
            log.setLevel(level)


def _move(aside: str, path: str) -> list[Written]:
    """Put what was written in the place of what was there.

    Without its metadata a directory is no checkpoint: so that goes first and comes last.
    """
    written = sorted(os.listdir(aside))
    old = [name for name in os.listdir(path) if _DATA.fullmatch(name)]
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}/{METADATA}")
    for name in sorted(written, key=METADATA.__eq__):
        os.rename(f"{aside}/{name}", f"{path}/{name}")
    for name in set(old) - set(written):
        os.unlink(f"{path}/{name}")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sizes = [os.stat(f"{path}/{name}").st_size for name in written]
    return [
        Written(name, nbytes, was_there=False) for name, nbytes in zip(written, sizes, strict=True)
    ]
