"""Manifests that somebody wrote by hand, checksums right: a value or a typed error.

What a hostile manifest may never do is raise anything else, reach outside of its
directory, import, or take memory that its files do not have.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import sys
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio import sync
from ckptio.errors import CheckpointError, CheckpointNotFoundError, CorruptionError, FormatError
from ckptio.format.checksum import crc32c
from ckptio.format.encode import MAX_DEPTH
from ckptio.layout import DTYPES
from tests.rig import config_with
from tests.strategies import CLASSES, Color, Key, Point, Settings, with_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def engine() -> Iterator[sync.Engine]:
    with sync.Engine(config_with(direct_io="off", durability="none")) as engine:
        yield engine


def sample() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "base": base,
        "view": base.t(),
        "array": np.arange(5),
        "bytes": b"x" * 2000,
        "scalar": np.float32(1.5),
        "words": [torch.float32, torch.Size([1]), torch.device("cpu")],
        "plain": [1, 2.5, None, "x", (1, {2}), {3: 4}, Point(1, 2), Settings(3), Color.RED],
        "keys": {Key(1, 2): torch.ones(2), (1, 2.5): 0},
        "net": with_versions({"a.w": torch.ones(1)}, {"": {"version": 2}, "a": {"version": 1}}),
    }


@pytest.fixture(scope="module")
def saved(engine: sync.Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hostile") / "ckpt"
    engine.save(sample(), path)
    return str(path)


def document_of(path: str) -> dict[str, Any]:
    with open(f"{path}/manifest.json", "rb") as file:
        document = json.load(file)
    del document["crc32c"]
    assert isinstance(document, dict)
    return document


@contextlib.contextmanager
def rewritten(path: str, document: Any) -> Iterator[None]:
    """Put another manifest, with a right checksum, in the place of a checkpoint's own."""
    manifest = f"{path}/manifest.json"
    with open(manifest, "rb") as file:
        own = file.read()
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    body = text.rstrip()[:-1]
    try:
        _replace(manifest, body + b',"crc32c":"%08x"}\n' % crc32c(body))
        yield
    finally:
        _replace(manifest, own)


def _replace(path: str, data: bytes) -> None:
    """Give a file other bytes, and another inode, as any writer would."""
    with open(path + ".new", "wb") as file:
        file.write(data)
    os.replace(path + ".new", path)


def try_everything(engine: sync.Engine, path: str) -> None:
    """Do all that reads a checkpoint: values or `CheckpointError`s come out."""
    attempts: list[Callable[[], object]] = [
        lambda: engine.load(path),
        lambda: engine.load(path, types=CLASSES),
        lambda: engine.load(path, select=["base", "*.1", "plain"]),
        lambda: engine.load_with_report(path, sample()),
        lambda: engine.load_with_report(path, {"base": None, "view": torch.zeros(6, 4)}),
        lambda: engine.load(path, dtype=torch.bfloat16),
        lambda: engine.load_slice(path, "view", 0),
        lambda: engine.load_slice(path, "base", slice(1, 3)),
        lambda: engine.verify(path),
    ]
    for attempt in attempts:
        with contextlib.suppress(CheckpointError):
            attempt()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10)
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3)
    | st.sampled_from(["float32", "uint8", "<f4", "|O", "a" * 9, "cpu", "2024-01-01", "AAAA"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("~vtdsrocfkznm"), inner, max_size=4),
    ),
    max_leaves=5,
)
tags = st.sampled_from(
    [
        "dict", "odict", "counter", "tuple", "set", "frozenset", "namedtuple", "dataclass", "enum",
        "int", "float", "complex", "str", "bytes", "bytearray", "date", "datetime", "time",
        "timedelta", "path", "np", "view", "npscalar", "torch.Size", "torch.dtype", "torch.device",
    ]
)  # fmt: skip
nodes = st.one_of(
    json_values,
    st.fixed_dictionaries(
        {"~": tags},
        optional={
            "v": json_values | st.lists(st.lists(json_values, min_size=2, max_size=2), max_size=2),
            "t": st.integers(-1, 5),
            "d": st.sampled_from(["float32", "uint8", "int64", "<f4", "<f8", "<M8[s]", "|S3", "O"]),
            "s": st.lists(st.integers(0, 7), max_size=3),
            "r": st.lists(st.integers(0, 7), max_size=3),
            "o": st.integers(0, 30),
            "c": st.sampled_from(["os:system", "tests.strategies:Point", "tests.strategies:Color"]),
            "f": json_values,
            "z": json_values,
            "n": json_values,
            "k": json_values,
            "conj": json_values,
            "neg": json_values,
            "m": json_values,
        },
    ),
)


@given(data=st.data())
def test_any_tree_is_a_value_or_a_checkpoint_error(
    engine: sync.Engine, saved: str, data: st.DataObject
) -> None:
    """Nodes of a good tree replaced by anything."""
    document = document_of(saved)
    for _ in range(data.draw(st.integers(1, 3))):
        holder: Any = document
        key: Any = "tree"
        while (
            isinstance(holder[key], (dict, list)) and holder[key] and data.draw(st.integers(0, 5))
        ):
            holder = holder[key]
            choices = list(holder) if isinstance(holder, dict) else range(len(holder))
            key = data.draw(st.sampled_from(choices))
        holder[key] = data.draw(nodes)
    with rewritten(saved, document):
        try_everything(engine, saved)


@pytest.mark.parametrize("node", [{"~": 99}, {"~": "other", "v": 1}, {"~": "odict"}])
def test_what_no_load_takes_is_not_verified(
    engine: sync.Engine, saved: str, node: dict[str, Any]
) -> None:
    """All its bytes are right: it says something that nobody saved."""
    document = document_of(saved)
    document["tree"]["plain"][0] = node
    with rewritten(saved, document):
        for read in (engine.load, engine.verify):
            with pytest.raises(FormatError, match="bad value in the manifest"):
                read(saved)
    assert engine.verify(saved).is_whole


@given(data=st.data())
def test_any_tensor_table_is_a_value_or_a_checkpoint_error(
    engine: sync.Engine, saved: str, data: st.DataObject
) -> None:
    """Types, shapes, places and files that are not what was written, but could be."""
    document = document_of(saved)
    for _ in range(data.draw(st.integers(1, 3))):
        tensor = data.draw(st.sampled_from(document["tensors"]))
        match data.draw(st.integers(0, 4)):
            case 0:
                tensor[1] = data.draw(st.sampled_from(["uint8", "float64", "complex64", "bool"]))
            case 1:
                tensor[2] = data.draw(st.lists(st.integers(0, 50), max_size=3))
            case 2:
                tensor[3][0][:2] = [0, data.draw(st.integers(0, 9000))]
            case 3:
                document["tensors"] = data.draw(st.permutations(document["tensors"]))
            case 4:
                document["block_nbytes"] = data.draw(st.sampled_from([1, 512, 4096, 10**6, 10**9]))
    with rewritten(saved, document):
        try_everything(engine, saved)


NAMES = ["antigravity", "this", "trap", "torch.onnx", "idlelib.idle", "lib2to3"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_manifest_is_never_imported(
    engine: sync.Engine, saved: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes, element types, devices, zones: words of a fixed list, or refused."""
    (tmp_path / "trap.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    document = document_of(saved)
    last = name.rpartition(".")[2]
    engine.load(saved)  # what a load itself imports is there by now
    with contextlib.suppress(CheckpointError):
        engine.load(saved, {"plain": torch.zeros(1)})
    for node in (
        {"~": "enum", "c": f"{name}:{last}", "v": 1},
        {"~": "dataclass", "c": f"{name}:{last}", "v": [["a", 1]]},
        {"~": "namedtuple", "c": f"{name}:{last}", "v": [["a", 1]]},
        {"~": "torch.dtype", "v": last},
        {"~": "torch.dtype", "v": name},
        {"~": "torch.device", "v": name},
        {"~": "npscalar", "d": name, "v": "AAAA"},
        {"~": "np", "t": 0, "d": name, "s": [1]},
        {"~": "datetime", "v": "2024-01-01", "f": 0, "z": name.replace(".", "/")},
        {"~": "path", "k": name, "v": "x"},
        {"~": name, "v": 1},
        {"~": f"{name}:{last}", "t": 0},
        {"py/object": name, "__reduce__": [name, []], "__class__": name},
    ):
        document["tree"]["plain"] = [node]
        before = set(sys.modules)
        with rewritten(saved, document), contextlib.suppress(CheckpointError):
            engine.load(saved, types=CLASSES)
        found = {m for m in set(sys.modules) - before if not m.startswith(("tzdata", "importlib"))}
        assert found == set()


@pytest.mark.parametrize(
    ("tree", "tensor"),
    [
        ({"~": 0}, ["w", "float64", [1 << 50], [[0, 0]]]),
        ({"~": 0}, ["w", "float64", [1 << 27], [[0, 0]]]),
        ({"~": "np", "t": 0, "d": "<f8", "s": [1 << 40]}, None),
        ({"~": "np", "t": 0, "d": "<U0", "s": [1 << 40]}, ["w", "uint8", [0], [[0, 0]]]),
        ({"~": "np", "t": 0, "d": "|S1000000", "s": [1 << 20]}, None),
        ({"~": "view", "t": 0, "d": "uint8", "o": 0, "s": [1 << 40], "r": [1]}, None),
        ({"~": "npscalar", "d": "<S900000000", "v": ""}, None),
        ({"~": "torch.Size", "v": [1 << 55] * 3}, None),
        ({"~": "int", "v": "f" * 1000}, None),
    ],
    ids=range(9),
)
def test_no_memory_is_taken_that_no_file_has(
    engine: sync.Engine, saved: str, tree: Any, tensor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a manifest declares is compared with its files before anything is made."""
    document = document_of(saved)
    document["tree"] = tree
    if tensor is not None:
        document["tensors"] = [tensor]
        if tensor[2][0] == 1 << 27:  # as consistent as it can be, but for the file itself
            document["files"][0][1] = 1 << 30
            document["files"][0][2] = base64.b64encode(bytes(4 * (1 << 30) // 4096)).decode()
            document["block_nbytes"] = 4096
    empty = torch.empty
    made: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = empty(*args, **kwargs)
        made.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counted)  # its memory is none that Python counts
    with rewritten(saved, document):
        tracemalloc.start()
        try:
            with contextlib.suppress(CheckpointError):
                engine.load(saved)
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()
    assert sum(made) < 1 << 20


def test_a_conversion_is_no_way_around_a_size(engine: sync.Engine, saved: str) -> None:
    """A view of 2**40 elements on a few bytes is one view, whatever is asked for."""
    document = document_of(saved)
    document["tree"] = {"~": "view", "t": 0, "d": "float32", "o": 0, "s": [1 << 40], "r": [0]}
    with rewritten(saved, document):
        for dtype in (None, torch.bfloat16):
            found = engine.load(saved, dtype=dtype)
            assert found.shape == (1 << 40,)
            assert found.untyped_storage().nbytes() < 1000


@pytest.mark.parametrize(("start", "more"), [(0, 1), (1, 0), (1 << 40, 0)])
def test_a_view_ends_inside_its_tensor(
    engine: sync.Engine, saved: str, start: int, more: int
) -> None:
    """Whatever is read of it: behind it in the file lies another tensor."""
    document = document_of(saved)
    entry = document["tensors"][0]
    nbytes = math.prod(entry[2]) * DTYPES[entry[1]].itemsize
    view = {"~": "view", "t": 0, "d": "uint8", "o": start, "s": [nbytes + more], "r": [1]}
    document["tree"] = {"w": view}
    target = torch.zeros(nbytes + more, dtype=torch.uint8)
    with rewritten(saved, document):
        for read in (
            lambda: engine.load(saved),
            lambda: engine.load(saved, {"w": target}),
            lambda: engine.load_slice(saved, "w", slice(-1, None)),
            lambda: engine.load_slice(saved, "w", 0),
        ):
            with pytest.raises(FormatError, match="a view ends at byte"):
                read()
    assert not target.any()


@pytest.mark.parametrize("order", [[0], [1], [0, 0], [0, 1, 2], [-1, 0], "01", None, [0.0, 1.0]])
def test_an_order_is_of_all_dimensions(engine: sync.Engine, saved: str, order: Any) -> None:
    """Each once."""
    document = document_of(saved)
    document["tree"] = {"~": 0, "p": order}
    assert len(document["tensors"][0][2]) == 2
    with rewritten(saved, document), pytest.raises(FormatError, match=r"has an order|bad value"):
        engine.load(saved)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "..", "sub/x", "a\0b"])
def test_a_file_name_reaches_nothing_outside(engine: sync.Engine, saved: str, name: str) -> None:
    """It is refused as a name, before it is opened."""
    document = document_of(saved)
    document["files"][0][0] = name
    with rewritten(saved, document), pytest.raises(FormatError, match="file name"):
        engine.load(saved)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "missing"])
def test_a_manifest_that_is_no_regular_file_is_refused(
    engine: sync.Engine, tmp_path: Path, kind: str
) -> None:
    """A link, a FIFO (which would block for ever) or a directory are no manifest."""
    engine.save({"a": torch.ones(3)}, tmp_path / "c")
    manifest = tmp_path / "c" / "manifest.json"
    manifest.rename(tmp_path / "kept.json")
    if kind == "link":
        manifest.symlink_to(tmp_path / "kept.json")
    elif kind == "fifo":
        os.mkfifo(manifest)
    elif kind == "directory":
        manifest.mkdir()
    with pytest.raises(CheckpointError) as caught:
        engine.load(tmp_path / "c")
    assert isinstance(caught.value, CheckpointNotFoundError) is (kind == "missing")


def test_two_manifests_of_one_file_do_not_mix(engine: sync.Engine, tmp_path: Path) -> None:
    """A manifest beside the data of another save does not load it."""
    engine.save({"a": torch.ones(3)}, tmp_path / "a")
    engine.save({"a": torch.zeros(3)}, tmp_path / "b")
    (name,) = document_of(str(tmp_path / "a"))["files"]
    other = next(p for p in (tmp_path / "b").iterdir() if p.suffix == ".safetensors")
    (tmp_path / "a" / name[0]).write_bytes(other.read_bytes())
    with pytest.raises(CorruptionError):
        engine.load(tmp_path / "a")


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"~":"tuple","v":[', '{"~":"dict","v":[[1,'])
@pytest.mark.parametrize("depth", [MAX_DEPTH * 3, 1000, 100_000])
def test_depth_is_a_typed_error(engine: sync.Engine, saved: str, opening: str, depth: int) -> None:
    """Containers inside each other, for ever: never a `RecursionError` or a crash."""
    closing = {"[": "]", "{": "}"}
    ends = "".join(closing[c] for c in reversed(opening) if c in closing)
    document = document_of(saved) | {"tree": "TREE"}
    text = json.dumps(document).replace('"TREE"', opening * depth + "1" + ends * depth)
    with rewritten(saved, text.encode()):
        targets: list[Any] = [None, {}, []]
        for into in targets:
            with pytest.raises(CheckpointError):
                engine.load(saved, into)
