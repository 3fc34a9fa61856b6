"""What is pinned: the slabs that a device copies from or to, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ckptio import sync
from ckptio.staging.copy import SourceState
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Pins:
    """Counts."""

    num_pins = 0

    def pin(self, address: int, nbytes: int) -> None:
        del address, nbytes
        self.num_pins += 1

    def unpin(self, address: int) -> None:
        del address


def test_what_moves_between_files_and_the_host_asks_no_driver(tmp_path: Path) -> None:
    """Saves, loads, verifying and copies to a second tier: somebody may be capturing a graph."""
    state = {f"w{i}": torch.rand(700) for i in range(20)}
    pins = Pins()
    with sync.Engine(SMALL) as engine:
        engine._core.context.pool.use_pinning(pins)
        engine.start_save(state, tmp_path / "a", then=tmp_path / "b").durable.wait()
        engine.load(tmp_path / "a", into={name: torch.zeros(700) for name in state})
        assert engine.verify(tmp_path / "b").is_whole
        assert pins.num_pins == 0
        engine.prewarm()  # ahead of saves from a device
        assert pins.num_pins > 0


def test_what_a_device_copies_to_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would copy through memory of the driver else, at a fraction of the speed."""
    monkeypatch.setattr(SourceState, "uses_devices", True)
    pins = Pins()
    with sync.Engine(SMALL) as engine:
        engine._core.context.pool.use_pinning(pins)
        engine.save({"w": torch.rand(700)}, tmp_path / "a")
        assert pins.num_pins > 0
