"""Several processes at the same paths, killed at random moments; see `soak`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.programs import run_program

if TYPE_CHECKING:
    from pathlib import Path

NUM_KILLS = 60
PROGRAM = "import sys\nfrom tests.stress.soak import main\nsys.exit(main())"


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(3))
def test_what_is_acknowledged_stays_whoever_is_killed(tmp_path: Path, seed: int) -> None:
    """No load mixes two saves or goes back, and only errors of ckptio's are raised."""
    done = run_program(PROGRAM, tmp_path, seed, NUM_KILLS)
    saves = {"_save", "_copy", "_abort", "_cancel", "_keep"}
    assert saves | {"_load", "_select", "_verify", "_finish"} <= json.loads(done.stdout).keys()
