"""Which metrics the steps of a run have, and which of them a policy asks for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ckptio.plan.retention import KeepAny, KeepBest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ckptio.plan.retention import Retention, StepRecord

_log = logging.getLogger("ckptio")


def metrics_in(records: Iterable[StepRecord]) -> list[str]:
    """Name what was measured of any step, in order."""
    return sorted({name for record in records for name in record.metrics})


def unmeasured(policy: Retention, records: Iterable[StepRecord]) -> list[str]:
    """Name the metrics of which a policy keeps the best, and that no step has.

    They are mostly mistyped; as long as a metric is missing, the policy keeps everything.
    """
    parts = policy.policies if isinstance(policy, KeepAny) else (policy,)
    measured = metrics_in(records)
    wanted = [part.metric for part in parts if isinstance(part, KeepBest)]
    return [metric for metric in wanted if metric not in measured]


def warn_of_unmeasured(policy: Retention, records: Collection[StepRecord], path: str) -> bool:
    """Warn if all steps of a run are kept because none has the metric that decides.

    Says nothing as long as no step has any metric. Returns whether it has warned.
    """
    measured = metrics_in(records)
    missing = unmeasured(policy, records) if measured else []
    if missing:
        _log.warning(
            "no step of %r has the metric %r of KeepBest, so that all are kept; they have %s",
            path,
            missing[0],
            ", ".join(map(repr, measured)),
        )
    return bool(missing)
