"""The plug-ins on object stores: the same promises, and nothing held between DCP's calls."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import threading
import uuid
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save

import ckptio
from ckptio.adapters.dcp import StorageReader, StorageWriter
from ckptio.config import CheckpointConfig, MiB
from ckptio.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    StorageError,
)
from ckptio.storage import object_attempt
from tests.adapters.rig import QUICK, blank, cause, end_garbage, load, same, save
from tests.adapters.test_dcp_faults import Stumbling, state_of
from tests.adapters.test_dcp_ranks import has
from tests.conftest import let_end, open_files, still_open_beside
from tests.groups import end_process_groups

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.ranks.jobs.pool import Jobs

BUCKET = "checkpoints"


class Place(NamedTuple):
    """Where to save, and how."""

    url: str
    config: CheckpointConfig
    fs: Any

    def names(self, below: str = "") -> list[str]:
        """Name everything that is there."""
        self.fs.invalidate_cache()
        path = self.url.partition("://")[2] + below
        return sorted(key.rpartition("/")[2] for key in self.fs.find(path))

    def assert_tidy(self) -> None:
        """Check that there is one checkpoint, and nothing besides."""
        config = self.config
        files = {file.name for file in ckptio.sync.inspect(self.url, config=config).files}
        assert set(self.names()) == {"manifest.json", *files}

    def writer(self, **options: Any) -> StorageWriter:
        return StorageWriter(self.url, config=self.config, **options)

    def reader(self, **options: Any) -> StorageReader:
        return StorageReader(self.url, config=self.config, **options)

    def load(self) -> Any:
        return ckptio.sync.load(self.url, config=self.config)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 server of this process; gives its endpoint."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place of its own in an object store."""
    name = uuid.uuid4().hex
    if request.param == "memory":
        fs = fsspec.filesystem("memory")
        yield Place(f"memory://{name}/step-1", QUICK, fs)
        fs.rm(f"/{name}", recursive=True)
        return
    endpoint = request.getfixturevalue("s3")
    options = {"key": "a", "secret": "b", "endpoint_url": endpoint}
    fs = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of botocore
        if not fs.exists(BUCKET):
            fs.mkdir(BUCKET)
    # parts of S3 have 5 MiB at least
    config = dataclasses.replace(
        QUICK, storage_options=options, slab_nbytes=5 * MiB, pool_nbytes=20 * MiB
    )
    yield Place(f"s3://{BUCKET}/{name}/step-1", config, fs)


def test_what_is_saved_comes_back(place: Place) -> None:
    """To DCP and to ckptio; in several files, of which one is sent in parts."""
    state = {**state_of(1.0), "large": torch.randn(2_000_000), "names": ["a", {"b": 1}]}
    save(dict(state), storage_writer=place.writer(thread_count=2))
    place.assert_tidy()
    assert same(load(blank(state), storage_reader=place.reader()), state)
    assert same(place.load(), state)
    assert not ckptio.sync.verify(place.url, config=place.config).damage


def test_one_writer_overwrites_and_goes_elsewhere(place: Place) -> None:
    """Nothing of the old state stays, and other checkpoints are untouched."""
    writer = place.writer()
    save({**state_of(1.0), "more": torch.ones(70_000)}, storage_writer=writer)
    save(state_of(2.0), storage_writer=writer)
    place.assert_tidy()
    save(state_of(3.0), storage_writer=writer, checkpoint_id=place.url.replace("-1", "-2"))
    assert same(place.load(), state_of(2.0))
    assert same(ckptio.sync.load(place.url.replace("-1", "-2"), config=place.config), state_of(3.0))


def test_a_failed_overwrite_leaves_the_old_checkpoint_whole(place: Place) -> None:
    """And nothing besides."""
    writer = place.writer()
    save(state_of(1.0), storage_writer=writer)
    before = place.names()
    with cause() as causes:
        save(state_of(2.0), storage_writer=writer, planner=Stumbling())
    assert [str(error) for error in causes] == ["in a thread"]
    assert place.names() == before
    assert same(load(blank(state_of(0.0)), storage_reader=place.reader()), state_of(1.0))
    with cause() as causes:
        save(state_of(2.0), storage_writer=place.writer(overwrite=False))
    assert isinstance(causes[0], CheckpointExistsError)
    assert place.names() == before


def own_threads() -> set[threading.Thread]:
    """Give the threads of engines, loops and stores that do not end."""

    def own() -> set[threading.Thread]:
        names = ("ckptio", "AnyIO")
        return {t for t in threading.enumerate() if any(name in t.name for name in names)}

    let_end(own())
    return own()


def give_up(writer: StorageWriter) -> None:
    """Save as DCP does, up to where another rank fails."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_of(9.0), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, _ = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    writer.write_data(planner.finish_plan(plan), planner).wait()


def test_a_save_that_dcp_gives_up_elsewhere_is_removed(place: Place) -> None:
    """At the next save, at a reset, at the end of the writer; nothing is open meanwhile."""
    writer = place.writer()
    save(state_of(2.0), storage_writer=writer)
    assert not own_threads()
    files = open_files()
    give_up(writer)
    assert not own_threads()
    if place.url.startswith("memory:"):  # a server in this process opens what it likes
        assert still_open_beside(files) == set()
    assert len(place.names()) > 3
    save(state_of(3.0), storage_writer=writer)
    place.assert_tidy()
    give_up(writer)
    writer.reset()
    place.assert_tidy()
    give_up(writer)
    del writer
    end_garbage()
    place.assert_tidy()
    assert same(place.load(), state_of(3.0))


def test_saves_and_loads_leave_no_thread_and_no_connection(place: Place) -> None:
    """Failed ones among them."""
    writer, reader = place.writer(), place.reader()
    save(state_of(0.0), storage_writer=writer)
    files = open_files()
    for i in range(5 if place.url.startswith("memory:") else 1):
        save(state_of(float(i)), storage_writer=writer)
        with cause():
            save(state_of(float(i)), storage_writer=writer, planner=Stumbling())
        load(blank(state_of(0.0)), storage_reader=reader)
    assert not own_threads()
    if place.url.startswith("memory:"):
        assert still_open_beside(files) == set()


def test_the_plug_ins_may_be_pickled_and_show_no_secret(place: Place) -> None:
    """Options travel with them, as a process that saves needs them."""
    state = state_of(4.0)
    save(dict(state), storage_writer=pickle.loads(pickle.dumps(place.writer())))  # noqa: S301  # our own
    reader = pickle.loads(pickle.dumps(place.reader()))  # noqa: S301  # our own
    assert same(load(blank(state), storage_reader=reader), state)
    secret = dataclasses.replace(place.config, storage_options={"key": "k", "secret": "hidden"})
    for made in (StorageWriter(place.url, config=secret), StorageReader(place.url, config=secret)):
        assert "hidden" not in f"{made!r} {vars(made)!r}"


def test_async_save_goes_there_too(place: Place) -> None:
    """In a thread, while the state changes."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # it is exported
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch
            state = state_of(5.0)
            future = async_save(state, storage_writer=place.writer())
            state["w"].zero_()
            future.result()  # type: ignore[union-attr]  # of one kind here
    finally:
        end_process_groups()
    assert same(place.load(), state_of(5.0))


def test_an_object_that_is_gone_or_cut_is_noticed_before_any_target_changes(place: Place) -> None:
    """As with files."""
    save(state_of(1.0), storage_writer=place.writer())
    (name,) = (
        file.name
        for file in ckptio.sync.inspect(place.url, config=place.config).files
        if file.nbytes > 200_000
    )
    path = f"{place.url.partition('://')[2]}/{name}"
    data = place.fs.cat_file(path)
    for kind in ("cut", "gone"):
        if kind == "cut":
            place.fs.pipe_file(path, data[:-1])
        else:
            place.fs.rm(path)
        target = blank(state_of(0.0))
        with cause() as causes:
            load(target, storage_reader=place.reader())
        assert isinstance(causes[0], CorruptionError)
        assert not target["w"].any()


class UnsureFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Files in memory, where writing a manifest fails."""

    protocol = "unsure"
    error: OSError = OSError()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("unsure://", "memory://")))

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        if path.endswith("manifest.json"):
            raise type(self).error
        super().pipe_file(path, value, **kwargs)


class SlowFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Files in memory, whose removal needs a lock; that it was not to be had in time is noted."""

    protocol = "slow"
    lock = threading.Lock()
    late: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("slow://", "memory://")))

    def rm_file(self, path: str) -> None:
        if not self.lock.acquire(timeout=5):
            self.late.append(path)
            return
        self.lock.release()
        super().rm_file(path)


def test_a_writer_that_is_garbage_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever allocates collects garbage, with whatever locks: here with one that is needed."""
    monkeypatch.setattr(SlowFileSystem, "store", {})
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    writer = StorageWriter("slow://a/b", config=QUICK)
    give_up(writer)
    assert SlowFileSystem.store
    circle = [writer]
    circle.append(circle)  # type: ignore[arg-type]
    with SlowFileSystem.lock:
        del writer, circle
        gc.collect()
    end_garbage()
    assert not SlowFileSystem.store
    assert not SlowFileSystem.late


@pytest.mark.parametrize("error", [PermissionError(), TimeoutError()])
def test_a_commit_that_fails_removes_what_is_surely_not_needed(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody knows whether the manifest is there, its files stay, at any later end too."""
    monkeypatch.setattr(object_attempt, "_MAX_SETTLING", 1)
    monkeypatch.setattr(UnsureFileSystem, "error", error)
    monkeypatch.setattr(UnsureFileSystem, "store", {})
    fsspec.register_implementation("unsure", UnsureFileSystem, clobber=True)
    writer = StorageWriter("unsure://a/b", config=QUICK)
    with cause() as causes:
        save(state_of(1.0), storage_writer=writer)
    assert isinstance(causes[0], StorageError)
    writer.reset()
    found = [path for path in UnsureFileSystem.store if "data-" in path]
    assert bool(found) is isinstance(error, TimeoutError)


def test_what_is_no_place_is_refused() -> None:
    """At once, before anything is sent."""
    for url in ("s3://bucket", "nobody://x/y", "s3://key:secret@bucket/x", ""):
        assert not StorageWriter.validate_checkpoint_id(url)
        assert not StorageReader.validate_checkpoint_id(url)
        for plug_in in (StorageWriter, StorageReader):
            with pytest.raises(ConfigError) as caught:
                plug_in(url)
            assert "secret" not in str(caught.value)
    assert StorageWriter.validate_checkpoint_id("memory://x/y")
    with pytest.raises(CheckpointNotFoundError):
        StorageReader("memory://x/y").read_metadata()


def test_not_to_sync_is_refused_at_a_url(tmp_path: Path) -> None:
    """It would have no effect; at once where the URL is known, else when it is."""
    with pytest.raises(ConfigError, match="sync_files"):
        StorageWriter("memory://x/y", sync_files=False)
    for given in (True, None):
        assert StorageWriter("memory://x/y", sync_files=given).path == "memory://x/y"
    assert StorageWriter(f"file://{tmp_path}/a", sync_files=False).path
    writer = StorageWriter(tmp_path / "c", sync_files=False, config=QUICK)
    save(state_of(1.0), storage_writer=writer)
    with cause() as causes:
        save(state_of(1.0), storage_writer=writer, checkpoint_id="memory://x/key:secret@y")
    assert isinstance(causes[0], ConfigError)
    assert "secret" not in str(causes[0])


def test_ranks_save_together_and_each_for_itself(jobs: Jobs, s3: str) -> None:
    """Saved by rows, loaded by columns; one that fails fails all, and the old checkpoint stays."""
    options = {"key": "a", "secret": "b", "endpoint_url": s3}
    fs = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, **options)
    if not fs.exists(BUCKET):
        fs.mkdir(BUCKET)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    here = "tests.adapters.jobs"
    sharded: dict[str, Any] = {"path": f"{url}/sharded", "options": options, "placements": [0]}
    jobs.run(2, f"{here}:save_layout", mesh=[2], **sharded)
    jobs.run(2, f"{here}:load_layout", mesh=[2], **{**sharded, "placements": [1]})
    answers = jobs.run(
        2, f"{here}:fail_at_url", path=f"{url}/failing", options=options, phase="data"
    )
    assert all("in the data of rank 1" in answer for answer in answers)
    if has("use_collectives"):
        jobs.run(2, f"{here}:save_for_itself", path=f"{url}/apart", options=options)
        below = {key.split("/")[-2] for key in fs.find(f"{url}/apart")}
        assert below == {"rank-00000", "rank-00001"}
    assert not any(".attempt" in key for key in fs.find(url))
