"""What is saved before the power goes.

`paths`: fresh paths, and one path written over and over. `run`: steps of a run, of which the
newest are kept.

Run as a process, so that nothing of it outlives it but what it wrote:
`python -m tests.stress.workload ROOT CONTROL_FILE KIND DURABILITY DIRECT_IO`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptio import sync
from ckptio.checkpointer.steps import step_name
from ckptio.events import DirectIORefused
from ckptio.plan.retention import KeepLast
from tests.rig import config_with, random_state
from tests.strategies import fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_ROUNDS = 12
LATEST = "latest"
RUN = "run"
KEEP = KeepLast(2)

# several slabs with a tail that fills no page, a file of its own, a page, and less than one
_SIZES = [90_001, 300_000, 4096, 17, 0]
_ROUNDS_PER_DIR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One save: where, and which content. Numbers grow from save to save."""

    path: str
    number: int

    def encode(self) -> bytes:
        return json.dumps({"path": self.path, "number": self.number}).encode()


def decode_step(data: bytes) -> Step:
    return Step(**json.loads(data))


def all_steps(kind: str) -> list[Step]:
    """List the saves in their order; of paths, a fresh one in new directories, then the old one."""
    if kind == RUN:
        return [step_of(number) for number in range(2 * NUM_ROUNDS)]
    steps = []
    for i in range(NUM_ROUNDS):
        path = f"runs/part-{i // _ROUNDS_PER_DIR}/step-{i}"
        steps += [Step(path=path, number=2 * i), Step(path=LATEST, number=2 * i + 1)]
    return steps


def step_of(number: int) -> Step:
    """Name a step of a run."""
    return Step(path=f"{RUN}/{step_name(number)}", number=number)


def promised(kind: str, acknowledged: Sequence[Step]) -> dict[str, int]:
    """Say which content each path must have, or a later one.

    Of a run, the step before the newest may go as soon as the next one is committed, which
    nobody may have acknowledged yet.
    """
    lasting = acknowledged[-1:] if kind == RUN else acknowledged
    return {step.path: step.number for step in lasting}  # the last one counts


def state_of(number: int) -> dict[str, Any]:
    """Make the content with this number."""
    return {"number": number, "model": random_state(_SIZES, seed=number)}


def number_of(state: Any) -> int | None:
    """Tell which content this is, after comparing every bit; `None` for no whole one."""
    number = state["number"]
    return number if fingerprint(state) == fingerprint(state_of(number)) else None


def main(root: str, control_path: str, kind: str, durability: str, direct_io: str) -> None:
    """Save everything, and put a mark on the disk's log whenever a save is acknowledged."""
    refusals: list[DirectIORefused] = []

    def observe(event: object) -> None:
        if isinstance(event, DirectIORefused):
            refusals.append(event)

    config = config_with(durability=durability, direct_io=direct_io)
    control = os.open(control_path, os.O_WRONLY)
    with (
        sync.Engine(config, observer=observe) as engine,
        sync.Checkpointer(f"{root}/{RUN}", keep=KEEP, engine=engine) as checkpointer,
    ):
        for step in all_steps(kind):
            state = state_of(step.number)
            if kind == RUN:
                checkpointer.save(state, step.number)
            else:
                engine.save(state, f"{root}/{step.path}", overwrite=step.path == LATEST)
            os.write(control, step.encode())
    os.close(control)
    assert not refusals, refusals


if __name__ == "__main__":
    main(*sys.argv[1:])
