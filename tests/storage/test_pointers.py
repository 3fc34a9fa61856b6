from __future__ import annotations

import contextlib
import os
import re
import secrets
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch

from ckptio import Engine
from ckptio.config import KiB, MiB
from ckptio.errors import FormatError, SaveAbortedError
from ckptio.events import Event, LeftoversRemoved
from ckptio.format.pointer import encode_pointer, pointed_name
from ckptio.storage.local import LocalStorage
from ckptio.storage.root import LocalRoot
from ckptio.testing import RecordingFiles
from tests.rig import SAVE_IDS, SMALL, manifest_of, names_in

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    from ckptio.testing import Operation

pytestmark = pytest.mark.usefixtures("no_leaks")

_DATA = r"data-[0-9a-f]{32}-00000-00000\.safetensors"
_POINTED = r"manifest-[0-9a-f]{32}\.json"


def large(seed: int) -> dict[str, Any]:
    """Make a state whose manifest is large: values are in it."""
    return {"words": f"{seed}" * (9 * MiB), "tensor": torch.full((3,), float(seed))}


def small(seed: int) -> dict[str, Any]:
    """Make a state whose manifest is small."""
    return {"tensor": torch.full((3,), float(seed))}


def is_same(found: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether two states are equal."""
    return found.get("words") == state.get("words") and torch.equal(
        found["tensor"], state["tensor"]
    )


def names_at(url: str) -> list[str]:
    """List what is under a URL."""
    fs = fsspec.filesystem("memory")
    return sorted(os.path.basename(path) for path in fs.ls(url, detail=False))


def matches(names: list[str], *patterns: str) -> bool:
    """Whether names are as many as patterns, and each matches its own."""
    return len(names) == len(patterns) and all(map(re.fullmatch, patterns, names))


async def copied(url: str, directory: Path) -> Path:
    """Save a large manifest, and copy all there is to a directory."""
    async with Engine(SMALL) as engine:
        await engine.save(large(1), url)
    directory.mkdir(parents=True)
    fs = fsspec.filesystem("memory")
    for name in names_at(url):
        (directory / name).write_bytes(fs.cat_file(f"{url}/{name}"))
    return directory


async def test_a_large_manifest_is_pointed_to(url: str) -> None:
    """And goes with what it describes; a small one needs no pointer."""
    async with Engine(SMALL) as engine:
        for number, (state, names) in enumerate(
            [
                (large(1), [_DATA, _POINTED, "manifest.json"]),
                (large(2), [_DATA, _POINTED, "manifest.json"]),
                (small(3), [_DATA, "manifest.json"]),
                (large(4), [_DATA, _POINTED, "manifest.json"]),
            ]
        ):
            await engine.save(state, url, overwrite=number > 0)
            assert matches(names_at(url), *names)
            assert is_same(await engine.load(url), state)
        fs = fsspec.filesystem("memory")
        assert fs.size(f"{url}/manifest.json") < KiB


async def test_an_abort_takes_a_large_manifest_with_it(url: str) -> None:
    """Whenever it comes: all of it is there, or nothing."""
    async with Engine(SMALL) as engine:
        handle = engine.save(large(1), url)
        await handle.staged
        handle.abort()
        try:
            await handle
        except SaveAbortedError:
            with contextlib.suppress(FileNotFoundError):
                assert names_at(url) == []
        else:
            assert is_same(await engine.load(url), large(1))


async def test_a_copy_on_a_disk_is_a_checkpoint(
    url: str, tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    """It loads, and what replaces it takes all of it away."""
    directory = await copied(url, tmp_path / "copy")
    assert matches(names_in(directory), _DATA, _POINTED, "manifest.json")
    place = LocalStorage(str(directory), SMALL, executor, list[Event]().append)
    assert await place.peek_manifest() == (await place.read_manifest())[1]
    async with Engine(SMALL) as engine:
        assert is_same(await engine.load(directory), large(1))
        assert (await engine.verify(directory)).is_whole
        await engine.save(small(2), directory, overwrite=True)
        assert is_same(await engine.load(directory), small(2))
    assert matches(names_in(directory), _DATA, "manifest.json")


async def test_a_sweep_knows_what_is_pointed_to(url: str, tmp_path: Path) -> None:
    """It stays as long as it is, and goes when nothing leads there any more."""
    events: list[Event] = []
    directory = await copied(url, tmp_path / "copy")
    (other,) = [name for name in names_in(directory) if re.fullmatch(_POINTED, name)]
    orphan = f"manifest-{secrets.token_hex(16)}.json"
    (directory / orphan).write_bytes((directory / other).read_bytes())
    async with Engine(SMALL, observer=events.append) as engine:
        handle = engine.save(small(2), directory, overwrite=True)
        handle.abort()
        with contextlib.suppress(SaveAbortedError):
            await handle
        await engine.save(small(2), directory, overwrite=True)
    removed = [name for e in events if isinstance(e, LeftoversRemoved) for name in e.files]
    assert orphan in removed
    assert matches(names_in(directory), _DATA, "manifest.json")


async def test_a_manifest_that_is_replaced_as_it_is_followed_is_read_anew(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    """What the first one pointed to went with it."""
    path = tmp_path / "c"
    path.mkdir()
    first, second = manifest_of(SAVE_IDS[0], {}), manifest_of(SAVE_IDS[1], {})

    def overtake(operation: Operation) -> None:
        if operation.kind == "open" and operation.path.endswith(pointed_name(SAVE_IDS[0])):
            (path / "manifest.json").write_bytes(second)

    files, none = RecordingFiles(overtake), list[Event]().append
    storage = LocalStorage(str(path), SMALL, executor, none, files)
    root = LocalRoot(str(tmp_path), SMALL, executor, none, files)
    for read in (storage.peek_manifest, storage.read_manifest, lambda: root.read_manifest("c")):
        (path / "manifest.json").write_bytes(encode_pointer(SAVE_IDS[0], first))
        found = await read()
        assert (found[1] if isinstance(found, tuple) else found) == second


async def test_a_root_removes_all_of_it(
    url: str, tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    """In one step, and also where a removal was cut short before."""
    events: list[Event] = []
    root = LocalRoot(str(tmp_path), SMALL, executor, events.append)
    directory = await copied(url, tmp_path / "step-1")
    assert len(await root.read_manifest("step-1")) > 9 * MiB
    await root.remove("step-1")
    assert not directory.exists()
    for left in ("all", "no data", "no manifest"):
        directory = await copied(f"{url}/{left}", tmp_path / "step-2")
        data, pointed, commit = names_in(directory)
        (directory / commit).rename(directory / f".{pointed[:-5]}-old")
        if left != "all":
            (directory / data).unlink()
        if left == "no manifest":
            (directory / pointed).unlink()
        await root.sweep("step-2", 3600.0)
        assert not directory.exists()
    assert events == []


@pytest.mark.parametrize("how", ["missing", "cut", "changed", "other"])
async def test_a_pointer_that_leads_nowhere_is_damage(
    url: str, tmp_path: Path, executor: ThreadPoolExecutor, how: str
) -> None:
    """On a disk as in a store: an error of the format, and no other manifest is taken."""
    directory = await copied(url, tmp_path / "copy")
    _, pointed, _ = names_in(directory)
    data = (directory / pointed).read_bytes()
    fs = fsspec.filesystem("memory")
    if how == "missing":
        (directory / pointed).unlink()
        fs.rm(f"{url}/{pointed}")
    else:
        async with Engine(SMALL) as engine:
            await engine.save(small(3), tmp_path / "third")
        other = (tmp_path / "third/manifest.json").read_bytes()
        data = {"cut": data[:-1], "changed": b"x" + data[1:], "other": other}[how]
        (directory / pointed).write_bytes(data)
        fs.pipe_file(f"{url}/{pointed}", data)
    with pytest.raises(FormatError, match=re.escape(str(directory))):
        await LocalStorage(str(directory), SMALL, executor, list[Event]().append).peek_manifest()
    with pytest.raises(FormatError):
        await LocalRoot(str(tmp_path), SMALL, executor, list[Event]().append).read_manifest("copy")
    async with Engine(SMALL) as engine:
        for path in (directory, url):
            with pytest.raises(FormatError, match=pointed):
                await engine.load(path)
            await engine.save(small(4), path, overwrite=True)
            assert is_same(await engine.load(path), small(4))
