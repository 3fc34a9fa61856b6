"""One loop over the new steps of a run, as an evaluation beside the trainer has it.

Steps are told apart by their saves, not by their numbers alone: a run that goes back to step 800
saves step 900 once more, and that is another one. No task, file or thread is held between two
looks.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from ckptio.checkpointer.steps import is_step, step_name
from ckptio.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    FormatError,
    StorageError,
)
from ckptio.format.summary import decode_summary
from ckptio.plan.retention import require_seconds

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from ckptio.checkpointer.keeper import Keeper


class _Save(NamedTuple):
    """The save of a step that a tier has.

    Attributes:
        version: Of its manifest.
        save_id: Its id; empty if the manifest is damaged.
    """

    version: Hashable
    save_id: str


class _Look(NamedTuple):
    """What one look at the tiers has found.

    Attributes:
        step: The newest step.
        saves: What each tier has of it; `None` where it has none.
    """

    step: int
    saves: tuple[_Save | None, ...]

    def saves_of_step(self) -> set[tuple[int, str]]:
        """Give step and save id of each save that is there: what tells whether it is a new one.

        A damaged one (its id is empty) counts only where no tier has a whole one to load.
        """
        ids = {save.save_id for save in self.saves if save is not None}
        return {(self.step, save_id) for save_id in ids - {""} or ids}


class Following:
    """What has been given of a run's steps, and when to look again; see `Checkpointer.follow`.

    How long it has waited is counted in pauses, not by a clock, so that all ranks end at the same
    look.

    Args:
        after: The step that was seen last; `None` for none.
        poll_s: Seconds between two looks.
        timeout_s: Seconds without a new step after which it ends; `None` for never.

    Attributes:
        call: What it asks for, in words that are equal on ranks that ask alike.
        pause_s: Seconds to wait before the next look; `None` when it has ended.

    Raises:
        ConfigError: An argument is wrong.
    """

    def __init__(self, after: int | None, poll_s: float, timeout_s: float | None) -> None:
        if after is not None:
            step_name(after, "after=")
        require_seconds("poll_s=", poll_s)
        if timeout_s is not None:
            require_seconds("timeout_s=", timeout_s)
        self.call = f"follow(after={after}, poll_s={poll_s}, timeout_s={timeout_s})"
        self.pause_s: float | None = 0.0
        self._after = -1 if after is None else after
        self._poll_s = poll_s
        self._timeout_s = timeout_s
        self._left_s = timeout_s
        self._asker: int | None = None  # the task or thread that waits for the next step
        self._seen: set[tuple[int, str]] = set()  # `saves_of_step` of all looks that were taken
        self._last: _Look | None = None  # the last look that was taken
        self._looked: _Look | None = None  # the newest look, which may not be taken yet

    @contextlib.contextmanager
    def asked_by(self, who: int) -> Iterator[None]:
        """Let only one ask at a time: the pauses and looks of two would be counted as those of one.

        Args:
            who: Identifies a task or a thread. The same one may ask again while it asks, as a
                signal's handler does that interrupts it.

        Raises:
            ConfigError: Another one asks.
        """
        if self._asker not in (None, who):
            raise ConfigError(
                "another task or thread waits for the next step of this follow(): give each a"
                " follow() of its own, or have one hand steps to the others"
            )
        before, self._asker = self._asker, who
        try:
            yield
        finally:
            self._asker = before

    def take(self, found: Sequence[int]) -> Sequence[int]:
        """Take note that all ranks were told of a look, and set `pause_s`. Gives what was found.

        It is not called for a look whose caller was cancelled, so that the next one finds the same.
        """
        if self._looked is not None:
            self._last = self._looked
            self._seen |= self._looked.saves_of_step()
        self._after = -1
        self._count(found)
        return found

    def _count(self, found: Sequence[int]) -> None:
        """Set `pause_s`: at once after a step, after a pause where there was none, or never."""
        if found:
            self.pause_s, self._left_s = 0.0, self._timeout_s
        elif self._left_s is None:
            self.pause_s = self._poll_s
        else:
            self.pause_s = min(self._poll_s, self._left_s) or None
            self._left_s -= self.pause_s or 0.0

    def paused(self, slept_s: float) -> None:
        """Take note of a pause, or of a part of one: the next pause is what is left of it.

        So a look comes in the end, however soon each caller gives up; and a look that was cancelled
        is made again without a pause.
        """
        self.pause_s = max(0.0, (self.pause_s or 0.0) - slept_s)

    def broke_off(self, error: BaseException, *, is_alone: bool) -> None:
        """Take note of a look that broke off. One that failed is made again after a pause.

        One that was cut off by its caller is made again at once, unless there are other ranks: to
        those it is one that failed, and all are to end at the same look.

        Args:
            error: What it broke off with.
            is_alone: Whether there is one rank.
        """
        if isinstance(error, CheckpointError) or not is_alone:
            self._count(())

    async def new(self, newest: Sequence[int], tiers: Sequence[Keeper]) -> Sequence[int]:
        """Give the newest step if a tier has a save of it that was not seen before. On rank 0.

        Manifests that have not changed since the last look are not read. A step with a damaged
        manifest is given once: whoever loads it gets the error. The tiers may have two different
        saves of a step, if it was saved again on another machine. Which of them a load takes is not
        asked here: the one that was not seen before is the one that was saved again.

        Args:
            newest: The highest committed step, if there is one.
            tiers: Where it may be.

        Raises:
            StorageError: A tier cannot be read.
        """
        self._looked = await self._look(newest[0], tiers) if newest else None
        if self._looked is None:
            return ()
        is_new = not self._looked.saves_of_step() <= self._seen
        return newest if is_new and self._looked.step > self._after else ()

    async def _look(self, step: int, tiers: Sequence[Keeper]) -> _Look:
        """Say which saves of a step are there."""
        last = self._last
        known = last.saves if last is not None and last.step == step else [None] * len(tiers)
        pairs = zip(tiers, known, strict=True)
        return _Look(step, tuple([await _save_of(step, keeper, save) for keeper, save in pairs]))


async def _save_of(step: int, keeper: Keeper, known: _Save | None) -> _Save | None:
    """Say which save of a step a tier has; `None` if it has none, or none any more.

    Args:
        step: The step.
        keeper: Who looks after the tier.
        known: What it had at the last look.

    Raises:
        StorageError: The tier cannot be read.
    """
    name = step_name(step)
    versions = [item.version for item in await keeper.root.look([name], is_step)]
    if versions in ([], [None]):
        return None
    if known is not None and [known.version] == versions:
        return known
    (answer,) = await keeper.root.read_manifests([name], _save_id)
    if isinstance(answer, CheckpointNotFoundError):  # it went meanwhile
        return None
    if isinstance(answer, StorageError):
        raise answer
    return _Save(versions[0], "" if isinstance(answer, FormatError) else answer)


def _save_id(name: str, manifest: bytes) -> str:
    """Give the id of the save that wrote a manifest."""
    del name
    return decode_summary(manifest).save_id
