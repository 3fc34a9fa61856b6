"""What goes wrong between a client and a store: a catalogue, and what has a proxy do it.

The proxy is `tests.s3.proxy.Proxy`; what is here goes into its `decide`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.s3.proxy import Fault, answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.s3.proxy import Request

#: By name, what is done to one request.
FAULTS: dict[str, Callable[[], Fault]] = {
    "error of the server": lambda: Fault(answer=answer(500, "InternalError")),
    "slow down": lambda: Fault(answer=answer(503, "SlowDown")),
    "reset before": lambda: Fault(reset=True),
    "reset after": lambda: Fault(reset=True, forward=True),
    "reset in the middle": lambda: Fault(reset=True, forward=True, keep_nbytes=20),
    "truncated": lambda: Fault(forward=True, keep_nbytes=20),
    "stalled": lambda: Fault(hold=asyncio.Event()),
    "stalled after": lambda: Fault(forward=True, late=asyncio.Event()),
    "corrupted": lambda: Fault(forward=True, flip_at=60),
    "error in a 200": lambda: Fault(answer=answer(200, "InternalError")),
}
#: A client that is told the truth, or nothing, gets there in the end.
HONEST = sorted(set(FAULTS) - {"corrupted"})


class FaultOnce:
    """Disturbs one request: `proxy.decide = FaultOnce(3, "truncated")`.

    Args:
        number: Which, from 0, in the order in which they come.
        fault: What happens to it.
    """

    def __init__(self, number: int, fault: str) -> None:
        self._left = number
        self._fault = FAULTS[fault]

    def __call__(self, request: Request) -> Fault | None:
        del request
        self._left -= 1
        return self._fault() if self._left == -1 else None


class GoneFrom:
    """Breaks every connection from one request on.

    Args:
        number: The first, from 0.
        after: Requests are carried out all the same.
    """

    def __init__(self, number: int, *, after: bool) -> None:
        self._left = number
        self._after = after

    def __call__(self, request: Request) -> Fault | None:
        del request
        self._left -= 1
        return Fault(reset=True, forward=self._after) if self._left < 0 else None
