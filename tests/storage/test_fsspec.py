"""File systems of fsspec as object stores: memory, local, the least of both kinds, clouds."""

from __future__ import annotations

import datetime as dt
import errno
import ftplib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, quote_plus

import aiohttp
import fsspec
import fsspec.asyn
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from ckptio import Checkpointer, Engine
from ckptio._threads import Threads
from ckptio.config import CheckpointConfig
from ckptio.errors import CheckpointError, CheckpointNotFoundError, ConfigError, StorageError
from ckptio.storage.fsspec import FsspecBackend, FsspecStore
from ckptio.storage.fsspec_answers import how_to_create, info_of, secrets_of, told
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectMissingError,
    RefusedError,
    TransientError,
)
from ckptio.testing.conformance import BackendConformance
from tests.rig import assert_same, config_with, random_state
from tests.s3.servers import free_port
from tests.storage.filesystems import LoopFileSystem, SyncFileSystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

MiB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    """Make the file systems of these tests known to fsspec."""
    fsspec.asyn.get_loop()  # a thread that stays
    fsspec.register_implementation("plainsync", SyncFileSystem, clobber=True)
    fsspec.register_implementation("plainasync", LoopFileSystem, clobber=True)


@pytest.mark.usefixtures("no_leaks")
class TestMemory(BackendConformance):
    """fsspec's own file system in memory."""

    url = "memory://conformance"
    slab_nbytes = MiB


@pytest.mark.usefixtures("no_leaks")
class TestSync(BackendConformance):
    """One that only blocks."""

    url = "plainsync://conformance"
    slab_nbytes = MiB


class TestAsync(BackendConformance):
    """One that only awaits; fsspec's own thread runs it."""

    url = "plainasync://conformance"
    slab_nbytes = MiB


@pytest.mark.usefixtures("no_leaks")
class TestDirectory(BackendConformance):
    """A directory of this machine, by a way that has directories."""

    url = "dir://conformance/somewhere"
    slab_nbytes = MiB

    @pytest.fixture(autouse=True)
    def root(self, tmp_path: Path) -> Iterator[None]:
        """Keep it under a temporary directory, of which nothing is left in the end."""
        options = {"path": str(tmp_path / "root"), "target_protocol": "file"}
        self.storage_options = options  # type: ignore[misc]  # of this test alone
        yield
        left = [name for _, _, names in os.walk(tmp_path) for name in names]
        assert left == []


@pytest.fixture(scope="session")
def google() -> Iterator[Mapping[str, Any]]:
    """Run a server that speaks Google's protocol; give the options that reach it."""
    # else it looks for Google's own fast buckets by gRPC, for which no emulator answers
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    port = free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    yield {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "project": "test"}
    server.stop()


_OF_CONDITIONS = (
    "test_a_condition_holds_or_nothing_is_written",
    "test_of_many_writers_one_wins",
    "test_of_two_saves_one_is_there",
)
#: Said of aiohttp by what gcsfs and adlfs do with it.
LARGE_BODIES = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@LARGE_BODIES
class TestGoogle(BackendConformance):
    """gs:// through gcsfs."""

    url = "gs://bucket/conformance"
    slab_nbytes = MiB
    num_writers = 4

    @pytest.fixture(autouse=True)
    def server(self, google: Mapping[str, Any], request: pytest.FixtureRequest) -> None:
        """Go to the local one."""
        self.storage_options = google  # type: ignore[misc]  # of this test alone
        if request.node.name in _OF_CONDITIONS:
            pytest.skip("the emulator takes no notice of ifGenerationMatch")


@LARGE_BODIES
async def test_a_bucket_that_is_not_there_is_told(google: Mapping[str, Any]) -> None:
    """It is no run without steps, and no place for a first one; an empty one is."""
    config = config_with(storage_options=google, max_retries=1)
    no_bucket = pytest.raises(StorageError, match="there is no bucket 'bukcet'")
    async with Engine(config) as engine:
        with no_bucket:
            await engine.load("gs://bukcet/run/step-1")
        for overwrite in (False, True):
            with no_bucket:
                await engine.save({"a": 1}, "gs://bukcet/run/step-1", overwrite=overwrite)
        with pytest.raises(CheckpointNotFoundError):
            await engine.load("gs://bucket/nothing/step-1")
    async with Checkpointer("gs://bucket/nothing", config=config) as run:
        assert await run.latest() is None
    async with Checkpointer("gs://bukcet/run", config=config) as run:
        with no_bucket:
            await run.latest()
    assert not fsspec.filesystem("gs", **google).exists("bukcet")


class Unseen(SyncFileSystem):
    """A bucket at which this user may not look, and which is empty."""

    protocol = "az"
    cachable = False

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002  # fsspec's signature
        del detail
        if path == "bucket":
            return []
        raise FileNotFoundError(path) if path.startswith("bucket/") else PermissionError(path)


async def test_a_bucket_that_nobody_may_look_at_is_taken_to_be_there() -> None:
    """If it can be listed, or if that is forbidden, too."""
    store = FsspecStore(Unseen(), "az", 1)
    assert await store.list("bucket/run/") == []
    await store.close()
    for key in ("bucket/run/a", "other/run/a"):
        store = FsspecStore(Unseen(), "az", 1)
        with pytest.raises(ObjectMissingError):
            await store.head(key)
        await store.close()


async def test_what_google_forbids_is_refused_at_once() -> None:
    """In its words, which gcsfs puts into an error without a number."""
    retry = pytest.importorskip("gcsfs.retry")
    answer = json.dumps({"error": {"code": 403, "message": "no storage.objects.create access"}})
    with pytest.raises(OSError, match="Forbidden") as caught:
        retry.validate_response(403, answer, "b/{}/o", ["bucket"])
    failure, is_clean = told(caught.value)
    assert type(failure) is RefusedError
    assert failure.problem == "OSError: Forbidden: b/bucket/o no storage.objects.create access"
    assert is_clean
    assert told(caught.value, ["create access"])[0].problem.endswith("objects....")


_AZURITE_KEY = (  # the one that every Azurite has, by its documentation
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    """Run Azurite; give the options that reach it."""
    pytest.importorskip("adlfs")
    command = shutil.which("azurite-blob")
    if command is None:
        pytest.skip("needs Azurite: npm install -g azurite")
    port = free_port()
    where = tmp_path_factory.mktemp("azurite")
    with subprocess.Popen(
        [
            command,
            "--silent",
            "--disableTelemetry",
            "--skipApiVersionCheck",
            "--location",
            str(where),
            "--blobPort",
            str(port),
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while "listens" not in process.stdout.readline():
            assert process.poll() is None
        url = f"http://127.0.0.1:{port}/devstoreaccount1"
        options = {
            "connection_string": "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;"
            f"AccountKey={_AZURITE_KEY};BlobEndpoint={url};"
        }
        fsspec.filesystem("az", **options).mkdir("bucket")
        yield options
        process.terminate()


@LARGE_BODIES
class TestAzure(BackendConformance):
    """az:// through adlfs."""

    url = "az://bucket/conformance"
    slab_nbytes = MiB
    num_writers = 4

    @pytest.fixture(autouse=True)
    def server(self, azure: Mapping[str, Any]) -> None:
        """Go to the local one."""
        self.storage_options = azure  # type: ignore[misc]  # of this test alone


class TestMultiStorageClient(BackendConformance):
    """msc:// by the real package, on a profile of files."""

    url = "msc://files/conformance"
    slab_nbytes = MiB

    @pytest.fixture(autouse=True)
    def profile(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Describe the profile where the package looks for it."""
        pytest.importorskip("multistorageclient")
        config = tmp_path / "msc.yaml"
        root = tmp_path / "root"
        root.mkdir()
        config.write_text(
            "profiles:\n  files:\n    storage_provider:\n      type: file\n"
            f"      options:\n        base_path: {root}\n"
        )
        monkeypatch.setenv("MSC_CONFIG", str(config))


def secret_options() -> dict[str, Any]:
    return {
        "key": "AKIASECRET",
        "client_kwargs": {"token": "t0ps3cret", "region": "here"},
        "credentials": {"who": "hidden-name"},
        "project": "open",
    }


def test_secrets_are_known_by_their_names() -> None:
    """Values of options that are called like secrets, at any depth; not others."""
    assert set(secrets_of(secret_options())) == {"AKIASECRET", "t0ps3cret", "hidden-name"}
    options = {"passwd": "pw", "headers": {"Authorization": "Bearer x"}, "auth": ("me", "me-too")}
    assert set(secrets_of(options)) == {"pw", "Bearer x", "me", "me-too"}
    assert secrets_of({"hosts": ["a", {"pwd": "b"}]}) == ("b",)
    assert secrets_of({"headers": [("Accept", "a"), ("Authorization", "b")]}) == ("b",)


def quote_little(text: str) -> str:
    """Quote as those do that leave in a URL what they may, and write small letters."""
    return re.sub("%..", lambda found: found[0].lower(), quote(text, safe="!$&'()*+,;="))


def write_twice(text: str) -> str:
    """As an error whose message has the `repr` of a text that has that of the options."""
    return repr(repr({"key": text}))


WAYS = [str, repr, ascii, json.dumps, quote, quote_plus, quote_little, write_twice]


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize(
    "secret", ["-----BEGIN KEY-----\nMIIE", "p'w\"\\\\n", "p@ss w/rd!", "p\u00e4sse", "\U0001f511"]
)
def test_a_secret_is_known_however_it_is_written(secret: str, write: Callable[[str], str]) -> None:
    """A key of several lines in the `repr` of the options, or a password in a URL."""
    hidden = secrets_of({"token": {"private_key": secret}})
    written = write(secret)
    assert written.count(secret) <= 1
    shown, is_clean = told(RuntimeError(f"no such login: <{written}>"), hidden)
    assert re.fullmatch(
        r"RuntimeError: no such login: <[\"'{}key:\\ ]*\.\.\.[\"'}\\]*>", str(shown)
    )
    assert not is_clean


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("secret", [b"\xffpw\n", "p\u00e4sse".encode(), b"p'w\""])
def test_a_secret_of_bytes_is_known(secret: bytes, kind: Callable[[bytes], object]) -> None:
    """Text or not: Python writes both alike, byte by byte."""
    hidden = secrets_of({"password": kind(secret)})
    for written in (repr(secret), quote(secret)):
        shown, is_clean = told(RuntimeError(f"no such login: <{written}>"), hidden)
        assert re.fullmatch(r"RuntimeError: no such login: <[b\"']*\.\.\.[\"']?>", str(shown))
        assert not is_clean


CUT_OFF = """
import json
from ckptio.storage.fsspec_answers import told

key = json.dumps({f"name {i}": 'say "no"\\n' for i in range(30)})
for once in (json.dumps(key), repr(key)):
    for written in (once, json.dumps(once)):
        print(told(RuntimeError(f"bad key: {written[:-4]}"), (key,))[0])
"""


def test_what_is_almost_a_secret_is_soon_told_from_it() -> None:
    """A key in JSON, quoted and cut off: what looks for it may not try all ways of each quote.

    In a process of its own, which can be ended: nothing else runs while Python looks.
    """
    command = [sys.executable, "-c", CUT_OFF]
    told = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert told.stdout.count("RuntimeError: bad key: ") == 4


def test_a_secret_that_is_no_text_hides_no_error() -> None:
    """Of a variable of the environment that is not UTF-8, or half of a character."""
    for secret in ("\udc80", "\ud800"):
        assert str(told(RuntimeError("no such login"), (secret,))[0]).endswith("no such login")
        assert secret not in str(told(RuntimeError(f"no such login: {secret}"), (secret,))[0])


def test_a_secret_that_is_a_part_of_another_leaves_nothing_of_that() -> None:
    """The name of a user may be the beginning of the password."""
    hidden = secrets_of({"auth": ("ann", "ann-2026")})
    assert str(told(RuntimeError("no such login: ann-2026"), hidden)[0]).endswith("login: ...")


@pytest.mark.parametrize("secret", ["s3same?to=me", "s3same?to=me'too"])
def test_a_secret_that_looks_like_a_query_leaves_nothing_of_itself(secret: str) -> None:
    """What stands before the question mark is as secret as the rest."""
    hidden = secrets_of({"password": secret})
    error = told(RuntimeError(f"no such login: {secret} at https://a/b?sig={secret}"), hidden)[0]
    assert str(error).endswith("no such login: ... at https://a/b?...")


def no_tls(error: ssl.SSLError) -> Exception:
    """Give what aiohttp raises where TLS does not begin."""
    key: Any = types.SimpleNamespace(host="here", port=80, ssl=True)
    return aiohttp.ClientConnectorSSLError(key, error)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError(13, "no"), RefusedError),
        (OSError(28, "full"), RefusedError),
        (ssl.SSLError(1, "[SSL: BAD_RECORD_MAC] bad record mac"), TransientError),
        (aiohttp.ClientOSError(1, "[SSL: BAD_RECORD_MAC] bad record mac"), TransientError),
        (ssl.SSLCertVerificationError(1, "self-signed"), RefusedError),
        (no_tls(ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER]")), RefusedError),
        (no_tls(ssl.SSLError(1, "[SSL: SSLV3_ALERT_HANDSHAKE_FAILURE]")), RefusedError),
        (no_tls(ssl.SSLError(1, "[SSL: TLSV1_ALERT_INTERNAL_ERROR]")), TransientError),
        (no_tls(ssl.SSLError(1, "[SSL: SSLV3_ALERT_BAD_RECORD_MAC]")), TransientError),
        (no_tls(ssl.SSLZeroReturnError(6, "TLS/SSL connection has been closed")), TransientError),
        (OSError(5, "bad day"), TransientError),
        (ConnectionResetError("reset"), TransientError),
        (TimeoutError(), TransientError),
        (NotImplementedError(), RefusedError),
        (ValueError("x"), RefusedError),
        (RuntimeError("who knows"), TransientError),
    ],
)
def test_failures_are_told_in_the_words_of_a_store(error: Exception, kind: type) -> None:
    """What may get better is transient, and nothing else is."""
    assert type(told(error)[0]) is kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RefusedError),
        (403, RefusedError),
        (404, ObjectMissingError),
        (408, TransientError),
        (412, ConditionFailedError),
        (429, TransientError),
        (500, TransientError),
        (501, RefusedError),
        (503, TransientError),
    ],
)
def test_a_status_says_what_a_failure_is(status: int, kind: type) -> None:
    """Whatever the class of the error: servers speak in numbers."""

    class AnswerError(Exception):
        def __init__(self) -> None:
            super().__init__("the server said so")
            self.status = status

    answer, is_clean = told(AnswerError())
    assert type(answer) is kind
    assert is_clean
    assert getattr(answer, "slow_down", False) == (status in (429, 503))


def test_what_is_secret_is_cut_out_of_what_a_failure_says() -> None:
    """Values of options, and signatures in URLs; and then the error itself is not shown."""
    for text in ("key AKIASECRET is not known", "GET https://h/b?sv=1&sig=AbC%3D: 403"):
        answer, is_clean = told(OSError(text), ["AKIASECRET"])
        assert not is_clean
        assert "AKIASECRET" not in answer.problem
        assert "AbC" not in answer.problem


@pytest.mark.parametrize("kind", ["cause", "context", "member", "note"])
def test_what_a_failure_came_from_is_not_shown_if_it_is_secret(kind: str) -> None:
    """A traceback shows all of it: a server's answer, say, behind a plain error."""
    inner = OSError("GET https://h/b?sv=1&sig=AbC%3D: 403")
    error: Exception = OSError("it failed")
    if kind == "cause":
        error.__cause__ = ValueError("so did this")
        error.__cause__.__cause__ = inner
    elif kind == "context":
        error.__context__ = inner
        inner.__context__ = error  # what is raised anew may come around
    elif kind == "member":
        error = ExceptionGroup("they failed", [ValueError("one"), inner])
    else:
        error.add_note(str(inner))
    assert not told(error)[1]
    assert told(ValueError("it failed"))[1]


class HttpError(OSError):
    """An answer, as requests raises it: `requests.HTTPError` is an `OSError`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} of a server")
        self.response = types.SimpleNamespace(status_code=status)


@pytest.mark.parametrize("kind", [RuntimeError, ConnectionRefusedError])
@pytest.mark.usefixtures("no_collections")
async def test_a_file_system_that_cannot_be_made_shows_no_options(kind: type[Exception]) -> None:
    """Not in the error, and not in what it came from; and nothing of it stays in memory."""

    class Refusing(SyncFileSystem):
        protocol = "refusing"
        cachable = False

        def __init__(self, **options: Any) -> None:
            raise kind(f"cannot use {options}")

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    config = CheckpointConfig(storage_options=secret_options())
    async with Engine(config) as engine:
        with pytest.raises(CheckpointError, match=r"cannot make|cannot open it") as caught:
            await engine.load("refusing://a/b")
    error: BaseException | None = caught.value
    del caught
    seen, kept = "", []
    while error is not None:
        seen += repr(error)
        kept.append(weakref.ref(error))
        error = error.__cause__ or error.__context__
    assert "SECRET" not in seen
    assert not any(ref() for ref in kept)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        socket.gaierror(socket.EAI_NONAME, "no such host"),
        OSError(None, "Unable to connect to port 22 on 10.0.0.1"),  # paramiko's
        EOFError("the connection was closed"),
        HttpError(503),
    ],
)
async def test_a_server_that_is_away_is_no_wrong_option(error: Exception) -> None:
    """What connects as it is made (SFTP, FTP): the storage cannot be reached, and may be later."""

    class Away(SyncFileSystem):
        protocol = "away"
        cachable = False

        def __init__(self, **_: Any) -> None:
            raise error

    fsspec.register_implementation("away", Away, clobber=True)
    async with Engine() as engine:
        with pytest.raises(StorageError, match="cannot open it: "):
            await engine.load("away://a/b")


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "no such file", "id_rsa"),
        OSError(errno.EROFS, "read-only file system", "/var/cache"),
        HttpError(401),
        HttpError(404),
    ],
)
async def test_what_is_no_want_of_a_server_is_a_wrong_option(error: Exception) -> None:
    """A key that this machine does not have, or what the server has refused."""

    class Refused(SyncFileSystem):
        protocol = "refused"
        cachable = False

        def __init__(self, **_: Any) -> None:
            raise error

    fsspec.register_implementation("refused", Refused, clobber=True)
    async with Engine() as engine:
        with pytest.raises(ConfigError, match=f"storage_options given: {type(error).__name__}"):
            await engine.load("refused://a/b")


@pytest.mark.parametrize("url", ["memory://", "memory:///", "nothing-of-the-kind://a/b"])
async def test_a_url_has_to_name_a_place(url: str) -> None:
    """All of a store is none, and neither is a protocol that nobody knows."""
    async with Engine() as engine:
        with pytest.raises(ConfigError):
            await engine.load(url)


async def test_a_host_is_no_place_of_a_checkpoint() -> None:
    """All that is on a server is not one; nothing is connected to."""
    async with Engine() as engine:
        for url in ("ftp://localhost", "ftp://localhost/"):
            with pytest.raises(ConfigError, match="has to name a place in the store, not all of"):
                await engine.load(url)


async def test_a_part_that_was_cut_short_is_not_sent_again() -> None:
    """Its bytes may be in the file already, or come later: the upload has failed."""
    store = FsspecStore(SyncFileSystem(), "plainsync", 2)
    upload = await store.upload("plainsync/a")
    await upload.write(0, memoryview(b"first"))

    def cut(data: bytes) -> None:
        type(upload._file).write(upload._file, data[:3])
        raise ConnectionResetError("it broke")

    upload._file.write = cut
    with pytest.raises(RefusedError, match=r"it broke \(part 1 cannot be sent again\)"):
        await upload.write(1, memoryview(b"second"))
    del upload._file.write
    with pytest.raises(RefusedError, match="a part was cut short"):
        await upload.write(1, memoryview(b"second"))
    discarded: list[str] = []
    upload._file.discard = lambda: discarded.append(upload._key)
    await upload.abort()
    assert discarded == ["plainsync/a"]
    upload._file = None  # a file that is not closed sends the rest when nobody has it any more
    with pytest.raises(ObjectMissingError):
        await store.head("plainsync/a")
    await store.close()


def test_a_file_replaced_within_a_tick_has_another_etag() -> None:
    """Size and time may be the same; the inode is not."""
    info = {"size": 3, "mtime": 1.0, "type": "file"}
    assert info_of("a", {**info, "ino": 1}).etag != info_of("a", {**info, "ino": 2}).etag


async def test_a_manifest_on_local_files_is_replaced_in_one_step(tmp_path: Path) -> None:
    """A reader at any moment finds the old or the new one, whole."""
    options = {"path": str(tmp_path), "target_protocol": "file"}
    threads = Threads(1, "test")
    backend = FsspecBackend("dir")
    store = await backend.open("dir://a", options, CheckpointConfig(), threads)
    bodies = [b"a" * MiB, b"b" * MiB]
    await store.put("c/manifest.json", bodies[0])
    ended = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not ended.is_set():
            seen.add((tmp_path / "c" / "manifest.json").read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(20):
            await store.put("c/manifest.json", bodies[number % 2])
    finally:
        ended.set()
        reader.join()
    assert seen <= set(bodies)
    assert os.listdir(tmp_path / "c") == ["manifest.json"]
    await store.close()
    threads.shutdown()


class Stuck(SyncFileSystem):
    """Puts no file in another's place."""

    protocol = "stuck"
    cachable = False
    files: ClassVar[dict[str, Any]] = {}

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        raise OSError(errno.EIO, path2, path1)


async def test_a_manifest_that_cannot_be_put_in_place_is_told() -> None:
    """The one before it stays, and nothing beside it."""
    store = FsspecStore(Stuck(), "sftp", 1)
    Stuck.put_bytes("stuck/manifest.json", b"old")
    for match in ("", (await store.head("stuck/manifest.json")).etag):
        with pytest.raises(TransientError):
            await store.put("stuck/manifest.json", b"new", match=match)
    assert (await store.get("stuck/manifest.json", 100))[1] == b"old"
    assert list(Stuck.files) == ["stuck/manifest.json"]
    await store.close()


class Swept(SyncFileSystem):
    """A directory goes in the moment in which something is to be put there."""

    protocol = "swept"
    cachable = False
    files: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.num_put = 0

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self.num_put += 1
        if self.num_put == 1:
            raise FileNotFoundError(path)
        self.put_bytes(path, value)


async def test_a_directory_that_goes_meanwhile_is_made_again() -> None:
    """It was empty when another save was removed."""
    store = FsspecStore(Swept(), "swept", 1)
    await store.put("swept/run/a", b"data", absent=True)
    assert (await store.get("swept/run/a", 100))[1] == b"data"
    await store.close()


class Short(SyncFileSystem):
    """Ends its answers early."""

    protocol = "short"
    cachable = False
    files: ClassVar[dict[str, Any]] = {"short/a": (b"whole", dt.datetime.now(dt.UTC))}

    def cat_file(self, *args: Any, **options: Any) -> bytes:
        return super().cat_file(*args, **options)[:-1]


async def test_an_answer_that_ends_early_is_asked_for_again() -> None:
    """The object is longer than that; one that is not has no such range."""
    store = FsspecStore(Short(), "short", 1)
    etag = (await store.head("short/a")).etag
    with pytest.raises(TransientError):
        await store.get("short/a", 100)
    for match in ("", etag):
        with pytest.raises(TransientError, match="3 bytes came instead of 4"):
            await store.get_into("short/a", 1, memoryview(bytearray(4)), match=match)
        with pytest.raises(RefusedError, match="it ends at byte 5"):
            await store.get_into("short/a", 1, memoryview(bytearray(5)), match=match)
    await store.close()


class Vague(MemoryFileSystem):  # type: ignore[misc]  # of an untyped package
    """Says of no file how large it is, as web servers may."""

    protocol = "vague"
    cachable = False

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return {**super().info(path, **options), "size": None}


async def test_what_has_no_size_or_holds_others_is_no_object() -> None:
    """A directory is not there; of a file, it has to be known how much of it is to come."""
    Vague().pipe("/vague/d/a", b"data")
    store = FsspecStore(Vague(), "vague", 1)
    for look in (store.head, lambda key: store.get(key, 100)):
        with pytest.raises(ObjectMissingError):
            await look("/vague/d")
        with pytest.raises(RefusedError, match="nobody says how many bytes it has"):
            await look("/vague/d/a")
    Vague().rm("/vague", recursive=True)
    await store.close()


@pytest.mark.parametrize("protocol", ["az", "abfs", "abfss", "adl"])
def test_azure_is_asked_not_to_write_over_what_is_there(protocol: str) -> None:
    """By a word of adlfs, which is not asked here whether it keeps it."""
    assert how_to_create(SyncFileSystem(), protocol) == {"overwrite": False}


async def test_nothing_is_below_a_file(tmp_path: Path) -> None:
    """Where there are directories, that is told otherwise than that nothing is there."""
    (tmp_path / "file").touch()
    threads = Threads(1, "test")
    options = {"path": str(tmp_path), "target_protocol": "file"}
    store = await FsspecBackend("dir").open("dir://a", options, CheckpointConfig(), threads)
    with pytest.raises(ObjectMissingError):
        await store.head("file/x")
    with pytest.raises(ObjectMissingError):
        await store.get("file/x", 9)
    await store.close()
    threads.shutdown()


BACKEND = """
from ckptio.testing import MemoryBackend, MemoryStore

STORE = MemoryStore()

class Backend(MemoryBackend):
    def __init__(self):
        super().__init__(STORE)

INSTANCE = Backend()
BROKEN = 7
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package of somebody else's."""
    (tmp_path / "somebodys_backend.py").write_text(BACKEND)
    dist = tmp_path / "somebodys_backend-1.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-backend\nVersion: 1.0\n")
    (dist / "entry_points.txt").write_text(
        "[ckptio.backends]\n"
        "byclass = somebodys_backend:Backend\n"
        "byinstance = somebodys_backend:INSTANCE\n"
        "broken = somebodys_backend:BROKEN\n"
        "absent = somebodys_backend:nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "somebodys_backend", raising=False)
    return tmp_path


@pytest.mark.usefixtures("third_party", "no_leaks")
@pytest.mark.parametrize("protocol", ["byclass", "byinstance"])
async def test_a_backend_of_another_package_is_found_by_its_entry_point(protocol: str) -> None:
    """Registered under its protocol, it holds checkpoints like ours."""
    state = random_state([5000, 100])
    async with Engine() as engine:
        with pytest.raises(CheckpointNotFoundError):
            await engine.load(f"{protocol}://run/{protocol}")
        await engine.save(state, f"{protocol}://run/{protocol}")
        assert_same(await engine.load(f"{protocol}://run/{protocol}"), state)


@pytest.mark.usefixtures("third_party", "no_leaks")
async def test_prewarm_opens_the_store_of_a_place(tmp_path: Path) -> None:
    """Once, before the first save; local paths have none."""
    async with Engine() as engine:
        await engine.prewarm(1, at=tmp_path)
        assert "somebodys_backend" not in sys.modules
        await engine.prewarm(1, at="byclass://run/step-1")
        (store,) = engine._core.context.stores._open.values()
        client = store._store
        assert client is not None
        await engine.save({"a": 1}, "byclass://run/step-2")
        assert store._store is client
        with pytest.raises(ConfigError, match="cannot be loaded"):
            await engine.prewarm(1, at="absent://run/step-1")


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize("protocol", ["broken", "absent"])
async def test_a_backend_that_is_none_is_told(protocol: str) -> None:
    """With the name of the package's object that is wrong."""
    async with Engine() as engine:
        with pytest.raises(ConfigError, match="somebodys_backend"):
            await engine.load(f"{protocol}://run/step-1")


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("S3://bucket/run", "write s3://"), ("simplecache::s3://bucket/run", "chain of protocols"),
        ("nothing://bucket/run", "no protocol 'nothing'"),
    ],
)  # fmt: skip
async def test_a_protocol_that_nobody_knows_is_told(url: str, hint: str) -> None:
    """With what may have been meant."""
    async with Engine() as engine:
        with pytest.raises(ConfigError, match=hint):
            await engine.load(url)


async def test_a_store_that_refuses_ends_a_save_with_an_error(tmp_path: Path) -> None:
    """A directory that is a file: the error says so, and names the object."""
    (tmp_path / "taken").write_text("a file")
    options = {"path": str(tmp_path), "target_protocol": "file"}
    async with Engine(CheckpointConfig(storage_options=options)) as engine:
        with pytest.raises(StorageError, match="taken/step-1"):
            await engine.save(random_state([10]), "dir://taken/step-1")


async def test_what_others_wrote_is_loaded_from_a_directory(tmp_path: Path) -> None:
    """A file has no manifest below it, by whichever error a file system says so."""
    (tmp_path / "sub").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "sub" / "m.pt")
    options = {"path": str(tmp_path), "target_protocol": "file"}
    async with Engine(config_with(storage_options=options)) as engine:
        assert torch.equal((await engine.load("dir://sub/m.pt"))["w"], torch.ones(2))
        with pytest.raises(CheckpointNotFoundError):
            await engine.load("dir://sub/m.pt/below")


def answer(status: int) -> Exception:
    error = Exception("the server said so")
    error.status = status  # type: ignore[attr-defined]  # as web clients have it
    return error


def of_ftp(kind: str, text: str) -> Exception:
    made: Exception = getattr(ftplib, kind)(text)
    return made


@pytest.mark.parametrize(
    ("reason", "kind", "in_passing"),
    [
        (answer(403), RefusedError, ObjectMissingError),
        (answer(404), ObjectMissingError, ObjectMissingError),
        (answer(429), TransientError, TransientError),
        (answer(503), TransientError, TransientError),
        (aiohttp.ClientPayloadError("cut"), TransientError, TransientError),
        (ConnectionResetError(), TransientError, TransientError),
        (TimeoutError(), TransientError, TransientError),
        (PermissionError(13, "no"), RefusedError, ObjectMissingError),
        (OSError("[Errno 2] it does not exist"), ObjectMissingError, ObjectMissingError),
        (NotADirectoryError(20, "a file"), ObjectMissingError, ObjectMissingError),
        (KeyError("a"), ObjectMissingError, ObjectMissingError),
        (of_ftp("error_perm", "550 not found"), ObjectMissingError, ObjectMissingError),
        (of_ftp("error_perm", "530 log in first"), RefusedError, ObjectMissingError),
        (of_ftp("error_temp", "421 too many users"), TransientError, TransientError),
    ],
)
def test_what_is_not_found_is_missing_if_nothing_else_was_the_reason(
    reason: Exception, kind: type, in_passing: type
) -> None:
    """Refusals count where they are the cause, and not where a file system looked elsewhere."""
    for name, expected in (("__cause__", kind), ("__context__", in_passing)):
        error, wrapped = FileNotFoundError("a"), FileNotFoundError("b")
        setattr(error, name, reason)
        wrapped.__cause__ = error
        assert type(told(error)[0]) is type(told(wrapped)[0]) is expected


class Ftp(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Says of everything that it does not do what FTP says."""

    protocol = "ftpish"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def rmdir(self, path: str) -> None:
        try:
            super().rmdir(path)
        except OSError:
            raise of_ftp("error_perm", f"550 {path}: directory not empty") from None

    def rm_file(self, path: str) -> None:
        if path.endswith("kept"):
            raise of_ftp("error_perm", f"550 {path}: permission denied")
        try:
            super().rm_file(path)
        except FileNotFoundError:
            raise of_ftp("error_perm", f"550 {path}: no such file") from None


async def test_what_ftp_does_not_remove_is_told_if_it_is_there() -> None:
    """A directory with something in it stays; what is gone was to go."""
    store = FsspecStore(Ftp(), "ftp", 1)
    for name in ("a", "b", "kept"):
        await store.put(f"/top/run/{name}", b"x")
    await store.delete(["/top/run/a", "/top/run/none"])
    with pytest.raises(RefusedError, match="permission denied"):
        await store.delete(["/top/run/kept"])
    assert [info.key for info in await store.list("/top/run/")] == ["/top/run/b", "/top/run/kept"]
    Ftp.store.pop("/top/run/kept")
    await store.delete(["/top/run/b"])
    assert not Ftp().exists("/top/run")
    await store.close()


class Shaky(SyncFileSystem):
    """Cannot say what is there."""

    protocol = "shaky"
    cachable = False

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        raise ConnectionResetError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002  # fsspec's signature
        raise FileNotFoundError(path, detail) from ConnectionResetError(path)

    def rm_file(self, path: str) -> None:
        raise FileNotFoundError(path) from ConnectionResetError(path)


async def test_what_may_be_there_is_neither_written_over_nor_told_to_be_removed() -> None:
    """Nor told not to be there: whoever cannot look at it does not know that nothing is."""
    store = FsspecStore(Shaky(), "shaky", 1)
    Shaky.put_bytes("shaky/a", b"old")
    with pytest.raises(TransientError):
        await store.put("shaky/a", b"new", absent=True)
    with pytest.raises(TransientError):
        await store.delete(["shaky/a"])
    with pytest.raises(TransientError):
        await store.list("shaky/")
    assert Shaky.read("shaky/a", None, None) == b"old"
    Shaky.remove("shaky/a")
    await store.close()
