"""Change the plan of a save for ranks whose blocks changed, while others have written.

Ranks that did not change follow the old plan and may be done with it, so what they write
is fixed, part by part. A tensor that one of them has stays cut as it was: every chunk of
it has to have a writer still, who either did not change or holds the same block. Tensors
that only changed ranks have are shared out among those, from the start.

If a chunk has no writer left, there is no such plan: ranks that still hold it have let go
of it by then. The save fails, and the next one plans anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio.config import MiB
from ckptio.errors import PlanError
from ckptio.plan.assign import Assignment, PlannedTensor
from ckptio.plan.job import JobPlan, plan_job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptio.config import Replicate
    from ckptio.plan.assign import PlannedChunk
    from ckptio.shards import LeafSpec, Part


def replan_job(
    job: JobPlan,
    leaves: Sequence[Sequence[LeafSpec]],
    changed: Mapping[int, Sequence[LeafSpec]],
    *,
    hosts: Sequence[str] = (),
    replicate: Replicate = "once",
    local_nbytes: int = MiB,
) -> JobPlan:
    """Change a plan.

    Args:
        job: The plan that ranks followed.
        leaves: The blocks of each rank when it was made.
        changed: The blocks that ranks hold now, for each rank that has others than then.
        hosts: As in `plan_job`, for what is new.
        replicate: As above.
        local_nbytes: As above.

    Returns:
        The plan. Ranks that did not change have their old assignments in it.

    Raises:
        PlanError: A rank dropped or changed what it was to write while others still hold
            it, or what the ranks hold is no whole state.
    """
    try:
        return _Replan(job, leaves, changed).make(hosts, replicate, local_nbytes)
    except PlanError as error:
        raise PlanError(
            f"the blocks of ranks {sorted(changed)} changed, not those of the others, and"
            f" there is no plan for both: {error}; save again"
        ) from None


class _Replan:
    """The change of one plan."""

    def __init__(
        self,
        job: JobPlan,
        leaves: Sequence[Sequence[LeafSpec]],
        changed: Mapping[int, Sequence[LeafSpec]],
    ) -> None:
        self._job = job
        self._leaves = leaves
        self._changed = changed
        self._held = [changed.get(rank, old) for rank, old in enumerate(leaves)]
        #: Names that a rank has which did not change: these stay as they were cut.
        self._kept = {
            spec.name for rank, old in enumerate(leaves) if rank not in changed for spec in old
        }
        self._parts: dict[int, list[Part]] = {rank: [] for rank in changed}
        #: For changed ranks, the index of each old part among the new ones.
        self._moved: dict[int, dict[int, int]] = {rank: {} for rank in changed}

    def make(self, hosts: Sequence[str], replicate: Replicate, local_nbytes: int) -> JobPlan:
        """Make the plan."""
        plan_job(self._held)  # for its checks: types, shapes, gaps and overlaps
        for rank in self._changed:
            self._keep_parts(rank)
        tensors = [
            self._keep_tensor(tensor) for tensor in self._job.tensors if tensor.name in self._kept
        ]
        missing = self._kept - {tensor.name for tensor in tensors}
        if missing:
            raise PlanError(f"nobody writes {min(missing)!r}")
        new = [
            [
                (i, spec)
                for i, spec in enumerate(specs)
                if rank in self._changed and spec.name not in self._kept
            ]
            for rank, specs in enumerate(self._held)
        ]
        fresh = plan_job(
            [[spec for _, spec in specs] for specs in new],
            hosts=hosts,
            replicate=replicate,
            local_nbytes=local_nbytes,
        )
        tensors += self._add(fresh, [[i for i, _ in specs] for specs in new])
        assignments = [
            Assignment.of(self._parts[rank], self._held[rank])
            if rank in self._changed
            else assigned
            for rank, assigned in enumerate(self._job.assignments)
        ]
        tensors.sort(key=lambda tensor: tensor.name)
        return JobPlan(tuple(assignments), tuple(tensors), ())

    def _keep_parts(self, rank: int) -> None:
        """Let a changed rank write what it wrote, of the blocks that it holds still."""
        old = self._leaves[rank]
        index = {spec: i for i, spec in enumerate(self._changed[rank])}
        for number, part in enumerate(self._job.assignments[rank].parts(old)):
            spec = old[part.leaf]
            if spec.name in self._kept and spec in index:
                self._moved[rank][number] = len(self._parts[rank])
                self._parts[rank].append(part._replace(leaf=index[spec]))

    def _keep_tensor(self, tensor: PlannedTensor) -> PlannedTensor:
        """Find who still writes the chunks of a tensor."""
        boxes, ranks, parts, copies = [], [], [], []
        for chunk in tensor.chunks:
            holders = self._still(chunk)
            if not holders:
                raise PlanError(
                    f"nobody writes {tensor.name!r} at {chunk.global_offset} any more, which"
                    f" rank {chunk.holders[0][0]} wrote"
                )
            boxes.append((chunk.global_offset, chunk.local_shape))
            ranks.append(holders[0][0])
            parts.append(holders[0][1])
            copies.append(tuple(holders[1:]))
        return PlannedTensor(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            tuple(boxes),
            tuple(ranks),
            tuple(parts),
            tuple(copies) if any(copies) else (),
        )

    def _still(self, chunk: PlannedChunk) -> list[tuple[int, int]]:
        """Give the holders of a chunk that write it still, with their part's new number."""
        holders = []
        for rank, part in chunk.holders:
            if rank not in self._changed:
                holders.append((rank, part))
            elif part in self._moved[rank]:
                holders.append((rank, self._moved[rank][part]))
        return holders

    def _add(self, fresh: JobPlan, blocks: Sequence[Sequence[int]]) -> list[PlannedTensor]:
        """Add what is new behind what ranks keep."""
        base = {rank: len(parts) for rank, parts in self._parts.items()}
        for rank in self._changed:
            specs = [self._held[rank][i] for i in blocks[rank]]
            for part in fresh.assignments[rank].parts(specs):
                self._parts[rank].append(part._replace(leaf=blocks[rank][part.leaf]))
        return [
            PlannedTensor(
                tensor.name,
                tensor.dtype,
                tensor.shape,
                tensor.boxes,
                tensor.ranks,
                tuple(
                    part + base[rank] for rank, part in zip(tensor.ranks, tensor.parts, strict=True)
                ),
                tuple(tuple((r, part + base[r]) for r, part in more) for more in tensor.copies),
            )
            for tensor in fresh.tensors
        ]
