"""S3 through obstore: what is large. What is small goes through s3fs's client.

obstore is Rust's `object_store`: it sends and receives on threads that need no GIL, for half
the CPU time of a client in Python and without standing in the way of the loop. It carries
the data: ranges, whole files, uploads in parts.

Everything else (looking, listing, the manifest and its conditions, removing) is `S3Store`'s,
on purpose. obstore tells an error in a 200 for an empty listing, has no listing of uploads,
and says what went wrong in prose; where a checkpoint hangs on an answer, that is not enough.

Its server, region and style are those of s3fs's client, so that data and manifest go to one
place, wherever an endpoint was found; credentials are looked for as botocore does.

obstore's own retries are off, but for the parts of uploads, which nobody else can send
again (see `obstore_upload`). A try of such a part has half the time of a request, so that
one that stalls is tried again before the request is given up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import re
from typing import TYPE_CHECKING, Any

import obstore
import obstore.exceptions
import obstore.store
from botocore.exceptions import BotoCoreError

from ckptio._aio import outlive, run_blocking
from ckptio.errors import ConfigError
from ckptio.storage.obstore_options import obstore_options
from ckptio.storage.obstore_upload import ObstoreUpload, lend
from ckptio.storage.s3 import S3Backend, S3Store
from ckptio.storage.s3_answers import has_etag, told_by
from ckptio.storage.s3_options import all_options, split_url
from ckptio.storage.store import ConditionFailedError, RefusedError, StoreError, TransientError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from ckptio.config import CheckpointConfig
    from ckptio.storage.obstore_options import ObstoreOptions
    from ckptio.storage.obstore_upload import Parts
    from ckptio.storage.store import ObjectInfo, StoreTraits, UploadInfo

_CHUNK_NBYTES = 4 << 20
_FIRST_WAIT = dt.timedelta(seconds=0.1)
_LONGEST_WAIT = dt.timedelta(seconds=20)
#: What comes of options that make no sense.
_NO_CLIENT = (
    obstore.exceptions.BaseError,
    AttributeError,
    TypeError,
    ValueError,
    OSError,
    BotoCoreError,
)
_NO_PARTS = ("", ".", "..")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")


class ObstoreBackend:
    """Opens buckets; see `stores.Backend`."""

    def __init__(self) -> None:
        self._small = S3Backend()

    def split(self, url: str, options: Mapping[str, Any]) -> tuple[str, str]:
        """Split into endpoint with bucket, and prefix; see `stores.Backend`.

        Raises:
            ConfigError: The URL makes no sense, or obstore would write somewhere else: it takes
                slashes off keys, and has no word for some.
        """
        identity, prefix = self._small.split(url, options)
        if any(part in _NO_PARTS or _CONTROL.search(part) for part in prefix.split("/")):
            raise ConfigError(
                f"{url!r} has a part that is empty, '.', '..' or not printable, which obstore"
                " cannot name; use s3_client='s3fs'"
            )
        return identity, prefix

    def gap_nbytes(self) -> int:
        """What a request costs in bytes, about."""
        return self._small.gap_nbytes()

    async def open(
        self, url: str, options: Mapping[str, Any], config: CheckpointConfig, executor: Executor
    ) -> ObstoreStore:
        """Make both clients; see `stores.Backend`. obstore's goes where that of s3fs does."""
        bucket, _ = split_url(url)
        small = await self._small.open(url, options, config, executor)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(small.close)
            problem = ""
            try:
                words = await run_blocking(
                    executor, obstore_options, all_options(options), small.address
                )
                once = _store(bucket, words, config.request_timeout_s, {"max_retries": 0})
                repeating = _store(bucket, words, config.request_timeout_s / 2, _retries(config))
            except ConfigError:
                raise
            except _NO_CLIENT as error:
                problem = type(error).__name__  # what it says may hold the options
            if problem:
                raise ConfigError(f"obstore cannot use the storage_options given: {problem}")
            stack.pop_all()
        return ObstoreStore(small, once, repeating, config)


def _store(
    bucket: str, words: ObstoreOptions, timeout_s: float, retries: dict[str, Any]
) -> obstore.store.S3Store:
    """Make a store of obstore's."""
    timeout = dt.timedelta(seconds=timeout_s)
    client: Any = {**words.client, "timeout": timeout, "connect_timeout": timeout}
    config: Any = words.config_for(bucket)
    credentials: Any = words.credentials
    return obstore.store.S3Store(
        bucket,
        config=config,
        client_options=client,
        retry_config=retries,  # type: ignore[arg-type]  # a TypedDict, made elsewhere
        credential_provider=credentials,
    )


def _retries(config: CheckpointConfig) -> dict[str, Any]:
    """Say in obstore's words how often something is tried; see `requests`."""
    return {
        "max_retries": config.max_retries,
        "retry_timeout": dt.timedelta(seconds=config.retry_timeout_s),
        "backoff": {"init_backoff": _FIRST_WAIT, "max_backoff": _LONGEST_WAIT, "base": 2},
    }


class ObstoreStore:
    """A bucket; see `store.ObjectStore`.

    Args:
        small: For what is small.
        once: obstore's store that tries nothing again.
        repeating: Its store that tries parts again.
        config: Limits.
    """

    def __init__(
        self,
        small: S3Store,
        once: obstore.store.S3Store,
        repeating: obstore.store.S3Store,
        config: CheckpointConfig,
    ) -> None:
        self._small = small
        self._once, self._repeating = once, repeating
        self._traits = dataclasses.replace(small.traits, begins_again=True)
        self._part_nbytes = config.slab_nbytes
        self._max_parts_at_once = config.max_requests + 1

    @property
    def traits(self) -> StoreTraits:
        """What S3 can do; obstore tries to begin an upload until it hears of one."""
        return self._traits

    async def head(self, key: str) -> ObjectInfo:
        """Look at an object; see `store.ObjectStore`."""
        return await self._small.head(key)

    async def get(self, key: str, limit: int) -> tuple[ObjectInfo, bytes]:
        """Read an object; see `store.ObjectStore`."""
        return await self._small.get(key, limit)

    async def get_into(self, key: str, start: int, room: memoryview, *, match: str = "") -> None:
        """Read a range, copied once, as it comes; see `store.ObjectStore`."""
        try:
            failure = await self._receive(key, start, room, match)
        except Exception as error:  # whoever asked gets it, in our words
            failure = told(error)
        if failure is not None:
            raise failure

    async def _receive(
        self, key: str, start: int, room: memoryview, match: str
    ) -> StoreError | None:
        """Read a range; gives what is wrong. An error would keep the answer, and a connection."""
        stop, position = start + len(room), 0
        answer = await obstore.get_async(self._once, key, options={"range": (start, stop)})
        if not has_etag(answer.meta["e_tag"], match):
            return ConditionFailedError("another object is there")
        if answer.meta["size"] < stop:
            return RefusedError(f"it ends at byte {answer.meta['size']}")
        async for chunk in answer.stream(min_chunk_size=_CHUNK_NBYTES):
            if position + len(chunk) > len(room):
                break
            room[position : position + len(chunk)] = memoryview(chunk)
            position += len(chunk)
        if position < len(room):
            return TransientError(f"{position} bytes came instead of {len(room)}")
        return None

    async def put(
        self, key: str, data: bytes | memoryview, *, absent: bool = False, match: str = ""
    ) -> str:
        """Write an object from where it lies; see `store.ObjectStore`."""
        if absent or match or not len(data):
            return await self._small.put(key, data, absent=absent, match=match)
        sending, free = self._send(key, data)
        try:
            return str((await sending)["e_tag"])
        except Exception as error:  # whoever asked gets it, in our words
            failure = told(error)
        finally:
            await outlive(free)
        raise failure

    def _send(
        self, key: str, data: bytes | memoryview
    ) -> tuple[asyncio.Future[obstore.PutResult], asyncio.Future[None]]:
        """Begin to send an object; gives what comes of it, and when its memory is free."""
        view, free = lend(data)
        sending = _begun(lambda: obstore.put_async(self._once, key, view, use_multipart=False))
        return sending, free

    async def upload(self, key: str) -> ObstoreUpload:
        """Begin a stream of parts; see `store.ObjectStore`. The store hears of it soon after."""

        def start(parts: Parts) -> asyncio.Future[obstore.PutResult]:
            return _begun(
                lambda: obstore.put_async(
                    self._repeating,
                    key,
                    parts,
                    use_multipart=True,
                    chunk_size=self._part_nbytes,
                    max_concurrency=self._max_parts_at_once,
                )
            )

        return ObstoreUpload(start, told, self._part_nbytes)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """List objects; see `store.ObjectStore`."""
        return await self._small.list(prefix)

    async def uploads(self, prefix: str) -> Sequence[UploadInfo]:
        """List multipart uploads that have not ended; see `store.ObjectStore`."""
        return await self._small.uploads(prefix)

    async def drop_upload(self, upload: UploadInfo) -> None:
        """Abort a multipart upload; see `store.ObjectStore`."""
        await self._small.drop_upload(upload)

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; see `store.ObjectStore`."""
        await self._small.delete(keys)

    async def close(self) -> None:
        """Close the client for what is small, and let go of obstore's, which ends them soon."""
        del self._once, self._repeating
        await self._small.close()


def _begun(call: Callable[[], Any]) -> asyncio.Future[obstore.PutResult]:
    """Begin a request; gives a future of its end.

    Raises:
        StoreError: It was not sent: obstore has no word for its key, say.
    """
    try:
        sending: asyncio.Future[obstore.PutResult] = call()
    except Exception as error:  # whoever asked gets it, in our words
        failure = told(error)
    else:
        return sending
    raise failure


def told(error: Exception) -> StoreError:
    """Say what an error of obstore's means, by the status and code that its text has.

    Of the text itself nothing is repeated: it holds the whole request.
    """
    if isinstance(error, StoreError):
        return error
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        return told_by(int(status[1]), code[1] if code else status[1])
    if "configured region" in text:
        return RefusedError("the bucket is in another region; name it in the storage_options")
    if isinstance(error, (obstore.exceptions.GenericError, OSError, TimeoutError)):
        return TransientError(f"the connection or the answer failed: {type(error).__name__}")
    return RefusedError(type(error).__name__)
