"""Tests for the one look at plain tensors."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import PerRank, sync
from ckptio.format.encode import TAG
from ckptio.format.manifest import Chunk, TensorEntry
from ckptio.state.fits import find_plain
from ckptio.state.leaves import DTYPE_NAMES
from ckptio.state.looks import look_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Tagged(torch.Tensor):
    """A class of its own."""


def _inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.ones(3, 2).t(),
    "expanded": lambda: torch.ones(1).expand(4),
    "conjugate of one element": lambda: torch.ones(1, dtype=torch.complex64).conj(),
    "negative of one element": lambda: torch.ones(1, dtype=torch.complex64).conj().imag,
    "made in inference mode": _inferred,
    "on the meta device": functools.partial(torch.empty, 3, device="meta"),
    "of a class of its own": lambda: torch.ones(3).as_subclass(Tagged),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "of another library's layout": lambda: torch.ones(3, 3).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:torch.quantize"
)
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_is_not_plain_is_left_to_a_closer_look(make: Callable[[], torch.Tensor]) -> None:
    """In a state, and in a target of one that was stored in that shape and type."""
    tensor = make()
    assert look_at(tensor) is None
    assert find_plain(_entries(tensor), "x", {TAG: 0}, tensor) is None


def test_a_tensor_without_memory_is_left_to_a_closer_look() -> None:
    found = []

    def looked(tensor: torch.Tensor) -> torch.Tensor:
        found.append((look_at(tensor), find_plain(_entries(tensor), "x", {TAG: 0}, tensor)))
        return tensor.sum()

    torch.func.grad(looked)(torch.ones(3))
    torch.func.functionalize(looked)(torch.ones(3))
    assert found == [(None, None)] * 2


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_a_look_tells_what_the_tensor_says(shape: tuple[int, ...]) -> None:
    tensor = torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    with torch.no_grad():
        tensor.add_(1)
    look = look_at(tensor)
    assert look is not None
    assert (look.dtype, look.shape, look.version) == ("bfloat16", shape, tensor._version)
    assert look.span == (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def test_a_look_keeps_the_memory_of_a_tensor_that_moves() -> None:
    tensor = torch.ones(1000)
    look, before = look_at(tensor), weakref.ref(tensor.untyped_storage())
    tensor.data = torch.zeros(1000)
    assert look is not None
    assert before() is look.storage


def test_a_target_keeps_the_memory_that_is_filled_though_it_is_moved() -> None:
    """Else another tensor may be made there, a smaller one, while the load waits for a store."""
    target = torch.ones(1000)
    fill, before = (
        find_plain(_entries(target), "x", {TAG: 0}, target),
        weakref.ref(target.untyped_storage()),
    )
    target.data = torch.zeros(10)
    assert fill is not None
    assert before() is fill.storage
    assert "1.0" not in repr(fill)


@pytest.mark.parametrize(
    "node",
    [None, [0], {TAG: "np", "t": 0}, {TAG: "view", "t": 0}],
    ids=["none", "list", "np", "view"],
)
def test_only_references_to_whole_tensors_are_plain(node: object) -> None:
    target = torch.ones(3)
    assert find_plain(_entries(target), "x", node, target) is None
    assert find_plain(_entries(target), "x", {TAG: 0}, target) is not None


def test_another_shape_or_element_type_is_not_plain() -> None:
    target = torch.ones(3)
    for other in (torch.ones(3, 1), torch.ones(4), torch.ones(3, dtype=torch.float64)):
        assert find_plain(_entries(other), "x", {TAG: 0}, target) is None


class Restless:
    """Does something to a tensor whenever it is asked for its state."""

    def __init__(self, do: Callable[[], object]) -> None:
        self._do = do

    def state_dict(self) -> dict[str, Any]:
        self._do()
        return {"n": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it."""


def _write(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def _move(tensor: torch.Tensor) -> None:
    tensor.data = tensor.clone()


def _turn(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.t()


def _share(tensor: torch.Tensor) -> None:
    tensor.share_memory_()


@pytest.mark.parametrize("do", [_write, _move, _turn, _share])
@pytest.mark.parametrize("wrap", [lambda value: value, PerRank], ids=["shared", "per rank"])
def test_a_state_dict_may_change_what_was_looked_at(
    do: Callable[[torch.Tensor], None], wrap: Callable[[torch.Tensor], Any], tmp_path: Path
) -> None:
    """It runs while the state is taken apart, so what it leaves is the state."""
    tensor = torch.arange(4.0).view(2, 2)
    sync.save({"a": wrap(tensor), "b": Restless(lambda: do(tensor))}, tmp_path / "c")
    assert torch.equal(sync.load(tmp_path / "c")["a"], tensor)

    target = torch.zeros(2, 2)
    sync.load(tmp_path / "c", into={"a": wrap(target), "b": Restless(lambda: do(target))})
    assert torch.equal(target, tensor)


def _entries(tensor: torch.Tensor) -> tuple[TensorEntry, ...]:
    """Give what a manifest has of a tensor; nested and quantised ones are in none."""
    shape = () if tensor.is_nested else tuple(tensor.shape)
    dtype = DTYPE_NAMES.get(tensor.dtype, "float32")
    return (TensorEntry("x", dtype, shape, (Chunk(0, 0),)),)
