from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Any

from ckptio import sync
from ckptio.__main__ import main
from ckptio.cli import rows
from ckptio.cli.find import find_checkpoints
from ckptio.format.manifest import decode_manifest
from ckptio.runtime.core import EngineCore
from ckptio.storage.file_names import ATTEMPT_PREFIX, data_file_name
from tests.cli.rig import (
    NARROW,
    data_file,
    owe,
    run_json,
    run_on_terminal,
    save_at,
)
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_ls_shows_each_checkpoint_once_newest_first(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links neither repeat nor loop; names sort as numbers do."""
    root = ckpt.parent.parent
    save_at(root / "run" / "step-10")
    (root / "run" / "top").symlink_to("../..")
    save_at(root / "a" / "b" / "c" / "deep")
    (root / "run" / "latest").symlink_to("step-10")
    (root / "run" / "up").symlink_to("..")
    (root / "nowhere").symlink_to("gone")
    code, document = run_json(capsys, "ls", str(root))
    assert code == 0
    paths = [row["path"] for row in document["checkpoints"]]
    assert paths == ["a/b/c/deep", "run/step-10", "run/step-9"]
    _, document = run_json(capsys, "ls", "--sort=name", str(root / "run"))
    assert [row["path"] for row in document["checkpoints"]] == ["step-9", "step-10"]
    _, document = run_json(capsys, "ls", "--depth=2", str(root))
    assert len(document["checkpoints"]) == 2
    _, document = run_json(capsys, "ls", str(ckpt))
    assert [row["path"] for row in document["checkpoints"]] == ["."]


def test_a_step_that_is_committed_while_another_one_goes_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that keeps one step, there is one at any time; and what is gone has no files."""
    save_at(tmp_path / "step-1")
    looks = []

    def find(*args: Any, **options: Any) -> Any:
        found = list(find_checkpoints(*args, **options))
        looks.append(len(found))
        if len(looks) == 1:
            save_at(tmp_path / "step-2")
            shutil.rmtree(tmp_path / "step-1")
        return found

    monkeypatch.setattr(rows, "find_checkpoints", find)
    code, document = run_json(capsys, "ls", "--all", str(tmp_path))
    assert code == 0
    assert [(row["path"], row["state"]) for row in document["checkpoints"]] == [
        ("step-2", "committed")
    ]
    assert looks == [1, 1]


def test_what_is_removed_while_directories_are_listed_is_not_found(tmp_path: Path) -> None:
    """A run goes on meanwhile, and lets go of steps: that is no failure."""
    for step in (1, 2, 3):
        save_at(tmp_path / f"step-{step}")
    found = find_checkpoints(str(tmp_path), depth=1, hidden=False)
    paths = [next(found).path]
    shutil.rmtree(tmp_path / "step-2")
    paths += [item.path for item in found]
    assert paths == [str(tmp_path / "step-1"), str(tmp_path / "step-3")]


def test_ls_follows_a_link_to_what_is_elsewhere(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs are often linked to another disk."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "run").symlink_to(ckpt.parent)
    _, document = run_json(capsys, "ls", str(tmp_path / "here"))
    assert [row["path"] for row in document["checkpoints"]] == ["run/step-9"]


def test_ls_of_a_link_follows_none_that_leads_above_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else all that lies beside a run would be listed as of the run."""
    for name in ("beside", "run/step-1"):
        save_at(tmp_path / "real" / name)
    (tmp_path / "real" / "run" / "up").symlink_to("..")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "run").symlink_to("../real/run")
    _, document = run_json(capsys, "ls", str(tmp_path / "links" / "run"))
    assert [row["path"] for row in document["checkpoints"]] == ["step-1"]


def test_ls_says_which_directory_cannot_be_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And lists the others. The path of one that lies deep is too long for the system."""
    save_at(tmp_path / "a")
    deep = os.open(tmp_path, os.O_DIRECTORY)
    for _ in range(20):
        os.mkdir("n" * 250, dir_fd=deep)
        above, deep = deep, os.open("n" * 250, os.O_DIRECTORY, dir_fd=deep)
        os.close(above)
    os.close(deep)
    code, document = run_json(capsys, "ls", str(tmp_path), "--depth", "30")
    shutil.rmtree(tmp_path / ("n" * 250))
    assert code == 2
    first, last = document["checkpoints"]
    assert (first["path"], first["state"], first["error"]) == ("a", "committed", None)
    assert (last["state"], last["error"]) == ("unreadable", "File name too long")


def test_ls_asks_its_engine_once_of_all_directories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands of steps, each would take a way to the engine's loop and back."""
    for step in range(6):
        save_at(tmp_path / f"step-{step}")
    names: list[str] = []
    real = EngineCore.call_blocking

    def call(core: EngineCore, step: Any, name: str, **options: Any) -> Any:
        names.append(name)
        return real(core, step, name, **options)

    monkeypatch.setattr(EngineCore, "call_blocking", call)
    _, document = run_json(capsys, "ls", "--sort=name", str(tmp_path))
    assert [row["path"] for row in document["checkpoints"]] == [f"step-{i}" for i in range(6)]
    assert names == ["list"]


def test_ls_as_json_has_stable_keys(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the help says."""
    code, document = run_json(capsys, "ls", str(ckpt.parent))
    manifest = decode_manifest((ckpt / "manifest.json").read_bytes())
    assert code == 0
    assert document == {
        "root": str(ckpt.parent),
        "error": None,
        "checkpoints": [
            {
                "path": "step-9",
                "state": "committed",
                "committed": manifest.created,
                "nbytes": data_file(ckpt).stat().st_size,
                "num_files": 1,
                "num_tensors": 3,
                "format": 2,
                "writer": manifest.writer,
                "save_id": manifest.save_id,
                "metrics": {},
                "owed": False,
                "owed_to": None,
                "error": None,
            }
        ],
    }


def test_ls_shows_metrics_where_there_are_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that the best step is seen; JSON has no nan, so that is text there."""
    with sync.Checkpointer(tmp_path, config=SMALL) as ckpt:
        ckpt.save({"w": 1}, 1, metrics={"loss": 1.23456789, "acc\x1b": float("nan")})
        ckpt.save({"w": 1}, 2)
    _, document = run_json(capsys, "ls", "--sort=name", str(tmp_path))
    first, second = (row["metrics"] for row in document["checkpoints"])
    assert (first, second) == ({"loss": 1.23456789, "acc\x1b": "nan"}, {})
    assert main(["ls", "--sort=name", str(tmp_path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("FORMAT  METRICS")
    assert [line.endswith(r"acc\x1b=nan loss=1.23457") for line in lines] == [True, False]
    assert lines[1].endswith(" -")
    _, sent = run_on_terminal(NARROW, "ls", str(tmp_path))
    assert "loss=1.23457" in sent


def test_ls_says_which_copies_are_owed(ckpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where to, if the note can be read; nothing that would be a secret, or move the cursor."""
    save_at(ckpt.parent / "step-8")
    owe(ckpt, "s3://key:secret@bucket/\x1b[2J")
    owe(save_at(ckpt.parent / "step-7")).write_bytes(b"[")
    code, document = run_json(capsys, "ls", "--sort=name", str(ckpt.parent))
    assert code == 0
    assert [(row["owed"], row["owed_to"]) for row in document["checkpoints"]] == [
        (True, None),
        (False, None),
        (True, "s3://***@bucket/\x1b[2J"),
    ]
    assert main(["ls", "--sort=name", str(ckpt.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("FORMAT  COPY OWED TO")
    assert [line.split()[-1] for line in lines[1:]] == ["?", "-", "s3://***@bucket/\\x1b[2J"]
    _, sent = run_on_terminal(NARROW, "ls", str(ckpt.parent))
    assert "copy owed to s3://***@bucket/\\x1b[2J" in sent.replace("\n", " ").replace("  ", " ")


def test_ls_shows_what_has_no_commit_only_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a killed save has left; nothing of it is touched."""
    left = tmp_path / "step-1"
    left.mkdir()
    (left / (ATTEMPT_PREFIX + "0" * 32)).touch()
    (left / data_file_name("0" * 32, 0, 0)).write_bytes(b"x" * 100)
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "1 without a commit; --all shows them" in shown.err
    assert main(["ls", "--all", str(tmp_path)]) == 0
    assert re.search(r"^step-1  no commit +100 B +2 +- +-$", capsys.readouterr().out, re.MULTILINE)
    assert len(list(left.iterdir())) == 2


def test_ls_looks_into_hidden_directories_only_if_asked(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lies there was put away."""
    save_at(ckpt.parent / ".old" / "step-8")
    for options, paths in ([], ["step-9"]), (["--all"], [".old/step-8", "step-9"]):
        _, document = run_json(capsys, "ls", str(ckpt.parent), "--sort", "name", *options)
        assert [row["path"] for row in document["checkpoints"]] == paths


def test_ls_tells_damage_from_another_programs_manifest(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Web pages have a `manifest.json`, too. A damaged one of ours is damage."""
    root = ckpt.parent
    (root / "web").mkdir()
    (root / "web" / "manifest.json").write_text('{"name": "site"}')
    (root / ".hidden").mkdir()
    (root / ".hidden" / "manifest.json").write_text("{}")
    (root / "linked").mkdir()
    (root / "linked" / "manifest.json").symlink_to(root / "web" / "manifest.json")
    assert main(["ls", str(root)]) == 0
    assert "web" not in (out := capsys.readouterr().out)
    assert "linked" not in out
    os.truncate(ckpt / "manifest.json", 0)
    code, document = run_json(capsys, "ls", str(root))
    assert code == 1
    assert [(row["path"], row["state"]) for row in document["checkpoints"]] == [
        ("step-9", "damaged")
    ]
    assert "cut short" in document["checkpoints"][0]["error"]


def test_ls_of_nothing_is_fine_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty list is an answer."""
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no checkpoints of ckptio here" in shown.err


def test_ls_of_a_manifest_that_is_no_file_is_2(
    ckpt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link or a FIFO is refused, and never waited for."""
    (ckpt / "manifest.json").unlink()
    os.mkfifo(ckpt / "manifest.json")
    code, document = run_json(capsys, "ls", str(ckpt))
    assert code == 2
    assert document["checkpoints"][0]["state"] == "unreadable"
