"""What the answers of an S3 server mean, and what there is to say when none came.

Nothing of an error but its kind and its status is repeated, and no error is kept as the
cause of ours: a server that refuses a signature sends back what it got, with the session
token in it, and aiohttp's errors hold the headers of the request.
"""

from __future__ import annotations

import re
import ssl
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import botocore.exceptions
import botocore.parsers

from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    StoreError,
    TransientError,
)
from ckptio.storage.tls import is_garbled

if TYPE_CHECKING:
    from collections.abc import Mapping

_CHUNK_NBYTES = 1 << 20
_CONFLICT = 409
_PRECONDITION_FAILED = 412
_THROTTLED = (429, 503)
_NOT_IMPLEMENTED = 501
_FIRST_SERVER_ERROR = 500
#: What a region answers of a bucket of another one.
_ELSEWHERE = (301, 307, 400)
_REGION = re.compile(r"[a-z0-9-]{1,40}")
_MISSING = ("404", "NoSuchKey", "NoSuchUpload", "NotFound")
_SLOW_DOWN = (
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "RequestLimitExceeded",
)
#: The server did not get what was sent: it may, the next time.
_GARBLED = (
    "BadDigest",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "XAmzContentSHA256Mismatch",
)
_NO_ANSWER = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.ResponseStreamingError,
    botocore.parsers.ResponseParserError,
    aiohttp.ClientError,
    OSError,
    TimeoutError,
)
#: Why the file of certificates to trust cannot be read.
_UNREADABLE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
#: What these say is worth reading, and nothing secret.
_TELLING = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
)


class NotSupportedError(RefusedError):
    """The server does not know such requests."""


async def receive(answer: Mapping[str, Any], room: memoryview) -> None:
    """Read a body into memory that it fills exactly.

    Raises:
        TransientError: Fewer bytes came.
    """
    position = 0
    failure = None
    try:
        body = answer["Body"]
        async with body:  # what that gives is not the same in all versions of aiobotocore
            while position < len(room):
                chunk = await body.read(min(_CHUNK_NBYTES, len(room) - position))
                if not chunk:
                    break
                room[position : position + len(chunk)] = chunk
                position += len(chunk)
    except Exception as error:  # whoever asked gets it, in our words
        failure = told(error)
    if failure is not None:
        raise failure
    if position < len(room):
        raise TransientError(f"{position} bytes came instead of {len(room)}")


async def receive_object(
    key: str, answer: Mapping[str, Any], limit: int
) -> tuple[ObjectInfo, bytes]:
    """Read what the answer to a GET describes, and its body up to a limit of bytes.

    Raises:
        TransientError: It describes no object, or fewer bytes came.
    """
    try:
        info = info_of(key, answer)
    except TransientError:
        answer["Body"].close()
        raise
    data = bytearray(min(info.nbytes, limit))
    with memoryview(data) as room:
        await receive(answer, room)
    return info, bytes(data)


def has_etag(found: object, match: str) -> bool:
    """Whether an answer is of an object with an etag; it is where there is nothing to compare."""
    return not match or not found or str(found).strip('"') == match.strip('"')


def info_of(key: str, answer: Mapping[str, Any]) -> ObjectInfo:
    """Make one of the answer to a HEAD or GET.

    Raises:
        TransientError: It is none.
    """
    if "ContentLength" not in answer or "LastModified" not in answer:
        raise TransientError("the answer does not describe an object")
    return ObjectInfo(
        key=key,
        nbytes=int(answer["ContentLength"]),
        etag=str(answer.get("ETag", "")),
        modified_s=answer["LastModified"].timestamp(),
    )


def listed(page: Mapping[str, Any]) -> list[ObjectInfo]:
    """Make what a page of a listing has, objects and what stands for all that is below.

    Raises:
        TransientError: It is none.
    """
    objects = [
        ObjectInfo(
            key=wanted(entry, "Key"),
            nbytes=int(wanted(entry, "Size")),
            etag=str(entry.get("ETag", "")),
            modified_s=wanted(entry, "LastModified").timestamp(),
        )
        for entry in page.get("Contents", ())
    ]
    levels = page.get("CommonPrefixes", ())
    return objects + [ObjectInfo(key=wanted(entry, "Prefix"), nbytes=0) for entry in levels]


def wanted(entry: Mapping[str, Any], name: str) -> Any:
    """Give what each entry of a listing has.

    Raises:
        TransientError: This one has not: it is none.
    """
    if name not in entry:
        raise TransientError("the answer is no listing")
    return entry[name]


def told(error: Exception) -> StoreError:
    """Say what an answer, or its absence, means."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, botocore.exceptions.ClientError):
        return _told_by_server(error)
    name = type(error).__name__
    kept_from = getattr(error, "kwargs", {}).get("error")
    if isinstance(error, botocore.exceptions.SSLError) and not is_garbled(kept_from):
        return RefusedError("the server's certificate, or its TLS, is not accepted: SSLError")
    if isinstance(error, botocore.exceptions.HTTPClientError) and _is_unreadable(kept_from):
        kind = type(kept_from).__name__
        return RefusedError(f"the certificates to trust cannot be read (verify=): {kind}")
    if isinstance(kept_from, aiohttp.ClientResponseError):  # aiohttp could not parse it
        return TransientError(f"the answer is no valid HTTP: {type(kept_from).__name__}")
    if isinstance(error, _NO_ANSWER):
        return TransientError(f"the connection{_where(error)} failed: {name}")
    return RefusedError(f"{name}: {error}" if isinstance(error, _TELLING) else name)


def _is_unreadable(error: object) -> bool:
    """Whether an error is that there are no certificates to trust where they should be.

    Not each `ssl.SSLError`: a connection that is garbled on its way ends with one, too.
    """
    if isinstance(error, ssl.SSLError):
        # OpenSSL's word for a file in which nothing is a certificate
        return getattr(error, "library", None) == "X509"
    return isinstance(error, _UNREADABLE)


def _where(error: Exception) -> str:
    """Name the host that was asked, if an error says so; nothing else of its URL."""
    found = getattr(error, "kwargs", {}).get("endpoint_url")
    host = urlsplit(str(found or "")).netloc.rpartition("@")[2]
    return f" to {host}" if host else ""


def _told_by_server(error: botocore.exceptions.ClientError) -> StoreError:
    """Say what an answer with an error means."""
    answer = error.response.get("ResponseMetadata", {})
    status = int(answer.get("HTTPStatusCode", 0))
    region = str(answer.get("HTTPHeaders", {}).get("x-amz-bucket-region", ""))
    code = str(error.response.get("Error", {}).get("Code", status))[:100]
    return told_by(status, code, region if _REGION.fullmatch(region) else "")


def told_by(status: int, code: str, region: str = "") -> StoreError:
    """Say what S3 means by a status and a code; without a code, that is the status again.

    Args:
        status: Of HTTP.
        code: Of S3. The answer to a HEAD has none.
        region: Where the bucket is, if the server says so.
    """
    problem = f"{_phrase_of(status) if code == str(status) else code} ({status})"
    if "ObjectLock" in code:
        problem += "; give config_kwargs={'request_checksum_calculation': 'when_supported'}"
    if region and status in _ELSEWHERE:
        problem += f"; the bucket is in the region {region!r}"
    if code in _MISSING:
        return ObjectMissingError(problem)
    if status == _PRECONDITION_FAILED or code == "ConditionalRequestConflict":
        return ConditionFailedError(problem)
    if status == _NOT_IMPLEMENTED:
        return NotSupportedError(problem)
    if status in _THROTTLED or code in _SLOW_DOWN:
        return TransientError(problem, slow_down=True)
    if status >= _FIRST_SERVER_ERROR or code in _GARBLED or status == _CONFLICT:
        return TransientError(problem)
    return RefusedError(problem)


def _phrase_of(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "unknown answer"
