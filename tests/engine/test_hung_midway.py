"""A mount whose server goes in the middle of a save or of a load: what goes elsewhere goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ckptio import _threads, sync
from ckptio.engine import context, lanes
from ckptio.runtime import make_context
from ckptio.staging.copy import TargetState
from ckptio.storage import linux
from tests.mounts import HangingFiles, Mount
from tests.rig import SMALL, FilesCore, assert_same, config_with, filled_state, random_state

if TYPE_CHECKING:
    from pathlib import Path

    from ckptio import CheckpointConfig

pytestmark = pytest.mark.usefixtures("no_leaks")
#: More files, and more slabs, than an engine has threads for them.
MANY = [40_000] * 10


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    for module in (make_context, lanes):
        monkeypatch.setattr(module, "HUNG_S", 0.05)
    monkeypatch.setattr(linux, "num_cached_pages", lambda *_: 0)  # so that loads read
    return Mount(tmp_path / "far", monkeypatch)


def engine_at(mount: Mount, call: str, config: CheckpointConfig) -> sync.Engine:
    """Make an engine that hangs at the mount in one call."""
    engine = sync.Engine(config)
    engine._core = FilesCore(config, None, HangingFiles(mount, call))
    return engine


@pytest.mark.parametrize(("call", "max_hung"), [("pwrite", 4), ("fsync", 64)])
def test_saves_and_loads_elsewhere_go_on(
    tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch, call: str, max_hung: int
) -> None:
    """As many as may be in flight hang, with all threads that they may have.

    A save hangs in no more writes than there are threads for one.
    """
    monkeypatch.setattr(_threads, "_MAX_HUNG", max_hung)
    near, far = tmp_path / "near", [tmp_path / "far" / name for name in "ab"]
    config = config_with(
        pool_nbytes=4 * SMALL.pool_nbytes, bucket_nbytes=40_000, max_writes=2, max_saves=3
    )
    with engine_at(mount, call, config) as engine:
        with mount.hanging(at_once=False):
            hung = [engine.start_save(random_state(MANY), path) for path in far]
            for handle, name in zip(hung, "ab", strict=True):
                handle.staged.wait()
                mount.wait_until_hung(call, f"/{name}/data-")
            for value in (1, 2):
                engine.save(filled_state(MANY, value), near, overwrite=True)
                assert_same(engine.load(near), filled_state(MANY, value))
            assert not any(handle.committed.done() for handle in hung)
        for handle in hung:
            handle.result()
        for path in far:
            assert_same(engine.load(path), random_state(MANY))


def test_so_they_do_beside_loads_that_hang(tmp_path: Path, mount: Mount) -> None:
    """With one thread to read: it is theirs, and so is the next."""
    near, far, config = tmp_path / "near", tmp_path / "far", config_with(max_reads=1)
    sync.save(random_state(MANY), far, config=SMALL)
    with engine_at(mount, "pread", config) as engine, ThreadPoolExecutor(2) as pool:
        with mount.hanging(at_once=False):
            hung = [pool.submit(engine.load, far) for _ in range(2)]
            mount.wait_until_hung("pread")
            for value in (1, 2):
                engine.save(filled_state(MANY, value), near, overwrite=True)
                assert_same(engine.load(near), filled_state(MANY, value))
        for load in hung:
            assert_same(load.result(), random_state(MANY))


@pytest.mark.parametrize(
    ("call", "is_on_device", "num"),
    [("pread", False, 3), ("pread", True, 3), ("open", False, 4), ("close", False, 4)],
)
def test_a_load_takes_no_more_than_its_share(
    tmp_path: Path,
    mount: Mount,
    monkeypatch: pytest.MonkeyPatch,
    *,
    call: str,
    is_on_device: bool,
    num: int,
) -> None:
    """However long it hangs: other lanes of it would take all slabs, and open all files.

    Or all threads, however many may hang.
    """
    monkeypatch.setattr(TargetState, "is_async", is_on_device)
    near, far = tmp_path / "near", tmp_path / "far"
    many = [2 * SMALL.slab_nbytes] * (context.MAX_OPEN_FILES + 8)
    pool_nbytes = 100 * SMALL.slab_nbytes if is_on_device else SMALL.pool_nbytes
    config = config_with(bucket_nbytes=SMALL.slab_nbytes, max_reads=3, pool_nbytes=pool_nbytes)
    sync.save(random_state(many), far, config=config)
    with engine_at(mount, call, config) as engine, ThreadPoolExecutor(2) as pool:

        def go_on() -> None:
            for value in (1, 2, 3, 4):
                engine.save(filled_state(many[:2], value), near, overwrite=True)
                assert_same(engine.load(near), filled_state(many[:2], value))

        with mount.hanging(at_once=False):
            hung = pool.submit(engine.load, far)
            mount.wait_until_hung(call)
            pool.submit(go_on).result(30)
            assert sum(call in what for what in mount.waited) == num
        assert_same(hung.result(), random_state(many))


def test_a_save_of_many_files_hangs_in_few(tmp_path: Path, mount: Mount) -> None:
    """It closes some at a time: all of them would take more threads than may hang."""
    near, far = tmp_path / "near", tmp_path / "far"
    many = [4_000] * 100
    config = config_with(pool_nbytes=16 * SMALL.pool_nbytes, bucket_nbytes=4_000)
    with engine_at(mount, "fsync", config) as engine, ThreadPoolExecutor(1) as pool:
        with mount.hanging(at_once=False):
            hung = engine.start_save(random_state(many), far)
            hung.staged.wait()
            mount.wait_until_hung("fsync", "/data-")
            pool.submit(engine.save, filled_state(MANY, 1), near).result(30)
            assert sum("fsync" in what for what in mount.waited) == 4
        hung.result()
        assert_same(engine.load(near), filled_state(MANY, 1))
        assert_same(engine.load(far), random_state(many))
