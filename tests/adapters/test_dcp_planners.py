"""Planners of one's own: the plug-ins call them as the stock ones do."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import io
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import ckptio
from ckptio.adapters.dcp import StorageReader, document
from ckptio.errors import FormatError, PlanError, TargetError, UnsupportedLeafError
from tests.adapters.rig import blank, cause, load, same, save
from tests.strategies import bytes_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem


@dataclass
class Settings:
    """A value of a class."""

    lr: float


class HalfPlanner(DefaultSavePlanner):
    """Saves floats in half precision, as DCP's documentation shows; notes who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()
        self.asked: list[str] = []
        self.written: list[int] = []

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.threads.add(threading.current_thread().name)
        self.asked.append(write_item.index.fqn)
        item = super().resolve_data(write_item)
        return item.to(torch.float16) if isinstance(item, torch.Tensor) else item


def test_a_planner_transforms_what_is_saved(tmp_path: Path) -> None:
    """It is asked once for each item, on the engine's threads, and its element type is stored."""
    planner = HalfPlanner()
    state: dict[str, Any] = {"w": torch.randn(5), "v": torch.ones(3), "step": 3, "text": "a"}
    save(dict(state), tmp_path / "c", planner=planner)
    assert sorted(planner.asked) == ["step", "text", "v", "w"]
    assert any(name.startswith("ckptio") for name in planner.threads)
    found = ckptio.sync.load(tmp_path / "c")
    assert found["w"].dtype == torch.float16
    assert (found["step"], found["text"]) == (3, "a")  # values, not pickles
    loaded = load(blank(state), tmp_path / "c")
    assert torch.equal(loaded["w"], state["w"].half().float())


def test_a_planner_may_change_the_element_type_without_a_word(tmp_path: Path) -> None:
    """What comes back is what the stock writer would have given back."""

    class Rounding(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # stock
            value = super().transform_object(write_item, object)
            return value.bfloat16() if isinstance(value, torch.Tensor) else value

    w = torch.randn(100)
    save({"w": w, "when": dt.date(2026, 1, 1)}, tmp_path / "c", planner=Rounding())
    found = load({"w": torch.zeros(100), "when": None}, tmp_path / "c")
    assert torch.equal(found["w"], w.bfloat16().float())
    assert found["when"] == dt.date(2026, 1, 1)


def test_a_planner_whose_tensor_does_not_fit_its_plan_is_refused(tmp_path: Path) -> None:
    """By name; and nothing is left."""

    class Cutting(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # stock
            return super().transform_object(write_item, object)[:1]

    with cause() as causes:
        save({"w": torch.ones(4)}, tmp_path / "c", planner=Cutting())
    assert isinstance(causes[0], PlanError)
    assert "'w'" in str(causes[0])
    assert not (tmp_path / "c").exists()


def test_tensors_are_asked_for_when_their_turn_comes(tmp_path: Path) -> None:
    """What a planner makes for an item is gone soon: never more than a few are there."""
    alive: set[int] = set()
    most: list[int] = []

    class Making(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            tensor = super().resolve_data(write_item)
            assert isinstance(tensor, torch.Tensor)
            array = tensor.numpy().copy()
            alive.add(id(array))
            weakref.finalize(array, alive.discard, id(array))
            most.append(len(alive))
            return torch.from_numpy(array)

    state = {f"t{i}": torch.randn(40_000) for i in range(40)}
    save(dict(state), tmp_path / "c", planner=Making())
    assert same(ckptio.sync.load(tmp_path / "c"), dict(sorted(state.items(), key=_number)))
    assert len(most) == 40
    assert max(most) <= 12


def _number(item: tuple[str, torch.Tensor]) -> int:
    return int(item[0][1:])


class RenamePlanner(DefaultLoadPlanner):
    """Fills tensors through ones of its own, and loads values itself, as the docs show."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.calls.append(("resolve", read_item.dest_index.fqn))
        return torch.full_like(super().resolve_tensor(read_item), -1, dtype=torch.float64)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.calls.append(("commit", read_item.dest_index.fqn))
        super().resolve_tensor(read_item).copy_(tensor * 2)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.calls.append(("bytes", read_item.dest_index.fqn))
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=False)
        super().load_bytes(read_item, io.BytesIO(value.getvalue()))


def test_a_planner_transforms_what_is_loaded(tmp_path: Path) -> None:
    """Each target is resolved once, filled in its own element type, and committed."""
    state: dict[str, Any] = {"w": torch.randn(5), "v": torch.ones(3), "step": 3}
    save(dict(state), tmp_path / "c")
    planner = RenamePlanner()
    found = load(blank(state), tmp_path / "c", planner=planner)
    assert torch.equal(found["w"], (state["w"].double() * 2).float())
    assert found["step"] == 3
    assert sorted(planner.calls) == [
        ("bytes", "step"), ("commit", "v"), ("commit", "w"), ("resolve", "v"), ("resolve", "w"),
    ]  # fmt: skip


def test_targets_that_a_planner_makes_are_few_at_a_time(tmp_path: Path) -> None:
    """Those of a wave about as large as the pool, not of the whole state."""
    state = {f"t{i}": torch.randn(40_000) for i in range(40)}  # 6.4 MB, a pool of 0.5 MB
    save(dict(state), tmp_path / "c")
    open_now = 0
    most = 0

    class Counting(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            return torch.empty_like(super().resolve_tensor(read_item))

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            nonlocal open_now
            open_now -= 1
            super().resolve_tensor(read_item).copy_(tensor)

    assert same(load(blank(state), tmp_path / "c", planner=Counting()), state)
    assert most <= 4


def test_targets_are_asked_for_as_they_lie_in_files(tmp_path: Path) -> None:
    """Of a planner that makes them; so files are read from front to back."""
    state = {"odd": torch.ones(3), "pages": torch.ones(4096)}
    save(dict(state), tmp_path / "c")
    load(blank(state), tmp_path / "c", planner=(planner := RenamePlanner()))
    places = {
        tensor.name: [(chunk.file, chunk.start) for chunk in tensor.chunks]
        for tensor in ckptio.sync.inspect(tmp_path / "c").tensors
        if tensor.name in state
    }
    in_files = sorted(places, key=places.__getitem__)
    assert in_files != list(state)
    assert [fqn for what, fqn in planner.calls if what == "resolve"] == in_files


class TextPlanner(DefaultSavePlanner):
    """Writes values as text, in a way of its own."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # stock
        value = super().transform_object(write_item, object)
        return value if isinstance(value, torch.Tensor) else io.BytesIO(repr(object).encode())


class TextLoader(DefaultLoadPlanner):
    """Reads them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read().decode()


def test_bytes_of_a_planner_survive_for_who_asks_for_them(tmp_path: Path) -> None:
    """The stock planner would unpickle whatever it is given, so a reader has to be told."""
    save({"x": torch.ones(2), "step": 3}, tmp_path / "c", planner=TextPlanner())
    with cause() as causes:
        load({"step": 0}, tmp_path / "c", planner=TextLoader())
    assert isinstance(causes[0], FormatError)
    assert "allow_opaque" in str(causes[0])
    reader = StorageReader(tmp_path / "c", allow_opaque=True)
    assert load({"step": 0}, storage_reader=reader, planner=TextLoader())["step"] == "3"


def test_a_pickle_that_a_planner_makes_of_a_class_is_refused(tmp_path: Path) -> None:
    """There is no portable form of it, and a pickle is not kept."""

    class Wrapping(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # stock
            return super().transform_object(write_item, Settings(object))

    with cause() as causes:
        save({"step": 3}, tmp_path / "c", planner=Wrapping())
    assert isinstance(causes[0], UnsupportedLeafError)
    assert not (tmp_path / "c").exists()


def test_a_target_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """By the stock planner where it looks, by the reader where a planner does not."""

    class Cutting(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            target: torch.Tensor = super().resolve_tensor(read_item)
            return target[:1]

    save({"w": torch.ones(4)}, tmp_path / "c")
    with cause() as causes:
        load({"w": torch.zeros(4)}, tmp_path / "c", planner=Cutting())
    assert isinstance(causes[0], TargetError)


@pytest.mark.parametrize("nbytes", [3000, 100_000, 1_000_000])
def test_large_and_small_slabs_give_the_same_bytes(tmp_path: Path, nbytes: int) -> None:
    """A tensor of many segments is asked for once."""
    state = {"w": torch.randint(0, 256, (nbytes,), dtype=torch.uint8)}
    save(dict(state), tmp_path / "c", planner=(planner := AskedPlanner()))
    assert planner.asked == ["w"]
    assert bytes_of(ckptio.sync.load(tmp_path / "c")["w"]) == bytes_of(state["w"])


class AskedPlanner(DefaultSavePlanner):
    """Notes what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.asked.append(write_item.index.fqn)
        return super().resolve_data(write_item)


class Leaving(DefaultSavePlanner):
    """Raises what no loop passes on, at the tensor that is written last."""

    def __init__(self, leave: type[BaseException]) -> None:
        super().__init__()
        self.leave = leave

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "b":
            raise self.leave
        return super().resolve_data(write_item)


@pytest.mark.parametrize(
    "leave", [StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
)
def test_a_planner_that_leaves_ends_its_save(tmp_path: Path, leave: type[BaseException]) -> None:
    """It runs on a thread of the engine: whoever waits for the save is told, and is not left."""
    before = {"a": torch.zeros(9), "b": torch.zeros(3)}
    save(before, tmp_path / "c")
    with cause() as causes:
        save({"a": torch.ones(9), "b": torch.ones(3)}, tmp_path / "c", planner=Leaving(leave))
    assert [type(error) for error in causes] == [PlanError]
    assert type(causes[0].__cause__) is leave
    assert same(ckptio.sync.load(tmp_path / "c"), before)


class Placing(DefaultSavePlanner):
    """Says on its own where values are in the state."""

    def __init__(self, planner_data: Any) -> None:
        super().__init__()
        self._planner_data = planner_data

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=self._planner_data)


@pytest.mark.parametrize(
    ("planner_data", "tree"),
    [
        (None, {"v": 5, "w": "x"}),
        ({"v": [1, (2,)], "other": 3}, {"v": 5, "w": "x"}),
        ({"v": ("l", 0), "w": ("l", 1)}, {"l": [5, "x"]}),
        ({"v": ("l", 1), "w": ("l", 2)}, {"l": {1: 5, 2: "x"}}),
        ({"v": ("l", -1), "w": ("l", 0)}, {"l": {-1: 5, 0: "x"}}),
        ({"v": ("l", 0), "w": ("l", "0")}, {"l": {0: 5, "0": "x"}}),
        ({"v": ("p",), "w": ("p",)}, {"v": 5, "w": "x"}),  # one place for both
        ({"v": ("p",), "w": ("p", "q")}, {"v": 5, "w": "x"}),  # one inside of the other
        ({"v": ("p", "q"), "w": ("p",)}, {"v": 5, "w": "x"}),
    ],
    ids=str,
)
def test_values_are_where_a_planner_has_them(tmp_path: Path, planner_data: Any, tree: Any) -> None:
    """Under their names where two have one place; and DCP finds each, and what the planner said."""
    save({"v": 5, "w": "x"}, tmp_path / "c", planner=Placing(planner_data))
    assert StorageReader(tmp_path / "c").read_metadata().planner_data == planner_data
    assert same(load({"v": None, "w": None}, tmp_path / "c"), {"v": 5, "w": "x"})
    assert same(ckptio.sync.load(tmp_path / "c"), tree)


def test_a_document_that_readers_refuse_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look whole, and load no more."""
    save({"v": 5}, tmp_path / "c", planner=Placing("x" * 1000))
    monkeypatch.setattr(document, "MAX_DOCUMENT_NBYTES", 1000)
    with cause() as causes:
        save({"v": 6}, tmp_path / "c", planner=Placing("x" * 1000))
    assert isinstance(causes[0], FormatError)
    assert "readers take 1000" in str(causes[0])
    assert same(load({"v": None}, tmp_path / "c"), {"v": 5})
