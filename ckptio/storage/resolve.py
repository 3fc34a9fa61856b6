"""From what the user calls a checkpoint to the storage that holds it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptio.errors import ConfigError
from ckptio.storage.local import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.storage.interface import Storage

PathLike = str | os.PathLike[str]


def resolve_storage(
    path: PathLike, config: CheckpointConfig, executor: Executor, emit: Callable[[Event], None]
) -> Storage:
    """Find the storage for a path or URL. Touches nothing.

    Args:
        path: A path, an `os.PathLike`, or a `file://` URL.
        config: Options of the engine.
        executor: Threads for calls that block.
        emit: Takes events.

    Raises:
        ConfigError: `path` is empty, no path at all, or a URL of another kind.
    """
    return LocalStorage(local_path(path), config, executor, emit)


def local_path(path: PathLike) -> str:
    """Give the local path that `path` names.

    Raises:
        ConfigError: It names none.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"a checkpoint's path is a str or os.PathLike, not {path!r}")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{path!r} is no path of a checkpoint")
    if "://" not in text:
        return os.path.expanduser(text)
    from fsspec.core import split_protocol  # noqa: PLC0415  # 50 ms that plain paths do not need
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415  # as above

    protocol, _ = split_protocol(text)
    if protocol not in ("file", "local"):
        raise ConfigError(
            f"{text!r}: this version of ckptio saves to local and mounted file systems only;"
            " use a path or a file:// URL"
        )
    return str(LocalFileSystem._strip_protocol(text))  # noqa: SLF001  # fsspec's public practice
