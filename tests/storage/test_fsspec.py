from __future__ import annotations

import pytest

from ckptio.testing.conformance import BackendConformance

pytestmark = pytest.mark.usefixtures("no_leaks")


class TestMemory(BackendConformance):
    """fsspec's own file system in memory."""

    url = "memory://conformance"
    slab_nbytes = 1 << 20
