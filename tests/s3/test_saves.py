from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from typing import TYPE_CHECKING, Any

import aiobotocore.session
import pytest
import torch

from ckptio import Engine
from ckptio.config import KiB, MiB
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointError,
    CommitConflictError,
    ConfigError,
    StorageError,
)
from ckptio.events import RequestRetried
from ckptio.storage.file_names import ATTEMPT_PREFIX
from tests.conftest import open_files
from tests.rig import assert_same, random_state
from tests.s3.proxy import Fault, Proxy, Request, answer
from tests.s3.rig import PART_NBYTES, config_for, keys_in, new_url, uploads_in
from tests.s3.servers import BUCKET

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio.events import Event
    from tests.s3.servers import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")

_PREFIX_START = len(f"s3://{BUCKET}/")


def left_at(server: Server, url: str) -> tuple[list[str], list[str]]:
    """List the objects and the uploads under a URL, the bucket's name left out."""
    prefix = url[_PREFIX_START:]
    return keys_in(server, prefix), uploads_in(server, prefix)


def stage(name: str) -> Callable[[Request], bool]:
    """Say which requests of a save belong to a stage of it."""
    return {
        "mark": lambda r: ".attempt-" in r.key and r.method == "PUT",
        "begin": lambda r: r.method == "POST" and "uploads" in r.query,
        "part": lambda r: "partNumber" in r.query,
        "second part": lambda r: r.query.get("partNumber") == "2",
        "complete": lambda r: r.method == "POST" and "uploadId" in r.query,
        "look": lambda r: r.method == "HEAD" and ".safetensors" in r.key,
        "small": lambda r: r.method == "PUT" and ".safetensors" in r.key and not r.query,
        "commit": lambda r: r.method == "PUT" and r.key.endswith("manifest.json"),
    }[name]


STAGES = ("mark", "begin", "part", "second part", "complete", "look", "commit")


@pytest.mark.parametrize("where", STAGES)
async def test_a_save_that_is_refused_leaves_nothing(server: Server, where: str) -> None:
    """Wherever the server says no: no object, no upload; and the next one goes through."""
    url, state = new_url(), random_state([2 * PART_NBYTES, 100])
    chosen = stage(where)
    async with Proxy(server) as proxy, Engine(config_for(proxy.server)) as engine:
        proxy.decide = lambda r: Fault(answer=answer(403, "AccessDenied")) if chosen(r) else None
        with pytest.raises(StorageError, match=r"AccessDenied|Forbidden"):
            await engine.save(state, url)
        assert left_at(server, url) == ([], [])
        proxy.decide = lambda _: None
        await engine.save(state, url)
        assert_same(await engine.load(url), state)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_what_keeps_an_object_from_being_made_is_what_is_told(
    moto: Server, client: str
) -> None:
    """Not what comes of looking whether it was, which has no words."""

    def decide(request: Request) -> Fault | None:
        if stage("complete")(request):
            return Fault(answer=answer(400, "ExpiredToken"))
        return Fault(answer=answer(400)) if stage("look")(request) else None

    state = random_state([2 * PART_NBYTES])
    async with (
        Proxy(moto) as proxy,
        Engine(config_for(proxy.server, s3_client=client)) as engine,
    ):
        proxy.decide = decide
        with pytest.raises(StorageError, match=r"cannot complete .*ExpiredToken"):
            await engine.save(state, new_url())


@pytest.mark.parametrize("where", [*STAGES, "small"])
@pytest.mark.parametrize("is_answered", [False, True])
async def test_a_save_that_is_cancelled_leaves_nothing(
    server: Server, where: str, *, is_answered: bool
) -> None:
    """Wherever it is: no object, no upload; or it was too late and all of it is there."""
    sizes = [100] if where == "small" else [2 * PART_NBYTES, 100]
    url, state = new_url(), random_state(sizes)
    chosen, hold = stage(where), asyncio.Event()
    async with Proxy(server) as proxy, Engine(config_for(proxy.server)) as engine:
        proxy.decide = lambda r: Fault(hold=hold, forward=True) if chosen(r) else None

        async def save() -> None:
            await engine.save(state, url)

        task = asyncio.create_task(save())
        while not any(map(chosen, proxy.requests)):
            await asyncio.sleep(0)
        if is_answered:
            hold.set()
        task.cancel()
        for _ in range(1000):  # the engine hears of it, and waits for the answer
            await asyncio.sleep(0)
        hold.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        keys, uploads = left_at(server, url)
        assert uploads == []
        if keys:
            assert any(key.endswith("manifest.json") for key in keys)
            assert not any(".attempt-" in key for key in keys)
            assert_same(await engine.load(url), state)


@pytest.mark.parametrize("where", [*STAGES, "small"])
@pytest.mark.parametrize("after", [False, True])
async def test_an_answer_that_is_lost_costs_a_try(
    server: Server, where: str, *, after: bool
) -> None:
    """Whether or not the request was carried out, the save is there once, and whole."""
    sizes = [100] if where == "small" else [2 * PART_NBYTES, 100]
    url, state = new_url(), random_state(sizes)
    chosen = stage(where)
    left = [2]  # aiohttp asks a second time on its own

    def decide(request: Request) -> Fault | None:
        if not chosen(request) or not left[0]:
            return None
        left[0] -= 1
        return Fault(reset=True, forward=after)

    async with Proxy(server) as proxy, Engine(config_for(proxy.server)) as engine:
        proxy.decide = decide
        await engine.save(state, url)
        assert_same(await engine.load(url), state)
        manifest = await engine.inspect(url)
    keys, _ = left_at(server, url)
    names = {key.rpartition("/")[2] for key in keys}
    # the mark stays where a late commit may come: these stores are not trusted with conditions
    mark = {ATTEMPT_PREFIX + manifest.save_id} if where == "commit" else set()
    assert names - mark == {"manifest.json", *(file.name for file in manifest.files)}


@pytest.mark.parametrize("after", [False, True])
async def test_a_commit_that_says_200_and_fails_is_sent_again(
    server: Server, *, after: bool
) -> None:
    """What is there decides, not what the answer says."""
    url, state = new_url(), random_state([100])
    chosen, left = stage("commit"), [1]

    def decide(request: Request) -> Fault | None:
        if not chosen(request) or not left[0]:
            return None
        left[0] -= 1
        return Fault(answer=answer(200, "InternalError"), forward=after)

    async with Proxy(server) as proxy, Engine(config_for(proxy.server)) as engine:
        proxy.decide = decide
        await engine.save(state, url)
        assert_same(await engine.load(url), state)


async def test_a_commit_that_somebody_else_won_is_a_conflict(server: Server) -> None:
    """Also when the answer that says so is lost: bytes of the other one stay."""
    url, ours, theirs = new_url(), random_state([100], 1), random_state([100], 2)
    chosen, hold = stage("commit"), asyncio.Event()
    async with (
        Proxy(server) as proxy,
        Engine(config_for(proxy.server)) as engine,
        Engine(config_for(server)) as other,
    ):
        proxy.decide = lambda r: Fault(hold=hold, forward=True) if chosen(r) else None
        handle = engine.save(ours, url)
        while not any(map(chosen, proxy.requests)):
            await asyncio.sleep(0)
        await other.save(theirs, url)
        hold.set()
        with pytest.raises(CommitConflictError):
            await handle
        assert_same(await other.load(url), theirs)
        manifest = await other.inspect(url)
    keys, _ = left_at(server, url)
    assert len(keys) == 1 + len(manifest.files)


async def test_a_commit_whose_predecessor_goes_meanwhile_stands(server: Server) -> None:
    """There is nothing to replace any more, and nobody else who committed."""
    url, state = new_url(), random_state([100], 2)
    chosen, hold = stage("commit"), asyncio.Event()
    async with Proxy(server) as proxy, Engine(config_for(proxy.server)) as engine:
        await engine.save(random_state([100], 1), url)
        proxy.requests.clear()
        proxy.decide = lambda r: Fault(hold=hold, forward=True) if chosen(r) else None
        handle = engine.save(state, url, overwrite=True)
        while not any(map(chosen, proxy.requests)):
            await asyncio.sleep(0)
        with contextlib.closing(server.client()) as client:
            client.delete_object(Bucket=BUCKET, Key=f"{url[_PREFIX_START:]}/manifest.json")
        hold.set()
        await handle
        assert_same(await engine.load(url), state)


async def test_an_object_of_another_size_is_no_data_file(moto: Server) -> None:
    """A server that lost a part says so only to who asks."""
    url = new_url()

    def decide(request: Request) -> Fault | None:
        if not stage("look")(request):
            return None
        head = "Content-Length: 1000\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT"
        text = f"HTTP/1.1 200 OK\r\nConnection: close\r\n{head}\r\n\r\n"
        return Fault(answer=text.encode())

    async with Proxy(moto) as proxy, Engine(config_for(proxy.server)) as engine:
        proxy.decide = decide
        with pytest.raises(StorageError, match="has 1000 bytes"):
            await engine.save(random_state([2 * PART_NBYTES]), url)
    assert left_at(moto, url) == ([], [])


async def test_a_large_manifest_is_written_in_parts(server: Server) -> None:
    """What commits is small, and no part of what was written is left when it goes."""
    url, state = new_url(), {"words": "x" * (9 * MiB), "small": torch.ones(3)}
    async with Proxy(server) as proxy, Engine(config_for(proxy.server)) as engine:
        await engine.save(state, url)
        (commit,) = proxy.sent("PUT", "/manifest.json")
        assert commit.nbytes < KiB
        loaded = await engine.load(url)
        assert loaded["words"] == state["words"]
        keys, uploads = left_at(server, url)
        assert (len(keys), uploads) == (3, [])
        await engine.save({"small": torch.ones(3)}, url, overwrite=True)
        assert len(left_at(server, url)[0]) == 2


async def test_one_tensor_costs_one_request(server: Server) -> None:
    """4 MiB out of an object of 64 MiB: one GET of as much and a block."""
    url, state = new_url(), random_state([4 * MiB] * 15 + [4 * MiB - 8 * KiB])
    async with Proxy(server) as proxy, Engine(config_for(proxy.server)) as engine:
        block_nbytes = config_for(server).block_nbytes
        await engine.save(state, url)
        (file,) = (await engine.inspect(url)).files
        assert file.nbytes in range(63 * MiB, 64 * MiB + 64 * KiB)
        proxy.requests.clear()
        found = await engine.load(url, select=lambda name: name == "tensor7")
        assert torch.equal(found["tensor7"], state["tensor7"])
        (request,) = proxy.sent("GET", ".safetensors")
        assert request.answer_nbytes <= 4 * MiB + block_nbytes


async def test_what_is_unchanged_costs_one_look(server: Server) -> None:
    """A HEAD for each request, and no GET; another checkpoint is read anew."""
    url = new_url()
    async with Proxy(server) as proxy, Engine(config_for(proxy.server)) as engine:
        await engine.save(random_state([100], 1), url)
        manifest = await engine.inspect(url)
        proxy.requests.clear()
        for _ in range(3):
            assert await engine.inspect(url) is manifest
        assert (proxy.count("HEAD"), len(proxy.requests)) == (3, 3)
        async with Engine(config_for(server)) as other:
            await other.save(random_state([100], 2), url, overwrite=True)
        assert (await engine.inspect(url)).save_id != manifest.save_id
        assert proxy.count("GET", "manifest.json") == 1


async def test_what_is_trusted_costs_no_look(server: Server) -> None:
    """Within `cache_ttl_s` there is no request for the manifest; what was replaced is noticed."""
    url = new_url()
    async with (
        Proxy(server) as proxy,
        Engine(config_for(proxy.server, cache_ttl_s=3600)) as engine,
        Engine(config_for(server)) as other,
    ):
        old, new = random_state([100], 1), random_state([100], 2)
        await other.save(old, url)
        assert_same(await engine.load(url), old)
        proxy.requests.clear()
        assert_same(await engine.load(url), old)
        assert not [request for request in proxy.requests if "manifest.json" in request.key]
        await other.save(new, url, overwrite=True)
        with pytest.raises(CheckpointChangedError):  # its files are gone
            await engine.load(url)
        assert_same(await engine.load(url), new)


async def test_requests_are_not_sent_by_the_trainers_thread(server: Server) -> None:
    """They are made, signed and sent on the thread of the engine."""
    seen: set[str] = set()
    session = aiobotocore.session.AioSession()
    session.register("before-sign.s3", lambda **_: seen.add(threading.current_thread().name))
    url, state = new_url(), random_state([2 * PART_NBYTES])
    options = {**server.options, "session": session}
    async with Engine(config_for(server, storage_options=options)) as engine:
        await engine.save(state, url)
        assert_same(await engine.load(url), state)
    assert len(seen) == 1
    assert threading.current_thread().name not in seen


async def test_thirty_saves_hold_on_to_nothing(server: Server) -> None:
    """Neither connections nor threads nor tasks are left, in the engine or behind it."""
    before = open_files()
    for _ in range(2):
        async with Engine(config_for(server)) as engine:
            counts = []
            for _ in range(15):
                await engine.save(random_state([1000]), new_url())
                counts.append((len(open_files()), threading.active_count()))
            assert max(counts[5:]) <= max(counts[:5])
    gc.collect()
    assert open_files() == before


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_parts_that_are_too_small_are_not_even_sent(moto: Server, client: str) -> None:
    """S3 says no when it has got all of them."""
    url = new_url()
    config = config_for(moto, s3_client=client, slab_nbytes=PART_NBYTES - MiB)
    async with Engine(config) as engine:
        with pytest.raises(ConfigError, match=f"at least {PART_NBYTES} bytes; raise slab_nbytes"):
            await engine.save(random_state([PART_NBYTES]), url)
    assert left_at(moto, url) == ([], [])


async def test_a_server_that_is_busy_is_asked_again(moto: Server) -> None:
    """Each further try is an event; the save goes through."""
    url, state = new_url(), random_state([100])
    events: list[Event] = []
    left = [3]

    def decide(request: Request) -> Fault | None:
        if request.method != "PUT" or not left[0]:
            return None
        left[0] -= 1
        return Fault(answer=answer(503, "SlowDown"))

    async with (
        Proxy(moto) as proxy,
        Engine(config_for(proxy.server), observer=events.append) as engine,
    ):
        proxy.decide = decide
        await engine.save(state, url)
    retried = [event for event in events if isinstance(event, RequestRetried)]
    assert len(retried) == 3
    assert all("SlowDown" in str(event.error) for event in retried)


async def test_a_server_that_is_down_is_given_up(moto: Server) -> None:
    """After as many tries as allowed, with an error that names the object."""
    options: dict[str, Any] = {**moto.options, "endpoint_url": "http://127.0.0.1:9"}
    config = config_for(moto, storage_options=options, max_retries=1)
    async with Engine(config) as engine:
        with pytest.raises(CheckpointError, match=r"connection to 127\.0\.0\.1:9 failed.*2 tries"):
            await engine.save(random_state([100]), new_url())
