"""From what the user calls a checkpoint to the storage that holds it.

A path, a path-like object, or a URL that fsspec knows. What is none of them, or nearly one (a
slash too few, no colon), is refused in words; whether anything is there is for the storage to find.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ckptio._texts import shown
from ckptio.errors import ConfigError
from ckptio.storage.keys import shown_url, split_query
from ckptio.storage.local import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.storage.interface import Storage
    from ckptio.storage.stores import Stores

PathLike = str | os.PathLike[str]
#: What fsspec calls this machine's own file systems.
_LOCAL = ("file", "local")
#: What `pathlib.Path.as_uri` makes of a space, and fsspec takes as it is.
_ESCAPED = re.compile("%[0-9A-Fa-f]{2}")
#: What `pathlib.Path` makes of a URL. It would be a directory called `s3:`, here.
_SHORTENED = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")
#: Protocols of which nobody calls a directory. With others, `data//step-1` is a path.
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")


def resolve_storage(
    path: PathLike,
    config: CheckpointConfig,
    executor: Executor,
    emit: Callable[[Event], None],
    stores: Stores,
) -> Storage:
    """Find the storage for a path or URL. Changes nothing, and looks at no checkpoint.

    A path with `..` in it is followed through its links, which may block on a mount that hangs.

    Args:
        path: A path, an `os.PathLike`, a `file://` URL, or one that fsspec knows.
        config: Options of the engine.
        executor: Threads for calls that block.
        emit: Takes events.
        stores: The object stores of the engine.

    Raises:
        ConfigError: `path` is empty, no path at all, or a URL that nobody knows.
    """
    url = remote_url(path)
    if url is None:
        return LocalStorage(local_path(path), config, executor, emit)
    from ckptio.storage.objects import ObjectStorage  # noqa: PLC0415  # where there is one

    store, prefix = stores.at(url)
    return ObjectStorage(shown_url(url), store, prefix, config, emit)


def remote_url(path: PathLike) -> str | None:
    """Give the URL that `path` is, without slashes at its end; `None` for a local path."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if not isinstance(text, str) or "://" not in text or "\0" in text:
        return None
    if text.partition("://")[0] in _LOCAL:
        return None
    url, query = split_query(text)
    protocol, _, rest = url.partition("://")
    return f"{protocol}://{rest.rstrip('/')}{query}"


def local_path(path: PathLike) -> str:
    """Give the local path that `path` names.

    Raises:
        ConfigError: It names none.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"a checkpoint's path is a str or os.PathLike, not {shown(path)}")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text or not _has_bytes(text):
        raise ConfigError(f"{path!r} is no path of a checkpoint")
    if _SHORTENED.match(text) and not isinstance(path, str):
        raise ConfigError(f"{path!r} was a URL: a path object drops one of its slashes; pass a str")
    if _SHORTENED.match(text) and _is_protocol(text.partition(":")[0]):
        raise ConfigError(f"{path!r} has one slash where a URL has two")
    protocol, slashes, rest = text.partition("//")
    if slashes and protocol in _BUCKETS:
        raise ConfigError(
            f"{path!r} has no colon: write {protocol}://{rest}, or for a directory ./{text}"
        )
    if "://" not in text:
        return _rooted(os.path.expanduser(text))
    from fsspec.core import split_protocol  # noqa: PLC0415  # 50 ms that plain paths do not need
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415  # as above

    protocol, rest = split_protocol(text)
    if protocol not in _LOCAL:
        raise ConfigError(f"{text!r} is no path of a local or mounted file system")
    if _ESCAPED.search(rest):
        raise ConfigError(
            f"{text!r} has escapes, which fsspec takes for names: pass the path itself"
        )
    host = rest.partition("/")[0]
    if host not in ("", ".", "..") and not host.startswith("~"):
        raise ConfigError(
            f"{text!r} has a host, {host!r}, which fsspec takes for a directory: pass the path"
            f" itself, /{rest.partition('/')[2]} or ./{rest}"
        )
    return str(LocalFileSystem._strip_protocol(text))  # noqa: SLF001  # fsspec's public practice


def require_order(state: object, path: object) -> None:
    """Refuse a path and a state in each other's place.

    Raises:
        ConfigError: They are.
    """
    kinds = (str, os.PathLike)
    if isinstance(state, kinds) and not isinstance(path, kinds):
        raise ConfigError(
            f"path and state are swapped: save(state, path) was given {shown(state)} for the state"
            f" and {shown(path)} for the path"
        )


def _rooted(path: str) -> str:
    """Refuse a path that leads nowhere."""
    if not os.path.isabs(path):
        try:
            os.getcwd()
        except OSError as error:
            raise ConfigError(f"{path!r} is in the working directory, which is gone") from error
    return path


def _has_bytes(text: str) -> bool:
    """Whether the system can be given a name: lone surrogates stand for bytes, or for nothing."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _is_protocol(scheme: str) -> bool:
    """Whether fsspec knows URLs that begin so."""
    from fsspec.registry import known_implementations, registry  # noqa: PLC0415  # as above

    return scheme in known_implementations or scheme in registry
