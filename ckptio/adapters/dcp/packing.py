"""Where everything goes that one rank writes, and what it says of it to the coordinator."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.storage import WriteResult

from ckptio.adapters.dcp.table import RECEIPT, Names
from ckptio.errors import PlanError, UnsupportedLeafError
from ckptio.format.checksum import pack_checksums
from ckptio.plan.save import plan_save
from ckptio.ranks.host import this_host
from ckptio.shards import LeafSpec, Part
from ckptio.state.leaves import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.planner import WriteItem

    from ckptio.adapters.dcp.source import Value
    from ckptio.config import CheckpointConfig

    Files = list[tuple[str, int, list[int]]]


class Packing:
    """Where everything of a rank goes.

    Attributes:
        specs: Tensors of items, then what values hold.
        sources: What holds the latter.
        plan: Files.
    """

    def __init__(
        self,
        tensors: Sequence[WriteItem],
        values: Sequence[tuple[WriteItem, Value]],
        config: CheckpointConfig,
    ) -> None:
        names = Names()
        by_fqn: dict[str, str] = {}
        self._tensors, self._values = tensors, values
        self.specs: list[LeafSpec] = []
        for item in tensors:
            fqn = item.index.fqn
            if fqn not in by_fqn:
                by_fqn[fqn] = names.distinct(fqn)
            self.specs.append(_spec_of(item, by_fqn[fqn]))
        self.sources = [source for _, value in values for source in value.sources]
        for _, value in values:
            self.specs += [
                LeafSpec(names.distinct(leaf.name), leaf.dtype, leaf.shape, leaf.shape)
                for leaf in value.leaves
            ]
        is_plain = len(by_fqn) == len(tensors) and all(
            spec.shape == spec.global_shape for spec in self.specs
        )
        parts = [
            Part(i, 0, spec.shape, spec.global_offset or (0,) * len(spec.shape))
            for i, spec in enumerate(self.specs)
        ]
        self.plan = plan_save(self.specs, config, None if is_plain else parts)

    def results(self, files: Files) -> list[WriteResult]:
        """Tell DCP what was written."""
        results = []
        number = 0
        for item in self._tensors:
            spec = self.specs[number]
            offset = spec.global_offset or (0,) * len(spec.shape)
            said = {"offset": list(offset), **self._said(number)}
            results.append(WriteResult(item.index, spec.nbytes, said))
            number += 1
        for item, value in self._values:
            leaves = []
            nbytes = 0
            for leaf in value.leaves:
                leaves.append({"name": leaf.name, **self._said(number)})
                nbytes += leaf.nbytes
                number += 1
            said = {"word": value.word, "node": value.node, "leaves": leaves}
            results.append(WriteResult(item.index, nbytes, said))
        if results:
            results[0].storage_data[RECEIPT] = {
                "host": this_host(),
                "files": [
                    [name, nbytes, base64.b64encode(pack_checksums(sums)).decode()]
                    for name, nbytes, sums in files
                ],
            }
        return results

    def _said(self, number: int) -> dict[str, Any]:
        spec = self.specs[number]
        file, start = self.plan.places[number]
        return {"dtype": spec.dtype, "shape": list(spec.shape), "file": file, "start": start}


def check_item(item: WriteItem) -> None:
    """Refuse a tensor that cannot be stored, before anything is written.

    Raises:
        UnsupportedLeafError: It has no portable form.
    """
    data = item.tensor_data
    if data is None:
        return
    if data.properties.layout is not torch.strided:
        raise UnsupportedLeafError(
            item.index.fqn,
            f"a tensor of layout {data.properties.layout} has no portable form",
            "save its parts (indices and values), or tensor.to_dense()",
        )
    if data.properties.dtype not in DTYPE_NAMES:
        raise UnsupportedLeafError(
            item.index.fqn,
            f"elements of type {data.properties.dtype}",
            "save tensor.view(torch.uint8), or of a quantised tensor int_repr() and its scales",
        )


def _spec_of(item: WriteItem, name: str) -> LeafSpec:
    """Say what a planner is going to give for an item."""
    data = item.tensor_data
    if data is None:
        raise PlanError(f"the plan does not say what {item.index.fqn!r} is")
    chunk = data.chunk
    return LeafSpec(
        name,
        DTYPE_NAMES[data.properties.dtype],
        tuple(chunk.sizes),
        tuple(data.size),
        tuple(chunk.offsets),
    )
