"""What several of these test modules are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckptio.runtime.core import EngineCore
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def core() -> Iterator[EngineCore]:
    """Give an open engine of one process."""
    core = EngineCore(SMALL, None)
    core.start()
    yield core
    core.close()
