"""Every request of a save, of an overwrite and of a load is hit once.

By one fault each, in turn, and by all of them under `stress`. What comes of it is right, or a
typed error. Nothing is committed that is not whole, what was there before stays, and nothing
is left behind unless that was said.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import Engine
from ckptio.config import MiB
from ckptio.errors import CheckpointError, CheckpointNotFoundError
from ckptio.events import CleanupFailed
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.storage.file_names import ATTEMPT_PREFIX
from ckptio.testing import EventLog
from tests.s3.fault_proxy import FAULTS, HONEST, FaultOnce, GoneFrom
from tests.s3.proxy import Proxy
from tests.s3.rig import PART_NBYTES, config_for, new_url
from tests.s3.servers import BUCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

    from tests.s3.proxy import Fault, Request
    from tests.s3.servers import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")

#: More than any of the three sends: a request that is not there ends a series.
MAX_REQUESTS = 60
NUM_AT_ONCE = 4
State = dict[str, torch.Tensor]


@pytest.fixture(params=["moto", pytest.param("ceph", marks=pytest.mark.real_s3)])
def server(request: pytest.FixtureRequest) -> Server:
    """Run a server: a simulation, or a real one."""
    found: Server = request.getfixturevalue(request.param)
    return found


clients = pytest.mark.parametrize("client", ["s3fs", "obstore"])
breadth = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.stress)])


def state_of(seed: int) -> State:
    """Make a state of a file in two parts and a small one."""
    generator = torch.Generator().manual_seed(seed)
    large = torch.randint(0, 256, (PART_NBYTES + 1,), dtype=torch.uint8, generator=generator)
    return {"large": large, "small": torch.full((3,), float(seed))}


NEW = state_of(1)
OLD = {"small": torch.zeros(5)}


def is_same(found: State, wanted: State) -> bool:
    """Whether two states are the same, bit by bit."""
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in found)


async def save(engine: Engine, url: str) -> None:
    await engine.save(NEW, url)


async def overwrite(engine: Engine, url: str) -> None:
    await engine.save(NEW, url, overwrite=True)


async def load(engine: Engine, url: str) -> State:
    found: State = await engine.load(url)
    return found


class Onlooker:
    """Sees what is in a bucket, undisturbed."""

    def __init__(self, server: Server, engine: Engine, client: Any) -> None:
        self.server = server
        self.engine = engine
        self._client = client

    async def loaded(self, url: str) -> State | None:
        """Load what is there; `None` if nothing is."""
        with contextlib.suppress(CheckpointNotFoundError):
            return await load(self.engine, url)
        return None

    async def expect_nothing_else(self, url: str) -> None:
        """Check that what is there is a checkpoint, or nothing, and that this is all.

        The mark of a save stays where a late request may bring its manifest back: these
        stores are not trusted to decide conditions.
        """
        expected, mark = [], ""
        with contextlib.suppress(CheckpointNotFoundError):
            manifest = await self.engine.inspect(url)
            expected = sorted([MANIFEST_NAME, *(file.name for file in manifest.files)])
            mark = ATTEMPT_PREFIX + manifest.save_id
        where = {"Bucket": BUCKET, "Prefix": url.partition("://")[2].partition("/")[2] + "/"}
        found = await asyncio.to_thread(self._client.list_objects_v2, **where)
        names = [entry["Key"].rpartition("/")[2] for entry in found.get("Contents", ())]
        assert [name for name in names if name != mark] == expected
        found = await asyncio.to_thread(self._client.list_multipart_uploads, **where)
        assert found.get("Uploads", []) == []


@contextlib.asynccontextmanager
async def onlooker(server: Server) -> AsyncIterator[Onlooker]:
    """Lend one."""
    with contextlib.closing(server.client()) as client:
        async with Engine(config_for(server, bucket_nbytes=MiB)) as engine:
            yield Onlooker(server, engine, client)


class Disturbed:
    """An engine whose requests go through a proxy.

    Attributes:
        hit: Whether there was a request to disturb, of what was tried last.
        error: What came of it; `None` if it was well.
        in_doubt: Whether it was said that something may be there.
    """

    def __init__(self, proxy: Proxy, engine: Engine, log: EventLog) -> None:
        self._proxy = proxy
        self._engine = engine
        self._log = log
        self.hit = False

    async def run(
        self,
        work: Callable[[Engine, str], Coroutine[Any, Any, State | None]],
        url: str,
        decide: Callable[[Request], Fault | None],
    ) -> State | None:
        """Do something, and note how it ended."""

        def watching(request: Request) -> Fault | None:
            fault = decide(request)
            self.hit = self.hit or fault is not None
            return fault

        self.hit, self.error = False, None
        self._log.events.clear()
        self._proxy.decide = watching
        try:
            return await work(self._engine, url)
        except CheckpointError as error:
            self.error = error
            return None
        finally:
            self._proxy.decide = lambda _: None
            said = "nobody knows" in str(self.error)
            self.in_doubt = said or bool(self._log.of(CleanupFailed))


@contextlib.asynccontextmanager
async def disturbed(server: Server, **options: Any) -> AsyncIterator[Disturbed]:
    """Lend one that gives an answer three seconds, and tries often."""
    defaults = {"request_timeout_s": 3.0, "bucket_nbytes": MiB, "max_writes": 2}
    log = EventLog()
    async with Proxy(server) as proxy:
        config = config_for(proxy.server, **{**defaults, **options})
        async with Engine(config, observer=log) as engine:
            yield Disturbed(proxy, engine, log)


async def each_request(
    server: Server,
    try_one: Callable[[Disturbed, int], Awaitable[None]],
    **options: Any,
) -> int:
    """Do something for each request that is sent, some at once; gives how many there are.

    Args:
        server: Where to.
        try_one: Disturbs request `number`, if there is one.
        **options: Of the engines.
    """
    numbers = iter(range(MAX_REQUESTS))
    end = MAX_REQUESTS

    async def work() -> None:
        nonlocal end
        async with disturbed(server, **options) as one:
            for number in numbers:
                if number >= end:
                    return
                await try_one(one, number)
                if not one.hit:
                    end = min(end, number)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(work())
    assert end < MAX_REQUESTS
    return end


def is_survived(fault: str, client: str) -> bool:
    """Whether a fault must not even make a save or a load fail.

    What obstore takes for the end of an upload is that (S3 itself answers parts with the truth).
    """
    return fault in HONEST and (client, fault) != ("obstore", "error in a 200")


def faults_for(number: int, client: str, *, every: bool) -> Sequence[str]:
    """Say what to do to a request: each fault, or the one whose turn it is."""
    names = list(FAULTS)
    return names if every else [names[(number + 3 * (client == "s3fs")) % len(names)]]


@clients
@breadth
async def test_a_save_is_whole_or_is_not(server: Server, client: str, *, every: bool) -> None:
    """And what is lost, late or an error for the moment does not even make it fail."""

    async def try_one(one: Disturbed, number: int) -> None:
        for fault in faults_for(number, client, every=every):
            url = new_url()
            await one.run(save, url, FaultOnce(number, fault))
            found = await eye.loaded(url)
            assert found is None or is_same(found, NEW)
            assert (one.error is None) == (found is not None) or one.in_doubt
            if not one.in_doubt:
                await eye.expect_nothing_else(url)
            assert one.error is None or not is_survived(fault, client)

    async with onlooker(server) as eye:
        assert await each_request(server, try_one, s3_client=client) > 10


@clients
@breadth
async def test_what_was_there_stays_until_the_new_is(
    server: Server, client: str, *, every: bool
) -> None:
    """Of an overwrite that fails, the old checkpoint is left, whole."""

    async def try_one(one: Disturbed, number: int) -> None:
        for fault in faults_for(number, client, every=every):
            url = new_url()
            await eye.engine.save(OLD, url)
            await one.run(overwrite, url, FaultOnce(number, fault))
            found = await eye.loaded(url)
            assert found is not None
            assert is_same(found, NEW) or is_same(found, OLD)
            assert (one.error is None) == is_same(found, NEW) or one.in_doubt
            if not one.in_doubt:
                await eye.expect_nothing_else(url)
            assert one.error is None or not is_survived(fault, client)

    async with onlooker(server) as eye:
        assert await each_request(server, try_one, s3_client=client) > 10


@clients
@breadth
async def test_what_is_loaded_is_right(server: Server, client: str, *, every: bool) -> None:
    """A changed byte is an error; everything else is tried again."""

    async def try_one(one: Disturbed, number: int) -> None:
        for fault in faults_for(number, client, every=every):
            url = new_url()  # of another one the manifest may be known
            await eye.engine.save(NEW, url)
            found = await one.run(load, url, FaultOnce(number, fault))
            assert (found is None) == (one.error is not None)
            assert found is None or is_same(found, NEW)
            assert one.error is None or not is_survived(fault, client)

    async with onlooker(server) as eye:
        assert await each_request(server, try_one, s3_client=client) > 3


@clients
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.stress
async def test_a_store_that_is_gone_keeps_what_it_has(
    server: Server, client: str, *, after: bool
) -> None:
    """Whenever it goes, and whether or not it still did what it was asked for."""

    async def try_one(one: Disturbed, number: int) -> None:
        url = new_url()
        await eye.engine.save(OLD, url)
        await one.run(overwrite, url, GoneFrom(number, after=after))
        found = await eye.loaded(url)
        assert found is not None
        assert is_same(found, NEW) or is_same(found, OLD)
        assert one.error is not None or is_same(found, NEW)
        assert one.error is None or one.in_doubt or is_same(found, OLD)

    options = {"s3_client": client, "max_retries": 1, "retry_timeout_s": 1.0}
    async with onlooker(server) as eye:
        assert await each_request(server, try_one, **options) > 10
