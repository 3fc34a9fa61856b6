"""`stall`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from bench.background import DcpAsync, reusable_stager, waited_for
from bench.baselines import DcpPeer, crc32
from bench.harness import Bench, Clock, Metric, Subject, case
from bench.limits import CopyTarget
from bench.states import blank, gpt_like
from bench.subjects import Saves, pool_for
from ckptio import CheckpointConfig, Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.harness import Figures
    from bench.states import State

STALL = Metric(key="stall_s", label="stall, s", has_rate=True)
COMMIT = Metric(key="commit_s", label="commit, s", has_rate=True)
#: Source, pool, DCP's staged copy and a copy to compare with are there at once.
_SCALE = 0.7


@case(rounds=5)
async def stall(bench: Bench) -> None:
    """Time an async save of 0.7 of state a: until training may go on, and until it is safe.

    ckptio's stall ends with `await handle.staged`, its pool as large as the state and
    prewarmed; DCP's when `async_save` returns, with a stager that is reused, and with a new
    one, which is its default, as are sums. Both commit durably. Against one copy of the state
    into touched memory, and against `clone`. After the stall a tensor is changed; the save
    must not see it.
    """
    saves = Saves(bench, gpt_like(bench.scale * _SCALE))
    config = CheckpointConfig(pool_nbytes=pool_for(saves.nbytes))
    stager = reusable_stager()
    asyncs = [
        DcpAsync(peer=DcpPeer(), stager=stager),
        DcpAsync(peer=DcpPeer(num_threads=2), stager=stager),
        DcpAsync(peer=DcpPeer(has_crc=True), stager=stager),
        DcpAsync(peer=DcpPeer()),
        DcpAsync(peer=DcpPeer(has_crc=True)),
    ]
    async with Engine(config) as engine:
        await engine.prewarm()
        subjects = [
            ckptio_async(saves, engine),
            *(_dcp(saves, way) for way in asyncs),
            *(_copy(saves, num_threads) for num_threads in (1, 2)),
            _clone(saves),
            saves.raw(COMMIT.key)[0],
        ]
        try:
            await bench.compare(
                "async save of 0.7 of state a",
                subjects,
                metrics=(STALL, COMMIT),
                nbytes=saves.nbytes,
                saved_nbytes=saves.nbytes,
            )
        finally:
            stager.close()


@contextlib.contextmanager
def changed(saves: Saves) -> Iterator[None]:
    """Change the tensors that the check looks at, as soon as that is allowed; then undo it.

    Also where the save fails: the state is everybody's.
    """
    tensors = {name: saves.state[name] for name in saves.names}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    blank(tensors)
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            tensor.copy_(before[name])


def ckptio_async(saves: Saves, engine: Engine) -> Subject:
    """Save with an engine; its stall ends when the state may change."""

    async def run() -> Figures:
        figures: dict[str, float] = {}
        clock = Clock()
        handle = engine.save(saves.state, saves.path)
        await handle.staged
        figures[STALL.key] = clock.elapsed_s()
        with changed(saves):
            await handle
            figures[COMMIT.key] = clock.elapsed_s()
        return figures

    async def check() -> None:
        await saves.check_ckptio(engine)

    return Subject(name="ckptio", kind="ckptio", run=run, check=check, clean=saves.clean)


def _dcp(saves: Saves, way: DcpAsync) -> Subject:
    async def run() -> Figures:
        figures: dict[str, float] = {}
        with crc32(is_on=way.peer.has_crc):
            clock = Clock()
            underway = way.start(saves.state, saves.path)
            async with waited_for(underway) as written:
                await asyncio.wrap_future(underway.staged)
                figures[STALL.key] = clock.elapsed_s()
                with changed(saves):
                    await written
                    figures[COMMIT.key] = clock.elapsed_s()
        return figures

    async def check() -> None:
        await saves.check_peer(way.peer)

    return Subject(name=way.name, run=run, check=check, clean=saves.clean, is_slow=way.peer.is_slow)


def _copy(saves: Saves, num_threads: int) -> Subject:
    async def run() -> Figures:
        target = CopyTarget(saves.nbytes)
        try:
            clock = Clock()
            target.copy(saves.state, num_threads=num_threads)
            elapsed_s = clock.elapsed_s()
            assert target.holds(saves.state), "the copy is another one"
        finally:
            target.close()
        return {STALL.key: elapsed_s}

    return Subject(
        name=f"limit: memmove into touched memory x {num_threads}", kind="limit", run=run
    )


def _clone(saves: Saves) -> Subject:
    async def run() -> Figures:
        clock = Clock()
        copy: State = {name: tensor.clone() for name, tensor in saves.state.items()}
        elapsed_s = clock.elapsed_s()
        saves.proof.check(copy)
        return {STALL.key: elapsed_s}

    return Subject(name="limit: clone() of every tensor", kind="limit", run=run)
