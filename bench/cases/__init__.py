"""The cases, in the order in which they run."""

from bench.cases.cuda import cuda_load, cuda_save, cuda_stall
from bench.cases.first import first_save
from bench.cases.huge import one_huge
from bench.cases.loads import load_back, load_cold, load_warm
from bench.cases.local import save_local, save_over
from bench.cases.loop import loop_lag
from bench.cases.manifest import manifest_open
from bench.cases.memory import memory
from bench.cases.others import other_peers
from bench.cases.ranks import load_ranks, save_ranks
from bench.cases.reshard import replicated_load, reshard
from bench.cases.s3 import load_s3, partial_s3, save_s3
from bench.cases.scale import scale
from bench.cases.small import many_small
from bench.cases.stall import stall
from bench.cases.train import train_slowdown

CASES = (
    save_local,
    save_over,
    one_huge,
    many_small,
    stall,
    first_save,
    load_cold,
    load_warm,
    load_back,
    manifest_open,
    loop_lag,
    train_slowdown,
    memory,
    other_peers,
    save_ranks,
    load_ranks,
    reshard,
    replicated_load,
    scale,
    save_s3,
    load_s3,
    partial_s3,
    cuda_save,
    cuda_stall,
    cuda_load,
)

__all__ = ["CASES"]
