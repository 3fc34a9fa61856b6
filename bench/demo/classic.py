"""The classic trainer: the loop of `train`, without asyncio, on `ckptio.sync`.

`start_save` returns at once and the step after it overlaps with the save, as in the async
form. A loop that may wait calls `engine.save`, which returns when the commit is there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bench.demo.settings import Settings, step_name
from bench.demo.train import steps_newest_first, what_to_load
from ckptio import CheckpointNotFoundError, SaveHandle, sync

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.demo.diary import Diary
    from bench.demo.trainee import Trainee


def train(
    trainee: Trainee, settings: Settings, root: str, diary: Diary, *, without: Sequence[str] = ()
) -> None:
    """Train to the last step; the arguments are those of `bench.demo.train.train`.

    Raises:
        CheckpointError: A checkpoint cannot be loaded, or a save failed.
    """
    with sync.Engine(settings.engine_config(), observer=diary.observe) as engine:
        resume(engine, trainee, root, diary, without)
        saves: dict[int, SaveHandle] = {}
        for step in range(trainee.step + 1, settings.steps + 1):
            with diary.computing(step, beside_save=any(not h.done() for h in saves.values())):
                loss = trainee.forward_backward()
            if step - 1 in saves:
                with diary.stalled_by(step - 1):
                    saves[step - 1].staged.wait()  # from here on the weights may change
            trainee.update(loss)
            diary.tell("step", step=step, loss=loss)
            for done in [step for step, handle in saves.items() if handle.done()]:
                diary.committed(done, saves.pop(done).result())  # raises if the save failed
            if step % settings.every == 0:
                with diary.stalled_by(step):
                    path = os.path.join(root, step_name(step))
                    saves[step] = engine.start_save(trainee.state, path)
        for step, handle in saves.items():
            diary.committed(step, handle.result())


def resume(
    engine: sync.Engine, trainee: Trainee, root: str, diary: Diary, without: Sequence[str]
) -> None:
    """Load the newest committed checkpoint below `root`; none is a fresh start."""
    for step in steps_newest_first(root):
        path = os.path.join(root, step_name(step))
        try:
            engine.inspect(path)
        except CheckpointNotFoundError:  # its save was killed: it never existed
            diary.tell("skipped", step=step)
            continue
        into, select = what_to_load(trainee, without)
        engine.load(path, into=into, select=select)
        diary.tell("resumed", step=step)
        return
