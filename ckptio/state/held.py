"""A tensor that ranks hold in parts, as it is taken apart to be saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ckptio.layout import numel
from ckptio.shards import LeafSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptio.state.sharded import Sharded


@dataclass(slots=True)
class Held:
    """A tensor of which this rank holds blocks, or none.

    Attributes:
        name: Its name.
        dtype: Its element type.
        sharded: What is held.
        owner: What it was made from; while that lives, nobody else has its memory.
        nodes: Its places in the tree.
    """

    name: str
    dtype: str
    sharded: Sharded
    owner: object
    nodes: list[dict[str, Any]]

    def pieces(self) -> Iterator[tuple[LeafSpec, torch.Tensor]]:
        """Give the blocks of a tensor that this rank holds; one without elements for none."""
        sharded = self.sharded
        global_shape = sharded.global_shape
        for block in sharded.blocks:
            box = block.box
            is_whole = box.shape == global_shape
            yield (
                LeafSpec(
                    self.name,
                    self.dtype,
                    box.shape,
                    None if is_whole else global_shape,
                    None if is_whole else box.offset,
                    sharded.replica,
                ),
                block.view(),
            )
        if sharded.blocks:
            return
        if not numel(global_shape):
            spec = LeafSpec(self.name, self.dtype, global_shape, replica=sharded.replica)
        else:  # a scalar has no shape without elements but that of a vector
            spec = LeafSpec(
                self.name,
                self.dtype,
                (0,) * max(1, len(global_shape)),
                global_shape,
                (0,) * len(global_shape),
            )
        yield spec, torch.empty(spec.shape, dtype=sharded.dtype, device="cpu")
