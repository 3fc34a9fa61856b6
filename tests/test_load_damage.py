"""Damage is told before a byte of the target changes that it could reach."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio.errors import (
    CorruptionError,
)
from tests.loads import BLOCK, blank, sample, tensors_of
from tests.strategies import assert_same, random_tensor

if TYPE_CHECKING:
    from pathlib import Path

    from ckptio import sync


def truncate(path: str) -> None:
    os.truncate(path, os.path.getsize(path) - 1)


def extend(path: str) -> None:
    os.truncate(path, os.path.getsize(path) + 1)


def empty(path: str) -> None:
    os.truncate(path, 0)


def link(path: str) -> None:
    os.rename(path, path + ".real")
    os.symlink(path + ".real", path)


def fifo(path: str) -> None:
    os.unlink(path)
    os.mkfifo(path)


def directory(path: str) -> None:
    os.unlink(path)
    os.mkdir(path)


@pytest.mark.parametrize("harm", [truncate, extend, empty, os.unlink, link, fifo, directory])
@pytest.mark.parametrize("which", [0, -1])
def test_sizes_are_checked_before_the_first_byte_changes(
    engine: sync.Engine, tmp_path: Path, harm: Any, which: int
) -> None:
    """Whatever happened to a file: a typed error, and a target as it was."""
    state = sample()
    engine.save(state, tmp_path / "c")
    name = sorted(n for n in os.listdir(tmp_path / "c") if n.endswith(".safetensors"))[which]
    harm(str(tmp_path / "c" / name))
    target = blank(state)
    with pytest.raises(CorruptionError) as caught:
        engine.load(tmp_path / "c", target)
    assert caught.value.file == name
    assert caught.value.fqns or harm is extend
    assert not any(tensor.any() for _, tensor in tensors_of("", target))
    assert target["n"] is None
    with pytest.raises(CorruptionError):
        engine.load(tmp_path / "c")
    report = engine.verify(tmp_path / "c")
    assert [error.file for error in report.damage] == [name]


def test_a_block_lands_only_after_its_checksum(engine: sync.Engine, tmp_path: Path) -> None:
    """Damaged bytes never reach a target; the error says which tensor they are of."""
    state = {"w": torch.full((100 * 1024,), 7, dtype=torch.uint8), "x": torch.ones(3)}
    engine.save(state, tmp_path / "c")
    (name,) = (n for n in os.listdir(tmp_path / "c") if n.endswith(".safetensors"))
    for start in (4096, 4096 + 50_000, 4096 + 100 * 1024 - 1):
        with open(tmp_path / "c" / name, "r+b") as file:
            file.seek(start)
            file.write(b"\x63")
        target = {"w": torch.zeros(100 * 1024, dtype=torch.uint8), "x": torch.zeros(3)}
        with pytest.raises(CorruptionError) as caught:
            engine.load(tmp_path / "c", target)
        assert not (target["w"] == 0x63).any()
        block = target["w"][(start - 4096) // BLOCK * BLOCK :][:BLOCK]
        assert not block.any()
        assert caught.value.start <= start < caught.value.stop
        assert "w" in caught.value.fqns
        assert [e.start for e in engine.verify(tmp_path / "c").damage] == [start // BLOCK * BLOCK]
        with open(tmp_path / "c" / name, "r+b") as file:
            file.seek(start)
            file.write(b"\x07")
    assert_same(engine.load(tmp_path / "c"), state)


def test_a_load_of_everything_verifies_what_is_no_tensor(
    engine: sync.Engine, tmp_path: Path
) -> None:
    """The header of a data file, say, which other readers go by."""
    path = str(tmp_path / "c")
    engine.save({"w": torch.ones(20 * BLOCK)}, path)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(8)
        opened.write(b"[")
    for target in (None, {"w": torch.zeros(20 * BLOCK)}):
        with pytest.raises(CorruptionError) as caught:
            engine.load(path, target)
        assert (caught.value.start, caught.value.stop) == (0, BLOCK)
    engine.load(path, select="w")


def test_what_is_not_selected_may_be_damaged(engine: sync.Engine, tmp_path: Path) -> None:
    """A damaged tensor does not keep the others from being loaded."""
    state = {
        "a": random_tensor((300_000,), torch.uint8),
        "b": random_tensor((300_000,), torch.uint8),
    }
    engine.save(state, tmp_path / "c")
    names = [n for n in os.listdir(tmp_path / "c") if n.endswith(".safetensors")]
    assert len(names) == 2
    os.unlink(tmp_path / "c" / min(names))
    good = []
    for name, tensor in state.items():
        with contextlib.suppress(CorruptionError):
            assert_same(engine.load(tmp_path / "c", select=name), {name: tensor})
            good.append(name)
    assert len(good) == 1
