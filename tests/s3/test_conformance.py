from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from ckptio.testing.conformance import BackendConformance
from tests.s3.servers import BUCKET

if TYPE_CHECKING:
    from ckptio.config import S3Client
    from tests.s3.servers import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")


class OnServer(BackendConformance):
    """A store of a server that a fixture runs."""

    server: ClassVar[str]
    has_uploads = True

    @pytest.fixture(autouse=True)
    def reach(self, request: pytest.FixtureRequest) -> None:
        """Say how to get there."""
        server: Server = request.getfixturevalue(self.server)
        type(self).storage_options = server.options


class WithObstore:
    """The same, with the bytes carried by obstore."""

    s3_client: S3Client = "obstore"
    has_uploads = False  # they are begun while the first part is on its way


class TestMoto(OnServer):
    """A simulation of Amazon's."""

    server = "moto"
    url = f"s3://{BUCKET}/moto"


class TestMotoWithObstore(WithObstore, TestMoto):
    url = f"s3://{BUCKET}/moto-obstore"


@pytest.mark.real_s3
class TestCeph(OnServer):
    """Ceph's gateway."""

    server = "ceph"
    url = f"s3://{BUCKET}/ceph"


@pytest.mark.real_s3
class TestCephWithObstore(WithObstore, TestCeph):
    url = f"s3://{BUCKET}/ceph-obstore"


@pytest.mark.real_s3
class TestSwift(OnServer):
    """OpenStack Swift's S3 interface."""

    server = "swift"
    url = f"s3://{BUCKET}/swift"


@pytest.mark.real_s3
class TestSwiftWithObstore(WithObstore, TestSwift):
    url = f"s3://{BUCKET}/swift-obstore"


@pytest.mark.real_s3
class TestSeaweedFS(OnServer):
    """SeaweedFS's S3 gateway."""

    server = "seaweedfs"
    url = f"s3://{BUCKET}/seaweedfs"


@pytest.mark.real_s3
class TestSeaweedFSWithObstore(WithObstore, TestSeaweedFS):
    url = f"s3://{BUCKET}/seaweedfs-obstore"


@pytest.mark.real_s3
class TestJuiceFS(OnServer):
    """JuiceFS's gateway, which is MinIO's of 2021."""

    server = "juicefs"
    url = f"s3://{BUCKET}/juicefs"

    async def test_a_condition_holds_or_nothing_is_written(self) -> None:
        """It is not even looked at here, and nothing says so: `ckptio doctor` finds that out."""
        async with self.opened() as (store, prefix):
            key = f"{prefix}a"
            await store.put(key, b"one", absent=True)
            await store.put(key, b"two", absent=True)
            assert (await store.get(key, 10))[1] == b"two"


@pytest.mark.real_s3
class TestJuiceFSWithObstore(WithObstore, TestJuiceFS):
    url = f"s3://{BUCKET}/juicefs-obstore"
