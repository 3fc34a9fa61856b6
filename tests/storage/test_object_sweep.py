from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import secrets
from typing import TYPE_CHECKING

import fsspec
import pytest
import torch

from ckptio import Engine
from ckptio.errors import SaveAbortedError
from ckptio.events import CleanupFailed, LeftoversRemoved
from ckptio.storage.store import ObjectMissingError
from ckptio.testing import EventLog, MemoryBucket, MemoryStore
from tests.rig import SAVE_IDS, SMALL, contents_of, fill_attempt, manifest_of, object_storage
from tests.storage.test_object_attempt import MANIFEST, PREFIX, save, winner
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from ckptio.storage.store import ObjectInfo
    from ckptio.testing import Operation

pytestmark = pytest.mark.usefixtures("no_leaks")

A, B, C = SAVE_IDS[:3]
STATE = {"tensor": torch.arange(5)}


def names_at(url: str) -> list[str]:
    fs = fsspec.filesystem("memory")
    return sorted(name.rpartition("/")[2] for name in fs.find(url))


def age(url: str) -> None:
    """Have everything under a URL be two hours older."""
    fs = fsspec.filesystem("memory")
    for name in fs.find(url):
        file = fs.store[name]
        file.created = file.modified = file.created - dt.timedelta(hours=2)


async def begin(url: str) -> EventLog:
    """Begin a save, which sweeps, and abort it."""
    log = EventLog()
    async with Engine(SMALL, observer=log) as engine:
        handle = engine.save(STATE, url, overwrite=True)
        await handle.staged
        handle.abort()
        with contextlib.suppress(SaveAbortedError):
            await handle
    return log


async def test_a_sweep_removes_what_a_killed_save_left(url: str) -> None:
    """And nothing of the checkpoint, however old it is."""
    async with Engine(SMALL) as engine:
        await engine.save(STATE, url)
        kept = names_at(url)
        orphan = f"data-{secrets.token_hex(16)}-00000-00000.safetensors"
        fsspec.filesystem("memory").pipe_file(f"{url}/{orphan}", b"data")
        age(url)
        log = await begin(url)
        assert [event.files for event in log.of(LeftoversRemoved)] == [(orphan,)]
        gone = set(kept) - set(names_at(url))
        assert gone in (set(), {*kept} - {"manifest.json"})  # or it was too late to abort
        assert torch.equal((await engine.load(url))["tensor"], STATE["tensor"])


@pytest.mark.parametrize("manifest", [b"{}", b"damaged"])
async def test_a_sweep_leaves_what_a_manifest_needs_that_it_cannot_read(
    url: str, manifest: bytes
) -> None:
    """It may be of a newer version, or be damaged on the way to here."""
    async with Engine(SMALL) as engine:
        await engine.save(STATE, url)
    (data,) = [name for name in names_at(url) if name.startswith("data-")]
    fsspec.filesystem("memory").pipe_file(f"{url}/manifest.json", manifest)
    age(url)
    log = await begin(url)
    assert log.of(LeftoversRemoved) == []
    assert data in names_at(url)


class Behind(MemoryStore):
    """Lists a manifest, and does not find it."""

    async def get(self, key: str, limit: int) -> tuple[ObjectInfo, bytes]:
        if key == MANIFEST:
            raise ObjectMissingError(key)
        return await super().get(key, limit)


@in_virtual_time
async def test_a_sweep_leaves_what_a_manifest_needs_that_is_listed_and_not_found() -> None:
    """One wrong answer of a store costs no checkpoint."""
    bucket, log = MemoryBucket(), EventLog()
    await save(bucket, A, 5000)
    await asyncio.sleep(8000)
    attempt = await object_storage(Behind(bucket), log=log).begin(B, overwrite=True)
    await attempt.abort()
    assert winner(bucket) == A
    assert {event.file for event in log.of(CleanupFailed)} == {"manifest.json"}
    assert log.of(LeftoversRemoved) == []


@in_virtual_time
async def test_a_sweep_leaves_what_belongs_to_checkpoints_below() -> None:
    """Their saves have marks of their own, there."""
    bucket = MemoryBucket()
    (name,) = contents_of(A, 10)
    for key in (f"{PREFIX}below/{name}", f"{PREFIX}{name}"):
        bucket.put(key, b"data")
        bucket.begin(f"{key}-begun")
    await asyncio.sleep(8000)
    attempt = await object_storage(MemoryStore(bucket)).begin(B, overwrite=True)
    await attempt.abort()
    assert bucket.keys == [f"{PREFIX}below/{name}"]
    begun = [upload.key for upload in bucket.open_uploads.values()]
    assert begun == [f"{PREFIX}below/{name}-begun"]


@in_virtual_time
async def test_a_sweep_leaves_what_is_taken_up_between_its_two_looks() -> None:
    """Who goes on with a save marks it first; its files were quiet for hours."""
    bucket = MemoryBucket()
    dead = await object_storage(MemoryStore(bucket)).begin(A, overwrite=True)
    await fill_attempt(dead, contents_of(A, 5000))
    await asyncio.sleep(8000)
    before = bucket.keys

    def fault(request: Operation) -> None:
        if store.counts["list"] == 1 and request.kind == "get":
            bucket.put(f"{PREFIX}.attempt-{A}", b"")

    store = MemoryStore(bucket, fault=fault)
    attempt = await object_storage(store).begin(B, overwrite=True)
    await attempt.abort()
    assert bucket.keys == before


@in_virtual_time
async def test_a_sweep_leaves_all_of_a_checkpoint_but_its_mark_and_its_tomb() -> None:
    """Files of other saves that it names, and files of its save that it does not name.

    A removal that failed left its tomb, and it outlived the checkpoint and the next one.
    """
    bucket = MemoryBucket()
    theirs, more = contents_of(B, 10), contents_of(A, 20)
    for name, data in {**theirs, **more}.items():
        bucket.put(PREFIX + name, data)
    bucket.put(MANIFEST, manifest_of(A, theirs))
    before = bucket.keys
    bucket.put(f"{PREFIX}.attempt-{A}", b"")
    bucket.put(f"{PREFIX}.attempt-{B}", b"")
    bucket.put(f"{PREFIX}.manifest-{A}-old", manifest_of(A, theirs))
    await asyncio.sleep(8000)
    attempt = await object_storage(MemoryStore(bucket)).begin(C, overwrite=True)
    await attempt.abort()
    assert bucket.keys == before
