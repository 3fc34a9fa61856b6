from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import re
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch

import ckptio
import ckptio.api
import ckptio.calls
import ckptio.sync
from ckptio.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    EngineClosedError,
    SaveAbortedError,
)
from ckptio.events import SaveProgressed
from ckptio.testing import RecordingFiles
from tests.programs import run_program
from tests.rig import (
    SMALL,
    FilesCore,
    assert_same,
    assert_tidy,
    filled_state,
    names_in,
    random_state,
    told_of_abort,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckptio.events import Event
    from ckptio.testing import Operation

pytestmark = pytest.mark.usefixtures("no_leaks")

_FORK = """
import os, sys, torch
import ckptio.sync
from ckptio.errors import EngineClosedError
path, end = sys.argv[1:]
engine = ckptio.sync.Engine()
engine.__enter__()
engine.save({"t": torch.ones(3)}, path)
child = os.fork()
if not child:
    try:
        engine.load(path)
    except EngineClosedError:
        pass
    else:
        os._exit(1)
    if end == "leave":
        engine.__exit__(None, None, None)
    elif end == "drop":
        del engine
    with ckptio.sync.Engine() as own:
        own.load(path)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
engine.load(path)
engine.__exit__(None, None, None)
"""


def public_callables(owner: Any) -> dict[str, Any]:
    """Give the functions that a module or a class defines itself."""
    module = owner.__module__ if inspect.isclass(owner) else owner.__name__
    return {
        name: value
        for name, value in vars(owner).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module
    }


#: Names on the blocking side only, and why.
ONLY_SYNC = {
    "start_save",  # `save` of the other side returns at once
    "convert",  # its twin is `ckptio.conversion.convert.convert`; compared below
}


@pytest.mark.parametrize(
    ("one", "other"),
    [(ckptio.calls, ckptio.sync), (ckptio.api.Engine, ckptio.sync.Engine)],
    ids=["functions", "methods"],
)
def test_every_name_has_a_twin_with_the_same_parameters(one: Any, other: Any) -> None:
    """Names, kinds, defaults and annotations agree; only waiting differs."""
    ours = public_callables(one)
    theirs = {k: v for k, v in public_callables(other).items() if k not in ONLY_SYNC}
    assert ours.keys() == theirs.keys()
    for name, function in ours.items():
        twin = theirs[name]
        assert inspect.signature(function).parameters == inspect.signature(twin).parameters, name
        assert not inspect.iscoroutinefunction(twin)
        returns = inspect.signature(function).return_annotation
        found = re.fullmatch(r"Coroutine\[Any, Any, (.*)\]", returns)  # of a plain function
        returns = returns if found is None else found[1]
        expected = "CheckpointInfo" if name == "save" else returns
        assert inspect.signature(twin).return_annotation == expected, name
        assert inspect.getdoc(twin)


def test_converting_has_a_twin_with_the_same_parameters() -> None:
    """Names, kinds, defaults and annotations agree; only waiting differs."""
    one, other = inspect.signature(ckptio.convert), inspect.signature(ckptio.sync.convert)
    assert one == other
    assert inspect.iscoroutinefunction(ckptio.convert)
    assert not inspect.iscoroutinefunction(ckptio.sync.convert)


def test_what_returns_a_coroutine_is_awaited_by_those_who_ask() -> None:
    """Mocks, say: a load takes what is current at its call, and is no `async def` for that."""
    asks = inspect if sys.version_info >= (3, 12) else asyncio  # the latter's is going away
    for owner in (ckptio.Engine, ckptio.Checkpointer, ckptio):
        for name in ("load", "load_with_report", "load_slice"):
            function = getattr(owner, name, None)
            if function is not None:
                assert asks.iscoroutinefunction(function), (owner, name)
    assert isinstance(mock.create_autospec(ckptio.Engine).load, mock.AsyncMock)


@pytest.mark.parametrize("name", ["Engine", "Checkpointer"])
def test_the_classes_have_the_same_names(name: str) -> None:
    """With the same parameters; the blocking ones have `start_save` besides."""
    one, other = getattr(ckptio, name), getattr(ckptio.sync, name)
    names = {key for key in dir(one) if not key.startswith("_")}
    assert {key for key in dir(other) if not key.startswith("_")} == names | {"start_save"}
    for key in names:
        ours, twin = getattr(one, key), getattr(other, key)
        assert callable(ours) == callable(twin), key
        if callable(ours):
            assert inspect.signature(ours).parameters == inspect.signature(twin).parameters, key
            assert not inspect.iscoroutinefunction(twin), key


def test_an_engine_that_is_not_open_says_whether_it_was(tmp_path: Path) -> None:
    """In words that are right for both kinds of blocks."""
    engine = ckptio.sync.Engine(SMALL)
    with pytest.raises(EngineClosedError, match=r"not open: open it with .async with. \(or .with."):
        engine.load(tmp_path)
    with engine:
        pass
    with pytest.raises(EngineClosedError, match="closed: it is used inside its block"):
        engine.load(tmp_path)


def test_the_engines_are_made_alike() -> None:
    """Both take the same options; `start_save` takes what `save` takes."""
    one, other = inspect.signature(ckptio.Engine), inspect.signature(ckptio.sync.Engine)
    assert one.parameters == other.parameters
    start, save = (
        inspect.signature(getattr(ckptio.sync.Engine, name)) for name in ("start_save", "save")
    )
    assert start.parameters == save.parameters


def round_trip(path: Path) -> None:
    """Use every blocking name once."""
    state: dict[str, Any] = {"w": torch.arange(20_000), "n": 3}
    info = ckptio.sync.save(state, path, config=SMALL)
    assert torch.equal(ckptio.sync.load(path, config=SMALL)["w"], state["w"])
    assert ckptio.sync.inspect(path, config=SMALL).save_id == info.save_id
    assert ckptio.sync.verify(path, config=SMALL).is_whole
    assert ckptio.sync.load_slice(path, "w", slice(3, 5), config=SMALL).tolist() == [3, 4]
    assert ckptio.sync.load_with_report(path, config=SMALL).report.num_tensors == 1
    with ckptio.sync.Engine(SMALL) as engine:
        engine.prewarm()
        handle = engine.start_save(state, path, overwrite=True)
        handle.staged.wait()
        handle.fence()
        assert handle.result().path == str(path)
        assert torch.equal(engine.load(path)["w"], state["w"])
        assert engine.load_with_report(path).report.save_id == handle.save_id
        assert engine.load_slice(path, "w", 7).item() == 7
        assert engine.inspect(path).save_id == handle.save_id
        assert engine.verify(path).is_whole
        assert engine.statistics().leased_nbytes == 0
        assert engine.cache_statistics().num_reads == 1
    assert_tidy(path)


def test_it_works_without_a_loop(tmp_path: Path) -> None:
    """In a plain script."""
    round_trip(tmp_path / "c")


async def test_it_works_inside_a_running_loop(tmp_path: Path) -> None:
    """In a notebook, whose loop it blocks meanwhile."""
    round_trip(tmp_path / "c")


def test_it_works_from_several_threads(tmp_path: Path) -> None:
    """At once, each with its own engine or all with one."""
    state = random_state([100_000, 5])
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # looked at below
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def share(path: Path) -> None:
        engine.save(state, path)
        assert_same(engine.load(path), state)

    with ckptio.sync.Engine(SMALL) as engine:
        threads = [guarded(lambda i=i: round_trip(tmp_path / f"own{i}")) for i in range(3)]  # type: ignore[misc]  # a default binds the loop's variable
        threads += [guarded(lambda i=i: share(tmp_path / f"shared{i}")) for i in range(3)]  # type: ignore[misc]  # as above
        for thread in threads:
            thread.join()
    assert failures == []


def test_errors_are_the_same(tmp_path: Path) -> None:
    """Typed, at the call."""
    with pytest.raises(CheckpointNotFoundError):
        ckptio.sync.load(tmp_path / "c", config=SMALL)
    ckptio.sync.save({}, tmp_path / "c", config=SMALL)
    with pytest.raises(CheckpointExistsError):
        ckptio.sync.save({}, tmp_path / "c", config=SMALL)
    with ckptio.sync.Engine(SMALL) as engine, pytest.raises(CheckpointExistsError):
        engine.save({}, tmp_path / "c")
    with pytest.raises(EngineClosedError):
        engine.load(tmp_path / "c")


def test_leaving_by_an_error_aborts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes out, the save leaves nothing, and the checkpoint before stays."""
    old = filled_state([100], 1)
    ckptio.sync.save(old, tmp_path / "c", config=SMALL)
    stopped = told_of_abort(monkeypatch)

    def hold(event: Event) -> None:
        if isinstance(event, SaveProgressed):
            assert stopped.wait(60)

    with pytest.raises(ZeroDivisionError), ckptio.sync.Engine(SMALL, observer=hold) as engine:
        handle = engine.start_save(filled_state([100_000], 2), tmp_path / "c", overwrite=True)
        _ = 1 // 0
    assert isinstance(handle.committed.error(), SaveAbortedError)
    assert_same(ckptio.sync.load(tmp_path / "c", config=SMALL), old)
    assert_tidy(tmp_path / "c")


def test_a_failed_save_that_nobody_waited_for_surfaces(tmp_path: Path) -> None:
    """When the engine is left."""
    ckptio.sync.save({}, tmp_path / "c", config=SMALL)
    with pytest.raises(CheckpointExistsError), ckptio.sync.Engine(SMALL) as engine:
        engine.start_save({}, tmp_path / "c")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where a shell began the tests in the background, and it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_aborts_and_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while `save` blocks: nothing of it is left when the interrupt comes out."""

    def interrupt(operation: Operation) -> None:
        if operation.kind == "pwrite" and "data-" in operation.path and not told:
            told.append(True)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    told: list[bool] = []
    engine = ckptio.sync.Engine(SMALL)
    files = RecordingFiles(interrupt)
    engine._core = FilesCore(SMALL, None, files)
    with pytest.raises(KeyboardInterrupt), engine:
        engine.save(random_state([20_000_000]), tmp_path / "c")
    assert files.num_open == 0
    assert names_in(tmp_path) == []


def test_a_handle_can_be_awaited_on_any_loop(tmp_path: Path) -> None:
    """A save that was started without a loop is waited for on one."""
    with ckptio.sync.Engine(SMALL) as engine:
        handle = engine.start_save(random_state([50_000]), tmp_path / "c")

        async def wait() -> str:
            await handle.staged
            return (await handle).save_id

        assert asyncio.run(wait()) == handle.save_id


@pytest.mark.parametrize("end", ["leave", "drop", "keep"])
def test_a_forked_child_can_end_and_have_an_engine_of_its_own(tmp_path: Path, end: str) -> None:
    """It has neither threads nor loop of its parent's, and waits for none of them."""
    run_program(_FORK, tmp_path / "c", end)


def test_ranks_that_are_an_array_are_refused() -> None:
    """By name, with an engine of one's own and without one."""
    ranks: Any = np.array([0, 1])
    with pytest.raises(ConfigError, match="ranks"), ckptio.sync.Engine(SMALL, ranks=ranks):
        pass
    with (
        ckptio.sync.Engine(SMALL) as engine,
        pytest.raises(ConfigError, match="no effect with engine="),
    ):
        ckptio.sync.Checkpointer("run", engine=engine, ranks=ranks)


def test_path_and_state_in_each_others_place_are_told(tmp_path: Path) -> None:
    """Not by the whole state."""
    state: Any = {str(i): torch.zeros(30, 30) for i in range(99)}
    for path in (tmp_path / "c", str(tmp_path)):
        with pytest.raises(ConfigError, match="path and state are swapped") as caught:
            ckptio.sync.save(path, state)
        assert len(str(caught.value)) < 1000
    with pytest.raises(ConfigError, match=r"path is a str or os\.PathLike, not \{'0': ") as caught:
        ckptio.sync.load(state)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["load", "load_with_report", "load_slice", "finish_copies"])
async def test_a_path_that_python_cannot_write_is_refused(name: str) -> None:
    """As other numbers are: tasks are named by paths."""
    args = (10**5000, "x", 0) if name == "load_slice" else (10**5000,)
    with pytest.raises(ConfigError, match="a very large int"):
        getattr(ckptio.sync, name)(*args)
    with pytest.raises(ConfigError, match="a very large int"):
        await getattr(ckptio, name)(*args)


@pytest.mark.parametrize("copies", [pickle.dumps, copy.deepcopy])
def test_what_was_opened_is_not_copied_with_what_holds_it(
    tmp_path: Path, copies: Callable[[Any], Any]
) -> None:
    """As a data set that goes to a worker does; before it is opened, a copy is another engine."""
    with ckptio.sync.Engine(SMALL) as engine:
        run = ckptio.sync.Checkpointer(tmp_path / "run", engine=engine)
        for held in (engine, run):
            with pytest.raises(TypeError, match=r"opened cannot be pickled or copied.*open one"):
                copies({"engine": held})
    with copy.deepcopy(ckptio.sync.Engine(SMALL)) as other:
        other.save({"step": 1}, tmp_path / "c")
