"""What an engine knows of its copies to second tiers: which are under way, and which are owed."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from ckptio._aio import outlive

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine

    from ckptio.engine.tiers import CopyJob
    from ckptio.moments import SaveMoments
    from ckptio.storage.interface import Storage

T = TypeVar("T")


class Copies:
    """The copies of an engine. Used from its loop.

    Attributes:
        under_way: Copies that this engine has begun or will begin, on rank 0: place and save id.
        seen: Directories whose unfinished copies this engine has looked for.
        owing: Directories from which a copy has failed, each with whether another copy from there
            was made after that (the second tier is back).
        unmade: Saves whose copies failed here, by `CopyJob.name`, as long as somebody keeps them.
        untold: On rank 0 of several: ids of saves whose copies it has made after all, or that are
            wanted no more, and of which it has not told the others yet.
        silent: A second tier that did not answer in time before a commit. Until it does, no commit
            waits for any second tier.
    """

    def __init__(self) -> None:
        self.under_way: set[tuple[str, str]] = set()
        self.seen: set[str] = set()
        self.owing: dict[str, bool] = {}
        self.unmade: weakref.WeakValueDictionary[tuple[str, str], SaveMoments] = (
            weakref.WeakValueDictionary()
        )
        self.untold: list[str] = []
        self.silent: Storage | None = None
        self._watching: list[asyncio.Future[None]] = []
        self._begun: dict[str, tuple[str, str]] = {}
        self._owed: dict[tuple[str, str], asyncio.Task[Any]] = {}

    def begin(self, place: str, save_id: str) -> None:
        """Take note, before its commit, that a save will be copied; until `end`."""
        self._begun[save_id] = place, save_id
        self.under_way.add((place, save_id))

    def end(self, save_id: str) -> None:
        """Take note that the copy of a save has ended, whether or not it began. Repeatable."""
        name = self._begun.pop(save_id, None)
        if name is not None:
            self.part(name)

    def part(self, name: tuple[str, str]) -> None:
        """Take note that a copy is under way no more, however it ended."""
        self.under_way.discard(name)
        for waiter in self._watching:
            if not waiter.done():
                waiter.set_result(None)
        self._watching.clear()

    async def parted(self, places: Collection[str]) -> None:
        """Wait until no copy from some places is under way; those of earlier runs are stopped."""
        for (place, _), task in list(self._owed.items()):
            if place in places:
                task.cancel()
        while any(place in places for place, _ in list(self.under_way)):
            waiter = asyncio.get_running_loop().create_future()
            self._watching.append(waiter)
            await waiter

    async def stoppable(self, name: tuple[str, str], copy: Coroutine[Any, Any, T]) -> T | None:
        """Make a copy that an earlier run owed; `None` if `parted` stopped it."""
        task = asyncio.create_task(copy, name=f"owed copy of {name[0]}")
        self._owed[name] = task
        try:
            return await outlive(task, on_cancel=task.cancel)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if waiter is None or waiter.cancelling():
                raise
            return None
        finally:
            del self._owed[name]

    def hear(self, untold: Collection[str]) -> None:
        """Take note of the `untold` of rank 0.

        If the run ends before this rank hears of them, it ends with the failures of their copies.
        """
        for name in [name for name in self.unmade if name[1] in untold]:
            self.is_owed_no_more(name)

    def told(self, untold: Collection[str]) -> None:
        """Take note that the other ranks were told of these."""
        self.untold = [save_id for save_id in self.untold if save_id not in untold]

    def has_replaced(self, job: CopyJob, others: Collection[tuple[str, str]]) -> list[str]:
        """Take note that a copy was made where those of others were to be, which it replaces.

        Args:
            job: The copy.
            others: Some of `unmade`, of any places, from before its checkpoint was seen to be
                there.

        Returns:
            Ids of the saves of which it has replaced the copies.
        """
        replaced: list[str] = []
        for other in others:
            moments = self.unmade.get(other)
            is_same_way = moments is not None and moments.copy_to == job.target.path
            if is_same_way and other[0] == job.name[0] and other != job.name:
                self.is_owed_no_more(other)
                replaced.append(other[1])
        return replaced

    def is_owed_no_more(self, name: tuple[str, str]) -> None:
        """Take note that a copy was made after all, or is wanted no more.

        Its earlier failure is raised to whoever waits for it, but no longer by leaving the engine.
        """
        moments = self.unmade.pop(name, None)
        if moments is not None:
            moments.seen()
