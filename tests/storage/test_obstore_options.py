from __future__ import annotations

import dataclasses
import datetime as dt
from typing import TYPE_CHECKING, Any

import pytest

from ckptio._threads import Threads
from ckptio.config import CheckpointConfig
from ckptio.errors import ConfigError
from ckptio.storage.obstore import ObstoreBackend
from ckptio.storage.obstore_options import obstore_options
from ckptio.storage.s3 import S3Backend
from ckptio.storage.s3_options import S3Address
from ckptio.storage.store import RefusedError

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {"key": "user", "secret": "password"}
AMAZON = S3Address(endpoint="https://s3.us-east-1.amazonaws.com", region="us-east-1")
#: What obstore would take from the environment.
UNSAID = {
    "region": "us-east-1",
    "aws_endpoint_url_s3": "https://s3.us-east-1.amazonaws.com",
    "unsigned_payload": True,
    "virtual_hosted_style_request": False,
    "request_payer": False,
    "skip_signature": False,
}


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have neither credentials nor a region come from this machine."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.parametrize(
    ("options", "address", "config", "client"),
    [
        ({}, AMAZON, {}, {"allow_http": False}),
        (
            {"client_kwargs": {"region_name": "eu-west-1"}, "endpoint_url": "http://a:1"},
            S3Address(endpoint="http://a:1", region="eu-west-1", signs_payload=True),
            {
                "region": "eu-west-1",
                "aws_endpoint_url_s3": "http://a:1",
                "unsigned_payload": False,
            },
            {"allow_http": True},
        ),
        (
            {
                "config_kwargs": {
                    "s3": {"addressing_style": "virtual", "payload_signing_enabled": False}
                },
                "requester_pays": True,
            },
            dataclasses.replace(AMAZON, is_virtual=True),
            {"virtual_hosted_style_request": True, "request_payer": True},
            {"allow_http": False},
        ),
        (
            {
                "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "id"},
                "client_kwargs": {"verify": False},
            },
            AMAZON,
            {"server_side_encryption": "aws:kms", "sse_kms_key_id": "id"},
            {"allow_http": False, "allow_invalid_certificates": True},
        ),
    ],
)
def test_options_have_obstores_words(
    options: dict[str, Any], address: S3Address, config: dict[str, Any], client: dict[str, Any]
) -> None:
    """As far as they have the same meaning; what is not wanted is said, too."""
    found = obstore_options({**KEYS, **options}, address)
    assert found.config == {**UNSAID, **config}
    assert found.client == client


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://localhost:9000", "http://bucket.localhost:9000"),
        ("https://s3.example.com/", "https://bucket.s3.example.com/"),
    ],
)
def test_a_bucket_is_in_the_host_only_if_that_is_wanted(endpoint: str, expected: str) -> None:
    """Else the first part of a key would be taken for the bucket."""
    address = S3Address(endpoint=endpoint, region="here")
    found = obstore_options(KEYS, address).config_for("bucket")
    assert found["aws_endpoint_url_s3"] == endpoint
    virtual = dataclasses.replace(address, is_virtual=True)
    found = obstore_options(KEYS, virtual).config_for("bucket")
    assert found["aws_endpoint_url_s3"] == expected


def test_credentials_are_handed_over_by_a_function() -> None:
    """So they are in no `repr` of what holds the options; a token goes with its key."""
    found = obstore_options({**KEYS, "token": "temporary"}, AMAZON)
    assert found.credentials is not None
    assert found.credentials() == {
        "access_key_id": "user",
        "secret_access_key": "password",
        "token": "temporary",
        "expires_at": None,
    }
    assert "password" not in repr(found)
    assert "temporary" not in repr(found)


def test_credentials_come_from_where_botocore_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are asked for again, for they may be renewed there."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "as-well")
    found = obstore_options({}, AMAZON)
    assert found.credentials is not None
    given = found.credentials()
    assert given["access_key_id"] == "from-the-environment"
    assert given["expires_at"] > dt.datetime.now(dt.UTC)  # else before every request


def test_a_certificate_is_read_from_its_file(tmp_path: Path) -> None:
    """What is in it is handed over."""
    file = tmp_path / "ca.pem"
    file.write_bytes(b"a certificate")
    found = obstore_options({**KEYS, "client_kwargs": {"verify": str(file)}}, AMAZON)
    assert found.client == {"allow_http": False, "root_certificate": b"a certificate"}


def test_without_credentials_nothing_is_signed_only_if_that_is_wanted() -> None:
    """Who forgot them is told so."""
    assert obstore_options({"anon": True}, AMAZON).config["skip_signature"] is True
    with pytest.raises(ConfigError, match="no credentials"):
        obstore_options({}, AMAZON)


def test_an_option_that_would_have_no_effect_is_refused_by_name() -> None:
    """Its value may be secret, and is not shown."""
    options = {**KEYS, "config_kwargs": {"proxies": "mine"}, "version_aware": "yours"}
    with pytest.raises(ConfigError, match=r"config_kwargs\.proxies, version_aware") as caught:
        obstore_options(options, AMAZON)
    assert "mine" not in str(caught.value)
    assert "yours" not in str(caught.value)


def test_the_client_is_one_of_two() -> None:
    """A third would be nobody's."""
    with pytest.raises(ConfigError, match="s3_client must be s3fs or obstore, not 'boto3'"):
        CheckpointConfig(s3_client="boto3")  # type: ignore[arg-type]  # what is tested
    assert CheckpointConfig.from_env({"CKPTIO_S3_CLIENT": "obstore"}).s3_client == "obstore"


@pytest.mark.parametrize(
    "options",
    [
        {"profile": "nobody"},
        {**KEYS, "client_kwargs": {"verify": "/nobody/nowhere.pem"}},
        {**KEYS, "s3_additional_kwargs": "nobody"},
        {**KEYS, "config_kwargs": {"s3": "nobody"}},
        {**KEYS, "client_kwargs": "nobody"},
    ],
)
async def test_an_option_of_another_kind_is_a_typed_error(options: dict[str, Any]) -> None:
    """Which does not repeat it."""
    with pytest.raises(ConfigError) as caught:
        await open_bucket(options)
    assert "nobody" not in repr(caught.value)
    assert caught.value.__context__ is None


async def test_an_option_that_is_none_was_not_given() -> None:
    """As s3fs has it."""
    none = dict.fromkeys(("client_kwargs", "config_kwargs", "s3_additional_kwargs", "token"))
    await open_bucket({**KEYS, **none})


@pytest.mark.parametrize(
    "prefix", ["/x", "a//b", "./a", "a/../b", "a/.", "a\tb", "a\nb", "a\x7f", "a\udcff"]
)
def test_a_prefix_that_obstore_cannot_name_is_refused(prefix: str) -> None:
    """It would write to another key, or fail in the middle of a save; s3fs can."""
    url = f"s3://bucket/{prefix}"
    with pytest.raises(ConfigError, match="s3_client='s3fs'"):
        ObstoreBackend().split(url, KEYS)
    assert S3Backend().split(url, KEYS)[1] == prefix


@pytest.mark.parametrize("prefix", [".a/b", "a..b/...", "é \x80", "a%2Fb\\c", "~#?"])
def test_a_prefix_that_only_looks_odd_is_taken(prefix: str) -> None:
    """As it is."""
    assert ObstoreBackend().split(f"s3://bucket/{prefix}", KEYS)[1] == prefix


async def test_a_key_that_obstore_cannot_name_is_a_typed_error() -> None:
    """Also if it is found out as the request is made."""
    threads = Threads(1, "test")
    store = await ObstoreBackend().open("s3://bucket/a", KEYS, CheckpointConfig(), threads)
    for request in (lambda: store.put("a//b", b"data"), lambda: store.upload("a//b")):
        with pytest.raises(RefusedError):
            await request()
    await store.close()
    threads.shutdown()


async def open_bucket(options: dict[str, Any]) -> None:
    """Open a bucket, and close it."""
    threads, backend = Threads(1, "test"), ObstoreBackend()
    try:
        backend.split("s3://bucket/a", options)
        await (await backend.open("s3://bucket/a", options, CheckpointConfig(), threads)).close()
    finally:
        threads.shutdown()
