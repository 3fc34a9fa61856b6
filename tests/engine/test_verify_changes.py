"""Files that become shorter while they are verified, or that cannot be read."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

import ckptio.sync
from ckptio.config import KiB
from ckptio.errors import CorruptionError, StorageError
from ckptio.testing import MemoryStorage, RecordingFiles
from tests.cli.rig import flip
from tests.rig import SMALL, FilesCore, config_with, inline_engine, random_state
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from pathlib import Path

    from ckptio.testing import Operation


@in_virtual_time
async def test_a_file_cut_off_while_it_is_verified_is_listed_with_the_rest() -> None:
    """What was found before stays found, and other files are read."""
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
        places = [(error.file, error.start, error.stop) for error in report.damage]
        assert len(set(places)) == len(places)  # each block is told once
        with pytest.raises(CorruptionError):
            await engine.load("memory")


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_what_the_disk_does_not_give_is_listed_with_the_rest(tmp_path: Path, code: int) -> None:
    """A sector that cannot be read ends a load, and tells `verify` one block of many."""
    failing: list[str] = []

    def refuse(operation: Operation) -> None:
        if operation.kind == "pread" and operation.path in failing:
            raise OSError(code, os.strerror(code), operation.path)

    engine = ckptio.sync.Engine(SMALL)
    engine._core = FilesCore(SMALL, None, RecordingFiles(refuse))
    with engine:
        engine.save(random_state([256 * KiB, 256 * KiB]), tmp_path / "c")
        first, second = sorted((tmp_path / "c").glob("data-*"))
        flip(second, 20 * KiB)
        failing.append(str(first))
        if code == errno.EIO:
            report = engine.verify(tmp_path / "c")
            assert {error.file for error in report.damage} == {first.name, second.name}
            assert any(os.strerror(code) in str(error) for error in report.damage)
            places = {(error.file, error.start) for error in report.damage}
            assert len(places) == len(report.damage)  # each block is told once
        else:  # nothing is known of what is there
            with pytest.raises(StorageError):
                engine.verify(tmp_path / "c")
        flip(second, 20 * KiB)  # back again
        with pytest.raises(StorageError) as caught:
            engine.load(tmp_path / "c")
        assert caught.value.errno == code
