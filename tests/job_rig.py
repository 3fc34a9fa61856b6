"""Jobs of many ranks on one loop, and states that are spread over them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ckptio import Shard
from ckptio.ranks.interface import Deadlines
from ckptio.storage.local import LocalStorage
from ckptio.testing import MemoryStorage
from ckptio.testing.exchange import MemoryNetwork
from ckptio.testing.ranks import MemoryRanks
from tests.rig import SMALL, InlineCore, context_of, engine_on, running_cache

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from ckptio import Engine
    from ckptio.config import CheckpointConfig
    from ckptio.engine.context import EngineContext
    from ckptio.events import Observer
    from ckptio.exchange.link import BulkLink
    from ckptio.storage.interface import Storage

T = TypeVar("T")
DEADLINES = Deadlines(peer_s=5.0, meet_s=60.0)


@dataclass
class MemoryLinker:
    """Links ranks of one loop, through a network of their own for each exchange."""

    world_size: int
    seed: int = 0
    max_delay_s: float = 0.01
    num_slabs: int = 0
    slab_nbytes: int = 0
    damaged_tags: set[int] = field(default_factory=set)
    networks: list[MemoryNetwork] = field(default_factory=list)

    def offer(self, context: EngineContext) -> int:
        """Make a network; see `engine.links.Linker`."""
        del context
        network = MemoryNetwork(
            self.world_size,
            seed=self.seed + len(self.networks),
            max_delay_s=self.max_delay_s,
            num_slabs=self.num_slabs,
            slab_nbytes=self.slab_nbytes,
        )
        network.damaged_tags |= self.damaged_tags
        self.networks.append(network)
        return len(self.networks) - 1

    @contextlib.asynccontextmanager
    async def open(
        self, offer: Any, context: EngineContext, session: object, path: str
    ) -> AsyncIterator[BulkLink]:
        """Give the link of a rank, and break the network when it is left."""
        del session, path
        network, rank = self.networks[offer], context.ranks.rank
        try:
            yield network.links[rank]
        finally:
            network.lose(rank)


@dataclass(frozen=True)
class Job:
    """Engines of ranks that share a place named `memory`, each counting for itself."""

    engines: Sequence[Engine]
    storages: Sequence[MemoryStorage]
    ranks: MemoryRanks
    linker: MemoryLinker

    async def each(self, body: Callable[[int, Engine], Awaitable[T]]) -> list[T | BaseException]:
        """Run a body on every rank; gives what each returned or raised."""

        async def one(rank: int) -> T | BaseException:
            try:
                return await body(rank, self.engines[rank])
            except BaseException as error:  # the test looks at it
                return error

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(r), name=f"rank {r}") for r in range(len(self.engines))]
        return [task.result() for task in tasks]

    async def all(self, body: Callable[[int, Engine], Awaitable[T]]) -> list[T]:
        """Run a body on every rank, none of which may fail."""
        results = []
        for result in await self.each(body):
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    @property
    def place(self) -> MemoryStorage:
        return self.storages[0]

    def opened(self) -> list[list[str]]:
        """Name the data files that each rank has opened."""
        return [
            [op.path.rpartition("/")[2] for op in storage.operations if op.kind == "open"]
            for storage in self.storages
        ]

    def read_nbytes(self) -> list[int]:
        """Give the bytes of data files that each rank has read."""
        return [storage.counts.read_nbytes for storage in self.storages]

    def written_nbytes(self) -> list[int]:
        """Give the bytes of data files that each rank has written."""
        return [storage.counts.written_nbytes for storage in self.storages]


@contextlib.asynccontextmanager
async def job(
    world_size: int,
    place: MemoryStorage | None = None,
    config: CheckpointConfig = SMALL,
    *,
    hosts: Sequence[str] | None = None,
    seed: int = 0,
    observer: Observer | None = None,
    linker: MemoryLinker | None = None,
    directory: Path | None = None,
    joins_pieces: bool = False,
    far: MemoryStorage | None = None,
) -> AsyncIterator[Job]:
    """Give the engines of a job, and check at the end that none leaves anything behind.

    What they call `memory` is in `directory`, if that is given, and what they call `far` is
    `far`, a second tier. Frames of ranks that have
    piled up arrive as one piece, if `joins_pieces`.
    """
    before = asyncio.all_tasks()
    first = place or MemoryStorage("memory", seed=seed)
    storages = [first.another_name("memory") for _ in range(world_size)]
    for twin in storages:
        twin._rng, twin._max_delay_s = first._rng, first._max_delay_s
    far = far or MemoryStorage("far")
    linker = linker or MemoryLinker(world_size, seed)
    async with contextlib.AsyncExitStack() as stack:
        group = await stack.enter_async_context(
            MemoryRanks(
                world_size,
                hosts=hosts,
                deadlines=DEADLINES,
                seed=seed,
                max_delay_s=0.002,
                joins_pieces=joins_pieces,
            )
        )
        cores = []
        for rank, ranks in enumerate(group.ranks):
            context = context_of(config, observer, ranks=ranks, linker=linker)
            storage: Storage = storages[rank]
            if directory is not None:
                storage = LocalStorage(str(directory), config, context.executor, context.emit)
            twins = {"memory": storage, "far": far.another_name("far")}
            cores.append(InlineCore(context, twins))
            await stack.enter_async_context(running_cache(context))
        yield Job([engine_on(core) for core in cores], storages, group, linker)
        for core in cores:
            if core.tasks:
                await asyncio.wait(core.tasks)
            statistics = core.context.pool.statistics()
            assert statistics.leased_nbytes == 0
            assert statistics.num_waiting == 0
            core.context.pool.close()
        assert all(twin.counts.num_open_sources == 0 for twin in storages)
        for network in linker.networks:
            assert network.num_under_way == 0
            network.close()
    assert asyncio.all_tasks() == before


def shards_of(tensor: torch.Tensor, grid: Sequence[int]) -> list[Shard]:
    """Cut a tensor into a grid of shards, row-major; uneven and empty ones as they come."""
    cuts = [
        [extent * i // parts for i in range(parts + 1)]
        for extent, parts in zip(tensor.shape, grid, strict=True)
    ]
    shards = []
    for index in itertools.product(*(range(parts) for parts in grid)):
        part = tensor
        offset = []
        for dim, i in enumerate(index):
            start, stop = cuts[dim][i], cuts[dim][i + 1]
            part = part.narrow(dim, start, stop - start)
            offset.append(start)
        shards.append(Shard(part.clone(), tuple(tensor.shape), global_offset=tuple(offset)))
    return shards


def blank(shard: Shard) -> Shard:
    """Give the same shard with zeros in it."""
    return Shard(
        torch.zeros_like(shard.tensor), shard.global_shape, global_offset=shard.global_offset
    )


def blank_of(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: blank(value) if isinstance(value, Shard) else torch.zeros_like(value)
        for name, value in state.items()
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        one, other = (v.tensor if isinstance(v, Shard) else v for v in (found[name], value))
        assert torch.equal(one, other), name
