"""Change the plan of a save for ranks whose blocks changed, while others have written.

Ranks that did not change follow the plan that they know and may be done with it, so what they
write is fixed, part by part. Where saves overlap, they may know different plans. A tensor that
one of them has stays cut as it is in one of those plans: every chunk of it has to have a writer
still, who either has written it or holds the same block and writes now. Tensors that only
changed ranks have are shared out among those, from the start.

If a chunk has no writer left, there is no such plan: ranks that still hold it have let go
of it by then. The save fails, and the next one plans anew.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from ckptio._texts import name_ranks
from ckptio.config import MiB
from ckptio.errors import PlanError, StalePlanError
from ckptio.layout import nbytes_of
from ckptio.plan.assign import Assignment, PlannedTensor
from ckptio.plan.job import JobPlan, plan_job
from ckptio.shards import Part

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from ckptio.config import Replicate
    from ckptio.shards import LeafSpec
    from ckptio.tiling import Region

#: A rank, and what it writes: the number of a part that it has written, or a part to be numbered.
_Holder = tuple[int, int | Part]


class Followed(NamedTuple):
    """A plan that ranks go by.

    Attributes:
        job: The plan.
        leaves: The blocks of each rank when it was made.
        ranks: Those that have written by it.
    """

    job: JobPlan
    leaves: Sequence[Sequence[LeafSpec]]
    ranks: Collection[int]


class _Tensor(NamedTuple):
    """A tensor, its boxes, and who writes each of them, the main one first."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Region, ...]
    holders: Sequence[Sequence[_Holder]]


def replan_job(
    plans: Sequence[Followed],
    changed: Mapping[int, Sequence[LeafSpec]],
    *,
    hosts: Sequence[str] = (),
    replicate: Replicate = "once",
    local_nbytes: int = MiB,
) -> JobPlan:
    """Make one plan of those that ranks followed.

    Args:
        plans: Those plans.
        changed: The blocks of each rank that followed none: it writes by what comes of this.
        hosts: As in `plan_job`, for what is new.
        replicate: As above.
        local_nbytes: As above.

    Returns:
        The plan. Ranks that followed one have their assignments of that.

    Raises:
        PlanError: What the ranks hold is no whole state.
        StalePlanError: A rank dropped or changed what it was to write while others still hold
            it, or plans that ranks followed differ in who writes what.
    """
    held = {rank: plan.leaves[rank] for plan in plans for rank in plan.ranks}
    kept = {spec.name for specs in held.values() for spec in specs}
    held.update(changed)
    if changed:
        who = f"the blocks of {name_ranks(changed)} changed, not those of the others"
    else:
        who = "the ranks followed plans of different saves"
    try:
        plan_job([held[rank] for rank in range(len(held))])  # for its checks: gaps and the like
    except PlanError as error:
        raise PlanError(f"{who}, and they do not fit together: {error}") from None
    try:
        return _Replan(plans, changed, kept).make(hosts, replicate, local_nbytes)
    except PlanError as error:
        raise StalePlanError(f"{who}, and there is no plan for all: {error}; save again") from None


class _Replan:
    """The change of plans.

    Args:
        plans: Those that ranks followed.
        changed: The blocks of the other ranks.
        kept: Names of tensors that stay as they were cut.
    """

    def __init__(
        self,
        plans: Sequence[Followed],
        changed: Mapping[int, Sequence[LeafSpec]],
        kept: Collection[str],
    ) -> None:
        self._plans = sorted(plans, key=lambda plan: -len(plan.ranks))
        self._changed = changed
        self._kept = kept
        self._followers = {
            rank: number for number, plan in enumerate(self._plans) for rank in plan.ranks
        }
        self._num_ranks = len(changed) + len(self._followers)
        #: Type and shape of what ranks hold that have written, where plans may differ in that.
        self._forms = {
            spec.name: (spec.dtype, spec.shape if spec.global_shape is None else spec.global_shape)
            for plan in (self._plans if len(self._plans) > 1 else ())
            for rank in plan.ranks
            for spec in plan.leaves[rank]
        }
        self._index = {
            rank: {spec: leaf for leaf, spec in enumerate(specs)} for rank, specs in changed.items()
        }
        self._loads = dict.fromkeys(changed, 0)
        self._parts_of: dict[tuple[int, int], tuple[Part, ...]] = {}
        self._written = dict(self._find_written()) if len(self._plans) > 1 else {}

    def make(self, hosts: Sequence[str], replicate: Replicate, local_nbytes: int) -> JobPlan:
        """Make the plan."""
        tensors: dict[str, _Tensor] = {}
        problems: dict[str, str] = {}
        for number, plan in enumerate(self._plans):
            for tensor in plan.job.tensors:
                if tensor.name not in self._kept or tensor.name in tensors:
                    continue
                found = self._keep(tensor, number)
                if isinstance(found, str):
                    problems.setdefault(tensor.name, found)
                else:
                    tensors[tensor.name] = found
        missing = self._kept - tensors.keys()
        if missing:
            name = min(missing)
            raise PlanError(problems.get(name, f"nobody writes {name!r}"))
        tensors.update(self._share_out(hosts, replicate, local_nbytes))
        return self._numbered(tensors)

    def _find_written(self) -> Iterator[tuple[tuple[str, Region], list[_Holder]]]:
        """Find out who has written which boxes, by whatever plan."""
        written: defaultdict[tuple[str, Region], list[_Holder]] = defaultdict(list)
        for number, plan in enumerate(self._plans):
            for tensor in plan.job.tensors:
                for box, holders in zip(tensor.boxes, tensor.holders, strict=True):
                    held = [who for who in holders if self._followers.get(who[0]) == number]
                    if held:
                        written[tensor.name, box] += held
        yield from written.items()

    def _keep(self, tensor: PlannedTensor, number: int) -> _Tensor | str:
        """Find who writes the chunks of a tensor as a plan has cut it.

        Args:
            tensor: The tensor, in that plan.
            number: The plan.

        Returns:
            The tensor, or why it cannot be cut so.
        """
        form = tensor.dtype, tensor.shape
        if self._forms.get(tensor.name, form) != form:
            return f"nobody writes {tensor.name!r} as it is now"
        found: list[Sequence[_Holder]] = []
        for box, rank, part, copies in zip(
            tensor.boxes,
            tensor.ranks,
            tensor.parts,
            tensor.copies or itertools.repeat(()),
            strict=bool(tensor.copies),
        ):
            if not copies and len(self._plans) == 1 and rank not in self._changed:
                found.append(((rank, part),))  # most, of thousands
                continue
            holders = self._holders((tensor.name, box), ((rank, part), *copies), number)
            if not holders:
                return (
                    f"nobody writes {tensor.name!r} at {box[0]} any more, which rank {rank} wrote"
                )
            found.append(holders)
        for each in found:
            for rank, held in each:
                if isinstance(held, Part):
                    self._loads[rank] += nbytes_of(held.shape, tensor.dtype)
        return _Tensor(*form, tensor.boxes, found)

    def _holders(
        self, chunk: tuple[str, Region], planned: Sequence[tuple[int, int]], number: int
    ) -> list[_Holder]:
        """Give the holders of a chunk that have written it, or hold it still and write now.

        Of the ranks that write now, those that were to write it by the plan; where that leaves
        nobody, another one that holds the block.

        Args:
            chunk: Name of the tensor, and the box.
            planned: Who was to write it, as which of its parts.
            number: The plan.
        """
        written = self._written.get(chunk, ())
        holders: list[_Holder] = []
        for rank, part in planned:
            follows = self._followers.get(rank)
            if follows == number:
                holders.append((rank, part))
            elif follows is None and (len(planned) > 1 or not written):
                holders += self._claims([rank], planned, number)
        holders += [holder for holder in written if holder not in holders]
        if not holders:
            by_load = sorted(self._changed, key=lambda rank: (self._loads[rank], rank))
            holders += self._claims(by_load, planned, number)[:1]
        return holders

    def _claims(
        self, ranks: Iterable[int], planned: Sequence[tuple[int, int]], number: int
    ) -> list[_Holder]:
        """Give the part that a chunk is of the blocks of ranks, for each that holds the block."""
        leaves = self._plans[number].leaves
        parts = [(leaves[rank], self._parts(number, rank)[part]) for rank, part in planned]
        claims: list[_Holder] = []
        for rank in ranks:
            index = self._index[rank]
            for specs, part in parts:
                leaf = index.get(specs[part.leaf])
                if leaf is not None:
                    claims.append((rank, part._replace(leaf=leaf)))
                    break
        return claims

    def _parts(self, number: int, rank: int) -> tuple[Part, ...]:
        """Give what a rank was to write by a plan."""
        parts = self._parts_of.get((number, rank))
        if parts is None:
            plan = self._plans[number]
            parts = plan.job.assignments[rank].parts(plan.leaves[rank])
            self._parts_of[number, rank] = parts
        return parts

    def _share_out(
        self, hosts: Sequence[str], replicate: Replicate, local_nbytes: int
    ) -> Iterator[tuple[str, _Tensor]]:
        """Share out what only changed ranks have."""
        new = [
            [
                (leaf, spec)
                for leaf, spec in enumerate(self._changed.get(rank, ()))
                if spec.name not in self._kept
            ]
            for rank in range(self._num_ranks)
        ]
        fresh = plan_job(
            [[spec for _, spec in specs] for specs in new],
            hosts=hosts,
            replicate=replicate,
            local_nbytes=local_nbytes,
        )
        parts = [
            [
                part._replace(leaf=specs[part.leaf][0])
                for part in assigned.parts([spec for _, spec in specs])
            ]
            for assigned, specs in zip(fresh.assignments, new, strict=True)
        ]
        for rank, nbytes in enumerate(fresh.written_nbytes):
            if rank in self._loads:
                self._loads[rank] += nbytes
        for tensor in fresh.tensors:
            holders = [
                [(rank, parts[rank][number]) for rank, number in held] for held in tensor.holders
            ]
            yield tensor.name, _Tensor(tensor.dtype, tensor.shape, tensor.boxes, holders)

    def _numbered(self, tensors: Mapping[str, _Tensor]) -> JobPlan:
        """Number the parts of each rank by name, as in a first plan: equal plans are one."""
        parts: dict[int, list[Part]] = {rank: [] for rank in self._changed}
        planned = []
        for name in sorted(tensors):
            tensor = tensors[name]
            holders = [[self._number(each, parts) for each in held] for held in tensor.holders]
            planned.append(
                PlannedTensor.of(name, tensor.dtype, tensor.shape, tensor.boxes, holders)
            )
        assignments, loads = [], []
        for rank in range(self._num_ranks):
            number = self._followers.get(rank)
            if number is None:
                assignments.append(Assignment.of(parts[rank], self._changed[rank]))
                loads.append(self._loads[rank])
            else:
                job = self._plans[number].job
                assignments.append(job.assignments[rank])
                loads.append(job.written_nbytes[rank])
        return JobPlan(tuple(assignments), tuple(planned), tuple(loads))

    def _number(self, holder: _Holder, parts: Mapping[int, list[Part]]) -> tuple[int, int]:
        """Give the number of what a rank writes; of a part that it writes now, the next."""
        rank, part = holder
        if isinstance(part, int):
            return rank, part
        parts[rank].append(part)
        return rank, len(parts[rank]) - 1
