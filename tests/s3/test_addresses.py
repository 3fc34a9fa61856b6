"""Both clients of S3 go to one place, whatever the environment says beside the options."""

from __future__ import annotations

import asyncio
import contextlib
import os
import types
from typing import TYPE_CHECKING, Any

import fsspec.config
import pytest

from ckptio._threads import Threads
from ckptio.config import CheckpointConfig
from ckptio.errors import ConfigError
from ckptio.storage.s3_options import S3Address, address_of, endpoint_of, uses_tls
from ckptio.storage.stores import Stores

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

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
async def asked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[tuple[str, str]]]:
    """Stand in for every host; gives the URLs that are asked for, and the heads of requests."""
    requests: list[tuple[str, str]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        requests.append((head.split()[1], head))
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
        yield requests


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
    async with asked(monkeypatch) as requests:
        await write(client, options)
    assert [found for found, _ in requests] == [url, url]


@pytest.mark.parametrize(
    ("region", "expected"),
    [("eu-west-3", "eu-west-3"), ("aws-global", "us-east-1"), (None, "us-east-1")],
)
def test_a_client_without_a_region_is_in_amazons_first_one(
    region: str | None, expected: str
) -> None:
    """What botocore calls that is the name of no region: a signature with it is refused."""
    config = types.SimpleNamespace(s3=None)
    meta = types.SimpleNamespace(endpoint_url="https://a", region_name=region, config=config)
    address = address_of(types.SimpleNamespace(meta=meta))
    assert address == S3Address(endpoint="https://a", region=expected, signs_payload=True)


@pytest.mark.parametrize(
    ("s3", "expected"),
    [
        ({"addressing_style": "virtual"}, True),
        ({"use_accelerate_endpoint": True}, True),
        ({"addressing_style": "path", "use_accelerate_endpoint": False}, False),
    ],
)
def test_a_bucket_that_is_accelerated_stands_in_the_host(
    s3: dict[str, Any], *, expected: bool
) -> None:
    """As botocore has it, whatever it calls the style."""
    config = types.SimpleNamespace(s3=s3)
    meta = types.SimpleNamespace(endpoint_url="https://a", region_name="a", config=config)
    assert address_of(types.SimpleNamespace(meta=meta)).is_virtual == expected


def test_options_say_before_the_environment_where_a_server_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the variable for S3 alone before the one for all of Amazon's services."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    assert endpoint_of({}) == ""
    assert uses_tls({})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://all")
    assert endpoint_of({}) == "https://all"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3")
    assert endpoint_of({}) == "http://s3"
    assert not uses_tls({})
    inner = {"client_kwargs": {"endpoint_url": "https://inner"}}
    assert endpoint_of(inner) == "https://inner"
    assert endpoint_of({**inner, "endpoint_url": "https://outer"}) == "https://outer"


CONFIG = f"""\
[default]
endpoint_url = http://elsewhere.example
[profile mine]
endpoint_url = http://{HOST}
region = eu-west-3
s3 =
  addressing_style = virtual
"""
CREDENTIALS = "[mine]\naws_access_key_id = user\naws_secret_access_key = password\n"


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have a profile `mine`, and another that is the default."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(CONFIG)
    (tmp_path / "credentials").write_text(CREDENTIALS)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize("where", ["options", "environment", "fsspec"])
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_a_profile_says_where_data_goes(
    client: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifest and data go to its server, in its style; over plain HTTP, bodies are signed."""
    if where == "environment":
        monkeypatch.setenv("AWS_PROFILE", "mine")
    if where == "fsspec":
        monkeypatch.setitem(fsspec.config.conf, "s3", {"profile": "mine"})
    async with asked(monkeypatch) as requests:
        await write(client, {"profile": "mine"} if where == "options" else {})
    assert [url for url, _ in requests] == [f"http://bucket.{HOST}/run/data"] * 2
    for _, head in requests:
        assert "user/" in head
        assert "/eu-west-3/s3/" in head
        assert "unsigned-payload" not in head.lower()


@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_credentials_have_two_names(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As s3fs has them, wherever they come from; only one at a time."""
    options = {"endpoint_url": f"http://{HOST}", "username": "somebody"}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"password": "hidden"})
    async with asked(monkeypatch) as requests:
        await write(client, options)
    assert all("Credential=somebody/" in head for _, head in requests)
    with pytest.raises(ConfigError, match="username and key, which are one") as caught:
        await write(client, {**options, "key": "hidden"})
    assert "hidden" not in str(caught.value)
