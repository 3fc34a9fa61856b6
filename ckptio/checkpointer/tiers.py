"""The second tier of a run: steps are copied there, found there, and removed there, too.

Each tier is looked after by itself, by the same policy applied to what is committed there. There
are two exceptions on the first tier: its newest step stays, and a step that is still to be copied
stays until it is. And one on the second: what was sent of such a copy stays, however old it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from ckptio._aio import shielded
from ckptio._texts import shown
from ckptio.checkpointer.agree import meet
from ckptio.checkpointer.keeper import Keeper
from ckptio.checkpointer.steps import parse_name, step_name
from ckptio.checkpointer.thinning import Thinning
from ckptio.engine.heads import read_head
from ckptio.engine.nearest import was_saved_again
from ckptio.errors import CheckpointError, CheckpointExistsError, ConfigError
from ckptio.events import HigherStepFound
from ckptio.format.summary import is_newer
from ckptio.plan.retention import KeepLast
from ckptio.runtime.owed_copies import is_owed, take_up
from ckptio.runtime.refusal import say_absent
from ckptio.storage.resolve import local_path, remote_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.plan.retention import Retention, StepRecord
    from ckptio.runtime.core import EngineCore
    from ckptio.runtime.running import Running
    from ckptio.storage.resolve import PathLike
    from ckptio.storage.root_interface import Found, Root

#: How long a commit waits to hear whether the second tier has the step already.
_LOOK_S = 1.0


class SecondTier:
    """Where the steps of a run are copied to, while its checkpointer is open, and after.

    Args:
        then: A directory or a URL.
        keep_local: Steps that stay on the first tier when they are copied, the newest;
            `None` for what the policy keeps.
        engine: The engine. No storage is asked for anything yet.
        make_root: Makes the root.

    Attributes:
        engine: As given, for callers.
        context: Its parts, for what runs on its loop, and may go on while the engine closes.
        keeper: Looks after the steps there.
    """

    def __init__(
        self,
        then: PathLike,
        keep_local: int | None,
        engine: EngineCore,
        make_root: Callable[..., Root],
    ) -> None:
        self._keep_local = keep_local
        self.engine = engine
        self.context = context = engine.context
        threads = context.far or context.executor
        root = make_root(then, engine.config, threads, engine.emit, context.stores)
        self.keeper = Keeper(root, context.executor, engine.emit)
        #: The last look of which a commit had no answer; none once another commit has one.
        self._silent: Running[bool] | None = None

    async def meet(self, first: Root, key: str, message: list[Any], context: EngineContext) -> None:
        """Check that this is not the first tier by another name, and that ranks are made alike.

        Raises:
            ConfigError: On this rank it is. The other ranks are told, and do not wait.
            RankError: It is on another rank, or ranks are not made alike.
        """
        try:
            await self._require_other(first)
        except BaseException as error:
            await shielded(say_absent(context, key, error))
            raise
        await meet(key, [*message, self.keeper.root.path], context)

    async def _require_other(self, first: Root) -> None:
        """Check that this is not the first tier, by another name.

        Raises:
            ConfigError: It is.
        """
        root, storage, name = self.keeper.root, self.context.resolver.own_storage, step_name(0)
        here, there = storage(first.join(name)), storage(root.join(name), is_second=True)
        await there.locate()
        if await here.identify() == there.identity:
            raise ConfigError(f"then= is {root.path!r}, which is the root itself")

    def path(self, step: int) -> str:
        """Give the path of a step's copy, which need not exist."""
        return self.keeper.root.join(step_name(step))

    async def take_up(self, root: str) -> None:
        """Make the copies that earlier runs owed; see `runtime.owed_copies.take_up`."""
        self.context.copies.seen.add(root)
        await take_up(root, self.context)

    def look_for(self, step: int) -> Running[bool] | None:
        """Begin to look whether this tier has a step already. From any thread.

        Gives `None` while a look hangs that a commit waited for in vain: each would take a thread
        for good.
        """
        if self._silent is not None and not self._silent.end.done():
            return None
        storage = self.context.resolver.own_storage(self.path(step), is_second=True)

        async def look(_: EngineContext) -> bool:
            try:
                await storage.version()
            except CheckpointError:  # none, or nobody can tell: whoever copies it will see
                return False
            return True

        return self.engine.submit(look, f"look for {storage.path}")

    async def require_free(self, step: int, looking: Running[bool] | None) -> None:
        """Check that this tier has no such step, before it is committed on the first.

        Otherwise its copy could never be made, and the first tier would keep it for ever. A tier
        that does not answer for a second is away, and no save waits for it: the next saves do not
        wait at all, until an answer is there before they ask for it.

        Args:
            step: The step.
            looking: What `look_for` gave; with `None`, nothing is checked.

        Raises:
            CheckpointExistsError: This tier has the step.
        """
        if looking is None:
            return
        answer = looking.end.wrapped()
        try:
            await asyncio.wait((answer,), timeout=0 if self._silent else _LOOK_S)
        finally:
            if answer.cancel():  # nobody waits any longer: there is none yet
                looking.abort()
        self._silent = looking if answer.cancelled() else None
        if answer.cancelled() or answer.exception() is not None or not answer.result():
            return
        error = CheckpointExistsError(self.path(step))
        error.add_note("or discard_after(...) the steps that this run went back from, first")
        raise error

    async def copy_ender(self, first: Keeper, *, above: int) -> Callable[[], Awaitable[None]]:
        """Note the steps above one on either tier; give what ends the copies of them.

        That stops copies that earlier runs owed, which nobody has a handle of, and waits until none
        is under way; one that is just being committed is waited for. It is to be called when these
        steps are gone from the first tier, as then no copy begins any more.
        """
        storage, copies = self.context.resolver.storage, self.context.copies
        listed = {*await first.listed(), *await self.keeper.listed()}
        names = [step_name(step) for step in listed if step > above]
        places = {await storage(first.root.join(name)).identify() for name in names}
        return lambda: copies.parted(places)

    async def steps(self, first: Sequence[int]) -> list[int]:
        """List the steps that either tier has, lowest first."""
        return sorted({*first, *await self.keeper.steps()})

    async def newest(self, count: int, first: Sequence[int]) -> tuple[list[int], bool]:
        """List the highest steps that either tier has, lowest first.

        Args:
            count: How many, at the most.
            first: The highest steps of the first tier, at most `count` of them.

        Returns:
            The steps, and whether the highest is on this tier.
        """
        above = first[0] if len(first) == count else -1  # no more can be among them
        there = await self.keeper.newest(count, above=above)
        steps = sorted({*first, *there})[-count:]
        return steps, steps[-1:] == there[-1:]

    async def look_back(self, first: Keeper, step: int, local: int) -> None:
        """Warn if a load is about to take a step that was discarded while one tier was not there.

        It was discarded on another machine, with a first tier of its own, and is still on the first
        tier here; or by a run without the second tier, and is still there. In both cases the other
        tier has only lower steps, of which the highest was saved later.

        Args:
            first: Who looks after the first tier.
            step: The highest step, which only one of the tiers has.
            local: The highest of the first tier; `step`, unless the second has that.
        """
        storage, context, is_far = self.context.resolver.storage, self.context, local < step
        here, there = (self.keeper, first) if is_far else (first, self.keeper)
        place = storage(here.root.join(step_name(step)), is_second=is_far)
        with contextlib.suppress(CheckpointError):  # a load is about to say what is wrong
            lower = [local] if is_far else await there.newest(1)
            head = await read_head(place, context)
            if not lower or head is None:
                return
            path = there.root.join(step_name(lower[0]))
            later = await read_head(storage(path, is_second=not is_far), context)
            is_left = later is not None and is_newer(later.created, head.created)
            if is_left and (is_far or not await place.has_note(head.save_id)):
                event = HigherStepFound(path=first.root.path, step=lower[0], highest=step)
                self.engine.emit(event)

    async def records(self, root: Root, first: Sequence[StepRecord]) -> list[StepRecord]:
        """Read what is known of the steps that either tier has, lowest first.

        Of one that was saved again elsewhere, what the later save says, as that is loaded.

        Args:
            root: The first tier.
            first: What is known of its steps.
        """
        found = {record.step: record for record in await self.keeper.records()}
        for here in first:
            there = found.get(here.step)
            if there is None or not await self._is_later(there, here, root):
                found[here.step] = here
        return [found[step] for step in sorted(found)]

    async def _is_later(self, there: StepRecord, here: StepRecord, root: Root) -> bool:
        """Whether a load takes this tier's save of a step, and not that of the first tier."""
        storage = self.context.resolver.storage(root.join(step_name(here.step)))
        one, other = ((each.save_id, each.created.isoformat()) for each in (here, there))
        return await was_saved_again(one, other, storage)

    def thinning(
        self, first: Keeper, exempt: Callable[[], Collection[int]], turn: asyncio.Lock
    ) -> Thinning | None:
        """Give what removes steps from the first tier, if `keep_local` is given; see `Thinning`."""
        num_local, context = self._keep_local, self.context
        if num_local is None:
            return None
        return Thinning(first, self.keeper, num_local, exempt=exempt, turn=turn, context=context)

    async def exempt_from_sweep(
        self, exempt: Callable[[], set[int]], found: Sequence[Found], first: Root
    ) -> Callable[[], set[int]]:
        """Add to the exempt steps those of which this tier has a part of a copy that is still owed.

        Whoever goes on with such a copy needs that part.

        Args:
            exempt: Gives the steps to leave alone.
            found: What is on this tier.
            first: The first tier.
        """
        context, storage = self.context, self.context.resolver.storage
        begun = [item.name for item in found if item.version is None]
        owed = [name for name in begun if await is_owed(storage(first.join(name)), context)]
        steps = {step for name in owed if (step := parse_name(name)) is not None}
        return lambda: steps | exempt()


def require_tiers(then: PathLike | None, keep_local: int | None, keep: Retention | None) -> None:
    """Check the options of a second tier.

    `keep_local` may be as large as `KeepLast`: that has an effect in a run that goes back, where
    the step saved last stays beside the highest ones. Nothing is known of how many steps other
    policies keep.

    Raises:
        ConfigError: One is wrong, or would have no effect.
    """
    if keep_local is not None and (type(keep_local) is not int or keep_local < 1):
        raise ConfigError(f"keep_local= is a number of steps, at least 1, not {shown(keep_local)}")
    if then is None:
        if keep_local is not None:
            raise ConfigError("keep_local= has no effect without then=")
        return
    if keep_local is not None and isinstance(keep, KeepLast) and keep_local > keep.num_steps:
        raise ConfigError(
            f"keep_local={keep_local} has no effect with keep=KeepLast({keep.num_steps}), which"
            " leaves no more steps than that on either tier"
        )
    if remote_url(then) is None:
        local_path(then)
