"""The README's tour runs as it stands there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest  # noqa: TC002  # its fixtures are looked up at run time

README = Path(__file__).parent.parent / "README.md"


def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block under "Tour", in order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    tour = README.read_text().partition("## Tour")[2]
    blocks = re.findall(r"^```python\n(.*?)^```", tour, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 9
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    for block in blocks:
        code = compile(block, str(README), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102  # our own README


def test_the_test_command_is_what_ci_runs() -> None:
    """CI runs the command that the README gives."""
    command = "python -m pip install nox && nox -s tests"
    assert command in README.read_text()
    assert command in (README.parent / ".ci" / "run").read_text()
