from __future__ import annotations

from tests.ranks.jobs.conftest import jobs

__all__ = ["jobs"]  # the processes that jobs run on
