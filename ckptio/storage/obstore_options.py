"""What fsspec calls `storage_options`, in obstore's words.

The options are s3fs's, whichever client carries the bytes, so that changing the client is
changing one word. An option that obstore has no word for is an error: it would have no
effect on most of what is sent.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import botocore.session

from ckptio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptio.storage.s3_options import S3Address

#: obstore asks for credentials again when less than five minutes of this are left; botocore
#: renews its own ten minutes before they end.
_CREDENTIALS_HOLD = dt.timedelta(minutes=15)
#: Goes before `endpoint`, and before what the environment names.
_ENDPOINT = "aws_endpoint_url_s3"
_VIRTUAL = "virtual_hosted_style_request"
#: What an address is made of.
_OF_ADDRESS = (
    ("endpoint_url",),
    ("use_ssl",),
    ("client_kwargs", "endpoint_url"),
    ("client_kwargs", "region_name"),
    ("client_kwargs", "use_ssl"),
    ("config_kwargs", "s3", "addressing_style"),
    ("config_kwargs", "s3", "payload_signing_enabled"),
)
_ENCRYPTION = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObstoreOptions:
    """What `obstore.store.S3Store` takes.

    Attributes:
        config: Of the store; nothing secret. Says also what is not wanted: what it does not
            say, obstore takes from the environment.
        client: Of its HTTP client.
        credentials: Gives credentials; `None` for requests that are not signed.
    """

    config: dict[str, Any]
    client: dict[str, Any]
    credentials: Callable[[], dict[str, Any]] | None

    def config_for(self, bucket: str) -> dict[str, Any]:
        """Give the configuration of a bucket: obstore wants it in the host, where it is to be."""
        if not self.config[_VIRTUAL]:
            return self.config
        scheme, _, rest = str(self.config[_ENDPOINT]).partition("://")
        return {**self.config, _ENDPOINT: f"{scheme}://{bucket}.{rest}"}


def obstore_options(options: Mapping[str, Any], address: S3Address) -> ObstoreOptions:
    """Translate options. Blocks: credentials are looked for as botocore does.

    Args:
        options: As s3fs takes them.
        address: Where s3fs's client goes; so what they say of that is not looked at again.

    Raises:
        ConfigError: There is no word for one.
    """
    given = _Given(options)
    for path in _OF_ADDRESS:
        given.take(*path)
    config: dict[str, Any] = {
        "region": address.region,
        _ENDPOINT: address.endpoint,
        _VIRTUAL: address.is_virtual,
        "unsigned_payload": not address.signs_payload,
        "request_payer": bool(given.take("requester_pays")),
    }
    for name, ours in _ENCRYPTION.items():
        value = given.take("s3_additional_kwargs", name)
        if value is not None:
            config[ours] = value
    client = _client(given, address.endpoint)
    credentials = _credentials(given, botocore.session.Session(profile=given.take("profile")))
    config["skip_signature"] = credentials is None
    given.expect_nothing()
    return ObstoreOptions(config=config, client=client, credentials=credentials)


def _client(given: _Given, endpoint: str) -> dict[str, Any]:
    """Say how to connect."""
    client: dict[str, Any] = {"allow_http": endpoint.startswith("http://")}
    verify = given.take("client_kwargs", "verify")
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        with open(verify, "rb") as file:
            client["root_certificate"] = file.read()
    return client


class _Given:
    """Options of which some were understood."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._left = _copied(options)

    def take(self, *path: str) -> Any:
        """Give an option, `None` without it, and count it as understood."""
        *outer, name = path
        level: Any = self._left
        for key in outer:
            level = level.get(key, {})
            if not isinstance(level, dict):
                raise ConfigError(f"{key} of the storage_options has to be a mapping of options")
        return level.pop(name, None)

    def expect_nothing(self) -> None:
        """Refuse what was not taken; says names, not values.

        Raises:
            ConfigError: Something was not taken.
        """
        left = sorted(_names(self._left))
        if left:
            raise ConfigError(
                f"s3_client='obstore' has no word for {', '.join(left)} of the storage_options;"
                " use s3_client='s3fs'"
            )


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Copy options; `None` is what s3fs takes for one that was not given."""
    return {
        key: _copied(value) if isinstance(value, dict) else value
        for key, value in options.items()
        if value is not None
    }


def _names(options: Mapping[str, Any], outer: str = "") -> list[str]:
    """Name what is left, without values."""
    found = []
    for key, value in options.items():
        if isinstance(value, dict):
            found += _names(value, f"{outer}{key}.")
        else:
            found.append(f"{outer}{key}")
    return found


def _credentials(
    given: _Given, session: botocore.session.Session
) -> Callable[[], dict[str, Any]] | None:
    """Find who gives credentials: the options, or who botocore asks."""
    key, secret, token = given.take("key"), given.take("secret"), given.take("token")
    if given.take("anon"):
        return None
    if key and secret:
        own = {"access_key_id": key, "secret_access_key": secret, "token": token}
        return lambda: {**own, "expires_at": None}
    found = session.get_credentials()
    if found is None:
        raise ConfigError("there are no credentials for s3://; give key and secret, or anon=True")

    def frozen() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": dt.datetime.now(dt.UTC) + _CREDENTIALS_HOLD,
        }

    return frozen
