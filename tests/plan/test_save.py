from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptio.config import PAGE_NBYTES, CheckpointConfig, KiB
from ckptio.errors import FormatError, PlanError
from ckptio.format.bucket import MAX_HEADER_NBYTES, decode_header, header_nbytes
from ckptio.format.manifest import TensorEntry
from ckptio.layout import DTYPES
from ckptio.plan.job import plan_job
from ckptio.plan.save import SavePlan, pack_buckets, plan_save
from ckptio.shards import LeafSpec, Part
from tests.rig import SMALL

if TYPE_CHECKING:
    import pathlib

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


@example(
    leaves=[
        LeafSpec("odd", "uint8", (4097,)),
        LeafSpec("page", "uint8", (4096,)),
        LeafSpec("few", "float64", (2,)),
        LeafSpec("more", "int16", (9,)),
    ],
    config=SMALL,
)
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
    packed = pack_buckets(leaves, [leaf.nbytes for leaf in leaves], bucket)
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


def test_small_leaves_fill_as_many_buckets_as_their_bytes_do() -> None:
    """Several files, which several writers write at once; and none that is nearly empty."""
    leaves = [LeafSpec(f"w{i:02}", "uint8", (1000,)) for i in range(12)]
    sizes = [leaf.nbytes for leaf in leaves]
    assert [len(members) for members in pack_buckets(leaves, sizes, 4000)] == [4, 4, 4]
    assert [len(members) for members in pack_buckets(leaves, sizes, 3999)] == [3, 3, 3, 3]
    assert [len(members) for members in pack_buckets(leaves, sizes, 12_000)] == [12]


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


# parts


@st.composite
def part_lists(draw: st.DrawFn) -> tuple[list[LeafSpec], list[Part]]:
    """Draw blocks of tensors, and rows of them to write."""
    leaves = []
    parts = []
    for i, leaf in enumerate(draw(leaf_lists())):
        before = tuple(draw(st.integers(0, 3)) for _ in leaf.shape)
        after = tuple(draw(st.integers(0, 3)) for _ in leaf.shape)
        shape = tuple(map(sum, zip(before, leaf.shape, after, strict=True)))
        is_whole = shape == leaf.shape and draw(st.booleans())
        leaves.append(leaf if is_whole else LeafSpec(*leaf[:3], shape, before))
        cuts = sorted(draw(st.sets(st.integers(0, (leaf.shape or (0,))[0]), max_size=3)))
        row = leaf.nbytes // leaf.shape[0] if leaf.shape and leaf.shape[0] else 0
        for first, stop in itertools.pairwise(cuts):
            offset = (before[0] + first, *before[1:])
            parts.append(Part(i, first * row, (stop - first, *leaf.shape[1:]), offset))
        if not leaf.shape:
            parts.append(Part(i, 0, (), ()))
    return leaves, draw(st.permutations(parts))


@given(given=part_lists(), config=configs)
def test_the_bytes_of_every_part_are_written_to_its_place(
    given: tuple[list[LeafSpec], list[Part]], config: CheckpointConfig
) -> None:
    """No others are, and each is in the header under a name of its own."""
    leaves, parts = given
    plan = plan_save(leaves, config, parts)
    sizes = [LeafSpec(leaves[p.leaf].name, leaves[p.leaf].dtype, p.shape).nbytes for p in parts]
    where: dict[tuple[int, int], tuple[int, int]] = {}
    noted: dict[tuple[int, int], dict[str, list[int]]] = {}
    for bucket in plan.buckets:
        header = contents(plan, bucket.index)
        stored, notes = decode_header(header, bucket.nbytes - len(header))
        info = msgspec.json.decode(notes["DCP_SHARDING_INFO"])
        assert set(info) == {tensor.name for tensor in stored}
        noted |= {(bucket.index, len(header) + t.start): info[t.name] for t in stored if t.nbytes}
        for segment in bucket.segments:
            for offset, leaf, at, nbytes in segment.pieces:
                for k in range(nbytes):
                    where[leaf, at + k] = (bucket.index, segment.start + offset + k)
    expected = {
        (part.leaf, part.start + k): (bucket, start + k)
        for part, nbytes, (bucket, start) in zip(parts, sizes, plan.places, strict=True)
        for k in range(nbytes)
    }
    assert where == expected
    assert plan.num_tensors == len({part.leaf for part in parts})
    for part, nbytes, place in zip(parts, sizes, plan.places, strict=True):
        spec = leaves[part.leaf]
        inner = DTYPES[spec.dtype].inner
        note = {"saved_offsets": [*part.global_offset, *(0 for _ in inner)]}
        if part.shape != (spec.global_shape or spec.shape):
            note["global_shape"] = [*(spec.global_shape or spec.shape), *inner]
        assert not nbytes or noted[place] == note


@given(given=part_lists(), config=configs, data=st.data())
def test_the_layout_does_not_depend_on_the_order_of_parts(
    given: tuple[list[LeafSpec], list[Part]], config: CheckpointConfig, data: st.DataObject
) -> None:
    """The same parts lie in the same places."""
    leaves, parts = given
    parts = [part for part in parts if 0 not in part.shape]
    order = data.draw(st.permutations(range(len(parts))))
    plan = plan_save(leaves, config, parts)
    again = plan_save(leaves, config, [parts[i] for i in order])
    assert again.buckets == plan.buckets
    assert again.places == tuple(plan.places[i] for i in order)


@given(leaves=leaf_lists(), config=configs)
def test_whole_leaves_lie_as_without_parts(
    leaves: list[LeafSpec], config: CheckpointConfig
) -> None:
    """Only the notes in the headers differ."""
    parts = [Part(i, 0, leaf.shape, (0,) * len(leaf.shape)) for i, leaf in enumerate(leaves)]
    alone, together = plan_save(leaves, config), plan_save(leaves, config, parts)
    for one, other in zip(alone.buckets, together.buckets, strict=True):
        headers = [contents(plan, one.index) for plan in (alone, together)]
        data = [
            decode_header(header, bucket.nbytes - len(header))[0]
            for header, bucket in zip(headers, (one, other), strict=True)
        ]
        assert data[0] == data[1]


def names_in(plan: SavePlan) -> set[str]:
    header = contents(plan, 0)
    return {t.name for t in decode_header(header, plan.buckets[0].nbytes - len(header))[0]}


def test_a_part_has_the_name_of_its_tensor_if_it_is_alone() -> None:
    """And else its offset behind it, in a way that no other name is taken."""
    leaves = [
        LeafSpec("w", "uint8", (4, 2), (8, 2), (4, 0)),
        LeafSpec("b", "uint8", (4,), (8,), (4,)),
        LeafSpec("w@6,0", "uint8", (1,)),
    ]
    parts = [
        Part(0, 0, (2, 2), (4, 0)), Part(0, 4, (2, 2), (6, 0)), Part(1, 0, (4,), (4,)),
        Part(2, 0, (1,), (0,)),
    ]  # fmt: skip
    assert names_in(plan_save(leaves, SMALL, parts)) == {"w@4,0", "w@@6,0", "b", "w@6,0"}
    assert names_in(plan_save(leaves, SMALL, parts[:1])) == {"w"}
    leaves[1] = leaves[0]._replace(name="w@")
    parts[2:3] = [part._replace(leaf=1) for part in parts[:2]]
    assert names_in(plan_save(leaves, SMALL, parts)) == {
        "w@4,0", "w@@6,0", "w@@4,0", "w@@@6,0", "w@6,0",
    }  # fmt: skip


def test_a_shard_is_not_saved_alone() -> None:
    """Nobody would miss the rest of it until it is loaded."""
    with pytest.raises(PlanError, match="save it from all ranks"):
        plan_save([LeafSpec("w", "uint8", (4,), (8,), (0,))], SMALL)
    assert plan_save([LeafSpec("w", "uint8", (4,), (4,), (0,))], SMALL).num_tensors == 1


def test_no_parts_make_no_buckets() -> None:
    """A rank whose blocks others write has no data files."""
    plan = plan_save([LeafSpec("w", "uint8", (4,))], SMALL, [])
    assert (plan.buckets, plan.places, plan.num_tensors) == ((), (), 0)


def test_torch_puts_sharded_buckets_together(tmp_path: pathlib.Path) -> None:
    """Its own tool makes whole tensors of the data files of many ranks."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    consolidate = pytest.importorskip("torch.distributed.checkpoint._consolidate_hf_safetensors")
    load_file = pytest.importorskip("safetensors.torch").load_file
    state = {
        "w": torch.arange(60, dtype=torch.float32).reshape(12, 5),
        "h": torch.arange(24, dtype=torch.bfloat16).reshape(2, 12),
        "norm": torch.arange(7, dtype=torch.float64),
    }
    world = [
        [
            LeafSpec("w", "float32", (4, 5), (12, 5), (4 * rank, 0)),
            LeafSpec("h", "bfloat16", (2, 4), (2, 12), (0, 4 * rank)),
            LeafSpec("norm", "float64", (7,)),
        ]
        for rank in range(3)
    ]
    job = plan_job(world)
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    for rank, (leaves, assigned) in enumerate(zip(world, job.assignments, strict=True)):
        blocks = [
            state[leaf.name][
                tuple(
                    slice(at, at + num)
                    for at, num in zip(
                        leaf.global_offset or (0,) * len(leaf.shape), leaf.shape, strict=True
                    )
                )
            ]
            .contiguous().view(torch.uint8).flatten().numpy().tobytes()
            for leaf in leaves
        ]  # fmt: skip
        plan = plan_save(leaves, SMALL, assigned.parts(leaves))
        for bucket in plan.buckets:
            data = bytearray()
            for segment in bucket.segments:
                data += segment.header
                for _, leaf, at, nbytes in segment.pieces:
                    data += blocks[leaf][at : at + nbytes]
            (tmp_path / "in" / f"{rank}-{bucket.index}.safetensors").write_bytes(data)
    consolidate.consolidate_safetensors_files(
        str(tmp_path / "in"), str(tmp_path / "out"), dict.fromkeys(state, 1)
    )
    (out,) = (tmp_path / "out").glob("*.safetensors")
    found = load_file(out)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
