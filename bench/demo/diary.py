"""What a training process tells its driver: one JSON object a line, on its output.

A line is written with one system call, so what was told before the process killed itself
is told, and lines of two threads do not mix.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from bench.demo.settings import step_number
from ckptio import events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptio import CheckpointInfo


class Diary:
    """Tells what happens, and kills the process when its time has come.

    Args:
        fd: Where lines go.
        kill_at: The step whose save is not to survive; `None` to live.

    Attributes:
        phase: What the trainer does just now. Set by it, read on the engine's thread.
        stalls_s: Seconds the trainer stood still for the save of a step.
    """

    def __init__(self, fd: int, kill_at: int | None = None) -> None:
        self._fd = fd
        self._kill_at = kill_at
        self.phase = "starting"
        self.stalls_s: dict[int, float] = {}

    def tell(self, kind: str, **facts: Any) -> None:
        """Write one line."""
        os.write(self._fd, (json.dumps({"kind": kind, **facts}) + "\n").encode())

    @contextlib.contextmanager
    def stalled_by(self, step: int) -> Iterator[None]:
        """Count the time inside as time that the save of `step` kept the trainer waiting."""
        self.phase = f"waiting for the save of step {step}"
        began = time.perf_counter()
        try:
            yield
        finally:
            waited_s = time.perf_counter() - began
            self.phase = f"going on after step {step}"
            self.stalls_s[step] = self.stalls_s.get(step, 0.0) + waited_s

    @contextlib.contextmanager
    def computing(self, step: int, *, beside_save: bool) -> Iterator[None]:
        """Time forward and backward of a step, and say whether a save was under way."""
        self.phase = f"computing step {step}"
        began = time.perf_counter()
        yield
        self.tell(
            "computed", step=step, beside_save=beside_save, elapsed_s=time.perf_counter() - began
        )

    def committed(self, step: int, info: CheckpointInfo) -> None:
        """Tell of a commit, with the engine's own figures."""
        self.tell(
            "saved",
            step=step,
            nbytes=info.nbytes,
            staged_s=info.staged_s,
            committed_s=info.committed_s,
        )

    def observe(self, event: events.Event) -> None:
        """Take an event of the engine; on its thread."""
        step = step_number(os.path.basename(event.path))
        if isinstance(event, events.SaveProgressed):
            if step == self._kill_at and 2 * event.written_nbytes >= event.nbytes:
                self._die(event)
        elif isinstance(event, events.LeftoversRemoved):
            self.tell("leftovers", step=step, files=event.files)
        elif isinstance(event, events.DirectIORefused):
            self.tell("direct_io_refused", reason=event.reason)

    def _die(self, event: events.SaveProgressed) -> None:
        """End the process as a power cut would: nothing is closed, flushed or removed."""
        self.tell(
            "killed",
            step=self._kill_at,
            written_nbytes=event.written_nbytes,
            nbytes=event.nbytes,
            phase=self.phase,
        )
        os.kill(os.getpid(), signal.SIGKILL)
