"""`save_local`."""

from __future__ import annotations

from bench.baselines import savers
from bench.harness import Bench, case
from bench.states import gpt_like
from bench.subjects import Saves
from ckptio import CheckpointConfig, Engine


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
