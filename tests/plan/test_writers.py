from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ckptio.config import KiB, MiB
from ckptio.plan.writers import Item, Pool, Share, share_out

Shares = list[list[list[Share]]]


@st.composite
def jobs(draw: st.DrawFn, unit: int) -> tuple[list[int], list[Pool]]:
    """Draw ranks with loads of their own, and what sets of them hold together."""
    num_ranks = draw(st.integers(1, 5))
    loads = [unit * draw(st.integers(0, 40)) for _ in range(num_ranks)]
    sets = [
        ranks
        for count in range(2, num_ranks + 1)
        for ranks in itertools.combinations(range(num_ranks), count)
    ]
    pools = []
    for ranks in draw(st.lists(st.sampled_from(sets), unique=True, max_size=5)) if sets else []:
        sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
        pools.append(Pool(ranks, [Item(unit * size, (unit,)) for size in sizes]))
    return loads, pools


def written(loads: list[int], shares: Shares) -> list[int]:
    total = list(loads)
    for rank, start, stop in itertools.chain(*itertools.chain(*shares)):
        total[rank] += stop - start
    return total


def lowest(loads: list[int], pools: list[Pool]) -> float:
    """Say how low the highest load can be if items may be cut anywhere.

    Ranks of any set write all that they alone hold: so the mean of that is a bound, and
    the highest of these bounds is reached (a flow as large as the least cut).
    """
    ranks = range(len(loads))
    bounds = []
    for count in range(1, len(loads) + 1):
        for chosen in itertools.combinations(ranks, count):
            held = sum(loads[rank] for rank in chosen)
            for pool in pools:
                if set(pool.ranks) <= set(chosen):
                    held += sum(item.nbytes for item in pool.items)
            bounds.append(held / count)
    return max(bounds)


@given(job=jobs(MiB // 4), min_part=st.sampled_from([1, MiB, 100 * MiB]))
def test_shares_tile_their_items(job: tuple[list[int], list[Pool]], min_part: int) -> None:
    """Each byte goes to one rank that holds it, cut only where it may be."""
    loads, pools = job
    shares = share_out(loads, pools, turns=range(len(loads)), min_part_nbytes=min_part)
    for pool, shared in zip(pools, shares, strict=True):
        for item, found in zip(pool.items, shared, strict=True):
            position = 0
            for rank, start, stop in found:
                assert rank in pool.ranks
                assert position == start < stop
                assert stop == item.nbytes or stop % item.steps[-1] == 0
                position = stop
            assert position == item.nbytes
            assert all(a.rank != b.rank for a, b in itertools.pairwise(found))


@given(job=jobs(MiB // 4))
def test_no_rank_writes_much_more_than_it_has_to(job: tuple[list[int], list[Pool]]) -> None:
    """Within a tenth of the best there is, for any sets of holders."""
    loads, pools = job
    shares = share_out(loads, pools, turns=range(len(loads)), min_part_nbytes=MiB)
    best = lowest(loads, pools)
    assert max(written(loads, shares)) <= 1.10 * best + MiB // 4  # cuts are at quarters


@given(job=jobs(MiB // 4), data=st.data())
def test_the_order_of_pools_does_not_matter(
    job: tuple[list[int], list[Pool]], data: st.DataObject
) -> None:
    """Sets of ranks have an order of their own."""
    loads, pools = job
    order = data.draw(st.permutations(range(len(pools))))
    turns = range(len(loads))
    shares = share_out(loads, pools, turns=turns, min_part_nbytes=MiB)
    others = share_out(loads, [pools[k] for k in order], turns=turns, min_part_nbytes=MiB)
    assert [shares[k] for k in order] == others


def test_what_has_no_steps_is_not_cut() -> None:
    """It goes to who has least."""
    pool = Pool((0, 1, 2), [Item(10 * MiB), Item(6 * MiB)])
    (shares,) = share_out([2 * MiB, 0, 1], [pool], turns=[0, 1, 2], min_part_nbytes=MiB)
    assert shares == [[Share(1, 0, 10 * MiB)], [Share(2, 0, 6 * MiB)]]


def test_equal_ranks_come_in_turn() -> None:
    """Not by their number."""
    pool = Pool((0, 1, 2), [Item(MiB), Item(MiB)])
    (shares,) = share_out([0, 0, 0], [pool], turns=[2, 1, 0], min_part_nbytes=MiB)
    assert [share.rank for (share,) in shares] == [2, 1]


@given(job=jobs(MiB // 4), data=st.data())
def test_the_smallest_come_from_the_lowest_rank(
    job: tuple[list[int], list[Pool]], data: st.DataObject
) -> None:
    """Up to so much; whatever else there is, and whoever has much already."""
    loads, pools = job
    sizes = st.lists(st.integers(0, 64 * KiB), max_size=8)
    small = [Pool(pool.ranks, [Item(nbytes) for nbytes in data.draw(sizes)]) for pool in pools]
    mixed = [
        Pool(pool.ranks, pool.items + more.items) for pool, more in zip(pools, small, strict=True)
    ]
    shares = share_out(loads, mixed, turns=range(len(loads)), min_part_nbytes=4 * MiB)
    for pool, found in zip(pools, shares, strict=True):
        for shared in found[len(pool.items) :]:
            assert [share.rank for share in shared] in ([], [pool.ranks[0]])


def test_what_is_small_and_much_is_shared_out() -> None:
    """The smallest go to the lowest rank, and of the others as many as to anyone."""
    sizes = [8, *[60 * KiB] * 800, 16]
    pool = Pool((1, 2), [Item(nbytes) for nbytes in sizes])
    (shares,) = share_out([0, 0, 0], [pool], turns=[0, 1, 2], min_part_nbytes=MiB)
    assert [shares[0], shares[-1]] == [[Share(1, 0, 8)], [Share(1, 0, 16)]]
    found = written([0, 0, 0], [shares])
    assert abs(found[1] - found[2]) <= 60 * KiB


def test_what_goes_to_the_lowest_rank_is_limited_over_all_pools() -> None:
    """Small items may be many, and in many sets of ranks that have one lowest rank."""
    num = 16 * MiB // (64 * KiB)
    pools = [Pool(ranks, [Item(64 * KiB)] * num) for ranks in ((0, 1), (0, 1, 2))]
    shares = share_out([0, 0, 0], pools, turns=[0, 1, 2], min_part_nbytes=MiB)
    assert {share.rank for (share,) in shares[0]} == {0}
    assert {share.rank for (share,) in shares[1]} == {1, 2}
    few, many = Pool((0, 1), [Item(KiB)] * 9), Pool((0, 1), [Item(64 * KiB)] * 512)
    for loads, pool in (([MiB, 0], few), ([1024 * MiB] * 2, many)):
        (shared,) = share_out(loads, [pool], turns=[0, 1], min_part_nbytes=MiB)
        assert {share.rank for (share,) in shared} == {0}


def test_largest_items_are_dealt_first() -> None:
    """So that what comes last evens out what came before."""
    pool = Pool((0, 1), [Item(4 * MiB), Item(4 * MiB), Item(8 * MiB)])
    (shares,) = share_out([0, 0], [pool], turns=[0, 1], min_part_nbytes=MiB)
    assert [share.rank for (share,) in shares] == [1, 1, 0]


def test_what_a_rank_lacks_of_one_pool_it_gets_of_the_next() -> None:
    """An item that is not cut leaves others behind."""
    pools = [Pool((0, 1), [Item(10 * MiB)]), Pool((0, 1, 2), [Item(MiB)] * 20)]
    shares = share_out([0, 0, 0], pools, turns=[0, 1, 2], min_part_nbytes=MiB)
    assert written([0, 0, 0], shares) == [10 * MiB] * 3


def test_parts_are_not_small_where_ranks_write_much() -> None:
    """An item of less than two of them stays whole, and is cut where it is two."""
    for nbytes, num in ((2 * MiB - 1024, 1), (2 * MiB, 2)):
        pool = Pool((0, 1), [Item(nbytes, (1024,))])
        loads = [16 * MiB] * 32
        (shares,) = share_out(loads, [pool], turns=range(32), min_part_nbytes=MiB)
        assert len(shares[0]) == num


def test_cuts_lie_between_rows_where_that_is_near() -> None:
    """Steps that come first are better, unless a part would be far from its share."""
    row, element = 10 * MiB, 1 * MiB
    items = [Item(4 * row, (row, element))]
    (shares,) = share_out([0, MiB], [Pool((0, 1), items)], turns=[0, 1], min_part_nbytes=MiB)
    assert shares == [[Share(0, 0, 2 * row), Share(1, 2 * row, 4 * row)]]
    (shares,) = share_out([0, 8 * MiB], [Pool((0, 1), items)], turns=[0, 1], min_part_nbytes=MiB)
    assert shares == [[Share(0, 0, 24 * MiB), Share(1, 24 * MiB, 4 * row)]]


def test_cuts_are_moved_between_rows_by_less_than_a_part() -> None:
    """Down, or up, from inside of a row; and stay there if both are far."""
    row = 10 * MiB
    for num, load, cut in ((4, 1, 20), (3, 9, 20), (4, 8, 24)):
        for steps in ((row, 64 * KiB), (num * row, row, 64 * KiB)):
            pool = Pool((0, 1), [Item(num * row, steps)])
            (shares,) = share_out([0, load * MiB], [pool], turns=[0, 1], min_part_nbytes=MiB)
            assert shares == [[Share(0, 0, cut * MiB), Share(1, cut * MiB, num * row)]]


def test_what_a_rank_gets_in_a_row_is_one_share() -> None:
    """Where a cut leaves it behind the others still, and there is no other place to cut."""
    items = [Item(24 * MiB, (10 * MiB,))]
    (shares,) = share_out([0, 14 * MiB], [Pool((0, 1), items)], turns=[0, 1], min_part_nbytes=MiB)
    assert shares == [[Share(0, 0, 24 * MiB)]]


def test_a_ring_of_pairs_finds_its_level() -> None:
    """Water that has to go all around: each rank shares something with its neighbours only."""
    num = 8
    pools = [
        Pool(tuple(sorted((rank, (rank + 1) % num))), [Item(10 * MiB, (1024,))])
        for rank in range(num)
    ]
    loads = [40 * MiB, *[0] * (num - 1)]
    shares = share_out(loads, pools, turns=range(num), min_part_nbytes=MiB)
    found = written(loads, shares)
    assert max(found[1:]) <= 1.10 * 80 * MiB / 7
    assert found[0] == 40 * MiB
