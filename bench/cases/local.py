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
    default pool, prewarmed.
    """
    saves = Saves(bench, gpt_like(bench.scale))
    async with Engine() as engine:
        await engine.prewarm()
        subjects = [
            saves.ckptio(engine, "ckptio"),
            *(saves.peer(peer) for peer in savers(is_durable=True)),
            *saves.raw(),
        ]
        await bench.compare(
            "durable save of state a", subjects, nbytes=saves.nbytes, saved_nbytes=saves.nbytes
        )
    async with Engine(CheckpointConfig(durability="none")) as engine:
        await engine.prewarm()
        subjects = [
            saves.ckptio(engine, 'ckptio (durability="none")'),
            *(saves.peer(peer) for peer in savers(is_durable=False) if peer.is_best),
        ]
        await bench.compare(
            "save of state a, nothing synced",
            subjects,
            nbytes=saves.nbytes,
            saved_nbytes=saves.nbytes,
            note="The peers' bytes are in the page cache when the clock stops, ckptio's on the"
            " disk (but not flushed).",
        )
