from __future__ import annotations

import base64
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from ckptio.errors import ConfigError, FormatError, TargetError
from ckptio.format.manifest import TensorEntry
from ckptio.state.fills import Blank
from ckptio.state.flatten import flatten
from ckptio.state.leaves import as_integers
from ckptio.state.rebuild import (
    Rebuilder,
    allocate,
    device_of,
    empty,
    torch_dtype,
    view_of,
)
from ckptio.state.references import check_view
from tests.strategies import CLASSES, assert_same, states


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor as it is stored; those of bits as integers, since torch has no copy of them."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    bits = as_integers(plain)
    return bits.clone(memory_format=torch.contiguous_format).view(plain.dtype)


@given(state=states)
def test_a_state_is_put_together_as_it_was(state: Any) -> None:
    """Bit for bit, from its tree and copies of its tensors."""
    flat = flatten(state)
    rebuilder = Rebuilder({i: as_stored(t) for i, t in enumerate(flat.sources)}, CLASSES)
    assert_same(rebuilder.rebuild("", flat.tree), state)
    assert rebuilder.notes == []


def rebuild(node: Any, *tensors: torch.Tensor) -> Any:
    return Rebuilder(dict(enumerate(tensors))).rebuild("here", node)


@pytest.mark.parametrize(
    "name",
    [
        "onnx", "compile", "_dynamo", "nn", "float31", "", "nn.functional", "os", "__name__",
        "set_default_dtype", "Tensor", 5, None, ["float32"],
    ],
)  # fmt: skip
def test_a_word_that_is_no_dtype_is_refused(name: Any) -> None:
    """Only torch's own element types are looked up by name."""
    with pytest.raises(FormatError):
        rebuild({"~": "torch.dtype", "v": name})


def test_looking_up_a_dtype_imports_nothing() -> None:
    """Though torch imports some of its modules when they are asked for by name."""
    program = """if True:
        import sys, torch
        from ckptio.errors import FormatError
        from ckptio.state.rebuild import Rebuilder
        before = set(sys.modules)
        for name in ("_dynamo", "_inductor", "_export", "onnx", "_refs", "_logging"):
            try:
                Rebuilder({}).rebuild("", {"~": "torch.dtype", "v": name})
            except FormatError:
                continue
        print(sorted(set(sys.modules) - before))
    """
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert found.stdout == b"[]\n"


@pytest.mark.parametrize(
    "name",
    [
        "O", "|O", "V8", "<f3", "f4,f4", "8f4", "(2,2)f4", "float32", "int", "object", "", "os",
        "<M8[25x]", "<M8[D]x", "a5", ">U", "<f4 ", "{'names':['a']}", "T", "<S99999999999", None,
        4, ["f4"], "c", "|b2", "<M4[D]",
    ],
)  # fmt: skip
def test_a_numpy_dtype_has_one_plain_name(name: Any) -> None:
    """No objects, records, subarrays or aliases."""
    with pytest.raises(FormatError):
        rebuild({"~": "npscalar", "d": name, "v": base64.b64encode(bytes(16)).decode()})
    with pytest.raises(FormatError):
        rebuild({"~": "np", "t": 0, "d": name, "s": [2]}, torch.zeros(16, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("<f4", [3]), ("<f4", [2**40]), ("<U0", [2**40]), ("|S0", [2**55]), ("<f4", [2**60, 0])],
)
def test_an_array_has_the_bytes_it_needs(dtype: str, shape: list[int]) -> None:
    """No shape makes memory that was not there."""
    for raw in (torch.zeros(16, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)):
        try:
            found = rebuild({"~": "np", "t": 0, "d": dtype, "s": shape}, raw)
        except FormatError:
            continue
        assert found.nbytes == 0


@pytest.mark.parametrize("dtype", ["U0", "S0"])
@pytest.mark.parametrize("shape", [(3,), (), (2, 3), (0, 4)])
def test_an_array_of_strings_without_characters_comes_back(
    dtype: str, shape: tuple[int, ...]
) -> None:
    """Such a field of records has elements and no bytes; numpy makes longer ones where it can."""
    array = np.zeros(shape, dtype=[("name", dtype)])["name"]
    found = rebuild(flatten([array]).tree, torch.empty(0, dtype=torch.uint8))[0]
    assert (found.dtype, found.shape) == (array.dtype, shape)
    assert found.tolist() == array.tolist()


#: Not a time. Times without a unit are made by views: newer numpy warns of their constructors.
_NO_TIME = np.array([np.iinfo(np.int64).min])


@pytest.mark.parametrize(
    "value",
    [
        np.str_(""), np.str_("a\0"), np.str_("é\ud800"), np.bytes_(b""), np.bytes_(b"a\0"),
        np.float64("nan"), np.float32(-0.0), np.longdouble(1) / 3, np.clongdouble(1j),
        _NO_TIME.view("M8")[0], np.datetime64("2024-01-01"), np.array([5], "M8[25s]")[0],
        _NO_TIME.view("m8")[0], np.array([3]).view("m8")[0], np.True_, np.int8(-1),
        np.uint64(2**64 - 1), np.float16(65504), np.complex64(1 - 0j),
    ],
    ids=repr,
)  # fmt: skip
def test_a_numpy_scalar_comes_back(value: np.generic) -> None:
    """With its type, unit and every bit; empty strings and trailing zeros, too."""
    found = Rebuilder({}).rebuild("", flatten([value]).tree)[0]
    assert_same(found, value)
    assert found.dtype == value.dtype


@pytest.mark.parametrize(
    "node",
    [
        {"~": "npscalar", "d": "<f8", "v": "AAAA"}, {"~": "npscalar", "d": "<f8", "v": "%"},
        {"~": "npscalar", "d": "<f8", "v": 5}, {"~": "npscalar", "d": "<U1", "v": "//////8="},
        {"~": "torch.Size", "v": 5}, {"~": "torch.Size", "v": ["a"]}, {"~": "torch.Size", "v": {}},
        {"~": "npscalar", "d": "<f4", "v": "AAAAAAA="}, {"~": "npscalar", "d": "<U0", "v": "AAAA"},
        {"~": "torch.Size", "v": [2**63]}, {"~": "torch.Size", "v": [-(2**63) - 1]},
        {"~": "torch.device", "v": "tpu:0:0"}, {"~": "torch.device", "v": None},
        {"~": "torch.device", "v": "cuda:-5"}, {"~": "torch.device", "v": ""},
        {"~": 7}, {"~": "bytes", "t": 7}, {"~": "np", "t": 7, "d": "<f4", "s": []},
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_word_is_refused(node: Any) -> None:
    """Whatever torch or numpy would say of it, it is a `FormatError`."""
    with pytest.raises(FormatError):
        rebuild(node)


def view_node(**changes: Any) -> dict[str, Any]:
    return {"~": "view", "t": 0, "d": "int16", "o": 0, "s": [2, 2], "r": [2, 1], **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"o": 2}, {"o": 1}, {"s": [3, 2]}, {"s": [2, 3]}, {"r": [3, 1]}, {"r": [2, 2]}, {"r": [2]},
        {"s": [], "r": [1]}, {"s": [1 << 55, 1 << 55], "r": [0, 0]}, {"r": [2**55, 1]},
        {"o": 10, "s": [0, 2]}, {"d": "complex128", "s": [1], "r": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_view_stays_inside_its_base(changes: Any) -> None:
    """Whatever its offset, shape and strides say."""
    base = torch.zeros(4, dtype=torch.int16)
    with pytest.raises(FormatError):
        view_of(base, view_node(**changes))


def test_a_view_may_have_any_strides_inside_its_base() -> None:
    """Transposed, expanded, empty or scalar."""
    base = torch.arange(4, dtype=torch.int16)
    assert view_of(base, view_node(r=[1, 2])).tolist() == [[0, 2], [1, 3]]
    assert view_of(base, view_node(r=[0, 1])).tolist() == [[0, 1], [0, 1]]
    assert view_of(base, view_node(o=8, s=[0, 2])).shape == (0, 2)
    assert view_of(base, view_node(o=6, s=[], r=[])).item() == 3
    assert check_view(view_node(), 8) == 8


def test_a_tensor_that_torch_cannot_make_is_a_target_error() -> None:
    """More elements than it counts, or a type that this version does not have."""
    with pytest.raises(TargetError, match="cannot make 'w'"):
        allocate(TensorEntry("w", "float64", (1 << 55, 1 << 55), ()))
    with pytest.raises(FormatError, match="upgrade torch"):
        torch_dtype("float31")


def test_a_device_that_is_not_there_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch lists behind that all that it knows of other devices, in dozens of lines."""

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("no 'mps' here.\nCPU: registered at\nMeta: registered at")

    template = torch.empty(2, device="meta")
    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch, "empty_like", refuse)
    told = r"^cannot make 'w' of shape .* on mps: no 'mps' here\.$"
    with pytest.raises(TargetError, match=told):
        empty((2,), torch.float32, torch.device("mps"), "w")
    with pytest.raises(TargetError, match=told):
        Blank("w", template, torch.device("mps")).value()


def test_a_device_whose_package_is_not_installed_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch imports what makes tensors there (`privateuseone`), and may not find it."""

    def lack(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'torch.privateuseone'")

    template, device = torch.empty(2, device="meta"), torch.device("privateuseone")
    monkeypatch.setattr(torch, "empty", lack)
    monkeypatch.setattr(torch, "empty_like", lack)
    told = r"^cannot make 'w' of shape \(2,\) on privateuseone: No module"
    with pytest.raises(TargetError, match=told):
        empty((2,), torch.float32, device, "w")
    with pytest.raises(TargetError, match=told):
        Blank("w", template, device).value()


@pytest.mark.parametrize("name", ["bfloat16", "float64", "float8_e5m2", "float8_e4m3fn"])
def test_a_negated_view_is_one_of_a_type_that_torch_negates(name: str) -> None:
    """Of the others it has the values themselves, or nothing could read it."""
    dtype = torch_dtype(name)
    values = torch.tensor([1 + 2j, -3 + 0.5j, 0 - 1j, 4 + 0j])
    state = {"c": values, "plus": values.imag, "minus": values.conj().imag}
    flat = flatten(state)
    found = Rebuilder(dict(enumerate(flat.sources)), dtype=dtype).rebuild("", flat.tree)
    assert found["plus"].dtype == found["minus"].dtype == dtype
    assert found["plus"].float().tolist() == [2.0, 0.5, -1.0, 0.0]
    assert found["minus"].float().tolist() == [-2.0, -0.5, 1.0, 0.0]


def test_only_floating_point_tensors_take_another_dtype() -> None:
    """Counters stay what they are."""
    assert allocate(TensorEntry("w", "float32", (2,), ()), dtype=torch.bfloat16).dtype == (
        torch.bfloat16
    )
    assert allocate(TensorEntry("n", "int64", (2,), ()), dtype=torch.bfloat16).dtype == torch.int64


def test_a_device_without_memory_is_refused() -> None:
    """Everything that landed there would be lost without a word."""
    assert device_of("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="has no memory to load into"):
        device_of("meta")


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [([1 << 40], [0], 0), ([5, 1 << 30], [1, 0], 4), ([7, 7], [1, 1], 0), ([0, 3], [3, 1], 8)],
)
def test_a_view_is_converted_in_the_memory_that_it_spans(
    shape: list[int], strides: list[int], offset: int
) -> None:
    """An expanded one has far more elements; a checkpoint of a few bytes may say so."""
    base = torch.arange(13.0).view(torch.uint8)
    node = {"~": "view", "t": 0, "d": "float32", "o": offset, "s": shape, "r": strides}
    found = Rebuilder({0: base}, dtype=torch.bfloat16).rebuild("", node)
    assert found.dtype == torch.bfloat16
    assert (list(found.shape), list(found.stride())) == (shape, strides)
    assert found.untyped_storage().nbytes() <= base.nbytes
    if found.numel() and found.numel() < 100:
        plain = base.view(torch.float32).as_strided(shape, strides, offset // 4)
        assert torch.equal(found, plain.to(torch.bfloat16))


def test_a_view_of_more_elements_than_there_can_be_is_refused() -> None:
    """Also where it has none, since one extent is zero."""
    node = {"~": "view", "t": 0, "d": "float32", "o": 0, "s": [1 << 40, 1 << 40, 0], "r": [0, 0, 0]}
    with pytest.raises(FormatError):
        Rebuilder({0: torch.zeros(4)}).rebuild("", node)


@pytest.mark.parametrize(
    ("tag", "more"),
    [
        ("bytes", {}),
        ("np", {"d": "<f4", "s": [1000]}),
        ("view", {"d": "float32", "s": [10], "r": [1]}),
        ("view", {"d": "float32", "s": [10], "r": [1], "neg": True}),
        ("view", {"d": "float64", "s": [10], "r": [0]}),
        (0, {}),
    ],
)
def test_a_tensor_takes_memory_once_however_many_nodes_refer_to_it(
    tag: object, more: dict[str, Any]
) -> None:
    """A manifest of a few megabytes may name a file of a few kilobytes a million times."""
    nodes = [
        {"~": tag, **({} if tag == 0 else {"t": 0}), **({"o": 8 * i} if tag == "view" else {})}
        for i in range(50)
    ]
    stored = torch.arange(1000.0)
    found = Rebuilder({0: stored}, dtype=torch.float16).rebuild("", [n | more for n in nodes])
    if tag == "bytes":
        assert len({id(value) for value in found}) == 1
        assert found[0] == stored.numpy().tobytes()
    else:
        assert len({_memory_of(value) for value in found}) == 1


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 1), (2, 3)])
def test_bytes_are_those_of_a_tensor_of_any_shape(shape: tuple[int, ...]) -> None:
    """Of an integer without dimensions, too, which Python would take for a length."""
    stored = torch.full(shape, 200, dtype=torch.int32)
    found = rebuild([{"~": "bytes", "t": 0}, {"~": "bytearray", "t": 0}], stored)
    assert found == [(200).to_bytes(4, "little") * stored.numel()] * 2
    assert [type(value) for value in found] == [bytes, bytearray]


def _memory_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().data_ptr()
    address: int = value.ctypes.data
    return address
