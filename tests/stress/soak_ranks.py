"""Jobs of several ranks that save and load at the same few paths, and lose ranks; see `soak`.

Run as a program, with a directory, a seed and how many ranks to kill. All ranks of a job draw the
same operations. When one is killed, the others have to end, with `PeerLostError` if they had met;
then the job begins anew, as with torchrun.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptio
from ckptio import sync
from tests.rig import config_with
from tests.stress.soak import HANGS_S, NAMES, Journal, go_on, number_in, spawn, tell

NUM_JOBS, NUM_RANKS = 2, 3
#: Within how many seconds the ranks of a job come together, or one that is silent is given up.
MEET_S = 5.0
CONFIG = config_with(peer_timeout_s=MEET_S, meet_timeout_s=MEET_S)
#: How long a save goes on, at the most, before a rank aborts it.
MAX_AHEAD_S = 0.03


class Rank:
    """What one rank of a job does, until it is killed or another one is."""

    def __init__(self, job: int, rank: int, root: Path, journal: Journal, seed: float) -> None:
        self._next = 1_000_000 * job
        self._rank = rank
        self._root = root
        self._meets_at = root / f"store-{job}"
        self._journal = journal
        self._rng = random.Random(seed)  # the same on all ranks

    def run(self) -> None:
        """Do one thing after the other, in one engine after the other, until a rank is lost."""
        try:
            dist.init_process_group(
                "gloo",
                init_method=self._meets_at.as_uri(),
                rank=self._rank,
                world_size=NUM_RANKS,
                timeout=timedelta(seconds=MEET_S),
            )
        except RuntimeError:  # gloo's: a rank was killed before
            return
        try:
            while True:
                with sync.Engine(CONFIG) as engine:
                    for _ in range(self._rng.randrange(2, 12)):
                        self._do(engine)
        except ckptio.RankError as error:
            self._journal.note("ended", type(error).__name__)

    def _do(self, engine: sync.Engine) -> None:
        does = [self._save, self._save, self._copy, self._save_new, self._load, self._abort]
        do, name = self._rng.choice(does), self._rng.choice(NAMES)
        try:
            do(engine, name)
        except ckptio.PeerLostError:
            raise
        except ckptio.CheckpointError as error:
            self._journal.note("raised", do.__name__, type(error).__name__)
        else:
            self._journal.note("did", do.__name__)

    def _near(self, name: str) -> str:
        return str(self._root / "near" / name)

    def _begin(self, name: str) -> tuple[int, dict[str, Any]]:
        """Make this rank's part of a state as `soak.state_of` gives it."""
        self._next += 1
        self._journal.note("asked", name, self._next)
        number, size = self._next, self._rng.randrange(1, 20_000)
        rows, whole = (torch.full((size,), number, dtype=torch.float64) for _ in range(2))
        sizes, first = [NUM_RANKS * size, size], self._rank * size
        block = ckptio.Shard(rows, global_shape=(sizes[0],), global_offset=(first,))
        own = ckptio.PerRank([number, self._rank])
        tensors = [block, whole]
        return number, {
            "first": number,
            "sizes": sizes,
            "tensors": tensors,
            "own": own,
            "last": str(number),
        }

    def _save(self, engine: sync.Engine, name: str, **options: Any) -> None:
        number, state = self._begin(name)
        engine.save(state, self._near(name), overwrite=True, **options)
        self._journal.note("acknowledged", name, number)

    def _save_new(self, engine: sync.Engine, name: str) -> None:
        number, state = self._begin(name)
        engine.save(state, self._near(name))
        self._journal.note("acknowledged", name, number)

    def _copy(self, engine: sync.Engine, name: str) -> None:
        self._save(engine, name, then=str(self._root / "far" / name))

    def _abort(self, engine: sync.Engine, name: str) -> None:
        """Save, while one of the ranks gives up."""
        number, state = self._begin(name)
        handle = engine.start_save(state, self._near(name), overwrite=True)
        ahead_s = self._rng.random() * MAX_AHEAD_S
        if self._rank == number % NUM_RANKS:
            time.sleep(ahead_s)
            handle.abort()
        handle.result()
        self._journal.note("acknowledged", name, number)

    def _load(self, engine: sync.Engine, name: str) -> None:
        began_s = time.monotonic()
        state = engine.load(self._near(name))
        number = number_in(state)
        assert state["own"] == [number, self._rank], "a mixture"
        self._journal.note("loaded", name, number, began_s)


def soak(root: Path, journal: Journal, rng: random.Random, num_kills: int) -> None:
    """Run the jobs; kill one rank after the other."""
    numbers = itertools.count(1)

    def begin() -> list[int]:
        number, seed = next(numbers), rng.random()
        ranks = [Rank(number, rank, root, journal, seed) for rank in range(NUM_RANKS)]
        return [spawn(journal, rank.run) for rank in ranks]

    jobs = [begin() for _ in range(NUM_JOBS)]
    for _ in range(num_kills):
        go_on(journal, rng)
        pids = jobs.pop(rng.randrange(NUM_JOBS))
        os.kill(pids.pop(rng.randrange(NUM_RANKS)), signal.SIGKILL)
        end(pids, journal)
        jobs.append(begin())
    for pids in jobs:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def end(pids: list[int], journal: Journal) -> None:
    """Wait until the other ranks of a job have ended."""
    end_s = time.monotonic() + HANGS_S
    while pids:
        if time.monotonic() >= end_s:
            journal.note("wrong", "ranks do not end when another one has gone")
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        pids = [pid for pid in pids if not os.waitpid(pid, os.WNOHANG)[0]]
        time.sleep(0.01)


def main() -> int:
    """Soak, and say what is wrong."""
    root, seed, num_kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    journal = Journal(root / "journal")
    soak(root, journal, random.Random(seed), num_kills)
    return tell(root, journal)


if __name__ == "__main__":
    sys.exit(main())
