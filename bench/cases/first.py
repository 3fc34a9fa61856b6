"""`first_save`."""

from __future__ import annotations

from bench.baselines import SafetensorsPeer
from bench.harness import Bench, Clock, Metric, Subject, case
from bench.states import gpt_like
from bench.subjects import Saves, pool_for
from ckptio import CheckpointConfig, Engine

FIRST = Metric(key="first_s", label="first, s", has_rate=True)
SECOND = Metric(key="second_s", label="second, s", has_rate=True)
_SCALE = 0.3


@case(rounds=3)
async def first_save(bench: Bench) -> None:
    """Time the first and the second durable save of an engine; state of 1 GB.

    The first has no plan yet, and without `prewarm` no memory either. With the default
    pool, prewarmed or not, and with a pool as large as the state. safetensors + fsync,
    which keeps nothing from save to save, is beside it.
    """
    saves = Saves(bench, gpt_like(bench.scale * _SCALE))
    large = CheckpointConfig(pool_nbytes=pool_for(saves.nbytes))
    subjects = [
        _ckptio(saves, "ckptio, prewarmed", CheckpointConfig(), is_warm=True),
        _ckptio(saves, "ckptio, not prewarmed", CheckpointConfig(), is_warm=False),
        _ckptio(saves, "ckptio, large pool, prewarmed", large, is_warm=True),
        _ckptio(saves, "ckptio, large pool, not prewarmed", large, is_warm=False),
        _safetensors(saves),
    ]
    await bench.compare(
        "first saves of a new engine",
        subjects,
        metrics=(FIRST, SECOND),
        nbytes=saves.nbytes,
        saved_nbytes=saves.nbytes,
    )


def _ckptio(saves: Saves, name: str, config: CheckpointConfig, *, is_warm: bool) -> Subject:
    async def run() -> dict[str, float]:
        figures: dict[str, float] = {}
        async with Engine(config) as engine:
            if is_warm:
                await engine.prewarm()
            for metric in (FIRST, SECOND):
                await saves.clean()
                clock = Clock()
                await engine.save(saves.state, saves.path)
                figures[metric.key] = clock.elapsed_s()
            await saves.check_ckptio(engine)
        return figures

    return Subject(name=name, kind="ckptio", run=run, clean=saves.clean)


def _safetensors(saves: Saves) -> Subject:
    peer = SafetensorsPeer()

    async def run() -> dict[str, float]:
        figures: dict[str, float] = {}
        for metric in (FIRST, SECOND):
            await saves.clean()
            clock = Clock()
            peer.save(saves.state, saves.path)
            figures[metric.key] = clock.elapsed_s()
        await saves.check_peer(peer)
        return figures

    return Subject(name=peer.name, run=run, clean=saves.clean, missing=peer.missing)
