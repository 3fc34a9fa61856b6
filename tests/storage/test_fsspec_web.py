"""Checkpoints on a web server: what it says of them, and what it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import fsspec.asyn
import pytest
import torch
from safetensors.torch import save as to_file

from ckptio import Checkpointer, Engine, save
from ckptio.conversion.convert import run_convert
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    StorageError,
    UnknownFormatError,
)
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.storage.fsspec import FsspecStore
from ckptio.storage.store import ConditionFailedError
from tests.rig import config_with
from tests.s3.servers import free_port
from tests.storage.web import Web, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("aiohttp")

#: Before that, fsspec does not say when a file was changed.
BY_TIME = pytest.mark.skipif(
    tuple(map(int, fsspec.__version__.split(".")[:2])) < (2025, 9), reason="needs fsspec 2025.9"
)
CONFIG = config_with(max_retries=1, retry_timeout_s=1e-6)


@pytest.fixture
def web() -> Iterator[Web]:
    """Run a server."""
    fsspec.asyn.get_loop()  # a thread that stays
    with serving() as made:
        yield made


def two_tensors(*, swapped: bool = False) -> bytes:
    """Give a file of two tensors, in either order; of one size."""
    data = to_file({"a": torch.zeros(10), "b": torch.ones(10)})
    if not swapped:
        return data
    half = len(data) - 40
    first = data[: half - 40].replace(b"[0,40]", b"[?]").replace(b"[40,80]", b"[0,40]")
    return first.replace(b"[?]", b"[40,80]") + data[half:] + data[half - 40 : half]


async def test_a_file_that_was_replaced_is_read_anew(web: Web) -> None:
    """By its time alone, where a server has no etags: another file of the same size."""
    assert len(two_tensors()) == len(two_tensors(swapped=True))
    async with Engine(CONFIG) as engine:
        for second, swapped in enumerate((False, True)):
            web.put("/m.safetensors", two_tensors(swapped=swapped), second=second)
            state = await engine.load(f"{web.url}/m.safetensors")
            assert torch.equal(state["a"], torch.zeros(10))
            assert torch.equal(state["b"], torch.ones(10))


@BY_TIME
async def test_a_manifest_that_is_kept_is_none_for_another_file(web: Web) -> None:
    """Of the same size: its bytes would be taken for those of the one before."""
    async with Engine(config_with(cache_ttl_s=1e6)) as engine:
        for second, swapped in enumerate((False, True)):
            web.put("/m.safetensors", two_tensors(swapped=swapped), second=second)
            if swapped:
                with pytest.raises(CheckpointChangedError, match="another file"):
                    await engine.load(f"{web.url}/m.safetensors?id=1")
            state = await engine.load(f"{web.url}/m.safetensors?id=1")
            assert torch.equal(state["a"], torch.zeros(10))
            assert torch.equal(state["b"], torch.ones(10))


async def test_a_checkpoint_that_was_replaced_is_read_anew(web: Web, tmp_path: Path) -> None:
    """Its old manifest names files that are gone."""
    async with Engine(CONFIG) as engine:
        for second in range(2):
            path = tmp_path / str(second)
            await engine.save({"a": torch.full((5,), second)}, path)
            web.files.clear()
            for file in path.iterdir():
                web.put(f"/run/{file.name}", file.read_bytes(), second=second)
            state = await engine.load(f"{web.url}/run")
            assert torch.equal(state["a"], torch.full((5,), second))
    assert f"/run/{MANIFEST_NAME}" in web.files


@BY_TIME
def test_what_was_converted_of_another_file_is_not_whole_already(web: Web, tmp_path: Path) -> None:
    """It would be told as done, and hold the old weights."""
    target = tmp_path / "m.safetensors"
    was_there: list[bool | None] = []
    for second in (0, 0, 1):
        web.put("/m.safetensors", to_file({"a": torch.full((9,), second)}), second=second)
        try:
            (file,) = run_convert(
                f"{web.url}/m.safetensors", target, to="safetensors", select=None, strip="",
                overwrite=False, drop_values=False, max_shard_nbytes=None, dtype=None,
                config=CONFIG, progress=None,
            ).files  # fmt: skip
        except CheckpointExistsError:
            was_there.append(None)
        else:
            was_there.append(file.was_there)
    assert was_there == [False, True, None]


@BY_TIME
async def test_a_range_of_another_file_is_told(web: Web) -> None:
    """Else a load would be of two."""
    store = FsspecStore(fsspec.filesystem("http"), "http", 1)
    web.put("/a", b"one")
    seen = await store.head(f"{web.url}/a")
    await store.get_into(f"{web.url}/a", 0, memoryview(bytearray(2)), match=seen.etag)
    web.put("/a", b"two", second=1)
    with pytest.raises(ConditionFailedError):
        await store.get_into(f"{web.url}/a", 0, memoryview(bytearray(2)), match=seen.etag)
    await store.close()


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_a_server_that_refuses_does_not_say_that_there_is_nothing(
    web: Web, status: int
) -> None:
    """After that, a run would begin anew."""
    web.status = status
    async with Engine(CONFIG) as engine:
        with pytest.raises(StorageError, match=str(status)) as caught:
            await engine.load(f"{web.url}/run")
        assert not isinstance(caught.value, CheckpointNotFoundError)
    async with Checkpointer(f"{web.url}/run", config=CONFIG) as run:
        with pytest.raises(StorageError, match=str(status)):
            await run.latest()


@pytest.mark.parametrize("status", [404, 410])
async def test_a_server_says_that_there_is_nothing(web: Web, status: int) -> None:
    """In its numbers."""
    web.status = status
    async with Engine(CONFIG) as engine:
        with pytest.raises(CheckpointNotFoundError):
            await engine.load(f"{web.url}/run")


async def test_a_server_that_is_down_does_not_say_that_there_is_nothing() -> None:
    """It says nothing at all."""
    async with Engine(CONFIG) as engine:
        with pytest.raises(StorageError, match="Cannot connect"):
            await engine.load(f"http://127.0.0.1:{free_port()}/run")


async def test_a_file_is_found_on_a_server_that_does_not_say_what_is_missing(web: Web) -> None:
    """As an object store says who may not list it: nothing lies below a file."""
    web.status = 403
    web.put("/m.safetensors", two_tensors())
    async with Engine(CONFIG) as engine:
        assert len(await engine.load(f"{web.url}/m.safetensors")) == 2


@pytest.mark.parametrize("query", ["", "?signature=a/b"])
@pytest.mark.parametrize("directories", ["", "refused", "page", "page without size"])
async def test_what_a_server_says_of_a_directory_hides_nothing_in_it(
    web: Web, tmp_path: Path, directories: Literal["", "refused", "page"], query: str
) -> None:
    """Neither a checkpoint of ours nor a folder of another library; what is neither is told."""
    await save({"a": torch.ones(5)}, tmp_path / "ours", config=CONFIG)
    for file in (tmp_path / "ours").iterdir():
        web.put(f"/ours/{file.name}", file.read_bytes())
    web.put("/hub/model.safetensors", two_tensors())
    web.put("/other/pytorch_model.bin", b"?")
    web.put("/none/readme", b"?")
    web.directories = directories
    async with Engine(CONFIG) as engine:
        for _ in range(2):
            assert len(await engine.load(f"{web.url}/ours{query}")) == 1
            assert len(await engine.load(f"{web.url}/hub{query}")) == 2
        with pytest.raises(UnknownFormatError, match=r"pytorch_model\.bin"):
            await engine.load(f"{web.url}/other{query}")
        with pytest.raises(CheckpointError) as caught:
            await engine.load(f"{web.url}/none{query}")
        assert isinstance(caught.value, CheckpointNotFoundError) == (not directories)


async def test_a_server_without_ranges_is_told_at_once(web: Web) -> None:
    """Before it has sent all of a file for each of them; from the beginning it is read."""
    web.has_ranges = False
    web.put("/m.safetensors", to_file({"a": torch.ones(300_000), "b": torch.ones(10)}))
    async with Engine(config_with(max_retries=2)) as engine:
        with pytest.raises(StorageError, match="the server sends no ranges"):
            await engine.load_slice(f"{web.url}/m.safetensors", "b", slice(0, 1))
    store = FsspecStore(fsspec.filesystem("http"), "http", 1)
    room = bytearray(8)
    await store.get_into(f"{web.url}/m.safetensors", 0, memoryview(room))
    assert room == web.files["/m.safetensors"][0][:8]
    await store.close()


@pytest.mark.parametrize("query", ["?download=true", "?signature=a/b", "#fragment"])
async def test_a_file_with_a_query_is_loaded(web: Web, query: str) -> None:
    """Of which a server takes no notice, nor of what stands behind it."""
    web.put("/m.safetensors", two_tensors())
    async with Engine(CONFIG) as engine:
        assert len(await engine.load(f"{web.url}/m.safetensors{query}")) == 2
