"""Write the golden files of other formats, with the tools whose formats they are.

    python -m tests.foreign.golden <directory>
    torchrun --nproc-per-node 2 -m tests.foreign.golden <directory> ranks

`megatron` was written by `megatron.core.dist_checkpointing.save` of megatron-core 0.16.1, in
one process without a GPU: "decoder.weight", float32 of 4 x 6 elements that count from 0;
"layers.w", a row of 6 that count from 0; the sharded object "decoder._extra_state", a file in
memory with the bytes "abc"; and an iteration of 5, which it keeps in common.pt.

They are written once, by the versions named in `tests/golden/foreign/VERSIONS`, and never
again: a reader has to read what is out there.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.foreign.rig import make_training_state, make_weights, save_dcp, save_hf

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "foreign"


def make_sharded() -> dict[str, torch.Tensor]:
    """The whole tensors of the state that two ranks saved."""
    return {
        "rows": torch.arange(30.0).reshape(5, 6),
        "columns": torch.arange(30.0).reshape(5, 6).neg(),
        "replicated": torch.arange(4.0),
    }


def write(root: pathlib.Path) -> None:
    """Write what one process writes."""
    root.mkdir(parents=True, exist_ok=True)
    save_file(make_weights(), root / "weights.safetensors", metadata={"format": "pt"})
    save_hf(root / "hub", make_weights())
    torch.save(make_training_state(), root / "state.pt")
    torch.save(make_training_state(), root / "old.pt", _use_new_zipfile_serialization=False)
    save_dcp(root / "dcp", make_training_state())
    (root / "VERSIONS").write_text(
        f"torch {torch.__version__}\nsafetensors {safetensors.__version__}\n"
    )


def write_ranks(root: pathlib.Path) -> None:
    """Write what two ranks write with stock torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415  # of this alone
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  # as above
    from torch.distributed.tensor import (  # noqa: PLC0415  # as above
        Replicate,
        Shard,
        distribute_tensor,
    )

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements: dict[str, Any] = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    state = {
        name: distribute_tensor(tensor, mesh, [placements[name]])
        for name, tensor in make_sharded().items()
    }
    save({"model": state, "epoch": 3}, checkpoint_id=root / "dcp-2-ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    (write_ranks if sys.argv[2:] else write)(pathlib.Path(sys.argv[1]))
