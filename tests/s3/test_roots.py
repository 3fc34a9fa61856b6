"""A run's steps in a bucket: the checkpointer, its blocking twin, and the command line."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from ckptio import Checkpointer, KeepLast, sync
from ckptio._threads import Threads
from ckptio.checkpointer.steps import step_name
from ckptio.config import MiB
from ckptio.events import CleanupFailed
from ckptio.storage.file_names import QUIET_S
from ckptio.storage.object_root import ObjectRoot
from ckptio.storage.stores import Stores
from ckptio.testing import EventLog
from tests.cli.rig import run_json
from tests.rig import assert_same, random_state
from tests.s3 import rig
from tests.s3.servers import BUCKET

if TYPE_CHECKING:
    from ckptio.config import CheckpointConfig
    from tests.s3.servers import Server

pytestmark = pytest.mark.usefixtures("no_leaks")
#: The second tensor is a file of its own, in three parts.
SIZES = [5000, 11 * MiB]


def config_for(server: Server) -> CheckpointConfig:
    return rig.config_for(server, bucket_nbytes=6 * MiB)


def options_for(server: Server) -> list[str]:
    """What the command line takes to get there."""
    options = []
    for name, value in server.options.items():
        text = value if isinstance(value, str) else json.dumps(value)
        options += ["--storage-option", f"{name}={text}"]
    return options


@pytest.fixture
def url() -> str:
    """A URL below which nothing is."""
    return rig.new_url()


def keys(server: Server, url: str) -> list[str]:
    """List what is below a URL, relative to it; uploads that have not ended as well."""
    prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
    names = [*rig.keys_in(server, prefix), *rig.uploads_in(server, prefix)]
    return [name.removeprefix(prefix) for name in names]


async def test_a_checkpointer_keeps_steps_in_a_bucket(moto: Server, url: str) -> None:
    """Saves, finds, loads and removes; nothing of what it removed is left."""
    log = EventLog()
    config = config_for(moto)
    async with Checkpointer(url, keep=KeepLast(2), config=config, observer=log) as ckpt:
        assert await ckpt.latest() is None
        for step in (1, 2, 3):
            await ckpt.save(random_state(SIZES, step), step, metrics={"loss": 1 / step})
    async with Checkpointer(url, config=config) as ckpt:
        assert await ckpt.steps() == (2, 3)
        assert_same(await ckpt.load(), random_state(SIZES, 3))
        assert [record.metrics["loss"] for record in await ckpt.records()] == [1 / 2, 1 / 3]
    assert {key.partition("/")[0] for key in keys(moto, url)} == {step_name(2), step_name(3)}
    assert not log.of(CleanupFailed)


def test_the_blocking_twin_does_the_same(moto: Server, url: str) -> None:
    """With a shared engine, too."""
    config = config_for(moto)
    with sync.Checkpointer(url, keep=KeepLast(1), config=config) as ckpt:
        for step in (1, 2):
            ckpt.save(random_state(SIZES, step), step)
    with sync.Engine(config) as engine, sync.Checkpointer(url, engine=engine) as ckpt:
        assert ckpt.steps() == (2,)
        assert_same(ckpt.load(), random_state(SIZES, 2))


async def test_a_dead_upload_is_swept(
    moto: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the objects of its save, once both are old enough."""
    config, log = config_for(moto), EventLog()
    prefix = url.removeprefix(f"s3://{BUCKET}/") + f"/{step_name(7)}"
    name = f"data-{'a' * 32}-00000-0000"
    with contextlib.closing(moto.client()) as client:
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}0.safetensors", Body=b"x")
        client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{name}1.safetensors")
    threads = Threads(1, "ckptio")
    stores = Stores(config, threads)
    try:
        opened, base = stores.below(url)
        root = ObjectRoot(url, opened, base, config, threads, log)
        await root.sweep(step_name(7), 1)
        assert len(keys(moto, url)) == 2
        monkeypatch.setattr("ckptio.storage.object_root.QUIET_S", -QUIET_S)  # the server's own
        await root.sweep(step_name(7), -QUIET_S)
        assert keys(moto, url) == []
    finally:
        await stores.close()
        threads.shutdown()
    assert not log.of(CleanupFailed)


def test_commands_read_a_bucket(moto: Server, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """ls, show, verify, diff and prune; nothing secret is printed."""
    with sync.Checkpointer(url, config=config_for(moto)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(random_state([5000], step), step)
    argv = options_for(moto)

    def run(*command: str) -> tuple[int, Any]:
        return run_json(capsys, *command, *argv)

    code, document = run("ls", url, "--sort", "name")
    assert code == 0
    assert [row["path"] for row in document["checkpoints"]] == [step_name(s) for s in (1, 2, 3)]
    code, document = run("ls", f"s3://{BUCKET}", "--sort", "name")
    assert code == 0
    assert len(document["checkpoints"]) >= 3
    assert run("show", f"{url}/{step_name(1)}")[1]["num_tensors"] == 1
    assert run("verify", f"{url}/{step_name(1)}")[1]["checkpoints"][0]["state"] == "whole"
    assert run("diff", *(f"{url}/{step_name(s)}" for s in (1, 2)))[1]["equal"] is False
    assert run("diff", *(f"{url}/{step_name(s)}" for s in (1, 1)))[1]["equal"] is True
    code, document = run("prune", url, "--keep-last", "1")
    assert [removed["error"] for removed in document["removed"]] == [None, None]
    assert {key.partition("/")[0] for key in keys(moto, url)} == {step_name(3)}


def test_doctor_tries_a_bucket(moto: Server, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a simulation can do; nothing is left, and nothing secret is printed."""
    code, document = run_json(capsys, "doctor", url, *options_for(moto))
    assert code == 0, document
    states = {finding["name"]: finding["state"] for finding in document["findings"]}
    assert states["uploads"] == states["exclusive objects"] == states["removing"] == "yes"
    assert keys(moto, url) == []
    assert moto.secret not in json.dumps(document)
    wrong = ["--storage-option", "endpoint_url=http://127.0.0.1:9"]
    code, document = run_json(capsys, "doctor", url, *options_for(moto), *wrong)
    assert code == 2
    assert moto.secret not in json.dumps(document)
    code, document = run_json(capsys, "doctor", f"s3://{BUCKET}-x/run", *options_for(moto))
    assert code == 2
    assert "NoSuchBucket" in json.dumps(document)
