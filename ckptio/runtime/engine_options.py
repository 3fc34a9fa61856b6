"""Checks of what an engine is given.

They need no engine, so that whoever makes one later can refuse bad options at once.
"""

from __future__ import annotations

import inspect

from ckptio._texts import shown
from ckptio.config import CheckpointConfig
from ckptio.errors import ConfigError


def config_of(config: object) -> CheckpointConfig:
    """Give the options of an engine; the defaults for `None`.

    Raises:
        ConfigError: `config` is something else.
    """
    if config is None:
        return CheckpointConfig()
    if not isinstance(config, CheckpointConfig):
        raise ConfigError(f"config= is a CheckpointConfig, not {shown(config)}")
    return config


def require_observer(observer: object) -> None:
    """Refuse what cannot take events.

    Raises:
        ConfigError: `observer` cannot be called, or would have to be awaited.
    """
    if observer is None:
        return
    call = getattr(type(observer), "__call__", None)  # noqa: B004  # of an object that is called
    is_async = inspect.iscoroutinefunction(observer) or inspect.iscoroutinefunction(call)
    if not callable(observer) or is_async:
        raise ConfigError(f"observer= is a plain function of one event, not {shown(observer)}")


def require_ranks(ranks: object) -> None:
    """Refuse what cannot say which ranks take part. Process groups are looked at on entering.

    Raises:
        ConfigError: `ranks` is `None`, or a word that means nothing.
    """
    if ranks is None or (isinstance(ranks, str) and ranks not in ("auto", "solo")):
        raise ConfigError(f"ranks= is 'auto', 'solo' or a process group, not {shown(ranks)}")


def is_word(value: object, word: str) -> bool:
    """Whether a value is a certain string; arrays and the like are not even compared."""
    return isinstance(value, str) and value == word
