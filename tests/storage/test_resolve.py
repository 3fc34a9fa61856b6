from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptio.errors import ConfigError
from ckptio.storage import local
from ckptio.storage.resolve import local_path, require_order, resolve_storage
from ckptio.storage.stores import Stores
from ckptio.testing import EventLog
from tests.mounts import Mount
from tests.rig import SMALL

if TYPE_CHECKING:
    from concurrent.futures import Executor


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b", "a/b"),
        ("/a/b", "/a/b"),
        (Path("/a/b"), "/a/b"),
        ("file:///a/b", "/a/b"),
        ("local:///a/b", "/a/b"),
        ("with space ü", "with space ü"),
    ],
)
def test_paths_and_file_urls_name_local_paths(path: Any, expected: str) -> None:
    """Strings, path objects and `file://` URLs are all taken."""
    assert local_path(path) == expected


def test_a_tilde_is_the_home_directory() -> None:
    """`~` means what it means in a shell; a colon is a letter like any other."""
    assert local_path("~/c") == os.path.expanduser("~/c")
    assert local_path("run:/c") == "run:/c"


@pytest.mark.parametrize(
    "path",
    [
        *("", b"bytes", None, 3, "a\0b", "s3://bucket/key", "https://host/x"),
        *(Path("s3://bucket/key"), "s3:/bucket/key", "memory:/run", "lone \ud800 surrogate"),
        "file:///a%20b/c",
    ],
)
def test_what_is_no_local_path_is_refused(path: Any) -> None:
    """Other values and other URLs raise `ConfigError` before anything is touched."""
    with pytest.raises(ConfigError):
        local_path(path)


@pytest.mark.parametrize(
    "url", ["file://localhost/a/b", "file://other/a/b", "local://a", "file://a"]
)
def test_a_local_url_has_no_host(url: str) -> None:
    """It would be a directory here; from where this runs, one may go, and to one's home."""
    with pytest.raises(ConfigError, match=r"has a host, '\w+'.*pass the path itself, /"):
        local_path(url)
    assert local_path("file://./a/b") == os.path.abspath("a/b")
    assert local_path("file://~/c") == os.path.expanduser("~/c")


@pytest.mark.parametrize("path", ["s3//bucket/step-1", "gs//bucket", "s3:/bucket/step-1"])
def test_a_url_with_something_missing_is_refused(path: str) -> None:
    """It would be a directory here, and the run's only checkpoints on a disk that goes with it."""
    with pytest.raises(ConfigError, match=r"colon: write|one slash"):
        local_path(path)


@pytest.mark.parametrize(
    "path", ["data//step-1", "./s3//step-1", "s3/step-1", "//net/s3//step", "s3"]
)
def test_a_doubled_slash_is_no_url(path: str) -> None:
    """Nor is a directory that is called as a protocol is."""
    assert local_path(path) == path


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (Path("s3://bucket/key"), "was a URL: a path object drops one of its slashes"),
        (Path("nonesuch://a/b"), "was a URL: a path object drops one of its slashes"),
        ("s3:/bucket/key", "has one slash where a URL has two"),
        ("s3://bucket/key", "is no path of a local or mounted file system"),
    ],
)
def test_what_nearly_is_a_url_is_refused_in_words_of_its_own(path: Any, said: str) -> None:
    """They say what to write instead."""
    with pytest.raises(ConfigError, match=said):
        local_path(path)


def test_only_a_relative_path_needs_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may stand where there is nothing any more."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert local_path("/a/b") == "/a/b"
    with pytest.raises(ConfigError, match="the working directory, which is gone"):
        local_path("a/b")


def test_a_path_and_a_state_in_each_others_place_are_told() -> None:
    """A path where a state belongs is one only if there is none where a path does."""
    with pytest.raises(ConfigError, match="path and state are swapped"):
        require_order("run/step-1", {})
    require_order("run/step-1", Path("run/step-2"))
    require_order({}, "run/step-1")


def test_a_url_that_nobody_knows_is_refused(executor: Executor) -> None:
    """Its protocol is named; nothing is opened."""
    with pytest.raises(ConfigError, match="'nonesuch'"):
        resolve_storage("nonesuch://a/b", SMALL, executor, EventLog(), Stores(SMALL, executor))


def test_credentials_in_a_url_are_refused_and_not_shown(executor: Executor) -> None:
    """They would end up in messages and logs."""
    url = "s3://key:secret@bucket/run"
    with pytest.raises(ConfigError, match="storage_options") as caught:
        resolve_storage(url, SMALL, executor, EventLog(), Stores(SMALL, executor))
    assert "secret" not in str(caught.value)


def test_a_storage_is_absolute_and_touches_nothing(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is that of the working directory at the call; nothing is made."""
    monkeypatch.chdir(tmp_path)
    storage = resolve_storage("x/../c", SMALL, executor, EventLog(), Stores(SMALL, executor))
    assert storage.path == str(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_links_lead_to_one_identity(tmp_path: Path, executor: Executor) -> None:
    """Two names of one directory are one place."""
    (tmp_path / "step-3").mkdir()
    (tmp_path / "latest").symlink_to("step-3")
    one, two = (
        resolve_storage(tmp_path / name, SMALL, executor, EventLog(), Stores(SMALL, executor))
        for name in ("step-3", "latest")
    )
    assert one.identity == two.identity
    assert one.path != two.path


async def test_a_place_that_was_located_stays_where_it_is(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its links; by its name, where nobody said in time where those lead."""
    (tmp_path / "a").mkdir()
    (tmp_path / "latest").symlink_to("a")
    stores = Stores(SMALL, executor)
    one, two = (
        resolve_storage(tmp_path / "latest", SMALL, executor, EventLog(), stores) for _ in range(2)
    )
    assert await one.locate()
    monkeypatch.setattr(local, "_LOOK_S", 0.01)
    mount = Mount(tmp_path / "latest", monkeypatch)
    with mount.hanging():
        assert not await two.locate()
        assert not await one.locate()
        assert (one.identity, two.identity) == (f"{tmp_path}/a", f"{tmp_path}/latest")
    monkeypatch.setattr(local, "_LOOK_S", 60.0)
    for thread in threading.enumerate():
        if thread.name == "ckptio-look":
            thread.join()
    assert await two.locate()
    (tmp_path / "latest").unlink()
    assert (one.identity, two.identity) == (f"{tmp_path}/a", f"{tmp_path}/latest")
