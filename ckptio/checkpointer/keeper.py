"""Look after the steps under a root: list them, remove some, sweep what died.

Needs no engine and no torch: the command line uses it too. Everything is derived from
what is committed at the moment; nothing is written down beside the checkpoints.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio._aio import GRACE_S, run_blocking, shielded
from ckptio.checkpointer.steps import is_step, parse_name, record_of, step_meant, step_name
from ckptio.errors import CheckpointNotFoundError, FormatError, StorageError
from ckptio.events import CheckpointRemoved, CleanupFailed
from ckptio.format.summary import decode_summary
from ckptio.plan.retention import plan_removals
from ckptio.storage.file_names import QUIET_S
from ckptio.storage.object_root import ObjectRoot
from ckptio.storage.root import LocalRoot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
    from concurrent.futures import Executor

    from ckptio.events import Event
    from ckptio.plan.retention import Retention, StepRecord
    from ckptio.storage.root_interface import Found, Root


#: Steps that are removed at a time. An engine has four threads for this and for what saves ask of
#: a file system: so a save that begins meanwhile finds one free.
MAX_REMOVALS = 3
#: How often steps are listed anew that come and go faster than they are looked at.
_MAX_TRIES = 10
#: Names that are no steps of which it is looked whether they are checkpoints.
_NUM_MISNAMED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What became of a step that is not kept.

    Attributes:
        step: Its number.
        nbytes: Bytes of its data files; 0 if that is not known.
        error: Why it is still there; `None` if it is not.
    """

    step: int
    nbytes: int
    error: Exception | None = None

    @property
    def is_unanswered(self) -> bool:
        """Whether the storage did not answer: nor will it for the next one."""
        return isinstance(self.error, OSError) and self.error.errno == errno.ETIMEDOUT


class Keeper:
    """The steps under a root.

    Several tasks of one loop may use it at once: each works with what it listed itself.

    Args:
        root: Where they are.
        executor: Threads that read manifests.
        emit: Takes events.
    """

    def __init__(self, root: Root, executor: Executor, emit: Callable[[Event], None]) -> None:
        self.root = root
        self._executor = executor
        self._emit = emit
        self._known: dict[str, tuple[Hashable, StepRecord, int]] = {}

    @property
    def max_removals(self) -> int:
        """How many steps to remove at a time.

        In an object store a removal waits for a dozen requests, nearly all one after the other, and
        takes hardly a thread.
        """
        return self.root.max_aside if isinstance(self.root, ObjectRoot) else MAX_REMOVALS

    @property
    def known(self) -> list[StepRecord]:
        """What `records` or `plan` read last, whichever task called it; in any order."""
        return [record for _, record, _ in self._known.values()]

    async def find(self, *, aside: bool = False) -> list[Found]:
        """List what has the name of a step, committed or not.

        Args:
            aside: Leave room for the requests of others.

        Raises:
            StorageError: It cannot be listed.
        """
        return await self.root.find(is_step, aside=aside)

    async def listed(self) -> set[int]:
        """List what has the name of a step, committed or not, by its name alone.

        Raises:
            StorageError: It cannot be listed.
        """
        return {*_steps_of(await self.root.names(is_step))}

    async def steps(self, *, above: int = -1) -> list[int]:
        """List the committed steps, lowest first.

        Args:
            above: Only those above it; no other is looked at.

        Raises:
            StorageError: They cannot be listed.
        """
        if above < 0:
            told = _told(await self.find())
        else:
            told = dict.fromkeys(step for step in await self.listed() if step > above)
        return await self._committed(told)

    async def misnamed(self) -> dict[int, str]:
        """Give checkpoints whose names are no steps', by the step that each may be meant as.

        Some of them: those with the highest numbers.

        Raises:
            StorageError: They cannot be listed.
        """
        names = await self.root.names(lambda name: step_meant(name) is not None)
        meant = {step: name for name in sorted(names) if (step := step_meant(name)) is not None}
        some = sorted(meant)[-_NUM_MISNAMED:]
        looked = await self.root.look([meant[step] for step in some])
        there = {item.name for item in looked if item.version is not None}
        return {step: meant[step] for step in some if meant[step] in there}

    async def newest(
        self,
        count: int,
        *,
        above: int = -1,
        but: Collection[int] = frozenset(),
        found: Sequence[Found] | None = None,
    ) -> list[int]:
        """List the highest committed steps, lowest first.

        Names are looked at from the highest down, so that no more is looked at than has to be. But
        the run goes on meanwhile: it may commit a step just after the look at it, and remove the
        one before just ahead of the look at that. What is found then is much older than the newest
        step there was at any moment. So names above the highest that was found are looked at once
        more, lowest first: what is removed meanwhile made room for one that is looked at later.
        That ends when nothing more is found and no name is new.

        Args:
            count: How many, at the most.
            above: Only those above it.
            but: Steps to pass over.
            found: What `find` gave just now, if it was asked.

        Raises:
            StorageError: They cannot be listed.
        """
        listed = dict.fromkeys(await self.listed()) if found is None else _told(found)
        newest = await self._highest(count, listed, above, but)
        if found is not None or above >= 0:  # there is another one at any rate
            return newest
        for _ in range(_MAX_TRIES):
            top = newest[-1] if newest else -1
            higher = sorted(step for step in listed if step > top and step not in but)
            if newest and not higher:
                break
            found_now = await self._committed(dict.fromkeys(higher))
            newest = [*newest, *found_now][-count:]
            before, listed = listed, dict.fromkeys(await self.listed())
            if not found_now and listed.keys() == before.keys():
                break
        return newest

    async def _highest(
        self, count: int, listed: Mapping[int, bool | None], above: int, but: Collection[int]
    ) -> list[int]:
        """List the highest committed steps of those that are listed; see `newest`."""
        newest: list[int] = []
        for step in sorted(listed, reverse=True):
            if step <= above or len(newest) == count:
                break
            if step in but:
                continue
            try:
                newest += await self._committed({step: listed[step]})
            except StorageError:
                if not newest or above >= 0:
                    raise
                break  # the highest is known, and those below it were asked for as advice
        return newest[::-1]

    async def _committed(self, listed: Mapping[int, bool | None]) -> list[int]:
        """Say which are committed, lowest first; looks where that is not known."""
        known = [step for step, is_committed in listed.items() if is_committed]
        unknown = [step_name(step) for step, told in listed.items() if told is None]
        if unknown:
            looked = await self.root.look(unknown, is_step)
            known += _steps_of(item.name for item in looked if item.version is not None)
        return sorted(known)

    async def unread(self, found: Sequence[Found]) -> list[int]:
        """List the steps that were found, have no record, and are still there, lowest first.

        Args:
            found: What `find` gave, and `plan` was asked about last.

        Raises:
            StorageError: They cannot be looked at.
        """
        committed = [item.name for item in found if item.version is not None]
        told = [
            step
            for name, step in zip(committed, _steps_of(committed), strict=True)
            if name not in self._known
        ]
        return await self._committed(dict.fromkeys(told))

    async def records(self) -> list[StepRecord]:
        """Read what is known of each committed step, lowest first.

        Steps whose manifests cannot be read are left out: nobody could load them, so they
        count for nothing; and nobody removes them.

        Raises:
            StorageError: They cannot be listed.
        """
        return (await self._read(await self.find()))[0]

    async def _read(
        self, listed: Sequence[Found], *, aside: bool = False
    ) -> tuple[list[StepRecord], StorageError | None]:
        """Read records; gives them, and why one could not be read if the storage said so."""
        before = self._known
        found = [item for item in listed if item.version is not None]
        news = [item for item in found if before.get(item.name, (None,))[0] != item.version]
        names = [item.name for item in news]
        read = await self.root.read_manifests(names, _record_of, aside=aside)
        answers = dict(zip(news, read, strict=True))
        known: dict[str, tuple[Hashable, StepRecord, int]] = {}
        failure: StorageError | None = None
        for item in found:
            answer = answers[item] if item in answers else before[item.name][1:]
            if isinstance(answer, (FormatError, CheckpointNotFoundError)):
                continue  # nothing to count on, or gone meanwhile
            if isinstance(answer, StorageError):
                failure = failure or answer
            else:
                known[item.name] = (item.version, *answer)
        self._known = known
        records = sorted((r for _, r, _ in known.values()), key=lambda record: record.step)
        return records, failure

    async def plan(
        self,
        policy: Retention,
        exempt: Collection[int] = (),
        found: Sequence[Found] | None = None,
        *,
        called: Sequence[str] = (),
        aside: bool = False,
    ) -> dict[int, str]:
        """Say which steps a policy does not keep, lowest first, and the id of each one's save.

        Args:
            policy: What to keep.
            exempt: Steps that stay whatever it says.
            found: What `find` gave just now, if it was asked.
            called: Ids of saves in the order of their calls; see `plan_removals`.
            aside: As in `find`.

        Raises:
            StorageError: Steps cannot be listed, or the storage does not give a manifest now:
                a policy that saw fewer steps than there are would let the wrong ones go.
            Exception: What the policy raises.
        """
        listed = await self.find() if found is None else found
        records, failure = await self._read(listed, aside=aside)
        if failure is not None:
            raise failure
        removals = await run_blocking(
            self._executor,
            lambda: plan_removals(records, policy, exempt=exempt, called=called),
        )
        save_ids = {record.step: record.save_id for record in records}
        return {step: save_ids[step] for step in removals}

    async def size(self, step: int) -> int:
        """Say how many bytes a step has; 0 if its manifest cannot be read.

        By what `records` or `plan` read last, if they have seen it.
        """
        if (known := self._known.get(step_name(step))) is not None:
            return known[2]
        try:
            data = await self.root.read_manifest(step_name(step))
            return (await run_blocking(self._executor, decode_summary, data)).nbytes
        except (FormatError, StorageError):
            return 0

    async def remove(self, step: int, save_id: str | None = None) -> Removal:
        """Remove a step. A failure is an event, not an error.

        If this is cancelled, it first removes the step and sends the event; in a store that does
        not answer, it gives up after ten seconds, and leaves what a killed process would leave.
        (A thread that removes files cannot be cut off, and is waited for.)

        Args:
            step: Its number.
            save_id: The save that `plan` has seen there: a step that was saved again since stays.
                Any if not given.
        """
        grace_s = None if isinstance(self.root, LocalRoot) else GRACE_S
        return await shielded(self._remove(step, save_id), grace_s=grace_s)

    async def _remove(self, step: int, save_id: str | None) -> Removal:
        name = step_name(step)
        try:
            nbytes = await self.root.remove(name, save_id)
        except CheckpointNotFoundError:
            return Removal(step=step, nbytes=0)  # somebody else was faster
        except asyncio.CancelledError:
            cut = OSError(errno.ETIMEDOUT, "the run ends, and the removal did not")
            self._emit(CleanupFailed(path=self.root.join(name), file="", error=cut))
            raise
        except (FormatError, StorageError) as error:
            cause = error if isinstance(error, OSError) else OSError(str(error))
            self._emit(CleanupFailed(path=self.root.join(name), file="", error=cause))
            return Removal(step=step, nbytes=await self.size(step), error=error)
        self._emit(CheckpointRemoved(path=self.root.join(name), step=step, nbytes=nbytes))
        return Removal(step=step, nbytes=nbytes)

    def sweep_pause_s(self, quiet_s: float) -> float:
        """Say after how many seconds another sweep is worth what it costs.

        As long as a leftover has to be quiet; in an object store, where each step costs a request,
        an hour at least.
        """
        return quiet_s if isinstance(self.root, LocalRoot) else max(quiet_s, QUIET_S)

    async def sweep(
        self, quiet_s: float, exempt: Callable[[], Collection[int]], found: Sequence[Found]
    ) -> None:
        """Remove what dead saves left under names of steps.

        Args:
            quiet_s: How long nothing must have been written there, in seconds.
            exempt: Gives the steps to leave alone; asked before each.
            found: What `find` gave just now.
        """
        for item in found:
            if item.version is not None or parse_name(item.name) in exempt():
                continue
            try:
                await self.root.sweep(item.name, quiet_s)
            except StorageError as error:
                self._emit(CleanupFailed(path=self.root.join(item.name), file="", error=error))


def _record_of(name: str, manifest: bytes) -> tuple[StepRecord, int]:
    """Read the record of a step from its name and manifest; see `record_of`."""
    step = parse_name(name)
    assert step is not None  # noqa: S101  # only steps are looked for
    return record_of(step, manifest)


def _told(found: Sequence[Found]) -> dict[int, bool | None]:
    """Give the steps that were looked at, and whether each is committed."""
    told = {item.name: item.version is not None for item in found}
    return dict(zip(_steps_of(told), told.values(), strict=True))


def _steps_of(names: Iterable[str]) -> list[int]:
    """Give the steps of names that are all some step's."""
    return [step for name in names if (step := parse_name(name)) is not None]
