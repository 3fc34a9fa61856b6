"""S3, and what speaks like it, through the client that s3fs makes.

s3fs finds credentials, endpoints and options as everywhere in fsspec; requests go to its
client one by one, so that a request here is a request on the wire, tried again by nobody
but `storage.requests`; only that aiohttp sends an idempotent one once more, at once, when a
connection ends without an answer, as one does that it kept for long. The client lives on
the loop of the engine, never on the trainer's.

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
import dataclasses
from typing import TYPE_CHECKING, Any

import s3fs
from botocore.exceptions import BotoCoreError

from ckptio.errors import ConfigError
from ckptio.storage.options import problem_with
from ckptio.storage.s3_answers import (
    NotSupportedError,
    has_etag,
    info_of,
    listed,
    receive,
    receive_object,
    told,
    wanted,
)
from ckptio.storage.s3_body import Body
from ckptio.storage.s3_options import (
    SYNONYMS,
    address_of,
    all_options,
    client_config,
    endpoint_of,
    is_amazon,
    session_for,
    split_url,
    uses_tls,
)
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

#: The answer to whoever asks an empty object for a byte.
_NO_SUCH_RANGE = "InvalidRange"
_MIN_PART_NBYTES = 5 << 20
_GAP_NBYTES = 1 << 20


class S3Backend:
    """Opens buckets; see `stores.Backend`."""

    def split(self, url: str, options: Mapping[str, Any]) -> tuple[str, str]:
        """Split into endpoint with bucket, and prefix; see `stores.Backend`."""
        bucket, prefix = split_url(url)
        return f"s3 {endpoint_of(all_options(options)) or 'amazon'} {bucket}", prefix

    def gap_nbytes(self) -> int:
        """What a request costs in bytes, about."""
        return _GAP_NBYTES

    async def open(
        self, url: str, options: Mapping[str, Any], config: CheckpointConfig, executor: Executor
    ) -> S3Store:
        """Make a client; see `stores.Backend`."""
        del executor
        bucket, _ = split_url(url)
        own = all_options(options)
        has_tls = uses_tls(own)
        fs, client = await _client(own, config, has_tls=has_tls)
        if address_of(client).endpoint.startswith("https://") != has_tls:  # by a profile
            await client.close()
            fs, client = await _client(own, config, has_tls=not has_tls)
        return S3Store(client, bucket, fs)


async def _client(
    options: Mapping[str, Any], config: CheckpointConfig, *, has_tls: bool
) -> tuple[Any, Any]:
    """Make a client, and what closes it.

    Raises:
        ConfigError: The options make none.
    """
    ours = {
        "config_kwargs": client_config(options, config, has_tls=has_tls),
        "asynchronous": True,
        "skip_instance_cache": True,
    }
    try:
        # what fsspec is configured to give is among the options, by its one name
        fs = s3fs.S3FileSystem(**{**dict.fromkeys(SYNONYMS), **options, **ours})
        if fs.session is None:  # the user gave none
            fs.session = session_for(fs.kwargs)
        return fs, await fs.set_session()
    except (AttributeError, KeyError, TypeError, ValueError, OSError, BotoCoreError) as error:
        problem = problem_with(options, error)
    given = f"the storage_options given ({', '.join(options) or 'none'})"
    raise ConfigError(f"s3fs cannot make a client of {given}: {problem}")


class S3Store:
    """A bucket; see `store.ObjectStore`.

    Args:
        client: Of aiobotocore.
        bucket: Its name.
        fs: What made the client; closes it, and has options for requests.
    """

    def __init__(self, client: Any, bucket: str, fs: Any) -> None:
        self._client = client
        self._bucket = bucket
        self._fs = fs
        self.address = address_of(client)
        self._extras: dict[str, Mapping[str, Any]] = {}
        self._traits = StoreTraits(
            min_part_nbytes=_MIN_PART_NBYTES,
            conditional="atomic" if is_amazon(self.address.endpoint) else "none",
        )

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
        except Exception as error:  # whoever asked gets it, in our words
            failure = told(error)
        raise failure

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
        try:
            return info_of(key, await self.request("head_object", Key=key))
        except RefusedError:
            await self._say_why(key)
            raise

    async def _say_why(self, key: str) -> None:
        """Ask for a byte, as the answer to that says why it is refused; that to a HEAD cannot.

        Raises:
            RefusedError: What it says.
        """
        with contextlib.suppress(ConditionFailedError, ObjectMissingError, TransientError):
            try:
                answer = await self.request("get_object", Key=key, Range="bytes=0-0")
            except RefusedError as error:
                if _NO_SUCH_RANGE in str(error):  # it is empty, and may be read
                    return
                raise
            answer["Body"].close()

    async def get(self, key: str, limit: int) -> tuple[ObjectInfo, bytes]:
        """Read an object; see `store.ObjectStore`."""
        answer = await self.request("get_object", Key=key)
        return await receive_object(key, answer, limit)

    async def get_into(self, key: str, start: int, room: memoryview, *, match: str = "") -> None:
        """Read a range; see `store.ObjectStore`."""
        stop = start + len(room)
        answer = await self.request("get_object", Key=key, Range=f"bytes={start}-{stop - 1}")
        problem = _problem_with(answer, start, stop)
        if not has_etag(answer.get("ETag"), match):
            problem = ConditionFailedError("another object is there")
        if problem is not None:
            answer["Body"].close()
            raise problem
        await receive(answer, room)

    async def put(
        self, key: str, data: bytes | memoryview, *, absent: bool = False, match: str = ""
    ) -> str:
        """Write an object in one request; see `store.ObjectStore`."""
        try:
            if not match:
                return await self._put(key, data, {"IfNoneMatch": "*"} if absent else {})
            return await self._put_over(key, data, match)
        except NotSupportedError:
            if self._traits.conditional == "atomic" or not (absent or match):
                raise
        await self._check(key, match)  # the next best: look first
        return await self._put(key, data, {})

    async def _put_over(self, key: str, data: bytes | memoryview, match: str) -> str:
        """Write over an object that has an etag, which some servers compare without quotes."""
        bare = match.strip('"')
        try:
            try:
                return await self._put(key, data, {"IfMatch": match})
            except ConditionFailedError:
                if bare == match:
                    raise
            await self._check(key, match)
            return await self._put(key, data, {"IfMatch": bare})
        except ObjectMissingError:  # as Amazon says it
            raise ConditionFailedError("it is gone") from None

    async def _check(self, key: str, match: str) -> None:
        """Look whether there is an object with an etag; without one, whether there is none."""
        try:
            found = (await self.head(key)).etag
        except ObjectMissingError:
            if match:
                raise ConditionFailedError("it is gone") from None
            return
        if found != match:
            raise ConditionFailedError("another object is there")

    async def _put(self, key: str, data: bytes | memoryview, condition: Mapping[str, str]) -> str:
        try:
            with Body(data) as body:
                answer = await self.request("put_object", Key=key, Body=body, **condition)
        except ObjectMissingError as error:
            if condition or not error.problem.startswith("NoSuchKey"):
                raise
            # JuiceFS's gateway: what it writes to is a directory, which a removal empties just then
            raise TransientError(error.problem) from None
        if not answer.get("ETag"):
            raise TransientError("the answer is no answer to a write")
        return str(answer["ETag"])

    async def upload(self, key: str) -> S3Upload:
        """Begin a multipart upload; see `store.ObjectStore`."""
        answer = await self.request("create_multipart_upload", Key=key)
        if not answer.get("UploadId"):
            raise TransientError("the answer names no upload")
        return S3Upload(self, key, str(answer["UploadId"]))

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """List objects, page by page; see `store.ObjectStore`."""
        arguments = {"Prefix": prefix, "Delimiter": "/"}
        pages = await self._pages("list_objects_v2", ["ContinuationToken"], **arguments)
        found = [info for page in pages for info in listed(page)]
        return sorted(found, key=lambda info: info.key)

    async def uploads(self, prefix: str) -> Sequence[UploadInfo]:
        """List multipart uploads that have not ended; see `store.ObjectStore`."""
        pages = await self._pages(
            "list_multipart_uploads", ["KeyMarker", "UploadIdMarker"], Prefix=prefix
        )
        begun = [
            UploadInfo(
                key=wanted(entry, "Key"),
                upload_id=wanted(entry, "UploadId"),
                active_s=wanted(entry, "Initiated").timestamp(),
            )
            for page in pages
            for entry in page.get("Uploads", ())
        ]
        return [await self._looked_at(upload) for upload in begun]

    async def _looked_at(self, upload: UploadInfo) -> UploadInfo:
        """Say when the last part of an upload came; as it is if it ended meanwhile."""
        try:
            pages = await self._pages(
                "list_parts", ["PartNumberMarker"], Key=upload.key, UploadId=upload.upload_id
            )
        except ObjectMissingError:
            return upload
        parts = [part for page in pages for part in page.get("Parts", ())]
        times = [wanted(part, "LastModified").timestamp() for part in parts]
        return dataclasses.replace(upload, active_s=max([upload.active_s, *times]))

    async def _pages(
        self, operation: str, markers: Sequence[str], **arguments: Any
    ) -> Sequence[Mapping[str, Any]]:
        """List something to its end. `markers` say where a page begins, `Next` ones where it ends.

        Raises:
            StoreError: As the answers say; one that ends nowhere and has no next page is none.
        """
        pages: list[Mapping[str, Any]] = []
        while True:
            page = await self.request(operation, **arguments)
            pages.append(page)
            if page.get("IsTruncated") is False:
                return pages
            following = {marker: page.get(f"Next{marker}") for marker in markers}
            if not all(following.values()) or following.items() <= arguments.items():
                raise TransientError("the answer is no listing")
            arguments.update(following)

    async def drop_upload(self, upload: UploadInfo) -> None:
        """Abort a multipart upload; see `store.ObjectStore`."""
        await S3Upload(self, upload.key, upload.upload_id).abort()

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, one by one: how many at once a server takes differs."""
        for key in keys:
            with contextlib.suppress(ObjectMissingError):  # not all answer 204 then
                await self.request("delete_object", Key=key)

    async def close(self) -> None:
        """Close the client and its connections."""
        await self._client.close()


def _problem_with(answer: Mapping[str, Any], start: int, stop: int) -> StoreError | None:
    """Say what is wrong with an answer to a request for a range. One may get all instead."""
    given = str(answer.get("ContentRange", f"bytes 0-{answer.get('ContentLength', 0) - 1}/"))
    total = given.rpartition("/")[2]
    if total.isdigit() and int(total) < stop:
        return RefusedError(f"it ends at byte {total}")
    nbytes = answer.get("ContentLength", stop - start)  # none of what comes in chunks
    if given.startswith(f"bytes {start}-{stop - 1}/") and nbytes == stop - start:
        return None
    return TransientError("the answer is not the range that was asked for")


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
        if "ETag" not in answer:  # Ceph 16 says it is "", an <Error> says nothing of it
            raise TransientError("the answer does not say that the object was made")

    async def abort(self) -> None:
        """Drop all parts. An upload that is not there any more is no error."""
        with contextlib.suppress(ObjectMissingError):
            await self._store.request(
                "abort_multipart_upload", Key=self._key, UploadId=self._upload_id
            )
