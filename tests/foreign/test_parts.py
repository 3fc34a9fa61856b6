"""Files in which a rank has its parts of tensors, as DCP's writer of safetensors makes them."""

from __future__ import annotations

import inspect
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckptio import sync
from ckptio.errors import FormatError
from ckptio.foreign.parts import SHARD
from tests.foreign.rig import assert_same_state, quiet, save_dcp
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path

_INDEX = "model.safetensors.index.json"
_ONE, _TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
_SHARD = "shard-00002-model-00001-of-00002.safetensors"
_WRITER = getattr(dcp, "HuggingFaceStorageWriter", None)


def half() -> torch.Tensor:
    """One rank's part of `w`."""
    return torch.arange(16.0).reshape(4, 4)


def save_part(path: Path, state: dict[str, torch.Tensor], **places: Any) -> Path:
    """Write a file as a rank does, with the places of its tensors: `[0, 0]`, or as is given."""
    whole = {name: {"saved_offsets": [0] * value.dim()} for name, value in state.items()}
    note = json.dumps({**whole, **places})
    metadata = {"DCP_SHARDING_INFO": note, "DCP_VERSION": "1.0", "format": "pt"}
    save_file(state, path, metadata=metadata)
    return path


def save_folder(folder: Path, total_nbytes: Any = 144, **places: Any) -> Path:
    """Write what is left where two ranks wrote to the same names: an index, and a half of `w`.

    Args:
        folder: Where to.
        total_nbytes: What the index counts: both halves of `w`, and `b`.
        places: See `save_part`.
    """
    folder.mkdir()
    save_part(folder / _ONE, {"w": half()}, **places)
    save_part(folder / _TWO, {"b": torch.ones(4)})
    index = {"metadata": {"total_size": total_nbytes}, "weight_map": {"w": _ONE, "b": _TWO}}
    (folder / _INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("by", ["folder", "index", "single"])
def test_a_part_in_a_folder_is_no_tensor(tmp_path: Path, by: str) -> None:
    """Nobody expects it there; what else is there loads, and so does the file by its own path."""
    folder = path = save_folder(tmp_path / "hub", 80, w={"saved_offsets": [4, 0]})
    if by == "index":
        path = folder / _INDEX
    if by == "single":
        places = {"w": {"saved_offsets": [4, 0]}}
        save_part(folder / "model.safetensors", {"w": half(), "b": torch.ones(4)}, **places)
    said = r"safetensors' has only one rank's part of tensors: 'w' \(begins at \[4, 0\]\);.*select="
    with sync.Engine(SMALL) as engine:
        for _ in range(2):  # also by the manifest that the engine keeps
            for select in (None, "w"):
                with pytest.raises(FormatError, match=said):
                    engine.load(path, select=select)
            with pytest.raises(FormatError, match=said):
                engine.load_slice(path, "w", slice(0, 1))
            assert_same_state(engine.load(path, select="b"), {"b": torch.ones(4)})
        assert {tensor.name for tensor in engine.inspect(path).tensors} == {"w", "b"}
    loaded = sync.load_with_report(path, select="b", config=SMALL)
    assert not loaded.report.notes  # what is no part has nothing to be said of it
    for to in ("ckptio", "hf", "dcp", "safetensors"):
        with pytest.raises(FormatError, match=said):
            sync.convert(path, tmp_path / f"{to}.safetensors", to=to)
    if by != "single":
        assert_same_state(sync.load(folder / _ONE, config=SMALL), {"w": half()})


def test_an_index_that_counts_the_bytes_of_all_ranks_tells_of_parts(tmp_path: Path) -> None:
    """If the first rank's file stayed, every tensor in it begins at zero."""
    folder = save_folder(tmp_path / "hub")
    said = r"may have only one rank's part of tensors \(the index counts 144 .* 80: .*\): "
    with sync.Engine(SMALL) as engine:
        for _ in range(2):
            for name in "wb":
                with pytest.raises(FormatError, match=f"{said}'{name}';"):
                    engine.load(folder, select=name)
    assert_same_state(sync.load(folder / _ONE, config=SMALL), {"w": half()})
    save_file({"w": half()}, folder / _ONE, metadata={"DCP_SHARDING_INFO": "[]"})
    with pytest.raises(FormatError, match=f"{said}'w';"):  # of a rank, too: it has a note
        sync.load(folder, config=SMALL)


@pytest.mark.parametrize("counted", [None, "144", 144.5, 80, 79, [[]], 10**30])
def test_an_index_that_counts_no_more_is_believed(tmp_path: Path, counted: Any) -> None:
    """And so is one that counts something else, or wrongly beside files of other programs."""
    folder = save_folder(tmp_path / "hub", counted)
    expected = {"w": half(), "b": torch.ones(4)}
    if counted == 10**30:
        save_file({"b": torch.ones(4)}, folder / _TWO, metadata={"format": "pt"})
    loaded = sync.load_with_report(folder, config=SMALL)
    assert_same_state(dict(loaded.state), expected)
    assert not loaded.report.notes


@pytest.mark.parametrize("metadata", ["7", "null", "[{}]", '"144"', '{"more": 144}'])
def test_an_index_need_not_count(tmp_path: Path, metadata: str) -> None:
    """Whatever stands there instead."""
    folder = save_folder(tmp_path / "hub")
    text = f'{{"metadata": {metadata}, "weight_map": {{"w": "{_ONE}", "b": "{_TWO}"}}}}'
    (folder / _INDEX).write_text(text)
    assert sync.load(folder, config=SMALL).keys() == {"w", "b"}


def test_empty_parts_are_parts(tmp_path: Path) -> None:
    """Ranks have such where there are fewer rows than ranks; several lie at the same byte."""
    folder = save_folder(tmp_path / "hub", None)
    empty = {name: torch.ones(0, 4) for name in "xyz"}
    places = {name: {"saved_offsets": [3, 0]} for name in "xy"}
    save_part(folder / _ONE, {"w": half(), **empty}, **places)
    assert sync.load(folder, select=["w", "b", "z"], config=SMALL).keys() == {"w", "b", "z"}
    for name in "xy":
        with pytest.raises(FormatError, match=rf"'{name}' \(begins at \[3, 0\]\)"):
            sync.load(folder, select=name, config=SMALL)


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("x.safetensors", {"saved_offsets": [4, 0]}, r"'w' \(begins at \[4, 0\]\); .*consolidate_"),
        (_SHARD, {"saved_offsets": [4, 0]}, r"'w' \(begins at \[4, 0\]\); .*consolidate_"),
        (
            "x.safetensors",
            {"saved_offsets": [0, 0], "global_shape": [8, 4]},
            r"'w' \(is a part of \[8, 4\]\)",
        ),
        (_SHARD, {"saved_offsets": [0, 0]}, "may be one rank's parts, as its name"),
    ],
)
def test_of_a_part_by_its_own_path_a_note_says_what_it_is(
    tmp_path: Path, name: str, place: dict[str, Any], said: str
) -> None:
    """In the report of a load, and of a conversion."""
    file = save_part(tmp_path / name, {"w": half(), "b": torch.ones(2)}, w=place)
    loaded = sync.load_with_report(file, config=SMALL)
    assert torch.equal(loaded.state["w"], half())
    for notes in (
        loaded.report.notes,
        sync.convert(file, tmp_path / "out", to="ckptio").notes,
    ):
        assert len(notes) == 1
        assert notes[0].startswith(f"{file}: ")
        assert re.search(said, notes[0])


def test_many_parts_and_other_metadata_make_two_short_notes(tmp_path: Path) -> None:
    """Each file has one of either."""
    names = [f"w{number}" for number in range(9)]
    note = {name: {"saved_offsets": [7] * 60} for name in names}
    metadata = {"DCP_SHARDING_INFO": json.dumps(note), "epoch": "3"}
    file = tmp_path / "x.safetensors"
    save_file({name: torch.ones(2) for name in names}, file, metadata=metadata)
    said, parts = sync.load_with_report(file, config=SMALL).report.notes
    assert said.endswith("its metadata is no part of this: 'epoch'")
    assert "and 4 more" in parts
    assert len(parts) < 1000 + len(str(file))


UNREADABLE = {
    "nothing": "",
    "a list": "[]",
    "a number": "7",
    "cut": '{"w": {"saved_offsets": [4',
    "no offsets": '{"w": {}}',
    "a negative offset": '{"w": {"saved_offsets": [-4, 0]}}',
    "part of an element": '{"w": {"saved_offsets": [0.5, 0]}}',
    "a large offset": f'{{"w": {{"saved_offsets": [{1 << 90}, 0]}}}}',
    "an endless offset": f'{{"w": {{"saved_offsets": [{"9" * 5000}, 0]}}}}',
    "a bad shape": '{"w": {"saved_offsets": [0, 0], "global_shape": "8"}}',
    "a deep one": '{"w": ' * 100_000,
    "a deep member": '{"w": {"saved_offsets": [0], "x": ' + "[" * 100_000,
    "half a character": '{"w\\ud800": {"saved_offsets": [4, 0]}}',
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_note_that_nobody_can_read_is_said_to_be_one(tmp_path: Path, case: str) -> None:
    """It costs nobody the tensors."""
    metadata = {"DCP_SHARDING_INFO": UNREADABLE[case]}
    folder = save_folder(tmp_path / "hub", 80)
    save_file({"w": half()}, folder / _ONE, metadata=metadata)
    for path in (folder, folder / _ONE):
        loaded = sync.load_with_report(path, config=SMALL)
        assert torch.equal(loaded.state["w"], half())
        said = f"{folder / _ONE}: its tensors may be one rank's parts: its DCP_SHARDING_INFO cannot"
        (note,) = loaded.report.notes
        assert note.startswith(said)


@pytest.mark.parametrize(
    "note",
    [
        '{"v": {"saved_offsets": [4]}}',
        '{"w": {"saved_offsets": []}}',
        '{"w": {"saved_offsets": [0, 0], "global_shape": [4, 4]}}',
        '{"w": {"saved_offsets": [0, 0, 0], "global_shape": [4, 4, 2]}}',  # as of complex numbers
        "{}",
        '{"w\\u0000": 3}',
    ],
)
def test_a_note_on_other_tensors_is_of_no_concern(tmp_path: Path, note: str) -> None:
    """Nor is one that says nothing of this one; whatever it says, there is no other error."""
    file = tmp_path / "x.safetensors"
    save_file({"w": half()}, file, metadata={"DCP_SHARDING_INFO": note})
    loaded = sync.load_with_report(file, config=SMALL)
    assert torch.equal(loaded.state["w"], half())
    assert bool(loaded.report.notes) == ("u0000" in note)


@pytest.mark.skipif(_WRITER is None, reason="this version of torch has no such writer")
@pytest.mark.parametrize("num_files", [1, 2])
def test_what_torch_writes_whole_loads_without_a_note(tmp_path: Path, num_files: int) -> None:
    """By one rank, and consolidated: folders, and each of their files; but for a rank's own."""
    assert _WRITER is not None
    state = {"w": torch.ones(8, 4), "b": torch.ones(4)}
    numbers = {"w": 1, "b": num_files}
    has_modes = "save_distributed" in inspect.signature(_WRITER).parameters
    modes: tuple[dict[str, bool], ...] = ({},)
    if has_modes:
        modes += ({"save_distributed": True, "enable_consolidation": True},)
    for number, mode in enumerate(modes):
        folder = tmp_path / str(number)
        writer = _WRITER(str(folder), fqn_to_index_mapping=numbers, **mode)
        with quiet():
            save_dcp(folder, state, storage_writer=writer)
        loaded = sync.load_with_report(folder, config=SMALL)
        assert_same_state(dict(loaded.state), {name: state[name] for name in loaded.state})
        assert loaded.state.keys() == state.keys()
        assert not loaded.report.notes
        files = list(folder.rglob("*.safetensors"))
        assert any(SHARD.fullmatch(file.name) for file in files) == bool(mode)
        for file in files:
            notes = sync.load_with_report(file, config=SMALL).report.notes
            assert bool(notes) == bool(SHARD.fullmatch(file.name))
