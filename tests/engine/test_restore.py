from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

from ckptio import shards, sync
from ckptio.engine import restore
from ckptio.engine.regions import Need, want_region
from ckptio.errors import MismatchError, TargetError
from ckptio.format.manifest import Chunk, TensorEntry
from ckptio.layout import Box
from ckptio.runtime import loading
from ckptio.shards import PerRank
from ckptio.state.select import make_predicate
from tests.rig import SMALL
from tests.state.ranks import (
    MeshShape,
    Saved,
    as_rank,
    dtensor,
    load,
    mesh_of,
    meshes,
    save,
    spread,
)
from tests.state.test_sharded import sharded_tensor
from tests.strategies import assert_same, random_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckptio.plan.load import Wanted
    from ckptio.staging.copy import Destination, TargetState


def local(value: torch.Tensor) -> torch.Tensor:
    assert isinstance(value, DTensor)
    with torch.no_grad():
        return value.to_local()


def saved_rows(tensor: torch.Tensor, num_ranks: int = 3) -> Saved:
    """Save a tensor by rows, a few on each rank."""
    return save(num_ranks, lambda _: {"w": dtensor(tensor, mesh_of((num_ranks,)), [0])})


@given(mesh=meshes(), data=st.data())
def test_a_tensor_moves_from_any_mesh_to_any_other(mesh: MeshShape, data: st.DataObject) -> None:
    """Bit-equal, reading what a rank holds once: uneven, strided, empty, replicated."""
    global_shape, before, dims = mesh
    after = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    dim = st.none() | st.integers(0, len(global_shape) - 1)
    new_dims = data.draw(st.lists(dim, min_size=len(after), max_size=len(after)))
    order = data.draw(st.permutations(range(len(before))))
    new_order = data.draw(st.permutations(range(len(after))))
    tensor = random_tensor(global_shape, torch.int16, 6)
    saved = save(math.prod(before), lambda _: [dtensor(tensor, mesh_of(before), dims, order)])
    world_size = math.prod(after)
    for rank in range(world_size):
        with as_rank(rank, world_size):
            expected = dtensor(tensor, mesh_of(after), new_dims, new_order)
            blank = dtensor(torch.zeros_like(tensor), mesh_of(after), new_dims, new_order)
            memory = local(blank).untyped_storage()
            loaded, restoration = load(saved, [blank])
            assert loaded[0] is blank
            assert_same(local(blank), local(expected))
            assert local(blank).untyped_storage()._cdata == memory._cdata
            assert restoration.match is not None
            assert restoration.match.agrees
            assert restoration.num_tensors == 1


def test_plain_and_sharded_tensors_load_into_each_other() -> None:
    """A DTensor's file into a plain tensor, and a plain one's into a DTensor."""
    tensor = random_tensor((5, 6), torch.float32, 7)
    whole = torch.zeros(5, 6)
    load(saved_rows(tensor), {"w": whole})
    assert_same(whole, tensor)
    saved = save(1, lambda _: {"w": tensor})
    with as_rank(1, 2):
        columns = dtensor(torch.zeros(5, 6), mesh_of((2,)), [1])
        load(saved, {"w": columns})
        assert_same(local(columns), tensor[:, 3:].contiguous())


def test_shards_described_by_hand_are_filled() -> None:
    """A block, a range of the flattened tensor, and the shards of a ShardedTensor."""
    tensor = random_tensor((6, 4), torch.float64, 8)
    saved = saved_rows(tensor)
    block = shards.Shard(torch.zeros(2, 4, dtype=torch.float64)[:, 1:3], (6, 4), (3, 1))
    flat_range = shards.Shard(torch.zeros(26, dtype=torch.float64)[::2], (6, 4), flat_start=5)
    loaded, _ = load(saved, {"w": block})
    assert loaded["w"] is block
    assert_same(block.tensor, tensor[3:5, 1:3])
    load(saved, {"w": flat_range})
    assert_same(flat_range.tensor, tensor.reshape(-1)[5:18])
    with as_rank(1, 2):
        blank = sharded_tensor(torch.zeros_like(tensor), [1, 2, 3], 1, [1, 0, 1])
        load(saved, {"w": blank})
    assert_same([s.tensor for s in blank.local_shards()], [tensor[:1], tensor[3:]])


def test_a_sharded_target_takes_another_precision_when_asked() -> None:
    """As plain targets do."""
    tensor = random_tensor((4, 3), torch.float32, 9)
    saved = saved_rows(tensor)
    with as_rank(0, 2):
        half = dtensor(torch.zeros(4, 3, dtype=torch.bfloat16), mesh_of((2,)), [1])
        with pytest.raises(MismatchError, match=r"w: torch.bfloat16 in the target, torch.float32"):
            load(saved, {"w": half})
        load(saved, {"w": half}, dtype=torch.bfloat16)
        assert_same(local(half), tensor[:, :2].to(torch.bfloat16))


def test_shapes_are_those_of_whole_tensors() -> None:
    """Blocks of one shape may be of tensors of several."""
    saved = saved_rows(torch.zeros(4, 3))
    with as_rank(0, 2):
        target = {"w": dtensor(torch.ones(6, 3), mesh_of((2,)), [0]), "v": PerRank(torch.ones(1))}
        with pytest.raises(MismatchError) as caught:
            load(saved, target)
        assert caught.value.mismatched == (
            "w: shape (6, 3) in the target, (4, 3) in the checkpoint",
        )
        assert caught.value.missing == ("v",)
        load(saved, target, strict="ignore")
        assert_same(local(target["w"]), torch.ones(3, 3))  # type: ignore[arg-type]  # a DTensor


def test_a_target_that_cannot_be_filled_is_named() -> None:
    """With what to do about it; nothing was filled."""
    saved = saved_rows(torch.zeros(4, 3))
    with as_rank(0, 2):
        partial = DTensor.from_local(torch.zeros(4, 3), mesh_of((2,)), [Partial()])
        with pytest.raises(TargetError, match=r"cannot fill 'w': .*redistribute it"):
            load(saved, {"w": partial})
    with pytest.raises(TargetError, match="cannot fill 'w': a Shard of shape"):
        load(saved, {"w": shards.Shard(torch.zeros(4, 3), (4, 3), (1, 0))})
    expanded = torch.zeros(1, 3).expand(2, 3)
    with pytest.raises(TargetError, match="cannot fill 'w': its elements share memory"):
        load(saved, {"w": shards.Shard(expanded, (4, 3), (1, 0))})


def test_a_rank_without_elements_has_loaded_what_it_asked_for() -> None:
    """It reads nothing, and that is no mistyped name."""
    saved = saved_rows(torch.zeros(2, 3))
    with as_rank(2, 3):
        target = dtensor(torch.zeros(2, 3), mesh_of((3,)), [0])
        _, restoration = load(saved, {"w": target}, keep=make_predicate("w"))
        assert not restoration.needs
        assert not restoration.is_empty
        other = spread(torch.zeros(2, 3), DeviceMesh("cpu", [0, 1]), [Shard(0)])
        assert not load(saved, {"w": other})[1].needs


def test_autograd_notices_that_a_sharded_tensor_changed() -> None:
    """As with any operation in place."""
    saved = saved_rows(torch.ones(4))
    with as_rank(0, 2):
        target = dtensor(torch.zeros(4), mesh_of((2,)), [0])
        before = target._version
        load(saved, {"w": target})
        assert target._version > before


def test_a_block_of_a_view_is_filled() -> None:
    """The checkpoint may have stored the tensor as a part of another one."""
    base = random_tensor((6, 8), torch.float32, 10)
    saved = save(1, lambda _: {"base": base, "rows": base[2:], "columns": base.t()})
    for name, view in (("rows", base[2:]), ("columns", base.t())):
        with as_rank(1, 2):
            target = dtensor(torch.zeros(tuple(view.shape)), mesh_of((2,)), [1])
            load(saved, {name: target}, strict="ignore")
            assert_same(local(target), view.chunk(2, 1)[1].contiguous())


def test_what_views_are_copied_from_is_read_once() -> None:
    """However many views of it a target takes that do not lie in one piece."""
    base = random_tensor((6, 8), torch.float32, 10)
    saved = save(1, lambda _: {"base": base, "turned": base.t(), "even": base[::2]})
    target = {"turned": torch.zeros(8, 6), "even": torch.zeros(3, 8)}
    _, restoration = load(saved, target, strict="ignore")
    assert len(restoration.needs) == 1
    assert_same(target, {"turned": base.t().contiguous(), "even": base[::2].contiguous()})


def test_a_view_of_the_negatives_is_filled_with_them() -> None:
    """Where the target has memory of its own for it, though it lies there as its base does."""
    base = random_tensor((6,), torch.float32, 10)
    saved = save(1, lambda _: {"base": base, "minus": torch._neg_view(base)})
    target = {"base": torch.zeros(6), "minus": torch.zeros(6)}
    load(saved, target)
    assert_same(target, {"base": base, "minus": base.neg()})


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize(
    "other",
    [
        {"~": 0}, {"~": 0, "p": [0, 1]},
        {"~": "view", "t": 0, "d": "float32", "o": 0, "s": [3, 4], "r": [4, 1]},
    ],
    ids=["none", "another", "view"],
)  # fmt: skip
def test_a_tensor_that_is_referred_to_in_two_orders_is_made_row_major(
    other: dict[str, Any], turn: int
) -> None:
    """As the format has it: what refers to it would find other elements."""
    tensor = random_tensor((3, 4), torch.float32, 11)
    saved = save(1, lambda _: [tensor])
    tree = msgspec.Raw(msgspec.json.encode([{"~": 0, "p": [1, 0]}, other][::turn]))
    manifest = msgspec.structs.replace(saved.manifest, tree=tree)
    found, _ = load(dataclasses.replace(saved, manifest=manifest))
    assert_same(found, [tensor, tensor])
    assert [each.stride() for each in found] == [(4, 1), (4, 1)]


def test_tensors_on_the_meta_device_are_replaced() -> None:
    """In dicts, lists and tuples, and at the root; parameters by parameters, ties by ties."""
    tensor = random_tensor((3, 4), torch.float32, 11)
    saved = save(1, lambda _: {"a": tensor, "b": [tensor, (tensor, 7)], "c": tensor})
    blank = torch.empty(3, 4, device="meta")
    weight = torch.nn.Parameter(torch.empty(3, 4, device="meta"), requires_grad=False)
    kept: list[Any] = [blank, (blank, 0)]
    loaded, _ = load(saved, {"a": weight, "b": kept, "c": torch.zeros(3, 4)})
    assert_same(loaded["b"], [tensor, (tensor, 7)])
    assert loaded["b"] is kept
    assert kept[0] is kept[1][0]
    assert type(loaded["a"]) is torch.nn.Parameter
    assert not loaded["a"].requires_grad
    assert_same(loaded["a"].detach(), tensor)
    assert_same(load(save(1, lambda _: tensor), blank)[0], tensor)


def test_a_meta_target_is_made_where_the_caller_says() -> None:
    """A device that is not there is a typed error, and nothing is filled."""
    saved = save(1, lambda _: {"w": torch.zeros(3)})
    blank = {"w": torch.empty(3, device="meta")}
    assert load(saved, blank, device=torch.device("cpu"))[0]["w"].device.type == "cpu"
    blank = {"w": torch.empty(3, device="meta")}
    with pytest.raises(TargetError, match="cannot make 'w' of shape"):
        load(saved, blank, device=torch.device("cuda:99"))
    assert blank["w"].is_meta


def test_sharded_tensors_on_the_meta_device_are_replaced() -> None:
    """By DTensors of the same mesh and placements, and by shards of the same place."""
    tensor = random_tensor((9, 4), torch.float32, 12)
    saved = saved_rows(tensor)
    with as_rank(3, 8):
        expected = dtensor(tensor, mesh_of((4, 2)), [0, 0], (1, 0))
        blank = dtensor(tensor.to("meta"), mesh_of((4, 2)), [0, 0], (1, 0))
        weight = torch.nn.Parameter(blank)
        made = load(saved, {"w": weight})[0]["w"]
        assert isinstance(made, torch.nn.Parameter)
        assert isinstance(made, DTensor)
        assert made.device_mesh == expected.device_mesh
        assert made.placements == expected.placements
        assert_same(local(made).detach(), local(expected))
    place = shards.Shard(torch.empty(10, device="meta"), (9, 4), flat_start=7)
    loaded, _ = load(saved, {"w": place})
    assert loaded["w"].flat_start == 7
    assert_same(loaded["w"].tensor, tensor.reshape(-1)[7:17])


class Tied(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4, device=device)
        self.head = torch.nn.Linear(4, 5, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(4, device=device)


def test_a_module_on_the_meta_device_is_filled() -> None:
    """Tied parameters stay one, and those that take no gradient take none."""
    source, module = Tied("cpu"), Tied("meta")
    module.norm.weight.requires_grad_(False)  # noqa: FBT003  # torch's own signature
    saved = save(1, lambda _: {"model": source})
    target = {"model": module}
    load(saved, target)
    assert target["model"] is module
    assert module.head.weight is module.embed.weight
    assert module.head.weight.requires_grad
    assert not module.norm.weight.requires_grad
    assert_same(dict(module.state_dict()), dict(source.state_dict()))


def test_what_a_checkpoint_lacks_stays_on_the_meta_device() -> None:
    """A tied name that was not saved is filled by its twin."""
    source, module = Tied("cpu"), Tied("meta")
    state = {k: v for k, v in source.state_dict().items() if k not in ("head.weight", "norm.bias")}
    _, restoration = load(save(1, lambda _: state), module, strict="ignore")
    assert restoration.match is not None
    assert restoration.match.missing == ["norm.bias"]
    assert module.norm.bias.is_meta
    assert module.head.weight is module.embed.weight
    assert_same(module.head.weight.detach(), source.embed.weight.detach())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_fsdp_module_is_filled(device: str) -> None:
    """In place, or from the meta device on; from a file of another mesh."""
    weight, bias = random_tensor((7, 4), seed=13), random_tensor((7,), seed=14)
    state = {"weight": weight, "bias": bias}
    saved = save(3, lambda _: {k: dtensor(t, mesh_of((3,)), [0]) for k, t in state.items()})
    for rank in range(2):
        with as_rank(rank, 2):
            module = torch.nn.Linear(4, 7, device=device)
            fully_shard(module, mesh=mesh_of((2,)))
            load(saved, module)
            for name, parameter in module.named_parameters():
                assert isinstance(parameter, torch.nn.Parameter)
                assert_same(local(parameter).detach(), state[name].chunk(2)[rank])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["embed", "head"])
def test_an_fsdp_module_has_tied_parameters_by_any_of_their_names(name: str, device: str) -> None:
    """On the rank that holds no element of them, too; nothing else is taken for tied."""
    source = Tied("cpu")
    other = "head" if name == "embed" else "embed"
    state = {k: v for k, v in source.state_dict().items() if k != f"{other}.weight"}
    saved = save(1, lambda _: state)
    partial = save(1, lambda _: {k: v for k, v in state.items() if k != "norm.bias"})
    for rank in range(4):
        with as_rank(rank, 4):
            module = Tied(device)
            fully_shard(module, mesh=mesh_of((4,)))
            load(saved, module)
            assert module.head.weight is module.embed.weight
            rows = source.embed.weight.detach()[2 * rank : 2 * rank + 2]
            assert_same(local(module.head.weight).detach(), rows)
            with pytest.raises(MismatchError, match=r"1 missing .*'norm.bias'"):
                load(partial, fully_shard(Tied("cpu"), mesh=mesh_of((4,))))
            keep = make_predicate([f"{other}.weight", "norm"])  # what it is tied to is not loaded
            with pytest.raises(MismatchError, match=f"1 missing .*'{other}.weight'"):
                load(saved, module, keep=keep)


def stepped_plain(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Make an optimizer of two layers that has stepped both."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 5))
    optimizer = kind(module.parameters())  # type: ignore[call-arg]  # all of torch's have options
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


def over_dtensors(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 5)).to(dtype)
    for part in module:
        fully_shard(part, mesh=mesh_of((2,)))
    return kind(module.parameters())  # type: ignore[call-arg]  # as above


@pytest.mark.parametrize("num_stepped", [0, 1, 2, 4])
@pytest.mark.parametrize("has_entries", [False, True])
def test_an_optimizer_of_dtensors_takes_blocks_for_what_it_has_not_stepped(
    num_stepped: int, *, has_entries: bool
) -> None:
    """Whole moments beside sharded parameters would fail at its next step."""
    plain = stepped_plain(torch.optim.AdamW)
    saved = save(1, lambda _: {"opt": plain})
    moments = plain.state_dict()["state"]
    for rank in range(2):
        with as_rank(rank, 2):
            optimizer = over_dtensors(torch.optim.AdamW)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for parameter in parameters[:num_stepped]:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for parameter in parameters if has_entries else ():
                assert optimizer.state[parameter] is not None  # a defaultdict makes one
            load(saved, {"opt": optimizer})
            for number, parameter in enumerate(parameters):
                state = optimizer.state[parameter]
                assert state["step"] == 1
                for name in ("exp_avg", "exp_avg_sq"):
                    assert state[name].placements == parameter.placements
                    assert_same(local(state[name]), moments[number][name].chunk(2)[rank])
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()


def test_blocks_of_an_optimizer_are_of_the_type_that_is_stored() -> None:
    """Whatever that of its parameters is, which torch converts them to."""
    plain = stepped_plain(torch.optim.AdamW)
    saved = save(1, lambda _: {"opt": plain})
    with as_rank(0, 2):
        optimizer = over_dtensors(torch.optim.AdamW, torch.bfloat16)
        load(saved, {"opt": optimizer})
        first = optimizer.param_groups[0]["params"][0]
        expected = plain.state_dict()["state"][0]["exp_avg"].chunk(2)[0].bfloat16()
        assert_same(local(optimizer.state[first]["exp_avg"]), expected)


def test_what_of_an_optimizer_of_dtensors_nobody_knows_how_to_cut_is_refused() -> None:
    """Rows and columns of Adafactor, unless they are not selected; or those it has already."""
    saved = save(1, lambda _: {"opt": stepped_plain(torch.optim.Adafactor)})
    with as_rank(1, 2):
        optimizer = over_dtensors(torch.optim.Adafactor)
        first = optimizer.param_groups[0]["params"][1]
        optimizer.state[first] = {"variance": torch.zeros_like(first)}
        before = dict(optimizer.state)
        with pytest.raises(TargetError, match=r"no 'opt\.state\.0\.row_var' yet.*get_state_dict"):
            load(saved, {"opt": optimizer})
        assert dict(optimizer.state) == before
        optimizer.param_groups[0]["lr"] = 7.0
        keep = make_predicate(["opt.param_groups", "opt.state.1"])
        load(saved, {"opt": optimizer}, keep=keep)
        assert optimizer.param_groups[0]["lr"] != 7.0
        assert len(optimizer.state) == 1
    fresh = torch.optim.Adafactor(torch.nn.Linear(4, 6).parameters())
    with pytest.raises(MismatchError, match="groups of"):
        load(saved, {"opt": fresh})


def test_each_rank_takes_its_own_values() -> None:
    """With a target and without; wrapped where the target is."""

    def state_of(rank: int) -> Any:
        return {"own": PerRank({"x": torch.full((2,), rank), "n": 10 + rank}), "all": 5}

    saved = save(3, state_of)
    for rank in range(3):
        expected = {"x": torch.full((2,), rank), "n": 10 + rank}
        assert_same(load(saved, rank=rank)[0], {"own": expected, "all": 5})
        tensor = torch.zeros(2, dtype=torch.int64)
        wrapped = PerRank({"x": tensor, "n": 0})
        loaded, _ = load(saved, {"own": wrapped, "all": 0}, rank=rank)
        assert loaded["own"] is wrapped
        assert_same(wrapped.value, expected)
        assert wrapped.value["x"] is tensor
        plain, _ = load(saved, {"own": {"x": tensor, "n": 0}, "all": 0}, rank=rank)
        assert_same(plain["own"], expected)
        placeholder, _ = load(saved, {"own": PerRank(None), "all": 0}, rank=rank)
        assert_same(placeholder["own"].value, expected)


def test_a_rank_that_was_not_there_keeps_what_it_has() -> None:
    """With a target nothing is missing; without, the value is `None`; the report says so."""
    saved = save(2, lambda rank: {"own": PerRank(rank), "list": [PerRank(rank), 1]})
    target = {"own": PerRank(7), "list": [PerRank(8), 0]}
    loaded, restoration = load(saved, target, rank=2)
    assert [note.split(":")[0] for note in restoration.notes] == ["own", "list.0"]
    assert loaded["own"].value == 7
    assert loaded["list"][0].value == 8
    assert loaded["list"][1] == 1
    assert load(saved, {"list": [0, 0]}, rank=2, strict="ignore")[0] == {"list": [0, 1]}
    loaded, restoration = load(saved, rank=2)
    assert loaded == {"own": None, "list": [None, 1]}
    assert [note.split(":")[0] for note in restoration.notes] == ["own", "list.0"]


def test_a_value_that_only_another_rank_had_is_not_there() -> None:
    """It is no name that the target would have to have."""
    saved = save(2, lambda rank: {"n": 1, **({"own": PerRank(4)} if rank else {})})
    assert load(saved, {"n": 0}, rank=0)[0] == {"n": 1}
    with pytest.raises(MismatchError, match="1 not in the target"):
        load(saved, {"n": 0}, rank=1)


def test_a_value_for_each_rank_does_not_take_one_for_all() -> None:
    """The other way round it does: the target says nothing of ranks then."""
    saved = save(1, lambda _: {"x": 3})
    with pytest.raises(MismatchError, match="one for all in the checkpoint"):
        load(saved, {"x": PerRank(0)})


def test_values_of_ranks_are_selected_by_the_name_of_their_place() -> None:
    """The rank is no part of it."""
    saved = save(2, lambda rank: {"a": PerRank({"x": torch.ones(2) * rank, "y": 1}), "b": 2})
    keep = make_predicate("a.x")
    assert_same(load(saved, rank=1, keep=keep)[0], {"a": {"x": torch.ones(2)}})
    target = {"a": PerRank({"x": torch.zeros(2), "y": 0}), "b": 0}
    load(saved, target, rank=1, keep=keep)
    assert_same([target["a"].value, target["b"]], [{"x": torch.ones(2), "y": 0}, 0])  # type: ignore[attr-defined]  # it is a PerRank


def test_the_place_of_each_chunk_is_chosen() -> None:
    """Where there are copies; the first place is the default."""
    chunks = (Chunk(0, 8, (0,), (2,), ((5, 80),)), Chunk(1, 16, (2,), (2,)))
    whole = TensorEntry("x", "float32", (2,), (Chunk(0, 8, None, None, ((5, 80),)),))
    cut = TensorEntry("x", "float32", (4,), chunks)

    def last(chunk: Chunk) -> tuple[int, int]:
        return chunk.copies[-1] if chunk.copies else (chunk.file, chunk.start)

    for need, first, chosen in (
        (Need(whole, 0), [(0, 8, 8)], [(5, 80, 8)]),
        (Need(whole, 0, (4, 8)), [(0, 12, 4)], [(5, 84, 4)]),
        (Need(cut, 0), [(0, 8, 8), (1, 16, 8)], [(5, 80, 8), (1, 16, 8)]),
        (Need(cut, 0, (4, 12)), [(0, 12, 4), (1, 16, 4)], [(5, 84, 4), (1, 16, 4)]),
        (Need(cut, 0, None, Box((1,), (1,))), [(0, 12, 4)], [(5, 84, 4)]),
    ):
        for place, expected in ((None, first), (last, chosen)):
            wanted: list[Any] = []
            need.expand(wanted, place)
            assert [(want.file, want.start, want.nbytes) for want in wanted] == expected
    found: list[Any] = []
    want_region(cut, Box((2,), (1,)), 0, found, last)
    assert [(want.file, want.start) for want in found] == [(1, 16)]
    assert [chunk.file for chunk in Need(cut, 0, None, Box((2,), (1,))).chunks()] == [1]


def grid(num_rows: int, num_columns: int, height: int, width: int) -> TensorEntry:
    """Cut a matrix into chunks of `height` by `width`, each in a file of its own."""
    chunks = [
        Chunk(file, 0, (row, column), (height, width))
        for file, (row, column) in enumerate(
            itertools.product(range(0, num_rows, height), range(0, num_columns, width))
        )
    ]
    return TensorEntry("w", "float32", (num_rows, num_columns), tuple(chunks))


@given(
    row=st.integers(0, 12),
    column=st.integers(0, 8),
    height=st.integers(0, 12),
    width=st.integers(0, 8),
    is_turned=st.booleans(),
)
def test_a_region_comes_from_the_chunks_that_have_it(
    row: int, column: int, height: int, width: int, *, is_turned: bool
) -> None:
    """From each that shares an element with it, and from no other."""
    entry = grid(12, 8, 2, 4) if is_turned else grid(12, 8, 3, 1)
    region = Box((row, column), (min(height, 12 - row), min(width, 8 - column)))
    (top, left), (rows, columns) = region.offset, region.shape
    inside = {
        chunk.file
        for chunk in entry.chunks
        for box in [entry.box_of(chunk)]
        if {*range(top, top + rows)} & {*range(box.offset[0], box.offset[0] + box.shape[0])}
        and {*range(left, left + columns)} & {*range(box.offset[1], box.offset[1] + box.shape[1])}
    }
    assert {chunk.file for chunk in Need(entry, 0, None, region).chunks()} == inside
    wanted: list[Wanted] = []
    want_region(entry, region, 0, wanted)
    assert {want.file for want in wanted} == inside
    assert sum(want.nbytes * want.rows for want in wanted) == rows * columns * 4


@pytest.mark.parametrize("region", [Box((5, 0), (1, 4000)), Box((0, 5), (4000, 1))])
def test_a_part_of_a_tensor_of_many_chunks_costs_what_it_has(region: Box) -> None:
    """No call for each chunk: a rank of a thousand wants one."""
    entry = grid(4000, 4000, 4000 if region.offset[1] else 4, 4 if region.offset[1] else 4000)
    seen: list[str] = []
    sys.setprofile(lambda _, event, __: seen.append(event) if event == "call" else None)
    try:
        want_region(entry, region, 0, [])
    finally:
        sys.setprofile(None)
    assert len(seen) < 60


def test_a_solo_engine_saves_and_loads_shards_of_the_whole(tmp_path: Path) -> None:
    """Blocks and flat ranges that are all of a tensor, and values of the one rank there is."""
    tensor = random_tensor((300, 40), torch.float32, 15)
    state = {
        "plain": tensor + 1,
        "block": shards.Shard(tensor, (300, 40), (0, 0)),
        "flat": shards.Shard(tensor.reshape(-1).clone(), (300, 40), flat_start=0),
        "own": PerRank({"x": tensor * 2, "n": 3}),
    }
    with sync.Engine(SMALL) as engine:
        engine.save(state, tmp_path / "ckpt")
        expected = {"plain": tensor + 1, "block": tensor, "flat": tensor}
        loaded = engine.load(tmp_path / "ckpt")
        assert_same(loaded, {**expected, "own": {"x": tensor * 2, "n": 3}})
        part = shards.Shard(torch.zeros(2, 3), (300, 40), (298, 37))
        target: dict[str, Any] = {
            "plain": torch.empty(300, 40, device="meta"),
            "block": part,
            "flat": shards.Shard(torch.zeros(700), (300, 40), flat_start=333),
            "own": PerRank({"x": torch.zeros(300, 40), "n": 0}),
        }
        engine.load(tmp_path / "ckpt", into=target)
    assert_same(target["plain"], tensor + 1)
    assert_same(part.tensor, tensor[298:, 37:])
    assert_same(target["flat"].tensor, tensor.reshape(-1)[333:1033])
    assert_same(target["own"].value, {"x": tensor * 2, "n": 3})


def test_what_is_made_on_another_makers_device_is_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its addresses are none of the host's. The meta device stands for one that is not there."""
    sync.save({"x": torch.ones(3)}, tmp_path / "c")
    found: list[Destination] = []

    def look(destinations: Sequence[Destination], *_: object) -> TargetState:
        found.extend(destinations)
        raise AssertionError("enough")

    monkeypatch.setattr(restore, "allocate", lambda *_, **__: torch.empty(3, device="meta"))
    monkeypatch.setattr(loading, "TargetState", look)
    with pytest.raises(AssertionError, match="enough"):
        sync.load(tmp_path / "c")
    assert [each.span for each in found] == [None]
