"""One rank of a job that is measured: it does what it is told, and says how long that took.

What it is told and what it answers are JSON on a pipe. Its process group, its state and
its engines are kept from one order to the next, as a trainer keeps them. Before a clock
starts all ranks have met at a barrier.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh

from bench.baselines import DcpPeer, crc32, quiet_dcp
from bench.harness import Clock
from bench.sharded import locals_of, spread_gpt
from bench.states import Proof, blank, state_nbytes
from ckptio import CheckpointConfig
from ckptio.ranks import join
from ckptio.sync import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from bench.sharded import Layout
    from bench.states import State

    Json = Any

_PR_SET_PDEATHSIG = 1
#: What is in a method of ckptio's beside options.
_NO_OPTIONS = ("by", "is_apart")


def _on_own_host() -> contextlib.AbstractContextManager[object]:
    """Have an engine that is opened meanwhile take this rank for the only one of its host."""
    return patch.object(join, "this_host", lambda: f"host-{dist.get_rank()}")


class Rank:
    """What an order may ask for: each public method is one, its arguments are JSON.

    A *method* says how to save or load: `{"by": "ckptio"}` with options of
    `CheckpointConfig`, and `is_apart` to have each rank on a host of its own, by name;
    `{"by": "dcp"}` with those of `DcpPeer` and `keeps_plans`; or
    `{"by": "broadcast"}`, a load with DCP on rank 0 that is broadcast.
    """

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._stack = contextlib.ExitStack()
        self._state: State = {}
        self._own: State = {}
        self._proof: Proof | None = None

    def begin(self) -> None:
        """Meet the other ranks."""
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
        self._stack.callback(dist.destroy_process_group)

    def make(self, scale: float, layout: Layout) -> Json:
        """Make a state; it is what is saved, and what is filled."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._state, self._own, self._proof = {}, {}, None  # gives the memory back first
        self._state = spread_gpt(scale, layout, mesh)
        self._own = locals_of(self._state)
        self._proof = Proof.of(self._own)
        whole = sum(tensor.numel() * tensor.element_size() for tensor in self._state.values())
        return {"nbytes": whole, "own_nbytes": state_nbytes(self._own)}

    def open(self, method: Mapping[str, Json]) -> None:
        """Open the engine that a method needs, if it needs one that is not open."""
        if method["by"] == "ckptio":
            self._engine(method)

    def save(self, method: Mapping[str, Json], path: str) -> Json:
        """Save the state."""
        return self._timed(lambda: self._save(method, path))

    def load(self, method: Mapping[str, Json], path: str) -> Json:
        """Fill the state, all of whose bytes are zero before."""
        blank(self._own)
        return self._timed(lambda: self._load(method, path, self._state))

    def check(self) -> None:
        """Check that the state is what it was made as, as far as `Proof.check` does.

        Raises:
            AssertionError: It is not.
        """
        assert self._proof is not None
        self._proof.check(self._own)

    def check_saved(self, method: Mapping[str, Json], path: str, count: int) -> None:
        """Read a few tensors of the state back.

        Raises:
            AssertionError: They are others.
        """
        assert self._proof is not None
        names = list(self._proof.samples)[-count:]
        target = {
            name: torch.zeros_like(tensor) for name, tensor in self._state.items() if name in names
        }
        self._load(method, path, target)
        self._proof.check_some(locals_of(target), names)

    def end(self) -> None:
        """Close what is open."""
        self._stack.close()
        self._engines.clear()

    def _timed(self, work: Callable[[], None]) -> Json:
        gc.collect()
        dist.barrier()
        before = _moved()
        clock = Clock()
        work()
        elapsed_s = clock.elapsed_s()
        after = _moved()
        return {
            "elapsed_s": elapsed_s,
            "read_nbytes": after["rchar"] - before["rchar"],
            "written_nbytes": after["wchar"] - before["wchar"],
        }

    def _engine(self, method: Mapping[str, Json]) -> Engine:
        key = json.dumps(method, sort_keys=True)
        if key not in self._engines:
            options = {name: value for name, value in method.items() if name not in _NO_OPTIONS}
            engine = Engine(CheckpointConfig(**options))
            with _on_own_host() if method.get("is_apart") else contextlib.nullcontext():
                self._stack.enter_context(engine)
            engine.prewarm()
            self._engines[key] = engine
        return self._engines[key]

    def _save(self, method: Mapping[str, Json], path: str) -> None:
        if method["by"] == "ckptio":
            self._engine(method).save(self._state, path)
            return
        peer, keeps_plans = _dcp(method)
        with crc32(is_on=peer.has_crc):
            dcp_save(
                dict(self._state),
                storage_writer=peer.writer(path),
                planner=DefaultSavePlanner(enable_plan_caching=keeps_plans),
            )

    def _load(self, method: Mapping[str, Json], path: str, target: State) -> None:
        if method["by"] == "ckptio":
            wanted = frozenset(target)
            select = None if len(target) == len(self._state) else wanted.__contains__
            self._engine(method).load(path, target, select=select)
        elif method["by"] == "dcp":
            dcp_load(dict(target), storage_reader=FileSystemReader(path))
        else:
            if dist.get_rank() == 0:
                dcp_load(dict(target), storage_reader=FileSystemReader(path), no_dist=True)
            for tensor in target.values():
                dist.broadcast(tensor, 0)


def _dcp(method: Mapping[str, Json]) -> tuple[DcpPeer, bool]:
    options = dict(method)
    del options["by"]
    keeps_plans = options.pop("keeps_plans", False)
    return DcpPeer(**options), keeps_plans


def _moved() -> dict[str, int]:
    """Say how many bytes this process has read and written so far, through system calls.

    What it has read of a map of a file is not in it.
    """
    with open("/proc/self/io", encoding="ascii") as file:
        pairs = (line.split(":") for line in file)
        return {key: int(value) for key, value in pairs}


def serve(pipe: Connection, variables: Mapping[str, str]) -> None:
    """Follow orders until the other end of the pipe is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(variables)
    torch.set_num_threads(1)
    rank = Rank()
    with quiet_dcp(), contextlib.suppress(EOFError):
        while True:
            order = json.loads(pipe.recv_bytes())
            answer: Json = {}
            try:
                answer["value"] = getattr(rank, order["do"])(**order["arguments"])
            except Exception as error:  # who gave the order gets it
                traceback.print_exc()
                answer["error"] = f"{type(error).__name__}: {error}"
            pipe.send_bytes(json.dumps(answer).encode())
