"""Tests for `dtype=`: what is trained in one type is given away in another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from ckptio import sync
from ckptio.conversion import source as source_module
from ckptio.errors import ConfigError
from tests.rig import SMALL
from tests.state.test_wrappers import coded

if TYPE_CHECKING:
    from pathlib import Path


def _make_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(300, 70, generator=generator)
    return {
        "model": {
            "weight": matrix,
            "tied": matrix,
            "column": matrix[:, 3],
            "half": torch.randn(9, generator=generator).half(),
            "double": torch.randn(5, 3, generator=generator, dtype=torch.float64),
            "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, 3.4e38]),
            "ids": torch.arange(7),
            "mask": torch.tensor([True, False]),
            "complex": torch.randn(4, generator=generator, dtype=torch.complex64),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(1.5),
        },
        "step": 3,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("to", ["hf", "safetensors"])
def test_floats_are_converted_as_torch_does_it(
    to: Any, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part by part: a tensor that is read in several is put together in its new size."""
    monkeypatch.setattr(source_module, "PART_NBYTES", 4096)
    monkeypatch.setattr(source_module.parts_of, "__defaults__", (4096,))
    state = _make_state()
    sync.save(state, tmp_path / "c", config=SMALL)
    target = tmp_path / ("x" if to == "hf" else "x.safetensors")
    done: list[tuple[int, int]] = []
    report = sync.convert(
        tmp_path / "c",
        target,
        to=to,
        strip="model",
        dtype=dtype,
        config=SMALL,
        progress=lambda *counts: done.append(counts),
    )
    found = load_file(target / "model.safetensors" if to == "hf" else target)
    assert found.keys() == state["model"].keys()
    for name, tensor in state["model"].items():
        wanted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert found[name].dtype is wanted.dtype, name
        assert torch.equal(found[name].nan_to_num(7), wanted.nan_to_num(7)), name
    assert report.nbytes == sum(tensor.nbytes for tensor in found.values())
    assert done[-1] == (report.nbytes, report.nbytes)


def test_another_type_is_another_file(tmp_path: Path) -> None:
    """One that was written before, in the type that is stored, does not stand for it."""
    sync.save({"w": torch.ones(3)}, tmp_path / "c", config=SMALL)
    target = tmp_path / "x.safetensors"
    sync.convert(tmp_path / "c", target, to="safetensors", config=SMALL)
    report = sync.convert(
        tmp_path / "c",
        target,
        to="safetensors",
        dtype=torch.bfloat16,
        overwrite=True,
        config=SMALL,
    )
    assert not report.files[0].was_there
    assert load_file(target)["w"].dtype is torch.bfloat16
    options: dict[str, Any] = {"to": "safetensors", "dtype": torch.bfloat16, "config": SMALL}
    assert sync.convert(tmp_path / "c", target, **options).files[0].was_there


def test_what_a_quantised_tensor_is_made_of_stays(tmp_path: Path) -> None:
    """As in a load: its scales belong to its integers."""
    state = {"q": coded(0, 4, 5), "w": torch.ones(2)}
    sync.save(state, tmp_path / "c", config=SMALL)
    target = tmp_path / "x.safetensors"
    sync.convert(
        tmp_path / "c",
        target,
        to="safetensors",
        dtype=torch.bfloat16,
        drop_values=True,
        config=SMALL,
    )
    found = load_file(target)
    assert found.pop("w").dtype is torch.bfloat16
    assert torch.float32 in {tensor.dtype for tensor in found.values()}
    assert torch.bfloat16 not in {tensor.dtype for tensor in found.values()}


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, torch.complex64, int, True])
def test_what_is_no_floating_point_type_is_refused(dtype: Any, tmp_path: Path) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match="dtype= is a floating-point"):
        sync.convert(tmp_path / "c", tmp_path / "x", to="hf", dtype=dtype)


@pytest.mark.parametrize("to", ["ckptio", "dcp"])
def test_formats_that_keep_what_was_saved_do_not_convert(to: Any, tmp_path: Path) -> None:
    """A load of them does."""
    with pytest.raises(ConfigError, match="whoever loads it gives the type"):
        sync.convert(tmp_path / "c", tmp_path / "x", to=to, dtype=torch.bfloat16)
