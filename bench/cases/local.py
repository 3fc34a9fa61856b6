"""`save_local` and `save_over`."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from typing import TYPE_CHECKING

from bench.baselines import open_peer, savers
from bench.harness import SECONDS, Bench, Clock, Metric, Subject, case
from bench.states import gpt_like
from bench.subjects import Saves
from ckptio import CheckpointConfig, Engine
from ckptio.storage.freeing import wait_until_free

if TYPE_CHECKING:
    from bench.baselines import Peer
    from bench.harness import Figures

FREE = Metric(key="free_s", label="until the room is free, s")
_OVER_SCALE = 0.5


@case(rounds=5)
async def save_local(bench: Bench) -> None:
    """Time a whole save of state a (a GPT and its optimizer) to new files.

    Against safetensors, torch.save and DCP, and against writing as many bytes directly.
    First durably (fsync: the peer's own, or one added), then without. ckptio has its
    default pool, prewarmed, and writes past the page cache, or through it as the peers do.
    """
    saves = Saves(bench, gpt_like(bench.scale))
    through = CheckpointConfig(direct_io="off")
    async with Engine() as engine, Engine(through) as through_cache:
        await engine.prewarm()
        await through_cache.prewarm()
        subjects = [
            saves.ckptio(engine, "ckptio"),
            saves.ckptio(through_cache, 'ckptio (direct_io="off")'),
            *(saves.peer(peer) for peer in savers(is_durable=True)),
            *saves.raw(),
        ]
        await bench.compare(
            "durable save of state a", subjects, nbytes=saves.nbytes, saved_nbytes=saves.nbytes
        )
    unsynced = CheckpointConfig(durability="none")
    through = CheckpointConfig(durability="none", direct_io="off")
    async with Engine(unsynced) as engine, Engine(through) as through_cache:
        await engine.prewarm()
        await through_cache.prewarm()
        subjects = [
            saves.ckptio(engine, 'ckptio (durability="none")'),
            saves.ckptio(through_cache, 'ckptio (durability="none", direct_io="off")'),
            *(saves.peer(peer) for peer in savers(is_durable=False) if peer.is_best),
        ]
        await bench.compare(
            "save of state a, nothing synced",
            subjects,
            nbytes=saves.nbytes,
            saved_nbytes=saves.nbytes,
            note="The peers' bytes are in the page cache when the clock stops, ckptio's on the"
            ' disk (but not flushed), unless direct_io="off".',
        )


@case(rounds=3)
async def save_over(bench: Bench) -> None:
    """Time a durable save of 1.7 GB that replaces a checkpoint of as much.

    ckptio replaces it in one step, and frees what it took behind that: the second figure is
    the time until that is done. A peer saves beside it; then the old one is removed and the
    new one gets its name, so that one of them is there at any time.
    """
    saves = Saves(bench, gpt_like(bench.scale * _OVER_SCALE))
    async with Engine() as engine:
        await engine.prewarm()
        subjects = [
            _ckptio_over(saves, engine),
            *(_peer_over(saves, p) for p in savers(is_durable=True) if p.is_best),
        ]
        await bench.compare(
            "durable save over a checkpoint",
            subjects,
            metrics=(SECONDS, FREE),
            nbytes=saves.nbytes,
            saved_nbytes=saves.nbytes,
        )


def _ckptio_over(saves: Saves, engine: Engine) -> Subject:
    async def prepare() -> None:
        await engine.save(saves.state, saves.path)

    async def run() -> Figures:
        clock = Clock()
        await engine.save(saves.state, saves.path, overwrite=True)
        elapsed_s = clock.elapsed_s()
        await asyncio.to_thread(wait_until_free)
        return {SECONDS.key: elapsed_s, FREE.key: clock.elapsed_s()}

    return dataclasses.replace(saves.ckptio(engine, "ckptio"), prepare=prepare, run=run)


def _peer_over(saves: Saves, peer: Peer) -> Subject:
    new = f"{saves.path}-new"

    async def prepare() -> None:
        open_peer(peer)
        peer.save(saves.state, saves.path)

    async def run() -> Figures:
        clock = Clock()
        peer.save(saves.state, new)
        shutil.rmtree(saves.path)
        os.rename(new, saves.path)
        return dict.fromkeys((SECONDS.key, FREE.key), clock.elapsed_s())

    return dataclasses.replace(saves.peer(peer), prepare=prepare, run=run)
