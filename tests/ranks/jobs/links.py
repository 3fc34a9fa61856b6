"""One rank of a group of processes that load together, over a link of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is exported

from ckptio.config import CheckpointConfig, KiB, MiB
from ckptio.engine.exchange import plan_part, read_shared
from ckptio.engine.landing import Reading
from ckptio.exchange.ends import Address
from ckptio.exchange.shared import shared_link
from ckptio.exchange.tcp import listening, tcp_link
from ckptio.format.manifest import decode_manifest
from ckptio.plan.exchange import block_runs, decode_part, plan_exchange
from ckptio.plan.load import Wanted
from ckptio.staging.copy import Destination, TargetState
from ckptio.staging.pool import Slab
from ckptio.storage.local import LocalStorage
from tests.rig import SAVE_IDS, contents_of, context_of, manifest_of, write_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ckptio.exchange.link import BulkLink
    from tests.ranks.jobs.worker import Me

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 30.0
CONFIG = CheckpointConfig(block_nbytes=4 * KiB, slab_nbytes=64 * KiB, pool_nbytes=256 * KiB)


def told_to_all(me: Me, port: int) -> list[int]:
    """Tell the others a port through the job's store, and hear theirs."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    store.set(f"port {me.rank}", str(port))
    return [int(store.get(f"port {rank}")) for rank in range(me.world_size)]


async def load(me: Me, link: BulkLink, directory: Path) -> int:
    """Write the same checkpoint as all others do, and load it with them."""
    contents = contents_of(SAVE_IDS[0], 2 * MiB, MiB)
    manifest = decode_manifest(manifest_of(SAVE_IDS[0], contents))
    wanted = [Wanted(f, 0, len(data), f, 0) for f, data in enumerate(contents.values())]
    context = context_of(CONFIG)
    storage = LocalStorage(str(directory / str(me.rank)), CONFIG, context.executor, context.emit)
    await write_files(storage, SAVE_IDS[0], contents)
    plan = plan_exchange(
        manifest,
        [block_runs(wanted, manifest.block_nbytes)] * me.world_size,
        ["h"] * me.world_size,
        CONFIG.slab_nbytes,
    )
    part = plan_part(manifest, decode_part(plan.parts()[me.rank]), wanted, me.rank)
    tensors = [torch.zeros(want.nbytes, dtype=torch.uint8) for want in wanted]
    target = TargetState([Destination(t, torch.uint8) for t in tensors], None)
    try:
        await read_shared(part, Reading(storage, manifest, target), link, context)
    finally:
        assert context.pool.statistics().leased_nbytes == 0
        context.pool.close()
        context.end_threads()
    for tensor, data in zip(tensors, contents.values(), strict=True):
        assert bytes(tensor.numpy()) == data
    return part.read_nbytes


async def meet(me: Me, link: BulkLink) -> None:
    """Wait for all ranks, as the verdict does: nobody goes before all are through."""
    last = 2**31 - 2
    with contextlib.closing(Slab(4 * KiB)) as own:
        slab, room = (link.slabs[0], None) if link.slabs else (own, own)
        if me.rank == 0:
            for other in range(1, me.world_size):
                async with link.receive(other, last, room, 1):
                    pass
            await link.send(range(1, me.world_size), last, slab, 1)
        else:
            await link.send([0], last, slab, 1)
            async with link.receive(0, last, room, 1):
                pass


@contextlib.asynccontextmanager
async def link_of(me: Me, kind: str) -> AsyncIterator[BulkLink]:
    with listening(me.world_size) as door:
        ports = told_to_all(me, door.getsockname()[1])
        token = f"{ports[0]:032}"
        if kind == "tcp":
            addresses = [Address(LOOPBACK, port) for port in ports]
            async with tcp_link(me.rank, addresses, token, door, timeout_s=TIMEOUT_S) as tcp:
                yield tcp
        else:
            async with shared_link(
                me.rank,
                me.world_size,
                f"{SAVE_IDS[0]}-{token}",
                num_slabs=3,
                slab_nbytes=CONFIG.slab_nbytes,
                timeout_s=TIMEOUT_S,
            ) as shared:
                yield shared


def load_together(me: Me, kind: str, path: str) -> int:
    """Load what all load; gives how many bytes this rank has read of the disk."""

    async def live() -> int:
        async with link_of(me, kind) as link:
            me.point("linked")
            read_nbytes = await load(me, link, Path(path))
            await meet(me, link)
        return read_nbytes

    return asyncio.run(live())
