"""States to save, and proofs that they came back.

States a, b and c stand for what is hard in different ways: many tensors of a model and its
optimizer, very many small ones, and few huge ones. (`tiny_tensors` is for metadata.) Contents are
bytes of a seeded pattern, different in every tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

State = dict[str, torch.Tensor]

MB = 10**6
GB = 10**9
_PATTERN_NBYTES = 8 << 20
_WHOLE_NBYTES = 64 << 20
_EDGE_NBYTES = 1 << 20
_TAIL_NBYTES = 16


def gpt_like(scale: float = 1.0, *, seed: int = 0) -> State:
    """Make state a: a GPT-2-shaped model in bf16 with Adam's fp32 moments and steps.

    At scale 1: 36 layers of width 832, 1,744 tensors, 3.4 GB. Layers, width and vocabulary
    shrink together, so that bytes go with `scale`.
    """
    layers = max(1, round(36 * scale**0.5))
    width = max(8, round(832 * scale**0.25 / 8) * 8)
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (max(64, round(50257 * scale**0.75)), width),
        "wpe.weight": (max(16, round(1024 * scale**0.75)), width),
    }
    for layer in range(layers):
        for name, shape in _block_shapes(width).items():
            shapes[f"h.{layer}.{name}"] = shape
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    state: State = {}
    fill = _Filler(seed)
    for name, shape in shapes.items():
        state[f"model.{name}"] = fill(shape, torch.bfloat16)
        state[f"optim.{name}.exp_avg"] = fill(shape, torch.float32)
        state[f"optim.{name}.exp_avg_sq"] = fill(shape, torch.float32)
        state[f"optim.{name}.step"] = fill((), torch.float32)
    return state


def _block_shapes(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, 4 * width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (4 * width, width),
        "mlp.c_proj.bias": (width,),
    }


def small_tensors(scale: float = 1.0, *, seed: int = 1) -> State:
    """Make state b: 20,000 tensors of 1 to 64 KiB at scale 1, 0.67 GB."""
    generator = torch.Generator().manual_seed(seed)
    count = max(50, round(20_000 * scale))
    sizes = torch.randint(256, 16_385, (count,), generator=generator).tolist()
    fill = _Filler(seed)
    return {f"t.{i:05}": fill((size,), torch.float32) for i, size in enumerate(sizes)}


def tiny_tensors(count: int, *, seed: int = 3) -> State:
    """Make a state whose names weigh more than its bytes: `count` tensors of 64 bytes."""
    fill = _Filler(seed)
    return {f"model.layers.{i}.weight": fill((4, 4), torch.float32) for i in range(count)}


def huge_tensors(scale: float = 1.0, *, seed: int = 2) -> State:
    """Make state c: two fp32 tensors of 1.5 GB each at scale 1."""
    rows = max(64, round(1.5 * GB * scale / (4 * 4096)))
    fill = _Filler(seed)
    return {f"huge.{i}": fill((rows, 4096), torch.float32) for i in range(2)}


class _Filler:
    """Makes tensors filled from a random pattern, each from another place in it."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._pattern = torch.empty(_PATTERN_NBYTES, dtype=torch.uint8)
        self._pattern.random_(generator=generator)
        self._start = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        room = as_bytes(tensor)
        done = 0
        while done < len(room):
            part = self._pattern[self._start : self._start + len(room) - done]
            room[done : done + len(part)] = part
            done += len(part)
            self._start = (self._start + len(part) + 7) % _PATTERN_NBYTES
        return tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def state_nbytes(state: State) -> int:
    """Bytes of all tensors."""
    return sum(t.nbytes for t in state.values())


def blank(state: State) -> None:
    """Zero every byte, so that what is found afterwards was loaded. Keeps the memory."""
    for tensor in state.values():
        as_bytes(tensor).zero_()


@dataclass(frozen=True, slots=True)
class Proof:
    """What is remembered of a state, to check a later one against.

    Attributes:
        tails: The last bytes of every tensor.
        samples: A few tensors; of large ones, both ends.
    """

    tails: dict[str, bytes]
    samples: dict[str, torch.Tensor]

    @classmethod
    def of(cls, state: State) -> Proof:
        """Remember `state`; copies little."""
        names = sample_names(state, 8)
        return cls(
            {name: _tail(t) for name, t in state.items()},
            {name: _ends(state[name]).clone().cpu() for name in names},
        )

    def check(self, state: State) -> None:
        """Check the names, the end of every tensor, and the samples.

        Raises:
            AssertionError: One is another.
        """
        assert state.keys() == self.tails.keys(), "other names"
        for name, tail in self.tails.items():
            assert _tail(state[name]) == tail, f"{name!r} has other bytes"
        self.check_some(state, list(self.samples))

    def check_some(self, state: State, names: Sequence[str]) -> None:
        """Check the samples among `names`, which `state` must have."""
        for name in names:
            assert torch.equal(_ends(state[name]).cpu(), self.samples[name]), f"{name!r} differs"


def sample_names(state: State, count: int) -> list[str]:
    """Choose tensors to look at, from the first to the last."""
    names = list(state)
    step = max(1, (len(names) - 1) // max(1, count - 1))
    return sorted({*names[::step][: count - 1], names[-1]})


def _tail(tensor: torch.Tensor) -> bytes:
    return as_bytes(tensor)[-_TAIL_NBYTES:].cpu().numpy().tobytes()


def _ends(tensor: torch.Tensor) -> torch.Tensor:
    """Give all bytes, or those at both ends of a large tensor."""
    data = as_bytes(tensor)
    if len(data) <= _WHOLE_NBYTES:
        return data
    return torch.cat((data[:_EDGE_NBYTES], data[-_EDGE_NBYTES:]))
