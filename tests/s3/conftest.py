from __future__ import annotations

from typing import TYPE_CHECKING

import obstore
import obstore.store
import pytest

from tests.s3 import juicefs as gateway
from tests.s3 import seaweedfs as weed
from tests.s3 import servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.s3.servers import Server


@pytest.fixture(scope="session", autouse=True)
def runtime() -> None:
    """Have obstore's threads begin, which end with the process, before a test looks for leaks."""
    obstore.put(obstore.store.MemoryStore(), "a", b"a")


def run(
    name: str, missing: str, start: Callable[[], AbstractContextManager[Server]]
) -> Iterator[Server]:
    """Run a server for a fixture; skip what wants it where something is missing."""
    if missing:
        pytest.skip(f"no {name} here: {missing}")
    with start() as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """Run a simulated S3 with an empty bucket."""
    with servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def ceph() -> Iterator[Server]:
    """Run Ceph with an empty bucket."""
    yield from run("Ceph", servers.missing_ceph(), servers.ceph)


@pytest.fixture(scope="session")
def swift() -> Iterator[Server]:
    """Run OpenStack Swift with an empty bucket."""
    yield from run("OpenStack Swift", servers.missing_swift(), servers.swift)


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[Server]:
    """Run SeaweedFS with an empty bucket."""
    yield from run("SeaweedFS", weed.missing(), weed.seaweedfs)


@pytest.fixture(scope="session")
def juicefs() -> Iterator[Server]:
    """Run JuiceFS's gateway, which is MinIO's of 2021, with an empty bucket."""
    yield from run("JuiceFS", gateway.missing(), gateway.juicefs)


@pytest.fixture(
    params=["moto", *(pytest.param(n, marks=pytest.mark.real_s3) for n in ("ceph", "seaweedfs"))]
)
def server(request: pytest.FixtureRequest) -> Server:
    """Give a simulated server and, in the session for real ones, Ceph and SeaweedFS."""
    found: Server = request.getfixturevalue(request.param)
    return found
