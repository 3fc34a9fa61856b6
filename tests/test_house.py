"""What the repository holds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
NAMES = {
    "ckptio", "tests", "bench", "pyproject.toml", "noxfile.py", "README.md", "LICENSE",
    "CHANGELOG.md",
}  # fmt: skip
MAX_LINES = 399


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.skipif(not (TOP / ".git").exists(), reason="this is no checkout of git's")
def test_the_top_level_holds_what_belongs_there() -> None:
    """Nothing that a trial run has left was committed."""
    command = ["git", "-c", f"safe.directory={TOP}", "-C", str(TOP), "ls-files"]
    tracked = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    top = {line.partition("/")[0] for line in tracked.splitlines()}
    assert {name for name in top if not name.startswith(".")} == NAMES


def test_modules_stay_short() -> None:
    """One that has grown past what is read at once is two."""
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for name in ("ckptio", "bench")
        for path in (TOP / name).rglob("*.py")
    }
    assert lengths
    assert {str(path) for path, length in lengths.items() if length > MAX_LINES} == set()
