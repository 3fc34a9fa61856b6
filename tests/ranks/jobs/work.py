"""What jobs have in common: states that any process can make, groups, engines.

The bits of a tensor follow from its name, so that a rank, or a test in a process of its
own, knows what it should find without asking anybody.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import ckptio
from tests.groups import end_process_groups
from tests.rig import config_with
from tests.strategies import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.ranks.jobs.worker import Me

#: Seconds after which a rank that is silent is given up.
PEER_TIMEOUT_S = 2.0
#: Seconds within which every other rank has raised: silence, its detection, the clean-up.
LOST_WITHIN_S = 8.0
#: Tensors of the states that are resharded: rows or columns fewer than ranks, odd ones,
#: scalars, and one of several slabs.
SHAPES: dict[str, tuple[int, ...]] = {
    "model.weight": (37, 23),
    "model.few": (2, 5),
    "model.bias": (19,),
    "model.big": (300, 257),
    "model.empty": (0, 3),
    "model.cube": (5, 3, 4),
}


def config(**options: Any) -> ckptio.CheckpointConfig:
    """Give a config for jobs: small slabs, nothing synced, short deadlines."""
    defaults = {"durability": "none", "peer_timeout_s": PEER_TIMEOUT_S, "meet_timeout_s": 30.0}
    return config_with(**{**defaults, **options})


def engine(me: Me, ranks: Any = "auto", **options: Any) -> ckptio.Engine:
    """Make an engine of this rank; its events are the job's points."""
    return ckptio.Engine(config(**options), ranks=ranks, observer=me.observe)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Be in a gloo group of all ranks of the job."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        end_process_groups()


def tensor_named(
    name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Make the tensor of a name: finite numbers, different for each name and seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{seed}".encode()))
    raw = torch.randint(-1000, 1000, tuple(shape), generator=generator)
    return (raw / 8).to(dtype)


def plain_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Make the tensors of `SHAPES`, whole."""
    return {name: tensor_named(name, shape, seed=seed) for name, shape in SHAPES.items()}


def large_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Make a state with a tensor that is worth being written by several ranks."""
    large = tensor_named("model.large", (2048, 1024), seed=seed)
    return {**plain_state(seed), "model.large": large}


def zeros_like(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make a target for a flat state."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def sums(state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Sum up the bits of each tensor, to compare with another process's."""
    return {name: zlib.crc32(bytes_of(tensor)) for name, tensor in state.items()}


def check_same(found: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    """Check that flat states are equal, bit by bit; DTensors by their local blocks.

    Raises:
        AssertionError: They are not; names the first tensor.
    """
    if sorted(found) != sorted(expected):
        raise AssertionError(f"{sorted(found)} are not {sorted(expected)}")
    for name, tensor in expected.items():
        ours, theirs = local_of(found[name]), local_of(tensor)
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        if not same or bytes_of(ours) != bytes_of(theirs):
            raise AssertionError(f"{name}: {ours} is not {theirs}")


def local_of(tensor: Any) -> torch.Tensor:
    """Give what this rank has of a tensor."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a state lies on ranks, in words that JSON can carry.

    Attributes:
        mesh: Shape of the device mesh.
        placements: For each dimension of the mesh: the tensor's dimension that it shards,
            or -1 where it replicates. Tensors that have fewer are replicated there.
    """

    mesh: Sequence[int]
    placements: Sequence[int]

    def state(self, seed: int | None = 0) -> dict[str, Any]:
        """Lay the tensors of `SHAPES` out, as zeros without a seed; in a process group."""
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  # slow
        from torch.distributed.tensor import (  # noqa: PLC0415  # as above
            Replicate,
            Shard,
            distribute_tensor,
        )

        mesh = init_device_mesh("cpu", tuple(self.mesh))
        # all have the same bits: nothing has to be sent, where torch can be told so
        parameters = inspect.signature(distribute_tensor).parameters
        options: dict[str, Any] = {"src_data_rank": None} if "src_data_rank" in parameters else {}
        state: dict[str, Any] = {}
        for name, shape in SHAPES.items():
            whole = torch.zeros(shape) if seed is None else tensor_named(name, shape, seed=seed)
            placements = [
                Shard(dim) if 0 <= dim < len(shape) else Replicate() for dim in self.placements
            ]
            state[name] = distribute_tensor(whole, mesh, placements, **options)
        return state
