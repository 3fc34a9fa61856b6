"""Jobs of several processes in a gloo group, to be measured.

The processes of a job are started once, do what they are told, round after round, and
answer; see `bench.rank`. A job has a store of its own, hosted here as torchrun's agent
does. The time that counts is that of the slowest rank.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is exported

from bench import rank
from bench.isolate import PRELOADED

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess
    from types import TracebackType

    Json = Any

_START_S = 120.0
_ORDER_S = 600.0
#: For how long the others are waited for when one has failed: they may wait for it.
_GRACE_S = 20.0
_HOST = "127.0.0.1"


class CrewError(Exception):
    """A job did not do what it was told."""


class Crew:
    """A job: `with Crew(4) as crew: crew.tell("make", ...)`.

    Args:
        world_size: How many ranks.

    Attributes:
        world_size: As given.
        processes: The ranks, while there are any.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: TCPStore | None = None

    def __enter__(self) -> Self:
        self._store = TCPStore(
            _HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_START_S)
        )
        # forked by a server that has imported what they need and done nothing else
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        try:
            for number in range(self.world_size):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                process = context.Process(
                    target=rank.serve,
                    args=(theirs, self._variables(number, self._store.port)),
                    name=f"rank {number}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self.processes.append(process)
            self.tell("begin")
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and self.processes:
                self.tell("end")
        finally:
            self._kill()

    def tell(self, do: str, **arguments: Json) -> list[Json]:
        """Have all ranks do the same, and wait for them.

        Returns:
            What each has answered, by rank.

        Raises:
            CrewError: A rank failed, died or took too long; the job is gone if others
                waited for it.
        """
        if not self.processes:
            raise CrewError("the job is gone")
        order = json.dumps({"do": do, "arguments": arguments}).encode()
        try:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # it died: who reads finds out
                    pipe.send_bytes(order)
            answers = self._answers(do)
        except BaseException:
            self._kill()
            raise
        errors = [f"rank {r}: {a['error']}" for r, a in enumerate(answers) if "error" in a]
        if errors:
            raise CrewError("; ".join(errors))
        return [answer["value"] for answer in answers]

    def _answers(self, do: str) -> list[Json]:
        answers: dict[int, Json] = {}
        until_s = time.monotonic() + _ORDER_S
        while len(answers) < self.world_size:
            missing = {self._pipes[r]: r for r in range(self.world_size) if r not in answers}
            ready = wait(list(missing), max(0.0, until_s - time.monotonic()))
            if not ready:
                told = [a["error"] for a in answers.values() if "error" in a]
                late = sorted(missing.values())
                raise CrewError(f"ranks {late} did not end {do!r} in time {told or ''}".rstrip())
            for pipe in ready:
                assert isinstance(pipe, Connection)
                number = missing[pipe]
                try:
                    answers[number] = json.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    raise CrewError(f"rank {number} died while it did {do!r}") from None
                if "error" in answers[number]:
                    until_s = min(until_s, time.monotonic() + _GRACE_S)
        return [answers[number] for number in range(self.world_size)]

    def _variables(self, number: int, port: int) -> dict[str, str]:
        """Give the variables that torchrun sets."""
        return {
            "RANK": str(number),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self.processes, self._pipes, self._store = [], [], None
