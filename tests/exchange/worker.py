"""One rank of a group of processes that load together.

Run with a scenario, the kind of link, the number of ranks, this rank, and the port of rank
0's store, which rank 0 prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from typing import TYPE_CHECKING

import torch

from ckptio._aio import Threads
from ckptio.cache import MetadataCache
from ckptio.config import CheckpointConfig, KiB, MiB
from ckptio.engine.context import EngineContext
from ckptio.engine.exchange import plan_part, read_shared
from ckptio.engine.landing import Reading
from ckptio.errors import PeerLostError
from ckptio.exchange.gloo import StoreAddress, gloo_link, serve_store
from ckptio.exchange.shared import shared_link
from ckptio.format.manifest import decode_manifest
from ckptio.plan.exchange import block_runs, decode_part, plan_exchange
from ckptio.plan.load import Wanted
from ckptio.staging.copy import Destination, TargetState
from ckptio.staging.pool import Slab, SlabPool
from ckptio.storage.local import LocalStorage
from tests.rig import SAVE_IDS, contents_of, manifest_of, write_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ckptio.exchange.link import BulkLink

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 30.0
CONFIG = CheckpointConfig(block_nbytes=4 * KiB, slab_nbytes=64 * KiB, pool_nbytes=256 * KiB)


@contextlib.asynccontextmanager
async def address_of(rank: int, port: str) -> AsyncIterator[StoreAddress]:
    if rank:
        yield StoreAddress(LOOPBACK, int(port))
        return
    async with serve_store(LOOPBACK, TIMEOUT_S) as address:
        sys.stdout.write(f"{address.port}\n")
        sys.stdout.flush()
        yield address


async def load(rank: int, num_ranks: int, link: BulkLink) -> int:
    """Write the same checkpoint as all others do, and load it with them."""
    contents = contents_of(SAVE_IDS[0], 2 * MiB, MiB)
    manifest = decode_manifest(manifest_of(SAVE_IDS[0], contents))
    wanted = [Wanted(f, 0, len(data), f, 0) for f, data in enumerate(contents.values())]
    threads = [Threads(4, name) for name in ("odd", "copy", "write", "read", "wait")]
    context = EngineContext(
        config=CONFIG,
        executor=threads[0],
        copiers=threads[1],
        writers=threads[2],
        readers=threads[3],
        waiters=threads[4],
        pool=SlabPool(CONFIG.pool_nbytes, CONFIG.slab_nbytes),
        cache=MetadataCache(1, 1),
    )
    with tempfile.TemporaryDirectory() as directory:
        storage = LocalStorage(os.path.join(directory, "c"), CONFIG, threads[0], context.emit)
        await write_files(storage, SAVE_IDS[0], contents)
        plan = plan_exchange(
            manifest,
            [block_runs(wanted, manifest.block_nbytes)] * num_ranks,
            ["h"] * num_ranks,
            CONFIG.slab_nbytes,
        )
        part = plan_part(manifest, decode_part(plan.parts()[rank]), wanted, rank)
        tensors = [torch.zeros(want.nbytes, dtype=torch.uint8) for want in wanted]
        target = TargetState([Destination(t, torch.uint8) for t in tensors], None)
        try:
            await read_shared(part, Reading(storage, manifest, target), link, context)
        finally:
            assert context.pool.statistics().leased_nbytes == 0
            context.pool.close()
            for some in threads:
                some.shutdown()
    for tensor, data in zip(tensors, contents.values(), strict=True):
        assert bytes(tensor.numpy()) == data
    return part.read_nbytes


async def meet(rank: int, num_ranks: int, link: BulkLink) -> None:
    """Wait for all ranks."""
    last = 2**31 - 2
    with contextlib.closing(Slab(4 * KiB)) as own:
        slab, room = (link.slabs[0], None) if link.slabs else (own, own)
        if rank == 0:
            for other in range(1, num_ranks):
                async with link.receive(other, last, room, 1):
                    pass
            await link.send(range(1, num_ranks), last, slab, 1)
        else:
            await link.send([0], last, slab, 1)
            async with link.receive(0, last, room, 1):
                pass


@contextlib.asynccontextmanager
async def link_of(kind: str, rank: int, num_ranks: int, port: str) -> AsyncIterator[BulkLink]:
    async with address_of(rank, port) as address:
        if kind == "gloo":
            async with gloo_link(rank, num_ranks, address, LOOPBACK, TIMEOUT_S) as gloo:
                yield gloo
        else:
            async with shared_link(
                rank,
                num_ranks,
                f"{SAVE_IDS[0]}-{address.port}",
                num_slabs=3,
                slab_nbytes=CONFIG.slab_nbytes,
                timeout_s=TIMEOUT_S,
            ) as shared:
                yield shared


async def main(scenario: str, kind: str, num_ranks: int, rank: int, port: str) -> None:
    async with link_of(kind, rank, num_ranks, port) as link:
        if scenario == "die" and rank:
            os._exit(3)
        try:
            said = str(await load(rank, num_ranks, link))
        except PeerLostError as error:
            said = f"PeerLostError: {error}"
        sys.stdout.write(f"{said}\n")
        if scenario == "load":
            await meet(
                rank, num_ranks, link
            )  # as the verdict does: nobody goes before all are through


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
