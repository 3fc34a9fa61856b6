"""Which elements of a tensor a rank of a mesh holds. Pure: no torch.

A dimension of a tensor is cut by some dimensions of the mesh, one after the other, each
into as many parts as it has ranks: parts of `ceil(n / parts)` indices, the last ones
shorter or empty, as `torch.chunk` does it. What is left for a rank is one run of indices.
A strided cut takes such a part of each of `split_factor` equal pieces, and leaves several.

A strided cut on an earlier dimension of the mesh stands for plain cuts in another order:
tensor parallelism cut the weight first, sharded data parallelism cut what was left, but
the latter comes first in the mesh. Where the parts are equal, both readings give the same
indices. Where they are not, both are in use: torch's FSDP2 cuts the latter way, its
`distribute_tensor` the former. So the shape of what the rank has decides. A single rank
may have the same shape in both, but then other ranks do not: read wrong, the blocks of
all ranks do not fill the tensor, which every save checks. A load sees one rank alone, and takes
FSDP2's reading. The two differ so for some uneven cuts by three dimensions of a mesh, and by two
for few (38 rows over 4 x 4, for one rank of 16; none up to 3 x 3 and 2 x 4). To refuse those
would refuse what FSDP2 makes.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, NamedTuple

from ckptio.layout import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: First index and length.
Run = tuple[int, int]


class Cut(NamedTuple):
    """How a dimension of the mesh cuts the tensor.

    Attributes:
        dim: The dimension of the tensor that it cuts.
        split_factor: Into how many pieces the dimension is cut before each is; 1 for a
            plain cut.
    """

    dim: int
    split_factor: int = 1


class Layout(NamedTuple):
    """How a tensor lies on a mesh, as one of its ranks sees it.

    Attributes:
        global_shape: Shape of the tensor.
        mesh_shape: Shape of the mesh.
        coordinate: The rank's place in the mesh.
        cuts: What each dimension of the mesh does; `None` where it replicates.
        order: Dimensions of the mesh in the order in which they cut, where that is known
            and the cuts are plain ones.
    """

    global_shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    cuts: tuple[Cut | None, ...]
    order: tuple[int, ...] | None = None


class Part(NamedTuple):
    """A block of the tensor, and where it is in the local tensor.

    Attributes:
        box: The block.
        local_offset: First index of it in the local tensor, where it has the same shape.
    """

    box: Box
    local_offset: tuple[int, ...]


def local_parts(layout: Layout, local_shape: tuple[int, ...]) -> list[Part] | None:
    """Give the blocks of the tensor that a rank holds, in the order of its local tensor.

    Args:
        layout: How the tensor lies on its mesh.
        local_shape: Shape of the rank's local tensor.

    Returns:
        Blocks that fill the local tensor; none if it is empty. `None` if the layout gives
        the rank a local tensor of another shape.
    """
    for runs in _readings(layout):
        if tuple(sum(n for _, n in of_dim) for of_dim in runs) == local_shape:
            return list(_parts(runs))
    return None


def _readings(layout: Layout) -> Iterator[list[list[Run]]]:
    """Give the runs of indices in each dimension, for each way to read a layout."""
    plain = tuple(cut and Cut(cut.dim) for cut in layout.cuts)
    left_to_right = range(len(layout.cuts))
    if plain == layout.cuts:
        yield _runs(layout, plain, layout.order or left_to_right)
        return
    order = _order_of(layout)
    if order is not None:
        yield _runs(layout, plain, order)
    yield _runs(layout, layout.cuts, left_to_right)


def _runs(layout: Layout, cuts: Sequence[Cut | None], order: Sequence[int]) -> list[list[Run]]:
    """Cut each dimension of the tensor, by the dimensions of the mesh in `order`."""
    runs = [[(0, extent)] if extent else [] for extent in layout.global_shape]
    for mesh_dim in order:
        cut = cuts[mesh_dim]
        if cut is None:
            continue
        parts, index = layout.mesh_shape[mesh_dim], layout.coordinate[mesh_dim]
        whole = runs[cut.dim]
        runs[cut.dim] = _joined(
            run
            for piece in range(cut.split_factor)
            for run in _chunk(_chunk(whole, cut.split_factor, piece), parts, index)
        )
    return runs


def _chunk(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """Give one of the parts that indices are cut into, as `torch.chunk` cuts them."""
    if parts == 1:
        return list(runs)
    extent = -(-sum(n for _, n in runs) // parts)
    first, stop = extent * index, extent * (index + 1)
    found = []
    done = 0
    for start, n in runs:
        begin, end = max(first, done), min(stop, done + n)
        if begin < end:
            found.append((start + begin - done, end - begin))
        done += n
    return found


def _joined(runs: Iterator[Run]) -> list[Run]:
    """Join runs that follow each other."""
    joined: list[Run] = []
    for start, n in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + n)
        else:
            joined.append((start, n))
    return joined


def _order_of(layout: Layout) -> list[int] | None:
    """Find the order of plain cuts that strided ones stand for, if there is one.

    The split factor of a cut is the number of parts that its dimension was in before it
    came, counting only those cuts that stand further right in the mesh. So the cuts are
    put in order from right to left, each behind those whose parts multiply to its factor.
    """
    by_dim: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(layout.cuts))):
        cut = layout.cuts[mesh_dim]
        if cut is None:
            continue
        before = by_dim.setdefault(cut.dim, [])
        num_parts = [1, *itertools.accumulate((layout.mesh_shape[m] for m in before), operator.mul)]
        if cut.split_factor not in num_parts:
            return None
        before.insert(num_parts.index(cut.split_factor), mesh_dim)
    return [mesh_dim for _, order in sorted(by_dim.items()) for mesh_dim in order]


def _parts(runs: Sequence[Sequence[Run]]) -> Iterator[Part]:
    """Combine the runs of all dimensions to blocks."""
    placed = []
    for of_dim in runs:
        ends = itertools.accumulate((n for _, n in of_dim), initial=0)
        placed.append([(start, n, local) for (start, n), local in zip(of_dim, ends, strict=False)])
    for block in itertools.product(*placed):
        box = Box(tuple(start for start, _, _ in block), tuple(n for _, n, _ in block))
        yield Part(box, tuple(local for _, _, local in block))
