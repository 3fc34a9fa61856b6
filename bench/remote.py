"""Subjects of the cases with a store: saves, loads and raw limits, and what each is charged."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
from typing import TYPE_CHECKING, Any

import torch

from bench.harness import SECONDS, Clock, Metric, Subject
from bench.states import Proof, as_bytes, blank, state_nbytes
from bench.store import Relay
from bench.subjects import pool_for
from bench.ticks import P99, with_ticks
from ckptio import CheckpointConfig, Engine
from ckptio._threads import Threads
from ckptio.storage.stores import Stores
from tests.s3.servers import BUCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from bench.harness import Figures, Step
    from bench.states import State
    from bench.store import StorePeer
    from ckptio.config import S3Client
    from ckptio.storage.store import ObjectStore
    from tests.s3.servers import Server

#: Of this process, all its threads; not the server's.
CPU = Metric(key="cpu_s_per_gib", label="CPU s / GiB", digits=2)
#: What the server has sent for each byte that was wanted.
SENT = Metric(key="sent_ratio", label="sent / wanted", has_ratio=False, digits=3)
SAVE_METRICS = (SECONDS, CPU, P99)
LOAD_METRICS = (SECONDS, CPU, P99, SENT)
CLIENTS: tuple[S3Client, ...] = ("s3fs", "obstore")
_PIECE_NBYTES = 16 << 20
_NUM_WANTED = 4
_WANTED_NBYTES = 4 << 20
_NUM_AT_ONCE = 8


def config_for(server: Server, client: S3Client, nbytes: int) -> CheckpointConfig:
    """Give a configuration whose pool holds the state."""
    return CheckpointConfig(
        storage_options=server.options,
        s3_client=client,
        pool_nbytes=pool_for(nbytes),
        max_writes=_NUM_AT_ONCE,
        max_reads=_NUM_AT_ONCE,
    )


class Remote:
    """Makes subjects for one state on one server.

    Args:
        server: Where to.
        state: What is saved; loads fill it.
        stores: A client of each kind, on this loop.

    Attributes:
        nbytes: Bytes of the state.
        wanted: The tensors that are loaded alone.
    """

    def __init__(
        self, server: Server, state: State, stores: Mapping[S3Client, ObjectStore]
    ) -> None:
        self.server = server
        self.state = state
        self._stores = stores
        self.nbytes = state_nbytes(state)
        self.proof = Proof.of(state)
        near = sorted(state, key=lambda name: abs(state[name].nbytes - _WANTED_NBYTES))
        self.wanted = {name: state[name].clone() for name in near[:_NUM_WANTED]}
        self._sent: dict[str, float] = {}
        self._numbers = itertools.count()

    def new_url(self) -> str:
        """Name a place where nothing is."""
        return f"s3://{BUCKET}/bench-{next(self._numbers)}"

    async def remove(self, url: str) -> None:
        """Remove everything under a URL."""
        store = self._stores["s3fs"]
        prefix = url.partition("://")[2].partition("/")[2] + "/"
        await store.delete([info.key for info in await store.list(prefix)])

    def saves_ours(self, engine: Engine, client: S3Client) -> Subject:
        """Save with an engine, until the commit."""
        url = self.new_url()

        async def save() -> None:
            await engine.save(self.state, url)

        async def check() -> None:
            names = list(self.proof.samples)[-3:]
            found = await engine.load(url, select=lambda name: name in names)
            self.proof.check_some(found, names)

        async def clean() -> None:
            await self.remove(url)

        run = _charged(save, self.nbytes)
        name = f"ckptio ({client})"
        return Subject(name=name, kind="ckptio", run=run, check=check, clean=clean)

    def saves_peer(self, peer: StorePeer) -> Subject:
        """Save with a peer."""
        url = self.new_url()

        async def save() -> None:
            await asyncio.to_thread(peer.save, self.server, url, self.state)

        async def check() -> None:
            names = list(self.proof.samples)[-3:]
            found = {name: torch.empty_like(self.state[name]) for name in names}
            await asyncio.to_thread(peer.load, self.server, url, found)
            self.proof.check_some(found, names)

        async def clean() -> None:
            await self.remove(url)

        run = _charged(save, self.nbytes)
        return Subject(name=peer.name, run=run, check=check, clean=clean, missing=peer.missing)

    def puts_raw(self, client: S3Client) -> Subject:
        """Send the same bytes, as objects of one size."""
        url = self.new_url()
        prefix = url.partition("://")[2].partition("/")[2]
        pieces = _pieces(self.nbytes)

        async def put_one(number: int, piece: memoryview) -> None:
            await self._stores[client].put(f"{prefix}/{number}", piece)

        async def put() -> None:
            await _each(pieces, put_one)

        async def clean() -> None:
            await self.remove(url)

        name = f"limit: PUT of 16 MiB x {_NUM_AT_ONCE} ({client})"
        return Subject(name=name, kind="limit", run=_charged(put, self.nbytes), clean=clean)

    def loads_ours(
        self, engines: dict[str, Engine], client: S3Client, url: str, names: Sequence[str] = ()
    ) -> Subject:
        """Load with an engine, all or some tensors."""

        async def load(server: Server) -> None:
            if server is self.server:
                await self._load(engines[client], url, names)
            else:
                async with Engine(config_for(server, client, self.nbytes)) as engine:
                    await self._load(engine, url, names)

        return self._loads(f"ckptio ({client})", load, names, kind="ckptio")

    async def _load(self, engine: Engine, url: str, names: Sequence[str]) -> None:
        if names:
            found = await engine.load(url, select=lambda name: name in names)
            for name in names:
                self.state[name].copy_(found[name])
        else:
            await engine.load(url, into=self.state)

    def loads_peer(self, peer: StorePeer, url: str, names: Sequence[str] = ()) -> Subject:
        """Load with a peer, all or some tensors."""

        async def load(server: Server) -> None:
            into = {name: self.state[name] for name in names} if names else self.state
            await asyncio.to_thread(peer.load, server, url, into)

        return self._loads(peer.name, load, names, missing=peer.missing)

    def gets_raw(self, client: S3Client, url: str) -> Subject:
        """Receive as many bytes, in ranges of the same sizes."""
        key = url.partition("://")[2].partition("/")[2] + "/raw"

        pieces = _pieces(self.nbytes)

        async def get_one(number: int, room: memoryview) -> None:
            del number  # all of the same object: only their size counts
            await self._stores[client].get_into(key, 0, room)

        async def get() -> None:
            await _each(pieces, get_one)

        name = f"limit: GET of 16 MiB x {_NUM_AT_ONCE} ({client})"
        run = _charged(get, self.nbytes)
        return Subject(name=name, kind="limit", run=run)

    async def put_raw(self, url: str) -> None:
        """Write what `gets_raw` reads."""
        key = url.partition("://")[2].partition("/")[2] + "/raw"
        await self._stores["s3fs"].put(key, bytes(_PIECE_NBYTES))

    def _loads(
        self,
        name: str,
        load: Callable[[Server], Awaitable[None]],
        names: Sequence[str],
        **options: Any,
    ) -> Subject:
        wanted = {n: self.state[n] for n in names} if names else self.state
        nbytes = state_nbytes(wanted)

        async def direct() -> None:
            await load(self.server)

        charged = _charged(direct, nbytes)

        async def prepare() -> None:
            blank(wanted)

        async def run() -> Figures:
            figures = await charged()
            if name not in self._sent:  # once, beside the clock: the relay takes time
                relay = Relay(self.server)
                with relay as server:
                    await load(server)
                self._sent[name] = relay.sent_nbytes / nbytes
            return {**figures, SENT.key: self._sent[name]}

        async def check() -> None:
            if names:
                for n in names:  # as bytes: there may be NaNs
                    assert torch.equal(as_bytes(wanted[n]), as_bytes(self.wanted[n]))
            else:
                self.proof.check(self.state)

        return Subject(name=name, prepare=prepare, run=run, check=check, **options)


def _pieces(nbytes: int) -> list[memoryview]:
    """Give memory, touched, in pieces of one size but for the last."""
    memory = memoryview(bytearray(b"\x5a" * nbytes))
    return [memory[start : start + _PIECE_NBYTES] for start in range(0, nbytes, _PIECE_NBYTES)]


async def _each(
    pieces: Sequence[memoryview], work: Callable[[int, memoryview], Awaitable[None]]
) -> None:
    """Work on pieces, some at a time."""
    numbered = iter(enumerate(pieces))

    async def lane() -> None:
        for number, piece in numbered:
            await work(number, piece)

    async with asyncio.TaskGroup() as group:
        for _ in range(_NUM_AT_ONCE):
            group.create_task(lane())


def _charged(work: Step, nbytes: int) -> Callable[[], Awaitable[Figures]]:
    """Do the work on the trainer's loop, which ticks; say what it took of time and CPU."""

    async def run() -> Figures:
        figures: dict[str, float] = {}

        async def charged() -> None:
            clock, before = Clock(), _cpu_s()
            await work()
            figures[SECONDS.key] = clock.elapsed_s()
            figures[CPU.key] = (_cpu_s() - before) / nbytes * 2**30

        ticks = await with_ticks(charged)
        return {**figures, P99.key: ticks[P99.key]}

    return run


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextlib.asynccontextmanager
async def opened(server: Server, client: S3Client) -> AsyncIterator[ObjectStore]:
    """Lend a client on this loop."""
    config = CheckpointConfig(
        storage_options=server.options, s3_client=client, max_requests=_NUM_AT_ONCE
    )
    threads = Threads(2, "bench")
    stores = Stores(config, threads)
    try:
        store, _ = await stores.at(f"s3://{BUCKET}/x")[0].get()
        yield store
    finally:
        await stores.close()
        threads.shutdown()
