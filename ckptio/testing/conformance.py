"""What a backend has to pass before checkpoints may be kept in it.

A backend is an object with the methods of `ckptio.storage.stores.Backend`, whose stores have
those of `ckptio.storage.store.ObjectStore`. A package registers it by the protocol of its
URLs:

    [project.entry-points."ckptio.backends"]
    mine = "my_package.storage:MyBackend"

and holds it to the rules by a class in a module of tests, which says how it is reached:

    from ckptio.testing.conformance import BackendConformance

    class TestMine(BackendConformance):
        url = "mine://bucket/somewhere"
        storage_options = {"endpoint": "http://127.0.0.1:9000"}

The tests are coroutines (pytest-asyncio in its auto mode runs them). Each works under a new
prefix below `url` and leaves nothing behind when it passes. Where the place is known only
when tests run, a fixture sets `url` and `storage_options` on the instance.

What the tests cannot see, and a store has to keep all the same: memory that is given to `put`,
`write` or `get_into` is the caller's again when they return or raise, also when they are
cancelled; a failure is one of the four `StoreError`s, and says nothing secret; a failure after
which the request may have taken effect is a `TransientError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Any, ClassVar

from ckptio._threads import Threads
from ckptio.api import Engine
from ckptio.config import CheckpointConfig, MiB
from ckptio.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptionError,
    SaveAbortedError,
)
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.storage.store import ConditionFailedError, ObjectMissingError, StoreError
from ckptio.storage.stores import Stores

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    import torch

    from ckptio.config import S3Client
    from ckptio.storage.store import ObjectStore

_DATA = bytes(range(256)) * 1024


class BackendConformance:
    """Tests of one backend. Its traits, and `has_uploads`, leave out what cannot hold for it.

    Attributes:
        url: Where tests may write; without a slash at its end.
        storage_options: How to get there.
        s3_client: See `CheckpointConfig`.
        slab_nbytes: Size of a part; at least what the store takes.
        num_writers: Writers of a race.
        has_uploads: Whether uploads that were not ended can be listed. Where they cannot, what
            killed saves sent in parts stays until the store itself drops it.
    """

    url: ClassVar[str]
    storage_options: ClassVar[Mapping[str, Any]] = {}
    s3_client: ClassVar[S3Client] = "s3fs"
    slab_nbytes: ClassVar[int] = 5 * MiB
    num_writers: ClassVar[int] = 8
    has_uploads: ClassVar[bool] = False

    def config(self, **options: Any) -> CheckpointConfig:
        """Give a configuration with small parts."""
        return CheckpointConfig(
            storage_options=dict(self.storage_options),
            s3_client=self.s3_client,
            slab_nbytes=self.slab_nbytes,
            pool_nbytes=6 * self.slab_nbytes,
            **options,
        )

    def state(self, seed: int, *, num_parts: int = 2) -> dict[str, torch.Tensor]:
        """Make a state of a file in several parts, with an odd end, and a small one."""
        import torch  # noqa: PLC0415  # not before a tensor is touched

        generator = torch.Generator().manual_seed(seed)
        nbytes = self.slab_nbytes * num_parts + 12_345
        large = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        return {"large": large, "small": torch.full((3,), float(seed))}

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[ObjectStore, str]]:
        """Lend the store, and a new prefix with a slash at its end."""
        async with self._at(self.new_url()) as (store, prefix):
            yield store, prefix
            await store.delete(await _keys(store, prefix))
            assert await _keys(store, prefix) == []

    @contextlib.asynccontextmanager
    async def _at(self, url: str) -> AsyncIterator[tuple[ObjectStore, str]]:
        """Lend the store of a URL, and the prefix that it stands for, with a slash at its end."""
        threads = Threads(2, "conformance")
        stores = Stores(self.config(), threads)
        try:
            found, prefix = stores.at(url)
            store, _ = await found.get()
            yield store, f"{prefix}/"
        finally:
            await stores.close()
            threads.shutdown()

    def new_url(self) -> str:
        """Name a place where nothing is."""
        return f"{self.url}/{secrets.token_hex(8)}"

    async def names(self, url: str) -> list[str]:
        """List what is under a URL, by what it is called there."""
        async with self._at(url) as (store, prefix):
            uploads = await store.uploads(prefix)
            assert [upload.key for upload in uploads] == []
            return [key.removeprefix(prefix) for key in await _keys(store, prefix)]

    async def test_objects_are_written_and_read(self) -> None:
        """What was put is there at once: whole, by range, in its size, in the list."""
        async with self.opened() as (store, prefix):
            key = f"{prefix}a"
            etag = await store.put(key, _DATA)
            info = await store.head(key)
            assert (info.nbytes, info.etag) == (len(_DATA), etag)
            assert await store.get(key, 1 << 30) == (info, _DATA)
            assert (await store.get(key, 10))[1] == _DATA[:10]
            room = bytearray(1000)
            await store.get_into(key, 100, memoryview(room))
            assert bytes(room) == _DATA[100:1100]
            assert [found.key for found in await store.list(prefix)] == [key]

    async def test_a_range_is_of_the_object_that_was_seen(self) -> None:
        """One that was replaced since is told apart, though it has as many bytes."""
        async with self.opened() as (store, prefix):
            key = f"{prefix}a"
            await store.put(key, _DATA)
            seen = (await store.head(key)).etag
            room = bytearray(1000)
            await store.get_into(key, 100, memoryview(room), match=seen)
            assert bytes(room) == _DATA[100:1100]
            await store.put(key, _DATA[::-1])
            try:
                await store.get_into(key, 100, memoryview(room), match=seen)
            except ConditionFailedError:
                return
            raise AssertionError("another object was read")

    async def test_what_is_not_there_is_missing(self) -> None:
        """Looking, reading and ranges say so; removing does not mind."""
        async with self.opened() as (store, prefix):
            key = f"{prefix}nothing"
            for request in (
                store.head(key),
                store.get(key, 10),
                store.get_into(key, 0, memoryview(bytearray(10))),
            ):
                try:
                    await request
                except ObjectMissingError:
                    continue
                raise AssertionError("nothing was missed")
            await store.delete([key])
            assert await store.list(prefix) == []

    async def test_a_range_behind_the_end_is_an_error(self) -> None:
        """Never a short answer that looks like a whole one."""
        async with self.opened() as (store, prefix):
            await store.put(f"{prefix}a", _DATA)
            try:
                room = memoryview(bytearray(100))
                await store.get_into(f"{prefix}a", len(_DATA) - 50, room)
            except StoreError:
                return
            raise AssertionError("a range behind the end was read")

    async def test_another_object_has_another_etag(self) -> None:
        """Contents of the same size are told apart."""
        async with self.opened() as (store, prefix):
            one = await store.put(f"{prefix}a", _DATA)
            other = await store.put(f"{prefix}a", _DATA[::-1])
            assert one != other
            assert (await store.head(f"{prefix}a")).etag == other

    async def test_an_upload_is_there_when_it_is_complete(self) -> None:
        """Parts come in any order, where the store allows it; before the end there is nothing."""
        async with self.opened() as (store, prefix):
            key, part = f"{prefix}large", self.slab_nbytes
            data = memoryview(_DATA * (2 * part // len(_DATA) + 1))[: 2 * part + 77]
            upload = await store.upload(key)
            numbers = [0, 1, 2] if store.traits.in_order else [2, 0, 1]
            for number in numbers:
                await upload.write(number, data[number * part : (number + 1) * part])
            if self.has_uploads:
                assert [found.key for found in await store.uploads(prefix)] == [key]
            await upload.complete()
            assert list(await store.uploads(prefix)) == []
            assert (await store.head(key)).nbytes == len(data)
            room = bytearray(200)
            await store.get_into(key, part - 100, memoryview(room))
            assert room == data[part - 100 : part + 100]

    async def test_an_upload_that_is_dropped_leaves_nothing(self) -> None:
        """Neither an object nor parts that are paid for."""
        async with self.opened() as (store, prefix):
            upload = await store.upload(f"{prefix}large")
            await upload.write(0, memoryview(_DATA * (self.slab_nbytes // len(_DATA) + 1)))
            await upload.abort()
            assert await store.list(prefix) == []
            assert list(await store.uploads(prefix)) == []

    async def test_a_condition_holds_or_nothing_is_written(self) -> None:
        """`absent` refuses what is there; `match` refuses what has changed."""
        async with self.opened() as (store, prefix):
            key = f"{prefix}a"
            etag = await store.put(key, b"one", absent=True)
            for condition in ({"absent": True}, {"match": '"0123456789abcdef0123456789abcdef"'}):
                try:
                    await store.put(key, b"two", **condition)
                except ConditionFailedError:
                    continue
                raise AssertionError(f"written although {condition} does not hold")
            assert (await store.get(key, 10))[1] == b"one"
            await store.put(key, b"three", match=etag)
            assert (await store.get(key, 10))[1] == b"three"

    async def test_of_many_writers_one_wins(self) -> None:
        """Where the store decides atomically; else what is there is one of theirs, whole."""
        async with self.opened() as (store, prefix):
            key = f"{prefix}a"
            bodies = [b"%d" % number * 100 for number in range(self.num_writers)]
            answers = await asyncio.gather(
                *(store.put(key, body, absent=True) for body in bodies), return_exceptions=True
            )
            winners = [i for i, answer in enumerate(answers) if isinstance(answer, str)]
            data = (await store.get(key, 1 << 20))[1]
            assert data in bodies
            if store.traits.conditional in ("atomic", "create"):
                assert [bodies[i] for i in winners] == [data]

    async def test_a_listing_by_level_stops_at_slashes(self) -> None:
        """Keys of this level, and one entry for what lies below."""
        async with self.opened() as (store, prefix):
            for name in ("a", "b/c", "b/d/e", "f"):
                await store.put(prefix + name, b"x")
            found = [info.key for info in await store.list(prefix)]
            assert found == [prefix + name for name in ("a", "b/", "f")]
            await store.delete([prefix + name for name in ("b/c", "b/d/e")])

    async def test_a_checkpoint_makes_the_round(self) -> None:
        """Saved, loaded, read in part, overwritten; nothing but the newest is left."""
        import torch  # noqa: PLC0415  # not before a tensor is touched

        url = self.new_url()
        async with Engine(self.config()) as engine:
            one, two = self.state(1), self.state(2, num_parts=1)
            await engine.save(one, url)
            assert torch.equal((await engine.load(url))["large"], one["large"])
            part = await engine.load_slice(url, "large", slice(100, 200))
            assert torch.equal(part, one["large"][100:200])
            try:
                await engine.save(two, url)
            except CheckpointExistsError:
                pass
            else:
                raise AssertionError("a checkpoint was replaced without overwrite")
            await engine.save(two, url, overwrite=True)
            assert torch.equal((await engine.load(url))["large"], two["large"])
            manifest = await engine.inspect(url)
        names = await self.names(url)
        assert names == sorted([MANIFEST_NAME, *(file.name for file in manifest.files)])
        await self.remove(url)

    async def test_a_save_that_is_aborted_leaves_nothing(self) -> None:
        """No object and no upload, whenever it is aborted."""
        url = self.new_url()
        async with Engine(self.config()) as engine:
            handle = engine.save(self.state(3, num_parts=4), url)
            await handle.staged
            handle.abort()
            try:
                await handle
            except SaveAbortedError:
                assert await self.names(url) == []
            else:  # it was faster
                await self.remove(url)
            try:
                await engine.load(self.new_url())
            except CheckpointNotFoundError:
                return
            raise AssertionError("a checkpoint was found where nothing is")

    async def test_a_checkpoint_below_another_is_left_alone(self) -> None:
        """Neither a save nor its end touches what lies below its own prefix."""
        import torch  # noqa: PLC0415  # not before a tensor is touched

        url = self.new_url()
        state = {"small": self.state(7)["small"]}
        async with Engine(self.config()) as engine:
            await engine.save(state, f"{url}/below")
            await engine.save(state, url)
            await engine.save(state, url, overwrite=True)
            for place in (url, f"{url}/below"):
                assert torch.equal((await engine.load(place))["small"], state["small"])
        for place in (f"{url}/below", url):
            await self.remove(place)

    async def test_of_two_saves_one_is_there(self) -> None:
        """The other gets a conflict, and what is there is whole."""
        import torch  # noqa: PLC0415  # not before a tensor is touched

        url = self.new_url()
        states = [self.state(seed, num_parts=1) for seed in (4, 5)]

        async def save(state: dict[str, torch.Tensor]) -> bool:
            async with Engine(self.config()) as engine:
                try:
                    await engine.save(state, url)
                except (CommitConflictError, CheckpointExistsError):
                    return False
                return True

        won = await asyncio.gather(*map(save, states))
        assert any(won)
        async with Engine(self.config()) as engine:
            loaded = await engine.load(url)
            assert any(torch.equal(loaded["large"], state["large"]) for state in states)
            manifest = await engine.inspect(url)
        if sum(won) == 1:
            names = await self.names(url)
            assert names == sorted([MANIFEST_NAME, *(file.name for file in manifest.files)])
        await self.remove(url)

    async def test_a_changed_byte_is_found(self) -> None:
        """By a load of everything and of the part that has it."""
        url = self.new_url()
        async with self._at(url) as (store, prefix), Engine(self.config()) as engine:
            await engine.save({"small": self.state(6)["small"]}, url)
            key = prefix + (await engine.inspect(url)).files[0].name
            _, data = await store.get(key, 1 << 30)
            await store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
            for load in (engine.load(url), engine.load_slice(url, "small", slice(2, 3))):
                try:
                    await load
                except CorruptionError:
                    continue
                raise AssertionError("a changed byte was loaded")
        await self.remove(url)

    async def remove(self, url: str) -> None:
        """Remove the objects under a URL, and none that lie deeper."""
        async with self._at(url) as (store, prefix):
            await store.delete(await _keys(store, prefix))


async def _keys(store: ObjectStore, prefix: str) -> list[str]:
    """List what is right under a prefix; where a store has directories, they may stay empty."""
    return [info.key for info in await store.list(prefix) if not info.key.endswith("/")]
