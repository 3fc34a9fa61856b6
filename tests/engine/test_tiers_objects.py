"""Copies to an object store that dies, or fails, at any request."""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, cast

import pytest

from ckptio.config import KiB
from ckptio.errors import CheckpointChangedError, CheckpointError, SaveAbortedError
from ckptio.storage.objects import ObjectStorage
from ckptio.storage.requests import RequestLimit
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    StoreTraits,
    UploadInfo,
)
from ckptio.testing import Crash, EventLog, MemoryStorage, run_virtual
from tests.rig import assert_same, config_with, inline_engine, random_state
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.storage.interface import Storage
    from ckptio.storage.stores import OpenStore

pytestmark = pytest.mark.usefixtures("no_leaks")
CONFIG = config_with(block_nbytes=64 * KiB, bucket_nbytes=64 * KiB)
STATE = random_state([150 * KiB, 70 * KiB, 3000])


class Bucket:
    """Objects and uploads, which outlive who reaches them through `Store`."""

    identity = "bucket"
    gap_nbytes = 0

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.begun: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.written_s: dict[str, float] = {}
        self.now_s = 1.0
        self.num_sent = 0
        self.numbers = itertools.count()
        self.fault: Callable[[int], None] = lambda _: None
        self._names = itertools.count()

    async def get(self) -> tuple[Store, RequestLimit]:
        return Store(self), RequestLimit(4)

    def keep(self, key: str, data: bytes) -> None:
        self.objects[key] = data
        self.written_s[key] = self.now_s

    def begin(self, key: str) -> str:
        upload_id = f"upload {next(self._names)}"
        self.begun[upload_id] = (key, {})
        return upload_id


class Store:
    """An `ObjectStore` in memory that asks its bucket before each request."""

    traits = StoreTraits(conditional="atomic")

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def step(self) -> None:
        self.bucket.fault(next(self.bucket.numbers))

    def _info(self, key: str) -> ObjectInfo:
        if key not in self.bucket.objects:
            raise ObjectMissingError("there is no such object")
        data = self.bucket.objects[key]
        etag = hashlib.blake2b(data, digest_size=8).hexdigest()
        written_s = self.bucket.written_s[key]
        return ObjectInfo(key=key, nbytes=len(data), etag=etag, modified_s=written_s)

    async def head(self, key: str) -> ObjectInfo:
        self.step()
        return self._info(key)

    async def get(self, key: str, limit: int) -> tuple[ObjectInfo, bytes]:
        self.step()
        return self._info(key), self.bucket.objects.get(key, b"")[:limit]

    async def get_into(self, key: str, start: int, room: memoryview, *, match: str = "") -> None:
        self.step()
        assert not match
        room[:] = self.bucket.objects[key][start : start + len(room)]

    async def put(
        self, key: str, data: bytes | memoryview, *, absent: bool = False, match: str = ""
    ) -> str:
        self.step()
        if (absent and key in self.bucket.objects) or (match and self._info(key).etag != match):
            raise ConditionFailedError("it is another one")
        self.bucket.keep(key, bytes(data))
        self.bucket.num_sent += key.rpartition("/")[2].startswith("data-")
        return self._info(key).etag

    async def upload(self, key: str) -> PartsUpload:
        self.step()
        return PartsUpload(self, self.bucket.begin(key))

    async def list(self, prefix: str) -> list[ObjectInfo]:
        self.step()
        return [self._info(key) for key in sorted(self.bucket.objects) if key.startswith(prefix)]

    async def uploads(self, prefix: str) -> Sequence[UploadInfo]:
        self.step()
        return [
            UploadInfo(key=key, upload_id=name, active_s=1.0)
            for name, (key, _) in self.bucket.begun.items()
            if key.startswith(prefix)
        ]

    async def drop_upload(self, upload: UploadInfo) -> None:
        self.step()
        self.bucket.begun.pop(upload.upload_id, None)

    async def delete(self, keys: Sequence[str]) -> None:
        self.step()
        for key in keys:
            self.bucket.objects.pop(key, None)

    async def close(self) -> None:
        """Nothing is open."""


class PartsUpload:
    """An `Upload` of a `Store`."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    async def write(self, number: int, data: memoryview) -> None:
        self._store.step()
        self._store.bucket.begun[self._name][1][number] = bytes(data)

    async def complete(self) -> None:
        self._store.step()
        key, parts = self._store.bucket.begun.pop(self._name)
        self._store.bucket.keep(key, b"".join(parts[n] for n in sorted(parts)))
        self._store.bucket.num_sent += 1

    async def abort(self) -> None:
        self._store.step()
        self._store.bucket.begun.pop(self._name, None)


def places(near: MemoryStorage, bucket: Bucket) -> dict[str, Storage]:
    opened = cast("OpenStore", bucket)
    return {"near/a": near, "far/a": ObjectStorage("far/a", opened, "a", CONFIG, EventLog())}


def objects_of(near: MemoryStorage) -> dict[str, bytes]:
    assert near.manifest is not None
    files = {f"a/{name}": bytes(data) for name, data in near.files.items()}
    return {**files, "a/manifest.json": near.manifest}


def save(near: MemoryStorage, bucket: Bucket, seed: int) -> bool:
    """Save with a copy; whether that was made."""

    async def scenario() -> bool:
        async with inline_engine(places(near, bucket), CONFIG) as engine:
            handle = engine.save(STATE, "near/a", overwrite=True, then="far/a")
            await handle
            try:
                await handle.durable
            except (CheckpointError, Crash):
                return False
            return True

    return run_virtual(scenario(), seed=seed)


def finish(near: MemoryStorage, bucket: Bucket) -> None:
    """Finish copies two hours later: what died is known to be dead by then."""
    bucket.now_s += 7200

    async def scenario() -> None:
        async with inline_engine(places(near, bucket), CONFIG) as engine:
            await engine.finish_copies("near")
            assert await engine.finish_copies("near") == ()
            assert_same(await engine.load("far/a"), STATE)

    run_virtual(scenario(), seed=0)


@pytest.mark.parametrize("how", ["dies", "fails"])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "overwrite"])
def test_whichever_request_is_the_last_the_copy_is_finished_later(how: str, *, fresh: bool) -> None:
    """It never looks whole before; whole files are not sent again; nothing else is left."""
    outcomes = set()
    for last in itertools.count():
        near, bucket = MemoryStorage("near/a"), Bucket()
        if not fresh:
            assert save(near, bucket, 0)
        before = bucket.objects.get("a/manifest.json")
        start = next(bucket.numbers) + 1

        def fault(number: int, start: int = start, last: int = last) -> None:
            if how == "dies" and number >= start + last:
                raise Crash
            if how == "fails" and number == start + last:
                raise RefusedError("not now")

        bucket.fault = fault
        is_made = save(near, bucket, 0)
        ended = next(bucket.numbers) <= start + last
        bucket.fault = lambda _: None
        near.die()
        now = bucket.objects.get("a/manifest.json")
        assert now in (before, near.manifest)
        assert is_made <= (now == near.manifest)
        if not is_made:
            assert len(near.notes) == 1
        whole = [key for key in bucket.objects if key in objects_of(near) and "data" in key]
        outcomes.add((now == near.manifest, bool(whole)))
        bucket.num_sent = 0
        finish(near, bucket)
        if near.notes == {} and not is_made:
            assert bucket.num_sent == len(near.files) - len(whole)
        assert bucket.objects.items() >= objects_of(near).items()
        left = bucket.objects.keys() - objects_of(near).keys()
        # of a request that was to remove something and failed: for the next sweep
        assert not left or (how == "fails" and now == near.manifest)
        assert bucket.begun == {}
        assert near.notes == {}
        if ended:
            break
    assert {(False, False), (False, True), (True, True)} <= outcomes
    assert last > 10


@in_virtual_time
async def test_a_copy_that_is_aborted_drops_its_uploads() -> None:
    """Parts that nobody could go on with do not stay; whole objects do."""
    near, bucket = MemoryStorage("near/a"), Bucket()
    async with inline_engine(places(near, bucket), CONFIG) as engine:
        handle = engine.save(STATE, "near/a", then="far/a")
        await handle

        def fault(_: int) -> None:
            if len(bucket.begun) > 0 and any(parts for _, parts in bucket.begun.values()):
                bucket.fault = lambda _: None
                handle.abort()

        bucket.fault = fault
        with pytest.raises(SaveAbortedError, match="was stopped"):
            await handle.durable
        assert bucket.begun == {}
        assert "a/manifest.json" not in bucket.objects
        assert list(near.notes) == [handle.save_id]


def test_a_copy_that_is_given_up_leaves_the_files_to_another_process_that_makes_it() -> None:
    """Both have the save's id, and so the same objects: the other may be at its commit."""
    near, newer, bucket = MemoryStorage("near/a"), MemoryStorage("near/a"), Bucket()
    assert save(newer, Bucket(), 1)

    async def scenario() -> None:
        async with inline_engine(places(near, bucket), CONFIG) as engine:
            handle = engine.save(STATE, "near/a", then="far/a")
            await handle

            def fault(_: int) -> None:
                if any("/data-" in key for key in bucket.objects):
                    near._place.manifest = newer.manifest  # replaced: nothing is left to copy

            bucket.fault = fault
            with pytest.raises(CheckpointChangedError):
                await handle.durable
            sent = [key for key in bucket.objects if "/data-" in key]
            assert sent
            assert f"a/.attempt-{handle.save_id}" in bucket.objects
            assert "a/manifest.json" not in bucket.objects
        bucket.fault = lambda _: None
        bucket.now_s += 7200
        async with inline_engine(places(newer, bucket), CONFIG) as engine:
            await (engine.save(STATE, "near/a", overwrite=True, then="far/a")).durable
        assert not set(sent) & set(bucket.objects)

    run_virtual(scenario(), seed=0)
