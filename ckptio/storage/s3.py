"""S3, and what speaks like it, through the client that s3fs makes.

s3fs finds credentials, endpoints and options as everywhere in fsspec; requests go to its
client one by one, so that a request here is a request on the wire, tried again by nobody
but `storage.requests`. The client lives on the loop of the engine, never on the trainer's.

Bodies are sent from the staging pool as they lie there. Over TLS they are not signed (SHA-256
of every byte is most of what s3fs costs), since TLS protects them on the way and a crc32c of
every block is in the manifest; over plain HTTP they are, unless the options say otherwise.
Checksums that botocore adds on its own are off for the same reason, and because Ceph 16
refuses them.

A store is taken to decide conditional requests atomically where it is Amazon's. Others
are not trusted (OpenStack Swift lets several writers win), which costs nothing but that
files of a writer that lost in doubt are removed an hour later.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import aiohttp
import botocore.exceptions
import s3fs

from ckptio.errors import ConfigError
from ckptio.storage.s3_body import Body
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    StoreError,
    StoreTraits,
    TransientError,
    UploadInfo,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig

_MIN_PART_NBYTES = 5 << 20
_GAP_NBYTES = 1 << 20
_CHUNK_NBYTES = 1 << 20
_NOT_FOUND = 404
_CONFLICT = 409
_PRECONDITION_FAILED = 412
_THROTTLED = (429, 503)
_FIRST_SERVER_ERROR = 500
_MISSING = ("404", "NoSuchKey", "NotFound")
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


class S3Backend:
    """Opens buckets; see `stores.Backend`."""

    def split(self, url: str, options: Mapping[str, Any]) -> tuple[str, str]:
        """Split into endpoint with bucket, and prefix; see `stores.Backend`."""
        bucket, _, prefix = url.partition("://")[2].partition("/")
        if not bucket or not prefix:
            raise ConfigError(f"{url!r} has to be s3://BUCKET/PREFIX")
        return f"s3 {endpoint_of(options) or 'amazon'} {bucket}", prefix.rstrip("/")

    def gap_nbytes(self) -> int:
        """What a request costs in bytes, about."""
        return _GAP_NBYTES

    async def open(
        self, url: str, options: Mapping[str, Any], config: CheckpointConfig, executor: Executor
    ) -> S3Store:
        """Make a client; see `stores.Backend`."""
        del executor
        bucket = url.partition("://")[2].partition("/")[0]
        own = dict(options)
        endpoint = endpoint_of(options)
        own["config_kwargs"] = _client_config(options.get("config_kwargs", {}), endpoint, config)
        try:
            fs = s3fs.S3FileSystem(asynchronous=True, skip_instance_cache=True, **own)
            client = await fs.set_session()
        except (TypeError, ValueError, botocore.exceptions.BotoCoreError) as error:
            raise ConfigError(
                f"s3fs cannot make a client of the storage_options given: {type(error).__name__}"
            ) from None  # what it says may hold the options
        return S3Store(client, bucket, fs, endpoint)


def endpoint_of(options: Mapping[str, Any]) -> str:
    """Give the endpoint that options or the environment name; empty for Amazon's own."""
    return str(
        options.get("endpoint_url")
        or options.get("client_kwargs", {}).get("endpoint_url")
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or ""
    )


def _client_config(
    given: Mapping[str, Any], endpoint: str, config: CheckpointConfig
) -> dict[str, Any]:
    """Give what botocore's `Config` takes; what the user says goes first."""
    ours: dict[str, Any] = {
        "connect_timeout": config.request_timeout_s,
        "read_timeout": config.request_timeout_s,
        "max_pool_connections": config.max_requests,
        "retries": {"total_max_attempts": 1},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    if not endpoint.startswith("http://"):
        ours["s3"] = {"payload_signing_enabled": False}
    merged = {**ours, **given}
    merged["s3"] = {**ours.get("s3", {}), **given.get("s3", {})}
    return merged


class S3Store:
    """A bucket; see `store.ObjectStore`.

    Args:
        client: Of aiobotocore.
        bucket: Its name.
        fs: What made the client; closes it, and has options for requests.
        endpoint: Where it is; empty for Amazon's own.
    """

    def __init__(self, client: Any, bucket: str, fs: Any, endpoint: str) -> None:
        self._client = client
        self._bucket = bucket
        self._fs = fs
        self._endpoint = endpoint
        self._extras: dict[str, Mapping[str, Any]] = {}
        self._traits = StoreTraits(
            min_part_nbytes=_MIN_PART_NBYTES,
            conditional="none" if endpoint else "atomic",
            gap_nbytes=_GAP_NBYTES,
        )

    @property
    def identity(self) -> str:
        """Endpoint and bucket."""
        return f"s3 {self._endpoint or 'amazon'} {self._bucket}"

    @property
    def traits(self) -> StoreTraits:
        """What S3 can do."""
        return self._traits

    async def request(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send one request.

        Raises:
            StoreError: As the answer, or its absence, says.
        """
        method: Callable[..., Awaitable[dict[str, Any]]] = getattr(self._client, operation)
        arguments = {**self._extras_for(operation), "Bucket": self._bucket, **arguments}
        try:
            return await method(**arguments)
        except Exception as error:
            raise told(error) from error

    def _extras_for(self, operation: str) -> Mapping[str, Any]:
        """Give what the user wants to be sent with every request that takes it."""
        if operation not in self._extras:
            name = self._client.meta.method_to_api_mapping[operation]
            shape = self._client.meta.service_model.operation_model(name).input_shape
            wanted = {**self._fs.s3_additional_kwargs, **self._fs.req_kw}
            self._extras[operation] = {k: v for k, v in wanted.items() if k in shape.members}
        return self._extras[operation]

    async def head(self, key: str) -> ObjectInfo:
        """Look at an object; see `store.ObjectStore`."""
        return _info(key, await self.request("head_object", Key=key))

    async def get(self, key: str, limit: int) -> tuple[ObjectInfo, bytes]:
        """Read an object; see `store.ObjectStore`."""
        answer = await self.request("get_object", Key=key)
        info = _info(key, answer)
        data = bytearray(min(info.nbytes, limit))
        with memoryview(data) as room:
            await _receive(answer, room)
        return info, bytes(data)

    async def get_into(self, key: str, start: int, room: memoryview) -> None:
        """Read a range; see `store.ObjectStore`."""
        stop = start + len(room)
        answer = await self.request("get_object", Key=key, Range=f"bytes={start}-{stop - 1}")
        total = str(answer.get("ContentRange", "")).rpartition("/")[2]
        if total.isdigit() and int(total) < stop:
            answer["Body"].close()
            raise RefusedError(f"it ends at byte {total}")
        if answer.get("ContentLength") != len(room):
            answer["Body"].close()
            raise TransientError("the answer is not the range that was asked for")
        await _receive(answer, room)

    async def put(
        self, key: str, data: bytes | memoryview, *, absent: bool = False, match: str = ""
    ) -> str:
        """Write an object in one request; see `store.ObjectStore`."""
        condition = {"IfNoneMatch": "*"} if absent else {"IfMatch": match} if match else {}
        with Body(data) as body:
            answer = await self.request("put_object", Key=key, Body=body, **condition)
        if not answer.get("ETag"):
            raise TransientError("the answer is no answer to a write")
        return str(answer["ETag"])

    async def upload(self, key: str) -> S3Upload:
        """Begin a multipart upload; see `store.ObjectStore`."""
        answer = await self.request("create_multipart_upload", Key=key)
        if not answer.get("UploadId"):
            raise TransientError("the answer names no upload")
        return S3Upload(self, key, str(answer["UploadId"]))

    async def list(self, prefix: str, *, below: bool = True) -> list[ObjectInfo]:
        """List objects, page by page; see `store.ObjectStore`."""
        found: list[ObjectInfo] = []
        arguments = {"Prefix": prefix, **({} if below else {"Delimiter": "/"})}
        async for page in self._pages("list_objects_v2", "ContinuationToken", **arguments):
            found += [_listed(entry) for entry in page.get("Contents", ())]
            found += [
                ObjectInfo(key=entry["Prefix"], nbytes=0)
                for entry in page.get("CommonPrefixes", ())
            ]
        return sorted(found, key=lambda info: info.key)

    async def _pages(self, operation: str, token: str, **arguments: Any) -> Any:
        while True:
            page = await self.request(operation, **arguments)
            if "IsTruncated" not in page:
                raise TransientError("the answer is no listing")
            yield page
            if not page["IsTruncated"]:
                return
            arguments[token] = page[f"Next{token}"]

    async def uploads(self, prefix: str) -> Sequence[UploadInfo]:
        """List multipart uploads that have not ended; see `store.ObjectStore`."""
        found = []
        arguments: dict[str, Any] = {"Prefix": prefix}
        while True:
            page = await self.request("list_multipart_uploads", **arguments)
            if "IsTruncated" not in page:
                raise TransientError("the answer is no listing")
            found += [
                (entry["Key"], entry["UploadId"], entry["Initiated"].timestamp())
                for entry in page.get("Uploads", ())
            ]
            if not page["IsTruncated"]:
                break
            arguments["KeyMarker"] = page["NextKeyMarker"]
            arguments["UploadIdMarker"] = page["NextUploadIdMarker"]
        return [
            UploadInfo(key=key, upload_id=upload_id, active_s=await self._active_s(*entry))
            for entry in found
            for key, upload_id, _ in [entry]
        ]

    async def _active_s(self, key: str, upload_id: str, begun_s: float) -> float:
        """Say when the last part of an upload came."""
        try:
            async for page in self._pages(
                "list_parts", "PartNumberMarker", Key=key, UploadId=upload_id
            ):
                times = [part["LastModified"].timestamp() for part in page.get("Parts", ())]
                begun_s = max([begun_s, *times])
        except ObjectMissingError:  # it ended meanwhile
            pass
        return begun_s

    async def drop_upload(self, upload: UploadInfo) -> None:
        """Abort a multipart upload; see `store.ObjectStore`."""
        await S3Upload(self, upload.key, upload.upload_id).abort()

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, one by one: how many at once a server takes differs."""
        for key in keys:
            await self.request("delete_object", Key=key)

    async def close(self) -> None:
        """Close the client and its connections."""
        await self._client.close()


class S3Upload:
    """A multipart upload; see `store.Upload`."""

    def __init__(self, store: S3Store, key: str, upload_id: str) -> None:
        self._store = store
        self._key = key
        self._upload_id = upload_id
        self._etags: dict[int, str] = {}

    async def write(self, number: int, data: memoryview) -> None:
        """Send a part; see `store.Upload`."""
        with Body(data) as body:
            answer = await self._store.request(
                "upload_part",
                Key=self._key,
                UploadId=self._upload_id,
                PartNumber=number + 1,
                Body=body,
            )
        if not answer.get("ETag"):
            raise TransientError("the answer is no answer to a part")
        self._etags[number + 1] = str(answer["ETag"])

    async def complete(self) -> None:
        """Make the object. An answer without an etag is none: S3 may say 200 and fail."""
        parts = [{"PartNumber": n, "ETag": self._etags[n]} for n in sorted(self._etags)]
        answer = await self._store.request(
            "complete_multipart_upload",
            Key=self._key,
            UploadId=self._upload_id,
            MultipartUpload={"Parts": parts},
        )
        if not answer.get("ETag"):
            raise TransientError("the answer does not say that the object was made")

    async def abort(self) -> None:
        """Drop all parts. An upload that is not there any more is no error."""
        with contextlib.suppress(ObjectMissingError):
            await self._store.request(
                "abort_multipart_upload", Key=self._key, UploadId=self._upload_id
            )


async def _receive(answer: Mapping[str, Any], room: memoryview) -> None:
    """Read a body into memory that it fills exactly."""
    position = 0
    try:
        async with answer["Body"] as body:
            while position < len(room):
                chunk = await body.read(min(_CHUNK_NBYTES, len(room) - position))
                if not chunk:
                    break
                room[position : position + len(chunk)] = chunk
                position += len(chunk)
    except Exception as error:
        raise told(error) from error
    if position < len(room):
        raise TransientError(f"{position} bytes came instead of {len(room)}")


def _info(key: str, answer: Mapping[str, Any]) -> ObjectInfo:
    """Make one of the answer to a HEAD or GET."""
    if "ContentLength" not in answer or "LastModified" not in answer:
        raise TransientError("the answer does not describe an object")
    return ObjectInfo(
        key=key,
        nbytes=int(answer["ContentLength"]),
        etag=str(answer.get("ETag", "")),
        modified_s=answer["LastModified"].timestamp(),
    )


def _listed(entry: Mapping[str, Any]) -> ObjectInfo:
    """Make one of an entry of a listing."""
    return ObjectInfo(
        key=entry["Key"],
        nbytes=int(entry["Size"]),
        etag=str(entry.get("ETag", "")),
        modified_s=entry["LastModified"].timestamp(),
    )


def told(error: Exception) -> StoreError:
    """Say what an answer, or its absence, means. Repeats no header, and so nothing secret."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, botocore.exceptions.ClientError):
        return _told_by_server(error)
    name = type(error).__name__
    if isinstance(
        error,
        (
            botocore.exceptions.HTTPClientError,
            botocore.exceptions.IncompleteReadError,
            botocore.exceptions.ResponseStreamingError,
            aiohttp.ClientError,
            OSError,
            TimeoutError,
        ),
    ):
        return TransientError(f"the connection failed: {name}")
    return RefusedError(f"{name}: {error}"[:300])


def _told_by_server(error: botocore.exceptions.ClientError) -> StoreError:
    """Say what an answer with an error means."""
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(error.response.get("Error", {}).get("Code", status))
    problem = code if code == str(status) else f"{code} ({status})"
    if code in _MISSING or code == "NoSuchUpload":
        return ObjectMissingError(problem)
    if status == _PRECONDITION_FAILED or code == "ConditionalRequestConflict":
        return ConditionFailedError(problem)
    if status in _THROTTLED or code in _SLOW_DOWN:
        return TransientError(problem, slow_down=True)
    if status >= _FIRST_SERVER_ERROR or code in _GARBLED or status == _CONFLICT:
        return TransientError(problem)
    return RefusedError(problem)
