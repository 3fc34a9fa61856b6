"""What tells one content of a file from another, by the names that file systems have for it."""

from __future__ import annotations

import datetime as dt
import errno
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from safetensors.torch import save

from ckptio import Engine
from ckptio.conversion.convert import run_convert
from ckptio.errors import CheckpointExistsError, StorageError
from ckptio.storage.fsspec import FsspecStore
from ckptio.storage.fsspec_answers import info_of
from ckptio.storage.store import ConditionFailedError, may_be_same, version_of
from tests.rig import config_with
from tests.storage.filesystems import SyncFileSystem

if TYPE_CHECKING:
    from pathlib import Path

NOON_S = 1704110400.0  # 2024-01-01T12:00:00Z


@pytest.mark.parametrize(
    ("name", "value", "later"),
    [
        ("LastModified", dt.datetime.fromtimestamp(NOON_S, dt.UTC), NOON_S + 1),
        ("last_modified", "2024-01-01T12:00:00+00:00", "2024-01-01T12:00:01+00:00"),
        ("Last-Modified", "Mon, 01 Jan 2024 12:00:00 GMT", "Mon, 01 Jan 2024 12:00:01 GMT"),
        ("modify", "20240101120000", "20240101120000.5"),
        ("modificationTime", 1704110400000, 1704110400001),
        ("modifiedTime", "2024-01-01T12:00:00.000Z", "2024-01-01T12:00:00.001Z"),
        ("mtime", NOON_S, NOON_S + 0.1),
        ("date_time", (2024, 1, 1, 12, 0, 0), (2024, 1, 1, 12, 0, 2)),
    ],
)
def test_times_go_by_many_names(name: str, value: object, later: object) -> None:
    """And are written in as many ways."""
    info = {"name": "a", "size": 3, "type": "file", "atime": 5.0, "accessTime": 7}
    found = info_of("a", {**info, name: value})
    assert found.modified_s == NOON_S
    assert info_of("a", {**info, name: value, "atime": 6.0, "accessTime": 8}) == found
    assert info_of("a", {**info, name: later}).etag != found.etag


@pytest.mark.parametrize("value", ["0001-01-01T00:00:00", 10**400, "soon", None])
def test_a_time_that_is_none_says_nothing(value: object) -> None:
    found = info_of("a", {"name": "a", "size": 3, "type": "file", "mtime": value})
    assert found.modified_s == 0.0


@pytest.mark.parametrize(
    "name",
    ["ETag", "etag", "e_tag", "generation", "Content-MD5", "blob_id", "xet_hash", "content_hash",
     "sha", "hex", "md5Checksum", "checksum", "CRC"],
)  # fmt: skip
def test_what_a_file_system_knows_of_contents_counts_most(name: str) -> None:
    """Whatever else it says; a file that was only touched is the same."""
    info = {"name": "a", "size": 3, "type": "file", "mtime": NOON_S}
    found = info_of("a", {**info, name: "one"})
    assert found.etag == info_of("a", {**info, name: "one", "mtime": NOON_S + 1}).etag == "one"
    assert info_of("a", {**info, name: "two"}).etag != found.etag
    del info["mtime"]
    assert info_of("a", {**info, name: "one"}).etag == "one"


@pytest.mark.parametrize("more", [{}, {"modify": "Jan 01 12:00"}, {"mtime": float("nan")}])
def test_what_nobody_can_tell_apart_is_another_one_each_time(more: dict[str, Any]) -> None:
    """It is never what was seen before, and may be the same all the same."""
    info = {"name": "a", "size": 3, "type": "file", **more}
    one, other = info_of("a", info), info_of("a", info)
    assert one.modified_s == 0.0
    assert version_of(one) != version_of(other)
    assert may_be_same(one.etag, other.etag)
    assert not may_be_same(one.etag, info_of("a", {**info, "size": 4}).etag)
    assert not may_be_same(one.etag, "etag")


class Untold(SyncFileSystem):
    """Says how large a file is, and no more."""

    protocol = "untold"
    cachable = False

    @classmethod
    def entry(cls, path: str) -> dict[str, Any]:
        return {name: value for name, value in super().entry(path).items() if name != "mtime"}


@pytest.fixture(autouse=True)
def registered() -> None:
    """Make it known to fsspec, with nothing in it."""
    fsspec.register_implementation("untold", Untold, clobber=True)
    Untold.files.clear()


async def test_what_nobody_can_tell_apart_is_read_anew_each_time(tmp_path: Path) -> None:
    """A checkpoint of ours, and a file of somebody else's."""
    async with Engine(config_with()) as engine:
        for value in range(2):
            state = {"a": torch.full((5,), value)}
            Untold.put_bytes("x/m.safetensors", save(state))
            await engine.save(state, "untold://x/run", overwrite=True)
            for _ in range(2):
                for name in ("run", "m.safetensors"):
                    loaded = await engine.load(f"untold://x/{name}")
                    assert torch.equal(loaded["a"], state["a"])
    target = tmp_path / "m.safetensors"
    for is_first in (True, False):
        try:
            run_convert(
                "untold://x/m.safetensors", target, to="safetensors", select=None, strip="",
                overwrite=False, drop_values=False, max_shard_nbytes=None, dtype=None,
                config=config_with(), progress=None,
            )  # fmt: skip
        except CheckpointExistsError:
            assert not is_first
        else:
            assert is_first


async def test_conditions_of_what_nobody_can_tell_apart_hold_where_the_size_does() -> None:
    """No more is known; a write that nobody contests goes well."""
    store = FsspecStore(Untold(), "untold", 1)
    await store.put("untold/a", b"one")
    seen, data = await store.get("untold/a", 10)
    assert data == b"one"
    await store.get_into("untold/a", 0, memoryview(bytearray(2)), match=seen.etag)
    await store.put("untold/a", b"two", match=seen.etag)
    await store.put("untold/a", b"three", match=seen.etag)
    with pytest.raises(ConditionFailedError):
        await store.put("untold/a", b"four", match=seen.etag)
    with pytest.raises(ConditionFailedError):
        await store.get_into("untold/a", 0, memoryview(bytearray(2)), match=seen.etag)
    await store.close()


async def test_a_read_that_fails_is_no_change_of_what_nobody_can_tell_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its size is what it was, and so the cause is said."""
    Untold.put_bytes("x/m.safetensors", save({"a": torch.ones(10)}))
    cat_file = Untold.cat_file

    def refuse(self: Any, path: str, start: int | None = None, *args: Any, **options: Any) -> Any:
        if path.endswith("m.safetensors"):
            raise PermissionError(errno.EACCES, "not that")
        return cat_file(self, path, start, *args, **options)

    monkeypatch.setattr(Untold, "cat_file", refuse)
    async with Engine(config_with()) as engine:
        with pytest.raises(StorageError, match="not that"):
            await engine.load("untold://x/m.safetensors")
