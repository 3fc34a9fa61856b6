"""What a file system of fsspec says, in the words of a store, and how it is asked."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    StoreError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Protocols.
GOOGLE = ("gs", "gcs")
AZURE = ("az", "abfs", "abfss", "adl")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
_HOPELESS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EINVAL,
    errno.ENAMETOOLONG,
)
_NOT_FOUND = 404
_REQUEST_TIMEOUT = 408
_PRECONDITION_FAILED = 412
_THROTTLED = (429, 503)
_FIRST_SERVER_ERROR = 500
_MAX_LENGTH = 300
_SECRET = re.compile(
    r"key|secret|token|password|passphrase|sas|credential|connection", re.IGNORECASE
)
#: A signature in a URL is as good as a password.
_QUERY = re.compile(r"(?<=\S)\?\S+=[^\s'\")]*")


def info_of(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    """Make one of what fsspec says."""
    modified_s = next((found for name in _TIMES if (found := _seconds(info.get(name)))), 0.0)
    nbytes = int(info.get("size") or 0)
    etag = next((info[name] for name in ("ETag", "etag", "generation") if info.get(name)), None)
    return ObjectInfo(
        key=key,
        nbytes=nbytes,
        # a file that was replaced within one tick of the clock has another inode
        etag=str(etag or f"{modified_s!r}-{nbytes}-{info.get('ino', '')}"),
        modified_s=modified_s,
    )


def _seconds(value: object) -> float:
    """Give a time as seconds since 1970; 0 for what is none."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = dt.datetime.fromisoformat(value)
    if isinstance(value, dt.datetime):
        return value.timestamp()
    return float(value) if isinstance(value, (int, float)) else 0.0


def told(error: Exception, hidden: Sequence[str] = ()) -> tuple[StoreError, bool]:
    """Say what a failure means, and whether what it says itself may be shown.

    Args:
        error: What a file system raised.
        hidden: What must not be shown.
    """
    lines = f"{type(error).__name__}: {_shown(str(error), hidden)}".splitlines()
    is_clean = all(_shown(str(part), hidden) == str(part) for part in _chain(error))
    if _is_forbidden(error):  # what is missing stands in the second line
        return RefusedError(" ".join(lines)[:_MAX_LENGTH]), is_clean
    return _judged(error, lines[0][:_MAX_LENGTH]), is_clean


def _is_forbidden(error: Exception) -> bool:
    """Whether it is what gcsfs makes of a 403: an error without a number."""
    return type(error) is OSError and error.errno is None and str(error).startswith("Forbidden")


def _shown(text: str, hidden: Sequence[str]) -> str:
    """Cut out of a text what must not be shown."""
    shown = _QUERY.sub("?...", text)
    for secret in hidden:
        shown = shown.replace(secret, "...")
    return shown


def _chain(error: BaseException) -> list[BaseException]:
    """Give an error and all that a traceback of it may show."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        part = left.pop()
        if part is not None and part not in found:
            found.append(part)
            left += [part.__cause__, part.__context__]
            left += part.exceptions if isinstance(part, BaseExceptionGroup) else ()
    return found


def _judged(error: Exception, problem: str) -> StoreError:
    status = next(
        (
            value
            for name in ("status", "status_code", "code")
            if isinstance(value := getattr(error, name, None), int)
        ),
        0,
    )
    if status in _THROTTLED:
        return TransientError(problem, slow_down=True)
    if status == _NOT_FOUND:
        return ObjectMissingError(problem)
    if status == _PRECONDITION_FAILED:
        return ConditionFailedError(problem)
    if 0 < status < _FIRST_SERVER_ERROR and status != _REQUEST_TIMEOUT:
        return RefusedError(problem)
    if isinstance(error, OSError) and error.errno in _HOPELESS:
        return RefusedError(problem)
    if isinstance(error, (PermissionError, ValueError, TypeError, NotImplementedError)):
        return RefusedError(problem)
    return TransientError(problem)


def secrets_of(options: Mapping[str, Any], *, all_of_it: bool = False) -> tuple[str, ...]:
    """Give the values in `storage_options` that are, by their names, not to be shown."""
    found: list[str] = []
    for name, value in options.items():
        is_secret = all_of_it or _SECRET.search(str(name)) is not None
        if isinstance(value, Mapping):
            found += secrets_of(value, all_of_it=is_secret)
        elif is_secret and isinstance(value, str) and value:
            found.append(value)
    return tuple(found)


def how_to_create(fs: Any, protocol: str) -> Mapping[str, Any]:
    """Say how `pipe_file` is asked for an object that is not there, atomically; if it can."""
    if protocol in AZURE:
        return {"overwrite": False}
    if protocol in GOOGLE and "mode" in inspect.signature(fs._pipe_file).parameters:  # noqa: SLF001  # fsspec's public practice
        return {"mode": "create"}
    return {}


def unknown_protocol(protocol: str) -> str:
    """Say that there is no such protocol, and what may have been meant."""
    if "::" in protocol:
        return f"{protocol!r} is a chain of protocols; give the URL of the store alone"
    if protocol != protocol.lower():
        return f"fsspec knows no protocol {protocol!r}; write {protocol.lower()}://"
    hint = "; abfss:// comes with the package adlfs" if protocol == "abfss" else ""
    return f"fsspec knows no protocol {protocol!r}{hint}"
