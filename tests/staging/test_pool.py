from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.staging.pool import Slab, SlabPool
from ckptio.testing import run_virtual

PAGE = 4096
seeds = st.integers(0, 10_000)


class Pins:
    """Remembers what is pinned."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.num_pins = 0

    def pin(self, address: int, nbytes: int) -> None:
        assert address not in self.pinned
        self.pinned[address] = nbytes
        self.num_pins += 1

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def test_a_slab_is_page_aligned_writable_memory() -> None:
    """Direct I/O and vector copies may use it as it is."""
    slab = Slab(3 * PAGE)
    assert slab.address % PAGE == 0
    assert len(slab.view) == 3 * PAGE
    slab.view[:3] = b"abc"
    slab.touch()
    assert bytes(slab.view) == bytes(3 * PAGE)
    slab.close()


def test_a_slab_that_an_error_refers_to_can_be_closed() -> None:
    """Somebody who keeps a traceback does not keep the pool from closing."""
    pool = SlabPool(PAGE, PAGE)
    pool.prewarm()
    part = pool._free[0].view[10:20]
    pool.close()
    assert len(part) == 10


@given(
    slabs=st.integers(1, 4),
    holds=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=20),
    seed=seeds,
)
def test_leases_stay_in_the_budget_and_come_in_turn(
    slabs: int, holds: list[tuple[float, float]], seed: int
) -> None:
    """However many ask: never more than the budget, first come first served, all served."""
    served: list[int] = []
    asked: list[int] = []

    async def scenario() -> None:
        pool = SlabPool(slabs * PAGE, PAGE)
        out: set[int] = set()

        async def borrow(number: int, at_s: float, hold_s: float) -> None:
            await asyncio.sleep(at_s)
            asked.append(number)
            async with pool.lease() as slab:
                served.append(number)
                assert slab.address not in out
                out.add(slab.address)
                assert len(out) <= slabs
                await asyncio.sleep(hold_s)
                out.remove(slab.address)

        async with asyncio.TaskGroup() as group:
            for number, (at_s, hold_s) in enumerate(holds):
                group.create_task(borrow(number, at_s, hold_s))
        statistics = pool.statistics()
        assert statistics.leased_nbytes == statistics.num_waiting == 0
        assert statistics.num_leases == len(holds)
        assert statistics.taken_nbytes <= statistics.budget_nbytes == slabs * PAGE
        assert statistics.peak_leased_nbytes <= statistics.budget_nbytes
        assert statistics.num_allocations <= slabs
        pool.close()

    run_virtual(scenario(), seed=seed)
    # who is handed a slab in the same turn may run in any order, so with one slab only
    if slabs == 1:
        assert served == asked


@given(
    holds=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 2)), max_size=20),
    seed=seeds,
)
def test_cancelling_anywhere_returns_every_slab(
    holds: list[tuple[float, float, float]], seed: int
) -> None:
    """Waiting, just handed over or in use: no slab is lost, and none is given twice."""

    async def scenario() -> None:
        pool = SlabPool(2 * PAGE, PAGE)
        out: set[int] = set()

        async def borrow(at_s: float, hold_s: float) -> None:
            await asyncio.sleep(at_s)
            async with pool.lease() as slab:
                assert slab.address not in out
                out.add(slab.address)
                try:
                    await asyncio.sleep(hold_s)
                finally:
                    out.remove(slab.address)

        async def impatient(at_s: float, hold_s: float, patience_s: float) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await borrow(at_s, hold_s)

        async with asyncio.TaskGroup() as group:
            for hold in holds:
                group.create_task(impatient(*hold))
        assert pool.statistics().leased_nbytes == 0
        assert pool.statistics().num_waiting == 0
        async with pool.lease(), pool.lease():  # both are there
            assert pool.statistics().leased_nbytes == 2 * PAGE
        pool.close()

    run_virtual(scenario(), seed=seed)


@given(seed=seeds)
def test_a_slab_handed_to_a_cancelled_waiter_goes_on(seed: int) -> None:
    """Cancelled in the very turn of the hand-over, it passes the slab to the next."""

    async def scenario() -> None:
        pool = SlabPool(PAGE, PAGE)
        got: list[str] = []

        async def borrow(name: str) -> None:
            async with pool.lease():
                got.append(name)

        async with pool.lease():
            first = asyncio.create_task(borrow("first"))
            while pool.statistics().num_waiting < 1:
                await asyncio.sleep(0)
            second = asyncio.create_task(borrow("second"))
            while pool.statistics().num_waiting < 2:
                await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait((first, second))
        assert got == ["second"]
        assert pool.statistics().leased_nbytes == 0
        pool.close()

    run_virtual(scenario(), seed=seed)


async def test_memory_is_taken_once() -> None:
    """A slab that came back is lent again before a new one is taken."""
    pool = SlabPool(4 * PAGE, PAGE)
    for _ in range(10):
        async with pool.lease(), pool.lease():
            pass
    assert pool.statistics().num_allocations == 2
    assert pool.statistics().num_leases == 20
    pool.close()


@pytest.mark.parametrize(
    ("asked", "taken"), [(None, 4), (0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2), (100 * PAGE, 4)]
)
async def test_prewarming_takes_memory_ahead(asked: int | None, taken: int) -> None:
    """Rounded up to slabs, within the budget; leases then allocate nothing."""
    pool = SlabPool(4 * PAGE, PAGE)
    pool.prewarm(asked)
    assert pool.statistics().taken_nbytes == taken * PAGE
    pool.prewarm(asked)
    assert pool.statistics().num_allocations == taken
    for _ in range(3):
        async with pool.lease():
            pass
    assert pool.statistics().num_allocations == max(taken, 1)
    pool.close()


async def test_pinned_slabs_are_pinned_once_and_unpinned_at_the_end() -> None:
    """In their exact size; those taken before pinning began as well, even if they were out."""
    pins = Pins()
    pool = SlabPool(3 * PAGE, PAGE)
    async with pool.lease() as out:
        async with pool.lease():
            pass
        pool.use_pinning(pins)
        assert set(pins.pinned.values()) == {PAGE}
        assert not out.pinned
    for _ in range(2):
        async with pool.lease() as one, pool.lease() as two, pool.lease() as three:
            assert one.pinned
            assert two.pinned
            assert three.pinned
    assert pins.num_pins == 3
    pool.close()
    assert pins.pinned == {}


async def test_a_pool_is_not_closed_under_a_borrower() -> None:
    """That would be a bug of ours, and says so."""
    pool = SlabPool(PAGE, PAGE)
    async with pool.lease():
        with pytest.raises(AssertionError, match="leased"):
            pool.close()
    pool.close()
    assert pool.statistics().taken_nbytes == 0


class Refusing(Pins):
    """Refuses to pin as often as it is told."""

    def __init__(self, num_refusals: int) -> None:
        super().__init__()
        self.num_refusals = num_refusals

    def pin(self, address: int, nbytes: int) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise OSError("no")
        super().pin(address, nbytes)


@pytest.mark.parametrize("warm", [True, False])
async def test_a_failing_pin_loses_no_slab(*, warm: bool) -> None:
    """When the system refuses to pin, the next who asks can have the memory all the same."""
    pool = SlabPool(PAGE, PAGE)
    if warm:
        pool.prewarm()
    pool._pinning = Refusing(1)
    with pytest.raises(OSError, match="no"):
        async with pool.lease():
            pass
    async with pool.lease() as slab:
        assert slab.pinned
    assert pool.statistics().leased_nbytes == 0
    assert pool.statistics().taken_nbytes == PAGE
    pool.close()


async def test_a_pin_that_fails_at_the_hand_over_is_the_waiters_error() -> None:
    """Who gives a slab back is not bothered; who waited is told, and the next is served."""
    pool = SlabPool(PAGE, PAGE)
    got: list[str] = []

    async def borrow(name: str) -> None:
        async with pool.lease():
            got.append(name)

    async with pool.lease():
        first, second = (asyncio.create_task(borrow(name)) for name in ("first", "second"))
        await asyncio.sleep(0)
        pool.use_pinning(Refusing(1))
    with pytest.raises(OSError, match="no"):
        await first
    await second
    assert got == ["second"]
    assert pool.statistics().leased_nbytes == 0
    pool.close()
