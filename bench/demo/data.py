"""Real text without a download: the sources of Python's own standard library.

The order is fixed; where in it a run stands is a number, and the number is part of the
checkpoint. Bytes are tokens.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    import random

    from bench.demo.settings import Settings

CORPUS_NBYTES = 4 << 20
_STRIDE = 7919  # a prime: neighbours in time are far apart in the text


def read_corpus(max_nbytes: int = CORPUS_NBYTES) -> bytes:
    """Read modules of the standard library in the order of their names.

    Args:
        max_nbytes: How much, at most.

    Raises:
        OSError: The sources are not there, or cannot be read.
    """
    folder = sysconfig.get_path("stdlib") or os.path.dirname(os.__file__)
    parts: list[bytes] = []
    room = max_nbytes
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".py"):
            continue
        with open(os.path.join(folder, name), "rb") as file:
            part = file.read(room)
        parts.append(part)
        room -= len(part)
        if room == 0:
            break
    if not parts:
        raise FileNotFoundError(f"no Python sources in {folder!r} to train on")
    return b"".join(parts)


class Feed:
    """Gives batches of the corpus, one after the other; `Stateful`.

    Args:
        corpus: The text.
        settings: For the sizes.
        jitter: Moves each window by less than its length.
        noise: Chooses bytes of the input to replace.
    """

    def __init__(
        self, corpus: bytes, settings: Settings, jitter: random.Random, noise: np.random.Generator
    ) -> None:
        self._tokens = np.frombuffer(corpus, dtype=np.uint8)
        self._digest = hashlib.sha256(corpus).hexdigest()
        self._settings = settings
        self._jitter = jitter
        self._noise = noise
        self._num_windows = len(corpus) // settings.context - 2
        self.position = 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Give inputs and targets, `[batch, token]` each, and move on."""
        context = self._settings.context
        rows = []
        for _ in range(self._settings.batch):
            window = self.position * _STRIDE % self._num_windows
            start = window * context + self._jitter.randrange(context)
            rows.append(self._tokens[start : start + context + 1])
            self.position += 1
        text = np.stack(rows)
        inputs = text[:, :-1].copy()
        hit = self._noise.random(inputs.shape) < self._settings.noise
        inputs[hit] = self._noise.integers(0, 256, size=int(hit.sum()), dtype=np.uint8)
        return (
            torch.from_numpy(inputs.astype(np.int64)),
            torch.from_numpy(text[:, 1:].astype(np.int64)),
        )

    def state_dict(self) -> dict[str, Any]:
        """Give the position, and which text it is one in."""
        return {"position": self.position, "corpus_sha256": self._digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position.

        Raises:
            ValueError: It is one in another text.
        """
        if state_dict["corpus_sha256"] != self._digest:
            raise ValueError(
                f"the position was saved in a text with digest {state_dict['corpus_sha256']!r},"
                f" this one has {self._digest!r}; resume with the same Python"
            )
        self.position = state_dict["position"]
