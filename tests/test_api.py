from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckptio
from ckptio.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    EngineClosedError,
    SaveAbortedError,
    UnsupportedLeafError,
)
from ckptio.events import SaveCommitted
from ckptio.testing import EventLog
from tests.rig import SMALL, assert_same, assert_tidy, filled_state, names_in, random_state

if TYPE_CHECKING:
    from pathlib import Path

    from ckptio.config import CheckpointConfig

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")


async def test_save_and_load_in_one_call_each(tmp_path: Path, config: CheckpointConfig) -> None:
    """The shortest way: a state goes in and comes out, tensors and all the rest."""
    state: dict[str, Any] = {
        "step": 7,
        "w": torch.randn(100, 30),
        "nested": [{"b": torch.arange(5)}, "text"],
    }
    info = await ckptio.save(state, tmp_path / "c", config=config)
    assert info.path == str(tmp_path / "c")
    found = await ckptio.load(tmp_path / "c", config=config)
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["nested"][0]["b"], torch.arange(5))
    assert (found["step"], found["nested"][1]) == (7, "text")
    assert_tidy(tmp_path / "c")


@pytest.mark.parametrize(
    "form", [str, lambda p: p, lambda p: f"file://{p}"], ids=["str", "path", "url"]
)
async def test_any_form_of_a_path_will_do(tmp_path: Path, form: Any) -> None:
    """Strings, paths and `file://` URLs name the same place."""
    await ckptio.save({"a": torch.ones(3)}, form(tmp_path / "c"), config=SMALL)
    assert (await ckptio.load(tmp_path / "c", config=SMALL))["a"].tolist() == [1, 1, 1]


async def test_a_save_of_one_call_has_both_moments(tmp_path: Path) -> None:
    """The handle tells when the source may change and when it is committed; the engine goes."""
    state = filled_state([100_000], 1)
    handle = ckptio.save(state, tmp_path / "c", config=SMALL)
    await handle.staged
    state["tensor0"].fill_(2)
    info = await handle
    assert info.save_id == handle.save_id
    assert_same(await ckptio.load(tmp_path / "c"), filled_state([100_000], 1))


async def test_a_save_of_one_call_can_be_cancelled(tmp_path: Path) -> None:
    """At any turn of the loop: nothing is left, or the checkpoint is whole."""

    async def save(path: Path) -> None:
        await ckptio.save(random_state([200_000]), path, config=SMALL)

    for turns in range(12):
        path = tmp_path / str(turns)
        task = asyncio.create_task(save(path))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        if path.exists():
            assert_tidy(path)
        else:
            assert task.cancelled()


async def test_a_load_of_one_call_can_be_cancelled(tmp_path: Path) -> None:
    """At any turn of the loop: no thread and no file is left open."""
    state = random_state([200_000])
    await ckptio.save(state, tmp_path / "c", config=SMALL)

    async def load() -> None:
        assert_same(await ckptio.load(tmp_path / "c", config=SMALL), state)

    for turns in range(12):
        task = asyncio.create_task(load())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            assert task.exception() is None


async def test_an_engine_whose_entry_or_exit_is_cancelled_leaves_no_thread() -> None:
    """However early or late."""

    async def use() -> None:
        async with ckptio.Engine(SMALL):
            await asyncio.sleep(0)

    for turns in range(8):
        task = asyncio.create_task(use())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))


async def test_overwriting_has_to_be_asked_for(tmp_path: Path) -> None:
    """The default refuses and changes nothing; asked for, the new one replaces the old."""
    old, new = filled_state([5000], 1), filled_state([5000], 2)
    async with ckptio.Engine(SMALL) as engine:
        await engine.save(old, tmp_path / "c")
        with pytest.raises(CheckpointExistsError, match="overwrite=True") as caught:
            await engine.save(new, tmp_path / "c")
        assert caught.value.filename == str(tmp_path / "c")
        assert_same(await engine.load(tmp_path / "c"), old)
        await engine.save(new, tmp_path / "c", overwrite=True)
        assert_same(await engine.load(tmp_path / "c"), new)
    assert_tidy(tmp_path / "c")


async def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """`save` raises at the call; there is no directory, and the engine is as before."""
    async with ckptio.Engine(SMALL) as engine:
        with pytest.raises(UnsupportedLeafError):
            engine.save({"f": lambda: None}, tmp_path / "c")
        with pytest.raises(ConfigError):
            engine.save({}, "")
        with pytest.raises(UnsupportedLeafError):
            ckptio.save({"f": lambda: None}, tmp_path / "c", config=SMALL)
    assert names_in(tmp_path) == []


async def test_a_closed_engine_refuses_everything(tmp_path: Path) -> None:
    """Before its block, after it, and twice."""
    engine = ckptio.Engine(SMALL)
    with pytest.raises(EngineClosedError):
        engine.save({}, tmp_path / "c")
    async with engine:
        pass
    for call in (
        lambda: engine.save({}, tmp_path / "c"),
        engine.statistics,
        engine.cache_statistics,
    ):
        with pytest.raises(EngineClosedError):
            call()
    for coroutine in (
        engine.load(tmp_path / "c"),
        engine.inspect(tmp_path / "c"),
        engine.verify(tmp_path / "c"),
        engine.prewarm(),
    ):
        with pytest.raises(EngineClosedError):
            await coroutine
    with pytest.raises(EngineClosedError):
        await engine.__aenter__()


async def test_looking_at_a_checkpoint(tmp_path: Path) -> None:
    """`inspect`, `verify`, `load_slice` and `load_with_report` in one call each."""
    state: dict[str, Any] = {"w": torch.arange(1000).view(100, 10), "n": 3}
    info = await ckptio.save(state, tmp_path / "c", config=SMALL)
    manifest = await ckptio.inspect(tmp_path / "c", config=SMALL)
    assert manifest.save_id == info.save_id
    assert [tensor.name for tensor in manifest.tensors] == ["w"]
    report = await ckptio.verify(tmp_path / "c", config=SMALL)
    assert report.is_whole
    assert (report.nbytes, report.num_files) == (info.nbytes, info.num_files)
    part = await ckptio.load_slice(tmp_path / "c", "w", (slice(3, 5), 2), config=SMALL)
    assert part.tolist() == [32, 42]
    target = {"w": torch.zeros(100, 10, dtype=torch.int64), "x": torch.zeros(1)}
    result = await ckptio.load_with_report(tmp_path / "c", target, config=SMALL)
    assert result.state is target
    assert result.report.missing == ("x",)
    assert torch.equal(target["w"], state["w"])


async def test_a_manifest_is_read_once_for_many_loads(tmp_path: Path) -> None:
    """An engine's cache serves what has not changed, and sees what has."""
    async with ckptio.Engine(SMALL) as engine:
        await engine.save(filled_state([10], 1), tmp_path / "c")
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(engine.load(tmp_path / "c"))
        assert engine.cache_statistics().num_reads == 1
        await ckptio.save(filled_state([10], 2), tmp_path / "c", overwrite=True, config=SMALL)
        assert_same(await engine.load(tmp_path / "c"), filled_state([10], 2))
        assert engine.cache_statistics().num_reads == 2


async def test_a_checkpoint_that_was_removed_is_not_found(tmp_path: Path) -> None:
    """Even if its manifest was cached."""
    async with ckptio.Engine(SMALL) as engine:
        await engine.save(filled_state([10], 1), tmp_path / "c")
        await engine.load(tmp_path / "c")
        (tmp_path / "c" / "manifest.json").unlink()
        with pytest.raises(CheckpointNotFoundError):
            await engine.load(tmp_path / "c")


async def test_events_come_to_the_observer_of_the_call(tmp_path: Path) -> None:
    """The functions of the module take an observer, too."""
    log = EventLog()
    await ckptio.save({"a": torch.ones(3)}, tmp_path / "c", config=SMALL, observer=log)
    await ckptio.load(tmp_path / "c", config=SMALL, observer=log)
    assert len(log.of(SaveCommitted)) == 1
    assert log.kinds()[-1] == "LoadFinished"


async def test_a_save_can_be_aborted(tmp_path: Path) -> None:
    """Through its handle; what was there stays."""
    async with ckptio.Engine(SMALL) as engine:
        handle = engine.save(random_state([3_000_000]), tmp_path / "c")
        handle.abort()
        with pytest.raises(SaveAbortedError):
            await handle
    assert names_in(tmp_path) == []


async def test_a_cpu_state_is_copied_not_aliased(tmp_path: Path) -> None:
    """After `staged`, whatever happens to tensors and arrays does not reach the files."""
    state = filled_state([400_000, 30_000, 5], 3)
    async with ckptio.Engine(SMALL) as engine:
        handle = engine.save(state, tmp_path / "c")
        handle.fence()
        await handle.staged
        for tensor in state.values():
            tensor.fill_(0)
        await handle
        assert_same(await engine.load(tmp_path / "c"), filled_state([400_000, 30_000, 5], 3))


def test_functions_take_what_methods_take() -> None:
    """A function of the module has the parameters of the engine's method, and the engine's."""
    for name in ("save", "load", "load_with_report", "load_slice", "inspect", "verify"):
        method = inspect.signature(getattr(ckptio.Engine, name))
        function = inspect.signature(getattr(ckptio, name))
        parameters = [p for p in method.parameters.values() if p.name != "self"]
        of_engine = [
            p for p in inspect.signature(ckptio.Engine).parameters.values() if p.name != "self"
        ]
        if name in ("load_slice", "inspect", "verify"):  # each rank's own
            of_engine = [p for p in of_engine if p.name != "ranks"]
        expected = parameters + [p.replace(kind=p.KEYWORD_ONLY) for p in of_engine]
        assert list(function.parameters.values()) == expected, name
        assert function.return_annotation == method.return_annotation, name
