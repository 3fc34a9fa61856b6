"""Files of other programs that are written anew while they are loaded."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import sync
from ckptio.errors import CheckpointChangedError, CheckpointError
from ckptio.events import LoadStarted
from ckptio.foreign.folder import LocalFolder
from tests.foreign.rig import save_dcp, save_hf
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path

    from ckptio.events import Event

pytestmark = pytest.mark.usefixtures("no_leaks")
#: Writes a file over in place, again and again, as `torch.save` to the same path does.
OVERWRITE = """
import sys
data = open(sys.argv[1], "rb").read()
for _ in range(300):
    with open(sys.argv[2], "wb") as file:
        file.write(data)
"""


def save_as(kind: str, path: Path, value: float) -> Path:
    """Save a tensor of one value."""
    state = {"w": torch.full((100_000,), value)}
    path.mkdir()
    if kind == "torch.save":
        torch.save(state, path / "state.pt")
        return path / "state.pt"
    return save_hf(path / "x", state, 1) if kind == "safetensors" else save_dcp(path / "x", state)


@pytest.mark.parametrize("how", ["replaced", "written over"])
@pytest.mark.parametrize("kind", ["torch.save", "safetensors", "dcp"])
def test_what_is_replaced_before_it_is_read_is_not_mixed(
    kind: str, how: str, tmp_path: Path
) -> None:
    """A new file is no part of what was looked at, though it may have the same size."""
    path, other = (save_as(kind, tmp_path / f"{i}", float(i)) for i in (1, 2))
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]

    def replace(event: Event) -> None:
        if isinstance(event, LoadStarted):
            for file in files:
                new = other if other.is_file() else other / file.name
                if how == "replaced":
                    os.replace(new, file)
                else:
                    file.write_bytes(new.read_bytes())

    target: dict[str, Any] = {"w": torch.zeros(100_000)}
    with sync.Engine(SMALL, observer=replace) as engine:
        with pytest.raises(CheckpointChangedError):
            engine.load(path, into=target)
        assert not target["w"].any()
    assert sync.load(path, config=SMALL)["w"].eq(2).all()


def test_a_file_of_torch_save_that_is_written_over_ends_no_process(tmp_path: Path) -> None:
    """It is not mapped: a load gives something that was there, or a typed error."""
    path, other = (save_as("torch.save", tmp_path / f"{i}", 1.0) for i in (1, 2))
    order = [sys.executable, "-c", OVERWRITE, str(other), str(path)]
    with subprocess.Popen(order) as process:
        while process.poll() is None:
            with contextlib.suppress(CheckpointError):
                assert sync.load(path, config=SMALL)["w"].shape == (100_000,)
    assert process.returncode == 0
    assert sync.load(path, config=SMALL)["w"].eq(1).all()


@pytest.mark.parametrize("kind", ["torch.save", "safetensors", "dcp"])
def test_a_link_that_leads_elsewhere_gives_what_it_leads_to(kind: str, tmp_path: Path) -> None:
    """Links are followed once for a load, and anew for the next one."""
    first, second = (save_as(kind, tmp_path / f"{i}", float(i)) for i in (1, 2))
    link = tmp_path / ("latest.pt" if first.is_file() else "latest")
    with sync.Engine(SMALL) as engine:
        for path, value in ((first, 1), (second, 2), (first, 1)):
            link.unlink(missing_ok=True)
            link.symlink_to(path)
            assert engine.load(link)["w"].eq(value).all()


@pytest.mark.parametrize("kind", ["torch.save", "safetensors", "dcp"])
def test_a_link_that_moves_while_it_is_read_mixes_nothing(kind: str, tmp_path: Path) -> None:
    """The load goes on with what it was, all of it, or fails."""
    first, second = (save_as(kind, tmp_path / f"{i}", float(i)) for i in (1, 2))
    link = tmp_path / ("latest.pt" if first.is_file() else "latest")
    link.symlink_to(first)

    def move(event: Event) -> None:
        if isinstance(event, LoadStarted):
            link.unlink()
            link.symlink_to(second)

    with sync.Engine(SMALL, observer=move) as engine, contextlib.suppress(CheckpointChangedError):
        assert engine.load(link)["w"].eq(1).all()
    assert sync.load(link, config=SMALL)["w"].eq(2).all()


def test_a_file_that_is_another_by_now_is_not_looked_at_as_the_same(tmp_path: Path) -> None:
    """What is read is of the first, so a look must not be of the second."""
    first, second = (save_as("torch.save", tmp_path / f"{i}", float(i)) for i in (1, 2))
    (tmp_path / "latest.pt").symlink_to(first)
    folder = LocalFolder(str(tmp_path))
    assert folder.read("latest.pt", 0, 4)
    (tmp_path / "latest.pt").unlink()
    (tmp_path / "latest.pt").symlink_to(second)
    with pytest.raises(CheckpointChangedError):
        folder.status("latest.pt")


def test_a_file_that_goes_after_it_was_looked_at_is_a_change(tmp_path: Path) -> None:
    """Whoever loads is told to begin anew, and not that a path is wrong."""
    path = save_as("torch.save", tmp_path / "1", 1.0)
    folder = LocalFolder(str(path.parent))
    assert folder.status(path.name) is not None
    path.unlink()
    with pytest.raises(CheckpointChangedError):
        folder.read(path.name, 0, 4)
    with pytest.raises(CheckpointChangedError):
        folder.open(path.name, 4)
