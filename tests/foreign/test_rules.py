"""Files that torch makes something else of than before, though nobody wrote to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch.serialization import safe_globals

from ckptio import sync
from ckptio.errors import CheckpointChangedError, FormatError
from tests.foreign.rig import assert_same_state, save_dcp
from tests.rig import SMALL, config_with

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_leaks")


@dataclass
class Two:
    """More than data, unless it is allowed."""

    x: torch.Tensor
    y: torch.Tensor


REST = {"b": torch.full((4,), 3.0), "c": torch.full((4,), 4.0)}
WHOLE = {"a": {"x": torch.full((4,), 1.0), "y": torch.full((4,), 2.0)}, **REST}


@pytest.fixture(params=["zip", "old", "dcp"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint with an object that is more than data before what is not."""
    state = {"a": Two(torch.full((4,), 1.0), torch.full((4,), 2.0)), **REST}
    if request.param == "dcp":
        return save_dcp(tmp_path / "x", state)
    is_zip = request.param == "zip"
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    return tmp_path / "x.pt"


@pytest.mark.parametrize("allowed_first", [True, False])
def test_an_engine_sees_that_other_classes_are_allowed(path: Path, *, allowed_first: bool) -> None:
    """Each tensor has its own bytes, whatever was allowed when the engine looked first."""

    def load_all() -> None:
        with safe_globals([Two]):
            assert_same_state(engine.load(path), WHOLE)
            assert_same_state(engine.load(path, select=["b", "c"]), REST)

    with sync.Engine(SMALL) as engine:
        if allowed_first:
            load_all()
        for _ in range(2):
            assert_same_state(engine.load(path, select=["b", "c"]), REST)
            with pytest.raises(FormatError, match="more than data"):
                engine.load(path)
            load_all()
        num_reads = engine.cache_statistics().num_reads
        load_all()
        assert engine.cache_statistics().num_reads == num_reads


@pytest.mark.parametrize("allowed_first", [True, False])
def test_a_manifest_of_another_rule_is_no_place_to_find_tensors_by(
    path: Path, *, allowed_first: bool
) -> None:
    """Where it is taken on trust, or comes from another rank; and the next load is right."""
    wanted = "a" if path.is_dir() else "c"  # of DCP, each value is by itself
    with sync.Engine(config_with(cache_ttl_s=1e6)) as engine:
        if allowed_first:
            with safe_globals([Two]):
                engine.load(path)
            with pytest.raises(CheckpointChangedError, match="other classes are allowed"):
                engine.load(path, select=wanted)
            assert_same_state(engine.load(path, select="c"), {"c": REST["c"]})
            return
        engine.load(path, select="c")
        with safe_globals([Two]):
            with pytest.raises(CheckpointChangedError, match="other classes are allowed"):
                engine.load(path, select=wanted)
            assert_same_state(engine.load(path), WHOLE)
