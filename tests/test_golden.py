"""Checkpoints of every version of the format that was ever released still load.

`tests/golden/v<n>` was written once, by `write_golden` below at that version, and is
never written again: `python -m tests.test_golden <directory>` makes one for a new version.
"""

from __future__ import annotations

import datetime as dt
import math
import pathlib
import struct
import sys
import zoneinfo
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from ckptio import sync
from ckptio.config import CheckpointConfig, KiB
from ckptio.format.manifest import FORMAT_VERSION
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

#: Those that the oldest torch we work with has: a checkpoint with others does not load there.
DTYPE_NAMES = sorted(set(TORCH_DTYPES) - {"float8_e8m0fnu", "float4_e2m1fn_x2"})
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


versions = pytest.mark.parametrize("version", ["v1", "v2"])


def test_there_is_a_checkpoint_of_every_version() -> None:
    """A change of the format adds one."""
    found = sorted(int(path.name.removeprefix("v")) for path in GOLDEN.iterdir() if path.is_dir())
    assert found == list(range(1, FORMAT_VERSION + 1))


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
    state["large"].zero_()
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


if __name__ == "__main__":
    write_golden(sys.argv[1])
