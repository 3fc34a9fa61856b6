from __future__ import annotations

import argparse
import os
import re
import secrets
from typing import TYPE_CHECKING

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from ckptio import sync
from ckptio.__main__ import main
from ckptio.cli.text import format_nbytes
from ckptio.format.manifest import Chunk, TensorEntry, decode_manifest
from tests.cli.rig import (
    data_file,
    flip,
    rewrite,
    run_json,
    save_at,
)
from tests.manifests import block_checksums, encode_tensors
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path


def test_verify_names_tensor_file_and_offset_of_each_damage(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the text and in the document."""
    _, shown = run_json(capsys, "show", "--select=model.embed.weight", str(ckpt))
    start = shown["entries"][0]["chunks"][0]["start"]
    offset = start + 4096 + 17
    block = offset // 4096 * 4096
    flip(data_file(ckpt), offset)
    name = data_file(ckpt).name
    code, document = run_json(capsys, "verify", str(ckpt))
    (result,) = document["checkpoints"]
    (damage,) = result["damage"]
    assert code == 1
    assert set(result) == {
        *("path", "state", "save_id", "num_files", "nbytes", "damage", "error"),
    }
    assert damage["file"] == name
    assert (damage["start"], damage["stop"]) == (block, block + 4096)
    assert damage["tensors"] == ["model.embed.weight"]
    assert re.fullmatch("checksum [0-9a-f]{8} instead of [0-9a-f]{8}", damage["problem"])
    assert main(["verify", str(ckpt)]) == 1
    nbytes = format_nbytes(data_file(ckpt).stat().st_size)
    assert capsys.readouterr().out.split("\n") == [
        f"damaged  {ckpt}  {nbytes} in 1 file  1 place damaged",
        f"  {name}  bytes [{block}, {block + 4096})",
        f"    {damage['problem']}",
        "    tensor model.embed.weight",
        "",
    ]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (2, "tensors w0, w1"),
        (8, "tensors w0, w1, w2, w3, w4, w5, w6, w7"),
        (9, "tensors w0, w1, w2, w3, w4, w5, w6, w7, and 1 more"),
    ],
)
def test_verify_names_the_first_of_many_tensors(
    number: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That are in one block; the document has them all."""
    names = [f"w{i}" for i in range(number)]
    path = save_at(tmp_path / "c", {name: torch.ones(3) for name in names})
    flip(data_file(path), 4096 + 1)
    assert main(["verify", str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"    {said}"
    _, document = run_json(capsys, "verify", str(path))
    assert document["checkpoints"][0]["damage"][0]["tensors"] == names


def test_a_value_that_nobody_can_have_saved_is_damage_of_the_manifest(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A load would say so; bytes with the right checksums are not all of a checkpoint."""
    rewrite(ckpt, tensors=b"[]", tree=b'{"a":1,"b":{"~":"dict","v":[["k",1],["k",2]]}}')
    code, document = run_json(capsys, "verify", str(ckpt))
    (result,) = document["checkpoints"]
    assert (code, result["state"]) == (1, "damaged")
    assert [damage["file"] for damage in result["damage"]] == ["manifest.json"]
    assert "two equal keys in the dict at 'b'" in result["error"]


def test_verify_says_each_of_several(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, damaged in data, damaged in its manifest, not there; in the order given."""
    cut, torn = save_at(tmp_path / "cut"), save_at(tmp_path / "torn")
    data_file(cut).unlink()
    os.truncate(torn / "manifest.json", 40)
    paths = [str(ckpt), str(cut), str(torn), str(tmp_path / "nowhere")]
    code, document = run_json(capsys, "verify", *paths)
    results = document["checkpoints"]
    assert code == 1
    assert [result["path"] for result in results] == paths
    assert [result["state"] for result in results] == ["whole", "damaged", "damaged", "missing"]
    assert "no such regular file" in results[1]["damage"][0]["problem"]
    assert results[2]["damage"][0]["file"] == "manifest.json"
    assert results[3]["damage"] == []
    assert main(["verify", paths[0], paths[2]]) == 1
    lines = capsys.readouterr().out.splitlines()
    nbytes = format_nbytes(data_file(ckpt).stat().st_size)
    assert lines[:3] == [
        f"ok  {ckpt}  {nbytes} in 1 file",  # no places are damaged, and so none are counted
        f"damaged  {torn}",  # nor where there is but the manifest
        "  manifest.json",
    ]


def test_what_has_no_checksums_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing wrong with what another program wrote; there is nothing to compare."""
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(1)}, path)
    code, document = run_json(capsys, "verify", str(path))
    (result,) = document["checkpoints"]
    assert (code, result["state"], result["damage"]) == (2, "unreadable", [])
    assert "keeps no checksums" in result["error"]


def test_verify_takes_options_from_the_environment(
    ckpt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong one is wrong usage."""
    monkeypatch.setenv("CKPTIO_MAX_READS", "many")
    code, document = run_json(capsys, "verify", str(ckpt))
    assert code == 2
    assert "CKPTIO_MAX_READS" in document["error"]
    assert main(["verify", str(ckpt)]) == 2
    assert "CKPTIO_MAX_READS" in capsys.readouterr().err


def test_verify_compares_copies_when_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy that differs is damage; its checksums are right, so that it is not seen else."""
    path, state = tmp_path / "c", {"w": torch.zeros(2000), "v": torch.ones(2)}
    sync.save(state, path, config=SMALL)
    old = decode_manifest((path / "manifest.json").read_bytes())
    (first,) = old.files
    data = bytearray(data_file(path).read_bytes())
    tensor = next(tensor for tensor in old.tensors if tensor.name == "w")
    data[tensor.chunks[0].start + 4001] ^= 1
    name = first.name.replace("-00000-", "-00001-")
    (path / name).write_bytes(data)
    rewrite(
        path,
        files=[
            (first.name, first.nbytes, first.checksums(), 0),
            (name, len(data), block_checksums(memoryview(data), old.block_nbytes), 1),
        ],
        hosts=["h", "h"],
        tensors=encode_tensors(
            [
                TensorEntry(t.name, t.dtype, t.shape, (Chunk(0, t.chunks[0].start, None, None,
                ((1, t.chunks[0].start),)),))
                for t in old.tensors
            ]
        ),
    )  # fmt: skip
    assert run_json(capsys, "verify", str(path))[0] == 0
    code, document = run_json(capsys, "verify", "--copies", str(path))
    assert code == 1
    (damage,) = document["checkpoints"][0]["damage"]
    start = tensor.chunks[0].start
    assert damage == {
        "file": name,
        "start": start + 4001,
        "stop": start + 8000,
        "problem": f"other bytes than in the copy at byte {start + 4001} of {first.name!r}",
        "tensors": ["w"],
    }


def test_what_nobody_here_reads_is_not_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing says that anything is wrong with it: a cron job raises no alarm."""
    (tmp_path / "text").write_text("hello, this is no checkpoint")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"")
    torch.save({"options": argparse.Namespace(a=1)}, tmp_path / "objects.pt")
    sync.save({}, tmp_path / "c")
    for name in ("text", "model", "c/manifest.json"):
        for command in ("verify", "show"):
            code, document = run_json(capsys, command, str(tmp_path / name))
            assert (code, "damaged" in str(document)) == (2, False)
    assert main(["convert", str(tmp_path / "objects.pt"), str(tmp_path / "o"), "--to", "dcp"]) == 2
    assert "more than data" in capsys.readouterr().err


def test_a_manifest_of_another_program_is_no_damage(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path is wrong, as far as is known; not so where files of ours lie beside it."""
    data = b'{"short_name": "an app of the web"}'
    (ckpt.parent / "app").mkdir()
    (ckpt.parent / "app" / "manifest.json").write_bytes(data)
    (ckpt / "manifest.json").write_bytes(data)
    url = f"memory://{secrets.token_hex(8)}"
    fsspec.filesystem("memory").pipe_file(f"/{url.partition('://')[2]}/app/manifest.json", data)
    for path, state in ((ckpt.parent / "app", 2), (f"{url}/app", 2), (ckpt, 1)):
        code, document = run_json(capsys, "verify", str(path))
        assert code == state == run_json(capsys, "show", str(path))[0]
        said = document["checkpoints"][0]["error"]
        assert ("manifest.json is another program's" in said) == (state == 2)
    fsspec.filesystem("memory").rm(f"/{url.partition('://')[2]}", recursive=True)


def test_damage_is_damage_whatever_lies_below(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another program's manifest counts where a checkpoint's own would be, and nowhere else."""
    (ckpt / "web").mkdir()
    (ckpt / "web" / "manifest.json").write_text("{}")
    os.truncate(ckpt / "manifest.json", 9)
    model = ckpt.parent / "model"
    model.mkdir()
    (model / "model.safetensors.index.json").write_text("{")
    for path in (ckpt, model):
        code, document = run_json(capsys, "show", str(path))
        assert (code, document["state"]) == (1, "damaged")
