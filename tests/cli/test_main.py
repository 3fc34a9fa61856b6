from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ckptio import sync
from ckptio.__main__ import main
from tests.cli.rig import (
    data_file,
    flip,
    run,
    run_on_terminal,
    save_at,
)

if TYPE_CHECKING:
    from pathlib import Path

_BODY = "import sys; from ckptio.__main__ import main; code = main(sys.argv[1:]); "


def test_fine_is_0_damage_is_1_and_nothing_to_read_is_2(ckpt: Path, tmp_path: Path) -> None:
    """Damage outranks what is missing."""
    bad = save_at(tmp_path / "bad")
    flip(data_file(bad), 5000)
    assert run("verify", str(ckpt)).returncode == 0
    assert run("verify", str(ckpt), str(bad)).returncode == 1
    assert run("verify", str(ckpt), str(tmp_path / "nowhere")).returncode == 2
    assert run("verify", str(tmp_path / "nowhere"), str(bad)).returncode == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["ls", "--colour"],
        ["ls", "--sort", "size"],
        ["ls", "--depth", "-1"],
        ["ls", "/no/such/directory"],
        ["show"],
        ["show", "/no/such/directory"],
        ["show", ""],
        ["show", "nobody://bucket/step"],
        ["verify"],
        ["frobnicate"],
    ],
)
def test_wrong_usage_is_2_with_a_word_on_stderr(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown commands and options, bad values, paths that are none."""
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.err.strip()
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    "argv", [["verify"], ["ls", "--colour"], ["ls", "--sort", "size"], ["ls", "a", "b"]]
)
def test_wrong_usage_is_a_document_where_one_is_waited_for(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what is wrong, and so does stderr; without --json nothing is on stdout."""
    assert main([*argv, "--json"]) == 2
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert list(document) == ["error"]
    assert document["error"] in " ".join(shown.err.split())
    assert main(argv) == 2
    assert not capsys.readouterr().out


def test_the_list_of_commands_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a line of its own, even in a narrow terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("--help").stdout.partition("Commands:")[2].splitlines()[1:]
    assert [line.split()[0] for line in lines] == [
        *("ls", "show", "verify", "diff", "convert", "prune", "doctor")
    ]
    assert not [line for line in lines if "..." in line]


@pytest.mark.parametrize("command", ["ls", "show", "verify", "--help", "--version"])
def test_no_command_imports_torch(command: str, ckpt: Path) -> None:
    """Not even through numpy or a state: a command answers in a fraction of torch's import."""
    code = _BODY + "assert 'torch' not in sys.modules, 'torch'; sys.exit(code)"
    argv = [command] if command.startswith("-") else [command, str(ckpt)]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("command", ["ls", "show"])
def test_keys_that_are_torchs_are_named_without_it(command: str, tmp_path: Path) -> None:
    """As a load and `select=` name them."""
    keys = [torch.float32, torch.device("cuda:1"), torch.Size([2, 3]), np.int64(7), np.float32(0.1)]
    path = save_at(tmp_path / "words", {"by": {key: torch.zeros(2) for key in keys}, "in": {*keys}})
    code = _BODY + "assert 'torch' not in sys.modules, 'torch'; sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", code, command, str(path)],
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    if command == "show":
        for name in ("torch.float32", "cuda:1", "(2, 3)", "7", "0.1"):
            assert f"{name} " in done.stdout
            assert list(sync.load(path, select=f"by.{name}")) == ["by"]


def test_help_imports_no_engine() -> None:
    """`--help` is the command line's parser and nothing else."""
    code = _BODY + "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", code, "ls", "--help"], capture_output=True, text=True, check=False
    )
    loaded = set(done.stderr.split())
    assert done.returncode == 0
    assert "JSON" in done.stdout
    assert loaded & {"ckptio.sync", "msgspec", "asyncio", "numpy"} == set()


def test_without_the_extra_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither typer nor rich is a dependency of the package itself."""
    monkeypatch.setattr("ckptio.__main__.find_spec", lambda name: None if name == "rich" else name)
    assert main(["ls"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "pip install 'ckptio[cli]'" in shown.err


def test_a_bug_does_not_look_like_damage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception nobody expected is 3, where Python would say 1."""

    def fail(*_: object, **__: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("ckptio.cli.verify.run", fail)
    assert main(["verify", "x"]) == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_an_interrupt_does_not_look_like_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 130, as shells say of SIGINT."""

    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptio.cli.verify.run", interrupt)
    assert main(["verify", "x"]) == 130


def test_an_interrupt_before_a_command_begins_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command imports takes a while."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptio.__main__._run", interrupt)
    assert main(["ls"]) == 130


def test_no_command_shows_who_may_open_a_url(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nowhere: a log has the standard output, too, and a terminal the titles of what is done."""
    url, out = "s3://user:hun@ter2@bucket/x", str(tmp_path / "x")
    prune = ["prune", url, "--keep-last=1"]
    convert = ["convert", url, out, "--to=ckptio"]
    for argv in (["verify", url], ["show", url], ["ls", url], prune, convert, ["diff", url, url]):
        for more in ([], ["--json"]):
            assert main([*argv, *more]) == 2
            sent = capsys.readouterr()
            assert "ter2" not in sent.out + sent.err
            assert "must not hold a password" in sent.err
    for argv in (["verify", url], convert):
        code, shown = run_on_terminal(80, *argv)
        assert code == 2
        assert "ter2" not in shown
        assert "s3://***@bucket/x" in shown


def test_a_pipe_gets_no_colour_no_progress_and_nothing_cut(tmp_path: Path) -> None:
    """Whatever the terminal's variables say of its width."""
    name = "x" * 300
    path = save_at(tmp_path / "c", {name: torch.ones(3)})
    done = run("show", str(path), env={**os.environ, "COLUMNS": "40", "TERM": "xterm"})
    assert f"{name}  float32 [3]  12 B  #0" in done.stdout.split("\n")
    assert done.stderr == ""
    flip(data_file(path), 4096)
    done = run("verify", str(path), env={**os.environ, "COLUMNS": "40", "TERM": "xterm"})
    assert name in done.stdout
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("argv", [["show"], ["verify"], ["show", "--json"], ["--help"]])
def test_a_reader_that_goes_away_is_no_error(argv: list[str], ckpt: Path) -> None:
    """The command keeps quiet, and its exit code."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    paths = [] if argv == ["--help"] else [str(ckpt)]
    done = subprocess.run(
        [sys.executable, "-m", "ckptio", *argv, *paths],
        stdout=write_end,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_result_that_cannot_be_written_is_2(ckpt: Path) -> None:
    """A full disk is not success."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ckptio", "show", str(ckpt)],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 2
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


def test_no_output_at_all_keeps_the_exit_code(ckpt: Path) -> None:
    """`ckptio verify ... >&- 2>&-` in a cron job."""
    flip(data_file(ckpt), 5000)
    command = f"exec {sys.executable} -m ckptio verify {ckpt} >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 1  # noqa: S607
