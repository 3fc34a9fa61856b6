"""What rank 0 keeps of its decisions from one save to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ckptio.engine.decide import Decider, JobRecord
from ckptio.errors import StalePlanError
from ckptio.plan.job import plan_job
from ckptio.shards import LeafSpec
from tests.rig import inline_engine

if TYPE_CHECKING:
    from collections.abc import Sequence


def record(places: Sequence[list[tuple[int, int]] | None], num_files: list[int]) -> JobRecord:
    leaves: list[tuple[LeafSpec, ...]] = [(LeafSpec(name, "uint8", (3,)),) for name in "ab"]
    job = plan_job(leaves)
    return JobRecord(leaves=leaves, job=job, places=[*places], num_files=num_files)


def test_what_is_not_known_of_a_plan_is_learned_and_nothing_else() -> None:
    """Each rank says it once, in whichever save comes first."""
    one, other = record([None, [(0, 0)]], [0, 1]), record([[(1, 4)], [(2, 8)]], [2, 3])
    assert one.plan_id == other.plan_id
    one.learn(other)
    assert one.places == [[(1, 4)], [(0, 0)]]
    assert one.num_files == [2, 1]
    one.learn(record([None, None], [0, 0]))
    assert one.places == [[(1, 4)], [(0, 0)]]


async def test_a_plan_that_is_not_known_is_to_be_made_anew() -> None:
    """Forgotten, or one of which a rank has not said where its parts lie."""
    none: Any = None
    async with inline_engine({}) as engine:
        context = engine._core.context
        decider = Decider(none, context, none)
        half = record([None, [(0, 0)]], [0, 1])
        receipts = [{"plan": half.plan_id, "places": None}] * 2
        with pytest.raises(StalePlanError, match="forgotten"):
            decider._record_of(receipts[0])
        context.jobs.put(half.plan_id, half)
        assert decider._record_of(receipts[0]) is half
        with pytest.raises(StalePlanError, match="has not said where"):
            decider._encode(half, receipts, [])
