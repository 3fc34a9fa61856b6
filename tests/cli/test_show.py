from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch

import ckptio
from ckptio import PerRank, sync
from ckptio.__main__ import main
from ckptio.cli.text import format_nbytes
from ckptio.format.manifest import FORMAT_VERSION, Chunk, TensorEntry, decode_manifest
from tests.cli.rig import (
    data_file,
    flip,
    make_state,
    owe,
    rewrite,
    run_json,
    save_at,
)
from tests.manifests import encode_tensors
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path


def test_show_as_json_says_where_every_byte_is(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ties and views name who has the bytes; values are as the manifest has them."""
    code, document = run_json(capsys, "show", str(ckpt))
    entries = {entry["name"]: entry for entry in document["entries"]}
    weight = entries["model.embed.weight"]
    assert code == 0
    assert (document["num_tensors"], document["nbytes"]) == (3, 64 * 64 * 4 + 2 * 32)
    assert (document["format"], document["writer"]) == (FORMAT_VERSION, ckptio.__version__)
    assert document["save_id"] in document["files"][0]["name"]
    assert document["files"][0]["name"] == data_file(ckpt).name
    (chunk,) = weight["chunks"]
    stored = (ckpt / chunk["file"]).read_bytes()[chunk["start"] : chunk["stop"]]
    assert stored == make_state()["model"]["embed.weight"].numpy().tobytes()
    assert chunk["local_shape"] == weight["shape"] == [64, 64]
    assert chunk["global_offset"] == [0, 0]
    assert entries["model.head.weight"]["tied_to"] == "model.embed.weight"
    assert not entries["model.head.weight"]["is_view"]
    assert entries["model.rows"]["is_view"]
    assert entries["model.rows"]["shape"] == [2, 64]
    assert entries["model.rows"]["nbytes"] == 2 * 64 * 4
    assert entries["epoch"]["value"] == 3
    assert entries["nan"]["value"] == {"~": "float", "v": "7ff8000000000000"}
    assert set(weight) == set(entries["epoch"])
    assert (weight["value"], entries["epoch"]["chunks"]) == (None, [])
    assert list(entries)[:3] == ["model.embed.weight", "model.blocks.0.bias", "model.blocks.1.bias"]


def test_show_says_that_a_copy_is_owed(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And where to, without what stands before the host."""
    _, document = run_json(capsys, "show", str(ckpt))
    assert (document["owed"], document["owed_to"]) == (False, None)
    note = owe(ckpt, "s3://key:secret@bucket/run")
    _, document = run_json(capsys, "show", str(ckpt))
    assert (document["owed"], document["owed_to"]) == (True, "s3://***@bucket/run")
    assert main(["show", str(ckpt)]) == 0
    assert "\ncopy owed to s3://***@bucket/run\n" in capsys.readouterr().out
    note.write_bytes(b"")
    assert main(["show", str(ckpt)]) == 0
    assert "\ncopy owed\n" in capsys.readouterr().out


def test_show_has_the_metrics_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing where there are none."""
    with sync.Checkpointer(tmp_path, config=SMALL) as ckpt:
        ckpt.save({"w": 1}, 1, metrics={"loss": 0.5})
        path = ckpt.path(1)
    assert run_json(capsys, "show", path)[1]["metrics"] == {"loss": 0.5}
    assert main(["show", path]) == 0
    assert "\nloss=0.5\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("select", "names"),
    [
        (["*.bias"], ["model.blocks.0.bias", "model.blocks.1.bias"]),
        (["model.blocks.1"], ["model.blocks.1.bias"]),
        (["epoch", "*head*"], ["model.head.weight", "epoch"]),
        (["*.betas.1"], ["optimizer.groups.0.betas"]),
    ],
)
def test_show_selects_as_load_does(
    select: list[str], names: list[str], ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By glob or dotted prefix; totals are those of what is selected."""
    options = [f"--select={pattern}" for pattern in select]
    code, document = run_json(capsys, "show", *options, str(ckpt))
    assert code == 0
    assert [entry["name"] for entry in document["entries"]] == names
    assert document["num_tensors"] == len({n for n in names if "bias" in n or "head" in n})


def test_show_has_the_containers_of_what_is_selected(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once each, and no others."""
    assert main(["show", str(ckpt), "--select", "model.blocks", "--select", "epoch"]) == 0
    tree = capsys.readouterr().out.split("\n\n")[1]
    labels = ["model", "blocks", "0", "bias", "1", "bias", "epoch"]
    assert [line.split()[0] for line in tree.splitlines()] == labels


def test_a_tie_is_to_a_place_whatever_that_is_stored_as(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two places of one name, the second is stored under another."""
    tied = torch.ones(3)
    path = save_at(tmp_path / "c", {"a": {"b": torch.zeros(3)}, "a.b": tied, "c": tied})
    _, document = run_json(capsys, "show", str(path))
    last = document["entries"][-1]
    assert (last["name"], last["stored_as"], last["tied_to"]) == ("c", "a.b~2", "a.b")


def test_show_of_a_name_that_is_not_there_is_wrong_usage(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with diff and convert; the document says it, too."""
    code, document = run_json(capsys, "show", "--select=nothing", "--select=no*", str(ckpt))
    assert (code, document["entries"]) == (2, [])
    assert document["error"] == "no name matches nothing no*"
    assert main(["show", "--select=nothing", str(ckpt)]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert "no name matches nothing" in shown.err


def test_show_of_what_is_missing_or_damaged_is_a_document_too(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same keys."""
    _, whole = run_json(capsys, "show", str(ckpt))
    code, missing = run_json(capsys, "show", str(ckpt / "nowhere"))
    assert (code, missing["state"]) == (2, "missing")
    flip(ckpt / "manifest.json", 50)
    code, damaged = run_json(capsys, "show", str(ckpt))
    assert (code, damaged["state"]) == (1, "damaged")
    assert set(whole) == set(missing) == set(damaged)


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (torch.ones(2), "state  float32 [2]  8 B  #0"),
        (7, "state  7"),
        ({"": {"": 1}}, '  ""  1'),
        ({("a", 1): torch.ones(2)}, "('a', 1)  float32 [2]  8 B  #0"),
        ({}, "state  {}"),
    ],
)
def test_show_of_odd_states(
    state: Any, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state need not be a dict, nor a key a word."""
    assert main(["show", str(save_at(tmp_path / "c", state))]) == 0
    assert line in capsys.readouterr().out.split("\n")


def test_show_leaves_out_a_rank_that_had_no_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is not the same as `None`."""
    path = save_at(tmp_path / "c", {"x": 0})
    values = [3, {"~": "absent"}, None]
    rewrite(path, tree=json.dumps({"x": {"~": "ranks", "v": values}}).encode())
    code, document = run_json(capsys, "show", str(path))
    assert code == 0
    shown = {entry["name"]: entry["value"] for entry in document["entries"]}
    assert shown == {"x~rank0": 3, "x~rank2": None}


def test_show_names_the_files_with_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind the one that has the tensor."""
    path = save_at(tmp_path / "c", {"a": torch.ones(100)})
    (file,) = decode_manifest((path / "manifest.json").read_bytes()).files
    files = [(f"{i}-{file.name}", file.nbytes, file.checksums()) for i in range(2)]
    start = file.nbytes - 400
    tensor = TensorEntry("a", "float32", (100,), (Chunk(0, start, copies=((1, start),)),))
    rewrite(path, files=files, tensors=encode_tensors([tensor]))
    code, document = run_json(capsys, "show", str(path))
    assert code == 0
    (entry,) = document["entries"]
    (chunk,) = entry["chunks"]
    assert chunk["file"] == files[0][0]
    assert chunk["copies"] == [{"file": files[1][0], "start": start}]
    assert main(["show", str(path)]) == 0
    text = capsys.readouterr().out
    assert "#0 +#1" in text
    assert all(name in text for name, _, _ in files)
    assert "in 2 files" in text


def test_show_of_another_programs_checkpoint_has_no_format_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What wrote it stands in the first line instead."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors.torch.save({"a": torch.ones(3)}))
    code, document = run_json(capsys, "show", str(path))
    assert code == 0
    assert (document["format"], document["save_id"]) == (None, None)
    assert document["writer"] == "safetensors"
    assert main(["show", str(path)]) == 0
    about = capsys.readouterr().out.splitlines()[1]
    assert about.endswith("  safetensors")
    assert "format" not in about


def test_64000_tensors_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each."""
    path = save_at(tmp_path / "c", {"w": torch.zeros(1)})
    names = [f"layers.{i}.weight" for i in range(64_000)]
    tensors = [TensorEntry(name, "float32", (0,), ()) for name in names]
    tree = json.dumps({name: {"~": i} for i, name in enumerate(names)})
    chunks = encode_tensors(tensors).replace(b",[]]", b",[[0,0]]]")
    rewrite(path, tensors=chunks, tree=tree.encode())
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out.count("float32 [0]") == 64_000


def test_show_goes_as_deep_as_a_load_in_a_value_of_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Depth counts anew in one."""
    make_enum: Any = enum.Enum
    value = make_enum("E", {"A": 1})["A"]
    for number in range(99):
        value = make_enum(f"E{number}", {"A": [value]})["A"]
    state = make_enum("Root", {"A": {"a": PerRank(value)}})["A"]
    sync.save(state, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", config=SMALL)
    code, _ = run_json(capsys, "show", str(tmp_path / "c"))
    assert code == 0


def test_a_tie_to_a_key_that_is_empty_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not the whole state."""
    tied = torch.ones(2)
    path = save_at(tmp_path / "c", {"": tied, "a": tied})
    _, document = run_json(capsys, "show", str(path))
    assert [entry["tied_to"] for entry in document["entries"]] == [None, ""]
    assert main(["show", str(path)]) == 0
    assert 'a   float32 [2]    -  = ""' in capsys.readouterr().out.splitlines()


def test_show_has_a_line_for_each_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A view before what it is a part of, an array as numpy has it, what an enum holds."""
    make_enum: Any = enum.Enum
    whole, tied = torch.zeros(4, 2), torch.ones(3)
    state = {
        "rows": whole[:2],
        "w": whole,
        "again": whole,
        "m": {"a": {"b": torch.zeros(3)}, "a.b": tied, "c": tied},
        "array": np.ones(3, ">f4"),
        "held": make_enum("Held", {"A": torch.ones(2)})["A"],
        "n": 1,
    }
    path = save_at(tmp_path / "c", state)
    assert main(["show", str(path)]) == 0
    head, tree, files, totals = capsys.readouterr().out.split("\n\n")
    save_id = decode_manifest((path / "manifest.json").read_bytes()).save_id
    about = f"Z  format {FORMAT_VERSION}  ckptio {ckptio.__version__}  save {save_id}"
    assert head.startswith(f"{path}\n20")
    assert head.endswith(about)
    file = data_file(path)
    assert files == f"#0  {file.name}  {format_nbytes(file.stat().st_size)}"
    assert totals == "5 tensors  76 B  in 1 file\n"
    assert tree.splitlines() == [
        "rows   float32 [2, 2]     -  in w",
        "w      float32 [4, 2]  32 B  #0",
        "again  float32 [4, 2]     -  = w",
        "m",
        "  a",
        "    b  float32 [3]     12 B  #0",
        "  a.b  float32 [3]     12 B  #0",
        "  c    float32 [3]        -  = m.a.b",
        "array  numpy >f4 [3]   12 B  #0",
        "held   float32 [2]      8 B  #0",
        "n      1",
    ]


def test_show_selects_in_sequences_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is stored as a list and is none has no items with names."""
    path = save_at(tmp_path / "c", {"a": (1, [2, (3,)]), "shape": torch.Size([4, 5])})
    code, document = run_json(capsys, "show", "--select=a.1.1.0", str(path))
    assert (code, [entry["name"] for entry in document["entries"]]) == (0, ["a"])
    assert main(["show", "--select=shape.0", str(path)]) == 2
