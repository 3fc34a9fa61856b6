"""What only the stand-in for CUDA can be told to do: see `tests.gpu.standin`."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

import ckptio
from ckptio.config import MiB
from ckptio.errors import StateError
from ckptio.staging import cuda
from tests.gpu import test_cuda
from tests.gpu.test_cuda import CONFIG, on_cpu, random_on
from tests.rig import assert_same, names_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RUNTIME = ctypes.CDLL(None)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.skipif(
        not hasattr(RUNTIME, "standin_fail_after"), reason="needs `nox -s standin`: g++, CUDA torch"
    ),
]


@pytest.fixture
def revived() -> Iterator[None]:
    """Leave no device dead."""
    yield
    RUNTIME.standin_revive()


@pytest.mark.usefixtures("revived")
@pytest.mark.parametrize("what", ["save", "load", "load into"])
async def test_a_device_that_dies_is_an_error_and_nothing_else(tmp_path: Path, what: str) -> None:
    """At whatever copy it does; an engine made afterwards works where the device does."""
    state = random_on("cuda", *[3 * MiB] * 4)
    expected = on_cpu(state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    await ckptio.save(state, tmp_path / "before")
    for num_copies in range(12):
        RUNTIME.standin_fail_after(ctypes.c_long(num_copies))
        with pytest.raises(StateError, match="illegal memory access"):
            async with ckptio.Engine(CONFIG) as engine:
                if what == "save":
                    await engine.save(state, tmp_path / "c")
                elif what == "load":
                    await engine.load(tmp_path / "before", device="cuda")
                else:
                    await engine.load(tmp_path / "before", into=target)
        RUNTIME.standin_revive()
        assert names_in(tmp_path) == ["before"]
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save(state, tmp_path / "c")
        assert_same(await engine.load(tmp_path / "c", device="cpu"), expected)


async def test_graphs_are_captured_where_torch_has_the_runtime_within_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nobody finds that, and the driver is told not to break captures."""
    by_runtime, by_driver = cuda._EXCHANGES
    monkeypatch.setattr(cuda, "_EXCHANGES", ((by_runtime[0], "none"), by_driver))
    cuda._exchange_capture_mode.cache_clear()
    try:
        await test_cuda.test_a_graph_is_captured_while_a_save_and_a_load_are_under_way(tmp_path)
    finally:
        cuda._exchange_capture_mode.cache_clear()


def test_who_reads_a_devices_memory_on_the_host_crashes() -> None:
    """So that none of the tests goes well by a read that no GPU would serve."""
    program = "import ctypes, torch; ctypes.string_at(torch.ones(3, device='cuda').data_ptr(), 4)"
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=300)
    assert done.returncode == -signal.SIGSEGV
