from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from ckptio import sync
from ckptio.__main__ import main
from tests.cli.rig import (
    data_file,
    flip,
    make_state,
    plain_lines,
    run_json,
    run_on_terminal,
    save_at,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_convert_writes_what_was_asked_for(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what it wrote, in the document and in the text."""
    target = tmp_path / "hf"
    argv = ["convert", str(ckpt), str(target), "--to", "hf", "--strip=model"]
    code, document = run_json(capsys, *argv, "--max-shard-nbytes=1000")
    assert code == 0
    assert (document["state"], document["error"]) == ("converted", None)
    assert (document["source"], document["path"]) == (str(ckpt), str(target))
    assert document["num_tensors"] == 5
    assert {file["name"] for file in document["files"]} == {file.name for file in target.iterdir()}
    assert main([*argv, "--max-shard-nbytes=1000"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"converted  {target}  5 tensors of 32.6 KiB  in ")
    assert "there already" in said.out
    assert said.err == ""


def test_convert_says_what_a_format_does_not_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, and in the document, too."""
    source = str(save_at(tmp_path / "c", {"w": torch.ones(1), "none": {}}))
    note = "none: an empty dict is not kept"
    for number, option in enumerate(("--to=dcp", "--json")):
        assert main(["convert", source, str(tmp_path / str(number)), "--to=dcp", option]) == 0
        said = capsys.readouterr()
        assert said.err == f"ckptio: {note}\n"
    assert json.loads(said.out)["notes"] == [note]


def test_convert_tells_wrong_usage_from_damage(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Something else is there (2); the source is not (2); it is damaged (1)."""
    target = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(1)}, target)
    argv = ["convert", str(ckpt), str(target), "--to=safetensors", "--drop-values"]
    code, document = run_json(capsys, *argv)
    assert code == 2
    assert document["state"] == "failed"
    assert "there is a committed checkpoint" in document["error"]
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(f"ckptio: {target}: there is")  # not the source
    assert main(["convert", str(tmp_path / "nowhere"), str(target), "--to=ckptio"]) == 2
    assert main(["convert", str(ckpt), str(target), "--to=zip"]) == 2
    flip(data_file(ckpt), 9000)
    assert run_json(capsys, *argv, "--overwrite")[0] == 1
    assert list(load_file(target)) == ["x"]


def test_a_checkpoint_that_another_format_cannot_hold_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is whole, as `verify` says: whoever throws away what is damaged is to keep it."""
    one, two = torch.ones(1), torch.zeros(1)
    twice = save_at(tmp_path / "twice", {"m": {"a.b": one, "a": {"b": two}}})
    alone = save_at(tmp_path / "alone", one)
    target = str(tmp_path / "out")
    for source, *options in (
        (twice, "--to=safetensors"),
        (twice, "--to=hf"),
        (twice, "--to=dcp"),
        (twice, "--to=ckptio", "--strip=m.a"),
        (alone, "--to=dcp"),
    ):
        code, document = run_json(capsys, "convert", str(source), target, *options)
        assert (code, document["state"]) == (2, "failed"), document
    assert main(["verify", str(twice), str(alone)]) == 0


def test_convert_says_of_which_place_an_error_is(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what is written as of what is read, also in the document."""
    (tmp_path / "file").touch()
    target = str(tmp_path / "file" / "x.safetensors")
    argv = ["convert", str(ckpt), target, "--to=safetensors", "--strip=model"]
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(f"ckptio: {target}: cannot make its directory")
    assert run_json(capsys, *argv)[1]["error"].startswith(f"{target}: cannot make its")
    argv[1] = str(tmp_path / "nowhere")
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(f"ckptio: {argv[1]}: there is nothing here")
    assert main(["convert", str(ckpt), str(tmp_path / "x"), "--to=dcp", "--dtype=float16"]) == 2
    assert capsys.readouterr().err.startswith(f"ckptio: {ckpt}: --dtype is not for")


def test_options_are_called_what_they_are_here(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not what they are called in Python."""
    main(["convert", str(ckpt), str(tmp_path / "x"), "--to=safetensors"])
    said = capsys.readouterr().err
    assert "; --strip takes" in said
    assert "--select what" in said
    assert "--drop-values the" in said
    main(["convert", str(ckpt), "s3://bucket/x", "--to=hf"])
    assert "--to hf writes to local" in capsys.readouterr().err
    main(["convert", str(ckpt), str(tmp_path / "x"), "--to=dcp", "--max-shard-nbytes=4"])
    assert "--max-shard-nbytes has no effect with --to dcp" in capsys.readouterr().err
    place = ckpt.rename(tmp_path / "select=all") / "dtype=bf16"
    place.mkdir()
    main(["convert", str(place), str(tmp_path / "y"), "--to=hf"])
    assert str(place) in capsys.readouterr().err
    main(["convert", str(place.parent), str(place / "x"), "--to=safetensors"])
    assert f"'{place.parent}' " in capsys.readouterr().err


def test_convert_fits_a_narrow_terminal(tmp_path: Path) -> None:
    """No line is wider but for what cannot be cut, and no progress is left."""
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    code, sent = run_on_terminal(
        40, "convert", str(tmp_path / "x.safetensors"), str(tmp_path / "y"), "--to=ckptio"
    )
    assert code == 0
    assert plain_lines(sent)[0] == "converted"
    assert sync.load(tmp_path / "y")["x"].item() == 1


def test_a_select_is_a_part(ckpt: Path, tmp_path: Path) -> None:
    """Values too."""
    argv = ["convert", str(ckpt), str(tmp_path / "y"), "--to=dcp", "--select=optimizer"]
    assert main(argv) == 0
    found = sync.load(tmp_path / "y")
    assert found == {"optimizer": make_state()["optimizer"]}
    save_at(tmp_path / "z", found)
    assert main(["diff", str(tmp_path / "y"), str(tmp_path / "z")]) == 0


def test_floats_are_converted(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name that a type has in torch; a wrong one is told with those that there are."""
    target = tmp_path / "x.safetensors"
    argv = ["convert", str(ckpt), str(target), "--to=safetensors", "--strip=model"]
    assert main([*argv, "--dtype=bfloat16"]) == 0
    kinds = {tensor.dtype for tensor in load_file(target).values()}
    assert torch.bfloat16 in kinds
    assert torch.float32 not in kinds
    capsys.readouterr()
    assert main([*argv, "--dtype="]) == 2  # a variable of a shell that is not set
    assert "--dtype is one of " in capsys.readouterr().err
    assert main([*argv, "--dtype=bf16"]) == 2
    said = capsys.readouterr().err
    assert "--dtype is one of " in said
    assert "bfloat16" in said
    argv[3] = "--to=dcp"
    assert main([*argv, "--dtype=bfloat16"]) == 2
    assert "--dtype is not for --to dcp" in capsys.readouterr().err
