"""What ranks say to each other: that they want the same, and which steps there are."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from ckptio.checkpointer.steps import pack_metrics, unpack_metrics
from ckptio.errors import ConfigError
from ckptio.plan.retention import StepRecord
from ckptio.ranks.interface import Same, require_alike

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ckptio.engine.context import EngineContext


async def meet(key: str, message: list[Any], context: EngineContext) -> None:
    """Check that ranks want the same.

    Raises:
        RankError: They do not.
    """
    if context.ranks.world_size == 1:
        return

    async def decide(messages: Sequence[Any]) -> Same:
        for rank, other in enumerate(messages):
            if other != messages[0]:
                raise ConfigError(
                    f"rank {rank} has a checkpointer of {other} and rank 0 of {messages[0]};"
                    " make it alike on all ranks"
                )
        return Same(None)

    async with context.ranks.session(key, f"checkpointer of {message[0]!r}") as session:
        await session.round("meet", message, decide)


async def agreed_records(
    key: str, context: EngineContext, read: Callable[[], Awaitable[Sequence[StepRecord]]]
) -> list[StepRecord]:
    """Read what is known of the committed steps; rank 0, for all."""

    async def decide(messages: Sequence[Any]) -> Same:
        del messages
        return Same(
            [
                [r.step, r.created.isoformat(), pack_metrics(r.metrics), r.save_id]
                for r in await read()
            ]
        )

    async with context.ranks.session(key, "listing the steps") as session:
        answer = await session.round("records", None, decide)
    return [
        StepRecord(
            step=step,
            created=dt.datetime.fromisoformat(created),
            metrics=unpack_metrics(metrics),
            save_id=save_id,
        )
        for step, created, metrics, save_id in answer
    ]


async def agreed_steps(
    key: str,
    context: EngineContext,
    call: str,
    read: Callable[[], Awaitable[Sequence[int]]],
    *,
    acts: bool = False,
) -> list[int]:
    """List some steps, or do something with them and list those; rank 0, for all.

    Args:
        key: Of the question.
        context: The engine.
        call: What is asked, in words that are equal for equal questions alone.
        read: Asked on rank 0, once all ranks are known to want the same.
        acts: Whether it does something.

    Raises:
        RankError: They do not.
    """

    async def decide(messages: Sequence[Any]) -> Same:
        require_alike(messages, "calls", "the checkpointer")
        return Same([*await read()])

    async with context.ranks.session(key, "listing the steps", commits=acts) as session:
        return list(await session.round("steps", call, decide))
