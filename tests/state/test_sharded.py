from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as TorchShard
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from ckptio import shards
from ckptio.errors import UnsupportedLeafError
from ckptio.layout import numel
from ckptio.shards import LeafSpec, PerRank
from ckptio.state.flatten import flatten
from ckptio.state.sharded import is_sharded
from tests.state.ranks import (
    MeshShape,
    as_rank,
    chunk,
    dtensor,
    load,
    mesh_of,
    meshes,
    save,
    spread,
)
from tests.strategies import assert_same, random_tensor


def sharded_tensor(
    tensor: torch.Tensor, rows: list[int], rank: int, owners: list[int]
) -> ShardedTensor:
    """Make a ShardedTensor of blocks of rows, each on one rank."""
    metadata, local = [], []
    start = 0
    for extent, owner in zip(rows, owners, strict=True):
        shape = [extent, *tensor.shape[1:]]
        place = ShardMetadata([start, *[0] * (tensor.ndim - 1)], shape, f"rank:{owner}/cpu")
        metadata.append(place)
        if owner == rank:
            local.append(TorchShard(tensor[start : start + extent].clone(), place))
        start += extent
    whole = ShardedTensorMetadata(
        metadata, tensor.shape, TensorProperties(dtype=tensor.dtype, requires_grad=False)
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, whole)


@given(mesh=meshes(), data=st.data())
def test_blocks_of_all_ranks_are_the_tensor(mesh: MeshShape, data: st.DataObject) -> None:
    """For any mesh and placements, strided ones and empty local tensors among them."""
    global_shape, mesh_shape, dims = mesh
    order = data.draw(st.permutations(range(len(mesh_shape))))
    tensor = random_tensor(global_shape, torch.int16, 1)
    saved = save(
        math.prod(mesh_shape), lambda _: {"x": dtensor(tensor, mesh_of(mesh_shape), dims, order)}
    )
    assert_same(load(saved)[0], {"x": tensor})


@given(mesh=meshes())
def test_what_torch_distributes_is_put_together_again(mesh: MeshShape) -> None:
    """Placements as users write them."""
    global_shape, mesh_shape, dims = mesh
    tensor = random_tensor(global_shape, torch.bfloat16, 2)
    placements = [Replicate() if dim is None else Shard(dim - len(global_shape)) for dim in dims]

    def state_of(_: int) -> Any:
        return spread(tensor, mesh_of(mesh_shape), placements)

    assert_same(load(save(math.prod(mesh_shape), state_of))[0], tensor)


def test_a_strided_placement_on_its_own_is_several_blocks() -> None:
    """Each a view of the local tensor."""
    tensor = torch.arange(24.0).view(12, 2)

    def state_of(_: int) -> Any:
        placement = _StridedShard(0, split_factor=3)
        return spread(tensor, mesh_of((2,)), [placement])

    saved = save(2, state_of)
    assert [spec.global_offset for spec in saved.flats[1].specs] == [(2, 0), (6, 0), (10, 0)]
    assert_same(load(saved)[0], tensor)


def test_a_rank_without_elements_still_names_the_tensor() -> None:
    """One with an empty part, and one that is not in the mesh: with type and shape."""
    tensor = torch.arange(3.0)

    def state_of(_: int) -> Any:
        cut = spread(tensor, DeviceMesh("cpu", [0, 1, 2, 3]), [Shard(0)])
        scalar = spread(tensor[0], DeviceMesh("cpu", [1]), [Replicate()])
        return {"cut": cut, "scalar": scalar}

    saved = save(5, state_of)
    assert saved.flats[4].specs == (
        LeafSpec("cut", "float32", (0,), (3,), (0,)),
        LeafSpec("scalar", "float32", (0,), (), ()),
    )
    assert saved.flats[3].specs[0] == LeafSpec("cut", "float32", (0,), (3,), (0,))
    assert_same(load(saved)[0], {"cut": tensor, "scalar": tensor[0]})


def test_a_block_that_is_the_whole_tensor_is_told_like_a_plain_one() -> None:
    """So replicated DTensors and plain tensors are replicas of each other."""
    tensor = torch.arange(6.0)
    with as_rank(1, 2):
        replicated = dtensor(tensor, mesh_of((2,)), [None])
        empty = dtensor(tensor[:0], mesh_of((2,)), [0])
        flat = flatten({"a": replicated, "b": shards.Shard(tensor, (6,), (0,)), "c": empty})
    assert flat.specs == (
        LeafSpec("a", "float32", (6,)),
        LeafSpec("b", "float32", (6,)),
        LeafSpec("c", "float32", (0,)),
    )


def test_tied_tensors_are_one_on_every_rank() -> None:
    """On those that hold nothing of it too; otherwise ranks would disagree on what there is."""
    tensor = torch.arange(6.0).view(3, 2)

    def state_of(_: int) -> Any:
        weight = dtensor(tensor, mesh_of((4,)), [0])
        twin = dtensor(tensor, mesh_of((4,)), [0])
        again = DTensor.from_local(
            weight.to_local(), twin.device_mesh, [Shard(0)], shape=tensor.shape, stride=(2, 1)
        )
        return {"a": weight, "b": weight.detach(), "c": twin, "d": again}

    saved = save(4, state_of)
    assert [flat.names for flat in saved.flats] == [("a", "c")] * 4
    tree = {"a": {"~": 0}, "b": {"~": 0}, "c": {"~": 1}, "d": {"~": 0}}
    assert [flat.tree for flat in saved.flats[:3]] == [tree] * 3
    assert msgspec.json.decode(saved.manifest.tree) == tree
    loaded, _ = load(saved)
    assert loaded["a"] is loaded["b"] is loaded["d"]


@pytest.mark.parametrize("world_size", [3, 4, 9])
def test_neighbours_in_a_buffer_are_not_tied(world_size: int) -> None:
    """Where a rank holds nothing of two, their parts begin at one place; those that do decide."""
    tensors = {name: torch.arange(n) + 10.0 * n for name, n in (("a", 2), ("b", 2), ("c", 6))}
    tensors["d"] = tensors["b"] + 1

    def state_of(rank: int) -> Any:
        locals_ = {name: chunk(whole, 0, world_size)[rank] for name, whole in tensors.items()}
        buffer, start, state = torch.cat([*locals_.values()]), 0, {}
        mesh = mesh_of((world_size,))
        for name, part in locals_.items():
            stop = start + len(part)
            state[name] = DTensor.from_local(
                buffer[start:stop], mesh, [Shard(0)], shape=tensors[name].shape, stride=(1,)
            )
            start = stop
        return {**state, "e": state["b"].detach(), "f": state["b"]}

    loaded, _ = load(save(world_size, state_of))
    assert_same(loaded, {**tensors, "e": tensors["b"], "f": tensors["b"]})
    assert loaded["b"] is loaded["e"] is loaded["f"]


def test_tensors_without_elements_on_any_rank_are_not_tied_by_memory() -> None:
    """There, nobody could decide."""

    def state_of(rank: int) -> Any:
        buffer, mesh = torch.zeros(2), mesh_of((2,))
        return {
            name: DTensor.from_local(
                buffer[at:at], mesh, [Shard(0)], shape=torch.Size([0]), stride=(1,)
            )
            for name, at in (("a", 0), ("b", rank))
        }

    assert_same(load(save(2, state_of))[0], {"a": torch.zeros(0), "b": torch.zeros(0)})


def test_indices_of_a_tree_are_those_of_names() -> None:
    """A rank may hold several blocks of a tensor; plain tensors come first."""
    tensor = torch.arange(12.0)
    with as_rank(0, 2):
        placement = _StridedShard(0, split_factor=2)
        one, other = (spread(data, mesh_of((2,)), [placement]) for data in (tensor, tensor + 1))
        flat = flatten({"s": one, "p": tensor, "t": other}, 0)
    assert flat.names == ("p", "s", "t")
    assert flat.tree == {"s": {"~": 1}, "p": {"~": 0}, "t": {"~": 2}}
    assert [spec.name for spec in flat.specs] == ["p", "s", "s", "t", "t"]
    assert flat.nbytes == 4 * (12 + 6 + 6)


def test_an_unsharded_state_has_one_spec_for_each_name() -> None:
    """Indices of the tree, names and specs agree."""
    flat = flatten({"a": torch.zeros(2), "b": PerRank(torch.ones(3)), "c": b"x" * 2000})
    assert flat.names == tuple(spec.name for spec in flat.specs)
    assert sorted(flat.names) == ["a", "b", "c"]
    assert all(spec.global_shape is None for spec in flat.specs)


def test_the_source_of_a_block_is_the_callers_memory() -> None:
    """Nothing is copied before the save stages it; autograd does not notice."""
    with as_rank(1, 2):
        weight = torch.nn.Parameter(dtensor(torch.arange(6.0), mesh_of((2,)), [0]))
        flat = flatten(weight)
        with torch.no_grad():
            weight.add_(1)
    assert_same(flat.sources[0], torch.tensor([4.0, 5.0, 6.0]))
    assert not flat.sources[0].requires_grad


def test_a_collective_under_way_is_waited_for() -> None:
    """The local tensor is the result, not the promise of it."""
    with as_rank(0, 2):
        promised = DTensor.from_local(
            AsyncCollectiveTensor(torch.ones(2)), mesh_of((2,)), [Shard(0)]
        )
        flat = flatten(promised)
    assert type(flat.sources[0]) is torch.Tensor
    assert flat.specs == (LeafSpec("state", "float32", (2,), (4,), (0,)),)


def test_a_partial_value_is_refused() -> None:
    """Without a collective, in which ranks would wait for one whose state was refused."""
    with as_rank(0, 2), CommDebugMode() as collectives:
        mesh = mesh_of((2, 1))
        partial = DTensor.from_local(torch.ones(4), mesh, [Partial("max"), Shard(0)])
        with pytest.raises(UnsupportedLeafError, match=r"a partial DTensor.*redistribute\("):
            flatten({"x": partial})
    assert not collectives.get_total_counts()


def test_fsdp_over_tensor_parallelism_is_put_together() -> None:
    """Uneven on both: 9 rows over 2 and 4 ranks, and the moments of an optimizer."""
    tensor = random_tensor((9, 10), torch.float32, 3)

    def state_of(_: int) -> Any:
        mesh = mesh_of((4, 2))
        dp, tp = (mesh[name] for name in mesh.mesh_dim_names or ())
        module = torch.nn.Linear(10, 9, bias=False)
        weight = spread(tensor, tp, [Shard(0)])
        module.weight = torch.nn.Parameter(weight)
        fully_shard(module, mesh=dp)
        model, optimizer = get_state_dict(module, torch.optim.Adam(module.parameters()))
        return {"module": module, "model": model, "optimizer": optimizer}

    saved = save(8, state_of)
    loaded, _ = load(saved)
    assert_same(loaded["module"]["weight"], tensor)
    assert loaded["model"]["weight"] is loaded["module"]["weight"]
    assert_same(loaded["optimizer"]["state"]["weight"]["exp_avg"], torch.zeros(9, 10))


def test_shards_of_a_sharded_tensor_are_blocks() -> None:
    """Several on one rank, none on another."""
    tensor = random_tensor((7, 3), torch.float16, 4)
    saved = save(3, lambda rank: {"x": sharded_tensor(tensor, [2, 1, 0, 4], rank, [0, 2, 1, 0])})
    assert [spec.shape for spec in saved.flats[0].specs] == [(2, 3), (4, 3)]
    assert [spec.shape for spec in saved.flats[1].specs] == [(0, 0)]
    assert_same(load(saved)[0], {"x": tensor})


@given(data=st.data())
def test_ranges_of_a_flattened_tensor_are_blocks(data: st.DataObject) -> None:
    """Wherever they start and stop, contiguous or not."""
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    tensor = random_tensor(shape, torch.int32, 5)
    bounds = data.draw(st.lists(st.integers(0, numel(shape)), min_size=2, max_size=2).map(sorted))
    step = data.draw(st.integers(1, 2))
    cuts = [0, *bounds, numel(shape)]

    def state_of(rank: int) -> Any:
        part = tensor.reshape(-1)[cuts[rank] : cuts[rank + 1]]
        spread = part.new_empty(step * len(part))[::step].copy_(part)
        return {"x": shards.Shard(spread, shape, flat_start=cuts[rank])}

    assert_same(load(save(3, state_of))[0], {"x": tensor})


def test_one_shard_under_two_names_is_one_tensor_and_two_of_its_memory_are_two() -> None:
    """What a rank without elements holds could not tell, unlike what its caller says."""
    tensor = torch.arange(6.0)

    def state_of(rank: int, *, is_one: bool) -> Any:
        part = tensor[3 * rank : 3 * rank + 3]
        first, second = (shards.Shard(part, (6,), (3 * rank,)) for _ in range(2))
        return {"embed": first, "head": first if is_one else second}

    for is_one in (True, False):
        saved = save(2, functools.partial(state_of, is_one=is_one))
        found = load(saved)[0]
        assert_same(found, {"embed": tensor, "head": tensor})
        assert len(saved.manifest.tensors) == (1 if is_one else 2)
        assert (found["embed"].data_ptr() == found["head"].data_ptr()) == is_one


def test_a_shard_keeps_the_replica_that_its_owner_says() -> None:
    """For the planner to check."""
    block = shards.Shard(torch.zeros(2, 2), (4, 2), (2, 0), replica_id=3)
    flat_range = shards.Shard(torch.zeros(3), (4, 2), flat_start=1, replica_id=1)
    flat = flatten({"x": block, "y": flat_range, "z": block})
    assert flat.specs == (
        LeafSpec("x", "float32", (2, 2), (4, 2), (2, 0), 3),
        LeafSpec("y", "float32", (1, 1), (4, 2), (0, 1), 1),
        LeafSpec("y", "float32", (1, 2), (4, 2), (1, 0), 1),
    )
    assert flat.tree["x"] == flat.tree["z"]


@pytest.mark.parametrize(
    ("shard", "problem"),
    [
        (shards.Shard(torch.zeros(2), (4,)), "neither or both"),
        (shards.Shard(torch.zeros(2), (4,), (0,), 0), "neither or both"),
        (shards.Shard(torch.zeros(2), (4,), (3,)), "not inside"),
        (shards.Shard(torch.zeros(2), (4,), (-1,)), "not inside"),
        (shards.Shard(torch.zeros(2), (4, 1), (0,)), "not inside"),
        (shards.Shard(torch.zeros(2), (4,), (0, 0)), "not inside"),
        (shards.Shard(torch.zeros(2), (4,), flat_start=3), "no range"),
        (shards.Shard(torch.zeros(2), (4,), flat_start=-1), "no range"),
        (shards.Shard(torch.zeros(2, 1), (4,), flat_start=0), "no range"),
        (shards.Shard(torch.zeros(2), (-4,), (0,)), "global_shape"),
        (shards.Shard(torch.zeros(2), (-2, -2), flat_start=0), "global_shape"),
        (shards.Shard(torch.zeros(2), (4.0,), (0,)), "global_shape"),  # type: ignore[arg-type]  # as below
        (shards.Shard(torch.zeros(2), (4,), flat_start=1.0), "no range"),  # type: ignore[arg-type]  # as below
        (shards.Shard(torch.zeros(2), 4, (0,)), "global_shape=4;"),  # type: ignore[arg-type]  # as below
        (shards.Shard(torch.zeros(2), None, (0,)), "global_shape=None;"),  # type: ignore[arg-type]  # as below
        (shards.Shard(torch.zeros(2), (4,), 0), "global_offset=0;"),  # type: ignore[arg-type]  # as below
        # Python writes no int of so many digits
        (shards.Shard(torch.zeros(2), 10**5000, (0,)), "global_shape=a very large int;"),  # type: ignore[arg-type]  # as below
        (shards.Shard(torch.zeros(2), (4,), (10**5000,)), "at a very large tuple is not inside"),
        (shards.Shard(torch.zeros(2), (10**5000,), (0,)), "global_shape=a very large tuple;"),
        (shards.Shard(torch.zeros(2), (4,), flat_start=10**5000), "flat_start=a very large int on"),
        (shards.Shard([1.0], (1,), (0,)), "a Shard of a list"),  # type: ignore[arg-type]  # what is refused
        (shards.Shard(torch.zeros(2, device="meta"), (4,), (0,)), "meta device"),
        (shards.Shard(torch.zeros(4).to_sparse(), (4,), (0,)), "layout"),
    ],
)
def test_a_shard_that_contradicts_itself_is_refused(shard: shards.Shard, problem: str) -> None:
    """By its name, before anything is written."""
    with pytest.raises(UnsupportedLeafError, match=f"cannot save 'model.x': .*{problem}"):
        flatten({"model": {"x": shard}})


def test_a_dtensor_that_contradicts_itself_is_refused() -> None:
    """Where its local tensor is not what its placements give."""
    with as_rank(0, 2):
        wrong = DTensor.from_local(
            torch.zeros(3), mesh_of((2,)), [Shard(0)], shape=torch.Size([4]), stride=(1,)
        )
        with pytest.raises(UnsupportedLeafError, match=r"local tensor of shape \(3,\)"):
            flatten({"x": wrong})


def test_metadata_of_a_sharded_tensor_that_does_not_fit_is_refused() -> None:
    """Its shards would land elsewhere."""
    with as_rank(0, 1):
        tensor = sharded_tensor(torch.zeros(4, 2), [4], 0, [0])
        tensor.local_shards()[0].metadata.shard_sizes = [3, 2]
        with pytest.raises(UnsupportedLeafError, match="does not fit its metadata"):
            flatten({"x": tensor})
        tensor = sharded_tensor(torch.zeros(4, 2), [4], 0, [0])
        tensor.local_shards()[0].metadata.shard_offsets = [1, 0]
        with pytest.raises(UnsupportedLeafError, match="does not fit its metadata"):
            flatten({"x": tensor})


def test_what_has_one_method_of_a_sharded_tensor_is_none() -> None:
    """Others have metadata, too."""

    class Image(torch.Tensor):
        def metadata(self) -> None: ...

    assert not is_sharded(torch.ones(2).as_subclass(Image))


def test_cuts_in_another_order_than_that_of_the_mesh_are_put_together() -> None:
    """Newer versions of torch say the order of cuts apart from the placements."""
    tensor = random_tensor((8, 3), seed=5)

    def state_of(rank: int) -> dict[str, Any]:
        mesh = mesh_of((2, 2))
        row, column = divmod(rank, 2)
        given = distribute_tensor(tensor, mesh, [Shard(0), Shard(0)], src_data_rank=None)._spec
        (entry,) = given.shard_order
        turned = dataclasses.replace(given, shard_order=(entry._replace(mesh_dims=(1, 0)),))
        local = tensor.chunk(2)[column].chunk(2)[row].clone()
        return {"x": DTensor(local, turned, requires_grad=False)}

    if not hasattr(DTensorSpec, "shard_order"):
        pytest.skip("this version of torch has no order of cuts")
    assert_same(load(save(4, state_of))[0], {"x": tensor})


def test_values_of_each_rank_have_names_of_their_own() -> None:
    """They stay marked in the tree, and are not tied to what all ranks share."""
    shared = torch.arange(4.0)
    state = {"a": PerRank({"x": shared, "n": 7}), "b": shared, "c": PerRank(shared)}
    flat = flatten(state, 3)
    assert sorted(flat.names) == ["a.x~rank3", "b"]
    own, whole = flat.names.index("a.x~rank3"), flat.names.index("b")
    assert flat.tree == {
        "a": {"~": "ranks", "v": [{"x": {"~": own}, "n": 7}]},
        "b": {"~": whole},
        "c": {"~": "ranks", "v": [{"~": own}]},
    }
    assert "a.x" in flatten(state).names


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (PerRank(PerRank(1)), "a PerRank value inside another one"),
        (PerRank([shards.Shard(torch.zeros(2), (4,), (0,))]), "a sharded tensor inside"),
    ],
)
def test_what_cannot_be_kept_for_each_rank_is_refused(value: Any, problem: str) -> None:
    """Blocks are per rank already."""
    with pytest.raises(UnsupportedLeafError, match=problem):
        flatten({"x": value}, 0)
