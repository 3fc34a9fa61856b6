"""Jobs that save and load through DCP on several ranks."""

from __future__ import annotations

import contextlib
import gc
import inspect
import warnings
from concurrent.futures import Future
from multiprocessing import resource_sharer
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from ckptio.adapters.dcp import StorageReader, StorageWriter
from ckptio.config import CheckpointConfig, MiB
from tests.adapters.rig import Reads, end_garbage, large_blocks
from tests.ranks.jobs.work import Layout, check_same, config, local_of, process_group, sums
from tests.rig import names_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.ranks.jobs.worker import Me


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Be in a process group, where torch warns of things that are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with process_group():
            yield


def writer(path: str, options: dict[str, Any] | None = None) -> StorageWriter:
    return StorageWriter(path, config=_config(options))


def reader(path: str, options: dict[str, Any] | None = None) -> StorageReader:
    return StorageReader(path, config=_config(options))


def _config(options: dict[str, Any] | None) -> CheckpointConfig:
    """Give a config, for a store with these options: parts of S3 have 5 MiB at least."""
    if options is None:
        return config()
    return config(storage_options=options, slab_nbytes=5 * MiB, pool_nbytes=20 * MiB)


def save_layout(
    me: Me, path: str, mesh: list[int], placements: list[int], options: Any = None
) -> None:
    """Save a state of DTensors, and values that all ranks have."""
    del me
    with group():
        state = {"model": Layout(mesh, placements).state(), "step": 3, "order": (1, 2)}
        save(state, storage_writer=writer(path, options))


def load_layout(
    me: Me, path: str, mesh: list[int], placements: list[int], options: Any = None
) -> None:
    """Load into DTensors, and compare every local block."""
    del me
    with group():
        layout = Layout(mesh, placements)
        state: dict[str, Any] = {"model": layout.state(seed=None), "step": 0, "order": None}
        load(state, storage_reader=reader(path, options))
        check_same(state["model"], layout.state())
        assert (state["step"], state["order"]) == (3, (1, 2))


def load_shares(me: Me, path: str, rows: int) -> int:
    """Load the rows of one tensor, some on each rank; gives the bytes this rank read."""
    del me
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  # slow
    from torch.distributed.tensor import Shard, zeros  # noqa: PLC0415  # as above

    with group():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {"w": zeros(rows, 256, device_mesh=mesh, placements=[Shard(0)])}
        reads = Reads()
        load(state, storage_reader=StorageReader(path, config=large_blocks(), observer=reads))
        first = dist.get_rank() * rows // dist.get_world_size()
        local = local_of(state["w"])
        assert local[:, 0].tolist() == list(range(first, first + len(local)))
        return reads.nbytes


def save_and_load_fsdp(me: Me, path: str) -> dict[str, int]:
    """Train with FSDP2 and AdamW, save, load into another model, and train on alike."""
    del me
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  # slow
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # as above

    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Linear(13, 5))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(steps):
            train(model, optimizer)
        return model, optimizer

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 21).view(3, 7)).square().sum().backward()
        optimizer.step()

    with group():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        one, other = trained(3), trained(0)
        model, optimizer = get_state_dict(*one)
        save({"model": model, "optimizer": optimizer}, storage_writer=writer(path))
        model, optimizer = get_state_dict(*other)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        load(state, storage_reader=reader(path))
        set_state_dict(*other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for pair in (one, other):
            train(*pair)
        check_same(other[0].state_dict(), one[0].state_dict())
        return sums({k: v.full_tensor() for k, v in one[0].state_dict().items()})


class Failing(DefaultSavePlanner):
    """Fails on one rank, in one phase."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self._phase = phase if dist.get_rank() == 1 else ""

    def create_local_plan(self) -> Any:
        if self._phase == "plan":
            raise ZeroDivisionError("in the plan of rank 1")
        return super().create_local_plan()

    def resolve_data(self, write_item: Any) -> Any:
        if self._phase == "data":
            raise ZeroDivisionError("in the data of rank 1")
        return super().resolve_data(write_item)


def fail_on_one_rank(me: Me, path: str, phase: str) -> list[str]:
    """Fail to overwrite a checkpoint; gives what DCP says, and what is there in the end."""
    with group():
        layout = Layout([me.world_size], [0])
        save({"model": layout.state()}, storage_writer=writer(path))
        dist.barrier()
        before = names_in(path)
        said = ""
        ours = writer(path)
        try:
            save({"model": layout.state(seed=1)}, storage_writer=ours, planner=Failing(phase))
        except CheckpointException as error:
            said = str([(rank, repr(cause)) for rank, (cause, _) in error.failures.items()])
        del ours
        end_garbage()
        dist.barrier()
        assert names_in(path) == before
        target = layout.state(seed=None)
        load({"model": target}, storage_reader=reader(path))
        check_same(target, layout.state())
        return [said]


def fail_at_url(me: Me, path: str, phase: str, options: Any) -> str:
    """Fail to overwrite a checkpoint in an object store; gives what DCP says."""
    with group():
        layout = Layout([me.world_size], [0])
        save({"model": layout.state()}, storage_writer=writer(path, options))
        dist.barrier()
        said = ""
        ours = writer(path, options)
        try:
            save({"model": layout.state(seed=1)}, storage_writer=ours, planner=Failing(phase))
        except CheckpointException as error:
            said = str([(rank, repr(cause)) for rank, (cause, _) in error.failures.items()])
        dist.barrier()  # the other rank has removed its own by now
        del ours
        end_garbage()
        dist.barrier()
        target = layout.state(seed=None)
        load({"model": target}, storage_reader=reader(path, options))
        check_same(target, layout.state())
        return said


def refuse_on_one_rank(me: Me, path: str) -> list[str]:
    """Save what only one rank cannot; the error comes whole to all."""
    with group():
        odd = torch.eye(3).to_sparse() if me.rank == 1 else torch.ones(3)
        try:
            save({"x": torch.ones(2), f"odd{me.rank}": odd}, storage_writer=writer(path))
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            return [f"{type(cause).__name__} {vars(cause)['fqn']}" for cause in causes]
        return []


def save_apart(me: Me, path: str) -> str:
    """Save to a place that the ranks do not share."""
    with group():
        state = Layout([me.world_size], [0]).state()
        try:
            save({"model": state}, storage_writer=writer(f"{path}-{me.rank}"))
        except CheckpointException as error:
            return str(next(iter(error.failures.values()))[0])
        return ""


def save_in_a_subgroup(me: Me, path: str) -> None:
    """Ranks 1 and 2 of three save and load, the other does not know."""
    with group():
        ours = dist.new_group([1, 2])
        if me.rank > 0:
            state: dict[str, Any] = {"x": torch.arange(10.0), "step": 4}
            save(state, storage_writer=writer(path), process_group=ours)
            found: dict[str, Any] = {"x": torch.zeros(10), "step": 0}
            load(found, storage_reader=reader(path), process_group=ours)
            assert torch.equal(found["x"], state["x"])
            assert found["step"] == 4
        dist.barrier()  # the store goes with rank 0, and the others may be making their group yet


def save_for_itself(me: Me, path: str, options: Any = None) -> None:
    """Each rank saves its shards without asking the others, twice, and loads them."""
    with group():
        layout = Layout([me.world_size], [0])
        ours, theirs = writer(path, options), reader(path, options)
        for seed in (1, 0):
            state = {"model": layout.state(seed), "mine": me.rank + 10 * seed}
            save(state, storage_writer=ours, use_collectives=False)
        found: dict[str, Any] = {"model": layout.state(seed=None), "mine": -1}
        load(found, storage_reader=theirs)
        check_same(found["model"], layout.state())
        assert found["mine"] == me.rank


def save_cached(me: Me, path: str) -> None:
    """Save with a planner that keeps its plans, on all ranks, again and again."""
    with group():
        layout = Layout([me.world_size], [0])
        for seed in range(3):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            planner._cached_plans_key = path
            save({"model": layout.state(seed)}, storage_writer=writer(path), planner=planner)
            target = layout.state(seed=None)
            load({"model": target}, storage_reader=reader(path))
            check_same(target, layout.state(seed))


def save_async(me: Me, path: str, how: str) -> None:
    """Save in the background while the state changes; several times, with one writer."""
    with group():
        layout = Layout([me.world_size], [0])
        ours = writer(path)
        for seed in range(3):
            state: dict[str, Any] = {"model": layout.state(seed), "step": seed}
            options: dict[str, Any] = {}
            if hasattr(state_dict_saver, "AsyncCheckpointerType"):
                options["async_checkpointer_type"] = state_dict_saver.AsyncCheckpointerType(how)
            if "async_stager" in inspect.signature(async_save).parameters:
                options["async_stager"] = BlockingAsyncStager() if seed == 1 else None
            future = async_save(state, storage_writer=ours, **options)
            for tensor in state["model"].values():
                local_of(tensor).zero_()
            assert isinstance(future, Future)
            future.result()
            target: dict[str, Any] = {"model": layout.state(seed=None), "step": -1}
            load(target, storage_reader=reader(path))
            check_same(target["model"], layout.state(seed))
            assert target["step"] == seed
        if how == "process":
            from torch.distributed.checkpoint import _async_process_executor as executor  # noqa: PLC0415

            executor._CHECKPOINT_PROCESS = None
            gc.collect()
            resource_sharer.stop()  # a thread that torch shares memory by
