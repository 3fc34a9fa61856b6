"""`load_cold`, `load_warm` and `load_back`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bench.baselines import loaders, open_peer
from bench.harness import Bench, Subject, case, timed
from bench.states import blank, gpt_like
from bench.subjects import Loads, Saves
from ckptio import CheckpointConfig, Engine

if TYPE_CHECKING:
    from bench.baselines import Peer
    from bench.harness import Figures, Kind, Step
    from bench.states import State

#: State a is in the page cache five times over, as each peer wants it: half of it will do.
_WARM_SCALE = 0.5


@case(rounds=5)
async def load_cold(bench: Bench) -> None:
    """Time a load of state a into given tensors, its files not in the page cache.

    Against safetensors, torch.load(mmap=True) and dcp.load, and against reading as many
    bytes directly into a small buffer. Files are dropped from the page cache before each
    load, and cachestat confirms it. ckptio checks every block's checksum, the peers none.
    """
    loads = Loads(bench, gpt_like(bench.scale), loaders())
    async with Engine() as engine:
        await engine.prewarm()
        await loads.save(engine)
        subjects = loads.subjects(engine, is_cold=True)
        await bench.compare("cold load of state a", subjects, nbytes=loads.nbytes)


@case(rounds=5)
async def load_warm(bench: Bench) -> None:
    """Time a load of half of state a into given tensors, its files in the page cache.

    Against safetensors, torch.load(mmap=True) and dcp.load, and against reading as many
    cached bytes into a small buffer. Files are read before each load, and cachestat
    confirms that they are there.
    """
    loads = Loads(bench, gpt_like(bench.scale * _WARM_SCALE), loaders())
    async with Engine() as engine:
        await engine.prewarm()
        await loads.save(engine)
        subjects = loads.subjects(engine, is_cold=False)
        await bench.compare("warm load of half of state a", subjects, nbytes=loads.nbytes)


@case(rounds=3)
async def load_back(bench: Bench) -> None:
    """Time a load of half of state a into given tensors, right after it was saved durably.

    On the host that saved it, as after a step that went wrong. The page cache is as each save
    leaves it: the peers', which write through it, leave all of the checkpoint there, and
    ckptio's, which write past it, next to nothing, so that its load is a read of the disk; with
    `direct_io="off"` they write through it as well. Against safetensors, torch.load(mmap=True)
    and dcp.load, each with what it saved itself.
    """
    saves = Saves(bench, gpt_like(bench.scale * _WARM_SCALE))
    target = {name: torch.zeros_like(tensor) for name, tensor in saves.state.items()}
    through = CheckpointConfig(direct_io="off")
    async with Engine() as engine, Engine(through) as through_cache:
        await bench.compare(
            "load of half of state a right after a durable save",
            [
                await _ours_back(saves, target, "ckptio", engine),
                await _ours_back(saves, target, 'ckptio (direct_io="off")', through_cache),
                *(_peer_back(saves, target, peer) for peer in loaders()),
            ],
            nbytes=saves.nbytes,
        )


async def _ours_back(saves: Saves, target: State, name: str, engine: Engine) -> Subject:
    await engine.prewarm()

    async def save() -> None:
        await engine.save(saves.state, saves.path)

    async def load() -> None:
        await engine.load(saves.path, into=target)

    return _back(saves, target, name, save, load, kind="ckptio")


def _peer_back(saves: Saves, target: State, peer: Peer) -> Subject:
    async def save() -> None:
        open_peer(peer)
        peer.save(saves.state, saves.path)

    async def load() -> None:
        peer.load(saves.path, target)

    return _back(saves, target, peer.load_name, save, load, missing=peer.missing)


def _back(
    saves: Saves,
    target: State,
    name: str,
    save: Step,
    load: Step,
    *,
    kind: Kind = "peer",
    missing: str = "",
) -> Subject:
    async def prepare() -> None:
        await save()
        blank(target)

    async def run() -> Figures:
        figures: dict[str, float] = {}
        with timed(figures):
            await load()
        return figures

    async def check() -> None:
        saves.proof.check(target)

    return Subject(
        name=name,
        kind=kind,
        prepare=prepare,
        run=run,
        check=check,
        clean=saves.clean,
        missing=missing,
    )
