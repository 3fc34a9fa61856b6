from __future__ import annotations

import copy
import decimal
import functools
import io
import random
import types
import uuid
import warnings
from collections import UserDict, UserList
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio import sync
from ckptio.errors import UnsupportedLeafError
from ckptio.state.flatten import MAX_INLINE_NBYTES, flatten
from ckptio.state.stateful import is_stateful
from tests.state.objects import OwnMemory
from tests.strategies import TORCH_DTYPES, keys, states

if TYPE_CHECKING:
    from pathlib import Path


@given(state=states)
def test_leaves_have_distinct_names_and_their_sizes(state: Any) -> None:
    """Whatever the keys are; none is safetensors' own name, and all are UTF-8."""
    flat = flatten(state)
    names = [spec.name for spec in flat.specs]
    assert len(set(names)) == len(names)
    assert "__metadata__" not in names
    for spec, source in zip(flat.specs, flat.sources, strict=True):
        assert spec.name.encode()
        assert spec.nbytes == source.nbytes
        assert spec.shape == tuple(source.shape)
    assert flat.nbytes == sum(source.nbytes for source in flat.sources)


@given(names=st.lists(keys, max_size=4))
def test_names_that_collide_are_told_apart(names: list[Any]) -> None:
    """`{"a.b": x, "a": {"b": y}}` has two tensors, and so has `{1: x, "1": y}`."""
    state = [(key, torch.zeros(1)) for key in names]
    assert len({spec.name for spec in flatten(state).specs}) == len(names)


@pytest.mark.parametrize(
    ("state", "names"),
    [
        (torch.zeros(1), ["state"]),
        ({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, ["a.b", "a.b~2"]),
        ({1: torch.zeros(1), "1": torch.zeros(1)}, ["1", "1~2"]),
        ({"__metadata__": torch.zeros(1)}, ["__metadata__~2"]),
        ({"a~2": torch.zeros(1), "a": torch.zeros(1)}, ["a~2", "a"]),
        ({"": torch.zeros(1), "state": torch.zeros(1)}, ["state", "state~2"]),
        ({"\ud800": torch.zeros(1), "é": torch.zeros(1)}, ["\\ud800", "é"]),
        ([[torch.zeros(1)], (torch.zeros(1),)], ["0.0", "1.0"]),
        ({(1, "x"): torch.zeros(1)}, ["(1, 'x')"]),
    ],
    ids=str,
)
def test_names_are_paths_with_dots(state: Any, names: list[str]) -> None:
    """The first comer has the plain name."""
    found = [spec.name for spec in flatten(state).specs]
    assert found[: len(names)] == names


def test_nothing_is_copied() -> None:
    """The flat state refers to the caller's memory."""
    tensor, array = torch.zeros(5), np.zeros(5)
    flat = flatten([tensor, array])
    assert flat.sources[0].data_ptr() == tensor.data_ptr()
    assert flat.sources[1].data_ptr() == array.ctypes.data


def test_a_read_only_array_is_read_without_a_warning() -> None:
    """Its memory is only read, which torch cannot know."""
    array = np.arange(5)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flat = flatten({"a": array, "b": bytes(2000)})
    assert flat.sources[0].data_ptr() == array.ctypes.data


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_short_bytes_are_in_the_tree_and_long_ones_in_a_bucket(kind: type) -> None:
    """A key or a digest needs no place in a file; a megabyte does."""
    assert flatten([kind(MAX_INLINE_NBYTES)]).specs == ()
    (spec,) = flatten([kind(MAX_INLINE_NBYTES + 1)]).specs
    assert (spec.dtype, spec.nbytes) == ("uint8", MAX_INLINE_NBYTES + 1)


def test_an_array_is_stored_as_the_tensor_it_could_be() -> None:
    """Other readers see its type; kinds that torch does not have are bytes."""
    state = {
        "i": np.zeros(3, "<i4"),
        "b": np.zeros(3, ">i4"),
        "c": np.zeros((2, 2), np.complex64),
        "s": np.zeros(3, "S5"),
        "t": np.zeros(2, "<M8[s]"),
    }
    found = {spec.name: (spec.dtype, spec.shape) for spec in flatten(state).specs}
    assert found == {
        "i": ("int32", (3,)),
        "b": ("uint8", (12,)),
        "c": ("complex64", (2, 2)),
        "s": ("uint8", (15,)),
        "t": ("uint8", (16,)),
    }


class Loader:
    """Stands for its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 7, "order": torch.arange(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def test_a_stateful_object_stands_for_its_state() -> None:
    """Objects with both halves do; their classes, and tensors, do not."""
    flat = flatten({"loader": Loader()})
    assert flat.tree["loader"]["position"] == 7
    assert [spec.name for spec in flat.specs] == ["loader.order"]
    assert is_stateful(torch.nn.Linear(1, 1))
    assert not is_stateful(Loader)
    assert not is_stateful(torch.zeros(1))


class Wrapper(OwnMemory):
    """One that says what it is made of."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        raise NotImplementedError


class DictConfig(dict[str, Any]):
    """What omegaconf has, by its name."""

    __module__ = "omegaconf.dictconfig"


class Settled:
    """Says what it is made of."""

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError


class Count(int):
    """A number with a class of its own."""


class Rate(float):
    """The same."""


class Tagged(torch.Tensor):
    """A subclass that is a tensor with a label."""


def refused() -> dict[str, tuple[Any, str]]:
    return {
        "sparse": (torch.eye(3).to_sparse(), r"indices and values.*tensor.to_dense\(\)"),
        "meta": (torch.zeros(3, device="meta"), r"to_empty\(\)"),
        "subclass": (torch.zeros(3).as_subclass(OwnMemory), "plain tensors it is made of"),
        "wrapper": (torch.zeros(3).as_subclass(Wrapper), r"its __tensor_flatten__\(\) names"),
        "objects": (np.array([object()]), "convert it to numbers"),
        "records": (np.zeros(2, [("a", "i4")]), "save its fields"),
        "record": (np.zeros(2, [("a", "i4")])[0], "Python value"),
        "no text": (np.frombuffer(b"2KTP" * 2, "U2")[0], "save it in an array"),
        "masked": (np.ma.masked_array([1]), "MaskedArray.*save its data and its mask"),
        "namespace": (types.SimpleNamespace(a=1), r"vars\(...\)"),
        "torch's generator": (torch.Generator(), "RandomStates"),
        "RandomState": (np.random.RandomState(0), r"its get_state\(\)"),
        "Random": (random.Random(0), "RandomStates"),
        "numpy's generator": (np.random.default_rng(0), "RandomStates"),
        "BitGenerator": (np.random.PCG64(0), "save its state"),
        "BytesIO": (io.BytesIO(b"a"), r"its getvalue\(\)"),
        "DictConfig": (DictConfig(a=1), r"OmegaConf.to_container\(..., resolve=True\)"),
        "UserDict": (UserDict(a=1), r"save dict\(...\)"),
        "proxy": (types.MappingProxyType({"a": 1}), r"save dict\(...\)"),
        "UserList": (UserList([1]), r"save list\(...\)"),
        "range": (range(3), r"save list\(...\)"),
        "memmap": (np.zeros(2).view(np.memmap), r"save np.asarray\(...\)"),
        "Decimal": (decimal.Decimal(1), r"save str\(...\)"),
        "UUID": (uuid.UUID(int=1), r"save str\(...\)"),
        "a version": (torch.__version__, r"save str\(...\)"),
        "an int of a class": (Count(1), r"int\(...\)"),
        "a float of a class": (Rate(1), r"save float\(...\)"),
        "to_dict": (Settled(), r"save its to_dict\(\)"),
        "function": (lambda: 0, "function.*; save its name, or the object that has it"),
        "method of no function": (types.MethodType(functools.partial(print), 1), "save its name"),
        "method": (torch.nn.ReLU().forward, "method.*; save its name, or the object that has it"),
        "builtin": (len, "; save its name, or the object that has it"),
        "state_dict": (torch.nn.ReLU().state_dict, "; call it, and save what it gives"),
        "generator": ((i for i in "a"), r"generator.*; save list\(...\) of it"),
        "parameters": (torch.nn.ReLU().parameters(), r"; save the module, or list\(...\)"),
        "named": (torch.nn.ReLU().named_parameters(), r"; save the module, or dict\(...\)"),
        "keys": ({"a": 1}.keys(), r"; save list\(...\)"),
        "map": (map(str, ()), r"; save list\(...\)"),
        "class": (Loader, "type.*; save its name$"),
        "module": (copy, "module.*; save its name$"),
    }


@pytest.mark.parametrize("kind", sorted(refused()))
def test_what_has_no_portable_form_is_refused_with_a_way_out(kind: str) -> None:
    """The name is in the error; nothing is half done."""
    value, way_out = refused()[kind]
    with pytest.raises(UnsupportedLeafError, match=way_out) as caught:
        flatten({"good": torch.zeros(3), "deep": [{"bad": value}]})
    assert caught.value.fqn == "deep.0.bad"


class Keeps:
    """Somebody's object, with a state that it alone can give."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.state, Exception):
            raise self.state
        return {"kept": [self.state]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""


def test_what_is_in_the_state_of_an_object_is_refused_with_its_owner() -> None:
    """Whose class has to convert it: not who saves the object, or has one that has it."""
    within = (
        r"; it is in the state_dict\(\) of the Keeps %s, and has to be converted in that \(%s\)"
    )
    for value, way_out in (
        (UserList(), r"save list\(...\) of it"),
        (object(), "give it state_dict.*"),
        (torch.ones(2).to_sparse(), "save its parts.*"),
    ):
        with pytest.raises(UnsupportedLeafError, match=within % ("at 'x.a'", way_out)):
            flatten({"x": {"a": Keeps(value)}})
        with pytest.raises(UnsupportedLeafError, match=within % (r"at 'x.kept.0'", way_out)):
            flatten({"x": Keeps(Keeps(value))})
        with pytest.raises(UnsupportedLeafError, match=within % ("that is saved", way_out)):
            flatten(Keeps(value))
    with pytest.raises(UnsupportedLeafError, match=r"'x.kept.0': .*; materialise it with to_empt"):
        flatten({"x": Keeps(torch.ones(2, device="meta"))})


def test_an_object_that_says_what_to_do_first_is_no_reason_to_leave_it_out() -> None:
    """As optimizers do whose state is on other ranks."""
    problem = r"cannot save 'x.kept.0': its state_dict\(\) fails: .*; "
    for words, way_out in {
        "call gather() first": "do what that says, or leave it out",
        "call consolidate_state_dict() first": r"call consolidate_state_dict\(to=0\) on all ranks",
    }.items():
        with pytest.raises(UnsupportedLeafError, match=problem + way_out):
            flatten({"x": Keeps(Keeps(RuntimeError(words)))})


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_quantised_tensor_is_refused_with_a_way_out() -> None:
    """Its integers, scales and zero points can be saved."""
    quantised = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedLeafError, match="int_repr"):
        flatten([quantised])


def test_a_subclass_that_is_only_labelled_is_saved() -> None:
    """Its memory is its own."""
    flat = flatten([torch.ones(3).as_subclass(Tagged), torch.nn.Parameter(torch.ones(2))])
    assert [spec.shape for spec in flat.specs] == [(3,), (2,)]


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_every_element_type_has_its_name(name: str) -> None:
    """The plan knows torch's own names."""
    (spec,) = flatten([torch.empty(2, dtype=TORCH_DTYPES[name])]).specs
    assert spec.dtype == name


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(24, dtype=np.int16).reshape(4, 6)[:, ::2],
        np.broadcast_to(np.arange(3), (5, 3)),
    ],
    ids=["fortran", "sliced", "expanded, read-only"],
)
def test_a_strided_array_is_not_copied_at_the_call(array: np.ndarray[Any, Any]) -> None:
    """It is copied with everything else, in pieces: a whole copy is memory beside the pool."""
    (source,) = flatten({"a": array}).sources
    assert source.data_ptr() == array.__array_interface__["data"][0]
    assert source.stride() == tuple(stride // array.itemsize for stride in array.strides)
    assert np.array_equal(source.numpy(), array)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(1 << 60, 0),
        lambda: torch.ones(1).expand(1 << 60),
        lambda: np.empty((1 << 60, 0), np.float32),
    ],
    ids=["no elements", "expanded", "an array"],
)
def test_shapes_that_no_manifest_has_are_refused(make: Any) -> None:
    """However little memory they have: it could not be loaded."""
    with pytest.raises(UnsupportedLeafError, match=r"'x': .* beyond 2\*\*56"):
        flatten({"x": make()})


def test_more_dimensions_than_a_manifest_has_are_refused() -> None:
    """Torch has tensors and views of as many as one likes."""
    base = torch.zeros(2)
    flatten({"x": base.reshape([1] * 63 + [2])})
    for tensor in (base.reshape([1] * 64 + [2]), base[:1].expand([1] * 65)):
        with pytest.raises(UnsupportedLeafError, match=r"'x': 65 dimensions, .* 64 at most"):
            flatten({"base": base, "x": tensor})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).as_strided((1, 3), (1 << 57, 2)),
        torch.arange(6.0).as_strided((1, 3), (1 << 54, 1)).numpy(),
        np.lib.stride_tricks.as_strided(np.arange(3.0), (1,), (1 << 57,)),
    ],
    ids=["a tensor", "an array of one", "an array"],
)
def test_a_stride_over_one_element_says_nothing(tensor: Any, tmp_path: Path) -> None:
    """However far it goes, nobody does; and of arrays none is stored."""
    sync.save({"x": tensor}, tmp_path / "c")
    assert np.array_equal(np.asarray(sync.load(tmp_path / "c")["x"]), np.asarray(tensor))


@pytest.mark.parametrize("names", [None, 3, ("a", 1), "ab"])
def test_a_tuple_that_is_no_named_one_has_no_form(names: object) -> None:
    """Whatever its class has as `_fields`."""
    kind = type("Pair", (tuple,), {"_fields": names})
    with pytest.raises(UnsupportedLeafError, match=r"'x\.0'.* no portable form"):
        flatten({"x": [kind((1, 2))]})


RECORDS = np.zeros(4, dtype=[("a", "u1"), ("b", "<f4")])
RECORDS["b"] = np.arange(4)
GRID = np.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "array",
    [RECORDS["b"], RECORDS["b"][1:], GRID[::-1], GRID[:, ::-1], GRID[::-1, 1:4], GRID[1:, 4:1:-2]],
    ids=["field", "part of a field", "rows back", "columns back", "part", "steps back"],
)
def test_arrays_of_strides_that_no_tensor_has_are_stored(array: np.ndarray[Any, Any]) -> None:
    """Backwards, or by bytes that are no whole elements."""
    flat = flatten({"x": array})
    (source,) = flat.sources
    assert source.contiguous().view(torch.uint8).numpy().tobytes() == array.tobytes()
