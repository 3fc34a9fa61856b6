"""What all ranks ask of a run at once, and rank 0 finds out or does for them."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from ckptio.checkpointer.advice import misnamed
from ckptio.checkpointer.agree import agreed_records, agreed_steps
from ckptio.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptio.checkpointer.following import Following
    from ckptio.checkpointer.keeper import Keeper
    from ckptio.checkpointer.pace import Pace
    from ckptio.checkpointer.tiers import SecondTier
    from ckptio.checkpointer.upkeep import Upkeep
    from ckptio.engine.context import EngineContext
    from ckptio.plan.retention import StepRecord

_log = logging.getLogger("ckptio")


class Questions:
    """Questions of a checkpointer.

    Each call gets a `key` that no other call has and that is the same on all ranks: it names their
    session. So all ranks have to make the same calls in the same order.

    Args:
        keeper: Looks after the first tier.
        second: The second tier, if there is one.
        upkeep: Knows which steps are under way, and removes steps.
        pace: Is told which steps are found and discarded.
    """

    def __init__(
        self, keeper: Keeper, second: SecondTier | None, upkeep: Upkeep, pace: Pace
    ) -> None:
        self._keeper = keeper
        self._second = second
        self._upkeep = upkeep
        self._pace = pace
        self._has_looked = False

    async def records(self, key: str, context: EngineContext) -> list[StepRecord]:
        """Read what is known of the committed steps, lowest first."""

        async def read() -> Sequence[StepRecord]:
            first = await self._keeper.records()
            root, second = self._keeper.root, self._second
            if second is None:
                return first
            with _with_way_out([record.step for record in first]):
                return await second.records(root, first)

        found = await agreed_records(key, context, read)
        self._pace.found([record.step for record in found])
        return found

    async def steps(self, key: str, context: EngineContext) -> list[int]:
        """List the committed steps, lowest first."""

        async def read() -> Sequence[int]:
            steps = await self._keeper.steps()
            if self._second is not None:
                with _with_way_out(steps):
                    steps = await self._second.steps(steps)
            await self._look_beside(steps)
            return steps

        found = await agreed_steps(key, context, "steps()", read)
        self._pace.found(found)
        return found

    async def newest(self, count: int, key: str, context: EngineContext) -> list[int]:
        """List the highest committed steps, lowest first.

        Args:
            count: How many, at the most: 1 for `latest`; 2 for a load, which takes the highest and
                names the other if that is damaged. It decides what ranks are said to call.
            key: Names the session.
            context: The engine.
        """

        async def read() -> Sequence[int]:
            first = await self._keeper.newest(count)
            if self._second is None:
                await self._look_beside(first)
                return first
            with _with_way_out(first):
                steps, is_there = await self._second.newest(count, first)
            is_on_both = is_there and first[-1:] == steps[-1:]
            if count > 1 and first and not is_on_both:  # it is about to be loaded
                await self._second.look_back(self._keeper, steps[-1], first[-1])
            await self._look_beside(steps)
            return steps

        call = "latest()" if count == 1 else "load()"
        found = await agreed_steps(key, context, call, read)
        self._pace.found(found)
        return found

    async def _look_beside(self, steps: Sequence[int]) -> None:
        """If there are no steps, say, once, if there are checkpoints that may be meant as some.

        Without a word, a run that has them would begin anew.
        """
        if steps or self._has_looked:
            return
        self._has_looked = True
        with contextlib.suppress(StorageError):
            meant = await self._keeper.misnamed()
            if meant:
                _log.warning("%r: %s", self._keeper.root.path, misnamed(meant))

    async def new(self, following: Following, key: str, context: EngineContext) -> list[int]:
        """Give the highest committed step, if a loop over new steps has not seen it."""

        async def read() -> Sequence[int]:
            steps, tiers = await self._keeper.newest(1), [self._keeper]
            if self._second is not None:
                tiers.append(self._second.keeper)
                with _with_way_out(steps):
                    steps, _ = await self._second.newest(1, steps)
            return await following.new(steps, tiers)

        return await agreed_steps(key, context, following.call, read)

    async def discard(self, after: int, key: str, context: EngineContext) -> list[int]:
        """Remove the steps above one from both tiers, and list them, lowest first."""

        async def discard() -> Sequence[int]:
            busy = [step for step in self._upkeep.steps.under_way() if step > after]
            if busy:
                raise ConfigError(
                    f"step {min(busy)} is being saved, copied or read: wait for that, then discard"
                )
            second = self._second
            if second is None:
                return sorted(await self._discard(self._keeper, after))
            end_copies = await second.copy_ender(self._keeper, above=after)
            gone = await self._discard(self._keeper, after)
            await end_copies()  # else one of them brings its step back
            return sorted(gone | await self._discard(second.keeper, after))

        gone = await agreed_steps(key, context, f"discard_after({after})", discard, acts=True)
        self._pace.discarded(after)
        return gone

    async def _discard(self, keeper: Keeper, after: int) -> set[int]:
        """Remove the steps above one from one tier, highest first, and name them."""
        steps = await keeper.steps(above=after)
        for step in reversed(steps):
            await self._upkeep.discard(keeper, step)
        return set(steps)


@contextlib.contextmanager
def _with_way_out(first: Sequence[int]) -> Iterator[None]:
    """A block in which an error of the second tier says how to do without it.

    Args:
        first: Steps of the first tier. If there are none, there is no way out.
    """
    try:
        yield
    except StorageError as error:
        if not first or type(error) is not StorageError:
            raise
        told = f"{error.message}; leave out then= to go on with step {max(first)} of the first tier"
        raise StorageError(told, path=error.filename, code=error.errno or 0) from error.__cause__
