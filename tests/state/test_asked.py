"""An object is asked for its state only where nothing else says what is meant."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ckptio import PerRank, sync
from ckptio.errors import MismatchError, TargetError, UnsupportedLeafError
from tests.rig import SMALL
from tests.state.objects import App
from tests.strategies import assert_same

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Mode(enum.Enum):
    """What a loader may have in its state."""

    TRAIN = "train"


class Loader:
    """Makes an iterator when it is asked for its state, and gives that next: torchdata's does."""

    def __init__(self, length: int = 10, **more: Any) -> None:
        self.length, self.more = length, more
        self.at: int | None = None
        self.start = 0
        self.num_asked = 0

    def __iter__(self) -> Iterator[int]:
        if self.at is None:
            self.at, self.start = self.start, 0
        while self.at < self.length:
            self.at += 1
            yield self.at - 1
        self.at = None

    def state_dict(self) -> dict[str, Any]:
        self.num_asked += 1
        if self.at is None:
            self.at, self.start = self.start, 0
        return {"at": self.at, "worker": {"seeds": (1, 2)}, **self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.more = state["at"], {key: state[key] for key in self.more}


def loader_at(position: int, **more: Any) -> Loader:
    loader = Loader(**more)
    iterator = iter(loader)
    for _ in range(position):
        next(iterator)
    return loader


@pytest.mark.parametrize("wrap", [lambda x: x, PerRank, lambda x: {"a": [x], "n": 1}])
@pytest.mark.parametrize("select", [None, "x"])
def test_an_object_with_nothing_to_fill_is_not_asked(
    tmp_path: Path, wrap: Any, select: str | None
) -> None:
    """What would say what it has may change it."""
    saved, target = loader_at(4), Loader()
    sync.save({"x": wrap(saved), "y": 1}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": wrap(target), "y": 0}, select=select, config=SMALL)
    assert target.num_asked == 0
    assert list(target) == [4, 5, 6, 7, 8, 9]
    file = tmp_path / "a.pt"
    torch.save({"x": saved.state_dict()}, file)
    target = Loader()
    sync.load(file, {"x": target})
    assert list(target) == [4, 5, 6, 7, 8, 9]


def test_an_object_that_is_not_asked_says_what_it_lacks(tmp_path: Path) -> None:
    """An error with its name; and who loads what fits is told, and given what it has."""
    sync.save({"x": loader_at(4)}, tmp_path / "c", config=SMALL)
    with pytest.raises(TargetError, match=r"'x' does not take its state: KeyError\('epoch'\)"):
        sync.load(tmp_path / "c", {"x": Loader(epoch=3)}, config=SMALL)
    target = Loader(epoch=3)
    report = sync.load_with_report(tmp_path / "c", {"x": target}, config=SMALL).report
    assert report.missing == ("x.epoch",)
    assert (target.start, target.more) == (4, {"epoch": 3})


class Numbered:
    """Fails by a key that Python does not write."""

    def state_dict(self) -> dict[int, Any]:
        raise KeyError(10**5000)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError(10 ** state["digits"])


def test_what_an_object_raises_is_told_though_it_cannot_be_shown(tmp_path: Path) -> None:
    """By its kind: an error of whoever tells of it would say nothing of the object."""
    with pytest.raises(UnsupportedLeafError, match=r"'x': .* KeyError, which cannot be shown"):
        sync.save({"x": Numbered()}, tmp_path / "c", config=SMALL)
    sync.save({"x": {"digits": 5000}}, tmp_path / "d", config=SMALL)
    with pytest.raises(TargetError, match="'x' does not take its state: KeyError, which cannot"):
        sync.load(tmp_path / "d", {"x": Numbered()}, config=SMALL)


@pytest.mark.parametrize(
    ("more", "own"),
    [
        ({"mode": Mode.TRAIN}, {"mode": Mode.TRAIN}),
        ({"n": PerRank(3)}, {"n": PerRank(0)}),
        ({"n": torch.ones(2)}, {"n": torch.zeros(2)}),
        ({"n": np.ones(2)}, {"n": np.zeros(2)}),
        ({"n": {"0": 1}}, {"n": {0: 0}}),
    ],
    ids=str,
)
def test_an_object_is_asked_where_only_it_can_say_what_is_meant(
    tmp_path: Path, more: dict[str, Any], own: dict[str, Any]
) -> None:
    """Classes, values of each rank, tensors, and numbers that were written as strings."""
    sync.save({"x": loader_at(4, **more)}, tmp_path / "c", config=SMALL)
    target = Loader(**own)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert target.num_asked == 1
    expected = {"n": {0: 1}} if isinstance(more.get("n"), dict) else more
    assert_same(target.more, expected)


def test_an_object_is_asked_for_what_is_not_selected(tmp_path: Path) -> None:
    sync.save({"x": loader_at(4, epoch=7)}, tmp_path / "c", config=SMALL)
    target = Loader(epoch=3)
    sync.load(tmp_path / "c", {"x": target}, select="x.at", config=SMALL)
    assert (target.start, target.more) == (4, {"epoch": 3})


def test_an_object_that_has_a_model_takes_tensors(tmp_path: Path) -> None:
    """What has none for it is another checkpoint; that is said before anything changes."""
    sync.save({"a": torch.ones(2), "x": {"step": 3}}, tmp_path / "c", config=SMALL)
    target = {"a": torch.zeros(2), "x": App(3, has_hook=False)}
    with pytest.raises(MismatchError, match=r"x\.model\.weight"):
        sync.load(tmp_path / "c", target, config=SMALL)
    assert not target["a"].any()  # type: ignore[attr-defined]  # a tensor
