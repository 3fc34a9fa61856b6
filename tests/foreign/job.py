"""One rank of a job that loads what other programs wrote: `python -m tests.foreign.job`."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import fsspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckptio import sync
from ckptio.errors import CheckpointChangedError, RankError
from tests.foreign.golden import GOLDEN, make_sharded
from tests.foreign.rig import assert_same_state, make_training_state, make_weights
from tests.groups import end_process_groups


def main(meeting: str, rank: int, world_size: int) -> None:
    """Load into tensors that are sharded otherwise than they were saved; save over one."""
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    whole = make_sharded()
    target = {
        name: distribute_tensor(
            torch.zeros_like(tensor), mesh, [Replicate() if tensor.ndim == 1 else Shard(1)]
        )
        for name, tensor in whole.items()
    }
    with sync.Engine() as engine:
        engine.load(GOLDEN / "dcp-2-ranks", {"model": target, "epoch": 0})
        for name, tensor in whole.items():
            assert torch.equal(target[name].full_tensor(), tensor), name
        assert_same_state(engine.load(GOLDEN / "hub"), make_weights())
        assert_same_state(engine.load(GOLDEN / "state.pt"), make_training_state())
        over = Path(meeting).with_name("over")
        if rank == 0:
            shutil.copytree(GOLDEN / "dcp-2-ranks", over)
        dist.barrier()
        engine.load(over, {"model": target, "epoch": 0})
        engine.save({"model": target, "epoch": 1}, over)  # our files lie beside theirs
        assert engine.load(over, select="epoch") == {"epoch": 1}
        data = io.BytesIO()
        torch.save({"w": torch.full((4,), float(rank))}, data)
        fsspec.filesystem("memory").pipe_file("/own/x.pt", data.getvalue())  # of this process alone
        try:
            engine.load("memory://own/x.pt")
        except (RankError, CheckpointChangedError) as error:
            assert "another file is there" in str(error), error
        else:
            raise AssertionError("ranks loaded one manifest with the bytes of many files")
    end_process_groups()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
