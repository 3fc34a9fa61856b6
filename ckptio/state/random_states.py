"""The states of random generators, as one object in the state."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptio.errors import ConfigError, shown
from ckptio.shards import PerRank

if TYPE_CHECKING:
    Generator = torch.Generator | np.random.Generator | random.Random

_KINDS = (torch.Generator, np.random.Generator, random.Random)


class RandomStates:
    """The random generators of this process: saved, and set by `load`, as an optimizer is.

    Those are the global ones of torch (on the CPU, and on every CUDA device once CUDA is in use),
    of numpy and of Python, and the ones given. Each rank saves and sets its own; a rank that the
    checkpoint does not know keeps what it has.

        state = {"model": model, "random": ckptio.RandomStates()}

    They are taken as they are at the call of `save`, and set as `load` ends. What draws numbers
    between that and the next step, as `iter(DataLoader(...))` does, has to come before the load.

    Args:
        generators: Further ones: of `torch.Generator`, `numpy.random.Generator`, or
            `random.Random`. A target takes as many as were saved, in the same order.

    Raises:
        ConfigError: One of them is none of these, or has no state, as `random.SystemRandom`.
    """

    def __init__(self, *generators: Generator) -> None:
        for generator in generators:
            if not isinstance(generator, _KINDS) or isinstance(generator, random.SystemRandom):
                raise ConfigError(
                    "RandomStates takes generators of torch, numpy and random, not"
                    f" {shown(generator)}"
                )
        self._generators = generators

    def state_dict(self) -> dict[str, Any]:
        """Give the states, in memory of their own. `save` calls it."""
        states: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  # the global one
            "python": random.getstate(),
            "given": [_state_of(generator) for generator in self._generators],
        }
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
        return {"states": PerRank(states)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the states. `load` calls it.

        Devices that the checkpoint has no state of keep theirs.

        Args:
            state_dict: What `state_dict` gave.

        Raises:
            ConfigError: It has states of other generators than this one was given.
        """
        found = state_dict["states"]
        states = found.value if isinstance(found, PerRank) else found
        given = states["given"]
        if len(given) != len(self._generators):
            raise ConfigError(
                f"{len(given)} generators were saved, and {len(self._generators)} are to be set"
            )
        for generator, state in zip(self._generators, given, strict=True):
            _set(generator, state)
        torch.set_rng_state(states["torch"])
        np.random.set_state(states["numpy"])  # noqa: NPY002  # as above
        random.setstate(states["python"])
        num_devices = torch.cuda.device_count() if "cuda" in states else 0
        for device, state in zip(range(num_devices), states.get("cuda", ()), strict=False):
            torch.cuda.set_rng_state(state, device)


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate()


def _set(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)
