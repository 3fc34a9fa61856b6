"""`loop_lag`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from bench.background import DcpAsync, reusable_stager
from bench.baselines import DcpPeer, SafetensorsPeer, TorchPeer, crc32
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
    `to_thread`; `dcp.async_save` is called on the loop, with a stager that blocks it and with
    one that stages in a thread (`use_async_staging`; training waits until it has), and in
    `to_thread`. The quiet loop is there for the noise.
    """
    saves = Saves(bench, gpt_like(bench.scale * _SCALE))
    target = {name: torch.zeros_like(tensor) for name, tensor in saves.state.items()}
    config = CheckpointConfig(pool_nbytes=pool_for(saves.nbytes))
    stager, beside = reusable_stager(), reusable_stager(is_async=True)
    blocking = DcpAsync(peer=DcpPeer(), stager=stager)
    staging = DcpAsync(peer=DcpPeer(), stager=beside)
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
            *(
                _subject(saves, target, f"{name}; dcp.load in to_thread", work)
                for name, work in (
                    ("dcp.async_save", _dcp(saves, target, blocking)),
                    ("dcp.async_save (use_async_staging)", _dcp(saves, target, staging)),
                    (
                        "dcp.async_save in to_thread",
                        _dcp(saves, target, blocking, in_thread=True),
                    ),
                )
            ),
            Subject(name="limit: quiet loop", kind="limit", run=_quiet),
        ]
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
            beside.close()


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


def _dcp(saves: Saves, target: State, way: DcpAsync, *, in_thread: bool = False) -> Step:
    async def work() -> None:
        with crc32(is_on=way.peer.has_crc):
            if in_thread:
                underway = await asyncio.to_thread(way.start, saves.state, saves.path)
            else:
                underway = way.start(saves.state, saves.path)
            await asyncio.wrap_future(underway.staged)
            await asyncio.wrap_future(underway.written)
        await asyncio.to_thread(way.peer.load, saves.path, target)

    return work


async def _quiet() -> Figures:
    async def work() -> None:
        await asyncio.sleep(_QUIET_S)

    figures = dict(await with_ticks(work))
    del figures[TOTAL.key]
    return figures
