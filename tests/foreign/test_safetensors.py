from __future__ import annotations

import json
import os
from pathlib import Path  # noqa: TC003  # fixtures are annotated with it
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckptio import sync
from ckptio.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    MismatchError,
    StorageError,
)
from ckptio.events import ReadProgressed
from ckptio.foreign import safetensors
from tests.foreign.rig import assert_same_state, make_weights, save_hf
from tests.rig import SMALL

if TYPE_CHECKING:
    from ckptio.events import Event


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file(make_weights(), path, metadata={"format": "pt"})
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_hf(tmp_path / "hub", make_weights())


@pytest.mark.parametrize("kind", ["file", "folder", "single", "index"])
def test_a_checkpoint_of_safetensors_loads(kind: str, file: Path, folder: Path) -> None:
    """A file; a folder with an index; one with model.safetensors; the index itself."""
    path = {"file": file, "index": folder / "model.safetensors.index.json"}.get(kind, folder)
    if kind == "single":
        path = file.parent / "one"
        path.mkdir()
        file.rename(path / "model.safetensors")
    assert_same_state(sync.load(path, config=SMALL), make_weights())


def test_a_single_file_comes_before_an_index_that_was_left_over(folder: Path) -> None:
    """As `from_pretrained` has it: both load the same."""
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    assert list(sync.load(folder, config=SMALL)) == ["w"]


def test_a_folder_of_links_loads(folder: Path, tmp_path: Path) -> None:
    """As the cache of a model hub is made: files are links to where they lie."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in os.listdir(folder):
        (cache / name).symlink_to(folder / name)
    assert_same_state(sync.load(cache, config=SMALL), make_weights())


@pytest.mark.usefixtures("no_leaks")
def test_select_slice_and_into_work_as_with_our_own(folder: Path) -> None:
    """Tensors of the target are filled in place, converted where that is asked for."""
    weights = make_weights()
    with sync.Engine(SMALL) as engine:
        assert list(engine.load(folder, select="layers.1")) == ["layers.1.ids"]
        rows = engine.load_slice(folder, "embed.weight", slice(3, 5))
        assert torch.equal(rows, weights["embed.weight"][3:5])
        target = {name: torch.zeros_like(value) for name, value in weights.items()}
        assert engine.load(folder, target) is target
        assert_same_state(target, weights)
        halves = {"embed.weight": torch.zeros(64, 96, dtype=torch.float16)}
        engine.load_with_report(folder, halves, dtype=torch.float16, strict="ignore")
        assert torch.equal(halves["embed.weight"], weights["embed.weight"].half())
        with pytest.raises(MismatchError):
            engine.load(folder, {"other": torch.zeros(3)})


def test_a_slice_reads_little_more_than_its_bytes(file: Path) -> None:
    """The row and two blocks."""
    read: list[int] = []

    def observe(event: Event) -> None:
        if isinstance(event, ReadProgressed):
            read.append(event.nbytes)

    with sync.Engine(SMALL, observer=observe) as engine:
        engine.load_slice(file, "embed.weight", 7)
    assert max(read) <= 96 * 4 + 2 * SMALL.block_nbytes


def test_an_engine_sees_that_a_file_was_replaced(file: Path) -> None:
    """What it keeps of it is checked first."""
    with sync.Engine(SMALL) as engine:
        engine.load(file)
        engine.load(file)
        assert engine.cache_statistics().num_reads == 1
        file.unlink()
        save_file({"x": torch.ones(2)}, file)
        assert list(engine.load(file)) == ["x"]
        file.unlink()
        with pytest.raises(CheckpointNotFoundError):
            engine.load(file)


def test_an_engine_sees_that_an_index_was_replaced(folder: Path) -> None:
    """Though none of the files was that it names; the newest of these says when it was made."""
    index = folder / "model.safetensors.index.json"
    for name, modified_s in zip(sorted(folder.glob("*.safetensors")), (86_400, 0), strict=True):
        os.utime(name, (modified_s, modified_s))
    with sync.Engine(SMALL) as engine:
        assert engine.inspect(folder).created.startswith("1970-01-02T00:00:00")
        said = json.loads(index.read_text())
        said["weight_map"]["ghost"] = said["weight_map"]["scalar"]
        index.write_text(json.dumps(said))
        with pytest.raises(FormatError, match="'ghost'"):
            engine.load(folder)


def test_inspect_says_what_is_there_and_verify_that_it_cannot_know(file: Path) -> None:
    """There are no checksums: nothing claims to have compared any."""
    manifest = sync.inspect(file, config=SMALL)
    assert manifest.is_foreign
    assert manifest.writer == "safetensors"
    assert {tensor.name for tensor in manifest.tensors} == set(make_weights())
    with pytest.raises(FormatError, match="no checksums"):
        sync.verify(file, config=SMALL)


def write(path: Path, header: object, data: bytes, *, pad: int = 0) -> Path:
    """Write a safetensors file by hand."""
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@given(pad=st.integers(0, 16), dtype=st.sampled_from([None, torch.float32]))
def test_a_file_whose_tensors_lie_on_odd_bytes_loads(
    tmp_path_factory: pytest.TempPathFactory, pad: int, dtype: torch.dtype | None
) -> None:
    """No rule of the format forbids it; elements are never cut by a block."""
    values = torch.arange(5000, dtype=torch.float64)
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F64", "shape": [5000], "data_offsets": [3, 40003]},
    }
    data = b"abc" + values.numpy().tobytes()
    path = write(tmp_path_factory.mktemp("odd") / "x.safetensors", header, data, pad=pad)
    found = sync.load(path, dtype=dtype, config=SMALL)
    assert torch.equal(found["b"].double(), values)
    assert bytes(found["a"].tolist()) == b"abc"


def test_types_of_later_versions_of_safetensors_are_read(tmp_path: Path) -> None:
    """Those that torch has; of four bits, two are an element."""
    state = {"c": torch.tensor([1 + 2j, 3j]), "b": torch.arange(6, dtype=torch.uint8).view(2, 3)}
    header = {
        "c": {"dtype": "C64", "shape": [2], "data_offsets": [0, 16]},
        "e": {"dtype": "F8_E8M0", "shape": [3], "data_offsets": [16, 19]},
        "f": {"dtype": "F4", "shape": [2, 6], "data_offsets": [19, 25]},
    }
    data = state["c"].numpy().tobytes() + b"abc" + state["b"].numpy().tobytes()
    path = write(tmp_path / "x.safetensors", header, data)
    assert torch.equal(sync.load(path, select="c", config=SMALL)["c"], state["c"])
    for name, dtype, expected in (
        ("e", "float8_e8m0fnu", torch.tensor([97, 98, 99], dtype=torch.uint8)),
        ("f", "float4_e2m1fn_x2", state["b"]),
    ):
        if not hasattr(torch, dtype):
            with pytest.raises(FormatError, match="upgrade torch"):
                sync.load(path, select=name, config=SMALL)
            continue
        found = sync.load(path, select=name, config=SMALL)[name]
        assert found.dtype == getattr(torch, dtype)
        assert torch.equal(found.view(torch.uint8), expected)


def test_a_tensor_of_an_unknown_type_is_left_out_if_nobody_wants_it(tmp_path: Path) -> None:
    """It does not cost the rest of the file."""
    header = {
        "a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        "b": {"dtype": "F4", "shape": [], "data_offsets": [3, 4]},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        "none": {"dtype": "F32", "shape": [0], "data_offsets": [3, 3]},
        "none too": {"dtype": "X9", "shape": [0], "data_offsets": [3, 3]},
    }
    data = b"abcd" + torch.ones(2).numpy().tobytes()
    pad = -len(json.dumps(header)) % 8  # so that some lie on odd bytes
    path = write(tmp_path / "x.safetensors", header, data, pad=pad)
    with sync.Engine(SMALL) as engine:
        known = {"none": torch.ones(0), "w": torch.ones(2)}
        assert_same_state(engine.load(path, select=["none", "w"]), known)
        for _ in range(2):  # also by the manifest that the engine keeps
            assert_same_state(engine.load(path, select="w"), {"w": torch.ones(2)})
            for select in (None, "a"):
                with pytest.raises(FormatError, match=r"x\.safetensors.*'a' \(F6_E2M3\)"):
                    engine.load(path, select=select)
            with pytest.raises(FormatError, match="F6_E2M3"):
                engine.load_slice(path, "a", slice(0, 1))


@pytest.mark.parametrize("name", ["x.safetensors", "x@1+2"])
def test_a_file_that_the_library_takes_is_taken(tmp_path: Path, name: str) -> None:
    """With `null` for its metadata, or more of a tensor than is known, or another's note."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    data = torch.ones(2).numpy().tobytes()
    for header in (
        {"w": entry, "__metadata__": None},
        {"w": {**entry, "more": [1]}},
        {"w": entry, "__metadata__": {"ckptio.dtype.w": "float8_e8m0fnu"}},
        {"w": entry, "__metadata__": {"ckptio.dtype.w": "of later"}},
    ):
        path = write(tmp_path / name, header, data)
        assert_same_state(load_file(path), {"w": torch.ones(2)})
        assert_same_state(sync.load(path, config=SMALL), {"w": torch.ones(2)})


def test_a_tensor_of_too_many_dimensions_does_not_cost_the_rest(tmp_path: Path) -> None:
    """It is refused by its name."""
    header = {
        "a": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]},
        "w": {"dtype": "F32", "shape": [1] * 64, "data_offsets": [4, 8]},
    }
    path = write(tmp_path / "x.safetensors", header, torch.ones(2).numpy().tobytes())
    assert sync.load(path, select="w", config=SMALL)["w"].shape == (1,) * 64
    with pytest.raises(FormatError, match=r"x\.safetensors.*'a' \(float32 of 65 dimensions\)"):
        sync.load(path, config=SMALL)


HOSTILE = {
    "overlap": {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
    },
    "hole": {"a": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}},
    "behind the end": {"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}},
    "too small": {"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 6]}},
    "negative": {"a": {"dtype": "U8", "shape": [-2, -3], "data_offsets": [0, 6]}},
    "huge": {"a": {"dtype": "U8", "shape": [1 << 62, 1 << 62, 0], "data_offsets": [0, 6]}},
    "unknown type, turned around": {"a": {"dtype": "Q8", "shape": [6], "data_offsets": [0, -6]}},
    "unknown type": {"a": {"dtype": "Q8", "shape": [6], "data_offsets": [0, 6]}},
    "a list": [1, 2],
    "a number": {"a": 7},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    """Before any tensor is made, and with the path in the message."""
    path = write(tmp_path / "x.safetensors", HOSTILE[case], b"abcdef")
    with pytest.raises(FormatError, match=r"x\.safetensors"):
        sync.load(path, config=SMALL)


@pytest.mark.parametrize("nbytes", [0, 4, 8, 100, -1])
def test_a_file_that_was_cut_is_refused_before_any_target_changes(file: Path, nbytes: int) -> None:
    """Wherever it was cut."""
    os.truncate(file, nbytes if nbytes >= 0 else file.stat().st_size - 1)
    target = {name: torch.zeros_like(value) for name, value in make_weights().items()}
    with pytest.raises(FormatError):
        sync.load(file, target, config=SMALL)
    assert all(not value.any() for value in target.values())


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", "x\0", "x.bin"]
)
def test_an_index_that_leaves_its_folder_is_refused(folder: Path, name: str) -> None:
    """It is anybody's file."""
    (folder / "a").mkdir()
    for other in ("../secret.safetensors", "a/b.safetensors", "x.bin"):
        save_file({"w": torch.ones(1)}, folder / other)
    index = {"weight_map": {"w": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"not inside of it|no safetensors file"):
        sync.load(folder, config=SMALL)


def test_an_index_is_read_up_to_a_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger is no index, and is not read to its end."""
    nbytes = (folder / "model.safetensors.index.json").stat().st_size
    monkeypatch.setattr(safetensors, "_MAX_INDEX_NBYTES", nbytes)
    assert_same_state(sync.load(folder, config=SMALL), make_weights())
    monkeypatch.setattr(safetensors, "_MAX_INDEX_NBYTES", nbytes - 1)
    with pytest.raises(FormatError, match=f"more than {nbytes - 1} bytes and is no index"):
        sync.load(folder, config=SMALL)


def test_a_link_in_a_loop_is_no_missing_file(folder: Path) -> None:
    """Nobody can say what is there; the error names the link."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = next(iter(index["weight_map"].values()))
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    with pytest.raises(StorageError, match=f"cannot stat a file.*{name}"):
        sync.load(folder, config=SMALL)


def test_an_index_and_its_files_have_to_agree(folder: Path) -> None:
    """A missing shard, a tensor that is elsewhere, another's copy, no index at all."""
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    first, second = sorted(set(whole["weight_map"].values()))
    moved = {**whole["weight_map"], "empty": first, "scalar": first}
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(FormatError, match="does not have it"):
        sync.load(folder, config=SMALL)
    index.write_text(json.dumps(whole))
    (folder / "kept").write_bytes((folder / second).read_bytes())
    (folder / second).write_bytes((folder / first).read_bytes())
    with pytest.raises(FormatError, match="does not have it"):
        sync.load(folder, config=SMALL)
    (folder / second).unlink()
    with pytest.raises(CorruptionError, match="the index names"):
        sync.load(folder, config=SMALL)
    index.write_text("{")
    with pytest.raises(FormatError, match="no index"):
        sync.load(folder, config=SMALL)


def test_of_a_tensor_in_two_files_the_one_of_the_index_counts(tmp_path: Path) -> None:
    """As for Hugging Face's libraries; one that the index does not have is in one file."""
    save_file({"w": torch.ones(2), "d": torch.zeros(3)}, tmp_path / "a.safetensors")
    save_file({"v": torch.ones(2), "d": torch.ones(3)}, tmp_path / "b.safetensors")
    weight_map = {"w": "a.safetensors", "v": "b.safetensors", "d": "b.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = sync.load(tmp_path, config=SMALL)
    assert found.keys() == {"w", "v", "d"}
    assert torch.equal(found["d"], torch.ones(3))
    del weight_map["d"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FormatError, match=r"'d' is in 'a.*' and in 'b"):
        sync.load(tmp_path, config=SMALL)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pytorch_model.bin", "give its own path"),
        ("pytorch_model.bin.index.json", "each of them by its own path"),
        ("adapter_model.bin", "give its own path"),
        ("shard-00001-model-00001-of-00001.safetensors", "of all ranks consolidated"),
        ("model.fp16.safetensors", "give the file's own path"),
        ("consolidated.safetensors", "give the file's own path"),
        ("data-1.safetensors", "give the file's own path"),
    ],
)
def test_a_folder_that_is_read_file_by_file_is_not_said_to_be_empty(
    tmp_path: Path, name: str, said: str
) -> None:
    """Who takes a missing checkpoint for the beginning of a run would begin anew."""
    (tmp_path / name).write_text("{}")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")  # no file; no matter here
    with pytest.raises(FormatError, match=said):
        sync.load(tmp_path, config=SMALL)
    sync.save({"a": 1}, tmp_path, config=SMALL)
    assert sync.load(tmp_path, config=SMALL) == {"a": 1}


def test_what_was_not_finished_is_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Its data files are safetensors files, too; and what has an index, the index makes one."""
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00002.safetensors").rename(folder / ".model.safetensors")
    (folder / "kept.safetensors").mkdir()
    with pytest.raises(CheckpointNotFoundError):
        sync.load(folder, config=SMALL)
    sync.save({"a": torch.ones(3)}, tmp_path / "c", config=SMALL)
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointNotFoundError):
        sync.load(tmp_path / "c", config=SMALL)


@pytest.mark.parametrize("name", ["model.safetensors", "x.bin", "model.safetensors.index.json"])
def test_a_pointer_of_git_lfs_is_called_one(tmp_path: Path, name: str) -> None:
    """It is what a repository has where nobody fetched the file."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(FormatError, match="'git lfs pull'"):
        sync.load(tmp_path / name, config=SMALL)


def test_what_a_file_says_of_itself_is_said_to_be_left_out(tmp_path: Path) -> None:
    """By a load and a conversion; but for what every writer says."""
    file = tmp_path / "x.safetensors"
    said = {"format": "pt", "ckptio.source": "x", "epoch": "3"}
    save_file({"w": torch.ones(2)}, file, metadata=said)
    for notes in (
        sync.load_with_report(file, config=SMALL).report.notes,
        sync.convert(file, tmp_path / "y.safetensors", to="safetensors").notes,
        sync.convert(file, tmp_path / "ours", to="ckptio").notes,
    ):
        assert notes == (f"{file}: its metadata is no part of this: 'epoch'",)
    assert not sync.convert(tmp_path / "y.safetensors", tmp_path / "dcp", to="dcp").notes


def test_what_is_nothing_known_is_no_checkpoint(tmp_path: Path) -> None:
    """A directory of other things, a pipe."""
    (tmp_path / "notes.txt").write_text("hello, world: these are notes")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "nowhere"):
        with pytest.raises(CheckpointNotFoundError):
            sync.load(path, config=SMALL)


def test_a_file_that_is_there_is_not_said_to_be_missing(tmp_path: Path) -> None:
    """Who takes a missing checkpoint for the beginning of a run would begin anew."""
    (tmp_path / "notes.txt").write_text("hello, world: these are notes")
    (tmp_path / "empty.pt").touch()
    for name, said in (("notes.txt", "a file of no known format"), ("empty.pt", "empty")):
        with pytest.raises(FormatError, match=f"{name}' is {said}"):
            sync.load(tmp_path / name, config=SMALL)
    sync.save({"a": 1}, tmp_path / "c", config=SMALL)
    with pytest.raises(FormatError, match="give the directory"):
        sync.load(tmp_path / "c" / "manifest.json", config=SMALL)


def test_a_checkpoint_of_ours_comes_first(folder: Path) -> None:
    """A folder that has both is ours."""
    sync.save({"ours": 1}, folder, config=SMALL)
    assert sync.load(folder, config=SMALL) == {"ours": 1}
