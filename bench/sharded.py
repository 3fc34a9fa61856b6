"""States that are spread over ranks, as FSDP2 and tensor parallelism spread them.

Each rank makes the whole state, the same as the others, and keeps its part of every tensor
in memory of its own. Scalars stay whole on every rank, as an optimizer's steps do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bench.states import gpt_like

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from bench.states import State

#: `"rows"`: every tensor is cut along its first dimension. `"columns"`: along its second,
#: where it has one. `"whole"`: every rank has all of it.
Layout = Literal["rows", "columns", "whole"]

#: Of state a: 1.07 GB.
_SCALE = 0.313


def spread_gpt(scale: float, layout: Layout, mesh: DeviceMesh) -> State:
    """Make this rank's part of a GPT and its optimizer: 1 GiB over all ranks, at scale 1."""
    state = gpt_like(scale * _SCALE)
    if layout != "whole":
        for name, whole in state.items():
            if whole.dim():
                state[name] = _part(whole, 1 if layout == "columns" else 0, mesh)
    return state


def _part(whole: torch.Tensor, dim: int, mesh: DeviceMesh) -> DTensor:
    """Keep this rank's part of a tensor, and let go of the rest."""
    placements = [Shard(min(dim, whole.dim() - 1))]
    spread = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return DTensor.from_local(
        spread.to_local().clone(memory_format=torch.contiguous_format),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def locals_of(state: State) -> State:
    """Give what this rank has of each tensor, in the same memory."""
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in state.items()
    }
