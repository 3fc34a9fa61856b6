"""`reshard` and `replicated_load`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.harness import Bench, case
from bench.jobs import (
    DCP_BROADCAST,
    DCP_LOAD,
    WORLD_SIZES,
    WRITERS,
    ckptio,
    job,
    load_metrics,
    raw_read,
)

if TYPE_CHECKING:
    from bench.jobs import Job
    from bench.sharded import Layout

#: Ranks that save rows, ranks that load, and what these want.
_WAYS: tuple[tuple[int, int, Layout], ...] = (
    (2, 2, "columns"),
    (4, 4, "columns"),
    (2, 4, "rows"),
    (4, 2, "rows"),
)
_HOW = (("cold", True), ("warm", False))


@case(rounds=5)
async def reshard(bench: Bench) -> None:
    """Time a load of 1 GiB into another layout than the one it was saved in.

    Rows are loaded as columns by 2 and by 4 ranks, and what 2 ranks have saved by 4, and the
    other way round. Against dcp.load with the same state and mesh, files out of the page
    cache and in it. The slowest rank counts.
    """
    with job(bench, 2) as two, job(bench, 4) as four:
        jobs = {2: two, 4: four}
        for num_writers, num_readers, layout in _WAYS:
            paths = _written(bench, jobs[num_writers])
            title = f"rows of {num_writers} ranks to {layout} of {num_readers}"
            await _loads(bench, jobs[num_readers], layout, paths, title)


def _written(bench: Bench, ranks: Job) -> list[str]:
    """Save a state that is cut by rows, in each format."""
    ranks.make("rows")
    paths = []
    for way in WRITERS:
        paths.append(bench.path(f"load-{way.method['by']}"))
        ranks.write(way, paths[-1])
    return paths


async def _loads(bench: Bench, ranks: Job, layout: Layout, paths: list[str], title: str) -> None:
    ranks.make(layout)
    ours, theirs = paths
    for how, is_cold in _HOW:
        await bench.compare(
            f"{title}, {how}",
            [
                ranks.loads(ckptio(), ours, is_cold=is_cold),
                ranks.loads(DCP_LOAD, theirs, is_cold=is_cold),
            ],
            metrics=load_metrics(is_cold=is_cold),
            nbytes=ranks.nbytes,
        )


@case(rounds=5)
async def replicated_load(bench: Bench) -> None:
    """Time a load of 1 GiB by 2 and by 4 ranks, each of which wants all of it.

    As with DDP, or when a state that was sharded is looked at whole. ckptio with each
    setting of `exchange`: read by every rank for itself ("off"), read once and passed on
    ("on"), or whichever it takes for faster ("auto"). Ranks of one host pass it on in shared
    memory; over TCP as ranks of several hosts do, here through the loopback interface.
    Against dcp.load, in which every rank reads all, and against a load on rank 0 that is
    broadcast. The slowest rank counts; rates are those of one rank's bytes.
    """
    for world_size in WORLD_SIZES:
        with job(bench, world_size) as ranks:
            ours, theirs = _written(bench, ranks)
            ranks.make("whole")
            ways = [ckptio('ckptio (exchange="auto")')]  # the default, so the engine is one
            ways += [ckptio(f'ckptio (exchange="{e}")', exchange=e) for e in ("on", "off")]
            ways += [ckptio('ckptio (exchange="on", TCP)', exchange="on", is_apart=True)]
            for how, is_cold in _HOW:
                await bench.compare(
                    f"{how} load of everything by each of {world_size} ranks",
                    [
                        *(ranks.loads(way, ours, is_cold=is_cold) for way in ways),
                        ranks.loads(DCP_LOAD, theirs, is_cold=is_cold),
                        ranks.loads(DCP_BROADCAST, theirs, is_cold=is_cold),
                        raw_read(bench, ours, is_cold=is_cold),
                    ],
                    metrics=load_metrics(is_cold=is_cold),
                    nbytes=ranks.nbytes,
                )
