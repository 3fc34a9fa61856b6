"""Files that become shorter while they are verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckptio.config import KiB
from ckptio.errors import CorruptionError
from ckptio.testing import MemoryStorage, run_virtual
from tests.rig import config_with, inline_engine, random_state

if TYPE_CHECKING:
    from ckptio.testing import Operation


def test_a_file_cut_off_while_it_is_verified_is_listed_with_the_rest() -> None:
    """What was found before stays found, and other files are read."""

    async def scenario() -> None:
        storage = MemoryStorage()
        async with inline_engine({"memory": storage}, config_with(max_reads=1)) as engine:
            await engine.save(random_state([256 * KiB, 256 * KiB]), "memory")
            first, second = sorted(storage.files)
            storage.files[second][20 * KiB] ^= 1

            def cut_off(operation: Operation) -> None:
                if operation.kind == "pread_into" and operation.path.endswith(first):
                    del storage.files[first][100 * KiB :]

            storage.fault = cut_off
            report = await engine.verify("memory")
            assert {error.file for error in report.damage} == {first, second}
            assert any("ends at byte 102400" in str(error) for error in report.damage)
            with pytest.raises(CorruptionError):
                await engine.load("memory")

    run_virtual(scenario(), seed=0)
