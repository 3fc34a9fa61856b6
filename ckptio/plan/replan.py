"""Change the plan of a save for ranks whose blocks changed, while others have written.

Ranks that did not change follow the old plan and may be done with it, so what they write
is fixed. A rank that changed keeps writing what it had to write and still holds, and what
no rank held before is shared out among those that hold it now. Only if a rank no longer
holds what it alone wrote for others is there no such plan; those others have let go of
their tensors by then, so the save fails, and the next one plans from the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptio.errors import PlanError
from ckptio.plan.assign import Assignment
from ckptio.plan.job import JobPlan, plan_job
from ckptio.shards import LeafSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptio.shards import Part


def replan_job(
    job: JobPlan,
    leaves: Sequence[Sequence[LeafSpec]],
    changed: Mapping[int, Sequence[LeafSpec]],
) -> tuple[JobPlan, list[list[int] | None]]:
    """Change a plan.

    Args:
        job: The plan that ranks followed.
        leaves: The blocks of each rank when it was made.
        changed: The blocks that ranks hold now, for each rank that has others than then.

    Returns:
        The plan, whose parts refer to the blocks that ranks hold now; and for each rank
        that did not change the indices of its old parts, in the order of its new ones.

    Raises:
        PlanError: A rank dropped or changed what it was to write while others still hold
            it, or what the ranks hold is no whole state.
    """
    held: list[list[LeafSpec]] = []
    origins: list[list[tuple[int, int]]] = []  # block and first byte of what is held
    for rank, old in enumerate(leaves):
        parts = job.assignments[rank].parts(old)
        if rank in changed:
            specs, where = _as_changed(old, parts, changed[rank])
        else:
            specs, where = _as_blocks(old, parts, None)
        held.append(specs)
        origins.append(where)
    try:
        planned = plan_job(held)
        _check_names(planned, leaves, changed)
    except PlanError as error:
        raise PlanError(
            f"the blocks of ranks {sorted(changed)} changed, not those of the others, and"
            f" there is no plan for both: {error}; save again"
        ) from None
    assignments = []
    kept: list[list[int] | None] = []
    for rank, assigned in enumerate(planned.assignments):
        where = origins[rank]
        parts = assigned.parts(held[rank])
        cuts = [
            (i, where[part.leaf][1] + part.start, part.shape, part.global_offset)
            for i, part in enumerate(parts)
        ]
        leaves_now = tuple(where[part.leaf][0] for part in parts)
        assignments.append(Assignment(leaves_now, tuple(cuts)))
        kept.append(None if rank in changed else [part.leaf for part in parts])
    return JobPlan(tuple(assignments), planned.tensors, planned.written_nbytes), kept


def _check_names(
    planned: JobPlan,
    leaves: Sequence[Sequence[LeafSpec]],
    changed: Mapping[int, Sequence[LeafSpec]],
) -> None:
    """Check that no rank has a tensor that nobody writes any more."""
    written = {tensor.name for tensor in planned.tensors}
    for rank, old in enumerate(leaves):
        for spec in changed.get(rank, old):
            if spec.name not in written:
                raise PlanError(f"rank {rank} has {spec.name!r}, and nobody writes it")


def _as_changed(
    old: Sequence[LeafSpec], parts: Sequence[Part], new: Sequence[LeafSpec]
) -> tuple[list[LeafSpec], list[tuple[int, int]]]:
    """Say what a rank that changed has to write still, and what it holds that is new."""
    index = {spec: i for i, spec in enumerate(new)}
    specs, where = _as_blocks(old, parts, index)
    known = set(old)
    for i, spec in enumerate(new):
        if spec not in known:
            specs.append(spec)
            where.append((i, 0))
    return specs, where


def _as_blocks(
    old: Sequence[LeafSpec], parts: Sequence[Part], index: Mapping[LeafSpec, int] | None
) -> tuple[list[LeafSpec], list[tuple[int, int]]]:
    """Describe what a rank writes as blocks of its own.

    Args:
        old: The rank's blocks when the plan was made.
        parts: What it was to write.
        index: Where the rank has the same blocks now; parts of others are left out.
    """
    specs, where = [], []
    for part in parts:
        spec = old[part.leaf]
        leaf = part.leaf if index is None else index.get(spec, -1)
        if leaf < 0:
            continue
        shape = spec.shape if spec.global_shape is None else spec.global_shape
        box = (None, None) if part.shape == shape else (shape, part.global_offset)
        specs.append(LeafSpec(spec.name, spec.dtype, part.shape, *box))
        where.append((leaf, part.start))
    if index is None:  # names of which the rank holds nothing
        empty = [(i, spec) for i, spec in enumerate(old) if not spec.nbytes]
        specs += [spec for _, spec in empty]
        where += [(i, 0) for i, _ in empty]
    return specs, where
