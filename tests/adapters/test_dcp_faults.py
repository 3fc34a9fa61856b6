"""The plug-ins where stock DCP was seen to lose data without a word, and where things break."""

from __future__ import annotations

import base64
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import ckptio
from ckptio.adapters.dcp import StorageReader, StorageWriter
from ckptio.config import CheckpointConfig, KiB, MiB
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    FormatError,
    PlanError,
    StorageError,
)
from ckptio.events import ReadProgressed
from ckptio.format.checksum import crc32c, pack_checksums
from ckptio.format.manifest import DOCUMENT_NAME, decode_manifest
from tests.adapters.rig import (
    QUICK,
    Reads,
    blank,
    cause,
    end_garbage,
    large_blocks,
    load,
    same,
    save,
    small_disk,
)
from tests.conftest import let_end, open_files, still_open_beside
from tests.manifests import block_checksums
from tests.rig import assert_tidy, names_in

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.planner import WriteItem

    from ckptio.events import Event


def state_of(value: float) -> dict[str, Any]:
    """Make a state that holds one number everywhere."""
    return {"w": torch.full((60_000,), value), "v": torch.full((3,), value), "step": value}


class Stumbling(DefaultSavePlanner):
    """Fails at one item, in whichever thread asks for it."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "w":
            raise ZeroDivisionError("in a thread")
        return super().resolve_data(write_item)


def test_an_error_in_a_writer_thread_raises_and_nothing_is_left(tmp_path: Path) -> None:
    """With one thread and with several."""
    for threads in (1, 4):
        writer = StorageWriter(tmp_path / "c", thread_count=threads, config=QUICK)
        with cause() as causes:
            save(state_of(1.0), storage_writer=writer, planner=Stumbling())
        assert [str(error) for error in causes] == ["in a thread"]
        assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_short_write_raises_and_the_old_checkpoint_stays(tmp_path: Path, direct_io: Any) -> None:
    """A disk that is full, or a limit: the system writes less than it was told."""
    config = dataclasses.replace(QUICK, direct_io=direct_io)
    save(state_of(1.0), tmp_path / "c")
    before = names_in(tmp_path / "c")
    with cause() as causes, small_disk(70_000):
        save(state_of(2.0), storage_writer=StorageWriter(tmp_path / "c", config=config))
    assert isinstance(causes[0], StorageError)
    assert names_in(tmp_path / "c") == before
    assert same(load(blank(state_of(0.0)), tmp_path / "c"), state_of(1.0))


def test_a_failed_overwrite_leaves_the_old_checkpoint_whole(tmp_path: Path) -> None:
    """And the same writer saves again."""
    save(state_of(1.0), tmp_path / "c")
    writer = StorageWriter(tmp_path / "c", config=QUICK)
    with cause():
        save(state_of(2.0), storage_writer=writer, planner=Stumbling())
    assert_tidy(tmp_path / "c")
    assert same(ckptio.sync.load(tmp_path / "c"), state_of(1.0))
    save(state_of(3.0), storage_writer=writer)
    assert_tidy(tmp_path / "c")
    assert same(ckptio.sync.load(tmp_path / "c"), state_of(3.0))


def test_what_no_rank_wrote_fails_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    """While the writer is still there, and saves nothing else."""

    class Losing(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, [ours[:-1] for ours in results])

    save(state_of(1.0), tmp_path / "c")
    writer = Losing(tmp_path / "c", config=QUICK)
    with cause() as causes:
        save(state_of(2.0), storage_writer=writer)
    assert isinstance(causes[0], PlanError)
    assert_tidy(tmp_path / "c")
    assert same(load(blank(state_of(0.0)), tmp_path / "c"), state_of(1.0))


def test_the_old_checkpoint_is_there_until_the_new_one_is(tmp_path: Path) -> None:
    """A planner that looks while it is being saved sees the old one."""
    seen: list[Any] = []

    class Looking(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            seen.append(ckptio.sync.load(tmp_path / "c")["step"])
            return super().resolve_data(write_item)

    save(state_of(1.0), tmp_path / "c")
    save(state_of(2.0), tmp_path / "c", planner=Looking())
    assert set(seen) == {1.0}


KILLED = """
import os, signal, sys, warnings
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from ckptio.adapters.dcp import StorageWriter
warnings.simplefilter("ignore")

class Dying(StorageWriter):
    def {where}(self, *args, **kwargs):
        if "{where}" == "finish":
            os.kill(os.getpid(), signal.SIGKILL)
        result = super().{where}(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

dcp.save({{"w": torch.full((60_000,), 2.0)}}, storage_writer=Dying(sys.argv[1]))
"""


@pytest.mark.parametrize("where", ["prepare_global_plan", "write_data", "finish"])
def test_a_killed_overwrite_leaves_the_old_checkpoint_whole(tmp_path: Path, where: str) -> None:
    """And the next save removes what the dead one left."""
    path = tmp_path / "c"
    save(state_of(1.0), path)
    program = KILLED.format(where=where)
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert ended.returncode == -9
    assert same(load(blank(state_of(0.0)), path), state_of(1.0))
    assert len(names_in(path)) > 3  # what it left
    save(state_of(3.0), path)
    assert_tidy(path)
    assert same(ckptio.sync.load(path), state_of(3.0))


def test_a_save_that_dcp_gives_up_elsewhere_is_removed(tmp_path: Path) -> None:
    """The coordinator is not told; the end of its writer, or its next save, is the end of it."""

    def give_up(writer: StorageWriter) -> None:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state_of(1.0), writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(is_coordinator=True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, _ = planner.create_global_plan([plan])
        (plan,) = writer.prepare_global_plan(plans)
        writer.write_data(planner.finish_plan(plan), planner).wait()

    path = tmp_path / "c"
    writer = StorageWriter(path, config=QUICK)
    give_up(writer)
    assert names_in(path) != []
    save(state_of(2.0), storage_writer=writer)
    assert_tidy(path)
    give_up(writer)
    writer.reset()
    assert_tidy(path)
    give_up(writer)
    del writer
    end_garbage()
    assert_tidy(path)
    assert same(ckptio.sync.load(path), state_of(2.0))


DROPPED = """
import gc, os, sys
from ckptio.adapters.dcp import StorageWriter
from tests.adapters.test_dcp_objects import give_up
writer = StorageWriter(sys.argv[1])
give_up(writer)
circle = [writer]
circle.append(circle)
pid = os.fork()
if not pid:
    del writer, circle
    gc.collect()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert any(name.startswith("data-") for name in os.listdir(sys.argv[1]))
del writer, circle
gc.collect()
"""


def test_a_program_that_ends_removes_what_a_dropped_writer_left(tmp_path: Path) -> None:
    """The thread that does so has not begun when the last line has run; its children do not."""
    program = [sys.executable, "-W", "ignore", "-c", DROPPED, str(tmp_path / "c")]
    subprocess.run(program, check=True, timeout=60)
    assert not (tmp_path / "c").exists() or names_in(tmp_path / "c") == []


def flip(path: Path, position: int = -100) -> str:
    """Flip one bit of a tensor in the largest file of a checkpoint."""
    file = max(path.glob("data-*"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
    return file.name


def test_a_flipped_byte_raises(tmp_path: Path) -> None:
    """It says which file and which tensor, and the target does not get the block."""
    save(state_of(1.0), tmp_path / "c")
    name = flip(tmp_path / "c", 100_000)
    target = blank(state_of(0.0))
    with cause() as causes:
        load(target, tmp_path / "c")
    (error,) = causes
    assert isinstance(error, CorruptionError)
    assert (error.file, error.fqns) == (name, ("w",))
    assert set(target["w"].unique().tolist()) <= {0.0, 1.0}


def test_autograd_is_told_of_targets_that_are_filled(tmp_path: Path) -> None:
    """Before the first byte, and when all is there: what it has kept meanwhile is refused."""
    save(state_of(1.0), tmp_path / "c")
    target = blank(state_of(0.0))
    versions = [target["w"]._version]

    def observe(event: Event) -> None:
        if isinstance(event, ReadProgressed):
            versions.append(target["w"]._version)

    load(target, storage_reader=StorageReader(tmp_path / "c", config=QUICK, observer=observe))
    assert versions[0] < versions[-1] < target["w"]._version


@pytest.mark.parametrize("kind", ["cut", "gone"])
def test_a_file_that_is_cut_is_noticed_before_any_target_changes(tmp_path: Path, kind: str) -> None:
    """However much of it is needed; what does not need it is loaded."""
    state = {f"t{i}": torch.full((70_000,), float(i + 1)) for i in range(4)}
    save(dict(state), tmp_path / "c")
    manifest = decode_manifest((tmp_path / "c" / "manifest.json").read_bytes())
    (tensor,) = (t for t in manifest.tensors if t.name == "t3")
    file = tmp_path / "c" / manifest.files[tensor.chunks[0].file].name
    if kind == "cut":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
    target = blank(state)
    with cause() as causes:
        load(target, tmp_path / "c")
    assert isinstance(causes[0], CorruptionError)
    assert not any(t.any() for t in target.values())
    reader, planner = StorageReader(tmp_path / "c", config=QUICK), DefaultLoadPlanner()
    planner.set_up_planner(dict(target), reader.read_metadata(), is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    with pytest.raises(CorruptionError):  # of another rank than the one that looks
        reader.prepare_global_plan([LoadPlan([]), plan])
    assert same(load({"t0": torch.zeros(70_000)}, tmp_path / "c"), {"t0": state["t0"]})


def test_a_checkpoint_that_is_overwritten_meanwhile_is_noticed(tmp_path: Path) -> None:
    """Between the metadata and the data, by another process say."""
    save(state_of(1.0), tmp_path / "c")

    class Late(StorageReader):
        def prepare_local_plan(self, plan: Any) -> Any:
            save(state_of(2.0), tmp_path / "c")
            return super().prepare_local_plan(plan)

    target = blank(state_of(0.0))
    with cause() as causes:
        load(target, storage_reader=Late(tmp_path / "c", config=QUICK))
    assert isinstance(causes[0], CheckpointChangedError)
    assert not target["w"].any()


def test_ranks_that_opened_different_saves_are_told(tmp_path: Path) -> None:
    """Each opens the checkpoint for itself; the old files may be there for a while."""
    first, second = (StorageReader(tmp_path / "c", config=QUICK) for _ in range(2))
    own = LoadPlan([], storage_data="of a planner")
    save(state_of(1.0), tmp_path / "c")
    first.read_metadata()
    second.read_metadata()
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in (first, second)]
    assert first.prepare_global_plan([*plans, own]) == [*plans, own]
    assert first.prepare_local_plan(own) is own
    save(state_of(2.0), tmp_path / "c")
    second.read_metadata()
    plans[1] = second.prepare_local_plan(LoadPlan([]))
    for reader in (first, second):
        with pytest.raises(CheckpointChangedError, match="while ranks opened it"):
            reader.prepare_global_plan(plans)


def test_four_rows_of_a_large_tensor_read_four_rows_and_two_blocks(tmp_path: Path) -> None:
    """32 MiB in one file; what DCP has to know besides is read too, and is small."""
    config = large_blocks(bucket_nbytes=64 * MiB)
    state = {"w": torch.randn(8192, 1024)}
    save(dict(state), storage_writer=StorageWriter(tmp_path / "c", config=config))
    reads = Reads()
    reader = StorageReader(tmp_path / "c", config=config, observer=reads)
    metadata = reader.read_metadata()
    before = reads.nbytes
    assert before < 16 * KiB

    target = torch.zeros(4, 1024)

    class Planner:
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            assert read_item.dest_index.fqn == "rows"
            return target

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            assert tensor.data_ptr() == target.data_ptr()
            del read_item

    zero = torch.Size((0, 0))
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex("rows", zero),
        dest_offsets=zero,
        storage_index=MetadataIndex("w", zero),
        storage_offsets=torch.Size((3001, 0)),
        lengths=torch.Size((4, 1024)),
    )
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(LoadPlan([item]))])
    reader.read_data(plan, Planner()).wait()  # type: ignore[arg-type]  # has what is used
    assert torch.equal(target, state["w"][3001:3005])
    assert reads.nbytes - before <= 4 * 4096 + 2 * config.block_nbytes


def test_a_thousand_tiny_tensors_cost_little(tmp_path: Path) -> None:
    """Less than 400 bytes each, all files counted whole."""
    save({f"t{i}": torch.full((4,), float(i)) for i in range(1000)}, tmp_path / "c")
    used = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    assert used / 1000 < 400


def test_thirty_saves_and_loads_leave_no_thread_and_no_file_open(tmp_path: Path) -> None:
    """Failed ones among them."""
    writer, reader = StorageWriter(tmp_path / "c", config=QUICK), StorageReader(tmp_path / "c")
    save(state_of(0.0), storage_writer=writer)
    threads, files = set(threading.enumerate()), open_files()
    for i in range(30):
        save(state_of(float(i)), storage_writer=writer)
        with cause():
            save(state_of(float(i)), storage_writer=writer, planner=Stumbling())
        load(blank(state_of(0.0)), storage_reader=reader)
    let_end(set(threading.enumerate()) - threads)
    assert set(threading.enumerate()) <= threads
    assert still_open_beside(files) == set()
    assert_tidy(tmp_path / "c")


def rewrite(path: Path, change: Any) -> None:
    """Change a checkpoint's manifest and what DCP knows of it, with right checksums."""
    manifest_path = path / "manifest.json"
    document = msgspec.json.decode(manifest_path.read_bytes())
    del document["crc32c"]
    names = [row[0] for row in document["tensors"]]
    row = document["tensors"][names.index(DOCUMENT_NAME)]
    number, start = row[3][0]
    file = path / document["files"][number][0]
    raw = bytearray(file.read_bytes())
    known = msgspec.json.decode(raw[start : start + row[2][0]])
    change(document, known)
    encoded = msgspec.json.encode(known)
    raw[start:] = encoded
    file.write_bytes(raw)
    row[2] = [len(encoded)]
    sums = pack_checksums(block_checksums(memoryview(raw), document["block_nbytes"]))
    document["files"][number][1:3] = [len(raw), base64.b64encode(sums).decode()]
    body = msgspec.json.encode(document)[:-1]
    manifest_path.write_bytes(body + b',"crc32c":"%08x"}\n' % crc32c(body))


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_malicious_manifest_runs_nothing(tmp_path: Path) -> None:
    """Pickles where values are, whatever they are called, are never given to a planner."""
    path, mark = tmp_path / "c", tmp_path / "mark"
    bomb = base64.b64encode(pickle.dumps(Bomb(str(mark)))).decode()
    for word in ("opaque", "object", "bytesio", "pickle"):
        save({"step": b"harmless"}, path)

        def change(document: Any, known: Any, word: str = word) -> None:
            known["items"][0][1] = word
            document["tree"]["step"] = {"~": "bytes", "v": bomb}

        rewrite(path, change)
        if word in {"object", "bytesio"}:
            load({"step": None}, path)  # bytes, as any others
        else:
            with cause() as causes:
                load({"step": None}, path)
            assert isinstance(causes[0], (FormatError, AssertionError))
        assert not mark.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda _, known: known["items"].append(["more", 99]),
        lambda _, known: known["items"].append(["w", 0]),
        lambda _, known: known["items"].append(["more", -1]),
        lambda told, known: known["items"].append(["more", len(told["tensors"])]),
        lambda _, known: known["items"].append(["more", [[60_000], [[True, [0]]]]]),
        lambda _, known: known["items"].append(["more", [[60_000], [[99, [0]]]]]),
        lambda _, known: known["items"].append(["more", [[60_000, 1], [[0, [0, 0]]]]]),
        lambda _, known: known["items"].append(["more", [[60_000], [[0, [0, 0]]]]]),
        lambda _, known: known["items"].append(["more", [[60_000, 1], [[0, [0]]]]]),
        lambda _, known: known["items"].append(["more", [[-1], []]]),
        lambda _, known: known["items"].append(["more", [[1 << 56], []]]),
        lambda _, known: known["items"].append(["more", [[3, True], []]]),
        lambda _, known: known["items"].append([5, 0, ["x"]]),
        lambda _, known: known["items"].append(["x", 0, ["x", 1.5]]),
        lambda _, known: known["items"].append(["more", [[5], [[0, [3]]]]]),
        lambda _, known: known["items"].append([{"~": 0}, 0]),
        lambda _, known: known["items"].append(["x", "object", []]),
        lambda _, known: known["items"].append([]),
        lambda _, known: known["items"].append([5, 0]),
        lambda _, known: known["items"].append(["x", {}]),
        lambda _, known: known["items"].append(["x", 0, 0]),
        lambda _, known: known["items"].append(["x", 0, ["x"], 0]),
        lambda _, known: known["items"].append(["x", [[5], 0]]),
        lambda _, known: known["items"].append(["x", [[5], [[0]]]]),
        lambda _, known: known["items"].append(["x", [0, []]]),
        lambda _, known: known.update(planner_data=[]),
        lambda _, known: known.update(planner_data={"x": 1}),
        lambda _, known: known.update(storage_meta={"~": 0}),
        lambda _, known: known.update(version=2),
        lambda _, known: known.update(more=1),
        lambda _, known: known.update(storage_meta=[]),
        lambda _, known: known.update(planner_data=[{"~": "odd"}]),
    ],
)
def test_a_document_that_contradicts_the_manifest_is_refused(tmp_path: Path, change: Any) -> None:
    """With right checksums; nothing is loaded."""
    save(state_of(1.0), tmp_path / "c")
    rewrite(tmp_path / "c", change)
    with pytest.raises(FormatError):
        StorageReader(tmp_path / "c").read_metadata()


@pytest.mark.parametrize(
    "path",
    [["no"], ["step", "x"], ["l", 2], ["l", -2], ["l", "x"], ["d", 0], ["t", 0], ["d", "k", "x"]],
    ids=str,
)
def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path, path: list[str | int]) -> None:
    """In a document that does not go with the tree."""
    save({"step": 1, "l": [1, 2], "d": {"k": "v"}, "t": (1,)}, tmp_path / "c")
    rewrite(tmp_path / "c", lambda _, known: known["items"].append(["x", "object", path]))
    with cause() as causes:
        load({"x": None}, tmp_path / "c")
    assert isinstance(causes[0], FormatError)
    assert "there is nothing at" in str(causes[0])


def test_parts_of_a_tensor_come_back_where_they_lie(tmp_path: Path) -> None:
    """Also where one is empty, and where no rank had anything of it."""
    path = tmp_path / "c"
    save({"v": torch.arange(3.0), "e": torch.ones(0), "s": torch.tensor(5.0)}, path)

    def change(told: Any, known: Any) -> None:
        at = {row[0]: number for number, row in enumerate(told["tensors"])}
        parts = [[at["v"], [5]], [at["v"], [0]], [at["e"], [8]]]
        known["items"] += [["w", [[8], parts]], ["scalar", [[], [[at["s"], []]]]], ["n", [[2], []]]]

    rewrite(path, change)
    target = {"w": torch.zeros(8), "scalar": torch.zeros(()), "n": torch.zeros(2)}
    load(target, path)
    assert target["w"].tolist() == [0, 1, 2, 0, 0, 0, 1, 2]
    assert target["scalar"] == 5
    entry: Any = StorageReader(path).read_metadata().state_dict_metadata["w"]
    assert (entry.size, entry.properties.dtype) == ((8,), torch.float32)
    places = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    assert places == [((5,), (3,)), ((0,), (3,)), ((8,), (0,))]


def test_what_was_not_saved_through_dcp_is_named(tmp_path: Path) -> None:
    """With the way out."""
    ckptio.sync.save({"w": torch.ones(3)}, tmp_path / "c")
    with pytest.raises(FormatError, match=r"ckptio\.load"):
        StorageReader(tmp_path / "c", config=CheckpointConfig()).read_metadata()
    with pytest.raises(FileNotFoundError):
        StorageReader(tmp_path / "none").read_metadata()


def test_a_reader_that_is_not_set_up_is_refused(tmp_path: Path) -> None:
    """So is one that was reset, or did not find the next one; it knows nothing of those before."""
    save(state_of(1.0), tmp_path / "c")
    reader = StorageReader(config=QUICK)
    with pytest.raises(ConfigError, match="where to load from"):
        reader.read_metadata()
    reader.reset(tmp_path / "c")
    metadata = reader.read_metadata()
    reader.reset()
    with pytest.raises(ConfigError, match="did not set the reader up"):
        reader.prepare_local_plan(LoadPlan([]))
    reader.set_up_storage_reader(metadata, is_coordinator=False)  # read elsewhere
    planned: Any = reader.prepare_local_plan(LoadPlan([])).storage_data
    assert metadata.storage_meta is not None
    assert planned.save_id == metadata.storage_meta.save_id
    (tmp_path / "c").rename(tmp_path / "d")
    with pytest.raises(CheckpointNotFoundError):
        reader.read_metadata()
    with pytest.raises(ConfigError, match="did not set the reader up"):
        reader.prepare_local_plan(LoadPlan([]))
