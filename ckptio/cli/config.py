"""The configuration of a command: the environment's, with the command's options for stores."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from ckptio.config import CheckpointConfig
from ckptio.errors import ConfigError
from ckptio.storage.resolve import remote_url

if TYPE_CHECKING:
    from collections.abc import Sequence


def config_for(paths: Sequence[str], storage_options: Sequence[str]) -> CheckpointConfig:
    """Give the options for a command.

    Args:
        paths: What it looks at.
        storage_options: `KEY=VALUE` each.

    Raises:
        ConfigError: One is malformed, or has no effect.
    """
    config = CheckpointConfig.from_env()
    if not storage_options:
        return config
    if all(remote_url(path) is None for path in paths):
        raise ConfigError("--storage-option has no effect on local paths")
    return dataclasses.replace(config, storage_options=dict(map(_option, storage_options)))


def _option(text: str) -> tuple[str, Any]:
    """Read an option. A value is text, unless it is a JSON object or list, or a JSON word.

    Not numbers: a key id may be nothing but digits.
    """
    key, equals, value = text.partition("=")
    if not key or not equals:  # not shown: it may be a secret
        raise ConfigError("--storage-option is KEY=VALUE, as in endpoint_url=http://localhost:9000")
    if value in ("true", "false", "null") or value[:1] in ("{", "["):
        try:
            return key, json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(f"the value of --storage-option {key}= is no JSON") from None
    return key, value
