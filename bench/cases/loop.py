"""`loop_lag`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from bench.baselines import (
    DcpAsync,
    DcpPeer,
    SafetensorsPeer,
    TorchPeer,
    crc32,
    reusable_stager,
)
from bench.harness import Bench, Subject, case
from bench.states import blank, gpt_like
from bench.subjects import Saves, pool_for
from bench.ticks import P50, P99, TOTAL, WORST, with_ticks
from ckptio import CheckpointConfig, Engine

if TYPE_CHECKING:
    from bench.baselines import Peer
    from bench.harness import Figures, Kind, Step
    from bench.states import State

_QUIET_S = 1.0
_SCALE = 0.314


@case(rounds=3)
async def loop_lag(bench: Bench) -> None:
    """Time how late the trainer's event loop is while 1 GiB is saved and loaded on it.

    A coroutine wants to wake every millisecond; each tick that a loop was late for counts
    with its own lateness, also those it slept through. ckptio is awaited; what blocks is in
    `to_thread`; `dcp.async_save` is called on the loop, which is how it is meant to be. The
    quiet loop is there for the noise.
    """
    saves = Saves(bench, gpt_like(bench.scale * _SCALE))
    target = {name: torch.zeros_like(tensor) for name, tensor in saves.state.items()}
    config = CheckpointConfig(pool_nbytes=pool_for(saves.nbytes))
    stager = reusable_stager()
    async with Engine(config) as engine:
        await engine.prewarm()
        subjects = [
            _subject(saves, target, "ckptio", _ckptio(saves, target, engine), kind="ckptio"),
            *(
                _subject(saves, target, f"{name} in to_thread", _in_thread(saves, target, peer))
                for name, peer in (
                    ("torch.save, torch.load", TorchPeer()),
                    ("safetensors", SafetensorsPeer()),
                    ("dcp.save, dcp.load", DcpPeer()),
                )
            ),
            _subject(saves, target, "dcp.async_save; dcp.load in to_thread",
                     _dcp(saves, target, DcpAsync(peer=DcpPeer(), stager=stager))),
            Subject(name="limit: quiet loop", kind="limit", run=_quiet),
        ]  # fmt: skip
        try:
            await bench.compare(
                "lag of the trainer's loop during a save and a load",
                subjects,
                metrics=(P50, P99, WORST, TOTAL),
                nbytes=2 * saves.nbytes,
                saved_nbytes=saves.nbytes,
            )
        finally:
            stager.close()


def _subject(saves: Saves, target: State, name: str, work: Step, *, kind: Kind = "peer") -> Subject:
    async def prepare() -> None:
        blank(target)

    async def run() -> Figures:
        return await with_ticks(work)

    async def check() -> None:
        saves.check_size()
        saves.proof.check(target)

    return Subject(name=name, kind=kind, prepare=prepare, run=run, check=check, clean=saves.clean)


def _ckptio(saves: Saves, target: State, engine: Engine) -> Step:
    async def work() -> None:
        await engine.save(saves.state, saves.path)
        await engine.load(saves.path, into=target)

    return work


def _in_thread(saves: Saves, target: State, peer: Peer) -> Step:
    async def work() -> None:
        await asyncio.to_thread(peer.save, saves.state, saves.path)
        await asyncio.to_thread(peer.load, saves.path, target)

    return work


def _dcp(saves: Saves, target: State, way: DcpAsync) -> Step:
    async def work() -> None:
        with crc32(is_on=way.peer.has_crc):
            await asyncio.wrap_future(way.start(saves.state, saves.path))
        await asyncio.to_thread(way.peer.load, saves.path, target)

    return work


async def _quiet() -> Figures:
    async def work() -> None:
        await asyncio.sleep(_QUIET_S)

    figures = dict(await with_ticks(work))
    del figures[TOTAL.key]
    return figures
