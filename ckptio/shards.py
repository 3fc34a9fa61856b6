"""What a rank holds of a tensor, and what it writes of it.

A block is rectangular: `local_shape` elements from `global_offset` of a tensor of
`global_shape`. Blocks of all ranks fill the tensor; equal blocks are replicas of each
other. What is no block (a range of a flattened tensor) is a few of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptio.layout import nbytes_of

if TYPE_CHECKING:
    import torch


class LeafSpec(NamedTuple):
    """What a plan knows of a block. A tuple, since plans are looked up by thousands of them.

    Attributes:
        name: Fully qualified name of its tensor.
        dtype: torch's name of its element type.
        shape: Shape of the block.
        global_shape: Shape of the tensor; `None` if the block is all of it.
        global_offset: First index of the block in the tensor; `None` if it is all of it.
        replica: Which of several equal blocks this is, where the caller said so; 0 is the
            main one, of which there is one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] | None = None
    global_offset: tuple[int, ...] | None = None
    replica: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the block in a file."""
        return nbytes_of(self.shape, self.dtype)


def distinct_name(name: str, taken: set[str]) -> str:
    """Give a name that no other tensor has, and take it; the first comer has the plain one."""
    found, number = name, 2
    while found in taken:
        found, number = f"{name}~{number}", number + 1
    taken.add(found)
    return found


class Part(NamedTuple):
    """What a rank writes of a block: all of it, or some of its rows.

    Attributes:
        leaf: Index of the block among those of its rank.
        start: First byte of the part in the block's row-major bytes.
        shape: Shape of the part.
        global_offset: First index of the part in the tensor.
    """

    leaf: int
    start: int
    shape: tuple[int, ...]
    global_offset: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A block of a tensor whose other blocks other ranks hold, described by hand.

    For what is neither a DTensor nor replicated: put it in the state where the tensor
    would be, in `save` and in the target of `load`. The tensor stays the caller's. A tied tensor
    is one `Shard` under all of its names, on all ranks: two are two tensors, whatever they hold.

    Attributes:
        tensor: The block; or a one-dimensional range of the flattened tensor, with
            `flat_start`.
        global_shape: Shape of the whole tensor.
        global_offset: First index of the block in it, one for each dimension.
        flat_start: First element of the range, in row-major order; instead of
            `global_offset`.
        replica_id: Which of several equal blocks this is, 0 for the main one. Not needed:
            equal blocks are found. Given, it is checked.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...] | None = None
    flat_start: int | None = None
    replica_id: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """A value that differs between ranks and is kept for each of them.

    Random states and data positions are such values. Values that are not marked have to
    be equal on all ranks that have them. `load` gives each rank its own again; at another
    world size, a rank that was not there takes what its target has.

    Attributes:
        value: The value of this rank; anything `save` takes.
    """

    value: Any
