"""Messages that every kind of link carries."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

L = TypeVar("L")

NUM_MESSAGES = 5


async def cross(
    links: Sequence[L],
    give: Callable[[L, list[int], int, bytes], Coroutine[Any, Any, None]],
    take: Callable[[L, int, int, int], Coroutine[Any, Any, bytes]],
    step_nbytes: int,
) -> None:
    """Send messages to several takers, and from several senders at a time; take them in any order.

    Args:
        links: Of three ranks.
        give: Sends, of a link, to ranks, with a tag, some data.
        take: Takes, by a link, from a rank, with a tag, so many bytes.
        step_nbytes: By how much each message is longer than the one before.
    """
    a, b, c = links
    data = {tag: os.urandom(1 + tag * step_nbytes) for tag in range(NUM_MESSAGES)}
    async with asyncio.TaskGroup() as group:
        for tag, message in data.items():
            group.create_task(give(a, [1, 2], tag, message))
            group.create_task(give(b, [0], tag, message[::-1]))
        takes = [
            group.create_task(take(link, 0, tag, len(data[tag])))
            for link in (b, c)
            for tag in (3, 0, 4, 2, 1)
        ]
        back = [group.create_task(take(a, 1, tag, len(data[tag]))) for tag in (4, 1, 0, 2, 3)]
    assert [each.result() for each in takes] == [data[tag] for tag in (3, 0, 4, 2, 1)] * 2
    assert [each.result() for each in back] == [data[tag][::-1] for tag in (4, 1, 0, 2, 3)]
