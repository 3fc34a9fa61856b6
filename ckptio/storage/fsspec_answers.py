"""What a file system of fsspec says, in the words of a store, and how it is asked.

Errors are shown as far as they may be: the values in `storage_options` that are secrets by their
names (`secrets_of`), and the queries of URLs, are cut out of every message. `told` also says
whether the error itself, with its causes, is free of them, so that it may be raised `from`.
"""

from __future__ import annotations

import calendar
import contextlib
import datetime as dt
import errno
import functools
import inspect
import json
import math
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    StoreError,
    TransientError,
    untold_etag,
)
from ckptio.storage.tls import is_garbled, is_no_tls

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Protocols.
GOOGLE = ("gs", "gcs")
AZURE = ("az", "abfs", "abfss", "adl")
#: Where the first part of a key is a bucket, which nobody makes by writing to it.
BUCKETED = GOOGLE + AZURE
WEB = ("http", "https")
#: Names of what tells contents apart, and of times, in small letters and without what joins
#: words; the first one counts. Not of what changes by itself: when it was read, how often.
_ETAGS = (
    "etag",
    "generation",
    "contentmd5",
    "digest",
    "blobid",
    "xethash",
    "contenthash",
    "sha",
    "hex",
    "md5hash",
    "md5checksum",
    "md5",
    "checksum",
    "hash",
    "crc",
)
_TIMES = (
    "lastmodified",
    "updated",
    "mtime",
    "modified",
    "modify",
    "modificationtime",
    "modifiedtime",
    "modifiedat",
    "servermodified",
    "datetime",
    "uploadedat",
    "created",
)
#: Names of what numbers a file. Where nothing else tells contents apart, a file that was replaced
#: within one tick of the clock differs in this.
_NUMBERS = ("ino", "unique", "fileid")
_NO_WORD = re.compile(r"[^a-z0-9]")
_FTP_TIME = re.compile(r"\d{14}(\.\d+)?")
#: The largest number that is taken for seconds: they would be in the year 5138. A larger one counts
#: thousandths or less; as thousandths, this is in 1973.
_LAST_S = 1e11
#: What asking again does not change. Not EPERM: from the system, that is a `PermissionError`, and
#: OpenSSL has the same number for whatever was garbled on its way.
_HOPELESS = (
    errno.EACCES,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EINVAL,
    errno.ENAMETOOLONG,
)
_FORBIDDEN = 403
_GONE = (404, 410)
_REQUEST_TIMEOUT = 408
_PRECONDITION_FAILED = 412
_THROTTLED = (429, 503)
_FIRST_SERVER_ERROR = 500
#: Of a server: what it has no way to do.
_NEVER = (501, 505)
#: How FTP says that a file is not there, if that is what was asked; 450 of what is listed.
_GONE_IN_FTP = ("450", "550")
#: Of the web; whatever they raise is none of a file system's own looking.
_WEB_CLIENTS = ("aiohttp", "requests", "httpx", "urllib3")
_MAX_LENGTH = 300
_SECRET = re.compile(
    r"key|secret|token|pass|pwd|auth|cookie|ticket|sas|credential|connection", re.IGNORECASE
)
#: Before what Python writes with one, in a text in another one.
_MAX_SLASHES = 4
#: Backslashes, and what follows them.
_PAIRS = re.compile(r"(\\*)([^\\]?)")
#: A signature in a URL is as good as a password.
_QUERY = re.compile(r"(?<=\S)\?\S+=[^\s'\")]*")


def info_of(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    """Make one of what fsspec says.

    Each file system has names of its own for what tells one content of a file from another.
    `ukey` was rejected: where a file system has no idea, that is the same for all of them.
    """
    known = {_NO_WORD.sub("", str(name).lower()): value for name, value in info.items()}
    modified_s = next((found for name in _TIMES if (found := _seconds(known.get(name)))), 0.0)
    nbytes = int(info.get("size") or 0)
    etag = next((str(known[name]) for name in _ETAGS if known.get(name)), "")
    if not (etag or modified_s):
        etag = untold_etag(nbytes)
    elif not etag:
        number = next((known[name] for name in _NUMBERS if name in known), "")
        etag = f"{modified_s!r}-{nbytes}-{number}"
    return ObjectInfo(key=key, nbytes=nbytes, etag=etag, modified_s=modified_s)


def _seconds(value: object) -> float:
    """Give a time as seconds since 1970; 0 for what is none."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        if isinstance(value, tuple):  # as in archives, where nobody knows whose time it is
            value = calendar.timegm(value)
        elif isinstance(value, str) and _FTP_TIME.fullmatch(value):
            day, _, fraction = value.partition(".")
            value = dt.datetime.strptime(f"{day} +0000", "%Y%m%d%H%M%S %z")
            value = value.timestamp() + float(f"0.{fraction or 0}")
        elif isinstance(value, str):
            is_http = "," in value
            value = parsedate_to_datetime(value) if is_http else dt.datetime.fromisoformat(value)
        if isinstance(value, dt.datetime):
            return value.timestamp()
    seconds = 0.0
    with contextlib.suppress(OverflowError):
        seconds = float(value) if isinstance(value, (int, float)) else 0.0
    while _LAST_S < seconds < math.inf:  # it counts thousandths, or less
        seconds /= 1000
    return seconds if 0.0 < seconds < math.inf else 0.0


def reason_of(error: FileNotFoundError) -> Exception | None:
    """Say why something was not found, if that is not because there is nothing.

    fsspec's web client says of every failure that nothing was found: of a server that is
    down, of one that wants a password. Whoever begins anew where nothing is has to know. A file
    system may have looked elsewhere when it was refused something; what it was only handling
    as it said so counts where nobody has answered.
    """
    cause = error.__cause__
    context = None if error.__suppress_context__ else error.__context__
    found = cause if cause is not None else context
    if not isinstance(found, Exception) or isinstance(found, NotADirectoryError):
        return None
    if isinstance(found, FileNotFoundError):
        return reason_of(found)
    status = _status_of(found)
    where = type(found).__module__.partition(".")[0]
    if status in _GONE or (where == "ftplib" and str(found)[:3] in _GONE_IN_FTP):
        return None
    if status in _THROTTLED or status >= _FIRST_SERVER_ERROR:
        return found
    if isinstance(found, (ConnectionError, TimeoutError, EOFError)):
        return found
    if not status and where in _WEB_CLIENTS:
        return found
    is_refused = bool(status) or getattr(found, "errno", None) not in (None, errno.ENOENT)
    return found if is_refused and cause is not None else None


def is_of_a_server(error: Exception) -> bool:
    """Whether a file system could not be made for want of its server: it may be there later.

    Not if a file of this machine was wanted (a key), if an option makes no sense, or if the server
    was there and has refused what it was given.
    """
    here = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
    if isinstance(error, here) or not isinstance(error, (OSError, EOFError)):
        return False
    return isinstance(told(error)[0], TransientError)


def told(error: Exception, hidden: Sequence[str] = ()) -> tuple[StoreError, bool]:
    """Say what a failure means, and whether what it says itself may be shown.

    Args:
        error: What a file system raised.
        hidden: What must not be shown.
    """
    lines = f"{type(error).__name__}: {_shown(str(error), hidden)}".splitlines()
    is_clean = all(_shown(text, hidden) == text for part in _chain(error) for text in _texts(part))
    if _is_forbidden(error):  # what is missing stands in the second line
        return RefusedError(" ".join(lines)[:_MAX_LENGTH]), is_clean
    if isinstance(error, FileNotFoundError):
        reason = reason_of(error)
        if reason is None:
            return ObjectMissingError("there is no such object"), is_clean
        return told(reason, hidden)[0], is_clean
    return _judged(error, lines[0][:_MAX_LENGTH]), is_clean


def _is_forbidden(error: Exception) -> bool:
    """Whether it is what gcsfs makes of a 403: an error without a number."""
    return type(error) is OSError and error.errno is None and str(error).startswith("Forbidden")


def _shown(text: str, hidden: Sequence[str]) -> str:
    """Cut out of a text what must not be shown.

    Queries go last: what is cut out of a secret as one would leave the rest of it.
    """
    for secret in sorted(hidden, key=len, reverse=True):  # one may be a part of another
        text = _pattern_of(secret).sub("...", text)
    return _QUERY.sub("?...", text)


@functools.lru_cache(maxsize=64)
def _pattern_of(secret: str) -> re.Pattern[str]:
    """Give what finds a secret, however each of its characters is written."""
    return re.compile("".join(_ways_of(len(run), last) for run, last in _PAIRS.findall(secret)))


def _ways_of(num_slashes: int, character: str) -> str:
    """Give what finds backslashes and a character behind them; either may be missing.

    Whichever of the backslashes in a text are whose, what is found ends at one place, and no two
    ways find the same: so none is tried twice (an atomic group). Else a text that begins as a
    secret does and goes on otherwise, as a key in JSON that was quoted and cut off, would be tried
    in twice as many ways for each quote in it.
    """
    ways = _writings(character) if character else [""]
    if not num_slashes:
        return f"(?:{'|'.join(ways)})" if len(ways) > 1 else ways[0]
    most = _MAX_SLASHES * num_slashes
    slashes = rf"(?:\\{{{num_slashes},{most}}}|(?i:(?:%(?:25)?5c){{{num_slashes}}}))"
    return f"(?:{'|'.join(f'(?>{slashes}{way})' for way in ways)})"


def _writings(character: str) -> list[str]:
    """Give what finds a character: as it is, or as Python, JSON or a URL has it.

    What is written into another text may be written so again, up to `_MAX_SLASHES`; and programs
    differ in which characters of a URL they leave as they are.
    """
    if character.isascii() and character.isalnum():
        return [character]
    is_raw = "\udc80" <= character <= "\udcff"  # a byte that is no text
    raw = character.encode(errors="surrogateescape" if is_raw else "surrogatepass")
    some = rf"\\{{1,{_MAX_SLASHES}}}"
    texts = (repr(character), ascii(character), json.dumps(character), repr(raw)[1:])
    written = {text[1:-1] for text in texts if text[1] == "\\"} - {f"\\{character}"}
    escapes = [re.escape(text).replace(r"\\", some) for text in sorted(written)]
    once, twice = ("".join(f"%{more}{byte:02x}" for byte in raw) for more in ("", "25"))
    as_it_is = f"(?:{some})?{re.escape(character)}"
    plus = [r"\+"] if character == " " else []
    return [as_it_is, *plus, *(f"(?i:{text})" for text in (*escapes, once, twice))]


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


def _texts(error: BaseException) -> tuple[str, ...]:
    """Give what a traceback says of an error."""
    return (str(error), *getattr(error, "__notes__", ()))


def _status_of(error: Exception) -> int:
    """Give the number with which a server has answered; 0 if there is none."""
    if type(error).__module__ == "ftplib":  # in numbers of its own, below 500 what will pass
        return _FORBIDDEN if type(error).__name__ == "error_perm" else _FIRST_SERVER_ERROR
    for where in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            if isinstance(value := getattr(where, name, None), int):
                return value
    return 0


def _judged(error: Exception, problem: str) -> StoreError:
    status = _status_of(error)
    if status in _THROTTLED:
        return TransientError(problem, slow_down=True)
    if status in _GONE:
        return ObjectMissingError(problem)
    if status == _PRECONDITION_FAILED:
        return ConditionFailedError(problem)
    is_ours = 0 < status < _FIRST_SERVER_ERROR and status != _REQUEST_TIMEOUT
    if is_ours or status in _NEVER:
        return RefusedError(problem)
    if isinstance(error, OSError) and error.errno in _HOPELESS:
        return RefusedError(problem)
    if is_no_tls(error) and not is_garbled(error):
        return RefusedError(problem)
    if isinstance(error, (PermissionError, ValueError, TypeError, NotImplementedError)):
        return RefusedError(problem)
    return TransientError(problem)


def secrets_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Give the values in `storage_options` that are, by their names, not to be shown."""
    return tuple(_secrets_in(options, is_secret=False))


def _secrets_in(value: object, *, is_secret: bool) -> Iterator[str]:
    """Give what is secret in a value, or all of it; lists of pairs may stand for mappings."""
    if isinstance(value, Mapping):
        value = [*value.items()]
    if isinstance(value, (list, tuple)):
        for part in value:
            if isinstance(part, (list, tuple)) and len(part) == 2:  # noqa: PLR2004  # a pair
                name, inner = part
                is_named = _SECRET.search(str(name)) is not None
                yield from _secrets_in(inner, is_secret=is_secret or is_named)
            else:
                yield from _secrets_in(part, is_secret=is_secret)
    elif is_secret and isinstance(value, (str, bytes, bytearray)) and value:
        yield value if isinstance(value, str) else value.decode(errors="surrogateescape")


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
