"""Targets that share memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import ckptio.sync
from ckptio.errors import TargetError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def apart(tmp_path: Path) -> str:
    """A checkpoint of two tensors that have nothing in common."""
    path = str(tmp_path / "apart")
    ckptio.sync.save({"a": torch.ones(4), "b": torch.full((4,), 2.0)}, path)
    return path


def test_of_one_tensor_under_two_names_the_first_is_loaded(apart: str) -> None:
    """Memory holds one of two stored tensors; which, and that it is so, is said."""
    tensor = torch.zeros(4)
    result = ckptio.sync.load_with_report(apart, into={"b": tensor, "a": tensor})
    assert torch.equal(tensor, torch.full((4,), 2.0))
    (note,) = result.report.notes
    assert note.startswith("a: is one tensor with 'b' in the target")


def test_what_overlaps_in_part_is_refused(apart: str) -> None:
    """Neither would come whole; nothing changes."""
    memory = torch.zeros(6)
    with pytest.raises(TargetError, match="'b' and 'a': they share a part of their memory"):
        ckptio.sync.load(apart, into={"a": memory[:4], "b": memory[1:5]})
    assert not memory.any()


@pytest.mark.parametrize("parts", [(slice(4), slice(4, 8)), (slice(None, None, 2), slice(1, 8, 2))])
def test_parts_of_one_memory_beside_each_other_are_filled(
    apart: str, parts: tuple[slice, slice]
) -> None:
    """Halves of a buffer, and strided views that lie between each other."""
    memory = torch.zeros(8)
    first, second = parts
    result = ckptio.sync.load_with_report(apart, into={"a": memory[first], "b": memory[second]})
    assert torch.equal(memory[first], torch.ones(4))
    assert torch.equal(memory[second], torch.full((4,), 2.0))
    assert not result.report.notes


def test_what_was_saved_as_views_of_one_memory_is_filled_as_such(tmp_path: Path) -> None:
    """Tied tensors and views take the same stored bytes."""
    saved = torch.arange(8.0)
    path = str(tmp_path / "tied")
    ckptio.sync.save({"whole": saved, "view": saved[2:5], "again": saved}, path)
    memory = torch.zeros(8)
    target = {"whole": memory, "view": memory[2:5], "again": memory}
    assert not ckptio.sync.load_with_report(path, into=target).report.notes
    assert torch.equal(memory, saved)
