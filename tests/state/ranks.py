"""Many ranks in one process: each takes its turn, and nothing is sent.

torch's fake process group lets one process be any rank of a world. So every rank of a job
is taken apart in turn, and what they would have written is put together by hand.
"""

from __future__ import annotations

import inspect
import itertools
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptio.engine.request import LoadRequest
from ckptio.engine.restore import plan_restoration
from ckptio.format.manifest import Chunk, Manifest, TensorEntry
from ckptio.plan.trees import merge_trees, take_tree
from ckptio.state.flatten import FlatState, flatten
from ckptio.state.mesh import Cut, Layout
from tests.strategies import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptio.engine.restoration import Restoration

Cuts = tuple[Cut | None, ...]
#: Shapes of a tensor and of a mesh, and the dimension of the tensor that each of its cuts.
MeshShape = tuple[tuple[int, ...], tuple[int, ...], list[int | None]]


def chunk(tensor: torch.Tensor, dim: int, parts: int) -> list[torch.Tensor]:
    """Cut a tensor as `torch.chunk` does, with empty tensors for the parts that it leaves out."""
    found = list(tensor.chunk(parts, dim))
    return found + [tensor.narrow(dim, 0, 0)] * (parts - len(found))


def cut(tensor: torch.Tensor, how: Cut, parts: int, index: int) -> torch.Tensor:
    """Do what a cut says, on a real tensor."""
    pieces = chunk(tensor, how.dim, how.split_factor)
    return torch.cat([chunk(piece, how.dim, parts)[index] for piece in pieces], how.dim)


def local_tensor(layout: Layout, order: Sequence[int], *, plain: bool = False) -> torch.Tensor:
    """Give the elements of a tensor, numbered row by row, that a rank holds."""
    tensor = torch.arange(math.prod(layout.global_shape)).view(layout.global_shape)
    for mesh_dim in order:
        how = layout.cuts[mesh_dim]
        if how is not None:
            how = Cut(how.dim) if plain else how
            parts, index = layout.mesh_shape[mesh_dim], layout.coordinate[mesh_dim]
            tensor = cut(tensor, how, parts, index)
    return tensor


def coordinates(mesh_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(extent) for extent in mesh_shape))


def strided(mesh_shape: Sequence[int], dims: Sequence[int | None], order: Sequence[int]) -> Cuts:
    """Say with strided cuts that plain ones come in another order than that of the mesh."""
    cuts: list[Cut | None] = []
    for mesh_dim, dim in enumerate(dims):
        before = order[: order.index(mesh_dim)]
        factor = math.prod(mesh_shape[m] for m in before if m > mesh_dim and dims[m] == dim)
        cuts.append(None if dim is None else Cut(dim, factor))
    return tuple(cuts)


@st.composite
def meshes(draw: st.DrawFn) -> MeshShape:
    """Draw the shapes of a tensor and a mesh, and which dimensions of the tensor are cut."""
    global_shape = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dim = st.none() | st.integers(0, len(global_shape) - 1)
    dims = draw(st.lists(dim, min_size=len(mesh_shape), max_size=len(mesh_shape)))
    return global_shape, mesh_shape, dims


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be a rank of a job that does nothing in its collectives."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(mesh_shape: Sequence[int], names: Sequence[str] = "xyz") -> DeviceMesh:
    """Make a mesh of the first ranks.

    Names have the rank in them, since torch keeps what it knows of a mesh for all that are
    equal, the coordinate of the rank too: a process is one rank only, elsewhere.
    """
    ranks = torch.arange(math.prod(mesh_shape)).view(*mesh_shape)
    own = tuple(f"{name}{dist.get_rank()}" for name in names[: len(mesh_shape)])
    return DeviceMesh("cpu", ranks, mesh_dim_names=own)


def spread(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Give this rank's part of a tensor, as torch cuts it; nothing is sent."""
    if "src_data_rank" not in inspect.signature(distribute_tensor).parameters:
        pytest.skip("torch 2.6 cannot distribute without collectives")
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def dtensor(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    dims: Sequence[int | None],
    order: Sequence[int] | None = None,
) -> DTensor:
    """Give this rank's part of a tensor.

    Args:
        tensor: The whole of it.
        mesh: Where it goes.
        dims: The dimension of the tensor that each dimension of the mesh cuts.
        order: In which order they cut; that of the mesh if not given.
    """
    mesh_shape = tuple(mesh.shape)
    order = range(len(mesh_shape)) if order is None else order
    cuts = strided(mesh_shape, dims, order)
    coordinate = mesh.get_coordinate()
    local = tensor.new_empty(0)
    if coordinate is not None:
        layout = Layout(tuple(tensor.shape), mesh_shape, tuple(coordinate), cuts)
        local = tensor.reshape(-1)[local_tensor(layout, order, plain=True)]
    placements = [
        Replicate()
        if how is None
        else Shard(how.dim)
        if how.split_factor == 1
        else _StridedShard(how.dim, split_factor=how.split_factor)
        for how in cuts
    ]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@dataclass
class Saved:
    """What the ranks of a job wrote.

    Attributes:
        manifest: Of all of them; without files, which nobody asks for here.
        files: One for each rank.
        flats: What each rank had.
    """

    manifest: Manifest
    files: list[bytes]
    flats: list[FlatState]


def save(world_size: int, state_of: Callable[[int], Any]) -> Saved:
    """Take the state of each rank apart, and put together what they would write."""
    flats = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            flats.append(flatten(state_of(rank), rank))
    files: list[bytes] = []
    chunks: dict[str, dict[Any, Chunk]] = {}
    forms: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, flat in enumerate(flats):
        data = b""
        assert tuple(dict.fromkeys(spec.name for spec in flat.specs)) == flat.names
        for spec, source in zip(flat.specs, flat.sources, strict=True):
            global_shape = spec.shape if spec.global_shape is None else spec.global_shape
            assert forms.setdefault(spec.name, (spec.dtype, global_shape))[1] == global_shape
            blocks = chunks.setdefault(spec.name, {})
            box = (spec.global_offset or (0,) * len(spec.shape), spec.shape)
            if source.numel() and box not in blocks:
                blocks[box] = Chunk(rank, len(data), spec.global_offset, spec.shape)
                data += bytes_of(source)
            assert source.shape == spec.shape
        files.append(data)
    entries = []
    for name, (dtype, shape) in forms.items():
        assert_filled(shape, list(chunks[name]))
        entries.append(TensorEntry(name, dtype, shape, tuple(chunks[name].values())))
    numbers = {entry.name: i for i, entry in enumerate(entries)}
    tree = merge_trees([take_tree(flat.tree, flat.names) for flat in flats], numbers)
    manifest = Manifest(
        ckptio=2, writer="", save_id="", created="", block_nbytes=4096, files=(),
        tensors=tuple(entries), tree=msgspec.Raw(msgspec.json.encode(tree)),
    )  # fmt: skip
    return Saved(manifest, files, flats)


def assert_filled(shape: Sequence[int], boxes: Sequence[Any]) -> None:
    """Every element is in one box."""
    count = torch.zeros(tuple(shape), dtype=torch.int32)
    for offset, extent in boxes:
        count[tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))] += 1
    assert bool((count == 1).all())


def load(saved: Saved, into: Any = None, **options: Any) -> tuple[Any, Restoration]:
    """Restore from what was written, on the rank that this process is now.

    Every destination has to get each of its bytes once.
    """
    request = LoadRequest(into=into, **options)
    restoration = plan_restoration(saved.manifest, "memory", request)
    wanted = restoration.wanted()
    destinations = restoration.destinations()
    buffers = [bytearray(d.tensor.numel() * d.dtype.itemsize) for d in destinations]
    for file, start, nbytes, index, offset, *_ in (row for want in wanted for row in want.each()):
        source = saved.files[file][start : start + nbytes]
        assert len(source) == nbytes
        buffers[index][offset : offset + nbytes] = source
    assert sum(want.nbytes * want.rows for want in wanted) == sum(map(len, buffers))
    assert {want.file for want in wanted} <= set(restoration.files())
    for destination, buffer in zip(destinations, buffers, strict=True):
        if buffer:
            values = torch.frombuffer(buffer, dtype=destination.dtype)
            destination.tensor.detach().copy_(values.view(destination.tensor.shape))
    return restoration.finish(), restoration
