"""What the tests of loads save, and what they load it into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.strategies import SMALL, random_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


BLOCK = SMALL.block_nbytes


def sample() -> dict[str, Any]:
    """Give a state of several files, each of them with several segments."""
    return {
        "model": {"w": random_tensor((300, 200), seed=1), "b": random_tensor((77,), seed=2)},
        "half": random_tensor((401, 33), torch.bfloat16, seed=3),
        "steps": torch.arange(9),
        "list": [random_tensor((70_000,), torch.uint8, 4), (random_tensor((5,), seed=5), 7)],
        "n": 5,
    }


def blank(value: Any) -> Any:
    """Give the same structure with nothing in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(blank(item) for item in value)
    return None


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(f"{name}.{key}" if name else key, item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors_of(f"{name}.{i}", item)
