from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.rig import save_at

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A checkpoint."""
    return save_at(tmp_path / "run" / "step-9")
