"""Several processes, and jobs of several ranks, at the same paths, killed at random; see `soak`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.programs import run_program

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "import sys\nfrom tests.stress.{} import main\nsys.exit(main())"
ALONE = {"_save", "_copy", "_abort", "_cancel", "_keep", "_load", "_select", "_verify", "_finish"}
TOGETHER = {"_save", "_copy", "_abort", "_load"}


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("program", "num_kills", "kinds"), [("soak", 60, ALONE), ("soak_ranks", 15, TOGETHER)]
)
def test_what_is_acknowledged_stays_whoever_is_killed(
    tmp_path: Path, seed: int, program: str, num_kills: int, kinds: set[str]
) -> None:
    """No load mixes two saves or goes back, and only errors of ckptio's are raised."""
    done = run_program(PROGRAM.format(program), tmp_path, seed, num_kills)
    assert kinds <= json.loads(done.stdout).keys()
