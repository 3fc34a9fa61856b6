"""The methods of `Checkpointer` that list, follow or discard steps: no training state is involved.

`face` has the other methods, and `blocking` has all of them for classic loops.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ckptio.checkpointer.following import Following
from ckptio.checkpointer.steps import step_name

if TYPE_CHECKING:
    from ckptio.checkpointer.core import CheckpointerCore
    from ckptio.plan.retention import StepRecord


class Finding:
    """A part of `face.Checkpointer`, which has the documentation."""

    _core: CheckpointerCore

    async def steps(self) -> tuple[int, ...]:
        """List the committed steps, lowest first.

        Raises:
            StorageError: They cannot be listed.
            EngineClosedError: The checkpointer is not open.
        """
        core = self._core
        return tuple(await core.engine.call(core.asking(core.questions.steps), "list steps"))

    async def latest(self) -> int | None:
        """Give the highest committed step; `None` if there is none.

        Raises:
            StorageError, EngineClosedError: As in `steps`.
        """
        core = self._core
        question = functools.partial(core.questions.newest, 1)
        return max(
            await core.engine.call(core.asking(question), "find the latest step"), default=None
        )

    def follow(
        self, *, after: int | None = None, poll_s: float = 10.0, timeout_s: float | None = None
    ) -> AsyncIterator[int]:
        """Give the newest committed step whenever there is one, as an evaluation beside a run does.

            async for step in ckpt.follow(timeout_s=3600):
                try:
                    await ckpt.load(into={"model": model}, step=step, select="model")
                except (CheckpointNotFoundError, CheckpointChangedError):
                    continue  # the run has removed it meanwhile
                evaluate(model)

        It begins with the step that is there already. What was committed while the caller was
        busy with a step is passed over but for the highest; `steps` lists it. A step that is
        saved again, as by a run that went back, is given again; the one to which that went back is
        given if it was passed over before, so the numbers do not only rise. Nothing is held in
        between, so that `break` ends it at any time. After an error, and after a cancellation of
        the wait for a step, what this gave goes on where it was if it is asked for the next step.

        With several ranks, loop on all of them. An error is a `RankError` there, and goes on as
        said. But a rank that gives up its wait alone may miss a step that others are given: have
        `timeout_s` end them all.

        Args:
            after: Pass over the newest step at first, if it is not above this one.
            poll_s: Seconds between two looks. In an object store, each is three requests (with
                `then=`, two or three more there), and one more for each thousand steps.
            timeout_s: End after so many seconds without a new step, the time for the looks
                themselves not counted; by default, never.

        Raises:
            ConfigError: An argument is wrong; or, where the next step is asked for, another task
                waits for it.
            StorageError, EngineClosedError: As in `steps`, where the next step is asked for.
            RankError: That, where there are several ranks; or these ask for different things.
        """
        return _NewSteps(self._core, Following(after, poll_s, timeout_s))

    async def discard_after(self, step: int) -> tuple[int, ...]:
        """Remove the steps above one: those of a run that went back to it.

        Else they are what `load` takes after the next restart, and what `keep` counts. A copy
        that an earlier run owed of such a step is stopped: there is nothing left to copy.

            state = await ckpt.load(step=800)  # the loss blew up after it
            await ckpt.discard_after(800)

        Args:
            step: The highest one to stay; it need not exist.

        Returns:
            The steps that were removed, from one tier or both, lowest first.

        Raises:
            ConfigError: It is no step, or one above it is being saved, copied or read here.
            StorageError: One cannot be removed. Those above it are gone; call it again.
            FormatError: One is damaged, so that nobody knows what is part of it.
            EngineClosedError: The checkpointer is not open.
            RankError: One of these, where there are several ranks; or these gave different steps,
                and nothing was removed.
        """
        core = self._core
        step_name(step)
        question = functools.partial(core.questions.discard, step)
        return tuple(await core.engine.call(core.asking(question), "discard steps"))

    async def records(self) -> tuple[StepRecord, ...]:
        """Give number, time and metrics of the committed steps, lowest first.

        Steps whose manifests cannot be read are left out.

        Raises:
            StorageError, EngineClosedError: As in `steps`.
        """
        core = self._core
        return tuple(await core.engine.call(core.asking(core.questions.records), "list records"))

    def path(self, step: int) -> str:
        """Give the path of a step's checkpoint, committed or not; also after the block.

        Raises:
            ConfigError: `step` is not a number of a step.
            EngineClosedError: The checkpointer was not opened.
        """
        return self._core.path(step)


class _NewSteps(AsyncIterator[int]):
    """What `Checkpointer.follow` gives; it goes on after a cancellation or an error."""

    def __init__(self, core: CheckpointerCore, following: Following) -> None:
        self._core = core
        self._following = following

    async def __anext__(self) -> int:
        with self._following.asked_by(id(asyncio.current_task())):
            step = await self._next()
        if step is None:
            raise StopAsyncIteration
        return step

    async def _next(self) -> int | None:
        """Wait for the next step; `None` at the end."""
        core, following, loop = self._core, self._following, asyncio.get_running_loop()
        while (pause_s := following.pause_s) is not None:
            began_s = loop.time()
            try:
                await asyncio.sleep(pause_s)
            finally:
                following.paused(loop.time() - began_s)
            look = core.asking(functools.partial(core.questions.new, following))
            try:
                found = await core.engine.call(look, "look for new steps")
            except BaseException as error:
                following.broke_off(error, is_alone=core.ending.is_alone)
                raise
            for step in following.take(found):
                return step
        return None
