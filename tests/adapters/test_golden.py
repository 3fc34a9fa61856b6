"""Checkpoints that a StorageWriter wrote still load, with what DCP has to know of them.

`tests/golden/v2-dcp` was written once, by `write_golden` below, with version 1 of the document
for DCP. It is never written again: `python -m tests.adapters.test_golden <directory>` makes one
for a new version.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptio import sync
from ckptio.adapters.dcp import StorageReader, StorageWriter
from ckptio.config import CheckpointConfig, KiB
from tests.adapters.rig import load, same, save

GOLDEN = Path(__file__).parent.parent / "golden" / "v2-dcp"
CONFIG = CheckpointConfig(
    slab_nbytes=8 * KiB,
    block_nbytes=4 * KiB,
    pool_nbytes=64 * KiB,
    bucket_nbytes=16 * KiB,
    max_writes=1,
    durability="none",
)


def make_state() -> dict[str, Any]:
    """Tensors and values of all kinds that the document tells apart."""
    return {
        "model": {
            "weight": torch.arange(3000.0).reshape(60, 50).requires_grad_(),
            "bias.with.dots": torch.arange(7).to(torch.bfloat16),
            "mask": torch.tensor([True, False]),
            "none": torch.empty(0, 3),
            "count": torch.tensor(5),
        },
        "groups": [{"lr": 0.1, "ids": [1, 2]}, {"lr": 0.2, "exp": torch.ones(2)}],
        "order": (1, ("a", None), b"bytes"),
        "stream": io.BytesIO(b"a stream"),
        "array": np.arange(4, dtype=np.int16),
        "naïve ~name": "text",
    }


def write_golden(path: str) -> None:
    """Write the checkpoint."""
    save(make_state(), storage_writer=StorageWriter(path, config=CONFIG))


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Put what cannot be compared otherwise."""
    stream, array = state["stream"], state["array"]
    data = stream.getvalue() if isinstance(stream, io.BytesIO) else stream
    return {**state, "stream": data, "array": (array.dtype.str, array.tolist())}


def test_a_golden_checkpoint_of_dcp_loads() -> None:
    """With DCP into a state of its names, and with ckptio as it was."""
    expected = make_state()
    target = make_state()
    with torch.no_grad():
        for tensor in target["model"].values():
            tensor.zero_()
    target |= {"order": None, "stream": None, "array": None, "naïve ~name": None}
    target["groups"] = [{"lr": 0, "ids": None}, {"lr": 0, "exp": torch.zeros(2)}]
    found = load(target, storage_reader=StorageReader(GOLDEN, config=CONFIG))
    assert same(plain(found), plain(expected))
    assert isinstance(found["stream"], io.BytesIO)
    ours = sync.load(GOLDEN, config=CONFIG)
    assert same(plain(ours), plain(expected))
    assert sync.verify(GOLDEN, config=CONFIG).is_whole


def test_its_metadata_is_as_it_was() -> None:
    """Names, paths and what required gradients."""
    metadata = StorageReader(GOLDEN, config=CONFIG).read_metadata()
    assert metadata.planner_data["groups.1.exp"] == ("groups", 1, "exp")
    assert metadata.planner_data["model.bias.with.dots"] == ("model", "bias.with.dots")
    stored = metadata.state_dict_metadata["model.weight"]
    assert (stored.size, stored.properties.requires_grad) == (torch.Size((60, 50)), True)  # type: ignore[union-attr]  # a tensor


if __name__ == "__main__":
    write_golden(sys.argv[1])
