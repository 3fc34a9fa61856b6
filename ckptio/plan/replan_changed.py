"""Plan a save by many ranks whose states have changed since an earlier plan.

What is as it was stays with who wrote it before. A first plan shares it out anew, by whatever
else there is: a tensor of one rank that grew moves replicas of the model from rank to rank.
Where saves overlap, some ranks may still go by the earlier plan, and have to write what the
later one wants of them (`plan.replan_followed`). Of what one rank alone holds there is no choice.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from ckptio.config import MiB
from ckptio.layout import nbytes_of
from ckptio.plan.assign import offset_of
from ckptio.plan.job import plan_job
from ckptio.plan.writers import Share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptio.config import Replicate
    from ckptio.plan.assign import Pins
    from ckptio.plan.job import JobPlan
    from ckptio.shards import LeafSpec
    from ckptio.tiling import Region

#: What one rank may write more than in a first plan before there is one again: a share of the
#: most that a rank writes, and bytes that take no time worth a conflict of plans.
_MAX_SHARE = 0.25
_MAX_MORE_NBYTES = 256 * MiB


def plan_again(
    job: JobPlan,
    leaves: Sequence[Sequence[LeafSpec]],
    ranks: Sequence[Sequence[LeafSpec]],
    *,
    hosts: Sequence[str] = (),
    replicate: Replicate = "once",
    local_nbytes: int = MiB,
) -> JobPlan:
    """Plan who writes what as `plan_job` does, but what is as it was as in an earlier plan.

    Args:
        job: The earlier plan.
        leaves: The blocks of each rank when it was made.
        ranks: The blocks of each rank now.
        hosts: As in `plan_job`.
        replicate: As above.
        local_nbytes: As above.

    Returns:
        A plan in which no rank writes much more than in one that is made from the start.

    Raises:
        PlanError: As `plan_job` does.
    """
    pins = _pins(job, leaves, ranks)
    again = plan_job(ranks, hosts=hosts, replicate=replicate, local_nbytes=local_nbytes, pins=pins)
    mean = sum(again.written_nbytes) // len(ranks)
    if not pins or max(again.written_nbytes) <= _limit(mean):
        return again
    first = plan_job(ranks, hosts=hosts, replicate=replicate, local_nbytes=local_nbytes)
    is_worse = max(again.written_nbytes) > _limit(max(first.written_nbytes))
    return first if is_worse else again


def _limit(nbytes: int) -> int:
    """Give what one rank may write where it would be `nbytes` in a plan made from the start."""
    return nbytes + max(int(_MAX_SHARE * nbytes), _MAX_MORE_NBYTES)


def _pins(
    job: JobPlan, leaves: Sequence[Sequence[LeafSpec]], ranks: Sequence[Sequence[LeafSpec]]
) -> dict[str, Pins]:
    """Find who writes what several ranks hold, of what is as it was in an earlier plan."""
    counts = Counter([spec.name for specs in ranks for spec in specs])
    changed = {
        spec.name for old, new in zip(leaves, ranks, strict=True) for spec in _differing(old, new)
    }
    cuts = [{cut[0]: cut for cut in assigned.cuts} for assigned in job.assignments]
    is_cut = {
        leaves[rank][assigned.leaves[index]].name
        for rank, assigned in enumerate(job.assignments)
        for index in cuts[rank]
    }
    pins: dict[str, Pins] = {}
    for tensor in job.tensors:
        name = tensor.name
        if name in changed or (counts[name] <= len(tensor.boxes) and name not in is_cut):
            continue  # one that is not there any more has changed; a block with one holder has it
        blocks: defaultdict[Region, list[Share]] = defaultdict(list)
        for rank, part in zip(tensor.ranks, tensor.parts, strict=True):
            spec = leaves[rank][job.assignments[rank].leaves[part]]
            _, start, shape, _ = cuts[rank].get(part, (0, 0, spec.shape, ()))
            stop = start + nbytes_of(shape, tensor.dtype)
            blocks[offset_of(spec), spec.shape].append(Share(rank, start, stop))
        pins[name] = {
            block: sorted(shares, key=lambda share: share.start) for block, shares in blocks.items()
        }
    return pins


def _differing(old: Sequence[LeafSpec], new: Sequence[LeafSpec]) -> Iterator[LeafSpec]:
    """Give the blocks that a rank has only in one of two states."""
    pairs = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
    if len(old) == len(new) and all(a.name == b.name for a, b in pairs):  # mostly: one order
        yield from itertools.chain.from_iterable(pairs)
    else:
        yield from {*old} ^ {*new}
