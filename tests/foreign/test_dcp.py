from __future__ import annotations

import argparse
import io
import math
import os
import pickle
from pathlib import Path  # noqa: TC003  # fixtures are annotated with it
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptio import sync
from ckptio.conversion.compare import run_diff
from ckptio.errors import CorruptionError, FormatError, TargetError
from ckptio.events import LoadStarted, ReadProgressed
from ckptio.foreign.dcp import DcpReader
from tests.foreign.rig import assert_same_state, make_training_state, save_dcp
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.events import Event


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_dcp(tmp_path / "dcp", make_training_state())


def read_metadata(folder: Path) -> Metadata:
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301  # our own
    return found


def write_metadata(folder: Path, metadata: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.usefixtures("no_leaks")
def test_a_state_comes_back_nested_as_it_was(folder: Path) -> None:
    """Dicts, lists, tuples, numbers and strings; transposed tensors too."""
    assert_same_state(sync.load(folder, config=SMALL), make_training_state())


def test_select_slice_and_into_work_as_with_our_own(folder: Path) -> None:
    """Also of a tensor that does not lie in row-major order."""
    state = make_training_state()
    with sync.Engine(SMALL) as engine:
        assert engine.load(folder, select="optim.state.1") == {
            "optim": {"state": [None, {"step": 4}]}
        }
        for name in ("embed.weight", "turned"):
            rows = engine.load_slice(folder, f"model.{name}", slice(1, 3))
            assert torch.equal(rows, state["model"][name][1:3])
        target = {"model": {n: torch.zeros_like(t) for n, t in state["model"].items()}}
        engine.load_with_report(folder, target, strict="ignore")
        assert_same_state(target["model"], state["model"])


def test_a_few_rows_of_a_large_tensor_read_a_few_blocks(tmp_path: Path) -> None:
    """The rows and two blocks, whatever the size of the item."""
    big = torch.arange(1 << 18, dtype=torch.float32).reshape(1024, 256)
    folder = save_dcp(tmp_path / "big", {"w": big})
    read: list[int] = []

    def observe(event: Event) -> None:
        if isinstance(event, (LoadStarted, ReadProgressed)):
            read.append(event.nbytes)

    with sync.Engine(SMALL, observer=observe) as engine:
        assert torch.equal(engine.load_slice(folder, "w", slice(100, 104)), big[100:104])
    assert max(read) <= 4 * 1024 + 2 * SMALL.block_nbytes


def test_chunks_of_many_ranks_are_put_together(tmp_path: Path) -> None:
    """Row blocks and column blocks, each an item of its own in one of two files."""
    w = torch.arange(48.0).reshape(6, 8)
    boxes = [(0, 0, 4, 3), (0, 3, 4, 5), (4, 0, 2, 8)]
    folder = save_chunks(tmp_path / "chunks", w, boxes)
    assert torch.equal(sync.load(folder, config=SMALL)["w"], w)
    assert torch.equal(sync.load_slice(folder, "w", (slice(3, 5), 2), config=SMALL), w[3:5, 2])


def test_a_slice_needs_no_chunk_that_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tensor with a chunk from each of many ranks, few are looked at."""
    w, asked = torch.arange(480.0).reshape(60, 8), list[str]()
    path = save_chunks(tmp_path / "dcp", w, [(row, 0, 1, 8) for row in range(60)])
    sizes = DcpReader.sizes

    def counted(self: DcpReader, names: Sequence[str]) -> list[int | None]:
        asked.extend(names)
        return sizes(self, names)

    monkeypatch.setattr(DcpReader, "sizes", counted)
    assert torch.equal(sync.load_slice(path, "w", slice(5, 8), config=SMALL), w[5:8])
    assert len(asked) == 3
    assert sync.load_slice(path, "w", slice(5, 5), config=SMALL).shape == (0, 8)
    assert len(asked) == 3


def save_chunks(folder: Path, w: torch.Tensor, boxes: list[tuple[int, int, int, int]]) -> Path:
    """Write what several ranks of stock DCP write of one tensor."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415

    folder.mkdir()
    chunks, places = [], {}
    for number, (row, column, rows, columns) in enumerate(boxes):
        data = io.BytesIO()
        torch.save(w[row : row + rows, column : column + columns].clone(), data)
        file = f"__{number % 2}_0.distcp"
        with (folder / file).open("ab") as stream:
            start = stream.tell()
            stream.write(data.getvalue())
        offset = torch.Size((row, column))
        chunks.append(ChunkStorageMetadata(offset, torch.Size((rows, columns))))
        places[MetadataIndex("w", offset)] = _StorageInfo(file, start, len(data.getvalue()))
    tensor = TensorStorageMetadata(TensorProperties(dtype=w.dtype), w.shape, chunks)
    write_metadata(folder, Metadata({"w": tensor}, storage_data=places))
    return folder


def test_chunks_that_overlap_or_leave_gaps_are_refused(tmp_path: Path) -> None:
    """Whatever lies in the files."""
    w = torch.arange(48.0).reshape(6, 8)
    gap = save_chunks(tmp_path / "gap", w, [(0, 0, 4, 8)])
    overlap = save_chunks(tmp_path / "overlap", w, [(0, 0, 4, 8), (2, 0, 2, 8)])
    outside = save_chunks(tmp_path / "outside", w, [(0, 0, 6, 8)])
    metadata = read_metadata(outside)
    metadata.state_dict_metadata["w"].size = torch.Size((3, 8))  # type: ignore[union-attr]  # a tensor
    write_metadata(outside, metadata)
    for folder in (gap, overlap, outside):
        with pytest.raises(FormatError, match="'w'"):
            sync.load(folder, config=SMALL)


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def hostile_metadata(command: str) -> dict[str, object]:
    """Metadata that would run something, in the ways there are."""
    return {
        "instead": Payload(command),
        "inside": Metadata({"w": Payload(command)}),  # type: ignore[dict-item]  # that is it
        "planner": Metadata({}, planner_data=Payload(command)),
        "as a key": Metadata({}, storage_data={Payload(command): 1}),
        "getattr": Metadata({}, planner_data=getattr),
        "eval": Metadata({}, planner_data=eval),
        "a module of ours": Metadata({}, planner_data=FormatError),
        "torch": Metadata({}, planner_data=torch.load),
    }


@pytest.mark.parametrize("case", list(hostile_metadata("")))
def test_metadata_that_is_more_than_data_runs_nothing(folder: Path, case: str) -> None:
    """It ends in an error that says which name it was."""
    proof = folder.parent / "proof"
    write_metadata(folder, hostile_metadata(f"touch {proof}")[case])
    with pytest.raises(FormatError, match="is not part of the format"):
        sync.load(folder, config=SMALL)
    with pytest.raises(FormatError):
        sync.inspect(folder, config=SMALL)
    assert not proof.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04N.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n.",
        # state for a class instead of an object of it
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n}b.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81N}X\x01\x00\x00\x00aK\x01s\x86b.",
        b"\x80\x02ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb.",
        b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"\x80\x04\x95" + b"\xff" * 8 + b".",
        b"\x80\x02X\xff\xff\xff\x7fa.",
        b"(" * 5000 + b"l" * 5000 + b".",
        b"\x80\x02U\x01aQ.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_a_damaged_pickle_is_a_format_error(folder: Path, pickled: bytes) -> None:
    """Of any kind, and nothing else than that."""
    (folder / ".metadata").write_bytes(pickled)
    with pytest.raises(FormatError, match=r"\.metadata"):
        sync.load(folder, config=SMALL)


def lies() -> dict[str, Any]:
    """Changes to right metadata that make it contradict itself or the files."""

    def place(metadata: Metadata, **changes: Any) -> None:
        info = metadata.storage_data[MetadataIndex("model.embed.weight", (0, 0))]
        for key, value in changes.items():
            setattr(info, key, value)

    def tensor(metadata: Metadata, **changes: Any) -> None:
        entry = metadata.state_dict_metadata["model.embed.weight"]
        for key, value in changes.items():
            setattr(entry, key, value)

    def shift(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["model.embed.weight"]
        entry.chunks[0].offsets = torch.Size((1, 0))
        places = metadata.storage_data
        places[MetadataIndex("model.embed.weight", (1, 0))] = places.pop(
            MetadataIndex("model.embed.weight", (0, 0))
        )

    def widen(metadata: Metadata) -> None:
        info = max(metadata.storage_data.values(), key=lambda info: int(info.offset))
        info.offset, info.length = 0, info.offset + info.length

    return {
        "a path": lambda m: place(m, relative_path="../x"),
        "no name": lambda m: place(m, relative_path=""),
        "no text": lambda m: place(m, relative_path="\ud800"),
        "no file": lambda m: place(m, relative_path="nowhere"),
        "behind the end": lambda m: place(m, offset=1 << 40),
        "too long": lambda m: place(m, length=1 << 40),
        "negative": lambda m: place(m, offset=-1),
        "elsewhere": lambda m: place(m, offset=3),
        "transformed": lambda m: place(m, transform_descriptors=["zstd"]),
        "no place": lambda m: m.storage_data.clear(),
        "no table": lambda m: setattr(m, "storage_data", None),
        "no tensors": lambda m: setattr(m, "state_dict_metadata", None),
        "a place twice": lambda m: m.storage_data.update(
            {MetadataIndex("epoch"): m.storage_data[MetadataIndex("name")]}
        ),
        "a place over others": widen,
        "outside of its tensor": shift,
        "a place of nothing": lambda m: m.storage_data.update(x=StorageMeta()),
        "a place that is none": lambda m: m.storage_data.update({MetadataIndex("x"): 3}),
        "another type": lambda m: tensor(m, properties=TensorProperties(dtype=torch.float64)),
        "no type": lambda m: tensor(m, properties=None),
        "a bad size": lambda m: tensor(m, size=(-1, 2)),
        "no size": lambda m: tensor(m, size=None),
        "no chunks": lambda m: tensor(m, chunks=[]),
        "no list of chunks": lambda m: tensor(m, chunks=None),
        "a chunk that is none": lambda m: tensor(m, chunks=[3]),
        "neither": lambda m: m.state_dict_metadata.update(x="y"),
        "a path twice": lambda m: m.planner_data.update({"epoch": ("name",)}),
        "a path through a value": lambda m: m.planner_data.update({"epoch": ("name", "x")}),
        "a far place": lambda m: m.planner_data.update({"epoch": ("list", 1 << 50)}),
    }


@pytest.mark.parametrize("case", list(lies()))
def test_metadata_that_lies_is_refused_before_any_target_changes(folder: Path, case: str) -> None:
    """By a FormatError, whatever it lies about."""
    metadata = read_metadata(folder)
    lies()[case](metadata)
    write_metadata(folder, metadata)
    state = make_training_state()
    target = {"model": {name: torch.zeros_like(t) for name, t in state["model"].items()}}
    with pytest.raises(FormatError):
        sync.load(folder, config=SMALL)
    if case != "another type":  # which does not fit the target, and so is left out
        with pytest.raises(FormatError):
            sync.load_with_report(folder, target, strict="ignore", config=SMALL)
        assert all(not t.any() for t in target["model"].values())


def test_what_other_planners_keep_has_no_effect(folder: Path) -> None:
    """All that says where names belong in the state is a path of keys; others have their names."""
    metadata = read_metadata(folder)
    others = {"epoch": (), "name": "x", "optim.betas": ("x", 1.5), "model.scalar": ["x", "y"]}
    metadata.planner_data = others
    write_metadata(folder, metadata)
    assert sync.load(folder, config=SMALL).keys() == metadata.state_dict_metadata.keys()


@pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")  # of torch 2.15
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of 2.11
@pytest.mark.parametrize("case", ["as it is", "no tensor", "type", "shape", "sparse"])
def test_a_chunk_that_torch_loads_has_to_be_what_the_metadata_says(
    tmp_path: Path, case: str
) -> None:
    """As one of which the bytes are found: a parameter has a form that nobody else reads."""
    w = torch.ones(3)
    folder, data = save_dcp(tmp_path / "dcp", {"w": w}), io.BytesIO()
    cases: dict[str, Any] = {
        "as it is": w,
        "no tensor": "w" * 100,
        "type": w.half(),
        "shape": w[:1].expand(4),
    }
    made = cases.get(case, w.to_sparse())
    is_dense = isinstance(made, torch.Tensor) and not made.is_sparse
    torch.save(torch.nn.Parameter(made) if is_dense else made, data)
    metadata = read_metadata(folder)
    (info,) = metadata.storage_data.values()
    info.offset, info.length = 0, len(data.getvalue())
    (folder / info.relative_path).write_bytes(data.getvalue())
    write_metadata(folder, metadata)
    if case == "as it is":
        assert torch.equal(sync.load(folder, config=SMALL)["w"], w)
        return
    with pytest.raises(FormatError, match="'w': not the tensor"):
        sync.load(folder, config=SMALL)


@pytest.mark.parametrize(
    ("made", "numel", "said"),
    [
        (torch.nn.Parameter(torch.ones(1).expand(9000)), 9000, "'w': 36000 bytes of it lie in"),
        (argparse.Namespace(w=1), 3, "'w': it is more than data"),
        (torch.nn.Parameter(torch.ones(4)), 3, "'w': not the tensor"),
    ],
)
def test_a_chunk_that_torch_loads_is_loaded_before_any_target_changes(
    made: object, numel: int, said: str, tmp_path: Path
) -> None:
    """Else it shows too late what it is; one element that stands for many is not loaded at all."""
    folder = save_dcp(tmp_path / "dcp", {"a": torch.ones(3), "w": torch.ones(numel)})
    metadata, data = read_metadata(folder), io.BytesIO()
    torch.save(made, data)
    info = metadata.storage_data[MetadataIndex("w", (0,))]
    with (folder / info.relative_path).open("ab") as file:
        info.offset, info.length = file.tell(), file.write(data.getvalue())
    write_metadata(folder, metadata)
    target = {"a": torch.zeros(3), "w": torch.zeros(numel)}
    with pytest.raises(FormatError, match=said):
        sync.load(folder, into=target, config=SMALL)
    assert not target["a"].any()


def test_a_value_that_is_damaged_is_told_with_its_place(tmp_path: Path) -> None:
    """Whatever is wanted: each is read to know what is there."""
    folder = save_dcp(tmp_path / "dcp", {"name": "a run"})
    (file,) = folder.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"a run", b"a rum"))
    place = rf"bytes \[0, {len(data)}\) of '{file.name}'"
    with pytest.raises(FormatError, match=f"^'{folder}': {place}: .*CRC"):
        sync.load(folder, config=SMALL)
    file.unlink()
    with pytest.raises(CorruptionError) as caught:
        sync.load(folder, config=SMALL)
    error = caught.value
    assert (error.file, error.start, error.stop) == (file.name, 0, len(data))
    assert (error.fqns, error.problem) == (("name",), "no such regular file")


def test_two_items_in_one_place_are_called_that(folder: Path) -> None:
    """Whether the file is there or not; no safetensors file is."""
    metadata = read_metadata(folder)
    lies()["a place over others"](metadata)
    write_metadata(folder, metadata)
    for _ in range(2):
        with pytest.raises(FormatError, match="two items lie over each other"):
            sync.load(folder, config=SMALL)
        for file in folder.glob("*.distcp"):
            file.unlink()


def test_a_checkpoint_is_as_old_as_its_metadata(folder: Path) -> None:
    """Nothing in it says when it was written."""
    os.utime(folder / ".metadata", (86_400, 86_400))
    assert sync.inspect(folder, config=SMALL).created.startswith("1970-01-02T00:00:00")


def test_a_file_that_was_cut_is_noticed_before_any_target_changes(folder: Path) -> None:
    """With the name of what was in there."""
    (file,) = folder.glob("*.distcp")
    os.truncate(file, file.stat().st_size - 5000)
    state = make_training_state()
    target = {"model": {name: torch.zeros_like(t) for name, t in state["model"].items()}}
    with pytest.raises(CorruptionError) as caught:
        sync.load_with_report(folder, target, strict="ignore", config=SMALL)
    assert caught.value.fqns
    assert all(not t.any() for t in target["model"].values())
    places = read_metadata(folder).storage_data
    last = max(places, key=lambda index: int(places[index].offset))
    os.truncate(file, places[last].offset - 1)  # what is behind the end has no bytes, not minus one
    with pytest.raises(CorruptionError, match=f"only 0 bytes of {places[last].length}"):
        sync.load(folder, select=last.fqn, config=SMALL)


def test_objects_are_refused_by_name_unless_allowed_or_left_out(tmp_path: Path) -> None:
    """As the sharded objects of Megatron-core are: only a pickle can make them."""
    state = {
        "w": torch.ones(3),
        "decoder._extra_state/shard_0_2": io.BytesIO(b"scales"),
        "args": argparse.Namespace(lr=1),
    }
    folder = save_dcp(tmp_path / "megatron", state)
    names = {tensor.name for tensor in sync.inspect(folder, config=SMALL).tensors}
    assert names == set(state)
    with pytest.raises(FormatError, match=r"_extra_state/shard_0_2', 'args'"):
        sync.load(folder, config=SMALL)
    target: Any = {"w": torch.zeros(3), "args": b""}
    with pytest.raises(FormatError, match="'args'"):
        sync.load_with_report(folder, target, strict="ignore", config=SMALL)
    assert not target["w"].any()
    assert_same_state(sync.load(folder, select="w", config=SMALL), {"w": torch.ones(3)})
    with torch.serialization.safe_globals([io.BytesIO]):
        found = sync.load(folder, select=["w", "decoder"], config=SMALL)
    assert found["decoder._extra_state/shard_0_2"] == b"scales"


def test_what_megatron_does_not_shard_is_said_to_lie_beside(tmp_path: Path) -> None:
    """A load, a conversion and a comparison say where it is; it is taken by its own path."""
    weights = {"decoder.weight": torch.ones(3), "optimizer.state.exp_avg": torch.zeros(3)}
    folder = save_dcp(tmp_path / "iter_0000100", weights)
    assert not sync.load_with_report(folder, config=SMALL).report.notes
    torch.save({"iteration": 100, "args": argparse.Namespace(lr=1)}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    found = sync.load_with_report(folder, config=SMALL)
    converted = sync.convert(folder, tmp_path / "ours", to="ckptio")
    compared = run_diff(tmp_path / "ours", folder)
    assert found.state.keys() == weights.keys()
    assert compared.is_equal
    for notes in (found.report.notes, converted.notes, compared.notes):
        (note,) = notes
        assert note.startswith(f"{folder}/common.pt: what Megatron-core does not shard")
    assert sync.load(folder / "common.pt", select="iteration") == {"iteration": 100}
    assert not sync.load_with_report(tmp_path / "ours").report.notes


def test_no_bytes_come_back(tmp_path: Path) -> None:
    """They are pickled as a call of `bytes`; one with arguments would make room for as many."""
    state = {"none": b"", "few": [b"", 1], "w": torch.ones(2)}
    folder = save_dcp(tmp_path / "dcp", state)
    torch.save(state, tmp_path / "x.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for path in (folder, tmp_path / "x.pt", tmp_path / "old.pt"):
        assert_same_state(sync.load(path, config=SMALL), state)
    assert bytes not in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("num", [1, 2])
def test_data_that_dcp_wrote_and_does_not_read_is_called_what_it_is(
    tmp_path: Path, num: int
) -> None:
    """Its metadata has all items of a safetensors file begin where the file does."""
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    if not hasattr(filesystem, "SerializationFormat"):
        pytest.skip("this torch writes one format")
    weights = {f"w{i}": torch.arange(3.0) + i for i in range(num)}
    writer = filesystem.FileSystemWriter(
        tmp_path / "dcp", serialization_format=filesystem.SerializationFormat.SAFETENSORS
    )
    folder = save_dcp(tmp_path / "dcp", weights, storage_writer=writer)
    with pytest.raises(FormatError, match=r"as a safetensors file has them.*its own path"):
        sync.load(folder, config=SMALL)
    assert_same_state(sync.load(folder / "__0_0.distcp", config=SMALL), weights)
    writer = filesystem.FileSystemWriter(
        tmp_path / "more", serialization_format=filesystem.SerializationFormat.SAFETENSORS
    )
    folder = save_dcp(tmp_path / "more", weights | {"n": 3}, storage_writer=writer)
    with pytest.raises(FormatError, match="as a safetensors file has them") as caught:
        sync.load(folder, config=SMALL)
    assert "own path" not in str(caught.value)  # no reader of safetensors takes that file


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, of sparse and quantised tensors
def test_what_has_no_portable_form_is_left_out_if_nobody_wants_it(tmp_path: Path) -> None:
    """One such value does not cost the rest, as in a file of torch.save."""
    cycle: list[Any] = [1]
    cycle.append(cycle)
    state: dict[str, Any] = {
        "w": torch.ones(2),
        "sparse": (torch.eye(2).to_sparse(),),
        "layout": ("a", torch.strided),
        "cycle": (cycle,),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "empty": torch.quantize_per_tensor(torch.ones(0), 0.1, 0, torch.qint8),
    }
    folder = save_dcp(tmp_path / "dcp", state)
    assert_same_state(sync.load(folder, select="w", config=SMALL), {"w": torch.ones(2)})
    for name in set(state) - {"w"}:
        with pytest.raises(FormatError, match=f"'{name}'.*select="):
            sync.load(folder, select=["w", name], config=SMALL)
    with pytest.raises(FormatError, match="no portable form"):
        sync.load(folder, config=SMALL)


def test_a_value_with_tensors_in_it_comes_back(tmp_path: Path) -> None:
    """A tuple is one value to DCP, whatever it holds."""
    state = {"pair": (torch.arange(3), {"x": [torch.ones(2), 1.5]}), "w": torch.zeros(2)}
    folder = save_dcp(tmp_path / "pair", state)
    found = sync.load(folder, config=SMALL)
    assert_same_state(found, state)
    assert torch.equal(
        sync.load_slice(folder, "pair.0", slice(1, 2), config=SMALL), torch.arange(3)[1:2]
    )


def test_state_of_planners_that_do_not_nest_is_flat(tmp_path: Path) -> None:
    """Names are the keys then."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: PLC0415

    state = {"a.b": torch.ones(2), "c": torch.zeros(1)}
    folder = save_dcp(
        tmp_path / "flat", state, planner=DefaultSavePlanner(flatten_state_dict=False)
    )
    assert_same_state(sync.load(folder, config=SMALL), state)


def test_a_tensor_in_a_value_may_be_called_as_another_is(tmp_path: Path) -> None:
    """Each has a name of its own in the manifest, and what is loaded is as it was."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: PLC0415

    state: dict[str, Any] = {
        "a": {"b": torch.zeros(2), "b.c": torch.full((1,), 3.0)},
        "a.b": {"c": torch.full((1,), 4.0)},
        "a.b~2": torch.full((5,), 5.0),
        "c": torch.ones(1),
    }
    folder = save_dcp(
        tmp_path / "flat", state, planner=DefaultSavePlanner(flatten_state_dict=False)
    )
    with sync.Engine(SMALL) as engine:
        for _ in range(2):
            assert_same_state(engine.load(folder), state)
            assert_same_state(engine.load(folder, select="c"), {"c": state["c"]})
    names = {tensor.name for tensor in sync.inspect(folder, config=SMALL).tensors}
    assert names == {"a.b~3", "a.b.c", "a.b.c~2", "a.b~2", "c"}


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 3), (3, 2), (1, 2), (2, 0)])
def test_a_chunk_that_lies_in_another_order_comes_back(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Stock DCP writes a tensor with the strides that it has."""
    turned = torch.arange(float(math.prod(shape))).reshape(shape).transpose(0, -1)
    folder = save_dcp(tmp_path / "turned", {"w": turned})
    assert_same_state(sync.load(folder, config=SMALL), {"w": turned})


def test_selecting_nothing_that_is_there_says_so(folder: Path) -> None:
    """As with a checkpoint of ours."""
    with pytest.raises(TargetError, match="select"):
        sync.load(folder, select="optimizer", config=SMALL)


def test_unknown_kinds_of_items_have_no_effect_on_others(folder: Path) -> None:
    """Metadata has a value without a place: refused by name."""
    metadata = read_metadata(folder)
    metadata.state_dict_metadata["ghost"] = BytesStorageMetadata()
    write_metadata(folder, metadata)
    with pytest.raises(FormatError, match="'ghost' has no place"):
        sync.load(folder, config=SMALL)
