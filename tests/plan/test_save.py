from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.config import PAGE_NBYTES, CheckpointConfig, KiB
from ckptio.errors import FormatError
from ckptio.format.bucket import MAX_HEADER_NBYTES, decode_header, header_nbytes
from ckptio.format.manifest import TensorEntry
from ckptio.layout import DTYPES
from ckptio.plan.save import SavePlan, pack_buckets, plan_save
from ckptio.shards import LeafSpec
from tests.rig import SMALL

leaf_shapes = st.lists(st.integers(0, 40), max_size=2).map(tuple) | st.sampled_from(
    [(4096,), (2, 4096), (20_000,)]
)


@st.composite
def leaf_lists(draw: st.DrawFn) -> list[LeafSpec]:
    names = draw(st.lists(st.text(max_size=4), unique=True, max_size=12))
    return [
        LeafSpec(
            name,
            draw(st.sampled_from(sorted(DTYPES))),
            draw(leaf_shapes),
        )
        for name in names
        if name != "__metadata__"
    ]


configs = st.builds(
    lambda slab, bucket: CheckpointConfig(
        block_nbytes=4 * KiB,
        slab_nbytes=slab * 4 * KiB,
        pool_nbytes=slab * 32 * KiB,
        bucket_nbytes=bucket,
    ),
    st.integers(1, 16),
    st.sampled_from([1, 1000, 64 * KiB, 256 * KiB, 1 << 30]),
)


def table_of(plan: SavePlan) -> list[TensorEntry]:
    return msgspec.json.decode(plan.tensor_table, type=list[TensorEntry])


def contents(plan: SavePlan, index: int) -> bytes:
    """Put the header of a bucket together from its segments."""
    return b"".join(segment.header for segment in plan.buckets[index].segments)


@given(leaves=leaf_lists(), config=configs)
def test_every_byte_is_written_exactly_once(
    leaves: list[LeafSpec], config: CheckpointConfig
) -> None:
    """Segments tile their bucket without holes; pieces tile every leaf."""
    plan = plan_save(leaves, config)
    taken: list[list[tuple[int, int]]] = [[] for _ in leaves]
    for bucket in plan.buckets:
        position = 0
        for segment in bucket.segments:
            assert segment.start == position
            assert segment.start % config.slab_nbytes == 0
            assert 0 < segment.nbytes <= config.slab_nbytes
            inside = len(segment.header)
            for offset, leaf, start, nbytes in segment.pieces:
                assert offset == inside
                assert nbytes > 0
                taken[leaf].append((start, start + nbytes))
                inside += nbytes
            assert inside == segment.nbytes
            position += segment.nbytes
        assert position == bucket.nbytes
    for spec, ranges in zip(leaves, taken, strict=True):
        position = 0
        for start, stop in sorted(ranges):
            assert start == position
            position = stop
        assert position == spec.nbytes


@given(leaves=leaf_lists(), config=configs)
def test_the_table_says_where_the_pieces_are(
    leaves: list[LeafSpec], config: CheckpointConfig
) -> None:
    """Manifest, headers and pieces agree on the place of every tensor, in the given order."""
    plan = plan_save(leaves, config)
    table = table_of(plan)
    assert [LeafSpec(t.name, t.dtype, t.shape) for t in table] == leaves
    assert plan.num_tensors == len(leaves)
    found: dict[str, tuple[int, int]] = {}
    for bucket in plan.buckets:
        header = contents(plan, bucket.index)
        start = header_nbytes(header[:8], bucket.nbytes)
        assert start == len(header)
        for tensor in decode_header(header, bucket.nbytes - start)[0]:
            found[tensor.name] = (bucket.index, start + tensor.start)
        for segment in bucket.segments:
            for offset, leaf, at, _ in segment.pieces:
                chunk = table[leaf].chunks[0]
                assert chunk.file == bucket.index
                assert segment.start + offset == chunk.start + at
    assert found == {t.name: (t.chunks[0].file, t.chunks[0].start) for t in table}


@given(leaves=leaf_lists(), config=configs)
def test_every_tensor_lies_aligned(leaves: list[LeafSpec], config: CheckpointConfig) -> None:
    """On a multiple of its element size; on a page, if it is a whole number of pages."""
    for tensor in table_of(plan_save(leaves, config)):
        start = tensor.chunks[0].start
        assert start % DTYPES[tensor.dtype].itemsize == 0
        if tensor.nbytes % PAGE_NBYTES == 0 and tensor.nbytes:
            assert start % PAGE_NBYTES == 0


@given(leaves=leaf_lists(), config=configs, data=st.data())
def test_the_layout_does_not_depend_on_the_order_of_leaves(
    leaves: list[LeafSpec], config: CheckpointConfig, data: st.DataObject
) -> None:
    """The same leaves lie in the same places, whatever order a dict had."""
    shuffled = data.draw(st.permutations(leaves))
    first, second = plan_save(leaves, config), plan_save(shuffled, config)
    assert plan_save(list(leaves), config) == first
    by_name = {t.name: t for t in table_of(first)}
    assert by_name == {t.name: t for t in table_of(second)}
    assert [b.nbytes for b in first.buckets] == [b.nbytes for b in second.buckets]
    assert [contents(first, b.index) for b in first.buckets] == [
        contents(second, b.index) for b in second.buckets
    ]


def test_the_plan_is_the_same_in_every_process() -> None:
    """No hash seed changes it."""
    program = """if True:
        from ckptio.plan.save import plan_save
        from ckptio.shards import LeafSpec
        from ckptio.config import CheckpointConfig, KiB
        config = CheckpointConfig(bucket_nbytes=64 * KiB)
        names = sorted({f"layer{i}.weight" for i in range(60)})
        print(plan_save([LeafSpec(n, "float32", (len(n), 99)) for n in names], config))
    """
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


@given(leaves=leaf_lists(), bucket=st.integers(1, 1 << 18))
def test_buckets_are_filled_evenly(leaves: list[LeafSpec], bucket: int) -> None:
    """They differ by less than the largest leaf that shares one; large leaves are alone."""
    packed = pack_buckets(leaves, bucket)
    assert sorted(i for members in packed for i in members) == list(range(len(leaves)))
    sizes = [sum(leaves[i].nbytes for i in members) for members in packed]
    assert sizes == sorted(sizes, reverse=True)
    shared = [
        sum(leaves[i].nbytes for i in members)
        for members in packed
        if not any(leaves[i].nbytes >= bucket for i in members)
    ]
    for members in packed:
        if any(leaves[i].nbytes >= bucket for i in members):
            assert len(members) == 1
    if shared:
        largest = max(leaf.nbytes for leaf in leaves if leaf.nbytes < bucket)
        assert max(shared) - min(shared) <= largest
        assert max(shared) <= bucket + largest


def test_no_leaves_make_no_buckets() -> None:
    """A state without tensors has no data files."""
    plan = plan_save([], SMALL)
    assert plan.buckets == ()
    assert plan.nbytes == plan.num_tensors == 0
    assert table_of(plan) == []


def test_leaves_without_bytes_still_have_a_place() -> None:
    """Empty tensors are in a header and in the manifest, as others are."""
    plan = plan_save([LeafSpec("a", "float32", (0, 4)), LeafSpec("b", "bool", (0,))], SMALL)
    assert len(plan.buckets) == 1
    assert plan.nbytes == PAGE_NBYTES
    assert [t.name for t in table_of(plan)] == ["a", "b"]


def test_a_large_leaf_is_cut_for_several_writers() -> None:
    """A single huge tensor has a bucket of its own, in many segments."""
    plan = plan_save([LeafSpec("w", "uint8", (1 << 20,))], SMALL)
    (bucket,) = plan.buckets
    assert len(bucket.segments) == 17
    assert sum(s.nbytes for s in bucket.segments) == (1 << 20) + PAGE_NBYTES


def test_a_header_longer_than_a_slab_is_cut_too() -> None:
    """Many long names fill several segments before the data begins."""
    leaves = [LeafSpec(f"{i}" * 90, "uint8", (1,)) for i in range(1000)]
    plan = plan_save(leaves, SMALL)
    (bucket,) = plan.buckets
    assert [len(s.header) for s in bucket.segments[:2]] == [SMALL.slab_nbytes] * 2


def test_a_header_no_reader_takes_is_refused() -> None:
    """The way out is in the message."""
    with pytest.raises(FormatError, match="lower bucket_nbytes"):
        plan_save([LeafSpec("n" * MAX_HEADER_NBYTES, "uint8", (1,))], SMALL)
