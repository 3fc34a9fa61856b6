"""File systems of fsspec as object stores: memory, local, the least of both kinds, clouds."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import fsspec
import fsspec.asyn
import pytest

from ckptio.testing.conformance import BackendConformance
from tests.storage.filesystems import LoopFileSystem, SyncFileSystem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
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


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


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
