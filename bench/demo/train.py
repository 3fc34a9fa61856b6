"""The async trainer: how a loop on asyncio saves while it trains on.

The pattern, for a state on the CPU:

- One engine for the whole run: from the second save on, memory and plans are reused.
- `engine.save` returns at once. The next step's forward and backward run while the save
  copies: they read the weights. Then `await handle.staged`, and only then the update.
- The commit is awaited elsewhere, in a task group: a save that fails stops the run.
- After a start, the newest checkpoint that is committed is loaded into the live objects.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import ckptio
from bench.demo.settings import Settings, step_name, step_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.demo.diary import Diary
    from bench.demo.trainee import Trainee


async def train(
    trainee: Trainee, settings: Settings, root: str, diary: Diary, *, without: Sequence[str] = ()
) -> None:
    """Train to the last step, saving below `root`; go on from where a run before ended.

    Args:
        trainee: A new one; it is given the state of the newest checkpoint, if there is one.
        settings: How many steps, and how often to save.
        root: The run's directory.
        diary: Takes what happens.
        without: Names of the state to leave out on resume, to see that it is noticed.

    Raises:
        CheckpointError: A checkpoint cannot be loaded.
        ExceptionGroup: A save failed.
    """
    async with ckptio.Engine(settings.engine_config(), observer=diary.observe) as engine:
        await resume(engine, trainee, root, diary, without)
        handle: ckptio.SaveHandle | None = None
        async with asyncio.TaskGroup() as commits:
            for step in range(trainee.step + 1, settings.steps + 1):
                beside_save = handle is not None and not handle.done()
                with diary.computing(step, beside_save=beside_save):
                    loss = await asyncio.to_thread(trainee.forward_backward)
                if handle is not None:
                    with diary.stalled_by(step - 1):
                        await handle.staged  # from here on the weights may change
                    handle = None
                await asyncio.to_thread(trainee.update, loss)
                diary.tell("step", step=step, loss=loss)
                if step % settings.every == 0:
                    with diary.stalled_by(step):
                        handle = engine.save(trainee.state, os.path.join(root, step_name(step)))
                    commits.create_task(_follow(handle, step, diary), name=f"commit {step}")


async def _follow(handle: ckptio.SaveHandle, step: int, diary: Diary) -> None:
    """Wait for a commit, and tell."""
    diary.committed(step, await handle)


async def resume(
    engine: ckptio.Engine, trainee: Trainee, root: str, diary: Diary, without: Sequence[str]
) -> None:
    """Load the newest committed checkpoint below `root`; none is a fresh start."""
    for step in steps_newest_first(root):
        path = os.path.join(root, step_name(step))
        try:
            await engine.inspect(path)
        except ckptio.CheckpointNotFoundError:  # its save was killed: it never existed
            diary.tell("skipped", step=step)
            continue
        into, select = what_to_load(trainee, without)
        await engine.load(path, into=into, select=select)
        diary.tell("resumed", step=step)
        return


def what_to_load(
    trainee: Trainee, without: Sequence[str]
) -> tuple[dict[str, Any], list[str] | None]:
    """Give the target of a load and the names to select: all of the state, if not told else."""
    if not without:
        return trainee.state, None
    kept = {name: part for name, part in trainee.state.items() if name not in without}
    return kept, list(kept)


def steps_newest_first(root: str) -> Iterator[int]:
    """Give the steps that have a directory below `root`, committed or not."""
    names = os.listdir(root) if os.path.isdir(root) else []
    numbers = (step_number(name) for name in names)
    yield from sorted((n for n in numbers if n is not None), reverse=True)
