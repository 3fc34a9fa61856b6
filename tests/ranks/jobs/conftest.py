from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ranks.jobs.pool import Jobs

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Give the processes that jobs run on; the same ones for all tests."""
    pool = Jobs(tmp_path_factory.mktemp("jobs"))
    yield pool
    pool.close()
