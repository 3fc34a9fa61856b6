"""`save_ranks` and `load_ranks`."""

from __future__ import annotations

from bench.harness import Bench, case
from bench.jobs import (
    DCP_LOAD,
    SAVE_METRICS,
    WORLD_SIZES,
    WRITERS,
    ckptio,
    job,
    load_metrics,
    raw_read,
    raw_write,
    savers,
)


@case(rounds=5)
async def save_ranks(bench: Bench) -> None:
    """Time a durable save of 1 GiB by 2 and by 4 ranks: a GPT and its optimizer under FSDP.

    Every tensor is a DTensor that is cut by rows over a gloo group; steps are on every
    rank. Against dcp.save with the same state, mesh and sync, with its default and with its
    best settings. The slowest rank counts. Engines and process groups are kept, as a
    trainer does, so all but the first save find their plan made; DCP keeps its plans where
    the row says so.
    """
    for world_size in WORLD_SIZES:
        with job(bench, world_size) as ranks:
            ranks.make("rows")
            path = bench.path("saved")
            subjects = [*(ranks.saves(way, path) for way in savers())]
            subjects.append(raw_write(bench, ranks.nbytes))
            await bench.compare(
                f"durable save by {world_size} ranks",
                subjects,
                metrics=SAVE_METRICS,
                nbytes=ranks.nbytes,
                saved_nbytes=ranks.nbytes,
            )


@case(rounds=5)
async def load_ranks(bench: Bench) -> None:
    """Time a load of 1 GiB by the 2 or 4 ranks that have saved it, each its own part.

    Against dcp.load with the same state and mesh, files out of the page cache and in it.
    The slowest rank counts. ckptio checks every block's checksum, DCP none. Engines are kept,
    so from the second load on ckptio finds the manifest in its metadata cache.
    """
    for world_size in WORLD_SIZES:
        with job(bench, world_size) as ranks:
            ranks.make("rows")
            ours, theirs = (bench.path(f"load-{way.method['by']}") for way in WRITERS)
            for way, path in zip(WRITERS, (ours, theirs), strict=True):
                ranks.write(way, path)
            for how, is_cold in (("cold", True), ("warm", False)):
                await bench.compare(
                    f"{how} load by {world_size} ranks, same layout",
                    [
                        ranks.loads(ckptio(), ours, is_cold=is_cold),
                        ranks.loads(DCP_LOAD, theirs, is_cold=is_cold),
                        raw_read(bench, ours, is_cold=is_cold),
                    ],
                    metrics=load_metrics(is_cold=is_cold),
                    nbytes=ranks.nbytes,
                )
