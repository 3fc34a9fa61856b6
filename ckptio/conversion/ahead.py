"""What the stock writer of torch.distributed.checkpoint asks for, read when it does so.

It asks for one tensor after the other. Read one by one, each small one was a plan, a task for its
file and a block to verify: half a minute for 20,000. So those that it asks for next are read with
it, up to the size of a large one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from ckptio.conversion.source import PART_NBYTES, parts_of
from ckptio.conversion.unfit import UnfitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    from ckptio.conversion.source import Part, Source
    from ckptio.format.manifest import TensorEntry

    #: Of a part: name of its tensor, and where it begins there.
    _Key = tuple[str, tuple[int, ...]]


def _key_of(index: MetadataIndex) -> _Key:
    return index.fqn, tuple(index.offset or ())


class LazyPlanner(DefaultSavePlanner):
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
        self._parts: dict[_Key, Part] = {}
        #: Those that are not read yet, in the order in which the writer asks for them.
        self._left: deque[_Key] = deque()
        self._ahead: dict[_Key, torch.Tensor] = {}
        self._lent: torch.Tensor | None = None

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

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take note of the order in which the writer asks; see `dcp.SavePlanner`."""
        plan = super().finish_plan(new_plan)
        keys = (_key_of(item.index) for item in plan.items)
        self._left = deque(key for key in keys if key in self._parts)
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Read what the writer asks for, and take back the memory of what it asked for before.

        It is done with that; but what `torch.save` leaves behind, in some versions of torch, has
        it until Python collects garbage.
        """
        if self._lent is not None:
            self._lent.untyped_storage().resize_(0)
            self._lent = None
        key = _key_of(index)
        part = self._parts.get(key)
        if part is None:
            return self._read_in(self.state_dict[index.fqn])
        if key not in self._ahead:
            self._read_ahead(key)
        self._advance(part.nbytes)
        self._lent = self._ahead.pop(key)
        return self._lent

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # its name
        """Pickle a value; see `dcp.SavePlanner`.

        Raises:
            UnfitError: `torch.save` does not take it.
        """
        try:
            return super().transform_object(write_item, object)
        except RuntimeError as error:
            raise UnfitError(
                f"{write_item.index.fqn!r} is a value that DCP cannot write: {error}; leave it out"
                " with select="
            ) from None

    def _read_ahead(self, key: _Key) -> None:
        """Read a part, and those that are asked for next."""
        while self._left and self._left.popleft() != key:
            pass
        batch, nbytes = [key], self._parts[key].nbytes
        while self._left and nbytes + self._parts[self._left[0]].nbytes <= PART_NBYTES:
            batch.append(self._left.popleft())
            nbytes += self._parts[batch[-1]].nbytes
        self._ahead = {}
        parts = self._source.read([self._parts[each] for each in batch])
        self._ahead.update(zip(batch, parts, strict=True))

    def _read_in(self, value: Any) -> Any:
        """Read the tensors inside a value that is written whole."""
        if isinstance(value, torch.Tensor):
            entry = self._entries.get(id(value))
            if entry is None:
                return value
            self._advance(entry.nbytes)
            return self._source.whole(entry)
        if isinstance(value, dict):
            made = copy.copy(value)  # with the versions of modules, which a state_dict notes
            for key, item in value.items():
                made[key] = self._read_in(item)
            return made
        if type(value) in (list, tuple):
            return type(value)(self._read_in(item) for item in value)
        return value
