"""The README's tour runs as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
#: Commands of the tour, as modules: their scripts need not be on the path.
MODULES = {"ckptio": "ckptio", "torchrun": "torch.distributed.run"}


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # one process is meant
def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block under "Tour", in order: Python in one namespace, scripts by their commands."""
    monkeypatch.chdir(tmp_path)
    tour = README.read_text().partition("## Tour")[2].partition("## What to rely on")[0]
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", tour, re.DOTALL | re.MULTILINE)
    assert [language for language, _ in blocks].count("python") >= 12
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    for language, block in blocks:
        if language == "sh":
            for line in block.splitlines():
                run_command(line)
        elif script := re.match(r"# (\w+\.py)\n", block):
            Path(script[1]).write_text(block)
        else:
            code = compile(block, str(README), "exec", dont_inherit=True)
            exec(code, module.__dict__)  # noqa: S102  # our own README


def run_command(line: str) -> None:
    """Run a line of a shell block, in the directory of the tour; it must succeed."""
    command, *arguments = shlex.split(line, comments=True)
    ended = subprocess.run(
        [sys.executable, "-m", MODULES[command], *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"


def test_the_test_command_is_what_ci_runs() -> None:
    """CI runs the command that the README gives."""
    command = "python -m pip install nox && nox -s tests"
    assert command in README.read_text()
    assert command in (README.parent / ".ci" / "run").read_text()
