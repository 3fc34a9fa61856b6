"""Plan a save by many ranks: who writes which bytes, and where the manifest has them.

Every rank says which blocks it holds; the plan checks that they are whole tensors, drops
replicas, and shares the rest out so that ranks write about equally much. It is made once,
by one rank for all, and holds until the structure of the state changes.

A million blocks are planned in about a second, so little is done for each: what is the
same for all tensors that are cut alike is found out once (`Pattern`), and most of what a
rank writes is blocks as they are, told by index alone (`Assignment`).

Pure, and a function of its arguments alone: the same blocks give the same parts for any
order of a rank's list or hash seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ckptio._gc import without_collection
from ckptio.config import MiB
from ckptio.errors import PlanError
from ckptio.format.compose import encode_rows
from ckptio.plan.assign import Assigner, Assignment, Pattern, PlannedTensor
from ckptio.plan.coverage import Parties, Row, check_row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptio.config import Replicate
    from ckptio.plan.assign import Pins
    from ckptio.shards import LeafSpec

_MAX_PROBLEMS = 10


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What each rank writes.

    Attributes:
        assignments: For each rank what it writes, in the order of the names of tensors.
        tensors: Tensors, in the order of their names.
        written_nbytes: Bytes each rank writes, headers of files apart.
    """

    assignments: tuple[Assignment, ...]
    tensors: tuple[PlannedTensor, ...]
    written_nbytes: tuple[int, ...]


@without_collection
def plan_job(
    ranks: Sequence[Sequence[LeafSpec]],
    *,
    hosts: Sequence[str] = (),
    replicate: Replicate = "once",
    local_nbytes: int = MiB,
    min_part_nbytes: int = MiB,
    pins: Mapping[str, Pins] | None = None,
) -> JobPlan:
    """Plan who writes what.

    Args:
        ranks: The blocks of each rank.
        hosts: Host of each rank: of ranks that are equal otherwise, those of different
            hosts are taken first, so that few large tensors do not meet on one.
        replicate: `"once"`: of equal blocks one is written. `"local"`: of those of at
            most `local_nbytes` each is, as copies of one chunk.
        local_nbytes: See `replicate`.
        min_part_nbytes: A large replica is cut for several writers, but into parts of
            about this size at least, or of a sixteenth of what a rank writes.
        pins: Who writes what of some tensors, by name; the rest is shared out.

    Returns:
        A plan that writes every element of every tensor, and none twice but for copies.

    Raises:
        PlanError: Blocks disagree, overlap, leave gaps, or are replicas without one main
            one. Names the tensors and ranks, ten of them at most.
    """
    parties = Parties(ranks)
    assigner = Assigner(
        parties,
        _turns(hosts, len(ranks)),
        local_nbytes=local_nbytes if replicate == "local" else 0,
        min_part_nbytes=min_part_nbytes,
        pins=pins or {},
    )
    found = _count(parties, assigner)
    assigner.share_out()
    tensors = tuple([assigner.assign(row, pattern) for row, pattern in found])
    return JobPlan(assigner.assignments(), tensors, tuple(assigner.loads))


def _count(parties: Parties, assigner: Assigner) -> list[tuple[Row, Pattern]]:
    """Check and count all tensors, those that are cut alike once.

    Raises:
        PlanError: The first problems of all.
    """
    patterns: dict[tuple[tuple[int, ...], tuple[int, ...]], Pattern] = {}
    problems: list[str] = []
    found: list[tuple[Row, Pattern]] = []
    for row in parties.rows():
        key = (row.parties, row.forms)
        pattern = patterns.get(key)
        if pattern is None:
            tiles = check_row(row, parties, problems)
            if tiles is None:
                continue
            pattern = patterns[key] = assigner.pattern(row, tiles)
        assigner.count(pattern, row.name)
        found.append((row, pattern))
    if problems:
        raise PlanError(_summary(problems))
    return found


def merge_tables(
    job: JobPlan, places: Sequence[Sequence[tuple[int, int]]], num_files: Sequence[int]
) -> bytes:
    """Write the tensor table of the manifest of a job.

    Files are counted rank by rank: those of rank 0 come first.

    Args:
        job: The plan.
        places: For each rank the places of its parts: bucket, and start in the file.
        num_files: Buckets of each rank.

    Returns:
        The table, as `encode_rows` writes it.

    Raises:
        PlanError: A rank has other parts than it was given, or places in other files.
    """
    found = _checked(job, places, num_files)
    rows = []
    for name, dtype, shape, boxes, ranks, parts, copies in map(
        msgspec.structs.astuple, job.tensors
    ):
        mains = [found[rank][part] for rank, part in zip(ranks, parts, strict=True)]
        chunks: Any = mains
        if len(boxes) > 1:
            chunks = [main + box for main, box in zip(mains, boxes, strict=True)]
        if copies:
            chunks = [
                (*main, *(box if len(boxes) > 1 else (None, None)), [found[r][k] for r, k in more])
                if more
                else chunk
                for chunk, main, box, more in zip(chunks, mains, boxes, copies, strict=True)
            ]
        rows.append((name, dtype, shape, chunks))
    return encode_rows(rows)


def _checked(
    job: JobPlan, places: Sequence[Sequence[tuple[int, int]]], num_files: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Check places, and number the files of all ranks through: those of rank 0 first.

    Raises:
        PlanError: As `merge_tables`.
    """
    num_ranks = len(job.assignments)
    if not len(places) == len(num_files) == num_ranks:
        raise PlanError(f"a plan for {num_ranks} ranks has places of {len(places)}")
    found = []
    base = 0
    for rank, (assigned, taken, count) in enumerate(
        zip(job.assignments, places, num_files, strict=True)
    ):
        num_parts = len(assigned.leaves)
        if len(taken) != num_parts or any(not 0 <= bucket < count for bucket, _ in taken):
            raise PlanError(
                f"rank {rank} has places for {len(taken)} parts in {count} files and a plan with"
                f" {num_parts} parts; save again, with one version of ckptio on all ranks"
            )
        found.append([(base + bucket, start) for bucket, start in taken])
        base += count
    return found


def _summary(problems: Sequence[str]) -> str:
    """List the first few problems."""
    if len(problems) == 1:
        return f"the ranks do not hold a whole state: {problems[0]}"
    shown = "; ".join(f"({i}) {text}" for i, text in enumerate(problems[:_MAX_PROBLEMS], 1))
    more = len(problems) - _MAX_PROBLEMS
    tail = f"; and {more} more" if more > 0 else ""
    return f"the ranks do not hold a whole state, {len(problems)} problems: {shown}{tail}"


def _turns(hosts: Sequence[str], num_ranks: int) -> list[int]:
    """Give the place of each rank among equals: the first of every host, then the second."""
    if not hosts:
        return list(range(num_ranks))
    if len(hosts) != num_ranks:
        raise PlanError(f"{num_ranks} ranks have {len(hosts)} hosts; give one for each")
    seen: dict[str, int] = {}
    rounds = []
    for host in hosts:
        rounds.append(seen.get(host, 0))
        seen[host] = rounds[-1] + 1
    turns = [0] * num_ranks
    for turn, rank in enumerate(sorted(range(num_ranks), key=lambda rank: (rounds[rank], rank))):
        turns[rank] = turn
    return turns
