"""What is measured on a CUDA device: where it is, and when it is done."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from bench.harness import Subject, timed
from bench.states import as_bytes, state_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.harness import Figures
    from bench.states import State

_CUDA = torch.device("cuda")


def the_device() -> torch.device | None:
    """Give the device that cases for a device work on; `None` if there is none."""
    return _CUDA if torch.cuda.is_available() else None


def has_cuda() -> bool:
    """Whether that is a CUDA device: a test has the cases run on the CPU."""
    device = the_device()
    return device is not None and device.type == "cuda"


def on_device(make: Callable[[float], State], scale: float) -> State:
    """Make a state on the device; next to none where there is no device, and nothing to measure."""
    device = the_device()
    return make(0.0) if device is None else {n: t.to(device) for n, t in make(scale).items()}


def for_device(subjects: Sequence[Subject]) -> list[Subject]:
    """Say of each subject that it cannot be measured where there is no device."""
    if the_device() is not None:
        return list(subjects)
    return [dataclasses.replace(each, missing="needs a CUDA device") for each in subjects]


def synchronize() -> None:
    """Wait for the device, if anybody has used one: some calls return before it is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def pinned_copies(state: State, key: str) -> list[Subject]:
    """Copy a state into pinned memory that is kept, tensor by tensor, and all in one piece."""
    nbytes = state_nbytes(state)

    def make(name: str, *, is_one_piece: bool) -> Subject:
        async def run() -> Figures:
            figures: dict[str, float] = {}
            target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=has_cuda())
            sources = [as_bytes(tensor) for tensor in state.values()]
            if is_one_piece:
                sources = [torch.cat(sources)]
            parts = target.split([len(source) for source in sources])
            for _ in range(2):  # the first touches the memory
                synchronize()
                with timed(figures, key):
                    for part, source in zip(parts, sources, strict=True):
                        part.copy_(source, non_blocking=True)
                    synchronize()
            last = as_bytes(next(reversed(state.values()))).cpu()
            assert torch.equal(target[-len(last) :], last), "the copy is another one"
            return figures

        return Subject(name=name, kind="limit", run=run)

    return [
        make("limit: copy_ of every tensor into pinned memory", is_one_piece=False),
        make("limit: one copy into pinned memory", is_one_piece=True),
    ]
