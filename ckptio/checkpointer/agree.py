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
    """Check that all ranks make the checkpointer alike.

    Args:
        key: Names the session; the same on all ranks.
        message: What has to be equal; first of all the path, which errors name.
        context: The engine.

    Raises:
        RankError: It is not equal.
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
    """Have rank 0 read the records of the committed steps, and give them to all ranks."""

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
    """Have rank 0 list some steps, or change some and list those, and give them to all ranks.

    Args:
        key: Names the session; the same on all ranks.
        context: The engine.
        call: What this rank calls, in words that are equal on two ranks if their calls are.
        read: Gives the steps. Called on rank 0 alone, when all ranks are known to call the same.
        acts: Whether `read` changes anything.

    Raises:
        RankError: Ranks call different things; or `read` failed, where there are several.
    """

    async def decide(messages: Sequence[Any]) -> Same:
        require_alike(messages, "calls", "the checkpointer")
        return Same([*await read()])

    async with context.ranks.session(key, "listing the steps", commits=acts) as session:
        return list(await session.round("steps", call, decide))
