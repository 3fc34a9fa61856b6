from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, assert_type

import torch

import ckptio
from ckptio import sync
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
