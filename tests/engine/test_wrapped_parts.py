"""DTensors whose local tensors are made of others, as 8-bit optimizers have under FSDP2."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptio.errors import CheckpointError
from ckptio.format.fields import LAYOUT
from ckptio.state.wrappers import take_apart
from ckptio.testing import run_virtual
from tests.job_rig import Job, job
from tests.state.ranks import as_rank, mesh_of
from tests.state.test_wrappers import CLASSES, Coded, assert_coded, coded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio import Engine


def held(
    seed: int,
    world_size: int,
    *,
    dim: int = 0,
    mesh: Sequence[int] | None = None,
    meta: bool = False,
    order: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Make the state of each rank: a DTensor of coded blocks, and what all have alike."""
    states = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            shape = tuple(mesh or (world_size,))
            local = coded(seed + rank)
            if meta:
                local = Coded(local.codes.to("meta"), local.scale.to("meta"), local.kernel)
            whole = [4, 16]
            whole[dim] *= world_size
            moment = DTensor.from_local(
                local,
                mesh_of(shape),
                [Shard(dim)] * len(shape),
                run_check=False,
                shape=torch.Size(whole),
                stride=(whole[1], 1),
            )
            if order is not None:
                moment = cut_in(moment, dim, order)
        state = {"moment": moment, "step": torch.full((), float(seed))}
        states.append({"optimizer": {"state": {"w": state}}})
    return states


def cut_in(moment: DTensor, dim: int, order: Sequence[int]) -> DTensor:
    """Say in which order the mesh cuts a dimension: a rank holds another block."""
    given = moment._spec
    if not hasattr(given, "shard_order"):
        pytest.skip("this torch has the order in the placements alone")
    entries = tuple(
        entry._replace(mesh_dims=tuple(order)) if entry.tensor_dim == dim else entry
        for entry in given.shard_order
    )
    spec = dataclasses.replace(given, shard_order=entries)
    made: Any = DTensor
    turned: DTensor = made(moment._local_tensor, spec, requires_grad=False)
    return turned


def moment_of(state: dict[str, Any]) -> Any:
    """Give what a rank holds of the moment."""
    moment = state["optimizer"]["state"]["w"]["moment"]
    assert isinstance(moment, DTensor)
    return moment._local_tensor


async def save(ranks: Job, states: Sequence[dict[str, Any]]) -> None:
    async def body(rank: int, engine: Engine) -> None:
        await engine.save(states[rank], "memory")

    await ranks.all(body)


async def load(ranks: Job, targets: Sequence[dict[str, Any]], **options: Any) -> list[Any]:
    async def body(rank: int, engine: Engine) -> Any:
        return await engine.load("memory", into=targets[rank], **options)

    return await ranks.each(body)


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_gets_its_own_back_in_place(world_size: int) -> None:
    """With its class, which the target has."""

    async def go() -> None:
        states, targets = held(1, world_size), held(50, world_size)
        codes = [moment_of(target).codes for target in targets]
        async with job(world_size) as ranks:
            await save(ranks, states)
            assert await load(ranks, targets) == targets
        for state, target, before in zip(states, targets, codes, strict=True):
            assert moment_of(target).codes is before
            assert_coded(moment_of(target), moment_of(state))
            assert target["optimizer"]["state"]["w"]["step"] == 1

    run_virtual(go(), seed=0)


def test_what_is_on_the_meta_device_is_made_as_a_dtensor() -> None:
    """On the mesh of the target."""

    async def go() -> None:
        states, targets = held(1, 2), held(50, 2, meta=True)
        async with job(2) as ranks:
            await save(ranks, states)
            for state, made in zip(states, await load(ranks, targets), strict=True):
                assert_coded(moment_of(made), moment_of(state))
                whole = made["optimizer"]["state"]["w"]["moment"]
                assert (whole.shape, whole.placements) == ((8, 16), (Shard(0),))

    run_virtual(go(), seed=0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_another_order_of_cuts_is_another_layout(order: Sequence[int]) -> None:
    """Though mesh, placements and shapes are the same; and it is kept on the meta device."""

    async def go() -> None:
        states = held(1, 4, mesh=(2, 2), order=order)
        targets = held(50, 4, mesh=(2, 2), order=order[::-1])
        made = held(50, 4, mesh=(2, 2), order=order, meta=True)
        async with job(4) as ranks:
            await save(ranks, states)
            for end in await load(ranks, targets):
                assert isinstance(end, CheckpointError)
                assert "another layout in the target" in str(end)
            for state, found in zip(states, await load(ranks, made), strict=True):
                assert_coded(moment_of(found), moment_of(state))
                (entry,) = found["optimizer"]["state"]["w"]["moment"]._spec.shard_order
                assert tuple(entry.mesh_dims) == tuple(order)
        for target, before in zip(targets, held(50, 4, mesh=(2, 2)), strict=True):
            assert_coded(moment_of(target), moment_of(before))

    run_virtual(go(), seed=0)


def strided(state: dict[str, Any]) -> None:
    """Cut the moment of a state as views of DTensors are cut: torch marks such placements."""
    moments = state["optimizer"]["state"]["w"]
    given = moments["moment"]._spec
    mark = {"use_strided_shard_as_shard_order": False}
    if not mark.keys() <= inspect.signature(type(given)).parameters.keys():
        pytest.skip("this torch has no such mark")
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    spec = type(given)(given.mesh, placements, tensor_meta=given.tensor_meta, **mark)
    made: Any = DTensor
    moments["moment"] = made(moments["moment"]._local_tensor, spec, requires_grad=False)


def test_what_torch_marks_in_placements_is_made_on_the_meta_device() -> None:
    """A specification is taken as it is: not all of them can be written down and made again."""

    async def go() -> None:
        states = held(1, 4, mesh=(2, 2))
        targets = held(50, 4, mesh=(2, 2), meta=True)
        for state in (*states, *targets):
            strided(state)
        async with job(4) as ranks:
            await save(ranks, states)
            for state, made in zip(states, await load(ranks, targets), strict=True):
                assert_coded(moment_of(made), moment_of(state))

    run_virtual(go(), seed=0)


@pytest.mark.parametrize("other", [{"dim": 1}, {"mesh": (2, 2)}, {"mesh": (4, 1)}])
def test_another_layout_is_refused_before_anything_changes(other: dict[str, Any]) -> None:
    """Also where each block has the shape that another one had."""

    async def go() -> None:
        states, targets = held(1, 4, mesh=(4,)), held(50, 4, **other)
        async with job(4) as ranks:
            await save(ranks, states)
            for end in await load(ranks, targets):
                assert isinstance(end, CheckpointError)
                assert "another layout in the target" in str(end)
        for target, before in zip(targets, held(50, 4, **other), strict=True):
            assert_coded(moment_of(target), moment_of(before))
            assert target["optimizer"]["state"]["w"]["step"] == 50

    run_virtual(go(), seed=0)


def test_a_layout_says_which_of_equal_blocks_a_rank_has() -> None:
    """Another dimension of the mesh may cut it, or the mesh has the ranks in another order."""
    layouts = []
    with as_rank(1, 4):
        for ranks in ([[0, 1], [2, 3]], [[3, 2], [1, 0]]):
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("x1", "y1"))
            for cuts in ([Shard(0), Replicate()], [Replicate(), Shard(0)]):
                size = torch.Size([8, 16])
                whole = DTensor.from_local(
                    coded(1), mesh, cuts, run_check=False, shape=size, stride=(16, 1)
                )
                layouts.append(take_apart("w", whole)[1][LAYOUT])
    assert all(one != other for one, other in itertools.combinations(layouts, 2))


def test_another_number_of_ranks_is_refused() -> None:
    """Nobody knows how codes of blocks become codes of other blocks."""

    async def go() -> None:
        states, fewer, more = held(1, 2), held(50, 1), held(50, 3)
        async with job(2) as ranks:
            await save(ranks, states)
            place = ranks.place
        for targets in (fewer, more):
            async with job(len(targets), place) as ranks:
                for end in await load(ranks, targets):
                    assert isinstance(end, CheckpointError)

    run_virtual(go(), seed=0)


def test_parts_for_ranks_and_a_whole_are_told_apart() -> None:
    """In both directions; without a target a rank gets what it held."""

    async def go() -> None:
        whole = {"optimizer": {"state": {"w": {"moment": coded(9), "step": torch.zeros(())}}}}
        async with job(1) as ranks:
            await save(ranks, held(1, 1))
            (end,) = await load(ranks, [whole])
            assert "a whole" in str(end)
            found = await ranks.engines[0].load("memory", types=CLASSES)
            assert_coded(found["optimizer"]["state"]["w"]["moment"], coded(1))
        async with job(1) as ranks:
            await save(ranks, [whole])
            (end,) = await load(ranks, held(1, 1))
            assert "parts of a tensor" in str(end)

    run_virtual(go(), seed=0)


def test_an_optimizer_over_dtensors_goes_on_with_its_own() -> None:
    """What its state has already says how that is held; before the first step nothing does."""

    def stepped(seed: int) -> list[torch.optim.Optimizer]:
        optimizers: list[torch.optim.Optimizer] = []
        for state in held(seed, 2):
            moment = state["optimizer"]["state"]["w"]["moment"]
            whole = DTensor.from_local(
                torch.zeros(4, 16), moment.device_mesh, moment.placements, run_check=False
            )
            parameter = torch.nn.Parameter(whole)
            optimizers.append(torch.optim.Adam([parameter]))
            optimizers[-1].state[parameter] = {"moment": moment, "step": torch.zeros(())}
        return optimizers

    async def go() -> None:
        saved, targets, fresh = stepped(1), stepped(50), stepped(50)
        async with job(2) as ranks:
            await save(ranks, [{"o": each} for each in saved])
            given = [{"o": each} for each in targets]
            assert await load(ranks, given) == given
            for rank, (target, of) in enumerate(zip(targets, saved, strict=True)):
                (state,), (expected,) = target.state.values(), of.state.values()
                assert_coded(state["moment"]._local_tensor, expected["moment"]._local_tensor)
                fresh[rank].state.clear()
            for end in await load(ranks, [{"o": each} for each in fresh]):
                assert isinstance(end, CheckpointError)
                assert "get_state_dict" in str(end)

    run_virtual(go(), seed=0)
