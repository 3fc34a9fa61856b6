"""Staging by the writer, where `async_save` leaves it to the writer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Rows

from ckptio.adapters.dcp.staging import CopyingStager
from tests.groups import end_process_groups

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def group() -> Iterator[None]:
    """Be a job of one rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # it is exported
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    end_process_groups()


def state_of(value: float) -> dict[str, Any]:
    """Make a tensor of each kind, all elements alike."""
    mesh = init_device_mesh("cpu", (1,))
    whole = torch.full((4, 2), value)
    local = [Shard(whole.clone(), ShardMetadata([0, 0], [4, 2], "rank:0/cpu"))]
    return {
        "plain": whole.clone(),
        "wanted": torch.nn.Parameter(whole.clone()),
        "scalar": torch.tensor(value),
        "many": torch.tensor(value).expand(4),
        "dtensor": distribute_tensor(whole, mesh, [Rows(0)]),
        "step": distribute_tensor(torch.tensor(value), mesh, [Replicate()]),
        "sharded": init_from_local_shards(local, 4, 2),
    }


def values(state: dict[str, Any]) -> dict[str, list[float]]:
    """Give the elements of each tensor."""
    return {name: block_of(tensor).flatten().tolist() for name, tensor in state.items()}


def block_of(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "local_shards"):
        tensor = tensor.local_shards()[0].tensor
    elif hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor.detach()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")  # torch's, of what is its own
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("cached", [False, True])
def test_a_staged_state_is_a_copy(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:  # noqa: FBT001  # a parameter
    """Of every tensor; nor does a later one change the state of an earlier one."""
    # what is copied where does not depend on it, and it needs a device
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    stager = CopyingStager(cached)
    states = [state_of(float(i)) for i in range(3)]
    for i in range(3):
        wanted = values(states[i])
        staged = stager.stage({"model": states[i], "n": [i, "x", None]})
        for tensor in states[i].values():
            block_of(tensor).fill_(7)
        assert values(staged["model"]) == wanted
        assert staged["n"] == [i, "x", None]
        assert all(set(row) == {7.0} for row in values(states[0]).values())
