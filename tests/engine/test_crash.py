"""The crash matrix: stop after operation k, for all k; what is committed still loads."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ckptio.config import KiB
from ckptio.errors import SaveAbortedError
from ckptio.storage.local import LocalStorage
from ckptio.testing import EventLog, RecordingFiles, crash_at, run_virtual
from tests.rig import (
    assert_same,
    assert_tidy,
    committed,
    config_with,
    inline_engine,
    is_same,
    names_in,
    random_state,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from ckptio.storage.files import PosixFiles

pytestmark = pytest.mark.usefixtures("no_leaks")
CONFIG = config_with(block_nbytes=64 * KiB, durability="full")
OLD = random_state([5000, 100], 1)
NEW = random_state([100 * KiB, 3000, 200 * KiB], 2)
NEXT = random_state([10], 3)


def save(
    directory: Path,
    state: Mapping[str, torch.Tensor],
    files: PosixFiles | None = None,
    *,
    overwrite: bool = True,
    seed: int = 0,
) -> bool:
    """Save in a process of its own, as far as anybody can tell; false if it crashed."""

    async def scenario() -> bool:
        with ThreadPoolExecutor(1) as unused:
            storage = LocalStorage(str(directory), CONFIG, unused, EventLog(), files)
            async with inline_engine({"c": storage}, CONFIG) as engine:
                try:
                    await engine.save(state, "c", overwrite=overwrite)
                except SaveAbortedError:
                    return False
                return True

    try:
        return run_virtual(scenario(), seed=seed)
    finally:
        if isinstance(files, RecordingFiles):
            files.bury()


def load(directory: Path) -> dict[str, torch.Tensor]:
    async def scenario() -> dict[str, torch.Tensor]:
        with ThreadPoolExecutor(1) as unused:
            storage = LocalStorage(str(directory), CONFIG, unused, EventLog())
            async with inline_engine({"c": storage}, CONFIG) as engine:
                state: dict[str, torch.Tensor] = await engine.load("c")
                return state

    return run_virtual(scenario(), seed=0)


def sweep(directory: Path, num_crashed: int = 1) -> None:
    """Save once more, and check that nothing of the crashed saves is left."""
    assert save(directory, NEXT)
    assert_same(load(directory), NEXT)
    # an attempt that died while it was being born cannot be told from one that is being
    # born now, for an hour; nor can what was about to remove the files of one
    unborn = [name for name in names_in(directory) if name.startswith(".attempt-")]
    for marker in unborn:
        assert os.stat(directory / marker).st_size == 0
        for name in names_in(directory):
            if marker.removeprefix(".attempt-") in name:
                os.utime(directory / name, (0, 0))
    if unborn:
        assert len(unborn) <= num_crashed
        assert save(directory, NEXT)
    assert_tidy(directory)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "overwrite"])
@pytest.mark.parametrize("has_exchange", [True, False], ids=["exchange", "copy"])
def test_a_crash_at_any_operation_leaves_the_old_or_the_new(
    tmp_path: Path, *, fresh: bool, has_exchange: bool
) -> None:
    """What is committed loads bit for bit, and the next save removes what the dead one left."""
    outcomes = []
    for number in itertools.count():
        directory = tmp_path / str(number) / "c"
        if not fresh:
            assert save(directory, OLD)
        files = RecordingFiles(crash_at(number), has_exchange=has_exchange)
        finished = save(directory, NEW, files, overwrite=not fresh)
        found = committed(directory)
        if found is None:
            assert fresh
            assert not finished
            outcomes.append("nothing")
        else:
            state = load(directory)
            outcomes.append("new" if is_same(state, NEW) else "old")
            assert_same(state, NEW if outcomes[-1] == "new" else OLD)
            assert outcomes[-1] == "new" or not (fresh or finished)
        sweep(directory)
        if finished and number >= len(files.operations):
            break
    # once it is new it stays new
    assert outcomes == sorted(outcomes, key=["nothing", "old", "new"].index)
    assert set(outcomes) == {"nothing" if fresh else "old", "new"}
    assert len(outcomes) > 20


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(5))
def test_a_crash_after_a_crash_loses_nothing(tmp_path: Path, seed: int) -> None:
    """Two saves in a row crash, at any two operations; the checkpoint before them is whole."""
    for first in range(0, 60, 4):
        for second in range(0, 60, 3):
            directory = tmp_path / f"{first}-{second}"
            assert save(directory, OLD)
            allowed = [OLD]
            for number, state in ((first, NEW), (second, NEXT)):
                files = RecordingFiles(crash_at(number))
                save(directory, state, files, seed=seed)
                found = load(directory)
                if is_same(found, state):
                    allowed = [state]
                assert any(is_same(found, one) for one in allowed)
            sweep(directory, 2)
