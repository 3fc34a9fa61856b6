"""Foreign formats in an object store: what is there is read, by the ranges that are wanted."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import random
import stat
import zipfile
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from safetensors.torch import save_file

import ckptio
from ckptio import sync
from ckptio._own_thread import in_own_thread
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    FormatError,
    StorageError,
)
from ckptio.foreign import objects
from ckptio.foreign.bridge import Bridge
from ckptio.foreign.objects import ObjectFolder
from ckptio.storage.requests import RequestLimit, Requests
from ckptio.testing import run_virtual
from ckptio.testing.bucket import MemoryBucket, StoredObject
from ckptio.testing.objects import MemoryBackend, MemoryStore
from tests.foreign.rig import (
    assert_same_state,
    make_training_state,
    make_weights,
    save_dcp,
    save_hf,
    save_small,
)
from tests.foreign.test_dcp import read_metadata, save_chunks, write_metadata
from tests.rig import SMALL, config_with
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckptio.testing.faults import Operation
    from ckptio.testing.objects import FaultKind

pytestmark = pytest.mark.usefixtures("no_leaks")

KINDS = ("hf", "index", "single", "safetensors", "dcp", "torch.save", "old torch.save")


class CountedFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Files in memory, and how much of each was read."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    read_nbytes: ClassVar[Counter[str]] = Counter()
    num_reads: ClassVar[Counter[str]] = Counter()
    fails: ClassVar[list[str]] = []
    behind_read: ClassVar[list[Callable[[int], None]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("counted://", "memory://")))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        if any(path.endswith(name) for name in self.fails):
            raise PermissionError(path)
        data = bytes(super().cat_file(path, start, end, **kwargs))
        name = path.rpartition("/")[2]
        self.read_nbytes[name] += len(data)
        self.num_reads[name] += 1
        for call in self.behind_read:
            call(sum(self.num_reads.values()))
        return data


@pytest.fixture
def store() -> Iterator[CountedFileSystem]:
    """An object store that counts."""
    fsspec.register_implementation("counted", CountedFileSystem, clobber=True)
    fs = CountedFileSystem(skip_instance_cache=True)
    yield fs
    for kept in (fs.store, fs.read_nbytes, fs.num_reads, fs.fails, fs.behind_read):
        kept.clear()
    fs.pseudo_dirs[:] = [""]


def put(store: CountedFileSystem, path: Path) -> str:
    """Copy what is at a path there, and give its URL."""
    store.put(str(path), f"/top/{path.name}", recursive=path.is_dir())
    return f"counted://top/{path.name}"


def save_as(kind: str, folder: Path) -> tuple[Path, Any]:
    """Write a state in a format, and give it."""
    if kind in ("hf", "index"):
        path = save_hf(folder / "hf", make_weights())
        return path, make_weights()
    if kind == "single":
        (folder / "one").mkdir()
        save_file(make_weights(), folder / "one" / "model.safetensors")
        return folder / "one", make_weights()
    if kind == "safetensors":
        save_file(make_weights(), folder / "file.safetensors")
        return folder / "file.safetensors", make_weights()
    state = make_training_state()
    if kind == "dcp":
        return save_dcp(folder / "dcp", state), state
    is_new = kind == "torch.save"
    torch.save(state, folder / "file.pt", _use_new_zipfile_serialization=is_new)
    return folder / "file.pt", state


@pytest.mark.parametrize("kind", KINDS)
def test_what_others_wrote_loads_from_a_url(
    kind: str, tmp_path: Path, store: CountedFileSystem
) -> None:
    """All of it, some of it, and into tensors that are there."""
    path, state = save_as(kind, tmp_path)
    url = put(store, path)
    if kind == "index":
        url += "/model.safetensors.index.json"
    found = sync.load(url, config=SMALL)
    assert_same_state(dict(sorted(found.items())), dict(sorted(state.items())))
    local = sync.inspect(path, config=SMALL)
    there = sync.inspect(url, config=SMALL)
    assert [(t.name, t.shape) for t in there.tensors] == [(t.name, t.shape) for t in local.tensors]
    name = "embed.weight" if "embed.weight" in state else "model.embed.weight"
    want = state[name] if name in state else state["model"]["embed.weight"]
    assert torch.equal(sync.load_slice(url, name, slice(7, 9), config=SMALL), want[7:9])
    target = {"embed.weight": torch.zeros(64, 96)}
    sync.load(url, {"model": target} if "model" in state else target, strict="ignore", config=SMALL)
    assert torch.equal(target["embed.weight"], want)


@pytest.mark.parametrize("kind", ["safetensors", "dcp", "torch.save"])
def test_a_few_rows_read_little(kind: str, tmp_path: Path, store: CountedFileSystem) -> None:
    """Headers and the blocks of the rows; not the other tensors, and not the rest of this one."""
    state = {f"t{i}": torch.full((1024, 1024), float(i)) for i in range(8)}  # 32 MiB
    path = tmp_path / (
        "a" if kind == "dcp" else "a.safetensors" if kind == "safetensors" else "a.pt"
    )
    if kind == "dcp":
        save_dcp(path, state)
    elif kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    url = put(store, path)
    rows = sync.load_slice(url, "t5", slice(500, 504), config=SMALL)
    assert torch.equal(rows, state["t5"][500:504])
    assert sum(store.read_nbytes.values()) < 4 << 20


@pytest.mark.parametrize("kind", ["dcp", "torch.save"])
def test_small_items_of_one_file_cost_few_requests(
    kind: str, tmp_path: Path, store: CountedFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found, and then read, in blocks of it; no thread is started to open each."""
    looks, threads = Counter[str](), list[None]()
    info = store.info

    def counted_info(_: object, path: str, **options: Any) -> Any:
        looks[path.rpartition("/")[2]] += 1
        return info(path, **options)

    def counted_threads(*arguments: Any) -> Any:
        threads.append(None)
        return in_own_thread(*arguments)

    monkeypatch.setattr(CountedFileSystem, "info", counted_info)
    monkeypatch.setattr("ckptio.foreign.bridge.in_own_thread", counted_threads)
    state = {f"t{i}": torch.full((4,), float(i)) for i in range(200)}
    path = save_small(kind, tmp_path / "a", state)
    assert_same_state(sync.load(put(store, path), config=SMALL), state)
    assert sum(store.num_reads.values()) < 20
    assert len(threads) < 20
    for name, num in store.num_reads.items():  # each range asks whether it is the same file
        assert looks[name] <= num + 2


def test_chunks_of_many_ranks_are_read_as_they_lie_in_the_files(
    tmp_path: Path, store: CountedFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor has one in each file: by tensors, no block would be there still for the next."""
    monkeypatch.setattr(objects, "_MAX_BLOCKS", 1)
    w = torch.arange(480.0).reshape(60, 8)
    url = put(store, save_chunks(tmp_path / "dcp", w, [(row, 0, 1, 8) for row in range(60)]))
    assert torch.equal(sync.load(url, config=config_with(max_requests=1))["w"], w)
    assert sum(store.num_reads.values()) < 20


def test_views_of_one_storage_are_read_as_they_lie_in_it(
    tmp_path: Path, store: CountedFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of their names, and of the targets."""
    monkeypatch.setattr(objects, "_MAX_BLOCKS", 1)
    flat = torch.arange(300_000.0)
    starts = random.Random(1).sample(range(0, 300_000, 1000), 300)
    state = {f"t{start}": flat[start : start + 1000] for start in starts}
    torch.save(state, tmp_path / "a.pt")
    url, config = put(store, tmp_path / "a.pt"), config_with(max_requests=1)
    assert_same_state(sync.load(url, config=config), state)
    target = {f"t{start}": torch.zeros(1000) for start in starts[::-1]}
    sync.load(url, target, config=config)
    assert_same_state(target, state)
    assert sum(store.read_nbytes.values()) < 4 * flat.nbytes


@pytest.mark.parametrize("kind", ["dcp", "torch.save"])
@pytest.mark.parametrize("nbytes", [96 << 10, 200 << 10, 300 << 10, 600 << 10])
def test_what_is_near_is_read_once(
    kind: str, nbytes: int, tmp_path: Path, store: CountedFileSystem
) -> None:
    """What says where a tensor is brings its neighbours, or nothing but itself."""
    state = {f"t{i}": torch.rand(nbytes // 4) for i in range(20)}
    path = save_small(kind, tmp_path / "a", state)
    config = ckptio.CheckpointConfig(pool_nbytes=32 << 20)
    assert_same_state(sync.load(put(store, path), config=config), state)
    assert sum(store.read_nbytes.values()) < 1.15 * 20 * nbytes + (1 << 19)


@pytest.mark.parametrize("is_new", [True, False])
def test_what_is_read_whole_is_read_in_ranges(
    tmp_path: Path, store: CountedFileSystem, *, is_new: bool
) -> None:
    """However large it is, each request has to be answered within its time."""
    nbytes, answers = 0, list[int]()

    def note(_: int) -> None:
        nonlocal nbytes
        before, nbytes = nbytes, sum(store.read_nbytes.values())
        answers.append(nbytes - before)

    store.behind_read.append(note)
    state = {"w": torch.arange(3 << 20).reshape(1024, -1).t()}  # 24 MiB, in another order
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=is_new)
    url = put(store, tmp_path / "a.pt")
    assert_same_state(sync.load(url, config=config_with(max_requests=1)), state)
    assert 1 << 20 < max(answers) <= 8 << 20


def test_views_turned_tensors_and_bytes_in_a_file_of_torch_save(
    tmp_path: Path, store: CountedFileSystem
) -> None:
    """What is not in row-major order is put so; ties stay ties."""
    base = torch.randn(50, 60)
    state: dict[str, Any] = {
        "turned": base.t(),
        "part": base[3:5],
        "step": base[:, ::7].clone(),
        "spread": torch.randn(5, 1).expand(5, 9),
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
        "apart": torch.randn(1000, 100)[:, 3],
        "half": torch.randn(7).half(),
        "none": torch.empty(0, 4),
        "text": "x" * 5000,
    }
    torch.save(state, tmp_path / "a.pt")
    found = sync.load(put(store, tmp_path / "a.pt"), config=SMALL)
    assert_same_state(found, {**state, "conj": state["conj"].resolve_conj()})
    assert (
        found["part"].untyped_storage().data_ptr() == found["turned"].untyped_storage().data_ptr()
    )


def test_a_state_of_a_model_and_its_optimizer(tmp_path: Path, store: CountedFileSystem) -> None:
    """As everybody saves it."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    found = sync.load(put(store, tmp_path / "a.pt"), config=SMALL)
    assert_same_state(found["model"], state["model"])
    assert_same_state(found["optimizer"], state["optimizer"])


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_what_is_more_than_data_runs_nothing(tmp_path: Path, store: CountedFileSystem) -> None:
    """Of both formats of torch, and as a value of DCP."""
    mark = tmp_path / "mark"
    for is_new in (True, False):
        torch.save({"x": Payload(mark)}, tmp_path / "a.pt", _use_new_zipfile_serialization=is_new)
        with pytest.raises(FormatError, match="more than data"):
            sync.load(put(store, tmp_path / "a.pt"), config=SMALL)
    folder = save_dcp(tmp_path / "dcp", {"w": torch.ones(3), "x": Payload(mark)})
    with pytest.raises(FormatError, match="more than data"):
        sync.load(put(store, folder), config=SMALL)
    assert not mark.exists()


def test_a_file_of_dcp_that_was_cut_is_damage(tmp_path: Path, store: CountedFileSystem) -> None:
    """As on a disk."""
    folder = save_dcp(tmp_path / "dcp", {"w": torch.ones(3), "x": 1})
    (file,) = folder.glob("*.distcp")
    os.truncate(file, 0)
    with pytest.raises(CorruptionError):
        sync.load(put(store, folder), config=SMALL)


def rewrite(data: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    """Write an archive again with other members."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return made.getvalue()


def test_a_file_of_torch_save_that_lies_is_refused(store: CountedFileSystem) -> None:
    """Members that are cut, of another byte order, or not there; a file that is cut anywhere."""
    made = io.BytesIO()
    torch.save({"w": torch.arange(5000)}, made)
    data = made.getvalue()
    changes: list[Callable[[str, bytes], bytes]] = [
        lambda name, member: member[:100] if name.endswith("data/0") else member,
        lambda name, member: b"big" if name.endswith("byteorder") else member,
        lambda name, member: b"" if name.endswith("data.pkl") else member,
    ]
    cases = [rewrite(data, change) for change in changes]
    cases += [data[:nbytes] for nbytes in (3, 50, 5000, len(data) - 1)]
    for case in cases:
        store.pipe_file("/top/a.pt", case)
        with pytest.raises(ckptio.CheckpointError):
            sync.load("counted://top/a.pt", config=SMALL)
    assert_same_state(rewritten_loads(store, data), {"w": torch.arange(5000)})


def rewritten_loads(store: CountedFileSystem, data: bytes) -> Any:
    """Load what another zip writer wrote: its members lie elsewhere."""
    store.pipe_file("/top/a.pt", rewrite(data, lambda _, member: member))
    return sync.load("counted://top/a.pt", config=SMALL)


def test_what_is_not_there_is_not_found(store: CountedFileSystem) -> None:
    """Nothing, an empty folder; and an odd file, and what may not be read, say so."""
    store.pipe_file("/top/readme.txt", b"hello")
    for name in ("none", ""):
        with pytest.raises(CheckpointNotFoundError):
            sync.load(f"counted://top/{name}", config=SMALL)
    with pytest.raises(FormatError, match="no known format"):
        sync.load("counted://top/readme.txt", config=SMALL)
    store.pipe_file("/top/a.safetensors", b"\0" * 100)
    store.fails.append("a.safetensors")
    with pytest.raises(StorageError, match="cannot read"):
        sync.load("counted://top/a.safetensors", config=config_with(max_retries=1))


@pytest.mark.parametrize("kind", ["single", "dcp"])
def test_an_object_that_marks_a_directory_does_not_hide_it(
    kind: str, tmp_path: Path, store: CountedFileSystem
) -> None:
    """An object and what is below it have one name, where tools show directories."""
    path, state = save_as(kind, tmp_path)
    url = put(store, path)
    marker = {"name": f"/top/{path.name}", "size": 0, "type": "file", "created": 0}

    class MarkedFileSystem(CountedFileSystem):
        """One with such an object."""

        protocol = "marked"

        def info(self, path: str, **kwargs: Any) -> Any:
            return marker if path == marker["name"] else super().info(path, **kwargs)

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(path.replace("marked://", "memory://")))

    fsspec.register_implementation("marked", MarkedFileSystem, clobber=True)
    found = sync.load(url.replace("counted", "marked"), config=SMALL)
    assert_same_state(dict(sorted(found.items())), dict(sorted(state.items())))
    store.rm(f"/top/{path.name}", recursive=True)
    with pytest.raises(FormatError, match="is empty"):
        sync.load(url.replace("counted", "marked"), config=SMALL)


class RootFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Files of a directory behind a host; their paths begin with what `slash` says."""

    protocol = "root"
    cachable = False
    slash = ""
    top = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return cls.slash + path.removeprefix("root://").removeprefix("host").strip("/")

    def _real(self, path: str) -> str:
        assert path.startswith("/") == (self.slash == "/")  # else it is another file
        return f"{self.top}/{path}"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        status = os.stat(self._real(path))
        kind = "directory" if stat.S_ISDIR(status.st_mode) else "file"
        return {"name": path, "size": status.st_size, "type": kind, "mtime": status.st_mtime}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        with open(self._real(path), "rb") as file:
            return file.read()[start:end]


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_file_at_the_root_of_a_file_system_is_found(
    tmp_path: Path, slash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its key: what stands before that in the URL may be nothing, or a host."""
    fsspec.register_implementation("root", RootFileSystem, clobber=True)
    monkeypatch.setattr(RootFileSystem, "slash", slash)
    monkeypatch.setattr(RootFileSystem, "top", str(tmp_path))
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    save_file({"w": torch.ones(2)}, tmp_path / "b.safetensors")
    for name in ("a.pt", "b.safetensors"):
        for url in (f"root://{name}", f"root://host/{name}"):
            assert_same_state(sync.load(url, config=SMALL), {"w": torch.ones(2)})
    with pytest.raises(CheckpointNotFoundError):
        sync.load("root://none", config=SMALL)
    (tmp_path / "odd").write_text("odd")
    with pytest.raises(FormatError, match="'odd' is a file of no known format"):
        sync.load("root://odd", config=SMALL)


def test_a_name_that_leaves_its_folder_is_refused(tmp_path: Path, store: CountedFileSystem) -> None:
    """In an index or in metadata of DCP, which is anybody's object."""
    url = put(store, save_hf(tmp_path / "hf", make_weights()))
    index = b'{"weight_map": {"x": "../other/model.safetensors"}}'
    store.pipe_file("/top/hf/model.safetensors.index.json", index)
    with pytest.raises(FormatError, match="not inside"):
        sync.load(url, config=SMALL)
    path, _ = save_as("dcp", tmp_path)
    for name in ("../hf/model.safetensors", "..", "."):
        metadata = read_metadata(path)
        for place in metadata.storage_data.values():
            place.relative_path = name
        write_metadata(path, metadata)
        with pytest.raises(FormatError, match="not inside"):
            sync.load(put(store, path), config=SMALL)


def test_an_engine_sees_that_an_object_was_replaced(
    tmp_path: Path, store: CountedFileSystem
) -> None:
    """What it keeps of it is checked first; unchanged, no header is read again."""
    save_file({"x": torch.ones(4)}, tmp_path / "a.safetensors")
    url = put(store, tmp_path / "a.safetensors")
    with ckptio.sync.Engine(SMALL) as engine:
        assert engine.load(url)["x"].sum() == 4
        before = sum(store.num_reads.values())
        assert engine.load(url)["x"].sum() == 4
        assert sum(store.num_reads.values()) <= before + 2  # what it is, and its data
        save_file({"x": torch.full((4,), 2.0)}, tmp_path / "a.safetensors")
        put(store, tmp_path / "a.safetensors")
        assert engine.load(url)["x"].sum() == 8


def change(data: bytes, state: Any, *, is_shorter: bool) -> bytes:
    """Make a file of another checkpoint of one: zeros for a tensor, or half of it."""
    if is_shorter:
        return data[: len(data) // 2]
    want = bytes((state.get("model") or state)["embed.weight"].view(torch.uint8).numpy())
    return data.replace(want, bytes(len(want)))


@pytest.mark.parametrize("is_shorter", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_never_mixed(
    kind: str, tmp_path: Path, store: CountedFileSystem, *, is_shorter: bool
) -> None:
    """Behind whichever read that happens: all of one, or an error that says so."""
    path, state = save_as(kind, tmp_path)
    url = put(store, path)
    old = {name: bytes(store.cat_file(name)) for name in store.find("/top")}
    new = {name: change(data, state, is_shorter=is_shorter) for name, data in old.items()}
    assert old != new
    outcomes: Counter[str] = Counter()
    for number in range(1, 100):
        for name, data in old.items():
            store.pipe_file(name, data)
        store.num_reads.clear()

        def replace(num_reads: int, number: int = number) -> None:
            for name, data in new.items() if num_reads == number else ():
                store.pipe_file(name, data)

        store.behind_read[:] = [replace]
        try:
            found = sync.load(url, config=SMALL)
        except CheckpointChangedError:
            outcomes["changed"] += 1
            continue
        except (FormatError, StorageError):
            assert is_shorter
            continue
        weights = found.get("model") or found
        found = weights["embed.weight"]
        assert not found.any() or torch.equal(found, (state.get("model") or state)["embed.weight"])
        outcomes["old" if found.any() else "new"] += 1
        if sum(store.num_reads.values()) < number:
            break
    assert outcomes["changed"]
    assert outcomes["old"]
    assert not (is_shorter and outcomes["new"])


@pytest.mark.parametrize("meanwhile", ["stays", "goes", "is shorter", "is another"])
def test_a_read_that_fails_says_so_if_the_object_is_another_by_now(
    meanwhile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size tells it, or its etag; of the one that was looked at, the failure is one."""
    save_file({"w": torch.arange(1000.0)}, tmp_path / "a.safetensors")
    data, key = (tmp_path / "a.safetensors").read_bytes(), "run/a.safetensors"
    bucket = MemoryBucket()
    bucket.objects[key] = StoredObject(data, "etag", 1.0)

    def fault(request: Operation) -> FaultKind | None:
        if request.kind != "get_into":
            return None
        if meanwhile == "is shorter":
            bucket.objects[key] = StoredObject(data[:-4], "etag", 1.0)
        elif meanwhile == "is another":
            bucket.objects[key] = StoredObject(data, "other", 1.0)
        elif meanwhile == "goes":
            bucket.objects.pop(key, None)
        return "refused"

    backend = MemoryBackend(MemoryStore(bucket, fault=fault))
    monkeypatch.setattr("ckptio.storage.stores.find_backend", lambda *_: backend)
    with pytest.raises(StorageError) as caught:
        sync.load(f"mem://{key}", config=SMALL)
    assert isinstance(caught.value, CheckpointChangedError) == (meanwhile != "stays")


@pytest.mark.parametrize("etags", [("", ""), ("one", "other")])
def test_what_is_looked_at_has_to_be_what_a_manifest_is_of(etags: tuple[str, str]) -> None:
    """Before the manifest is taken or behind that; by its etag, or its size and time."""
    bucket = MemoryBucket()
    for key in ("same", "changed", "gone"):
        bucket.objects[key] = StoredObject(b"data", etags[0], 1.0)

    async def scenario() -> None:
        bridge = Bridge(2)

        def folder() -> ObjectFolder:
            requests = Requests("mem://x", SMALL, RequestLimit(2), lambda _: None)
            return ObjectFolder("mem://x", "", MemoryStore(bucket), requests, bridge, "")

        async def look(folder: ObjectFolder, *names: str) -> list[bool]:
            return await bridge.run(lambda: [folder.status(name) is not None for name in names])

        first, early, late = folder(), folder(), folder()
        assert await look(first, "same", "changed", "gone", "none") == [True, True, True, False]
        if etags[0]:
            bucket.objects["same"] = StoredObject(b"data", etags[0], 2.0)  # written once more
        bucket.objects["changed"] = StoredObject(b"data", etags[1], 2.0)
        del bucket.objects["gone"]
        late.expect(first.seen())
        assert await look(late, "same", "gone", "none") == [True, False, False]
        with pytest.raises(CheckpointChangedError, match="of which the manifest was made"):
            await look(late, "changed")
        assert await look(early, "changed") == [True]
        with pytest.raises(CheckpointChangedError, match="of which the manifest was made"):
            early.expect(first.seen())

    asyncio.run(scenario())


def test_ours_at_a_url_comes_first_and_costs_nothing_more(store: CountedFileSystem) -> None:
    """One look fewer, in fact, than to ask what is there."""
    url = "counted://top/ours"
    sync.save({"x": torch.ones(4)}, url, config=SMALL)
    store.pipe_file("/top/ours/model.safetensors", b"odd")
    store.num_reads.clear()
    assert sync.load(url, config=SMALL)["x"].sum() == 4
    assert store.num_reads["manifest.json"] == 1
    assert store.num_reads["model.safetensors"] == 0


@pytest.mark.parametrize("kind", ["hf", "dcp", "torch.save"])
def test_convert_reads_and_writes_urls(kind: str, tmp_path: Path, store: CountedFileSystem) -> None:
    """Ours to a URL; the formats of others to files alone."""
    path, state = save_as(kind, tmp_path)
    url = put(store, path)
    sync.convert(url, "counted://top/new", to="ckptio", config=SMALL)
    assert sync.verify("counted://top/new", config=SMALL).is_whole
    found = sync.load("counted://top/new", config=SMALL)
    assert_same_state(dict(sorted(found.items())), dict(sorted(state.items())))
    sync.convert(url, tmp_path / "dcp2", to="dcp", config=SMALL)
    assert_same_state(
        dict(sorted(sync.load(tmp_path / "dcp2", config=SMALL).items())),
        dict(sorted(state.items())),
    )
    for to in ("hf", "dcp", "safetensors"):
        with pytest.raises(ConfigError, match="local"):
            sync.convert(url, "counted://top/other", to=to, config=SMALL)
    with pytest.raises(ConfigError, match="itself"):
        sync.convert(url, url, to="ckptio", overwrite=True, config=SMALL)


def test_what_has_no_room_in_memory_is_told_with_its_name(
    tmp_path: Path, store: CountedFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not damaged: the limit of file sizes is this machine's."""
    path, _ = save_as("torch.save", tmp_path)
    url = put(store, path)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(StorageError, match=r"its size: File too large.*file\.pt"):
            sync.load(url, config=SMALL)


class Slow(ObjectFolder):
    """An object of bytes that count up, each read of which takes a while, or fails at first."""

    def __init__(self, num_failures: int = 0) -> None:
        nothing: Any = None
        super().__init__("memory://x", "", nothing, nothing, nothing, "")
        self.num_looks = 0
        self.reads: list[tuple[int, int]] = []
        self.reader: asyncio.Task[Any] | None = None
        self.num_failures = num_failures

    async def _look_at(self, name: str) -> None:
        del name
        self.num_looks += 1
        await asyncio.sleep(1.0)

    async def _read(self, name: str, start: int, stop: int) -> bytes:
        self.reads.append((start, stop))
        self.reader = asyncio.current_task()
        await asyncio.sleep(1.0)
        if self.num_failures:
            self.num_failures -= 1
            raise StorageError("not now", path=name)
        return bytes(at % 251 for at in range(start, stop))


@in_virtual_time
async def test_an_object_that_many_look_at_is_looked_at_once() -> None:
    """Two looks might be at two objects, and what is read has to be of one."""
    folder = Slow()
    await asyncio.gather(*(folder._look_once("o") for _ in range(20)))
    assert folder.num_looks == 1


@in_virtual_time
async def test_blocks_that_were_wanted_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there may be; and none is read that nobody asks for."""
    monkeypatch.setattr(objects, "_MAX_BLOCKS", 2)
    folder, nbytes = Slow(), objects._BLOCK_NBYTES
    for number in (0, 1, 0, 2, 0, 1):
        start = number * nbytes
        assert len(await folder.read_blocks("o", 3 * nbytes, start, start + nbytes)) == nbytes
    assert [start // nbytes for start, _ in folder.reads] == [0, 1, 2, 1]


@in_virtual_time
async def test_a_block_that_many_ask_for_is_read_once() -> None:
    """Whoever comes while it is read waits for it, and nothing is kept of the waiting."""
    folder = Slow()
    found = await asyncio.gather(*(folder.read_blocks("o", 900, 7 * i, 900) for i in range(20)))
    assert found == [bytes(at % 251 for at in range(7 * i, 900)) for i in range(20)]
    folder.reader = None
    assert folder.reads == [(0, 900)]
    assert not folder._turns


@pytest.mark.parametrize("end", ["fails", "is cancelled"])
def test_a_reader_that_ends_takes_nobody_along(end: str) -> None:
    """The next one reads; what failed is not kept."""

    async def scenario() -> None:
        folder = Slow(num_failures=int(end == "fails"))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ends(folder), name=f"reader {i}") for i in range(5)]
            await asyncio.sleep(0.5)
            first, folder.reader = folder.reader, None
            assert first is not None
            if end == "is cancelled":
                first.cancel()
        told = {task: not task.cancelled() and task.result() for task in tasks}
        assert [task for task, is_well in told.items() if not is_well] == [first]
        folder.reader = None
        assert folder.reads == [(0, 900)] * 2
        assert not folder._turns

    async def ends(folder: Slow) -> bool:
        try:
            return len(await folder.read_blocks("o", 900, 0, 900)) == 900
        except StorageError:
            return False

    run_virtual(scenario(), seed=0)
