"""The states of random generators, as one object in the state."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptio._texts import shown
from ckptio.errors import ConfigError
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

    They are taken as they are at the call of `save`, and set when `load` comes to them, behind all
    tensors: put it last, should the `load_state_dict` of anything else draw numbers. What draws
    between that and the next step, as `iter(DataLoader(...))` does, has to come before the load.

    Only ckptio keeps one for each rank: `torch.distributed.checkpoint` gives all ranks that of
    rank 0, also through the plug-ins.

    Args:
        generators: Further ones: of `torch.Generator`, `numpy.random.Generator`, or
            `random.Random`. A target takes as many as were saved, of the same kinds and in the
            same order.

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
        self._generators = {_name_of(n, each): each for n, each in enumerate(generators)}
        self._cuda = ""  # what CUDA takes once it is in use

    def state_dict(self) -> dict[str, Any]:
        """Give the states, in memory of their own. `save` calls it."""
        numpy: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002  # the global one
        states: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            # with names, so that others than were saved are told before anything is set
            "numpy": {numpy["bit_generator"]: numpy},
            "python": random.getstate(),
            "given": {name: _state_of(each) for name, each in self._generators.items()},
            # a word, so that more devices or fewer are no other state
            "cuda": self._cuda_states(),
        }
        return {"states": PerRank(states)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the states. `load` calls it.

        Devices that the checkpoint has no state of keep theirs, and states of devices that are not
        here are passed over.

        Args:
            state_dict: What `state_dict` gave.

        Raises:
            ConfigError: It has states of other generators than this one was given, or of another
                kind of numpy's.
        """
        found = state_dict["states"]
        states = found.value if isinstance(found, PerRank) else found
        given = states["given"]
        if given.keys() != self._generators.keys():
            were, are = ([*names] or "none" for names in (given, self._generators))
            raise ConfigError(f"the generators {were} were saved, and {are} are to be set")
        ((kind, numpy),) = states["numpy"].items()
        now = np.random.get_state(legacy=False)["bit_generator"]  # noqa: NPY002
        if kind != now:
            raise ConfigError(f"numpy's global generator was a {kind}, and is a {now}")
        for name, generator in self._generators.items():
            _set(generator, given[name])
        torch.set_rng_state(states["torch"].cpu())
        np.random.set_state(numpy)  # noqa: NPY002
        random.setstate(states["python"])
        self._cuda = states["cuda"]
        saved = self._cuda.split()
        for device, word in enumerate(saved[: torch.cuda.device_count() if saved else 0]):
            state = torch.frombuffer(bytearray.fromhex(word), dtype=torch.uint8)
            torch.cuda.set_rng_state(state, device)

    def _cuda_states(self) -> str:
        """Give those of the devices; before CUDA is in use, what they will be set to then."""
        if not torch.cuda.is_initialized():
            return self._cuda
        return " ".join(bytes(state.tolist()).hex() for state in torch.cuda.get_rng_state_all())


def _name_of(number: int, generator: Generator) -> str:
    """Name a generator by its place and its kind."""
    if isinstance(generator, np.random.Generator):
        return f"{number}-{type(generator.bit_generator).__name__}"
    is_torch = isinstance(generator, torch.Generator)
    return f"{number}-{'torch' if is_torch else type(generator).__name__}"


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate()


def _set(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)
