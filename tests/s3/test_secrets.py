from __future__ import annotations

import dataclasses
import datetime as dt
import ipaddress
import logging
import re
import ssl
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ckptio import Engine
from ckptio.errors import CheckpointError, StorageError
from tests.rig import assert_same, random_state
from tests.s3.proxy import Fault, Proxy, answer
from tests.s3.rig import PART_NBYTES, config_for, keys_in, new_url
from tests.s3.servers import BUCKET

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckptio.events import Event
    from tests.s3.servers import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")

KEY, SECRET, TOKEN = "AKIDNOBODYSHOWS", "s3cr3t-n0body-sh0ws", "t0ken-n0body-sh0ws"
_HEX = re.compile(r"[0-9a-f]{64}")


def everything_in(error: BaseException | None) -> Iterator[str]:
    """Say all that can be read from an error, and from those behind it."""
    while error is not None:
        yield from (str(error), repr(error), repr(error.args), repr(vars(error)))
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                yield from everything_in(inner)
        yield from everything_in(error.__cause__)
        error = error.__context__


def with_secrets(server: Server) -> dict[str, Any]:
    """Give options with credentials that are known to nobody."""
    return {**server.options, "key": KEY, "secret": SECRET, "token": TOKEN}


def assert_silent(texts: list[str]) -> None:
    """Check that no text has a secret in it."""
    assert texts
    for text in texts:
        for secret in (KEY, SECRET, TOKEN):
            assert secret not in text


TALKATIVE = (
    b"<Error><Code>SignatureDoesNotMatch</Code><Message>" + TOKEN.encode() + b"</Message>"
    b"<AWSAccessKeyId>" + KEY.encode() + b"</AWSAccessKeyId>"
    b"<CanonicalRequest>x-amz-security-token:" + TOKEN.encode() + b"</CanonicalRequest></Error>"
)


@pytest.mark.parametrize("how", ["talkative", "busy", "reset", "down", "nowhere", "cut"])
async def test_no_error_shows_credentials(
    moto: Server, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does any that is behind it, or an event, or a line of a log."""
    caplog.set_level(logging.INFO)
    head = b"HTTP/1.1 403 No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    faults = {
        "talkative": Fault(answer=head % len(TALKATIVE) + TALKATIVE),
        "busy": Fault(answer=answer(503, "SlowDown")),
        "reset": Fault(reset=True),
        "cut": Fault(answer=b"HTTP/1.1 200 OK\r\nContent-Le"),
    }
    events: list[Event] = []
    async with Proxy(moto) as proxy:
        options = with_secrets(proxy.server)
        url = new_url()
        if how == "down":
            options["endpoint_url"] = "http://127.0.0.1:9"
        if how == "nowhere":
            url = url.replace(BUCKET, "no-such-bucket")
        proxy.decide = lambda _: faults.get(how)
        config = config_for(moto, storage_options=options, max_retries=1)
        texts = [repr(config)]
        async with Engine(config, observer=events.append) as engine:
            handle = engine.save(random_state([100]), url)
            texts += [repr(handle), str(handle)]
            with pytest.raises(StorageError) as caught:
                await handle
            texts += everything_in(caught.value)
            with pytest.raises(CheckpointError) as missed:
                await engine.load(url)
            texts += everything_in(missed.value)
    for event in events:
        texts.append(repr(event))
        texts += everything_in(getattr(event, "error", None))
    assert_silent([*texts, caplog.text])


async def test_no_object_holds_credentials(moto: Server) -> None:
    """Neither the manifest nor a key."""
    url = new_url()
    async with Engine(config_for(moto, storage_options=with_secrets(moto))) as engine:
        await engine.save(random_state([100]), url)
        texts = [repr(await engine.inspect(url))]
    keys = keys_in(moto, url.removeprefix(f"s3://{BUCKET}/"))
    client = moto.client()
    found = [client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys]
    texts += [data.decode("latin1") for data in found]
    client.close()
    assert_silent([*texts, *keys])


@pytest.mark.real_s3
@pytest.mark.parametrize("name", ["ceph", "seaweedfs"])
async def test_a_wrong_secret_is_refused(request: pytest.FixtureRequest, name: str) -> None:
    """As S3 calls it, and by that alone: the answer has what was signed, too."""
    server: Server = request.getfixturevalue(name)
    wrong = dataclasses.replace(server, secret=SECRET)
    async with Engine(config_for(wrong)) as engine:
        with pytest.raises(StorageError, match="SignatureDoesNotMatch") as caught:
            await engine.save(random_state([100]), new_url())
    assert_silent(list(everything_in(caught.value)))
    assert server.key not in "".join(everything_in(caught.value))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate for this machine that nobody has signed, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([here]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    pem = serialization.Encoding.PEM
    path.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(pem)
    )
    return path


def tls_of(certificate: Path) -> ssl.SSLContext:
    """Speak TLS with a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize(
    ("tls", "given", "is_signed"),
    [
        (True, None, False),
        (True, True, True),
        (False, None, True),
        (False, False, False),
    ],
)
async def test_bodies_are_signed_where_nothing_else_protects_them(
    moto: Server, certificate: Path, client: str, *, tls: bool, given: bool | None, is_signed: bool
) -> None:
    """Over plain HTTP, and over TLS if the options ask for it."""
    url, state = new_url(), random_state([PART_NBYTES + 100])
    async with Proxy(moto, tls_of(certificate) if tls else None) as proxy:
        options = proxy.server.options
        # obstore's TLS takes no certificate of an authority for that of a server
        options["client_kwargs"]["verify"] = str(certificate) if client == "s3fs" else False
        if given is not None:
            options["config_kwargs"] = {"s3": {"payload_signing_enabled": given}}
        config = config_for(moto, storage_options=options, s3_client=client)
        async with Engine(config) as engine:
            await engine.save(state, url)
            assert_same(await engine.load(url), state)
        sums = [r.headers["x-amz-content-sha256"] for r in proxy.sent("PUT") if r.nbytes]
    assert len(sums) == 3  # two parts, the manifest
    assert all(bool(_HEX.fullmatch(found)) is is_signed for found in sums)
    assert is_signed or set(sums) == {"UNSIGNED-PAYLOAD"}


async def test_a_certificate_that_nobody_knows_is_refused(moto: Server, certificate: Path) -> None:
    """At once: it will not get better."""
    async with (
        Proxy(moto, tls_of(certificate)) as proxy,
        Engine(config_for(proxy.server)) as engine,
    ):
        with pytest.raises(StorageError, match="certificate"):
            await engine.save(random_state([100]), new_url())
        assert proxy.requests == []
