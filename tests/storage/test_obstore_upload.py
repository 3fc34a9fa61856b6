from __future__ import annotations

import asyncio
import contextlib
import threading
import types
from typing import Any

import obstore
import pytest

from ckptio.config import CheckpointConfig
from ckptio.storage.obstore import ObstoreStore
from ckptio.storage.obstore_upload import GivenUpError, ObstoreUpload, Parts, lend
from ckptio.storage.store import RefusedError, StoreError, StoreTraits, TransientError
from ckptio.testing import run_virtual

pytestmark = pytest.mark.usefixtures("no_tasks")

PART_NBYTES = 4


class FakeObstore:
    """Takes parts as obstore does: as they come, in order, reading ahead of what it sends.

    Attributes:
        fail_at: Which part fails, in each stream; `None`: none does.
        is_slow: Parts are held until `send`.
        num_begun: Streams that were begun.
        objects: What was made, each the concatenation of its parts.
    """

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.is_slow = False
        self.num_begun = 0
        self.objects: list[bytes] = []
        self.streams: list[asyncio.Task[None]] = []
        self._held: list[bytes | memoryview] = []
        self._sent: list[bytes] = []

    def start(self, parts: Parts) -> asyncio.Future[None]:
        """Begin a stream."""
        self.num_begun += 1
        self.streams.append(asyncio.get_running_loop().create_task(self._take(parts)))
        return self.streams[-1]

    async def _take(self, parts: Parts) -> None:
        self._sent = []
        number = 0
        try:
            async for part in parts:
                if number == self.fail_at:
                    del part
                    raise ConnectionError("it broke")
                number += 1
                self._held.append(part)
                del part
                if not self.is_slow:
                    self.send()
        finally:
            self._held.clear()
        self.objects.append(b"".join(self._sent))

    def send(self) -> None:
        """Send what is held."""
        self._sent += map(bytes, self._held)
        self._held.clear()

    def upload(self) -> ObstoreUpload:
        """Begin an upload."""
        return ObstoreUpload(self.start, told, PART_NBYTES)


def told(error: Exception) -> StoreError:
    return TransientError(str(error))


async def test_memory_is_free_when_nobody_refers_to_it_any_more() -> None:
    """On whichever thread that is."""
    view, free = lend(b"data")
    copies = [view]
    del view
    await asyncio.sleep(0)
    assert not free.done()
    thread = threading.Thread(target=copies.clear)
    thread.start()
    thread.join()
    await free


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
async def test_parts_make_the_object_whatever_their_order(order: list[int]) -> None:
    """What comes too early is copied: nobody waits for another part."""
    fake = FakeObstore()
    upload = fake.upload()
    parts = [b"aaaa", b"bbbb", b"c"]
    for number in order:
        await upload.write(number, memoryview(parts[number]))
    await upload.complete()
    assert fake.objects == [b"aaaabbbbc"]


async def test_a_part_is_the_callers_again_when_it_was_sent() -> None:
    """Not before: it is sent from where it lies."""
    fake = FakeObstore()
    fake.is_slow = True
    upload = fake.upload()
    data = bytearray(b"aaaa")
    with memoryview(data) as view:
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(upload.write(0, view))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not writing.done()
            fake.send()
    data.extend(b"!")  # refused while anybody holds a view of it
    await upload.complete()
    assert fake.objects == [b"aaaa"]


async def test_a_part_that_is_cancelled_is_given_back_first() -> None:
    """The upload is given up with it, and begun again when the part comes once more."""
    fake = FakeObstore()
    fake.is_slow = True
    upload = fake.upload()
    data = bytearray(b"aaaa")
    with memoryview(data) as view:
        writing = asyncio.create_task(upload.write(0, view))
        for _ in range(10):
            await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
    data.extend(b"!")
    fake.is_slow = False
    await upload.write(0, memoryview(b"aaaa"))
    await upload.complete()
    assert fake.objects == [b"aaaa"]
    assert fake.num_begun == 2


async def test_what_fails_before_anything_is_gone_is_begun_again() -> None:
    """Copies are kept until then."""
    fake = FakeObstore(fail_at=0)
    upload = fake.upload()
    await upload.write(1, memoryview(b"b"))
    with pytest.raises(TransientError):
        await upload.write(0, memoryview(b"aaaa"))
        await upload.complete()
    fake.fail_at = None
    await upload.write(0, memoryview(b"aaaa"))
    await upload.complete()
    assert fake.objects == [b"aaaab"]


@pytest.mark.parametrize("seed", range(8))
def test_of_several_parts_that_fail_one_begins_again(seed: int) -> None:
    """Those that were not taken yet are given back, and the others go on with what it began."""
    fake = FakeObstore(fail_at=0)
    left = {0: b"aaaa", 1: b"bbbb", 2: b"cccc"}

    async def write(upload: ObstoreUpload, number: int) -> None:
        with contextlib.suppress(TransientError):
            await upload.write(number, memoryview(left[number]))
            del left[number]

    async def write_all(upload: ObstoreUpload) -> None:
        async with asyncio.TaskGroup() as group:
            for number in left:
                group.create_task(write(upload, number))

    async def scenario() -> None:
        upload = fake.upload()
        await write_all(upload)
        assert 0 in left
        fake.fail_at = None
        await write_all(upload)
        assert not left
        await upload.complete()

    run_virtual(scenario(), seed=seed)
    assert fake.objects == [b"aaaabbbbcccc"]
    assert fake.num_begun == 2


async def test_what_obstore_says_of_an_upload_that_was_given_up_means_nothing() -> None:
    """It drops the upload at once, and a part that is still under way finds none."""

    class Hasty(FakeObstore):
        async def _take(self, parts: Parts) -> None:
            try:
                await super()._take(parts)
            except GivenUpError:
                raise LookupError("NoSuchUpload") from None

        def upload(self) -> ObstoreUpload:
            refused = RefusedError("NoSuchUpload (404)")
            return ObstoreUpload(self.start, lambda _: refused, PART_NBYTES)

    fake = Hasty()
    fake.is_slow = True
    upload = fake.upload()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await upload.write(0, memoryview(b"aaaa"))
    fake.is_slow = False
    await upload.write(0, memoryview(b"aaaa"))
    await upload.complete()
    assert fake.objects == [b"aaaa"]
    assert fake.num_begun == 2


async def test_what_is_at_hand_is_sent_again_at_the_end() -> None:
    """A part that is smaller than others is kept, and fails when it is asked for."""
    fake = FakeObstore(fail_at=0)
    upload = fake.upload()
    await upload.write(0, memoryview(b"a"))
    await asyncio.wait(fake.streams)
    fake.fail_at = None
    await upload.complete()
    assert fake.objects == [b"a"]
    assert fake.num_begun == 2


@pytest.mark.parametrize("ends", ["made", "aborted"])
async def test_an_upload_that_obstore_gave_up_is_begun_again_or_aborted(ends: str) -> None:
    """It was cancelled on its side: that is no error of whoever writes."""
    fake = FakeObstore()
    upload = fake.upload()
    await asyncio.sleep(0)
    fake.streams[0].cancel()
    await asyncio.wait(fake.streams)
    if ends == "aborted":
        await upload.abort()
    else:
        await upload.write(0, memoryview(b"aaaa"))
        await upload.complete()
    assert fake.objects == ([b"aaaa"] if ends == "made" else [])


async def test_what_is_gone_cannot_be_sent_again() -> None:
    """So the failure of a later part is final, and said so by everything that follows."""
    fake = FakeObstore(fail_at=1)
    upload = fake.upload()
    await upload.write(0, memoryview(b"aaaa"))
    with pytest.raises(RefusedError, match="cannot be sent again"):
        await upload.write(1, memoryview(b"bbbb"))
    with pytest.raises(RefusedError, match="cannot be sent again"):
        await upload.write(2, memoryview(b"c"))
    with pytest.raises(RefusedError, match="cannot be sent again"):
        await upload.complete()
    await upload.abort()
    assert fake.objects == []


async def test_completing_twice_makes_one_object() -> None:
    """The first answer may have been lost on the way."""
    fake = FakeObstore()
    upload = fake.upload()
    await upload.write(0, memoryview(b"aaaa"))
    await upload.complete()
    await upload.complete()
    assert fake.objects == [b"aaaa"]
    assert fake.num_begun == 1


async def test_an_upload_that_is_aborted_makes_nothing() -> None:
    """It is told by an error, so that it drops what it has sent."""
    fake = FakeObstore()
    upload = fake.upload()
    await upload.write(0, memoryview(b"aaaa"))
    await upload.abort()
    assert fake.objects == []
    with pytest.raises(GivenUpError):
        await fake.streams[0]
    with contextlib.suppress(StoreError):
        await upload.write(1, memoryview(b"bbbb"))
    assert fake.num_begun == 1


async def test_an_upload_that_is_aborted_is_not_begun_again() -> None:
    """Not even if nothing of it has gone: whoever aborted it would never hear of the rest."""
    fake = FakeObstore()
    upload = fake.upload()
    await upload.write(1, memoryview(b"bbbb"))
    await upload.abort()
    with pytest.raises(RefusedError):
        await upload.write(0, memoryview(b"aaaa"))
    with pytest.raises(RefusedError):
        await upload.complete()
    assert fake.objects == []
    assert fake.num_begun == 1


async def test_what_is_sent_at_once_is_given_back_when_obstore_lets_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However whoever sends it ends: its memory may be somebody else's a moment later."""
    held: list[memoryview] = []
    sending = asyncio.get_running_loop().create_future()

    def put_async(_store: object, _key: str, view: memoryview, **_: Any) -> asyncio.Future[Any]:
        held.append(view)
        return sending

    monkeypatch.setattr(obstore, "put_async", put_async)
    small: Any = types.SimpleNamespace(traits=StoreTraits())
    once: Any = object()
    store = ObstoreStore(small, once, once, CheckpointConfig())
    task = asyncio.create_task(store.put("a", memoryview(bytearray(b"data"))))
    await asyncio.sleep(0)
    for _ in range(2):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert sending.cancelled()
    assert not task.done()
    held.clear()
    await asyncio.wait((task,))
    assert task.cancelled()
