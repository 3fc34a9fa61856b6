from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from ckptio.config import KiB
from ckptio.errors import TargetError
from ckptio.plan.save import plan_save
from ckptio.shards import LeafSpec
from ckptio.staging.copy import Destination, SourceState, TargetState
from ckptio.staging.pool import Slab
from ckptio.state.leaves import DTYPE_NAMES
from tests.rig import SMALL, config_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptio.config import CheckpointConfig
    from ckptio.plan.save import Segment
    from ckptio.staging.cuda import PendingCopies

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1),
    "every other": lambda t: t[::2],
    "columns": lambda t: t[..., 1:-1],
    "expanded": lambda t: t[:1].expand(t.shape),
    "permuted": lambda t: t.permute(*reversed(range(t.dim()))),
    "offset": lambda t: t[1:],
}
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64, torch.bool]


def bits(tensor: torch.Tensor) -> bytes:
    """Give the bytes of a tensor in row-major order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).tolist())


def stage(tensors: Sequence[torch.Tensor], config: CheckpointConfig = SMALL) -> list[bytes]:
    """Copy tensors through slabs; give the bytes of each."""
    leaves = [
        LeafSpec(f"t{i}", DTYPE_NAMES[t.dtype], tuple(t.shape)) for i, t in enumerate(tensors)
    ]
    plan = plan_save(leaves, config)
    source = SourceState(tensors, None)
    found = [bytearray(leaf.nbytes) for leaf in leaves]
    slab = Slab(config.slab_nbytes)
    for bucket in plan.buckets:
        for segment in bucket.segments:
            slab.view[:] = b"\xee" * len(slab.view)
            pending: list[PendingCopies] = []
            source.gather(segment, slab, pending)
            assert pending == []
            assert slab.view[: len(segment.header)] == segment.header
            for position, leaf, offset, nbytes in segment.pieces:
                found[leaf][offset : offset + nbytes] = slab.view[position : position + nbytes]
            assert all(byte == 0xEE for byte in slab.view[segment.nbytes :])
    return [bytes(data) for data in found]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layout_is_copied_in_row_major_order(layout: str, dtype: torch.dtype) -> None:
    """Strides, offsets and gaps of the source leave no trace in the bytes."""
    base = torch.randint(0, 2 if dtype == torch.bool else 100, (6, 5, 8)).to(dtype)
    tensor = LAYOUTS[layout](base)
    assert stage([tensor]) == [bits(tensor)]


def test_conjugate_and_negative_views_are_copied_as_their_values() -> None:
    """What is lazy in torch is done in the file."""
    base = torch.randn(40, dtype=torch.complex64)
    conj, neg = base.conj(), base.conj().imag
    assert conj.is_conj()
    assert neg.is_neg()
    assert stage([conj, neg]) == [bits(conj), bits(neg)]


def test_every_bit_of_a_nan_is_kept() -> None:
    """Strided copies go through integers: payloads survive."""
    patterns = torch.tensor([0x7FC00001, 0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int32)
    nans = patterns.view(torch.float32)
    strided = torch.stack([nans, nans], dim=1)[:, 0]
    assert stage([nans, strided]) == [bits(patterns), bits(patterns)]


@given(
    shape=st.lists(st.integers(0, 40), min_size=0, max_size=3),
    order=st.randoms(use_true_random=False),
    slab=st.sampled_from([4 * KiB, 8 * KiB]),
)
def test_tensors_are_cut_anywhere(shape: list[int], order: object, slab: int) -> None:
    """A strided tensor over many slabs comes out whole, wherever the cuts fall."""
    assert hasattr(order, "shuffle")
    dims = list(range(len(shape)))
    order.shuffle(dims)
    tensor = torch.randint(0, 1 << 30, shape).permute(*dims) if dims else torch.tensor(7)
    config = config_with(slab_nbytes=slab, pool_nbytes=8 * slab)
    before = torch.arange(37, dtype=torch.uint8)
    assert stage([before, tensor], config) == [bits(before), bits(tensor)]


def test_a_copy_is_no_alias() -> None:
    """What happens to the source afterwards does not reach the slab."""
    tensor = torch.zeros(100, dtype=torch.uint8)
    plan = plan_save([LeafSpec("t", "uint8", (100,))], SMALL)
    slab = Slab(SMALL.slab_nbytes)
    (segment,) = plan.buckets[0].segments
    SourceState([tensor], None).gather(segment, slab, [])
    tensor.fill_(9)
    ((position, _, _, nbytes),) = segment.pieces
    assert bytes(slab.view[position : position + nbytes]) == bytes(100)


def land(data: bytes, target: torch.Tensor, dtype: torch.dtype, cuts: Sequence[int]) -> None:
    """Scatter the bytes of a tensor into a target, in pieces."""
    state = TargetState([Destination(target, dtype)], None)
    slab = Slab(4096 + -(-max(len(data), 1) // 4096) * 4096)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, stop in itertools.pairwise(edges):
        block = 4096 if start else 0
        slab.view[block : block + stop - start] = data[start:stop]
        pending: list[PendingCopies] = []
        state.scatter([(block, ((0, 0, start, stop - start, None),))], slab, pending)
        assert pending == []
    state.mark_written()


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@given(
    nbytes=st.integers(1, 40), count=st.integers(2, 30), gaps=st.tuples(*[st.integers(0, 9)] * 2)
)
def test_rows_land_at_once(layout: str, nbytes: int, count: int, gaps: tuple[int, int]) -> None:
    """Columns of one matrix become columns of another; what lies between stays as it was."""
    step, stride = (nbytes + gap for gap in gaps)
    target = torch.full((count, stride), 255, dtype=torch.uint8)
    if layout == "transposed":
        target = target.T.contiguous().T
    state = TargetState([Destination(target, torch.uint8)], None)
    slab = Slab(4096)
    data = torch.randint(0, 255, (count, step), dtype=torch.uint8)
    slab.view[5 : 5 + data.numel()] = data.numpy().tobytes()
    state.scatter([(0, ((5, 0, 0, nbytes, (count, step, stride)),))], slab, [])
    assert torch.equal(target[:, :nbytes], data[:, :nbytes])
    assert bool((target[:, nbytes:] == 255).all())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layout_is_filled(layout: str, dtype: torch.dtype) -> None:
    """Only the elements of the view change, and each gets its own."""
    base = torch.zeros((6, 5, 8), dtype=dtype)
    view = LAYOUTS[layout](base)
    value = torch.randint(0, 2, view.shape).to(dtype)
    expected = base.clone()
    LAYOUTS[layout](expected).copy_(value)
    itemsize = dtype.itemsize
    land(bits(value), view, dtype, [itemsize * cut for cut in (3, 17, 41)])
    assert torch.equal(base, expected)


def test_values_are_converted_to_the_type_of_the_target() -> None:
    """Stored as float32, wanted as bfloat16 or float64."""
    stored = torch.randn(100)
    for dtype in (torch.bfloat16, torch.float64):
        target = torch.zeros(100, dtype=dtype)
        land(bits(stored), target, torch.float32, [40, 80])
        assert torch.equal(target, stored.to(dtype))


def test_a_conjugate_target_gets_the_values() -> None:
    """Written through the view, as `copy_` would."""
    base = torch.zeros(10, dtype=torch.complex64)
    value = torch.randn(10, dtype=torch.complex64)
    land(bits(value), base.conj(), torch.complex64, [16])
    assert torch.equal(base, value.conj().resolve_conj())


def test_autograd_is_told() -> None:
    """A tensor that was filled counts as changed in place; one of inference mode cannot."""
    target = torch.zeros(4)
    version = target._version
    land(bits(torch.ones(4)), target, torch.float32, [])
    assert target._version > version
    with torch.inference_mode():
        frozen = torch.zeros(4)
    land(bits(torch.ones(4)), frozen, torch.float32, [])
    assert frozen.tolist() == [1, 1, 1, 1]


def test_autograd_is_told_once_more_when_all_is_filled() -> None:
    """What looked at a target between the first byte and the last has not seen all of it."""
    target = torch.zeros(4)
    state = TargetState([Destination(target, torch.float32)], None)
    slab = Slab(4096)
    slab.view[:16] = bits(torch.ones(4))
    seen = target._version
    state.scatter([(0, ((0, 0, 0, 16, None),))], slab, [])
    state.mark_written()
    assert target._version > seen
    assert target.tolist() == [1, 1, 1, 1]


def test_parameters_are_filled_in_place() -> None:
    """A leaf that requires grad is filled without a fuss and stays a leaf."""
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    land(bits(torch.ones(4, 3)), parameter.t(), torch.float32, [20])
    assert parameter.is_leaf
    assert torch.equal(parameter, torch.ones(3, 4))


def test_the_memory_of_a_target_stays_while_it_is_filled() -> None:
    """Another thread may give the tensor other memory between a look at it and the copy."""
    target = torch.zeros(4)
    held = StorageWeakRef(target.untyped_storage())
    state = TargetState([Destination(target, torch.float32)], None)
    target.data = torch.zeros(2)
    assert not held.expired()
    del state
    assert held.expired()


@pytest.mark.parametrize("change", [lambda t: t.t(), lambda t: t[:8, :8]])
def test_a_strided_source_of_another_shape_is_not_copied(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """It has its memory and its count of writes still; it is another tensor all the same."""
    tensor = torch.rand(10, 10).t()
    plan = plan_save([LeafSpec("t", "float32", (10, 10))], SMALL)
    source = SourceState([tensor], None)
    tensor.data = change(tensor.data)
    (segment,) = plan.buckets[0].segments
    source.gather(segment, Slab(SMALL.slab_nbytes), [])
    assert source.watch.changed() == 0


@pytest.mark.parametrize("is_strided", [False, True])
def test_a_source_that_was_elsewhere_when_it_was_to_be_copied_is_not(*, is_strided: bool) -> None:
    """Its old memory may be gone; that it is back by the end makes nothing of it whole."""
    tensor, other = torch.ones(32, 32), torch.zeros(32, 32)
    if is_strided:
        tensor, other = tensor.t(), other.t()
    (segment,) = plan_save([LeafSpec("t", "float32", (32, 32))], SMALL).buckets[0].segments
    source = SourceState([tensor], None)
    slab = Slab(SMALL.slab_nbytes)
    slab.view[:] = b"\xee" * len(slab.view)
    first = tensor.data
    tensor.data = other
    source.gather(segment, slab, [])
    tensor.data = first
    ((position, _, _, nbytes),) = segment.pieces
    assert bytes(slab.view[position : position + nbytes]) == b"\xee" * nbytes
    assert source.watch.changed() == 0


@pytest.mark.parametrize("nbytes", [0, 4096])
def test_nothing_is_copied_from_or_to_what_a_storage_has_no_more(nbytes: int) -> None:
    """As from a view of a storage that was resized: torch says so, and an address could not."""
    whole = torch.arange(3000.0)
    tensor = whole[8:2008]
    whole.untyped_storage().resize_(nbytes)
    slab = Slab(SMALL.slab_nbytes)
    source = SourceState([tensor], None)
    (segment, *_) = plan_save([LeafSpec("t", "float32", (2000,))], SMALL).buckets[0].segments
    with pytest.raises(RuntimeError, match="out of bounds"):
        source.gather(segment, slab, [])
    target = TargetState([Destination(tensor, torch.float32)], None)
    with pytest.raises(RuntimeError, match="out of bounds"):
        target.scatter([(0, ((0, 0, 0, 4096, None),))], slab, [])


def test_what_torch_copies_is_looked_at_for_the_size_of_its_storage() -> None:
    """Resized where it was, it is told as moved, and not by whatever torch raises."""
    whole = torch.arange(4000.0)
    tensor = whole.view(2, 2000).t()
    slab = Slab(SMALL.slab_nbytes)
    source = SourceState([tensor], None)
    target = TargetState([Destination(tensor, torch.float32)], None)
    whole.untyped_storage().resize_(4096)
    source.watch.pointers[0] = target._pointers[0] = tensor.data_ptr()  # as a device may
    (segment, *_) = plan_save([LeafSpec("t", "float32", (2000, 2))], SMALL).buckets[0].segments
    source.gather(segment, slab, [])
    assert source.watch.changed() == 0
    target.scatter([(0, ((0, 0, 0, 4096, None),))], slab, [])
    with pytest.raises(TargetError, match="storage"):
        target.mark_written()


@pytest.mark.parametrize("saving", [True, False], ids=["save", "load"])
@pytest.mark.parametrize(("nbytes", "at_once"), [(4 * KiB, 1), (256 * KiB, 4)])
def test_short_strided_tensors_are_copied_in_one_thread_at_a_time(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, at_once: int, *, saving: bool
) -> None:
    """Threads would take the GIL from each other for each; long ones share the work."""
    owner: Any = SourceState if saving else TargetState
    pairs, lock, all_in = owner._pairs, threading.Lock(), threading.Event()
    inside = most = 0

    def counted(*args: Any, **memory: Any) -> Iterator[Any]:
        nonlocal inside, most
        for pair in pairs(*args, **memory):
            with lock:
                inside += 1
                most = max(most, inside)
                if inside == at_once > 1:
                    all_in.set()
            all_in.wait(0.1 if at_once == 1 else 60)
            yield pair
            with lock:
                inside -= 1

    monkeypatch.setattr(owner, "_pairs", counted)
    tensors = [torch.rand(nbytes // 64, 16).t() for _ in range(4)]
    zeros = [torch.zeros(nbytes // 64, 16).t() for _ in range(4)]
    config = config_with(slab_nbytes=512 * KiB, pool_nbytes=4096 * KiB, bucket_nbytes=nbytes)
    leaves = [LeafSpec(f"t{i}", "float32", tuple(t.shape)) for i, t in enumerate(tensors)]
    segments = [s for bucket in plan_save(leaves, config).buckets for s in bucket.segments]
    assert len(segments) == 4
    source = SourceState(tensors, None)
    target = TargetState([Destination(t, torch.float32) for t in zeros], None)

    def work(segment: Segment) -> None:
        slab = Slab(config.slab_nbytes)
        source.gather(segment, slab, [])
        pieces = tuple((*piece, None) for piece in segment.pieces)
        target.scatter([(0, pieces)], slab, [])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, segments))
    assert most == at_once
    assert all(torch.equal(*pair) for pair in zip(tensors, zeros, strict=True))


class Turn:
    """Says that somebody waits for a lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock
        self.waits = threading.Event()

    def __enter__(self) -> None:
        self.waits.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_source_that_is_moved_while_others_are_copied_is_told_of() -> None:
    """What waits for its turn is looked at again, and not copied from where it is meanwhile."""
    tensor = torch.ones(32, 32).t()
    (segment,) = plan_save([LeafSpec("t", "float32", (32, 32))], SMALL).buckets[0].segments
    source = SourceState([tensor], None)
    first = tensor.data
    turn: Any = Turn(source._lock)
    source._lock = turn
    with ThreadPoolExecutor(1) as threads:
        with turn.lock:
            done = threads.submit(source.gather, segment, Slab(SMALL.slab_nbytes), [])
            assert turn.waits.wait(60)
            tensor.data = torch.zeros(32, 32).t()
        done.result()
    tensor.data = first
    assert source.watch.changed() == 0


def test_a_target_that_is_moved_while_others_are_copied_is_told_of() -> None:
    """What waits for its turn is looked at again: it was filled in part, without an error."""
    tensor = torch.zeros(32, 32).t()
    target = TargetState([Destination(tensor, torch.float32)], None)
    slab = Slab(SMALL.slab_nbytes)
    turn: Any = Turn(target._lock)
    target._lock = turn
    with ThreadPoolExecutor(1) as threads:
        with turn.lock:
            done = threads.submit(target.scatter, [(0, ((0, 0, 0, 4096, None),))], slab, [])
            assert turn.waits.wait(60)
            tensor.data = torch.zeros(32, 32).t()
        done.result()
    with pytest.raises(TargetError, match="moved in memory"):
        target.mark_written()
