"""Runs jobs of real processes, as torchrun would, and says how each rank ended.

    values = jobs.run(4, "tests.ranks.jobs.states:save_and_load", path=str(tmp_path))
    ended = jobs.outcomes(4, "...", stop=Stop(2, "staged", "freeze"), path=str(tmp_path))

Processes are kept from job to job. A job has a store of its own, hosted here as torchrun's
agent does, and the variables that torchrun sets. One that takes too long is killed, with
the stacks of all its threads in the error; no process outlives its pool, or this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is exported

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Json = Any

_ROOT = Path(__file__).parents[3]
_START_S = 120.0
_STACKS_S = 2.0
_MAX_LOG_NBYTES = 6000


class JobError(AssertionError):
    """A job did not end as it should have."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a rank is to die or to freeze.

    Attributes:
        rank: Which rank.
        point: Name of the point: one of `Me.observe`, or what the job calls `me.point` with.
        how: `"kill"` (SIGKILL), `"freeze"` (SIGSTOP), or `"cut"`: nothing is stopped, the
            cable of its host is pulled.
    """

    rank: int
    point: str
    how: str

    @property
    def ends(self) -> bool:
        """Whether the rank says nothing more."""
        return self.how != "cut"


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a rank.

    Attributes:
        kind: Name of its class.
        kinds: Names of that and of the classes it is made of.
        message: Its text.
        cause: Name of the class of its cause, or nothing.
        attributes: What it carries, as far as it is JSON; the rest by `repr`.
        trace: Where it was raised.
    """

    kind: str
    kinds: list[str]
    message: str
    cause: str
    attributes: dict[str, Any]
    trace: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended.

    Attributes:
        rank: Which.
        value: What the job's function gave, where it did.
        error: What it raised instead.
        stopped: Whether the rank died or froze where it was to.
        seconds: From the stop of the rank that was to be stopped until this one ended.
    """

    rank: int
    value: Any = None
    error: Failure | None = None
    stopped: bool = False
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Worker:
    """A process, and the socket on which it is talked to."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    log: Path
    pending: bytearray = field(default_factory=bytearray)
    is_ready: bool = False

    def send(self, task: Json) -> None:
        with contextlib.suppress(OSError):  # it died: reading says so
            self.control.sendall(json.dumps(task).encode() + b"\n")

    def receive(self) -> Iterator[Json]:
        """Give what it has said since; `None` if it is gone."""
        try:
            data = self.control.recv(1 << 20)
        except ConnectionError:
            data = b""
        self.pending += data
        *lines, rest = self.pending.split(b"\n")
        self.pending[:] = rest
        yield from map(json.loads, lines)
        if not data:
            yield None

    def end(self) -> None:
        self.process.kill()  # a frozen one too
        self.process.wait()
        self.control.close()

    def tail(self) -> str:
        """Give the end of what it printed."""
        return self.log.read_bytes()[-_MAX_LOG_NBYTES:].decode(errors="replace")


class Jobs:
    """A pool of processes.

    Args:
        directory: Where they write what they print.
        prefixes: What to start the process of each rank with, say to put it in another
            network; ranks beyond the last have none.
        host: Address under which ranks find the job's store.
    """

    def __init__(
        self, directory: Path, prefixes: Sequence[Sequence[str]] = (), host: str = "127.0.0.1"
    ) -> None:
        self._directory = directory
        self._prefixes = prefixes
        self._host = host
        self._workers: list[_Worker] = []
        self._num_started = 0

    def run(
        self,
        world_size: int,
        function: str,
        *,
        timeout_s: float = 60,
        env: Mapping[str, str] | None = None,
        **arguments: Json,
    ) -> list[Any]:
        """Run a job on every rank; see `outcomes`.

        Returns:
            What the function gave, by rank.

        Raises:
            JobError: It raised on some rank; with the traces of all of them.
        """
        ended = self.outcomes(world_size, function, timeout_s=timeout_s, env=env, **arguments)
        failed = [f"rank {o.rank}: {o.error.trace}" for o in ended if o.error]
        if failed:
            raise JobError(f"{function} failed on {len(failed)} ranks:\n" + "\n".join(failed))
        return [outcome.value for outcome in ended]

    def outcomes(
        self,
        world_size: int,
        function: str,
        *,
        timeout_s: float = 60,
        env: Mapping[str, str] | None = None,
        stop: Stop | None = None,
        **arguments: Json,
    ) -> list[Outcome]:
        """Run a job on every rank, and say how each ended.

        Args:
            world_size: How many ranks.
            function: `"module:function"`; called with a `Me` and `arguments` on each rank.
            timeout_s: Seconds until the job is killed.
            env: Variables to have besides those of torchrun.
            stop: What rank to stop, where and how. It is waited for until the others ended.
            arguments: JSON.

        Raises:
            JobError: It took too long, a rank died that was not to, or left a thread behind;
                or the rank that was to be stopped did not come to that point.
        """
        self._start(world_size)
        store = TCPStore(
            self._host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        for rank, worker in enumerate(self._workers[:world_size]):
            worker.send(
                {
                    "function": function,
                    "arguments": arguments,
                    "rank": rank,
                    "world_size": world_size,
                    "env": {**self._variables(rank, world_size, store.port), **(env or {})},
                    "stop": [stop.point, stop.how] if stop and stop.rank == rank else None,
                }
            )
        try:
            messages = self._collect(world_size, time.monotonic() + timeout_s, stop)
        except BaseException:
            self.close()
            raise
        finally:
            del store
        for rank, worker in enumerate(self._workers):
            if worker.process.poll() is not None:
                worker.end()
                self._workers[rank] = self._spawn(rank)  # starts while the test looks at this
        return _outcomes(messages, stop)

    def close(self) -> None:
        """End every process."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _variables(self, rank: int, world_size: int, port: int) -> dict[str, str]:
        """Give the variables that torchrun sets."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": self._host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"job-{port}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _start(self, world_size: int) -> None:
        """Have at least as many processes as ranks, each ready."""
        self._workers += [self._spawn(r) for r in range(len(self._workers), world_size)]
        for worker in self._workers[:world_size]:
            if not worker.is_ready:
                self._wait_ready(worker)

    def _spawn(self, rank: int) -> _Worker:
        ours, theirs = socket.socketpair()
        log = self._directory / f"worker-{self._num_started}.log"
        self._num_started += 1
        prefix = self._prefixes[rank] if rank < len(self._prefixes) else ()
        with theirs, log.open("wb") as output:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.ranks.jobs.worker", str(theirs.fileno())],
                cwd=_ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
            )
        return _Worker(process, ours, log)

    def _wait_ready(self, worker: _Worker) -> None:
        """Wait until a new process has imported everything."""
        worker.control.settimeout(_START_S)
        if next(worker.receive()) is None:
            text = worker.tail()
            self.close()
            raise JobError(f"a process did not start:\n{text}")
        worker.control.settimeout(None)
        worker.is_ready = True

    def _collect(self, world_size: int, until_s: float, stop: Stop | None) -> list[list[Json]]:
        """Wait until every rank has answered or died; the one to be stopped is then killed."""
        messages: list[list[Json]] = [[] for _ in range(world_size)]
        waited = set(range(world_size))
        with selectors.DefaultSelector() as selector:
            for rank in waited:
                selector.register(self._workers[rank].control, selectors.EVENT_READ, rank)
            while waited:
                ready = selector.select(max(0.0, until_s - time.monotonic()))
                for key, _ in ready:
                    messages[key.data] += self._workers[key.data].receive()
                    if _has_ended(messages[key.data]):
                        selector.unregister(key.fileobj)
                        waited.discard(key.data)
                    if messages[key.data][-1:] == [None]:
                        self._workers[key.data].process.wait()
                if stop and waited == {stop.rank} and _is_gone(messages[stop.rank], stop):
                    self._workers[stop.rank].process.kill()
                    self._workers[stop.rank].process.wait()
                    break
                if not ready and time.monotonic() >= until_s:
                    raise JobError(self._stacks(sorted(waited)))
        return messages

    def _stacks(self, ranks: Sequence[int]) -> str:
        """Have ranks print where each of their threads is, and give what they printed."""
        for rank in ranks:
            self._workers[rank].process.send_signal(signal.SIGUSR1)
        sizes: list[int] = []
        until_s = time.monotonic() + _STACKS_S
        while time.monotonic() < until_s:  # until all have printed, or as long as that may take
            found = [self._workers[rank].log.stat().st_size for rank in ranks]
            if found == sizes and all(found):
                break
            sizes = found
            time.sleep(0.2)
        texts = [f"rank {rank}:\n{self._workers[rank].tail()}" for rank in ranks]
        return "\n".join([f"ranks {list(ranks)} did not end in time", *texts])


def _has_ended(messages: Sequence[Json]) -> bool:
    return any(message is None or "finished_s" in message for message in messages)


def _is_gone(messages: Sequence[Json], stop: Stop) -> bool:
    """Whether the rank to be stopped was, and says nothing more."""
    return stop.ends and any(message and "stopped_s" in message for message in messages)


def _outcomes(messages: Sequence[Sequence[Json]], stop: Stop | None) -> list[Outcome]:
    """Turn what ranks said into how they ended."""
    said = [{key: v for m in ours if m for key, v in m.items()} for ours in messages]
    stopped_s = said[stop.rank].get("stopped_s") if stop else None
    if stop and stopped_s is None:
        raise JobError(f"{stop} did not come to pass: {said[stop.rank]}")
    outcomes = []
    for rank, answer in enumerate(said):
        if stop and stop.ends and stop.rank == rank:
            outcomes.append(Outcome(rank, stopped=True))
            continue
        if "finished_s" not in answer:
            raise JobError(f"rank {rank} died")
        if answer["left"]:
            raise JobError(f"rank {rank} left threads behind: {answer['left']}")
        error = Failure(**answer["error"]) if "error" in answer else None
        seconds = answer["finished_s"] - stopped_s if stopped_s is not None else 0.0
        outcomes.append(Outcome(rank, answer.get("value"), error, seconds=seconds))
    return outcomes
