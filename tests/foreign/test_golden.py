"""Files that other programs wrote load, bit for bit; see `tests.foreign.golden`."""

from __future__ import annotations

import io

import pytest
import torch

from ckptio import sync
from ckptio.errors import FormatError
from tests.foreign.golden import GOLDEN, make_sharded
from tests.foreign.rig import assert_same_state, make_training_state, make_weights
from tests.rig import SMALL


@pytest.mark.parametrize("name", ["weights.safetensors", "hub"])
def test_golden_safetensors_load(name: str) -> None:
    """A file and a folder."""
    assert_same_state(sync.load(GOLDEN / name, config=SMALL), make_weights())


@pytest.mark.parametrize("name", ["state.pt", "old.pt", "dcp"])
def test_golden_states_load(name: str) -> None:
    """Both formats of torch.save, and torch.distributed.checkpoint of one process."""
    assert_same_state(sync.load(GOLDEN / name, config=SMALL), make_training_state())


def test_a_golden_checkpoint_of_two_ranks_loads() -> None:
    """Rows and columns of its tensors lie in files of two ranks."""
    manifest = sync.inspect(GOLDEN / "dcp-2-ranks", config=SMALL)
    assert {tensor.name: len(tensor.chunks) for tensor in manifest.tensors} == {
        "model.rows": 2,
        "model.columns": 2,
        "model.replicated": 1,
    }
    found = sync.load(GOLDEN / "dcp-2-ranks", config=SMALL)
    assert_same_state(found, {"model": make_sharded(), "epoch": 3})
    part = sync.load_slice(GOLDEN / "dcp-2-ranks", "model.columns", (2, slice(1, 5)), config=SMALL)
    assert torch.equal(part, make_sharded()["columns"][2, 1:5])


def test_a_golden_checkpoint_of_megatron_loads() -> None:
    """Tensors by their keys; sharded objects are refused by theirs, unless that is allowed."""
    folder = GOLDEN / "megatron"
    tensors = {
        "decoder.weight": torch.arange(24.0).reshape(4, 6),
        "layers.w": torch.arange(6.0).reshape(1, 6),
    }
    with pytest.raises(FormatError, match=r"'decoder\._extra_state/shard_0_1'"):
        sync.load(folder, config=SMALL)
    found = sync.load(folder, select=lambda name: "_extra_state" not in name, config=SMALL)
    assert_same_state(found, tensors)
    with torch.serialization.safe_globals([io.BytesIO]):
        found = sync.load(folder, config=SMALL)
    assert_same_state(found, {**tensors, "decoder._extra_state/shard_0_1": [b"abc"]})
    assert sync.load(folder / "common.pt", config=SMALL)["iteration"] == 5
