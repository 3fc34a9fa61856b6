from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ckptio import sync
from ckptio.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    FormatError,
    MismatchError,
    TargetError,
    UnsupportedLeafError,
)
from ckptio.events import LoadStarted
from ckptio.format.encode import MAX_DEPTH
from tests.loads import BLOCK, blank, sample, tensors_of
from tests.strategies import SMALL, TORCH_DTYPES, Color, Point, assert_same, random_tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptio.events import Event


@pytest.fixture(scope="module")
def saved(engine: sync.Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the path of a checkpoint that tests do not change."""
    path = tmp_path_factory.mktemp("load") / "ckpt"
    engine.save(sample(), path)
    return str(path)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Give memory of the same shape with strides of every kind."""
    extents = [2 * n + 1 for n in reversed(tensor.shape)]
    room = torch.zeros(*extents[:-1], extents[-1] * tensor.itemsize, dtype=torch.uint8)
    room = room.view(tensor.dtype)
    return room[tuple(slice(1, None, 2) for _ in tensor.shape)].permute(
        *range(tensor.ndim - 1, -1, -1)
    )


def test_targets_are_filled_in_place(engine: sync.Engine, saved: str) -> None:
    """The same tensors, the same containers, other values."""
    target = blank(sample())
    weight, inner = target["model"]["w"], target["model"]
    address = weight.data_ptr()
    assert engine.load(saved, target) is target
    assert target["model"] is inner
    assert inner["w"] is weight
    assert weight.data_ptr() == address
    assert_same(target, sample())


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_strided_targets_are_filled_and_nothing_beside_them(
    engine: sync.Engine, tmp_path: Path, name: str
) -> None:
    """Of every element type; what lies between their elements stays."""
    tensor = random_tensor((37, 130, 11), TORCH_DTYPES[name])
    engine.save([tensor], tmp_path / "c")
    target = strided(tensor)
    assert not target.is_contiguous()
    engine.load(tmp_path / "c", [target])
    assert_same([target], [tensor])
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = target if not target.is_complex() else torch.view_as_real(target)
    storage = torch.empty(0, dtype=integer[whole.itemsize]).set_(whole.untyped_storage())
    inside = whole.view(integer[whole.itemsize]).count_nonzero()
    assert storage.count_nonzero() == inside


def test_parameters_and_their_gradients_are_left_in_place(
    engine: sync.Engine, tmp_path: Path
) -> None:
    """A parameter is filled though it requires a gradient; its gradient stays."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.sum().backward()
    engine.save({"p": torch.arange(3.0)}, tmp_path / "c")
    engine.load(tmp_path / "c", {"p": parameter})
    assert parameter.tolist() == [0, 1, 2]
    assert parameter.requires_grad
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("shape", [(3,), (3, 40_000), (0,)])
def test_autograd_sees_that_a_target_has_changed(
    engine: sync.Engine, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """A graph that had saved the old values does not compute with the new ones."""
    engine.save({"w": torch.ones(shape)}, tmp_path / "c")
    weight = torch.full(shape, 2.0, requires_grad=True)
    loss = (weight * weight).sum()
    before = weight._version
    engine.load(tmp_path / "c", {"w": weight})
    assert weight._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_autograd_sees_that_a_target_changes_meanwhile(tmp_path: Path, *, is_damaged: bool) -> None:
    """A graph of values that a load is about to change, also one that fails, computes nothing."""
    weight = torch.full((3, 40_000), 2.0, requires_grad=True)
    losses: list[torch.Tensor] = []

    def compute(event: Event) -> None:
        if isinstance(event, LoadStarted):
            losses.append((weight * weight).sum())

    with sync.Engine(SMALL, observer=compute) as engine:
        engine.save({"w": torch.ones(3, 40_000)}, tmp_path / "c")
        if is_damaged:
            (file,) = (tmp_path / "c").glob("*.safetensors")
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        with pytest.raises(CorruptionError) if is_damaged else contextlib.nullcontext():
            engine.load(tmp_path / "c", {"w": weight})
    (loss,) = losses
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_target_that_aliases_itself_is_filled(engine: sync.Engine, tmp_path: Path) -> None:
    """Tied weights of a target take the same bytes twice."""
    weight = torch.randn(50, 40)
    engine.save({"a": weight, "b": weight.t()}, tmp_path / "c")
    tied = torch.zeros(50, 40)
    engine.load(tmp_path / "c", {"a": tied, "b": tied.t()})
    assert torch.equal(tied, weight)
    apart = {"a": torch.zeros(50, 40), "b": torch.zeros(40, 50)}
    engine.load(tmp_path / "c", apart)
    assert_same(apart, {"a": weight, "b": weight.t()})


@pytest.mark.parametrize("select", [None, "part", "odd"])
def test_parts_of_a_stored_tensor_fill_targets_of_their_own(
    engine: sync.Engine, tmp_path: Path, select: str | None
) -> None:
    """Contiguous and strided views of a base that the target may not have."""
    base = torch.randn(400, 30)
    state = {"base": base, "part": base[50:60], "odd": base[3::7, ::2], "row": base[9]}
    engine.save(state, tmp_path / "c")
    target = {key: torch.zeros(t.shape) for key, t in state.items()}
    engine.load(tmp_path / "c", target, select=select)
    for key, tensor in state.items():
        assert torch.equal(target[key], tensor) is (select in (None, key))


# -- device, dtype --------------------------------------------------------------------


def test_new_tensors_go_to_the_device_that_is_asked_for(engine: sync.Engine, saved: str) -> None:
    """A device that cannot hold data is none."""
    assert_same(engine.load(saved, device="cpu"), sample())
    assert_same(engine.load(saved, device=torch.device("cpu", 0)), sample())
    with pytest.raises(ConfigError, match="is no device"):
        engine.load(saved, device="abacus")


def test_the_default_device_of_the_program_is_not_ours(engine: sync.Engine, tmp_path: Path) -> None:
    """What is made on the CPU is made there, whatever `torch.set_default_device` says."""
    state: dict[str, Any] = {"t": torch.randn(50, 3), "np": np.arange(9), "bytes": b"b" * 3000}
    with torch.device("meta"):
        engine.save(state, tmp_path / "c")
        for device in (None, "cpu"):
            found = engine.load(tmp_path / "c", device=device)
            assert found["t"].device == torch.device("cpu")
            assert_same(found, state)
        assert engine.load_slice(tmp_path / "c", "t", slice(3, 5)).device == torch.device("cpu")
        target: dict[str, Any] = {
            "t": torch.zeros(50, 3, device="cpu"),
            "np": np.zeros(9, dtype=np.int64),
        }
        engine.load(tmp_path / "c", into=target, strict="ignore")
    assert torch.equal(target["t"], state["t"])
    assert np.array_equal(target["np"], state["np"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_loads_in_inference_mode_fill_its_tensors(
    engine: sync.Engine, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Converted, strided, in place or new: copies run on threads that are not in that mode."""
    state = {"t": torch.randn(40, 30, dtype=dtype)}
    engine.save(state, tmp_path / "c")
    with torch.inference_mode():
        target = {"t": torch.zeros(30, 40, dtype=dtype).t()}
        assert target["t"].is_inference()
        engine.load(tmp_path / "c", into=target)
        assert torch.equal(target["t"], state["t"])
        if dtype == torch.float64:
            found = engine.load(tmp_path / "c", dtype=torch.bfloat16)
            assert torch.equal(found["t"], state["t"].bfloat16())
    target = {"t": torch.zeros(30, 40, dtype=dtype).t().requires_grad_()}
    version = target["t"]._version
    engine.load(tmp_path / "c", into=target)
    assert torch.equal(target["t"], state["t"])
    assert target["t"]._version > version
    assert not target["t"].is_inference()
    (target["t"] * 2).abs().sum().backward()


def test_a_module_of_inference_mode_is_refused_before_anything_changes(
    engine: sync.Engine, tmp_path: Path
) -> None:
    """What its `state_dict` gives can be written to, and it would not take that itself."""
    engine.save({"a": torch.nn.Linear(4, 4), "n": torch.nn.Linear(4, 4)}, tmp_path / "c")
    with torch.inference_mode():
        made = torch.nn.Linear(4, 4)
    target = {"a": torch.nn.Linear(4, 4), "n": made}
    before = target["a"].weight.clone()
    with pytest.raises(TargetError, match=re.escape("'n.weight': it is an inference tensor; load")):
        engine.load(tmp_path / "c", into=target)
    assert torch.equal(target["a"].weight, before)
    with torch.inference_mode():
        engine.load(tmp_path / "c", into=target)
    assert not torch.equal(target["a"].weight, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_floating_point_is_converted_if_it_is_asked_for(
    engine: sync.Engine, tmp_path: Path, dtype: torch.dtype
) -> None:
    """As `tensor.to(dtype)` does it; counters, arrays and bytes stay what they are."""
    state = {
        "w": torch.randn(300, 200), "b": torch.randn(9).bfloat16(), "n": torch.arange(5),
        "c": torch.randn(4, dtype=torch.complex64), "a": np.arange(3.0), "x": b"x" * 2000,
    }  # fmt: skip
    engine.save(state, tmp_path / "c")
    expected = {
        key: value.to(dtype) if key in ("w", "b") else value
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    assert_same(engine.load(tmp_path / "c", dtype=dtype), state | expected)
    target: dict[str, Any] = {key: torch.zeros_like(value) for key, value in expected.items()}
    engine.load(tmp_path / "c", target, dtype=dtype, select=list(expected))
    assert_same(target, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tied_tensors_are_converted_too(
    engine: sync.Engine, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Views of one weight are converted as their weight is."""
    weight = torch.randn(6, 4)
    state = {"a": weight, "t": weight.t(), "part": weight[2:4]}
    engine.save(state, tmp_path / "c")
    found = engine.load(tmp_path / "c", dtype=dtype)
    assert_same(found, {key: tensor.to(dtype) for key, tensor in state.items()})
    found["a"].zero_()
    assert not found["t"].any()
    assert not found["part"].any()


def test_nothing_is_converted_silently(engine: sync.Engine, saved: str) -> None:
    """A target of another type is a mismatch, even of a wider one; nothing changes."""
    target = blank(sample())
    target["half"] = torch.zeros(401, 33)
    target["steps"] = torch.zeros(9, dtype=torch.int32)
    with pytest.raises(MismatchError) as caught:
        engine.load(saved, target)
    assert [line.split(":")[0] for line in caught.value.mismatched] == ["half", "steps"]
    assert not target["model"]["w"].any()
    with pytest.raises(MismatchError) as caught:  # a counter is never converted
        engine.load(saved, target, dtype=torch.float32)
    assert [line.split(":")[0] for line in caught.value.mismatched] == ["steps"]


# -- select, strict -------------------------------------------------------------------

SELECTIONS: list[tuple[Any, list[str]]] = [
    ("model", ["model.w", "model.b"]),
    ("model.", ["model.w", "model.b"]),
    ("*b", ["model.b"]),
    (["half", "st*"], ["half", "steps"]),
    (lambda name: name.endswith("w"), ["model.w"]),
    ("list.1", ["list.1.0"]),
    ("nothing", []),
]


def test_no_more_is_read_than_a_target_takes(engine: sync.Engine, tmp_path: Path) -> None:
    """Nor of what it does not have, where the checkpoint is of one process."""
    engine.save({name: torch.ones(20 * BLOCK) for name in "ab"}, tmp_path / "c")
    target = {"a": torch.zeros(20 * BLOCK)}
    report = engine.load_with_report(tmp_path / "c", target, strict="ignore").report
    assert report.nbytes <= target["a"].nbytes + 2 * BLOCK


@pytest.mark.parametrize(("select", "names"), SELECTIONS, ids=range(len(SELECTIONS)))
def test_only_what_is_selected_is_loaded(
    engine: sync.Engine, saved: str, select: Any, names: list[str]
) -> None:
    """With a target and without; no more is read than it needs."""
    every = dict(tensors_of("", sample()))
    result = engine.load_with_report(saved, select=select)
    assert_same(dict(tensors_of("", result.state)), {name: every[name] for name in names})
    assert result.report.num_tensors == len(names)
    limit = sum(every[name].nbytes + 2 * BLOCK for name in names)
    assert result.report.nbytes <= limit

    target = blank(sample())
    if not names:
        with pytest.raises(TargetError, match="select="):
            engine.load(saved, target, select=select)
        with pytest.raises(TargetError, match="select="):
            engine.load(saved, select=select)
        return
    result = engine.load_with_report(saved, target, select=select, strict="raise")
    for name, tensor in tensors_of("", target):
        assert_same(tensor, every[name] if name in names else torch.zeros_like(tensor))
    assert result.report.num_tensors == len(names)


def disagreeing() -> dict[str, Any]:
    target = blank(sample())
    del target["steps"]
    target["model"]["w"] = torch.zeros(2)
    target["new"] = {"x": torch.zeros(1)}
    assert isinstance(target, dict)
    return target


def test_disagreement_raises_before_anything_changes(engine: sync.Engine, saved: str) -> None:
    """All of it, in one error."""
    target = disagreeing()
    with pytest.raises(MismatchError) as caught:
        engine.load(saved, target)
    assert caught.value.missing == ("new.x",)
    assert caught.value.unexpected == ("steps",)
    assert len(caught.value.mismatched) == 1
    assert not any(tensor.any() for _, tensor in tensors_of("", target))
    assert target["n"] is None


@pytest.mark.parametrize("strict", ["report", "ignore"])
def test_what_fits_is_loaded_and_the_rest_reported_or_not(
    engine: sync.Engine, saved: str, strict: Any
) -> None:
    """What is missing or different stays as it was."""
    target = disagreeing()
    result = engine.load_with_report(saved, target, strict=strict)
    assert result.state is target
    assert_same(target["half"], sample()["half"])
    assert not target["model"]["w"].any()
    assert not target["new"]["x"].any()
    assert "steps" not in target
    report = result.report
    found = (report.missing, report.unexpected, [m.split(":")[0] for m in report.mismatched])
    assert found == ((("new.x",), ("steps",), ["model.w"]) if strict == "report" else ((), (), []))


def test_a_module_that_does_not_fit_is_not_touched(engine: sync.Engine, tmp_path: Path) -> None:
    """Names that the module lacks are found before its bytes change, and typed."""
    source = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    engine.save(source, tmp_path / "c")
    target = torch.nn.Sequential(torch.nn.Linear(3, 3))
    before = {name: t.clone() for name, t in target.state_dict().items()}
    with pytest.raises(MismatchError) as caught:
        engine.load(tmp_path / "c", target)
    assert caught.value.unexpected == ("1.weight", "1.bias")
    assert_same(dict(target.state_dict()), before)
    engine.load(tmp_path / "c", target, strict="ignore")
    assert_same(dict(target[0].state_dict()), dict(source[0].state_dict()))
    wider = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    result = engine.load_with_report(tmp_path / "c", wider)
    assert result.report.missing == ("2.weight", "2.bias")
    assert_same(dict(wider[1].state_dict()), dict(source[1].state_dict()))


def test_selecting_the_model_leaves_the_optimizer_alone(
    engine: sync.Engine, tmp_path: Path
) -> None:
    """It is not given an empty or a half-filled state."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    engine.save({"model": model, "opt": optimizer}, tmp_path / "c")
    other = torch.nn.Linear(4, 4)
    fresh = torch.optim.AdamW(other.parameters())
    engine.load(tmp_path / "c", {"model": other, "opt": fresh}, select="model")
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert fresh.state_dict()["state"] == {}


def test_an_enum_has_one_name_whatever_its_value_is_made_of(
    engine: sync.Engine, tmp_path: Path
) -> None:
    """By that it is selected, and reported; the numbers of its value's items name nothing."""
    engine.save({"d": {"color": Color.BLUE, "n": 1}, "w": torch.ones(2)}, tmp_path / "c")
    assert type(Color.BLUE.value) is tuple

    def asked(name: str) -> bool:
        return name in ("d.color", "w")

    target: dict[str, Any] = {"d": {}, "w": torch.zeros(2)}
    engine.load(tmp_path / "c", target, select=asked, types=[Color])
    assert target["d"] == {"color": Color.BLUE}
    lacking: dict[str, Any] = {"d": {"n": 0}, "w": torch.zeros(2)}
    with pytest.raises(MismatchError, match=r"1 not in the target \('d\.color'\)"):
        engine.load(tmp_path / "c", lacking, select=asked)
    assert not lacking["w"].any()
    report = engine.load_with_report(tmp_path / "c", lacking).report
    assert report.unexpected == ("d.color",)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"into": {}, "device": "cpu"}, "device= has no effect with into="),
    (
        {"into": {"opt": torch.optim.SGD([torch.ones(3)], lr=0.1)}, "device": "cpu"},
        "device= has no effect with into=",
    ),
    ({"into": "cpu"}, "not 'cpu'; device= says where new tensors go"),
    ({"into": torch.device("cpu")}, "device= says where new tensors go"),
    ({"into": "model"}, "into= takes what can be filled, not 'model'; without into= all is made"),
    ({"into": 2**63}, "into= takes what can be filled, not 9223372036854775808; without into="),
    ({"into": "m" * 10_000}, r"not 'm{30,50}\.\.\.m{30,50}'; without into="),
    ({"into": torch.Size([2])}, r"into= takes what can be filled, not torch.Size"),
    ({"strict": "ignore"}, "strict='ignore' has no effect without into="),
    ({"into": {}, "strict": "report"}, "use load_with_report"),
    ({"strict": "lenient"}, "strict is 'raise', 'report' or 'ignore'"),
    ({"strict": np.array(["raise", "report"])}, "strict is 'raise', 'report' or 'ignore'"),
    ({"select": np.array(["a", "b"])}, "select takes a prefix, a glob"),
    ({"select": torch.ones(2)}, "select takes a prefix, a glob"),
    ({"device": 2**70}, "is no device"),
    ({"device": torch.ones(50, 50)}, r"^device=.{,90} is no device: [^\n]*got \(Tensor\)$"),
    ({"dtype": torch.int8}, "dtype= is a floating-point torch.dtype"),
    *(
        [({"dtype": vars(torch)["float4_e2m1fn_x2"]}, "dtype= is a floating-point torch.dtype")]
        if "float4_e2m1fn_x2" in vars(torch)
        else []
    ),
    ({"dtype": "float32"}, "dtype= is a floating-point torch.dtype"),
    ({"dtype": torch.complex64}, "dtype= is a floating-point torch.dtype"),
    ({"types": ["Point"]}, "types= takes classes"),
    ({"types": [Point(1, 2)]}, "types= takes classes"),
    ({"types": [Point, dict]}, "made of others, and 'dict' is none"),
    ({"types": int}, "types= takes classes, not <class 'int'>"),
    ({"types": None}, "types= takes classes, not None"),
    ({"types": iter([Point])}, "types= takes classes"),
    ({"types": torch.ones(())}, r"types= takes classes, not tensor\(1"),
    ({"types": np.ones(())}, r"types= takes classes, not array\(1"),
    ({"types": [Point, type("Point", (Point,), vars(Point).copy())]}, "two classes of the name"),
    ({"select": []}, "select takes"),
    ({"select": ""}, "select takes"),
    ({"select": 5}, "select takes"),
]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (torch.nn.Linear(2, 2).state_dict, "'model.0': it is a function.*; call it"),
        (torch.nn.Linear, "it is a class"),
        (lambda: 1, "it is a function"),
        (len, "it is a function.*; pass what is to be filled"),
    ],
    ids=["method", "class", "lambda", "builtin"],
)
def test_what_is_nearly_a_target_is_refused(
    engine: sync.Engine, saved: str, wrong: Any, problem: str
) -> None:
    """As a placeholder it would be replaced, and the model stay as it was made."""
    with pytest.raises(TargetError, match=problem):
        engine.load(saved, into={"model": [wrong]}, strict="ignore")


def test_what_is_not_selected_may_be_anything(engine: sync.Engine, tmp_path: Path) -> None:
    """A configuration that has functions, say, and stays as it is."""
    engine.save({"config": {"act": 1}, "w": torch.ones(2)}, tmp_path / "c")
    target: dict[str, Any] = {"config": {"act": torch.relu}, "w": torch.zeros(2)}
    with pytest.raises(TargetError, match=r"'config\.act': it is a function"):
        engine.load(tmp_path / "c", into=target)
    engine.load(tmp_path / "c", into=target, select="w")
    assert target["config"] == {"act": torch.relu}
    assert torch.equal(target["w"], torch.ones(2))


def test_a_target_inside_itself_is_refused(engine: sync.Engine, saved: str) -> None:
    """It has no end."""
    target: dict[str, Any] = {}
    target["again"] = target
    with pytest.raises(TargetError, match="inside itself"):
        engine.load(saved, into=target)


def test_a_target_that_is_too_deep_to_be_matched_is_refused(
    engine: sync.Engine, tmp_path: Path
) -> None:
    """As such: the checkpoint is sound."""
    state: list[Any] = [0]
    for _ in range(MAX_DEPTH - 1):
        state = [state]
    engine.save(state, tmp_path / "c")
    target = engine.load(tmp_path / "c")
    for _ in range(sys.getrecursionlimit() * 3 // 4 - MAX_DEPTH):
        target = [target]
    with pytest.raises(TargetError, match="cannot fill the target: it is too deep"):
        engine.load(tmp_path / "c", into=target)


@pytest.mark.parametrize(("options", "problem"), OPTIONS, ids=range(len(OPTIONS)))
def test_an_option_without_effect_is_an_error(
    engine: sync.Engine, saved: str, options: dict[str, Any], problem: str
) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match=problem):
        engine.load(saved, **options)


def test_what_is_made_in_the_place_of_nothing_goes_where_device_says(tmp_path: Path) -> None:
    """`None` in a target takes what there is, anew; beside it, what has memory stays."""
    sync.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "c", config=SMALL)
    target: dict[str, Any] = {"a": torch.zeros(3), "b": None}
    kept = target["a"]
    sync.load(tmp_path / "c", target, device="cpu", config=SMALL)
    assert target["a"] is kept
    assert torch.equal(target["b"], torch.ones(3))


@pytest.mark.parametrize("part", ["t", "nested", "view"])
def test_what_is_made_in_the_place_of_nothing_is_made_on_the_device(
    tmp_path: Path, part: str
) -> None:
    """A device that nobody has says so; and of what kind it is nothing but `dtype=` of a target."""
    weight = torch.ones(3, 2)
    state = {"t": weight, "nested": [{"a": weight + 1}], "view": weight.t()}
    sync.save({"x": state, "w": torch.ones(2)}, tmp_path / "c", config=SMALL)
    target: dict[str, Any] = {"x": dict.fromkeys(state), "w": torch.zeros(2)}
    select = ["w", f"x.{part}"]
    with pytest.raises(TargetError, match=r"cannot make .* on cuda:99"):
        sync.load(tmp_path / "c", target, select=select, device="cuda:99", config=SMALL)
    assert not target["w"].any()
    sync.load(tmp_path / "c", target, select=select, dtype=torch.bfloat16, config=SMALL)
    assert_same(target["x"][part], state[part])


def test_what_is_no_tensor_of_a_target_is_made_in_the_memory_of_the_host(tmp_path: Path) -> None:
    """Arrays and bytes; and what an object is given, which puts it where it needs it."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    state = {"x": {"array": np.arange(3), "bytes": b"x" * 2000}, "optimizer": optimizer}
    sync.save(state, tmp_path / "c", config=SMALL)
    fresh = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
    target: dict[str, Any] = {"x": None, "optimizer": fresh}
    sync.load(tmp_path / "c", target, device="cuda:99", config=SMALL)
    assert_same(target["x"], state["x"])
    assert_same(fresh.state_dict()["state"], optimizer.state_dict()["state"])


class Counters:
    """A stateful object with values inside lists, tuples and dicts."""

    def __init__(self, start: int) -> None:
        self.rates = [start, start + 1, start + 2]
        self.spans = (start, {"a": start, "b": [start, start]})
        self.tensors = [torch.full((2,), float(start)), torch.full((2,), float(start))]

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Extra(torch.nn.Module):
    """A module whose extra state is a nesting of values."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.extra: Any = {"a": start, "b": [start, start]}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("o.rates.1", {"rates": [1, 102, 3]}),
        ("o.spans.0", {"spans": (101, {"a": 1, "b": [1, 1]})}),
        ("o.spans.1.b.1", {"spans": (1, {"a": 1, "b": [1, 101]})}),
        ("o.spans.1.b", {"spans": (1, {"a": 1, "b": [101, 101]})}),
        ("o.tensors.1", {"tensors": [torch.full((2,), 1.0), torch.full((2,), 101.0)]}),
    ],
)
def test_what_is_not_selected_of_a_stateful_object_stays(
    engine: sync.Engine, tmp_path: Path, select: str, expected: dict[str, Any]
) -> None:
    """Also beside what is selected of one of its lists."""
    engine.save({"o": Counters(101)}, tmp_path / "c")
    target = Counters(1)
    engine.load(tmp_path / "c", into={"o": target}, select=select)
    assert_same(vars(target), {**vars(Counters(1)), **expected})


def test_what_is_not_selected_of_an_extra_state_stays(engine: sync.Engine, tmp_path: Path) -> None:
    engine.save({"m": Extra(101)}, tmp_path / "c")
    target = Extra(1)
    engine.load(tmp_path / "c", into={"m": target}, select="m._extra_state.b.1")
    assert target.extra == {"a": 1, "b": [1, 101]}


def test_one_group_of_an_optimizer_is_loaded(engine: sync.Engine, tmp_path: Path) -> None:
    def make(lr: float) -> torch.optim.Optimizer:
        one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        groups = [{"params": [*one.parameters()]}, {"params": [*two.parameters()]}]
        return torch.optim.SGD(groups, lr=lr)

    engine.save({"o": make(0.5)}, tmp_path / "c")
    target = make(0.1)
    engine.load(tmp_path / "c", into={"o": target}, select="o.param_groups.1")
    assert [group["lr"] for group in target.param_groups] == [0.1, 0.5]


def test_a_part_of_a_list_of_another_length_is_refused(engine: sync.Engine, tmp_path: Path) -> None:
    """Nobody knows then which is which, and nothing has changed."""
    engine.save({"o": Counters(101)}, tmp_path / "c")
    target = Counters(1)
    target.rates.append(4)
    with pytest.raises(MismatchError, match="3 items, of which some are selected"):
        engine.load(tmp_path / "c", into={"o": target}, select="o.rates.1")
    assert target.rates == [1, 2, 3, 4]
    engine.load(tmp_path / "c", into={"o": target}, select="o.rates")
    assert target.rates == [101, 102, 103]


def test_a_lazy_module_is_no_target_yet(engine: sync.Engine, tmp_path: Path) -> None:
    """The error says what to do, and both work."""
    net = torch.nn.Linear(3, 2)
    engine.save({"m": net}, tmp_path / "c")
    lazy = torch.nn.LazyLinear(2)
    with pytest.raises(TargetError, match=r"'m\.weight': a lazy module's parameter has no shape"):
        engine.load(tmp_path / "c", into={"m": lazy})
    lazy.load_state_dict(engine.load(tmp_path / "c")["m"])
    assert torch.equal(lazy.weight, net.weight)
    ran = torch.nn.LazyLinear(2)
    ran(torch.ones(1, 3))
    engine.load(tmp_path / "c", into={"m": ran})
    assert torch.equal(ran.weight, net.weight)


@pytest.mark.skipif("float4_e2m1fn_x2" not in vars(torch), reason="a later version of torch")
def test_packed_elements_keep_their_type(tmp_path: Path) -> None:
    """Of two in a byte none is a number for itself, that `dtype=` could convert."""
    packed = torch.arange(4, dtype=torch.uint8).view(vars(torch)["float4_e2m1fn_x2"])
    sync.save({"p": packed, "w": torch.ones(2)}, tmp_path / "c")
    found = sync.load(tmp_path / "c", dtype=torch.bfloat16)
    assert found["w"].dtype == torch.bfloat16
    assert found["p"].dtype == packed.dtype
    assert torch.equal(found["p"].view(torch.uint8), packed.view(torch.uint8))


@pytest.mark.parametrize("there", ["another program's", "cut short", "empty", "ours"])
def test_another_programs_manifest_is_called_that(tmp_path: Path, there: str) -> None:
    """Its name is a common one; and overwrite=True would replace it."""
    sync.save({"w": torch.ones(2)}, path := tmp_path / "c")
    manifest = path / "manifest.json"
    if there == "another program's":
        manifest.write_text('{"name": "app"}')
    elif there != "ours":
        os.truncate(manifest, 20 if there == "cut short" else 0)
    with pytest.raises(CheckpointExistsError) as caught:
        sync.save({"w": torch.zeros(2)}, path)
    is_another = there == "another program's"
    assert ("does not begin as ckptio's do" in str(caught.value)) == is_another
    assert ("save to another place" in str(caught.value)) == is_another
    if there != "ours":
        with pytest.raises(FormatError, match="no manifest of ckptio's" if is_another else "short"):
            sync.load(path)


def test_ignoring_what_differs_does_not_load_nothing(engine: sync.Engine, tmp_path: Path) -> None:
    """Where no name at all is in both, somebody is mistaken."""
    engine.save({"m": torch.ones(3)}, tmp_path / "c")
    with pytest.raises(TargetError, match="neither 'model'"):
        engine.load(tmp_path / "c", into={"model": torch.zeros(3)}, strict="ignore")
    with pytest.raises(TargetError, match=r"fits the target: m: shape [^;]*; load_with"):
        engine.load(tmp_path / "c", into={"m": torch.zeros(4)}, strict="ignore")
    half = {"m": torch.zeros(3).bfloat16(), "n": torch.zeros(3)}
    with pytest.raises(TargetError, match=r"m: torch.* in the checkpoint; dtype=torch\.bfloat16 c"):
        engine.load(tmp_path / "c", into=half, strict="ignore")
    assert engine.load(tmp_path / "c", into={}, strict="ignore") == {}
    report = engine.load_with_report(tmp_path / "c", into={"model": torch.zeros(3)}).report
    assert report.missing == ("model",)


def test_arrays_alone_are_loaded_and_counted(engine: sync.Engine, tmp_path: Path) -> None:
    """As tensors are."""
    engine.save({"w": torch.ones(3), "np": np.arange(4)}, tmp_path / "c")
    target = {"np": np.zeros(4, dtype=np.int64)}
    found = engine.load_with_report(tmp_path / "c", into=target, select="np", strict="raise")
    assert target["np"].tolist() == [0, 1, 2, 3]
    assert found.report.num_tensors == 1


class Mode(enum.Enum):
    A = 1
    B = 2


@dataclasses.dataclass
class Progress:
    epoch: int
    mode: Mode
    inner: Any = None


def test_records_of_the_target_come_back_as_their_class(
    engine: sync.Engine, tmp_path: Path
) -> None:
    """The target names the class, as `types=` does; another class is not built."""
    saved = Progress(3, Mode.B, [Progress(1, Mode.A, torch.ones(2))])
    engine.save({"p": saved, "m": Mode.B}, tmp_path / "c")
    blank = Progress(0, Mode.A, [Progress(0, Mode.A, torch.zeros(2))])
    target: dict[str, Any] = {"p": blank, "m": Mode.A}
    engine.load(tmp_path / "c", into=target)
    assert target["m"] is Mode.B
    found = target["p"]
    assert (found.epoch, found.mode, found.inner[0].mode) == (3, Mode.B, Mode.A)
    assert torch.equal(found.inner[0].inner, torch.ones(2))
    assert engine.load(tmp_path / "c", into={"p": 0, "m": 0})["m"] == 2


def test_there_is_nothing_to_load(engine: sync.Engine, tmp_path: Path) -> None:
    """A path without a checkpoint is a `FileNotFoundError`, too."""
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointNotFoundError) as caught:
            engine.load(path)
        assert isinstance(caught.value, FileNotFoundError)


def test_a_target_that_cannot_be_filled_is_refused(engine: sync.Engine, saved: str) -> None:
    """Before any other changes."""
    target = blank(sample())
    target["steps"] = torch.zeros(1, dtype=torch.int64).expand(9)
    with pytest.raises(TargetError, match="its elements share memory"):
        engine.load(saved, target)
    assert not target["half"].any()


def test_ties_are_refused_where_torch_makes_no_memory(engine: sync.Engine, tmp_path: Path) -> None:
    """Their common memory would be a tensor of that mode; what is apart is saved."""
    base = torch.arange(10.0)
    tied, apart = {"a": base[:6], "b": base[4:]}, {"a": base[:4], "b": base[4:]}
    with FakeTensorMode():
        with pytest.raises(UnsupportedLeafError, match=r"'a': .* a FakeTensor .* save outside"):
            engine.save(tied, tmp_path / "c")
        engine.save(apart, tmp_path / "c")
    assert_same(engine.load(tmp_path / "c"), apart)


def test_a_load_is_refused_where_torch_makes_no_memory(engine: sync.Engine, tmp_path: Path) -> None:
    """Under a FakeTensorMode: with an error of ours, before anything is read."""
    engine.save({"w": torch.ones(3), "n": np.ones(2), "b": bytes(2000)}, tmp_path / "c")
    torch.save({"w": torch.ones(3)}, tmp_path / "c.pt")
    with FakeTensorMode():
        for path, select in (("c", "w"), ("c", "n"), ("c", "b"), ("c.pt", "w")):
            with pytest.raises(TargetError, match="torch makes a FakeTensor for"):
                engine.load(tmp_path / path, select=select)
        with pytest.raises(TargetError, match="torch makes a FakeTensor for 'w'"):
            engine.load_slice(tmp_path / "c", "w", 0)
        with pytest.raises(TargetError, match="'FakeTensor' may hold its data elsewhere"):
            engine.load(tmp_path / "c", into={"w": torch.zeros(3)}, select="w")
    assert_same(engine.load(tmp_path / "c", select="w"), {"w": torch.ones(3)})


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.eye(3).to_sparse(), "not dense memory"),
        (lambda: torch.eye(3).to_sparse_csr(), "not dense memory"),
        (lambda: torch.eye(3).to_mkldnn(), "not dense memory"),
        (lambda: torch.nested.nested_tensor([torch.ones(3)] * 3), "nested tensor has no one shape"),
    ],
    ids=["sparse", "sparse rows", "another library's", "nested"],
)
def test_a_target_that_is_not_dense_is_refused(
    engine: sync.Engine, tmp_path: Path, make: Callable[[], torch.Tensor], problem: str
) -> None:
    engine.save({"a": torch.ones(3, 3)}, tmp_path / "c")
    with pytest.raises(TargetError, match=f"'a': .*{problem}"):
        engine.load(tmp_path / "c", into={"a": make()})


@pytest.mark.parametrize("is_strided", [False, True])
def test_a_target_with_less_memory_than_elements_is_refused(
    engine: sync.Engine, tmp_path: Path, *, is_strided: bool
) -> None:
    """What lies behind it is somebody else's."""
    engine.save({"a": torch.ones(300, 300)}, tmp_path / "c")
    target = torch.zeros(300, 300).t() if is_strided else torch.zeros(300, 300)
    target.untyped_storage().resize_(4096)
    with pytest.raises(TargetError, match=r"'a': it has no memory of that size: .* resized"):
        engine.load(tmp_path / "c", into={"a": target})


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize])
def test_a_target_inside_a_transform_is_refused(
    engine: sync.Engine, tmp_path: Path, transform: Any
) -> None:
    """It has no memory of its own."""
    engine.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "c")
    plain = torch.zeros(3)

    def load(wrapped: torch.Tensor) -> torch.Tensor:
        with pytest.raises(TargetError, match="'b': it has no memory of that size: a tr"):
            engine.load(tmp_path / "c", into={"a": plain, "b": wrapped})
        return wrapped.sum()

    given = torch.zeros(2, 3) if transform is torch.vmap else torch.zeros(3)
    transform(load)(given)
    assert torch.equal(plain, torch.zeros(3))


@pytest.mark.parametrize("select", [["model", "optt"], ["optt", "model"], ["model.*", "m?del.z"]])
@pytest.mark.parametrize("has_target", [False, True])
def test_what_is_selected_and_not_there_is_an_error(
    tmp_path: Path, select: list[str], *, has_target: bool
) -> None:
    """One name of several that is mistyped is not left out without a word."""
    path = str(tmp_path / "c")
    state = {"model": {"w": torch.ones(2)}, "opt": torch.ones(2)}
    sync.save(state, path)
    weight = torch.zeros(2)
    target = {"model": {"w": weight}, "opt": torch.zeros(2)} if has_target else None
    wrong = next(pattern for pattern in select if pattern in ("optt", "m?del.z"))
    with pytest.raises(TargetError, match=re.escape(f"select= asks for {wrong!r}, and no name")):
        sync.load(path, into=target, select=select)
    assert not weight.any()
    both = sync.load(path, select=["model", "model.w", "o*"])
    assert set(both) == {"model", "opt"}


def test_names_that_nothing_has_are_told_in_a_message_that_can_be_read(tmp_path: Path) -> None:
    """The first few of thousands, and how many more there are."""
    sync.save({"w": torch.ones(2)}, tmp_path / "c", config=SMALL)
    wrong = [f"model.layers.{i}.weight" for i in range(5000)]
    with pytest.raises(TargetError, match="and 4995 more, and no name of") as caught:
        sync.load(tmp_path / "c", select=wrong, config=SMALL)
    assert len(str(caught.value)) < 600
    with pytest.raises(TargetError, match="selects nothing") as caught:
        sync.convert(tmp_path / "c", tmp_path / "x", to="hf", select=wrong, config=SMALL)
    assert len(str(caught.value)) < 600
