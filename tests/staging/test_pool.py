from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.config import MiB
from ckptio.errors import StagingError
from ckptio.staging import pool as pool_module
from ckptio.staging.pool import CopiesLostError, Slab, SlabPool
from ckptio.testing import run_virtual
from tests.programs import run_program
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable

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


async def test_a_slab_that_an_error_refers_to_can_be_closed() -> None:
    """Somebody who keeps a traceback does not keep the pool from closing."""
    pool = SlabPool(PAGE, PAGE)
    await pool.prewarm()
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


async def test_the_most_that_was_in_use_is_remembered() -> None:
    """Also when less of it is lent again afterwards."""
    pool = SlabPool(3 * PAGE, PAGE)
    async with pool.lease(), pool.lease():
        pass
    async with pool.lease():
        assert pool.statistics().leased_nbytes == PAGE
        assert pool.statistics().peak_leased_nbytes == 2 * PAGE
    pool.close()


@pytest.mark.parametrize(
    ("asked", "taken"), [(None, 4), (0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2), (100 * PAGE, 4)]
)
async def test_prewarming_takes_memory_ahead(asked: int | None, taken: int) -> None:
    """Rounded up to slabs, within the budget; leases then allocate nothing."""
    pool = SlabPool(4 * PAGE, PAGE)
    await pool.prewarm(asked)
    assert pool.statistics().taken_nbytes == taken * PAGE
    await pool.prewarm(asked)
    assert pool.statistics().num_allocations == taken
    for _ in range(3):
        async with pool.lease():
            pass
    assert pool.statistics().num_allocations == max(taken, 1)
    pool.close()


async def test_prewarmed_memory_is_there() -> None:
    """Its pages were touched: the first copy into it finds them."""

    def resident_nbytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * PAGE

    pool = SlabPool(64 * MiB, 16 * MiB)
    before = resident_nbytes()
    await pool.prewarm()
    assert resident_nbytes() - before > 60 * MiB
    pool.close()


async def test_pinned_slabs_are_pinned_once_and_unpinned_at_the_end() -> None:
    """In their exact size; those taken before pinning began as well, even if they were out."""
    pins = Pins()
    pool = SlabPool(3 * PAGE, PAGE)
    async with pool.lease() as out:
        async with pool.lease():
            pass
        pool.use_pinning(pins)
        assert not out.pinned
    host = [pool.lease() for _ in range(3)]
    async with host[0] as one, host[1] as two, host[2] as three:
        assert not any(slab.pinned for slab in (one, two, three))  # no device has a part in it
    for _ in range(2):
        leases = [pool.lease(for_device=True) for _ in range(3)]
        async with leases[0] as one, leases[1] as two, leases[2] as three:
            assert one.pinned
            assert two.pinned
            assert three.pinned
    assert pins.num_pins == 3
    assert set(pins.pinned.values()) == {PAGE}
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
    """Refuses to pin, or to unpin."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.num_asked = 0

    def pin(self, address: int, nbytes: int) -> None:
        self.num_asked += 1
        if self.what == "pin":
            raise OSError("no more than this")
        super().pin(address, nbytes)

    def unpin(self, address: int) -> None:
        self.num_asked += 1
        if self.what == "unpin":
            raise OSError("the device is gone")
        super().unpin(address)


async def test_memory_that_cannot_be_pinned_is_lent_as_it_is() -> None:
    """Copies take longer, and nothing fails: it is said once, and not tried again."""
    said: list[str] = []
    pool = SlabPool(2 * PAGE, PAGE, on_refused=said.append)
    pinning = Refusing("pin")
    pool.use_pinning(pinning)
    for _ in range(2):
        async with pool.lease(for_device=True) as one, pool.lease(for_device=True) as two:
            assert not one.pinned
            assert not two.pinned
    assert said == ["no more than this"]
    assert pinning.num_asked == 1
    pool.close()


async def test_that_memory_cannot_be_pinned_is_said_once_by_those_who_tried_together() -> None:
    """Two slabs are on their way to be pinned when the system refuses the first of them."""
    said: list[str] = []
    refused = asyncio.Event()

    async def run_elsewhere(work: Callable[[], None]) -> None:
        await refused.wait()
        work()

    pool = SlabPool(2 * PAGE, PAGE, run_elsewhere, said.append)
    pinning = Refusing("pin")
    pool.use_pinning(pinning)

    async def borrow() -> None:
        async with pool.lease(for_device=True) as slab:
            assert not slab.pinned

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(borrow())
        while pool.statistics().num_leases < 2:
            await asyncio.sleep(0)
        refused.set()
    assert pinning.num_asked == 2
    assert said == ["no more than this"]
    pool.close()


async def test_slabs_are_unpinned_by_who_has_pinned_them() -> None:
    """The first one counts: saves and loads on other devices bring others."""
    pins, others = Pins(), Pins()
    said: list[str] = []
    pool = SlabPool(2 * PAGE, PAGE, on_refused=said.append)
    pool.use_pinning(pins)
    async with pool.lease(for_device=True):
        pool.use_pinning(others)
        async with pool.lease(for_device=True):
            pass
    assert (pins.num_pins, others.num_pins) == (2, 0)
    pool.close()
    assert pins.pinned == {}
    assert said == []


@pytest.mark.parametrize("num_pinned", [3, 1])
async def test_memory_that_cannot_be_unpinned_stays_mapped(num_pinned: int) -> None:
    """A device would take what comes to lie there for pinned; all else goes, and it is said."""
    said: list[str] = []
    pool = SlabPool(3 * PAGE, PAGE, on_refused=said.append)
    pinning = Refusing("unpin")
    pool.use_pinning(pinning)
    await pool.prewarm()
    slabs = list(pool._free)
    for slab in slabs[num_pinned:]:
        slab.pinned = False
    kept = len(pool_module._lost)
    pool.close()
    assert pinning.num_asked == 3 + num_pinned
    (why,) = said
    assert why.startswith(f"{num_pinned * PAGE} bytes cannot be unpinned")
    assert why.endswith("the device is gone")
    assert pool_module._lost[kept:] == slabs[:num_pinned]
    del pool_module._lost[kept:]
    for number, slab in enumerate(slabs):
        if number < num_pinned:
            slab.view[0] = 1
            slab.close()
        else:
            with pytest.raises(ValueError, match="released"):
                slab.view[0]


async def test_a_spare_slab_that_cannot_be_unpinned_stays_mapped() -> None:
    """As those of the pool, and at once."""
    said: list[str] = []
    pool = SlabPool(PAGE, PAGE, on_refused=said.append)
    pool.use_pinning(Refusing("unpin"))
    kept = len(pool_module._lost)
    async with pool.spare(for_device=True) as slab:
        pass
    assert pool_module._lost[kept:] == [slab]
    del pool_module._lost[kept:]
    slab.view[0] = 1
    slab.close()
    assert len(said) == 1
    pool.close()


async def test_a_spare_slab_that_a_device_may_write_to_stays_mapped() -> None:
    """As those of the pool; what any other error ends goes at once."""
    pool = SlabPool(PAGE, PAGE)
    kept = len(pool_module._lost)
    with pytest.raises(CopiesLostError):
        async with pool.spare(for_device=True) as lost:
            raise CopiesLostError("an event cannot be waited for")
    with pytest.raises(OSError, match="unplugged"):
        async with pool.spare(for_device=True) as other:
            raise OSError("unplugged")
    assert pool_module._lost[kept:] == [lost]
    del pool_module._lost[kept:]
    lost.view[0] = 1
    lost.close()
    with pytest.raises(ValueError, match="released"):
        other.view[0]
    pool.close()


@given(seed=seeds, slabs=st.integers(1, 4), at_s=st.floats(0, 3))
def test_what_blocks_is_called_elsewhere_and_waited_for(seed: int, slabs: int, at_s: float) -> None:
    """Touching and pinning, slab by slab; leases come in between; cancelled, nothing is lost."""
    pins = Pins()

    async def run_slowly(work: object) -> None:
        assert callable(work)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.25)
            work()
            return
        work()  # the thread ends its work, whoever waits for it
        raise asyncio.CancelledError

    async def scenario() -> None:
        pool = SlabPool(slabs * PAGE, PAGE, run_slowly)
        pool.use_pinning(pins)

        async def borrow() -> None:
            for _ in range(3):
                async with pool.lease(for_device=True) as slab:
                    assert slab.pinned
                    await asyncio.sleep(0.1)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_s), asyncio.TaskGroup() as group:
                group.create_task(pool.prewarm())
                group.create_task(pool.prewarm())
                group.create_task(borrow())
        assert pool.statistics().leased_nbytes == 0
        assert pool.statistics().taken_nbytes == len(pool._free) * PAGE <= slabs * PAGE
        pool.close()
        assert pins.pinned == {}

    run_virtual(scenario(), seed=seed)


async def test_memory_is_touched_and_pinned_where_the_loop_is_not() -> None:
    """Both take a second a GB: who owns the pool says where, and each slab goes there twice."""
    pins = Pins()
    num_pinned: list[int] = []

    async def run_elsewhere(work: Callable[[], None]) -> None:
        before = pins.num_pins
        work()
        num_pinned.append(pins.num_pins - before)

    pool = SlabPool(2 * PAGE, PAGE, run_elsewhere)
    pool.use_pinning(pins)
    await pool.prewarm()
    assert num_pinned == [0, 1, 0, 1]
    pool.close()


async def test_prewarming_pins_what_was_there_and_leaves_who_took_some_alone() -> None:
    """A slab that was taken before there was a device is pinned too, unless it is lent by then."""
    pins = Pins()
    took = asyncio.Event()

    async def run_elsewhere(work: Callable[[], None]) -> None:
        if pins.num_pins == 0:
            await took.wait()
        work()

    pool = SlabPool(2 * PAGE, PAGE, run_elsewhere)
    async with pool.lease(), pool.lease():
        pass
    pool.use_pinning(pins)
    async with asyncio.TaskGroup() as group:
        group.create_task(pool.prewarm())
        await asyncio.sleep(0)
        async with pool.lease() as lent:
            took.set()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not lent.pinned
    assert pins.num_pins == 1
    await pool.prewarm()
    assert pins.num_pins == 2
    assert pool.statistics().num_allocations == 2
    pool.close()


def test_children_find_zeros_where_the_pool_is() -> None:
    """Not holes, where their own memory would come to lie, to go with the pool they drop."""
    program = """
import os, sys
from ckptio.staging.pool import Slab
slab = Slab(16 << 20)
slab.view[:4] = b"data"
child = os.fork()
if not child:
    try:
        assert bytes(slab.view[:4]) == bytes(4)
        others = [bytearray(16 << 20) for _ in range(8)]
        slab.close()
        assert all(not any(other[:: 1 << 12]) for other in others)
        os._exit(0)
    except BaseException:
        os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert bytes(slab.view[:4]) == b"data"
"""
    run_program(program)


async def test_a_pool_goes_on_with_the_memory_that_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives less than the budget; and says so where it gives none."""
    pool = SlabPool(3 * PAGE, PAGE)
    given: list[Slab] = []

    def scarce(nbytes: int) -> Slab:
        if len(given) == most:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        given.append(Slab(nbytes))
        return given[-1]

    monkeypatch.setattr("ckptio.staging.pool.Slab", scarce)
    most = 0
    with pytest.raises(StagingError, match="Cannot allocate memory"):
        async with pool.lease():
            pass
    with pytest.raises(StagingError):
        await pool.prewarm()
    most = 1
    async with asyncio.TaskGroup() as group:

        async def borrow() -> None:
            async with pool.lease():
                await asyncio.sleep(0.01)

        for _ in range(4):
            group.create_task(borrow())
        await asyncio.sleep(0.001)
        assert pool.statistics().num_waiting == 3
    assert pool.statistics().taken_nbytes == PAGE
    assert pool.statistics().leased_nbytes == 0
    pool.close()


async def test_who_waits_for_a_slab_that_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no memory for another one, and none that will come back."""
    pool = SlabPool(PAGE, PAGE)

    async def lose() -> None:
        async with pool.lease():
            await asyncio.sleep(0.01)
            monkeypatch.setattr("ckptio.staging.pool.Slab", refuse)
            raise CopiesLostError("an event cannot be waited for")

    async def wait() -> None:
        async with pool.lease():
            pass

    def refuse(_: int) -> Slab:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    kept = len(pool_module._lost)
    ends = await asyncio.gather(lose(), wait(), wait(), return_exceptions=True)
    del pool_module._lost[kept:]
    assert [type(end) for end in ends] == [CopiesLostError, StagingError, StagingError]
    assert pool.statistics().leased_nbytes == 0
    pool.close()


@in_virtual_time
async def test_who_waits_for_a_slab_that_is_lost_is_told_though_another_gave_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancelled in the very turn in which it is lost: the next one hears of it all the same."""

    def refuse(_: int) -> Slab:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    pool = SlabPool(PAGE, PAGE)

    async def wait() -> None:
        async with pool.lease():
            pass

    waiting: list[asyncio.Task[None]] = []
    kept = len(pool_module._lost)
    with pytest.raises(CopiesLostError):
        async with pool.lease():
            for number in (1, 2):
                waiting.append(asyncio.create_task(wait()))
                while pool.statistics().num_waiting < number:
                    await asyncio.sleep(0)
            monkeypatch.setattr("ckptio.staging.pool.Slab", refuse)
            waiting[0].cancel()
            raise CopiesLostError("an event cannot be waited for")
    del pool_module._lost[kept:]
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError, StagingError]
    assert pool.statistics().leased_nbytes == pool.statistics().num_waiting == 0
    pool.close()


@in_virtual_time
async def test_who_waits_for_a_slab_that_is_lost_gets_one_that_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no memory for another one, but somebody else still has one: nobody need fail."""
    pool = SlabPool(2 * PAGE, PAGE)
    crowded = asyncio.Event()

    async def lose() -> None:
        async with pool.lease():
            await crowded.wait()
            monkeypatch.setattr("ckptio.staging.pool.Slab", refuse)
            raise CopiesLostError("an event cannot be waited for")

    async def hold() -> str:
        async with pool.lease():
            await lost.wait()
        return "held"

    async def wait() -> str:
        while pool.statistics().leased_nbytes < 2 * PAGE:
            await asyncio.sleep(0)
        async with pool.lease():
            return "got one"

    def refuse(_: int) -> Slab:
        lost.set()
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    lost = asyncio.Event()
    kept = len(pool_module._lost)
    with pool.watched(crowded.set):
        ends = await asyncio.gather(lose(), hold(), wait(), return_exceptions=True)
    del pool_module._lost[kept:]
    assert isinstance(ends[0], CopiesLostError)
    assert [*ends[1:]] == ["held", "got one"]
    assert pool.statistics().taken_nbytes == PAGE
    assert pool.statistics().leased_nbytes == 0
    assert not pool._crowded._functions
    pool.close()


async def test_who_is_cancelled_as_that_is_said_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load cancels lanes that it needs no more: it does not fail of one."""
    pool = SlabPool(PAGE, PAGE)
    kept = len(pool_module._lost)

    async def wait() -> None:
        async with pool.lease():
            pass

    def refuse(_: int) -> Slab:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with pytest.raises(CopiesLostError):
        async with pool.lease():
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0)
            monkeypatch.setattr(pool_module, "Slab", refuse)
            raise CopiesLostError("an event cannot be waited for")
    waiting.cancel()
    await asyncio.wait([waiting])
    del pool_module._lost[kept:]
    assert waiting.cancelled()
    assert pool.statistics().leased_nbytes == 0
    pool.close()


@in_virtual_time
async def test_a_slab_that_is_lost_makes_room_for_another_one() -> None:
    """What a device may write to counts for nothing: who waits gets a new one in its place."""
    pool = SlabPool(PAGE, PAGE)
    crowded = asyncio.Event()
    slabs: list[Slab] = []

    async def lose() -> None:
        async with pool.lease() as slab:
            slabs.append(slab)
            await crowded.wait()
            raise ExceptionGroup("copies", [CopiesLostError("an event cannot be waited for")])

    async def wait() -> None:
        while not slabs:
            await asyncio.sleep(0)
        async with pool.lease() as slab:
            slabs.append(slab)

    kept = len(pool_module._lost)
    with pool.watched(crowded.set):
        await asyncio.gather(lose(), wait(), return_exceptions=True)
    lost, new = slabs
    assert pool_module._lost[kept:] == [lost]
    del pool_module._lost[kept:]
    assert new is not lost
    statistics = pool.statistics()
    assert statistics.taken_nbytes == PAGE
    assert statistics.leased_nbytes == 0
    assert statistics.num_allocations == 2
    pool.close()
    lost.view[0] = 1  # it is still mapped
    lost.close()
