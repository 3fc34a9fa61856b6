"""Real processes on two hosts, and as torchrun itself starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckptio
from tests.ranks.jobs.hosts import two_hosts
from tests.ranks.jobs.pool import Jobs, Stop
from tests.ranks.jobs.work import LOST_WITHIN_S, check_same, plain_state
from tests.rig import assert_tidy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.ranks.jobs.hosts import Hosts

pytestmark = pytest.mark.stress
SCRIPT = """
import asyncio, sys
import ckptio
from tests.ranks.jobs.work import check_same, plain_state, zeros_like

async def main() -> None:
    async with ckptio.Engine(ranks="auto") as engine:
        await engine.save(plain_state(), sys.argv[1])
        target = zeros_like(plain_state())
        await engine.load(sys.argv[1], target)
        check_same(target, plain_state())

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Give two hosts, or skip where they cannot be made."""
    with two_hosts() as made:
        if made is None:
            pytest.skip("network namespaces need root and iproute2")
        yield made


@pytest.fixture
def apart(hosts: Hosts, tmp_path: Path) -> Iterator[Jobs]:
    """Give processes of which ranks 0 and 1 are on one host, 2 and 3 on the other."""
    a, b = hosts.prefixes
    logs = tmp_path / "logs"
    logs.mkdir()
    pool = Jobs(logs, (a, a, b, b), hosts.address)
    yield pool
    pool.close()


def test_ranks_of_two_hosts_save_and_load(apart: Jobs, hosts: Hosts, tmp_path: Path) -> None:
    """The manifest knows which rank was where."""
    path = tmp_path / "c"
    for function in ("save_layout", "load_layout"):
        apart.run(
            4,
            f"tests.ranks.jobs.sharded:{function}",
            env={"GLOO_SOCKET_IFNAME": "eth0"},
            path=str(path),
            mesh=[2, 2],
            placements=[0, 1],
        )
    found = ckptio.sync.inspect(path).hosts
    assert len(set(found[:2])) == len(set(found[2:])) == 1
    assert [name in host for name, host in zip(hosts.names, found[1:3], strict=True)] == [True] * 2
    check_same(ckptio.sync.load(path), plain_state())
    seen = apart.run(4, "tests.ranks.jobs.together:load_once", path=str(path))
    assert seen == [[True, True], [], [], []]


def test_a_cut_cable_is_noticed_on_both_sides(apart: Jobs, hosts: Hosts, tmp_path: Path) -> None:
    """Each side names ranks of the other; what was there stays."""
    path = tmp_path / "c"
    ended = apart.outcomes(
        4, "tests.ranks.jobs.together:overwrite", stop=Stop(3, "staged", "cut"), path=str(path)
    )
    for outcome in ended:
        assert outcome.error is not None
        assert outcome.error.kind == "PeerLostError", outcome.error.trace
        lost = set(outcome.error.attributes["ranks"])
        assert lost <= ({2, 3} if outcome.rank < 2 else {0, 1})
        assert outcome.seconds < LOST_WITHIN_S
    check_same(ckptio.sync.load(path), plain_state(seed=1))
    hosts.mend(1)
    apart.run(4, "tests.ranks.jobs.together:overwrite", path=str(path))
    check_same(ckptio.sync.load(path), plain_state(seed=2))
    assert_tidy(path)


def test_torchrun_starts_a_job(tmp_path: Path) -> None:
    """With its own agent and store, and nothing else set up."""
    script, path = tmp_path / "train.py", tmp_path / "c"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*run, str(script), str(path)],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert ended.returncode == 0, ended.stderr
    check_same(ckptio.sync.load(path), plain_state())
    assert_tidy(path)
