"""Everything a run has to remember, and one step of it; the same for both loops.

A step is cut in two where checkpoints care: `forward_backward` reads the weights and may
run while a save is still copying them, `update` changes them and may not.
"""

from __future__ import annotations

import hashlib
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from bench.demo.data import Feed, read_corpus
from bench.demo.model import GPT, NUM_BYTES

if TYPE_CHECKING:
    from bench.demo.settings import Settings


class RngStates:
    """The random generators of a run, as one `Stateful` object."""

    def __init__(self, seed: int) -> None:
        """Seed torch's generator, and make those of Python and numpy."""
        torch.manual_seed(seed)
        self.python = random.Random(seed)
        self.numpy = np.random.default_rng(seed)

    def state_dict(self) -> dict[str, Any]:
        """Give the states; later draws do not change what was given."""
        return {
            "torch": torch.get_rng_state(),
            "python": self.python.getstate(),
            "numpy": self.numpy.bit_generator.state,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator to its state."""
        torch.set_rng_state(state_dict["torch"])
        self.python.setstate(state_dict["python"])
        self.numpy.bit_generator.state = state_dict["numpy"]


class History:
    """The loss of every step so far; `Stateful`."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Give the losses."""
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the losses."""
        self.losses = list(state_dict["losses"])


class Trainee:
    """A model in training.

    Attributes:
        model: The GPT.
        state: What a checkpoint holds. Every value is `Stateful`.
    """

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.num_threads)
        torch.use_deterministic_algorithms(mode=True)
        self._rng = RngStates(settings.seed)
        self.model = GPT(settings)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: warm_up_then_cosine(step, settings.steps)
        )
        self._feed = Feed(read_corpus(), settings, self._rng.python, self._rng.numpy)
        self._history = History()
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self._optimizer,
            "schedule": self._schedule,
            "rng": self._rng,
            "data": self._feed,
            "history": self._history,
        }

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self._history.losses)

    @property
    def losses(self) -> list[float]:
        """Their losses."""
        return self._history.losses

    def forward_backward(self) -> float:
        """Compute gradients for the next batch. Reads the weights; blocks."""
        inputs, targets = self._feed.next_batch()
        logits = self.model(inputs)
        loss = functional.cross_entropy(logits.view(-1, NUM_BYTES), targets.reshape(-1))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return float(loss.detach())

    def update(self, loss: float) -> None:
        """End the step: change the weights and moments, and note its loss. Blocks."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._history.losses.append(loss)

    def digests(self) -> dict[str, str]:
        """Give a SHA-256 of the bits of all parameters, and one of the optimizer's moments."""
        moments = self._optimizer.state_dict()["state"]
        return {
            "parameters": _digest(dict(self.model.named_parameters())),
            "moments": _digest({f"{i}.{k}": t for i, s in moments.items() for k, t in s.items()}),
        }

    def num_parameters(self) -> int:
        """Count parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def warm_up_then_cosine(step: int, steps: int) -> float:
    """Give the factor of the learning rate: a short ramp, then half a cosine down to 0.1."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        bits = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(f"{name}:{len(bits)}:".encode())
        digest.update(bits.numpy().tobytes())
    return digest.hexdigest()
