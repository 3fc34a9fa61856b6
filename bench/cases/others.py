"""`other_peers`."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

from bench.baselines import open_peer
from bench.cases.stall import COMMIT, STALL, changed, ckptio_async
from bench.harness import Bench, Clock, Subject, case
from bench.others import OrbaxPeer, RunaiPeer, TorchCheckpointingPeer, TorchsnapshotPeer
from bench.states import gpt_like, small_tensors
from bench.subjects import Loads, Saves, pool_for
from ckptio import CheckpointConfig, Engine

if TYPE_CHECKING:
    from bench.harness import Figures

#: Each format has a checkpoint of its own, and Orbax a copy of what it loads.
_SCALE = 0.5
Background = TorchsnapshotPeer | TorchCheckpointingPeer | OrbaxPeer


@case(rounds=3)
async def other_peers(bench: Bench) -> None:
    """Time saves and loads beside torchsnapshot, torch_checkpointing, Orbax and Run:ai's streamer.

    Half of state a and half of state b, saved durably; half of state a loaded into given
    tensors, with the files out of the page cache and in it; and saved while training goes on,
    as in `stall`. Run:ai's streamer reads what safetensors wrote, and saves nothing.
    """
    state = gpt_like(bench.scale * _SCALE)
    with closing(TorchCheckpointingPeer()) as manager, closing(OrbaxPeer()) as orbax:
        peers: list[Background] = [TorchsnapshotPeer(), manager, orbax]
        async with Engine() as engine:
            await engine.prewarm()
            for name, saved in (("a", state), ("b", small_tensors(bench.scale * _SCALE))):
                saves = Saves(bench, saved)
                await bench.compare(
                    f"durable save of half of state {name}",
                    [
                        saves.ckptio(engine, "ckptio"),
                        *(saves.peer(peer) for peer in peers),
                        saves.raw()[-1],
                    ],
                    nbytes=saves.nbytes,
                    saved_nbytes=saves.nbytes,
                )
            loads = Loads(bench, state, [*peers, RunaiPeer()])
            await loads.save(engine)
            for title, is_cold in (("cold", True), ("warm", False)):
                await bench.compare(
                    f"load of half of state a into given tensors, {title}",
                    loads.subjects(engine, is_cold=is_cold),
                    nbytes=loads.nbytes,
                )
    await _asynchronous(bench)


async def _asynchronous(bench: Bench) -> None:
    saves = Saves(bench, gpt_like(bench.scale * _SCALE))
    config = CheckpointConfig(pool_nbytes=pool_for(saves.nbytes))
    manager = TorchCheckpointingPeer(is_async=True)
    with closing(manager), closing(OrbaxPeer()) as orbax:
        async with Engine(config) as engine:
            await engine.prewarm()
            ways: list[tuple[str, Background]] = [
                ("torchsnapshot async_take + fsync (batched)", TorchsnapshotPeer()),
                ("torch_checkpointing async save + fsync (crc32 off)", manager),
                ("orbax async save (zarr 3, not compressed)", orbax),
            ]
            await bench.compare(
                "async save of half of state a",
                [ckptio_async(saves, engine), *(_background(saves, *way) for way in ways)],
                metrics=(STALL, COMMIT),
                nbytes=saves.nbytes,
                saved_nbytes=saves.nbytes,
            )


def _background(saves: Saves, name: str, peer: Background) -> Subject:
    async def prepare() -> None:
        open_peer(peer)

    async def run() -> Figures:
        figures: dict[str, float] = {}
        clock = Clock()
        wait = peer.start(saves.state, saves.path)
        figures[STALL.key] = clock.elapsed_s()
        with changed(saves):
            await asyncio.to_thread(wait)
            figures[COMMIT.key] = clock.elapsed_s()
        return figures

    async def check() -> None:
        await saves.check_peer(peer)

    return Subject(
        name=name,
        prepare=prepare,
        run=run,
        check=check,
        clean=saves.clean,
        is_slow=peer.is_slow,
        missing=peer.missing,
    )
