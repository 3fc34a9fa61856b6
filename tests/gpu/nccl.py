"""Jobs of ranks that train under NCCL; see `test_nccl`.

NCCL refuses two ranks on one device. Where there are fewer devices than ranks, each rank says that
it is a host of its own: then they talk through sockets, and are ranks as those of two hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckptio
import ckptio.sync
from ckptio.adapters.dcp import StorageReader, StorageWriter
from tests.ranks.jobs.sharded import PATIENT, Trainer
from tests.ranks.jobs.work import check_same, config, engine, local_of, sums

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.ranks.jobs.worker import Me

WIDTH = 1 << 18
NUM_STEPS = 4


@contextlib.contextmanager
def nccl_group(me: Me, backend: str = "nccl") -> Iterator[None]:
    """Be in a group of all ranks of the job, each on its device, or on the only one."""
    if me.world_size > torch.cuda.device_count():
        os.environ.update(NCCL_HOSTID=f"host-{me.rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(me.rank % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_while_training(me: Me, path: str) -> dict[str, int]:
    """Save every step, and train on behind the fence alone, while NCCL works on the device.

    Every step is loaded into another trainer then, which is to be what was saved.

    Returns:
        Sums of the bits of the whole parameters at the last save.
    """

    async def work() -> dict[str, int]:
        first, other = (Trainer(seed, "cuda", WIDTH) for seed in (1, 2))
        expected, handles = [], []
        async with engine(me, **PATIENT) as ours:
            for step in range(NUM_STEPS):
                state = first.state()
                expected.append({n: local_of(t).clone() for n, t in state["model"].items()})
                whole = {name: tensor.full_tensor() for name, tensor in state["model"].items()}
                handle = ours.save({**state, "step": step}, f"{path}/{step}")
                handle.fence()
                first.step(seed=step)
                handles.append(handle)
            for handle in handles:
                await handle
            for step in range(NUM_STEPS):
                target = {**other.state(), "step": -1}
                await ours.load(f"{path}/{step}", target)
                assert target["step"] == step
                check_same(target["model"], expected[step])
            other.take(target)
        other.step(seed=NUM_STEPS - 1)
        check_same(dict(other.model.named_parameters()), dict(first.model.named_parameters()))
        return sums(whole)

    with nccl_group(me):
        return asyncio.run(work())


def load_elsewhere(me: Me, path: str) -> dict[str, int]:
    """Load what another number of ranks has saved.

    Returns:
        Sums of the bits of the whole parameters.
    """
    with nccl_group(me):
        trainer = Trainer(3, "cuda", WIDTH)
        target = {**trainer.state(), "step": -1}
        with ckptio.sync.Engine() as ours:
            ours.load(path, target)
        return sums({name: tensor.full_tensor() for name, tensor in target["model"].items()})


def save_under_ddp(me: Me, path: str) -> None:
    """Save a model under DDP while the next step is done; load it into another."""
    with nccl_group(me):
        layers = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            layers.append(torch.nn.Linear(64, WIDTH >> 6, device="cuda"))
        layer, other = layers
        model = torch.nn.parallel.DistributedDataParallel(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ckptio.sync.Engine() as ours:
            for step in range(NUM_STEPS):
                expected = {name: t.clone() for name, t in layer.state_dict().items()}
                handle = ours.start_save({"layer": layer}, f"{path}/{step}")
                handle.fence()
                numbers = torch.full((8, 64), float(me.rank + step), device="cuda")
                model(numbers).square().mean().backward()
                optimizer.step()
                handle.result()
                ours.load(f"{path}/{step}", {"layer": other})
                check_same(other.state_dict(), expected)


def plug_into_dcp(me: Me, path: str, backend: str) -> None:
    """Save and load through the plug-ins for DCP, whose own collectives NCCL does."""
    with nccl_group(me, backend):
        first, other = (Trainer(seed, "cuda", WIDTH) for seed in (1, 2))
        state: dict[str, Any] = first.state()
        expected = {n: local_of(t).clone() for n, t in state["model"].items()}
        if "gloo" in backend:  # DCP asks for one for what it does in the background
            future = async_save(state, storage_writer=StorageWriter(path))
            first.step(seed=9)
            future.result()  # type: ignore[union-attr]  # of a process: not asked for here
        else:
            dcp_save(state, storage_writer=StorageWriter(path))
        target = other.state()
        dcp_load(target, storage_reader=StorageReader(path))
        check_same(target["model"], expected)


def lose_a_rank(me: Me, path: str) -> None:
    """Save twice, while a rank is killed in the second; the group is left as it is then."""
    torch.cuda.set_device(0)
    os.environ.update(NCCL_HOSTID=f"host-{me.rank}", NCCL_SOCKET_IFNAME="lo")
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    trainer = Trainer(1, "cuda", WIDTH)

    async def work() -> None:
        async with ckptio.Engine(config()) as before:
            await before.save(trainer.state(), path)
        async with engine(me) as ours:
            trainer.step(seed=5)
            await ours.save(trainer.state(), path, overwrite=True)

    asyncio.run(work())
