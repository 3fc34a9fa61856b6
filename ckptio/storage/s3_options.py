"""URLs of S3 and their `storage_options`, as fsspec calls them: what client they make.

s3fs and botocore look for endpoints, regions and credentials in many places, of which this
knows a few. So what else has to go to the same place asks the client that was made.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import s3fs
from aiobotocore.session import AioSession
from botocore.config import Config
from botocore.loaders import Loader, create_loader
from fsspec.config import apply_config

from ckptio.errors import ConfigError

if TYPE_CHECKING:
    from ckptio.config import CheckpointConfig

#: What botocore takes for the name of a bucket, but for ARNs.
_BUCKET = re.compile(r"[a-zA-Z0-9.\-_]{1,255}")
_CHECKSUMS = ("request_checksum_calculation", "response_checksum_validation")
#: Other names of options.
SYNONYMS = {"username": "key", "password": "secret"}
#: What botocore calls the region of a client that has none.
_NOWHERE = "aws-global"


def split_url(url: str) -> tuple[str, str]:
    """Split a URL into its bucket and the prefix in it.

    Raises:
        ConfigError: One of them is missing, or cannot be one.
    """
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if bucket.startswith("arn:"):
        raise ConfigError(
            f"{url!r} has an ARN instead of a bucket; the alias of an access point is taken for"
            " one: s3://NAME-s3alias/PREFIX"
        )
    if not bucket or not prefix:
        raise ConfigError(f"{url!r} has to be s3://BUCKET/PREFIX")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{url!r} has {bucket!r} for a bucket; names of buckets are letters, digits, dots,"
            " hyphens and underscores"
        )
    return bucket, prefix.rstrip("/")


def all_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Add what fsspec is configured to give s3fs (`FSSPEC_S3_…`, its files) to options.

    Raises:
        ConfigError: An option is given by both of its names.
    """
    found = dict(apply_config(s3fs.S3FileSystem, dict(options)))
    for synonym, name in SYNONYMS.items():
        if given := found.pop(synonym, None):
            if found.get(name):
                raise ConfigError(f"storage_options have {synonym} and {name}, which are one")
            found[name] = given
    return found


def endpoint_of(options: Mapping[str, Any]) -> str:
    """Give the endpoint that options or the environment name; empty for Amazon's own.

    A profile may name another one, which only the client knows.
    """
    return str(
        options.get("endpoint_url")
        or mapping_in(options, "client_kwargs").get("endpoint_url")
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or ""
    )


def mapping_in(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Give options that stand together under a name; none if it is not there, or `None`.

    Raises:
        ConfigError: It is something else; what, is not shown.
    """
    found = options.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} of the storage_options has to be a mapping of options")
    return found


def uses_tls(options: Mapping[str, Any]) -> bool:
    """Whether options alone make for a client that speaks TLS."""
    if endpoint := endpoint_of(options):
        return not endpoint.startswith("http://")
    client = mapping_in(options, "client_kwargs")
    return bool(client.get("use_ssl", options.get("use_ssl", True)))


def client_config(
    options: Mapping[str, Any], config: CheckpointConfig, *, has_tls: bool
) -> dict[str, Any]:
    """Give what botocore's `Config` takes; what the user says goes first."""
    given = mapping_in(options, "config_kwargs")
    ours: dict[str, Any] = {
        "connect_timeout": config.request_timeout_s,
        "read_timeout": config.request_timeout_s,
        "max_pool_connections": config.max_requests,
        "retries": {"total_max_attempts": 1},
        # botocore has them since 1.36, and did before what they are set to
        **{option: "when_required" for option in _CHECKSUMS if option in Config.OPTION_DEFAULTS},
    }
    if has_tls:
        ours["s3"] = {"payload_signing_enabled": False}
    return {**ours, **given, "s3": {**ours.get("s3", {}), **mapping_in(given, "s3")}}


def session_for(options: Mapping[str, Any]) -> AioSession:
    """Make a session as s3fs does, but for what botocore knows of Amazon's services.

    A session reads that anew from its files: 0.2 s of CPU on the engine's loop for each client.
    It is kept for all of them, as boto3 keeps it with its default session: 12 MB, until the
    process ends.
    """
    session = AioSession(**options)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


@functools.cache
def _loader(data_path: str | None) -> Loader:
    """Give what reads and keeps descriptions of services, from botocore's files and these."""
    return create_loader(data_path)


def is_amazon(url: str) -> bool:
    """Whether a client talks to Amazon's own servers."""
    host = urlsplit(url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Address:
    """Where a client of botocore's goes, and how.

    Attributes:
        endpoint: URL of the server, Amazon's own, too.
        region: Its region.
        is_virtual: Whether a bucket stands in the host, not in the path.
        signs_payload: Whether bodies are signed.
    """

    endpoint: str
    region: str
    is_virtual: bool = False
    signs_payload: bool = False


def address_of(client: Any) -> S3Address:
    """Ask a client where it goes."""
    meta = client.meta
    s3 = meta.config.s3 or {}
    region = meta.region_name
    return S3Address(
        endpoint=meta.endpoint_url,
        region=region if region and region != _NOWHERE else "us-east-1",
        is_virtual=s3.get("addressing_style") == "virtual"
        or bool(s3.get("use_accelerate_endpoint")),
        signs_payload=s3.get("payload_signing_enabled") is not False,
    )
