from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import sync
from ckptio.__main__ import main
from ckptio.checkpointer.keeper import Keeper, Removal
from ckptio.errors import StorageError
from ckptio.storage.file_names import NOTE_PREFIX
from ckptio.testing import MemoryBackend, MemoryBucket, MemoryStore
from tests.cli.rig import NARROW, data_file, owe, run_json, run_on_terminal
from tests.rig import SMALL, names_in
from tests.test_import import modules_after

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [f"step-{step:08d}" for step in range(1, 7)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of six steps; its loss is lowest at the second."""
    with sync.Checkpointer(tmp_path / "run", config=SMALL) as ckpt:
        for step in range(1, 7):
            ckpt.save({"w": torch.zeros(100)}, step, metrics={"loss": abs(step - 2)})
    return tmp_path / "run"


def test_prune_removes_what_is_not_kept(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What one option keeps is kept; the JSON document says what became of each step."""
    (root / "step-7").mkdir()
    argv = ("prune", str(root), "--keep-last", "1", "--keep-best", "loss:min", "--pin", "4")
    code, planned = run_json(capsys, *argv, "--dry-run")
    assert code == 0
    assert names_in(root) == [*NAMES, "step-7"]
    code, document = run_json(capsys, *argv)
    assert code == 0
    assert document == {**planned, "dry_run": False}
    assert names_in(root) == ["step-00000002", "step-00000004", "step-00000006", "step-7"]
    assert document["kept"] == [{"step": step, "path": f"step-{step:08d}"} for step in (2, 4, 6)]
    assert [removed["step"] for removed in document["removed"]] == [1, 3, 5]
    assert all(removed["nbytes"] > 0 for removed in document["removed"])
    assert {removed["error"] for removed in document["removed"]} == {None}
    assert (document["unreadable"], document["error"]) == ([], None)
    assert list(document) == ["root", "dry_run", "removed", "owed", "kept", "unreadable", "error"]


def test_prune_says_what_it_would_remove(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each step, and a sum."""
    assert main(["prune", str(root), "--keep-every", "3", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[:-1]] == [
        ["would", "remove", NAMES[index]] for index in (0, 1, 3, 4)
    ]
    assert lines[-1].startswith("would remove 4 steps, ")
    assert lines[-1].endswith("; kept 2")
    code, sent = run_on_terminal(NARROW, "prune", str(root), "--keep-last", "5")
    assert code == 0
    assert "removed 1 step" in sent


def test_the_highest_step_always_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever was asked for."""
    code, document = run_json(capsys, "prune", str(root), "--keep-every", "100")
    assert code == 0
    assert [kept["step"] for kept in document["kept"]] == [6]
    assert names_in(root) == NAMES[-1:]


def test_what_cannot_be_read_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And counts for nothing."""
    (root / NAMES[5] / "manifest.json").write_bytes(b"{}")
    code, document = run_json(capsys, "prune", str(root), "--keep-last", "1")
    assert code == 0
    assert document["unreadable"] == [{"step": 6, "path": NAMES[5]}]
    assert names_in(root) == NAMES[4:]


def test_what_cannot_be_removed_is_said(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, in the document, and by the exit code."""
    (root / NAMES[0]).rename(tmp_path / "moved")
    (root / NAMES[0]).symlink_to(tmp_path / "moved")
    code = main(["prune", str(root), "--keep-last", "1"])
    assert code == 2
    assert "step-00000001 is still there" in capsys.readouterr().err
    code, document = run_json(capsys, "prune", str(root), "--keep-last", "1")
    assert code == 2
    assert "link" in document["removed"][0]["error"]
    assert names_in(root) == [NAMES[0], NAMES[5]]


def test_a_file_that_stays_of_a_step_that_went_is_said(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step is gone, and what it took is not."""
    file = data_file(root / NAMES[0])
    file.unlink()
    file.mkdir()
    code, document = run_json(capsys, "prune", str(root), "--keep-last", "5")
    assert (code, document["removed"][0]["error"], document["error"]) == (2, None, None)
    (root / NAMES[1] / "manifest.json").write_bytes(b"{}")
    assert main(["prune", str(root), "--keep-last", "5"]) == 0
    said = capsys.readouterr().err
    assert f"{NAMES[1]} cannot be read; it counts for nothing and was left alone" in said


def test_no_more_is_asked_of_a_storage_that_does_not_answer(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is behind the three that are tried at once stays, and that is an error."""
    error = StorageError("cannot remove it: no answer", path="x", code=errno.ETIMEDOUT)

    async def remove(_: Keeper, step: int, __: str) -> Removal:
        return Removal(step=step, nbytes=1, error=error)

    monkeypatch.setattr(Keeper, "remove", remove)
    code, document = run_json(capsys, "prune", str(root), "--keep-last", "1")
    assert code == 2
    assert [removal["step"] for removal in document["removed"]] == [1, 2, 3]
    assert "no answer" in document["error"]
    assert main(["prune", str(root), "--keep-last", "1"]) == 2
    captured = capsys.readouterr()
    assert "removed 0 steps" in captured.out
    assert "step-00000003 is still there: cannot remove it: no answer" in captured.err


def test_a_step_whose_copy_is_owed_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless that is asked for. The note of another save says nothing."""
    owe(root / NAMES[0], "s3://key:secret@bucket/run/1")
    (root / NAMES[1] / f"{NOTE_PREFIX}{'0' * 32}").write_bytes(b"of another save")
    note = owe(root / NAMES[2])
    note.write_bytes(b"{}")
    argv = ("prune", str(root), "--keep-last", "1")
    code, planned = run_json(capsys, *argv, "--dry-run")
    assert code == 0
    code, document = run_json(capsys, *argv)
    assert (code, document) == (0, {**planned, "dry_run": False})
    assert names_in(root) == [NAMES[0], NAMES[1], NAMES[2], NAMES[5]]
    assert names_in(root / NAMES[1]) == [f"{NOTE_PREFIX}{'0' * 32}"]  # no checkpoint any more
    assert [removed["step"] for removed in document["removed"]] == [2, 4, 5]
    assert document["owed"] == [
        {"step": 1, "path": NAMES[0], "owed_to": "s3://***@bucket/run/1"},
        {"step": 3, "path": NAMES[2], "owed_to": None},
    ]
    assert document["kept"] == [{"step": 6, "path": NAMES[5]}]
    assert main([*argv]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"left {NAMES[0]}  copy owed to s3://***@bucket/run/1",
        f"left {NAMES[2]}  copy owed",
        "removed 0 steps, 0 B; kept 1, left 2 whose copy is owed",
    ]
    code, document = run_json(capsys, *argv, "--even-owed")
    assert (code, document["owed"]) == (0, [])
    assert [removed["step"] for removed in document["removed"]] == [1, 3]
    assert names_in(root) == [NAMES[1], NAMES[5]]


@pytest.mark.parametrize(
    ("best", "kept"),
    [
        ("val:loss:min", [3]),
        ("val:loss:max", [1]),
        ("val:loss:1:max", [1]),
        ("val:loss:2:min", [2, 3]),
        ("3:min", [1]),
        ("3:1:min", [1]),
        ("3:2:max", [2, 3]),
    ],
)
def test_a_metric_may_have_a_colon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], best: str, kept: list[int]
) -> None:
    """As loggers write them: number and mode are split off the right end."""
    with sync.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"x": step}, step, metrics={"val:loss": 3 - step, "3": step})
        ckpt.save({"x": 4}, 4)  # the highest stays in any case
    argv = ("prune", str(tmp_path), "--keep-best", best, "--dry-run")
    code, document = run_json(capsys, *argv)
    assert code == 0
    assert [each["step"] for each in document["kept"]] == [*kept, 4]


def test_a_mistyped_mode_is_a_name_that_nobody_measured(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is removed by it."""
    for best in ("loss:2:mx", "loss:2m", "los", f"loss:{'9' * 5000}"):
        code, document = run_json(capsys, "prune", str(root), "--keep-best", f"{best}:min")
        assert code == 2
        assert f"no step has a metric {best!r}, but 'loss'" in document["error"]
    assert names_in(root) == NAMES


def test_the_best_has_a_direction(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The worst accuracy is not kept because nobody said that the highest one is the best."""
    for best in ("loss", "loss:2", "loss:2:", "loss:max:2"):
        code, document = run_json(capsys, "prune", str(root), "--keep-best", best)
        assert code == 2
        assert document["error"].startswith("--keep-best is METRIC:min, METRIC:max or")
    assert names_in(root) == NAMES


def test_a_pin_of_a_step_that_is_not_there_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped one would cost the step that was meant."""
    argv = ("prune", str(root), "--keep-last", "1", "--pin", "4", "--pin", "77")
    code, document = run_json(capsys, *argv)
    assert (code, document["removed"]) == (2, [])
    assert document["error"] == "there is no step 77 to pin; nothing was removed"
    assert names_in(root) == NAMES


def test_a_run_without_steps_is_pruned_by_whatever_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has not got that far yet: no name or number was mistyped, as far as is known."""
    for options in (["--keep-best", "loss:min"], ["--keep-last", "1", "--pin", "7"]):
        assert main(["prune", str(tmp_path), *options]) == 0
        assert "there are no steps of a Checkpointer in" in capsys.readouterr().out


def test_prune_that_keeps_nothing_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped command must not remove a run."""
    for argv in ([], ["--pin", "3"], ["--keep-best", "x"], ["--keep-best", "loss:0:min"]):
        code, document = run_json(capsys, "prune", str(root), *argv)
        assert code == 2
        assert document["error"]
    assert main(["prune", str(root)]) == 2
    assert not capsys.readouterr().out  # of what was kept nothing is known
    assert main(["prune", str(root), "--keep-last", "0"]) == 2
    assert names_in(root) == NAMES


def test_a_root_that_is_not_there_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mostly a mistyped one, and the disk fills. An empty one is fine; a file is none."""
    code, document = run_json(capsys, "prune", str(tmp_path / "x"), "--keep-last", "1")
    assert (code, document["error"]) == (2, "there is no such directory")
    code, document = run_json(capsys, "prune", str(tmp_path), "--keep-last", "1")
    assert (code, document["removed"]) == (0, [])
    (tmp_path / "x").write_text("a file")
    assert main(["prune", str(tmp_path / "x"), "--keep-last", "1"]) == 2
    assert main(["prune", "nobody://bucket/run", "--keep-last", "1"]) == 2


def test_prune_looks_once_at_what_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A look at each manifest and one reading of it; of what goes, a look for a copy that is owed.

    What is removed is read once more: it must be what was decided about.
    """
    bucket = MemoryBucket()
    stores = [MemoryStore(bucket)]
    monkeypatch.setattr(
        "ckptio.storage.stores.find_backend", lambda _protocol, _config: MemoryBackend(stores[-1])
    )
    with sync.Checkpointer("mem://run", config=SMALL) as ckpt:
        for step in range(1, 7):
            ckpt.save({"w": torch.zeros(100)}, step)
    sizes = []
    for last, num_gone, options in ((6, 0, ["--dry-run"]), (2, 4, ["--dry-run"]), (2, 4, [])):
        stores.append(MemoryStore(bucket))
        counts = stores[-1].counts
        argv = ("prune", "mem://run", "--keep-last", str(last), *options)
        code, document = run_json(capsys, *argv)
        assert (code, len(document["removed"])) == (0, num_gone)
        assert counts["list"] == 1
        assert counts["get"] == 6 + num_gone * (1 if options else 2)
        if options:
            assert counts["head"] == 6
        sizes.append([removed["nbytes"] for removed in document["removed"]])
    assert sizes[1] == sizes[2]
    assert min(sizes[1]) > 0


def test_what_is_saved_over_as_it_goes_stays(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was decided of the save that was there."""
    unread, (first, *_) = Keeper.unread, sorted(root.iterdir())

    async def save_over(keeper: Keeper, found: Any) -> Any:
        await asyncio.to_thread(sync.save, {"w": torch.ones(3)}, first, overwrite=True)
        return await unread(keeper, found)

    monkeypatch.setattr(Keeper, "unread", save_over)
    code, document = run_json(capsys, "prune", str(root), "--keep-last", "1")
    assert code == 2
    assert [bool(item["error"]) for item in document["removed"]] == [True, *[False] * 4]
    assert sync.load(first)["w"].eq(1).all()


def test_prune_needs_no_torch(root: Path) -> None:
    """Nor does finding what there is."""
    found = modules_after(
        "from ckptio.__main__ import main\n"
        f"assert main(['prune', {str(root)!r}, '--keep-last', '2']) == 0"
    )
    assert not {"torch", "numpy", "fsspec"} & found
