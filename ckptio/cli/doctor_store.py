"""What the object store at a URL can do, and what dead saves left there.

Everything is tried under a prefix that is made for it and emptied again. Each check says
what it saw, and repeats what the store answered. Stores keep secrets out of the texts of their
errors, so that nothing secret is shown.
"""

from __future__ import annotations

import dataclasses
import secrets
import statistics
import time
from typing import TYPE_CHECKING

from ckptio._aio import run_all
from ckptio.cli.find_objects import find_objects, open_place
from ckptio.cli.findings import Finding, Leftover
from ckptio.cli.text import count
from ckptio.errors import FormatError, StorageError
from ckptio.events import CleanupFailed
from ckptio.format.summary import decode_summary
from ckptio.storage.object_commit import read_commit
from ckptio.storage.object_place import Listing, ObjectPlace, name_of, owner_of
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectMissingError,
    RefusedError,
    StoreError,
)
from ckptio.storage.stores import open_stores

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import TypeVar

    from ckptio.cli.find_objects import FoundObjects, Place
    from ckptio.cli.findings import State
    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.storage.store import ObjectInfo, UploadInfo

    T = TypeVar("T")

_MAX_RETRIES = 2
_NUM_WRITERS = 8
_NUM_TIMES = 5
_DEPTH = 4
_DATA = bytes(range(256)) * 16
_MAX_SKEW_S = 60.0
_MILLI = 1000.0


async def look_at_store(url: str, config: CheckpointConfig) -> tuple[list[Finding], list[Leftover]]:
    """Try what a save does, and look for what dead ones left.

    Raises:
        ConfigError: There is no way to the store.
        StorageError: It cannot be reached.
    """
    # somebody waits for this: a store that is not there is not asked for minutes
    config = dataclasses.replace(config, max_retries=min(config.max_retries, _MAX_RETRIES))
    async with open_stores(config, "ckptio-doctor") as (_, stores):
        place = await open_place(stores, url, config, _ignore)
        return await _Probe(place).findings(), await find_dead_objects(place)


def _ignore(event: Event) -> None:
    """Tell nobody that a request is tried once more."""


async def find_dead_objects(place: Place) -> list[Leftover]:
    """Look at and below a URL for what saves left that ended without a commit.

    Raises:
        StorageError: Something cannot be listed.
    """
    found = await find_objects(place, depth=_DEPTH, hidden=True)
    base, uploads = place.base, await _uploads_below(place)

    async def look(prefix: str, item: FoundObjects | None) -> Leftover | None:
        ours = item.ours if item is not None else ()
        own = tuple(u for u in uploads if u.key.removesuffix(name_of(u.key)) == prefix)
        listing = Listing(ours, own)
        dead = listing.dead_saves(time.time())
        if dead and item is not None and item.has_manifest:
            keeper = await _owner_of_manifest(place, prefix)
            if keeper is None:
                return None  # damaged, or of a newer version: whatever it needs stays
            dead.discard(keeper)
        objects, parts = listing.of(dead).objects, listing.of(dead).uploads
        if not objects and not parts:
            return None
        path = f"{place.url}/{prefix.removeprefix(base)}".rstrip("/")
        names = [name_of(info.key) for info in objects]
        names += [f"{name_of(upload.key)} (parts)" for upload in parts]
        nbytes = sum(info.nbytes for info in objects)
        return Leftover(path=path, names=tuple(names), nbytes=nbytes)

    items: dict[str, FoundObjects | None] = {item.prefix: item for item in found}
    for upload in uploads:
        if owner_of(upload.key):
            items.setdefault(upload.key.removesuffix(name_of(upload.key)), None)
    looked = await run_all([look(*entry) for entry in items.items()], "look for leftovers")
    return [leftover for leftover in looked if leftover is not None]


async def _uploads_below(place: Place) -> Sequence[UploadInfo]:
    """List uploads below a URL; none where this user may not, which saves can do without."""
    store, base = place.store, place.base
    try:
        return await place.requests.must("list uploads below", base, lambda: store.uploads(base))
    except StorageError as error:
        if not isinstance(error.__cause__, RefusedError):
            raise
        return ()


async def _owner_of_manifest(place: Place, prefix: str) -> str | None:
    """Give the id of the save that a manifest is of; `None` if it cannot be read."""
    try:
        _, data, _ = await read_commit(place.store, place.requests, prefix.rstrip("/"))
        return decode_summary(data).save_id
    except ObjectMissingError:
        return ""
    except (FormatError, StorageError):
        return None


class _Probe:
    """What is tried, under a prefix of its own."""

    def __init__(self, place: Place) -> None:
        self._store = place.store
        self._requests = place.requests
        self._prefix = f"{place.base}.ckptio-doctor-{secrets.token_hex(8)}/"
        self._place = ObjectPlace(
            place.url, self._prefix.rstrip("/"), self._store, self._requests, self._hear
        )
        self._written: set[str] = set()
        self._is_left = False

    def _hear(self, event: Event) -> None:
        # without a name it says that uploads may not be listed: nothing stays because of that
        is_left = isinstance(event, CleanupFailed) and event.file != ""
        self._is_left = self._is_left or is_left

    async def findings(self) -> list[Finding]:
        """Try everything. Where nothing can be written, nothing else is tried."""
        found = []
        try:
            for name, check in self._checks().items():
                found.append(await self._try(name, check))
                if found[-1].state == "no" and name == "writing":
                    break
        finally:
            left = await self._clean()
        return [*found, left]

    def _checks(self) -> dict[str, Callable[[], Awaitable[tuple[State, str]]]]:
        return {
            "listing": self._list,
            "writing": self._write,
            "reading": self._read,
            "exclusive objects": self._absent,
            "race": self._race,
            "unchanged objects": self._match,
            "uploads": self._uploads,
            "clock": self._clock,
            "latency": self._latency,
        }

    async def _try(self, name: str, check: Callable[[], Awaitable[tuple[State, str]]]) -> Finding:
        try:
            state, detail = await check()
        except StorageError as error:
            state, detail = "no", f"failed: {error.message}"
        except StoreError as error:
            state, detail = "no", f"failed: {error.problem}"
        return Finding(name=name, state=state, detail=detail)

    async def _clean(self) -> Finding:
        """Remove what was written, and say whether that can be done."""
        finding = await self._try("removing", self._remove)
        if self._is_left and finding.state == "yes":
            detail = f"not everything under {self._prefix} could be removed"
            return Finding(name="removing", state="no", detail=detail)
        return finding

    async def _remove(self) -> tuple[State, str]:
        await self._place.delete(sorted(self._written))  # listed or not
        await self._place.remove(await self._place.list())
        left = await self._place.list()
        num = len(left.objects) + len(left.uploads)
        if num:
            return "no", f"{count(num, 'object')} stayed under {self._prefix}"
        return "yes", "objects can be removed, and are no longer listed then"

    async def _run(self, what: str, key: str, request: Callable[[], Awaitable[T]]) -> T:
        return await self._requests.run(what, key, request, has_condition=True)

    async def _put(self, name: str) -> None:
        key = self._prefix + name
        await self._run("write", key, lambda: self._store.put(key, _DATA))
        self._written.add(key)

    async def _head(self, name: str) -> ObjectInfo:
        key = self._prefix + name
        return await self._run("look at", key, lambda: self._store.head(key))

    async def _list(self) -> tuple[State, str]:
        found = await self._place.list()
        if found.objects:
            return "no", "a prefix that nobody knows has objects"
        return "yes", "it is reached, and can be listed"

    async def _write(self) -> tuple[State, str]:
        await self._put("a")
        listed = await self._place.list()
        if [name_of(info.key) for info in listed.objects] != ["a"]:
            return "no", "what was written is not listed at once"
        return "yes", "objects can be written, and are listed at once"

    async def _read(self) -> tuple[State, str]:
        key = self._prefix + "a"
        _, data = await self._run("read", key, lambda: self._store.get(key, len(_DATA) + 1))
        room = bytearray(100)
        await self._run(
            "read a range of", key, lambda: self._store.get_into(key, 1000, memoryview(room))
        )
        if data != _DATA or room != _DATA[1000:1100]:
            return "no", "what is read is not what was written"
        return "yes", "objects are read as they were written, whole and in part"

    async def _absent(self) -> tuple[State, str]:
        key = self._prefix + "a"
        try:
            await self._run("write", key, lambda: self._store.put(key, _DATA[::-1], absent=True))
        except ConditionFailedError:
            return "yes", "an object that is there is not written again (If-None-Match)"
        except StorageError as error:
            return "no", f"If-None-Match is refused ({error.message}): nothing can be committed"
        await self._put("a")  # as it was: `_match` writes another one, with another etag
        return "slow", "If-None-Match is ignored: of two saves to one path the later one stays"

    async def _race(self) -> tuple[State, str]:
        key = self._prefix + "race"

        async def write(number: int) -> bool | None:
            body = bytes([number]) * 64
            try:
                await self._requests.once(lambda: self._store.put(key, body, absent=True))
            except ConditionFailedError:
                return False
            except StoreError:
                return None  # it may have been written
            return True

        answers = await run_all([write(number) for number in range(_NUM_WRITERS)], "race")
        won = answers.count(True)
        told = f"of {_NUM_WRITERS} writers at once {won} won"
        if won == 0 or None in answers:
            return "slow", f"{told}, and {answers.count(None)} got no clear answer"
        if won == 1:
            return "yes", f"{told}: commits exclude each other"
        return "slow", f"{told}: two saves to one path at once may both be told that they are there"

    async def _match(self) -> tuple[State, str]:
        key = self._prefix + "a"
        stale = (await self._head("a")).etag
        await self._run("write", key, lambda: self._store.put(key, _DATA[::-1]))
        try:
            await self._run("write", key, lambda: self._store.put(key, _DATA, match=stale))
        except ConditionFailedError:
            return "yes", "an object that was changed meanwhile is not replaced (If-Match)"
        except StorageError as error:
            return "no", f"If-Match is refused ({error.message}): nothing can be overwritten"
        return "slow", "If-Match is ignored: of two overwrites the later one stays"

    async def _uploads(self) -> tuple[State, str]:
        key = self._prefix + "parts"
        upload = await self._run("begin", key, lambda: self._store.upload(key))
        try:
            await self._run("write part 0 of", key, lambda: upload.write(0, memoryview(_DATA)))
            listed = [found.key for found in (await self._place.list()).uploads]
        finally:
            await self._place.quietly(key, upload.abort)
        left = await self._place.list()
        if left.uploads or key in [info.key for info in left.objects]:
            return "no", "parts of an upload that was aborted stay there"
        if listed != [key]:
            return "slow", (
                "uploads that a killed save left cannot be listed, nor removed by the next one:"
                " let a rule of the store remove them"
            )
        return "yes", "objects are written in parts; uploads that were not ended can be listed"

    async def _clock(self) -> tuple[State, str]:
        before_s = time.time()
        await self._put("clock")
        info, after_s = await self._head("clock"), time.time()
        if not info.modified_s:
            return "slow", "it gives no times: what dead saves leave stays"
        ahead_s = info.modified_s - (before_s + after_s) / 2
        told = f"{abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
        if abs(ahead_s) > _MAX_SKEW_S + (after_s - before_s):
            return "slow", f"its clock is {told} of the one here: set one of them"
        return "yes", "its clock and the one here agree"

    async def _latency(self) -> tuple[State, str]:
        puts, gets = [], []
        room = memoryview(bytearray(len(_DATA)))
        key = self._prefix + "latency"
        for _ in range(_NUM_TIMES):
            start = time.perf_counter()
            await self._put("latency")
            middle = time.perf_counter()
            await self._run("read", key, lambda: self._store.get_into(key, 0, room))
            puts.append(middle - start)
            gets.append(time.perf_counter() - middle)
        put_ms, get_ms = (statistics.median(times) * _MILLI for times in (puts, gets))
        return "yes", f"4 KiB are written in {put_ms:.1f} ms and read in {get_ms:.1f} ms (median)"
