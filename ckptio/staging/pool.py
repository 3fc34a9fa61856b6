"""A fixed pool of reusable slabs between tensors and storage.

A fresh page costs 3 to 5 times the copy that touches it, and a pinned page far more, so
slabs are taken once, touched once and used again for the life of the pool. The budget is
hard: whoever finds no free slab waits, first come first served, and a state larger than the
pool flows through in waves. Only `spare` lends beside it: a slab that is new, and gone afterwards.

Slabs are anonymous private maps: page-aligned, as direct I/O wants them, and of exactly
the size asked for (torch's pinned allocator rounds up to powers of two). They are kept
out of forked children: a data loader that forks while a slab is being written directly
would otherwise leave parent and child with different pages under the same write
(open(2), on O_DIRECT). A child finds zeros at their addresses, not holes: its own memory
would come to lie in these, and go with a pool that it inherited and drops.

Pinned memory is the fast path to a device, not a condition: where the system refuses, slabs
stay what they are, and copies to them take longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckptio.config import PAGE_NBYTES
from ckptio.errors import StagingError, StateError
from ckptio.staging.watchers import Watchers
from ckptio.storage.linux import address_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

#: `MADV_WIPEONFORK` (Linux 4.14), for which Python has no name: children find zeros.
_WIPE_ON_FORK = 18


#: Slabs that a device may still write to or read from, and those that cannot be unpinned: they
#: stay mapped, and pinned, until the process ends. A global, as nothing else shared is: they
#: outlive every engine, so none can own them.
_lost: list[Slab] = []


class CopiesLostError(StateError):
    """Nobody knows whether copies by a device have ended.

    A slab that such an error leaves the lease of is never lent again, nor given back: what a
    device writes there later would be the next owner's bytes, under a valid checksum.
    """


def _is_lost(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(CopiesLostError) is not None
    return isinstance(error, CopiesLostError)


class SupportsPinning(Protocol):
    """Locks memory for the fast path to a device, and lets it go."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin a range. Blocks."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        ...


class Slab:
    """One piece of the pool.

    Attributes:
        view: Its bytes, writable.
        address: Where they start; a multiple of the page.
        pinned: Whether a device can copy to it asynchronously.
    """

    __slots__ = ("_map", "address", "pinned", "view")

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (_WIPE_ON_FORK, mmap.MADV_HUGEPAGE):
            with contextlib.suppress(OSError):  # neither is vital
                self._map.madvise(advice)
        self.view = memoryview(self._map)
        self.address = address_in(self._map)
        self.pinned = False

    def touch(self) -> None:
        """Make the kernel give every page now rather than during a copy."""
        ctypes.memset(self.address, 0, len(self.view))

    def close(self) -> None:
        """Give the memory back. Nothing may use the slab any more.

        An error that somebody keeps may still refer to a part of it, through the frames of
        its traceback: then the memory goes when the error does.
        """
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool has and has done.

    Attributes:
        budget_nbytes: What it may take.
        taken_nbytes: What it has taken from the system, but for `spare` slabs and lost ones.
        leased_nbytes: What is in use now, by leases and by `prewarm`.
        peak_leased_nbytes: The most that was in use by leases at a time.
        num_allocations: Slabs taken from the system, ever.
        num_leases: Leases, ever.
        num_waiting: Who waits for a slab now.
    """

    budget_nbytes: int
    taken_nbytes: int
    leased_nbytes: int
    peak_leased_nbytes: int
    num_allocations: int
    num_leases: int
    num_waiting: int


class SlabPool:
    """Slabs of one size within a hard budget. Used from one event loop.

    Args:
        budget_nbytes: What it may take, in bytes; a multiple of `slab_nbytes`.
        slab_nbytes: Size of a slab; a multiple of the page.
        run: Calls what blocks (touching and pinning memory), elsewhere than on the loop, to
            its end even when cancelled. Without it, it is called right there.
        on_refused: Told why slabs are not pinned, once; and which memory stays pinned at the end.
    """

    def __init__(
        self,
        budget_nbytes: int,
        slab_nbytes: int,
        run: Callable[[Callable[[], None]], Awaitable[None]] | None = None,
        on_refused: Callable[[str], object] = lambda _: None,
    ) -> None:
        if slab_nbytes % PAGE_NBYTES or budget_nbytes % slab_nbytes:
            raise AssertionError((budget_nbytes, slab_nbytes))
        self.slab_nbytes = slab_nbytes
        self._max_slabs = budget_nbytes // slab_nbytes
        self._run = run or _call
        self._on_refused = on_refused
        self._pinning: SupportsPinning | None = None
        self._is_refused = False
        self._free: list[Slab] = []
        self._num_slabs = 0
        self._num_leased = 0
        self._peak_leased = 0
        self._num_leases = 0
        self._num_allocations = 0
        self._waiters: deque[asyncio.Future[Slab]] = deque()
        self._crowded = Watchers()
        self.freed = Watchers()  # called when a slab comes back that nobody waits for

    @asynccontextmanager
    async def lease(self, *, for_device: bool = False) -> AsyncIterator[Slab]:
        """Lend a slab for the length of the block; wait for one, in turn, if all are out.

        The borrower must be done with it, threads and streams included, when it leaves
        the block. The contents are whatever the last borrower left.

        Args:
            for_device: Whether a device copies from or to it: then it is pinned, where slabs
                are. Others get it as it is: pinning asks the driver, which who copies between
                files and the host's memory has no need of, and must not while somebody
                captures a CUDA graph.

        Raises:
            StagingError: The system gives no memory, and there is no slab to wait for.
        """
        slab = await self._acquire()
        try:
            if for_device:
                await self._pin(slab)
            yield slab
        except BaseException as error:
            if _is_lost(error):
                self._replace(slab)
            else:
                self._release(slab)
            raise
        else:
            self._release(slab)

    @asynccontextmanager
    async def spare(self, *, for_device: bool) -> AsyncIterator[Slab]:
        """Lend a slab beside the budget, new and gone afterwards; see `lease`."""
        slab = _new_slab(self.slab_nbytes)
        try:
            if for_device:
                await self._pin(slab)
            yield slab
        except BaseException as error:
            if _is_lost(error):
                _lost.append(slab)
            else:
                self._give_back([slab])
            raise
        else:
            self._give_back([slab])

    async def prewarm(self, nbytes: int | None = None) -> None:
        """Take and touch memory ahead of the first save: about 0.4 s a GB, elsewhere.

        Args:
            nbytes: How much to have, rounded up to slabs; the whole budget if not given.
        """
        target = self._max_slabs
        if nbytes is not None:
            target = min(target, -(-nbytes // self.slab_nbytes))
        for slab in self._free[:] if self._pinning is not None else ():
            if slab in self._free:  # nobody took it meanwhile
                self._free.remove(slab)
                await self._prepare(slab, is_new=False)
        while self._num_slabs < target:
            await self._prepare(self._allocate(), is_new=True)

    @contextlib.contextmanager
    def watched(self, on_crowded: Callable[[], object]) -> Iterator[None]:
        """Call `on_crowded` whenever somebody begins to wait for a slab, and now if so."""
        with self._crowded.having(on_crowded):
            if self._waiters:
                on_crowded()
            yield

    def use_pinning(self, pinning: SupportsPinning) -> None:
        """Pin slabs from now on, each before it is lent for a device. The first one counts.

        From any thread.
        """
        if self._pinning is None:
            self._pinning = pinning

    def num_free(self) -> int:
        """Say how many slabs are left for whoever comes now."""
        return self._max_slabs - self._num_leased - len(self._waiters)

    def statistics(self) -> PoolStatistics:
        """Say what the pool has and has done."""
        return PoolStatistics(
            budget_nbytes=self._max_slabs * self.slab_nbytes,
            taken_nbytes=self._num_slabs * self.slab_nbytes,
            leased_nbytes=self._num_leased * self.slab_nbytes,
            peak_leased_nbytes=self._peak_leased * self.slab_nbytes,
            num_allocations=self._num_allocations,
            num_leases=self._num_leases,
            num_waiting=len(self._waiters),
        )

    def close(self) -> None:
        """Give all memory back. No slab may be out."""
        if self._num_leased:
            raise AssertionError(f"{self._num_leased} slabs are still leased")
        self._give_back(self._free)
        self._free.clear()
        self._num_slabs = 0

    def _give_back(self, slabs: Sequence[Slab]) -> None:
        """Give the memory of slabs back, other than of those that cannot be unpinned.

        The driver still takes the addresses of these for pinned memory: what the system maps
        there next would be copied from and to the pages that were there before.
        """
        failures: list[Exception] = []
        for slab in slabs:
            try:
                if slab.pinned and self._pinning is not None:
                    self._pinning.unpin(slab.address)
            except Exception as error:  # the observer hears of it; the others have to go
                failures.append(error)
                _lost.append(slab)
            else:
                slab.close()
        if failures:
            nbytes = len(failures) * self.slab_nbytes
            self._on_refused(
                f"{nbytes} bytes cannot be unpinned, and so are not given back before the process"
                f" ends: {failures[0]}"
            )

    async def _acquire(self) -> Slab:
        if not self._waiters:
            if self._free:
                return self._lend(self._free.pop())
            if self._num_slabs < self._max_slabs:
                try:
                    return self._lend(self._allocate())
                except StagingError:  # it goes on with those that there are, as a smaller pool
                    if not self._num_slabs:
                        raise
        waiter: asyncio.Future[Slab] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._crowded.call()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.cancelled() and waiter.exception() is None:
                self._release(waiter.result())  # it was handed over in the very same turn
            raise

    def _lend(self, slab: Slab) -> Slab:
        self._num_leased += 1
        self._num_leases += 1
        self._peak_leased = max(self._peak_leased, self._num_leased)
        return slab

    def _release(self, slab: Slab) -> None:
        self._num_leased -= 1
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(self._lend(slab))
                return
        self._free.append(slab)
        self.freed.call()

    def _replace(self, slab: Slab) -> None:
        """Count a slab out that is lost, and let whoever waits for one have a new one."""
        _lost.append(slab)
        self._num_slabs -= 1
        try:
            new = self._allocate()
        except StagingError as error:
            self._num_leased -= 1
            while self._waiters and not self._num_slabs:  # nobody will give one back
                waiter = self._waiters.popleft()
                if not waiter.done():
                    waiter.set_exception(error)
        else:
            self._release(new)

    def _allocate(self) -> Slab:
        slab = _new_slab(self.slab_nbytes)
        self._num_slabs += 1
        self._num_allocations += 1
        return slab

    async def _prepare(self, slab: Slab, *, is_new: bool) -> None:
        """Touch a slab that nobody else has, if it is new, pin it, and give it to who waits."""
        self._num_leased += 1
        try:
            if is_new:
                await self._run(slab.touch)
            await self._pin(slab)
        finally:
            self._release(slab)

    async def _pin(self, slab: Slab) -> None:
        """Pin a slab that nobody else has, if slabs are pinned here and it is not yet."""
        pinning = self._pinning
        if pinning is None or slab.pinned or self._is_refused:
            return

        def pin() -> None:
            pinning.pin(slab.address, self.slab_nbytes)
            slab.pinned = True

        try:
            await self._run(pin)
        except Exception as error:  # the observer hears of it, once; it is slower without
            if not self._is_refused:
                self._is_refused = True
                self._on_refused(str(error))


def _new_slab(nbytes: int) -> Slab:
    """Take memory.

    Raises:
        StagingError: The system gives none.
    """
    try:
        return Slab(nbytes)
    except OSError as error:
        raise StagingError(
            f"the system gives no {nbytes} bytes for staging ({error.strerror}); lower slab_nbytes"
            " or pool_nbytes, or raise the limit of memory"
        ) from error


async def _call(work: Callable[[], None]) -> None:
    work()
