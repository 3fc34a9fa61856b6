from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from ckptio import sync
from ckptio.conversion.compare import run_diff
from ckptio.conversion.safetensors import write_file
from ckptio.conversion.source import Source, read_views
from ckptio.runtime.solo import solo_engine
from tests.foreign.rig import assert_same_state
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ckptio.plan.load import Wanted
    from ckptio.runtime.core import EngineCore
    from ckptio.staging.copy import Destination

NUM = 48


class CountingSource(Source):
    """Counts the bytes that are asked for, and how often."""

    num_fills = 0
    nbytes = 0

    def fill(self, wanted: Sequence[Wanted], destinations: Sequence[Destination]) -> None:
        """Count."""
        self.num_fills += 1
        self.nbytes += sum(item.nbytes for item in wanted)
        super().fill(wanted, destinations)


@pytest.fixture
def core() -> Iterator[EngineCore]:
    with solo_engine(SMALL) as core:
        yield core


def make_views() -> dict[str, torch.Tensor]:
    """Parameters in one buffer; columns of a matrix; and odd ones of other types."""
    flat, matrix = torch.arange(NUM * 1024.0), torch.randn(64, NUM)
    state = {f"p{i}": flat[i * 1024 : (i + 1) * 1024] for i in range(NUM)}
    state |= {f"c{i}": matrix[:, i] for i in range(NUM)}
    state["none"] = flat[:0]
    pairs = torch.randn(16, dtype=torch.complex64)
    state |= {"left": pairs[:8].conj(), "real": torch.view_as_real(pairs)[8:]}
    return state


@pytest.mark.parametrize("kind", ["ours", "torch.save"])
def test_views_cost_what_they_are_views_of_and_no_more(
    kind: str, tmp_path: Path, core: EngineCore
) -> None:
    """However many there are, and in few readings; also where they lie between each other."""
    state = make_views()
    if kind == "ours":
        sync.save(state, tmp_path / "x", config=SMALL)
    else:
        del state["real"]  # torch saves no memory under two types
        torch.save(state, tmp_path / "x")
    source = CountingSource(core, tmp_path / "x")
    write_file(
        source,
        str(tmp_path / "s"),
        overwrite=False,
        drop_values=False,
        config=SMALL,
        advance=lambda _: None,
    )
    assert_same_state(
        {name: tensor.contiguous() for name, tensor in load_file(tmp_path / "s").items()},
        {name: tensor.resolve_conj().contiguous() for name, tensor in state.items()},
    )
    stored_nbytes = 4 * (NUM * 1024 + 64 * NUM) + 8 * 16
    assert source.nbytes <= 1.1 * stored_nbytes
    assert source.num_fills <= 4
    assert run_diff(tmp_path / "x", tmp_path / "s").is_equal


def test_what_is_whole_in_one_is_compared_with_views_in_the_other(tmp_path: Path) -> None:
    """Under two names there, and parts of a third here; and with parts that overlap."""
    weight, rest = torch.randn(2, 3), torch.randn(2, 3)
    fused = torch.cat([weight, rest])
    sync.save({"a": weight, "b": weight}, tmp_path / "tied", config=SMALL)
    sync.save({"a": fused[:2], "b": fused[:2], "c": fused}, tmp_path / "views", config=SMALL)
    report = run_diff(tmp_path / "tied", tmp_path / "views")
    assert (report.differences, report.only_b, report.num_same) == ((), ("c",), 2)
    sync.save({"a": fused, "b": fused[:3], "c": fused[1:]}, tmp_path / "x", config=SMALL)
    more = torch.cat([fused, fused])
    parts = {"a": more[:4], "b": more[:3], "c": more[1:4], "d": more}
    sync.save(parts, tmp_path / "y", config=SMALL)
    assert run_diff(tmp_path / "x", tmp_path / "y").num_same == 3
    assert run_diff(tmp_path / "y", tmp_path / "x").num_same == 3


def test_views_are_read_a_few_at_a_time(tmp_path: Path, core: EngineCore) -> None:
    """As many as there is room for, in the order in which they are asked for."""
    state: Any = make_views()
    sync.save(state, tmp_path / "x", config=SMALL)
    source = CountingSource(core, tmp_path / "x")
    leaves = list(source.leaves())
    for leaf, tensor in zip(leaves, read_views(source, leaves, 5000), strict=True):
        assert torch.equal(tensor, state[leaf.name])
    assert source.num_fills >= NUM
