from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from ckptio.config import MiB
from ckptio.errors import PlanError, StalePlanError
from ckptio.format.manifest import TensorEntry
from ckptio.layout import DTYPES
from ckptio.plan.job import JobPlan, merge_tables, plan_job
from ckptio.plan.replan_changed import plan_again
from ckptio.plan.replan_followed import Followed, replan_job
from ckptio.plan.save import plan_save
from ckptio.plan.writers import Share
from ckptio.shards import LeafSpec
from tests.plan.test_job import World, parts_of, shards, worlds
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ckptio.config import Replicate

Changes = dict[int, list[LeafSpec]]

dtypes = st.sampled_from(["float32", "uint8", "complex128", "bfloat16"])
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
seldom = st.sampled_from([False] * 9 + [True])


@st.composite
def changes(draw: st.DrawFn, world: World, number: int) -> Changes:
    """Draw what some ranks hold now: they drop, gain and alter blocks, and have new tensors."""
    changed = sorted(draw(st.sets(st.integers(0, len(world) - 1), min_size=1)))
    everything = [spec for specs in world for spec in specs]
    drops = draw(st.booleans())
    now: Changes = {}
    for rank in changed:
        held = [spec for spec in world[rank] if not drops or not draw(seldom)]
        if draw(st.booleans()) and everything:
            held += draw(st.lists(st.sampled_from(everything), max_size=3))
        if draw(seldom) and held:
            i = draw(st.integers(0, len(held) - 1))
            held[i] = held[i]._replace(dtype=draw(dtypes))
        if draw(seldom) and held:
            i = draw(st.integers(0, len(held) - 1))
            held[i] = LeafSpec(held[i].name, held[i].dtype, draw(shapes))
        now[rank] = held
    for i in range(draw(st.integers(0, 3))):
        dtype, shape = draw(dtypes), draw(shapes)
        for block in shards(
            f"n{number}.{i}", dtype, shape, [draw(st.integers(1, 3)) for _ in shape]
        ):
            for rank in draw(st.sets(st.sampled_from(changed), min_size=1)):
                now[rank].append(block)
    return {rank: draw(st.permutations(list(dict.fromkeys(held)))) for rank, held in now.items()}


def apply(world: World, changed: Changes) -> World:
    return [changed.get(rank, specs) for rank, specs in enumerate(world)]


def box_of(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))


class Disks:
    """What ranks write, a number for each byte; no two bytes of the state have the same."""

    def __init__(self, world: World) -> None:
        self.truth: dict[str, NDArray[np.int64]] = {}
        base = 0
        for spec in itertools.chain(*world):
            if spec.name not in self.truth:
                shape = (*(spec.global_shape or spec.shape), DTYPES[spec.dtype].itemsize)
                numbers = np.arange(base, base + math.prod(shape), dtype=np.int64)
                self.truth[spec.name] = numbers.reshape(shape)
                base += math.prod(shape)
        self.files: list[NDArray[np.int64]] = []
        self.places: list[tuple[tuple[int, int], ...]] = []
        self.num_files: list[int] = []

    def write(self, specs: Sequence[LeafSpec], parts: Any) -> None:
        """Write the files of the next rank, segment by segment, from its blocks."""
        plan = plan_save(specs, SMALL, parts)
        for bucket in plan.buckets:
            file = np.full(bucket.nbytes, -1, dtype=np.int64)
            for segment in bucket.segments:
                for offset, leaf, start, nbytes in segment.pieces:
                    at = segment.start + offset
                    assert (file[at : at + nbytes] == -1).all()
                    file[at : at + nbytes] = self._block(specs[leaf])[start : start + nbytes]
            self.files.append(file)
        self.places.append(plan.places)
        self.num_files.append(len(plan.buckets))

    def _block(self, spec: LeafSpec) -> NDArray[np.int64]:
        offset = spec.global_offset or (0,) * len(spec.shape)
        return self.truth[spec.name][box_of(offset, spec.shape)].ravel()

    def check(self, job: JobPlan) -> None:
        """Check that the manifest's chunks are the tensors, each byte once, copies too."""
        entries = msgspec.json.decode(
            merge_tables(job, self.places, self.num_files), type=list[TensorEntry]
        )
        assert [entry.name for entry in entries] == sorted(self.truth)
        for entry in entries:
            truth = self.truth[entry.name]
            assert (*entry.shape, DTYPES[entry.dtype].itemsize) == truth.shape
            found = np.full(truth.shape, -1, dtype=np.int64)
            for chunk in entry.chunks:
                box = box_of(
                    chunk.global_offset or (0,) * len(entry.shape), chunk.local_shape or entry.shape
                )
                assert (found[box] == -1).all()
                for file, start in ((chunk.file, chunk.start), *chunk.copies):
                    data = self.files[file][start : start + found[box].size]
                    assert np.array_equal(data, truth[box].ravel())
                found[box] = truth[box]
            assert np.array_equal(found, truth)


def check(world: World, job: JobPlan, old: Mapping[int, Any], *, may_be_idle: bool = False) -> None:
    """Check a plan for what ranks hold; `old` has the parts of those that have written.

    Of these, some may be of no use where plans differ.
    """
    disks = Disks(world)
    for rank, (assigned, specs) in enumerate(zip(job.assignments, world, strict=True)):
        parts = assigned.parts(specs)
        if rank in old:
            assert parts == old[rank]
        nbytes = sum(math.prod(p.shape) * DTYPES[specs[p.leaf].dtype].itemsize for p in parts)
        assert job.written_nbytes[rank] == nbytes
        disks.write(specs, parts)
    disks.check(job)
    referred = Counter(h for tensor in job.tensors for held in tensor.holders for h in held)
    written = {
        (rank, i): 1
        for rank, assigned in enumerate(job.assignments)
        for i in range(len(assigned.leaves))
    }
    assert referred <= Counter(written) if may_be_idle else referred == written


def replan(job: JobPlan, world: World, changed: Changes, **options: Any) -> JobPlan:
    """Change a plan that all ranks followed but those that changed."""
    others = [rank for rank in range(len(world)) if rank not in changed]
    return replan_job([Followed(job, world, others)], changed, **options)


def is_whole(world: World) -> bool:
    """Whether what ranks hold can be saved at all."""
    try:
        plan_job(world)
    except PlanError:
        return False
    return True


def is_stale(error: PlanError) -> bool:
    """Whether an error says that the same state can be saved."""
    assert isinstance(error, StalePlanError) == ("save again" in str(error))
    return isinstance(error, StalePlanError)


def has_a_plan(world: World, job: JobPlan, changed: Changes) -> bool:
    """Whether states fit together, and each chunk that was cut before has a writer left."""
    if not is_whole(apply(world, changed)):
        return False
    parts = parts_of(world, job)
    kept = {spec.name for rank, held in enumerate(world) if rank not in changed for spec in held}
    return all(
        any(
            rank not in changed
            or any(world[rank][parts[rank][i].leaf] in now for now in changed.values())
            for rank, i in held
        )
        for tensor in job.tensors
        if tensor.name in kept
        for held in tensor.holders
    )


@given(
    world=worlds(),
    replicate=st.sampled_from(["once", "local"]),
    limit=st.sampled_from([1, 40, 400, MiB]),
    min_part=st.sampled_from([1, 16, 64, MiB]),
    data=st.data(),
)
def test_what_ranks_hold_now_is_written_once_or_the_change_is_refused(
    world: World, replicate: Replicate, limit: int, min_part: int, data: st.DataObject
) -> None:
    """Others have written already, as they had to before; also where changes follow changes."""
    job = plan_job(world, replicate=replicate, local_nbytes=limit, min_part_nbytes=min_part)
    check(world, job, {})
    for number in range(3):
        changed = data.draw(changes(world, number))
        if not has_a_plan(world, job, changed):
            event("refused")
            with pytest.raises(PlanError) as caught:
                replan(job, world, changed, replicate=replicate, local_nbytes=limit)
            assert is_stale(caught.value) == is_whole(apply(world, changed))
            return
        event("planned")
        parts = parts_of(world, job)
        old = {rank: parts[rank] for rank in range(len(world)) if rank not in changed}
        job = replan(job, world, changed, replicate=replicate, local_nbytes=limit)
        world = apply(world, changed)
        check(world, job, old)


def whole(name: str, num_elements: int = 20_000, dtype: str = "float32") -> LeafSpec:
    return LeafSpec(name, dtype, (num_elements,))


def holders_of(job: JobPlan, name: str) -> list[list[int]]:
    (tensor,) = [tensor for tensor in job.tensors if tensor.name == name]
    return [[rank for rank, _ in held] for held in tensor.holders]


def test_a_block_that_was_written_whole_stays_whole() -> None:
    """A replica that another rank has now takes nothing of it: its bytes are in the file."""
    large = LeafSpec("w", "float32", (1024, 1024))
    world: World = [[whole("own0")], [whole("own1"), large]]
    job = plan_job(world)
    changed = {0: [whole("own0"), large]}
    assert len(holders_of(plan_job(apply(world, changed)), "w")) > 1
    again = replan(job, world, changed)
    assert holders_of(again, "w") == [[1]]
    check(apply(world, changed), again, {1: parts_of(world, job)[1]})


def test_a_block_that_was_cut_stays_cut() -> None:
    """Its writers write the same parts of it, though one of them has other tensors now."""
    large = LeafSpec("w", "float32", (1024, 1024))
    world: World = [[large], [large], [large]]
    job = plan_job(world)
    writers = holders_of(job, "w")
    assert len(writers) > 1
    changed = {1: [whole("new", 2 * MiB), large]}
    again = replan(job, world, changed)
    assert holders_of(again, "w") == writers
    assert holders_of(again, "new") == [[1]]
    old = parts_of(world, job)
    check(apply(world, changed), again, {0: old[0], 2: old[2]})


def test_local_replicas_stay_with_who_has_them() -> None:
    """Ranks that wrote one go on; one that lets go of it is no holder any more."""
    world: World = [[whole("norm"), whole(f"own{rank}")] for rank in range(3)]
    job = plan_job(world, replicate="local")
    old = parts_of(world, job)
    more = {2: [whole("new"), *world[2]]}
    again = replan(job, world, more, replicate="local")
    assert sorted(holders_of(again, "norm")[0]) == [0, 1, 2]
    check(apply(world, more), again, {0: old[0], 1: old[1]})
    main = holders_of(job, "norm")[0][0]
    less = {main: [whole(f"own{main}")]}
    again = replan(job, world, less, replicate="local")
    assert sorted(holders_of(again, "norm")[0]) == sorted({0, 1, 2} - {main})
    check(apply(world, less), again, {rank: old[rank] for rank in {0, 1, 2} - {main}})


def test_new_tensors_are_shared_out_as_in_a_first_plan() -> None:
    """By the same options: copies where they are wanted, hosts in turn."""
    world: World = [[whole("kept")] for _ in range(4)]
    job = plan_job(world)
    new = [whole("a"), whole("b")]
    changed = {rank: [whole("kept"), *new] for rank in (0, 1, 2)}
    hosts = ["x", "x", "y", "y"]
    once = replan(job, world, changed, hosts=hosts)
    assert sorted(holders_of(once, "a") + holders_of(once, "b")) == [[0], [2]]
    local = replan(job, world, changed, replicate="local")
    assert sorted(holders_of(local, "a")[0]) == [0, 1, 2]
    apart = replan(job, world, changed, replicate="local", local_nbytes=1)
    assert len(holders_of(apart, "a")[0]) == 1


@pytest.mark.parametrize(
    "options",
    [{"hosts": ["x", "x", "y"]}, {"replicate": "local"}, {"replicate": "local", "local_nbytes": 9}],
    ids=["hosts", "local", "small"],
)
@pytest.mark.parametrize("is_kept", [False, True], ids=["new", "uneven"])
def test_a_plan_is_made_again_by_the_same_options(
    options: dict[str, Any], *, is_kept: bool
) -> None:
    """Where there is nothing to keep, and where keeping it would be uneven."""
    large, filler = LeafSpec("w", "uint8", (600 * MiB,)), whole("filler", 1200 * MiB)
    world: World = [[large, filler], [large, filler], [large]]
    job = plan_job(world, min_part_nbytes=600 * MiB)
    now: World = [[*[large] * is_kept, whole("a"), whole("b")]] * 3
    assert plan_again(job, world, now, **options) == plan_job(now, **options)


def test_a_rank_that_changes_by_turns_is_planned_each_time() -> None:
    """A plan that was made for a change is one to change."""
    world: World = [[whole("w"), whole("own0")], [whole("w"), whole("own1")]]
    job = plan_job(world)
    for number in range(6):
        held = [whole("w"), whole("own1"), *([] if number % 2 else [whole("log")])]
        old = {0: parts_of(world, job)[0]}
        job = replan(job, world, {1: held})
        world = [world[0], held]
        check(world, job, old)


def test_tensors_without_elements_are_kept_and_new() -> None:
    """Nobody writes them, and everybody finds them."""
    world: World = [[whole("empty", 0)], [whole("w")]]
    job = plan_job(world)
    changed = {1: [whole("w"), whole("log"), whole("hollow", 0)]}
    again = replan(job, world, changed)
    assert [tensor.name for tensor in again.tensors] == ["empty", "hollow", "log", "w"]
    assert holders_of(again, "hollow") == []
    check(apply(world, changed), again, {0: ()})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (whole("w", dtype="float64"), "'w' differs in element type"),
        (whole("w", 10_000), "'w' differs in global shape"),
        (LeafSpec("w", "float32", (10,), (20_001,), (0,)), "'w' differs in global shape"),
    ],
)
@pytest.mark.parametrize("writer", [0, 1])
def test_ranks_that_disagree_are_refused(other: LeafSpec, words: str, writer: int) -> None:
    """Whether the one that changed was to write the tensor or not."""
    filler = whole("filler", 40_000)
    world: World = [[whole("w")], [whole("w")]]
    world[1 - writer].append(filler)
    job = plan_job(world)
    assert holders_of(job, "w") == [[writer]]
    with pytest.raises(PlanError, match=words) as caught:
        replan(job, world, {1: [other, *world[1][1:]]})
    assert str(caught.value).startswith("the blocks of rank 1 changed, not those of the others")
    assert not is_stale(caught.value)


def test_a_chunk_that_nobody_writes_any_more_is_refused() -> None:
    """Its other holder has let go of its tensors by then; the error says which and whose."""
    world: World = [[whole("w"), whole("own", 40_000)], [whole("w")]]
    job = plan_job(world)
    words = r"nobody writes 'w' at \(0,\) any more, which rank 1 wrote"
    with pytest.raises(StalePlanError, match=words):
        replan(job, world, {1: [whole("other")]})


def test_a_tensor_that_all_ranks_drop_is_gone() -> None:
    """Those that changed agree on what there is."""
    world: World = [[whole("w"), whole("own")], [whole("w")], [whole("x")]]
    job = plan_job(world)
    changed = {0: [whole("own")], 1: []}
    again = replan(job, world, changed)
    assert [tensor.name for tensor in again.tensors] == ["own", "x"]
    check(apply(world, changed), again, {2: parts_of(world, job)[2]})


def test_who_writes_now_takes_over_what_another_dropped() -> None:
    """Of what a rank has that did not change, and was not to write."""
    world: World = [
        [whole("w"), whole("own", 40_000)],
        [whole("w")],
        [whole("w"), whole("log", 40_000)],
    ]
    job = plan_job(world)
    assert holders_of(job, "w") == [[1]]
    changed = {1: [whole("x")], 2: [whole("w"), whole("log", 60_000)]}
    again = replan(job, world, changed)
    assert holders_of(again, "w") == [[2]]
    check(apply(world, changed), again, {0: parts_of(world, job)[0]})


def test_a_part_of_another_plan_is_nobodys_number() -> None:
    """A rank wrote by one plan, and was to write something by another."""
    world: World = [[whole("w")], [whole("w")], [whole("w"), whole("own2", 40_000)]]
    job = plan_job(world)
    assert holders_of(job, "w") == [[0]]
    before: World = [[whole("w"), whole("own0", 40_000)], *world[1:]]
    later = plan_again(plan_job(before), before, world)
    assert holders_of(later, "w") == [[1]]
    plans = [Followed(job, world, [1]), Followed(later, world, [0])]
    again = replan_job(plans, {2: [whole("w")]})
    assert holders_of(again, "w") == [[2]]
    check([world[0], world[1], [whole("w")]], again, {0: (), 1: ()})


@pytest.mark.parametrize(
    "now",
    [
        [whole("z", 1), *[whole(f"m{i}") for i in range(6)]],
        [*[whole(f"m{i}") for i in range(6)], whole("z", 1)],
        [*[whole(f"m{i}") for i in reversed(range(6))], whole("a", 180_000)],
    ],
    ids=["renamed", "at the end", "another order"],
)
def test_a_list_in_another_order_keeps_its_writers(now: list[LeafSpec]) -> None:
    """What a rank has is the same by whatever number."""
    shared = [whole(f"m{i}") for i in range(6)]
    world: World = [[whole("a", 180_000), *shared], shared, shared]
    after: World = [now, shared, shared]
    job = plan_job(world)
    again = plan_again(job, world, after)
    for i in range(6):
        assert holders_of(again, f"m{i}") == holders_of(job, f"m{i}")
    check(after, again, {})


def test_a_tensor_of_another_type_is_shared_out_anew() -> None:
    """What ranks were to write of it are bytes of what it was."""
    large = LeafSpec("w", "float32", (1024, 1024))
    world: World = [[large], [large]]
    after: World = [[large._replace(dtype="uint8")]] * 2
    again = plan_again(plan_job(world), world, after)
    check(after, again, {})


def test_what_a_rank_dropped_behind_all_others_is_written_by_who_has_it() -> None:
    """A list that ends earlier differs in its end."""
    world: World = [[whole("a"), whole("w")], *[[whole("w"), whole("x", 90_000)]] * 2]
    job = plan_job(world)
    assert holders_of(job, "w") == [[0]]
    after: World = [[whole("a")], *world[1:]]
    again = plan_again(job, world, after)
    assert holders_of(again, "w") in ([[1]], [[2]])
    check(after, again, {})


def test_what_is_as_it_was_stays_beside_what_changed_in_a_list_in_another_order() -> None:
    """Only what is on one side of the change is shared out anew."""
    shared = [whole(f"m{i}") for i in range(4)]
    world: World = [[whole("a", 60_000), *shared], shared]
    now = [whole("a", 1), shared[1], shared[0], *shared[2:]]
    job = plan_job(world)
    again = plan_again(job, world, [now, shared])
    for i in range(4):
        assert holders_of(again, f"m{i}") == holders_of(job, f"m{i}")


@given(
    world=worlds(),
    replicate=st.sampled_from(["once", "local"]),
    min_part=st.sampled_from([1, 16, MiB]),
)
def test_a_plan_that_is_made_again_of_the_same_is_the_same(
    world: World, replicate: Replicate, min_part: int
) -> None:
    """Ranks that know it go by it, and equal plans have one name."""
    job = plan_job(world, replicate=replicate, min_part_nbytes=min_part)
    assert plan_again(job, world, world, replicate=replicate) == job
    for rank, specs in enumerate(world):
        again = replan(job, world, {rank: specs}, replicate=replicate)
        assert again.assignments == job.assignments
        assert again.tensors == job.tensors


def test_a_replica_that_was_cut_is_cut_alike_again() -> None:
    """By whom its parts were, in their order."""
    world: World = [[whole("own", 200_000), LeafSpec("w", "float32", (1024, 1024))], [], []]
    world[1] = world[2] = world[0][1:]
    job = plan_job(world)
    assert len({rank for (rank,) in holders_of(job, "w")}) == 3
    assert plan_again(job, world, world) == job
    after: World = [[whole("own", 800_000), *world[0][1:]], *world[1:]]
    assert holders_of(plan_job(after), "w") != holders_of(job, "w")
    again = plan_again(job, world, after)
    assert holders_of(again, "w") == holders_of(job, "w")
    check(after, again, {})


def test_of_plans_that_cut_a_tensor_in_another_type_none_is_taken() -> None:
    """The one that most ranks followed has what one of them had before."""
    world: World = [[whole("w")], [whole("own1")], [whole("own2")]]
    now: World = [[whole("w", dtype="int32")], *world[1:]]
    plans = [Followed(plan_job(world), world, [1, 2]), Followed(plan_job(now), now, [0])]
    again = replan_job(plans, {})
    check(now, again, dict(enumerate(parts_of(now, plans[1].job))))
    assert [tensor.dtype for tensor in again.tensors] == ["float32", "float32", "int32"]


def test_what_was_written_by_any_plan_is_not_written_again() -> None:
    """By a rank that writes now, and was to write it by another plan; but as a copy."""
    world: World = [[whole("w")]] * 3
    job = plan_job(world)
    assert holders_of(job, "w") == [[0]]
    other = plan_job(world, pins={"w": {((0,), (20_000,)): [Share(2, 0, 80_000)]}})
    plans = [Followed(other, world, [1]), Followed(job, world, [0])]
    changed = {2: [whole("w"), whole("x")]}
    assert holders_of(replan_job(plans, changed), "w") == [[0]]
    for state, holders in ((world, [0, 1, 2]), ([world[0], [], world[2]], [0, 2])):
        job = plan_job(state, replicate="local")
        plans = [Followed(job, state, [1]), Followed(job, state, [0])]
        again = replan_job(plans, changed, replicate="local")
        assert [sorted(held) for held in holders_of(again, "w")] == [holders]


def test_of_plans_that_will_do_the_one_that_most_ranks_followed_is_taken() -> None:
    """In whatever order they are known."""
    world: World = [[whole("w")]] * 5
    jobs = [
        plan_job(world, pins={"w": {((0,), (20_000,)): [Share(rank, 0, 80_000)]}})
        for rank in (3, 4)
    ]
    plans = [Followed(jobs[0], world, [0]), Followed(jobs[1], world, [1, 2])]
    for known in (plans, plans[::-1]):
        again = replan_job(known, {3: world[3], 4: world[4]})
        assert holders_of(again, "w") == [[4]]


def test_plans_that_do_not_fit_together_are_told_from_ranks_that_changed() -> None:
    """Nobody changed: each rank followed a plan that it knew."""
    world: World = [[whole("w")], [whole("w")], [whole("w"), whole("own2", 40_000)]]
    job = plan_job(world)
    before: World = [[whole("w"), whole("own0", 40_000)], *world[1:]]
    later = plan_again(plan_job(before), before, world)
    plans = [Followed(job, world, [1]), Followed(later, world, [0, 2])]
    with pytest.raises(StalePlanError, match=r"^the ranks followed plans of different saves, and"):
        replan_job(plans, {})


def test_who_was_to_write_a_tensor_writes_it_still() -> None:
    """Where it has it still, and others that write now have it, too."""
    world: World = [[whole("w"), whole(f"own{rank}", 90_000)] for rank in range(2)]
    world.append([whole("w")])
    job = plan_job(world)
    assert holders_of(job, "w") == [[2]]
    again = replan(job, world, {1: [whole("w")], 2: [whole("w"), whole("x")]})
    assert holders_of(again, "w") == [[2]]


def test_one_rank_takes_over_each_tensor_that_another_dropped() -> None:
    """Of those that write now and hold it, the one that has taken over least."""
    world: World = [[*map(whole, "vw"), whole(f"own{rank}", 90_000)] for rank in range(3)]
    world.append([*map(whole, "vw")])
    job = plan_job(world)
    assert holders_of(job, "v") == holders_of(job, "w") == [[3]]
    changed = {1: [*map(whole, "vwx")], 2: [*map(whole, "vwx")], 3: [whole("x")]}
    again = replan(job, world, changed)
    assert holders_of(again, "v") == [[1]]
    assert holders_of(again, "w") == [[2]]
    check(apply(world, changed), again, {0: parts_of(world, job)[0]})


def with_own(world: World, sizes: Sequence[int]) -> World:
    """Give each rank a tensor that only it has, of a size of its own."""
    return [
        [LeafSpec(f"a{rank}", "float32", (size,)), *specs]
        for rank, (size, specs) in enumerate(zip(sizes, world, strict=True))
    ]


@given(
    world=worlds(),
    replicate=st.sampled_from(["once", "local"]),
    min_part=st.sampled_from([1, 16, MiB]),
    data=st.data(),
)
def test_what_is_as_it_was_keeps_its_writers(
    world: World, replicate: Replicate, min_part: int, data: st.DataObject
) -> None:
    """Whatever else a rank has: so ranks may go by plans of different saves, and make one."""
    sizes = st.lists(st.integers(0, 60_000), min_size=len(world), max_size=len(world))
    states = [with_own(world, data.draw(sizes)) for _ in range(3)]
    job = plan_job(states[0], replicate=replicate, min_part_nbytes=min_part)
    jobs = [job]
    for before, after in itertools.pairwise(states):
        jobs.append(plan_again(jobs[-1], before, after, replicate=replicate))
        check(after, jobs[-1], {})
    shared = {spec.name for specs in world for spec in specs}
    for name in shared:
        assert holders_of(jobs[2], name) == holders_of(job, name)
    ranks = st.lists(st.integers(0, 3), min_size=len(world), max_size=len(world))
    chosen = data.draw(ranks)
    plans = [
        Followed(each, state, [rank for rank, number in enumerate(chosen) if number == of])
        for of, (each, state) in enumerate(zip(jobs, states, strict=True))
    ]
    changed = {
        rank: with_own(world, [7] * len(world))[rank]
        for rank, number in enumerate(chosen)
        if number == 3
    }
    again = replan_job([plan for plan in plans if plan.ranks], changed, replicate=replicate)
    now = [changed[r] if of == 3 else states[of][r] for r, of in enumerate(chosen)]
    old = {
        rank: jobs[of].assignments[rank].parts(states[of][rank])
        for rank, of in enumerate(chosen)
        if of < 3
    }
    check(now, again, old)


@given(world=worlds(), data=st.data())
def test_plans_that_differ_make_a_plan_of_what_was_written_or_none(
    world: World, data: st.DataObject
) -> None:
    """Each rank's bytes are where its plan had them; nothing is wanted that nobody wrote."""
    hosts = [["a", "b"][rank % 2] for rank in range(len(world))]
    jobs = [
        plan_job(world),
        plan_job(world, replicate="local", local_nbytes=100),
        plan_job(world, hosts=hosts, min_part_nbytes=16),
    ]
    chosen = data.draw(st.lists(st.integers(0, 3), min_size=len(world), max_size=len(world)))
    plans = [
        Followed(job, world, [rank for rank, number in enumerate(chosen) if number == of])
        for of, job in enumerate(jobs)
    ]
    changed = {rank: world[rank] for rank, of in enumerate(chosen) if of == 3}
    try:
        again = replan_job([plan for plan in plans if plan.ranks], changed)
    except PlanError as error:
        event("refused")
        assert is_stale(error)  # either end is right
        return
    event("planned")
    old = {r: jobs[of].assignments[r].parts(world[r]) for r, of in enumerate(chosen) if of < 3}
    check(world, again, old, may_be_idle=True)


@pytest.mark.parametrize(
    ("size", "own", "stays"),
    [(80 * MiB, 0, False), (MiB, 0, True), (80 * MiB, 4096 * MiB, True)],
    ids=["much", "little", "little of all"],
)
def test_a_plan_that_would_be_uneven_is_made_from_the_start(
    size: int, own: int, *, stays: bool
) -> None:
    """More than half a GiB that one rank would write alone takes time; a few MiB do not."""
    large = [LeafSpec(f"w{i}", "uint8", (size,)) for i in range(8)]
    world: World = [[*large, LeafSpec("own", "uint8", (8 * size,))], large]
    job = plan_job(world, min_part_nbytes=size)
    assert {tuple(held) for i in range(8) for held in holders_of(job, f"w{i}")} == {(1,)}
    now: World = [[*large, LeafSpec(f"own{rank}", "uint8", (own,))] for rank in range(2)]
    again = plan_again(job, world, now)
    is_even = max(again.written_nbytes) == min(again.written_nbytes)
    assert is_even != stays
    assert stays or again == plan_job(now)


def test_a_plan_is_as_even_as_one_from_the_start_beside_what_one_rank_alone_has() -> None:
    """Where one rank writes most in any case, replicas stay where they were."""
    shared = [whole(f"w{i}") for i in range(4)]
    world: World = [shared, shared]
    job = plan_job(world)
    writers = [holders_of(job, f"w{i}") for i in range(4)]
    now: World = [[LeafSpec("own", "uint8", (4096 * MiB,)), *shared], shared]
    assert [holders_of(plan_job(now), f"w{i}") for i in range(4)] != writers
    again = plan_again(job, world, now)
    assert [holders_of(again, f"w{i}") for i in range(4)] == writers
