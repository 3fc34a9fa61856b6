"""Trainers whose loop is uvloop's, and engines too: their loops are what the policy makes."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import uvloop

from ckptio import CheckpointConfig, Engine, SaveAbortedError
from ckptio.config import MiB
from ckptio.exchange.ends import Address
from ckptio.exchange.tcp import listening, tcp_link
from ckptio.staging.pool import Slab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckptio.exchange.tcp import TcpLink

SMALL_POOL = CheckpointConfig(pool_nbytes=16 * MiB, slab_nbytes=4 * MiB)


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    """Have all loops that begin meanwhile be uvloop's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of policies, from Python 3.14 on
        before = asyncio.get_event_loop_policy()
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        yield
        asyncio.set_event_loop_policy(before)


def test_states_come_back(tmp_path: Path) -> None:
    """Saved twice, the second time over the first; and one that is aborted changes nothing."""
    loops: set[str] = set()

    def observe(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # on a thread without a loop
            loops.add(type(asyncio.get_running_loop()).__module__)

    async def train() -> None:
        state: dict[str, Any] = {"w": torch.randn(20 * MiB // 4), "step": 1}
        async with Engine(SMALL_POOL, observer=observe) as engine:
            await engine.save(state, tmp_path / "c")
            state["step"] = 2
            handle = engine.save(state, tmp_path / "c", overwrite=True)
            await handle.staged
            await handle
            aborted = engine.save({"w": torch.zeros(5 * MiB)}, tmp_path / "c", overwrite=True)
            aborted.abort()
            with pytest.raises(SaveAbortedError):
                await aborted
            loaded = await engine.load(tmp_path / "c")
            assert loaded["step"] == 2
            assert torch.equal(loaded["w"], state["w"])
            target: dict[str, Any] = {"w": torch.zeros_like(state["w"]), "step": 0}
            await engine.load(tmp_path / "c", into=target)
            assert torch.equal(target["w"], state["w"])

    asyncio.run(train())
    assert loops == {"uvloop"}


def test_ranks_pass_on_what_they_read() -> None:
    """Over TCP; messages of many slabs, both ways."""

    async def carry(own: TcpLink, other: int, nbytes: int) -> None:
        sent, room = Slab(nbytes), Slab(nbytes)
        with contextlib.closing(sent), contextlib.closing(room):
            sent.view[:] = bytes([other]) * nbytes
            for tag in range(3):
                async with asyncio.TaskGroup() as group:
                    group.create_task(own.send([other], tag, sent, nbytes))
                    async with own.receive(other, tag, room, nbytes):
                        assert bytes(room.view) == bytes([1 - other]) * nbytes

    async def meet() -> None:
        with listening(2) as a, listening(2) as b:
            addresses = [Address("127.0.0.1", door.getsockname()[1]) for door in (a, b)]
            async with (
                tcp_link(0, addresses, "0" * 32, a, timeout_s=20) as first,
                tcp_link(1, addresses, "0" * 32, b, timeout_s=20) as second,
                asyncio.TaskGroup() as group,
            ):
                group.create_task(carry(first, 1, 16 * MiB))
                group.create_task(carry(second, 0, 16 * MiB))

    asyncio.run(meet())
