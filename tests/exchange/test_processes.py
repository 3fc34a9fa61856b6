from __future__ import annotations

import subprocess
import sys

import pytest

from ckptio.config import MiB


def run_ranks(scenario: str, kind: str, num_ranks: int = 2) -> list[tuple[int, str, str]]:
    """Run a scenario of `tests.exchange.worker` in processes; give code and output of each."""
    command = [sys.executable, "-m", "tests.exchange.worker", scenario, kind, str(num_ranks)]
    first = _start([*command, "0", "-"])
    assert first.stdout is not None
    port = first.stdout.readline().strip()
    ranks = [first] + [_start([*command, str(rank), port]) for rank in range(1, num_ranks)]
    ends = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=90)
            ends.append((process.returncode, out.strip(), err))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return ends


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kind", ["gloo", "shared"])
def test_two_processes_load_each_byte_once(kind: str) -> None:
    """Over files in a directory: each reads half of them, and has all."""
    ends = run_ranks("load", kind)
    assert [code for code, _, _ in ends] == [0, 0], ends
    read = [int(out) for _, out, _ in ends]
    assert sum(read) == 3 * MiB
    assert max(read) <= 1.1 * sum(read) / 2


@pytest.mark.parametrize("kind", ["gloo", "shared"])
def test_a_process_that_dies_is_noticed_at_once(kind: str) -> None:
    """The other raises `PeerLostError` and leaves nothing behind."""
    ends = run_ranks("die", kind)
    assert [code for code, _, _ in ends] == [0, 3], ends
    assert ends[0][1].startswith("PeerLostError: the exchange with rank 1 broke off")
