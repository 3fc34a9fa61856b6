from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def test_a_job_of_ranks_goes_on_from_what_others_wrote(tmp_path: Path) -> None:
    """Each rank its blocks, three ranks of what two saved; and they save where it lies.

    What is another file on each rank is refused, though all call it the same.
    """
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", "-m", "tests.foreign.job"),
                *(str(tmp_path / "meeting"), str(rank), "3"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], said
