"""What tests of S3 build their stores and engines from."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any

from ckptio._threads import Threads
from ckptio.config import CheckpointConfig, MiB
from ckptio.storage.stores import Stores
from tests.s3.servers import BUCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ckptio.storage.store import ObjectStore
    from tests.s3.servers import Server

#: The least that S3 takes.
PART_NBYTES = 5 * MiB


def config_for(server: Server, **options: Any) -> CheckpointConfig:
    """Give a configuration with parts as small as they may be."""
    defaults = {
        "storage_options": server.options,
        "slab_nbytes": PART_NBYTES,
        "pool_nbytes": 6 * PART_NBYTES,
    }
    return CheckpointConfig(**{**defaults, **options})


def new_prefix() -> str:
    """Name a prefix where nothing is."""
    return f"test/{secrets.token_hex(8)}"


def new_url() -> str:
    """Name a place where nothing is."""
    return f"s3://{BUCKET}/{new_prefix()}"


@contextlib.asynccontextmanager
async def opened(server: Server, **options: Any) -> AsyncIterator[ObjectStore]:
    """Lend the store of the bucket, on this loop."""
    threads = Threads(2, "test")
    stores = Stores(config_for(server, **options), threads)
    try:
        store, _ = await stores.at(f"s3://{BUCKET}/x")[0].get()
        yield store
    finally:
        await stores.close()
        threads.shutdown()


def keys_in(server: Server, prefix: str) -> list[str]:
    """List what is in the bucket, with another client."""
    with contextlib.closing(server.client()) as client:
        page = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for entry in page.get("Contents", ())]


def uploads_in(server: Server, prefix: str) -> list[str]:
    """List what was begun in the bucket and not ended, with another client."""
    with contextlib.closing(server.client()) as client:
        page = client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for entry in page.get("Uploads", ())]
