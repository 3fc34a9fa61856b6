from __future__ import annotations

from typing import TYPE_CHECKING

import obstore
import obstore.store
import pytest

from tests.s3 import juicefs as gateway
from tests.s3 import seaweedfs as weed
from tests.s3 import servers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.s3.servers import Server


@pytest.fixture(scope="session", autouse=True)
def runtime() -> None:
    """Have obstore's threads begin, which end with the process, before a test looks for leaks."""
    obstore.put(obstore.store.MemoryStore(), "a", b"a")


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """Run a simulated S3 with an empty bucket."""
    with servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def ceph() -> Iterator[Server]:
    """Run Ceph with an empty bucket."""
    if missing := servers.missing_ceph():
        pytest.skip(f"no Ceph here: {missing}")
    with servers.ceph() as server:
        yield server


@pytest.fixture(scope="session")
def swift() -> Iterator[Server]:
    """Run OpenStack Swift with an empty bucket."""
    if missing := servers.missing_swift():
        pytest.skip(f"no OpenStack Swift here: {missing}")
    with servers.swift() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[Server]:
    """Run SeaweedFS with an empty bucket."""
    if missing := weed.missing():
        pytest.skip(f"no SeaweedFS here: {missing}")
    with weed.seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def juicefs() -> Iterator[Server]:
    """Run JuiceFS's gateway, which is MinIO's of 2021, with an empty bucket."""
    if missing := gateway.missing():
        pytest.skip(f"no JuiceFS here: {missing}")
    with gateway.juicefs() as server:
        yield server


@pytest.fixture(
    params=["moto", *(pytest.param(n, marks=pytest.mark.real_s3) for n in ("ceph", "seaweedfs"))]
)
def server(request: pytest.FixtureRequest) -> Server:
    """Give a simulated server and, in the session for real ones, Ceph and SeaweedFS."""
    found: Server = request.getfixturevalue(request.param)
    return found
