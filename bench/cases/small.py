"""`many_small`."""

from __future__ import annotations

from bench.baselines import TorchPeer, loaders, savers
from bench.harness import Bench, case
from bench.states import small_tensors
from bench.subjects import Loads, Saves
from ckptio import Engine


@case(rounds=3)
async def many_small(bench: Bench) -> None:
    """Time saves and loads of state b: 20,000 tensors of 1 to 64 KiB.

    What counts here is the cost of a tensor. Saves are durable; loads fill given tensors,
    with the files out of the page cache and in it.
    """
    state = small_tensors(bench.scale)
    saves = Saves(bench, state)
    async with Engine() as engine:
        await engine.prewarm()
        subjects = [
            saves.ckptio(engine, "ckptio"),
            *(saves.peer(peer) for peer in savers(is_durable=True)),
            *saves.raw(),
        ]
        await bench.compare(
            "durable save of state b", subjects, nbytes=saves.nbytes, saved_nbytes=saves.nbytes
        )
        loads = Loads(bench, state, [*loaders(), TorchPeer(has_mmap=False)])
        await loads.save(engine)
        for title, is_cold in (("cold", True), ("warm", False)):
            await bench.compare(
                f"load of state b into given tensors, {title}",
                loads.subjects(engine, is_cold=is_cold),
                nbytes=loads.nbytes,
            )
