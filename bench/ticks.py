"""How late a loop is while something else goes on."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from bench.harness import Clock, Metric

if TYPE_CHECKING:
    from bench.harness import Figures, Step

P50 = Metric(key="p50_s", label="p50, ms", factor=1e3, digits=2, has_ratio=False)
P99 = Metric(key="p99_s", label="p99, ms", factor=1e3, digits=2)
WORST = Metric(key="worst_s", label="max, ms", factor=1e3, digits=2)
TOTAL = Metric(key="elapsed_s", label="save + load, s", has_rate=True)
_TICK_S = 0.001


async def with_ticks(work: Step) -> Figures:
    """Do the work on this loop, and say how late the loop was meanwhile."""
    lags: list[float] = []
    ticker = asyncio.create_task(_tick(lags), name="ticker")
    await asyncio.sleep(10 * _TICK_S)
    lags.clear()
    clock = Clock()
    await work()
    elapsed_s = clock.elapsed_s()
    await asyncio.sleep(2 * _TICK_S)  # a tick that is due sees how late it is
    ticker.cancel()
    await asyncio.wait((ticker,))
    lags.sort()
    return {
        P50.key: lags[len(lags) // 2],
        P99.key: lags[min(len(lags) - 1, len(lags) * 99 // 100)],
        WORST.key: lags[-1],
        TOTAL.key: elapsed_s,
    }


async def _tick(lags: list[float]) -> None:
    """Wake every millisecond; put down how late, for each tick that was due by then."""
    due = time.perf_counter()
    while True:
        due += _TICK_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        now = time.perf_counter()
        while due <= now:
            lags.append(now - due)
            due += _TICK_S
        due -= _TICK_S
