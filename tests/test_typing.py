from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import TYPE_CHECKING, Any, assert_type, get_type_hints

import torch

import ckptio
from ckptio import events, sync
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path

State = dict[str, torch.Tensor]


async def test_a_target_comes_back_as_what_it_is(tmp_path: Path) -> None:
    """Type checkers know it, too; without a target, nobody knows what is stored."""
    state: State = {"w": torch.zeros(3)}
    path = tmp_path / "a"
    await ckptio.save(state, path, config=SMALL)
    loaded = await ckptio.load(path, state, config=SMALL)
    assert_type(loaded, State)
    assert loaded is state
    assert_type(await ckptio.load(path, config=SMALL), Any)
    async with ckptio.Engine(SMALL) as engine:
        assert_type(await engine.load(path, into=state), State)
        assert_type(await engine.load(path), Any)
        assert_type(await engine.load(path, None), Any)
    async with ckptio.Checkpointer(tmp_path / "run", config=SMALL) as ckpt:
        await ckpt.save(state, 1)
        assert_type(await ckpt.load(state), State)
        assert_type(await ckpt.load(), Any)


def test_blocking_twins_return_the_same(tmp_path: Path) -> None:
    """Of the functions, the engine and the checkpointer."""
    state: State = {"w": torch.zeros(3)}
    path = tmp_path / "a"
    sync.save(state, path, config=SMALL)
    assert_type(sync.load(path, state, config=SMALL), State)
    assert_type(sync.load(path, config=SMALL), Any)
    with sync.Engine(SMALL) as engine:
        assert_type(engine.load(path, into=state), State)
        assert_type(engine.load(path), Any)
    with sync.Checkpointer(tmp_path / "run", config=SMALL) as ckpt:
        ckpt.save(state, 1)
        assert_type(ckpt.load(state), State)
        assert_type(ckpt.load(), Any)


async def test_blocking_twins_are_handed_to_threads(tmp_path: Path) -> None:
    """With a target and without; type checkers need no annotation there."""
    state: State = {"w": torch.zeros(3)}
    path = tmp_path / "a"
    sync.save(state, path, config=SMALL)
    assert_type(await asyncio.to_thread(sync.load, path), Any)
    assert_type(await asyncio.to_thread(sync.load, path, state), State)
    with sync.Engine(SMALL) as engine, sync.Checkpointer(tmp_path, config=SMALL) as ckpt:
        assert_type(await asyncio.to_thread(engine.load, path), Any)
        assert_type(await asyncio.to_thread(engine.load, path, state), State)
        ckpt.save(state, 1)
        assert_type(await asyncio.to_thread(ckpt.load), Any)
        assert_type(await asyncio.to_thread(ckpt.load, state), State)


def test_what_callers_pass_need_not_be_the_narrowest_type(tmp_path: Path) -> None:
    """Sets of names and classes, functions that return something else than a bool or None."""
    seen = set[str]()

    def watch(event: events.Event) -> bool:
        seen.add(event.path)
        return True

    state: State = {"w": torch.zeros(3), "b": torch.zeros(1)}
    with sync.Engine(SMALL, observer=watch) as engine:
        engine.save(state, tmp_path / "a")
        assert engine.load(tmp_path / "a", select={"w"}, types=frozenset[type]()).keys() == {"w"}
        assert engine.load(tmp_path / "a", select=state.keys()).keys() == {"w", "b"}
        assert engine.load(tmp_path / "a", select=re.compile("b").match).keys() == {"b"}
    assert str(tmp_path / "a") in seen


def test_the_types_of_fields_are_known_where_the_program_runs() -> None:
    """Encoders and validators look at them. Not of what has a tensor: torch may not be there."""
    public = [getattr(ckptio, name) for name in ckptio.__all__]
    public += [getattr(events, name) for name in events.__all__]
    kinds = [kind for kind in public if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    assert ckptio.StepRecord in kinds
    for kind in kinds:
        if kind is not ckptio.Shard:
            assert get_type_hints(kind).keys() >= {field.name for field in dataclasses.fields(kind)}


async def test_results_of_loads_can_be_compared(tmp_path: Path) -> None:
    """By their reports: tensors have no one answer."""
    path = tmp_path / "a"
    await ckptio.save({"w": torch.zeros(3)}, path, config=SMALL)
    first = await ckptio.load_with_report(path, config=SMALL)
    assert first == await ckptio.load_with_report(path, config=SMALL)
