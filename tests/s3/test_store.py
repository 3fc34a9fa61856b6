from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import io
import ssl
import types
from typing import TYPE_CHECKING, Any

import aiohttp
import botocore.exceptions
import pytest
from botocore.loaders import JSONFileLoader

from ckptio import Checkpointer, Engine
from ckptio.errors import ConfigError
from ckptio.storage import s3
from ckptio.storage.s3_answers import told
from ckptio.storage.s3_options import is_amazon
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectMissingError,
    RefusedError,
    StoreError,
    TransientError,
)
from tests.s3.proxy import Fault, Proxy, Request, answer
from tests.s3.rig import PART_NBYTES, config_for, keys_in, new_prefix, opened, uploads_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from ckptio.storage.store import ObjectStore
    from tests.s3.servers import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")


async def test_what_is_known_of_services_is_read_once(
    moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each client: it takes a fifth of a second of the engine's loop."""
    async with opened(moto):
        pass
    read: list[str] = []
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda _, path: read.append(path))
    async with opened(moto) as store:
        assert await store.list(f"{new_prefix()}/") == []
    assert read == []


async def test_an_answer_that_describes_no_object_keeps_no_connection(
    moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its body has still to send."""
    body = io.BytesIO(b"data")
    async with opened(moto) as store:

        async def answer(*_: object, **__: object) -> dict[str, Any]:
            return {"Body": body, "ContentLength": 4}

        monkeypatch.setattr(store, "request", answer)
        with pytest.raises(TransientError, match="does not describe an object"):
            await store.get("x", 4)
    assert body.closed


async def test_listings_go_on_over_pages(moto: Server) -> None:
    """Objects come all, in order, and the newest part, however small a page is."""
    prefix = new_prefix()
    names = [f"{prefix}/{number:04d}" for number in range(7)]
    options = {**moto.options, "s3_additional_kwargs": {"MaxKeys": 3, "MaxParts": 1}}
    async with Proxy(moto) as proxy:
        options["endpoint_url"] = proxy.server.endpoint
        async with opened(moto, storage_options=options) as store:
            for key in names:
                await store.put(key, b"")
            assert [info.key for info in await store.list(f"{prefix}/")] == names
            assert len([r for r in proxy.sent("GET") if "list-type" in r.query]) == 3
            upload = await store.upload(f"{prefix}/large")
            for number in range(3):
                await upload.write(number, memoryview(b"data"))
            assert len(await store.uploads(f"{prefix}/")) == 1
            assert len([r for r in proxy.sent("GET") if "uploadId" in r.query]) == 3
            await upload.abort()


@pytest.mark.parametrize(
    ("query", "entry"),
    [
        ("list-type", "<Contents><Key>a</Key><Size>4</Size></Contents>"),
        ("list-type", "<CommonPrefixes></CommonPrefixes>"),
        ("uploads", "<Upload><Key>a</Key><UploadId>u</UploadId></Upload>"),
        ("uploadId", "<Part><PartNumber>1</PartNumber></Part>"),
    ],
)
async def test_a_listing_that_says_too_little_is_none(moto: Server, query: str, entry: str) -> None:
    """It was a `KeyError`, of a save, too."""
    body = f"<Listing><IsTruncated>false</IsTruncated>{entry}</Listing>"
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    key = f"{new_prefix()}/a"
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        upload = await store.upload(key)
        proxy.decide = lambda r: Fault(answer=(head + body).encode()) if query in r.query else None
        with pytest.raises(TransientError, match="listing"):
            await (store.list("x/") if query == "list-type" else store.uploads(key))
        proxy.decide = lambda _: None
        await upload.abort()


@pytest.mark.real_s3
@pytest.mark.parametrize("name", ["ceph", "seaweedfs"])
async def test_a_thousand_objects_are_no_end(request: pytest.FixtureRequest, name: str) -> None:
    """Of a listing, where that is what a page of the server has."""
    server: Server = request.getfixturevalue(name)
    prefix = new_prefix()
    names = [f"{prefix}/{number:04d}" for number in range(1003)]
    async with Proxy(server) as proxy, opened(proxy.server) as store:
        for start in range(0, len(names), 17):
            await asyncio.gather(*(store.put(key, b"") for key in names[start : start + 17]))
        proxy.requests.clear()
        assert [info.key for info in await store.list(f"{prefix}/")] == names
        assert len(proxy.requests) == 2


async def test_uploads_are_listed_over_pages(moto: Server) -> None:
    """Where a page ends after one, and says only where the next begins."""
    prefix = new_prefix()

    def decide(request: Request) -> Fault | None:
        if "uploads" not in request.query or request.method != "GET":
            return None
        seen = request.query.get("key-marker", "")
        following = [key for key in keys if key > seen]
        return Fault(answer=_page_of_uploads(following[0], more=len(following) > 1))

    keys = [f"{prefix}/{number}" for number in range(3)]
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = decide
        found = await store.uploads(f"{prefix}/")
        assert [(upload.key, upload.upload_id) for upload in found] == [(k, "u") for k in keys]


def _page_of_uploads(key: str, *, more: bool) -> bytes:
    upload = f"<Key>{key}</Key><UploadId>u</UploadId><Initiated>2026-01-01T00:00:00Z</Initiated>"
    after = f"<NextKeyMarker>{key}</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>"
    body = (
        f"<ListMultipartUploadsResult>{after}<IsTruncated>{str(more).lower()}</IsTruncated>"
        f"<Upload>{upload}</Upload></ListMultipartUploadsResult>"
    )
    return _ok(body)


@pytest.mark.parametrize(
    "after",
    [
        "",
        "<NextContinuationToken>same</NextContinuationToken>",
        "<NextKeyMarker>a</NextKeyMarker>",
    ],
)
async def test_a_listing_that_goes_nowhere_is_none(moto: Server, after: str) -> None:
    """It is not cut where a server says that there is more, and not how to get it."""
    page = _ok(f"<Listing><IsTruncated>true</IsTruncated>{after}</Listing>")
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda _: Fault(answer=page) if len(proxy.requests) < 5 else None
        with pytest.raises(TransientError, match="listing"):
            await (store.uploads("x/") if "Key" in after else store.list("x/"))


async def test_an_upload_is_as_old_as_its_newest_part(moto: Server) -> None:
    """On whichever page that is: one of which parts come is not swept."""
    begun = "<Upload><Key>a</Key><UploadId>u</UploadId><Initiated>2026-01-01T00:00:00Z</Initiated>"
    uploads = f"<Listing><IsTruncated>false</IsTruncated>{begun}</Upload></Listing>"

    def decide(request: Request) -> Fault:
        if "uploads" in request.query:
            return Fault(answer=_ok(uploads))
        is_last = "part-number-marker" in request.query
        part = f"<Part><LastModified>2026-01-0{2 if is_last else 3}T00:00:00Z</LastModified></Part>"
        end = f"<IsTruncated>{str(not is_last).lower()}</IsTruncated>"
        after = "<NextPartNumberMarker>1</NextPartNumberMarker>"
        return Fault(answer=_ok(f"<Listing>{end}{after}{part}</Listing>"))

    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = decide
        (upload,) = await store.uploads("a")
        assert len(proxy.requests) == 3
    assert upload.active_s == dt.datetime(2026, 1, 3, tzinfo=dt.UTC).timestamp()


def _ok(body: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return (head + body).encode()


async def _put(store: ObjectStore, key: str) -> None:
    await store.put(key, b"data")


async def _write_part(store: ObjectStore, key: str) -> None:
    upload = await store.upload(key)
    await upload.write(0, memoryview(b"data"))


async def _complete(store: ObjectStore, key: str) -> None:
    upload = await store.upload(key)
    await upload.write(0, memoryview(b"data"))
    await upload.complete()


async def _list(store: ObjectStore, key: str) -> None:
    await store.list(f"{key}/")


async def _uploads(store: ObjectStore, key: str) -> None:
    await store.uploads(f"{key}/")


async def _upload(store: ObjectStore, key: str) -> None:
    await store.upload(key)


async def _delete(store: ObjectStore, key: str) -> None:
    await store.delete([key])


async def _head(store: ObjectStore, key: str) -> None:
    await store.head(key)


async def _get(store: ObjectStore, key: str) -> None:
    await store.get(key, 100)


async def _get_into(store: ObjectStore, key: str) -> None:
    await store.get_into(key, 0, memoryview(bytearray(4)))


WRITES = (_put, _write_part, _complete, _upload)
LOOKS = (_list, _uploads, _head, _get, _get_into)


def last_of(operation: Callable[[ObjectStore, str], Awaitable[None]]) -> Callable[[Request], bool]:
    """Say which request of an operation is its last one: the one that is disturbed."""
    if operation is _write_part:
        return lambda request: "partNumber" in request.query
    if operation is _complete:
        return lambda request: request.method == "POST" and "uploadId" in request.query
    return lambda _: True


@pytest.mark.parametrize("operation", [*WRITES, _list, _uploads])
async def test_an_error_with_status_200_is_an_error(
    moto: Server, operation: Callable[[ObjectStore, str], Awaitable[None]]
) -> None:
    """S3 may begin an answer before it knows how that ends."""
    chosen = last_of(operation)
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda r: Fault(answer=answer(200, "InternalError")) if chosen(r) else None
        with pytest.raises(TransientError):
            await operation(store, f"{new_prefix()}/a")


@pytest.mark.parametrize("operation", [*WRITES, *LOOKS])
async def test_an_empty_answer_is_an_error(
    moto: Server, operation: Callable[[ObjectStore, str], Awaitable[None]]
) -> None:
    """Of some proxy, say: nothing is taken for written, or for not there."""
    chosen = last_of(operation)
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda r: Fault(answer=answer(200)) if chosen(r) else None
        with pytest.raises(TransientError):
            await operation(store, f"{new_prefix()}/a")


@pytest.mark.parametrize("operation", [*WRITES, *LOOKS, _delete])
@pytest.mark.parametrize("after", [False, True])
async def test_a_lost_answer_may_come_another_time(
    moto: Server, operation: Callable[[ObjectStore, str], Awaitable[None]], *, after: bool
) -> None:
    """Broken connections say nothing of what happened. Only aiohttp asks once more, at most."""
    chosen = last_of(operation)
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda r: Fault(reset=True, forward=after) if chosen(r) else None
        with pytest.raises(TransientError) as caught:
            await operation(store, f"{new_prefix()}/a")
        assert not caught.value.slow_down
        assert len([r for r in proxy.requests if chosen(r)]) in {1, 2}


@pytest.mark.parametrize(
    ("status", "code", "kind", "slow"),
    [
        (503, "SlowDown", TransientError, True),
        (503, "ServiceUnavailable", TransientError, True),
        (429, "TooManyRequests", TransientError, True),
        (400, "RequestTimeout", TransientError, False),
        (400, "BadDigest", TransientError, False),
        (500, "InternalError", TransientError, False),
        (502, "", TransientError, False),
        (409, "OperationAborted", TransientError, False),
        (409, "ConditionalRequestConflict", ConditionFailedError, None),
        (412, "PreconditionFailed", ConditionFailedError, None),
        (404, "NoSuchKey", TransientError, False),
        (404, "NoSuchUpload", ObjectMissingError, None),
        (404, "NoSuchBucket", RefusedError, None),
        (403, "AccessDenied", RefusedError, None),
        (400, "InvalidArgument", RefusedError, None),
        (501, "NotImplemented", RefusedError, None),
    ],
)
async def test_answers_mean_one_of_four_things(
    moto: Server, status: int, code: str, kind: type[StoreError], *, slow: bool | None
) -> None:
    """Whoever asked is told what to do, and what the server called it; botocore sends once.

    That a key is missing which is written is no answer, though JuiceFS's gateway gives it.
    """
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda _: Fault(answer=answer(status, code))
        with pytest.raises(kind) as caught:
            await store.put("a/b", b"data")
        assert (code or str(status)) in str(caught.value)
        assert getattr(caught.value, "slow_down", None) is slow
        assert [request.method for request in proxy.requests] == ["PUT"]


@pytest.mark.parametrize("absent", [True, False])
async def test_what_is_written_on_a_condition_may_be_gone(moto: Server, *, absent: bool) -> None:
    """So Amazon says it where there is nothing to compare."""
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda _: Fault(answer=answer(404, "NoSuchKey"))
        with pytest.raises(ObjectMissingError if absent else ConditionFailedError):
            await store.put("a/b", b"data", **({"absent": True} if absent else {"match": '"e"'}))


def has_condition(request: Request) -> bool:
    return not request.headers.keys().isdisjoint({"if-match", "if-none-match"})


async def expect_conditions(store: ObjectStore, key: str) -> None:
    """Look whether conditions hold, where nobody else writes."""
    first = await store.put(key, b"one", absent=True)
    second = await store.put(key, b"two", match=first)
    for condition in ({"absent": True}, {"match": first}):
        with pytest.raises(ConditionFailedError):
            await store.put(key, b"three", **condition)
    assert (await store.get(key, 100))[1] == b"two"
    await store.delete([key])
    with pytest.raises(ConditionFailedError):
        await store.put(key, b"three", match=second)
    with pytest.raises(ObjectMissingError):
        await store.head(key)


@contextlib.asynccontextmanager
async def without_conditions(moto: Server) -> AsyncIterator[ObjectStore]:
    """Open a store of a server that knows no conditions."""
    refused = Fault(answer=answer(501, "NotImplemented"))
    async with Proxy(moto) as proxy:
        proxy.decide = lambda request: refused if has_condition(request) else None
        async with opened(proxy.server) as store:
            yield store


async def test_where_a_server_knows_no_conditions_they_are_looked_at(moto: Server) -> None:
    """That is the next best; only of Amazon it is no answer."""
    async with without_conditions(moto) as store:
        assert store.traits.conditional == "none"
        await expect_conditions(store, f"{new_prefix()}/a")


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("https://s3.eu-west-1.amazonaws.com", True),
        ("https://bucket.s3.cn-north-1.amazonaws.com.cn", True),
        ("https://amazonaws.com.example.org", False),
        ("https://example.org/s3.amazonaws.com", False),
        ("http://127.0.0.1:9000", False),
        ("http:///nowhere", False),
    ],
)
def test_amazon_is_known_by_its_hosts(endpoint: str, *, expected: bool) -> None:
    """Conditions are trusted to be decided there."""
    assert is_amazon(endpoint) == expected


async def test_where_conditions_decide_they_are_never_left_out(
    moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others trust in them: a writer that loses removes what it wrote at once."""
    monkeypatch.setattr(s3, "is_amazon", lambda _: True)
    key = f"{new_prefix()}/a"
    async with without_conditions(moto) as store:
        assert store.traits.conditional == "atomic"
        for condition in ({"absent": True}, {"match": '"a"'}):
            with pytest.raises(RefusedError):
                await store.put(key, b"data", **condition)
    assert keys_in(moto, key) == []


async def test_etags_may_be_compared_without_quotes(moto: Server) -> None:
    """As some servers do: then it is another etag only if a look says so, too."""
    key = f"{new_prefix()}/a"
    refused = Fault(answer=answer(412, "PreconditionFailed"))
    async with Proxy(moto) as proxy:
        proxy.decide = lambda r: refused if r.headers.get("if-match", "")[:1] == '"' else None
        async with opened(proxy.server) as store:
            await expect_conditions(store, key)
        tags = [request.headers.get("if-match", "") for request in proxy.requests]
        assert len([tag for tag in tags if tag.strip('"') == tag != ""]) == 1


async def test_an_etag_without_quotes_is_compared_once(moto: Server) -> None:
    """There is no other way to write it."""
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda _: Fault(answer=answer(412, "PreconditionFailed"))
        with pytest.raises(ConditionFailedError):
            await store.put("a/b", b"data", match="bare")
        assert [request.method for request in proxy.requests] == ["PUT"]


async def test_an_object_that_goes_before_it_is_compared_again_is_another(moto: Server) -> None:
    """Between the look and the second write, which such a server answers with a 404."""
    key = f"{new_prefix()}/a"
    refused, gone = (answer(s, c) for s, c in ((412, "PreconditionFailed"), (404, "NoSuchKey")))
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        first = await store.put(key, b"one")
        proxy.decide = lambda r: (
            Fault(answer=refused if r.headers["if-match"][:1] == '"' else gone)
            if has_condition(r)
            else None
        )
        with pytest.raises(ConditionFailedError):
            await store.put(key, b"two", match=first)


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "InvalidAccessKeyId"), (403, "RequestTimeTooSkewed"), (400, "ExpiredToken")],
)
async def test_a_look_that_is_refused_says_why(moto: Server, status: int, code: str) -> None:
    """Which the answer to a HEAD, without a body, cannot."""
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda r: Fault(answer=answer(status, "" if r.method == "HEAD" else code))
        with pytest.raises(RefusedError, match=rf"{code} \({status}\)"):
            await store.head("a/b")
        (asked,) = proxy.sent("GET")
        assert asked.headers["range"] == "bytes=0-0"


@pytest.mark.parametrize(
    "found", [answer(200), answer(404), answer(500), answer(416, "InvalidRange")]
)
async def test_a_look_that_alone_is_refused_is_refused(moto: Server, found: bytes) -> None:
    """Also of an object that is empty."""
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda r: Fault(answer=answer(403) if r.method == "HEAD" else found)
        with pytest.raises(RefusedError, match=r"Forbidden \(403\)"):
            await store.head("a/b")


@pytest.mark.parametrize(
    ("region", "said"),
    [("eu-west-1", "; the bucket is in the region 'eu-west-1'"), ("a secret!", ""), ("", "")],
)
def test_a_bucket_elsewhere_says_where(region: str, said: str) -> None:
    response: Any = {
        "Error": {"Code": "PermanentRedirect"},
        "ResponseMetadata": {
            "HTTPStatusCode": 301,
            "HTTPHeaders": {"x-amz-bucket-region": region},
        },
    }
    problem = told(botocore.exceptions.ClientError(response, "HeadObject"))
    assert str(problem) == f"PermanentRedirect (301){said}"


def test_a_bucket_with_object_lock_says_what_it_wants() -> None:
    response: Any = {
        "Error": {"Code": "MissingUploadObjectWithObjectLockHeaders"},
        "ResponseMetadata": {"HTTPStatusCode": 400},
    }
    problem = told(botocore.exceptions.ClientError(response, "PutObject"))
    assert "'request_checksum_calculation': 'when_supported'" in str(problem)


def test_certificates_that_cannot_be_read_are_not_asked_for_again(tmp_path: Path) -> None:
    """They were a connection that failed, for minutes, and nothing said what was missing."""
    problem = told(botocore.exceptions.HTTPClientError(error=FileNotFoundError(2, "secret")))
    assert isinstance(problem, RefusedError)
    assert str(problem) == "the certificates to trust cannot be read (verify=): FileNotFoundError"
    empty = tmp_path / "ca.pem"
    empty.touch()
    for path in (empty, empty / "ca.pem"):
        with pytest.raises(OSError) as caught:  # noqa: PT011  # either kind
            ssl.create_default_context().load_verify_locations(path)
        problem = told(botocore.exceptions.HTTPClientError(error=caught.value))
        assert isinstance(problem, RefusedError)
    for failure in (OSError(5, "no"), ssl.SSLError(1, "bad record mac")):  # on the way
        problem = told(botocore.exceptions.HTTPClientError(error=failure))
        assert isinstance(problem, TransientError)


def test_an_answer_that_is_no_http_is_not_called_a_connection_that_failed() -> None:
    """Under `python -X dev`, aiohttp refuses a header that comes twice, as moto's `Server` does."""
    request: Any = types.SimpleNamespace(real_url="http://host/?secret")
    refused = aiohttp.ClientResponseError(request, (), status=400, message="secret")
    problem = told(botocore.exceptions.HTTPClientError(error=refused))
    assert isinstance(problem, TransientError)
    assert str(problem) == "the answer is no valid HTTP: ClientResponseError"


@pytest.mark.parametrize(
    ("kind", "error", "is_tried_again"),
    [
        (aiohttp.ClientConnectorSSLError, ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER]"), False),
        (aiohttp.ClientConnectorSSLError, ssl.SSLError(1, "[SSL: BAD_RECORD_MAC]"), True),
        (aiohttp.ClientConnectorSSLError, ssl.SSLZeroReturnError(6, "it was closed"), True),
        (aiohttp.ClientConnectorCertificateError, ssl.SSLError(1, "self-signed"), False),
        (aiohttp.ClientConnectorCertificateError, ssl.CertificateError("another name"), False),
    ],
)
def test_tls_that_was_garbled_as_it_began_is_tried_again(
    kind: Any, error: Exception, *, is_tried_again: bool
) -> None:
    """Of another TLS and of certificates that are not trusted, more of the same would come."""
    key = types.SimpleNamespace(host="here", port=443, ssl=True, is_ssl=True)
    problem = told(botocore.exceptions.SSLError(endpoint_url="", error=kind(key, error)))
    assert isinstance(problem, TransientError if is_tried_again else RefusedError)


@pytest.mark.parametrize("early_nbytes", [0, 1, 100_000])
async def test_an_answer_may_come_before_the_body_is_sent(moto: Server, early_nbytes: int) -> None:
    """The memory of the body is free at once, and nobody reads from it any more."""
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda _: Fault(
            early=True, early_nbytes=early_nbytes, answer=answer(503, "SlowDown")
        )
        data = bytearray(4 * PART_NBYTES)
        with pytest.raises(TransientError), memoryview(data) as view:
            await store.put("a/b", view)
        data.extend(b"!")  # refused while anybody holds a view of it


@pytest.mark.parametrize("keep_nbytes", [0, 1, 99_999])
async def test_a_body_that_is_cut_is_not_taken(server: Server, keep_nbytes: int) -> None:
    """Neither whole nor by range."""
    key = f"{new_prefix()}/a"
    async with Proxy(server) as proxy, opened(proxy.server) as store:
        await store.put(key, bytes(100_000))
        proxy.decide = lambda _: Fault(forward=True, keep_nbytes=keep_nbytes)
        with pytest.raises(TransientError):
            await store.get(key, 1 << 30)
        with pytest.raises(TransientError):
            await store.get_into(key, 0, memoryview(bytearray(100_000)))


async def test_a_server_that_ignores_ranges_is_not_believed(moto: Server) -> None:
    """The first bytes are not those that were asked for, unless all were."""
    key = f"{new_prefix()}/a"
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nabcd"
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda _: Fault(answer=whole)
        for start, nbytes in ((2, 2), (1, 4)):
            with pytest.raises(StoreError):
                await store.get_into(key, start, memoryview(bytearray(nbytes)))
        room = memoryview(bytearray(4))
        await store.get_into(key, 0, room)
        assert bytes(room) == b"abcd"


async def test_an_answer_that_is_longer_than_its_range_is_not_believed(moto: Server) -> None:
    """Which of its bytes are those that were asked for, nobody knows."""
    found = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 2-3/9\r\n"
    found += b"Content-Length: 4\r\nConnection: close\r\n\r\nabcd"
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda _: Fault(answer=found)
        with pytest.raises(TransientError, match="not the range"):
            await store.get_into("a/b", 2, memoryview(bytearray(2)))


async def test_a_range_may_come_without_its_length(moto: Server) -> None:
    """What a proxy sends in chunks is whole when it says which range it is and has its bytes."""
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 2-5/9\r\nConnection: close\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    room = memoryview(bytearray(4))
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda _: Fault(answer=head + b"4\r\ncdef\r\n0\r\n\r\n")
        await store.get_into("a/b", 2, room)
        assert bytes(room) == b"cdef"
        proxy.decide = lambda _: Fault(answer=head + b"3\r\ncde\r\n0\r\n\r\n")
        with pytest.raises(TransientError):
            await store.get_into("a/b", 2, room)


async def test_a_part_that_is_cancelled_is_not_sent_any_more(server: Server) -> None:
    """Its memory is free at once, and an abort finds nothing in its way."""
    key = f"{new_prefix()}/a"
    async with Proxy(server) as proxy, opened(proxy.server) as store:
        upload = await store.upload(key)
        hold = asyncio.Event()
        proxy.decide = lambda r: Fault(hold=hold) if "partNumber" in r.query else None
        data = bytearray(PART_NBYTES)
        with memoryview(data) as view:
            task = asyncio.create_task(upload.write(0, view))
            while not proxy.sent("PUT"):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        data.extend(b"!")  # refused while anybody holds a view of it
        hold.set()
        await upload.abort()
        assert uploads_in(server, key) == []


async def test_an_upload_that_ended_is_aborted_without_an_error(server: Server) -> None:
    """Whoever cleans up may be late."""
    key = f"{new_prefix()}/a"
    async with opened(server) as store:
        upload = await store.upload(key)
        await upload.write(0, memoryview(b"data"))
        (listed,) = await store.uploads(key)
        await upload.abort()
        await upload.abort()
        await store.drop_upload(listed)
        assert keys_in(server, key) == []


async def test_what_is_not_there_is_no_error_to_remove(moto: Server) -> None:
    """Whatever a server calls it, also behind an answer that was lost; and the others go."""
    keys = [f"{new_prefix()}/{name}" for name in ("gone", "there")]
    missing = Fault(answer=answer(404, "NoSuchKey"))
    async with Proxy(moto) as proxy, opened(proxy.server) as store:
        proxy.decide = lambda request: missing if request.key.endswith("gone") else None
        await store.put(keys[1], b"data")
        await store.delete(keys)
    assert keys_in(moto, keys[1]) == []


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://", "'s3://' names no bucket"),
        ("s3:///", "'s3://' names no bucket"),
        ("s3://bucket", "has to be s3://BUCKET/PREFIX"),
        ("s3://bucket/", "has to be s3://BUCKET/PREFIX"),
        ("s3:///prefix", "has to be s3://BUCKET/PREFIX"),
        ("s3://arn:aws:s3:us-west-2:123456789012:accesspoint/ap/x", "has an ARN"),
        ("s3://my bucket/x", "'my bucket' for a bucket"),
        ("s3://user@bucket/x", "'user@bucket' for a bucket"),
    ],
)
async def test_a_url_has_a_bucket_and_a_prefix(
    moto: Server, client: str, url: str, problem: str
) -> None:
    """The root of a bucket is no checkpoint; what cannot be a bucket is refused by name."""
    async with Engine(config_for(moto, s3_client=client)) as engine:
        with pytest.raises(ConfigError, match=problem):
            await engine.load(url)


@pytest.mark.parametrize("url", ["s3://", "memory://", "gs:///"])
async def test_a_run_needs_a_bucket_too(url: str) -> None:
    """Or what a store has instead of one."""
    with pytest.raises(ConfigError, match="names no bucket"):
        async with Checkpointer(url):
            pass


async def test_options_that_make_no_sense_are_not_repeated(moto: Server) -> None:
    """Their values may be secret: neither the error nor what it came from shows them."""
    options = {**moto.options, "endpoint_url": "hidden-of-mine", "config_kwargs": {"hidden-x": 1}}
    server = dataclasses.replace(moto)
    with pytest.raises(ConfigError) as caught:
        async with opened(server, storage_options=options):
            pass
    assert "hidden" not in repr(caught.value)
    assert "endpoint_url" in str(caught.value)
    assert caught.value.__context__ is None


async def test_where_no_option_is_given_none_is_named(
    moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment asks for what is not there."""
    monkeypatch.setenv("AWS_PROFILE", "nobody-has-this")
    with pytest.raises(ConfigError, match=r"given \(none\): ProfileNotFound"):
        async with opened(moto, storage_options={}):
            pass
