"""Checkpoints of every version of the format that was ever released still load.

`tests/golden/v<n>` was written once, by `write_golden` below at that version, and
`v<n>-ranks` by several ranks, by `write_golden_of_ranks`; `v2-pointer` is a small one whose
manifest is pointed to, as those of large ones are in object stores. They are never written again:
`python -m tests.test_golden <directory> <directory of ranks>` makes them for a new version.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import pathlib
import re
import struct
import sys
import zoneinfo
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ckptio import PerRank, Shard, sync
from ckptio.config import CheckpointConfig, KiB
from ckptio.format.manifest import FORMAT_VERSION
from ckptio.testing import run_virtual
from tests.job_rig import blank, job, shards_of
from tests.strategies import (
    CLASSES,
    TORCH_DTYPES,
    Color,
    Key,
    Level,
    Point,
    Settings,
    assert_same,
)
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from ckptio import Engine

#: Those that the oldest torch we work with has: a checkpoint with others does not load there.
DTYPE_NAMES = sorted(
    name
    for name in set(TORCH_DTYPES) - {"float8_e8m0fnu", "float4_e2m1fn_x2"}
    if not re.fullmatch(r"u?int[1-7]|bits.*", name)
)
GOLDEN = pathlib.Path(__file__).parent / "golden"
CONFIG = CheckpointConfig(
    slab_nbytes=8 * KiB,
    block_nbytes=4 * KiB,
    pool_nbytes=64 * KiB,
    bucket_nbytes=16 * KiB,
    max_writes=1,
    durability="none",
)


def counted(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Make a tensor of counted bytes, the same in every version of torch."""
    count = math.prod(shape)
    if dtype is torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(shape)
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64) * 37 + 11
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def golden_state() -> dict[Any, Any]:
    """Give a state with every kind of value that every version has."""
    base = counted(torch.float32, 6, 5)
    complex_base = torch.arange(8, dtype=torch.float32).view(torch.complex64)
    buffer = counted(torch.uint8, 64)
    shared = counted(torch.float32, 30)
    return {
        "dtypes": {name: counted(TORCH_DTYPES[name], 3, 2) for name in DTYPE_NAMES},
        "shapes": [counted(torch.int16, *shape) for shape in [(), (0,), (2, 0, 3), (1,), (5000,)]],
        "large": counted(torch.float64, 70, 40),
        "ties": {
            "base": base, "same": base, "transposed": base.t(), "row": base[2], "every": base[::2],
            "window": [shared[:20], shared[10:]], "expanded": counted(torch.int32, 3).expand(4, 3),
            "conj": [complex_base, complex_base.conj(), complex_base.conj().imag],
            "types": [buffer, buffer.view(torch.int64), buffer[8:24].view(torch.bfloat16)],
        },
        "arrays": [
            np.arange(6, dtype="<f4").reshape(2, 3), np.arange(6, dtype=">i8"), np.array(2.5),
            np.zeros((0, 2), "<u2"), np.array(["a", "é", ""]), np.array([b"x", b"yz"]),
            np.array(["2024-02-29", "NaT"], "<M8[D]"), np.array([1, 2], "<m8[25s]"),
            np.array([True, False]), np.array([1 + 2j, 3], "<c16"),
        ],
        "scalars": [
            np.float32(1.5), np.int64(-7), np.True_, np.str_("é"), np.bytes_(b"x\0"),
            np.complex128(1j), np.datetime64("2024-02-29T12:00"), np.timedelta64(3, "s"),
            np.str_(""), np.uint64(2**64 - 1),
        ],
        "words": [torch.Size([2, 3]), torch.bfloat16, torch.qint8, torch.device("cuda:1")],
        "bytes": [b"", b"short\xff", b"long" * 400, bytearray(b"b"), bytearray(b"array" * 300)],
        "numbers": [
            0, -1, 2**53, 2**53 + 1, -(3**200), True, False, None, 0.1, -0.0, 1e300, 5e-324,
            math.inf, -math.inf, struct.unpack(">d", bytes.fromhex("fff8dead00beef01"))[0],
            complex(-0.0, math.inf),
        ],
        "text": ["", "plain", "é🔥\0", "\ud800 lone"],
        "times": [
            dt.date(2024, 2, 29), dt.time(23, 59, 59, 999999, fold=1),
            dt.datetime(2024, 10, 27, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1),
            dt.datetime(2024, 1, 1, tzinfo=dt.UTC), dt.timedelta(-3, 5, 7),
            dt.time(1, 2, tzinfo=dt.timezone(dt.timedelta(hours=-3, minutes=-30))),
            dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
        ],
        "paths": [
            pathlib.Path("/a/b"), pathlib.PurePosixPath("c"), pathlib.PureWindowsPath("C:\\d"),
            pathlib.Path("\udcff"),
        ],
        "containers": [
            {}, [], (), set(), frozenset(), OrderedDict(b=1, a=2), Counter("abca"), {1, "a", None},
            frozenset([(1, 2)]), (1, [2, (3,)]), OrderedDict([((1,), 2)]),
        ],
        "keys": {
            1: "int", "1": "str", 2.5: "float", None: "none", True + 1: "two", b"k": "bytes",
            (1, "a"): "tuple", frozenset([1, 2]): "frozenset", "~": "tag", "\ud800": "surrogate",
            Color.RED: "enum", Key(1, 2): "dataclass", Point(1, 2): "named tuple",
            dt.date(2024, 1, 1): "date", pathlib.PurePosixPath("p"): "path", "é": "letter",
        },
        "names": {"a.b": counted(torch.int8, 1), "a": {"b": counted(torch.int8, 2)}},
        "__metadata__": counted(torch.int8, 3),
        "classes": [Point(1, counted(torch.int8, 4)), Settings(0.5), Color.BLUE, Level.HIGH],
    }  # fmt: skip


def write_golden(directory: str) -> None:
    """Write the golden checkpoint of the current version."""
    sync.save(golden_state(), directory, config=CONFIG)


RANKS_CONFIG = dataclasses.replace(
    CONFIG, replicate="local", local_replica_nbytes=6 * KiB, exchange="off"
)
NUM_RANKS = 3


def golden_tensors() -> dict[str, torch.Tensor]:
    """Give the tensors of a state that several ranks have together."""
    return {
        "rows": counted(torch.float32, 13, 70),
        "columns": counted(torch.bfloat16, 64, 31),
        "grid": counted(torch.int16, 4, 6, 5),
        "flat": counted(torch.float64, 10, 10),
        "few": counted(torch.int32, 2, 5),
        "norm": counted(torch.float32, 1000),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "large": counted(torch.uint8, 150 * KiB),
    }


def golden_part(rank: int) -> dict[str, Any]:
    """Give what one of three ranks has of it."""
    state: dict[str, Any] = {**golden_tensors()}
    for name, grid in {"rows": (3, 1), "columns": (1, 3), "grid": (1, 3, 1), "few": (3, 1)}.items():
        state[name] = shards_of(state[name], grid)[rank]
    first, stop = (100 * i // NUM_RANKS for i in (rank, rank + 1))
    flat = state["flat"].reshape(-1)[first:stop]
    state["flat"] = Shard(flat, (10, 10), flat_start=first)
    state["tied"] = state["norm"]
    state["step"], state["name"] = 7, "golden"
    state["rng"] = PerRank({"seed": rank, "state": counted(torch.uint8, 5 + rank)})
    if rank:
        state["of_some"] = [counted(torch.int8, 3), "here"]
    if rank == 1:
        state["of_one"] = counted(torch.int8, 9)
    return state


def write_golden_of_ranks(directory: str) -> None:
    """Write the golden checkpoint of several ranks: shards, copies, values of each rank."""

    async def scenario() -> None:
        async with job(
            NUM_RANKS,
            config=RANKS_CONFIG,
            hosts=["host0", "host0", "host1"],
            directory=pathlib.Path(directory),
        ) as ranks:

            async def body(rank: int, engine: Engine) -> None:
                await engine.save(golden_part(rank), "memory")

            await ranks.all(body)

    run_virtual(scenario(), seed=0)


versions = pytest.mark.parametrize("version", ["v1", "v2"])


def test_there_is_a_checkpoint_of_every_version() -> None:
    """A change of the format adds one."""
    names = {path.name for path in GOLDEN.glob("v*")}
    assert names == {
        *(f"v{version}" for version in range(1, FORMAT_VERSION + 1)),
        *(f"v{version}-ranks" for version in range(2, FORMAT_VERSION + 1)),
        "v2-dcp",
        "v2-pointer",
    }


def test_a_pointer_leads_to_its_manifest() -> None:
    """As it was copied from an object store; the pointer is the commit."""
    state = sync.load(GOLDEN / "v2-pointer")
    assert state["step"] == 7
    assert state["tensor"].tolist() == [0, 1, 2]
    assert sync.verify(GOLDEN / "v2-pointer").is_whole


def test_data_files_of_one_rank_are_those_of_version_1() -> None:
    """What version 2 added is in the manifest alone, for who saves alone."""
    first, second = (
        [path.read_bytes() for path in sorted((GOLDEN / version).glob("*.safetensors"))]
        for version in ("v1", "v2")
    )
    assert first == second


@versions
def test_a_checkpoint_is_what_was_saved(version: str) -> None:
    """Every kind of value, bit for bit, and every block verified."""
    result = sync.load_with_report(GOLDEN / version, types=CLASSES)
    assert_same(result.state, golden_state())
    assert result.report.notes == ()
    assert sync.verify(GOLDEN / version).is_whole
    ties = result.state["ties"]
    assert ties["base"] is ties["same"]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in ties["types"]}
    assert len(addresses) == 1


@versions
def test_a_checkpoint_fills_a_target(version: str) -> None:
    """The tensors of a state of today take the values of the checkpoint."""
    target = golden_state()
    target.pop("classes")
    state = {key: target[key] for key in ("dtypes", "shapes", "large", "names")}
    for group in ("dtypes", "names"):
        for value in state[group].values():
            tensors = value.values() if isinstance(value, dict) else [value]
            for tensor in tensors:
                tensor.view(torch.uint8).zero_()
    for tensor in (state["large"], *state["shapes"]):
        tensor.zero_()
    sync.load(GOLDEN / version, state, select=list(state))
    expected = golden_state()
    assert_same(state, {key: expected[key] for key in state})


@versions
def test_a_checkpoint_has_these_names(version: str) -> None:
    """Names are part of the format: scripts select by them."""
    names = {tensor.name for tensor in sync.inspect(GOLDEN / version).tensors}
    expected = {
        "dtypes.bfloat16", "large", "ties.base", "ties.window.0~storage", "names.a.b",
        "names.a.b~2", "__metadata__~2", "arrays.1", "bytes.2", "classes.0.y",
    }  # fmt: skip
    assert expected <= names
    found = sync.load(GOLDEN / version, select=["ties.transposed", "keys.red", "scalars.0"])
    assert list(found) == ["ties", "scalars", "keys"]
    assert list(found["ties"]) == ["transposed"]
    assert found["keys"] == {"red": "enum"}


of_ranks = pytest.mark.parametrize("version", ["v2-ranks"])


@of_ranks
def test_what_ranks_saved_is_whole_for_one(version: str) -> None:
    """Tensors are put together, and copies agree."""
    loaded = sync.load(GOLDEN / version)
    for name, tensor in golden_tensors().items():
        assert torch.equal(loaded[name], tensor), name
    assert loaded["tied"] is loaded["norm"]
    assert (loaded["step"], loaded["name"]) == (7, "golden")
    assert torch.equal(loaded["of_one"], counted(torch.int8, 9))
    assert loaded["of_some"][1] == "here"
    report = sync.verify(GOLDEN / version, compare_copies=True)
    assert report.is_whole
    assert report.num_copies >= NUM_RANKS - 1


@of_ranks
@pytest.mark.parametrize("world_size", [2, 3, 4])
@in_virtual_time
async def test_what_ranks_saved_loads_at_any_number_of_ranks(version: str, world_size: int) -> None:
    """Cut another way; each rank of the same number finds its own values."""
    tensors = golden_tensors()

    async with job(world_size, config=RANKS_CONFIG, directory=GOLDEN / version) as ranks:

        async def body(rank: int, engine: Engine) -> None:
            target: dict[str, Any] = {n: torch.zeros_like(t) for n, t in tensors.items()}
            wanted = shards_of(tensors["rows"], (1, world_size))[rank]
            target |= {"rows": blank(wanted), "step": 0, "rng": PerRank(None)}
            await engine.load("memory", into=target, strict="ignore")
            assert torch.equal(target.pop("rows").tensor, wanted.tensor)
            assert target["step"] == 7
            if rank < NUM_RANKS:
                assert target["rng"].value["seed"] == rank
                state = target["rng"].value["state"]
                assert torch.equal(state, counted(torch.uint8, 5 + rank))
            for name in tensors.keys() - {"rows"}:
                assert torch.equal(target[name], tensors[name]), name

        await ranks.all(body)


@of_ranks
def test_what_ranks_saved_has_these_places(version: str) -> None:
    """Files of each rank, hosts, chunks and copies."""
    manifest = sync.inspect(GOLDEN / version)
    assert manifest.hosts == ("host0", "host0", "host1")
    assert {entry.rank for entry in manifest.files} == {0, 1, 2}
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    for name in ("norm", "scalar"):
        (chunk,) = tensors[name].chunks
        places = {manifest.files[file].rank for file, _ in chunk.copies}
        assert places | {manifest.files[chunk.file].rank} == {0, 1, 2}
    for name in ("rows", "columns", "grid"):
        assert len(tensors[name].chunks) == NUM_RANKS
        assert not any(chunk.copies for chunk in tensors[name].chunks)
    assert len(tensors["flat"].chunks) > NUM_RANKS
    assert len(tensors["large"].chunks) > 1
    assert {"rng.state~rank0", "rng.state~rank1", "of_one", "of_some.0"} <= tensors.keys()


if __name__ == "__main__":
    write_golden(sys.argv[1])
    write_golden_of_ranks(sys.argv[2])
