"""A second tier on a mount whose server is gone: who waits for it, and who does not."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from ckptio import sync
from ckptio._threads import Threads
from ckptio.errors import ConfigError, CorruptionError, StorageError
from ckptio.events import SaveCommitted
from ckptio.format.note import CopyNote, encode_note
from ckptio.runtime import make_context, second_tier
from ckptio.runtime.core import EngineCore
from ckptio.storage import local
from ckptio.storage.file_names import NOTE_PREFIX
from tests.mounts import HangingFiles, Mount
from tests.rig import SMALL, FilesCore, assert_same, config_with, filled_state, random_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptio.engine.context import EngineContext
    from ckptio.events import Event

pytestmark = pytest.mark.usefixtures("no_leaks")
SIZES = [100_000, 3000]


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    monkeypatch.setattr(local, "_LOOK_S", 0.05)
    return Mount(tmp_path / "far", monkeypatch)


def assert_damage_is_said(engine: sync.Engine, near: Path, far: Path) -> None:
    """Harm a block of the first tier, and then remove it: a load says so each time."""
    for file in near.glob("data-*"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with pytest.raises(CorruptionError):
        engine.load(near, then=far)
    next(near.glob("data-*")).unlink()
    with pytest.raises(CorruptionError):
        engine.load(near, then=far)


def test_a_load_does_not_wait_for_it(tmp_path: Path, mount: Mount) -> None:
    """Nor does it where a block of the first tier is damaged: that is said."""
    near, far = tmp_path / "near", tmp_path / "far"
    sync.save(random_state(SIZES), near, config=SMALL)
    sync.save(filled_state(SIZES, 1), far, config=SMALL)
    with mount.hanging():
        with sync.Engine(SMALL) as engine:
            assert_same(engine.load(near, then=far), random_state(SIZES))
            assert_damage_is_said(engine, near, far)
        assert len(mount.waited) == 1  # each time the same; and leaving did not


def test_nor_does_a_load_wait_where_its_manifest_alone_hangs(tmp_path: Path, mount: Mount) -> None:
    """The directory answers, as it is known here. However often: by one look that hangs."""
    near, far = tmp_path / "near", tmp_path / "far"
    sync.save(random_state(SIZES), near, config=SMALL)
    sync.save(filled_state(SIZES, 1), far, config=SMALL)
    with mount.hanging(only="/manifest"), sync.Engine(SMALL) as engine:
        for _ in range(3):
            assert_same(engine.load(near, then=far), random_state(SIZES))
        assert_damage_is_said(engine, near, far)
        assert mount.waited == [f"open {far}/manifest.json"]


def test_neither_the_caller_nor_any_save_waits_for_it(tmp_path: Path, mount: Mount) -> None:
    """From the moment of a commit on: the copy alone does, and is made when it is back."""
    near, far = tmp_path / "near", tmp_path / "far"
    state, config = random_state(SIZES), config_with(max_tier_copies=4)

    def watch(event: Event) -> None:
        if isinstance(event, SaveCommitted):
            mount.hang()

    with sync.Engine(config, observer=watch) as engine, mount.hanging(at_once=False):
        handles = []
        for i in range(6):
            handles.append(engine.start_save(state, near / str(i), then=far / str(i)))
            handles[-1].result()
            engine.save(state, near / f"alone-{i}")
            assert_same(engine.load(near / str(i)), state)
        assert not any(handle.durable.done() for handle in handles)
        # no more look at it than may copy, and the next in line
        assert len(mount.waited) <= 2 * (config.max_tier_copies + 1)
    for handle in handles:
        handle.durable.wait()
    assert_same(sync.load(far / "5", config=SMALL), state)


def test_an_engine_that_takes_copies_up_goes_on_meanwhile(tmp_path: Path, mount: Mount) -> None:
    """What an earlier run owed to it is looked for on no thread that saves need."""
    near, far = tmp_path / "near", tmp_path / "far"
    with sync.Engine(SMALL) as engine:
        far.write_text("in the way")
        with pytest.raises(StorageError):
            engine.start_save(random_state(SIZES), near / "a", then=far / "a").durable.wait()
        far.unlink()
    with sync.Engine(SMALL) as engine, mount.hanging():
        handle = engine.start_save(random_state(SIZES), near / "b", then=far / "b")
        handle.result()
        engine.save(random_state(SIZES), near / "c")
    assert_same(sync.load(far / "a", config=SMALL), random_state(SIZES))


@pytest.mark.parametrize("call", ["pwrite", "pread"])
def test_a_copy_that_hangs_midway_keeps_no_thread_of_the_first_tier(
    tmp_path: Path, mount: Mount, call: str
) -> None:
    """With one thread to write, and one to read: those of the copy are others."""
    near, far = tmp_path / "near", tmp_path / "far"
    state = random_state(SIZES)
    config = config_with(max_writes=1, max_reads=1)
    info = sync.save(state, near / "a", then=far / "a", config=SMALL)
    # a copy that nobody has said the end of: what is there is read
    owed = encode_note(CopyNote(copy_to=str(far / "a"), overwrite=False))
    (near / "a" / f"{NOTE_PREFIX}{info.save_id}").write_bytes(owed)
    engine = sync.Engine(config)
    engine._core = FilesCore(config, None, HangingFiles(mount, call))
    with engine, mount.hanging(at_once=False):
        handle = engine.start_save(state, near / "b", then=far / "b")
        handle.result()
        mount.wait_until_hung(call, "/a/data-" if call == "pread" else "/b/data-")
        for i in range(3):
            engine.save(state, near / f"alone-{i}")
            assert_same(engine.load(near / f"alone-{i}"), state)
    assert_same(sync.load(far / "b", config=SMALL), state)


@pytest.mark.parametrize(("call", "num"), [("pwrite", 12), ("fsync", 4)])
def test_nor_does_it_keep_those_of_another_second_tier(
    tmp_path: Path, mount: Mount, call: str, num: int
) -> None:
    """It hangs in few writes and syncs at a time: there are more threads than that."""
    near, far, other = tmp_path / "near", tmp_path / "far", tmp_path / "other"
    state, found = random_state([SMALL.slab_nbytes] * 30), random_state(SIZES)
    config = config_with(
        pool_nbytes=120 * SMALL.slab_nbytes, bucket_nbytes=SMALL.slab_nbytes, max_tier_copies=1
    )
    sync.save(found, other, config=SMALL)
    engine = sync.Engine(config)
    engine._core = FilesCore(config, None, HangingFiles(mount, call))
    with engine, mount.hanging(at_once=False), ThreadPoolExecutor(1) as pool:
        engine.start_save(state, near, then=far)
        mount.wait_until_hung(call)
        load = pool.submit(engine.load, tmp_path / "none", then=other)
        assert_same(load.result(30), found)
        assert sum(call in what for what in mount.waited) <= num
    assert_same(sync.load(far, config=SMALL), state)


def test_of_the_threads_of_second_tiers_those_that_hang_do_not_count_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if all of them do, another place is written to."""
    monkeypatch.setattr(make_context, "HUNG_S", 0.05)
    answers = threading.Event()

    async def hang(context: EngineContext) -> None:
        assert isinstance(context.far, Threads)
        hung = [context.far.submit(answers.wait) for _ in range(context.far.max_threads)]
        try:
            async with asyncio.timeout(30):
                await asyncio.wrap_future(context.far.submit(threading.get_ident))
        finally:
            answers.set()
        assert all(future.result() for future in hung)

    core = EngineCore(SMALL, None, "solo")
    core.start()
    try:
        core.call_blocking(hang, "hang")
    finally:
        core.close()


def test_a_second_tier_that_is_the_first_by_a_link_is_refused(tmp_path: Path) -> None:
    """Before the commit, and by a load: not on the caller's thread. Nothing is owed then."""
    near, link = tmp_path / "near", tmp_path / "link"
    link.symlink_to(near)
    with sync.Engine(SMALL) as engine:
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match="where the checkpoint itself goes"):
                engine.save(random_state(SIZES), near, then=link, overwrite=overwrite)
            assert not near.exists()
        engine.save(random_state(SIZES), near)
        with pytest.raises(ConfigError, match="where the checkpoint itself is"):
            engine.load(near, then=link)
        assert_same(engine.load(near), random_state(SIZES))


def test_that_it_is_the_first_by_a_link_is_said_by_the_copy_where_it_hung_before(
    tmp_path: Path, mount: Mount
) -> None:
    """The commit went without an answer. Nothing is owed then."""
    near, far = tmp_path / "near", tmp_path / "far"
    far.symlink_to(near)

    def watch(event: Event) -> None:
        if isinstance(event, SaveCommitted):
            mount.answer()
            for thread in threading.enumerate():
                if thread.name == "ckptio-look":
                    thread.join()

    with sync.Engine(SMALL, observer=watch) as engine, mount.hanging():
        handle = engine.start_save(random_state(SIZES), near, then=far)
        with pytest.raises(ConfigError, match="is the checkpoint itself") as caught:
            handle.durable.wait()
        assert caught.value.__notes__[0].endswith("itself is committed, and stays")
        handle.result()
    with sync.Engine(SMALL) as engine:
        assert engine.finish_copies(near) == ()
        assert not list(near.glob(".copy-*"))
        assert_same(engine.load(near), random_state(SIZES))


def test_commits_wait_once_for_a_second_tier_that_hangs(
    tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for as long as a look may take, nor each for a directory of its own, by a new thread."""
    monkeypatch.setattr(local, "_LOOK_S", 600.0)
    monkeypatch.setattr(second_tier, "_LOOK_S", 0.05)
    near, far = tmp_path / "near", tmp_path / "far"
    with sync.Engine(SMALL) as engine, mount.hanging():
        engine.start_save(random_state(SIZES), near / "0", then=far / "0" / "s").result()
        monkeypatch.setattr(second_tier, "_LOOK_S", 600.0)
        for i in range(1, 4):
            handle = engine.start_save(random_state(SIZES), near / f"{i}", then=far / f"{i}" / "s")
            assert handle.result(30).path == str(near / f"{i}")
        mount.answer()


class Tier:
    """Says where it is when it is asked, or is given up.

    Attributes:
        answers: Whether it says so.
        num_asked: How often it was asked.
        meanwhile: What happens while it is asked.
    """

    def __init__(self, name: str) -> None:
        self.path = self.identity = name
        self.answers = True
        self.num_asked = 0
        self.meanwhile: Callable[[], object] = lambda: None

    async def locate(self) -> bool:
        self.num_asked += 1
        self.meanwhile()
        return self.answers


def commit(core: EngineCore, tier: Any) -> object:
    """Look where a second tier is, as a save does; give the one that is taken for silent then."""
    near: Any = Tier("near")
    check = second_tier.look_for_other(core, near, tier)
    assert check is not None

    async def look(context: EngineContext) -> object:
        await check()
        while any("locate" in task.get_name() for task in asyncio.all_tasks()):
            await asyncio.sleep(0)
        return context.copies.silent

    return core.call_blocking(look, "look")


def test_while_one_is_silent_no_other_is_asked(core: EngineCore) -> None:
    """That one is, as the next save begins; the others again when it has answered."""
    one, other = Tier("one"), Tier("other")
    one.answers = False
    assert commit(core, one) is one
    for times in (2, 3):
        assert commit(core, other) is one
        assert (one.num_asked, other.num_asked) == (times, 0)
    one.answers, other.answers = True, False
    assert commit(core, other) is other
    assert (one.num_asked, other.num_asked) == (4, 1)
    other.answers = True
    assert commit(core, one) is None
    assert (one.num_asked, other.num_asked) == (5, 2)


def test_one_that_answers_says_nothing_of_another_that_was_found_silent(core: EngineCore) -> None:
    """By a save that began meanwhile."""
    one, other, third = Tier("one"), Tier("other"), Tier("third")
    one.answers = False
    assert commit(core, one) is one
    one.answers = True
    one.meanwhile = lambda: setattr(core.context.copies, "silent", other)
    assert commit(core, third) is other


def test_one_that_answers_after_a_commit_that_waited_is_silent_no_more(core: EngineCore) -> None:
    """What was noted while it was asked holds until then."""
    tier = Tier("far")
    tier.meanwhile = lambda: setattr(core.context.copies, "silent", tier)
    assert commit(core, tier) is None
