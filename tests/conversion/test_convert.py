from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import enum
import errno
import json
import logging
import os
import re
from collections import Counter, OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptio
from ckptio import sync
from ckptio.conversion import ahead
from ckptio.conversion.compare import run_diff
from ckptio.conversion.source import PART_NBYTES, Source, parts_of
from ckptio.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    FormatError,
    StorageError,
    TargetError,
)
from ckptio.format.manifest import DOCUMENT_NAME, Chunk, TensorEntry
from ckptio.storage import linux, locks
from tests.adapters.rig import save
from tests.foreign.rig import (
    assert_same_state,
    load_dcp,
    make_training_state,
    make_weights,
    save_dcp,
    save_hf,
)
from tests.foreign.test_dcp import save_chunks
from tests.rig import SMALL
from tests.strategies import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio.conversion.convert import Format

SOURCES = ("ours", "dcp", "torch.save")


def save_as(kind: str, path: Path, state: dict[str, Any]) -> Path:
    """Save a state in a format that holds values too."""
    if kind == "ours":
        sync.save(state, path, config=SMALL)
    elif kind == "dcp":
        save_dcp(path, state)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("kind", SOURCES)
def test_a_state_survives_every_way(kind: str, tmp_path: Path) -> None:
    """To ours, which verifies; to DCP, which stock DCP loads; and back."""
    state = make_training_state()
    source = save_as(kind, tmp_path / "source", state)
    sync.convert(source, tmp_path / "ours", to="ckptio", config=SMALL)
    assert sync.verify(tmp_path / "ours", config=SMALL).is_whole
    assert all(load_file(path) for path in (tmp_path / "ours").glob("data-*"))
    assert_same_state(sync.load(tmp_path / "ours", config=SMALL), state)
    report = sync.convert(source, tmp_path / "dcp", to="dcp", config=SMALL)
    assert report.num_tensors == len(state["model"]) + 2
    assert_same_state(sync.load(tmp_path / "dcp", config=SMALL), state)
    found = make_training_state()
    for tensor in found["model"].values():
        tensor.zero_()
    load_dcp(tmp_path / "dcp", found)
    assert_same_state(found, state)


@pytest.mark.parametrize(("limit", "num_reads"), [(PART_NBYTES, 2), (4096, 12), (1, 51)])
def test_small_tensors_are_read_together_for_dcp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int, num_reads: int
) -> None:
    """As many as are asked for next and have no more bytes than a large one; views at once."""
    monkeypatch.setattr(ahead, "PART_NBYTES", limit)
    large = torch.arange(2000)
    state: dict[str, Any] = {
        "w": {f"{i}": torch.full((200,), float(i)) for i in range(49)},
        "large": large,
        "views": {f"{i}": [base, base[1:3]] for i, base in enumerate(torch.rand(9, 5).unbind())},
    }
    sync.save(state, tmp_path / "ours", config=SMALL)
    fill, filled = Source.fill, list[int]()

    def count(source: Source, wanted: Any, destinations: Any) -> None:
        filled.append(sum(each.tensor.nbytes for each in destinations))
        fill(source, wanted, destinations)

    monkeypatch.setattr(Source, "fill", count)
    sync.convert(tmp_path / "ours", tmp_path / "dcp", to="dcp", config=SMALL)
    assert_same_state(sync.load(tmp_path / "dcp", config=SMALL), state)
    assert len(filled) == num_reads
    assert max(filled[1:]) <= max(limit, large.nbytes)


@pytest.mark.parametrize("kind", SOURCES)
def test_the_model_of_a_state_becomes_a_folder_for_hugging_face(kind: str, tmp_path: Path) -> None:
    """Names without the prefix, files of a size, an index that has them all."""
    state = make_training_state()
    source = save_as(kind, tmp_path / "source", state)
    target = tmp_path / "hf"
    report = sync.convert(
        source, target, to="hf", strip="model", max_shard_nbytes=1000, config=SMALL
    )
    index = json.loads((target / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        shard = load_file(target / name)
        assert all(index["weight_map"][tensor] == name for tensor in shard)
        found |= shard
    assert_same_state(dict(sorted(found.items())), dict(sorted(state["model"].items())))
    total = sum(tensor.nbytes for tensor in state["model"].values())
    assert index["metadata"]["total_size"] == total == report.nbytes
    assert {file.name for file in report.files} == set(os.listdir(target))
    back = sync.load(target, config=SMALL)
    assert back.keys() == state["model"].keys()


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("name", ["model._orig_mod", "model._orig_mod.module.", "lists.1.inner"])
def test_a_name_may_end_inside_of_keys(kind: str, name: str, tmp_path: Path) -> None:
    """Those of a state_dict have dots, wherever it is."""
    part = {"a.weight": torch.ones(2), "a.bias": torch.zeros(2), "~": torch.ones(1)}
    inside = name.removeprefix("model.").removeprefix("lists.1.").removesuffix(".")
    held: Any = OrderedDict({f"{inside}.{key}": value for key, value in part.items()})
    held["n_averaged"] = torch.tensor(3)
    state = {"epoch": 1, "lists": [1, held]} if name.startswith("lists") else {"model": held}
    source = save_as(kind, tmp_path / "source", state)
    sync.convert(source, tmp_path / "x", to="ckptio", strip=name, config=SMALL)
    assert_same_state(sync.load(tmp_path / "x", config=SMALL), part)


def test_names_that_would_be_one_are_refused(tmp_path: Path) -> None:
    """Neither is left out."""
    source = save_as("ours", tmp_path / "source", {"x": {"a.b.c": torch.ones(1)}, "x.a.b.c": 1})
    with pytest.raises(FormatError, match=r"two values are called 'x\.a\.b\.c'"):
        sync.convert(source, tmp_path / "x", to="dcp", strip="x.a.b", config=SMALL)


@pytest.mark.parametrize(
    ("names", "strip", "said"),
    [
        (("_orig_mod.w", "_orig_mod.b.w"), "model", "model._orig_mod"),
        (("_orig_mod.module.w", "_orig_mod.module.w2"), "", "model._orig_mod.module"),
        (("module.w", "n_averaged"), "model.", ""),
        (("module", "module.w"), "model", ""),
        (("w", "b"), "", ""),
    ],
)
def test_names_that_a_wrapper_gave_are_noted(
    names: tuple[str, ...], strip: str, said: str, tmp_path: Path
) -> None:
    """With what takes them off, which does."""
    state = {"model": OrderedDict((name, torch.ones(2)) for name in names)}
    source = save_as("ours", tmp_path / "source", state)
    report = sync.convert(source, tmp_path / "x", to="hf", strip=strip, config=SMALL)
    assert [said in note for note in report.notes] == [True] * bool(said)
    if not said:
        return
    assert f"(--strip {said})" in report.notes[0]
    again = sync.convert(source, tmp_path / "x", to="hf", strip=said, overwrite=True, config=SMALL)
    assert not again.notes
    assert again.num_tensors == len(names)


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    """It has the name that libraries look for, and a note that they want."""
    save_as("ours", tmp_path / "source", make_weights())
    sync.convert(tmp_path / "source", tmp_path / "hf", to="hf", config=SMALL)
    assert os.listdir(tmp_path / "hf") == ["model.safetensors"]
    header = (tmp_path / "hf" / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + length])["__metadata__"]["format"] == "pt"
    sync.convert(tmp_path / "hf", tmp_path / "new" / "x.safetensors", to="safetensors")
    assert load_file(tmp_path / "new" / "x.safetensors").keys() == make_weights().keys()


def test_sharded_chunks_stay_chunks_in_ours_and_become_whole_elsewhere(tmp_path: Path) -> None:
    """Nothing is put together where that is not asked for."""
    w = torch.arange(48.0).reshape(6, 8)
    source = save_chunks(tmp_path / "chunks", w, [(0, 0, 4, 3), (0, 3, 4, 5), (4, 0, 2, 8)])
    sync.convert(source, tmp_path / "ours", to="ckptio", config=SMALL)
    (entry,) = sync.inspect(tmp_path / "ours", config=SMALL).tensors
    assert len(entry.chunks) == 3
    for to in ("safetensors", "dcp", "hf"):
        sync.convert(tmp_path / "ours", tmp_path / to, to=to, config=SMALL)
    assert torch.equal(load_file(tmp_path / "safetensors")["w"], w)
    for name in ("ours", "dcp", "hf"):
        assert torch.equal(sync.load(tmp_path / name, config=SMALL)["w"], w)


def test_ties_views_and_types_that_safetensors_lacks_survive(tmp_path: Path) -> None:
    """A tied tensor is written under each of its names; ours keeps the tie."""
    base = torch.arange(12.0).reshape(3, 4)
    state = {"a": base, "b": base, "c": base[1:, ::2], "z": torch.tensor([1 + 2j])}
    save_as("ours", tmp_path / "source", state)
    for to in ("safetensors", "dcp", "ckptio"):
        sync.convert(tmp_path / "source", tmp_path / to, to=to, config=SMALL)
        assert_same_state(dict(sorted(sync.load(tmp_path / to, config=SMALL).items())), state)
    found = sync.load(tmp_path / "ckptio", config=SMALL)
    assert found["a"].data_ptr() == found["b"].data_ptr()


@pytest.mark.parametrize("state", [{"a.b": 1, "a": {"b": 2}}, {1: 1, "1": 2}])
def test_two_parts_that_dcp_would_give_one_name_are_refused(
    state: dict[Any, Any], tmp_path: Path
) -> None:
    """Before anything is written."""
    state = {**state, "w": torch.ones(2)}
    source = save_as("ours", tmp_path / "source", state)
    with pytest.raises(FormatError, match="one name for DCP"):
        sync.convert(source, tmp_path / "dcp", to="dcp", config=SMALL)
    assert not (tmp_path / "dcp").exists()


@pytest.mark.filterwarnings("error")
def test_a_conversion_to_dcp_says_nothing_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stock writer warns that there are no other ranks; and so it is meant."""
    save_as("ours", tmp_path / "ours", make_training_state())
    caplog.set_level(logging.INFO)
    for _ in range(2):  # nor when it writes over what is there
        sync.convert(tmp_path / "ours", tmp_path / "dcp", to="dcp", overwrite=True, config=SMALL)
    assert not [record for record in caplog.records if record.name.startswith("torch")]


def test_what_progress_raises_ends_a_conversion_to_dcp(tmp_path: Path) -> None:
    """As it ends the others: not as an error of a rank."""
    source = save_as("ours", tmp_path / "source", {"w": torch.ones(2)})

    def progress(*_: int) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        sync.convert(source, tmp_path / "dcp", to="dcp", progress=progress, config=SMALL)
    assert not (tmp_path / "dcp").exists()


@pytest.mark.parametrize("kind", [*SOURCES, "old torch.save"])
def test_one_element_has_any_stride(kind: str, tmp_path: Path) -> None:
    """It is contiguous all the same, in a value, alone, and as a view."""
    base = torch.arange(6.0).view(3, 2)
    state = {"base": base, "one": base[:1, 0], "pair": (base[1:2, 1],)}
    assert state["one"].stride() == (2,)  # type: ignore[attr-defined]  # a tensor
    source = tmp_path / "source"
    if kind == "old torch.save":
        torch.save(state, source, _use_new_zipfile_serialization=False)
    else:
        save_as(kind, source, state)
    assert_same_state(sync.load(source, config=SMALL), state)
    for to in ("ckptio", "dcp", "hf"):
        sync.convert(source, tmp_path / to, to=to, config=SMALL)
        assert run_diff(source, tmp_path / to, config=SMALL).is_equal


def test_values_are_lost_only_where_that_is_asked_for(tmp_path: Path) -> None:
    """The error names them."""
    state = {"w": torch.ones(2), "epoch": 3, "array": np.ones(3)}
    save_as("ours", tmp_path / "source", state)
    for to in ("safetensors", "hf"):
        with pytest.raises(ConfigError, match=r"'epoch', 'array'"):
            sync.convert(tmp_path / "source", tmp_path / "x", to=to, config=SMALL)
        assert not (tmp_path / "x").exists()
    sync.convert(
        tmp_path / "source", tmp_path / "x", to="safetensors", drop_values=True, config=SMALL
    )
    assert list(load_file(tmp_path / "x")) == ["w"]


def test_a_conversion_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """Files that are whole are kept; one that is not, or of another state, is written."""
    save_as("ours", tmp_path / "source", make_weights())
    target = tmp_path / "hf"

    def convert(**options: Any) -> list[bool]:
        report = sync.convert(
            tmp_path / "source", target, to="hf", max_shard_nbytes=1, config=SMALL, **options
        )
        return [
            file.was_there for file in report.files if file.name != "model.safetensors.index.json"
        ]

    def stop(done: int, total: int) -> None:
        if done > total - 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(progress=stop)
    left = sorted(os.listdir(target))
    assert left
    assert "model.safetensors.index.json" not in left
    assert not any("partial" in name for name in left)
    again = convert()
    assert 0 < sum(again) < len(again)
    assert all(convert())
    assert_same_state(
        dict(sorted(sync.load(target, config=SMALL).items())), dict(sorted(make_weights().items()))
    )
    sync.save(make_weights(), tmp_path / "source", overwrite=True, config=SMALL)
    with pytest.raises(CheckpointExistsError):
        convert()
    assert not any(convert(overwrite=True))


def test_containers_inside_a_value_of_dcp_stay_what_they_are(tmp_path: Path) -> None:
    """A tuple is one value there, with all that is in it."""
    inside = (Counter(a=3), OrderedDict(x=torch.ones(2)), [{"y": torch.zeros(1)}])
    source = save_as("ours", tmp_path / "source", {"inside": inside, "w": torch.ones(2)})
    sync.convert(source, tmp_path / "dcp", to="dcp", config=SMALL)
    assert_same_state(sync.load(tmp_path / "dcp", config=SMALL)["inside"], inside)


def test_versions_of_modules_inside_a_value_of_dcp_stay(tmp_path: Path) -> None:
    """A `state_dict` in a tuple has them; without, a module takes it for an older one."""
    inside = torch.nn.BatchNorm1d(2).state_dict()
    source = save_as("ours", tmp_path / "source", {"inside": (inside, 1), "w": torch.ones(2)})
    assert not sync.convert(source, tmp_path / "dcp", to="dcp", config=SMALL).notes
    found, _ = sync.load(tmp_path / "dcp", config=SMALL)["inside"]
    assert_same_state(found, inside)
    assert found._metadata == inside._metadata  # type: ignore[attr-defined]  # torch sets it


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_another_part_of_the_same_source_is_another_file(to: Any, tmp_path: Path) -> None:
    """Also where names, types and shapes are the same."""
    state = {"model": {"w": torch.ones(4)}, "ema": {"w": torch.zeros(4)}}
    source, target = save_as("ours", tmp_path / "source", state), tmp_path / "x.safetensors"
    sync.convert(source, target, to=to, strip="model", config=SMALL)
    report = sync.convert(source, target, to=to, strip="model", config=SMALL)
    assert [file.was_there for file in report.files] == [True]
    with pytest.raises(CheckpointExistsError):
        sync.convert(source, target, to=to, strip="ema", config=SMALL)
    assert_same_state(sync.load(target, config=SMALL), state["model"])
    report = sync.convert(source, target, to=to, strip="ema", overwrite=True, config=SMALL)
    assert [file.was_there for file in report.files] == [False]
    assert_same_state(sync.load(target, config=SMALL), state["ema"])


def test_files_of_another_conversion_are_not_mixed_in(tmp_path: Path) -> None:
    """A reader would take them for parts of it."""
    save_hf(tmp_path / "hf", {"x": torch.ones(2), "y": torch.ones(3)})
    save_as("ours", tmp_path / "source", make_weights())
    with pytest.raises(CheckpointExistsError):
        sync.convert(tmp_path / "source", tmp_path / "hf", to="hf", config=SMALL)
    sync.convert(tmp_path / "source", tmp_path / "hf", to="hf", overwrite=True, config=SMALL)
    assert os.listdir(tmp_path / "hf") == ["model.safetensors"]


def test_old_files_go_when_the_new_ones_are_there(tmp_path: Path) -> None:
    """A conversion that fails leaves a folder as it was, whatever its files are called."""
    weights = {"x": torch.ones(2), "y": torch.ones(3)}
    save_hf(tmp_path / "hf", weights)
    source = save_as("ours", tmp_path / "source", make_weights())
    (data,) = source.glob("data-*")
    raw = bytearray(data.read_bytes())
    raw[9000] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CorruptionError):
        sync.convert(source, tmp_path / "hf", to="hf", overwrite=True, config=SMALL)
    assert_same_state(sync.load(tmp_path / "hf", config=SMALL), weights)


def test_a_smaller_checkpoint_of_dcp_leaves_nothing_of_a_larger_one(tmp_path: Path) -> None:
    """Of the files that DCP's writer writes; others stay, as does nothing of a failure."""
    save_dcp(tmp_path / "dcp", {"x": torch.ones(9), "y": torch.ones(9)})
    (tmp_path / "dcp" / "__7_3.distcp").write_bytes(b"of another rank")
    (tmp_path / "dcp" / "__7_4.distcp").mkdir()  # what cannot be removed is in nobody's way
    (tmp_path / "dcp" / "notes.txt").write_bytes(b"of the user")
    source = save_as("ours", tmp_path / "source", {"x": torch.zeros(2)})
    report = sync.convert(source, tmp_path / "dcp", to="dcp", overwrite=True, config=SMALL)
    names = [file.name for file in report.files]
    assert names[0] == ".metadata"
    assert re.fullmatch(r"__0_\d{18}\.distcp", names[1])
    assert not any(file.was_there for file in report.files)
    assert set(os.listdir(tmp_path / "dcp")) == {*names, "notes.txt", "__7_4.distcp"}
    target = {"x": torch.ones(2)}
    load_dcp(tmp_path / "dcp", target)
    assert not target["x"].any()
    (data,) = source.glob("data-*")
    data.write_bytes(data.read_bytes()[:-3] + b"odd")
    with pytest.raises(CorruptionError):
        sync.convert(source, tmp_path / "new", to="dcp", config=SMALL)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_checkpoint_of_dcp_that_comes_meanwhile_is_whole_or_replaced(
    tmp_path: Path, *, overwrite: bool
) -> None:
    """Also by a writer that knows of no locks."""
    source = save_as("ours", tmp_path / "source", {"x": torch.zeros(2)})
    come: list[int] = []

    def meanwhile(*progress: int) -> None:
        if not come:
            come.extend(progress)
            save_dcp(tmp_path / "dcp", {"x": torch.ones(2)})

    options: dict[str, Any] = {"config": SMALL, "progress": meanwhile, "overwrite": overwrite}
    if overwrite:
        sync.convert(source, tmp_path / "dcp", to="dcp", **options)
    else:
        with pytest.raises(CheckpointExistsError):
            sync.convert(source, tmp_path / "dcp", to="dcp", **options)
    assert come
    target = {"x": torch.full((2,), 7.0)}
    load_dcp(tmp_path / "dcp", target)
    assert target["x"].tolist() == ([0, 0] if overwrite else [1, 1])
    assert len(os.listdir(tmp_path / "dcp")) == 2


def test_a_save_of_dcp_under_way_keeps_its_files(tmp_path: Path) -> None:
    """Nothing goes without `overwrite` but what a conversion that was killed had moved there."""
    source = save_as("ours", tmp_path / "source", {"x": torch.zeros(2)})
    (tmp_path / "dcp").mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", f"__0_{'7' * 18}.distcp"):
        (tmp_path / "dcp" / name).write_bytes(b"data")
    report = sync.convert(source, tmp_path / "dcp", to="dcp", config=SMALL)
    names = {file.name for file in report.files}
    assert set(os.listdir(tmp_path / "dcp")) == {*names, "__0_0.distcp", "__1_0.distcp"}


@pytest.mark.parametrize("refusal", [None, errno.EINVAL])
def test_a_file_that_comes_meanwhile_stays(
    refusal: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there when the conversion looked; also where no rename leaves others alone."""
    if refusal is not None:
        monkeypatch.setattr(linux, "rename_noreplace", refuse_rename(refusal))
    source = save_as("ours", tmp_path / "source", {"x": torch.zeros(2)})
    path = tmp_path / "x.safetensors"

    def meanwhile(*_: int) -> None:
        path.write_bytes(b"of somebody else")

    with pytest.raises(CheckpointExistsError):
        sync.convert(source, path, to="safetensors", config=SMALL, progress=meanwhile)
    assert path.read_bytes() == b"of somebody else"
    assert sorted(os.listdir(tmp_path)) == ["source", "x.safetensors"]


def refuse_rename(code: int) -> Callable[[str, str], None]:
    """Make what a file system does that has no such rename, or is broken."""

    def refuse(source: str, target: str) -> None:
        raise OSError(code, os.strerror(code), source, None, target)

    return refuse


@pytest.mark.parametrize("to", ["safetensors", "hf", "dcp"])
def test_a_file_gets_its_name_where_no_rename_leaves_others_alone(
    to: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is broken is not taken for that, and leaves nothing."""
    source = save_as("ours", tmp_path / "source", make_weights())
    monkeypatch.setattr(linux, "rename_noreplace", refuse_rename(errno.EACCES))
    with pytest.raises(StorageError, match="cannot write"):
        sync.convert(source, tmp_path / "x", to=to, config=SMALL)
    assert not os.path.isfile(tmp_path / "x")
    monkeypatch.setattr(linux, "rename_noreplace", refuse_rename(errno.EINVAL))
    sync.convert(source, tmp_path / "x", to=to, config=SMALL)
    found = sync.load(tmp_path / "x", config=SMALL)
    assert_same_state(dict(sorted(found.items())), dict(sorted(make_weights().items())))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert not (tmp_path / "x").is_dir() or not any(
        name.endswith("partial") for name in os.listdir(tmp_path / "x")
    )


@pytest.mark.parametrize("to", ["ckptio", "safetensors", "hf", "dcp"])
def test_what_cannot_lie_there_is_an_error_of_ours(to: Format, tmp_path: Path) -> None:
    """Nothing is below a file."""
    source = save_as("ours", tmp_path / "source", make_weights())
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(StorageError):
        sync.convert(source, tmp_path / "file" / "x", to=to, config=SMALL)
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("to", ["safetensors", "hf"])
@pytest.mark.parametrize(
    "state",
    [{"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}, {"__metadata__": torch.ones(2)}],
)
def test_tensors_that_a_safetensors_file_cannot_tell_apart_are_refused(
    to: Format, state: dict[str, Any], tmp_path: Path
) -> None:
    """Before anything is written."""
    source = save_as("ours", tmp_path / "source", state)
    with pytest.raises(FormatError, match="have one name, or one has a reserved one"):
        sync.convert(source, tmp_path / "x", to=to, config=SMALL)
    assert not (tmp_path / "x").exists()


def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path: Path) -> None:
    source = save_as("ours", tmp_path / "source", make_weights())
    mine, link = tmp_path / "mine", tmp_path / "x.safetensors"
    mine.write_bytes(b"mine")
    link.symlink_to(mine)
    with pytest.raises(CheckpointExistsError):
        sync.convert(source, link, to="safetensors", config=SMALL)
    sync.convert(source, link, to="safetensors", overwrite=True, config=SMALL)
    assert not link.is_symlink()
    assert mine.read_bytes() == b"mine"
    assert set(load_file(link)) == set(make_weights())


def test_a_part_of_a_tensor_takes_no_more_room_in_dcp(tmp_path: Path) -> None:
    """Whatever else lies in the memory of a tensor that has views."""
    base = torch.arange(200_000)
    state = {"base": base, **{f"{i}": base[i : i + 9] for i in range(5)}}
    source = save_as("ours", tmp_path / "source", state)
    report = sync.convert(source, tmp_path / "x", to="dcp", config=SMALL)
    assert sum(file.nbytes for file in report.files) < base.nbytes + (64 << 10)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_nothing_else_is_written_beside_a_checkpoint_of_ours(
    to: Any, tmp_path: Path, *, overwrite: bool
) -> None:
    """Who loads the path would still find that one."""
    source = save_as("ours", tmp_path / "source", {"x": torch.zeros(2)})
    there = save_as("ours", tmp_path / "there", {"y": torch.ones(2)})
    before = sorted(os.listdir(there))
    with pytest.raises(CheckpointExistsError):
        sync.convert(source, there, to=to, overwrite=overwrite, config=SMALL)
    assert sorted(os.listdir(there)) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_in_the_place_of_a_file_is_called_one(
    tmp_path: Path, *, overwrite: bool
) -> None:
    """It is no checkpoint to pass overwrite=True for, and stays."""
    source = save_as("ours", tmp_path / "source", {"x": torch.zeros(2)})
    (tmp_path / "run" / "notes").mkdir(parents=True)
    with pytest.raises(
        StorageError, match="a directory is here; give the path of a file"
    ) as caught:
        sync.convert(source, tmp_path / "run", to="safetensors", overwrite=overwrite, config=SMALL)
    assert caught.value.errno == errno.EISDIR
    assert os.listdir(tmp_path / "run") == ["notes"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("there", "to"), [("hf", "dcp"), ("dcp", "hf")])
def test_two_formats_do_not_share_a_directory(
    there: str, to: Any, tmp_path: Path, *, overwrite: bool
) -> None:
    """Some reader would find the older one; the error says what to do about it."""
    source = save_as("ours", tmp_path / "source", {"x": torch.zeros(2)})
    old = {"y": torch.ones(2)}
    target = (save_hf if there == "hf" else save_dcp)(tmp_path / "target", old)
    before = sorted(os.listdir(target))
    with pytest.raises(CheckpointExistsError, match="another format; give another path"):
        sync.convert(source, target, to=to, overwrite=overwrite, config=SMALL)
    assert sorted(os.listdir(target)) == before
    assert_same_state(sync.load(target, config=SMALL), old)


@pytest.mark.parametrize("to", ["hf", "safetensors"])
def test_what_dcp_has_to_know_is_no_tensor_for_others(to: Any, tmp_path: Path) -> None:
    """Neither of a checkpoint that a StorageWriter wrote, nor of its files one by one."""
    save({"model": {"w": torch.ones(3)}}, tmp_path / "source")
    report = sync.convert(tmp_path / "source", tmp_path / "a", to=to, config=SMALL)
    names = [Path(report.path) / file.name for file in report.files]
    assert set(load_file(names[0])) == {"model.w"}
    files = {frozenset(load_file(file)): file for file in (tmp_path / "source").glob("data-*")}
    assert set(files) == {frozenset({"model.w"}), frozenset({DOCUMENT_NAME})}
    with pytest.raises(ConfigError, match="no tensor"):
        sync.convert(files[frozenset({DOCUMENT_NAME})], tmp_path / "b", to=to, config=SMALL)


@pytest.mark.parametrize("to", ["hf", "safetensors"])
def test_what_dcp_has_to_know_is_not_counted_either(to: Any, tmp_path: Path) -> None:
    """An index may have it, of all files that a StorageWriter wrote."""
    save({"model": {"w": torch.ones(3)}}, tmp_path / "source")
    files = [file for file in (tmp_path / "source").iterdir() if file.suffix == ".safetensors"]
    index = {"weight_map": {name: file.name for file in files for name in load_file(file)}}
    assert set(index["weight_map"]) == {"model.w", DOCUMENT_NAME}
    (tmp_path / "source" / "manifest.json").unlink()
    (tmp_path / "source" / "model.safetensors.index.json").write_text(json.dumps(index))
    told: list[tuple[int, int]] = []
    report = sync.convert(
        tmp_path / "source", tmp_path / "a", to=to, config=SMALL, progress=lambda *n: told.append(n)
    )
    assert (report.num_tensors, report.nbytes, told[-1]) == (1, 12, (12, 12))


@pytest.mark.parametrize("to", ["ckptio", "safetensors", "hf", "dcp"])
def test_what_is_there_stays_unless_it_may_go(to: Any, tmp_path: Path) -> None:
    """And stays when the source turns out to be damaged."""
    source = save_as("ours", tmp_path / "source", make_weights())
    other = save_as("ours", tmp_path / "other", {"x": torch.zeros(5)})
    target = tmp_path / "target"
    sync.convert(other, target, to=to, config=SMALL)
    told: list[tuple[int, int]] = []
    with pytest.raises(CheckpointExistsError, match="pass overwrite=True") as refused:
        sync.convert(source, target, to=to, config=SMALL, progress=lambda *n: told.append(n))
    assert "not written to its end" not in str(refused.value)
    assert not told
    (data,) = source.glob("data-*")
    raw = bytearray(data.read_bytes())
    raw[9000] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CorruptionError):
        sync.convert(source, target, to=to, overwrite=True, config=SMALL)
    assert list(sync.load(target, config=SMALL)) == ["x"]
    raw[9000] ^= 1
    data.write_bytes(raw)
    sync.convert(source, target, to=to, overwrite=True, config=SMALL)
    found = sync.load(target, config=SMALL)
    assert_same_state(dict(sorted(found.items())), dict(sorted(make_weights().items())))


@pytest.mark.parametrize("name", ["int4", "bits16"])
def test_elements_that_dcp_does_not_know_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """Before anything is written; safetensors files hold them, with the type beside them."""
    bits = torch.arange(6, dtype=torch.int16).view(getattr(torch, name))
    state = {"bits": bits, "w": torch.ones(2)}
    source = save_as("ours", tmp_path / "source", state)
    with pytest.raises(FormatError, match=f"'bits' has elements of type {name}"):
        sync.convert(source, tmp_path / "dcp", to="dcp", config=SMALL)
    assert not (tmp_path / "dcp").exists()
    sync.convert(source, tmp_path / "dcp", to="dcp", select="w", config=SMALL)
    sync.convert(source, tmp_path / "x.safetensors", to="safetensors", config=SMALL)
    found = sync.load(tmp_path / "x.safetensors", config=SMALL)["bits"]
    assert found.dtype == bits.dtype
    assert torch.equal(found.view(torch.int16), bits.view(torch.int16))


@pytest.mark.parametrize("name", ["uint4", "bits8"])
@pytest.mark.parametrize("holder", [list, tuple])
def test_views_as_bits_are_refused_for_dcp_by_name(holder: Any, name: str, tmp_path: Path) -> None:
    """They are no elements of bits where they are stored."""
    base = torch.arange(6, dtype=torch.uint8)
    state = {"views": holder([base[1:3].view(getattr(torch, name))]), "w": base}
    source = save_as("ours", tmp_path / "source", state)
    with pytest.raises(FormatError, match=rf"'views\.0' has elements of type {name}"):
        sync.convert(source, tmp_path / "dcp", to="dcp", config=SMALL)
    assert not (tmp_path / "dcp").exists()
    sync.convert(source, tmp_path / "dcp", to="dcp", select="w", config=SMALL)


def test_views_of_two_types_in_a_value_are_refused_for_dcp_by_name(tmp_path: Path) -> None:
    """It pickles a tuple, and `torch.save` takes one type of each storage; alone each is taken."""
    base = torch.arange(6.0)
    pair = base[1:3], base.view(torch.int32)[2:5]
    source = save_as("ours", tmp_path / "source", {"pair": pair, "w": base})
    with pytest.raises(FormatError, match="'pair' is a value that DCP cannot write: Cannot save"):
        sync.convert(source, tmp_path / "dcp", to="dcp", config=SMALL)
    assert not (tmp_path / "dcp").exists()
    source = save_as("ours", tmp_path / "apart", {"pair": list(pair), "w": base})
    sync.convert(source, tmp_path / "dcp", to="dcp", config=SMALL)
    assert_same_state(sync.load(tmp_path / "dcp", config=SMALL)["pair"], list(pair))


@pytest.mark.parametrize("to", ["safetensors", "hf"])
@pytest.mark.parametrize("name", ["int4", "bits16"])
def test_views_of_bits_are_converted(name: str, to: Any, tmp_path: Path) -> None:
    """Each becomes a tensor of its own, though torch has no copy of some types of bits."""
    bits = torch.arange(48, dtype=torch.int16).view(getattr(torch, name)).reshape(6, -1)
    state = {"bits": bits, "t": bits.t(), "part": bits[1:5, :3], "twice": bits[:1].expand(4, -1)}
    source, target = save_as("ours", tmp_path / "source", state), tmp_path / "x.safetensors"
    sync.convert(source, target, to=to, config=SMALL)
    found = sync.load(target, config=SMALL)
    integer = {1: torch.uint8, 2: torch.int16}[bits.itemsize]
    for key, tensor in state.items():
        assert found[key].dtype == bits.dtype
        assert torch.equal(found[key].view(integer), tensor.view(integer))


@pytest.mark.skipif(
    not hasattr(torch, "float4_e2m1fn_x2"), reason="types of a later version of torch"
)
@pytest.mark.parametrize("kind", ["ours", "safetensors"])
def test_others_get_the_types_that_their_safetensors_knows(kind: str, tmp_path: Path) -> None:
    """As its own writer names them, views among them; what has no name there is told."""
    raw = torch.arange(32, dtype=torch.uint8)
    known = {
        name: raw.clone().view(getattr(torch, name)).reshape(2, -1)
        for name in ("complex64", "float8_e8m0fnu", "float8_e4m3fnuz", "float4_e2m1fn_x2")
    }
    odd = {name: raw.clone().view(getattr(torch, name)) for name in ("complex128", "uint4")}
    odd["scalar"] = torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    what: set[str] = {"uint4 as U8", "complex128 as pairs of F64", "float4_e2m1fn_x2 as U8"}
    if kind == "safetensors":
        save_file(known, source := tmp_path / "source.safetensors")
        odd, what = {}, set()
    else:
        known["view"] = known["complex64"][1]
        save_as(kind, source := tmp_path / "source", {**known, **odd})
    report = sync.convert(source, tmp_path / "hf", to="hf", config=SMALL)
    assert {note.partition("other readers get ")[2] for note in report.notes} == what
    for found in (load_file(tmp_path / "hf" / "model.safetensors"), sync.load(tmp_path / "hf")):
        for name, tensor in known.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert bytes_of(found[name]) == bytes_of(tensor)
    assert {name: (t.dtype, bytes_of(t)) for name, t in found.items() if name in odd} == {
        name: (t.dtype, bytes_of(t)) for name, t in odd.items()
    }


def test_files_of_the_user_stay_in_a_folder_that_is_replaced(tmp_path: Path) -> None:
    """Only what an index lists goes, and what has the name of a shard."""
    source = save_as("ours", tmp_path / "source", make_weights())
    target = tmp_path / "target"
    target.mkdir()
    mine = ("model-ema.safetensors", ".model-ema.safetensors.partial", "model-00001.safetensors")
    for name in mine:
        (target / name).write_bytes(b"mine")
    sync.convert(source, target, to="hf", config=SMALL)
    old = ("model-00001-of-00002.safetensors", "part-1.safetensors")
    for name in (*old, "unlisted.safetensors"):
        (target / name).write_bytes(b"old")
    cases: list[dict[str, Any]] = [{"max_shard_nbytes": 1000}, {}]
    for options in cases:
        listed = {"a": old[1], "b": "../source/manifest.json", "c": "part-2.safetensors"}
        (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
        with pytest.raises(CheckpointExistsError):
            sync.convert(source, target, to="hf", config=SMALL, **options)
        report = sync.convert(source, target, to="hf", overwrite=True, config=SMALL, **options)
        left = {file.name for file in report.files} | {*mine, "unlisted.safetensors"}
        assert set(os.listdir(target)) == left
        assert all((target / name).read_bytes() == b"mine" for name in mine)
        for name in old:
            (target / name).write_bytes(b"old")
    assert_same_state(sync.load(source), sync.load(target))


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    """Before anything is read."""
    source = save_as("ours", tmp_path / "source", make_weights())
    cases: list[dict[str, Any]] = [
        {"to": "zip"},
        {"to": "dcp", "drop_values": True},
        {"to": "dcp", "max_shard_nbytes": 5},
        {"to": None},
        *({"to": "hf", "max_shard_nbytes": nbytes} for nbytes in (-5, 0, "5GB", 1e9, True)),
        *({"to": "hf", "strip": strip} for strip in (5, None, b"embed")),
        {"to": "hf", "strip": "embed.weight"},
        {"to": np.array(["hf", "dcp"])},
        {"to": "hf", "progress": True},
        *({"to": "hf", name: "no"} for name in ("overwrite", "drop_values")),
        {"to": "hf", "select": np.array(["embed", "head"])},
        {"to": "hf", "select": torch.ones(2)},
    ]
    for options in cases:
        with pytest.raises((ConfigError, TargetError)):
            sync.convert(source, tmp_path / "x", config=SMALL, **options)
        assert not (tmp_path / "x").exists()
    sync.save(make_weights(), "memory://wrong/a", overwrite=True)
    for twin, path in [(f"{source}", f"{source}"), ("memory://wrong/a", "memory:///wrong/a")]:
        with pytest.raises(ConfigError, match="itself"):
            sync.convert(twin, path, to="ckptio", overwrite=True, config=SMALL)
    with pytest.raises(TargetError, match="'nothing' selects nothing"):
        sync.convert(source, tmp_path / "x", to="hf", select="nothing", config=SMALL)
    with pytest.raises(
        TargetError, match="without strip='embed', names are as 'weight'; give them so"
    ):
        sync.convert(source, tmp_path / "x", to="hf", select="embed", strip="embed", config=SMALL)
    with pytest.raises(TargetError, match="nothing below 'nothing'"):
        sync.convert(source, tmp_path / "x", to="hf", strip="nothing", config=SMALL)
    with pytest.raises(CheckpointNotFoundError):
        sync.convert(tmp_path / "nowhere", tmp_path / "x", to="hf", config=SMALL)


async def test_cancelling_ends_it_and_leaves_nothing_half_done(
    tmp_path: Path, no_leaks: None
) -> None:
    """The cancellation arrives when nothing runs any more."""
    del no_leaks
    save_file({f"w{i}": torch.ones(1000) for i in range(50)}, tmp_path / "x.safetensors")
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def progress(done: int, total: int) -> None:
        del done, total
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(_seen(), loop).result()

    async def _seen() -> None:
        task.cancel()

    task = asyncio.create_task(
        ckptio.convert(
            tmp_path / "x.safetensors", tmp_path / "ours", to="ckptio", progress=progress,
            config=SMALL,
        )
    )  # fmt: skip
    with pytest.raises(asyncio.CancelledError):
        await task
    assert began.is_set()
    with pytest.raises(CheckpointNotFoundError):
        await ckptio.load(tmp_path / "ours")
    report = await ckptio.convert(
        tmp_path / "x.safetensors", tmp_path / "ours", to="ckptio", config=SMALL
    )
    assert report.nbytes == 200_000


@pytest.mark.parametrize("name", ["progress", "select"])
@pytest.mark.parametrize("to", ["ckptio", "safetensors", "hf", "dcp"])
async def test_a_stop_iteration_of_a_callback_ends_it(
    to: Format, name: str, tmp_path: Path
) -> None:
    """No future of a loop takes one: whoever waits is told by an error that it came of."""
    await ckptio.save({"w": torch.ones(2)}, tmp_path / "source", config=SMALL)
    options: dict[str, Any] = {name: lambda *_: next(iter(()))}
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await ckptio.convert(tmp_path / "source", tmp_path / "x", to=to, config=SMALL, **options)
    assert isinstance(caught.value.__cause__, StopIteration)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("to", ["ckptio", "safetensors", "hf", "dcp"])
def test_a_source_that_was_cut_is_refused_before_anything_is_written(
    to: Format, tmp_path: Path
) -> None:
    """However much of it is whole."""
    config = dataclasses.replace(SMALL, bucket_nbytes=16 << 10)
    sync.save({f"w{i}": torch.ones(5000 + i) for i in range(3)}, tmp_path / "c", config=config)
    cut = max((tmp_path / "c").glob("data-*"))
    os.truncate(cut, cut.stat().st_size - 1)
    counts: list[int] = []
    options: dict[str, Any] = {"max_shard_nbytes": 16 << 10} if to == "hf" else {}
    with pytest.raises(CorruptionError, match=cut.name):
        sync.convert(
            tmp_path / "c",
            tmp_path / "x",
            to=to,
            config=config,
            progress=lambda done, _: counts.append(done),
            **options,
        )
    assert counts == []
    assert not (tmp_path / "x").exists()


def test_parts_cover_a_tensor_in_its_order() -> None:
    """Whatever the shape and the size of a part."""
    for shape in [(), (7,), (3, 5), (2, 3, 4), (1, 1, 9), (0, 4), (4, 0)]:
        entry = TensorEntry("x", "float32", shape, (Chunk(0, 0),))
        for limit in (1, 4, 8, 20, 50, 1000):
            parts = list(parts_of(entry, limit))
            stop = 0
            for part in parts:
                assert part.start == stop
                assert 0 < part.nbytes <= max(limit, 4)
                stop += part.nbytes
            assert stop == entry.nbytes


@pytest.mark.parametrize("to", ["ckptio", "safetensors", "hf", "dcp"])
def test_progress_ends_with_all_bytes(to: Format, tmp_path: Path) -> None:
    """Those of what is read once for several views, and of files that are there, are counted."""
    base, tied = torch.arange(3000.0), torch.ones(50)
    state = {"w": base, "view": base[10:20], "one": tied, "two": tied, "pair": (torch.ones(7),)}
    sync.save(state, tmp_path / "source", config=SMALL)
    total = {"ckptio": 12_228, "dcp": 12_428}.get(to, 12_468)
    for name in ("x", "x" if to in ("safetensors", "hf") else "y"):
        counts: list[tuple[int, int]] = []
        sync.convert(
            tmp_path / "source",
            tmp_path / name,
            to=to,
            config=SMALL,
            progress=lambda *count, counts=counts: counts.append(count),
        )
        done = [count[0] for count in counts]
        assert done == sorted(done)
        assert (done[-1], {count[1] for count in counts}) == (total, {total})


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_what_is_dropped_is_not_counted(to: Format, tmp_path: Path) -> None:
    """Neither in the report, nor as bytes to come; nor has it a name that others need."""
    state = {"module": {"w": torch.ones(7)}, "array": np.arange(5.0), "bytes": bytes(100_000)}
    sync.save(state, tmp_path / "source", config=SMALL)
    counts: list[tuple[int, int]] = []
    report = sync.convert(
        tmp_path / "source",
        tmp_path / "x",
        to=to,
        drop_values=True,
        config=SMALL,
        progress=lambda *count: counts.append(count),
    )
    assert set(sync.load(tmp_path / "x")) == {"module.w"}
    assert (report.num_tensors, report.nbytes, counts) == (1, 28, [(28, 28)])
    assert "every name begins with 'module.'" in report.notes[0]


def test_what_dcp_pickles_is_noted(tmp_path: Path) -> None:
    """It is in the directory, and comes back through DCP alone."""
    sync.save({"a": np.arange(3), "b": np.float32(2), "c": 1}, tmp_path / "c")
    notes = sync.convert(tmp_path / "c", tmp_path / "dcp", to="dcp").notes
    assert [note.partition(":")[0] for note in notes] == ["a", "b"]
    with pytest.raises(FormatError, match="more than data"):
        sync.load(tmp_path / "dcp")
    assert sync.load(tmp_path / "dcp", select="c") == {"c": 1}


class Phase(enum.Enum):
    """Of a run."""

    WARM = "warm"


class Place(NamedTuple):
    """Of a reader."""

    row: int


@dataclasses.dataclass
class Progress:
    """Of a run."""

    epoch: int


#: What is in the way of each, if anything is.
VALUES: dict[str, tuple[Any, str]] = {
    "date": (dt.date(2020, 1, 1), "does not load"),
    "datetime": (dt.datetime(2020, 1, 1, tzinfo=dt.UTC), "does not load"),
    "time": ([dt.time(1)], "does not load"),
    "timedelta": ((1, dt.timedelta(1)), "does not load"),
    "path": (Path("a"), "does not load"),
    "frozenset": ({"inner": frozenset([1])}, "does not load"),
    "array": ((np.arange(3),), "does not load"),
    "enum": (Phase.WARM, "as its value"),
    "dataclass": (Progress(3), "as a dict"),
    "dataclass inside": ((Progress(3),), "as a dict"),
    "namedtuple": (Place(1), "as a tuple"),
    "OrderedDict": (OrderedDict(a=1), "as a dict"),
    "bytes": ([b"", b"a", bytearray(b"")], ""),
    "set": ((1, {"a"}), ""),
    "words": ([torch.float16, torch.Size([1]), 1j, float("inf"), 1 << 100], ""),
}


@pytest.mark.parametrize("case", list(VALUES))
def test_what_dcp_does_not_give_back_is_noted(tmp_path: Path, case: str) -> None:
    """And nothing else: what has no note comes back as it was."""
    value, said = VALUES[case]
    state = {"x": value, "w": torch.ones(2)}
    sync.save(state, tmp_path / "ours")
    notes = sync.convert(tmp_path / "ours", tmp_path / "dcp", to="dcp").notes
    if not said:
        assert not notes
        assert_same_state(sync.load(tmp_path / "dcp"), state)
        return
    (note,) = notes
    assert note.startswith("x")
    assert said in note
    if said == "does not load":
        with pytest.raises(FormatError, match="more than data"):
            sync.load(tmp_path / "dcp")
    else:
        assert repr(sync.load(tmp_path / "dcp")["x"]) != repr(value)


def test_what_has_an_empty_name_is_not_the_state(tmp_path: Path) -> None:
    """Notes, names in a file, and a comparison call it by the name that it has."""
    w = torch.ones(3)
    sync.save({"": {}, "w": w}, tmp_path / "empty", config=SMALL)
    notes = sync.convert(tmp_path / "empty", tmp_path / "dcp", to="dcp", config=SMALL).notes
    assert notes == ("'': an empty dict is not kept",)
    sync.save({"": OrderedDict(a=w)}, tmp_path / "ordered", config=SMALL)
    notes = sync.convert(tmp_path / "ordered", tmp_path / "dcp2", to="dcp", config=SMALL).notes
    assert notes == ("'': an OrderedDict comes back as a dict",)
    sync.save({"": w, "state": w + 1}, tmp_path / "both", config=SMALL)
    report = sync.convert(tmp_path / "both", tmp_path / "a", to="safetensors", config=SMALL)
    assert_same_state(load_file(report.path), {"": w, "state": w + 1})
    sync.save(w, tmp_path / "bare", config=SMALL)
    report = sync.convert(tmp_path / "bare", tmp_path / "b", to="safetensors", config=SMALL)
    assert_same_state(load_file(report.path), {"state": w})


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("to", ["dcp", "hf", "safetensors"])
def test_a_conversion_keeps_no_lock(to: Any, tmp_path: Path) -> None:
    """Nor a file, nor the number of one: children that are forked later close what is locked."""
    sync.save({"w": torch.ones(3)}, tmp_path / "x", config=SMALL)
    if to == "hf":
        (tmp_path / "y").mkdir()
    for _ in range(2):  # and so where its files are there already
        sync.convert(tmp_path / "x", tmp_path / "y", to=to, overwrite=True)
        assert not locks._locked


@pytest.mark.parametrize(
    ("state", "strip", "names"),
    [
        ({"model": {"w": 1.0}, "model.scale": 2.0}, "model", {"w", "scale"}),
        ({"a": {"b": {"w": 1.0}}, "a.b": {"v": 2.0}}, "a.b", {"w", "v"}),
        ({"module": 1.0, "module.w": 2.0}, "module", {"w"}),
        ({"a": {"b": {1: 1.0, "1": 2.0}}}, "a.b", {1, "1"}),
        ({"a": {"b": {"w": 1.0}}, "a.b.w": 2.0}, "a.b", None),
        ({"a": {"b": 3}, "a.b.w": 2.0}, "a.b", None),
    ],
)
def test_all_that_is_below_a_name_is_taken(
    tmp_path: Path, state: Any, strip: str, names: set[Any] | None
) -> None:
    """Under the name itself and under keys that begin with it, as `select=` takes it."""

    def made(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: made(item) for key, item in value.items()}
        return torch.full((2,), value) if isinstance(value, float) else value

    sync.save(made(state), tmp_path / "a", config=SMALL)
    if names is None:
        with pytest.raises(FormatError, match=r"two values are called 'a\.b"):
            sync.convert(tmp_path / "a", tmp_path / "b", to="ckptio", strip=strip, config=SMALL)
        return
    sync.convert(tmp_path / "a", tmp_path / "b", to="ckptio", strip=strip, config=SMALL)
    assert set(sync.load(tmp_path / "b", config=SMALL)) == names


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """Where a file has to have them: `os.fsdecode` makes such names."""
    state = {os.fsdecode(b"caf\xe9"): torch.ones(2), "ok": torch.ones(1)}
    sync.save(state, tmp_path / "a", config=SMALL)
    (tmp_path / "h").mkdir()
    sync.convert(tmp_path / "a", tmp_path / "d", to="dcp", config=SMALL)
    ways: Any = (("a", "h", "hf"), ("a", "s.safetensors", "safetensors"), ("d", "o", "ckptio"))
    for source, target, to in ways:
        with pytest.raises(ConfigError, match=r"'caf\\udce9' is no Unicode text"):
            sync.convert(tmp_path / source, tmp_path / target, to=to, config=SMALL)
        paths = tmp_path / source, tmp_path / ("b" + target)
        sync.convert(*paths, to=to, select="ok", config=SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ("a", "d", "h", "bh", "bs.safetensors", "bo")
    )
    assert not list((tmp_path / "h").iterdir())


@pytest.mark.parametrize("kind", ["ours", "hf", "file"])
def test_a_conversion_does_not_replace_what_it_reads(tmp_path: Path, kind: str) -> None:
    """Not even with `overwrite`: a file of the source, or the folder that the source is in."""
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    source = tmp_path / "c"
    sync.save(state, tmp_path / "ours", config=SMALL)
    if kind == "ours":
        source = tmp_path / "ours"
    else:
        sync.convert(tmp_path / "ours", source, to="hf", max_shard_nbytes=16)
    part = min(source.glob("*.safetensors"))
    read, target = (part, source) if kind == "file" else (source, part)
    to: Format = "hf" if kind == "file" else "safetensors"
    with pytest.raises(ConfigError, match="give another path"):
        sync.convert(read, target, to=to, select="a", overwrite=True)
    assert_same_state(sync.load(source), state)


def test_a_file_up_from_a_link_is_written_where_it_goes(tmp_path: Path) -> None:
    """Also aside, until it is whole: the directory that the link is in has no part in it."""
    sync.save({"a": torch.ones(4)}, tmp_path / "c", config=SMALL)
    (tmp_path / "far" / "sub").mkdir(parents=True)
    near = tmp_path / "near"
    near.mkdir()
    (near / "link").symlink_to(tmp_path / "far" / "sub")
    (near / ".w.partial").mkdir()  # whatever has the name there is in nobody's way
    sync.convert(tmp_path / "c", near / "link" / ".." / "w", to="safetensors", config=SMALL)
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["sub", "w"]


@pytest.mark.parametrize("to", ["ckptio", "dcp"])
def test_bytes_of_arrays_are_counted_as_they_are_stored(to: Any, tmp_path: Path) -> None:
    """Torch does not know every type of numpy's."""
    state = {
        "far": np.arange(6, dtype=">f8"),
        "texts": np.array(["one", "two"]),
        "w": torch.ones(3),
    }
    sync.save(state, tmp_path / "source", config=SMALL)
    report = sync.convert(tmp_path / "source", tmp_path / "target", to=to, config=SMALL)
    assert (report.num_tensors, report.nbytes) == (3, 6 * 8 + 2 * 12 + 3 * 4)


def test_views_that_lie_apart_and_between_each_other_are_told_apart(tmp_path: Path) -> None:
    """Rows of a matrix, the columns of two, and rows again."""
    state: dict[str, torch.Tensor] = {}
    for number, has_rows in enumerate((True, False, False, True)):
        matrix = torch.arange(60.0).reshape(20, 3) + 100 * number
        columns = [matrix[:, column] for column in range(3)]
        views = [matrix, matrix[3:7]] if has_rows else columns
        state |= {f"{number}.{i}": view for i, view in enumerate(views)}
    sync.save(state, tmp_path / "source", config=SMALL)
    sync.convert(tmp_path / "source", tmp_path / "x", to="safetensors", config=SMALL)
    found = load_file(tmp_path / "x")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], view) for name, view in state.items())
