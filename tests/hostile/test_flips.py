"""Flip every byte of a small checkpoint, one at a time: `load` and `verify` see each.

The state is small, so that its one data file is a page of header and a few hundred bytes;
padding, which no tensor needs, is damaged, too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import sync
from ckptio.errors import CorruptionError, FormatError
from tests.rig import config_with
from tests.strategies import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOCK = 4096


@pytest.fixture(scope="module")
def engine() -> Iterator[sync.Engine]:
    with sync.Engine(config_with(direct_io="off", durability="none")) as engine:
        yield engine


def sample() -> dict[str, Any]:
    return {
        "w": torch.arange(20.0),
        "tied": {1: torch.arange(9, dtype=torch.int16)},
        "bytes": b"short",
        "nan": float("nan"),
        "text": "é",
    }


def flip_each(path: str, check: Callable[[int], None]) -> int:
    """Flip a bit of each byte of a file, check what that does, and flip it back."""
    fd = os.open(path, os.O_RDWR)
    try:
        data = os.pread(fd, 1 << 20, 0)
        for i, byte in enumerate(data):
            os.pwrite(fd, bytes([byte ^ 1 << i % 8]), i)
            check(i)
            os.pwrite(fd, data[i : i + 1], i)
    finally:
        os.close(fd)
    return len(data)


def test_every_flipped_byte_of_the_data_is_found(engine: sync.Engine, tmp_path: Path) -> None:
    """Header, padding and data: `load` raises, `verify` names the block."""
    engine.save(sample(), tmp_path / "c")
    (name,) = (n for n in os.listdir(tmp_path / "c") if n.endswith(".safetensors"))

    def check(position: int) -> None:
        with pytest.raises(CorruptionError) as caught:
            engine.load(tmp_path / "c")
        assert caught.value.file == name
        assert caught.value.start <= position < caught.value.stop
        (error,) = engine.verify(tmp_path / "c").damage
        assert error.start == position // BLOCK * BLOCK

    assert flip_each(str(tmp_path / "c" / name), check) > BLOCK
    assert_same(engine.load(tmp_path / "c"), sample())


def test_every_flipped_byte_of_the_manifest_is_found(engine: sync.Engine, tmp_path: Path) -> None:
    """Names, sizes, values, the checksum itself: nothing is loaded, nothing can be verified."""
    engine.save(sample(), tmp_path / "c")

    def check(position: int) -> None:
        for operation in (engine.load, engine.verify, engine.inspect):
            with pytest.raises(FormatError):
                operation(tmp_path / "c")
        assert position >= 0

    assert flip_each(str(tmp_path / "c" / "manifest.json"), check) > 300
    assert_same(engine.load(tmp_path / "c"), sample())


def test_no_flipped_byte_of_the_data_reaches_a_target(engine: sync.Engine, tmp_path: Path) -> None:
    """With `into=`, what a damaged block would have changed is as it was."""
    engine.save({"w": torch.zeros(64, dtype=torch.uint8)}, tmp_path / "c")
    (name,) = (n for n in os.listdir(tmp_path / "c") if n.endswith(".safetensors"))
    target = {"w": torch.full((64,), 7, dtype=torch.uint8)}
    for position in range(BLOCK, BLOCK + 64):
        with open(tmp_path / "c" / name, "r+b") as file:
            file.seek(position)
            file.write(b"\x63")
        with pytest.raises(CorruptionError):
            engine.load(tmp_path / "c", target)
        assert (target["w"] == 7).all()
        with open(tmp_path / "c" / name, "r+b") as file:
            file.seek(position)
            file.write(b"\0")
