from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ckptio.__main__ import main
from ckptio.conversion.compare import _Count, run_diff
from ckptio.errors import FormatError
from tests.cli.rig import data_file, flip, make_state, rewrite, run_json, save_at
from tests.rig import SMALL

if TYPE_CHECKING:
    from pathlib import Path


def test_tensors_of_bits_that_differ_are_compared(tmp_path: Path) -> None:
    """Torch cannot convert them."""
    for name in ("uint4", "bits16"):
        a, b = (
            save_at(
                tmp_path / f"{name}{i}",
                {"x": torch.tensor([1, i], dtype=torch.int16).view(getattr(torch, name))},
            )
            for i in range(2)
        )
        assert main(["diff", str(a), str(b)]) == 1


def test_diff_names_what_differs_and_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of one side, kinds, types, shapes, bits with the largest difference, and values."""
    a = {
        "only": 1,
        "same": torch.ones(3),
        "w": torch.zeros(5),
        "d": torch.ones(2),
        "s": torch.ones(2),
    }
    b = {"more": 1, "same": torch.ones(3), "w": torch.zeros(5), "d": torch.ones(2).half()}
    b |= {"s": torch.ones(3), "k": torch.ones(1), "v": 2, "n": None}
    a |= {"s": torch.ones(2), "k": 1.0, "v": 1, "n": None}
    b["w"][3] = -0.5  # type: ignore[index]  # a tensor
    paths = [str(save_at(tmp_path / "a", a)), str(save_at(tmp_path / "b", b))]
    code, document = run_json(capsys, "diff", *paths)
    assert code == 1
    assert document["equal"] is False
    assert document["only_a"] == ["only"]
    assert document["only_b"] == ["more"]
    assert document["num_same"] == 2
    reasons = {item["name"]: item["reason"] for item in document["different"]}
    assert reasons == {"w": "bits", "d": "dtype", "s": "shape", "k": "kind", "v": "value"}
    (bits,) = (item for item in document["different"] if item["reason"] == "bits")
    assert (bits["num_elements"], bits["num_different"], bits["largest"]) == (5, 1, 0.5)
    others = [item["largest"] for item in document["different"] if item["reason"] != "bits"]
    assert others == [None] * 4
    (kinds,) = (item for item in document["different"] if item["reason"] == "dtype")
    assert (kinds["a"], kinds["b"]) == ("float32", "float16")
    assert (kinds["num_elements"], kinds["num_different"]) == (None, None)
    assert (bits["a"], bits["b"]) == (None, None)
    assert main(["diff", *paths]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "only in A  only" in lines
    assert "only in B  more" in lines
    assert "bits  w  1 of 5 elements  by 0.5 at most" in lines
    assert "dtype  d  float32 and float16" in lines
    assert lines[-1] == "different  7 names of 9"


def test_diff_of_equal_checkpoints_is_nothing(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of other formats too: views are compared as what they show."""
    torch.save(make_state(), tmp_path / "x.pt")
    assert main(["convert", str(ckpt), str(tmp_path / "dcp"), "--to=dcp"]) == 0
    capsys.readouterr()
    for other in (tmp_path / "x.pt", tmp_path / "dcp", ckpt):
        code, document = run_json(capsys, "diff", str(ckpt), str(other))
        assert code == 0
        assert document["equal"] is True
        assert document["num_same"] > 9


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a.b": 1, "a": {"b": 2}}, {"a.b": 3, "a": {"b": 2}}),
        ({"a.b": 1, "a": {"b": 2}}, {"a.b": 2, "a": {"b": 1}}),
        ({1: 1, "1": 2}, {1: 2, "1": 1}),
        ({1: 1, "1": 2}, {"1": 2}),
    ],
)
def test_what_has_one_name_is_told_apart_by_its_place(
    first: dict[Any, Any], second: dict[Any, Any], tmp_path: Path
) -> None:
    """Whether they are tensors or values."""
    for kind in ("values", "tensors"):
        paths = []
        for number, state in enumerate((first, second)):
            if kind == "tensors":
                state = tensors_of(state)  # noqa: PLW2901  # of the same shape
            paths.append(save_at(tmp_path / f"{kind}{number}", state))
        assert not run_diff(*paths, config=SMALL).is_equal
        assert run_diff(paths[0], paths[0], config=SMALL).is_equal


def tensors_of(state: Any) -> Any:
    """Make tensors of numbers."""
    if isinstance(state, dict):
        return {key: tensors_of(value) for key, value in state.items()}
    return torch.tensor([state])


def test_a_nested_state_is_equal_to_a_file_of_its_names(tmp_path: Path) -> None:
    """Not every format keeps containers, or keys that are no strings."""
    nested = save_at(tmp_path / "nested", {"a": ({1: torch.ones(2)},)})
    flat = save_at(tmp_path / "flat", {"a.0.1": torch.ones(2)})
    assert run_diff(nested, flat, config=SMALL).is_equal


def test_diff_takes_names_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that what `convert --strip` wrote is compared with what it was written of."""
    model = {"w": torch.ones(3), "b": torch.zeros(2)}
    a = str(save_at(tmp_path / "a", {"model": model, "step": 4}))
    b = str(tmp_path / "b.safetensors")
    assert main(["convert", a, b, "--to", "safetensors", "--strip", "model"]) == 0
    assert main(["diff", a, b]) == 1
    capsys.readouterr()
    for arguments in ([a, b, "--strip-a", "model"], [b, a, "--strip-b", "model"]):
        code, document = run_json(capsys, "diff", *arguments)
        assert (code, document["equal"], document["num_same"]) == (0, True, 2)
    code, document = run_json(capsys, "diff", a, b, "--strip-a", "model", "--select", "w")
    assert (code, document["num_same"]) == (0, 1)
    code, document = run_json(capsys, "diff", a, b, "--strip-b", "model")
    assert code == 2
    assert "nothing below 'model'" in document["error"]


def test_diff_tells_what_cannot_be_read_from_what_differs(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing there, or damaged: 2."""
    code, document = run_json(capsys, "diff", str(ckpt), str(tmp_path / "nowhere"))
    assert code == 2
    assert document["equal"] is None
    assert str(tmp_path / "nowhere") in document["error"]
    assert main(["diff", str(ckpt), str(tmp_path / "nowhere")]) == 2
    shown = capsys.readouterr()
    assert document["error"] in shown.err
    assert not shown.out
    other = save_at(tmp_path / "other")
    flip(data_file(other), 9000)
    assert main(["diff", str(ckpt), str(other)]) == 2
    assert main(["diff", str(ckpt)]) == 2


NUMBERS = st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=40)


@given(pairs=NUMBERS)
def test_the_largest_difference_is_that_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[float, float]]
) -> None:
    """With infinities and what is no number among them."""
    folder = tmp_path_factory.mktemp("pairs")
    a, b = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    for name, column in (("a", a), ("b", b)):
        torch.save({"x": torch.from_numpy(column)}, folder / name)
    report = run_diff(folder / "a", folder / "b", config=SMALL)
    different = a.view(np.int32) != b.view(np.int32)
    if not different.any():
        assert report.is_equal
        return
    (found,) = report.differences
    assert found.num_different == different.sum()
    with np.errstate(all="ignore"):
        gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
    gap[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
    expected = gap[different].max()
    assert found.largest == expected or (math.isnan(found.largest) and math.isnan(expected))


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64],
)
def test_every_type_is_compared(dtype: torch.dtype, tmp_path: Path) -> None:
    """One element of many differs, in a tensor of several parts."""
    zeros = torch.zeros(100_000, dtype=torch.float32).to(dtype)
    ones = zeros.clone()
    ones[70_000] = 1
    paths: list[Any] = [tmp_path / "a", tmp_path / "b"]
    for path, tensor in zip(paths, (zeros, ones), strict=True):
        save_at(path, {"x": tensor})
    (found,) = run_diff(*paths, config=SMALL).differences
    assert (found.num_elements, found.num_different, found.largest) == (100_000, 1, 1.0)


@pytest.mark.parametrize(
    ("dtype", "a", "b"),
    [
        (torch.int64, 2**60 + 1, 2**60),
        (torch.int64, 2**63 - 1, -(2**63)),
        (torch.uint64, 2**64 - 1, 0),
        (torch.uint64, 2**63, 2**63 - 1),
    ],
)
def test_large_integers_are_as_far_apart_as_they_are(
    dtype: torch.dtype, a: int, b: int, tmp_path: Path
) -> None:
    """Floats have no room for their last digits."""
    paths = [
        save_at(tmp_path / str(i), {"x": torch.tensor(numbers, dtype=dtype)})
        for i, numbers in enumerate(([1, a], [1, b]))
    ]
    for one, other in (paths, paths[::-1]):
        (found,) = run_diff(one, other, config=SMALL).differences
        assert (found.num_different, found.largest) == (1, float(a - b))


@pytest.mark.parametrize("dtype", [">f4", ">u8", ">c16", "g", "G", "<M8[s]", ">m8[ns]"])
def test_arrays_are_compared_by_their_elements(dtype: str, tmp_path: Path) -> None:
    """Where bytes of them are stored, too."""
    a, b = np.zeros(5, dtype), np.zeros(5, dtype)
    b[3] = 300
    paths = [save_at(tmp_path / str(i), {"x": array}) for i, array in enumerate((a, b))]
    (found,) = run_diff(*paths, config=SMALL).differences
    assert (found.num_elements, found.num_different, found.largest) == (5, 1, 300.0)


@pytest.mark.skipif(np.finfo("g").max == np.finfo("d").max, reason="no wider floats here")
@pytest.mark.parametrize("dtype", ["g", "G"])
def test_numbers_that_are_too_large_for_torch_are_infinite(dtype: str, tmp_path: Path) -> None:
    """And numpy warns nobody of them."""
    a, b = np.zeros(3, dtype), np.zeros(3, dtype)
    b[1] = np.finfo("g").max
    paths = [save_at(tmp_path / str(i), {"x": array}) for i, array in enumerate((a, b))]
    (found,) = run_diff(*paths, config=SMALL).differences
    assert (found.num_different, found.largest) == (1, math.inf)


@pytest.mark.skipif(np.finfo("g").eps == np.finfo("d").eps, reason="no wider floats here")
@pytest.mark.parametrize("dtype", ["<g", ">g", "<G"])
def test_numbers_that_differ_by_less_than_torch_knows_are_apart(dtype: str, tmp_path: Path) -> None:
    """Rounded to numbers that torch has, they are equal; and so are those that are too large."""
    eps, largest = np.finfo("g").eps, np.finfo("g").max
    a = np.array([1, 0, np.nan, np.inf, largest], dtype)
    b = a.copy()
    b[:3] = 1 + eps, -0.0, -np.nan
    paths = [save_at(tmp_path / f"small-{i}", {"x": array}) for i, array in enumerate((a, b))]
    (found,) = run_diff(*paths, config=SMALL).differences
    assert (found.num_different, found.largest) == (3, float(eps))
    b[4] = largest / 2
    paths = [save_at(tmp_path / f"large-{i}", {"x": array}) for i, array in enumerate((a, b))]
    (found,) = run_diff(*paths, config=SMALL).differences
    assert (found.num_different, found.largest) == (4, math.inf)


@pytest.mark.parametrize("dtype", ["<M8[s]", ">m8[ns]"])
def test_what_is_no_time_is_no_number(dtype: str, tmp_path: Path) -> None:
    """Its bits are those of the smallest number."""
    a, b = np.zeros(3, dtype), np.zeros(3, dtype)
    b[1:] = "NaT", 300
    paths = [save_at(tmp_path / str(i), {"x": array}) for i, array in enumerate((a, b))]
    (found,) = run_diff(*paths, config=SMALL).differences
    assert found.num_different == 2
    assert math.isnan(found.largest)


def test_texts_of_arrays_differ_one_by_one(tmp_path: Path) -> None:
    """Not byte by byte."""
    a, b = np.array(["one", "two", "six"]), np.array(["one", "ten", "six"])
    paths = [save_at(tmp_path / str(i), {"x": array}) for i, array in enumerate((a, b))]
    (found,) = run_diff(*paths, config=SMALL).differences
    assert (found.num_elements, found.num_different) == (3, 1)


class Widest(TorchDispatchMode):
    """Sees how large what torch makes of bytes is."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        del types
        made: torch.Tensor = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype in (torch.int64, torch.float64):
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


@pytest.mark.parametrize("dtype", ["S400", "U100", "U500000"])
def test_long_texts_are_compared_some_at_a_time(dtype: str) -> None:
    """Numbers of all their bytes would take eight times their memory."""
    packed, nbytes = np.dtype(dtype), 4_000_000
    a, b = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    b[-1], count = 7, _Count()
    with Widest() as widest:  # type: ignore[no-untyped-call]  # torch's own
        count.add(a, b, packed)
    assert (count.num_different, count.largest) == (1, 7.0)
    assert 0 < widest.nbytes <= 8 * max(1 << 20, packed.itemsize)


def test_an_array_that_is_not_all_there_is_no_difference(tmp_path: Path) -> None:
    """But a manifest that no save writes."""
    a = save_at(tmp_path / "a", {"x": np.zeros(3, np.float32)})
    b = save_at(tmp_path / "b", {"x": np.ones(4, np.float32)})
    rewrite(a, tree=b'{"x": {"~": "np", "t": 0, "d": "<f4", "s": [4]}}')
    for paths in ((a, b), (b, a)):
        with pytest.raises(FormatError, match="does not have 12 bytes"):
            run_diff(*paths, config=SMALL)


@pytest.mark.parametrize("dtype", ["<f3", "<c1", "<U999999999"])
def test_an_array_of_no_type_is_no_difference(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But a manifest that no save writes, though it looks like one."""
    paths = [save_at(tmp_path / str(i), {"x": np.full(12, i, np.float32)}) for i in range(2)]
    for path in paths:
        rewrite(path, tree=b'{"x": {"~": "np", "t": 0, "d": "%s", "s": [16]}}' % dtype.encode())
    assert main(["diff", *map(str, paths)]) == 2
    # numpy 1.26 takes the last for strings of fewer characters than none
    assert re.search(f"no dtype '{dtype}'|does not have 48 bytes", capsys.readouterr().err)
