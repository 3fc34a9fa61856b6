"""Say whether ranks that load the same bytes had better pass them on."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.plan.exchange import ExchangePlan

#: Below this, making a link takes longer than reading the same bytes once more.
MIN_SHARED_NBYTES = 16 << 20


def is_worth_exchanging(plan: ExchangePlan, hosts: Sequence[str], cached: Sequence[bool]) -> bool:
    """Decide for `exchange="auto"` whether to pass bytes on, or to let every rank read its own.

    Within a host, passing on pays from the second rank on where bytes come from a disk, since
    it goes on beside the reading; and never where they are in the page cache, which every
    rank reads about as fast as shared memory and without waiting for another (the bench case
    `replicated_load` has the figures of both). A link takes some 20 ms to make.

    Between hosts, each has its own way to the storage, so two ranks that both read wait for
    no longer than one that reads for two; Orbax reports 0.79 of the time for direct reads
    with two replicas. From the third rank on, what hosts read at a time is more than most
    shared storages give each of them. This was not measured: there was no second host.

    Args:
        plan: Who would read what for whom.
        hosts: The host of each rank of the group.
        cached: Whether what each of them wants is in the memory of its host.
    """
    shared = near = far = 0
    by_host: dict[int, Counter[str]] = {}  # ranks that are to be given what they want
    for unit in plan.units:
        if id(unit.wanting) not in by_host:
            cold = Counter(hosts[rank] for rank in unit.wanting if not cached[rank])
            by_host[id(unit.wanting)] = cold
        cold = by_host[id(unit.wanting)]
        itself = not cached[unit.reader]
        if num_takers := cold.total() - itself:
            shared += unit.nbytes
            num_near = cold[hosts[unit.reader]] - itself
            near += num_near * unit.nbytes
            far += (num_takers - num_near) * unit.nbytes
    return shared >= MIN_SHARED_NBYTES and (near >= far or far >= 2 * shared)
