"""`one_huge`."""

from __future__ import annotations

from bench.baselines import savers
from bench.harness import Bench, case
from bench.states import huge_tensors
from bench.subjects import Saves
from ckptio import Engine


@case(rounds=3)
async def one_huge(bench: Bench) -> None:
    """Time a durable save of state c: two tensors of 1.5 GB.

    Against safetensors, torch.save and DCP, each synced, and against writing as many bytes
    directly. A tensor is far larger than ckptio's pool.
    """
    saves = Saves(bench, huge_tensors(bench.scale), num_samples=1)
    async with Engine() as engine:
        await engine.prewarm()
        subjects = [
            saves.ckptio(engine, "ckptio"),
            *(saves.peer(peer) for peer in savers(is_durable=True)),
            *saves.raw(),
        ]
        await bench.compare(
            "durable save of state c", subjects, nbytes=saves.nbytes, saved_nbytes=saves.nbytes
        )
