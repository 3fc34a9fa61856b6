"""Foreign checkpoints, written by the tools whose formats they are."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict_loader
import torch.distributed.checkpoint.state_dict_saver
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


#: How to say that one process is meant; older versions of torch see it by themselves.
NO_DIST: dict[str, Any] = (
    {"no_dist": True}
    if "no_dist" in inspect.signature(dcp.state_dict_saver.save).parameters
    else {}
)


def make_weights() -> dict[str, torch.Tensor]:
    """Weights of several types and shapes; one is larger than a block of the small config."""
    generator = torch.Generator().manual_seed(7)
    return {
        "embed.weight": torch.randn(64, 96, generator=generator),
        "layers.0.bias": torch.randn(5, generator=generator).to(torch.bfloat16),
        "layers.0.mask": torch.tensor([True, False, True]),
        "layers.1.ids": torch.arange(7),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }


def make_training_state() -> dict[str, Any]:
    """A model, an optimizer in lists, and values that are no tensors."""
    weights = make_weights()
    return {
        "model": {**weights, "turned": torch.arange(12.0).reshape(3, 4).t()},
        "optim": {
            "state": [{"step": torch.tensor(3.0), "exp_avg": torch.ones(9)}, {"step": 4}],
            "betas": (0.9, 0.999),
        },
        "epoch": 11,
        "name": "run",
    }


def save_hf(folder: Path, weights: Mapping[str, torch.Tensor], num_shards: int = 2) -> Path:
    """Write a folder of shards with an index, as Hugging Face's libraries do."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number in range(num_shards):
        name = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        shard = dict(list(weights.items())[number::num_shards])
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save_dcp(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    """Save with stock torch.distributed.checkpoint."""
    with quiet():
        dcp.state_dict_saver.save(state, checkpoint_id=folder, **NO_DIST, **options)
    return folder


def save_small(kind: str, path: Path, state: dict[str, Any]) -> Path:
    """Save many tensors into one file, with stock DCP ("dcp") or `torch.save`."""
    if kind == "dcp":
        return save_dcp(path, state)
    torch.save(state, path)
    return path


def load_dcp(folder: Path, state: dict[str, Any]) -> None:
    """Load with stock torch.distributed.checkpoint."""
    with quiet():
        dcp.state_dict_loader.load(state, checkpoint_id=folder, **NO_DIST)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore what torch says of a process without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def assert_same_state(found: Any, expected: Any) -> None:
    """Compare nested states, bits and types of tensors included."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same_state(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same_state(a, b)
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
    else:
        assert found == expected
