"""`scale`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bench.harness import Bench, Metric, Subject, case
from bench.isolate import in_child
from bench.planners import (
    Size,
    measure_dcp,
    measure_exchange,
    measure_replicated,
    measure_save,
)
from bench.rounds import ANSWER_NBYTES, measure_rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.harness import Figures, Group, Kind

_MB = 1e-6


def _metric(key: str, label: str, factor: float = 1.0, digits: int = 2) -> Metric:
    return Metric(key=key, label=label, factor=factor, digits=digits, has_ratio=False)


_PLAN = (
    _metric("decode_s", "decode, s"),
    _metric("plan_s", "plan, s"),
    _metric("answer_s", "encode, s"),
    _metric("peak_nbytes", "peak, MB", _MB, 0),
    _metric("listing_nbytes", "to rank 0, MB", _MB, 1),
    _metric("answer_nbytes", "from it, MB", _MB, 1),
)
_SAVE = (
    *_PLAN,
    _metric("own_s", "own plan, s", digits=4),
    _metric("receipt_nbytes", "receipts, MB", _MB, 1),
    _metric("manifest_s", "manifest, s"),
    _metric("manifest_nbytes", "manifest, MB", _MB, 1),
)
_ROUNDS = (
    _metric("join_s", "meet, s"),
    _metric("empty_s", "empty, s", digits=4),
    _metric("empty_cpu_s", "CPU, s", digits=4),
    _metric("plan_s", "plan, s"),
    _metric("plan_cpu_s", "CPU, s"),
    _metric("give_s", "1 MiB to all, s"),
    _metric("give_cpu_s", "CPU, s"),
)
#: Ranks, and blocks that each holds.
_SIZES = ((64, 256), (64, 16_384), (1_024, 1_024), (16_384, 64))
_LOADS = (64, 1_024, 16_384)
_REPLICATED = (64, 256, 1_024)
#: DCP's planner needs a minute for a million.
_DCP_SIZES = ((64, 256), (1_024, 64))
_MET = (250, 1_000, 4_000)
_PER_RANK = 64
_AIM = 16_384


@case(rounds=3)
async def scale(bench: Bench) -> None:
    """Measure what very many ranks cost rank 0: plans, rounds, and what crosses the network.

    There are no tensors, and no ranks but in the last table: ranks' messages are made up,
    and rank 0 decodes them, plans, and encodes the answers as in a save and in a load.
    "Peak" is memory beside the messages. Each plan is measured in a process of its own. DCP's
    `create_global_plan` has the same blocks, pickled, and its manifest is `.metadata`
    without places. In the last table all ranks are there, connected over loopback: all but
    rank 0 in one other process, so CPU is rank 0's alone; wall time is that of both.

    What breaks first, with n = 16,384 ranks of 1 GiB and 64 blocks each: what rank 0 sends. A
    load begins with the manifest for everybody. That is 5.5 kB a rank of checksums (4 bytes
    a MiB, in base64) and some 35 bytes a block of the tensor table, 8 kB x n in all, and a
    star sends it n times: 8 kB x n² are 2 TB, eleven minutes at 25 Gbit/s. (With 12 GiB a
    rank it is also longer than the 1 GiB that a manifest and a message may have; larger
    blocks under a checksum are the way around that.) Next is the plan of a load in which
    bytes are passed on: 64 units a rank, each in the answers of all that take it, are planned
    and written down by one core in some ten seconds. Then the first save, once: 90 bytes a
    block are gathered, and are decoded, planned and answered by one core; an unchanged state
    sends only receipts, 5.5 kB x n. Rounds as such come last: they cost rank 0 tens of
    microseconds of CPU a rank, a second for all; 16,384 connections are files and
    buffers that a process can have. What ranks want is no matter while each wants the files
    of a few. If all want everything, what each is told, some 30 bytes a unit and 5 a rank, is
    the same for all and encoded once; but each says what it wants, n x files in all, which
    would have to be said once for all ranks that want the same.

    So the next step is a tree: a leader for each host, to whom the host's ranks connect;
    equal messages are folded on the way up (digests of wants and trees), and one copy goes to
    a host on the way down, passed on from leader to leader, so that no rank sends more than
    its children's. And a manifest in parts: a head with files and their sizes, the tensor
    table, and the checksums of each rank's files in a part of their own, so that a rank
    reads the head, the table, and the sums of files that it opens. Neither is built: below
    a thousand ranks all of this is less than the time it takes to open the files.
    """
    saves = [_planned("ckptio", "ckptio", measure_save, _scaled(bench, s)) for s in _SIZES]
    saves += [_planned("DCP", "peer", measure_dcp, _scaled(bench, s)) for s in _DCP_SIZES]
    await bench.compare("plan a save", saves, metrics=_SAVE, has_warmup=False)
    for title, measure, counts in (
        ("ranks x files of 1 GiB, 4 of which each rank wants", measure_exchange, _LOADS),
        ("16 GiB in a file a rank, and each rank wants all", measure_replicated, _REPLICATED),
    ):
        sizes = [Size(max(4 + i, round(n * bench.scale)), 1) for i, n in enumerate(counts)]
        loads = [_planned("ckptio", "ckptio", measure, size) for size in sizes]
        await bench.compare(f"plan a load: {title}", loads, metrics=_PLAN, has_warmup=False)
    sizes = [Size(max(3 + i, round(n * bench.scale)), _PER_RANK) for i, n in enumerate(_MET)]
    await bench.compare(
        "rounds over loopback", [_met(size) for size in sizes], metrics=_ROUNDS, has_warmup=False
    )
    rounds = bench.groups[-1]
    rounds.note = _extrapolated(rounds, [size.num_ranks for size in sizes])
    bench.groups[0].note = _broadcast(bench.groups[0])


def _scaled(bench: Bench, size: tuple[int, int]) -> Size:
    """Shrink both numbers alike."""
    factor = min(1.0, bench.scale) ** 0.5
    num_ranks, per_rank = size
    return Size(max(4, round(num_ranks * factor)), max(8, round(per_rank * factor)))


def _planned(
    name: str, kind: Kind, measure: Callable[[Size], dict[str, float]], size: Size
) -> Subject:
    async def run() -> Figures:
        return await asyncio.to_thread(in_child, measure, size)

    return Subject(name=f"{name}, {size}", kind=kind, run=run)


def _met(size: Size) -> Subject:
    async def run() -> Figures:
        return await measure_rounds(size)

    return Subject(name=f"ckptio, {size}", kind="ckptio", run=run)


def _extrapolated(group: Group, counts: Sequence[int]) -> str:
    """Fit a line through the medians, and say where it is at 16,384 ranks."""
    told = []
    for key, label in (
        ("empty_cpu_s", "an empty round"),
        ("plan_cpu_s", "a round with listings"),
        ("give_cpu_s", f"{ANSWER_NBYTES >> 20} MiB to all"),
    ):
        values = [row.median(key) or 0.0 for row in group.rows]
        start_s, step_s = fit_line(counts, values)
        at_s = start_s + step_s * _AIM
        told.append(f"{label} {start_s * 1e3:.1f} ms + {step_s * 1e6:.0f} µs n = {at_s:.2f} s")
    return f"CPU of rank 0 as a + b n, by least squares; at n = {_AIM:,} ranks: {'; '.join(told)}."


def fit_line(xs: Sequence[int], ys: Sequence[float]) -> tuple[float, float]:
    """Fit a line by least squares; gives its start and its slope."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    slope /= sum((x - mean_x) ** 2 for x in xs)
    return mean_y - slope * mean_x, slope


def _broadcast(group: Group) -> str:
    """Say what it takes to give the manifest of the largest job to all its ranks."""
    nbytes = group.rows[len(_SIZES) - 1].median("manifest_nbytes") or 0.0
    whole = nbytes * _AIM
    return (
        f"The manifest of {nbytes / 1e6:.1f} MB to {_AIM:,} ranks is {whole / 1e9:,.0f} GB out of"
        f" rank 0 in a star: {whole * 8 / 25e9:,.0f} s at 25 Gbit/s. To 2,048 hosts of 8 ranks,"
        f" in a tree of 16 children each: {nbytes * 16 * 3 * 8 / 25e9:.1f} s."
    )
