"""The end of process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist


def end_process_groups() -> None:
    """End every gloo group of this process.

    Before 2.8, torch holds the GIL while it ends a group, and waits for threads of gloo's
    that may need it, for ever; not so if the backend outlives its group.
    """
    world = dist.distributed_c10d._world
    backends = [group._get_backend(torch.device("cpu")) for group in world.pg_map]
    dist.destroy_process_group()
    del backends
