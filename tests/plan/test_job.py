from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.config import KiB, MiB
from ckptio.errors import PlanError
from ckptio.format.compose import encode_manifest
from ckptio.format.manifest import TensorEntry, decode_manifest
from ckptio.layout import DTYPES
from ckptio.plan.assign import Assignment
from ckptio.plan.job import JobPlan, merge_tables, plan_job
from ckptio.shards import LeafSpec, Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.config import Replicate

World = list[list[LeafSpec]]
SMALL_PART = 64
#: Of few elements that have more bytes than `LEAST_PART_NBYTES`. Replicas of less go to the
#: lowest rank; these are dealt to all, and cut.
LARGE = [(5000,), (3, 40, 50), (100, 60)]


def cuts_of(extent: int, num: int) -> list[tuple[int, int]]:
    """Cut a dimension as DTensor does: equal pieces, then a smaller one, then none."""
    step = -(-extent // num)
    return [(min(i * step, extent), max(0, min(step, extent - i * step))) for i in range(num)]


def shards(name: str, dtype: str, shape: tuple[int, ...], grid: Sequence[int]) -> list[LeafSpec]:
    """Cut a tensor into a grid of blocks, row by row."""
    edges = [cuts_of(extent, num) for extent, num in zip(shape, grid, strict=True)]
    return [
        LeafSpec(name, dtype, tuple(n for _, n in cell), shape, tuple(at for at, _ in cell))
        for cell in itertools.product(*edges)
    ]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw ranks with tensors that are whole, cut, replicated, or some of each."""
    num_ranks = draw(st.integers(1, 6))
    world: World = [[] for _ in range(num_ranks)]
    for i in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(["float32", "uint8", "complex128", "bfloat16"]))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        grid = [draw(st.integers(1, 3)) for _ in shape]
        if draw(st.booleans()):
            dtype, shape = "complex128", draw(st.sampled_from(LARGE))
            grid = [1] * len(shape)
        blocks = shards(f"t{i}", dtype, shape, grid)
        if draw(st.booleans()) and math.prod(grid) == 1:
            blocks = [LeafSpec(f"t{i}", dtype, shape)]
        for block in blocks:
            holders = draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))
            for rank in holders:
                world[rank].append(block)
    return world


def parts_of(world: World, plan: JobPlan) -> list[tuple[Part, ...]]:
    return [assigned.parts(specs) for assigned, specs in zip(plan.assignments, world, strict=True)]


def elements(offset: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    ranges = (range(at, at + n) for at, n in zip(offset, shape, strict=True))
    return list(itertools.product(*ranges))


def check_plan(world: World, plan: JobPlan) -> dict[tuple[str, tuple[int, ...]], list[int]]:
    """Check that parts are what they say, and give the ranks that write each element."""
    writers: defaultdict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, parts in enumerate(parts_of(world, plan)):
        written = 0
        for part in parts:
            leaf = world[rank][part.leaf]
            itemsize = DTYPES[leaf.dtype].itemsize
            base = leaf.global_offset or (0,) * len(leaf.shape)
            inside = elements(base, leaf.shape)
            held = elements(part.global_offset, part.shape)
            first, rest = divmod(part.start, itemsize)
            assert held
            assert rest == 0
            assert held == inside[first : first + len(held)]  # a run of the block's bytes
            written += len(held) * itemsize
            for element in held:
                writers[leaf.name, element].append(rank)
        assert written == plan.written_nbytes[rank]
    return writers


def check_tensors(world: World, plan: JobPlan) -> None:
    """Check that tensors say where their elements are, by name."""
    parts = parts_of(world, plan)
    names = {spec.name for specs in world for spec in specs}
    assert [tensor.name for tensor in plan.tensors] == sorted(names)
    referred: Counter[tuple[int, int]] = Counter()
    for tensor in plan.tensors:
        seen: list[tuple[int, ...]] = []
        for box, holders in zip(tensor.boxes, tensor.holders, strict=True):
            seen += elements(*box)
            referred.update(holders)
            for rank, index in holders:
                part = parts[rank][index]
                assert world[rank][part.leaf].name == tensor.name
                assert (part.global_offset, part.shape) == box
        assert sorted(seen) == elements((0,) * len(tensor.shape), tensor.shape)
    assert referred == {(r, i): 1 for r, taken in enumerate(parts) for i in range(len(taken))}


@given(world=worlds(), min_part=st.sampled_from([1, 16, SMALL_PART, MiB]))
def test_every_element_is_written_exactly_once(world: World, min_part: int) -> None:
    """By a rank that holds it, whatever is cut, replicated or empty."""
    plan = plan_job(world, min_part_nbytes=min_part)
    writers = check_plan(world, plan)
    check_tensors(world, plan)
    assert all(len(ranks) == 1 for ranks in writers.values())
    assert len(writers) == sum(math.prod(tensor.shape) for tensor in plan.tensors)


@given(world=worlds(), limit=st.sampled_from([1, 40, 400, MiB]))
def test_local_replicas_are_written_by_every_holder(world: World, limit: int) -> None:
    """Once each, up to the limit; above it once in all."""
    plan = plan_job(world, replicate="local", local_nbytes=limit, min_part_nbytes=SMALL_PART)
    writers = check_plan(world, plan)
    check_tensors(world, plan)
    for (name, element), ranks in writers.items():
        holders = {
            rank: block
            for rank, specs in enumerate(world)
            for block in specs
            if block.name == name
            and all(
                at <= index < at + extent
                for index, at, extent in zip(
                    element, block.global_offset or (0,) * len(element), block.shape, strict=True
                )
            )
        }
        is_small = next(iter(holders.values())).nbytes <= limit
        assert sorted(ranks) == sorted(holders) if is_small else len(ranks) == 1


@given(world=worlds(), data=st.data())
def test_the_plan_does_not_depend_on_the_order_of_leaves(world: World, data: st.DataObject) -> None:
    """A rank that lists its blocks in another order writes the same in the same order."""
    orders = [data.draw(st.permutations(range(len(specs)))) for specs in world]
    shuffled = [[specs[i] for i in order] for specs, order in zip(world, orders, strict=True)]
    plan = plan_job(world, min_part_nbytes=SMALL_PART)
    again = plan_job(shuffled, min_part_nbytes=SMALL_PART)
    assert again.tensors == plan.tensors
    assert again.written_nbytes == plan.written_nbytes
    for parts, others, order in zip(
        parts_of(world, plan), parts_of(shuffled, again), orders, strict=True
    ):
        assert parts == tuple(part._replace(leaf=order[part.leaf]) for part in others)


def test_the_plan_is_the_same_in_every_process() -> None:
    """No hash seed changes it."""
    program = """if True:
        from ckptio.plan.job import plan_job
        from ckptio.shards import LeafSpec
        names = [f"layer{i}.weight" for i in range(40)]
        world = [
            [LeafSpec(n, "float32", (len(n), 99 + i % 7)) for i, n in enumerate(names)]
            + [LeafSpec(n + ".cut", "uint8", (3, 5), (12, 5), (3 * (r % 4), 0)) for n in names]
            for r in range(8)
        ]
        print(plan_job(world, min_part_nbytes=1000, replicate="local", local_nbytes=4000))
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


def test_no_ranks_and_empty_ranks_have_empty_plans() -> None:
    """A rank without tensors takes part, and writes nothing."""
    assert plan_job([]).tensors == ()
    plan = plan_job([[], [LeafSpec("a", "uint8", (3,))], []])
    assert [len(assigned.leaves) for assigned in plan.assignments] == [0, 1, 0]
    assert plan.written_nbytes == (0, 3, 0)


def test_a_tensor_without_elements_is_written_by_nobody() -> None:
    """It has its entry all the same."""
    world = [[LeafSpec("a", "float32", (0, 4)), LeafSpec("b", "uint8", (1,))] for _ in range(2)]
    plan = plan_job(world)
    assert [(t.name, t.shape, len(t.boxes)) for t in plan.tensors] == [
        ("a", (0, 4), 0), ("b", (1,), 1),
    ]  # fmt: skip


def test_blocks_without_elements_need_no_place() -> None:
    """A rank that holds nothing of a tensor may say so in any way."""
    world = [
        [LeafSpec("w", "uint8", (5, 2)), LeafSpec("s", "uint8", ())],
        [
            LeafSpec("w", "uint8", (0, 0), (5, 2), (5, 0)),
            LeafSpec("s", "uint8", (0,), (), ()),
        ],
    ]
    plan = plan_job(world)
    assert plan.written_nbytes == (11, 0)


# what is refused


def block(
    at: int, num: int, *, dtype: str = "float32", shape: tuple[int, ...] = (8, 2),
    replica: int | None = None,
) -> LeafSpec:  # fmt: skip
    """Give rows `[at, at + num)` of a tensor."""
    return LeafSpec("w", dtype, (num, 2), shape, (at, 0), replica)


@pytest.mark.parametrize(
    ("world", "found"),
    [
        ([[block(0, 4)], [block(4, 4, dtype="float16")]], "float32' on rank 0, 'float16' on"),
        ([[block(0, 8, dtype="qint8")]], "element type 'qint8', which cannot be stored"),
        ([[block(0, 4)], [block(4, 4, shape=(9, 2))]], r"shape: \(8, 2\) on rank 0, \(9, 2\)"),
        ([[block(0, 8)], [LeafSpec("w", "float32", (4, 2))]], "global shape: .* another name"),
        ([[block(0, 3)], [block(4, 4)]], r"gap at \(3, 0\)"),
        ([[block(0, 4)]], r"gap at \(4, 0\)"),
        ([[block(0, 0)], [block(0, 0)]], r"gap at \(0, 0\)"),
        ([[block(0, 5)], [block(4, 4)]], "on rank 0 and the block .* on rank 1 overlap"),
        ([[block(0, 8)], [block(0, 4)]], "overlap and are not equal"),
        ([[block(0, 4)], [block(4, 5)]], r"\(4, 0\) on rank 1 does not lie in shape \(8, 2\)"),
        ([[block(-1, 9)]], "does not lie in"),
        ([[LeafSpec("w", "uint8", (8,), (8, 2), (0, 0))]], "does not lie in"),
        ([[LeafSpec("w", "uint8", (8, 2), (8, 2), (0,))]], "does not lie in"),
        ([[block(0, 8), block(0, 8)]], "twice on a rank"),
        ([[block(0, 8)], [block(0, 8), block(0, 8)]], "on rank 1 is there twice"),
        ([[block(0, 8, replica=0)], [block(0, 8, replica=0)]], "on ranks 0-1 is the main replica"),
        ([[block(0, 8, replica=1)], [block(0, 8, replica=2)]], "ranks 0-1 has no main replica"),
        ([[block(0, 8, replica=0)], [block(0, 8, replica=0), block(8, 0)]], "is the main replica"),
    ],
)  # fmt: skip
def test_blocks_that_make_no_tensor_are_refused(world: World, found: str) -> None:
    """The message names the tensor, the ranks, and what to do."""
    with pytest.raises(PlanError, match=found) as caught:
        plan_job(world)
    assert "'w'" in str(caught.value)
    assert "; " in str(caught.value)


def test_a_tiling_that_takes_too_long_to_check_is_refused() -> None:
    """One that comes apart in as many steps as it has blocks: no job's is like that."""
    num = 3000
    world = [
        [
            LeafSpec("w", "uint8", (1, num - i) if i % 2 else (num - i, 1), (num, num), (i, i))
            for i in range(num - 1)
        ]
    ]
    with pytest.raises(PlanError, match="'w' is cut in a way that takes too long to check, near"):
        plan_job(world)


def test_some_of_many_values_that_differ_are_named() -> None:
    """Those of the lowest ranks."""
    world = [[block(0, 8, dtype=dtype)] for dtype in ("uint8", "int8", "int16", "int32", "int8")]
    with pytest.raises(PlanError) as caught:
        plan_job(world)
    named = "type: 'uint8' on rank 0, 'int8' on ranks 1, 4, 'int16' on rank 2; make"
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "replicas", [(0, 1), (1, 0), (0, None), (None, None), (None, 1), (0, 7), (None, 0)]
)
def test_one_main_replica_is_enough(replicas: tuple[int | None, int | None]) -> None:
    """Who does not say which replica it has may have any."""
    plan = plan_job([[block(0, 8, replica=replica)] for replica in replicas])
    assert sum(plan.written_nbytes) == 64


def test_a_whole_tensor_is_a_replica_of_a_block_that_is_all_of_it() -> None:
    """A rank need not say that its block is the tensor."""
    plan = plan_job([[block(0, 8)], [LeafSpec("w", "float32", (8, 2))]])
    assert sum(plan.written_nbytes) == 64
    assert len(plan.tensors[0].boxes) == 1


def test_all_problems_are_listed() -> None:
    """Up to ten of them, and how many there are."""
    world = [[LeafSpec(f"t{i:02}", "float32", (2,), (4,), (0,)) for i in range(12)]]
    with pytest.raises(PlanError) as caught:
        plan_job(world)
    message = str(caught.value)
    assert "12 problems" in message
    assert all(f"'t{i:02}'" in message for i in range(10))
    assert "'t10'" not in message
    assert "and 2 more" in message
    with pytest.raises(PlanError, match=r"'t09'[^;]*; [^;]*$"):
        plan_job([world[0][:10]])
    with pytest.raises(PlanError, match=r"^the ranks do not hold a whole state: 't00'"):
        plan_job([world[0][:1]])


@given(world=worlds(), data=st.data())
def test_a_missing_or_moved_block_is_refused(world: World, data: st.DataObject) -> None:
    """Whichever one it is: no element is left out and none is taken for another."""
    held = Counter((spec.name, spec.shape, spec.global_offset) for specs in world for spec in specs)
    choices = [
        (rank, i)
        for rank, specs in enumerate(world)
        for i, spec in enumerate(specs)
        if spec.nbytes and spec.shape
        and (held[spec.name, spec.shape, spec.global_offset] == 1 or spec.global_shape is None)
    ]  # fmt: skip
    if not choices:
        return
    rank, i = data.draw(st.sampled_from(choices))
    spec = world[rank].pop(i)
    shape = spec.global_shape or spec.shape
    offset = spec.global_offset or (0,) * len(spec.shape)
    dim = data.draw(st.integers(0, len(offset) - 1))
    others = [s for specs in world for s in specs if s.name == spec.name]
    if others and held[spec.name, spec.shape, spec.global_offset] == 1:
        with pytest.raises(PlanError, match="gap"):
            plan_job(world)
    moved = (*offset[:dim], offset[dim] + 1, *offset[dim + 1 :])
    world[rank].insert(i, spec._replace(global_shape=shape, global_offset=moved))
    with pytest.raises(PlanError):
        plan_job(world)


# balance


def imbalance(plan: JobPlan) -> float:
    loads = plan.written_nbytes
    return max(loads) / (sum(loads) / len(loads))


def bound(world: World, plan: JobPlan) -> float:
    """Say below what the highest load cannot be: the mean, or what one rank alone holds."""
    held: defaultdict[tuple[str, tuple[int, ...] | None], list[int]] = defaultdict(list)
    nbytes = {}
    for rank, specs in enumerate(world):
        for spec in specs:
            held[spec.name, spec.global_offset].append(rank)
            nbytes[spec.name, spec.global_offset] = spec.nbytes
    forced = [0] * len(world)
    for key, ranks in held.items():
        if len(ranks) == 1:
            forced[ranks[0]] += nbytes[key]
    return max(sum(plan.written_nbytes) / len(world), *forced)


def transformer(tp: int, dp: int, *, layers: int = 8, width: int = 1024) -> World:
    """Cut weights over `tp` ranks, hold norms on all of them, all of it `dp` times."""
    world: World = []
    for rank in range(tp * dp):
        k = rank % tp
        specs = []
        for layer in range(layers):
            for name, shape, dim in (
                ("attention.qkv", (3 * width, width), 0), ("attention.out", (width, width), 1),
                ("mlp.up", (4 * width, width), 0), ("mlp.down", (width, 4 * width), 1),
            ):  # fmt: skip
                cut = [1, 1]
                cut[dim] = tp
                specs.append(shards(f"layers.{layer}.{name}", "bfloat16", shape, cut)[k])
            specs += [
                LeafSpec(f"layers.{layer}.{name}.weight", "bfloat16", (width,))
                for name in ("norm1", "norm2")
            ]
        specs += shards("embedding", "bfloat16", (50_000, width), (tp, 1))[k : k + 1]
        world.append(specs)
    return world


def test_tensor_and_data_parallel_ranks_write_equally_much() -> None:
    """TP 4 by DP 8, norms on all 32 ranks."""
    plan = plan_job(transformer(4, 8))
    assert imbalance(plan) <= 1.10


@pytest.mark.parametrize("tp", [1, 3, 8])
@pytest.mark.parametrize("dp", [2, 5, 16])
def test_any_mesh_writes_equally_much(tp: int, dp: int) -> None:
    """Whether extents divide by it or not."""
    world = transformer(tp, dp)
    plan = plan_job(world)
    assert max(plan.written_nbytes) <= 1.10 * bound(world, plan)


def test_fully_sharded_ranks_write_what_they_hold() -> None:
    """There is nothing to choose, and nothing is cut."""
    world: World = [[] for _ in range(8)]
    for i in range(20):
        for rank, spec in enumerate(shards(f"t{i}", "float32", (1000, 64), (8, 1))):
            world[rank].append(spec)
    plan = plan_job(world)
    assert imbalance(plan) <= 1.10
    assert not any(assigned.cuts for assigned in plan.assignments)
    assert plan_job(world, replicate="local") == plan


def test_a_huge_replica_is_cut_between_its_holders() -> None:
    """DDP with one embedding that is most of the model: by rows, none of them small."""
    specs = [LeafSpec("embedding", "bfloat16", (128_000, 4096))]
    specs += [LeafSpec(f"layers.{i}", "bfloat16", (1024, 1024)) for i in range(10)]
    plan = plan_job([specs] * 8)
    assert imbalance(plan) <= 1.10
    (embedding,) = [tensor for tensor in plan.tensors if tensor.name == "embedding"]
    assert len(embedding.boxes) <= 8
    assert all(shape[1] == 4096 for _, shape in embedding.boxes)
    assert {len(tensor.boxes) for tensor in plan.tensors if tensor is not embedding} == {1}


def test_a_replica_with_few_huge_rows_is_cut_inside_of_them() -> None:
    """Stacked experts: three rows for eight ranks."""
    plan = plan_job([[LeafSpec("experts", "bfloat16", (3, 4096, 1024))]] * 8)
    assert imbalance(plan) <= 1.10
    (tensor,) = plan.tensors
    assert all(math.prod(shape) * 2 >= MiB for _, shape in tensor.boxes)


def test_a_share_from_inside_a_row_to_inside_another_is_several_parts() -> None:
    """Each of them begins where its own bytes do."""
    world = [[LeafSpec("experts", "complex128", (3, 40, 50))]] * 2
    plan = plan_job(world, min_part_nbytes=16)
    check_plan(world, plan)
    check_tensors(world, plan)
    assert [len(assigned.cuts) for assigned in plan.assignments] == [2, 2]


def test_small_replicas_are_not_cut() -> None:
    """Bytes that take no time to write are not worth a chunk more."""
    plan = plan_job([[LeafSpec("w", "uint8", (100 * KiB, 1))]] * 4)
    assert sorted(plan.written_nbytes) == [0, 0, 0, 100 * KiB]
    assert len(plan.tensors[0].boxes) == 1
    assert plan_job([[LeafSpec("w", "bool", ())]] * 4).written_nbytes == (1, 0, 0, 0)


def test_blocks_that_are_no_grid_are_not_cut() -> None:
    """A tiling that was checked stays as it was."""
    k = 100_000
    ragged = [((0, 0), (4 * k, 1)), ((4 * k, 0), (4 * k, 1)), ((0, 1), (3 * k, 1)),
              ((3 * k, 1), (5 * k, 1))]  # fmt: skip
    specs = [LeafSpec("w", "uint8", local, (8 * k, 2), offset) for offset, local in ragged]
    plan = plan_job([specs] * 3, min_part_nbytes=1)
    assert len(plan.tensors[0].boxes) == 4


def test_blocks_without_elements_do_not_keep_others_from_being_cut() -> None:
    """As of a tensor with fewer rows than there are ranks to shard it over."""
    rows = shards("w", "uint8", (2, 8 * MiB), (3, 1))
    assert rows[2].nbytes == 0
    plan = plan_job([[rows[rank % 3]] for rank in range(6)])
    assert plan.written_nbytes == (4 * MiB, 4 * MiB, 0, 4 * MiB, 4 * MiB, 0)


def test_a_replica_beside_what_one_rank_alone_has_is_cut() -> None:
    """Of one tensor, each block is what it is."""
    alone, shared = shards("w", "uint8", (16, MiB), (2, 1))
    plan = plan_job([[alone], [shared], [shared]])
    assert plan.written_nbytes == (8 * MiB, 4 * MiB, 4 * MiB)


def test_a_tensor_may_have_blocks_that_are_cut_and_others_with_copies() -> None:
    """Only what is small is copied."""
    world = [
        [
            LeafSpec("w", "complex128", (5000,), (5010,), (0,)),
            LeafSpec("w", "complex128", (10,), (5010,), (5000,)),
        ]
    ] * 2
    plan = plan_job(world, replicate="local", local_nbytes=1000, min_part_nbytes=16)
    check_plan(world, plan)
    check_tensors(world, plan)
    assert [len(held) for held in plan.tensors[0].holders] == [1, 1, 2]


def test_equal_ranks_of_different_hosts_write_first() -> None:
    """Four tensors for eight ranks on two hosts: two on each host."""
    hosts = ["a"] * 4 + ["b"] * 4
    nbytes = 100_000
    world = [[LeafSpec(f"t{i}", "uint8", (nbytes,)) for i in range(4)]] * 8
    plan = plan_job(world, hosts=hosts)
    assert plan.written_nbytes == (nbytes, nbytes, 0, 0, nbytes, nbytes, 0, 0)
    with pytest.raises(PlanError, match="8 ranks have 2 hosts"):
        plan_job(world, hosts=["a", "b"])


def test_local_replicas_have_their_main_place_on_different_ranks() -> None:
    """So that a load at another size does not read all of them from one file."""
    plan = plan_job(
        [[LeafSpec(f"norm{i}", "float32", (64,)) for i in range(16)]] * 4, replicate="local"
    )
    mains = Counter(tensor.ranks[0] for tensor in plan.tensors)
    assert mains == {0: 4, 1: 4, 2: 4, 3: 4}
    assert {len(tensor.holders[0]) for tensor in plan.tensors} == {4}
    few = [LeafSpec(f"norm{i}", "float32", (64,)) for i in range(2)]
    plan = plan_job([few] * 4, hosts=["a", "a", "b", "b"], replicate="local")
    assert [tensor.ranks[0] for tensor in plan.tensors] == [0, 2]


# the manifest


@given(world=worlds(), replicate=st.sampled_from(["once", "local"]), data=st.data())
def test_the_merged_table_is_a_manifest(
    world: World, replicate: Replicate, data: st.DataObject
) -> None:
    """Every part is where its rank put it, and the strict parser takes it all."""
    plan = plan_job(world, replicate=replicate, local_nbytes=100, min_part_nbytes=SMALL_PART)
    places, files, num_files = [], [], []
    for rank, parts in enumerate(parts_of(world, plan)):
        sizes = [0] * data.draw(st.integers(1, 3))
        taken = []
        for part in parts:
            bucket = data.draw(st.integers(0, len(sizes) - 1))
            itemsize = DTYPES[world[rank][part.leaf].dtype].itemsize
            start = -(-sizes[bucket] // 16) * 16
            taken.append((bucket, start))
            sizes[bucket] = start + math.prod(part.shape) * itemsize
        places.append(taken)
        num_files.append(len(sizes))
        files += [
            (f"data-{rank}-{k}", nbytes, [0] * -(-nbytes // 4096), rank)
            for k, nbytes in enumerate(sizes)
        ]
    table = merge_tables(plan, places, num_files)
    manifest = decode_manifest(
        encode_manifest(
            writer="1", save_id="0" * 32, created="", block_nbytes=4096, files=files,
            tensors=table, tree=b"0", hosts=["n"] * len(world),
        )
    )  # fmt: skip
    bases = [0, *itertools.accumulate(num_files)]
    for entry, tensor in zip(manifest.tensors, plan.tensors, strict=True):
        assert (entry.name, entry.dtype, entry.shape) == (tensor.name, tensor.dtype, tensor.shape)
        for found, box, holders in zip(entry.chunks, tensor.boxes, tensor.holders, strict=True):
            assert (found.global_offset or (0,) * len(entry.shape)) == box[0]
            assert (found.local_shape or entry.shape) == box[1]
            expected = [
                (bases[rank] + places[rank][index][0], places[rank][index][1])
                for rank, index in holders
            ]
            assert [(found.file, found.start), *found.copies] == expected


def test_a_whole_tensor_has_a_short_chunk() -> None:
    """As one rank alone writes it."""
    plan = plan_job([[LeafSpec("a", "uint8", (4,))], [LeafSpec("b", "uint8", (4,))]])
    table = merge_tables(plan, [[(0, 8)], [(1, 16)]], [1, 2])
    assert msgspec.json.decode(table) == [
        ["a", "uint8", [4], [[0, 8]]],
        ["b", "uint8", [4], [[2, 16]]],
    ]
    assert msgspec.json.decode(table, type=list[TensorEntry])[1].chunks[0].file == 2


def test_chunks_have_copies_and_boxes_where_there_are_any() -> None:
    """A tensor that is one chunk needs no box, and a chunk that one rank has no list."""
    halves = shards("cut", "uint8", (4,), (2,))
    world = [[LeafSpec("a", "uint8", (4,)), *halves], [LeafSpec("a", "uint8", (4,)), halves[0]]]
    plan = plan_job(world, replicate="local", local_nbytes=4)
    table = merge_tables(plan, [[(0, 8), (0, 16), (0, 24)], [(0, 8), (0, 16)]], [1, 1])
    assert msgspec.json.decode(table) == [
        ["a", "uint8", [4], [[0, 8, None, None, [[1, 8]]]]],
        ["cut", "uint8", [4], [[1, 16, [0], [2], [[0, 16]]], [0, 24, [2], [2]]]],
    ]


@pytest.mark.parametrize(
    ("places", "num_files"),
    [
        ([[(0, 0)]], [1]), ([[(0, 0)], []], [1]), ([[], []], [1, 0]),
        ([[(0, 0), (0, 0)], []], [1, 0]), ([[(1, 0)], []], [1, 0]), ([[(-1, 0)], []], [1, 0]),
    ],
)  # fmt: skip
def test_places_that_do_not_fit_the_plan_are_refused(
    places: list[list[tuple[int, int]]], num_files: list[int]
) -> None:
    """A rank that wrote something else cannot be in the manifest."""
    plan = plan_job([[LeafSpec("a", "uint8", (4,))], []])
    with pytest.raises(PlanError):
        merge_tables(plan, places, num_files)


def test_an_assignment_travels_as_json() -> None:
    """A rank makes its parts of it, from the blocks it knows."""
    world = [[LeafSpec("w", "uint8", (4, 32 * KiB)), LeafSpec("b", "uint8", (3,))]] * 2
    plan = plan_job(world, min_part_nbytes=8)
    for assigned, parts in zip(plan.assignments, parts_of(world, plan), strict=True):
        sent = msgspec.json.decode(msgspec.json.encode(assigned), type=Assignment)
        assert sent == assigned
        assert sent.parts(world[0]) == parts
    assert any(assigned.cuts for assigned in plan.assignments)
    for number in (2, -1):
        with pytest.raises(PlanError, match="does not have"):
            Assignment((number,)).parts(world[0])
