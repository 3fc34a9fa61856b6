"""A process of a job: it waits for things to do as some rank of some world, and does them.

Kept from job to job, since importing torch takes longer than most jobs. What it is told
and what it answers are lines of JSON on a socket that it was born with; when the other end
goes, so does the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from ckptio import events
from tests.ranks.jobs.hosts import cut_cable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Json = Any

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(eq=False)
class Me:
    """What a job's function knows of itself; its first argument.

    Attributes:
        rank: Which rank this is.
        world_size: How many there are.
        stop: Point at which this rank is stopped, and how; see `pool.Stop`.
        tell: Sends a message to whoever runs the job.
    """

    rank: int
    world_size: int
    stop: tuple[str, str] | None
    tell: Callable[[Json], None]

    def point(self, name: str) -> None:
        """Die, freeze or be cut off here, if that is what this rank is to do at `name`."""
        if self.stop is None or self.stop[0] != name:
            return
        how = self.stop[1]
        self.stop = None
        self.tell({"stopped_s": time.monotonic()})
        if how == "cut":
            cut_cable()
            return
        number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        signal.pthread_kill(threading.get_ident(), number)  # this thread stops first: here

    def observe(self, event: events.Event) -> None:
        """Turn an engine's events into points: an observer."""
        match event:
            case events.SaveStarted():
                self.point("planned")
            case events.SaveStaged():
                self.point("staged")
            case events.SaveProgressed() if event.written_nbytes == event.nbytes:
                self.point("written")
            case events.LoadStarted():
                self.point("load planned")
            case events.ReadProgressed() if event.read_nbytes == event.nbytes:
                self.point("read")

    def audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Make the moment before the coordinator writes the manifest a point."""
        if name == "open" and self.stop is not None and "/.manifest-" in str(arguments[0]):
            self.point("before commit")


def describe(error: BaseException) -> Json:
    """Write an error down: what it is, what it says, and what it carries."""
    return {
        "kind": type(error).__name__,
        "kinds": [cls.__name__ for cls in type(error).__mro__],
        "message": str(error),
        "cause": type(error.__cause__).__name__ if error.__cause__ else "",
        "attributes": {key: _plain(value) for key, value in vars(error).items()},
        "trace": "".join(traceback.format_exception(error)),
    }


def _plain(value: Any) -> Json:
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return repr(value)


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have environment variables for a while."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def perform(task: Json, me: Me) -> Json:
    """Run a job's function, and say how it ended; `"left"` are the threads it leaves behind."""
    threads = set(threading.enumerate())
    answer: Json = {}
    try:
        module, _, name = task["function"].partition(":")
        with environment(task["env"]):
            answer["value"] = getattr(importlib.import_module(module), name)(
                me, **task["arguments"]
            )
            json.dumps(answer)
    except BaseException as error:  # the test gets it, whatever it is
        answer = {"error": describe(error)}
    answer["finished_s"] = time.monotonic()
    answer["left"] = [t.name for t in set(threading.enumerate()) - threads if t.is_alive()]
    return answer


def main() -> None:
    """Work until the other end of the socket is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    control = socket.socket(fileno=int(sys.argv[1]))
    lock = threading.Lock()
    current: list[Me] = []

    def tell(message: Json) -> None:
        with lock:
            control.sendall(json.dumps(message).encode() + b"\n")

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        for me in current:
            me.audit(name, arguments)

    importlib.import_module("ckptio.runtime.saving")
    importlib.import_module("ckptio.runtime.loading")
    sys.addaudithook(audit)
    tell({"ready": True})
    with control.makefile("rb") as lines:
        for line in lines:
            task = json.loads(line)
            me = Me(task["rank"], task["world_size"], task["stop"] and tuple(task["stop"]), tell)
            current[:] = [me]
            answer = perform(task, me)
            current.clear()
            tell(answer)
    os._exit(0)  # whatever threads a job has left


if __name__ == "__main__":
    main()
