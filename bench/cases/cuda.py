"""`cuda_save`, `cuda_stall` and `cuda_load`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bench.background import DcpAsync, caching_stager, pinned_stager, waited_for
from bench.baselines import DcpPeer, SafetensorsPeer, TorchPeer, crc32
from bench.cases.stall import changed
from bench.device import for_device, has_cuda, on_device, pinned_copies, synchronize
from bench.harness import Bench, Clock, Metric, Subject, case
from bench.states import gpt_like, small_tensors
from bench.subjects import Loads, Saves, pool_for
from ckptio import CheckpointConfig, Engine

if TYPE_CHECKING:
    from bench.baselines import Peer
    from bench.harness import Figures

CALL = Metric(key="call_s", label="call, s", has_rate=False)
CHANGE = Metric(key="change_s", label="changed, s", has_rate=True)
COMMIT = Metric(key="commit_s", label="commit, s", has_rate=True)
_SCALE = 0.5


@case(rounds=5)
async def cuda_save(bench: Bench) -> None:
    """Time a whole durable save of half of state a, which is on a CUDA device.

    Against safetensors, torch.save and DCP, each at its best, and against writing as many
    bytes directly. ckptio has its default pool, prewarmed, and so pinned.
    """
    saves = Saves(bench, on_device(gpt_like, bench.scale * _SCALE))
    peers: list[Peer] = [SafetensorsPeer(), TorchPeer(), DcpPeer(), DcpPeer(num_threads=2)]
    async with Engine() as engine:
        await engine.prewarm()
        subjects = [
            saves.ckptio(engine, "ckptio"),
            *(saves.peer(peer) for peer in peers),
            *saves.raw(),
        ]
        await bench.compare(
            "durable save of half of state a from a device",
            for_device(subjects),
            nbytes=saves.nbytes,
            saved_nbytes=saves.nbytes,
        )


@case(rounds=5)
async def cuda_stall(bench: Bench) -> None:
    """Time an async save of a state on a CUDA device: what it costs the trainer, and its commit.

    Of half of state a, and of all of state b (20,000 small tensors). "call": until the call
    returns, and the host may queue kernels that only read the state. "changed": until a change
    of the state, queued as soon as that is allowed, has happened on the device: behind
    `handle.fence()`, and behind DCP's staging. All commit durably. The pools are as large as
    the state and prewarmed; DCP's stagers are reused and pinned. Against copies into pinned
    memory that is kept. All of that is there at once, some 11 GB of the host's memory.
    """
    for title, make, scale in (
        ("async save of half of state a from a device", gpt_like, bench.scale * _SCALE),
        ("async save of state b from a device", small_tensors, bench.scale),
    ):
        await _stall(bench, title, Saves(bench, on_device(make, scale)))


async def _stall(bench: Bench, title: str, saves: Saves) -> None:
    config = CheckpointConfig(pool_nbytes=pool_for(saves.nbytes))
    with contextlib.ExitStack() as stack:
        async with Engine(config) as engine:
            await engine.prewarm()
            subjects = for_device(
                [
                    _ckptio(saves, engine),
                    *(_dcp(saves, way) for way in _asyncs(stack)),
                    *pinned_copies(saves.state, CHANGE.key),
                    saves.raw(COMMIT.key)[0],
                ]
            )
            await bench.compare(
                title,
                subjects,
                metrics=(CALL, CHANGE, COMMIT),
                nbytes=saves.nbytes,
                saved_nbytes=saves.nbytes,
            )


def _asyncs(stack: contextlib.ExitStack) -> list[DcpAsync]:
    """Give DCP's ways to stage from a device: its default, and those that pin memory."""
    ways = [DcpAsync(peer=DcpPeer())]
    if has_cuda():
        for how, stager in (
            ("pinned, in a thread, ", pinned_stager(is_async=True)),
            ("pinned, ", pinned_stager(is_async=False)),
            ("BlockingAsyncStager, ", caching_stager()),
        ):
            stack.callback(stager.close)
            ways.append(DcpAsync(peer=DcpPeer(), stager=stager, how=how))
    return ways


def _ckptio(saves: Saves, engine: Engine) -> Subject:
    async def run() -> Figures:
        figures: dict[str, float] = {}
        synchronize()
        clock = Clock()
        handle = engine.save(saves.state, saves.path)
        figures[CALL.key] = clock.elapsed_s()
        handle.fence()
        with changed(saves):
            synchronize()
            figures[CHANGE.key] = clock.elapsed_s()
            await handle
            figures[COMMIT.key] = clock.elapsed_s()
        return figures

    async def check() -> None:
        await saves.check_ckptio(engine)

    return Subject(name="ckptio", kind="ckptio", run=run, check=check, clean=saves.clean)


def _dcp(saves: Saves, way: DcpAsync) -> Subject:
    async def run() -> Figures:
        figures: dict[str, float] = {}
        with crc32(is_on=way.peer.has_crc):
            synchronize()
            clock = Clock()
            underway = way.start(saves.state, saves.path)
            figures[CALL.key] = clock.elapsed_s()
            async with waited_for(underway) as written:
                underway.staged.result()
                with changed(saves):
                    synchronize()
                    figures[CHANGE.key] = clock.elapsed_s()
                    await written
                    figures[COMMIT.key] = clock.elapsed_s()
        return figures

    async def check() -> None:
        await saves.check_peer(way.peer)

    return Subject(name=way.name, run=run, check=check, clean=saves.clean)


@case(rounds=5)
async def cuda_load(bench: Bench) -> None:
    """Time a load of half of state a into given tensors on a CUDA device.

    From files that are not in the page cache, and from files that are. Against safetensors,
    torch.load(mmap=True) and dcp.load, and against reading as many bytes into a small buffer.
    ckptio checks every block's checksum, the peers none. The clock stops when the device is done.
    """
    target = on_device(gpt_like, bench.scale * _SCALE)
    peers: list[Peer] = [
        SafetensorsPeer(),
        *([SafetensorsPeer(device="cuda")] if has_cuda() else []),
        TorchPeer(),
        DcpPeer(num_threads=2),
    ]
    loads = Loads(bench, target, peers)
    async with Engine() as engine:
        await engine.prewarm()
        await loads.save(engine)
        for how in ("cold", "warm"):
            subjects = loads.subjects(engine, is_cold=how == "cold")
            await bench.compare(
                f"{how} load of half of state a to a device",
                for_device(subjects),
                nbytes=loads.nbytes,
            )
