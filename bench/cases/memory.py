"""`memory`."""

from __future__ import annotations

import shutil

from bench.harness import Bench, Metric, Subject, case
from bench.isolate import WAYS, Order, measure_in_child, missing

_MIB = 1 / (1 << 20)
SAVE = Metric(key="save_nbytes", label="save, MiB", factor=_MIB, digits=0)
SAVE_ANON = Metric(
    key="save_anon_nbytes", label="without files", factor=_MIB, digits=0, has_ratio=False
)
LOAD = Metric(key="load_nbytes", label="load, MiB", factor=_MIB, digits=0)
LOAD_ANON = Metric(
    key="load_anon_nbytes", label="without files", factor=_MIB, digits=0, has_ratio=False
)
_SCALE = 0.5


@case(rounds=3)
async def memory(bench: Bench) -> None:
    """Measure the peak of extra memory while a state is saved, and loaded into given tensors.

    Half of state a, more than six times ckptio's pool. Each measurement is a process of its
    own; the kernel's high-water mark (VmHWM) is reset before each call and compared with
    what was resident then. Mapped files count in it though the kernel can take them back;
    "without files" is anonymous memory only, sampled every 2 ms.
    """
    order = Order.of_scale(bench.scale * _SCALE)
    await bench.compare(
        f"peak extra memory, state of {order.state_nbytes / 1e6:,.0f} MB",
        [_subject(bench, way, order) for way in WAYS],
        metrics=(SAVE, SAVE_ANON, LOAD, LOAD_ANON),
        has_warmup=False,
        note=f"ckptio's pool: {order.pool_nbytes / (1 << 20):,.0f} MiB.",
    )


def _subject(bench: Bench, way: str, order: Order) -> Subject:
    path = bench.path("isolated")

    async def run() -> dict[str, float]:
        return measure_in_child(way, order, path)

    async def clean() -> None:
        shutil.rmtree(path, ignore_errors=True)

    return Subject(
        name=way,
        kind="ckptio" if way == "ckptio" else "peer",
        run=run,
        clean=clean,
        missing=missing(way),
    )
