"""Files that torch makes something else of than before, though nobody wrote to them."""

from __future__ import annotations

import asyncio
import io
import pickle
import zipfile
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import fsspec
import pytest
import torch
from torch import serialization
from torch.serialization import safe_globals

from ckptio import convert, sync
from ckptio.conversion.convert import FORMATS
from ckptio.errors import CheckpointChangedError, FormatError
from tests.foreign.rig import assert_same_state, save_dcp
from tests.rig import SMALL, config_with

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckptio.conversion.convert import Format

pytestmark = pytest.mark.usefixtures("no_leaks")


@dataclass
class Two:
    """More than data, unless it is allowed."""

    x: torch.Tensor
    y: torch.Tensor


REST = {"b": torch.full((4,), 3.0), "c": torch.full((4,), 4.0)}
WHOLE = {"a": {"x": torch.full((4,), 1.0), "y": torch.full((4,), 2.0)}, **REST}


@pytest.fixture(params=["zip", "old", "dcp"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint with an object that is more than data before what is not."""
    state = {"a": Two(torch.full((4,), 1.0), torch.full((4,), 2.0)), **REST}
    if request.param == "dcp":
        return save_dcp(tmp_path / "x", state)
    is_zip = request.param == "zip"
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    return tmp_path / "x.pt"


@pytest.mark.parametrize("allowed_first", [True, False])
def test_an_engine_sees_that_other_classes_are_allowed(path: Path, *, allowed_first: bool) -> None:
    """Each tensor has its own bytes, whatever was allowed when the engine looked first."""

    def load_all() -> None:
        with safe_globals([Two]):
            assert_same_state(engine.load(path), WHOLE)
            assert_same_state(engine.load(path, select=["b", "c"]), REST)

    with sync.Engine(SMALL) as engine:
        if allowed_first:
            load_all()
        for _ in range(2):
            assert_same_state(engine.load(path, select=["b", "c"]), REST)
            with pytest.raises(FormatError, match="more than data"):
                engine.load(path)
            load_all()
        num_reads = engine.cache_statistics().num_reads
        load_all()
        assert engine.cache_statistics().num_reads == num_reads


@pytest.mark.parametrize("allowed_first", [True, False])
def test_a_manifest_of_another_rule_is_no_place_to_find_tensors_by(
    path: Path, *, allowed_first: bool
) -> None:
    """Where it is taken on trust, or comes from another rank; and the next load is right."""
    wanted = "a" if path.is_dir() else "c"  # of DCP, each value is by itself
    with sync.Engine(config_with(cache_ttl_s=1e6)) as engine:
        if allowed_first:
            with safe_globals([Two]):
                engine.load(path)
            with pytest.raises(CheckpointChangedError, match="other classes are allowed"):
                engine.load(path, select=wanted)
            assert_same_state(engine.load(path, select="c"), {"c": REST["c"]})
            return
        engine.load(path, select="c")
        with safe_globals([Two]):
            with pytest.raises(CheckpointChangedError, match="other classes are allowed"):
                engine.load(path, select=wanted)
            assert_same_state(engine.load(path), WHOLE)


def turn_around(data: bytes) -> bytes:
    """Write an archive again as if on a machine of the other byte order, which does not say so."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            member = old.read(name)
            if "/data/" in name:
                member = b"".join(member[i : i + 4][::-1] for i in range(0, len(member), 4))
            if not name.endswith("/byteorder"):
                new.writestr(name, member)
    return made.getvalue()


@pytest.fixture
def big() -> Iterator[None]:
    """Say on this thread that files are of the other byte order if they do not say it."""
    if not hasattr(serialization, "set_default_load_endianness"):
        pytest.skip("this torch has no word for it")
    before = serialization.get_default_load_endianness()
    serialization.set_default_load_endianness(serialization.LoadEndianness.BIG)
    yield
    serialization.set_default_load_endianness(before)


def turned(folder: Path) -> bytes:
    """Give a file of the other byte order."""
    torch.save({"w": torch.arange(4.0)}, folder / "x.pt")
    return turn_around((folder / "x.pt").read_bytes())


@pytest.mark.usefixtures("big")
def test_what_is_said_of_files_without_a_byte_order_holds_on_our_threads(tmp_path: Path) -> None:
    """As for `torch.load` on the caller's; files that say their order are as they say."""
    path = tmp_path / "big.pt"
    path.write_bytes(turned(tmp_path))
    assert torch.load(path)["w"].tolist() == [0, 1, 2, 3]
    with sync.Engine(SMALL) as engine:
        for _ in range(2):
            assert engine.load(path)["w"].tolist() == [0, 1, 2, 3]
            assert engine.load_slice(path, "w", slice(1, 3)).tolist() == [1, 2]
            assert engine.load(tmp_path / "x.pt")["w"].tolist() == [0, 1, 2, 3]
    assert serialization.get_default_load_endianness() is serialization.LoadEndianness.BIG
    url = f"memory://{tmp_path.name}/big.pt"
    store = fsspec.filesystem("memory")
    store.pipe_file(f"/{tmp_path.name}/big.pt", path.read_bytes())
    with pytest.raises(FormatError, match="another order"):
        sync.load(url, config=SMALL)
    store.rm(f"/{tmp_path.name}", recursive=True)


@pytest.mark.usefixtures("big")
def test_what_is_said_of_files_without_a_byte_order_holds_for_items_of_dcp(tmp_path: Path) -> None:
    """Each is a file of `torch.save`."""
    state = {"w": torch.arange(4.0), "pair": (torch.arange(3.0), 1)}
    folder = save_dcp(tmp_path / "x", state)
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)  # noqa: S301  # DCP wrote it just now
    for number, (index, info) in enumerate(metadata.storage_data.items()):
        data = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        item, name = turn_around(data), f"__{number}.distcp"
        (folder / f"{name}x").write_bytes(item)
        new = replace(info, relative_path=f"{name}x", offset=0, length=len(item))
        metadata.storage_data[index] = new
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_same_state(sync.load(folder, config=SMALL), state)


@pytest.mark.usefixtures("big")
@pytest.mark.parametrize("to", FORMATS)
def test_what_is_said_of_files_without_a_byte_order_holds_for_conversions(
    tmp_path: Path, to: Format
) -> None:
    """Wherever they run; and one that was made before it was said is not gone on with."""
    path, said = tmp_path / "big.pt", serialization.get_default_load_endianness()
    path.write_bytes(turned(tmp_path))
    asyncio.run(convert(path, tmp_path / "new", to=to, config=SMALL))
    serialization.set_default_load_endianness(None)
    sync.convert(path, tmp_path / "again", to=to, config=SMALL)
    assert sync.load(tmp_path / "new", config=SMALL)["w"].tolist() == [0, 1, 2, 3]
    assert sync.load(tmp_path / "again", config=SMALL)["w"].tolist() != [0, 1, 2, 3]
    serialization.set_default_load_endianness(said)
    report = sync.convert(path, tmp_path / "again", to=to, overwrite=True, config=SMALL)
    assert not any(file.was_there for file in report.files if not file.name.endswith(".json"))
    serialization.set_default_load_endianness(None)
    assert sync.load(tmp_path / "again", config=SMALL)["w"].tolist() == [0, 1, 2, 3]
