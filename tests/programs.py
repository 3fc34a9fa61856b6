"""Programs in an interpreter of their own."""

from __future__ import annotations

import subprocess
import sys

#: Seconds that one may take: torch alone takes many to import on a machine that is busy.
TIMEOUT_S = 300


def run_program(
    program: str, *arguments: object, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a program, which has to end with an exit code; gives what it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        check=False,
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    return done
