"""What is current counts as it was when the user called, whenever that is done."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckptio
from ckptio.errors import ConfigError, EngineClosedError
from ckptio.runtime.currents import CallerCurrents
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")

Call = tuple[ckptio.Engine, ckptio.Checkpointer, "Path", "Target"]
CALLS: dict[str, Callable[[Call], Coroutine[Any, Any, object]]] = {
    "Engine.load": lambda c: c[0].load(c[2], into=c[3]),
    "Engine.load_with_report": lambda c: c[0].load_with_report(c[2], into=c[3]),
    "Engine.load_slice": lambda c: c[0].load_slice(c[2], "t", slice(2)),
    "Checkpointer.load": lambda c: c[1].load(into=c[3]),
    "Checkpointer.load_with_report": lambda c: c[1].load_with_report(into=c[3], step=1),
    "load": lambda c: ckptio.load(c[2], into=c[3], config=SMALL),
    "load_with_report": lambda c: ckptio.load_with_report(c[2], into=c[3], config=SMALL),
    "load_slice": lambda c: ckptio.load_slice(c[2], "t", slice(2), config=SMALL),
}


class Stream:
    """What is current, where no CUDA is.

    Attributes:
        current: It.
        entered: What was made so for parts of a call.
    """

    def __init__(self) -> None:
        self.current = "mine"
        self.entered: list[str] = []


class Target:
    """Sees what is current whenever it is touched."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.seen: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        self.seen.append(self._stream.current)
        return {"t": torch.zeros(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state
        self.seen.append(self._stream.current)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Have what is current be that of a stand-in for streams, wherever it is taken."""
    stream = Stream()
    taken: dict[CallerCurrents, str] = {}

    @contextlib.contextmanager
    def entered(currents: CallerCurrents) -> Iterator[None]:
        before, stream.current = stream.current, taken[currents]
        stream.entered.append(stream.current)
        try:
            yield
        finally:
            stream.current = before

    def take(currents: CallerCurrents) -> None:
        taken[currents] = stream.current

    monkeypatch.setattr(CallerCurrents, "__init__", take)
    monkeypatch.setattr(CallerCurrents, "entered", entered)
    return stream


@pytest.mark.parametrize("how", ["awaited", "as a task"])
@pytest.mark.parametrize("name", CALLS)
async def test_a_load_works_on_what_was_current_at_its_call(
    tmp_path: Path, stream: Stream, name: str, how: str
) -> None:
    """Not at its first step, which is later: it may be awaited elsewhere, or be a task's."""
    async with (
        ckptio.Engine(SMALL) as engine,
        ckptio.Checkpointer(tmp_path / "run", engine=engine) as ckpt,
    ):
        await engine.save({"t": torch.ones(3)}, tmp_path / "c")
        await ckpt.save({"t": torch.ones(3)}, 1)
        target = Target(stream)
        load = CALLS[name]((engine, ckpt, tmp_path / "c", target))
        task = asyncio.create_task(load) if how == "as a task" else None
        stream.current = "theirs"
        await (task or load)
    assert set(stream.entered) == {"mine"}
    assert set(target.seen) == (set() if "slice" in name else {"mine"})
    assert stream.current == "theirs"


async def test_what_is_wrong_with_a_load_is_said_where_it_is_awaited(tmp_path: Path) -> None:
    """Not where it is called, which may be in the middle of others that a group waits for."""
    path: Any = 3
    one_call = ckptio.load(path, config=SMALL)
    with pytest.raises(ConfigError):
        await one_call
    async with ckptio.Checkpointer(tmp_path, config=SMALL) as ckpt:
        load = ckpt.engine.load(tmp_path, strict="ignore")
        with pytest.raises(ConfigError):
            await load
    for closed in (
        ckpt.load(),
        ckpt.engine.load(tmp_path),
        ckpt.engine.load_slice(tmp_path, "", 0),
    ):
        with pytest.raises(EngineClosedError):
            await closed
