from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckptio.testing.conformance import BackendConformance
from tests.s3.servers import BUCKET

if TYPE_CHECKING:
    from tests.s3.servers import Server

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")


class TestMoto(BackendConformance):
    """A simulation of Amazon's."""

    url = f"s3://{BUCKET}/moto"
    has_uploads = True

    @pytest.fixture(autouse=True)
    def reach(self, moto: Server) -> None:
        """Say how to get there."""
        type(self).storage_options = moto.options


class TestMotoWithObstore(TestMoto):
    """The same, with the bytes carried by obstore."""

    url = f"s3://{BUCKET}/moto-obstore"
    s3_client = "obstore"
    has_uploads = False  # they are begun while the first part is on its way


@pytest.mark.real_s3
class TestCeph(BackendConformance):
    """Ceph's gateway."""

    url = f"s3://{BUCKET}/ceph"
    has_uploads = True

    @pytest.fixture(autouse=True)
    def reach(self, ceph: Server) -> None:
        """Say how to get there."""
        type(self).storage_options = ceph.options


@pytest.mark.real_s3
class TestCephWithObstore(TestCeph):
    """The same, with the bytes carried by obstore."""

    url = f"s3://{BUCKET}/ceph-obstore"
    s3_client = "obstore"
    has_uploads = False  # they are begun while the first part is on its way


@pytest.mark.real_s3
class TestSwift(BackendConformance):
    """OpenStack Swift's S3 interface."""

    url = f"s3://{BUCKET}/swift"
    has_uploads = True

    @pytest.fixture(autouse=True)
    def reach(self, swift: Server) -> None:
        """Say how to get there."""
        type(self).storage_options = swift.options


@pytest.mark.real_s3
class TestSwiftWithObstore(TestSwift):
    """The same, with the bytes carried by obstore."""

    url = f"s3://{BUCKET}/swift-obstore"
    s3_client = "obstore"
    has_uploads = False  # they are begun while the first part is on its way


@pytest.mark.real_s3
class TestSeaweedFS(BackendConformance):
    """SeaweedFS's S3 gateway."""

    url = f"s3://{BUCKET}/seaweedfs"
    has_uploads = True

    @pytest.fixture(autouse=True)
    def reach(self, seaweedfs: Server) -> None:
        """Say how to get there."""
        type(self).storage_options = seaweedfs.options


@pytest.mark.real_s3
class TestSeaweedFSWithObstore(TestSeaweedFS):
    """The same, with the bytes carried by obstore."""

    url = f"s3://{BUCKET}/seaweedfs-obstore"
    s3_client = "obstore"
    has_uploads = False  # they are begun while the first part is on its way


@pytest.mark.real_s3
class TestJuiceFS(BackendConformance):
    """JuiceFS's gateway, which is MinIO's of 2021."""

    url = f"s3://{BUCKET}/juicefs"
    has_uploads = True

    @pytest.fixture(autouse=True)
    def reach(self, juicefs: Server) -> None:
        """Say how to get there."""
        type(self).storage_options = juicefs.options

    async def test_a_condition_holds_or_nothing_is_written(self) -> None:
        """It is not even looked at here, and nothing says so: `ckptio doctor` finds that out."""
        async with self.opened() as (store, prefix):
            key = f"{prefix}a"
            await store.put(key, b"one", absent=True)
            await store.put(key, b"two", absent=True)
            assert (await store.get(key, 10))[1] == b"two"


@pytest.mark.real_s3
class TestJuiceFSWithObstore(TestJuiceFS):
    """The same, with the bytes carried by obstore."""

    url = f"s3://{BUCKET}/juicefs-obstore"
    s3_client = "obstore"
    has_uploads = False  # they are begun while the first part is on its way
