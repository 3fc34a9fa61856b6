"""Real processes that load together, over each kind of link."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckptio.config import MiB
from tests.ranks.jobs.pool import Stop

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks.jobs.pool import Jobs

LOAD = "tests.ranks.jobs.links:load_together"


@pytest.mark.parametrize("kind", ["tcp", "shared"])
def test_two_processes_load_each_byte_once(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    """Over files in a directory: each reads half of them, and has all."""
    read = jobs.run(2, LOAD, kind=kind, path=str(tmp_path))
    assert sum(read) == 3 * MiB
    assert max(read) <= 1.1 * sum(read) / 2


@pytest.mark.parametrize("kind", ["tcp", "shared"])
def test_a_process_that_dies_is_noticed_at_once(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    """The other raises `PeerLostError` and leaves nothing behind."""
    stop = Stop(1, "linked", "kill")
    other, _ = jobs.outcomes(2, LOAD, stop=stop, kind=kind, path=str(tmp_path))
    assert other.error is not None
    assert other.error.kind == "PeerLostError", other.error.trace
    assert other.error.message.startswith("the exchange with rank 1 broke off")
