from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptio.config import KiB, MiB
from ckptio.errors import PlanError
from ckptio.format.compose import encode_manifest, encode_rows
from ckptio.format.manifest import Chunk, Manifest, decode_manifest
from ckptio.plan.exchange import (
    ExchangePlan,
    Runs,
    block_runs,
    decode_part,
    decode_runs,
    plan_exchange,
)
from ckptio.plan.explain import explain, explain_text
from ckptio.plan.load import Wanted, plan_spans
from ckptio.plan.places import choose_places
from ckptio.plan.readers import Kind, place_whole, share_out
from ckptio.plan.worth import is_worth_exchanging

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

BLOCK = 4 * KiB


def manifest_of(
    sizes: Sequence[int], writers: Sequence[int] = (), hosts: Sequence[str] = ()
) -> Manifest:
    """Give a manifest of files of given sizes, written by given ranks on given hosts."""
    files = [
        (f"f{i}", nbytes, [1000 * i + j for j in range(-(-nbytes // BLOCK))], writer)
        for i, (nbytes, writer) in enumerate(itertools.zip_longest(sizes, writers, fillvalue=0))
    ]
    data = encode_manifest(
        writer="1", save_id="0" * 32, created="", block_nbytes=BLOCK, files=files,
        tensors=b"[]", tree=b"{}", hosts=hosts,
    )  # fmt: skip
    return decode_manifest(data)


def pairs(bounds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Give first and end block of each run."""
    return zip(bounds[::2], bounds[1::2], strict=True)


class World(NamedTuple):
    """Some files, and some ranks that want some of their blocks."""

    manifest: Manifest
    wants: list[Runs]
    hosts: list[str]

    def plan(self, slab_nbytes: int = 4 * BLOCK) -> ExchangePlan:
        return plan_exchange(self.manifest, self.wants, self.hosts, slab_nbytes)

    def blocks(self, rank: int) -> set[tuple[int, int]]:
        return {
            (file, block)
            for file, bounds in self.wants[rank]
            for first, stop in pairs(bounds)
            for block in range(first, stop)
        }

    def nbytes(self, blocks: set[tuple[int, int]]) -> int:
        files = self.manifest.files
        return sum(min(BLOCK, files[file].nbytes - block * BLOCK) for file, block in blocks)


def runs_of(blocks: set[tuple[int, int]]) -> Runs:
    return block_runs([Wanted(f, b * BLOCK, 1, 0, 0) for f, b in blocks], BLOCK)


@st.composite
def worlds(draw: st.DrawFn, max_blocks: int = 40) -> World:
    num_ranks = draw(st.integers(1, 5))
    names = st.sampled_from(["a", "b", "c"])
    saved_hosts = draw(st.lists(names, min_size=1, max_size=5))
    hosts = draw(st.lists(names, min_size=num_ranks, max_size=num_ranks))
    sizes = draw(st.lists(st.integers(1, max_blocks * BLOCK), min_size=1, max_size=5))
    writers = [draw(st.integers(0, len(saved_hosts) - 1)) for _ in sizes]
    wants = []
    for _ in range(num_ranks):
        blocks: set[tuple[int, int]] = set()
        for file, nbytes in enumerate(sizes):
            count = -(-nbytes // BLOCK)
            for _ in range(draw(st.integers(0, 3))):
                first = draw(st.integers(0, count - 1))
                stop = draw(st.integers(first + 1, count))
                blocks |= {(file, block) for block in range(first, stop)}
        wants.append(runs_of(blocks))
    return World(manifest_of(sizes, writers, saved_hosts), wants, hosts)


def replicated(sizes: Sequence[int], num_ranks: int, **options: Sequence[str]) -> World:
    """All ranks want everything."""
    manifest = manifest_of(sizes, **options)  # type: ignore[arg-type]  # only `hosts` is given
    everything = runs_of({(f, b) for f, n in enumerate(sizes) for b in range(-(-n // BLOCK))})
    return World(manifest, [everything] * num_ranks, ["h"] * num_ranks)


@given(world=worlds(), slab=st.integers(0, 6))
def test_each_wanted_block_is_read_once_and_reaches_all_who_want_it(
    world: World, slab: int
) -> None:
    """No byte is read twice or for nobody; nobody is sent what it does not want."""
    plan = world.plan(slab * BLOCK)
    reaches: dict[int, set[tuple[int, int]]] = {rank: set() for rank in range(len(world.wants))}
    seen: set[tuple[int, int]] = set()
    for unit in plan.units:
        assert unit.start % BLOCK == 0
        assert 0 < unit.nbytes <= max(1, slab) * BLOCK  # a checkpoint may have larger blocks
        first = unit.start // BLOCK
        blocks = {(unit.file, first + i) for i in range(-(-unit.nbytes // BLOCK))}
        assert world.nbytes(blocks) == unit.nbytes
        assert not blocks & seen
        seen |= blocks
        assert unit.reader not in unit.takers
        assert list(unit.takers) == sorted(set(unit.takers))
        for rank in (unit.reader, *unit.takers):
            reaches[rank] |= blocks
    assert reaches == {rank: world.blocks(rank) for rank in reaches}
    assert sum(plan.read_nbytes()) == world.nbytes(seen)
    assert [unit.number for unit in plan.units] == list(range(len(plan.units)))


def best_possible(world: World) -> float:
    """Give the least that the busiest rank can read, if blocks could be cut anywhere.

    The bytes that only some ranks want are read by them, however they share them out.
    """
    wanted_by: dict[tuple[int, int], set[int]] = {}
    for rank in range(len(world.wants)):
        for block in world.blocks(rank):
            wanted_by.setdefault(block, set()).add(rank)
    ranks = range(len(world.wants))
    return max(
        world.nbytes({block for block, by in wanted_by.items() if by <= set(some)}) / len(some)
        for count in range(1, len(world.wants) + 1)
        for some in itertools.combinations(ranks, count)
    )


@given(world=worlds())
def test_no_rank_reads_much_more_than_it_must(world: World) -> None:
    """At most 1.10 times the mean where wants allow that, else as little as is possible."""
    loads = world.plan().read_nbytes()
    mean = sum(loads) / len(loads)
    # blocks are not cut, and the short ones at the ends of files even less
    slack = 2 * BLOCK
    assert max(loads) <= max(1.1 * mean, best_possible(world)) + slack


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_what_all_want_is_read_evenly(num_ranks: int) -> None:
    """Whoever wrote it: no rank reads more than 1.10 times the mean."""
    for writers in ([0], [0] * 7, range(7)):
        sizes = [300 * BLOCK + 17] * len(writers)
        world = World(
            manifest_of(sizes, writers, ["h"] * 7),
            [runs_of({(f, b) for f in range(len(sizes)) for b in range(301)})] * num_ranks,
            ["h"] * num_ranks,
        )
        loads = world.plan().read_nbytes()
        assert max(loads) <= 1.1 * sum(loads) / num_ranks
        assert min(loads) > 0


def test_many_small_files_are_shared_out() -> None:
    """Files that are shorter than a block cannot be cut, and are evened out all the same."""
    sizes = [37 * (i % 90 + 1) for i in range(400)]
    loads = replicated(sizes, 4).plan().read_nbytes()
    assert max(loads) <= 1.1 * sum(loads) / 4


def test_short_files_are_shared_out_by_their_bytes() -> None:
    """The longest first, whatever their order: ten of them are as much as another one."""
    loads = replicated([*[400] * 10, 4000], 2).plan().read_nbytes()
    assert loads == [4000, 4000]


def test_a_short_file_is_read_by_its_own_rank_or_near_it() -> None:
    """As long blocks are; and by another where its own has more than the others."""
    everything = runs_of({(file, 0) for file in range(4)})
    manifest = manifest_of([100] * 4, [0, 1, 2, 3], ["a", "a", "b", "b"])
    unchanged = World(manifest, [everything] * 4, ["a", "a", "b", "b"]).plan()
    assert [(unit.file, unit.reader) for unit in unchanged.units] == [(i, i) for i in range(4)]
    moved = World(manifest, [everything] * 4, ["b", "b", "a", "a"]).plan()
    assert [(unit.file, unit.reader) for unit in moved.units] == [(2, 0), (3, 1), (0, 2), (1, 3)]
    lopsided = manifest_of([100] * 4, [0] * 4, ["a", "a", "b", "b"])
    balanced = World(lopsided, [everything] * 4, ["a", "a", "b", "b"]).plan()
    assert balanced.read_nbytes() == [100] * 4


def test_the_short_end_of_a_file_travels_with_the_blocks_before_it() -> None:
    """It is placed by itself; where one rank reads both, they are no units of their own."""
    manifest = manifest_of([7 * BLOCK + 1] * 2, [0, 1], ["h", "h"])
    everything = runs_of({(f, b) for f in range(2) for b in range(8)})
    plan = World(manifest, [everything] * 2, ["h", "h"]).plan(4 * BLOCK)
    assert [unit.reader == unit.file for unit in plan.units] == [True] * 4
    assert sorted(unit.nbytes for unit in plan.units) == [3 * BLOCK + 1] * 2 + [4 * BLOCK] * 2


def test_what_is_not_cut_is_read_by_a_rank_that_wants_it() -> None:
    """Though all of them read much, and one that does not want it reads nothing."""
    loads = [0, 0, 10, 9]
    assert place_whole(Kind((2, 3), -1, ()), 5, loads, 6) == 3
    assert loads == [0, 0, 10, 14]


def test_what_is_not_cut_is_read_where_it_is_near_up_to_the_limit() -> None:
    """Though another has less; and by that one if it is above."""
    kind = Kind((0, 1), 0, (0,))
    assert place_whole(kind, 5, [1, 0], 6) == 0
    assert place_whole(kind, 5, [1, 0], 5) == 1


def test_readers_keep_abreast_of_each_other() -> None:
    """No rank is to read far ahead of what others of the group can take."""
    plan = replicated([41 * BLOCK, 20 * BLOCK], 3).plan(2 * BLOCK)
    assert sum(unit.nbytes for unit in plan.units) == 61 * BLOCK
    for number, unit in enumerate(plan.units):
        before = [0] * 3
        for earlier in plan.units[:number]:
            before[earlier.reader] += earlier.nbytes
        assert before[unit.reader] == min(before[one.reader] for one in plan.units[number:])


def test_what_is_far_is_given_away_first() -> None:
    """A rank that has too much keeps its own file, then what its host wrote."""
    own, near = Kind((0, 1), 0, (0,)), Kind((0, 1, 2), -1, (0,))
    shares = share_out({own: 8, near: 8}, [0, 0, 0], 8, 1)
    assert shares == {own: {0: 8}, near: {1: 8}}
    shares = share_out({own: 8, near: 4}, [0, 4, 0], 8, 1)
    assert shares == {own: {0: 8}, near: {2: 4}}
    near, far, more = Kind((0, 1), -1, (0,)), Kind((0, 2), -1, ()), Kind((0, 3), -1, ())
    shares = share_out({near: 8, far: 4, more: 6}, [0, 0, 8 * 5, 500], 12 * 5, 5)
    assert shares == {near: {0: 6, 1: 2}, far: {2: 4}, more: {0: 6}}


def test_the_lowest_loads_rise_alike_below_those_that_are_higher() -> None:
    """What nobody has to pass on is even from the start, among the ranks that have room."""
    every = Kind((0, 1, 2, 3), -1, ())
    assert share_out({every: 10}, [0, 0, 100, 100], 200, 1) == {every: {0: 5, 1: 5}}
    assert share_out({every: 12}, [2, 0, 4, 100], 200, 1) == {every: {0: 4, 1: 6, 2: 2}}
    own, both = Kind((0, 1), 0, (0,)), Kind((0, 1), -1, ())
    assert share_out({both: 8, own: 8}, [0, 0], 200, 1) == {own: {0: 8}, both: {1: 8}}


def least_possible(
    loads: Sequence[int], num_blocks: Mapping[Kind, int], block_nbytes: int
) -> float:
    """Give the least that the busiest rank can read, as `best_possible` does."""
    return max(
        sum(
            [
                *(loads[rank] for rank in some),
                *(n * block_nbytes for kind, n in num_blocks.items() if {*kind.wanting} <= {*some}),
            ]
        )
        / len(some)
        for count in range(1, len(loads) + 1)
        for some in itertools.combinations(range(len(loads)), count)
    )


@st.composite
def kinds(draw: st.DrawFn, num_ranks: int) -> Kind:
    ranks = st.integers(0, num_ranks - 1)
    wanting = sorted(draw(st.sets(ranks, min_size=1)))
    near = [rank for rank in wanting if draw(st.booleans())]
    return Kind(tuple(wanting), draw(st.sampled_from([-1, *near])), tuple(near))


@settings(max_examples=60)
@given(loads=st.lists(st.integers(0, 60), min_size=1, max_size=4), data=st.data())
def test_blocks_are_shared_out_as_evenly_as_can_be(loads: list[int], data: st.DataObject) -> None:
    """All of them, to who wants them; but for the sake of nearness, no rank reads a block more."""
    each = kinds(len(loads))
    num_blocks = data.draw(st.dictionaries(each, st.integers(1, 20), min_size=1, max_size=5))
    block, limit = data.draw(st.sampled_from([1, 4])), data.draw(st.integers(0, 150))
    after = list(loads)
    shares = share_out(num_blocks, loads, limit, block)
    assert shares.keys() == num_blocks.keys()
    for kind, by_rank in shares.items():
        assert sum(by_rank.values()) == num_blocks[kind]
        for rank, count in by_rank.items():
            assert rank in kind.wanting
            assert count > 0
            after[rank] += count * block
    assert max(after) < max(limit, least_possible(loads, num_blocks, block)) + block


@given(loads=st.lists(st.integers(0, 60), min_size=2, max_size=5), count=st.integers(1, 50))
def test_blocks_go_to_those_near_that_have_least(loads: list[int], count: int) -> None:
    """As long as nobody is above the limit."""
    ranks = range(len(loads))
    (by_rank,) = share_out({Kind((*ranks,), -1, (*ranks[1:],)): count}, loads, 1000, 4).values()
    assert 0 not in by_rank
    after = [loads[rank] + 4 * by_rank.get(rank, 0) for rank in ranks]
    assert max(after[rank] for rank in by_rank) - min(after[1:]) < 4 * len(loads)


def test_who_reads_much_already_gives_away_what_it_has_and_no_more() -> None:
    """Until nobody can take it better."""
    near = Kind((0, 1), 1, (0, 1))
    assert share_out({near: 1}, [0, 3], 2, 1) == {near: {0: 1}}
    some = Kind((0, 1, 3), 1, (1,))
    assert share_out({some: 5}, [6, 6, 0, 4], 5, 1) == {some: {0: 1, 1: 1, 3: 3}}


def test_what_only_one_wants_is_not_exchanged() -> None:
    """It reads it itself, however busy it is."""
    manifest = manifest_of([100 * BLOCK], [1], ["h", "h"])
    wants = [runs_of({(0, b) for b in range(90)}), runs_of({(0, b) for b in range(80, 100)})]
    plan = World(manifest, wants, ["h", "h"]).plan()
    assert plan.read_nbytes() == [80 * BLOCK, 20 * BLOCK]
    assert plan.shared_nbytes() == plan.sent_nbytes() == 10 * BLOCK
    assert all(unit.reader == 1 for unit in plan.units if unit.takers)
    reasons = {unit.reader: reason for unit, reason in zip(plan.units, plan.reasons, strict=True)}
    assert reasons == {0: "nobody else wants it", 1: "own file"}
    wants = [runs_of({(0, b) for b in range(80)}), runs_of({(0, b) for b in range(20, 80)})]
    assert World(manifest, wants, ["x", "x"]).plan().read_nbytes() == [40 * BLOCK] * 2


def test_blocks_move_along_a_chain_of_ranks() -> None:
    """A busy rank passes blocks to one who passes others on, if it cannot do it directly."""
    manifest = manifest_of([120 * BLOCK, 60 * BLOCK], [0, 1], ["h", "h", "h"])
    first = {(0, b) for b in range(120)}
    second = {(1, b) for b in range(60)}
    wants = [runs_of(first), runs_of(first | second), runs_of(second)]
    loads = World(manifest, wants, ["h"] * 3).plan().read_nbytes()
    assert max(loads) <= 1.1 * 60 * BLOCK
    left, right = Kind((0, 1), 0, (0,)), Kind((1, 2), 1, (1,))
    shares = share_out({left: 10, right: 8}, [0, 0, 0], 8 * 5, 5)
    assert shares == {left: {0: 8, 1: 2}, right: {1: 6, 2: 2}}, "and no more than it has to"


def test_own_files_go_first_then_the_same_host() -> None:
    """As long as that leaves the ranks evenly busy."""
    sizes = [100 * BLOCK] * 4
    everything = runs_of({(f, b) for f in range(4) for b in range(100)})
    manifest = manifest_of(sizes, [0, 1, 2, 3], ["a", "a", "b", "b"])
    unchanged = World(manifest, [everything] * 4, ["a", "a", "b", "b"]).plan()
    assert all(unit.reader == unit.file for unit in unchanged.units)
    assert set(unchanged.reasons) == {"own file"}
    moved = World(manifest, [everything] * 4, ["b", "b", "a", "a"]).plan()
    assert all((unit.reader in (2, 3)) == (unit.file in (0, 1)) for unit in moved.units)
    assert set(moved.reasons) == {"same host"}
    elsewhere = World(manifest, [everything] * 4, ["c"] * 4).plan()
    assert set(elsewhere.reasons) == {"nobody nearer wants it"}
    lopsided = manifest_of(sizes, [0, 0, 0, 0], ["a", "a", "b", "b"])
    balanced = World(lopsided, [everything] * 4, ["a", "a", "b", "b"]).plan()
    assert set(balanced.reasons) == {"own file", "balance"}
    assert max(balanced.read_nbytes()) <= 110 * BLOCK


@given(world=worlds(), data=st.data())
def test_a_plan_is_a_function_of_what_is_wanted(world: World, data: st.DataObject) -> None:
    """Not of the order in which a rank wants it, nor of the process."""
    again = []
    for rank in range(len(world.wants)):
        blocks = data.draw(st.permutations(sorted(world.blocks(rank))))
        again.append(block_runs([Wanted(f, b * BLOCK, 5, 0, 0) for f, b in blocks], BLOCK))
    assert again == world.wants
    assert world._replace(wants=again).plan() == world.plan()


@given(world=worlds())
def test_parts_and_wants_survive_the_network(world: World) -> None:
    """Each rank gets just the units that it reads or takes, in the common order."""
    plan = world.plan()
    parts = json.loads(json.dumps(plan.parts()))
    for rank, part in enumerate(parts):
        own = [unit for unit in plan.units if unit.reader == rank or rank in unit.takers]
        assert decode_part(part) == tuple(own)
    assert [decode_runs(json.loads(json.dumps(want))) for want in world.wants] == world.wants


@given(world=worlds())
def test_ranks_that_want_the_same_are_told_the_same(world: World) -> None:
    """One object for all of them, which is encoded once."""
    parts = world.plan().parts()
    for a, b in itertools.combinations(range(len(parts)), 2):
        if world.wants[a] == world.wants[b]:
            assert parts[a] is parts[b]


@pytest.mark.parametrize("num_ranks", [2, 64, 512])
def test_what_a_rank_is_told_grows_with_units_and_ranks_but_not_with_both(num_ranks: int) -> None:
    """All want everything: 1,024 ranks were told 4 MB each, with all of them at each unit."""
    plan = replicated([400 * BLOCK] * 8, num_ranks).plan()
    parts = plan.parts()
    assert len(plan.units) >= 800
    assert len({id(part) for part in parts}) == 1
    line = len("[1000,10,1000000,100000,100],")
    assert len(json.dumps(parts[0], separators=(",", ":"))) <= line * len(plan.units) + (
        4 * num_ranks + 100
    )
    assert len({id(unit.wanting) for unit in plan.units}) == 1, "nor does what each has in memory"


def test_what_is_no_part_of_a_plan_is_refused() -> None:
    """It comes from another process."""
    line = [3, 0, 0, BLOCK, 1]
    assert [u.number for u in decode_part([[[0, 1], [line]], [[1], [[2, *line[1:]]]]])] == [2, 3]
    for message in [
        {},
        [line],
        [[[0, 1], [line[:4]]]],
        [[[0, 1], [[*line[:4], "1"]]]],
        [[[0, 1], [[*line[:4], 2]]]],
        [[[0, 1], [[3, -1, *line[2:]]]]],
        [[[1, 0], [line]]],
        [[[1, 1], [line]]],
        [[[0, 1], [line, line]]],
        [[[0, 1], [line]], [[1], [line]]],
    ]:
        with pytest.raises(PlanError, match="rank 0 sent"):
            decode_part(message)  # type: ignore[arg-type]  # that is the point


@given(world=worlds())
def test_units_land_where_they_are_wanted(world: World) -> None:
    """What a rank wants lies in its units, cut at their blocks."""
    plan = world.plan()
    for rank, want in enumerate(world.wants):
        wanted = [
            Wanted(file, first * BLOCK + 3, (stop - first) * BLOCK - BLOCK + 1 - 3, file, 7)
            for file, bounds in want
            for first, stop in pairs(bounds)
            if stop - first > 1
        ]
        units = decode_part(plan.parts()[rank])
        segments = plan_spans(world.manifest, wanted, [unit[1:4] for unit in units])
        landed = []
        for unit, segment in zip(units, segments, strict=True):
            assert (segment.file, segment.start, segment.nbytes) == unit[1:4]
            first = unit.start // BLOCK
            numbers = range(first, first + len(segment.pieces))
            assert segment.checksums == tuple(1000 * unit.file + n for n in numbers)
            for index, pieces in enumerate(segment.pieces):
                for position, destination, offset, nbytes, rows in pieces:
                    assert rows is None
                    assert position + nbytes <= BLOCK
                    start = unit.start + index * BLOCK + position
                    landed += [
                        (unit.file, start + i, destination, offset + i) for i in range(nbytes)
                    ]
        expected = [
            (w.file, w.start + i, w.destination, w.offset + i)
            for w in wanted
            for i in range(w.nbytes)
        ]
        assert sorted(landed) == sorted(expected)


@example(wanted=[(0, 0, 1), (0, 2 * BLOCK, 1), (0, BLOCK, 1)])
@given(
    wanted=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 20 * BLOCK), st.integers(1, 5 * BLOCK)),
        max_size=8,
    )
)
def test_runs_hold_what_is_wanted_and_no_block_more(wanted: list[tuple[int, int, int]]) -> None:
    """Merged and in order, whatever the order of what is wanted."""
    runs = block_runs([Wanted(f, s, n, 0, 0) for f, s, n in wanted], BLOCK)
    assert [file for file, _ in runs] == sorted({f for f, _, _ in wanted})
    found = set()
    for file, bounds in runs:
        assert list(bounds) == sorted(set(bounds))
        for first, stop in pairs(bounds):
            found |= {(file, block) for block in range(first, stop)}
    assert found == {
        (f, block) for f, s, n in wanted for block in range(s // BLOCK, (s + n - 1) // BLOCK + 1)
    }


def test_local_copies_let_each_rank_open_its_own_file_only() -> None:
    """32 ranks, TP4 x DP8, replicated norms, as they were saved: 32 opens."""
    num_ranks, tp = 32, 4
    norm, shard = 2 * BLOCK, 30 * BLOCK
    hosts = [f"host{rank // 8}" for rank in range(num_ranks)]
    manifest = manifest_of([norm + shard] * num_ranks, range(num_ranks), hosts)
    norms = Chunk(0, 0, None, None, tuple((rank, 0) for rank in range(1, num_ranks)))
    wants = []
    for rank in range(num_ranks):
        replicas = [other for other in range(rank % tp, num_ranks, tp) if other != rank % tp]
        mine = Chunk(rank % tp, norm, (0,), (1,), tuple((other, norm) for other in replicas))
        place = choose_places(manifest, rank, hosts[rank])
        wanted = [Wanted(*place(norms), norm, 0, 0), Wanted(*place(mine), shard, 1, 0)]
        wants.append(block_runs(wanted, BLOCK))
    plan = World(manifest, wants, hosts).plan()
    assert len({(unit.reader, unit.file) for unit in plan.units}) == num_ranks
    assert all(unit.reader == unit.file and not unit.takers for unit in plan.units)
    assert plan.read_nbytes() == [norm + shard] * num_ranks


def test_a_copy_on_the_same_host_goes_before_one_elsewhere() -> None:
    """All ranks of a host choose alike, so that one can read for all; then numbers decide."""
    manifest = manifest_of([BLOCK] * 4, range(4), ["a", "b", "b", "c"])
    chunk = Chunk(2, 64, None, None, ((0, 0), (1, 0)))
    assert choose_places(manifest, 2, "b")(chunk) == (2, 64)
    assert choose_places(manifest, 5, "b")(chunk) == (1, 0)
    assert choose_places(manifest, 6, "b")(chunk) == (1, 0)
    assert choose_places(manifest, 2, "d")(chunk) == (2, 64)
    assert choose_places(manifest, 5, "d")(chunk) == (0, 0)
    assert choose_places(manifest, 0, "a")(chunk) == (0, 0)
    assert choose_places(manifest, 2, "a")(chunk) == (0, 0)  # a rank of its number was elsewhere
    assert choose_places(manifest, 2, "b", lost={2})(chunk) == (1, 0)
    assert choose_places(manifest, 2, "b", lost={0, 1, 2})(chunk) == (2, 64)
    assert choose_places(manifest_of([BLOCK]), 0, "a")(Chunk(0, 8)) == (0, 8)


def test_what_cannot_be_read_is_refused() -> None:
    """Runs come from other processes: they are checked before anything is planned."""
    manifest = manifest_of([2 * BLOCK])
    for file, bounds in [
        (1, (0, 1)), (-1, (0, 1)), (0, (0, 3)), (0, (1, 1)), (0, (0,)), (0, (-1, 1)), (0, ()),
        (0, (0, 2, 1, 2)), (0, (0, 1, 2, 3)),
    ]:  # fmt: skip
        runs = ((file, bounds),)
        with pytest.raises(PlanError, match="rank 1 wants"):
            plan_exchange(manifest, [(), runs], ["h", "h"], BLOCK)
    with pytest.raises(PlanError, match="hosts"):
        plan_exchange(manifest, [(), ()], ["h"], BLOCK)


def test_an_explanation_says_who_reads_what_for_whom_and_why() -> None:
    """Neighbouring units are one line; names narrow it down."""
    manifest = manifest_of([8 * BLOCK, 8 * BLOCK], [0, 1], ["h", "h"])
    everything = runs_of({(f, b) for f in range(2) for b in range(8)})
    plan = World(manifest, [everything] * 2, ["h", "h"]).plan(2 * BLOCK)
    lines = explain(plan, manifest)
    assert len(plan.units) == 8
    assert [(line.reader, line.file, line.reason) for line in lines] == [
        (0, "f0", "own file"),
        (1, "f1", "own file"),
    ]
    assert explain_text(lines).splitlines()[0] == (
        "rank 0 reads [0, 32768) of f0 (own file), for 1 too"
    )
    assert explain(plan, manifest, ["nothing"]) == ()
    manifest = manifest_of([4 * BLOCK], [2], ["h"] * 3)
    plan = World(manifest, [runs_of({(0, b) for b in range(4)})] * 2, ["h"] * 2).plan()
    assert [str(line) for line in explain(plan, manifest)] == [
        "rank 0 reads [0, 8192) of f0 (same host), for 1 too",
        "rank 1 reads [8192, 16384) of f0 (same host), for 0 too",
    ]


def test_an_explanation_of_some_tensors_is_of_what_holds_their_bytes() -> None:
    """Wherever they lie, copies too; a unit that only touches them is none of theirs."""
    tensors = encode_rows(
        [
            ("first", "float32", (BLOCK,), [(0, 0)]),
            ("second", "float32", (BLOCK,), [(0, 4 * BLOCK, None, None, [(1, 0)])]),
        ]
    )
    files = [(f"f{i}", 8 * BLOCK, list(range(8)), i) for i in range(2)]
    data = encode_manifest(
        writer="1", save_id="0" * 32, created="", block_nbytes=BLOCK, files=files,
        tensors=tensors, tree=b"{}", hosts=["h", "h"],
    )  # fmt: skip
    manifest = decode_manifest(data)
    everything = runs_of({(f, b) for f in range(2) for b in range(8)})
    plan = World(manifest, [everything] * 2, ["h", "h"]).plan(2 * BLOCK)

    def told(*names: str) -> list[tuple[str, int, int]]:
        return [(line.file, line.start, line.stop) for line in explain(plan, manifest, names)]

    assert told("first") == [("f0", 0, 4 * BLOCK)]
    assert told("second") == [("f0", 4 * BLOCK, 8 * BLOCK), ("f1", 0, 4 * BLOCK)]


def test_many_ranks_and_chunks_are_planned_evenly() -> None:
    """16 k chunks that 64 ranks want in nine ways, some of them all of the ranks."""
    num_ranks = 64
    manifest = manifest_of([256 * BLOCK] * num_ranks, range(num_ranks), ["h"] * num_ranks)
    wants = [
        runs_of({(i // 256, i % 256) for i in range(16_384) if i % 8 in (rank % 8, 7)})
        for rank in range(num_ranks)
    ]
    loads = World(manifest, wants, ["h"] * num_ranks).plan().read_nbytes()
    assert sum(loads) == manifest.nbytes
    assert max(loads) <= 1.1 * sum(loads) / num_ranks


def test_bytes_are_passed_on_where_that_is_faster() -> None:
    """Not for a few, and between hosts not for two ranks; rules and reasons are in the function."""
    large, small = [80 * MiB], [8 * MiB]

    def is_worth(sizes: Sequence[int], hosts: list[str], cached: Sequence[int] = ()) -> bool:
        world = replicated(sizes, len(hosts))._replace(hosts=hosts)
        has = [rank in cached for rank in range(len(hosts))]
        return is_worth_exchanging(world.plan(4 * MiB), hosts, has)

    assert is_worth(large, ["a", "a"])
    assert is_worth(large, ["a", "b", "c"])
    assert is_worth(large, ["a", "a", "b", "b"])
    assert is_worth(large, ["a", "a", "a", "a", "b"])
    assert not is_worth(large, ["a", "b"])
    assert not is_worth(large, ["a"])
    assert not is_worth(small, ["a", "a", "a"])
    assert not is_worth(large, ["a", "a"], cached=[0, 1])
    assert not is_worth(large, ["a", "a", "b", "b"], cached=[0, 1, 2, 3])
    assert is_worth(large, ["a", "a", "a"], cached=[0])
