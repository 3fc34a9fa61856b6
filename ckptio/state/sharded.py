"""What of a tensor this rank holds, whatever it is held in.

    DTensor          its local tensor is cut into blocks by mesh and placements
    ShardedTensor    its shards are blocks; known by `local_shards` and `metadata`
    ckptio.Shard     is a block, or a range of the flattened tensor, which is a few blocks

All come out as a `Sharded`: blocks of the tensor, each with the part of a local tensor
that holds it. The same blocks are read from on save and filled on load. Nothing is copied
and no rank is asked.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptio._texts import shown
from ckptio.format.manifest import MAX_EXTENT
from ckptio.layout import Box, boxes_of_range, numel
from ckptio.shards import Shard
from ckptio.state.looks import PLAIN_TENSORS
from ckptio.state.mesh import Cut, Layout, local_parts
from ckptio.tiling import is_inside

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from torch.distributed.tensor import DTensor

    from ckptio.errors import CheckpointError
    from ckptio.state.mesh import Part

#: Makes an error of what is wrong and the way out.
Refuse = Callable[[str, str], "CheckpointError"]


class Block(NamedTuple):
    """A block of a tensor, and what holds it.

    Attributes:
        box: The block.
        local: The local tensor that holds it.
        at: First index of it there; the first element, if `local` is a flat range.
    """

    box: Box
    local: torch.Tensor
    at: tuple[int, ...] | int

    def view(self, local: torch.Tensor | None = None) -> torch.Tensor:
        """View the block in its local tensor, or in another `local` one of the same shape."""
        view = self.local if local is None else local
        shape = self.box.shape
        if isinstance(self.at, int):
            return view[self.at : self.at + numel(shape)].view(shape)
        return part_of(view, Box(self.at, shape))


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """View a block of a tensor."""
    for dim, (first, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        if extent != tensor.shape[dim]:
            tensor = tensor.narrow(dim, first, extent)
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """What this rank holds of a tensor.

    Attributes:
        dtype: Element type of the tensor.
        global_shape: Shape of the tensor.
        blocks: Blocks of it, disjoint; none if this rank holds no element.
        local: Local tensors, those without elements too.
        identity: Equal for two that are the same memory, cut the same way.
        replica: Which of several equal blocks these are, where the caller said so.
    """

    dtype: torch.dtype
    global_shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    local: tuple[torch.Tensor, ...]
    identity: Hashable
    replica: int | None = None


def is_sharded(value: object) -> bool:
    """Whether a value is a part of a tensor, as a `Describer` takes it."""
    cls = type(value)
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        return False
    return isinstance(value, Shard) or is_dtensor(value) or _is_sharded_tensor(cls)


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor. Where nobody has imported that, there is none."""
    cls = dtensor_class()
    return cls is not None and isinstance(value, cls)


def dtensor_class() -> type | None:
    """Give torch's class of DTensors, if anybody has imported it: it takes a second."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def _is_sharded_tensor(cls: type) -> bool:
    return callable(getattr(cls, "local_shards", None)) and callable(getattr(cls, "metadata", None))


class Describer:
    """Says what of a tensor this rank holds.

    A model has thousands of tensors and few shapes, so it remembers how those are cut for
    as long as it lives: while one state is taken apart, or one target is matched.
    """

    def __init__(self) -> None:
        self._parts: dict[Hashable, tuple[Part, ...]] = {}
        self._meshes: dict[int, object] = {}  # kept alive: they are known by their ids

    def describe(self, value: Any, refuse: Refuse) -> Sharded:
        """Say what of a tensor this rank holds.

        Args:
            value: What `is_sharded` accepts.
            refuse: Makes the error to raise.

        Raises:
            CheckpointError: As `refuse` makes it: the description contradicts itself.
        """
        if isinstance(value, Shard):
            return _of_shard(value, refuse)
        if is_dtensor(value):
            return self._of_dtensor(value, refuse)
        return _of_sharded_tensor(value, refuse)

    def _of_dtensor(self, value: DTensor, refuse: Refuse) -> Sharded:
        spec = value._spec  # noqa: SLF001  # nothing public has the order of cuts
        mesh = spec.mesh
        local = local_of(value)
        global_shape, local_shape = tuple(value.shape), tuple(local.shape)
        # not by its placements: in older versions of torch, strided ones equal plain ones
        cuts = cuts_of(value, refuse)
        # newer versions of torch say the order of cuts apart from the placements
        order = getattr(spec, "shard_order", None)
        key = (global_shape, local_shape, cuts, order, id(mesh))
        parts = self._parts.get(key)
        if parts is None:
            coordinate = mesh.get_coordinate()
            found: list[Part] | None = []  # of a rank that is not in the mesh
            if coordinate is not None:
                mesh_dims = tuple([m for entry in order or () for m in entry.mesh_dims])
                layout = Layout(
                    global_shape, tuple(mesh.shape), tuple(coordinate), cuts, mesh_dims or None
                )
                found = local_parts(layout, local_shape)
            if found is None:
                raise refuse(
                    f"a DTensor of shape {global_shape} on {spec.placements} over a mesh of"
                    f" {tuple(mesh.shape)} has a local tensor of shape {local_shape} at"
                    f" {coordinate}, which does not fit",
                    "make it with distribute_tensor, or with from_local(..., shape=, stride=)",
                )
            parts = self._parts[key] = tuple(found)
            self._meshes[id(mesh)] = mesh
        dtype = value.dtype
        return Sharded(
            dtype=dtype,
            global_shape=global_shape,
            blocks=tuple([Block(box, local, at) for box, at in parts]),
            local=(local,),
            identity=("DTensor", dtype, global_shape, cuts, parts, memory_of(local)),
        )


def refuse_partial(value: Any, refuse: Refuse) -> None:
    """Refuse a partial DTensor: its value is the sum, or the like, of what its ranks hold.

    To reduce it is a collective. One that began here would leave ranks waiting in it for those
    whose states were refused, and take its turn among those of training.

    Raises:
        CheckpointError: As `refuse` makes it.
    """
    if is_dtensor(value) and any(p.is_partial() for p in value.placements):
        raise refuse(
            f"a partial DTensor on {value.placements}, which is made of what all ranks hold",
            "reduce it first, on all of them: redistribute(placements=[Replicate()]), or"
            " full_tensor()",
        )


def local_of(value: DTensor) -> torch.Tensor:
    """Give the local tensor of a DTensor, complete, and without its history."""
    with torch.no_grad():
        local = value.to_local()
    wait = getattr(local, "wait", None)  # a collective that is still under way
    return (local if wait is None else wait()).detach()


def memory_of(local: torch.Tensor) -> Hashable:
    """Tell local tensors apart by memory; those without elements by where they begin in it.

    Every rank has to see that two names are one tensor, those that hold none of it too. Some of
    these see more than there are: parts of neighbours in a buffer may begin at one place.
    """
    return (
        local.untyped_storage()._cdata,  # noqa: SLF001  # nothing public tells storages apart
        local.storage_offset(),
        local.dtype,
        tuple(local.shape),
        local.stride(),
        local.is_conj(),
        local.is_neg(),
    )


def begin_of(tensor: Any) -> int:
    """Tell where a tensor begins, or what this rank holds of it; 0 where nothing of it is."""
    if is_dtensor(tensor):
        tensor = local_of(tensor)
    if type(tensor) not in PLAIN_TENSORS:
        return 0
    try:
        return int(tensor.data_ptr()) if tensor.numel() else 0
    except RuntimeError:  # wrapped by a transform of torch.func, or lazy
        return 0


def cuts_of(value: DTensor, refuse: Refuse) -> tuple[Cut | None, ...]:
    """Say how each dimension of the mesh cuts a DTensor."""
    from torch.distributed.tensor.placement_types import (  # noqa: PLC0415  # there is a DTensor
        Replicate,
        _StridedShard,
    )
    from torch.distributed.tensor.placement_types import Shard as ShardPlacement  # noqa: PLC0415

    cuts: list[Cut | None] = []
    for placement in value.placements:
        if type(placement) is _StridedShard:
            cuts.append(Cut(placement.dim % value.ndim, int(placement.split_factor)))
        elif type(placement) is ShardPlacement:
            cuts.append(Cut(placement.dim % value.ndim))
        elif type(placement) is Replicate:
            cuts.append(None)
        else:
            raise refuse(
                f"a DTensor on {value.placements} cannot be cut into blocks",
                "redistribute it to Replicate() or Shard() first",
            )
    return tuple(cuts)


def _of_sharded_tensor(value: Any, refuse: Refuse) -> Sharded:
    metadata = value.metadata()
    global_shape = tuple(metadata.size)
    blocks = []
    shards = value.local_shards()
    for shard in shards:
        offset = tuple(shard.metadata.shard_offsets)
        shape = tuple(shard.metadata.shard_sizes)
        if tuple(shard.tensor.shape) != shape or not is_inside(offset, shape, global_shape):
            raise refuse(
                f"a shard of shape {tuple(shard.tensor.shape)} at {offset} of a tensor of shape"
                f" {global_shape} does not fit its metadata {shape}",
                "make the metadata of its shards agree with their tensors",
            )
        if numel(shape):
            blocks.append(Block(Box(offset, shape), shard.tensor.detach(), (0,) * len(shape)))
    return Sharded(
        dtype=metadata.tensor_properties.dtype,
        global_shape=global_shape,
        blocks=tuple(blocks),
        local=tuple(shard.tensor.detach() for shard in shards),
        identity=("ShardedTensor", id(value)),
    )


def _of_shard(value: Shard, refuse: Refuse) -> Sharded:
    local = value.tensor
    if not isinstance(local, torch.Tensor):
        raise refuse(f"a Shard of a {type(local).__name__}", "give it a torch.Tensor")
    local = local.detach()
    offset, start = value.global_offset, value.flat_start
    extents, shape = value.global_shape, tuple(local.shape)
    if not isinstance(extents, Sequence) or not all(map(_is_natural, extents)):
        raise refuse(f"a Shard with global_shape={shown(extents)}", "give it a tuple of ints")
    if offset is not None and not isinstance(offset, Sequence):
        raise refuse(f"a Shard with global_offset={shown(offset)}", "give it a tuple of ints")
    global_shape = tuple(extents)
    if (offset is None) == (start is None):
        raise refuse("a Shard with neither or both of global_offset and flat_start", "give it one")
    if offset is not None:
        blocks = [Block(Box(tuple(offset), shape), local, (0,) * len(shape))]
        if not is_inside(tuple(offset), shape, global_shape):
            raise refuse(
                f"a Shard of shape {shape} at {shown(offset)} is not inside of a tensor of shape"
                f" {global_shape}",
                "give the first index of the block in the whole tensor as global_offset",
            )
    else:
        stop = start + local.numel() if _is_natural(start) and start is not None else -1
        if len(shape) != 1 or not 0 <= stop <= numel(global_shape):
            raise refuse(
                f"a Shard of shape {shape} from flat_start={shown(start)} on is no range of a"
                f" tensor of shape {global_shape}",
                "give a tensor of one dimension, and its first element in row-major order",
            )
        blocks = list(_of_range(local, global_shape, stop - local.numel(), stop))
    return Sharded(
        dtype=local.dtype,
        global_shape=global_shape,
        blocks=tuple(blocks) if local.numel() else (),
        local=(local,),
        identity=("Shard", id(value)),
        replica=value.replica_id,
    )


def _of_range(
    local: torch.Tensor, global_shape: tuple[int, ...], start: int, stop: int
) -> Iterator[Block]:
    """Cut a range of a flattened tensor into blocks."""
    boxes = boxes_of_range(global_shape, start, stop)
    starts = itertools.accumulate((numel(box.shape) for box in boxes), initial=0)
    for box, at in zip(boxes, starts, strict=False):
        yield Block(box, local, at)


def _is_natural(number: object) -> bool:
    return isinstance(number, int) and 0 <= number < MAX_EXTENT
