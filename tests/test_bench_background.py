"""What saves in the background save, and what they are charged, in the benches."""

from __future__ import annotations

import pickle
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch

from bench.background import DcpAsync, reusable_stager
from bench.baselines import DcpPeer, crc32, quiet_dcp
from bench.cases.train import Training, _train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11's stager stages once")
@pytest.mark.parametrize("is_async", [False, True], ids=["blocks", "stages in a thread"])
def test_what_changes_once_it_is_staged_is_not_saved(tmp_path: Path, *, is_async: bool) -> None:
    """However it is staged, and with memory that an earlier save has used."""
    state = {"a": torch.arange(5000.0), "b": torch.ones(3)}
    with closing(reusable_stager(is_async=is_async)) as stager, quiet_dcp():
        way = DcpAsync(peer=DcpPeer(), stager=stager)
        for number in range(2):
            path = str(tmp_path / str(number))
            before = {name: tensor.clone() for name, tensor in state.items()}
            underway = way.start(state, path)
            underway.staged.result()
            for tensor in state.values():
                tensor.add_(1)
            underway.written.result()
            found = way.peer.read(path, list(state), state)
            assert all(torch.equal(found[name], before[name]) for name in state)


class Drifting(Training):
    """Steps that take longer after a save than before it."""

    def __init__(self, steps_s: list[float]) -> None:
        self.steps_s = steps_s

    def step_s(self) -> float:
        return self.steps_s.pop(0)


async def test_what_a_save_costs_is_told_from_steps_before_and_after() -> None:
    """And may be less than nothing: the noise is not cut off on one side."""

    async def start() -> Callable[[], bool]:
        return lambda: True

    training = Drifting([9.0, *[1.0] * 4, 2.0, *[3.0] * 4])
    figures = await _train(training, 5, start)
    assert not training.steps_s
    assert figures["quiet_s"] == 2.0
    assert figures["lost_s"] == pytest.approx(-2.0, abs=1.0)


@pytest.mark.parametrize("has_crc", [False, True])
def test_another_process_sums_if_it_is_told_to(tmp_path: Path, *, has_crc: bool) -> None:
    """The setting is one of a process, and comes to it with the writer."""
    way = DcpAsync(peer=DcpPeer(has_crc=has_crc), is_process=True)
    sent = pickle.dumps(way._writer(str(tmp_path)))
    with crc32(is_on=True):
        pickle.loads(sent)  # noqa: S301  # as the process does
        assert torch.serialization.get_crc32_options() is has_crc
