"""Processes that save, copy and load at the same few paths, and are killed wherever they are.

Run as a program, with a directory, a seed and how many processes to kill. Each state says in all of
its parts which save it is of, so that a mixture is seen. Each process writes down when it asks for
a save, and when that is acknowledged. What has to hold:

* A load gives all of one save, or raises an error of ckptio's own. Nothing else is raised anywhere.
* No load gives a save that was acknowledged before another one was asked for, which was
  acknowledged, too, before the load began.
* Behind it all, each path has the save that was acknowledged last, or a later one, and is whole.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

import ckptio
from ckptio import sync
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ["a", "b", "c"]
NUM_WORKERS = 4
#: Events of all workers between two kills, at the most; and seconds without any: they hang.
MAX_BETWEEN, HANGS_S = 60, 120.0
#: How long a save goes on, at the most, before it is aborted or cancelled.
MAX_AHEAD_S = 0.03


class Journal:
    """What all processes have done, one JSON line for each event: when, what, and more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def note(self, kind: str, *more: Any) -> None:
        """Write an event down, whole, whoever else does so."""
        os.write(self._fd, (json.dumps([time.monotonic(), kind, *more]) + "\n").encode())

    def events(self) -> list[list[Any]]:
        """Read them all."""
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def nbytes(self) -> int:
        """Say how long it is."""
        return os.fstat(self._fd).st_size


def state_of(number: int, rng: random.Random) -> dict[str, Any]:
    """Make a state that says which save it is of."""
    sizes = [rng.randrange(1, 20_000) for _ in range(rng.choice([2, 8, 20]))]
    tensors = [torch.full((size,), number, dtype=torch.float64) for size in sizes]
    return {"first": number, "sizes": sizes, "tensors": tensors, "last": str(number)}


def number_in(state: Any) -> int:
    """Say which save a state is of; checks that all of it is."""
    number: int = state["first"]
    assert state["last"] == str(number), "a mixture"
    assert [len(tensor) for tensor in state["tensors"]] == state["sizes"], "a mixture"
    assert all(bool((tensor == number).all()) for tensor in state["tensors"]), "a mixture"
    return number


class Worker:
    """What one process does, until it is killed."""

    def __init__(self, number: int, root: Path, journal: Journal, rng: random.Random) -> None:
        self._next = 1000 * number
        self._root = root
        self._journal = journal
        self._rng = rng

    def run(self) -> NoReturn:
        """Do one thing after the other, in one engine after the other."""
        does = [self._save, self._save, self._save_new, self._copy, self._abort, self._cancel]
        does += [self._load, self._load, self._select, self._verify, self._finish, self._keep]
        while True:
            # what is left of failed copies is raised at the end of the block
            with contextlib.suppress(ckptio.CheckpointError), sync.Engine(SMALL) as engine:
                for _ in range(self._rng.randrange(3, 20)):
                    do, name = self._rng.choice(does), self._rng.choice(NAMES)
                    try:
                        do(engine, name)
                    except ckptio.CheckpointError as error:
                        self._journal.note("raised", do.__name__, type(error).__name__)
                    else:
                        self._journal.note("did", do.__name__)

    def _near(self, name: str) -> str:
        return str(self._root / "near" / name)

    def _begin(self, name: str) -> tuple[int, dict[str, Any]]:
        self._next += 1
        self._journal.note("asked", name, self._next)
        return self._next, state_of(self._next, self._rng)

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
        number, state = self._begin(name)
        handle = engine.start_save(state, self._near(name), overwrite=True)
        time.sleep(self._rng.random() * MAX_AHEAD_S)
        handle.abort()
        handle.result()
        self._journal.note("acknowledged", name, number)

    def _cancel(self, engine: sync.Engine, name: str) -> None:
        del engine
        _, state = self._begin(name)

        async def save_for_a_while() -> None:
            async with ckptio.Engine(SMALL) as own:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._rng.random() * MAX_AHEAD_S):
                        await own.save(state, self._near(name), overwrite=True)

        asyncio.run(save_for_a_while())

    def _load(self, engine: sync.Engine, name: str) -> None:
        began_s = time.monotonic()
        self._journal.note("loaded", name, number_in(engine.load(self._near(name))), began_s)

    def _select(self, engine: sync.Engine, name: str) -> None:
        path = str(self._root / self._rng.choice(["near", "far"]) / name)
        found = engine.load(path, select=lambda fqn: not fqn.startswith("tensors"))
        assert found["last"] == str(found["first"]), "a mixture"

    def _verify(self, engine: sync.Engine, name: str) -> None:
        engine.verify(self._near(name))

    def _finish(self, engine: sync.Engine, name: str) -> None:
        engine.finish_copies(self._near(name))

    def _keep(self, engine: sync.Engine, name: str) -> None:
        """Go on with a run that others go on with, too, and remove its steps."""
        del engine, name
        with sync.Checkpointer(
            self._root / "steps",
            then=self._rng.choice([None, self._root / "far steps"]),
            keep=ckptio.KeepLast(2),
            sweep_after_s=self._rng.choice([None, 0.0, 3600.0]),
            config=SMALL,
        ) as checkpointer:
            latest = checkpointer.latest() or 0
            if latest:
                number_in(checkpointer.load())
            for step in range(latest + 1, latest + 3):
                self._next += 1
                checkpointer.save(state_of(self._next, self._rng), step, overwrite=True)


def spawn(journal: Journal, run: Callable[[], object]) -> int:
    """Run something in a fork of this process: torch is imported once. Gives its process id."""
    pid = os.fork()
    if pid:
        return pid

    def wrong(what: Any) -> None:
        journal.note("wrong", repr(what))

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == "asyncio":  # of a task that nobody waits for, say
                wrong(record.getMessage())

    logging.getLogger().addHandler(Handler())
    sys.unraisablehook = lambda told: wrong(told.exc_value)
    threading.excepthook = lambda told: wrong(told.exc_value)
    try:
        run()
    except BaseException:
        wrong(traceback.format_exc())
    os._exit(0)


def soak(root: Path, journal: Journal, rng: random.Random, num_kills: int) -> None:
    """Run the workers; kill one after the other, and stop some for a while."""
    numbers = itertools.count(1)

    def begin() -> int:
        worker = Worker(next(numbers), root, journal, random.Random(rng.random()))
        return spawn(journal, worker.run)

    pids = [begin() for _ in range(NUM_WORKERS)]
    for _ in range(num_kills):
        place = rng.randrange(NUM_WORKERS)
        go_on(journal, rng)
        if rng.random() < 0.3:
            os.kill(pids[place], signal.SIGSTOP)
            go_on(journal, rng)
            os.kill(pids[place], signal.SIGCONT)
            go_on(journal, rng)
        os.kill(pids[place], signal.SIGKILL)
        os.waitpid(pids[place], 0)
        pids[place] = begin()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def go_on(journal: Journal, rng: random.Random) -> None:
    """Wait until the workers have done something more."""
    enough = journal.nbytes() + rng.randrange(MAX_BETWEEN) * len('[12345.67890, "did", "_save"]\n')
    end_s = time.monotonic() + HANGS_S
    while journal.nbytes() < enough:
        if time.monotonic() >= end_s:
            journal.note("wrong", "nothing is done any more")
            return
        time.sleep(rng.random() * 0.01)


def judge(root: Path, journal: Journal) -> list[str]:
    """Say what does not hold of that which has to; see above."""
    events = journal.events()
    wrong = [str(event[2]) for event in events if event[1] == "wrong"]
    asked_s: dict[int, float] = {}
    acknowledged: dict[str, dict[int, float]] = collections.defaultdict(dict)
    loads = []
    for at_s, kind, *more in events:  # the first of several ranks counts
        if kind == "asked":
            asked_s.setdefault(more[1], at_s)
        elif kind == "acknowledged":
            acknowledged[more[0]].setdefault(more[1], at_s)
        elif kind == "loaded":
            loads.append((*more,))
    for name in NAMES:
        path = str(root / "near" / name)
        try:
            loads.append((name, number_in(sync.load(path)), time.monotonic()))
            report = sync.verify(path)
            wrong += [] if report.is_whole else [f"{path}: {report}"]
        except Exception as error:
            wrong += [f"{path}: {error!r}"] if acknowledged[name] else []
    for name, found, began_s in loads:
        said = acknowledged[name]
        for number, at_s in said.items():
            if said.get(found, at_s) < asked_s[number] and at_s < began_s:
                wrong.append(f"{name}: {found} was loaded, and {number} was there")
    return wrong


def tell(root: Path, journal: Journal) -> int:
    """Say what was done how often, and, as an error, what is wrong. Gives the exit code."""
    wrong = judge(root, journal)
    done = collections.Counter(event[2] for event in journal.events() if event[1] == "did")
    sys.stdout.write(json.dumps(done))
    sys.stderr.write("\n".join(wrong))
    return bool(wrong)


def main() -> int:
    """Soak, and say what is wrong."""
    root, seed, num_kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    journal = Journal(root / "journal")
    soak(root, journal, random.Random(seed), num_kills)
    return tell(root, journal)
