"""Measure memory in a process of its own.

Linux only: the high-water mark of resident memory is reset by writing 5 to
`/proc/self/clear_refs` (proc(5)). Before each call garbage is collected and the C library
asked to give free memory back, so that nothing left over hides what the call takes.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from bench.baselines import DcpPeer, SafetensorsPeer, TorchPeer, quiet_dcp
from bench.states import Proof, blank, gpt_like, state_nbytes, tiny_tensors
from ckptio import CheckpointConfig, Engine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from bench.baselines import Peer
    from bench.states import State

T = TypeVar("T")
P = ParamSpec("P")

_CKPTIO = "ckptio"
_PEERS: Mapping[str, Peer] = {
    "safetensors save_file; safe_open": SafetensorsPeer(),
    "torch.save; torch.load(mmap=True)": TorchPeer(),
    "torch.save; torch.load()": TorchPeer(has_mmap=False),
    "dcp.save; dcp.load": DcpPeer(),
}
_SAMPLE_S = 0.002
_MIN_SLABS = 4
_POOLS_PER_STATE = 6
#: What the server has imported that forks all processes of a bench: what they are made of,
#: and what that would import when it is first used.
PRELOADED = [
    "bench.rank",
    "bench.planners",
    "bench.rounds",
    "anyio._backends._asyncio",
    "ckptio.runtime.loading",
    "ckptio.runtime.saving",
    "torch._dynamo",
]
#: Names of what can be measured.
WAYS = (_CKPTIO, *_PEERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to measure with.

    Attributes:
        scale: Of the state.
        state_nbytes: Its bytes, about.
        pool_nbytes: Of ckptio's pool: its default, or a sixth of a small state.
        slab_nbytes: Of its slabs.
    """

    scale: float
    state_nbytes: int
    pool_nbytes: int
    slab_nbytes: int

    @classmethod
    def of_scale(cls, scale: float) -> Order:
        """Choose a pool that the state is several times as large as."""
        default = CheckpointConfig()
        nbytes = round(3.42e9 * scale)
        pool_nbytes, slab_nbytes = default.pool_nbytes, default.slab_nbytes
        if nbytes < _POOLS_PER_STATE * pool_nbytes:
            slab_nbytes = default.block_nbytes
            num_slabs = max(_MIN_SLABS, nbytes // _POOLS_PER_STATE // slab_nbytes)
            pool_nbytes = num_slabs * slab_nbytes
        return cls(
            scale=scale, state_nbytes=nbytes, pool_nbytes=pool_nbytes, slab_nbytes=slab_nbytes
        )


def missing(way: str) -> str:
    """Say why a way cannot be measured; empty if it can."""
    return "" if way == _CKPTIO else _PEERS[way].missing


def _status_nbytes(key: str) -> int:
    """Read a size from `/proc/self/status`."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {key!r}")


class _AnonSampler:
    """Samples anonymous memory from a thread; the kernel keeps no mark of that."""

    def __init__(self) -> None:
        self.peak_nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.peak_nbytes = max(self.peak_nbytes, _status_nbytes("RssAnon"))


def _reset_peak() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


async def _peak(call: Callable[[], Awaitable[object]], prefix: str) -> dict[str, float]:
    """Give how much memory a call takes, beyond what is resident before it."""
    _reset_peak()
    resident, anonymous = _status_nbytes("VmRSS"), _status_nbytes("RssAnon")
    with _AnonSampler() as sampler:
        await call()
    return {
        f"{prefix}_nbytes": max(0, _status_nbytes("VmHWM") - resident),
        f"{prefix}_anon_nbytes": max(0, sampler.peak_nbytes - anonymous),
    }


def peak_of(call: Callable[[], T]) -> tuple[T, int]:
    """Call, and give how much memory that took beyond what was resident before, in bytes."""
    _reset_peak()
    resident = _status_nbytes("VmRSS")
    result = call()
    return result, max(0, _status_nbytes("VmHWM") - resident)


async def _measure_ckptio(order: Order, state: State, path: str) -> dict[str, float]:
    config = CheckpointConfig(pool_nbytes=order.pool_nbytes, slab_nbytes=order.slab_nbytes)
    proof = Proof.of(state)
    figures: dict[str, float] = {}
    async with Engine(config) as engine:

        async def save() -> None:
            await engine.save(state, path)

        figures |= await _peak(save, "save")
    blank(state)
    async with Engine(config) as engine:

        async def load() -> None:
            await engine.load(path, into=state)

        figures |= await _peak(load, "load")
    proof.check(state)
    return figures


async def _measure_peer(peer: Peer, state: State, path: str) -> dict[str, float]:
    proof = Proof.of(state)

    async def save() -> None:
        peer.save(state, path)

    async def load() -> None:
        peer.load(path, state)

    figures = await _peak(save, "save")
    blank(state)
    figures |= await _peak(load, "load")
    proof.check(state)
    return figures


async def _measure(way: str, order: Order, path: str) -> dict[str, float]:
    """Warm up with a small state, so that imports and code do not count; then measure."""
    peer = _PEERS.get(way)
    os.makedirs(path, exist_ok=True)
    small, warm, measured = tiny_tensors(8), os.path.join(path, "w"), os.path.join(path, "m")
    state = gpt_like(order.scale)
    assert state_nbytes(state) > order.pool_nbytes
    if peer is None:
        await _measure_ckptio(order, small, warm)
        return await _measure_ckptio(order, state, measured)
    await _measure_peer(peer, small, warm)
    return await _measure_peer(peer, state, measured)


def measure(way: str, order: Order, path: str) -> dict[str, float]:
    """Save and load in this process, which must be a fresh one; gives the peaks, in bytes."""
    with quiet_dcp():
        return asyncio.run(_measure(way, order, path))


def measure_in_child(way: str, order: Order, path: str) -> dict[str, float]:
    """Save and load in a process of its own; gives the peaks, in bytes.

    The process is forked by a server that has imported this module and done nothing else,
    so that imports neither take time nor count.
    """
    return in_child(measure, way, order, path)


def in_child(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of a module in a process of its own, which ends with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(call, *args, **kwargs).result()
