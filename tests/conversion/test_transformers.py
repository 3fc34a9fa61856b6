"""What `transformers` makes of what was converted, and of a checkpoint as it lies there."""

from __future__ import annotations

import shutil
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import sync
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")


def make_model() -> Any:
    """A tiny language model with tied weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def load(folder: Path) -> Any:
    """Load a folder with `from_pretrained`, which says what is missing or too much."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        model, report = transformers.LlamaForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
    assert not any(report.values()), report
    return model


def check_same(model: Any, other: Any) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    tokens = torch.arange(10)[None]
    assert torch.equal(model(tokens).logits, other(tokens).logits)


@pytest.mark.parametrize("max_shard_nbytes", [None, 4000])
def test_from_pretrained_loads_what_was_converted(
    tmp_path: Path, max_shard_nbytes: int | None
) -> None:
    """In one file and in many with an index; tied weights are tied again."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    sync.save({"model": model, "optimizer": optimizer}, tmp_path / "run", config=SMALL)
    report = sync.convert(
        tmp_path / "run",
        tmp_path / "hf",
        to="hf",
        strip="model",
        max_shard_nbytes=max_shard_nbytes,
        config=SMALL,
    )
    assert (len(report.files) > 1) is (max_shard_nbytes is not None)
    model.config.save_pretrained(tmp_path / "hf")
    check_same(model, load(tmp_path / "hf"))


def test_from_pretrained_loads_a_checkpoint_of_one_rank_as_it_lies_there(tmp_path: Path) -> None:
    """The data file of a small model is a safetensors file: it only needs the name."""
    model = make_model()
    sync.save(model.state_dict(), tmp_path / "run", config=SMALL)
    (data,) = (tmp_path / "run").glob("*.safetensors")
    (tmp_path / "hf").mkdir()
    shutil.copy(data, tmp_path / "hf" / "model.safetensors")
    model.config.save_pretrained(tmp_path / "hf")
    check_same(model, load(tmp_path / "hf"))


def test_what_save_pretrained_writes_is_loaded(tmp_path: Path) -> None:
    """By `ckptio.load`, into a model too, whose tied head is not in the file."""
    model = make_model()
    model.save_pretrained(tmp_path / "hf", max_shard_size="4KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    found = sync.load(tmp_path / "hf", config=SMALL)
    assert torch.equal(found["model.norm.weight"], model.model.norm.weight)
    torch.manual_seed(1)
    other = transformers.LlamaForCausalLM(model.config)
    torch.nn.init.normal_(other.model.norm.weight)
    sync.load(tmp_path / "hf", other, config=SMALL)
    check_same(model, other)
