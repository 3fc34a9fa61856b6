"""`Settings`: what a run of the demo is, the same for every process of it. No torch here."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from ckptio import CheckpointConfig

KiB = 1 << 10
MiB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the model, of the run and of the engine's writes.

    Attributes:
        steps: Training steps in all.
        every: Steps between saves.
        kill_at: The step whose save is killed on the way.
        layers: Blocks of the model.
        width: Features of a token.
        num_heads: Attention heads.
        context: Tokens of a sequence.
        batch: Sequences of a step.
        dropout: Share of activations that are dropped; makes the RNG state matter.
        noise: Share of input bytes that are replaced by random ones; as above, for numpy.
        lr: Peak of the learning rate.
        seed: Of every random generator, at the first start.
        num_threads: Threads of torch; sums depend on how they are shared out.
        slab_nbytes: Bytes of one write, a power of two from 4 KiB; progress is told for each.
    """

    steps: int = 48
    every: int = 6
    kill_at: int = 30
    layers: int = 6
    width: int = 256
    num_heads: int = 4
    context: int = 128
    batch: int = 4
    dropout: float = 0.1
    noise: float = 0.02
    lr: float = 1e-3
    seed: int = 2024
    num_threads: int = 1
    slab_nbytes: int = 4 * MiB

    def engine_config(self) -> CheckpointConfig:
        """Give the engine's options; all defaults but the size of a write."""
        return CheckpointConfig(
            slab_nbytes=self.slab_nbytes, block_nbytes=min(MiB, self.slab_nbytes)
        )

    def to_json(self) -> str:
        """Write the settings on one line, for the command line of a child."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


def step_name(step: int) -> str:
    """Name the directory of a step's checkpoint."""
    return f"step-{step}"


def step_number(name: str) -> int | None:
    """Give the step of a directory's name; `None` if it is no name of ours."""
    head, dash, digits = name.partition("-")
    return int(digits) if head == "step" and dash and digits.isdecimal() else None
