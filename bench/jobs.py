"""Subjects that cases with several ranks share: saves and loads of a job, and raw limits."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.crew import Crew
from bench.disk import drop_cache, refuses_direct, refuses_drop, tree_nbytes, warm_cache
from bench.harness import SECONDS, Metric, Subject, timed
from bench.limits import MiB, read_blocks, write_direct

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.harness import Bench, Figures, Kind
    from bench.sharded import Layout

    Json = Any

#: Bytes that the ranks have read, all together, for each byte of the state. Of cold loads only:
#: what is mapped is not read, and a warm load of ckptio maps its files.
READ = Metric(key="read_ratio", label="read / state", has_ratio=False, digits=2)
#: Bytes that the rank has written that wrote most, by the mean of all.
BALANCE = Metric(key="balance_ratio", label="most / mean written", has_ratio=False, digits=2)
SAVE_METRICS = (SECONDS, BALANCE)
#: Numbers of ranks that jobs are measured with.
WORLD_SIZES = (2, 4)
_NUM_SAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to save and to load.

    Attributes:
        name: As the table has it.
        method: As `bench.rank.Rank` wants it.
        kind: Whose it is.
        is_slow: Measured in fewer rounds.
    """

    name: str
    method: Mapping[str, Json]
    kind: Kind = "peer"
    is_slow: bool = False


def ckptio(name: str = "ckptio", **options: Json) -> Way:
    """Save and load with ckptio."""
    return Way(name=name, method={"by": "ckptio", **options}, kind="ckptio")


def dcp(*, num_threads: int = 1, has_crc: bool = False, keeps_plans: bool = False) -> Way:
    """Save with DCP, synced."""
    words = [f"{num_threads} thread{'s' if num_threads > 1 else ''}"]
    words.append("default crc32" if has_crc else "crc32 off")
    words += ["plans kept"] * keeps_plans
    method = {
        "by": "dcp",
        "num_threads": num_threads,
        "has_crc": has_crc,
        "keeps_plans": keeps_plans,
    }
    return Way(name=f"dcp.save ({', '.join(words)})", method=method, is_slow=has_crc)


def savers() -> list[Way]:
    """Give the ways to save that are compared; the best of DCP's settings are among them."""
    return [
        ckptio(),
        dcp(),
        dcp(num_threads=2),
        dcp(num_threads=2, keeps_plans=True),
        dcp(has_crc=True),
    ]


#: DCP has no settings when it loads.
DCP_LOAD = Way(name="dcp.load", method={"by": "dcp"})
DCP_BROADCAST = Way(name="dcp.load on rank 0 + broadcast", method={"by": "broadcast"})
#: What writes what is loaded: for each way, another format.
WRITERS = (ckptio(), dcp(num_threads=2))


def load_metrics(*, is_cold: bool) -> Sequence[Metric]:
    """Give what loads are compared by."""
    return (SECONDS, READ) if is_cold else (SECONDS,)


@contextlib.contextmanager
def job(bench: Bench, world_size: int) -> Iterator[Job]:
    """Start a job, and end it."""
    bench.say(f"{bench.case}: starting {world_size} ranks")
    with Crew(world_size) as crew:
        yield Job(bench, crew)


class Job:
    """A job of several ranks that is measured; made by `job`.

    Attributes:
        nbytes: Bytes of the state of all ranks, each counted once.
    """

    def __init__(self, bench: Bench, crew: Crew) -> None:
        self.nbytes = 0
        self._bench = bench
        self._crew = crew

    def make(self, layout: Layout) -> None:
        """Have the ranks make a state."""
        self._bench.say(f"{self._bench.case}: making the state of {self._crew.world_size} ranks")
        self.nbytes = self._crew.tell("make", scale=self._bench.scale, layout=layout)[0]["nbytes"]

    def write(self, way: Way, path: str) -> None:
        """Save the state, outside any clock."""
        self._bench.say(f"{self._bench.case}: writing with {way.name}")
        self._crew.tell("save", method=way.method, path=path)

    def saves(self, way: Way, path: str) -> Subject:
        """Save the state, check a few tensors of it, and remove it."""

        async def prepare() -> None:
            self._crew.tell("open", method=way.method)

        async def run() -> Figures:
            answers = self._crew.tell("save", method=way.method, path=path)
            written = [answer["written_nbytes"] for answer in answers]
            return {**_slowest(answers), BALANCE.key: max(written) / statistics.mean(written)}

        async def check() -> None:
            assert tree_nbytes(path) >= self.nbytes, "the files are smaller than the state"
            self._crew.tell("check_saved", method=way.method, path=path, count=_NUM_SAMPLES)

        async def clean() -> None:
            shutil.rmtree(path, ignore_errors=True)

        return Subject(
            name=way.name,
            kind=way.kind,
            prepare=prepare,
            run=run,
            check=check,
            clean=clean,
            is_slow=way.is_slow,
        )

    def loads(self, way: Way, path: str, *, is_cold: bool) -> Subject:
        """Fill the state from a checkpoint of the same contents, and check it; see `Proof`."""

        async def prepare() -> None:
            self._crew.tell("open", method=way.method)
            (drop_cache if is_cold else warm_cache)(path)

        async def run() -> Figures:
            answers = self._crew.tell("load", method=way.method, path=path)
            read = sum(answer["read_nbytes"] for answer in answers) / self.nbytes
            return {**_slowest(answers), **({READ.key: read} if is_cold else {})}

        async def check() -> None:
            self._crew.tell("check")

        return Subject(
            name=way.name,
            kind=way.kind,
            prepare=prepare,
            run=run,
            check=check,
            missing=refuses_drop(self._bench.directory) if is_cold else "",
        )


def _slowest(answers: Sequence[Json]) -> dict[str, float]:
    return {SECONDS.key: max(answer["elapsed_s"] for answer in answers)}


def raw_write(bench: Bench, nbytes: int) -> Subject:
    """Write as many bytes from one process, directly and durably."""
    path = bench.path("raw-write")

    async def run() -> Figures:
        figures: dict[str, float] = {}
        with timed(figures):
            write_direct(path, nbytes, block_nbytes=MiB, num_threads=4)
        return figures

    async def clean() -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    return Subject(
        name="limit: direct write, 1 MiB x 4, one process",
        kind="limit",
        run=run,
        clean=clean,
        missing=refuses_direct(bench.directory),
    )


def raw_read(bench: Bench, path: str, *, is_cold: bool) -> Subject:
    """Read the files of a checkpoint from one process, each byte once."""

    async def prepare() -> None:
        (drop_cache if is_cold else warm_cache)(path)

    async def run() -> Figures:
        figures: dict[str, float] = {}
        with timed(figures):
            for file in _data_files(path):
                read_blocks(file, block_nbytes=MiB, num_threads=4, is_direct=is_cold)
        return figures

    how = "direct read" if is_cold else "read of the page cache"
    refused = refuses_drop(bench.directory) or refuses_direct(bench.directory)
    return Subject(
        name=f"limit: {how}, 1 MiB x 4, one process",
        kind="limit",
        prepare=prepare,
        run=run,
        missing=refused if is_cold else "",
    )


def _data_files(path: str) -> list[str]:
    names = [name for name in os.listdir(path) if name.endswith(".safetensors")]
    assert names, "a checkpoint without data"
    return [os.path.join(path, name) for name in names]
