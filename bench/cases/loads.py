"""`load_cold` and `load_warm`."""

from __future__ import annotations

from bench.baselines import loaders
from bench.harness import Bench, case
from bench.states import gpt_like
from bench.subjects import Loads
from ckptio import Engine

#: State a is in the page cache five times over, as each peer wants it: half of it will do.
_WARM_SCALE = 0.5


@case(rounds=5)
async def load_cold(bench: Bench) -> None:
    """Time a load of state a into given tensors, its files not in the page cache.

    Against safetensors, torch.load(mmap=True) and dcp.load, and against reading as many
    bytes directly into a small buffer. Files are dropped from the page cache before each
    load, and cachestat confirms it. ckptio checks every block's checksum, the peers none.
    """
    loads = Loads(bench, gpt_like(bench.scale), loaders())
    async with Engine() as engine:
        await engine.prewarm()
        await loads.save(engine)
        subjects = loads.subjects(engine, is_cold=True)
        await bench.compare("cold load of state a", subjects, nbytes=loads.nbytes)


@case(rounds=5)
async def load_warm(bench: Bench) -> None:
    """Time a load of half of state a into given tensors, its files in the page cache.

    Against safetensors, torch.load(mmap=True) and dcp.load, and against reading as many
    cached bytes into a small buffer. Files are read before each load, and cachestat
    confirms that they are there.
    """
    loads = Loads(bench, gpt_like(bench.scale * _WARM_SCALE), loaders())
    async with Engine() as engine:
        await engine.prewarm()
        await loads.save(engine)
        subjects = loads.subjects(engine, is_cold=False)
        await bench.compare("warm load of half of state a", subjects, nbytes=loads.nbytes)
