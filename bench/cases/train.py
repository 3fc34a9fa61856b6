"""`train_slowdown`."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from typing import TYPE_CHECKING

import torch

from bench.background import (
    DcpAsync,
    end_process,
    lone_group,
    refuses_process,
    reusable_stager,
    start_process,
)
from bench.baselines import DcpPeer, crc32
from bench.harness import Bench, Clock, Metric, Subject, case
from bench.states import gpt_like
from bench.subjects import Saves, pool_for
from ckptio import CheckpointConfig, Engine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

QUIET = Metric(key="quiet_s", label="quiet step, ms", factor=1e3, digits=1, has_ratio=False)
STEP = Metric(key="step_s", label="step, ms", factor=1e3, digits=1, has_ratio=False)
SLOWDOWN = Metric(key="slowdown_ratio", label="step / quiet", digits=2)
LOST = Metric(key="lost_s", label="lost, s")
COMMIT = Metric(key="commit_s", label="commit, s", has_ratio=False)
_SCALE = 0.6
_WIDTH = 768
_BATCH = 64
_QUIET_STEPS = 60


@case(rounds=3)
async def train_slowdown(bench: Bench) -> None:
    """Time training steps on the CPU, quiet and while 2 GB are saved.

    A small MLP with AdamW on all cores; the saved state is another one, as large as that of
    a real model. "Lost" is what a save costs the training: the time until the commit, stall
    included, less what the steps done meanwhile take when nothing is saved, as many before
    the save as after it; below zero, it is lost in the noise. ckptio with a pool as large as
    the state, against `dcp.async_save` with a reused stager, in a thread with one to four
    threads that write, and in a process.
    """
    saves = Saves(bench, gpt_like(bench.scale * _SCALE))
    config = CheckpointConfig(pool_nbytes=pool_for(saves.nbytes))
    quiet_steps = max(3, round(_QUIET_STEPS * min(1.0, bench.scale)))
    training = Training()
    stager, shared = reusable_stager(), reusable_stager(is_shared=True)
    dcp_ways = [
        *(DcpAsync(peer=DcpPeer(num_threads=n), stager=stager) for n in (1, 2, 4)),
        DcpAsync(peer=DcpPeer(has_crc=True), stager=stager),
        *(DcpAsync(peer=DcpPeer(num_threads=n), stager=shared, is_process=True) for n in (1, 2)),
    ]
    async with Engine(config) as engine:
        await engine.prewarm()

        async def start() -> Callable[[], bool]:
            handle = engine.save(saves.state, saves.path)
            await handle.staged
            return handle.done

        async def check() -> None:
            await saves.check_ckptio(engine)

        subjects = [
            Subject(
                name="ckptio",
                kind="ckptio",
                run=lambda: _train(training, quiet_steps, start),
                check=check,
                clean=saves.clean,
            ),
            *(_dcp(saves, way, training, quiet_steps) for way in dcp_ways),
        ]
        try:
            await bench.compare(
                "training while a state of 2 GB is saved",
                subjects,
                metrics=(QUIET, STEP, SLOWDOWN, LOST, COMMIT),
                nbytes=saves.nbytes,
                saved_nbytes=saves.nbytes,
            )
        finally:
            end_process()
            stager.close()
            shared.close()


class Training:
    """A model that is trained on the CPU."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU()]
        self._model = torch.nn.Sequential(
            *layers, torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU(), torch.nn.Linear(_WIDTH, 1)
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._batch = torch.randn(_BATCH, _WIDTH)

    def step_s(self) -> float:
        """Do a step; gives how long it took."""
        clock = Clock()
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        return clock.elapsed_s()


async def _train(
    training: Training,
    quiet_steps: int,
    start: Callable[[], Awaitable[Callable[[], bool]]],
) -> dict[str, float]:
    """Train for a while, then while a save is under way, and again; `start` stages it."""
    quiet = [training.step_s() for _ in range(quiet_steps)][quiet_steps // 5 :]
    clock = Clock()
    is_done = await start()
    steps: list[float] = []
    while not is_done() or not steps:
        steps.append(training.step_s())
        await asyncio.sleep(0)
    commit_s = clock.elapsed_s()
    quiet += [training.step_s() for _ in quiet]
    quiet_s = statistics.median(quiet)
    return {
        QUIET.key: quiet_s,
        STEP.key: statistics.median(steps),
        SLOWDOWN.key: statistics.median(steps) / quiet_s,
        LOST.key: commit_s - len(steps) * quiet_s,
        COMMIT.key: commit_s,
    }


def _dcp(saves: Saves, way: DcpAsync, training: Training, quiet_steps: int) -> Subject:
    async def start() -> Callable[[], bool]:
        underway = way.start(saves.state, saves.path)
        underway.staged.result()

        def is_done() -> bool:
            if underway.written.done():
                underway.written.result()
                return True
            return False

        return is_done

    async def run() -> dict[str, float]:
        group = lone_group() if way.is_process else contextlib.nullcontext()
        with crc32(is_on=way.peer.has_crc), group:
            return await _train(training, quiet_steps, start)

    async def check() -> None:
        await saves.check_peer(way.peer)

    async def prepare() -> None:
        if way.is_process:
            start_process(saves.path)

    return Subject(
        name=way.name,
        prepare=prepare,
        run=run,
        check=check,
        clean=saves.clean,
        is_slow=way.peer.is_slow,
        missing=refuses_process(saves.nbytes) if way.is_process else "",
    )
