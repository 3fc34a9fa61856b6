from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio.layout import Box
from ckptio.state.mesh import Cut, Layout, Part, local_parts
from tests.state.ranks import MeshShape, coordinates, local_tensor, meshes, strided

if TYPE_CHECKING:
    from collections.abc import Sequence


def elements(layout: Layout, local: torch.Tensor) -> torch.Tensor | None:
    """Give the elements that `local_parts` says are in a local tensor, where it says they are."""
    parts = local_parts(layout, tuple(local.shape))
    if parts is None:
        return None
    whole = torch.arange(math.prod(layout.global_shape)).view(layout.global_shape)
    said = torch.full(tuple(local.shape), -1)
    for part in parts:
        block = tuple(slice(a, a + n) for a, n in zip(part.box.offset, part.box.shape, strict=True))
        place = tuple(
            slice(a, a + n) for a, n in zip(part.local_offset, part.box.shape, strict=True)
        )
        said[place] = whole[block]
    return said


def tiles(layout: Layout, found: Sequence[torch.Tensor]) -> bool:
    """Whether tensors of ranks hold every element, each as often as the mesh replicates it."""
    num_copies = math.prod(
        extent for extent, how in zip(layout.mesh_shape, layout.cuts, strict=True) if how is None
    )
    every = torch.cat([part.reshape(-1) for part in found]).sort().values
    expected = torch.arange(math.prod(layout.global_shape)).repeat_interleave(num_copies)
    return torch.equal(every, expected)


@given(mesh=meshes())
def test_blocks_of_all_ranks_are_what_torch_chunk_gives(
    mesh: MeshShape,
) -> None:
    """For meshes of up to three dimensions, uneven and empty parts among them."""
    global_shape, mesh_shape, dims = mesh
    cuts = tuple(None if dim is None else Cut(dim) for dim in dims)
    found = []
    for coordinate in coordinates(mesh_shape):
        layout = Layout(global_shape, mesh_shape, coordinate, cuts)
        local = local_tensor(layout, range(len(cuts)))
        said = elements(layout, local)
        assert said is not None
        assert torch.equal(said, local)
        found.append(said)
    assert tiles(layout, found)


@given(mesh=meshes(), data=st.data())
def test_strided_cuts_stand_for_another_order_of_plain_ones(
    mesh: MeshShape, data: st.DataObject
) -> None:
    """Also where parts are uneven, as sharded data parallelism over tensor parallelism has it."""
    global_shape, mesh_shape, dims = mesh
    order = data.draw(st.permutations(range(len(mesh_shape))))
    plain = tuple(None if dim is None else Cut(dim) for dim in dims)
    found = []
    for coordinate in coordinates(mesh_shape):
        layout = Layout(global_shape, mesh_shape, coordinate, strided(mesh_shape, dims, order))
        local = local_tensor(layout, order, plain=True)
        said = elements(layout, local)
        assert said is not None
        assert torch.equal(said, local)
        told = Layout(global_shape, mesh_shape, coordinate, plain, tuple(order))
        assert torch.equal(elements(told, local), local)  # type: ignore[arg-type]  # not None
        found.append(said)
    assert tiles(layout, found)


@given(mesh=meshes(), factors=st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_strided_cuts_are_never_read_wrong_unseen(mesh: MeshShape, factors: list[int]) -> None:
    """What `distribute_tensor` makes of them is read right, or does not fill the tensor.

    Where parts are uneven, a strided cut has two readings, and one rank cannot always tell
    which one it has; that the blocks of all ranks fill the tensor is checked on save.
    """
    global_shape, mesh_shape, dims = mesh
    cuts = tuple(
        None if dim is None else Cut(dim, n) for dim, n in zip(dims, factors, strict=False)
    )
    found, right = [], True
    for coordinate in coordinates(mesh_shape):
        layout = Layout(global_shape, mesh_shape, coordinate, cuts)
        local = local_tensor(layout, range(len(cuts)))
        said = elements(layout, local)
        assert said is not None
        right = right and torch.equal(said, local)
        found.append(said)
    assert right or not tiles(layout, found)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2), (4, 2), (2, 3), (4, 3), (2, 4)])
def test_both_readings_of_a_strided_cut_differ_in_the_shape_of_some_rank(
    mesh_shape: tuple[int, int],
) -> None:
    """Or not at all: so the shapes of all local tensors say which one it is."""
    cuts = (Cut(0, mesh_shape[1]), Cut(0))
    num_uneven = 0
    for extent in range(40):
        layouts = [Layout((extent,), mesh_shape, at, cuts) for at in coordinates(mesh_shape)]
        pairs = [(local_tensor(x, (0, 1)), local_tensor(x, (1, 0), plain=True)) for x in layouts]
        if not all(torch.equal(a, b) for a, b in pairs):
            num_uneven += 1
            assert any(a.shape != b.shape for a, b in pairs)
    assert num_uneven or mesh_shape[0] == 2


def test_data_over_tensor_parallelism_of_nine_rows() -> None:
    """Tensor parallelism cuts 5 and 4 rows; each is cut in four: 2, 2, 1, 0 and 1, 1, 1, 1."""
    cuts = (Cut(0, 2), Cut(0))
    boxes = {}
    for at in coordinates((4, 2)):
        layout = Layout((9,), (4, 2), at, cuts)
        shape = local_tensor(layout, (1, 0), plain=True).shape
        parts = local_parts(layout, tuple(shape))
        assert parts is not None
        boxes[at] = [(part.box.offset[0], part.box.shape[0]) for part in parts]
    assert [boxes[i, 0] for i in range(4)] == [[(0, 2)], [(2, 2)], [(4, 1)], []]
    assert [boxes[i, 1] for i in range(4)] == [[(5, 1)], [(6, 1)], [(7, 1)], [(8, 1)]]


def test_a_strided_cut_alone_leaves_several_runs() -> None:
    """A part of each of three pieces: a tensor whose blocks lie apart."""
    parts = local_parts(Layout((12, 2), (2,), (1,), (Cut(0, 3),)), (6, 2))
    assert parts is not None
    assert [part.box.offset for part in parts] == [(2, 0), (6, 0), (10, 0)]
    assert [part.local_offset for part in parts] == [(0, 0), (2, 0), (4, 0)]


def test_a_local_tensor_of_another_shape_fits_no_layout() -> None:
    """Nothing is guessed of it."""
    assert local_parts(Layout((4,), (2,), (0,), (Cut(0),)), (3,)) is None
    assert local_parts(Layout((4,), (2,), (0,), (Cut(0, 2),)), (3,)) is None


def test_a_scalar_is_held_whole() -> None:
    """It has no dimension to cut."""
    parts = local_parts(Layout((), (2, 2), (1, 0), (None, None)), ())
    assert parts is not None
    assert [(part.box.offset, part.box.shape, part.local_offset) for part in parts] == [
        ((), (), ())
    ]


def test_only_the_order_that_is_known_is_read() -> None:
    """A local tensor that is as long as another order would have it is of no layout."""
    cuts = (Cut(0), Cut(0))
    layout = Layout((6,), (2, 2), (0, 1), cuts, order=(1, 0))
    assert local_parts(layout, (2,)) == [Part(Box((3,), (2,)), (0,))]
    assert local_parts(layout, (1,)) is None
    assert local_parts(layout._replace(order=None), (1,)) == [Part(Box((2,), (1,)), (0,))]


@pytest.mark.parametrize("coordinate", [(0, 0), (0, 1)])
def test_pieces_that_follow_each_other_are_one_run(coordinate: tuple[int, int]) -> None:
    """As where one rank takes all pieces of a strided cut; they begin where the first does."""
    layout = Layout((12,), (1, 2), coordinate, (Cut(0, split_factor=3), Cut(0)))
    expected = Part(Box((6 * coordinate[1],), (6,)), (0,))
    assert local_parts(layout, (6,)) == [expected]
