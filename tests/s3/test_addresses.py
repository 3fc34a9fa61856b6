"""Both clients of S3 go to one place, whatever the environment says beside the options."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from ckptio._aio import Threads
from ckptio.config import CheckpointConfig
from ckptio.storage.stores import Stores

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")

HOST = "store.example"
OPTIONS = {
    "key": "user",
    "secret": "password",
    "endpoint_url": f"http://{HOST}",
    "client_kwargs": {"region_name": "us-east-1"},
}
STYLES = [
    ("path", f"http://{HOST}/bucket/run/data"),
    ("virtual", f"http://bucket.{HOST}/run/data"),
]


@contextlib.asynccontextmanager
async def asked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """Stand in for every host; gives what is asked of which."""
    urls: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        urls.append(head.split()[1])
        nbytes = next(int(x[15:]) for x in head.splitlines() if x.lower()[:15] == "content-length:")
        if "100-continue" in head.lower():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await reader.readexactly(nbytes)
        writer.write(
            b'HTTP/1.1 200 OK\r\nETag: "a"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        yield urls


async def write(client: str, options: dict[str, Any]) -> None:
    """Write an object of data, and one as manifests are."""
    config = CheckpointConfig(s3_client=client, storage_options=options)  # type: ignore[arg-type]  # one of them
    threads = Threads(2, "test")
    stores = Stores(config, threads)
    try:
        store, _ = await stores.at("s3://bucket/run")[0].get()
        await store.put("run/data", b"data")
        await store.put("run/data", b"manifest", absent=True)
    finally:
        await stores.close()
        threads.shutdown()


@pytest.mark.parametrize(("style", "url"), STYLES)
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_a_bucket_is_where_the_options_say(
    client: str, style: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the host or in the path; not where obstore's own variables say."""
    flipped = "true" if style == "path" else "false"
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", flipped)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://elsewhere.example")
    options = {**OPTIONS, "config_kwargs": {"s3": {"addressing_style": style}}}
    async with asked(monkeypatch) as urls:
        await write(client, options)
    assert urls == [url, url]
