"""The state of an optimizer on its way through torch.distributed.checkpoint."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import sync
from tests.adapters.rig import save
from tests.cli.rig import run_json
from tests.foreign.rig import assert_same_state, save_dcp
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path


def make_run(kind: str = "AdamW", *, steps: int = 1) -> tuple[torch.nn.Module, Any]:
    """Train a model for some steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def saved(path: Path, kind: str, way: str) -> tuple[Path, Any]:
    """Save a run: by stock DCP, by ours and a conversion, and back again."""
    model, optimizer = make_run(kind)
    state = {"model": model.state_dict(), "opt": optimizer.state_dict()}
    expected = copy.deepcopy(state["opt"])
    if way == "stock":
        return save_dcp(path / "dcp", state), expected
    sync.save(state, path / "ours", config=SMALL)
    sync.convert(path / "ours", path / "dcp", to="dcp", config=SMALL)
    if way == "to dcp":
        return path / "dcp", expected
    sync.convert(path / "dcp", path / "back", to="ckptio", config=SMALL)
    return path / "back", expected


@pytest.mark.parametrize("way", ["stock", "to dcp", "and back", "plug-in"])
def test_without_a_target_its_numbers_are_numbers(way: str, tmp_path: Path) -> None:
    """The groups list them: under strings, an optimizer would take the state and find none."""
    if way == "plug-in":
        _, trained = make_run()
        expected = copy.deepcopy(trained.state_dict())
        save({"opt": trained.state_dict()}, tmp_path / "dcp")
        path = tmp_path / "dcp"
    else:
        path, expected = saved(tmp_path, "AdamW", way)
    model, optimizer = make_run(steps=0)
    found = sync.load(path, config=SMALL)["opt"]
    assert_same_state(found, expected)
    optimizer.load_state_dict(found)
    assert_same_state(optimizer.state_dict(), expected)
    assert optimizer.state.keys() == set(model.parameters())


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("way", ["stock", "to dcp", "and back"])
def test_an_optimizer_is_filled_from_what_came_through_dcp(
    kind: str, way: str, tmp_path: Path
) -> None:
    """Keys are strings there, and an empty state is not there: SGD has none."""
    path, expected = saved(tmp_path, kind, way)
    model, optimizer = make_run(kind, steps=3)
    target = {"model": model.state_dict(), "opt": optimizer.state_dict()}
    sync.load(path, into=target, config=SMALL)
    assert_same_state(target["opt"], expected)
    for steps in (0, 2):  # that has stepped, and that has not
        model, optimizer = make_run(kind, steps=steps)
        sync.load(path, into={"model": model, "opt": optimizer}, config=SMALL)
        assert_same_state(optimizer.state_dict(), expected)


def test_a_number_does_not_take_what_belongs_to_its_digits(tmp_path: Path) -> None:
    """Where the target has both, each takes its own."""
    sync.save({"x": {1: torch.ones(1), "1": torch.zeros(1)}}, tmp_path / "ours", config=SMALL)
    target = {"x": {1: torch.full((1,), 5.0), "1": torch.full((1,), 5.0)}}
    sync.load(tmp_path / "ours", into=target, config=SMALL)
    assert [float(value) for value in target["x"].values()] == [1, 0]


def test_what_dcp_does_not_keep_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the report, and on the command line."""
    state = {"opt": {"state": {0: torch.ones(1)}, "more": {}}, "list": [{}, [1, {}]], "t": ({},)}
    sync.save(state, tmp_path / "ours", config=SMALL)
    notes = (
        "opt.state: keys that are no strings come back as strings",
        "opt.more: an empty dict is not kept",
        "list.0: an empty dict is not kept",
        "list.1.1: an empty dict is not kept",
    )
    report = sync.convert(tmp_path / "ours", tmp_path / "dcp", to="dcp", config=SMALL)
    assert report.notes == notes
    assert not sync.convert(tmp_path / "dcp", tmp_path / "back", to="dcp", config=SMALL).notes
    code, document = run_json(
        capsys, "convert", str(tmp_path / "ours"), str(tmp_path / "again"), "--to=dcp"
    )
    assert code == 0
    assert tuple(document["notes"]) == notes
