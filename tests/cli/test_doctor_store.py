"""What `ckptio doctor` says of stores that are not as saves would have them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import sync
from ckptio.storage.store import ConditionFailedError, ObjectInfo, RefusedError, TransientError
from ckptio.testing.bucket import MemoryBucket
from ckptio.testing.objects import MemoryBackend, MemoryStore, MemoryUpload
from tests.cli.rig import run_json
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.storage.store import UploadInfo
    from ckptio.testing.faults import Operation
    from ckptio.testing.objects import FaultKind

pytestmark = pytest.mark.usefixtures("no_leaks")
URL = "mem://run"
OLD_S = 10_000
NAMES = [
    "listing", "writing", "reading", "exclusive objects", "race", "unchanged objects", "uploads",
    "clock", "latency", "removing",
]  # fmt: skip


class Bucket(MemoryBucket):
    """Has the time of this machine, or another one."""

    ahead_s = 0.0

    def now_s(self) -> float:
        return time.time() + self.ahead_s


class Unconditional(MemoryStore):
    """Writes whatever is there."""

    async def put(self, key: str, data: Any, *, absent: bool = False, match: str = "") -> str:
        del absent, match
        return await super().put(key, data)


class Replacing(MemoryStore):
    """Knows the condition that a certain object is there, and no other."""

    async def put(self, key: str, data: Any, *, absent: bool = False, match: str = "") -> str:
        del absent
        return await super().put(key, data, match=match)


class Refusing(MemoryStore):
    """Knows no conditions."""

    async def put(self, key: str, data: Any, *, absent: bool = False, match: str = "") -> str:
        if absent or match:
            raise RefusedError("NotImplemented (501)")
        return await super().put(key, data)


class Unclear(MemoryStore):
    """Says of one write whose it was, and nothing of others at the same time."""

    async def put(self, key: str, data: Any, *, absent: bool = False, match: str = "") -> str:
        try:
            return await super().put(key, data, absent=absent, match=match)
        except ConditionFailedError:
            if key.endswith("/race"):
                raise TransientError("the connection broke") from None
            raise


class Forgetful(MemoryStore):
    """Lists nothing of what was written."""

    async def list(self, prefix: str) -> list[ObjectInfo]:
        del prefix
        return []


class Full(MemoryStore):
    """Says of every key that something is there."""

    async def put(self, key: str, data: Any, *, absent: bool = False, match: str = "") -> str:
        if absent:
            raise ConditionFailedError("another object is there")
        return await super().put(key, data, match=match)


class Crowded(MemoryStore):
    """Has something everywhere."""

    async def list(self, prefix: str) -> list[ObjectInfo]:
        return [ObjectInfo(key=f"{prefix}x", nbytes=1), *await super().list(prefix)]


class Keeping(MemoryStore):
    """Says that it removed what stays."""

    async def delete(self, keys: Sequence[str]) -> None:
        pass


class Silent(MemoryStore):
    """Lists no uploads."""

    async def uploads(self, prefix: str) -> list[UploadInfo]:
        del prefix
        return []


class Restoring(MemoryStore):
    """Makes an object of the parts of an upload that is aborted."""

    async def upload(self, key: str) -> MemoryUpload:
        upload = await super().upload(key)
        upload.abort = upload.complete  # type: ignore[method-assign]  # that is what is wrong
        return upload


class Timeless(MemoryStore):
    """Gives no times."""

    async def head(self, key: str) -> ObjectInfo:
        found = await super().head(key)
        return ObjectInfo(key=key, nbytes=found.nbytes, etag=found.etag)


def failing(kind: str, how: FaultKind, of_class: type[MemoryStore] = MemoryStore) -> MemoryStore:
    """A store that fails all requests of a kind."""

    def fault(request: Operation) -> FaultKind | None:
        return how if request.kind == kind else None

    return of_class(Bucket(), fault=fault)


def with_clock(ahead_s: float) -> MemoryStore:
    """A store with another time."""
    bucket = Bucket()
    bucket.ahead_s = ahead_s
    return MemoryStore(bucket)


@pytest.fixture
def open_store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a store the one that is behind every URL."""

    def use(store: MemoryStore) -> MemoryStore:
        monkeypatch.setattr("ckptio.storage.stores.find_backend", lambda *_: MemoryBackend(store))
        return store

    return use


STAYS = {"removing": ("no", "stayed under")}
CASES: dict[str, tuple[Callable[[], MemoryStore], dict[str, tuple[str, str]]]] = {
    "good": (lambda: MemoryStore(Bucket()), {}),
    "no conditions": (
        lambda: Unconditional(Bucket()),
        {
            "exclusive objects": ("slow", "If-None-Match is ignored"),
            "race": ("slow", "of 8 writers at once 8 won: two saves"),
            "unchanged objects": ("slow", "If-Match is ignored"),
        },
    ),
    "one condition": (
        lambda: Replacing(Bucket()),
        {
            "exclusive objects": ("slow", "If-None-Match is ignored"),
            "race": ("slow", "of 8 writers at once 8 won: two saves"),
        },
    ),
    "conditions refused": (
        lambda: Refusing(Bucket()),
        {
            "exclusive objects": ("no", "If-None-Match is refused (cannot write"),
            "race": ("slow", "0 won, and 8 got no clear answer"),
            "unchanged objects": ("no", "If-Match is refused (cannot write"),
        },
    ),
    "a race of which little is known": (
        lambda: Unclear(Bucket()),
        {"race": ("slow", "1 won, and 7 got no clear answer")},
    ),
    "a race that nobody wins": (
        lambda: Full(Bucket()),
        {"race": ("slow", "0 won, and 0 got no clear answer")},
    ),
    "a list with others": (
        lambda: Crowded(Bucket()),
        {"listing": ("no", "has objects"), "writing": ("no", "not listed at once"), **STAYS},
    ),
    "a list of nothing": (lambda: Forgetful(Bucket()), {"writing": ("no", "not listed at once")}),
    "no writing": (lambda: failing("put", "refused"), {"writing": ("no", "failed: cannot write")}),
    "wrong bytes": (lambda: failing("get", "corrupted"), {"reading": ("no", "not what was")}),
    "wrong ranges": (lambda: failing("get_into", "corrupted"), {"reading": ("no", "not what was")}),
    "no uploads": (lambda: failing("upload", "refused"), {"uploads": ("no", "failed: cannot")}),
    "no parts": (lambda: failing("write", "refused"), {"uploads": ("no", "failed: cannot write")}),
    "uploads unseen": (
        lambda: failing("uploads", "refused"),
        {"uploads": ("slow", "cannot be listed")},
    ),
    "uploads unlisted": (lambda: Silent(Bucket()), {"uploads": ("slow", "cannot be listed")}),
    "uploads that stay": (
        lambda: failing("abort", "refused"),
        {"uploads": ("no", "that was aborted stay"), "removing": ("no", "1 object stayed")},
    ),
    "uploads that become objects": (
        lambda: Restoring(Bucket()),
        {"uploads": ("no", "that was aborted stay")},
    ),
    "a clock ahead": (lambda: with_clock(600), {"clock": ("slow", " s ahead of the one here")}),
    "a clock behind": (lambda: with_clock(-600), {"clock": ("slow", " s behind of the one here")}),
    "a clock that is nearly right": (lambda: with_clock(-50), {}),
    "no clock": (lambda: Timeless(Bucket()), {"clock": ("slow", "gives no times")}),
    "no removing": (lambda: Keeping(Bucket()), STAYS),
    "removing refused": (lambda: failing("delete", "refused"), STAYS),
    "removing refused, and a list of nothing": (
        lambda: failing("delete", "refused", Forgetful),
        {"writing": ("no", "not listed at once"), "removing": ("no", "could be removed")},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_doctor_says_what_a_store_does_not_do(
    case: str, open_store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing else of it. Where nothing can be written, nothing else is tried."""
    make, expected = CASES[case]
    store = open_store(make())
    code, document = run_json(capsys, "doctor", URL)
    found = {finding["name"]: finding for finding in document["findings"]}
    is_written = expected.get("writing", ("yes",))[0] == "yes"
    assert list(found) == (NAMES if is_written else [*NAMES[:2], NAMES[-1]])
    for name, finding in found.items():
        state, said = expected.get(name, ("yes", ""))
        assert (finding["state"], said in finding["detail"]) == (state, True), finding
    assert code == (2 if any(state == "no" for state, _ in expected.values()) else 0)
    if "removing" not in expected:
        assert not any("doctor" in key for key in store.bucket.keys)


def test_doctor_leaves_nothing_where_nothing_may_be_listed(
    open_store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it wrote it can remove all the same."""
    store = open_store(failing("list", "refused"))
    code, document = run_json(capsys, "doctor", URL)
    assert (code, document["error"]) == (2, "cannot list 'run/': access denied")
    assert store.counts["put"] == 1
    assert not store.bucket.keys


def test_doctor_finds_parts_that_dead_saves_left(
    open_store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where there is nothing else; nothing of living saves, of checkpoints, or of others."""
    bucket = Bucket()
    for name in ("whole", "damaged"):
        open_store(MemoryStore(bucket))
        sync.save({"w": torch.ones(1)}, f"{URL}/{name}", config=SMALL)
    bucket.put("run/damaged/manifest.json", b'{"ckptio":2}')
    names = [f"data-{digit * 32}-00000-00000.safetensors" for digit in "abcd"]
    for key in ("run/whole/", "run/damaged/", "run/dead/", "run/deep/a/b/c/d/", "other/", "run/x"):
        bucket.begin(f"{key}{names[0]}")
    for found in bucket.open_uploads.values():
        found.active_s -= OLD_S
    bucket.put(f"run/dead/{names[0]}", b"xyz")
    bucket.put(f"run/dead/{names[1]}", b"ab")
    for stored in bucket.objects.values():
        stored.modified_s -= OLD_S
    bucket.put(f"run/dead/{names[2]}", b"young")
    bucket.begin(f"run/dead/{names[3]}")
    open_store(MemoryStore(bucket))
    code, document = run_json(capsys, "doctor", URL)
    assert code == 0, document
    assert {item["path"]: (item["names"], item["nbytes"]) for item in document["leftovers"]} == {
        f"{URL}/whole": ([f"{names[0]} (parts)"], 0),
        f"{URL}/dead": ([*names[:2], f"{names[0]} (parts)"], 5),
        f"{URL}/deep/a/b/c/d": ([f"{names[0]} (parts)"], 0),
    }
