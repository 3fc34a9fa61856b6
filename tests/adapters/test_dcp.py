"""What DCP does with the plug-ins, on one rank: whatever is saved comes back."""

from __future__ import annotations

import dataclasses
import datetime as dt
import inspect
import io
import os
import pathlib
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import StorageReader as StockReader
from torch.distributed.checkpoint.storage import StorageWriter as StockWriter

import ckptio
from ckptio import events
from ckptio.adapters.dcp import StorageReader, StorageWriter, document
from ckptio.errors import ConfigError, UnsupportedLeafError
from ckptio.format.encode import ObjectEncoder
from tests.adapters.rig import QUICK, blank, cause, load, same, save
from tests.foreign.rig import NO_DIST
from tests.rig import assert_tidy, names_in

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan


DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def has_option(name: str) -> bool:
    """Whether the stock planner has an option."""
    return name in inspect.signature(DefaultSavePlanner).parameters


def tensors() -> dict[str, Any]:
    """Make a state with tensors of several sizes, and numbers."""
    return {
        "model": {
            "weight": torch.randn(50, 70),
            "bias": torch.arange(7.0),
            "none": torch.empty(0, 3),
        },
        "scalar": torch.tensor(3.5),
        "groups": [{"lr": 0.1, "moment": torch.ones(3)}],
        "step": 7,
    }


def test_what_is_saved_comes_back_and_ckptio_reads_it_too(tmp_path: Path) -> None:
    """One directory, three readers: DCP, `ckptio.load`, `ckptio.verify`."""
    state = tensors()
    save(state, tmp_path / "c")
    assert same(load(blank(state), tmp_path / "c"), state)
    assert same(ckptio.sync.load(tmp_path / "c"), state)
    assert not ckptio.sync.verify(tmp_path / "c").damage
    assert_tidy(tmp_path / "c")


def test_the_default_device_of_the_program_is_not_ours(tmp_path: Path) -> None:
    """What the plug-ins make for themselves is on the CPU."""
    state = tensors()
    save(state, tmp_path / "c")
    target = blank(state)
    with torch.device("meta"):
        load(target, tmp_path / "c")
    assert same(target, state)


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Seventeen of them, NaN payloads among the bits."""
    raw = torch.randint(0, 2, (64,), dtype=torch.uint8).repeat_interleave(16)
    noise = torch.randint(0, 256, (1024,), dtype=torch.uint8)
    state = {
        str(dtype): (raw if dtype is torch.bool else noise).clone().view(dtype) for dtype in DTYPES
    }
    save(state, tmp_path / "c")
    assert same(load(blank(state), tmp_path / "c"), state)


def layouts() -> dict[str, torch.Tensor]:
    """Make tensors that lie in memory in every way that DCP takes."""
    base = torch.arange(120.0).view(2, 3, 4, 5)
    return {
        "contiguous": base,
        "transposed": base.transpose(1, 3),
        "channels last": base.to(memory_format=torch.channels_last),
        "strided": base[:, ::2, 1::2],
        "narrow": base.narrow(3, 1, 2),
        "expanded": torch.arange(4.0).expand(3, 4),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(1.5),
        "one": base[1, 2, 3, 4:5],
        "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


def test_every_layout_comes_back(tmp_path: Path) -> None:
    """Views, expanded ones, channels last, conjugates, into plain targets and into views."""
    state = layouts()
    save(dict(state), tmp_path / "c")
    plain = load(
        {key: torch.zeros(t.shape, dtype=t.dtype) for key, t in state.items()}, tmp_path / "c"
    )
    for key, tensor in state.items():
        assert torch.equal(plain[key], tensor), key
    room = torch.zeros(5, 4, 3, 2)
    load({"contiguous": room.permute(3, 2, 1, 0)}, tmp_path / "c")
    assert torch.equal(room.permute(3, 2, 1, 0), state["contiguous"])


def test_objects_come_back_as_what_they_were(tmp_path: Path) -> None:
    """Numbers, texts, sets, dates, arrays, bytes, streams, and tensors inside of tuples."""
    state = {
        "int": 1 << 70,
        "float": float("-inf"),
        "text": "ü\udc80",
        "none": None,
        "list": [1, "a", None],
        "tuple": (0.9, (1, 2)),
        "set": {1, 2},
        "path": pathlib.Path("a/b"),
        "when": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        "short": b"\0\1",
        "long": bytes(range(256)) * 20,
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "number": np.float32(1.5),
    }
    save(dict(state), tmp_path / "c")
    found = load(dict.fromkeys(state), tmp_path / "c")
    assert same(found, state)


def test_arrays_tensors_and_streams_inside_of_objects_come_back(tmp_path: Path) -> None:
    """What the stock planner pickles with its tensors in it has them in buckets here."""
    state: dict[str, Any] = {
        "array": np.arange(1000).reshape(10, 100),
        "tuple": (torch.arange(3), np.zeros(2)),
        "stream": io.BytesIO(b"state of a layer" * 300),
        "again": {"array": np.ones(5)},
    }
    save(dict(state), tmp_path / "c")
    found = load({"array": 0, "tuple": 0, "stream": 0, "again": {"array": 0}}, tmp_path / "c")
    assert np.array_equal(found["array"], state["array"])
    assert torch.equal(found["tuple"][0], torch.arange(3))
    assert found["stream"].read() == b"state of a layer" * 300
    assert np.array_equal(found["again"]["array"], np.ones(5))
    assert b"pickle" not in b"".join(p.read_bytes() for p in (tmp_path / "c").iterdir())


@dataclass
class Settings:
    """A value of a class."""

    lr: float
    betas: tuple[float, float]


def test_classes_come_back_only_if_they_are_passed(tmp_path: Path) -> None:
    """Otherwise as plain values, and a warning says which."""
    save({"settings": Settings(0.1, (0.9, 0.99))}, tmp_path / "c")
    reader = StorageReader(tmp_path / "c", types=(Settings,))
    assert load({"settings": None}, storage_reader=reader)["settings"] == Settings(0.1, (0.9, 0.99))
    with pytest.warns(UserWarning, match="settings: was a dataclass"):
        found = load({"settings": None}, tmp_path / "c")
    assert found["settings"] == {"lr": 0.1, "betas": (0.9, 0.99)}


class Loader:
    """A data loader, as DCP sees it when it is not at the top."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@dataclasses.dataclass
class Holder:
    """Of an object."""

    loader: Loader


def endless() -> tuple[list[Any]]:
    """Give a tuple with a list that is in itself."""
    inner: list[Any] = []
    inner.append(inner)
    return (inner,)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        [Loader()],
        Holder(Loader()),
        ({"a": Holder(Loader())},),
        endless(),
        torch.eye(3).to_sparse(),
        lambda: 0,
    ],
    ids=type,
)
def test_what_has_no_portable_form_is_refused_by_name(tmp_path: Path, value: object) -> None:
    """Before anything is there; DCP says which rank, the error which value."""
    with cause() as causes:
        save({"a": torch.ones(3), "odd": {"one": value}}, tmp_path / "c")
    (error,) = causes
    assert isinstance(error, UnsupportedLeafError)
    assert error.fqn.startswith("odd.one")
    assert not (tmp_path / "c").exists()


def test_awkward_names_come_back(tmp_path: Path) -> None:
    """Dots, tags, reserved names, quotes, other scripts, the empty name and what replaces it."""
    names = [
        "a.b",
        "~",
        "__metadata__",
        "__torch.distributed.checkpoint__",
        '"\\',
        "ü/日",
        "a b",
        "0",
        "state",
        "state~2",
        "",
    ]
    state: dict[str, Any] = {name: torch.full((3,), i) for i, name in enumerate(names)}
    state["nested"] = {name: {"x": torch.full((2,), i), "~": i} for i, name in enumerate(names)}
    save(state, tmp_path / "c")
    assert same(load(blank(state), tmp_path / "c"), state)
    assert same(ckptio.sync.load(tmp_path / "c"), state)


def test_two_thousand_small_tensors_come_back_and_cost_little(tmp_path: Path) -> None:
    """Less than 400 bytes each on the disk, 16 of them their own."""
    state = {f"layers.{i}.scale": torch.full((4,), float(i)) for i in range(2000)}
    save(dict(state), tmp_path / "c")
    assert same(load(blank(state), tmp_path / "c"), state)
    used = sum(file.stat().st_blocks * 512 for file in (tmp_path / "c").iterdir())
    assert used / 2000 < 400


def test_some_of_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    """A target with fewer names gets those; one with others needs a planner that allows it."""
    save({"a": torch.ones(3), "b": {"c": torch.full((2,), 2.0), "d": 5}}, tmp_path / "c")
    assert same(load({"b": {"d": 0}}, tmp_path / "c"), {"b": {"d": 5}})
    target = {"a": torch.zeros(3), "new": torch.zeros(1)}
    with cause() as causes:
        load(dict(target), tmp_path / "c")
    assert "new" in str(causes[0])
    load(target, tmp_path / "c", planner=DefaultLoadPlanner(allow_partial_load=True))
    assert same(target, {"a": torch.ones(3), "new": torch.zeros(1)})


def test_a_state_is_rebuilt_without_a_target(tmp_path: Path) -> None:
    """From DCP's own metadata: names, shapes, and where each value is in the state."""
    state = tensors()
    save(state, tmp_path / "c")
    keys = None if NO_DIST else set(state)  # without, older versions give nothing
    reader = StorageReader(tmp_path / "c")
    with pytest.warns(UserWarning, match="single process"):
        found = _load_state_dict_from_keys(keys, storage_reader=reader)
    assert same(found["model"], state["model"])
    assert same(found["groups"], state["groups"])
    assert found["step"] == 7


def test_module_and_optimizer_train_on_alike(tmp_path: Path) -> None:
    """As the tutorial does it, `get_state_dict` to `set_state_dict`, and as Stateful objects."""

    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(steps):
            train(model, optimizer)
        return model, optimizer

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 20).view(4, 5)).square().sum().backward()
        optimizer.step()

    one = trained(3)
    model, optimizer = get_state_dict(*one)
    save({"model": model, "optimizer": optimizer, "whole": one[0]}, tmp_path / "c")
    other = trained(0)
    model, optimizer = get_state_dict(*other)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    load(state, tmp_path / "c")
    set_state_dict(*other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for pair in (one, other):
        train(*pair)
    assert same(dict(one[0].state_dict()), dict(other[0].state_dict()))
    third = trained(0)[0]
    load({"whole": third}, tmp_path / "c")
    expected = ckptio.sync.load(tmp_path / "c")["whole"]
    assert same(dict(third.state_dict()), expected)


def test_one_writer_and_one_reader_serve_many_checkpoints(tmp_path: Path) -> None:
    """By checkpoint_id, pickled in between, and again to the first path."""
    writer, reader = StorageWriter(config=QUICK), StorageReader(config=QUICK)
    for i in range(4):
        path = tmp_path / str(i % 3)
        save({"x": torch.full((3,), i)}, storage_writer=writer, checkpoint_id=path)
        found = load(
            {"x": torch.zeros(3, dtype=torch.int64)}, storage_reader=reader, checkpoint_id=path
        )
        assert found["x"].tolist() == [i] * 3
        assert_tidy(path)
        assert (writer.checkpoint_id, reader.checkpoint_id) == (path, path)
        writer, reader = pickle.loads(pickle.dumps((writer, reader)))  # noqa: S301  # our own
    save({"x": torch.full((3,), 9)}, storage_writer=writer)  # no new id: the same path again
    assert load({"x": torch.zeros(3, dtype=torch.int64)}, storage_reader=reader)["x"][0] == 9


def test_copies_of_a_writer_do_not_meet(tmp_path: Path) -> None:
    """Each of the copies that are sent to other processes names its saves anew."""
    copy = pickle.dumps(StorageWriter(tmp_path / "c", config=QUICK))
    for i in range(3):
        save({"x": torch.full((3,), i)}, storage_writer=pickle.loads(copy))  # noqa: S301  # our own
        assert ckptio.sync.load(tmp_path / "c")["x"].tolist() == [i] * 3
        assert_tidy(tmp_path / "c")


@pytest.mark.filterwarnings("ignore:torch.distributed is ")
@pytest.mark.parametrize("stager", ["default", "blocking", "in the background"])
def test_what_changes_after_staging_is_not_saved(tmp_path: Path, stager: str) -> None:
    """async_save in a thread, through each of DCP's stagers."""
    if stager != "default" and not hasattr(staging, "DefaultStager"):
        pytest.skip("in this version of torch the writer stages")
    options: dict[str, Any] = (
        NO_DIST if "no_dist" in inspect.signature(async_save).parameters else {}
    )
    writer = StorageWriter(config=QUICK)
    for i in range(3):
        made: Any = None  # for each save, since that of torch 2.11 serves only one
        if stager == "blocking":
            made = staging.BlockingAsyncStager()
        elif stager == "in the background":
            made = staging.DefaultStager(staging.StagingOptions(False, False, True, False))  # noqa: FBT003  # DCP's
        if made is not None:
            options = {**options, "async_stager": made}
        state = {"w": torch.full((50_000,), float(i)), "step": i}
        given: Any = async_save(
            state,
            storage_writer=writer,
            checkpoint_id=tmp_path / str(i),
            **options,
        )
        if hasattr(given, "staging_completion"):
            given.staging_completion.result()
            given = given.upload_completion
        state["w"].zero_()  # type: ignore[attr-defined]  # it is the tensor
        given.result()
        found = ckptio.sync.load(tmp_path / str(i))
        assert found["step"] == i
        assert torch.equal(found["w"], torch.full((50_000,), float(i)))
        if made is not None:
            made.close()


def test_a_smaller_state_leaves_nothing_of_a_larger_one(tmp_path: Path) -> None:
    """Files of the old checkpoint go when the new one is committed."""
    path = tmp_path / "c"
    save({f"t{i}": torch.randn(100_000) for i in range(5)}, path)
    before = set(names_in(path))
    save({"t0": torch.ones(3)}, path)
    assert_tidy(path)
    assert before & set(names_in(path)) == {"manifest.json"}
    assert same(ckptio.sync.load(path), {"t0": torch.ones(3)})


def test_unflattened_states_come_back(tmp_path: Path) -> None:
    """With tensors inside of what is one value to the planner."""
    state = {"a": {"b": torch.ones(3), "c": [1, {"d": torch.zeros(2)}]}, "w": torch.arange(4)}
    save(dict(state), tmp_path / "c", planner=DefaultSavePlanner(flatten_state_dict=False))
    target = {"a": None, "w": torch.zeros(4, dtype=torch.int64)}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(target, tmp_path / "c", planner=planner)
    assert same(target, state)
    assert same(ckptio.sync.load(tmp_path / "c"), state)


def test_paths_that_a_planner_notes_are_not_encoded_to_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a large model that would take longer than all else of the document."""
    encoded = list[str]()

    class Listening(ObjectEncoder):
        def encode(self, fqn: str, value: Any) -> Any:
            encoded.append(fqn)
            return super().encode(fqn, value)

    monkeypatch.setattr(document, "ObjectEncoder", Listening)
    for paths, is_encoded in (
        ({"a.b": ("a", "b")}, False),
        ({"a.b": ("a.b",)}, True),
        ({}, True),
        ([], True),
        ({"a.b": ("a", True)}, True),
    ):
        encoded.clear()
        item = document.Item("a.b", "object", ("a", "b"))
        document.encode_document(
            document.Document((item,), nested=False, planner_data=paths, storage_meta={})
        )
        assert ("planner_data" in encoded) == is_encoded


def test_what_a_planner_notes_has_to_be_portable(tmp_path: Path) -> None:
    """Arrays are not, whatever they are compared with; the error names where they are."""

    class Noting(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, dataclasses.replace(metadata, planner_data={"w": np.arange(2)})

    with cause() as causes:
        save({"w": torch.ones(2)}, tmp_path / "c", planner=Noting())
    assert isinstance(causes[0], UnsupportedLeafError)
    assert "planner_data.w" in str(causes[0])
    assert not (tmp_path / "c").exists()


def test_an_observer_hears_of_one_save(tmp_path: Path) -> None:
    """What DCP has to know besides has a file, too; that one is counted, and is no other save."""
    seen: list[events.Event] = []
    writer = StorageWriter(tmp_path / "c", config=QUICK, observer=seen.append)
    save({"w": torch.ones(3000), "step": 3}, storage_writer=writer)
    info = ckptio.sync.inspect(tmp_path / "c")
    (started,) = (event for event in seen if isinstance(event, events.SaveStarted))
    assert [type(event) for event in seen if not isinstance(event, events.SaveProgressed)] == [
        events.SaveStarted,
        events.SaveStaged,
        events.SaveCommitted,
    ]
    progressed = [event for event in seen if isinstance(event, events.SaveProgressed)]
    assert [event.nbytes for event in progressed] == [started.nbytes] * len(progressed)
    assert progressed[-1].written_nbytes == started.nbytes
    committed = seen[-1]
    assert isinstance(committed, events.SaveCommitted)
    assert (committed.save_id, committed.nbytes) == (info.save_id, info.nbytes)
    assert committed.elapsed_s > 0


@pytest.mark.skipif(not has_option("enable_plan_caching"), reason="a later version of torch")
def test_cached_plans_do_not_mix_saves(tmp_path: Path) -> None:
    """A planner that keeps its plans hands the last save's names over; nobody goes by them."""
    for i in range(4):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        planner._cached_plans_key = "test_cached_plans_do_not_mix_saves"
        state = {"x": torch.full((5,), i), "step": i}
        save(state, tmp_path / "c", planner=planner)
        assert same(ckptio.sync.load(tmp_path / "c"), state)
        assert_tidy(tmp_path / "c")


def test_metadata_says_what_the_stock_reader_says(tmp_path: Path) -> None:
    """Names, shapes, types, chunks, whether gradients were wanted, where in the state."""
    state = {
        "m": {"w": torch.nn.Parameter(torch.ones(2, 3))},
        "step": 3,
        "l": [{"x": torch.ones(1)}],
    }
    written = save(state, tmp_path / "c")
    reader = StorageReader(tmp_path / "c")
    found = reader.read_metadata()
    for entry in written.state_dict_metadata.values():
        properties: Any = getattr(entry, "properties", None)
        if hasattr(properties, "strides"):
            properties.strides = None  # as where an earlier torch wrote: nobody needs them
    assert found.state_dict_metadata == written.state_dict_metadata
    assert found.planner_data == written.planner_data
    assert found.storage_meta is not None
    assert written.storage_meta is not None
    assert found.storage_meta.save_id == written.storage_meta.save_id
    assert found.storage_meta.checkpoint_id == str(tmp_path / "c")


@pytest.mark.parametrize(
    "options",
    [
        {"per_thread_copy_ahead": 10_000_000},
        *([{"cache_staged_state_dict": True}] if hasattr(staging, "DefaultStager") else []),
        {"_extensions": ["one"]},
        {"thread_count": 0},
        {"thread_count": True},
        {"thread_count": 2.0},
        {"sync_files": "no"},
        {"serialization_format": "torch_save"},
        {"config": {"max_writes": 2}},
        {"observer": 3},
    ],
    ids=str,
)
def test_options_without_effect_are_refused(options: dict[str, Any]) -> None:
    """And those that are out of range."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        StorageWriter("x", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"types": [int]},
        {"_extension_registry": "one"},
        {"config": {"max_reads": 2}},
        {"observer": 3},
    ],
    ids=str,
)
def test_a_reader_refuses_options_without_effect(options: dict[str, Any]) -> None:
    """When it is made, not where it reads."""
    with pytest.raises(ConfigError):
        StorageReader("x", **options)


def test_stock_options_mean_what_they_say(tmp_path: Path) -> None:
    """thread_count, sync_files, single_file_per_rank and overwrite, by place and by name."""
    writer = StorageWriter(tmp_path / "c", False, False, 3)  # noqa: FBT003  # as stock writers are made
    save({f"t{i}": torch.ones(100) for i in range(5)}, storage_writer=writer)
    assert len(names_in(tmp_path / "c")) == 1 + 5 + 1  # manifest, tensors, what DCP has to know
    with cause() as causes:
        save({"x": 1}, storage_writer=StorageWriter(tmp_path / "c", overwrite=False))
    assert isinstance(causes[0], FileExistsError)
    with pytest.raises(ConfigError):
        StorageWriter("s3+odd://bucket/x")
    with cause() as causes:
        save({"x": 1}, storage_writer=StorageWriter())
    assert isinstance(causes[0], ConfigError)


@pytest.mark.parametrize("path", [5, b"c", "", pathlib.Path("b2://bucket/c")], ids=str)
def test_a_checkpoint_id_that_is_no_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any
) -> None:
    """As a path is that a plug-in is made with; a URL that was made a path object is none."""
    monkeypatch.chdir(tmp_path)
    with cause() as causes:
        save({"x": 1}, storage_writer=StorageWriter(config=QUICK), checkpoint_id=path)
    assert isinstance(causes[0], ConfigError)
    assert not list(tmp_path.iterdir())
    reader = StorageReader(config=QUICK)
    reader.reset(path)
    with pytest.raises(ConfigError):
        reader.read_metadata()
    with pytest.raises(ConfigError):
        reader.read_metadata(rank=0)


@pytest.mark.parametrize("syncs", [False, True, None])
def test_files_are_synced_as_they_are_told_to(
    *, syncs: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the option of the stock writer, or else by the config."""
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    for durability in ("none", "full"):
        synced.clear()
        path = tmp_path / durability
        config = dataclasses.replace(QUICK, durability=durability)
        save({"x": torch.ones(3)}, storage_writer=StorageWriter(path, True, syncs, config=config))  # noqa: FBT003  # as stock writers are made
        is_synced = durability == "full" if syncs is None else syncs
        assert (str(path) in synced) == is_synced
        num_data = sum(os.path.basename(file).startswith("data-") for file in synced)
        assert num_data == (2 if is_synced else 0)


def test_plug_ins_are_what_dcp_expects(tmp_path: Path) -> None:
    """Subclasses of its interfaces, that say which ids are theirs and touch nothing."""
    assert issubclass(StorageWriter, StockWriter)
    assert issubclass(StorageReader, StockReader)
    for cls in (StorageWriter, StorageReader):
        assert cls.validate_checkpoint_id(str(tmp_path / "new"))
        assert not cls.validate_checkpoint_id("")
    assert not (tmp_path / "new").exists()
