"""Second tiers end to end: real engines, real files, and an object store through fsspec."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import textwrap
import threading
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

import ckptio
from ckptio import sync
from ckptio.config import KiB
from ckptio.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    EngineClosedError,
    FormatError,
    SaveAbortedError,
    StorageError,
)
from ckptio.events import (
    CopyCommitted,
    CopyFailed,
    CopyStarted,
    SaveCommitted,
    SaveStarted,
    TierPassedOver,
)
from ckptio.runtime.core import EngineCore
from ckptio.runtime.in_flight import InFlight
from ckptio.runtime.running import Running
from ckptio.testing import EventLog, RecordingFiles, crash_at
from tests.programs import run_program
from tests.rig import (
    SMALL,
    Ahead,
    FilesCore,
    assert_same,
    assert_tidy,
    begin_close,
    committed,
    config_with,
    engine_on,
    filled_state,
    is_same,
    names_in,
    random_state,
    told_of_abort,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from ckptio.events import Event
    from ckptio.testing.faults import Operation


pytestmark = pytest.mark.usefixtures("no_leaks")
SIZES = [100 * KiB, 3000, 200 * KiB]
STATE = random_state(SIZES)


def objects_in(url: str) -> dict[str, bytes]:
    import fsspec  # noqa: PLC0415  # as above

    files = fsspec.filesystem("memory")
    root = url.removeprefix("memory:/")
    return {path.removeprefix(root + "/"): files.cat(path) for path in files.find(root)}


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


async def test_a_checkpoint_is_copied_to_an_object_store(tmp_path: Path, url: str) -> None:
    """The same names and bytes, in both; each loads; nothing else is left."""
    async with ckptio.Engine(SMALL) as engine:
        handle = engine.save(STATE, tmp_path / "a", then=f"{url}/a")
        assert (await handle).path == str(tmp_path / "a")
        assert (await handle.durable).path == f"{url}/a"
        assert repr(handle).endswith("durable>")
        for path in (tmp_path / "a", f"{url}/a"):
            assert_same(await engine.load(path), STATE)
    assert_tidy(tmp_path / "a")
    assert objects_in(f"{url}/a") == files_in(tmp_path / "a")


async def test_an_object_store_may_be_the_first_tier(tmp_path: Path, url: str) -> None:
    """Any place is a tier; overwriting replaces on both."""
    async with ckptio.Engine(SMALL) as engine:
        for value in (1, 2):
            state = filled_state(SIZES, value)
            await engine.save(state, f"{url}/a", overwrite=True, then=tmp_path / "a").durable
            assert objects_in(f"{url}/a") == files_in(tmp_path / "a")
            assert_same(await engine.load(tmp_path / "a"), state)
    assert_tidy(tmp_path / "a")


async def test_copies_of_a_run_in_an_object_store_are_finished(tmp_path: Path, url: str) -> None:
    """What is owed is found below a prefix as in a directory."""
    (tmp_path / "a").write_text("in the way")
    async with ckptio.Engine(SMALL) as engine:
        handle = engine.save(STATE, f"{url}/run/1", then=tmp_path / "a")
        await handle
        with pytest.raises(StorageError):
            await handle.durable
        (tmp_path / "a").unlink()
        assert await engine.finish_copies(f"{url}/run") == (str(tmp_path / "a"),)
        assert await engine.finish_copies(f"{url}/run") == ()
    assert objects_in(f"{url}/run/1") == files_in(tmp_path / "a")


async def test_leaving_waits_for_copies(tmp_path: Path, url: str) -> None:
    """Nobody has to wait for `durable`."""
    async with ckptio.Engine(SMALL) as engine:
        engine.save(STATE, tmp_path / "a", then=f"{url}/a")
    assert objects_in(f"{url}/a") == files_in(tmp_path / "a")


async def test_leaving_raises_the_error_of_a_copy_that_nobody_waited_for(
    tmp_path: Path, url: str
) -> None:
    """As of a save; not if somebody has seen it; and the first tier is whole."""
    await ckptio.save(filled_state([10], 1), f"{url}/a", config=SMALL)
    with pytest.raises(CheckpointExistsError):
        async with ckptio.Engine(SMALL) as engine:
            await engine.save(STATE, tmp_path / "a", then=f"{url}/a")
    async with ckptio.Engine(SMALL) as engine:
        handle = engine.save(STATE, tmp_path / "b", then=f"{url}/a")
        await handle
        with pytest.raises(CheckpointExistsError):
            await handle.durable
        assert repr(handle).endswith("not copied>")
        assert_same(await engine.load(tmp_path / "a"), STATE)


async def test_leaving_by_an_error_stops_copies_and_the_next_run_goes_on(
    tmp_path: Path, url: str
) -> None:
    """The note stays; saving another step beside it is enough."""

    class LeavingError(Exception):
        pass

    async def leave() -> ckptio.SaveHandle:
        async with ckptio.Engine(SMALL) as engine:
            handle = engine.save(STATE, tmp_path / "a", then=f"{url}/a")
            await handle
            handles.append(handle)
            raise LeavingError

    handles: list[ckptio.SaveHandle] = []
    with pytest.raises(LeavingError):
        await leave()
    try:
        await handles[0].durable
    except (SaveAbortedError, EngineClosedError):
        assert [n for n in names_in(tmp_path / "a") if n.startswith(".copy-")]
        assert "manifest.json" not in objects_in(f"{url}/a")
    async with ckptio.Engine(SMALL) as engine:
        await engine.save(filled_state([10], 1), tmp_path / "b", then=f"{url}/b").durable
    for name in "ab":
        assert_tidy(tmp_path / name)
        assert {
            key: data
            for key, data in objects_in(f"{url}/{name}").items()
            if not key.startswith(".attempt-")
        } == files_in(tmp_path / name)


async def test_one_call_commits_and_then_copies(tmp_path: Path, url: str) -> None:
    """`await` is the commit; `durable` is when its engine is gone."""
    handle = ckptio.save(STATE, tmp_path / "a", then=f"{url}/a", config=SMALL)
    info = await handle
    assert info.path == str(tmp_path / "a")
    assert (await handle.durable).path == f"{url}/a"
    assert objects_in(f"{url}/a") == files_in(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").unlink()
    log = EventLog()
    found = await ckptio.load(tmp_path / "a", then=f"{url}/a", config=SMALL, observer=log)
    assert_same(found, STATE)
    (event,) = log.of(TierPassedOver)
    assert (event.path, event.to) == (str(tmp_path / "a"), f"{url}/a")


async def test_a_load_leaves_what_its_caller_handles_as_it_is(tmp_path: Path) -> None:
    """A fallback lets go of frames: not of those of an exception that was raised before."""
    near, far = tmp_path / "near", tmp_path / "far"

    def train() -> NoReturn:
        raise RuntimeError("the loss is nan")

    def frames_of(error: BaseException) -> list[str]:
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)]

    async with ckptio.Engine(SMALL, observer=EventLog()) as engine:
        await engine.save(STATE, near, then=far).durable
        for file in near.glob("*.safetensors"):
            file.write_bytes(bytes(file.stat().st_size))
        try:
            train()
        except RuntimeError as error:
            assert is_same(await engine.load(near, then=far), STATE)
            assert frames_of(error)[-1] == "train"
            assert is_same(sync.load(near, then=far), STATE)
            assert frames_of(error)[-1] == "train"


async def test_one_call_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither moment comes, and its engine is gone when that is said."""
    (tmp_path / "file").write_text("in the way")
    told: list[bool] = []
    has_handle = threading.Event()
    close = EngineCore.close

    def close_and_look(core: EngineCore) -> None:
        close(core)
        has_handle.wait()
        told.append(handle.durable.done() or handle.committed.done())

    monkeypatch.setattr(EngineCore, "close", close_and_look)
    handle = ckptio.save(STATE, tmp_path / "file" / "a", then=tmp_path / "b", config=SMALL)
    has_handle.set()
    with pytest.raises(StorageError):
        await handle.durable
    assert told == [False]
    with pytest.raises(StorageError):
        await handle
    assert names_in(tmp_path) == ["file"]


async def test_one_call_whose_engine_is_closed_before_its_copy_begins_owes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a child of multiprocessing that ends at once: the commit stands."""

    def refuse(*args: object) -> None:
        del args
        raise EngineClosedError("the engine was closed meanwhile")

    monkeypatch.setattr("ckptio.runtime.run_save.begin_copy", refuse)
    handle = ckptio.save(STATE, tmp_path / "a", then=tmp_path / "b", config=SMALL)
    await handle
    with pytest.raises(EngineClosedError, match="before the copy began"):
        await handle.durable
    assert await ckptio.finish_copies(tmp_path) == (str(tmp_path / "b"),)
    assert files_in(tmp_path / "b") == files_in(tmp_path / "a")


@pytest.mark.parametrize("is_committed", [False, True])
def test_one_call_whose_engine_is_closed_while_its_copy_begins_owes_it(
    *, is_committed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the look whether it is open: the save goes on, and says how both of them ended."""
    closers: list[threading.Thread] = []
    go_on, has_committed = threading.Event(), threading.Event()
    begin, wait_ended = InFlight.begin, Running.wait_ended

    def watch(event: Event) -> None:
        if isinstance(event, SaveStarted):
            assert go_on.wait(60)
        elif isinstance(event, SaveCommitted):
            has_committed.set()

    def close_first(flight: InFlight, *args: Any, engine: Any, **options: Any) -> None:
        if args[3].startswith("copy "):
            if is_committed:
                go_on.set()
                assert has_committed.wait(60)
            closers.append(begin_close(engine))
        begin(flight, *args, engine=engine, **options)

    def wait(running: Running[Any]) -> None:
        if threading.current_thread().name == "ckptio-save":  # the copy was refused
            go_on.set()
        wait_ended(running)

    monkeypatch.setattr(InFlight, "begin", close_first)
    monkeypatch.setattr(Running, "wait_ended", wait)
    near, far = tmp_path / "near", tmp_path / "far"
    handle = ckptio.save(STATE, near / "a", then=far / "a", config=SMALL, observer=watch)
    assert handle.committed.wait(60).path == str(near / "a")
    with pytest.raises(EngineClosedError, match="before the copy began"):
        handle.durable.wait(60)
    closers[0].join()
    assert sync.finish_copies(near) == (str(far / "a"),)


def test_one_call_whose_engine_is_closed_while_its_copy_goes_on_says_how_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a child of multiprocessing whose target returns: its end waits for both."""
    closers: list[threading.Thread] = []
    has_closed = threading.Event()
    close, begin = EngineCore.close, InFlight.begin

    def watch(event: Event) -> None:
        if isinstance(event, CopyStarted):
            assert has_closed.wait(60)

    def close_behind(flight: InFlight, *args: Any, engine: Any, **options: Any) -> None:
        begin(flight, *args, engine=engine, **options)
        if args[3].startswith("copy "):
            closers.append(begin_close(engine))

    def close_and_tell(core: EngineCore, **options: Any) -> None:
        close(core, **options)
        if threading.current_thread().name == "ckptio-save":  # another one is at it
            has_closed.set()

    monkeypatch.setattr(InFlight, "begin", close_behind)
    monkeypatch.setattr(EngineCore, "close", close_and_tell)
    near, far = tmp_path / "near", tmp_path / "far"
    handle = ckptio.save(STATE, near / "a", then=far / "a", config=SMALL, observer=watch)
    assert handle.durable.wait(60).path == str(far / "a")
    closers[0].join()
    assert files_in(far / "a") == files_in(near / "a")


def test_a_directory_that_is_not_there_owes_nobody_knows_what(tmp_path: Path) -> None:
    """A path that is mistyped, or not mounted; an empty one owes nothing."""
    assert sync.finish_copies(tmp_path) == ()
    with pytest.raises(CheckpointNotFoundError, match="no such directory"):
        sync.finish_copies(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")  # a mount that is not there
    with pytest.raises(CheckpointNotFoundError, match="no such directory"):
        sync.finish_copies(tmp_path / "link")
    (tmp_path / "link").unlink()
    assert sync.finish_copies("memory://nothing-owed/here") == ()


def test_a_directory_that_cannot_be_listed_owes_nobody_knows_what(tmp_path: Path) -> None:
    """It is an error, and an event."""
    (tmp_path / "file").write_text("in the way")
    log = EventLog()
    with pytest.raises(StorageError, match="cannot list"):
        sync.finish_copies(tmp_path / "file" / "run", config=SMALL, observer=log)
    (event,) = log.of(CopyFailed)
    assert (event.path, event.to) == (str(tmp_path / "file" / "run"), "")
    assert isinstance(event.error, StorageError)


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("ahead", ["copy ", "take up "])
def test_an_engine_that_is_closed_while_a_copy_begins_gives_a_handle(
    ahead: str, *, abort: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread: a save that began has its copy, which goes on, and says how it ends."""
    closers: list[threading.Thread] = []
    begin_beside = EngineCore.begin_beside

    def close_first(core: EngineCore, step: Any, name: str, *args: Any) -> None:
        if name.startswith(ahead) and not closers:
            closers.append(begin_close(core, abort=abort))
        begin_beside(core, step, name, *args)

    monkeypatch.setattr(EngineCore, "begin_beside", close_first)
    with sync.Engine(SMALL) as engine:
        handle = engine.start_save(STATE, tmp_path / "a", then=tmp_path / "b")
        if abort:
            with contextlib.suppress(CheckpointError):
                handle.durable.wait()
        else:
            assert handle.durable.wait().path == str(tmp_path / "b")
        closers[0].join()
    is_committed = (tmp_path / "a" / "manifest.json").exists()
    sync.finish_copies(tmp_path)
    assert (tmp_path / "b").exists() == is_committed


@pytest.mark.parametrize("way", ["next saves", "finish_copies", "another engine", "overwritten"])
def test_a_copy_that_failed_and_was_made_after_all_fails_no_run(tmp_path: Path, way: str) -> None:
    """The second tier was away for a while. Who waits for the failed copy hears of it still."""
    near, far = tmp_path / "near", tmp_path / "far"
    far.write_text("in the way")
    with sync.Engine(SMALL, observer=EventLog()) as engine:
        handle = engine.start_save(STATE, near / "a", then=far / "a")
        handle.durable.wait_done()
        far.unlink()
        match way:
            case "finish_copies":
                assert engine.finish_copies(near) == (str(far / "a"),)
            case "overwritten":
                newer = engine.start_save(STATE, near / "a", then=far / "a", overwrite=True)
                newer.durable.wait()
            case "next saves" | "another engine":
                if way == "another engine":
                    assert sync.finish_copies(near) == (str(far / "a"),)
                for name in "bc":  # the first of them finds that the second tier is back
                    engine.start_save(STATE, near / name, then=far / name).durable.wait()
    assert is_same(sync.load(far / "a"), STATE)
    with pytest.raises(StorageError):
        handle.durable.wait()


def test_a_copy_that_nobody_makes_any_more_fails_the_run(tmp_path: Path) -> None:
    """What replaced its checkpoint has a copy nowhere, or elsewhere."""
    near, far = tmp_path / "near", tmp_path / "far"
    far.write_text("in the way")
    for then in (None, tmp_path / "elsewhere"):
        with pytest.raises(StorageError), sync.Engine(SMALL, observer=EventLog()) as engine:
            engine.start_save(STATE, near / "a", then=far / "a", overwrite=True).result()
            engine.save(STATE, near / "a", then=then and then / "a", overwrite=True)
            for name in "bc":
                engine.save(STATE, near / name, then=tmp_path / "good" / name, overwrite=True)


def test_a_copy_that_is_still_owed_fails_the_run(tmp_path: Path) -> None:
    """Another one was made since; this one was refused again."""
    near, far = tmp_path / "near", tmp_path / "far"
    sync.save(filled_state([10], 1), far / "a", config=SMALL)
    with pytest.raises(CheckpointExistsError), sync.Engine(SMALL, observer=EventLog()) as engine:
        engine.start_save(STATE, near / "a", then=far / "a").durable.wait_done()
        for name in "bc":
            engine.start_save(STATE, near / name, then=far / name).durable.wait()


NAMES = ("a", "b", "c", "d")


def owe(near: Path, far: Path) -> None:
    """Commit checkpoints whose copies are owed: the second tier is away, and then back."""
    far.write_text("in the way")
    with sync.Engine(SMALL, observer=EventLog()) as engine:
        for name in NAMES:
            handle = engine.start_save(STATE, near / name, then=far / name)
            with pytest.raises(CheckpointError):
                handle.durable.wait()
    far.unlink()


@pytest.mark.parametrize("way", ["engine", "save", "one call", "checkpointer"])
def test_an_engine_that_is_left_at_once_makes_all_copies_that_are_owed(
    tmp_path: Path, way: str
) -> None:
    """A run that saves and ends is the next one that saves, whether or not it takes its time."""
    near, far = tmp_path / "near", tmp_path / "far"
    owe(near, far)
    if way == "engine":
        with sync.Engine(SMALL) as engine:
            engine.start_save(STATE, near / "z", then=far / "z")
    elif way == "save":
        sync.save(STATE, near / "z", then=far / "z", config=SMALL)
    elif way == "one call":
        ckptio.save(STATE, near / "z", then=far / "z", config=SMALL).durable.wait()
    else:
        with sync.Checkpointer(near, then=far, config=SMALL):
            pass
    for name in NAMES:
        assert files_in(far / name) == files_in(near / name)


def test_an_engine_that_is_left_by_an_error_stops_copies_that_are_owed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay owed, and the event says which one was cut off."""
    near, far = tmp_path / "near", tmp_path / "far"
    owe(near, far)
    begun, stopped = threading.Event(), told_of_abort(monkeypatch)
    log = EventLog()

    def watch(event: Event) -> None:
        log(event)
        if isinstance(event, CopyStarted) and event.is_resumed:
            begun.set()
            assert stopped.wait(60)

    engine = sync.Engine(SMALL, observer=watch)
    with pytest.raises(ZeroDivisionError), engine:  # the block is what is tested
        engine.start_save(STATE, near / "z", then=far / "z")
        assert begun.wait(60)
        _ = 1 // 0
    assert log.of(CopyFailed)
    made = sync.finish_copies(near, config=SMALL)
    assert set(made) >= {str(far / name) for name in NAMES[1:]}


def test_a_copy_that_cannot_even_begin_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its note is damaged: the others are made, and the observer, or the log, has that one."""
    near, far = tmp_path / "near", tmp_path / "far"
    owe(near, far)
    (note,) = (near / "b").glob(".copy-*")
    note.write_bytes(b"{}")
    log = EventLog()
    sync.save(STATE, near / "y", then=far / "y", config=SMALL, observer=log)
    (event,) = log.of(CopyFailed)
    assert (event.path, event.to) == (str(near / "b"), "")
    assert isinstance(event.error, FormatError)
    for name in ("a", "c", "d"):
        assert files_in(far / name) == files_in(near / name)
    caplog.clear()
    sync.save(STATE, near / "z", then=far / "z", config=SMALL)
    assert "bad note of a copy" in caplog.text


def test_who_aborts_the_save_of_one_call_does_not_wait_for_copies_that_are_owed(
    tmp_path: Path,
) -> None:
    """Nobody else has a handle of those; they stay owed."""
    near, far = tmp_path / "near", tmp_path / "far"
    owe(near, far)
    has_handle = threading.Event()
    log = EventLog()

    def watch(event: Event) -> None:
        log(event)
        if isinstance(event, CopyStarted) and event.is_resumed:
            has_handle.wait()
            handle.abort()

    handle = ckptio.save(STATE, near / "z", then=far / "z", config=SMALL, observer=watch)
    has_handle.set()
    handle.durable.wait_done()
    made = {event.path for event in log.of(CopyCommitted)}
    assert not made & {str(near / name) for name in NAMES}
    assert set(sync.finish_copies(near, config=SMALL)) >= {str(far / name) for name in NAMES}


def test_blocking_twins_copy_too(tmp_path: Path, url: str) -> None:
    """A function waits for both tiers; an engine's `save` for the first."""
    sync.save(STATE, tmp_path / "a", then=f"{url}/a", config=SMALL)
    assert objects_in(f"{url}/a") == files_in(tmp_path / "a")
    with sync.Engine(SMALL) as engine:
        engine.save(STATE, tmp_path / "b", then=f"{url}/b")
        handle = engine.start_save(STATE, tmp_path / "c", then=f"{url}/c")
        assert handle.durable.wait().path == f"{url}/c"
        assert_same(engine.load(tmp_path / "nowhere", then=f"{url}/c"), STATE)
        assert engine.finish_copies(tmp_path) == ()
    for name in "bc":
        assert objects_in(f"{url}/{name}") == files_in(tmp_path / name)
    assert_same(sync.load(tmp_path / "nowhere", then=f"{url}/b", config=SMALL), STATE)
    with pytest.raises(CheckpointExistsError):
        sync.save(STATE, tmp_path / "d", then=f"{url}/a", config=SMALL)
    assert_same(sync.load(tmp_path / "d", config=SMALL), STATE)


def test_credentials_in_the_url_of_a_tier_are_refused(tmp_path: Path) -> None:
    """Before a note could keep them; the message does not have them either."""
    with pytest.raises(ConfigError) as raised:
        sync.save(STATE, tmp_path / "a", then="s3://key:hush@bucket/a", config=SMALL)
    assert "hush" not in str(raised.value)
    assert names_in(tmp_path) == []


def test_a_process_that_is_killed_in_its_copy_owes_it(tmp_path: Path) -> None:
    """The next run finishes it, from the files; nothing of the killed one is left."""
    script = f"""
        import os, signal
        from ckptio import sync
        from ckptio.events import CopyProgressed
        from tests.rig import SMALL, random_state

        def watch(event):
            if isinstance(event, CopyProgressed):
                os.kill(os.getpid(), signal.SIGKILL)

        there = {str(tmp_path)!r}
        sync.save(
            random_state({SIZES!r}), there + "/near/a", then=there + "/far/a",
            config=SMALL, observer=watch,
        )
    """
    run_program(textwrap.dedent(script), code=-signal.SIGKILL)
    near, far = tmp_path / "near" / "a", tmp_path / "far" / "a"
    assert committed(near) is not None
    assert committed(far) is None
    log = EventLog()
    assert sync.finish_copies(tmp_path / "near", config=SMALL, observer=log) == (str(far),)
    assert log.of(CopyStarted)[0].is_resumed
    assert_tidy(near)
    assert_tidy(far)
    assert files_in(near) == files_in(far)
    assert_same(sync.load(far, config=SMALL), STATE)
    assert sync.finish_copies(near, config=SMALL) == ()


COARSE = config_with(block_nbytes=64 * KiB, bucket_nbytes=64 * KiB)
OLD, NEW = random_state([5000], 1), random_state([70 * KiB, 3000], 2)


def save_and_die(near: Path, far: Path, number: int) -> bool:
    """Save with a copy in an engine that dies before operation `number`; false if it did not."""
    files = RecordingFiles(crash_at(number))
    core = FilesCore(COARSE, None, files)

    async def scenario() -> None:
        async with engine_on(core) as engine:
            handle = engine.save(NEW, near, overwrite=True, then=far)
            with contextlib.suppress(SaveAbortedError, BaseException):
                await handle.durable

    with contextlib.suppress(SaveAbortedError):
        asyncio.run(scenario())
    files.bury()
    return number < len(files.operations)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "overwrite"])
def test_between_directories_a_crash_anywhere_is_made_up_for(
    tmp_path: Path, *, fresh: bool
) -> None:
    """Real files: the copy is old, new or not there, then new; and only its files are left."""
    seen = set()
    for number in itertools.count():
        near, far = (tmp_path / str(number) / tier / "a" for tier in ("near", "far"))
        if not fresh:
            sync.save(OLD, near, then=far, config=COARSE)
        died = save_and_die(near, far, number)
        is_new, is_copied = is_committed(near, NEW), is_committed(far, NEW)
        assert is_new or not is_copied
        if not is_copied:
            assert committed(far) is None if fresh else is_committed(far, OLD)
        seen.add((is_new, is_copied))
        if is_new:
            sync.finish_copies(near.parent, config=COARSE)
            assert is_committed(far, NEW)
            assert committed(far) == committed(near)
            assert_tidy(far)
            assert not [name for name in names_in(near) if name.startswith(".copy-")]
        if not died:
            break
    assert seen == {(False, False), (True, False), (True, True)}


class FailsToSync(RecordingFiles):
    """A disk that says of one data file, `number` in the order of syncs, that it is not written.

    It says so once, and takes its pages for clean from then on; they read back well.
    """

    def __init__(self, far: Path, number: int) -> None:
        super().__init__(self._look)
        self.lost = ""
        self._far = str(far)
        self._num_left = number

    def _look(self, operation: Operation) -> None:
        path = operation.path
        if (operation.kind, os.path.splitext(path)[1]) != ("fsync", ".safetensors"):
            return
        if os.path.dirname(path) == self._far:
            self._num_left -= 1
            if self._num_left == -1:
                self.lost = path
                raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_file_that_was_not_synced_is_not_taken_for_whole(tmp_path: Path) -> None:
    """Neither one that was just written nor one that an earlier copy had brought."""
    near, far = tmp_path / "near" / "a", tmp_path / "far" / "a"

    async def scenario(files: RecordingFiles) -> None:
        async with engine_on(FilesCore(COARSE, None, files)) as engine:
            if near.exists():
                await engine.finish_copies(near)
            else:
                await engine.save(NEW, near, then=far).durable

    for number, kind in ((1, "create"), (0, "open")):
        files = FailsToSync(far, number)
        with pytest.raises(StorageError, match="Input/output"):
            asyncio.run(scenario(files))
        assert files.lost not in ("", *map(str, far.iterdir()))
        last = [
            op.kind
            for op in files.operations
            if op.path == files.lost and op.kind in ("create", "open")
        ]
        assert last[-1] == kind
    again = RecordingFiles()
    asyncio.run(scenario(again))
    assert ("create", os.path.basename(files.lost)) in again.kinds("create")
    assert_same(sync.load(far, config=COARSE), NEW)


def test_a_committed_copy_keeps_a_file_that_cannot_be_synced_again(tmp_path: Path) -> None:
    """Its run died before the note was removed; the file may be on the disk as it is."""
    near, far = tmp_path / "near" / "a", tmp_path / "far" / "a"
    notes: dict[Path, bytes] = {}

    def take_note(event: Event) -> None:
        if isinstance(event, SaveCommitted):
            notes.update({path: path.read_bytes() for path in near.glob(".copy-*")})

    sync.save(NEW, near, then=far, config=COARSE, observer=take_note)
    for path, data in notes.items():
        path.write_bytes(data)
    files = FailsToSync(far, 0)

    async def scenario() -> None:
        async with engine_on(FilesCore(COARSE, None, files)) as engine:
            await engine.finish_copies(near)

    with pytest.raises(StorageError, match="Input/output"):
        asyncio.run(scenario())
    assert files.lost
    assert_same(sync.load(far, config=COARSE), NEW)


@pytest.mark.parametrize("fails", [False, True])
async def test_nobody_else_takes_up_the_copy_of_a_save_that_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """They finish the copies of a directory, and may, as soon as the save has given up."""
    near, far = tmp_path / "near" / "a", tmp_path / "far" / "a"
    made: list[tuple[str, ...]] = []

    def finish_first(event: Event) -> None:
        if isinstance(event, SaveCommitted):
            others = threading.Thread(target=lambda: made.append(sync.finish_copies(near.parent)))
            others.start()
            others.join()

    log = EventLog()
    async with ckptio.Engine(SMALL, observer=finish_first) as engine:
        with monkeypatch.context() as patched:
            if fails:
                patched.setattr("ckptio.runtime.save_copy.make_copy", none_is_made)
            handle = engine.save(STATE, near, then=far)
            await handle
            with pytest.raises(StorageError) if fails else contextlib.nullcontext():
                await handle.durable
    assert made == [()]
    assert sync.finish_copies(near, observer=log) == ((str(far),) if fails else ())
    assert files_in(far) == files_in(near)


async def none_is_made(*args: Any) -> None:
    """Let go of the note, as who fails does."""
    await args[-1].release()
    raise StorageError("no", path="", code=errno.EIO)


def test_what_was_saved_just_now_is_copied_over_what_is_newer_by_its_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that was ahead."""
    near, far = tmp_path / "near" / "a", tmp_path / "far" / "a"

    with monkeypatch.context() as patched:
        patched.setattr("ckptio.engine.save.dt.datetime", Ahead)
        sync.save(OLD, far, config=COARSE)
    sync.save(NEW, near, overwrite=True, then=far, config=COARSE)
    assert_same(sync.load(far, config=COARSE), NEW)


def test_a_copy_that_finds_no_room_keeps_what_it_has_written(tmp_path: Path) -> None:
    """What is there is good, and the next run goes on with it."""
    near, far = tmp_path / "near" / "a", tmp_path / "far" / "a"
    state = random_state([4 * 64 * KiB])

    def fill_up(operation: Operation) -> None:
        if operation.kind == "pwrite" and operation.path.startswith(f"{far}/data-"):
            seen.append(operation)
            if len(seen) > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scenario() -> None:
        files = RecordingFiles(fill_up)
        async with engine_on(FilesCore(SMALL, None, files)) as engine:
            await engine.save(state, near, then=far).durable

    seen: list[Operation] = []
    with pytest.raises(StorageError, match="No space"):
        asyncio.run(scenario())
    assert any(far.glob("data-*"))
    sync.finish_copies(near, config=SMALL)
    assert_same(sync.load(far, config=SMALL), state)


def is_committed(directory: Path, state: dict[str, torch.Tensor]) -> bool:
    """Whether a directory has a state, whole."""
    if committed(directory) is None:
        return False
    return is_same(sync.load(directory, config=COARSE), state)


async def test_a_copy_needs_memory_of_its_share_of_the_pool(tmp_path: Path) -> None:
    """However large the checkpoint: a quarter of the slabs, and never more than the pool."""
    state = random_state([300 * KiB] * 4)
    config = config_with(pool_nbytes=4 * SMALL.slab_nbytes)
    async with ckptio.Engine(config) as engine:
        await engine.save(state, tmp_path / "a", then=tmp_path / "b").durable
        assert engine.statistics().peak_leased_nbytes <= config.pool_nbytes
        assert_same(await engine.load(tmp_path / "b"), state)


async def test_a_copy_that_fails_is_an_event(tmp_path: Path) -> None:
    """Where from, where to, and why; the error says what is there, and who makes the copy."""
    log = EventLog()
    (tmp_path / "file").write_text("in the way")
    async with ckptio.Engine(SMALL, observer=log) as engine:
        handle = engine.save(STATE, tmp_path / "a", then=tmp_path / "file" / "b")
        await handle
        with pytest.raises(StorageError) as caught:
            await handle.durable
    (note,) = caught.value.__notes__
    assert note.startswith(f"the checkpoint {str(tmp_path / 'a')!r} itself is committed, and stays")
    assert f"or ckptio.finish_copies({str(tmp_path / 'a')!r}), goes on with it" in note
    (event,) = log.of(CopyFailed)
    assert (event.path, event.to) == (str(tmp_path / "a"), str(tmp_path / "file" / "b"))
    assert isinstance(event.error, StorageError)
    (tmp_path / "file").unlink()
    assert sync.finish_copies(tmp_path / "a", config=SMALL) == (event.to,)
    assert_same(sync.load(event.to, config=SMALL), STATE)
